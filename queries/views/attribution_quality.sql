-- attribution_quality: how well rates from one half of the samples predict the other half.
--
-- Columns:
--   device              VARCHAR  -                     UUID, else process/ordinal.
--   counter_group       INTEGER  -                     Which group of counters was sampled.
--   counter             VARCHAR  -                     Column of samples.
--   unit                VARCHAR  -                     Unit of the counter; NULL where nanalyze does not know it.
--   start_ns            BIGINT   ns                    Start of the first sample.
--   end_ns              BIGINT   ns                    End of the last sample.
--   samples             BIGINT   samples               Samples used.
--   samples_dropped     BIGINT   samples               Not used: absurd values, cut short, or during a replay or pause.
--   blocks              BIGINT   -                     Blocks of samples; 0 where there are too few samples.
--   terms               BIGINT   -                     Modes of kernel classes, copies and idle time that ran.
--   terms_merged        BIGINT   -                     Those that could not be told apart from another.
--   explained           DOUBLE   1                     Share of the variation predicted; negative is worse than none.
--   mean_per_s          DOUBLE   counter unit / s      Mean over all samples.
--   clock_method        VARCHAR  -                     Whence the SM clock of percentages: sampled (cycles),
--                                                      device_state (NVML) or maximum (no reading).
SELECT
    device, counter_group, counter, unit, start_ns, end_ns, samples, samples_dropped, blocks, terms,
    terms_merged, explained, mean_per_s, clock_method
FROM raw.attribution_quality
