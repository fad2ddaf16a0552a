"""The Kineto importer: every value against what was put into the trace, or an independent reading of it."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Callable
from decimal import Decimal
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw
from scripts import benchmark

from nanalyze.importers import kineto, kineto_json, kineto_numbers, kineto_spool, kineto_stream, registry
from nanalyze.importers.kineto_clock import Collectives, offsets
from nanalyze.importers.kineto_ranges import nest
from nanalyze.importers.options import ImportFailed, Limits, Options
from nanalyze.importers.sink import ImportSummary, Sink

REPOSITORY = Path(__file__).resolve().parent.parent
REAL_TRACES = Path(os.environ.get("NANALYZE_REAL_TRACES") or REPOSITORY.parent / "shared" / "real-traces") / "kineto"
BASE = 1_700_000_000_000_000_000

make_kineto = benchmark("make_kineto")

Row = dict[str, Any]


# --- traces for the tests ----------------------------------------------------------------------------


def kernel(name: str = "gemm", ts: Any = 100.5, dur: Any = 2.25, correlation: int = 1, **args: Any) -> Row:
    told = {"device": 0, "context": 1, "stream": 7, "correlation": correlation, "registers per thread": 32}
    shape = {"shared memory": 1024, "grid": [4, 2, 1], "block": [128, 1, 1]}
    args = {name: value for name, value in {**told, **shape, **args}.items() if value is not ...}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur, "args": args}


def call(name: str = "cudaLaunchKernel", ts: Any = 50.001, correlation: int = 1, **args: Any) -> Row:
    args = {"External id": 9, "cbid": 211, "correlation": correlation, **args}
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": 77, "tid": 78, "ts": ts, "dur": 3.5, "args": args}


def annotation(name: str, ts: float, dur: float, tid: int = 78, **args: Any) -> Row:
    args = {"External id": 1, "Ev Idx": 0, **args}
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": name,
        "pid": 77,
        "tid": tid,
        "ts": ts,
        "dur": dur,
        "args": args,
    }


def trace(events: list[Row], **members: Any) -> bytes:
    return json.dumps({"schemaVersion": 1, "traceEvents": events, "baseTimeNanoseconds": BASE, **members}).encode()


class Imported:
    """A finished import: its summary and its tables."""

    def __init__(self, run_dir: Path, summary: ImportSummary) -> None:
        self.run_dir = run_dir
        self.summary = summary

    def rows(self, table: str, columns: str = "*", order: str = "ALL") -> list[Any]:
        if not (self.run_dir / table).exists():
            return []
        query = f"SELECT {columns} FROM read_parquet('{self.run_dir}/{table}/*/*.parquet') ORDER BY {order}"
        with duckdb.connect() as connection:
            return [row[0] if len(row) == 1 else row for row in connection.execute(query).fetchall()]


Import = Callable[..., Imported]


@pytest.fixture
def imported(tmp_path: Path) -> Import:
    """Imports bytes (or several, one a file) and gives the run."""
    numbers = iter(range(1000))

    def run(*contents: bytes, names: tuple[str, ...] = (), options: Options | None = None) -> Imported:
        folder = tmp_path / f"import{next(numbers)}"
        folder.mkdir()
        paths = []
        for index, content in enumerate(contents):
            paths.append(folder / (names[index] if names else f"trace{index}.json"))
            paths[-1].write_bytes(content)
        return import_paths(paths, folder / "run", options)

    return run


def import_paths(paths: list[Path], run_dir: Path, options: Options | None = None) -> Imported:
    with Sink(run_dir, "kineto", paths) as sink:
        kineto.read(paths, sink, options or Options(), lambda done, total: None)
        return Imported(run_dir, sink.commit())


# --- what is read ------------------------------------------------------------------------------------


def test_a_kernel_and_its_launch_call(imported: Import) -> None:
    run = imported(trace([kernel(), call()], distributedInfo={"rank": 3, "world_size": 8}))
    columns = "start_ns, duration_ns, queued_ns, device_id, context_id, stream_id, correlation_id, graph_id"
    assert run.rows("kernels", columns) == [(BASE + 100_500, 2_250, BASE + 50_001, 0, 1, 7, 1, None)]
    columns = "name, grid_x, grid_y, grid_z, block_x, registers_per_thread, static_shared_bytes + dynamic_shared_bytes"
    assert run.rows("kernel_classes", columns) == [("gemm", 4, 2, 1, 128, 32, 1024)]
    assert run.rows("processes", "rank, world_size, pid, kernels_written") == [(3, 8, 77, 1)]
    assert run.summary.kernel_ns == 2_250
    assert run.summary.read == {"kernel events": 1, "cuda_runtime events": 1}
    assert run.summary.refused == {}


def test_a_kernel_without_a_launch_call_has_no_queued_time(imported: Import) -> None:
    run = imported(trace([kernel(correlation=1), kernel(correlation=5), call(correlation=1)]))
    assert run.rows("kernels", "correlation_id, queued_ns") == [(1, BASE + 50_001), (5, None)]
    assert run.summary.read["kernels without their launch call"] == 1


def test_a_launch_call_after_its_kernel_is_not_believed(imported: Import) -> None:
    run = imported(trace([kernel(ts=10.0), call(ts=20.0)]))
    assert run.rows("kernels", "queued_ns") == [None]
    assert run.summary.refused == {"launch calls later than their kernel's start": 1}


def test_kernels_of_one_graph_launch_share_its_call(imported: Import) -> None:
    nodes = [kernel(f"k{n}", ts=100.0 + n, correlation=9, **{"graph id": 4, "graph node id": 40 + n}) for n in range(3)]
    run = imported(trace([*nodes, call("cudaGraphLaunch", correlation=9)]))
    columns = "correlation_id, queued_ns, graph_id, graph_node_id"
    assert run.rows("kernels", columns) == [(9, BASE + 50_001, 4, 40 + n) for n in range(3)]
    assert run.summary.read["kernels in graphs"] == 3


def test_a_bare_array(imported: Import) -> None:
    run = imported(json.dumps([kernel(ts=5), call(ts=1)]).encode())
    assert run.rows("kernels", "start_ns, duration_ns, queued_ns") == [(5_000, 2_250, 1_000)]
    assert any("its times are not dates" in note for note in run.summary.notes)


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1679055451546825.123", 1_679_055_451_546_825_123),  # as float64: ...825.0 or ...825.25
        ('"1679055451546825.123"', 1_679_055_451_546_825_123),
        ('"1679055451546825123"', 1_679_055_451_546_825_123),  # nanoseconds
        ("1679055451546825123", 1_679_055_451_546_825_123),
        ("1679055451546825", 1_679_055_451_546_825_000),
        ("0.001", 1),
        ("-0.5", -500),
        ("-12.345", -12_345),
        ("7", 7_000),
        ("7.1", 7_100),
        ("7.12", 7_120),
        ("2.0000000004", 2_000),
        ("2.0005", 2_000),  # half to even
        ("2.0015", 2_002),
        ("1.5e3", 1_500_000),
        ("1e400", None),
        ("null", None),
        ('"soon"', None),
        ("", None),
        ("[1]", None),
    ],
)
def test_times_keep_every_nanosecond(text: str, ns: int | None) -> None:
    assert kineto_numbers.ns_of(text.encode()) == ns
    values, missing = kineto_numbers.exact_ns([Raw(text.encode())] * 2)
    assert [None if gone else value for value, gone in zip(values.tolist(), missing, strict=True)] == [ns, ns]


@pytest.mark.parametrize(
    ("ts", "dur", "start_ns", "duration_ns"),
    [
        ('"1679055451546825123"', '"2049"', 1_679_055_451_546_825_123, 2_049),  # both are nanoseconds
        ("1679055451546825123", "2049", 1_679_055_451_546_825_123, 2_049),
        ("1679055451546825123", "2.049", 1_679_055_451_546_825_123, 2_049),  # a fraction says microseconds
        ("1679055451546825", "2049", 1_679_055_451_546_825_000, 2_049_000),
        ('"1679055451546825.123"', '"2"', 1_679_055_451_546_825_123, 2_000),
        ("12.345", "2", 12_345, 2_000),
        ("1679055451546825123", "-5", 1_679_055_451_546_825_123, None),
    ],
)
def test_durations_count_in_the_unit_of_their_start(
    imported: Import, ts: str, dur: str, start_ns: int, duration_ns: int | None
) -> None:
    text = json.dumps([kernel(ts=-77, dur=-88), {**kernel(ts=5, dur=1.5), "name": "other"}])
    text = text.replace('"ts": -77', f'"ts": {ts}').replace('"dur": -88', f'"dur": {dur}')
    annotation = f'{{"ph": "X", "cat": "user_annotation", "name": "r", "tid": 1, "ts": {ts}, "dur": {dur}}}'
    run = imported((text[:-1] + f", {annotation}]").encode())
    assert run.rows("kernels", "start_ns, duration_ns") == [(5_000, 1_500), (start_ns, duration_ns)]
    end_ns = None if duration_ns is None else start_ns + duration_ns
    assert run.rows("ranges", "start_ns, end_ns") == [(start_ns, end_ns)]


def test_whole_microseconds_since_1970_are_read_all_at_once() -> None:
    texts = [Raw(b"1740461679479712"), Raw(b"1740461679479716")]
    assert kineto_numbers._regular(texts).tolist() == [1_740_461_679_479_712_000, 1_740_461_679_479_716_000]
    assert kineto_numbers._regular([Raw(b"9999999999999999")]) is None  # beyond 2**62 ns


@given(st.lists(st.tuples(st.integers(-(2**59), 2**59), st.sampled_from(["f3", "f2", "whole", "text"])), min_size=1))
def test_times_equal_decimal_arithmetic(values: list[tuple[int, str]]) -> None:
    texts = [_written(ns, how) for ns, how in values]
    got, missing = kineto_numbers.exact_ns([Raw(text.encode()) for text in texts])
    assert not missing.any()
    assert got.tolist() == [_by_decimal(text) for text in texts]


def _written(ns: int, how: str) -> str:
    sign, ns = "-" * (ns < 0), abs(ns)
    if how == "whole":
        return f"{sign}{ns // 1000}"
    us = f"{sign}{ns // 1000}.{ns % 1000:03d}" if how != "f2" else f"{sign}{ns // 1000}.{ns % 100:02d}"
    return f'"{us}"' if how == "text" else us


def _by_decimal(text: str) -> int:
    return int(Decimal(text.strip('"')) * 1000)


def test_absolute_times_get_no_base_time_on_top(imported: Import) -> None:
    run = imported(trace([kernel(ts=1679055451546825)]))
    assert run.rows("kernels", "start_ns") == [1_679_055_451_546_825_000]
    assert any("baseTimeNanoseconds was not added" in note for note in run.summary.notes)


def test_base_time_behind_or_before_the_events(imported: Import) -> None:
    events = json.dumps([kernel(ts=1)])
    before = f'{{"baseTimeNanoseconds": {BASE}, "traceEvents": {events}}}'
    behind = f'{{"traceEvents": {events}, "deviceProperties": [{{}}, {{"ph": 1}}], "baseTimeNanoseconds": "{BASE}"}}'
    for text in (before, behind):
        assert imported(text.encode()).rows("kernels", "start_ns") == [BASE + 1_000]


def test_amd_streams_as_text_and_no_grid(imported: Import) -> None:
    bare = {"grid": ..., "block": ..., "shared memory": ..., "registers per thread": ..., "context": ...}
    run = imported(
        trace(
            [
                kernel("Cijk", correlation=1, stream="0x1f", **bare),
                kernel("Cijk", correlation=2, stream="hip stream", **bare),
                kernel("Cijk", correlation=3, stream="hip stream", **bare),
                call("hipExtModuleLaunchKernel", correlation=2, stream="0x0"),
                {
                    **kernel(correlation=4, stream=0, kind="HtoD", **bare),
                    "cat": "gpu_memcpy",
                    "name": "Memcpy HtoD (Host -> Device)",
                },
                call("hipMemcpyWithStream", correlation=4, size="2560"),
            ],
            deviceProperties=[_device(0, name="AMD Instinct MI210", warpSize=64)],
        )
    )
    streams = run.rows("kernels", "stream_id", "correlation_id")
    assert streams[0] == 31
    assert streams[1] == streams[2] > 2**32
    assert run.rows("kernels", "queued_ns", "correlation_id") == [None, BASE + 50_001, None]
    columns = "grid_x, block_x, registers_per_thread, static_shared_bytes, dynamic_shared_bytes"
    assert run.rows("kernel_classes", columns) == [(0, 0, None, None, None)]
    assert run.rows("copies", "kind, source, destination, bytes") == [("HtoD", "host", "device", 2560)]
    # AMD's 9.0 is no Hopper.
    assert run.rows("devices", "warp_size, fp32_flops_per_sm_cycle") == [(64, None)]


def _device(id_: int, **changes: Any) -> Row:
    return {
        "id": id_,
        "name": "NVIDIA H100",
        "totalGlobalMem": 85 * 10**9,
        "computeMajor": 9,
        "computeMinor": 0,
        "maxThreadsPerMultiprocessor": 2048,
        "regsPerMultiprocessor": 65536,
        "warpSize": 32,
        "sharedMemPerMultiprocessor": 233472,
        "numSms": 132,
        **changes,
    }


def test_device_properties(imported: Import) -> None:
    run = imported(trace([kernel()], deviceProperties=[_device(0), _device(1, numSms=114), {"id": 2}, "junk"]))
    columns = "device_id, name, cc_major, sm_count, warp_size, threads_per_sm_max, registers_per_sm, memory_bytes"
    assert run.rows("devices", columns) == [
        (0, "NVIDIA H100", 9, 132, 32, 2048, 65536, 85 * 10**9),
        (1, "NVIDIA H100", 9, 114, 32, 2048, 65536, 85 * 10**9),
    ]
    assert run.rows("devices", "fp32_flops_per_sm_cycle", "device_id") == [256.0, 256.0]


def test_copies_and_sets(imported: Import) -> None:
    def copy(name: str, category: str, **args: Any) -> Row:
        return {**kernel(ts=1, dur=2, bytes=512, **args), "cat": category, "name": name}

    run = imported(
        trace(
            [
                kernel(),
                copy("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", correlation=1),
                copy("Memcpy PtoP (Device -> Device)", "gpu_memcpy", correlation=2, fromDevice=1, toDevice=3),
                copy("Memset (Device)", "gpu_memset", correlation=3),
            ]
        )
    )
    columns = "kind, source, destination, source_device_id, destination_device_id, bytes, start_ns, duration_ns"
    assert run.rows("copies", columns, "correlation_id") == [
        ("HtoD", "pinned", "device", None, None, 512, BASE + 1_000, 2_000),
        ("PtoP", "device", "device", 1, 3, 512, BASE + 1_000, 2_000),
        ("memset", None, "device", None, None, 512, BASE + 1_000, 2_000),
    ]


def test_annotations_become_ranges_with_parents(imported: Import) -> None:
    run = imported(
        trace(
            [
                annotation("forward", 10, 20),
                annotation("ProfilerStep#1", 0, 100),
                annotation("other thread", 15, 5, tid=99),
                annotation("attention", 12, 3, **{"flops": 5, "Input Dims": [[1]]}),
                kernel(),
            ]
        )
    )
    by_name = {
        row[0]: row[1:] for row in run.rows("ranges", "name, range_id, parent_id, depth, start_ns, end_ns, attributes")
    }
    step, forward, attention = by_name["ProfilerStep#1"], by_name["forward"], by_name["attention"]
    assert step[1:] == (None, 0, BASE, BASE + 100_000, None)
    assert forward[1:] == (step[0], 1, BASE + 10_000, BASE + 30_000, None)
    assert attention[1:] == (forward[0], 2, BASE + 12_000, BASE + 15_000, '{"flops": 5}')
    assert by_name["other thread"][1:3] == (None, 0)


def test_nesting_needs_the_whole_of_a_range() -> None:
    import numpy as np

    def rows(*values: int) -> Any:
        return np.array(values, np.int64)

    # 1 overlaps the end of 0, 2 begins where 1 ends, 3 and 4 are equal.
    parents, depths = nest(rows(1, 1, 1, 1, 1), rows(0, 5, 15, 20, 20), rows(10, 15, 30, 25, 25))
    assert parents.tolist() == [-1, -1, -1, 2, 3]
    assert depths.tolist() == [0, 0, 0, 1, 2]


COLLECTIVE = {"Collective name": "allreduce", "dtype": "BFloat16", "In msg nelems": 64, "Process Group Name": "0"}


def test_collective_metadata_is_kept_where_it_was_launched(imported: Import) -> None:
    run = imported(trace([kernel("ncclDevKernel_AllReduce", **COLLECTIVE), call()]))
    columns = "name, source, start_ns, end_ns, attributes"
    ((name, source, start, end, attributes),) = run.rows("ranges", columns)
    assert (name, source, start, end) == ("allreduce", "collective", BASE + 50_001, BASE + 50_002)
    assert json.loads(attributes) == COLLECTIVE


def test_collective_metadata_of_an_operator_is_not_repeated_for_its_kernel(imported: Import) -> None:
    operator = {**annotation("record_param_comms", 40, 30, **COLLECTIVE, **{"Input Dims": [[4]]}), "cat": "cpu_op"}
    run = imported(trace([operator, kernel("ncclDevKernel_AllReduce", **COLLECTIVE), call()]))
    assert run.rows("ranges", "name, thread_id, start_ns, end_ns") == [("allreduce", 78, BASE + 40_000, BASE + 70_000)]
    assert json.loads(run.rows("ranges", "attributes")[0]) == COLLECTIVE


def test_counters_of_profiler_ranges(imported: Import) -> None:
    def measured(name: str, ts: int, **metrics: Any) -> Row:
        args = {metric.replace("__sum", ".sum"): value for metric, value in metrics.items()}
        return {
            "ph": "X",
            "cat": "cuda_profiler_range",
            "name": name,
            "pid": 1,
            "tid": 0,
            "ts": ts,
            "dur": 5,
            "args": args,
        }

    run = imported(
        trace(
            [
                measured("gemm", 10, dram__bytes__sum=4096, inst__sum=1.5, bad__sum="nan"),
                measured("__missing__", 20, dram__bytes__sum=1),
                measured("gemm", 30, dram__bytes__sum=2**53),
            ]
        )
    )
    columns = "c.name, e.scope, e.device_id, e.correlation_id, e.metric, e.value, e.measured_ns"
    joined = (
        f"'{run.run_dir}/exact/*/*.parquet' e JOIN '{run.run_dir}/kernel_classes/*/*.parquet' c USING (kernel_class_id)"
    )
    with duckdb.connect() as connection:
        rows = connection.execute(f"SELECT {columns} FROM {joined} ORDER BY correlation_id, metric").fetchall()
    assert rows == [
        ("gemm", "kernel", 1, 1, "dram__bytes.sum", 4096.0, BASE + 15_000),
        ("gemm", "kernel", 1, 1, "inst.sum", 1.5, BASE + 15_000),
        ("__missing__", "kernel", 1, 2, "dram__bytes.sum", 1.0, BASE + 25_000),
        ("gemm", "kernel", 1, 3, "dram__bytes.sum", float(2**53), BASE + 35_000),
    ]
    assert run.rows("kernels", "correlation_id, start_ns, duration_ns, device_id") == [
        (n, None, None, 1) for n in (1, 2, 3)
    ]
    assert run.summary.refused["metrics without a finite number"] == 1


def test_categories_of_old_traces(imported: Import) -> None:
    run = imported(trace([{**kernel(), "cat": "Kernel"}, {**call(), "cat": "Runtime"}]))
    assert run.rows("kernels", "queued_ns") == [BASE + 50_001]


def test_only_the_device_that_was_asked_for(imported: Import) -> None:
    content = trace([kernel(device=0), kernel(device=1, ts=7), {**kernel(device=..., ts=9), "pid": 1}])
    run = imported(content, options=Options(device="1"))
    assert run.rows("kernels", "start_ns, device_id") == [(BASE + 7_000, 1), (BASE + 9_000, 1)]
    assert run.summary.refused == {"GPU events of other devices": 1}
    with pytest.raises(ImportFailed, match="holds no kernels of device 5"):
        imported(content, options=Options(device="5"))


def test_values_of_the_wrong_type_harm_only_themselves(imported: Import) -> None:
    wrong: list[Row] = [
        kernel(ts=1, grid="big", block=[1, 2], stream=[1], correlation="12"),
        kernel(ts=2, correlation=2.0, **{"registers per thread": None, "shared memory": 10**30}),
        {**kernel(ts=3), "args": None},
        {**kernel(ts=4), "args": [1]},
        {**kernel(ts=5), "name": 5},
        {**kernel(ts=6), "dur": -1},
        {**kernel(ts=7), "dur": "?"},
        {**kernel(ts=None), "pid": "x"},
        {**kernel(ts=8), "ph": "B"},
    ]
    run = imported(trace([*wrong, kernel("sound", ts=99, correlation=7)]))
    assert run.rows("kernels", "start_ns - 1700000000000000000, duration_ns", "1 NULLS FIRST") == [
        (None, 2_250),
        *[(n * 1000, 2_250) for n in (1, 2, 3, 4, 5)],
        (6_000, None),
        (7_000, None),
        (99_000, 2_250),
    ]
    assert run.rows("kernels", "correlation_id", "start_ns NULLS FIRST")[1:3] == [12, 2]
    assert "(no name)" in run.rows("kernel_classes", "name")
    refused = run.summary.refused
    assert refused["durations of GPU work that ends before it starts"] == 1
    assert refused["kernel events that are not complete events (ph is not X)"] == 1
    assert refused["GPU work without a start"] == 1


def test_a_lone_event_without_name_and_arguments(imported: Import) -> None:
    run = imported(trace([{"ph": "X", "cat": "kernel", "pid": 3, "ts": 1, "dur": 2}, {**call(), "args": None}]))
    assert run.rows("kernels", "start_ns, duration_ns, device_id, queued_ns") == [(BASE + 1_000, 2_000, 3, None)]
    assert run.rows("kernel_classes", "name, grid_x") == [("(no name)", 0)]
    assert run.summary.refused == {
        "names of GPU work or ranges that are missing": 1,
        "arguments of events that cannot be read": 1,
    }


def test_overlapping_kernels_are_counted(imported: Import) -> None:
    run = imported(
        trace([kernel(ts=0, dur=10), kernel(ts=9, dur=1), kernel(ts=10, dur=5), kernel(ts=12, dur=1, stream=8)])
    )
    assert run.summary.read["kernels that overlap the one before them on their stream"] == 1


HOSTILE = ['}, {"ph": "X"', "]}", "a\\", '"', "{lambda()#1}[", "\u2028<script>", "é" * 300, "\ud800", "a\x00b\n"]


def test_hostile_names_arrive_as_they_are(imported: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kineto_stream, "BLOCK_BYTES", 700)
    run = imported(trace([kernel(name, ts=n) for n, name in enumerate(HOSTILE)]))
    expected = {name.encode("utf-8", "backslashreplace").decode() for name in HOSTILE}
    assert set(run.rows("kernel_classes", "name")) == expected
    assert run.summary.kernels == len(HOSTILE)
    assert run.summary.refused == {}


# --- streaming ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["json", "json.gz"])
@pytest.mark.parametrize("block", [1, 300, 5_000, 2**22])
def test_a_trace_reads_the_same_in_blocks_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, suffix: str
) -> None:
    path = tmp_path / f"trace.{suffix}"
    written = make_kineto.write_trace(path, make_kineto.Mix(events=60 if block == 1 else 400))
    monkeypatch.setattr(kineto_stream, "BLOCK_BYTES", block)
    run = import_paths([path], tmp_path / "run")
    assert (run.summary.kernels, run.summary.kernel_ns) == (written.kernels, written.kernel_ns)
    assert len(run.rows("copies", "start_ns")) == written.copies
    assert run.rows("kernels", "start_ns, duration_ns") == _kernels_by_json(path)
    assert sum(n for what, n in run.summary.read.items() if what.endswith(" events")) == written.events


def test_rows_that_go_through_the_disk_stay_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kineto_spool, "HELD_ROWS", 10)
    monkeypatch.setattr(kineto_stream, "BLOCK_BYTES", 10_000)
    path = tmp_path / "trace.json"
    make_kineto.write_trace(path, make_kineto.Mix(events=2_000))
    run = import_paths([path], tmp_path / "run")
    assert run.rows("kernels", "start_ns, duration_ns") == _kernels_by_json(path)
    assert run.rows("kernels", "count(*) FILTER (queued_ns IS NULL)") == [0]


def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tracemalloc

    monkeypatch.setattr(kineto_stream, "BLOCK_BYTES", 2**18)
    peaks = []
    for events in (10_000, 60_000):
        path = tmp_path / f"{events}.json"
        make_kineto.write_trace(path, make_kineto.Mix(events=events))
        tracemalloc.start()
        stream = kineto_stream.Stream(path, Limits(), lambda read: None)
        assert sum(map(len, kineto_json.TraceFile(stream, Limits()).chunks())) >= events
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


def _kernels_by_json(path: Path) -> list[tuple[int, int]]:
    """Start and duration of every kernel, read by Python's json with decimal numbers."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
        content = json.loads(file.read(), parse_float=Decimal, parse_int=Decimal)
    base = int(content.get("baseTimeNanoseconds", 0))
    kernels = [event for event in content["traceEvents"] if event.get("cat") == "kernel"]
    return sorted((int(event["ts"] * 1000) + base, int(event["dur"] * 1000)) for event in kernels)


