"""Ends of processes: exit, kill -9, os._exit, exceptions and forks, each in a real process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import FakeGpu, final_process, read_table, shard_paths, shards_claimed, shards_on_disk

from nanalyze import analysis, recorder
from nanalyze.recorder import lifecycle, ranges
from nanalyze.rundir import runfile

TESTS = Path(__file__).parent

# Every program starts with a fake GPU and `run_dir`.
PRELUDE = """
import os, sys, threading, time
import pytest
from fake_gpu import FakeGpu
from nanalyze import recorder
run_dir = sys.argv[1]
gpu = FakeGpu()
gpu.install(pytest.MonkeyPatch())
"""


def start(program: str, run_dir: Path, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTHONWARNINGS": "ignore", **variables}
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(program), str(run_dir)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(program: str, run_dir: Path) -> tuple[int, str, str]:
    process = start(program, run_dir)
    out, error = process.communicate(timeout=60)
    return process.returncode, out, error


def is_readable(run_dir: Path) -> list[Any]:
    """The damage that the analysis finds."""
    with analysis.open(run_dir) as opened:
        return list(opened.damage().to_dict("records"))


def test_an_exit_without_stop_writes_everything(tmp_path: Path) -> None:
    code, _, error = run(
        """
        recorder.start(run_dir)
        with recorder.annotate("work"):
            gpu.launch("a")
        gpu.copy(3)
        """,
        tmp_path / "run",
    )
    assert (code, error) == (0, "")
    end = final_process(tmp_path / "run")
    assert (end["ending"], end["kernels_written"]) == ("exit", 1)
    assert [row["name"] for row in read_table(tmp_path / "run", "ranges")] == ["work"]
    assert shards_claimed(tmp_path / "run") == shards_on_disk(tmp_path / "run")
    assert is_readable(tmp_path / "run") == []


def test_an_uncaught_exception_writes_everything_and_keeps_its_traceback(tmp_path: Path) -> None:
    code, _, error = run(
        """
        recorder.start(run_dir)
        gpu.launch("a")
        raise RuntimeError("the job's own")
        """,
        tmp_path / "run",
    )
    assert code == 1
    assert error.splitlines()[-1] == "RuntimeError: the job's own"
    assert "nanalyze" not in error
    assert final_process(tmp_path / "run")["kernels_written"] == 1


def test_the_exit_status_is_the_jobs(tmp_path: Path) -> None:
    code, _, error = run("with recorder.record(run_dir):\n    gpu.launch()\n    sys.exit(7)", tmp_path / "run")
    assert (code, error) == (7, "")
    assert final_process(tmp_path / "run")["kernels_written"] == 1


def test_kill_9_costs_at_most_the_last_flush(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(
        """
        recorder.start(run_dir, flush_s=0.2, pause_pct=0)
        while True:
            with recorder.annotate("step"):
                gpu.launch("a")
            time.sleep(0.002)
        """,
        run_dir,
    )
    deadline = time.monotonic() + 40
    while min(len(shard_paths(run_dir, table)) for table in ("kernels", "ranges")) < 4:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (row,) = read_table(run_dir, "processes")
    assert (row["ended_ns"], row["ending"], row["pid"]) == (None, None, process.pid)
    kernels, steps = read_table(run_dir, "kernels"), read_table(run_dir, "ranges")
    assert len(kernels) > 50
    assert len(steps) > 50
    assert [row["correlation_id"] for row in kernels] == [*range(101, 101 + len(kernels))]
    assert {row["kernel_class_id"] for row in kernels} == {
        row["kernel_class_id"] for row in read_table(run_dir, "kernel_classes")
    }
    with analysis.open(run_dir) as opened:
        assert len(opened.damage()[opened.damage()["table_name"] == "kernels"]) == 0
        assert int(opened.sql("SELECT count(*) AS n FROM kernels")["n"][0]) == len(kernels)


def test_os_exit_leaves_a_readable_run(tmp_path: Path) -> None:
    code, _, error = run(
        """
        recorder.start(run_dir, flush_s=0.1)
        gpu.launch("a")
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not os.path.isdir(run_dir + "/kernels"):
            time.sleep(0.01)
        time.sleep(0.1)
        os._exit(3)
        """,
        tmp_path / "run",
    )
    assert (code, error) == (3, "")
    assert len(read_table(tmp_path / "run", "kernels")) == 1
    assert [row["ending"] for row in read_table(tmp_path / "run", "processes")] == [None]
    with analysis.open(tmp_path / "run") as opened:
        assert int(opened.sql("SELECT count(*) AS n FROM kernels")["n"][0]) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_neither_writes_nor_disturbs_its_parent(tmp_path: Path) -> None:
    code, out, error = run(
        """
        rec = recorder.start(run_dir)
        with recorder.annotate("before"):
            gpu.launch("a")
        gpu.cupti.settle()
        child = os.fork()
        if child == 0:
            with recorder.annotate("in the child"):
                pass
            print("child", rec.is_stopped, threading.active_count(), flush=True)
            rec.stop()
            recorder.stop()
            sys.exit(0)  # with the interpreter's own end, exit handlers included
        os.waitpid(child, 0)
        with recorder.annotate("after"):
            gpu.launch("b")
        rec.stop()
        print("parent", os.getpid())
        """,
        tmp_path / "run",
    )
    assert (code, error) == (0, "")
    child, parent = out.split("\n")[:2]
    assert child == "child True 1"
    rows = read_table(tmp_path / "run", "processes")
    assert [(row["pid"], row["ending"]) for row in rows] == [
        (int(parent.split()[1]), ending) for ending in (None, "stop")
    ]
    assert [row["name"] for row in read_table(tmp_path / "run", "ranges")] == ["before", "after"]
    assert len(read_table(tmp_path / "run", "kernels")) == 2
    assert shards_claimed(tmp_path / "run") == shards_on_disk(tmp_path / "run")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_may_record_for_itself(tmp_path: Path) -> None:
    code, _, error = run(
        """
        recorder.start(run_dir, layers=("ranges",))
        child = os.fork()
        if child == 0:
            with recorder.record(run_dir + "-child", layers=("ranges",)):
                with recorder.annotate("in the child"):
                    pass
            os._exit(0)
        _, status = os.waitpid(child, 0)
        with recorder.annotate("in the parent"):
            pass
        recorder.stop()
        sys.exit(status)
        """,
        tmp_path / "run",
    )
    assert (code, error) == (0, "")
    names = {name: [row["name"] for row in read_table(tmp_path / name, "ranges")] for name in ("run", "run-child")}
    assert names == {"run": ["in the parent"], "run-child": ["in the child"]}


def test_processes_starting_together_share_the_run_of_their_job(tmp_path: Path) -> None:
    program = """
        with recorder.record(run_dir, layers=("ranges",)):
            with recorder.annotate("rank " + os.environ["RANK"]):
                pass
        """
    processes = [
        start(program, tmp_path / "run", RANK=str(rank), WORLD_SIZE="3", TORCHELASTIC_RUN_ID="job") for rank in range(3)
    ]
    for process in processes:
        _, error = process.communicate(timeout=60)
        assert (process.returncode, error) == (0, "")
    assert sorted(row["name"] for row in read_table(tmp_path / "run", "ranges")) == ["rank 0", "rank 1", "rank 2"]
    folders = sorted(path.name for path in (tmp_path / "run" / "processes").iterdir())
    assert [folder.split("-")[-2] for folder in folders] == ["0", "1", "2"]
    assert is_readable(tmp_path / "run") == []


def test_importing_the_recorder_changes_nothing() -> None:
    program = """
        import atexit, sys, threading
        before = atexit._ncallbacks()
        from nanalyze import recorder
        from nanalyze.recorder import annotate, record
        heavy = {"numpy", "pyarrow", "pandas", "duckdb", "cuda.bindings", "click"} & set(sys.modules)
        print(atexit._ncallbacks() - before, threading.active_count(), sorted(heavy))
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split("\n")[0] == "0 1 []"


