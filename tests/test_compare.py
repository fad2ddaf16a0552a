"""Comparisons of ranges and of runs: figures worked out by hand, and what must not be compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from trace import PROCESS, Trace

import numpy as np
import pytest
from variants import EAGER, FUSED, Kernel, Variant, opened, sample_of, write

import nanalyze.analysis as na
from nanalyze.analysis import compare
from nanalyze.analysis.compare import baseline, sample
from nanalyze.analysis.compare.sample import Clock, CompareError, Facts
from nanalyze.analysis.statistics import Array

OTHER = "node0-1-101"


def two(tmp_path: Path, a: Variant, b: Variant, **options: object) -> compare.Comparison:
    """The comparison of two runs of a variant each."""
    seeds = {"seed": 1}, {"seed": 2}
    gates = options.pop("gates", ())
    runs = [opened(tmp_path / n, [v], **seed, **options) for n, v, seed in zip("ab", (a, b), seeds, strict=True)]  # type: ignore[arg-type]
    return compare.runs(runs[:1], runs[1:], gates=gates)  # type: ignore[arg-type]


# --- repetitions -------------------------------------------------------------------------------


def test_ranges_of_one_name_are_repetitions_with_all_that_is_nested_in_them(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    for start in (0, 1_000):
        step = trace.range("step", start, start + 900)
        inner = trace.range("inner", start + 100, start + 800, parent_id=step, depth=1)
        trace.range("innermost", start + 200, start + 700, parent_id=inner, depth=2)
        trace.kernel(kernel, start + 50, 100, queued_ns=start + 50)
        trace.kernel(kernel, start + 250, 100, queued_ns=start + 250)
        # Queued by another thread while the innermost range is open, run after it was closed.
        trace.kernel(kernel, start + 950, 40, queued_ns=start + 300)
    trace.write()
    found = sample.read(na.open(tmp_path), "step")
    assert found.repetitions == 2
    assert {name: values.tolist() for name, values in found.totals.items()} == {
        "kernel_ns": [240, 240],
        "span_ns": [940, 940],
        "gap_ns": [700, 700],
        "gaps": [2, 2],
        "launches": [3, 3],
        "host_ns": [900, 900],
    }


def test_a_range_inside_one_of_its_own_name_is_no_repetition(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    outer = trace.range("block", 0, 1_000)
    trace.range("block", 100, 500, parent_id=outer, depth=1)
    trace.kernel(kernel, 50, 10)
    trace.kernel(kernel, 200, 10)
    trace.write()
    found = sample.read(na.open(tmp_path), "block")
    assert found.repetitions == 1
    assert found.totals["kernel_ns"].tolist() == [20]


def test_kernels_side_by_side_make_no_gap(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    trace.range("step", 0, 1_000)
    trace.kernel(kernel, 0, 500)
    trace.kernel(kernel, 100, 100, stream_id=8)
    trace.kernel(kernel, 450, 150, stream_id=8)
    trace.kernel(kernel, 700, 100)
    trace.write()
    totals = sample.read(na.open(tmp_path), "step").totals
    assert (totals["gap_ns"].tolist(), totals["gaps"].tolist(), totals["span_ns"].tolist()) == ([100], [1], [800])


def test_a_repetition_with_a_replayed_launch_is_left_out(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    for start in (0, 1_000, 2_000):
        trace.range("step", start, start + 900)
        trace.kernel(kernel, start + 100, 100)
    trace.kernel(kernel, queued_ns=300, correlation_id=77)
    trace.exact({"gpu__time_duration.sum": 5_000.0}, kernel_class_id=kernel, correlation_id=77)
    trace.write()
    found = sample.read(na.open(tmp_path), "step")
    assert found.repetitions == 2
    assert found.kernel_ns.tolist() == [[100, 100]]


def test_only_replayed_repetitions_are_refused(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    trace.range("step", 0, 900)
    trace.kernel(kernel, queued_ns=300)
    trace.write()
    with pytest.raises(CompareError, match="no repetition of step holds undisturbed kernels only"):
        sample.read(na.open(tmp_path), "step")


def test_repetitions_that_touch_a_pause_are_left_out(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    for start in (0, 1_000, 2_000):
        trace.range("step", start, start + 900)
        trace.kernel(kernel, start + 100, start + 100)
    trace.pause(1_200, 1_400)
    trace.write()
    assert sample.read(na.open(tmp_path), "step").kernel_ns.tolist() == [[100, 2_100]]


def test_a_pause_before_or_after_a_repetition_does_not_touch_it(tmp_path: Path) -> None:
    """Its kernels may run in the pause; that they were launched before it is what counts."""
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    for start in (0, 1_000, 2_000):
        trace.range("step", start, start + 900)
        trace.kernel(kernel, start + 850, 100, queued_ns=start + 800)
    trace.pause(900, 950, complete_ns=1_000)
    trace.pause(1_900, 1_950, complete_ns=2_001)
    trace.write()
    found = sample.read(na.open(tmp_path), "step")
    assert found.repetitions == 2  # not the third: the pause was not over for the GPU when it began


def test_time_in_a_pause_is_neither_span_nor_gap_of_a_piece(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    for number in range(4):
        trace.kernel(kernel, 1_000 * number, 100)
    trace.pause(200, 700, complete_ns=800)  # of the gap from 100 to 1,000 remain 100 and 200
    trace.pause(3_050, 9_000)  # its last kernel ran in it; what came after is unknown
    trace.write()
    with na.open(tmp_path) as run:
        rows = run.query("compare_repetitions", most=2)
    whole = rows[rows["kernel_class_id"].isna()]
    assert whole[["launches", "kernel_ns", "span_ns", "gap_ns", "gaps"]].to_numpy().tolist() == [
        [2, 200, 500, 300, 2],
        [2, 200, 1_100, 900, 1],
    ]
    assert rows["launches"].dropna().tolist() == [2, 2, 2, 2]  # a pause is no launch, and of no class


def test_the_first_repetitions_are_skipped_in_each_process(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    for process, base in ((PROCESS, 100), (OTHER, 300)):
        kernel = trace.kernel_class("k", process=process)
        for number in range(3):
            start = 1_000 * number
            trace.range("step", start, start + 900, process=process, range_id=number + 1)
            trace.kernel(kernel, start, base + number, process=process)
    trace.write()
    found = sample.read(na.open(tmp_path), "step", skip=1)
    assert found.repetitions == 4
    assert found.kernel_ns.tolist() == [[201, 202]]  # the mean of the two ranks, step by step


def test_many_repetitions_are_added_up_in_batches(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    for number in range(1_000):
        trace.range("step", 100 * number, 100 * number + 90)
        trace.kernel(kernel, 100 * number, 10 + number % 5)
    trace.write()
    found = sample.read(na.open(tmp_path), "step")
    assert (found.batches, found.repetitions) == (400, 1_000)
    assert found.totals["launches"] == pytest.approx(1.0)
    # Batches of two and three, each its own mean.
    assert found.totals["kernel_ns"][:2].tolist() == [11.0, 13.5]


def test_without_steps_a_run_is_cut_into_pieces_that_stand_for_the_whole(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    for number in range(128):
        trace.kernel(kernel, 100 * number, 50)
    trace.write()
    run = na.open(tmp_path)
    found = sample.read(run, sample.common_step([run]))
    assert (found.range_name, found.batches) == (None, 64)
    assert found.totals["kernel_ns"].mean() == 128 * 50
    assert found.totals["launches"].mean() == 128


def test_the_step_is_the_outermost_range_that_repeats_and_holds_the_kernels(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    whole = trace.range("main", 0, 100_000)
    for number in range(6):
        start = 1_000 * number
        step = trace.range("step", start, start + 900, parent_id=whole, depth=1)
        trace.range("forward", start, start + 500, parent_id=step, depth=2)
        trace.range("save", start + 600, start + 800, parent_id=step, depth=2)
        trace.kernel(kernel, start + 100, 300)
        trace.kernel(kernel, start + 650, 10)
    trace.write()
    run = na.open(tmp_path)
    assert sample.steps(run).keys() == {"step", "forward"}
    assert sample.common_step([run, run]) == "step"


def test_an_unknown_range_is_refused_with_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(CompareError, match=r"no range is called fussed\. It has eager, fused\."):
        opened(tmp_path, [EAGER, FUSED], 2).compare("eager", "fussed")


# --- ranges ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fusion(tmp_path_factory: pytest.TempPathFactory) -> compare.Comparison:
    return opened(tmp_path_factory.mktemp("fusion"), [EAGER, FUSED]).compare("eager", "fused")


def test_the_speed_up_is_that_of_a_repetition_with_its_interval(fusion: compare.Comparison) -> None:
    # 100 + 60 + 40 us and two gaps of 2 us against 90 us; 0.5 % noise a launch.
    assert fusion.speedup is not None
    ratio, low, high = fusion.speedup
    assert low <= 204 / 90 <= high
    assert ratio == pytest.approx(204 / 90, rel=0.005)
    assert 0.002 < (high - low) / ratio < 0.02


def test_the_totals_of_a_repetition(fusion: compare.Comparison) -> None:
    totals = fusion.totals
    assert (totals["launches"].a, totals["launches"].b, totals["launches"].difference) == (3, 1, -2)
    assert (totals["gap_ns"].a, totals["gap_ns"].b, totals["gaps"].a) == (4_000, 0, 2)
    assert (totals["dram_bytes"].a, totals["dram_bytes"].b) == (600e6, 300e6)
    assert totals["dram_bytes"].change == pytest.approx(-0.5)
    assert (totals["l2_bytes"].a, totals["l2_bytes"].b) == (800e6, 350e6)
    assert (totals["flops"].a, totals["flops"].b) == (4e9, 4e9)
    assert totals["flop_per_byte"].a == pytest.approx(20 / 3)
    assert totals["flop_per_byte"].b == pytest.approx(40 / 3)


def test_the_parts_add_up_and_follow_from_bytes_rates_and_gaps(fusion: compare.Comparison) -> None:
    parts = {part.name: part for part in fusion.parts}
    assert sum(part.ns for part in fusion.parts) == pytest.approx(fusion.totals["step_ns"].difference)
    # 200 us for 600 MB and 90 us for 300 MB: 300 MB less at (1/3 + 3/10) / 2 us a MB.
    assert parts["DRAM bytes moved"].ns == pytest.approx(-95_000, rel=0.01)
    assert parts["kernel time per byte"].ns == pytest.approx(-15_000, rel=0.05)
    assert parts["gaps between kernels"].ns == pytest.approx(-4_000)
    moved = parts["DRAM bytes moved"]
    assert moved.low is not None
    assert moved.high is not None
    assert moved.low < -95_000 * 0.999
    assert moved.high > -95_000 * 1.001
    assert moved.high - moved.low < 2_000


def test_what_became_of_the_verdict(fusion: compare.Comparison) -> None:
    assert fusion.verdicts == ({"memory (DRAM)": 1.0}, {"memory (DRAM)": 1.0})


def test_verdicts_are_weighted_with_the_time_of_a_repetition(tmp_path: Path) -> None:
    mixed = Variant(
        "mixed", (Kernel("a", 75_000, 0, 1e6, 1e6, 1e6), Kernel("b", 25_000, 0, 1e6, 1e6, 1e6, 10.0, 90.0)), noise=0.0
    )
    result = opened(tmp_path, [mixed, FUSED]).compare("mixed", "fused")
    assert result.verdicts[0] == {"memory (DRAM)": 0.75, "compute": 0.25}


def test_kernels_of_the_ranges_are_vanished_and_new(fusion: compare.Comparison) -> None:
    assert [(k.name, k.pair.how, round((k.time.difference or 0) / 1e3)) for k in fusion.kernels] == [
        ("bias", "vanished", -100),
        ("triton_fused_3", "new", 90),
        ("gelu", "vanished", -60),
        ("norm<float>", "vanished", -40),
    ]
    assert all(k.mean.change is None and not k.has_changed for k in fusion.kernels)


def test_counters_that_were_not_measured_are_null_and_the_kernels_are_one_part(tmp_path: Path) -> None:
    plain = replace(FUSED, kernels=(Kernel("fused", 90_000, 2_000),))
    result = opened(tmp_path, [EAGER, plain]).compare("eager", "fused")
    assert result.totals["dram_bytes"].a == 600e6
    assert result.totals["dram_bytes"].b is None
    assert result.totals["dram_bytes"].change is None
    assert [part.name for part in result.parts] == ["time in kernels", "gaps between kernels"]
    assert result.parts[0].ns == pytest.approx(-110_000, rel=0.01)


def test_a_kernel_without_counters_takes_them_from_the_whole(tmp_path: Path) -> None:
    partly = replace(FUSED, kernels=(*FUSED.kernels, Kernel("uncounted", 10_000)))
    result = opened(tmp_path, [EAGER, partly]).compare("eager", "fused")
    assert result.totals["dram_bytes"].b is None


def test_fusion_that_does_not_pay_is_shown_as_such(tmp_path: Path) -> None:
    slow = replace(FUSED, kernels=(replace(FUSED.kernels[0], duration_ns=230_000),))
    result = opened(tmp_path, [EAGER, slow]).compare("eager", "fused")
    assert result.speedup is not None
    assert result.speedup[2] < 1
    parts = {part.name: round(part.ns / 1e3) for part in result.parts}
    assert parts["DRAM bytes moved"] < 0 < parts["kernel time per byte"]
    assert "fused is slower: it takes 1.1" in result.to_markdown().replace("`", "")


# --- runs --------------------------------------------------------------------------------------


def test_a_slow_down_of_3_percent_is_found_and_attributed(tmp_path: Path) -> None:
    slower = replace(EAGER, kernels=(replace(EAGER.kernels[0], duration_ns=103_000), *EAGER.kernels[1:]))
    result = two(tmp_path, EAGER, slower)
    assert result.range_a == result.range_b == "eager"
    changed = {k.name: k for k in result.kernels if k.has_changed}
    assert changed.keys() == {"bias"}
    bias = changed["bias"].mean
    assert bias.change_low is not None
    assert bias.change_high is not None
    assert bias.change_low <= 0.03 <= bias.change_high
    assert bias.change == pytest.approx(0.03, abs=0.005)


def test_drift_widens_the_interval() -> None:
    widths = [
        _width(between(around(100_000, 0.005, drift), around(100_000, 0.005, drift, seed=1)).totals["total_ns"])
        for drift in (0.0, 0.05)
    ]
    assert widths[1] > 5 * widths[0]


def around(value: float, noise: float = 0.005, drift: float = 0.0, *, n: int = 30, seed: int = 0) -> Array:
    """`n` times around `value` with that relative spread, which grow by `drift` over all of them."""
    random = np.random.default_rng(seed)
    return np.asarray(value * (1 + noise * random.standard_normal(n) + drift * np.arange(n) / n), dtype=np.float64)


def between(a: Array, b: Array, **options: bool) -> compare.Comparison:
    return compare.samples([sample_of(a)], [sample_of(b)], **options)


def _width(effect: compare.effects.Effect) -> float:
    assert effect.change_low is not None
    assert effect.change_high is not None
    return effect.change_high - effect.change_low


def test_spikes_are_left_out_unless_they_are_kept() -> None:
    a, b = around(100_000), around(100_000, seed=1)
    b[[4, 20]] *= 4
    result = between(a, b)
    assert result.totals["total_ns"].change == pytest.approx(0.0, abs=0.005)
    assert [(c.subject, c.a, c.b) for c in result.checks if c.subject == "spikes"] == [("spikes", "0", "2")]
    assert between(a, b, keep_spikes=True).totals["total_ns"].change == pytest.approx(6 / 30, abs=0.01)


def test_several_runs_a_side_let_the_scatter_of_runs_decide() -> None:
    a, b = ([sample_of(around(1e5 * s, seed=i + k)) for i, s in enumerate((1.0, 1.02, 0.98))] for k in (0, 9))
    assert compare.samples(a[:1], b[1:2]).totals["total_ns"].is_certain  # by what the runs' own repetitions show
    several = compare.samples(a, b)
    assert (several.runs, several.repetitions) == ((3, 3), (90, 90))
    assert not several.totals["total_ns"].is_certain
    assert several.totals["total_ns"].change == pytest.approx(0.0, abs=0.003)
    # Student's t of 4 degrees over a scatter of 2 % in three runs a side.
    assert _width(several.totals["total_ns"]) == pytest.approx(2 * 2.776 * 0.02 * np.sqrt(2 / 3), rel=0.1)


# --- checks ------------------------------------------------------------------------------------


def _levels(result: compare.Comparison) -> dict[str, str]:
    return {check.subject: check.level for check in result.checks}


def test_like_runs_have_nothing_against_them_but_that_they_are_single(tmp_path: Path) -> None:
    assert _levels(two(tmp_path, EAGER, EAGER)) == {"runs": "note"}


def test_another_gpu_model_is_not_comparable(tmp_path: Path) -> None:
    runs = [opened(tmp_path / "a", [EAGER]), opened(tmp_path / "b", [EAGER], name="NVIDIA H100", uuid="GPU-1")]
    result = compare.runs(runs[:1], runs[1:])
    assert result.blocked
    assert _levels(result) == {"GPU model": "blocking", "GPU": "warning", "runs": "note"}
    assert result.checks[0].a == "NVIDIA H200, 132 SMs"
    assert result.checks[0].b == "NVIDIA H100, 132 SMs"


def test_clocks_too_far_apart_are_flagged(tmp_path: Path) -> None:
    runs = [opened(tmp_path / "a", [EAGER]), opened(tmp_path / "b", [EAGER], clock_hz=1_480_000_000)]
    result = compare.runs(runs[:1], runs[1:])
    check = next(c for c in result.checks if c.subject == "SM clock")
    assert (check.level, check.a) == ("warning", "median 1500 MHz (1500 to 1500)")
    assert "-1.3 % from A's" in check.message
    assert not result.blocked


def test_clocks_within_1_percent_and_rare_throttling_are_not_flagged() -> None:
    a = Facts(clocks=(Clock("GPU-0", 1_500_000_000, None, 0, 100),))
    b = Facts(clocks=(Clock("GPU-0", 1_490_000_000, None, 0, 96), Clock("GPU-0", 1_490_000_000, None, 0x4, 4)))
    throttled = replace(b, clocks=(*b.clocks, Clock("GPU-0", 1_490_000_000, None, 0x20, 2)))
    found = [
        _levels(compare.samples([sample_of(around(1e5), a)], [sample_of(around(1e5), facts)]))
        for facts in (b, throttled)
    ]
    assert found == [{"runs": "note"}, {"throttling": "warning", "runs": "note"}]


def test_drivers_and_hosts_are_compared(tmp_path: Path) -> None:
    def run(name: str, process: str, driver: str) -> na.Run:
        trace = Trace(tmp_path / name, process)
        trace.device()
        trace.process_row(gpu_driver_version=driver)
        kernel = trace.kernel_class("k")
        for number in range(20):
            trace.range("step", 1_000 * number, 1_000 * number + 900)
            trace.kernel(kernel, 1_000 * number, 500)
        trace.event("loss", "Lost.", count=3)
        trace.write()
        return na.open(tmp_path / name)

    result = compare.runs([run("a", PROCESS, "580.1")], [run("b", "node1-0-100", "590.1")])
    assert _levels(result) == {
        "host": "warning", "driver": "warning", "losses": "warning", "SM clock": "note", "runs": "note",
    }  # fmt: skip


def test_few_repetitions_are_pointed_out(tmp_path: Path) -> None:
    result = two(tmp_path, EAGER, EAGER, repetitions=6)
    assert _levels(result)["repetitions"] == "warning"


def test_repetitions_that_drift_through_the_whole_record_are_pointed_out(tmp_path: Path) -> None:
    result = two(tmp_path, replace(EAGER, drift=0.1), EAGER)
    assert _levels(result) == {"independence": "warning", "runs": "note"}
    assert result.checks[0].a == "2 degrees of freedom"


# --- baselines ---------------------------------------------------------------------------------


def test_a_baseline_gives_what_the_run_gave(tmp_path: Path) -> None:
    runs = [opened(tmp_path / n, [EAGER.slower(s)], seed=i) for i, (n, s) in enumerate((("a", 0.0), ("b", 0.03)))]
    read = [sample.read(run, "eager") for run in runs]
    baseline.save(tmp_path / "base", read[:1])
    loaded = compare.load(tmp_path / "base")
    whole, stored = compare.samples(read[:1], read[1:]), compare.samples(loaded, read[1:])
    assert loaded[0].classes == read[0].classes
    assert loaded[0].facts == read[0].facts
    assert stored.totals.keys() == whole.totals.keys()
    for name, effect in whole.totals.items():
        for figure in ("a", "change", "change_low", "change_high"):
            known, found = getattr(effect, figure), getattr(stored.totals[name], figure)
            assert found == (None if known is None else pytest.approx(known, rel=1e-5, abs=1e-7)), name
    assert [k.pair for k in stored.kernels] == [k.pair for k in whole.kernels]


def test_a_baseline_of_many_kernels_and_steps_is_small(tmp_path: Path) -> None:
    kernels = tuple(Kernel(f"kernel_{'x' * 100}<{n}>", 5_000 + 31 * n, 500, 1e6, 1e6, 1e6) for n in range(90))
    read = sample.read(opened(tmp_path / "run", [Variant("step", kernels, 0.02)], 150, counted=1), "step")
    baseline.save(tmp_path / "base", [read])
    assert (tmp_path / "base").stat().st_size < 100_000
    loaded = baseline.load(tmp_path / "base")[0]
    assert (loaded.batches, loaded.repetitions) == (64, 150)
    assert loaded.totals["kernel_ns"].mean() == pytest.approx(read.totals["kernel_ns"].mean(), rel=0.002)


def test_averaging_batches_keeps_the_interval(tmp_path: Path) -> None:
    run = opened(tmp_path / "run", [replace(EAGER, noise=0.02)], 240)
    read = sample.read(run, "eager")
    baseline.save(tmp_path / "base", [read])
    loaded = baseline.load(tmp_path / "base")
    widths = [_width(compare.samples(found, [read]).totals["total_ns"]) for found in ([read], loaded)]
    assert widths[1] == pytest.approx(widths[0], rel=0.35)


@pytest.mark.parametrize("content", [b"", b"PAR1 and nothing else", b"{}"])
def test_what_is_no_baseline_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "base").write_bytes(content)
    with pytest.raises(CompareError, match="is no baseline"):
        baseline.load(tmp_path / "base")


def test_a_shard_is_no_baseline_and_a_newer_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write(tmp_path / "run", [EAGER], 3)
    with pytest.raises(CompareError, match="version none"):
        baseline.load(next((run / "kernels").rglob("*.parquet")))
    monkeypatch.setattr(baseline, "VERSION", 2)
    baseline.save(tmp_path / "base", [sample.read(na.open(run), "eager")])
    monkeypatch.undo()
    with pytest.raises(CompareError, match="is a baseline of version 2, this nanalyze reads 1"):
        baseline.load(tmp_path / "base")


def test_a_baseline_is_not_overwritten_unasked(tmp_path: Path) -> None:
    read = [sample.read(opened(tmp_path / "run", [EAGER], 3), "eager")]
    baseline.save(tmp_path / "base", read)
    with pytest.raises(CompareError, match="Use --force"):
        baseline.save(tmp_path / "base", read)
    baseline.save(tmp_path / "base", read, force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "run"]


# --- outputs -----------------------------------------------------------------------------------


def test_the_dict_is_json_with_every_kernel_and_figure(fusion: compare.Comparison) -> None:
    content = json.loads(json.dumps(fusion.to_dict(), allow_nan=False))
    assert content["compare_version"] == 1
    assert content["a"] == {
        "name": "eager", "range": "eager", "runs": 1, "repetitions": 30, "verdict_shares": {"memory (DRAM)": 1.0},
    }  # fmt: skip
    assert content["speedup"]["value"] == pytest.approx(fusion.speedup[0])  # type: ignore[index]
    assert content["totals"]["gap_ns"]["difference"] == -4_000
    assert content["totals"]["gap_ns"]["change"] is None
    assert [k["match"] for k in content["kernels"]] == ["vanished", "new", "vanished", "vanished"]
    assert content["kernels"][1]["kernel_class_id_a"] is None
    assert isinstance(content["kernels"][1]["kernel_class_id_b"], str)


def test_the_shape_of_the_dict_is_documented(fusion: compare.Comparison) -> None:
    documented = (Path(__file__).parent.parent / "docs" / "compare.md").read_text(encoding="utf-8")
    content = fusion.to_dict()
    keys = {*content, *content["a"], *content["speedup"], *content["parts"][0], *content["totals"]}
    keys |= {"gate", "subject", "status", "kind", "threshold", "level", "message", "match", "mean_ns", "kernel_ns"}
    assert {key for key in keys if f"`{key}`" not in documented} == set()


def test_pandas_has_a_row_a_kernel(fusion: compare.Comparison) -> None:
    frame = fusion.to_pandas()
    assert frame["kernel"].tolist() == ["bias", "triton_fused_3", "gelu", "norm<float>"]
    assert frame["kernel_ns_b"].tolist()[1] == pytest.approx(90_000, rel=0.01)
    assert frame["dram_bytes_a"].tolist()[0] == 300e6


def test_the_plot_draws_into_the_axes_given_and_shows_each_part(fusion: compare.Comparison) -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    assert fusion.plot(axes) is axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "eager", "DRAM bytes moved", "kernel time per byte", "gaps between kernels", "fused",
    ]  # fmt: skip
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == pytest.approx([204, 95, 15, 4, 90], rel=0.03)
    lefts = [bar.get_x() for bar in axes.patches]
    assert lefts == pytest.approx([0, 109, 94, 90, 0], abs=1.0)
    moved = fusion.parts[0]
    assert moved.low is not None
    assert moved.high is not None
    start = (fusion.totals["step_ns"].a or 0) / 1e3
    whisker = next(list(line.get_xdata()) for line in axes.lines if list(line.get_ydata()) == [1, 1])
    assert whisker == pytest.approx([start + moved.low / 1e3, start + moved.high / 1e3])
    assert fusion.plot().get_xlabel() == "a repetition (us)"
