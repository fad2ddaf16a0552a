"""Views are made when a statement first needs them, and nobody sees a difference."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from trace import Trace

import duckdb
import pytest

import nanalyze.analysis as na
from nanalyze import queries
from nanalyze.analysis import catalog, connection, launch_scan, launch_streams, made, overhead
from nanalyze.analysis.views import Views
from nanalyze.rundir import runfile
from nanalyze.rundir.errors import QueryError, RunError


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with launches, a range, a copy, samples with a counter of their own and an exact counter."""
    path = tmp_path_factory.mktemp("run")
    trace = Trace(path)
    trace.device()
    kernel = trace.kernel_class("k")
    trace.range("step", 0, 3_000)
    for place in range(4):
        number = trace.kernel(kernel, 1_000 * place, 100)
    trace.exact({"gpu__time_duration.sum": 100.0}, correlation_id=number)
    trace.copy("HtoD", 500, 50, 4096)
    trace.state(100)
    trace.pause(3_100, 3_200)
    for place in range(3):
        trace.add("samples", device_id=0, start_ns=place, end_ns=place + 1, counter_group=0, dram_read_bytes=1.0)
    trace.write()
    return path


@pytest.fixture
def run(run_dir: Path) -> Iterator[na.Run]:
    with na.open(run_dir) as opened:
        yield opened


def prepared(run_dir: Path) -> tuple[duckdb.DuckDBPyConnection, Views]:
    root = run_dir.resolve()
    return connection.prepared(root, runfile.read(root), catalog.scan(root), {}, False)


@pytest.fixture(scope="module")
def every(run_dir: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """The same with all views."""
    root = run_dir.resolve()
    with connection.connect(root, runfile.read(root), catalog.scan(root), {}, False) as whole:
        yield whole


def there(run: na.Run) -> set[str]:
    rows = run._connection.execute("SELECT schema_name, view_name FROM duckdb_views() WHERE NOT internal").fetchall()
    return {name if schema == "main" else f"{schema}.{name}" for schema, name in rows}


# --- what depends on what ------------------------------------------------------------------------


def tables_of(tree: object) -> Iterator[str]:
    """Every table that a serialised statement names, its common table expressions too."""
    if isinstance(tree, dict):
        if tree.get("type") == "BASE_TABLE":
            yield f"raw.{tree['table_name']}" if tree.get("schema_name") == "raw" else tree["table_name"]
        for value in tree.values():
            yield from tables_of(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from tables_of(value)


@pytest.mark.parametrize("name", queries.VIEWS)
def test_what_a_view_reads_is_what_duckdb_reads_from_it(name: str) -> None:
    with duckdb.connect() as connection:  # not the module's own, which other tests use
        ((text,),) = connection.execute("SELECT json_serialize_sql(?)", [queries.view(name).sql]).fetchall()
    named = {table for table in tables_of(json.loads(text)) if table.startswith("raw.") or table in queries.VIEWS}
    assert queries.reads(name) == named
    before = queries.VIEWS[: queries.VIEWS.index(name)]
    assert {table for table in named if not table.startswith("raw.")} <= set(before)


def test_needs_are_followed_to_the_end_and_not_beyond_what_is_there() -> None:
    assert queries.needed_for(frozenset({"ranges"})) == {"ranges", "raw.ranges"}
    assert {"kernels", "_launches", "_range_segments", "ranges", "raw.ranges", "raw.kernels", "raw.exact"} <= (
        queries.needed_for(frozenset({"kernels"}))
    )
    there = frozenset({"_range_segments"})
    assert "_range_segments" not in queries.needed_for(frozenset({"_range_buckets"}), there)
    assert queries.needed_for(frozenset({"_range_buckets"}), frozenset({"_range_buckets"})) == frozenset()
    assert queries.users_of(("pauses",)) >= {"pauses", "_pause_spans", "_stream_time"}


# --- what is made --------------------------------------------------------------------------------


def test_a_statement_makes_what_it_needs_and_nothing_else(run: na.Run) -> None:
    assert there(run) == set()
    run.arrow("SELECT count(*) FROM ranges")
    assert there(run) == {"ranges", "raw.ranges"}
    run.arrow("SELECT count(*) FROM kernels")
    assert there(run) == queries.needed_for(frozenset({"kernels"}))
    assert "verdicts" not in there(run)
    run.arrow("SELECT 1")
    assert there(run) == queries.needed_for(frozenset({"kernels"}))


@pytest.mark.parametrize("name", queries.VIEWS)
def test_a_view_made_alone_is_the_one_made_with_all(run_dir: Path, every: duckdb.DuckDBPyConnection, name: str) -> None:
    alone, views = prepared(run_dir)
    views.make(alone, [name])
    with alone:
        for question in (f"DESCRIBE {name}", f"SELECT * FROM {name} ORDER BY ALL"):
            assert alone.execute(question).fetchall() == every.execute(question).fetchall()


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT count(*) AS n FROM KERNELS",
        'SELECT count(*) AS n FROM "kernels"',
        'SELECT count(*) AS n FROM main."Kernels" AS "verdicts"',
        "SELECT count(*) AS n FROM memory.main.kernels",
        "SELECT count(*) AS n FROM/**/kernels",
        "SELECT count(*) AS n FROM query_table('ker' || 'nels')",
        "SELECT count(*) AS n FROM query('SELECT * FROM ker' || 'nels')",
        "SELECT count(*) AS n FROM raw.kernels",
        'SELECT count(*) AS n FROM "raw"."kernels"',
        "WITH kernels AS (SELECT * FROM kernels) SELECT count(*) AS n FROM kernels",
        "SELECT (SELECT count(*) FROM kernels) AS n",
        "FROM kernels SELECT count(*) AS n",
    ],
)
def test_a_name_is_found_however_it_is_written(run: na.Run, statement: str) -> None:
    assert run.arrow(statement).to_pylist() == [{"n": 4}]


