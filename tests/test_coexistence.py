"""Other CUPTI clients in the process: their data is theirs, the timeline comes back, the gap is told."""

from __future__ import annotations

import ctypes
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_records
import pytest
from fake_cupti import ERROR_CODES
from fake_gpu import FakeGpu, final_process, read_table

from nanalyze import recorder
from nanalyze.recorder import coexistence, cupti
from nanalyze.recorder.timeline import Timeline
from nanalyze.recorder.writer import Writer

KERNEL, MEMCPY = fake_records.KERNEL, fake_records.MEMCPY
TORCH = "torch.autograd.profiler"


class Client:
    """Another CUPTI client: its own buffers, the kinds it wants, the kernels it got."""

    def __init__(self, gpu: FakeGpu, *, subscribes: bool = False) -> None:
        self.library = gpu.cupti.library
        self.gpu = gpu
        self.subscribes = subscribes
        self.received = b""
        self.strange_buffers = 0  # completed, but never given out: another client's
        self._subscriber = ctypes.c_void_p()
        self._memory: dict[int, Any] = {}
        self._callbacks = (cupti.BufferRequested(self._request), cupti.BufferCompleted(self._complete))
        self._ticks = cupti.TimestampCallback(lambda: time.monotonic_ns() * 2)  # as processor ticks: no time of day

    def _request(self, buffer: Any, size: Any, most: Any) -> None:
        memory = (ctypes.c_uint64 * 8192)()
        self._memory[ctypes.addressof(memory)] = memory
        buffer[0], size[0], most[0] = ctypes.addressof(memory), ctypes.sizeof(memory), 0

    def _complete(self, context: Any, stream: int, buffer: int, size: int, valid: int) -> None:
        memory = self._memory.pop(buffer, None)
        if memory is None:
            self.strange_buffers += 1
        else:
            self.received += bytes(memory)[:valid]

    def take_callbacks(self) -> None:
        assert self.library.cuptiActivityRegisterCallbacks(*self._callbacks) == 0
        assert self.library.cuptiActivityRegisterTimestampCallback(self._ticks) == 0

    def start(self) -> None:
        if self.subscribes:
            assert self.library.cuptiSubscribe(ctypes.byref(self._subscriber), cupti.no_callback, None) == 0
        self.take_callbacks()
        for kind in (KERNEL, MEMCPY):
            assert self.library.cuptiActivityEnable(kind) == 0

    def stop(self) -> None:
        assert self.library.cuptiActivityFlushAll(1) == 0
        for kind in (KERNEL, MEMCPY):
            assert self.library.cuptiActivityDisable(kind) == 0

    def leave(self) -> None:
        assert self.library.cuptiUnsubscribe(self._subscriber) == 0

    @property
    def kernels(self) -> list[int]:
        """Correlation ids; a record of another kind would be an IndexError here."""
        size = self.gpu.cupti.sizes[KERNEL]
        records = [self.received[at : at + size] for at in range(0, len(self.received), size)]
        assert {record[0] for record in records} <= {KERNEL}
        return [int.from_bytes(record[92:96], "little") for record in records]


@pytest.fixture
def torch(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for PyTorch's profiler: the functions that reach CUPTI, and what they do there."""
    module: Any = ModuleType(TORCH)
    module.client = Client(gpu)
    module.fails = False

    def _prepare_profiler(config: object, activities: set[str]) -> str:
        if module.fails:
            raise RuntimeError("not now")
        module.profiles_gpu = "ProfilerActivity.CUDA" in activities
        (module.client.start if module.profiles_gpu else module.client.take_callbacks)()
        return "prepared"

    def _enable_profiler(config: object, activities: set[str]) -> None:
        pass

    def _disable_profiler() -> str:
        if module.profiles_gpu:
            module.client.stop()
        return "result"

    for function in (_prepare_profiler, _enable_profiler, _disable_profiler):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, TORCH, module)
    return module


