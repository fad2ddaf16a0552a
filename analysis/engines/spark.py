"""A run whose launches stay with Apache Spark: its queries go there, and what comes back is worked on here.

    with spark.open("s3://bucket/run", master="spark://head:7077") as run:
        print(run.verdicts())
        nanalyze.analysis.report.write(run, Path("report"))

Views that hold a row a launch, range, copy, sample or reading are views of Spark's, translated from the same .sql
files. Views that add those up by class, device or the like (AGGREGATES) are computed by Spark once, when first
needed, and come over whole into a local DuckDB; whatever builds on those alone, verdicts and most of the report, is
DuckDB's work, in its views of the same names. A statement that names both kinds runs on Spark, which is given the
rows of the local ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb

from nanalyze import queries
from nanalyze.analysis import attribution, catalog, connection, overhead, sqltext
from nanalyze.analysis.engines import location, session, translate
from nanalyze.analysis.run import Run
from nanalyze.analysis.run import open as open_local
from nanalyze.rundir import runfile
from nanalyze.rundir.errors import QueryError, RunError
from nanalyze.rundir.schema import TABLES, Table

if TYPE_CHECKING:
    import os

    import pyarrow as pa

# Views that Spark computes and that come over: a row a kernel class, device, process, pause or stretch of time.
AGGREGATES = (
    "kernel_classes",
    "pauses",
    "events",
    "_rolled_up",
    "throttling",
    "_class_totals",
    "_device_time",
    "_kernel_pairs",
    "perturbation",
    "_exact_counters",
    "graph_counters",
    "_launch_rule",
)
# Tables of a row or a few for each process and device: read when the run is opened.
SMALL = ("processes", "devices", "ceilings")
# What Python works out, and constants: schema `raw` has more relations than the run has tables.
MADE = (*attribution.TABLES, *overhead.TABLES)
TYPES = {
    "int32": "INT",
    "int64": "BIGINT",
    "float64": "DOUBLE",
    "string": "STRING",
    "bool": "BOOLEAN",
    "histogram": "ARRAY<STRUCT<bin: INT, launches: BIGINT>>",
}
# Views that others read several times each, and small beside the launches: Spark keeps their rows.
KEPT = ("_range_segments", "_exact_durations")
MOST_RANGES = 20_000_000  # that come over to work out what recording cost


def open(
    run_dir: str | os.PathLike[str],
    master: str,
    *,
    settings: Mapping[str, float] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> SparkRun:
    """Open a run directory, a path or a URI, on the Spark cluster at `master`.

    settings: thresholds by name, as for `nanalyze.analysis.open`.
    note: called with what turns out not to be worked out; `SparkRun.notes` keeps it.

    Shards are taken by their names. Their hashes are not compared, as that would read every byte here; Spark checks
    each page's CRC as it reads, and a query that meets a damaged one raises QueryError.
    Raises RunError for a directory that holds no readable run and EngineError where Spark cannot be had.
    """
    place = location.of(str(run_dir))
    spark = session.start(master)
    shown = str(place.path)
    text = session.text(spark, place.child(runfile.RUN_FILE), f"{shown}/{runfile.RUN_FILE}")
    info = runfile.parse(text, place.path / runfile.RUN_FILE)
    found = location.cataloged(session.files(spark, place.uri, shown))
    if found.is_empty:
        raise RunError(f"{shown}: holds no shards: nothing was recorded yet, or nothing that can be read.")
    return SparkRun(place, info, found, dict(settings or {}), spark, note)


class SparkRun(Run):
    """An open run on Spark; see `Run` for what it answers. `notes` says what it cannot."""

    def __init__(
        self,
        place: location.Location,
        info: Mapping[str, Any],
        found: catalog.Catalog,
        overrides: Mapping[str, float],
        spark: Any,
        note: Callable[[str], None],
    ) -> None:
        self.path = place.path
        self.info = dict(info)
        self.notes: list[str] = []
        self._note = note
        self._place = place
        self._catalog = found
        self._overrides = overrides
        self._closed = False
        self._spark = spark
        self._on_spark: set[str] = set()  # views of Spark's session that are this run's
        self._here: set[str] = set()  # aggregates that came over
        self._translated: set[str] = set()  # of those, views that Spark computes from the tables alone
        self._made: set[str] = set()
        self._asked = 0
        for table in TABLES.values():
            self._load(table)
        self._connection = self._local()

    # --- what Run does by DuckDB alone ---------------------------------------------------------------

    def batches(self, query: str, parameters: Mapping[str, object] | None = None, rows: int = 10_000) -> Any:
        """The result of one SELECT, which comes over from Spark whole: add up there rather than here."""
        if self._closed:
            raise QueryError(f"{self.path}: the run is closed. Open it again.")
        cursor = self._connection.cursor()
        sql = sqltext.checked(cursor, query)
        named = _named(sql)
        if all(name in local() for name in named):
            self._bring(named)
            return Answer(_run(cursor, sql, parameters), rows)
        return Answer(self.on_spark(sql, parameters), rows)

    def prepare(self, buckets: int) -> pa.Table | None:
        """Have the aggregates that most of a report builds on come over; other queries go to Spark one by one."""
        self._bring(frozenset({"verdicts", "_kernel_losses"}))
        return None

    def on_spark(
        self, query: str, parameters: Mapping[str, object] | None = None, *, everything: bool = False
    ) -> pa.Table:
        """The result of one SELECT from Spark; with `everything` no view of it is worked out here."""
        for name in sorted(translate.relations(query)):
            self._offer(name, everything)
        self._asked += 1
        views: list[str] = []
        try:
            return _plain(session.arrow(self._stepwise(query, parameters, f"_query{self._asked}_", views)))
        finally:
            for view in views:
                self._spark.catalog.dropTempView(view)

    def _stepwise(self, query: str, parameters: Mapping[str, object] | None, prefix: str, views: list[str]) -> Any:
        """The frame of a statement; the names of views that it made on the way are added to `views`."""
        *before, last = translate.steps(query, parameters, prefix)
        for step in before:
            frame = session.statement(self._spark, step.sql)
            (session.computed(frame) if step.is_kept else frame).createOrReplaceTempView(step.name)
            views.append(step.name)
        return session.statement(self._spark, last.sql)

    def interrupt(self) -> None:
        """Stop what Spark computes for this run, from another thread."""
        self._spark.sparkContext.cancelAllJobs()

    def close(self) -> None:
        """Release the connection and drop the views; the Spark session stays, for the next run of this process."""
        if self._closed:
            return
        self._closed = True
        self._connection.close()
        for view in self._on_spark:
            self._spark.catalog.dropTempView(view)

    def stop(self) -> None:
        """Close the run and give the cluster back; other runs of this process on it end too."""
        self.close()
        self._spark.stop()

    def view_script(self, relative_to: str | os.PathLike[str] | None = None) -> str:
        """Refused: a script of views is for files that DuckDB reads."""
        raise QueryError(f"{self.path}: a script of views is DuckDB's. Leave out --engine.")

    # --- Spark's side --------------------------------------------------------------------------------

    def _load(self, table: Table) -> None:
        """The view raw_<table> of Spark over the table's good shards, columns as declared."""
        columns = {column.name: TYPES[column.type] for column in table.columns}
        shards = self._catalog.shards[table.name]
        name = f"raw_{table.name}"
        if not shards:
            nothing = ", ".join(
                f"CAST(NULL AS {kind}) AS `{c}`" for c, kind in {**columns, "process": "STRING"}.items()
            )
            frame = session.statement(self._spark, f"SELECT {nothing} WHERE false")
        else:
            frame = self._read(table, columns)
            extra = sorted(set(frame.columns) - columns.keys() - {"process"})
            if table.open_ended and extra:
                self._catalog.extra_columns[table.name] = extra
            casts = [f"CAST(`{c}` AS {kind}) AS `{c}`" for c, kind in columns.items()]
            casts += [f"CAST(`{c}` AS DOUBLE) AS `{c}`" for c in (extra if table.open_ended else [])]
            frame = frame.selectExpr(*casts, "CAST(process AS STRING) AS process")
        frame.createOrReplaceTempView(name)
        self._on_spark.add(name)

    def _read(self, table: Table, columns: Mapping[str, str]) -> Any:
        folder = self._place.child(table.name)
        reader = self._spark.read.option("basePath", folder).option("__globPaths__", "false")
        if table.open_ended:
            reader = reader.option("mergeSchema", "true")
        else:
            # Declared, so that no footer is read for it; the partition's column is added from the paths.
            reader = reader.schema(", ".join(f"`{c}` {kind}" for c, kind in columns.items()) + ", process STRING")
        paths = [self._place.child(path) for path in self._catalog.paths(table.name)]
        try:
            return reader.parquet(*paths)
        except Exception as error:
            raise session.unreadable(str(self.path), error) from error

    def _offer(self, name: str, everything: bool = False) -> None:
        """Have Spark know the relation `name` as the translated statements call it."""
        view = name.replace("raw.", "raw_", 1)
        if view in (self._translated if everything else self._on_spark):
            return
        if name.startswith("raw."):
            if name.removeprefix("raw.") not in TABLES:
                self._give(name, view)
        elif name in queries.VIEWS and (everything or name not in local()):
            sql = queries.view(name).sql
            for other in sorted(translate.relations(sql)):
                self._offer(other, everything)
            made: list[str] = []
            frame = self._stepwise(sql, None, f"_{view}_", made)
            self._on_spark.update(made)
            if name in KEPT or name in local():
                frame = session.computed(frame)
            frame.createOrReplaceTempView(view)
            self._on_spark.add(view)
        elif name in queries.VIEWS:
            self._give(name, view)
        self._translated |= {view} if everything else set()

    def _give(self, name: str, view: str) -> None:
        """Rows that are here as a view of Spark's."""
        self._bring(frozenset({name}))
        table = _run(self._connection.cursor(), f"SELECT * FROM {name}", None)
        with session.quiet():
            self._spark.createDataFrame(table).createOrReplaceTempView(view)
        self._on_spark.add(view)

    # --- DuckDB's side -------------------------------------------------------------------------------

    def _local(self) -> duckdb.DuckDBPyConnection:
        """DuckDB with the views of a run; large tables are not in it, so nothing reads them there as empty."""
        small = {name: _plain(session.arrow(self._spark.table(f"raw_{name}"))) for name in SMALL}
        catalog.note_lost_tail(Path(), self._catalog, small["processes"].to_pylist())
        constants = catalog.Catalog(extra_columns=self._catalog.extra_columns, damage=self._catalog.damage)
        made = connection.connect(Path(), self.info, constants, self._overrides, False)
        for name in TABLES:
            made.execute(f"DROP VIEW raw.{sqltext.name(name)}")
        for name, table in small.items():
            _put(made, "raw", name, table)
        return made

    def _bring(self, named: frozenset[str]) -> None:
        """Have the aggregates that the local relations `named` build on come over, and work out what Python does."""
        needed = _below(named)
        for name in AGGREGATES:
            if name in needed and name not in self._here:
                view = queries.view(name)
                _put(self._connection, "main", name, self.on_spark(view.sql), {c.name: c.type for c in view.columns})
                self._here.add(name)
        for filled, fill in ((overhead.TABLES, self._fill_overhead), (attribution.TABLES, self._fill_attribution)):
            if needed & {f"raw.{name}" for name in filled} and not self._made & filled.keys():
                self._made |= filled.keys()
                fill()

    def _fill_overhead(self) -> None:
        """From the ranges of processes that paused, which come over for it."""
        self._bring(frozenset({"pauses", "_pause_spans"}))
        paused = "SELECT range_id, name, depth, thread_id, start_ns, end_ns, process FROM ranges AS r "
        paused += "WHERE EXISTS (SELECT 1 FROM pauses AS p WHERE p.process = r.process) AND end_ns IS NOT NULL"
        count = int(self.on_spark(f"SELECT count(*) AS n FROM ({paused}) AS found").column("n")[0].as_py())
        if count > MOST_RANGES:
            self._tell(f"what recording cost is not worked out: {count:,} ranges are too many to bring here")
            return
        with self._connection.cursor() as cursor:
            _put(cursor, "main", "ranges", self.on_spark(paused))
            connection.fill_overhead(cursor, self._catalog)
            cursor.execute("DROP TABLE main.ranges")

    def _tell(self, text: str) -> None:
        self.notes.append(text)
        self._note(text)

    def _fill_attribution(self) -> None:
        """By DuckDB over the same files, where they are this machine's."""
        if not self._catalog.shards["samples"]:
            return
        if not self._place.is_local:
            self._tell("samples are not attributed on Spark: verdicts rest on exact counters alone")
            return
        with open_local(self.path, verify=False, settings=self._overrides) as run:
            for name in attribution.TABLES:
                _put(self._connection, "raw", name, run.arrow(f"SELECT * FROM raw.{name}"))


