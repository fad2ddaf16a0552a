"""What the page says of one run: every table and sentence, ready for the template."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from nanalyze.analysis.report import (
    activity,
    clocks,
    cost,
    headline,
    kernels,
    lost,
    measurements,
    opportunities,
    rooflines,
    sampling,
    sections,
    sources,
    steps,
    values,
)
from nanalyze.analysis.report import ranks as rank_table
from nanalyze.analysis.report.cells import Grid, Row
from nanalyze.analysis.report.collect import Data, labels, ranks
from nanalyze.analysis.report.names import cut, visible
from nanalyze.analysis.report.perturbation import perturbation_grid
from nanalyze.rundir.measurement import WARM_UP

MEASURED = ("measured", "Measured")
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


def content(data: Data, drawn: Mapping[str, Any], path: str, prefix: str = "", folder: str = "") -> dict[str, Any]:
    """All that the template needs for one run.

    `drawn` holds the plots by name, `path` is the run directory as a shell word, `prefix` keeps ids apart from those
    of other runs in the page, `folder` is where the run's files are, with a slash at its end.
    """
    verdicts, points, processes = data.tables["verdicts"], data.rows("roofline"), data.rows("processes")
    ranges, events = data.tables["ranges"], data.tables["events"]
    return {
        "prefix": prefix,
        "folder": folder,
        "behind": {part: sources.behind(part, folder) for part in sources.PARTS},
        "title": title(data),
        "subtitle": subtitle(data, processes),
        "sections": [
            (f"{prefix}{anchor}", name) for anchor, name in (*([MEASURED] if data.measurements else []), *SECTIONS)
        ],
        "measurements": [(measurements.title(found), measurements.grid(found)) for found in data.measurements],
        "headline": headline_of(data),
        "leaders": headline.leaders(data.kernels),
        "caveats": caveats(data),
        "losses": sections.losses(data.losses),
        "losses_title": losses_title(len(data.losses)),
        "plots": drawn,
        "shares": kernels.share_grid(data.shares),
        "kernels": kernels.kernel_rows(data.kernels, dict(data.shapes)),
        "kernel_heads": kernels.KERNEL_HEADS,
        "kernel_notes": () if data.kernels else ("No kernel launch was recorded.",),
        "kernels_foot": kernels.rest_text(kernels.rest(verdicts, len(data.kernels))),
        "graphs": activity.graph_grid(data.rows("graph_counters")),
        "roofs": rooflines.roof_grid(points, ranks(data)),
        "opportunities": opportunities.grid(data.rows("opportunities"), path),
        "causes": lost.cause_grid(data.rows("time_by_cause"), labels(data)),
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
        "steps": steps.step_grid(data.rows("steps")),
        "outliers": steps.outlier_grid(data.rows("steps")),
        "ranges": activity.range_grid(ranges.slice(0, activity.SHOWN_RANGES).to_pylist(), ranges.num_rows),
        "copies": activity.copy_grid(data.rows("copies")),
        "devices": sections.device_grid(data.devices),
        "peaks": sections.peak_grid(data.devices),
        "ceilings": rooflines.ceiling_grid(data.rows("ceilings")),
        "processes": sections.process_grid(processes),
        "ranks": rank_table.rank_grid(data.rows("ranks")),
        "recording": sections.recording_grid(data.recording),
        "events": sections.event_grid(events.slice(0, sections.SHOWN_ROWS).to_pylist(), events.num_rows),
        "damage": sections.damage_grid(data.rows("damage")),
        "methods": kernels.method_grid(data.methods),
        "thresholds": sections.threshold_grid(data.rows("settings")),
        "commands": commands(path),
    }


def title(data: Data) -> str:
    return f"Run {cut(visible(data.run['name']), 80)}"


def headline_of(data: Data) -> list[str]:
    """The sentences at the top, as in the summary."""
    return headline.headline(data.totals, data.devices, data.use, data.shares)


def low_clock_pct(data: Data) -> float:
    return float(next(row["value"] for row in data.rows("settings") if row["name"] == "low_clock_pct"))


def caveats(data: Data) -> list[str]:
    """What to bear in mind, what recording cost, and whether clocks were held back."""
    throttled = clocks.sentence(data.rows("throttling_summary"), labels(data))
    slowest = rank_table.sentence(data.rows("ranks"))
    lines = [*headline.caveats(data.totals, data.recording), warm_up(data), slowest, throttled]
    return [line for line in [*lines, *cost.sentences(data.costs)] if line]


def warm_up(data: Data) -> str:
    """What of a measurement's run was launched for no measurement; empty for other runs."""
    ranges = data.tables["ranges"]
    rows = ranges.filter(pc.equal(ranges["name"], WARM_UP)).to_pylist()
    if not rows or not rows[0]["kernels"]:
        return ""
    count = values.count(rows[0]["kernels"])
    return (
        f"{count} launches, {values.duration(rows[0]['kernel_ns'])} of kernel time, were set-up and warm-up of "
        f"recorder.measure (range “{WARM_UP}”): tables of kernels hold them, what was measured does not."
    )


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


def subtitle(data: Data, processes: Sequence[Row]) -> str:
    parts = [f"recorded {values.instant(data.run.get('created_ns'))}"]
    if data.run.get("source") != "recorder":
        parts.append(f"imported from {visible(str(data.run.get('source')))[:60]}")
    told = sections.command(processes[0]["command"]) if processes else None
    if told:
        parts.append(cut(visible(told), 160))
    return " · ".join(parts)


def losses_title(count: int) -> str:
    what = "One thing is missing" if count == 1 else f"{count:,} things are missing"
    return f"{what} from this run. The report covers what could be read."