GPU, CPU = {"ProfilerActivity.CPU", "ProfilerActivity.CUDA"}, {"ProfilerActivity.CPU"}


def _state(gpu: FakeGpu) -> tuple[Any, ...]:
    fake = gpu.cupti
    return set(fake.enabled), set(fake.driver_api), fake.flush_period_ms, dict(fake.attributes)


def messages(run_dir: Path, kind: str) -> list[str]:
    return [row["message"] for row in read_table(run_dir, "events") if row["kind"] == kind]


def written(run_dir: Path) -> list[int]:
    return [row["correlation_id"] for row in read_table(run_dir, "kernels")]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- PyTorch's profiler ----------------------------------------------------------------------------


def test_pytorchs_profiler_gets_its_records_and_nobody_elses(
    gpu: FakeGpu, torch: Any, tmp_path: Path, capsys: Any
) -> None:
    with recorder.record(tmp_path / "run"):
        before = [gpu.launch("k") for _ in range(3)]
        start_ns = time.time_ns()
        assert torch._prepare_profiler("config", GPU) == "prepared"
        assert gpu.cupti.enabled == {KERNEL, MEMCPY}  # what it asked for, and no kind of ours
        torch._enable_profiler("config", GPU)
        during = [gpu.launch("k") for _ in range(4)]
        assert torch._disable_profiler() == "result"
        end_ns = time.time_ns()
        after = [gpu.launch("k") for _ in range(5)]
    assert (torch.client.kernels, torch.client.strange_buffers) == (during, 0)
    assert written(tmp_path / "run") == before + after
    (loss,) = messages(tmp_path / "run", "loss")
    found = re.search(r"stood aside for torch\.profiler for (\S+) s \((\d+) to (\d+) ns\)", loss)
    assert found is not None
    assert start_ns <= int(found[2]) < int(found[3]) <= end_ns
    assert float(found[1]) == pytest.approx((int(found[3]) - int(found[2])) / 1e9, abs=1e-3)
    assert capsys.readouterr().err.count("torch.profiler takes over CUPTI") == 1
    assert gpu.cupti.enabled == set()


def test_everything_of_the_timeline_is_on_again_afterwards(gpu: FakeGpu, torch: Any, tmp_path: Path) -> None:
    with recorder.record(tmp_path / "run"):
        before = _state(gpu)
        assert KERNEL in before[0]
        torch._prepare_profiler("config", GPU)
        assert _state(gpu) != before
        torch._disable_profiler()
        assert _state(gpu) == before


def test_a_profile_of_the_cpu_alone_takes_nothing(gpu: FakeGpu, torch: Any, tmp_path: Path) -> None:
    with recorder.record(tmp_path / "run"):
        torch._prepare_profiler("config", CPU)
        torch._enable_profiler("config", CPU)
        launched = [gpu.launch("k")]
        torch._disable_profiler()
        launched.append(gpu.launch("k"))
    assert written(tmp_path / "run") == launched
    assert messages(tmp_path / "run", "loss") == []
    assert torch.client.received == b""


@pytest.mark.parametrize("activities", [GPU, CPU])
def test_its_clock_does_not_stay(gpu: FakeGpu, torch: Any, tmp_path: Path, activities: set[str]) -> None:
    """PyTorch has CUPTI report processor ticks, and leaves it so."""
    with recorder.record(tmp_path / "run"):
        torch._prepare_profiler("config", activities)
        assert activities == CPU or gpu.cupti.clock() == pytest.approx(time.monotonic_ns() * 2, rel=1e-3)
        torch._disable_profiler()
        before = time.time_ns()
        gpu.launch("k")
    (row,) = read_table(tmp_path / "run", "kernels")
    assert before <= row["start_ns"] <= time.time_ns()


