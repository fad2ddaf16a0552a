"""The Nsight Systems importer: every value against what was put into the export, or an independent reading."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nsys_files import DOMAIN, EPOCH, GLOBAL_PID, KERNELS, MARK, PID, START_END, Export

import nanalyze.analysis as na
from nanalyze.importers import nsys_samples, registry
from nanalyze.importers.options import ImportFailed, Options
from nanalyze.importers.sink import ImportSummary

REPOSITORY = Path(__file__).resolve().parent.parent
REAL_TRACES = (
    Path(os.environ.get("NANALYZE_REAL_TRACES") or REPOSITORY.parent / "shared" / "real-traces") / "nsys-sqlite"
)


def imported(path: Path, **options: Any) -> ImportSummary:
    return registry.import_files([path], path.parent / "run", Options(**options), force=True)


def rows(path: Path, query: str) -> list[tuple[Any, ...]]:
    with na.open(path.parent / "run") as run:
        assert run.damage_count == 0
        return [
            tuple(None if value != value else value for value in row.values()) for row in run.arrow(query).to_pylist()
        ]


def stored_kernels(run_dir: Path) -> int:
    return sum(pq.ParquetFile(file).metadata.num_rows for file in (run_dir / "kernels").rglob("*.parquet"))


def check_all_or_nothing(path: Path) -> None:
    """A file, however damaged, becomes a run with what the summary says, or none."""
    run_dir = path.parent / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    try:
        summary = imported(path)
    except ImportFailed:
        assert not run_dir.exists()
    else:
        assert stored_kernels(run_dir) == summary.kernels


def failure(path: Path, **options: Any) -> str:
    with pytest.raises(ImportFailed) as caught:
        imported(path, **options)
    assert not (path.parent / "run").exists()
    assert list(path.parent.glob(".*importing")) == []
    return str(caught.value).removeprefix(f"{path}: ")


# --- kernels -----------------------------------------------------------------------------------------


def test_a_kernel_arrives_with_its_times_shape_place_and_names(tmp_path: Path) -> None:
    export = Export()
    export.kernel(
        1_000,
        3_500,
        "void gemm<float>(float*)",
        9,
        mangled="_Z4gemmIfEvPf",
        streamId=13,
        clusterX=2,
        clusterY=1,
        clusterZ=1,
    )
    export.call(400, 9)
    summary = imported(export.sqlite(tmp_path / "report.sqlite"))
    assert (summary.kernels, summary.kernel_ns, summary.source) == (1, 2_500, "nsys")
    query = (
        "SELECT start_ns, duration_ns, queued_ns, device_id, context_id, stream_id, correlation_id, graph_node_id,"
        " name, name_mangled, grid_x, grid_y, grid_z, block_x, cluster_x, registers_per_thread, dynamic_shared_bytes"
        " FROM kernels JOIN kernel_classes USING (kernel_class_id)"
    )
    assert rows(tmp_path / "report.sqlite", query) == [
        (EPOCH + 1_000, 2_500, EPOCH + 400, 0, 1, 13, 9, None, "void gemm<float>(float*)",
         "_Z4gemmIfEvPf", 4, 2, 1, 128, 2, 32, 1024)
    ]  # fmt: skip


def test_a_class_has_the_identity_that_the_recorder_gives_it(tmp_path: Path) -> None:
    from nanalyze.rundir.classes import KernelClass

    export = Export()
    export.kernel(0, 1, "gemm(int)", mangled="_Z4gemmi")
    imported(export.sqlite(tmp_path / "r.sqlite"))
    wanted = KernelClass(b"_Z4gemmi", (4, 2, 1), (128, 1, 1), (0, 0, 0), 32, 0, 1024, 0).id
    assert rows(tmp_path / "r.sqlite", "SELECT kernel_class_id FROM kernel_classes") == [(wanted,)]


def test_odd_times_are_kept_or_refused_but_the_kernels_stay(tmp_path: Path) -> None:
    export = Export()
    export.kernel(-5_000, -4_000, correlation=1)  # before the session began: legal
    export.kernel(10, 10 + 5_000_000_000, correlation=2)  # longer than 31 bits
    export.kernel(900, 100, correlation=3)  # ends before it starts
    export.kernel(2**62, 2**62 + 1, correlation=4)  # beyond any clock
    path = export.sqlite(tmp_path / "r.sqlite")
    summary = imported(path)
    assert rows(path, "SELECT start_ns, duration_ns FROM kernels ORDER BY correlation_id") == [
        (EPOCH - 5_000, 1_000), (EPOCH + 10, 5_000_000_000), (EPOCH + 900, None), (None, None)
    ]  # fmt: skip
    assert (summary.kernels, summary.kernel_ns) == (4, 5_000_001_000)
    assert summary.refused["kernels: durations whose end lies before the start"] == 1
    assert summary.refused["kernels: instants beyond 126 years"] == 2


def test_string_ids_that_dangle_are_counted_and_named_by_what_is_left(tmp_path: Path) -> None:
    export = Export()
    export.kernel(0, 5, "named", 1, mangledName=999_999)
    export.kernel(10, 15, correlation=2, demangledName=777, shortName=777)
    export.kernel(20, 25, correlation=3, demangledName=777, shortName=777)
    path = export.sqlite(tmp_path / "r.sqlite")
    summary = imported(path)
    assert summary.refused["kernels without a name: their string ids dangle"] == 2
    query = "SELECT name, count(*) AS n FROM kernels JOIN kernel_classes USING (kernel_class_id) GROUP BY 1 ORDER BY 1"
    assert rows(path, query) == [("(name missing: string 777)", 2), ("named", 1)]


def test_without_a_session_start_instants_stay_relative_and_the_run_says_so(tmp_path: Path) -> None:
    export = Export(epoch_ns=None)
    export.kernel(100, 150)
    path = export.sqlite(tmp_path / "r.sqlite")
    assert any("does not say when its session began" in note for note in imported(path).notes)
    assert rows(path, "SELECT start_ns FROM kernels") == [(100,)]


def test_an_export_of_kernels_alone_is_enough(tmp_path: Path) -> None:
    """Not even the columns of shapes, names and processes are needed."""
    export = Export(epoch_ns=None)
    export.add(KERNELS, start=5, end=9)
    path = export.sqlite(tmp_path / "r.sqlite")
    assert (imported(path).kernels, imported(path).kernel_ns) == (1, 4)
    query = "SELECT start_ns, duration_ns, queued_ns, name FROM kernels JOIN kernel_classes USING (kernel_class_id)"
    assert rows(path, query) == [(5, 4, None, "(name missing: string None)")]


def test_processes_are_told_apart_also_where_they_share_correlation_ids(tmp_path: Path) -> None:
    export, other = Export(), (1 << 48) | (77 << 24)
    export.add("PROCESSES", globalPid=other, pid=77, name="python train.py")
    export.add("TARGET_INFO_SYSTEM_ENV", name="Hostname", value="node7")
    export.kernel(100, 150, correlation=1)
    export.kernel(200, 260, correlation=1, globalPid=other)
    export.call(10, 1)
    export.call(20, 1, globalTid=other | 78)
    path = export.sqlite(tmp_path / "r.sqlite")
    imported(path)
    assert rows(path, "SELECT pid, queued_ns FROM kernels JOIN processes USING (process) ORDER BY pid") == [
        (77, EPOCH + 20), (PID, EPOCH + 10)
    ]  # fmt: skip
    assert rows(path, "SELECT host, pid, command FROM processes ORDER BY pid") == [
        ("node7", 77, '["python train.py"]'), ("node7", PID, '["r.sqlite"]')
    ]  # fmt: skip


def test_kernels_without_a_launch_call_have_no_queue_time_and_are_counted(tmp_path: Path) -> None:
    export = Export()
    export.kernel(100, 150, correlation=1)
    export.kernel(200, 250, correlation=2)
    export.kernel(300, 350, correlation=None)
    export.call(50, 1)
    export.call(60, 3, name="cudaStreamSynchronize_v3020")
    path = export.sqlite(tmp_path / "r.sqlite")
    assert imported(path).refused["kernels without a launch call: their range is unknown"] == 2
    assert rows(path, "SELECT queued_ns FROM kernels ORDER BY start_ns") == [(EPOCH + 50,), (None,), (None,)]


def test_overlaps_on_a_stream_are_counted_and_streams_do_not_mix(tmp_path: Path) -> None:
    export = Export()
    export.kernel(300, 400)
    export.kernel(100, 200)  # out of order in the file: no overlap
    export.kernel(350, 500)  # overlaps the first
    export.kernel(350, 500, streamId=8)
    read = imported(export.sqlite(tmp_path / "r.sqlite")).read
    assert read["kernels that overlap the one before them on their stream"] == 1


def test_kernels_of_graphs_keep_their_node(tmp_path: Path) -> None:
    export = Export()
    export.kernel(0, 5, graphNodeId=(7 << 32) | 2, graphId=0)
    export.kernel(10, 15, graphNodeId=(7 << 32) | 3, graphId=7)
    path = export.sqlite(tmp_path / "r.sqlite")
    imported(path)
    assert rows(path, "SELECT graph_id, graph_node_id FROM kernels ORDER BY start_ns") == [
        (None, (7 << 32) | 2), (7, (7 << 32) | 3)
    ]  # fmt: skip


def test_values_of_another_type_are_missing_not_wrong(tmp_path: Path) -> None:
    export = Export()
    export.kernel(0, 5, streamId="seven", correlation=1)
    export.kernel(10, 12.0, correlation=2)  # type: ignore[arg-type]
    export.kernel(20, "never", correlation=3)  # type: ignore[arg-type]
    path = export.sqlite(tmp_path / "r.sqlite")
    imported(path)
    assert rows(path, "SELECT duration_ns, stream_id FROM kernels ORDER BY start_ns") == [(5, None), (2, 7), (None, 7)]


def test_strings_without_an_id_are_passed_over(tmp_path: Path) -> None:
    export = Export()
    export.kernel(0, 5, correlation=1)
    export.add("StringIds", id=None, value="cudaLaunchKernel_v7000")
    export.add("StringIds", id="x", value="cuLaunchKernel")
    path = export.sqlite(tmp_path / "r.sqlite")
    assert imported(path).kernels == 1


# --- copies, devices -----------------------------------------------------------------------------------


def test_copies_and_memory_sets(tmp_path: Path) -> None:
    export = Export()
    export.kernel(0, 5)
    place = {"deviceId": 0, "contextId": 1, "streamId": 7, "globalPid": GLOBAL_PID}
    export.add(
        "CUPTI_ACTIVITY_KIND_MEMCPY", start=10, end=30, correlationId=5, bytes=2**33, copyKind=1, srcKind=1, dstKind=2,
        **place,
    )  # fmt: skip
    export.add(
        "CUPTI_ACTIVITY_KIND_MEMCPY", start=40, end=41, correlationId=6, bytes=1, copyKind=11, srcKind=99, dstKind=None,
        srcDeviceId=1, **place,
    )  # fmt: skip
    export.add("CUPTI_ACTIVITY_KIND_MEMSET", start=50, end=45, correlationId=7, bytes=64, memKind=3, **place)
    path = export.sqlite(tmp_path / "r.sqlite")
    summary = imported(path)
    assert (summary.read["copies"], summary.read["memory sets"]) == (2, 1)
    query = (
        "SELECT start_ns, duration_ns, kind, bytes, source, destination, source_device_id FROM copies ORDER BY start_ns"
    )
    assert rows(path, query) == [
        (EPOCH + 10, 20, "HtoD", 2**33, "pageable", "pinned", None),
        (EPOCH + 40, 1, "HtoD", 1, "kind 99", None, 1),
        (EPOCH + 50, None, "memset", 64, None, "device", None),
    ]


def test_a_device_is_the_gpu_that_the_process_calls_by_that_number(tmp_path: Path) -> None:
    export = Export()
    export.gpu(id=0, cuDevice=0, name="NVIDIA GeForce RTX 3090", computeMinor=6)
    export.gpu(id=1, cuDevice=1)
    export.add("TARGET_INFO_CUDA_DEVICE", gpuId=1, cudaId=0, pid=PID)
    export.kernel(0, 5)
    path = export.sqlite(tmp_path / "r.sqlite")
    imported(path)
    query = (
        "SELECT device_id, name, uuid, chip, cc_major, cc_minor, sm_count, warp_size, threads_per_sm_max, l2_bytes,"
        " memory_bytes, sm_clock_max_hz, dram_peak_bytes_per_s, fp32_flops_per_sm_cycle FROM devices"
    )
    assert rows(path, query) == [
        (0, "NVIDIA A100-SXM4-40GB", "GPU-098fa939-1320-6289-1577-50905f0d37fc", "GA100", 8, 0, 108, 32, 2048,
         41_943_040, 42_409_000_960, 1_410_000_000, 1.5552e12, 128.0)
    ]  # fmt: skip


def test_gpus_of_exports_before_mid_2021(tmp_path: Path) -> None:
    export = Export()
    export.kernel(0, 5, deviceId=1)
    for id_, name in ((0, "Tesla V100"), (1, "NVIDIA A100")):
        export.add(
            "TARGET_INFO_CUDA_GPU", deviceId=id_, name=name, computeCapabilityMajor=7 + id_, computeCapabilityMinor=0,
            numMultiprocessors=80 + 28 * id_, numThreadsPerWarp=32, maxWarpsPerMultiprocessor=64, l2CacheSize=2**22,
            coreClockRate=1_410_000, globalMemorySize=2**34,
        )  # fmt: skip
    path = export.sqlite(tmp_path / "r.sqlite")
    assert imported(path).notes == ()
    told = "device_id, name, cc_major, sm_count, warp_size, threads_per_sm_max, l2_bytes, memory_bytes, sm_clock_max_hz"
    assert rows(path, f"SELECT {told} FROM devices") == [
        (1, "NVIDIA A100", 8, 108, 32, 2048, 2**22, 2**34, None)
    ]  # fmt: skip


def test_without_a_table_of_gpus_the_run_says_so(tmp_path: Path) -> None:
    export = Export()
    export.kernel(0, 5)
    path = export.sqlite(tmp_path / "r.sqlite")
    assert any(note.startswith("device 0 of") for note in imported(path).notes)
    assert rows(path, "SELECT * FROM devices") == []


# --- ranges --------------------------------------------------------------------------------------------


def test_nvtx_ranges_nest_by_thread_and_hold_the_kernels_launched_in_them(tmp_path: Path) -> None:
    export = Export()
    export.range(0, 1_000, "step")
    export.range(100, 400, textId=export.string("forward"))
    export.range(100, 200, "layer")
    export.range(400, 900, "backward")
    export.range(150, 160, "elsewhere", globalTid=GLOBAL_PID | 78)
    export.range(50, 5_000, "epoch", eventType=START_END)
    export.range(1, None, "marker", eventType=MARK)
    export.kernel(2_000, 2_010, correlation=1)
    export.call(170, 1)
    path = export.sqlite(tmp_path / "r.sqlite")
    summary = imported(path)
    assert summary.read["NVTX ranges"] == 6
    assert summary.refused["NVTX events that are no ranges (marks, names)"] == 1
    query = (
        "SELECT r.name, r.depth, p.name, r.thread_id, r.source, r.start_ns, r.end_ns FROM ranges AS r"
        " LEFT JOIN ranges AS p ON p.range_id = r.parent_id ORDER BY r.range_id"
    )
    with na.open(tmp_path / "run") as run:
        table = run.arrow(query)
    assert list(zip(*(column.to_pylist() for column in table.columns), strict=True)) == [
        ("step", 0, None, 77, "nvtx", EPOCH, EPOCH + 1_000),
        ("forward", 1, "step", 77, "nvtx", EPOCH + 100, EPOCH + 400),
        ("layer", 2, "forward", 77, "nvtx", EPOCH + 100, EPOCH + 200),
        ("backward", 1, "step", 77, "nvtx", EPOCH + 400, EPOCH + 900),
        ("elsewhere", 0, None, 78, "nvtx", EPOCH + 150, EPOCH + 160),
        ("epoch", 0, None, 77, "nvtx", EPOCH + 50, EPOCH + 5_000),
    ]
    assert rows(path, "SELECT r.name FROM kernels JOIN ranges AS r USING (range_id)") == [("layer",)]


def test_ranges_without_end_name_or_order_are_told(tmp_path: Path) -> None:
    export = Export()
    export.kernel(0, 5)
    export.range(10, None, "open")
    export.range(30, 20, "backward")
    export.range(40, 50, textId=555)
    export.range(None, 60, "no start")
    path = export.sqlite(tmp_path / "r.sqlite")
    summary = imported(path)
    assert rows(path, "SELECT name, start_ns, end_ns FROM ranges ORDER BY start_ns") == [
        ("open", EPOCH + 10, None), ("backward", EPOCH + 30, None), ("(no name)", EPOCH + 40, EPOCH + 50)
    ]  # fmt: skip
    assert summary.refused == {
        "NVTX ranges without a start": 1,
        "NVTX ranges: ends that lie before the start": 1,
        "NVTX ranges without a name": 1,
        "kernels without a launch call: their range is unknown": 1,
    }
    assert "1 NVTX ranges were never closed" in summary.notes


def test_payloads_and_domains_become_attributes_and_work(tmp_path: Path) -> None:
    export = Export()
    export.kernel(0, 5)
    export.range(-9, None, "CCCL", eventType=DOMAIN, domainId=1)
    export.range(10, 20, "a", domainId=1, category=4, int64Value=-3)
    export.range(30, 40, "b", jsonText='{"flops": 2e9, "bytes": 64, "batch": 8}')
    export.range(50, 60, "c", jsonText="[1, 2")
    export.range(70, 80, "d", doubleValue=0.5)
    path = export.sqlite(tmp_path / "r.sqlite")
    imported(path)
    found = rows(path, "SELECT name, flops, bytes, attributes FROM ranges ORDER BY start_ns")
    assert [(*row[:3], json.loads(row[3])) for row in found] == [
        ("a", None, None, {"domain": "CCCL", "category": 4, "payload": -3}),
        ("b", 2e9, 64.0, {"batch": 8}),
        ("c", None, None, {"payload": "[1, 2"}),
        ("d", None, None, {"payload": 0.5}),
    ]


# --- GPU metrics ---------------------------------------------------------------------------------------


def test_gpu_metrics_become_sums_over_the_device(tmp_path: Path) -> None:
    """108 SMs at 1 GHz for 10,000 ns are 1.08 million cycles; shares of them and of the peaks follow."""
    export = Export()
    export.gpu()
    export.kernel(0, 5)
    names = {1: "GPC Clock Frequency [MHz]", 2: "SMs Active [Throughput %]", 3: "SM Issue [Throughput %]",
             4: "Tensor Active [Throughput %]", 5: "DRAM Read Bandwidth [Throughput %]",
             6: "DRAM Write Bandwidth [Throughput %]", 7: "Compute Warps in Flight [Throughput %]",
             8: "NVLink RX Responses User Data [Throughput %]"}  # fmt: skip
    for metric, name in names.items():
        export.metric_name(metric, name)
    for at in (10_000, 20_000, 30_000):
        for metric, value in {1: 1000.0, 2: 50.0, 3: 25.0, 4: 10.0, 5: 40.0, 6: 20.0, 7: 75.0, 8: 5.0}.items():
            export.metric(at, metric, value)
    export.metric(30_000, 99, 1.0)
    path = export.sqlite(tmp_path / "r.sqlite")
    summary = imported(path)
    assert (summary.read["GPU metrics values"], summary.read["GPU metrics samples"]) == (25, 3)
    assert summary.refused["GPU metrics without a name"] == 1
    query = (
        "SELECT device_id, start_ns, end_ns, sm_cycles_elapsed, sm_cycles_active, inst, pipe_tensor_busy_ns,"
        " dram_read_bytes, dram_write_bytes, dram_busy_ns, warps_active, nvlink_rx_responses_user_data_busy_ns"
        " FROM samples ORDER BY start_ns"
    )
    cycles = 1_080_000.0
    values = (cycles, cycles / 2, cycles, 1_000.0, 0.4 * 15_552_000, 0.2 * 15_552_000, 6_000.0, 48 * cycles, 500.0)
    found = rows(path, query)
    assert [row[:3] for row in found] == [(0, EPOCH + at, EPOCH + at + 10_000) for at in (0, 10_000, 20_000)]
    assert [row[3:] for row in found] == [pytest.approx(values)] * 3


def test_imported_samples_are_attributed_to_kernels(tmp_path: Path) -> None:
    """Two kernels in turns, shorter than a sample, each with its own shares: they come out as they went in."""
    names = {2: "SMs Active", 5: "DRAM Read Bandwidth", 6: "DRAM Write Bandwidth", 7: "Compute Warps in Flight"}
    shares = {"a": {2: 100, 5: 10, 6: 5, 7: 50}, "b": {2: 90, 5: 60, 6: 30, 7: 75}}
    export, random, period = Export(), Random(1), 50_000
    export.gpu()
    export.metric_name(1, "GPC Clock Frequency [MHz]")
    for metric, name in names.items():
        export.metric_name(metric, f"{name} [Throughput %]")
    samples = [dict.fromkeys(names, 0.0) for _ in range(800)]
    now = period
    for correlation in range(3_000):
        kernel, end = random.choice("ab"), now + random.randint(3_000, 20_000)
        export.kernel(now, end, kernel, correlation, gridX=400)
        while now < end:
            until = min(end, (now // period + 1) * period)
            for metric, share in shares[kernel].items():
                samples[now // period][metric] += share * (until - now) / period
            now = until
        now += random.randint(500, 1_500)
    for number in range(1, now // period):
        export.metric((number + 1) * period, 1, 1410.0)
        for metric, value in samples[number].items():
            export.metric((number + 1) * period, metric, value)
    path = export.sqlite(tmp_path / "r.sqlite")
    imported(path)
    query = (
        "SELECT name, counter, method, value"
        " FROM counters JOIN kernel_classes USING (kernel_class_id)"
        " WHERE counter IN ('dram_pct', 'occupancy_pct', 'sm_active_pct') ORDER BY 1, 2"
    )
    found = rows(path, query)
    assert [row[:3] for row in found] == [
        (name, counter, "sampled") for name in "ab" for counter in ("dram_pct", "occupancy_pct", "sm_active_pct")
    ]
    # Launches are taken to end their work a microsecond before their time, which these of 3 to 20 do not.
    assert [row[3] for row in found] == pytest.approx([15.0, 50.0, 100.0, 90.0, 83.333, 90.0], rel=0.04)


def test_gpu_metrics_of_the_first_versions_are_counted_not_guessed(tmp_path: Path) -> None:
    export = Export()
    export.kernel(0, 5)
    for at in range(3):
        export.add("GENERIC_EVENTS", rawTimestamp=at, timestamp=at, typeId=5, data='{"SM Active": "45"}')
    path = export.sqlite(tmp_path / "r.sqlite")
    assert imported(path).refused == {
        "generic events (the first versions kept GPU metrics there)": 3,
        "kernels without a launch call: their range is unknown": 1,
    }
    assert rows(path, "SELECT * FROM samples") == []


def test_metrics_of_an_unknown_gpu_stay_time_at_the_peak(tmp_path: Path) -> None:
    export = Export()
    export.kernel(0, 5)
    export.metric_name(2, "SMs Active [Throughput %]")
    export.metric_name(9, "Compute Warps in Flight [Avg Warps per Cycle]")
    export.metric(1_000, 2, 50.0)
    export.metric(1_000, 9, 3.0)
    export.metric(3_000, 2, 25.0)
    export.metric(3_000, 2, float("inf"))
    path = export.sqlite(tmp_path / "r.sqlite")
    assert imported(path).refused["GPU metrics without a time, a metric or a value"] == 1
    columns = "end_ns - start_ns AS ns, sms_active_busy_ns, compute_warps_in_flight_integral_ns"
    query = f"SELECT {columns} FROM samples ORDER BY end_ns"
    assert rows(path, query) == [(2_000, 1_000.0, 6_000.0), (2_000, 500.0, None)]
    settings_ = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]
    assert settings_["gpu_metrics"]["sms_active_busy_ns"] == "SMs Active [Throughput %]"


def test_samples_that_straddle_chunks_are_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanalyze.importers import sqlite_pages

    export = Export()
    export.kernel(0, 5)
    for metric in range(5):
        export.metric_name(metric, f"M{metric} [Throughput %]")
    for at in range(1, 401):
        for metric in range(5):
            export.metric(at * 1_000, metric, float(at % 100))
    path = export.sqlite(tmp_path / "r.sqlite")
    monkeypatch.setattr(sqlite_pages, "CHUNK_BYTES", 4096)
    assert imported(path).read["GPU metrics samples"] == 400
    assert rows(path, "SELECT count(*) AS n, count(m4_busy_ns) AS m, sum(m4_busy_ns) AS s FROM samples") == [
        (400, 400, sum(at % 100 * 10.0 for at in range(1, 401)))
    ]


@pytest.mark.parametrize(
    ("metric", "column"),
    [
        ("SMs Active [Throughput %]", "sms_active_busy_ns"),
        ("SYS Clock Frequency [MHz]", "sys_clock_frequency_cycles"),
        ("PCIe Read Requests to BAR1 [Requests]", "pcie_read_requests_to_bar1_integral_ns"),
        ("[%]", "metric_busy_ns"),
    ],
)
def test_columns_of_metrics_without_a_counterpart(metric: str, column: str) -> None:
    assert nsys_samples.column_name(metric) == column


# --- Parquet -------------------------------------------------------------------------------------------


def everything() -> Export:
    export = Export()
    export.gpu()
    for at in range(50):
        export.kernel(at * 100, at * 100 + 40 + at, f"k{at % 3}", at + 1, streamId=7 + at % 2)
        export.call(at * 100 - 20, at + 1)
        export.range(at * 100 - 30, at * 100 - 5, f"r{at % 4}")
    export.add(
        "CUPTI_ACTIVITY_KIND_MEMCPY", start=7, end=9, deviceId=0, contextId=1, streamId=7, correlationId=900,
        globalPid=GLOBAL_PID, bytes=12, copyKind=2, srcKind=3, dstKind=1,
    )  # fmt: skip
    export.metric_name(2, "SMs Active [Throughput %]")
    export.metric(1_000, 2, 50.0)
    export.metric(2_000, 2, 60.0)
    return export


def test_a_parquet_directory_gives_the_same_run_as_sqlite(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, other = everything().sqlite(tmp_path / "a" / "r.sqlite"), everything().parquet(tmp_path / "b" / "r_pqtdir")
    assert imported(one).read == imported(other).read
    for table, order in (
        ("kernels", "correlation_id"),
        ("copies", "start_ns"),
        ("ranges", "range_id"),
        ("samples", "start_ns"),
        ("devices", "device_id"),
        ("kernel_classes", "kernel_class_id"),
    ):
        query = f"SELECT * FROM {table} ORDER BY {order}"
        found = rows(one, query)
        assert found == rows(other, query)
        assert found


def test_damaged_parquet_is_an_error_of_one_line(tmp_path: Path) -> None:
    path = everything().parquet(tmp_path / "r")
    (path / f"{KERNELS}.parquet").write_bytes(b"PAR1" + bytes(100))
    assert "cannot be read as Parquet" in failure(path)


def test_parquet_of_a_few_bytes_cannot_stand_for_any_number_of_rows(tmp_path: Path) -> None:
    path = everything().parquet(tmp_path / "r")
    rows = 2_000_000
    constant = pa.array([5], pa.int64()).take(pa.array(np.zeros(rows, np.int64)))
    pq.write_table(pa.table({"start": constant, "end": constant}), path / f"{KERNELS}.parquet")
    assert (path / f"{KERNELS}.parquet").stat().st_size < 100_000
    assert "cannot be read as Parquet: it has more rows than its size allows" in failure(path)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutated_and_cut_parquet_ends_in_one_line_or_a_run(tmp_path: Path, data: st.DataObject) -> None:
    original = tmp_path / "original"
    if not original.exists():
        everything().parquet(original)
    path = tmp_path / "mutated"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(original, path)
    victim = path / f"{data.draw(st.sampled_from([KERNELS, 'StringIds', 'NVTX_EVENTS']))}.parquet"
    content = bytearray(victim.read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        # Half of them in the footer, which holds names and sizes.
        low = data.draw(st.sampled_from([4, len(content) // 2]))
        content[data.draw(st.integers(low, len(content) - 1))] = data.draw(st.integers(0, 255))
    victim.write_bytes(content[: data.draw(st.one_of(st.none(), st.integers(1, len(content))))])
    check_all_or_nothing(path)


def test_names_in_parquet_that_are_no_text(tmp_path: Path) -> None:
    path = everything().parquet(tmp_path / "r")
    victim = path / f"{KERNELS}.parquet"
    victim.write_bytes(victim.read_bytes().replace(b"registersPerThread", b"registers\xc1erThread"))
    assert "cannot be read as Parquet" in failure(path)


def test_a_directory_of_other_files_is_not_recognised(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "table.parquet").write_bytes(b"x")
    assert failure(tmp_path / "d").startswith("is a directory without a file that any importer knows")


# --- what cannot be imported -----------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".nsys-rep", ".qdrep"])
def test_a_report_is_refused_with_the_command_that_exports_it(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"my report{suffix}"
    path.write_bytes(b"\x00\x01binary")
    sqlite = tmp_path / "my report.sqlite"
    assert failure(path) == (
        "is a report that only Nsight Systems itself can read. "
        f"Export it: nsys export --type sqlite --output '{sqlite}' '{path}'"
    )


def test_why_there_are_no_kernels_is_said(tmp_path: Path) -> None:
    again = "Record again with: nsys profile --trace=cuda,nvtx -- COMMAND"
    export = Export()
    export.call(5)
    path = export.sqlite(tmp_path / "r.sqlite")
    assert failure(path) == f"has CUDA calls of the host but no kernels on a GPU. {again}"
    export.add("DIAGNOSTIC_EVENT", severity=3, text="Installed CUDA driver is not supported")
    path.unlink()
    assert "the tool itself said: 'Installed CUDA driver is not supported'" in failure(export.sqlite(path))
    path.unlink()
    assert (
        failure(Export().sqlite(path))
        == f"has no table of kernels: the job used no GPU, or CUDA was not traced. {again}"
    )
    export = Export()
    export.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=1, end=2, graphId=3)
    path.unlink()
    assert failure(export.sqlite(path)).endswith(
        "has CUDA graph launches only, not the kernels in them. "
        "Record again with: nsys profile --trace=cuda,nvtx --cuda-graph-trace=node -- COMMAND"
    )


def test_only_the_device_that_was_asked_for(tmp_path: Path) -> None:
    export = Export()
    export.gpu()
    export.gpu(id=4, cuDevice=1, uuid="11111111-0000-0000-0000-000000000000")
    export.kernel(0, 5, "a", 1)
    export.kernel(10, 17, "b", 2, deviceId=1)
    path = export.sqlite(tmp_path / "r.sqlite")
    assert failure(path, device="5") == "has no kernels on device 5: it has some on 0, 1. Choose one with --device."
    for device in ("1", "GPU-11111111-0000-0000-0000-000000000000"):
        assert imported(path, device=device).kernel_ns == 7
    assert rows(path, "SELECT device_id FROM kernels") == [(1,)]


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    export = Export(epoch_ns=None)
    export.add("bookmarks", url="x")
    assert failure(export.sqlite(tmp_path / "r.sqlite")).startswith("has no table of an Nsight Systems export")


def test_pending_changes_beside_the_file_are_not_ignored(tmp_path: Path) -> None:
    path = everything().sqlite(tmp_path / "r.sqlite")
    (tmp_path / "r.sqlite-wal").write_bytes(b"x")
    assert "write-ahead log" in failure(path)


def test_views_in_place_of_tables_are_not_run(tmp_path: Path) -> None:
    """A view in a file from elsewhere is somebody's code: this one would never end."""
    path = Export().sqlite(tmp_path / "r.sqlite")
    connection = sqlite3.connect(path)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS start, i AS end FROM n"
    connection.execute(f"CREATE VIEW {KERNELS} AS {endless}")
    connection.close()
    assert failure(path).startswith("has no table of kernels")


