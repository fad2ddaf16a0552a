"""Follows a run while it is recorded: each shard is read once, totals are kept.

`Live.update` reads what has appeared since the last call, so its cost follows what the job does and
not how long it has run. Verdicts need the views, which read whatever they are given: `newest`
opens the latest shards only, up to a size, which bounds them too.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nanalyze.analysis import catalog
from nanalyze.analysis.run import Run
from nanalyze.rundir import runfile
from nanalyze.rundir.schema import ROLLED_UP, TABLES
from nanalyze.rundir.shards import PARTITION_NAME, Shard, digest, outermost, parse

NEWEST_BYTES = 16 << 20  # a table: about a million launches
# Small, and needed whole: what a kernel class or a device is was written when it was first seen.
_WHOLE = ("processes", "devices", "kernel_classes")
_READ = {
    "kernels": ["start_ns", "duration_ns", "kernel_class_id"],
    "kernel_minutes": ["kernel_class_id", "launches", "launches_untimed", "total_ns"],
    "kernel_classes": ["kernel_class_id", "name"],
    "processes": None,
    "devices": ["device_id", "name", "sm_clock_max_hz"],
    "device_state": None,
    "events": ["layer", "kind", "message", "count"],
}

Row = dict[str, Any]


@dataclass
class Totals:
    """Launches of a kernel class, those whose duration is known, and the sum of these (ns)."""

    launches: int = 0
    timed: int = 0
    total_ns: int = 0


@dataclass
class Live:
    """What is known of the run in `run_dir` so far; `update` brings it up to date.

    Raises RunError and FormatVersionError as `nanalyze.analysis.open` does.
    """

    run_dir: Path
    classes: dict[int, Totals] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    processes: dict[str, Row] = field(default_factory=dict)  # latest row by process
    devices: dict[tuple[str, int], Row] = field(default_factory=dict)  # by process and ordinal
    states: dict[tuple[str, int], Row] = field(default_factory=dict)  # latest row by process and ordinal
    losses: Counter[tuple[str, str]] = field(default_factory=Counter)  # by layer and message
    newest_ns: int | None = None  # end of the latest kernel
    written_at: float | None = None  # when the latest shard was, in seconds since the epoch
    unreadable: int = 0

    def __post_init__(self) -> None:
        self.info = runfile.read(self.run_dir)
        self._seen: dict[tuple[str, str], dict[tuple[int, int], int]] = {}  # rows of each shard, by its numbers

    @property
    def total_ns(self) -> int:
        return sum(totals.total_ns for totals in self.classes.values())

    def update(self) -> int:
        """Read the shards that are new; how many."""
        new = [shard for table in _READ if table not in ROLLED_UP for shard in self._new_shards(table)]
        for shard in new:
            seen = self._seen.setdefault(shard.place, {})
            try:
                data = shard.path.read_bytes()
                written_at = shard.path.stat().st_mtime
            except FileNotFoundError:
                continue  # merged with others meanwhile: the next update finds its rows there
            except OSError:
                seen[shard.span] = 0
                self.unreadable += 1
                continue
            try:
                if digest(data) != shard.digest:
                    raise ValueError("does not match the hash in its name")
                rows = pq.ParquetFile(pa.BufferReader(data)).read(columns=_READ[shard.table])
                # A merged shard holds the rows of its parts in order, and those read so far are the first ones.
                known = sum(seen.pop(span) for span in _inside(seen, shard))
                seen[shard.span] = rows.num_rows
                getattr(self, f"_take_{shard.table}")(shard.process, rows.slice(known))
            except (pa.ArrowException, KeyError, ValueError):
                seen.setdefault(shard.span, 0)
                self.unreadable += 1
                continue
            self.written_at = max(written_at, self.written_at or 0.0)
        return len(new)

    def _new_shards(self, table: str) -> list[Shard]:
        """Shards of `table`, and those that were rolled up from it, whose rows are not counted yet."""
        found = list(_current(self.run_dir, table))
        new = [shard for shard in found if self._is_new(shard)]
        if not any(shard.table in ROLLED_UP and _inside(self._seen.get(shard.place, {}), shard) for shard in new):
            return new
        # Sums cannot be told from those of them that are counted: begin again.
        self.classes.clear()
        self._seen = {place: seen for place, seen in self._seen.items() if place[0] != table}
        return found

    def _is_new(self, shard: Shard) -> bool:
        seen = self._seen.get(shard.place, {})
        if shard.span in seen:
            return False
        inside = _inside(seen, shard)
        if sum(last - first + 1 for first, last in inside) <= shard.span[1] - shard.span[0]:
            return True
        # Merged or rolled up from what has been read.
        seen[shard.span] = sum(seen.pop(span) for span in inside)
        return False

    # -- what each table adds -----------------------------------------------------------------------

    def _take_kernels(self, process: str, rows: pa.Table) -> None:
        class_ids, members = np.unique(_values(rows, "kernel_class_id")[0], return_inverse=True)
        durations, known = _values(rows, "duration_ns")
        known &= durations >= 0
        launches = np.bincount(members, minlength=len(class_ids))
        timed = np.bincount(members, weights=known, minlength=len(class_ids))
        total = np.zeros(len(class_ids), dtype=np.int64)
        np.add.at(total, members, np.where(known, durations, 0))
        for place, class_id in enumerate(class_ids.tolist()):
            totals = self.classes.setdefault(class_id, Totals())
            totals.launches += int(launches[place])
            totals.timed += int(timed[place])
            totals.total_ns += int(total[place])
        starts, has_start = _values(rows, "start_ns")
        ends = (starts + durations)[known & has_start]
        if ends.size:
            self.newest_ns = max(int(ends.max()), self.newest_ns or 0)

    def _take_kernel_minutes(self, process: str, rows: pa.Table) -> None:
        columns = [_values(rows, name)[0].tolist() for name in _READ["kernel_minutes"] or ()]
        for class_id, launches, untimed, total_ns in zip(*columns, strict=True):
            totals = self.classes.setdefault(class_id, Totals())
            totals.launches += launches
            totals.timed += launches - untimed
            totals.total_ns += total_ns

    def _take_kernel_classes(self, process: str, rows: pa.Table) -> None:
        self.names.update(zip(*(column.to_pylist() for column in rows.columns), strict=True))

    def _take_processes(self, process: str, rows: pa.Table) -> None:
        for row in rows.to_pylist():
            if row["recorded_ns"] >= self.processes.get(process, {"recorded_ns": 0})["recorded_ns"]:
                self.processes[process] = {**row, "process": process}

    def _take_devices(self, process: str, rows: pa.Table) -> None:
        self.devices.update({(process, row["device_id"]): row for row in rows.to_pylist()})

    def _take_device_state(self, process: str, rows: pa.Table) -> None:
        for row in rows.slice(max(0, rows.num_rows - 64)).to_pylist():
            key = (process, row["device_id"])
            if row["time_ns"] >= self.states.get(key, {"time_ns": 0})["time_ns"]:
                self.states[key] = row

    def _take_events(self, process: str, rows: pa.Table) -> None:
        for row in rows.to_pylist():
            if row["kind"] == "loss":
                self.losses[row["layer"], row["message"]] += row["count"] or 1


def _values(rows: pa.Table, name: str) -> tuple[Any, Any]:
    """A column of integers as int64, 0 where it is NULL, and where it is not."""
    column = rows.column(name).combine_chunks()
    known = np.asarray(column.is_valid()).astype(bool)
    return np.asarray(column.fill_null(0), dtype=np.int64), known


def newest(run_dir: Path, limit_bytes: int = NEWEST_BYTES) -> Run:
    """The run as if it held only the latest shards of each large table, up to `limit_bytes` a table.

    Raises RunError where there is nothing to read yet.
    """
    root = run_dir.resolve()
    chosen = [s for table in TABLES if table not in ROLLED_UP for s in _latest(root, table, limit_bytes)]
    return Run(run_dir, root, runfile.read(run_dir), catalog.of_shards(root, chosen), {}, False)


def _latest(root: Path, table: str, limit_bytes: int) -> Iterator[Shard]:
    shards = list(_shards(root, table))
    if table in _WHOLE:
        yield from shards
        return
    sizes = {shard.path: _stat(shard.path) for shard in shards}
    for shard in sorted(shards, key=lambda shard: sizes[shard.path][0], reverse=True):
        limit_bytes -= sizes[shard.path][1]
        yield shard
        if limit_bytes <= 0:
            return


def _stat(path: Path) -> tuple[float, int]:
    """When it was written, and its size; zeros for a file that has gone."""
    try:
        status = path.stat()
    except OSError:
        return 0.0, 0
    return status.st_mtime, status.st_size


def _inside(seen: Mapping[tuple[int, int], int], shard: Shard) -> list[tuple[int, int]]:
    """Those of the numbers seen that a merged shard takes the place of."""
    if shard.last <= shard.sequence:
        return []
    return [span for span in seen if shard.sequence <= span[0] and span[1] <= shard.last]


def _shards(run_dir: Path, table: str) -> Iterator[Shard]:
    """The table's shards by name, in each process in order."""
    for folder in _names(run_dir / table):
        partition = PARTITION_NAME.match(folder)
        if partition is None:
            continue
        paths = [run_dir / table / folder / name for name in _names(run_dir / table / folder)]
        parsed = [parse(path, table, partition.group(1)) for path in paths]
        yield from outermost(shard for shard in parsed if shard is not None)


def _current(run_dir: Path, table: str) -> Iterator[Shard]:
    """The same with what was rolled up in the place of what it stands for."""
    sharing = [table, *(name for name, place in ROLLED_UP.items() if place == table)]
    yield from outermost(shard for name in sharing for shard in _shards(run_dir, name))


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
