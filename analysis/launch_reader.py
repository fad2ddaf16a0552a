"""Launches and copies of a run as arrays, in order of time, a row group at a time.

Shards are written in the order in which the driver hands records over, which is nearly that of time: a row group
overlaps few others. They are read by their first start, and what starts before the first start of all that is still
unread is complete, so that a few row groups are in memory at any moment, whatever the run's length. Where that does
not hold, as in a trace imported in another order, `Unscannable` says so and the views in SQL do the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nanalyze.rundir import objectstore

if TYPE_CHECKING:
    import pyarrow as pa

    from nanalyze.rundir.shards import Shard

Integers = NDArray[np.int64]
Columns = dict[str, NDArray[Any]]

NONE = np.iinfo(np.int64).min  # stands for NULL; no instant that is believed is negative
LAST_NS = 4_000_000_000_000_000_000  # as in the view _launches
LONGEST_NS = 1_000_000_000_000_000
MOST_PENDING = 8_000_000  # rows that wait for earlier ones; in order there are some row groups of 250,000
ROWS_AT_ONCE = 250_000  # the least that is handed on, unless there are no more

KERNEL_COLUMNS = ("start_ns", "duration_ns", "kernel_class_id", "device_id", "queued_ns")
REPLAY_COLUMNS = ("graph_id", "correlation_id")
COPY_COLUMNS = ("start_ns", "duration_ns", "device_id")


class Unscannable(Exception):
    """The rows cannot be gone through once in order of time with bounded memory."""


@dataclass(frozen=True)
class Part:
    """One row group; `first_ns` is the first start in it, NONE where that is not known.

    limits: least and greatest value of the columns that were asked for, of those that the footer says it of and that
    hold no NULL.
    """

    table: str
    process: str
    path: Path
    row_group: int
    rows: int
    first_ns: int
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def parts(shards: Sequence[Shard], limits: Sequence[str] = ()) -> list[Part]:
    """The row groups of `shards` (of `kernels` or `copies`), with the limits of these columns."""
    is_far = bool(shards) and objectstore.is_remote(shards[0].path)
    with ThreadPoolExecutor(8 if is_far else 2) as pool:
        return [part for found in pool.map(partial(_parts_of, limits), shards) for part in found]


def _parts_of(limits: Sequence[str], shard: Shard) -> list[Part]:
    import pyarrow.parquet as pq

    metadata = pq.read_metadata(objectstore.source(shard.path))
    names = metadata.schema.names
    place, others = names.index("start_ns"), {name: names.index(name) for name in limits}
    found = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        statistics = group.column(place).statistics
        first = statistics.min if statistics is not None and statistics.has_min_max else NONE
        known = {name: _limits(group.column(other)) for name, other in others.items()}
        ends = {name: pair for name, pair in known.items() if pair is not None}
        found.append(Part(shard.table, shard.process, shard.path, number, group.num_rows, first, ends))
    return found


def _limits(column: Any) -> tuple[int, int] | None:
    statistics = column.statistics
    if statistics is None or not statistics.has_min_max or statistics.null_count != 0:
        return None
    return statistics.min, statistics.max


def read(part: Part, columns: Sequence[str]) -> Columns:
    """The columns of a row group, of those that it has: integers, NONE for NULL, numbers with NaN, texts as objects."""
    import pyarrow.parquet as pq

    # Far away, neighbouring columns come by one request.
    file = pq.ParquetFile(objectstore.source(part.path), pre_buffer=objectstore.is_remote(part.path))
    known = set(file.schema_arrow.names)
    names = [name for name in columns if name in known]
    table = file.read_row_group(part.row_group, columns=names, use_threads=False)
    return {name: _array(table.column(name)) for name in names}


def _array(column: pa.ChunkedArray) -> NDArray[Any]:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_integer(column.type):
        texts: NDArray[np.object_] = column.to_numpy()
        return texts
    if column.type != pa.int64():
        column = column.cast(pa.int64())
    if column.null_count:
        column = pc.fill_null(column, pa.scalar(int(NONE), pa.int64()))
    values: Integers = column.to_numpy()
    return values


def believed(start: Integers, duration: Integers) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether each duration is believed, and whether start and end are both: as in the view _launches."""
    timed = (duration >= 0) & (duration <= LONGEST_NS)
    return timed, timed & (start >= 0) & (start <= LAST_NS)


def fetched(
    found: Sequence[Part], columns: Mapping[str, Sequence[str]], handle: Any, ahead: int = 2
) -> Iterator[tuple[Part, Columns]]:
    """What `handle(part, read(part))` gives for each part in order, worked out in a thread ahead of its use."""
    with ThreadPoolExecutor(1) as pool:

        def start(part: Part) -> Future[Columns]:
            return pool.submit(lambda: handle(part, read(part, columns[part.table])))

        pending = [start(part) for part in found[:ahead]]
        for number, part in enumerate(found):
            rows = pending.pop(0).result()
            if number + ahead < len(found):
                pending.append(start(found[number + ahead]))
            yield part, rows


def in_order(found: Sequence[Part], rows: Iterator[tuple[Part, Columns]], extra: Columns) -> Iterator[Columns]:
    """Rows by start_ns and end_ns, in pieces whose starts follow each other.

    `found` are the parts by first_ns and `rows` what was read of each, rows without believed times left out; `extra`
    rows belong among them. Raises Unscannable.
    """
    waiting, count, done, least = [extra], len(extra["start_ns"]), NONE, ROWS_AT_ONCE
    for number, (_, columns) in enumerate(rows):
        start = columns["start_ns"]
        if len(start) and int(start.min()) < done:
            raise Unscannable("rows start before their row group's first start")
        waiting.append(columns)
        count += len(start)
        until = found[number + 1].first_ns if number + 1 < len(found) else LAST_NS + 1
        if count > MOST_PENDING:
            raise Unscannable("too many row groups overlap")
        if until > done and (count >= least or until > LAST_NS):
            ready, rest = _split(waiting, until)
            waiting, count, done = [rest], len(rest["start_ns"]), until
            least = count + ROWS_AT_ONCE
            if len(ready["start_ns"]):
                yield ready
    if not found and count:
        yield _split(waiting, LAST_NS + 1)[0]


def _split(waiting: Sequence[Columns], until: int) -> tuple[Columns, Columns]:
    held = [columns for columns in waiting if len(columns["start_ns"])] or waiting[:1]
    joined = held[0] if len(held) == 1 else {n: np.concatenate([columns[n] for columns in held]) for n in held[0]}
    start = joined["start_ns"]
    if (start[1:] >= start[:-1]).all():
        cut = int(np.searchsorted(start, until))
        return {n: values[:cut] for n, values in joined.items()}, {n: values[cut:] for n, values in joined.items()}
    order = np.argsort(joined["start_ns"], kind="stable")
    cut = int(np.searchsorted(joined["start_ns"], until, sorter=order))
    ready = {name: values[order[:cut]] for name, values in joined.items()}
    return ready, {name: values[order[cut:]] for name, values in joined.items()}
