-- counters: hardware counters of each kernel class, per launch.
--
-- Counters of launches inside CUDA graphs cannot be told apart by kernel: see graph_counters.
--
-- Columns:
--   kernel_class_id  BIGINT   -               Which kernel with which shape: see kernel_classes.
--   counter          VARCHAR  -               Name of the counter, or the raw metric where it has none.
--   value            DOUBLE   as the counter  Mean per launch over the launches measured.
--   unit             VARCHAR  -               Unit of the value; NULL for a raw metric.
--   method           VARCHAR  -               exact (range profiler), sampled or imported.
--   standard_error   DOUBLE   as the counter  Of the mean; NULL where one launch was measured.
--   launches         BIGINT   launches        How many launches were measured.
SELECT
    c.kernel_class_id, c.counter, c.value, c.unit,
    CASE WHEN r.source = 'recorder' THEN 'exact' ELSE 'imported' END AS method,
    c.standard_error, c.launches
FROM _counters AS c
CROSS JOIN run AS r