def test_recording_does_not_import_pandas(tmp_path: Path) -> None:
    """It would take the job's interpreter lock for half a second in mid-run."""
    code, out, _ = run(
        """
        with recorder.record(run_dir):
            gpu.launch("a")
            with recorder.annotate("r", note="x"):
                gpu.copy(1)
        print(sorted({"pandas", "duckdb", "click", "matplotlib"} & set(sys.modules)))
        """,
        tmp_path / "run",
    )
    assert (code, out) == (0, "[]\n")


# --- within one process -----------------------------------------------------------------------


def test_exit_stops_what_is_still_recording_and_nothing_else(tmp_path: Path) -> None:
    finished = recorder.start(tmp_path / "finished", layers=("ranges",))
    recorder.stop()
    running = recorder.start(tmp_path / "running", layers=("ranges",))
    lifecycle._at_exit()
    assert finished.is_stopped
    assert running.is_stopped
    assert final_process(tmp_path / "finished")["ending"] == "stop"
    assert final_process(tmp_path / "running")["ending"] == "exit"
    assert len(read_table(tmp_path / "finished", "processes")) == 2


def test_a_child_forgets_its_parents_recording(tmp_path: Path) -> None:
    rec = recorder.start(tmp_path / "run", layers=("ranges",))
    try:
        lifecycle._in_child()
        assert ranges._log is None
        lifecycle._at_exit()
        assert not rec.is_stopped
    finally:
        rec.stop()


