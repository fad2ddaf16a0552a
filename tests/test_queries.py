"""The shipped queries: headers, golden results on a tiny trace, and a way to Spark.

After a change that is meant to alter a result: `python tests/test_queries.py` writes the golden
files anew; read the difference before committing it.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from pathlib import Path
from trace import PROCESS, T0, Trace

import pandas as pd
import pytest
import sqlglot

import nanalyze.analysis as na
from nanalyze import queries
from nanalyze.commands import _output

GOLDEN = Path(__file__).parent / "golden"
OTHER = "node0-1-101"
# Where a query's own defaults would give too little or too much to read.
PARAMETERS: dict[str, dict[str, object]] = {
    "timeline_utilisation": {"buckets": 5},
    "top_kernels": {"rows": 4},
    "compare_repetitions": {"range_name": "forward"},
    "compare_clocks": {"range_name": "step"},
    "steps": {"range_name": "forward"},
    "report_timeline": {"first_ns": T0, "width_ns": 20_000, "buckets": 5},
}

SOL = {"sm_clock_hz": 1e9, "duration_ns": 10_000.0}
GEMM = {
    **SOL, "compute_pct": 90.0, "memory_pct": 30.0, "pipe_tensor_pct": 90.0, "occupancy_pct": 25.0,
    "dram_read_bytes": 1e6, "dram_write_bytes": 1e6, "tensor_bf16_ops": 4e9,
    "thread_inst_fadd": 0.0, "thread_inst_fmul": 0.0, "thread_inst_ffma": 5e6,
}  # fmt: skip
STREAM = {
    **SOL, "compute_pct": 10.0, "memory_pct": 92.0, "dram_pct": 92.0, "l2_pct": 40.0, "l1_pct": 20.0,
    "dram_read_bytes": 30e6, "dram_write_bytes": 10e6,
    "thread_inst_fadd": 1e7, "thread_inst_fmul": 0.0, "thread_inst_ffma": 0.0,
}  # fmt: skip
IMPOSSIBLE = {**STREAM, "duration_ns": 1_000.0}


def build(run_dir: Path) -> None:
    """Two processes on one GPU: kernels of every nature, nested ranges, copies, losses."""
    trace = Trace(run_dir)
    for process in (PROCESS, OTHER):
        trace.device(process)
    gemm = trace.kernel_class("gemm", (1320, 1, 1), (256, 1, 1))
    stream = trace.kernel_class("stream<float>", (13200, 1, 1), (1024, 1, 1))
    tiny = trace.kernel_class("tiny", (1, 1, 1), (32, 1, 1))
    wrong = trace.kernel_class("wrong", (132, 1, 1), (256, 1, 1))
    reduce = trace.kernel_class("ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)", (8, 1, 1), (512, 1, 1))
    trace.kernel_class("gemm", (1320, 1, 1), (256, 1, 1), process=OTHER)

    step = trace.range("step", 0, 100_000)
    forward = trace.range("forward", 1_000, 40_000, depth=1, parent_id=step, flops=8e9)
    trace.range("backward", 50_000, 90_000, depth=1, parent_id=step, flops=4e9, bytes=1e6)
    trace.range("left open", 95_000, None, depth=1, parent_id=step)
    assert forward == 2

    trace.kernel(gemm, 10_000, 10_000, queued_ns=5_000)
    trace.kernel(stream, 20_000, 10_000, queued_ns=6_000)
    trace.kernel(tiny, 34_000, 2_000, queued_ns=7_000)
    trace.kernel(tiny, 38_000, 2_000, queued_ns=45_000)
    trace.kernel(reduce, 60_000, 20_000, queued_ns=55_000)
    trace.kernel(gemm, 70_000, 10_000, queued_ns=56_000, stream_id=8)
    trace.kernel(gemm, 100_000, 10_000, queued_ns=99_000, process=OTHER)
    trace.kernel(wrong, 80_000, 1_000, queued_ns=57_000)
    for kernel, counters in ((gemm, GEMM), (stream, STREAM), (wrong, IMPOSSIBLE)):
        trace.measure(kernel, [counters])

    trace.copy("HtoD", 0, 5_000, 100_000, source="pinned", destination="device")
    trace.copy("HtoD", 41_000, 5_000, 300_000, source="pinned", destination="device")
    trace.copy("memset", 90_000, 1_000, 4_096, destination="device")
    trace.pause(46_500, 49_000, complete_ns=50_000)
    trace.state(1_000)
    trace.state(50_000, sm_clock_hz=1_200_000_000)
    trace.event("loss", "Activity buffers overflowed: raise buffer_mib.", count=12)
    trace.event("note", "The recorder used CUPTI 13.0.1.")
    trace.write(shards=2)
    # One shard is lost and one process was cut off.
    next((run_dir / "copies" / f"process={PROCESS}").glob("000002-*")).unlink()
    next((run_dir / "processes" / f"process={OTHER}").glob("000002-*")).unlink()


def result(run: na.Run, name: str) -> str:
    """The query's result as CSV."""
    query = queries.query(name)
    parameters = {p.name: None if p.default == "NULL" else int(p.default) for p in query.parameters}
    parameters.update(PARAMETERS.get(name, {}))  # type: ignore[arg-type]
    sink = io.BytesIO()
    _output.write(run.batches(query.sql, parameters or None), "csv", sink, None)
    return sink.getvalue().decode()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> na.Run:
    run_dir = tmp_path_factory.mktemp("golden") / "run"
    build(run_dir)
    return na.open(run_dir)


