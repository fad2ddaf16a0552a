"""`nanalyze sql`: one SELECT over a run, from the command line, a file, a pipe or a prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from nanalyze.commands import _answer, _describe, _output, _shell
from nanalyze.commands._answer import Question
from nanalyze.commands._open import RunDirectory, check_engine, engine_options, open_run
from nanalyze.rundir.errors import QueryError

if TYPE_CHECKING:
    import nanalyze.analysis as na


def _list_queries(context: click.Context, parameter: click.Parameter, given: bool) -> None:
    if given and not context.resilient_parsing:
        click.echo(_describe.headers())
        context.exit()


@click.command("sql")
@click.argument("run_dir", type=RunDirectory())
@click.argument("query", required=False)
@click.option("-f", "--file", type=click.Path(path_type=Path), help="Read the query from this file.")
@click.option("--query", "shipped", metavar="NAME", help="Run this shipped query.")
@click.option(
    "--set", "assignments", metavar="NAME=VALUE", multiple=True, help="Value of a parameter of --query; repeatable."
)
@click.option(
    "--queries",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_queries,
    help="List the shipped queries with their parameters and exit.",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(_output.FORMATS),
    default="table",
    show_default=True,
    help="How to write the result.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write to this file instead of the terminal.")
@click.option("--force", is_flag=True, help="Overwrite the file of --output or --emit-views if it exists.")
@click.option(
    "--max-rows",
    type=click.IntRange(min=1),
    help=f"Stop after so many rows; {_shell.TABLE_ROWS} for table, markdown and vertical.",
)
@click.option("--allow-external", is_flag=True, help="Let the query read files outside the run directory.")
@click.option(
    "--emit-views",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write an SQL script that makes the run's views in any DuckDB, `-` to standard output, and exit.",
)
@click.option("--relative", is_flag=True, help="With --emit-views: paths relative to the script's folder.")
@engine_options
def sql(
    run_dir: Path,
    query: str | None,
    file: Path | None,
    shipped: str | None,
    assignments: tuple[str, ...],
    format_: str,
    output: Path | None,
    force: bool,
    max_rows: int | None,
    allow_external: bool,
    emit_views: Path | None,
    relative: bool,
    engine: str,
    master: str | None,
) -> None:
    """Run QUERY, one SELECT, on the run in RUN_DIR.

    Without QUERY it is read from standard input, or asked for if that is a terminal; `-` reads
    standard input in any case. `.tables`, `.schema` and `.queries` show what there is; `.schema VIEW`
    and `.queries NAME` say all about one. docs/sql.md answers common questions.

    \b
    Examples:
      nanalyze sql run_dir .tables
      nanalyze sql run_dir "SELECT kernel, share, bound FROM verdicts" --format csv
      nanalyze sql run_dir -f query.sql --format parquet -o result.parquet
      nanalyze sql run_dir --query top_kernels --set rows=5
      nanalyze sql run_dir --emit-views views.sql
      nanalyze sql s3://bucket/run --query top_kernels --engine spark --master spark://head:7077
    """
    check_engine(engine, master)
    if master is not None and (emit_views is not None or allow_external):
        raise click.UsageError("--emit-views and --allow-external are DuckDB's: leave out --engine.")
    _check(query, file, shipped, assignments, emit_views, relative)
    if format_ == "parquet" and output is None and sys.stdout.isatty():
        raise click.UsageError("Parquet is not for terminals: give -o FILE.")
    if emit_views is not None:
        _emit(run_dir, emit_views, force, relative)
        return
    # Wrong names are told before a run is opened, which may take long.
    question = _answer.shipped(shipped, assignments) if shipped is not None else None
    text = None if question is not None else _query_text(query, file)
    if question is None and text is None and (output is not None or format_ not in _shell.MODES):
        raise click.UsageError("Give a query for --output; at the prompt `.save FILE` writes the last result.")
    with open_run(run_dir, allow_external=allow_external, engine=engine, master=master) as run:
        if question is None and text is None:
            _shell.Shell(run, max_rows, format_).loop()
            return
        with _answer.sink(output, force) as sink:
            _write(run, question or text or "", format_, sink, max_rows)


def _check(
    query: str | None,
    file: Path | None,
    shipped: str | None,
    assignments: tuple[str, ...],
    emit_views: Path | None,
    relative: bool,
) -> None:
    given = [
        name
        for name, value in (("QUERY", query), ("--file", file), ("--query", shipped), ("--emit-views", emit_views))
        if value is not None
    ]
    if len(given) > 1:
        raise click.UsageError(f"Give {given[0]} or {given[1]}, not both.")
    if assignments and shipped is None:
        raise click.UsageError("--set gives parameters to a shipped query: name it with --query.")
    if relative and emit_views is None:
        raise click.UsageError("--relative is for --emit-views: give both.")


def _emit(run_dir: Path, output: Path, force: bool, relative: bool) -> None:
    to_terminal = str(output) == "-"
    base = Path() if to_terminal else output.parent
    with open_run(run_dir) as run, _answer.sink(None if to_terminal else output, force) as sink:
        sink.write(run.view_script(base if relative else None).encode("utf-8", "surrogateescape"))


def _query_text(query: str | None, file: Path | None) -> str | None:
    """The query, or None to ask for it at a prompt."""
    if file is not None:
        try:
            return _decoded(file.read_bytes(), str(file))
        except OSError as error:
            raise QueryError(f"{file}: cannot be read: {error.strerror}.") from error
    if query == "-" or (query is None and not _shell.is_possible()):
        return _decoded(sys.stdin.buffer.read(), "standard input")
    return query


def _decoded(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise QueryError(f"{source}: is not UTF-8 text. Give one SELECT statement.") from None


def _write(run: na.Run, asked: Question | str, format_: str, sink: IO[bytes], max_rows: int | None) -> None:
    """Write the result of a question, or of what was given as text: SQL or a dot command."""
    if isinstance(asked, str):
        command = _shell.dot_command(asked)
        if command is not None and command[0] not in (".query", ".run"):
            sink.write((_shell.listing(*command) + "\n").encode("utf-8"))
            return
        asked = Question(asked) if command is None else _named(command[1])
    if max_rows is None and format_ in _output.FOR_PEOPLE:
        max_rows = _shell.TABLE_ROWS
    if _answer.write(run, asked, format_, sink, max_rows):
        click.echo(f"Only the first {max_rows} rows are shown: --max-rows or --format csv gives more.", err=True)


def _named(argument: str) -> Question:
    name, *assignments = _answer.words(argument) or [""]
    return _answer.shipped(name, assignments)
