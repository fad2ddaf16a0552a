-- samples: PM samples of a device. One further DOUBLE column for each counter that was sampled.
--
-- Columns:
--   device_id      INTEGER  -   CUDA ordinal in the process.
--   start_ns       BIGINT   ns  Start of the sample.
--   end_ns         BIGINT   ns  End of the sample.
--   counter_group  INTEGER  -   Which group of counters was running.
--   process        VARCHAR  -   Which process wrote the row.
SELECT *
FROM raw.samples
