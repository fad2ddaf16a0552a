-- overhead: what recording cost the steps of each process, from the recorder's own pauses.
--
-- A step is a range that repeats, by itself the one with most time of which whole ones fit into the pauses.
-- Each pause is compared with equally much time next to it. See docs/method.md.
--
-- Columns:
--   process       VARCHAR  -       Which process.
--   range_name    VARCHAR  -       The range that is the step; NULL where there is none.
--   depth         INTEGER  -       Its level of nesting.
--   pauses        BIGINT   pauses  Pauses of the process.
--   pairs         BIGINT   pauses  Those with whole steps in them and next to them.
--   steps_on      BIGINT   steps   Compared, with the recorder on.
--   steps_off     BIGINT   steps   Compared, with the recorder off.
--   mean_on_ns    DOUBLE   ns      Mean length of the steps with the recorder on.
--   mean_off_ns   DOUBLE   ns      Mean length of those with it off.
--   slowdown_pct  DOUBLE   %       How much longer steps took with the recorder on, typically; NULL with a reason.
--   low_pct       DOUBLE   %       Lower end of the 95 % interval.
--   high_pct      DOUBLE   %       Upper end.
--   reason        VARCHAR  -       Why it was not measured; NULL where it was.
SELECT
    process, range_name, depth, pauses, pairs, steps_on, steps_off, mean_on_ns, mean_off_ns, slowdown_pct,
    low_pct, high_pct, reason
FROM raw.overhead
