"""`nanalyze info`: numbers worked out by hand on a small run, and how processes ended."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from trace import T0, Trace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from nanalyze import commands
from nanalyze.commands import info

ENDED, CUT = "node0-0-100", "node0-1-101"
KERNEL = {"kernel_class_id": 1, "device_id": 0, "context_id": 1, "stream_id": 7}


def run_info(*words: str | Path) -> Result:
    return CliRunner().invoke(commands.main, ["info", *map(str, words)])


def summary(*words: str | Path) -> dict[str, Any]:
    done = run_info(*words, "--json")
    assert done.exit_code == 0, done.output
    content: dict[str, Any] = json.loads(done.stdout)
    return content


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two ranks: the first ended after 2 s and lost 3 records, the second was cut off after its second kernel."""
    trace = Trace(tmp_path / "run")
    for rank, process in enumerate((ENDED, CUT)):
        trace.process_row(process, world_size=2)
        trace.device(process)
        kernel = trace.kernel_class("gemm", process=process)
        for start in (1_000, 1_500_000_000)[: rank + 1]:
            trace.kernel(kernel, start_ns=start, duration_ns=500_000_000, process=process)
    counts = {"processes": 1, "devices": 1, "kernel_classes": 1, "kernels": 1, "events": 1}
    ended = {"recorded_ns": T0 + 3, "ended_ns": T0 + 2_000_000_000, "ending": "exit", "shards": json.dumps(counts)}
    trace.process_row(ENDED, **ended, records_lost=3, world_size=2)
    trace.event("loss", "records dropped by CUPTI, in all", count=3)
    trace.event("note", "launches measured", layer="exact", count=1234)
    trace.write(end=False)
    return tmp_path / "run"


def test_what_a_run_holds_as_json(run_dir: Path) -> None:
    content = summary(run_dir)
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert content["bytes"] == sum(path.stat().st_size for path in files)
    assert (content["source"], content["started_ns"], content["ended_ns"]) == ("recorder", T0, None)
    first, second = content["processes"]
    assert (
        first["process"],
        first["rank"],
        first["world_size"],
        first["ended"],
        first["seconds"],
        first["kernels"],
    ) == (
        *(ENDED, 0, 2, "exit", 2.0),
        1,
    )
    assert (first["records_lost"], first["command"]) == (3, ["python", "train.py"])
    assert (second["process"], second["rank"], second["ended"], second["kernels"]) == (CUT, 1, "cut off", 2)
    assert (second["ended_ns"], second["seconds"], second["records_lost"]) == (None, 2.0, None)
    assert [(row["name"], row["sm_count"], row["processes"]) for row in content["devices"]] == [("NVIDIA H200", 132, 2)]
    assert {row["table"]: (row["rows"], row["shards"]) for row in content["tables"]} == {
        "processes": (2, 2),
        "devices": (2, 2),
        "kernels": (3, 2),
        "kernel_classes": (1, 2),
        "events": (2, 1),
    }
    loss = {"process": ENDED, "layer": "timeline", "message": "records dropped by CUPTI, in all", "count": 3}
    assert content["losses"] == [loss]
    assert [(row["kind"], row["count"]) for row in content["notes"]] == [("note", 1234)]
    assert content["damage"] == []


def test_what_a_run_holds_for_people(run_dir: Path) -> None:
    done = run_info(run_dir)
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    size = f"{summary(run_dir)['bytes'] / 1000:.1f} kB"
    assert lines[0] == f"{run_dir}: 2 processes (1 exit, 1 cut off), {size}, by recorder"
    assert lines[1] == "Started 2023-11-14 22:13:20 UTC"
    text = "\n".join(" ".join(line.split()) for line in lines)
    assert f"{ENDED} 0 exit 2 1 3 timeline,ranges,exact python train.py" in text
    assert f"{CUT} 1 cut off 2 2 NULL timeline,ranges,exact python train.py" in text
    assert "NVIDIA H200 GPU-00000000-0000-0000-0000-000000000000 9.0 132 2" in text
    assert f"Losses:\n{ENDED}: timeline: records dropped by CUPTI, in all (3)" in text
    assert f"Notes:\n{ENDED}: exact note: launches measured (1,234)" in text


