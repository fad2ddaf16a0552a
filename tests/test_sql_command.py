"""`nanalyze sql` and the command group: what is printed where, exit codes, files, the prompt."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from trace import T0, Trace

import click
import duckdb
import pyarrow.parquet as pq
import pytest
import test_queries
from click.testing import CliRunner, Result
from simulator import Job, simulate

import nanalyze.analysis as na
from nanalyze import commands, queries
from nanalyze.analysis import script
from nanalyze.commands import _answer, _describe, _open, _output
from nanalyze.commands import sql as sql_module
from nanalyze.rundir.errors import NanalyzeError

HOSTILE = "\x1b[2J<script>\u202e\x07\n"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trace = Trace(tmp_path_factory.mktemp("sql") / "run")
    trace.device()
    for i, name in enumerate(("gemm", "copy", HOSTILE)):
        trace.kernel(trace.kernel_class(name, kernel_class_id=2**62 + i), 1000 * i, 100 * (3 - i))
    trace.write()
    return trace.run_dir


def nanalyze(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(commands.main, [str(argument) for argument in arguments], input=stdin)


def output(*arguments: object, stdin: str | None = None) -> str:
    result = nanalyze(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


NAMES = "SELECT kernel, launches, total_ns FROM verdicts ORDER BY total_ns DESC"


# --- formats -----------------------------------------------------------------------------------


def test_a_table_is_aligned_and_shows_null_and_escapes(run_dir: Path) -> None:
    query = (
        "SELECT kernel, total_ns, level_or_pipe AS level, total_ns / 7.0e0 AS d FROM verdicts ORDER BY total_ns DESC"
    )
    assert output("sql", run_dir, query).splitlines() == [
        "kernel                       total_ns  level        d",
        "---------------------------  --------  -----  -------",
        "gemm                              300   NULL  42.8571",
        "copy                              200   NULL  28.5714",
        r"\x1b[2J<script>\u202e\x07\n       100   NULL  14.2857",
    ]  # fmt: skip


def test_text_that_looks_like_null_is_told_apart_in_a_table(run_dir: Path) -> None:
    lines = output("sql", run_dir, "SELECT unnest([NULL, 'NULL', '', 'x']) AS a").splitlines()
    assert lines == ["a", "------", "NULL", "'NULL'", "''", "x"]


def test_a_long_cell_is_cut_in_a_table_only(run_dir: Path) -> None:
    query = "SELECT repeat('x', 10000) AS a"
    assert output("sql", run_dir, query).splitlines()[2] == "x" * 77 + "..."
    assert output("sql", run_dir, query, "--format", "csv") == f'a\n"{"x" * 10000}"\n'


def test_a_table_has_a_limit_and_says_so(run_dir: Path) -> None:
    result = nanalyze("sql", run_dir, "SELECT * FROM range(2000) AS t(n) ORDER BY n")
    assert len(result.stdout.splitlines()) == 1002
    assert result.stderr == "Only the first 1000 rows are shown: --max-rows or --format csv gives more.\n"
    assert len(output("sql", run_dir, "SELECT * FROM range(2000)", "--max-rows", 2000).splitlines()) == 2002


@pytest.mark.parametrize(("format_", "rows"), [("csv", 4), ("json", 5)])
def test_max_rows_holds_for_every_format(run_dir: Path, format_: str, rows: int) -> None:
    text = output("sql", run_dir, "SELECT * FROM range(30000)", "--format", format_, "--max-rows", 3)
    assert len(text.splitlines()) == rows


def test_csv_is_exact_and_null_is_empty(run_dir: Path) -> None:
    text = output("sql", run_dir, "SELECT * FROM kernels ORDER BY start_ns", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["start_ns"] for row in rows] == [str(T0), str(T0 + 1000), str(T0 + 2000)]
    assert {row["range_id"] for row in rows} == {""}


def test_csv_of_types_it_does_not_know(run_dir: Path) -> None:
    query = (
        "SELECT sum(9::BIGINT) AS s, [1, NULL] AS l, {'a': 'x,y'} AS o, 170141183460469231731687303715884105727 AS h"
    )
    assert output("sql", run_dir, query, "--format", "csv") == (
        's,l,o,h\n9,"[1, null]","{""a"": ""x,y""}","170141183460469231731687303715884105727"\n'
    )


def test_json_is_exact_and_has_no_nan(run_dir: Path) -> None:
    query = (
        "SELECT kernel_class_id AS id, kernel, bound = 'x' AS b, NULL AS n, 'NaN'::DOUBLE AS nan, "
        "'-inf'::DOUBLE AS inf, sum(total_ns) OVER () AS total, [1.5, 'nan'::DOUBLE] AS list "
        "FROM verdicts ORDER BY kernel_class_id"
    )
    rows = json.loads(output("sql", run_dir, query, "--format", "json"), parse_constant=pytest.fail)
    assert [row["id"] for row in rows] == [2**62, 2**62 + 1, 2**62 + 2]
    assert rows[2]["kernel"] == HOSTILE
    assert rows[0] == {
        "id": 2**62, "kernel": "gemm", "b": False, "n": None,
        "nan": None, "inf": None, "total": 600, "list": [1.5, None],
    }  # fmt: skip


def test_json_of_no_rows_and_of_repeated_names(run_dir: Path) -> None:
    assert output("sql", run_dir, "SELECT 1 AS a WHERE FALSE", "--format", "json") == "[]\n"
    assert json.loads(output("sql", run_dir, "SELECT 1 AS a, 2 AS a", "--format", "json")) == [{"a": 1, "a_1": 2}]


def test_parquet_goes_to_a_file(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    assert output("sql", run_dir, NAMES, "--format", "parquet", "-o", out) == ""
    assert pq.read_table(out).to_pydict() == {
        "kernel": ["gemm", "copy", HOSTILE], "launches": [1, 1, 1], "total_ns": [300, 200, 100]
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == [out]


def test_parquet_to_a_pipe(run_dir: Path) -> None:
    result = CliRunner().invoke(commands.main, ["sql", str(run_dir), NAMES, "--format", "parquet"])
    assert pq.read_table(io.BytesIO(result.stdout_bytes)).num_rows == 3


def test_markdown_shows_every_value_as_it_is(run_dir: Path) -> None:
    query = "SELECT unnest(['a|b', 'f<T*>(x_y, __g__)', NULL]) AS name, unnest([1, 20, NULL]) AS n, 'x' AS _a"
    assert output("sql", run_dir, query, "--format", "markdown").splitlines() == [
        r"| name | n | \_a |",
        "| --- | ---: | --- |",
        r"| a\|b | 1 | x |",
        r"| f\<T\*\>(x_y, \_\_g\_\_) | 20 | x |",
        "| NULL | NULL | x |",
    ]


def test_vertical_is_a_line_a_value_and_cuts_none(run_dir: Path) -> None:
    query = "SELECT repeat('x', 100) AS long, NULL AS n UNION ALL SELECT chr(27), 5 ORDER BY long"
    assert output("sql", run_dir, query, "--format", "vertical").splitlines() == [
        "--- row 1 ---", r"long  \x1b", "   n  5", "--- row 2 ---", f"long  {'x' * 100}", "   n  NULL",
    ]  # fmt: skip
    assert output("sql", run_dir, "SELECT 1 AS a WHERE FALSE", "--format", "vertical") == ""


@pytest.mark.parametrize("format_", _output.FOR_PEOPLE)
def test_what_is_for_people_has_a_limit(run_dir: Path, format_: str) -> None:
    result = nanalyze("sql", run_dir, "SELECT * FROM range(1001)", "--format", format_)
    assert result.stderr.startswith("Only the first 1000 rows are shown")


def test_an_explanation_keeps_its_lines(run_dir: Path) -> None:
    text = output("sql", run_dir, "EXPLAIN SELECT count(*) FROM devices")
    assert len(text.splitlines()) > 3
    assert "explain_value" not in text


# --- files -------------------------------------------------------------------------------------


def test_nothing_is_overwritten_without_force(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    out.write_text("mine")
    result = nanalyze("sql", run_dir, NAMES, "--format", "csv", "-o", out)
    assert (result.exit_code, result.stderr) == (1, f"nanalyze: error: {out}: exists. Use --force to overwrite it.\n")
    assert out.read_text() == "mine"
    output("sql", run_dir, NAMES, "--format", "csv", "-o", out, "--force")
    assert out.read_text().startswith("kernel,launches,total_ns\n")


def test_an_error_half_way_leaves_no_file(run_dir: Path, tmp_path: Path) -> None:
    query = "SELECT CASE WHEN range < 50000 THEN 1 ELSE CAST('x' AS INTEGER) END AS a FROM range(100000)"
    for format_ in _output.FORMATS:
        result = nanalyze("sql", run_dir, query, "--format", format_, "-o", tmp_path / "out", "--max-rows", 10**6)
        assert result.exit_code == 1, format_
        assert result.stderr.startswith("nanalyze: error: Conversion Error: Could not convert string 'x' to INT32")
        assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_does_not_exist(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "no" / "out.csv"
    result = nanalyze("sql", run_dir, NAMES, "-o", out)
    assert (result.exit_code, result.stderr) == (
        1, f"nanalyze: error: {out}: cannot be written: No such file or directory.\n"
    )  # fmt: skip


# --- where the query comes from ----------------------------------------------------------------


def test_the_query_from_a_file_a_pipe_or_a_dash(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "q.sql").write_text("-- one\nSELECT 41 + 1 AS a;\n")
    expected = " a\n--\n42\n"
    assert output("sql", run_dir, "-f", tmp_path / "q.sql") == expected
    assert output("sql", run_dir, stdin="SELECT 42 AS a") == expected
    assert output("sql", run_dir, "-", stdin="SELECT 42 AS a;") == expected


def test_a_query_and_a_file_are_too_much(run_dir: Path) -> None:
    result = nanalyze("sql", run_dir, "SELECT 1", "-f", "q.sql")
    assert result.exit_code == 2
    assert "Give QUERY or --file, not both." in result.stderr


def test_a_file_that_cannot_be_read(run_dir: Path, tmp_path: Path) -> None:
    result = nanalyze("sql", run_dir, "-f", tmp_path / "q.sql")
    assert result.stderr == f"nanalyze: error: {tmp_path}/q.sql: cannot be read: No such file or directory.\n"
    (tmp_path / "q.sql").write_bytes(b"\xff\xfe")
    assert "q.sql: is not UTF-8 text." in nanalyze("sql", run_dir, "-f", tmp_path / "q.sql").stderr


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["sql", "RUN", "SELECT x FROM kernels"], 1, 'Referenced column "x" not found'),
        (["sql", "RUN", "DROP VIEW kernels"], 1, "DROP is not permitted: a run is only read."),
        (["sql", "RUN", ""], 1, "empty query. Give one SELECT statement."),
        (["sql", "RUN", ".nope"], 1, ".nope: no such command. `.help` lists them."),
        (["sql", "RUN", ".schema nope"], 1, "nope: no such view. `.tables` lists them."),
        (["sql", "nowhere", "SELECT 1"], 1, "nowhere: does not exist."),
        (["sql", "RUN", "SELECT * FROM read_text('/etc/passwd')"], 1, "--allow-external"),
        (["sql"], 2, "Missing argument 'RUN_DIR'"),
        (["sql", "RUN", "SELECT 1", "--format", "xml"], 2, "Invalid value for '--format'"),
        (["sql", "RUN", "SELECT 1", "--max-rows", "0"], 2, "Invalid value for '--max-rows'"),
        (["nope"], 2, "No such command 'nope'"),
    ],
)
def test_errors_are_one_line_on_stderr(run_dir: Path, arguments: list[str], code: int, message: str) -> None:
    result = nanalyze(*[run_dir if argument == "RUN" else argument for argument in arguments])
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
    if code == 1:
        assert result.stderr.startswith("nanalyze: error: ")
        assert result.stderr.count("\n") == 1


def test_a_path_cannot_smuggle_lines_into_the_error(tmp_path: Path) -> None:
    result = nanalyze("sql", tmp_path / "a\nnanalyze: error: \x1b[31mforged", "SELECT 1")
    assert result.stderr.count("\n") == 1
    assert "\x1b" not in result.stderr


def test_damage_is_a_warning_and_the_rest_is_read(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    for i in range(4):
        trace.kernel(kernel, i, 1)
    trace.write(shards=2)
    next((tmp_path / "kernels").rglob("000001-*")).write_bytes(b"")
    result = nanalyze("sql", tmp_path, "SELECT count(*) AS n FROM kernels")
    assert (result.exit_code, result.stdout) == (0, "n\n-\n2\n")
    assert result.stderr == (
        f"nanalyze: warning: {tmp_path}: 1 problem with its shards; the view `damage` lists them.\n"
    )


def test_external_files_only_when_asked_for(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a\n1\n")
    query = f"SELECT a FROM read_csv('{tmp_path}/x.csv')"
    assert nanalyze("sql", run_dir, query).exit_code == 1
    assert output("sql", run_dir, query, "--allow-external") == "a\n-\n1\n"


def test_progress_shows_only_where_opening_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(_open.time, "monotonic", lambda: now[0])
    progress = _open._Progress()
    for done, at in ((1, 0.5), (2, 1.5), (3, 1.55), (4, 1.7)):
        now[0] = at
        progress(done, 4)
    progress.clear()
    bar = "checking shards [" + "#" * 15 + " " * 15 + "] 2/4"
    full = "checking shards [" + "#" * 30 + "] 4/4"
    assert capsys.readouterr().err == f"\r{bar}\r{full}\r{' ' * len(full)}\r"


# --- dot commands ------------------------------------------------------------------------------


def test_tables_lists_the_public_views(run_dir: Path) -> None:
    lines = output("sql", run_dir, ".tables").splitlines()
    assert [line.split()[0] for line in lines] == sorted(n for n in queries.VIEWS if not n.startswith("_"))
    assert "verdicts                what bounds each kernel class" in output("sql", run_dir, ".tables")


def test_schema_shows_type_unit_and_meaning(run_dir: Path) -> None:
    text = output("sql", run_dir, ".schema counters;")
    assert "  standard_error   DOUBLE   as the counter  Of the mean; NULL where one launch was measured." in text
    everything = output("sql", run_dir, ".schema").splitlines()
    for name in queries.VIEWS:
        shown = any(line.startswith(f"{name}: ") for line in everything)
        assert shown == (not name.startswith("_")), name


def test_queries_lists_the_shipped_ones_with_their_parameters(run_dir: Path) -> None:
    lines = output("sql", run_dir, ".queries").splitlines()
    titles = [line for line in lines if not line.startswith(" ")]
    assert [line.split(":")[0] for line in titles] == list(queries.query_names())
    assert all(line.endswith("?") for line in titles)
    assert lines[lines.index("top_kernels: which kernels take the most GPU time?") + 1] == (
        "    rows=20  INTEGER  -  How many."
    )
    assert "    width_ns=1   BIGINT   ns  Length of a piece." in lines


def test_one_query_is_described_with_its_columns(run_dir: Path) -> None:
    lines = output("sql", run_dir, ".queries top_kernels").splitlines()
    assert lines[:4] == [
        "top_kernels: which kernels take the most GPU time?", "Parameters:", "    rows=20  INTEGER  -  How many.",
        "Columns:",
    ]  # fmt: skip
    assert len(lines) == 4 + len(queries.query("top_kernels").columns)


def test_the_option_queries_needs_no_run_and_shows_whole_headers() -> None:
    text = output("sql", "--queries")
    blocks = {block.splitlines()[0]: block for block in text.split("\n\n")}
    assert list(blocks) == list(queries.query_names())
    for name, block in blocks.items():
        query = queries.query(name)
        assert " ".join(block.split()).startswith(f"{name} {query.summary.removeprefix(name + ': ')}")
        assert block.count("\n    ") == len(query.parameters)


# --- shipped queries by name -------------------------------------------------------------------


def kernels(text: str) -> list[str]:
    return [row["kernel"] for row in csv.DictReader(io.StringIO(text))]


@pytest.mark.parametrize(
    ("assignments", "names"),
    [([], ["gemm", "copy", HOSTILE]), (["rows=2"], ["gemm", "copy"]), (["n=1"], ["gemm"]), (["rows=0"], [])],
)
def test_a_shipped_query_by_name(run_dir: Path, assignments: list[str], names: list[str]) -> None:
    options = [word for assignment in assignments for word in ("--set", assignment)]
    assert kernels(output("sql", run_dir, "--query", "top_kernels", *options, "--format", "csv")) == names
    dotted = output("sql", run_dir, " ".join([".query top_kernels", *assignments]), "--format", "csv")
    assert kernels(dotted) == names


def test_every_shipped_query_runs_with_its_defaults(tmp_path: Path) -> None:
    test_queries.build(tmp_path / "run")
    with na.open(tmp_path / "run") as run:
        for name in queries.query_names():
            question = _answer.shipped(name, [])
            table = run.arrow(question.sql, question.values)
            assert table.column_names == [column.name for column in queries.query(name).columns], name


def test_text_and_null_are_values_of_a_parameter(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    for i, name in enumerate(("it's a; step", "other")):
        trace.range(name, 1000 * i, 1000 * i + 500)
        trace.kernel(kernel, 1000 * i + 10, 100 + i)
    trace.write()

    def kernel_ns(*options: str) -> list[str]:
        text = output("sql", tmp_path, "--query", "compare_repetitions", *options, "--format", "csv")
        return [row["kernel_ns"] for row in csv.DictReader(io.StringIO(text)) if row["kernel_class_id"]]

    assert kernel_ns("--set", "range_name=it's a; step") == ["100"]
    assert kernel_ns("--set", "range_name=other") == ["101"]
    assert kernel_ns("--set", "range_name=NULL", "--set", "most=1") == ["201"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--query", "topkernels"], "topkernels: no such query. Nearest: top_kernels, trend_kernels."),
        (["--query", "zzz"], f"zzz: no such query. Shipped are {', '.join(queries.query_names())}."),
        (["--query", "top_kernels", "--set", "row=1"], "top_kernels: no parameter 'row'. It takes rows."),
        (["--query", "losses", "--set", "a=1"], "losses: no parameter 'a'. It takes none."),
        (
            ["--query", "compare_repetitions", "--set", "range=x"],
            "compare_repetitions: no parameter 'range'. Nearest: range_name. It takes range_name, skip, most, within.",
        ),
        (["--query", "top_kernels", "--set", "rows"], "top_kernels: 'rows' is not NAME=VALUE. Give a parameter such"),
        (["--query", "top_kernels", "--set", "rows=many"], "top_kernels: rows=many is not a whole number. Give one."),
        (["--query", "top_kernels", "--set", "rows=2147483648"], "rows=2147483648 is not a whole number."),
        (["--query", "report_timeline", "--set", "first_ns=1.5"], "first_ns=1.5 is not a whole number in ns. Give one"),
        ([".query"], "query: no such query. Shipped are"),
        ([".query top_kernels 'x"], "no closing quotation. Close the quote"),
        ([".save x.csv"], ".save: is for the prompt."),
        ([".shema"], ".shema: no such command. Nearest: .schema. `.help` lists them."),
        ([".schema kernel"], "kernel: no such view. Nearest: kernels"),
        ([".queries ranges"], "ranges: no such query. Nearest: "),
    ],
)  # fmt: skip
def test_wrong_names_and_parameters_are_one_line(run_dir: Path, arguments: list[str], message: str) -> None:
    result = nanalyze("sql", run_dir, *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["SELECT 1", "--query", "losses"], "Give QUERY or --query, not both."),
        (["-f", "x", "--emit-views", "y"], "Give --file or --emit-views, not both."),
        (["SELECT 1", "--set", "a=1"], "--set gives parameters to a shipped query: name it with --query."),
        (["SELECT 1", "--relative"], "--relative is for --emit-views: give both."),
    ],
)
def test_options_that_do_not_go_together(run_dir: Path, arguments: list[str], message: str) -> None:
    result = nanalyze("sql", run_dir, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_parameters_of_every_type_are_converted() -> None:
    def value(kind: str, text: str) -> object:
        return queries.Parameter("x", kind, "NULL", "").value(text)

    assert [value("INTEGER", "-2147483648"), value("BIGINT", "9223372036854775807")] == [-(2**31), 2**63 - 1]
    assert [value("DOUBLE", "1e3"), value("BOOLEAN", "TRUE"), value("BOOLEAN", "false")] == [1000.0, True, False]
    assert [value("VARCHAR", "1"), value("VARCHAR", ""), value("DOUBLE", "NULL")] == ["1", "", None]
    for kind, text in (("DOUBLE", "inf"), ("DOUBLE", "x"), ("BOOLEAN", "1"), ("BIGINT", str(2**63)), ("INTEGER", "")):
        with pytest.raises(ValueError):
            value(kind, text)


def test_from_python_text_is_taken_as_it_is() -> None:
    query = queries.query("compare_clocks")
    assert queries.bind(query, {}) == {"range_name": None}
    assert queries.bind(query, {"range_name": "NULL"}) == {"range_name": "NULL"}
    assert queries.bind_text(query, {"range_name": "NULL"}) == {"range_name": None}


# --- views for a plain DuckDB ------------------------------------------------------------------


def emitted(run_dir: Path, file: Path, *options: str) -> duckdb.DuckDBPyConnection:
    output("sql", run_dir, "--emit-views", file, *options)
    connection = duckdb.connect()
    connection.execute(file.read_text())
    return connection


def check_equal(run: na.Run, connection: duckdb.DuckDBPyConnection) -> None:
    """Every public view gives the same rows here and there, in whatever order."""
    for name in _describe.public_views():
        query = f"SELECT CAST(v AS VARCHAR) AS row FROM {name} AS v ORDER BY 1"
        assert connection.execute(query).fetchall() == [(row,) for row in run.sql(query)["row"]], name


HOSTILE_FOLDERS = ('~it\'s "mine" $a 漢', "a=1/process=2/[x]*?{y,z}", "line\n.quit\n; DROP TABLE x --")


@pytest.mark.parametrize("folder", HOSTILE_FOLDERS)
@pytest.mark.parametrize("options", [(), ("--relative",)])
def test_a_plain_duckdb_has_the_same_views(
    folder: str, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / folder / "run"
    test_queries.build(run_dir)
    monkeypatch.chdir(tmp_path)
    with na.open(run_dir) as run, emitted(run_dir, tmp_path / "views.sql", *options) as connection:
        assert connection.execute("SELECT count(*) FROM verdicts").fetchone() == (5,)
        check_equal(run, connection)
        connection.execute((tmp_path / "views.sql").read_text())  # once more
        assert connection.execute("SELECT count(*) FROM verdicts").fetchone() == (5,)
    assert (str(tmp_path) in (tmp_path / "views.sql").read_text()) == (not options)


def test_the_script_moves_with_the_run_where_paths_are_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_queries.build(tmp_path / "~a" / "run")
    output("sql", tmp_path / "~a" / "run", "--emit-views", tmp_path / "~a" / "views.sql", "--relative")
    (tmp_path / "~a").rename(tmp_path / "~b")
    monkeypatch.chdir(tmp_path / "~b")
    with duckdb.connect() as connection:
        connection.execute(Path("views.sql").read_text())
        assert connection.execute("SELECT count(*) FROM kernels").fetchone() == (11,)


def test_attributed_samples_stand_in_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    simulate(Job(classes=4, seconds=0.5), 0).write(run_dir)
    with na.open(run_dir) as run, emitted(run_dir, tmp_path / "views.sql") as connection:
        assert run.sql("SELECT count(*) AS n FROM attribution")["n"][0] > 0
        check_equal(run, connection)
    assert "-- Left out" not in (tmp_path / "views.sql").read_text()

    monkeypatch.setattr(script, "MADE_ROWS_MAX", 0)
    with emitted(run_dir, tmp_path / "short.sql") as connection:
        views = {name for (name,) in connection.execute("SELECT view_name FROM duckdb_views()").fetchall()}
        assert connection.execute("SELECT count(*) FROM kernels").fetchone() is not None
    text = (tmp_path / "short.sql").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("-- Left out")]
    assert {"attribution", "verdicts", "overhead"}.isdisjoint(views)
    assert all(f" {name}" in line for name in ("attribution", "verdicts", "overhead"))
    assert {"kernels", "samples"} <= views


def test_the_script_says_which_versions_read_it_and_overwrites_nothing(run_dir: Path, tmp_path: Path) -> None:
    text = output("sql", run_dir, "--emit-views", "-")
    assert text.splitlines()[1] == f"-- Needs DuckDB 1.4.1 or later; written with {duckdb.__version__}."
    (tmp_path / "v.sql").write_text("mine")
    result = nanalyze("sql", run_dir, "--emit-views", tmp_path / "v.sql")
    assert (result.exit_code, (tmp_path / "v.sql").read_text()) == (1, "mine")
    output("sql", run_dir, "--emit-views", tmp_path / "v.sql", "--force")
    assert (tmp_path / "v.sql").read_text() == text


# --- the prompt --------------------------------------------------------------------------------


def prompt(run_dir: Path, monkeypatch: pytest.MonkeyPatch, *lines: str | BaseException) -> Result:
    """A session in which these lines are typed; an exception stands for the key that raises it."""
    pending = iter(lines)

    def typed(text: str = "") -> str:
        line = next(pending, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(sql_module, "_query_text", lambda query, file: None)
    monkeypatch.setenv("XDG_STATE_HOME", str(run_dir.parent / "state"))
    return nanalyze("sql", run_dir)


def test_the_prompt_answers_until_the_end(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = prompt(run_dir, monkeypatch, "SELECT 1", "  + 1 AS a;", "", ".run top_kernels", ".schema run")
    assert result.exit_code == 0
    assert "a\n-\n2\n" in result.stdout
    assert "share_so_far" in result.stdout
    assert "created_ns" in result.stdout


def test_an_error_does_not_end_the_prompt(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("SELEC;", ".nope", ".run nope", "SELECT 5 AS five;", ".quit", "SELECT 6 AS six;")
    result = prompt(run_dir, monkeypatch, *lines)
    assert result.stderr.count("nanalyze: error: ") == 3
    assert "five\n----\n   5\n" in result.stdout
    assert "six" not in result.stdout


def test_ctrl_c_drops_the_statement(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = prompt(run_dir, monkeypatch, "SELECT 1 AS one,", KeyboardInterrupt(), "SELECT 5 AS five;")
    assert result.exit_code == 0
    assert "five\n----\n   5\n" in result.stdout
    assert "one" not in result.stdout


# --- the group ---------------------------------------------------------------------------------


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A verb `sql` whose module is the one given."""
    module = types.ModuleType("nanalyze.commands.sql")
    module.__spec__ = sql_module.__spec__
    monkeypatch.setitem(sys.modules, "nanalyze.commands.sql", module)
    return module


