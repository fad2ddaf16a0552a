-- _device_kernels: kernels with known times that took any, on devices by their UUID.
--
-- Columns:
--   device    VARCHAR  -   UUID, or process/ordinal where that is not known.
--   start_ns  BIGINT   ns  When it started.
--   end_ns    BIGINT   ns  When it ended.
SELECT
    COALESCE(d.uuid, concat(k.process, '/', CAST(k.device_id AS VARCHAR))) AS device,
    k.start_ns, k.end_ns
FROM _launches AS k
LEFT JOIN devices AS d ON d.process = k.process AND d.device_id = k.device_id
WHERE k.end_ns > k.start_ns
