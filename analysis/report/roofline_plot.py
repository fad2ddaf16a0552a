"""Rooflines: operations over the bytes of DRAM, and the same kernel over those of L1, L2 and DRAM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from nanalyze.analysis.report import palette, values
from nanalyze.analysis.report.figures import Look, empty, patch
from nanalyze.analysis.report.names import ascii_only

MOST_ROOFS = 6
NAMED_POINTS = 50  # as many as the table of kernels has rows


@dataclass(frozen=True)
class Roof:
    """A pipe's peak in FLOP/s, and what the device was measured to reach of it."""

    label: str
    flops_per_s: float
    measured_per_s: float | None = None


@dataclass(frozen=True)
class Level:
    """A level of the memory in bytes/s: its peak by the datasheet, and what it was measured to reach."""

    name: str
    datasheet_per_s: float | None = None
    measured_per_s: float | None = None

    @property
    def bytes_per_s(self) -> float | None:
        """The measured rate where there is one."""
        return self.measured_per_s or self.datasheet_per_s


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
    """One kind of device: its DRAM peak in bytes/s, the roofs its kernels used, the kernels.

    `measured_per_s` is what its DRAM was measured to reach.
    """

    device: str
    bytes_per_s: float | None
    roofs: tuple[Roof, ...]
    points: tuple[Point, ...]
    measured_per_s: float | None = None


@dataclass(frozen=True)
class Kernel:
    """A kernel at every level: its FLOP/s, and its intensity by name of the level where bytes were counted."""

    rank: int
    flops_per_s: float
    intensities: Mapping[str, float]
    name: str = ""


@dataclass(frozen=True)
class Hierarchy:
    """One kind of device: the levels of its memory from the outermost in, the roofs, the largest kernels."""

    device: str
    levels: tuple[Level, ...]
    roofs: tuple[Roof, ...]
    kernels: tuple[Kernel, ...]


def roofline(lines: Sequence[Roofline], look: Look) -> Figure:
    """Log-log: FLOP/s over FLOP per DRAM byte, a panel for each kind of device."""
    panels = [line for line in lines if line.points or line.roofs]
    height = 3.6 if look.narrow else 4.6
    figure = Figure(figsize=(look.width, height * max(len(panels), 1)), layout="constrained")
    if not panels:
        return empty(figure, figure.add_subplot(), "No kernel has both FLOPs and DRAM bytes counted.")
    for index, line in enumerate(panels):
        axes = figure.add_subplot(len(panels), 1, index + 1)
        _roofline_panel(axes, line, look)
    return figure


def hierarchy(found: Sequence[Hierarchy], look: Look) -> Figure:
    """Log-log: FLOP/s over FLOP per byte of each level, a panel for each kind of device.

    A kernel is a horizontal line through its points of all levels; each level has a slope of its own.
    """
    panels = [one for one in found if one.kernels]
    height = 3.9 if look.narrow else 4.4
    figure = Figure(figsize=(look.width, height * max(len(panels), 1)), layout="constrained")
    if not panels:
        return empty(figure, figure.add_subplot(), "No kernel has bytes of more than one level counted.")
    for index, one in enumerate(panels):
        _hierarchy_panel(figure.add_subplot(len(panels), 1, index + 1), one, look)
    return figure


def _hierarchy_panel(axes: Axes, one: Hierarchy, look: Look) -> None:
    xs = [x for kernel in one.kernels for x in kernel.intensities.values()]
    ys = [kernel.flops_per_s for kernel in one.kernels] + [roof.flops_per_s for roof in one.roofs]
    x_low, x_high = min(xs) / 3, max(xs) * 6
    operations = _operations(one.roofs)
    _axes(axes, (x_low, x_high, min(ys) / 3, max(ys) * 2.5), operations, look)
    axes.set_xlabel(f"arithmetic intensity ({operations} per byte of the level)")
    axes.set_title(ascii_only(one.device))
    highest = max((roof.measured_per_s or roof.flops_per_s for roof in one.roofs), default=max(ys))
    for level in one.levels:
        rate = level.bytes_per_s
        if rate:
            ends = (x_low, max(highest / rate, x_low * 1.01))
            style = "-" if level.measured_per_s else ":"
            axes.plot(
                ends, [x * rate for x in ends], color=palette.LEVEL_COLOURS[level.name], linewidth=1.3, linestyle=style
            )
    for roof in _merged(one.roofs)[:MOST_ROOFS]:
        _flat_roof(axes, roof, x_low, x_high, look)
    for kernel in one.kernels:
        _kernel_line(axes, kernel, look)
    handles: list[Any] = [_level_handle(level, look) for level in one.levels]
    _legend(axes, handles, look, columns=1 if look.narrow else 3)


