"""Ctrl-C in the middle of a query: one word and no traceback."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import duckdb
import pytest
from click.testing import CliRunner

from nanalyze import commands
from nanalyze.commands import info

LONG = "SELECT sum(a.range * b.range % 7) FROM range(100000) a, range(1000000) b"


def test_a_query_of_duckdb_ends_as_the_command_expects() -> None:
    """Not as KeyboardInterrupt. Whatever version is installed: `commands` knows this message, or needs to know none.

    With one thread, since DuckDB hears of a signal between the tasks of the thread that asked, which has none when
    another one took the query's only task.
    """
    timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises((KeyboardInterrupt, RuntimeError)) as raised:
        duckdb.connect(config={"threads": 1}).execute(LONG).fetchall()
    timer.join()
    assert raised.type is KeyboardInterrupt or str(raised.value) == commands.DUCKDB_INTERRUPTED


def test_an_interrupted_query_is_no_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: Any) -> None:
        raise RuntimeError(commands.DUCKDB_INTERRUPTED)

    monkeypatch.setattr(info, "open_run", interrupted)
    done = CliRunner().invoke(commands.main, ["info", str(tmp_path)])
    assert (done.exit_code, done.output) == (1, "Aborted!\n")


def test_another_error_of_the_same_class_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(info, "open_run", broken)
    done = CliRunner().invoke(commands.main, ["info", str(tmp_path)])
    assert str(done.exception) == "a bug"
