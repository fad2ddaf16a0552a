"""Rates from normal equations: non-negative least squares, robust errors, terms told apart or not.

Everything here works on sums over blocks of samples (`Blocks`), never on the samples: the sums are all
that least squares needs, and a block is the unit of resampling for the standard errors and of the
leave-out check. docs/attribution.md derives it.

Letters as in that document: B blocks, P terms (kernel classes, copies, idle), C counters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
_NEVER = 1e12  # a ridge in units of the gram matrix that leaves nothing of a coefficient


@dataclass
class Blocks:
    """Weighted sums over the samples of each block.

    gram (B, P, P): x x'; moment (B, P, C): x y; square (B, C): y y; flat (B, C): y times the sample's
    length; length (B,): the length squared; samples (B,). x in ms, y as counted. The last columns of x belong
    to the profiles of launches: `owner` (Q,) is the term of each of them.
    """

    gram: Array
    moment: Array
    square: Array
    flat: Array
    length: Array
    samples: Array
    owner: Indices = field(default_factory=lambda: np.zeros(0, np.intp))

    @property
    def terms(self) -> int:
        """How many of the columns are terms."""
        return int(self.gram.shape[1]) - len(self.owner)

    def take(self, which: Flags | Indices) -> Blocks:
        """These blocks only."""
        return Blocks(
            self.gram[which], self.moment[which], self.square[which], self.flat[which], self.length[which],
            self.samples[which], self.owner,
        )  # fmt: skip

    def merged(self, members: Sequence[Sequence[int]], owner: Indices | None = None) -> Blocks:
        """With the columns of each of `members` added into one; `owner` as in the result."""
        first = [terms[0] for terms in members]
        rows, moment = self.gram.take(first, axis=1), self.moment.take(first, axis=1)
        several = [(place, terms[1:]) for place, terms in enumerate(members) if len(terms) > 1]
        for place, terms in several:
            rows[:, place] += self.gram[:, terms].sum(axis=1)
            moment[:, place] += self.moment[:, terms].sum(axis=1)
        gram = rows.take(first, axis=2)
        for place, terms in several:
            gram[:, :, place] += rows[:, :, terms].sum(axis=2)
        owner = np.zeros(0, np.intp) if owner is None else owner
        return Blocks(gram, moment, self.square, self.flat, self.length, self.samples, owner)

    def profiles(self, members: Sequence[Sequence[int]]) -> tuple[list[list[int]], Indices]:
        """Columns of the profiles of terms in `members`, one a list, and the number of its member (Q,)."""
        place = {term: number for number, terms in enumerate(members) for term in terms}
        ran = np.einsum("bpp->p", self.gram)[self.terms :] > 0
        kept = [at for at, term in enumerate(self.owner.tolist()) if ran[at] and term in place]
        return [[self.terms + at] for at in kept], np.array([place[int(self.owner[at])] for at in kept], np.intp)


def _times(gram: Array, matrix: Array) -> Array:
    """`gram` (B, P, P) times `matrix` (P, N) as one product: BLAS threads cost more than B small ones are worth."""
    blocks, terms, _ = gram.shape
    product: Array = (gram.reshape(blocks * terms, terms) @ matrix).reshape(blocks, terms, -1)
    return product


@dataclass
class Fit:
    """Rates per ms (P, C), their influence by block (B, P, C) and what belongs to them.

    The variance of a rate is the sum of its squared influences over blocks, the covariance of two
    the sum of their products. `degrees` (P,) is Student's, from the blocks in which the term ran. `explained` and
    `uneven` are by counter (C,): see `explained`, and whether launches were taken to do their work unevenly.
    """

    rate: Array
    influence: Array
    degrees: Array
    at_zero: Flags
    inflation: Array
    explained: Array
    uneven: Flags
    members: list[list[int]] = field(default_factory=list)

    @property
    def standard_error(self) -> Array:
        error: Array = np.sqrt(np.square(self.influence).sum(axis=0))
        return error


def fit(blocks: Blocks, limit: float = INFLATION_LIMIT, kin: Sequence[Sequence[int]] = ()) -> Fit:
    """Rates of all terms, those that cannot be told apart merged: `members` lists the merged terms.

    `kin` lists the terms of each kernel class: they merge with each other first. Terms that never ran belong
    to no member. Raises nothing: too few blocks give infinite errors.
    """
    terms = blocks.terms
    members = told_apart(blocks.gram[:, :terms, :terms].sum(axis=0), limit, kin)
    return fit_members(blocks, members)


def fit_members(blocks: Blocks, members: list[list[int]], uneven: Flags | None = None) -> Fit:
    """The same with the merging given, and with `uneven` as of another fit; members that never ran are left out."""
    ran = np.einsum("bpp->p", blocks.gram) > 0
    members = [group for group in members if ran[group].any()]
    even = blocks.merged(members)
    weights = _weights(even)
    gram, moment = _total(even, weights)
    rate = nonnegative(gram, moment)
    inflation, _ = _inflation(gram)
    columns, owner = blocks.profiles(members)
    whole = blocks.merged([*members, *columns], owner) if columns else even
    ridge = _ridge(even, rate, owner)
    if uneven is None:
        found, with_profiles = explained(even), explained(whole, ridge)
        uneven = 1 - with_profiles < WORTH * (1 - found)
        found = np.where(uneven, with_profiles, found)
    else:
        found = np.full(len(uneven), np.nan)
    gram, moment = _total(whole, weights)
    at = np.arange(len(members), len(members) + len(owner))
    ridge[:, at, at] = np.where(uneven[:, None], ridge[:, at, at], _NEVER * gram[:, at, at])
    gram = gram + ridge
    rate = nonnegative(gram, moment, len(owner))
    influence, degrees = _influence(whole, weights, gram, rate)
    known = slice(0, len(members))
    return Fit(rate[known], influence[:, known], degrees[known], rate[known] <= 0, inflation, found, uneven, members)


def _ridge(even: Blocks, rate: Array, owner: Indices) -> Array:
    """What is believed of profiles, as an addition to the gram matrices (C, P + Q, P + Q).

    A coefficient that is normal around 0 adds the variance of a sample's noise over its own variance.
    """
    terms, counters = rate.shape
    ridge = np.zeros((counters, terms + len(owner), terms + len(owner)))
    if len(owner):
        noise = _misfit(even, rate).sum(axis=0) / max(even.samples.sum(), 1)
        mean = even.flat.sum(axis=0) / even.length.sum()
        spread = UNEVEN * np.maximum(rate[owner], LEAST_RATE * mean)
        at = np.arange(terms, terms + len(owner))
        ridge[:, at, at] = (noise / np.square(spread).clip(min=1e-300)).T
    return ridge


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


def nonnegative(gram: Array, moment: Array, signed: int = 0) -> Array:
    """Non-negative least squares for each counter: `gram` (C, P, P), `moment` (P, C) to rates (P, C).

    The last `signed` of the rates may be negative.
    Block principal pivoting on the normal equations (Portugal, Judice and Vicente 1994): it starts
    from the unconstrained solution, so it takes few steps where few rates are zero, and needs no scipy.
    """
    rates = np.zeros_like(moment)
    for counter in range(moment.shape[1]):
        scale = np.sqrt(np.diag(gram[counter]).clip(min=1e-300))
        scaled = gram[counter] / np.outer(scale, scale) + RIDGE * np.eye(len(scale))
        rates[:, counter] = _pivot(scaled, moment[:, counter] / scale, signed) / scale
    return rates


def _solved(matrix: Array, right: Array) -> Array:
    """matrix^-1 right; the least squares where a part of the samples leaves terms undetermined."""
    try:
        return np.asarray(np.linalg.solve(matrix, right), dtype=np.float64)
    except np.linalg.LinAlgError:
        return np.asarray(np.linalg.lstsq(matrix, right, rcond=None)[0], dtype=np.float64)


def _pivot(gram: Array, moment: Array, signed: int) -> Array:
    size = len(moment)
    bounded = np.arange(size) < size - signed
    free = np.ones(size, dtype=bool)
    tolerance = 1e-9 * max(float(np.abs(moment).max(initial=0.0)), 1e-300)
    fewest, chances = size + 1, 3
    rate = np.zeros(size)
    for _ in range(10 * size + 20):
        rate = np.zeros(size)
        rate[free] = _solved(gram[np.ix_(free, free)], moment[free])
        slope = gram @ rate - moment
        wrong = bounded & ((free & (rate < 0)) | (~free & (slope < -tolerance)))
        count = int(wrong.sum())
        if count == 0:
            break
        if count < fewest:
            fewest, chances = count, 3
        elif chances > 0:
            chances -= 1
        else:  # one at a time cannot cycle
            last = int(np.flatnonzero(wrong)[-1])
            wrong = np.zeros(size, dtype=bool)
            wrong[last] = True
        free ^= wrong
    return np.where(bounded, rate.clip(min=0), rate)


def _weights(blocks: Blocks) -> Array:
    """Weight of each block for each counter (B, C): 1, less where its misfit is far above the median."""
    ones = np.ones_like(blocks.square)
    gram, moment = _total(blocks, ones)
    misfit = _misfit(blocks, nonnegative(gram, moment)) / blocks.samples[:, None].clip(min=1)
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


def _influence(blocks: Blocks, weights: Array, gram: Array, rate: Array) -> tuple[Array, Array]:
    """Influence of each block on each rate (B, P, C), and Student's degrees of freedom (P,).

    What a block's score (x' residual, summed over it) moves the rates by. Summing its squares over
    blocks is the sandwich estimate with blocks as clusters: it holds whatever the noise of single
    samples, and however neighbours within a block depend on each other. Each component is divided by
    one minus the block's share of the term, which is the jackknife's correction where terms hardly
    overlap, and matters for terms that ran in few blocks.
    """
    share = np.einsum("bpp->bp", blocks.gram) / np.einsum("pp->p", blocks.gram.sum(axis=0))
    effective = 1 / np.square(share).sum(axis=0)
    score = (blocks.moment - _times(blocks.gram, rate)) * weights[:, None, :]
    score = score - score.mean(axis=0)
    share = np.maximum(share, _leverage(blocks)[:, None])
    with np.errstate(divide="ignore"):
        score = score / (1 - share).clip(min=0.05)[:, :, None]
    influence = np.empty_like(score)
    free = rate > 0
    free[blocks.terms :] = True
    for counter in range(rate.shape[1]):
        influence[:, :, counter] = _moved(gram[counter], score[:, :, counter], free[:, counter])
    count = len(blocks.samples)
    influence *= np.sqrt(count / max(count - 1, 1))
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
    """How scores (B, P) move the rates: free ones together, each rate at zero as if it alone were let go."""
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
        fitted = np.arange(count) % 2 == half
        part = blocks.take(fitted)
        gram, moment = _total(part, np.ones_like(part.square))
        rate = nonnegative(gram + ridge / 2, moment, len(blocks.owner))
        misfit += _misfit(blocks.take(~fitted), rate).sum(axis=0)
    square, flat = blocks.square.sum(axis=0), blocks.flat.sum(axis=0)
    variation = square - np.square(flat) / blocks.length.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        share: Array = np.where(variation > 1e-12 * square, 1 - misfit / variation, np.nan)
    return share
