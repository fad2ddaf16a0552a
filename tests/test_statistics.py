"""Intervals: Student's t against tables, coverage on noise of every kind, runs pooled, tests corrected."""

from __future__ import annotations

import numpy as np
import pytest

from nanalyze.analysis import statistics
from nanalyze.analysis.settings import STUDENT_T
from nanalyze.analysis.statistics import Array, Means

TRIALS = 2_000
# 2,000 trials of a true 95 % give 94.0 to 96.0 with 95 % probability; the bounds below leave 3 standard errors.


def ar1(random: np.random.Generator, trials: int, n: int, correlation: float) -> Array:
    """Around 100, spread 1."""
    noise = random.standard_normal((trials, n + 200))
    values = np.empty_like(noise)
    values[:, 0] = noise[:, 0]
    for i in range(1, n + 200):
        values[:, i] = correlation * values[:, i - 1] + noise[:, i] * np.sqrt(1 - correlation**2)
    return np.asarray(100 + values[:, 200:], dtype=np.float64)


def spiked(random: np.random.Generator, trials: int, n: int, share: float, factor: float) -> Array:
    """Around 100, spread 1; a share of the values is `factor` times as large. Without spikes the mean is 100."""
    values = 100 + random.standard_normal((trials, n))
    return np.where(random.random((trials, n)) < share, factor * values, values)


def clocked(random: np.random.Generator, trials: int, n: int, dwell: float) -> Array:
    """Two clock states, 100 and 105, each kept for `dwell` repetitions on average: the mean is 102.5."""
    state = random.random(trials) < 0.5
    states = np.empty((trials, n), dtype=bool)
    for i in range(n):
        states[:, i] = state
        state = np.where(random.random(trials) < 1 / dwell, ~state, state)
    return np.where(states, 105.0, 100.0) + 0.5 * random.standard_normal((trials, n))


def coverage(values: Array, truth: float) -> float:
    low, high = statistics.means(values).interval()
    return float(100 * ((low <= truth) & (truth <= high)).mean())


# --- coverage ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "correlation", "least"),
    [
        (30, 0.0, 94.0),
        (100, 0.0, 94.0),
        (30, 0.3, 93.0),
        (30, 0.6, 92.5),
        (100, 0.6, 93.5),
        (100, 0.9, 92.5),
        (400, 0.9, 93.0),
    ],
)
def test_intervals_hold_the_truth_under_autocorrelation(n: int, correlation: float, least: float) -> None:
    found = coverage(ar1(np.random.default_rng(n), TRIALS, n, correlation), 100)
    assert least <= found <= 97.5


@pytest.mark.parametrize(("share", "factor"), [(0.05, 3.0), (0.02, 10.0), (0.1, 1.5)])
@pytest.mark.parametrize("n", [30, 100])
def test_intervals_hold_the_truth_beside_spikes(n: int, share: float, factor: float) -> None:
    assert 93.5 <= coverage(spiked(np.random.default_rng(n), TRIALS, n, share, factor), 100) <= 97.0


@pytest.mark.parametrize(("n", "dwell", "least"), [(60, 5, 92.0), (100, 5, 93.0), (400, 5, 93.5), (400, 20, 91.5)])
def test_intervals_hold_the_mean_of_two_clock_states(n: int, dwell: float, least: float) -> None:
    assert least <= coverage(clocked(np.random.default_rng(n), TRIALS, n, dwell), 102.5) <= 97.5


def test_an_interval_that_ignores_autocorrelation_would_fail_these_tests() -> None:
    values = ar1(np.random.default_rng(1), TRIALS, 100, 0.6)
    half = 1.984 * values.std(axis=1, ddof=1) / 10
    assert (np.abs(values.mean(axis=1) - 100) <= half).mean() < 0.75


def test_independent_repetitions_cost_little_width() -> None:
    values = ar1(np.random.default_rng(2), TRIALS, 30, 0.0)
    low, high = statistics.means(values).interval()
    usual = 2 * 2.045 * values.std(axis=1, ddof=1) / np.sqrt(30)
    assert np.median((high - low) / usual) == pytest.approx(1.0, abs=0.12)


@pytest.mark.parametrize(("n", "most"), [(4, 9.0), (6, 9.0), (10, 7.0), (20, 3.0)])
def test_few_independent_repetitions_seldom_give_huge_intervals(n: int, most: float) -> None:
    """In standard deviations of a repetition; with a memory as long as the record it was up to 90 at n = 6."""
    values = ar1(np.random.default_rng(n), TRIALS, n, 0.0)
    low, high = statistics.means(values).interval()
    assert 94.0 <= coverage(values, 100) <= 97.5
    assert np.quantile((high - low) / 2, 0.99) < most


