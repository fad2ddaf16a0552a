"""What the report asks of every launch, in one pass over them in order of time.

The views `_device_time`, `_kernel_pairs` and `_launch_segments` and the query `timeline_utilisation` say in SQL what
is worked out here. In a database each of them sorts all launches: some 4 CPU seconds a million launches together, and
memory that grows with the run. The shards are in order of time already, nearly, so one pass does with 0.3 and with
memory that does not (docs/scale.md). Tests compare the two on random launches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np

from nanalyze.analysis import launch_reader as reader
from nanalyze.analysis import launch_sums as sums
from nanalyze.analysis.launch_devices import (
    Device,
    components,
    device_numbers,
    devices,
    empty_pieces,
    named_spans,
    numbers_by_process,
    use_table,
)
from nanalyze.analysis.launch_reader import NONE, Columns, Integers, Part, Unscannable
from nanalyze.analysis.made import SCANNED

if TYPE_CHECKING:
    import pyarrow as pa

    from nanalyze.analysis.catalog import Catalog

VIEWS = SCANNED
MOST_CUTS = 20_000_000  # instants of ranges: 8 bytes each
FLUSH_ROWS = 200_000

__all__ = ["VIEWS", "Scan", "Unscannable", "scan"]


@dataclass(frozen=True)
class Scan:
    """`views` has the rows of each of VIEWS; `pieces` those of timeline_utilisation, None where it was not asked."""

    views: Mapping[str, pa.Table]
    pieces: pa.Table | None


@dataclass
class _Work:
    """What the pass needs to know of the run, and what it adds up.

    numbers: of the devices of each process, by ordinal; unknown: rows of _device_unknown by number.
    """

    ids: Integers
    is_communication: sums.Flags
    limits: tuple[float, float]
    devices: Mapping[int, Device]
    numbers: Mapping[str, Mapping[int, int]]
    cuts: Mapping[str, sums.Cuts]
    unknown: Columns
    pairs: sums.Pairs
    pieces: dict[int, sums.Pieces]
    by_device: dict[int, sums.DeviceSums] = field(default_factory=dict)
    times: list[pa.Table] = field(default_factory=list)
    segments: list[pa.Table] = field(default_factory=list)


def scan(cursor: duckdb.DuckDBPyConnection, found: Catalog, buckets: int | None = None) -> Scan:
    """Go through all launches and copies once; `cursor` sees the views of the run, whose shards are `found`.

    buckets: into how many pieces of time to cut the use of each device. Raises Unscannable where the order or the
    size of the numbers does not allow it, duckdb.Error, and OSError or ArrowException for a file that is gone.
    """
    import pyarrow as pa

    work = _work(cursor, found, buckets)
    cursor.execute(f"CREATE OR REPLACE TEMP TABLE scanned_segments ({_SEGMENT_TYPES})")
    kernels = reader.parts(found.shards["kernels"])
    copies = reader.parts(found.shards["copies"])
    for processes, numbers in components(work.devices, {part.process for part in kernels}):
        own = [part for part in (*kernels, *copies) if part.process in processes]
        own.sort(key=lambda part: (part.first_ns, part.process, part.table, part.path, part.row_group))
        _scan_component(cursor, work, own, numbers)
    _flush(cursor, work, 0)
    views = {
        "_device_time": pa.concat_tables([*work.times, _none_of("_device_time")]),
        "_kernel_pairs": _kernel_pairs(work),
        "_launch_segments": _arrow(cursor, _SEGMENTS),
    }
    cursor.execute("DROP TABLE scanned_segments")
    return Scan(views, use_table(work.devices, work.pieces) if buckets else None)


_SEGMENT_SUMS = ("launches", "launches_timed", "total_ns", "replayed", "kernel_ns", "communication_ns")
_SEGMENT_COLUMNS = ("start_ns", *_SEGMENT_SUMS, "first_ns", "last_ns")
_SEGMENT_TYPES = "process VARCHAR, " + ", ".join(f"{name} BIGINT" for name in _SEGMENT_COLUMNS)
_SEGMENTS = f"""
SELECT
    process, NULLIF(start_ns, {NONE}) AS start_ns,
    CAST(sum(launches) AS BIGINT) AS launches,
    CAST(sum(launches_timed) AS BIGINT) AS launches_timed,
    CASE WHEN sum(launches_timed) > 0 THEN CAST(sum(total_ns) AS BIGINT) END AS total_ns,
    CAST(sum(replayed) AS BIGINT) AS replayed,
    NULLIF(min(first_ns), {np.iinfo(np.int64).max}) AS first_ns,
    NULLIF(max(last_ns), {NONE}) AS last_ns,
    CAST(sum(kernel_ns) AS BIGINT) AS kernel_ns,
    CAST(sum(communication_ns) AS BIGINT) AS communication_ns
