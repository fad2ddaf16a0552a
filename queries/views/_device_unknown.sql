-- _device_unknown: when it is not known what each device did: pauses of the recorder, launches replayed for counters.
--
-- Columns:
--   number    BIGINT  -   The device's, as in _device_numbers.
--   start_ns  BIGINT  ns  From when on, cut to the time in which the device is known to have done anything.
--   end_ns    BIGINT  ns  Until when.
WITH unknown AS (
    SELECT process, start_ns, end_ns FROM _pause_spans
    UNION ALL
    SELECT DISTINCT process, measured_ns - cost_ns, measured_ns
    FROM exact
    WHERE measured_ns BETWEEN 0 AND 4000000000000000000 AND cost_ns BETWEEN 0 AND 1000000000000000
)
SELECT DISTINCT n.number, greatest(u.start_ns, n.first_ns) AS start_ns, least(u.end_ns, n.last_ns) AS end_ns
FROM unknown AS u
JOIN _device_numbers AS n ON n.process = u.process AND u.start_ns < n.last_ns AND u.end_ns > n.first_ns
