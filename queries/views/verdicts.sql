-- verdicts: what bounds each kernel class, with the evidence; largest share of time first.
--
-- The rules, in order; their thresholds stand in the table settings:
-- 1. communication: the kernel's own name matches one of communication_patterns. Not where Nsight Compute
--    measured it: see 3.
-- 2. Where compute_pct or memory_pct was not measured: launch if the mean duration is below
--    launch_ns and most launches came from no graph, else undetermined.
-- 3. launch: the same, and both percentages are below low_pct. Not for runs imported from Nsight
--    Compute: their verdicts are those of its own rule, which knows no such case.
-- 4. Nsight Compute's speed-of-light rule (SpeedOfLight.py, 2025), which is, for compute c and memory m:
--    a. c >= high_pct or m >= high_pct: bound by the larger, compute if they are equal;
--    b. c < low_pct and m < low_pct: latency, by a small grid if waves < min_waves;
--    c. |c - m| >= lead_pct: bound by the larger;
--    d. else balanced.
-- 5. The rule is applied at the four corners of the 95 % intervals of c and m (Student's t for
--    3 or more launches, lowest to highest for 2). Every outcome's region is bounded by those
--    corners; if they do not agree with the mean: undetermined, the reason naming the candidates.
--    Not for runs imported from Nsight Compute where its rule says the same of every launch.
--
-- Columns:
--   kernel_class_id            BIGINT   -         Which kernel with which shape: see kernel_classes.
--   kernel                     VARCHAR  -         Demangled name; `class <id>` where its row is lost.
--   launches                   BIGINT   launches  All launches seen, of every process and device.
--   total_ns                   BIGINT   ns        Sum of the known durations; NULL where none is known.
--   share                      DOUBLE   1         total_ns over that of all classes, 0 to 1.
--   bound                      VARCHAR  -         memory, compute, latency, balanced, communication, launch or
--                                                 undetermined.
--   likely_bound               VARCHAR  -         The same; where nothing but the width of an interval leaves it
--                                                 undetermined, what the values themselves say.
--   level_or_pipe              VARCHAR  -         memory: DRAM, L2 or L1; compute: tensor, FMA, ALU, FP64, XU, LSU,
--                                                 ADU or issue: the busiest one measured. Else NULL.
--   compute_pct                DOUBLE   %         Speed of light of the SM, mean of the measured launches.
--   memory_pct                 DOUBLE   %         Speed of light of the memory system.
--   occupancy_pct              DOUBLE   %         Achieved occupancy.
--   method                     VARCHAR  -         How the percentages were obtained: exact, sampled or imported.
--   reason                     VARCHAR  -         One sentence: the numbers and thresholds that decided.
--   missing                    VARCHAR  -         Counters whose lack kept the rule from being applied, comma-separated.
--   over_peak                  BOOLEAN  -         Whether a percentage exceeds over_peak_pct: wrong count or peak.
--   launches_measured          BIGINT   launches  Launches with counters.
--   launches_untimed           BIGINT   launches  Launches whose duration is not known.
--   launches_in_graphs         BIGINT   launches  Launches that came from a CUDA graph.
--   mean_ns                    DOUBLE   ns        Mean of the known durations.
--   measured_ns                DOUBLE   ns        Mean duration of the launches with counters.
--   sm_clock_hz                DOUBLE   Hz        SM clock of the launches with counters.
--   compute_low_pct            DOUBLE   %         Lower end of the interval of compute_pct.
--   compute_high_pct           DOUBLE   %         Upper end.
--   memory_low_pct             DOUBLE   %         Lower end of the interval of memory_pct.
--   memory_high_pct            DOUBLE   %         Upper end.
--   dram_pct                   DOUBLE   %         Speed of light of DRAM.
--   l2_pct                     DOUBLE   %         Speed of light of the L2 cache.
--   l2_slices_pct              DOUBLE   %         Its slices, without the fabric between them: part of memory_pct.
--   l1_pct                     DOUBLE   %         Speed of light of the L1 cache.
--   pipe_tensor_pct            DOUBLE   %         Tensor pipe.
--   pipe_fma_pct               DOUBLE   %         FMA pipe.
--   pipe_alu_pct               DOUBLE   %         ALU pipe.
--   pipe_fp64_pct              DOUBLE   %         FP64 pipe.
--   pipe_xu_pct                DOUBLE   %         Transcendental pipe.
--   pipe_lsu_pct               DOUBLE   %         Load/store pipe.
--   pipe_adu_pct               DOUBLE   %         Address divergence pipe: branches, barriers, loads of constants.
--   pipe_issue_pct             DOUBLE   %         Issue slots.
--   issue_active_pct           DOUBLE   %         Active cycles in which a scheduler issued.
--   theoretical_occupancy_pct  DOUBLE   %         The most that registers, shared memory and block size allow.
--   occupancy_limiter          VARCHAR  -         What allows no more: threads, blocks, registers or shared.
--   waves                      DOUBLE   -         Blocks of the grid over the blocks the device holds at once.
--   l1_hit_pct                 DOUBLE   %         L1 hit rate.
--   l2_hit_pct                 DOUBLE   %         L2 hit rate.
--   dram_bytes                 DOUBLE   bytes     Read from and written to DRAM, a launch.
--   l2_bytes                   DOUBLE   bytes     Moved between L2 and its clients, a launch.
--   l1_bytes                   DOUBLE   bytes     Requested from L1, a launch.
--   fp16_flops                 DOUBLE   FLOP      Packed half precision outside the tensor pipe, a launch.
--   fp32_flops                 DOUBLE   FLOP      Single precision, a launch; a fused multiply-add is two.
--   fp64_flops                 DOUBLE   FLOP      Double precision outside the tensor pipe, a launch.
--   tensor_ops                 DOUBLE   OP        All types of the tensor pipe that were counted, a launch.
--   tensor_share               DOUBLE   1         tensor_ops over all counted operations, 0 to 1.
WITH limits AS (
    SELECT
        max(CASE WHEN name = 'high_pct' THEN value END) AS high_pct,
        max(CASE WHEN name = 'low_pct' THEN value END) AS low_pct,
        max(CASE WHEN name = 'lead_pct' THEN value END) AS lead_pct,
        max(CASE WHEN name = 'min_waves' THEN value END) AS min_waves,
        max(CASE WHEN name = 'launch_ns' THEN value END) AS launch_ns,
        max(CASE WHEN name = 'low_occupancy_pct' THEN value END) AS low_occupancy_pct,
        max(CASE WHEN name = 'low_issue_pct' THEN value END) AS low_issue_pct,
        max(CASE WHEN name = 'over_peak_pct' THEN value END) AS over_peak_pct,
        max(CASE WHEN name = 'high_pct' THEN text END) AS high_text,
        max(CASE WHEN name = 'low_pct' THEN text END) AS low_text,
        max(CASE WHEN name = 'lead_pct' THEN text END) AS lead_text,
        max(CASE WHEN name = 'low_occupancy_pct' THEN text END) AS low_occupancy_text,
        max(CASE WHEN name = 'low_issue_pct' THEN text END) AS low_issue_text
    FROM raw.settings
),
evidence AS (
    SELECT
        e.* REPLACE (
            e.is_communication AND (r.source <> 'ncu' OR e.compute_pct IS NULL OR e.memory_pct IS NULL)
                AS is_communication
        ),
        l.*,
        r.source = 'ncu' AS is_from_ncu,
        e.mean_ns < l.launch_ns AND 2 * e.launches_in_graphs < e.launches AS is_short,
        e.compute_pct IS NULL OR e.memory_pct IS NULL AS is_unmeasured
    FROM _evidence AS e
    CROSS JOIN limits AS l
    CROSS JOIN run AS r
),
corners AS (
    SELECT e.kernel_class_id, k.corner, e.high_pct, e.low_pct, e.lead_pct,
        CASE k.corner
            WHEN 'mean' THEN e.compute_pct WHEN 'low-low' THEN e.compute_low_pct
            WHEN 'low-high' THEN e.compute_low_pct ELSE e.compute_high_pct
        END AS compute,
        CASE k.corner
            WHEN 'mean' THEN e.memory_pct WHEN 'low-low' THEN e.memory_low_pct
            WHEN 'high-low' THEN e.memory_low_pct ELSE e.memory_high_pct
        END AS memory
    FROM evidence AS e
    CROSS JOIN (VALUES ('mean'), ('low-low'), ('low-high'), ('high-low'), ('high-high')) AS k (corner)
    WHERE NOT e.is_unmeasured
),
labelled AS (
    SELECT
        kernel_class_id, corner,
        CASE
            WHEN compute >= high_pct OR memory >= high_pct
                THEN CASE WHEN memory > compute THEN 'memory' ELSE 'compute' END
            WHEN compute < low_pct AND memory < low_pct THEN 'latency'
            WHEN compute - memory >= lead_pct THEN 'compute'
            WHEN memory - compute >= lead_pct THEN 'memory'
            ELSE 'balanced'
        END AS label
    FROM corners
),
ruled AS (
    SELECT
        kernel_class_id,
        max(CASE WHEN corner = 'mean' THEN label END) AS label,
        count(DISTINCT label) = 1 AS is_certain,
        concat_ws(
            ' or ',
            max(CASE WHEN label = 'memory' THEN label END),
            max(CASE WHEN label = 'compute' THEN label END),
            max(CASE WHEN label = 'balanced' THEN label END),
            max(CASE WHEN label = 'latency' THEN label END)
        ) AS candidates
    FROM labelled
    GROUP BY kernel_class_id
),
decided AS (
    SELECT
        e.*, r.candidates, r.label,
        CASE
            WHEN e.is_communication THEN 'communication'
            WHEN e.is_unmeasured THEN CASE WHEN e.is_short THEN 'launch' ELSE 'undetermined' END
            WHEN e.is_short AND NOT e.is_from_ncu AND e.compute_pct < e.low_pct AND e.memory_pct < e.low_pct
                THEN 'launch'
            WHEN u.label IS NOT NULL THEN u.label
            WHEN NOT r.is_certain THEN 'undetermined'
            ELSE r.label
        END AS bound,
        CASE
            WHEN e.is_unmeasured AND NOT e.is_communication
                THEN concat_ws(
                    ', ',
                    CASE WHEN e.compute_pct IS NULL THEN 'compute_pct' END,
                    CASE WHEN e.memory_pct IS NULL THEN 'memory_pct' END
                )
            WHEN NOT e.is_communication AND NOT r.is_certain THEN e.parts_missing
        END AS missing,
        -- Another part, or one that was not measured, may be the busiest, unless this one comes near the total.
        CASE WHEN e.top_level_pct >= e.memory_pct - e.lead_pct THEN e.top_level END AS level,
        CASE WHEN e.top_pipe_pct >= e.compute_pct - e.lead_pct THEN e.top_pipe END AS pipe
    FROM evidence AS e
    LEFT JOIN ruled AS r ON r.kernel_class_id = e.kernel_class_id
    LEFT JOIN _launch_rule AS u ON u.kernel_class_id = e.kernel_class_id
),
-- Numbers as text: COALESCE where a sentence mentions one that may be missing.
texts AS (
    SELECT
        *,
        concat(CAST(round(compute_pct, 1) AS VARCHAR), ' %') AS compute_text,
        concat(CAST(round(memory_pct, 1) AS VARCHAR), ' %') AS memory_text,
        concat(CAST(round(mean_ns / 1000.0E0, 2) AS VARCHAR), ' us') AS mean_text,
        concat(', ', level, ' ', CAST(round(top_level_pct, 1) AS VARCHAR), ' %') AS level_text,
        concat(', busiest pipe ', pipe, ' ', CAST(round(top_pipe_pct, 1) AS VARCHAR), ' %') AS pipe_text
    FROM decided
),
explained AS (
    SELECT
        *,
        CASE
            WHEN bound = 'communication'
                THEN 'its name marks a collective, which waits for other devices: counters do not say what bounds it'
            WHEN bound = 'launch' AND is_unmeasured
                THEN concat(
                    'mean duration ', mean_text, ' (< ', CAST(launch_ns / 1000.0E0 AS VARCHAR),
                    ' us), about the cost of a launch; not measured: ', missing
                )
            WHEN bound = 'launch'
                THEN concat(
                    'mean duration ', mean_text, ' (< ', CAST(launch_ns / 1000.0E0 AS VARCHAR),
                    ' us), about the cost of a launch; compute ', compute_text, ', memory ', memory_text,
                    ' of peak (both < ', low_text, ' %)'
                )
            WHEN bound = 'undetermined' AND is_unmeasured AND merged_terms > 1
                THEN concat(
                    'not measured: ', missing, '; the samples cannot tell it apart from ',
                    CAST(merged_terms - 1 AS VARCHAR), ' other kernels that always run along with it'
                )
            WHEN bound = 'undetermined' AND is_unmeasured THEN concat('not measured: ', missing)
            WHEN bound = 'undetermined'
                THEN concat(
                    candidates, CASE WHEN parts_missing IS NULL THEN concat(', likely ', label) ELSE '' END,
                    ': compute ', compute_text,
                    ' (', CAST(round(compute_low_pct, 1) AS VARCHAR), ' to ',
                    CAST(round(compute_high_pct, 1) AS VARCHAR), '), memory ', memory_text,
                    ' (', CAST(round(memory_low_pct, 1) AS VARCHAR), ' to ',
                    CAST(round(memory_high_pct, 1) AS VARCHAR), ') over ',
                    CAST(launches_measured AS VARCHAR), ' launches',
                    CASE WHEN parts_missing IS NULL THEN '' ELSE concat('; not sampled: ', parts_missing) END
                )
            WHEN bound = 'memory'
                THEN concat(
                    'memory ', memory_text, ' of peak ',
                    CASE
                        WHEN memory_pct >= high_pct THEN concat('(>= ', high_text, ' %)')
                        WHEN memory_pct - compute_pct >= lead_pct
                            THEN concat('(>= ', lead_text, ' points above compute)')
                        ELSE 'in the mean, and the higher in each launch'
                    END,
                    COALESCE(CASE WHEN level IS NOT NULL THEN level_text END, ''), '; compute ', compute_text
                )
            WHEN bound = 'compute'
                THEN concat(
                    'compute ', compute_text, ' of peak ',
                    CASE
                        WHEN compute_pct >= high_pct THEN concat('(>= ', high_text, ' %)')
                        WHEN compute_pct - memory_pct >= lead_pct
                            THEN concat('(>= ', lead_text, ' points above memory)')
                        ELSE 'in the mean, and the higher in each launch'
                    END,
                    COALESCE(CASE WHEN pipe IS NOT NULL THEN pipe_text END, ''), '; memory ', memory_text
                )
            WHEN bound = 'balanced'
                THEN concat(
                    'compute ', compute_text, ' and memory ', memory_text, ' of peak: less than ',
                    lead_text, ' points apart, neither >= ', high_text, ' %'
                )
            ELSE concat(
                'compute ', compute_text, ', memory ', memory_text, ' of peak (both < ', low_text, ' %): ',
                CASE
                    WHEN waves < min_waves
                        THEN concat(
                            'the grid fills ', CAST(round(waves, 2) AS VARCHAR), ' of one wave on ',
                            CAST(sm_count AS VARCHAR), ' SMs'
                        )
                    WHEN occupancy_pct < low_occupancy_pct
                        THEN concat(
                            'few warps, occupancy ', CAST(round(occupancy_pct, 1) AS VARCHAR), ' % (< ',
                            low_occupancy_text, ' %)',
                            COALESCE(
                                CASE
                                    WHEN theoretical_occupancy_pct IS NOT NULL
                                        THEN concat(
                                            ' of ', CAST(round(theoretical_occupancy_pct, 1) AS VARCHAR),
                                            ' % possible by ', occupancy_limiter
                                        )
                                END,
                                ''
                            )
                        )
                    WHEN issue_active_pct < low_issue_pct
                        THEN concat(
                            'enough warps, but they wait: schedulers issue in ',
                            CAST(round(issue_active_pct, 1) AS VARCHAR), ' % of their cycles (< ',
                            low_issue_text, ' %)'
                        )
                    ELSE 'dependencies between instructions or memory latency'
                END
            )
        END AS because
    FROM texts
)
SELECT
    kernel_class_id, kernel, launches, total_ns,
    CAST(total_ns AS DOUBLE) / NULLIF(sum(total_ns) OVER (), 0) AS share,
    bound,
    CASE WHEN bound = 'undetermined' AND parts_missing IS NULL THEN COALESCE(label, bound) ELSE bound END
        AS likely_bound,
    CASE bound WHEN 'memory' THEN level WHEN 'compute' THEN pipe END AS level_or_pipe,
    compute_pct, memory_pct, occupancy_pct,
    method,
    CASE
        WHEN highest_pct > over_peak_pct
            THEN concat(
                because, '; a counter reads ', CAST(round(highest_pct, 1) AS VARCHAR),
                ' % of its peak, so the count or the peak is wrong'
            )
        ELSE because
    END AS reason,
    missing,
    COALESCE(highest_pct > over_peak_pct, FALSE) AS over_peak,
    launches_measured, launches_untimed, launches_in_graphs,
    mean_ns, measured_ns, sm_clock_hz,
    compute_low_pct, compute_high_pct, memory_low_pct, memory_high_pct,
    dram_pct, l2_pct, l2_slices_pct, l1_pct,
    pipe_tensor_pct, pipe_fma_pct, pipe_alu_pct, pipe_fp64_pct, pipe_xu_pct, pipe_lsu_pct, pipe_adu_pct,
    pipe_issue_pct,
    issue_active_pct, theoretical_occupancy_pct, occupancy_limiter, waves,
    l1_hit_pct, l2_hit_pct,
    dram_bytes, l2_bytes, l1_bytes,
    fp16_flops, fp32_flops, fp64_flops, tensor_ops,
    tensor_ops / NULLIF(tensor_ops + COALESCE(fp16_flops, 0) + COALESCE(fp32_flops, 0) + COALESCE(fp64_flops, 0), 0)
        AS tensor_share
FROM explained
ORDER BY total_ns DESC NULLS LAST, kernel_class_id
