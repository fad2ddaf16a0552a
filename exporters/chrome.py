"""A run as trace events (Chrome's JSON), which ui.perfetto.dev and chrome://tracing open.

Each GPU of each process is a process of the trace: its streams are threads with kernels and copies
on them, its samples and device state are counter tracks. Each recorded process is one more, with
its ranges by thread. A kernel's verdict stands in its arguments, in its category (`kernel,memory`)
and, in chrome://tracing, in its colour; beside each stream a thread shows its stretches of one verdict.

Times are microseconds since the first instant of the run, which `baseTimeNanoseconds` tells: as
float64, in which viewers hold them, instants since 1970 would lose nanoseconds. Ids of 64 bits and
large numbers are text, for the same reason.

Format: "Trace Event Format", Google, events M, X, B and C.
"""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import nanalyze.analysis as na
from nanalyze.exporters.lanes import MOST_LANES, Lanes
from nanalyze.exporters.verdict_track import Stretch, VerdictTrack
from nanalyze.rundir.errors import NanalyzeError

BUFFER_BYTES = 2**20
EXACT_IN_FLOAT64 = 2**53

# Names from the format's palette; Perfetto colours by name and shows the verdict as category.
COLOURS = {
    "memory": "rail_response",
    "compute": "good",
    "latency": "bad",
    "balanced": "rail_animation",
    "communication": "rail_load",
    "launch": "terrible",
    "undetermined": "grey",
}
VERDICT = ("bound", "level_or_pipe", "compute_pct", "memory_pct", "occupancy_pct", "method", "reason")
STATE = ("sm_clock_hz", "memory_clock_hz", "power_mw", "temperature_c", "throttle_reasons")

_BASE = """
SELECT min(at_ns) AS base_ns FROM (
    SELECT start_ns AS at_ns FROM kernels
    UNION ALL SELECT start_ns FROM copies
    UNION ALL SELECT start_ns FROM ranges
    UNION ALL SELECT start_ns FROM samples
    UNION ALL SELECT time_ns FROM device_state
)
"""
_CLASSES = """
SELECT
    c.kernel_class_id, c.name, v.bound, v.level_or_pipe, v.compute_pct, v.memory_pct, v.occupancy_pct, v.method,
    v.reason, c.grid_x, c.grid_y, c.grid_z, c.block_x, c.block_y, c.block_z, c.registers_per_thread,
    c.static_shared_bytes, c.dynamic_shared_bytes
FROM kernel_classes AS c
LEFT JOIN verdicts AS v USING (kernel_class_id)
ORDER BY c.kernel_class_id
"""
_GPU_WORK = """
SELECT
    k.process, k.device_id, k.stream_id, k.start_ns, k.duration_ns, k.kernel_class_id, k.queued_ns,
    k.correlation_id, k.graph_id, k.graph_node_id, r.name AS range_name,
    NULL AS kind, NULL AS bytes, NULL AS source, NULL AS destination
FROM kernels AS k
LEFT JOIN ranges AS r ON r.process = k.process AND r.range_id = k.range_id
UNION ALL
SELECT
    process, device_id, stream_id, start_ns, duration_ns, NULL, NULL, correlation_id, graph_id, graph_node_id, NULL,
    kind, bytes, source, destination
FROM copies
ORDER BY process, device_id, stream_id, start_ns, duration_ns DESC, correlation_id, graph_node_id
"""
_RANGES = """
SELECT process, thread_id, start_ns, end_ns, name, source, flops, bytes, attributes
FROM ranges
ORDER BY process, thread_id, start_ns, end_ns DESC NULLS FIRST, depth, range_id
"""


class _Work(NamedTuple):
    """A row of _GPU_WORK: a kernel, or a copy where `kind` is told."""

    process: str
    device_id: int
    stream_id: int
    start_ns: Any
    duration_ns: Any
    kernel_class_id: int
    queued_ns: int | None
    correlation_id: int
    graph_id: int | None
    graph_node_id: int | None
    range_name: str | None
    kind: str | None
    bytes: Any
    source: str | None
    destination: str | None


@dataclass
class Written:
    """Events by kind, and rows that could not become one, by reason."""

    rows: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)


