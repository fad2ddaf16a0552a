-- trend_clocks: at which clock did each device run from the first kernel of a process to its last one?
--
-- Readings while no kernel ran count too. Those reasons to throttle count that slow a device down against its will:
-- power cap, slowdown by hardware, heat, power brake.
--
-- Columns:
--   device           VARCHAR  -         UUID, or process/ordinal where that is not known.
--   sm_clock_hz      DOUBLE   Hz        Mean SM clock.
--   memory_clock_hz  DOUBLE   Hz        Mean memory clock.
--   throttled_share  DOUBLE   1         Share of readings with such a reason, 0 to 1.
--   readings         BIGINT   readings  How many.
WITH spans AS (
    SELECT process, min(first_ns) AS first_ns, max(last_ns) AS last_ns
    FROM (
        SELECT process, first_ns, last_ns FROM _class_devices
        UNION ALL
        SELECT process, first_ns, last_ns FROM _rolled_up
    ) AS found
    GROUP BY process
)
SELECT
    COALESCE(d.uuid, concat(s.process, '/', CAST(s.device_id AS VARCHAR))) AS device,
    avg(CAST(s.sm_clock_hz AS DOUBLE)) AS sm_clock_hz,
    avg(CAST(s.memory_clock_hz AS DOUBLE)) AS memory_clock_hz,
    avg(CAST(CASE
        WHEN s.throttle_reasons IS NULL THEN NULL
        -- NVML's bits 0x4, 0x8, 0x20, 0x40 and 0x80.
        WHEN s.throttle_reasons // 4 % 4 > 0 OR s.throttle_reasons // 32 % 8 > 0 THEN 1
        ELSE 0
    END AS DOUBLE)) AS throttled_share,
    count(*) AS readings
FROM device_state AS s
JOIN spans AS p ON p.process = s.process AND s.time_ns BETWEEN p.first_ns AND p.last_ns
LEFT JOIN devices AS d ON d.process = s.process AND d.device_id = s.device_id
GROUP BY COALESCE(d.uuid, concat(s.process, '/', CAST(s.device_id AS VARCHAR)))
ORDER BY device
