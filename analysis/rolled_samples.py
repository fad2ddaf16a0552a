"""Sampled counters of time that was rolled up: attributed window by window before single launches are given up.

Samples can be attributed to kernels only beside the launches. So `windows` works out, from whole shards of samples and
the launches of their time, each class's counters with their intervals, as `attribution` does for a run; the table
`sampled_windows` keeps them, and `with_rolled_up` puts the windows together with what samples are still there.
docs/attribution.md derives the estimates, docs/run-directory.md says what a window keeps and what not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb

from nanalyze.analysis import attribution, catalog, connection, sqltext
from nanalyze.analysis.attribution_counters import unit_of
from nanalyze.rundir import runfile, sampled
from nanalyze.rundir import shards as shardfiles
from nanalyze.rundir.schema import COPIES, KERNELS, RANGES, ROLLED_UP, SAMPLED_WINDOWS, SAMPLES, TABLES
from nanalyze.rundir.shards import PARTITION_NAME, Shard

if TYPE_CHECKING:
    import pyarrow as pa

# A launch that met a sample began at most so long before: longer ones are not looked for in earlier files.
LONGEST_NS = 600_000_000_000
# Bits of the mantissa that are kept, so that the rest costs nothing in a file: a value within 8e-6, errors within
# 1.3e-4, beside a systematic part of 1e-2.
VALUE_BITS, ERROR_BITS = 17, 13
# What a launch does; everything else is a share of time, or a ratio.
_A_LAUNCH = frozenset(
    {f.counter for f in sampled.FORMULAS if f.denominator == "launch"}
    | {rate.counter for rate in sampled.PIPE_RATES}
    | {"duration_ns"}
)
# Their upper end is what was not sampled, which more windows do not tell either.
_BOUNDED = frozenset(speed.counter for speed in sampled.SPEEDS_OF_LIGHT)


# --- making windows ----------------------------------------------------------------------------------


def windows(run_dir: Path, samples: Sequence[Shard]) -> pa.Table:
    """The rows of `sampled_windows` for these shards of `samples`, which are whole: one window.

    No rows where too few samples met launches. Raises RunError, and duckdb.Error for what DuckDB cannot read.
    """
    root = run_dir.resolve()
    found = catalog.of_shards(root, [*samples, *_beside(root, samples)], verify=True)
    info = runfile.read(run_dir)
    with connection.connect(root, info, found, {}, False) as opened:
        first, last = opened.execute("SELECT min(start_ns), max(end_ns) FROM raw.samples").fetchall()[0]
        made = attribution.attribute(opened, found.extra_columns.get(SAMPLES.name, []), found.shards)
    return _rows(made, first or 0, last or 0)


def _beside(root: Path, samples: Sequence[Shard]) -> Iterable[Shard]:
    """Shards of other tables that the attribution reads, of launches and copies only those of the samples' time."""
    spans = [_span(shard) for shard in samples]
    first, last = min(start for start, _ in spans), max(end for _, end in spans)
    left_out = {SAMPLES.name, RANGES.name, *ROLLED_UP}
    for table in (name for name in TABLES if name not in left_out):
        for shard in _listed(root, table):
            if table in (KERNELS.name, COPIES.name):
                start, end = _span(shard)
                if end < first - LONGEST_NS or start > last + LONGEST_NS:
                    continue
            yield shard


def _listed(root: Path, table: str) -> list[Shard]:
    found = []
    for folder in sorted((root / table).glob("process=*")):
        match = PARTITION_NAME.match(folder.name)
        names = sorted(folder.iterdir()) if match is not None else []
        found += [s for path in names if (s := shardfiles.parse(path, table, match.group(1))) is not None]  # type: ignore[union-attr]
    return shardfiles.outermost(found)


def _span(shard: Shard) -> tuple[int, int]:
    """Least and greatest start by the footer; all of time where it does not say."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from nanalyze.rundir.compaction import statistics

    try:
        start, end = statistics(pq.read_metadata(shard.path))
    except (pa.ArrowException, OSError, ValueError):
        start, end = None, None
    return (0 if start is None else start), (2**63 - 1 if end is None else end)


def _rows(made: Mapping[str, pa.Table], first: int, last: int) -> pa.Table:
    import pyarrow as pa

    time = _sampled_time(made["attribution"].to_pylist())
    columns: dict[str, list[Any]] = {column.name: [] for column in SAMPLED_WINDOWS.columns}
    for row in made["sampled_counters"].to_pylist():
        if row["value"] is None or row["low"] is None or row["high"] is None:
            continue
        columns["start_ns"].append(first)
        columns["end_ns"].append(last)
        columns["time_ns"].append(time.get(row["kernel_class_id"], 0))
        for name in ("kernel_class_id", "counter", "launches", "missing"):
            columns[name].append(row[name])
        value, is_certain = _cut(row["value"], VALUE_BITS), row["standard_error"] is None
        columns["value"].append(value)
        for name in ("standard_error", "lasting_error"):
            columns[name].append(None if row[name] is None else _cut(row[name], ERROR_BITS))
        # An interval holds its value after rounding too.
        columns["low"].append(value if is_certain else min(_cut(row["low"], ERROR_BITS), value))
        columns["high"].append(value if is_certain else max(_cut(row["high"], ERROR_BITS), value))
    schema = SAMPLED_WINDOWS.arrow_schema()
    return pa.table([pa.array(columns[field.name], field.type) for field in schema], schema=schema)


def _sampled_time(rows: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """How long each class ran while samples were taken (ns), over all devices and groups."""
    each = {(r["kernel_class_id"], r["device"], r["counter_group"]): r["time_ns"] for r in rows}
    total: dict[int, int] = {}
    for (class_id, _, _), time in each.items():
        if class_id is not None and time is not None:
            total[class_id] = total.get(class_id, 0) + time
    return total


def _cut(value: float, bits: int) -> float:
    """`value` rounded to so many bits of mantissa."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 2**bits), exponent - bits)


