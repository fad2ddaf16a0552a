"""Forms the normal equations of the attribution from samples and launches, some thousand samples at a time.

Which samples are usable says `attribution_samples`; how long each term ran in each of them is worked out in
`attribution_design`, and the sums of products are numpy's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import duckdb
import numpy as np
from numpy.typing import NDArray

from nanalyze.analysis import attribution_design as design
from nanalyze.analysis.attribution_modes import BIN, Mode, modes, whole
from nanalyze.analysis.attribution_samples import CYCLES, Disturbances, Group, load, owned
from nanalyze.analysis.attribution_solve import (
    Array,
    Blocks,
    Course,
    Fit,
    Flags,
    Indices,
    fit_members,
    told_apart,
    towards_mean,
)
from nanalyze.analysis.launch_reader import LAST_NS, LONGEST_NS, Columns
from nanalyze.rundir.sampled import BY_COLUMN
from nanalyze.rundir.shards import Shard

MOST_TERMS = 400  # beyond, the classes with the least time share one term
MOST_UNEVEN = 350  # columns of profiles and paces, over all terms
PROFILE_NS = 25_000  # for each of it a degree, two at least: where a launch is long, samples tell more of its course
CUT = 0.17  # share of a launch by which it is counted wrongly where a sample's edge cuts it; orders columns, no more
# Durations that vary by less, relative: it makes no difference whether longer launches do more work.
STEADY = 0.01
# Counts of time itself, whatever runs: launches do not count as so much of them each.
TIMED = (CYCLES, "dram_cycles_elapsed")
# The most that a unit can count a cycle of an SM: warps by the slots that any has, bytes by twice the width of its port
# to L2 in both directions.
A_CYCLE = {"sm_cycles_active": 1.0, "inst": 4.0, "issue_active_cycles": 4.0, "warps_active": 64.0, "l2_bytes": 256.0}
# A launch of few blocks leaves most SMs alone. Times by which its bound is raised, since it works for up to a
# microsecond longer than its times say, which for a short one is half of them.
REACH = 1.5
WINDOW_SAMPLES = 10_000
MOST_WINDOWS = 24
BLOCKS_ALONE = 400
BLOCKS_A_WINDOW = 50
FEWEST_SAMPLES = 80
GRAM_BYTES = 128_000_000


@dataclass(frozen=True)
class Device:
    """One physical GPU: `key` is its UUID, else process/ordinal; `owners` the (process, ordinal) that see it."""

    key: str
    owners: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Term:
    """What a rate is estimated for: kind is idle, kernel (one mode of a class), other or copy; `label` says it.

    `spread` is the relative standard deviation of its durations.
    """

    kind: str
    label: str
    kernel_class_id: int | None = None
    launches: int = 0
    mean_ns: float = 0.0
    spread: float = 0.0


@dataclass
class Equations:
    """One counter group of one device: its counters, blocks, their spans and what was left out.

    start_ns, end_ns, elapsed_ns (B,); time_ms (B, P): time of each term, work_ms the same with launches at their mean
    length; total (B, C): sums of the counters. `blocks` count launches, `times` the time that each term ran.
    `sm_shares` are the shares of the SMs that launches of a class can use, where not all.
    """

    device: Device
    group: int
    counters: list[str]
    terms: list[Term]
    blocks: Blocks
    times: Blocks
    windows: int
    start_ns: Array
    end_ns: Array
    elapsed_ns: Array
    time_ms: Array
    work_ms: Array
    total: Array
    samples: int
    dropped: int
    sm_shares: Mapping[int | None, float]

    def classes(self) -> list[list[int]]:
        """Terms by what is reported: those of one kernel class together, all others alone."""
        found: dict[object, list[int]] = {}
        for number, term in enumerate(self.terms):
            found.setdefault(term.kernel_class_id if term.kind == "kernel" else term.label, []).append(number)
        return list(found.values())

    @property
    def timed(self) -> Flags:
        """Which counters count time itself (C,)."""
        return np.isin(np.array(self.counters), TIMED)

    def fit(self, limit: float) -> Fit:
        """Rates of all terms, those that cannot be told apart merged: whose variance inflation is above `limit`."""
        kin = [terms for terms in self.classes() if len(terms) > 1]
        members = told_apart(self.blocks.gram[:, : self.blocks.terms, : self.blocks.terms].sum(axis=0), limit, kin)
        return self._fit(self.blocks, self.times, members)

    def fit_window(self, inside: Flags, whole: Fit) -> Fit:
        """The same from the blocks `inside` alone, merged as in `whole`: rates while the terms ran in these."""
        found = self._fit(self.blocks.take(inside), self.times.take(inside), whole.members, whole.course)
        # Launches count as their mean length over the run, which is not that of the window.
        worked, ran = (time[inside].sum(axis=0) for time in (self.work_ms, self.time_ms))
        pace = np.array([worked[terms].sum() / ran[terms].sum() for terms in found.members])
        return found.scaled(np.where(whole.course.by_time, 1.0, pace[:, None]))

    def _fit(self, blocks: Blocks, times: Blocks, members: list[list[int]], course: Course | None = None) -> Fit:
        ran = np.einsum("bpp->p", blocks.gram)[: blocks.terms] > 0
        members = [terms for terms in members if ran[terms].any()]
        clocks = None
        if CYCLES in self.counters:
            own = np.array([self.counters.index(CYCLES)])
            by_time = Course(np.ones(1, np.bool_), np.zeros(1, np.bool_)) if course else None
            clocks = fit_members(blocks.of(own), times.of(own), members, np.ones(1, np.bool_), by_time)
        return fit_members(blocks, times, members, self.timed, course, self._peaks(clocks))

    def _peaks(self, clocks: Fit | None) -> Array | None:
        """The most that rates can be (P, C) at the clocks that ran, infinite if unknown; None without clocks."""
        if clocks is None:
            return None
        mean = self.total[:, self.counters.index(CYCLES)].sum() / self.elapsed_ns.sum() * 1e6
        if not mean > 0:
            return None
        off, noise = clocks.rate[:, 0] / mean - 1, clocks.standard_error[:, 0] / mean
        time = self.time_ms.sum(axis=0)
        spent = np.array([time[terms].sum() for terms in clocks.members])
        believed = towards_mean(off, noise, spent, float(clocks.explained[0]))[0]
        cycles = mean * (1 + believed * off)
        reached = np.array([max(self._sm_share(self.terms[term]) for term in terms) for terms in clocks.members])
        peaks = np.full((len(cycles), len(self.counters)), np.inf)
        for place, counter in enumerate(self.counters):
            if counter in A_CYCLE:
                peaks[:, place] = A_CYCLE[counter] * cycles * reached
            elif counter in BY_COLUMN and BY_COLUMN[counter].is_on_sm_clock:
                peaks[:, place] = 1e6 * cycles / mean * reached  # they are as at the mean clock
            elif counter in BY_COLUMN and BY_COLUMN[counter].is_busy_time:
                peaks[:, place] = 1e6
        return peaks

    def _sm_share(self, term: Term) -> float:
        """Of the SMs, how many a term can keep busy; 1 for what is no kernel."""
        share = self.sm_shares.get(term.kernel_class_id, 1.0) if term.kind == "kernel" else 1.0
        return min(REACH * share, 1.0)

    def term_time(self) -> Array:
        """How long each term ran in all (P,), in ms; of kernels also outside of samples, so modes have their share."""
        recorded = np.array([term.launches * term.mean_ns / 1e6 for term in self.terms])
        return np.where(recorded > 0, recorded, self.time_ms.sum(axis=0))


@dataclass(frozen=True)
class _Group:
    """How a counter group's samples are divided."""

    group: int
    counters: tuple[str, ...]
    samples: int
    seen: int
    windows: int
    blocks: int


