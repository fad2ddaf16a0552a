"""Forms the normal equations of the attribution from samples and launches, some thousand samples at a time.

Which samples are usable and how they are divided is SQL's; how long each term ran in each of them is worked out in
`attribution_design`, and the sums of products are numpy's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import duckdb
import numpy as np

from nanalyze.analysis import attribution_design as design
from nanalyze.analysis import sqltext
from nanalyze.analysis.attribution_modes import BIN, Mode, modes, whole
from nanalyze.analysis.attribution_solve import Array, Blocks, Indices
from nanalyze.analysis.launch_reader import Columns, Integers
from nanalyze.rundir.sampled import BY_COLUMN
from nanalyze.rundir.shards import Shard

MOST_TERMS = 400  # beyond, the classes with the least time share one term
MOST_PROFILES = 100  # of those with the most time
WINDOW_SAMPLES = 10_000
MOST_WINDOWS = 24
BLOCKS_ALONE = 400
BLOCKS_A_WINDOW = 50
FEWEST_SAMPLES = 80
GRAM_BYTES = 128_000_000
LONGEST_SAMPLE = 20  # times the usual length
# A sample whose SM clock is below this share of both neighbours' was cut short: it lacks SM counts.
CUT_SHORT = 0.75


@dataclass(frozen=True)
class Device:
    """One physical GPU: `key` is its UUID, else process/ordinal; `owners` the (process, ordinal) that see it."""

    key: str
    owners: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Term:
    """What a rate is estimated for: kind is idle, kernel (one mode of a class), other or copy; `label` says it."""

    kind: str
    label: str
    kernel_class_id: int | None = None
    launches: int = 0
    mean_ns: float = 0.0


@dataclass
class Equations:
    """One counter group of one device: its counters, blocks, their spans and what was left out.

    start_ns, end_ns, elapsed_ns (B,); time_ms (B, P): time of each term; total (B, C): sums of the counters.
    """

    device: Device
    group: int
    counters: list[str]
    terms: list[Term]
    blocks: Blocks
    windows: int
    start_ns: Array
    end_ns: Array
    elapsed_ns: Array
    time_ms: Array
    total: Array
    samples: int
    dropped: int

    def classes(self) -> list[list[int]]:
        """Terms by what is reported: those of one kernel class together, all others alone."""
        found: dict[object, list[int]] = {}
        for number, term in enumerate(self.terms):
            found.setdefault(term.kernel_class_id if term.kind == "kernel" else term.label, []).append(number)
        return list(found.values())

    def term_time(self) -> Array:
        """How long each term ran in all (P,), in ms; of kernels also outside of samples, so modes have their share."""
        recorded = np.array([term.launches * term.mean_ns / 1e6 for term in self.terms])
        return np.where(recorded > 0, recorded, self.time_ms.sum(axis=0))


@dataclass(frozen=True)
class _Group:
    """How a counter group's samples are divided: `place` is its position among the equations."""

    place: int
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
    cursor: duckdb.DuckDBPyConnection, device: Device, counters: Sequence[str], shards: Mapping[str, Sequence[Shard]]
) -> list[Equations]:
    """The equations of each counter group of `device`; a group with too few samples has no blocks.

    `counters` are the columns of `samples` that hold one, `shards` the good files by table. The cursor gets temporary
    tables.
    """
    width, groups = _load_samples(cursor, device, counters)
    if not groups:
        return []
    first, last = cursor.execute("SELECT min(start_ns), max(end_ns) FROM attr_samples").fetchall()[0]
    terms, assigned = _found_terms(cursor, device, first or 0, last or 0)
    layout = design.Layout.of(len(terms), _profiled(terms))
    made = [_empty(device, group, terms, layout) for group in groups]
    if first is not None:
        _number_blocks(cursor, groups := [_divided(group, layout.columns) for group in groups])
        made = [_empty(device, group, terms, layout) for group in groups]
        _add_all(cursor, made, design.in_order(cursor, device.owners, shards, assigned), layout, width)
    return made


# --- loading ---------------------------------------------------------------------------------------


def _owned(device: Device, alias: str) -> str:
    pairs = ", ".join(f"({sqltext.literal(process)}, {number})" for process, number in device.owners)
    return f"({alias}.process, {alias}.device_id) IN ({pairs})"


