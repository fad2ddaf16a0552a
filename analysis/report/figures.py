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
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from nanalyze.analysis.report import palette, values
from nanalyze.analysis.report.names import ascii_only, cut
from nanalyze.analysis.report.palette import Theme

WIDE_INCHES = 7.6
NARROW_INCHES = 3.7
DPI = 150
# Characters of 8-point text that fit beside the margins.
WIDE_CHARACTERS, NARROW_CHARACTERS = 100, 46
MOST_PANELS = 8
MOST_ROOFS = 6


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

    `short` is what it is called where there is less room.
    """

    label: str
    share: float
    bound: str
    remark: str = ""
    short: str = ""


@dataclass(frozen=True)
class Roof:
    """A pipe's peak in FLOP/s."""

    label: str
    flops_per_s: float


@dataclass(frozen=True)
class Point:
    """A kernel class on the roofline; `roof` is the label of its own roof."""

    rank: int
    intensity: float
    flops_per_s: float
    share: float
    bound: str
    roof: str
    above: bool


@dataclass(frozen=True)
class Roofline:
    """One kind of device: its DRAM peak in bytes/s, the roofs its kernels used, the kernels."""

    device: str
    bytes_per_s: float | None
    roofs: tuple[Roof, ...]
    points: tuple[Point, ...]


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


def bars(rows: Sequence[Bar], look: Look) -> Figure:
    """Horizontal bars of shares of kernel time, each with its label above it."""
    figure, axes = _single(look, 0.55 + (0.44 if look.narrow else 0.42) * max(len(rows), 1))
    if not rows:
        return _empty(figure, axes, "No kernel time was recorded.")
    positions = np.arange(len(rows))
    colours = [palette.bound_colour(row.bound) for row in rows]
    shares = [100 * row.share for row in rows]
    axes.barh(positions, shares, height=0.42, color=colours, edgecolor=look.theme.ink, linewidth=0.4)
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
            handles=[_patch(bound, look) for bound in present],
            loc="outside upper left",
            ncols=3 if look.narrow else len(present),
            handlelength=1.1,
            columnspacing=1.0,
        )
    return figure


def roofline(lines: Sequence[Roofline], look: Look) -> Figure:
    """Log-log: FLOP/s over FLOP per DRAM byte, a panel for each kind of device."""
    panels = [line for line in lines if line.points or line.roofs]
    height = 3.6 if look.narrow else 4.6
    figure = Figure(figsize=(look.width, height * max(len(panels), 1)), layout="constrained")
    if not panels:
        return _empty(figure, figure.add_subplot(), "No kernel has both FLOPs and DRAM bytes counted.")
    for index, line in enumerate(panels):
        axes = figure.add_subplot(len(panels), 1, index + 1)
        _roofline_panel(axes, line, look)
    return figure


def utilisation(timelines: Sequence[Timeline], look: Look) -> Figure:
    """A panel a device: share of the time with a kernel running, copies, and the SM clock."""
    shown = timelines[:MOST_PANELS]
    height = (1.9 if look.narrow else 2.0) * max(len(shown), 1) + 0.5
    figure = Figure(figsize=(look.width, height), layout="constrained")
    if not shown:
        return _empty(figure, figure.add_subplot(), "No kernel launch with times was recorded.")
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


def _empty(figure: Figure, axes: Axes, message: str) -> Figure:
    """A plot with nothing to plot says so, rather than showing bare axes."""
    figure.set_figheight(1.0)
    axes.set_axis_off()
    axes.text(0.5, 0.5, message, ha="center", va="center", transform=axes.transAxes, wrap=True)
    return figure


def _patch(bound: str, look: Look) -> Patch:
    return Patch(facecolor=palette.bound_colour(bound), edgecolor=look.theme.ink, linewidth=0.4, label=bound)


def _bar_texts(axes: Axes, position: float, row: Bar, top: float, look: Look) -> None:
    label = row.short or row.label if look.narrow else row.label
    label = cut(ascii_only(label), NARROW_CHARACTERS if look.narrow else WIDE_CHARACTERS)
    axes.text(top * 0.004, position - 0.27, label, va="bottom", ha="left", fontsize=8, in_layout=False)
    figure = values.share(row.share).replace(values.THIN, " ")
    note = figure if look.narrow or not row.remark else f"{figure}  {row.remark.replace(values.THIN, ' ')}"
    axes.text(
        100 * row.share + top * 0.01, position, note, va="center", fontsize=8, color=look.theme.muted, in_layout=False
    )


