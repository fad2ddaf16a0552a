"""trend.html and what lies beside it: plots as PNG and SVG, tables as CSV, trend.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanalyze.analysis.report import figures, palette, plots, tables, values
from nanalyze.analysis.report.cells import Cell, Grid, Head, tooltip, words
from nanalyze.analysis.report.figures import Look
from nanalyze.analysis.report.names import shorten, visible
from nanalyze.analysis.report.output import ReportError, writing
from nanalyze.analysis.report.page import rendered
from nanalyze.analysis.trend import LEAST_SHARE, Row, Trend, changes, outputs, picture
from nanalyze.analysis.trend.series import JOB

if TYPE_CHECKING:
    from nanalyze.analysis.compare.gates import Outcome

PAGE_FILE = "trend.html"
JSON_FILE = "trend.json"
SHOWN_KERNELS = 200
NAME_CHARACTERS = 90


def write(trend: Trend, directory: Path, version: str, *, force: bool = False, gates: Sequence[Outcome] = ()) -> Path:
    """Write everything into `directory`, in place of an earlier trend; the page. Raises ReportError."""
    check_target(directory, force)
    with writing(directory) as draft:
        drawn = picture.plots(trend)
        for folder in ("plots", "tables"):
            (draft / folder).mkdir()
        for plot in drawn:
            (draft / "plots" / f"{plot.name}.png").write_bytes(plots.png(plot))
            svg = figures.render_svg(plot.draw, Look(palette.LIGHT), plot.name)
            (draft / "plots" / f"{plot.name}.svg").write_bytes(svg)
        for name, table in outputs.tables(trend).items():
            tables.write_csv(draft / "tables" / f"{name}.csv", table)
        html = rendered("trend.html.j2", _content(trend, drawn, version))
        (draft / PAGE_FILE).write_text(html, encoding="utf-8", errors="backslashreplace")
        (draft / JSON_FILE).write_text(outputs.to_json(trend, gates), encoding="utf-8")
    return directory / PAGE_FILE


def check_target(target: Path, force: bool) -> None:
    """Refuse `target` unless it is new, empty, an earlier trend, or forced. Raises ReportError."""
    try:
        if target.exists() and not target.is_dir():
            raise ReportError(f"{target}: is a file, not a directory. Choose another place with -o.")
        if force or not target.exists() or not any(target.iterdir()) or (target / JSON_FILE).is_file():
            return
    except OSError as error:
        raise ReportError(f"{target}: cannot be read: {error.strerror or error}. Choose another place.") from error
    raise ReportError(f"{target}: holds something else than a trend. Choose another place with -o, or pass --force.")


def _content(trend: Trend, drawn: Sequence[plots.Plot], version: str) -> dict[str, Any]:
    own = [row for row in trend.rows if row.series.kind == JOB]
    ordered = [row for row in (*trend.found, *(r for r in trend.rows if r.change is None)) if row.series.kind != JOB]
    return {
        "title": "Trend of a job",
        "headline": outputs.headline(trend),
        "plots": {plot.name: _image(plot) for plot in drawn},
        "job": _grid(own, trend) if own else Grid(notes=("No range repeats in all runs: times are a launch's.",)),
        "kernels": _grid(ordered[:SHOWN_KERNELS], trend, len(ordered) - SHOWN_KERNELS),
        "marks": _marks(trend),
        "runs": _runs(trend),
        "method": method(trend),
        "colophon": f"Written by nanalyze {version}.",
    }


def _image(plot: plots.Plot) -> Mapping[str, Any] | None:
    if plot.is_empty:
        return None
    return {"drawings": plots.drawings(plot, f"trend-{plot.name}", {}), "caption": plot.caption}


def _grid(rows: Sequence[Row], trend: Trend, more: int = 0) -> Grid:
    heads = (Head("Kernel", style="text"), Head("Share"), Head("First", f"a {trend.unit}"),
             Head("Last", f"a {trend.unit}"), Head("What happened", "95 % interval", "text"), Head("p"),
             Head("With it", style="text"), Head("Bound by", style=""))  # fmt: skip
    foot = f"{more:,} further kernels without a change are in tables/kernels.csv." if more > 0 else ""
    return Grid(heads, [_cells(row, trend) for row in rows], foot=foot)


def _cells(row: Row, trend: Trend) -> list[Cell]:
    _, share, first, last, happened, p_value, marks, verdict = outputs.cells(row, trend)
    name = row.series.name
    short = visible(name) if row.series.kind == JOB else visible(shorten(name, NAME_CHARACTERS))
    return [
        Cell(short, "kernel", title=tooltip(name)), Cell(share), Cell(first), Cell(last), words(happened, "wide"),
        Cell(p_value), words(marks, "text"), words(verdict),
    ]  # fmt: skip


def _marks(trend: Trend) -> Grid:
    if not trend.marks:
        return Grid(notes=("Driver, libraries, GPU, host and clock were the same in all runs, as far as is known.",))
    heads = (Head("Run"), *(Head(text, style="text") for text in ("Date", "What", "Before", "After")))
    return Grid(heads, [[words(text, "text") for text in outputs.mark_cells(mark, trend)] for mark in trend.marks])


def _runs(trend: Trend) -> Grid:
    heads = (Head("#"), Head("Run", style="text"), Head("Started", style=""), Head("Kernel time"), Head("SM clock"),
             Head("Throttled"), Head("Rolled up", "launches"), Head("Driver", style=""),
             Head("GPU", style="text"))  # fmt: skip
    body = [
        [
            Cell(str(number)),
            words(point.label, "text"),
            Cell(values.instant(point.started_ns), ""),
            Cell(values.duration(point.total_ns)),
            Cell(values.scaled(point.clock_hz, "Hz")),
            Cell(values.share(point.throttled_share)),
            Cell(values.count(point.rolled_up)),
            words(", ".join(point.facts["driver"]) or None),
            words(", ".join(point.facts["GPU model"]) or None, "text"),
        ]
        for number, point in enumerate(trend.points, 1)
    ]
    return Grid(heads, body)


def method(trend: Trend) -> list[str]:
    """What stands behind the numbers, with its limits."""
    return [
        f"A run's time is the mean over pieces of the run without spikes, for each of {len(trend.rows):,} series. "
        f"Kernels with less than {100 * LEAST_SHARE:g} % of the kernel time, and those in fewer than "
        f"{changes.LEAST_RUNS} runs, are not tested.",
        "A change is the place in a series that divides it best, judged by a moderated t; a drift is judged by "
        "Kendall's test and measured by Theil and Sen's slope. p is the share of redrawn jobs, in which nothing "
        "changes but runs depend on each other as they do here, that show as much in any of their kernels: it holds "
        f"for all kernels together. Changes are reported up to {changes.STEP_RATE:g}, drifts up to "
        f"{changes.DRIFT_RATE:g}.",
        "What follows the mean SM clock of the runs is regressed out before."
        if trend.clock_known
        else "The clock of some runs is not known. In its place what moves all kernels together, where anything does, "
        "is regressed out (the first principal component, by parallel analysis); what changed only with it is "
        "undetermined.",
        "A mark at the same run as a change is a suspect, not a proof.",
    ]
