"""benchmarks/measure.py: its arithmetic, and its child processes, with stand-ins for both tools."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from scripts import benchmark

measure = benchmark("measure")

LABELS = ["2048 float32", "4096 float32", "8192 float32"]


def found(seconds: float, call_s: float, *ns: float, **extra: dict[str, float]) -> Any:
    return measure.Found(seconds, call_s, dict(zip(LABELS, ns, strict=True)), extra)


@pytest.fixture
def rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two rounds of both tools on answers prepared by tool and round, and nanalyze's counters."""
    answers = {
        "nanalyze": [found(4, 1, 100_000, 800_000, 5e6), found(6, 3, 100_000, 800_000, 7e6)],
        "nsight": [found(30, 20, 101_000, 800_000, 6e6), found(20, 20, 101_000, 824_000, 6e6)],
        "counters": [
            found(
                5, 1, 1, 1, 1,
                duration_ns=dict.fromkeys(LABELS, 101_000.0), **{"sm__cycles_elapsed.max": dict.fromkeys(LABELS, 2e5)},
            )
        ],
    }  # fmt: skip

    def answer(tool: str, *given: Any) -> Any:
        if not answers[tool]:
            raise RuntimeError(f"{tool} broke")
        return answers[tool].pop(0)

    monkeypatch.setattr(measure, "run_tool", answer)
    return measure.Rounds("parameter", 10, tmp_path, {"nanalyze": {}, "nsight": {}}, time.monotonic() + 60)


def test_ratios_and_differences_are_those_of_medians(rounds: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rounds.run(2)
    assert (rounds.ratio("seconds"), rounds.ratio("call_s")) == (25 / 5, 20 / 2)
    first, second, third = rounds.rows()
    assert (first.nanalyze_ns, first.nsight_ns, third.nanalyze_ns) == (100_000, 101_000, 6e6)
    assert first.apart_pct == pytest.approx(1)
    assert second.apart_pct == pytest.approx(1.5)
    assert first.same_metric_pct == pytest.approx(0)
    assert (first.nanalyze_hz, first.nsight_hz) == (2e9, pytest.approx(2e5 * 1e9 / 101_000))
    measure.show(rounds)
    shown = capsys.readouterr().out
    assert "| 2048 float32 | 100.0 | 101.0 | +1.0 % | +0.0 % | 2000 / 1980 |" in shown
    assert "end to end: 5.0 times as fast (reached: at least 5)" in shown
    assert "times: 3 of 3 within 2 % (reached), mean 0.83 %, most 1.50 %" in shown
    written = json.loads((rounds.out / "measure-parameter.json").read_text())
    assert (written["ratio"], written["launches"], written["failed"]) == (5, 30, {})


def test_a_tool_that_fails_is_not_tried_again_and_the_other_goes_on(
    rounds: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds.run(3)
    assert rounds.failed == {"nanalyze": "nanalyze broke", "nsight": "nsight broke"}
    assert [len(each) for each in rounds.found.values()] == [2, 2]
    assert capsys.readouterr().out.count("nsight broke") == 1
    assert json.loads((rounds.out / "measure-parameter.json").read_text())["ratio"] == 5


def test_no_round_begins_that_would_not_end_in_time(rounds: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rounds.ends = time.monotonic() + 10
    rounds.run(2)
    assert [len(each) for each in rounds.found.values()] == [2, 1]
    assert "no time is left for round 2 of nsight" in capsys.readouterr().out


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    script = tmp_path / "tool.py"
    script.write_text(body)
    monkeypatch.setattr(measure, "__file__", str(script))


def test_a_child_answers_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"call_s": 0.5, "ns": dict.fromkeys(LABELS, 7.0), "extra": {}}
    stand_in(tmp_path, monkeypatch, f"print('noise'); print('FOUND ' + {json.dumps(answer)!r})")
    got = measure.run_tool("nsight", "parameter", 10, tmp_path / "out", {}, 60)
    assert (got.call_s, got.ns) == (0.5, dict.fromkeys(LABELS, 7.0))
    assert got.seconds > 0


def test_a_table_without_a_product_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, """print('FOUND {"call_s": 1, "ns": {"2048 float32": 1}, "extra": {}}')""")
    with pytest.raises(RuntimeError, match="nsight, parameter: its table has no time of 4096 float32, 8192 float32"):
        measure.run_tool("nsight", "parameter", 10, tmp_path / "out", {}, 60)


def test_what_a_child_said_is_kept_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "import sys; print('before'); sys.exit('no counters for you')")
    with pytest.raises(RuntimeError, match=r"exit code 1; all output in .*out\.log\n    no counters for you"):
        measure.run_tool("nsight", "parameter", 10, tmp_path / "out", {}, 60)
    assert (tmp_path / "out.log").read_text() == "before\nno counters for you\n"


def test_a_child_that_does_not_end_is_stopped_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grandchild = "import time, pathlib; time.sleep(1.5); pathlib.Path('alive').touch()"
    stand_in(
        tmp_path, monkeypatch,
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])",
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="not done after 0 s, stopped"):
        measure.run_tool("nsight", "parameter", 10, tmp_path / "out", {}, 0.4)
    time.sleep(1.6)
    assert not (tmp_path / "alive").exists()


@pytest.mark.parametrize("folder", ["extras/python", "nsight-compute-2025.3.1/extras/python"])
def test_the_report_module_is_found_beside_ncu(tmp_path: Path, folder: str) -> None:
    ncu = tmp_path / ("bin/ncu" if folder.startswith("nsight") else "ncu")
    ncu.parent.mkdir(exist_ok=True)
    ncu.touch()
    place = tmp_path / folder
    place.mkdir(parents=True)
    (place / "ncu_report.py").touch()
    link = tmp_path / "link"
    link.symlink_to(ncu)
    assert measure.report_folder(str(link)) == place


def test_a_tool_that_is_missing_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(measure.environments(["nanalyze", "no_such_tool"], None)) == ["nanalyze"]
    assert capsys.readouterr().out == "no_such_tool: left out: not installed\n"
