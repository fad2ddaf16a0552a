-- sampled_against_exact: counters of kernel classes that were both sampled and measured exactly.
--
-- The exact profiler runs kernels one by one, so caches are colder and neighbours absent: not all of a
-- difference is the estimate's error.
--
-- Columns:
--   kernel_class_id  BIGINT   -               Which kernel with which shape.
--   counter          VARCHAR  -               Name of the counter.
--   unit             VARCHAR  -               Unit of the values.
--   time_share       DOUBLE   1               Share of the class in the time of all kernels, 0 to 1.
--   exact            DOUBLE   as the counter  Mean over the launches measured.
--   sampled          DOUBLE   as the counter  Estimate.
--   sampled_low      DOUBLE   as the counter  Lower end of its 95 % interval.
--   sampled_high     DOUBLE   as the counter  Upper end.
--   difference_pct   DOUBLE   %               Sampled over exact, less 100; NULL where exact is 0.
--   is_inside        BOOLEAN  -               Whether the two intervals overlap.
SELECT
    s.kernel_class_id, s.counter, s.unit,
    CAST(t.total_ns AS DOUBLE) / NULLIF((SELECT sum(total_ns) FROM _class_totals), 0) AS time_share,
    e.value AS exact, s.value AS sampled, s.low AS sampled_low, s.high AS sampled_high,
    100 * s.value / NULLIF(e.value, 0) - 100 AS difference_pct,
    s.low <= e.high AND s.high >= e.low AS is_inside
FROM raw.sampled_counters AS s
JOIN _exact_counters AS e ON e.kernel_class_id = s.kernel_class_id AND e.counter = s.counter
LEFT JOIN _class_totals AS t ON t.kernel_class_id = s.kernel_class_id
WHERE s.counter <> 'duration_ns' AND s.counter <> 'sm_clock_hz'