# --- putting windows together --------------------------------------------------------------------------

_COLUMNS = "kernel_class_id, counter, value, standard_error, lasting_error, low, high, launches, time_ns, missing"
# What samples leave open in one window they do not in another, so it shrinks as windows are added; the lasting part of
# the error, in all of them alike, does not. Intervals shrink as the error does, but for ends that stand at a bound:
# a rate that may be zero was held there, so a mean of such rates is too high by what no window can tell. Nor does the
# upper end shrink of what is bounded by parts that were not sampled.
_TOGETHER = """
    WITH weighted AS (
        SELECT
            *,
            greatest(CASE WHEN counter IN ({a_launch}) THEN launches ELSE time_ns END, 0) + 1e-9 AS weight,
            low <= 0 AND standard_error IS NOT NULL AS is_cut_below,
            high >= CASE WHEN right(counter, 4) = '_pct' THEN 100 ELSE CAST('inf' AS DOUBLE) END AS is_cut_above
        FROM ({parts}) AS parts
        WHERE isfinite(value) AND isfinite(low) AND isfinite(high) AND coalesce(isfinite(standard_error), TRUE)
            AND coalesce(isfinite(lasting_error), TRUE) AND abs(value) < 1e150 AND low <= value AND value <= high
    ),
    summed AS (
        SELECT
            kernel_class_id, counter,
            sum(weight * value) / sum(weight) AS value,
            count(standard_error) = count(*) AS has_error,
            sqrt(sum(weight * weight * greatest(standard_error * standard_error - lasting_error * lasting_error, 0)))
                / sum(weight) AS noise,
            sum(weight * lasting_error) / sum(weight) AS lasting,
            sum(weight * standard_error) / sum(weight) AS added,
            sum(weight * CASE WHEN is_cut_below THEN greatest(value, high - value) ELSE 0 END) / sum(weight)
                AS below_cut,
            sum(weight * CASE WHEN is_cut_below THEN 0 ELSE value - low END) / sum(weight) AS below,
            sum(weight * CASE WHEN is_cut_above THEN high - value ELSE 0 END) / sum(weight) AS above_cut,
            sum(weight * CASE WHEN is_cut_above THEN 0 ELSE high - value END) / sum(weight) AS above,
            CAST(sum(greatest(launches, 0)) AS BIGINT) AS launches,
            list_sort(list(DISTINCT missing) FILTER (WHERE missing IS NOT NULL)) AS missing
        FROM weighted
        GROUP BY kernel_class_id, counter
    ),
    judged AS (
        SELECT *, CASE WHEN has_error THEN sqrt(noise * noise + lasting * lasting) END AS error
        FROM summed
    ),
    shrunk AS (
        SELECT *, CASE WHEN has_error AND added > 0 THEN least(error / added, 1) ELSE 1 END AS shrink FROM judged
    )
    SELECT
        kernel_class_id, counter, value, error AS standard_error, lasting AS lasting_error,
        CASE WHEN has_error THEN greatest(value - below_cut - below * shrink, 0) ELSE value - below END AS low,
        value + above_cut + above * CASE WHEN counter IN ({bounded}) OR len(missing) > 0 THEN 1 ELSE shrink END AS high,
        launches, missing
    FROM shrunk ORDER BY kernel_class_id, counter
"""


def with_rolled_up(cursor: duckdb.DuckDBPyConnection, made: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
    """`made`, what `attribution.attribute` gives for the samples that are there, and windows that were rolled up.

    Raises duckdb.Error.
    """
    import pyarrow as pa

    if not cursor.execute("SELECT count(*) FROM raw.sampled_windows").fetchall()[0][0]:
        return dict(made)
    counted = made["sampled_counters"]
    time = _sampled_time(made["attribution"].to_pylist())
    own = [time.get(class_id, 0) for class_id in counted.column("kernel_class_id").to_pylist()]
    cursor.register("made_now", counted.append_column("time_ns", pa.array(own, pa.int64())))
    rows = combined(cursor, f"SELECT {_COLUMNS} FROM made_now UNION ALL SELECT {_COLUMNS} FROM raw.sampled_windows")
    cursor.unregister("made_now")
    schema = counted.schema
    columns = [pa.array([row[field.name] for row in rows], field.type) for field in schema]
    return {**made, "sampled_counters": pa.table(columns, schema=schema)}


def combined(cursor: duckdb.DuckDBPyConnection, parts: str) -> list[dict[str, Any]]:
    """One row for each class and counter of `parts`, a SELECT of windows. Raises duckdb.Error."""
    found = cursor.execute(
        _TOGETHER.format(
            parts=parts,
            a_launch=", ".join(map(sqltext.literal, sorted(_A_LAUNCH))),
            bounded=", ".join(map(sqltext.literal, sorted(_BOUNDED))),
        )
    )
    names = [column[0] for column in found.description or []]
    rows = [dict(zip(names, row, strict=True)) for row in found.fetchall()]
    for row in rows:
        missing = sorted({name for text in row["missing"] or () for name in text.split(", ")})
        row |= {"missing": ", ".join(missing) or None, "unit": unit_of(row["counter"])}
        # Nine digits, as in the attribution: sums over threads differ in the last ones, a report must not.
        for name in ("value", "standard_error", "lasting_error", "low", "high"):
            row[name] = None if row[name] is None else float(f"{row[name]:.9g}")
    return rows
