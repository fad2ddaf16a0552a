"""Stretches of one stream in which every kernel has the same verdict: what a timeline shows zoomed out."""

from __future__ import annotations

from typing import NamedTuple

IDLE_NS = 100_000  # a longer pause ends a stretch: about what is visible of a step of some milliseconds


class Stretch(NamedTuple):
    """From the first kernel's start to the last one's end; `busy_ns` is the sum of their durations."""

    bound: str
    start: int
    end: int
    kernels: int
    busy_ns: int


class VerdictTrack:
    """Joins the kernels of one stream, which come in order of start, to stretches that do not overlap."""

    def __init__(self) -> None:
        self._open: Stretch | None = None

    def add(self, bound: str, start: int, end: int) -> Stretch | None:
        """Take a kernel; the stretch that it ends, if any."""
        open_ = self._open
        busy = end - start
        if open_ is not None and open_.bound == bound and start - open_.end <= IDLE_NS:
            self._open = open_._replace(
                end=max(open_.end, end), kernels=open_.kernels + 1, busy_ns=open_.busy_ns + busy
            )
            return None
        if open_ is not None:
            start = max(start, open_.end)  # it overlaps the last one: its own part is what comes after
        self._open = Stretch(bound, start, max(start, end), 1, busy)
        return open_

    def finish(self) -> Stretch | None:
        """The stretch that is still open, if any."""
        open_, self._open = self._open, None
        return open_