@pytest.mark.parametrize("name", queries.query_names())
def test_a_query_gives_its_golden_result(run: na.Run, name: str, tmp_path: Path) -> None:
    golden = GOLDEN / f"{name}.csv"
    assert golden.exists(), f"{golden}: write it with `python {Path(__file__).name}`"
    got = result(run, name)
    (tmp_path / golden.name).write_text(got, encoding="utf-8")
    assert _rows(got) == _rows(golden.read_text(encoding="utf-8")), f"got {tmp_path / golden.name}"


def _rows(text: str) -> list[list[object]]:
    """Rows with numbers as numbers, of which the last digits may differ between machines."""
    return [[_approximate(field) for field in line.split(",")] for line in text.splitlines()]


def _approximate(field: str) -> object:
    if re.fullmatch(r"-?\d+", field):
        return int(field)
    try:
        return float(f"{float(field):.12g}")
    except ValueError:
        return field


@pytest.mark.parametrize("name", queries.query_names())
def test_the_header_of_a_query_is_what_duckdb_says_of_it(run: na.Run, name: str) -> None:
    query = queries.query(name)
    statement = query.sql
    for parameter in query.parameters:
        statement = statement.replace(f"${parameter.name}", parameter.default)
    described = run.sql(f"DESCRIBE {statement}")
    assert [(c.name, c.type) for c in query.columns] == list(
        zip(described["column_name"], described["column_type"], strict=True)
    )


@pytest.mark.parametrize("name", queries.query_names())
def test_a_query_says_what_it_answers_and_ends_in_an_order(name: str) -> None:
    query = queries.query(name)
    assert query.summary.startswith(f"{name}: ")
    assert "?" in query.summary
    assert all(column.meaning.endswith(".") for column in query.columns)
    assert set(re.findall(r"\$(\w+)", query.sql)) == {parameter.name for parameter in query.parameters}
    tree = sqlglot.parse_one(query.sql, read="duckdb")
    assert tree.args.get("order") is not None


@pytest.mark.parametrize("name", queries.query_names())
def test_a_query_is_carried_to_spark(name: str) -> None:
    check_spark(queries.query(name).sql)


@pytest.mark.parametrize("name", [view for view in queries.VIEWS if view != "samples"])
def test_a_view_is_carried_to_spark(name: str) -> None:
    check_spark(queries.view(name).sql)


def check_spark(sql: str) -> None:
    """The statement, and the result read back, parse without anything left unsupported."""
    level = sqlglot.ErrorLevel.RAISE
    statements = sqlglot.transpile(sql, read="duckdb", write="spark", unsupported_level=level)
    assert len(statements) == 1
    assert sqlglot.parse_one(statements[0], read="spark") is not None
    # Silently different in Spark, or an error there.
    code = re.sub(r"--[^\n]*", "", sql)
    for banned in (
        r"\bASOF\b",
        r"quantile_|percentile_cont",
        r"\bHUGEINT\b",
        r"\bMATERIALIZED\b",
        r"\bBY NAME\b",
        r"\blog\(",
        "<<",
    ):
        assert not re.search(banned, code), banned


# --- what the golden files cannot show ---------------------------------------------------------


