"""The trend over runs: which kernel is which, what is marked, gates, outputs, and runs that were rolled up."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from trace import T0, Trace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import nanalyze.analysis as na
from nanalyze.analysis import trend
from nanalyze.analysis.compare.sample import CompareError, KernelClass
from nanalyze.analysis.trend import TrendError, gates, marks, outputs, page, read, series
from nanalyze.analysis.trend.read import Kernel, Measured, Point, Steps
from nanalyze.commands import main
from nanalyze.commands.trend import csv_text
from nanalyze.rundir import compaction

DAY = 86_400 * 10**9
KERNELS = 6
STEPS = 8


def build(run_dir: Path, day: int, durations: dict[str, int], clock: int = 1_500_000_000, **process: Any) -> Path:
    """One run on one day: 8 steps, in each of which every kernel runs once; durations are exact."""
    trace = Trace(run_dir)
    trace.device()
    at = day * DAY
    ids = {name: trace.kernel_class(name, (number + 1, 1, 1)) for number, name in enumerate(durations)}
    for step in range(STEPS):
        begin = at
        for name, duration in durations.items():
            trace.kernel(ids[name], at, duration + step % 2, queued_ns=begin + 1)
            at += duration + 1_000
        trace.range("train_step", begin, at)
        at += 1_000
    trace.state(day * DAY + 1_000, sm_clock_hz=clock)
    row = {"started_ns": T0 + day * DAY, "recorded_ns": T0 + day * DAY, **process}
    trace.process_row(**row)
    trace.write()
    return run_dir


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve days: a driver update on the seventh slows one kernel by 10 %, another gets a new template."""
    folder = tmp_path_factory.mktemp("trend") / "runs"
    random = np.random.default_rng(1)
    for day in range(12):
        noise = np.exp(0.004 * random.standard_normal(KERNELS))
        durations = {f"k{n}<int>": int(10_000 * (n + 1) * noise[n]) for n in range(KERNELS)}
        if day >= 6:
            durations["k3<int>"] = int(1.1 * durations["k3<int>"])
        if day >= 8:
            durations = {("k1<long>" if name == "k1<int>" else name): ns for name, ns in durations.items()}
        driver = "580.1" if day < 6 else "590.2"
        build(folder / f"day{11 - day:02d}", day, durations, gpu_driver_version=driver)
    return folder


@pytest.fixture(scope="module")
def result(runs: Path) -> trend.Trend:
    opened = [na.open(path) for path in sorted(runs.iterdir())]
    return trend.trend(opened, labels=[run.path.name for run in opened])


def row_of(result: trend.Trend, name: str) -> trend.Row:
    return next(row for row in result.rows if row.series.name.startswith(name))


# --- what is found ---------------------------------------------------------------------------------


def test_runs_are_put_in_order_and_steps_are_found(result: trend.Trend) -> None:
    assert [point.label for point in result.points] == [f"day{11 - day:02d}" for day in range(12)]
    assert result.days == list(range(12))
    assert (result.step, result.unit, result.clock_known) == ("train_step", "step", True)
    assert len(result.rows) == 2 + KERNELS


def test_the_kernel_that_a_driver_slowed_is_found_with_its_mark(result: trend.Trend) -> None:
    row = row_of(result, "k3")
    (step,) = row.finding.steps
    assert step.at == 6
    assert step.low < 0.1 < step.high
    assert step.high - step.low < 0.03
    assert step.p_value <= 0.005
    assert [mark.text for mark in row.marks] == ["driver 580.1 → 590.2"]
    assert row.change == pytest.approx((step.change, step.low, step.high))
    assert [r.series.name for r in result.found if r.series.kind == series.KERNEL] == ["k3<int>"]


def test_values_are_those_of_a_step(result: trend.Trend) -> None:
    row = row_of(result, "k5")
    with na.open(result_path(result)) as run:
        (total,) = run.sql(
            "SELECT sum(k.duration_ns) AS ns FROM kernels AS k JOIN kernel_classes AS c USING (kernel_class_id) "
            "WHERE c.name LIKE 'k5%'"
        )["ns"]
    first = row.series.values[0]
    assert first is not None
    assert first.value == pytest.approx(total / STEPS)
    assert first.low is not None
    assert first.high is not None
    assert first.low <= first.value <= first.high
    assert row.series.launches == [STEPS] * 12
    assert row.series.total_ns[0] == total
    (host,) = (r for r in result.rows if "on the host" in r.series.name)
    assert [value.value > 0 for value in host.series.values if value is not None] == [True] * 12


