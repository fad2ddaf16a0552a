"""SQLite's pages decoded with numpy: equal to what SQLite itself reads, or left to it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanalyze.importers import sqlite_pages
from nanalyze.importers.sqlite_pages import NotPlain

COLUMNS = ("a", "b", "c")
# Every width that SQLite stores, and its edges: 0, 1, 1 byte, 2, 3, 4, 6 and 8 bytes.
EDGES = [sign * (2**bits + step) for bits in (0, 7, 15, 23, 31, 47) for step in (-1, 0, 1) for sign in (1, -1)]
INTEGERS = st.one_of(st.sampled_from([*EDGES, -(2**63), 2**63 - 1]), st.integers(-(2**63), 2**63 - 1))


_opened: list[sqlite3.Connection] = []


def connect(path: Path) -> sqlite3.Connection:
    """A connection that is closed at the end of the test."""
    _opened.append(sqlite3.connect(path))
    return _opened[-1]


@pytest.fixture(autouse=True)
def _close_connections() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


def written(
    path: Path, rows: list[tuple[Any, ...]], page_size: int = 4096, declared: str = "a, b, c"
) -> sqlite3.Connection:
    path.unlink(missing_ok=True)
    connection = connect(path)
    connection.execute(f"PRAGMA page_size = {page_size}")
    connection.execute(f"CREATE TABLE t ({declared})")
    marks = ", ".join("?" * len(declared.split(",")))
    connection.executemany(f"INSERT INTO t VALUES ({marks})", rows)
    connection.commit()
    return connection


def decoded(path: Path, connection: sqlite3.Connection, columns: tuple[str, ...] = COLUMNS) -> list[list[Any]]:
    layout = sqlite_pages.layout(connection, "t")
    pages = sqlite_pages.Pages(path)
    wanted = [layout.columns.index(name) for name in columns]
    parts = [pages.rows(numbers, len(layout.columns), wanted) for numbers in pages.chunks(layout.root)]
    return [[value for part in parts for value in np.ma.asarray(part[at]).tolist()] for at in range(len(columns))]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(INTEGERS, st.one_of(st.none(), INTEGERS), st.integers(0, 1)), min_size=1, max_size=60),
    st.sampled_from([512, 4096, 65536]),
)
def test_integers_of_every_width_and_null(tmp_path: Path, rows: list[tuple[Any, ...]], page_size: int) -> None:
    path = tmp_path / "f.sqlite"
    connection = written(path, rows, page_size)
    assert decoded(path, connection) == [list(column) for column in zip(*rows, strict=True)]
    connection.close()


def test_many_pages_in_order_after_deletions(tmp_path: Path) -> None:
    path = tmp_path / "f.sqlite"
    connection = written(path, [(i, i * i, -i) for i in range(20_000)], 512)
    connection.execute("DELETE FROM t WHERE a % 7 = 3")
    connection.execute("INSERT INTO t VALUES (-1, -2, -3)")
    connection.commit()
    wanted = connection.execute("SELECT a, b, c FROM t ORDER BY rowid").fetchall()
    assert decoded(path, connection) == [list(column) for column in zip(*wanted, strict=True)]


def test_floats_text_and_bytes(tmp_path: Path) -> None:
    """A column that holds a float comes as floats; text and bytes are missing."""
    path = tmp_path / "f.sqlite"
    connection = written(path, [(1, 0.5, "text"), (2, 7, b"bytes"), (3, None, 9)])
    a, b, c = decoded(path, connection)
    assert (a, c) == ([1, 2, 3], [None, None, 9])
    assert b[:2] == [0.5, 7.0]
    assert np.isnan(b[2])


def test_text_beside_the_wanted_columns_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "f.sqlite"
    connection = written(path, [("x" * (i % 50), i, i + 1) for i in range(500)])
    assert decoded(path, connection, ("b", "c")) == [list(range(500)), list(range(1, 501))]


def test_an_empty_table_has_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "f.sqlite"
    assert decoded(path, written(path, [])) == [[], [], []]


@pytest.mark.parametrize(
    "table",
    [
        "t (a INTEGER PRIMARY KEY, b, c)",
        "t (a, b, c GENERATED ALWAYS AS (a + b) VIRTUAL)",
        "t (a PRIMARY KEY, b, c) WITHOUT ROWID",
    ],
)
def test_tables_whose_records_are_not_their_columns_are_left_to_sqlite(tmp_path: Path, table: str) -> None:
    connection = connect(tmp_path / "f.sqlite")
    connection.execute(f"CREATE TABLE {table}")
    with pytest.raises(NotPlain):
        sqlite_pages.layout(connection, "t")


@pytest.mark.parametrize("text", ["x" * 100, "x" * 5_000])
def test_rows_with_long_values_are_left_to_sqlite(tmp_path: Path, text: str) -> None:
    path = tmp_path / "f.sqlite"
    connection = written(path, [(1, 2, text)])
    with pytest.raises(NotPlain):
        decoded(path, connection)


def test_columns_added_later_are_left_to_sqlite(tmp_path: Path) -> None:
    path = tmp_path / "f.sqlite"
    connection = written(path, [(1, 2, 3)])
    connection.execute("ALTER TABLE t ADD COLUMN d DEFAULT 5")
    connection.commit()
    with pytest.raises(NotPlain):
        decoded(path, connection)


def test_pages_that_point_at_each_other_end(tmp_path: Path) -> None:
    """The root's children all become the root itself."""
    path = tmp_path / "f.sqlite"
    connection = written(path, [(i, i, i) for i in range(5_000)], 512)
    root = sqlite_pages.layout(connection, "t").root
    content = bytearray(path.read_bytes())
    base = (root - 1) * 512
    assert content[base] == sqlite_pages.INTERIOR
    content[base + 8 : base + 12] = root.to_bytes(4, "big")
    path.write_bytes(content)
    with pytest.raises(NotPlain):
        decoded(path, connection)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_never_gives_more_than_not_plain(tmp_path: Path, data: st.DataObject) -> None:
    good = tmp_path / "good.sqlite"
    if not good.exists():
        written(good, [(i, i * i, None) for i in range(400)], 512).close()
    content = bytearray(good.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.sqlite"
    path.write_bytes(content[: data.draw(st.integers(100, len(content)))])
    try:
        pages = sqlite_pages.Pages(path)
        rows = sum(len(pages.rows(numbers, 3, [0, 1, 2])[0]) for numbers in pages.chunks(2))
    except NotPlain:
        return
    assert rows <= len(content)


def test_distinct_numbers_combinations_and_names_a_row_of_each() -> None:
    columns = [np.array([1, 1, 2, 1]), np.array([5, 6, 5, 5])]
    of_row, first = sqlite_pages.distinct(columns)
    assert of_row.tolist() == [0, 1, 2, 0]
    assert first.tolist() == [0, 1, 2]


def test_distinct_survives_combinations_that_share_a_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every hash the same, rows are told apart by sorting."""
    columns = [np.array([3, 1, 3, 2])]
    monkeypatch.setattr(sqlite_pages, "_mixed", lambda columns: np.zeros(len(columns[0]), dtype=np.uint64))
    of_row, first = sqlite_pages.distinct(columns)
    assert [columns[0][first[number]] for number in of_row] == [3, 1, 3, 2]
