"""The picture of a comparison: from A's time to B's, cause by cause, and kernel by kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from nanalyze.analysis.compare.markdown import sides, signed
from nanalyze.analysis.report import palette, values
from nanalyze.analysis.report.figures import Look, render
from nanalyze.analysis.report.names import ascii_only, shorten

if TYPE_CHECKING:
    from nanalyze.analysis.compare import Comparison
    from nanalyze.analysis.compare.effects import KernelEffect

MOST_KERNELS = 10
LABEL_CHARACTERS = 34
TOTAL, SAVED, ADDED = palette.GREY, palette.BLUE, palette.VERMILLION
_UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1.0, "ns"))


def png(comparison: Comparison) -> bytes:
    """Both panels as PNG, light theme."""
    return render(lambda look: figure(comparison, look), Look())


@dataclass(frozen=True)
class _Bar:
    """One bar in ns: where it begins, how long it is, what stands beside it, and the ends of its whisker."""

    label: str
    left: float
    length: float
    colour: str
    text: str
    low: float | None = None
    high: float | None = None

    @property
    def right(self) -> float:
        return self.left + self.length


def figure(comparison: Comparison, look: Look) -> Figure:
    """The waterfall above, the kernels with the largest differences below."""
    rows = len(comparison.parts) + 2
    kernels = min(len(_kernels(comparison)), MOST_KERNELS)
    made = Figure(figsize=(look.width, 0.42 * (rows + kernels) + 2.0), layout="constrained")
    made.suptitle(_title(comparison), x=0.01, ha="left", fontsize=9)
    panels = made.subplots(2, 1, height_ratios=[rows, kernels]) if kernels else [made.subplots()]
    plot(comparison, panels[0]).set_title("Where the difference comes from", loc="left", fontsize=9)
    if kernels:
        plot_kernels(comparison, panels[1])
    return made


def plot(comparison: Comparison, axes: Axes | None = None) -> Axes:
    """The waterfall into `axes`, or into a new figure's."""
    if axes is None:
        axes = Figure(figsize=(Look().width, 0.42 * (len(comparison.parts) + 2) + 0.9), layout="constrained").subplots()
    total = comparison.time
    if total.a is None or total.b is None:
        axes.text(0.5, 0.5, "The times of both sides are not known.", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return axes
    scale, unit = _unit(max(total.a, total.b))
    bars = _waterfall(comparison, total.a, total.b)
    end = 1.2 * max(bar.right for bar in bars)
    _draw(axes, bars, scale, (0.0, end))
    at = total.a
    for row, part in enumerate([*comparison.parts, None]):  # from each bar's end to the next one's start
        axes.plot([at / scale] * 2, [row + 0.28, row + 0.72], color=palette.LIGHT.muted, linewidth=0.8)
        at += part.ns if part is not None else 0.0
    axes.set_xlabel(f"{'a repetition' if comparison.totals['step_ns'].a is not None else 'kernel time'} ({unit})")
    axes.set_title(_title(comparison), loc="left", fontsize=9)
    return axes


def _waterfall(comparison: Comparison, a: float, b: float) -> list[_Bar]:
    names = [ascii_only(shorten(name, LABEL_CHARACTERS)) for name in sides(comparison)]
    bars = [_Bar(names[0], 0.0, a, TOTAL, values.duration(a))]
    at = a
    for part in comparison.parts:
        low, high = (None if end is None else at + end for end in (part.low, part.high))
        colour = SAVED if part.ns < 0 else ADDED
        bars.append(_Bar(part.name, min(at, at + part.ns), abs(part.ns), colour, signed(part.ns), low, high))
        at += part.ns
    return [*bars, _Bar(names[1], 0.0, b, TOTAL, values.duration(b))]


def plot_kernels(comparison: Comparison, axes: Axes) -> Axes:
    """Difference of a repetition's time in each kernel, the largest first."""
    times = [(k, k.time.difference or 0.0) for k in _kernels(comparison)[:MOST_KERNELS]]
    scale, unit = _unit(max((abs(ns) for _, ns in times), default=1.0))
    bars = [
        _Bar(
            f"{ascii_only(shorten(k.name, LABEL_CHARACTERS))}{_mark(k.pair.how)}",
            min(ns, 0.0), abs(ns), SAVED if ns < 0 else ADDED, signed(ns),
            k.time.difference_low, k.time.difference_high,
        )
        for k, ns in times
    ]  # fmt: skip
    low, high = min(0.0, *(bar.left for bar in bars)), max(0.0, *(bar.right for bar in bars))
    room = 0.22 * (high - low)
    _draw(axes, bars, scale, (low - (room if low < 0 else 0.03 * room), high + room))
    axes.axvline(0, color=palette.LIGHT.ink, linewidth=0.8)
    axes.set_xlabel(f"time in kernels, B - A, a repetition ({unit})")
    axes.set_title("Kernel by kernel", loc="left", fontsize=9)
    return axes


def _kernels(comparison: Comparison) -> list[KernelEffect]:
    return [k for k in comparison.kernels if k.time.difference]


def _mark(how: str) -> str:
    return {"new": " (new)", "vanished": " (gone)", "same": ""}.get(how, f" ({how})")


def _title(comparison: Comparison) -> str:
    speedup = comparison.speedup
    if speedup is None:
        return "Where the difference comes from"
    a, b = (ascii_only(shorten(name, LABEL_CHARACTERS)) for name in sides(comparison))
    ratio, low, high = speedup
    return f"{a} takes {ratio:.2f} times as long as {b} (95 % interval {low:.2f} to {high:.2f})"


def _unit(ns: float) -> tuple[float, str]:
    return next(((scale, unit) for scale, unit in _UNITS if ns >= scale), (1.0, "ns"))


def _draw(axes: Axes, bars: Sequence[_Bar], scale: float, limits: tuple[float, float]) -> None:
    """Horizontal bars from above, each with its text and whisker; whiskers end at the `limits` in ns."""
    axes.barh(
        range(len(bars)),
        [bar.length / scale for bar in bars],
        left=[bar.left / scale for bar in bars],
        color=[bar.colour for bar in bars],
        edgecolor=palette.LIGHT.ink,
        linewidth=0.4,
        height=0.56,
    )
    for row, bar in enumerate(bars):
        _annotate(axes, row, bar, scale, limits)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars], fontsize=8)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(limits[0] / scale, limits[1] / scale)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(axis="x", color=palette.LIGHT.line, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _annotate(axes: Axes, row: int, bar: _Bar, scale: float, limits: tuple[float, float]) -> None:
    """The whisker, and the text beyond it, or on it where it runs out of the picture."""
    before = bar.left < 0
    at = bar.left if before else bar.right
    if bar.low is not None and bar.high is not None and bar.high > bar.low:
        low, high = max(bar.low, limits[0]), min(bar.high, limits[1])
        axes.plot([low / scale, high / scale], [row, row], color=palette.LIGHT.ink, linewidth=1.2)
        inside = limits[0] < bar.low and bar.high < limits[1]
        at = (min(at, low) if before else max(at, high)) if inside else at
    axes.annotate(
        bar.text.replace(values.THIN, " ").replace("µ", "u"),
        (at / scale, row),
        xytext=(-5 if before else 5, 0),
        textcoords="offset points",
        ha="right" if before else "left",
        va="center",
        fontsize=8,
        fontweight="bold" if bar.colour == TOTAL else "normal",
        bbox={"facecolor": palette.LIGHT.ground, "edgecolor": "none", "pad": 1.0},
    )
