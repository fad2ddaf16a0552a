"""Forms the normal equations of the attribution in SQL, from samples and launches, piece by piece.

Each launch and each sample is spread over buckets of equal time, buckets are hash-joined, and the two
are clipped against each other within the bucket. That is arithmetic and an equality join: an inequality
join of intervals took 60 s where this took 16 (100 M launches). A run is worked through in stretches of
about a million launches, so memory does not grow with its length.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np

from nanalyze.analysis import sqltext
from nanalyze.analysis.attribution_solve import Array, Blocks

MOST_TERMS = 400  # beyond, the classes with the least time share one term
LAUNCHES_A_STRETCH = 1_000_000
SAMPLES_A_STRETCH = 200_000
WINDOW_SAMPLES = 10_000
MOST_WINDOWS = 24
BLOCKS_ALONE = 100
BLOCKS_A_WINDOW = 50
BLOCK_SAMPLES = 20
GRAM_BYTES = 128_000_000
LONGEST_SAMPLE = 20  # times the usual length

IDLE = 0


@dataclass(frozen=True)
class Device:
    """One physical GPU: `key` is its UUID, else process/ordinal; `owners` the (process, ordinal) that see it."""

    key: str
    owners: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Term:
    """What a rate is estimated for: kind is idle, kernel, other or copy; `label` says it in words."""

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


def equations(cursor: duckdb.DuckDBPyConnection, device: Device, counters: Sequence[str]) -> list[Equations]:
    """The equations of each counter group of `device`; a group with too few samples has no blocks.

    `counters` are the columns of `samples` that hold one. The cursor gets temporary tables.
    """
    width, groups = _load_samples(cursor, device, counters)
    if not groups:
        return []
    first, last = cursor.execute("SELECT min(start_ns), max(end_ns) FROM attr_samples").fetchall()[0]
    terms = _load_launches(cursor, device, first or 0, last or 0)
    made = [_empty(device, group, terms) for group in groups]
    if first is not None:
        _number_blocks(cursor, groups := [_divided(group, len(terms)) for group in groups])
        made = [_empty(device, group, terms) for group in groups]
        for start, end in _stretches(cursor, first, last):
            _add_stretch(cursor, made, groups, (start, end), width)
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
    chosen = "".join(f", s.{sqltext.name(c)} AS {sqltext.name(c)}" for c in used)
    # A copy first: of a Parquet file DuckDB 2.0 folds even isnan(x) to false, because the file's
    # statistics leave NaN out.
    cursor.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE attr_loaded AS
        SELECT s.counter_group, s.start_ns, s.end_ns{chosen} FROM raw.samples AS s WHERE {owned}
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
        WHERE s.end_ns > s.start_ns AND s.end_ns - s.start_ns <= {LONGEST_SAMPLE * width}
            AND s.start_ns BETWEEN 0 AND 4000000000000000000
            AND CASE s.counter_group {usable} END
            AND s.start_ns // {width} NOT IN (SELECT bucket FROM attr_busy_buckets)
            AND s.end_ns // {width} NOT IN (SELECT bucket FROM attr_busy_buckets)
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


def _load_launches(cursor: duckdb.DuckDBPyConnection, device: Device, first: int, last: int) -> list[Term]:
    """Temporary table attr_launches (term, start_ns, end_ns) of all that met the samples; the terms."""
    timed = f"""
        duration_ns BETWEEN 1 AND 1000000000000000 AND start_ns BETWEEN 0 AND 4000000000000000000
        AND start_ns < {last} AND start_ns + duration_ns > {first}
    """
    kernels = cursor.execute(
        f"""
        SELECT k.kernel_class_id, count(*), sum(k.duration_ns) FROM raw.kernels AS k
        WHERE {_owned(device, "k")} AND {timed} GROUP BY 1 ORDER BY 3 DESC, 1
        """
    ).fetchall()
    kinds = [
        kind
        for (kind,) in cursor.execute(
            f"SELECT DISTINCT c.kind FROM raw.copies AS c WHERE {_owned(device, 'c')} AND {timed} ORDER BY 1"
        ).fetchall()
    ]
    terms = [Term("idle", "idle")]
    terms += [Term("kernel", "kernel", c, n, float(t) / n) for c, n, t in kernels[:MOST_TERMS]]
    other = len(terms)
    if kernels[MOST_TERMS:]:
        terms.append(Term("other", f"{len(kernels) - MOST_TERMS} kernel classes with the least time"))
    copies = len(terms)
    terms += [Term("copy", f"copy {kind}") for kind in kinds]
    numbered = [(term.kernel_class_id, number) for number, term in enumerate(terms) if term.kind == "kernel"]
    named = [(kind, number) for number, kind in enumerate(kinds, copies)]
    cursor.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE attr_launches AS
        SELECT COALESCE(t.term, {other}) AS term, k.start_ns, k.start_ns + k.duration_ns AS end_ns
        FROM raw.kernels AS k
        LEFT JOIN ({sqltext.values([("id", "BIGINT"), ("term", "INTEGER")], numbered)}) AS t
            ON t.id = k.kernel_class_id
        WHERE {_owned(device, "k")} AND {timed}
        UNION ALL
        SELECT t.term, c.start_ns, c.start_ns + c.duration_ns
        FROM raw.copies AS c
        JOIN ({sqltext.values([("kind", "VARCHAR"), ("term", "INTEGER")], named)}) AS t ON t.kind = c.kind
        WHERE {_owned(device, "c")} AND {timed}
        """
    )
    return terms


