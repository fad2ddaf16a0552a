"""Ranges: nesting, threads, tasks, decorators, and that they cost a job nothing it can notice."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nanalyze.recorder import annotate, ranges
from nanalyze.rundir.schema import TABLES


@pytest.fixture
def log() -> Iterator[ranges.RangeLog]:
    log = ranges.RangeLog()
    ranges.set_log(log)
    yield log
    ranges.set_log(None)


def by_name(log: ranges.RangeLog, **options: Any) -> dict[str, dict[str, Any]]:
    rows = log.take(**options)
    assert len({row["name"] for row in rows}) == len(rows)
    return {row["name"]: row for row in rows}


def test_a_range_is_a_row_of_the_table(log: ranges.RangeLog) -> None:
    before = time.time_ns()
    with annotate("step", flops=1e12, bytes=4096, epoch=3, shape=(2, 3), path=object) as entered:
        assert entered.name == "step"
    after = time.time_ns()
    (row,) = log.take()
    assert set(row) == set(TABLES["ranges"].column_names)
    assert before <= row.pop("start_ns") <= row.pop("end_ns") <= after
    assert json.loads(row.pop("attributes")) == {"epoch": 3, "shape": [2, 3], "path": "<class 'object'>"}
    assert row == {
        "range_id": 1,
        "parent_id": None,
        "depth": 0,
        "name": "step",
        "source": "annotate",
        "thread_id": threading.get_native_id(),
        "flops": 1e12,
        "bytes": 4096.0,
    }
    assert log.take() == []


def test_what_was_not_given_is_missing(log: ranges.RangeLog) -> None:
    with annotate("bare"):
        pass
    (row,) = log.take()
    assert (row["flops"], row["bytes"], row["attributes"]) == (None, None, None)


def test_ranges_nest(log: ranges.RangeLog) -> None:
    with annotate("outer"):
        with annotate("first"), annotate("inner"):
            pass
        with annotate("second"):
            pass
    assert ranges._current.get() is None  # nothing holds on to the ranges of a long job
    rows = by_name(log)
    outer, first = rows["outer"]["range_id"], rows["first"]["range_id"]
    assert {name: (row["parent_id"], row["depth"]) for name, row in rows.items()} == {
        "inner": (first, 2),
        "first": (outer, 1),
        "second": (outer, 1),
        "outer": (None, 0),
    }
    assert rows["outer"]["start_ns"] <= rows["inner"]["start_ns"] <= rows["inner"]["end_ns"] <= rows["outer"]["end_ns"]


def test_the_same_object_can_be_entered_again_and_within_itself(log: ranges.RangeLog) -> None:
    step = annotate("step")
    with step, step:
        pass
    with step:
        pass
    assert [(row["range_id"], row["parent_id"], row["depth"]) for row in log.take()] == [
        (2, 1, 1),
        (1, None, 0),
        (3, None, 0),
    ]


def test_an_exception_closes_the_range_and_passes_through(log: ranges.RangeLog) -> None:
    with pytest.raises(ZeroDivisionError), annotate("broken"):
        raise ZeroDivisionError
    (row,) = log.take()
    assert row["end_ns"] is not None
    with annotate("next"):
        pass
    assert log.take()[0]["parent_id"] is None


def test_open_ranges_are_taken_only_at_the_end(log: ranges.RangeLog) -> None:
    with annotate("open"):
        with annotate("closed"):
            pass
        assert list(by_name(log)) == ["closed"]
        rows = by_name(log, also_open=True)
        assert rows["open"]["end_ns"] is None
    assert log.take(also_open=True) == []


def test_threads_have_ranges_of_their_own(log: ranges.RangeLog) -> None:
    threads = 8
    ready = threading.Barrier(threads)

    def work(number: int) -> None:
        with annotate(f"outer {number}"):
            ready.wait(10)
            for step in range(50):
                with annotate(f"inner {number} {step}"):
                    pass
            ready.wait(10)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    rows = by_name(log)
    assert len(rows) == threads * 51
    assert len({row["range_id"] for row in rows.values()}) == threads * 51
    outer = {name: row for name, row in rows.items() if name.startswith("outer")}
    assert {row["parent_id"] for row in outer.values()} == {None}
    assert len({row["thread_id"] for row in outer.values()}) == threads
    for name, row in rows.items():
        if name.startswith("inner"):
            parent = outer[f"outer {name.split()[1]}"]
            assert (row["parent_id"], row["depth"], row["thread_id"]) == (parent["range_id"], 1, parent["thread_id"])


def test_one_object_shared_by_threads_gives_each_its_own_range(log: ranges.RangeLog) -> None:
    shared = annotate("shared")
    turns = [threading.Event() for _ in range(3)]
    found: list[BaseException] = []

    def first() -> None:
        try:
            with shared:
                turns[0].set()
                turns[1].wait(10)
            turns[2].set()
        except BaseException as error:
            found.append(error)

    def second() -> None:
        try:
            turns[0].wait(10)
            with shared:
                turns[1].set()
                turns[2].wait(10)
        except BaseException as error:
            found.append(error)

    workers = [threading.Thread(target=target) for target in (first, second)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == []
    rows = log.take(also_open=True)
    assert len(rows) == 2
    assert len({row["thread_id"] for row in rows}) == 2
    assert all(row["end_ns"] is not None for row in rows)


def test_tasks_have_ranges_of_their_own(log: ranges.RangeLog) -> None:
    async def work(number: int) -> None:
        with annotate(f"outer {number}"):
            await asyncio.sleep(0)
            with annotate(f"inner {number}"):
                await asyncio.sleep(0)

    async def several() -> None:
        with annotate("all"):
            await asyncio.gather(*(work(number) for number in range(5)))

    asyncio.run(several())
    rows = by_name(log)
    assert len(rows) == 11
    for number in range(5):
        assert rows[f"outer {number}"]["parent_id"] == rows["all"]["range_id"]
        assert rows[f"inner {number}"]["parent_id"] == rows[f"outer {number}"]["range_id"]
        assert rows[f"inner {number}"]["depth"] == 2


def test_a_function_is_annotated_at_each_call(log: ranges.RangeLog) -> None:
    @annotate("square", flops=1, kind="test")
    def square(x: int, *, times: int = 1) -> int:
        """The square."""
        return square(x, times=times - 1) if times > 1 else x * x

    assert square(7, times=3) == 49
    assert (square.__name__, square.__doc__) == ("square", "The square.")
    rows = log.take()
    assert [(row["name"], row["depth"], row["flops"]) for row in rows] == [
        ("square", depth, 1.0) for depth in (2, 1, 0)
    ]
    assert {row["attributes"] for row in rows} == {'{"kind": "test"}'}


def test_a_coroutine_function_is_annotated_while_it_runs(log: ranges.RangeLog) -> None:
    @annotate("fetch")
    async def fetch() -> int:
        await asyncio.sleep(0.02)
        return 5

    assert inspect.iscoroutinefunction(fetch)
    assert asyncio.run(fetch()) == 5
    (row,) = log.take()
    assert row["end_ns"] - row["start_ns"] >= 15_000_000


def test_without_a_recording_nothing_is_kept(log: ranges.RangeLog) -> None:
    ranges.set_log(None)

    @annotate("function")
    def function() -> int:
        return 3

    with annotate("outer"):
        assert function() == 3
    assert log.take(also_open=True) == []


def test_a_range_opened_before_the_recording_is_no_parent(log: ranges.RangeLog) -> None:
    ranges.set_log(None)
    with annotate("before"):
        ranges.set_log(log)
        with annotate("within"):
            pass
    rows = by_name(log)
    assert list(rows) == ["within"]
    assert (rows["within"]["parent_id"], rows["within"]["depth"]) == (None, 0)


def test_a_range_that_outlives_its_recording_is_no_parent_in_the_next(log: ranges.RangeLog) -> None:
    following = ranges.RangeLog()
    with annotate("first run"):
        log.take(also_open=True)
        ranges.set_log(following)
        with annotate("second run"):
            pass
    (row,) = following.take(also_open=True)
    assert (row["name"], row["parent_id"], row["depth"]) == ("second run", None, 0)
    assert log.take(also_open=True) == []


def test_leaving_in_another_context_does_not_reach_the_job(log: ranges.RangeLog) -> None:
    """As when the event loop closes an asynchronous generator."""
    entered = annotate("elsewhere")
    with annotate("here"):
        context = contextvars.copy_context()
        context.run(entered.__enter__)
        entered.__exit__(None, None, None)
        with annotate("within"):
            pass
        context.run(annotate("later").__enter__)
    rows = by_name(log, also_open=True)
    here = rows["here"]["range_id"]
    assert {name: row["parent_id"] for name, row in rows.items()} == {
        "here": None,
        "elsewhere": here,
        "within": here,
        "later": here,
    }
    assert rows["elsewhere"]["end_ns"] is not None


def test_hostile_names_and_attributes(log: ranges.RangeLog) -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise RuntimeError("no text")

        __repr__ = __str__

    loop: list[Any] = []
    loop.append(loop)
    hostile = "a\nb'; DROP TABLE ranges; --\udcff"
    with annotate(hostile, loop=loop, good=1), annotate("second", value=Unprintable()):
        pass
    with annotate("third", **{"key with space": float("nan"), "keys": {(1, 2): 3}}):
        pass
    attributes = {name: json.loads(row["attributes"]) for name, row in by_name(log).items()}
    assert attributes == {
        hostile: {"loop": "[[...]]", "good": "1"},
        "second": {"value": "<Unprintable>"},
        "third": {"key with space": "nan", "keys": "{(1, 2): 3}"},
    }


@pytest.mark.parametrize("number", ["many", object()])
def test_what_is_not_a_number_is_refused_where_it_is_written(number: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        annotate("step", flops=number)
