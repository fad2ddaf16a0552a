"""Writes query results: for people as a table, record by record or as Markdown; CSV, JSON, Parquet by batches."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

    import nanalyze.analysis as na

FORMATS = ("table", "csv", "json", "parquet", "markdown", "vertical")
FOR_PEOPLE = ("table", "markdown", "vertical")
CELL_WIDTH = 80  # longer cells are cut in tables: names of templates run to 10 kB


def write(reader: na.Batches, format: str, sink: IO[bytes], max_rows: int | None) -> bool:
    """Write what `reader` gives in UTF-8; whether `max_rows` cut it short."""
    limited = _Limited(reader, max_rows)
    writers: dict[str, Callable[[pa.Schema, Iterator[pa.RecordBatch], IO[bytes]], None]] = {
        "table": _write_table,
        "csv": _write_csv,
        "json": _write_json,
        "parquet": _write_parquet,
        "markdown": _write_markdown,
        "vertical": _write_vertical,
    }
    writers[format](reader.schema, iter(limited), sink)
    return limited.was_cut


class _Limited:
    """The first `max_rows` rows of a reader."""

    def __init__(self, reader: na.Batches, max_rows: int | None) -> None:
        self._reader = reader
        self._left = max_rows
        self.was_cut = False

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._reader:
            if self._left is not None and batch.num_rows > self._left:
                self.was_cut = True
                yield batch.slice(0, self._left)
                return
            if self._left is not None:
                self._left -= batch.num_rows
            yield batch


# --- table -------------------------------------------------------------------------------------


def _write_table(schema: pa.Schema, batches: Iterator[pa.RecordBatch], sink: IO[bytes]) -> None:
    rows = list(_rows(batches))
    if schema.names == ["explain_key", "explain_value"]:
        text = "\n".join(escape(line) for _, plan in rows for line in str(plan).splitlines())
    else:
        text = table(list(schema.names), rows)
    sink.write((text + "\n").encode("utf-8", "backslashreplace"))


def _rows(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[Any, ...]]:
    for batch in batches:
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def table(names: list[str], rows: list[tuple[Any, ...]]) -> str:
    """`rows` under `names`, columns aligned: numbers right, text left."""
    header = [_cut(escape(name)) for name in names]
    cells = [[_cut(cell(value)) for value in row] for row in rows]
    right = [all(_is_number(row[i]) or row[i] is None for row in rows) and bool(rows) for i in range(len(names))]
    widths = [max(map(_width, column)) for column in zip(header, *cells, strict=True)]
    lines = [_line(header, widths, right), "  ".join("-" * width for width in widths)]
    lines += [_line(row, widths, right) for row in cells]
    return "\n".join(lines)


def cell(value: object) -> str:
    """One value for people; text that could be taken for a missing value is quoted."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return f"'{value}'" if value in ("", "NULL") else escape(value)
    return escape(str(value))


