"""What would gain most: each bound against one worked out by hand, and none where nothing is known."""

from __future__ import annotations

from pathlib import Path
from trace import PROCESS, Trace
from typing import Any

import pytest

import nanalyze.analysis as na
from nanalyze import queries
from nanalyze.analysis.report import opportunities

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)"
FULL = {"grid": (132 * 16, 1, 1), "block": (128, 1, 1)}  # one whole wave, all threads
COUNTED = {"duration_ns": 1e5, "sm_clock_hz": 1e9, "occupancy_pct": 90.0}


def found(trace: Trace, **parameters: int) -> dict[tuple[str, str | None], dict[str, Any]]:
    """Rows by change and subject."""
    trace.write()
    with na.open(trace.run_dir) as run:
        query = queries.query("opportunities")
        rows = run.arrow(query.sql, queries.bind(query, parameters)).to_pylist()
    assert [row["bound_ns"] for row in rows] == sorted((row["bound_ns"] for row in rows), reverse=True)
    return {(row["change"], row["subject"]): row for row in rows}


def counted(run_dir: Path, **counters: float) -> Trace:
    """A kernel `k` of 100 us in a trace of 100 us, measured."""
    trace = Trace(run_dir)
    trace.device()
    kernel = trace.kernel_class("k", **FULL)
    trace.kernel(kernel, 0, 100_000)
    trace.measure(kernel, [{**COUNTED, **counters}])
    return trace


@pytest.mark.parametrize(
    ("compute", "memory", "change", "bound"),
    [
        (20.0, 65.0, "access", 35_000),
        (85.0, 30.0, "arithmetic", 15_000),
        (40.0, 50.0, "latency", 50_000),
        (65.0, 61.0, "rate", 35_000),
        (10.0, 100.5, None, 0),  # at its peak, by noise a bit above: nothing to gain
    ],
)
def test_a_kernel_gains_at_most_what_it_is_short_of_its_peak(
    tmp_path: Path, compute: float, memory: float, change: str | None, bound: int
) -> None:
    rows = found(counted(tmp_path, compute_pct=compute, memory_pct=memory))
    if change is None:
        assert rows == {}
        return
    assert set(rows) == {(change, "k")}
    row = rows[change, "k"]
    # The replayed launch has 100 us of its own, which are no time of the job.
    assert (row["bound_ns"], row["share"], row["method"]) == (bound, pytest.approx(bound / 100_000), "exact")
    assert row["speedup_bound"] == pytest.approx(1 / (1 - bound / 100_000))
    assert f"compute {compute} %, memory {memory} % of peak" in row["evidence"]


def test_the_lower_end_of_an_interval_makes_the_bound(tmp_path: Path) -> None:
    trace = counted(tmp_path, compute_pct=20.0, memory_pct=70.0)
    kernel = trace.rows["kernels", PROCESS][0]["kernel_class_id"]
    trace.measure(kernel, [{**COUNTED, "compute_pct": 20.0, "memory_pct": 76.0}])  # two: their range
    assert found(trace)["access", "k"]["bound_ns"] == 30_000


def test_a_kernel_above_its_peak_has_no_bound_by_counters(tmp_path: Path) -> None:
    assert found(counted(tmp_path, compute_pct=20.0, memory_pct=65.0, dram_pct=140.0)) == {}


