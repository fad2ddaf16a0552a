"""The usable samples of a device, as arrays in order of time.

They come from the shards as they stand: a view over all processes' files would be bound, and read, once for each
device. What makes a sample unusable is said in docs/attribution.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import duckdb
import numpy as np
from numpy.typing import NDArray

from nanalyze.analysis import launch_reader as reader
from nanalyze.analysis import sqltext
from nanalyze.analysis.launch_reader import Columns, Integers
from nanalyze.rundir.sampled import BY_COLUMN
from nanalyze.rundir.shards import Shard

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Owners = Sequence[tuple[str, int]]

LONGEST_SAMPLE = 20  # times the usual length
SHORTEST_NS = 1000  # the usual length is at least that
# A sample whose SM clock is below this share of both neighbours' was cut short: it lacks SM counts.
CUT_SHORT = 0.75
CYCLES = "sm_cycles_elapsed"
MOST = 1e30  # of a count
_FIXED = ("device_id", "counter_group", "start_ns", "end_ns")


@dataclass
class Group:
    """The usable samples (N,) of a counter group by start; `seen` is how many there are, usable or not.

    `values` (N,) are its counters.
    """

    number: int
    seen: int
    start_ns: Integers
    end_ns: Integers
    values: dict[str, Array]

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def length_ns(self) -> Integers:
        length: Integers = self.end_ns - self.start_ns
        return length

    def take(self, which: Flags | Integers) -> Group:
        """These samples only."""
        values = {name: column[which] for name, column in self.values.items()}
        return Group(self.number, self.seen, self.start_ns[which], self.end_ns[which], values)


# --- what makes samples unusable -------------------------------------------------------------------


@dataclass(frozen=True)
class Disturbances:
    """When processes did not record (starts and ends in ns, by process), and which devices replayed launches."""

    pauses: Mapping[str, Sequence[tuple[int, int]]]
    replayed: frozenset[tuple[str, int]]

    @classmethod
    def of(cls, cursor: duckdb.DuckDBPyConnection) -> Disturbances:
        """Of all processes of the run. Raises duckdb.Error."""
        pauses: dict[str, list[tuple[int, int]]] = {}
        for process, start, end in cursor.execute("SELECT process, start_ns, end_ns FROM _pause_spans").fetchall():
            pauses.setdefault(process, []).append((start, end))
        replayed = cursor.execute("SELECT DISTINCT process, device_id FROM raw.exact").fetchall()
        return cls(pauses, frozenset(replayed))

    def of_pauses(self, owners: Owners) -> tuple[Integers, Integers]:
        """Starts of the pauses of these processes, ascending, and the latest end of all up to each of them."""
        found = sorted(span for process in {process for process, _ in owners} for span in self.pauses.get(process, ()))
        times = np.array(found, np.int64).reshape(-1, 2)
        return times[:, 0], np.maximum.accumulate(times[:, 1]) if len(found) else times[:, 1]

    def of_replays(self, cursor: duckdb.DuckDBPyConnection, owners: Owners, width: int) -> Integers:
        """Buckets of `width` ns in which a launch was replayed for exact counters: without times, it explains nothing.

        Raises duckdb.Error.
        """
        if self.replayed.isdisjoint(owners):
            return np.zeros(0, np.int64)
        found = cursor.execute(
            f"""
            SELECT DISTINCT unnest(range((measured_ns - cost_ns) // {width}, measured_ns // {width} + 1)) AS bucket
            FROM (
                SELECT e.measured_ns, max(e.cost_ns) AS cost_ns FROM raw.exact AS e
                WHERE {owned(owners, "e")} AND e.cost_ns BETWEEN 0 AND 600000000000
                    AND e.measured_ns BETWEEN 0 AND {reader.LAST_NS}
                GROUP BY e.measured_ns
            ) AS measured
            """
        ).fetchnumpy()
        return np.asarray(found["bucket"], np.int64)


def owned(owners: Owners, alias: str) -> str:
    """A condition on rows of these devices; DuckDB leaves out the files of other processes for the first part only."""
    processes = ", ".join(sorted({sqltext.literal(process) for process, _ in owners}))
    pairs = ", ".join(f"({sqltext.literal(process)}, {number})" for process, number in owners)
    return f"{alias}.process IN ({processes}) AND ({alias}.process, {alias}.device_id) IN ({pairs})"


# --- loading ---------------------------------------------------------------------------------------


def load(
    cursor: duckdb.DuckDBPyConnection,
    owners: Owners,
    counters: Sequence[str],
    shards: Sequence[Shard],
    disturbances: Disturbances,
) -> tuple[int, list[Group]]:
    """The usual length of a device's samples in ns, and its groups by number.

    They are in `shards`, those of all processes, with the columns `counters`. A column that less than half of a group's
    samples have is none of that group's; the values of counters on the SM clock are those at the group's mean clock.
    Raises duckdb.Error, and OSError or ArrowException for a file that is gone.
    """
    read = _read(owners, counters, shards)
    lengths = np.concatenate([np.zeros(0, np.int64), *(group.length_ns for group in read)])
    positive = lengths[lengths > 0]
    width = max(int(np.median(positive)) if len(positive) else 1, SHORTEST_NS)
    pauses, replays = disturbances.of_pauses(owners), disturbances.of_replays(cursor, owners, width)
    return width, [_usable(group, width, pauses, replays) for group in read]


def _read(owners: Owners, counters: Sequence[str], shards: Sequence[Shard]) -> list[Group]:
    """All samples of the device, with the counters that at least half of a group's samples have."""
    pieces: dict[int, list[Columns]] = {}
    for own in _pieces(owners, counters, shards):
        number = int(own["counter_group"][0])
        pieces.setdefault(number, []).append(own)
    return [_joined(number, pieces.pop(number), counters) for number in sorted(pieces)]


def _pieces(owners: Owners, counters: Sequence[str], shards: Sequence[Shard]) -> Iterator[Columns]:
    """The samples of one group in one row group, without counters of which it has none."""
    ordinals = {process: [number for own, number in owners if own == process] for process, _ in owners}
    parts = reader.parts([shard for shard in shards if shard.process in ordinals])
    for part in sorted(parts, key=lambda part: (part.first_ns, part.process, part.path, part.row_group)):
        read = reader.read(part, (*_FIXED, *counters))
        is_own = np.isin(read["device_id"], ordinals[part.process])
        for number in np.unique(read["counter_group"][is_own]).tolist():
            own = is_own & (read["counter_group"] == number)
            found = {name: values[own] for name, values in read.items() if name != "device_id"}
            if number != reader.NONE:
                yield {n: v for n, v in found.items() if n not in counters or not np.isnan(v).all()}


def _joined(number: int, pieces: list[Columns], counters: Sequence[str]) -> Group:
    sizes = [len(piece["start_ns"]) for piece in pieces]
    start, end = (np.concatenate([piece.pop(name) for piece in pieces]) for name in ("start_ns", "end_ns"))
    values = {}
    for name in counters:
        found = [piece.pop(name, None) for piece in pieces]
        if 2 * sum(int((~np.isnan(own)).sum()) for own in found if own is not None) > sum(sizes):
            whole = [np.full(size, np.nan) if own is None else own for own, size in zip(found, sizes, strict=True)]
            values[name] = np.concatenate(whole)
    group = Group(number, len(start), start, end, values)
    return group if (start[1:] >= start[:-1]).all() else group.take(np.argsort(start, kind="stable"))


# --- usable ones -----------------------------------------------------------------------------------


def _usable(group: Group, width: int, pauses: tuple[Integers, Integers], replays: Integers) -> Group:
    usable = _believed(group, width) & ~_paused(group, *pauses)
    if CYCLES in group.values:
        usable &= ~_cut_short(group, width)
    if len(replays):
        for instants in (group.start_ns, group.end_ns):
            usable &= ~np.isin(instants // width, replays)
    group = group if usable.all() else group.take(usable)
    if CYCLES in group.values:
        _at_mean_clock(group)
    return group


def _believed(group: Group, width: int) -> Flags:
    """Whether the times of a sample and all of its counters are believed."""
    start, length = group.start_ns, group.length_ns
    usable = (length > 0) & (length <= LONGEST_SAMPLE * width) & (start >= 0) & (start <= reader.LAST_NS)
    for values in group.values.values():
        usable &= (values >= 0) & (values <= MOST)
    return usable if group.values else np.zeros(len(group), np.bool_)


def _paused(group: Group, starts: Integers, until: Integers) -> Flags:
    """Whether a process that uses the device did not record what it ran there."""
    if not len(starts):
        return np.zeros(len(group), np.bool_)
    last = np.searchsorted(starts, group.end_ns) - 1
    paused: Flags = (last >= 0) & (until[last] > group.start_ns)
    return paused


def _cut_short(group: Group, width: int) -> Flags:
    """Whether a sample has fewer SM cycles than its neighbours' clock would give: what it lacks is nowhere."""
    clock = group.values[CYCLES] / group.length_ns.clip(min=1)
    near = np.diff(group.start_ns) <= LONGEST_SAMPLE * width
    before, after = np.full_like(clock, np.nan), np.full_like(clock, np.nan)
    before[1:][near], after[:-1][near] = clock[:-1][near], clock[1:][near]
    short: Flags = clock < CUT_SHORT * np.fmin(before, after)
    return short


def _at_mean_clock(group: Group) -> None:
    """Busy time of units on the SM clock, at the mean clock: then it adds up across clocks that differ."""
    cycles, length = group.values[CYCLES].copy(), group.length_ns
    if not cycles.sum() > 0:
        return
    mean = cycles.sum() / length.sum()
    for name, values in group.values.items():
        if name in BY_COLUMN and BY_COLUMN[name].is_on_sm_clock:
            group.values[name] = values * cycles / length / mean