def test_the_source_is_not_touched(tmp_path: Path) -> None:
    path = everything().sqlite(tmp_path / "r.sqlite")
    path.chmod(0o444)
    before = path.read_bytes()
    imported(path)
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["r.sqlite", "run"]


def test_several_exports_become_one_run(tmp_path: Path) -> None:
    paths = []
    for rank in range(2):
        export = Export()
        export.kernel(100 * rank, 100 * rank + 7)
        paths.append(export.sqlite(tmp_path / f"rank{rank}.sqlite"))
    summary = registry.import_files(paths, tmp_path / "run")
    assert (summary.processes, summary.kernels, summary.kernel_ns) == (2, 2, 14)


# --- damaged files -----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutated_and_cut_files_end_in_one_line_or_a_run(tmp_path: Path, data: st.DataObject) -> None:
    original = tmp_path / "original.sqlite"
    if not original.exists():
        everything().sqlite(original)
    content = bytearray(original.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(16, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.none(), st.integers(20, len(content))))
    path = tmp_path / "mutated.sqlite"
    path.write_bytes(content[:cut])
    check_all_or_nothing(path)


def test_damage_that_sqlite_quotes_in_its_message(tmp_path: Path) -> None:
    """The message then is no UTF-8, and Python's module raises UnicodeDecodeError for it."""
    path = everything().sqlite(tmp_path / "r.sqlite")
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE", b"CREAT\xff TABLE", 1))
    assert failure(path).startswith("cannot be read as SQLite")