def test_without_counters_only_times_and_shapes_bound(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    trace.device()
    kernel = trace.kernel_class("k", (132 * 16 + 132 * 8, 1, 1))  # a wave and a half
    trace.kernel(kernel, 0, 100_000)
    trace.kernel(kernel, 102_000, 100_000, queued_ns=0)
    trace.kernel(trace.kernel_class(NCCL), 202_000, 50_000)
    trace.copy("HtoD", 255_000, 10_000, 1)
    trace.kernel(kernel, 270_000, 10_000)
    trace.rows["kernels", PROCESS][-1]["queued_ns"] = None  # a gap of unknown cause before it
    rows = found(trace)
    assert {key: row["bound_ns"] for key, row in rows.items()} == {
        ("tail", "k"): 52_500,
        ("overlap", None): 50_000,
        ("copies", None): 10_000,
        ("issue", None): 3_000,
        ("start", "k"): 2_000,
    }
    assert {row["method"] for row in rows.values()} == {"timeline"}
    assert rows["tail", "k"]["share"] == pytest.approx(52.5 / 280)
    assert rows["start", "k"]["evidence"] == "1 gap of 2.0 us, ended by a kernel that was queued"


def test_occupancy_stands_for_latency_where_it_allows_as_much(tmp_path: Path) -> None:
    rows = found(counted(tmp_path / "a", compute_pct=20.0, memory_pct=30.0, occupancy_pct=25.0))
    assert {key[0]: row["bound_ns"] for key, row in rows.items()} == {"occupancy": 70_000}
    rows = found(counted(tmp_path / "b", compute_pct=20.0, memory_pct=30.0, occupancy_pct=40.0))
    assert {key[0]: row["bound_ns"] for key, row in rows.items()} == {"occupancy": 60_000, "latency": 70_000}
    assert "occupancy 40.0 %, limited by uneven blocks" in rows["occupancy", "k"]["evidence"]


DRAM = {**COUNTED, "compute_pct": 5.0, "memory_pct": 100.0, "dram_pct": 100.0, "l2_pct": 5.0, "l1_pct": 5.0}


def test_fusion_saves_what_one_writes_and_the_next_reads(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    trace.device()
    first, second = trace.kernel_class("first", **FULL), trace.kernel_class("second", **FULL)
    trace.measure(first, [{**DRAM, "dram_read_bytes": 6e6, "dram_write_bytes": 4e6}])
    trace.measure(second, [{**DRAM, "dram_read_bytes": 15e6, "dram_write_bytes": 5e6}])
    for start in (0, 200_000):
        trace.kernel(first, start, 100_000)
        trace.kernel(second, start + 100_000, 100_000)
    trace.kernel(second, 400_000, 100_000)  # after itself: pieces of one task
    rows = found(trace)
    assert set(rows) == {("fusion", "second"), ("fusion", "first")}
    # Of 4 MB, twice: 4 of 10 MB of the first's 100 us and 4 of 20 MB of the second's.
    assert rows["fusion", "second"]["bound_ns"] == 2 * (40_000 + 20_000)
    assert rows["fusion", "second"]["after_class_id"] == first
    assert rows["fusion", "second"]["evidence"].startswith(
        "started after it 2 times; of DRAM the first writes 4.0 of 10.0 MB"
    )
    # Once the other way round: 5 of 20 MB of the second's and 5 of 10 MB of the first's.
    assert rows["fusion", "first"]["bound_ns"] == 25_000 + 50_000


def test_fusion_needs_counters_of_both(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    trace.device()
    first, second = trace.kernel_class("first", **FULL), trace.kernel_class("second", **FULL)
    trace.measure(first, [{**DRAM, "dram_read_bytes": 6e6, "dram_write_bytes": 4e6}])
    trace.measure(second, [{**DRAM, "memory_pct": 100.0}])
    trace.kernel(first, 0, 100_000)
    trace.kernel(second, 100_000, 100_000)
    assert found(trace) == {}


def test_gaps_of_all_devices_count_together_and_the_list_is_cut(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    trace.device()
    trace.device(device_id=1, uuid="GPU-1")
    short, long = trace.kernel_class("short", **FULL), trace.kernel_class("long", **FULL)
    for device, kernel, gap in ((0, short, 1_000), (1, long, 3_000)):
        trace.kernel(kernel, 0, 10_000, device_id=device)
        trace.kernel(kernel, 10_000 + gap, 10_000, queued_ns=0, device_id=device)
    trace.copy("HtoD", 11_000 + 10_000, 1, 1)
    rows = found(trace, rows=1)
    assert {key: row["bound_ns"] for key, row in rows.items()} == {("start", "long"): 4_000}
    assert rows["start", "long"]["share"] == pytest.approx(4_000 / (21_001 + 23_000))


def test_without_a_timeline_shares_are_of_kernel_time(tmp_path: Path) -> None:
    trace = Trace(tmp_path, source="ncu")
    trace.device()
    kernel = trace.kernel_class("k", **FULL)
    trace.measure(kernel, [{**COUNTED, "compute_pct": 20.0, "memory_pct": 65.0}])
    trace.rows["kernels", PROCESS][0]["duration_ns"] = 100_000
    row = found(trace)["access", "k"]
    assert (row["bound_ns"], row["share"]) == (35_000, pytest.approx(0.35))


# --- the report ---------------------------------------------------------------------------------------


def test_every_change_has_words_on_the_page() -> None:
    text = queries.query("opportunities").sql
    assert {change for change in opportunities.CHANGES if f"'{change}'" not in text} == set()


def test_a_row_of_the_page_names_bound_evidence_and_query(tmp_path: Path) -> None:
    rows = list(found(counted(tmp_path, compute_pct=20.0, memory_pct=65.0)).values())
    (cells,) = opportunities.grid(rows, "'run dir'").rows
    class_id = rows[0]["kernel_class_id"]
    assert [cell.text.replace("\u202f", " ") for cell in cells] == [
        "1", "Better memory access: k", "35.0 µs", "35.0 %", "1.54 ×",
        "compute 20.0 %, memory 65.0 % of peak, 0.1 ms in all (exact)",
    ]  # fmt: skip
    assert cells[-1].below == f"nanalyze sql 'run dir' \"SELECT * FROM verdicts WHERE kernel_class_id = {class_id}\""
    assert opportunities.command("time_by_cause", "run") == "nanalyze sql run --query time_by_cause"
    assert opportunities.grid([], "run").notes == ("Nothing that was recorded bounds the gain of any change.",)
