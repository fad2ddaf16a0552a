"""Runs on a real Spark: a standalone cluster of a master and two workers on loopback, from pyspark's own jars.

Every shipped query, all of its views on Spark, equals DuckDB's answer: numbers within 1e-9, rows in the query's order.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from trace import T0

import pyarrow as pa
import pytest
import test_queries
from click.testing import CliRunner, Result
from scripts import benchmark

import nanalyze.analysis as na
from nanalyze import commands, queries
from nanalyze.analysis import report
from nanalyze.analysis.engines import session, spark
from nanalyze.rundir.errors import QueryError, RunError

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "examples" / "h200-sample"
# Queries that have nothing to say of the trace, which has no clock that varies and no ceilings.
EMPTY = ("compare_clocks", "report_drift", "report_throttling", "roofline_ceilings", "trend_steps")

if importlib.util.find_spec("pyspark") is None:
    pytest.skip("needs pyspark: pip install 'nanalyze[spark]'", allow_module_level=True)
if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
    pytest.skip("needs Java 17 or later for Spark", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:.*PySpark does not:FutureWarning")


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a cluster with two workers of one core."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        patch.setenv("PYSPARK_SUBMIT_ARGS", "--driver-memory 2g pyspark-shell")
        with benchmark("spark").cluster(2, "1g", tmp_path_factory.mktemp("cluster")) as cluster:
            yield cluster.url
            from pyspark.sql import SparkSession

            running = SparkSession.getActiveSession()
            if running is not None:
                running.stop()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of the query tests: two processes, pauses, losses, a kernel of every nature."""
    run_dir = tmp_path_factory.mktemp("spark") / "a run=1"
    test_queries.build(run_dir)
    return run_dir


@pytest.fixture(scope="module")
def sample(master: str) -> Iterator[tuple[spark.SparkRun, na.Run]]:
    """The sample of an H200 on both engines."""
    with spark.open(SAMPLE, master) as there, na.open(SAMPLE) as here:
        yield there, here


@pytest.fixture(scope="module")
def trace(master: str, built: Path) -> Iterator[tuple[spark.SparkRun, na.Run]]:
    with spark.open(built, master) as there, na.open(built) as here:
        yield there, here


def parameters(name: str) -> dict[str, object] | None:
    query = queries.query(name)
    return {parameter.name: parameter.value(parameter.default) for parameter in query.parameters} or None


def assert_equal(got: pa.Table, wanted: pa.Table) -> None:
    """The same columns and rows in the same order; numbers within 1e-9 of each other."""
    assert got.column_names == wanted.column_names
    assert got.num_rows == wanted.num_rows
    for row, (own, other) in enumerate(zip(got.to_pylist(), wanted.to_pylist(), strict=True)):
        for column, value in other.items():
            if isinstance(value, (str, bool)) or value is None:
                assert own[column] == value, (row, column)
            else:
                assert own[column] is not None, (row, column)
                assert math.isclose(own[column], value, rel_tol=1e-9), (row, column, own[column], value)


def test_both_workers_are_there(sample: tuple[spark.SparkRun, na.Run]) -> None:
    context = sample[0]._spark.sparkContext
    assert context.master.startswith("spark://127.0.0.1:")
    assert context._jsc.sc().getExecutorMemoryStatus().size() == 3  # the driver is one


@pytest.mark.parametrize("name", queries.query_names())
def test_a_query_on_the_sample_is_duckdbs(sample: tuple[spark.SparkRun, na.Run], name: str) -> None:
    there, here = sample
    sql = queries.query(name).sql
    got = there.on_spark(sql, parameters(name), everything=True)
    assert_equal(got, here.arrow(sql, parameters(name)))


@pytest.mark.parametrize("name", queries.query_names())
def test_a_query_over_aggregates_that_came_back_is_duckdbs(trace: tuple[spark.SparkRun, na.Run], name: str) -> None:
    there, here = trace
    given = {**(parameters(name) or {}), **test_queries.PARAMETERS.get(name, {})} or None
    sql = queries.query(name).sql
    wanted = here.arrow(sql, given)
    assert wanted.num_rows > 0 or name in EMPTY
    assert_equal(there.arrow(sql, given), wanted)