# --- blocks, windows and stretches -----------------------------------------------------------------


def _divided(group: _Group, terms: int) -> _Group:
    """With the number of windows and of blocks that its samples, and the memory for them, allow."""
    windows = min(max(group.samples // WINDOW_SAMPLES, 1), MOST_WINDOWS)
    wanted = BLOCKS_ALONE if windows == 1 else BLOCKS_A_WINDOW * windows
    blocks = min(wanted, group.samples // BLOCK_SAMPLES, max(GRAM_BYTES // (8 * terms * terms), 2 * windows))
    if blocks < 4:
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


def _empty(device: Device, group: _Group, terms: list[Term]) -> Equations:
    b, p, c = group.blocks, len(terms), len(group.counters)
    blocks = Blocks(
        np.zeros((b, p, p)), np.zeros((b, p, c)), np.zeros((b, c)), np.zeros((b, c)), np.zeros(b), np.zeros(b)
    )
    return Equations(
        device, group.group, list(group.counters), terms, blocks, group.windows,
        np.full(b, np.inf), np.full(b, -np.inf), np.zeros(b), np.zeros((b, p)), np.zeros((b, c)),
        group.samples, group.seen - group.samples,
    )  # fmt: skip


def _stretches(cursor: duckdb.DuckDBPyConnection, first: int, last: int) -> list[tuple[int, int]]:
    launches, samples = cursor.execute(
        "SELECT (SELECT count(*) FROM attr_launches), (SELECT count(*) FROM attr_samples)"
    ).fetchall()[0]
    count = max(-(-launches // LAUNCHES_A_STRETCH), -(-samples // SAMPLES_A_STRETCH), 1)
    edges = [first + (last - first) * i // count for i in range(count)] + [last]
    return list(itertools.pairwise(edges))


# --- sums of one stretch ---------------------------------------------------------------------------


def _add_stretch(
    cursor: duckdb.DuckDBPyConnection,
    made: Sequence[Equations],
    groups: Sequence[_Group],
    span: tuple[int, int],
    width: int,
) -> None:
    """Add the samples that start in `span` to the blocks of every equation."""
    columns = sorted({c for group in groups if group.blocks for c in group.counters})
    _design(cursor, span, width, columns)
    for equation, (block, a, b, value) in _parts(
        cursor,
        """
        SELECT a.equation, a.block, a.term AS first, b.term AS second, sum(a.x * b.x * a.weight) AS total
        FROM attr_design AS a JOIN attr_design AS b ON b.sample = a.sample AND b.term >= a.term
        GROUP BY ALL
        """,
    ):
        gram = made[equation].blocks.gram
        gram[block, a, b] += value
        mirrored = a != b
        gram[block[mirrored], b[mirrored], a[mirrored]] += value[mirrored]
    names = [sqltext.name(c) for c in columns]
    moments = "".join(f", COALESCE(sum(d.x * s.{n} * d.weight), 0)" for n in names)
    for equation, (block, term, time, *values) in _parts(
        cursor,
        f"""
        SELECT d.equation, d.block, d.term, sum(d.x){moments}
        FROM attr_design AS d JOIN attr_stretch AS s ON s.sample = d.sample GROUP BY ALL
        """,
    ):
        made[equation].time_ms[block, term] += time
        for place, counter in enumerate(made[equation].counters):
            made[equation].blocks.moment[block, term, place] += values[columns.index(counter)]
    _add_totals(cursor, made, columns)


def _add_totals(cursor: duckdb.DuckDBPyConnection, made: Sequence[Equations], columns: Sequence[str]) -> None:
    names = [sqltext.name(c) for c in columns]
    sums = "".join(
        f", COALESCE(sum({n} * {n} * weight), 0), COALESCE(sum({n} * length * weight), 0), COALESCE(sum({n}), 0)"
        for n in names
    )
    for equation, (block, count, length, elapsed, start, end, *values) in _parts(
        cursor,
        f"""
        SELECT equation, block, count(*), sum(length * length * weight), sum(length), min(start_ns), max(end_ns){sums}
        FROM attr_stretch GROUP BY ALL
        """,
    ):
        target = made[equation]
        target.blocks.samples[block] += count
        target.blocks.length[block] += length
        target.elapsed_ns[block] += elapsed * 1e6
        target.start_ns[block] = np.minimum(target.start_ns[block], start)
        target.end_ns[block] = np.maximum(target.end_ns[block], end)
        for place, counter in enumerate(target.counters):
            at = 3 * columns.index(counter)
            target.blocks.square[block, place] += values[at]
            target.blocks.flat[block, place] += values[at + 1]
            target.total[block, place] += values[at + 2]


def _parts(cursor: duckdb.DuckDBPyConnection, query: str) -> Iterator[tuple[int, list[Any]]]:
    """(equation, further columns) of the result for each equation, whose number is the first column."""
    first, *others = [np.asarray(column) for column in cursor.execute(query).fetchnumpy().values()]
    for equation in np.unique(first):
        rows = first == equation
        yield int(equation), [column[rows] for column in others]


def _design(cursor: duckdb.DuckDBPyConnection, span: tuple[int, int], width: int, columns: Sequence[str]) -> None:
    """attr_stretch: samples of the stretch; attr_design: ms of each term in each of them, idle included.

    A sample's weight is the usual length over its own: the longer, the noisier. Time in which several
    kernels ran counts for each in full; `own` marks the part of a launch that no earlier one covers,
    so that those parts add up to the busy time.
    """
    start, end = span
    chosen = "".join(f", {sqltext.name(c)}" for c in columns)
    cursor.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE attr_stretch AS
        SELECT
            sample, equation, block, start_ns, end_ns,
            (end_ns - start_ns) / 1e6 AS length, CAST({width} AS DOUBLE) / (end_ns - start_ns) AS weight{chosen}
        FROM attr_samples WHERE start_ns >= {start} AND start_ns < {end}
        """
    )
    reach = end + LONGEST_SAMPLE * width
    cursor.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE attr_design AS
        WITH launches AS (
            SELECT term, greatest(start_ns, {start}) AS s, least(end_ns, {reach}) AS e
            FROM attr_launches WHERE start_ns < {reach} AND end_ns > {start}
        ),
        pieces AS (
            SELECT
                term, s, e,
                greatest(s, COALESCE(
                    max(e) OVER (ORDER BY s, e, term ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), s
                )) AS own
            FROM launches
        ),
        spread AS (
            SELECT term, s, e, own, unnest(range(s // {width}, (e - 1) // {width} + 1)) AS bucket FROM pieces
        ),
        bucketed AS (
            SELECT
                sample, start_ns AS s, end_ns AS e,
                unnest(range(start_ns // {width}, (end_ns - 1) // {width} + 1)) AS bucket
            FROM attr_stretch
        ),
        clipped AS (
            SELECT
                b.sample, p.term,
                greatest(p.s, b.s, b.bucket * {width}) AS s, p.own, least(p.e, b.e, (b.bucket + 1) * {width}) AS e
            FROM bucketed AS b JOIN spread AS p ON p.bucket = b.bucket
        ),
        met AS (
            SELECT sample, term, sum(e - s) / 1e6 AS x, sum(greatest(e - greatest(s, own), 0)) / 1e6 AS busy
            FROM clipped WHERE e > s GROUP BY sample, term
        ),
        idle AS (
            SELECT s.sample, any_value(s.length) - COALESCE(sum(o.busy), 0) AS x
            FROM attr_stretch AS s LEFT JOIN met AS o ON o.sample = s.sample GROUP BY s.sample
        )
        SELECT t.sample, s.equation, s.block, s.weight, t.term, t.x
        FROM (
            SELECT sample, CAST(term AS INTEGER) AS term, x FROM met
            UNION ALL SELECT sample, {IDLE}, x FROM idle WHERE x > 1e-6
        ) AS t
        JOIN attr_stretch AS s ON s.sample = t.sample
        """
    )
