"""Whole recordings on the fake GPU: what lands in the run directory, and every way CUPTI can fail."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_records
import pytest
from fake_cupti import ERROR_CODES, FUNCTIONS, INVALID_METRIC_NAME, INVALID_PARAMETER, PM_FUNCTIONS, value_of
from fake_gpu import (
    CUPTI_PATH,
    UUID_TEXT,
    FakeGpu,
    final_process,
    read_table,
    shard_paths,
    shards_claimed,
    shards_on_disk,
)

from nanalyze import analysis, recorder
from nanalyze.recorder import buffers, cupti, identity, lifecycle, session
from nanalyze.rundir import shards
from nanalyze.rundir.errors import NanalyzeError, RecorderError, RunError
from nanalyze.rundir.schema import TABLES

JOB_VARIABLES = (*identity._RANK, *identity._LOCAL_RANK, *identity._WORLD_SIZE, *identity._JOB)
METRICS = ["unit__a.sum", "unit__b.sum", "unit__c.sum", "unit__d.sum", "unit__e.sum", "unit__f.sum"]  # two passes
UNKNOWN_KIND = 46


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher's variables, and no recording left behind."""
    for name in JOB_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = set(threading.enumerate())
    yield
    recorder.stop()
    left = {thread.name for thread in threading.enumerate() if thread not in before}
    assert left - {"fake-cupti"} == set()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    gpu = FakeGpu()
    gpu.install(monkeypatch)
    yield gpu
    gpu.close()


def exact(**options: Any) -> recorder.Exact:
    return recorder.Exact(**{"budget_pct": 100, "first": 1, "metrics": METRICS, **options})


