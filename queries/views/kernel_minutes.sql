-- kernel_minutes: launches that were rolled up, added up by minute, class, device and process.
--
-- Those launches are in no other view. Rows of one minute may be several, where files met in it; they add up.
-- Percentiles are within 0.6 % of the exact ones.
--
-- Columns:
--   minute_ns           BIGINT   ns        Start of the minute in which they started.
--   kernel_class_id     BIGINT   -         Which kernel with which shape: see kernel_classes.
--   device_id           INTEGER  -         CUDA ordinal in the process.
--   launches            BIGINT   launches  All launches.
--   launches_untimed    BIGINT   launches  Those whose duration is not known.
--   launches_in_graphs  BIGINT   launches  Those that came from a CUDA graph.
--   total_ns            BIGINT   ns        Sum of the known durations; NULL where none is known.
--   overlapped_ns       BIGINT   ns        Of it, while a kernel that had started earlier still ran on the device.
--   shortest_ns         BIGINT   ns        Shortest launch.
--   p50_ns              DOUBLE   ns        Half of the launches took at most so long.
--   p90_ns              DOUBLE   ns        Nine of ten did.
--   p99_ns              DOUBLE   ns        All but a hundredth did.
--   longest_ns          BIGINT   ns        Longest launch.
--   process             VARCHAR  -         Which process wrote the row.
SELECT
    minute_ns, kernel_class_id, device_id, launches, launches_untimed, launches_in_graphs,
    total_ns, overlapped_ns, shortest_ns,
    least(greatest(exp((p50_bin + 0.5E0) / 92.0E0), CAST(shortest_ns AS DOUBLE)), CAST(longest_ns AS DOUBLE)) AS p50_ns,
    least(greatest(exp((p90_bin + 0.5E0) / 92.0E0), CAST(shortest_ns AS DOUBLE)), CAST(longest_ns AS DOUBLE)) AS p90_ns,
    least(greatest(exp((p99_bin + 0.5E0) / 92.0E0), CAST(shortest_ns AS DOUBLE)), CAST(longest_ns AS DOUBLE)) AS p99_ns,
    longest_ns, process
FROM raw.kernel_minutes
WHERE minute_ns BETWEEN 0 AND 4000000000000000000
