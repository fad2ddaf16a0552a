"""torch.profiler traces: Kineto's JSON, plain or gzipped, one file a rank.

Read as a stream, so a file of any size needs the same memory (kernels and launch calls wait in a
temporary file for its end). Truncated and damaged files are read as far as they go; the place is
told as a byte offset in the unpacked file. Times are exact to the nanosecond; they count from the
Unix epoch where the trace says how (`baseTimeNanoseconds`, or timestamps that already do).

- kernels: with the host time of their launch call, found by correlation id. All kernels of a graph
  launch share it. Shared memory is told as one sum, stored as dynamic.
- ranges: user annotations (`record_function`), and collectives with their message sizes, types and
  groups as attributes, at the time of their launch call.
- copies, devices, rank and world size.
- counters of `cuda_profiler_range` events: exact counters of launches without times, because the
  profiler only spreads those events evenly over its window.
- several files become several processes. Where ranks share collectives and their clocks differ by
  more than the collectives scatter, the later ones are shifted; `events` says by how much.

Operators, Python frames, flow arrows and GPU-side copies of annotations are counted, not stored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanalyze.importers import kineto_numbers as numbers
from nanalyze.importers.kineto_clock import Offset, offsets
from nanalyze.importers.kineto_events import Collected
from nanalyze.importers.kineto_json import TraceFile
from nanalyze.importers.kineto_ranges import STILL_OPEN, nest
from nanalyze.importers.kineto_spool import Column, Columns, joined, replaced
from nanalyze.importers.kineto_stream import GZIP_MAGIC, Stream, unpacked_head
from nanalyze.importers.options import ImportFailed, Options
from nanalyze.importers.sink import Sink

KIND = "kineto"

EPOCH_NS = 900_000_000_000_000_000  # instants from here on (July 1998) count from the Unix epoch already
LATEST_NS = 2**62
SHOWN_DAMAGE = 5
MOST_SORTED = 1_000_000  # kernels, to look for overlaps among them
_EVENT_KEYS = re.compile(rb'"(?:ph|traceEvents)"\s*:')
_RANK_IN_NAME = re.compile(r"rank[-_]?(\d{1,6})", re.IGNORECASE)
_DEVICE_COLUMNS = {
    "name": "name",
    "computeMajor": "cc_major",
    "computeMinor": "cc_minor",
    "numSms": "sm_count",
    "warpSize": "warp_size",
    "maxThreadsPerMultiprocessor": "threads_per_sm_max",
    "regsPerMultiprocessor": "registers_per_sm",
    "sharedMemPerMultiprocessor": "shared_bytes_per_sm",
    "maxSharedMemoryPerMultiProcessor": "shared_bytes_per_sm",
    "totalGlobalMem": "memory_bytes",
}


def detect(path: Path, head: bytes) -> bool:
    """JSON with trace events in it: their key, or a bare array of events."""
    if head.startswith(GZIP_MAGIC):
        head = unpacked_head(head, 2**20)
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text.startswith(b"["):
        return bool(_EVENT_KEYS.search(text))
    # Process groups of thousands of ranks may stand before the events, out of the head's reach.
    return text.startswith(b"{") and any(
        key in text for key in (b'"traceEvents"', b'"deviceProperties"', b'"schemaVersion"', b'"distributedInfo"')
    )


def read(paths: Sequence[Path], sink: Sink, options: Options, progress: Callable[[int, int], None]) -> None:
    """Feed `sink` with what the traces hold; `progress` counts bytes of the files.

    Raises ImportFailed for what is no trace, holds no GPU work, or breaks a limit.
    """
    total = sum(path.stat().st_size for path in paths if path.exists())
    done = 0
    with ExitStack() as stack:
        traces = []
        for path in paths:
            before = done
            traces.append(_collect(path, sink, options, lambda n, before=before: progress(before + n, total)))  # type: ignore[misc]
            stack.callback(traces[-1].collected.close)
            done += path.stat().st_size
        _name_processes(traces, sink)
        shifts = _align(traces, sink, options)
        for trace, shift in zip(traces, shifts, strict=True):
            _write(trace, sink, shift)
        progress(total, total)


@dataclass
class _Trace:
    """One file that has been read to its end."""

    path: Path
    members: dict[str, Any]
    collected: Collected
    origin_ns: int = 0  # what to add to its times
    is_absolute: bool = True
    process: str = ""

    @property
    def rank(self) -> int | None:
        info = self.members.get("distributedInfo")
        rank = numbers.integer(info.get("rank")) if isinstance(info, dict) else None
        if rank is None and (match := _RANK_IN_NAME.search(self.path.name)):
            rank = int(match[1])
        return rank

    def note(self, sink: Sink, message: str) -> None:
        sink.note(f"{self.path.name}: {message}")


def _collect(path: Path, sink: Sink, options: Options, progress: Callable[[int], None]) -> _Trace:
    file = TraceFile(Stream(path, options.limits, progress), options.limits)
    collected = Collected(sink, options)
    try:
        for events in file.chunks():
            collected.add(events)
    except BaseException:
        collected.close()
        raise
    trace = _Trace(path, file.members, collected)
    _tell_damage(trace, file, sink)
    if not collected.kernels.rows and not collected.exact.rows:
        collected.close()
        raise _no_kernels(trace, file, sink, options)
    _find_origin(trace, sink)
    return trace


def _tell_damage(trace: _Trace, file: TraceFile, sink: Sink) -> None:
    sink.refuse("places where a file is damaged or cut off", len(file.damage))
    sink.count("events that were no valid JSON and could be mended", file.repaired)
    for damage in file.damage[:SHOWN_DAMAGE]:
        trace.note(sink, f"damaged at byte {damage.offset:,}: {damage.what}")
    if len(file.damage) > SHOWN_DAMAGE:
        trace.note(sink, f"damaged at {len(file.damage) - SHOWN_DAMAGE:,} further places")


def _no_kernels(trace: _Trace, file: TraceFile, sink: Sink, options: Options) -> ImportFailed:
    if file.damage:
        first = file.damage[0]
        reason = f"no kernels before it is damaged at byte {first.offset:,}: {first.what}"
        return ImportFailed(trace.path, reason, "Export the trace again, or copy it again.")
    if options.device is not None and sink.refused.get("GPU events of other devices"):
        return ImportFailed(trace.path, f"holds no kernels of device {options.device}", "Choose another --device.")
    read = ", ".join(f"{n:,} {what}" for what, n in sink.read.most_common(3)) or "no events at all"
    return ImportFailed(
        trace.path,
        f"holds no GPU work: {read}, but no kernels and no counters",
        "Profile with ProfilerActivity.CUDA while the job uses the GPU.",
    )


# --- when -------------------------------------------------------------------------------------------


def _find_origin(trace: _Trace, sink: Sink) -> None:
    """Decide what its times count from."""
    base = numbers.integer(trace.members.get("baseTimeNanoseconds"))
    first = _first_start(trace.collected)
    if first is not None and first >= EPOCH_NS:
        if base:
            trace.note(sink, "its times count from the Unix epoch already; baseTimeNanoseconds was not added")
        return
    if base and 0 < base < LATEST_NS:
        trace.origin_ns = base
        return
    trace.is_absolute = False
    trace.note(sink, "does not say when its clock began (no baseTimeNanoseconds): its times are not dates")


def _first_start(collected: Collected) -> int | None:
    starts = [batch["start_ns"].min() for batch in collected.kernels.batches()]
    starts += [batch["measured_ns"].min() for batch in collected.exact.batches()]
    known = [int(start) for start in starts if start is not np.ma.masked]
    return min(known) if known else None


def _align(traces: Sequence[_Trace], sink: Sink, options: Options) -> list[int]:
    """What to add to each trace's times, its clock's origin included."""
    origins = [trace.origin_ns for trace in traces]
    if len(traces) < 2:
        return origins
    if not options.align:
        sink.note("clocks: taken as the files have them, as was asked")
        return origins
    for trace in traces:
        trace.collected.collectives.shift(trace.origin_ns)
    found = offsets([trace.collected.collectives for trace in traces])
    return [origins[0]] + [
        origin + _correction(traces, index, offset, sink)
        for index, (origin, offset) in enumerate(zip(origins[1:], found[1:], strict=True), start=1)
    ]


def _correction(traces: Sequence[_Trace], index: int, offset: Offset | None, sink: Sink) -> int:
    trace = traces[index]
    if offset is None:
        comparable = trace.is_absolute == traces[0].is_absolute
        why = "its clock is taken as it is" if comparable else "its times cannot be compared with the others'"
        trace.note(sink, f"shares no collectives with the other ranks that could be paired; {why}")
        return 0
    evidence = f"median of {offset.pairs:,} collectives shared with {traces[offset.reference].path.name}"
    spread = f"spread {offset.spread_ns:,} ns"
    if not offset.is_significant:
        trace.note(sink, f"its clock agrees with the first file's within {abs(offset.ns):,} ns ({evidence}, {spread})")
        return 0
    trace.note(sink, f"shifted by {-offset.ns:,} ns onto the first file's clock ({evidence}, {spread})")
    return -offset.ns


# --- who --------------------------------------------------------------------------------------------


def _name_processes(traces: Sequence[_Trace], sink: Sink) -> None:
    seen: set[int | None] = set()
    keys: set[str] = set()
    for trace in traces:
        rank = trace.rank
        if len(traces) > 1 and rank is None:
            trace.note(sink, "does not tell its rank")
        elif rank in seen:
            trace.note(sink, f"is of rank {rank}, as another file is")
        seen.add(rank)
        pid = trace.collected.pid
        key = f"{'unknown' if rank is None else f'rank{rank}'}-{pid or 0}"
        while key in keys:
            key = f"{key}-{len(keys) + 1}"
        keys.add(key)
        trace.process = sink.process(key, **_facts(trace, rank, pid))
        for row in _devices(trace.members):
            sink.device(trace.process, **row)


def _facts(trace: _Trace, rank: int | None, pid: int | None) -> dict[str, Any]:
    info = trace.members.get("distributedInfo")
    world_size = numbers.integer(info.get("world_size")) if isinstance(info, dict) else None
    return {
        "rank": rank,
        "world_size": world_size,
        "pid": pid or 0,
        "cuda_driver_version": numbers.integer(trace.members.get("cuda_driver_version")),
        "command": json.dumps([trace.path.name]),
    }


def _devices(members: dict[str, Any]) -> list[dict[str, Any]]:
    told = members.get("deviceProperties")
    rows = []
    for device in told if isinstance(told, list) else []:
        id_ = numbers.integer(device.get("id")) if isinstance(device, dict) else None
        if id_ is None:
            continue
        row: dict[str, Any] = {"device_id": id_, "is_mig": False}
        for key, column in _DEVICE_COLUMNS.items():
            value = device.get(key)
            value = value if column == "name" and isinstance(value, str) else numbers.integer(value)
            row[column] = value if row.get(column) is None else row[column]
        rows.append(row)
    return rows


# --- rows -------------------------------------------------------------------------------------------


def _write(trace: _Trace, sink: Sink, shift: int) -> None:
    calls = _Calls(trace.collected)
    for id_, (kernel, name) in trace.collected.classes.items():
        if sink.kernel_class(trace.process, kernel, name) != id_:
            trace.collected.renamed[id_] = sink.kernel_class(trace.process, kernel, name)
    _write_kernels(trace, sink, shift, calls)
    _write_copies(trace, sink, shift)
    _write_ranges(trace, sink, shift, calls)
    _write_exact(trace, sink, shift)
    _count_overlaps(trace, sink)


class _Calls:
    """When the call of a correlation id was made; of several with one id, the first."""

    def __init__(self, collected: Collected) -> None:
        batches = list(collected.calls.batches())
        ids = np.concatenate([batch["correlation_id"].data for batch in batches] or [np.zeros(0, np.int64)])
        starts = np.concatenate([batch["start_ns"].data for batch in batches] or [np.zeros(0, np.int64)])
        order = np.lexsort((starts, ids))
        self._ids, first = np.unique(ids[order], return_index=True)
        self._starts = starts[order][first]

    def starts(self, ids: Column) -> Column:
        """The instants of the calls, masked where there is none."""
        if not len(self._ids):
            return np.ma.MaskedArray(np.zeros(len(ids), np.int64), mask=True)
        places = np.searchsorted(self._ids, ids.data).clip(max=len(self._ids) - 1)
        missing = (self._ids[places] != ids.data) | np.ma.getmaskarray(ids)
        return np.ma.MaskedArray(self._starts[places], mask=missing)


def _write_kernels(trace: _Trace, sink: Sink, shift: int, calls: _Calls) -> None:
    unlaunched = late = in_graphs = 0
    for batch in trace.collected.kernels.batches():
        queued = calls.starts(batch["correlation_id"])
        is_late = np.ma.filled(queued > batch["start_ns"], False)
        unlaunched += int(np.ma.getmaskarray(queued).sum())
        late += int(is_late.sum())
        in_graphs += batch["graph_id"].count()
        rows = {
            **batch,
            "start_ns": batch["start_ns"] + shift,
            "queued_ns": np.ma.MaskedArray(queued.data, np.ma.getmaskarray(queued) | is_late) + shift,
            "kernel_class_id": trace.collected.stored_ids(batch["kernel_class_id"]),
        }
        sink.add("kernels", trace.process, rows)
    sink.count("kernels without their launch call", unlaunched)
    sink.count("kernels in graphs", in_graphs)
    sink.refuse("launch calls later than their kernel's start", late)


def _write_copies(trace: _Trace, sink: Sink, shift: int) -> None:
    collected = trace.collected
    for batch in collected.copies.batches():
        labels = [collected.labels[label] for label in batch.pop("label").tolist()]
        kinds, sources, destinations = (list(column) for column in zip(*labels, strict=True))
        rows: dict[str, Any] = {**batch, "start_ns": batch["start_ns"] + shift, "kind": kinds}
        rows.update(source=sources, destination=destinations, bytes=_bytes(batch, collected))
        sink.add("copies", trace.process, rows)


def _bytes(batch: Columns, collected: Collected) -> Any:
    """HIP's copies tell their size only in the call."""
    sizes = batch["bytes"]
    if not collected.copied or not np.ma.getmaskarray(sizes).any():
        return sizes
    pairs = zip(sizes.tolist(), batch["correlation_id"].tolist(), strict=True)
    return [collected.copied.get(id_) if size is None else size for size, id_ in pairs]


