-- _counters: each counter of each kernel class over the launches measured, by the best raw metric.
--
-- Columns:
--   kernel_class_id  BIGINT   -               Which kernel with which shape.
--   counter          VARCHAR  -               Name of the counter.
--   value            DOUBLE   as the counter  Mean per launch.
--   unit             VARCHAR  -               Unit of the value.
--   standard_error   DOUBLE   as the counter  Of the mean; NULL for one launch.
--   launches         BIGINT   launches        How many were measured.
--   lowest           DOUBLE   as the counter  Smallest value of a launch.
--   highest          DOUBLE   as the counter  Largest value of a launch.
SELECT
    kernel_class_id, counter,
    avg(value) AS value,
    unit,
    stddev_samp(value) / sqrt(count(*)) AS standard_error,
    count(*) AS launches,
    min(value) AS lowest,
    max(value) AS highest
FROM _counter_values
WHERE scope = 'kernel' AND kernel_class_id IS NOT NULL
GROUP BY kernel_class_id, counter, metric, preference, unit
QUALIFY row_number() OVER (PARTITION BY kernel_class_id, counter ORDER BY preference, metric) = 1