def result_path(result: trend.Trend) -> Path:
    return Path(PATHS[0], result.points[0].label)


PATHS: list[str] = []


@pytest.fixture(autouse=True)
def _remember(runs: Path) -> None:
    PATHS[:] = [str(runs)]


def test_a_renamed_kernel_goes_on(result: trend.Trend) -> None:
    row = row_of(result, "k1")
    assert row.series.name == "k1<long>"
    assert None not in row.series.values
    assert row.series.renamed == {8: "other template"}
    assert len(set(row.series.class_ids)) == 2
    assert "other template from run 9" in outputs.happened(row, result)


def test_rolled_up_runs_say_the_same(runs: Path, result: trend.Trend, tmp_path: Path) -> None:
    copied = tmp_path / "runs"
    shutil.copytree(runs, copied)
    for number, path in enumerate(sorted(copied.iterdir())):
        if number % 2:
            compaction.roll_up(path, T0 + 100 * DAY)
    opened = [na.open(path) for path in sorted(copied.iterdir())]
    rolled = trend.trend(opened, labels=[run.path.name for run in opened])
    assert [point.rolled_up > 0 for point in rolled.points] == [True, False] * 6
    for row in result.rows:
        other = row_of(rolled, row.series.name)
        assert [v.value for v in other.series.values if v] == pytest.approx([v.value for v in row.series.values if v])
    assert [step.at for step in row_of(rolled, "k3").finding.steps] == [6]
    # A launch's range is gone with it, so a kernel is told by its shape and template alone.
    assert row_of(rolled, "k1").series.renamed == {8: "other template"}


def point(number: int, kernels: dict[int, float], **facts: Any) -> Point:
    """A run with so many ns a launch by class."""
    made = {
        one: Kernel(KernelClass(one, f"k{one}", str(one), (one,) * 13), Measured(ns), ns, 10, int(10 * ns))
        for one, ns in kernels.items()
    }
    clock = facts.pop("clock", None)
    throttled = facts.pop("throttled", None)
    steps = {"step": Steps(5, 0, Measured(1e6), 5e6)} if facts.pop("steps", False) else {}
    return Point(
        f"run{number}", f"id{number}", T0 + number * DAY, 5_000_000, 1, made, steps, facts, clock, throttled, 0
    )


def test_kernels_that_are_missing_in_some_runs_are_tested_where_they_are() -> None:
    random = np.random.default_rng(2)
    points = []
    for number in range(20):
        kernels = {one: 1_000.0 * one * np.exp(0.005 * random.standard_normal()) for one in range(1, 10)}
        if number < 4:
            del kernels[9]
        if number >= 6:
            del kernels[8]
        if number >= 12:
            kernels[9] *= 1.08
        points.append(point(number, kernels))
    found = trend.of_points(points)
    assert found.unit == "launch"
    nine, eight = row_of(found, "k9"), row_of(found, "k8")
    assert [step.at for step in nine.finding.steps] == [12]
    assert outputs.happened(nine, found).endswith("new in run 5")
    assert (eight.tested, eight.change) == (trend.RARE, None)
    assert outputs.happened(eight, found) == "gone after run 6; not tested: in too few runs"
    assert not any(row.change for row in found.rows if row not in (nine, eight))


def test_small_kernels_are_not_tested() -> None:
    points = [point(number, {1: 1e6, 2: 500.0 * (1 + (number > 5))}) for number in range(12)]
    found = trend.of_points(points)
    assert row_of(found, "k2").tested == trend.SMALL
    assert row_of(found, "k2").change is None


def test_changes_below_the_least_are_not_reported() -> None:
    points = [point(number, {1: 1e6 * (1.004 if number > 5 else 1) + number % 3}) for number in range(14)]
    assert trend.of_points(points).found == []
    (row,) = trend.of_points(points, least=0.001).found
    assert row.finding.steps[0].change == pytest.approx(0.004, rel=0.01)


