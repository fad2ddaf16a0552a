"""Opening a run: what is checked, what is left out, what is reported, what is refused."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from trace import PROCESS, Trace, arrow_table

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import nanalyze.analysis as na
from nanalyze import queries
from nanalyze.analysis import catalog, connection
from nanalyze.rundir import runfile
from nanalyze.rundir.errors import FormatVersionError, NanalyzeError, QueryError, RunError
from nanalyze.rundir.schema import TABLES
from nanalyze.rundir.shards import digest, write_shard


def small(run_dir: Path, shards: int = 1, launches: int = 4) -> Trace:
    """A run of `launches` launches of one kernel, 100 ns each."""
    trace = Trace(run_dir)
    trace.device()
    kernel = trace.kernel_class("k")
    for i in range(launches):
        trace.kernel(kernel, start_ns=1000 * i, duration_ns=100)
    trace.write(shards)
    return trace


def shard_paths(run_dir: Path, table: str, process: str = PROCESS) -> list[Path]:
    return sorted((run_dir / table / f"process={process}").glob("*.parquet"))


def launches(run: na.Run) -> int:
    return int(run.sql("SELECT count(*) AS n FROM kernels")["n"][0])


def damage(run: na.Run) -> list[tuple[str, str | None, str]]:
    frame = run.damage()
    return list(zip(frame["table_name"], frame["process"], frame["problem"], strict=True))


def rewrite(path: Path, data: bytes) -> Path:
    """Replace a shard by `data` under a name whose hash fits, as only a writer would."""
    path.unlink()
    new = path.with_name(f"{path.name.split('-')[0]}-{digest(data)}.parquet")
    new.write_bytes(data)
    return new


def parquet_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def test_a_sound_run_has_no_damage(tmp_path: Path) -> None:
    small(tmp_path / "run", shards=2)
    with na.open(tmp_path / "run") as run:
        assert launches(run) == 4
        assert damage(run) == []
        assert run.info["source"] == "recorder"
        assert list(run.processes()["process"]) == [PROCESS]


def test_a_string_path_and_a_link_to_the_run_open_too(tmp_path: Path) -> None:
    small(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert launches(na.open(str(tmp_path / "link"))) == 4


# --- no run at all -----------------------------------------------------------------------------


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"nope: does not exist\. Give the directory"):
        na.open(tmp_path / "nope")


def test_a_directory_without_shards(tmp_path: Path) -> None:
    runfile.create(tmp_path, "recorder", {})
    with pytest.raises(RunError, match="holds no shards: nothing was recorded yet"):
        na.open(tmp_path)


def test_a_run_from_a_newer_version(tmp_path: Path) -> None:
    small(tmp_path)
    content = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**content, "format_version": 99}))
    with pytest.raises(FormatVersionError, match="has format version 99, this nanalyze reads versions 1 to 3"):
        na.open(tmp_path)


def test_nothing_readable_names_the_first_problem(tmp_path: Path) -> None:
    small(tmp_path)
    for table in TABLES:
        for path in shard_paths(tmp_path, table):
            path.write_bytes(b"")
    with pytest.raises(RunError, match=r"none of its shards can be read \(5 problems\)\. The first: .* is empty"):
        na.open(tmp_path)


# --- damaged shards ----------------------------------------------------------------------------


def test_a_flipped_bit_leaves_the_shard_out(tmp_path: Path) -> None:
    small(tmp_path, shards=2)
    path = shard_paths(tmp_path, "kernels")[0]
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    with na.open(tmp_path) as run:
        assert launches(run) == 2
        assert damage(run) == [("kernels", PROCESS, "does not match the hash in its name: it was changed or cut short")]
        assert run.damage()["path"][0] == f"kernels/process={PROCESS}/{path.name}"


def test_without_verification_the_hash_is_not_compared(tmp_path: Path) -> None:
    small(tmp_path)
    path = shard_paths(tmp_path, "kernels")[0]
    path.rename(path.with_name("000001-0000000000000000.parquet"))
    assert launches(na.open(tmp_path, verify=False)) == 4
    assert launches(na.open(tmp_path)) == 0


@pytest.mark.parametrize("verify", [True, False])
def test_a_truncated_shard_is_left_out(tmp_path: Path, verify: bool) -> None:
    small(tmp_path, shards=2)
    path = shard_paths(tmp_path, "kernels")[1]
    path.write_bytes(path.read_bytes()[:-20])
    with na.open(tmp_path, verify=verify) as run:
        assert launches(run) == 2
        assert len(damage(run)) == 1


def test_a_table_without_a_good_shard_is_an_empty_view(tmp_path: Path) -> None:
    small(tmp_path)
    with na.open(tmp_path) as run:
        whole = run.sql("DESCRIBE kernels")
    shard_paths(tmp_path, "kernels")[0].write_bytes(b"")
    with na.open(tmp_path) as run:
        assert launches(run) == 0
        assert run.sql("DESCRIBE kernels").equals(whole)
        assert len(run.verdicts()) == 0


def test_a_file_that_is_not_parquet(tmp_path: Path) -> None:
    small(tmp_path)
    rewrite(shard_paths(tmp_path, "kernels")[0], b"PAR1 not really PAR1")
    assert damage(na.open(tmp_path)) == [("kernels", PROCESS, "is not a Parquet file, or its footer is damaged")]


def test_a_foreign_parquet_file(tmp_path: Path) -> None:
    small(tmp_path)
    rewrite(shard_paths(tmp_path, "kernels")[0], parquet_bytes(pa.table({"a": [1]})))
    assert damage(na.open(tmp_path)) == [("kernels", PROCESS, "is a Parquet file that nanalyze did not write")]


def test_a_shard_from_a_newer_version(tmp_path: Path) -> None:
    small(tmp_path)
    path = shard_paths(tmp_path, "kernels")[0]
    table = pq.ParquetFile(path).read()
    metadata = {**table.schema.metadata, b"nanalyze.format_version": b"99"}
    rewrite(path, parquet_bytes(table.replace_schema_metadata(metadata)))
    with na.open(tmp_path) as run:
        assert damage(run) == [("kernels", PROCESS, "has format version '99', this nanalyze reads version 1")]
        assert run.damage()["remedy"][0].startswith("Upgrade nanalyze")


def test_a_shard_in_the_wrong_table(tmp_path: Path) -> None:
    small(tmp_path)
    copies = tmp_path / "copies" / f"process={PROCESS}"
    copies.mkdir(parents=True)
    path = shard_paths(tmp_path, "kernels")[0]
    shutil.move(path, copies / path.name)
    assert ("copies", PROCESS, "belongs to table 'kernels', not 'copies'") in damage(na.open(tmp_path))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: t.drop_columns(["stream_id"]), "column 'stream_id' is missing"),
        (lambda t: t.append_column("extra", pa.array([1] * len(t))), "has an unknown column 'extra'"),
        (
            lambda t: t.set_column(0, "start_ns", t["start_ns"].cast(pa.float64(), safe=False)),
            "column 'start_ns' is float64, not int64",
        ),
    ],
)
def test_a_shard_with_other_columns(tmp_path: Path, change: object, problem: str) -> None:
    small(tmp_path)
    path = shard_paths(tmp_path, "kernels")[0]
    table = pq.ParquetFile(path).read()
    changed = change(table)  # type: ignore[operator]
    rewrite(path, parquet_bytes(changed.replace_schema_metadata(table.schema.metadata)))
    assert damage(na.open(tmp_path)) == [("kernels", PROCESS, problem)]


def test_large_strings_and_another_order_of_columns_are_fine(tmp_path: Path) -> None:
    small(tmp_path)
    path = shard_paths(tmp_path, "kernel_classes")[0]
    table = pq.ParquetFile(path).read()
    names = list(reversed(table.column_names))
    changed = table.set_column(2, "name", table["name"].cast(pa.large_string())).select(names)
    rewrite(path, parquet_bytes(changed.replace_schema_metadata(table.schema.metadata)))
    with na.open(tmp_path) as run:
        assert damage(run) == []
        assert list(run.kernel_classes()["name"]) == ["k"]


def test_samples_may_have_a_column_for_each_counter(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    sample = {"device_id": 0, "start_ns": 0, "end_ns": 10, "counter_group": 0}
    trace.add("samples", **sample, **{"dram__bytes_read.sum": 5.0})
    trace.add("samples", process="node0-1-101", **sample, **{'odd "name"': 7.0})
    trace.write()
    with na.open(tmp_path) as run:
        frame = run.sql(
            'SELECT process, "dram__bytes_read.sum" AS a, "odd ""name""" AS b FROM samples ORDER BY process'
        )
        assert frame["a"].tolist()[0] == 5.0
        assert frame["b"].tolist()[1] == 7.0
        assert frame.isna().to_numpy().sum() == 2


