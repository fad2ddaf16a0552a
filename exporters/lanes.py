"""Puts slices that overlap onto tracks of their own: viewers draw a track's slices as a stack."""

from __future__ import annotations

MOST_LANES = 64  # more overlap than this on one stream would be no timeline to look at


class Lanes:
    """Lanes of one stream or thread. Slices come in order of start, longer ones first.

    nested: a slice may lie inside another of its lane, as calls do; else it must follow the last.
    """

    def __init__(self, nested: bool) -> None:
        self._nested = nested
        self._lanes: list[list[float]] = []  # ends of the slices that are open in each lane

    def place(self, start: int, end: int | None) -> int | None:
        """The first lane that has room from `start` to `end` (None: never ends); None where all are taken."""
        until = float("inf") if end is None else end
        for number, open_ in enumerate(self._lanes):
            while open_ and open_[-1] <= start:
                open_.pop()
            if not open_ or (self._nested and until <= open_[-1]):
                open_.append(until)
                return number
        if len(self._lanes) == MOST_LANES:
            return None
        self._lanes.append([until])
        return len(self._lanes) - 1
