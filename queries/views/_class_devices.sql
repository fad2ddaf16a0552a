-- _class_devices: launches and time of each kernel class on each device of each process.
--
-- Whatever is added up over launches by class, process or device is added up from here, so that one pass over the
-- launches serves all of it.
--
-- Columns:
--   kernel_class_id     BIGINT   -         Which kernel with which shape; NULL where that is not known.
--   process             VARCHAR  -         Which process.
--   device_id           INTEGER  -         CUDA ordinal in the process.
--   launches            BIGINT   launches  All launches seen.
--   launches_timed      BIGINT   launches  Those whose duration is known.
--   launches_in_graphs  BIGINT   launches  Those that came from a CUDA graph.
--   total_ns            HUGEINT  ns        Sum of the known durations; NULL where none is known.
--   first_ns            BIGINT   ns        First start of those whose start and end are known.
--   last_ns             BIGINT   ns        Last end of those.
--   first_long_ns       BIGINT   ns        First start of those that took any time.
--   last_long_ns        BIGINT   ns        Last end of those.
SELECT
    kernel_class_id, process, device_id,
    count(*) AS launches,
    count(duration_ns) AS launches_timed,
    count(graph_id) AS launches_in_graphs,
    sum(duration_ns) AS total_ns,
    min(CASE WHEN end_ns IS NOT NULL THEN start_ns END) AS first_ns,
    max(end_ns) AS last_ns,
    min(CASE WHEN end_ns > start_ns THEN start_ns END) AS first_long_ns,
    max(CASE WHEN end_ns > start_ns THEN end_ns END) AS last_long_ns
FROM _launches
GROUP BY kernel_class_id, process, device_id
