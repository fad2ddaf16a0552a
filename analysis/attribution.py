"""Attributes samples of the whole device to the kernel classes that ran in them.

A sample's counter is the sum, over all that ran in it, of the time each ran times its own rate. Over
thousands of samples the rates follow by non-negative least squares, also for kernels far shorter than
a sample. `attribution_normal` forms the equations, `attribution_solve` solves them, `attribution_counters`
turns rates into counters; here they meet. docs/attribution.md derives the
method, says when it fails and what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np

from nanalyze.analysis import attribution_counters as derivation
from nanalyze.analysis.attribution_modes import Estimates, by_class
from nanalyze.analysis.attribution_normal import Equations, equations, sampled_devices
from nanalyze.analysis.attribution_properties import Facts
from nanalyze.analysis.attribution_samples import Disturbances
from nanalyze.analysis.attribution_solve import INFLATION_LIMIT, Fit
from nanalyze.analysis.made import ATTRIBUTION, Columns
from nanalyze.rundir.sampled import BY_COLUMN
from nanalyze.rundir.shards import Shard

if TYPE_CHECKING:
    import pyarrow as pa

TABLES = ATTRIBUTION  # what `attribute` fills
Rows = dict[str, list[tuple[object, ...]]]


def attribute(
    cursor: duckdb.DuckDBPyConnection,
    counters: Sequence[str],
    shards: Mapping[str, Sequence[Shard]],
    inflation_limit: float = INFLATION_LIMIT,
) -> dict[str, pa.Table]:
    """The content of `TABLES`: estimates of every device whose samples hold any of `counters`.

    `cursor` sees the schemas `raw` and `main` of a run, whose good files `shards` lists by table.
    Classes whose variance inflation exceeds `inflation_limit` are merged with others. Raises
    duckdb.Error.
    """
    from threadpoolctl import threadpool_limits  # sets a variable of the environment when it is imported

    rows: Rows = {name: [] for name in TABLES}
    found: dict[tuple[int, str], list[tuple[float, derivation.Value]]] = {}
    launches: dict[int, int] = {}
    # Its threads wait for each other by spinning: where other work holds cores, ten times as long as without them.
    with threadpool_limits(limits=1, user_api="blas"):
        for solved in _solved_devices(cursor, counters, shards, inflation_limit):
            for name, own in solved.rows.items():
                rows[name] += own
            _collect(found, launches, solved)
    for (class_id, counter), values in sorted(found.items()):
        rows["sampled_counters"].append(_counter_row(class_id, counter, derivation.combined(values), launches))
    return {name: _table(columns, rows[name]) for name, columns in TABLES.items()}


@dataclass
class _Solved:
    """What came of one device: rows of some of `TABLES`, counters of classes with their time, and launches."""

    rows: Rows
    counters: list[tuple[int, str, float, derivation.Value]] = field(default_factory=list)
    launches: dict[int, int] = field(default_factory=dict)


def _solved_devices(
    cursor: duckdb.DuckDBPyConnection, counters: Sequence[str], shards: Mapping[str, Sequence[Shard]], limit: float
) -> Iterator[_Solved]:
    """Devices in order. While the equations of one are solved in a thread, those of the next are formed.

    Each of the two takes about half of the time, most of it without the interpreter's lock; all that `cursor` does it
    does in the caller's thread, so that it can be interrupted.
    """
    disturbances, facts = Disturbances.of(cursor), Facts.of(cursor)
    with ThreadPoolExecutor(1) as pool:
        solving: Future[_Solved] | None = None
        for device in sampled_devices(cursor):
            properties = facts.properties(cursor, device.owners)
            made = equations(cursor, device, counters, shards, disturbances, properties.sm_shares)
            if solving is not None:
                yield solving.result()
            solving = pool.submit(_solved, made, properties, limit)
            del made  # some hundred MB: no more than two devices' at any moment
        if solving is not None:
            yield solving.result()


def _solved(made: Sequence[Equations], properties: derivation.Properties, limit: float) -> _Solved:
    fits = [_fitted(equation, limit) for equation in made]
    found = _Solved({"attribution_quality": [], "attribution": [], "attribution_windows": []})
    for equation, own in zip(made, fits, strict=True):
        clock = derivation.clock_method(equation, properties)
        found.rows["attribution_quality"] += _quality(equation, own, clock)
        if own is not None:
            found.rows["attribution"] += _estimates(equation, own)
            found.rows["attribution_windows"] += _windows(equation, own)
    rates = _rates(properties, made, fits)
    if rates is not None:
        found.counters, found.launches = list(_counters(rates)), _launches(rates)
    return found


def _fitted(equation: Equations, limit: float) -> Fit | None:
    if not len(equation.blocks.samples) or not equation.counters:
        return None
    return equation.fit(limit)


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
        found = by_class(equation.fit_window(inside, solved), classes, time_ms)
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


def _counters(rates: derivation.DeviceRates) -> Iterator[tuple[int, str, float, derivation.Value]]:
    """Class, counter, sampled time in ms and value."""
    time_ms = rates.time_ms.tolist()
    for counter, values in derivation.derived(rates).items():
        for class_id, time, value in zip(rates.identifiers, time_ms, values, strict=True):
            if class_id is not None and value is not None and time > 0:
                yield class_id, counter, time, value


def _launches(rates: derivation.DeviceRates) -> dict[int, int]:
    found: dict[int, int] = {}
    for class_id, count in zip(rates.identifiers, rates.launches, strict=True):
        if class_id is not None:
            found[class_id] = found.get(class_id, 0) + count
    return found


def _collect(
    found: dict[tuple[int, str], list[tuple[float, derivation.Value]]], launches: dict[int, int], solved: _Solved
) -> None:
    for class_id, counter, time, value in solved.counters:
        found.setdefault((class_id, counter), []).append((time, value))
    for class_id, count in solved.launches.items():
        launches[class_id] = launches.get(class_id, 0) + count