def _kernel_line(axes: Axes, kernel: Kernel, look: Look) -> None:
    points = sorted(kernel.intensities.items(), key=lambda item: item[1])
    (line,) = axes.plot(
        [x for _, x in points], [kernel.flops_per_s] * len(points), color=look.theme.muted, linewidth=0.8, zorder=2
    )
    line.set_gid(f"kernel-{kernel.rank}")
    for name, x in points:
        axes.plot(
            [x], [kernel.flops_per_s], marker=palette.LEVEL_MARKERS[name], color=palette.LEVEL_COLOURS[name],
            markersize=6, markeredgecolor=look.theme.ink, markeredgewidth=0.5, linestyle="none", zorder=3,
        )  # fmt: skip
    axes.annotate(
        str(kernel.rank), (points[-1][1], kernel.flops_per_s), xytext=(7, 0), textcoords="offset points", va="center",
        fontsize=7.5, zorder=5,
    )  # fmt: skip


def _level_handle(level: Level, look: Look) -> Line2D:
    return Line2D(
        [], [], marker=palette.LEVEL_MARKERS[level.name], color=palette.LEVEL_COLOURS[level.name], markersize=5,
        linestyle="-" if level.measured_per_s else ":" if level.datasheet_per_s else "none", label=_level_label(level),
        markeredgecolor=look.theme.ink, markeredgewidth=0.5,
    )  # fmt: skip


def _level_label(level: Level) -> str:
    if level.measured_per_s and level.datasheet_per_s:
        share = f"{100 * level.measured_per_s / level.datasheet_per_s:.0f} % of the datasheet"
        return f"{level.name} {_compact(level.measured_per_s)}B/s measured, {share}"
    if level.bytes_per_s:
        return f"{level.name} {_compact(level.bytes_per_s)}B/s {'measured' if level.measured_per_s else '(datasheet)'}"
    return f"{level.name}, roof not known"


def _axes(axes: Axes, limits: tuple[float, float, float, float], operations: str, look: Look) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*limits[:2])
    axes.set_ylim(*limits[2:])
    axes.set_ylabel(f"{operations}/s")
    axes.xaxis.set_major_locator(LogLocator(numticks=7 if look.narrow else 10))
    axes.yaxis.set_major_locator(LogLocator(numticks=8))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value < 999 else _tick(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(color=look.theme.line, linewidth=0.5)


def _flat_roof(axes: Axes, roof: Roof, x_low: float, x_high: float, look: Look) -> None:
    """A pipe's roof across the panel: solid where it was measured, dotted by the datasheet."""
    height = roof.measured_per_s or roof.flops_per_s
    axes.plot(
        [x_low, x_high],
        [height] * 2,
        color=look.theme.ink,
        linewidth=1.2,
        linestyle="-" if roof.measured_per_s else ":",
    )
    word = " measured" if roof.measured_per_s else ""
    axes.annotate(
        f"{ascii_only(roof.label)} {_compact(height)}{_operations([roof])}/s{word}", (x_high, height), xytext=(-3, 2),
        textcoords="offset points", ha="right", va="bottom", fontsize=7.5, zorder=6, bbox=_behind(look),
    )  # fmt: skip


def _behind(look: Look) -> dict[str, Any]:
    """A ground for text that lines may cross."""
    return {"facecolor": look.theme.ground, "edgecolor": "none", "alpha": 0.75, "pad": 0.6}


def _roofline_panel(axes: Axes, line: Roofline, look: Look) -> None:
    x_low, x_high, *_ = limits = _limits(line)
    operations = _operations(line.roofs)
    _axes(axes, limits, operations, look)
    if line.bytes_per_s:
        _draw_roofs(axes, line, look, x_low, x_high)
    markers = _markers(line)
    for label, marker in markers.items():
        _draw_points(axes, [point for point in line.points if point.roof == label], marker, look)
    _label_points(axes, line.points, look)
    axes.set_title(ascii_only(line.device))
    axes.set_xlabel(f"arithmetic intensity ({operations} per DRAM byte)")
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
            f"{ascii_only(roof.label)} {_compact(roof.flops_per_s)}{_operations(line.roofs)}/s",
            (x_high, roof.flops_per_s), xytext=(-3, -2 if crowded else 2), textcoords="offset points", ha="right",
            va="top" if crowded else "bottom", fontsize=7.5, zorder=6, bbox=_behind(look),
        )  # fmt: skip
        above = roof.flops_per_s
        if roof.measured_per_s:
            start = roof.measured_per_s / (line.measured_per_s or line.bytes_per_s)
            axes.plot([start, x_high], [roof.measured_per_s] * 2, color=look.theme.ink, linewidth=0.9, linestyle="--")
    if line.measured_per_s:
        reached = max((roof.measured_per_s or roof.flops_per_s for roof in line.roofs), default=highest)
        ends = (x_low, reached / line.measured_per_s)
        slope = [x * line.measured_per_s for x in ends]
        axes.plot(ends, slope, color=look.theme.ink, linewidth=0.9, linestyle="--")
    _slope_label(axes, line.bytes_per_s, x_low, end)


