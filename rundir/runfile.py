"""`run.json`: what a run directory says of itself before any table is read."""

from __future__ import annotations

import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

from nanalyze.rundir import objectstore
from nanalyze.rundir.errors import FormatVersionError, RunError
from nanalyze.rundir.schema import FORMAT_NAME, FORMAT_VERSION, RECORDED_VERSION

RUN_FILE = "run.json"
LOCK_FILE = f".{RUN_FILE}.lock"

# How long a process waits for the one that is writing run.json, on filesystems without hard links.
LOCK_WAIT_S = 5.0
LOCK_POLL_S = 0.02


def create(run_dir: Path, source: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Make `run_dir` a run directory; `source` is `recorder` or the name of an importer.

    Several processes, on several hosts too, may call this at once: the first one's `run.json`
    stays and all of them return its content.
    Raises RunError when the directory cannot be made or belongs to something else.
    """
    content = {
        "format": FORMAT_NAME,
        "format_version": RECORDED_VERSION,
        "run_id": uuid.uuid4().hex,
        "created_ns": time.time_ns(),
        "source": source,
        "settings": settings,
    }
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        # The pid alone is not unique: ranks in containers on several hosts often share one.
        temporary = run_dir / f".{RUN_FILE}.{os.getpid()}.{content['run_id']}"
        try:
            temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            is_first = _publish(temporary, run_dir / RUN_FILE)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(
            f"{run_dir}: cannot create the run directory: {_reason(error)}. Choose one you can write to."
        ) from error
    return content if is_first else read(run_dir)


def is_unfinished(path: Path) -> bool:
    """Whether it is a run file that another process, which starts at the same moment, has not published yet."""
    return path.name.startswith(f".{RUN_FILE}.")


def read(run_dir: Path) -> dict[str, Any]:
    """The checked content of `run_dir/run.json`.

    Raises RunError for a missing, foreign or damaged file and FormatVersionError for a version
    this installation does not know.
    """
    path = run_dir / RUN_FILE
    try:
        data = objectstore.content(path) if objectstore.is_remote(path) else path.read_bytes()
    except FileNotFoundError:
        raise RunError(_missing(run_dir)) from None
    except NotADirectoryError:
        raise RunError(
            f"{run_dir}: is a file, not a run directory. Give the directory that holds {RUN_FILE}."
        ) from None
    except OSError as error:
        raise RunError(_unreadable(path, error)) from error
    return parse(data, path)


def parse(data: bytes, path: Path) -> dict[str, Any]:
    """The checked content of a `run.json`; `path` names it in messages. Raises as `read`."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise RunError(
            f"{path}: is not text. The run directory is damaged or not nanalyze's: restore the file from a copy."
        ) from None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise RunError(
            f"{path}: is not valid JSON. The run directory is damaged: restore the file from a copy."
        ) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT_NAME:
        raise RunError(f"{path}: was not written by nanalyze. Give a directory that nanalyze recorded or imported.")
    version = content.get("format_version")
    if type(version) is not int or not RECORDED_VERSION <= version <= FORMAT_VERSION:  # JSON's `true` equals 1
        raise FormatVersionError(
            f"{path}: has format version {version!r}, this nanalyze reads versions 1 to {FORMAT_VERSION}. "
            "Upgrade nanalyze (pip install -U nanalyze), or record the run again."
        )
    return content


def raise_version(run_dir: Path, version: int) -> None:
    """Have `run.json` say at least `version`, so that an older nanalyze refuses what it would read wrongly.

    One caller at a time. Raises RunError as `read`, and OSError where it cannot be written; the file is the old or
    the new one, whole.
    """
    content = read(run_dir)
    if content["format_version"] >= version:
        return
    temporary = run_dir / f".{RUN_FILE}.version"  # one name, so that a killed call leaves nothing for ever
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(json.dumps({**content, "format_version": version}, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, run_dir / RUN_FILE)
    finally:
        temporary.unlink(missing_ok=True)


def _publish(temporary: Path, target: Path) -> bool:
    """Give `temporary` the name `target` unless that exists; says whether it did.

    A hard link is the only step that is atomic and never overwrites. Filesystems without hard
    links (exFAT, many FUSE and object-store mounts) get a lock file and a rename instead.
    """
    try:
        os.link(temporary, target)
    except FileExistsError:
        return False
    except (OSError, NotImplementedError, AttributeError):
        return _publish_locked(temporary, target)
    return True


def _publish_locked(temporary: Path, target: Path) -> bool:
    """As `_publish`, where hard links do not exist. The lock stays for as long as the writing takes."""
    lock = target.with_name(LOCK_FILE)
    deadline = time.monotonic() + LOCK_WAIT_S
    while not target.exists():
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            if time.monotonic() > deadline:  # its owner was killed between two system calls
                lock.unlink(missing_ok=True)
            time.sleep(LOCK_POLL_S)
            continue
        try:
            if target.exists():
                return False
            os.replace(temporary, target)
            return True
        finally:
            lock.unlink(missing_ok=True)
    return False


def _missing(run_dir: Path) -> str:
    if objectstore.is_remote(run_dir):
        return f"{run_dir}: has no {RUN_FILE}, so there is no run there. Give the place that holds {RUN_FILE}."
    try:
        if not run_dir.exists():
            return f"{run_dir}: does not exist. Give the directory that was passed to the recorder."
        if not any(run_dir.iterdir()):
            return f"{run_dir}: is empty: nothing was recorded into it. Give the directory that the recorder wrote."
    except OSError as error:
        return _unreadable(run_dir, error)
    return f"{run_dir}: has no {RUN_FILE}, so it is not a run directory. Give the directory that holds {RUN_FILE}."


def _unreadable(path: Path, error: OSError) -> str:
    return f"{path}: cannot be read: {_reason(error)}. Check its permissions, or copy the run to where you can read it."


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
