"""The tables of an Nsight Systems export, column by column: a SQLite file or a directory of Parquet.

Both have the same tables with the same columns; which of them exist depends on the tool's version
and on what was traced, so nothing here expects one. Integers come as int64 arrays (masked where
NULL or where the file holds something else), text as lists.

Whole integer columns of SQLite are decoded by `sqlite_pages`, on two threads; what that leaves to
SQLite (text, unusual tables, damage) is read through the `sqlite3` module.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np

from nanalyze.importers import sqlite_pages
from nanalyze.importers.options import ImportFailed

SQLITE_MAGIC = b"SQLite format 3\0"
CHUNK_ROWS = 250_000  # of Parquet
FETCHED_ROWS = 50_000
LONGEST_TEXT = 64 * 2**20  # of one value; names of kernels run to 100 kB
SMALLEST_ROW_BYTES = 4  # in SQLite: a damaged file cannot make a scan longer than this allows
ROWS_FREE, ROWS_A_BYTE = 1_000_000, 10  # in Parquet: instants and ids compress to some bytes a row
EXPORT_AGAIN = "Export it again: nsys export --type sqlite --force-overwrite true REPORT.nsys-rep"
THREADS = min(4, os.cpu_count() or 1)

# sqlite3 also fails to decode the messages of a library that quotes damaged text.
SQLITE_ERRORS = (sqlite3.Error, OverflowError, UnicodeDecodeError)

Columns = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """What to read of a table; columns that it lacks are left out. `only` keeps rows by value."""

    table: str
    integers: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    reals: tuple[str, ...] = ()
    only: tuple[str, tuple[int, ...]] | None = None


class Source(Protocol):
    """An export that is open for reading."""

    @property
    def path(self) -> Path: ...

    @property
    def tables(self) -> Mapping[str, frozenset[str]]:
        """The columns of each table by its name."""
        ...

    def scan(self, wanted: Wanted, then: Callable[[Columns], Any] = ...) -> Iterator[Any]:
        """What `then` makes of each chunk, in the table's order; it runs on several threads."""
        ...

    def texts(self, ids: Iterable[int]) -> dict[int, str]:
        """The strings of `StringIds`; an id that dangles is not in the result."""
        ...

    def close(self) -> None: ...


def open_source(path: Path) -> SqliteSource | ParquetSource:
    """The export at `path`; ImportFailed for one that cannot be read."""
    return ParquetSource(path) if path.is_dir() else SqliteSource(path)


def same(columns: Columns) -> Columns:
    """The chunk as it is."""
    return columns


# --- SQLite ----------------------------------------------------------------------------------------


