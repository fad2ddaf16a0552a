"""`nanalyze sql`: one SELECT over a run, from the command line, a file, a pipe or a prompt."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from nanalyze import queries
from nanalyze.commands import _output, one_line
from nanalyze.commands._open import open_run
from nanalyze.rundir.errors import NanalyzeError, QueryError

if TYPE_CHECKING:
    import nanalyze.analysis as na

TABLE_ROWS = 1000  # a table is for reading; the machine formats have no limit of their own

HELP = """\
.tables          list the views
.schema [VIEW]   columns of a view, or of all, with type, unit and meaning
.queries         list the shipped queries
.run QUERY       run a shipped query
.help            this
.quit            leave (as does Ctrl-D)
Anything else is SQL: one SELECT, ended by a semicolon. Ctrl-C stops it."""


@click.command("sql")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("query", required=False)
@click.option("-f", "--file", type=click.Path(path_type=Path), help="Read the query from this file.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(_output.FORMATS),
    default="table",
    show_default=True,
    help="How to write the result.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write to this file instead of the terminal.")
@click.option("--force", is_flag=True, help="Overwrite the output file if it exists.")
@click.option("--max-rows", type=click.IntRange(min=1), help=f"Stop after so many rows; {TABLE_ROWS} for a table.")
@click.option("--allow-external", is_flag=True, help="Let the query read files outside the run directory.")
def sql(
    run_dir: Path,
    query: str | None,
    file: Path | None,
    format_: str,
    output: Path | None,
    force: bool,
    max_rows: int | None,
    allow_external: bool,
) -> None:
    """Run QUERY, one SELECT, on the run in RUN_DIR.

    Without QUERY it is read from standard input, or asked for if that is a terminal; `-` reads
    standard input in any case. `.tables`, `.schema` and `.queries` show what there is.

    \b
    Examples:
      nanalyze sql run_dir .tables
      nanalyze sql run_dir "SELECT kernel, share, bound FROM verdicts" --format csv
      nanalyze sql run_dir -f query.sql --format parquet -o result.parquet
    """
    if query is not None and file is not None:
        raise click.UsageError("Give QUERY or --file, not both.")
    if format_ == "parquet" and output is None and sys.stdout.isatty():
        raise click.UsageError("Parquet is not for terminals: give -o FILE.")
    text = _query_text(query, file)
    with open_run(run_dir, allow_external=allow_external) as run:
        if text is None:
            Prompt(run, max_rows).loop()
            return
        with _sink(output, force) as sink:
            _answer(run, text, format_, sink, max_rows)


def _query_text(query: str | None, file: Path | None) -> str | None:
    """The query, or None to ask for it at a prompt."""
    if file is not None:
        try:
            return _decoded(file.read_bytes(), str(file))
        except OSError as error:
            raise QueryError(f"{file}: cannot be read: {error.strerror}.") from error
    if query == "-" or (query is None and not sys.stdin.isatty()):
        return _decoded(sys.stdin.buffer.read(), "standard input")
    return query


def _decoded(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise QueryError(f"{source}: is not UTF-8 text. Give one SELECT statement.") from None


@contextmanager
def _sink(output: Path | None, force: bool) -> Iterator[IO[bytes]]:
    """Standard output, or a file that appears under its name only when it is complete."""
    if output is None:
        yield sys.stdout.buffer
        return
    if output.exists() and not force:
        raise NanalyzeError(f"{output}: exists. Use --force to overwrite it.")
    unfinished = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        with open(unfinished, "wb") as file:
            yield file
        os.replace(unfinished, output)
    except OSError as error:
        raise NanalyzeError(f"{output}: cannot be written: {error.strerror or error}.") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _answer(run: na.Run, text: str, format_: str, sink: IO[bytes], max_rows: int | None) -> None:
    """Write the result of an SQL statement or of a dot command."""
    command = _dot_command(text)
    if command is not None:
        sink.write((dot_output(*command) + "\n").encode("utf-8"))
        return
    if max_rows is None and format_ == "table":
        max_rows = TABLE_ROWS
    was_cut = _interruptible(run, lambda: _output.write(run.batches(text), format_, sink, max_rows))
    if was_cut:
        click.echo(f"Only the first {max_rows} rows are shown: --max-rows or --format csv gives more.", err=True)


def _interruptible(run: na.Run, work: Callable[[], bool]) -> bool:
    """The result of `work`; Ctrl-C stops the query it reads.

    The work has a thread of its own because Python handles Ctrl-C between instructions of the
    main one, which would otherwise sit in DuckDB until the query is done.
    """
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        try:
            while not wait([future], timeout=0.1).done:
                pass
        except KeyboardInterrupt:
            run.interrupt()
            raise
        return future.result()


def _dot_command(text: str) -> tuple[str, str] | None:
    stripped = text.strip().rstrip(";").strip()
    if not stripped.startswith("."):
        return None
    name, _, argument = stripped.partition(" ")
    return name, argument.strip()


# --- what there is -----------------------------------------------------------------------------


def dot_output(command: str, argument: str) -> str:
    """What a dot command shows; QueryError for one that does not exist."""
    if command == ".tables":
        return _listing([(name, queries.view(name).summary) for name in _public_views()])
    if command == ".queries":
        return _listing([(name, queries.query(name).summary) for name in queries.query_names()])
    if command == ".schema":
        return "\n\n".join(_schema(name) for name in ([argument] if argument else _public_views()))
    if command == ".help":
        return HELP
    raise QueryError(f"{command}: no such command. `.help` lists them.")


def _public_views() -> list[str]:
    return sorted(name for name in queries.VIEWS if not name.startswith("_"))


def _listing(entries: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in entries)
    return "\n".join(f"{name:<{width}}  {_sentence(name, summary)}" for name, summary in entries)


def _sentence(name: str, summary: str) -> str:
    """The first sentence of a header, without the name it opens with."""
    text = summary.removeprefix(f"{name}: ")
    for end in (". ", "? "):
        text = text.split(end)[0] + end.strip() if end in text else text
    return text


def _schema(name: str) -> str:
    if name not in queries.VIEWS:
        raise QueryError(f"{name}: no such view. `.tables` lists them.")
    view = queries.view(name)
    rows: list[tuple[object, ...]] = [(c.name, c.type, c.unit or "-", c.meaning) for c in view.columns]
    widths = [max(len(str(row[i])) for row in rows) for i in range(3)]
    lines = ["  ".join(f"{row[i]!s:<{widths[i]}}" for i in range(3)) + f"  {row[3]}" for row in rows]
    return "\n".join([view.summary, *(f"  {line}" for line in lines)])


# --- the prompt --------------------------------------------------------------------------------


class Prompt:
    """Reads statements at a terminal until the end; an error ends the statement, not the prompt."""

    def __init__(self, run: na.Run, max_rows: int | None) -> None:
        self._run = run
        self._max_rows = max_rows

    def loop(self) -> None:
        """Ask, answer, ask again."""
        _load_readline()
        click.echo(f"{self._run.path}: `.tables` lists the views, `.help` the commands, `.quit` leaves.")
        while True:
            try:
                text = _read_statement()
                if text is None or text in (".quit", ".exit"):
                    return
                self._answer(text)
            except KeyboardInterrupt:
                click.echo("")
            except NanalyzeError as error:
                click.echo(f"nanalyze: error: {one_line(error)}", err=True)

    def _answer(self, text: str) -> None:
        if not text:
            return
        command = _dot_command(text)
        if command is not None and command[0] == ".run":
            text = _shipped_sql(command[1])
        _answer(self._run, text, "table", sys.stdout.buffer, self._max_rows)
        sys.stdout.flush()


def _shipped_sql(name: str) -> str:
    if name not in queries.query_names():
        raise QueryError(f"{name or '.run'}: no such query. `.queries` lists them.")
    query = queries.query(name)
    text = query.sql
    for parameter in query.parameters:
        text = text.replace(f"${parameter.name}", parameter.default)
    return text


def _read_statement() -> str | None:
    """Lines up to a semicolon, or one dot command; None at the end of input."""
    lines: list[str] = []
    while True:
        try:
            line = input("    ...> " if lines else "nanalyze> ")
        except EOFError:
            click.echo("")
            return None
        lines.append(line)
        text = "\n".join(lines).strip()
        if not text or text.startswith(".") or text.endswith(";"):
            return text


def _load_readline() -> None:
    try:
        import readline  # noqa: F401 - gives input() line editing and history
    except ImportError:  # Windows has none
        return
