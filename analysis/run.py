"""Opens a run directory: checked shards, the views over them, and a connection that only reads.

import nanalyze.analysis as na

with na.open("run_dir") as run:
    print(run.verdicts()[["kernel", "share", "bound", "reason"]])
    print(run.sql("SELECT stream_id, count(*) AS launches FROM kernels GROUP BY 1"))
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import duckdb

from nanalyze import queries
from nanalyze.analysis import catalog, connection, made, remote, sqltext
from nanalyze.analysis.engines import location
from nanalyze.rundir import objectstore, runfile
from nanalyze.rundir.errors import QueryError, RunError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from nanalyze.analysis.compare import Comparison
    from nanalyze.analysis.launch_scan import Scan

Made = TypeVar("Made")

BATCH_ROWS = 10_000
MOST_BUCKETS = 1_000_000  # of timeline_utilisation that one pass works out
# Views that many queries of a report read; each has a row a class, some a few.
REPORTED = ("_class_devices", "_communicating", "_class_totals", "_class_counters", "verdicts", "_kernel_losses")


def open(
    run_dir: str | os.PathLike[str],
    *,
    verify: bool = True,
    allow_external: bool = False,
    settings: Mapping[str, float] | None = None,
    progress: catalog.Progress | None = None,
) -> Run:
    """Open `run_dir` for reading, as it stands now: shards written later are not seen.

    It is a path, or `s3://bucket/run` or `gs://bucket/run` (docs/object-stores.md).

    verify: compare each shard with the hash in its name (reads every byte once).
    allow_external: let queries read files outside the run directory.
    settings: thresholds by name, in place of those of `nanalyze.analysis.settings.SETTINGS`.
    progress: called with (shards checked, shards in all).

    Raises RunError for a directory that holds no readable run, FormatVersionError for one that
    a newer nanalyze wrote and QueryError for an unknown setting. Damaged shards raise nothing:
    they are left out and listed by `Run.damage`.
    """
    path = location.for_duckdb(os.fspath(run_dir))
    info = runfile.read(path)
    root = path if objectstore.is_remote(path) else path.resolve()
    # Without checking, nothing is read that no query asks for.
    copies = remote.Copies(path) if objectstore.is_remote(path) and verify else None
    try:
        found = catalog.scan(root, verify=verify, progress=progress, copies=copies)
        if found.is_empty:
            raise RunError(_nothing_readable(path, found))
        return Run(path, root, info, found, dict(settings or {}), allow_external, copies)
    except BaseException:
        if copies is not None:
            copies.close()
        raise


def _nothing_readable(path: Path, found: catalog.Catalog) -> str:
    if not found.damage:
        return f"{path}: holds no shards: nothing was recorded yet, or the recorder was stopped before its first flush."
    first = found.damage[0]
    return (
        f"{path}: none of its shards can be read ({len(found.damage)} problems). "
        f"The first: {first.path} {first.problem}. {first.remedy}"
    )


class Run:
    """An open run. Close it, or use it as a context manager; not to be shared between threads.

    `path` is the directory as given, `info` the content of its run.json.
    """

    _copies: remote.Copies | None = None  # of a run in an object store

    def __init__(
        self,
        path: Path,
        root: Path,
        info: Mapping[str, Any],
        found: catalog.Catalog,
        overrides: Mapping[str, float],
        allow_external: bool,
        copies: remote.Copies | None = None,
    ) -> None:
        self.path = path
        self.info = dict(info)
        self._root = root
        self._catalog = found
        self._copies = copies
        self._overrides = overrides
        self._running: duckdb.DuckDBPyConnection | None = None
        self._beside: duckdb.DuckDBPyConnection | None = None  # what a second thread works on meanwhile
        self._closed = False
        # Relations that are worked out before the first query that needs them: what fills them.
        self._unmade: dict[tuple[str, ...], Callable[[duckdb.DuckDBPyConnection, catalog.Catalog], None]] = {
            tuple(made.OVERHEAD): connection.fill_overhead
        }
        if found.shards["samples"] or found.shards["sampled_windows"]:
            self._unmade[tuple(made.ATTRIBUTION)] = connection.fill_attribution
        self._unscanned = self._unstreamed = True
        self._connection, self._views = connection.prepared(root, self.info, found, overrides, allow_external)

    def sql(self, query: str, parameters: Mapping[str, object] | None = None) -> pd.DataFrame:
        """The result of one SELECT as a DataFrame.

        `parameters` gives values to `$name` in the query. Integer columns that hold NULL come as
        pandas' nullable integers, so that nanoseconds stay exact. Raises QueryError.
        """
        return _to_pandas(self.arrow(query, parameters))

    def arrow(self, query: str, parameters: Mapping[str, object] | None = None) -> pa.Table:
        """The result of one SELECT as an Arrow table. Raises QueryError."""
        import pyarrow as pa

        batches = self.batches(query, parameters)
        return pa.Table.from_batches(list(batches), batches.schema)

    def batches(self, query: str, parameters: Mapping[str, object] | None = None, rows: int = BATCH_ROWS) -> Batches:
        """The result of one SELECT as it is computed, about `rows` rows at a time.

        Raises QueryError, here or while the batches are read.
        """
        cursor = self._connection_or_error().cursor()
        statement = sqltext.checked(cursor, query)
        self._running = cursor
        if (known := self._known_use(cursor, statement, parameters)) is not None:
            return Batches(known.to_reader(rows), self._query_error)
        self._make(cursor, statement)
        return Batches(self._reader(cursor, statement, parameters, rows), self._query_error)

    def query(self, name: str, **parameters: object) -> pd.DataFrame:
        """The result of the shipped query `name` (see `queries`), its parameters by name.

        Raises QueryError for an unknown query or parameter.
        """
        shipped = queries.find(name)
        values = queries.bind(shipped, parameters)
        return self.sql(shipped.sql, values or None)

    def prepare(self, buckets: int) -> pa.Table | None:
        """Work out at once what many of a report's queries need of every launch, so that each reads little.

        For a large run also the rows of the query timeline_utilisation for `buckets`, and None for others.
        Raises QueryError.
        """
        cursor = self._connection_or_error().cursor()
        self._on_views(cursor, self._views.make)
        with ThreadPoolExecutor(1) as pool:
            attributing = self._attributing(cursor, pool)
            scan = self._scan(cursor, buckets)
            if attributing is not None:
                self._on_cursor(cursor, lambda own: connection.fill(own, attributing.result()))
                del self._unmade[tuple(made.ATTRIBUTION)]
        self._make(cursor, "SELECT * FROM verdicts")
        self._on_cursor(cursor, connection.keep, REPORTED)
        return scan.pieces if scan is not None else None

    def _attributing(
        self, cursor: duckdb.DuckDBPyConnection, pool: ThreadPoolExecutor
    ) -> Future[Mapping[str, pa.Table]] | None:
        """Begin to attribute the samples of a large run, while another thread goes through its launches.

        Each of the two takes about a core. None where there is nothing to gain.
        """
        if tuple(made.ATTRIBUTION) not in self._unmade or not self._unscanned:
            return None
        if not self._is_large(cursor):
            return None
        self._beside = cursor.cursor()
        return pool.submit(connection.attributed, self._beside, self._catalog)

    def verdicts(self) -> pd.DataFrame:
        """What bounds each kernel class, with the evidence; largest share of time first."""
        return self.sql("SELECT * FROM verdicts ORDER BY total_ns DESC NULLS LAST, kernel_class_id")

    def counters(self) -> pd.DataFrame:
        """Hardware counters of each kernel class, per launch."""
        return self.sql("SELECT * FROM counters ORDER BY kernel_class_id, counter")

    def attribution(self) -> pd.DataFrame:
        """Rate of each sampled counter in each kernel class, with its interval, by device and group."""
        return self.sql(
            "SELECT * FROM attribution ORDER BY device, counter_group, counter, time_ns DESC, term, kernel_class_id"
        )

    def attribution_windows(self) -> pd.DataFrame:
        """The same in windows of time, so that a drifting job shows its drift."""
        return self.sql(
            "SELECT * FROM attribution_windows ORDER BY device, counter_group, counter, start_ns, term, kernel_class_id"
        )

    def attribution_quality(self) -> pd.DataFrame:
        """How well the attribution predicts samples it has not seen, by device, group and counter."""
        return self.sql("SELECT * FROM attribution_quality ORDER BY device, counter_group, counter")

    def sampled_against_exact(self) -> pd.DataFrame:
        """Counters that were both sampled and measured exactly, side by side."""
        return self.sql("SELECT * FROM sampled_against_exact ORDER BY counter, time_share DESC, kernel_class_id")

    def overhead(self) -> pd.DataFrame:
        """What recording cost the steps of each process, with an interval, from the recorder's own pauses."""
        return self.sql("SELECT * FROM overhead ORDER BY process")

    def throttling(self) -> pd.DataFrame:
        """When each device ran below its clocks, and why."""
        return self.sql("SELECT * FROM throttling ORDER BY start_ns, device, reason")

    def kernels(self) -> pd.DataFrame:
        """Every launch by start, untimed ones last: of a long run, select with `sql` instead."""
        return self.sql(
            "SELECT * FROM kernels ORDER BY start_ns NULLS LAST, process, correlation_id, graph_node_id NULLS FIRST"
        )

    def kernel_classes(self) -> pd.DataFrame:
        """Every kernel with its launch shape and resources."""
        return self.sql("SELECT * FROM kernel_classes ORDER BY name, kernel_class_id")

    def kernels_summary(self, rows: int = 1_000_000) -> pd.DataFrame:
        """The `rows` kernel classes that take the most time, with launches, durations and verdict."""
        return self.query("top_kernels", rows=rows)

    def ranges(self) -> pd.DataFrame:
        """Every range of host code by start."""
        return self.sql("SELECT * FROM ranges ORDER BY start_ns, process, range_id")

    def copies(self) -> pd.DataFrame:
        """Every memory copy and set by start."""
        return self.sql("SELECT * FROM copies ORDER BY start_ns NULLS LAST, process, correlation_id")

    def devices(self) -> pd.DataFrame:
        """Every GPU of every process."""
        return self.sql("SELECT * FROM devices ORDER BY process, device_id")

    def processes(self) -> pd.DataFrame:
        """Every process that recorded."""
        return self.sql("SELECT * FROM processes ORDER BY rank NULLS LAST, process")

    def compare(self, a: str, b: str, *, skip: int = 0, within: str | None = None) -> Comparison:
        """How the ranges called `b` differ from those called `a`; ranges of one name are repetitions.

        The first `skip` of each name and process are left out, as warm-up; with `within` all that do not lie
        in a range of that name. Raises CompareError.
        """
        from nanalyze.analysis import compare

        return compare.ranges(self, a, b, skip=skip, within=within)

    def perturbation(self) -> pd.DataFrame:
        """Time of each kernel class without the profiler beside its time under exact counters."""
        return self.sql("SELECT * FROM perturbation ORDER BY launches * mean_ns DESC, kernel_class_id")

    def damage(self) -> pd.DataFrame:
        """Shards that were left out or are missing; empty where all is well."""
        return self.sql("SELECT * FROM damage ORDER BY table_name, process NULLS FIRST, path, problem")

    @property
    def damage_count(self) -> int:
        """How many rows `damage` has."""
        return len(self._catalog.damage)

    def view_script(self, relative_to: str | os.PathLike[str] | None = None) -> str:
        """SQL that makes these views in a DuckDB of one's own, over the same files: see `analysis.script`.

        Paths in it are absolute, or relative to a folder.
        """
        from nanalyze.analysis import script

        base = None if relative_to is None else Path(relative_to)
        origin = self._copies.origin if self._copies is not None else None
        return script.views(self, self._root, self.info, self._catalog, self._overrides, base, origin)

    def interrupt(self) -> None:
        """Stop the query that is being read, from another thread; reading it then raises QueryError."""
        for running in (self._running, self._beside):
            if running is not None:
                running.interrupt()

    def close(self) -> None:
        """Release the connection; further queries raise QueryError."""
        self._closed = True
        self._connection.close()
        if self._copies is not None:
            self._copies.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<nanalyze run {str(self.path)!r}, damage {self.damage_count}>"

    def _make(self, cursor: duckdb.DuckDBPyConnection, statement: str) -> None:
        """Make the views that the statement needs, and work out what they need.

        Attributing samples takes seconds, for a run of an hour minutes.
        """
        needed = self._views.needed_by(statement)
        for relations, fill in list(self._unmade.items()):
            if needed & {f"raw.{relation}" for relation in relations}:
                self._fill(cursor, relations, fill)
        if self._unscanned and not needed.isdisjoint(made.SCANNED):
            self._scan(cursor, None)
        if self._unstreamed and made.STREAMS in needed:
            self._stream(cursor)
        self._on_views(cursor, self._views.make_for, statement)

    def _fill(
        self,
        cursor: duckdb.DuckDBPyConnection,
        relations: tuple[str, ...],
        fill: Callable[[duckdb.DuckDBPyConnection, catalog.Catalog], None],
    ) -> None:
        reads = made.OVERHEAD_READS if relations == tuple(made.OVERHEAD) else None
        self._on_views(cursor, self._views.make, reads)
        self._on_cursor(cursor, fill, self._catalog)
        self._views.replaced(f"raw.{relation}" for relation in relations)
        del self._unmade[relations]

    def _scan(self, cursor: duckdb.DuckDBPyConnection, buckets: int | None) -> Scan | None:
        """Go through all launches of a large run, once."""
        if not self._unscanned:
            return None
        self._unscanned = False
        if not self._is_large(cursor):
            return None
        self._on_views(cursor, self._views.make, made.SCAN_READS)
        scan = self._on_cursor(cursor, connection.fill_launches, self._catalog, buckets)
        if scan is not None:
            self._views.replaced(made.SCANNED)
        return scan

    def _stream(self, cursor: duckdb.DuckDBPyConnection) -> None:
        """Go through the streams of a large run, once."""
        self._unstreamed = False
        if not self._is_large(cursor):
            return
        self._on_views(cursor, self._views.make, made.STREAM_READS)
        if self._on_cursor(cursor, connection.fill_streams, self._catalog):
            self._views.replaced([made.STREAMS])

    def _is_large(self, cursor: duckdb.DuckDBPyConnection) -> bool:
        """Whether passes over all launches answer sooner than views do."""
        self._on_views(cursor, self._views.make, ["raw.kernels"])
        return self._on_cursor(cursor, connection.launches) >= made.FEWEST_LAUNCHES

    def _on_views(self, cursor: duckdb.DuckDBPyConnection, work: Callable[..., None], *arguments: object) -> None:
        """Make views; RunError for a shard that DuckDB refuses, though its hash and footer are right."""
        try:
            with cursor.cursor() as own:
                self._running = own
                work(own, *arguments)
        except duckdb.InterruptException as error:
            raise self._query_error(error) from error
        except duckdb.Error as error:
            raise self._gone_error() or connection.refused(cursor, self._catalog) or self._query_error(error) from error
        finally:
            self._running = cursor

    def _known_use(
        self, cursor: duckdb.DuckDBPyConnection, statement: str, parameters: Mapping[str, object] | None
    ) -> pa.Table | None:
        """The rows of the shipped query timeline_utilisation, if it is that, of a large run; they need no sorting."""
        if statement != queries.query("timeline_utilisation").sql:
            return None
        buckets = (parameters or {}).get("buckets")
        if not isinstance(buckets, int) or not 1 <= buckets <= MOST_BUCKETS:
            return None
        if not self._is_large(cursor):
            return None
        self._on_views(cursor, self._views.make, made.USE_READS)
        return self._on_cursor(cursor, connection.device_use, self._catalog, buckets)

    def _on_cursor(self, cursor: duckdb.DuckDBPyConnection, work: Callable[..., Made], *arguments: object) -> Made:
        """What `work` gives on a cursor of its own, which `interrupt` stops meanwhile. Raises QueryError."""
        try:
            with cursor.cursor() as own:
                self._running = own
                return work(own, *arguments)
        except duckdb.Error as error:
            raise self._query_error(error) from error
        finally:
            self._running = cursor

    def _connection_or_error(self) -> duckdb.DuckDBPyConnection:
        if self._closed:
            raise QueryError(f"{self.path}: the run is closed. Open it again.")
        return self._connection

    def _reader(
        self,
        cursor: duckdb.DuckDBPyConnection,
        statement: str,
        parameters: Mapping[str, object] | None,
        rows: int,
    ) -> pa.RecordBatchReader:
        try:
            # A relation on a cursor of its own: in DuckDB 2.0 an unread result blocks its
            # connection, and execute() copies every row once more on the way to Arrow.
            relation: Any = cursor.sql(statement, params=parameters)
            if hasattr(relation, "to_arrow_reader"):
                return relation.to_arrow_reader(rows)
            return relation.fetch_record_batch(rows)  # DuckDB 1.4
        except (duckdb.BinderException, duckdb.CatalogException) as error:
            if not self._views.are_whole:
                self._make_all(cursor, statement, parameters)
                return self._reader(cursor, statement, parameters, rows)
            raise sqltext.query_error(_positioned(cursor, error, statement, parameters)) from error
        except (duckdb.Error, OSError) as error:
            raise self._query_error(error) from error

    def _make_all(
        self, cursor: duckdb.DuckDBPyConnection, statement: str, parameters: Mapping[str, object] | None
    ) -> None:
        """Make all views for a statement that put the name of one together, or is wrong and shall be told with them."""
        self._on_views(cursor, self._views.make)
        with suppress(duckdb.Error):
            cursor.sql(statement, params=parameters)  # only reads its names: there was one, and nobody knows which
            for relations, fill in list(self._unmade.items()):
                self._fill(cursor, relations, fill)

    def _query_error(self, error: BaseException) -> QueryError:
        """The error as the user should read it; a shard that is gone explains any other complaint."""
        return self._gone_error() or sqltext.query_error(error)

    def _gone_error(self) -> QueryError | None:
        for path in self._gone():
            return QueryError(f"{path}: is gone since the run was opened. Open the run again.")
        return None

    def _gone(self) -> Iterator[Path]:
        """Shards that have been removed."""
        paths = [shard.path for shards in self._catalog.shards.values() for shard in shards]
        far = [path for path in paths if objectstore.is_remote(path)]
        yield from (path for path in paths if not objectstore.is_remote(path) and not path.exists())
        if not far:
            return
        try:
            there = {self._root / name for name, _ in objectstore.listing(self._root)}
        except RunError:
            return
        yield from (path for path in far if path not in there)