@pytest.fixture
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ticks come every 50 ms instead of every second."""
    monkeypatch.setattr(session, "TICK_S", 0.05)


def until(condition: Callable[[], object], seconds: float = 8.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


# --- a whole recording ------------------------------------------------------------------------


def test_a_quiet_jobs_launches_are_written_while_it_runs(gpu: FakeGpu, tmp_path: Path) -> None:
    """They fill no buffer, and CUPTI hands over full ones only; a kill -9 would cost all of them."""
    with recorder.record(tmp_path / "run", flush_s=0.2, pause_pct=0):
        gpu.launch()
        until(lambda: list((tmp_path / "run").glob("kernels/*/*.parquet")))


def test_a_recording_holds_what_the_job_did(gpu: FakeGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    before = time.time_ns()
    with recorder.record(run_dir, memsets=True) as rec:
        with recorder.annotate("step", flops=10):
            inside = gpu.launch("_Z1fv", duration_ns=777)
        outside = gpu.launch("plain", (9, 1, 1))
        copy, memset = gpu.copy(4096), gpu.memset(64)
        graph = gpu.launch_graph(0xA, ["a", "b"])
    assert rec.is_stopped
    assert capsys.readouterr() == ("", "")
    kernels = read_table(run_dir, "kernels")
    assert [row["correlation_id"] for row in kernels] == [inside, outside, graph, graph]
    assert kernels[0]["duration_ns"] == 777
    names = {row["kernel_class_id"]: row["name"] for row in read_table(run_dir, "kernel_classes")}
    assert [names[row["kernel_class_id"]] for row in kernels] == ["f()", "plain", "a", "b"]
    assert [row["correlation_id"] for row in read_table(run_dir, "copies")] == [copy, memset]
    (step,) = read_table(run_dir, "ranges")
    assert (step["name"], step["flops"]) == ("step", 10.0)
    within = [step["start_ns"] <= row["queued_ns"] <= step["end_ns"] for row in kernels]
    assert within == [True, False, False, False]
    (gpu_row,) = read_table(run_dir, "devices")
    assert (gpu_row["uuid"], gpu_row["sm_count"]) == (f"GPU-{UUID_TEXT}", 132)
    assert {row["device_id"] for row in read_table(run_dir, "device_state")} == {0}
    assert read_table(run_dir, "events") == []
    assert all(before <= row["start_ns"] for row in kernels)


def test_the_process_rows_say_how_it_was_recorded(gpu: FakeGpu, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with recorder.record(run_dir, flush_s=2.5, exact=exact(kernels="gemm")):
        gpu.launch("gemm")
        gpu.launch("gemm")
    start, end = read_table(run_dir, "processes")
    assert start["recorded_ns"] < end["recorded_ns"]
    assert (start["ended_ns"], start["ending"], start["shards"]) == (None, None, None)
    assert end["started_ns"] == start["started_ns"] < end["ended_ns"]
    assert end["ending"] == "stop"
    assert (end["host"], end["pid"]) == (socket.gethostname(), os.getpid())
    assert json.loads(end["command"]) == sys.orig_argv
    settings = json.loads(end["settings"])
    assert (settings["flush_s"], settings["exact"]["kernels"], settings["exact"]["metrics"]) == (2.5, "gemm", METRICS)
    assert (end["cupti_version"], end["cupti_path"]) == (130001, CUPTI_PATH)
    assert (end["cuda_driver_version"], end["gpu_driver_version"]) == (13000, "580.159.03")
    assert set(end["layers"].split(",")) == {"timeline", "exact", "ranges", "device_state"}
    assert (end["kernels_written"], end["records_lost"]) == (2, 0)
    assert end["recorder_cpu_ns"] > 0
    assert (end["rank"], end["local_rank"], end["world_size"]) == (None, None, None)


def test_the_last_row_counts_the_shards_on_disk(gpu: FakeGpu, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with recorder.record(run_dir, exact=exact()), recorder.annotate("r"):
        gpu.launch()
        gpu.copy(1)
    assert shards_claimed(run_dir) == shards_on_disk(run_dir)
    assert set(shards_claimed(run_dir)) == set(TABLES) - {
        "samples",
        "sampled_windows",
        "pauses",
        "ceilings",
        "kernel_minutes",
    }


def test_run_json_is_a_run(gpu: FakeGpu, tmp_path: Path) -> None:
    with recorder.record(tmp_path / "run"):
        pass
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (about["format"], about["format_version"], about["source"]) == ("nanalyze", 1, "recorder")


def test_analysis_reads_what_was_recorded(gpu: FakeGpu, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with recorder.record(run_dir, exact=exact()), recorder.annotate("step"):
        gpu.launch("gemm")
        gpu.launch("gemm", duration_ns=5000)
    with analysis.open(run_dir) as run:
        assert len(run.damage()) == 0
        found = run.sql("SELECT duration_ns, duration_method FROM kernels ORDER BY correlation_id")
        assert found["duration_ns"][1] == 5000
        assert found["duration_method"][1] == "timeline"


def test_a_recording_of_a_job_without_kernels_is_a_run(gpu: FakeGpu, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    gpu.bindings.active_contexts = set()  # CUDA is never used
    with recorder.record(run_dir), recorder.annotate("cpu only"):
        pass
    assert shards_on_disk(run_dir) == {"processes": 2, "ranges": 1}
    assert gpu.bindings.synchronized == 0  # nothing to wait for


def test_layers_can_be_chosen(gpu: FakeGpu, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with recorder.record(run_dir, layers=("ranges",)), recorder.annotate("r"):
        gpu.launch()
    assert shards_on_disk(run_dir) == {"processes": 2, "ranges": 1}
    assert gpu.cupti.log == []
    assert final_process(run_dir)["layers"] == "ranges"


def test_ranges_still_open_at_the_end_have_no_end(gpu: FakeGpu, tmp_path: Path) -> None:
    rec = recorder.start(tmp_path / "run")
    with recorder.annotate("outer"):
        rec.stop()
    (row,) = read_table(tmp_path / "run", "ranges")
    assert (row["name"], row["end_ns"]) == ("outer", None)


def test_stop_waits_for_the_kernels_already_launched(gpu: FakeGpu, tmp_path: Path) -> None:
    gpu.bindings.synchronize_s = 0.05
    with recorder.record(tmp_path / "run"):
        gpu.launch()
        gpu.cupti.settle()
    assert gpu.bindings.synchronized == 1
    assert len(read_table(tmp_path / "run", "kernels")) == 1


def test_stop_does_not_wait_for_ever(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "SYNCHRONIZE_PATIENCE_S", 0.1)
    gpu.bindings.synchronize_s = 3.0  # the end takes a while on a busy machine
    run_dir = tmp_path / "run"
    with recorder.record(run_dir):
        gpu.launch()
        gpu.cupti.settle()
    assert gpu.bindings.synchronized == 0
    (event,) = read_table(run_dir, "events")
    assert (event["layer"], event["kind"]) == ("timeline", "loss")
    assert "still running" in event["message"]
    until(lambda: gpu.bindings.synchronized and threading.active_count() <= 2)


# --- exact counters in the run directory ------------------------------------------------------


def test_exact_rows_have_the_class_of_their_launch(gpu: FakeGpu, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with recorder.record(run_dir, exact=exact()):
        calls = {name: gpu.launch(name, (size, 1, 1)) for name, size in (("a", 1), ("b", 2), ("c", 3))}
        again = gpu.launch("a", (1, 1, 1))
    names = {row["kernel_class_id"]: row["name"] for row in read_table(run_dir, "kernel_classes")}
    kernels = {row["correlation_id"]: row for row in read_table(run_dir, "kernels")}
    rows = read_table(run_dir, "exact")
    assert len(rows) == 3 * len(METRICS)
    assert {row["correlation_id"] for row in rows} == set(calls.values())
    for row in rows:
        name = names[row["kernel_class_id"]]
        assert calls[name] == row["correlation_id"]
        assert row["kernel_class_id"] == kernels[row["correlation_id"]]["kernel_class_id"]
        assert row["value"] == value_of(row["metric"], [name.encode()])
        assert (row["scope"], row["passes"], row["device_id"], row["graph_id"]) == ("kernel", 2, 0, None)
        assert row["cost_ns"] > 0
    measured = kernels[calls["a"]]
    assert (measured["start_ns"], measured["duration_ns"]) == (None, None)
    assert measured["queued_ns"] > 1_700_000_000_000_000_000  # not CUPTI's stale one
    assert kernels[again]["duration_ns"] == 1000
    assert kernels[again]["kernel_class_id"] == measured["kernel_class_id"]


def test_a_graph_has_exact_rows_of_its_own(gpu: FakeGpu, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with recorder.record(run_dir, exact=exact()):
        calls = [gpu.launch_graph(0xA, ["a", "b"], graph_id=33) for _ in range(3)]
    rows = read_table(run_dir, "exact")
    assert {(row["scope"], row["graph_id"], row["kernel_class_id"]) for row in rows} == {("graph", 33, None)}
    assert {row["correlation_id"] for row in rows} == {calls[1]}
    assert [row["value"] for row in rows] == [value_of(metric, [b"a", b"b"]) for metric in METRICS]


@pytest.mark.usefixtures("_often")
def test_measurements_are_written_while_the_job_runs(gpu: FakeGpu, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with recorder.record(run_dir, exact=exact(), flush_s=0.1):
        gpu.launch("a")
        until(lambda: read_table(run_dir, "exact"))
        assert {row["kernel_class_id"] for row in read_table(run_dir, "exact")} == {
            row["kernel_class_id"] for row in read_table(run_dir, "kernel_classes")
        }


def test_a_measurement_whose_launch_was_lost_is_written_without_its_class(gpu: FakeGpu, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with recorder.record(run_dir, exact=exact()):
        gpu.cupti.enabled.discard(fake_records.KERNEL)  # the record never comes
        call = gpu.launch("a")
    rows = read_table(run_dir, "exact")
    assert [(row["correlation_id"], row["kernel_class_id"]) for row in rows] == [(call, None)] * len(METRICS)


def test_what_the_exact_layer_did_is_noted(gpu: FakeGpu, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with recorder.record(run_dir, exact=exact(first=2)):
        gpu.launch("ncclDevKernel_AllReduce")
        gpu.during_launch = lambda: _in_thread(lambda: gpu.launch("other"))
        gpu.launch("a")
        gpu.launch("b")
        gpu.launch_graph(0xA, ["n"])
    events = {row["message"].split(":")[0]: row["count"] for row in read_table(run_dir, "events")}
    assert {message: count for message, count in events.items() if not message.startswith("launches measured")} == {
        "measurements discarded": 1,
        "kernel shapes not measured because they are collectives": 1,
        "graphs that were not launched often enough for all passes": 1,
    }
    assert next(count for message, count in events.items() if message.startswith("launches measured")) == 3


def _in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_exact_without_a_timeline_is_off_and_says_why(
    gpu: FakeGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with recorder.record(tmp_path / "run", layers=("ranges",), exact=exact()):
        gpu.launch()
    assert capsys.readouterr().err.splitlines() == [
        "nanalyze: exact is off: it needs the timeline, which tells the launches' kernel classes"
    ]


# --- every function, every code ---------------------------------------------------------------

# Errors of these cost nothing worth a line: the end of a recording, and what is only nicer to have.
QUIET = {
    "cuptiActivityDisable",
    "cuptiActivityEnableDriverApi",
    "cuptiActivityEnableRuntimeApi",
    "cuptiActivityGetNextRecord",  # what it could not explain is counted as lost
    "cuptiActivityGetNumDroppedRecords",
    "cuptiActivityRegisterTimestampCallback",
    "cuptiActivitySetAttribute",
    "cuptiUnsubscribe",
}
# test_samples has the functions of PM sampling, test_coexistence those that look for other clients.
OTHER_CLIENTS = {"cuptiSubscribe_v2", "cuptiActivityEnableAndDump"}
NOT_USED = {"cuptiFinalize", *OTHER_CLIENTS, *PM_FUNCTIONS}
ENDS_TIMELINE = {
    "cuptiGetVersion",
    "cuptiActivityRegisterCallbacks",
    "cuptiActivityEnable",
    "cuptiActivityFlushPeriod",
}
# These codes from this function say that a chip does not have a metric: it is left out. (CUPTI 13.0
# on an H200 answers INVALID_PARAMETER.)
ASKS_FOR_METRICS = "cuptiProfilerHostConfigAddMetrics"
NO_SUCH_METRIC = (INVALID_PARAMETER, INVALID_METRIC_NAME)
LOSES_RECORDS = {"cuptiActivityFlushAll"}


class Memory:
    """Takes the shards in place of the disk; a whole run costs a few milliseconds then."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.tables: dict[str, list[dict[str, Any]]] = {}
        patch.setattr(shards, "write_shard", self._write)

    def _write(self, run_dir: Path, table: str, process: str, sequence: int, rows: Any) -> None:
        self.tables.setdefault(table, []).extend(rows.to_pylist())

    def take(self) -> dict[str, list[dict[str, Any]]]:
        tables, self.tables = self.tables, {}
        return tables


