"""What else changed from run to run: driver, libraries, GPU, host, clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanalyze.analysis.trend.read import Point

# Clocks further apart than this from one run to the next, as a share, are marked.
CLOCK_SHARE = 0.02
THROTTLED_SHARE = 0.05
SHOWN_VALUES = 4


@dataclass(frozen=True)
class Mark:
    """At run number `at`, `what` was no longer `before` but `after`."""

    at: int
    what: str
    before: str
    after: str

    @property
    def text(self) -> str:
        return f"{self.what} {self.before} → {self.after}"


def marks(points: Sequence[Point]) -> list[Mark]:
    """Every such change, by run. What a run does not know is compared with the last one that knew."""
    found = []
    known: dict[str, tuple[str, ...]] = {}
    clock = points[0].clock_hz if points else None
    for at, point in enumerate(points):
        for what, now in point.facts.items():
            before = known.get(what, ())
            if before and now and now != before:
                found.append(Mark(at, what, _listed(before), _listed(now)))
            known[what] = now or before
        if clock is not None and point.clock_hz is not None and abs(point.clock_hz / clock - 1) > CLOCK_SHARE:
            found.append(Mark(at, "SM clock", f"{clock / 1e6:.0f} MHz", f"{point.clock_hz / 1e6:.0f} MHz"))
        clock = point.clock_hz if point.clock_hz is not None else clock
        found += _throttling(points, at)
    return found


def _throttling(points: Sequence[Point], at: int) -> list[Mark]:
    """Where a run begins, or ceases, to be throttled in a twentieth of its readings."""
    if at == 0 or points[at].throttled_share is None or points[at - 1].throttled_share is None:
        return []
    before, now = points[at - 1].throttled_share or 0.0, points[at].throttled_share or 0.0
    if (before >= THROTTLED_SHARE) == (now >= THROTTLED_SHARE):
        return []
    return [Mark(at, "throttled", f"{100 * before:.0f} % of readings", f"{100 * now:.0f} %")]


def _listed(values: Sequence[str]) -> str:
    more = len(values) - SHOWN_VALUES
    return ", ".join(values[:SHOWN_VALUES]) + (f" and {more} more" if more > 0 else "")
