"""Several runs in one report: a row for each run, and their kernels side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanalyze.analysis import compare
from nanalyze.analysis.compare import CompareError
from nanalyze.analysis.report import ranks as rank_table
from nanalyze.analysis.report import values
from nanalyze.analysis.report.cells import Cell, Grid, Head, Row, numbers, tooltip, words
from nanalyze.analysis.report.collect import Data
from nanalyze.analysis.report.kernels import bound_name
from nanalyze.analysis.report.names import cut, shorten, visible

if TYPE_CHECKING:
    from nanalyze.analysis.run import Run

SHOWN_RUNS = 200
SHOWN_KERNELS = 30
RUN_COLUMNS = 8  # of kernels; more do not fit a page
NAME_CHARACTERS = 40
SHOWN_BOUNDS = 2


@dataclass(frozen=True)
class Against:
    """How a run compares with the first: its speedup with the 95 % interval, or why there is none."""

    speedup: tuple[float, float, float] | None
    reason: str = ""


def against(first: Run, other: Run) -> Against:
    """The comparison of two runs as `nanalyze compare` makes it; a reason where they cannot be compared."""
    try:
        found = compare.runs([first], [other])
    except CompareError as error:
        return Against(None, str(error))
    if found.blocked:
        return Against(None, "; ".join(check.message for check in found.checks if check.level == "blocking"))
    return Against(found.speedup, "" if found.speedup is not None else "too few repetitions, or no known times")


def run_grid(runs: Sequence[Data], comparisons: Sequence[Against | None] = ()) -> Grid:
    """One row a run: how long, how busy, what bounds it, and how it compares with the first."""
    heads = (Head("Run", style=""), Head("Speedup", "over the first run"), Head("Kernel time", "all devices"),
             Head("GPU work", "first to last"), Head("Busy", "mean of devices"), Head("Launches"),
             Head("Mostly bound by", style=""), Head("SM clock", "lowest to highest"), Head("Devices", style=""),
             Head("Losses"))  # fmt: skip
    found = [*comparisons, *[None] * len(runs)]
    body = [_run_row(place, data, found[place]) for place, data in enumerate(runs[:SHOWN_RUNS])]
    more = f"{len(runs) - SHOWN_RUNS:,} more are in summary.json." if len(runs) > SHOWN_RUNS else ""
    return Grid(heads, body, _rank_notes(runs), more)


def _run_row(place: int, data: Data, compared: Against | None) -> tuple[Cell, ...]:
    busy = [row["busy_share"] for row in data.use if row["busy_share"] is not None]
    losses = len(data.losses)
    return (
        Cell(label(data), "text", tooltip(data.run["name"]), below=values.instant(data.run.get("created_ns"))),
        _speedup(place, compared),
        numbers(values.duration, data.totals["kernel_ns"]),
        numbers(values.duration, data.totals["active_ns"]),
        numbers(values.share, sum(busy) / len(busy) if busy else None),
        numbers(values.count, data.totals["launches"]),
        words(_bounds(data.shares)),
        Cell(_clocks(data.use)),
        words(_devices(data)),
        Cell(values.count(losses), title="see the run's own section" if losses else "nothing is known to be missing"),
    )


def label(data: Data) -> str:
    """What the tables call a run: its directory's name, cut to fit."""
    return cut(visible(data.run["name"]), NAME_CHARACTERS)


def _devices(data: Data) -> str:
    names = sorted({str(device["name"]) for device in data.devices})
    return f"{len(data.devices)} × {', '.join(names[:3])}" if names else values.DASH


def _bounds(shares: Sequence[Row]) -> str:
    named = [row for row in shares if row["share"]][:SHOWN_BOUNDS]
    return ", ".join(f"{bound_name(row['bound'], row['level_or_pipe'])} {values.share(row['share'])}" for row in named)