def test_a_profiler_with_a_schedule_comes_again_and_again(
    gpu: FakeGpu, torch: Any, tmp_path: Path, capsys: Any
) -> None:
    ours, theirs = [], []
    with recorder.record(tmp_path / "run"):
        for _ in range(4):
            ours.append(gpu.launch("k"))
            torch._prepare_profiler("config", GPU)
            torch._enable_profiler("config", GPU)
            theirs.append(gpu.launch("k"))
            torch._disable_profiler()
    assert written(tmp_path / "run") == ours
    assert torch.client.kernels == theirs
    assert len(messages(tmp_path / "run", "loss")) == 4
    assert capsys.readouterr().err.count("takes over") == 1


def test_a_profiler_that_cannot_start_leaves_the_timeline_on(gpu: FakeGpu, torch: Any, tmp_path: Path) -> None:
    torch.fails = True
    with recorder.record(tmp_path / "run"):
        with pytest.raises(RuntimeError, match="not now"):
            torch._prepare_profiler("config", GPU)
        launched = gpu.launch("k")
    assert written(tmp_path / "run") == [launched]


def test_a_recording_that_ends_under_the_profiler_leaves_it_alone(gpu: FakeGpu, torch: Any, tmp_path: Path) -> None:
    with recorder.record(tmp_path / "run"):
        before = gpu.launch("k")
        torch._prepare_profiler("config", GPU)
        during = gpu.launch("k")
    assert gpu.cupti.enabled == {KERNEL, MEMCPY}
    during = [during, gpu.launch("k")]
    torch._disable_profiler()
    assert torch.client.kernels == during
    assert written(tmp_path / "run") == [before]
    (loss,) = messages(tmp_path / "run", "loss")
    assert "and the recording ended meanwhile" in loss


def test_pytorch_is_as_it_was_after_the_recording(gpu: FakeGpu, torch: Any, tmp_path: Path) -> None:
    names = ("_prepare_profiler", "_enable_profiler", "_disable_profiler")
    before = [getattr(torch, name) for name in names]
    with recorder.record(tmp_path / "run"):
        inside = [getattr(torch, name) for name in names]
        assert not set(before) & set(inside)
        assert [function.__name__ for function in inside] == list(names)
    assert [getattr(torch, name) for name in names] == before


