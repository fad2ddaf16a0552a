"""`recorder.measure` on the fake GPU: what is called in which order, and what comes out."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner
from fake_gpu import read_table
from fake_measuring import MeasuringGpu, fails_half_way, value

import nanalyze.analysis as na
from nanalyze import commands, recorder
from nanalyze.analysis import measured, measured_read
from nanalyze.recorder import measuring
from nanalyze.rundir.errors import RecorderError, RunError
from nanalyze.rundir.measurement import WARM_UP

METRIC = "unit__a.sum"


@pytest.fixture
def gpu(measuring_gpu: MeasuringGpu) -> MeasuringGpu:
    return measuring_gpu


# --- times -------------------------------------------------------------------------------------


def test_annotations_inside_are_the_variants(gpu: MeasuringGpu, tmp_path: Path) -> None:
    @recorder.measure(configurations={"n": [1, 2]}, repetitions=4, counters=None, run_dir=tmp_path / "run")
    def norm(n: int) -> int:
        gpu.run("make_input", 5)
        with recorder.annotate("eager"):
            gpu.run("a", 1000 * n)
            gpu.run("b", 100)
        with recorder.annotate("fused"), recorder.annotate("deeper"):
            gpu.run("ab", 700 * n)
        return 10 * n

    result = norm()
    assert result.run_dir == tmp_path / "run"
    assert result.variants == ["eager", "fused"]
    table = result.to_pandas()
    assert value(table, "total_ns", "eager", n=1) == 1100
    assert value(table, "total_ns", "eager", n=2) == 2100
    assert value(table, "total_ns", "fused", n=2) == 1400
    assert value(table, "launches", "eager", n=1) == 2
    assert set(table["repetitions"]) == {4}
    assert set(table["method"]) == {"timeline"}
    assert result.values == {("n=1", "norm"): 10, ("n=2", "norm"): 20}
    assert norm.function(7) == 70  # the original is there, and measures nothing


def test_a_function_without_annotations_is_its_own_variant(gpu: MeasuringGpu) -> None:
    def work(n: int) -> None:
        gpu.run("k", 10 * n)

    result = recorder.measure(work, [3, 5], repetitions=2, counters=None)
    table = result.to_pandas()
    assert (value(table, "total_ns", "work", n=3), value(table, "total_ns", "work", n=5)) == (30, 50)
    assert result.run_dir.name.startswith("measure-work-")


def test_an_annotation_may_have_the_functions_name(gpu: MeasuringGpu) -> None:
    @recorder.measure(repetitions=2, counters=None)
    def f() -> None:
        gpu.run("input", 900)
        with recorder.annotate("f"):
            gpu.run("k", 100)

    assert value(f().to_pandas(), "total_ns", "f") == 100


def test_several_functions_get_what_setup_made(gpu: MeasuringGpu, tmp_path: Path) -> None:
    made: list[int] = []

    def setup(n: int, scale: int = 1) -> tuple[int, int]:
        made.append(n)
        gpu.run("setup", 1_000_000)
        return n, scale

    def slow(x: int, scale: int) -> int:
        gpu.run("slow", 200 * x * scale)
        return x

    def fast(x: int, scale: int) -> int:
        gpu.run("fast", 100 * x * scale)
        return -x

    result = recorder.measure(
        [slow, fast], {"n": [2], "scale": [1, 3]}, setup=setup, repetitions=3, counters=None, run_dir=tmp_path / "run"
    )
    table = result.to_pandas()
    assert value(table, "total_ns", "slow", scale=3) == 1200
    assert value(table, "total_ns", "fast", scale=1) == 200
    assert made == [2, 2]  # once a configuration
    assert result.values["n=2, scale=1", "fast"] == -2


def test_the_order_is_random_and_repeatable(gpu: MeasuringGpu, tmp_path: Path) -> None:
    orders = []
    for number, seed in enumerate((1, 1, 2)):
        gpu.log.clear()
        functions = {name: (lambda name=name: gpu.run(name)) for name in "abcd"}
        recorder.measure(functions, repetitions=6, warmup=0, counters=None, seed=seed, run_dir=tmp_path / str(number))
        orders.append(list(gpu.log))
    assert orders[0] == orders[1] != orders[2]
    repetitions = [orders[0][i : i + 4] for i in range(0, 24, 4)]
    assert all(sorted(each) == list("abcd") for each in repetitions)
    assert len({tuple(each) for each in repetitions}) > 2
    about = json.loads(read_table(tmp_path / "2", "ranges")[0]["attributes"])["measure"]
    assert (about["seed"], about["repetitions"], about["cache"], about["clocks"]) == (2, 6, "none", "none")


def test_warm_up_is_in_a_range_of_its_own(gpu: MeasuringGpu, tmp_path: Path) -> None:
    recorder.measure({"f": lambda: gpu.run("k")}, repetitions=2, warmup=5, counters=None, run_dir=tmp_path / "run")
    assert gpu.log == ["k"] * 7
    assert [row["name"] for row in read_table(tmp_path / "run", "ranges")].count("f") == 2
    with na.open(tmp_path / "run") as run:
        found = run.sql(
            "SELECT r.name, count(*) AS n FROM kernels JOIN ranges AS r USING (process, range_id) GROUP BY 1"
        )
    assert dict(found.to_numpy()) == {WARM_UP: 5, "f": 2}


def test_the_report_shows_warm_up_apart(gpu: MeasuringGpu, tmp_path: Path) -> None:
    recorder.measure(
        {"f": lambda: gpu.run("k", 1000)}, repetitions=2, warmup=5, counters=None, run_dir=tmp_path / "run"
    )
    line = "5 launches, 5.00 µs of kernel time, were set-up and warm-up of recorder.measure"
    assert line in report_text(tmp_path / "run")
    with recorder.record(tmp_path / "other"), recorder.annotate("f"):
        gpu.run("k")
    assert "recorder.measure" not in report_text(tmp_path / "other")


def report_text(run: Path) -> str:
    done = CliRunner().invoke(commands.main, ["report", str(run), "--format", "md"])
    assert done.exit_code == 0, done.output
    return done.output.replace("\u202f", " ").replace("\u2009", " ")


def test_configurations_are_ranges_with_attributes(gpu: MeasuringGpu, tmp_path: Path) -> None:
    def f(n: int, kind: str) -> None:
        gpu.run("k")

    recorder.measure(f, [(8, "x")], repetitions=1, counters=None, run_dir=tmp_path / "run", collect={"half": _half})
    with na.open(tmp_path / "run") as run:
        names = run.sql("SELECT name, attributes, depth FROM ranges ORDER BY range_id")
    assert names["name"].tolist() == ["measure f", WARM_UP, "n=8, kind=x", "f"]
    attributes = json.loads(names["attributes"][2])
    assert (attributes["n"], attributes["kind"], attributes["measure"]["collected"]) == (8, "x", {"half": 4.0})
    assert names["depth"].tolist() == [0, 0, 0, 1]


def _half(n: int, kind: str) -> float:
    return n / 2


def test_parameters_may_be_called_what_annotate_takes(gpu: MeasuringGpu, tmp_path: Path) -> None:
    def f(name: str, flops: int, bytes: int) -> None:
        gpu.run("k", flops)

    table = recorder.measure(f, [("x", 7, 9)], repetitions=1, counters=None, run_dir=tmp_path / "run").to_pandas()
    assert value(table, "total_ns", "f", name="x", flops=7, bytes=9) == 7
    block = read_table(tmp_path / "run", "ranges")[-1]
    assert (block["name"], block["flops"]) == ("name=x, flops=7, bytes=9", None)


def test_what_was_collected_is_a_column(gpu: MeasuringGpu) -> None:
    result = recorder.measure(
        lambda n: gpu.run("k"), [4, 6], repetitions=1, counters=None, collect={"half": lambda n: n / 2}
    )
    assert result.to_wide()["half"].tolist() == [2, 3]


def test_gaps_and_spans(gpu: MeasuringGpu) -> None:
    def f() -> None:
        gpu.run("a", 1000)
        time.sleep(0.002)
        gpu.run("b", 500)

    table = recorder.measure(f, [()], repetitions=3, counters=[METRIC]).to_pandas()
    step, gap = value(table, "step_ns", "f"), value(table, "gap_ns", "f")
    assert gap > 2_000_000
    assert step == gap + 1500
    assert value(table, "host_ns", "f") > 2_000_000


def test_kernels_side_by_side_leave_no_gap(gpu: MeasuringGpu) -> None:
    def f() -> None:
        at = time.time_ns()
        for start, end in ((0, 1000), (100, 200), (1500, 1600)):
            gpu.launch("k", start=at + start, end=at + end)

    table = recorder.measure(f, [()], repetitions=2, counters=None).to_pandas()
    found = [value(table, metric, "f") for metric in ("total_ns", "step_ns", "gap_ns", "launches")]
    assert found == [1200, 1600, 500, 3]


def test_a_repetition_with_a_launch_of_unknown_time_is_left_out(gpu: MeasuringGpu) -> None:
    ends = iter([{}, {"start": 0, "end": 0}, {}])

    def f() -> None:
        gpu.run("a", 100)
        gpu.launch("b", duration_ns=50, **next(ends))

    table = recorder.measure({"f": f}, repetitions=3, warmup=0, counters=None).to_pandas()
    assert value(table, "total_ns", "f") == 150
    assert set(table["repetitions"]) == {2}


def test_nothing_is_switched_off_in_between(gpu: MeasuringGpu, tmp_path: Path) -> None:
    recorder.measure({"f": lambda: gpu.run("k")}, repetitions=1, counters=None, run_dir=tmp_path / "run")
    settings = json.loads(read_table(tmp_path / "run", "processes")[0]["settings"])
    assert (settings["pause_pct"], settings["exact"], settings["samples"]) == (0, None, None)


def test_ignored_kernels_count_for_nothing(gpu: MeasuringGpu) -> None:
    def f() -> None:
        gpu.run("noise_fill", 900)
        gpu.run("real", 100)

    table = recorder.measure(f, [()], repetitions=2, counters=None, ignore="fill").to_pandas()
    assert (value(table, "total_ns", "f"), value(table, "launches", "f")) == (100, 1)


def test_repetitions_until_the_interval_is_narrow(gpu: MeasuringGpu, tmp_path: Path) -> None:
    durations = iter([1000, 2000, 1000, 1900] + [1500, 1510] * 500)

    def f() -> None:
        gpu.run("k", next(durations))

    narrow = recorder.measure(
        {"f": f}, repetitions=4, until_pct=20, warmup=0, counters=None, run_dir=tmp_path / "narrow"
    ).to_pandas()
    row = narrow[narrow["metric"] == "total_ns"].iloc[0]
    assert row["repetitions"] in (8, 16, 32)
    assert (row["high"] - row["low"]) / 2 <= 0.2 * row["value"]
    durations = iter([1000, 2000] * 2000)
    stopped = recorder.measure(
        {"f": f}, repetitions=4, until_pct=1e-3, limit_s=0.2, warmup=0, counters=None, run_dir=tmp_path / "stopped"
    ).to_pandas()
    assert stopped["repetitions"].iloc[0] < 500


def test_a_time_limit_ends_a_configuration(gpu: MeasuringGpu) -> None:
    def f() -> None:
        gpu.run("k")
        time.sleep(0.05)

    table = recorder.measure({"f": f}, repetitions=1000, limit_s=0.3, warmup=0, counters=None).to_pandas()
    assert 2 <= table["repetitions"].iloc[0] <= 7


# --- failures ----------------------------------------------------------------------------------


def test_a_failing_configuration_is_recorded_and_the_rest_goes_on(
    gpu: MeasuringGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def f(n: int) -> None:
        if n == 2:
            raise MemoryError("CUDA out of memory: 40 GiB")
        gpu.run("k", n)

    result = recorder.measure(f, [1, 2, 3], repetitions=2, counters=[METRIC], run_dir=tmp_path / "run")
    table = result.to_pandas()
    assert result.failures == {("n=2", "f"): "MemoryError: CUDA out of memory: 40 GiB"}
    assert value(table, "total_ns", "f", n=3) == 3
    (failed,) = table[table["n"] == 2].to_dict("records")
    assert pd.isna(failed["metric"])
    assert failed["error"] == "MemoryError: CUDA out of memory: 40 GiB"
    assert "n=2, f: failed: MemoryError" in capsys.readouterr().err
    assert measured.load(tmp_path / "run").failures == result.failures  # from the run directory alone


def test_a_failing_variant_leaves_the_others(gpu: MeasuringGpu) -> None:
    calls = []

    def bad() -> None:
        calls.append(1)
        raise ValueError("no\nmore")

    result = recorder.measure({"bad": bad, "good": lambda: gpu.run("k", 9)}, repetitions=3, counters=None, warmup=0)
    assert result.failures == {("measure", "bad"): "ValueError: no"}
    assert value(result.to_pandas(), "total_ns", "good") == 9
    assert len(calls) == 1  # not tried again


def test_what_a_failure_held_is_let_go(gpu: MeasuringGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import weakref
    from types import SimpleNamespace

    emptied: list[list[Any]] = []
    torch = SimpleNamespace(
        cuda=SimpleNamespace(
            is_initialized=lambda: True,
            empty_cache=lambda: emptied.append([reference() for reference in kept]),
            current_stream=lambda: SimpleNamespace(cuda_stream=0),
        )
    )
    monkeypatch.setitem(sys.modules, "torch", torch)

    class Tensor:
        pass

    kept: list[weakref.ref[Tensor]] = []

    def f() -> None:
        local = Tensor()
        kept.append(weakref.ref(local))
        try:
            inner()
        except MemoryError as error:
            raise ValueError("out of memory") from error

    def inner() -> None:
        local = Tensor()
        kept.append(weakref.ref(local))
        raise MemoryError("out of memory")

    recorder.measure({"f": f, "g": lambda: gpu.run("k")}, repetitions=1, counters=None)
    assert emptied[0] == [None, None]  # before PyTorch is asked to give its cache back


@pytest.mark.parametrize(("free_share", "times"), [(0.6, 0), (0.4, 2)])
def test_a_frameworks_cache_stays_until_memory_is_scarce(
    gpu: MeasuringGpu, monkeypatch: pytest.MonkeyPatch, free_share: float, times: int
) -> None:
    import sys
    from types import SimpleNamespace

    emptied: list[int] = []
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        empty_cache=lambda: emptied.append(1),
        current_stream=lambda: SimpleNamespace(cuda_stream=0),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    gpu.bindings.free_bytes = int(free_share * gpu.bindings.free_bytes)
    recorder.measure({"f": lambda n: gpu.run("k")}, [1, 2], repetitions=1, counters=None)
    assert len(emptied) == times


def test_garbage_is_looked_for_among_new_objects_only(gpu: MeasuringGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    import gc

    frozen: list[int] = []
    monkeypatch.setattr(measuring.gc, "collect", lambda: frozen.append(gc.get_freeze_count()))
    gpu.bindings.free_bytes //= 3  # so that it is looked for after each configuration
    recorder.measure({"f": lambda: gpu.run("k")}, repetitions=1, counters=None)
    assert frozen[0] == 0  # garbage of before is not kept
    assert [count > 10_000 for count in frozen[1:]] == [True]
    assert gc.get_freeze_count() == 0


def test_objects_that_the_job_froze_stay_frozen(gpu: MeasuringGpu) -> None:
    import gc

    gc.freeze()
    try:
        recorder.measure({"f": lambda: gpu.run("k")}, repetitions=1, counters=None)
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()


def test_an_error_that_shows_at_synchronisation_is_the_variants(gpu: MeasuringGpu) -> None:
    def crash() -> None:
        gpu.run("crash")
        gpu.bindings.codes["cuCtxSynchronize"] = 700

    result = recorder.measure({"crash": crash}, repetitions=2, counters=None, warmup=0)
    assert result.failures == {("measure", "crash"): "RecorderError: the CUDA driver answered CUDA_ERROR_700"}
    gpu.bindings.codes.clear()


def test_ctrl_c_ends_everything_and_writes(gpu: MeasuringGpu, tmp_path: Path) -> None:
    calls = []

    def f() -> None:
        calls.append(1)
        gpu.run("k")
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recorder.measure({"f": f}, repetitions=9, warmup=0, run_dir=tmp_path / "run")
    assert len(calls) == 3
    assert len(read_table(tmp_path / "run", "kernels")) == 3
    (row,) = measured.load(tmp_path / "run").to_pandas().query("metric == 'launches'").to_dict("records")
    assert row["repetitions"] == 2  # the third call did not end


def test_a_call_that_fails_half_way_counts_for_nothing(gpu: MeasuringGpu) -> None:
    functions = {"f": fails_half_way(gpu, 4, "CUDA out of memory"), "g": lambda: gpu.run("c", 10)}
    result = recorder.measure(functions, repetitions=6, warmup=0, counters=None)
    table = result.to_pandas().query("metric == 'total_ns'").set_index("variant")
    assert (table["value"]["f"], table["repetitions"]["f"]) == (150, 3)
    assert (table["value"]["g"], table["repetitions"]["g"]) == (10, 6)
    assert result.failures == {("measure", "f"): "MemoryError: CUDA out of memory"}


def test_annotations_of_a_call_that_fails_count_for_nothing(gpu: MeasuringGpu) -> None:
    calls = []

    @recorder.measure(repetitions=6, warmup=1, counters=None)
    def f() -> None:
        calls.append(1)
        with recorder.annotate("a"):
            gpu.run("a", 100)
        with recorder.annotate("b"):
            gpu.run("b1", 20)
            if len(calls) == 4:
                raise MemoryError("CUDA out of memory")
            gpu.run("b2", 30)

    table = f().to_pandas().query("metric == 'total_ns'").set_index("variant")
    assert (table["value"]["a"], table["value"]["b"]) == (100, 50)
    assert table["repetitions"].tolist() == [2, 2]
    assert table["error"].tolist() == ["MemoryError: CUDA out of memory"] * 2


def test_calls_without_a_kernel_say_so(gpu: MeasuringGpu) -> None:
    result = recorder.measure({"idle": lambda: None}, repetitions=2, counters=None)
    assert result.failures == {("measure", "idle"): "none of its calls has a kernel with a known time"}


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 3}, "unknown option 'repeats': measure takes run_dir"),
        ({"repetitions": 0}, "repetitions=0: must be a whole number of at least 1"),
        ({"until_pct": -1}, "until_pct=-1: must be a number above 0, or None"),
        ({"cache": "hot"}, "cache='hot': must be one of none, cold, warm"),
        ({"clocks": "turbo"}, "clocks='turbo': must be 'none', 'base', 'boost' or a number of MHz"),
        ({"clocks": True}, "clocks=True: must be"),
        ({"counters": "some"}, "counters='some': give 'full', 'verdict', a list of counters or None"),
        ({"ignore": "("}, "ignore='(': not a regular expression"),
        ({"combine": {"x": "median"}}, "combine: 'x' by 'median': give sum, mean, max, min or a function of two"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecorderError) as caught:
        recorder.measure(lambda: pytest.fail("it ran"), [()], **options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("configurations", "message"),
    [
        ([], "configurations: there is none"),
        (3, "configurations=3: give a list of them"),
        ([(1, 2)], "configuration (1, 2): 2 values for 1 named parameters (n)"),
        ([{"measure": 1}], "configuration {'measure': 1}: a parameter cannot be called 'measure'"),
    ],
)
def test_wrong_configurations_are_refused(configurations: Any, message: str) -> None:
    with pytest.raises(RecorderError) as caught:
        recorder.measure(lambda n: pytest.fail("it ran"), configurations)
    assert str(caught.value).startswith(message)


def test_labels_are_unique() -> None:
    class Odd:
        def __str__(self) -> str:
            return "odd"

    found = measuring.sweep.configurations([Odd(), Odd(), 3, max], ["x"])
    assert [each.label for each in found] == ["x=odd #0", "x=odd #1", "x=3", "x=max"]
    assert [each.attributes for each in found] == [{"x": "odd"}, {"x": "odd"}, {"x": 3}, {"x": "max"}]


def test_it_is_not_measured_under_another_recording(gpu: MeasuringGpu, tmp_path: Path) -> None:
    with recorder.record(tmp_path / "run"), pytest.raises(RecorderError, match="already recording"):
        recorder.measure({"f": lambda: None}, counters=None)


def test_it_is_not_measured_under_nanalyze_record(
    gpu: MeasuringGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorder.record(tmp_path / "run"):
        monkeypatch.setattr(recorder, "_is_whole_process", True)
        with pytest.raises(RecorderError, match="run the script without `nanalyze record`"):
            recorder.measure({"f": lambda: None}, counters=None)
        monkeypatch.setattr(recorder, "_is_whole_process", False)


def test_two_measurements_in_one_run_are_kept_apart(gpu: MeasuringGpu, tmp_path: Path) -> None:
    options: dict[str, Any] = {"repetitions": 2, "counters": None, "run_dir": tmp_path / "run"}
    first = recorder.measure({"f": lambda: gpu.run("k", 10)}, **options)
    second = recorder.measure({"f": lambda: gpu.run("k", 30)}, append=True, **options)
    assert [each.to_wide()["total_ns"].tolist() for each in (first, second)] == [[10], [30]]
    assert measured.load(tmp_path / "run").to_wide()["total_ns"].tolist() == [30]
    with pytest.raises(RecorderError, match="already holds a run"):
        recorder.measure({"f": lambda: gpu.run("k", 10)}, **options)


def test_the_pages_query_runs(gpu: MeasuringGpu, tmp_path: Path) -> None:
    recorder.measure({"f": lambda n: gpu.run("k")}, [8], repetitions=3, counters=None, run_dir=tmp_path / "run")
    page = (Path(__file__).parents[1] / "docs/measure.md").read_text(encoding="utf-8")
    query = page[page.index("    SELECT r.name") :].split("\n\n")[0]
    with na.open(tmp_path / "run") as run:
        assert run.sql(query).values.tolist() == [["f", "8", 3]]


def test_the_page_names_every_option_and_column(gpu: MeasuringGpu) -> None:
    page = (Path(__file__).parents[1] / "docs/measure.md").read_text(encoding="utf-8")
    result = recorder.measure({"f": lambda: gpu.run("k")}, repetitions=2, counters=None)
    columns = [*result.to_pandas(normalize="f").columns, *measured_read.TIMES]
    assert [name for name in columns if f"`{name}`" not in page] == []
    assert [name for name in measuring.Plan.__dataclass_fields__ if name not in page] == []
    documented = recorder.measure.__doc__ or ""
    assert [
        name for name in measuring.Plan.__dataclass_fields__ if f"`{name}`" not in documented.replace("(", "`")
    ] == []


def test_a_run_without_measurements_says_so(gpu: MeasuringGpu, tmp_path: Path) -> None:
    with recorder.record(tmp_path / "run"), recorder.annotate("x"):
        gpu.run("k")
    with pytest.raises(RunError, match="holds no such measurement"):
        measured.load(tmp_path / "run")


def test_a_bar_is_drawn_and_removed(gpu: MeasuringGpu, capsys: pytest.CaptureFixture[str]) -> None:
    recorder.measure({"f": lambda: gpu.run("k")}, repetitions=3, counters=None, progress=True)
    shown = capsys.readouterr().err
    assert "times [########----------------] 1/3 measure" in shown
    assert shown.endswith("\r")


def test_configurations_from_iterators_can_be_measured_again(gpu: MeasuringGpu, tmp_path: Path) -> None:
    @recorder.measure(configurations=(n for n in (1, 2)), repetitions=1, counters=None)
    def f(n: int) -> None:
        gpu.run("k", n)

    @recorder.measure(configurations={"n": iter([1, 2]), "m": [3]}, repetitions=1, counters=None)
    def g(n: int, m: int) -> None:
        gpu.run("k", n)

    for function in (f, g):
        assert [function().to_wide()["n"].tolist() for _ in range(2)] == [[1, 2], [1, 2]]
