"""`nanalyze export`: a run for ui.perfetto.dev, or its views as Parquet or CSV."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from nanalyze import exporters
from nanalyze.commands._open import RunDirectory, open_run

SHOW_AFTER_S = 1.0
SINGULAR = {"kernels": "kernel", "copies": "copy", "ranges": "range", "values": "value", "stretches": "stretch"}


@click.command("export")
@click.argument("run_dir", type=RunDirectory())
@click.option(
    "--format",
    "format_",
    type=click.Choice(exporters.FORMATS),
    default="chrome",
    show_default=True,
    help="chrome: one JSON file of trace events. parquet, csv: a directory with one file a view.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="File or directory to write; .gz is gzipped."
)
@click.option("--view", "views", multiple=True, help="Only this view (parquet, csv); may be repeated.")
@click.option("--force", is_flag=True, help="Overwrite what is there.")
def export(run_dir: Path, format_: str, output: Path, views: tuple[str, ...], force: bool) -> None:
    """Write the run in RUN_DIR in a format that other programs open.

    The chrome format opens in ui.perfetto.dev: kernels and copies by stream, ranges by thread,
    counters as tracks, each kernel's verdict in its arguments and category.

    \b
    Examples:
      nanalyze export run_dir -o trace.json.gz
      nanalyze export run_dir --format parquet -o tables
      nanalyze export run_dir --format csv --view verdicts --view counters -o tables
    """
    progress = _Progress() if sys.stderr.isatty() else None
    with open_run(run_dir) as run:
        try:
            done = exporters.export(run, format_, output, views=views, force=force, progress=progress)
        finally:
            if progress is not None:
                progress.clear()
    told = _counted if format_ == "chrome" else _rows
    click.echo(", ".join(told(rows, what) for what, rows in done.rows.items() if rows) or "no rows")
    for reason, rows in done.left_out.items():
        click.echo(f"Left out: {_counted(rows, reason)}")
    if format_ == "chrome":
        click.echo(f"Trace: {done.output}. Open it in https://ui.perfetto.dev (it stays on your machine).")
    else:
        click.echo(f"Tables: {done.output}")


def _counted(number: int, what: str) -> str:
    """`1 copy`, `2 copies`: the singular of what a trace holds, also at the beginning of a longer phrase."""
    if number == 1:
        what = next((what.replace(many, one, 1) for many, one in SINGULAR.items() if many in what), what)
    return f"{number:,} {what}"


def _rows(number: int, view: str) -> str:
    return f"{view}: {number:,} row{'' if number == 1 else 's'}"


class _Progress:
    """What is being written and how far, redrawn at most ten times a second."""

    def __init__(self) -> None:
        self._started = self._drawn = time.monotonic()
        self._width = 0

    def __call__(self, what: str, done: int) -> None:
        now = time.monotonic()
        if now - self._started < SHOW_AFTER_S or now - self._drawn < 0.1:
            return
        self._drawn = now
        text = f"exporting {what}: {done:,}"
        click.echo(f"\r{text.ljust(self._width)}", nl=False, err=True)
        self._width = max(self._width, len(text))

    def clear(self) -> None:
        """Remove the line."""
        if self._width:
            click.echo("\r" + " " * self._width + "\r", nl=False, err=True)
