-- _kernel_pairs: how often a kernel of one class started on a device right after one of another class.
--
-- Columns:
--   previous_class_id  BIGINT  -         Class of the kernel that started before, with no copy or pause in between.
--   kernel_class_id    BIGINT  -         Class of the kernel that started.
--   launches           BIGINT  launches  How often.
WITH followed AS (
    SELECT
        kernel_class_id,
        lag(kernel_class_id) OVER (
            PARTITION BY number ORDER BY start_ns, end_ns, layer, kernel_class_id, queued_ns
        ) AS previous_class_id
    FROM _device_instants
)
SELECT previous_class_id, kernel_class_id, count(*) AS launches
FROM followed
WHERE previous_class_id <> kernel_class_id
GROUP BY previous_class_id, kernel_class_id
