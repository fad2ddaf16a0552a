"""Time lost by cause: gaps by the call that ended them, layers that add up, tails and low occupancy."""

from __future__ import annotations

import random
from pathlib import Path
from trace import PROCESS, Trace
from typing import Any

import pytest

import nanalyze.analysis as na
from nanalyze.analysis.report import lost, lost_plot
from nanalyze.analysis.report.figures import Look

OTHER = "node0-1-101"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)"


def started(run_dir: Path) -> tuple[Trace, int]:
    """A trace with a device and a kernel class."""
    trace = Trace(run_dir)
    trace.device()
    return trace, trace.kernel_class("k")


def times(trace: Trace) -> dict[str, tuple[int | None, int]]:
    """Gaps and time of each cause but compute."""
    trace.write()
    rows = na.open(trace.run_dir).query("time_by_cause").to_dict("records")
    return {r["cause"]: (None if r["gaps"] != r["gaps"] else r["gaps"], r["total_ns"]) for r in _plain(rows)}


def _plain(rows: list[dict[Any, Any]]) -> list[dict[str, Any]]:
    return [{key: None if value is None or str(value) in ("nan", "<NA>") else value for key, value in r.items()}
            for r in rows]  # fmt: skip


@pytest.mark.parametrize(
    ("queued", "start", "cause"),
    [
        (150_000, 204_999, "start"),  # ran dry at 200,000
        (200_000, 204_999, "start"),
        (200_000, 205_000, "dependency"),
        (200_001, 260_000, "synchronisation"),  # the call before was at 100,000
        (300_000, 301_000, "synchronisation"),  # silent for 100,000 before, 100,000 after
        (300_001, 301_000, "host"),
        (None, 210_000, "unknown"),
    ],
)
def test_the_call_that_ends_a_gap_decides_its_cause(tmp_path: Path, queued: int | None, start: int, cause: str) -> None:
    trace, kernel = started(tmp_path)
    trace.kernel(kernel, 110_000, 90_000, queued_ns=100_000)
    trace.kernel(kernel, start, 1_000, queued_ns=start if queued is None else queued)
    if queued is None:
        trace.rows["kernels", PROCESS][-1]["queued_ns"] = None
    assert times(trace) == {"compute": (None, 91_000), cause: (1, start - 200_000)}


@pytest.mark.parametrize(("queued", "cause"), [(250_000, "launch"), (250_001, "host")])
def test_a_host_that_calls_within_50_us_is_at_its_fastest(tmp_path: Path, queued: int, cause: str) -> None:
    trace, kernel = started(tmp_path)
    trace.kernel(kernel, 201_000, 1_000, queued_ns=200_000)
    trace.kernel(kernel, 260_000, 1_000, queued_ns=queued)
    assert times(trace) == {"compute": (None, 2_000), cause: (1, 58_000)}


def test_without_any_earlier_call_a_gap_is_not_guessed(tmp_path: Path) -> None:
    trace, kernel = started(tmp_path)
    trace.copy("HtoD", 0, 100, 1)
    trace.kernel(kernel, 300, 100, queued_ns=200)
    assert times(trace) == {"compute": (None, 100), "copy": (None, 100), "unknown": (1, 200)}


def test_a_copy_counts_where_no_kernel_ran_and_the_gap_before_it_apart(tmp_path: Path) -> None:
    trace, kernel = started(tmp_path)
    trace.kernel(kernel, 0, 100)
    trace.copy("HtoD", 50, 100, 1, stream_id=9)  # 50 of it beside the kernel
    trace.copy("HtoD", 180, 100, 1, stream_id=9)
    trace.kernel(kernel, 230, 100, queued_ns=140)
    assert times(trace) == {"compute": (None, 200), "copy": (None, 50 + 50), "before copy": (1, 30)}


def test_communication_counts_where_no_other_kernel_runs(tmp_path: Path) -> None:
    trace, kernel = started(tmp_path)
    reduce = trace.kernel_class(NCCL)
    trace.kernel(kernel, 0, 100)
    trace.kernel(reduce, 50, 150, stream_id=9)
    trace.copy("HtoD", 150, 20, 1, stream_id=10)  # behind communication, which goes first
    trace.kernel(kernel, 180, 100)
    assert times(trace) == {"compute": (None, 200), "communication": (None, 80)}


