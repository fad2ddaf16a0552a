"""Whole integer columns out of a SQLite table, decoded page by page with numpy.

A trace of a million launches is 24 million integers. The `sqlite3` module makes a Python object of
each; here the records of a few thousand pages are decoded at once, all rows that store the same
widths together. The whole import takes less than a quarter of the time that `sqlite3` needs for
reading (`benchmarks/import.py`). The format is documented and fixed:
https://sqlite.org/fileformat2.html

Only plain tables are read this way: b-trees of rows whose records fit their page. Anything else,
damage included, raises `NotPlain`, and the caller reads the table through SQLite itself.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CHUNK_BYTES = 4 * 2**20  # of pages decoded at once, about 40,000 launches: 16 MiB took a quarter more time
HEADER_BYTES = 100
MOST_PATTERNS = 4000  # of widths in one chunk; each costs 0.1 ms, SQLite is quicker beyond
LEAF, INTERIOR = 0x0D, 0x05
DEEPEST = 20
FLOAT = 7  # serial types: 0 NULL, 1 to 6 integers, 7 float, 8 and 9 the constants 0 and 1, from 12 bytes and text
ONE = 9
_WIDTHS = np.array([0, 1, 2, 3, 4, 6, 8, 8, 0, 0, 0, 0, *((n - 12) // 2 for n in range(12, 128))], dtype=np.int64)
_INTEGERS = (1, 2, 3, 4, 5, 6)


class NotPlain(Exception):
    """The table has something that this module leaves to SQLite."""


@dataclass(frozen=True)
class Layout:
    """Where a table's rows are and which column stands where in a record."""

    root: int
    columns: tuple[str, ...]


def layout(connection: sqlite3.Connection, table: str) -> Layout:
    """The layout of `table`; NotPlain for one whose records do not hold its columns in order."""
    quoted = '"' + table.replace('"', '""') + '"'
    row = connection.execute(
        "SELECT rootpage, sql FROM sqlite_master WHERE type = 'table' AND name = ?", (table,)
    ).fetchone()
    if row is None or not isinstance(row[0], int) or "WITHOUT" in str(row[1]).upper():
        raise NotPlain(f"{table}: is no ordinary table")
    found = connection.execute(f"PRAGMA table_xinfo({quoted})").fetchall()
    for _, name, kind, _, _, key, hidden in found:
        if hidden or (key and str(kind).upper() == "INTEGER"):
            raise NotPlain(f"{table}.{name}: is computed or the row id")
    return Layout(row[0], tuple(str(column[1]) for column in found))


