"""A trend for programs and people: JSON, rows for tables, Markdown, and the tables that become CSV files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nanalyze.analysis.compare.markdown import code
from nanalyze.analysis.jsonable import finite
from nanalyze.analysis.report import values
from nanalyze.analysis.report.names import shorten, visible
from nanalyze.analysis.trend import FEW_RUNS, TESTED, WITH_ALL, Row, Trend, describe
from nanalyze.analysis.trend.changes import LEAST_RUNS, Drift, Finding, Step
from nanalyze.analysis.trend.marks import Mark
from nanalyze.analysis.trend.read import Measured, Point
from nanalyze.analysis.trend.series import JOB, STEP

if TYPE_CHECKING:
    import pyarrow as pa

    from nanalyze.analysis.compare.gates import Outcome

TREND_VERSION = 1
NAME_CHARACTERS = 60
SHOWN_ROWS = 20
HEADS = ("kernel", "share", "first", "last", "what happened (95 %)", "p", "with it", "bound by")


# --- JSON ----------------------------------------------------------------------------------------


def to_json(trend: Trend, outcomes: Sequence[Outcome] = ()) -> str:
    """The whole as JSON text."""
    return json.dumps(to_dict(trend, outcomes), indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def to_dict(trend: Trend, outcomes: Sequence[Outcome] = ()) -> dict[str, Any]:
    found: dict[str, Any] = finite(
        {
            "trend_version": TREND_VERSION,
            "step": trend.step,
            "unit": trend.unit,
            "clock_known": trend.clock_known,
            "runs": [_run(point, day) for point, day in zip(trend.points, trend.days, strict=True)],
            "marks": [vars(mark) for mark in trend.marks],
            "series": [_series(row) for row in trend.rows],
            "gates": [outcome.to_dict() for outcome in outcomes],
        }
    )
    return found


def _run(point: Point, day: float) -> dict[str, Any]:
    return {
        "run": point.label,
        "run_id": point.run_id,
        "started_ns": point.started_ns,
        "day": day,
        "kernel_ns": point.total_ns,
        "launches_rolled_up": point.rolled_up,
        "sm_clock_hz": point.clock_hz,
        "throttled_share": point.throttled_share,
        "facts": {what: list(found) for what, found in point.facts.items()},
    }


def _series(row: Row) -> dict[str, Any]:
    one = row.series
    return {
        "kind": one.kind,
        "name": one.name,
        "share": one.share,
        "tested": row.tested,
        "change": None if row.change is None else dict(zip(("value", "low", "high"), row.change, strict=True)),
        "steps": [vars(step) for step in row.finding.steps],
        "drift": None if row.finding.drift is None else vars(row.finding.drift),
        "correlation": row.finding.correlation,
        "values": [_measured(value) for value in one.values],
        "launch_ns": [_measured(value) for value in one.launch_ns],
        **{name: list(getattr(one, name)) for name in ("p50_ns", "total_ns", "launches", "verdicts", "class_ids")},
        "renamed": {str(run): how for run, how in one.renamed.items()},
    }


def _measured(value: Measured | None) -> dict[str, Any] | None:
    return None if value is None else {"ns": value.value, "low_ns": value.low, "high_ns": value.high}


# --- for people ------------------------------------------------------------------------------------


def headline(trend: Trend) -> list[str]:
    """What was found, in sentences; the first tells of how much data."""
    first, last = (values.instant(trend.points[at].started_ns) for at in (0, -1))
    what = f"a step ({visible(trend.step)[:80]})" if trend.step is not None else "a launch"
    lines = [f"{len(trend.points)} runs from {first} to {last}; times are those of {what}."]
    found = trend.found
    if len(trend.points) < LEAST_RUNS:
        return [*lines, f"Fewer than {LEAST_RUNS} runs: no change is looked for."]
    tested = sum(row.tested in (TESTED, WITH_ALL) for row in trend.rows)
    steps, drifts = sum(bool(row.finding.steps) for row in found), sum(row.finding.drift is not None for row in found)
    lines.append(
        f"Of {tested:,} series {steps:,} changed from one run to the next and {drifts:,} "
        f"{'drifts' if drifts == 1 else 'drift'}; in a job where nothing changed one of twenty trends would show "
        "anything at all."
    )
    together = sum(row.tested == WITH_ALL for row in trend.rows)
    if together:
        lines.append(
            f"{together:,} series moved as all kernels do. A clock does that, and in some runs none was read, so these "
            "are neither changed nor unchanged: record with the layer device_state."
        )
    elif not trend.clock_known:
        lines.append("No clock was read in some runs: what moves all kernels together would not be told from it.")
    return lines


def shown(trend: Trend) -> list[Row]:
    """The rows that a table shows: the job's, what changed, then the largest kernels."""
    own = [row for row in trend.rows if row.series.kind == JOB]
    found = [row for row in trend.found if row.series.kind != JOB]
    rest = [row for row in trend.rows if row.series.kind != JOB and row.change is None]
    return [*own, *found, *rest][: max(SHOWN_ROWS, len(own) + len(found))]


