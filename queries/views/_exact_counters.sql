-- _exact_counters: each counter of each kernel class over the launches measured, by the best raw metric.
--
-- Columns:
--   kernel_class_id  BIGINT   -               Which kernel with which shape.
--   counter          VARCHAR  -               Name of the counter.
--   value            DOUBLE   as the counter  Mean per launch.
--   unit             VARCHAR  -               Unit of the value.
--   method           VARCHAR  -               exact or imported.
--   standard_error   DOUBLE   as the counter  Of the mean; NULL for one launch.
--   launches         BIGINT   launches        How many were measured.
--   low              DOUBLE   as the counter  Lower end of the 95 % interval; the lowest of one or two launches.
--   high             DOUBLE   as the counter  Upper end.
WITH means AS (
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
)
SELECT
    m.kernel_class_id, m.counter, m.value, m.unit,
    CASE WHEN r.source = 'recorder' THEN 'exact' ELSE 'imported' END AS method,
    m.standard_error, m.launches,
    -- Student's t from 3 launches on; two launches say no more than their own span.
    CASE WHEN m.launches < 3 THEN m.lowest ELSE greatest(m.value - t.quantile * m.standard_error, 0) END AS low,
    CASE WHEN m.launches < 3 THEN m.highest ELSE m.value + t.quantile * m.standard_error END AS high
FROM means AS m
CROSS JOIN run AS r
LEFT JOIN raw.student_t AS t ON t.degrees = least(m.launches - 1, 30)
