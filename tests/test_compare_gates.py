"""Gates: what can be written, when one fails, and how often it does by chance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from variants import EAGER, opened, sample_of

from nanalyze.analysis import compare
from nanalyze.analysis.compare import gates
from nanalyze.analysis.compare.gates import FAILED, PASSED, UNDECIDED, UNMEASURED, Outcome, parse
from nanalyze.analysis.compare.sample import CompareError
from nanalyze.analysis.statistics import Array

TRIALS = 100


def judged(a: Array, b: Array, *texts: str, **columns: object) -> list[Outcome]:
    return list(compare.samples([sample_of(a, **columns)], [sample_of(b, **columns)], gates=texts).outcomes)


def statuses(a: Array, b: Array, *texts: str, **columns: object) -> list[str]:
    return [outcome.status for outcome in judged(a, b, *texts, **columns)]


def around(value: float, noise: float = 0.005, n: int = 30, seed: int = 0) -> Array:
    """`n` values whose mean is exactly `value`."""
    random = np.random.default_rng(seed).standard_normal(n)
    return np.asarray(value * (1 + noise * (random - random.mean())), dtype=np.float64)


# --- writing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "metric", "operator", "threshold", "kind"),
    [
        ("total_ns>+3%", "total_ns", ">", 0.03, "relative"),
        ("total_ns > 3 %", "total_ns", ">", 0.03, "relative"),
        ("step_ns<-1.5%", "step_ns", "<", -0.015, "relative"),
        ("gap_ns>+10us", "gap_ns", ">", 10_000, "difference"),
        ("step_ns>1.2ms", "step_ns", ">", 1.2e6, "value"),
        ("launches>+0", "launches", ">", 0, "difference"),
        ("launches>120", "launches", ">", 120, "value"),
        ("dram_bytes>+1e2MB", "dram_bytes", ">", 1e8, "difference"),
        ("l2_bytes>.5GB", "l2_bytes", ">", 5e8, "value"),
        ("kernel:gemm.mean_ns>+3%", "mean_ns", ">", 0.03, "relative"),
        ("each:.*.dram_bytes>+1%", "dram_bytes", ">", 0.01, "relative"),
        ("kernel:f<int>.*.total_ns>100us", "total_ns", ">", 100_000, "value"),
    ],
)
def test_a_gate_is_read(text: str, metric: str, operator: str, threshold: float, kind: str) -> None:
    gate = parse(text)
    assert (gate.metric, gate.operator, gate.kind) == (metric, operator, kind)
    assert gate.threshold == pytest.approx(threshold)
    assert gate.per_kernel == text.startswith("each:")
    assert (gate.pattern is not None) == (":" in text)


def test_a_pattern_may_hold_every_sign_of_the_grammar() -> None:
    pattern = parse("kernel:norm<float, (4|8)>.+>$.mean_ns>+3%").pattern
    assert pattern is not None
    assert pattern.pattern == "norm<float, (4|8)>.+>$"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is no gate"),
        ("total_ns", "is no gate"),
        ("total_ns=3%", "is no gate"),
        ("time>+3%", "no metric time. There are step_ns"),
        ("total_ns>fast", "fast is no threshold"),
        ("total_ns>+3", "no unit left out. Write % or ns"),
        ("total_ns>3MB", "no unit MB"),
        ("launches>3us", "no unit us. Write % or a bare number"),
        ("kernel:gemm>+3%", "ends in no field of a kernel"),
        ("kernel:gemm.speed>+3%", "ends in no field of a kernel"),
        ("kernel:.mean_ns>3us", "ends in no field of a kernel"),
        ("kernel:(.mean_ns>+3%", "is no regular expression"),
        ("total_ns>__import__('os')", "is no threshold"),
        ("total_ns>+1e999%", "no unit e999%"),
        ("total_ns>nan%", "is no threshold"),
    ],
)
def test_what_is_no_gate_is_refused_with_what_would_be_right(text: str, says: str) -> None:
    with pytest.raises(CompareError) as caught:
        parse(text)
    assert says in str(caught.value)


# --- judging -----------------------------------------------------------------------------------


def test_a_gate_fails_where_the_whole_interval_lies_beyond_the_threshold() -> None:
    a, b = around(100_000), around(103_000, seed=1)
    assert statuses(a, b, "total_ns>+2%") == [FAILED]
    assert statuses(a, b, "total_ns>+3%") == [UNDECIDED]
    assert statuses(a, b, "total_ns>+4%") == [PASSED]


def test_a_gate_on_the_other_side() -> None:
    a, b = around(100_000), around(97_000, seed=1)
    assert statuses(a, b, "total_ns<-2%", "total_ns<-4%") == [FAILED, PASSED]


def test_differences_and_values_have_units() -> None:
    a, b = around(100_000), around(110_000, seed=1)
    texts = ("total_ns>+8us", "total_ns>+12us", "total_ns>108us", "total_ns>112us", "step_ns>111us", "step_ns>113us")
    assert statuses(a, b, *texts) == [FAILED, PASSED, FAILED, PASSED, FAILED, PASSED]


def test_counts_have_no_spread() -> None:
    a, b = around(100_000), around(100_000)
    assert statuses(a, b, "launches>+0", "launches>0", "launches>1%") == [PASSED, FAILED, PASSED]


def test_a_change_from_nothing_to_nothing_is_none() -> None:
    a = replace(sample_of(around(100_000)), totals={**sample_of(around(100_000)).totals, "gap_ns": np.zeros(30)})
    assert compare.samples([a], [a], gates=["gap_ns>+3%"]).outcomes[0].status == PASSED


def test_what_was_not_measured_is_undecided() -> None:
    outcome = judged(around(100_000), around(100_000), "dram_bytes>+1%")[0]
    assert (outcome.status, outcome.reason) == (UNMEASURED, "not measured on both sides")


def test_bytes_of_one_counted_launch_have_no_interval() -> None:
    a = around(100_000)
    assert statuses(a, a, "dram_bytes>+1%", dram_bytes=1e6) == [UNMEASURED]
    counted = {"dram_bytes": 1e6, "dram_bytes_error": 1e3}
    assert statuses(a, a, "dram_bytes>+1%", "kernel:gemm.dram_bytes>+1%", **counted) == [PASSED, PASSED]


def test_single_repetitions_are_undecided() -> None:
    assert statuses(around(1e5, n=1), around(2e5, n=1), "total_ns>+3%") == [UNMEASURED]


def test_a_kernel_s_gate_is_about_all_that_match_together(tmp_path: Path) -> None:
    runs = [opened(tmp_path / n, [v]) for n, v in (("a", EAGER), ("b", EAGER.slower(0.05)))]
    texts = [
        "kernel:bias|gelu.mean_ns>79us",
        "kernel:bias|gelu.mean_ns>+3%",
        "kernel:bias|gelu.total_ns>+9us",
        "kernel:nothing.mean_ns>+3%",
    ]
    outcomes = compare.runs(runs[:1], runs[1:], gates=texts).outcomes
    assert [o.status for o in outcomes] == [FAILED, FAILED, PASSED, UNMEASURED]
    assert outcomes[0].value == pytest.approx(84_000, rel=0.005)  # (105 + 63) / 2 us
    assert outcomes[1].value == pytest.approx(0.05, abs=0.004)
    assert outcomes[2].value == pytest.approx(8_000, rel=0.1)
    assert outcomes[0].subject == "2 kernels"
    assert outcomes[3].subject == "no kernel matches nothing"


def test_each_kernel_is_judged_for_itself(tmp_path: Path) -> None:
    slower = replace(EAGER, kernels=(*EAGER.kernels[:2], replace(EAGER.kernels[2], duration_ns=44_000)))
    runs = [opened(tmp_path / n, [v]) for n, v in (("a", EAGER), ("b", slower))]
    outcomes = compare.runs(runs[:1], runs[1:], gates=["each:.*.mean_ns>+3%"]).outcomes
    assert {o.subject: o.status for o in outcomes} == {"bias": PASSED, "gelu": PASSED, "norm<float>": FAILED}


def test_many_gates_have_wider_intervals() -> None:
    a, b = around(100_000), around(103_000, seed=1)
    one = judged(a, b, "total_ns>+2%")[0]
    ten = judged(a, b, *["total_ns>+2%"] * 10)[0]
    assert one.low is not None
    assert one.high is not None
    assert ten.low is not None
    assert ten.high is not None
    assert (ten.high - ten.low) / (one.high - one.low) == pytest.approx(3.4 / 2.08, rel=0.1)


# --- by chance ---------------------------------------------------------------------------------

Noise = Callable[[np.random.Generator, int], Array]


def plain(random: np.random.Generator, n: int) -> Array:
    """1 % of noise a launch."""
    return np.asarray(1 + 0.01 * random.standard_normal(n), dtype=np.float64)


def dependent(random: np.random.Generator, n: int) -> Array:
    """0.7 % of noise, neighbours correlated by 0.5."""
    values = np.zeros(n)
    for i in range(n):
        values[i] = 0.5 * values[i - 1] + 0.006 * random.standard_normal()
    return np.asarray(1 + values, dtype=np.float64)


def spiky(random: np.random.Generator, n: int) -> Array:
    """1 % of noise, and one launch in thirty takes three times as long."""
    return plain(random, n) * np.where(random.random(n) < 1 / 30, 3.0, 1.0)


def trial(noise: Noise, seed: int, slower: float, *texts: str) -> bool:
    """Whether a comparison of 30 repetitions a side of a 100 us kernel fails."""
    random = np.random.default_rng(seed)
    a, b = 100_000 * noise(random, 30), 100_000 * (1 + slower) * noise(random, 30)
    return FAILED in statuses(np.round(a), np.round(b), *texts)


@pytest.mark.parametrize("noise", [plain, dependent, spiky])
def test_identical_variants_pass_in_95_of_100_trials(noise: Noise) -> None:
    texts = ("total_ns>+0%", "total_ns<-0%", "kernel:gemm.mean_ns>+0%", "step_ns>+1%")
    assert sum(trial(noise, seed, 0.0, *texts) for seed in range(TRIALS)) <= 5


@pytest.mark.parametrize("noise", [plain, dependent, spiky])
def test_3_percent_of_100_us_are_found_in_90_of_100_trials(noise: Noise) -> None:
    assert sum(trial(noise, seed, 0.03, "kernel:gemm.mean_ns>+1%") for seed in range(TRIALS)) >= 90
    assert sum(trial(noise, seed, 0.03, "total_ns>+0%") for seed in range(TRIALS)) >= 90


def test_gates_share_the_error_rate() -> None:
    assert gates.ERROR_RATE == 0.05
    fails = sum(trial(plain, seed, 0.0, *["total_ns>+0%", "total_ns<-0%"] * 5) for seed in range(TRIALS))
    assert fails <= 5
