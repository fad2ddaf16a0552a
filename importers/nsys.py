"""Nsight Systems: SQLite exports and Parquet directories.

Kernels, copies, NVTX ranges and GPU metrics samples of any export since schema 2020, whichever
of its tables exist. An `.nsys-rep` cannot be read without the tool itself; the error names the
command that exports it.

Instants in an export count from the start of the session and may be negative. Where the export
says when that was (`TARGET_INFO_SESSION_START_TIME`), they become instants since the Unix epoch;
elsewhere they stay as they are, and the run says so.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nanalyze.importers import nsys_ranges, nsys_samples
from nanalyze.importers.demangling import Demangler
from nanalyze.importers.nsys_devices import Machine, describe, pid_of, rows_of, vm_of
from nanalyze.importers.nsys_source import SQLITE_MAGIC, Columns, Source, Wanted, open_source, parquet_files, select
from nanalyze.importers.options import ImportFailed, Options
from nanalyze.importers.sink import Sink
from nanalyze.importers.sqlite_pages import distinct
from nanalyze.recorder.launches import COPY_KINDS, MEMORY_KINDS
from nanalyze.rundir.classes import KernelClass

KIND = "nsys"

REPORT_SUFFIXES = (".nsys-rep", ".qdrep", ".qdstrm")
KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
LAUNCH_TABLES = ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_DRIVER")
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
KNOWN_TABLES = (KERNELS, *LAUNCH_TABLES, GRAPHS, "StringIds", "TARGET_INFO_SESSION_START_TIME", "META_DATA_EXPORT")

# Beyond this many nanoseconds (126 years) from the session's start nothing is believed; sums stay in int64.
LATEST_NS = 4_000_000_000_000_000_000

NAMES = ("mangledName", "demangledName", "shortName")
SHAPE = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "clusterX", "clusterY", "clusterZ")
RESOURCES = ("registersPerThread", "staticSharedMemory", "dynamicSharedMemory", "localMemoryPerThread")
CLASS_COLUMNS = (*NAMES, *SHAPE, *RESOURCES)
WHERE_COLUMNS = ("globalPid", "deviceId", "contextId", "streamId", "correlationId", "graphId", "graphNodeId")
KERNEL_COLUMNS = ("start", "end", *WHERE_COLUMNS, *CLASS_COLUMNS)

# nsys numbers three more copies than CUPTI, for managed memory.
COPIES = {**dict(enumerate(COPY_KINDS)), 11: "HtoD", 12: "DtoH", 13: "DtoD"}
MEMORIES = dict(enumerate(MEMORY_KINDS))


def detect(path: Path, head: bytes) -> bool:
    """A SQLite file, a directory with an export's Parquet files, or a report of the tool itself."""
    if path.is_dir():
        return any(file.stem in KNOWN_TABLES for file in parquet_files(path))
    return head.startswith(SQLITE_MAGIC) or path.suffix in REPORT_SUFFIXES


def read(paths: Sequence[Path], sink: Sink, options: Options, progress: Callable[[int, int], None]) -> None:
    """Feed `sink` from each export; ImportFailed for one that is none or has no GPU work."""
    for number, path in enumerate(paths):
        _refuse_reports(path)
        with closing(open_source(path)) as source, Demangler() as demangler:
            _Export(source, sink, options, demangler, str(number) if len(paths) > 1 else "").read(progress)


def _refuse_reports(path: Path) -> None:
    if path.suffix in REPORT_SUFFIXES:
        output = shlex.quote(str(path.with_suffix(".sqlite")))
        command = f"nsys export --type sqlite --output {output} {shlex.quote(str(path))}"
        raise ImportFailed(path, "is a report that only Nsight Systems itself can read", f"Export it: {command}")


@dataclass
class _Launches:
    """When the call of each correlation id of one process was made."""

    correlation: list[Any] = field(default_factory=list)
    start: list[Any] = field(default_factory=list)
    _sorted: tuple[Any, Any] | None = None

    def find(self, wanted: Any) -> Any:
        """The call's start for each correlation id, masked where there is none."""
        if self._sorted is None:
            correlation, start = np.concatenate(self.correlation), np.concatenate(self.start)
            order = np.argsort(correlation, kind="stable") if np.any(np.diff(correlation) < 0) else slice(None)
            self._sorted = correlation[order], start[order]
        known, start = self._sorted
        ids = np.ma.getdata(wanted)
        at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
        return np.ma.MaskedArray(start[at], mask=(known[at] != ids) | np.ma.getmaskarray(wanted))