# --- real files ----------------------------------------------------------------------------------------------


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.skipif(not REAL_TRACES.is_dir(), reason="NANALYZE_REAL_TRACES names no folder of traces")
def test_real_exports_equal_an_independent_reading(tmp_path: Path, opened: ExitStack) -> None:
    checked = 0
    for path in sorted(REAL_TRACES.glob("*.sqlite")):
        connection = opened.enter_context(closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)))
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (KERNELS,)).fetchone():
            with pytest.raises(ImportFailed, match="no kernels on a GPU"):
                registry.import_files([path], tmp_path / path.stem)
            continue
        ((epoch,),) = connection.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME")
        wanted = connection.execute(
            f"""SELECT start + {epoch}, end - start, deviceId, streamId, correlationId, d.value, gridX, blockX,
            registersPerThread FROM {KERNELS}
            LEFT JOIN StringIds AS d ON d.id = demangledName ORDER BY start, correlationId, streamId"""
        ).fetchall()
        summary = registry.import_files([path], tmp_path / path.stem)
        assert (summary.kernels, summary.kernel_ns) == (len(wanted), sum(row[1] for row in wanted))
        with na.open(tmp_path / path.stem) as run:
            table = run.arrow(
                """SELECT start_ns, duration_ns, device_id, stream_id, correlation_id, name, grid_x, block_x,
                registers_per_thread FROM kernels
                JOIN kernel_classes USING (kernel_class_id) ORDER BY start_ns, correlation_id, stream_id"""
            )
            assert run.damage_count == 0
        assert list(zip(*(column.to_pylist() for column in table.columns), strict=True)) == wanted
        checked += 1
    assert checked
