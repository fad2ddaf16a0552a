"""Attribution of samples to kernel classes, against jobs whose true rates are known."""

from __future__ import annotations

import dataclasses
import itertools
import math
import shutil
from pathlib import Path
from trace import PROCESS, T0, Trace
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pytest
from simulator import FEW, PEAKS, SM_CLOCK_GHZ, SM_COUNT, Job, Simulated, simulate

import nanalyze.analysis as na
from nanalyze import queries
from nanalyze.analysis import attribution as attribution_module
from nanalyze.analysis import attribution_counters as derivation
from nanalyze.analysis import attribution_design as design
from nanalyze.analysis import attribution_modes as modes
from nanalyze.analysis import attribution_normal as normal
from nanalyze.analysis import attribution_solve as solve
from nanalyze.analysis import launch_reader
from nanalyze.rundir import counters, sampled

ALL = (
    "inst", "pipe_tensor_busy_ns", "pipe_alu_busy_ns", "pipe_fma_busy_ns", "inst_adu", "dram_busy_ns",
    "l2_slices_busy_ns", "l1_data_busy_ns", "l1_request_busy_ns", "l1_texture_busy_ns",
    "sm_cycles_active", "warps_active", "issue_active_cycles",
)  # fmt: skip
L1 = ("l1_data_busy_ns", "l1_request_busy_ns", "l1_texture_busy_ns")


def opened(run_dir: Path, job: Job, seed: int = 0, **options: Any) -> tuple[Simulated, na.Run]:
    made = simulate(job, seed)
    made.write(run_dir, **options)
    return made, na.open(run_dir)


def estimates(run: na.Run, made: Simulated) -> pd.DataFrame:
    """Estimated rates of kernel classes that can be told apart, with their truth, per second."""
    frame = run.attribution()
    frame = frame[(frame["term"] == "kernel") & frame["is_told_apart"]].copy()
    pairs = zip(frame["counter"], frame["kernel_class_id"], strict=True)
    frame["truth"] = [1e9 * made.truth(counter, number - 1000) for counter, number in pairs]
    frame["is_inside"] = (frame["low_per_s"] <= frame["truth"]) & (frame["truth"] <= frame["high_per_s"])
    frame["error"] = (frame["rate_per_s"] - frame["truth"]).abs() / frame["truth"]
    return frame


# --- do the intervals hold -------------------------------------------------------------------------

JOBS = {
    "plain": Job(),
    "short kernels in random order": Job(classes=20, mean_us=(5, 50), variation=0.1, steady=False),
    "three streams, lost samples, uneven times": Job(
        classes=20, streams=3, variation=0.05, lost=0.2, jitter=0.3, mean_us=(30, 200)
    ),
    "heavy samples": Job(classes=15, heavy=0.01, noise=0.01),
    "launches that differ": Job(classes=15, variation=0.3),
    "two groups in turn": Job(classes=10, seconds=4, groups=(FEW[:2], FEW[2:])),
}


@pytest.mark.parametrize("name", JOBS)
def test_nineteen_of_twenty_intervals_hold_the_truth(tmp_path: Path, name: str) -> None:
    inside: list[bool] = []
    for seed in range(6):
        made, run = opened(tmp_path / str(seed), JOBS[name], seed)
        with run:
            inside += estimates(run, made)["is_inside"].tolist()
    assert len(inside) > 200
    # Intervals of one run depend on each other, so the share scatters by more than independent draws.
    assert np.mean(inside) >= 0.92


def test_the_error_shrinks_as_the_root_of_the_time(tmp_path: Path) -> None:
    short = estimates(*reversed(opened(tmp_path / "a", Job(seconds=1, variation=0.2, steady=False))))
    long = estimates(*reversed(opened(tmp_path / "b", Job(seconds=16, variation=0.2, steady=False))))
    ratio = short["standard_error"].median() / long["standard_error"].median()
    assert 2.5 < ratio < 6.5  # 4


def test_estimates_of_a_quiet_job_are_close(tmp_path: Path) -> None:
    made, run = opened(tmp_path, Job(noise=0.001))
    frame = estimates(run, made)
    used = frame[frame["truth"] > 0]
    assert len(used) > 20
    assert used["error"].median() < 0.003
    assert run.attribution_quality()["explained"].min() > 0.99


def test_a_kernel_that_does_not_use_a_unit_gets_zero_or_next_to_it(tmp_path: Path) -> None:
    made, run = opened(tmp_path, Job())
    frame = estimates(run, made)
    unused = frame[frame["truth"] == 0]
    peak = unused["counter"].map(PEAKS) * 1e9
    assert len(unused) > 5
    assert (unused["rate_per_s"] / peak).max() < 0.01
    assert (unused["low_per_s"] / peak).max() < 0.002


# --- by hand ---------------------------------------------------------------------------------------


