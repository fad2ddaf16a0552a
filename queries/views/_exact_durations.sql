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
    -- DuckDB drops a range check that Parquet's statistics make redundant, and those leave NaN out.
    AND NOT isnan(value)
GROUP BY process, correlation_id