def test_damage_that_names_show_is_listed(trace: tuple[spark.SparkRun, na.Run]) -> None:
    there, here = trace
    columns = ["path", "table_name", "process", "problem"]
    assert there.damage()[columns].to_dict("records") == here.damage()[columns].to_dict("records")
    assert there.damage_count == here.damage_count == 1


@pytest.mark.parametrize(
    "expression",
    [
        "CAST(x AS VARCHAR)", "round(x, 1)", "round(x, 3)", "CAST(x AS BIGINT)", "floor(x)", "ceil(x)", "sign(x)",
        "CAST(round(x, 2) AS VARCHAR)", "round(x + i / 8, 2)", "round(i / 20 + 0.05, 1)",
        "concat('a', s, 'b')", "regexp_replace(s, '[<(].*', '')", "s || 'z'",
        "regexp_replace(s, 'b', 'y')", "greatest(x, i, NULL)", "i // 3", "i % 3", "x / 3", "left(s, 2)", "i / 7",
        "abs(x)", "ln(abs(x) + 1)", "log(abs(x) + 1)", "pow(x, 2)", "CASE WHEN s LIKE 'a%' THEN 1 END",
    ],
)  # fmt: skip
def test_an_expression_means_the_same(trace: tuple[spark.SparkRun, na.Run], expression: str) -> None:
    there, here = trace
    numbers = (
        "0.5", "1.5", "2.5", "-2.5", "0.15", "0.285", "1.005", "12345678.9", "1e7", "9999999.9", "1e-3", "1.25e-4",
        "1.2e-5", "1e15", "123456789012345.6", "-0.04",
    )  # fmt: skip
    texts = ("abc<d(e", "ab\nc<d\nbb<", "", "it''s", "xbxb", "日本<b>")
    rows = ", ".join(f"({i}, {n}, CAST({n} AS DOUBLE), '{texts[i % len(texts)]}')" for i, n in enumerate(numbers, -7))
    sql = f"SELECT i, {expression} AS y FROM (VALUES {rows}, (99, NULL, NULL, NULL)) AS v (i, d, x, s) "
    sql += "ORDER BY i"
    assert_equal(there.on_spark(sql), here.arrow(sql))


def test_a_sum_beyond_64_bits_is_an_error_and_not_another_number(trace: tuple[spark.SparkRun, na.Run]) -> None:
    sql = "SELECT sum(x) AS total FROM (VALUES (9000000000000000000), (9000000000000000000)) AS v (x) ORDER BY 1"
    with pytest.raises(QueryError, match=r"^Spark: \[ARITHMETIC_OVERFLOW\]"):
        trace[0].on_spark(sql)
    tried = sql.replace("sum(x)", "TRY_CAST(sum(x) AS BIGINT)")
    assert trace[0].on_spark(tried).to_pylist() == [{"total": None}]


def test_a_report_is_duckdbs(trace: tuple[spark.SparkRun, na.Run], tmp_path: Path) -> None:
    there, here = trace
    report.write(there, tmp_path / "there")
    report.write(here, tmp_path / "here")
    names = sorted(path.name for path in (tmp_path / "here" / "tables").iterdir())
    assert "verdicts.csv" in names
    for name in names:
        got, wanted = (
            test_queries._rows((tmp_path / side / "tables" / name).read_text()) for side in ("there", "here")
        )
        assert got == wanted, name


def test_a_comparison_is_duckdbs(trace: tuple[spark.SparkRun, na.Run]) -> None:
    there, here = (run.compare("forward", "backward") for run in trace)
    assert there.to_markdown() == here.to_markdown()


# --- commands and failures -----------------------------------------------------------------------------


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(commands.main, [str(argument) for argument in arguments])


