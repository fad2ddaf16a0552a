"""Opening a run for a command: progress on a terminal, a warning where something is damaged."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

import nanalyze.analysis as na

SHOW_AFTER_S = 1.0  # a bar for a run that opens at once would only flicker


def open_run(run_dir: Path, *, allow_external: bool = False) -> na.Run:
    """The open run; damage is mentioned on stderr, with where to see it."""
    progress = _Progress() if sys.stderr.isatty() else None
    try:
        run = na.open(run_dir, allow_external=allow_external, progress=progress)
    finally:
        if progress is not None:
            progress.clear()
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