def _load_samples(
    cursor: duckdb.DuckDBPyConnection, device: Device, counters: Sequence[str]
) -> tuple[int, list[_Group]]:
    """Temporary table attr_samples with the usable samples; the usual length and the groups."""
    owned = _owned(device, "s")
    counts = ", ".join(f"count(s.{sqltext.name(c)})" for c in counters) or "0"
    rows = cursor.execute(
        f"SELECT s.counter_group, count(*), {counts} FROM raw.samples AS s WHERE {owned} GROUP BY 1 ORDER BY 1"
    ).fetchall()
    # A column that less than half of a group's samples have is none of that group's.
    present = {row[0]: [c for c, n in zip(counters, row[2:], strict=False) if 2 * n > row[1]] for row in rows}
    usual = cursor.execute(
        f"SELECT median(s.end_ns - s.start_ns) FROM raw.samples AS s WHERE {owned} AND s.end_ns > s.start_ns"
    ).fetchall()[0][0]
    width = max(int(usual or 1), 1000)
    used = sorted({c for columns in present.values() for c in columns})
    usable = " ".join(f"WHEN {g} THEN {_all_usable(columns)}" for g, columns in present.items())
    cursor.execute("CREATE OR REPLACE TEMP TABLE attr_busy_buckets AS " + _replayed_buckets(device, width))
    cursor.execute("CREATE OR REPLACE TEMP TABLE attr_pauses AS " + _paused(device))
    has_cycles = "sm_cycles_elapsed" in used
    chosen = "".join(f", {_at_mean_clock(c, has_cycles)} AS {sqltext.name(c)}" for c in used)
    # A copy first: of a Parquet file DuckDB 2.0 folds even isnan(x) to false, because the file's
    # statistics leave NaN out.
    cursor.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE attr_loaded AS
        SELECT s.counter_group, s.start_ns, s.end_ns{"".join(f", s.{sqltext.name(c)}" for c in used)},
            {_is_cut_short(width) if has_cycles else "FALSE"} AS is_cut_short
        FROM raw.samples AS s WHERE {owned}
        """
    )
    cursor.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE attr_samples AS
        SELECT
            row_number() OVER (ORDER BY s.start_ns, s.counter_group) AS sample,
            row_number() OVER (PARTITION BY s.counter_group ORDER BY s.start_ns) - 1 AS place,
            s.counter_group, s.start_ns, s.end_ns, CAST(0 AS INTEGER) AS block, CAST(0 AS INTEGER) AS equation{chosen}
        FROM attr_loaded AS s
        ASOF LEFT JOIN attr_pauses AS p ON s.end_ns > p.start_ns
        WHERE NOT s.is_cut_short AND s.end_ns > s.start_ns AND s.end_ns - s.start_ns <= {LONGEST_SAMPLE * width}
            AND s.start_ns BETWEEN 0 AND 4000000000000000000
            AND CASE s.counter_group {usable} END
            AND s.start_ns // {width} NOT IN (SELECT bucket FROM attr_busy_buckets)
            AND s.end_ns // {width} NOT IN (SELECT bucket FROM attr_busy_buckets)
            AND COALESCE(p.until_ns <= s.start_ns, TRUE)
        WINDOW by_group AS (PARTITION BY s.counter_group)
        """
        if rows
        else "CREATE OR REPLACE TEMP TABLE attr_samples AS SELECT 0 AS start_ns, 0 AS end_ns WHERE FALSE"
    )
    cursor.execute("DROP TABLE attr_loaded")
    kept = (
        dict(cursor.execute("SELECT counter_group, count(*) FROM attr_samples GROUP BY 1").fetchall()) if rows else {}
    )
    return width, [
        _Group(place, g, tuple(present[g]), kept.get(g, 0), seen, 1, 0) for place, (g, seen, *_) in enumerate(rows)
    ]


def _all_usable(columns: Sequence[str]) -> str:
    tests = [f"(s.{n} BETWEEN 0 AND 1e30 AND NOT isnan(s.{n}))" for n in map(sqltext.name, columns)]
    return "COALESCE(" + " AND ".join(tests) + ", FALSE)" if tests else "FALSE"


def _is_cut_short(width: int) -> str:
    """Whether a sample has fewer SM cycles than its neighbours' clock would give: what it lacks is nowhere."""
    clock = "(s.sm_cycles_elapsed / greatest(s.end_ns - s.start_ns, 1))"
    side = "(PARTITION BY s.process, s.device_id, s.counter_group ORDER BY s.start_ns)"
    near = f"abs({{0}}(s.start_ns) OVER {side} - s.start_ns) <= {LONGEST_SAMPLE * width}"
    beside = ", ".join(f"CASE WHEN {near.format(way)} THEN {way}{clock} OVER {side} END" for way in ("lag", "lead"))
    return f"COALESCE({clock} < {CUT_SHORT} * least({beside}), FALSE)"