class _Export:
    """One export on its way into the sink."""

    def __init__(self, source: Source, sink: Sink, options: Options, demangler: Demangler, number: str) -> None:
        self.source = source
        self.sink = sink
        self.options = options
        self.machine: Machine = describe(source)
        self.origin_ns = self.machine.epoch_ns or 0
        self._demangler = demangler
        self._number = number
        self._processes: dict[int, str] = {}
        self._launches: dict[int, _Launches] = {}
        self._classes: dict[tuple[Any, ...], int] = {}
        self._names: dict[int, str] = {}
        self._devices: set[tuple[str, int]] = set()
        self._seen_devices: set[int] = set()
        self._stream_ends: dict[tuple[Any, ...], int] = {}

    def read(self, progress: Callable[[int, int], None]) -> None:
        if not set(self.source.tables) & set(KNOWN_TABLES):
            raise ImportFailed(
                self.source.path,
                "has no table of an Nsight Systems export",
                "Give a file made by: nsys export --type sqlite REPORT.nsys-rep",
            )
        steps: tuple[Callable[[], None], ...] = (
            self._read_launches,
            self._read_kernels,
            self._read_copies,
            lambda: nsys_ranges.read(self),
            lambda: nsys_samples.read(self),
            self._describe_origin,
        )
        for done, step in enumerate(steps):
            progress(done, len(steps))
            step()
        progress(len(steps), len(steps))

    # --- processes, devices, instants ------------------------------------------------------------

    def process(self, global_id: int) -> str:
        """The partition of the process with this globalPid (or globalTid)."""
        pid, vm = pid_of(global_id), vm_of(global_id)
        key = (vm << 24) | pid
        if key not in self._processes:
            host = self.machine.host or "unknown"
            parts = [host, self._number, str(pid)] if self._number else [host, str(pid)]
            facts: dict[str, Any] = {"host": host, "pid": pid, "gpu_driver_version": self.machine.driver}
            name = self.machine.process_names.get((vm << 48) | (pid << 24))
            if name:
                facts["command"] = json.dumps([name])
            self._processes[key] = self.sink.process("-".join([*parts, f"{vm:x}"]), **facts)
        return self._processes[key]

    def known_processes(self) -> dict[int, str]:
        """Partitions met so far by machine and process id (the low 24 bits)."""
        return self._processes

    def instants(self, values: Any, what: str) -> Any:
        """Session time as the run's instants; what cannot be one is masked and counted."""
        data, mask = np.ma.getdata(values), np.ma.getmaskarray(values)
        far = (data > LATEST_NS) | (data < -LATEST_NS)
        if far.any():
            self.sink.refuse(f"{what}: instants beyond 126 years", int(np.count_nonzero(far & ~mask)))
            return np.ma.MaskedArray(np.where(far, 0, data) + self.origin_ns, mask=far | mask)
        shifted = data + self.origin_ns
        return np.ma.MaskedArray(shifted, mask=mask) if mask.any() else shifted

    def spans(self, chunk: Columns, what: str) -> tuple[Any, Any]:
        """Starts and durations; a duration whose end is missing or before its start is masked."""
        rows = len(next(iter(chunk.values())))
        nothing = np.ma.MaskedArray(np.zeros(rows, dtype=np.int64), mask=True)
        start = self.instants(chunk.get("start", nothing), what)
        end = self.instants(chunk.get("end", nothing), what)
        duration = end - start
        backward = np.ma.filled(duration < 0, False)
        if backward.any():
            self.sink.refuse(f"{what}: durations whose end lies before the start", int(np.count_nonzero(backward)))
            duration = np.ma.MaskedArray(
                np.where(backward, 0, np.ma.getdata(duration)), mask=backward | np.ma.getmaskarray(duration)
            )
        return start, duration

    def by_process(self, chunk: Columns) -> list[tuple[str, int, Any]]:
        """(partition, global id, rows) for each process of the chunk; rows is a mask or everything."""
        ids = chunk.get("globalPid")
        if ids is None:
            return [(self.process(0), 0, slice(None))]
        plain = np.ma.filled(ids, 0)
        if (plain == plain[0]).all():
            return [(self.process(int(plain[0])), int(plain[0]), slice(None))]
        return [(self.process(int(id_)), int(id_), plain == id_) for id_ in np.unique(plain)]

    def wanted_rows(self, chunk: Columns) -> Columns:
        """The chunk without what ran on other devices than the one asked for."""
        devices = chunk.get("deviceId")
        if devices is None:
            return chunk
        self._seen_devices.update(np.unique(np.ma.compressed(devices)).tolist())
        if self.options.device is None:
            return chunk
        keep = np.ma.filled(self._is_chosen(chunk, devices), False)
        self.sink.refuse("on another device than the one asked for", int(np.count_nonzero(~keep)))
        return {name: select(values, keep) for name, values in chunk.items()}

    def _is_chosen(self, chunk: Columns, devices: Any) -> Any:
        wanted = self.options.device or ""
        if wanted.isdigit():
            return devices == int(wanted)
        pids = np.ma.filled(chunk.get("globalPid", np.zeros(len(devices), dtype=np.int64)), 0)
        pairs = {(pid, id_) for pid, id_ in zip(pids.tolist(), np.ma.filled(devices, -1).tolist(), strict=True)}
        chosen = {pair for pair in pairs if self._has_uuid(pid_of(pair[0]), pair[1], wanted)}
        return np.array(
            [pair in chosen for pair in zip(pids.tolist(), np.ma.filled(devices, -1).tolist(), strict=True)]
        )

    def _has_uuid(self, pid: int, ordinal: int, wanted: str) -> bool:
        gpu = self.machine.gpu(pid, ordinal)
        return gpu is not None and bool(gpu["uuid"]) and gpu["uuid"].removeprefix("GPU-") == wanted.removeprefix("GPU-")

    def use_devices(self, partition: str, global_id: int, devices: Any) -> None:
        """Describe the devices of these rows, once each."""
        for id_ in np.unique(np.ma.compressed(devices)).tolist():
            if (partition, id_) not in self._devices and 0 <= id_ < 2**31:
                self._devices.add((partition, id_))
                row = self.machine.device_row(pid_of(global_id), id_)
                if row is None:
                    self.sink.note(f"device {id_} of {partition}: the export does not describe it")
                else:
                    self.sink.device(partition, **row)

    # --- launches and kernels --------------------------------------------------------------------

    def _read_launches(self) -> None:
        """Host times of launch calls; of all calls where no name says which launch."""
        names = self._launch_name_ids()
        for table in LAUNCH_TABLES:
            only = ("nameId", names) if names and "nameId" in self.source.tables.get(table, ()) else None
            for chunk in self.source.scan(Wanted(table, ("start", "correlationId", "globalTid"), only=only)):
                if {"start", "correlationId"} <= chunk.keys():
                    self._add_launches(chunk)

    def _launch_name_ids(self) -> tuple[int, ...]:
        found: list[int] = []
        for ids in self.source.scan(Wanted("StringIds", ("id",), ("value",)), _launch_names):
            found += ids
        return tuple(found) if len(found) < 1000 else ()

    def _add_launches(self, chunk: Columns) -> None:
        known = ~(np.ma.getmaskarray(chunk["start"]) | np.ma.getmaskarray(chunk["correlationId"]))
        start, correlation = np.ma.getdata(chunk["start"])[known], np.ma.getdata(chunk["correlationId"])[known]
        threads = chunk.get("globalTid")
        keys = np.zeros(len(start), dtype=np.int64) if threads is None else np.ma.filled(threads, 0)[known] >> 24
        self.sink.count("launch calls", len(start))
        if not len(start):
            return
        for key in [keys[0]] if (keys == keys[0]).all() else np.unique(keys):
            mine = keys == key
            launches = self._launches.setdefault(int(key), _Launches())
            launches.correlation.append(correlation[mine])
            launches.start.append(start[mine])

    def _read_kernels(self) -> None:
        for chunk, classes in self.source.scan(Wanted(KERNELS, KERNEL_COLUMNS), _with_classes):
            self._add_kernels(chunk, classes)
        if not self.sink.read["kernels"]:
            raise ImportFailed(self.source.path, *self._why_no_kernels())

    def _add_kernels(self, chunk: Columns, classes: _ClassKeys) -> None:
        chunk = {**chunk, "class": classes.of_row}
        chunk = self.wanted_rows(chunk)
        rows = len(chunk["class"])
        if not rows:
            return
        self._load_names(classes)
        start, duration = self.spans(chunk, "kernels")
        self.sink.count("kernels", rows)
        for partition, global_id, mine in self.by_process(chunk):
            ids = self._class_ids(partition, classes, chunk["class"][mine])
            batch = {"start_ns": start[mine], "duration_ns": duration[mine], "kernel_class_id": ids}
            batch.update(_places(chunk, mine))
            batch["queued_ns"] = self._queued(global_id, batch.get("correlation_id"), len(ids))
            if "device_id" in batch:
                self.use_devices(partition, global_id, batch["device_id"])
            self._count_overlaps(partition, batch)
            self.sink.add("kernels", partition, batch)

    def _count_overlaps(self, partition: str, batch: Columns) -> None:
        """Count kernels that start before the one before them on their stream has ended."""
        places = [np.ma.filled(batch[name], 0) for name in ("device_id", "context_id", "stream_id") if name in batch]
        known = ~(np.ma.getmaskarray(batch["start_ns"]) | np.ma.getmaskarray(batch["duration_ns"]))
        if not places or not known.any():
            return
        start = np.ma.getdata(batch["start_ns"])[known]
        end = start + np.ma.getdata(batch["duration_ns"])[known]
        places = [np.ascontiguousarray(place[known]) for place in places]
        stream, first = distinct(places)
        overlaps = 0
        for number, row in enumerate(first.tolist()):
            mine = stream == number if len(first) > 1 else slice(None)
            starts, ends = start[mine], end[mine]
            if (starts[1:] < starts[:-1]).any():
                order = np.argsort(starts, kind="stable")
                starts, ends = starts[order], ends[order]
            key = (partition, *(int(place[row]) for place in places))
            overlaps += int(starts[0] < self._stream_ends.get(key, starts[0])) + int((starts[1:] < ends[:-1]).sum())
            self._stream_ends[key] = int(ends[-1])
        self.sink.count("kernels that overlap the one before them on their stream", overlaps)

    def _queued(self, global_id: int, correlation: Any, rows: int) -> Any:
        launches = self._launches.get(global_id >> 24)
        if launches is None or correlation is None:
            self.sink.refuse("kernels without a launch call: their range is unknown", rows)
            return np.ma.MaskedArray(np.zeros(rows, dtype=np.int64), mask=True)
        found = launches.find(correlation)
        self.sink.refuse("kernels without a launch call: their range is unknown", rows - int(np.ma.count(found)))
        return self.instants(found, "launch calls")

    def _load_names(self, classes: _ClassKeys) -> None:
        ids = {
            int(id_)
            for column in NAMES
            if column in classes.values
            for id_ in classes.values[column]
            if id_ is not None
        }
        self._names.update(self.source.texts(ids - self._names.keys()))

    def _class_ids(self, partition: str, classes: _ClassKeys, of_row: Any) -> Any:
        """The kernel class id of each row; a class is registered when its first launch is met."""
        ids = np.zeros(len(classes), dtype=np.int64)
        counts = np.bincount(of_row, minlength=len(classes))
        for at in np.flatnonzero(counts).tolist():
            key = (partition, *(values[at] for values in classes.values.values()))
            if key not in self._classes:
                self._classes[key] = self._register(partition, {name: v[at] for name, v in classes.values.items()})
            if not self._has_name({name: v[at] for name, v in classes.values.items() if name in NAMES}):
                self.sink.refuse("kernels without a name: their string ids dangle", int(counts[at]))
            ids[at] = self._classes[key]
        return ids[of_row]

    def _has_name(self, names: dict[str, Any]) -> bool:
        return any(id_ in self._names for id_ in names.values())

    def _register(self, partition: str, row: dict[str, Any]) -> int:
        mangled, readable, short = (self._names.get(row.get(name)) for name in NAMES)  # type: ignore[arg-type]
        dangling = f"(name missing: string {row.get('mangledName') or row.get('demangledName')})"
        symbol = mangled or readable or short or dangling
        numbers = [row.get(name) or 0 for name in SHAPE]
        grid, block, cluster = ((numbers[at], numbers[at + 1], numbers[at + 2]) for at in (0, 3, 6))
        resources = [row.get(name) for name in RESOURCES]
        kernel = KernelClass(symbol.encode("utf-8", "backslashreplace"), grid, block, cluster, *resources)
        return self.sink.kernel_class(partition, kernel, readable or self._demangler.name(symbol))

    def _why_no_kernels(self) -> tuple[str, str]:
        """Why there is none, and what to do, from what else the export holds."""
        again = "Record again with: nsys profile --trace=cuda,nvtx -- COMMAND"
        if self._seen_devices and self.options.device is not None:
            ids = ", ".join(map(str, sorted(self._seen_devices)))
            return f"has no kernels on device {self.options.device}: it has some on {ids}", "Choose one with --device."
        if GRAPHS in self.source.tables:
            return "has CUDA graph launches only, not the kernels in them", again.replace(
                " -- ", " --cuda-graph-trace=node -- "
            )
        if any(table in self.source.tables for table in LAUNCH_TABLES):
            reason = "has CUDA calls of the host but no kernels on a GPU"
        elif KERNELS in self.source.tables:
            reason = "has a table of kernels without rows"
        else:
            reason = "has no table of kernels: the job used no GPU, or CUDA was not traced"
        told = [
            row["text"] for row in rows_of(self.source, "DIAGNOSTIC_EVENT", ("severity",), ("text",)) if row["text"]
        ]
        return (f"{reason}; the tool itself said: {told[-1][:300]!r}" if told else reason), again

    # --- copies ----------------------------------------------------------------------------------

    def _read_copies(self) -> None:
        extra = ("bytes", "copyKind", "srcKind", "dstKind", "srcDeviceId", "dstDeviceId", "memKind")
        for table, what in (("CUPTI_ACTIVITY_KIND_MEMCPY", "copies"), ("CUPTI_ACTIVITY_KIND_MEMSET", "memory sets")):
            for chunk in self.source.scan(Wanted(table, ("start", "end", *WHERE_COLUMNS, *extra))):
                self._add_copies(self.wanted_rows(chunk), what)

    def _add_copies(self, chunk: Columns, what: str) -> None:
        rows = len(next(iter(chunk.values())))
        if not rows:
            return
        start, duration = self.spans(chunk, what)
        self.sink.count(what, rows)
        kinds = ["memset"] * rows if what == "memory sets" else _named(chunk, "copyKind", COPIES, rows, "unknown")
        columns: Columns = {
            "kind": kinds,
            "source": _named(chunk, "srcKind", MEMORIES, rows, None),
            "destination": _named(chunk, "memKind" if what == "memory sets" else "dstKind", MEMORIES, rows, None),
        }
        for partition, global_id, mine in self.by_process(chunk):
            batch = {"start_ns": start[mine], "duration_ns": duration[mine], **_places(chunk, mine)}
            batch.update({name: _part(values, mine) for name, values in columns.items()})
            for ours, theirs in (
                ("bytes", "bytes"),
                ("source_device_id", "srcDeviceId"),
                ("destination_device_id", "dstDeviceId"),
            ):
                if theirs in chunk:
                    batch[ours] = chunk[theirs][mine]
            self.sink.add("copies", partition, batch)
            if "device_id" in batch:
                self.use_devices(partition, global_id, batch["device_id"])

    def _describe_origin(self) -> None:
        self.sink.setting("tool_version", self.machine.version)
        if self.machine.epoch_ns is None:
            self.sink.note("The export does not say when its session began: instants count from then, not from 1970.")


