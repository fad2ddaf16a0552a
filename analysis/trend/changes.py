"""Change points and drift in many short series at once, with p-values that hold for all of them together.

A series has one value a run: the logarithm of a kernel's time. Neighbouring runs depend on each other, all kernels
of a job depend on each other (they share the device, its clock and its heat), and there are few runs and many
kernels. So what is found is judged by a bootstrap that keeps all of that: every series gets an AR(1) model, the
model's innovations of whole runs, all kernels together, are drawn anew, and each redrawn set of series tells how
large the largest statistic of any of them becomes where nothing changed (Westfall and Young's max-T). What the
clock explains is regressed out first, in the redrawn series too. `docs/trend.md` derives it;
`tests/test_trend_changes.py` tests the rate of false alarms and the power.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nanalyze.analysis.statistics import Array, t_quantile

# False alarms a job: 5 % in all, most of it for steps, which are what releases and drivers make.
STEP_RATE, DRIFT_RATE = 0.04, 0.01
# Of a further step in a piece of a series: each piece is one more chance to err.
FURTHER_RATE = STEP_RATE / 5
DRAWS = 999
# Runs on either side of a change, and in all: two or three runs do not say what is usual.
LEAST_SIDE = 3
LEAST_RUNS = 8
# A value this many robust standard deviations off its neighbours' median is drawn in to it: one odd run is no change.
FENCE = 5.0
HIGHEST_CORRELATION = 0.9
# Redrawn values at once, which bounds memory to some 100 MB.
CHUNK = 2_000_000
# A step that the clock made nearly by itself cannot be told from it.
LEAST_NORM_SHARE = 0.1
FEWEST_FOR_PRIOR = 8
# Series from which on a movement of all of them is looked for, the sets that it is compared with, and its error rate.
FEWEST_FOR_COMMON = 8
COMMON_DRAWS, COMMON_RATE = 199, 0.01
MOST_PRIOR_DEGREES = 60.0

Whole = NDArray[np.int64]


@dataclass(frozen=True)
class Step:
    """A change point: `at` is the first run after it, `change` b / a - 1 of its two levels with its 95 % interval.

    `p_value` holds for all series together.
    """

    at: int
    change: float
    low: float
    high: float
    p_value: float


@dataclass(frozen=True)
class Drift:
    """A slow change: a day's, as a share (Theil and Sen), with its 95 % interval. `p_value` as in Step."""

    per_day: float
    low: float
    high: float
    p_value: float


@dataclass(frozen=True)
class Finding:
    """What happened to one series: steps, in order of time, or a drift, or neither. `correlation` is AR(1)'s."""

    steps: tuple[Step, ...] = ()
    drift: Drift | None = None
    correlation: float = 0.0


def find(
    series: Array,
    days: Array,
    clocks: Array | None = None,
    *,
    families: int = 1,
    draws: int = DRAWS,
    seed: int = 1,
) -> list[Finding]:
    """What happened to each of `series` (rows, runs), logarithms without NaN, of runs at `days`, ascending.

    `clocks` are logarithms of each run's clock: what follows them is no change. This call is one of so many
    `families`, which share the error rate. Fewer than LEAST_RUNS runs give no finding. The same input gives the same
    findings.
    """
    rows, runs = series.shape
    if rows == 0 or runs < LEAST_RUNS:
        return [Finding() for _ in range(rows)]
    random = np.random.default_rng(seed)
    design = Design(days, clocks).piece(0, runs) or Design(days)
    # Without the clock first: a run at another clock is not odd.
    drawn_in = _drawn_in(design.clean(series))
    values = design.clean(drawn_in)
    model = _model(values, design)
    step_p, drift_p = (np.minimum(p * families, 1.0) for p in _p_values(values, design, model, draws, random))
    found = []
    for row in range(rows):
        correlation = float(model.correlation[row])
        finding = Finding(correlation=correlation)
        if step_p[row] <= STEP_RATE or drift_p[row] <= DRIFT_RATE:
            finding = _described(values[row], days, design, correlation, step_p[row], drift_p[row])
        if finding.steps:
            finding = _with_further_steps(finding, drawn_in[row], design, draws, random)
        found.append(finding)
    return found


