-- _device_time: what each device did and why it stood still, summed by what it stood still for.
--
-- The time from a device's first kernel or copy to the end of its last one is laid out once, in layers: not known
-- (pauses of the recorder, launches replayed for counters), kernels that compute, kernels that communicate, copies.
-- What no layer covers is a gap. Each new_ column is the part of its layer and those before it that nothing of them
-- covered yet, so its sum is the time that they cover. One sort of the launches, whatever the number of layers.
-- nanalyze itself works this out for large runs in one pass in order of time (analysis/launch_scan.py), the same rows.
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
followed AS (
    SELECT
        *,
        max(CASE WHEN layer = 0 THEN end_ns END) OVER (
            PARTITION BY number ORDER BY start_ns, end_ns, layer, kernel_class_id, queued_ns
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS unknown_until,
        max(CASE WHEN layer <= 1 THEN end_ns END) OVER (
            PARTITION BY number ORDER BY start_ns, end_ns, layer, kernel_class_id, queued_ns
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS compute_until,
        max(CASE WHEN layer <= 2 THEN end_ns END) OVER (
            PARTITION BY number ORDER BY start_ns, end_ns, layer, kernel_class_id, queued_ns
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS kernel_until,
        max(end_ns) OVER (
            PARTITION BY number ORDER BY start_ns, end_ns, layer, kernel_class_id, queued_ns
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS any_until,
        max(queued_ns) OVER (
            PARTITION BY number ORDER BY start_ns, end_ns, layer, kernel_class_id, queued_ns
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS called_ns
    FROM _device_instants
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
        number, kernel_class_id, cause,
        count(*) AS activities,
        sum(CASE WHEN kernel_class_id IS NOT NULL THEN end_ns - start_ns END) AS kernel_ns,
        sum(gap_ns) AS gap_ns,
        max(gap_ns) AS longest_gap_ns,
        sum(CASE WHEN layer = 0 THEN greatest(end_ns - greatest(start_ns, unknown_until), 0) END) AS new_unknown_ns,
        sum(CASE WHEN layer <= 1 THEN greatest(end_ns - greatest(start_ns, compute_until), 0) END) AS new_compute_ns,
        sum(CASE WHEN layer <= 2 THEN greatest(end_ns - greatest(start_ns, kernel_until), 0) END) AS new_kernel_ns,
        sum(greatest(end_ns - greatest(start_ns, any_until), 0)) AS new_any_ns
    FROM explained
    GROUP BY number, kernel_class_id, cause
)
SELECT
    k.device, s.kernel_class_id, s.cause, s.activities,
    CAST(COALESCE(s.kernel_ns, 0) AS BIGINT) AS kernel_ns,
    CAST(s.gap_ns AS BIGINT) AS gap_ns,
    s.longest_gap_ns,
    CAST(COALESCE(s.new_unknown_ns, 0) AS BIGINT) AS new_unknown_ns,
    CAST(COALESCE(s.new_compute_ns, 0) AS BIGINT) AS new_compute_ns,
    CAST(COALESCE(s.new_kernel_ns, 0) AS BIGINT) AS new_kernel_ns,
    CAST(s.new_any_ns AS BIGINT) AS new_any_ns
FROM sums AS s
JOIN (SELECT DISTINCT number, device FROM _device_numbers) AS k ON k.number = s.number