def _at_mean_clock(column: str, has_cycles: bool) -> str:
    """Busy time of units on the SM clock, at the group's mean clock: then it adds up across clocks that differ."""
    own = f"s.{sqltext.name(column)}"
    if not has_cycles or column not in BY_COLUMN or not BY_COLUMN[column].is_on_sm_clock:
        return own
    cycles, length = "s.sm_cycles_elapsed", "(s.end_ns - s.start_ns)"
    mean = f"(sum({cycles}) OVER by_group / sum(CASE WHEN {cycles} IS NOT NULL THEN {length} END) OVER by_group)"
    return f"COALESCE({own} * {cycles} / {length} / {mean}, {own})"


def _paused(device: Device) -> str:
    """When a process that uses the device did not record what it ran there; until_ns is the latest end so far."""
    processes = ", ".join(sorted({sqltext.literal(process) for process, _ in device.owners}))
    return f"""
        SELECT start_ns, max(end_ns) OVER (ORDER BY start_ns) AS until_ns
        FROM _pause_spans WHERE process IN ({processes})
    """


def _replayed_buckets(device: Device, width: int) -> str:
    """Buckets in which a launch was replayed for exact counters: it has no times, so it explains no sample."""
    return f"""
        SELECT DISTINCT unnest(range((measured_ns - cost_ns) // {width}, measured_ns // {width} + 1)) AS bucket
        FROM (
            SELECT e.measured_ns, max(e.cost_ns) AS cost_ns FROM raw.exact AS e
            WHERE {_owned(device, "e")} AND e.cost_ns BETWEEN 0 AND 600000000000
                AND e.measured_ns BETWEEN 0 AND 4000000000000000000
            GROUP BY e.measured_ns
        ) AS measured
    """


def _found_terms(
    cursor: duckdb.DuckDBPyConnection, device: Device, first: int, last: int
) -> tuple[list[Term], design.Terms]:
    """The terms of all that met the samples, and how launches are given theirs."""
    timed = f"""
        duration_ns BETWEEN 1 AND 1000000000000000 AND start_ns BETWEEN 0 AND 4000000000000000000
        AND start_ns < {last} AND start_ns + duration_ns > {first}
    """
    kernels = _modes(cursor, f"{_owned(device, 'k')} AND {timed}")
    kinds = [
        kind
        for (kind,) in cursor.execute(
            f"SELECT DISTINCT c.kind FROM raw.copies AS c WHERE {_owned(device, 'c')} AND {timed} ORDER BY 1"
        ).fetchall()
    ]
    terms = [Term("idle", "idle")]
    terms += [Term("kernel", "kernel", c, mode.launches, mode.mean_ns) for c, mode in kernels.kept]
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


def _profiled(terms: Sequence[Term]) -> list[int]:
    """Terms whose launches may be found to do their work unevenly: kernels, those with most time."""
    kernels = [number for number, term in enumerate(terms) if term.kind == "kernel"]
    return sorted(sorted(kernels, key=lambda n: -terms[n].launches * terms[n].mean_ns)[:MOST_PROFILES])


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


