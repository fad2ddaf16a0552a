-- report_throttling: for how long did each device run below its clocks, by reason?
--
-- Columns:
--   device               VARCHAR  -      UUID, or process/ordinal where that is not known.
--   reason               VARCHAR  -      See the view throttling.
--   is_throttled         BOOLEAN  -      Whether power, heat or the board held the device back.
--   times                BIGINT   times  How often it began.
--   duration_ns          BIGINT   ns     How long it held in all.
--   observed_ns          BIGINT   ns     Time for which the device's readings stand.
--   share                DOUBLE   1      duration_ns over observed_ns, 0 to 1.
--   sm_clock_lowest_hz   BIGINT   Hz     Lowest SM clock read meanwhile.
--   sm_clock_highest_hz  BIGINT   Hz     Highest one.
WITH observed AS (
    SELECT device, sum(until_ns - time_ns) AS observed_ns
    FROM _device_readings
    GROUP BY device
),
held AS (
    SELECT
        device, reason,
        bool_or(is_throttled) AS is_throttled,
        count(*) AS times,
        sum(end_ns - start_ns) AS duration_ns,
        min(sm_clock_lowest_hz) AS sm_clock_lowest_hz,
        max(sm_clock_highest_hz) AS sm_clock_highest_hz
    FROM throttling
    GROUP BY device, reason
)
SELECT
    h.device, h.reason, h.is_throttled, h.times,
    CAST(h.duration_ns AS BIGINT) AS duration_ns,
    CAST(o.observed_ns AS BIGINT) AS observed_ns,
    CAST(h.duration_ns AS DOUBLE) / NULLIF(o.observed_ns, 0) AS share,
    h.sm_clock_lowest_hz, h.sm_clock_highest_hz
FROM held AS h
JOIN observed AS o ON o.device = h.device
ORDER BY h.device, h.is_throttled DESC, duration_ns DESC, h.reason
