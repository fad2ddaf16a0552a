-- _stream_time: how long each stream stood idle between its kernels and copies, as sums.
--
-- In a pause of the recorder nobody knows what ran, so it is neither a gap nor part of one.
--
-- Exact, without sorting all launches at once: they are laid into bins of 2^24 ns by their start, and in each bin
-- starts and ends are sorted apart. Before the i-th start nothing runs if and only if it comes after the
-- (i-1)-th end of the sorted ends, and after the latest end of all bins before. The bins take some 20 bytes of memory
-- a launch. nanalyze itself works this out for large runs in one pass in order of time, in memory that does not grow
-- with the run (analysis/launch_streams.py), the same rows.
--
-- Columns:
--   process         VARCHAR  -           Which process.
--   device_id       INTEGER  -           CUDA ordinal in the process.
--   context_id      BIGINT   -           CUPTI's context id.
--   stream_id       BIGINT   -           CUPTI's stream id.
--   activities      BIGINT   activities  Kernels, copies and sets with known times.
--   first_ns        BIGINT   ns          Start of the first one.
--   last_ns         BIGINT   ns          Latest end of one.
--   paused_ns       BIGINT   ns          Time between them in a pause of the recorder, in which none ran.
--   gaps            BIGINT   gaps        Times that nothing ran between two of them, and nothing was paused.
--   gap_ns          BIGINT   ns          Length of all gaps.
--   longest_gap_ns  BIGINT   ns          The longest gap; NULL where there is none.
WITH bins AS (
    SELECT
        process, device_id, context_id, stream_id, start_ns // 16777216 AS bin,
        count(*) AS activities, min(start_ns) AS first_ns, max(end_ns) AS last_ns
    FROM _activities
    GROUP BY process, device_id, context_id, stream_id, start_ns // 16777216
),
spans AS (
    SELECT
        process, device_id, context_id, stream_id,
        CAST(sum(activities) AS BIGINT) AS activities, min(first_ns) AS first_ns, max(last_ns) AS last_ns
    FROM bins
    GROUP BY process, device_id, context_id, stream_id
),
pausing AS (
    SELECT
        s.process, s.device_id, s.context_id, s.stream_id,
        p.start_ns, least(p.end_ns, s.last_ns) AS end_ns, p.start_ns // 16777216 AS bin,
        max(p.end_ns) OVER (
            PARTITION BY s.stream_id, s.context_id, s.device_id, s.process ORDER BY p.start_ns, p.end_ns
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS paused_until_ns
    FROM spans AS s
    JOIN _pause_spans AS p ON p.process = s.process AND p.start_ns > s.first_ns AND p.start_ns < s.last_ns
),
reached AS (
    SELECT
        process, device_id, context_id, stream_id, bin,
        max(max(last_ns)) OVER (
            PARTITION BY stream_id, context_id, device_id, process ORDER BY bin
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS reached_ns
    FROM (
        SELECT process, device_id, context_id, stream_id, bin, last_ns FROM bins
        UNION ALL
        SELECT process, device_id, context_id, stream_id, bin, end_ns FROM pausing
    ) AS both_kinds
    GROUP BY process, device_id, context_id, stream_id, bin
),
-- From the start of the bin, so that a start takes four bytes.
sorted AS (
    SELECT
        process, device_id, context_id, stream_id, start_ns // 16777216 AS bin,
        count(*) AS instants,
        list_sort(list(CAST(start_ns % 16777216 AS INTEGER))) AS starts,
        list_sort(list(start_ns % 16777216 + end_ns - start_ns)) AS ends
    FROM (
        SELECT process, device_id, context_id, stream_id, start_ns, end_ns FROM _activities
        UNION ALL
        SELECT process, device_id, context_id, stream_id, start_ns, end_ns FROM pausing
    ) AS instants
    GROUP BY process, device_id, context_id, stream_id, start_ns // 16777216
),
places AS (
    SELECT
        s.process, s.device_id, s.context_id, s.stream_id, s.starts, s.ends,
        r.reached_ns - s.bin * 16777216 AS reached_ns,
        unnest(range(1, s.instants + 1)) AS place
    FROM sorted AS s
    -- Imported traces may lack contexts and streams, and NULL equals nothing.
    JOIN reached AS r
        ON r.process = s.process AND r.device_id = s.device_id AND r.bin = s.bin
        AND r.context_id IS NOT DISTINCT FROM s.context_id AND r.stream_id IS NOT DISTINCT FROM s.stream_id
),
pieces AS (
    SELECT
        process, device_id, context_id, stream_id,
        list_extract(starts, place)
            - greatest(reached_ns, CASE WHEN place > 1 THEN list_extract(ends, place - 1) END) AS gap_ns
    FROM places
),
gaps AS (
    SELECT
        process, device_id, context_id, stream_id,
        count(CASE WHEN gap_ns > 0 THEN 1 END) AS gaps,
        CAST(COALESCE(sum(CASE WHEN gap_ns > 0 THEN gap_ns END), 0) AS BIGINT) AS gap_ns,
        max(CASE WHEN gap_ns > 0 THEN gap_ns END) AS longest_gap_ns
    FROM pieces
    GROUP BY process, device_id, context_id, stream_id
),
-- A pause may reach over some that were launched before it.
covered AS (
    SELECT
        p.process, p.device_id, p.context_id, p.stream_id, p.start_ns, p.end_ns,
        max(r.reached_ns) AS reached_ns, max(p.paused_until_ns) AS paused_until_ns, max(i.end_ns) AS ran_until_ns
    FROM pausing AS p
    JOIN reached AS r
        ON r.process = p.process AND r.device_id = p.device_id AND r.bin = p.bin
        AND r.context_id IS NOT DISTINCT FROM p.context_id AND r.stream_id IS NOT DISTINCT FROM p.stream_id
    LEFT JOIN _activities AS i
        ON i.process = p.process AND i.device_id = p.device_id AND i.start_ns // 16777216 = p.bin
        AND i.context_id IS NOT DISTINCT FROM p.context_id AND i.stream_id IS NOT DISTINCT FROM p.stream_id
        AND (i.start_ns < p.start_ns OR (i.start_ns = p.start_ns AND i.end_ns < p.end_ns))
    GROUP BY p.process, p.device_id, p.context_id, p.stream_id, p.start_ns, p.end_ns
),
paused AS (
    SELECT
        process, device_id, context_id, stream_id,
        CAST(sum(greatest(end_ns - greatest(start_ns, reached_ns, paused_until_ns, ran_until_ns), 0)) AS BIGINT) AS paused_ns
    FROM covered
    GROUP BY process, device_id, context_id, stream_id
)
SELECT
    s.process, s.device_id, s.context_id, s.stream_id,
    s.activities, s.first_ns, s.last_ns,
    COALESCE(p.paused_ns, 0) AS paused_ns,
    g.gaps, g.gap_ns, g.longest_gap_ns
FROM spans AS s
JOIN gaps AS g
    ON g.process = s.process AND g.device_id = s.device_id
    AND g.context_id IS NOT DISTINCT FROM s.context_id AND g.stream_id IS NOT DISTINCT FROM s.stream_id
LEFT JOIN paused AS p
    ON p.process = s.process AND p.device_id = s.device_id
    AND p.context_id IS NOT DISTINCT FROM s.context_id AND p.stream_id IS NOT DISTINCT FROM s.stream_id
