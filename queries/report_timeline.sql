-- report_timeline: how busy were copies on each device over the run's time, and at what clock did its SMs run?
--
-- Cut into the same pieces as timeline_utilisation, from which the parameters come. Copies that run
-- side by side on one device count once.
--
-- Parameters:
--   first_ns  BIGINT   0    Start of the first piece.
--   width_ns  BIGINT   1    Length of a piece.
--   buckets   INTEGER  100  Number of pieces.
--
-- Columns:
--   device       VARCHAR  -   UUID, or process/ordinal where that is not known.
--   bucket       BIGINT   -   Number of the piece, from 0.
--   copy_ns      BIGINT   ns  Time with at least one copy or set running, outside of pauses; NULL where none was.
--   sm_clock_hz  DOUBLE   Hz  Mean of the SM clock's readings in the piece; NULL where there was none.
WITH copied AS (
    SELECT
        COALESCE(d.uuid, concat(c.process, '/', CAST(c.device_id AS VARCHAR))) AS device,
        greatest(c.start_ns, $first_ns) AS start_ns,
        least(c.start_ns + c.duration_ns, $first_ns + CAST($width_ns AS BIGINT) * $buckets) AS end_ns
    FROM copies AS c
    LEFT JOIN devices AS d ON d.process = c.process AND d.device_id = c.device_id
    -- The limits keep damaged instants from overflowing the sum.
    WHERE c.duration_ns BETWEEN 1 AND 1000000000000000 AND c.start_ns BETWEEN 0 AND 4000000000000000000
),
paused AS (
    SELECT DISTINCT
        COALESCE(d.uuid, concat(c.process, '/', CAST(c.device_id AS VARCHAR))) AS device,
        greatest(p.start_ns, $first_ns) AS start_ns,
        least(p.end_ns, $first_ns + CAST($width_ns AS BIGINT) * $buckets) AS end_ns
    FROM (SELECT DISTINCT process, device_id FROM copies) AS c
    JOIN _pause_spans AS p ON p.process = c.process
    LEFT JOIN devices AS d ON d.process = c.process AND d.device_id = c.device_id
),
intervals AS (
    SELECT 'all' AS covers, device, start_ns, end_ns FROM copied
    UNION ALL
    SELECT 'all', device, start_ns, end_ns FROM paused
    UNION ALL
    SELECT 'paused', device, start_ns, end_ns FROM paused
),
earlier AS (
    SELECT
        covers, device, start_ns, end_ns,
        max(end_ns) OVER (
            PARTITION BY covers, device ORDER BY start_ns, end_ns ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS covered_ns
    FROM intervals
    WHERE end_ns > start_ns
),
fresh AS (
    SELECT covers, device, greatest(start_ns, COALESCE(covered_ns, start_ns)) AS start_ns, end_ns
    FROM earlier
),
pieces AS (
    SELECT
        covers, device, start_ns, end_ns,
        unnest(range((start_ns - $first_ns) // CAST($width_ns AS BIGINT), (end_ns - 1 - $first_ns) // CAST($width_ns AS BIGINT) + 1)) AS bucket
    FROM fresh
    WHERE end_ns > start_ns
),
clipped AS (
    SELECT
        covers, device, bucket,
        least(end_ns, $first_ns + (bucket + 1) * CAST($width_ns AS BIGINT))
            - greatest(start_ns, $first_ns + bucket * CAST($width_ns AS BIGINT)) AS new_ns
    FROM pieces
),
copying AS (
    SELECT
        device, bucket,
        NULLIF(sum(CASE WHEN covers = 'all' THEN new_ns ELSE -new_ns END), 0) AS copy_ns
    FROM clipped
    GROUP BY device, bucket
),
readings AS (
    SELECT
        COALESCE(d.uuid, concat(s.process, '/', CAST(s.device_id AS VARCHAR))) AS device,
        (s.time_ns - $first_ns) // CAST($width_ns AS BIGINT) AS bucket,
        s.sm_clock_hz
    FROM device_state AS s
    LEFT JOIN devices AS d ON d.process = s.process AND d.device_id = s.device_id
    WHERE s.sm_clock_hz > 0 AND s.time_ns >= $first_ns AND s.time_ns < $first_ns + CAST($width_ns AS BIGINT) * $buckets
),
clocks AS (
    SELECT device, bucket, avg(sm_clock_hz) AS sm_clock_hz
    FROM readings
    GROUP BY device, bucket
)
SELECT
    COALESCE(c.device, k.device) AS device,
    CAST(COALESCE(c.bucket, k.bucket) AS BIGINT) AS bucket,
    CAST(c.copy_ns AS BIGINT) AS copy_ns,
    k.sm_clock_hz
FROM copying AS c
FULL JOIN clocks AS k ON k.device = c.device AND k.bucket = c.bucket
ORDER BY COALESCE(c.device, k.device), COALESCE(c.bucket, k.bucket)
