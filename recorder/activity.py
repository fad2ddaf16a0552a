"""Decoding CUPTI activity buffers in bulk.

A buffer is a sequence of C structs, each starting with its kind. Newer CUPTI versions only append
fields, so the fields read here stand at the same offsets in every version from 12.0 on; what
changes is the size of a record. A walk over the kinds finds runs of equal records, and each run
becomes one numpy view: no Python object a record. A buffer whose walk does not end exactly at its
last byte, or meets a kind of unknown size, is walked again by CUPTI itself
(`cuptiActivityGetNextRecord`), which also teaches the sizes.

Layouts were read off `cupti_activity.h` of CUPTI 12.1 to 13.5 by a compiler and checked against
buffers captured on an H200 (tests/fixtures/activity).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from nanalyze.recorder.cupti import (
    INVALID_KIND,
    KIND_CONCURRENT_KERNEL,
    KIND_DRIVER,
    KIND_MARKER,
    KIND_MEMCPY,
    KIND_MEMCPY2,
    KIND_MEMSET,
    KIND_RUNTIME,
    MAX_LIMIT_REACHED,
    Cupti,
    CuptiError,
)
from nanalyze.rundir.errors import RecorderError

native: ModuleType | None
try:
    native = importlib.import_module("nanalyze.recorder._callbacks")
except ImportError:
    native = None

Records = npt.NDArray[np.void]
Bytes = npt.NDArray[np.uint8]

_KERNEL_FIELDS = {
    "registers": ("u2", 6),
    "start": ("u8", 16),
    "end": ("u8", 24),
    "device": ("u4", 40),
    "context": ("u4", 44),
    "stream": ("u4", 48),
    "grid": (("u4", 3), 52),
    "block": (("u4", 3), 64),
    "static_shared": ("u4", 76),
    "dynamic_shared": ("u4", 80),
    "local": ("u4", 84),
    "correlation": ("u4", 92),
    "name": ("u8", 104),
    "queued": ("u8", 120),
    "graph_node": ("u8", 144),
    "graph": ("u4", 156),
    "cluster": (("u4", 3), 176),
    # Overlapping 64-bit views of the launch shape, so that classes are hashed in few steps.
    "shape_yz": ("u8", 56),
    "shape_bxy": ("u8", 64),
    "shape_bz_static": ("u8", 72),
    "shape_dynamic_local": ("u8", 80),
    "cluster_xy": ("u8", 176),
}
# The same in a copy and in a memory set.
_TRANSFER_FIELDS = {
    "bytes": ("u8", 8),
    "start": ("u8", 16),
    "end": ("u8", 24),
    "device": ("u4", 32),
    "context": ("u4", 36),
    "stream": ("u4", 40),
    "correlation": ("u4", 44),
    "graph_node": ("u8", 64),
    "graph": ("u4", 72),
}
_COPY_KIND_FIELDS = {"copy_kind": ("u1", 4), "source": ("u1", 5), "destination": ("u1", 6), "flags": ("u1", 7)}
_COPY_FIELDS = {**_COPY_KIND_FIELDS, **_TRANSFER_FIELDS}
_MEMSET_FIELDS = {**_TRANSFER_FIELDS, "flags": ("u2", 48), "memory_kind": ("u2", 50)}
_PEER_COPY_FIELDS = {
    **_COPY_FIELDS,
    "source_device": ("u4", 44),
    "destination_device": ("u4", 52),
    "correlation": ("u4", 60),
    "graph_node": ("u8", 72),
    "graph": ("u4", 80),
}
# CUpti_ActivityMarker2: an NVTX range opens or closes.
_MARKER_FIELDS = {
    "flags": ("u4", 4),
    "time": ("u8", 8),
    "id": ("u4", 16),
    "object": ("u4", 20),
    "thread": ("u4", 28),
    "name": ("u8", 40),
    "domain": ("u8", 48),
}
_API_FIELDS = {"cbid": ("u4", 4), "start": ("u8", 8), "correlation": ("u4", 32)}
FIELDS: dict[int, dict[str, Any]] = {
    KIND_DRIVER: _API_FIELDS,
    KIND_RUNTIME: _API_FIELDS,
    KIND_CONCURRENT_KERNEL: _KERNEL_FIELDS,
    KIND_MEMCPY: _COPY_FIELDS,
    KIND_MEMCPY2: _PEER_COPY_FIELDS,
    KIND_MEMSET: _MEMSET_FIELDS,
    KIND_MARKER: _MARKER_FIELDS,
}

# Size of a record by kind, from the CUPTI API version given on.
_SIZES: tuple[tuple[int, dict[int, int]], ...] = (
    (
        17,
        {
            KIND_DRIVER: 40,
            KIND_RUNTIME: 40,
            KIND_CONCURRENT_KERNEL: 208,
            KIND_MEMCPY: 88,
            KIND_MEMSET: 88,
            KIND_MEMCPY2: 96,
            KIND_MARKER: 56,
        },
    ),  # 12.0
    (26, {KIND_MEMCPY: 96}),  # 12.8: copyCount
    (130000, {KIND_CONCURRENT_KERNEL: 216}),  # isDeviceLaunched
    (130100, {KIND_CONCURRENT_KERNEL: 224}),  # priority
    (130300, {KIND_CONCURRENT_KERNEL: 232}),  # executionModel
    (130400, {KIND_CONCURRENT_KERNEL: 248, KIND_MEMCPY: 112, KIND_MEMSET: 104}),  # source graph
)

_SCALAR_STEPS = 16  # a run shorter than this is cheaper to walk in Python than to hand to numpy


def record_sizes(cupti_version: int) -> dict[int, int]:
    """Bytes a record of each known kind takes in CUPTI API version `cupti_version`."""
    sizes: dict[int, int] = {}
    for since, changed in _SIZES:
        if cupti_version >= since:
            sizes.update(changed)
    return sizes


def _dtype(kind: int, size: int) -> np.dtype[np.void]:
    fields = FIELDS[kind]
    return np.dtype(
        {
            "names": list(fields),
            "formats": [form for form, _ in fields.values()],
            "offsets": [offset for _, offset in fields.values()],
            "itemsize": size,
        }
    )


@dataclass
class Decoded:
    """The records of one buffer, by kind, in buffer order; `skipped` counts records of other kinds."""

    records: dict[int, Records]
    skipped: int = 0


def joined(decoded: Sequence[Decoded]) -> Iterator[tuple[int, Records]]:
    """The records of several buffers together, kind by kind, in the order of the buffers.

    A kind whose layout changed in between comes more than once.
    """
    for kind in dict.fromkeys(kind for buffer in decoded for kind in buffer.records):
        parts = [buffer.records[kind] for buffer in decoded if kind in buffer.records]
        for dtype, same in itertools.groupby(parts, key=lambda part: part.dtype):
            blobs = [part.view(f"V{dtype.itemsize}") for part in same]  # else copied field by field: 60 times slower
            yield kind, (blobs[0] if len(blobs) == 1 else np.concatenate(blobs)).view(dtype)


@dataclass
class Decoder:
    """Turns buffers of one CUPTI version into structured arrays.

    `cupti` is asked only about buffers that the known sizes do not explain. Such a buffer is cut at
    the first byte that nobody can explain and the rest counted in `lost_bytes`.
    """

    sizes: dict[int, int]
    cupti: Cupti | None = None
    lost_bytes: int = 0
    dtypes: dict[int, np.dtype[np.void]] = field(default_factory=dict)

    def decode(self, buffer: Bytes) -> Decoded:
        """The records in `buffer` (uint8, 8-byte aligned, only its valid bytes).

        The arrays may share memory with `buffer`: use them before it is reused.
        """
        runs, end = self._walk(buffer)
        if end < buffer.size and self.cupti is not None:
            with contextlib.suppress(RecorderError):  # what was found so far is kept, the rest is lost
                runs, end = max((runs, end), self._walk_by_cupti(self.cupti, buffer), key=lambda walk: walk[1])
        self.lost_bytes += buffer.size - end
        skipped = sum(count for kind, _, count in runs if kind not in FIELDS)
        return Decoded(self._gather(buffer, runs), skipped)

    def _walk(self, buffer: Bytes) -> tuple[list[tuple[int, int, int]], int]:
        """Runs of equal records as (kind, offset, count), and the offset where the walk ended."""
        if native is None:
            return self._walk_in_python(buffer)
        sizes = np.array(list(self.sizes.items()), dtype=np.uint32).tobytes()
        found, end = native.find_runs(buffer, sizes)
        return [
            (kind, at, count) for kind, at, count in np.frombuffer(found, dtype=np.int64).reshape(-1, 3).tolist()
        ], end

    def _walk_in_python(self, buffer: Bytes) -> tuple[list[tuple[int, int, int]], int]:
        words = buffer[: buffer.size // 8 * 8].data.cast("I")
        limit = len(words)
        steps = {kind: size // 4 for kind, size in self.sizes.items()}
        runs = []
        at = 0
        while at < limit:
            kind = words[at]
            step = steps.get(kind)
            if step is None:
                break
            start = at
            scalar_end = min(limit, at + _SCALAR_STEPS * step)
            at += step
            while at < scalar_end and words[at] == kind:
                at += step
            if scalar_end <= at < limit:
                at += step * _run_length(words, at, step, kind)
            if at > limit:  # the last record is cut
                at -= step
                if at > start:
                    runs.append((kind, start * 4, (at - start) // step))
                break
            runs.append((kind, start * 4, (at - start) // step))
        return runs, at * 4

    def _gather(self, buffer: Bytes, runs: list[tuple[int, int, int]]) -> dict[int, Records]:
        by_kind: dict[int, list[tuple[int, int]]] = {}
        for kind, offset, count in runs:
            if kind in FIELDS:
                by_kind.setdefault(kind, []).append((offset, count))
        return {kind: self._gather_kind(buffer, kind, places) for kind, places in by_kind.items()}

    def _gather_kind(self, buffer: Bytes, kind: int, places: list[tuple[int, int]]) -> Records:
        dtype = self._dtype_of(kind)
        if len(places) == 1:
            offset, count = places[0]
            return np.ndarray((count,), dtype, buffer, offset)
        # Many short runs: one gather of opaque blobs at computed offsets. Copying structured
        # views run by run goes field by field and took 6 us a record against 0.1.
        starts, counts = np.array(places, dtype=np.int64).T
        before = np.cumsum(counts) - counts
        offsets = np.repeat(starts - before * dtype.itemsize, counts) + np.arange(counts.sum()) * dtype.itemsize
        blobs = np.ndarray((buffer.size // 8 - dtype.itemsize // 8 + 1,), f"V{dtype.itemsize}", buffer, 0, (8,))
        gathered: Records = blobs[offsets // 8].view(dtype)
        return gathered

    def _dtype_of(self, kind: int) -> np.dtype[np.void]:
        size = self.sizes[kind]
        dtype = self.dtypes.get(kind)
        if dtype is None or dtype.itemsize != size:
            dtype = self.dtypes[kind] = _dtype(kind, size)
        return dtype

    def _walk_by_cupti(self, cupti: Cupti, buffer: Bytes) -> tuple[list[tuple[int, int, int]], int]:
        """As `_walk`, by CUPTI itself; slower (about 1 us a record), for buffers the sizes do not explain."""
        offsets, is_whole = _record_offsets(cupti, buffer)
        kinds = [int(buffer[offset : offset + 4].view(np.uint32)[0]) for offset in offsets]
        end = buffer.size if is_whole and offsets else 0
        if offsets and not is_whole:  # nothing shows where the last record ends but the size of its kind
            end = offsets[-1] + self.sizes.get(kinds[-1], buffer.size)
            if end > buffer.size:
                end = offsets.pop()
        runs = []
        for kind, offset, following in zip(kinds, offsets, [*offsets[1:], end], strict=False):
            size = following - offset
            if kind not in FIELDS or size >= self._smallest(kind):
                self.sizes[kind] = size
                runs.append((kind, offset, 1))
            else:
                self.lost_bytes += size
        return [run for run in runs if run[1] + self.sizes[run[0]] <= buffer.size], end

    @staticmethod
    def _smallest(kind: int) -> int:
        return record_sizes(17)[kind]


def _run_length(words: memoryview, at: int, step: int, kind: int) -> int:
    """How many records from word `at` on, `step` words apart, are of `kind`."""
    kinds = np.frombuffer(words, dtype=np.uint32)[at::step]
    chunk = 8 * _SCALAR_STEPS
    while True:  # look ahead in growing chunks: a long run costs few looks, a short one little
        other = np.flatnonzero(kinds[:chunk] != kind)
        if other.size:
            return int(other[0])
        if chunk >= kinds.size:
            return int(kinds.size)
        chunk *= 16


def _record_offsets(cupti: Cupti, buffer: Bytes) -> tuple[list[int], bool]:
    """Where CUPTI finds records, and whether the last of them ends where the buffer does."""
    base = buffer.ctypes.data
    record = ctypes.c_void_p()
    offsets: list[int] = []
    while True:
        try:
            cupti.cuptiActivityGetNextRecord(base, buffer.size, ctypes.byref(record))
        except CuptiError as error:
            if error.code in (MAX_LIMIT_REACHED, INVALID_KIND):
                return offsets, error.code == MAX_LIMIT_REACHED
            raise
        if record.value is None:
            return offsets, False
        offsets.append(record.value - base)
