-- counters: hardware counters of each kernel class, per launch.
--
-- Exact values win over sampled ones. Exact counters of launches inside CUDA graphs cannot be told apart
-- by kernel: see graph_counters; sampled ones can.
--
-- Columns:
--   kernel_class_id  BIGINT   -               Which kernel with which shape: see kernel_classes.
--   counter          VARCHAR  -               Name of the counter, or the raw metric where it has none.
--   value            DOUBLE   as the counter  Mean per launch over the launches measured or sampled.
--   unit             VARCHAR  -               Unit of the value; NULL for a raw metric.
--   method           VARCHAR  -               exact (range profiler), sampled or imported.
--   standard_error   DOUBLE   as the counter  Of the mean; NULL where one launch was measured.
--   launches         BIGINT   launches        How many launches were measured or sampled.
--   low              DOUBLE   as the counter  Lower end of the 95 % interval; the lowest of one or two measured.
--   high             DOUBLE   as the counter  Upper end; where parts of a percentage were not sampled, the most
--                                             that they allow.
SELECT kernel_class_id, counter, value, unit, method, standard_error, launches, low, high
FROM _counters
