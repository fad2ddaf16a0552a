"""The counters that PM sampling collects: columns of `samples`, raw metrics, and what follows from them.

A column of `samples` holds the sum of its counter over the whole device in that sample. Two kinds:

- counts (cycles, instructions, bytes, sectors): the metric's `.sum`;
- busy time (names ending in `_busy_ns`): a percentage of a peak times the length of the sample over 100,
  that is, the nanoseconds the unit would have needed at its peak. This way a percentage adds up over
  time like any count, and the peak is the one that the profiler itself uses, at the clock that ran.

Not every candidate fits every chip or pass: the recorder asks, and takes the first of `raw` that fits.
"""

from __future__ import annotations

from dataclasses import dataclass

ELAPSED = "avg.pct_of_peak_sustained_elapsed"


@dataclass(frozen=True)
class SampledCounter:
    """A column of `samples`: `raw` lists the metrics that give it, best first."""

    column: str
    unit: str
    meaning: str
    raw: tuple[str, ...]

    @property
    def is_busy_time(self) -> bool:
        """Whether the recorder multiplies the metric (a percentage) by the sample's length over 100."""
        return self.column.endswith("_busy_ns")

    @property
    def is_on_sm_clock(self) -> bool:
        """Whether it is busy time of a unit on the SM clock, so that its peak changes with that clock."""
        return self.is_busy_time and self.column.startswith(("pipe_", "l1_"))


@dataclass(frozen=True)
class Formula:
    """How a counter of `rundir.counters` follows from the rates of sampled columns.

    value = scale x numerator / denominator, where the denominator is `launch` (then the value is per
    launch: rate x mean duration), `time`, `sm_cycles` (SMs x the SM clock that ran), `dram_peak` (bytes
    at the memory clock that ran) or another column, each over the same time. Several numerators are
    added. With `per_warp_slot` the value is divided by the warps that an SM can hold.
    """

    counter: str
    numerator: tuple[str, ...]
    denominator: str
    scale: float = 1.0
    per_warp_slot: bool = False


def _sum(column: str, unit: str, meaning: str, *metrics: str) -> SampledCounter:
    return SampledCounter(column, unit, meaning, tuple(f"{metric}.sum" for metric in metrics))


def _busy(column: str, meaning: str, *metrics: str) -> SampledCounter:
    return SampledCounter(column, "ns", f"{meaning}, as time at its peak.", tuple(f"{m}.{ELAPSED}" for m in metrics))