class SqliteSource:
    """A SQLite export, opened read-only and immutable: not even a lock is written beside it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        journal = path.with_name(path.name + "-wal")
        if journal.exists() and journal.stat().st_size:
            raise ImportFailed(path, "has changes in its write-ahead log that are not in it yet", EXPORT_AGAIN)
        self._uri = f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1"
        self._most_rows = path.stat().st_size // SMALLEST_ROW_BYTES
        self._connection = self._connect()
        try:
            self.tables: dict[str, frozenset[str]] = self._find_tables()
        except BaseException:
            self._connection.close()
            raise

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._uri, uri=True, check_same_thread=False)
        try:
            connection.text_factory = lambda raw: raw.decode("utf-8", "backslashreplace")
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_TEXT)
            connection.execute("PRAGMA trusted_schema = OFF")
        except BaseException:
            connection.close()
            raise
        return connection

    def _find_tables(self) -> dict[str, frozenset[str]]:
        """Ordinary tables only: a view or virtual table in a file from elsewhere could run code."""
        found = {}
        rows = self._fetch("SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0")
        for (name,) in rows:
            if isinstance(name, str):
                columns = self._fetch(f"PRAGMA table_info({_quoted(name)})")
                found[name] = frozenset(str(column[1]) for column in columns)
        return found

    def _fetch(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        try:
            return self._connection.execute(sql, parameters).fetchmany(1_000_000)
        except SQLITE_ERRORS as error:
            raise self._damaged(error) from error

    def _damaged(self, error: BaseException) -> ImportFailed:
        reason = "its schema is damaged" if isinstance(error, UnicodeDecodeError) else error
        return ImportFailed(self.path, f"cannot be read as SQLite: {reason}", EXPORT_AGAIN)

    def scan(self, wanted: Wanted, then: Callable[[Columns], Any] = same) -> Iterator[Any]:
        """Chunks of the table, several decoded at once."""
        present = self.tables.get(wanted.table, frozenset())
        names = [name for name in (*wanted.integers, *wanted.texts, *wanted.reals) if name in present]
        if not names:
            return
        if wanted.texts:
            yield from self._scan_rows(wanted, names, then, 0)
            return
        given = 0
        try:
            for rows, result in self._scan_pages(wanted, names, then):
                given += rows
                yield result
        except sqlite_pages.NotPlain:
            yield from self._scan_rows(wanted, names, then, given)

    def _scan_pages(
        self, wanted: Wanted, names: Sequence[str], then: Callable[[Columns], Any]
    ) -> Iterator[tuple[int, Any]]:
        """Rows read and what became of them, for each chunk of pages."""
        only = [wanted.only[0]] if wanted.only else []
        try:
            plan = sqlite_pages.layout(self._connection, wanted.table)
        except SQLITE_ERRORS as error:
            raise self._damaged(error) from error
        pages = sqlite_pages.Pages(self.path)
        at = [plan.columns.index(name) for name in (*names, *only)]

        def chunk(numbers: Any) -> tuple[int, Any]:
            columns = pages.rows(numbers, len(plan.columns), at)
            typed = {
                name: reals(values) if name in wanted.reals else integers(values)
                for name, values in zip(names, columns, strict=False)
            }
            rows = len(columns[0])
            if wanted.only:
                typed = keep_only(typed, integers(columns[-1]), wanted.only[1])
            return rows, then(typed) if typed and len(next(iter(typed.values()))) else None

        for rows, result in _in_order(chunk, pages.chunks(plan.root), THREADS):
            if result is not None:
                yield rows, result

    def _scan_rows(
        self, wanted: Wanted, names: Sequence[str], then: Callable[[Columns], Any], skip: int
    ) -> Iterator[Any]:
        """The same through SQLite, without the first `skip` rows."""
        columns = ", ".join(map(_quoted, names))
        sql = f"SELECT {columns} FROM {_quoted(wanted.table)}"
        if wanted.only:
            sql += f" WHERE {_quoted(wanted.only[0])} IN ({', '.join(str(int(value)) for value in wanted.only[1])})"
        seen = 0
        try:
            cursor = self._connection.execute(f"{sql} LIMIT -1 OFFSET {int(skip)}")
            while rows := cursor.fetchmany(FETCHED_ROWS):
                seen += len(rows)
                if seen > self._most_rows:
                    raise self._damaged(ValueError("it has more rows than its size allows"))
                yield then(self._typed(wanted, names, list(zip(*rows, strict=True))))
        except SQLITE_ERRORS as error:
            raise self._damaged(error) from error

    def _typed(self, wanted: Wanted, names: Sequence[str], columns: Sequence[Any]) -> Columns:
        typed: Columns = {}
        for name, values in zip(names, columns, strict=True):
            if name in wanted.integers:
                typed[name] = integers(values)
            elif name in wanted.reals:
                typed[name] = reals(values)
            else:
                typed[name] = texts(values)
        return typed

    def texts(self, ids: Iterable[int]) -> dict[int, str]:
        if not {"id", "value"} <= self.tables.get("StringIds", frozenset()):
            return {}
        wanted, found = sorted(set(ids)), {}
        for start in range(0, len(wanted), 500):
            some = wanted[start : start + 500]
            marks = ", ".join("?" * len(some))
            rows = self._fetch(f"SELECT id, value FROM StringIds WHERE id IN ({marks})", some)
            found.update({id_: str(value) for id_, value in rows if value is not None})
        return found

    def close(self) -> None:
        self._connection.close()


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _in_order(work: Callable[[Any], Any], items: Iterable[Any], threads: int) -> Iterator[Any]:
    """`work` of each item in order, at most two ahead of what was taken, so memory stays bounded."""
    if threads < 2:
        yield from map(work, items)
        return
    waiting: deque[Any] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="nanalyze-read") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


# --- Parquet ---------------------------------------------------------------------------------------


class ParquetSource:
    """A directory of one Parquet file a table (`nsys export --type parquetdir`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = {file.stem: file for file in parquet_files(path)}
        self._strings: dict[int, str] | None = None
        self.tables: dict[str, frozenset[str]] = {name: self._columns_of(name) for name in self._files}

    def _columns_of(self, table: str) -> frozenset[str]:
        """The names of a table's columns. Run lengths could make a few bytes stand for any number of rows."""
        with self._told_of(table), self._open(table) as file:
            if file.metadata.num_rows > ROWS_FREE + ROWS_A_BYTE * self._files[table].stat().st_size:
                raise ValueError("it has more rows than its size allows")
            return frozenset(file.schema_arrow.names)

    def _open(self, table: str) -> Any:
        import pyarrow.parquet as pq

        with self._told_of(table):
            return pq.ParquetFile(self._files[table])

    @contextmanager
    def _told_of(self, table: str) -> Iterator[None]:
        """What pyarrow raises for a damaged file, names that are no UTF-8 among it, as ImportFailed."""
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
            raise self._damaged(table, error) from error

    def _damaged(self, table: str, error: BaseException) -> ImportFailed:
        return ImportFailed(self._files[table], f"cannot be read as Parquet: {error}", EXPORT_AGAIN)

    def scan(self, wanted: Wanted, then: Callable[[Columns], Any] = same) -> Iterator[Any]:
        present = self.tables.get(wanted.table, frozenset())
        names = [name for name in (*wanted.integers, *wanted.texts, *wanted.reals) if name in present]
        if not names:
            return
        read = [*names, *([wanted.only[0]] if wanted.only and wanted.only[0] in present else [])]
        with self._open(wanted.table) as file:
            batches = file.iter_batches(CHUNK_ROWS, columns=list(dict.fromkeys(read)))
            while True:
                with self._told_of(wanted.table):
                    batch = next(batches, None)
                    chunk = self._chunk(wanted, names, batch) if batch is not None else {}
                if batch is None:
                    return
                if chunk:
                    yield then(chunk)

    def _chunk(self, wanted: Wanted, names: Sequence[str], batch: Any) -> Columns:
        typed: Columns = {}
        for name in names:
            column = batch.column(batch.schema.get_field_index(name))
            typed[name] = (
                integers(column)
                if name in wanted.integers
                else reals(column)
                if name in wanted.reals
                else texts(column)
            )
        if wanted.only and wanted.only[0] in batch.schema.names:
            by = integers(batch.column(batch.schema.get_field_index(wanted.only[0])))
            return keep_only(typed, by, wanted.only[1])
        return typed if batch.num_rows else {}

    def texts(self, ids: Iterable[int]) -> dict[int, str]:
        if self._strings is None:
            self._strings = {}
            for chunk in self.scan(Wanted("StringIds", ("id",), ("value",))):
                if {"id", "value"} <= chunk.keys():
                    pairs = zip(np.ma.filled(chunk["id"], -1).tolist(), chunk["value"], strict=True)
                    self._strings.update({id_: value for id_, value in pairs if value is not None})
        return {id_: self._strings[id_] for id_ in ids if id_ in self._strings}

    def close(self) -> None:
        """Nothing stays open between scans."""


def parquet_files(path: Path) -> list[Path]:
    """The files of a Parquet export, one a table; links out of the directory are not followed."""
    pattern = re.compile(r"[A-Za-z][A-Za-z0-9_]*\.parquet")
    return [file for file in sorted(path.iterdir()) if pattern.fullmatch(file.name) and not file.is_symlink()]


# --- columns ---------------------------------------------------------------------------------------


def integers(values: Any) -> Any:
    """int64 values from an Arrow array or a sequence, masked where there is no whole number.

    Rows whose value is no integer are masked like NULL: SQLite keeps any type in any column.
    """
    import pyarrow as pa

    if isinstance(values, np.ndarray):
        return values if values.dtype == np.int64 else _whole_floats(values)
    if isinstance(values, pa.Array | pa.ChunkedArray):
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        if pa.types.is_integer(values.type) and values.type != pa.uint64():
            return _masked_integers(values)
        values = values.to_pylist()
    try:
        array = np.array(values)
    except (ValueError, OverflowError):
        return _cleaned(values)
    return array if array.dtype == np.int64 else _cleaned(values)


def _whole_floats(values: Any) -> Any:
    believed = np.isfinite(values) & (np.abs(values) < 2.0**63)
    whole = believed & (values == np.floor(np.where(believed, values, 0)))
    return np.ma.MaskedArray(np.where(whole, values, 0).astype(np.int64), mask=~whole)


def _masked_integers(values: Any) -> Any:
    import pyarrow as pa

    if not values.null_count:
        return np.asarray(values.cast(pa.int64()).to_numpy(zero_copy_only=False))
    missing = np.asarray(values.is_null().to_numpy(zero_copy_only=False), dtype=bool)
    filled = values.fill_null(0).cast(pa.int64()).to_numpy(zero_copy_only=False)
    return np.ma.MaskedArray(filled, mask=missing)


def _cleaned(values: Sequence[Any]) -> Any:
    whole = [_whole(value) for value in values]
    filled = np.array([0 if value is None else value for value in whole], dtype=np.int64)
    return np.ma.MaskedArray(filled, mask=[value is None for value in whole])


def _whole(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and -(2**63) <= value < 2**63 else None


def reals(values: Any) -> Any:
    """float64 values, NaN where there is none."""
    import pyarrow as pa

    if isinstance(values, np.ndarray):
        return np.ma.filled(np.ma.asarray(values).astype(np.float64), np.nan)
    if isinstance(values, pa.Array | pa.ChunkedArray):
        if pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
            return np.asarray(values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))
        values = values.to_pylist()
    return np.array([float(value) if isinstance(value, int | float) else np.nan for value in values], dtype=np.float64)


def texts(values: Any) -> list[str | None]:
    """Text, None where there is none; bytes that are not UTF-8 appear as `\\xNN`."""
    if hasattr(values, "to_pylist"):
        import pyarrow as pa

        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
            values = values.cast(pa.large_binary())
        values = values.to_pylist()
    return [value if value is None else _text(value) for value in values]


def _text(value: Any) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def keep_only(columns: Columns, by: Any, values: Sequence[int]) -> Columns:
    """The rows whose value of `by` is one of `values`; nothing where there are none."""
    keep = np.isin(np.ma.getdata(by), values) & ~np.ma.getmaskarray(by)
    return {name: select(column, keep) for name, column in columns.items()} if keep.any() else {}


def select(values: Any, keep: Any) -> Any:
    """The rows of a column where `keep` is true."""
    if isinstance(values, list):
        return [value for value, kept in zip(values, keep.tolist(), strict=True) if kept]
    return values[keep]
