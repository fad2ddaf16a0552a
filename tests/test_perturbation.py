"""Time with and without the profiler: the view's arithmetic, and what report and comparison say of it."""

from __future__ import annotations

import math
from pathlib import Path
from trace import Trace
from typing import Any

import pandas as pd
import pytest

import nanalyze.analysis as na
from nanalyze.analysis.report.perturbation import STATEMENT, perturbation_grid, sentence


def rows(tmp_path: Path, timeline: list[int], exact: list[float], name: str = "k") -> pd.DataFrame:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class(name)
    for number, duration in enumerate(timeline):
        trace.kernel(kernel, 10_000 * number, duration)
    trace.measure(kernel, [{"duration_ns": value} for value in exact])
    trace.write()
    return na.open(tmp_path).perturbation()


def only(tmp_path: Path, timeline: list[int], exact: list[float]) -> dict[str, Any]:
    found: dict[str, Any] = rows(tmp_path, timeline, exact).to_dict("records")[0]
    return found


def test_the_interval_is_welch_s(tmp_path: Path) -> None:
    row = only(tmp_path, [100, 104, 96, 100], [110, 112, 114])
    assert (row["launches"], row["mean_ns"], row["launches_replayed"], row["replayed_ns"]) == (4, 100, 3, 112)
    assert row["difference_ns"] == 12
    assert row["difference_share"] == pytest.approx(0.12)
    a, b = 32 / 3 / 4, 4 / 3
    degrees = (a + b) ** 2 / (a**2 / 3 + b**2 / 2)
    assert 4.9 < degrees < 5  # so 4 of the table: 2.776
    assert row["difference_low_ns"] == pytest.approx(12 - 2.776 * math.sqrt(a + b))
    assert row["difference_high_ns"] == pytest.approx(12 + 2.776 * math.sqrt(a + b))
    assert row["differs"]


def test_a_difference_within_the_interval_is_none(tmp_path: Path) -> None:
    assert not only(tmp_path, [100, 120, 80, 100], [90, 110, 112])["differs"]


def test_one_launch_of_a_kind_has_no_interval(tmp_path: Path) -> None:
    row = only(tmp_path, [100, 100], [200])
    assert row["difference_ns"] == 100
    assert pd.isna([row["difference_low_ns"], row["difference_high_ns"], row["differs"]]).all()


def test_what_does_not_scatter_differs_by_any_amount(tmp_path: Path) -> None:
    assert only(tmp_path, [100, 100], [101, 101])["differs"]
    assert not only(tmp_path / "equal", [100, 100], [100, 100])["differs"]


def test_a_kernel_measured_one_way_only_is_not_listed(tmp_path: Path) -> None:
    assert rows(tmp_path, [100, 100], []).empty


def test_the_sentence_counts(tmp_path: Path) -> None:
    found = [{"differs": True}, {"differs": False}, {"differs": None}]
    assert sentence(found) == (
        "3 kernels were timed in the undisturbed job and under the profiler; 1 took another time there by more "
        "than the interval, so their counters may be others too; for 1 too few launches were measured to tell."
    )
    assert "none took another time" in sentence([{"differs": False}])


def test_the_grid_shows_both_times(tmp_path: Path) -> None:
    rows(tmp_path, [100_000, 104_000, 96_000, 100_000], [110_000, 112_000, 114_000], "f<1>\x1b")
    grid = perturbation_grid(na.open(tmp_path).arrow(STATEMENT).to_pylist())
    texts = [cell.text.replace("\u202f", " ") for cell in grid.rows[0]]
    assert texts == ["f<1>\\x1b", "100 µs", "4", "112 µs", "3", "+12.0 %", "yes"]
    assert grid.rows[0][5].title.replace("\u202f", " ") == "95 % interval: +6.4 % to +17.6 %"
    assert perturbation_grid([]).rows == ()


def test_a_comparison_says_what_counting_did(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    for number in range(24):
        name = ("a", "b")[number % 2]
        trace.range(name, 1_000 * number, 1_000 * number + 900)
        trace.kernel(kernel, 1_000 * number, 500 + number % 3)
    trace.measure(kernel, [{"duration_ns": 600.0}, {"duration_ns": 602.0}])
    trace.write()
    result = na.open(tmp_path).compare("a", "b")
    assert [(p.launches, p.launches_replayed, p.replayed_ns, p.differs) for p in result.perturbed] == [
        (24, 2, 601.0, True)
    ]
    assert result.totals["total_ns"].a == pytest.approx(501, abs=0.2)  # times without the profiler
    assert "1 took another time there by more than the interval" in result.to_markdown()
    assert "| `k` | 501 ns | 601 ns | +20.0 % |" in result.to_markdown().replace("\u202f", " ")
