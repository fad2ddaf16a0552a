"""Ranks side by side: the query, and what the report says of them."""

from __future__ import annotations

from pathlib import Path
from trace import Trace
from typing import Any

import pytest

import nanalyze.analysis as na
from nanalyze.analysis.report import ranks

RANKS = ("node0-0-100", "node0-1-101", "node1-2-102")


def job(run_dir: Path, compute: list[int], waiting: list[int]) -> na.Run:
    """A rank each: `compute` ns in a kernel of its own, then `waiting` ns in a collective (none for 0)."""
    trace = Trace(run_dir)
    for process, own, collective in zip(RANKS, compute, waiting, strict=False):
        trace.process_row(process, rank=int(process.split("-")[1]), world_size=len(compute))
        trace.device(process)
        gemm = trace.kernel_class("gemm", process=process)
        reduce = trace.kernel_class("ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)", process=process)
        trace.kernel(gemm, start_ns=0, duration_ns=own, process=process)
        if collective:
            trace.kernel(reduce, start_ns=own, duration_ns=collective, process=process)
        trace.state(0, process=process, sm_clock_hz=1_000_000_000 + 10 * own)
    trace.write()
    return na.open(run_dir)


def rows(run: na.Run) -> list[dict[str, Any]]:
    from nanalyze import queries

    return list(run.arrow(queries.query("ranks").sql).to_pylist())


def test_the_one_that_waits_least_is_the_slowest(tmp_path: Path) -> None:
    found = rows(job(tmp_path / "run", [600, 900, 600], [400, 100, 350]))
    assert [row["rank"] for row in found] == [0, 1, 2]
    assert [row["host"] for row in found] == ["node0", "node0", "node1"]
    assert [row["is_slowest"] for row in found] == [False, True, False]
    assert [row["waiting_ns"] for row in found] == [300, 0, 250]
    assert [row["compute_ns"] for row in found] == [600, 900, 600]
    assert [row["communication_ns"] for row in found] == [400, 100, 350]
    assert [row["communication_share"] for row in found] == pytest.approx([0.4, 0.1, 350 / 950])
    assert [row["compute_skew"] for row in found] == pytest.approx([-1 / 7, 2 / 7, -1 / 7])
    assert [row["span_ns"] for row in found] == [1000, 1000, 950]
    assert [row["launches"] for row in found] == [2, 2, 2]
    assert [row["sm_clock_hz"] for row in found] == [1_000_006_000, 1_000_009_000, 1_000_006_000]
    text = ranks.sentence(found)
    assert text.startswith("Rank 1 is the slowest: Rank 0 waited 300")
    assert "30" in text.split("(")[1]


def test_a_rank_that_is_slow_for_its_host_is_found_too(tmp_path: Path) -> None:
    """Its kernels are as quick as the others'; it comes last all the same."""
    found = rows(job(tmp_path / "run", [600, 600], [300, 100]))
    assert [row["is_slowest"] for row in found] == [False, True]


def test_without_collectives_the_one_that_computes_most_is_the_slowest(tmp_path: Path) -> None:
    found = rows(job(tmp_path / "run", [600, 900, 600], [0, 0, 0]))
    assert [row["is_slowest"] for row in found] == [False, True, False]
    assert [row["waiting_ns"] for row in found] == [None] * 3
    assert [row["communication_share"] for row in found] == [0.0] * 3
    assert ranks.sentence(found).startswith("Rank 1 is the slowest: its kernels took 28.6")


def test_one_process_with_two_devices_has_two_rows(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run", process="node0-none-100".replace("none", "0"))
    trace.process_row(rank=None)
    for device, duration in enumerate((100, 300)):
        trace.device(device_id=device, uuid=f"GPU-{device}")
        trace.kernel(trace.kernel_class("k"), start_ns=0, duration_ns=duration, device_id=device)
    trace.write(end=False)
    found = rows(na.open(tmp_path / "run"))
    assert [(row["device_id"], row["compute_ns"], row["is_slowest"]) for row in found] == [
        (0, 100, False),
        (1, 300, True),
    ]
    assert ranks.sentence(found).startswith("node0-0-100 device 1 is the slowest")


def test_recordings_one_after_another_are_not_ranks(tmp_path: Path) -> None:
    """Without a launcher's numbers nothing says that two partitions ran side by side."""
    trace = Trace(tmp_path / "run")
    for process, duration in (("node0-0-707", 100), ("node0-0-708", 900)):
        trace.process_row(process, rank=None)
        trace.device(process)
        trace.kernel(trace.kernel_class("k", process=process), start_ns=0, duration_ns=duration, process=process)
    trace.write()
    found = rows(na.open(tmp_path / "run"))
    assert [(row["is_slowest"], row["compute_skew"], row["waiting_ns"]) for row in found] == [(False, None, None)] * 2
    assert ranks.sentence(found) == ""
    assert ranks.rank_grid(found).rows == ()


def test_a_single_rank_is_not_compared(tmp_path: Path) -> None:
    (row,) = rows(job(tmp_path / "run", [600], [300]))
    assert (row["is_slowest"], row["compute_skew"], row["waiting_ns"]) == (False, None, None)
    assert ranks.sentence([row]) == ""
    assert ranks.rank_grid([row]).rows == ()


def test_ranks_that_are_alike_are_no_news(tmp_path: Path) -> None:
    found = rows(job(tmp_path / "run", [100_000, 100_000], [5_000, 5_500]))
    assert ranks.sentence(found) == ""
    assert len(ranks.rank_grid(found).rows) == 2


def test_the_table_names_the_slowest(tmp_path: Path) -> None:
    grid = ranks.rank_grid(rows(job(tmp_path / "run", [600, 900], [400, 100])))
    texts = [[cell.text for cell in row] for row in grid.rows]
    assert [row[0] for row in texts] == ["Rank 0", "Rank 1 (slowest)"]
    assert [row[0].below for row in grid.rows] == ["node0-0-100, NVIDIA H200 0", "node0-1-101, NVIDIA H200 0"]
    assert [row[3][:5] for row in texts] == ["-20.0", "+20.0"]
    assert [row[6] for row in texts] == ["300\u202fns", "none"]
