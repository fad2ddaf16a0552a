"""NVTX ranges on a real GPU, through CUPTI's own NVTX library.

NVTX decides once a process, at its first call, where its calls go: hence each case is a process of
its own, run under `nanalyze record` or with a recording that it starts itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import read_table

import nanalyze.analysis as na

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

RECORD = (sys.executable, "-c", "from nanalyze.commands import main; main()", "record", "--pause", "0")

TRAIN = """
    import threading, time, torch
    nvtx = torch.cuda.nvtx
    nvtx.range_push("before CUDA")       # the first NVTX call of the process, before any kernel
    w = torch.randn(512, 512, device="cuda", requires_grad=True)
    nvtx.range_pop()
    for step in range(3):
        with nvtx.range(f"step {step}"):
            with nvtx.range("forward"):
                loss = (w @ w).relu().sum()
            nvtx.range_push("backward")
            loss.backward()
            torch.cuda.synchronize()
            nvtx.range_pop()
    def work():
        with nvtx.range("thread"):
            w.detach().mul(2)
            torch.cuda.synchronize()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    handle = nvtx.range_start("start and end")
    w.detach().cos()
    torch.cuda.synchronize()
    nvtx.range_end(handle)
    for number in range(5000):           # names that the job frees at once
        nvtx.range_push(f"name {number:05d} " + "x" * (number % 50))
        nvtx.range_pop()
    nvtx.range_push("never closed")
    w.detach().sin()
    torch.cuda.synchronize()
"""
QUERY = """
SELECT r.name, count(k.correlation_id) AS kernels, min(r.depth) AS depth, any_value(p.name) AS parent
FROM ranges r LEFT JOIN kernels k USING (process, range_id)
LEFT JOIN ranges p ON p.process = r.process AND p.range_id = r.parent_id
WHERE r.source = 'nvtx' GROUP BY r.name
"""


def run(*words: str, env: dict[str, str] | None = None) -> tuple[str, str]:
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def found(run_dir: Path) -> dict[str, dict[str, Any]]:
    with na.open(run_dir) as opened:
        return {row["name"]: row for row in opened.arrow(QUERY).to_pylist()}


def test_ranges_of_an_unmodified_job(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAIN))
    _, error = run(*RECORD, "-o", str(tmp_path / "run"), str(script))
    assert error.count("\n") == 1, error
    ranges = found(tmp_path / "run")
    assert ranges["forward"]["kernels"] >= 3 * 2
    assert ranges["backward"]["kernels"] >= 3 * 3  # launched by autograd's own thread
    assert (ranges["forward"]["depth"], ranges["forward"]["parent"][:4]) == (1, "step")
    assert [ranges[f"step {number}"]["depth"] for number in range(3)] == [0, 0, 0]
    assert (ranges["thread"]["kernels"], ranges["thread"]["parent"]) == (1, None)
    assert (ranges["start and end"]["kernels"], ranges["start and end"]["parent"]) == (1, None)
    assert ranges["never closed"]["kernels"] == 1
    for number in range(5000):
        assert f"name {number:05d} " + "x" * (number % 50) in ranges
    rows = {row["name"]: row for row in read_table(tmp_path / "run", "ranges")}
    assert rows["never closed"]["end_ns"] is None
    assert rows["thread"]["thread_id"] != rows["step 0"]["thread_id"] > 0
    kernels = read_table(tmp_path / "run", "kernels")
    assert min(row["queued_ns"] for row in kernels) - 60e9 < rows["step 0"]["start_ns"] < rows["step 0"]["end_ns"]


def test_a_job_without_nvtx_ranges_has_none_and_says_nothing(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("import torch\ntorch.zeros(8, device='cuda').add_(1)\ntorch.cuda.synchronize()\n")
    _, error = run(*RECORD, "-o", str(tmp_path / "run"), str(script))
    assert error.count("\n") == 1, error
    assert found(tmp_path / "run") == {}
    assert read_table(tmp_path / "run", "kernels")


COST = """
    import sys, time, torch
    from nanalyze import recorder
    nvtx = torch.cuda.nvtx
    torch.zeros(1, device="cuda")
    times = {}
    for name, nvtx_on in (("off", False), ("on", True)):
        if name == "on":
            recorder.start(sys.argv[1], layers=("timeline", "ranges"), pause_pct=0)
        best = 1e9
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(4000):
                nvtx.range_push("a range"); nvtx.range_pop()
            best = min(best, (time.perf_counter() - start) / 4000 * 1e6)
        times[name] = best
    recorder.stop()
    print(times["off"], times["on"])
"""


def test_what_a_range_costs(tmp_path: Path) -> None:
    """Printed for docs/measurements.md; NVTX here was injected before its first call, in both halves."""
    from nanalyze.recorder import cupti

    path = cupti.find()
    if path is None:
        pytest.skip("no CUPTI beside PyTorch")
    env = {**os.environ, "NVTX_INJECTION64_PATH": path}
    script = tmp_path / "cost.py"
    script.write_text(textwrap.dedent(COST))
    out, _ = run(sys.executable, str(script), str(tmp_path / "run"), env=env)
    off, on = map(float, out.split())
    print(f"\nNVTX push and pop: {off:.2f} us injected, {on:.2f} us recorded")
    assert len([row for row in read_table(tmp_path / "run", "ranges") if row["source"] == "nvtx"]) == 20_000
    assert on - off < 20
