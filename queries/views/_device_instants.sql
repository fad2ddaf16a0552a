-- _device_instants: what each device is known to have done, as intervals in layers: see _device_time.
--
-- Columns:
--   number           BIGINT   -   The device's, as in _device_numbers.
--   start_ns         BIGINT   ns  When it started.
--   end_ns           BIGINT   ns  When it ended.
--   queued_ns        BIGINT   ns  When the launch call was made (host); NULL where not recorded.
--   kernel_class_id  BIGINT   -   Which kernel with which shape; NULL for what is no kernel.
--   layer            INTEGER  -   0 not known (a pause, a replay), 1 computes, 2 communicates, 3 a copy or set.
SELECT
    n.number, k.start_ns, k.end_ns, k.queued_ns, k.kernel_class_id,
    CASE WHEN c.kernel_class_id IS NULL THEN 1 ELSE 2 END AS layer
FROM _launches AS k
JOIN _device_numbers AS n ON n.process = k.process AND n.device_id = k.device_id
LEFT JOIN _communicating AS c ON c.kernel_class_id = k.kernel_class_id
WHERE k.end_ns IS NOT NULL
UNION ALL
SELECT n.number, c.start_ns, c.start_ns + c.duration_ns, NULL, NULL, 3
FROM copies AS c
JOIN _device_numbers AS n ON n.process = c.process AND n.device_id = c.device_id
WHERE c.start_ns BETWEEN 0 AND 4000000000000000000 AND c.duration_ns BETWEEN 0 AND 1000000000000000
UNION ALL
SELECT number, start_ns, end_ns, NULL, NULL, 0
FROM _device_unknown
