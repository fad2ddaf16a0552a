"""Attributes samples of the whole device to the kernel classes that ran in them.

A sample's counter is the sum, over all that ran in it, of the time each ran times its own rate. Over
thousands of samples the rates follow by non-negative least squares, also for kernels far shorter than
a sample. `attribution_normal` forms the equations in SQL, `attribution_solve` solves them,
`attribution_counters` turns rates into counters; here they meet. docs/attribution.md derives the
method, says when it fails and what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np

from nanalyze.analysis import attribution_counters as derivation
from nanalyze.analysis import sqltext
from nanalyze.analysis.attribution_modes import Estimates, by_class
from nanalyze.analysis.attribution_normal import Device, Equations, equations, sampled_devices
from nanalyze.analysis.attribution_solve import INFLATION_LIMIT, Fit, fit, fit_members
from nanalyze.rundir.sampled import BY_COLUMN, TRACING_INSTRUCTIONS
from nanalyze.rundir.shards import Shard

if TYPE_CHECKING:
    import pyarrow as pa

Columns = tuple[tuple[str, str], ...]

_ESTIMATE: Columns = (
    ("kernel_class_id", "BIGINT"),
    ("term", "VARCHAR"),
    ("rate_per_s", "DOUBLE"),
    ("standard_error", "DOUBLE"),
    ("low_per_s", "DOUBLE"),
    ("high_per_s", "DOUBLE"),
    ("time_ns", "BIGINT"),
)
_SOURCE: Columns = (
    ("device", "VARCHAR"),
    ("counter_group", "INTEGER"),
    ("counter", "VARCHAR"),
    ("unit", "VARCHAR"),
)

# The relations that `attribute` fills, in schema `raw`.
TABLES: dict[str, Columns] = {
    "attribution": (
        *_SOURCE,
        *_ESTIMATE,
        ("launches", "BIGINT"),
        ("is_told_apart", "BOOLEAN"),
        ("merged_terms", "BIGINT"),
        ("variance_inflation", "DOUBLE"),
        ("degrees", "DOUBLE"),
    ),
    "attribution_windows": (
        *_SOURCE,
        ("window_number", "INTEGER"),
        ("start_ns", "BIGINT"),
        ("end_ns", "BIGINT"),
        *_ESTIMATE,
        ("is_told_apart", "BOOLEAN"),
    ),
    "attribution_quality": (
        *_SOURCE,
        ("start_ns", "BIGINT"),
        ("end_ns", "BIGINT"),
        ("samples", "BIGINT"),
        ("samples_dropped", "BIGINT"),
        ("blocks", "BIGINT"),
        ("terms", "BIGINT"),
        ("terms_merged", "BIGINT"),
        ("explained", "DOUBLE"),
        ("mean_per_s", "DOUBLE"),
        ("clock_method", "VARCHAR"),
    ),
    "sampled_counters": (
        ("kernel_class_id", "BIGINT"),
        ("counter", "VARCHAR"),
        ("value", "DOUBLE"),
        ("unit", "VARCHAR"),
        ("standard_error", "DOUBLE"),
        ("low", "DOUBLE"),
        ("high", "DOUBLE"),
        ("launches", "BIGINT"),
        ("missing", "VARCHAR"),
        ("lasting_error", "DOUBLE"),
    ),
}

Rows = dict[str, list[tuple[object, ...]]]


def attribute(
    cursor: duckdb.DuckDBPyConnection,
    counters: Sequence[str],
    shards: Mapping[str, Sequence[Shard]],
    inflation_limit: float = INFLATION_LIMIT,
) -> dict[str, pa.Table]:
    """The content of `TABLES`: estimates of every device whose samples hold any of `counters`.

    `cursor` sees the schemas `raw` and `main` of a run, whose good files `shards` lists by table; temporary tables
    are made on it. Classes whose variance inflation exceeds `inflation_limit` are merged with others. Raises
    duckdb.Error.
    """
    rows: Rows = {name: [] for name in TABLES}
    found: dict[tuple[int, str], list[tuple[float, derivation.Value]]] = {}
    launches: dict[int, int] = {}
    for device in sampled_devices(cursor):
        made = equations(cursor, device, counters, shards)
        fits = [_fitted(equation, inflation_limit) for equation in made]
        properties = _properties(cursor, device)
        for equation, solved in zip(made, fits, strict=True):
            rows["attribution_quality"] += _quality(equation, solved, derivation.clock_method(equation, properties))
            if solved is not None:
                rows["attribution"] += _estimates(equation, solved)
                rows["attribution_windows"] += _windows(equation, solved)
        _collect(found, launches, _rates(properties, made, fits))
    for (class_id, counter), values in sorted(found.items()):
        rows["sampled_counters"].append(_counter_row(class_id, counter, derivation.combined(values), launches))
    return {name: _table(columns, rows[name]) for name, columns in TABLES.items()}


def _fitted(equation: Equations, limit: float) -> Fit | None:
    if not len(equation.blocks.samples) or not equation.counters:
        return None
    return fit(equation.blocks, limit, [terms for terms in equation.classes() if len(terms) > 1])


# --- rows ------------------------------------------------------------------------------------------


def _quality(equation: Equations, solved: Fit | None, clock: str | None) -> Iterator[tuple[object, ...]]:
    if solved is None:
        for counter in equation.counters:
            counted = (equation.samples, equation.dropped, 0, 0, 0)
            yield (*_source(equation, counter), None, None, *counted, None, None, clock)
        return
    seconds = equation.elapsed_ns.sum() / 1e9
    merged = sum(len(members) for members in solved.members if len(members) > 1)
    span = (int(equation.start_ns.min()), int(equation.end_ns.max()))
    count = sum(len(members) for members in solved.members)
    for place, counter in enumerate(equation.counters):
        mean = equation.total[:, place].sum() / seconds
        yield (
            *_source(equation, counter), *span, equation.samples, equation.dropped,
            len(equation.blocks.samples), count, merged, _number(solved.explained[place]), _number(mean), clock,
        )  # fmt: skip


def _source(equation: Equations, counter: str) -> tuple[object, ...]:
    unit = BY_COLUMN[counter].unit if counter in BY_COLUMN else None
    return equation.device.key, equation.group, counter, unit


def _estimates(equation: Equations, solved: Fit) -> Iterator[tuple[object, ...]]:
    classes = equation.classes()
    found = by_class(solved, classes, equation.term_time())
    time_ms = equation.time_ms.sum(axis=0)
    for place, counter in enumerate(equation.counters):
        for at in np.flatnonzero(found.merged).tolist():
            terms = [equation.terms[number] for number in classes[at]]
            launches = sum(term.launches for term in terms) if terms[0].kind == "kernel" else None
            yield (
                *_source(equation, counter), *_estimate(equation, classes[at], found, at, place, time_ms),
                launches, bool(found.merged[at] == 1), int(found.merged[at]),
                _number(found.inflation[at]), _number(found.degrees[at]),
            )  # fmt: skip


def _windows(equation: Equations, solved: Fit) -> Iterator[tuple[object, ...]]:
    count, classes = len(equation.blocks.samples), equation.classes()
    for number in range(equation.windows if equation.windows > 1 else 0):
        inside = np.arange(count) * equation.windows // count == number
        time_ms = equation.time_ms[inside].sum(axis=0)
        found = by_class(fit_members(equation.blocks.take(inside), solved.members, solved.uneven), classes, time_ms)
        span = (number, int(equation.start_ns[inside].min()), int(equation.end_ns[inside].max()))
        for place, counter in enumerate(equation.counters):
            for at in np.flatnonzero(found.merged).tolist():
                estimate = _estimate(equation, classes[at], found, at, place, time_ms)
                yield *_source(equation, counter), *span, *estimate, bool(found.merged[at] == 1)


def _estimate(
    equation: Equations, terms: Sequence[int], found: Estimates, at: int, place: int, time_ms: Any
) -> tuple[object, ...]:
    term = equation.terms[terms[0]]
    rate = float(found.rate[at, place]) * 1e3
    error = float(found.standard_error[at, place]) * 1e3
    reach = error * float(derivation.quantile(found.degrees[at : at + 1])[0])
    return (
        term.kernel_class_id, term.label, _number(rate), _number(error),
        _number(max(rate - reach, 0.0)) if math.isfinite(reach) else None, _number(rate + reach),
        round(time_ms[list(terms)].sum() * 1e6),
    )  # fmt: skip


def _counter_row(class_id: int, counter: str, value: derivation.Value, launches: dict[int, int]) -> tuple[object, ...]:
    return (
        class_id, counter, _number(value.value), derivation.unit_of(counter), _number(value.standard_error),
        _number(value.low), _number(value.high), launches[class_id], value.missing,
        None if value.standard_error is None else _number(value.lasting),
    )  # fmt: skip


def _number(value: float | None) -> float | None:
    """Nine digits: sums over threads differ in the last ones from run to run, a report must not."""
    return float(f"{value:.9g}") if value is not None and math.isfinite(value) else None


def _table(columns: Columns, rows: Sequence[tuple[object, ...]]) -> pa.Table:
    import pyarrow as pa

    types = {"BIGINT": pa.int64(), "INTEGER": pa.int32(), "DOUBLE": pa.float64(), "BOOLEAN": pa.bool_()}
    arrays = [
        pa.array([row[place] for row in rows], types.get(kind, pa.string())) for place, (_, kind) in enumerate(columns)
    ]
    return pa.table(arrays, names=[name for name, _ in columns])


# --- counters of a device --------------------------------------------------------------------------


def _rates(
    properties: derivation.Properties, made: Sequence[Equations], fits: Sequence[Fit | None]
) -> derivation.DeviceRates | None:
    solved = [(equation, own) for equation, own in zip(made, fits, strict=True) if own is not None]
    if not solved:
        return None
    return derivation.DeviceRates([e for e, _ in solved], [f for _, f in solved], properties)


def _collect(
    found: dict[tuple[int, str], list[tuple[float, derivation.Value]]],
    launches: dict[int, int],
    rates: derivation.DeviceRates | None,
) -> None:
    if rates is None:
        return
    for counter, values in derivation.derived(rates).items():
        for class_id, time, value in zip(rates.identifiers, rates.time_ms.tolist(), values, strict=True):
            if class_id is not None and value is not None and time > 0:
                found.setdefault((class_id, counter), []).append((time, value))
    for class_id, count in zip(rates.identifiers, rates.launches, strict=True):
        if class_id is not None:
            launches[class_id] = launches.get(class_id, 0) + count


def _properties(cursor: duckdb.DuckDBPyConnection, device: Device) -> derivation.Properties:
    pairs = ", ".join(f"({sqltext.literal(process)}, {number})" for process, number in device.owners)
    owned = f"(process, device_id) IN ({pairs})"
    found = cursor.execute(f"SELECT * FROM devices WHERE {owned} ORDER BY process, device_id LIMIT 1")
    names = [column[0] for column in found.description or []]
    row: tuple[Any, ...] = (found.fetchall() or [()])[0]
    values = {
        name: float(value)
        for name, value in zip(names, row, strict=False)
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    readings = cursor.execute(
        f"SELECT time_ns, sm_clock_hz, memory_clock_hz FROM device_state WHERE {owned} ORDER BY ALL"
    ).fetchall()
    added = _tracing_instructions(cursor, device, values)
    return derivation.Properties(values, _readings(readings, 1), _readings(readings, 2), added)


def _tracing_instructions(
    cursor: duckdb.DuckDBPyConnection, device: Device, values: Mapping[str, float]
) -> dict[int | None, float]:
    """Warp instructions that CUPTI added to a launch of each class; none where no CUPTI timed the kernels."""
    each = TRACING_INSTRUCTIONS.get((int(values.get("cc_major", 0)), int(values.get("cc_minor", 0))))
    processes = ", ".join(sqltext.literal(process) for process, _ in device.owners)
    timed = f"SELECT count(*) FROM processes WHERE process IN ({processes}) AND cupti_version IS NOT NULL"
    if each is None or not cursor.execute(timed).fetchall()[0][0]:
        return {}
    found = cursor.execute(
        "SELECT kernel_class_id, grid_x::DOUBLE * grid_y * grid_z * ceil(block_x::DOUBLE * block_y * block_z / ?) "
        "FROM kernel_classes",
        [values.get("warp_size", 32.0)],
    ).fetchall()
    return {class_id: each * warps for class_id, warps in found if warps is not None}


def _readings(rows: Sequence[tuple[Any, ...]], column: int) -> tuple[Any, Any]:
    known = [(row[0], row[column]) for row in rows if row[column] is not None and row[column] > 0]
    return np.array([at for at, _ in known], dtype=float), np.array([value for _, value in known], dtype=float)
