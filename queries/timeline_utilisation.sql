-- timeline_utilisation: how busy was each device over the run's time?
--
-- Kernels that run at the same time count once in busy_ns: of each kernel only the part after
-- everything that started before it has ended is new, and those parts do not overlap.
-- A device that several processes share is one device where its UUID is known.
--
-- Parameters:
--   buckets  INTEGER  100  Into how many pieces of equal length to cut the time.
--
-- Columns:
--   device      VARCHAR  -   UUID, or process/ordinal where that is not known.
--   bucket      BIGINT   -   Number of the piece, from 0.
--   start_ns    BIGINT   ns  Start of the piece.
--   end_ns      BIGINT   ns  End of the piece; the last one may reach beyond the last kernel.
--   busy_ns     BIGINT   ns  Time with at least one kernel running.
--   busy_share  DOUBLE   1   busy_ns over the piece's length, 0 to 1.
--   kernel_ns   BIGINT   ns  Sum over kernels: more than busy_ns where some ran side by side.
WITH intervals AS (
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
        -- Rounded up, so that the pieces cover the whole run.
        greatest((max(end_ns) - min(start_ns) + $buckets - 1) // $buckets, 1) AS width_ns
    FROM intervals
),
earlier AS (
    SELECT
        device, start_ns, end_ns,
        max(end_ns) OVER (
            PARTITION BY device ORDER BY start_ns, end_ns ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS covered_ns
    FROM intervals
),
pieces AS (
    SELECT
        e.device, e.start_ns, e.end_ns,
        greatest(e.start_ns, COALESCE(e.covered_ns, e.start_ns)) AS new_ns,
        s.first_ns, s.width_ns,
        unnest(range((e.start_ns - s.first_ns) // s.width_ns, (e.end_ns - 1 - s.first_ns) // s.width_ns + 1)) AS bucket
    FROM earlier AS e
    CROSS JOIN span AS s
),
clipped AS (
    SELECT
        device, bucket,
        least(end_ns, first_ns + (bucket + 1) * width_ns) AS clip_end_ns,
        greatest(start_ns, first_ns + bucket * width_ns) AS clip_start_ns,
        greatest(new_ns, first_ns + bucket * width_ns) AS clip_new_ns
    FROM pieces
),
busy AS (
    SELECT
        device, bucket,
        sum(greatest(clip_end_ns - clip_new_ns, 0)) AS busy_ns,
        sum(clip_end_ns - clip_start_ns) AS kernel_ns
    FROM clipped
    GROUP BY device, bucket
),
every AS (
    SELECT d.device, b.bucket, s.first_ns, s.width_ns
    FROM (SELECT DISTINCT device FROM intervals) AS d
    CROSS JOIN span AS s
    CROSS JOIN (SELECT unnest(range(0, $buckets)) AS bucket) AS b
)
SELECT
    e.device,
    CAST(e.bucket AS BIGINT) AS bucket,
    CAST(e.first_ns + e.bucket * e.width_ns AS BIGINT) AS start_ns,
    CAST(e.first_ns + (e.bucket + 1) * e.width_ns AS BIGINT) AS end_ns,
    CAST(COALESCE(b.busy_ns, 0) AS BIGINT) AS busy_ns,
    CAST(COALESCE(b.busy_ns, 0) AS DOUBLE) / e.width_ns AS busy_share,
    CAST(COALESCE(b.kernel_ns, 0) AS BIGINT) AS kernel_ns
FROM every AS e
LEFT JOIN busy AS b ON b.device = e.device AND b.bucket = e.bucket
ORDER BY e.device, e.bucket
