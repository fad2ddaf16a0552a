-- timeline_utilisation: how busy was each device over the run's time?
--
-- Kernels that run at the same time count once in busy_ns: of each kernel only the part after
-- everything that started before it has ended is new, and those parts do not overlap.
-- A device that several processes share is one device where its UUID is known. Pauses of the recorder
-- belong to no share: the time with a kernel or a pause, less the time with a pause, is busy time that is known.
--
-- Parameters:
--   buckets  INTEGER  100  Into how many pieces of equal length to cut the time.
--
-- Columns:
--   device      VARCHAR  -   UUID, or process/ordinal where that is not known.
--   bucket      BIGINT   -   Number of the piece, from 0.
--   start_ns    BIGINT   ns  Start of the piece.
--   end_ns      BIGINT   ns  End of the piece; the last one may reach beyond the last kernel.
--   busy_ns     BIGINT   ns  Time with at least one kernel running, outside of pauses.
--   paused_ns   BIGINT   ns  Time in which a process that uses the device did not record.
--   busy_share  DOUBLE   1   busy_ns over the piece's length without paused_ns, 0 to 1; NULL where nothing is left.
--   kernel_ns   BIGINT   ns  Sum over kernels: more than busy_ns where some ran side by side.
WITH launched AS (
    SELECT
        COALESCE(d.uuid, concat(k.process, '/', CAST(k.device_id AS VARCHAR))) AS device,
        k.start_ns, k.end_ns
    FROM kernels AS k
    LEFT JOIN devices AS d ON d.process = k.process AND d.device_id = k.device_id
    WHERE k.end_ns > k.start_ns
),
span AS (
    SELECT
        min(start_ns) AS first_ns,
        max(end_ns) AS last_ns,
        -- Rounded up, so that the pieces cover the whole run.
        greatest((max(end_ns) - min(start_ns) + $buckets - 1) // $buckets, 1) AS width_ns
    FROM launched
),
paused AS (
    SELECT DISTINCT
        COALESCE(d.uuid, concat(k.process, '/', CAST(k.device_id AS VARCHAR))) AS device,
        greatest(p.start_ns, s.first_ns) AS start_ns,
        least(p.end_ns, s.last_ns) AS end_ns
    FROM (SELECT DISTINCT process, device_id FROM kernels) AS k
    JOIN _pause_spans AS p ON p.process = k.process
    LEFT JOIN devices AS d ON d.process = k.process AND d.device_id = k.device_id
    CROSS JOIN span AS s
    WHERE p.start_ns < s.last_ns AND p.end_ns > s.first_ns
),
intervals AS (
    SELECT 'all' AS covers, device, start_ns, end_ns, TRUE AS is_kernel FROM launched
    UNION ALL
    SELECT 'all', device, start_ns, end_ns, FALSE FROM paused
    UNION ALL
    SELECT 'paused', device, start_ns, end_ns, FALSE FROM paused
),
earlier AS (
    SELECT
        covers, device, start_ns, end_ns, is_kernel,
        max(end_ns) OVER (
            PARTITION BY covers, device ORDER BY start_ns, end_ns ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS covered_ns
    FROM intervals
),
pieces AS (
    SELECT
        e.covers, e.device, e.start_ns, e.end_ns, e.is_kernel,
        greatest(e.start_ns, COALESCE(e.covered_ns, e.start_ns)) AS new_ns,
        s.first_ns, s.width_ns,
        unnest(range((e.start_ns - s.first_ns) // s.width_ns, (e.end_ns - 1 - s.first_ns) // s.width_ns + 1)) AS bucket
    FROM earlier AS e
    CROSS JOIN span AS s
),
clipped AS (
    SELECT
        covers, device, bucket, is_kernel,
        least(end_ns, first_ns + (bucket + 1) * width_ns) AS clip_end_ns,
        greatest(start_ns, first_ns + bucket * width_ns) AS clip_start_ns,
        greatest(new_ns, first_ns + bucket * width_ns) AS clip_new_ns
    FROM pieces
),
covered AS (
    SELECT
        device, bucket,
        sum(CASE WHEN covers = 'all' THEN greatest(clip_end_ns - clip_new_ns, 0) ELSE 0 END) AS covered_ns,
        sum(CASE WHEN covers = 'paused' THEN greatest(clip_end_ns - clip_new_ns, 0) ELSE 0 END) AS paused_ns,
        sum(CASE WHEN is_kernel THEN clip_end_ns - clip_start_ns ELSE 0 END) AS kernel_ns
    FROM clipped
    GROUP BY device, bucket
),
every AS (
    SELECT d.device, b.bucket, s.first_ns, s.width_ns
    FROM (SELECT DISTINCT device FROM launched) AS d
    CROSS JOIN span AS s
    CROSS JOIN (SELECT unnest(range(0, $buckets)) AS bucket) AS b
)
SELECT
    e.device,
    CAST(e.bucket AS BIGINT) AS bucket,
    CAST(e.first_ns + e.bucket * e.width_ns AS BIGINT) AS start_ns,
    CAST(e.first_ns + (e.bucket + 1) * e.width_ns AS BIGINT) AS end_ns,
    CAST(COALESCE(c.covered_ns - c.paused_ns, 0) AS BIGINT) AS busy_ns,
    CAST(COALESCE(c.paused_ns, 0) AS BIGINT) AS paused_ns,
    CAST(COALESCE(c.covered_ns - c.paused_ns, 0) AS DOUBLE)
        / NULLIF(e.width_ns - COALESCE(c.paused_ns, 0), 0) AS busy_share,
    CAST(COALESCE(c.kernel_ns, 0) AS BIGINT) AS kernel_ns
FROM every AS e
LEFT JOIN covered AS c ON c.device = e.device AND c.bucket = e.bucket
ORDER BY e.device, e.bucket
