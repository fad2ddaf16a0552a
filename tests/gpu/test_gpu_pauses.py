"""Pauses on a real GPU: `pytest -m gpu tests/gpu/test_gpu_pauses.py`. Needs PyTorch with CUDA; skipped elsewhere.

CUPTI's kinds are switched off and on in mid-run, with kernels queued and graphs instantiated: nothing may
hang, what is launched outside of pauses must all be there, and graphs must be recorded again afterwards.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import final_process, read_table

import nanalyze.analysis as na
from nanalyze import recorder

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

SECONDS = 8.0
SETTLED_NS = 50_000_000


def pauses_of(run_dir: Path) -> list[dict[str, Any]]:
    rows = read_table(run_dir, "pauses")
    assert len(rows) >= 6
    assert all(before["end_ns"] <= after["start_ns"] for before, after in itertools.pairwise(rows))
    return rows


def distance_ns(at: int, pauses: list[dict[str, Any]]) -> int:
    """From `at` to the nearest pause; negative within one, with everything off for certain."""
    return min(
        max(row["start_ns"] - at, at - max(row["end_ns"], row["complete_ns"] or 0))
        if not row["off_ns"] < at < row["end_ns"]
        else -min(at - row["off_ns"], row["end_ns"] - at)
        for row in pauses
    )


def test_launches_outside_of_pauses_are_all_recorded(tmp_path: Path) -> None:
    """One launch of its own grid size a step, synchronised, so that each can be found by its time."""
    x = torch.zeros(1 << 16, device="cuda")
    launched = []
    with recorder.record(tmp_path / "run", flush_s=0.5, pause_pct=25):
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            with recorder.annotate("step"):
                launched.append(time.time_ns())
                x.add_(1)
                torch.cuda.synchronize()
                time.sleep(0.002)
    assert int(x[0]) == len(launched)
    pauses = pauses_of(tmp_path / "run")
    kernels = sorted(
        row["start_ns"] for row in read_table(tmp_path / "run", "kernels")
    )  # microseconds after its launch
    outside = [at for at in launched if distance_ns(at, pauses) > SETTLED_NS]
    inside = [at for at in launched if distance_ns(at, pauses) < -5_000_000]
    assert len(inside) > 100
    recorded_outside = [at for at in kernels if distance_ns(at, pauses) > SETTLED_NS]
    assert abs(len(recorded_outside) - len(outside)) <= len(pauses)  # one may lie on either side of a limit
    assert not [at for at in kernels if distance_ns(at, pauses) < -5_000_000]
    assert all(row["complete_ns"] is not None for row in pauses[:-1])
    assert final_process(tmp_path / "run")["records_lost"] == 0


def test_graphs_instantiated_before_a_pause_are_recorded_after_it(tmp_path: Path) -> None:
    x = torch.zeros(1 << 16, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x.add_(1)
    torch.cuda.synchronize()
    with recorder.record(tmp_path / "run", flush_s=0.5, pause_pct=25):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(10):
                x.add_(1)
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            with recorder.annotate("step"):
                graph.replay()
                torch.cuda.synchronize()
                time.sleep(0.002)
    pauses = pauses_of(tmp_path / "run")
    kernels = [row for row in read_table(tmp_path / "run", "kernels") if row["graph_id"] is not None]
    starts = sorted(row["start_ns"] for row in kernels)
    for row in pauses[:-1]:
        after = [at for at in starts if row["end_ns"] + SETTLED_NS < at < row["end_ns"] + 3 * SETTLED_NS]
        assert len(after) >= 50, "graph launches after a pause are missing"
    assert not [at for at in starts if distance_ns(at, pauses) < -5_000_000]


def test_a_deep_queue_of_a_busy_gpu_survives_pauses(tmp_path: Path) -> None:
    """Kernels queued far ahead: the GPU works on unrecorded launches when recording goes on."""
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    with recorder.record(tmp_path / "run", flush_s=0.5, pause_pct=25, samples=recorder.Samples()):
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            with recorder.annotate("step"):
                for _ in range(100):
                    a @ a
        torch.cuda.synchronize()
    pauses = pauses_of(tmp_path / "run")
    assert all(row["complete_ns"] is not None for row in pauses[:-1])
    with na.open(tmp_path / "run") as run:
        (cost,) = run.overhead().to_dict("records")
        print(f"\n{cost}")
        assert (cost["range_name"], cost["reason"]) == ("step", None)
        assert -5 < cost["slowdown_pct"] < 5
        use = run.query("timeline_utilisation", buckets=1)
        assert use["busy_share"][0] > 0.95  # pauses do not look like idle time
