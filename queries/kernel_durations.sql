-- kernel_durations: how do the durations of each kernel class spread?
--
-- Percentiles are within 0.6 % of the exact ones, and between the shortest and the longest: durations are counted
-- in bins of 1.1 % each, so that one pass over the launches is enough and memory does not grow with their number.
-- Launches that were rolled up count; their bins are the same.
--
-- Columns:
--   kernel_class_id  BIGINT   -         Which kernel with which shape.
--   kernel           VARCHAR  -         Demangled name.
--   launches         BIGINT   launches  Launches whose duration is known.
--   total_ns         BIGINT   ns        Sum of their durations.
--   mean_ns          DOUBLE   ns        Mean duration.
--   shortest_ns      BIGINT   ns        Shortest launch.
--   p50_ns           DOUBLE   ns        Half of the launches took at most so long.
--   p90_ns           DOUBLE   ns        Nine of ten did.
--   p99_ns           DOUBLE   ns        All but a hundredth did.
--   longest_ns       BIGINT   ns        Longest launch.
WITH counted AS (
    SELECT
        kernel_class_id,
        CASE WHEN duration_ns > 0 THEN CAST(floor(ln(duration_ns) * 92.0E0) AS INTEGER) ELSE -1 END AS bin,
        count(*) AS launches,
        sum(duration_ns) AS total_ns,
        min(duration_ns) AS shortest_ns,
        max(duration_ns) AS longest_ns
    FROM _launches
    WHERE duration_ns IS NOT NULL AND kernel_class_id IS NOT NULL
    GROUP BY
        kernel_class_id,
        CASE WHEN duration_ns > 0 THEN CAST(floor(ln(duration_ns) * 92.0E0) AS INTEGER) ELSE -1 END
),
with_rolled_up AS (
    SELECT * FROM counted
    UNION ALL
    SELECT kernel_class_id, bin, launches, NULL, NULL, NULL FROM _kernel_histograms
    UNION ALL
    -- What has no bins: behind all others, without launches.
    SELECT kernel_class_id, 10000, 0, total_ns, shortest_ns, longest_ns FROM _rolled_up WHERE launches_timed > 0
),
running AS (
    SELECT
        *,
        sum(launches) OVER (
            PARTITION BY kernel_class_id ORDER BY bin ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
        ) AS so_far,
        sum(launches) OVER (PARTITION BY kernel_class_id) AS all_launches
    FROM with_rolled_up
),
found AS (
    SELECT
        kernel_class_id,
        CAST(sum(launches) AS BIGINT) AS launches,
        TRY_CAST(sum(total_ns) AS BIGINT) AS total_ns,
        CAST(sum(total_ns) AS DOUBLE) / sum(launches) AS mean_ns,
        min(shortest_ns) AS shortest_ns,
        min(CASE WHEN so_far >= 0.5E0 * all_launches THEN bin END) AS p50,
        min(CASE WHEN so_far >= 0.9E0 * all_launches THEN bin END) AS p90,
        min(CASE WHEN so_far >= 0.99E0 * all_launches THEN bin END) AS p99,
        max(longest_ns) AS longest_ns
    FROM running
    GROUP BY kernel_class_id
)
SELECT
    f.kernel_class_id, c.name AS kernel, f.launches, f.total_ns, f.mean_ns, f.shortest_ns,
    least(greatest(exp((f.p50 + 0.5E0) / 92.0E0), CAST(f.shortest_ns AS DOUBLE)), CAST(f.longest_ns AS DOUBLE)) AS p50_ns,
    least(greatest(exp((f.p90 + 0.5E0) / 92.0E0), CAST(f.shortest_ns AS DOUBLE)), CAST(f.longest_ns AS DOUBLE)) AS p90_ns,
    least(greatest(exp((f.p99 + 0.5E0) / 92.0E0), CAST(f.shortest_ns AS DOUBLE)), CAST(f.longest_ns AS DOUBLE)) AS p99_ns,
    f.longest_ns
FROM found AS f
LEFT JOIN kernel_classes AS c ON c.kernel_class_id = f.kernel_class_id
ORDER BY f.total_ns DESC NULLS LAST, f.kernel_class_id
