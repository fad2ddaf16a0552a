-- _class_totals: launches and time of each kernel class, and the device that launched it most.
--
-- Launches that were rolled up are in it.
--
-- Columns:
--   kernel_class_id     BIGINT   -         Which kernel with which shape.
--   launches            BIGINT   launches  All launches seen.
--   launches_untimed    BIGINT   launches  Those whose duration is not known.
--   launches_in_graphs  BIGINT   launches  Those that came from a CUDA graph.
--   total_ns            BIGINT   ns        Sum of the known durations; NULL where none is known.
--   mean_ns             DOUBLE   ns        Mean of the known durations.
--   process             VARCHAR  -         Process of the device with the most launches of the class.
--   device_id           INTEGER  -         That device.
WITH by_device AS (
    SELECT
        kernel_class_id, process, device_id,
        sum(launches) AS launches,
        sum(launches_timed) AS launches_timed,
        sum(launches_in_graphs) AS launches_in_graphs,
        sum(total_ns) AS total_ns
    FROM (
        SELECT kernel_class_id, process, device_id, launches, launches_timed, launches_in_graphs, total_ns
        FROM _class_devices
        UNION ALL
        SELECT kernel_class_id, process, device_id, launches, launches_timed, launches_in_graphs, total_ns
        FROM _rolled_up
    ) AS found
    WHERE kernel_class_id IS NOT NULL
    GROUP BY kernel_class_id, process, device_id
),
ranked AS (
    SELECT
        *,
        row_number() OVER (PARTITION BY kernel_class_id ORDER BY launches DESC, process, device_id) AS place
    FROM by_device
)
SELECT
    kernel_class_id,
    CAST(sum(launches) AS BIGINT) AS launches,
    CAST(sum(launches - launches_timed) AS BIGINT) AS launches_untimed,
    CAST(sum(launches_in_graphs) AS BIGINT) AS launches_in_graphs,
    TRY_CAST(sum(total_ns) AS BIGINT) AS total_ns,
    CAST(sum(total_ns) AS DOUBLE) / NULLIF(sum(launches_timed), 0) AS mean_ns,
    max(CASE WHEN place = 1 THEN process END) AS process,
    max(CASE WHEN place = 1 THEN device_id END) AS device_id
FROM ranked
GROUP BY kernel_class_id
