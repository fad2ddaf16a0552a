-- time_by_cause: what did each device spend its time on, and why did it stand still?
--
-- From the device's first kernel or copy to the end of its last one. Each instant counts once: where a kernel
-- computes it counts as compute whatever else runs, else as communication, else as copy, else by why nothing ran.
-- So the rows of a device add up to its time. Time in pauses of the recorder and in launches replayed for counters
-- is not the job's and belongs to no share. A gap counts whole for the cause of the launch that ended it:
-- start (the device's own time between kernels that were queued), dependency (the kernel was queued, but waited),
-- launch (the host launches as fast as it can, and too slowly), synchronisation (the host made no call until the
-- device had run dry, and then soon), host (it made no call until long after), before copy (a copy ended it:
-- when it was called is not recorded), unknown (the call was not recorded, or a pause or replay lies at either end).
--
-- Columns:
--   device           VARCHAR  -     UUID, or process/ordinal where that is not known.
--   cause            VARCHAR  -     compute, communication, copy, a cause of gaps, or not recorded (pauses, replays).
--   is_lost          BOOLEAN  -     Whether the device could have computed meanwhile; NULL for not recorded.
--   gaps             BIGINT   gaps  How often it stood still for it; NULL where it did not stand still.
--   total_ns         BIGINT   ns    Time.
--   share            DOUBLE   1     Of the device's time without what is not known, 0 to 1; NULL for that.
--   mean_gap_ns      DOUBLE   ns    Mean length of a gap.
--   longest_gap_ns   BIGINT   ns    The longest gap.
--   kernel_class_id  BIGINT   -     Kernel that ended most of that time; NULL for a copy.
--   kernel           VARCHAR  -     Its name.
WITH times AS (
    SELECT * FROM _device_time
),
covered AS (
    SELECT
        device,
        sum(new_unknown_ns) AS unknown_ns,
        sum(new_compute_ns) - sum(new_unknown_ns) AS compute_ns,
        sum(new_kernel_ns) - sum(new_compute_ns) AS communication_ns,
        sum(new_any_ns) - sum(new_kernel_ns) AS copy_ns,
        sum(new_any_ns) - sum(new_unknown_ns) + COALESCE(sum(gap_ns), 0) AS observed_ns
    FROM times
    GROUP BY device
),
ended AS (
    SELECT
        device, cause, kernel_class_id,
        sum(activities) AS gaps, sum(gap_ns) AS gap_ns, max(longest_gap_ns) AS longest_gap_ns
    FROM times
    WHERE cause IS NOT NULL
    GROUP BY device, cause, kernel_class_id
),
ranked AS (
    SELECT
        *,
        row_number() OVER (PARTITION BY device, cause ORDER BY gap_ns DESC, kernel_class_id) AS place
    FROM ended
),
causes AS (
    SELECT
        device, cause, TRUE AS is_lost,
        CAST(sum(gaps) AS BIGINT) AS gaps,
        CAST(sum(gap_ns) AS BIGINT) AS total_ns,
        max(longest_gap_ns) AS longest_gap_ns,
        max(CASE WHEN place = 1 THEN kernel_class_id END) AS kernel_class_id
    FROM ranked
    GROUP BY device, cause
    UNION ALL
    SELECT
        c.device, p.cause, p.is_lost, NULL,
        CAST(CASE p.cause
            WHEN 'compute' THEN c.compute_ns
            WHEN 'communication' THEN c.communication_ns
            WHEN 'copy' THEN c.copy_ns
            ELSE c.unknown_ns
        END AS BIGINT),
        NULL, NULL
    FROM covered AS c
    CROSS JOIN (
        VALUES ('compute', FALSE), ('communication', TRUE), ('copy', TRUE), ('not recorded', NULL)
    ) AS p (cause, is_lost)
)
SELECT
    c.device, c.cause, c.is_lost, c.gaps, c.total_ns,
    CASE WHEN c.cause <> 'not recorded' THEN CAST(c.total_ns AS DOUBLE) / NULLIF(CAST(o.observed_ns AS DOUBLE), 0) END
        AS share,
    CAST(c.total_ns AS DOUBLE) / c.gaps AS mean_gap_ns,
    c.longest_gap_ns,
    c.kernel_class_id,
    k.name AS kernel
FROM causes AS c
JOIN covered AS o ON o.device = c.device
LEFT JOIN kernel_classes AS k ON k.kernel_class_id = c.kernel_class_id
WHERE c.total_ns > 0
ORDER BY c.device, c.is_lost NULLS LAST, c.total_ns DESC, c.cause
