"""When launches were called: from the callback in C, from latency timestamps, and not at all unless somebody asks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_records
import numpy as np
import pytest
from fake_gpu import FakeGpu, read_table
from fake_records import KERNEL

from nanalyze.recorder import buffers
from nanalyze.recorder import launch_times as module
from nanalyze.recorder.cupti import CBID_GRAPH_LAUNCHES, CBID_KERNEL_LAUNCHES, Cupti
from nanalyze.recorder.launch_times import LaunchTimes
from nanalyze.recorder.timeline import Timeline
from nanalyze.recorder.writer import Writer

in_c = pytest.mark.skipif(buffers.native is None, reason="_callbacks.c is not compiled here")


class Recording:
    def __init__(self, gpu: FakeGpu, run_dir: Path, **settings: Any) -> None:
        self.run_dir = run_dir
        self.writer = Writer(run_dir, "host-0-1", lambda message: None)
        self.timeline = Timeline(Cupti(gpu.cupti.library, "fake"), self.writer, threading.Event(), **settings)
        self.timeline.start()

    def stop(self) -> list[dict[str, Any]]:
        """The rows of `kernels`."""
        self.timeline.stop()
        self.writer.flush()
        return read_table(self.run_dir, "kernels")


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    if buffers.native is not None:
        buffers.native.reclaim()
    gpu = FakeGpu()
    yield gpu
    gpu.close()


@pytest.fixture
def without_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "native", None)


# --- the store ----------------------------------------------------------------------------------


def ids(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


def test_times_are_found_by_correlation_id() -> None:
    times = LaunchTimes()
    times.add(ids(1, 3, 2), ids(10, 30, 20))  # threads overtook each other
    times.add(ids(4, 5), ids(40, 50))
    times.note(9, 90)
    assert times.of(ids(5, 1, 3, 3, 7, 2, 9, 9)).tolist() == [50, 10, 30, 30, 0, 20, 90, 90]
    assert times.of(ids()).tolist() == []


def test_an_id_that_came_round_again_is_the_newer_call() -> None:
    times = LaunchTimes()
    times.add(ids(5, 6), ids(50, 60))
    times.add(ids(2**32 - 1, 0, 5), ids(70, 80, 90))
    assert times.of(ids(5, 6, 2**32 - 1, 0)).tolist() == [90, 60, 70, 80]


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NOTED_KEPT", 2)
    monkeypatch.setattr(module, "CALLS_KEPT", 4)
    monkeypatch.setattr(module, "CALLS_TOGETHER", 2)
    times = LaunchTimes()
    for start in (1, 3, 5):
        times.add(ids(start, start + 1), ids(start * 10, start * 10 + 10))
    for call in (101, 102, 103):
        times.note(call, call)
    assert times.of(ids(1, 2, 3, 4, 5, 6, 101, 102, 103)).tolist() == [0, 0, 30, 40, 50, 60, 0, 102, 103]


def test_calls_of_a_slow_job_are_looked_through_together() -> None:
    """Whatever the length of the run: 25 at a time, one by one, were 80,000 arrays to look at after six hours."""
    times = LaunchTimes()
    for start in range(0, 100_000, 25):
        times.add(np.arange(start, start + 25), 10 * np.arange(start, start + 25))
    assert len(times._calls) <= 100_000 / (module.CALLS_TOGETHER - 25) + 1
    assert times.of(ids(0, 24, 25, 50_001, 99_999, 100_000)).tolist() == [0, 240, 250, 500_010, 999_990, 0]


# --- the callback in C --------------------------------------------------------------------------


@in_c
def test_launches_are_timed_from_the_first_range_on(gpu: FakeGpu, tmp_path: Path) -> None:
    recording = Recording(gpu, tmp_path)
    gpu.launch()
    recording.timeline.need_launch_times()
    assert gpu.cupti.subscriptions == {*CBID_KERNEL_LAUNCHES, *CBID_GRAPH_LAUNCHES}
    bounds = [time.time_ns()]
    for call in ("cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel"):
        gpu.launch(call=call)
        bounds.append(time.time_ns())
    rows = recording.stop()
    assert rows[0]["queued_ns"] is None
    queued = [row["queued_ns"] for row in rows[1:]]
    assert all(low <= at <= high for low, at, high in zip(bounds, queued, bounds[1:], strict=False))
    assert gpu.cupti.subscriptions == set()
    assert not gpu.cupti.latency_timestamps


@in_c
def test_nodes_of_a_graph_are_queued_when_the_graph_was_launched(gpu: FakeGpu, tmp_path: Path) -> None:
    recording = Recording(gpu, tmp_path)
    recording.timeline.need_launch_times()
    before = time.time_ns()
    gpu.launch_graph(0xA, ["a", "b", "c"])
    after = time.time_ns()
    rows = recording.stop()
    assert len({row["graph_node_id"] for row in rows}) == 3
    (queued,) = {row["queued_ns"] for row in rows}
    assert before <= queued <= after
    assert gpu.cupti.bytes_written == 3 * fake_records.SIZES[gpu.cupti.version][KERNEL]


@in_c
def test_an_earlier_recordings_calls_are_not_this_ones(gpu: FakeGpu, tmp_path: Path) -> None:
    first = Recording(gpu, tmp_path / "first")
    first.timeline.need_launch_times()
    late = gpu.launch()
    first.timeline._disable()  # and its last calls are never fetched
    second = Recording(gpu, tmp_path / "second")
    second.timeline.need_launch_times()
    second.timeline.drain()
    assert second.timeline.clock.times.of(ids(late)).tolist() == [0]
    second.stop()


@in_c
def test_threads_lose_no_call(gpu: FakeGpu, tmp_path: Path) -> None:
    recording = Recording(gpu, tmp_path)
    recording.timeline.need_launch_times()
    threads = [threading.Thread(target=lambda: [gpu.launch() for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        recording.timeline.drain()
    rows = recording.stop()
    assert len(rows) == 800
    assert all(row["queued_ns"] for row in rows)
    assert recording.timeline.clock.lost == 0


@in_c
def test_calls_that_were_overwritten_are_counted(gpu: FakeGpu, tmp_path: Path) -> None:
    """The ring holds 262,144 calls: the callback is called directly, more often than that."""
    recording = Recording(gpu, tmp_path)
    recording.timeline.need_launch_times()
    clock = recording.timeline.clock
    data = module.cu.CallbackData(site=0, correlation_id=7)
    address = module.ctypes.addressof(data)
    for _ in range(262_144 + 10):
        clock._callback(None, 1, 307, address)
    clock.drain()
    assert clock.lost == 10
    assert clock.times.of(ids(7))[0] > 0
    recording.stop()


@in_c
def test_a_pause_lets_go_of_the_subscription(gpu: FakeGpu, tmp_path: Path) -> None:
    recording = Recording(gpu, tmp_path)
    recording.timeline.need_launch_times()
    recording.timeline.pause()
    assert gpu.cupti.subscriptions == set()
    recording.timeline.resume()
    assert gpu.cupti.subscriptions
    recording.stop()


# --- latency timestamps -------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["not compiled", "subscription taken"])
def test_latency_timestamps_stand_in(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    if reason == "not compiled":
        monkeypatch.setattr(buffers, "native", None)
    else:
        gpu.cupti.fail("cuptiSubscribe", 39)
    recording = Recording(gpu, tmp_path)
    recording.timeline.need_launch_times()
    gpu.launch()
    (row,) = recording.stop()
    assert abs(row["queued_ns"] - time.time_ns()) < 60_000_000_000
    assert gpu.cupti.latency_timestamps  # CUPTI asks not to change those in mid-process
    assert gpu.cupti.calls["cuptiActivityEnableLatencyTimestamps"] == 1


@pytest.mark.usefixtures("without_c")
@pytest.mark.parametrize("function", [None, "cuptiActivityEnableDriverApi", "cuptiActivityEnableRuntimeApi"])
def test_graph_launches_are_recorded_once_a_graph_was_seen(gpu: FakeGpu, tmp_path: Path, function: str | None) -> None:
    """One of the two kinds of records is enough."""
    if function:
        gpu.cupti.fail(function, 27)
    recording = Recording(gpu, tmp_path)
    recording.timeline.need_launch_times()
    gpu.launch_graph(0xA, ["a"])
    recording.timeline.flush()
    recording.timeline.drain()
    gpu.launch()
    gpu.launch_graph(0xA, ["a"])
    rows = recording.stop()
    assert [row["queued_ns"] is None for row in rows] == [True, False, False]
    kernels = 3 * fake_records.SIZES[gpu.cupti.version][KERNEL]
    calls = (1 if function else 2) * fake_records.SIZES[gpu.cupti.version][fake_records.DRIVER]
    assert gpu.cupti.bytes_written == kernels + calls  # no other call
    assert (gpu.cupti.enabled, gpu.cupti.driver_api) == (set(), set())


@pytest.mark.usefixtures("without_c")
def test_runtime_calls_stay_off_when_they_cannot_be_chosen(gpu: FakeGpu, tmp_path: Path) -> None:
    gpu.cupti.fail("cuptiActivityEnableRuntimeApi", 11)
    recording = Recording(gpu, tmp_path)
    recording.timeline.need_launch_times()
    recording.timeline.clock.meet_graphs()
    assert fake_records.RUNTIME not in gpu.cupti.enabled


def test_nothing_is_asked_for_when_launch_times_are_not_wanted(gpu: FakeGpu, tmp_path: Path) -> None:
    recording = Recording(gpu, tmp_path, launch_times=False)
    recording.timeline.need_launch_times()
    gpu.launch()
    gpu.launch_graph(0xA, ["a"])
    assert {row["queued_ns"] for row in recording.stop()} == {None}
    assert not {"cuptiSubscribe", "cuptiActivityEnableLatencyTimestamps"} & set(gpu.cupti.calls)


@pytest.mark.usefixtures("without_c")
def test_a_refusal_is_said(gpu: FakeGpu, tmp_path: Path) -> None:
    gpu.cupti.fail("cuptiActivityEnableLatencyTimestamps", 27)
    recording = Recording(gpu, tmp_path)
    recording.timeline.need_launch_times()
    (line,) = recording.timeline.trouble
    assert line.startswith("launch times are missing, so no range gets its kernels: cuptiActivityEnableLatency")
    recording.stop()


# --- NVTX ---------------------------------------------------------------------------------------

NVTX_JOB = """
import ctypes, sys, threading
from pathlib import Path
from fake_gpu import FakeGpu, read_table
from nanalyze.recorder import _callbacks
from nanalyze.recorder.cupti import Cupti
from nanalyze.recorder.timeline import Timeline
from nanalyze.recorder.writer import Writer

gpu = FakeGpu()
writer = Writer(Path(sys.argv[1]), "host-0-1", print)
timeline = Timeline(Cupti(gpu.cupti.library, "fake"), writer, threading.Event())
timeline.start()
timeline.follow_markers(lambda records: None)
gpu.launch("before")
print(sorted(gpu.cupti.subscriptions))
assert ctypes.CDLL(_callbacks.__file__).InitializeInjectionNvtx2(None) == 0
gpu.launch("in the first range")
print(len(gpu.cupti.subscriptions))
timeline.pause()
print(len(gpu.cupti.subscriptions))
timeline.resume()
gpu.launch("after a pause")
timeline.stop()
writer.flush()
gpu.close()
print([row["queued_ns"] is not None for row in read_table(Path(sys.argv[1]), "kernels")], gpu.cupti.subscriptions)
"""


@in_c
def test_the_first_nvtx_call_begins_it_before_its_kernels(tmp_path: Path) -> None:
    """In a process of its own, since NVTX begins once in a process."""
    command = [sys.executable, "-c", NVTX_JOB, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "8", "0", "[False, True, True] set()"]
