"""report.html: one file without scripts or references, rendered with autoescaping."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from nanalyze.analysis.report import (
    activity,
    clocks,
    cost,
    figures,
    headline,
    kernels,
    lost,
    lost_plot,
    opportunities,
    palette,
    rooflines,
    sampling,
    sections,
    steps,
    values,
)
from nanalyze.analysis.report import ranks as rank_table
from nanalyze.analysis.report.cells import Grid, Row
from nanalyze.analysis.report.collect import MOST_SORTED, Data, device_label, ranks
from nanalyze.analysis.report.figures import Look
from nanalyze.analysis.report.names import cut, visible
from nanalyze.analysis.report.perturbation import perturbation_grid

CSS_PIXELS_AN_INCH = 125
SECTIONS = (
    ("gain", "What would gain most"),
    ("verdicts", "Where the time goes"),
    ("lost", "Time lost"),
    ("kernels", "Kernels"),
    ("roofline", "Roofline"),
    ("utilisation", "Utilisation"),
    ("sampling", "Sampling"),
    ("steps", "Steps"),
    ("ranges", "Ranges"),
    ("copies", "Copies"),
    ("devices", "Devices"),
    ("processes", "Processes"),
    ("cost", "Cost"),
    ("recording", "The recording"),
    ("method", "Method"),
    ("ask", "Ask your own"),
)
LOOKS = {
    "light_wide": Look(palette.LIGHT),
    "light_narrow": Look(palette.LIGHT, narrow=True),
    "dark_wide": Look(palette.DARK),
    "dark_narrow": Look(palette.DARK, narrow=True),
}

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
    lines = rooflines.rooflines(points, data.devices, ranks(data))
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
            lambda look: figures.roofline(lines, look),
            "Roofline: achieved operations per second over operations per DRAM byte; the table below has the numbers.",
            "Each point is a kernel: its area follows its share of kernel time, its colour its verdict, its shape the "
            "pipe whose roof applies. Diamonds are ridge points: left of them DRAM limits, right of them the pipe. "
            "Roofs are drawn at the highest SM clock. Numbers are those of the table of kernels.",
            not lines,
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


def render_plots(data: Data, step: Callable[[str], None]) -> dict[str, dict[str, bytes]]:
    """PNG bytes by plot and look; `step` is called before each plot."""
    rendered = {}
    for plot in plots(data):
        step(f"plot {plot.name}")
        rendered[plot.name] = {name: figures.render(plot.draw, look) for name, look in LOOKS.items()}
    return rendered


def page(data: Data, images: Mapping[str, Mapping[str, bytes]], command_path: str, version: str) -> str:
    """The whole page as HTML text."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=False, keep_trailing_newline=True,
    )  # fmt: skip
    css = Markup(_template("report.css"))  # our own file, the only text that is not escaped
    content = _content(data, images, command_path, version)
    return environment.get_template("report.html.j2").render(page=content, css=css)


def headline_of(data: Data) -> list[str]:
    """The sentences at the top, as in the summary."""
    return headline.headline(data.totals, data.devices, data.use, data.shares)


def _template(name: str) -> str:
    return files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


def _content(data: Data, images: Mapping[str, Mapping[str, bytes]], path: str, version: str) -> dict[str, Any]:
    verdicts, points, processes = data.tables["verdicts"], data.rows("roofline"), data.rows("processes")
    ranges, events = data.tables["ranges"], data.tables["events"]
    return {
        "title": f"Run {cut(visible(data.run['name']), 80)}",
        "subtitle": _subtitle(data, processes),
        "sections": SECTIONS,
        "headline": headline_of(data),
        "leaders": headline.leaders(data.kernels),
        "caveats": _caveats(data),
        "losses": sections.losses(data.losses),
        "losses_title": _losses_title(len(data.losses)),
        "plots": {("kernels" if p.name == "top_kernels" else p.name): _image(p, images[p.name]) for p in plots(data)},
        "shares": kernels.share_grid(data.shares),
        "kernels": kernels.kernel_rows(data.kernels, dict(data.shapes)),
        "kernel_heads": kernels.KERNEL_HEADS,
        "kernel_notes": () if data.kernels else ("No kernel launch was recorded.",),
        "kernels_foot": kernels.rest_text(kernels.rest(verdicts, len(data.kernels))),
        "graphs": activity.graph_grid(data.rows("graph_counters")),
        "roofs": rooflines.roof_grid(points, ranks(data)),
        "opportunities": _unless_left_out(data, "opportunities", opportunities.grid(data.rows("opportunities"), path)),
        "causes": _unless_left_out(data, "time_by_cause", lost.cause_grid(data.rows("time_by_cause"), labels(data))),
        "kernel_losses": lost.kernel_grid(data.rows("kernel_losses")),
        "utilisation": activity.use_grid(data.use),
        "throttling": clocks.throttle_grid(
            data.rows("throttling_summary"), labels(data), low_clock_pct(data), data.is_clock_read
        ),
        "quality": sampling.quality_grid(data.rows("attribution_quality"), labels(data)),
        "against_exact": sampling.exact_grid(sampling.against_exact(data.rows("sampled_against_exact"))),
        "drift": sampling.drift_grid(data.rows("drift"), data.windows) if data.rows("attribution_quality") else Grid(),
        "cost": cost.cost_grid(data.costs),
        "perturbation": perturbation_grid(data.rows("perturbation")),
        "steps": _unless_left_out(data, "steps", steps.step_grid(data.rows("steps"))),
        "outliers": steps.outlier_grid(data.rows("steps")),
        "ranges": activity.range_grid(ranges.slice(0, activity.SHOWN_RANGES).to_pylist(), ranges.num_rows),
        "copies": activity.copy_grid(data.rows("copies")),
        "devices": sections.device_grid(data.devices),
        "peaks": sections.peak_grid(data.devices),
        "processes": sections.process_grid(processes),
        "ranks": rank_table.rank_grid(data.rows("ranks")),
        "recording": sections.recording_grid(data.recording),
        "events": sections.event_grid(events.slice(0, sections.SHOWN_ROWS).to_pylist(), events.num_rows),
        "damage": sections.damage_grid(data.rows("damage")),
        "methods": kernels.method_grid(data.methods),
        "thresholds": sections.threshold_grid(data.rows("settings")),
        "commands": commands(path),
        "over_mark": values.OVER_MARK,
        "colophon": f"Written by nanalyze {version}. Run {visible(str(data.run.get('run_id')))[:64]}.",
    }


