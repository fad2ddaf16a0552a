-- launch_gaps: how long did each stream stand idle between its kernels and copies?
--
-- In a pause of the recorder nobody knows what ran, so it is neither a gap nor part of one.
--
-- Columns:
--   process         VARCHAR  -       Which process.
--   device_id       INTEGER  -       CUDA ordinal in the process.
--   context_id      BIGINT   -       CUPTI's context id.
--   stream_id       BIGINT   -       CUPTI's stream id.
--   activities      BIGINT   -       Kernels, copies and sets with known times.
--   span_ns         BIGINT   ns      From the first one's start to the last one's end.
--   paused_ns       BIGINT   ns      Of it, between two of them and in a pause of the recorder.
--   gaps            BIGINT   gaps    Times that nothing ran between two of them, and nothing was paused.
--   gap_ns          BIGINT   ns      Length of all gaps.
--   gap_share       DOUBLE   1       gap_ns over span_ns without paused_ns, 0 to 1.
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
spans AS (
    SELECT
        process, device_id, context_id, stream_id,
        count(*) AS activities, min(start_ns) AS first_ns, max(end_ns) AS last_ns
    FROM activities
    GROUP BY process, device_id, context_id, stream_id
),
instants AS (
    SELECT process, device_id, context_id, stream_id, start_ns, end_ns, FALSE AS is_pause
    FROM activities
    UNION ALL
    SELECT
        s.process, s.device_id, s.context_id, s.stream_id, p.start_ns, least(p.end_ns, s.last_ns), TRUE
    FROM spans AS s
    JOIN _pause_spans AS p ON p.process = s.process AND p.start_ns > s.first_ns AND p.start_ns < s.last_ns
),
followed AS (
    SELECT
        *,
        -- A stream runs one thing after another; a pause may reach over some that were launched before it.
        max(end_ns) OVER (
            PARTITION BY stream_id, context_id, device_id, process ORDER BY start_ns, end_ns
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS covered_ns
    FROM instants
),
pieces AS (
    SELECT
        process, device_id, context_id, stream_id,
        start_ns - covered_ns AS gap_ns,
        CASE WHEN is_pause THEN greatest(end_ns - greatest(start_ns, covered_ns), 0) END AS paused_ns
    FROM followed
),
sums AS (
    SELECT
        process, device_id, context_id, stream_id,
        CAST(COALESCE(sum(paused_ns), 0) AS BIGINT) AS paused_ns,
        count(CASE WHEN gap_ns > 0 THEN 1 END) AS gaps,
        CAST(COALESCE(sum(CASE WHEN gap_ns > 0 THEN gap_ns END), 0) AS BIGINT) AS gap_ns,
        avg(CASE WHEN gap_ns > 0 THEN gap_ns END) AS mean_gap_ns,
        max(CASE WHEN gap_ns > 0 THEN gap_ns END) AS longest_gap_ns
    FROM pieces
    GROUP BY process, device_id, context_id, stream_id
)
SELECT
    s.process, s.device_id, s.context_id, s.stream_id,
    s.activities,
    s.last_ns - s.first_ns AS span_ns,
    g.paused_ns,
    g.gaps,
    g.gap_ns,
    CAST(g.gap_ns AS DOUBLE) / NULLIF(s.last_ns - s.first_ns - g.paused_ns, 0) AS gap_share,
    g.mean_gap_ns,
    g.longest_gap_ns
FROM spans AS s
-- Imported traces may lack contexts and streams, and NULL equals nothing.
JOIN sums AS g
    ON g.process = s.process AND g.device_id = s.device_id
    AND COALESCE(g.context_id, -1) = COALESCE(s.context_id, -1)
    AND COALESCE(g.stream_id, -1) = COALESCE(s.stream_id, -1)
ORDER BY g.gap_ns DESC, s.process, s.device_id, s.context_id, s.stream_id
