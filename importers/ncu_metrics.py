"""Nsight Compute's names for counters, over its versions and over architectures.

Three things stand here, each once: the labels that the details page prints instead of metric names
(`LABELS`), what follows from other metrics where the counter itself was not collected (`DERIVED`),
and which tools and chips have a name (`SPELLINGS`). Which metrics measure a counter of ours, best
first, is the table in `nanalyze.rundir.counters`; `table()` shows all of it together.

Versions are the first and last whose output is known to have the name (`2021.2-` since, `-2020.1`
until); between two known ones the change may have come earlier.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from nanalyze.rundir.counters import COUNTERS, IMPORTED, PCT_ACTIVE, PCT_ELAPSED

Values = Mapping[str, float]
ALL = (*COUNTERS, *IMPORTED)

COMPUTE = f"sm__throughput.{PCT_ELAPSED}"
MEMORY = f"gpu__compute_memory_throughput.{PCT_ELAPSED}"
DURATION = "gpu__time_duration.sum"
PASSES = "profiler__replayer_passes"
WAVES = "launch__waves_per_multiprocessor"


# --- labels of the details page ----------------------------------------------------------------------


@dataclass(frozen=True)
class Label:
    """What the details page prints for a metric; `section` starts the section's name, "" for any.

    `unit` is part of the key where one label serves two metrics ("%" or "/s").
    """

    label: str
    metric: str
    section: str = ""
    unit: str = ""
    versions: str = "2019.1-"


_SOL = "GPU Speed Of Light"
_MWA = "Memory Workload Analysis"
_CWA = "Compute Workload Analysis"
_LAUNCH = "Launch Statistics"
_DISTRIBUTION = "GPU and Memory Workload Distribution"

LABELS: tuple[Label, ...] = (
    # speed of light
    Label("Compute (SM) Throughput", COMPUTE, _SOL, versions="2021.2-"),
    Label("SM [%]", COMPUTE, _SOL, versions="-2021.1"),
    Label("SOL SM", COMPUTE, _SOL, versions="-2021.1"),
    Label("Memory Throughput", MEMORY, _SOL, "%", "2021.2-"),
    Label("Memory [%]", MEMORY, _SOL, versions="-2021.1"),
    Label("SOL Memory", MEMORY, _SOL, versions="-2021.1"),
    Label("Duration", DURATION, _SOL),
    Label("Elapsed Cycles", "gpc__cycles_elapsed.max", _SOL),
    Label("SM Active Cycles", "sm__cycles_active.avg"),
    Label("SM Frequency", "gpc__cycles_elapsed.avg.per_second", _SOL + " Throughput", versions="2021.2-"),
    Label("SM Frequency", "smsp__cycles_elapsed.avg.per_second", _SOL, versions="-2021.1"),
    Label("DRAM Frequency", "dram__cycles_elapsed.avg.per_second"),
    Label("Memory Frequency", "dram__cycles_elapsed.avg.per_second", versions="-2020.1"),
    Label("DRAM Throughput", f"gpu__dram_throughput.{PCT_ELAPSED}", _SOL, "%", "2021.2-"),
    Label("SOL DRAM", f"gpu__dram_throughput.{PCT_ELAPSED}", _SOL, versions="2020.2-2021.1"),
    Label("SOL FB", f"dram__throughput.{PCT_ELAPSED}", _SOL, versions="-2020.1"),
    Label("L2 Cache Throughput", f"lts__throughput.{PCT_ELAPSED}", _SOL, "%", "2021.2-"),
    Label("SOL L2 Cache", f"lts__throughput.{PCT_ELAPSED}", _SOL, versions="2020.2-2021.1"),
    Label("SOL L2", f"lts__throughput.{PCT_ELAPSED}", _SOL, versions="-2020.1"),
    Label("L1/TEX Cache Throughput", f"l1tex__throughput.{PCT_ACTIVE}", _SOL, "%", "2021.2-"),
    Label("SOL L1/TEX Cache", f"l1tex__throughput.{PCT_ACTIVE}", _SOL, versions="2020.2-2021.1"),
    Label("SOL TEX", f"l1tex__throughput.{PCT_ACTIVE}", _SOL, versions="-2020.1"),
    # compute workload
    Label("Executed Ipc Elapsed", "sm__inst_executed.avg.per_cycle_elapsed", _CWA),
    Label("Executed Ipc Active", "sm__inst_executed.avg.per_cycle_active", _CWA),
    Label("Issued Ipc Active", "sm__inst_issued.avg.per_cycle_active", _CWA),
    Label("SM Busy", f"sm__instruction_throughput.{PCT_ACTIVE}", _CWA),
    Label("Issue Slots Busy", f"sm__inst_issued.{PCT_ACTIVE}", _CWA),
    # memory workload
    Label("Memory Throughput", "dram__bytes.sum.per_second", _MWA, "/s"),
    Label("Mem Busy", f"gpu__compute_memory_access_throughput.{PCT_ELAPSED}", _MWA),
    Label("Max Bandwidth", f"gpu__compute_memory_request_throughput.{PCT_ELAPSED}", _MWA),
    Label("Mem Pipes Busy", f"sm__memory_throughput.{PCT_ELAPSED}", _MWA),
    Label("L1/TEX Hit Rate", "l1tex__t_sector_hit_rate.pct", _MWA),
    Label("L1 Hit Rate", "l1tex__t_sector_hit_rate.pct", _MWA, versions="-2020.1"),
    Label("L2 Hit Rate", "lts__t_sector_hit_rate.pct", _MWA),
    Label("L2 Compression Success Rate", "lts__average_gcomp_input_sector_success_rate.pct", _MWA, versions="2020.2-"),
    Label(
        "L2 Compression Ratio",
        "lts__average_gcomp_output_sector_compression_achieved_rate.ratio",
        _MWA,
        versions="2020.2-",
    ),
    # schedulers and warps
    Label("Active Warps Per Scheduler", "smsp__warps_active.avg.per_cycle_active"),
    Label("Eligible Warps Per Scheduler", "smsp__warps_eligible.avg.per_cycle_active"),
    Label("Issued Warp Per Scheduler", "smsp__issue_active.avg.per_cycle_active"),
    Label("One or More Eligible", f"smsp__issue_active.{PCT_ACTIVE}"),
    Label("No Eligible", f"smsp__issue_inst0.{PCT_ACTIVE}"),
    Label("Warp Cycles Per Issued Instruction", "smsp__average_warp_latency_per_inst_issued.ratio"),
    Label("Warp Cycles Per Executed Instruction", "smsp__average_warps_active_per_inst_executed.ratio"),
    Label("Avg. Active Threads Per Warp", "smsp__thread_inst_executed_per_inst_executed.ratio"),
    Label("Avg. Not Predicated Off Threads Per Warp", "smsp__thread_inst_executed_pred_on_per_inst_executed.ratio"),
    # instructions
    Label("Executed Instructions", "smsp__inst_executed.sum"),
    Label("Issued Instructions", "smsp__inst_issued.sum"),
    Label("Avg. Executed Instructions Per Scheduler", "smsp__inst_executed.avg"),
    Label("Avg. Issued Instructions Per Scheduler", "smsp__inst_issued.avg"),
    Label("Branch Instructions", "smsp__inst_executed_op_branch.sum"),
    Label("Branch Instructions Ratio", "derived__smsp__inst_executed_op_branch_pct"),
    Label("Branch Efficiency", "smsp__sass_average_branch_targets_threads_uniform.pct"),
    Label("Avg. Divergent Branches", "smsp__sass_branch_targets_threads_divergent.avg"),
    # launch
    Label("Grid Size", "launch__grid_size", _LAUNCH),
    Label("Block Size", "launch__block_size", _LAUNCH),
    Label("Threads", "launch__thread_count", _LAUNCH),
    Label("Cluster Size", "launch__cluster_size", _LAUNCH, versions="2022.3-"),
    Label("Cluster Scheduling Policy", "launch__cluster_scheduling_policy", _LAUNCH, versions="2022.3-"),
    Label("Function Cache Configuration", "launch__func_cache_config", _LAUNCH),
    Label("Registers Per Thread", "launch__registers_per_thread", _LAUNCH),
    Label("Static Shared Memory Per Block", "launch__shared_mem_per_block_static", _LAUNCH),
    Label("Dynamic Shared Memory Per Block", "launch__shared_mem_per_block_dynamic", _LAUNCH),
    Label("Driver Shared Memory Per Block", "launch__shared_mem_per_block_driver", _LAUNCH, versions="2020.2-"),
    Label("Shared Memory Configuration Size", "launch__shared_mem_config_size", _LAUNCH),
    Label("Waves Per SM", WAVES),
    Label("# SMs", "launch__sm_count", _LAUNCH, versions="2024.1-"),
    Label("# TPCs", "launch__tpc_count", _LAUNCH, versions="2025.1-"),
    Label("Enabled TPC IDs", "launch__tpc_enabled", _LAUNCH, versions="2025.1-"),
    Label("Stack Size", "launch__stack_size", _LAUNCH, versions="2025.1-"),
    Label("Uses Green Context", "launch__uses_green_context", _LAUNCH, versions="2024.1-"),
    # occupancy
    Label("Theoretical Occupancy", "sm__maximum_warps_per_active_cycle_pct"),
    Label("Theoretical Active Warps per SM", "sm__maximum_warps_avg_per_active_cycle"),
    Label("Achieved Occupancy", f"sm__warps_active.{PCT_ACTIVE}"),
    Label("Achieved Active Warps Per SM", "sm__warps_active.avg.per_cycle_active"),
    Label("Block Limit SM", "launch__occupancy_limit_blocks"),
    Label("Block Limit Registers", "launch__occupancy_limit_registers"),
    Label("Block Limit Shared Mem", "launch__occupancy_limit_shared_mem"),
    Label("Block Limit Warps", "launch__occupancy_limit_warps"),
    Label("Block Limit Barriers", "launch__occupancy_limit_barriers", versions="2022.3-"),
    Label("Cluster Occupancy", "launch__occupancy_cluster_pct", versions="2022.3-"),
    Label("Overall GPU Occupancy", "launch__occupancy_cluster_gpu_pct", versions="2022.3-"),
    Label("Max Active Clusters", "launch__cluster_max_active", versions="2022.3-"),
    Label("Max Cluster Size", "launch__cluster_max_potential_size", versions="2022.3-"),
    # distribution of the work
    *(
        Label(f"Average {name} Active Cycles", f"{unit}__cycles_active.avg", _DISTRIBUTION, versions="2023.3-")
        for name, unit in (("SM", "sm"), ("SMSP", "smsp"), ("L1", "l1tex"), ("L2", "lts"), ("DRAM", "dram"))
    ),
    *(
        Label(f"Total {name} Elapsed Cycles", f"{unit}__cycles_elapsed.sum", _DISTRIBUTION, versions="2023.3-")
        for name, unit in (("SM", "sm"), ("SMSP", "smsp"), ("L1", "l1tex"), ("L2", "lts"), ("DRAM", "dram"))
    ),
)

_BY_LABEL: dict[str, tuple[Label, ...]] = {
    # The longest section first: "GPU Speed Of Light Throughput" before "GPU Speed Of Light".
    name: tuple(sorted((it for it in LABELS if it.label == name), key=lambda it: -len(it.section)))
    for name in {it.label for it in LABELS}
}

# What metric names look like: `unit__counter.rollup`, perhaps behind `group:` or the like.
LONGEST_METRIC = 1000  # characters; the search for a name in text without one takes their square
_METRIC = re.compile(r"[A-Za-z0-9_.:]*[A-Za-z0-9]__[A-Za-z0-9_.]+")


@lru_cache(65_536)
def metric_of(section: str, label: str, unit: str) -> str:
    """The metric that a row of the details page is about.

    A name is returned as it is, also from a column with labels and names (`--print-metric-name
    label-name`). Labels that are not in the table are returned behind their section, since several
    sections use the same ones.
    """
    found = _METRIC.search(label) if "__" in label and len(label) <= LONGEST_METRIC else None
    if found:
        return found.group()
    for known in _BY_LABEL.get(label, ()):
        if section.startswith(known.section) and (not known.unit or unit.endswith(known.unit) or _is_rate(known, unit)):
            return known.metric
    return f"{section}: {label}" if section else label


def _is_rate(known: Label, unit: str) -> bool:
    return known.unit == "/s" and "/" in unit


# --- what follows from other metrics -----------------------------------------------------------------


@dataclass(frozen=True)
class Derivation:
    """A counter that follows from `needs`, used where the launch has none of its raw metrics."""

    counter: str
    needs: tuple[str, ...]
    formula: str
    compute: Callable[..., float]


SECTOR_BYTES = 32  # of L1, L2 and DRAM, Volta and later

# SM cycles of the launch, mean over SMs: the denominator of `.per_cycle_elapsed` (checked against
# reports that hold both: the counts come out whole).
_ELAPSED: tuple[tuple[tuple[str, ...], Callable[..., float]], ...] = (
    (("sm__cycles_elapsed.avg",), lambda cycles: cycles),
    (("smsp__cycles_elapsed.avg",), lambda cycles: cycles),
    (("sm__cycles_elapsed.sum", "launch__sm_count"), lambda cycles, sms: cycles / sms),
)


def _scaled(factor: float) -> Callable[..., float]:
    return lambda value: value * factor


def _elapsed_share(active_pct: float, active: float, elapsed: float) -> float:
    return active_pct * active / elapsed


def _per_cycle(factor: float) -> Callable[..., float]:
    return lambda rate, cycles: rate * cycles * factor


def _rate_times_duration(rate: float, duration_ns: float) -> float:
    return rate * duration_ns / 1e9


def _time_of_cycles(cycles: float, clock_hz: float) -> float:
    """The tool divides cycles by the duration to get the clock, so this gives the duration back.

    Checked on reports that hold all three: to the nanosecond, for the mean over units but not the maximum.
    """
    return cycles / clock_hz * 1e9


def _derivations() -> Iterator[Derivation]:
    for counter in COUNTERS:
        if counter.name.startswith("pipe_"):
            yield from _pipe(counter.name, counter.raw)
        elif counter.name.startswith("thread_inst_"):
            yield from _thread_inst(counter.name)
        elif counter.name.startswith("tensor_"):
            yield from _tensor(counter.name, counter.raw[0])
    for unit in ("sm", "smsp", "gpc"):
        cycles = f"{unit}__cycles_elapsed.avg"
        yield Derivation("duration_ns", (cycles, f"{cycles}.per_second"), "cycles / clock", _time_of_cycles)
    for needs, compute in _ELAPSED[2:]:
        yield Derivation("sm_cycles_elapsed", needs, "sum over SMs / SMs", compute)
    for needs, _ in _ELAPSED[:2]:
        yield Derivation(
            "sm_active_pct",
            ("sm__cycles_active.avg", *needs),
            "100 x active / elapsed",
            lambda active, elapsed: 100 * active / elapsed,
        )
    yield Derivation(
        "issue_active_pct", ("smsp__issue_active.avg.per_cycle_active",), "100 x warps a cycle", _scaled(100)
    )
    yield Derivation(
        "issue_active_pct",
        (f"smsp__issue_inst0.{PCT_ACTIVE}",),
        "100 - cycles without an issue",
        lambda none: 100 - none,
    )
    for counter_name, sectors in (
        ("l2_bytes", "lts__t_sectors.sum"),
        ("l1_bytes", "l1tex__t_sectors.sum"),
        ("dram_read_bytes", "dram__sectors_read.sum"),
        ("dram_write_bytes", "dram__sectors_write.sum"),
        ("dram_bytes", "dram__sectors.sum"),
    ):
        yield Derivation(counter_name, (sectors,), "32 x sectors", _scaled(SECTOR_BYTES))
    for counter_name, rate in (
        ("dram_read_bytes", "dram__bytes_read.sum.per_second"),
        ("dram_read_bytes", "dram__bytes_op_read.sum.per_second"),
        ("dram_write_bytes", "dram__bytes_write.sum.per_second"),
        ("dram_write_bytes", "dram__bytes_op_write.sum.per_second"),
        ("dram_bytes", "dram__bytes.sum.per_second"),
        ("l2_bytes", "lts__t_bytes.sum.per_second"),
        ("l1_bytes", "l1tex__t_bytes.sum.per_second"),
    ):
        yield Derivation(counter_name, (rate, DURATION), "rate x duration", _rate_times_duration)


def _pipe(name: str, raw: Sequence[str]) -> Iterator[Derivation]:
    """Share of the duration from the share of the active cycles: exact for units of the SM."""
    for metric in raw:
        base = metric.removesuffix(f".{PCT_ELAPSED}")
        for needs, _ in _ELAPSED[:2]:
            names = (f"{base}.{PCT_ACTIVE}", "sm__cycles_active.avg", *needs)
            yield Derivation(name, names, "active share x active / elapsed", _elapsed_share)


def _thread_inst(name: str) -> Iterator[Derivation]:
    op = name.removeprefix("thread_inst_")
    for unit in ("smsp", "sm"):
        sources = [(f"{unit}__sass_thread_inst_executed_op_{op}_pred_on.sum.per_cycle_elapsed", 1.0)]
        if op in ("ffma", "dfma", "hfma") and unit == "smsp":
            sources.append((f"derived__smsp__sass_thread_inst_executed_op_{op}_pred_on_x2", 0.5))
        for metric, factor in sources:
            for needs, _ in _ELAPSED[:2]:
                yield Derivation(name, (metric, *needs), "a cycle x cycles", _per_cycle(factor))


def _tensor(name: str, raw: str) -> Iterator[Derivation]:
    for needs, _ in _ELAPSED[:2]:
        yield Derivation(name, (f"{raw}.per_cycle_elapsed", *needs), "a cycle x cycles", _per_cycle(1.0))


DERIVED: tuple[Derivation, ...] = tuple(_derivations())
_DIRECT: dict[str, tuple[str, ...]] = {counter.name: counter.raw for counter in ALL}


def derive(values: Values) -> dict[str, float]:
    """Counters by our name that follow from `values` (metric to value, in base units).

    Only counters for which `values` has no raw metric; what does not come out finite is left out.
    """
    found: dict[str, float] = {}
    for rule in DERIVED:
        if rule.counter in found or any(name in values for name in _DIRECT[rule.counter]):
            continue
        needed = [values.get(name) for name in rule.needs]
        if any(value is None for value in needed):
            continue
        try:
            found[rule.counter] = rule.compute(*needed)
        except ArithmeticError:
            continue
    return found


# --- launch shape and device ---------------------------------------------------------------------------

SHAPE_GRID = tuple(f"launch__grid_dim_{axis}" for axis in "xyz")
SHAPE_BLOCK = tuple(f"launch__block_dim_{axis}" for axis in "xyz")
SHAPE_CLUSTER = tuple(f"launch__cluster_dim_{axis}" for axis in "xyz")
REGISTERS = "launch__registers_per_thread"
STATIC_SHARED = "launch__shared_mem_per_block_static"
DYNAMIC_SHARED = "launch__shared_mem_per_block_dynamic"

# Column of `devices`: the metrics that tell it, best first, and the factor to its unit.
DEVICE_COLUMNS: dict[str, tuple[tuple[str, int], ...]] = {
    "cc_major": (("device__attribute_compute_capability_major", 1),),
    "cc_minor": (("device__attribute_compute_capability_minor", 1),),
    "sm_count": (("device__attribute_multiprocessor_count", 1), ("launch__sm_count", 1)),
    "warp_size": (("device__attribute_warp_size", 1),),
    "threads_per_sm_max": (("device__attribute_max_threads_per_multiprocessor", 1),),
    "blocks_per_sm_max": (
        ("device__attribute_max_blocks_per_multiprocessor", 1),
        ("device__attribute_limits_max_cta_per_sm", 1),
    ),
    "registers_per_sm": (("device__attribute_max_registers_per_multiprocessor", 1),),
    "shared_bytes_per_sm": (("device__attribute_max_shared_memory_per_multiprocessor", 1),),
    "shared_reserved_bytes_per_block": (
        ("device__attribute_reserved_shared_memory_per_block", 1),
        ("launch__shared_mem_per_block_driver", 1),
    ),
    "l2_bytes": (("device__attribute_l2_cache_size", 1),),
    "memory_bytes": (("device__attribute_total_memory", 1),),
    "memory_bus_bits": (
        ("device__attribute_global_memory_bus_width", 1),
        ("device__attribute_fb_bus_width", 1),
    ),
    "sm_clock_max_hz": (
        ("device__attribute_max_gpu_frequency_khz", 1000),
        ("device__attribute_clock_rate", 1000),
    ),
    "memory_clock_max_hz": (
        ("device__attribute_max_mem_frequency_khz", 1000),
        ("device__attribute_memory_clock_rate", 1000),
    ),
}
DEVICE_NAME = "device__attribute_display_name"


# --- the speed-of-light rule -----------------------------------------------------------------------------

_SAYS = (
    ("memory", "memory is more heavily utilized than compute"),
    ("compute", "compute is more heavily utilized than memory"),
    ("balanced", "compute and memory are well-balanced"),
    ("latency", "too small to fill the available resources"),
    ("latency", "exhibits low compute throughput and memory bandwidth utilization"),
    ("high", "of the available compute or memory performance"),
)


def rule_says(message: str) -> str | None:
    """What a result of Nsight Compute's speed-of-light rule (SOLBottleneck) says bounds the kernel.

    memory, compute, balanced, latency, or high: above 80 % in either, whichever is larger. None
    for messages of other rules.
    """
    words = " ".join(message.lower().split())
    return next((bound for bound, phrase in _SAYS if phrase in words), None)


def speed_of_light(compute: float, memory: float) -> str:
    """The same rule applied to two percentages: compute, memory, balanced or latency."""
    if compute >= 80 or memory >= 80:
        return "memory" if memory > compute else "compute"
    if compute < 60 and memory < 60:
        return "latency"
    if abs(compute - memory) >= 10:
        return "compute" if compute > memory else "memory"
    return "balanced"


def rule_agrees(said: str, compute: float, memory: float) -> bool:
    """Whether the file's own verdict `said` (of `rule_says`) is what its percentages give."""
    if said == "high":
        return compute >= 80 or memory >= 80
    return said == speed_of_light(compute, memory) and max(compute, memory) < 80


