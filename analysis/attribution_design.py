"""How long each term ran in each sample: the design matrix of the attribution, some thousand samples at a time.

Launches come in order of time (`launch_reader`), samples are sorted by start, so where a launch lies among them is a
binary search, and the matrix is a sum by (sample, term). Launches that reach beyond the samples at hand are kept for
the next ones. Memory does not grow with the run. In SQL the same took four times as long, an inequality join of
intervals fifteen times.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import duckdb
import numpy as np
from numpy.typing import NDArray

from nanalyze.analysis import launch_reader as reader
from nanalyze.analysis.launch_reader import Columns, Integers, Part, Unscannable
from nanalyze.rundir.shards import Shard

Array = NDArray[np.float64]
Owners = Sequence[tuple[str, int]]

# A launch does not do its work evenly. At the part u of its length (0 to 1) its rate is taken to be its mean times
# 1 + a p(u) + b q(u), where p and q are Legendre's polynomials of degree 1 and 2 on [0, 1], which are 0 on average.
# How much of them lies in a sample follows from their integrals from 0 to u.
PROFILE_INTEGRALS: tuple[Callable[[Array], Array], ...] = (
    lambda u: math.sqrt(3) * (u - u * u),
    lambda u: math.sqrt(5) * (u - 3 * u**2 + 2 * u**3),
)

ROWS_AT_ONCE = 20_000  # samples
ENTRIES_AT_ONCE = 4_000_000  # pairs of a launch and a sample that it meets
UNTIL_THE_END = reader.LAST_NS + reader.LONGEST_NS + 1


@dataclass(frozen=True)
class Terms:
    """Which term a launch belongs to: by class and, where a class has several modes, by duration.

    ids: classes, ascending; first, last: their first and last term, which are numbered from 1. The term n begins at
    the bin edges[n - 1] of its class's durations. `other` is for all other classes, `copies` by kind.
    """

    ids: Integers
    first: Integers
    last: Integers
    edges: Integers
    bin_width: float
    other: int
    copies: Mapping[str, int]

    def of(self, classes: Integers, duration_ns: Integers) -> Integers:
        """Terms of launches."""
        if not len(self.ids):
            return np.full(len(classes), self.other)
        place = np.searchsorted(self.ids, classes).clip(max=len(self.ids) - 1)
        term = self.first[place]
        several = np.flatnonzero(self.last[place] > term)
        if len(several):
            last, bins = self.last[place[several]], np.floor(np.log(duration_ns[several]) / self.bin_width)
            own = term[several]
            for _ in range(int((last - own).max())):
                own += (own < last) & (bins >= self.edges[own.clip(max=len(self.edges) - 1)])
            term[several] = own
        return np.where(self.ids[place] == classes, term, self.other)


@dataclass(frozen=True)
class Layout:
    """Columns of the matrix: one a term, then those of profiles; `owner` (Q,) is the term of each of these.

    A term with a profile owns as many neighbouring columns as there are PROFILE_INTEGRALS.
    """

    terms: int
    owner: Integers = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def of(cls, terms: int, profiled: Sequence[int]) -> Layout:
        """With profiles of the terms `profiled`."""
        return cls(terms, np.repeat(np.array(profiled, np.int64), len(PROFILE_INTEGRALS)))

    @property
    def columns(self) -> int:
        return self.terms + len(self.owner)

    def profile(self) -> Integers:
        """First column of each term's profile (P,); -1 where it has none."""
        first = np.full(self.terms, -1, np.int64)
        first[self.owner[:: len(PROFILE_INTEGRALS)]] = np.arange(self.terms, self.columns, len(PROFILE_INTEGRALS))
        return first


@dataclass(frozen=True)
class Samples:
    """Samples by start: their numbers, starts and ends (N,)."""

    number: Integers
    start_ns: Integers
    end_ns: Integers


# --- launches in order -----------------------------------------------------------------------------


def in_order(
    cursor: duckdb.DuckDBPyConnection, owners: Owners, shards: Mapping[str, Sequence[Shard]], terms: Terms
) -> Iterator[Columns]:
    """Launches and copies of a device by start: start_ns, end_ns, term. Raises duckdb.Error.

    From the shards as they stand; where those are in no order, sorted by the database.
    """
    try:
        done = int(reader.NONE)
        for rows in _scanned(owners, shards, terms):
            yield rows
            done = int(rows["start_ns"][-1]) + 1
    except Unscannable:
        yield from _sorted(cursor, owners, terms, done)


