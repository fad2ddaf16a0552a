"""The timeline: buffers lent, filled, refused and used again, and no launch unaccounted for."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_records
import pytest
from fake_cupti import HOST_PINNED
from fake_gpu import FakeGpu, read_table
from fake_records import FIXTURES, KERNEL, Fixture, foreign

from nanalyze.recorder import buffers
from nanalyze.recorder import timeline as module
from nanalyze.recorder.buffers import BUFFER_BYTES
from nanalyze.recorder.cupti import Cupti, CuptiError, no_callback
from nanalyze.recorder.timeline import Timeline
from nanalyze.recorder.writer import Writer

SMALL = 216 * 10  # ten kernels of CUPTI 13.0


@pytest.fixture(params=["C", "Python"])
def callbacks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Everything must be the same with the callbacks in C and with their stand-in."""
    if request.param == "Python":
        monkeypatch.setattr(buffers, "native", None)
    elif buffers.native is None:
        pytest.skip("_callbacks.c is not compiled here")
    else:
        buffers.native.reclaim()  # what other tests' CUPTI never gave back
    return str(request.param)


@pytest.fixture
def gpu(callbacks: str) -> Iterator[FakeGpu]:
    gpu = FakeGpu()
    yield gpu
    gpu.close()


class Recording:
    """A timeline with its writer, drained and flushed by hand."""

    def __init__(self, gpu: FakeGpu, run_dir: Path, **settings: Any) -> None:
        self.gpu = gpu
        self.run_dir = run_dir
        self.said: list[str] = []
        self.wake = threading.Event()
        self.writer = Writer(run_dir, "host-0-1", self.said.append)
        self.timeline = Timeline(Cupti(gpu.cupti.library, "fake"), self.writer, self.wake, **settings)
        self.timeline.start()

    def stop(self) -> None:
        self.timeline.stop()
        self.writer.flush()

    def rows(self, table: str = "kernels") -> list[dict[str, Any]]:
        return read_table(self.run_dir, table)

    def correlations(self) -> list[int]:
        return [row["correlation_id"] for row in self.rows()]


@pytest.fixture
def recording(gpu: FakeGpu, tmp_path: Path) -> Recording:
    return Recording(gpu, tmp_path)


# --- start and stop ---------------------------------------------------------------------------


def test_start_asks_for_kernels_and_copies_and_stop_for_nothing(recording: Recording) -> None:
    fake = recording.gpu.cupti
    assert fake.enabled == {1, 10, 22}
    assert fake.driver_api == fake.subscriptions == set()
    assert not fake.latency_timestamps
    assert fake.attributes == {HOST_PINNED: 1}
    assert fake.flush_period_ms == 1000
    recording.stop()
    assert (fake.enabled, fake.driver_api, fake.flush_period_ms) == (set(), set(), 0)
    assert not fake.latency_timestamps


def test_copies_can_be_left_out(gpu: FakeGpu, tmp_path: Path) -> None:
    recording = Recording(gpu, tmp_path, copies=False)
    assert gpu.cupti.enabled == {10}
    gpu.memset(64)
    gpu.copy(4096)
    call = gpu.launch()
    recording.stop()
    assert recording.correlations() == [call]
    assert gpu.cupti.enabled == set()


def test_a_quiet_job_is_asked_for_what_it_has(gpu: FakeGpu, tmp_path: Path) -> None:
    """CUPTI hands over full buffers only: 2,300 launches, which some jobs take minutes for."""
    recording = Recording(gpu, tmp_path)
    timeline, calls = recording.timeline, gpu.cupti.calls
    timeline.flush_if_quiet()  # nothing was launched yet
    assert calls["cuptiActivityFlushAll"] == 0
    call = gpu.launch()
    gpu.cupti.settle()
    timeline.flush_if_quiet()
    timeline.drain()
    assert (calls["cuptiActivityFlushAll"], timeline.buffers) == (1, 1)
    timeline.flush_if_quiet()  # the buffer that was asked for does not make the job a busy one
    assert calls["cuptiActivityFlushAll"] == 2
    timeline.buffers += module.BUSY_BUFFERS  # as if so many had come by themselves
    timeline.flush_if_quiet()
    assert calls["cuptiActivityFlushAll"] == 2
    timeline.is_aside = True
    timeline.flush_if_quiet()
    assert calls["cuptiActivityFlushAll"] == 2
    timeline.is_aside = False
    recording.stop()
    assert recording.correlations() == [call]


