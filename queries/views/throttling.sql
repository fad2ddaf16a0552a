-- throttling: when did each device run below its clocks, and why?
--
-- From NVML's readings, about one a second: each stands until the next, for 5 s at most, the last one for a
-- second. Readings with the same reason that follow each other make one row. Several reasons can hold at
-- once, so their times do not add up.
--
-- Columns:
--   device               VARCHAR  -         UUID, or process/ordinal where that is not known.
--   reason               VARCHAR  -         NVML's name of the reason; low clock where the SM clock lay below
--                                           low_clock_pct of the highest, whatever the reason.
--   is_throttled         BOOLEAN  -         Whether power, heat or the board held the device back; FALSE for idle time,
--                                           chosen limits and low clock.
--   start_ns             BIGINT   ns        First reading with the reason.
--   end_ns               BIGINT   ns        When its last reading ceases to stand.
--   readings             BIGINT   readings  How many.
--   sm_clock_lowest_hz   BIGINT   Hz        Lowest SM clock read meanwhile.
--   sm_clock_highest_hz  BIGINT   Hz        Highest one.
WITH reasons AS (
    SELECT l.device, b.reason, b.is_throttled, l.time_ns, l.until_ns, l.sm_clock_hz
    FROM _device_readings AS l
    JOIN (
        -- nvmlClocksEventReasons of nvml.h.
        VALUES
            (1, 'GPU idle', FALSE),
            (2, 'applications clocks setting', FALSE),
            (4, 'SW power cap', TRUE),
            (8, 'HW slowdown', TRUE),
            (16, 'sync boost', TRUE),
            (32, 'SW thermal slowdown', TRUE),
            (64, 'HW thermal slowdown', TRUE),
            (128, 'HW power brake slowdown', TRUE),
            (256, 'display clock setting', FALSE)
    ) AS b (bit, reason, is_throttled) ON (l.reasons // b.bit) % 2 = 1
    UNION ALL
    SELECT l.device, 'unknown to nanalyze', TRUE, l.time_ns, l.until_ns, l.sm_clock_hz
    FROM _device_readings AS l
    WHERE l.reasons >= 512
    UNION ALL
    SELECT l.device, 'low clock', FALSE, l.time_ns, l.until_ns, l.sm_clock_hz
    FROM _device_readings AS l
    CROSS JOIN settings AS s
    WHERE s.name = 'low_clock_pct' AND l.clock_pct < s.value
),
marked AS (
    SELECT
        *,
        CASE
            WHEN time_ns <= lag(until_ns) OVER (PARTITION BY device, reason ORDER BY time_ns, until_ns) THEN 0
            ELSE 1
        END AS is_new
    FROM reasons
),
numbered AS (
    SELECT
        *,
        sum(is_new) OVER (
            PARTITION BY device, reason ORDER BY time_ns, until_ns
            ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
        ) AS stretch
    FROM marked
)
SELECT
    device, reason, bool_or(is_throttled) AS is_throttled,
    min(time_ns) AS start_ns,
    max(until_ns) AS end_ns,
    count(*) AS readings,
    min(sm_clock_hz) AS sm_clock_lowest_hz,
    max(sm_clock_hz) AS sm_clock_highest_hz
FROM numbered
GROUP BY device, reason, stretch