def _roofline_panel(axes: Axes, line: Roofline, look: Look) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    x_low, x_high, y_low, y_high = _limits(line)
    axes.set_xlim(x_low, x_high)
    axes.set_ylim(y_low, y_high)
    if line.bytes_per_s:
        _draw_roofs(axes, line, look, x_low, x_high)
    markers = _markers(line)
    for label, marker in markers.items():
        _draw_points(axes, [point for point in line.points if point.roof == label], marker, look)
    _label_points(axes, line.points, look)
    axes.set_title(ascii_only(line.device))
    axes.set_xlabel(f"arithmetic intensity ({_operations(line)} per DRAM byte)")
    axes.set_ylabel(f"{_operations(line)}/s")
    axes.xaxis.set_major_locator(LogLocator(numticks=7 if look.narrow else 10))
    axes.yaxis.set_major_locator(LogLocator(numticks=8))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value < 999 else _tick(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(color=look.theme.line, linewidth=0.5)
    _roofline_legend(axes, line, markers, look)


def _limits(line: Roofline) -> tuple[float, float, float, float]:
    """Axis limits: whole decades around the points and the ridge points."""
    xs = [point.intensity for point in line.points]
    ys = [point.flops_per_s for point in line.points] + [roof.flops_per_s for roof in line.roofs]
    if line.bytes_per_s:
        xs += [roof.flops_per_s / line.bytes_per_s for roof in line.roofs]
    x_low, x_high = min(xs, default=0.1), max(xs, default=100.0)
    y_low, y_high = min(ys, default=1e9), max(ys, default=1e13)
    return x_low / 3, x_high * 6, y_low / 3, y_high * 2.5


def _draw_roofs(axes: Axes, line: Roofline, look: Look, x_low: float, x_high: float) -> None:
    """The DRAM slope up to the highest ridge, each pipe's flat roof from its own ridge point on."""
    assert line.bytes_per_s is not None
    highest = max((roof.flops_per_s for roof in line.roofs), default=line.bytes_per_s * x_high)
    end = highest / line.bytes_per_s
    axes.plot([x_low, end], [x_low * line.bytes_per_s, highest], color=look.theme.ink, linewidth=1.2)
    above = float("inf")
    for roof in _merged(line.roofs)[:MOST_ROOFS]:
        ridge = roof.flops_per_s / line.bytes_per_s
        axes.plot([ridge, x_high], [roof.flops_per_s] * 2, color=look.theme.ink, linewidth=1.2)
        axes.plot([ridge], [roof.flops_per_s], marker="D", color=look.theme.ink, markersize=4, linestyle="none")
        crowded = above / roof.flops_per_s < 3  # the label above the line would cross the next roof
        axes.annotate(
            f"{ascii_only(roof.label)} {_compact(roof.flops_per_s)}{_operations(line)}/s", (x_high, roof.flops_per_s),
            xytext=(-3, -2 if crowded else 2), textcoords="offset points", ha="right",
            va="top" if crowded else "bottom", fontsize=7.5,
        )  # fmt: skip
        above = roof.flops_per_s
    _slope_label(axes, line.bytes_per_s, x_low, end)


def _merged(roofs: Sequence[Roof]) -> list[Roof]:
    """Roofs from the highest down; those within 3 % of each other become one with both names."""
    merged: list[Roof] = []
    for roof in sorted(roofs, key=lambda r: (-r.flops_per_s, r.label)):
        if merged and merged[-1].flops_per_s < 1.03 * roof.flops_per_s:
            merged[-1] = Roof(f"{merged[-1].label}, {roof.label}", merged[-1].flops_per_s)
        else:
            merged.append(roof)
    return merged


def _slope_label(axes: Axes, bytes_per_s: float, x_low: float, ridge: float) -> None:
    """The DRAM peak, left of the slope near its middle: no kernel can be there."""
    middle = x_low**0.4 * ridge**0.6
    axes.annotate(
        f"DRAM {_compact(bytes_per_s)}B/s", (middle, middle * bytes_per_s), xytext=(-5, 3), textcoords="offset points",
        ha="right", va="bottom", fontsize=7.5,
    )  # fmt: skip


def _operations(line: Roofline) -> str:
    """What is counted: integer operations are none in floating point."""
    return "OP" if any("INT" in roof.label for roof in line.roofs) else "FLOP"


def _markers(line: Roofline) -> dict[str, str]:
    labels = sorted({point.roof for point in line.points})
    return {label: palette.PIPE_MARKERS[i % len(palette.PIPE_MARKERS)] for i, label in enumerate(labels)}


def _draw_points(axes: Axes, points: Sequence[Point], marker: str, look: Look) -> None:
    """Points of one pipe, small ones on top; those above their roof get a ring."""
    ordered = sorted(points, key=lambda point: -point.share)
    xs, ys, sizes = _coordinates(ordered)
    colours = [palette.bound_colour(point.bound) for point in ordered]
    axes.scatter(
        xs, ys, s=sizes, marker=marker, c=colours, edgecolors=look.theme.ink, linewidths=0.5, alpha=0.9, zorder=3
    )
    xs, ys, sizes = _coordinates([point for point in ordered if point.above])
    axes.scatter(
        xs, ys, s=[3 * size + 60 for size in sizes], marker="o", facecolors="none", edgecolors=palette.VERMILLION,
        linewidths=1.3, linestyles="--", zorder=4,
    )  # fmt: skip


def _coordinates(points: Sequence[Point]) -> tuple[list[float], list[float], list[float]]:
    sizes = [18 + 260 * min(max(point.share, 0.0), 1.0) for point in points]
    return [point.intensity for point in points], [point.flops_per_s for point in points], sizes


def _label_points(axes: Axes, points: Sequence[Point], look: Look) -> None:
    """The rank beside the largest points, as in the table of kernels; skipped where two would overlap."""
    placed: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda p: p.rank):
        spot = (float(np.log10(point.intensity)), float(np.log10(point.flops_per_s)))
        near = any(abs(spot[0] - x) < 0.12 and abs(spot[1] - y) < 0.12 for x, y in placed)
        if len(placed) >= 12 or near:
            continue
        placed.append(spot)
        mark = f"{point.rank}{values.OVER_MARK if point.above else ''}"
        axes.annotate(
            mark, (point.intensity, point.flops_per_s), xytext=(6, -9), textcoords="offset points", fontsize=7.5,
            color=look.theme.ink, zorder=5,
        )  # fmt: skip