def sampled_devices(cursor: duckdb.DuckDBPyConnection) -> list[Device]:
    """Devices with samples, by key."""
    rows = cursor.execute(
        """
        WITH seen AS (
            SELECT process, device_id, TRUE AS is_sampled FROM raw.samples GROUP BY process, device_id
            UNION ALL SELECT process, device_id, FALSE FROM raw.kernels GROUP BY process, device_id
        )
        SELECT
            COALESCE(d.uuid, concat(s.process, '/', CAST(s.device_id AS VARCHAR))) AS key,
            s.process, s.device_id, bool_or(s.is_sampled)
        FROM seen AS s
        LEFT JOIN devices AS d ON d.process = s.process AND d.device_id = s.device_id
        GROUP BY ALL ORDER BY ALL
        """
    ).fetchall()
    keys = sorted({key for key, _, _, is_sampled in rows if is_sampled})
    return [Device(key, tuple((p, d) for k, p, d, _ in rows if k == key)) for key in keys]


def equations(
    cursor: duckdb.DuckDBPyConnection,
    device: Device,
    counters: Sequence[str],
    shards: Mapping[str, Sequence[Shard]],
    disturbances: Disturbances,
    sm_shares: Mapping[int | None, float],
) -> list[Equations]:
    """The equations of each counter group of `device`; a group with too few samples has no blocks.

    `counters` are the columns of `samples` that hold one, `shards` the good files by table, `sm_shares`
    as in `Properties`.
    """
    width, samples = load(cursor, device.owners, counters, shards["samples"], disturbances)
    if not samples:
        return []
    first = min((int(own.start_ns[0]) for own in samples if len(own)), default=0)
    last = max((int(own.end_ns.max()) for own in samples if len(own)), default=0)
    terms, assigned = _found_terms(cursor, device, first, last)
    layout = _layout(terms)
    made = [_empty(device, _divided(own, layout), terms, layout, sm_shares) for own in samples]
    if any(len(own) for own in samples):
        _add_all(made, samples, design.in_order(cursor, device.owners, shards, assigned), layout, width)
    return made