# --- damage ------------------------------------------------------------------------------------------


def three_kernels(indent: int | None = None) -> bytes:
    return json.dumps({"traceEvents": [kernel(f"k{n}", ts=n + 1) for n in range(3)]}, indent=indent).encode()


@pytest.mark.parametrize("indent", [None, 2])
def test_a_truncated_file_is_read_as_far_as_it_goes(imported: Import, indent: int | None) -> None:
    content = three_kernels(indent)
    last = content.index(b'"k2"')
    begins = content.rindex(b"{", 0, last)
    for cut in (begins + 1, last, last + 40, len(content) - 20):
        run = imported(content[:cut])
        assert run.rows("kernel_classes", "name") == ["k0", "k1"]
        (note,) = (note for note in run.summary.notes if "damaged" in note)
        assert f"damaged at byte {cut:,}: it ends too early" in note
        assert f"what begins at byte {begins:,} is incomplete" in note
        assert run.summary.refused == {"places where a file is damaged or cut off": 1}
        assert any("damaged at byte" in message for message in run.rows("events", "message"))


def test_a_file_cut_off_behind_its_events(imported: Import) -> None:
    content = three_kernels()
    run = imported(content[:-1])
    assert run.summary.kernels == 3
    assert run.summary.refused == {"places where a file is damaged or cut off": 1}