def test_concurrent_kernels_count_once_in_the_busy_time(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    trace.device()
    kernel = trace.kernel_class("k")
    trace.kernel(kernel, 0, 100)
    trace.kernel(kernel, 20, 10, stream_id=8)
    trace.kernel(kernel, 90, 30, stream_id=8)
    trace.kernel(kernel, 150, 50)
    trace.write()
    frame = na.open(tmp_path).query("timeline_utilisation", buckets=2)
    assert frame["busy_ns"].tolist() == [100, 70]
    assert frame["kernel_ns"].tolist() == [120, 70]
    assert frame["busy_share"].tolist() == [1.0, 0.7]


@pytest.mark.parametrize("buckets", [1, 3, 7, 100, 1000])
def test_the_pieces_add_up_to_the_whole(tmp_path: Path, buckets: int) -> None:
    build(tmp_path / "run")
    frame = na.open(tmp_path / "run").query("timeline_utilisation", buckets=buckets)
    assert len(frame) == buckets
    assert (frame["busy_ns"].sum(), frame["kernel_ns"].sum()) == (55_000, 65_000)
    assert (frame["end_ns"].to_numpy()[:-1] == frame["start_ns"].to_numpy()[1:]).all()
    assert frame["paused_ns"].sum() == 3_500
    is_paused = frame["paused_ns"] == frame["end_ns"] - frame["start_ns"]
    assert is_paused.sum() == {1: 0, 3: 0, 7: 0, 100: 3, 1000: 35}[buckets]
    assert (frame["busy_share"].isna() == is_paused).all()
    assert frame["busy_share"].dropna().between(0, 1).all()


def paused_twice(run_dir: Path) -> na.Run:
    """Kernels of 0 to 100, 110 to 230 and 400 to 500 ns; pauses of 200 to 300 (kernels to 340), and 460 to 480."""
    trace = Trace(run_dir)
    trace.device()
    kernel = trace.kernel_class("k")
    trace.kernel(kernel, 0, 100)
    trace.kernel(kernel, 110, 120)
    trace.kernel(kernel, 400, 100)
    trace.copy("HtoD", 50, 100, 1)
    trace.copy("HtoD", 190, 30, 1, stream_id=9)
    trace.copy("HtoD", 450, 50, 1, stream_id=9)
    trace.pause(200, 300, complete_ns=340)
    trace.pause(460, 480)
    trace.pause(700, 800)
    trace.write()
    return na.open(run_dir)


def test_a_pause_belongs_to_no_share_of_the_time(tmp_path: Path) -> None:
    run = paused_twice(tmp_path)
    frame = run.query("timeline_utilisation", buckets=5)
    assert frame["busy_ns"].tolist() == [100, 90, 0, 0, 80]
    assert frame["paused_ns"].tolist() == [0, 0, 100, 40, 20]
    assert frame["busy_share"].tolist()[:2] == [1.0, 0.9]
    assert frame["busy_share"].isna().tolist() == [False, False, True, False, False]
    assert frame["busy_share"].tolist()[3:] == [0.0, 1.0]
    assert frame["kernel_ns"].tolist() == [100, 90, 30, 0, 100]
    copies = run.query("report_timeline", first_ns=T0, width_ns=100, buckets=5)
    assert dict(zip(copies["bucket"], copies["copy_ns"], strict=True)) == {0: 50, 1: 60, 2: pd.NA, 3: pd.NA, 4: 30}


def test_a_pause_is_no_gap(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    for start in (0, 110, 400, 600):
        trace.kernel(kernel, start, 100)
    trace.pause(190, 300, complete_ns=340)  # begins while a kernel runs
    trace.pause(520, 560)
    trace.pause(900, 950)  # after the last
    trace.write()
    (row,) = na.open(tmp_path).query("launch_gaps").to_dict("records")
    assert (row["activities"], row["span_ns"], row["paused_ns"]) == (4, 700, 130 + 40)
    assert (row["gaps"], row["gap_ns"], row["longest_gap_ns"]) == (4, 10 + 60 + 20 + 40, 60)
    assert row["gap_share"] == 130 / (700 - 170)


def test_a_pause_of_one_of_two_processes_counts_for_the_device_they_share(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    for process in (PROCESS, OTHER):
        trace.device(process)
        trace.kernel_class("k", process=process, kernel_class_id=1)
        trace.kernel(1, 0, 100, process=process)
        trace.kernel(1, 300, 100, process=process)
    trace.pause(20, 60, process=OTHER)
    trace.pause(50, 70)
    trace.write()
    frame = na.open(tmp_path).query("timeline_utilisation", buckets=1)
    assert (frame["busy_ns"][0], frame["paused_ns"][0], frame["busy_share"][0]) == (150, 50, 150 / 350)


def test_two_devices_have_a_timeline_each(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    trace.device()
    trace.device(device_id=1, uuid="GPU-1")
    kernel = trace.kernel_class("k")
    trace.kernel(kernel, 0, 100)
    trace.kernel(kernel, 100, 100, device_id=1)
    trace.kernel(kernel, 150, 50, device_id=2)
    trace.write()
    frame = na.open(tmp_path).query("timeline_utilisation", buckets=2)
    busy = {device: group["busy_ns"].tolist() for device, group in frame.groupby("device")}
    assert busy == {
        "GPU-00000000-0000-0000-0000-000000000000": [100, 0],
        "GPU-1": [0, 100],
        f"{PROCESS}/2": [0, 50],
    }


def test_a_range_that_encloses_itself_ends_the_walk(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    trace.range("a", 0, 100, range_id=1, parent_id=2)
    trace.range("b", 10, 90, range_id=2, parent_id=1)
    trace.kernel(trace.kernel_class("k"), 50, 7)
    trace.write()
    frame = na.open(tmp_path).query("ranges_summary")
    assert frame[["name", "kernels", "kernel_ns"]].to_numpy().tolist() == [["a", 1, 7], ["b", 1, 7]]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder) / "run")
        with na.open(Path(folder) / "run") as golden_run:
            for query_name in sys.argv[1:] or queries.query_names():
                (GOLDEN / f"{query_name}.csv").write_text(result(golden_run, query_name), encoding="utf-8")
