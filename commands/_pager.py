"""Shows long text a screen at a time, through the pager that the user chose."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys

# -S: rows of a table are not folded; -F and -X: what fits on the screen stays there.
DEFAULT = "less -FRSX"


def show(data: bytes) -> None:
    """Write `data` to standard output; through $PAGER where that is a terminal too low for it.

    An empty PAGER, or one that cannot be started, pages nothing.
    """
    program = command() if sys.stdout.isatty() and _is_long(data) else []
    if not (program and _paged(program, data)):
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def command() -> list[str]:
    """The pager and its options; empty for none."""
    try:
        program = shlex.split(os.environ.get("PAGER", DEFAULT))
    except ValueError:
        return []
    return program if program and shutil.which(program[0]) else []


def _is_long(data: bytes) -> bool:
    # One line is the next prompt's.
    return data.count(b"\n") >= shutil.get_terminal_size().lines


def _paged(program: list[str], data: bytes) -> bool:
    """Whether the pager could be started. Ctrl-C is the pager's while it runs."""
    sys.stdout.flush()
    # A handler, for the pager would inherit that the signal is ignored.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        with subprocess.Popen(program, stdin=subprocess.PIPE) as process:
            try:
                process.communicate(data)
            except BrokenPipeError:
                process.wait()
        return True
    except (OSError, subprocess.SubprocessError):
        return False
    finally:
        signal.signal(signal.SIGINT, before)
