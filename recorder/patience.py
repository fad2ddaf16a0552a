"""Waiting for work that may never return (a disk that stands still, a lost GPU), for a caller that must go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

INTERRUPTED_S = 5.0  # of waiting that an impatient user still grants


def within(seconds: float, work: Callable[[], object]) -> bool:
    """Do `work`, which raises nothing, on a thread of its own; whether it was done after at most so long.

    Where no thread is to be had (the limit of processes is reached, the interpreter is ending) it is done here,
    however long it takes. KeyboardInterrupt while waiting: the work gets a little more time, then it is raised.
    """
    done = threading.Event()

    def run() -> None:
        try:
            work()
        finally:
            done.set()

    thread = threading.Thread(target=run, name="nanalyze-wait", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        work()
        return True
    deadline = time.monotonic() + seconds
    try:
        # (Not `join`: until Python 3.13 an interrupted one takes the thread for ended.)
        is_done = done.wait(seconds)
    except KeyboardInterrupt:
        done.wait(max(0.0, min(INTERRUPTED_S, deadline - time.monotonic())))
        raise
    if is_done:
        thread.join(1.0)  # no thread is left behind, for callers that fork
    return is_done


def result_within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` gives, or the exception that it raises. Raises TimeoutError where it takes longer than that."""
    given: list[T] = []
    raised: list[Exception] = []

    def run() -> None:
        try:
            given.append(work())
        except Exception as error:
            raised.append(error)

    if not within(seconds, run):
        raise TimeoutError
    if raised:
        raise raised[0]
    return given[0]
