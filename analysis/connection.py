"""Makes the connection behind a run: the views over its good shards, locked so that it only reads."""

from __future__ import annotations

import glob
import tempfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb

from nanalyze.analysis import catalog, remote, settings, sqltext
from nanalyze.analysis.made import ATTRIBUTION, OVERHEAD, STREAMS
from nanalyze.analysis.views import Views
from nanalyze.rundir import objectstore
from nanalyze.rundir.communication import COMMUNICATION_PATTERNS
from nanalyze.rundir.errors import RunError
from nanalyze.rundir.schema import TABLES, Table

if TYPE_CHECKING:
    import pyarrow as pa

    from nanalyze.analysis.launch_scan import Scan

TYPES = {
    "int32": "INTEGER",
    "int64": "BIGINT",
    "float64": "DOUBLE",
    "string": "VARCHAR",
    "bool": "BOOLEAN",
    "histogram": "STRUCT(bin INTEGER, launches BIGINT)[]",
}
_DAMAGE_COLUMNS = [(c, "VARCHAR") for c in ("path", "table_name", "process", "problem", "remedy")]


def connect(
    root: Path,
    info: Mapping[str, Any],
    found: catalog.Catalog,
    overrides: Mapping[str, float],
    allow_external: bool,
) -> duckdb.DuckDBPyConnection:
    """A connection with raw tables in schema `raw`, views in `main` and a locked configuration.

    `info` is the content of run.json, `overrides` settings by name. Raises QueryError for an
    unknown setting, RunError for a shard that DuckDB refuses, though its hash and footer are right.
    """
    connection, views = prepared(root, info, found, overrides, allow_external)
    try:
        views.make(connection)
    except duckdb.Error as error:
        told = refused(connection, found)
        connection.close()
        raise told or error from error
    return connection


def prepared(
    root: Path,
    info: Mapping[str, Any],
    found: catalog.Catalog,
    overrides: Mapping[str, float],
    allow_external: bool,
) -> tuple[duckdb.DuckDBPyConnection, Views]:
    """A connection with a locked configuration, and what makes the views in it. Raises QueryError as `connect`."""
    views = Views(raw_sources(root, info, found, overrides))
    connection = _open(root, found, allow_external)
    connection.execute("CREATE SCHEMA raw")
    connection.execute("SET lock_configuration = true")
    return connection, views


def fill_attribution(connection: duckdb.DuckDBPyConnection, found: catalog.Catalog) -> None:
    """Attribute the samples, in place of the empty relations that `connect` made. Raises duckdb.Error."""
    fill(connection, attributed(connection, found))


def attributed(connection: duckdb.DuckDBPyConnection, found: catalog.Catalog) -> dict[str, pa.Table]:
    """The relations of attributed samples, rolled-up ones included.

    Only reads, but for temporary tables. Raises duckdb.Error.
    """
    from nanalyze.analysis import attribution

    made = attribution.attribute(connection, found.extra_columns.get("samples", []), found.shards)
    if not found.shards["sampled_windows"]:
        return made
    from nanalyze.analysis import rolled_samples  # which opens runs itself

    return rolled_samples.with_rolled_up(connection, made)


def fill_overhead(connection: duckdb.DuckDBPyConnection, found: catalog.Catalog) -> None:
    """Work out what recording cost, in place of the empty relation that `connect` made. Raises duckdb.Error."""
    from nanalyze.analysis import overhead

    fill(connection, overhead.measure(connection))


def fill_launches(
    connection: duckdb.DuckDBPyConnection, found: catalog.Catalog, buckets: int | None = None
) -> Scan | None:
    """Go through all launches once, in place of the views that would sort them.

    None where that cannot be done: then the views stay as they are. Raises duckdb.Error.
    """
    import pyarrow as pa

    from nanalyze.analysis import launch_scan

    try:
        keep(connection, ["_class_devices", "_communicating"])
        scan = launch_scan.scan(connection, found, buckets)
    except (launch_scan.Unscannable, pa.ArrowException, OSError):
        return None
    _keep_rows(connection, scan.views)
    return scan