@pytest.mark.parametrize("reason", ["nothing", "held by another", "aside", "NVTX"])
def test_cupti_is_shut_down_unless_somebody_needs_it(recording: Recording, callbacks: str, reason: str) -> None:
    fake, timeline = recording.gpu.cupti, recording.timeline
    timeline.follow_markers(lambda records: None)
    recording.gpu.launch()
    recording.stop()
    subscriber = ctypes.c_void_p()
    if reason == "held by another":
        timeline.cupti.cuptiSubscribe(ctypes.byref(subscriber), no_callback, None)
    timeline.is_aside = reason == "aside"
    with pytest.MonkeyPatch.context() as patch:
        if reason == "NVTX":
            patch.setenv("NVTX_INJECTION64_PATH", "/jobs/own.so")
        timeline.detach()
    assert fake.calls["cuptiFinalize"] == (reason == "nothing" and callbacks == "C")  # in Python: it cannot tell
    assert recording.correlations() == [correlation for correlation, _ in recording.gpu.launches]


def test_a_recording_after_cupti_was_shut_down_is_as_good(gpu: FakeGpu, tmp_path: Path) -> None:
    for number in range(3):
        recording = Recording(gpu, tmp_path / str(number))
        recording.timeline.need_launch_times()
        kept = gpu.cupti.request_and_keep()
        call = gpu.launch()
        recording.stop()
        recording.timeline.detach()
        assert recording.correlations() == [call]
        assert recording.rows()[0]["queued_ns"] is not None
        assert kept is not None
    assert gpu.cupti.calls["cuptiFinalize"] == 3


def test_a_recording_without_work_asks_for_no_buffer(recording: Recording, tmp_path: Path) -> None:
    recording.stop()
    assert not recording.timeline.started_any
    assert list(tmp_path.iterdir()) == []


def test_cupti_of_cuda_12_0_has_no_graph_times_but_records(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "native", None)
    gpu.cupti.remove("cuptiActivityEnableDriverApi")
    gpu.cupti.remove("cuptiActivityEnableRuntimeApi")
    recording = Recording(gpu, tmp_path)
    recording.timeline.need_launch_times()
    gpu.launch()
    gpu.launch_graph(0xA, ["a", "b"])
    recording.stop()
    assert len(recording.rows()) == 3
    assert [row["queued_ns"] is None for row in recording.rows()] == [False, True, True]
    assert gpu.cupti.enabled == set()


# --- what is recorded -------------------------------------------------------------------------


def test_launches_copies_and_sets_become_rows(gpu: FakeGpu, tmp_path: Path) -> None:
    recording = Recording(gpu, tmp_path, memsets=True)
    calls = [
        gpu.launch("_Z1fv", (3, 1, 1), duration_ns=1234),
        gpu.copy(4096),
        gpu.memset(512),
        gpu.launch("_Z1fv", (3, 1, 1)),
    ]
    recording.stop()
    assert recording.correlations() == [calls[0], calls[3]]
    assert recording.rows()[0]["duration_ns"] == 1234
    assert [(row["correlation_id"], row["kind"], row["bytes"]) for row in recording.rows("copies")] == [
        (calls[1], "HtoD", 4096),
        (calls[2], "memset", 512),
    ]
    (kernel_class,) = recording.rows("kernel_classes")
    assert (kernel_class["name"], kernel_class["grid_x"]) == ("f()", 3)
    assert {row["kernel_class_id"] for row in recording.rows()} == {kernel_class["kernel_class_id"]}
    assert recording.timeline.devices_seen == {0}