SAMPLED: tuple[SampledCounter, ...] = (
    # clocks and SMs
    _sum("sm_cycles_elapsed", "cycles", "SM cycles, over all SMs.", "sm__cycles_elapsed"),
    _sum(
        "sm_cycles_active",
        "cycles",
        "SM cycles with a resident warp.",
        "sm__cycles_active",
        "TPC.TriageCompute.sm__cycles_active",
    ),
    _sum(
        "inst",
        "instructions",
        "Warp instructions executed.",
        "TPC.TriageCompute.sm__inst_executed_realtime",
        "sm__inst_executed",
        "smsp__inst_executed",
        "sm__inst_executed_realtime",
    ),
    _sum("issue_active_cycles", "cycles", "Scheduler cycles that issued, 4 schedulers an SM.", "smsp__issue_active"),
    _sum(
        "warps_active",
        "warp cycles",
        "Resident warps, summed over cycles.",
        "sm__warps_active",
        "sm__warps_active_realtime",
        "TPC.TriageCompute.tpc__warps_active_realtime",
    ),
    # pipes: by the profiler's own peak where it gives percentages, else by cycles or instructions
    _busy(
        "pipe_tensor_busy_ns",
        "Tensor pipe",
        "TPC.TriageCompute.sm__pipe_tensor_cycles_active_realtime",
        "sm__pipe_tensor_cycles_active",
    ),
    _busy("pipe_fma_busy_ns", "FMA pipe", "sm__pipe_fma_cycles_active", "sm__inst_executed_pipe_fma"),
    _busy(
        "pipe_alu_busy_ns",
        "ALU pipe",
        "TPC.TriageCompute.sm__inst_executed_pipe_alu_realtime",
        "sm__pipe_alu_cycles_active",
        "sm__inst_executed_pipe_alu",
    ),
    _busy(
        "pipe_fp64_busy_ns",
        "FP64 pipe",
        "TPC.TriageCompute.sm__pipe_fp64_cycles_active_realtime",
        "sm__pipe_fp64_cycles_active",
        "sm__inst_executed_pipe_fp64",
    ),
    _busy(
        "pipe_xu_busy_ns",
        "Transcendental and conversion pipe",
        # not SM_A.TriageCompute's: equal to it in the range profiler, it read 2 to 140 % of it in samples of an H200
        "sm__inst_executed_pipe_xu",
    ),
    _busy("pipe_lsu_busy_ns", "Load/store pipe", "sm__inst_executed_pipe_lsu"),
    _sum(
        "pipe_tensor_cycles",
        "cycles",
        "SM cycles in which the tensor pipe was active.",
        "sm__pipe_tensor_cycles_active",
        "sm__pipe_tensor_cycles_active_realtime",
        "TPC.TriageCompute.sm__pipe_tensor_cycles_active_realtime",
    ),
    _sum("pipe_fma_cycles", "cycles", "SM cycles in which the FMA pipe was active.", "sm__pipe_fma_cycles_active"),
    _sum("pipe_alu_cycles", "cycles", "SM cycles in which the ALU pipe was active.", "sm__pipe_alu_cycles_active"),
    _sum(
        "pipe_fp64_cycles",
        "cycles",
        "SM cycles in which the FP64 pipe was active.",
        "sm__pipe_fp64_cycles_active",
        "TPC.TriageCompute.sm__pipe_fp64_cycles_active_realtime",
    ),
    _sum(
        "inst_fma",
        "instructions",
        "Warp instructions, FMA pipe.",
        "sm__inst_executed_pipe_fma",
        "TPC.TriageCompute.sm__inst_executed_pipe_fma_realtime",
    ),
    _sum(
        "inst_alu",
        "instructions",
        "Warp instructions, ALU pipe.",
        "sm__inst_executed_pipe_alu",
        "sm__inst_executed_pipe_alu_realtime",
        "TPC.TriageCompute.sm__inst_executed_pipe_alu_realtime",
    ),
    _sum(
        "inst_xu",
        "instructions",
        "Warp instructions, XU pipe.",
        "sm__inst_executed_pipe_xu",
        "sm__inst_executed_pipe_xu_realtime",
        "SM_A.TriageCompute.sm__inst_executed_pipe_xu_realtime",
    ),
    _sum("inst_lsu", "instructions", "Warp instructions, LSU pipe.", "sm__inst_executed_pipe_lsu"),
    # As a count: the percentage of an SM's quarter is of a peak that the quarters do not have together.
    _sum(
        "inst_adu",
        "instructions",
        "Warp instructions, address divergence pipe (branches, barriers, loads of constants).",
        "sm__inst_executed_pipe_adu",
        "smsp__inst_executed_pipe_adu",
    ),
    # memory
    _sum("dram_read_bytes", "bytes", "Read from DRAM.", "dram__bytes_read", "fbpa__dram_read_bytes"),
    _sum("dram_write_bytes", "bytes", "Written to DRAM.", "dram__bytes_write", "fbpa__dram_write_bytes"),
    SampledCounter(
        "dram_busy_ns",
        "ns",
        "DRAM, as time at its peak.",
        (f"dram__throughput.{ELAPSED}", f"dram__bytes.{ELAPSED}"),
    ),
    _sum("dram_cycles_active", "cycles", "DRAM cycles with a transfer.", "dram__cycles_active"),
    _sum("dram_cycles_elapsed", "cycles", "DRAM cycles, over all channels.", "dram__cycles_elapsed"),
    _sum("l2_bytes", "bytes", "Moved between L2 and its clients.", "lts__t_bytes"),
    _sum("l2_sectors", "sectors", "Sectors looked up in L2.", "lts__t_sectors"),
    _sum("l2_sectors_hit", "sectors", "Those found there.", "lts__t_sectors_lookup_hit"),
    # lts__throughput needs several passes on a GH100; what it has in one leaves out the fabric between L2's halves.
    _busy(
        "l2_slices_busy_ns",
        "L2 slices, without the fabric between their halves",
        "LTS.TriageCompute.lts__throughput",
        "lts__t_sectors",
        "lts__t_bytes",
    ),
    _sum(
        "l1_sectors",
        "sectors",
        "Sectors looked up in L1.",
        "l1tex__t_sectors",
        "SM_B.TriageCompute.l1tex__t_sectors",
    ),
    _sum(
        "l1_sectors_hit",
        "sectors",
        "Those found there.",
        "l1tex__t_sectors_lookup_hit",
        "SM_B.TriageCompute.l1tex__t_sectors_lookup_hit",
    ),
    # l1tex__throughput needs several passes on a GH100, but is the busiest of three parts that need one together.
    _busy(
        "l1_data_busy_ns",
        "L1 data stage, loads and stores",
        "l1tex__data_pipe_lsu_wavefronts",
        "SM_A.TriageCompute.l1tex__data_pipe_lsu_wavefronts",
    ),
    _busy(
        "l1_request_busy_ns",
        "L1 port to the crossbar",
        "l1tex__m_l1tex2xbar_req_cycles_active",
        "SM_A.TriageCompute.l1tex__m_l1tex2xbar_req_cycles_active_realtime",
    ),
    _busy("l1_texture_busy_ns", "L1 input from the texture pipe", "l1tex__texin_sm2tex_req_cycles_active"),
)

