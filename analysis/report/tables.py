"""The report's tables as CSV files: UTF-8, a header line, NULL as an empty field, integers exact.

Numbers are written as they are stored (nanoseconds, bytes), so that nothing is lost to rounding.
A text that a spreadsheet would take for a formula (it begins with = + - @, a tab or a carriage
return) gets a leading apostrophe, as OWASP advises against CSV injection; names of kernels are
written by whoever wrote the kernel. No other text and no number is altered.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

FORMULA = r"^[=+\-@\t\r]"


def write_csv(path: Path | IO[bytes], table: pa.Table) -> None:
    """Write `table` to `path`, or to an open file; raises OSError where that is not possible."""
    columns = [_safe(table.column(name)) for name in table.column_names]
    safe = pa.table(dict(zip(table.column_names, columns, strict=True)))
    csv.write_csv(safe, path, csv.WriteOptions(include_header=True, quoting_style="needed"))


def _safe(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_floating(column.type):
        return pc.if_else(pc.is_finite(column), column, pa.scalar(None, column.type))
    if pa.types.is_string_view(column.type):
        column = column.cast(pa.string())
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        guarded = pc.binary_join_element_wise(pa.scalar("'", column.type), column, pa.scalar("", column.type))
        return pc.if_else(pc.match_substring_regex(column, FORMULA), guarded, column)
    return column
