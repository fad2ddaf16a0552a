"""What `recorder.measure` found: the page's tables of its configurations and variants, and their CSV file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from nanalyze.analysis.report import values
from nanalyze.analysis.report.cells import Cell, Grid, Head, Row, measured, numbers, words
from nanalyze.rundir.errors import NanalyzeError
from nanalyze.rundir.measurement import ATTRIBUTE

if TYPE_CHECKING:
    from nanalyze.analysis.run import Run

SHOWN_MEASUREMENTS = 6  # the latest
SHOWN_ROWS = 100  # of each
SHOWN_WARNINGS = 6
MOST_LAUNCHES = 2_000_000  # in the processes of a measurement, which are read into memory
# Columns of the page, where anything has them; all that was measured is in the CSV file.
PERCENTAGES = {"compute_pct": "Compute", "memory_pct": "Memory", "l2_hit_pct": "L2 hits", "occupancy_pct": "Occupancy"}
BYTES = {"dram_read_bytes": "DRAM read", "dram_write_bytes": "DRAM written", "l2_bytes": "L2 traffic"}
NAMES = ("configuration", "variant", "metric", "value", "low", "high", "unit", "repetitions", "method", "error")
STATEMENT = f"""
SELECT attributes FROM ranges
WHERE source = 'annotate' AND end_ns IS NOT NULL AND attributes LIKE '%"{ATTRIBUTE}"%"configurations"%'
ORDER BY start_ns
"""
LAUNCHES = """
SELECT count(*) AS launches FROM kernels
WHERE process IN (SELECT process FROM ranges WHERE source = 'annotate' AND contains(attributes, $id))
"""


@dataclass(frozen=True)
class Measurement:
    """One measurement: `rows` as in `Measured.to_pandas`, with the `ratio` to the first of several variants."""

    id: str
    settings: Mapping[str, Any]
    rows: Sequence[Row]
    warnings: Sequence[str]
    trouble: str = ""


def collect(run: Run) -> list[Measurement]:
    """The measurements of a run, the latest last; none where the run was not written by `recorder.measure`."""
    ranges = run.arrow(STATEMENT).to_pylist()
    if not ranges:  # nearly always: then nothing of it is imported
        return []
    from nanalyze.analysis.measured_read import asked

    found = {str(about["id"]): about for about in asked(ranges) if "id" in about}
    return [_read(run, identity, about) for identity, about in list(found.items())[-SHOWN_MEASUREMENTS:]]


def _read(run: Run, identity: str, about: Mapping[str, Any]) -> Measurement:
    from nanalyze.analysis.measured import Measured

    launches = run.arrow(LAUNCHES, {"id": identity}).column(0)[0].as_py()
    if launches > MOST_LAUNCHES:
        text = f"Its processes launched {launches:,} kernels, more than are read here: analysis.measured.load has it."
        return Measurement(identity, about, (), (), text)
    try:
        result = Measured(run.path, identity, run=run)
    except NanalyzeError as error:
        return Measurement(identity, about, (), (), str(error))
    first = next((name for name in result.variants if len(result.variants) > 1), None)
    rows = result.to_pandas(normalize=first).astype(object)
    records = rows.where(rows.notna(), None).to_dict("records")
    return Measurement(identity, result.settings, records, result.warnings)


def table(found: Sequence[Measurement]) -> pa.Table:
    """All of it for a CSV file: a row a configuration, variant and metric."""
    return pa.Table.from_pylist(
        [{"measurement": each.id, **{name: row.get(name) for name in NAMES}} for each in found for row in each.rows],
        schema=pa.schema(
            [
                ("measurement", pa.string()),
                *((name, pa.string()) for name in NAMES[:3]),
                *((name, pa.float64()) for name in NAMES[3:6]),
                ("unit", pa.string()),
                ("repetitions", pa.int64()),
                *((name, pa.string()) for name in NAMES[8:]),
            ]
        ),
    )


def grid(found: Measurement) -> Grid:
    """A row a configuration and variant, with time, interval and the counters that a reader asks for first."""
    points = _points(found.rows)
    has_variants = len({variant for _, variant in points}) > 1
    counted = [name for name in (*PERCENTAGES, *BYTES) if any(name in metrics for metrics in points.values())]
    has_clock = any(row.get("sm_clock_hz") is not None for row in found.rows)
    heads = [Head("Configuration", style=""), *([Head("Variant", style="")] if has_variants else []),
             Head("Kernel time", "mean of a call, 95 % interval"),
             *([Head("Time", "over the first variant's")] if has_variants else []), Head("Launches", "a call"),
             *(Head((PERCENTAGES | BYTES)[name], "of peak" if name.endswith("pct") else "a call") for name in counted),
             *([Head("SM clock")] if has_clock else [])]  # fmt: skip
    body = [
        _cells(label, variant, metrics, counted, has_variants, has_clock)
        for (label, variant), metrics in list(points.items())[:SHOWN_ROWS]
    ]
    more = len(points) - SHOWN_ROWS
    foot = f"{more:,} further rows are in tables/measurements.csv." if more > 0 else ""
    return Grid(heads, body, notes(found), foot)


def title(found: Measurement) -> str:
    """`Measured: eager, fused`, by the functions."""
    functions = found.settings.get("functions")
    return f"Measured: {words(', '.join(map(str, functions)) if isinstance(functions, list) else None, limit=100).text}"


def notes(found: Measurement) -> list[str]:
    """How it was measured, and what stands against its figures."""
    settings = found.settings
    calls = words(settings.get("repetitions")).text
    asked = (
        f"{calls} calls of each, caches {words(settings.get('cache')).text}, clocks "
        f"{words(settings.get('clocks_in_effect')).text}. Times are those of the undisturbed calls; counters were "
        "measured in later ones."
    )
    told = [f"Note: {words(line).text}" for line in found.warnings[:SHOWN_WARNINGS]]
    if len(found.warnings) > SHOWN_WARNINGS:
        told.append(f"{len(found.warnings) - SHOWN_WARNINGS} more warnings are in the result's `warnings`.")
    return [asked, *told, *([found.trouble] if found.trouble else [])]


def _points(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    """Rows by metric, of each configuration and variant, in their order; a failure stands under an empty metric."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        key = (str(row["configuration"]), str(row["variant"]))
        found.setdefault(key, {})[row["metric"] or ""] = row
    return found


