-- sampled_windows: counters of each kernel class in windows of time whose samples were rolled up.
--
-- Attributed while the launches were still there, with 95 % intervals; `counters` has them put together, with those of
-- samples that are still there. See docs/run-directory.md.
--
-- Columns:
--   start_ns         BIGINT   ns        Start of the window.
--   end_ns           BIGINT   ns        Its end.
--   kernel_class_id  BIGINT   -         Which kernel with which shape: see kernel_classes.
--   counter          VARCHAR  -         The counter, as in the view counters.
--   value            DOUBLE   -         Mean over the window; unit: that of the counter.
--   standard_error   DOUBLE   -         Its standard error; NULL where the value is certain.
--   lasting_error    DOUBLE   -         The part of it that more samples do not remove.
--   low              DOUBLE   -         Lower end of its 95 % interval.
--   high             DOUBLE   -         Upper end of its 95 % interval.
--   launches         BIGINT   launches  Launches of the class that met the window.
--   time_ns          BIGINT   ns        How long the class ran while samples were taken.
--   missing          VARCHAR  -         Parts of the counter that were not sampled; NULL for none.
--   process          VARCHAR  -         Which process took the samples.
SELECT
    start_ns, end_ns, kernel_class_id, counter, value, standard_error, lasting_error, low, high, launches, time_ns,
    missing, process
FROM raw.sampled_windows
WHERE start_ns BETWEEN 0 AND 4000000000000000000
