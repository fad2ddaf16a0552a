"""What each stream and each device did, in one pass over the launches in order of time.

The view `_stream_time` and the query `timeline_utilisation` say the same in SQL. There they keep the launches of the
whole run in memory, some 20 bytes each; here a few row groups, whatever the run's length. Tests compare the two.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
from numpy.typing import NDArray

from nanalyze.analysis import launch_devices, sqltext
from nanalyze.analysis import launch_reader as reader
from nanalyze.analysis import launch_sums as sums
from nanalyze.analysis.launch_reader import NONE, Columns, Integers, Part, Unscannable
from nanalyze.analysis.made import STREAMS

if TYPE_CHECKING:
    import pyarrow as pa

    from nanalyze.analysis.catalog import Catalog

__all__ = ["VIEW", "Unscannable", "device_use", "stream_times"]

VIEW = STREAMS
MOST_STREAMS = 30_000  # of a process: their numbers are sorted by as 16 bits
FEW = 100  # values that lie so near each other are told apart without looking for which there are
MOST_PLACES = 1_000_000  # devices times contexts times streams of a row group

Stream = tuple[int, int, int]  # device, context and stream, NONE for NULL
Interval = tuple[int, int]
Small = NDArray[np.int16]

_STREAM_COLUMNS = ("start_ns", "duration_ns", "device_id", "context_id", "stream_id")


# --- streams ---------------------------------------------------------------------------------------


def stream_times(cursor: duckdb.DuckDBPyConnection, found: Catalog) -> pa.Table:
    """The rows of the view `_stream_time`; `cursor` sees the views of the run, whose shards are `found`.

    Raises Unscannable where the order of the shards does not allow it, duckdb.Error, and OSError or ArrowException
    for a file that is gone.
    """
    pauses = _pauses(cursor)
    parts = reader.parts([shard for table in ("kernels", "copies") for shard in found.shards[table]])
    rows = []
    for process in sorted({part.process for part in parts}):
        own = sorted(
            (part for part in parts if part.process == process),
            key=lambda part: (part.first_ns, part.table, part.path, part.row_group),
        )
        rows += [(process, *row) for row in _of_process(own, pauses.get(process, {}))]
    return _stream_table(rows)


# A pause that begins before a stream's first activity or after its last one is none of its time.
_PAUSED = """
SELECT s.process, s.device_id, s.context_id, s.stream_id, p.start_ns, least(p.end_ns, s.last_ns)
FROM (
    SELECT process, device_id, context_id, stream_id, min(start_ns) AS first_ns, max(end_ns) AS last_ns
    FROM _activities
    GROUP BY process, device_id, context_id, stream_id
) AS s
JOIN _pause_spans AS p ON p.process = s.process AND p.start_ns > s.first_ns AND p.start_ns < s.last_ns
ORDER BY ALL
"""


def _pauses(cursor: duckdb.DuckDBPyConnection) -> dict[str, dict[Stream, list[Interval]]]:
    """The pauses in each stream's time, by start, by process."""
    found: dict[str, dict[Stream, list[Interval]]] = {}
    if not cursor.execute("SELECT count(*) FROM _pause_spans").fetchall()[0][0]:
        return found
    for process, *stream, start, end in cursor.execute(_PAUSED).fetchall():
        key = tuple(NONE if number is None else number for number in stream)
        found.setdefault(process, {}).setdefault(key, []).append((start, end))  # type: ignore[arg-type]
    return found


@dataclass
class _StreamSums:
    """What one stream did so far; `pauses` by start, `seen` how many of them are behind."""

    pauses: Sequence[Interval] = ()
    seen: int = 0
    activities: int = 0
    first_ns: int | None = None
    last_ns: int = NONE
    paused_ns: int = 0
    gaps: int = 0
    gap_ns: int = 0
    longest_gap_ns: int | None = None
    ends: sums.Ends = field(default_factory=sums.Ends)

    def add(self, start: Integers, end: Integers) -> None:
        """Activities by start, all later than those of earlier calls."""
        if self.first_ns is None:
            self.first_ns = int(start[0])
        self.activities += len(start)
        self.last_ns = max(self.last_ns, int(end.max()))
        due = self.pauses[self.seen : bisect_left(self.pauses, (int(start[-1]) + 1,))]
        self.seen += len(due)
        self._follow(start, end, due)

    def finish(self) -> None:
        """Pauses after the last start."""
        nothing = np.zeros(0, np.int64)
        if self.seen < len(self.pauses):
            self._follow(nothing, nothing, self.pauses[self.seen :])

    def _follow(self, start: Integers, end: Integers, pauses: Sequence[Interval]) -> None:
        is_pause = None
        if pauses:
            start, end, is_pause = _merged(start, end, pauses)
        before = self.ends.before(end)
        length = start - before
        length = length[(length > 0) & (before > NONE)]
        if len(length):
            self.gaps += len(length)
            self.gap_ns += int(length.sum())
            self.longest_gap_ns = max(self.longest_gap_ns or 0, int(length.max()))
        if is_pause is not None:
            self.paused_ns += int(np.maximum(end - np.maximum(start, before), 0)[is_pause].sum())