def _cells(
    label: str, variant: str, metrics: Mapping[str, Row], counted: Sequence[str], has_variants: bool, has_clock: bool
) -> list[Cell]:
    any_row = next(iter(metrics.values()))
    time = metrics.get("total_ns", {})
    error, note = any_row.get("error"), any_row.get("clock_note")
    cells = [words(label, "wide"), *([words(variant, "text")] if has_variants else [])]
    cells.append(_time(time) if error is None else _failure(error))
    if has_variants:
        cells.append(_ratio(time))
    cells.append(numbers(values.count, metrics.get("launches", {}).get("value")))
    for name in counted:
        value = metrics.get(name, {}).get("value")
        cells.append(measured(value, "not counted") if name in PERCENTAGES else numbers(values.size, value))
    if has_clock:
        hertz = any_row.get("sm_clock_hz")
        cells.append(Cell(values.scaled(hertz, "Hz"), title=words(note).text if note else "", over=note is not None))
    return cells


def _failure(error: str) -> Cell:
    return Cell("failed", "", words(error).text, over=True, below=words(error, limit=80).text)


def _time(time: Row) -> Cell:
    """The mean, and half the width of its interval below it."""
    value, low, high = (values.number(time.get(name)) for name in ("value", "low", "high"))
    if not value or low is None or high is None:
        return Cell(values.duration(value), title="" if value is None else "one call: no interval")
    title = f"95 % interval: {values.duration(low)} to {values.duration(high)}, {time['repetitions']} calls"
    return Cell(values.duration(value), title=title, below=f"± {values.percent(100 * (high - low) / 2 / value)}")


def _ratio(time: Row) -> Cell:
    ratio, low, high = (values.number(time.get(name)) for name in ("ratio", "ratio_low", "ratio_high"))
    if ratio is None:
        return Cell(values.DASH)
    title = "" if low is None or high is None or low == high else f"95 % interval: {low:.3f} to {high:.3f}"
    return Cell(f"{ratio:.3f}{values.THIN}×", title=title)
