"""Runs one query for the command line or the prompt and writes what comes back."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from nanalyze import queries
from nanalyze.commands import _output
from nanalyze.rundir.errors import NanalyzeError, QueryError

if TYPE_CHECKING:
    import nanalyze.analysis as na


@dataclass(frozen=True)
class Question:
    """A statement with the values of its parameters."""

    sql: str
    values: Mapping[str, object] | None = None


def shipped(name: str, assignments: Sequence[str]) -> Question:
    """The shipped query `name` with parameters given as NAME=VALUE. Raises QueryError."""
    query = queries.find(name)
    given = dict(_assignment(name, text) for text in assignments)
    return Question(query.sql, queries.bind_text(query, given) or None)


def _assignment(query_name: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise QueryError(f"{query_name}: {text!r} is not NAME=VALUE. Give a parameter such as rows=20.")
    return name.strip(), value


def words(text: str) -> list[str]:
    """The words of a command line, quotes taken off; QueryError where one is not closed."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise QueryError(f"{text}: {str(error).lower()}. Close the quote, or escape it with a backslash.") from None


def write(run: na.Run, question: Question, format_: str, sink: IO[bytes], max_rows: int | None) -> bool:
    """Write the result; whether `max_rows` cut it short. Ctrl-C stops the query. Raises QueryError."""

    def work() -> bool:
        return _output.write(run.batches(question.sql, question.values), format_, sink, max_rows)

    return interruptible(run, work)


def interruptible(run: na.Run, work: Callable[[], bool]) -> bool:
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
            _stop(run, future)
            raise
        return future.result()


def _stop(run: na.Run, future: Future[bool]) -> None:
    """Interrupt again and again: what comes between two statements of the work stops neither."""
    while not future.done():
        with suppress(KeyboardInterrupt):  # an impatient second one
            run.interrupt()
            wait([future], timeout=0.1)


@contextmanager
def sink(output: Path | None, force: bool, remedy: str = "Use --force to overwrite it.") -> Iterator[IO[bytes]]:
    """Standard output, or a file that appears under its name only when it is complete."""
    if output is None:
        yield sys.stdout.buffer
        return
    if os.path.lexists(output) and not force:
        raise NanalyzeError(f"{output}: exists. {remedy}")
    unfinished = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        with open(unfinished, "wb") as file:
            yield file
        if not force and os.path.lexists(output):
            raise NanalyzeError(f"{output}: exists. {remedy}")
        os.replace(unfinished, output)
    except OSError as error:
        raise NanalyzeError(f"{output}: cannot be written: {error.strerror or error}.") from error
    finally:
        unfinished.unlink(missing_ok=True)