def _write_ranges(trace: _Trace, sink: Sink, shift: int, calls: _Calls) -> None:
    batches = list(trace.collected.ranges.batches())
    if not batches:
        return
    rows = {name: joined([batch[name] for batch in batches]) for name in batches[0]}
    rows = _move_to_launch(rows, calls, rows["source"] == trace.collected.texts.id("collective"))
    threads, starts = rows["thread_id"].filled(0), rows["start_ns"].data
    parents, depths = nest(threads, starts, rows["end_ns"].filled(STILL_OPEN))
    texts = trace.collected.texts
    sink.add(
        "ranges",
        trace.process,
        {
            "range_id": np.arange(1, len(starts) + 1),
            "parent_id": np.ma.MaskedArray(parents + 1, mask=parents < 0),
            "depth": depths,
            "thread_id": threads,
            "start_ns": starts + shift,
            "end_ns": rows["end_ns"] + shift,
            **{name: texts.get(rows[name]) for name in ("name", "source", "attributes")},
        },
    )


def _move_to_launch(rows: Columns, calls: _Calls, is_collective: Any) -> Columns:
    """A range is host time, so collectives told by their kernel move to the instant of their launch.

    Those launched inside an operator that tells the same are left out.
    """
    launches = calls.starts(rows["correlation_id"])
    by_kernel = ~np.ma.getmaskarray(rows["correlation_id"])
    known = ~np.ma.getmaskarray(launches)
    rows["start_ns"] = replaced(rows["start_ns"], known, launches.data)
    rows["end_ns"] = replaced(rows["end_ns"], known, launches.data + 1)
    operators = np.flatnonzero(is_collective & ~by_kernel)
    if not len(operators) or not known.any():
        return rows
    operators = operators[np.argsort(rows["start_ns"].data[operators], kind="stable")]
    starts, ends = rows["start_ns"].data[operators], rows["end_ns"].filled(STILL_OPEN)[operators]
    place = np.searchsorted(starts, rows["start_ns"].data, side="right") - 1
    inside = known & (place >= 0) & (rows["start_ns"].data < ends[place])
    return {name: values[~inside] for name, values in rows.items()}


