"""The report of a run, or of several: a page with its plots and tables, Markdown, JSON or PDF.

    with nanalyze.analysis.open("run_dir") as run:
        written = nanalyze.analysis.report.write(run)
        print(written.page)
        print(nanalyze.analysis.report.to_markdown(run))

`collect` reads a run, `plots` draws, `content` and `page` render, `summary` and `tables` write for programs,
`markdown` and `pdf` are the other formats, `output` guards the directory. Nothing here knows of a command line.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanalyze.analysis.report.output import ReportError

if TYPE_CHECKING:
    from nanalyze.analysis.report.collect import Data
    from nanalyze.analysis.run import Run

__all__ = ["ReportError", "Written", "step_count", "to_json", "to_markdown", "to_pdf", "write"]

REPORT_DIR = "report"
PLOTS = 6
READING = 29  # what `collect` reads
STEPS = READING + PLOTS + 1

Step = Callable[[str], None]


def _silent(name: str) -> None:
    """A step that nobody hears of."""


def step_count(format: str, runs: int = 1) -> int:
    """How often `step` is called for a report in that format on so many runs."""
    return runs * (READING + (PLOTS if format in ("html", "pdf") else 0)) + 1


@dataclass(frozen=True)
class Written:
    """Where a report is, and its first sentences."""

    directory: Path
    page: Path
    headline: tuple[str, ...]


def write(
    runs: Run | Sequence[Run], directory: Path | None = None, *, force: bool = False, step: Step = _silent
) -> Written:
    """Write the report of a run, or of several, into `directory`; by default `<run>/report` for one.

    An earlier report of the same runs is replaced; anything else in the way is refused unless
    `force`. `step` is called with the name of what is done next, `step_count("html", n)` times. Raises ReportError
    where the report cannot be written and QueryError where a run cannot be read.
    """
    # matplotlib takes half a second to import: only when a report is made.
    from nanalyze.analysis.report import content, output, page, summary

    given = _several(runs)
    target = directory or _default_directory(given)
    for run in given:
        output.check_target(target, run.path, summary.identity([run.info for run in given]), force)
    with output.writing(target) as draft:
        parts, datas = [], []
        for place, run in enumerate(given, 1):
            folder = f"run{place}/" if len(given) > 1 else ""
            data = _collect(run, step)
            drawn = _draw(data, draft / folder, f"run{place}-" if folder else "", step)
            parts.append(page.Part(data, shlex.quote(str(run.path)), folder, drawn))
            datas.append(data)
        step("writing")
        for part in parts:
            _write_tables(part.data, draft / part.folder)
        html = page.page(parts, _version(), _comparisons(given))
        (draft / output.PAGE_FILE).write_text(html, encoding="utf-8", errors="backslashreplace")
        files = [str(path.relative_to(draft).as_posix()) for path in draft.rglob("*") if path.is_file()]
        told = summary.of_runs(datas, _version(), [*files, output.SUMMARY_FILE])
        (draft / output.SUMMARY_FILE).write_text(summary.encode(told), encoding="utf-8")
    return Written(target, target / output.PAGE_FILE, tuple(content.headline_of(datas[0])))


def to_markdown(runs: Run | Sequence[Run], *, step: Step = _silent) -> str:
    """The report as Markdown that fits a pull request. Raises QueryError."""
    from nanalyze.analysis.report import markdown as made

    given = _several(runs)
    datas = [_collect(run, step) for run in given]
    step("writing")
    return made.document(datas, [shlex.quote(str(run.path)) for run in given], _comparisons(given))


def to_json(runs: Run | Sequence[Run], *, step: Step = _silent) -> str:
    """The report's numbers in the shape of summary.json. Raises QueryError."""
    from nanalyze.analysis.report import summary

    datas = [_collect(run, step) for run in _several(runs)]
    step("writing")
    return summary.encode(summary.of_runs(datas, _version(), []))


def to_pdf(runs: Run | Sequence[Run], *, step: Step = _silent) -> bytes:
    """The report as PDF, A4. Raises QueryError."""
    from nanalyze.analysis.report import pdf as made
    from nanalyze.analysis.report import plots

    given = _several(runs)
    datas = [_collect(run, step) for run in given]
    images = [{plot.name: _stepped(plots.png, plot, step) for plot in plots.plots(data)} for data in datas]
    step("writing")
    paths = [shlex.quote(str(run.path)) for run in given]
    return made.document(datas, images, paths, _comparisons(given), _version())


def _several(runs: Run | Sequence[Run]) -> list[Run]:
    found = list(runs) if isinstance(runs, Sequence) else [runs]
    if not found:
        raise ReportError("there is no run to report on: give at least one.")
    return found


def _default_directory(runs: Sequence[Run]) -> Path:
    if len(runs) > 1:
        raise ReportError("a report on several runs belongs to none of them: say with -o where it goes.")
    return runs[0].path / REPORT_DIR


def _collect(run: Run, step: Step) -> Data:
    from nanalyze.analysis.report import collect, content

    return collect.collect(run, content.file_name(run.path), step)


def _stepped(draw: Callable[[Any], Any], plot: Any, step: Step) -> Any:
    step(f"plot {plot.name}")
    return draw(plot)


def _draw(data: Data, folder: Path, prefix: str, step: Step) -> dict[str, list[dict[str, Any]]]:
    """The plots as files in `folder`, and those that show something as drawings for the page."""
    from nanalyze.analysis.report import plots

    (folder / "plots").mkdir(parents=True)
    titles = plots.titles(data)
    drawn = {}
    for plot in plots.plots(data):
        image = _stepped(plots.png, plot, step)
        (folder / "plots" / f"{plot.name}.png").write_bytes(image)
        if not plot.is_empty:
            drawn[plot.name] = plots.drawings(plot, f"{prefix}{plot.name}", titles)
    return drawn


def _write_tables(data: Data, folder: Path) -> None:
    from nanalyze.analysis.report import tables

    (folder / "tables").mkdir()
    for name, table in data.tables.items():
        tables.write_csv(folder / "tables" / f"{name}.csv", table)


def _comparisons(runs: Sequence[Run]) -> list[Any]:
    """How each run compares with the first; nothing to say of a single one."""
    from nanalyze.analysis.report import several

    if len(runs) == 1:
        return []
    return [None, *(several.against(runs[0], run) for run in runs[1:])]


def _version() -> str:
    try:
        return version("nanalyze")
    except PackageNotFoundError:
        return "unknown"
