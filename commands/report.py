"""`nanalyze report`: one self-contained page, its plots, its tables and a summary."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from nanalyze.analysis import report as reports
from nanalyze.commands._open import open_run


@click.command("report")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Directory to write into instead of RUN_DIR/report; it is made if need be.",
)
@click.option("--force", is_flag=True, help="Write into a directory that holds something else or another run's report.")
def report(run_dir: Path, output: Path | None, force: bool) -> None:
    """Report on the run in RUN_DIR: report.html, plots as PNG, tables as CSV, summary.json.

    report.html is one file without scripts that needs no network. An earlier report of the same
    run is replaced.

    \b
    Examples:
      nanalyze report run_dir
      nanalyze report run_dir -o ~/reports/tuesday
    """
    with open_run(run_dir) as run, _progress() as step:
        written = reports.write(run, output, force=force, step=step)
    for sentence in written.headline:
        click.echo(sentence)
    click.echo(f"Report: {written.page}")
    click.echo(
        f'Ask more: nanalyze sql {shlex.quote(str(run_dir))} "SELECT kernel, share, bound, reason FROM verdicts"'
    )


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Something to call at each step: draws a bar on a terminal, does nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    with click.progressbar(
        length=reports.STEPS, label="Reporting", file=sys.stderr, item_show_func=lambda name: name
    ) as bar:
        yield lambda name: bar.update(1, name)
