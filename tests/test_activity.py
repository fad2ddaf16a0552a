"""The decoder, against buffers captured on an H200 and against records built from the C structs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fake_records
import numpy as np
import pytest
from fake_cupti import FakeCupti
from fake_records import (
    DRIVER,
    FIXTURES,
    KERNEL,
    MEMCPY,
    MEMSET,
    PEER_COPY,
    RUNTIME,
    SIZES,
    Fixture,
    foreign,
    record,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from nanalyze.recorder import activity
from nanalyze.recorder.cupti import Cupti

KINDS = (KERNEL, MEMCPY, PEER_COPY, MEMSET, DRIVER, RUNTIME)
VERSIONS = sorted(SIZES)
UNKNOWN = 46  # CUPTI_ACTIVITY_KIND_JIT: a kind the recorder never enables
COPY_NAMES = {1: "HtoD", 2: "DtoH", 8: "DtoD"}
fixtures = pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: str(fixture.version))


def array(data: bytes) -> activity.Bytes:
    """`data` at an aligned address."""
    memory = np.empty(len(data) // 8 + 1, dtype=np.uint64).view(np.uint8)[: len(data)]
    memory[:] = np.frombuffer(data, dtype=np.uint8)
    return memory


def decode(version: int, *buffers: bytes, cupti: Cupti | None = None) -> dict[int, activity.Records]:
    decoder = activity.Decoder(activity.record_sizes(version), cupti)
    parts: dict[int, list[activity.Records]] = {}
    for buffer in buffers:
        for kind, records in decoder.decode(array(buffer)).records.items():
            parts.setdefault(kind, []).append(records)
    assert decoder.lost_bytes == 0
    return {kind: np.concatenate(several) for kind, several in parts.items()}


@pytest.fixture
def fake() -> Iterator[FakeCupti]:
    fake = FakeCupti()
    yield fake
    fake.close()


# --- sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_record_sizes_are_those_of_the_headers(version: int) -> None:
    assert activity.record_sizes(version) == SIZES[version]


def test_a_version_newer_than_all_known_ones_has_the_newest_sizes() -> None:
    assert activity.record_sizes(140000) == SIZES[130500]


# --- captured buffers -------------------------------------------------------------------------


def test_there_are_fixtures_of_several_layouts() -> None:
    assert len({activity.record_sizes(fixture.version)[KERNEL] for fixture in FIXTURES}) >= 3


def launched(fixture: Fixture, *ops: str) -> list[dict[str, Any]]:
    return [item for item in fixture.launched if item["op"] in ops]


@fixtures
def test_every_launched_kernel_is_decoded_in_order(fixture: Fixture) -> None:
    kernels = decode(fixture.version, *fixture.buffers)[KERNEL]
    single = np.sort(kernels[kernels["graph"] == 0], order="correlation")
    symbols = {"scaled": b"_Z6scaledILi3EdEvPT0_i", "plain": b"plain", "clustered": b"clustered"}
    expected = [
        (symbols[item["name"]], item["grid"], item["block"], item["shared"], item["stream"])
        for item in launched(fixture, "kernel")
    ]
    streams = {int(stream): place for place, stream in enumerate(dict.fromkeys(single["stream"].tolist()))}
    found = [
        (
            fixture.names[int(row["name"])],
            row["grid"].tolist(),
            row["block"].tolist(),
            int(row["dynamic_shared"]),
            streams[int(row["stream"])],
        )
        for row in single
    ]
    assert found == expected
    assert len(found) == 58
    assert np.unique(single["correlation"]).size == 58


@fixtures
def test_resources_of_the_kernels_are_those_they_were_compiled_with(fixture: Fixture) -> None:
    kernels = decode(fixture.version, *fixture.buffers)[KERNEL]
    names = np.array([fixture.names[int(pointer)] for pointer in kernels["name"]])
    scaled, clustered = kernels[names == b"_Z6scaledILi3EdEvPT0_i"], kernels[names == b"clustered"]
    assert set(scaled["static_shared"].tolist()) == {64 * 8}
    assert set(kernels["static_shared"][names != b"_Z6scaledILi3EdEvPT0_i"].tolist()) == {0}
    assert clustered["cluster"].tolist() == [[2, 1, 1]] * 6
    assert kernels["cluster"][names != b"clustered"].max() <= 1
    assert kernels["registers"].min() >= 8
    assert kernels["registers"].max() <= 64
    assert set(kernels["device"].tolist()) == {0}


@fixtures
def test_nodes_of_a_graph_share_graph_and_correlation(fixture: Fixture) -> None:
    kernels = decode(fixture.version, *fixture.buffers)[KERNEL]
    nodes = kernels[kernels["graph"] != 0]
    assert len(nodes) == 9
    assert np.unique(nodes["graph"]).size == 1
    by_launch = [nodes[nodes["correlation"] == call] for call in np.unique(nodes["correlation"])]
    assert [sorted(launch["grid"][:, 0].tolist()) for launch in by_launch] == [[2, 4, 8]] * 3
    node_of_grid = {(int(row["grid"][0]), int(row["graph_node"])) for row in nodes}
    assert len(node_of_grid) == 3
    assert set(kernels["graph_node"][kernels["graph"] == 0].tolist()) == {0}


@fixtures
def test_copies_have_their_bytes_and_kinds(fixture: Fixture) -> None:
    decoded = decode(fixture.version, *fixture.buffers)
    copies = np.sort(decoded[MEMCPY], order="correlation")
    found = [(COPY_NAMES[int(row["copy_kind"])], int(row["bytes"])) for row in copies]
    assert found == [(item["op"], item["bytes"]) for item in launched(fixture, *COPY_NAMES.values())]
    assert decoded[MEMSET]["bytes"].tolist() == [4096] * 6
    device = 3  # CUPTI_ACTIVITY_MEMORY_KIND_DEVICE
    assert set(copies["destination"][copies["copy_kind"] != 2].tolist()) == {device}
    assert set(copies["source"][copies["copy_kind"] == 2].tolist()) == {device}
    assert set(decoded[MEMSET]["memory_kind"].tolist()) == {device}


@fixtures
def test_times_are_in_order(fixture: Fixture) -> None:
    decoded = decode(fixture.version, *fixture.buffers)
    for kind in (KERNEL, MEMCPY, MEMSET):
        assert (decoded[kind]["end"] > decoded[kind]["start"]).all()
    kernels = decoded[KERNEL]
    single = kernels[kernels["graph"] == 0]
    assert (single["queued"] > 0).all()
    assert (single["queued"] < single["start"]).all()
    in_one_stream = np.sort(single[single["stream"] == single["stream"][0]], order="correlation")
    assert (in_one_stream["start"][1:] >= in_one_stream["end"][:-1]).all()


@fixtures
def test_records_add_up_to_the_bytes_of_the_buffers(fixture: Fixture) -> None:
    decoded = decode(fixture.version, *fixture.buffers)
    sizes = activity.record_sizes(fixture.version)
    assert sum(len(records) * sizes[kind] for kind, records in decoded.items()) == sum(map(len, fixture.buffers))
    assert {kind: len(records) for kind, records in decoded.items()} == {KERNEL: 67, MEMCPY: 18, MEMSET: 6}


def fields_of(decoded: dict[int, activity.Records]) -> dict[tuple[int, str], list[Any]]:
    return {(kind, name): rows[name].tolist() for kind, rows in decoded.items() for name in rows.dtype.names or ()}


@fixtures
def test_cupti_own_walk_gives_the_same(fixture: Fixture, fake: FakeCupti) -> None:
    fake.sizes = fake_records.sizes(fixture.version)
    decoder = activity.Decoder({}, Cupti(fake.library, "fake"))  # knows no size: CUPTI must teach all
    for buffer in fixture.buffers:
        taught = decoder.decode(array(buffer))
        assert taught.skipped == 0
        assert fields_of(taught.records) == fields_of(decode(fixture.version, buffer))
    assert decoder.sizes.items() <= activity.record_sizes(fixture.version).items()


# --- built records ----------------------------------------------------------------------------


def kernel(version: int, correlation: int, **fields: Any) -> bytes:
    return record(KERNEL, version, correlationId=correlation, **fields)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_field_stands_where_the_header_has_it(version: int) -> None:
    data = b"".join(
        [
            kernel(
                version,
                11,
                registersPerThread=12,
                start=13,
                end=14,
                deviceId=15,
                contextId=16,
                streamId=17,
                grid=[18, 19, 20],
                block=[21, 22, 23],
                staticSharedMemory=24,
                dynamicSharedMemory=25,
                localMemoryPerThread=26,
                name=27,
                queued=28,
                graphNodeId=29,
                graphId=30,
                cluster=[31, 32, 33],
            ),
            record(
                MEMCPY,
                version,
                copyKind=1,
                srcKind=2,
                dstKind=3,
                flags=4,
                bytes=5,
                start=6,
                end=7,
                deviceId=8,
                contextId=9,
                streamId=10,
                correlationId=11,
                graphNodeId=12,
                graphId=13,
            ),
            record(
                PEER_COPY,
                version,
                copyKind=1,
                srcKind=2,
                dstKind=3,
                flags=4,
                bytes=5,
                start=6,
                end=7,
                deviceId=8,
                contextId=9,
                streamId=10,
                srcDeviceId=11,
                dstDeviceId=12,
                correlationId=13,
                graphNodeId=14,
                graphId=15,
            ),
            record(
                MEMSET,
                version,
                bytes=1,
                start=2,
                end=3,
                deviceId=4,
                contextId=5,
                streamId=6,
                correlationId=7,
                flags=8,
                memoryKind=9,
                graphNodeId=10,
                graphId=11,
            ),
            record(DRIVER, version, cbid=1, start=2, correlationId=3),
            record(RUNTIME, version, cbid=4, start=5, correlationId=6),
        ]
    )
    decoded = {kind: records[0] for kind, records in decode(version, data).items()}
    shown = ("registers", "start", "end", "device", "context", "stream", "grid", "block", "static_shared")
    assert [np.asarray(decoded[KERNEL][name]).tolist() for name in shown] == [
        12, 13, 14, 15, 16, 17, [18, 19, 20], [21, 22, 23], 24,
    ]  # fmt: skip
    shown = ("dynamic_shared", "local", "name", "queued", "graph_node", "graph", "cluster", "correlation")
    assert [np.asarray(decoded[KERNEL][name]).tolist() for name in shown] == [25, 26, 27, 28, 29, 30, [31, 32, 33], 11]
    shown = ("copy_kind", "source", "destination", "flags", "bytes", "start", "end", "device", "context", "stream")
    assert [int(decoded[MEMCPY][name]) for name in (*shown, "correlation", "graph_node", "graph")] == [*range(1, 14)]
    shown = (*shown, "source_device", "destination_device", "correlation", "graph_node", "graph")
    assert [int(decoded[PEER_COPY][name]) for name in shown] == [*range(1, 16)]
    shown = ("bytes", "start", "end", "device", "context", "stream", "correlation", "flags", "memory_kind")
    assert [int(decoded[MEMSET][name]) for name in (*shown, "graph_node", "graph")] == [*range(1, 12)]
    assert [int(decoded[DRIVER][name]) for name in ("cbid", "start", "correlation")] == [1, 2, 3]
    assert [int(decoded[RUNTIME][name]) for name in ("cbid", "start", "correlation")] == [4, 5, 6]


@pytest.mark.parametrize("version", [18, 130500])
@pytest.mark.parametrize("runs", [[1], [1] * 40, [16], [17], [300], [15, 1, 17, 2000, 3], [5000]])
def test_runs_of_any_length_keep_their_order(version: int, runs: list[int]) -> None:
    expected: dict[int, list[int]] = {}
    data = []
    number = 0
    for place, length in enumerate(runs):
        kind = KINDS[place % len(KINDS)]
        for _ in range(length):
            number += 1
            data.append(record(kind, version, correlationId=number))
            expected.setdefault(kind, []).append(number)
    decoded = decode(version, b"".join(data))
    assert {kind: records["correlation"].tolist() for kind, records in decoded.items()} == expected


def test_a_decoder_serves_buffers_of_one_kind_after_mixed_ones() -> None:
    version = 130001
    decoder = activity.Decoder(activity.record_sizes(version))
    mixed = decoder.decode(array(kernel(version, 1) + record(MEMSET, version, correlationId=2) + kernel(version, 3)))
    alone = decoder.decode(array(kernel(version, 4) * 3))
    assert mixed.records[KERNEL]["correlation"].tolist() == [1, 3]
    assert alone.records[KERNEL]["correlation"].tolist() == [4, 4, 4]
    assert set(alone.records) == {KERNEL}


@pytest.mark.parametrize("size", [0, 1, 4, 7, 8])
def test_a_buffer_too_small_for_any_record_gives_none(size: int) -> None:
    decoder = activity.Decoder(activity.record_sizes(130001))
    assert decoder.decode(array(b"\x0a" + bytes(7))[:size]).records == {}
    assert decoder.lost_bytes == size


# --- what the sizes do not explain ------------------------------------------------------------


def test_records_of_other_kinds_are_skipped_and_counted(fake: FakeCupti) -> None:
    version = 130001
    fake.sizes |= {UNKNOWN: 56, 47: 24}
    decoder = activity.Decoder(activity.record_sizes(version), Cupti(fake.library, "fake"))
    data = kernel(version, 1) + foreign(UNKNOWN, 56) * 2 + kernel(version, 2) + foreign(47, 24) + kernel(version, 3)
    decoded = decoder.decode(array(data))
    assert decoded.records[KERNEL]["correlation"].tolist() == [1, 2, 3]
    assert decoded.skipped == 3
    assert decoder.lost_bytes == 0
    assert decoder.sizes[UNKNOWN] == 56
    walked = fake.calls["cuptiActivityGetNextRecord"]
    again = decoder.decode(array(data))  # taught: no more questions
    assert fake.calls["cuptiActivityGetNextRecord"] == walked
    assert again.records[KERNEL]["correlation"].tolist() == [1, 2, 3]


def test_skipped_records_are_counted_also_once_their_size_is_known(fake: FakeCupti) -> None:
    fake.sizes[UNKNOWN] = 56
    decoder = activity.Decoder(activity.record_sizes(130001), Cupti(fake.library, "fake"))
    data = array(kernel(130001, 1) + foreign(UNKNOWN, 56) * 2 + kernel(130001, 2))
    assert [decoder.decode(data).skipped for _ in range(3)] == [2, 2, 2]


def test_a_size_that_differs_from_the_table_is_learnt_from_cupti(fake: FakeCupti) -> None:
    fake.sizes[KERNEL] = 264  # a CUPTI newer than the table
    newer = [kernel(130500, number) + bytes(16) for number in (1, 2, 3)]
    decoder = activity.Decoder(activity.record_sizes(130600), Cupti(fake.library, "fake"))
    decoded = decoder.decode(array(b"".join(newer)))
    assert decoded.records[KERNEL]["correlation"].tolist() == [1, 2, 3]
    assert decoder.sizes[KERNEL] == 264
    assert decoder.lost_bytes == 0


@pytest.mark.parametrize("with_cupti", [False, True])
@pytest.mark.parametrize("cut", [1, 8, 100, 215])
def test_a_cut_last_record_is_lost_and_the_rest_kept(fake: FakeCupti, with_cupti: bool, cut: int) -> None:
    cupti = Cupti(fake.library, "fake") if with_cupti else None
    decoder = activity.Decoder(activity.record_sizes(130001), cupti)
    data = b"".join(kernel(130001, number) for number in range(1, 31))
    decoded = decoder.decode(array(data[:-cut]))
    assert decoded.records[KERNEL]["correlation"].tolist() == [*range(1, 30)]
    assert decoder.lost_bytes == 216 - cut


@pytest.mark.parametrize("with_cupti", [False, True])
def test_what_follows_an_unknown_kind_is_counted_as_lost(fake: FakeCupti, with_cupti: bool) -> None:
    cupti = Cupti(fake.library, "fake") if with_cupti else None  # this one does not know the kind either
    decoder = activity.Decoder(activity.record_sizes(130001), cupti)
    rubbish = foreign(99, 48) + kernel(130001, 8)
    decoded = decoder.decode(array(kernel(130001, 7) + rubbish))
    assert decoded.records[KERNEL]["correlation"].tolist() == [7]
    assert decoder.lost_bytes == len(rubbish)


@pytest.mark.parametrize("code", [12, 21, 999])
def test_a_walk_that_finds_less_than_the_sizes_explain_is_not_used(fake: FakeCupti, code: int) -> None:
    fake.fail("cuptiActivityGetNextRecord", code)
    decoder = activity.Decoder(activity.record_sizes(130001), Cupti(fake.library, "fake"))
    decoded = decoder.decode(array(kernel(130001, 7) * 2 + foreign(99, 48)))
    assert decoded.records[KERNEL]["correlation"].tolist() == [7, 7]
    assert decoder.lost_bytes == 48


def test_another_error_of_the_walk_costs_only_what_cannot_be_explained(fake: FakeCupti) -> None:
    fake.sizes[99] = 48
    fake.fail("cuptiActivityGetNextRecord", 999, at=2)
    decoder = activity.Decoder(activity.record_sizes(130001), Cupti(fake.library, "fake"))
    decoded = decoder.decode(array(kernel(130001, 7) + foreign(99, 48) + kernel(130001, 8)))
    assert decoded.records[KERNEL]["correlation"].tolist() == [7]
    assert decoder.lost_bytes == 48 + 216


# --- hostile buffers --------------------------------------------------------------------------

SENTINEL = 0xDEADBEEF


def decode_inside(content: bytes, version: int, cupti: Cupti | None = None) -> tuple[activity.Decoder, int]:
    """Decode `content` lying between records that must not be seen; the bytes its records take."""
    fence = kernel(version, SENTINEL) * 3
    memory = array(fence + content + fence)
    buffer = memory[len(fence) : len(fence) + len(content)]
    decoder = activity.Decoder(activity.record_sizes(version), cupti)
    decoded = decoder.decode(buffer)
    low, high = buffer.ctypes.data, buffer.ctypes.data + buffer.size
    for records in decoded.records.values():
        assert SENTINEL not in records["correlation"]
        if np.shares_memory(records, memory):
            assert low <= records.ctypes.data
            assert records.ctypes.data + records.nbytes <= high
    return decoder, sum(records.nbytes for records in decoded.records.values())


@settings(max_examples=150, deadline=2000)
@given(content=st.binary(max_size=3000), version=st.sampled_from(VERSIONS))
def test_random_bytes_neither_crash_nor_read_outside(content: bytes, version: int) -> None:
    decoder, taken = decode_inside(content, version)
    assert taken + decoder.lost_bytes == len(content)


@st.composite
def mutated(draw: st.DrawFn) -> tuple[int, bytes]:
    """CUPTI version and part of a captured buffer, words overwritten, often by what looks like a kind."""
    fixture = FIXTURES[draw(st.integers(0, len(FIXTURES) - 1))]  # drawn by number: a fixture's repr is 70 kB
    data = bytearray(b"".join(fixture.buffers))
    start = draw(st.integers(0, len(data) // 8)) * 8 if draw(st.booleans()) else 0
    data = data[start : start + draw(st.integers(0, 6000))]
    words = st.one_of(st.sampled_from([*KINDS, 0, 99, 2**32 - 1]), st.integers(0, 2**32 - 1))
    for at, word in draw(st.lists(st.tuples(st.integers(0, 1500), words), max_size=8)):
        if at * 4 + 4 <= len(data):
            data[at * 4 : at * 4 + 4] = word.to_bytes(4, "little")
    return fixture.version, bytes(data)


@settings(max_examples=150, deadline=2000)
@given(case=mutated())
def test_damaged_buffers_neither_crash_nor_read_outside(case: tuple[int, bytes]) -> None:
    version, content = case
    decoder, taken = decode_inside(content, version)
    assert taken + decoder.lost_bytes == len(content)


@settings(max_examples=60, deadline=2000)
@given(case=mutated())
def test_damaged_buffers_are_accounted_for_with_cupti_walking(case: tuple[int, bytes]) -> None:
    version, content = case
    fake = FakeCupti()
    fake.sizes = fake_records.sizes(version) | {99: 32}
    decoder, taken = decode_inside(content, version, Cupti(fake.library, "fake"))
    assert taken + decoder.lost_bytes <= len(content)
    if not decoder.sizes.get(99):
        assert taken + decoder.lost_bytes == len(content)


# --- in C and in Python ------------------------------------------------------------------------

in_c = pytest.mark.skipif(activity.native is None, reason="_callbacks.c is not compiled here")


@in_c
@fixtures
def test_both_walks_find_the_same_in_captured_buffers(fixture: Fixture) -> None:
    decoder = activity.Decoder(activity.record_sizes(fixture.version))
    for buffer in fixture.buffers:
        memory = array(buffer)
        found = decoder._walk(memory)
        assert found == decoder._walk_in_python(memory)
        assert found[1] == len(buffer)


@in_c
@given(case=mutated())
@settings(max_examples=300, deadline=None)
def test_both_walks_find_the_same_in_damaged_buffers(case: tuple[int, bytes]) -> None:
    version, content = case
    decoder = activity.Decoder(activity.record_sizes(version))
    memory = array(content)
    assert decoder._walk(memory) == decoder._walk_in_python(memory)


@in_c
@given(content=st.binary(max_size=2000), version=st.sampled_from(VERSIONS))
def test_both_walks_find_the_same_in_any_bytes(content: bytes, version: int) -> None:
    decoder = activity.Decoder(activity.record_sizes(version))
    memory = array(content)
    assert decoder._walk(memory) == decoder._walk_in_python(memory)


@in_c
def test_many_short_runs_are_found_in_c(fake: FakeCupti) -> None:
    version = 130001
    decoder = activity.Decoder(activity.record_sizes(version))
    pair = record(KERNEL, version, correlationId=1) + record(MEMSET, version, correlationId=2)
    runs, end = decoder._walk(array(pair * 500))
    assert end == len(pair) * 500
    assert [(kind, count) for kind, _, count in runs] == [(KERNEL, 1), (MEMSET, 1)] * 500


def test_records_of_several_buffers_are_joined_by_kind_and_layout() -> None:
    def decoded(version: int, *correlations: int) -> activity.Decoded:
        content = b"".join(record(KERNEL, version, correlationId=number) for number in correlations)
        return activity.Decoder(activity.record_sizes(version)).decode(array(content))

    parts = [decoded(130001, 1, 2), decoded(130001, 3), activity.Decoded({}), decoded(130202, 4)]
    found = [(kind, records["correlation"].tolist()) for kind, records in activity.joined(parts)]
    assert found == [(KERNEL, [1, 2, 3]), (KERNEL, [4])]
    assert list(activity.joined([])) == []
