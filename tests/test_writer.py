"""The writer: what goes in comes out, and a disk that fails costs as little as it can."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from fake_gpu import read_table, shard_paths

from nanalyze.recorder import writer as module
from nanalyze.recorder.writer import Writer, to_arrow
from nanalyze.rundir import shards
from nanalyze.rundir.schema import RECORDED_VERSION, TABLES

PROCESS = "host-0-1"


class Disk:
    """Stands in for `write_shard`: fails with `error` while that is set."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.error: OSError | None = None
        self.only: set[str] | None = None
        self.attempts = 0
        self._write = shards.write_shard
        patch.setattr(shards, "write_shard", self)

    def __call__(self, run_dir: Path, table: str, *args: Any) -> Any:
        self.attempts += 1
        if self.error is not None and (self.only is None or table in self.only):
            raise self.error
        return self._write(run_dir, table, *args)

    def fill(self) -> None:
        self.error = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def writer(tmp_path: Path, said: list[str]) -> Writer:
    return Writer(tmp_path, PROCESS, said.append)


def launches(*correlations: int) -> dict[str, Any]:
    """Rows of `kernels`, told apart by their correlation id."""
    count = len(correlations)
    correlation = np.array(correlations, dtype=np.int64)
    none = np.ma.array(np.zeros(count, dtype=np.int64), mask=True)
    return {
        "start_ns": np.ma.array(correlation * 10, mask=correlation % 2 == 0),
        "duration_ns": np.ma.array(correlation * 3, mask=correlation % 2 == 0),
        "kernel_class_id": correlation + 2**62,
        "device_id": np.zeros(count, dtype=np.int32),
        "context_id": np.ones(count, dtype=np.int64),
        "stream_id": np.full(count, 7, dtype=np.int64),
        "graph_id": none,
        "graph_node_id": none,
        "correlation_id": correlation,
        "queued_ns": none,
    }


def correlations(run_dir: Path) -> list[int]:
    return [row["correlation_id"] for row in read_table(run_dir, "kernels")]


def test_arrays_lists_and_masks_come_out_as_they_went_in(writer: Writer, tmp_path: Path) -> None:
    writer.add("kernels", launches(1, 2, 3))
    writer.add("kernels", launches(4))
    writer.add_rows("events", [{"time_ns": 5, "layer": "x", "kind": "note", "message": "ü\udcff'\n"}])
    writer.event("exact", "loss", "text", 12)
    writer.flush()
    assert read_table(tmp_path, "kernels") == [
        {
            "start_ns": None if number % 2 == 0 else number * 10,
            "duration_ns": None if number % 2 == 0 else number * 3,
            "kernel_class_id": number + 2**62,
            "device_id": 0,
            "context_id": 1,
            "stream_id": 7,
            "graph_id": None,
            "graph_node_id": None,
            "correlation_id": number,
            "queued_ns": None,
        }
        for number in (1, 2, 3, 4)
    ]
    first, second = read_table(tmp_path, "events")
    assert first == {"time_ns": 5, "layer": "x", "kind": "note", "message": "ü\\udcff'\n", "count": None}
    assert (second["layer"], second["kind"], second["message"], second["count"]) == ("exact", "loss", "text", 12)
    assert second["time_ns"] > 1_700_000_000_000_000_000
    assert writer.rows == {"kernels": 4, "events": 2}
    assert writer.shards == {"kernels": 1, "events": 1}


RECORDED = [table for table in TABLES.values() if table.version == RECORDED_VERSION]


@pytest.mark.parametrize("table", RECORDED, ids=lambda table: table.name)
def test_every_table_takes_its_nulls_and_keeps_its_schema(writer: Writer, tmp_path: Path, table: Any) -> None:
    examples: dict[str, Any] = {"int32": -5, "int64": 2**62, "float64": 0.5, "string": "é", "bool": True}
    full = {column.name: examples[column.type] for column in table.columns}
    bare = {column.name: examples[column.type] for column in table.columns if not column.nullable}
    writer.add_rows(table.name, [full, bare])
    writer.flush()
    (path,) = shard_paths(tmp_path, table.name)
    stored = pq.ParquetFile(path).read()
    assert stored.schema.equals(table.arrow_schema(), check_metadata=False)
    assert stored.to_pylist() == [full, {**dict.fromkeys(full), **bare}]


def test_counters_beyond_the_declared_columns_are_kept_where_a_table_is_open() -> None:
    declared = {"device_id": [0], "start_ns": [1], "end_ns": [2], "counter_group": [3]}
    batches = [declared | {"dram__bytes_read.sum": [1.5]}, declared | {"sm__cycles_active.avg": np.array([2.5])}]
    assert to_arrow(TABLES["samples"], batches).select([4, 5]).to_pylist() == [
        {"dram__bytes_read.sum": 1.5, "sm__cycles_active.avg": None},
        {"dram__bytes_read.sum": None, "sm__cycles_active.avg": 2.5},
    ]


