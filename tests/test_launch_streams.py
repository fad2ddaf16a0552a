"""Gaps of streams and busy time of devices from one pass over the launches, against the SQL that says the same."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from trace import PROCESS, Trace
from typing import Any

import numpy as np
import pytest
from test_launch_scan import MS, build, split

import nanalyze.analysis as na
from nanalyze import queries
from nanalyze.analysis import launch_reader, launch_streams, made


def answers(run_dir: Path, buckets: int = 7) -> dict[str, Any]:
    """What the two queries and the view say."""
    with na.open(run_dir) as run:
        gaps = run.query("launch_gaps")
        use = run.query("timeline_utilisation", buckets=buckets)
        return {"gaps": gaps, "use": use, "streams": run.sql("SELECT * FROM _stream_time ORDER BY ALL")}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passes that were made over whole runs, by name, without an error."""
    made: list[str] = []
    works = {"stream_times": launch_streams.stream_times, "device_use": launch_streams.device_use}

    def counted(name: str, *given: Any) -> Any:
        found = works[name](*given)
        made.append(name)
        return found

    for name in works:
        monkeypatch.setattr(launch_streams, name, partial(counted, name))
    return made


@pytest.mark.parametrize(("seed", "small"), [(1, False), *((seed, True) for seed in range(6))])
def test_a_pass_gives_what_the_queries_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: list[str], seed: int, small: bool
) -> None:
    build(tmp_path, seed)
    if small:
        split(tmp_path, rows_a_shard=37)
        monkeypatch.setattr(launch_reader, "ROWS_AT_ONCE", 20)
    expected = answers(tmp_path)
    assert not passes
    assert len(expected["gaps"]) > 6
    assert expected["gaps"]["gap_ns"].min() > 0
    monkeypatch.setattr(made, "FEWEST_LAUNCHES", 0)
    found = answers(tmp_path)
    assert passes == ["stream_times", "device_use"]
    for name, frame in expected.items():
        assert found[name].equals(frame), name


def ties(run_dir: Path) -> None:
    """Pauses that begin with a kernel, end with one, hold one, follow the last one or come before the first."""
    chance = random.Random(5)
    trace = Trace(run_dir)
    trace.device()
    kernel = trace.kernel_class("k")
    for _ in range(80):
        options: dict[str, Any] = {"stream_id": chance.choice([7, 8]), "context_id": chance.choice([1, None])}
        trace.kernel(kernel, MS * chance.randrange(10, 60), MS * chance.choice([0, 1, 1, 2]), **options)
    for _ in range(9):
        start = MS * chance.randrange(5, 65)
        trace.pause(start, start + MS * chance.choice([0, 1, 2, 6]))
    trace.write()


def test_pauses_and_kernels_that_begin_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: list[str]
) -> None:
    ties(tmp_path)
    expected = answers(tmp_path)
    assert expected["gaps"]["paused_ns"].min() > 0
    monkeypatch.setattr(made, "FEWEST_LAUNCHES", 0)
    monkeypatch.setattr(launch_reader, "ROWS_AT_ONCE", 5)
    found = answers(tmp_path)
    assert len(passes) == 2
    for name, frame in expected.items():
        assert found[name].equals(frame), name


@pytest.mark.parametrize(("module", "limit"), [(launch_reader, "MOST_PENDING"), (launch_streams, "MOST_STREAMS")])
def test_where_a_pass_is_refused_the_sql_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: list[str], module: Any, limit: str
) -> None:
    build(tmp_path, 2)
    expected = answers(tmp_path)
    monkeypatch.setattr(made, "FEWEST_LAUNCHES", 0)
    monkeypatch.setattr(module, limit, 3)
    found = answers(tmp_path)
    assert "stream_times" not in passes
    assert found["gaps"].equals(expected["gaps"])
    assert found["use"].equals(expected["use"])


