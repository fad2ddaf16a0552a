-- _kernel_histograms: how the durations of launches that were rolled up spread, by hour.
--
-- Columns:
--   hour_ns          BIGINT   ns        First minute of the hour that has any of them.
--   kernel_class_id  BIGINT   -         Which kernel with which shape.
--   bin              INTEGER  -         Durations from exp(bin / 92) to exp((bin + 1) / 92) ns; -1 those of 0 ns.
--   launches         BIGINT   launches  So many.
SELECT hour_ns, kernel_class_id, pair.bin AS bin, pair.launches AS launches
FROM (
    SELECT minute_ns AS hour_ns, kernel_class_id, unnest(histogram) AS pair
    FROM raw.kernel_minutes
    WHERE histogram IS NOT NULL AND minute_ns BETWEEN 0 AND 4000000000000000000
) AS hours
