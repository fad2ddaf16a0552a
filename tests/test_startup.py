"""benchmarks/startup.py: a job bare and recorded, and what counts as too much."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import final_process, read_table
from scripts import benchmark

startup = benchmark("startup")


def test_the_recorded_job_writes_all_that_it_leaves_to_the_end(tmp_path: Path) -> None:
    (tmp_path / f"{startup.TRIGGER}.py").touch()
    (tmp_path / "job.py").write_text(textwrap.dedent(startup.FAKE) + textwrap.dedent(startup.WORK))
    record = [*startup.NANALYZE, "record", "-q", "-o", "run", "--start-on", startup.TRIGGER, "--"]
    times = startup.run([*record, sys.executable, "job.py", "2", "100000"], tmp_path)
    assert 0 < times.start < times.whole
    assert 0 < times.exit < times.whole
    assert len(read_table(tmp_path / "run", "kernels")) == 104_000
    assert final_process(tmp_path / "run")["ending"] == "exit"


@pytest.mark.parametrize(("recorded_s", "fits"), [(1.4, True), (1.6, False), (0.9, True)])
def test_the_best_of_each_are_compared(capsys: Any, recorded_s: float, fits: bool) -> None:
    bare = [startup.Times(start, 0, 0) for start in (1.0, 5.0)]
    recorded = [startup.Times(start, 0, 0) for start in (9.0, recorded_s)]
    assert startup.show("start", (bare, recorded), "start", 0.5) is fits
    assert ("TOO MUCH" in capsys.readouterr().out) is not fits
