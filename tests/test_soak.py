"""benchmarks/soak.py: its arithmetic, and a few seconds of it against the fake."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_gpu import read_table, shard_paths
from scripts import benchmark

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "soak.py"
soak = benchmark("soak")


def readings(*files: int, mib_per_s: float = 0.0) -> list[soak.Reading]:
    return [soak.Reading(10.0 * i, 100 + 10 * i * mib_per_s, count) for i, count in enumerate(files)]


def test_launches_in_pauses_are_between_those_of_whole_steps_and_of_steps_touched() -> None:
    steps = np.array([[0, 9], [10, 19], [20, 29], [30, 39], [40, 49], [50, 59]])
    assert soak.in_pauses(steps, [(12, 18, 41, None)]) == (200, 400)
    assert soak.in_pauses(steps, [(12, 18, 41, 50)]) == (200, 500)  # until a launch after it was seen
    assert soak.in_pauses(steps, [(12, 18, 41, None), (12, 18, 41, None)]) == (200, 400)
    assert soak.in_pauses(steps, []) == (0, 0)


@pytest.mark.parametrize(
    ("recorded", "lost", "balances"),
    [(900, 0, True), (700, 0, True), (901, 0, False), (699, 0, False), (699, 1, True), (1_001, 0, False)],
)
def test_what_is_missing_was_made_in_pauses_or_is_counted_as_lost(recorded: int, lost: int, balances: bool) -> None:
    counted = soak.Account(made=1_000, recorded=recorded, lost=lost, paused_least=100, paused_most=300)
    assert counted.balances is balances


def test_the_slope_is_that_after_the_first_quarter() -> None:
    assert soak.slope_mib_per_h(readings(3, 3, 3, mib_per_s=0.5)) == pytest.approx(1800)
    assert soak.slope_mib_per_h(readings(3, 3)) is None
    assert [reading.s for reading in soak.settled(readings(1, 2, 3, 4, 5))] == [10, 20, 30, 40]
    assert [reading.s for reading in soak.settled(readings(1, 2, 3, 4, 5), 25)] == [30, 40]
    assert (soak.filled_s(20_000), soak.filled_s(1000, fake=True)) == (100, 100)


@pytest.mark.parametrize(
    ("mib_per_s", "seconds", "code"),
    [(0.1, 400, 1), (0.1, 60, 0), (0.01, 3000, 0), (-1.0, 400, 0)],
)
def test_growth_counts_when_it_is_fast_and_more_than_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mib_per_s: float, seconds: int, code: int
) -> None:
    (tmp_path / "launches").mkdir()
    monkeypatch.setattr(soak, "account", lambda _: soak.Account(100, 100, 0, 0, 0))
    watched = [soak.Reading(float(s), 100 + mib_per_s * s, 4) for s in range(0, seconds + 1, 10)]
    options = argparse.Namespace(rate=100_000.0, fake=False, most_mib_per_h=60.0)
    assert soak._conclude(tmp_path, watched, (90.0, 1.5), options) == code


def test_the_cpu_share_is_that_of_the_worst_process_that_ran_for_long() -> None:
    def row(cpu_s: float | None, ran_s: float | None) -> dict[str, float | None]:
        cpu_ns, ended_ns = (None if s is None else s * 1e9 for s in (cpu_s, ran_s))
        return {"recorder_cpu_ns": cpu_ns, "started_ns": 0, "ended_ns": ended_ns}

    assert soak.cpu_pct([row(0.2, 10), row(0.5, 10), row(1, 1), row(None, 10), row(1, None)]) == pytest.approx(5)
    assert soak.cpu_pct([row(1, 1)]) is None


def test_files_that_stay_open_are_told_from_those_that_come_and_go() -> None:
    assert soak.leaves_files_open(readings(3, 4, 5, 6))
    assert not soak.leaves_files_open(readings(3, 4, 3, 4))
    assert not soak.leaves_files_open(readings(5, 3, 4, 5))
    assert not soak.leaves_files_open(readings(7))


def test_a_few_seconds_with_children_lose_nothing_uncounted(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, tmp_path / "out", "--fake", "--minutes", "0.06", "--rate", "1000"]
    command += ["--children-s", "1.2", "--read-s", "0.3", "--pause", "10", "--bare-s", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out" / "soak.json").read_text())
    assert result["made"] > 2_000
    assert 40 < result["bare_mib"] < 1_000
    assert result["recorded"] > 1_000
    run_dir = tmp_path / "out" / "run"
    assert len({path.parent for path in shard_paths(run_dir, "kernels")}) == 2  # a child beside the first process
    assert read_table(run_dir, "samples")
    assert max(reading["rss_mib"] for reading in result["readings"]) > 40  # pyarrow is in it, so it is the job's
    last = result["readings"][-1]
    assert 1_000 < last["made"] <= result["made"]
    assert 0 < last["written"] <= result["recorded"]
    assert f"launches made {result['made']:,}, in the run {result['recorded']:,}, lost 0\n" in done.stdout
    # What is gone without being counted does not go unnoticed.
    max(shard_paths(run_dir, "kernels"), key=lambda path: path.stat().st_size).unlink()
    assert not soak.account(tmp_path / "out").balances