def test_what_all_kernels_do_is_undetermined_where_no_clock_was_read() -> None:
    random = np.random.default_rng(4)

    def points(clock: float | None) -> list[Point]:
        return [
            point(
                number,
                {
                    one: 1e6
                    * np.exp(0.005 * random.standard_normal() + 0.06 * (number >= 8) + 0.2 * (one == number == 9))
                    for one in range(1, 13)
                },
                clock=clock,
            )
            for number in range(16)
        ]

    found = trend.of_points(points(None))
    assert {row.tested for row in found.rows if row.series.kind != series.JOB} == {trend.WITH_ALL}
    assert found.found == []
    assert outputs.headline(found)[-1].startswith("12 series moved as all kernels do. A clock does that, and in some")
    assert outputs.happened(row_of(found, "k3"), found) == f"undetermined: {trend.WITH_ALL}"
    (outcome,) = gates.judge([gates.parse("each:k3.mean_ns>+3%")], found)
    assert (outcome.status, outcome.reason) == ("unmeasured", trend.WITH_ALL)
    read_clocks = trend.of_points(points(1.5e9))
    assert all(row.change is not None for row in read_clocks.rows if row.series.kind != series.JOB)


def test_few_runs_are_listed_only() -> None:
    found = trend.of_points([point(number, {1: 1e6 * (number + 1)}) for number in range(3)])
    assert {row.tested for row in found.rows} == {trend.FEW_RUNS}
    assert outputs.headline(found)[1] == "Fewer than 8 runs: no change is looked for."


def test_what_else_changed_is_marked() -> None:
    points = [
        point(0, {1: 1.0}, driver=("580",), host=("a",), clock=1.5e9, throttled=0.0),
        point(1, {1: 1.0}, driver=(), host=("a", "b"), clock=1.51e9, throttled=0.2),
        point(2, {1: 1.0}, driver=("590",), host=("a", "b"), clock=None, throttled=None),
        point(3, {1: 1.0}, driver=("590",), host=("a", "b"), clock=1.4e9, throttled=0.2),
    ]
    assert [(mark.at, mark.text) for mark in marks.marks(points)] == [
        (1, "host a → a, b"),
        (1, "throttled 0 % of readings → 20 %"),
        (2, "driver 580 → 590"),
        (3, "SM clock 1510 MHz → 1400 MHz"),
    ]


def test_the_step_is_the_outermost_range_that_fills_all_runs() -> None:
    points = [point(number, {1: 1e3}, steps=True) for number in range(3)]
    assert series.common_step(points) == "step"
    assert series.common_step([*points, point(4, {1: 1e3})]) is None
    with pytest.raises(TrendError, match=r"run0: no range called epoch repeats in it\. Ranges that do: step\."):
        trend.of_points(points, step="epoch")


def test_a_run_given_twice_and_a_single_one_are_refused() -> None:
    with pytest.raises(TrendError, match="one run makes no trend"):
        trend.of_points([point(0, {1: 1.0})])
    with pytest.raises(TrendError, match="run0: is the same run as another one"):
        trend.of_points([point(0, {1: 1.0}), point(0, {1: 1.0})])


def test_a_run_without_timed_launches_is_refused(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run")
    trace.device()
    trace.kernel(trace.kernel_class("k"))
    trace.write()
    with na.open(tmp_path / "run") as run, pytest.raises(TrendError, match="has no launch with a time of its own"):
        read.read(run, "run")


# --- gates -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("each:^k3.total_ns>+5%", "failed"),
        ("each:^k3.total_ns>+20%", "passed"),
        ("each:^k3.total_ns>+10%", "undecided"),
        ("each:^k0.total_ns>+1%", "passed"),
        ("each:none.total_ns>+1%", "unmeasured"),
        ("total_ns<-5%", "passed"),
    ],
)
def test_gates(result: trend.Trend, text: str, status: str) -> None:
    (outcome,) = gates.judge([gates.parse(text)], result)
    assert outcome.status == status


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("total_ns>5ms", "judges changes in percent"),
        ("kernel:k3.total_ns>+5%", "judges kernels one by one"),
        ("gap_ns>+5%", "a trend has step_ns, total_ns and each:REGEX.FIELD"),
    ],
)
def test_gates_that_a_trend_cannot_judge(text: str, message: str) -> None:
    with pytest.raises(TrendError, match=message):
        gates.parse(text)
    with pytest.raises(CompareError, match="is no gate"):
        gates.parse("total_ns")