def _merged(start: Integers, end: Integers, pauses: Sequence[Interval]) -> tuple[Integers, Integers, sums.Flags]:
    """Activities and pauses by start and end, a pause first; and which are pauses."""
    is_pause = np.arange(len(start) + len(pauses)) >= len(start)
    start = np.concatenate((start, np.array([a for a, _ in pauses], np.int64)))
    end = np.concatenate((end, np.array([b for _, b in pauses], np.int64)))
    order = np.lexsort((~is_pause, end, start))
    return start[order], end[order], is_pause[order]


def _of_process(parts: Sequence[Part], pauses: Mapping[Stream, Sequence[Interval]]) -> Iterator[tuple[Any, ...]]:
    """Rows of `_stream_time` without the process, of which `parts` are."""
    numbers: dict[Stream, int] = {}

    def handle(part: Part, columns: Columns) -> Columns:
        start, duration = columns["start_ns"], columns["duration_ns"]
        rows = {
            "start_ns": start,
            "end_ns": start + duration,
            "stream": _stream_numbers(numbers, [columns[name] for name in _STREAM_COLUMNS[2:]]),
        }
        placed = reader.believed(start, duration)[1]
        return rows if placed.all() else {name: values[placed] for name, values in rows.items()}

    nothing = np.zeros(0, np.int64)
    rows = reader.fetched(parts, dict.fromkeys(("kernels", "copies"), _STREAM_COLUMNS), handle)
    found: dict[int, _StreamSums] = {}
    extra: Columns = {"start_ns": nothing, "end_ns": nothing, "stream": nothing.astype(np.int16)}
    for ready in reader.in_order(parts, rows, extra):
        streams = list(numbers)
        for number, start, end in _by_stream(ready):
            if number not in found:
                found[number] = _StreamSums(pauses.get(streams[number], ()))
            found[number].add(start, end)
    for stream, number in numbers.items():
        own = found.get(number)
        if own is not None and stream[0] != NONE:  # the others have no believed times, or no device
            own.finish()
            key = [None if value == NONE else value for value in stream]
            yield (
                *key, own.activities, own.first_ns, own.last_ns, own.paused_ns, own.gaps, own.gap_ns, own.longest_gap_ns
            )  # fmt: skip


def _stream_numbers(numbers: dict[Stream, int], columns: Sequence[Integers]) -> Small:
    """The number of the stream of each row; new streams get the next ones."""
    place = np.zeros(len(columns[0]), np.int64)
    kinds: list[Sequence[int]] = []
    for column in columns:
        coded, values = _coded(column)
        kinds.append(values)
        if math.prod(map(len, kinds)) > MOST_PLACES:
            raise Unscannable("too many streams")
        if len(values) > 1:
            place = place * len(values) + coded
    used = np.flatnonzero(np.bincount(place)) if len(place) else place
    found = np.zeros(int(used[-1]) + 1 if len(used) else 0, np.int16)
    for key in used.tolist():
        stream, rest = [], key
        for values in reversed(kinds):
            stream.append(values[rest % len(values)])
            rest //= len(values)
        number = numbers.setdefault((stream[2], stream[1], stream[0]), len(numbers))
        if number >= MOST_STREAMS:
            raise Unscannable("too many streams")
        found[key] = number
    streams: Small = found[place]
    return streams


def _coded(column: Integers) -> tuple[Integers, Sequence[int]]:
    """The place of each value in a list of values, of which some may not occur."""
    import pyarrow as pa

    low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
    if high - low < FEW:
        return column - low, range(low, high + 1)
    coded = pa.array(column).dictionary_encode()
    return coded.indices.to_numpy(), coded.dictionary.to_pylist()


def _by_stream(rows: Columns) -> Iterator[tuple[int, Integers, Integers]]:
    """Number, starts and ends of each stream in `rows`, which are by start."""
    number, start, end = rows["stream"], rows["start_ns"], rows["end_ns"]
    if (number == number[0]).all():
        yield int(number[0]), start, end
        return
    order = np.argsort(number, kind="stable")  # 16 bits are sorted in linear time
    number, start, end = number[order], start[order], end[order]
    edges = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(number)]
    for first, last in itertools.pairwise(edges):
        yield int(number[first]), start[first:last], end[first:last]