def test_a_name_in_a_comment_is_none(run: na.Run) -> None:
    run.arrow("SELECT '--', * FROM ranges -- verdicts show\n /* kernels\n\n * counters describe */")
    assert there(run) == {"ranges", "raw.ranges"}
    assert queries.words("a'b--c''d'--e\n\"F--g\"/*h*/i") == set("abcdfgi")


def test_what_python_works_out_is_there_for_a_name_that_was_put_together(run: na.Run) -> None:
    assert run.arrow("SELECT count(*) AS n FROM query_table('over' || 'head')").to_pylist() == [{"n": 1}]


@pytest.mark.parametrize(
    "statement",
    [
        "SHOW TABLES",
        "SHOW ALL TABLES",
        "DESCRIBE",
        "SELECT * FROM (SHOW TABLES)",
        "SELECT table_name FROM information_schema.tables",
        "SELECT table_name, column_name, data_type FROM information_schema.columns",
        "SELECT schema_name, view_name FROM duckdb_views() WHERE NOT internal",
        'SELECT table_name, column_name FROM "duckdb_columns"() WHERE NOT internal',
        "SELECT viewname FROM pg_catalog.pg_views",
        "SELECT name FROM sqlite_master",
        "DESCRIBE verdicts",
        "SELECT name, type FROM pragma_table_info('kernels')",
    ],
)
def test_what_lists_views_lists_them_all(run: na.Run, every: duckdb.DuckDBPyConnection, statement: str) -> None:
    expected = sorted(every.execute(statement).fetchall(), key=str)
    found = sorted((tuple(row.values()) for row in run.arrow(statement).to_pylist()), key=str)
    if "table_info" not in statement and statement != "DESCRIBE verdicts":
        assert len(found) >= len(queries.VIEWS)
    assert [str(row) for row in found] == [str(row) for row in expected]