def test_time_that_was_not_recorded_belongs_to_no_share(tmp_path: Path) -> None:
    trace, kernel = started(tmp_path)
    trace.kernel(kernel, 0, 100)
    trace.pause(80, 200, complete_ns=230)
    trace.kernel(kernel, 250, 100, queued_ns=240)
    correlation = trace.kernel(kernel, None, None, queued_ns=400)
    trace.exact({"m": 1.0}, kernel_class_id=kernel, correlation_id=correlation, measured_ns=500, cost_ns=90)
    trace.kernel(kernel, 600, 100, queued_ns=590)
    trace.write()
    frame = na.open(tmp_path).query("time_by_cause").set_index("cause")
    assert frame["total_ns"].to_dict() == {
        "compute": 80 + 100 + 100,
        "unknown": 20 + 60 + 100,  # beside the pause, before and after the replay
        "not recorded": 150 + 90,
    }
    assert frame["share"].fillna(-1).to_dict() == {"compute": 280 / 460, "unknown": 180 / 460, "not recorded": -1}


def test_processes_that_share_a_device_have_one_timeline(tmp_path: Path) -> None:
    trace, kernel = started(tmp_path)
    trace.device(OTHER)
    trace.kernel_class("k", process=OTHER)
    trace.kernel(kernel, 0, 100)
    trace.kernel(kernel, 100, 100, process=OTHER)
    trace.kernel(kernel, 150, 100)
    assert times(trace) == {"compute": (None, 250)}


