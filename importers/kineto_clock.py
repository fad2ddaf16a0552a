"""Brings the clocks of several ranks together by the collectives they share.

A collective in which every rank waits for every other (all-reduce, all-gather and the like) ends
on all of them within microseconds. Where two ranks have the same number of such kernels of one
kind, they are paired in order, and the median difference of their ends is the difference of their
clocks. It is applied only when it is larger than the pairs differ among themselves.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

FEWEST_PAIRS = 3
WIDEST_SPREAD_NS = 1_000_000  # pairs that differ more than this are not the same collectives
SPREADS = 3  # an offset counts as one when it is this many times the spread
MOST_COLLECTIVES = 200_000  # per rank

COLLECTIVE_KERNEL = re.compile(r"^(void )?(nccl|rccl|mscclKernel)", re.IGNORECASE)
_SYMMETRIC = re.compile(r"all_?(reduce|gather|to_?all)|reduce_?scatter|barrier", re.IGNORECASE)

Ends = np.ndarray[Any, np.dtype[np.int64]]


@dataclass
class Collectives:
    """The ends (ns) of a rank's symmetric collectives, by what tells them apart."""

    ends: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    count: int = 0

    def add(self, key: str, end_ns: int) -> None:
        if self.count < MOST_COLLECTIVES and _SYMMETRIC.search(key):
            self.ends[key].append(end_ns)
            self.count += 1

    def shift(self, ns: int) -> None:
        """Add `ns` to every end."""
        self.ends = {key: [end + ns for end in ends] for key, ends in self.ends.items()}

    def ordered(self) -> dict[str, Ends]:
        return {key: np.sort(np.array(ends, np.int64)) for key, ends in self.ends.items()}


@dataclass(frozen=True)
class Offset:
    """How far a rank's clock is ahead of the reference's, from `pairs` collectives."""

    reference: int
    ns: int
    spread_ns: int
    pairs: int

    @property
    def is_significant(self) -> bool:
        return abs(self.ns) > SPREADS * self.spread_ns + 1000


def offsets(ranks: list[Collectives]) -> list[Offset | None]:
    """For each rank its offset to the first, directly or through others; None where nothing pairs."""
    ordered = [rank.ordered() for rank in ranks]
    found: list[Offset | None] = [None] * len(ranks)
    total = {0: 0}
    waiting = set(range(1, len(ranks)))
    while waiting:
        links = ((other, known, _offset(ordered[known], ordered[other])) for other in waiting for known in total)
        link = next(((other, known, pair) for other, known, pair in links if pair is not None), None)
        if link is None:
            break
        other, known, (ns, spread, pairs) = link
        total[other] = total[known] + ns
        found[other] = Offset(known, total[other], spread, pairs)
        waiting.discard(other)
    return found


def _offset(reference: dict[str, Ends], other: dict[str, Ends]) -> tuple[int, int, int] | None:
    """Median difference of the ends, its median absolute deviation and the number of pairs."""
    shared = [key for key in reference.keys() & other.keys() if len(reference[key]) == len(other[key])]
    if not shared:
        return None
    differences = np.concatenate([other[key] - reference[key] for key in sorted(shared)])
    median = int(np.median(differences))
    spread = int(np.median(np.abs(differences - median)))
    if len(differences) < FEWEST_PAIRS or spread > WIDEST_SPREAD_NS:
        return None
    return median, spread, len(differences)