def _scanned(owners: Owners, shards: Mapping[str, Sequence[Shard]], terms: Terms) -> Iterator[Columns]:
    processes = {process for process, _ in owners}
    own = [shard for table in ("kernels", "copies") for shard in shards[table] if shard.process in processes]
    parts = sorted(reader.parts(own), key=lambda part: (part.first_ns, part.process, part.table, part.path))
    columns = {"kernels": ("start_ns", "duration_ns", "kernel_class_id", "device_id"), "copies": _COPY_COLUMNS}

    def handle(part: Part, read: Columns) -> Columns:
        ordinals = [ordinal for process, ordinal in owners if process == part.process]
        return _usable(read, np.isin(read["device_id"], ordinals), terms)

    rows = reader.fetched(parts, columns, handle)
    yield from reader.in_order(parts, rows, _usable(dict.fromkeys(columns["kernels"], _NOTHING), _NONE, terms))


_NOTHING = np.zeros(0, np.int64)
_NONE = np.zeros(0, np.bool_)
_COPY_COLUMNS = ("start_ns", "duration_ns", "kind", "device_id")


def _usable(read: Columns, is_own: NDArray[np.bool_], terms: Terms) -> Columns:
    """Rows that took time, when that is believed."""
    start, duration = read["start_ns"], read["duration_ns"]
    kept = is_own & (duration > 0) & reader.believed(start, duration)[1]
    start, duration = start[kept], duration[kept]
    if "kind" in read:
        kinds = read["kind"][kept]
        term = np.full(len(start), -1, np.int64)
        for kind, number in terms.copies.items():
            term[kinds == kind] = number
        known = term >= 0  # one that met no sample may have a kind of its own
        start, duration, term = start[known], duration[known], term[known]
    else:
        term = terms.of(read["kernel_class_id"][kept], duration)
    return {"start_ns": start, "end_ns": start + duration, "term": term}


def _sorted(cursor: duckdb.DuckDBPyConnection, owners: Owners, terms: Terms, first_ns: int) -> Iterator[Columns]:
    """The same from `first_ns` on, sorted by the database."""
    owned = "list_contains($processes, process || '/' || device_id)"
    given = {"processes": [f"{process}/{ordinal}" for process, ordinal in owners], "first_ns": first_ns}
    found = cursor.execute(
        f"""
        SELECT start_ns, duration_ns, kernel_class_id, NULL AS kind FROM raw.kernels
        WHERE {owned} AND start_ns >= $first_ns AND duration_ns > 0
        UNION ALL
        SELECT start_ns, duration_ns, NULL, kind FROM raw.copies
        WHERE {owned} AND start_ns >= $first_ns AND duration_ns > 0
        ORDER BY start_ns
        """,
        given,
    )
    while batch := found.fetchmany(ROWS_AT_ONCE):
        copied = np.array([row[3] is not None for row in batch], np.bool_)
        ids = np.array([reader.NONE if row[2] is None else row[2] for row in batch], np.int64)
        times = np.array([row[:2] for row in batch], np.int64).reshape(-1, 2)
        kinds = np.array([row[3] for row in batch], object)
        parts = [
            _usable({"start_ns": times[:, 0], "duration_ns": times[:, 1], "kernel_class_id": ids}, ~copied, terms),
            _usable({"start_ns": times[:, 0], "duration_ns": times[:, 1], "kind": kinds}, copied, terms),
        ]
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        order = np.argsort(joined["start_ns"], kind="stable")
        if len(order):
            yield {name: values[order] for name, values in joined.items()}


# --- the matrix ------------------------------------------------------------------------------------


def designs(samples: Samples, launches: Iterator[Columns], layout: Layout) -> Iterator[tuple[slice, Array]]:
    """Of each slice of the samples, in order, the ms that each term ran in each of them (N, columns), idle first.

    Time in which several launches ran counts for each in full. Idle is what nothing covers. Columns of profiles hold
    the integral of the profile over the launches' parts inside, in ms: nothing where a launch lies inside as a whole.
    """
    until = np.maximum.accumulate(samples.end_ns) if len(samples.end_ns) else samples.end_ns
    waiting, covered, at = _empty_rows(), int(reader.NONE), 0
    for rows, known_until in _with_ends(launches):
        own, covered = _uncovered(rows, covered)
        waiting = {name: np.concatenate((values, {**rows, "own": own}[name])) for name, values in waiting.items()}
        complete = int(np.searchsorted(until, known_until, side="right"))
        while at < complete:
            part = slice(at, min(complete, at + ROWS_AT_ONCE))
            yield part, _design(samples, part, waiting, layout)
            at = part.stop
        if at < len(until):
            left = waiting["end_ns"] > samples.start_ns[at]
            waiting = {name: values[left] for name, values in waiting.items()}


