"""Change points and drift: the rate of false alarms, the power, and what a finding says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nanalyze.analysis.trend import changes
from nanalyze.analysis.trend.changes import Design, common_factor, find, find_apart

RUNS = 20
DAYS = np.arange(RUNS, dtype=float)
JOBS, FEWER = 100, 40
DRAWS = 299
Make = Callable[[np.random.Generator], Any]


def autocorrelated(random: np.random.Generator, rows: int, correlation: float) -> Any:
    """AR(1) with a standard deviation of 1 %."""
    noise = random.standard_normal((rows, RUNS))
    noise[:, 1:] *= np.sqrt(1 - correlation**2)
    for run in range(1, RUNS):
        noise[:, run] += correlation * noise[:, run - 1]
    return 0.01 * noise


def clock_states(random: np.random.Generator, stay: float) -> Any:
    """0 or 1: which of two clocks each run had."""
    states = [random.integers(2)]
    for _ in range(RUNS - 1):
        states.append(states[-1] if random.random() < stay else random.integers(2))
    return np.array(states, float)


def with_clocks(random: np.random.Generator, rows: int, correlation: float, stay: float) -> tuple[Any, Any]:
    """Kernels that follow a clock of 6 % less to a different extent each; and the clock as it is read."""
    states = clock_states(random, stay)
    series = autocorrelated(random, rows, correlation) + 0.06 * random.random((rows, 1)) * states
    return series, -0.06 * states + 0.001 * random.standard_normal(RUNS)


# --- false alarms and power ------------------------------------------------------------------------

NOTHING_CHANGES: dict[str, Make] = {
    "independent": lambda random: (autocorrelated(random, 40, 0.0), None),
    "autocorrelated 0.3": lambda random: (autocorrelated(random, 40, 0.3), None),
    "autocorrelated 0.5": lambda random: (autocorrelated(random, 40, 0.5), None),
    "all kernels alike": lambda random: (
        0.7 * autocorrelated(random, 1, 0.4) + 0.7 * autocorrelated(random, 40, 0.4),
        None,
    ),
    "a clock a run, not read": lambda random: (with_clocks(random, 40, 0.3, 0.0)[0], None),
    "clocks that last, read": lambda random: with_clocks(random, 40, 0.5, 0.6),
    "one series": lambda random: (autocorrelated(random, 1, 0.3), None),
}


@pytest.mark.parametrize("name", NOTHING_CHANGES)
def test_at_most_one_job_of_twenty_where_nothing_changes_shows_anything(name: str) -> None:
    alarms = 0
    for seed in range(JOBS):
        series, clocks = NOTHING_CHANGES[name](np.random.default_rng(seed))
        found = find(series, DAYS, clocks, draws=DRAWS)
        alarms += any(finding.steps or finding.drift for finding in found)
    assert alarms <= 0.05 * JOBS


NOT_READ: dict[str, Make] = {
    "independent": lambda random: autocorrelated(random, 40, 0.0),
    "all kernels alike": lambda random: 0.7 * autocorrelated(random, 1, 0.4) + 0.7 * autocorrelated(random, 40, 0.4),
    "a clock a run": lambda random: with_clocks(random, 40, 0.3, 0.0)[0],
    "clocks that last": lambda random: with_clocks(random, 40, 0.3, 0.8)[0],
}


@pytest.mark.parametrize("name", NOT_READ)
def test_nor_where_the_clock_was_not_read(name: str) -> None:
    alarms = 0
    for seed in range(FEWER):
        found, _ = find_apart(NOT_READ[name](np.random.default_rng(seed)), DAYS, draws=DRAWS)
        alarms += any(finding.steps or finding.drift for finding in found)
    assert alarms <= 0.05 * FEWER


@pytest.mark.parametrize(("stay", "share"), [(None, 0.9), (0.0, 0.9), (0.8, 0.75)])
def test_a_shift_is_found_though_the_clock_was_not_read(stay: float | None, share: float) -> None:
    """One kernel of 40 takes 3 % longer: without any clock effect, at a clock that changes, at one that lasts."""
    found = others = 0
    for seed in range(FEWER):
        random = np.random.default_rng(1_000 + seed)
        series = autocorrelated(random, 40, 0.0) if stay is None else with_clocks(random, 40, 0.0, stay)[0]
        series[0, 10:] += np.log(1.03)
        own, *rest = find_apart(series, DAYS, draws=DRAWS)[0]
        found += bool(own.steps)
        others += any(finding.steps or finding.drift for finding in rest)
    assert found >= share * FEWER
    assert others <= 0.05 * FEWER


def test_what_all_kernels_do_is_undetermined() -> None:
    """All get slower by 5 %, one by 15: of that one alone it is certain that something happened to it."""
    series = autocorrelated(np.random.default_rng(5), 20, 0.0)
    series[:, 10:] += np.log(1.05)
    series[3, 14:] += np.log(1.10)
    found, with_all = find_apart(series, DAYS, draws=DRAWS)
    assert [row for row in range(20) if found[row].steps] == [3]
    assert found[3].steps[0].at == 14
    assert found[3].steps[0].change == pytest.approx(0.10, abs=0.03)
    assert with_all == [row != 3 for row in range(20)]


def test_a_movement_of_all_is_looked_for_in_8_series_or_more() -> None:
    series = autocorrelated(np.random.default_rng(5), 8, 0.0)
    series[:, 10:] += np.log(1.05)
    factor = common_factor(series, DAYS)
    assert factor is not None
    assert abs(np.corrcoef(factor, DAYS >= 10)[0, 1]) > 0.95
    assert common_factor(series[:7], DAYS) is None
    assert [bool(finding.steps) for finding in find_apart(series[:7], DAYS, draws=DRAWS)[0]] == [True] * 7
    assert common_factor(autocorrelated(np.random.default_rng(6), 20, 0.3), DAYS) is None


@pytest.mark.parametrize("is_clocked", [False, True])
def test_a_shift_of_3_percent_among_noise_of_1_percent_is_found(is_clocked: bool) -> None:
    """Ten runs before it and ten after, in one of 40 kernels."""
    found = others = 0
    for seed in range(JOBS):
        random = np.random.default_rng(1_000 + seed)
        series, clocks = with_clocks(random, 40, 0.0, 0.0) if is_clocked else (autocorrelated(random, 40, 0.0), None)
        series[0, 10:] += np.log(1.03)
        own, *rest = find(series, DAYS, clocks, draws=DRAWS)
        found += any(abs(step.at - 10) <= 1 for step in own.steps)
        others += any(finding.steps or finding.drift for finding in rest)
    assert found >= 0.9 * JOBS
    assert others <= 0.05 * JOBS


def test_a_drift_is_told_from_a_step() -> None:
    drifts = 0
    for seed in range(JOBS // 2):
        series = autocorrelated(np.random.default_rng(seed), 40, 0.0)
        series[0] += np.log1p(0.004) * DAYS
        drifts += find(series, DAYS, draws=DRAWS)[0].drift is not None
    assert drifts >= 0.9 * JOBS // 2


# --- what a finding says ---------------------------------------------------------------------------


def test_the_size_of_a_step_and_its_interval() -> None:
    covered = 0
    for seed in range(JOBS):
        series = autocorrelated(np.random.default_rng(seed), 10, 0.3)
        series[0, 8:] += np.log(1.1)
        (step,) = find(series, DAYS, draws=99)[0].steps
        assert step.at == 8
        assert step.change == pytest.approx(0.1, abs=0.05)
        covered += step.low <= 0.1 <= step.high
    assert covered >= 0.92 * JOBS


def test_the_slope_of_a_drift_and_its_interval() -> None:
    days = np.cumsum(np.random.default_rng(1).uniform(0.2, 3, RUNS))
    covered = 0
    for seed in range(40):
        series = autocorrelated(np.random.default_rng(seed), 10, 0.0)
        series[0] += np.log1p(0.004) * days
        drift = find(series, days, draws=199)[0].drift
        assert drift is not None
        covered += drift.low <= 0.004 <= drift.high
    assert covered >= 0.92 * 40


def test_several_steps_of_one_series_are_found() -> None:
    series = autocorrelated(np.random.default_rng(2), 5, 0.0)
    long = np.concatenate([series, series[:, ::-1] * 0.9], axis=1)
    long[3, 10:22] += 0.10
    long[3, 22:] += 0.25
    steps = find(long, np.arange(40.0))[3].steps
    assert [step.at for step in steps] == [10, 22]
    assert steps[0].change == pytest.approx(np.expm1(0.10), abs=0.02)
    assert steps[1].change == pytest.approx(np.expm1(0.15), abs=0.02)


def test_one_odd_run_is_no_change() -> None:
    series = autocorrelated(np.random.default_rng(3), 10, 0.0)
    series[0, 12] += 1.0
    series[1, -1] += 1.0
    assert all(not finding.steps and finding.drift is None for finding in find(series, DAYS))


def test_a_change_that_follows_the_clock_is_none() -> None:
    series = autocorrelated(np.random.default_rng(4), 10, 0.0)
    states = np.array([0] * 8 + [1] * 11 + [0])
    series += 0.08 * states
    assert all([step.at for step in finding.steps] == [8] for finding in find(series, DAYS))
    assert not any(finding.steps for finding in find(series, DAYS, -0.08 * states))
    # A step that the clock made by itself cannot be told from it: no place is left that it could hide.
    alone = Design(DAYS, np.array([0.0] * 10 + [-0.08] * 10))
    assert 10 not in alone.places
    assert {6, 15} <= set(alone.places.tolist())


def test_families_share_the_error_rate() -> None:
    series = autocorrelated(np.random.default_rng(5), 10, 0.0)
    series[0, 10:] += 0.05
    (one,) = find(series, DAYS)[0].steps
    (of_three,) = find(series, DAYS, families=3)[0].steps
    assert of_three.p_value == pytest.approx(3 * one.p_value)


def test_few_runs_are_not_judged() -> None:
    series = np.array([[0.0, 0.0, 0.0, 0.0, 9.0, 9.0, 9.0]])
    assert find(series, DAYS[:7]) == [changes.Finding()]
    assert find(np.empty((0, 20)), DAYS) == []


@pytest.mark.parametrize("rows", [1, 12])
def test_series_without_any_noise(rows: int) -> None:
    assert all(not finding.steps for finding in find(np.zeros((rows, RUNS)), DAYS))
    (same,) = {finding.drift for finding in find(np.ones((rows, RUNS)), np.zeros(RUNS))}
    assert same is None


def test_the_same_input_gives_the_same_findings() -> None:
    series = autocorrelated(np.random.default_rng(6), 10, 0.3)
    series[2, 9:] += 0.04
    assert find(series, DAYS) == find(series.copy(), DAYS)


def test_gamma_functions() -> None:
    # From tables: digamma(1) is minus Euler's constant, trigamma(1) is pi squared over 6.
    assert changes._digamma(1.0) == pytest.approx(-0.5772156649, abs=1e-8)
    assert changes._trigamma(1.0) == pytest.approx(np.pi**2 / 6, abs=1e-8)
    assert changes._trigamma(0.5) == pytest.approx(np.pi**2 / 2, abs=1e-8)
