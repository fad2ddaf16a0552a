"""The plots of a run: what each shows, drawn as PNG for the files and as SVG for the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from nanalyze.analysis.report import (
    activity,
    figures,
    kernels,
    lost_plot,
    palette,
    roofline_plot,
    rooflines,
    svg,
    values,
)
from nanalyze.analysis.report.cells import tooltip
from nanalyze.analysis.report.collect import Data, labels, ranks
from nanalyze.analysis.report.figures import Look
from nanalyze.analysis.report.names import visible

Draw = Callable[[Look], Any]


@dataclass(frozen=True)
class Plot:
    """One plot: the name of its file, how to draw it, what it shows.

    Without anything to show it is left out of the page, whose text says why; the file is written.
    """

    name: str
    draw: Draw
    alt: str
    caption: str
    is_empty: bool


def plots(data: Data) -> list[Plot]:
    """The plots of a run."""
    points = data.rows("roofline")
    bars = kernels.share_bars(data.shares)
    top = kernels.kernel_bars(data.kernels, dict(data.shapes))
    about = (points, data.devices, ranks(data), data.rows("ceilings"))
    lines, levels = rooflines.rooflines(*about), rooflines.hierarchies(*about)
    split = lost_plot.splits(data.rows("time_by_cause"), labels(data))
    timelines = activity.timelines(data.pieces, data.use, data.rows("throttling"))
    return [
        Plot(
            "verdicts",
            lambda look: figures.bars(bars, look),
            "Share of kernel time by what bounds it: " + "; ".join(f"{b.label} {values.share(b.share)}" for b in bars),
            "Share of kernel time by verdict, with the level of memory or the pipe where one is named.",
            not bars,
        ),
        Plot(
            "time_by_cause",
            lambda look: lost_plot.draw(split, look),
            "What each device spent its time on: "
            + "; ".join(f"{cause} {values.share(share)}" for _, shares in split for cause, share in shares.items()),
            "What each device spent its time on, pauses and replays left out. Numbers are those of the table below.",
            not split,
        ),
        Plot(
            "top_kernels",
            lambda look: figures.ranked(top, look),
            f"The {len(top)} kernels with the largest share of kernel time, coloured by verdict, as in the table below",
            "The largest kernels, coloured by verdict. Numbers are those of the table below.",
            not top,
        ),
        Plot(
            "roofline",
            lambda look: roofline_plot.roofline(lines, look),
            "Roofline: achieved operations per second over operations per DRAM byte; the table below has the numbers.",
            "Each point is a kernel: its area follows its share of kernel time, its colour its verdict, its shape the "
            "pipe whose roof applies. Diamonds are ridge points: left of them DRAM limits, right of them the pipe. "
            "Roofs are drawn at the highest SM clock; dashed lines are what this device was measured to reach. Numbers "
            "are those of the table of kernels.",
            not lines,
        ),
        Plot(
            "roofline_levels",
            lambda look: roofline_plot.hierarchy(levels, look),
            "The largest kernels by operations per byte of DRAM, L2 and L1; tables/roofline.csv has the numbers.",
            "Each line is one of the largest kernels, with a point for each level of the memory: its operations over "
            "the bytes moved there. A point on the slope of its level means that this level limits; the farther apart "
            "the points, the more is reused from the inner levels. Solid roofs were measured on this device, dotted "
            "ones are the datasheet's; without calibration those of L1 and L2 are not known. Numbers are those of the "
            "table of kernels.",
            not levels,
        ),
        Plot(
            "utilisation",
            lambda look: figures.utilisation(timelines, look),
            "Share of the time each device ran a kernel and a copy, from the first to the last kernel.",
            "From the first to the last kernel, in pieces of equal length. Kernels that ran side by side count once. "
            "Strips at the top, if any, show when the device was throttled (held back by power, heat or the board) and "
            "when its SM clock was low.",
            not timelines,
        ),
    ]


def png(plot: Plot) -> bytes:
    """The plot as it goes into a file: light and wide."""
    return figures.render(plot.draw, Look())


def drawings(plot: Plot, key: str, titles: Mapping[str, str]) -> list[dict[str, Any]]:
    """The plot as SVG for the page, wide and narrow; `key` keeps its ids apart from those of other plots."""
    made = []
    for style, look in (("wide", Look(palette.PAGE)), ("narrow", Look(palette.PAGE, narrow=True))):
        name = f"{key}-{style}"
        drawn = figures.render_svg(plot.draw, look, name)
        # Not escaped: svg.inline lets nothing through but drawing elements, their text escaped.
        made.append({"style": style, "svg": Markup(svg.inline(drawn, name, visible(plot.alt), titles))})
    return made


def titles(data: Data) -> dict[str, str]:
    """Full names of the largest kernels, by the name that their bars and points have in a drawing."""
    return {f"kernel-{rank}": f"{rank}. {tooltip(row['kernel'])}" for rank, row in enumerate(data.kernels, 1)}
