"""The prompt of `nanalyze sql`: statements and dot commands at a terminal, one after another."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nanalyze import queries
from nanalyze.commands import _answer, _describe, _history, _pager, one_line
from nanalyze.commands._answer import Question
from nanalyze.commands._complete import Completer
from nanalyze.rundir.errors import NanalyzeError, QueryError

if TYPE_CHECKING:
    import nanalyze.analysis as na

TABLE_ROWS = 1000  # a table is for reading; the machine formats have no limit of their own
MODES = ("table", "csv", "json", "markdown", "vertical")
ENDINGS = {".csv": "csv", ".json": "json", ".parquet": "parquet"}

HELP = """\
.tables                   list the views
.schema [VIEW]            columns of a view, or of all, with type, unit and meaning
.queries [QUERY]          list the shipped queries with their parameters, or all about one
.query QUERY [NAME=VALUE ...]
                          run a shipped query
.mode [MODE]              how results are written: table, csv, json, markdown or vertical
.timing [on|off]          say how long each query took
.save FILE                write all rows of the last result to FILE, by its ending .csv, .json or .parquet
.help                     this
.quit                     leave (as does Ctrl-D)
Anything else is SQL: one SELECT, ended by a semicolon. Ctrl-C stops it. Tab completes names.
Results longer than the terminal go through $PAGER."""


def dot_command(text: str) -> tuple[str, str] | None:
    """Name and argument of a dot command; None for anything else."""
    stripped = text.strip().rstrip(";").strip()
    if not stripped.startswith("."):
        return None
    name, *rest = stripped.split(maxsplit=1)
    return name, rest[0] if rest else ""


def listing(command: str, argument: str) -> str:
    """What a dot command that only shows something shows. QueryError for an unknown one."""
    shows: dict[str, Callable[[str], str]] = {
        ".tables": lambda _: _describe.tables(),
        ".queries": _describe.shipped,
        ".schema": _describe.schema,
        ".help": lambda _: HELP,
    }
    if command not in shows:
        near = queries.nearest(command, COMMANDS)
        nearest = f"Nearest: {', '.join(near)}. " if near else ""
        only = "is for the prompt" if command in COMMANDS else "no such command"
        raise QueryError(f"{command}: {only}. {'' if command in COMMANDS else nearest}`.help` lists them.")
    return shows[command](argument)


COMMANDS = (
    ".tables", ".schema", ".queries", ".query", ".run", ".mode", ".timing", ".save", ".help", ".quit", ".exit",
)  # fmt: skip


@dataclass
class Shell:
    """Reads until the end of input; an error or Ctrl-C ends the statement, not the prompt."""

    run: na.Run
    max_rows: int | None = None
    mode: str = "table"
    timing: bool = False
    last: Question | None = None
    lines: list[str] = field(default_factory=list)  # of the statement that is being typed

    def loop(self) -> None:
        """Ask, answer, ask again."""
        click.echo(f"{self.run.path}: `.tables` lists the views, `.help` the commands, `.quit` leaves.", err=True)
        with _history.line_editing(self.completer()):
            while self._turn():
                pass

    def completer(self) -> Completer:
        """What Tab offers in this shell."""
        arguments = {
            **dict.fromkeys(COMMANDS, ()),
            ".schema": _describe.public_views(), ".queries": queries.query_names(), ".query": queries.query_names(),
            ".run": queries.query_names(), ".mode": MODES, ".timing": ("on", "off"),
        }  # fmt: skip
        columns = cache(lambda view: _columns(self.run, view))
        return Completer(arguments, columns, lambda: "\n".join(self.lines))

    def _turn(self) -> bool:
        """One statement; whether to go on."""
        try:
            text = self._read()
            if text is None or (dot_command(text) or ("", ""))[0] in (".quit", ".exit"):
                return False
            if text.strip(" \t;"):
                self.answer(text)
        except KeyboardInterrupt:
            click.echo("", err=True)
        except NanalyzeError as error:
            click.echo(f"nanalyze: error: {one_line(error)}", err=True)
        return True

    def _read(self) -> str | None:
        """Lines up to a semicolon, or one dot command; None at the end of input."""
        self.lines.clear()
        try:
            while True:
                self.lines.append(_asked("    ...> " if self.lines else "nanalyze> "))
                text = "\n".join(self.lines).strip()
                if not text or text.startswith(".") or text.endswith(";"):
                    return text
        except EOFError:
            click.echo("", err=True)
            return None
        finally:
            self.lines.clear()

    def answer(self, text: str) -> None:
        """Answer one statement or dot command. Raises NanalyzeError."""
        command = dot_command(text)
        if command is None:
            self._ask(Question(text))
            return
        name, argument = command
        own: dict[str, Callable[[list[str]], None]] = {
            ".query": self._query, ".run": self._query, ".mode": self._mode, ".timing": self._timing,
            ".save": self._save,
        }  # fmt: skip
        if name in own:
            own[name](_answer.words(argument))
        else:
            _pager.show((listing(name, argument) + "\n").encode("utf-8", "backslashreplace"))

    def _query(self, words: list[str]) -> None:
        if not words:
            raise QueryError(".query: which one? `.queries` lists them.")
        self._ask(_answer.shipped(words[0], words[1:]))

    def _ask(self, question: Question) -> None:
        """Run it and show the first rows; remember it for `.save` once it went through."""
        rows = self.max_rows or TABLE_ROWS
        shown = io.BytesIO()
        started = time.perf_counter()
        was_cut = _answer.write(self.run, question, self.mode, shown, rows)
        took_s = time.perf_counter() - started
        self.last = question
        _pager.show(shown.getvalue())
        if was_cut:
            click.echo(f"Only the first {rows} rows are shown: `.save FILE` writes all.", err=True)
        if self.timing:
            click.echo(f"{took_s:.3f} s", err=True)

    def _mode(self, words: list[str]) -> None:
        if not words:
            click.echo(self.mode)
            return
        if words[0] not in MODES or len(words) > 1:
            raise QueryError(f".mode {' '.join(words)}: no such mode. Give one of {', '.join(MODES)}.")
        self.mode = words[0]

    def _timing(self, words: list[str]) -> None:
        if words not in ([], ["on"], ["off"]):
            raise QueryError(f".timing {' '.join(words)}: give on or off.")
        self.timing = words == ["on"] if words else self.timing
        if not words:
            click.echo("on" if self.timing else "off")

    def _save(self, words: list[str]) -> None:
        """The last query runs again, so that a result larger than memory can be written too."""
        if len(words) != 1:
            raise QueryError(".save: give one file, in quotes if its name holds spaces.")
        file = Path(words[0]).expanduser()
        if file.suffix.lower() not in ENDINGS:
            raise QueryError(f"{file}: the ending says the format. Give one of {', '.join(ENDINGS)}.")
        if self.last is None:
            raise QueryError(f"{file}: there is no result yet. Run a query first.")
        with _answer.sink(file, force=False, remedy="Give another name.") as sink:
            _answer.write(self.run, self.last, ENDINGS[file.suffix.lower()], sink, None)
        click.echo(f"{file}: written.", err=True)


def _asked(prompt: str) -> str:
    """A line from the terminal. Where results go elsewhere the prompt must not go with them."""
    if sys.stdout.isatty():
        return input(prompt)
    click.echo(prompt, nl=False, err=True)
    return input()


def _columns(run: na.Run, view: str) -> tuple[str, ...]:
    """Columns of a view; those of samples differ from run to run."""
    if view != "samples":
        return tuple(column.name for column in queries.view(view).columns)
    try:
        return tuple(run.arrow("SELECT * FROM samples LIMIT 0").column_names)
    except NanalyzeError:
        return ()


def is_possible() -> bool:
    """Whether there is someone to ask: standard input is a terminal."""
    return sys.stdin.isatty()