def _divided(group: _Group, terms: int) -> _Group:
    """With the number of windows and of blocks that its samples, and the memory for them, allow."""
    windows = min(max(group.samples // WINDOW_SAMPLES, 1), MOST_WINDOWS)
    wanted = max(BLOCKS_ALONE, BLOCKS_A_WINDOW * windows)
    blocks = min(wanted, group.samples // 2, max(GRAM_BYTES // (8 * terms * terms), 2 * windows))
    if group.samples < FEWEST_SAMPLES:
        blocks = 0
    return _Group(group.place, group.group, group.counters, group.samples, group.seen, windows, blocks)


def _number_blocks(cursor: duckdb.DuckDBPyConnection, groups: Sequence[_Group]) -> None:
    """Blocks are runs of equally many samples, in time."""
    rows = [(g.group, g.place, g.blocks, g.samples) for g in groups if g.blocks]
    columns = [("counter_group", "INTEGER"), ("equation", "INTEGER"), ("blocks", "BIGINT"), ("samples", "BIGINT")]
    cursor.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE attr_samples AS
        SELECT
            s.* EXCLUDE (place, block, equation),
            CAST(s.place * g.blocks // g.samples AS INTEGER) AS block, g.equation
        FROM attr_samples AS s
        JOIN ({sqltext.values(columns, rows)}) AS g ON g.counter_group = s.counter_group
        ORDER BY s.start_ns
        """
    )


def _empty(device: Device, group: _Group, terms: list[Term], layout: design.Layout) -> Equations:
    b, p, c = group.blocks, layout.columns, len(group.counters)
    blocks = Blocks(
        np.zeros((b, p, p)), np.zeros((b, p, c)), np.zeros((b, c)), np.zeros((b, c)), np.zeros(b), np.zeros(b),
        layout.owner,
    )  # fmt: skip
    return Equations(
        device, group.group, list(group.counters), terms, blocks, group.windows,
        np.full(b, np.inf), np.full(b, -np.inf), np.zeros(b), np.zeros((b, len(terms))), np.zeros((b, c)),
        group.samples, group.seen - group.samples,
    )  # fmt: skip


# --- sums ------------------------------------------------------------------------------------------


def _add_all(
    cursor: duckdb.DuckDBPyConnection,
    made: Sequence[Equations],
    launches: Iterator[Columns],
    layout: design.Layout,
    width: int,
) -> None:
    """Add all samples to the blocks of their equations, some thousand at a time."""
    counters = sorted({c for equation in made if len(equation.blocks.samples) for c in equation.counters})
    found = cursor.execute("SELECT sample, start_ns, end_ns FROM attr_samples ORDER BY sample").fetchnumpy()
    samples = design.Samples(*(np.asarray(found[name], np.int64) for name in ("sample", "start_ns", "end_ns")))
    # The products of one part are summed in a thread while the next part is laid out: numpy's products and most of
    # the rest run without the interpreter's lock.
    with ThreadPoolExecutor(1) as pool:
        adding: Future[None] | None = None
        for part, matrix in design.designs(samples, launches, layout):
            rows = _sample_rows(cursor, samples.number[part], counters, width)
            if adding is not None:
                adding.result()
            adding = pool.submit(_add_part, made, rows, matrix)
        if adding is not None:
            adding.result()


def _add_part(made: Sequence[Equations], rows: Columns, matrix: Array) -> None:
    """Add samples to the equations that they belong to."""
    for number, equation in enumerate(made):
        own = rows["equation"] == number
        if own.all():
            _add_samples(equation, rows, matrix)
        elif own.any():
            _add_samples(equation, {name: column[own] for name, column in rows.items()}, matrix[own])


def _sample_rows(cursor: duckdb.DuckDBPyConnection, numbers: Integers, counters: Sequence[str], width: int) -> Columns:
    """The samples of these numbers, which follow each other; the longer one is, the noisier, and the less it weighs."""
    chosen = "".join(f", COALESCE({sqltext.name(c)}, 0)::DOUBLE AS {sqltext.name(c)}" for c in counters)
    found = cursor.execute(
        f"""
        SELECT
            equation, block, start_ns, end_ns,
            (end_ns - start_ns) / 1e6 AS length, CAST({width} AS DOUBLE) / (end_ns - start_ns) AS weight{chosen}
        FROM attr_samples WHERE sample BETWEEN {numbers[0]} AND {numbers[-1]} ORDER BY sample
        """
    ).fetchnumpy()
    return {name: np.asarray(column) for name, column in found.items()}


def _add_samples(equation: Equations, rows: Columns, matrix: Array) -> None:
    """Add samples in order of time, with their rows of the matrix (N, columns), which is written over."""
    block, weight, length = rows["block"], rows["weight"][:, None], rows["length"]
    root = np.sqrt(weight)
    values = np.stack([rows[counter] for counter in equation.counters], axis=1)
    blocks = equation.blocks
    _add_rows(equation.time_ms, block, matrix[:, : len(equation.terms)])
    # A matrix transposed times itself takes BLAS half of what a product of two takes.
    matrix *= root
    weighted = values * root
    starts = np.flatnonzero(np.diff(block, prepend=-1))
    for start, end in itertools.pairwise([*starts.tolist(), len(block)]):
        x = matrix[start:end]
        blocks.gram[block[start]] += x.T @ x
        blocks.moment[block[start]] += x.T @ weighted[start:end]
    _add_rows(equation.total, block, values)
    _add_rows(blocks.square, block, values * values * weight)
    _add_rows(blocks.flat, block, values * length[:, None] * weight)
    _add_rows(blocks.length, block, length * length * weight[:, 0])
    _add_rows(blocks.samples, block, np.ones(len(block)))
    _add_rows(equation.elapsed_ns, block, length * 1e6)
    np.minimum.at(equation.start_ns, block, rows["start_ns"].astype(np.float64))
    np.maximum.at(equation.end_ns, block, rows["end_ns"].astype(np.float64))


def _add_rows(target: Array, block: Indices, rows: Array) -> None:
    """Add rows to those of their blocks, which are ascending."""
    starts = np.flatnonzero(np.diff(block, prepend=-1))
    target[block[starts]] += np.add.reduceat(rows, starts, axis=0)