def test_each_flush_is_a_shard_with_the_next_number(writer: Writer, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        writer.add("kernels", launches(number))
        writer.flush()
        writer.flush()  # nothing new: no empty shard
    writer.add("kernels", launches())
    writer.add_rows("events", [])
    writer.flush()
    names = [path.name for path in shard_paths(tmp_path, "kernels")]
    assert [name[:7] for name in names] == ["000001-", "000002-", "000003-"]
    assert [name[7:23] for name in names] == [
        shards.digest(path.read_bytes()) for path in shard_paths(tmp_path, "kernels")
    ]
    assert writer.shards == {"kernels": 3}
    assert not (tmp_path / "events").exists()


def test_it_is_full_when_a_row_group_is(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_ROWS", 3)
    writer.add("kernels", launches(1, 2))
    assert not writer.is_full
    writer.event("x", "note", "counts by itself")
    assert not writer.is_full
    writer.add("kernels", launches(3))
    assert writer.is_full
    writer.flush()
    assert not writer.is_full


def test_a_full_disk_is_said_once_and_written_later(
    writer: Writer, disk: Disk, said: list[str], tmp_path: Path
) -> None:
    writer.add("kernels", launches(1))
    writer.flush()
    disk.fill()
    for number in (2, 3, 4):
        writer.add("kernels", launches(number))
        writer.flush()
    assert said == [f"{tmp_path}: cannot write (No space left on device); recording goes on in memory"]
    assert correlations(tmp_path) == [1]
    assert (writer.rows, writer.shards, writer.lost) == ({"kernels": 1}, {"kernels": 1}, {})
    disk.error = None
    writer.add("kernels", launches(5))
    writer.flush()
    assert correlations(tmp_path) == [1, 2, 3, 4, 5]
    assert (writer.rows["kernels"], writer.shards["kernels"], writer.lost) == (5, 2, {})
    assert [path.name[:6] for path in shard_paths(tmp_path, "kernels")] == ["000001", "000002"]


def test_the_oldest_rows_go_when_the_disk_stays_full(
    writer: Writer, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_ROWS", 5)
    disk.fill()
    for number in range(1, 9):
        writer.add("kernels", launches(number, number + 100))
        writer.flush()
    assert writer.lost == {"kernels": 12}
    disk.error = None
    writer.flush()
    assert correlations(tmp_path) == [7, 107, 8, 108]
    assert writer.rows["kernels"] + writer.lost["kernels"] == 16


def test_one_batch_larger_than_memory_may_hold_is_lost_whole(
    writer: Writer, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_ROWS", 2)
    disk.fill()
    writer.add("kernels", launches(1, 2, 3))
    writer.flush()
    assert (writer.lost, writer.is_full) == ({"kernels": 3}, False)
    disk.error = None
    writer.flush()
    assert not (tmp_path / "kernels").exists()


def test_one_table_that_fails_does_not_hold_up_the_others(writer: Writer, disk: Disk, tmp_path: Path) -> None:
    disk.fill()
    disk.only = {"kernels"}
    writer.add("kernels", launches(1))
    writer.event("x", "note", "written")
    writer.flush()
    assert [row["message"] for row in read_table(tmp_path, "events")] == ["written"]
    assert correlations(tmp_path) == []


def test_a_failing_disk_can_be_said_to_the_events_table_itself(disk: Disk, tmp_path: Path) -> None:
    """What the recorder does: its warning is an event, which waits with the others."""
    writer = Writer(tmp_path, PROCESS, lambda text: writer.event("recorder", "failure", text))
    disk.fill()
    writer.event("x", "note", "first")
    writer.flush()
    disk.error = None
    writer.flush()
    assert [row["message"] for row in read_table(tmp_path, "events")] == [
        "first",
        f"{tmp_path}: cannot write (No space left on device); recording goes on in memory",
    ]


def test_a_real_directory_that_refuses_is_survived(writer: Writer, said: list[str], tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("a file where the folder should be")
    writer.add("kernels", launches(1))
    writer.flush()
    assert len(said) == 1
    assert said[0].startswith(f"{tmp_path}: cannot write (")
    (tmp_path / "kernels").unlink()
    writer.flush()
    assert correlations(tmp_path) == [1]


def test_a_value_that_no_table_can_hold_costs_its_batch_alone(writer: Writer, said: list[str], tmp_path: Path) -> None:
    writer.add_rows("events", [{"time_ns": 2**70, "layer": "x", "kind": "note", "message": "too late"}])
    writer.add("kernels", launches(1))
    writer.flush()
    assert correlations(tmp_path) == [1]
    assert writer.lost == {"events": 1}
    assert said[0].startswith("events: 1 rows cannot be stored, please report it: OverflowError")
    writer.event("x", "note", "next")
    writer.flush()
    assert [row["message"] for row in read_table(tmp_path, "events")] == ["next"]
    assert writer.shards["events"] == 1


@pytest.mark.parametrize("column", ["kind", "bytes"])
def test_a_missing_value_where_there_must_be_one_is_no_shard(
    writer: Writer, said: list[str], tmp_path: Path, column: str
) -> None:
    """Readers trust the schema: a NULL in a column that promises none would be read as a value."""
    row = {"kind": "HtoD", "bytes": 5, "device_id": 0, "context_id": 1, "stream_id": 1, "correlation_id": 1}
    writer.add_rows("copies", [{name: value for name, value in row.items() if name != column}])
    writer.flush()
    assert writer.lost == {"copies": 1}
    assert len(said) == 1
    assert not (tmp_path / "copies").exists()
