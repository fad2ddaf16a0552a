"""The public views as Parquet or CSV files, one a view, written batch by batch.

In CSV a missing value is an empty field and text always stands in quotes, so the two stay apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nanalyze.analysis as na
from nanalyze import queries
from nanalyze.rundir.errors import NanalyzeError

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 100_000
ROW_GROUP_ROWS = 250_000


def public_views() -> tuple[str, ...]:
    """Every view that `nanalyze sql` shows."""
    return tuple(view for view in queries.VIEWS if not view.startswith("_"))


def chosen(views: Sequence[str] | None) -> tuple[str, ...]:
    """`views` without repetitions, or all; NanalyzeError for one that does not exist."""
    known = public_views()
    for view in views or ():
        if view not in known:
            raise NanalyzeError(f"--view {view}: no such view. There are {', '.join(known)}.")
    return tuple(dict.fromkeys(views or known))


def write(
    run: na.Run, views: Sequence[str], format: str, folder: Path, progress: Callable[[str, int], None]
) -> dict[str, int]:
    """Write each of `views` as `<view>.<format>` into `folder`; the rows of each."""
    return {view: _write_view(run, view, format, folder / f"{view}.{format}", progress) for view in views}


def _write_view(run: na.Run, view: str, format: str, path: Path, progress: Callable[[str, int], None]) -> int:
    import pyarrow as pa

    reader = run.batches(f"SELECT * FROM {view}", rows=BATCH_ROWS)  # `view` is one of public_views()
    schema = pa.schema([_storable(field) for field in reader.schema])
    rows = 0
    with open(path, "wb") as file, _writer(file, schema, format) as writer:
        for batch in reader:
            writer.write_table(pa.Table.from_batches([batch]).cast(schema))
            rows += batch.num_rows
            progress(view, rows)
    return rows


def _storable(field: pa.Field) -> pa.Field:
    """Sums are 128 bits wide in DuckDB, which few readers know: 64 bits hold any that a run can have."""
    import pyarrow as pa

    if pa.types.is_decimal(field.type) and field.type.scale == 0:
        return field.with_type(pa.int64())
    return field


def _writer(file: Any, schema: pa.Schema, format: str) -> Any:
    if format == "csv":
        from pyarrow import csv

        return csv.CSVWriter(file, schema)
    import pyarrow.parquet as pq

    return _Grouped(pq.ParquetWriter(file, schema, compression="zstd"))


class _Grouped:
    """Gathers batches to row groups of a size that other engines read well."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._pending: list[pa.Table] = []

    def write_table(self, table: pa.Table) -> None:
        self._pending.append(table)
        if sum(pending.num_rows for pending in self._pending) >= ROW_GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._pending:
            self._writer.write_table(pa.concat_tables(self._pending))
            self._pending = []

    def __enter__(self) -> _Grouped:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._flush()
        self._writer.close()
