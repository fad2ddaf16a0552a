"""Kernel classes that do different work: split by duration into modes, and put together again.

A class is a name and a launch shape. A persistent GEMM has the same shape whatever the inner dimension,
so one class holds problems that differ tenfold in length and in their rates. Each mode of a class's
durations is a term of its own in the equations; what is reported is the class, the sum over its modes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nanalyze.analysis.attribution_solve import Array, Fit, Flags

BIN = 0.02  # width of a bin of the logarithm of durations
GAP_BINS = 3  # so many bins next to empty part two modes: durations 1.06 apart
NEARLY_EMPTY = 0.002  # of the class's launches: fewer in a bin are stragglers
FEWEST_SHARE = 0.01  # of the class's launches; smaller modes join their neighbour
FEWEST = 8
MOST_MODES = 8
# Of a class's time, that of modes which no sample met may be this much.
UNSEEN_SHARE = 0.05


@dataclass(frozen=True)
class Mode:
    """Launches whose durations lie in bins [first, end); `spread` is their relative standard deviation."""

    first: int
    end: int
    launches: int
    mean_ns: float
    spread: float = 0.0


def modes(bins: NDArray[np.int64], launches: Array, time_ns: Array) -> list[Mode]:
    """Modes of one class from its histogram: `bins` ascending, launches and time in each."""
    edges = _edges(bins, launches)
    label = np.searchsorted(edges, bins, side="right")
    found = []
    for number in range(len(edges) + 1):
        own = label == number
        first = edges[number - 1] if number else bins[0]
        end = edges[number] if number < len(edges) else bins[-1] + 1
        found.append(_mode(int(first), int(end), launches[own], time_ns[own]))
    return found


def whole(bins: NDArray[np.int64], launches: Array, time_ns: Array) -> Mode:
    """The class as one mode."""
    return _mode(int(bins[0]), int(bins[-1]) + 1, launches, time_ns)


def _mode(first: int, end: int, launches: Array, time_ns: Array) -> Mode:
    count, mean = launches.sum(), time_ns.sum() / launches.sum()
    between = np.average(np.square(time_ns / launches.clip(min=1) / mean - 1), weights=launches)
    return Mode(first, end, int(count), float(mean), math.sqrt(between + BIN**2 / 12))


def _edges(bins: NDArray[np.int64], launches: Array) -> list[int]:
    """First bins of all modes but the first."""
    filled = bins[launches > NEARLY_EMPTY * launches.sum()]
    gaps = np.flatnonzero(np.diff(filled) > GAP_BINS)
    edges = [int(filled[at] + filled[at + 1] + 1) // 2 for at in gaps]
    fewest = max(FEWEST, FEWEST_SHARE * launches.sum())
    while edges:
        counts = np.bincount(np.searchsorted(edges, bins, side="right"), launches, len(edges) + 1)
        smallest = int(np.argmin(counts))
        if counts[smallest] >= fewest and len(counts) <= MOST_MODES:
            break
        del edges[_nearer(edges, smallest, bins, launches)]
    return edges


def _nearer(edges: Sequence[int], number: int, bins: NDArray[np.int64], launches: Array) -> int:
    """Which edge of mode `number` parts it from its nearer neighbour."""
    if number in (0, len(edges)):
        return max(number - 1, 0)
    label = np.searchsorted(edges, bins, side="right")
    middle = [np.average(bins[label == n], weights=launches[label == n]) for n in (number - 1, number, number + 1)]
    return number - 1 if middle[1] - middle[0] <= middle[2] - middle[1] else number


# --- together again --------------------------------------------------------------------------------


@dataclass
class Estimates:
    """Rates per ms of whole classes (K, C), their influence by block (B, K, C) and what belongs to them.

    `merged` (K,): with how many classes, itself included, it shares its rate: 1 where it can be told apart, 0
    where none of it was met. As with `Fit`, variances are sums of squared influences over blocks.
    """

    rate: Array
    influence: Array
    standard_error: Array
    degrees: Array
    inflation: Array
    merged: NDArray[np.int64]


def by_class(fit: Fit, classes: Sequence[Sequence[int]], time: Array) -> Estimates:
    """Of each of `classes` (its terms), the mean rate by `time` (P,) of its terms.

    A class of which more than `UNSEEN_SHARE` of the time ran in too few blocks has infinite influence.
    """
    place = {term: at for at, members in enumerate(fit.members) for term in members}
    owner = {term: number for number, terms in enumerate(classes) for term in terms}
    bounded: Flags = np.asarray(np.isfinite(fit.influence).all(axis=(0, 2)))
    mixing = np.zeros((len(fit.members), len(classes)))
    merged = np.zeros(len(classes), dtype=np.int64)
    lost = np.zeros(len(classes), dtype=bool)
    for number, terms in enumerate(classes):
        seen = [term for term in terms if term in place]
        used = [term for term in seen if bounded[place[term]]] or seen
        share = time[used].sum() / max(time[list(terms)].sum(), 1e-300)
        lost[number] = share < 1 - UNSEEN_SHARE or not all(bounded[place[term]] for term in used)
        for term in used:
            mixing[place[term], number] += time[term] / time[used].sum()
        sharing = {owner.get(other, -1 - other) for term in seen for other in fit.members[place[term]]}
        merged[number] = len(sharing)
    influence = np.where(bounded[None, :, None], fit.influence, 0.0)
    influence = np.tensordot(influence, mixing, (1, 0)).swapaxes(1, 2)
    influence[:, lost] = np.inf
    uses = mixing > 0
    degrees = np.array([fit.degrees[use].min(initial=np.inf) for use in uses.T])
    inflation = np.array([fit.inflation[use].max(initial=1.0) for use in uses.T])
    error = np.sqrt(np.square(influence).sum(axis=0))
    return Estimates(mixing.T @ fit.rate, influence, error, degrees, inflation, merged)