# --- terms -----------------------------------------------------------------------------------------


def _found_terms(
    cursor: duckdb.DuckDBPyConnection, device: Device, first: int, last: int
) -> tuple[list[Term], design.Terms]:
    """The terms of all that met the samples, and how launches are given theirs."""
    timed = f"""
        duration_ns BETWEEN 1 AND {LONGEST_NS} AND start_ns BETWEEN 0 AND {LAST_NS}
        AND start_ns < {last} AND start_ns + duration_ns > {first}
    """
    kernels = _modes(cursor, f"{owned(device.owners, 'k')} AND {timed}")
    kinds = [
        kind
        for (kind,) in cursor.execute(
            f"SELECT DISTINCT c.kind FROM raw.copies AS c WHERE {owned(device.owners, 'c')} AND {timed} ORDER BY 1"
        ).fetchall()
    ]
    terms = [Term("idle", "idle")]
    terms += [Term("kernel", "kernel", c, mode.launches, mode.mean_ns, mode.spread) for c, mode in kernels.kept]
    other = len(terms)
    if kernels.others:
        terms.append(Term("other", f"{kernels.others} kernel classes with the least time"))
    copies = len(terms)
    terms += [Term("copy", f"copy {kind}") for kind in kinds]
    return terms, _assigned(kernels, other, {kind: number for number, kind in enumerate(kinds, copies)})


def _assigned(kernels: _Kernels, other: int, copies: dict[str, int]) -> design.Terms:
    """Terms of kernels are numbered from 1 by class and mode, as `kernels.kept` lists them."""
    ids = np.array([class_id for class_id, _ in kernels.kept], np.int64)
    edges = np.array([mode.first for _, mode in kernels.kept], np.int64)
    own, first, counts = np.unique(ids, return_index=True, return_counts=True)
    return design.Terms(own, first + 1, first + counts, edges, BIN, other, copies)


def _layout(terms: Sequence[Term]) -> design.Layout:
    """How launches may be found to be uneven: of what could be left out, that which would leave most unexplained.

    A launch of d ms that a sample's edge cuts is counted wrongly by CUT of it, by less with each degree of its profile;
    one whose length varies by a share s, wherever it lies, by s d. Squares add up over what samples hold of a term.
    """
    found: list[tuple[float, int, int]] = []
    for number, term in enumerate(terms):
        if term.kind != "kernel":
            continue
        time, length = term.launches * term.mean_ns, term.mean_ns / 1e6
        degrees = range(1, min(max(round(term.mean_ns / PROFILE_NS), 2), design.MOST_DEGREE) + 1)
        found += [(time * 2 * (CUT * length / degree) ** 2, number, degree) for degree in degrees]
        if term.spread > STEADY:
            found.append((time * length * term.spread**2, number, design.PACE))
    chosen = sorted(found, reverse=True)[:MOST_UNEVEN]
    owner, degree = np.array(sorted(place for _, *place in chosen), np.int64).reshape(-1, 2).T
    mean = np.array([term.mean_ns if term.kind == "kernel" else 0.0 for term in terms])
    return design.Layout(len(terms), owner, degree, mean)


