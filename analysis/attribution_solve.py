"""Rates from normal equations: non-negative least squares, robust errors, terms told apart or not.

Everything here works on sums over blocks of samples (`Blocks`), never on the samples: the sums are all
that least squares needs, and a block is the unit of resampling for the standard errors and of the
leave-out check. docs/attribution.md derives it.

Letters as in that document: B blocks, P terms (kernel classes, copies, idle), C counters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Indices = NDArray[np.intp]

# Merging says that two rates are equal, which is wrong by more than what little the samples know of each:
# on a GPT-2 step 100 gave errors twice as large as 1000, and more changed nothing.
INFLATION_LIMIT = 1000.0
# Blocks noisier than this multiple of the median block count by that much less.
HEAVY = 30.0
RIDGE = 1e-12
# How uneven launches are believed to be before the samples tell: standard deviation of a profile's coefficients, as a
# share of the term's rate. On recorded GPT-2 and ResNet-50 steps 0.25 to 1 gave the same errors within a tenth.
UNEVEN = 0.35
# The rate that this is a share of is at least this share of the mean rate of all.
LEAST_RATE = 0.1
# Launches are taken to be uneven where that leaves at most this much of what is unexplained in samples left out: where
# few kernels always follow each other, samples tell no profile from a rate, and believing in one made errors larger.
WORTH = 0.9
# Relative error below which a class's own clock says how much clocks differ between classes.
TRUSTED = 0.02
LEAST_SPREAD = 0.01


@dataclass
class Blocks:
    """Weighted sums over the samples of each block.

    gram (B, P, P): x x'; moment (B, P, C): x y; square (B, C): y y; flat (B, C): y times the sample's
    length; length (B,): the length squared; samples (B,). x in ms, y as counted. The last columns of x belong
    to the profiles and paces (`is_pace`) of launches: `owner` (Q,) is the term of each of them.
    """

    gram: Array
    moment: Array
    square: Array
    flat: Array
    length: Array
    samples: Array
    owner: Indices = field(default_factory=lambda: np.zeros(0, np.intp))
    is_pace: Flags = field(default_factory=lambda: np.zeros(0, np.bool_))

    @property
    def terms(self) -> int:
        """How many of the columns are terms."""
        return int(self.gram.shape[1]) - len(self.owner)

    def take(self, which: Flags | Indices | slice) -> Blocks:
        """These blocks only; a slice shares their memory."""
        return Blocks(
            self.gram[which], self.moment[which], self.square[which], self.flat[which], self.length[which],
            self.samples[which], self.owner, self.is_pace,
        )  # fmt: skip

    def of(self, counters: Indices) -> Blocks:
        """These counters only."""
        return replace(
            self, moment=self.moment[:, :, counters], square=self.square[:, counters], flat=self.flat[:, counters]
        )

    def merged(self, members: Sequence[Sequence[int]], owner: Indices | None = None) -> Blocks:
        """With the columns of each of `members` added into one; `owner` as in the result."""
        first = [terms[0] for terms in members]
        several = [(place, terms[1:]) for place, terms in enumerate(members) if len(terms) > 1]
        owner = np.zeros(0, np.intp) if owner is None else owner
        if not several and first == list(range(len(first))):
            # Most of the time goes into memory that is written for the first time: none where nothing merges.
            known = slice(0, len(first))
            gram = np.ascontiguousarray(self.gram[:, known, known])
            return Blocks(gram, self.moment[:, known], self.square, self.flat, self.length, self.samples, owner)
        if first == list(range(self.gram.shape[1])):
            # All columns stay, some are added to others: one copy instead of two.
            return replace(self._added(several), owner=owner, is_pace=np.zeros(0, np.bool_))
        rows, moment = self.gram.take(first, axis=1), self.moment.take(first, axis=1)
        for place, terms in several:
            rows[:, place] += self.gram[:, terms].sum(axis=1)
            moment[:, place] += self.moment[:, terms].sum(axis=1)
        gram = rows.take(first, axis=2)
        for place, terms in several:
            gram[:, :, place] += rows[:, :, terms].sum(axis=2)
        return Blocks(gram, moment, self.square, self.flat, self.length, self.samples, owner)

    def _added(self, several: Sequence[tuple[int, Sequence[int]]]) -> Blocks:
        """A copy in which further columns are added to each of some, to which none are added themselves."""
        gram, moment = self.gram.copy(), self.moment.copy()
        turns = range(max(len(terms) for _, terms in several))
        pairs = [np.array([(at, terms[turn]) for at, terms in several if len(terms) > turn]).T for turn in turns]
        for places, further in pairs:
            gram[:, places] += self.gram[:, further]
            moment[:, places] += self.moment[:, further]
        for places, further in pairs:
            gram[:, :, places] += gram[:, :, further]
        return replace(self, gram=gram, moment=moment)

    def profiles(self, members: Sequence[Sequence[int]]) -> tuple[list[list[int]], Indices]:
        """Columns of the profiles of terms in `members`, one a list, and the number of its member (Q,)."""
        place = {term: number for number, terms in enumerate(members) for term in terms}
        ran = np.einsum("bpp->p", self.gram)[self.terms :] > 0
        kept = [at for at, term in enumerate(self.owner.tolist()) if ran[at] and term in place]
        return [[self.terms + at] for at in kept], np.array([place[int(self.owner[at])] for at in kept], np.intp)


def _times(gram: Array, matrix: Array) -> Array:
    """`gram` (B, P, P) times `matrix` (P, N) as one product: BLAS threads cost more than B small ones are worth."""
    blocks, terms, _ = gram.shape
    if not gram.flags.c_contiguous:  # every other block: a copy costs more than many products
        return np.asarray(gram @ matrix)
    return np.asarray((gram.reshape(blocks * terms, terms) @ matrix).reshape(blocks, terms, -1))


@dataclass
class Course:
    """What launches were taken to do, by counter (C,): work in proportion to time, else the same each; unevenly."""

    by_time: Flags
    uneven: Flags

    def kinds(self) -> Iterator[tuple[tuple[bool, bool], Indices]]:
        """Counters of which the same was taken: (by_time, uneven) and their numbers."""
        for kind in ((False, False), (False, True), (True, False), (True, True)):
            own = np.flatnonzero((self.by_time == kind[0]) & (self.uneven == kind[1]))
            if len(own):
                yield kind, own


@dataclass
class Fit:
    """Rates per ms (P, C), their influence by block (B, P, C) and what belongs to them.

    The variance of a rate is the sum of its squared influences over blocks, the covariance of two
    the sum of their products. Beyond the blocks, further rows hold what is open about each profile. `degrees` (P,) is
    Student's, from the blocks in which the term ran. `explained` (C,) is by counter, see there.
    """

    rate: Array
    influence: Array
    degrees: Array
    inflation: Array
    explained: Array
    course: Course
    members: list[list[int]] = field(default_factory=list)

    @property
    def standard_error(self) -> Array:
        error: Array = np.sqrt(np.square(self.influence).sum(axis=0))
        return error

    def scaled(self, factor: Array) -> Fit:
        """With the rates times known factors (P, C)."""
        return replace(self, rate=self.rate * factor, influence=self.influence * factor)


def fit_members(
    blocks: Blocks,
    times: Blocks,
    members: list[list[int]],
    timed: Flags,
    course: Course | None = None,
    peaks: Array | None = None,
) -> Fit:
    """Rates of `members`, the terms that share one each; each of them ran in the blocks.

    `blocks` count launches, `times` (of the same samples) the time of terms, which is right for the counters `timed`
    (C,) and for others where it explains more. `course` is as of another fit, `peaks` (P, C) the most that rates can
    be. Raises nothing: too few blocks give infinite errors.
    """
    even = (blocks.merged(members), times.merged(members))
    columns, owner = blocks.profiles(members)

    @cache
    def whole(by_time: bool) -> Blocks:  # large, and needed more than once
        return blocks.merged([*_paced(blocks, members, by_time), *columns], owner)

    peaks = np.full((len(members), len(timed)), np.inf) if peaks is None else peaks
    found = np.full(len(timed), np.nan)
    if course is None:
        by_launch, by_time = explained(even[0]), explained(even[1])
        course = Course(timed | (by_time > by_launch), np.zeros(len(timed), dtype=bool))
        found = np.where(course.by_time, by_time, by_launch)
        course, found = _uneven(even, whole, owner, course, found, timed)
    influence = np.zeros((len(blocks.samples) + len(owner), len(members), len(timed)))
    fit = Fit(np.zeros(peaks.shape), influence, np.zeros(0), np.zeros(0), found, course, members)
    fit.inflation, _ = _inflation(even[0].gram.sum(axis=0))
    for kind, own in course.kinds():
        part = even[int(kind[0])].of(own)
        weights = _weights(part)
        gram, moment = _total(part, weights)
        rate = bounded(gram, moment, peaks[:, own])
        beliefs = np.zeros((len(own), 0))
        if kind[1]:
            ridge, noise = _ridge(part, rate, owner)
            part = whole(kind[0]).of(own)
            gram, moment = _total(part, weights)
            gram = gram + ridge
            rate = bounded(gram, moment, peaks[:, own], len(owner))
            beliefs = np.sqrt(noise[:, None] * np.einsum("cpp->cp", ridge)[:, len(members) :])
        moved, degrees = _influence(part, weights, gram, rate, peaks[:, own], beliefs)
        fit.rate[:, own] = rate[: len(members)]
        fit.influence[: len(moved), :, own] = moved[:, : len(members)]
        fit.degrees = degrees[: len(members)]
    return fit


def _uneven(
    even: tuple[Blocks, Blocks],
    whole: Callable[[bool], Blocks],
    owner: Indices,
    course: Course,
    found: Array,
    timed: Flags,
) -> tuple[Course, Array]:
    """For which counters launches do their work unevenly, and what is explained with that."""
    uneven, found = course.uneven.copy(), found.copy()
    for by_time in (False, True):
        own = np.flatnonzero((course.by_time == by_time) & ~timed)
        if not len(own) or not len(owner):
            continue
        part = even[int(by_time)].of(own)
        gram, moment = _total(part, _weights(part))
        ridge, _ = _ridge(part, bounded(gram, moment, np.full(moment.shape, np.inf)), owner)
        more = explained(whole(by_time).of(own), ridge)
        uneven[own] = 1 - more < WORTH * (1 - found[own])
        found[own] = np.where(uneven[own], more, found[own])
    return Course(course.by_time, uneven), found


def _paced(blocks: Blocks, members: list[list[int]], by_time: bool) -> list[list[int]]:
    """`members`, which count launches; or, with the columns of their paces, the time of terms."""
    if not by_time:
        return members
    paces = [(int(blocks.owner[at]), blocks.terms + at) for at in np.flatnonzero(blocks.is_pace).tolist()]
    return [[*terms, *(column for owner, column in paces if owner in terms)] for terms in members]


def _ridge(even: Blocks, rate: Array, owner: Indices) -> tuple[Array, Array]:
    """What is believed of profiles, as an addition to the gram matrices (C, P + Q, P + Q); the noise of a sample (C,).

    A coefficient that is normal around 0 adds the variance of a sample's noise over its own variance.
    """
    terms, counters = rate.shape
    ridge = np.zeros((counters, terms + len(owner), terms + len(owner)))
    noise = _misfit(even, rate).sum(axis=0) / max(even.samples.sum(), 1)
    if len(owner):
        mean = even.flat.sum(axis=0) / even.length.sum()
        spread = UNEVEN * np.maximum(rate[owner], LEAST_RATE * mean)
        at = np.arange(terms, terms + len(owner))
        ridge[:, at, at] = (noise / np.square(spread).clip(min=1e-300)).T
    return ridge, noise


def _total(blocks: Blocks, weights: Array) -> tuple[Array, Array]:
    """Gram matrix and moments over all blocks; `weights` (B, C) are by counter, the gram so too (C, P, P)."""
    if (weights == 1).all():
        total = blocks.gram.sum(axis=0)
        gram = np.broadcast_to(total, (weights.shape[1], *total.shape))
    else:
        shape = blocks.gram.shape
        gram = (weights.T @ blocks.gram.reshape(shape[0], -1)).reshape(-1, *shape[1:])
    return gram, np.einsum("bpc,bc->pc", blocks.moment, weights)


# --- which terms can be told apart -----------------------------------------------------------------


def _inflation(gram: Array) -> tuple[Array, Array]:
    """Variance inflation of each term (P,) and the inverse of the scaled gram matrix (P, P)."""
    first = gram[0] if gram.ndim == 3 else gram
    scale = np.sqrt(np.diag(first).clip(min=1e-300))
    scaled = first / np.outer(scale, scale)
    inverse = np.linalg.inv(scaled + RIDGE * np.eye(len(scaled)))
    return np.diag(inverse).copy(), inverse


def told_apart(gram: Array, limit: float, kin: Sequence[Sequence[int]] = ()) -> list[list[int]]:
    """Groups of terms, merged pairwise until no group's variance inflation exceeds `limit`.

    The worst goes together with the one whose time follows its own most closely once all others
    are accounted for: of its kin, as long as there are any.
    """
    family = {term: number for number, terms in enumerate(kin) for term in terms}
    members = [[term] for term in np.flatnonzero(np.diag(gram) > 0).tolist()]
    current = gram[np.ix_([m[0] for m in members], [m[0] for m in members])]
    while len(members) > 1:
        inflation, inverse = _inflation(current)
        worst = int(np.argmax(inflation))
        if inflation[worst] <= limit:
            break
        follows = -inverse[worst] / np.sqrt((inverse[worst, worst] * np.diag(inverse)).clip(min=1e-300))
        # What stands in for the worst may enter with either sign.
        follows = np.abs(follows)
        follows[worst] = -1
        own = family.get(members[worst][0], -1)
        siblings = np.array([family.get(group[0], -2) == own for group in members])
        siblings[worst] = False
        if siblings.any():
            follows[~siblings] = -1
        first, second = sorted((worst, int(np.argmax(follows))))
        members[first] = members[first] + members.pop(second)
        current[first] += current[second]
        current[:, first] += current[:, second]
        current = np.delete(np.delete(current, second, axis=0), second, axis=1)
    return members


# --- rates -----------------------------------------------------------------------------------------


def bounded(gram: Array, moment: Array, peaks: Array, signed: int = 0) -> Array:
    """Least squares for each counter with rates from 0 to `peaks`: `gram` (C, P, P), `moment` (P, C) to rates (P, C).

    The last `signed` of the rates have no bounds, and no row in `peaks`.
    Block principal pivoting on the normal equations (Portugal, Judice and Vicente 1994): it starts
    from the unconstrained solution, so it takes few steps where few rates are held, and needs no scipy.
    """
    rates = np.zeros_like(moment)
    low = np.concatenate((np.zeros(len(moment) - signed), np.full(signed, -np.inf)))
    for counter in range(moment.shape[1]):
        scale = np.sqrt(np.diag(gram[counter]).clip(min=1e-300))
        scaled = gram[counter] / np.outer(scale, scale) + RIDGE * np.eye(len(scale))
        high = np.concatenate((peaks[:, counter], np.full(signed, np.inf))) * scale
        rate, held = _pivot(scaled, moment[:, counter] / scale, low, high)
        rates[:, counter] = rate / scale
        rates[held > 0, counter] = peaks[held[: len(peaks)] > 0, counter]  # exactly
    return rates


def _solved(matrix: Array, right: Array) -> Array:
    """matrix^-1 right; the least squares where a part of the samples leaves terms undetermined."""
    try:
        return np.asarray(np.linalg.solve(matrix, right), dtype=np.float64)
    except np.linalg.LinAlgError:
        return np.asarray(np.linalg.lstsq(matrix, right, rcond=None)[0], dtype=np.float64)


def _pivot(gram: Array, moment: Array, low: Array, high: Array) -> tuple[Array, NDArray[np.int8]]:
    """The rates between `low` and `high` (P,), and which are held there (-1, 1): where squares would fall beyond."""
    size = len(moment)
    held = np.zeros(size, dtype=np.int8)
    tolerance = 1e-9 * max(float(np.abs(moment).max(initial=0.0)), 1e-300)
    fewest, chances = size + 1, 3
    for _ in range(10 * size + 20):
        free = held == 0
        rate = np.where(held > 0, high, np.where(held < 0, low, 0.0))
        rate[free] = _solved(gram[np.ix_(free, free)], moment[free] - gram[np.ix_(free, ~free)] @ rate[~free])
        slope = gram @ rate - moment
        under, over = free & (rate < low), free & (rate > high)
        let_go = ((held < 0) & (slope < -tolerance)) | ((held > 0) & (slope > tolerance))
        wrong = under | over | let_go
        count = int(wrong.sum())
        if count == 0:
            break
        if count < fewest:
            fewest, chances = count, 3
        elif chances > 0:
            chances -= 1
        else:  # one at a time cannot cycle
            wrong[: int(np.flatnonzero(wrong)[-1])] = False
        held = np.where(wrong, np.where(under, -1, np.where(over, 1, 0)), held).astype(np.int8)
    return rate.clip(low, high), held


def _weights(blocks: Blocks) -> Array:
    """Weight of each block for each counter (B, C): 1, less where its misfit is far above the median."""
    ones = np.ones_like(blocks.square)
    gram, moment = _total(blocks, ones)
    misfit = _misfit(blocks, bounded(gram, moment, np.full(moment.shape, np.inf))) / blocks.samples[:, None].clip(min=1)
    usual = np.median(misfit, axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.where((misfit > HEAVY * usual) & (usual > 0), HEAVY * usual / misfit, 1.0)
    return np.asarray(weights, dtype=np.float64)


def _misfit(blocks: Blocks, rate: Array) -> Array:
    """Sum of squared residuals of each block and counter (B, C)."""
    predicted = np.einsum("bpc,pc->bc", blocks.moment, rate)
    quadratic = np.einsum("pc,bpc->bc", rate, _times(blocks.gram, rate))
    result: Array = (blocks.square - 2 * predicted + quadratic).clip(min=0)
    return result


# --- errors ----------------------------------------------------------------------------------------


def _influence(
    blocks: Blocks, weights: Array, gram: Array, rate: Array, peaks: Array, beliefs: Array
) -> tuple[Array, Array]:
    """Influence of each block and profile on each rate (B + Q, P + Q, C), and Student's degrees of freedom (P + Q,).

    What a block's score (x' residual, summed over it) moves the rates by. Summing its squares over
    blocks is the sandwich estimate with blocks as clusters: it holds whatever the noise of single
    samples, and however neighbours within a block depend on each other. Each component is divided by
    one minus the block's share of the term, which is the jackknife's correction where terms hardly
    overlap, and matters for terms that ran in few blocks. What is believed of profiles pulls the rates too, by as much
    as a belief is off: `beliefs` (C, Q) is what one standard deviation of each adds to the scores.
    """
    share = np.einsum("bpp->bp", blocks.gram) / np.einsum("pp->p", blocks.gram.sum(axis=0))
    effective = 1 / np.square(share).sum(axis=0)
    score = (blocks.moment - _times(blocks.gram, rate)) * weights[:, None, :]
    score = score - score.mean(axis=0)
    share = np.maximum(share, _leverage(blocks)[:, None])
    with np.errstate(divide="ignore"):
        score = score / (1 - share).clip(min=0.05)[:, :, None]
    count, profiles = len(blocks.samples), len(blocks.owner)
    score *= np.sqrt(count / max(count - 1, 1))
    influence = np.empty((count + profiles, *rate.shape))
    free = np.ones(rate.shape, dtype=bool)
    free[: blocks.terms] = (rate[: blocks.terms] > 0) & (rate[: blocks.terms] < peaks)
    for counter in range(rate.shape[1]):
        believed = np.zeros((profiles, len(rate)))
        believed[:, blocks.terms :] = np.diag(beliefs[counter])
        scores = np.concatenate((score[:, :, counter], believed))
        influence[:, :, counter] = _moved(gram[counter], scores, free[:, counter])
    influence[:, effective < 2, :] = np.inf
    return influence, np.maximum(effective - 1, 1)


def _leverage(blocks: Blocks) -> Array:
    """By how much the mean sample of each block pulls the fit towards itself (B,), from 0 to 1."""
    first = blocks.gram.sum(axis=0)
    scale = np.sqrt(np.diag(first).clip(min=1e-300))
    inverse = _inflation(first)[1] / np.outer(scale, scale)
    pulled: Array = np.einsum("bpq,pq->b", blocks.gram, inverse) / blocks.samples.clip(min=1)
    return pulled.clip(0, 1)


def _moved(gram: Array, score: Array, free: Flags) -> Array:
    """How scores (B, P) move the rates: free ones together, each at a bound as if it alone were let go."""
    scale = np.sqrt(np.diag(gram).clip(min=1e-300))
    scaled = gram / np.outer(scale, scale) + RIDGE * np.eye(len(scale))
    score = score / scale
    moved = np.zeros_like(score)
    inner = scaled[np.ix_(free, free)]
    moved[:, free] = _solved(inner, score[:, free].T).T
    held = ~free
    if held.any():
        bridge = _solved(inner, scaled[np.ix_(free, held)])
        rest = np.diag(scaled)[held] - np.einsum("fh,fh->h", scaled[np.ix_(free, held)], bridge)
        moved[:, held] = (score[:, held] - score[:, free] @ bridge) / rest.clip(min=1e-12)
    result: Array = moved / scale
    return result


def towards_mean(off: Array, noise: Array, weight: Array, explained: float) -> tuple[Array, Array]:
    """How much of each deviation from the mean is believed (K,), and what standard error that leaves; all relative.

    As between a measurement and a prior, the less, the larger its `noise`. The prior's spread is that of the deviations
    that are trusted, as far as they explain samples that were left out; no more than that is believed at all.
    """
    trusted = noise < TRUSTED
    proven = min(max(explained, 0.0), 1.0) if math.isfinite(explained) else 1.0
    spread = LEAST_SPREAD
    if weight[trusted].sum() > 0:
        found = float(np.sqrt(np.average(np.square(off[trusted]), weights=weight[trusted])))
        spread = max(proven * found, LEAST_SPREAD)
    believed = spread**2 / (spread**2 + np.square(noise))
    return proven * believed, spread * np.sqrt(1 - believed)


# --- the leave-out check ---------------------------------------------------------------------------


def explained(blocks: Blocks, ridge: Array | float = 0.0) -> Array:
    """Share of each counter's variation that rates from the other half of the blocks predict (C,).

    Every other block is left out in turn; `ridge` is what is believed beside all of them. Variation is that around
    a constant rate; NaN where there is none. Negative means: worse than a constant.
    """
    count = len(blocks.samples)
    if count < 2:
        return np.full(blocks.square.shape[1], np.nan)
    misfit = np.zeros(blocks.square.shape[1])
    for half in (0, 1):
        part = blocks.take(slice(half, None, 2))
        gram, moment = _total(part, np.ones_like(part.square))
        peaks = np.full((blocks.terms, moment.shape[1]), np.inf)
        rate = bounded(gram + ridge / 2, moment, peaks, len(blocks.owner))
        misfit += _misfit(blocks.take(slice(1 - half, None, 2)), rate).sum(axis=0)
    square, flat = blocks.square.sum(axis=0), blocks.flat.sum(axis=0)
    variation = square - np.square(flat) / blocks.length.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        share: Array = np.where(variation > 1e-12 * square, 1 - misfit / variation, np.nan)
    return share
