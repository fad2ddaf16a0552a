-- exact: raw metrics of launches measured by the range profiler, one row a metric. See counters for their
-- means.
--
-- Columns:
--   scope            VARCHAR  -              kernel: one launch. graph: the sum over one graph launch.
--   measured_ns      BIGINT   ns             When the measurement ended (host).
--   device_id        INTEGER  -              CUDA ordinal in the process.
--   correlation_id   BIGINT   -              Of the launch; of the last of several graph launches.
--   kernel_class_id  BIGINT   -              Class of the launch; NULL for a graph.
--   graph_id         BIGINT   -              The executable graph, for scope graph.
--   metric           VARCHAR  -              Metric with its rollup, as CUPTI spells it.
--   value            DOUBLE   as the metric  NULL where the profiler gave no finite number.
--   passes           INTEGER  passes         Passes the whole set took.
--   cost_ns          BIGINT   ns             Host time this launch took under the profiler.
--   process          VARCHAR  -              Which process wrote the row.
SELECT
    scope, measured_ns, device_id, correlation_id, kernel_class_id, graph_id, metric, value,
    passes, cost_ns, process
FROM raw.exact