def test_no_call_is_recorded_nor_reported_while_there_are_no_ranges(recording: Recording) -> None:
    """A record a call would cost 5 us a launch, latency timestamps a part of the GPU's time."""
    gpu = recording.gpu
    for _ in range(10):
        gpu.launch()
    gpu.launch_graph(0xA, ["a"])
    recording.stop()
    assert gpu.cupti.bytes_written == 11 * fake_records.SIZES[gpu.cupti.version][KERNEL]
    assert not {"cuptiSubscribe", "cuptiActivityEnableLatencyTimestamps"} & set(gpu.cupti.calls)
    assert {row["queued_ns"] for row in recording.rows()} == {None}


def test_the_graph_launch_may_come_in_a_later_buffer_than_its_nodes(recording: Recording) -> None:
    gpu, version = recording.gpu, recording.gpu.cupti.version
    node = {"graphId": 9, "graphNodeId": 1, "correlationId": 5, "start": 100, "end": 200, "queued": 1}
    nodes = fake_records.record(KERNEL, version, name=gpu.names.pointer(b"a"), **node)
    call = fake_records.record(fake_records.DRIVER, version, cbid=514, start=90, end=95, correlationId=5)
    assert gpu.cupti.complete_buffer(nodes)
    assert gpu.cupti.complete_buffer(call)
    recording.stop()
    assert [row["queued_ns"] for row in recording.rows()] == [90]


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: str(fixture.version))
def test_captured_buffers_go_through_the_real_callbacks(fixture: Fixture, tmp_path: Path) -> None:
    gpu = FakeGpu()
    gpu.cupti.version = fixture.version
    gpu.cupti.sizes = fake_records.sizes(fixture.version)
    recording = Recording(gpu, tmp_path)
    for buffer in fixture.relocated(gpu.names):
        assert gpu.cupti.complete_buffer(buffer)
    recording.stop()
    gpu.close()
    rows = recording.rows()
    names = {row["kernel_class_id"]: row["name"] for row in recording.rows("kernel_classes")}
    assert len(rows) == 67
    single = sorted((row for row in rows if row["graph_id"] is None), key=lambda row: row["correlation_id"])
    symbols = {"scaled": "void scaled<3, double>(double*, int)"}
    expected = [symbols.get(item["name"], item["name"]) for item in fixture.launched if item["op"] == "kernel"]
    assert [names[row["kernel_class_id"]] for row in single] == expected
    copies = sorted(recording.rows("copies"), key=lambda row: row["correlation_id"])
    expected = [item["op"] for item in fixture.launched if item["op"] not in ("kernel", "graph")]
    assert [row["kind"] for row in copies] == expected
    assert sum(row["bytes"] for row in copies) == 6 * (4096 + 8192 + 2048 + 1024)
    assert (recording.timeline.odd, recording.timeline.lost_bytes, recording.timeline.dropped) == (0, 0, 0)


def test_watched_launches_tell_their_class_and_graph(recording: Recording) -> None:
    gpu, timeline = recording.gpu, recording.timeline
    first, second = gpu.launch("a"), gpu.launch("b")
    graph = gpu.launch_graph(0xA, ["c", "d"], graph_id=12)
    timeline.watching |= {second, graph, 999_999}
    recording.stop()
    assert set(timeline.watched) == {second, graph}
    classes = {row["kernel_class_id"]: row["name"] for row in recording.rows("kernel_classes")}
    assert classes[timeline.watched[second].kernel_class_id] == "b"
    assert timeline.watched[second].graph_id is None
    assert timeline.watched[graph].graph_id == 12
    assert first not in timeline.watched


# --- buffers ----------------------------------------------------------------------------------


def test_buffers_are_used_again(recording: Recording) -> None:
    gpu, timeline = recording.gpu, recording.timeline
    gpu.cupti.buffer_limit = SMALL
    for _ in range(6):
        for _ in range(10):
            gpu.launch()
        gpu.cupti.settle()
        timeline.flush()
        timeline.drain()
    recording.stop()
    assert recording.correlations() == [correlation for correlation, _ in gpu.launches]
    assert len(recording.correlations()) == 60
    given = gpu.cupti.buffers_given
    assert len(given) >= 6
    assert len(set(given)) <= 2  # there were never more than two at a time


