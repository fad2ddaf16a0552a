"""One way in for all formats, and the rule they share: nothing is overwritten unasked, nothing half-written stays."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import nanalyze.analysis as na
from nanalyze.exporters import chrome, tables
from nanalyze.rundir.errors import NanalyzeError

FORMATS = ("chrome", "parquet", "csv")
Progress = Callable[[str, int], None]  # what is being written, and how many rows or events of it so far


@dataclass(frozen=True)
class Exported:
    """What was written: `rows` by view or kind of event, `left_out` by reason."""

    output: Path
    files: tuple[Path, ...]
    rows: Mapping[str, int]
    left_out: Mapping[str, int]


def export(
    run: na.Run,
    format: str,
    output: Path,
    *,
    views: Sequence[str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write `run` as `format` to `output`.

    chrome: one file of trace events for ui.perfetto.dev, gzipped when its name ends in .gz.
    parquet, csv: a directory with one file for each public view, or for each of `views`.

    Raises NanalyzeError when `output` exists and `force` is not given, cannot be written, or the
    run holds nothing to write; no partial output is left under its name.
    """
    progress = progress or _silent
    if format == "chrome":
        if views:
            raise NanalyzeError("--view: chooses tables. It goes with --format parquet or csv.")
        _check_file(output, force)
        with _file(output) as unfinished:
            written = chrome.write(run, unfinished, output.suffix == ".gz", progress)
        return Exported(output, (output,), written.rows, written.left_out)
    if format not in FORMATS:
        raise NanalyzeError(f"{format}: no such format. Choose one of {', '.join(FORMATS)}.")
    names = tables.chosen(views)
    _check_directory(output, force)
    with _directory(output) as unfinished:
        rows = tables.write(run, names, format, unfinished, progress)
    return Exported(output, tuple(output / f"{name}.{format}" for name in names), rows, {})


def _check_file(output: Path, force: bool) -> None:
    with _explained(output):
        if output.is_dir():
            raise NanalyzeError(f"{output}: is a directory. Give the name of a file, such as trace.json.")
        if output.exists() and not force:
            raise NanalyzeError(f"{output}: exists. Use --force to overwrite it.")


def _check_directory(output: Path, force: bool) -> None:
    with _explained(output):
        if output.exists() and not output.is_dir():
            raise NanalyzeError(f"{output}: is a file. Give a directory for the tables.")
        if output.is_dir() and any(output.iterdir()) and not force:
            raise NanalyzeError(f"{output}: exists and is not empty. Use --force to replace the tables in it.")


@contextmanager
def _file(output: Path) -> Iterator[Path]:
    """A file that gets its name when it is complete."""
    unfinished = _beside(output)
    with _explained(output):
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            yield unfinished
            os.replace(unfinished, output)
        finally:
            unfinished.unlink(missing_ok=True)


@contextmanager
def _directory(output: Path) -> Iterator[Path]:
    """A directory whose files get their names when all are complete; others in `output` stay."""
    unfinished = _beside(output)
    with _explained(output):
        try:
            unfinished.mkdir(parents=True)
            yield unfinished
            output.mkdir(exist_ok=True)
            for file in sorted(unfinished.iterdir()):
                os.replace(file, output / file.name)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _beside(output: Path) -> Path:
    resolved = output.absolute()
    return resolved.with_name(f".{resolved.name[:100]}.{uuid.uuid4().hex[:12]}.tmp")


@contextmanager
def _explained(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NanalyzeError(f"{output}: cannot be written: {error.strerror or error}.") from error


def _silent(what: str, done: int) -> None:
    """No progress is shown."""