def _unless_left_out(data: Data, table: str, grid: Grid) -> Grid:
    """`grid`, or why there is nothing in it."""
    if table not in data.left_out:
        return grid
    return Grid(
        notes=(
            f"Left out of a report on more than {MOST_SORTED:,} launches, since it takes minutes and much memory. "
            f"Ask for it: nanalyze sql RUN --query {table}",
        )
    )


def labels(data: Data) -> dict[str, str]:
    """What the page calls each device, by its key in the views."""
    keys = {device["uuid"] or f"{device['process']}/{device['device_id']}" for device in data.devices}
    keys |= {row["device"] for row in data.use} | {row["device"] for row in data.rows("time_by_cause")}
    return {key: device_label(key, data.devices) for key in keys}


def low_clock_pct(data: Data) -> float:
    return float(next(row["value"] for row in data.rows("settings") if row["name"] == "low_clock_pct"))


def _caveats(data: Data) -> list[str]:
    """What to bear in mind, what recording cost, and whether clocks were held back."""
    throttled = clocks.sentence(data.rows("throttling_summary"), labels(data))
    slowest = rank_table.sentence(data.rows("ranks"))
    lines = [*headline.caveats(data.totals, data.recording), slowest, throttled, *cost.sentences(data.costs)]
    return [line for line in lines if line]


def commands(path: str) -> list[str]:
    """Commands that a reader can go on with; `path` is the run directory as a shell word."""
    return [
        f"nanalyze sql {path}                      # interactive; .tables and .schema list what there is",
        f'nanalyze sql {path} "SELECT kernel, share, bound, reason FROM verdicts LIMIT 20"',
        f'nanalyze sql {path} "SELECT counter, value, unit, method FROM counters WHERE kernel_class_id = ..."',
        f'nanalyze sql {path} --format csv "SELECT name, count(*), sum(end_ns - start_ns) AS host_ns FROM ranges '
        'GROUP BY name ORDER BY host_ns DESC"',
    ]


def file_name(path: Path) -> str:
    """The run's name: its directory's, with bytes that are not UTF-8 as escapes."""
    return os.fsencode(path.absolute().name or str(path)).decode("utf-8", "backslashreplace")


def _subtitle(data: Data, processes: Sequence[Row]) -> str:
    parts = [f"recorded {values.instant(data.run.get('created_ns'))}"]
    if data.run.get("source") != "recorder":
        parts.append(f"imported from {visible(str(data.run.get('source')))[:60]}")
    told = sections.command(processes[0]["command"]) if processes else None
    if told:
        parts.append(cut(visible(told), 160))
    return " · ".join(parts)


def _losses_title(count: int) -> str:
    what = "One thing is missing" if count == 1 else f"{count:,} things are missing"
    return f"{what} from this run. The report covers what could be read."


def _image(plot: Plot, looks: Mapping[str, bytes]) -> dict[str, Any] | None:
    if plot.is_empty:
        return None
    return {
        **{name: f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}" for name, png in looks.items()},
        "alt": visible(plot.alt),
        "caption": plot.caption,
        "width": round(figures.WIDE_INCHES * CSS_PIXELS_AN_INCH),
    }
