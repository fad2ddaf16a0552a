"""Means with intervals that hold for what repeated GPU measurements are like, and how two of them differ.

The estimand is the mean over repetitions without spikes. A mean, because time is paid in sums: the
parts of a saving add up, and a device that switches between two clocks costs the average of both,
where a median would report one of them. Without spikes, because a repetition that some other
activity stretched severalfold once in thirty says nothing about the code and would hide everything
else; how many were left out is always reported.

The interval is Student's t over a long-run variance from cosine projections (equal-weighted
cosines: Mueller 2004; Lazarus, Lewis, Stock, Watson 2018). Neighbouring repetitions depend on each
other, and the slowest cosines see that dependence as extra variance; their number, which is the
degrees of freedom of t, follows from the first autocorrelation. `docs/compare.md` derives it, and
`benchmarks/compare.py` measures coverage beside a block bootstrap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lgamma

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

CONFIDENCE = 0.95
# A spike lies beyond 3 interquartile ranges from the quartiles (Tukey's "far out") and, so that the
# clock states of a device are never taken for one, more than a fifth away from the median.
FENCE = 3.0
SPIKE_SHARE = 0.2
# Fewer repetitions do not say what is usual.
SPIKE_REPETITIONS = 8
# How far up the spectrum the cosines reach, in half widths of an AR(1) process' peak; less than half
# of the frequencies in any case. Chosen with benchmarks/compare.py: 0.5 to 1 differ little.
REACH = 0.7
# More cosines than this narrow no interval (Student's t of 64 degrees is 2 % wider than the normal one)
# and see less of what is slow.
MOST_COSINES = 64
HIGHEST_CORRELATION = 0.98
NEWTON_STEPS = 40  # far more than it takes


@dataclass(frozen=True)
class Means:
    """Means of rows: `value`, `variance` of that mean (NaN where unknown), `degrees` of freedom for t.

    `kept` and `spikes` count repetitions. All are arrays with one entry a row.
    """

    value: Array
    variance: Array
    degrees: Array
    kept: NDArray[np.int64]
    spikes: NDArray[np.int64]

    def __getitem__(self, row: int) -> Means:
        """One row, as Means of one entry."""
        which = [row]
        return Means(self.value[which], self.variance[which], self.degrees[which], self.kept[which], self.spikes[which])

    def interval(self, confidence: float = CONFIDENCE) -> tuple[Array, Array]:
        """Lower and upper ends; NaN where the variance is unknown."""
        half = t_quantile(confidence, self.degrees) * np.sqrt(self.variance)
        return self.value - half, self.value + half


@dataclass(frozen=True)
class Change:
    """From a to b, entry by entry: `ratio` b / a with its interval, `difference` b - a with its own.

    `p_value` is two-sided, for no change, on the logarithm of the ratio. NaN where unknown: a ratio
    of numbers that are not both positive, an interval of single values.
    """

    ratio: Array
    low: Array
    high: Array
    difference: Array
    difference_low: Array
    difference_high: Array
    p_value: Array


# --- means -------------------------------------------------------------------------------------


def spikes(values: Array) -> Mask:
    """Which of the values along the last axis are spikes; `values` may have any shape."""
    if values.shape[-1] < SPIKE_REPETITIONS:
        return np.zeros(values.shape, dtype=bool)
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75], axis=-1, keepdims=True)
    reach = FENCE * (high - low)
    far = (values > high + reach) | (values < low - reach)
    return np.asarray(far & (np.abs(values - middle) > SPIKE_SHARE * np.abs(middle)), dtype=bool)


def means(values: Array, left_out: Mask | None = None) -> Means:
    """Mean of each row of `values` (rows, repetitions in order of time) without its spikes.

    `left_out`, of the same shape, replaces the search for spikes. Raises ValueError for NaN.
    """
    if values.ndim != 2 or np.isnan(values).any():
        raise ValueError("values must be (rows, repetitions) without NaN")
    left_out = spikes(values) if left_out is None else left_out
    dropped = left_out.sum(axis=1)
    kept = values.shape[1] - dropped
    value, variance, degrees = (np.full(len(values), np.nan) for _ in range(3))
    for count in np.unique(kept):
        rows = kept == count
        chosen = values[rows][~left_out[rows]].reshape(rows.sum(), count)
        value[rows], variance[rows], degrees[rows] = long_run(chosen)
    return Means(value, variance, degrees, kept.astype(np.int64), dropped.astype(np.int64))


def long_run(values: Array) -> tuple[Array, Array, Array]:
    """Mean of each row, the variance of that mean under autocorrelation, and its degrees of freedom.

    `values` is (rows, n). For n < 2 the variance is NaN and the degrees are 0.
    """
    rows, n = values.shape
    if n == 0:
        return np.full(rows, np.nan), np.full(rows, np.nan), np.zeros(rows)
    mean = values.mean(axis=1)
    if n == 1:
        return mean, np.full(rows, np.nan), np.zeros(rows)
    centred = values - mean[:, None]
    correlation = _correlation(centred)
    number = _cosines(correlation, n)
    most = int(number.max())
    at = np.pi * np.arange(1, most + 1) / n
    basis = np.sqrt(2 / n) * np.cos(np.outer(np.arange(n) + 0.5, at))
    # What an AR(1) process of this correlation has at each cosine, as a share of what it has at 0.
    root = correlation[:, None]
    share = (1 - root) ** 2 / (1 - 2 * root * np.cos(at) + root**2)
    last = (np.arange(rows), number - 1)
    power = np.cumsum((centred @ basis) ** 2, axis=1)[last]
    seen = np.cumsum(share, axis=1)[last]
    return mean, power / seen / n, number.astype(np.float64)


def _correlation(centred: Array) -> Array:
    """Correlation of neighbours, one standard error above the estimate corrected for its bias.

    The estimate from n values is too low by (1 + 3 r) / n on average, and half of all samples show
    less than there is: intervals from those would be too short. It ends at 1 - 2 / n, a memory of half the
    record: what lasts longer the record cannot tell from a mean, and to allow for it made one in ten intervals
    of six independent values ten times as wide as Student's, for no more coverage.
    """
    n = centred.shape[1]
    total = (centred**2).sum(axis=1)
    products = (centred[:, 1:] * centred[:, :-1]).sum(axis=1)
    found = np.divide(products, total, out=np.zeros(len(centred)), where=total > 0)
    found = found + (1 + 3 * found) / n
    found = found + np.sqrt(np.clip(1 - found**2, 0, 1) / n)
    return np.asarray(np.clip(found, 0, min(1 - 2 / n, HIGHEST_CORRELATION)), dtype=np.float64)


def _cosines(correlation: Array, n: int) -> NDArray[np.int64]:
    """How many cosines lie below REACH half widths of the spectrum's peak at zero."""
    fewest = min(2, n - 1)
    width = (1 - correlation) / np.sqrt(np.maximum(correlation, 1e-3))
    number = np.floor(REACH * width * n / np.pi)
    return np.clip(number, fewest, max(fewest, min(n // 2 - 1, MOST_COSINES))).astype(np.int64)


def pool(runs: Sequence[Means]) -> Means:
    """The mean of several runs of one side, each counting the same.

    The variance is the larger of two: what the runs' own variances add up to, and what the scatter
    of the runs' means says. Runs of one program differ by more than their repetitions show (clocks,
    memory placement), and few runs estimate that scatter poorly, hence its k - 1 degrees of freedom.
    """
    if len(runs) == 1:
        return runs[0]
    count = len(runs)
    value = np.stack([run.value for run in runs])
    own = np.stack([run.variance for run in runs]) / count**2
    degrees = np.stack([run.degrees for run in runs])
    within = own.sum(axis=0)
    within_degrees = welch(own, degrees)
    between = value.var(axis=0, ddof=1) / count
    scattered = ~(within >= between)  # also where a run's own variance is unknown
    return Means(
        value.mean(axis=0),
        np.where(scattered, between, within),
        np.where(scattered, count - 1.0, within_degrees),
        np.sum([run.kept for run in runs], axis=0),
        np.sum([run.spikes for run in runs], axis=0),
    )


def welch(variances: Array, degrees: Array) -> Array:
    """Degrees of freedom of a sum of variances along the first axis (Welch and Satterthwaite)."""
    total = variances.sum(axis=0)
    parts: Array = np.divide(variances**2, degrees, out=np.zeros_like(variances), where=degrees > 0).sum(axis=0)
    return np.asarray(np.divide(total**2, parts, out=degrees.sum(axis=0), where=parts > 0), dtype=np.float64)


def change(a: Means, b: Means, confidence: float = CONFIDENCE) -> Change:
    """How `b` differs from `a`, entry by entry."""
    positive = (a.value > 0) & (b.value > 0)
    ratio = np.divide(b.value, a.value, out=np.full_like(a.value, np.nan), where=positive)
    relative = np.stack([a.variance, b.variance]) / np.where(positive, np.stack([a.value, b.value]) ** 2, np.nan)
    degrees = np.stack([a.degrees, b.degrees])
    spread = np.sqrt(relative.sum(axis=0))
    freedom = welch(relative, degrees)
    half = t_quantile(confidence, freedom) * spread
    difference = b.value - a.value
    absolute = np.stack([a.variance, b.variance])
    reach = t_quantile(confidence, welch(absolute, degrees)) * np.sqrt(absolute.sum(axis=0))
    return Change(
        ratio,
        ratio * np.exp(-half),
        ratio * np.exp(half),
        difference,
        difference - reach,
        difference + reach,
        _p_value(np.log(ratio), spread, freedom),
    )


def _p_value(effect: Array, spread: Array, degrees: Array) -> Array:
    """Two-sided; without any spread it is 1 for no effect and 0 for one."""
    statistic = np.divide(np.abs(effect), spread, out=np.full_like(effect, np.nan), where=spread > 0)
    known = np.where(spread > 0, t_tail(statistic, degrees), np.where(effect == 0, 1.0, 0.0))
    return np.where(np.isnan(effect) | np.isnan(spread), np.nan, known)


def benjamini_hochberg(p_values: Array) -> Array:
    """Adjusted p-values: those below q have a false share of at most q on average. NaN stays and does not count.

    Holds for independent tests and for tests that err in the same direction (Benjamini and Yekutieli
    2001), as kernels on one device do when its clock moves.
    """
    adjusted = np.full(p_values.shape, np.nan)
    known = np.flatnonzero(~np.isnan(p_values))
    order = known[np.argsort(p_values[known], kind="stable")]
    scaled = p_values[order] * len(order) / np.arange(1, len(order) + 1)
    adjusted[order] = np.minimum(np.minimum.accumulate(scaled[::-1])[::-1], 1.0)
    return adjusted


# --- Student's t -------------------------------------------------------------------------------


def t_tail(statistic: Array, degrees: Array) -> Array:
    """Probability of |t| > statistic (>= 0) for so many degrees of freedom; NaN for none."""
    statistic, degrees = np.broadcast_arrays(np.asarray(statistic, float), np.asarray(degrees, float))
    good = (degrees > 0) & ~np.isnan(statistic)
    safe = np.where(good, degrees, 1.0)
    x = safe / (safe + np.where(good, statistic, 0.0) ** 2)
    return np.where(good, _incomplete_beta(safe / 2, 0.5, x), np.nan)


def t_quantile(confidence: float, degrees: Array) -> Array:
    """The t that |t| stays below with probability `confidence`, to 1e-6 of itself; NaN below one degree of freedom."""
    degrees = np.asarray(degrees, float)
    inverse, logarithm = _quantile_table(confidence)
    known = degrees >= 1
    at = np.divide(1.0, degrees, out=np.zeros(degrees.shape), where=known)
    return np.where(known, np.exp(np.interp(at, inverse, logarithm)), np.nan)


@lru_cache(maxsize=64)
def _quantile_table(confidence: float) -> tuple[Array, Array]:
    """Logarithms of quantiles over inverse degrees of freedom, where they run so smoothly that a line connects them.

    By Newton's method on logarithms of both: the logarithm of the tail falls, ever faster, with that of t.
    """
    inverse = np.linspace(0, 1, 1001)
    degrees = 1 / np.maximum(inverse, 1e-7)
    gammas = np.array([lgamma((n + 1) / 2) - lgamma(n / 2) for n in degrees.tolist()])
    logarithm = np.zeros(inverse.shape)
    for _ in range(NEWTON_STEPS):
        t = np.exp(logarithm)
        tail = t_tail(t, degrees)
        density = np.exp(gammas - (degrees + 1) / 2 * np.log1p(t * t / degrees)) / np.sqrt(degrees * np.pi)
        step = tail * np.log(tail / (1 - confidence)) / (2 * density * t)
        logarithm += np.clip(step, -1, 1)
        if np.all(np.abs(step) < 1e-12):
            break
    return inverse, logarithm


def _incomplete_beta(a: Array, b: float, x: Array) -> Array:
    """The regularised incomplete beta function by its continued fraction (Lentz's method)."""
    swapped = x > (a + 1) / (a + b + 2)
    p, q = np.where(swapped, b, a), np.where(swapped, a, b)
    y = np.where(swapped, 1 - x, x)
    gammas = np.array([lgamma(float(one) + b) - lgamma(float(one)) - lgamma(b) for one in a.ravel()]).reshape(a.shape)
    with np.errstate(divide="ignore"):
        front = np.exp(gammas + p * np.log(y) + q * np.log1p(-y)) / p
    result = np.where(y <= 0, 0.0, front * _beta_fraction(p, q, np.clip(y, 0, 1)))
    return np.asarray(np.where(swapped, 1 - result, result), dtype=np.float64)


def _beta_fraction(p: Array, q: Array, y: Array) -> Array:
    tiny = 1e-300
    c = np.ones_like(y)
    d = 1 / _away_from_zero(1 - (p + q) * y / (p + 1), tiny)
    value = d.copy()
    for m in range(1, 200):
        even = m * (q - m) * y / ((p + 2 * m - 1) * (p + 2 * m))
        odd = -(p + m) * (p + q + m) * y / ((p + 2 * m) * (p + 2 * m + 1))
        step = np.ones_like(y)
        for term in (even, odd):
            d = 1 / _away_from_zero(1 + term * d, tiny)
            c = _away_from_zero(1 + term / c, tiny)
            step = step * (d * c)
            value = value * (d * c)
        if np.all(np.abs(step - 1) < 1e-14):
            break
    return np.asarray(value, dtype=np.float64)


def _away_from_zero(value: Array, tiny: float) -> Array:
    return np.where(np.abs(value) < tiny, tiny, value)
