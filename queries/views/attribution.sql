-- attribution: rate of each sampled counter in each kernel class, from samples of the whole device.
--
-- A sample is the sum of what ran in it: time times rate, solved by non-negative least squares for each
-- device and counter group. Of a class whose launches differ in length, the mean over its modes. See docs/attribution.md.
--
-- Columns:
--   device              VARCHAR  -                     UUID, else process/ordinal.
--   counter_group       INTEGER  -                     Which group of counters was sampled.
--   counter             VARCHAR  -                     Column of samples.
--   unit                VARCHAR  -                     Unit of the counter; NULL where nanalyze does not know it.
--   kernel_class_id     BIGINT   -                     The kernel class; NULL for what is none.
--   term                VARCHAR  -                     kernel, idle, copy and its kind, or the classes beyond 400.
--   rate_per_s          DOUBLE   counter unit / s      Mean rate while it ran; of merged terms, their common one.
--   standard_error      DOUBLE   counter unit / s      Of the rate; NULL where it ran in too few blocks.
--   low_per_s           DOUBLE   counter unit / s      Lower end of the 95 % interval.
--   high_per_s          DOUBLE   counter unit / s      Upper end.
--   time_ns             BIGINT   ns                    Time it ran in these samples.
--   launches            BIGINT   launches              Launches of the class while the device was sampled.
--   is_told_apart       BOOLEAN  -                     FALSE where it was merged: the rate is not its own.
--   merged_terms        BIGINT   -                     How many classes or other terms share the rate; 1: none.
--   variance_inflation  DOUBLE   1                     How much other terms that run along with it widen its variance.
--   degrees             DOUBLE   1                     Student's degrees of freedom of the interval.
SELECT
    device, counter_group, counter, unit, kernel_class_id, term, rate_per_s, standard_error, low_per_s,
    high_per_s, time_ns, launches, is_told_apart, merged_terms, variance_inflation, degrees
FROM raw.attribution