class Answer:
    """A result that is here: `schema`, and its rows as Arrow record batches."""

    def __init__(self, table: pa.Table, rows: int) -> None:
        self.schema: pa.Schema = table.schema
        self._table = table
        self._rows = rows

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return iter(self._table.to_batches(max_chunksize=self._rows))


@cache
def local() -> frozenset[str]:
    """Relations that DuckDB answers here: constants, small tables, aggregates and what builds on those alone."""
    found = {f"raw.{name}" for name in (*SMALL, *MADE)} | {f"raw.{name}" for name in _constants()} | set(AGGREGATES)
    for name in queries.VIEWS:
        if translate.relations(queries.view(name).sql) <= found:
            found.add(name)
    return frozenset(found)


def _constants() -> frozenset[str]:
    names = connection.raw_sources(Path(), {"format_version": 1}, catalog.Catalog(), {}).keys()
    return frozenset(names) - TABLES.keys()


@cache
def _below(named: frozenset[str]) -> frozenset[str]:
    """Local relations that `named` build on, these included; aggregates end the walk, as they come from Spark."""
    found: set[str] = set()
    pending = list(named)
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found.add(name)
        if name in queries.VIEWS and name not in AGGREGATES:
            pending += translate.relations(queries.view(name).sql)
    return frozenset(found)


