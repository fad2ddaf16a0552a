"""What the Tab key offers at the prompt: dot commands, views, columns, queries, parameters, SQL's words."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from nanalyze import queries
from nanalyze.commands import _describe

KEYWORDS = (
    "SELECT", "FROM", "WHERE", "GROUP BY", "ORDER BY", "LIMIT", "JOIN", "LEFT JOIN", "USING", "HAVING", "DISTINCT",
    "WITH", "UNION ALL", "CASE", "WHEN", "THEN", "ELSE", "END", "AND", "NOT", "NULL", "BETWEEN", "LIKE", "DESC",
    "NULLS LAST", "OVER", "PARTITION BY", "DESCRIBE", "SUMMARIZE", "EXPLAIN ANALYZE", "count", "sum", "avg", "min",
    "max", "quantile_cont", "median", "arg_max",
)  # fmt: skip

# Words end at these; a dot belongs to its word, for `.tables` and `k.duration_ns`.
DELIMITERS = " \t\n,;()=<>+-*/%|'\""


class Completer:
    """Candidates for the word that is being typed.

    commands: the dot commands, each with what its first argument may be.
    columns: names of the columns of a view.
    before: the lines of the statement that are already entered.
    """

    def __init__(
        self, commands: Mapping[str, Sequence[str]], columns: Callable[[str], Sequence[str]], before: Callable[[], str]
    ) -> None:
        self._commands = commands
        self._columns = columns
        self._before = before
        self._found: list[str] = []

    def __call__(self, word: str, state: int) -> str | None:
        """The candidate number `state`, as readline asks for them."""
        import readline

        if state == 0:
            line = readline.get_line_buffer()[: readline.get_begidx()]
            self._found = self.candidates(line, word)
            is_command = f"{line}{word}".lstrip().startswith(".")
            if is_command and len(self._found) == 1 and not self._found[0].endswith("="):
                self._found[0] += " "
        return self._found[state] if state < len(self._found) else None

    def candidates(self, line: str, word: str) -> list[str]:
        """What may stand in place of `word` after `line`, the part of the line in front of it."""
        before = self._before()
        if not before and not line.strip() and word.startswith("."):
            return _starting(self._commands, word)
        if not before and line.lstrip().startswith("."):
            return _starting(self._arguments(line.split()), word)
        return self._sql(f"{before}\n{line}", word)

    def _arguments(self, typed: list[str]) -> Sequence[str]:
        if len(typed) == 1:
            return self._commands.get(typed[0], ())
        if typed[0] in (".query", ".run") and typed[1] in queries.query_names():
            return [f"{parameter.name}=" for parameter in queries.query(typed[1]).parameters]
        return ()

    def _sql(self, text: str, word: str) -> list[str]:
        qualifier, dot, _ = word.rpartition(".")
        named = [view for view in _describe.public_views() if re.search(rf"\b{view}\b", text)]
        columns = {column for view in named or _describe.public_views() for column in self._columns(view)}
        if dot and not qualifier:
            return []
        if dot:
            return _starting([f"{qualifier}.{column}" for column in columns], word)
        return _starting({*columns, *_describe.public_views(), *_as_typed(word)}, word)


def _as_typed(word: str) -> list[str]:
    """SQL's words in the case of what was typed of them."""
    return [keyword.lower() if word.islower() else keyword for keyword in KEYWORDS]


def _starting(names: Sequence[str] | Mapping[str, object] | set[str], word: str) -> list[str]:
    return sorted(name for name in names if name.startswith(word))