_BIN = f"CAST(floor(ln(k.duration_ns) / {BIN}) AS INTEGER)"


@dataclass(frozen=True)
class _Kernels:
    """Modes that become terms, by class; and how many classes share one term."""

    kept: list[tuple[int, Mode]]
    others: int


def _modes(cursor: duckdb.DuckDBPyConnection, which: str) -> _Kernels:
    """Classes by time, each split into modes while there is room for more terms."""
    found = cursor.execute(
        f"""
        SELECT k.kernel_class_id AS id, {_BIN} AS bin, count(*) AS launches, sum(k.duration_ns)::DOUBLE AS time_ns
        FROM raw.kernels AS k WHERE {which} GROUP BY ALL ORDER BY ALL
        """
    ).fetchnumpy()
    ids, bins, launches, time = (np.asarray(found[name]) for name in ("id", "bin", "launches", "time_ns"))
    starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1)) if len(ids) else np.zeros(0, dtype=np.intp)
    parts = [slice(a, b) for a, b in itertools.pairwise([*starts.tolist(), len(ids)])]
    parts.sort(key=lambda part: (-time[part].sum(), int(ids[part.start])))
    kept, room = [], MOST_TERMS - min(len(parts), MOST_TERMS)
    for part in parts[:MOST_TERMS]:
        own = modes(bins[part], launches[part].astype(np.float64), time[part])
        if len(own) - 1 > room:
            own = [whole(bins[part], launches[part].astype(np.float64), time[part])]
        room -= len(own) - 1
        kept += [(int(ids[part.start]), mode) for mode in own]
    return _Kernels(kept, len(parts[MOST_TERMS:]))


# --- blocks, windows and stretches -----------------------------------------------------------------


