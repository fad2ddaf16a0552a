-- top_kernels: which kernels take the most GPU time?
--
-- Parameters:
--   rows  INTEGER  20  How many.
--
-- Columns:
--   kernel_class_id   BIGINT   -         Which kernel with which shape.
--   kernel            VARCHAR  -         Demangled name.
--   grid_blocks       BIGINT   blocks    Blocks of the grid.
--   block_threads     BIGINT   threads   Threads of a block.
--   launches          BIGINT   launches  All launches, those that were rolled up too.
--   launches_untimed  BIGINT   launches  Those whose duration is not known.
--   total_ns          BIGINT   ns        Sum of the known durations.
--   share             DOUBLE   1         Of all kernel time, 0 to 1.
--   share_so_far      DOUBLE   1         Of this and all larger ones together.
--   mean_ns           DOUBLE   ns        Mean duration.
--   shortest_ns       BIGINT   ns        Shortest launch.
--   longest_ns        BIGINT   ns        Longest launch.
--   bound             VARCHAR  -         See verdicts.
--   level_or_pipe     VARCHAR  -         See verdicts.
WITH extremes AS (
    SELECT kernel_class_id, min(shortest_ns) AS shortest_ns, max(longest_ns) AS longest_ns
    FROM (
        SELECT kernel_class_id, duration_ns AS shortest_ns, duration_ns AS longest_ns
        FROM _launches
        UNION ALL
        SELECT kernel_class_id, shortest_ns, longest_ns
        FROM _rolled_up
    ) AS found
    GROUP BY kernel_class_id
)
SELECT
    v.kernel_class_id, v.kernel,
    CASE
        WHEN c.grid_y < 100000 AND c.grid_z < 100000 THEN CAST(c.grid_x AS BIGINT) * c.grid_y * c.grid_z
    END AS grid_blocks,
    CASE
        WHEN c.block_y < 100000 AND c.block_z < 100000 THEN CAST(c.block_x AS BIGINT) * c.block_y * c.block_z
    END AS block_threads,
    v.launches, v.launches_untimed, v.total_ns, v.share,
    sum(v.share) OVER (
        ORDER BY v.total_ns DESC NULLS LAST, v.kernel_class_id ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
    ) AS share_so_far,
    v.mean_ns, e.shortest_ns, e.longest_ns, v.bound, v.level_or_pipe
FROM verdicts AS v
LEFT JOIN kernel_classes AS c ON c.kernel_class_id = v.kernel_class_id
LEFT JOIN extremes AS e ON e.kernel_class_id = v.kernel_class_id
ORDER BY v.total_ns DESC NULLS LAST, v.kernel_class_id
LIMIT $rows
