"""`nanalyze report`: a self-contained page with its plots, tables and summary, or one document."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nanalyze.analysis import report as reports
from nanalyze.analysis.report import output as document
from nanalyze.commands._open import RunDirectory, engine_options, open_run, require_output

if TYPE_CHECKING:
    from nanalyze.analysis.run import Run


FORMATS = ("html", "md", "json", "pdf")


@click.command("report")
@click.argument("run_dirs", type=RunDirectory(), nargs=-1, required=True, metavar="RUN_DIR...")
@click.option("--format", "-f", type=click.Choice(FORMATS), default="html", show_default=True, help="What to write.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="html: directory to write into instead of RUN_DIR/report; it is made if need be. Others: file; md and json "
    "go to standard output without it, pdf to RUN_DIR/report/report.pdf.",
)
@click.option("--force", is_flag=True, help="Write into a directory that holds something else, or over a file.")
@engine_options
def report(
    run_dirs: tuple[Path, ...], format: str, output: Path | None, force: bool, engine: str, master: str | None
) -> None:
    """Report on the run in RUN_DIR: report.html, plots as PNG, tables as CSV, summary.json.

    report.html is one file that needs no network. An earlier report of the same run is replaced. Of several
    runs, or ranks that were recorded apart, it shows each, after a table that sets them side by side.

    --format md is for a pull request or a job's summary, json holds the numbers as summary.json does, pdf is
    for printing and mailing.

    \b
    Examples:
      nanalyze report run_dir
      nanalyze report run_dir -o ~/reports/tuesday
      nanalyze report before after -o both
      nanalyze report run_dir --format md >> "$GITHUB_STEP_SUMMARY"
      nanalyze report run_dir --format pdf -o run.pdf
      nanalyze report s3://bucket/run -o report --engine spark --master spark://head:7077
    """
    if output is None and format in ("html", "pdf"):
        require_output(run_dirs)
    with ExitStack() as stack:
        runs = [stack.enter_context(open_run(run_dir, engine=engine, master=master)) for run_dir in run_dirs]
        step = stack.enter_context(_progress(reports.step_count(format, len(runs))))
        if format == "html":
            written = reports.write(runs, output, force=force, step=step)
        else:
            _write_document(runs, format, output, force, step)
            return
    for sentence in written.headline:
        click.echo(sentence)
    click.echo(f"Report: {written.page}")
    click.echo(
        f'Ask more: nanalyze sql {shlex.quote(str(run_dirs[0]))} "SELECT kernel, share, bound, reason FROM verdicts"'
    )


def _write_document(
    runs: Sequence[Run], format: str, output: Path | None, force: bool, step: Callable[[str], None]
) -> None:
    """Write one of the formats that are a single document, to a file or to standard output."""
    path = output
    if format == "pdf" and path is None:
        if len(runs) > 1:
            raise reports.ReportError("a PDF on several runs belongs to none of them: say with -o where it goes.")
        path = runs[0].path / reports.REPORT_DIR / "report.pdf"
    if path is not None:
        document.check_file(path, force=force or output is None)
    if format == "pdf":
        data = reports.to_pdf(runs, step=step)
    else:
        make = reports.to_markdown if format == "md" else reports.to_json
        data = make(runs, step=step).encode("utf-8", "backslashreplace")
    if path is None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    document.write_file(path, data)
    click.echo(f"Report: {path}")


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[str], None]]:
    """Something to call at each step: draws a bar on a terminal, does nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    with click.progressbar(length=steps, label="Reporting", file=sys.stderr, item_show_func=lambda name: name) as bar:
        yield lambda name: bar.update(1, name)
