"""Kernel classes and the columns made of activity records."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import fake_records
import numpy as np
import pytest
from fake_records import FIXTURES, KERNEL, MEMCPY, MEMSET, PEER_COPY, Fixture, Names, record

from nanalyze.recorder import activity
from nanalyze.recorder.launch_times import LaunchTimes
from nanalyze.recorder.launches import ClassTable, class_columns, copy_columns, kernel_columns, read_name
from nanalyze.rundir.classes import KernelClass
from nanalyze.rundir.schema import TABLES

VERSION = 130001
GOLDEN = KernelClass(b"_Z6scaledILi3EdEvPT0_i", (3, 2, 1), (64, 2, 1), (2, 1, 1), 40, 512, 256, 8)


def decode(*records: bytes, kind: int = KERNEL) -> Any:
    memory = np.frombuffer(bytearray(b"".join(records)), dtype=np.uint8)
    return activity.Decoder(activity.record_sizes(VERSION)).decode(memory).records[kind]


def kernel(name: int, correlation: int = 1, **fields: Any) -> bytes:
    times = {"start": 1000, "end": 1500, "queued": 900}
    shape = {"grid": [1, 1, 1], "block": [32, 1, 1]}
    return record(KERNEL, VERSION, name=name, correlationId=correlation, **{**times, **shape, **fields})


def values(column: Any) -> list[Any]:
    return list(column.tolist())


# --- classes ----------------------------------------------------------------------------------


def test_the_id_of_a_class_never_changes() -> None:
    assert GOLDEN.id == 1337426622584643748
    program = (
        "from nanalyze.rundir.classes import KernelClass; "
        f"print(KernelClass({GOLDEN.name!r}, (3, 2, 1), (64, 2, 1), (2, 1, 1), 40, 512, 256, 8).id)"
    )
    other = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert int(other.stdout) == GOLDEN.id


def test_a_record_gets_the_id_of_its_class() -> None:
    names = Names()
    fields = {
        "grid": [3, 2, 1],
        "block": [64, 2, 1],
        "cluster": [2, 1, 1],
        "registersPerThread": 40,
        "staticSharedMemory": 512,
        "dynamicSharedMemory": 256,
        "localMemoryPerThread": 8,
    }
    table = ClassTable()
    assert table.ids(decode(kernel(names.pointer(GOLDEN.name), **fields))).tolist() == [GOLDEN.id]
    assert table.get(GOLDEN.id) == GOLDEN
    assert table.take_new() == [GOLDEN]
    assert table.take_new() == []


DIFFERENCES: list[dict[str, Any]] = [
    {"grid": [2, 1, 1]},
    {"grid": [1, 2, 1]},
    {"grid": [1, 1, 2]},
    {"block": [33, 1, 1]},
    {"block": [32, 2, 1]},
    {"block": [32, 1, 2]},
    {"cluster": [2, 1, 1]},
    {"cluster": [1, 2, 1]},
    {"cluster": [1, 1, 2]},
    {"registersPerThread": 33},
    {"staticSharedMemory": 1},
    {"dynamicSharedMemory": 1},
    {"localMemoryPerThread": 1},
]


def test_every_part_of_the_shape_tells_classes_apart() -> None:
    names = Names()
    same = names.pointer(b"k")
    records = [kernel(same), *(kernel(same, **difference) for difference in DIFFERENCES), kernel(names.pointer(b"l"))]
    ids = ClassTable().ids(decode(*records))
    assert len(set(ids.tolist())) == len(records)
    assert ((ids > 0) & (ids < 2**63)).all()


def test_what_is_no_part_of_the_shape_does_not() -> None:
    names = Names()
    one, other = names.pointer(b"k"), names.pointer(b"k\0 at another address")
    assert read_name(other) == b"k"
    about = ({}, {"start": 5, "end": 9}, {"deviceId": 3}, {"streamId": 8}, {"graphId": 4}, {"gridId": 77})
    ids = ClassTable().ids(decode(*(kernel(one, **more) for more in about), kernel(other)))
    assert len(set(ids.tolist())) == 1


def test_a_reused_pointer_gets_the_class_of_its_new_name() -> None:
    text = {1: b"old"}
    table = ClassTable(text.__getitem__)
    first = table.ids(decode(kernel(1), kernel(1, grid=[2, 1, 1])))
    text[1] = b"new"
    second = table.ids(decode(kernel(1), kernel(1, grid=[2, 1, 1])))
    assert [table.get(value).name for value in [*first, *second]] == [b"old"] * 2 + [b"new"] * 2
    assert len({*first.tolist(), *second.tolist()}) == 4


def test_a_reused_pointer_is_noticed_when_its_new_name_comes_with_a_new_shape() -> None:
    text = {1: b"old"}
    table = ClassTable(text.__getitem__)
    table.ids(decode(kernel(1)))
    text[1] = b"new"
    table.ids(decode(kernel(1, grid=[2, 1, 1])))
    (back,) = table.ids(decode(kernel(1)))  # the old shape under the new name
    assert table.get(back).name == b"new"


def test_a_name_that_comes_back_is_not_announced_again() -> None:
    text = {1: b"a"}
    table = ClassTable(text.__getitem__)
    ids = []
    for name in (b"a", b"b", b"a"):
        text[1] = name
        ids += table.ids(decode(kernel(1))).tolist()
    assert ids[0] == ids[2] != ids[1]
    assert [new.name for new in table.take_new()] == [b"a", b"b"]


def test_a_hundred_thousand_names() -> None:
    count = 100_000
    pointers = np.arange(1, count + 1, dtype=np.uint64)
    one = np.frombuffer(kernel(0), dtype=np.uint8)
    buffer = np.tile(one, count)
    buffer.reshape(count, -1)[:, 104:112] = pointers.view(np.uint8).reshape(count, 8)
    records = activity.Decoder(activity.record_sizes(VERSION)).decode(buffer).records[KERNEL]
    table = ClassTable(lambda pointer: b"kernel_%d" % pointer)
    ids = table.ids(records)
    assert np.unique(ids).size == count
    assert table.get(int(ids[4711])).name == b"kernel_4712"
    assert len(table.take_new()) == count
    shuffled = np.random.default_rng(1).permutation(count)
    assert (table.ids(records[shuffled]) == ids[shuffled]).all()
    assert table.take_new() == []


def test_hostile_names_become_text() -> None:
    names = Names()
    hostile = [b"\xff\xfe<script>'\"", b"k" * 10_000, "καλά".encode(), b"", b"a\nb\t;DROP TABLE kernels"]
    table = ClassTable()
    table.ids(decode(*(kernel(names.pointer(name)) for name in hostile)))
    columns = class_columns(table.take_new())
    texts = dict(zip(columns["kernel_class_id"], columns["name_mangled"], strict=True))
    expected = ["\\xff\\xfe<script>'\"", "k" * 10_000, "καλά", "", "a\nb\t;DROP TABLE kernels"]
    assert sorted(texts.values()) == sorted(expected)
    assert columns["name"] == columns["name_mangled"]


def test_a_null_name_pointer_is_an_empty_name() -> None:
    table = ClassTable()
    (found,) = table.ids(decode(kernel(0)))
    assert table.get(found).name == b""


def test_class_columns_are_those_of_the_schema() -> None:
    columns = class_columns([GOLDEN])
    assert set(columns) == set(TABLES["kernel_classes"].column_names)
    assert {name: column[0] for name, column in columns.items()} == {
        "kernel_class_id": GOLDEN.id,
        "name_mangled": "_Z6scaledILi3EdEvPT0_i",
        "name": "void scaled<3, double>(double*, int)",
        "grid_x": 3,
        "grid_y": 2,
        "grid_z": 1,
        "block_x": 64,
        "block_y": 2,
        "block_z": 1,
        "cluster_x": 2,
        "cluster_y": 1,
        "cluster_z": 1,
        "registers_per_thread": 40,
        "static_shared_bytes": 512,
        "dynamic_shared_bytes": 256,
        "local_bytes_per_thread": 8,
    }


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: str(fixture.version))
def test_captured_launches_fall_into_their_classes(fixture: Fixture) -> None:
    names = Names()
    table = ClassTable()
    decoder = activity.Decoder(activity.record_sizes(fixture.version))
    ids: list[int] = []
    for buffer in fixture.relocated(names):
        ids += table.ids(decoder.decode(np.frombuffer(bytearray(buffer), np.uint8)).records[KERNEL]).tolist()
    found = [table.get(one) for one in ids]
    counted = Counter((one.name, one.grid, one.block, one.dynamic_shared_bytes) for one in found)
    assert counted == {
        **{(b"_Z6scaledILi3EdEvPT0_i", (3, 2, 1), (64, 2, 1), 256 * step): 1 for step in range(6)},
        **{(b"plain", (grid, 1, 1), (64, 1, 1), 0): 3 for grid in (2, 4, 8)},  # the graph's nodes
        (b"clustered", (16, 1, 1), (256, 1, 1), 0): 6,
        (b"plain", (32, 1, 1), (128, 1, 1), 0): 6,
        (b"plain", (8, 1, 1), (32, 4, 2), 0): 40,
    }


# --- kernels ----------------------------------------------------------------------------------


def columns_of(*records: bytes, launch_times: dict[int, int] | None = None) -> tuple[dict[str, list[Any]], int]:
    times = LaunchTimes()
    for correlation, time_ns in (launch_times or {}).items():
        times.note(correlation, time_ns)
    columns, odd = kernel_columns(decode(*records), ClassTable(lambda pointer: b"k%d" % pointer), times)
    return {name: values(column) for name, column in columns.items()}, odd


def test_kernel_columns_are_those_of_the_schema() -> None:
    columns, odd = columns_of(
        kernel(1, 5, start=1000, end=1400, queued=800, deviceId=2, contextId=3, streamId=4, graphId=0, graphNodeId=0)
    )
    assert set(columns) == set(TABLES["kernels"].column_names)
    class_id = columns.pop("kernel_class_id")
    assert class_id == [KernelClass(b"k1", (1, 1, 1), (32, 1, 1), (0, 0, 0), 0, 0, 0, 0).id]
    assert {name: column[0] for name, column in columns.items()} == {
        "start_ns": 1000,
        "duration_ns": 400,
        "device_id": 2,
        "context_id": 3,
        "stream_id": 4,
        "graph_id": None,
        "graph_node_id": None,
        "correlation_id": 5,
        "queued_ns": 800,
    }
    assert odd == 0


def test_a_launch_without_times_has_null_times_and_no_stale_queued() -> None:
    columns, odd = columns_of(kernel(1, 5, start=0, end=0, queued=800), kernel(1, 6))
    assert (columns["start_ns"], columns["duration_ns"]) == ([None, 1000], [None, 500])
    assert columns["queued_ns"] == [None, 900]
    assert odd == 0


def test_the_launch_time_of_a_measured_launch_comes_from_the_exact_layer() -> None:
    columns, _ = columns_of(kernel(1, 5, start=0, end=0, queued=800), kernel(1, 6), launch_times={5: 950, 6: 1})
    assert columns["queued_ns"] == [950, 1]


def test_the_launch_time_of_graph_nodes_is_that_of_the_graph_launch() -> None:
    nodes = [kernel(1, call, graphId=9, graphNodeId=node, queued=77) for call in (5, 6) for node in (1, 2)]
    columns, _ = columns_of(*nodes, launch_times={5: 950})
    assert columns["queued_ns"] == [950, 950, None, None]
    assert columns["graph_id"] == [9] * 4
    assert columns["graph_node_id"] == [1, 2, 1, 2]


@pytest.mark.parametrize(("start", "end"), [(1000, 999), (0, 500), (500, 0), (2**63, 2**63 - 5)])
def test_impossible_times_are_null_and_counted(start: int, end: int) -> None:
    columns, odd = columns_of(kernel(1, 5, start=start, end=end), kernel(1, 6))
    assert (columns["start_ns"], columns["duration_ns"], odd) == ([None, 1000], [None, 500], 1)
    assert columns["correlation_id"] == [5, 6]


def test_a_kernel_of_no_duration_keeps_its_times() -> None:
    columns, odd = columns_of(kernel(1, 5, start=1000, end=1000))
    assert (columns["start_ns"], columns["duration_ns"], odd) == ([1000], [0], 0)


def test_an_unknown_queued_is_null() -> None:
    assert columns_of(kernel(1, 5, queued=0))[0]["queued_ns"] == [None]


def test_kernels_of_the_profiler_are_left_out() -> None:
    table = ClassTable({1: b"WaitNs", 2: b"WaitNsLonger", 3: b"k"}.__getitem__)
    columns, _ = kernel_columns(decode(kernel(1, 5), kernel(2, 6), kernel(3, 7), kernel(1, 8)), table, LaunchTimes())
    assert values(columns["correlation_id"]) == [6, 7]
    assert {new.name for new in table.take_new()} == {b"WaitNsLonger", b"k"}


def test_a_buffer_of_the_profilers_kernels_alone_gives_no_rows() -> None:
    columns, odd = kernel_columns(decode(kernel(1, 5)), ClassTable(lambda _: b"WaitNs"), LaunchTimes())
    assert {name: len(column) for name, column in columns.items()} == dict.fromkeys(TABLES["kernels"].column_names, 0)
    assert odd == 0


# --- copies -----------------------------------------------------------------------------------


def copied(kind: int, **fields: Any) -> tuple[dict[str, Any], int]:
    columns, odd = copy_columns(decode(record(kind, VERSION, **fields), kind=kind), kind)
    assert set(columns) == set(TABLES["copies"].column_names)
    return {name: values(column)[0] for name, column in columns.items()}, odd


COPY = {"start": 10, "end": 30, "bytes": 2**40, "contextId": 1, "streamId": 2, "correlationId": 3}
COPIED = {
    "start_ns": 10,
    "duration_ns": 20,
    "bytes": 2**40,
    "context_id": 1,
    "stream_id": 2,
    "correlation_id": 3,
    "device_id": 0,
    "source_device_id": None,
    "destination_device_id": None,
    "graph_id": None,
    "graph_node_id": None,
}


def test_a_memory_copy() -> None:
    row, odd = copied(MEMCPY, copyKind=2, srcKind=3, dstKind=2, flags=1, **COPY)
    assert row == COPIED | {"kind": "DtoH", "source": "device", "destination": "pinned", "is_async": True}
    assert odd == 0


def test_a_copy_between_devices() -> None:
    row, _ = copied(PEER_COPY, copyKind=10, srcKind=3, dstKind=3, srcDeviceId=4, dstDeviceId=5, deviceId=4, **COPY)
    assert row == COPIED | {
        "kind": "PtoP",
        "source": "device",
        "destination": "device",
        "is_async": False,
        "device_id": 4,
        "source_device_id": 4,
        "destination_device_id": 5,
    }


def test_a_memory_set_of_a_graph() -> None:
    row, _ = copied(MEMSET, value=7, memoryKind=5, flags=1, graphId=6, graphNodeId=2**33, **COPY)
    assert row == COPIED | {
        "kind": "memset",
        "source": None,
        "destination": "managed",
        "is_async": True,
        "graph_id": 6,
        "graph_node_id": 2**33,
    }


# CUpti_ActivityMemcpyKind and CUpti_ActivityMemoryKind of cupti_activity.h, and one number beyond
COPY_KINDS = ("unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP", "unknown")
MEMORY_KINDS = (
    "unknown",
    "pageable",
    "pinned",
    "device",
    "array",
    "managed",
    "device_static",
    "managed_static",
    "unknown",
)


@pytest.mark.parametrize(
    ("number", "name"),
    [
        *enumerate(
            ["unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP", "unknown"]
        )
    ],
)
def test_copy_kinds_have_their_names(number: int, name: str) -> None:
    assert copied(MEMCPY, copyKind=number, **COPY)[0]["kind"] == name


@pytest.mark.parametrize(
    ("number", "name"),
    [
        *enumerate(
            [
                "unknown",
                "pageable",
                "pinned",
                "device",
                "array",
                "managed",
                "device_static",
                "managed_static",
                "unknown",
            ]
        )
    ],
)
def test_memory_kinds_have_their_names(number: int, name: str) -> None:
    row, _ = copied(MEMCPY, srcKind=number, dstKind=number, **COPY)
    assert (row["source"], row["destination"]) == (name, name)
    assert copied(MEMSET, memoryKind=number, **COPY)[0]["destination"] == name


def test_kinds_beyond_the_known_ones_are_unknown() -> None:
    row, _ = copied(MEMCPY, copyKind=255, srcKind=200, dstKind=99, **COPY)
    assert (row["kind"], row["source"], row["destination"]) == ("unknown", "unknown", "unknown")


def test_impossible_times_of_copies_are_null_and_counted() -> None:
    row, odd = copied(MEMCPY, **{**COPY, "end": 9})
    assert (row["start_ns"], row["duration_ns"], odd) == (None, None, 1)


@pytest.mark.parametrize("version", sorted(fake_records.SIZES))
def test_copies_of_every_layout(version: int) -> None:
    memory = np.frombuffer(bytearray(record(MEMCPY, version, copyKind=1, **COPY) * 20), dtype=np.uint8)
    records = activity.Decoder(activity.record_sizes(version)).decode(memory).records[MEMCPY]
    columns, _ = copy_columns(records, MEMCPY)
    assert values(columns["bytes"]) == [2**40] * 20
    assert values(columns["kind"]) == ["HtoD"] * 20