def test_streams_are_numbered_by_device_context_and_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: dict[launch_streams.Stream, int] = {}
    none = int(launch_reader.NONE)
    columns = [np.array(values, np.int64) for values in ([0, 0, 1, 1, 0], [1, none, 1, 1, 1], [7, 7, 7, 7, 8])]
    assert launch_streams._stream_numbers(numbers, columns).tolist() == [numbers[key] for key in
        [(0, 1, 7), (0, none, 7), (1, 1, 7), (1, 1, 7), (0, 1, 8)]]  # fmt: skip
    assert sorted(numbers.values()) == [0, 1, 2, 3]
    before = dict(numbers)
    assert launch_streams._stream_numbers(numbers, [column[3:4] for column in columns]).tolist() == [before[1, 1, 7]]
    assert numbers == before
    monkeypatch.setattr(launch_streams, "MOST_PLACES", 7)
    with pytest.raises(launch_streams.Unscannable, match="streams"):
        launch_streams._stream_numbers({}, columns)


def test_only_the_shipped_query_itself_is_answered_by_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: list[str]
) -> None:
    build(tmp_path, 2)
    monkeypatch.setattr(made, "FEWEST_LAUNCHES", 0)
    statement = queries.query("timeline_utilisation").sql
    with na.open(tmp_path) as run:
        shipped = run.sql(statement, {"buckets": 3})
        assert passes == ["device_use"]
        assert run.sql(f"SELECT * FROM ({statement}\n) ORDER BY device, bucket", {"buckets": 3}).equals(shipped)
        assert [batch.num_rows for batch in run.batches(statement, {"buckets": 3}, rows=2)][:1] == [2]
    assert passes == ["device_use"] * 2
    assert shipped["bucket"].max() == 2
    assert PROCESS in "".join(shipped["device"]) or len(shipped) > 3


def plain(run_dir: Path, seed: int) -> None:
    """Launches that all took some time, on a device a row group; the last end is not of the last start."""
    chance = random.Random(seed)
    trace = Trace(run_dir)
    kernel = trace.kernel_class("k")
    for process in ("node0-0-100", "node0-1-200"):
        for ordinal in range(2):
            trace.device(process, device_id=ordinal)
            for place in range(30):
                at = 100 * (30 * ordinal + place)
                trace.kernel(kernel, at, chance.choice([1, 20, 5_000]), process=process, device_id=ordinal)
    trace.write(shards=6)


@pytest.mark.parametrize("seed", range(4))
def test_first_and_last_instants_come_from_the_footers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: list[str], seed: int
) -> None:
    plain(tmp_path, seed)
    monkeypatch.setattr(made, "FEWEST_LAUNCHES", 10**9)
    expected = answers(tmp_path)
    monkeypatch.setattr(made, "FEWEST_LAUNCHES", 0)
    monkeypatch.setattr(launch_streams, "_SPANS", "SELECT nothing")  # which is not asked
    found = answers(tmp_path)
    assert passes == ["stream_times", "device_use"]
    assert found["use"].equals(expected["use"])
    with na.open(tmp_path) as run:
        parts = launch_reader.parts(run._catalog.shards["kernels"], launch_streams._USE_COLUMNS)
        spans = run.sql(f"SELECT * FROM ({launch_streams._spans(parts)}) ORDER BY ALL")
        wanted = run.sql(
            "SELECT process, device_id, min(start_ns) AS first_ns, max(end_ns) AS last_ns FROM _launches"
            " GROUP BY process, device_id ORDER BY ALL"
        )
    assert len(spans) == 4
    assert spans.to_dict("records") == wanted.to_dict("records")


@pytest.mark.parametrize("odd", [{"duration_ns": 0}, {"duration_ns": None}, {"start_ns": None}, {"device_id": 1}])
def test_footers_that_do_not_tell_are_not_asked(tmp_path: Path, odd: dict[str, Any]) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    trace.kernel(kernel, 0, 5)
    trace.kernel(kernel, **{"start_ns": 10, "duration_ns": 5, **odd})
    trace.write()
    with na.open(tmp_path) as run:
        (part,) = launch_reader.parts(run._catalog.shards["kernels"], launch_streams._USE_COLUMNS)
    assert not launch_streams._is_plain(part)
