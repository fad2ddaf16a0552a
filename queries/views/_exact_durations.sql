-- _exact_durations: how long each launch under the exact profiler ran, which the timeline cannot say.
--
-- Columns:
--   process         VARCHAR  -   Which process.
--   correlation_id  BIGINT   -   Of the launch.
--   duration_ns     BIGINT   ns  GPU time by gpu__time_duration.sum.
SELECT process, correlation_id, CAST(round(max(value)) AS BIGINT) AS duration_ns
FROM exact
WHERE scope = 'kernel'
    AND metric = 'gpu__time_duration.sum'
    AND correlation_id IS NOT NULL
    AND value BETWEEN 0 AND 1e15
    -- DuckDB drops a range check that Parquet's statistics make redundant, and those leave NaN out;
    -- 2.0 folds isnan() by them too, and the text where they say it is constant, but not both.
    AND NOT isnan(value)
    AND lower(CAST(value AS VARCHAR)) <> 'nan'
GROUP BY process, correlation_id