def job(gpu: FakeGpu) -> list[int]:
    """Launches of every sort, and a record of a kind that the decoder does not know."""
    fake = gpu.cupti
    fake.sizes[UNKNOWN_KIND] = 56
    fake.enabled.add(UNKNOWN_KIND)
    with recorder.annotate("step"):
        calls = [gpu.launch("a"), gpu.launch("a"), gpu.launch("b", call="cuLaunchKernelEx")]
        fake.emit(fake_records.foreign(UNKNOWN_KIND, 56))
        calls += [gpu.launch_graph(0xA, ["n"]) for _ in range(3)]
        gpu.copy(10)
    return calls


@pytest.mark.parametrize("function", [name for name in FUNCTIONS if name not in NOT_USED])
def test_no_error_of_cupti_reaches_the_job_or_the_other_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], function: str
) -> None:
    memory = Memory(monkeypatch)
    monkeypatch.setattr(cupti, "CBID_RUNTIME_BOUND", 320)  # of 1000: most calls of a recording are for these
    monkeypatch.setattr(session.device, "synchronize", lambda: None)
    for code in sorted(ERROR_CODES):
        gpu = FakeGpu()
        with monkeypatch.context() as patch:
            gpu.install(patch)
            gpu.cupti.fail(function, code)
            with recorder.record(tmp_path / "run", append=True, exact=exact()) as rec:
                calls = job(gpu)
            gpu.close()
        assert rec.is_stopped
        assert gpu.cupti.calls[function] > 0, "the test does not reach this function"
        check_what_was_kept(function, memory.take(), calls)
        check_what_was_said(function, code, capsys.readouterr().err)