def _merged(roofs: Sequence[Roof]) -> list[Roof]:
    """Roofs from the highest down; those within 3 % of each other become one with both names."""
    merged: list[Roof] = []
    for roof in sorted(roofs, key=lambda r: (-r.flops_per_s, r.label)):
        if merged and merged[-1].flops_per_s < 1.03 * roof.flops_per_s:
            last = merged[-1]
            measured = max(filter(None, (last.measured_per_s, roof.measured_per_s)), default=None)
            merged[-1] = Roof(f"{last.label}, {roof.label}", last.flops_per_s, measured)
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


def _operations(roofs: Sequence[Roof]) -> str:
    """What is counted: integer operations are none in floating point."""
    return "OP" if any("INT" in roof.label for roof in roofs) else "FLOP"


def _markers(line: Roofline) -> dict[str, str]:
    labels = sorted({point.roof for point in line.points})
    return {label: palette.PIPE_MARKERS[i % len(palette.PIPE_MARKERS)] for i, label in enumerate(labels)}


def _draw_points(axes: Axes, points: Sequence[Point], marker: str, look: Look) -> None:
    """Points of one pipe, small ones on top; those above their roof get a ring.

    The largest are drawn one by one, so that each can say in SVG which kernel it is.
    """
    ordered = sorted(points, key=lambda point: -point.share)
    named = sorted(ordered, key=lambda point: point.rank)[:NAMED_POINTS]
    for group in (
        *([point] for point in ordered if point in named),
        [point for point in ordered if point not in named],
    ):
        xs, ys, sizes = _coordinates(group)
        colours = [palette.bound_colour(point.bound) for point in group]
        drawn = axes.scatter(
            xs, ys, s=sizes, marker=marker, c=colours, edgecolors=look.theme.ink, linewidths=0.5, alpha=0.9, zorder=3
        )
        if len(group) == 1:
            drawn.set_gid(f"kernel-{group[0].rank}")
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
    reach = 0.28 if look.narrow else 0.14  # decades that a number takes
    for point in sorted(points, key=lambda p: p.rank):
        spot = (float(np.log10(point.intensity)), float(np.log10(point.flops_per_s)))
        near = any(abs(spot[0] - x) < 2 * reach and abs(spot[1] - y) < 2 * reach for x, y in placed)
        if len(placed) >= 12 or near:
            continue
        placed.append(spot)
        mark = f"{point.rank}{values.OVER_MARK if point.above else ''}"
        axes.annotate(
            mark, (point.intensity, point.flops_per_s), xytext=(6, -9), textcoords="offset points", fontsize=7.5,
            color=look.theme.ink, zorder=5,
        )  # fmt: skip


def _roofline_legend(axes: Axes, line: Roofline, markers: dict[str, str], look: Look) -> None:
    handles: list[Any] = [patch(bound, look) for bound in palette.BOUNDS if any(p.bound == bound for p in line.points)]
    handles += [
        Line2D([], [], marker=marker, linestyle="none", color=look.theme.muted, markersize=5, label=ascii_only(label))
        for label, marker in markers.items()
    ]
    if any(point.above for point in line.points):
        ring = {"marker": "o", "markersize": 9, "markerfacecolor": "none", "markeredgecolor": palette.VERMILLION}
        handles.append(Line2D([], [], linestyle="none", label="above its roof", **ring))  # type: ignore[arg-type]
    if line.measured_per_s or any(roof.measured_per_s for roof in line.roofs):
        handles.append(Line2D([], [], color=look.theme.ink, linewidth=0.9, linestyle="--", label="measured"))
    _legend(axes, handles, look, columns=3 if look.narrow else 6)


def _legend(axes: Axes, handles: list[Any], look: Look, columns: int) -> None:
    if handles:
        axes.legend(
            handles=handles, loc="upper center", bbox_to_anchor=(0.45, -0.17 if not look.narrow else -0.2),
            ncols=columns, handlelength=1.6, columnspacing=1.0,
        )  # fmt: skip


def _compact(value: float) -> str:
    """`1.2T` for 1.2e12, with a blank before the prefix: for axis labels."""
    return values.scaled(value, "").replace(values.THIN, " ") if value > 0 else "0"


def _tick(value: float) -> str:
    """`10 T` for 1e13: for the ticks of a logarithmic axis."""
    text, _, prefix = _compact(value).partition(" ")
    return f"{float(text.replace(',', '')):g} {prefix}".rstrip()
