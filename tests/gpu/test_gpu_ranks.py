"""Two ranks of torchrun, and one process with two devices: `examples/two_ranks.py` on a machine with two GPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import read_table

import nanalyze.analysis as na
from nanalyze import queries
from nanalyze.analysis.report import ranks

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "two_ranks.py"
RECORD = (sys.executable, "-c", "from nanalyze.commands import main; main()", "record", "--pause", "0")
STEPS = 30


def record(run_dir: Path, *job: str) -> str:
    words = [*RECORD, "-o", str(run_dir), "--", *job, "--steps", str(STEPS)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def rows(run_dir: Path) -> list[dict[str, Any]]:
    with na.open(run_dir) as run:
        assert run.damage_count == 0
        return list(run.arrow(queries.query("ranks").sql).to_pylist())


def test_the_slow_rank_is_named(tmp_path: Path) -> None:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    said = record(tmp_path / "run", *launcher, str(EXAMPLE), "--slow-rank", "1")
    assert f"recorded 2 processes into {tmp_path / 'run'}. Next: nanalyze report" in said
    found = rows(tmp_path / "run")
    assert [row["rank"] for row in found] == [0, 1]
    assert [row["is_slowest"] for row in found] == [False, True]
    assert found[1]["compute_skew"] > 0.05 > 0 > found[0]["compute_skew"]
    assert found[0]["waiting_ns"] > 0
    assert found[1]["waiting_ns"] == 0
    assert 0 < found[1]["communication_share"] < found[0]["communication_share"] < 1
    assert ranks.sentence(found).startswith("Rank 1 is the slowest: Rank 0 waited ")
    steps = [row for row in read_table(tmp_path / "run", "ranges") if row["name"] == "step"]
    assert len(steps) == 2 * STEPS
    processes = {row["rank"]: row for row in read_table(tmp_path / "run", "processes")}
    assert {rank: (row["local_rank"], row["world_size"]) for rank, row in processes.items()} == {0: (0, 2), 1: (1, 2)}
    assert {row["records_lost"] for row in processes.values()} <= {0, None}


def test_one_process_with_two_devices(tmp_path: Path) -> None:
    record(tmp_path / "run", sys.executable, str(EXAMPLE), "--one-process")
    found = rows(tmp_path / "run")
    assert [row["device_id"] for row in found] == [0, 1]
    assert all(row["compute_ns"] > 0 for row in found)
    copies = [row for row in read_table(tmp_path / "run", "copies") if row["kind"] == "PtoP"]
    assert len(copies) >= 2 * STEPS  # gradients there and back