def escape(text: str) -> str:
    """`text` with control and formatting characters as escapes, so that it cannot move a cursor."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if _is_plain(c) else c.encode("unicode_escape").decode("ascii") for c in text)


def _is_plain(character: str) -> bool:
    return unicodedata.category(character)[0] != "C" and character not in "\u2028\u2029"


def _cut(text: str) -> str:
    return text if len(text) <= CELL_WIDTH else text[: CELL_WIDTH - 3] + "..."


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) != 0 for c in text)


def _line(cells: list[str], widths: list[int], right: list[bool]) -> str:
    padded = [
        " " * (width - _width(text)) + text if is_right else text + " " * (width - _width(text))
        for text, width, is_right in zip(cells, widths, right, strict=True)
    ]
    return "  ".join(padded).rstrip()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


# --- markdown and vertical ---------------------------------------------------------------------


def _write_markdown(schema: pa.Schema, batches: Iterator[pa.RecordBatch], sink: IO[bytes]) -> None:
    """A table for a document: numbers right, whole cells."""
    rows = list(_rows(batches))
    right = [bool(rows) and all(_is_number(row[i]) or row[i] is None for row in rows) for i in range(len(schema.names))]
    lines = [[_markdown(escape(name)) for name in schema.names], ["---:" if is_right else "---" for is_right in right]]
    lines += [[_markdown(cell(value)) for value in row] for row in rows]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    sink.write((text + "\n").encode("utf-8", "backslashreplace"))


def _markdown(text: str) -> str:
    """`text` such that Markdown shows it as it is: a bar would end the cell, `<` begin a tag."""
    return re.sub(r"[\\`*\[\]|<>~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", text)


def _write_vertical(schema: pa.Schema, batches: Iterator[pa.RecordBatch], sink: IO[bytes]) -> None:
    """A line a value, for rows too wide to stand in a line; whole cells."""
    names = [escape(name) for name in schema.names]
    width = max(map(_width, names), default=0)
    for number, row in enumerate(_rows(batches), 1):
        lines = [f"--- row {number} ---"]
        lines += [
            " " * (width - _width(name)) + f"{name}  {cell(value)}" for name, value in zip(names, row, strict=True)
        ]
        sink.write(("\n".join(lines) + "\n").encode("utf-8", "backslashreplace"))


# --- csv, json, parquet ------------------------------------------------------------------------


def _write_csv(schema: pa.Schema, batches: Iterator[pa.RecordBatch], sink: IO[bytes]) -> None:
    """NULL is an empty field, the empty string is quoted."""
    import pyarrow as pa
    import pyarrow.csv as pacsv

    header = io.StringIO()
    csv.writer(header, lineterminator="\n").writerow(schema.names)
    sink.write(header.getvalue().encode("utf-8"))
    options = pacsv.WriteOptions(include_header=False)
    for batch in batches:
        columns = [_csv_column(column) for column in batch.columns]
        plain = pa.table(columns, names=[str(i) for i in range(len(columns))])
        buffer = pa.BufferOutputStream()
        pacsv.write_csv(plain, buffer, options)
        sink.write(buffer.getvalue())


def _csv_column(column: pa.Array) -> pa.Array:
    """Types that Arrow's CSV writer does not know become text."""
    import pyarrow as pa

    if pa.types.is_decimal(column.type):
        try:
            return column.cast(pa.int64())
        except pa.ArrowException:
            return column.cast(pa.string())
    if pa.types.is_nested(column.type):
        texts = [None if v is None else json.dumps(_jsonable(v), ensure_ascii=False) for v in column.to_pylist()]
        return pa.array(texts, pa.string())
    return column


def _write_json(schema: pa.Schema, batches: Iterator[pa.RecordBatch], sink: IO[bytes]) -> None:
    """An array with an object a row; integers are exact, NaN and infinity are null."""
    names = _unique(schema.names)
    separator = "[\n"
    for batch in batches:
        columns = [column.to_pylist() for column in batch.columns]
        for row in zip(*columns, strict=True):
            item = dict(zip(names, map(_jsonable, row), strict=True))
            sink.write((separator + json.dumps(item, ensure_ascii=False, allow_nan=False)).encode("utf-8"))
            separator = ",\n"
    sink.write(b"[]\n" if separator == "[\n" else b"\n]\n")


def _unique(names: list[str]) -> list[str]:
    """`names` with a number after each repeated one, for objects cannot hold a key twice."""
    seen: set[str] = set()
    result = []
    for name in names:
        candidate, number = name, 1
        while candidate in seen:
            candidate, number = f"{name}_{number}", number + 1
        seen.add(candidate)
        result.append(candidate)
    return result


def _jsonable(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return value.hex() if isinstance(value, bytes) else str(value)


def _write_parquet(schema: pa.Schema, batches: Iterator[pa.RecordBatch], sink: IO[bytes]) -> None:
    import pyarrow.parquet as pq

    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        for batch in batches:
            writer.write_batch(batch)
