-- ranks: how do the ranks of a parallel job compare, and which one do the others wait for?
--
-- One row a process and device that ran kernels. A collective's kernel runs on each rank until the last
-- one has joined, so its time is transfer and waiting together; the rank with the least of it is
-- the one that came last, for whatever reason (its kernels, its clocks, its host). That is the slowest.
-- Where a rank ran no collective, the slowest is the one whose kernels took the most time. Meaningful
-- where all ranks do the same: not across stages of a pipeline. Processes that no launcher numbered may have
-- run one after another, so of those only the devices of one process are compared.
--
-- Columns:
--   rank                 BIGINT   -         Global rank; NULL without a launcher.
--   process              VARCHAR  -         Which process.
--   host                 VARCHAR  -         Its host.
--   device_id            INTEGER  -         CUDA ordinal in the process.
--   device               VARCHAR  -         Its product name; NULL where not known.
--   launches             BIGINT   launches  Kernels launched.
--   span_ns              BIGINT   ns        From the first kernel's start to the last one's end.
--   compute_ns           BIGINT   ns        Time in kernels that do not communicate.
--   compute_skew         DOUBLE   1         That, relative to the mean of what is compared, less 1; NULL with one row.
--   communication_ns     BIGINT   ns        Time in kernels that communicate, waiting included.
--   communication_share  DOUBLE   1         Of all kernel time, 0 to 1.
--   waiting_ns           BIGINT   ns        More than the least of those compared: waiting for others; NULL if one has none.
--   sm_clock_hz          DOUBLE   Hz        Mean reading of the SM clock; NULL where there was none.
--   is_slowest           BOOLEAN  -         Whether the others wait for this one; false with one row.
WITH clocks AS (
    SELECT process, device_id, avg(sm_clock_hz) AS sm_clock_hz
    FROM device_state
    GROUP BY process, device_id
),
totals AS (
    SELECT
        k.process, k.device_id,
        CAST(sum(k.launches) AS BIGINT) AS launches,
        max(k.last_ns) - min(k.first_ns) AS span_ns,
        CAST(COALESCE(sum(CASE WHEN m.kernel_class_id IS NULL THEN k.total_ns END), 0) AS DOUBLE) AS compute_ns,
        CAST(COALESCE(sum(CASE WHEN m.kernel_class_id IS NOT NULL THEN k.total_ns END), 0) AS DOUBLE) AS communication_ns
    FROM _class_devices AS k
    LEFT JOIN _communicating AS m ON m.kernel_class_id = k.kernel_class_id
    GROUP BY k.process, k.device_id
),
peers AS (
    SELECT
        t.*, p.rank, p.host,
        CASE WHEN p.rank IS NULL THEN t.process END AS peers
    FROM totals AS t
    LEFT JOIN processes AS p ON p.process = t.process
),
compared AS (
    SELECT
        *,
        count(*) OVER (PARTITION BY peers) AS compared,
        avg(compute_ns) OVER (PARTITION BY peers) AS mean_compute_ns,
        -- The one that waited least; where one has nothing to wait in, the one that computed most.
        row_number() OVER (
            PARTITION BY peers
            ORDER BY
                CASE WHEN least_communication_ns > 0 THEN communication_ns ELSE -compute_ns END,
                process, device_id
        ) AS place
    FROM (SELECT *, min(communication_ns) OVER (PARTITION BY peers) AS least_communication_ns FROM peers) AS t
)
SELECT
    t.rank, t.process, t.host, t.device_id, d.name AS device,
    t.launches,
    t.span_ns,
    TRY_CAST(t.compute_ns AS BIGINT) AS compute_ns,
    CASE WHEN t.compared > 1 THEN t.compute_ns / NULLIF(t.mean_compute_ns, 0) - 1 END AS compute_skew,
    TRY_CAST(t.communication_ns AS BIGINT) AS communication_ns,
    t.communication_ns / NULLIF(t.compute_ns + t.communication_ns, 0) AS communication_share,
    CASE
        WHEN t.compared > 1 AND t.least_communication_ns > 0
            THEN TRY_CAST(t.communication_ns - t.least_communication_ns AS BIGINT)
    END AS waiting_ns,
    c.sm_clock_hz,
    t.place = 1 AND t.compared > 1 AS is_slowest
FROM compared AS t
LEFT JOIN devices AS d ON d.process = t.process AND d.device_id = t.device_id
LEFT JOIN clocks AS c ON c.process = t.process AND c.device_id = t.device_id
ORDER BY t.rank NULLS LAST, t.process, t.device_id
