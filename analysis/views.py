"""Makes the views of a run when a statement first needs them.

DuckDB binds a view when it is created, with all that it reads: the 57 views, which build on each other, took 0.31 s
(0.59 s with DuckDB 1.4) before the first query, whatever the size of the run. So a statement makes the views that it
names and those that they read. Each is bound against stubs of the views below it, relations without rows that have
the columns of their headers, which then give way to the views themselves: so nothing is bound more than once, and
all of them take 0.14 s (0.08 s), those of `kernels` 0.01 s.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

import duckdb

from nanalyze import queries
from nanalyze.analysis import sqltext

# What may list views: then all of them must be there.
_LISTS = re.compile(r"show|describe|information_schema|(duckdb|pg|pragma|sqlite)_.*")


class Views:
    """The relations of schema `raw` and the views over them in `main`, on one database.

    sources: a SELECT for each relation of `raw`.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = {f"raw.{name}": source for name, source in sources.items()}
        self._missing = {*self._sources, *queries.VIEWS}

    @property
    def are_whole(self) -> bool:
        """Whether all of them are there."""
        return not self._missing

    def needed_by(self, statement: str) -> frozenset[str]:
        """What a statement may read, those that are there already included; of `raw` as raw.<name>.

        A superset: words of the statement that are names. Only a name that the statement puts together itself
        (`query_table('ker' || 'nels')`) is missed; DuckDB then says that there is no such table, and `make` helps.
        """
        words = queries.words(statement)
        raw = {f"raw.{word}" for word in words} & self._sources.keys() if "raw" in words else set()
        return queries.needed_for(queries.named_in(statement) | raw)

    def make_for(self, connection: duckdb.DuckDBPyConnection, statement: str) -> None:
        """Make what a statement may read or list. Raises duckdb.Error."""
        lists = any(map(_LISTS.fullmatch, queries.words(statement)))
        self.make(connection, None if lists else self.needed_by(statement))

    def make(self, connection: duckdb.DuckDBPyConnection, names: Iterable[str] | None = None) -> None:
        """Make what is not there yet of these relations and of what they read; of all without `names`.

        Raises duckdb.Error; then none was made.
        """
        if not self._missing:
            return
        wanted = self._missing if names is None else queries.needed_for(frozenset(names), self._there())
        new = self._missing & set(wanted)
        if not new:
            return
        connection.execute("BEGIN")
        try:
            for statement in self._statements(new):
                connection.execute(statement)
        except duckdb.Error:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
        self._missing -= new

    def replaced(self, names: Iterable[str]) -> None:
        """Something else stands in the place of these from now on."""
        self._missing -= set(names)

    def _there(self) -> frozenset[str]:
        return frozenset({*self._sources, *queries.VIEWS} - self._missing)

    def _statements(self, new: Collection[str]) -> Iterable[str]:
        yield from (f"CREATE VIEW {name} AS {self._sources[name]}" for name in self._sources if name in new)
        views = [name for name in queries.VIEWS if name in new]
        read = {relation for name in views for relation in queries.reads(name)}
        base = {name for name in views if not queries.reads(name) & set(queries.VIEWS)}
        for name in views:
            if name in base:
                yield _create(name, queries.view(name).sql)
            elif name in read:
                yield _create(name, sqltext.empty([(c.name, c.type) for c in queries.view(name).columns]))
        for name in reversed(views):
            if name not in base:
                yield _create(name, queries.view(name).sql)


def _create(view: str, sql: str) -> str:
    return f"CREATE OR REPLACE VIEW main.{sqltext.name(view)} AS {sql}"
