"""Disks that stand still, threads that cannot start, users that press Ctrl-C again: the job ends all the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import FakeGpu, final_process, read_table

from nanalyze import recorder
from nanalyze.recorder import coexistence, launch, patience, ranges, session
from nanalyze.rundir import runfile, shards
from nanalyze.rundir.errors import RecorderError, RunError

TESTS = Path(__file__).parent


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """What a test has stand still goes on when this is set, at the latest at its end, and ends before the fake GPU."""
    event = threading.Event()
    yield event
    event.set()
    for thread in threading.enumerate():
        if thread.name.startswith("nanalyze"):
            thread.join(10)


def no_threads(patch: pytest.MonkeyPatch) -> None:
    original = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name.startswith("nanalyze"):  # the fake GPU has threads too
            raise RuntimeError("can't start new thread")
        original(self)

    patch.setattr(threading.Thread, "start", start)


# --- waiting ---------------------------------------------------------------------------------------


def test_work_is_waited_for_within_reason(released: threading.Event) -> None:
    done: list[str] = []
    assert patience.within(10, lambda: done.append(threading.current_thread().name)) is True
    assert done == ["nanalyze-wait"]
    started = time.monotonic()
    assert patience.within(0.05, released.wait) is False
    assert time.monotonic() - started < 5


def test_where_no_thread_is_to_be_had_it_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12.1 starts none while it ends; a limit of processes has the same effect."""
    no_threads(monkeypatch)
    done: list[str] = []
    assert patience.within(0.0, lambda: done.append(threading.current_thread().name)) is True
    assert done == [threading.current_thread().name]


