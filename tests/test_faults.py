"""Faults that a recording must survive, beyond those tested where they arise (see docs/record.md)."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from trace import Trace
from typing import Any

import fake_records
import numpy as np
import pandas as pd
import pytest
from fake_gpu import FakeGpu, final_process, read_table
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nanalyze.analysis as na
from nanalyze import recorder
from nanalyze.analysis import catalog, live
from nanalyze.recorder import buffers, ranges, session
from nanalyze.recorder.cupti import Cupti
from nanalyze.recorder.timeline import Timeline
from nanalyze.recorder.writer import Writer
from nanalyze.rundir import shards
from nanalyze.rundir.errors import NanalyzeError

TESTS = Path(__file__).parent


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    monkeypatch.setattr(buffers, "native", None)  # the limits below are those of the exchange in Python
    gpu = FakeGpu()
    gpu.install(monkeypatch)
    yield gpu
    recorder.stop()
    gpu.close()


def launched(gpu: FakeGpu) -> list[int]:
    return [correlation for correlation, _ in gpu.launches]


def written(run_dir: Path) -> list[int]:
    return [row["correlation_id"] for row in read_table(run_dir, "kernels")]


# --- the disk ------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EROFS", "EIO", "ESTALE", "EACCES", "ENOENT", "ENAMETOOLONG"])
def test_a_disk_that_refuses_for_a_while_costs_nothing(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, code: str
) -> None:
    number, original, refused = getattr(errno, code), shards.write_shard, []

    def refusing(run_dir: Path, table: str, *args: Any) -> Any:
        if table == "kernels" and len(refused) < 2:
            refused.append(table)
            raise OSError(number, os.strerror(number))
        return original(run_dir, table, *args)

    monkeypatch.setattr(shards, "write_shard", refusing)
    with recorder.record(tmp_path / "run", flush_s=0.05):
        deadline = time.monotonic() + 20
        while len(refused) < 2 and time.monotonic() < deadline:
            gpu.launch("k")
            time.sleep(0.02)
    assert len(refused) == 2
    assert written(tmp_path / "run") == launched(gpu)
    assert capsys.readouterr().err.count(f"cannot write ({os.strerror(number)}); recording goes on in memory") == 1
    assert final_process(tmp_path / "run")["records_lost"] == 0


def test_a_file_system_that_stands_still_never_holds_up_the_job(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hung NFS mount: the buffers are bounded, what does not fit is counted, launches are as quick as ever."""
    small = 10 * fake_records.SIZES[gpu.cupti.version][fake_records.KERNEL]
    monkeypatch.setattr(buffers, "FULL_BYTES", 3 * small)
    gpu.cupti.buffer_limit = small
    original, hung, released = shards.write_shard, threading.Event(), threading.Event()

    def standing(run_dir: Path, table: str, *args: Any) -> Any:
        if table == "kernels":
            hung.set()
            assert released.wait(30)
        return original(run_dir, table, *args)

    monkeypatch.setattr(shards, "write_shard", standing)
    with recorder.record(tmp_path / "run", flush_s=0.02):
        while not hung.is_set():
            gpu.launch("k")
            time.sleep(0.01)
        slowest = 0.0
        for _ in range(400):
            started = time.perf_counter()
            gpu.launch("k")
            slowest = max(slowest, time.perf_counter() - started)
        gpu.cupti.settle()
        released.set()
    assert slowest < 1.0  # the disk stood still for all of it
    rows, lost = written(tmp_path / "run"), final_process(tmp_path / "run")["records_lost"]
    assert 0 < lost < 400
    assert len(rows) + lost == len(launched(gpu))  # nothing is lost without being counted
    assert set(rows) < set(launched(gpu))