# CUPTI puts so many instructions a warp into each kernel that it times, by compute capability. Samples count them,
# exact counters do not. Measured on an H200 with CUPTI 13.0.1 (docs/measurements.md, "What tracing adds").
TRACING_INSTRUCTIONS: dict[tuple[int, int], float] = {(9, 0): 8.0}
# Columns that hold them all: an instruction more is also an issue slot more. Part of them also stand in the ALU pipe's.
TRACED_COLUMNS = ("inst", "issue_active_cycles")

BY_COLUMN = {counter.column: counter for counter in SAMPLED}

# In order of preference: what verdicts need most comes first. A group that does not fit one pass on a
# chip is split from its end. The clock stands in each, so that each has its own cycles.
GROUPS: tuple[tuple[str, ...], ...] = (
    (
        "sm_cycles_elapsed", "sm_cycles_active", "inst", "pipe_tensor_busy_ns", "dram_read_bytes", "dram_write_bytes",
        "dram_busy_ns", "l2_slices_busy_ns", "l1_data_busy_ns", "l1_request_busy_ns", "l2_bytes",
        "pipe_alu_busy_ns", "inst_adu", "l1_texture_busy_ns", "warps_active",
    ),
    (
        "sm_cycles_elapsed", "sm_cycles_active", "issue_active_cycles", "pipe_fp64_busy_ns", "pipe_lsu_busy_ns",
        "l2_sectors", "l2_sectors_hit", "l1_sectors", "l1_sectors_hit", "pipe_xu_busy_ns", "pipe_fma_busy_ns",
    ),
)  # fmt: skip