def test_an_explained_statement_makes_its_views(run: na.Run) -> None:
    assert run.arrow("EXPLAIN SELECT * FROM kernels").num_rows
    assert "kernels" in there(run)


def test_columns_of_samples_are_those_of_the_run(run: na.Run) -> None:
    assert "dram_read_bytes" in run.arrow("SELECT * FROM samples").column_names


def test_what_there_is_not_is_told_as_with_all_views(run: na.Run) -> None:
    with pytest.raises(QueryError, match=r'kernals does not exist.*Did you mean "kernels'):
        run.arrow("SELECT * FROM kernals")
    with pytest.raises(QueryError, match="lunches"):
        run.arrow("SELECT lunches FROM verdicts")


def test_a_shard_that_duckdb_refuses_is_named_when_it_is_needed(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    trace.kernel(trace.kernel_class("k"), 0, 5)
    trace.range("r", 0, 5)
    trace.write()
    run = na.open(tmp_path)
    path = run._catalog.shards["ranges"][-1].path
    path.write_bytes(b"PAR1 and then nothing that DuckDB could read PAR1")
    assert run.arrow("SELECT count(*) AS n FROM _launches").to_pylist() == [{"n": 1}]
    for _ in range(2):  # nothing is left half made
        with pytest.raises(RunError) as caught:
            run.arrow("SELECT count(*) FROM kernels")
        assert str(caught.value).startswith(f"{path}: DuckDB cannot read it (")
    path.unlink()
    with pytest.raises(QueryError, match="is gone since the run was opened"):
        run.arrow("SELECT count(*) FROM kernels")
    run.close()


# --- what is worked out in Python ----------------------------------------------------------------


def test_passes_read_the_views_that_they_say(run_dir: Path) -> None:
    found = catalog.scan(run_dir.resolve())
    works = {
        made.OVERHEAD_READS: lambda own: overhead.measure(own)["overhead"],
        made.SCAN_READS: lambda own: launch_scan.scan(own, found, 3).views["_launch_segments"],
        made.STREAM_READS: lambda own: launch_streams.stream_times(own, found),
        made.USE_READS: lambda own: launch_streams.device_use(own, found, 3),
    }
    for reads, work in works.items():
        own, views = prepared(run_dir)
        views.make(own, reads)
        assert work(own).num_rows  # type: ignore[no-untyped-call]
        own.close()


def test_what_a_pass_stands_in_for_is_not_made_again(run: na.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "FEWEST_LAUNCHES", 0)
    gaps = run.query("launch_gaps")
    kept = [name for (name,) in run._connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()]
    assert kept == ["_stream_time"]
    run.arrow("SHOW TABLES")
    sql = run._connection.execute("SELECT sql FROM duckdb_views() WHERE view_name = '_stream_time'").fetchall()
    assert "kept" in sql[0][0]
    assert run.query("launch_gaps").equals(gaps)


# --- what is loaded ------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "absent"), [
    ("--help", "duckdb numpy pyarrow pandas"),
    ("sql --help", "duckdb numpy pyarrow pandas"),
    ("report --help", "duckdb numpy pyarrow pandas matplotlib"),
    ("sql RUN 'SELECT 1'", "matplotlib nanalyze.analysis.attribution nanalyze.analysis.launch_scan"),
])  # fmt: skip
def test_a_command_loads_only_what_it_needs(run_dir: Path, arguments: str, absent: str) -> None:
    program = (
        "import shlex, sys; from nanalyze.commands import main\n"
        f"main(shlex.split({arguments!r}.replace('RUN', {str(run_dir)!r})), standalone_mode=False)\n"
        f"print('loaded', sorted(set({absent!r}.split()) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "loaded []"


def test_names_of_the_analysis_are_loaded_with_the_first() -> None:
    from nanalyze.analysis import run as module

    assert (na.open, na.Run, na.Batches) == (module.open, module.Run, module.Batches)
    with pytest.raises(AttributeError, match="has no attribute 'opens'"):
        na.opens  # noqa: B018
