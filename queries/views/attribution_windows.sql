-- attribution_windows: the same rates in windows of time: a job that drifts shows it here.
--
-- Windows hold 10,000 samples or more, 24 windows at most; a run with fewer than two windows has none.
--
-- Columns:
--   device              VARCHAR  -                     UUID, else process/ordinal.
--   counter_group       INTEGER  -                     Which group of counters was sampled.
--   counter             VARCHAR  -                     Column of samples.
--   unit                VARCHAR  -                     Unit of the counter; NULL where nanalyze does not know it.
--   window_number       INTEGER  -                     From 0, in order of time.
--   start_ns            BIGINT   ns                    Start of its first sample.
--   end_ns              BIGINT   ns                    End of its last sample.
--   kernel_class_id     BIGINT   -                     The kernel class; NULL for what is none.
--   term                VARCHAR  -                     kernel, idle, copy and its kind, or the classes beyond 400.
--   rate_per_s          DOUBLE   counter unit / s      Mean rate while it ran; of merged terms, their common one.
--   standard_error      DOUBLE   counter unit / s      Of the rate; NULL where it ran in too few blocks.
--   low_per_s           DOUBLE   counter unit / s      Lower end of the 95 % interval.
--   high_per_s          DOUBLE   counter unit / s      Upper end.
--   time_ns             BIGINT   ns                    Time it ran in these samples.
--   is_told_apart       BOOLEAN  -                     FALSE where it was merged: the rate is not its own.
SELECT
    device, counter_group, counter, unit, window_number, start_ns, end_ns, kernel_class_id, term,
    rate_per_s, standard_error, low_per_s, high_per_s, time_ns, is_told_apart
FROM raw.attribution_windows
