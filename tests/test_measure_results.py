"""What `recorder.measure` gives back: counters, derived and collected metrics, tables, plots, comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_cupti import value_of
from fake_measuring import MeasuringGpu, fails_half_way, value

import nanalyze.analysis as na
from nanalyze import recorder
from nanalyze.analysis import measured
from nanalyze.analysis.compare import sample
from nanalyze.rundir.errors import RunError
from nanalyze.rundir.measurement import WARM_UP

METRIC = "unit__a.sum"


@pytest.fixture
def gpu(measuring_gpu: MeasuringGpu) -> MeasuringGpu:
    return measuring_gpu


# --- counters ----------------------------------------------------------------------------------


def test_counters_come_from_separate_recordings(gpu: MeasuringGpu, tmp_path: Path) -> None:
    @recorder.measure(repetitions=3, counters=["unit__a.sum", "unit__b.avg"], counter_repetitions=2, warmup=1)
    def f(n: int) -> None:
        gpu.run("input", 77)
        with recorder.annotate("v"):
            gpu.run("k", 300 * n)
            gpu.run("l", 100 * n)

    result = f(2)
    table = result.to_pandas()
    assert value(table, "total_ns", "v") == 800
    both = [value_of("unit__a.sum", [name]) for name in (b"k", b"l")]
    assert value(table, "unit__a.sum", "v") == sum(both)
    k, m = (value_of("unit__b.avg", [name]) for name in (b"k", b"l"))
    assert value(table, "unit__b.avg", "v") == pytest.approx((300 * k + 100 * m) / 400)
    methods = table.set_index("metric")["method"]
    assert (methods["total_ns"], methods["unit__a.sum"]) == ("timeline", "exact")
    counts = table.set_index("metric")["repetitions"]
    assert (counts["total_ns"], counts["unit__a.sum"]) == (3, 2)
    with na.open(result.run_dir) as run:
        assert len(run.processes()) == 2
        assert len(run.damage()) == 0
        # Nothing but the variant's launches was measured, and no time was taken while it was.
        classes = run.sql(
            "SELECT DISTINCT c.name FROM exact AS e JOIN kernel_classes AS c USING (kernel_class_id) ORDER BY 1"
        )
        assert classes["name"].tolist() == ["k", "l"]


def test_counters_have_the_names_and_units_of_this_project(gpu: MeasuringGpu) -> None:
    gpu.cupti.values = {"dram__bytes_read.sum": 4096.0, "lts__t_sector_hit_rate.pct": 75.0}
    table = recorder.measure(
        {"f": lambda: gpu.run("k")}, repetitions=1, counters=["dram_read_bytes", "l2_hit_pct"]
    ).to_pandas()
    assert (value(table, "dram_read_bytes", "f"), value(table, "l2_hit_pct", "f")) == (4096, 75)
    units = table.set_index("metric")["unit"]
    assert (units["dram_read_bytes"], units["l2_hit_pct"]) == ("bytes", "%")


def test_configurations_of_one_kernel_class_have_counters_of_their_own(gpu: MeasuringGpu) -> None:
    gpu.cupti.values = {METRIC: 1.0}

    def f(n: int) -> None:
        gpu.cupti.values[METRIC] = 100.0 * n
        gpu.run("same", 50)

    table = recorder.measure(f, [1, 2], repetitions=1, counters=[METRIC]).to_pandas()
    assert (value(table, METRIC, "f", n=1), value(table, METRIC, "f", n=2)) == (100, 200)


def test_a_partly_measured_repetition_has_no_counters(gpu: MeasuringGpu) -> None:
    def f() -> None:
        gpu.run("plain", 50)
        gpu.run("ncclAllReduce", 50)  # never replayed

    table = recorder.measure(f, [()], repetitions=1, counters=[METRIC]).to_pandas()
    assert METRIC not in set(table["metric"])
    assert value(table, "total_ns", "f") == 100


def test_without_counters_times_stay(gpu: MeasuringGpu, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.cupti.fail("cuptiRangeProfilerEnable", 35)
    table = recorder.measure({"f": lambda: gpu.run("k", 40)}, repetitions=2, counters=[METRIC]).to_pandas()
    assert value(table, "total_ns", "f") == 40
    assert capsys.readouterr().err.count("INSUFFICIENT_PRIVILEGES") == 1


def test_times_without_and_with_the_profiler_stand_side_by_side(
    gpu: MeasuringGpu, capsys: pytest.CaptureFixture[str]
) -> None:
    durations = iter([*(100 + i % 3 for i in range(8)), *[100] * 4])
    gpu.cupti.values = {"gpu__time_duration.sum": 150.0, METRIC: 5.0}

    def f(n: int) -> None:
        gpu.run("k", next(durations))

    result = recorder.measure(f, [4], repetitions=8, warmup=0, counters=[METRIC])
    (row,) = result.perturbation().to_dict("records")
    assert (row["configuration"], row["n"], row["variant"]) == ("n=4", 4, "f")
    assert (row["undisturbed_ns"], row["profiled_ns"]) == (pytest.approx(100.875), 150)
    assert row["difference_pct"] == pytest.approx(100 * (150 / 100.875 - 1))
    assert row["difference_low_pct"] < row["difference_pct"] < row["difference_high_pct"]
    assert row["differs"]
    line = "kernels of 1 of 1 variants and configurations took another time under the profiler, most those of n=4, f"
    assert [each.startswith(f"{line} (+48.7 %)") for each in result.warnings] == [True]
    assert capsys.readouterr().err.count(line) == 1


def test_times_that_agree_are_no_warning(gpu: MeasuringGpu) -> None:
    gpu.cupti.values = {"gpu__time_duration.sum": 100.0, METRIC: 5.0}
    result = recorder.measure({"f": lambda: gpu.run("k", 100)}, repetitions=4, counters=[METRIC])
    assert result.perturbation()["differs"].tolist() == [False]
    assert result.warnings == []
    without = recorder.measure({"f": lambda: gpu.run("k", 100)}, repetitions=4, counters=None)
    assert list(without.perturbation().columns) == list(result.perturbation().columns)
    assert len(without.perturbation()) == 0


# --- derived, normalised, compared -------------------------------------------------------------


def test_derived_metrics_have_units_and_intervals(gpu: MeasuringGpu) -> None:
    durations = iter([100, 200, 100, 200, 100, 200, 100, 200] * 3)

    def f(n: int) -> None:
        gpu.run("k", next(durations))

    result = recorder.measure(
        f, [5], repetitions=8, warmup=0, counters=None,
        derive={"rate": (lambda m, n: n * 1000 / m["total_ns"], "GB/s"), "missing": lambda m, n: m["nothing"]},
    )  # fmt: skip
    (row,) = result.to_pandas().query("metric == 'rate'").to_dict("records")
    assert (row["unit"], row["method"]) == ("GB/s", "derived")
    assert row["value"] == pytest.approx((50 + 25) / 2)
    assert row["low"] < row["value"] < row["high"]
    assert "missing" not in result.metrics
    assert result.warnings == ["derived metric 'missing', n=5: needs 'nothing', which was not measured"]


def test_a_derived_metric_that_fails_leaves_the_measurement(
    gpu: MeasuringGpu, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(m: Any, n: int) -> float:
        raise TypeError("no\nsuch thing")

    derive = {"wrong": wrong, "endless": lambda m, n: float("inf"), "fine": lambda m, n: 2 * m["total_ns"]}
    result = recorder.measure(lambda n: gpu.run("k", 10), [1, 2], repetitions=2, warmup=0, counters=None, derive=derive)
    assert result.warnings == [
        "derived metric 'wrong', n=1: TypeError: no",
        "derived metric 'endless', n=1: ValueError: gives no finite number",
    ]
    assert value(result.to_pandas(), "fine", "<lambda>", n=2) == 20
    assert "nanalyze: derived metric 'wrong', n=1: TypeError: no\n" in capsys.readouterr().err


def test_normalised_to_a_variant(gpu: MeasuringGpu) -> None:
    result = recorder.measure(
        {"a": lambda: gpu.run("k", 400), "b": lambda: gpu.run("l", 100)}, repetitions=3, counters=None
    )
    table = result.to_pandas(normalize="a").query("metric == 'total_ns'").set_index("variant")
    assert (table["ratio"]["a"], table["ratio"]["b"]) == (1, 0.25)
    with pytest.raises(RunError, match=r"normalize='c': no such variant. There are a, b."):
        result.to_pandas(normalize="c")


def test_compare_takes_one_configuration(gpu: MeasuringGpu) -> None:
    @recorder.measure(configurations={"n": [1, 4]}, repetitions=12, counters=None)
    def f(n: int) -> None:
        with recorder.annotate("a"):
            gpu.run("a", 1000 * n)
        with recorder.annotate("b"):
            gpu.run("b", 500 if n == 1 else 1000)

    result = f()
    for n, ratio in ((1, 2), (4, 4)):
        found = result.compare("a", "b", n=n)
        assert found.repetitions == (12, 12)
        assert found.totals["total_ns"].a / found.totals["total_ns"].b == ratio
    with pytest.raises(RunError, match=r"no parameters: name one configuration \(2 match\). There are: n=1, n=4."):
        result.compare("a", "b")


def test_warm_up_is_no_step_of_a_comparison_of_runs(gpu: MeasuringGpu, tmp_path: Path) -> None:
    @recorder.measure(configurations=range(6), repetitions=1, warmup=9, counters=None)
    def f(n: int) -> None:
        gpu.run("input", 1)
        with recorder.annotate("v"):
            gpu.run("k", 100)

    with na.open(f().run_dir) as run:
        assert WARM_UP in run.query("compare_steps")["name"].tolist()
        assert WARM_UP not in sample.steps(run)


def test_measurements_of_one_configuration_in_one_run_are_not_mixed(gpu: MeasuringGpu, tmp_path: Path) -> None:
    functions = {"a": lambda: gpu.run("a", 30), "b": lambda: gpu.run("b", 20)}
    options: dict[str, Any] = {"repetitions": 2, "warmup": 0, "counters": None, "run_dir": tmp_path / "run"}
    recorder.measure(functions, **options)
    second = recorder.measure(functions, append=True, **options)
    with pytest.raises(RunError, match="holds several measurements of measure, which cannot be compared apart"):
        second.compare("a", "b")


def test_comparing_a_variant_that_failed_is_warned_of(gpu: MeasuringGpu) -> None:
    functions = {"f": fails_half_way(gpu, 12, "out of memory"), "g": lambda: gpu.run("c", 10)}
    result = recorder.measure(functions, repetitions=12, warmup=0, counters=None)
    check = next(check for check in result.compare("f", "g").checks if check.subject == "failures")
    assert (check.level, check.a, check.b) == ("warning", "MemoryError: out of memory", "none")


def test_plots(gpu: MeasuringGpu) -> None:
    from matplotlib.figure import Figure

    functions = {"a": lambda n: gpu.run("a", 1000 * n), "b": lambda n: gpu.run("b", 500 * n)}
    result = recorder.measure(functions, {"n": [1, 2, 4]}, repetitions=2, counters=None)
    axes = Figure().add_subplot()
    assert result.plot(axes=axes) is axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert lines == {"a": [[1, 1], [2, 2], [4, 4]], "b": [[1, 0.5], [2, 1], [4, 2]]}
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("n", "total (µs)")
    panel = result.plot(where={"n": 4})
    assert [bar.get_height() for bar in panel.patches] == [4, 2]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["n=4"]
    one = recorder.measure(functions, [3], repetitions=2, counters=None).plot("launches")
    assert [bar.get_height() for bar in one.patches] == [1, 1]
    with pytest.raises(RunError, match=r"x='m': no such parameter. There are n."):
        result.plot(x="m")
    with pytest.raises(RunError, match=r"dram_bytes: was not measured. There are total_ns"):
        result.plot("dram_bytes")


def test_plots_of_a_kind_with_ratios_and_numbers(gpu: MeasuringGpu) -> None:
    functions = {"a": lambda n: gpu.run("a", 1000 * n), "b": lambda n: gpu.run("b", 250 * n)}
    result = recorder.measure(functions, {"n": [1, 2]}, repetitions=2, counters=None)
    bars = result.plot(kind="bar", annotate=True)
    assert [bar.get_height() for bar in bars.patches] == [1, 2, 0.25, 0.5]
    assert [text.get_text() for text in bars.texts] == ["1", "2", "0.25", "0.5"]
    ratio = result.plot(normalize="a", annotate=True)
    assert {line.get_label(): list(line.get_ydata()) for line in ratio.get_lines()} == {"a": [1, 1], "b": [0.25, 0.25]}
    assert ratio.get_ylabel() == "total, ratio"
    assert len(ratio.texts) == 4
    table = result.to_pandas(normalize="a").query("metric == 'total_ns' and variant == 'a'")
    assert table[["ratio", "ratio_low", "ratio_high"]].to_numpy().tolist() == [[1, 1, 1]] * 2  # over itself
    with pytest.raises(RunError, match="kind='pie': must be line or bar"):
        result.plot(kind="pie")
    with pytest.raises(RunError, match="kind='line': name the parameter to draw over"):
        result.plot(kind="line", where={"n": 1})


def test_panels_side_by_side_have_one_unit(gpu: MeasuringGpu) -> None:
    def f(n: int, slow: bool) -> None:
        gpu.run("k", 900 * n if slow else 2)

    grid = recorder.measure(f, {"n": [2, 4], "slow": [True, False]}, repetitions=2, counters=None).panels(
        columns="slow"
    )
    assert [axes.get_ylabel() for axes in grid.flat] == ["total (µs)"] * 2
    assert [list(axes.get_lines()[0].get_ydata()) for axes in grid.flat] == [[1.8, 3.6], [0.002, 0.002]]


def test_a_huge_interval_runs_out_of_the_picture(gpu: MeasuringGpu) -> None:
    durations = iter([1000, 10, 1000])
    axes = recorder.measure({"f": lambda: gpu.run("k", next(durations))}, repetitions=2, warmup=1, counters=None).plot(
        annotate=True
    )
    assert axes.get_ylim() == (0, pytest.approx(1.1 * 1.5 * 505))


def test_labels_under_bars_leave_out_what_all_have_in_common(gpu: MeasuringGpu) -> None:
    def f(n: int, kind: str, other: str) -> None:
        gpu.run("k", 1000 * n)

    configurations = {"n": [1, 2], "kind": ["a" * 20, "b" * 20], "other": ["same"]}
    axes = recorder.measure(f, configurations, repetitions=2, counters=None).plot(kind="bar")
    labels = axes.get_xticklabels()
    assert labels[0].get_text() == f"n=1, kind={'a' * 20}"
    assert {label.get_rotation() for label in labels} == {30}


def test_panels_are_one_a_value_of_each_parameter(gpu: MeasuringGpu) -> None:
    def f(n: int, dtype: str, transpose: bool) -> None:
        gpu.run("k", 1000 * n * (2 if dtype == "float32" else 1) * (3 if transpose else 1))

    configurations = {"n": [1, 2], "dtype": ["float32", "float16"], "transpose": [False, True]}
    result = recorder.measure(f, configurations, repetitions=2, counters=None)
    grid = result.panels("total_ns", rows="dtype", columns="transpose")
    assert grid.shape == (2, 2)
    assert [axes.get_title() for axes in grid.flat] == [
        "dtype=float32, transpose=False", "dtype=float32, transpose=True",
        "dtype=float16, transpose=False", "dtype=float16, transpose=True",
    ]  # fmt: skip
    assert [list(axes.get_lines()[0].get_ydata()) for axes in grid.flat] == [[2, 4], [6, 12], [1, 2], [3, 6]]
    assert [len({axes.get_ylim() for axes in row}) for row in grid] == [1, 1]
    assert grid[0, 0].get_ylim() != grid[1, 0].get_ylim()
    assert result.panels(columns="transpose", where={"dtype": "float16"}).shape == (1, 2)
    with pytest.raises(RunError, match=r"'m': no such parameter. There are n, dtype, transpose."):
        result.panels(rows="m")


# --- collected, combined, each repetition --------------------------------------------------------


def test_what_is_collected_after_each_call_is_a_metric(gpu: MeasuringGpu, tmp_path: Path) -> None:
    powers = iter([100, 110, None, 130, 100, float("nan"), 110, 130])

    def power(n: int) -> float | None:
        gpu.run("stray")  # of no variant
        return next(powers)

    def f(n: int) -> None:
        with recorder.annotate("a"):
            gpu.run("a", 10)
        with recorder.annotate("b"):
            gpu.run("b", 20)

    result = recorder.measure(
        f, [1, 2], repetitions=4, warmup=1, counters=None, run_dir=tmp_path / "run",
        collect_each={"power_w": (power, "W"), "plain": lambda n: n},
    )  # fmt: skip
    table = result.to_pandas()
    for variant in "ab":
        (row,) = table.query("metric == 'power_w' and n == 1 and variant == @variant").to_dict("records")
        assert (row["value"], row["unit"], row["method"], row["repetitions"]) == (
            pytest.approx(340 / 3),
            "W",
            "collected",
            3,
        )
        assert value(table, "plain", variant, n=2) == 2
        assert value(table, "launches", variant, n=2) == 1
    assert measured.load(tmp_path / "run").to_pandas().equals(table)


def test_what_is_collected_belongs_to_the_call_before_it(gpu: MeasuringGpu) -> None:
    last: list[int] = []

    def call(number: int) -> None:
        last[:] = [number]
        gpu.run("k", 10)

    table = recorder.measure(
        {"one": lambda: call(1), "two": lambda: call(2)},
        repetitions=5,
        counters=None,
        collect_each={"x": lambda: last[0]},
    ).to_pandas()
    assert (value(table, "x", "one"), value(table, "x", "two")) == (1, 2)


def test_a_collector_that_fails_ends_the_variant(gpu: MeasuringGpu) -> None:
    result = recorder.measure(
        {"f": lambda: gpu.run("k", 10)}, repetitions=3, counters=None, collect_each={"x": lambda: float("none")}
    )
    assert result.failures == {("measure", "f"): "ValueError: could not convert string to float: 'none'"}


@pytest.mark.parametrize(
    ("how", "wanted"),
    [("sum", 400), ("max", 300), ("min", 100), ("mean", 250), (lambda x, y: x + 10 * y, 100 + 3000)],
)
def test_counters_of_several_launches_are_combined_as_asked(
    gpu: MeasuringGpu, tmp_path: Path, how: Any, wanted: float
) -> None:
    gpu.cupti.values = {"unit__b.avg": 100.0}

    def f() -> None:
        gpu.cupti.values["unit__b.avg"] = 100.0
        gpu.run("k", 100)
        gpu.cupti.values["unit__b.avg"] = 300.0
        gpu.run("l", 300)

    table = recorder.measure(
        {"f": f}, repetitions=1, counters=["unit__b.avg"], combine={"unit__b.avg": how}, run_dir=tmp_path / "run"
    ).to_pandas()
    assert value(table, "unit__b.avg", "f") == wanted
    again = measured.load(tmp_path / "run", combine={"unit__b.avg": how}).to_pandas()
    assert value(again, "unit__b.avg", "f") == wanted


def test_each_repetition_can_be_had(gpu: MeasuringGpu) -> None:
    durations = iter([50, 100, 200, 300])  # a single function is called once before, to see its annotations
    result = recorder.measure(lambda n: gpu.run("k", next(durations)), [7], repetitions=3, warmup=0, counters=None)
    table = result.repetitions().query("metric == 'total_ns'")
    assert table[["n", "variant", "repetition", "value", "unit"]].to_numpy().tolist() == [
        [7, "<lambda>", 0, 100, "ns"], [7, "<lambda>", 1, 200, "ns"], [7, "<lambda>", 2, 300, "ns"],
    ]  # fmt: skip


def test_what_a_prompt_and_a_notebook_show(gpu: MeasuringGpu, tmp_path: Path) -> None:
    functions = {"<b>a</b>": lambda n: gpu.run("a", 10 * n), "b": lambda n: gpu.run("b", 5)}
    result = recorder.measure(functions, [1, 2], repetitions=2, counters=None, run_dir=tmp_path / "run")
    run = str(tmp_path / "run")
    assert repr(result) == f"<Measured {run!r}: 2 configurations, 2 variants, 0 failures, 0 warnings>"
    page = result._repr_html_()
    assert "&lt;b&gt;a&lt;/b&gt;" in page
    assert "<b>a" not in page