def write(run: na.Run, path: Path, compress: bool, progress: Callable[[str, int], None]) -> Written:
    """Write the trace to `path`. Raises NanalyzeError for a run in which nothing has a time."""
    base = run.arrow(_BASE)["base_ns"][0].as_py()
    if base is None:
        raise NanalyzeError(f"{run.path}: nothing in it has a time, so there is no timeline. Use --format parquet.")
    with ExitStack() as stack:
        file: IO[bytes] = stack.enter_context(open(path, "wb", BUFFER_BYTES))
        if compress:
            file = cast(IO[bytes], stack.enter_context(gzip.GzipFile("", "wb", 4, file, mtime=0)))
        return _Writer(run, file, base, progress).write()


class _Writer:
    """Writes one trace; every method appends events of one kind."""

    def __init__(self, run: na.Run, file: IO[bytes], base: int, progress: Callable[[str, int], None]) -> None:
        self._run = run
        self._file = file
        self._base = base
        self._progress = progress
        self._written = Written()
        self._pending: list[str] = []
        self._separator = ""
        self._tracks = _Tracks(run, self._emit)

    def write(self) -> Written:
        header = {
            "displayTimeUnit": "ns",
            "baseTimeNanoseconds": str(self._base),
            "otherData": {"written_by": "nanalyze", "run_id": str(self._run.info.get("run_id"))},
        }
        self._file.write((json.dumps(header)[:-1] + ', "traceEvents": [\n').encode("ascii"))
        self._write_gpu_work()
        self._write_ranges()
        self._write_samples()
        self._write_device_state()
        self._flush()
        self._file.write(b"\n]}\n")
        return self._written

    # --- kinds of events ---------------------------------------------------------------------------

    def _write_gpu_work(self) -> None:
        classes = {row["kernel_class_id"]: _class_part(row) for row in self._rows(_CLASSES)}
        lanes, track, at = Lanes(nested=False), VerdictTrack(), None
        for work in map(_Work._make, self._values(_GPU_WORK)):
            what = "kernels" if work.kind is None else "copies"
            start, duration = work.start_ns, work.duration_ns
            if start is None or duration is None or duration < 0:
                self._written.left_out[f"{what} without times"] += 1
                continue
            place = (work.process, work.device_id, work.stream_id)
            if place != at:
                self._write_stretch(at, track.finish())
                lanes, at = Lanes(nested=False), place
            lane = lanes.place(start, start + duration)
            if lane is None:
                self._written.left_out[f"{what} that overlap {MOST_LANES} others of their stream"] += 1
                continue
            pid, tid = self._tracks.stream(*place, lane)
            if what == "kernels":
                bound, name, args = classes.get(work.kernel_class_id) or _unknown_class(work.kernel_class_id)
                args += _launch_part(work)
                self._write_stretch(at, track.add(bound, start, start + duration))
            else:
                name, args = _copy_part(work)
            self._count(what)
            when = self._when(start, duration)
            self._emit(f'{{"ph": "X", "pid": {pid}, "tid": {tid}, {when}, {name}, "args": {{{args}}}}}')
        self._write_stretch(at, track.finish())

    def _write_stretch(self, place: tuple[str, int, int] | None, stretch: Stretch | None) -> None:
        if place is None or stretch is None:
            return
        pid, tid = self._tracks.verdicts(*place)
        when = self._when(stretch.start, stretch.end - stretch.start)
        self._count("verdict stretches")
        self._emit(
            f'{{"ph": "X", "pid": {pid}, "tid": {tid}, {when}, {_colour(stretch.bound)}, "cat": "verdict", '
            f'"name": "{stretch.bound}", "args": {{"kernels": {stretch.kernels}, "busy_us": {_us(stretch.busy_ns)}}}}}'
        )

    def _write_ranges(self) -> None:
        lanes, at = Lanes(nested=True), None
        for row in self._rows(_RANGES):
            start, end = row["start_ns"], row["end_ns"]
            place = (row["process"], row["thread_id"])
            if place != at:
                lanes, at = Lanes(nested=True), place
            is_closed = end is not None and end >= start
            lane = lanes.place(start, end if is_closed else None)
            if lane is None:
                self._written.left_out[f"ranges that overlap {MOST_LANES} others of their thread"] += 1
                continue
            pid, tid = self._tracks.thread(*place, lane)
            when = self._when(start, end - start) if is_closed else f'"ts": {_us(start - self._base)}'
            phase = "X" if is_closed else "B"  # a range that was never closed has no end
            args = {name: row[name] for name in ("source", "flops", "bytes", "attributes")}
            self._count("ranges")
            self._emit(
                f'{{"ph": "{phase}", "pid": {pid}, "tid": {tid}, {when}, "cat": "range", "name": {_text(row["name"])}, '
                f'"args": {{{_inside(args)}}}}}'
            )

    def _write_samples(self) -> None:
        fixed = ("device_id", "start_ns", "end_ns", "counter_group", "process")
        for row in self._rows("SELECT * FROM samples ORDER BY process, device_id, start_ns, counter_group"):
            counters = {name: value for name, value in row.items() if name not in fixed}
            self._write_counters(row["process"], row["device_id"], row["start_ns"], counters, "sample")

    def _write_device_state(self) -> None:
        for row in self._rows("SELECT * FROM device_state ORDER BY process, device_id, time_ns"):
            counters = {name: row[name] for name in STATE}
            self._write_counters(row["process"], row["device_id"], row["time_ns"], counters, "device state")

    def _write_counters(self, process: str, device: int, at: int, values: Mapping[str, Any], what: str) -> None:
        known = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        if not known:
            return
        pid = self._tracks.device(process, device)
        for name, value in known.items():
            self._count(f"{what} values")
            self._emit(
                f'{{"ph": "C", "pid": {pid}, "tid": 0, "ts": {_us(at - self._base)}, "cat": "{what}", '
                f'"name": {_text(name)}, "args": {{"value": {json.dumps(value)}}}}}'
            )

    # --- parts -------------------------------------------------------------------------------------

    def _rows(self, query: str) -> Iterator[dict[str, Any]]:
        for batch in self._run.batches(query):
            yield from batch.to_pylist()

    def _values(self, query: str) -> Iterator[tuple[Any, ...]]:
        """As `_rows`, without the names: half the time for the millions of rows that launches are."""
        for batch in self._run.batches(query):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    def _when(self, start: int, duration: int) -> str:
        return f'"ts": {_us(start - self._base)}, "dur": {_us(duration)}'

    def _count(self, what: str) -> None:
        self._written.rows[what] += 1
        if self._written.rows[what] % 10_000 == 0:
            self._progress(what, self._written.rows[what])

    def _emit(self, event: str) -> None:
        self._pending.append(event)
        if len(self._pending) >= 1000:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            self._file.write((self._separator + ",\n".join(self._pending)).encode("ascii"))
            self._separator = ",\n"
            self._pending.clear()