def test_a_gate_for_the_other_unit_says_so(result: trend.Trend) -> None:
    with pytest.raises(TrendError, match=r"times here are a step's\. Write each:REGEX\.total_ns"):
        gates.judge([gates.parse("each:k3.mean_ns>+5%")], result)


def test_a_series_that_was_not_tested_is_unmeasured() -> None:
    found = trend.of_points([point(number, {1: 1e6}) for number in range(3)])
    (outcome,) = gates.judge([gates.parse("each:k1.mean_ns>+5%")], found)
    assert (outcome.status, outcome.reason) == ("unmeasured", "not tested: too few runs")
    (outcome,) = gates.judge([gates.parse("total_ns>+5%")], found)
    assert outcome.status == "unmeasured"


# --- outputs ---------------------------------------------------------------------------------------


def test_the_command_writes_everything(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["trend", str(runs), "-o", str(out), "--fail-if", "each:^k3.total_ns>+5%"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 3, done.output
    assert "k3<int>" in done.stdout
    assert "from run 7 (2023-11-20)" in done.stdout
    assert "driver 580.1 → 590.2" in done.stdout
    assert str(out / "trend.html") in done.stderr
    files = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    assert files == [
        "plots/job.png", "plots/job.svg", "plots/kernels.png", "plots/kernels.svg", "tables/kernels.csv",
        "tables/marks.csv", "tables/runs.csv", "tables/values.csv", "trend.html", "trend.json",
    ]  # fmt: skip
    content = json.loads((out / "trend.json").read_text())
    assert [gate["status"] for gate in content["gates"]] == ["failed"]
    with open(out / "tables" / "values.csv", newline="") as file:
        found = [row for row in csv.DictReader(file) if row["name"] == "k3<int>"]
    assert [row["run"] for row in found] == [str(number) for number in range(1, 13)]
    html = (out / "trend.html").read_text()
    assert "k3&lt;int&gt;" in html
    assert not any(text in html for text in ("http://", "https://", "src=", '<link rel="stylesheet'))
    # Again into the same place, but not over something else.
    page.check_target(out, force=False)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    refused = CliRunner().invoke(main, ["trend", str(runs), "-o", str(tmp_path / "other")])
    assert refused.exit_code == 1
    assert "holds something else than a trend" in refused.stderr


def test_names_cannot_break_out(tmp_path: Path) -> None:
    evil = '=cmd|"<script>alert(1)</script>`\n|\u202e'
    paths = [build(tmp_path / str(day), day, {evil: 10_000}) for day in range(2)]
    opened = [na.open(path) for path in paths]
    found = trend.trend(opened, labels=["<b>a</b>", "b|`"])
    text = found.to_markdown()
    assert "\u202e" not in text
    assert all(line.count("|") >= 9 for line in text.splitlines() if line.startswith("|"))
    written = page.write(found, tmp_path / "out", "0")
    html = written.read_text()
    assert "<script>alert" not in html
    assert "<b>a</b>" not in html
    assert "'=cmd" in (tmp_path / "out" / "tables" / "kernels.csv").read_text()


def test_json_on_standard_output(runs: Path) -> None:
    done = CliRunner().invoke(main, ["trend", str(runs), "--format", "json", "--no-verdicts"])
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    assert content["trend_version"] == 1
    (own,) = [one for one in content["series"] if one["name"] == "k3<int>"]
    assert own["steps"][0]["at"] == 6
    assert own["verdicts"] == [None] * 12
    assert content["marks"] == [{"at": 6, "what": "driver", "before": "580.1", "after": "590.2"}]


def test_csv_and_markdown(result: trend.Trend) -> None:
    (own,) = [row for row in csv.DictReader(csv_text(result).splitlines()) if row["name"] == "k3<int>"]
    assert (own["largest_step_run"], own["tested"], own["verdict"]) == ("7", "tested", "undetermined")
    text = result.to_markdown()
    assert "| `k3<int>` |" in text
    assert "| 7 | 2023-11-20 | driver | `580.1` | `590.2` |" in text


def test_the_command_refuses_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(main, ["trend", str(tmp_path / "empty")])
    assert (done.exit_code, "is no run and holds none" in done.stderr) == (1, True)
    done = CliRunner().invoke(main, ["trend", str(tmp_path / "none")])
    assert (done.exit_code, "does not exist" in done.stderr) == (1, True)
    assert CliRunner().invoke(main, ["trend"]).exit_code == 2
