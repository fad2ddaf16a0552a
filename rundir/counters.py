"""The counters this product speaks of, each with its unit and the raw metrics that give it.

The recorder asks CUPTI for the raw metrics; the `counters` view renames whatever the `exact`
table holds. Metrics that stand in no entry keep their raw name and reach the view all the same.
Raw names are NVIDIA's (`unit__counter.rollup`); several candidates are tried in order because
architectures and tool versions differ.
"""

from __future__ import annotations

from dataclasses import dataclass

PCT_ELAPSED = "avg.pct_of_peak_sustained_elapsed"
PCT_ACTIVE = "avg.pct_of_peak_sustained_active"


@dataclass(frozen=True)
class Counter:
    """A counter of one launch: `raw` lists CUPTI metrics that measure it, best first."""

    name: str
    unit: str
    meaning: str
    raw: tuple[str, ...]


def _pipe(name: str, meaning: str, *raw: str) -> Counter:
    return Counter(f"pipe_{name}_pct", "%", meaning, tuple(f"{r}.{PCT_ELAPSED}" for r in raw))


def _sass(op: str, meaning: str) -> Counter:
    return Counter(
        f"thread_inst_{op}",
        "instructions",
        meaning,
        (
            f"sm__sass_thread_inst_executed_op_{op}_pred_on.sum",
            f"smsp__sass_thread_inst_executed_op_{op}_pred_on.sum",
        ),
    )


def _tensor(kind: str, meaning: str, *raw: str) -> Counter:
    return Counter(f"tensor_{kind}_ops", "OP", meaning, tuple(f"{r}.sum" for r in raw))