def cells(row: Row, trend: Trend, limit: int = NAME_CHARACTERS) -> tuple[str, ...]:
    """The row under HEADS, as text."""
    one = row.series
    known = [value for value in one.values if value is not None]
    return (
        one.name if one.kind == JOB else shorten(one.name, limit),
        values.DASH if one.share is None else values.share(one.share),
        values.duration(known[0].value),
        values.duration(known[-1].value),
        happened(row, trend),
        _p_value(row.finding),
        "; ".join(mark.text for mark in row.marks) or values.DASH,
        verdicts(row),
    )


def happened(row: Row, trend: Trend) -> str:
    """Steps or drift in words, with where a kernel is not in all runs and where it has another name."""
    parts = [_step_text(step, trend) for step in row.finding.steps]
    if row.finding.drift is not None:
        parts.append(_drift_text(row.finding.drift))
    present = [run for run, value in enumerate(row.series.values) if value is not None]
    if present[0] > 0:
        parts.append(f"new in run {present[0] + 1}")
    if present[-1] < len(trend.points) - 1:
        parts.append(f"gone after run {present[-1] + 1}")
    parts += [f"{how} from run {run + 1}" for run, how in row.series.renamed.items()]
    if row.tested == WITH_ALL:
        parts.append(f"undetermined: {row.tested}")
    elif row.tested not in (TESTED, FEW_RUNS):
        parts.append(f"not tested: {row.tested}")
    return "; ".join(parts) or values.DASH


def _step_text(step: Step, trend: Trend) -> str:
    return f"{_share(step.change, step.low, step.high)} from run {step.at + 1} ({_date(trend.points[step.at])})"


def _drift_text(drift: Drift) -> str:
    return f"{_share(drift.per_day, drift.low, drift.high)} a day"


def _share(change: float, low: float, high: float) -> str:
    digits = 1 if max(abs(low), abs(high)) >= 0.01 else 2
    texts = [f"{100 * number:+.{digits}f}" for number in (change, low, high)]
    return f"{texts[0]}{values.THIN}% ({texts[1]} to {texts[2]})"


def _date(point: Point) -> str:
    return values.instant(point.started_ns)[:10]


def _p_value(finding: Finding) -> str:
    one = describe(finding)
    return values.DASH if one is None else f"{one.p_value:.3f}" if one.p_value > 0.001 else "≤ 0.001"


def verdicts(row: Row) -> str:
    """The last verdict, and the first one where it was another."""
    known = [verdict for verdict in row.series.verdicts if verdict is not None]
    if not known:
        return values.DASH
    return known[-1] if known[0] == known[-1] else f"{known[0]} → {known[-1]}"


def mark_cells(mark: Mark, trend: Trend) -> tuple[str, ...]:
    """Run, date and what changed."""
    return str(mark.at + 1), _date(trend.points[mark.at]), mark.what, mark.before, mark.after