def _divided(samples: Group, layout: design.Layout) -> _Group:
    """The number of windows and of blocks that the samples, and the memory for them, allow."""
    count = len(samples)
    windows = min(max(count // WINDOW_SAMPLES, 1), MOST_WINDOWS)
    wanted = max(BLOCKS_ALONE, BLOCKS_A_WINDOW * windows)
    size = 8 * (layout.columns**2 + layout.terms**2)
    blocks = min(wanted, count // 2, max(GRAM_BYTES // size, 2 * windows))
    blocks = 0 if count < FEWEST_SAMPLES else blocks
    return _Group(samples.number, tuple(samples.values), count, samples.seen, windows, blocks)


def _blocks(b: int, p: int, c: int) -> Blocks:
    return Blocks(
        np.zeros((b, p, p)), np.zeros((b, p, c)), np.zeros((b, c)), np.zeros((b, c)), np.zeros(b), np.zeros(b)
    )


def _empty(
    device: Device, group: _Group, terms: list[Term], layout: design.Layout, sm_shares: Mapping[int | None, float]
) -> Equations:
    b, p, c = group.blocks, len(terms), len(group.counters)
    blocks = _blocks(b, layout.columns, c)
    blocks.owner, blocks.is_pace = layout.owner, layout.degree == design.PACE
    times = _blocks(b, p, c)
    return Equations(
        device, group.group, list(group.counters), terms, blocks, times, group.windows,
        np.full(b, np.inf), np.full(b, -np.inf), np.zeros(b), np.zeros((b, p)), np.zeros((b, p)), np.zeros((b, c)),
        group.samples, group.seen - group.samples, sm_shares,
    )  # fmt: skip


# --- sums ------------------------------------------------------------------------------------------


def _add_all(
    made: Sequence[Equations],
    samples: Sequence[Group],
    launches: Iterator[Columns],
    layout: design.Layout,
    width: int,
) -> None:
    """Add all samples to the blocks of their equations, some thousand at a time."""
    numbers = [number for number, equation in enumerate(made) if len(equation.blocks.samples)]
    given, equation = _together(numbers, samples)
    done = [0] * len(made)
    # The products of one part are summed in a thread while the next part is laid out: numpy's products and most of
    # the rest run without the interpreter's lock.
    with ThreadPoolExecutor(1) as pool:
        adding: Future[None] | None = None
        for part in design.designs(given, launches, layout):
            if adding is not None:
                adding.result()
            adding = pool.submit(_add_part, made, samples, equation[part.which], part, width, done)
        if adding is not None:
            adding.result()


def _together(numbers: Sequence[int], samples: Sequence[Group]) -> tuple[design.Samples, NDArray[np.int16]]:
    """The samples of these groups by start, and the number of each one's group."""
    equation = np.repeat(np.array(numbers, np.int16), [len(samples[number]) for number in numbers])
    if len(numbers) == 1:
        start, end = samples[numbers[0]].start_ns, samples[numbers[0]].end_ns
    else:
        start = np.concatenate([np.zeros(0, np.int64), *(samples[number].start_ns for number in numbers)])
        end = np.concatenate([np.zeros(0, np.int64), *(samples[number].end_ns for number in numbers)])
        order = np.lexsort((equation, start))
        start, end, equation = start[order], end[order], equation[order]
    return design.Samples(np.arange(len(start)), start, end), equation


def _add_part(
    made: Sequence[Equations],
    samples: Sequence[Group],
    equation: NDArray[np.int16],
    part: design.Design,
    width: int,
    done: list[int],
) -> None:
    """Add samples to the equations that they belong to, of each those after the `done` first."""
    for number in np.unique(equation).tolist():
        own = equation == number
        count = int(own.sum())
        rows = _sample_rows(made[number], samples[number], slice(done[number], done[number] + count), width)
        done[number] += count
        _add_samples(made[number], rows, part if count == len(own) else part.take(own))


def _sample_rows(equation: Equations, samples: Group, part: slice, width: int) -> Columns:
    """Some samples with their blocks, runs of equally many; the longer one is, the noisier, and the less it weighs."""
    start, end = samples.start_ns[part], samples.end_ns[part]
    return {
        "block": np.arange(part.start, part.stop) * len(equation.blocks.samples) // len(samples),
        "start_ns": start,
        "end_ns": end,
        "length": (end - start) / 1e6,
        "weight": float(width) / (end - start),
        **{name: values[part] for name, values in samples.values.items()},
    }


def _add_samples(equation: Equations, rows: Columns, part: design.Design) -> None:
    """Add samples in order of time with their part of the design, which is written over."""
    block = rows["block"]
    values = np.stack([rows[counter] for counter in equation.counters], axis=1)
    _add_rows(equation.time_ms, block, part.time_ms)
    _add_rows(equation.work_ms, block, part.matrix[:, : len(equation.terms)])
    _add_products(equation.blocks, rows, part.matrix, values)
    _add_products(equation.times, rows, part.time_ms, values)
    _add_rows(equation.total, block, values)
    _add_rows(equation.elapsed_ns, block, rows["length"] * 1e6)
    np.minimum.at(equation.start_ns, block, rows["start_ns"].astype(np.float64))
    np.maximum.at(equation.end_ns, block, rows["end_ns"].astype(np.float64))


def _add_products(blocks: Blocks, rows: Columns, matrix: Array, values: Array) -> None:
    """Add the products of `matrix` (N, columns), which is written over, and `values` (N, C)."""
    block, weight, length = rows["block"], rows["weight"][:, None], rows["length"]
    root = np.sqrt(weight)
    # A matrix transposed times itself takes BLAS half of what a product of two takes.
    matrix *= root
    weighted = values * root
    starts = np.flatnonzero(np.diff(block, prepend=-1))
    for start, end in itertools.pairwise([*starts.tolist(), len(block)]):
        x = matrix[start:end]
        blocks.gram[block[start]] += x.T @ x
        blocks.moment[block[start]] += x.T @ weighted[start:end]
    _add_rows(blocks.square, block, values * values * weight)
    _add_rows(blocks.flat, block, values * length[:, None] * weight)
    _add_rows(blocks.length, block, length * length * weight[:, 0])
    _add_rows(blocks.samples, block, np.ones(len(block)))


def _add_rows(target: Array, block: Indices, rows: Array) -> None:
    """Add rows to those of their blocks, which are ascending."""
    starts = np.flatnonzero(np.diff(block, prepend=-1))
    target[block[starts]] += np.add.reduceat(rows, starts, axis=0)