COUNTERS: tuple[Counter, ...] = (
    # time and clocks
    Counter("duration_ns", "ns", "Time on the GPU.", ("gpu__time_duration.sum",)),
    Counter(
        "sm_clock_hz",
        "Hz",
        "SM clock while it ran.",
        # The GPC clock drives the SMs; since 2021.2 Nsight Compute prints it as SM Frequency.
        (
            "sm__cycles_elapsed.avg.per_second",
            "smsp__cycles_elapsed.avg.per_second",
            "gpc__cycles_elapsed.avg.per_second",
        ),
    ),
    Counter("dram_clock_hz", "Hz", "Memory clock while it ran.", ("dram__cycles_elapsed.avg.per_second",)),
    Counter(
        "sm_cycles_elapsed",
        "cycles",
        "SM cycles of its duration (mean over SMs).",
        ("sm__cycles_elapsed.avg", "smsp__cycles_elapsed.avg"),
    ),
    Counter(
        "sm_active_pct",
        "%",
        "Share of the time an SM had a warp.",
        ("sm__cycles_active.avg.pct_of_peak_sustained_elapsed",),
    ),
    # speed of light
    Counter("compute_pct", "%", "Speed of light of the SM: its busiest part.", (f"sm__throughput.{PCT_ELAPSED}",)),
    Counter(
        "memory_pct",
        "%",
        "Speed of light of the memory system: its busiest part.",
        (f"gpu__compute_memory_throughput.{PCT_ELAPSED}",),
    ),
    Counter(
        "dram_pct",
        "%",
        "Speed of light of DRAM.",
        (
            f"gpu__dram_throughput.{PCT_ELAPSED}",
            f"dram__throughput.{PCT_ELAPSED}",
            f"dram__cycles_active.{PCT_ELAPSED}",
            "dram__bytes.sum.pct_of_peak_sustained_elapsed",
        ),
    ),
    Counter("l2_pct", "%", "Speed of light of the L2 cache.", (f"lts__throughput.{PCT_ELAPSED}",)),
    # memory_pct counts this part of L2 alone: on a GH100 lts__throughput also holds the fabric between L2's halves.
    Counter(
        "l2_slices_pct",
        "%",
        "Busiest part of the L2 slices, without the fabric between them.",
        (f"LTS.TriageCompute.lts__throughput.{PCT_ELAPSED}",),
    ),
    Counter(
        "l1_pct",
        "%",
        "Speed of light of the L1 cache.",
        (f"l1tex__throughput.{PCT_ELAPSED}", f"l1tex__throughput.{PCT_ACTIVE}"),
    ),
    Counter(
        "l1_data_pct", "%", "L1 data stage, loads and stores.", (f"l1tex__data_pipe_lsu_wavefronts.{PCT_ELAPSED}",)
    ),
    Counter(
        "l1_request_pct", "%", "L1 port to the crossbar.", (f"l1tex__m_l1tex2xbar_req_cycles_active.{PCT_ELAPSED}",)
    ),
    Counter(
        "l1_texture_pct",
        "%",
        "L1 input from the texture pipe.",
        (f"l1tex__texin_sm2tex_req_cycles_active.{PCT_ELAPSED}",),
    ),
    # pipes and issue, as shares of the peak over the kernel's duration
    _pipe("issue", "Issue slots used.", "sm__inst_executed", "sm__inst_issued"),
    _pipe("alu", "ALU pipe (integer, logic).", "sm__pipe_alu_cycles_active", "sm__inst_executed_pipe_alu"),
    _pipe("fma", "FMA pipe (FP32, integer multiply).", "sm__pipe_fma_cycles_active", "sm__inst_executed_pipe_fma"),
    _pipe("fp64", "FP64 pipe.", "sm__pipe_fp64_cycles_active", "sm__inst_executed_pipe_fp64"),
    _pipe("xu", "Transcendental and conversion pipe.", "sm__inst_executed_pipe_xu", "sm__pipe_xu_cycles_active"),
    _pipe("lsu", "Load/store pipe.", "sm__inst_executed_pipe_lsu"),
    _pipe("adu", "Address divergence pipe (branches, barriers, loads of constants).", "sm__inst_executed_pipe_adu"),
    _pipe(
        "tensor",
        "Tensor pipe.",
        "sm__pipe_tensor_cycles_active",
        "sm__pipe_tensor_op_hmma_cycles_active",
        "sm__pipe_tensor_subpipe_hmma_cycles_active",
        "sm__pipe_tc_cycles_active",
        "sm__inst_executed_pipe_tensor",
        "sm__inst_executed_pipe_tensor_op_hmma",
    ),
    # occupancy and issue
    Counter("occupancy_pct", "%", "Resident warps over the most an SM can hold.", (f"sm__warps_active.{PCT_ACTIVE}",)),
    Counter(
        "issue_active_pct",
        "%",
        "Cycles in which a scheduler issued, of its active ones.",
        (f"smsp__issue_active.{PCT_ACTIVE}", f"sm__issue_active.{PCT_ACTIVE}"),
    ),
    Counter(
        "warps_eligible",
        "warps",
        "Warps ready to issue, per scheduler and cycle.",
        ("smsp__warps_eligible.avg.per_cycle_active",),
    ),
    Counter(
        "ipc",
        "inst/cycle",
        "Instructions an SM executed per active cycle.",
        ("sm__inst_executed.avg.per_cycle_active",),
    ),
    # memory traffic
    Counter("dram_read_bytes", "bytes", "Read from DRAM.", ("dram__bytes_read.sum", "dram__bytes_op_read.sum")),
    Counter("dram_write_bytes", "bytes", "Written to DRAM.", ("dram__bytes_write.sum", "dram__bytes_op_write.sum")),
    Counter("l2_bytes", "bytes", "Moved between L2 and its clients.", ("lts__t_bytes.sum",)),
    Counter("l2_hit_pct", "%", "L2 hit rate, by sector.", ("lts__t_sector_hit_rate.pct",)),
    Counter("l1_bytes", "bytes", "Requested from L1.", ("l1tex__t_bytes.sum",)),
    Counter("l1_hit_pct", "%", "L1 hit rate, by sector.", ("l1tex__t_sector_hit_rate.pct",)),
    # instructions
    Counter(
        "inst", "instructions", "Warp instructions executed.", ("sm__inst_executed.sum", "smsp__inst_executed.sum")
    ),
    Counter("inst_alu", "instructions", "Warp instructions, ALU pipe.", ("sm__inst_executed_pipe_alu.sum",)),
    Counter("inst_fma", "instructions", "Warp instructions, FMA pipe.", ("sm__inst_executed_pipe_fma.sum",)),
    Counter("inst_fp64", "instructions", "Warp instructions, FP64 pipe.", ("sm__inst_executed_pipe_fp64.sum",)),
    Counter("inst_xu", "instructions", "Warp instructions, XU pipe.", ("sm__inst_executed_pipe_xu.sum",)),
    Counter("inst_lsu", "instructions", "Warp instructions, LSU pipe.", ("sm__inst_executed_pipe_lsu.sum",)),
    Counter("inst_tensor", "instructions", "Warp instructions, tensor pipe.", ("sm__inst_executed_pipe_tensor.sum",)),
    # floating-point work
    _sass("fadd", "FP32 additions by thread."),
    _sass("fmul", "FP32 multiplications by thread."),
    _sass("ffma", "FP32 fused multiply-adds by thread."),
    _sass("dadd", "FP64 additions by thread."),
    _sass("dmul", "FP64 multiplications by thread."),
    _sass("dfma", "FP64 fused multiply-adds by thread."),
    _sass("hadd", "FP16 additions by thread (packed: two each)."),
    _sass("hmul", "FP16 multiplications by thread (packed: two each)."),
    _sass("hfma", "FP16 fused multiply-adds by thread (packed: two each)."),
    _tensor("fp16", "Tensor operations on FP16 inputs; a multiply-add is two.", "sm__ops_path_tensor_src_fp16"),
    _tensor("bf16", "Tensor operations on BF16 inputs.", "sm__ops_path_tensor_src_bf16_dst_fp32"),
    _tensor("tf32", "Tensor operations on TF32 inputs.", "sm__ops_path_tensor_src_tf32_dst_fp32"),
    _tensor("fp8", "Tensor operations on FP8 inputs.", "sm__ops_path_tensor_src_fp8"),
    _tensor("int8", "Tensor operations on INT8 inputs.", "sm__ops_path_tensor_src_int8"),
    _tensor("fp64", "Tensor operations on FP64 inputs.", "sm__ops_path_tensor_src_fp64"),
)

# What other tools' files tell in place of counters above; the recorder does not spend a pass on them.
IMPORTED: tuple[Counter, ...] = (
    Counter(
        "dram_bytes",
        "bytes",
        "Read from and written to DRAM, where the two were counted together.",
        ("dram__bytes.sum",),
    ),
)

BY_NAME = {counter.name: counter for counter in (*COUNTERS, *IMPORTED)}
