-- launch_gaps: how long did each stream stand idle between its kernels and copies?
--
-- Columns:
--   process         VARCHAR  -       Which process.
--   device_id       INTEGER  -       CUDA ordinal in the process.
--   context_id      BIGINT   -       CUPTI's context id.
--   stream_id       BIGINT   -       CUPTI's stream id.
--   activities      BIGINT   -       Kernels, copies and sets with known times.
--   span_ns         BIGINT   ns      From the first one's start to the last one's end.
--   gaps            BIGINT   gaps    Times that nothing ran between two of them.
--   gap_ns          BIGINT   ns      Length of all gaps.
--   gap_share       DOUBLE   1       gap_ns over span_ns, 0 to 1.
--   mean_gap_ns     DOUBLE   ns      Mean length of a gap.
--   longest_gap_ns  BIGINT   ns      The longest gap.
WITH activities AS (
    SELECT process, device_id, context_id, stream_id, start_ns, end_ns
    FROM kernels
    WHERE end_ns IS NOT NULL
    UNION ALL
    SELECT process, device_id, context_id, stream_id, start_ns, start_ns + duration_ns AS end_ns
    FROM copies
    WHERE start_ns BETWEEN 0 AND 4000000000000000000 AND duration_ns BETWEEN 0 AND 1000000000000000
),
gaps AS (
    SELECT
        *,
        -- A stream runs one thing after another, so the one before is the one that ended last.
        start_ns - lag(end_ns) OVER (
            PARTITION BY stream_id, context_id, device_id, process ORDER BY start_ns, end_ns
        ) AS gap_ns
    FROM activities
)
SELECT
    process, device_id, context_id, stream_id,
    count(*) AS activities,
    max(end_ns) - min(start_ns) AS span_ns,
    count(CASE WHEN gap_ns > 0 THEN 1 END) AS gaps,
    CAST(COALESCE(sum(CASE WHEN gap_ns > 0 THEN gap_ns END), 0) AS BIGINT) AS gap_ns,
    CAST(COALESCE(sum(CASE WHEN gap_ns > 0 THEN gap_ns END), 0) AS DOUBLE)
        / NULLIF(max(end_ns) - min(start_ns), 0) AS gap_share,
    avg(CASE WHEN gap_ns > 0 THEN gap_ns END) AS mean_gap_ns,
    max(CASE WHEN gap_ns > 0 THEN gap_ns END) AS longest_gap_ns
FROM gaps
GROUP BY process, device_id, context_id, stream_id
ORDER BY gap_ns DESC, process, device_id, context_id, stream_id