def test_the_base_time_is_found_in_a_broken_tail(imported: Import) -> None:
    run = imported(trace([kernel(ts=1)], traceName="x")[:-5])
    assert run.rows("kernels", "start_ns") == [BASE + 1_000]


@pytest.mark.parametrize("how", ["quote", "brace", "letters"])
def test_a_damaged_event_costs_only_itself(imported: Import, how: str) -> None:
    content = three_kernels()
    second = content.index(b'"k1"')
    begins = content.rindex(b"{", 0, second)
    damaged = {
        "quote": content[:second] + b"k1" + content[second + 4 :],
        "brace": content[:begins] + content[begins:].replace(b'{"device"', b'["device"', 1),
        "letters": content[: begins + 3] + b"\x00\xff" + content[begins + 5 :],
    }[how]
    run = imported(damaged)
    assert run.rows("kernel_classes", "name") == ["k0", "k2"]
    assert any(f"damaged at byte {begins:,}" in note for note in run.summary.notes)


def test_what_is_no_json_but_clear_is_mended(imported: Import) -> None:
    content = three_kernels().decode()
    content = content.replace('"registers per thread": 32', '"blocks per SM": -inf, "warps per SM": nan')
    raw = content.encode().replace(b'"k1"', b'"k\\x\xff\t\\"1"')
    run = imported(raw)
    assert run.rows("kernel_classes", "name") == ["k0", "k2", 'k\\x\\xff\t"1']
    assert run.summary.read["events that were no valid JSON and could be mended"] == 3
    assert run.summary.refused == {}


