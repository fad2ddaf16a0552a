"""Where a report goes: never half written, never over something that is not a report of this run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nanalyze.rundir.errors import NanalyzeError

SUMMARY_FILE = "summary.json"
PAGE_FILE = "report.html"
# No summary that nanalyze wrote comes near this; a larger file is not one.
SUMMARY_BYTES_MAX = 64_000_000


class ReportError(NanalyzeError):
    """A report that cannot be written where it was to go."""


def check_target(target: Path, run_dir: Path, run_id: str, force: bool) -> None:
    """Refuse `target` unless it is new, empty, an earlier report of the same run, or forced.

    Raises ReportError naming what is in the way.
    """
    try:
        if target.exists() and not target.is_dir():
            raise ReportError(f"{target}: is a file, not a directory. Choose another place with -o.")
        if target.resolve() == run_dir.resolve():
            raise ReportError(f"{target}: is the run directory itself. Choose another place with -o.")
        if force or not target.exists() or not any(target.iterdir()):
            return
    except OSError as error:
        raise _cannot_write(target, error) from error
    found = _run_id_of(target)
    if found is None:
        raise ReportError(
            f"{target}: holds something else than a report of nanalyze. "
            "Choose another place with -o, or pass --force to write into it."
        )
    if found != run_id:
        raise ReportError(
            f"{target}: holds the report of another run ({found[:40]}). "
            "Choose another place with -o, or pass --force to replace it."
        )


@contextmanager
def writing(target: Path) -> Iterator[Path]:
    """A new directory to write into; what is in it becomes `target` at the end.

    A target that exists keeps files of other names; each file of the report is replaced whole. If
    anything fails the target stays as it was. Raises ReportError when it cannot be written.
    """
    target = target.absolute()
    # On the target's own file system, so that renaming works: inside it where it exists.
    draft = (target if target.is_dir() else target.parent) / f".{target.name}.{os.getpid()}.tmp"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
    except OSError as error:
        raise _cannot_write(target, error) from error
    try:
        yield draft
        _publish(draft, target)
    except OSError as error:
        raise _cannot_write(target, error) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def check_file(path: Path, *, force: bool) -> None:
    """Refuse `path` as the file of a document if it exists, unless `force`. Raises ReportError."""
    if path.is_dir():
        raise ReportError(f"{path}: is a directory. Name a file with -o.")
    if path.exists() and not force:
        raise ReportError(f"{path}: exists. Choose another file with -o, or pass --force to replace it.")


def write_file(path: Path, data: bytes) -> None:
    """Write `data` to `path`, whole or not at all. Raises ReportError."""
    draft = path.absolute().with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(data)
        os.replace(draft, path)
    except OSError as error:
        raise ReportError(
            f"{path}: cannot be written: {error.strerror or error}. Name another file with -o."
        ) from error
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def _publish(draft: Path, target: Path) -> None:
    if not target.exists():
        os.replace(draft, target)
        return
    files = sorted(path.relative_to(draft) for path in draft.rglob("*") if path.is_file())
    files.sort(key=lambda path: path.name == SUMMARY_FILE)  # the summary marks a complete report: last
    for path in files:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(draft / path, target / path)


def _run_id_of(target: Path) -> str | None:
    """The run whose report `target` holds; None where it holds something else."""
    path = target / SUMMARY_FILE
    try:
        if path.stat().st_size > SUMMARY_BYTES_MAX:
            return None
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or "summary_version" not in content:
        return None
    run = content.get("run")
    run_id = run.get("run_id") if isinstance(run, dict) else None
    return run_id if isinstance(run_id, str) else None


def _cannot_write(target: Path, error: OSError) -> ReportError:
    return ReportError(
        f"{target}: cannot write the report there: {error.strerror or error}. "
        "Name a directory you can write to with -o."
    )
