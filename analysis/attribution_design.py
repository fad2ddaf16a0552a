"""How long each term ran in each sample: the design matrix of the attribution, some thousand samples at a time.

Launches come in order of time (`launch_reader`), samples are sorted by start, so where a launch lies among them is a
binary search, and the matrix is a sum by (sample, term). Launches that reach beyond the samples at hand are kept for
the next ones. Memory does not grow with the run. In SQL the same took four times as long, an inequality join of
intervals fifteen times.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import duckdb
import numpy as np
from numpy.typing import NDArray

from nanalyze.analysis import launch_reader as reader
from nanalyze.analysis.attribution_samples import Owners, owned
from nanalyze.analysis.launch_reader import Columns, Integers, Part, Unscannable
from nanalyze.rundir.shards import Shard

Array = NDArray[np.float64]

# A launch does not do its work evenly. At the part u of its length (0 to 1) its rate is taken to be its mean times
# 1 + a p1(u) + b p2(u) + ... with Legendre's polynomials on [0, 1], scaled to a mean square of 1; their mean is 0.
# How much of them lies in a sample follows from their integrals from 0 to u, for each degree.
MOST_DEGREE = 8
PACE = 0  # in place of a degree: see `Layout`
# What a launch counts ends so much before the end that is recorded for it, but lasts this share of it at least. On
# recorded steps of three jobs that left up to 9 % less unexplained; the same at the start left more.
AFTER_NS = 1000
LEAST_SHARE = 0.7

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
    """Columns of the matrix: one a term, then what launches of a term may do unevenly; `owner` (Q,) is whose.

    Launches of a term do the same work each, whatever their length: a whole one counts as `mean_ns` (P,). Where that is
    0, time itself counts, as of copies. `degree` (Q,) is of a profile, or PACE: the time of a term in a sample less
    what its launches count as, for a term whose longer launches do more work.
    """

    terms: int
    owner: Integers = field(default_factory=lambda: np.zeros(0, np.int64))
    degree: Integers = field(default_factory=lambda: np.zeros(0, np.int64))
    mean_ns: Array = field(default_factory=lambda: np.zeros(0))

    @property
    def columns(self) -> int:
        return self.terms + len(self.owner)

    def column(self, degree: int) -> Integers:
        """Number of each term's column of this degree (P,), of those after the terms; -1 where it has none."""
        found = np.full(self.terms, -1, np.int64)
        own = np.flatnonzero(self.degree == degree)
        found[self.owner[own]] = own
        return found

    def work_ns(self) -> Array:
        """As what a whole launch of each term counts (P,); 0: as its time."""
        return self.mean_ns if len(self.mean_ns) else np.zeros(self.terms)


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
    found = cursor.execute(
        f"""
        SELECT start_ns, duration_ns, kernel_class_id, NULL AS kind FROM raw.kernels AS k
        WHERE {owned(owners, "k")} AND start_ns >= $first_ns AND duration_ns > 0
        UNION ALL
        SELECT start_ns, duration_ns, NULL, kind FROM raw.copies AS c
        WHERE {owned(owners, "c")} AND start_ns >= $first_ns AND duration_ns > 0
        ORDER BY start_ns
        """,
        {"first_ns": first_ns},
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


@dataclass
class Design:
    """Some of the samples: `matrix` (N, columns) by `Layout`, `time_ms` (N, terms) how long each term ran in each.

    The time that a launch takes after its work has ended counts while it works.
    """

    which: slice
    matrix: Array
    time_ms: Array

    def take(self, rows: NDArray[np.bool_]) -> Design:
        """These samples only."""
        return Design(self.which, self.matrix[rows], self.time_ms[rows])


def designs(samples: Samples, launches: Iterator[Columns], layout: Layout) -> Iterator[Design]:
    """Parts of the samples, in order, with the ms that each term ran or counts as in each of them, idle first.

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
            yield _design(samples, part, waiting, layout)
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


def _design(samples: Samples, part: slice, rows: Columns, layout: Layout) -> Design:
    start, end = samples.start_ns[part], samples.end_ns[part]
    count, terms = len(start), layout.terms
    time, work, busy = np.zeros(count * terms), np.zeros(count * terms), np.zeros(count)
    uneven = np.zeros((count, len(layout.owner)))
    worked = _worked(rows, layout)
    for track in _tracks(start, end):
        for number, launch in _met(start[track], end[track], rows):
            sample, own = track[number], {name: values[launch] for name, values in worked.items()}
            first = np.maximum(own["start_ns"], start[sample])
            last = np.minimum(own["recorded_ns"], end[sample])
            busy += np.bincount(sample, np.maximum(last - np.maximum(first, rows["own"][launch]), 0), count)
            last = np.minimum(own["end_ns"], end[sample])
            share = np.maximum(last - first, 0) / (own["end_ns"] - own["start_ns"])
            place = sample * terms + own["term"]
            time += np.bincount(place, share * own["length"], count * terms)
            work += np.bincount(place, share * own["work"], count * terms)
            _add_profiles(uneven, sample, own, first, last, layout)
    matrix = np.empty((count, layout.columns))
    time_ms = np.divide(time, 1e6, out=time).reshape(count, terms)
    np.divide(work.reshape(count, terms), 1e6, out=matrix[:, :terms])
    np.divide(uneven, 1e6, out=matrix[:, terms:])
    paced = np.flatnonzero(layout.degree == PACE)
    matrix[:, terms + paced] = time_ms[:, layout.owner[paced]] - matrix[:, layout.owner[paced]]
    idle = (end - start - busy) / 1e6
    time_ms[:, 0] = matrix[:, 0] = np.where(idle > 1e-6, idle, 0)
    return Design(part, matrix, time_ms)


def _worked(rows: Columns, layout: Layout) -> dict[str, NDArray[Any]]:
    """When launches do their work, up to `end_ns`, and as how many ns a whole one counts: its `length` and `work`."""
    length = rows["end_ns"] - rows["start_ns"]
    work = np.append(layout.work_ns(), 0)[rows["term"]]  # launches that meet no sample may have no term
    after = np.where(work > 0, np.minimum(AFTER_NS, (1 - LEAST_SHARE) * length), 0).astype(np.int64)
    return {
        "start_ns": rows["start_ns"],
        "end_ns": rows["end_ns"] - after,
        "recorded_ns": rows["end_ns"],
        "term": rows["term"],
        "length": length,
        "work": np.where(work > 0, work, length),
    }


def _add_profiles(
    target: Array,
    sample: Integers,
    launches: Mapping[str, NDArray[Any]],
    first: Integers,
    last: Integers,
    layout: Layout,
) -> None:
    """Add the profiles' integrals over [first, last] of launches that are cut there to `target` (N, Q)."""
    if not len(layout.owner):
        return
    start, end = launches["start_ns"], launches["end_ns"]
    has_profile = layout.column(1)[launches["term"]] >= 0
    cut = np.flatnonzero(has_profile & ((first > start) | (last < end)) & (last > first))
    length, term = (end - start)[cut], launches["term"][cut]
    begins, ends = (first - start)[cut] / length, (last - start)[cut] / length
    scale = launches["work"][cut]
    for degree in range(1, int(layout.degree.max()) + 1):
        column = layout.column(degree)[term]
        own = np.flatnonzero(column >= 0)
        part = profile_integral(degree, ends[own]) - profile_integral(degree, begins[own])
        np.add.at(target, (sample[cut[own]], column[own]), scale[own] * part)


def profile_integral(degree: int, u: Array) -> Array:
    """Integral of the profile of `degree` (1 or more) from 0 to u, elementwise."""
    x = 2 * u - 1
    before, own = np.ones_like(x), x
    for n in range(1, degree):
        before, own = own, ((2 * n + 1) * x * own - n * before) / (n + 1)
    after = ((2 * degree + 1) * x * own - degree * before) / (degree + 1)
    result: Array = (after - before) / (2 * math.sqrt(2 * degree + 1))
    return result


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
