-- counter_metrics: the raw metrics behind each counter's name.
--
-- Columns:
--   metric      VARCHAR  -  As CUPTI spells it.
--   counter     VARCHAR  -  nanalyze's name.
--   preference  INTEGER  -  1 for the best metric for that counter, then 2, ...
--   unit        VARCHAR  -  Unit of the counter.
SELECT metric, counter, preference, unit
FROM raw.counter_metrics
