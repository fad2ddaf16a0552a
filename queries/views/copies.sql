-- copies: memory copies and sets on the GPU, one row each.
--
-- Columns:
--   start_ns               BIGINT   ns     When it started.
--   duration_ns            BIGINT   ns     How long it took.
--   kind                   VARCHAR  -      memset, or HtoD, DtoH, DtoD, HtoH, PtoP, ... for copies.
--   bytes                  BIGINT   bytes  Bytes copied or set.
--   source                 VARCHAR  -      Memory kind copied from: pageable, pinned, device, array, managed.
--   destination            VARCHAR  -      Memory kind copied or set to.
--   device_id              INTEGER  -      CUDA ordinal in the process.
--   source_device_id       INTEGER  -      For peer copies.
--   destination_device_id  INTEGER  -      For peer copies.
--   context_id             BIGINT   -      CUPTI's context id.
--   stream_id              BIGINT   -      CUPTI's stream id.
--   is_async               BOOLEAN  -      Whether the call was asynchronous.
--   graph_id               BIGINT   -      CUDA graph it came from.
--   graph_node_id          BIGINT   -      Node in that graph.
--   correlation_id         BIGINT   -      CUPTI's correlation id.
--   process                VARCHAR  -      Which process wrote the row.
SELECT
    start_ns, duration_ns, kind, bytes, source, destination, device_id, source_device_id,
    destination_device_id, context_id, stream_id, is_async, graph_id, graph_node_id,
    correlation_id, process
FROM raw.copies