def test_an_interrupted_wait_lets_the_work_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    wait, waited, proceed, done = threading.Event.wait, [], threading.Event(), []

    def interrupted(self: threading.Event, timeout: float | None = None) -> bool:
        if self is proceed or timeout is None:
            return wait(self, timeout)
        waited.append(timeout)
        if len(waited) == 1:
            raise KeyboardInterrupt
        proceed.set()
        return wait(self, timeout)

    def work() -> None:
        proceed.wait(10)
        done.append(1)

    monkeypatch.setattr(threading.Event, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        patience.within(60, work)
    assert done == [1]
    assert waited == [60, pytest.approx(patience.INTERRUPTED_S, abs=0.1)]


def test_what_the_work_gives_or_raises_is_the_callers(released: threading.Event) -> None:
    assert patience.result_within(10, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        patience.result_within(10, lambda: 1 // 0)
    with pytest.raises(TimeoutError):
        patience.result_within(0.05, released.wait)


# --- a disk that stands still ------------------------------------------------------------------------


def test_a_disk_that_stands_still_does_not_keep_the_job_from_ending(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, released: threading.Event
) -> None:
    monkeypatch.setattr(session, "END_PATIENCE_S", 0.2)
    monkeypatch.setattr(shards, "write_shard", lambda *_: released.wait(30))
    recording = recorder.start(tmp_path / "run", flush_s=0.02)
    gpu.launch("k")
    time.sleep(0.1)  # the recorder's thread hangs in a write now
    started = time.monotonic()
    recording.stop()
    assert time.monotonic() - started < 5
    assert recording.is_stopped
    said = f"nanalyze: {tmp_path / 'run'}: did not take everything within 0.2 s: what was not written is lost\n"
    assert capsys.readouterr().err == said


def test_a_disk_that_stands_still_at_the_start_is_refused_in_time(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, released: threading.Event
) -> None:
    monkeypatch.setattr(session, "OPEN_PATIENCE_S", 0.1)
    monkeypatch.setattr(runfile, "create", lambda *_: released.wait(30))
    started = time.monotonic()
    with pytest.raises(RecorderError) as raised:
        recorder.start(tmp_path / "run")
    assert time.monotonic() - started < 5
    assert str(raised.value) == (f"{tmp_path / 'run'}: does not answer for 0.1 s. Choose another file system with -o.")
    assert gpu.cupti.enabled == set()


def test_the_command_refuses_a_disk_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, released: threading.Event
) -> None:
    monkeypatch.setattr(launch, "CLAIM_PATIENCE_S", 0.1)
    monkeypatch.setattr(launch, "_check_writable", lambda _: released.wait(30))
    with pytest.raises(RunError) as raised:
        launch.claim(tmp_path / "run", append=False, force=False)
    assert str(raised.value) == f"{tmp_path / 'run'}: does not answer for 0.1 s. Choose another file system with -o."


def test_a_process_ends_with_its_own_code_though_its_disk_stands_still(tmp_path: Path) -> None:
    program = f"""
        import sys, time
        sys.path.append({str(TESTS)!r})
        import pytest
        from fake_gpu import FakeGpu
        from nanalyze import recorder
        from nanalyze.recorder import session
        from nanalyze.rundir import shards
        FakeGpu().install(pytest.MonkeyPatch())
        session.END_PATIENCE_S = 0.3
        shards.write_shard = lambda *_: time.sleep(600)
        recorder.start({str(tmp_path / "run")!r}, flush_s=0.02)
        time.sleep(0.1)
        print("done", flush=True)
        sys.exit(6)
        """
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert time.monotonic() - started < 20
    assert (done.returncode, done.stdout) == (6, "done\n")
    assert done.stderr.endswith("did not take everything within 0.3 s: what was not written is lost\n")


# --- threads that cannot start -----------------------------------------------------------------------


def test_a_recorder_without_its_thread_leaves_nothing_on(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        no_threads(patch)
        with pytest.raises(RecorderError) as raised:
            recorder.start(tmp_path / "run")
    assert str(raised.value) == "the recorder's thread cannot start: can't start new thread. See ulimit -u."
    assert gpu.cupti.enabled == set()
    assert ranges._log is None
    assert "NVTX_INJECTION64_PATH" not in os.environ
    with recorder.record(tmp_path / "next"):
        call = gpu.launch("k")
    assert [row["correlation_id"] for row in read_table(tmp_path / "next", "kernels")] == [call]


def test_an_end_without_threads_writes_everything(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    recording = recorder.start(tmp_path / "run")
    calls = [gpu.launch("k") for _ in range(3)]
    no_threads(monkeypatch)
    recording.stop("exit")
    assert [row["correlation_id"] for row in read_table(tmp_path / "run", "kernels")] == calls
    assert final_process(tmp_path / "run")["ending"] == "exit"
    assert capsys.readouterr().err == ""


def test_a_profiler_gets_its_room_without_a_thread(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Called by the job, in the functions that PyTorch's profiler starts with: nothing may be raised there."""
    no_threads(monkeypatch)
    coexistence._settle()
    assert gpu.bindings.synchronized == 1


# --- Ctrl-C again ------------------------------------------------------------------------------------


def test_a_second_interrupt_while_everything_is_written_loses_nothing(tmp_path: Path) -> None:
    """As torchrun has it: the terminal sends one to all, and torchrun passes its own on."""
    run_dir = tmp_path / "run"
    program = f"""
        import os, sys, time
        sys.path.append({str(TESTS)!r})
        import pytest
        from fake_gpu import FakeGpu
        from nanalyze import recorder
        from nanalyze.rundir import shards
        gpu = FakeGpu()
        gpu.install(pytest.MonkeyPatch())
        recorder.start({str(run_dir)!r}, flush_s=60)
        gpu.launch("k")
        write = shards.write_shard
        def slow(*arguments):
            os.write(1, b"writing\\n")
            time.sleep(0.3)
            return write(*arguments)
        time.sleep(1.5)  # the first write comes after a second
        shards.write_shard = slow
        gpu.launch("k")
        print("ready", flush=True)
        time.sleep(60)
        """
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert error.splitlines()[-1] == "KeyboardInterrupt"
    assert error.count("KeyboardInterrupt") == 1
    assert len(read_table(run_dir, "kernels")) == 2
    assert final_process(run_dir)["ending"] == "exit"