def test_a_run_directory_that_is_deleted_in_mid_run_is_made_again(gpu: FakeGpu, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with recorder.record(run_dir, flush_s=0.05):
        gpu.launch("k")
        deadline = time.monotonic() + 20
        while not (run_dir / "kernels").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        run_dir.rename(tmp_path / "gone")
        last = gpu.launch("k")
    with na.open(run_dir) as run:
        assert run.arrow("SELECT correlation_id FROM kernels").column("correlation_id").to_pylist() == [last]
        assert run.damage_count > 0  # what was deleted is missed, not forgotten


# --- how processes end -----------------------------------------------------------------------------

JOB = f"""
    import ctypes, glob, os, signal, sys, time
    sys.path.append({str(TESTS)!r})
    import pytest
    from fake_gpu import FakeGpu
    from nanalyze import recorder
    gpu = FakeGpu()
    gpu.install(pytest.MonkeyPatch())
    if len(sys.argv) > 1:
        recorder.start(sys.argv[1], flush_s=0.05)
    gpu.launch("k")
    print("launched", flush=True)
    until = time.monotonic() + 10
    shards = os.path.join(sys.argv[-1], "kernels", "*", "[!.]*.parquet")
    while len(sys.argv) > 1 and not glob.glob(shards) and time.monotonic() < until:
        time.sleep(0.02)
"""


def run_job(end: str, *arguments: str) -> tuple[int, str]:
    program = textwrap.dedent(JOB) + end
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("ctypes.string_at(0)", -signal.SIGSEGV),
        ("os.abort()", -signal.SIGABRT),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(5)", -signal.SIGINT),
        ("os._exit(9)", 9),
        ("raise SystemExit(4)", 4),
    ],
)
def test_however_a_process_ends_its_code_is_its_own_and_what_was_flushed_is_there(
    tmp_path: Path, end: str, code: int
) -> None:
    assert run_job(end, str(tmp_path / "run")) == run_job(end) == (code, "launched\n")
    with na.open(tmp_path / "run") as run:
        assert run.damage_count == 0
        assert run.arrow("SELECT count(*) AS n FROM kernels").column("n")[0].as_py() == 1
    by_itself = end.startswith(("raise", "os.kill(os.getpid(), signal.SIGINT"))
    assert (final_process(tmp_path / "run")["ended_ns"] is not None) is by_itself


