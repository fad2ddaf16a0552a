"""Collects columns for the run directory's tables and writes them out as shards.

Only the recorder's own thread calls it. A disk that fails is tried again at each flush; what
cannot be kept in memory meanwhile is dropped, oldest first, and counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nanalyze.rundir import schema, shards

FLUSH_ROWS = shards.ROW_GROUP_ROWS  # a full row group is worth writing before its time
KEPT_ROWS = 4 * FLUSH_ROWS  # per table, while the disk does not take them: about 80 MB of launches

Batch = dict[str, Any]  # column name -> numpy (masked) array or list, all of one length


class Writer:
    """Shards of one process in one run directory; `warn` is told once when writing fails."""

    def __init__(self, run_dir: Path, process: str, warn: Callable[[str], None]) -> None:
        self.run_dir = run_dir
        self.process = process
        self.rows: Counter[str] = Counter()  # written
        self.shards: Counter[str] = Counter()  # written
        self.lost: Counter[str] = Counter()  # rows dropped
        self.failure: str | None = None
        self._warn = warn
        self._pending: dict[str, list[Batch]] = {}
        self._pending_rows: Counter[str] = Counter()

    def add(self, table: str, batch: Batch) -> None:
        """Queue the rows of `batch` for `table`; every declared column must be there."""
        count = len(next(iter(batch.values())))
        if count:
            self._pending.setdefault(table, []).append(batch)
            self._pending_rows[table] += count

    def add_rows(self, table: str, rows: list[dict[str, Any]]) -> None:
        """Queue `rows`, each a mapping of column to value; absent columns are NULL."""
        if rows:
            names = schema.TABLES[table].column_names
            self.add(table, {name: [row.get(name) for row in rows] for name in names})

    def event(self, layer: str, kind: str, message: str, count: int | None = None) -> None:
        row = {"time_ns": time.time_ns(), "layer": layer, "kind": kind, "message": message, "count": count}
        self.add_rows("events", [row])

    @property
    def is_full(self) -> bool:
        return any(rows >= FLUSH_ROWS for rows in self._pending_rows.values())

    def flush(self) -> None:
        """Write what is queued, one shard a table; never raises for a disk that fails."""
        for table in list(self._pending):
            self._flush_table(table)

    def _flush_table(self, table: str) -> None:
        batches = self._pending.pop(table)
        count = self._pending_rows.pop(table)
        try:
            rows = to_arrow(schema.TABLES[table], batches)
            shards.write_shard(self.run_dir, table, self.process, self.shards[table] + 1, rows)
        except OSError as error:
            self._keep(table, batches, error)
            return
        except Exception as error:  # a value the table cannot hold: these rows will never be written
            self.lost[table] += count
            self._warn(f"{table}: {count} rows cannot be stored, please report it: {type(error).__name__}: {error}")
            return
        self.shards[table] += 1
        self.rows[table] += count
        self.failure = None

    def _keep(self, table: str, batches: list[Batch], error: OSError) -> None:
        if self.failure is None:
            self.failure = f"{self.run_dir}: cannot write ({error.strerror or error}); recording goes on in memory"
            self._warn(self.failure)
        kept = [*batches, *self._pending.pop(table, [])]
        sizes = [len(next(iter(batch.values()))) for batch in kept]
        while sum(sizes) > KEPT_ROWS:
            self.lost[table] += sizes.pop(0)
            kept.pop(0)
        self._pending_rows[table] = sum(sizes)
        if kept:
            self._pending[table] = kept


def to_arrow(table: schema.Table, batches: list[Batch]) -> Any:
    """`batches` as one Arrow table in the declared column order and types."""
    import pyarrow as pa

    extra = tuple(sorted({name for batch in batches for name in batch} - set(table.column_names)))
    arrow = table.arrow_schema(extra)
    chunks = [pa.record_batch([_array(batch, field) for field in arrow], schema=arrow) for batch in batches]
    return pa.Table.from_batches(chunks, schema=arrow).combine_chunks()


# (`DataType.to_pandas_dtype` imports pandas.)
_DTYPES = {"int32": np.int32, "int64": np.int64, "double": np.float64}


def _array(batch: Batch, field: Any) -> Any:
    """One column as an Arrow array, built from its buffers.

    `pyarrow.array` would do, but it imports pandas (half a second with the GIL held, in the job's
    process) to see whether it was given a Series.
    """
    import pyarrow as pa

    values = batch.get(field.name)
    if values is None:
        return pa.nulls(len(next(iter(batch.values()))), field.type)
    data, missing = _split(values)
    validity = pa.py_buffer(np.packbits(~missing, bitorder="little")) if missing.any() else None
    nulls = int(missing.sum())
    if pa.types.is_string(field.type):
        texts = [
            b"" if gone else str(text).encode("utf-8", "backslashreplace")
            for text, gone in zip(data, missing, strict=True)
        ]
        offsets = np.cumsum([0, *map(len, texts)], dtype=np.int32)
        buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(b"".join(texts))]
    elif pa.types.is_boolean(field.type):
        buffers = [validity, pa.py_buffer(np.packbits(data.astype(bool), bitorder="little"))]
    else:
        buffers = [validity, pa.py_buffer(np.ascontiguousarray(data, dtype=_DTYPES[str(field.type)]))]
    return pa.Array.from_buffers(field.type, len(data), buffers, nulls)


def _split(values: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Values and a mask of the missing ones, from an array, a masked array or a list with None."""
    if isinstance(values, np.ma.MaskedArray):
        return values.data, np.ma.getmaskarray(values)
    if isinstance(values, np.ndarray):
        return values, np.zeros(len(values), dtype=bool)
    missing = np.array([value is None for value in values], dtype=bool)
    return np.array([0 if value is None else value for value in values], dtype=object), missing