# --- missing shards ----------------------------------------------------------------------------


def test_a_gap_in_the_numbers_is_a_lost_shard(tmp_path: Path) -> None:
    small(tmp_path, shards=4)
    for path in shard_paths(tmp_path, "kernels")[1:3]:
        path.unlink()
    with na.open(tmp_path) as run:
        assert launches(run) == 2
        assert damage(run) == [("kernels", PROCESS, "shards 2 to 3 are missing")]


def test_a_lost_last_shard_shows_in_the_count_of_the_process(tmp_path: Path) -> None:
    small(tmp_path, shards=4)
    shard_paths(tmp_path, "kernels")[-1].unlink()
    assert damage(na.open(tmp_path)) == [("kernels", PROCESS, "shard 4 is missing")]


def test_a_lost_folder_shows_too(tmp_path: Path) -> None:
    small(tmp_path, shards=4)
    shutil.rmtree(tmp_path / "kernels")
    assert damage(na.open(tmp_path)) == [("kernels", PROCESS, "shards 1 to 4 are missing")]


def test_a_process_that_still_runs_has_lost_nothing(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    trace.kernel(trace.kernel_class("k"), 0, 1)
    trace.write(end=False)
    assert damage(na.open(tmp_path)) == []


def test_a_process_without_its_row(tmp_path: Path) -> None:
    small(tmp_path)
    shutil.rmtree(tmp_path / "processes")
    with na.open(tmp_path) as run:
        assert damage(run) == [("processes", PROCESS, "shard 1 is missing")]
        assert launches(run) == 4


def test_a_number_used_twice_is_reported_and_both_are_read(tmp_path: Path) -> None:
    small(tmp_path)
    other = small(tmp_path / "other", launches=3)
    shutil.copy(shard_paths(other.run_dir, "kernels")[0], shard_paths(tmp_path, "kernels")[0].parent)
    with na.open(tmp_path) as run:
        assert damage(run) == [("kernels", PROCESS, "has shard number 1 more than once")]
        assert launches(run) == 7


def test_an_absurd_number_does_not_exhaust_memory(tmp_path: Path) -> None:
    small(tmp_path)
    path = shard_paths(tmp_path, "kernels")[0]
    path.rename(path.with_name(path.name.replace("000001", "999999999999999")))
    assert damage(na.open(tmp_path)) == [("kernels", PROCESS, "shards 1 to 999999999999998 are missing")]


# --- things that do not belong -----------------------------------------------------------------


def test_unfinished_and_bookkeeping_files_are_no_damage(tmp_path: Path) -> None:
    small(tmp_path)
    folder = shard_paths(tmp_path, "kernels")[0].parent
    (folder / ".000002-0123456789abcdef.parquet.tmp").write_bytes(b"half")
    (folder / "_SUCCESS").write_bytes(b"")
    (tmp_path / "report").mkdir()
    with na.open(tmp_path) as run:
        assert damage(run) == []
        assert launches(run) == 4


def test_foreign_names_are_reported_and_ignored(tmp_path: Path) -> None:
    small(tmp_path)
    (shard_paths(tmp_path, "kernels")[0].parent / "part-0.parquet").write_bytes(b"x")
    (tmp_path / "kernels" / "notes.txt").write_text("x")
    assert [d[2] for d in damage(na.open(tmp_path))] == [
        "is not named process=<name>, so nanalyze did not write it",
        "is not named <number>-<hash>.parquet, so nanalyze did not write it",
    ]


@pytest.mark.parametrize("what", ["shard", "partition", "table"])
def test_links_out_of_the_run_directory_are_not_followed(tmp_path: Path, what: str) -> None:
    small(tmp_path / "run", shards=2)
    path = shard_paths(tmp_path / "run", "kernels")[0]
    victim = {"shard": path, "partition": path.parent, "table": path.parent.parent}[what]
    shutil.move(victim, tmp_path / "outside")
    victim.symlink_to(tmp_path / "outside")
    with na.open(tmp_path / "run") as run:
        assert launches(run) == (2 if what == "shard" else 0)
        assert "is a symbolic link out of the run directory" in [d[2] for d in damage(run)]


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A directory of a user without privileges, whom the test becomes if it runs as root."""
    folder = Path(tempfile.mkdtemp())
    if os.geteuid() != 0:
        yield folder
    else:
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
        try:
            yield folder
        finally:
            os.seteuid(0)
    shutil.rmtree(folder)


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
@pytest.mark.parametrize("what", ["shard", "partition"])
def test_a_shard_without_permission_is_left_out(unprivileged: Path, what: str) -> None:
    small(unprivileged / "run", shards=2)
    path = shard_paths(unprivileged / "run", "kernels")[0]
    locked = path if what == "shard" else path.parent
    locked.chmod(0)
    try:
        with na.open(unprivileged / "run") as run:
            assert launches(run) == (2 if what == "shard" else 0)
            problems = [d[2] for d in damage(run)]
            assert "cannot be read: Permission denied" in problems
            assert run.damage()["remedy"][problems.index("cannot be read: Permission denied")] == (
                "Give yourself read permission for it."
            )
    finally:
        locked.chmod(0o755)


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_run_without_permission(unprivileged: Path) -> None:
    small(unprivileged / "run")
    (unprivileged / "run").chmod(0)
    try:
        with pytest.raises(RunError, match="cannot be read: Permission denied"):
            na.open(unprivileged / "run")
    finally:
        (unprivileged / "run").chmod(0o755)


# --- paths -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["it's", "a[b", "a[bc]d", "a*b", "a?b", "a b", 'a"b', "process=zz", "start_ns=5", "ünï", "a;b--c", "a\\b"]
)
def test_any_path_works(tmp_path: Path, name: str) -> None:
    # Neighbours that the name, taken as a pattern, would also match.
    for neighbour in ("axb", "abd", "acd"):
        small(tmp_path / neighbour, launches=1)
    small(tmp_path / name)
    with na.open(tmp_path / name) as run:
        assert damage(run) == []
        assert launches(run) == 4
        assert run.sql("SELECT DISTINCT process FROM kernels")["process"].tolist() == [PROCESS]


def test_a_process_whose_name_looks_like_a_number_stays_text(tmp_path: Path) -> None:
    table = arrow_table(TABLES["events"], [{"time_ns": 1, "layer": "x", "kind": "note", "message": "m"}])
    runfile.create(tmp_path, "recorder", {})
    write_shard(tmp_path, "events", "007", 1, table)
    assert na.open(tmp_path).sql("SELECT process FROM events")["process"].tolist() == ["007"]


# --- what a query may do -----------------------------------------------------------------------

REFUSED = [
    "COPY (SELECT 1) TO '{out}'",
    "COPY kernels TO '{out}'",
    "WITH x AS (COPY (SELECT 1) TO '{out}') SELECT 1",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO '{out}'",
    "EXPLAIN ANALYZE WITH x AS (COPY (SELECT 1) TO '{out}') SELECT 1",
    "EXPLAIN (ANALYZE) COPY (SELECT 1) TO '{out}'",
    "EXPORT DATABASE '{out}'",
    "ATTACH '{out}' AS other",
    "CREATE TABLE t AS SELECT 1",
    "CREATE OR REPLACE VIEW kernels AS SELECT 1",
    "DROP VIEW kernels",
    "INSERT INTO raw.settings SELECT * FROM raw.settings",
    "SET lock_configuration = false",
    "RESET lock_configuration",
    "PRAGMA enable_profiling",
    "INSTALL httpfs",
    "LOAD httpfs",
    "CALL pragma_version()",
    "PREPARE p AS SELECT 1",
    "SELECT 1; SELECT 2",
    "",
    ";",
    "-- nothing",
]


@pytest.mark.parametrize("allow_external", [False, True])
@pytest.mark.parametrize("query", REFUSED)
def test_only_a_single_reading_statement_is_accepted(tmp_path: Path, query: str, allow_external: bool) -> None:
    small(tmp_path / "run")
    out = tmp_path / "out"
    with na.open(tmp_path / "run", allow_external=allow_external) as run:
        with pytest.raises(QueryError) as caught:
            run.sql(query.format(out=out))
        assert "\n" not in str(caught.value)
    assert not out.exists()


@pytest.mark.parametrize(
    "query",
    [
        "VALUES (1)",
        "FROM kernels LIMIT 1",
        "TABLE devices",
        "DESCRIBE kernels",
        "SUMMARIZE SELECT 1 AS a",
        "SHOW TABLES",
        "EXPLAIN SELECT 1",
        "explain analyze SELECT 1",
        "WITH a AS (SELECT 1) SELECT * FROM a;",
        "(SELECT 1) UNION ALL (SELECT 2) -- twice",
        "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t WHERE n < 3) SELECT * FROM t",
        "SELECT 'DELETE_NODE' AS type, {'type': 'X_NODE'} AS s",
    ],
)
def test_every_form_that_reads_is_accepted(tmp_path: Path, query: str) -> None:
    small(tmp_path)
    assert len(na.open(tmp_path).sql(query)) >= 1


OUTSIDE = [
    "SELECT * FROM read_text('{file}')",
    "SELECT * FROM read_csv('{file}')",
    "SELECT * FROM '{file}'",
    "SELECT * FROM read_blob('{folder}/*')",
    "SELECT * FROM glob('{folder}/*')",
    "SELECT * FROM parquet_metadata('{file}')",
    "SELECT * FROM sniff_csv('{file}')",
    "SELECT * FROM query('SELECT * FROM read_text(''{file}'')')",
    "EXPLAIN ANALYZE SELECT * FROM read_text('{file}')",
]


@pytest.mark.parametrize("query", OUTSIDE)
def test_files_outside_the_run_are_out_of_reach(tmp_path: Path, query: str) -> None:
    small(tmp_path / "run")
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    text = query.format(file=secret, folder=tmp_path)
    with na.open(tmp_path / "run") as run, pytest.raises(QueryError, match="--allow-external"):
        run.sql(text)


def test_a_link_inside_the_run_does_not_lead_out(tmp_path: Path) -> None:
    small(tmp_path / "run")
    (tmp_path / "secret.csv").write_text("a\n1\n")
    (tmp_path / "run" / "inside.csv").symlink_to(tmp_path / "secret.csv")
    with na.open(tmp_path / "run") as run, pytest.raises(QueryError):
        run.sql(f"SELECT * FROM read_text('{tmp_path}/run/inside.csv')")


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM read_csv('https://example.com/x.csv')",
        "SELECT * FROM 's3://bucket/x.parquet'",
        "SELECT getenv('HOME')",
    ],
)
def test_the_network_and_the_environment_are_out_of_reach(tmp_path: Path, query: str) -> None:
    small(tmp_path)
    with na.open(tmp_path) as run, pytest.raises(QueryError):
        run.sql(query)


def test_variables_of_the_caller_are_not_tables(tmp_path: Path) -> None:
    small(tmp_path)
    secret = pa.table({"a": [1]})
    with na.open(tmp_path) as run, pytest.raises(QueryError, match="secret does not exist"):
        run.sql("SELECT * FROM secret")
    assert len(secret) == 1


def test_external_files_can_be_allowed(tmp_path: Path) -> None:
    small(tmp_path / "run")
    (tmp_path / "other.csv").write_text("a\n41\n")
    with na.open(tmp_path / "run", allow_external=True) as run:
        frame = run.sql(f"SELECT a + 1 AS b, (SELECT count(*) FROM kernels) AS n FROM read_csv('{tmp_path}/other.csv')")
    assert (frame["b"][0], frame["n"][0]) == (42, 4)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELEC 1", r'Parser Error: syntax error at or near "SELEC" \(line 1, column 1\)\.'),
        ("SELECT 1\nFROM kernel", r'kernel does not exist \(line 2, column 6\)\. Did you mean "kernels"\.'),
        ("SELECT stream FROM kernels", r"\(line 1, column 8\)\. Candidate bindings: .*stream_id"),
        ("SELECT CAST('x' AS INTEGER)", r"Conversion Error: Could not convert string 'x' to INT32"),
        ("EXPLAIN SELECT 1\nFROM kernel", r"kernel does not exist \(line 2, column 6\)"),
    ],
)
def test_errors_are_one_line_with_the_position(tmp_path: Path, query: str, message: str) -> None:
    small(tmp_path)
    with na.open(tmp_path) as run, pytest.raises(QueryError, match=message) as caught:
        run.sql(query)
    assert "\n" not in str(caught.value)


def test_a_shard_that_vanishes_later_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    small(tmp_path)
    with na.open(tmp_path) as run:
        shutil.rmtree(tmp_path / "kernels")
        with pytest.raises(QueryError, match=r"is gone since the run was opened\. Open the run again"):
            launches(run)


def test_a_closed_run_says_so(tmp_path: Path) -> None:
    small(tmp_path)
    run = na.open(tmp_path)
    run.close()
    with pytest.raises(QueryError, match="closed"):
        run.verdicts()


# --- the Python side ---------------------------------------------------------------------------


def test_parameters_are_values_not_text(tmp_path: Path) -> None:
    small(tmp_path)
    with na.open(tmp_path) as run:
        assert run.sql("SELECT $x AS x", {"x": "'; DROP VIEW kernels; --"})["x"][0] == "'; DROP VIEW kernels; --"
        assert len(run.query("top_kernels", rows=0)) == 0
        with pytest.raises(QueryError, match=r"no parameter 'limit'\. It takes rows"):
            run.query("top_kernels", limit=1)
        with pytest.raises(
            QueryError, match=rf"nope: no such query\. Shipped are {', '.join(queries.query_names())}\."
        ):
            run.query("nope")


def test_nanoseconds_stay_exact_beside_null(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    trace.kernel(kernel, start_ns=1, duration_ns=3)
    trace.kernel(kernel)
    trace.write()
    frame = na.open(tmp_path).kernels()
    assert frame["start_ns"].dtype == "Int64"
    assert frame["start_ns"].tolist()[0] == 1_700_000_000_000_000_001
    assert frame["duration_ns"].isna().tolist() == [False, True]


def test_sums_of_integers_arrive_as_integers(tmp_path: Path) -> None:
    small(tmp_path)
    frame = na.open(tmp_path).sql("SELECT sum(duration_ns) AS a, sum(9223372036854775807) AS b FROM kernels")
    assert (frame["a"].dtype, frame["a"][0]) == ("int64", 400)
    assert (frame["b"].dtype, frame["b"][0]) == ("float64", 4 * 9223372036854775807.0)


def test_several_results_can_be_read_at_once(tmp_path: Path) -> None:
    small(tmp_path)
    with na.open(tmp_path) as run:
        first = run.batches("SELECT range AS n FROM range(30000)")
        second = run.batches("SELECT range AS n FROM range(30000)")
        total = sum(one.num_rows + two.num_rows for one, two in zip(first, second, strict=True))
    assert total == 60_000


def test_every_method_gives_its_view(tmp_path: Path) -> None:
    trace = small(tmp_path / "a")
    trace = Trace(tmp_path / "run")
    trace.device()
    kernel = trace.kernel_class("k")
    trace.range("r", 0, 10)
    trace.copy("HtoD", 0, 10, 100)
    trace.kernel(kernel, 0, 5)
    trace.measure(kernel, [{"compute_pct": 1.0}])
    trace.write()
    with na.open(tmp_path / "run") as run:
        lengths = [
            len(frame)
            for frame in (
                run.verdicts(), run.counters(), run.kernels(), run.kernel_classes(), run.kernels_summary(),
                run.ranges(), run.copies(), run.devices(), run.processes(), run.damage(),
            )
        ]  # fmt: skip
    assert lengths == [1, 1, 2, 1, 1, 1, 1, 1, 1, 0]


def test_progress_counts_the_shards(tmp_path: Path) -> None:
    small(tmp_path, shards=2)
    calls: list[tuple[int, int]] = []
    na.open(tmp_path, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(i, 6) for i in range(1, 7)]


def test_an_unknown_setting_is_named(tmp_path: Path) -> None:
    small(tmp_path)
    with pytest.raises(NanalyzeError, match=r"highpct: no such setting\. Settings are high_pct, low_pct"):
        na.open(tmp_path, settings={"highpct": 1})


def test_no_directory_is_left_behind_where_the_process_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(tmp_path / "run")
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    with na.open(tmp_path / "run") as run:
        run.verdicts()
    assert list((tmp_path / "cwd").iterdir()) == []


def test_a_shard_that_duckdb_refuses_is_named(tmp_path: Path) -> None:
    """What passes the catalog, by its hash and its footer, need not pass DuckDB."""
    small(tmp_path)
    found = catalog.scan(tmp_path.resolve())
    path = found.shards["kernels"][-1].path
    path.write_bytes(b"PAR1 and then nothing that DuckDB could read PAR1")
    with pytest.raises(RunError) as caught:
        connection.connect(tmp_path, runfile.read(tmp_path), found, {}, False)
    assert str(caught.value).startswith(f"{path}: DuckDB cannot read it (")
    assert str(caught.value).endswith(" It was written wrong; remove it.")
    assert "\n" not in str(caught.value)