def test_exit_handlers_are_installed_once(tmp_path: Path) -> None:
    import atexit

    for number in range(3):
        with recorder.record(tmp_path / f"{number}", layers=("ranges",)):
            pass
        if number == 0:
            installed = atexit._ncallbacks()  # type: ignore[attr-defined]
    assert atexit._ncallbacks() == installed  # type: ignore[attr-defined]


def test_a_recorder_that_is_dropped_is_still_stopped_at_exit(tmp_path: Path) -> None:
    """`recorder.start()` without keeping the result must not depend on the garbage collector."""
    import gc

    recorder.start(tmp_path / "run", layers=("ranges",))
    gc.collect()
    lifecycle._at_exit()
    assert final_process(tmp_path / "run")["ending"] == "exit"


# --- a job that records itself, under `nanalyze record` ------------------------------------------


def test_a_recording_within_a_whole_process_recording_changes_nothing(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outer = recorder.start(tmp_path / "outer")
    monkeypatch.setattr(recorder, "_is_whole_process", True)
    with recorder.record(tmp_path / "inner") as inner:
        calls = [gpu.launch()]
    recorder.stop()
    calls.append(gpu.launch())
    assert not outer.is_stopped
    assert inner.run_dir == tmp_path / "outer"
    assert not (tmp_path / "inner").exists()
    outer.stop("exit")
    assert [row["correlation_id"] for row in read_table(tmp_path / "outer", "kernels")] == calls
    said = capsys.readouterr().err
    assert said == f"nanalyze: this process is already being recorded into {tmp_path}/outer; that recording goes on\n"


def test_a_closed_stderr_does_not_change_the_exit_code(tmp_path: Path) -> None:
    """There is no driver, which the recorder says: into nothing."""
    program = f"from nanalyze import recorder; recorder.start({str(tmp_path / 'run')!r})"
    command = ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, program]
    assert subprocess.run(command, timeout=60).returncode == 0


def test_a_second_stop_waits_for_the_first(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = recorder.start(tmp_path / "run")
    gpu.launch()
    entered, proceed = threading.Event(), threading.Event()
    finish = recording._finish

    def slow(ending: str) -> None:
        entered.set()
        proceed.wait(10)
        finish(ending)

    monkeypatch.setattr(recording, "_finish", slow)
    first = threading.Thread(target=recording.stop)
    first.start()
    entered.wait(10)
    second = threading.Thread(target=recording.stop)
    second.start()
    second.join(0.1)
    assert second.is_alive()
    proceed.set()
    for thread in (first, second):
        thread.join(10)
    assert shards_on_disk(tmp_path / "run")["kernels"] == 1


def test_a_run_that_another_rank_is_about_to_make_is_joined(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run file lies there under a passing name, and so does not yet make a run."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / f".{runfile.RUN_FILE}.4711.abc").write_text("{")
    with recorder.record(run_dir):
        gpu.launch()
    assert runfile.read(run_dir)["settings"]["job"]
    assert len(list((run_dir / "kernels").iterdir())) == 1