# --- clocks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0, -0.5])
def test_a_clock_that_is_set_in_mid_run_breaks_nothing(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    real, offset = time.time_ns, [0]
    monkeypatch.setattr(time, "time_ns", lambda: real() + offset[0])
    with recorder.record(tmp_path / "run", flush_s=0.05):
        gpu.launch("before")
        with recorder.annotate("across"):
            gpu.launch("within")
            offset[0] = int(step_s * 1e9)
            gpu._clock_ns = 0  # the GPU's times follow the host's clock
            gpu.launch("within")
        with recorder.annotate("after"):
            last = gpu.launch("after")
        time.sleep(0.2)
    assert written(tmp_path / "run") == launched(gpu)
    with na.open(tmp_path / "run") as run:
        assert run.damage_count == 0
        placed = run.arrow(
            "SELECT r.name FROM kernels k JOIN ranges r ON r.range_id = k.range_id WHERE k.correlation_id = $last",
            {"last": last},
        ).to_pylist()
        assert placed == [{"name": "after"}] or step_s == -0.5  # ranges overlap then, and either is a fair answer
        assert int(run.verdicts()["launches"].sum()) == 4
        host = dict(zip(*run.query("ranges_summary")[["name", "host_ns"]].to_numpy().T, strict=True))
        assert host["after"] >= 0
        assert pd.isna(host["across"]) if step_s < 0 else host["across"] >= 0


# --- numbers ---------------------------------------------------------------------------------------


def test_ten_thousand_threads_have_ranges_of_their_own() -> None:
    log = ranges.RangeLog()
    ranges.set_log(log)
    try:
        for _ in range(20):
            ready = threading.Barrier(500)

            def work(ready: threading.Barrier = ready) -> None:
                with recorder.annotate("thread"):
                    ready.wait(30)

            threads = [threading.Thread(target=work) for _ in range(500)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        ranges.set_log(None)
    rows = log.take(also_open=True)
    assert len({row["range_id"] for row in rows}) == len(rows) == 10_000
    assert {(row["depth"], row["parent_id"]) for row in rows} == {(0, None)}
    assert all(row["end_ns"] >= row["start_ns"] for row in rows)
    assert log._open == {}


def test_ten_thousand_threads_launch_each_in_a_range_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the callbacks in C, where they are compiled."""
    gpu = FakeGpu()
    gpu.install(monkeypatch)
    names: dict[int, str] = {}
    with recorder.record(tmp_path / "run", pause_pct=0):
        for batch in range(40):
            ready = threading.Barrier(250)

            def work(name: str, ready: threading.Barrier = ready) -> None:
                ready.wait(30)
                with recorder.annotate(name):
                    names[gpu.launch("k")] = name

            threads = [threading.Thread(target=work, args=(f"{batch}.{number}",)) for number in range(250)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    gpu.close()
    kernels, opened = read_table(tmp_path / "run", "kernels"), read_table(tmp_path / "run", "ranges")
    assert {row["correlation_id"] for row in kernels} == set(names)
    assert len(kernels) == len({row["name"] for row in opened}) == 10_000
    spans = {row["name"]: (row["start_ns"], row["end_ns"]) for row in opened}
    queued = {row["correlation_id"]: row["queued_ns"] for row in kernels}
    unknown = [name for call, name in names.items() if queued[call] is None]
    assert unknown == []
    assert all(spans[name][0] <= queued[call] <= spans[name][1] for call, name in names.items())
    assert final_process(tmp_path / "run")["records_lost"] == 0


def kernel_records(gpu: FakeGpu, count: int, **columns: Any) -> bytes:
    """Kernel records in numbers, from one by repeating it: `columns` replace fields, an array each."""
    version = gpu.cupti.version
    one = fake_records.record(
        fake_records.KERNEL, version, name=gpu.names.pointer(b"k"), start=1000, end=2000, queued=900, contextId=1
    )
    from nanalyze.recorder import activity

    data = np.frombuffer(one * count, dtype=np.uint8).copy()
    records = data.view(activity._dtype(fake_records.KERNEL, len(one)))
    for name, values in columns.items():
        records[name] = values
    return data.tobytes()


def test_ten_thousand_streams(gpu: FakeGpu, tmp_path: Path) -> None:
    recording = recorder.record(tmp_path / "run", layers=("timeline",))
    numbers = np.arange(1, 10_001)
    data = kernel_records(gpu, 10_000, stream=numbers, correlation=numbers)
    step = 2000 * fake_records.SIZES[gpu.cupti.version][fake_records.KERNEL]
    for at in range(0, len(data), step):
        assert gpu.cupti.complete_buffer(data[at : at + step])
    recording.stop()
    rows = read_table(tmp_path / "run", "kernels")
    assert [row["stream_id"] for row in rows] == numbers.tolist()
    assert len(read_table(tmp_path / "run", "kernel_classes")) == 1


def test_decoding_and_writing_keep_up_with_500_000_launches_a_second(gpu: FakeGpu, tmp_path: Path) -> None:
    """Against a yardstick of the same machine at the same moment, which may be slow or busy.

    Sorting a million random numbers takes 60 to 100 ms of a core of today; half a million launches
    must take less than a second of it. Both are measured thrice and the best taken.
    """
    count, per_buffer = 100_000, 2400
    writer = Writer(tmp_path / "run", "host-0-1", print)
    timeline = Timeline(Cupti(gpu.cupti.library, "fake"), writer, threading.Event())
    timeline.start()
    names = np.array([gpu.names.pointer(b"kernel%d" % number) for number in range(200)], dtype=np.uint64)
    rng = np.random.default_rng(1)
    columns = {
        "name": names[rng.integers(0, 200, count)],
        "correlation": np.arange(count),
        "start": np.arange(count) * 2000 + 10**18,
        "end": np.arange(count) * 2000 + 10**18 + rng.integers(500, 1900, count),
        "queued": np.arange(count) * 2000 + 10**18 - 5000,
    }
    data = np.frombuffer(kernel_records(gpu, count, **columns), dtype=np.uint8)
    size = per_buffer * fake_records.SIZES[gpu.cupti.version][fake_records.KERNEL]
    full = [(data[at : at + size], len(data[at : at + size])) for at in range(0, len(data), size)]
    timeline._exchange.give_back = lambda taken: None  # type: ignore[method-assign]
    unsorted = rng.random(1_000_000)
    took, yardstick = [], []
    for _ in range(3):
        timeline._exchange.take = lambda: full  # type: ignore[method-assign]
        started = time.thread_time()
        timeline.drain()
        writer.flush()
        took.append(time.thread_time() - started)
        started = time.thread_time()
        np.sort(unsorted)
        yardstick.append(time.thread_time() - started)
    assert writer.rows["kernels"] == 3 * count
    seconds_of_sorting = min(took) * 500_000 / count / min(yardstick)
    assert seconds_of_sorting < 10  # measured: 3 to 5


# --- devices and contexts --------------------------------------------------------------------------


def test_a_device_reset_ends_exact_counters_and_not_the_timeline(gpu: FakeGpu, tmp_path: Path, capsys: Any) -> None:
    """cudaDeviceReset destroys the context, and with it the profiler's session."""
    exact = recorder.Exact(first=100, budget_pct=100, metrics=["gpu__time_duration.sum"])
    with recorder.record(tmp_path / "run", exact=exact):
        measured = gpu.launch("k")
        gpu.cupti.sessions.clear()
        for _ in range(3):
            gpu.launch("k", contextId=2)
    assert written(tmp_path / "run") == launched(gpu)
    assert {row["correlation_id"] for row in read_table(tmp_path / "run", "exact")} == {measured}
    assert "exact counters stopped" in capsys.readouterr().err
    assert {row["context_id"] for row in read_table(tmp_path / "run", "kernels")} == {1, 2}


def test_a_lost_device_costs_its_state_alone(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "TICK_S", 0.02)
    with recorder.record(tmp_path / "run"):
        gpu.launch("k")
        time.sleep(0.1)
        for function in ("cuDeviceGetCount", "cuDevicePrimaryCtxGetState", "cuCtxSynchronize"):
            gpu.bindings.codes[function] = 46  # CUDA_ERROR_DEVICE_UNAVAILABLE
        time.sleep(0.1)
        gpu.launch("k")
    assert written(tmp_path / "run") == launched(gpu)
    assert final_process(tmp_path / "run")["ending"] == "stop"


# --- fuzz of the shard reader ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trace = Trace(tmp_path_factory.mktemp("sound") / "run")
    kernel = trace.kernel_class("k")
    for number in range(500):
        trace.kernel(kernel, start_ns=10 * number, duration_ns=7)
    trace.write(shards=2)
    return trace.run_dir


def damaged(data: bytes, places: list[tuple[int, int]], cut: int) -> bytes:
    changed = bytearray(data)
    for place, value in places:
        changed[place % len(changed)] ^= value
    return bytes(changed[: len(changed) - cut % len(changed)])


damage = st.tuples(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=6), st.integers(0, 400))
fuzz = settings(max_examples=60, deadline=5000, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzz
@given(damage=damage)
def test_a_shard_that_was_changed_is_left_out_whatever_the_change(
    sound: Path, damage: tuple[list[tuple[int, int]], int]
) -> None:
    path = sorted((sound / "kernels").glob("*/000001-*"))[0]
    original = path.read_bytes()
    data = damaged(original, *damage)
    try:
        path.write_bytes(data)
        found = catalog.scan(sound.resolve())
        followed = live.Live(sound)
        followed.update()
    finally:
        path.write_bytes(original)
    is_whole = data == original
    assert [shard.sequence for shard in found.shards["kernels"]] == ([1, 2] if is_whole else [2])
    assert len(found.damage) == (0 if is_whole else 1)
    assert (followed.total_ns, followed.unreadable) == ((3500, 0) if is_whole else (1750, 1))


# The same damage each time: some of it crashes DuckDB 1.4.1's own reader of Parquet (a division by zero), and with it
# all tests that were to come.
@settings(fuzz, max_examples=20, derandomize=True)
@given(damage=damage)
def test_a_shard_written_wrong_but_hashed_right_is_an_error_or_rows(
    sound: Path, damage: tuple[list[tuple[int, int]], int]
) -> None:
    """What a recorder with a bug, or a stranger, could leave: never more than an error of ours."""
    path = sorted((sound / "kernels").glob("*/000001-*"))[0]
    original = path.read_bytes()
    data = damaged(original, *damage)
    forged = path.with_name(f"000001-{shards.digest(data)}.parquet")
    path.unlink()
    try:
        forged.write_bytes(data)
        try:
            with na.open(sound) as run:
                count = run.arrow("SELECT count(*) AS n, sum(duration_ns) AS t FROM kernels").column("n")[0].as_py()
            assert count >= 0
        except NanalyzeError:
            pass
    finally:
        forged.unlink(missing_ok=True)
        path.write_bytes(original)