# --- who has what ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spelling:
    """Which tools and chips have metrics whose name starts with `prefix`; the longest prefix counts."""

    prefix: str
    versions: str = "2019.1-"
    architectures: str = "7.0-"


SPELLINGS: tuple[Spelling, ...] = (
    Spelling(""),
    Spelling("dram__", architectures="7.0-, not on chips whose memory is the host's (8.7, 12.1)"),
    Spelling("dram__bytes_op_", "2025.1-", "10.0-"),
    Spelling("gpu__dram_throughput", "2020.2-", "7.5-, not on chips whose memory is the host's"),
    Spelling("gpc__cycles_elapsed", "2019.1-"),
    Spelling("sm__pipe_tensor_cycles_active", "2020.1-", "8.0-"),
    Spelling("sm__pipe_tensor_op_", "2019.1-", "7.0-9.0"),
    Spelling("sm__pipe_tensor_subpipe_", "2025.1-", "10.0-"),
    Spelling("sm__pipe_tc_cycles_active", "2025.1-", "10.0, 10.3"),
    Spelling("sm__inst_executed_pipe_tensor", "2019.1-", "7.0-9.0"),
    Spelling("sm__inst_executed_pipe_tensor_subpipe_", "2025.1-", "10.0-"),
    Spelling("sm__ops_path_tensor_", "2022.3-", "8.0-"),
    Spelling("sm__sass_", "2019.1-"),
    Spelling("derived__", "2020.2-"),
    Spelling("device__attribute_", "2019.1-"),
    Spelling("launch__cluster_", "2022.3-", "9.0-"),
)


def spelling(metric: str) -> Spelling:
    """The tools and chips that are known to have `metric`."""
    return max((it for it in SPELLINGS if metric.startswith(it.prefix)), key=lambda it: len(it.prefix))


def table() -> list[tuple[str, str, str, str, str]]:
    """(counter, metrics, how, tool versions, compute capabilities): every way to a counter, best first."""
    rows = []
    for counter in ALL:
        for metric in counter.raw:
            it = spelling(metric)
            rows.append((counter.name, metric, "as it is", it.versions, it.architectures))
        for rule in DERIVED:
            if rule.counter == counter.name:
                it = spelling(rule.needs[0])
                rows.append((counter.name, ", ".join(rule.needs), rule.formula, it.versions, it.architectures))
    return rows
