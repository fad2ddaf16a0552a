"""The report's plots, drawn through matplotlib's object interface: no pyplot, no global state.

Each function takes plain data and a `Look` and returns a Figure; `render` makes a PNG of it.
The user's matplotlibrc is set aside, math parsing is off (a `$` in a kernel name is a `$`), and
the same data gives the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from nanalyze.analysis.report import palette, values
from nanalyze.analysis.report.names import ascii_only, cut
from nanalyze.analysis.report.palette import Theme

WIDE_INCHES = 7.6
NARROW_INCHES = 3.7
DPI = 150
# Characters of 8-point text that fit beside the margins.
WIDE_CHARACTERS, NARROW_CHARACTERS = 100, 46
MOST_PANELS = 8


@dataclass(frozen=True)
class Look:
    """Which variant of a plot: its theme, and whether it is for a narrow screen."""

    theme: Theme = palette.LIGHT
    narrow: bool = False

    @property
    def width(self) -> float:
        return NARROW_INCHES if self.narrow else WIDE_INCHES


@dataclass(frozen=True)
class Bar:
    """One bar: what it is called, its share of kernel time (0 to 1), its verdict, a remark.

    `short` is what it is called where there is less room, `rank` the place of a kernel among all.
    """

    label: str
    share: float
    bound: str
    remark: str = ""
    short: str = ""
    rank: int | None = None


@dataclass(frozen=True)
class Timeline:
    """One device over the run: per bucket the share of time with a kernel and with a copy.

    `seconds` are the buckets' starts, one more than shares as the last is the end; a share is None where
    the recorder was paused throughout. Clocks are (seconds, Hz) pairs as NVML gave them, `throttled` and
    `low_clock` the (start, end) of times in which the device was held back and its clock was low.
    """

    device: str
    seconds: Sequence[float]
    busy: Sequence[float | None]
    copying: Sequence[float | None]
    clock_seconds: Sequence[float] = ()
    clock_hz: Sequence[float] = ()
    throttled: Sequence[tuple[float, float]] = ()
    low_clock: Sequence[tuple[float, float]] = ()


def render(draw: Callable[[Look], Figure], look: Look, dpi: int = DPI) -> bytes:
    """The figure that `draw` makes, as PNG bytes; deterministic, whatever matplotlibrc says."""
    with style.context("default"), matplotlib.rc_context(_settings(look)):
        figure = draw(look)
        sink = io.BytesIO()
        figure.savefig(sink, format="png", dpi=dpi, facecolor=look.theme.ground, metadata={"Software": None})
    return sink.getvalue()


def render_svg(draw: Callable[[Look], Figure], look: Look, salt: str) -> bytes:
    """The figure that `draw` makes, as SVG with text as text; deterministic, with ids that depend on `salt`."""
    settings = {**_settings(look), "svg.fonttype": "none", "svg.hashsalt": salt}
    with style.context("default"), matplotlib.rc_context(settings):
        figure = draw(look)
        sink = io.BytesIO()
        figure.savefig(sink, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return sink.getvalue()


def bars(rows: Sequence[Bar], look: Look) -> Figure:
    """Horizontal bars of shares of kernel time, each with its label above it."""
    figure, axes = _single(look, 0.55 + (0.44 if look.narrow else 0.42) * max(len(rows), 1))
    if not rows:
        return empty(figure, axes, "No kernel time was recorded.")
    positions = np.arange(len(rows))
    colours = [palette.bound_colour(row.bound) for row in rows]
    shares = [100 * row.share for row in rows]
    drawn = axes.barh(positions, shares, height=0.42, color=colours, edgecolor=look.theme.ink, linewidth=0.4)
    for row, patch_of_row in zip(rows, drawn, strict=True):
        if row.rank is not None:
            patch_of_row.set_gid(f"kernel-{row.rank}")
    top = max(max(shares) * (1.25 if look.narrow else 1.45), 1e-9)
    for position, row in zip(positions, rows, strict=True):
        _bar_texts(axes, float(position), row, top, look)
    axes.set_xlim(0, top)
    axes.set_ylim(len(rows) - 0.55, -0.85)
    axes.set_yticks([])
    axes.set_xlabel("share of kernel time (%)")
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(axis="x", color=look.theme.line, linewidth=0.6)
    axes.spines["left"].set_visible(True)
    return figure


def ranked(rows: Sequence[Bar], look: Look) -> Figure:
    """`bars` of kernels, with a legend of the verdicts that their colours stand for."""
    figure = bars(rows, look)
    present = [bound for bound in palette.BOUNDS if any(row.bound == bound for row in rows)]
    if present:
        height = figure.get_figheight() + (0.55 if look.narrow else 0.35)
        figure.set_figheight(height)
        figure.legend(
            handles=[patch(bound, look) for bound in present],
            loc="outside upper left",
            ncols=3 if look.narrow else len(present),
            handlelength=1.1,
            columnspacing=1.0,
        )
    return figure


def utilisation(timelines: Sequence[Timeline], look: Look) -> Figure:
    """A panel a device: share of the time with a kernel running, copies, and the SM clock."""
    shown = timelines[:MOST_PANELS]
    height = (1.9 if look.narrow else 2.0) * max(len(shown), 1) + 0.5
    figure = Figure(figsize=(look.width, height), layout="constrained")
    if not shown:
        return empty(figure, figure.add_subplot(), "No kernel launch with times was recorded.")
    scale, unit = _time_unit(max(max(line.seconds, default=0.0) for line in shown))
    clocked = any(len(line.clock_seconds) for line in shown)
    for index, line in enumerate(shown):
        axes = figure.add_subplot(len(shown), 1, index + 1)
        _timeline_panel(axes, line, scale, look)
        if index == len(shown) - 1:
            axes.set_xlabel(f"time since the first kernel ({unit})")
    handles = _timeline_handles(shown, clocked)
    figure.legend(handles=handles, loc="outside upper left", ncols=2 if look.narrow else len(handles), handlelength=1.4)
    return figure


def _settings(look: Look) -> Any:
    """rcParams; Any, as the names that matplotlib's types allow differ between its releases."""
    ink, muted = look.theme.ink, look.theme.muted
    return {
        "text.parse_math": False,
        "font.family": ["DejaVu Sans"],
        "font.size": 8.5,
        "axes.labelsize": 8.5,
        "axes.titlesize": 9,
        "axes.titlelocation": "left",
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "legend.fontsize": 8,
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.facecolor": look.theme.ground,
        "axes.edgecolor": muted,
        "axes.labelcolor": ink,
        "axes.titlecolor": ink,
        "text.color": ink,
        "xtick.color": muted,
        "ytick.color": muted,
        "xtick.labelcolor": ink,
        "ytick.labelcolor": ink,
        "legend.labelcolor": ink,
    }