class _Tracks:
    """Numbers for the trace's processes and threads; names each when it first appears."""

    def __init__(self, run: na.Run, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._numbers: dict[tuple[Any, ...], int] = {}
        devices = run.sql("SELECT process, device_id, name FROM devices ORDER BY process, device_id")
        self._device_names = {(row.process, row.device_id): row.name for row in devices.itertuples()}
        processes = run.sql("SELECT process, rank FROM processes ORDER BY rank NULLS LAST, process")
        self._order = {row.process: place for place, row in enumerate(processes.itertuples())}

    def device(self, process: str, device: int) -> int:
        """The trace's process for a GPU."""
        name = self._device_names.get((process, device))
        text = f"GPU {device}{f' {name}' if name else ''} ({process})"
        return self._process(("device", process, device), text, 1000 * self._place(process) + 1 + device)

    def stream(self, process: str, device: int, stream: int, lane: int) -> tuple[int, int]:
        """Process and thread for a stream; work that overlaps other work of its stream has further lanes."""
        pid = self.device(process, device)
        return pid, self._thread(pid, ("stream", process, device, stream, lane), f"stream {stream}", lane)

    def verdicts(self, process: str, device: int, stream: int) -> tuple[int, int]:
        """Process and thread for the verdicts of a stream."""
        pid = self.device(process, device)
        return pid, self._thread(pid, ("verdicts", process, device, stream), f"stream {stream}, verdicts", 0)

    def thread(self, process: str, thread: int, lane: int) -> tuple[int, int]:
        """Process and thread for ranges."""
        pid = self._process(("host", process), f"host ({process})", 1000 * self._place(process))
        return pid, self._thread(pid, ("thread", process, thread, lane), f"thread {thread}", lane)

    def _place(self, process: str) -> int:
        return self._order.setdefault(process, len(self._order))

    def _process(self, key: tuple[Any, ...], name: str, place: int) -> int:
        if key not in self._numbers:
            self._numbers[key] = number = len(self._numbers) + 1
            self._name("process", number, 0, name, place)
        return self._numbers[key]

    def _thread(self, pid: int, key: tuple[Any, ...], name: str, lane: int) -> int:
        if key not in self._numbers:
            # Threads have numbers of their own: one that equals its pid would be taken for the main thread.
            self._numbers[key] = number = len(self._numbers) + 1
            self._name("thread", pid, number, name + (f", overlapping ({lane + 1})" if lane else ""), number)
        return self._numbers[key]

    def _name(self, what: str, pid: int, tid: int, name: str, place: int) -> None:
        for kind, argument in (("name", f'"name": {_text(name)}'), ("sort_index", f'"sort_index": {place}')):
            self._emit(
                f'{{"ph": "M", "pid": {pid}, "tid": {tid}, "ts": 0, "name": "{what}_{kind}", "args": {{{argument}}}}}'
            )


# --- text ------------------------------------------------------------------------------------------


def _us(ns: int) -> str:
    """Nanoseconds as microseconds with three decimals, exactly."""
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return f"{sign}{ns // 1000}.{ns % 1000:03d}"


@lru_cache(4096)
def _text(value: object) -> str:
    """A JSON string in ASCII, whatever stands in it."""
    return json.dumps(str(value))


def _inside(args: Mapping[str, Any]) -> str:
    """The inside of a JSON object; without what is missing, with large whole numbers as text."""
    return ", ".join(f"{json.dumps(name)}: {_value(value)}" for name, value in args.items() if _is_known(value))


def _is_known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def _value(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= EXACT_IN_FLOAT64:
        return f'"{value}"'
    return json.dumps(value)


def _colour(bound: str) -> str:
    return f'"cname": "{COLOURS.get(bound, "grey")}"'


def _class_part(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """What all launches of a class share: verdict; category, colour and name; the beginning of the arguments."""
    bound = row["bound"] or "undetermined"
    head = f'"cat": "kernel,{bound}", {_colour(bound)}, "name": {_text(row["name"])}'
    args = {
        "kernel_class_id": str(row["kernel_class_id"]),
        **{name: row[name] for name in VERDICT},
        "grid": [row["grid_x"], row["grid_y"], row["grid_z"]],
        "block": [row["block_x"], row["block_y"], row["block_z"]],
        **{name: row[name] for name in ("registers_per_thread", "static_shared_bytes", "dynamic_shared_bytes")},
    }
    return bound, head, _inside(args)


def _unknown_class(id_: int) -> tuple[str, str, str]:
    """A launch whose class was lost with its shard."""
    return "undetermined", f'"cat": "kernel,undetermined", "name": "class {id_}"', f'"kernel_class_id": "{id_}"'


def _launch_part(work: _Work) -> str:
    """What only this launch has, to follow the arguments of its class."""
    part = f', "correlation_id": "{work.correlation_id}"'
    if work.queued_ns is not None:
        part += f', "queued_us_before": {_us(work.start_ns - work.queued_ns)}'
    if work.graph_id is not None:
        part += f', "graph_id": "{work.graph_id}"'
    if work.graph_node_id is not None:
        part += f', "graph_node_id": "{work.graph_node_id}"'
    if work.range_name is not None:
        part += f', "range": {_text(work.range_name)}'
    return part


def _copy_part(work: _Work) -> tuple[str, str]:
    args = {
        "bytes": work.bytes,
        "source": work.source,
        "destination": work.destination,
        "bytes_per_s": work.bytes * 1e9 / work.duration_ns if work.bytes and work.duration_ns else None,
        "correlation_id": str(work.correlation_id),
    }
    return f'"cat": "copy", "name": {_text(work.kind)}', _inside(args)
