-- compare_clocks: at which clocks did a device stand while a range, or the whole run, was repeated?
--
-- Readings between the first launch and the last end of any repetition: those of other ranges in between
-- count too, as a reading a second says nothing of a range of milliseconds. The bits of throttle_reasons
-- are NVML's.
--
-- Parameters:
--   range_name  VARCHAR  NULL  Name of the range; without one the span of all kernels.
--
-- Columns:
--   device             VARCHAR  -         UUID, or process/ordinal.
--   sm_clock_hz        BIGINT   Hz        SM clock.
--   memory_clock_hz    BIGINT   Hz        Memory clock.
--   throttle_reasons   BIGINT   -         Bit mask of reasons to lower the clocks.
--   readings           BIGINT   readings  How many read just this.
WITH spans AS (
    SELECT process, min(start_ns) AS first_ns, max(COALESCE(end_ns, start_ns)) AS last_ns
    FROM ranges
    WHERE name = CAST($range_name AS VARCHAR)
    GROUP BY process
    UNION ALL
    SELECT process, min(start_ns), max(end_ns)
    FROM _launches
    WHERE CAST($range_name AS VARCHAR) IS NULL AND end_ns IS NOT NULL
    GROUP BY process
)
SELECT
    COALESCE(d.uuid, concat(s.process, '/', CAST(s.device_id AS VARCHAR))) AS device,
    s.sm_clock_hz, s.memory_clock_hz, s.throttle_reasons,
    count(*) AS readings
FROM device_state AS s
JOIN spans AS p ON p.process = s.process AND s.time_ns BETWEEN p.first_ns AND p.last_ns
LEFT JOIN devices AS d ON d.process = s.process AND d.device_id = s.device_id
GROUP BY
    COALESCE(d.uuid, concat(s.process, '/', CAST(s.device_id AS VARCHAR))),
    s.sm_clock_hz, s.memory_clock_hz, s.throttle_reasons
ORDER BY device, sm_clock_hz, memory_clock_hz, throttle_reasons
