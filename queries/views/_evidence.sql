-- _evidence: everything known of a kernel class that bears on its verdict, one row a class.
--
-- Columns:
--   kernel_class_id            BIGINT   -         Which kernel with which shape.
--   kernel                     VARCHAR  -         Demangled name; `class <id>` where its row is lost.
--   is_communication           BOOLEAN  -         Whether its name marks a collective or the like.
--   launches                   BIGINT   launches  All launches seen.
--   launches_untimed           BIGINT   launches  Those whose duration is not known.
--   launches_in_graphs         BIGINT   launches  Those that came from a CUDA graph.
--   launches_measured          BIGINT   launches  Those with counters.
--   method                     VARCHAR  -         exact, imported or sampled: the speed of light.
--   parts_missing              VARCHAR  -         Its parts that were not sampled, comma-separated.
--   merged_terms               BIGINT   -         Where samples cannot tell the class apart: of how many terms it is.
--   total_ns                   BIGINT   ns        Sum of the known durations.
--   mean_ns                    DOUBLE   ns        Mean of the known durations.
--   measured_ns                DOUBLE   ns        Mean duration of the launches with counters.
--   sm_clock_hz                DOUBLE   Hz        SM clock of the launches with counters.
--   compute_pct                DOUBLE   %         Speed of light of the SM.
--   compute_low_pct            DOUBLE   %         Lower end of its interval.
--   compute_high_pct           DOUBLE   %         Upper end.
--   memory_pct                 DOUBLE   %         Speed of light of the memory system.
--   memory_low_pct             DOUBLE   %         Lower end of its interval.
--   memory_high_pct            DOUBLE   %         Upper end.
--   dram_pct                   DOUBLE   %         Speed of light of DRAM.
--   l2_pct                     DOUBLE   %         Speed of light of the L2 cache.
--   l2_slices_pct              DOUBLE   %         The slices of L2, without the fabric between them.
--   l1_pct                     DOUBLE   %         Speed of light of the L1 cache.
--   top_level                  VARCHAR  -         The one of those that makes memory_pct: DRAM, L2 (its slices if known)
--                                                 or L1.
--   top_level_pct              DOUBLE   %         Its percentage.
--   pipe_tensor_pct            DOUBLE   %         Tensor pipe.
--   pipe_fma_pct               DOUBLE   %         FMA pipe.
--   pipe_alu_pct               DOUBLE   %         ALU pipe.
--   pipe_fp64_pct              DOUBLE   %         FP64 pipe.
--   pipe_xu_pct                DOUBLE   %         Transcendental pipe.
--   pipe_lsu_pct               DOUBLE   %         Load/store pipe.
--   pipe_adu_pct               DOUBLE   %         Address divergence pipe.
--   pipe_issue_pct             DOUBLE   %         Issue slots.
--   top_pipe                   VARCHAR  -         The busiest of those: tensor, FMA, ALU, FP64, XU, LSU, ADU or
--                                                 issue.
--   top_pipe_pct               DOUBLE   %         Its percentage.
--   occupancy_pct              DOUBLE   %         Achieved occupancy.
--   theoretical_occupancy_pct  DOUBLE   %         See _occupancy.
--   occupancy_limiter          VARCHAR  -         See _occupancy.
--   waves                      DOUBLE   -         See _occupancy.
--   sm_count                   INTEGER  SMs       SMs of its device.
--   issue_active_pct           DOUBLE   %         Cycles in which a scheduler issued.
--   l1_hit_pct                 DOUBLE   %         L1 hit rate.
--   l2_hit_pct                 DOUBLE   %         L2 hit rate.
--   dram_bytes                 DOUBLE   bytes     Read from and written to DRAM, a launch.
--   l2_bytes                   DOUBLE   bytes     Moved between L2 and its clients, a launch.
--   l1_bytes                   DOUBLE   bytes     Requested from L1, a launch.
--   fp16_flops                 DOUBLE   FLOP      Packed half precision outside the tensor pipe, a launch.
--   fp32_flops                 DOUBLE   FLOP      Single precision, a launch; a fused multiply-add is two.
--   fp64_flops                 DOUBLE   FLOP      Double precision outside the tensor pipe, a launch.
--   tensor_ops                 DOUBLE   OP        All types of the tensor pipe that were counted, a launch.
--   highest_pct                DOUBLE   %         The largest of all percentages of a peak.
WITH ids AS (
    SELECT kernel_class_id FROM _class_totals
    UNION
    SELECT kernel_class_id FROM _class_counters
),
merged AS (
    SELECT kernel_class_id, max(merged_terms) AS merged_terms
    FROM raw.attribution
    WHERE NOT is_told_apart AND kernel_class_id IS NOT NULL
    GROUP BY kernel_class_id
),
gathered AS (
    SELECT
        i.kernel_class_id,
        COALESCE(k.name, concat('class ', CAST(i.kernel_class_id AS VARCHAR))) AS kernel,
        m.kernel_class_id IS NOT NULL AS is_communication,
        COALESCE(t.launches, 0) AS launches,
        COALESCE(t.launches_untimed, 0) AS launches_untimed,
        COALESCE(t.launches_in_graphs, 0) AS launches_in_graphs,
        COALESCE(c.launches_measured, 0) AS launches_measured,
        a.merged_terms,
        t.total_ns, t.mean_ns,
        c.* EXCLUDE (kernel_class_id, launches_measured),
        COALESCE(c.l2_slices_pct, c.l2_pct) AS l2_level_pct,
        o.theoretical_occupancy_pct, o.occupancy_limiter, o.waves, o.sm_count
    FROM ids AS i
    LEFT JOIN kernel_classes AS k ON k.kernel_class_id = i.kernel_class_id
    LEFT JOIN _communicating AS m ON m.kernel_class_id = i.kernel_class_id
    LEFT JOIN _class_totals AS t ON t.kernel_class_id = i.kernel_class_id
    LEFT JOIN _class_counters AS c ON c.kernel_class_id = i.kernel_class_id
    LEFT JOIN merged AS a ON a.kernel_class_id = i.kernel_class_id
    LEFT JOIN _occupancy AS o ON o.kernel_class_id = i.kernel_class_id
),
ranked AS (
    SELECT
        *,
        -- memory_pct is the maximum over its parts, so the level that binds is the one that equals
        -- it. The largest is not: lts__throughput has parts that memory_pct leaves out, and stands
        -- at 89 % in a copy whose memory_pct of 84 % is DRAM's.
        least(abs(dram_pct - memory_pct), abs(l2_level_pct - memory_pct), abs(l1_pct - memory_pct)) AS level_gap,
        greatest(dram_pct, l2_pct, l2_slices_pct, l1_pct) AS highest_level_pct,
        greatest(
            pipe_tensor_pct, pipe_fma_pct, pipe_alu_pct, pipe_fp64_pct, pipe_xu_pct, pipe_lsu_pct, pipe_adu_pct,
            pipe_issue_pct
        ) AS top_pipe_pct
    FROM gathered
),
levelled AS (
    SELECT
        *,
        CASE level_gap
            WHEN abs(dram_pct - memory_pct) THEN 'DRAM'
            WHEN abs(l2_level_pct - memory_pct) THEN 'L2'
            WHEN abs(l1_pct - memory_pct) THEN 'L1'
        END AS top_level
    FROM ranked
)
SELECT
    kernel_class_id, kernel, is_communication,
    launches, launches_untimed, launches_in_graphs, launches_measured,
    method, parts_missing, merged_terms,
    total_ns, mean_ns, duration_ns AS measured_ns, sm_clock_hz,
    compute_pct, compute_low_pct, compute_high_pct, memory_pct, memory_low_pct, memory_high_pct,
    dram_pct, l2_pct, l2_slices_pct, l1_pct,
    top_level,
    CASE top_level
        WHEN 'DRAM' THEN dram_pct
        WHEN 'L2' THEN l2_level_pct
        WHEN 'L1' THEN l1_pct
    END AS top_level_pct,
    pipe_tensor_pct, pipe_fma_pct, pipe_alu_pct, pipe_fp64_pct, pipe_xu_pct, pipe_lsu_pct, pipe_adu_pct,
    pipe_issue_pct,
    CASE top_pipe_pct
        WHEN pipe_tensor_pct THEN 'tensor'
        WHEN pipe_fma_pct THEN 'FMA'
        WHEN pipe_alu_pct THEN 'ALU'
        WHEN pipe_fp64_pct THEN 'FP64'
        WHEN pipe_xu_pct THEN 'XU'
        WHEN pipe_lsu_pct THEN 'LSU'
        WHEN pipe_adu_pct THEN 'ADU'
        WHEN pipe_issue_pct THEN 'issue'
    END AS top_pipe,
    top_pipe_pct,
    occupancy_pct, theoretical_occupancy_pct, occupancy_limiter, waves, sm_count,
    issue_active_pct, l1_hit_pct, l2_hit_pct,
    COALESCE(dram_read_bytes + dram_write_bytes, dram_bytes) AS dram_bytes,
    l2_bytes, l1_bytes,
    2 * (thread_inst_hadd + thread_inst_hmul + 2 * thread_inst_hfma) AS fp16_flops,
    thread_inst_fadd + thread_inst_fmul + 2 * thread_inst_ffma AS fp32_flops,
    thread_inst_dadd + thread_inst_dmul + 2 * thread_inst_dfma AS fp64_flops,
    CASE
        WHEN COALESCE(
            tensor_fp16_ops, tensor_bf16_ops, tensor_tf32_ops, tensor_fp8_ops, tensor_int8_ops, tensor_fp64_ops
        ) IS NOT NULL
            THEN COALESCE(tensor_fp16_ops, 0) + COALESCE(tensor_bf16_ops, 0) + COALESCE(tensor_tf32_ops, 0)
                + COALESCE(tensor_fp8_ops, 0) + COALESCE(tensor_int8_ops, 0) + COALESCE(tensor_fp64_ops, 0)
    END AS tensor_ops,
    greatest(compute_pct, memory_pct, highest_level_pct, top_pipe_pct, occupancy_pct, issue_active_pct) AS highest_pct
FROM levelled