def test_no_error_of_shutting_cupti_down_reaches_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = Memory(monkeypatch)
    for code in sorted(ERROR_CODES):
        gpu = FakeGpu()
        with monkeypatch.context() as patch:
            gpu.install(patch)
            gpu.cupti.fail("cuptiFinalize", code)
            with recorder.record(tmp_path / "run", append=True, detach=True, nvtx=False):
                call = gpu.launch("a")
            assert gpu.cupti.calls["cuptiFinalize"] == 1
            with recorder.record(tmp_path / "run", append=True, nvtx=False):  # CUPTI is as it was
                second = gpu.launch("a")
            gpu.close()
        assert [row["correlation_id"] for row in memory.take()["kernels"]] == [call, second]
        assert capsys.readouterr().err == ""


def check_what_was_kept(function: str, tables: dict[str, list[dict[str, Any]]], calls: list[int]) -> None:
    assert [row["name"] for row in tables["ranges"]] == ["step"]
    assert [row["ending"] for row in tables["processes"]] == [None, "stop"]
    kernels = [row["correlation_id"] for row in tables.get("kernels", [])]
    if function in ENDS_TIMELINE:
        assert kernels == []
        assert tables["processes"][1]["layers"] == "device_state,ranges"
    elif function not in LOSES_RECORDS:
        if function != "cuptiActivityGetNextRecord":
            assert kernels == calls
            assert len(tables["copies"]) == 1
        assert len(tables["devices"]) == 1
        assert len(tables["device_state"]) >= 1
    messages = [row["message"] for row in tables.get("events", []) if row["kind"] in ("failure", "loss")]
    if function == "cuptiActivityGetNextRecord":
        assert messages == ["bytes of activity buffers that could not be decoded"]
    elif function not in QUIET:
        unfinished = "graphs that were not launched often enough for all passes"
        assert len([text for text in messages if text != unfinished]) == (2 if function in ENDS_TIMELINE else 1)


