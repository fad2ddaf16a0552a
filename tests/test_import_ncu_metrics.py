"""The names of metrics, what follows from them, and Nsight Compute's speed-of-light rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanalyze.importers import ncu_metrics as metrics
from nanalyze.importers.ncu_metrics import COMPUTE, DURATION, MEMORY, derive, metric_of
from nanalyze.rundir.counters import BY_NAME, COUNTERS, IMPORTED


@pytest.mark.parametrize(
    ("section", "label", "unit", "metric"),
    [
        ("GPU Speed Of Light Throughput", "Memory Throughput", "%", MEMORY),
        ("Memory Workload Analysis", "Memory Throughput", "Gbyte/s", "dram__bytes.sum.per_second"),
        ("Memory Workload Analysis", "Memory Throughput", "byte/second", "dram__bytes.sum.per_second"),
        ("GPU Speed Of Light", "SM [%]", "%", COMPUTE),
        ("GPU Speed Of Light Throughput", "SM Frequency", "Ghz", "gpc__cycles_elapsed.avg.per_second"),
        ("GPU Speed Of Light", "SM Frequency", "cycle/nsecond", "smsp__cycles_elapsed.avg.per_second"),
        ("Launch Statistics", "Grid Size", "", "launch__grid_size"),
        ("Command line profiler metrics", "dram__bytes.sum", "byte", "dram__bytes.sum"),
        ("Mine", "Duration gpu__time_duration.sum", "us", DURATION),
        ("", "SM.TriageA.sm__cycles_active.avg", "", "SM.TriageA.sm__cycles_active.avg"),
        ("Mine", "Grid Size", "", "Mine: Grid Size"),
        ("", "anything", "", "anything"),
    ],
)
def test_metric_of(section: str, label: str, unit: str, metric: str) -> None:
    assert metric_of(section, label, unit) == metric


def test_every_label_leads_to_its_metric() -> None:
    for label in metrics.LABELS:
        unit = {"": "", "%": "%", "/s": "byte/s"}[label.unit]
        assert metric_of(label.section or "Any", label.label, unit) == label.metric, label


def test_labels_are_unambiguous() -> None:
    keys = [(label.label, label.section, label.unit) for label in metrics.LABELS]
    assert len(keys) == len(set(keys))


def test_the_table_has_every_way_to_every_counter_with_its_versions() -> None:
    rows = metrics.table()
    assert {counter for counter, *_ in rows} == {counter.name for counter in (*COUNTERS, *IMPORTED)}
    direct = [(counter, metric) for counter, metric, how, *_ in rows if how == "as it is"]
    assert direct == [(counter.name, metric) for counter in (*COUNTERS, *IMPORTED) for metric in counter.raw]
    assert all(versions and chips for *_, versions, chips in rows)
    assert ("dram_read_bytes", "dram__bytes_op_read.sum", "as it is", "2025.1-", "10.0-") in rows


def test_derivations_make_counters_of_metrics_that_stand_in_no_counter_themselves() -> None:
    for rule in metrics.DERIVED:
        assert rule.counter in BY_NAME
        assert not set(rule.needs) & set(BY_NAME[rule.counter].raw)


# --- derived counters -------------------------------------------------------------------------

FMA = "sm__pipe_fma_cycles_active"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # 15.776... % of the active cycles of an H100, as its report has both.
        (
            {
                f"{FMA}.avg.pct_of_peak_sustained_active": 15.776050180097547,
                "sm__cycles_active.avg": 572479.7105263158,
                "sm__cycles_elapsed.avg": 580488.4912280702,
            },
            {"pipe_fma_pct": 15.55839396788742, "sm_active_pct": 98.62033772886502},
        ),
        (
            {
                "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum.per_cycle_elapsed": 4.0,
                "sm__cycles_elapsed.avg": 250.0,
            },
            {"thread_inst_fadd": 1000.0},
        ),
        (
            {"derived__smsp__sass_thread_inst_executed_op_ffma_pred_on_x2": 8.0, "smsp__cycles_elapsed.avg": 250.0},
            {"thread_inst_ffma": 1000.0},
        ),
        (
            {"sm__ops_path_tensor_src_fp16.sum.per_cycle_elapsed": 4096.0, "sm__cycles_elapsed.avg": 1000.0},
            {"tensor_fp16_ops": 4_096_000.0},
        ),
        ({"lts__t_sectors.sum": 376_813.0}, {"l2_bytes": 12_058_016.0}),
        ({"dram__sectors_read.sum": 300_384.0}, {"dram_read_bytes": 9_612_288.0}),
        ({"dram__bytes_write.sum.per_second": 2e9, DURATION: 500_000.0}, {"dram_write_bytes": 1_000_000.0}),
        ({"dram__bytes_op_read.sum.per_second": 2e9, DURATION: 500_000.0}, {"dram_read_bytes": 1_000_000.0}),
        ({"dram__sectors.sum": 300_384.0}, {"dram_bytes": 9_612_288.0}),
        ({"dram__bytes.sum.per_second": 2e9, DURATION: 500_000.0}, {"dram_bytes": 1_000_000.0}),
        # A T4's report has all three of cycles, clock and duration.
        (
            {"gpc__cycles_elapsed.avg": 30721.6, "gpc__cycles_elapsed.avg.per_second": 584327449.786975},
            {"duration_ns": 52_576.0},
        ),
        (
            {
                "sm__cycles_elapsed.avg": 580488.4912280702,
                "sm__cycles_elapsed.avg.per_second": 1103019904.5893953,
            },
            {"duration_ns": 526_272.0},
        ),
        ({"gpc__cycles_elapsed.max": 2186.0, "gpc__cycles_elapsed.avg.per_second": 1362708333.3}, {}),
        ({"smsp__issue_active.avg.per_cycle_active": 0.25}, {"issue_active_pct": 25.0}),
        ({"smsp__issue_inst0.avg.pct_of_peak_sustained_active": 75.0}, {"issue_active_pct": 25.0}),
        (
            {"sm__cycles_elapsed.sum": 66_175_688.0, "launch__sm_count": 114.0},
            {"sm_cycles_elapsed": 580_488.4912280702},
        ),
        ({}, {}),
    ],
)
def test_derive(values: dict[str, float], expected: dict[str, float]) -> None:
    assert derive(values) == pytest.approx(expected, rel=1e-12)


def test_what_was_measured_is_never_derived() -> None:
    measured = {"dram__bytes_read.sum": 5.0, "dram__sectors_read.sum": 300_384.0}
    assert derive(measured) == {}


def test_a_division_by_zero_derives_nothing() -> None:
    values = {
        f"{FMA}.avg.pct_of_peak_sustained_active": 1.0,
        "sm__cycles_active.avg": 1.0,
        "sm__cycles_elapsed.avg": 0.0,
    }
    assert derive(values) == {}


def test_speed_of_light_itself_is_never_derived() -> None:
    assert not {rule.counter for rule in metrics.DERIVED} & {"compute_pct", "memory_pct", "dram_pct"}


# --- the rule ---------------------------------------------------------------------------------

MESSAGES = {
    "memory": "Memory is more heavily utilized than Compute: Look at the @section:MemoryWorkloadAnalysis@ section",
    "compute": "Compute is more heavily utilized than Memory: Look at the Compute Workload Analysis section",
    "balanced": "Compute and Memory are well-balanced: To reduce runtime, both must be reduced.",
    "latency": "This kernel exhibits low compute throughput and memory bandwidth utilization relative to the peak",
    "high": "The kernel is utilizing greater than 80.0% of the available compute or memory performance of the device.",
}


def test_what_the_rule_says() -> None:
    assert {bound: metrics.rule_says(text) for bound, text in MESSAGES.items()} == {bound: bound for bound in MESSAGES}
    grid = "This kernel grid is too small to fill the available resources on this device, resulting in only 0.0"
    assert metrics.rule_says(grid) == "latency"
    assert metrics.rule_says("If you execute __syncthreads() to synchronize the threads of a block") is None


@pytest.mark.parametrize(
    ("compute", "memory", "bound"),
    [
        (90, 10, "compute"), (10, 90, "memory"), (80, 80, "compute"), (80, 80.5, "memory"), (85, 79, "compute"),
        (59.9, 59.9, "latency"), (60, 10, "compute"), (10, 60, "memory"), (65, 60, "balanced"), (70, 60, "compute"),
        (60, 69.9, "balanced"), (79.9, 79.9, "balanced"),
    ],
)  # fmt: skip
def test_speed_of_light(compute: float, memory: float, bound: str) -> None:
    assert metrics.speed_of_light(compute, memory) == bound


@given(st.floats(0, 120), st.floats(0, 120))
def test_the_rule_agrees_with_itself(compute: float, memory: float) -> None:
    high = compute >= 80 or memory >= 80
    said = "high" if high else metrics.speed_of_light(compute, memory)
    assert metrics.rule_agrees(said, compute, memory)
    others = set(MESSAGES) - {said}
    assert not any(metrics.rule_agrees(other, compute, memory) for other in others)
