"""The directory that an import makes: never over something else, and only when it is complete."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from nanalyze.rundir import runfile
from nanalyze.rundir.errors import FormatVersionError, NanalyzeError, RunError


def check(run_dir: Path, target: Path, force: bool) -> None:
    """Refuse to write over anything; with `force`, over anything but a run or an empty directory."""
    try:
        if not target.exists() or (target.is_dir() and not any(target.iterdir())):
            return
    except OSError as error:
        raise cannot_write(run_dir, error) from error
    if not _is_run(target):
        raise RunError(f"{run_dir}: exists and is not a run. Choose another directory with -o.")
    if not force:
        raise RunError(f"{run_dir}: exists. Use --force to replace it, or choose another directory with -o.")


def _is_run(target: Path) -> bool:
    """Whether nanalyze wrote it; a version that this installation cannot read counts too."""
    try:
        runfile.read(target)
    except FormatVersionError:
        return True
    except RunError:
        return False
    return True


def publish(root: Path, target: Path) -> None:
    """Give the finished directory its name; an earlier run gives way only at that moment."""
    if not target.exists():
        os.rename(root, target)
        return
    earlier = root.with_name(f"{root.name}.replaced")
    os.rename(target, earlier)
    try:
        os.rename(root, target)
    except OSError:
        os.rename(earlier, target)
        raise
    shutil.rmtree(earlier, ignore_errors=True)


def cannot_write(run_dir: Path, error: OSError) -> NanalyzeError:
    """The error for a directory that the file system refuses."""
    return RunError(f"{run_dir}: cannot be written: {error.strerror or error}. Choose another directory with -o.")
