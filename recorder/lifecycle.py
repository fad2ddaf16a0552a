"""What happens to a recording at the end of the process and in forked children."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from typing import TYPE_CHECKING

from nanalyze.recorder import ranges

if TYPE_CHECKING:
    from nanalyze.recorder.session import Recorder

_watched: weakref.WeakSet[Recorder] = weakref.WeakSet()
_is_installed = False


def watch(recording: Recorder) -> None:
    """Stop `recording` when the interpreter exits, and forget it in forked children.

    A child inherits neither the recorder's thread nor a usable CUDA context, so it must not
    write into its parent's partition.
    """
    global _is_installed
    _watched.add(recording)
    if not _is_installed:
        _is_installed = True
        atexit.register(_at_exit)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_in_child)


def _at_exit() -> None:
    for recording in list(_watched):
        # The second Ctrl-C, or the one that torchrun passes on: the process is ending anyway.
        with contextlib.suppress(KeyboardInterrupt):
            recording.stop("exit")


def _in_child() -> None:
    _watched.clear()
    ranges.set_log(None)