@pytest.fixture
def ends_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches count up to their recorded end, as is easier by hand."""
    monkeypatch.setattr(design, "AFTER_NS", 0)


def by_hand(run_dir: Path, trace: Trace | None = None) -> Trace:
    """40 ms and more of two kernels with 3 and 5 instructions a us, and 1 a us in idle time.

    Samples are 100 us; in sample i kernel a runs 10 (i % 5) us and kernel b 10 (i % 3) us beside it.
    """
    trace = trace or Trace(run_dir)
    trace.device()
    a, b = (trace.kernel_class(name, kernel_class_id=n) for n, name in ((1, "a"), (2, "b")))
    for i in range(400):
        at, first, second = 100_000 * i, 10_000 * (i % 5), 10_000 * (i % 3)
        if first:
            trace.kernel(a, at + 10_000, first)
        if second:
            trace.kernel(b, at + 10_000, second, stream_id=8)
        idle = 100_000 - max(first, second)
        sample(trace, at, 100_000, inst=(3 * first + 5 * second + idle) / 1000)
    return trace


def sample(trace: Trace, start_ns: int, length_ns: int, group: int = 0, process: str | None = None, **values: Any):  # type: ignore[no-untyped-def]
    span = {"start_ns": T0 + start_ns, "end_ns": T0 + start_ns + length_ns}
    trace.add("samples", process, device_id=0, counter_group=group, **span, **values)


def rates(trace: Trace) -> dict[str, float]:
    """Rates per us by term; kernels by id."""
    trace.write()
    with na.open(trace.run_dir) as run:
        frame = run.attribution()
    names = [str(k) if t == "kernel" else t for k, t in zip(frame["kernel_class_id"], frame["term"], strict=True)]
    return dict(zip(names, (frame["rate_per_s"] / 1e6).round(6), strict=True))


def test_concurrent_kernels_share_a_sample_and_idle_time_has_its_own_rate(tmp_path: Path) -> None:
    assert rates(by_hand(tmp_path)) == {"idle": 1.0, "1": 3.0, "2": 5.0}


def test_launches_without_times_count_for_nothing(tmp_path: Path) -> None:
    trace = by_hand(tmp_path)
    trace.kernel(3)
    assert rates(trace) == {"idle": 1.0, "1": 3.0, "2": 5.0}


def test_samples_during_a_replay_are_left_out(tmp_path: Path) -> None:
    trace = by_hand(tmp_path)
    for i in range(400, 420):
        sample(trace, 100_000 * i, 100_000, inst=1e9)
    trace.exact({"x.sum": 1.0}, kernel_class_id=1, measured_ns=42_000_000, cost_ns=2_000_000)
    assert rates(trace) == {"idle": 1.0, "1": 3.0, "2": 5.0}
    with na.open(tmp_path) as run:
        quality = run.attribution_quality().iloc[0]
    assert quality["samples_dropped"] in (20, 21)  # the last good one touches the replay
    assert quality["samples"] + quality["samples_dropped"] == 420


def test_samples_during_a_pause_are_left_out_until_its_kernels_have_ended(tmp_path: Path) -> None:
    trace = by_hand(tmp_path)
    for i in range(400, 420):  # of kernels that nobody saw
        sample(trace, 100_000 * i, 100_000, inst=1e9)
    sample(trace, 42_000_000, 100_000, inst=100.0)
    trace.pause(40_000_000, 41_500_000, complete_ns=42_000_000)
    trace.pause(40_000_000, 40_100_000)
    trace.pause(41_000_000, 41_200_000)  # of a shorter one that began later
    assert rates(trace) == {"idle": 1.0, "1": 3.0, "2": 5.0}
    with na.open(tmp_path) as run:
        quality = run.attribution_quality().iloc[0]
    assert (quality["samples"], quality["samples_dropped"]) == (401, 20)


def test_a_pause_of_another_process_on_the_same_gpu_counts_too(tmp_path: Path) -> None:
    trace = by_hand(tmp_path)
    other = "node0-1-101"
    trace.device(other)
    trace.kernel(1, 1_000_000_000, 10_000, process=other)
    for i in range(400, 410):
        sample(trace, 100_000 * i, 100_000, inst=1e9)
    trace.pause(40_000_000, 41_000_000, process=other)
    assert rates(trace) == {"idle": 1.0, "1": 3.0, "2": 5.0}


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), -1.0, 1e300])
def test_samples_that_are_no_measurements_are_dropped(tmp_path: Path, value: float | None) -> None:
    trace = by_hand(tmp_path)
    sample(trace, 40_000_000, 100_000, inst=value)
    sample(trace, 40_100_000, 0, inst=5.0)
    assert rates(trace) == {"idle": 1.0, "1": 3.0, "2": 5.0}
    with na.open(tmp_path) as run:
        assert run.attribution_quality()["samples_dropped"].tolist() == [2]


def test_copies_have_a_rate_of_their_own(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k", kernel_class_id=1)
    for i in range(200):
        busy, copying = 1000 * (i % 7), 1000 * (i % 4)
        if busy:
            trace.kernel(kernel, 10_000 * i, busy)
        if copying:
            trace.copy("HtoD", 10_000 * i, copying, 1, stream_id=9)
        sample(trace, 10_000 * i, 10_000, dram_write_bytes=2.0 * busy + 8.0 * copying)
    assert rates(trace) == {"idle": 0.0, "1": 2000.0, "copy HtoD": 8000.0}


def test_kernels_of_a_second_process_on_the_same_gpu_are_attributed(tmp_path: Path) -> None:
    other = "node0-1-101"
    trace = by_hand(tmp_path)
    trace.device(other)
    mine = [row for row in trace.rows["kernels", PROCESS] if row["kernel_class_id"] == 2]
    trace.rows["kernels", other] = mine
    trace.rows["kernels", PROCESS] = [row for row in trace.rows["kernels", PROCESS] if row["kernel_class_id"] == 1]
    assert rates(trace) == {"idle": 1.0, "1": 3.0, "2": 5.0}


@pytest.mark.usefixtures("ends_count")
def test_a_kernel_longer_than_many_samples(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k", kernel_class_id=1)
    for i in range(10):
        trace.kernel(kernel, 10_000_000 * i + 50_000, 5_000_000)
    for i in range(1000):
        at = 100_000 * i
        overlap = sum(max(0, min(at + 100_000, s + 5_000_000) - max(at, s)) for s in range(50_000, 10**8, 10_000_000))
        sample(trace, at, 100_000, inst=7.0 * overlap / 1000)
    assert rates(trace) == {"idle": 0.0, "1": 7.0}


def test_stretches_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = simulate(Job(streams=2, seconds=1), 3)
    made.write(tmp_path)
    with na.open(tmp_path) as run:
        whole = run.attribution()
    monkeypatch.setattr(launch_reader, "ROWS_AT_ONCE", 500)
    monkeypatch.setattr(design, "ROWS_AT_ONCE", 37)
    with na.open(tmp_path) as run:
        parts = run.attribution()
    assert len(made.start) > 5000
    pd.testing.assert_frame_equal(whole, parts, rtol=1e-6)


def test_more_classes_than_terms_share_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normal, "MOST_TERMS", 1)
    found = rates(by_hand(tmp_path))
    # a runs 2 in 5 of its 50 us, b 1 in 3: a is the larger.
    assert found["1"] == pytest.approx(3.0, rel=0.01)  # as one mode, launches of 10 to 40 us
    assert found["1 kernel classes with the least time"] == pytest.approx(5.0, abs=1e-6)


# --- not told apart, drift, quality ----------------------------------------------------------------


def test_classes_that_always_run_together_are_merged_and_have_no_verdict(tmp_path: Path) -> None:
    made, run = opened(tmp_path, Job(classes=5, together=((0, 1),), groups=(ALL,), zero_share=0))
    frame = run.attribution()
    merged = frame[~frame["is_told_apart"]]
    assert set(merged["kernel_class_id"]) == {1000, 1001}
    assert set(merged["merged_terms"]) == {2}
    sums = merged[merged["counter"] == "inst"]["rate_per_s"]
    truth = 1e9 * (made.truth("inst", 0) + made.truth("inst", 1)) / 2
    assert sums.tolist() == pytest.approx([truth] * 2, rel=0.01)
    assert not set(run.counters()["kernel_class_id"]) & {1000, 1001}
    verdicts = run.verdicts().set_index("kernel_class_id")
    assert verdicts.loc[1000, "bound"] == "undetermined"
    assert verdicts.loc[1000, "reason"] == (
        "not measured: compute_pct, memory_pct; the samples cannot tell it apart from 1 other kernels "
        "that always run along with it"
    )
    assert estimates(run, made)["is_inside"].mean() >= 0.85


DRIFTING = Job(classes=4, seconds=4.01, drift=1.0, interval_us=100, zero_share=0, groups=(("inst",),))


def test_a_job_that_drifts_shows_it_in_the_windows(tmp_path: Path) -> None:
    made, run = opened(tmp_path, DRIFTING)
    frame = run.attribution_windows()
    assert sorted(set(frame["window_number"])) == [0, 1, 2, 3]
    for number in range(4):
        own = frame[frame["kernel_class_id"] == 1000 + number].sort_values("start_ns")
        first = own["rate_per_s"].to_numpy() / own["rate_per_s"].iloc[0]
        # Rates double over the run; windows stand at 1/8, 3/8, 5/8 and 7/8 of it.
        assert first == pytest.approx([1, 1.375 / 1.125, 1.625 / 1.125, 1.875 / 1.125], rel=0.02)
    whole = estimates(run, made)
    assert whole["error"].max() < 0.02
    assert whole["is_inside"].all()


def test_noise_is_not_explained(tmp_path: Path) -> None:
    _, run = opened(tmp_path / "quiet", Job(noise=0.01))
    _, loud = opened(tmp_path / "loud", Job(noise=5.0))
    assert run.attribution_quality()["explained"].min() > 0.95
    assert loud.attribution_quality()["explained"].max() < 0.2


def test_too_few_samples_give_no_estimate_but_say_so(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    trace.kernel(trace.kernel_class("k"), 0, 1000)
    for i in range(5):
        sample(trace, 1000 * i, 1000, inst=1.0)
    trace.write()
    with na.open(tmp_path) as run:
        assert len(run.attribution()) == 0
        assert run.attribution_quality()[["samples", "blocks"]].to_numpy().tolist() == [[5, 0]]
        assert run.verdicts()["bound"].tolist() == ["launch"]


# --- counters and verdicts -------------------------------------------------------------------------

SHARES = {
    "inst": [0.3, 0.05, 0.02, 0.3],
    "pipe_tensor_busy_ns": [0.92, 0.0, 0.0, 0.0],
    "pipe_alu_busy_ns": [0.1, 0.05, 0.03, 0.81],
    "pipe_fma_busy_ns": [0.1, 0.05, 0.03, 0.3],
    "dram_busy_ns": [0.3, 0.91, 0.1, 0.2],
    "l2_slices_busy_ns": [0.4, 0.5, 0.05, 0.2],
    "l1_data_busy_ns": [0.3, 0.2, 0.05, 0.1],
    "l1_request_busy_ns": [0.2, 0.1, 0.04, 0.05],
    "l1_texture_busy_ns": [0.0, 0.0, 0.0, 0.0],
    "inst_adu": [0.0, 0.0, 0.0, 0.0],
    "sm_cycles_active": [0.95, 0.9, 0.5, 0.99],
    "warps_active": [0.2, 0.8, 0.3, 0.9],
    "issue_active_cycles": [0.3, 0.05, 0.02, 0.3],
}


def typical(groups: tuple[tuple[str, ...], ...] = (ALL,), **changes: Any) -> Job:
    return Job(classes=4, groups=groups, rates=SHARES, seconds=4, idle=0.0, **changes)


def test_verdicts_from_samples_alone(tmp_path: Path) -> None:
    _, run = opened(tmp_path, typical())
    rows = run.verdicts().set_index("kernel_class_id")
    assert rows["bound"].to_dict() == {1000: "compute", 1001: "memory", 1002: "latency", 1003: "compute"}
    assert rows.loc[1000, "level_or_pipe"] == "tensor"
    assert rows.loc[1001, "level_or_pipe"] == "DRAM"
    assert set(rows["method"]) == {"sampled"}
    gemm = rows.loc[1000]
    assert gemm["compute_pct"] == pytest.approx(92, abs=0.5)
    assert gemm["memory_pct"] == pytest.approx(40, abs=0.5)
    # Resident warps over those of active SMs, as the exact counter has it.
    assert gemm["occupancy_pct"] == pytest.approx(100 * 0.2 / 0.95, abs=0.5)
    assert gemm["issue_active_pct"] == pytest.approx(100 * 0.3 / 0.95, abs=0.5)
    assert gemm["sm_clock_hz"] == 1.5e9
    assert gemm["compute_low_pct"] < 92
    # FP64, XU and LSU were not sampled, and the instructions issued would be enough to fill them.
    assert gemm["compute_high_pct"] == 100


def test_an_interval_that_straddles_a_threshold_decides_nothing(tmp_path: Path) -> None:
    rates = {**SHARES, "dram_busy_ns": [0.3, 0.91, 0.1, 0.75]}
    _, run = opened(tmp_path, dataclasses.replace(typical(noise=0.3), rates=rates))
    row = run.verdicts().set_index("kernel_class_id").loc[1003]
    assert row["compute_low_pct"] < 80 < row["compute_high_pct"]
    assert row["bound"] == "undetermined"
    assert row["likely_bound"] in ("compute", "balanced")
    assert f"compute or balanced, likely {row['likely_bound']}: " in row["reason"]


def test_what_was_not_sampled_widens_the_interval(tmp_path: Path) -> None:
    without = tuple(c for c in ALL if c not in (*L1, "pipe_fma_busy_ns"))
    _, run = opened(tmp_path, typical((without,)))
    rows = run.verdicts().set_index("kernel_class_id")
    # Nothing that L1 may do changes what is bound by DRAM with little compute...
    assert rows.loc[1001, "bound"] == "memory"
    # ... but a kernel that keeps nothing else busy may be bound by L1.
    assert rows.loc[1002, "bound"] == "undetermined"
    assert rows.loc[1002, "missing"] == "l1_pct"
    assert rows.loc[1002, "memory_high_pct"] == 100
    assert rows.loc[1002, "reason"].endswith("; not sampled: l1_pct")
    # Few instructions cannot keep the FMA pipe busy: no need to have sampled it.
    assert rows.loc[1002, "compute_high_pct"] < 50


@pytest.mark.parametrize("absent", ["inst", "dram_busy_ns", "l2_slices_busy_ns"])
def test_without_a_needed_part_there_is_no_percentage(tmp_path: Path, absent: str) -> None:
    _, run = opened(tmp_path, typical((tuple(c for c in ALL if c != absent),)))
    rows = run.verdicts()
    lacking = "compute_pct" if absent == "inst" else "memory_pct"
    assert rows[lacking].isna().all()
    assert set(rows["missing"]) == {lacking}


def test_percentages_use_the_clock_that_ran(tmp_path: Path) -> None:
    made = simulate(typical())
    for name, hertz in (("slow", 1_500_000_000), ("fast", 1_800_000_000)):
        trace = Trace(tmp_path / name)
        trace.state(0, sm_clock_hz=hertz)
        made.write(tmp_path / name, clock=False, extra=trace)
    with na.open(tmp_path / "slow") as slow, na.open(tmp_path / "fast") as fast:
        sql = "SELECT value FROM counters WHERE counter = 'sm_active_pct' AND kernel_class_id = 1000"
        ratio = slow.sql(sql)["value"][0] / fast.sql(sql)["value"][0]
    assert ratio == pytest.approx(1.8 / 1.5)


def test_without_a_reading_percentages_stand_on_the_highest_clock_and_say_so(tmp_path: Path) -> None:
    made = simulate(typical())
    made.write(tmp_path / "read")
    made.write(tmp_path / "unread", clock=False)
    sql = "SELECT value FROM counters WHERE counter = 'sm_active_pct' AND kernel_class_id = 1000"
    with na.open(tmp_path / "read") as read, na.open(tmp_path / "unread") as unread:
        assert unread.sql(sql)["value"][0] == pytest.approx(read.sql(sql)["value"][0] * 1.5 / 2.0)
        assert set(read.attribution_quality()["clock_method"]) == {"device_state"}
        assert set(unread.attribution_quality()["clock_method"]) == {"maximum"}
        assert "sm_clock_hz" in set(read.counters()["counter"])
        assert "sm_clock_hz" not in set(unread.counters()["counter"])  # it was not measured


def test_without_any_clock_there_are_no_percentages_of_cycles(tmp_path: Path) -> None:
    made = simulate(typical())
    made.write(tmp_path, clock=False)
    shutil.rmtree(tmp_path / "devices")
    with na.open(tmp_path) as run:
        found = set(run.counters()["counter"])
        assert run.attribution_quality()["clock_method"].isna().all()
    assert "pipe_tensor_pct" in found
    assert not {"sm_active_pct", "pipe_issue_pct", "compute_pct", "sm_clock_hz"} & found


def test_sampled_cycles_give_the_clock(tmp_path: Path) -> None:
    made = simulate(typical())
    made.values["sm_cycles_elapsed"] = (made.sample_end - made.sample_start) * 1.2 * SM_COUNT
    object.__setattr__(made.job, "groups", ((*ALL, "sm_cycles_elapsed"),))
    made.write(tmp_path)
    with na.open(tmp_path) as run:
        clocks = run.sql("SELECT value FROM counters WHERE counter = 'sm_clock_hz'")["value"]
        assert set(run.attribution_quality()["clock_method"]) == {"sampled"}
    assert clocks.tolist() == pytest.approx([1.2e9] * 4, rel=1e-3)


def test_counters_of_two_groups_make_one_ratio(tmp_path: Path) -> None:
    groups = (("warps_active", "inst"), ("sm_cycles_active", "l1_data_busy_ns"))
    _, run = opened(tmp_path, typical(groups))
    sql = "SELECT value, low, high FROM counters WHERE counter = 'occupancy_pct' AND kernel_class_id = 1000"
    value, low, high = run.sql(sql).iloc[0]
    assert value == pytest.approx(100 * 0.2 / 0.95, rel=0.02)
    assert low < 100 * 0.2 / 0.95 < high


def test_exact_values_win_and_stand_beside_the_sampled_ones(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    trace.measure(1000, [{"compute_pct": 85.0, "memory_pct": 30.0, "pipe_tensor_pct": 85.0}] * 3)
    simulate(typical()).write(tmp_path, extra=trace)
    with na.open(tmp_path) as run:
        rows = run.verdicts().set_index("kernel_class_id")
        assert (rows.loc[1000, "method"], rows.loc[1000, "compute_pct"]) == ("exact", 85.0)
        assert rows.loc[1001, "method"] == "sampled"
        methods = run.counters().query("kernel_class_id == 1000").set_index("counter")["method"]
        assert methods[["compute_pct", "occupancy_pct"]].tolist() == ["exact", "sampled"]
        both = run.sampled_against_exact().set_index("counter")
        assert set(both.index) == {"compute_pct", "memory_pct", "pipe_tensor_pct"}
        assert both.loc["compute_pct", "difference_pct"] == pytest.approx(100 * 92 / 85 - 100, abs=1)
        assert not both.loc["compute_pct", "is_inside"]


def test_per_launch_values_are_rates_times_the_mean_duration(tmp_path: Path) -> None:
    made, run = opened(tmp_path, Job(classes=4, zero_share=0))
    frame = run.sql("SELECT kernel_class_id, value FROM counters WHERE counter = 'dram_read_bytes' ORDER BY 1")
    for number, value in frame.itertuples(index=False):
        own = made.kernel_class == number - 1000
        truth = (made.rate["dram_read_bytes"][own] * made.duration[own]).mean()
        assert value == pytest.approx(truth, rel=0.01)


# --- mixed classes, clocks, samples cut short ---------------------------------------------------------

MIXED = Job(classes=8, mixed=(0, 1), zero_share=0, variation=0.02, mean_us=(20, 60))


def per_launch(run: na.Run, made: Simulated, counter: str) -> pd.DataFrame:
    """Sampled value a launch of each class, with its interval and the truth."""
    frame = run.sql(f"SELECT kernel_class_id - 1000 AS k, value, low, high FROM counters WHERE counter = '{counter}'")
    gained = made.rate[counter] * made.duration
    frame["truth"] = [gained[made.kernel_class == number].mean() for number in frame["k"]]
    frame["error"] = (frame["value"] / frame["truth"] - 1).abs()
    return frame.set_index("k").sort_index()


def test_a_class_of_two_problem_sizes_gets_the_mean_of_its_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, run = opened(tmp_path, MIXED)
    found = per_launch(run, made, "dram_read_bytes")
    assert len(found) == 8
    assert found["error"].max() < 0.03
    assert ((found["low"] <= found["truth"]) & (found["truth"] <= found["high"])).all()
    estimated = estimates(run, made)
    assert set(estimated.groupby("kernel_class_id").size()) == {len(FEW)}  # one row a class, whatever its modes
    assert estimated["is_inside"].mean() >= 0.9
    launches = estimated.set_index("kernel_class_id")["launches"].groupby(level=0).first()
    assert launches.tolist() == pytest.approx(np.bincount(made.kernel_class), abs=10)  # some outside of samples
    monkeypatch.setattr(modes, "MOST_MODES", 1)
    monkeypatch.setattr(normal, "MOST_UNEVEN", 0)  # else the pace stands in for modes
    with na.open(tmp_path) as again:
        assert per_launch(again, made, "dram_read_bytes")["error"].mean() > 3 * found["error"].mean()


def histogram(*parts: tuple[float, int], spread: float = 0.02) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """Bins, launches and time of launches around the given means (us, launches)."""
    random = np.random.default_rng(1)
    each = np.concatenate([1000 * mean * np.exp(spread * random.standard_normal(count)) for mean, count in parts])
    bins, at = np.unique(np.floor(np.log(each) / modes.BIN).astype(np.int64), return_inverse=True)
    return bins, np.bincount(at).astype(float), np.bincount(at, each)


@pytest.mark.parametrize(
    ("parts", "spread", "launches"),
    [
        (((20, 1000),), 0.02, [1000]),
        (((20, 1000),), 0.3, [1000]),  # any length between: no modes
        (((20, 60),), 0.1, [60]),
        (((20, 1000), (40, 500)), 0.02, [1000, 500]),
        (((20, 1000), (25, 500)), 0.02, [1000, 500]),
        (((20, 1000), (21, 500)), 0.02, [1500]),
        (((16, 290), (40, 500), (53, 200), (778, 30)), 0.015, [290, 500, 200, 30]),
        (((20, 1000), (2000, 3)), 0.02, [1003]),  # halted three times
        (tuple((2.0**n, 100 - n) for n in range(10)), 0.01, [100, 99, 98, 97, 96, 95, 94, 276]),
    ],
)
def test_modes_of_durations(parts: tuple[tuple[float, int], ...], spread: float, launches: list[int]) -> None:
    bins, count, time = histogram(*parts, spread=spread)
    found = modes.modes(bins, count, time)
    assert sum(mode.launches for mode in found) == sum(launches)
    if len(launches) < modes.MOST_MODES:
        assert [mode.launches for mode in found] == launches
        assert sum(mode.launches * mode.mean_ns for mode in found) == pytest.approx(time.sum())
    assert len(found) == len(launches)
    assert all(a.end == b.first for a, b in itertools.pairwise(found))


def test_modes_that_cannot_be_told_apart_merge_with_their_own_class_first() -> None:
    random = np.random.default_rng(0)
    x = random.random((500, 4))
    x[:, 1] = x[:, 0] + 0.002 * random.random(500)
    x[:, 2] = x[:, 0] + 0.001 * random.random(500)
    gram = x.T @ x
    assert sorted(map(sorted, solve.told_apart(gram, 100.0))) == [[0, 1, 2], [3]]
    worst = int(np.argmax(solve._inflation(gram)[0]))
    assert any({worst, 3} <= set(group) for group in solve.told_apart(gram, 100.0, [[worst, 3]]))


def test_launches_that_do_their_work_early_leave_their_neighbours_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(classes=20, seconds=6, mean_us=(10, 90), launches_a_step=60, gap_share=0.03, early=0.7, zero_share=0)
    made, run = opened(tmp_path, job)
    uneven = estimates(run, made)
    monkeypatch.setattr(normal, "MOST_UNEVEN", 0)
    with na.open(tmp_path) as without:
        even = estimates(without, made)
    # Far more uneven than kernels are; a polynomial of degree 2 is no step, so not all of it can be found.
    assert uneven["error"].median() < 0.3 * even["error"].median()
    assert uneven["is_inside"].mean() > even["is_inside"].mean() + 0.2


VARIED = Job(classes=20, seconds=4, mean_us=(10, 90), launches_a_step=60, gap_share=0.03, lengths=0.1, zero_share=0)


@pytest.mark.parametrize("same_work", [True, False])
def test_launches_that_differ_in_length_do_the_same_work_or_more_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_work: bool
) -> None:
    """Whichever it is: what explains samples that were left out is believed."""
    made, run = opened(tmp_path, dataclasses.replace(VARIED, same_work=same_work))
    found = estimates(run, made)
    assert found["error"].median() < 0.015
    assert found["is_inside"].mean() >= 0.9
    monkeypatch.setattr(solve.Course, "kinds", lambda self: [((same_work, False), np.arange(len(self.by_time)))])
    with na.open(tmp_path) as wrong:
        assert estimates(wrong, made)["error"].median() > 2 * found["error"].median()


def test_the_course_of_a_long_launch_is_followed_the_closer_the_longer_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(classes=8, seconds=4, mean_us=(150, 500), launches_a_step=40, gap_share=0.03, early=0.5, zero_share=0)
    made, run = opened(tmp_path, job)
    close = estimates(run, made)
    monkeypatch.setattr(design, "MOST_DEGREE", 2)
    with na.open(tmp_path) as without:
        assert close["error"].median() < 0.5 * estimates(without, made)["error"].median()


def test_signed_rates_may_be_negative_and_the_others_not() -> None:
    gram = np.broadcast_to(np.eye(3), (1, 3, 3))
    rates = solve.bounded(gram, np.array([[-1.0], [2.0], [-3.0]]), np.full((2, 1), np.inf), 1)
    assert rates[:, 0] == pytest.approx([0, 2, -3])


def test_each_class_has_the_clock_that_ran_while_it_did(tmp_path: Path) -> None:
    groups = (("sm_cycles_elapsed", "sm_cycles_active", "inst", "pipe_tensor_busy_ns"),)
    rates = {"sm_cycles_active": [0.9, 0.98, 0.5, 0.98], "pipe_tensor_busy_ns": [0.9, 0.0, 0.0, 0.4]}
    clocks = (0.8, 1.0, 1.0, 0.9)
    job = Job(classes=4, seconds=4, groups=groups, rates=rates, clocks=clocks, noise=0.002)
    _, run = opened(tmp_path, job)
    sql = "SELECT value FROM counters WHERE counter = '{}' ORDER BY kernel_class_id"
    assert run.sql(sql.format("sm_clock_hz"))["value"].to_numpy() / 1.5e9 == pytest.approx(clocks, rel=0.01)
    active = run.sql(sql.format("sm_active_pct"))["value"].to_numpy()
    assert active == pytest.approx([90, 98, 50, 98], abs=1)
    # A percentage of each sample's own cycles: of samples that the kernel shares with others at another clock.
    assert run.sql(sql.format("pipe_tensor_pct"))["value"].to_numpy() == pytest.approx([90, 0, 0, 40], abs=1)


def test_samples_cut_short_are_left_out(tmp_path: Path) -> None:
    groups = (("sm_cycles_elapsed", "inst", "dram_read_bytes"),)
    job = Job(groups=groups, cut=0.01, clocks=(1.0,) * 10)
    made, run = opened(tmp_path, job)
    cut = int((made.values["sm_cycles_elapsed"] < 0.1 * np.median(made.values["sm_cycles_elapsed"])).sum())
    quality = run.attribution_quality().set_index("counter")
    assert cut > 5
    assert set(quality["samples_dropped"]) == {cut}
    assert quality.loc["inst", "explained"] > 0.99
    assert estimates(run, made).query("counter == 'inst' and truth > 0")["error"].median() < 0.02


def test_a_pipe_that_was_not_sampled_has_what_instructions_the_others_leave() -> None:
    def certain(value: float) -> derivation.Value:
        return derivation.Value(value, None, value, value)

    device = derivation.Properties({"fp32_flops_per_sm_cycle": 256.0, "fp64_flops_per_sm_cycle": 128.0})
    parts = next(speed.parts for speed in sampled.SPEEDS_OF_LIGHT if speed.counter == "compute_pct")
    fp64 = next(part for part in parts if part.counter == "pipe_fp64_pct")
    known = {"pipe_issue_pct": certain(50.0), "pipe_fma_pct": certain(20.0), "pipe_alu_pct": certain(30.0)}
    # 2 of 4 issue slots a cycle; FMA takes 0.8 of them and ALU 0.6: FP64 can have 0.6 of its 2.
    assert derivation._limit(fp64, known, parts, device) == pytest.approx(30)
    known["pipe_lsu_pct"] = certain(70.0)
    assert derivation._limit(fp64, known, parts, device) == 0
    assert derivation._limit(fp64, {}, parts, device) == 100


# --- when it is computed ---------------------------------------------------------------------------


def test_only_queries_that_need_it_wait_for_it_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = attribution_module.attribute
    monkeypatch.setattr(attribution_module, "attribute", lambda *a: calls.append(1) or original(*a))
    _, run = opened(tmp_path, Job(seconds=1))
    run.sql("SELECT count(*) FROM kernels")
    run.devices()
    assert calls == []
    run.verdicts()
    run.counters()
    run.query("top_kernels")
    assert calls == [1]


def test_a_run_without_samples_is_not_attributed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribution_module, "attribute", lambda *a: pytest.fail("attributed"))
    trace = Trace(tmp_path)
    trace.kernel(trace.kernel_class("k"), 0, 100_000)
    trace.write()
    with na.open(tmp_path) as run:
        assert len(run.verdicts()) == 1
        assert len(run.attribution()) == 0


def test_a_run_gives_the_same_figures_again(tmp_path: Path) -> None:
    made = simulate(Job(classes=8, streams=2))
    for name in ("a", "b"):
        made.write(tmp_path / name)
    with na.open(tmp_path / "a") as a, na.open(tmp_path / "b") as b:
        pd.testing.assert_frame_equal(a.counters(), b.counters(), check_exact=True)
        pd.testing.assert_frame_equal(a.attribution(), b.attribution(), check_exact=True)


def test_the_views_that_read_estimates_are_known() -> None:
    users = queries.users_of(tuple(attribution_module.TABLES))
    assert {"attribution", "counters", "verdicts", "sampled_against_exact", "_evidence"} <= users
    assert not {"kernels", "samples", "devices", "graph_counters"} & users
    assert queries.named_in('SELECT * FROM "Verdicts" AS v') == {"verdicts"}


# --- the solver ------------------------------------------------------------------------------------


@pytest.mark.parametrize("peak", [math.inf, 0.5, 0.01])
def test_the_rates_are_the_least_squares_between_zero_and_the_peak(peak: float) -> None:
    """Against the conditions that only the solution fulfils: what is held would go on, and the rest is at rest."""
    random = np.random.default_rng(5)
    held_at = set()
    for _ in range(50):
        x = random.random((60, 12)) * (random.random((60, 12)) < 0.5)
        y = x @ random.standard_normal((12, 3)) + 0.1 * random.standard_normal((60, 3))
        gram, moment = x.T @ x, x.T @ y
        peaks = peak * (1 + np.arange(36).reshape(12, 3))
        rate = solve.bounded(np.broadcast_to(gram, (3, 12, 12)), moment, peaks)
        slope = gram @ rate - moment
        assert ((rate >= 0) & (rate <= peaks)).all()
        assert slope[rate == 0].min(initial=1) > -1e-6
        assert slope[rate == peaks].max(initial=-1) < 1e-6
        assert np.abs(slope[(rate > 0) & (rate < peaks)]).max(initial=0) < 1e-6
        held_at |= {0.0} if (rate == 0).any() else set()
        held_at |= {peak} if (rate == peaks).any() else set()
    assert held_at == ({0.0} if peak == math.inf else {0.0, peak})


def test_terms_are_merged_until_they_can_be_told_apart() -> None:
    random = np.random.default_rng(0)
    x = random.random((500, 6))
    x[:, 4] = 2 * x[:, 1]
    x[:, 5] = 0
    groups = solve.told_apart(x.T @ x, 100.0)
    assert sorted(map(sorted, groups)) == [[0], [1, 4], [2], [3]]


def test_every_sampled_column_is_declared_once_and_every_formula_uses_declared_ones() -> None:
    columns = [counter.column for counter in sampled.SAMPLED]
    assert len(set(columns)) == len(columns)
    for formula in sampled.FORMULAS:
        assert set(formula.numerator) <= set(columns)
        assert formula.denominator in (*columns, "launch", "time", "sm_cycles", "dram_peak")
        assert formula.counter in counters.BY_NAME
    for group in sampled.GROUPS:
        assert set(group) <= set(columns)
    known = {formula.counter for formula in sampled.FORMULAS}
    for speed in sampled.SPEEDS_OF_LIGHT:
        assert {part.counter for part in speed.parts} <= known
        assert set(speed.needed) <= {part.counter for part in speed.parts}
        assert speed.counter in counters.BY_NAME
        known.add(speed.counter)


def test_the_busiest_part_is_the_speed_of_light_and_its_interval_holds_what_cannot_be_sampled() -> None:
    def between(low: float, high: float, missing: str | None = None) -> derivation.Value:
        return derivation.Value((low + high) / 2, (high - low) / 4, low, high, missing)

    speed = sampled.SpeedOfLight("memory_pct", (sampled.Part("dram_pct"), sampled.Part("l1_pct")), ("dram_pct",), 0.1)
    found = derivation._busiest(
        {"dram_pct": between(40, 50), "l1_pct": between(30, 60)}, speed, derivation.Properties()
    )
    assert (found.value, found.low, found.high, found.missing) == (45, 40, pytest.approx(66), None)
    # One that is unknown may be all busy, and what a part lacks its whole lacks.
    found = derivation._busiest({"dram_pct": between(40, 50)}, speed, derivation.Properties())
    assert (found.value, found.low, found.high, found.missing) == (45, 40, 100, "l1_pct")
    parts = {"dram_pct": between(40, 50), "l1_pct": between(30, 60, "l1_texture_pct")}
    assert derivation._busiest(parts, speed, derivation.Properties()).missing == "l1_texture_pct"


def test_l1_is_the_busiest_of_its_three_parts(tmp_path: Path) -> None:
    rates = {**SHARES, "l1_request_busy_ns": [0.2, 0.1, 0.5, 0.05], "l1_texture_busy_ns": [0.45, 0.0, 0.0, 0.0]}
    _, run = opened(tmp_path, dataclasses.replace(typical(), rates=rates))
    l1 = run.verdicts().set_index("kernel_class_id")["l1_pct"]
    assert l1.sort_index().tolist() == pytest.approx([45, 20, 50, 10], abs=1)


def test_a_query_can_be_stopped_while_samples_are_attributed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise duckdb.InterruptException("INTERRUPT Error: Interrupted!")

    made = simulate(Job(seconds=1))
    made.write(tmp_path)
    shutil.rmtree(tmp_path / "devices")
    with na.open(tmp_path) as run:
        with monkeypatch.context() as patch:
            patch.setattr(attribution_module, "attribute", interrupted)
            with pytest.raises(na.run.QueryError):
                run.verdicts()
        assert len(run.verdicts()) == 10


@pytest.mark.parametrize("blocks", [264, 1])
def test_a_launch_of_one_block_keeps_most_sms_idle(tmp_path: Path, blocks: int) -> None:
    """Whatever the samples say: what is more than one SM can do is not its own."""
    rates = {"sm_cycles_active": [0.9, 0.3, 0.9, 0.8], "inst": [0.5, 0.3, 0.5, 0.4]}
    made = simulate(Job(classes=4, rates=rates, blocks=(264, blocks, 264, 264)), 0)
    made.values["sm_cycles_elapsed"] = (made.sample_end - made.sample_start) * SM_COUNT * SM_CLOCK_GHZ
    object.__setattr__(made.job, "groups", (("sm_cycles_elapsed", *rates),))
    made.write(tmp_path / "run")
    with na.open(tmp_path / "run") as run:
        found = run.attribution().query("kernel_class_id == 1001").set_index("counter")
    for counter in rates:
        share = 0.3 if blocks > 1 else normal.REACH / SM_COUNT
        assert found.loc[counter, "rate_per_s"] == pytest.approx(share * PEAKS[counter] * 1e9, rel=0.05)