def _keep_rows(connection: duckdb.DuckDBPyConnection, views: Mapping[str, pa.Table]) -> None:
    """Rows in place of the views of these names."""
    for view, table in views.items():
        connection.register(f"scanned{view}", table)
    keep(connection, {view: f"scanned{view}" for view in views})
    for view in views:
        connection.unregister(f"scanned{view}")


def fill_streams(connection: duckdb.DuckDBPyConnection, found: catalog.Catalog) -> bool:
    """Work out the view of streams in one pass over the launches; whether that was done, else it stays as it is.

    Raises duckdb.Error.
    """
    import pyarrow as pa

    from nanalyze.analysis import launch_streams

    try:
        table = launch_streams.stream_times(connection, found)
    except (launch_streams.Unscannable, pa.ArrowException, OSError):
        return False
    _keep_rows(connection, {STREAMS: table})
    return True


def device_use(connection: duckdb.DuckDBPyConnection, found: catalog.Catalog, buckets: int) -> pa.Table | None:
    """The rows of the query timeline_utilisation from one pass over the launches.

    None where that cannot be done. Raises duckdb.Error.
    """
    import pyarrow as pa

    from nanalyze.analysis import launch_streams

    try:
        return launch_streams.device_use(connection, found, buckets)
    except (launch_streams.Unscannable, pa.ArrowException, OSError):
        return None


def launches(connection: duckdb.DuckDBPyConnection) -> int:
    """Rows of `kernels`, from the footers."""
    return int(connection.execute("SELECT count(*) FROM raw.kernels").fetchall()[0][0])


def keep(connection: duckdb.DuckDBPyConnection, views: Iterable[str] | Mapping[str, str]) -> None:
    """Work out views once, in place of each time that they are read; or take their rows from other relations.

    Raises duckdb.Error. What was kept before stays.
    """
    sources = views if isinstance(views, Mapping) else {view: f"main.{sqltext.name(view)}" for view in views}
    kept = {
        name
        for (name,) in connection.execute(
            "SELECT table_name FROM duckdb_tables() WHERE schema_name = 'kept'"
        ).fetchall()
    }
    connection.execute("CREATE SCHEMA IF NOT EXISTS kept")
    for view, source in sources.items():
        if view not in kept:
            name = sqltext.name(view)
            connection.execute(f"CREATE TABLE kept.{name} AS SELECT * FROM {source}")
            connection.execute(f"CREATE OR REPLACE VIEW main.{name} AS SELECT * FROM kept.{name}")


def fill(connection: duckdb.DuckDBPyConnection, tables: Mapping[str, Any]) -> None:
    """Put rows in place of the empty relations of these names in schema `raw`. Raises duckdb.Error."""
    for view, table in tables.items():
        connection.register(f"made_{view}", table)
    connection.execute("BEGIN")
    for view in tables:
        connection.execute(f"DROP VIEW IF EXISTS raw.{view}")
        connection.execute(f"CREATE TABLE raw.{view} AS SELECT * FROM made_{view}")
    connection.execute("COMMIT")
    for view in tables:
        connection.unregister(f"made_{view}")


def _open(root: Path, found: catalog.Catalog, allow_external: bool) -> duckdb.DuckDBPyConnection:
    """A connection that reaches the good shards and, without `allow_external`, no other file.

    Files are allowed one by one rather than by directory: DuckDB 1.4 follows a symbolic link
    inside an allowed directory to wherever it points.
    """
    connection = duckdb.connect(":memory:")
    scratch = Path(tempfile.gettempdir(), f"nanalyze-{uuid.uuid4().hex}")  # DuckDB makes it when it must spill
    connection.execute(f"SET temp_directory = {sqltext.literal(str(scratch))}")
    connection.execute("SET GLOBAL python_enable_replacements = false")
    if any(objectstore.is_remote(shard.path) for shards in found.shards.values() for shard in shards):
        remote.attach(connection, root)
    if not allow_external:
        connection.execute("SET autoinstall_known_extensions = false")
        connection.execute("SET autoload_known_extensions = false")
        paths = [path for table in TABLES for path in found.paths(table)]
        # The pattern that stands for a path with [ or * in it is checked before it is expanded.
        allowed = sorted({*paths, *map(glob.escape, paths)})
        connection.execute("SET allowed_paths = " + _list(allowed))
        connection.execute("SET enable_external_access = false")
    return connection


