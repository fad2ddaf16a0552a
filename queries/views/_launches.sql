-- _launches: kernel launches with their duration, however it was obtained, but without their range.
--
-- Durations that are negative or longer than 11 days are not believed and read as NULL, and so is
-- the end of a launch whose start lies outside 1970 to 2096.
--
-- Columns:
--   start_ns         BIGINT   ns  When it started on the GPU; NULL under the exact profiler.
--   end_ns           BIGINT   ns  When it ended on the GPU.
--   duration_ns      BIGINT   ns  How long it ran.
--   duration_method  VARCHAR  -   timeline, or exact (measured by the profiler); NULL where the duration is.
--   kernel_class_id  BIGINT   -   Which kernel with which shape.
--   device_id        INTEGER  -   CUDA ordinal in the process.
--   context_id       BIGINT   -   CUPTI's context id.
--   stream_id        BIGINT   -   CUPTI's stream id.
--   graph_id         BIGINT   -   CUDA graph the launch came from.
--   graph_node_id    BIGINT   -   Node in that graph.
--   correlation_id   BIGINT   -   One an API call; the nodes of one graph launch share it.
--   queued_ns        BIGINT   ns  When the launch call was made (host).
--   process          VARCHAR  -   Which process wrote the row.
WITH believed AS (
    SELECT
        start_ns,
        CASE WHEN duration_ns BETWEEN 0 AND 1000000000000000 THEN duration_ns END AS duration_ns,
        kernel_class_id, device_id, context_id, stream_id, graph_id, graph_node_id,
        correlation_id, queued_ns, process
    FROM raw.kernels
)
SELECT
    b.start_ns,
    CASE WHEN b.start_ns BETWEEN 0 AND 4000000000000000000 THEN b.start_ns + b.duration_ns END AS end_ns,
    COALESCE(b.duration_ns, e.duration_ns) AS duration_ns,
    CASE
        WHEN b.duration_ns IS NOT NULL THEN 'timeline'
        WHEN e.duration_ns IS NOT NULL THEN 'exact'
    END AS duration_method,
    b.kernel_class_id, b.device_id, b.context_id, b.stream_id, b.graph_id, b.graph_node_id,
    b.correlation_id, b.queued_ns, b.process
FROM believed AS b
LEFT JOIN _exact_durations AS e
    -- A condition on one side alone would be no hash join in DuckDB 1.4.
    ON e.process = b.process AND e.correlation_id = CASE WHEN b.graph_id IS NULL THEN b.correlation_id END