def test_an_empty_buffer_comes_back_without_a_word(recording: Recording) -> None:
    assert recording.gpu.cupti.complete_buffer(b"")
    assert not recording.wake.is_set()
    recording.gpu.launch()
    recording.stop()
    assert len(recording.rows()) == 1
    assert len(set(recording.gpu.cupti.buffers_given)) == 1


def test_a_full_buffer_wakes_the_recorder_unless_that_would_take_the_gil(recording: Recording, callbacks: str) -> None:
    recording.gpu.launch()
    recording.timeline.flush()
    assert recording.wake.is_set() == (callbacks == "Python")
    recording.stop()


def test_what_completes_after_the_end_does_not_reach_the_next_recording(gpu: FakeGpu, tmp_path: Path) -> None:
    first = Recording(gpu, tmp_path / "first")
    version, name = gpu.cupti.version, gpu.names.pointer(b"late")
    gpu.launch()
    first.stop()
    assert gpu.cupti.complete_buffer(fake_records.record(KERNEL, version, name=name, correlationId=9))
    second = Recording(gpu, tmp_path / "second")
    call = gpu.launch()
    second.stop()
    assert second.correlations() == [call]
    assert len(first.correlations()) == 1


def test_a_foreign_buffer_is_ignored(recording: Recording) -> None:
    recording.gpu.cupti._complete(None, 0, 0xBAD, BUFFER_BYTES, 216)
    recording.stop()
    assert recording.rows() == []