def raw_sources(
    root: Path, info: Mapping[str, Any], found: catalog.Catalog, overrides: Mapping[str, float]
) -> dict[str, str]:
    """A SELECT for each relation of schema `raw`; those that Python works out are empty at first."""
    sources = {table.name: _table_source(table, root, found) for table in TABLES.values()}
    sources.update(_constant_sources(info, found, overrides))
    sources.update({name: sqltext.empty(columns) for name, columns in {**ATTRIBUTION, **OVERHEAD}.items()})
    return sources


def refused(connection: duckdb.DuckDBPyConnection, found: catalog.Catalog) -> RunError | None:
    """The error for the first shard that DuckDB does not read; None if it reads them all."""
    for path in (path for table in TABLES for path in found.paths(table)):
        try:
            connection.execute(f"DESCRIBE FROM read_parquet({sqltext.literal(_pattern(path))})")
        except duckdb.Error as error:
            reason = str(error).split("\n", 1)[0].strip().rstrip(".")
            return RunError(f"{path}: DuckDB cannot read it ({reason}). It was written wrong; remove it.")
    return None


def _constant_sources(
    info: Mapping[str, Any], found: catalog.Catalog, overrides: Mapping[str, float]
) -> dict[str, str]:
    run = (str(info.get("run_id")), _integer(info.get("created_ns")), str(info.get("source")), info["format_version"])
    damage = [(d.path, d.table_name, d.process, d.problem, d.remedy) for d in found.damage]
    number = [
        ("name", "VARCHAR"),
        ("value", "DOUBLE"),
        ("text", "VARCHAR"),
        ("unit", "VARCHAR"),
        ("meaning", "VARCHAR"),
    ]
    metric = [("metric", "VARCHAR"), ("counter", "VARCHAR"), ("preference", "INTEGER"), ("unit", "VARCHAR")]
    identity = [("run_id", "VARCHAR"), ("created_ns", "BIGINT"), ("source", "VARCHAR"), ("format_version", "INTEGER")]
    return {
        "run": sqltext.values(identity, [run]),
        "damage": sqltext.values(_DAMAGE_COLUMNS, damage),
        "settings": sqltext.values(number, settings.settings_rows(overrides)),
        "communication_patterns": sqltext.values(
            [("pattern", "VARCHAR"), ("meaning", "VARCHAR")], COMMUNICATION_PATTERNS
        ),
        "counter_metrics": sqltext.values(metric, settings.counter_metrics_rows()),
        "student_t": sqltext.values(
            [("degrees", "INTEGER"), ("quantile", "DOUBLE")], list(enumerate(settings.STUDENT_T, 1))
        ),
    }


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else None


def _table_source(table: Table, root: Path, found: catalog.Catalog) -> str:
    """A SELECT of the table's columns, in order, from its good shards."""
    declared = [(column.name, TYPES[column.type]) for column in table.columns]
    extra = [(column, "DOUBLE") for column in sorted(found.extra_columns.get(table.name, []))]
    columns = [*declared, *extra]
    files = found.paths(table.name)
    if not files:
        return sqltext.empty([*columns, ("process", "VARCHAR")])
    casts = ", ".join(f"CAST({sqltext.name(c)} AS {t}) AS {sqltext.name(c)}" for c, t in columns)
    options = f"union_by_name = {str(table.open_ended).lower()}"
    if any(path.count("=") > 1 for path in files):
        # A parent folder such as `process=x` or `start_ns=1` would be taken for a partition.
        process = r"regexp_extract(filename, 'process=([^/\\]+)[/\\][^/\\]+$', 1)"
        options += ", hive_partitioning = false, filename = true"
    else:
        process = "process"
        options += ", hive_partitioning = true, hive_types = {'process': VARCHAR}"
    listed = _list([_pattern(path) for path in files])
    return f"SELECT {casts}, CAST({process} AS VARCHAR) AS process FROM read_parquet({listed}, {options})"


def _pattern(path: str) -> str:
    """`path` such that read_parquet takes it for itself, though it holds *, ? or [."""
    return glob.escape(path)


def _list(texts: Sequence[str]) -> str:
    return "[" + ", ".join(sqltext.literal(text) for text in texts) + "]"