def _clocks(use: Sequence[Row]) -> str:
    lows = [row["sm_clock_low_hz"] for row in use if row["sm_clock_low_hz"] is not None]
    highs = [row["sm_clock_high_hz"] for row in use if row["sm_clock_high_hz"] is not None]
    if not lows or not highs:
        return values.DASH
    low, high = values.scaled(min(lows), "Hz"), values.scaled(max(highs), "Hz")
    return low if low == high else f"{low} to {high}"


def _speedup(place: int, compared: Against | None) -> Cell:
    if place == 0:
        return Cell("1", title="the run that the others are compared with")
    if compared is None or compared.speedup is None:
        return Cell(values.DASH, title=words(compared.reason).text if compared else "not compared")
    ratio, low, high = compared.speedup
    verdict = "no difference" if low <= 1 <= high else "faster" if ratio > 1 else "slower"
    return Cell(f"{ratio:.3f}", title=f"95 % interval {low:.3f} to {high:.3f}: {verdict}", below=verdict)


def _rank_notes(runs: Sequence[Data]) -> tuple[str, ...]:
    """What each run's own ranks say of the slowest of them."""
    told = [(label(data), rank_table.sentence(data.rows("ranks"))) for data in runs[:SHOWN_RUNS]]
    return tuple(f"{name}: {sentence}" for name, sentence in told if sentence)


def kernel_grid(runs: Sequence[Data]) -> Grid:
    """The kernels with most time in all runs together, a column a run: time, and the mean of a launch below it."""
    shown = runs[:RUN_COLUMNS]
    by_id: dict[int, dict[int, Row]] = {}
    for place, data in enumerate(shown):
        for row in data.tables["verdicts"].select(COLUMNS).to_pylist():
            by_id.setdefault(row["kernel_class_id"], {})[place] = row
    order = sorted(by_id.items(), key=lambda item: (-sum(row["total_ns"] or 0 for row in item[1].values()), item[0]))
    heads = (
        Head("Kernel", style=""),
        *(Head(label(data), "time, launches × mean") for data in shown),
        Head("Change", "of a launch, last to first"),
    )
    body = [_kernel_row(rows, len(shown)) for _, rows in order[:SHOWN_KERNELS]]
    rest = len(order) - len(body)
    notes: tuple[str, ...] = (
        "Kernels are the same where name, launch shape and resources are. Changes are those of the means alone: "
        "nanalyze compare says which are certain.",
    )
    if len(runs) > RUN_COLUMNS:
        notes += (f"The first {RUN_COLUMNS} of {len(runs)} runs are shown.",)
    foot = f"{rest:,} further kernels are in the runs' tables/verdicts.csv." if rest > 0 else ""
    return Grid(heads, body, notes if body else ("No kernel launch was recorded.",), foot)


COLUMNS = ["kernel_class_id", "kernel", "launches", "total_ns", "mean_ns", "bound", "level_or_pipe"]


def _kernel_row(rows: dict[int, Row], count: int) -> tuple[Cell, ...]:
    anyone: Row = next(iter(rows.values()))
    first, last = rows.get(0), rows.get(count - 1)
    return (
        Cell(
            shorten(anyone["kernel"], 70),
            "text",
            tooltip(anyone["kernel"]),
            below=bound_name(anyone["bound"], anyone["level_or_pipe"]),
        ),
        *(_time(rows.get(place)) for place in range(count)),
        Cell(_change(first["mean_ns"], last["mean_ns"]) if first and last else values.DASH),
    )


def _time(row: Row | None) -> Cell:
    if row is None:
        return Cell(values.DASH, title="not launched in this run")
    return Cell(
        values.duration(row["total_ns"]), below=f"{values.count(row['launches'])} × {values.duration(row['mean_ns'])}"
    )


def _change(before: Any, after: Any) -> str:
    ratio = values.ratio(after, before)
    return values.DASH if ratio is None else f"{100 * (ratio - 1):+.1f}{values.THIN}%"
