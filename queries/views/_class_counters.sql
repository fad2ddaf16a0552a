-- _class_counters: the counters that the verdict and the roofline use, one row a class.
--
-- Columns:
--   kernel_class_id    BIGINT  -             Which kernel with which shape.
--   launches_measured  BIGINT  launches      With compute_pct; with any counter where that is missing.
--   method             VARCHAR  -            Of the two percentages; sampled where one of them is.
--   parts_missing      VARCHAR  -            Their parts that were not sampled, comma-separated.
--   compute_low_pct    DOUBLE  %             Lower end of the 95 % interval; the value itself for one launch.
--   compute_high_pct   DOUBLE  %             Upper end.
--   memory_low_pct     DOUBLE  %             Lower end of the 95 % interval; the value itself for one launch.
--   memory_high_pct    DOUBLE  %             Upper end.
--   duration_ns        DOUBLE  ns            Time on the GPU.
--   sm_clock_hz        DOUBLE  Hz            SM clock while it ran.
--   compute_pct        DOUBLE  %             Speed of light of the SM: its busiest part.
--   memory_pct         DOUBLE  %             Speed of light of the memory system: its busiest part.
--   dram_pct           DOUBLE  %             Speed of light of DRAM.
--   l2_pct             DOUBLE  %             Speed of light of the L2 cache.
--   l2_slices_pct      DOUBLE  %             Busiest part of the L2 slices, without the fabric between them.
--   l1_pct             DOUBLE  %             Speed of light of the L1 cache.
--   pipe_issue_pct     DOUBLE  %             Issue slots used.
--   pipe_alu_pct       DOUBLE  %             ALU pipe (integer, logic).
--   pipe_fma_pct       DOUBLE  %             FMA pipe (FP32, integer multiply).
--   pipe_fp64_pct      DOUBLE  %             FP64 pipe.
--   pipe_xu_pct        DOUBLE  %             Transcendental and conversion pipe.
--   pipe_lsu_pct       DOUBLE  %             Load/store pipe.
--   pipe_adu_pct       DOUBLE  %             Address divergence pipe (branches, barriers, loads of constants).
--   pipe_tensor_pct    DOUBLE  %             Tensor pipe.
--   occupancy_pct      DOUBLE  %             Resident warps over the most an SM can hold.
--   issue_active_pct   DOUBLE  %             Cycles in which a scheduler issued, of its active ones.
--   l2_bytes           DOUBLE  bytes         Moved between L2 and its clients.
--   l2_hit_pct         DOUBLE  %             L2 hit rate, by sector.
--   l1_bytes           DOUBLE  bytes         Requested from L1.
--   l1_hit_pct         DOUBLE  %             L1 hit rate, by sector.
--   dram_read_bytes    DOUBLE  bytes         Read from DRAM.
--   dram_write_bytes   DOUBLE  bytes         Written to DRAM.
--   dram_bytes         DOUBLE  bytes         Both, where they were counted together.
--   thread_inst_fadd   DOUBLE  instructions  FP32 additions by thread.
--   thread_inst_fmul   DOUBLE  instructions  FP32 multiplications by thread.
--   thread_inst_ffma   DOUBLE  instructions  FP32 fused multiply-adds by thread.
--   thread_inst_dadd   DOUBLE  instructions  FP64 additions by thread.
--   thread_inst_dmul   DOUBLE  instructions  FP64 multiplications by thread.
--   thread_inst_dfma   DOUBLE  instructions  FP64 fused multiply-adds by thread.
--   thread_inst_hadd   DOUBLE  instructions  FP16 additions by thread (packed: two each).
--   thread_inst_hmul   DOUBLE  instructions  FP16 multiplications by thread (packed: two each).
--   thread_inst_hfma   DOUBLE  instructions  FP16 fused multiply-adds by thread (packed: two each).
--   tensor_fp16_ops    DOUBLE  OP            Tensor operations on FP16 inputs; a multiply-add is two.
--   tensor_bf16_ops    DOUBLE  OP            Tensor operations on BF16 inputs.
--   tensor_tf32_ops    DOUBLE  OP            Tensor operations on TF32 inputs.
--   tensor_fp8_ops     DOUBLE  OP            Tensor operations on FP8 inputs.
--   tensor_int8_ops    DOUBLE  OP            Tensor operations on INT8 inputs.
--   tensor_fp64_ops    DOUBLE  OP            Tensor operations on FP64 inputs.
SELECT
    kernel_class_id,
    COALESCE(max(CASE WHEN counter = 'compute_pct' THEN launches END), max(launches)) AS launches_measured,
    max(CASE WHEN counter IN ('compute_pct', 'memory_pct') THEN method END) AS method,
    NULLIF(concat_ws(
        ', ',
        max(CASE WHEN counter = 'compute_pct' THEN missing END),
        max(CASE WHEN counter = 'memory_pct' THEN missing END)
    ), '') AS parts_missing,
    max(CASE WHEN counter = 'compute_pct' THEN low END) AS compute_low_pct,
    max(CASE WHEN counter = 'compute_pct' THEN high END) AS compute_high_pct,
    max(CASE WHEN counter = 'memory_pct' THEN low END) AS memory_low_pct,
    max(CASE WHEN counter = 'memory_pct' THEN high END) AS memory_high_pct,
    max(CASE WHEN counter = 'duration_ns' THEN value END) AS duration_ns,
    max(CASE WHEN counter = 'sm_clock_hz' THEN value END) AS sm_clock_hz,
    max(CASE WHEN counter = 'compute_pct' THEN value END) AS compute_pct,
    max(CASE WHEN counter = 'memory_pct' THEN value END) AS memory_pct,
    max(CASE WHEN counter = 'dram_pct' THEN value END) AS dram_pct,
    max(CASE WHEN counter = 'l2_pct' THEN value END) AS l2_pct,
    max(CASE WHEN counter = 'l2_slices_pct' THEN value END) AS l2_slices_pct,
    max(CASE WHEN counter = 'l1_pct' THEN value END) AS l1_pct,
    max(CASE WHEN counter = 'pipe_issue_pct' THEN value END) AS pipe_issue_pct,
    max(CASE WHEN counter = 'pipe_alu_pct' THEN value END) AS pipe_alu_pct,
    max(CASE WHEN counter = 'pipe_fma_pct' THEN value END) AS pipe_fma_pct,
    max(CASE WHEN counter = 'pipe_fp64_pct' THEN value END) AS pipe_fp64_pct,
    max(CASE WHEN counter = 'pipe_xu_pct' THEN value END) AS pipe_xu_pct,
    max(CASE WHEN counter = 'pipe_lsu_pct' THEN value END) AS pipe_lsu_pct,
    max(CASE WHEN counter = 'pipe_adu_pct' THEN value END) AS pipe_adu_pct,
    max(CASE WHEN counter = 'pipe_tensor_pct' THEN value END) AS pipe_tensor_pct,
    max(CASE WHEN counter = 'occupancy_pct' THEN value END) AS occupancy_pct,
    max(CASE WHEN counter = 'issue_active_pct' THEN value END) AS issue_active_pct,
    max(CASE WHEN counter = 'l2_bytes' THEN value END) AS l2_bytes,
    max(CASE WHEN counter = 'l2_hit_pct' THEN value END) AS l2_hit_pct,
    max(CASE WHEN counter = 'l1_bytes' THEN value END) AS l1_bytes,
    max(CASE WHEN counter = 'l1_hit_pct' THEN value END) AS l1_hit_pct,
    max(CASE WHEN counter = 'dram_read_bytes' THEN value END) AS dram_read_bytes,
    max(CASE WHEN counter = 'dram_write_bytes' THEN value END) AS dram_write_bytes,
    max(CASE WHEN counter = 'dram_bytes' THEN value END) AS dram_bytes,
    max(CASE WHEN counter = 'thread_inst_fadd' THEN value END) AS thread_inst_fadd,
    max(CASE WHEN counter = 'thread_inst_fmul' THEN value END) AS thread_inst_fmul,
    max(CASE WHEN counter = 'thread_inst_ffma' THEN value END) AS thread_inst_ffma,
    max(CASE WHEN counter = 'thread_inst_dadd' THEN value END) AS thread_inst_dadd,
    max(CASE WHEN counter = 'thread_inst_dmul' THEN value END) AS thread_inst_dmul,
    max(CASE WHEN counter = 'thread_inst_dfma' THEN value END) AS thread_inst_dfma,
    max(CASE WHEN counter = 'thread_inst_hadd' THEN value END) AS thread_inst_hadd,
    max(CASE WHEN counter = 'thread_inst_hmul' THEN value END) AS thread_inst_hmul,
    max(CASE WHEN counter = 'thread_inst_hfma' THEN value END) AS thread_inst_hfma,
    max(CASE WHEN counter = 'tensor_fp16_ops' THEN value END) AS tensor_fp16_ops,
    max(CASE WHEN counter = 'tensor_bf16_ops' THEN value END) AS tensor_bf16_ops,
    max(CASE WHEN counter = 'tensor_tf32_ops' THEN value END) AS tensor_tf32_ops,
    max(CASE WHEN counter = 'tensor_fp8_ops' THEN value END) AS tensor_fp8_ops,
    max(CASE WHEN counter = 'tensor_int8_ops' THEN value END) AS tensor_int8_ops,
    max(CASE WHEN counter = 'tensor_fp64_ops' THEN value END) AS tensor_fp64_ops
FROM _counters
GROUP BY kernel_class_id