def _stream_table(rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    import pyarrow as pa

    names = (
        "process", "device_id", "context_id", "stream_id", "activities", "first_ns", "last_ns", "paused_ns", "gaps",
        "gap_ns", "longest_gap_ns",
    )  # fmt: skip
    types = {"process": pa.string(), "device_id": pa.int32()}
    return pa.table(
        {name: pa.array([row[at] for row in rows], types.get(name, pa.int64())) for at, name in enumerate(names)}
    )


# --- devices ---------------------------------------------------------------------------------------


_USE_COLUMNS = ("start_ns", "duration_ns", "device_id")
# As launch_devices.SPANS; the sums of classes that stand there need more columns.
_SPANS = f"""
SELECT
    process, device_id,
    min(CASE WHEN is_long THEN start_ns END) AS first_ns,
    max(CASE WHEN is_long THEN start_ns + duration_ns END) AS last_ns
FROM (
    SELECT
        process, device_id, start_ns, duration_ns,
        duration_ns BETWEEN 1 AND {reader.LONGEST_NS} AND start_ns BETWEEN 0 AND {reader.LAST_NS} AS is_long
    FROM raw.kernels
) AS launches
GROUP BY process, device_id
"""


def device_use(cursor: duckdb.DuckDBPyConnection, found: Catalog, buckets: int) -> pa.Table | None:
    """The rows of timeline_utilisation, None where no kernel took any time. Raises as `stream_times` does."""
    parts = reader.parts(found.shards["kernels"], _USE_COLUMNS)
    all_plain = all(_is_plain(part) for part in parts if part.rows)
    spans = launch_devices.named_spans(cursor, _spans(parts) if all_plain else _SPANS)
    known = launch_devices.of_spans(spans)
    numbers = launch_devices.numbers_by_process(known)
    pieces = launch_devices.empty_pieces(cursor, known, spans, buckets)

    def handle(part: Part, columns: Columns) -> Columns:
        start, duration = columns["start_ns"], columns["duration_ns"]
        own = numbers.get(part.process, {})
        rows = {"start_ns": start, "end_ns": start + duration}
        if all_plain:
            rows["number"] = np.full(len(start), own.get(part.limits["device_id"][0], 0), np.int32)
            return rows
        rows["number"] = launch_devices.device_numbers(own, columns["device_id"])
        long = reader.believed(start, duration)[1] & (duration > 0)
        return rows if long.all() else {name: values[long] for name, values in rows.items()}

    nothing = np.zeros(0, np.int64)
    extra: Columns = {"start_ns": nothing, "end_ns": nothing, "number": nothing.astype(np.int32)}
    for processes, own_numbers in launch_devices.components(known, {part.process for part in parts}):
        own = sorted(
            (part for part in parts if part.process in processes),
            key=lambda part: (part.first_ns, part.process, part.path, part.row_group),
        )
        rows = reader.fetched(own, {"kernels": _USE_COLUMNS[:2] if all_plain else _USE_COLUMNS}, handle)
        for ready in reader.in_order(own, rows, extra):
            _add_use(pieces, own_numbers, ready)
        for number in own_numbers:
            if number in pieces:
                pieces[number].add(nothing, nothing)
    return launch_devices.use_table(known, pieces)


def _spans(parts: Sequence[Part]) -> str:
    """What _SPANS gives, from the footers of plain row groups and those that may hold a last end."""
    by_device: dict[tuple[str, int], list[Part]] = {}
    for part in parts:
        if part.rows:
            by_device.setdefault((part.process, part.limits["device_id"][0]), []).append(part)
    rows = [
        (*device, min(part.limits["start_ns"][0] for part in own), _last_end(own)) for device, own in by_device.items()
    ]
    columns = [("process", "VARCHAR"), ("device_id", "INTEGER"), ("first_ns", "BIGINT"), ("last_ns", "BIGINT")]
    return sqltext.values(columns, rows)


def _is_plain(part: Part) -> bool:
    """Whether the footer shows that the row group is of one device and that every launch in it took some time."""
    if len(part.limits) < len(_USE_COLUMNS):
        return False
    (first, last), (shortest, longest), (low, high) = (part.limits[name] for name in _USE_COLUMNS)
    return first >= 0 and last <= reader.LAST_NS and shortest > 0 and longest <= reader.LONGEST_NS and low == high


def _last_end(parts: Sequence[Part]) -> int:
    """The last end of a launch: of the few row groups that are left where the last start says least that it can be."""

    def most(part: Part) -> int:
        return part.limits["start_ns"][1] + part.limits["duration_ns"][1]

    found = max(part.limits["start_ns"][1] + part.limits["duration_ns"][0] for part in parts)
    for part in sorted(parts, key=most, reverse=True):
        if most(part) <= found:
            break
        columns = reader.read(part, _USE_COLUMNS[:2])
        found = max(found, int((columns["start_ns"] + columns["duration_ns"]).max()))
    return found


def _add_use(pieces: Mapping[int, sums.Pieces], numbers: Sequence[int], rows: Columns) -> None:
    until = int(rows["start_ns"][-1]) + 1
    for number in numbers:
        own = rows["number"] == number
        if number in pieces and own.any():
            whole = own.all()
            start, end = (rows[name] if whole else rows[name][own] for name in ("start_ns", "end_ns"))
            pieces[number].add(start, end, until=until)
