-- _device_time: what each device did and why it stood still, summed by what it stood still for.
--
-- The time from a device's first kernel or copy to the end of its last one is laid out once, in layers: not known
-- (pauses of the recorder, launches replayed for counters), kernels that compute, kernels that communicate, copies.
-- What no layer covers is a gap. Each new_ column is the part of its layer and those before it that nothing of them
-- covered yet, so its sum is the time that they cover. One sort of the launches, whatever the number of layers.
--
-- Causes of a gap, by when the launch that ended it was called (queued_ns, on the host's clock):
--   start            called before the device ran dry, shorter than launch_ns: the device's own time to start it
--   dependency       called before the device ran dry, longer: it waited for another stream, device, or the host
--   launch           called after it, within host_call_ns of the call before: the host could not launch faster
--   synchronisation  called after it, when the host had made no call for at least as long before the device ran dry:
--                    as a host does that waits for the device
--   host             called after it, and later than that: the host was busy elsewhere
--   before copy      a copy or set ended it, whose call is not recorded
--   unknown          the call was not recorded, or a pause or replay lies at either end
--
-- Columns:
--   device             VARCHAR  -     UUID, or process/ordinal where that is not known.
--   previous_class_id  BIGINT   -     Class of the kernel that started before; NULL for a copy or none.
--   kernel_class_id    BIGINT   -     Class of the kernel that started; NULL for a copy, pause or replay.
--   cause              VARCHAR  -     Why the device stood still before it; NULL where it did not.
--   activities         BIGINT   -     How many such kernels, copies, pauses and replays.
--   kernel_ns          BIGINT   ns    Sum of their durations, side by side or not, where they are kernels.
--   gap_ns             BIGINT   ns    Time it stood still; NULL where it did not.
--   longest_gap_ns     BIGINT   ns    The longest time.
--   new_unknown_ns     BIGINT   ns    Newly covered by pauses and replays.
--   new_compute_ns     BIGINT   ns    Newly covered by these or kernels that compute.
--   new_kernel_ns      BIGINT   ns    Newly covered by these or kernels of any kind.
--   new_any_ns         BIGINT   ns    Newly covered by anything.
WITH limits AS (
    SELECT
        max(CASE WHEN name = 'launch_ns' THEN value END) AS launch_ns,
        max(CASE WHEN name = 'host_call_ns' THEN value END) AS host_call_ns
    FROM settings
),
communicating AS (
    SELECT DISTINCT c.kernel_class_id
    FROM kernel_classes AS c
    JOIN communication_patterns AS p
        -- Only the function's own name counts, not its arguments.
        ON regexp_matches(regexp_replace(replace(c.name, '(anonymous namespace)::', ''), '[<(].*', ''), p.pattern)
),
timed_copies AS (
    SELECT process, device_id, start_ns, start_ns + duration_ns AS end_ns
    FROM copies
    WHERE start_ns BETWEEN 0 AND 4000000000000000000 AND duration_ns BETWEEN 0 AND 1000000000000000
),
used AS (
    SELECT process, device_id, min(start_ns) AS first_ns, max(end_ns) AS last_ns
    FROM _launches
    WHERE end_ns IS NOT NULL
    GROUP BY process, device_id
    UNION ALL
    SELECT process, device_id, min(start_ns), max(end_ns)
    FROM timed_copies
    GROUP BY process, device_id
),
named AS (
    SELECT
        u.process, u.device_id, u.first_ns, u.last_ns,
        COALESCE(d.uuid, concat(u.process, '/', CAST(u.device_id AS VARCHAR))) AS device
    FROM used AS u
    LEFT JOIN devices AS d ON d.process = u.process AND d.device_id = u.device_id
),
-- A number for a device: the launches are sorted by it, and a text would cost more.
numbered AS (
    SELECT
        process, device_id, device, dense_rank() OVER (ORDER BY device) AS number,
        min(first_ns) OVER (PARTITION BY device) AS first_ns, max(last_ns) OVER (PARTITION BY device) AS last_ns
    FROM named
),
keys AS (
    SELECT DISTINCT process, device_id, device, number, first_ns, last_ns FROM numbered
),
unknown AS (
    SELECT process, start_ns, end_ns FROM _pause_spans
    UNION ALL
    SELECT DISTINCT process, measured_ns - cost_ns, measured_ns
    FROM exact
    WHERE measured_ns BETWEEN 0 AND 4000000000000000000 AND cost_ns BETWEEN 0 AND 1000000000000000
),
instants AS (
    SELECT
        n.number, k.start_ns, k.end_ns, k.queued_ns, k.kernel_class_id,
        CASE WHEN c.kernel_class_id IS NULL THEN 1 ELSE 2 END AS layer
    FROM _launches AS k
    JOIN keys AS n ON n.process = k.process AND n.device_id = k.device_id
    LEFT JOIN communicating AS c ON c.kernel_class_id = k.kernel_class_id
    WHERE k.end_ns IS NOT NULL
    UNION ALL
    SELECT n.number, c.start_ns, c.end_ns, NULL, NULL, 3
    FROM timed_copies AS c
    JOIN keys AS n ON n.process = c.process AND n.device_id = c.device_id
    UNION ALL
    SELECT DISTINCT n.number, greatest(u.start_ns, n.first_ns), least(u.end_ns, n.last_ns), NULL, NULL, 0
    FROM unknown AS u
    JOIN keys AS n ON n.process = u.process AND u.start_ns < n.last_ns AND u.end_ns > n.first_ns
),
followed AS (
    SELECT
        *,
        max(CASE WHEN layer = 0 THEN end_ns END) OVER (
            PARTITION BY number ORDER BY start_ns, end_ns, layer, kernel_class_id
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS unknown_until,
        max(CASE WHEN layer <= 1 THEN end_ns END) OVER (
            PARTITION BY number ORDER BY start_ns, end_ns, layer, kernel_class_id
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS compute_until,
        max(CASE WHEN layer <= 2 THEN end_ns END) OVER (
            PARTITION BY number ORDER BY start_ns, end_ns, layer, kernel_class_id
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS kernel_until,
        max(end_ns) OVER (
            PARTITION BY number ORDER BY start_ns, end_ns, layer, kernel_class_id
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS any_until,
        max(queued_ns) OVER (
            PARTITION BY number ORDER BY start_ns, end_ns, layer, kernel_class_id
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS called_ns,
        lag(kernel_class_id) OVER (
            PARTITION BY number ORDER BY start_ns, end_ns, layer, kernel_class_id
        ) AS previous_class_id
    FROM instants
),
explained AS (
    SELECT
        f.*,
        CASE WHEN f.start_ns > f.any_until THEN f.start_ns - f.any_until END AS gap_ns,
        CASE
            WHEN f.start_ns > f.any_until THEN CASE
                WHEN f.layer = 3 THEN 'before copy'
                WHEN f.layer = 0 OR f.queued_ns IS NULL OR f.unknown_until = f.any_until THEN 'unknown'
                WHEN f.queued_ns <= f.any_until
                    THEN CASE WHEN f.start_ns - f.any_until < l.launch_ns THEN 'start' ELSE 'dependency' END
                WHEN f.called_ns IS NULL THEN 'unknown'
                WHEN f.queued_ns - f.called_ns <= l.host_call_ns THEN 'launch'
                WHEN f.queued_ns - f.any_until <= f.any_until - f.called_ns THEN 'synchronisation'
                ELSE 'host'
            END
        END AS cause
    FROM followed AS f
    CROSS JOIN limits AS l
),
sums AS (
    SELECT
        number, previous_class_id, kernel_class_id, cause,
        count(*) AS activities,
        sum(CASE WHEN kernel_class_id IS NOT NULL THEN end_ns - start_ns END) AS kernel_ns,
        sum(gap_ns) AS gap_ns,
        max(gap_ns) AS longest_gap_ns,
        sum(CASE WHEN layer = 0 THEN greatest(end_ns - greatest(start_ns, unknown_until), 0) END) AS new_unknown_ns,
        sum(CASE WHEN layer <= 1 THEN greatest(end_ns - greatest(start_ns, compute_until), 0) END) AS new_compute_ns,
        sum(CASE WHEN layer <= 2 THEN greatest(end_ns - greatest(start_ns, kernel_until), 0) END) AS new_kernel_ns,
        sum(greatest(end_ns - greatest(start_ns, any_until), 0)) AS new_any_ns
    FROM explained
    GROUP BY number, previous_class_id, kernel_class_id, cause
)
SELECT
    k.device, s.previous_class_id, s.kernel_class_id, s.cause, s.activities,
    CAST(COALESCE(s.kernel_ns, 0) AS BIGINT) AS kernel_ns,
    CAST(s.gap_ns AS BIGINT) AS gap_ns,
    s.longest_gap_ns,
    CAST(COALESCE(s.new_unknown_ns, 0) AS BIGINT) AS new_unknown_ns,
    CAST(COALESCE(s.new_compute_ns, 0) AS BIGINT) AS new_compute_ns,
    CAST(COALESCE(s.new_kernel_ns, 0) AS BIGINT) AS new_kernel_ns,
    CAST(s.new_any_ns AS BIGINT) AS new_any_ns
FROM sums AS s
JOIN (SELECT DISTINCT number, device FROM numbered) AS k ON k.number = s.number