def test_the_ratio_of_two_means_is_covered() -> None:
    random = np.random.default_rng(3)
    a, b = (statistics.means(factor * ar1(random, TRIALS, 30, 0.3)) for factor in (1.0, 1.03))
    found = statistics.change(a, b)
    assert 93.0 <= 100 * ((found.low <= 1.03) & (found.high >= 1.03)).mean() <= 97.5
    assert 93.0 <= 100 * ((found.difference_low <= 3) & (found.difference_high >= 3)).mean() <= 97.5


# --- spikes ------------------------------------------------------------------------------------


def test_a_spike_is_left_out_and_counted() -> None:
    values = np.array([[100.0, 101, 99, 100, 102, 98, 100, 101, 99, 400]])
    found = statistics.means(values)
    assert found.value[0] == pytest.approx(100.0)
    assert (found.kept[0], found.spikes[0]) == (9, 1)


def test_clock_states_are_no_spikes() -> None:
    values = np.array([[100.0] * 27 + [115.0] * 3])  # 15 % slower in one of ten
    assert statistics.means(values).value[0] == pytest.approx(101.5)
    assert not statistics.spikes(values).any()


def test_few_repetitions_have_no_spikes() -> None:
    assert not statistics.spikes(np.array([1.0, 1, 1, 1, 1, 1, 90])).any()
    assert statistics.spikes(np.array([1.0, 1, 1, 1, 1, 1, 1, 90])).tolist() == [False] * 7 + [True]


def test_what_is_left_out_may_be_given() -> None:
    values = np.array([[1.0, 2.0, 3.0, 50.0]])
    assert statistics.means(values, np.array([[True, False, False, True]])).value[0] == 2.5


def test_rows_with_different_numbers_of_spikes_keep_their_places() -> None:
    plain = np.array([10.0, 11, 9, 10, 10, 11, 9, 10, 10, 10])
    values = np.stack([plain, np.where(np.arange(10) == 3, 90, plain), 5 * plain])
    found = statistics.means(values)
    assert found.spikes.tolist() == [0, 1, 0]
    assert found.value == pytest.approx([10.0, 10.0, 50.0])


# --- small and odd samples ---------------------------------------------------------------------


def test_one_repetition_has_a_mean_and_no_interval() -> None:
    found = statistics.means(np.array([[7.0]]))
    low, high = found.interval()
    assert found.value[0] == 7.0
    assert np.isnan([found.variance[0], low[0], high[0]]).all()


def test_two_repetitions_have_student_s_interval_of_one_degree() -> None:
    found = statistics.means(np.array([[9.0, 11.0]]))
    assert found.degrees[0] == 1
    assert found.interval()[1][0] > 10 + 12.7  # at least that of independent values


def test_constant_values_have_an_interval_of_no_width() -> None:
    found = statistics.means(np.full((1, 30), 5.0))
    assert [float(end[0]) for end in found.interval()] == [5.0, 5.0]


def test_a_mean_over_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        statistics.means(np.array([[1.0, np.nan]]))
    assert np.isnan(statistics.means(np.empty((1, 0))).value[0])


# --- runs --------------------------------------------------------------------------------------


def of(value: float, variance: float, degrees: float) -> Means:
    count = np.array([30])
    return Means(np.array([value]), np.array([variance]), np.array([float(degrees)]), count, np.array([1]))


def test_runs_that_agree_share_their_own_variance() -> None:
    found = statistics.pool([of(10.0, 4.0, 8), of(10.0, 4.0, 8)])
    assert (found.value[0], found.variance[0], found.degrees[0]) == (10.0, 2.0, 16.0)
    assert (found.kept[0], found.spikes[0]) == (60, 2)


def test_runs_that_differ_by_more_than_they_show_have_the_variance_of_their_means() -> None:
    found = statistics.pool([of(10.0, 0.01, 8), of(14.0, 0.01, 8), of(12.0, 0.01, 8)])
    assert (found.value[0], found.degrees[0]) == (12.0, 2.0)
    assert found.variance[0] == pytest.approx(4.0 / 3)


