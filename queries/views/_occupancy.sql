-- _occupancy: the most warps of each kernel class that an SM can hold, and what stops it there.
--
-- The rules are those of NVIDIA's cuda_occupancy.h (CUDA 13) for compute capability 5.0 and later:
-- registers are given to a warp in units of 256 and each of the SM's 4 partitions holds whole
-- warps; shared memory is given to a block in units of 128 bytes, the driver's own bytes included.
-- The SM is taken to offer all of its shared memory (the driver may grant a smaller carve-out) and
-- thread-block clusters are not modelled: both can only lower the figure.
--
-- Columns:
--   kernel_class_id            BIGINT   -       Which kernel with which shape.
--   blocks_per_sm              BIGINT   blocks  Resident blocks an SM; NULL where a property is not known.
--   occupancy_limiter          VARCHAR  -       threads, blocks, registers or shared, whichever binds first.
--   theoretical_occupancy_pct  DOUBLE   %       Resident warps over the most that an SM can hold.
--   waves                      DOUBLE   -       Blocks of the grid over the blocks the device holds at once.
--   sm_count                   INTEGER  SMs     SMs of the device that launched the class most.
WITH launched AS (
    SELECT
        c.kernel_class_id, d.sm_count,
        CAST(c.grid_x AS DOUBLE) * c.grid_y * c.grid_z AS grid_blocks,
        -- Shapes that CUDA cannot launch come from damaged or foreign data: no occupancy for them.
        CASE
            WHEN c.block_x BETWEEN 1 AND 1024 AND c.block_y BETWEEN 1 AND 1024 AND c.block_z BETWEEN 1 AND 1024
                THEN c.block_x * c.block_y * c.block_z
        END AS block_threads,
        CASE
            WHEN c.static_shared_bytes BETWEEN 0 AND 1000000000 AND c.dynamic_shared_bytes BETWEEN 0 AND 1000000000
                THEN c.static_shared_bytes + c.dynamic_shared_bytes
        END AS asked_shared_bytes,
        CASE WHEN c.registers_per_thread BETWEEN 0 AND 65536 THEN c.registers_per_thread END AS registers,
        CASE WHEN d.cc_major < 8 THEN 0 ELSE d.shared_reserved_bytes_per_block END AS reserved_shared_bytes,
        NULLIF(d.warp_size, 0) AS warp_size,
        CAST(d.threads_per_sm_max // NULLIF(d.warp_size, 0) AS BIGINT) AS sm_warps,
        CAST(d.blocks_per_sm_max AS BIGINT) AS sm_blocks,
        CAST(d.registers_per_sm // 4 AS BIGINT) AS partition_registers,
        d.shared_bytes_per_sm AS sm_shared_bytes
    FROM kernel_classes AS c
    JOIN _class_totals AS t ON t.kernel_class_id = c.kernel_class_id
    JOIN devices AS d ON d.process = t.process AND d.device_id = t.device_id
),
asked AS (
    SELECT
        *,
        (block_threads + warp_size - 1) // warp_size AS warps,
        (registers * warp_size + 255) // 256 * 256 AS warp_registers,
        (asked_shared_bytes + reserved_shared_bytes + 127) // 128 * 128 AS block_shared_bytes
    FROM launched
),
limits AS (
    SELECT
        *,
        sm_warps // NULLIF(warps, 0) AS by_threads,
        CASE
            WHEN warp_registers = 0 THEN sm_blocks
            ELSE partition_registers // NULLIF(warp_registers, 0) * 4 // NULLIF(warps, 0)
        END AS by_registers,
        CASE
            WHEN block_shared_bytes = 0 THEN sm_blocks
            ELSE sm_shared_bytes // NULLIF(block_shared_bytes, 0)
        END AS by_shared
    FROM asked
),
resident AS (
    SELECT
        *,
        CASE
            WHEN by_threads > 0 AND sm_blocks > 0 AND by_registers > 0 AND by_shared > 0
                THEN least(by_threads, sm_blocks, by_registers, by_shared)
        END AS blocks_per_sm
    FROM limits
)
SELECT
    kernel_class_id, blocks_per_sm,
    CASE blocks_per_sm
        WHEN by_threads THEN 'threads'
        WHEN sm_blocks THEN 'blocks'
        WHEN by_registers THEN 'registers'
        WHEN by_shared THEN 'shared'
    END AS occupancy_limiter,
    100.0E0 * blocks_per_sm * warps / sm_warps AS theoretical_occupancy_pct,
    grid_blocks / NULLIF(blocks_per_sm * sm_count, 0) AS waves,
    sm_count
FROM resident
