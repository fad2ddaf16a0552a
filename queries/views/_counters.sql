-- _counters: each counter of each kernel class: measured exactly where it was, else estimated from samples.
--
-- Columns:
--   kernel_class_id  BIGINT   -               Which kernel with which shape.
--   counter          VARCHAR  -               Name of the counter.
--   value            DOUBLE   as the counter  Mean per launch.
--   unit             VARCHAR  -               Unit of the value.
--   method           VARCHAR  -               exact, imported or sampled.
--   standard_error   DOUBLE   as the counter  Of the mean; NULL where it is not known.
--   launches         BIGINT   launches        How many were measured or sampled.
--   low              DOUBLE   as the counter  Lower end of the 95 % interval.
--   high             DOUBLE   as the counter  Upper end.
--   missing          VARCHAR  -               Parts that were not sampled and may lift it to its upper end.
SELECT
    kernel_class_id, counter, value, unit, method, standard_error, launches, low, high,
    CAST(NULL AS VARCHAR) AS missing
FROM _exact_counters
UNION ALL
SELECT
    s.kernel_class_id, s.counter, s.value, s.unit, 'sampled', s.standard_error, s.launches, s.low, s.high, s.missing
FROM raw.sampled_counters AS s
LEFT JOIN _exact_counters AS e ON e.kernel_class_id = s.kernel_class_id AND e.counter = s.counter
WHERE e.kernel_class_id IS NULL