def test_a_truncated_gzip_file(imported: Import, tmp_path: Path) -> None:
    path = tmp_path / "whole.json.gz"
    written = make_kineto.write_trace(path, make_kineto.Mix(events=3_000))
    packed = path.read_bytes()
    run = imported(packed[: len(packed) // 2])
    assert 0.3 * written.kernels < run.summary.kernels < 0.7 * written.kernels
    assert any(f"gzip data end too early, after {len(packed) // 2:,} bytes" in note for note in run.summary.notes)
    flipped = bytearray(packed)
    flipped[len(packed) // 2] ^= 0xFF
    run = imported(bytes(flipped))
    assert run.summary.kernels < written.kernels
    assert run.summary.refused["places where a file is damaged or cut off"] >= 1


def test_gzip_that_is_damaged_early_is_still_recognised(tmp_path: Path) -> None:
    """Detection sees the same first bytes: damage in them must not hide what stands before it."""
    events = [{**kernel(ts=i), "name": f"k{i}"} for i in range(2_000)]
    packed = bytearray(gzip.compress(trace(events), compresslevel=1))
    at = len(packed) * 3 // 4
    assert at < registry.HEAD_BYTES
    packed[at : at + 40] = bytes(40)
    path = tmp_path / "trace.json.gz"
    path.write_bytes(packed)
    summary = registry.import_files([path], tmp_path / "run")
    assert 100 < summary.kernels < 2_000
    assert summary.refused["places where a file is damaged or cut off"] >= 1


def test_a_header_that_seems_to_end_again_and_again_takes_no_time(imported: Import) -> None:
    """Each place that looks like the events' beginning costs a look at everything before it."""
    header = b'{"a": x, ' + b'"traceEvents":[], ' * 200_000
    started = time.monotonic()
    with pytest.raises(ImportFailed, match="no kernels before it is damaged at byte 0"):
        imported(header)
    assert time.monotonic() - started < 10


def test_events_that_are_never_closed_are_damage_and_no_nesting(imported: Import) -> None:
    text = trace([{**kernel(ts=i), "name": f"k{i}"} for i in range(300)]).decode()
    broken = text.replace('"args": {', '"args": [[[{', 150).encode()  # 150 events lose their ends to the openers
    run = imported(broken)
    assert run.summary.kernels == 150
    assert run.summary.refused["places where a file is damaged or cut off"] == 150


def test_several_gzip_members_and_padding(imported: Import) -> None:
    content = three_kernels()
    packed = gzip.compress(content[:100]) + gzip.compress(content[100:]) + b"\x00" * 7
    assert imported(packed).summary.kernels == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>", "is not JSON"),
        (b'{"schemaVersion": 1}', "is JSON without traceEvents"),
        (trace([]), "holds no GPU work: no events at all"),
        (trace([annotation("a", 1, 2), call()]), "holds no GPU work: 1 user_annotation events, 1 cuda_runtime events"),
        (trace([kernel()])[:60], "no kernels before it is damaged at byte 60"),
    ],
)
def test_what_cannot_be_imported_says_why_and_leaves_nothing(
    imported: Import, tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(ImportFailed, match=message):
        imported(content)
    assert not list(tmp_path.rglob("run*"))
    assert not list(tmp_path.rglob("*.importing"))


@pytest.mark.parametrize("where", ["args", "name", "before", "behind"])
@pytest.mark.parametrize("opener", ["[", '{"a":'])
def test_deep_nesting_is_refused(imported: Import, where: str, opener: str) -> None:
    deep = opener * 100 + "1" + {"[": "]"}.get(opener, "}") * 100
    events = json.dumps([kernel(), kernel()])
    content = {
        "args": f'{{"traceEvents": {events[:-1]}, {{"ph": "X", "args": {deep}}}]}}',
        "name": f'{{"traceEvents": [{{"ph": "X", "name": {deep}}}, {events[1:]}}}',
        "before": f'{{"x": {deep}, "traceEvents": {events}}}',
        "behind": f'{{"traceEvents": {events}, "x": {deep}}}',
    }[where]
    with pytest.raises(ImportFailed, match="nests values more than 99 deep"):
        imported(content.encode())


def test_brackets_in_strings_are_no_nesting(imported: Import) -> None:
    assert imported(trace([kernel("[" * 500), kernel("{" * 500)], note="[" * 500)).summary.kernels == 2


def test_very_deep_nesting_does_not_crash(imported: Import) -> None:
    with pytest.raises(ImportFailed, match="nests values more than"):
        imported(b'{"traceEvents": [{"args":' + b"[" * 200_000)


def test_a_decompression_bomb_is_refused(imported: Import) -> None:
    bomb = gzip.compress(b'{"traceEvents": [' + b" " * 50_000_000 + b"]}")
    limits = Limits(unpacked_free_bytes=10**6, unpacked_ratio=200)
    with pytest.raises(ImportFailed, match="unpacks to more than"):
        imported(bomb, options=Options(limits=limits))


@cache
def small() -> bytes:
    """A trace of some 60 events."""
    with TemporaryDirectory() as folder:
        make_kineto.write_trace(Path(folder, "small.json"), make_kineto.Mix(events=60))
        return Path(folder, "small.json").read_bytes()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_mutated_traces_never_crash(data: st.DataObject) -> None:
    """Cut, flipped, deleted and repeated pieces: an import with at most as many kernels, or ImportFailed."""
    content = bytearray(small())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.sampled_from(["cut", "flip", "delete", "insert"])):
            case "cut":
                del content[max(place, 1) :]
            case "flip":
                content[place] ^= data.draw(st.integers(1, 255))
            case "delete":
                del content[place : place + data.draw(st.integers(1, 200))]
            case "insert":
                content[place:place] = data.draw(st.binary(max_size=20) | st.sampled_from([b"}", b'"', b"[{", b"]}]"]))
        if not content:
            content = bytearray(b"{")
    kernels = small().count(b'"cat": "kernel"')
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        path.write_bytes(content)
        try:
            run = import_paths([path], Path(folder, "run"))
        except ImportFailed:
            assert not Path(folder, "run").exists()
        else:
            assert 0 < run.summary.kernels <= kernels


# --- several ranks -----------------------------------------------------------------------------------


def test_ranks_with_clocks_apart_are_aligned(tmp_path: Path) -> None:
    ahead = 7_654_321
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for rank, path in enumerate(paths):
        mix = make_kineto.Mix(events=6_000, rank=rank, world_size=2, clock_ns=ahead * rank)
        make_kineto.write_trace(path, mix)
    run = import_paths(paths, tmp_path / "run")
    assert run.rows("processes", "rank, world_size") == [(0, 2), (1, 2)]
    starts = [run.rows("kernels", "start_ns", f"process LIKE 'rank{rank}%' DESC, start_ns") for rank in (0, 1)]
    half = len(starts[0]) // 2
    assert starts[0][:half] == starts[1][:half] == [start for start, _ in _kernels_by_json(paths[0])]
    assert any(f"b.json: shifted by -{ahead:,} ns" in note for note in run.summary.notes)

    apart = import_paths(paths, tmp_path / "apart", Options(align=False))
    assert max(apart.rows("kernels", "start_ns")) - max(run.rows("kernels", "start_ns")) == ahead
    assert "clocks: taken as the files have them, as was asked" in apart.summary.notes


def test_clocks_that_agree_are_left_alone(tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for rank, path in enumerate(paths):
        make_kineto.write_trace(path, make_kineto.Mix(events=6_000, rank=rank))
    run = import_paths(paths, tmp_path / "run")
    assert any("its clock agrees with the first file's within 0 ns" in note for note in run.summary.notes)


def test_ranks_without_shared_collectives_keep_their_base_times(imported: Import) -> None:
    run = imported(
        trace([kernel(ts=1)], baseTimeNanoseconds=BASE),
        trace([kernel(ts=2)], baseTimeNanoseconds=BASE + 10**9),
        names=("rank0.json", "rank1.json"),
    )
    assert run.rows("kernels", "start_ns") == [BASE + 1_000, BASE + 10**9 + 2_000]
    assert run.rows("processes", "rank") == [0, 1]
    assert any("rank1.json: shares no collectives" in note for note in run.summary.notes)


def test_two_files_of_one_rank_stay_apart(imported: Import) -> None:
    info = {"rank": 0, "world_size": 1}
    run = imported(trace([kernel(ts=1)], distributedInfo=info), trace([kernel(ts=2)], distributedInfo=info))
    assert run.summary.processes == 2
    assert any("is of rank 0, as another file is" in note for note in run.summary.notes)


def test_offsets_go_through_other_ranks_and_need_evidence() -> None:
    ranks = [Collectives() for _ in range(4)]
    for step in range(5):
        ranks[0].add("allreduce a", 1000 * step)
        ranks[1].add("allreduce a", 1000 * step + 500)
        ranks[1].add("allgather b", 1000 * step + 600)
        ranks[2].add("allgather b", 1000 * step + 600 + 70)
        ranks[3].add("allreduce a", step * 10**8)
        ranks[3].add("send", 1000 * step)
    found = offsets(ranks)
    assert found[0] is None
    assert found[1] is not None
    assert (found[1].ns, found[1].pairs, found[1].spread_ns) == (500, 5, 0)
    assert found[2] is not None
    assert (found[2].ns, found[2].reference) == (570, 1)
    assert found[3] is None


# --- real traces -------------------------------------------------------------------------------------


@pytest.mark.skipif(not REAL_TRACES.is_dir(), reason="NANALYZE_REAL_TRACES names no folder of traces")
def test_real_traces_equal_an_independent_reading(tmp_path: Path) -> None:
    checked = 0
    for path in sorted(REAL_TRACES.iterdir()):
        kernels = _kernels_by_json(path)
        if not kernels and b"cuda_profiler_range" not in gzip.decompress(path.read_bytes()):
            with pytest.raises(ImportFailed, match="holds no GPU work"):
                import_paths([path], tmp_path / path.name)
            continue
        run = import_paths([path], tmp_path / path.name)
        timed = [row for row in run.rows("kernels", "start_ns, duration_ns") if row[0] is not None]
        assert timed == kernels
        assert run.summary.kernel_ns == sum(duration for _, duration in kernels)
        assert run.summary.refused.keys() <= {
            "names of kernels in cuda_profiler_range events that the profiler did not know"
        }
        checked += len(kernels)
    assert checked > 0


# --- recognition -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "is_kineto"),
    [
        (trace([kernel()]), True),
        (gzip.compress(trace([kernel()])), True),
        (json.dumps([kernel()]).encode(), True),
        (b'\xef\xbb\xbf {"deviceProperties": [', True),
        (b'[{"name": "<ROOT>", "frame": {}}]', False),
        (b'{"some": "json"}', False),
        (b"\x1f\x8bjunk", False),
        (b"==PROF== traceEvents", False),
    ],
)
def test_traces_are_recognised_by_their_content(content: bytes, is_kineto: bool) -> None:
    assert kineto.detect(Path("file"), content) is is_kineto
