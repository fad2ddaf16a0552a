-- steps: how much do the steps of a job vary, and why were some of them longer or shorter?
--
-- A step is a range that repeats: the one of the given name, else in each process the one with the most host time of
-- those opened at least three times at one depth by one thread. It takes the longer of its host time and its
-- time on the GPU, first start to last end of the kernels launched in it. A step is an outlier if it differs from its
-- process' median by more than 5 % and by more than three times the usual spread (1.4826 x the median deviation).
-- The cause is the largest part of the difference: recorder (a pause, or launches replayed for counters),
-- communication (its kernels took longer: as a rule another rank came late), launches (more or fewer), clock (the same
-- kernels at another SM clock), kernels (the same number, longer or shorter), idle (time in which none of its kernels
-- ran, host included); unknown where no launch is known to lie in any step. The explanation has parts of 20 % or more.
-- The clock is NVML's last reading before each launch, at most 5 s old.
--
-- Parameters:
--   range_name  VARCHAR  NULL     Name of the range.
--   rows        INTEGER  1000000  How many steps; those farthest from their process' median come first.
--
-- Columns:
--   process           VARCHAR  -         Which process.
--   rank              BIGINT   -         Its rank; NULL without a launcher.
--   range_name        VARCHAR  -         Name of the range.
--   steps             BIGINT   steps     Steps of the process.
--   median_ns         DOUBLE   ns        Their median length, without those that the recorder disturbed if any others.
--   spread_ns         DOUBLE   ns        Their usual spread.
--   step              BIGINT   -         Number of the step in its process, from 1.
--   range_id          BIGINT   -         Its range.
--   start_ns          BIGINT   ns        When it was opened.
--   length_ns         BIGINT   ns        How long it took.
--   difference        DOUBLE   1         length_ns over median_ns, less 1.
--   is_outlier        BOOLEAN  -         See above.
--   cause             VARCHAR  -         Of an outlier: see above.
--   explanation       VARCHAR  -         The same with numbers.
--   host_ns           BIGINT   ns        Between opening and closing it.
--   span_ns           BIGINT   ns        First start to last end of its kernels.
--   launches          BIGINT   launches  Launched in it.
--   replayed          BIGINT   launches  Of these replayed for counters, or without a known duration.
--   kernel_ns         BIGINT   ns        Time of its kernels that do not communicate, side by side or not.
--   communication_ns  BIGINT   ns        Time of those that do.
--   idle_ns           BIGINT   ns        length_ns without both, at least 0.
--   sm_clock_hz       DOUBLE   Hz        Mean SM clock over its launches; NULL where it was not read.
--   paused            BOOLEAN  -         Whether a pause of the recorder touches it.
--   sampled           BOOLEAN  -         Whether counters were sampled in it.
WITH candidates AS (
    SELECT
        process, name, depth, thread_id,
        row_number() OVER (
            PARTITION BY process
            ORDER BY sum(end_ns - start_ns) DESC, name, depth, thread_id
        ) AS place
    FROM ranges
    WHERE start_ns >= 0 AND end_ns BETWEEN start_ns AND 4000000000000000000
        AND name = COALESCE(CAST($range_name AS VARCHAR), name)
    GROUP BY process, name, depth, thread_id
    HAVING count(*) >= CASE WHEN CAST($range_name AS VARCHAR) IS NULL THEN 3 ELSE 1 END
),
opened AS (
    SELECT
        r.process, r.range_id, r.name, r.start_ns, r.end_ns,
        row_number() OVER (PARTITION BY r.process ORDER BY r.start_ns, r.range_id) AS step
    FROM ranges AS r
    JOIN candidates AS c
        ON c.process = r.process AND c.name = r.name AND c.depth = r.depth
        AND COALESCE(c.thread_id, -1) = COALESCE(r.thread_id, -1) AND c.place = 1
    WHERE r.start_ns >= 0 AND r.end_ns BETWEEN r.start_ns AND 4000000000000000000
),
readings AS (
    SELECT process, time_ns, avg(sm_clock_hz) AS sm_clock_hz
    FROM device_state
    WHERE sm_clock_hz > 0 AND time_ns BETWEEN 0 AND 4000000000000000000
    GROUP BY process, time_ns
),
-- Launches between two instants, steps and clocks in one order of time: the launches see the last step and the last
-- clock before them. Steps follow each other, so that the last one has the latest start and the latest end.
instants AS (
    SELECT
        process, start_ns AS at_ns, 1 AS is_launched, launches, replayed, first_ns, last_ns, kernel_ns, communication_ns,
        CAST(NULL AS BIGINT) AS opened_ns, CAST(NULL AS BIGINT) AS closed_ns, CAST(NULL AS BIGINT) AS read_ns
    FROM _launch_segments
    WHERE start_ns IS NOT NULL
    UNION ALL
    SELECT process, start_ns, 0, NULL, NULL, NULL, NULL, NULL, NULL, start_ns, end_ns, NULL
    FROM opened
    UNION ALL
    SELECT process, time_ns, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, time_ns
    FROM readings
),
placed AS (
    SELECT
        process, at_ns, is_launched, launches, replayed, first_ns, last_ns, kernel_ns, communication_ns,
        max(opened_ns) OVER (
            PARTITION BY process ORDER BY at_ns, is_launched ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
        ) AS opened_ns,
        max(closed_ns) OVER (
            PARTITION BY process ORDER BY at_ns, is_launched ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
        ) AS closed_ns,
        max(read_ns) OVER (
            PARTITION BY process ORDER BY at_ns, is_launched ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
        ) AS read_ns
    FROM instants
),
clocked AS (
    SELECT
        process, opened_ns, CASE WHEN at_ns - read_ns <= 5000000000 THEN read_ns END AS read_ns,
        sum(launches) AS launches, sum(replayed) AS replayed, min(first_ns) AS first_ns, max(last_ns) AS last_ns,
        sum(kernel_ns) AS kernel_ns, sum(communication_ns) AS communication_ns
    FROM placed
    WHERE is_launched = 1 AND at_ns < closed_ns
    GROUP BY process, opened_ns, CASE WHEN at_ns - read_ns <= 5000000000 THEN read_ns END
),
launched AS (
    SELECT
        c.process, c.opened_ns,
        CAST(sum(c.launches) AS BIGINT) AS launches,
        CAST(sum(c.replayed) AS BIGINT) AS replayed,
        max(c.last_ns) - min(c.first_ns) AS span_ns,
        sum(c.kernel_ns) AS kernel_ns,
        sum(c.communication_ns) AS communication_ns,
        sum(r.sm_clock_hz * c.launches) / sum(CASE WHEN r.sm_clock_hz IS NOT NULL THEN c.launches END) AS sm_clock_hz
    FROM clocked AS c
    LEFT JOIN readings AS r ON r.process = c.process AND r.time_ns = c.read_ns
    GROUP BY c.process, c.opened_ns
),
-- Samples of 10 ms together: there may be a thousand times as many.
sampling AS (
    SELECT process, min(start_ns) AS start_ns, max(end_ns) AS end_ns
    FROM samples
    GROUP BY process, start_ns // 10000000
),
-- A step is touched if the latest end of all pauses (of all samples) that began before its own end lies after its
-- start: a running maximum, since a join of intervals looks at each pair.
touched AS (
    SELECT
        process, step, start_ns,
        max(paused_until_ns) OVER (
            PARTITION BY process ORDER BY at_ns, place ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
        ) > start_ns AS paused,
        max(sampled_until_ns) OVER (
            PARTITION BY process ORDER BY at_ns, place ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
        ) > start_ns AS sampled
    FROM (
        SELECT
            process, end_ns AS at_ns, 0 AS place, step, start_ns,
            CAST(NULL AS BIGINT) AS paused_until_ns, CAST(NULL AS BIGINT) AS sampled_until_ns
        FROM opened
        UNION ALL
        SELECT process, start_ns, 1, NULL, NULL, end_ns, NULL
        FROM _pause_spans
        UNION ALL
        SELECT process, start_ns, 1, NULL, NULL, NULL, end_ns
        FROM sampling
    ) AS spans
),
measured AS (
    SELECT
        o.process, o.name, o.step, o.range_id, o.start_ns,
        o.end_ns - o.start_ns AS host_ns,
        l.span_ns,
        greatest(o.end_ns - o.start_ns, COALESCE(l.span_ns, 0)) AS length_ns,
        COALESCE(l.launches, 0) AS launches,
        COALESCE(l.replayed, 0) AS replayed,
        CAST(COALESCE(l.kernel_ns, 0) AS BIGINT) AS kernel_ns,
        CAST(COALESCE(l.communication_ns, 0) AS BIGINT) AS communication_ns,
        l.sm_clock_hz,
        COALESCE(t.paused, FALSE) AS paused,
        COALESCE(t.sampled, FALSE) AS sampled
    FROM opened AS o
    LEFT JOIN launched AS l ON l.process = o.process AND l.opened_ns = o.start_ns
    JOIN touched AS t ON t.process = o.process AND t.step = o.step
),
parted AS (
    SELECT *, greatest(length_ns - kernel_ns - communication_ns, 0) AS idle_ns, paused OR replayed > 0 AS disturbed
    FROM measured
),
undisturbed AS (
    SELECT process, bool_and(disturbed) AS all_disturbed FROM parted GROUP BY process
),
usual AS (
    SELECT
        p.process,
        median(p.length_ns) AS length_ns, median(p.launches) AS launches, median(p.kernel_ns) AS kernel_ns,
        median(p.communication_ns) AS communication_ns, median(p.idle_ns) AS idle_ns,
        median(p.sm_clock_hz) AS sm_clock_hz
    FROM parted AS p
    JOIN undisturbed AS u ON u.process = p.process
    WHERE u.all_disturbed OR NOT p.disturbed
    GROUP BY p.process
),
spreads AS (
    SELECT
        p.process,
        1.4826E0 * median(CASE WHEN n.all_disturbed OR NOT p.disturbed THEN abs(p.length_ns - u.length_ns) END)
            AS spread_ns,
        count(*) AS steps,
        avg(CASE WHEN p.sampled THEN 1.0E0 ELSE 0 END) AS sampled_share
    FROM parted AS p
    JOIN usual AS u ON u.process = p.process
    JOIN undisturbed AS n ON n.process = p.process
    GROUP BY p.process
),
compared AS (
    SELECT
        p.*, s.steps, s.spread_ns, s.sampled_share, u.length_ns AS median_ns,
        u.launches AS usual_launches, u.sm_clock_hz AS usual_clock_hz,
        p.length_ns - u.length_ns AS excess_ns,
        p.kernel_ns - u.kernel_ns AS kernel_excess_ns,
        p.communication_ns - u.communication_ns AS communication_excess_ns,
        p.idle_ns - u.idle_ns AS idle_excess_ns,
        abs(p.length_ns - u.length_ns) > greatest(3 * s.spread_ns, 0.05E0 * u.length_ns) AS is_outlier,
        CASE WHEN abs(p.sm_clock_hz / u.sm_clock_hz - 1) > 0.02E0 THEN p.sm_clock_hz < u.sm_clock_hz END AS is_slower,
        -- Counted in the direction of the difference.
        sign(p.length_ns - u.length_ns) AS way
    FROM parted AS p
    JOIN usual AS u ON u.process = p.process
    JOIN spreads AS s ON s.process = p.process
),
parts AS (
    SELECT
        *,
        way * kernel_excess_ns AS kernel_part,
        way * communication_excess_ns AS communication_part,
        way * idle_excess_ns AS idle_part,
        0.2E0 * abs(excess_ns) AS least_part,
        CASE WHEN way > 0 THEN ' ms more' ELSE ' ms less' END AS more
    FROM compared
)
SELECT
    p.process, r.rank, p.name AS range_name, p.steps, p.median_ns, p.spread_ns,
    p.step, p.range_id, p.start_ns, p.length_ns,
    p.excess_ns / NULLIF(p.median_ns, 0) AS difference,
    p.is_outlier,
    CASE
        WHEN NOT p.is_outlier THEN NULL
        WHEN p.disturbed THEN 'recorder'
        WHEN p.usual_launches = 0 THEN 'unknown'
        WHEN p.communication_part >= greatest(p.kernel_part, p.idle_part) THEN 'communication'
        WHEN p.idle_part >= p.kernel_part THEN 'idle'
        WHEN abs(p.launches - p.usual_launches) > 0.02E0 * p.usual_launches THEN 'launches'
        WHEN p.is_slower = (p.way > 0) THEN 'clock'
        ELSE 'kernels'
    END AS cause,
    CASE
        WHEN p.is_outlier THEN concat_ws(
            '; ',
            CASE WHEN p.replayed > 0 THEN concat(CAST(p.replayed AS VARCHAR), ' launches replayed or not timed') END,
            CASE WHEN p.paused THEN 'the recorder was paused in it' END,
            CASE WHEN p.sampled AND p.sampled_share < 0.5E0 THEN 'counters were sampled in it, and in few others' END,
            CASE WHEN p.step = 1 THEN 'the first of its process' END,
            CASE
                WHEN p.communication_part >= p.least_part
                    THEN concat(
                        CAST(round(p.communication_part / 1e6, 3) AS VARCHAR), p.more,
                        ' in communication, waiting included'
                    )
            END,
            CASE
                WHEN p.kernel_part >= p.least_part
                    THEN concat(CAST(round(p.kernel_part / 1e6, 3) AS VARCHAR), p.more, ' in kernels')
            END,
            CASE
                WHEN p.usual_launches > 0 AND p.launches <> p.usual_launches
                    THEN concat(
                        CAST(p.launches AS VARCHAR), ' launches, usually ',
                        CAST(CAST(round(p.usual_launches) AS BIGINT) AS VARCHAR)
                    )
            END,
            CASE
                WHEN p.is_slower IS NOT NULL
                    THEN concat(
                        'SM clock ', CAST(round(p.sm_clock_hz / 1e9, 2) AS VARCHAR), ' GHz, usually ',
                        CAST(round(p.usual_clock_hz / 1e9, 2) AS VARCHAR)
                    )
            END,
            CASE
                WHEN p.usual_launches > 0 AND p.idle_part >= p.least_part
                    THEN concat(
                        CAST(round(p.idle_part / 1e6, 3) AS VARCHAR), p.more, ' in which none of its kernels ran'
                    )
            END
        )
    END AS explanation,
    p.host_ns, p.span_ns, p.launches, p.replayed, p.kernel_ns, p.communication_ns, p.idle_ns, p.sm_clock_hz,
    p.paused, p.sampled
FROM parts AS p
LEFT JOIN processes AS r ON r.process = p.process
ORDER BY
    row_number() OVER (PARTITION BY p.process ORDER BY p.is_outlier DESC, abs(p.excess_ns) DESC, p.step),
    p.process
LIMIT $rows
