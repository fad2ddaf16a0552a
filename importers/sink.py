"""Writes what an importer reads as a run directory that appears complete or not at all.

Rows go to a hidden directory beside the target, shard by shard, so memory stays bounded whatever
the file's size; `commit` gives it its name. What was read and what was left out is counted, shown
and stored in the table `events`.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import time
import uuid
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from nanalyze.importers import fit, target
from nanalyze.importers.options import ImportFailed
from nanalyze.recorder import peaks
from nanalyze.recorder.writer import to_arrow
from nanalyze.rundir import runfile, schema, shards
from nanalyze.rundir.classes import KernelClass

FLUSH_ROWS = shards.ROW_GROUP_ROWS
HELD_ROWS = 4 * FLUSH_ROWS  # of all tables and processes together, before the fullest is written
WRITES_AHEAD = 2  # batches that wait for the writing thread; more would only be memory
LAYER = "import"
LONGEST_NAME = 100  # characters of a partition's name, below the 255 bytes of a file system


@dataclass(frozen=True)
class ImportSummary:
    """What an import did. `read` counts events by kind, `refused` values and rows by reason."""

    run_dir: Path
    source: str
    files: tuple[Path, ...]
    processes: int
    kernels: int
    kernel_ns: int
    exact: int
    read: Mapping[str, int]
    refused: Mapping[str, int]
    notes: tuple[str, ...]


@dataclass
class _Process:
    """What is known of one process so far."""

    name: str
    facts: dict[str, Any] = field(default_factory=dict)
    classes: dict[int, tuple[KernelClass, str]] = field(default_factory=dict)
    devices: dict[int, dict[str, Any]] = field(default_factory=dict)
    shards: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    first_ns: int | None = None
    last_ns: int | None = None


class Sink:
    """Receives rows by table and process; `commit` makes them the run at `run_dir`.

    Use as a context manager: leaving it without `commit` removes everything that was written.
    Raises RunError for a `run_dir` that exists and is not empty, unless `force` and it is a run.
    """

    def __init__(self, run_dir: Path, source: str, files: Sequence[Path], force: bool = False) -> None:
        self.run_dir = run_dir
        self.source = source
        self.files = tuple(files)
        self.read: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.notes: list[str] = []
        self.settings: dict[str, Any] = {}
        self._processes: dict[str, _Process] = {}
        self._by_name: dict[str, _Process] = {}
        self._pending: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        self._pending_rows: Counter[tuple[str, str]] = Counter()
        self._filled: set[str] = set()
        self._kernel_ns = 0
        self._target = run_dir.resolve()
        self._force = force
        target.check(run_dir, self._target, force)
        self._root = self._target.with_name(f".{self._target.name}.{uuid.uuid4().hex[:12]}.importing")
        try:
            self._root.mkdir(parents=True)
        except OSError as error:
            raise target.cannot_write(run_dir, error) from error
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="nanalyze-import")
        self._writes: deque[Future[Any]] = deque()

    # --- what importers call ---------------------------------------------------------------------

    def process(self, key: str, **facts: Any) -> str:
        """The partition of the process that the source calls `key`, made on the first call.

        `facts` are columns of the table `processes`; later calls add to earlier ones.
        """
        known = self._processes.get(key)
        if known is None:
            known = _Process(_partition_name(key, self._by_name))
            self._processes[key] = self._by_name[known.name] = known
        known.facts.update(facts)
        return known.name

    def device(self, process: str, **row: Any) -> None:
        """A row of `devices`; the first for a device counts, later ones fill its gaps.

        The peak rates of a compute capability are added from the recorder's table. A device whose
        source does not tell the columns that the table requires is counted and left out.
        """
        known = self._by_name[process].devices.setdefault(int(row["device_id"]), {})
        known.update({name: value for name, value in row.items() if known.get(name) is None})

    def kernel_class(self, process: str, kernel: KernelClass, name: str) -> int:
        """Register a kernel class of `process` under its readable name; its id."""
        sound = self._sound_class(kernel)
        id_ = sound.id
        self._by_name[process].classes.setdefault(id_, (sound, name))
        return id_

    def add(self, table: str, process: str, batch: Mapping[str, Any]) -> None:
        """Add rows: columns as numpy arrays, masked arrays or lists with None, all of one length.

        Absent columns are NULL. Numbers that a column cannot hold become NULL and are counted.
        """
        rows = len(next(iter(batch.values()))) if batch else 0
        if not rows:
            return
        state = self._by_name[process]
        sound = self._sound_batch(schema.TABLES[table], batch, rows)
        if table == "kernels":
            self._track(state, sound)
        state.rows[table] += rows
        key = (table, process)
        self._pending.setdefault(key, []).append(sound)
        self._pending_rows[key] += rows
        if self._pending_rows[key] >= FLUSH_ROWS:
            self._flush(key)
        elif self._pending_rows.total() >= HELD_ROWS:
            self._flush(max(self._pending_rows, key=self._pending_rows.__getitem__))

    def count(self, what: str, n: int = 1) -> None:
        """Count `n` events read, by kind."""
        if n:
            self.read[what] += int(n)

    def refuse(self, why: str, n: int = 1) -> None:
        """Count `n` values, rows or events left out, by reason."""
        if n:
            self.refused[why] += int(n)

    def note(self, message: str) -> None:
        """Something a reader of the run should know, said once."""
        if message not in self.notes:
            self.notes.append(message)

    def setting(self, name: str, value: Any) -> None:
        """A fact about the import for run.json; `value` must be JSON."""
        self.settings[name] = value

    # --- the end -----------------------------------------------------------------------------------

    def commit(self) -> ImportSummary:
        """Make what was added the run at `run_dir`.

        Raises ImportFailed, and leaves nothing, when neither kernels nor exact counters were
        read; RunError when the directory cannot be written.
        """
        try:
            kernels, exact = self._rows("kernels"), self._rows("exact")
            if not kernels and not exact:
                raise ImportFailed(_shown(self.files), *self._why_empty())
            self._finish_tables()
            summary = ImportSummary(
                self.run_dir,
                self.source,
                self.files,
                len(self._processes),
                kernels,
                self._kernel_ns,
                exact,
                dict(self.read),
                dict(self.refused),
                tuple(self.notes),
            )
            runfile.create(self._root, self.source, {**self._file_facts(), **self.settings})
            self._pool.shutdown()
            target.check(self.run_dir, self._target, self._force)
            target.publish(self._root, self._target)
        except OSError as error:
            self.abort()
            raise target.cannot_write(self.run_dir, error) from error
        except BaseException:
            self.abort()
            raise
        return summary

    def abort(self) -> None:
        """Remove everything that was written. Does no harm after `commit`."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()
        shutil.rmtree(self._root, ignore_errors=True)

    def __enter__(self) -> Sink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    def _rows(self, table: str) -> int:
        return sum(state.rows[table] for state in self._by_name.values())

    def _why_empty(self) -> tuple[str, str]:
        read = ", ".join(f"{n:,} {what}" for what, n in self.read.most_common(4)) or "nothing at all"
        refused = "; ".join(f"{why} ({n:,})" for why, n in self.refused.most_common(3))
        reason = f"holds no GPU kernels: it was read to its end and gave {read}"
        reason += f", and left out: {refused}" if refused else ""
        return reason, "Record it again with GPU tracing on, while the job uses the GPU."

    def _finish_tables(self) -> None:
        for state in self._by_name.values():
            self._add_classes(state)
            self._add_devices(state)
        self._add_events(next(iter(self._by_name)))
        for key in list(self._pending):
            self._flush(key)
        now = time.time_ns()
        for state in self._by_name.values():
            self._add_process(state, now)
        while self._writes:
            self._writes.popleft().result()

    def _add_classes(self, state: _Process) -> None:
        rows = [_class_row(id_, kernel, name) for id_, (kernel, name) in state.classes.items()]
        self.add("kernel_classes", state.name, _columns("kernel_classes", rows))

    def _add_devices(self, state: _Process) -> None:
        rows = []
        required = [c.name for c in schema.DEVICES.columns if not c.nullable]
        for id_, row in sorted(state.devices.items()):
            missing = [name for name in required if row.get(name) is None]
            if missing:
                self.note(f"device {id_} of {state.name}: its {', '.join(missing)} are not in the source")
                continue
            rows.append(_with_peaks(row))
        self.add("devices", state.name, _columns("devices", rows))

    def _add_events(self, process: str) -> None:
        told = [("loss", why, n) for why, n in self.refused.items()]
        told += [("note", f"read: {what}", n) for what, n in self.read.items()]
        told += [("note", message, None) for message in self.notes]  # type: ignore[misc]
        now = time.time_ns()
        rows = [
            {"time_ns": now, "layer": LAYER, "kind": kind, "message": message, "count": n} for kind, message, n in told
        ]
        self.add("events", process, _columns("events", rows))

    def _add_process(self, state: _Process, now: int) -> None:
        row: dict[str, Any] = {
            "recorded_ns": now,
            "host": "unknown",
            "pid": 0,
            "started_ns": self._file_time() if state.first_ns is None else state.first_ns,
            "ended_ns": self._file_time() if state.last_ns is None else state.last_ns,
            "ending": "stop",
            "command": json.dumps([path.name for path in self.files]),
            "settings": json.dumps({"imported_from": self.source}),
            "nanalyze_version": metadata.version("nanalyze"),
            "python_version": platform.python_version(),
            "layers": "imported",
            "kernels_written": state.rows["kernels"],
        }
        row.update({name: value for name, value in state.facts.items() if value is not None or name in _MAY_BE_OPEN})
        row["shards"] = json.dumps(dict(sorted({**state.shards, "processes": 1}.items())))
        self.add("processes", state.name, _columns("processes", [row]))
        self._flush(("processes", state.name))

    def _file_time(self) -> int:
        return self.files[0].stat().st_mtime_ns if self.files and self.files[0].exists() else time.time_ns()

    def _file_facts(self) -> dict[str, Any]:
        found = [path for path in self.files if path.exists()]
        return {"files": [{"name": path.name, "bytes": path.stat().st_size} for path in found]}

    # --- rows --------------------------------------------------------------------------------------

    def _track(self, state: _Process, batch: Mapping[str, Any]) -> None:
        """Keep the first start, the last end and the total time of the kernels of a process."""
        duration = batch.get("duration_ns")
        if duration is not None:
            self._kernel_ns += int(np.ma.sum(duration)) if np.ma.count(duration) else 0
        start = batch.get("start_ns")
        if start is None or not np.ma.count(start):
            return
        first = int(np.ma.min(start))
        end = np.ma.max(start) if duration is None else np.ma.max(np.ma.add(start, np.ma.filled(duration, 0)))
        state.first_ns = first if state.first_ns is None else min(state.first_ns, first)
        state.last_ns = int(end) if state.last_ns is None else max(state.last_ns, int(end))

    def _sound_class(self, kernel: KernelClass) -> KernelClass:
        """The class with what its columns cannot hold taken out."""
        values = (*kernel.grid, *kernel.block, *kernel.cluster, *_resources(kernel))
        if all(value is None or 0 <= value <= fit.INT32.max for value in values):
            return kernel
        self.refuse("launch shapes or resources that are no 31-bit numbers")

        def shape(given: tuple[int, int, int]) -> tuple[int, int, int]:
            return given if all(0 <= value <= fit.INT32.max for value in given) else (0, 0, 0)

        fixed = (value if value is not None and 0 <= value <= fit.INT32.max else None for value in _resources(kernel))
        return KernelClass(kernel.name, shape(kernel.grid), shape(kernel.block), shape(kernel.cluster), *fixed)

    def _sound_batch(self, table: schema.Table, batch: Mapping[str, Any], rows: int) -> dict[str, Any]:
        """`batch` with every column of the type that `table` declares, unfit values masked."""
        types = {column.name: column.type for column in table.columns}
        sound: dict[str, Any] = {}
        for name, values in batch.items():
            if len(values) != rows:
                raise ValueError(f"{table.name}.{name}: has {len(values)} rows, the batch has {rows}")
            kind = types.get(name, "float64")
            sound[name] = self._sound_column(f"{table.name}.{name}", values, kind) if kind != "string" else values
        for column in table.columns:
            if not column.nullable:
                self._fill(table.name, column, sound, rows)
        return sound

    def _sound_column(self, where: str, values: Any, kind: str) -> Any:
        if kind == "bool":
            return values
        array, missing = fit.numbers(values)
        if kind == "float64":
            array, unfit = fit.floats(array)
        else:
            array, unfit = fit.integers(array, fit.INT32 if kind == "int32" else fit.INT64)
        lost = int(np.count_nonzero(unfit & ~missing))
        if lost:
            self.refuse(f"{where}: no finite number that fits", lost)
        missing = missing | unfit
        return np.ma.MaskedArray(array, mask=missing) if missing.any() else array

    def _fill(self, table: str, column: schema.Column, batch: dict[str, Any], rows: int) -> None:
        """Zero, or empty text, where the table demands a value and the source has none."""
        empty: Any = "" if column.type == "string" else 0
        values = batch.get(column.name)
        if values is None:
            batch[column.name] = [empty] * rows if column.type == "string" else np.zeros(rows, dtype=np.int64)
        elif isinstance(values, np.ma.MaskedArray) and values.mask.any():
            batch[column.name] = values.filled(0)
        elif isinstance(values, list) and None in values:
            batch[column.name] = [empty if value is None else value for value in values]
        else:
            return
        if table in ("kernels", "copies"):
            self.note(f"{table}.{column.name}: not in the source for some rows, stored as {empty!r}")

    def _flush(self, key: tuple[str, str]) -> None:
        batches = self._pending.pop(key, None)
        self._pending_rows.pop(key, None)
        if not batches:
            return
        table, process = key
        state = self._by_name[process]
        state.shards[table] += 1
        while len(self._writes) >= WRITES_AHEAD:
            self._writes.popleft().result()
        self._writes.append(self._pool.submit(_write, self._root, table, process, state.shards[table], batches))