def _roofline_legend(axes: Axes, line: Roofline, markers: dict[str, str], look: Look) -> None:
    handles: list[Any] = [_patch(bound, look) for bound in palette.BOUNDS if any(p.bound == bound for p in line.points)]
    handles += [
        Line2D([], [], marker=marker, linestyle="none", color=look.theme.muted, markersize=5, label=ascii_only(label))
        for label, marker in markers.items()
    ]
    if any(point.above for point in line.points):
        ring = {"marker": "o", "markersize": 9, "markerfacecolor": "none", "markeredgecolor": palette.VERMILLION}
        handles.append(Line2D([], [], linestyle="none", label="above its roof", **ring))  # type: ignore[arg-type]
    if handles:
        axes.legend(
            handles=handles, loc="upper center", bbox_to_anchor=(0.45, -0.17 if not look.narrow else -0.2),
            ncols=3 if look.narrow else 6, handlelength=1.1, columnspacing=1.0,
        )  # fmt: skip


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


def _compact(value: float) -> str:
    """`1.2T` for 1.2e12, with a blank before the prefix: for axis labels."""
    return values.scaled(value, "").replace(values.THIN, " ") if value > 0 else "0"


def _tick(value: float) -> str:
    """`10 T` for 1e13: for the ticks of a logarithmic axis."""
    text, _, prefix = _compact(value).partition(" ")
    return f"{float(text.replace(',', '')):g} {prefix}".rstrip()
