"""The way from DuckDB's SQL to Spark's, as text: every shipped statement, every rule, every refusal. Needs no Java."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlglot
import test_cookbook

from nanalyze import queries
from nanalyze.analysis.engines import location, spark, translate
from nanalyze.rundir.errors import QueryError, RunError


def carried(expression: str) -> str:
    """What becomes of an expression."""
    return translate.to_spark(f"SELECT {expression} FROM t").removeprefix("SELECT ").removesuffix(" FROM t")


def parameters(query: queries.Query) -> dict[str, object]:
    return {parameter.name: parameter.value(parameter.default) for parameter in query.parameters}


@pytest.mark.parametrize("name", queries.query_names())
def test_every_query_is_carried_over_in_steps_that_spark_parses(name: str) -> None:
    query = queries.query(name)
    steps = translate.steps(query.sql, parameters(query), "own_")
    assert [step.name for step in steps[:-1]] == [
        f"own_{cte.alias}" for cte in sqlglot.parse_one(query.sql, read="duckdb").ctes
    ]
    assert steps[-1].name == ""
    for step in steps:
        assert sqlglot.parse_one(step.sql, read="databricks") is not None


@pytest.mark.parametrize("name", queries.VIEWS)
def test_every_view_is_carried_over(name: str) -> None:
    sql = translate.to_spark(queries.view(name).sql)
    assert sqlglot.parse_one(sql, read="databricks") is not None
    assert "raw." not in sql


@pytest.mark.parametrize("title", test_cookbook.RECIPES)
def test_every_question_of_the_cookbook_is_carried_over(title: str) -> None:
    sql = test_cookbook.RECIPES[title].sql
    if "ASOF" in sql:
        with pytest.raises(QueryError, match=r"^ASOF JOIN: not known"):
            translate.to_spark(sql)
    else:
        assert sqlglot.parse_one(translate.to_spark(sql), read="databricks") is not None


@pytest.mark.parametrize(
    ("duckdb", "expected"),
    [
        ("a // 2", "a DIV 2"),
        ("100.0 * a / 3", "100.0E0 * a / 3"),
        ("1e6", "1e6"),
        ("concat('a', b)", "CONCAT('a', COALESCE(CAST(b AS STRING), ''))"),
        ("CAST(a AS BIGINT)", "CAST(BROUND(a) AS BIGINT)"),
        ("CAST(count(*) AS BIGINT)", "CAST(COUNT(*) AS BIGINT)"),
        ("CAST(a > 1 AS INTEGER)", "CAST(a > 1 AS INT)"),
        ("CAST(round(a) AS BIGINT)", "CAST(ROUND(a) AS BIGINT)"),
        ("TRY_CAST(sum(a) AS BIGINT)", "TRY_CAST(TRY_SUM(a) AS BIGINT)"),
        ("floor(a)", "CAST(FLOOR(a) AS DOUBLE)"),
        ("log(a)", "LOG10(a)"),
        ("log2(a)", "LOG(2, a)"),
        ("list_extract(l, i - 1)", "TRY_ELEMENT_AT((l), CAST(NULLIF((i - 1), 0) AS INT))"),
        ("list_sort(list(a))", "SORT_ARRAY(COLLECT_LIST(a))"),
        ("quantile_cont(a, 0.5)", "PERCENTILE(a, 0.5E0)"),
        ("quantile_cont(a, [0.5, 0.9])", "PERCENTILE(a, ARRAY(0.5E0, 0.9E0))"),
        ("arg_max(a, b)", "MAX_BY(a, b)"),
        ("any_value(a)", "ANY_VALUE(a) IGNORE NULLS"),
        ("struct_pack(x := a)", "STRUCT(a AS x)"),
        ("a IS NOT DISTINCT FROM b", "a IS NOT DISTINCT FROM b"),
        (
            "ntile(CAST(400 AS BIGINT)) OVER (ORDER BY a)",
            "NTILE(CAST(CAST(400 AS BIGINT) AS INT)) OVER (ORDER BY a NULLS LAST)",
        ),
        ("* EXCLUDE (a)", "* EXCEPT (a)"),
        ("* REPLACE (a + 1 AS a)", "* EXCEPT (a), a + 1 AS a"),
        ("'it''s a\\b'", "'it\\'s a\\\\b'"),
    ],
)
def test_a_rule(duckdb: str, expected: str) -> None:
    got = carried(duckdb)
    assert got.replace("<=>", "IS NOT DISTINCT FROM") == expected


def test_numbers_become_text_in_duckdbs_notation_and_texts_stay() -> None:
    assert carried("CAST(concat(a, b) AS VARCHAR)").startswith("CAST(CONCAT(")
    assert carried("CAST(CAST(a AS BIGINT) AS VARCHAR)") == "CAST(CAST(BROUND(a) AS BIGINT) AS STRING)"
    assert "'nan'" in carried("CAST(a AS VARCHAR)")


def test_rounding_to_digits_looks_at_what_the_product_lacks() -> None:
    got = carried("round(a, 2)")
    assert got.startswith("CASE WHEN ABS(CAST((a) AS DOUBLE) * (1E2)) % 1 = 0.5E0 AND SIGN((a)) * ")
    assert got.endswith("ELSE ROUND(CAST((a) AS DOUBLE) * (1E2)) / (1E2) END")
    assert carried("round(a)") == carried("round(a, 0)").replace(", 0)", ")") == "ROUND(a)"


def test_unnest_of_a_range_counts_up_and_of_an_empty_one_gives_nothing() -> None:
    got = carried("unnest(range(a, b)) AS i")
    assert got.startswith("EXPLODE(IF(")
    assert "SEQUENCE(a, (b - 1))" in got


def test_sorting_by_a_window_function_sorts_by_columns() -> None:
    sql = "WITH w AS (SELECT 1 AS a) SELECT a AS x FROM w ORDER BY row_number() OVER (ORDER BY a DESC), a LIMIT 3"
    assert translate.to_spark(sql) == (
        "WITH w AS (SELECT 1 AS a) SELECT * EXCEPT (_order_0, _order_1) FROM (SELECT a AS x, "
        "ROW_NUMBER() OVER (ORDER BY a DESC) AS _order_0, a AS _order_1 FROM w) AS ordered "
        "ORDER BY _order_0 NULLS LAST, _order_1 NULLS LAST LIMIT 3"
    )


def test_a_parameter_becomes_a_literal_and_cannot_break_out() -> None:
    hostile = "x' OR 1=1; DROP TABLE y; -- \\' \" `"
    sql = translate.to_spark("SELECT a FROM t WHERE b = $b AND c < $c AND d = $d", {"b": hostile, "c": 0.1, "d": None})
    tree = sqlglot.parse_one(sql, read="databricks")
    texts = [literal.name for literal in tree.find_all(sqlglot.exp.Literal) if literal.is_string]
    assert texts == [hostile, "0.1"]
    assert sql.endswith("d = NULL")
    with pytest.raises(QueryError, match=r"^\$b: has no value"):
        translate.to_spark("SELECT $b")


def test_a_table_expression_read_twice_is_kept_and_its_columns_keep_their_qualifier() -> None:
    steps = translate.steps("WITH a AS (SELECT 1 AS x), b AS (SELECT a.x FROM a) SELECT a.x FROM a JOIN b ON b.x = a.x")
    assert [(step.name, step.sql, step.is_kept) for step in steps] == [
        ("_with_a", "SELECT 1 AS x", True),
        ("_with_b", "SELECT a.x FROM _with_a AS a", False),
        ("", "SELECT a.x FROM _with_a AS a JOIN _with_b AS b ON b.x = a.x", False),
    ]


def test_what_a_recursion_reads_in_each_round_is_kept() -> None:
    steps = translate.steps(
        "WITH RECURSIVE e AS (SELECT 1 AS n), "
        "r (n) AS (SELECT n FROM e UNION ALL SELECT r.n + 1 FROM r JOIN e ON r.n < 5) SELECT n FROM r"
    )
    assert [(step.name, step.is_kept) for step in steps] == [("_with_e", True), ("_with_r", False), ("", False)]
    assert steps[1].sql.startswith("WITH RECURSIVE r(n) AS (SELECT n FROM _with_e AS e UNION ALL ")
    assert steps[1].sql.endswith("SELECT * FROM r")


@pytest.mark.parametrize(
    ("sql", "named"),
    [
        ("SELECT strftime(a, 'x') FROM t", "time_to_str"),
        ("SELECT approx_quantile(a, 0.5) FROM t", "approx_quantile"),
        ("SELECT my_macro(a) FROM t", "my_macro"),
        ("SELECT a FROM t ASOF JOIN u USING (a)", "ASOF JOIN"),
        ("SELECT a FROM t POSITIONAL JOIN u", "POSITIONAL JOIN"),
        ("SELECT * FROM read_parquet('/etc/passwd')", "table function"),
        ("SELECT * FROM range(3)", "table function"),
        ("SELECT * FROM information_schema.tables", "table information_schema.tables"),
        ("SELECT l[1] FROM t", "BRACKET"),
        ("SELECT DISTINCT ON (a) a FROM t", "DISTINCT ON"),
        ("SELECT list(a ORDER BY b) FROM t", "list with ORDER BY"),
        ("SELECT a FROM t UNION ALL BY NAME SELECT a FROM t", "UNION BY NAME"),
        ("SELECT CAST(a AS HUGEINT) FROM t", "type"),
        ("SELECT CAST(a AS DATE) FROM t", "type DATE"),
        ("SELECT regexp_replace(a, 'x', 'y', 'g') FROM t", "regexp_replace with options"),
        ("SELECT regexp_replace(a, '(x)', '\\1') FROM t", "regexp_replace with other"),
        ("SELECT a FROM t USING SAMPLE 3", "TABLESAMPLE"),
        ("SELECT round(a, b) FROM t", "round to other"),
        ("SELECT round(a, 9) FROM t", "round to more"),
        ("SELECT a FROM t WHERE a LIKE b", "LIKE with other"),
        ("SELECT max(a, 3) FROM t", ""),
    ],
)
def test_what_is_not_known_to_mean_the_same_is_refused_in_one_line(sql: str, named: str) -> None:
    with pytest.raises(QueryError) as caught:
        translate.to_spark(sql)
    message = str(caught.value)
    assert message.startswith(named)
    assert message.endswith("without --engine the query runs on DuckDB.")
    assert "\n" not in message


def test_relations_are_tables_and_not_common_table_expressions() -> None:
    sql = "WITH kernels AS (SELECT 1 AS a FROM Ranges) SELECT * FROM kernels, raw.samples, verdicts AS v"
    assert translate.relations(sql) == {"ranges", "raw.samples", "verdicts"}


def test_aggregates_and_kept_views_exist_and_what_builds_on_them_is_local() -> None:
    assert set(spark.AGGREGATES) | set(spark.KEPT) <= set(queries.VIEWS)
    assert {"verdicts", "counters", "overhead", "settings", "damage", "_kernel_losses"} <= spark.local()
    assert not {"kernels", "copies", "ranges", "samples", "exact", "device_state", "_launches"} & spark.local()


# --- where runs lie ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "uri", "shown"),
    [
        ("s3://bucket/a/run/", "s3a://bucket/a/run", "s3://bucket/a/run"),
        ("gs://bucket/run", "gs://bucket/run", "gs://bucket/run"),
        ("hdfs://name:8020/runs/a=1", "hdfs://name:8020/runs/a=1", "hdfs://name:8020/runs/a=1"),
        ("/data/a run", "file:///data/a run", "/data/a run"),
        ("file:///data/run", "file:///data/run", "/data/run"),
    ],
)
def test_a_location(given: str, uri: str, shown: str) -> None:
    place = location.of(given)
    assert (place.uri, str(place.path)) == (uri, shown)
    assert place.child("kernels") == f"{uri}/kernels"
    assert place.is_local == (shown[0] == "/")
    assert location.of(location.UriPath(given)).uri == uri


@pytest.mark.parametrize("given", ["http://host/run", "ftp://host/run", "s3://", "abfss://x@y/run"])
def test_a_place_that_no_run_is_read_from(given: str) -> None:
    with pytest.raises(RunError, match="^" + given):
        location.of(given)


def test_shards_are_taken_by_their_names() -> None:
    digest = "0123456789abcdef"
    names = [
        f"processes/process=a/000001-{digest}.parquet",
        f"kernels/process=a/000001-000002-{digest}.parquet",
        f"kernels/process=a/000001-{digest}.parquet",
        f"kernels/process=a/000004-{digest}.parquet",
        f"copies/process=b/000001-{digest}.parquet",
        "kernels/process=a/notes.parquet",
        "kernels/process=a/.000009.tmp",
        "report/tables/kernels.csv",
        "run.json",
    ]
    found = location.cataloged([(name, 10) for name in names] + [(f"ranges/process=a/000001-{digest}.parquet", 0)])
    assert found.paths("kernels") == [names[1], names[3]]
    assert found.paths("ranges") == []
    assert [(d.table_name, d.process, d.problem.split(":")[0][:30]) for d in found.damage] == [
        ("kernels", "a", "shard 3 is missing"),
        ("kernels", "a", "is not named process=<name>/<n"),
        ("processes", "b", "shard 1 is missing"),
        ("ranges", "a", "is empty"),
    ]
    assert Path(found.damage[0].path) == Path("kernels/process=a")
