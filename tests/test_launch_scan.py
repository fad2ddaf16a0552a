"""One pass over the launches against the views in SQL that say the same: random launches, copies, pauses, ranges."""

from __future__ import annotations

import random
from pathlib import Path
from trace import PROCESS, T0, Trace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import nanalyze.analysis as na
from nanalyze import queries
from nanalyze.analysis import launch_devices, launch_reader, launch_scan, launch_sums, made
from nanalyze.rundir.schema import TABLES
from nanalyze.rundir.shards import write_shard

MS = 1_000_000
OTHER = "node0-1-101"
UUID = "GPU-00000000-0000-0000-0000-000000000000"


def build(run_dir: Path, seed: int) -> None:
    """Two processes, three devices of which they share one, several streams; what overlaps, is missing or absurd."""
    chance = random.Random(seed)
    trace = Trace(run_dir)
    for process in (PROCESS, OTHER):
        trace.device(process=process, uuid=UUID)
    trace.device(process=OTHER, device_id=1, uuid=None)
    names = ("gemm", "void ncclDevKernel_AllReduce(int)", "relu", "softmax")
    kernels = [trace.kernel_class(name) for name in names]
    for _ in range(600):
        _launch(trace, chance, kernels)
    for _ in range(60):
        start, process = chance.randrange(200 * MS), chance.choice([PROCESS, OTHER])
        trace.copy("HtoD", start, chance.choice([0, 700, 3 * MS]), 4096, process=process)
    for _ in range(chance.choice([0, 6])):
        start = chance.randrange(-5 * MS, 205 * MS)
        trace.pause(start, start + chance.randrange(20 * MS), process=chance.choice([PROCESS, OTHER]))
    if seed % 3 == 0:
        trace.measure(kernels[0], [{"compute_pct": 50.0, "duration_ns": 1000.0 + n} for n in range(5)])
    _ranges(trace, chance)
    for process in (PROCESS, OTHER):
        for at in range(0, 200, 7):
            trace.state(at * MS, sm_clock_hz=chance.choice([None, 1_500_000_000]), process=process)
    trace.write()