def _single(look: Look, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(look.width, height), layout="constrained")
    return figure, figure.add_subplot()


def empty(figure: Figure, axes: Axes, message: str) -> Figure:
    """A plot with nothing to plot says so, rather than showing bare axes."""
    figure.set_figheight(1.0)
    axes.set_axis_off()
    axes.text(0.5, 0.5, message, ha="center", va="center", transform=axes.transAxes, wrap=True)
    return figure


def patch(bound: str, look: Look) -> Patch:
    return Patch(facecolor=palette.bound_colour(bound), edgecolor=look.theme.ink, linewidth=0.4, label=bound)


def _bar_texts(axes: Axes, position: float, row: Bar, top: float, look: Look) -> None:
    label = row.short or row.label if look.narrow else row.label
    label = cut(ascii_only(label), NARROW_CHARACTERS if look.narrow else WIDE_CHARACTERS)
    axes.text(top * 0.004, position - 0.27, label, va="bottom", ha="left", fontsize=8, in_layout=False)
    figure = values.share(row.share).replace(values.THIN, " ")
    note = figure if look.narrow or not row.remark else f"{figure}, {row.remark.replace(values.THIN, ' ')}"
    axes.text(
        100 * row.share + top * 0.01, position, note, va="center", fontsize=8, color=look.theme.muted, in_layout=False
    )


def _timeline_panel(axes: Axes, line: Timeline, scale: float, look: Look) -> None:
    edges = np.asarray(line.seconds, dtype=float) / scale
    busy = 100 * np.asarray(line.busy, dtype=float)
    copying = 100 * np.asarray(line.copying, dtype=float)
    axes.stairs(busy, edges, fill=True, color=palette.BUSY, alpha=0.55)
    axes.stairs(busy, edges, color=palette.BUSY, linewidth=0.8)
    if np.any(copying > 0):
        axes.stairs(copying, edges, color=palette.COPYING, linewidth=1.2)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, 105)
    if line.throttled or line.low_clock:
        _clock_strips(axes, line, scale)
    axes.set_yticks([0, 50, 100])
    axes.set_ylabel("busy (%)")
    axes.set_title(ascii_only(line.device))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.grid(color=look.theme.line, linewidth=0.5)
    if len(line.clock_seconds):
        _clock_axis(axes, line, scale, look)


def _clock_strips(axes: Axes, line: Timeline, scale: float) -> None:
    """Above the curves: when the device was held back, and when its clock was low."""
    axes.set_ylim(0, 122)
    for spans, low, colour, hatch in (
        (line.throttled, 113, palette.VERMILLION, ""),
        (line.low_clock, 106, palette.PURPLE, "////"),
    ):
        bars = [(start / scale, (end - start) / scale) for start, end in spans]
        axes.broken_barh(bars, (low, 6), facecolor=colour, edgecolor="white", linewidth=0, hatch=hatch)


def _clock_axis(axes: Axes, line: Timeline, scale: float, look: Look) -> None:
    right = axes.twinx()
    megahertz = np.asarray(line.clock_hz, dtype=float) / 1e6
    right.plot(
        np.asarray(line.clock_seconds, dtype=float) / scale, megahertz, color=palette.CLOCK, linewidth=1.3,
        linestyle="--", marker="." if len(megahertz) < 40 else None, markersize=4,
    )  # fmt: skip
    right.set_ylim(0, float(np.max(megahertz)) * 1.15 + 1)
    right.set_xlim(axes.get_xlim())
    right.set_ylabel("MHz")
    right.spines["right"].set_visible(True)
    right.yaxis.set_major_locator(MaxNLocator(3))


def _timeline_handles(lines: Sequence[Timeline], clocked: bool) -> list[Any]:
    handles: list[Any] = [
        Patch(facecolor=palette.BUSY, alpha=0.55, label="a kernel runs"),
        Line2D([], [], color=palette.COPYING, linewidth=1.2, label="a copy runs"),
    ]
    if clocked:
        handles.append(Line2D([], [], color=palette.CLOCK, linestyle="--", linewidth=1.3, label="SM clock"))
    if any(line.throttled for line in lines):
        handles.append(Patch(facecolor=palette.VERMILLION, label="throttled"))
    if any(line.low_clock for line in lines):
        handles.append(Patch(facecolor=palette.PURPLE, hatch="////", edgecolor="white", label="low clock"))
    return handles


def _time_unit(seconds: float) -> tuple[float, str]:
    """(seconds a unit, unit) for an axis of this length."""
    for scale, unit, limit in ((1e-6, "µs", 2e-3), (1e-3, "ms", 2.0), (1.0, "s", 600.0), (60.0, "min", 36_000.0)):
        if seconds < limit:
            return scale, unit
    return 3600.0, "h"
