"""Rows that wait until their whole file has been read, in memory or, when there are many, on disk.

Times can only be finished at the end: the base time often stands behind the events, a kernel's
launch call anywhere, and clocks are aligned when every rank is known.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np

HELD_ROWS = 500_000  # 40 MB of kernels; the next ones go to a temporary file
Column = np.ma.MaskedArray[Any, Any]
Columns = dict[str, Column]


def joined(columns: Sequence[Column]) -> Column:
    """The columns one below the other."""
    data = np.concatenate([column.data for column in columns])
    return np.ma.MaskedArray(data, mask=np.concatenate([np.ma.getmaskarray(column) for column in columns]))


def replaced(column: Column, where: Any, values: Any) -> Column:
    """`column` with `values` where `where` says so."""
    data = np.where(where, values, column.data)
    return np.ma.MaskedArray(data, mask=np.ma.getmaskarray(column) & ~np.asarray(where))


class Spool:
    """Batches of integer columns, all with the same names, given back in the order they came."""

    def __init__(self) -> None:
        self.rows = 0
        self._held: list[Columns] = []
        self._held_rows = 0
        self._file: IO[bytes] | None = None
        self._names: tuple[str, ...] = ()
        self._on_disk = 0

    def add(self, batch: Mapping[str, Any]) -> None:
        """Add columns of int64, masked where a value is missing."""
        columns = {name: np.ma.asarray(values) for name, values in batch.items()}
        count = len(next(iter(columns.values())))
        if not count:
            return
        self._held.append(columns)
        self._held_rows += count
        self.rows += count
        if self._held_rows > HELD_ROWS:
            self._spill()

    def batches(self) -> Iterator[Columns]:
        """Everything that was added."""
        if self._file is not None:
            self._file.seek(0)
            for _ in range(self._on_disk):
                yield {name: self._read_column(self._file) for name in self._names}
        yield from self._held

    def close(self) -> None:
        """Forget everything, on disk too."""
        self._held.clear()
        if self._file is not None:
            self._file.close()

    def _spill(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="nanalyze-import-")  # noqa: SIM115 - lives as long as the rows
            self._names = tuple(self._held[0])
        for name in self._names:
            column = joined([batch[name] for batch in self._held])
            np.lib.format.write_array(self._file, column.data, allow_pickle=False)
            np.lib.format.write_array(self._file, np.ma.getmaskarray(column), allow_pickle=False)
        self._on_disk += 1
        self._held, self._held_rows = [], 0

    @staticmethod
    def _read_column(file: IO[bytes]) -> Column:
        values = np.lib.format.read_array(file, allow_pickle=False)
        return np.ma.MaskedArray(values, mask=np.lib.format.read_array(file, allow_pickle=False))
