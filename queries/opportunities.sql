-- opportunities: which changes would gain the most, and at most how much?
--
-- Every bound is an upper bound (Amdahl's law): what would be saved if the lost time went to nothing and all else
-- stayed as it is. Bounds overlap, so they do not add up. A gap can be closed at most whole. A kernel that reaches
-- p % of a peak becomes at most 1 - p / 100 shorter without doing less work (at the lower end of p's interval).
-- Where a DRAM-bound kernel starts after another one, fusing them saves at most the bytes that the first writes and
-- the second reads, at the rate of each; not for launches of one class in a row, which mostly work through pieces of
-- one task. Bounds by counters only where the class has counters, none above its peak. Launches replayed for
-- counters and their time do not count, nor do gaps of unknown cause. Without any timeline shares are of kernel
-- time.
--
-- Parameters:
--   rows  INTEGER  10  How many.
--
-- Columns:
--   change           VARCHAR  -   launches, start, waiting, host, dependencies, issue (gaps; issue: those
--                                 before copies), overlap (communication), copies,
--                                 access (memory-bound), arithmetic (compute-bound), latency, rate (bound by neither
--                                 for certain), fusion, tail or occupancy.
--   subject          VARCHAR  -   The kernel; for gaps the one that ended most of that time; for fusion the second.
--   kernel_class_id  BIGINT   -   Its class.
--   after_class_id   BIGINT   -   For fusion the class of the first.
--   bound_ns         BIGINT   ns  The most that could be saved, summed over devices.
--   share            DOUBLE   1   Of the devices' recorded time (time_by_cause without not recorded), 0 to 1.
--   speedup_bound    DOUBLE   -   1 / (1 - share): the whole is at most so many times as fast; NULL for a share of 1.
--   method           VARCHAR  -   timeline (times and launch shapes alone), else of the counters.
--   evidence         VARCHAR  -   The numbers that it rests on.
--   shown_by         VARCHAR  -   A shipped query or a statement that shows them.
WITH times AS (
    SELECT * FROM _device_time
),
classes AS (
    SELECT * FROM _kernel_losses
),
on_timeline AS (
    SELECT kernel_class_id, CAST(sum(kernel_ns) AS DOUBLE) AS kernel_ns
    FROM times
    WHERE kernel_class_id IS NOT NULL
    GROUP BY kernel_class_id
),
observed AS (
    SELECT
        count(*) > 0 AS has_timeline,
        CAST(sum(new_any_ns) - sum(new_unknown_ns) + COALESCE(sum(gap_ns), 0) AS DOUBLE) AS observed_ns
    FROM times
),
weighed AS (
    SELECT
        c.*,
        CASE WHEN o.has_timeline THEN COALESCE(t.kernel_ns, 0) ELSE CAST(c.total_ns AS DOUBLE) END AS job_ns
    FROM classes AS c
    CROSS JOIN observed AS o
    LEFT JOIN on_timeline AS t ON t.kernel_class_id = c.kernel_class_id
),
whole AS (
    SELECT CASE WHEN o.has_timeline THEN o.observed_ns ELSE (SELECT sum(job_ns) FROM weighed) END AS whole_ns
    FROM observed AS o
),
by_class AS (
    SELECT
        cause, kernel_class_id, sum(activities) AS gaps, sum(gap_ns) AS gap_ns,
        row_number() OVER (PARTITION BY cause ORDER BY sum(gap_ns) DESC, kernel_class_id) AS place
    FROM times
    WHERE cause IS NOT NULL
    GROUP BY cause, kernel_class_id
),
lost AS (
    SELECT
        cause, sum(gaps) AS gaps, sum(gap_ns) AS lost_ns,
        max(CASE WHEN place = 1 THEN kernel_class_id END) AS kernel_class_id
    FROM by_class
    GROUP BY cause
    UNION ALL
    SELECT 'communication', NULL, sum(new_kernel_ns) - sum(new_compute_ns), NULL FROM times
    UNION ALL
    SELECT 'copy', NULL, sum(new_any_ns) - sum(new_kernel_ns), NULL FROM times
),
waits AS (
    SELECT
        c.change, l.kernel_class_id, CAST(NULL AS BIGINT) AS after_class_id,
        CAST(l.lost_ns AS DOUBLE) AS bound_ns,
        'timeline' AS method,
        CASE
            WHEN l.gaps IS NULL THEN c.what
            ELSE concat(
                CAST(l.gaps AS VARCHAR), CASE WHEN l.gaps = 1 THEN ' gap of ' ELSE ' gaps, mean ' END,
                CAST(round(l.lost_ns / 1000.0E0 / l.gaps, 1) AS VARCHAR), ' us, ', c.what
            )
        END AS evidence,
        'time_by_cause' AS shown_by
    FROM lost AS l
    JOIN (
        VALUES
            ('launch', 'launches', 'ended by a launch that the host called as fast as it could'),
            ('start', 'start', 'ended by a kernel that was queued'),
            ('synchronisation', 'waiting', 'ended by a launch called soon after, the host silent for longer before'),
            ('host', 'host', 'with nothing queued, the host silent for longer than before'),
            ('dependency', 'dependencies', 'ended by a kernel that was queued and had to wait'),
            ('communication', 'overlap', 'time in which only kernels that communicate ran'),
            ('before copy', 'issue', 'ended by a copy or set, whose call is not recorded'),
            ('copy', 'copies', 'time in which only copies or memory sets ran')
    ) AS c (cause, change, what) ON c.cause = l.cause
),
rates AS (
    SELECT
        CASE bound
            WHEN 'memory' THEN 'access' WHEN 'compute' THEN 'arithmetic' WHEN 'latency' THEN 'latency' ELSE 'rate'
        END AS change,
        kernel_class_id, CAST(NULL AS BIGINT) AS after_class_id,
        job_ns * (1 - peak_pct / 100) AS bound_ns,
        method,
        concat(
            'compute ', CAST(round(compute_pct, 1) AS VARCHAR), ' %, memory ', CAST(round(memory_pct, 1) AS VARCHAR),
            ' % of peak', CASE WHEN level_or_pipe IS NULL THEN '' ELSE concat(' (', level_or_pipe, ')') END,
            ', ', CAST(round(job_ns / 1e6, 2) AS VARCHAR), ' ms in all'
        ) AS evidence,
        concat('SELECT * FROM verdicts WHERE kernel_class_id = ', CAST(kernel_class_id AS VARCHAR)) AS shown_by
    FROM weighed
    WHERE bound IN ('memory', 'compute', 'latency', 'balanced', 'undetermined')
        -- Where occupancy alone allows as much, its row says so with the limiter.
        AND (occupancy_share IS NULL OR occupancy_share < 1 - peak_pct / 100)
),
pairs AS (
    SELECT previous_class_id, kernel_class_id, launches FROM _kernel_pairs
),
fusions AS (
    SELECT
        'fusion' AS change, b.kernel_class_id, a.kernel_class_id AS after_class_id,
        p.launches * least(a.dram_write_bytes, b.dram_read_bytes) * (
            a.mean_ns / NULLIF(a.dram_read_bytes + a.dram_write_bytes, 0)
            + b.mean_ns / NULLIF(b.dram_read_bytes + b.dram_write_bytes, 0)
        ) AS bound_ns,
        CASE WHEN a.method = b.method THEN a.method ELSE 'sampled' END AS method,
        concat(
            'started after it ', CAST(p.launches AS VARCHAR), ' times; of DRAM the first writes ',
            CAST(round(a.dram_write_bytes / 1e6, 2) AS VARCHAR), ' of ',
            CAST(round((a.dram_read_bytes + a.dram_write_bytes) / 1e6, 2) AS VARCHAR), ' MB, the second reads ',
            CAST(round(b.dram_read_bytes / 1e6, 2) AS VARCHAR), ' of ',
            CAST(round((b.dram_read_bytes + b.dram_write_bytes) / 1e6, 2) AS VARCHAR), ' MB'
        ) AS evidence,
        concat(
            'SELECT * FROM verdicts WHERE kernel_class_id IN (', CAST(a.kernel_class_id AS VARCHAR), ', ',
            CAST(b.kernel_class_id AS VARCHAR), ')'
        ) AS shown_by
    FROM pairs AS p
    JOIN classes AS a
        ON a.kernel_class_id = p.previous_class_id AND a.bound = 'memory' AND a.level_or_pipe = 'DRAM'
        AND a.peak_pct IS NOT NULL
    JOIN classes AS b
        ON b.kernel_class_id = p.kernel_class_id AND b.bound = 'memory' AND b.level_or_pipe = 'DRAM'
        AND b.peak_pct IS NOT NULL
),
shapes AS (
    SELECT
        'tail' AS change, kernel_class_id, CAST(NULL AS BIGINT) AS after_class_id,
        job_ns * tail_share AS bound_ns,
        'timeline' AS method,
        concat(
            CAST(round(waves, 2) AS VARCHAR), ' waves of ', CAST(blocks_per_sm AS VARCHAR),
            ' blocks an SM, the last fills ', CAST(round(100 * last_wave, 1) AS VARCHAR), ' % of the device'
        ) AS evidence,
        'kernel_losses' AS shown_by
    FROM weighed
    UNION ALL
    SELECT
        'occupancy', kernel_class_id, NULL,
        job_ns * occupancy_share,
        method,
        concat(
            'occupancy ', CAST(round(occupancy_pct, 1) AS VARCHAR), ' %, limited by ', COALESCE(limiter, 'something'),
            ', and bound by latency: compute ', CAST(round(compute_pct, 1) AS VARCHAR), ' %, memory ',
            CAST(round(memory_pct, 1) AS VARCHAR), ' % of peak'
        ),
        'kernel_losses'
    FROM weighed
),
every AS (
    SELECT * FROM waits
    UNION ALL
    SELECT * FROM rates
    UNION ALL
    SELECT * FROM fusions
    UNION ALL
    SELECT * FROM shapes
)
SELECT
    e.change, k.name AS subject, e.kernel_class_id, e.after_class_id,
    TRY_CAST(e.bound_ns AS BIGINT) AS bound_ns,
    least(e.bound_ns / NULLIF(w.whole_ns, 0), 1) AS share,
    CASE WHEN e.bound_ns < w.whole_ns THEN w.whole_ns / (w.whole_ns - e.bound_ns) END AS speedup_bound,
    e.method, e.evidence, e.shown_by
FROM every AS e
CROSS JOIN whole AS w
LEFT JOIN kernel_classes AS k ON k.kernel_class_id = e.kernel_class_id
WHERE e.bound_ns > 0
ORDER BY e.bound_ns DESC, e.change, e.kernel_class_id, e.after_class_id
LIMIT $rows