def test_runs_of_different_speed_are_covered() -> None:
    random = np.random.default_rng(4)
    runs = [statistics.means(ar1(random, TRIALS, 30, 0.0) + 3 * random.standard_normal((TRIALS, 1))) for _ in range(4)]
    low, high = statistics.pool(runs).interval()
    assert 93.5 <= 100 * ((low <= 100) & (high >= 100)).mean() <= 97.5


# --- change ------------------------------------------------------------------------------------


def test_a_change_is_worked_out_by_hand() -> None:
    a, b = of(100.0, 1.0, 10), of(110.0, 1.21, 10)
    found = statistics.change(a, b)
    spread = np.sqrt(2) * 0.01  # of the logarithm; both sides have 1 %, so Welch's degrees are 20
    assert found.ratio[0] == pytest.approx(1.1)
    assert found.high[0] == pytest.approx(1.1 * np.exp(2.086 * spread), rel=1e-4)
    assert found.low[0] == pytest.approx(1.1 * np.exp(-2.086 * spread), rel=1e-4)
    assert found.difference[0] == pytest.approx(10.0)
    assert found.p_value[0] < 1e-5


def test_a_change_from_nothing_has_a_difference_and_no_ratio() -> None:
    found = statistics.change(of(0.0, 0.0, 10), of(4.0, 1.0, 10))
    assert np.isnan([found.ratio[0], found.p_value[0]]).all()
    assert found.difference_low[0] == pytest.approx(4 - 2.228, abs=1e-3)


@pytest.mark.parametrize(("b", "p"), [(5.0, 1.0), (6.0, 0.0)])
def test_counts_without_spread_are_the_same_or_not(b: float, p: float) -> None:
    found = statistics.change(of(5.0, 0.0, 10), of(b, 0.0, 10))
    assert found.p_value[0] == p
    assert found.low[0] == found.high[0] == b / 5


def test_p_values_of_no_change_are_uniform_or_larger() -> None:
    random = np.random.default_rng(5)
    found = statistics.change(*(statistics.means(ar1(random, TRIALS, 30, 0.0)) for _ in range(2)))
    assert 0.025 <= (found.p_value < 0.05).mean() <= 0.055
    assert 0.42 <= (found.p_value < 0.5).mean() <= 0.52


# --- many tests --------------------------------------------------------------------------------


def test_benjamini_hochberg_on_their_own_example() -> None:
    # Benjamini and Hochberg (1995), section 3.1: at 5 % the first four of fifteen are rejected.
    p = [
        0.0001,
        0.0004,
        0.0019,
        0.0095,
        0.0201,
        0.0278,
        0.0298,
        0.0344,
        0.0459,
        0.3240,
        0.4262,
        0.5719,
        0.6528,
        0.7590,
        1,
    ]
    adjusted = statistics.benjamini_hochberg(np.array(p))
    assert (adjusted <= 0.05).tolist() == [True] * 4 + [False] * 11
    assert adjusted[0] == pytest.approx(0.0015)
    assert adjusted[6] == pytest.approx(0.0298 * 15 / 7)


def test_what_was_not_tested_does_not_count() -> None:
    adjusted = statistics.benjamini_hochberg(np.array([0.04, np.nan, 0.01]))
    assert adjusted[[0, 2]] == pytest.approx([0.04, 0.02])
    assert np.isnan(adjusted[1])


# --- Student's t -------------------------------------------------------------------------------


def test_quantiles_are_those_of_the_table() -> None:
    assert statistics.t_quantile(0.95, np.arange(1.0, 31.0)) == pytest.approx(np.array(STUDENT_T), abs=6e-4)
    assert statistics.t_quantile(0.99, np.array([2.0, 1e9])) == pytest.approx([9.9248, 2.5758], abs=1e-4)
    assert statistics.t_quantile(0.999, np.array([1.0]))[0] == pytest.approx(636.62, abs=0.02)


def test_quantiles_and_tails_are_inverse_to_each_other() -> None:
    degrees = np.array([1.0, 2.5, 7.0, 40.0, 1e4])
    for confidence in (0.5, 0.95, 0.9995):
        tails = statistics.t_tail(statistics.t_quantile(confidence, degrees), degrees)
        assert tails == pytest.approx(np.full(5, 1 - confidence), rel=1e-5)


def test_no_degrees_of_freedom_have_no_quantile() -> None:
    assert np.isnan(statistics.t_quantile(0.95, np.array([0.0]))[0])
    assert np.isnan(statistics.t_tail(np.array([1.0]), np.array([0.0]))[0])