def test_the_command_writes_what_duckdb_would(master: str, built: Path) -> None:
    asked = ("sql", built, "--query", "top_kernels", "--set", "rows=3", "--format", "csv")
    there, here = call(*asked, "--engine", "spark", "--master", master), call(*asked)
    assert (there.exit_code, here.exit_code) == (0, 0), there.output
    assert test_queries._rows(there.stdout) == test_queries._rows(here.stdout)
    assert len(there.stdout.splitlines()) == 4


def test_a_statement_that_only_duckdb_has_is_refused_in_one_line(master: str, built: Path) -> None:
    sql = "SELECT approx_quantile(duration_ns, 0.5) FROM kernels"
    result = call("sql", built, sql, "--engine", "spark", "--master", master)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("nanalyze: error: approx_quantile: not known to mean the same")


def test_only_reading_statements_go_to_spark(trace: tuple[spark.SparkRun, na.Run]) -> None:
    for sql in ("DROP TABLE x", "CREATE TABLE x AS SELECT 1", "SELECT 1; SELECT 2", "COPY kernels TO '/tmp/x'"):
        with pytest.raises(QueryError):
            trace[0].sql(sql)


@pytest.mark.parametrize("options", [("--engine", "spark"), ("--master", "local[1]")])
def test_engine_and_master_go_together(built: Path, options: tuple[str, str]) -> None:
    result = call("sql", built, "SELECT 1", *options)
    assert result.exit_code == 2
    assert "give both" in result.stderr


def test_a_master_that_is_not_there_is_told_at_once(built: Path) -> None:
    with pytest.raises(session.EngineError, match=r"^spark://127.0.0.1:9: no master answers there"):
        spark.open(built, "spark://127.0.0.1:9")


def test_a_second_cluster_in_one_process_is_refused(sample: object, built: Path) -> None:
    with pytest.raises(session.EngineError, match=r"^local\[1\]: this process already has a Spark session"):
        spark.open(built, "local[1]")


def test_a_place_that_is_not_there(master: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"run.json: is not there"):
        spark.open(tmp_path / "nothing", master)


def test_a_scheme_without_a_connector_says_what_to_add(master: str) -> None:
    jars = Path(importlib.import_module("pyspark").__file__ or "").parent / "jars"
    if any(jars.glob("hadoop-aws*")):
        pytest.skip("this Spark has a connector for S3")
    with pytest.raises(RunError, match=r"^s3://bucket/run/run.json: Spark has no connector for s3://"):
        spark.open("s3://bucket/run", master)


def test_a_damaged_page_is_told_with_its_shard_and_gives_no_number(master: str, built: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "a run"
    shutil.copytree(built, run_dir)
    (shard,) = sorted((run_dir / "kernels" / f"process={test_queries.PROCESS}").glob("000001-*"))
    data = bytearray(shard.read_bytes())
    data[100] ^= 1  # in the first page's values
    shard.write_bytes(data)
    with spark.open(run_dir, master) as run, pytest.raises(QueryError) as caught:
        run.sql("SELECT sum(start_ns % 1000) AS s, sum(duration_ns) AS d FROM raw.kernels ORDER BY 1")
    assert str(caught.value).startswith(f"{shard}: is damaged")


def test_a_shard_that_is_gone_is_told(master: str, built: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "a run"
    shutil.copytree(built, run_dir)
    with spark.open(run_dir, master) as run:
        shutil.rmtree(run_dir / "kernels")
        with pytest.raises(QueryError, match=r"is gone since the run was opened\. Open the run again\.$"):
            run.sql("SELECT count(duration_ns) AS n, sum(start_ns % 7) AS s FROM raw.kernels ORDER BY 1")


def test_two_runs_side_by_side_keep_their_views(
    master: str, built: Path, sample: tuple[spark.SparkRun, na.Run]
) -> None:
    sql = "SELECT count(*) AS n, min(start_ns) AS first_ns FROM raw.kernels ORDER BY 1"
    with spark.open(built, master) as other:
        one, two = sample[0].arrow(sql).to_pylist(), other.arrow(sql).to_pylist()
    assert two == [{"n": 11, "first_ns": T0 + 10_000}]
    assert one != two
    with pytest.raises(QueryError, match="the run is closed"):
        other.arrow(sql)
