"""Which range stands inside which: Kineto's annotations have a thread and times, no parents."""

from __future__ import annotations

from typing import Any

import numpy as np

Integers = np.ndarray[Any, np.dtype[np.int64]]
STILL_OPEN = np.iinfo(np.int64).max


def nest(threads: Integers, starts: Integers, ends: Integers) -> tuple[Integers, Integers]:
    """The row of each range's parent (-1 for none) and its depth.

    A parent is the innermost range of the same thread that is open for the whole of the other.
    """
    parents = np.full(len(starts), -1, np.int64)
    depths = np.zeros(len(starts), np.int64)
    open_: list[int] = []
    thread = None
    order = np.lexsort((np.arange(len(starts)), -ends, starts, threads))
    thread_list, end_list, start_list = threads.tolist(), ends.tolist(), starts.tolist()
    for row in order.tolist():
        if thread_list[row] != thread:
            thread, open_ = thread_list[row], []
        while open_ and (end_list[open_[-1]] <= start_list[row] or end_list[open_[-1]] < end_list[row]):
            open_.pop()
        if open_:
            parents[row] = open_[-1]
            depths[row] = depths[open_[-1]] + 1
        open_.append(row)
    return parents, depths
