-- report_exact_cost: what did exact counters cost the job, by process and device?
--
-- Columns:
--   process    VARCHAR  -         Which process.
--   device_id  INTEGER  -         CUDA ordinal in the process.
--   launches   BIGINT   launches  Kernel and graph launches replayed.
--   graphs     BIGINT   launches  Those that were graph launches.
--   cost_ns    BIGINT   ns        Host time that took.
--   passes     INTEGER  passes    The most passes that one launch took.
WITH measurements AS (
    SELECT DISTINCT process, device_id, scope, measured_ns, correlation_id, graph_id, passes, cost_ns
    FROM exact
)
SELECT
    process, device_id,
    count(*) AS launches,
    count(CASE WHEN scope = 'graph' THEN 1 END) AS graphs,
    CAST(sum(cost_ns) AS BIGINT) AS cost_ns,
    max(passes) AS passes
FROM measurements
GROUP BY process, device_id
ORDER BY process, device_id
