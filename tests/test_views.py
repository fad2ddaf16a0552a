"""The views: their headers tell the truth, and each gives the rows it says."""

from __future__ import annotations

import random
from pathlib import Path
from trace import PROCESS, T0, Trace

import pandas as pd
import pytest

import nanalyze.analysis as na
from nanalyze import queries
from nanalyze.analysis.connection import TYPES
from nanalyze.rundir.counters import COUNTERS
from nanalyze.rundir.schema import TABLES

OTHER = "node0-1-101"
PUBLIC = sorted(name for name in queries.VIEWS if not name.startswith("_"))


@pytest.fixture(scope="module")
def empty_run(tmp_path_factory: pytest.TempPathFactory) -> na.Run:
    trace = Trace(tmp_path_factory.mktemp("empty"))
    trace.write()
    return na.open(trace.run_dir)


def opened(trace: Trace, **options: object) -> na.Run:
    trace.write()
    return na.open(trace.run_dir, **options)  # type: ignore[arg-type]


# --- headers -----------------------------------------------------------------------------------


def test_every_view_file_is_listed_and_every_listed_view_has_a_file() -> None:
    assert sorted(queries.VIEWS) == list(queries.view_names())


@pytest.mark.parametrize("name", queries.VIEWS)
def test_the_header_of_a_view_is_what_duckdb_says_of_it(empty_run: na.Run, name: str) -> None:
    described = empty_run.sql(f"DESCRIBE {name}")
    declared = queries.view(name).columns
    assert [(c.name, c.type) for c in declared] == list(
        zip(described["column_name"], described["column_type"], strict=True)
    )


@pytest.mark.parametrize("name", queries.VIEWS)
def test_every_column_of_a_view_has_a_unit_and_a_meaning(name: str) -> None:
    view = queries.view(name)
    assert view.summary.startswith(f"{name}: ")
    for column in view.columns:
        assert column.meaning.endswith((".", "...")), column
        if column.name.endswith("_ns"):
            assert column.unit == "ns"
        if column.name.endswith("_pct"):
            assert column.unit == "%"


@pytest.mark.parametrize("name", sorted(set(TABLES) & set(PUBLIC)))
def test_a_view_of_a_table_has_its_columns_units_and_the_process(name: str) -> None:
    columns = {c.name: (c.type, c.unit) for c in queries.view(name).columns}
    for column in TABLES[name].columns:
        if name == "kernel_minutes" and (column.name.endswith("_bin") or column.type == "histogram"):
            continue  # bins are shown as times: p50_ns
        assert columns[column.name] == (TYPES[column.type], column.unit), column.name
    assert ("process" in columns) == (name != "kernel_classes")


def test_the_contract_s_views_exist() -> None:
    assert set(TABLES) | {"counters", "verdicts", "damage"} <= set(PUBLIC)


def test_an_empty_run_has_empty_views(empty_run: na.Run) -> None:
    constant = {"run", "settings", "communication_patterns", "counter_metrics", "processes", "overhead"}
    lengths = {name: len(empty_run.sql(f"SELECT * FROM {name}")) for name in PUBLIC}
    assert {name for name, length in lengths.items() if length} == constant


# --- kernels -----------------------------------------------------------------------------------


