"""Time of each kernel without the profiler beside its time with it: what counting did to the measurement."""

from __future__ import annotations

from collections.abc import Sequence

from nanalyze.analysis.report import values
from nanalyze.analysis.report.cells import Cell, Grid, Head, Row, numbers, tooltip
from nanalyze.analysis.report.names import shorten

STATEMENT = "SELECT * FROM perturbation ORDER BY launches * mean_ns DESC, kernel_class_id"
SHOWN_ROWS = 20
NAME_CHARACTERS = 70


def perturbation_grid(rows: Sequence[Row]) -> Grid:
    """Rows of the view `perturbation`, as STATEMENT gives them; empty where nothing was measured both ways."""
    if not rows:
        return Grid()
    heads = (Head("Kernel", style=""), Head("Undisturbed", "mean of a launch"), Head("Launches"),
             Head("Under the profiler", "mean of a launch"), Head("Launches"), Head("Difference", "95 % interval"),
             Head("Differs", style=""))  # fmt: skip
    body = [_cells(row) for row in rows[:SHOWN_ROWS]]
    more = len(rows) - SHOWN_ROWS
    foot = f"{more:,} further kernels are in the view perturbation." if more > 0 else ""
    return Grid(heads, body, (sentence(rows),), foot)


def sentence(rows: Sequence[Row]) -> str:
    """How many kernels took another time under the profiler than without it."""
    differing = sum(row["differs"] is True for row in rows)
    unknown = sum(row["differs"] is None for row in rows)
    kernels = "1 kernel was" if len(rows) == 1 else f"{len(rows):,} kernels were"
    verdict = "none took another time there by more than the interval"
    if differing:
        verdict = (
            f"{differing:,} took another time there by more than the interval, so their counters may be others too"
        )
    tail = f"; for {unknown:,} too few launches were measured to tell" if unknown else ""
    return f"{kernels} timed in the undisturbed job and under the profiler; {verdict}{tail}."


def _cells(row: Row) -> tuple[Cell, ...]:
    name = row["kernel"] or ""
    return (
        Cell(shorten(name, NAME_CHARACTERS), "wide", tooltip(name)),
        numbers(values.duration, row["mean_ns"]),
        numbers(values.count, row["launches"]),
        numbers(values.duration, row["replayed_ns"]),
        numbers(values.count, row["launches_replayed"]),
        Cell(_signed(row["difference_share"]), title=_interval(row)),
        _differs(row["differs"]),
    )


def _signed(share: object) -> str:
    value = values.number(share)
    return values.DASH if value is None else f"{100 * value:+.1f}{values.THIN}%"


def _interval(row: Row) -> str:
    mean = values.number(row["mean_ns"])
    low, high = values.number(row["difference_low_ns"]), values.number(row["difference_high_ns"])
    if low is None or high is None or not mean:
        return "no interval: fewer than two launches of one kind"
    return f"95 % interval: {_signed(low / mean)} to {_signed(high / mean)}"


def _differs(differs: object) -> Cell:
    if differs is None:
        return Cell(values.DASH, "", "too few launches to tell")
    return Cell("yes" if differs else "no", "")
