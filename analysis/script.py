"""Writes the views of a run as an SQL script, so that a plain DuckDB opens the same views over the same files.

duckdb                       D .read views.sql
import duckdb                duckdb.connect().execute(open("views.sql").read())

Nothing in the script reads run.json, checks hashes or leaves damaged shards out again: it names the
shards that were good when it was written. A run that is still being recorded needs a new script.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanalyze import queries
from nanalyze.analysis import attribution, catalog, connection, overhead, sqltext
from nanalyze.rundir import objectstore

if TYPE_CHECKING:
    import pyarrow as pa

    from nanalyze.analysis.run import Run

OLDEST_DUCKDB = "1.4.1"
# What Python works out is written into the script, up to this many rows a relation: at 20 columns a row
# of text takes about 0.4 kB, so a script stays below some tens of MB.
MADE_ROWS_MAX = 50_000
ROWS_A_STATEMENT = 1_000


def views(
    run: Run,
    root: Path,
    info: Mapping[str, Any],
    found: catalog.Catalog,
    overrides: Mapping[str, float],
    relative_to: Path | None = None,
    origin: Callable[[str], str] | None = None,
) -> str:
    """The script. Paths are absolute, or relative to the folder `relative_to`.
    `origin` gives the URI of a file that was copied here from an object store; nothing is relative then.

    Relations that Python works out, attributed samples and what recording cost, are written out with
    their rows; where they have too many, they and the views that read them are left out and named.
    Raises QueryError.
    """
    moved_root, moved = _moved(root, found, relative_to, origin)
    made = {name: run.arrow(f"SELECT * FROM raw.{name}") for name in _made_names(found)}
    too_long = tuple(name for name, table in made.items() if table.num_rows > MADE_ROWS_MAX)
    left_out = queries.users_of(too_long) if too_long else frozenset()
    is_relative = relative_to is not None and not objectstore.is_remote(root)
    lines = [*_head(moved_root, is_relative, left_out), "CREATE SCHEMA IF NOT EXISTS raw;"]
    for name, source in connection.raw_sources(moved_root, info, moved, overrides).items():
        if name in made:
            lines += _table(name, made[name]) if name not in too_long else []
        else:
            lines.append(f"CREATE OR REPLACE VIEW raw.{sqltext.name(name)} AS {source};")
    for name in queries.VIEWS:
        if name not in left_out:
            lines.append(f"CREATE OR REPLACE VIEW main.{sqltext.name(name)} AS\n{queries.view(name).sql}\n;")
    return "\n".join(lines) + "\n"


def _made_names(found: catalog.Catalog) -> list[str]:
    """Relations that Python fills. Without samples those of the attribution are empty, as `raw_sources` has them."""
    is_sampled = found.shards["samples"] or found.shards["sampled_windows"]
    return [*(attribution.TABLES if is_sampled else ()), *overhead.TABLES]


@dataclass
class _Relative(catalog.Catalog):
    """A catalog that names its files relative to the folder `base`."""

    base: Path = Path()

    def paths(self, table: str) -> list[str]:
        # With ./ in front no folder's name is taken for a home directory or a remote file.
        return [f".{os.sep}{os.path.relpath(path, self.base)}" for path in super().paths(table)]


@dataclass
class _Original(catalog.Catalog):
    """A catalog that names files where they were copied from."""

    origin: Callable[[str], str] = str

    def paths(self, table: str) -> list[str]:
        return [self.origin(path) for path in super().paths(table)]


def _moved(
    root: Path, found: catalog.Catalog, relative_to: Path | None, origin: Callable[[str], str] | None
) -> tuple[Path, catalog.Catalog]:
    """The root and the catalog with the paths that the script is to hold."""
    if origin is not None:
        return root, _Original(found.shards, found.extra_columns, found.damage, origin)
    if relative_to is None or objectstore.is_remote(root):
        return root, found
    base = relative_to.resolve()
    return Path(os.path.relpath(root, base)), _Relative(found.shards, found.extra_columns, found.damage, base)


def _head(root: Path, is_relative: bool, left_out: frozenset[str]) -> Iterator[str]:
    import duckdb

    yield "-- The views of a nanalyze run for a plain DuckDB: `.read` this file, or execute its text."
    yield f"-- Needs DuckDB {OLDEST_DUCKDB} or later; written with {duckdb.__version__}."
    yield f"-- The run: {_one_line(str(root))}"
    if objectstore.is_remote(root):
        yield "-- It lies in an object store: first INSTALL httpfs; LOAD httpfs; and give DuckDB the bucket's"
        yield "-- credentials, with its extension aws by CREATE SECRET (TYPE s3, PROVIDER credential_chain);"
    if is_relative:
        yield "-- Paths are relative: start DuckDB in the folder that this file was written to."
    yield "-- Attributed samples and what recording cost were worked out by nanalyze and stand here as rows."
    if left_out:
        yield f"-- Left out, for they need more than {MADE_ROWS_MAX} such rows: {', '.join(sorted(left_out))}."
        yield "-- Query those with `nanalyze sql`."


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _table(name: str, table: pa.Table) -> Iterator[str]:
    """Statements that make `raw.name` with these rows."""
    made: dict[str, Any] = {**attribution.TABLES, **overhead.TABLES}
    columns = ", ".join(f"{sqltext.name(column)} {kind}" for column, kind in made[name])
    yield f"CREATE OR REPLACE TABLE raw.{sqltext.name(name)} ({columns});"
    for batch in table.to_batches(max_chunksize=ROWS_A_STATEMENT):
        rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
        body = ",\n".join("(" + ", ".join(map(_literal, row)) + ")" for row in rows)
        if body:
            yield f"INSERT INTO raw.{sqltext.name(name)} VALUES\n{body};"


def _literal(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f"CAST('{value!r}' AS DOUBLE)"
    return sqltext.literal(value)