# --- columns ---------------------------------------------------------------------------------------


@dataclass
class _ClassKeys:
    """The distinct kernel classes of a chunk: `values` by column, and which of them each row has."""

    values: dict[str, list[Any]]
    of_row: Any

    def __len__(self) -> int:
        return len(next(iter(self.values.values()))) if self.values else 1


def _with_classes(chunk: Columns) -> tuple[Columns, _ClassKeys]:
    """The chunk without the columns that make up a class, and its classes."""
    columns = {name: chunk.pop(name) for name in CLASS_COLUMNS if name in chunk}
    rows = len(next(iter((chunk or columns).values())))
    if not columns:
        return chunk, _ClassKeys({}, np.zeros(rows, dtype=np.int64))
    of_row, first = distinct([np.ma.filled(values, -(2**63)) for values in columns.values()])
    values = {name: np.ma.asarray(column[first]).tolist() for name, column in columns.items()}
    return chunk, _ClassKeys(values, of_row)


def _launch_names(chunk: Columns) -> list[int]:
    if not {"id", "value"} <= chunk.keys():
        return []
    ids = np.ma.asarray(chunk["id"]).tolist()
    return [
        id_
        for id_, value in zip(ids, chunk["value"], strict=True)
        if id_ is not None and value and len(value) < 200 and "Launch" in value
    ]


def _places(chunk: Columns, mine: Any) -> Columns:
    """Where rows ran: the columns that kernels and copies share. Graph ids are NULL where 0."""
    names = {
        "deviceId": "device_id",
        "contextId": "context_id",
        "streamId": "stream_id",
        "correlationId": "correlation_id",
        "graphId": "graph_id",
        "graphNodeId": "graph_node_id",
    }
    found = {ours: chunk[theirs][mine] for theirs, ours in names.items() if theirs in chunk}
    for name in ("graph_id", "graph_node_id"):
        if name in found:
            found[name] = np.ma.masked_equal(found[name], 0)
    return found


def _named(chunk: Columns, column: str, names: dict[int, str], rows: int, missing: str | None) -> list[str | None]:
    if column not in chunk:
        return [missing] * rows
    return [
        missing if code is None else names.get(code, f"kind {code}") for code in np.ma.asarray(chunk[column]).tolist()
    ]


def _part(values: list[Any], mine: Any) -> list[Any]:
    return values[mine] if isinstance(mine, slice) else select(values, mine)
