-- _launch_segments: launches of each process added up between the instants at which a range opens or closes or a
-- clock is read, by when they were called.
--
-- Ranges and steps are added up from these: none begins or ends within one. Launches without queued_ns are left out.
-- nanalyze itself works this out for large runs in one pass (analysis/launch_scan.py), the same rows.
--
-- Columns:
--   process           VARCHAR  -         Which process.
--   start_ns          BIGINT   ns        The instant: launches from here on, before the next one; NULL before the first.
--   launches          BIGINT   launches  All launches.
--   launches_timed    BIGINT   launches  Those whose duration is known.
--   total_ns          HUGEINT  ns        Sum of the known durations; NULL where none is known.
--   replayed          BIGINT   launches  Those replayed for counters, or without a known duration.
--   first_ns          BIGINT   ns        First start of those whose start and end are known.
--   last_ns           BIGINT   ns        Last end of those.
--   kernel_ns         HUGEINT  ns        Time, start to end, of those that do not communicate.
--   communication_ns  HUGEINT  ns        Time of those that do.
WITH instants AS (
    SELECT
        k.process, k.queued_ns AS at_ns, 1 AS is_launch, CAST(NULL AS BIGINT) AS cut_ns,
        k.start_ns, k.end_ns, k.duration_ns, k.duration_method,
        c.kernel_class_id IS NOT NULL AS is_communication
    FROM _launches AS k
    LEFT JOIN _communicating AS c ON c.kernel_class_id = k.kernel_class_id
    WHERE k.queued_ns IS NOT NULL
    UNION ALL
    SELECT process, at_ns, 0, at_ns, NULL, NULL, NULL, NULL, NULL
    FROM _launch_cuts
),
placed AS (
    SELECT
        process, is_launch, start_ns, end_ns, duration_ns, duration_method, is_communication,
        max(cut_ns) OVER (
            PARTITION BY process ORDER BY at_ns, is_launch ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
        ) AS cut_ns
    FROM instants
)
SELECT
    process, cut_ns AS start_ns,
    count(*) AS launches,
    count(duration_ns) AS launches_timed,
    sum(duration_ns) AS total_ns,
    count(CASE WHEN duration_method IS NULL OR duration_method <> 'timeline' THEN 1 END) AS replayed,
    min(CASE WHEN end_ns IS NOT NULL THEN start_ns END) AS first_ns,
    max(end_ns) AS last_ns,
    COALESCE(sum(CASE WHEN NOT is_communication THEN end_ns - start_ns END), 0) AS kernel_ns,
    COALESCE(sum(CASE WHEN is_communication THEN end_ns - start_ns END), 0) AS communication_ns
FROM placed
WHERE is_launch = 1
GROUP BY process, cut_ns
