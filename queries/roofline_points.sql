-- roofline_points: where does each measured kernel stand on the roofline of its own pipe?
--
-- The pipe is the one that would need the longest for what was counted on it, at its peak; its
-- operations give the point. Peaks are those of the device that launched the class most, at the
-- SM clock that ran and at the highest clock. DRAM's peak is at its highest clock.
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
--   operations_per_s        DOUBLE   OP/s      operations over duration_ns.
--   dram_bytes_per_s        DOUBLE   bytes/s   dram_bytes over duration_ns.
--   sm_clock_hz             DOUBLE   Hz        SM clock that ran, by clock_method.
--   clock_method            VARCHAR  -         counters (measured with them), device_state (mean of NVML's readings
--                                              of the device while it was not idle) or maximum (no reading).
--   pipe_peak_per_s         DOUBLE   OP/s      Peak of the pipe at that clock.
--   pipe_peak_max_per_s     DOUBLE   OP/s      Peak of the pipe at the device's highest clock.
--   dram_peak_bytes_per_s   DOUBLE   bytes/s   Peak of DRAM.
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
pipes AS (
    SELECT
        t.kernel_class_id, p.pipe, d.sm_count, d.sm_clock_max_hz, d.dram_peak_bytes_per_s,
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
    CROSS JOIN (
        VALUES
            ('fp64'), ('fp32'), ('fp16'),
            ('tensor_fp64'), ('tensor_tf32'), ('tensor_fp16'), ('tensor_fp8'), ('tensor_int8')
    ) AS p (pipe)
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
        1e9 * r.operations / NULLIF(COALESCE(v.measured_ns, v.mean_ns), 0) AS operations_per_s,
        1e9 * v.dram_bytes / NULLIF(COALESCE(v.measured_ns, v.mean_ns), 0) AS dram_bytes_per_s,
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
        r.dram_peak_bytes_per_s
    FROM verdicts AS v
    JOIN ranked AS r ON r.kernel_class_id = v.kernel_class_id AND r.place = 1
    WHERE r.operations IS NOT NULL OR v.dram_bytes IS NOT NULL
),
roofs AS (
    SELECT
        *,
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
    FROM points
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
