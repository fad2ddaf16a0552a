-- _activities: kernels, copies and sets whose times are known and believed, as intervals on their streams.
--
-- Columns:
--   process     VARCHAR  -   Which process.
--   device_id   INTEGER  -   CUDA ordinal in the process.
--   context_id  BIGINT   -   CUPTI's context id.
--   stream_id   BIGINT   -   CUPTI's stream id.
--   start_ns    BIGINT   ns  When it started on the GPU.
--   end_ns      BIGINT   ns  When it ended on the GPU.
SELECT process, device_id, context_id, stream_id, start_ns, end_ns
FROM _launches
WHERE end_ns IS NOT NULL
UNION ALL
SELECT process, device_id, context_id, stream_id, start_ns, start_ns + duration_ns
FROM copies
WHERE start_ns BETWEEN 0 AND 4000000000000000000 AND duration_ns BETWEEN 0 AND 1000000000000000
