"""What a report shows of many ranks and devices: sums, and the ones that matter most, wherever they stand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from trace import Trace
from typing import Any

import pytest

import nanalyze.analysis as na
from nanalyze.analysis import report
from nanalyze.analysis.report import (
    activity,
    collect,
    cost,
    lost,
    lost_plot,
    markdown,
    ranks,
    sampling,
    steps,
    summary,
)
from nanalyze.analysis.report.cells import Grid
from nanalyze.analysis.report.collect import Data

RANKS = 12
SLOWEST = 9
KERNEL_NS = 100_000


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve ranks with a device each; the tenth computes half as long again, the others have gaps."""
    trace = Trace(tmp_path_factory.mktemp("many") / "run")
    kernel = trace.kernel_class("gemm" + "<x>" * 2_000)
    for rank in range(RANKS):
        process = f"node0-{rank}-{100 + rank}"
        trace.process_row(process, rank=rank, local_rank=rank, world_size=RANKS)
        trace.device(process, device_id=rank, uuid=f"GPU-{rank:02d}", name="H200")
        for launch in range(20):
            at, length = launch * 2 * KERNEL_NS, KERNEL_NS + (KERNEL_NS // 2 if rank == SLOWEST else 1_000 * rank)
            trace.kernel(kernel, at, length, process=process, device_id=rank, queued_ns=at - 2_000)
    trace.write()
    return trace.run_dir


@pytest.fixture(scope="module")
def data(run_dir: Path) -> Data:
    with na.open(run_dir) as run:
        return collect.collect(run, "run", lambda name: None)


def column(grid: Grid, number: int) -> list[str]:
    return [row[number].text.replace("\u202f", " ") for row in grid.rows]


def test_time_lost_is_summed_over_all_devices_before_those_that_compute_least(data: Data) -> None:
    rows = data.rows("time_by_cause")
    grid = lost.cause_grid(rows, collect.labels(data))
    assert len({row["device"] for row in rows}) == RANKS
    devices = list(dict.fromkeys(column(grid, 0)))
    assert devices[0] == "All 12 devices"
    assert [name.split()[1] for name in devices[1:]] == [f"{number}:" for number in range(8)]
    assert grid.foot == "These are the 8 devices that computed least; all are in tables/time_by_cause.csv."
    total = sum(row["total_ns"] for row in rows)
    computed = sum(row["total_ns"] for row in rows if row["cause"] == "compute")
    first = grid.rows[0]
    assert (first[1].text, first[2].text) == ("compute", f"{100 * computed / total:.1f}\u202f%")
    summed = lost.shown_rows(rows)[1]
    own = [row for row in rows if row["cause"] == summed["cause"]]
    assert (summed["device"], summed["gaps"]) == (None, sum(row["gaps"] for row in own))
    assert summed["mean_gap_ns"] == pytest.approx(sum(row["total_ns"] for row in own) / summed["gaps"])
    assert summed["longest_gap_ns"] == max(row["longest_gap_ns"] for row in own)
    split = lost_plot.splits(rows, collect.labels(data))
    assert [name for name, _ in split] == devices
    assert sum(split[0][1].values()) == pytest.approx(1)


def test_shares_of_nothing_stay_unknown_in_the_sums() -> None:
    row = {"gaps": None, "mean_gap_ns": None, "longest_gap_ns": None, "kernel": None}
    rows = [
        {**row, "device": f"d{number}", "cause": cause, "share": share, "total_ns": 5}
        for number in range(9)
        for cause, share in (("compute", 1.0), ("not recorded", None))
    ]
    together = lost.shown_rows(rows)[:2]
    assert [(one["cause"], one["share"], one["total_ns"]) for one in together] == [
        ("compute", 1.0, 45), ("not recorded", None, 45)
    ]  # fmt: skip


def test_the_least_busy_devices_are_plotted(data: Data) -> None:
    lines = activity.timelines(data.pieces, data.use, [])
    assert [line.device.split()[1] for line in lines] == [f"{number}:" for number in range(8)]
    busiest_first = sorted(data.use, key=lambda row: -row["busy_share"])
    assert [line.device for line in activity.timelines(data.pieces, busiest_first, [])] == [
        line.device for line in lines
    ]
    grid = activity.use_grid(busiest_first, 3)
    assert [name.split()[1] for name in column(grid, 0)] == ["0:", "1:", "2:"]
    assert grid.foot.startswith("Plotted are the 8 least busy devices. Of 12 devices these are the 3 least busy")


def test_of_many_ranks_the_slowest_are_shown(data: Data) -> None:
    rows = data.rows("ranks")
    whole = ranks.rank_grid(rows)
    assert column(whole, 0) == [f"Rank {n}" + (" (slowest)" if n == SLOWEST else "") for n in range(RANKS)]
    cut = ranks.rank_grid(rows, 3)
    assert column(cut, 0) == ["Rank 9 (slowest)", "Rank 11", "Rank 10"]
    assert cut.foot == "Of 12 these computed longest; all are in tables/ranks.csv."


def test_markdown_has_the_ranks(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markdown, "SHOWN_DEVICES", 2)
    with na.open(run_dir) as run:
        text = report.to_markdown(run)
    section = text.partition("<summary>Ranks</summary>")[2].partition("</details>")[0].strip().split("\n")
    assert section[0].startswith("| Rank, process and device | Launches | Computing |")
    assert [line.split("|")[1].split("<")[0].strip() for line in section[2:4]] == ["Rank 9 (slowest)", "Rank 11"]
    assert section[5] == "Of 12 these computed longest; all are in tables/ranks.csv."
    used = text.partition("<summary>Utilisation</summary>")[2].partition("</details>")[0]
    assert used.count("\n| GPU ") == 2


def test_the_least_steady_processes_and_the_dearest_recordings_are_shown() -> None:
    many = steps.SHOWN_PROCESSES + 4
    row = {"range_name": "step", "steps": 5, "median_ns": 100, "cause": "clock"}
    rows = [
        {**row, "rank": rank, "process": f"p{rank:02d}", "spread_ns": rank, "is_outlier": rank in (2, 7)}
        for rank in range(many)
    ]
    grid = steps.step_grid(rows)
    assert column(grid, 0)[:4] == ["p07", "p02", "p19", "p18"]
    assert len(grid.rows) == steps.SHOWN_PROCESSES
    assert grid.foot == f"Of {many} processes these are the 16 least steady; all are in tables/steps.csv."
    costs = [spent(rank, slowdown=0.5 if rank == 41 else None) for rank in range(44)]
    assert column(cost.cost_grid(costs), 0)[:3] == ["p41", "p43", "p42"]
    assert cost.cost_grid(costs).foot == "Of 44 processes these are the 40 dearest; all are in tables/overhead.csv."


def spent(rank: int, slowdown: float | None) -> dict[str, Any]:
    return {
        "process": f"p{rank:02d}", "range_name": None, "pauses": 0, "paused_share": None, "steps_on": 0,
        "steps_off": 0, "mean_on_ns": None, "mean_off_ns": None, "slowdown_pct": slowdown, "low_pct": slowdown,
        "high_pct": slowdown, "reason": "none" if slowdown is None else None, "cpu_ns": rank, "cpu_share": rank / 1e4,
    }  # fmt: skip


def quality(devices: int, counters: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"device": f"d{device}", "counter_group": 0, "counter": counter, "unit": "bytes", "samples": 100,
         "samples_dropped": device, "terms": 7 + device, "terms_merged": device % 2, "clock_method": "sampled",
         "explained": None if device == 0 else 1 - device / 1000, "mean_per_s": 1e9 * device}
        for device in range(devices) for counter in counters
    ]  # fmt: skip


