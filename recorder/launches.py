"""From structured activity records to the columns of `kernels`, `kernel_classes` and `copies`.

Works on whole buffers: a class is found by hashing its launch shape in a few vector steps and
looking the hash up in a sorted table, so Python touches each class once a buffer, not each launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from nanalyze.recorder.activity import Records
from nanalyze.recorder.cupti import KIND_MEMCPY2, KIND_MEMSET
from nanalyze.recorder.demangle import demangle
from nanalyze.recorder.launch_times import LaunchTimes
from nanalyze.rundir.classes import KernelClass

Columns = dict[str, Any]  # column name -> numpy array, or masked array where values may be missing
UInt64 = npt.NDArray[np.uint64]

# Kernels that CUPTI launches itself around user-defined ranges; they are not the job's.
PROFILER_KERNELS = frozenset({b"WaitNs"})

# CUpti_ActivityMemcpyKind and CUpti_ActivityMemoryKind (cupti_activity.h), by value.
COPY_KINDS = ("unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
MEMORY_KINDS = ("unknown", "pageable", "pinned", "device", "array", "managed", "device_static", "managed_static")
_IS_ASYNC = 1

_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)


def read_name(pointer: int) -> bytes:
    """The C string at `pointer`; empty for a null pointer."""
    return ctypes.string_at(pointer) if pointer else b""


class ClassTable:
    """Every kernel class seen so far; hands out ids and remembers which are new.

    A name pointer is CUPTI's and could in principle be reused for another name, so the name
    behind each class is read again for each buffer the class appears in.
    """

    def __init__(self, read: Callable[[int], bytes] = read_name) -> None:
        self._read = read
        self._keys = np.empty(0, dtype=np.uint64)  # sorted
        self._ids = np.empty(0, dtype=np.int64)
        self._pointers = np.empty(0, dtype=np.uint64)
        self._names: dict[int, bytes] = {}  # pointer -> name
        self._classes: dict[int, KernelClass] = {}
        self._profiler_ids: set[int] = set()
        self._new: list[KernelClass] = []

    def ids(self, records: Records) -> npt.NDArray[np.int64]:
        """The class id of each kernel record."""
        keys = _shape_keys(records)
        known = self._known(keys)
        if self._forget_renamed(self._used_pointers(keys[known]) | set(records["name"][~known].tolist())):
            known = self._known(keys)
        if not known.all():
            self._learn(records[~known], keys[~known])
        return self._ids[self._places(keys)]

    def is_profiler_kernel(self, class_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which launches are CUPTI's own, see PROFILER_KERNELS."""
        return np.isin(class_ids, list(self._profiler_ids))

    def get(self, class_id: int) -> KernelClass | None:
        return self._classes.get(class_id)

    def take_new(self) -> list[KernelClass]:
        """Classes seen since the last call."""
        new, self._new = self._new, []
        return new

    def _places(self, keys: UInt64) -> npt.NDArray[np.int64]:
        return np.minimum(np.searchsorted(self._keys, keys), max(self._keys.size - 1, 0))

    def _known(self, keys: UInt64) -> npt.NDArray[np.bool_]:
        if not self._keys.size:
            return np.zeros(keys.size, dtype=bool)
        known: npt.NDArray[np.bool_] = self._keys[self._places(keys)] == keys
        return known

    def _used_pointers(self, keys: UInt64) -> set[int]:
        """The name pointers of known keys."""
        used = np.flatnonzero(np.bincount(self._places(keys), minlength=self._keys.size))
        return set(self._pointers[used].tolist())

    def _forget_renamed(self, pointers: set[int]) -> bool:
        """Forget the classes of those pointers that now point to another name; says whether there were any."""
        renamed = [p for p in pointers if p in self._names and self._read(p) != self._names[p]]
        keep = ~np.isin(self._pointers, np.array(renamed, dtype=np.uint64))
        if not keep.all():
            self._keys, self._ids, self._pointers = self._keys[keep], self._ids[keep], self._pointers[keep]
        return bool(renamed)

    def _learn(self, records: Records, keys: UInt64) -> None:
        new_keys, firsts = np.unique(keys, return_index=True)
        new_keys, firsts = new_keys[~np.isin(new_keys, self._keys)], firsts[~np.isin(new_keys, self._keys)]
        ids = [self._register(records[first]) for first in firsts]
        all_keys = np.concatenate([self._keys, new_keys])
        order = np.argsort(all_keys)
        self._keys = all_keys[order]
        self._ids = np.concatenate([self._ids, np.array(ids, dtype=np.int64)])[order]
        self._pointers = np.concatenate([self._pointers, records["name"][firsts]])[order]

    def _register(self, record: Any) -> int:
        pointer = int(record["name"])
        name = self._names[pointer] = self._read(pointer)
        kernel = KernelClass(
            name=name,
            grid=_triple(record["grid"]),
            block=_triple(record["block"]),
            cluster=_triple(record["cluster"]),
            registers_per_thread=int(record["registers"]),
            static_shared_bytes=int(record["static_shared"]),
            dynamic_shared_bytes=int(record["dynamic_shared"]),
            local_bytes_per_thread=int(record["local"]),
        )
        class_id = kernel.id
        if class_id not in self._classes:
            self._classes[class_id] = kernel
            if name in PROFILER_KERNELS:
                self._profiler_ids.add(class_id)
            else:
                self._new.append(kernel)
        return class_id


def _triple(values: npt.NDArray[np.uint32]) -> tuple[int, int, int]:
    x, y, z = (int(value) for value in values)
    return x, y, z