FROM scanned_segments
GROUP BY process, start_ns
"""


# --- what the pass needs ---------------------------------------------------------------------------


def _work(cursor: duckdb.DuckDBPyConnection, found: Catalog, buckets: int | None) -> _Work:
    ids = _columns(
        cursor, "SELECT DISTINCT kernel_class_id AS id FROM _class_devices WHERE kernel_class_id IS NOT NULL"
    )
    known = np.sort(ids["id"])
    marked = _columns(cursor, "SELECT kernel_class_id AS id FROM _communicating")["id"]
    known_devices = devices(cursor)
    limits = dict(cursor.execute("SELECT name, value FROM settings").fetchall())
    return _Work(
        ids=known,
        is_communication=np.append(np.isin(known, marked), False),
        limits=(limits["launch_ns"], limits["host_call_ns"]),
        devices=known_devices,
        numbers=numbers_by_process(known_devices),
        cuts=_cuts(cursor, sorted({shard.process for shard in found.shards["kernels"]})),
        unknown=_columns(cursor, "SELECT number, start_ns, end_ns FROM _device_unknown ORDER BY ALL"),
        pairs=sums.Pairs(len(known)),
        pieces=empty_pieces(cursor, known_devices, named_spans(cursor), buckets) if buckets else {},
    )


def _columns(cursor: duckdb.DuckDBPyConnection, statement: str) -> Columns:
    """The columns of integers without NULL that `statement` gives."""
    return {name: np.asarray(column, np.int64) for name, column in cursor.execute(statement).fetchnumpy().items()}


def _cuts(cursor: duckdb.DuckDBPyConnection, processes: Sequence[str]) -> dict[str, sums.Cuts]:
    import pyarrow as pa

    rows = "SELECT (SELECT count(*) FROM ranges) + (SELECT count(*) FROM device_state)"
    if 2 * cursor.execute(rows).fetchall()[0][0] > MOST_CUTS:
        raise Unscannable("too many ranges")
    cursor.register(
        "scan_processes", pa.table({"process": pa.array(processes, pa.string()), "place": np.arange(len(processes))})
    )
    joined = "JOIN scan_processes AS p ON p.process = c.process"
    at = _columns(cursor, f"SELECT p.place, c.at_ns FROM _launch_cuts AS c {joined} ORDER BY ALL")
    replayed = _columns(
        cursor, f"SELECT p.place, c.correlation_id, c.duration_ns FROM _exact_durations AS c {joined} ORDER BY ALL"
    )
    cursor.unregister("scan_processes")
    found = {}
    for place, process in enumerate(processes):
        own, measured = _where(at["place"], place), _where(replayed["place"], place)
        pair = (replayed["correlation_id"][measured], replayed["duration_ns"][measured])
        found[process] = sums.Cuts(at["at_ns"][own], pair if len(pair[0]) else None)
    return found


def _where(ascending: Integers, value: int) -> slice:
    """Where `value` stands in `ascending`."""
    return slice(*np.searchsorted(ascending, [value, value + 1]).tolist())


# --- the pass --------------------------------------------------------------------------------------


def _scan_component(
    cursor: duckdb.DuckDBPyConnection, work: _Work, parts: Sequence[Part], numbers: Sequence[int]
) -> None:
    replays = {process for process, cuts in work.cuts.items() if cuts.replayed is not None}
    has_replays = any(part.process in replays for part in parts)
    columns = {
        "kernels": (*reader.KERNEL_COLUMNS, *(reader.REPLAY_COLUMNS if has_replays else ())),
        "copies": reader.COPY_COLUMNS,
    }
    rows = reader.fetched(parts, columns, partial(_handled, work))
    work.by_device = {number: sums.DeviceSums(len(work.ids), *work.limits) for number in numbers}
    for ready in reader.in_order(parts, rows, _unknown(work, numbers)):
        _add(work, ready)
        _flush(cursor, work, FLUSH_ROWS)
    nothing = np.zeros(0, np.int64)
    for number in numbers:
        work.times.append(_device_time(work, number))
        if number in work.pieces:
            work.pieces[number].add(nothing, nothing)


def _unknown(work: _Work, numbers: Sequence[int]) -> Columns:
    """What is not known of these devices, as rows of layer 0."""
    own = np.isin(work.unknown["number"], numbers)
    number, start, end = (work.unknown[name][own] for name in ("number", "start_ns", "end_ns"))
    return _rows(work, number, start, end, sums.UNKNOWN)


def _rows(work: _Work, number: Integers, start: Integers, end: Integers, layer: int) -> Columns:
    """What is no kernel, as rows of the pass."""
    return {
        "number": number.astype(np.int32),
        "start_ns": start,
        "end_ns": end,
        "queued_ns": np.full(len(start), NONE),
        "class": np.full(len(start), len(work.ids), np.int64),
        "layer": np.full(len(start), layer, np.int8),
    }


def _handled(work: _Work, part: Part, columns: Columns) -> Columns:
    """Rows of a part whose times are believed; those of launches are added up by range on the way."""
    start, duration = columns["start_ns"], columns["duration_ns"]
    timed, placed = reader.believed(start, duration)
    if part.table == "copies":
        number = device_numbers(work.numbers.get(part.process, {}), columns["device_id"][placed])
        return _rows(work, number, start[placed], start[placed] + duration[placed], sums.COPY)
    own_class = _class_numbers(work.ids, columns["kernel_class_id"])
    is_communication = work.is_communication[own_class]
    end = np.where(placed, start + duration, NONE)
    _add_segments(work, part.process, columns, {
        "queued_ns": columns["queued_ns"], "start_ns": start, "end_ns": end, "is_replayed": ~timed,
        "duration_ns": _durations(work.cuts[part.process], columns, timed), "is_communication": is_communication,
    })  # fmt: skip
    rows = {
        "number": device_numbers(work.numbers.get(part.process, {}), columns["device_id"]),
        "start_ns": start,
        "end_ns": end,
        "queued_ns": columns["queued_ns"],
        "class": own_class,
        "layer": np.where(is_communication, sums.COMMUNICATION, sums.COMPUTE).astype(np.int8),
    }
    return rows if placed.all() else {name: values[placed] for name, values in rows.items()}


def _class_numbers(ids: Integers, classes: Integers) -> Integers:
    """Places of the classes in `ids`, len(ids) for none."""
    import pyarrow as pa

    coded = pa.array(classes).dictionary_encode()
    known = coded.dictionary.to_numpy()
    places = np.where(known == NONE, len(ids), np.searchsorted(ids, known))
    numbers: Integers = places[coded.indices.to_numpy()]
    return numbers


def _durations(cuts: sums.Cuts, columns: Columns, timed: sums.Flags) -> Integers:
    """Duration of each launch, from the profiler where the timeline has none, NONE where neither has."""
    durations: Integers = np.where(timed, columns["duration_ns"], NONE)
    if cuts.replayed is None or timed.all():
        return durations
    ids, measured = cuts.replayed
    missing = np.flatnonzero(~timed & (columns["graph_id"] == NONE))
    place = np.searchsorted(ids, columns["correlation_id"][missing]).clip(max=len(ids) - 1)
    matches = ids[place] == columns["correlation_id"][missing]
    durations[missing[matches]] = measured[place[matches]]
    return durations


def _add_segments(work: _Work, process: str, columns: Columns, rows: Columns) -> None:
    import pyarrow as pa

    found = sums.segments(work.cuts[process], rows)
    if found:
        names = pa.DictionaryArray.from_arrays(np.zeros(len(found["start_ns"]), np.int32), pa.array([process]))
        work.segments.append(pa.table({"process": names.cast(pa.string()), **{n: found[n] for n in _SEGMENT_COLUMNS}}))


def _flush(cursor: duckdb.DuckDBPyConnection, work: _Work, least: int) -> None:
    """Put the segments found so far into the database, if they are more than `least`."""
    import pyarrow as pa

    found = list(work.segments)
    if sum(table.num_rows for table in found) <= least:
        return
    del work.segments[: len(found)]
    cursor.register("scan_segments", pa.concat_tables(found))
    cursor.execute("INSERT INTO scanned_segments SELECT * FROM scan_segments")
    cursor.unregister("scan_segments")


def _add(work: _Work, rows: Columns) -> None:
    """Add rows, which are by start, to the sums of their devices."""
    number = rows["number"]
    if number[0] == number[-1] and (number == number[0]).all():
        _add_device(work, int(number[0]), rows)
        return
    order = np.argsort(number, kind="stable")
    starts = np.flatnonzero(np.diff(number[order], prepend=-1))
    for place in np.split(order, starts[1:]):
        _add_device(work, int(number[place[0]]), {name: values[place] for name, values in rows.items()})


def _add_device(work: _Work, number: int, rows: Columns) -> None:
    if number not in work.by_device:  # damaged: without a device
        return
    rows = _untied(rows)
    work.by_device[number].add(rows)
    work.pairs.add(number, rows["class"])
    if number in work.pieces:
        start, end, layer = rows["start_ns"], rows["end_ns"], rows["layer"]
        long = (end > start) & ((layer == sums.COMPUTE) | (layer == sums.COMMUNICATION))
        last = int(start[-1]) + 1
        if not long.all():
            start, end = start[long], end[long]
        work.pieces[number].add(start, end, until=last)


def _untied(rows: Columns) -> Columns:
    """Rows by start, those that start together by end, layer, class and call, as the views sort them."""
    start = rows["start_ns"]
    same = start[1:] == start[:-1]
    if not same.any():
        return rows
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    queued = rows["queued_ns"][tied]
    last = np.where(queued == NONE, np.iinfo(np.int64).max, queued)
    order = np.lexsort((last, *(rows[name][tied] for name in ("class", "layer", "end_ns", "start_ns"))))
    moved = np.arange(len(start))
    moved[tied] = tied[order]
    return {name: values[moved] for name, values in rows.items()}


# --- results ---------------------------------------------------------------------------------------


def _arrow(cursor: duckdb.DuckDBPyConnection, statement: str) -> pa.Table:
    relation: Any = cursor.sql(statement)
    return relation.to_arrow_table() if hasattr(relation, "to_arrow_table") else relation.fetch_arrow_table()


def _named_classes(work: _Work, places: Integers) -> pa.Array:
    """Ids of the classes at `places`, NULL for none."""
    import pyarrow as pa

    known = places < len(work.ids)
    return pa.array(np.append(work.ids, 0)[places], pa.int64(), mask=~known)


def _device_time(work: _Work, number: int) -> pa.Table:
    import pyarrow as pa

    own, causes = work.by_device[number], len(sums.CAUSES)
    used = np.flatnonzero(own.sums["activities"])
    found = {name: values[used] for name, values in own.sums.items()}
    cause, place = used % causes, used // causes
    has_none = cause == 0
    return pa.table(
        {
            "device": pa.array([work.devices[number].name] * len(used), pa.string()),
            "kernel_class_id": _named_classes(work, place),
            "cause": pa.array([sums.CAUSES[one] for one in cause.tolist()], pa.string()),
            "activities": found["activities"],
            "kernel_ns": np.where(place < len(work.ids), found["kernel_ns"], 0),
            "gap_ns": pa.array(found["gap_ns"], mask=has_none),
            "longest_gap_ns": pa.array(own.longest[used], mask=has_none),
            **{name: found[name] for name in sums.SUMS if name.startswith("new_")},
        }
    )


def _kernel_pairs(work: _Work) -> pa.Table:
    import pyarrow as pa

    before, own, launches = work.pairs.result()
    return pa.table(
        {
            "previous_class_id": _named_classes(work, before),
            "kernel_class_id": _named_classes(work, own),
            "launches": launches,
        }
    )


def _none_of(view: str) -> pa.Table:
    """No rows with the columns of a view."""
    import pyarrow as pa

    from nanalyze import queries

    types = {"VARCHAR": pa.string()}
    return pa.table({c.name: pa.array([], types.get(c.type, pa.int64())) for c in queries.view(view).columns})
