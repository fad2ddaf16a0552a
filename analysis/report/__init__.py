"""The report of a run: report.html, its plots as PNG, its tables as CSV, summary.json.

    with nanalyze.analysis.open("run_dir") as run:
        written = nanalyze.analysis.report.write(run)
        print(written.page)

`collect` reads the run, `figures` draws, `page` renders, `summary` and `tables` write for
programs, `output` guards the directory. Nothing here knows of a command line.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from nanalyze.analysis.report.output import ReportError

if TYPE_CHECKING:
    from nanalyze.analysis.run import Run

__all__ = ["STEPS", "ReportError", "Written", "write"]

REPORT_DIR = "report"
PLOTS = 5
# How often `write` calls `step`: what `collect` reads, each plot, and writing.
STEPS = 27 + PLOTS + 1


@dataclass(frozen=True)
class Written:
    """Where a report is, and its first sentences."""

    directory: Path
    page: Path
    headline: tuple[str, ...]


def write(
    run: Run, directory: Path | None = None, *, force: bool = False, step: Callable[[str], None] = lambda name: None
) -> Written:
    """Write the report of `run` into `directory`, by default `<run>/report`.

    An earlier report of the same run is replaced; anything else in the way is refused unless
    `force`. `step` is called STEPS times with the name of what is done next. Raises ReportError
    where the report cannot be written and QueryError where the run cannot be read.
    """
    # matplotlib takes half a second to import: only when a report is made.
    from nanalyze.analysis.report import collect, output, page, summary, tables

    target = directory or run.path / REPORT_DIR
    output.check_target(target, run.path, str(run.info.get("run_id")), force)
    with output.writing(target) as draft:
        data = collect.collect(run, page.file_name(run.path), step)
        images = page.render_plots(data, step)
        step("writing")
        for folder in ("plots", "tables"):
            (draft / folder).mkdir()
        for name, looks in images.items():
            (draft / "plots" / f"{name}.png").write_bytes(looks["light_wide"])
        for name, table in data.tables.items():
            tables.write_csv(draft / "tables" / f"{name}.csv", table)
        command_path = shlex.quote(str(run.path))
        html = page.page(data, images, command_path, _version())
        (draft / output.PAGE_FILE).write_text(html, encoding="utf-8", errors="backslashreplace")
        files = [str(path.relative_to(draft).as_posix()) for path in draft.rglob("*") if path.is_file()]
        sentences = page.headline_of(data)
        content = summary.summary(data, sentences, _version(), [*files, output.SUMMARY_FILE])
        (draft / output.SUMMARY_FILE).write_text(summary.encode(content), encoding="utf-8")
    return Written(target, target / output.PAGE_FILE, tuple(sentences))


def _version() -> str:
    try:
        return version("nanalyze")
    except PackageNotFoundError:
        return "unknown"