def test_a_bug_keeps_its_traceback(verb: types.ModuleType) -> None:
    @click.command()
    def sql() -> None:
        raise ZeroDivisionError("a bug")

    verb.sql = sql  # type: ignore[attr-defined]
    result = nanalyze("sql")
    assert isinstance(result.exception, ZeroDivisionError)
    assert "nanalyze: error" not in result.output


def test_an_error_s_own_exit_code_is_used(verb: types.ModuleType) -> None:
    class Special(NanalyzeError):
        exit_code = 7

    @click.command()
    def sql() -> None:
        raise Special("x: no. Do y.")

    verb.sql = sql  # type: ignore[attr-defined]
    result = nanalyze("sql")
    assert (result.exit_code, result.stderr) == (7, "nanalyze: error: x: no. Do y.\n")


def test_a_broken_command_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> types.ModuleType:
        raise ImportError(f"No module named {name!r}", name="duckdb")

    monkeypatch.setattr(commands.importlib, "import_module", broken)
    listing = nanalyze("--help")
    assert listing.exit_code == 0
    assert "(cannot be loaded:" in listing.output
    result = nanalyze("sql", "x", "--anything")
    assert result.exit_code == 1
    assert result.stderr.endswith("To use it, install duckdb.\n")


def test_the_group_loads_nothing_before_it_is_asked() -> None:
    code = (
        "import sys, nanalyze.commands; "
        "print([m for m in ('duckdb', 'pyarrow', 'pandas', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_closed_pipe_ends_quietly(run_dir: Path) -> None:
    program = [sys.executable, "-c", "from nanalyze.commands import main; main()", "sql", str(run_dir)]
    query = "SELECT * FROM range(3000000)"
    with subprocess.Popen(
        [*program, query, "--format", "csv"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(100)
        process.stdout.close()
        errors = process.stderr.read()
    assert errors == b""
    assert process.returncode == 1


def test_a_terminal_without_unicode_gets_escapes(run_dir: Path) -> None:
    program = [sys.executable, "-c", "from nanalyze.commands import main; main()", "sql", str(run_dir)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run([*program, "SELECT x FROM y"], capture_output=True, env=environment, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(b"nanalyze: error: ")


def test_escape_leaves_text_and_takes_controls() -> None:
    assert _output.escape("Ünïcode 漢字 ok") == "Ünïcode 漢字 ok"
    assert _output.escape("a\x1b\x9b\u200b\u2028\ud800\r") == r"a\x1b\x9b\u200b\u2028\ud800\r"