def _empty_rows() -> Columns:
    return dict.fromkeys(("start_ns", "end_ns", "term", "own"), _NOTHING)


def _with_ends(launches: Iterator[Columns]) -> Iterator[tuple[Columns, int]]:
    """Launches with the instant up to which they are complete: the last start of what came, and in the end any."""
    for rows in launches:
        yield rows, int(rows["start_ns"][-1])
    yield {name: values for name, values in _empty_rows().items() if name != "own"}, UNTIL_THE_END


def _uncovered(rows: Columns, covered: int) -> tuple[Integers, int]:
    """From when on no earlier launch covers each one; and until when all of them together do."""
    running = np.maximum.accumulate(np.concatenate((np.array([covered], np.int64), rows["end_ns"])))
    return np.maximum(rows["start_ns"], running[:-1]), int(running[-1])


def _design(samples: Samples, part: slice, rows: Columns, layout: Layout) -> Array:
    columns, profile = layout.columns, layout.profile()
    start, end = samples.start_ns[part], samples.end_ns[part]
    count = len(start)
    ran: Array | None = None
    busy = np.zeros(count)
    for track in _tracks(start, end):
        for number, launch in _met(start[track], end[track], rows):
            sample = track[number]
            first = np.maximum(rows["start_ns"][launch], start[sample])
            last = np.minimum(rows["end_ns"][launch], end[sample])
            place = sample * columns + rows["term"][launch]
            found: Array = np.bincount(place, last - first, count * columns).astype(np.float64, copy=False)
            if len(layout.owner):
                own = {name: rows[name][launch] for name in ("start_ns", "end_ns", "term")}
                _add_profiles(found, sample * columns, profile[own["term"]], own, first, last)
            # As much memory as all else here: none is taken twice.
            if ran is not None:
                found += ran
            ran = found
            busy += np.bincount(sample, np.maximum(last - np.maximum(first, rows["own"][launch]), 0), count)
    ran = np.zeros(count * columns) if ran is None else ran
    design = np.divide(ran, 1e6, out=ran).reshape(count, columns)
    idle = (end - start - busy) / 1e6
    design[:, 0] = np.where(idle > 1e-6, idle, 0)
    return design


def _add_profiles(
    target: Array, row: Integers, column: Integers, launches: Columns, first: Integers, last: Integers
) -> None:
    """Add the profiles' integrals over [first, last] of launches that are cut there; `column` -1 has none."""
    start, end = launches["start_ns"], launches["end_ns"]
    cut = np.flatnonzero((column >= 0) & ((first > start) | (last < end)))
    length = (end - start)[cut]
    begins, ends = (first - start)[cut] / length, (last - start)[cut] / length
    for order, integral in enumerate(PROFILE_INTEGRALS):
        np.add.at(target, row[cut] + column[cut] + order, length * (integral(ends) - integral(begins)))


def _met(start: Integers, end: Integers, rows: Columns) -> Iterator[tuple[Integers, Integers]]:
    """Pairs of a sample and a launch that overlap, as positions, some at a time; the samples do not overlap."""
    first = np.searchsorted(end, rows["start_ns"], side="right")
    count = (np.searchsorted(start, rows["end_ns"], side="left") - first).clip(min=0)
    alone = np.flatnonzero(count == 1)
    if len(alone):
        yield first[alone], alone
    several = np.flatnonzero(count > 1)
    for chosen in _portions(several, count[several]):
        size = count[chosen]
        offset = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
        yield np.repeat(first[chosen], size) + offset, np.repeat(chosen, size)


def _portions(chosen: Integers, sizes: Integers) -> Iterator[Integers]:
    """`chosen` in parts whose sizes together are about ENTRIES_AT_ONCE."""
    number = np.cumsum(sizes) // ENTRIES_AT_ONCE
    cuts = np.flatnonzero(np.diff(number)) + 1
    for portion in np.split(chosen, cuts):
        if len(portion):
            yield portion


def _tracks(start: Integers, end: Integers) -> list[Integers]:
    """Positions of the samples in sequences in which none overlaps another: one, as a rule."""
    if not len(start):
        return []
    if (start[1:] >= end[:-1]).all():
        return [np.arange(len(start))]
    tracks: list[list[int]] = []
    free: list[tuple[int, int]] = []  # when each track ends
    for at, (first, last) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        if free and free[0][0] <= first:
            _, track = heapq.heappop(free)
        else:
            track = len(tracks)
            tracks.append([])
        tracks[track].append(at)
        heapq.heappush(free, (last, track))
    return [np.array(track) for track in tracks]
