-- timeline_utilisation: how busy was each device over the run's time?
--
-- Kernels that run at the same time count once in busy_ns: it is the time from the first start to the last end
-- less the gaps in which none ran. Those are found exactly without sorting all launches at once, as in launch_gaps:
-- in bins of 2^24 ns by start, starts and ends are sorted apart, and nothing runs before the i-th start
-- if and only if it comes after the (i-1)-th end and after the latest end of all bins before.
-- The bins take some 20 bytes of memory a launch; nanalyze itself answers this query of a large run by one pass in
-- order of time, in memory that does not grow with the run (analysis/launch_streams.py), with the same rows.
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
WITH started AS (
    SELECT device, start_ns // 16777216 AS bin, min(start_ns) AS first_ns, max(end_ns) AS last_ns
    FROM _device_kernels
    GROUP BY device, start_ns // 16777216
),
span AS (
    SELECT
        min(first_ns) AS first_ns,
        max(last_ns) AS last_ns,
        -- Rounded up, so that the pieces cover the whole run.
        greatest((max(last_ns) - min(first_ns) + $buckets - 1) // $buckets, 1) AS width_ns
    FROM started
),
used AS (
    SELECT DISTINCT
        k.process, COALESCE(d.uuid, concat(k.process, '/', CAST(k.device_id AS VARCHAR))) AS device
    FROM (SELECT DISTINCT process, device_id FROM _class_devices) AS k
    LEFT JOIN devices AS d ON d.process = k.process AND d.device_id = k.device_id
),
paused AS (
    SELECT DISTINCT u.device, greatest(p.start_ns, s.first_ns) AS start_ns, least(p.end_ns, s.last_ns) AS end_ns
    FROM used AS u
    JOIN _pause_spans AS p ON p.process = u.process
    CROSS JOIN span AS s
    WHERE p.start_ns < s.last_ns AND p.end_ns > s.first_ns
),
bins AS (
    SELECT covers, device, bin, min(first_ns) AS first_ns, max(last_ns) AS last_ns
    FROM (
        SELECT 'all' AS covers, device, bin, first_ns, last_ns FROM started
        UNION ALL
        SELECT 'all', device, start_ns // 16777216, start_ns, end_ns FROM paused
        UNION ALL
        SELECT 'paused', device, start_ns // 16777216, start_ns, end_ns FROM paused
    ) AS both_kinds
    GROUP BY covers, device, bin
),
reached AS (
    SELECT
        covers, device, bin,
        max(last_ns) OVER (
            PARTITION BY covers, device ORDER BY bin ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS reached_ns
    FROM bins
),
-- From the start of the bin, so that a start takes four bytes.
sorted AS (
    SELECT
        covers, device, start_ns // 16777216 AS bin,
        count(*) AS instants,
        list_sort(list(CAST(start_ns % 16777216 AS INTEGER))) AS starts,
        list_sort(list(start_ns % 16777216 + end_ns - start_ns)) AS ends
    FROM (
        SELECT 'all' AS covers, device, start_ns, end_ns FROM _device_kernels
        UNION ALL
        SELECT 'all', device, start_ns, end_ns FROM paused
        UNION ALL
        SELECT 'paused', device, start_ns, end_ns FROM paused
    ) AS instants
    GROUP BY covers, device, start_ns // 16777216
),
places AS (
    SELECT
        s.covers, s.device, s.bin * 16777216 AS bin_ns, s.starts, s.ends,
        r.reached_ns - s.bin * 16777216 AS reached_ns,
        unnest(range(1, s.instants + 1)) AS place
    FROM sorted AS s
    JOIN reached AS r ON r.covers = s.covers AND r.device = s.device AND r.bin = s.bin
),
edges AS (
    SELECT
        covers, device, bin_ns,
        greatest(reached_ns, CASE WHEN place > 1 THEN list_extract(ends, place - 1) END) AS ended,
        list_extract(starts, place) AS started
    FROM places
),
-- The time from first to last counts, the gaps in it count against it.
stretches AS (
    SELECT covers, device, 1 AS sign, min(first_ns) AS start_ns, max(last_ns) AS end_ns
    FROM bins
    GROUP BY covers, device
    UNION ALL
    SELECT covers, device, -1, bin_ns + ended, bin_ns + started
    FROM edges
    WHERE started > ended
    UNION ALL
    SELECT 'kernels', device, 1, start_ns, end_ns
    FROM _device_kernels
),
placed AS (
    SELECT
        t.covers, t.device, t.sign, t.start_ns, t.end_ns,
        (t.start_ns - s.first_ns) // s.width_ns AS first_bucket,
        (t.end_ns - 1 - s.first_ns) // s.width_ns AS last_bucket
    FROM stretches AS t
    CROSS JOIN span AS s
),
-- Most lie in one piece and are added up there; only the others are cut at the pieces' ends.
gathered AS (
    SELECT
        covers, device, first_bucket, last_bucket,
        CASE WHEN first_bucket < last_bucket THEN start_ns END AS start_ns,
        CASE WHEN first_bucket < last_bucket THEN end_ns END AS end_ns,
        sum(sign) AS sign, sum(sign * (end_ns - start_ns)) AS length_ns
    FROM placed
    GROUP BY
        covers, device, first_bucket, last_bucket,
        CASE WHEN first_bucket < last_bucket THEN start_ns END, CASE WHEN first_bucket < last_bucket THEN end_ns END
),
spread AS (
    SELECT *, unnest(range(first_bucket, last_bucket + 1)) AS bucket FROM gathered
),
clipped AS (
    SELECT
        p.covers, p.device, p.bucket,
        CASE
            WHEN p.start_ns IS NULL THEN p.length_ns
            ELSE p.sign * (
                least(p.end_ns, s.first_ns + (p.bucket + 1) * s.width_ns)
                - greatest(p.start_ns, s.first_ns + p.bucket * s.width_ns)
            )
        END AS length_ns
    FROM spread AS p
    CROSS JOIN span AS s
),
covered AS (
    SELECT
        device, bucket,
        sum(CASE WHEN covers = 'all' THEN length_ns ELSE 0 END) AS covered_ns,
        sum(CASE WHEN covers = 'paused' THEN length_ns ELSE 0 END) AS paused_ns,
        sum(CASE WHEN covers = 'kernels' THEN length_ns ELSE 0 END) AS kernel_ns
    FROM clipped
    GROUP BY device, bucket
),
every AS (
    SELECT d.device, b.bucket, s.first_ns, s.width_ns
    FROM (SELECT DISTINCT device FROM started) AS d
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
