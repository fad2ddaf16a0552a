-- kernel_classes: one row for each kernel with its launch shape and resources, whichever processes launched
-- it.
--
-- Columns:
--   kernel_class_id         BIGINT   -          The hash.
--   name_mangled            VARCHAR  -          Symbol name; bytes that are not UTF-8 appear as \xNN.
--   name                    VARCHAR  -          Demangled name.
--   grid_x                  INTEGER  blocks     Grid.
--   grid_y                  INTEGER  blocks     Grid.
--   grid_z                  INTEGER  blocks     Grid.
--   block_x                 INTEGER  threads    Block.
--   block_y                 INTEGER  threads    Block.
--   block_z                 INTEGER  threads    Block.
--   cluster_x               INTEGER  blocks     Thread-block cluster; 0 where none is used.
--   cluster_y               INTEGER  blocks     Thread-block cluster.
--   cluster_z               INTEGER  blocks     Thread-block cluster.
--   registers_per_thread    INTEGER  registers  As compiled.
--   static_shared_bytes     BIGINT   bytes      Static shared memory a block.
--   dynamic_shared_bytes    BIGINT   bytes      Dynamic shared memory a block.
--   local_bytes_per_thread  BIGINT   bytes      Local memory a thread.
SELECT
    kernel_class_id, name_mangled, name, grid_x, grid_y, grid_z, block_x, block_y, block_z,
    cluster_x, cluster_y, cluster_z, registers_per_thread, static_shared_bytes,
    dynamic_shared_bytes, local_bytes_per_thread
FROM raw.kernel_classes
QUALIFY row_number() OVER (PARTITION BY kernel_class_id ORDER BY name, process) = 1