# The first formula of a counter whose columns were sampled gives it.
FORMULAS: tuple[Formula, ...] = (
    Formula("sm_active_pct", ("sm_cycles_active",), "sm_cycles", 100),
    Formula("pipe_issue_pct", ("inst",), "sm_cycles", 100 / 4),
    Formula("pipe_tensor_pct", ("pipe_tensor_busy_ns",), "time", 100),
    Formula("pipe_tensor_pct", ("pipe_tensor_cycles",), "sm_cycles", 100),
    Formula("pipe_fma_pct", ("pipe_fma_busy_ns",), "time", 100),
    Formula("pipe_fma_pct", ("pipe_fma_cycles",), "sm_cycles", 100),
    Formula("pipe_alu_pct", ("pipe_alu_busy_ns",), "time", 100),
    Formula("pipe_alu_pct", ("pipe_alu_cycles",), "sm_cycles", 100),
    Formula("pipe_fp64_pct", ("pipe_fp64_busy_ns",), "time", 100),
    Formula("pipe_fp64_pct", ("pipe_fp64_cycles",), "sm_cycles", 100),
    Formula("pipe_xu_pct", ("pipe_xu_busy_ns",), "time", 100),
    # 16 lanes an SM: a warp instruction every other cycle.
    Formula("pipe_xu_pct", ("inst_xu",), "sm_cycles", 100 / 0.5),
    Formula("pipe_lsu_pct", ("pipe_lsu_busy_ns",), "time", 100),
    # As much: 0.5 a cycle, by what the exact counter and its percentage say of the same launches.
    Formula("pipe_adu_pct", ("inst_adu",), "sm_cycles", 100 / 0.5),
    Formula("dram_pct", ("dram_busy_ns",), "time", 100),
    Formula("dram_pct", ("dram_read_bytes", "dram_write_bytes"), "dram_peak", 100),
    Formula("l2_slices_pct", ("l2_slices_busy_ns",), "time", 100),
    Formula("l1_data_pct", ("l1_data_busy_ns",), "time", 100),
    Formula("l1_request_pct", ("l1_request_busy_ns",), "time", 100),
    Formula("l1_texture_pct", ("l1_texture_busy_ns",), "time", 100),
    Formula("occupancy_pct", ("warps_active",), "sm_cycles_active", 100, per_warp_slot=True),
    Formula("issue_active_pct", ("issue_active_cycles",), "sm_cycles_active", 100 / 4),
    Formula("ipc", ("inst",), "sm_cycles_active"),
    Formula("l1_hit_pct", ("l1_sectors_hit",), "l1_sectors", 100),
    Formula("l2_hit_pct", ("l2_sectors_hit",), "l2_sectors", 100),
    Formula("dram_read_bytes", ("dram_read_bytes",), "launch"),
    Formula("dram_write_bytes", ("dram_write_bytes",), "launch"),
    Formula("l2_bytes", ("l2_bytes",), "launch"),
    Formula("l2_bytes", ("l2_sectors",), "launch", 32),
    Formula("l1_bytes", ("l1_sectors",), "launch", 32),
    Formula("inst", ("inst",), "launch"),
    Formula("inst_fma", ("inst_fma",), "launch"),
    Formula("inst_alu", ("inst_alu",), "launch"),
    Formula("inst_xu", ("inst_xu",), "launch"),
    Formula("inst_lsu", ("inst_lsu",), "launch"),
)


@dataclass(frozen=True)
class Part:
    """A part of a speed of light; `slots` is how many warp instructions a cycle and SM it takes, if it is known.

    Where such a part was not sampled, the instructions issued bound it: 4 a cycle and SM at most.
    """

    counter: str
    slots: float | str | None = None


@dataclass(frozen=True)
class SpeedOfLight:
    """A percentage that is that of its busiest part; unknown where one of `needed` is.

    `shortfall`: by what share of itself it was above all `parts` in the worst two of a hundred kernels
    that were compared, since it has parts that cannot be sampled (docs/attribution.md).
    """

    counter: str
    parts: tuple[Part, ...]
    needed: tuple[str, ...]
    shortfall: float = 0.0


# `slots` by name: of a device, its operations a cycle and SM over those of a warp of fused multiply-adds.
# Later ones may be parts of earlier ones.
SPEEDS_OF_LIGHT = (
    SpeedOfLight(
        "l1_pct",
        (Part("l1_data_pct"), Part("l1_request_pct"), Part("l1_texture_pct")),
        ("l1_data_pct", "l1_request_pct"),
    ),
    SpeedOfLight(
        "compute_pct",
        (
            Part("pipe_issue_pct"),
            Part("pipe_tensor_pct"),
            Part("pipe_fma_pct", "fp32_flops_per_sm_cycle"),
            Part("pipe_alu_pct", 2.0),
            Part("pipe_fp64_pct", "fp64_flops_per_sm_cycle"),
            Part("pipe_xu_pct", 0.5),
            Part("pipe_lsu_pct", 1.0),
            Part("pipe_adu_pct", 0.5),
        ),
        ("pipe_issue_pct",),
        shortfall=0.015,
    ),
    SpeedOfLight(
        "memory_pct",
        (Part("dram_pct"), Part("l2_slices_pct"), Part("l1_pct")),
        ("dram_pct", "l2_slices_pct"),
        shortfall=0.005,
    ),
)


@dataclass(frozen=True)
class PipeRate:
    """Operations a launch if every busy cycle of a pipe did the operation in question: an upper bound."""

    counter: str
    unit: str
    pipe: str
    rate: str


PIPE_RATES = (
    PipeRate("tensor_ops_at_fp16_rate", "OP", "pipe_tensor_pct", "tensor_fp16_flops_per_sm_cycle"),
    PipeRate("fp32_flops_at_fma_rate", "FLOP", "pipe_fma_pct", "fp32_flops_per_sm_cycle"),
    PipeRate("fp64_flops_at_fma_rate", "FLOP", "pipe_fp64_pct", "fp64_flops_per_sm_cycle"),
)