def _shape_keys(records: Records) -> UInt64:
    """A 64-bit mix of the name pointer and everything else that tells classes apart."""
    key = records["name"] * np.uint64(_MIX[0])
    for field in ("shape_yz", "shape_bxy", "shape_bz_static", "shape_dynamic_local", "cluster_xy"):
        key = (key ^ (key >> np.uint64(29)) ^ records[field]) * np.uint64(_MIX[1])
    rest = (
        records["grid"][:, 0].astype(np.uint64) << np.uint64(32)
        | records["registers"].astype(np.uint64) << np.uint64(16)
        | records["cluster"][:, 2].astype(np.uint64)
    )
    return (key ^ (key >> np.uint64(29)) ^ rest) * np.uint64(_MIX[0])


def kernel_columns(records: Records, classes: ClassTable, launch_times: LaunchTimes) -> tuple[Columns, int]:
    """The `kernels` columns of a buffer's kernel records, and how many had impossible times.

    `launch_times` tells when calls were made. Where that is unknown CUPTI's own `queued` stands in,
    except for launches under an exact-counter session and nodes of a graph: theirs is stale (it
    repeats an earlier launch's).
    An end before its start makes both missing and is counted.
    """
    class_ids = classes.ids(records)
    ours = ~classes.is_profiler_kernel(class_ids)
    if not ours.all():
        records, class_ids = records[ours], class_ids[ours]
    start, duration, odd = _times(records)
    correlation = records["correlation"].astype(np.int64)
    graph = records["graph"].astype(np.int64)
    stale = (records["start"] == 0) | (graph != 0)
    queued = launch_times.of(correlation)
    queued = np.where((queued == 0) & ~stale, records["queued"].astype(np.int64), queued)
    columns: Columns = {
        "start_ns": start,
        "duration_ns": duration,
        "kernel_class_id": class_ids,
        "device_id": records["device"].astype(np.int32),
        "context_id": records["context"].astype(np.int64),
        "stream_id": records["stream"].astype(np.int64),
        "graph_id": _missing_zero(graph),
        "graph_node_id": _missing_zero(records["graph_node"].astype(np.int64)),
        "correlation_id": correlation,
        "queued_ns": _missing_zero(queued),
    }
    return columns, odd


def _times(records: Records) -> tuple[npt.NDArray[Any], npt.NDArray[Any], int]:
    start = records["start"].astype(np.int64)
    duration = records["end"].astype(np.int64) - start
    odd = (duration < 0) | ((start == 0) != (records["end"] == 0))
    missing = odd | (start == 0)
    return np.ma.array(start, mask=missing), np.ma.array(duration, mask=missing), int(odd.sum())


def _missing_zero(values: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    return np.ma.array(values, mask=values == 0)


def class_columns(kernels: list[KernelClass]) -> dict[str, list[Any]]:
    """The `kernel_classes` columns of `kernels`."""
    names = [kernel.name_text for kernel in kernels]
    columns: dict[str, list[Any]] = {
        "kernel_class_id": [kernel.id for kernel in kernels],
        "name_mangled": names,
        "name": [demangle(name) for name in names],
    }
    for prefix in ("grid", "block", "cluster"):
        for axis, letter in enumerate("xyz"):
            columns[f"{prefix}_{letter}"] = [getattr(kernel, prefix)[axis] for kernel in kernels]
    for field in ("registers_per_thread", "static_shared_bytes", "dynamic_shared_bytes", "local_bytes_per_thread"):
        columns[field] = [getattr(kernel, field) for kernel in kernels]
    return columns


def copy_columns(records: Records, kind: int) -> tuple[Columns, int]:
    """The `copies` columns of memcpy, peer-copy or memset records, and how many had impossible times."""
    start, duration, odd = _times(records)
    count = len(records)
    nothing = np.ma.array(np.zeros(count, dtype=np.int32), mask=True)
    if kind == KIND_MEMSET:
        kinds = np.full(count, "memset", dtype=object)
        source: npt.NDArray[Any] = np.ma.array(np.full(count, "", dtype=object), mask=True)
        destination = _lookup(MEMORY_KINDS, records["memory_kind"])
    else:
        kinds = _lookup(COPY_KINDS, records["copy_kind"])
        source = _lookup(MEMORY_KINDS, records["source"])
        destination = _lookup(MEMORY_KINDS, records["destination"])
    peer = kind == KIND_MEMCPY2
    columns: Columns = {
        "start_ns": start,
        "duration_ns": duration,
        "kind": kinds,
        "bytes": records["bytes"].astype(np.int64),
        "source": source,
        "destination": destination,
        "device_id": records["device"].astype(np.int32),
        "source_device_id": records["source_device"].astype(np.int32) if peer else nothing,
        "destination_device_id": records["destination_device"].astype(np.int32) if peer else nothing,
        "context_id": records["context"].astype(np.int64),
        "stream_id": records["stream"].astype(np.int64),
        "is_async": (records["flags"] & _IS_ASYNC).astype(bool),
        "graph_id": _missing_zero(records["graph"].astype(np.int64)),
        "graph_node_id": _missing_zero(records["graph_node"].astype(np.int64)),
        "correlation_id": records["correlation"].astype(np.int64),
    }
    return columns, odd


def _lookup(names: tuple[str, ...], values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    table = np.array([*names, "unknown"], dtype=object)
    found: npt.NDArray[Any] = table[np.minimum(values, len(names)).astype(np.int64)]
    return found
