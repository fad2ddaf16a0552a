-- _device_numbers: a number for each device with kernels or copies whose times are known, and when it did something.
--
-- Launches are sorted and joined by the number: the text would cost more.
--
-- Columns:
--   process    VARCHAR  -   Which process.
--   device_id  INTEGER  -   CUDA ordinal in the process.
--   device     VARCHAR  -   UUID, or process/ordinal where that is not known.
--   number     BIGINT   -   From 1, by device: processes may share one.
--   first_ns   BIGINT   ns  First start of a kernel or copy on the device, whichever process launched it.
--   last_ns    BIGINT   ns  Last end.
WITH used AS (
    SELECT process, device_id, min(first_ns) AS first_ns, max(last_ns) AS last_ns
    FROM _class_devices
    WHERE last_ns IS NOT NULL
    GROUP BY process, device_id
    UNION ALL
    SELECT process, device_id, min(start_ns), max(start_ns + duration_ns)
    FROM copies
    WHERE start_ns BETWEEN 0 AND 4000000000000000000 AND duration_ns BETWEEN 0 AND 1000000000000000
    GROUP BY process, device_id
),
named AS (
    SELECT
        u.process, u.device_id, u.first_ns, u.last_ns,
        COALESCE(d.uuid, concat(u.process, '/', CAST(u.device_id AS VARCHAR))) AS device
    FROM used AS u
    LEFT JOIN devices AS d ON d.process = u.process AND d.device_id = u.device_id
),
numbered AS (
    SELECT
        process, device_id, device, dense_rank() OVER (ORDER BY device) AS number,
        min(first_ns) OVER (PARTITION BY device) AS first_ns, max(last_ns) OVER (PARTITION BY device) AS last_ns
    FROM named
)
SELECT DISTINCT process, device_id, device, number, first_ns, last_ns
FROM numbered