def to_markdown(trend: Trend) -> str:
    """Headline, the table, and the marks."""
    lines = ["## Trend", "", *(f"{visible(line)}" for line in headline(trend)), ""]
    lines += ["| " + " | ".join(HEADS) + " |", "|---|---:|---:|---:|---|---:|---|---|"]
    for row in shown(trend):
        name, *rest = cells(row, trend)
        lines.append("| " + " | ".join([code(name), *(_cell(text) for text in rest)]) + " |")
    if trend.marks:
        lines += ["", "| run | date | what | before | after |", "|---:|---|---|---|---|"]
        for mark in trend.marks:
            number, date, what, before, after = mark_cells(mark, trend)
            lines.append(f"| {number} | {date} | {what} | {code(before)} | {code(after)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    plain = visible(text.replace(values.THIN, " "))
    return "".join(f"\\{character}" if character in "\\`*[]|<>~_" else character for character in plain)


# --- tables ----------------------------------------------------------------------------------------


def tables(trend: Trend) -> dict[str, pa.Table]:
    """What becomes CSV files: runs, marks, kernels (a row a series) and values (a row a series and run)."""
    import pyarrow as pa

    return {
        "runs": pa.Table.from_pylist([_flat(run) for run in to_dict(trend)["runs"]]),
        "marks": pa.Table.from_pylist(
            [{**vars(mark), "at": mark.at + 1} for mark in trend.marks],
            pa.schema([("at", pa.int64()), *((name, pa.string()) for name in ("what", "before", "after"))]),
        ),
        "kernels": pa.Table.from_pylist([summary(row, trend) for row in trend.rows]),
        "values": pa.Table.from_pylist([value for row in trend.rows for value in _values(row, trend)]),
    }


def _flat(run: dict[str, Any]) -> dict[str, Any]:
    facts = {what.replace(" ", "_"): ", ".join(found) for what, found in run.pop("facts").items()}
    return {**run, **facts}


def summary(row: Row, trend: Trend) -> dict[str, Any]:
    """One row of kernels.csv, and of `--format csv`."""
    one, found = row.series, describe(row.finding)
    known = [value for value in one.values if value is not None]
    change = row.change or (None, None, None)
    return {
        "kind": one.kind,
        "name": one.name,
        "unit": STEP if one.kind == JOB else trend.unit,
        "share": one.share,
        "first_ns": known[0].value,
        "last_ns": known[-1].value,
        "change": change[0],
        "change_low": change[1],
        "change_high": change[2],
        "steps": len(row.finding.steps),
        "largest_step_run": found.at + 1 if isinstance(found, Step) else None,
        "largest_step": found.change if isinstance(found, Step) else None,
        "drift_per_day": found.per_day if isinstance(found, Drift) else None,
        "drift_per_day_low": found.low if isinstance(found, Drift) else None,
        "drift_per_day_high": found.high if isinstance(found, Drift) else None,
        "p_value": None if found is None else found.p_value,
        "tested": row.tested,
        "marks": "; ".join(mark.text for mark in row.marks),
        "verdict": next((verdict for verdict in reversed(one.verdicts) if verdict is not None), None),
    }


def _values(row: Row, trend: Trend) -> list[dict[str, Any]]:
    one = row.series
    found = []
    for run, value in enumerate(one.values):
        if value is None:
            continue
        launch = one.launch_ns[run] if one.launch_ns else None
        found.append(
            {
                "name": one.name,
                "run": run + 1,
                "started_ns": trend.points[run].started_ns,
                "ns": value.value,
                "low_ns": value.low,
                "high_ns": value.high,
                "launch_ns": None if launch is None else launch.value,
                **{name: _at(getattr(one, name), run) for name in ("p50_ns", "launches", "total_ns")},
                "verdict": _at(one.verdicts, run),
                "kernel_class_id": _at(one.class_ids, run),
            }
        )
    return found


def _at(found: Sequence[Any], run: int) -> Any:
    return found[run] if found else None