def _launch(trace: Trace, chance: random.Random, kernels: list[int]) -> None:
    start: int | None = chance.choice([chance.randrange(200 * MS), chance.randrange(100) * 2 * MS])
    length: int | None = chance.choice([0, 1, 900, chance.randrange(MS), chance.randrange(10 * MS), 60 * MS])
    length = length if chance.random() < 0.05 else chance.choice([1_000, 1_000, MS // 2])
    queued: int | None = (start or 0) - chance.choice([0, 1_000, 50_000, 3 * MS, -2 * MS])
    if chance.random() < 0.1:
        start, length, queued = chance.choice(
            [
                (None, None, queued),
                (start, None, None),
                (start, -5, queued),
                (-T0 - 9, 5, queued),
                (start, 2 * 10**15, 7),
            ]
        )
    process = chance.choice([PROCESS, OTHER])
    device = chance.choice([0, 1]) if process == OTHER else 0
    options: dict[str, Any] = {"stream_id": chance.choice([7, 8, None]), "device_id": device, "process": process}
    trace.kernel(chance.choice(kernels), start, length, queued_ns=queued, **options)


def _ranges(trace: Trace, chance: random.Random) -> None:
    for step in range(20):
        trace.range("step", step * 10 * MS, (step + 1) * 10 * MS - chance.choice([0, 1, MS]))
        inner = step * 10 * MS + chance.randrange(5 * MS)
        trace.range("inner", inner, chance.choice([inner + MS, None]), process=chance.choice([PROCESS, OTHER]))


def rows(run: na.Run, statement: str, **parameters: object) -> list[tuple[Any, ...]]:
    found = [tuple(row.values()) for row in run.arrow(statement, parameters or None).to_pylist()]
    return sorted(found, key=lambda row: [(value is None, value or 0) for value in row])


def both(run_dir: Path, monkeypatch: pytest.MonkeyPatch, buckets: int = 9) -> tuple[na.Run, na.Run, pa.Table]:
    """The run with its views alone, and after a pass with the pieces of that."""
    monkeypatch.setattr(made, "FEWEST_LAUNCHES", 10**12)
    plain = na.open(run_dir)
    assert plain.prepare(buckets) is None
    monkeypatch.setattr(made, "FEWEST_LAUNCHES", 0)
    scanned = na.open(run_dir)
    pieces = scanned.prepare(buckets)
    assert pieces is not None
    return plain, scanned, pieces


def of_view(name: str) -> str:
    """All columns, sums as the same type."""
    casts = (
        f"CAST({c.name} AS BIGINT) AS {c.name}" if c.type == "HUGEINT" else c.name for c in queries.view(name).columns
    )
    return f"SELECT {', '.join(casts)} FROM {name}"


@pytest.mark.parametrize(("seed", "small"), [(0, False), *((seed, True) for seed in range(1, 6))])
def test_a_pass_gives_what_the_views_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, small: bool
) -> None:
    build(tmp_path, seed)
    if small:
        split(tmp_path, rows_a_shard=37)
        monkeypatch.setattr(launch_reader, "ROWS_AT_ONCE", 20)
        monkeypatch.setattr(launch_scan, "FLUSH_ROWS", 10)
        monkeypatch.setattr(launch_sums, "MOST_DENSE", seed % 2 * 1000)
    plain, scanned, pieces = both(tmp_path, monkeypatch)
    for view in launch_scan.VIEWS:
        expected = rows(plain, of_view(view))
        assert expected, view
        assert rows(scanned, of_view(view)) == expected, view
    assert pieces.to_pylist() == plain.arrow(queries.query("timeline_utilisation").sql, {"buckets": 9}).to_pylist()
    for query in ("time_by_cause", "opportunities", "steps", "ranges_summary", "ranks", "losses", "kernel_losses"):
        assert scanned.query(query).equals(plain.query(query)), query


def split(run_dir: Path, rows_a_shard: int) -> None:
    """Cut the shards of launches and copies into small ones in order of end, as a recorder writes them."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    for name in ("kernels", "copies"):
        for folder in (run_dir / name).glob("process=*"):
            files = sorted(folder.glob("*.parquet"))
            table = pa.concat_tables([pq.ParquetFile(file).read() for file in files])
            for file in files:
                file.unlink()
            ends = pc.add(pc.fill_null(table["start_ns"], 0), pc.fill_null(table["duration_ns"], 0))
            table = table.take(pc.sort_indices(ends)).cast(TABLES[name].arrow_schema())
            for number, at in enumerate(range(0, table.num_rows, rows_a_shard), 1):
                process = folder.name.removeprefix("process=")
                write_shard(run_dir, name, process, number, table.slice(at, rows_a_shard))


# --- order -----------------------------------------------------------------------------------------


def part(first_ns: int, name: str = "a") -> launch_reader.Part:
    return launch_reader.Part("kernels", PROCESS, name, 0, 1, first_ns)


def columns(*starts: int) -> launch_reader.Columns:
    return {"start_ns": np.array(starts, np.int64)}


def handed(monkeypatch: pytest.MonkeyPatch, *given: tuple[int, tuple[int, ...]], extra: tuple[int, ...] = ()) -> Any:
    monkeypatch.setattr(launch_reader, "ROWS_AT_ONCE", 1)
    parts = [part(first) for first, _ in given]
    read = ((own, columns(*starts)) for own, (_, starts) in zip(parts, given, strict=True))
    return [found["start_ns"].tolist() for found in launch_reader.in_order(parts, read, columns(*extra))]


def test_rows_come_in_order_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert handed(monkeypatch, (1, (3, 1, 6)), (5, (5, 9, 7)), (8, (8, 20)), extra=(2, 30)) == [
        [1, 2, 3], [5, 6, 7], [8, 9, 20, 30],
    ]  # fmt: skip
    assert handed(monkeypatch, extra=(4, 2)) == [[2, 4]]


def test_a_start_before_the_first_of_its_row_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(launch_scan.Unscannable, match="start before"):
        handed(monkeypatch, (1, (1, 2)), (5, (4, 6)), (7, (3, 8)))


def test_row_groups_without_order_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_reader, "MOST_PENDING", 3)
    with pytest.raises(launch_scan.Unscannable, match="overlap"):
        handed(monkeypatch, (1, (1, 9)), (1, (1, 9)), (1, (1, 9)))


def test_where_a_pass_is_refused_the_views_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path, 1)
    monkeypatch.setattr(made, "FEWEST_LAUNCHES", 10**12)
    with na.open(tmp_path) as run:
        expected = run.query("time_by_cause")
    monkeypatch.setattr(made, "FEWEST_LAUNCHES", 0)
    monkeypatch.setattr(launch_reader, "MOST_PENDING", 3)
    with na.open(tmp_path) as run:
        assert run.prepare(9) is None
        assert run.query("time_by_cause").equals(expected)


def test_one_query_of_a_large_run_makes_the_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path, 1)
    passes = []
    scan = launch_scan.scan
    monkeypatch.setattr(launch_scan, "scan", lambda *given: passes.append(given) or scan(*given))
    monkeypatch.setattr(made, "FEWEST_LAUNCHES", 0)
    with na.open(tmp_path) as run:
        run.query("top_kernels")
        assert not passes
        run.query("steps")
        run.query("time_by_cause")
        assert len(passes) == 1


def test_processes_that_share_devices_are_gone_through_together() -> None:
    shared = {1: ("a", "b"), 2: ("c",), 3: ("d", "e"), 4: ("e", "b"), 5: ("a",)}
    devices = {n: launch_devices.Device(n, str(n), tuple((p, 0) for p in owners)) for n, owners in shared.items()}
    found = [(sorted(own), sorted(numbers)) for own, numbers in launch_devices.components(devices, {*"abcdef"})]
    assert sorted(found) == [(["a", "b", "d", "e"], [1, 3, 4, 5]), (["c"], [2]), (["f"], [])]


def test_sums_that_are_not_exact_are_refused() -> None:
    pieces = launch_sums.Pieces(0, 2**60, 1)
    with pytest.raises(launch_scan.Unscannable, match="too large"):
        pieces.add(np.zeros(10, np.int64), np.full(10, 10**15))
