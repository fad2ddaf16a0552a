-- trend_kernels: how long did a launch of each kernel class take, piece by piece of the run?
--
-- The time from the first launch to the last one is cut into equal pieces. Launches that were rolled up count by
-- their minute. Of launches that the profiler timed only those that were rolled up count.
--
-- Parameters:
--   pieces  INTEGER  64  How many.
--
-- Columns:
--   kernel_class_id  BIGINT   -         Which kernel with which shape.
--   piece            BIGINT   -         Number of the piece, from 0.
--   launches         BIGINT   launches  Launches whose duration is known.
--   kernel_ns        BIGINT   ns        Sum of their durations.
--   first_ns         BIGINT   ns        Start of the first one.
WITH timed AS (
    SELECT kernel_class_id, start_ns, 1 AS launches, duration_ns
    FROM _launches
    WHERE duration_method = 'timeline' AND end_ns IS NOT NULL AND kernel_class_id IS NOT NULL
    UNION ALL
    SELECT kernel_class_id, minute_ns, launches - launches_untimed, total_ns
    FROM kernel_minutes
    WHERE launches > launches_untimed AND kernel_class_id IS NOT NULL
),
span AS (
    SELECT min(first_ns) AS first_ns, max(last_ns) AS last_ns
    FROM (
        SELECT first_ns, last_ns FROM _class_devices
        UNION ALL
        SELECT first_ns, last_ns FROM _rolled_up
    ) AS found
)
SELECT
    t.kernel_class_id,
    CAST(floor((t.start_ns - s.first_ns) * CAST($pieces AS DOUBLE) / (s.last_ns - s.first_ns + 1)) AS BIGINT) AS piece,
    CAST(sum(t.launches) AS BIGINT) AS launches,
    CAST(sum(t.duration_ns) AS BIGINT) AS kernel_ns,
    min(t.start_ns) AS first_ns
FROM timed AS t
CROSS JOIN span AS s
GROUP BY
    t.kernel_class_id,
    CAST(floor((t.start_ns - s.first_ns) * CAST($pieces AS DOUBLE) / (s.last_ns - s.first_ns + 1)) AS BIGINT)
ORDER BY t.kernel_class_id, piece