def _named(sql: str) -> frozenset[str]:
    """Views and tables of a run that a statement names; what DuckDB has besides is none of them."""
    known = {*queries.VIEWS, *(f"raw.{name}" for name in (*TABLES, *MADE, *_constants()))}
    return translate.relations(sql) & known


def _run(cursor: duckdb.DuckDBPyConnection, sql: str, parameters: Mapping[str, object] | None) -> pa.Table:
    try:
        relation: Any = cursor.sql(sql, params=parameters)
        read = relation.to_arrow_table if hasattr(relation, "to_arrow_table") else relation.fetch_arrow_table
        table: pa.Table = read()
    except duckdb.Error as error:
        raise sqltext.query_error(error) from error
    return table


def _put(
    cursor: duckdb.DuckDBPyConnection,
    schema: str,
    name: str,
    table: pa.Table,
    types: Mapping[str, str] | None = None,
) -> None:
    """Make the table schema.name of `table`, in place of a view of that name."""
    kinds = types or {}
    casts = ", ".join(
        f"CAST({sqltext.name(c)} AS {kinds[c]}) AS {sqltext.name(c)}" if c in kinds else sqltext.name(c)
        for c in table.column_names
    )
    cursor.register("came", table)
    cursor.execute(f"DROP VIEW IF EXISTS {schema}.{sqltext.name(name)}")
    cursor.execute(f"CREATE OR REPLACE TABLE {schema}.{sqltext.name(name)} AS SELECT {casts} FROM came")
    cursor.unregister("came")


def _plain(table: pa.Table) -> pa.Table:
    """Without Spark's own notes in the schema, and with decimals of no fraction as DuckDB's wide integers come."""
    return table.replace_schema_metadata(None)