class Batches:
    """A result being read: `schema`, and Arrow record batches one after another, once."""

    def __init__(self, reader: pa.RecordBatchReader, translate: Callable[[BaseException], QueryError]) -> None:
        self.schema: pa.Schema = reader.schema
        self._reader = reader
        self._translate = translate

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        batches = iter(self._reader)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (duckdb.Error, pa.ArrowException, OSError) as error:
                raise self._translate(error) from error
            yield batch


def _positioned(
    cursor: duckdb.DuckDBPyConnection, error: duckdb.Error, query: str, parameters: Mapping[str, object] | None
) -> duckdb.Error:
    """The same error with DuckDB's mark of where in the query it is, which relations leave out."""
    try:
        cursor.execute(query, parameters)
    except duckdb.Error as positioned:
        return positioned
    return error


# --- results -----------------------------------------------------------------------------------


def _integers(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Sums of integers are 128 bits wide in DuckDB: int64 where they fit, else float64."""
    import pyarrow as pa

    if not pa.types.is_decimal(column.type) or column.type.scale != 0:
        return column
    try:
        return column.cast(pa.int64())
    except pa.ArrowInvalid:
        return column.cast(pa.float64())


def _to_pandas(table: pa.Table) -> pd.DataFrame:
    import pandas as pd
    import pyarrow as pa

    nullable = {
        pa.int8(): pd.Int8Dtype(), pa.int16(): pd.Int16Dtype(), pa.int32(): pd.Int32Dtype(),
        pa.int64(): pd.Int64Dtype(), pa.uint8(): pd.UInt8Dtype(), pa.uint16(): pd.UInt16Dtype(),
        pa.uint32(): pd.UInt32Dtype(), pa.uint64(): pd.UInt64Dtype(), pa.bool_(): pd.BooleanDtype(),
    }  # fmt: skip
    columns = [
        column.to_pandas(types_mapper=nullable.get if column.null_count else None)
        for column in map(_integers, table.columns)
    ]
    # By number first: two columns of a result may have the same name.
    frame = pd.DataFrame(dict(enumerate(columns)), index=pd.RangeIndex(table.num_rows))
    frame.columns = table.column_names
    return frame