def test_durations_come_from_the_timeline_or_from_the_profiler(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    trace.kernel(kernel, start_ns=100, duration_ns=50)
    trace.measure(kernel, [{"duration_ns": 70.4}, {"compute_pct": 5.0}])
    frame = opened(trace).kernels()
    assert frame["duration_ns"].tolist() == [50, 70, pd.NA]
    assert frame["duration_method"].tolist()[:2] == ["timeline", "exact"]
    assert frame["duration_method"].isna().tolist() == [False, False, True]
    assert frame["start_ns"].isna().tolist() == [False, True, True]
    assert frame["end_ns"].tolist()[0] == T0 + 150


def test_the_profiler_s_duration_is_of_the_launch_of_the_same_process(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    for process, duration in ((PROCESS, 10.0), (OTHER, 20.0)):
        kernel = trace.kernel_class("k", process=process)
        trace.kernel(kernel, process=process, correlation_id=5)
        trace.exact({"gpu__time_duration.sum": duration}, process=process, kernel_class_id=kernel, correlation_id=5)
    frame = opened(trace).sql("SELECT process, duration_ns FROM kernels ORDER BY process")
    assert frame["duration_ns"].tolist() == [10, 20]


def test_a_graph_s_duration_is_not_its_nodes(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    for node in (1, 2):
        trace.kernel(kernel, correlation_id=5, graph_id=3, graph_node_id=node)
    trace.exact({"gpu__time_duration.sum": 90.0}, scope="graph", graph_id=3, correlation_id=5)
    run = opened(trace)
    assert run.kernels()["duration_ns"].isna().all()
    graph = run.sql("SELECT graph_id, counter, value, unit, method, launches FROM graph_counters")
    assert graph.to_numpy().tolist() == [[3, "duration_ns", 90.0, "ns", "exact", 1]]
    assert len(run.counters()) == 0


@pytest.mark.parametrize("duration", [-5, -(2**63), 2**63 - 1])
def test_an_absurd_duration_is_missing(tmp_path: Path, duration: int) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    trace.kernel(kernel, start_ns=100, duration_ns=duration)
    trace.kernel(kernel, start_ns=200, duration_ns=10)
    run = opened(trace)
    assert run.kernels()["duration_ns"].tolist() == [pd.NA, 10]
    verdict = run.verdicts().iloc[0]
    assert (verdict["total_ns"], verdict["launches"], verdict["launches_untimed"]) == (10, 2, 1)


@pytest.mark.parametrize("start", [2**63 - 1, -(2**63)])
def test_an_absurd_start_breaks_no_query(tmp_path: Path, start: int) -> None:
    trace = Trace(tmp_path)
    trace.device()
    kernel = trace.kernel_class("k")
    trace.kernel(kernel, start_ns=start - T0, duration_ns=10)
    trace.kernel(kernel, start_ns=0, duration_ns=10)
    trace.copy("HtoD", start - T0, 10, 1)
    trace.range("r", start - T0, 5)
    with opened(trace) as run:
        assert run.kernels()["end_ns"].isna().sum() == 1
        for name in queries.query_names():
            run.query(name)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e300, None])
def test_values_that_are_no_measurements_are_missing(tmp_path: Path, value: float | None) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    trace.measure(kernel, [{"compute_pct": value, "memory_pct": 50.0, "duration_ns": value}])
    with opened(trace) as run:
        assert run.counters()["counter"].tolist() == ["memory_pct"]
        verdict = run.verdicts().iloc[0]
    assert verdict["bound"] == "undetermined"
    assert verdict["reason"] == "not measured: compute_pct"
    assert pd.isna(verdict["total_ns"])
    assert pd.isna(verdict["share"])


# --- ranges ------------------------------------------------------------------------------------


def ranges_of(trace: Trace, instants: list[int | None]) -> list[int | None]:
    """The range that a launch queued at each instant gets."""
    kernel = trace.kernel_class("k")
    for instant in instants:
        trace.kernel(kernel, start_ns=10**6, duration_ns=1, queued_ns=instant)
        if instant is None:
            trace.rows["kernels", PROCESS][-1]["queued_ns"] = None
    frame = opened(trace).sql("SELECT correlation_id, range_id FROM kernels ORDER BY correlation_id")
    return [None if pd.isna(value) else int(value) for value in frame["range_id"]]


def test_a_launch_belongs_to_the_innermost_open_range(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    outer = trace.range("outer", 100, 200)
    inner = trace.range("inner", 120, 150, depth=1, parent_id=outer)
    expected = [None, outer, outer, inner, inner, outer, outer, None, None]
    assert ranges_of(trace, [99, 100, 119, 120, 149, 150, 199, 200, None]) == expected


def test_ranges_of_several_threads_the_latest_opened_counts(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    one = trace.range("one", 0, 60, thread_id=1)
    two = trace.range("two", 50, 80, thread_id=2)
    three = trace.range("three", 55, 57, thread_id=3)
    assert ranges_of(trace, [49, 52, 56, 58, 70, 80]) == [one, two, three, two, two, None]


def test_of_ranges_opened_at_once_the_deeper_is_innermost(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    inner = trace.range("inner", 10, 20, range_id=1, depth=1)
    outer = trace.range("outer", 10, 30, range_id=2, depth=0)
    assert ranges_of(trace, [10, 19, 20, 29, 30]) == [inner, inner, outer, outer, None]


def test_a_range_that_was_never_closed_lasts_to_the_end(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    first = trace.range("first", 10, None)
    second = trace.range("second", 20, None)
    closed = trace.range("closed", 30, 40)
    assert ranges_of(trace, [9, 15, 25, 35, 45, 10**9]) == [None, first, second, closed, second, second]


def test_ranges_that_hold_nothing_or_end_before_they_start_are_no_one_s(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    trace.range("empty", 10, 10)
    trace.range("reversed", 30, 20)
    assert ranges_of(trace, [10, 25, 30]) == [None, None, None]


def test_a_range_is_of_its_own_process_only(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    trace.range("r", 0, 100, process=OTHER)
    assert ranges_of(trace, [50]) == [None]


def test_ranges_agree_with_a_plain_search(tmp_path: Path) -> None:
    random.seed(1)
    trace = Trace(tmp_path)
    ranges = []
    for _ in range(60):
        start, length = random.randrange(200), random.randrange(60)
        end = None if random.random() < 0.1 else start + length
        ranges.append((start, trace.range("r", start, end), end))
    instants: list[int | None] = list(range(0, 300, 3))

    def search(at: int) -> int | None:
        is_open = [(start, number) for start, number, end in ranges if start <= at and (end is None or at < end)]
        return max(is_open)[1] if is_open else None

    assert ranges_of(trace, instants) == [search(at) for at in instants if at is not None]


# --- classes, devices, processes ---------------------------------------------------------------


def test_a_class_launched_by_two_processes_is_one_row(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    for process in (PROCESS, OTHER):
        kernel = trace.kernel_class("k", process=process)
        trace.kernel(kernel, 0, 100, process=process)
        trace.measure(kernel, [{"compute_pct": 90.0, "memory_pct": 10.0}], process=process)
    with opened(trace) as run:
        assert len(run.kernel_classes()) == 1
        verdicts = run.verdicts()
    assert verdicts[["launches", "total_ns", "launches_measured"]].to_numpy().tolist() == [[4, 200, 2]]


def test_the_last_row_of_a_process_counts(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    with opened(trace) as run:
        rows = run.processes()
    assert rows["ending"].tolist() == ["stop"]


def test_a_device_described_twice_is_one_row(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    trace.device()
    trace.device()
    trace.device(device_id=1)
    assert opened(trace).devices()["device_id"].tolist() == [0, 1]


# --- counters ----------------------------------------------------------------------------------


def test_counters_are_means_with_their_standard_error(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    trace.measure(kernel, [{"compute_pct": value, "memory_pct": 7.0} for value in (10.0, 20.0, 30.0)])
    frame = opened(trace).counters().set_index("counter")
    assert frame.loc["compute_pct", ["value", "unit", "method", "launches"]].tolist() == [20.0, "%", "exact", 3]
    assert frame.loc["compute_pct", "standard_error"] == pytest.approx(10 / 3**0.5)
    assert frame.loc["memory_pct", "standard_error"] == 0


def test_one_launch_has_no_standard_error(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    trace.measure(trace.kernel_class("k"), [{"compute_pct": 10.0}])
    assert opened(trace).counters()["standard_error"].isna().tolist() == [True]


def test_the_first_raw_metric_that_was_measured_wins(tmp_path: Path) -> None:
    dram = next(counter for counter in COUNTERS if counter.name == "dram_pct")
    trace = Trace(tmp_path)
    for name, metrics in (("both", dram.raw[:2]), ("second", dram.raw[1:2])):
        kernel = trace.kernel_class(name)
        values = {metric: float(10 * dram.raw.index(metric) + 1) for metric in metrics}
        trace.exact(values, kernel_class_id=kernel, correlation_id=trace.kernel(kernel))
    frame = opened(trace).sql(
        "SELECT name, counter, value FROM counters JOIN kernel_classes USING (kernel_class_id) ORDER BY name"
    )
    assert frame.to_numpy().tolist() == [["both", "dram_pct", 1.0], ["second", "dram_pct", 11.0]]


def test_an_unknown_metric_keeps_its_name_and_has_no_unit(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    trace.exact({"smsp__odd.sum": 4.0}, kernel_class_id=kernel, correlation_id=trace.kernel(kernel))
    frame = opened(trace).counters()
    assert frame[["counter", "value"]].to_numpy().tolist() == [["smsp__odd.sum", 4.0]]
    assert frame["unit"].isna().all()


def test_an_imported_run_says_so_and_may_use_nanalyze_s_names(tmp_path: Path) -> None:
    trace = Trace(tmp_path, source="ncu")
    kernel = trace.kernel_class("k")
    values = {"compute_pct": 90.0, "memory_pct": 5.0}
    trace.exact(values, kernel_class_id=kernel, correlation_id=trace.kernel(kernel, 0, 10_000))
    with opened(trace) as run:
        assert run.counters()[["counter", "method", "unit"]].to_numpy().tolist() == [
            ["compute_pct", "imported", "%"],
            ["memory_pct", "imported", "%"],
        ]
        assert run.verdicts()[["bound", "method"]].to_numpy().tolist() == [["compute", "imported"]]


def test_raw_metrics_are_unambiguous() -> None:
    metrics = [metric for counter in COUNTERS for metric in counter.raw]
    assert len(metrics) == len(set(metrics))


# --- hostile names -----------------------------------------------------------------------------

HOSTILE = [
    'it\'s "quoted"; DROP VIEW kernels; --',
    "<script>alert(1)</script>",
    "\x1b[2J\x1b]0;title\x07",
    "x" * 10_000,
    "void f<char, (int)1>(std::pair<a, b> const&)",
    "\\xff\\xfe \u202e \ufffd \U0001f600",
    "new\nline\ttab\r",
    "",
]


def test_hostile_kernel_names_pass_through_unchanged(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    for i, name in enumerate(HOSTILE):
        kernel = trace.kernel_class(name)
        trace.kernel(kernel, 1000 * i, 1000 - i)
        trace.measure(kernel, [{"compute_pct": 90.0, "memory_pct": 1.0}])
    with opened(trace) as run:
        assert run.verdicts()["kernel"].tolist() == HOSTILE
        for name in queries.query_names():
            run.query(name)