class Pages:
    """The pages of one SQLite file, mapped into memory and only read."""

    def __init__(self, path: Path) -> None:
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        if len(self._bytes) < 512:
            raise NotPlain(f"{path}: is shorter than a page")
        size = int(self._bytes[16]) << 8 | int(self._bytes[17])
        self._size = 65536 if size == 1 else size
        self._usable = self._size - int(self._bytes[20])
        self._count = len(self._bytes) // self._size if self._size else 0
        if self._size < 512 or self._size & (self._size - 1) or self._usable < 480:
            raise NotPlain(f"{path}: has no sensible page size")

    def chunks(self, root: int) -> Iterator[Any]:
        """The leaf pages of the table at `root` in order, as arrays of page numbers."""
        leaves = self._leaves(root)
        step = max(1, CHUNK_BYTES // self._size)
        for start in range(0, len(leaves), step):
            yield leaves[start : start + step]

    def rows(self, pages: Any, columns: int, wanted: Sequence[int]) -> list[Any]:
        """The columns at `wanted`, of `columns` in all, as int64 (masked) or float64 arrays.

        A column that holds a float anywhere comes as float64, NaN where it holds none; text and
        bytes count as missing.
        """
        start, limit = self._cells(pages)
        if not len(start):
            return [np.zeros(0, dtype=np.int64) for _ in wanted]
        header, body = self._records(start, limit, columns)
        types = self._windows(columns)[header + 1]
        return self._decode(types, body, limit, wanted)

    # --- pages and records -----------------------------------------------------------------------

    def _leaves(self, root: int) -> Any:
        """Every leaf, level by level; a page that is met twice is damage."""
        pages, seen = np.array([root], dtype=np.int64), 0
        for _ in range(DEEPEST):
            seen += len(pages)
            if seen > self._count or (pages < 2).any() or (pages > self._count).any():
                raise NotPlain("a page that is not in the file")
            kinds = self._bytes[(pages - 1) * self._size]
            if (kinds == LEAF).all():
                return pages
            if (kinds != INTERIOR).any():
                raise NotPlain("a page that is no table's")
            pages = np.concatenate([self._children(int(page)) for page in pages])
        raise NotPlain("a tree that is too deep")

    def _children(self, page: int) -> Any:
        base = (page - 1) * self._size
        cells = self._pointers(np.array([base]), 12)[0]
        return self._big_endian(np.append(cells, base + 8), 4)

    def _cells(self, pages: Any) -> tuple[Any, Any]:
        """Where each row starts, and where the page that holds it ends."""
        base = (pages - 1) * self._size
        return self._pointers(base, 8)

    def _pointers(self, base: Any, header: int) -> tuple[Any, Any]:
        count = self._big_endian(base + 3, 2)
        if (header + 2 * count > self._usable).any():
            raise NotPlain("a page with more rows than it has room for")
        page = np.repeat(base, count)
        within = np.arange(len(page)) - np.repeat(np.cumsum(count) - count, count)
        offset = self._big_endian(page + header + 2 * within, 2)
        if (offset >= self._usable).any() or (offset < header).any():
            raise NotPlain("a row outside its page")
        return page + offset, page + self._usable

    def _records(self, start: Any, limit: Any, columns: int) -> tuple[Any, Any]:
        """Where each record's header and its values start."""
        length, first = self._varint(start)
        _, second = self._varint(start + first)
        header = start + first + second
        if (header + length > limit).any() or (length > self._usable - 35).any():
            raise NotPlain("a row that goes on in another page")
        if (self._bytes.take(header, mode="clip") != columns + 1).any() or columns > 126:
            raise NotPlain("a row with another number of columns")
        return header, header + columns + 1

    def _varint(self, at: Any) -> tuple[Any, Any]:
        """Variable-length integers and how many bytes each takes."""
        byte = self._bytes.take(at, mode="clip").astype(np.int64)
        value, length = byte & 127, np.ones(len(at), dtype=np.int64)
        more = np.flatnonzero(byte >= 128)
        for step in range(1, 9):
            if not len(more):
                return value, length
            byte = self._bytes.take(at[more] + step, mode="clip").astype(np.int64)
            value[more] = value[more] << 7 | byte & 127
            length[more] += 1
            more = more[byte >= 128]
        raise NotPlain("a row id of nine bytes")

    def _big_endian(self, at: Any, width: int) -> Any:
        value = np.zeros(len(at), dtype=np.int64)
        for step in range(width):
            value = value << 8 | self._bytes.take(at + step, mode="clip")
        return value

    def _windows(self, width: int) -> Any:
        """Every run of `width` bytes in the file, as a view."""
        if width > len(self._bytes):
            raise NotPlain("a record longer than the file")
        return np.lib.stride_tricks.as_strided(
            self._bytes, (len(self._bytes) - width + 1, width), (1, 1), writeable=False
        )

    # --- values ----------------------------------------------------------------------------------

    def _decode(self, types: Any, body: Any, limit: Any, wanted: Sequence[int]) -> list[Any]:
        """Rows that store the same widths are decoded together."""
        of_row, first = distinct(_words(types))
        if len(first) > MOST_PATTERNS:
            raise NotPlain("rows too unlike each other")
        order = np.argsort(of_row, kind="stable")
        ends = np.cumsum(np.bincount(of_row, minlength=len(first))).tolist()
        parts: list[list[Any]] = [[] for _ in wanted]
        for pattern, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            kinds = types[first[pattern]]
            if (kinds >= 128).any() or ((kinds == 10) | (kinds == 11)).any():
                raise NotPlain("a value too long for its page, or of no known type")
            offsets = np.concatenate(([0], np.cumsum(_WIDTHS[kinds]))).tolist()
            rows = order[begin:end]
            at = body[rows]
            if (at + offsets[-1] > limit[rows]).any():
                raise NotPlain("a record that leaves its page")
            records = self._windows(offsets[-1])[at] if offsets[-1] else np.zeros((len(rows), 0), dtype=np.uint8)
            for part, column in zip(parts, wanted, strict=True):
                part.append(_values(records, int(kinds[column]), offsets[column]))
        return [_in_place(part, order) for part in parts]


def _words(types: Any) -> list[Any]:
    """Each row's bytes as a few 64-bit words."""
    rows, columns = types.shape
    padded = np.zeros((rows, -(-columns // 8) * 8), dtype=np.uint8)
    padded[:, :columns] = types
    words = padded.view(np.int64)
    return [np.ascontiguousarray(words[:, at]) for at in range(words.shape[1])]


def _values(records: Any, kind: int, offset: int) -> Any:
    """One column of records of one layout; None where it holds no number."""
    rows = len(records)
    if kind in _INTEGERS:
        width = int(_WIDTHS[kind])
        wide = np.zeros((rows, 8), dtype=np.uint8)
        wide[:, :width] = records[:, offset : offset + width]
        return wide.view(">i8")[:, 0].astype(np.int64) >> (64 - 8 * width)  # the shift brings the sign
    if kind == FLOAT:
        return np.ascontiguousarray(records[:, offset : offset + 8]).view(">f8")[:, 0].astype(np.float64)
    if kind in (8, ONE):
        return np.full(rows, int(kind == ONE), dtype=np.int64)
    return rows


def _in_place(parts: list[Any], order: Any) -> Any:
    """The parts of a column back in the order of the table; a number stands for so many missing."""
    is_float = any(not isinstance(part, int) and part.dtype == np.float64 for part in parts)
    missing = np.zeros(len(order), dtype=bool)
    column = np.full(len(order), np.nan) if is_float else np.zeros(len(order), dtype=np.int64)
    at = 0
    for part in parts:
        rows = order[at : at + (part if isinstance(part, int) else len(part))]
        at += len(rows)
        if isinstance(part, int):
            missing[rows] = True
        else:
            column[rows] = part
    return np.ma.MaskedArray(column, mask=missing) if missing.any() and not is_float else column


def distinct(columns: Sequence[Any]) -> tuple[Any, Any]:
    """For each row of int64 `columns` the number of its combination, and a row of each combination.

    Rows are hashed and the hashes counted, an eighth of the time of sorting them. Each row is then
    compared with the first of its number, so combinations that share a hash are noticed.
    """
    import pyarrow as pa

    mixed = _mixed(columns)
    # From its buffer: `pyarrow.array` imports pandas, half a second, to see whether it was given a Series.
    coded = pa.Array.from_buffers(pa.uint64(), len(mixed), [None, pa.py_buffer(mixed)]).dictionary_encode()
    of_row: Any = np.frombuffer(coded.indices.buffers()[1], dtype=np.int32, count=len(mixed))
    first = np.zeros(len(coded.dictionary), dtype=np.int64)
    first[of_row[::-1]] = np.arange(len(of_row))[::-1]
    representative = first[of_row]
    if all((column == column[representative]).all() for column in columns):
        return of_row, first
    _, first, of_row = np.unique(np.stack(columns, axis=1), axis=0, return_index=True, return_inverse=True)
    return of_row.reshape(-1), first


def _mixed(columns: Sequence[Any]) -> Any:
    """A 64-bit hash of each row."""
    mixed = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        mixed ^= column.view(np.uint64)
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed
