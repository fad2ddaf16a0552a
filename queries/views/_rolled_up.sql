-- _rolled_up: launches that were rolled up, added up by class, process and device.
--
-- Columns:
--   kernel_class_id     BIGINT   -         Which kernel with which shape.
--   process             VARCHAR  -         Which process.
--   device_id           INTEGER  -         CUDA ordinal in the process.
--   launches            BIGINT   launches  All launches.
--   launches_timed      BIGINT   launches  Those whose duration is known.
--   launches_in_graphs  BIGINT   launches  Those that came from a CUDA graph.
--   total_ns            HUGEINT  ns        Sum of the known durations; NULL where none is known.
--   shortest_ns         BIGINT   ns        Shortest launch.
--   longest_ns          BIGINT   ns        Longest launch.
--   first_ns            BIGINT   ns        Start of the first minute.
--   last_ns             BIGINT   ns        End of the last minute.
SELECT
    kernel_class_id, process, device_id,
    CAST(sum(launches) AS BIGINT) AS launches,
    CAST(sum(launches - launches_untimed) AS BIGINT) AS launches_timed,
    CAST(sum(launches_in_graphs) AS BIGINT) AS launches_in_graphs,
    sum(total_ns) AS total_ns,
    min(shortest_ns) AS shortest_ns,
    max(longest_ns) AS longest_ns,
    min(minute_ns) AS first_ns,
    max(minute_ns) + 60000000000 AS last_ns
FROM kernel_minutes
GROUP BY kernel_class_id, process, device_id