def test_cupti_gets_no_buffer_while_too_much_waits(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is decoded meanwhile: beyond the limit records are dropped, counted and said."""
    monkeypatch.setattr(buffers, "FULL_BYTES", 2 * SMALL)
    recording = Recording(gpu, tmp_path)
    timeline = recording.timeline
    gpu.cupti.buffer_limit = SMALL
    for _ in range(55):
        gpu.launch()
    gpu.cupti.settle()
    recording.stop()
    assert timeline.refused_buffers > 0
    assert recording.correlations() == [correlation for correlation, _ in gpu.launches][: len(recording.rows())]
    assert len(recording.rows()) == 20
    assert timeline.dropped == 35  # launched = written + lost
    losses = [row for row in recording.rows("events") if row["kind"] == "loss"]
    assert [row["message"] for row in losses] == ["CUPTI has begun to drop records: the recorder cannot keep up"]


def test_it_recovers_once_the_recorder_has_caught_up(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "FULL_BYTES", SMALL)
    recording = Recording(gpu, tmp_path)
    timeline = recording.timeline
    gpu.cupti.buffer_limit = SMALL
    written = []
    for _ in range(3):
        for _ in range(25):
            gpu.launch()
        gpu.cupti.settle()
        timeline.flush()
        timeline.drain()
        recording.writer.flush()
        written.append(len(recording.rows()) + timeline.dropped)
    assert written == [25, 50, 75]
    assert 0 < timeline.dropped < 75
    assert len([row for row in recording.rows("events") if row["kind"] == "loss"]) == 1
    recording.stop()


def test_buffers_lent_are_bounded(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "LENT_BUFFERS", 5)
    recording = Recording(gpu, tmp_path)
    fake = recording.gpu.cupti
    given = [fake.request_and_keep() for _ in range(8)]
    assert [address is not None for address in given] == [True] * 5 + [False] * 3
    assert len(set(given[:5])) == 5
    assert recording.timeline.refused_buffers == 3
    recording.stop()


def test_memory_that_runs_out_is_a_refused_buffer(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "native", None)
    recording = Recording(gpu, tmp_path)

    def no_memory(*args: Any, **kwargs: Any) -> None:
        raise MemoryError

    empty = buffers.np.empty
    monkeypatch.setattr(buffers.np, "empty", no_memory)
    assert recording.gpu.cupti.request_and_keep() is None
    assert recording.timeline.refused_buffers == 1
    monkeypatch.setattr(buffers.np, "empty", empty)
    recording.stop()


def test_buffers_that_another_client_may_have_got_do_not_count(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each take-over may cost some; were they counted, CUPTI would one day get none."""
    monkeypatch.setattr(buffers, "LENT_BUFFERS", 3)
    recording = Recording(gpu, tmp_path)
    kept = [gpu.cupti.request_and_keep() for _ in range(3)]
    assert None not in kept
    assert gpu.cupti.request_and_keep() is None
    recording.timeline.register()
    call = gpu.launch()
    version, name = gpu.cupti.version, gpu.names.pointer(b"late")
    late = fake_records.record(KERNEL, version, name=name, correlationId=9)
    ctypes.memmove(kept[0], late, len(late))
    gpu.cupti.settle()
    gpu.cupti._complete(None, 0, kept[0], BUFFER_BYTES, len(late))  # it comes after all
    recording.stop()
    assert sorted(recording.correlations()) == sorted([9, call])


def test_buffers_become_rows_together(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, timeline = recording.gpu, recording.timeline
    gpu.cupti.buffer_limit = SMALL
    sizes: list[int] = []
    monkeypatch.setattr(timeline, "_take_kernels", lambda records: sizes.append(len(records)))
    for _ in range(70):
        for _ in range(9):
            gpu.launch()
        gpu.memset(4)
    gpu.cupti.settle()
    timeline.flush()
    timeline.drain()
    assert sum(sizes) == 630
    assert len(sizes) <= 20  # of more than 63 buffers
    recording.stop()


def test_bytes_that_cannot_be_decoded_are_counted(recording: Recording) -> None:
    gpu = recording.gpu
    kernel = fake_records.record(KERNEL, gpu.cupti.version, name=gpu.names.pointer(b"k"), correlationId=4)
    assert gpu.cupti.complete_buffer(kernel + foreign(99, 48))
    assert gpu.cupti.complete_buffer(kernel)
    recording.stop()
    assert recording.correlations() == [4, 4]
    assert recording.timeline.lost_bytes == 48


def test_records_arrive_from_several_threads_launching(recording: Recording) -> None:
    gpu = recording.gpu
    gpu.cupti.buffer_limit = SMALL
    threads = [
        threading.Thread(target=lambda: [gpu.launch(f"k{number % 3}") for number in range(40)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        recording.timeline.drain()
    recording.stop()
    assert sorted(recording.correlations()) == sorted(correlation for correlation, _ in gpu.launches)
    assert len(recording.correlations()) == 160
    assert len(recording.rows("kernel_classes")) == 3


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function", ["cuptiActivityRegisterCallbacks", "cuptiActivityEnable", "cuptiActivityFlushPeriod"]
)
def test_a_refusal_at_the_start_is_raised(gpu: FakeGpu, tmp_path: Path, function: str) -> None:
    gpu.cupti.fail(function, 999)
    with pytest.raises(CuptiError) as caught:
        Recording(gpu, tmp_path)
    assert (caught.value.function, caught.value.code) == (function, 999)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_start_that_fails_half_way_leaves_nothing_on(gpu: FakeGpu, tmp_path: Path, at: int) -> None:
    gpu.cupti.fail("cuptiActivityEnable", 27, at=at, times=1)
    with pytest.raises(CuptiError):
        Recording(gpu, tmp_path)
    assert gpu.cupti.enabled == set()


@pytest.mark.parametrize(
    "function",
    [
        "cuptiActivityFlushAll",
        "cuptiActivityFlushPeriod",
        "cuptiActivityDisable",
        "cuptiActivityGetNumDroppedRecords",
        "cuptiActivityEnableDriverApi",
        "cuptiActivityEnableLatencyTimestamps",
        "cuptiUnsubscribe",
    ],
)
def test_errors_at_the_end_lose_nothing_that_was_handed_over(recording: Recording, function: str) -> None:
    recording.timeline.need_launch_times()
    call = recording.gpu.launch()
    recording.timeline.flush()
    recording.gpu.cupti.fail(function, 999)
    recording.stop()
    assert recording.correlations() == [call]