def test_notes_are_short_and_stand_once(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run")
    long = "device 0, counter_group 0: " + ", ".join(f"counter_{number} = some__metric.sum" for number in range(15))
    for process in (ENDED, CUT):
        trace.process_row(process)
        event = {"layer": "samples", "kind": "note", "message": long, "count": None, "time_ns": T0}
        trace.add("events", process, **event)
        trace.add("events", process, **{**event, "kind": "failure"})
    trace.write(end=False)
    lines = run_info(tmp_path / "run").stdout.splitlines()
    notes = lines[lines.index("Notes:") + 1 :]
    assert f"  2 processes: samples note: {long[:160]}…" in notes
    assert f"  2 processes: samples failure: {long}" in notes  # what went wrong is told in full
    assert [row["message"] for row in summary(tmp_path / "run")["notes"]] == [long] * 4


def test_damage_is_listed_with_what_to_do(run_dir: Path) -> None:
    (shard,) = (run_dir / "kernels" / f"process={CUT}").iterdir()
    shard.write_bytes(shard.read_bytes()[:-1])
    content = summary(run_dir)
    (damage,) = content["damage"]
    assert damage["path"] == str(shard.relative_to(run_dir))
    assert [row["kernels"] for row in content["processes"]] == [1, 0]
    done = run_info(run_dir)
    assert f"{damage['path']}: {damage['problem']}. {damage['remedy']}" in done.stdout
    assert "1 problem with its shards" in done.stderr
    shutil.rmtree(run_dir / "events")
    assert any(row["table_name"] == "events" for row in summary(run_dir)["damage"])


def test_a_run_without_trouble_says_so_and_how_long_it_lasted(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run", source="ncu")
    trace.kernel(trace.kernel_class("a"), 0, 5)
    trace.write()
    lines = run_info(tmp_path / "run").stdout.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'run'}: 1 process (1 stop), ")
    assert lines[0].endswith(" kB, by ncu")
    assert lines[1] == "Started 2023-11-14 22:13:20 UTC, lasted 1000.0 s"
    assert lines[-1] == "No losses, no damage."


def test_long_lists_are_cut_for_people_only(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run")
    for rank in range(25):
        trace.process_row(f"node0-{rank}-{rank}")
        trace.add("kernels", f"node0-{rank}-{rank}", **{**KERNEL, "correlation_id": rank})
    trace.write()
    assert len(summary(tmp_path / "run")["processes"]) == 25
    text = run_info(tmp_path / "run").stdout
    assert "  and 5 more: --json has all" in text
    assert text.count("python train.py") == 20


def test_text_from_a_run_cannot_move_the_cursor(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run")
    trace.process_row(command='["a\\u001b[2J", "b"]')
    trace.event("loss", "x\x1b[2J\ny")
    trace.write()
    text = run_info(tmp_path / "run").stdout
    assert "\x1b" not in text
    assert "a\\x1b[2J b" in text
    assert "x\\x1b[2J\\ny" in text


def test_what_is_no_run_is_one_line(tmp_path: Path) -> None:
    done = run_info(tmp_path / "absent")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"nanalyze: error: {tmp_path / 'absent'}: does not exist. ")
    assert done.stderr.count("\n") == 1


# --- how a process ended -------------------------------------------------------------------------


def row_of(pid: int, started_ns: int, **columns: Any) -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": pid, "started_ns": started_ns, "ended_ns": None, **columns}


def test_a_process_that_is_still_there_is_running() -> None:
    assert info.ending(row_of(os.getpid(), time.time_ns())) == "running"
    assert info.ending(row_of(os.getpid(), time.time_ns(), host="elsewhere")) == "cut off"
    assert info.ending(row_of(os.getpid(), time.time_ns(), ended_ns=5, ending="failed")) == "failed"


def test_a_later_process_with_the_same_number_is_another_one() -> None:
    assert info.ending(row_of(os.getpid(), T0)) == "cut off"


def test_a_process_that_is_gone_or_a_zombie_was_cut_off() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    deadline = time.monotonic() + 30
    while info.ending(row_of(child.pid, time.time_ns())) == "running":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert Path(f"/proc/{child.pid}").exists()  # a zombie: not waited for yet
    child.wait()
    assert info.ending(row_of(child.pid, time.time_ns())) == "cut off"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_234_567, "1.2 MB"), (10**12, "1.0 TB"), (10**16, "10000.0 TB")],
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert info.size_text(count) == text