def check_what_was_said(function: str, code: int, said: str) -> None:
    lines = said.splitlines()
    assert all(line.startswith("nanalyze: ") for line in lines)
    naming = [line for line in lines if function in line]
    if function == ASKS_FOR_METRICS and code in NO_SUCH_METRIC:
        assert lines == ["nanalyze: exact counters stopped: this GPU offers none of the requested metrics"]
        return
    if function in QUIET:
        assert lines == []
        return
    assert len(naming) == 1
    assert f"CUPTI_ERROR_{ERROR_CODES[code]} ({code})" in naming[0]
    others = [line for line in lines if line not in naming]
    allowed = ["nanalyze: exact is off: it needs the timeline, which tells the launches' kernel classes"]
    assert others == (allowed if function in ENDS_TIMELINE else [])


@pytest.mark.parametrize("function", [name for name in FUNCTIONS if name not in NOT_USED])
def test_no_function_that_an_older_cupti_lacks_reaches_the_job(
    gpu: FakeGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str], function: str
) -> None:
    gpu.cupti.remove(function)
    run_dir = tmp_path / "run"
    with recorder.record(run_dir, exact=exact()):
        job(gpu)
    assert [row["name"] for row in read_table(run_dir, "ranges")] == ["step"]
    assert final_process(run_dir)["ending"] == "stop"
    lines = capsys.readouterr().err.splitlines()
    assert not any("internal error" in line for line in lines)
    assert all(line.startswith("nanalyze: ") for line in lines)


@pytest.mark.parametrize("at", [2, 3, 5, 8])
@pytest.mark.parametrize(
    "function", ["cuptiRangeProfilerStart", "cuptiRangeProfilerStop", "cuptiRangeProfilerSetConfig"]
)
def test_a_failure_in_mid_run_keeps_what_came_before(
    gpu: FakeGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str], function: str, at: int
) -> None:
    run_dir = tmp_path / "run"
    gpu.cupti.fail(function, 9, at=at)
    with recorder.record(run_dir, exact=exact(first=10)):
        calls = [gpu.launch("a") for _ in range(12)]
    assert [row["correlation_id"] for row in read_table(run_dir, "kernels")] == calls
    rows = read_table(run_dir, "exact")
    assert {row["correlation_id"] for row in rows} <= set(calls[: at - 1])
    assert len(rows) % len(METRICS) == 0
    assert (len(rows) > 0) == (at > 2 or function != "cuptiRangeProfilerSetConfig")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"nanalyze: exact counters stopped: {function} failed: CUPTI_ERROR_HARDWARE (9): check the GPU"
    )


# --- no GPU -----------------------------------------------------------------------------------


def hide_library(patch: pytest.MonkeyPatch, hidden: str) -> None:
    real = ctypes.CDLL

    def open_library(name: Any, *args: Any, **kwargs: Any) -> Any:
        if name is not None and hidden in str(name):
            raise OSError(f"{name}: cannot open shared object file: No such file or directory")
        return real(name, *args, **kwargs)

    patch.setattr(ctypes, "CDLL", open_library)


