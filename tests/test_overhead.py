"""What recording cost: steps paired on and off, the rank statistics, and the rows of the view."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from trace import T0, Trace
from typing import Any

import numpy as np
import pytest

import nanalyze.analysis as na
from nanalyze.analysis import overhead
from nanalyze.analysis.overhead import Steps, Windows, paired, signed_rank

MS = 1_000_000


def steps(*spans: tuple[int, int]) -> Steps:
    return overhead.ranges_of(spans)


def windows(*rows: tuple[int, int, int, int]) -> Windows:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return Windows(*(columns[:, place] for place in range(4)))


def lengths(parts: list[Any]) -> list[list[float]]:
    return [part.tolist() for part in parts]


# --- pairs -----------------------------------------------------------------------------------------


def test_a_pair_is_the_pause_and_as_much_time_beside_it() -> None:
    made = steps(*((start, start + 10 + n) for n, start in enumerate(range(0, 1500, 50))))
    # Off from 400 to 800: the step at 400 settles, 450 to 750 count. Before: from -10 to 390, of which 0 settles.
    pairs = paired(made, windows((390, 400, 800, 820)))
    assert lengths(pairs.off) == [[19.0, 20.0, 21.0, 22.0, 23.0, 24.0, 25.0]]
    assert lengths(pairs.on) == [[11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0]]


def test_the_sides_take_turns() -> None:
    made = steps(*((start, start + 10 + start // 100) for start in range(0, 4000, 20)))
    pairs = paired(made, windows((1000, 1000, 1100, 1100), (2000, 2000, 2100, 2120)))
    assert lengths(pairs.on) == [[19.0] * 4, [31.0] * 3]  # 920 to 980; 2140 to 2180
    assert lengths(pairs.off) == [[20.0] * 4, [30.0] * 3]


def test_steps_that_straddle_an_edge_belong_to_neither() -> None:
    made = steps((0, 10), (20, 30), (60, 80), (95, 105), (110, 120), (130, 140), (150, 205))
    pairs = paired(made, windows((100, 100, 200, 200)))
    assert lengths(pairs.off) == [[10.0]]  # 130; 110 settles and 150 ends too late
    assert lengths(pairs.on) == [[10.0, 20.0]]  # 0 settles and 95 ends too late


def test_what_lies_between_a_pause_and_its_completion_is_neither() -> None:
    made = steps((110, 120), (130, 140), (210, 290), (300, 301), (310, 312))
    pairs = paired(made, windows((50, 100, 200, 295)))  # nothing before it, so after it
    assert lengths(pairs.on) == [[2.0]]


def test_another_pause_is_not_what_lies_beside_one() -> None:
    made = steps(*((start, start + 10) for start in range(0, 1000, 20)))
    close = [(400, 400, 500, 500), (560, 560, 660, 660)]
    assert len(paired(made, windows(*close)).on) == 2  # before the first, after the second
    assert len(paired(made, windows((200, 200, 300, 300), *close[:1], close[1])).on) == 3
    assert len(paired(made, windows((340, 340, 390, 390), *close[:1], close[1])).on) == 2  # none beside the second


@pytest.mark.parametrize("spans", [[], [(0, 1000)], [(0, 10), (20, 30)], [(110, 120), (130, 140)]])
def test_without_steps_on_both_sides_there_is_no_pair(spans: list[tuple[int, int]]) -> None:
    assert paired(steps(*spans), windows((100, 100, 200, 200))).on == []


# --- statistics ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "critical"), [(6, 0), (7, 2), (8, 3), (10, 8), (15, 25), (20, 52), (25, 89)])
def test_critical_values_are_those_of_the_tables(count: int, critical: int) -> None:
    assert overhead._critical(count) == critical


def test_the_normal_approximation_joins_the_exact_values() -> None:
    assert (overhead._critical(60), overhead._critical(61)) == (648, 672)


def test_the_centre_is_the_median_of_pairwise_means() -> None:
    values = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    means = sorted((a + b) / 2 for a, b in itertools.combinations_with_replacement(values, 2))
    assert signed_rank(values) == (np.median(means), 1.0, 32.0)


def test_one_absurd_pair_moves_the_centre_little() -> None:
    values = np.linspace(-0.01, 0.03, 21)
    centre, low, high = signed_rank(values)
    moved, _, _ = signed_rank(np.concatenate([values[:-1], [100.0]]))
    assert centre == pytest.approx(0.01)
    assert low < 0.01 < high
    assert abs(moved - centre) < 0.002


def test_nineteen_of_twenty_intervals_hold_the_truth() -> None:
    random = np.random.default_rng(1)
    held = 0
    for _ in range(400):
        _, low, high = signed_rank(0.02 + 0.01 * random.standard_t(3, 12))
        held += low <= 0.02 <= high
    assert 0.93 <= held / 400 <= 0.985


@pytest.mark.parametrize(("every", "times"), [(1, 1), (50, 10), (1000, 100)])
@pytest.mark.parametrize("slowdown", [0.0, 0.02])
def test_rare_long_steps_and_steps_that_go_together_fool_nobody(every: int, times: int, slowdown: float) -> None:
    """Steps of 30 ms that wander slowly; each `every`-th takes `times` as long, like a checkpoint."""
    random = np.random.default_rng(every)
    got = np.array([one_job(random, every, times, slowdown) for _ in range(60)])
    truth = np.log1p(slowdown)
    assert got[:, 0].mean() == pytest.approx(truth, abs=0.004)
    assert np.mean((got[:, 1] <= truth) & (truth <= got[:, 2])) >= 0.88


def one_job(random: np.random.Generator, every: int, times: int, slowdown: float) -> tuple[float, float, float]:
    edges, at = [], 0.0
    for _ in range(20):
        at += random.uniform(1e9, 3e9)
        edges.append((at, at + 300e6 * random.uniform(0.75, 1.25)))
        at = edges[-1][1]
    count = int(at / 30e6 * 1.5)
    wander = np.zeros(count)
    for number, noise in enumerate(random.normal(0, 0.005, count)):
        wander[number] = 0.95 * wander[number - 1] + noise
    length = 30e6 * (1 + wander + random.normal(0, 0.01, count))
    length[::every] *= times
    spans, now, place = [], 0.0, 0
    for own in length.tolist():
        while place < len(edges) and now >= edges[place][1]:
            place += 1
        is_off = place < len(edges) and now >= edges[place][0]
        own *= 1 if is_off else 1 + slowdown
        spans.append((int(now), int(now + own)))
        now += own + 1e5
    rows = [(int(start), int(start), int(end), int(end) + 5 * MS) for start, end in edges]
    return signed_rank(paired(steps(*spans), windows(*rows)).log_ratios)


def test_many_pairs_are_thinned_out() -> None:
    centre, low, high = signed_rank(np.random.default_rng(0).normal(0.5, 0.1, 20_000))
    assert centre == pytest.approx(0.5, abs=0.01)
    assert high - low < 0.02


# --- the view --------------------------------------------------------------------------------------


def recorded(
    run_dir: Path,
    *,
    slowdown: float = 0.05,
    pauses: int = 12,
    step_ms: int = 10,
    name: str = "step",
    settings: dict[str, Any] | None = None,
) -> Trace:
    """A job whose steps vary by 20 % at random, drift to twice the length, and are slower with the recorder on."""
    random = np.random.default_rng(3)
    trace = Trace(run_dir)
    trace.process_row(settings=json.dumps({"pause_pct": 10.0, "exact": None} if settings is None else settings))
    spans = [(second * 1000 * MS + 700 * MS, second * 1000 * MS + 800 * MS) for second in range(pauses)]
    for start, end in spans:
        trace.pause(start, end, complete_ns=end + MS)
    now = 0
    while now < (pauses or 3) * 1000 * MS:
        is_off = any(start <= now < end for start, end in spans)
        length = step_ms * MS * (1 + now / (pauses or 3) / 1000 / MS) * random.uniform(0.9, 1.1)
        length *= 1 if is_off else 1 + slowdown
        trace.range(name, now, now + int(length))
        now += int(length) + 1000
    trace.write()
    return trace


@pytest.mark.parametrize("slowdown", [0.0, 0.05, 0.3])
def test_the_slowdown_is_found_though_the_job_drifts(tmp_path: Path, slowdown: float) -> None:
    recorded(tmp_path, slowdown=slowdown, pauses=20)
    with na.open(tmp_path) as run:
        (row,) = run.overhead().to_dict("records")
    assert (row["range_name"], row["depth"], row["pauses"], row["pairs"]) == ("step", 0, 20, 20)
    assert row["steps_off"] > 60
    assert abs(row["steps_on"] / row["steps_off"] - 1) < 0.35
    assert row["low_pct"] <= 100 * slowdown <= row["high_pct"]
    assert row["slowdown_pct"] == pytest.approx(100 * slowdown, abs=2)
    assert row["high_pct"] - row["low_pct"] < 6
    assert row["reason"] is None
    assert row["mean_on_ns"] > row["mean_off_ns"] * (1 + 0.8 * slowdown)


def test_the_outermost_range_that_fits_into_the_pauses_is_the_step(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    for second in range(8):
        trace.pause(second * 1000 * MS + 700 * MS, second * 1000 * MS + 800 * MS)
    for start in range(0, 8000, 2000):
        trace.range("epoch", start * MS, (start + 2000) * MS)
    for start in range(0, 8000, 10):
        trace.range("step", start * MS, start * MS + 9 * MS, depth=1)
        trace.range("loss", start * MS, start * MS + MS, depth=2)
    trace.write()
    with na.open(tmp_path) as run:
        (row,) = run.overhead().to_dict("records")
    assert (row["range_name"], row["depth"], row["pairs"]) == ("step", 1, 8)
    assert row["slowdown_pct"] == pytest.approx(0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pauses": 5}, "too few of the pauses (5 of 5) hold whole steps; 6 are needed"),
        ({"step_ms": 300}, "too few of the pauses (0 of 12) hold whole steps"),
        ({"pauses": 0}, "never paused: the job marks no steps"),
        ({"pauses": 0, "settings": {"pause_pct": 0, "exact": None}}, "switched off (pause_pct=0)"),
        ({"pauses": 0, "settings": {"pause_pct": 1, "exact": {"first": 2}}}, "while exact counters are measured"),
        ({"pauses": 0, "settings": {}}, "recorded without pauses"),
    ],
)
def test_what_was_not_measured_says_why(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    recorded(tmp_path, **options)
    with na.open(tmp_path) as run:
        (row,) = run.overhead().to_dict("records")
    assert reason in row["reason"]
    assert [row[name] for name in ("slowdown_pct", "low_pct", "high_pct")] == [None] * 3 or np.isnan(
        [float(row[name]) for name in ("slowdown_pct", "low_pct", "high_pct")]
    ).all()


def test_a_run_without_steps_says_so(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    trace.pause(0, 100)
    trace.range("once", 0, 50)
    trace.write()
    with na.open(tmp_path) as run:
        (row,) = run.overhead().to_dict("records")
    assert row["reason"] == "no range repeats, so there are no steps to compare"


def test_an_imported_run_has_no_row(tmp_path: Path) -> None:
    trace = Trace(tmp_path, source="nsys")
    trace.process_row(layers="imported")
    trace.kernel(trace.kernel_class("k"), 0, 10)
    trace.write()
    with na.open(tmp_path) as run:
        assert len(run.overhead()) == 0


def test_pauses_are_read_as_they_were_written(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    trace.pause(10, 20, complete_ns=25)
    trace.pause(30, 40)
    trace.write()
    with na.open(tmp_path) as run:
        rows = run.sql("SELECT * FROM pauses ORDER BY start_ns").to_dict("records")
        spans = run.sql("SELECT start_ns, end_ns FROM _pause_spans ORDER BY 1")
    assert (rows[0]["start_ns"], rows[0]["complete_ns"]) == (T0 + 10, T0 + 25)
    assert spans["end_ns"].tolist() == [T0 + 25, T0 + 40]
