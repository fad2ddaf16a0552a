"""Coverage of the intervals and power of the gates, on simulated repetitions with known means.

    python benchmarks/compare.py [--trials 20000] [--seed 0] [--quick]

Prints two tables in Markdown. Coverage: how many of 95 % intervals hold the true mean, and their median width
over that of an interval for independent values, for `analysis/statistics.py` and beside it Student's interval
for independent values and a studentised moving-block bootstrap with a block length from the first
autocorrelation. Power: how often a gate fails in a comparison of 30 repetitions a side, by true slow-down.
Numpy only; two minutes on one core, --quick ten seconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from nanalyze.analysis import statistics
from nanalyze.analysis.statistics import Array

Intervals = tuple[Array, Array]
MEAN = 100.0


# --- noise -------------------------------------------------------------------------------------


def independent(random: np.random.Generator, trials: int, n: int) -> Array:
    return MEAN + random.standard_normal((trials, n))


def autoregressive(correlation: float) -> Callable[[np.random.Generator, int, int], Array]:
    def draw(random: np.random.Generator, trials: int, n: int) -> Array:
        noise = random.standard_normal((trials, n + 300))
        values = np.empty_like(noise)
        values[:, 0] = noise[:, 0]
        for i in range(1, n + 300):
            values[:, i] = correlation * values[:, i - 1] + noise[:, i] * np.sqrt(1 - correlation**2)
        return MEAN + values[:, 300:]

    return draw


def spiked(share: float, factor: float) -> Callable[[np.random.Generator, int, int], Array]:
    def draw(random: np.random.Generator, trials: int, n: int) -> Array:
        values = independent(random, trials, n)
        return np.where(random.random((trials, n)) < share, factor * values, values)

    return draw


def clocked(dwell: float, slower: float = 5.0) -> Callable[[np.random.Generator, int, int], Array]:
    """Two clock states `slower` percent apart, each kept for `dwell` repetitions on average."""

    def draw(random: np.random.Generator, trials: int, n: int) -> Array:
        state = random.random(trials) < 0.5
        states = np.empty((trials, n), dtype=bool)
        for i in range(n):
            states[:, i] = state
            state = np.where(random.random(trials) < 1 / dwell, ~state, state)
        centre = MEAN + slower * (states - 0.5)
        return centre + 0.5 * random.standard_normal((trials, n))

    return draw


NOISES: dict[str, Callable[[np.random.Generator, int, int], Array]] = {
    "independent": independent,
    "AR(1), 0.3": autoregressive(0.3),
    "AR(1), 0.6": autoregressive(0.6),
    "AR(1), 0.9": autoregressive(0.9),
    "5 % spikes of 3x": spiked(0.05, 3),
    "2 % spikes of 10x": spiked(0.02, 10),
    "two clocks, dwell 5": clocked(5),
    "two clocks, dwell 10": clocked(10),
    "two clocks, dwell 30": clocked(30),
}


# --- methods -----------------------------------------------------------------------------------


def ours(values: Array, random: np.random.Generator) -> Intervals:
    return statistics.means(values).interval()


def students(values: Array, random: np.random.Generator) -> Intervals:
    """As if repetitions did not depend on each other; spikes as they are."""
    n = values.shape[1]
    half = statistics.t_quantile(0.95, np.array([n - 1.0])) * values.std(axis=1, ddof=1) / np.sqrt(n)
    return values.mean(axis=1) - half, values.mean(axis=1) + half


def bootstrap(values: Array, random: np.random.Generator, resamples: int = 399) -> Intervals:
    """Studentised moving blocks, on values without spikes; at most 1,000 rows, as it is slow."""
    ends = [_bootstrap_one(row[~statistics.spikes(row)], random, resamples) for row in values[:1_000]]
    return np.array([low for low, _ in ends]), np.array([high for _, high in ends])


def _bootstrap_one(row: Array, random: np.random.Generator, resamples: int) -> tuple[float, float]:
    n, centred = len(row), row - row.mean()
    r = float(np.clip((centred[1:] * centred[:-1]).sum() / (centred**2).sum(), 0, 0.97))
    length = int(np.clip(np.ceil((2 * r / (1 - r * r)) ** (2 / 3) * n ** (1 / 3)), 1, n // 4))
    sums = np.cumsum(np.concatenate([[0.0], centred, centred[:length]]))
    blocks = (sums[length : length + n] - sums[:n]) / length
    error = np.sqrt((blocks**2).mean() * length / n * n / (n - length))
    chosen = blocks[random.integers(0, n, (resamples, n // length))]
    spread = chosen.std(axis=1, ddof=1) / np.sqrt(n // length)
    low, high = np.quantile(chosen.mean(axis=1) / np.maximum(spread, 1e-300), [0.025, 0.975])
    return float(row.mean() - high * error), float(row.mean() - low * error)


METHODS = {"here": ours, "block bootstrap": bootstrap, "Student": students}


def coverage_table(trials: int, seed: int, lengths: tuple[int, ...]) -> list[str]:
    lines = [
        f"| repetitions | noise | {' | '.join(METHODS)} |",
        "|---|---|" + "--:|" * len(METHODS),
    ]
    for n in lengths:
        for name, draw in NOISES.items():
            random = np.random.default_rng([seed, n, len(name)])
            values = draw(random, trials, n)
            cells = []
            for method in METHODS.values():
                low, high = method(values, random)
                held = 100 * ((low <= MEAN) & (high >= MEAN)).mean()
                width = np.median(high - low) / (2 * 1.96 / np.sqrt(n))
                cells.append(f"{held:.1f} % ({width:.1f})")
            lines.append(f"| {n} | {name} | {' | '.join(cells)} |")
    return lines


# --- power -------------------------------------------------------------------------------------


def failing(draw: Callable[[np.random.Generator, int, int], Array], slower: float, threshold: float, trials: int,
            random: np.random.Generator, scale: float) -> float:  # fmt: skip
    """Share of comparisons of 30 repetitions a side whose whole interval lies above the threshold, in percent."""
    a, b = (MEAN + scale * (draw(random, trials, 30) - MEAN) for _ in range(2))
    found = statistics.change(statistics.means(a), statistics.means(b * (1 + slower)))
    return float(100 * (found.low - 1 > threshold).mean())


def power_table(trials: int, seed: int) -> list[str]:
    slow = (0.0, 0.01, 0.02, 0.03, 0.05)
    lines = [
        f"| noise of a repetition | gate | {' | '.join(f'{100 * s:.0f} % slower' for s in slow)} |",
        "|---|---|" + "--:|" * len(slow),
    ]
    kinds = (
        ("0.5 %, independent", independent, 0.5),
        ("1 %, independent", independent, 1.0),
        ("2 %, independent", independent, 2.0),
        ("1 %, AR(1) of 0.6", autoregressive(0.6), 1.0),
        ("1 % and 5 % spikes of 3x", spiked(0.05, 3), 1.0),
        ("two clocks 1 % apart, dwell 5", clocked(5, 1.0), 1.0),
    )
    for name, draw, scale in kinds:
        for threshold in (0.0, 0.01):
            random = np.random.default_rng([seed, len(name)])
            cells = [f"{failing(draw, s, threshold, trials, random, scale):.1f} %" for s in slow]
            lines.append(f"| {name} | `>+{100 * threshold:.0f}%` | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="2,000 trials, 30 and 100 repetitions only")
    options = parser.parse_args()
    trials = 2_000 if options.quick else options.trials
    started = time.perf_counter()
    print(f"Coverage of 95 % intervals ({trials:,} trials; bootstrap 1,000); in brackets the width.\n")
    print("\n".join(coverage_table(trials, options.seed, (30, 100) if options.quick else (30, 60, 100, 400))))
    print(f"\nGates that fail, of {trials:,} comparisons of 30 repetitions a side.\n")
    print("\n".join(power_table(trials, options.seed)))
    print(f"\n{time.perf_counter() - started:.0f} s.")


if __name__ == "__main__":
    main()