_MAY_BE_OPEN = ("ended_ns", "ending")  # NULL says that the process was cut off


def _write(root: Path, table: str, process: str, sequence: int, batches: list[Mapping[str, Any]]) -> None:
    rows = to_arrow(schema.TABLES[table], [dict(batch) for batch in batches])
    shards.write_shard(root, table, process, sequence, rows)


# --- rows ------------------------------------------------------------------------------------------


def _columns(table: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row.get(name) for row in rows] for name in schema.TABLES[table].column_names}


def _resources(kernel: KernelClass) -> tuple[int | None, ...]:
    return (
        kernel.registers_per_thread,
        kernel.static_shared_bytes,
        kernel.dynamic_shared_bytes,
        kernel.local_bytes_per_thread,
    )


def _class_row(id_: int, kernel: KernelClass, name: str) -> dict[str, Any]:
    row: dict[str, Any] = {"kernel_class_id": id_, "name_mangled": kernel.name_text, "name": name}
    for what, shape in (("grid", kernel.grid), ("block", kernel.block), ("cluster", kernel.cluster)):
        row.update({f"{what}_{axis}": value for axis, value in zip("xyz", shape, strict=True)})
    names = ("registers_per_thread", "static_shared_bytes", "dynamic_shared_bytes", "local_bytes_per_thread")
    row.update(zip(names, _resources(kernel), strict=True))
    return row


def _with_peaks(row: Mapping[str, Any]) -> dict[str, Any]:
    """The device with the rates of its compute capability, where it has one; AMD's numbers mean other chips."""
    major, minor = row.get("cc_major"), row.get("cc_minor")
    is_amd = str(row.get("name", "")).upper().startswith(("AMD", "MI", "RADEON", "INSTINCT"))
    if major is not None and minor is not None and not is_amd:
        rates = peaks.rates(int(major), int(minor))
        known = {name: getattr(rates, name) for name in peaks.NUMBER_FIELDS}
        return {**known, "peaks_source": rates.source, **{n: v for n, v in row.items() if v is not None}}
    return dict(row)


def _partition_name(key: str, taken: Mapping[str, Any]) -> str:
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", key)[:LONGEST_NAME] or "process"
    unique, number = name, 2
    while unique in taken:
        unique, number = f"{name}-{number}", number + 1
    return unique


def _shown(files: Sequence[Path]) -> str:
    return f"{files[0]}" if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