def test_samples_of_many_devices_have_a_row_a_counter() -> None:
    counters = ["dram_read_bytes", "dram_write_bytes"]
    grid = sampling.quality_grid(quality(21, counters), {"d20": "GPU 20: H200"})
    assert column(grid, 0) == counters
    assert grid.rows[0][0].below == "21 devices, the least explained GPU 20: H200. Read from DRAM."
    assert [cell.text.replace("\u202f", " ") for cell in grid.rows[0][1:]] == [
        "98.0 %", "10.0 GB/s", "2,100", "210", "27", "1"
    ]  # fmt: skip
    assert grid.foot.strip() == "Each of the 21 devices is in tables/attribution_quality.csv."
    assert len(sampling.quality_grid(quality(20, counters), {}).rows) == 40


# --- summary.json ----------------------------------------------------------------------------------


def test_a_summary_that_would_be_too_long_is_cut_shorter(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = summary.encode(summary.of_runs([data], "1", ["a"]))
    assert len(json.loads(whole)["kernels"][0]["kernel"]) > 6_000
    sizes = []
    for most in (len(whole) + 1, len(whole) - 1, 20_000, 12_000):
        monkeypatch.setattr(summary, "MOST_BYTES", most)
        text = summary.encode(summary.of_runs([data], "1", ["a"]))
        sizes.append(len(text))
        assert len(text) < most
        content = json.loads(text)
        assert content["devices"][0]["uuid"] == "GPU-00"
        assert content["cut_short"].get("devices", len(content["devices"])) == RANKS
        assert content["kernels"][0]["kernel"].startswith("gemm<x>")
    assert sizes == sorted(sizes, reverse=True)


def test_a_summary_of_very_many_runs_stays_small(data: Data) -> None:
    text = summary.encode(summary.of_runs([data] * 200, "1", []))
    assert len(text) < summary.MOST_BYTES
    content = json.loads(text)
    assert len(content["runs"]) == 200
    assert content["runs"][-1]["totals"]["launches"] == 20 * RANKS
    assert content["runs"][-1]["cut_short"]["processes"] == RANKS


def test_names_are_repeated_short(data: Data) -> None:
    content = summary.of_runs([data], "1", [])
    lengths = {
        len(row["kernel"]) for name in ("time_by_cause", "kernel_losses") for row in content[name] if row["kernel"]
    }
    assert lengths == {summary.MOST_CHARACTERS}
    assert len(content["kernels"][0]["kernel"]) > 6_000