def find_apart(
    series: Array, days: Array, *, families: int = 1, draws: int = DRAWS, seed: int = 1
) -> tuple[list[Finding], list[bool]]:
    """`find` where clocks were not read: what happened to each series beside what moves all of them together.

    Second, of each series, whether it changed only as all do: a clock does that, and a driver may. Where nothing moves
    all, or where there are too few series to tell, the findings are those of `find`.
    """
    common = common_factor(series, days, seed=seed)
    plain = find(series, days, families=families, draws=draws, seed=seed)
    if common is None:
        return plain, [False] * len(plain)
    apart = find(series, days, common, families=families, draws=draws, seed=seed)
    changed = [bool(finding.steps or finding.drift) for finding in plain]
    return apart, [
        shown and not (finding.steps or finding.drift) for shown, finding in zip(changed, apart, strict=True)
    ]


def common_factor(series: Array, days: Array, seed: int = 1) -> Array | None:
    """What moves all of `series` together, one value a run without a unit; None where nothing shows.

    It is the first principal component of the series at equal variance, so that no single one makes it, if that
    holds more of the variation than in 99 of 100 sets of series that have the same models but nothing in common
    (parallel analysis, Horn 1965, with dependent runs).
    """
    rows, runs = series.shape
    if rows < FEWEST_FOR_COMMON or runs < LEAST_RUNS:
        return None
    design = Design(days)
    if not len(design.places):
        return None
    values = design.clean(_drawn_in(design.clean(series)))
    model = _model(values, design)
    random = np.random.default_rng(seed)
    own, larger, left = float(_first_share(values)), 0, COMMON_DRAWS
    while left:
        count = min(left, max(1, CHUNK // (rows * runs)))
        chosen = random.integers(0, model.innovations.shape[1], (count, rows, runs))
        signs = random.choice([-1.0, 1.0], chosen.shape)
        drawn = np.take_along_axis(np.broadcast_to(model.innovations, (count, *model.innovations.shape)), chosen, 2)
        redrawn = _recoloured(drawn * signs, np.broadcast_to(model.correlation, (count, rows)))
        larger += int((_first_share(design.clean(redrawn)) >= own).sum())
        left -= count
    if (1 + larger) / (1 + COMMON_DRAWS) > COMMON_RATE:
        return None
    factor: Array = np.linalg.svd(_scaled(values), full_matrices=False)[2][0]
    return factor


def _scaled(values: Array) -> Array:
    """Each series (..., rows, runs) with a sum of squares of 1, or 0."""
    scale = np.sqrt((values**2).sum(axis=-1, keepdims=True))
    return np.asarray(np.divide(values, scale, out=np.zeros_like(values), where=scale > 0), dtype=np.float64)


def _first_share(values: Array) -> Array:
    """Share of the variation of series (..., rows, runs) at equal variance that their first component holds."""
    scaled = _scaled(values)
    other = np.swapaxes(scaled, -1, -2)
    products = scaled @ other if values.shape[-2] <= values.shape[-1] else other @ scaled
    found = np.linalg.eigvalsh(products)
    total = found.sum(axis=-1)
    return np.asarray(np.divide(found[..., -1], total, out=np.zeros_like(total), where=total > 0), dtype=np.float64)


def _drawn_in(series: Array) -> Array:
    """`series` with single values far off drawn in to the median of five neighbours, which keeps steps."""
    padded = np.pad(series, ((0, 0), (2, 2)), mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, 5, axis=1)
    middle = np.median(windows, axis=2)
    spread = 1.4826 * np.median(np.abs(np.diff(series, axis=1)), axis=1, keepdims=True) / np.sqrt(2)
    reach = FENCE * spread
    return np.asarray(np.clip(series, middle - reach, middle + reach), dtype=np.float64)


# --- statistics ------------------------------------------------------------------------------------


class Design:
    """A regression on a level, the clock if it is known, and a step at each possible place or a line in time.

    `places` are the first runs after each step. What is `clean` has neither level nor clock effect.
    """

    def __init__(self, days: Array, clocks: Array | None = None) -> None:
        runs = len(days)
        self.days, self.clocks = days, clocks
        columns = [np.ones(runs)]
        if clocks is not None and np.ptp(clocks) > 0:
            columns.append(clocks - clocks.mean())
        self.basis, _ = np.linalg.qr(np.stack(columns, axis=1))
        places = np.arange(LEAST_SIDE, runs - LEAST_SIDE + 1)
        steps = (np.arange(runs)[:, None] >= places).astype(np.float64)
        own = ((steps - steps.mean(axis=0)) ** 2).sum(axis=0)
        steps = steps - self.basis @ (self.basis.T @ steps)
        norms = np.sqrt((steps**2).sum(axis=0))
        told_apart = norms**2 > LEAST_NORM_SHARE * own
        self.places: Whole = places[told_apart]
        self.norms: Array = norms[told_apart]
        self.steps: Array = steps[:, told_apart] / self.norms
        line = self.clean(np.asarray(days - days.mean(), dtype=np.float64))
        length = float(np.sqrt((line**2).sum()))
        self.line: Array = line / length if length > 0 else line
        self.degrees = float(runs - len(columns) - 1)

    def piece(self, first: int, end: int) -> Design | None:
        """The same of the runs from `first` to `end`; None where no step can be placed in them."""
        if end - first < 2 * LEAST_SIDE:
            return None
        made = Design(self.days[first:end], None if self.clocks is None else self.clocks[first:end])
        return made if len(made.places) and made.degrees > 0 else None

    def clean(self, values: Array) -> Array:
        cleaned: Array = values - (values @ self.basis) @ self.basis.T
        return cleaned

    def best(self, values: Array) -> tuple[Whole, Array]:
        """Index into `places` of the likeliest step of each clean series, and its size along the unit step."""
        along = values @ self.steps
        at = np.abs(along).argmax(axis=-1)
        return at, np.take_along_axis(along, at[..., None], axis=-1)[..., 0]

    def without_step(self, values: Array) -> Array:
        """What is left of each clean series without its likeliest step."""
        at, size = self.best(values)
        left: Array = values - size[..., None] * self.steps.T[at]
        return left


@dataclass(frozen=True)
class Prior:
    """What the other series say of one's variance: as if `degrees` more values had shown `variance`."""

    degrees: float = 0.0
    variance: float = 0.0


def _largest(values: Array, design: Design, prior: Prior) -> Array:
    """Largest |t| of a step at any place of each clean series."""
    return _moderated(values, np.abs(values @ design.steps).max(axis=-1), design, prior)


def _trends(values: Array, design: Design, prior: Prior) -> Array:
    """|t| of a straight line in time of each clean series."""
    return _moderated(values, np.abs(values @ design.line), design, prior)


def _moderated(values: Array, along: Array, design: Design, prior: Prior) -> Array:
    """Student's t of what lies along one unit direction, with the variance of what does not.

    Moderated (Smyth 2004): so few runs estimate a variance poorly, and where all kernels vary alike the others help.
    """
    inside = np.maximum((values**2).sum(axis=-1) - along**2, 0.0)
    variance = (inside + prior.degrees * prior.variance) / (design.degrees + prior.degrees)
    return np.asarray(np.divide(along, np.sqrt(variance), out=np.zeros_like(along), where=variance > 0))


# --- the model of no change ------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """AR(1) of each series about its level: `correlation` (rows,), `innovations` (rows, runs - 1)."""

    correlation: Array
    innovations: Array
    prior: Prior


def _model(values: Array, design: Design) -> Model:
    """The residuals' model once the likeliest step is taken out, so that a step is not taken for dependence.

    Taking a step out lowers the correlation that is left; `_true_correlation` says by how much. Single series are
    far too short to tell theirs, so each is drawn towards what all of them show together.
    """
    rows, n = values.shape
    residuals = design.without_step(values)
    found = _true_correlation(_lag(residuals), design)
    # One standard error above: half of all jobs show less dependence than there is.
    together = float(np.median(found)) + 1 / np.sqrt(n * _independent(residuals))
    own = max(float(np.var(found)) - 1.0 / n, 0.0) if rows > 2 else 0.0
    weight = own / (own + 1.0 / n)
    correlation = np.clip(together + weight * (found - together), 0.0, HIGHEST_CORRELATION)
    return Model(correlation, _innovations(residuals, correlation, design), _prior(residuals, design.degrees))


def _innovations(residuals: Array, correlation: Array, design: Design) -> Array:
    """What each run adds to its predecessor's share, made as large as it was before levels and steps were fitted."""
    found = residuals[:, 1:] - correlation[:, None] * residuals[:, :-1]
    found = found - found.mean(axis=1, keepdims=True)
    enlarged: Array = found * np.sqrt(residuals.shape[1] / design.degrees)
    return enlarged


def _lag(residuals: Array) -> Array:
    """Correlation of neighbours."""
    total = (residuals**2).sum(axis=-1)
    products = (residuals[..., 1:] * residuals[..., :-1]).sum(axis=-1)
    return np.asarray(np.divide(products, total, out=np.zeros_like(total), where=total > 0), dtype=np.float64)


GRID = np.linspace(0.0, HIGHEST_CORRELATION, 10)
SIMULATED = 1_000


def _true_correlation(found: Array, design: Design) -> Array:
    """The AR(1) correlation whose series, without their likeliest step, show `found` on average (by simulation)."""
    noise = np.random.default_rng(0).standard_normal((SIMULATED, len(design.basis)))
    shown = [
        float(np.mean(_lag(design.without_step(design.clean(_recoloured(noise, np.full(SIMULATED, one)))))))
        for one in GRID
    ]
    return np.asarray(np.interp(found, np.maximum.accumulate(shown), GRID), dtype=np.float64)


def _recoloured(innovations: Array, correlation: Array) -> Array:
    """AR(1) series (..., runs) from innovations, begun in their stationary state."""
    values = np.empty_like(innovations)
    values[..., 0] = innovations[..., 0] / np.sqrt(1 - correlation**2)
    for run in range(1, innovations.shape[-1]):
        values[..., run] = correlation * values[..., run - 1] + innovations[..., run]
    return values


def _independent(residuals: Array) -> float:
    """How many independent series would vary together as little as these: from 1 to their number."""
    scale = np.sqrt((residuals**2).sum(axis=1, keepdims=True))
    known = residuals[scale[:, 0] > 0] / scale[scale[:, 0] > 0]
    if not len(known):
        return 1.0
    products = known @ known.T if len(known) <= known.shape[1] else known.T @ known
    return float(np.trace(products) ** 2 / (products**2).sum())


def _prior(residuals: Array, degrees: float) -> Prior:
    """Fitted to the spread of the series' own variances: none where they differ as widely as they may."""
    variances = (residuals**2).sum(axis=1) / degrees
    variances = variances[variances > 0]
    if len(variances) < FEWEST_FOR_PRIOR:
        return Prior()
    logarithms = np.log(variances) - _digamma(degrees / 2) + np.log(degrees / 2)
    excess = float(np.var(logarithms, ddof=1)) - _trigamma(degrees / 2)
    low, high = 1e-2, MOST_PRIOR_DEGREES / 2
    for _ in range(60 if excess > _trigamma(high) else 0):  # trigamma falls
        middle = (low + high) / 2
        low, high = (middle, high) if _trigamma(middle) > excess else (low, middle)
    return Prior(2 * high, float(np.exp(logarithms.mean() + _digamma(high) - np.log(high))))


def _digamma(x: float) -> float:
    """By its recurrence and its asymptotic series, to 1e-9."""
    shift = 0.0
    while x < 10:
        shift, x = shift - 1 / x, x + 1
    return float(shift + np.log(x) - 1 / (2 * x) - 1 / (12 * x**2) + 1 / (120 * x**4) - 1 / (252 * x**6))


def _trigamma(x: float) -> float:
    shift = 0.0
    while x < 10:
        shift, x = shift + 1 / x**2, x + 1
    return shift + 1 / x + 1 / (2 * x**2) + 1 / (6 * x**3) - 1 / (30 * x**5) + 1 / (42 * x**7)


def _p_values(
    values: Array, design: Design, model: Model, draws: int, random: np.random.Generator
) -> tuple[Array, Array]:
    """Of each series: how often a redrawn set holds a larger step, and a clearer trend, in any of its series."""
    rows, n = values.shape
    steps, trends = _largest(values, design, model.prior), _trends(values, design, model.prior)
    larger_step, larger_trend = np.zeros(rows), np.zeros(rows)
    left = draws
    while left:
        count = min(left, max(1, CHUNK // (rows * n)))
        redrawn = _redrawn(model, design, count, random)
        larger_step += (_largest(redrawn, design, model.prior).max(axis=1)[:, None] >= steps).sum(axis=0)
        larger_trend += (_trends(redrawn, design, model.prior).max(axis=1)[:, None] >= trends).sum(axis=0)
        left -= count
    return (1 + larger_step) / (1 + draws), (1 + larger_trend) / (1 + draws)


def _redrawn(model: Model, design: Design, count: int, random: np.random.Generator) -> Array:
    """`count` sets of clean series (count, rows, runs) in which nothing changes: innovations of whole runs drawn anew.

    Each gets a random sign, a run at a time, because so few values are lopsided by chance.
    """
    n = len(design.basis)
    chosen = random.integers(0, model.innovations.shape[1], (count, n))
    signs = random.choice([-1.0, 1.0], (count, 1, n))
    drawn = np.moveaxis(model.innovations[:, chosen], 0, 1) * signs
    return design.clean(_recoloured(drawn, np.broadcast_to(model.correlation, drawn.shape[:2])))


# --- what a finding says ---------------------------------------------------------------------------


def _described(
    values: Array, days: Array, design: Design, correlation: float, step_p: float, drift_p: float
) -> Finding:
    """A step or a drift, whichever leaves less of the series."""
    slope = float(np.median(_slopes(values, days)))
    straight = values - slope * days
    drift_left = float(((straight - straight.mean()) ** 2).sum())
    step_left = float((design.without_step(values) ** 2).sum())
    is_drift = drift_p <= DRIFT_RATE and (drift_left < step_left or step_p > STEP_RATE)
    if is_drift:
        return Finding((), _drift(values, days, correlation, drift_p), correlation)
    at, size = design.best(values)
    return Finding((_step(values, int(at), float(size), design, correlation, step_p),), None, correlation)


def _step(values: Array, at: int, size: float, design: Design, correlation: float, p_value: float) -> Step:
    """The step at `places[at]` of one clean series."""
    spread = max(float((values**2).sum()) - size**2, 0.0) / design.degrees
    widened = np.sqrt(spread * (1 + correlation) / (1 - correlation))
    reach = float(t_quantile(0.95, np.array([design.degrees]))[0] * widened)
    change, low, high = (float(np.expm1(end / design.norms[at])) for end in (size, size - reach, size + reach))
    return Step(int(design.places[at]), change, low, high, float(p_value))


def _slopes(values: Array, days: Array) -> Array:
    """Slopes of all pairs of runs, ascending; 0 where all are of one moment."""
    earlier, later = np.triu_indices(len(values), 1)
    apart = days[later] - days[earlier]
    chosen = apart > 0
    return np.sort((values[later] - values[earlier])[chosen] / apart[chosen]) if chosen.any() else np.zeros(1)


def _drift(values: Array, days: Array, correlation: float, p_value: float) -> Drift:
    """Theil and Sen's slope; its interval by Kendall's variance, widened for dependence (Hamed and Rao 1998)."""
    slopes = _slopes(values, days)
    n = len(values)
    lags = np.arange(1, n)
    ranks = 6 / np.pi * np.arcsin(correlation**lags / 2)
    widened = 1 + 2 / (n * (n - 1) * (n - 2)) * ((n - lags) * (n - lags - 1) * (n - lags - 2) * ranks).sum()
    reach = 1.96 * np.sqrt(n * (n - 1) * (2 * n + 5) / 18 * widened)
    low = int(np.clip(np.floor((len(slopes) - reach) / 2), 0, len(slopes) - 1))
    high = int(np.clip(np.ceil((len(slopes) + reach) / 2), 0, len(slopes) - 1))
    per_day, least, most = (float(np.expm1(slope)) for slope in (np.median(slopes), slopes[low], slopes[high]))
    return Drift(per_day, least, most, float(p_value))


# --- further steps ---------------------------------------------------------------------------------


def _with_further_steps(
    finding: Finding, values: Array, design: Design, draws: int, random: np.random.Generator
) -> Finding:
    """Look for more steps of one series before and after each that was found (binary segmentation)."""
    known = list(finding.steps)
    pending = list(pairwise([0, known[0].at, len(values)]))
    while pending:
        first, end = pending.pop()
        step = _further(values[first:end], design.piece(first, end), finding.correlation, draws, random)
        if step is not None:
            step = replace(step, at=step.at + first)
            known.append(step)
            pending += [(first, step.at), (step.at, end)]
    known.sort(key=lambda step: step.at)
    return Finding(_measured_anew(values, known, design, finding.correlation), None, finding.correlation)


def _further(
    values: Array, design: Design | None, correlation: float, draws: int, random: np.random.Generator
) -> Step | None:
    """The step within one piece of a series, if there is a certain one."""
    if design is None or len(values) < LEAST_RUNS:
        return None
    piece = design.clean(values[None])
    own = np.array([correlation])
    model = Model(own, _innovations(design.without_step(piece), own, design), Prior())
    redrawn = _largest(_redrawn(model, design, draws, random), design, model.prior)[:, 0]
    p_value = (1 + int((redrawn >= _largest(piece, design, model.prior)).sum())) / (1 + draws)
    if p_value > FURTHER_RATE:
        return None
    at, size = design.best(piece)
    return _step(piece[0], int(at[0]), float(size[0]), design, correlation, p_value)


def _measured_anew(values: Array, steps: Sequence[Step], design: Design, correlation: float) -> tuple[Step, ...]:
    """Each step between its neighbours alone, which change its levels."""
    if len(steps) == 1:
        return tuple(steps)
    edges = [0, *(step.at for step in steps), len(values)]
    found = []
    for number, step in enumerate(steps):
        first, end = edges[number], edges[number + 2]
        own = design.piece(first, end)
        places = np.flatnonzero(own.places == step.at - first) if own is not None else np.zeros(0, np.int64)
        if own is None or not len(places):  # too near its neighbours, or the clock moved with it: it stands as found
            found.append(step)
            continue
        piece, at = own.clean(values[first:end]), int(places[0])
        made = _step(piece, at, float(piece @ own.steps[:, at]), own, correlation, step.p_value)
        found.append(replace(made, at=step.at))
    return tuple(found)