def test_without_a_driver_there_is_one_line_and_a_readable_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide_library(monkeypatch, "libcuda")
    run_dir = tmp_path / "run"
    with recorder.record(run_dir, exact=exact()), recorder.annotate("cpu"):
        pass
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nanalyze: no kernels can be recorded here, there is no NVIDIA driver (libcuda.so.1: ")
    assert [row["name"] for row in read_table(run_dir, "ranges")] == ["cpu"]
    (event,) = read_table(run_dir, "events")
    assert (event["kind"], f"nanalyze: {event['message']}") == ("failure", line)
    assert final_process(run_dir)["layers"] == "ranges"
    with analysis.open(run_dir) as run:
        assert len(run.damage()) == 0


def test_without_cupti_there_is_one_line_that_says_how_to_get_it(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANALYZE_CUPTI", "/nowhere/libcupti.so.13")
    with recorder.record(tmp_path / "run"):
        gpu.launch()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "nanalyze: timeline is off: libcupti was not found. Install it with `pip install nvidia-cuda"
    )
    assert line.endswith("these did not load: /nowhere/libcupti.so.13")


def test_without_nvml_the_rest_is_recorded(gpu: FakeGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.nvml.broken = {"init_v2"}
    run_dir = tmp_path / "run"
    with recorder.record(run_dir):
        gpu.launch()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nanalyze: device_state is off: NVML does not work here")
    assert len(read_table(run_dir, "kernels")) == 1
    assert read_table(run_dir, "devices")[0]["sm_count"] == 132
    assert read_table(run_dir, "device_state") == []


def test_a_driver_that_does_not_answer_costs_the_devices_alone(
    gpu: FakeGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.bindings.codes = {"cuDeviceGetName": 999}
    run_dir = tmp_path / "run"
    with recorder.record(run_dir):
        gpu.launch()
    assert len(read_table(run_dir, "kernels")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nanalyze: devices are not described: the CUDA driver answered CUDA_ERROR_999")


# --- losses -----------------------------------------------------------------------------------


def test_records_that_cupti_dropped_are_counted_in_the_run(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "FULL_BYTES", 0)  # nothing can wait: every request is refused
    run_dir = tmp_path / "run"
    with recorder.record(run_dir):
        for _ in range(7):
            gpu.launch()
        gpu.cupti.settle()
    end = final_process(run_dir)
    assert (end["kernels_written"], end["records_lost"]) == (0, 7)
    events = {row["message"]: row["count"] for row in read_table(run_dir, "events")}
    assert events["records dropped by CUPTI, in all"] == 7
    assert events["times CUPTI found no free buffer: the recorder could not keep up"] == 7


def test_impossible_times_are_noted(gpu: FakeGpu, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with recorder.record(run_dir):
        gpu.launch(start=5, end=4)
    (event,) = read_table(run_dir, "events")
    assert (event["kind"], event["count"]) == ("odd_record", 1)
    assert read_table(run_dir, "kernels")[0]["duration_ns"] is None


# --- the disk ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("_often")
def test_a_disk_that_is_full_for_a_while_costs_nothing(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    write, failures = shards.write_shard, []

    def full(*args: Any) -> Any:
        if len(failures) < 3:
            failures.append(args[1])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args)

    with recorder.record(run_dir, flush_s=0.05) as rec:
        monkeypatch.setattr(shards, "write_shard", full)
        calls = [gpu.launch() for _ in range(5)]
        gpu.cupti.settle()
        until(lambda: len(failures) == 3)
        calls.append(gpu.launch())
    assert rec.is_stopped
    assert [row["correlation_id"] for row in read_table(run_dir, "kernels")] == calls
    assert len(read_table(run_dir, "processes")) == 2
    assert shards_claimed(run_dir) == shards_on_disk(run_dir)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"nanalyze: {run_dir}: cannot write (No space left on device); recording goes on in memory"
    assert any(line.endswith(row["message"]) for row in read_table(run_dir, "events"))


def test_a_disk_that_stays_full_ends_in_one_line_and_no_exception(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shards, "write_shard", full)
    with recorder.record(tmp_path / "run"):
        gpu.launch()
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot write (No space left on device)" in line


def test_a_directory_that_cannot_be_made_is_refused_before_anything_starts(gpu: FakeGpu, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError) as caught:
        recorder.record(tmp_path / "file" / "run")
    assert str(caught.value).startswith(f"{tmp_path}/file/run: cannot create the run directory: ")
    assert gpu.cupti.log == []
    with recorder.record(tmp_path / "run"):  # and nothing is in the way of the next
        pass


def test_a_directory_removed_in_mid_run_is_survived(
    gpu: FakeGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    with recorder.record(run_dir):
        for path in sorted(run_dir.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        run_dir.rmdir()
        run_dir.write_text("a file now")
        gpu.launch()
    assert "cannot write" in capsys.readouterr().err


def test_a_closed_stderr_is_nobodys_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_library(monkeypatch, "libcuda")
    monkeypatch.setattr(sys, "stderr", None)
    with recorder.record(tmp_path / "run"):
        pass
    assert final_process(tmp_path / "run")["ending"] == "stop"


# --- starting and stopping --------------------------------------------------------------------


@pytest.mark.usefixtures("_often")
def test_data_is_on_disk_while_the_job_runs(gpu: FakeGpu, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with recorder.record(run_dir, flush_s=0.1):
        with recorder.annotate("early"):
            call = gpu.launch()
        until(lambda: shard_paths(run_dir, "kernels") and shard_paths(run_dir, "ranges"))
        assert [row["correlation_id"] for row in read_table(run_dir, "kernels")] == [call]


def test_a_short_flush_period_is_kept(gpu: FakeGpu, tmp_path: Path) -> None:
    """`flush_s` is the most that a kill -9 can cost."""
    run_dir = tmp_path / "run"
    with recorder.record(run_dir, flush_s=0.1):
        time.sleep(0.15)
        with recorder.annotate("quick"):
            pass
        until(lambda: shard_paths(run_dir, "ranges"), seconds=0.6)


@pytest.mark.usefixtures("_often")
def test_device_state_is_followed_about_once_a_second(gpu: FakeGpu, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with recorder.record(run_dir, flush_s=0.05):
        gpu.launch()
        until(lambda: len(read_table(run_dir, "device_state")) >= 3)
    times = [row["time_ns"] for row in read_table(run_dir, "device_state")]
    assert times == sorted(times)
    assert len(read_table(run_dir, "devices")) == 1


def test_two_recordings_at_once_are_refused(gpu: FakeGpu, tmp_path: Path) -> None:
    with recorder.record(tmp_path / "first"):
        with pytest.raises(RecorderError) as caught:
            recorder.record(tmp_path / "second")
        call = gpu.launch()
    assert str(caught.value) == f"already recording into {tmp_path}/first: stop that first"
    assert not (tmp_path / "second").exists()
    assert [row["correlation_id"] for row in read_table(tmp_path / "first", "kernels")] == [call]


def test_recordings_can_follow_each_other(gpu: FakeGpu, tmp_path: Path) -> None:
    calls = []
    for number in range(3):
        recorder.start(tmp_path / f"{number}", exact=exact())
        with recorder.annotate(f"range {number}"):
            calls.append(gpu.launch("a"))
        recorder.stop()
        gpu.launch("between")
    for number in range(3):
        run_dir = tmp_path / f"{number}"
        assert [row["correlation_id"] for row in read_table(run_dir, "kernels")] == [calls[number]]
        assert [row["name"] for row in read_table(run_dir, "ranges")] == [f"range {number}"]
        assert [row["name"] for row in read_table(run_dir, "kernel_classes")] == ["a"]
        assert {row["correlation_id"] for row in read_table(run_dir, "exact")} == {calls[number]}


def test_stopping_twice_or_without_a_recording_does_nothing(gpu: FakeGpu, tmp_path: Path) -> None:
    recorder.stop()
    rec = recorder.start(tmp_path / "run")
    recorder.stop()
    recorder.stop()
    rec.stop()
    assert len(read_table(tmp_path / "run", "processes")) == 2


def test_stop_from_another_thread(gpu: FakeGpu, tmp_path: Path) -> None:
    rec = recorder.start(tmp_path / "run")
    call = gpu.launch()
    _in_thread(rec.stop)
    assert [row["correlation_id"] for row in read_table(tmp_path / "run", "kernels")] == [call]


def test_an_exception_in_the_block_comes_out_and_the_data_stays(gpu: FakeGpu, tmp_path: Path) -> None:
    def work() -> None:
        with recorder.record(tmp_path / "run"):
            gpu.launch()
            raise KeyError("the job's own")

    with pytest.raises(KeyError, match="the job's own"):
        work()
    assert len(read_table(tmp_path / "run", "kernels")) == 1
    assert final_process(tmp_path / "run")["ending"] == "failed"


def test_an_error_of_its_own_thread_is_said_once_and_it_goes_on(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "TICK_S", 0.03)
    run_dir = tmp_path / "run"
    with recorder.record(run_dir) as rec:
        observe, times = rec._observe_devices, []

        def broken() -> None:
            times.append(1)
            if len(times) < 4:
                raise ValueError("a bug")
            observe()

        monkeypatch.setattr(rec, "_observe_devices", broken)
        gpu.launch()
        until(lambda: len(times) >= 5)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "nanalyze: internal error, please report it: ValueError: a bug"
    assert len(read_table(run_dir, "kernels")) == 1


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"layers": ("timeline", "smell")}, "unknown layer 'smell': the layers are timeline, ranges, device_state"),
        ({"flush_s": 0}, "flush_s=0: must be above 0 seconds"),
        ({"flush_s": -1}, "flush_s=-1: must be above 0 seconds"),
        ({"flush_s": float("nan")}, "flush_s=nan: must be above 0 seconds"),
        ({"flush": 3}, "unknown setting"),
        ({"flush_s": "often"}, "flush_s='often'"),
        ({"exact": "gemm"}, "exact='gemm'"),
        ({"layers": "timeline"}, "layers='timeline'"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(tmp_path: Path, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(RecorderError) as caught:
        recorder.record(tmp_path / "run", **settings)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


# --- the run directory and its processes ------------------------------------------------------


def test_a_directory_that_holds_a_run_is_refused(gpu: FakeGpu, tmp_path: Path) -> None:
    with recorder.record(tmp_path / "run"):
        gpu.launch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RecorderError) as caught:
        recorder.record(tmp_path / "run")
    assert str(caught.value) == (
        f"{tmp_path}/run: already holds a run. Choose another directory, or pass append=True to add to it."
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_append_adds_a_process(gpu: FakeGpu, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    for append in (False, True, True):
        with recorder.record(run_dir, append=append):
            gpu.launch()
    name = f"{socket.gethostname()}-0-{os.getpid()}".replace("-", "-")
    found = sorted(path.name for path in (run_dir / "processes").iterdir())
    assert [folder.removeprefix("process=")[-2:] for folder in found][1:] == [".2", ".3"]
    assert found[0].endswith(name.split("-")[-1])
    assert len(read_table(run_dir, "kernels")) == 3
    assert len(json.loads((run_dir / "run.json").read_text())) > 0


def test_processes_with_the_same_name_get_parts_of_their_own(gpu: FakeGpu, tmp_path: Path) -> None:
    """Containers may share host name, rank and pid; the names are taken before anything is written."""
    recording = recorder.record(tmp_path / "run")
    barrier, names = threading.Barrier(8), []

    def claim() -> None:
        barrier.wait(10)
        names.append(recording._claim_partition())

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recording.stop()
    own = f"{socket.gethostname()}-0-{os.getpid()}"
    assert sorted(names) == [f"{own}.{number}" for number in range(2, 10)]
    with analysis.open(tmp_path / "run") as run:  # parts without a row are nothing to a reader
        assert (len(run.sql("SELECT * FROM processes")), run.damage_count) == (1, 0)


def test_a_job_may_change_its_directory(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with recorder.record("run", flush_s=0.05):
        (tmp_path / "elsewhere").mkdir()
        os.chdir("elsewhere")
        call = gpu.launch()
    assert [row["correlation_id"] for row in read_table(tmp_path / "run", "kernels")] == [call]
    assert os.listdir(tmp_path / "elsewhere") == []


def test_what_goes_wrong_in_mid_run_is_said_then(gpu: FakeGpu, tmp_path: Path, capsys: Any) -> None:
    gpu.cupti.fail("cuptiActivityFlushAll", 999)
    with recorder.record(tmp_path / "run", flush_s=0.05):
        gpu.launch()
        until(lambda: "the last launches may be missing" in capsys.readouterr().err)


def test_a_directory_that_is_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(NanalyzeError) as caught:
        recorder.record(tmp_path)
    assert "has no run.json" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_empty_directory_is_used(gpu: FakeGpu, tmp_path: Path) -> None:
    with recorder.record(tmp_path):
        gpu.launch()
    assert len(read_table(tmp_path, "kernels")) == 1


def test_processes_of_the_same_job_share_a_run(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with recorder.record(tmp_path / "run"):
            gpu.launch()
    rows = read_table(tmp_path / "run", "processes")
    assert sorted({(row["rank"], row["world_size"]) for row in rows}) == [(0, 2), (1, 2)]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-2")
    with pytest.raises(RecorderError):
        recorder.record(tmp_path / "run")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, (3, 1, 8)),
        ({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_SIZE": "6"}, (5, 2, 6)),
        ({"PMI_RANK": "1", "MPI_LOCALRANKID": "0", "PMI_SIZE": "4"}, (1, 0, 4)),
        ({"SLURM_PROCID": "7", "SLURM_LOCALID": "3", "SLURM_NTASKS": "16"}, (7, 3, 16)),
        ({"RANK": "2", "SLURM_PROCID": "9"}, (2, None, None)),
        ({"RANK": "", "WORLD_SIZE": "many"}, (None, None, None)),
        ({"RANK": "-1", "LOCAL_RANK": "1.5", "WORLD_SIZE": "²"}, (None, None, None)),
    ],
)
def test_ranks_come_from_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: tuple[Any, ...]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with recorder.record(tmp_path / "run", layers=()):
        pass
    end = final_process(tmp_path / "run")
    assert (end["rank"], end["local_rank"], end["world_size"]) == expected
    (folder,) = (tmp_path / "run" / "processes").iterdir()
    assert folder.name.split("-")[-2] == str(expected[0] or 0)


def test_a_strange_host_name_is_a_usable_partition(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "nöde 7/../x")
    with recorder.record(tmp_path / "run"):
        gpu.launch()
    (folder,) = (tmp_path / "run" / "kernels").iterdir()
    assert folder.name == f"process=n_de_7_.._x-0-{os.getpid()}"
    assert final_process(tmp_path / "run")["host"] == "nöde 7/../x"


def test_importing_and_recording_leave_signal_handlers_alone(gpu: FakeGpu, tmp_path: Path) -> None:
    import signal

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with recorder.record(tmp_path / "run"):
        assert {number: signal.getsignal(number) for number in before} == before
    assert lifecycle._is_installed
