"""Comparisons on a real GPU: gates stay silent between identical variants and find 3 % of 100 us.

Each trial has ranges of its own name, 30 repetitions a variant in turn; nothing about the clocks is touched.
"""

from __future__ import annotations

import pytest

import nanalyze.analysis as na
from nanalyze import recorder
from nanalyze.analysis import compare
from nanalyze.analysis.compare import sample

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

TRIALS, REPETITIONS = 20, 30


def elements_of_100_us() -> int:
    """How many floats an addition takes about 100 us for."""
    x = torch.zeros(1 << 26, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(50):
        x.add_(1)
    start.record()
    for _ in range(50):
        x.add_(1)
    end.record()
    torch.cuda.synchronize()
    return int((1 << 26) * 0.1 / (start.elapsed_time(end) / 50))


Samples = dict[str, sample.Sample]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    run_dir = tmp_path_factory.mktemp("gpu") / "run"
    count = elements_of_100_us()
    x = torch.zeros(round(1.03 * count) + 1, device="cuda")
    base, slow = x[:count], x[: round(1.03 * count)]
    with recorder.record(run_dir, layers=("timeline", "ranges", "device_state"), pause_pct=0):
        for _ in range(2_000):  # clocks settle
            base.add_(1)
        torch.cuda.synchronize()
        for trial in range(TRIALS):
            for _ in range(REPETITIONS):
                for name, values in (("base", base), ("same", base), ("slow", slow)):
                    with recorder.annotate(f"{name}{trial}"):
                        values.add_(1)
                    torch.cuda.synchronize()
    with na.open(run_dir) as run:
        names = [f"{name}{trial}" for name in ("base", "same", "slow") for trial in range(TRIALS)]
        return {name: sample.read(run, name) for name in names}


def compared(samples: Samples, other: str, trial: int, *gates: str) -> compare.Comparison:
    pair = samples[f"base{trial}"], samples[f"{other}{trial}"]
    return compare.samples(pair[:1], pair[1:], gates=gates, same_run=True)


def failed(samples: Samples, other: str, gate: str) -> int:
    """In how many trials the gate fails."""
    return sum(compared(samples, other, trial, gate).failed for trial in range(TRIALS))


def test_the_kernel_takes_about_100_us(samples: Samples) -> None:
    found = compared(samples, "slow", 0).totals["total_ns"]
    assert found.a == pytest.approx(100_000, rel=0.2)
    assert found.change == pytest.approx(0.03, abs=0.02)


def test_identical_variants_pass(samples: Samples) -> None:
    assert failed(samples, "same", "total_ns>+1%") <= 1
    assert failed(samples, "same", "total_ns>+0%") <= 3


def test_3_percent_are_found(samples: Samples) -> None:
    assert failed(samples, "slow", "total_ns>+0%") >= 18
    assert failed(samples, "slow", "total_ns>+1%") >= 18
