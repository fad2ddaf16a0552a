-- kernels: kernel launches, one row each, with duration (however it was obtained) and range.
--
-- A launch belongs to the innermost range open when it was queued, in its process. It meets only the pieces of
-- _range_segments in the same piece of _range_grid, by a hash join: nothing is sorted. A window over launches and
-- pieces together, and an ASOF join, sort all launches: 7.3 CPU s and 1.7 GB at 10 M where this takes 0.6 and 0.2.
--
-- Columns:
--   start_ns         BIGINT   ns  When it started on the GPU; NULL under the exact profiler.
--   end_ns           BIGINT   ns  When it ended on the GPU.
--   duration_ns      BIGINT   ns  How long it ran.
--   duration_method  VARCHAR  -   timeline, or exact (measured by the profiler); NULL where the duration is.
--   kernel_class_id  BIGINT   -   Which kernel with which shape: see kernel_classes.
--   device_id        INTEGER  -   CUDA ordinal in the process.
--   context_id       BIGINT   -   CUPTI's context id.
--   stream_id        BIGINT   -   CUPTI's stream id.
--   graph_id         BIGINT   -   CUDA graph the launch came from.
--   graph_node_id    BIGINT   -   Node in that graph.
--   correlation_id   BIGINT   -   One an API call; the nodes of one graph launch share it.
--   queued_ns        BIGINT   ns  When the launch call was made (host).
--   range_id         BIGINT   -   Innermost range open at queued_ns; NULL where none was.
--   process          VARCHAR  -   Which process wrote the row.
SELECT
    k.start_ns, k.end_ns, k.duration_ns, k.duration_method,
    k.kernel_class_id, k.device_id, k.context_id, k.stream_id, k.graph_id, k.graph_node_id,
    k.correlation_id, k.queued_ns,
    r.range_id,
    k.process
FROM _launches AS k
LEFT JOIN _range_grid AS g ON g.process = k.process
LEFT JOIN _range_buckets AS r
    ON r.process = k.process
    AND r.bucket = least(greatest(k.queued_ns // g.width_ns, g.first_bucket), g.last_bucket)
    AND k.queued_ns >= r.start_ns
    AND k.queued_ns <= r.last_ns
