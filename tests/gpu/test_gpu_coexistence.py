"""PyTorch's profiler and another CUPTI client beside a recording, on a real GPU."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import read_table

from nanalyze import recorder
from nanalyze.recorder import coexistence, cupti

torch = pytest.importorskip("torch")
# PyTorch's profiler keeps the one subscription of CUPTI for as long as its process lives.
pytestmark = [pytest.mark.gpu, pytest.mark.own_process]
KERNEL = cupti.KIND_CONCURRENT_KERNEL


@pytest.fixture(autouse=True)
def _warm() -> Any:
    torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    yield
    recorder.stop()
    torch.cuda.synchronize()


def kernels_of(profiler: Any) -> int:
    return sum("elementwise" in event.name for event in profiler.events())


def losses(run_dir: Path) -> list[str]:
    return [row["message"] for row in read_table(run_dir, "events") if row["kind"] == "loss"]


class Client:
    """A client that knows nothing of us: registers its callbacks, enables kernels, counts bytes."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.bytes = 0
        self.memory: dict[int, Any] = {}
        self.callbacks = (cupti.BufferRequested(self.request), cupti.BufferCompleted(self.complete))
        self.subscriber = ctypes.c_void_p()

    def request(self, buffer: Any, size: Any, most: Any) -> None:
        memory = (ctypes.c_uint64 * (1 << 16))()
        self.memory[ctypes.addressof(memory)] = memory
        buffer[0], size[0], most[0] = ctypes.addressof(memory), ctypes.sizeof(memory), 0

    def complete(self, context: Any, stream: int, buffer: int, size: int, valid: int) -> None:
        if buffer in self.memory:
            self.bytes += valid


clients: list[Client] = []  # CUPTI may keep a callback beyond the test


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_client_that_takes_the_callbacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe by a context record works on this CUPTI: silence is not taken for a takeover, a takeover is seen."""
    for name in ("SILENCE_S", "PROBE_PERIOD_S", "RETRY_S"):
        monkeypatch.setattr(coexistence, name, 0.5)
    monkeypatch.setattr("nanalyze.recorder.session.TICK_S", 0.2)
    x = torch.zeros(1, device="cuda")
    with recorder.record(tmp_path / "run", pause_pct=0) as recording:
        timeline = recording._timeline
        assert timeline is not None
        x.add_(1)
        torch.cuda.synchronize()
        wait_for(lambda: timeline.knows(cupti.KIND_CONTEXT))  # else CUPTI does not answer: clients go unnoticed
        time.sleep(3)  # quiet: asked several times, and the answer came to us
        assert not timeline.is_aside
        client = Client(timeline.cupti)
        clients.append(client)
        try:
            client.library.cuptiSubscribe(ctypes.byref(client.subscriber), cupti.no_callback, None)
        except cupti.CuptiError as error:
            pytest.skip(f"an earlier client of this process, such as PyTorch's profiler, is still there: {error}")
        client.library.cuptiActivityRegisterCallbacks(*client.callbacks)
        client.library.cuptiActivityEnable(KERNEL)
        wait_for(lambda: timeline.is_aside)
        for _ in range(1000):
            x.add_(1)
        torch.cuda.synchronize()
        time.sleep(1)
        client.library.cuptiActivityFlushAll(1)
        assert client.bytes >= 1000 * 200
        assert timeline.is_aside
        client.library.cuptiActivityDisable(KERNEL)
        client.library.cuptiUnsubscribe(client.subscriber)
        wait_for(lambda: not timeline.is_aside)
        for _ in range(100):
            x.add_(1)
        torch.cuda.synchronize()
    assert len(read_table(tmp_path / "run", "kernels")) == 101
    assert len([text for text in losses(tmp_path / "run") if "stood aside for" in text]) == 1
    assert not [row for row in read_table(tmp_path / "run", "events") if "could not be decoded" in row["message"]]


def test_pytorchs_profiler_within_a_recording(tmp_path: Path) -> None:
    x = torch.zeros(1, device="cuda")
    seen = []
    with recorder.record(tmp_path / "run", pause_pct=0):
        for _ in range(3):
            for _ in range(100):
                x.add_(1)
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            ) as profiler:
                for _ in range(50):
                    x.add_(1)
                torch.cuda.synchronize()
            seen.append(kernels_of(profiler))
        for _ in range(10):
            x.add_(1)
        torch.cuda.synchronize()
    assert int(x) == 460
    assert seen == [50, 50, 50]  # all of its own, and no more
    rows = read_table(tmp_path / "run", "kernels")
    assert len(rows) == 310
    assert all(row["duration_ns"] is not None for row in rows)
    assert len([text for text in losses(tmp_path / "run") if "stood aside for torch.profiler" in text]) == 3


def test_a_profile_of_the_cpu_alone_leaves_the_timeline_on(tmp_path: Path) -> None:
    x = torch.zeros(1, device="cuda")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with recorder.record(tmp_path / "run", pause_pct=0), torch.profiler.profile(activities=activities):
        for _ in range(20):
            x.add_(1)
        torch.cuda.synchronize()
    assert len(read_table(tmp_path / "run", "kernels")) == 20
    assert losses(tmp_path / "run") == []
