"""The plots of a trend: one panel a series over the days, with its levels and what else changed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from nanalyze.analysis.report import figures, palette, values
from nanalyze.analysis.report.figures import Look
from nanalyze.analysis.report.names import ascii_only, shorten
from nanalyze.analysis.report.plots import Plot
from nanalyze.analysis.statistics import Array
from nanalyze.analysis.trend import Row, Trend
from nanalyze.analysis.trend.series import JOB

MOST_PANELS = 8
WIDE_CHARACTERS, NARROW_CHARACTERS = 90, 40
_UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1.0, "ns"))


def plots(trend: Trend) -> list[Plot]:
    """The job itself, and the kernels that changed."""
    own = [row for row in trend.rows if row.series.kind == JOB]
    found = [row for row in trend.found if row.series.kind != JOB][:MOST_PANELS]
    caption = (
        "Points are runs with 95 % intervals where they are known, lines the levels that were found or the drift. "
        "Dashed lines are runs at which a driver, a library, the GPU, the host or the clock changed: see the marks."
    )
    return [
        Plot(
            "job",
            lambda look: draw(own, trend, look),
            "Time of a step on the host and in kernels over the days.",
            f"Time of a step. {caption}",
            not own,
        ),
        Plot(
            "kernels",
            lambda look: draw(found, trend, look),
            f"Time of the {len(found)} kernels that changed most over the days; the table below has the numbers.",
            f"Kernels that changed, those that cost most first; times are a {trend.unit}'s. {caption}",
            not found,
        ),
    ]


def draw(rows: Sequence[Row], trend: Trend, look: Look) -> Figure:
    """A panel a row."""
    figure = Figure(figsize=(look.width, 1.75 * max(len(rows), 1) + 0.4), layout="constrained")
    if not rows:
        return figures.empty(figure, figure.add_subplot(), "Nothing changed.")
    for number, row in enumerate(rows):
        axes = figure.add_subplot(len(rows), 1, number + 1)
        _panel(axes, row, trend, look)
        if number == len(rows) - 1:
            axes.set_xlabel(f"days since {values.instant(trend.points[0].started_ns)}")
    return figure


def _panel(axes: Axes, row: Row, trend: Trend, look: Look) -> None:
    runs = [run for run, value in enumerate(row.series.values) if value is not None]
    known = [value for value in row.series.values if value is not None]
    days = np.array(trend.days)[runs]
    scale, unit = next(((s, u) for s, u in _UNITS if max(value.value for value in known) >= s), (1.0, "ns"))
    for mark in {mark.at for mark in trend.marks}:
        axes.axvline(trend.days[mark], color=look.theme.muted, linewidth=0.7, linestyle=(0, (3, 3)))
    ends = [
        (v.value, v.low if v.low is not None else v.value, v.high if v.high is not None else v.value) for v in known
    ]
    middle, low, high = (np.array(part) / scale for part in zip(*ends, strict=True))
    axes.vlines(days, low, high, color=palette.BLUE, linewidth=1.0, alpha=0.6)
    axes.plot(days, middle, "o", color=palette.BLUE, markersize=3.2)
    _levels(axes, row, runs, days, middle)
    axes.set_ylabel(unit)
    characters = NARROW_CHARACTERS if look.narrow else WIDE_CHARACTERS
    axes.set_title(ascii_only(shorten(row.series.name, characters)), loc="left")
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    room = 0.08 * (max(high.max() - low.min(), 0.02 * high.max()) or 1.0)
    axes.set_ylim(low.min() - room, high.max() + room)
    axes.grid(color=look.theme.line, linewidth=0.5)


def _levels(axes: Axes, row: Row, runs: Sequence[int], days: Array, middle: Array) -> None:
    """A line from step to step, or along the drift."""
    drift = row.finding.drift
    if drift is not None:
        slope = np.log1p(drift.per_day)
        start = np.median(np.log(middle) - slope * days)
        axes.plot(days, np.exp(start + slope * days), color=palette.VERMILLION, linewidth=1.4)
        return
    if not row.finding.steps:
        return
    edges = [0, *(runs.index(step.at) for step in row.finding.steps), len(runs)]
    for first, end in pairwise(edges):
        level = float(np.exp(np.mean(np.log(middle[first:end]))))
        axes.plot([days[first], days[end - 1]], [level, level], color=palette.VERMILLION, linewidth=1.4)