def test_a_device_that_nobody_described_is_a_device_too(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    trace.kernel(kernel, 0, 100, device_id=3)
    trace.kernel(kernel, 110, 100, queued_ns=50, device_id=3)
    assert times(trace) == {"compute": (None, 200), "start": (1, 10)}


@pytest.mark.parametrize("seed", range(5))
def test_the_causes_add_up_to_the_devices_time(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    trace, kernel = started(tmp_path)
    reduce = trace.kernel_class(NCCL)
    busy: dict[str, list[tuple[int, int]]] = {"compute": [], "communication": [], "copy": [], "not recorded": []}
    for _ in range(60):
        kind = draw.choice(list(busy)[:3])
        start, length = draw.randrange(100_000), draw.randrange(1, 1_500)
        busy[kind].append((start, start + length))
        if kind == "copy":
            trace.copy("HtoD", start, length, 1, stream_id=9)
        else:
            trace.kernel(kernel if kind == "compute" else reduce, start, length, queued_ns=max(start - 5_000, 0))
    busy["not recorded"].append((40_000, 45_000))
    trace.pause(40_000, 45_000)
    covered: set[int] = set()
    expected = {}
    for kind in ("not recorded", "compute", "communication", "copy"):
        instants = {at for first, last in busy[kind] for at in range(first, last)}
        expected[kind] = len(instants - covered)
        covered |= instants
    spans = [span for kind in ("compute", "communication", "copy") for span in busy[kind]]
    found = {cause: total for cause, (_, total) in times(trace).items()}
    assert {kind: found[kind] for kind in expected} == expected
    assert sum(found.values()) == max(last for _, last in spans) - min(first for first, _ in spans)


# --- tails and occupancy -----------------------------------------------------------------------------


def losses(trace: Trace) -> list[dict[str, Any]]:
    trace.write()
    return _plain(na.open(trace.run_dir).query("kernel_losses").to_dict("records"))


@pytest.mark.parametrize(("blocks", "last", "bound"), [(133, 1 / 132, 496_212), (198, 0.5, 250_000), (264, None, None)])
def test_a_tail_is_what_the_last_wave_leaves_empty(
    tmp_path: Path, blocks: int, last: float | None, bound: int | None
) -> None:
    trace = Trace(tmp_path)
    trace.device()
    # 1024 threads of 64 registers: one block an SM.
    kernel = trace.kernel_class("k", (blocks, 1, 1), (1024, 1, 1), registers=64)
    trace.kernel(kernel, 0, 1_000_000)
    found = losses(trace)
    if bound is None:
        assert found == []
        return
    (row,) = found
    assert row["blocks_per_sm"] == 1
    assert row["last_wave"] == pytest.approx(last)
    assert row["tail_bound_ns"] == bound
    assert row["limiter"] is None


LATENCY = {"compute_pct": 20.0, "memory_pct": 30.0, "occupancy_pct": 10.0, "duration_ns": 1e6, "sm_clock_hz": 1e9}


@pytest.mark.parametrize(
    ("shape", "limiter"),
    [
        ({"grid": (13_200, 1, 1), "block": (128, 1, 1), "registers": 255}, "registers"),
        ({"grid": (13_200, 1, 1), "block": (128, 1, 1), "dynamic_shared": 100_000}, "shared memory"),
        ({"grid": (132 * 320, 1, 1), "block": (27, 1, 1)}, None),
        ({"grid": (132 * 320, 1, 1), "block": (20, 1, 1), "registers": 16}, None),
        ({"grid": (66, 1, 1), "block": (1024, 1, 1)}, "grid"),
        ({"grid": (132 * 160, 1, 1), "block": (128, 1, 1)}, "uneven blocks"),
    ],
)
def test_low_occupancy_names_what_limits_it(tmp_path: Path, shape: dict[str, Any], limiter: str | None) -> None:
    trace = Trace(tmp_path)
    trace.device()
    kernel = trace.kernel_class("k", **shape)
    trace.kernel(kernel, 0, 1_000_000)
    trace.measure(kernel, [{**LATENCY, "occupancy_pct": 60.0 if limiter is None else 10.0}])
    found = losses(trace)
    assert [row["limiter"] for row in found] == ([] if limiter is None else [limiter])
    # Memory's 30 % is more than occupancy's 10 %, so no more than 70 % can be gained. Two launches of 1 ms.
    assert [row["occupancy_bound_ns"] for row in found] == ([] if limiter is None else [1_400_000])


def test_a_block_of_one_warp_is_limited_by_the_block_size(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    trace.device(blocks_per_sm_max=16)
    kernel = trace.kernel_class("k", (132 * 160, 1, 1), (32, 1, 1))
    trace.kernel(kernel, 0, 1_000_000)
    trace.measure(kernel, [LATENCY])
    (row,) = losses(trace)
    assert (row["limiter"], row["theoretical_occupancy_pct"], row["blocks_per_sm"]) == ("block size", 25.0, 16)


def test_low_occupancy_without_counters_has_a_limiter_but_no_bound(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    trace.device()
    kernel = trace.kernel_class("k", (1, 1, 1))
    trace.kernel(kernel, 0, 1_000_000)
    reduce = trace.kernel_class(NCCL)
    trace.kernel(reduce, 0, 1_000_000)
    (row,) = losses(trace)  # small grids of collectives are meant to be
    assert (row["kernel"], row["limiter"], row["occupancy_bound_ns"], row["occupancy_pct"]) == ("k", "grid", None, None)


# --- the report ---------------------------------------------------------------------------------------


def test_every_cause_is_explained_on_the_page(tmp_path: Path) -> None:
    trace, kernel = started(tmp_path)
    trace.kernel(kernel, 0, 100)
    trace.kernel(kernel, 300, 100, queued_ns=0)
    trace.write()
    rows = _plain(na.open(tmp_path).query("time_by_cause").to_dict("records"))
    grid = lost.cause_grid(rows, {})
    assert [[cell.text.replace("\u202f", " ") for cell in row] for row in grid.rows] == [
        ["compute", "50.0 %", "200 ns", "–", "–", "–", "–"],
        ["start", "50.0 %", "200 ns", "1", "200 ns", "200 ns", "k"],
    ]
    assert [row[0].below for row in grid.rows] == [lost.MEANINGS["compute"], lost.MEANINGS["start"]]


def test_many_devices_are_named_and_cut(tmp_path: Path) -> None:
    row = {"cause": "compute", "share": 1.0, "total_ns": 5, "gaps": None, "mean_gap_ns": None, "longest_gap_ns": None,
           "kernel": None}  # fmt: skip
    rows = [{**row, "device": f"d{number}"} for number in range(10)]
    grid = lost.cause_grid(rows, {"d0": "GPU 0"})
    devices = ["All 10 devices", "GPU 0", *(f"d{number}" for number in range(1, 8))]
    assert [cells[0].text for cells in grid.rows] == devices
    assert grid.foot == "These are the 8 devices that computed least; all are in tables/time_by_cause.csv."
    assert lost.cause_grid([], {}).rows == ()


def test_the_plot_has_a_piece_for_each_cause_and_they_fill_the_bar() -> None:
    rows = [
        {"device": "d", "cause": "host", "share": 0.25},
        {"device": "d", "cause": "compute", "share": 0.75},
        {"device": "d", "cause": "not recorded", "share": None},
    ]
    found = lost_plot.splits(rows, {"d": "GPU 0"})
    assert found == [("GPU 0", {"host": 0.25, "compute": 0.75})]
    figure = lost_plot.draw(found, Look())
    (axes,) = figure.axes
    assert [(patch.get_x(), patch.get_width()) for patch in axes.patches] == [(0, 75), (75, 25)]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["compute 75.0 %", "host 25.0 %"]
    assert set(lost_plot.LOOKS) == set(lost.MEANINGS) - {"not recorded"}
    assert len(set(lost_plot.LOOKS.values())) == len(lost_plot.LOOKS)
    assert lost_plot.draw([], Look(narrow=True)).legends == []
