-- kernels: kernel launches, one row each, with duration (however it was obtained) and range.
--
-- A launch belongs to the innermost range open when it was queued, in its process. The launches
-- are sorted together with the pieces of _range_segments and each takes the last piece before
-- it: no join, so no blow-up; where range_id is not selected DuckDB 2.0 drops the sort. The last
-- piece is a running maximum: last_value(... IGNORE NULLS) looks back launch by launch and took
-- 7 minutes at 10 M launches behind 20,000 pieces, the maximum 6 s.
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
WITH instants AS (
    SELECT
        *,
        COALESCE(queued_ns, -9223372036854775807) AS at_ns,
        1 AS is_launch,
        CAST(NULL AS STRUCT(at_ns BIGINT, range_id BIGINT)) AS piece
    FROM _launches
    UNION ALL
    SELECT
        NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, process,
        start_ns, 0, struct_pack(at_ns := start_ns, range_id := range_id)
    FROM _range_segments
),
placed AS (
    SELECT
        *,
        max(piece) OVER (
            PARTITION BY process ORDER BY at_ns, is_launch
            ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
        ) AS innermost
    FROM instants
)
SELECT
    start_ns, end_ns, duration_ns, duration_method,
    kernel_class_id, device_id, context_id, stream_id, graph_id, graph_node_id,
    correlation_id, queued_ns,
    innermost.range_id AS range_id,
    process
FROM placed
WHERE is_launch = 1
