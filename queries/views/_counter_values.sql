-- _counter_values: each measured value under nanalyze's name for the counter.
--
-- Values that are NULL, NaN, infinite, negative or absurd (above 1e30) count as not measured.
--
-- Columns:
--   scope            VARCHAR  -               kernel or graph.
--   kernel_class_id  BIGINT   -               Class of the launch; NULL for a graph.
--   process          VARCHAR  -               Which process.
--   device_id        INTEGER  -               CUDA ordinal in the process.
--   graph_id         BIGINT   -               The executable graph, for scope graph.
--   counter          VARCHAR  -               Name, or the raw metric where nanalyze has none for it.
--   preference       INTEGER  -               1 for the best raw metric of this counter, then 2, ...
--   metric           VARCHAR  -               The raw metric.
--   unit             VARCHAR  -               Unit of the value.
--   value            DOUBLE   as the counter  One launch.
SELECT
    e.scope, e.kernel_class_id, e.process, e.device_id, e.graph_id,
    COALESCE(m.counter, e.metric) AS counter,
    COALESCE(m.preference, 1) AS preference,
    e.metric, m.unit, e.value
FROM exact AS e
LEFT JOIN counter_metrics AS m ON m.metric = e.metric
WHERE e.value BETWEEN 0 AND 1e30
    -- DuckDB drops a range check that Parquet's statistics make redundant, and those leave NaN out;
    -- 2.0 folds isnan() by them too, and the text where they say it is constant, but not both.
    AND NOT isnan(e.value)
    AND lower(CAST(e.value AS VARCHAR)) <> 'nan'
