-- _device_readings: NVML's readings of each device, and how long each stands.
--
-- A reading stands until the next of the same device, whichever process took it, for 5 s at most, the last one
-- for a second.
--
-- Columns:
--   device       VARCHAR  -   UUID, or process/ordinal where that is not known.
--   time_ns      BIGINT   ns  When it was read.
--   until_ns     BIGINT   ns  When it ceases to stand.
--   sm_clock_hz  BIGINT   Hz  SM clock.
--   clock_pct    DOUBLE   %   SM clock over the device's highest.
--   reasons      BIGINT   -   NVML's bit mask of reasons to lower the clocks; 0 where it was not read.
WITH readings AS (
    SELECT
        COALESCE(d.uuid, concat(s.process, '/', CAST(s.device_id AS VARCHAR))) AS device,
        s.time_ns, s.sm_clock_hz,
        100.0 * s.sm_clock_hz / NULLIF(d.sm_clock_max_hz, 0) AS clock_pct,
        COALESCE(s.throttle_reasons, 0) AS reasons
    FROM device_state AS s
    LEFT JOIN devices AS d ON d.process = s.process AND d.device_id = s.device_id
    WHERE s.time_ns BETWEEN 0 AND 4000000000000000000
)
SELECT
    device, time_ns,
    least(
        COALESCE(lead(time_ns) OVER (PARTITION BY device ORDER BY time_ns, reasons), time_ns + 1000000000),
        time_ns + 5000000000
    ) AS until_ns,
    sm_clock_hz, CAST(clock_pct AS DOUBLE) AS clock_pct, reasons
FROM readings