def _write_exact(trace: _Trace, sink: Sink, shift: int) -> None:
    """Counters, and for each measured launch a kernel without times."""
    collected = trace.collected
    ids = [batch["correlation_id"].max() for batch in collected.kernels.batches()]
    highest = max((int(id_) for id_ in ids if id_ is not np.ma.masked), default=0)
    last_launch = 0
    for batch in collected.exact.batches():
        launch = batch["launch"].data + highest
        classes = collected.stored_ids(batch["kernel_class_id"])
        sink.add(
            "exact",
            trace.process,
            {
                "scope": ["kernel"] * len(launch),
                "measured_ns": batch["measured_ns"] + shift,
                "device_id": batch["device_id"],
                "correlation_id": launch,
                "kernel_class_id": classes,
                "metric": collected.texts.get(batch["metric"]),
                "value": batch["value"],
            },
        )
        _, first = np.unique(launch, return_index=True)
        first = first[launch[first] > last_launch]
        sink.add(
            "kernels",
            trace.process,
            {
                "kernel_class_id": classes[first],
                "device_id": batch["device_id"][first],
                "correlation_id": launch[first],
                "context_id": np.zeros(len(first), np.int64),
                "stream_id": np.zeros(len(first), np.int64),
            },
        )
        last_launch = int(launch.max())
    if collected.exact.rows:
        trace.note(sink, "times of cuda_profiler_range events are made up by the profiler and were left out")


def _count_overlaps(trace: _Trace, sink: Sink) -> None:
    """Count kernels that start before the one before them on their stream has ended."""
    kernels = trace.collected.kernels
    batches: Iterable[Columns] = kernels.batches()
    if kernels.rows <= MOST_SORTED:
        gathered = list(batches)
        batches = [{name: joined([batch[name] for batch in gathered]) for name in gathered[0]}] if gathered else []
    else:
        trace.note(sink, "overlaps were counted piece by piece, in the file's order of kernels")
    overlaps = sum(map(_overlaps, batches))
    sink.count("kernels that overlap the one before them on their stream", overlaps)


def _overlaps(batch: Columns) -> int:
    device, stream = batch["device_id"].filled(0), batch["stream_id"].filled(0)
    start = batch["start_ns"].filled(0)
    order = np.lexsort((start, stream, device))
    is_same = (np.diff(device[order]) == 0) & (np.diff(stream[order]) == 0)
    end = start + batch["duration_ns"].filled(0)
    return int((is_same & (start[order][1:] < end[order][:-1])).sum())
