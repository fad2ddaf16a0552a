-- roofline_points: where does each measured kernel stand on the roofline of its own pipe?
--
-- The pipe is the one that would need the longest for what was counted on it, at its peak; its
-- operations give the point. Peaks are those of the device that launched the class most, at the
-- SM clock that ran and at the highest clock. DRAM's peak is at its highest clock.
--
-- The point has an intensity for each level of the memory: operations over the bytes moved there.
-- Ceilings are what the device was measured to reach (`nanalyze doctor --calibrate`), those of the pipe
-- and of L1 at the SM clock that ran; NULL where that was not done or reaches only part of a pipe.
--
-- Columns:
--   kernel_class_id         BIGINT   -         Which kernel with which shape.
--   kernel                  VARCHAR  -         Demangled name.
--   bound                   VARCHAR  -         See verdicts.
--   total_ns                BIGINT   ns        Time of all its launches.
--   share                   DOUBLE   1         Of all kernel time, 0 to 1.
--   launches_measured       BIGINT   launches  Launches with counters.
--   duration_ns             DOUBLE   ns        Mean of the launches with counters, else of all.
--   pipe                    VARCHAR  -         fp64, fp32, fp16, tensor_fp64, tensor_tf32, tensor_fp16 (and bf16),
--                                              tensor_fp8 or tensor_int8; NULL where nothing was counted.
--   operations              DOUBLE   OP        On that pipe, a launch; a multiply-add is two.
--   operations_all          DOUBLE   OP        On all pipes, a launch.
--   dram_bytes              DOUBLE   bytes     Read from and written to DRAM, a launch.
--   intensity               DOUBLE   OP/byte   operations over dram_bytes.
--   l2_bytes                DOUBLE   bytes     Moved between L2 and its clients, a launch.
--   l1_bytes                DOUBLE   bytes     Requested from L1, a launch.
--   l2_intensity            DOUBLE   OP/byte   operations over l2_bytes.
--   l1_intensity            DOUBLE   OP/byte   operations over l1_bytes.
--   operations_per_s        DOUBLE   OP/s      operations over duration_ns.
--   dram_bytes_per_s        DOUBLE   bytes/s   dram_bytes over duration_ns.
--   l2_bytes_per_s          DOUBLE   bytes/s   l2_bytes over duration_ns.
--   l1_bytes_per_s          DOUBLE   bytes/s   l1_bytes over duration_ns.
--   sm_clock_hz             DOUBLE   Hz        SM clock that ran, by clock_method.
--   clock_method            VARCHAR  -         counters (measured with them), device_state (mean of NVML's readings
--                                              of the device while it was not idle) or maximum (no reading).
--   pipe_peak_per_s         DOUBLE   OP/s      Peak of the pipe at that clock.
--   pipe_peak_max_per_s     DOUBLE   OP/s      Peak of the pipe at the device's highest clock.
--   dram_peak_bytes_per_s   DOUBLE   bytes/s   Peak of DRAM.
--   pipe_ceiling_per_s      DOUBLE   OP/s      Measured ceiling of the pipe at that clock.
--   dram_ceiling_per_s      DOUBLE   bytes/s   Measured ceiling of DRAM: of reading, writing and copying the best.
--   l2_ceiling_per_s        DOUBLE   bytes/s   Measured ceiling of reads from L2.
--   l1_ceiling_per_s        DOUBLE   bytes/s   Measured ceiling of reads from L1, at that clock.
--   nearest                 VARCHAR  -         Of the pipe, DRAM, L2 and L1, the one nearest to its ceiling: the
--                                              measured one, else the peak; those without either are left out.
--   nearest_share           DOUBLE   1         Its rate over that ceiling.
--   ridge                   DOUBLE   OP/byte   Intensity at which the two roofs meet, at the measured clock.
--   roof                    VARCHAR  -         DRAM left of the ridge, else the pipe.
--   roof_per_s              DOUBLE   OP/s      Height of the roof above the point.
--   roof_share              DOUBLE   1         operations_per_s over roof_per_s, 0 to 1.
--   over_peak               BOOLEAN  -         Whether it exceeds its roof, so that a count or a peak is wrong.
WITH clocks AS (
    SELECT process, device_id, avg(sm_clock_hz) AS sm_clock_hz
    FROM device_state
    WHERE sm_clock_hz > 0 AND COALESCE(throttle_reasons, 0) % 2 = 0
    GROUP BY process, device_id
),
memory_ceilings AS (
    SELECT
        process, device_id,
        max(CASE WHEN ceiling IN ('dram_read', 'dram_write', 'dram_copy') THEN per_s END) AS dram_ceiling_per_s,
        max(CASE WHEN ceiling = 'l2_read' THEN per_s END) AS l2_ceiling_per_s,
        max(CASE WHEN ceiling = 'l1_read' THEN per_s / NULLIF(sm_clock_hz, 0) END) AS l1_ceiling_per_cycle
    FROM ceilings
    GROUP BY process, device_id
),
pipe_ceilings AS (
    SELECT
        process, device_id,
        CASE ceiling WHEN 'tensor_bf16' THEN 'tensor_fp16' ELSE ceiling END AS pipe,
        max(per_s / NULLIF(sm_clock_hz, 0)) AS ceiling_per_cycle
    FROM ceilings
    WHERE NOT is_partial
    GROUP BY process, device_id, CASE ceiling WHEN 'tensor_bf16' THEN 'tensor_fp16' ELSE ceiling END
),
pipes AS (
    SELECT
        t.kernel_class_id, p.pipe, d.sm_count, d.sm_clock_max_hz, d.dram_peak_bytes_per_s,
        m.dram_ceiling_per_s, m.l2_ceiling_per_s, m.l1_ceiling_per_cycle, r.ceiling_per_cycle,
        o.sm_clock_hz AS sm_clock_read_hz,
        CASE p.pipe
            WHEN 'fp64' THEN c.thread_inst_dadd + c.thread_inst_dmul + 2 * c.thread_inst_dfma
            WHEN 'fp32' THEN c.thread_inst_fadd + c.thread_inst_fmul + 2 * c.thread_inst_ffma
            WHEN 'fp16' THEN 2 * (c.thread_inst_hadd + c.thread_inst_hmul + 2 * c.thread_inst_hfma)
            WHEN 'tensor_fp64' THEN c.tensor_fp64_ops
            WHEN 'tensor_tf32' THEN c.tensor_tf32_ops
            WHEN 'tensor_fp16' THEN CASE
                WHEN COALESCE(c.tensor_fp16_ops, c.tensor_bf16_ops) IS NOT NULL
                    THEN COALESCE(c.tensor_fp16_ops, 0) + COALESCE(c.tensor_bf16_ops, 0)
            END
            WHEN 'tensor_fp8' THEN c.tensor_fp8_ops
            WHEN 'tensor_int8' THEN c.tensor_int8_ops
        END AS operations,
        CASE p.pipe
            WHEN 'fp64' THEN d.fp64_flops_per_sm_cycle
            WHEN 'fp32' THEN d.fp32_flops_per_sm_cycle
            WHEN 'fp16' THEN d.fp16_flops_per_sm_cycle
            WHEN 'tensor_fp64' THEN d.tensor_fp64_flops_per_sm_cycle
            WHEN 'tensor_tf32' THEN d.tensor_tf32_flops_per_sm_cycle
            WHEN 'tensor_fp16' THEN d.tensor_fp16_flops_per_sm_cycle
            WHEN 'tensor_fp8' THEN d.tensor_fp8_flops_per_sm_cycle
            WHEN 'tensor_int8' THEN d.tensor_int8_ops_per_sm_cycle
        END AS sm_cycle_peak
    FROM _class_totals AS t
    JOIN _class_counters AS c ON c.kernel_class_id = t.kernel_class_id
    LEFT JOIN devices AS d ON d.process = t.process AND d.device_id = t.device_id
    LEFT JOIN clocks AS o ON o.process = t.process AND o.device_id = t.device_id
    LEFT JOIN memory_ceilings AS m ON m.process = t.process AND m.device_id = t.device_id
    CROSS JOIN (
        VALUES
            ('fp64'), ('fp32'), ('fp16'),
            ('tensor_fp64'), ('tensor_tf32'), ('tensor_fp16'), ('tensor_fp8'), ('tensor_int8')
    ) AS p (pipe)
    LEFT JOIN pipe_ceilings AS r ON r.process = t.process AND r.device_id = t.device_id AND r.pipe = p.pipe
),
ranked AS (
    SELECT
        *,
        sum(operations) OVER (PARTITION BY kernel_class_id) AS operations_all,
        row_number() OVER (
            PARTITION BY kernel_class_id
            ORDER BY operations / NULLIF(sm_cycle_peak, 0) DESC NULLS LAST, operations DESC NULLS LAST, pipe
        ) AS place
    FROM pipes
),
points AS (
    SELECT
        v.kernel_class_id, v.kernel, v.bound, v.total_ns, v.share, v.launches_measured,
        COALESCE(v.measured_ns, v.mean_ns) AS duration_ns,
        CASE WHEN r.operations > 0 THEN r.pipe END AS pipe,
        r.operations, r.operations_all, v.dram_bytes,
        r.operations / NULLIF(v.dram_bytes, 0) AS intensity,
        v.l2_bytes, v.l1_bytes,
        r.operations / NULLIF(v.l2_bytes, 0) AS l2_intensity,
        r.operations / NULLIF(v.l1_bytes, 0) AS l1_intensity,
        1e9 * r.operations / NULLIF(COALESCE(v.measured_ns, v.mean_ns), 0) AS operations_per_s,
        1e9 * v.dram_bytes / NULLIF(COALESCE(v.measured_ns, v.mean_ns), 0) AS dram_bytes_per_s,
        1e9 * v.l2_bytes / NULLIF(COALESCE(v.measured_ns, v.mean_ns), 0) AS l2_bytes_per_s,
        1e9 * v.l1_bytes / NULLIF(COALESCE(v.measured_ns, v.mean_ns), 0) AS l1_bytes_per_s,
        COALESCE(v.sm_clock_hz, r.sm_clock_read_hz, r.sm_clock_max_hz) AS sm_clock_hz,
        CASE
            WHEN v.sm_clock_hz IS NOT NULL THEN 'counters'
            WHEN r.sm_clock_read_hz IS NOT NULL THEN 'device_state'
            WHEN r.sm_clock_max_hz IS NOT NULL THEN 'maximum'
        END AS clock_method,
        CASE
            WHEN r.operations > 0
                THEN r.sm_cycle_peak * r.sm_count * COALESCE(v.sm_clock_hz, r.sm_clock_read_hz, r.sm_clock_max_hz)
        END AS pipe_peak_per_s,
        CASE WHEN r.operations > 0 THEN r.sm_cycle_peak * r.sm_count * r.sm_clock_max_hz END AS pipe_peak_max_per_s,
        r.dram_peak_bytes_per_s,
        CASE
            WHEN r.operations > 0
                THEN r.ceiling_per_cycle * COALESCE(v.sm_clock_hz, r.sm_clock_read_hz, r.sm_clock_max_hz)
        END AS pipe_ceiling_per_s,
        r.dram_ceiling_per_s, r.l2_ceiling_per_s,
        r.l1_ceiling_per_cycle * COALESCE(v.sm_clock_hz, r.sm_clock_read_hz, r.sm_clock_max_hz) AS l1_ceiling_per_s
    FROM verdicts AS v
    JOIN ranked AS r ON r.kernel_class_id = v.kernel_class_id AND r.place = 1
    WHERE r.operations IS NOT NULL OR v.dram_bytes IS NOT NULL
),
levels AS (
    SELECT
        *,
        operations_per_s / NULLIF(COALESCE(pipe_ceiling_per_s, pipe_peak_per_s), 0) AS pipe_share,
        dram_bytes_per_s / NULLIF(COALESCE(dram_ceiling_per_s, dram_peak_bytes_per_s), 0) AS dram_share,
        l2_bytes_per_s / NULLIF(l2_ceiling_per_s, 0) AS l2_share,
        l1_bytes_per_s / NULLIF(l1_ceiling_per_s, 0) AS l1_share
    FROM points
),
roofs AS (
    SELECT
        * EXCLUDE (pipe_share, dram_share, l2_share, l1_share),
        CASE greatest(pipe_share, dram_share, l2_share, l1_share)
            WHEN pipe_share THEN pipe
            WHEN dram_share THEN 'DRAM'
            WHEN l2_share THEN 'L2'
            WHEN l1_share THEN 'L1'
        END AS nearest,
        greatest(pipe_share, dram_share, l2_share, l1_share) AS nearest_share,
        pipe_peak_per_s / NULLIF(dram_peak_bytes_per_s, 0) AS ridge,
        CASE
            WHEN intensity * dram_peak_bytes_per_s < pipe_peak_per_s THEN 'DRAM'
            WHEN pipe_peak_per_s IS NOT NULL THEN pipe
        END AS roof,
        -- Without DRAM traffic only the pipe limits.
        CASE
            WHEN pipe_peak_per_s IS NOT NULL
                THEN least(pipe_peak_per_s, intensity * dram_peak_bytes_per_s)
        END AS roof_per_s
    FROM levels
)
SELECT
    r.*,
    r.operations_per_s / NULLIF(r.roof_per_s, 0) AS roof_share,
    COALESCE(
        100 * r.operations_per_s / NULLIF(r.roof_per_s, 0) > s.value
        OR 100 * r.dram_bytes_per_s / NULLIF(r.dram_peak_bytes_per_s, 0) > s.value,
        FALSE
    ) AS over_peak
FROM roofs AS r
CROSS JOIN settings AS s
WHERE s.name = 'over_peak_pct'
ORDER BY r.total_ns DESC NULLS LAST, r.kernel_class_id
