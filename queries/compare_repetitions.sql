-- compare_repetitions: what did each repetition of a range cost on the GPU, in all and by kernel class?
--
-- A repetition is a range of the given name with everything that was launched in it or in ranges
-- inside it; one that lies in another of its name belongs to that one. Without a name the timed
-- launches of each process are cut into pieces of equally many launches. Repetitions in which a launch
-- was replayed for counters, or has no known duration, or that touch a pause of the recorder are left
-- out: their times are not the job's, or not all of them are known. Pieces stay, and time in a pause is
-- neither span nor gap of theirs.
-- More than `most` repetitions are added up in batches of consecutive ones; the n-th repetitions of
-- all processes go into one batch, because ranks wait for each other. Idle time is between the first
-- start and the last end of a process' repetition, while none of its kernels ran on any stream.
--
-- Parameters:
--   range_name  VARCHAR  NULL  Name of the range.
--   skip        INTEGER  0     Repetitions of each process to leave out first, as warm-up.
--   most        INTEGER  400   Most batches; without a name the number of pieces.
--   within      VARCHAR  NULL  Only ranges that lie in a range of this name, which may be of another thread.
--
-- Columns:
--   batch             BIGINT   -         Number of the batch, from 0, in order of time.
--   kernel_class_id   BIGINT   -         Which kernel with which shape; NULL for all together.
--   repetitions       BIGINT   -         How many were added up; on the rows without a class.
--   launches          BIGINT   launches  Kernel launches.
--   kernel_ns         BIGINT   ns        Sum of their durations.
--   span_ns           BIGINT   ns        First start to last end; on the rows without a class.
--   gap_ns            BIGINT   ns        Time in that span in which no kernel ran.
--   gaps              BIGINT   gaps      How many such gaps.
--   host_ns           BIGINT   ns        Host time in the ranges.
--   offset_ns         DOUBLE   ns        Mean start of the class' first launch after the first of its repetition.
WITH RECURSIVE enclosed AS (
    SELECT DISTINCT r.process, r.range_id
    FROM ranges AS r
    JOIN ranges AS o
        ON o.process = r.process AND o.start_ns <= r.start_ns AND COALESCE(r.end_ns, r.start_ns) <= o.end_ns
    WHERE r.name = CAST($range_name AS VARCHAR) AND o.name = CAST($within AS VARCHAR)
),
inside (process, range_id, root_id, name, distance) AS (
    SELECT r.process, r.range_id, r.range_id, r.name, 0
    FROM ranges AS r
    LEFT JOIN enclosed AS e ON e.process = r.process AND e.range_id = r.range_id
    WHERE r.name = CAST($range_name AS VARCHAR) AND (CAST($within AS VARCHAR) IS NULL OR e.range_id IS NOT NULL)
    UNION ALL
    SELECT r.process, r.range_id, i.root_id, r.name, i.distance + 1
    FROM inside AS i
    JOIN ranges AS r ON r.process = i.process AND r.parent_id = i.range_id
    -- The limit ends the walk where damaged data has a range enclose itself.
    WHERE i.distance < 200
),
nested AS (
    SELECT DISTINCT process, range_id
    FROM inside
    WHERE distance > 0 AND name = CAST($range_name AS VARCHAR)
),
members AS (
    SELECT DISTINCT i.process, i.range_id, i.root_id
    FROM inside AS i
    LEFT JOIN nested AS n ON n.process = i.process AND n.range_id = i.root_id
    WHERE n.range_id IS NULL
),
launches AS (
    SELECT
        k.process, m.root_id AS piece, k.kernel_class_id,
        -- Without an end the start is not believed either: _launches says when.
        CASE WHEN k.end_ns IS NOT NULL THEN k.start_ns END AS start_ns,
        k.end_ns, k.duration_ns, k.duration_method, k.queued_ns
    FROM kernels AS k
    JOIN members AS m ON m.process = k.process AND m.range_id = k.range_id
    UNION ALL
    SELECT
        process,
        ntile(CAST($most AS BIGINT)) OVER (
            PARTITION BY process
            ORDER BY COALESCE(start_ns, queued_ns), correlation_id, graph_node_id, kernel_class_id
        ),
        kernel_class_id,
        CASE WHEN end_ns IS NOT NULL THEN start_ns END,
        end_ns, duration_ns, duration_method, queued_ns
    FROM _launches
    WHERE CAST($range_name AS VARCHAR) IS NULL AND duration_method = 'timeline'
),
pieces AS (
    SELECT
        process, piece,
        COALESCE(min(start_ns), min(queued_ns)) AS first_ns,
        max(end_ns) AS last_ns,
        count(*) - count(end_ns) AS unplaced,
        count(*) - count(CASE WHEN duration_method = 'timeline' THEN 1 END) AS replayed
    FROM launches
    GROUP BY process, piece
),
paused AS (
    -- What was launched before a pause is known, even if it ran in the pause: the range's own time decides.
    SELECT DISTINCT r.process, r.range_id
    FROM ranges AS r
    JOIN _pause_spans AS s
        ON s.process = r.process
        AND r.start_ns < s.end_ns
        AND COALESCE(r.end_ns, s.start_ns + 1) > s.start_ns
    WHERE r.name = CAST($range_name AS VARCHAR)
),
numbered AS (
    SELECT *, row_number() OVER (PARTITION BY process ORDER BY first_ns, piece) AS number
    FROM pieces
),
counted AS (
    SELECT
        n.process, n.piece, n.first_ns, n.last_ns, n.unplaced,
        row_number() OVER (PARTITION BY n.process ORDER BY n.number) AS place,
        count(*) OVER (PARTITION BY n.process) AS pieces_here
    FROM numbered AS n
    LEFT JOIN paused AS p ON p.process = n.process AND p.range_id = n.piece
    WHERE n.replayed = 0 AND n.number > $skip AND p.range_id IS NULL
),
batched AS (
    SELECT
        process, piece, first_ns, last_ns, unplaced,
        CAST(floor(
            (place - 1) * CAST(least($most, max(pieces_here) OVER ()) AS DOUBLE) / pieces_here
        ) AS BIGINT) AS batch
    FROM counted
),
instants AS (
    SELECT
        b.batch, b.process, b.piece, b.first_ns,
        l.kernel_class_id, l.duration_ns, l.start_ns, l.end_ns, FALSE AS is_pause
    FROM launches AS l
    JOIN batched AS b ON b.process = l.process AND b.piece = l.piece
    UNION ALL
    SELECT
        b.batch, b.process, b.piece, b.first_ns,
        NULL, NULL, greatest(s.start_ns, b.first_ns), least(s.end_ns, b.last_ns), TRUE
    FROM batched AS b
    JOIN _pause_spans AS s ON s.process = b.process AND s.start_ns < b.last_ns AND s.end_ns > b.first_ns
    WHERE CAST($range_name AS VARCHAR) IS NULL
),
followed AS (
    SELECT
        *,
        max(end_ns) OVER (
            PARTITION BY process, piece ORDER BY start_ns, end_ns
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS covered_ns
    FROM instants
),
placed AS (
    SELECT
        batch, process, piece, kernel_class_id, duration_ns, is_pause,
        start_ns - first_ns AS offset_ns,
        start_ns - covered_ns AS gap_ns,
        CASE
            WHEN is_pause THEN greatest(end_ns - greatest(start_ns, COALESCE(covered_ns, start_ns)), 0)
            ELSE 0
        END AS paused_ns
    FROM followed
),
gaps AS (
    SELECT
        batch,
        count(CASE WHEN NOT is_pause THEN 1 END) AS launches,
        sum(duration_ns) AS kernel_ns,
        sum(CASE WHEN gap_ns > 0 THEN gap_ns ELSE 0 END) AS gap_ns,
        count(CASE WHEN gap_ns > 0 THEN 1 END) AS gaps,
        sum(paused_ns) AS paused_ns
    FROM placed
    GROUP BY batch
),
whole AS (
    SELECT
        b.batch,
        count(*) AS repetitions,
        sum(b.last_ns - b.first_ns) AS span_ns,
        sum(b.unplaced) AS unplaced,
        sum(CASE WHEN r.start_ns >= 0 AND r.end_ns >= r.start_ns THEN r.end_ns - r.start_ns END) AS host_ns,
        count(CASE WHEN r.start_ns >= 0 AND r.end_ns >= r.start_ns THEN 1 END) AS closed
    FROM batched AS b
    LEFT JOIN ranges AS r
        ON r.process = b.process AND r.range_id = b.piece AND CAST($range_name AS VARCHAR) IS NOT NULL
    GROUP BY b.batch
),
classes AS (
    SELECT batch, kernel_class_id, sum(launches) AS launches, sum(kernel_ns) AS kernel_ns, avg(offset_ns) AS offset_ns
    FROM (
        SELECT
            batch, process, piece, kernel_class_id,
            count(*) AS launches, sum(duration_ns) AS kernel_ns, min(offset_ns) AS offset_ns
        FROM placed
        WHERE NOT is_pause
        GROUP BY batch, process, piece, kernel_class_id
    ) AS each_piece
    GROUP BY batch, kernel_class_id
)
SELECT
    w.batch,
    CAST(NULL AS BIGINT) AS kernel_class_id,
    w.repetitions,
    g.launches,
    TRY_CAST(g.kernel_ns AS BIGINT) AS kernel_ns,
    CASE WHEN w.unplaced = 0 THEN TRY_CAST(w.span_ns - g.paused_ns AS BIGINT) END AS span_ns,
    CASE WHEN w.unplaced = 0 THEN TRY_CAST(g.gap_ns AS BIGINT) END AS gap_ns,
    CASE WHEN w.unplaced = 0 THEN g.gaps END AS gaps,
    CASE WHEN w.closed = w.repetitions THEN TRY_CAST(w.host_ns AS BIGINT) END AS host_ns,
    CAST(NULL AS DOUBLE) AS offset_ns
FROM whole AS w
JOIN gaps AS g ON g.batch = w.batch
UNION ALL
SELECT
    batch, kernel_class_id, NULL, CAST(launches AS BIGINT), TRY_CAST(kernel_ns AS BIGINT), NULL, NULL, NULL, NULL,
    offset_ns
FROM classes
ORDER BY batch, kernel_class_id NULLS FIRST
