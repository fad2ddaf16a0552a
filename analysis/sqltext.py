"""Text of SQL: quoting, tables from Python rows, and which statements a user may run."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import duckdb

from nanalyze.rundir.errors import QueryError

_EXPLAIN = re.compile(r"\s*EXPLAIN\b(\s+ANALYZE\b)?", re.IGNORECASE)
# DuckDB 2.0 accepts COPY, INSERT and the like inside WITH and still calls the statement a SELECT.
_READING_NODES = {"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE", "STATEMENT_NODE"}


def literal(value: object) -> str:
    """`value` as an SQL literal: str, int, finite float, bool or None."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"CAST('{value!r}' AS DOUBLE)"
    return "'" + str(value).replace("'", "''") + "'"


def name(identifier: str) -> str:
    """`identifier` quoted as a column or table name."""
    return '"' + identifier.replace('"', '""') + '"'


def values(columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[object]]) -> str:
    """A SELECT that yields `rows`; `columns` are (name, type).

    Constants in a view, rather than a table: then nothing in the database can be modified.
    """
    names = ", ".join(name(column) for column, _ in columns)
    casts = ", ".join(f"CAST({name(c)} AS {t}) AS {name(c)}" for c, t in columns)
    body = ", ".join("(" + ", ".join(literal(value) for value in row) + ")" for row in rows)
    if not rows:
        return empty(columns)
    return f"SELECT {casts} FROM (VALUES {body}) AS rows ({names})"


def empty(columns: Sequence[tuple[str, str]]) -> str:
    """A SELECT of no rows with these columns."""
    return "SELECT " + ", ".join(f"CAST(NULL AS {t}) AS {name(c)}" for c, t in columns) + " WHERE FALSE"


def checked(connection: duckdb.DuckDBPyConnection, query: str) -> str:
    """`query` if it is one statement that only reads, else QueryError.

    SELECT in all its forms (VALUES, FROM, DESCRIBE, SUMMARIZE, SHOW) and EXPLAIN of one.
    """
    statements = _statements(connection, query)
    if not statements:
        raise QueryError("empty query. Give one SELECT statement.")
    if len(statements) > 1:
        # PIVOT as a statement of its own also arrives here in DuckDB 1.4: it expands to several.
        raise QueryError(f"{len(statements)} statements given. Give one SELECT statement.")
    kind = statements[0].type
    if kind == duckdb.StatementType.EXPLAIN:
        return _checked_explain(connection, query)
    if kind != duckdb.StatementType.SELECT or _modifies(connection, query):
        verb = str(kind).rpartition(".")[2]
        which = {"SELECT": "SELECT that modifies", "MULTI": "PIVOT outside of a FROM clause"}.get(verb, verb)
        raise QueryError(f"{which} is not permitted: a run is only read. Give one SELECT statement.")
    return query


def _checked_explain(connection: duckdb.DuckDBPyConnection, query: str) -> str:
    """EXPLAIN ANALYZE runs its statement, so that one must be permitted by itself."""
    match = _EXPLAIN.match(query)
    if match is None:
        raise QueryError("put EXPLAIN first, before any comment.")
    inner = checked(connection, query[match.end() :])
    return f"EXPLAIN {'ANALYZE' if match.group(1) else ''} {inner}"


def _statements(connection: duckdb.DuckDBPyConnection, query: str) -> list[Any]:
    try:
        return list(connection.extract_statements(query))
    except duckdb.Error as error:
        raise query_error(error) from error


def _modifies(connection: duckdb.DuckDBPyConnection, query: str) -> bool:
    try:
        rows = connection.execute("SELECT json_serialize_sql(?)", [query]).fetchall()
    except duckdb.Error as error:
        raise query_error(error) from error
    tree = json.loads(rows[0][0])
    return bool(tree.get("error")) or not set(_node_types(tree)) <= _READING_NODES


def _node_types(tree: object) -> list[str]:
    """The `type` of every query node of a serialised statement, without recursion."""
    found, pending = [], [tree]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            kind = item.get("type")
            if isinstance(kind, str) and kind.endswith("_NODE"):
                found.append(kind)
            pending += item.values()
        elif isinstance(item, list):
            pending += item
    return found


def query_error(error: BaseException) -> QueryError:
    """DuckDB's (or Arrow's) error as one line, with the position and what to do about it."""
    text = str(error)
    first = text.split("\n", 1)[0].strip().rstrip(".!")
    return QueryError(f"{first}{_position(text)}. {_remedy(type(error).__name__, text)}".strip())


def _position(text: str) -> str:
    match = re.search(r"^LINE (\d+): (.*)\n( *)\^", text, re.MULTILINE)
    if match is None:
        return ""
    column = len(match.group(3)) - len(f"LINE {match.group(1)}: ") + 1
    # DuckDB cuts long lines in front, which moves the caret.
    known = column > 0 and not match.group(2).startswith("...")
    return f" (line {match.group(1)}, column {column})" if known else f" (line {match.group(1)})"


def _remedy(kind: str, text: str) -> str:
    if kind == "PermissionException" or "disabled by configuration" in text:
        return "Only the run is readable; --allow-external (allow_external=True) lifts that."
    suggestion = re.search(r"(?:Did you mean|Candidate bindings:) [^\n]+", text)
    if suggestion:
        return suggestion.group(0).rstrip("?.!") + "."
    if kind == "CatalogException":
        return "`.tables` lists the views."
    return ""
