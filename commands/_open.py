"""Opening a run for a command: progress on a terminal, a warning where something is damaged."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

import nanalyze.analysis as na
from nanalyze.analysis.engines import location

ENGINES = ("duckdb", "spark")
Command = TypeVar("Command", bound=Callable[..., Any])

SHOW_AFTER_S = 1.0  # a bar for a run that opens at once would only flicker


class RunDirectory(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A run directory: a path, or a URI such as s3://bucket/run."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return location.UriPath(value) if location.is_uri(str(value)) else Path(value)


class LocalRun(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A run directory on this machine, for what is written to or followed."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if location.is_uri(str(value)):
            self.fail(f"{value}: is not on this machine, and this command works on runs that are.", param, ctx)
        return Path(value)


def engine_options(command: Command) -> Command:
    """The options --engine and --master, for a command that opens runs."""
    for option in (
        click.option(
            "--master", metavar="URL", help="The Spark cluster: spark://host:port, yarn, k8s://... or local[*]."
        ),
        click.option(
            "--engine",
            type=click.Choice(ENGINES),
            default="duckdb",
            show_default=True,
            help="What computes: DuckDB here, or Spark on many machines.",
        ),
    ):
        command = option(command)
    return command


def check_engine(engine: str, master: str | None) -> None:
    """Refuse options that do not go together. Raises UsageError."""
    if (engine == "spark") != (master is not None):
        raise click.UsageError("--engine spark needs --master URL, and only Spark has one: give both.")


def require_output(run_dirs: Iterable[Path]) -> None:
    """Refuse to write beside a run that is not on this machine. Raises UsageError."""
    for run_dir in run_dirs:
        if location.is_uri(str(run_dir)):
            raise click.UsageError(f"{run_dir}: is not on this machine. Say with -o where to write.")


def open_run(
    run_dir: Path, *, allow_external: bool = False, engine: str = "duckdb", master: str | None = None
) -> na.Run:
    """The open run; damage is mentioned on stderr, with where to see it."""
    check_engine(engine, master)
    if master is not None:
        return _warned(_on_spark(run_dir, master), run_dir)
    progress = _Progress() if sys.stderr.isatty() else None
    try:
        run = na.open(run_dir, allow_external=allow_external, progress=progress)
    finally:
        if progress is not None:
            progress.clear()
    return _warned(run, run_dir)


def _on_spark(run_dir: Path, master: str) -> na.Run:
    from nanalyze.analysis.engines import spark

    return spark.open(run_dir, master, note=lambda text: click.echo(f"nanalyze: note: {run_dir}: {text}.", err=True))


def _warned(run: na.Run, run_dir: Path) -> na.Run:
    damage = run.damage_count
    if damage:
        noun = "problem" if damage == 1 else "problems"
        click.echo(
            f"nanalyze: warning: {run_dir}: {damage} {noun} with its shards; the view `damage` lists them.", err=True
        )
    return run


class _Progress:
    """Shards checked so far, redrawn at most ten times a second."""

    def __init__(self) -> None:
        self._started = self._drawn = time.monotonic()
        self._width = 0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._started < SHOW_AFTER_S or now - self._drawn < 0.1:
            return
        self._drawn = now
        filled = 30 * done // max(total, 1)
        text = f"checking shards [{'#' * filled}{' ' * (30 - filled)}] {done}/{total}"
        self._width = len(text)
        click.echo(f"\r{text}", nl=False, err=True)

    def clear(self) -> None:
        if self._width:
            click.echo("\r" + " " * self._width + "\r", nl=False, err=True)