def test_pytorch_may_be_imported_later(
    gpu: FakeGpu, torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanalyze.recorder.session.TICK_S", 0.02)
    monkeypatch.delitem(sys.modules, TORCH)
    original = torch._prepare_profiler
    with recorder.record(tmp_path / "run"):
        sys.modules[TORCH] = torch
        wait_for(lambda: torch._prepare_profiler is not original)


def test_cupti_that_pytorch_shuts_down_is_started_again(
    gpu: FakeGpu, torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TEARDOWN_CUPTI=1 it calls cuptiFinalize at the first CUDA call after its end."""
    monkeypatch.setattr("nanalyze.recorder.session.TICK_S", 0.05)
    monkeypatch.setenv("TEARDOWN_CUPTI", "1")
    with recorder.record(tmp_path / "run"):
        torch._prepare_profiler("config", GPU)
        torch._disable_profiler()
        assert gpu.cupti.library.cuptiFinalize() == 0
        wait_for(lambda: KERNEL in gpu.cupti.enabled)
        launched = gpu.launch("k")
    assert written(tmp_path / "run") == [launched]


def test_exact_counters_make_room_and_say_when_they_cannot_come_back(gpu: FakeGpu, torch: Any, tmp_path: Path) -> None:
    """PyTorch's profiler subscribes once and keeps that for good."""
    torch.client.subscribes = True
    with recorder.record(tmp_path / "run", exact=recorder.Exact(budget_pct=100)):
        gpu.launch("k")
        torch._prepare_profiler("config", GPU)  # it would have asserted that its subscription succeeds
        gpu.launch("k")
        torch._disable_profiler()
        gpu.launch("k")
    text = "exact counters stopped: torch.profiler keeps CUPTI's subscription"
    assert text in messages(tmp_path / "run", "failure")
    assert len({row["correlation_id"] for row in read_table(tmp_path / "run", "exact")}) == 1
    assert len(written(tmp_path / "run")) == 2


def test_launch_times_make_room_and_are_had_another_way_afterwards(gpu: FakeGpu, torch: Any, tmp_path: Path) -> None:
    """They take CUPTI's subscription where there are ranges; PyTorch's profiler then keeps it."""
    torch.client.subscribes = True
    with recorder.record(tmp_path / "run"):
        with recorder.annotate("step"):
            before = gpu.launch("k")
        torch._prepare_profiler("config", GPU)  # it would have asserted that its subscription succeeds
        torch._disable_profiler()
        with recorder.annotate("step"):
            after = gpu.launch("k")
    times = {row["correlation_id"]: row["queued_ns"] for row in read_table(tmp_path / "run", "kernels")}
    first, second = read_table(tmp_path / "run", "ranges")
    assert first["start_ns"] <= times[before] <= first["end_ns"]
    assert second["start_ns"] <= times[after] <= second["end_ns"]


def test_exact_counters_come_back_from_a_client_that_lets_go(gpu: FakeGpu, torch: Any, tmp_path: Path) -> None:
    with recorder.record(tmp_path / "run", exact=recorder.Exact(budget_pct=100, first=9)):
        torch._prepare_profiler("config", GPU)
        torch._disable_profiler()
        launched = gpu.launch("k")
    assert {row["correlation_id"] for row in read_table(tmp_path / "run", "exact")} == {launched}


# --- any other client ------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanalyze.recorder.session.TICK_S", 0.02)
    monkeypatch.setattr(coexistence, "SILENCE_S", 0.1)
    monkeypatch.setattr(coexistence, "PROBE_PERIOD_S", 0.1)
    monkeypatch.setattr(coexistence, "PROBE_PATIENCE_S", 0.1)
    monkeypatch.setattr(coexistence, "RETRY_S", 0.1)


@pytest.mark.usefixtures("quick")
def test_a_client_that_takes_the_callbacks_is_noticed_and_waited_for(gpu: FakeGpu, tmp_path: Path, capsys: Any) -> None:
    gpu.use(0)
    client = Client(gpu, subscribes=True)
    gpu.cupti.subscriber_name = b"CUPTI for Rival"
    with recorder.record(tmp_path / "run") as recording:
        before = gpu.launch("k")
        wait_for(lambda: recording._timeline is not None and recording._timeline.knows(9))
        client.start()
        wait_for(lambda: recording._timeline is not None and recording._timeline.is_aside)
        kinds = set(gpu.cupti.enabled)
        assert {KERNEL, MEMCPY} <= kinds
        client.received = b""  # the record that was asked for, to see who gets it
        during = [gpu.launch("k") for _ in range(3)]
        time.sleep(0.4)  # the other holds the subscription, so nothing is touched
        assert gpu.cupti.enabled == kinds
        client.stop()
        client.leave()
        wait_for(lambda: recording._timeline is not None and not recording._timeline.is_aside)
        after = gpu.launch("k")
    assert client.kernels == during
    assert written(tmp_path / "run") == [before, after]
    (loss,) = messages(tmp_path / "run", "loss")
    assert "stood aside for CUPTI for Rival for " in loss
    assert "CUPTI for Rival has taken over CUPTI" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_a_quiet_job_is_not_taken_for_a_takeover(gpu: FakeGpu, tmp_path: Path) -> None:
    gpu.use(0)
    with recorder.record(tmp_path / "run") as recording:
        gpu.launch("k")
        wait_for(lambda: gpu.cupti.calls["cuptiActivityEnableAndDump"] >= 3)
        assert recording._timeline is not None
        assert not recording._timeline.is_aside
        assert 9 not in gpu.cupti.enabled
        last = gpu.launch("k")
    assert written(tmp_path / "run")[-1] == last
    assert messages(tmp_path / "run", "loss") == []


@pytest.mark.usefixtures("quick")
def test_a_cupti_that_never_answers_is_never_suspected(gpu: FakeGpu, tmp_path: Path) -> None:
    gpu.use(0)
    gpu.cupti.is_cuda_initialized = False
    with recorder.record(tmp_path / "run") as recording:
        gpu.launch("k")
        wait_for(lambda: gpu.cupti.calls["cuptiActivityEnableAndDump"] == 1)
        time.sleep(0.5)
        assert gpu.cupti.calls["cuptiActivityEnableAndDump"] == 1
        assert recording._timeline is not None
        assert not recording._timeline.is_aside


@pytest.mark.usefixtures("quick")
def test_a_wrong_suspicion_is_withdrawn_when_a_record_comes(gpu: FakeGpu, tmp_path: Path) -> None:
    gpu.use(0)
    with recorder.record(tmp_path / "run") as recording:
        first = gpu.launch("k")
        wait_for(lambda: recording._timeline is not None and recording._timeline.knows(9))
        gpu.cupti.is_cuda_initialized = False  # so that it does not answer
        gpu.cupti.fail("cuptiSubscribe", 39)
        wait_for(lambda: recording._timeline is not None and recording._timeline.is_aside)
        second = gpu.launch("k")
        gpu.cupti.library.cuptiActivityFlushAll(1)
        wait_for(lambda: recording._timeline is not None and not recording._timeline.is_aside)
    assert written(tmp_path / "run") == [first, second]
    assert messages(tmp_path / "run", "loss") == []
    assert "records have come again: nobody had taken over CUPTI" in messages(tmp_path / "run", "note")


@pytest.mark.usefixtures("quick")
def test_a_process_without_a_context_is_not_asked(gpu: FakeGpu, tmp_path: Path) -> None:
    gpu.before_cuda()
    with recorder.record(tmp_path / "run"):
        time.sleep(0.4)
    assert gpu.cupti.calls["cuptiActivityEnableAndDump"] == 0


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("function", ["cuptiActivityEnableAndDump", "cuptiActivityFlushAll"])
def test_a_cupti_that_cannot_be_asked_is_taken_for_ours(gpu: FakeGpu, tmp_path: Path, function: str) -> None:
    gpu.use(0)
    with recorder.record(tmp_path / "run") as recording:
        gpu.launch("k")
        wait_for(lambda: recording._timeline is not None and recording._timeline.knows(9))
        gpu.cupti.fail(function, 27, times=50)
        asked = gpu.cupti.calls["cuptiActivityEnableAndDump"]
        wait_for(lambda: gpu.cupti.calls["cuptiActivityEnableAndDump"] >= asked + 2)
        assert recording._timeline is not None
        assert not recording._timeline.is_aside


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("function", ["cuptiActivityEnableAndDump", "cuptiActivityDisable", "cuptiActivityFlushAll"])
def test_no_error_of_the_question_is_taken_for_a_takeover(gpu: FakeGpu, tmp_path: Path, function: str) -> None:
    library = cupti.Cupti(gpu.cupti.library, "fake")
    timeline = Timeline(library, Writer(tmp_path, "host-0-1", print), threading.Event())
    timeline.start()
    watch = coexistence.Coexistence(timeline, None, print)
    for code in sorted(ERROR_CODES):
        gpu.cupti.fail(function, code, times=1)
        assert watch._is_taken() is False
        gpu.cupti.heal()
    timeline.stop()


@pytest.mark.parametrize("function", ["cuptiSubscribe", "cuptiSubscribe_v2", "cuptiUnsubscribe"])
def test_no_error_of_asking_for_the_holder_reaches_the_job(gpu: FakeGpu, tmp_path: Path, function: str) -> None:
    library = cupti.Cupti(gpu.cupti.library, "fake")
    timeline = Timeline(library, Writer(tmp_path, "host-0-1", print), threading.Event())
    watch = coexistence.Coexistence(timeline, None, print)
    for code in sorted(ERROR_CODES):
        gpu.cupti.fail(function, code, times=1)
        assert watch._name_holder() == "another CUPTI client"
        gpu.cupti.heal()
        gpu.cupti._subscriber = None


@pytest.mark.parametrize("function", ["cuptiActivityRegisterCallbacks", "cuptiActivityEnable"])
def test_a_timeline_that_cannot_come_back_tries_again(
    gpu: FakeGpu, torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    monkeypatch.setattr("nanalyze.recorder.session.TICK_S", 0.02)
    monkeypatch.setattr(coexistence, "RETRY_S", 0.05)
    with recorder.record(tmp_path / "run") as recording:
        torch._prepare_profiler("config", GPU)
        gpu.cupti.fail(function, 7, times=1)
        torch._disable_profiler()
        assert recording._timeline is not None
        wait_for(lambda: recording._timeline is not None and not recording._timeline.is_aside)
        launched = gpu.launch("k")
    assert written(tmp_path / "run") == [launched]
    (failure,) = messages(tmp_path / "run", "failure")
    assert failure.startswith(f"could not take CUPTI back from torch.profiler: {function} failed")


@pytest.mark.usefixtures("quick")
def test_what_other_clients_dropped_is_not_ours_to_ask_for(gpu: FakeGpu, torch: Any, tmp_path: Path) -> None:
    with recorder.record(tmp_path / "run"):
        torch._prepare_profiler("config", GPU)
        time.sleep(0.05)
        asked = gpu.cupti.calls["cuptiActivityGetNumDroppedRecords"]
        time.sleep(0.2)
        assert gpu.cupti.calls["cuptiActivityGetNumDroppedRecords"] == asked
        torch._disable_profiler()


def test_the_holder_of_the_subscription_is_named_where_cupti_can_tell(
    gpu: FakeGpu, tmp_path: Path, capsys: Any
) -> None:
    subscriber = ctypes.c_void_p()
    gpu.cupti.library.cuptiSubscribe(ctypes.byref(subscriber), cupti.no_callback, None)
    with recorder.record(tmp_path / "a", exact=recorder.Exact()):
        pass
    assert "MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED (39)" in (said := capsys.readouterr().err)
    assert "it calls itself 'CUPTI for Other'" in said
    gpu.cupti.remove("cuptiSubscribe_v2")
    with recorder.record(tmp_path / "b", exact=recorder.Exact()):
        pass
    assert "(39)" in (said := capsys.readouterr().err)
    assert "calls itself" not in said


# --- cuda-gdb -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tracer", "comm", "found"),
    [("0", "", None), ("7", "cuda-gdb-python3", "cuda-gdb"), ("7", "gdb", None), ("8", "", None), ("x", "", None)],
)
def test_nvidias_debugger_is_told_from_others(tmp_path: Path, tracer: str, comm: str, found: str | None) -> None:
    for folder in ("self", "7"):
        (tmp_path / folder).mkdir()
    (tmp_path / "self" / "status").write_text(f"Name:\tpython\nTracerPid:\t{tracer}\nUid:\t0\n")
    (tmp_path / "7" / "comm").write_text(f"{comm}\n")
    assert coexistence.cuda_debugger(tmp_path / "self") == found
    assert coexistence.cuda_debugger(tmp_path / "none") is None


def test_a_process_under_cuda_gdb_is_left_alone(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nanalyze.recorder.session.cuda_debugger", lambda: "cuda-gdb")
    with recorder.record(tmp_path / "run", samples=recorder.Samples()), recorder.annotate("mine"):
        gpu.launch("k")
    assert capfd.readouterr().err == (
        "nanalyze: kernels are not recorded: cuda-gdb has this process, and it excludes CUPTI\n"
    )
    assert gpu.cupti.calls == {}
    assert final_process(tmp_path / "run")["layers"] == "ranges"
