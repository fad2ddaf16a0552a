-- graph_counters: hardware counters of each CUDA graph, per graph launch (all its kernels together).
--
-- Columns:
--   process         VARCHAR  -               Which process.
--   device_id       INTEGER  -               CUDA ordinal in the process.
--   graph_id        BIGINT   -               The executable graph, as in kernels.
--   counter         VARCHAR  -               Name of the counter, or the raw metric where it has none.
--   value           DOUBLE   as the counter  Mean per graph launch.
--   unit            VARCHAR  -               Unit of the value; NULL for a raw metric.
--   method          VARCHAR  -               exact (range profiler) or imported.
--   standard_error  DOUBLE   as the counter  Of the mean; NULL where one graph launch was measured.
--   launches        BIGINT   launches        How many graph launches were measured.
SELECT
    v.process, v.device_id, v.graph_id, v.counter,
    avg(v.value) AS value,
    v.unit,
    CASE WHEN r.source = 'recorder' THEN 'exact' ELSE 'imported' END AS method,
    stddev_samp(v.value) / sqrt(count(*)) AS standard_error,
    count(*) AS launches
FROM _counter_values AS v
CROSS JOIN run AS r
WHERE v.scope = 'graph'
GROUP BY v.process, v.device_id, v.graph_id, v.counter, v.metric, v.preference, v.unit, r.source
QUALIFY row_number() OVER (
    PARTITION BY v.process, v.device_id, v.graph_id, v.counter ORDER BY v.preference, v.metric
) = 1
