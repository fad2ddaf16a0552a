"""Which samples are used, and that many devices in one run are estimated as each of them alone."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scripts import benchmark

import nanalyze.analysis as na
from nanalyze.analysis import attribution_normal as normal
from nanalyze.analysis import attribution_samples as samples
from nanalyze.rundir import shards
from nanalyze.rundir.schema import SAMPLES

make_run = benchmark("make_run")
NOWHERE = samples.Disturbances({}, frozenset())
MS = 1_000_000


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three processes with a device each."""
    run_dir = tmp_path_factory.mktemp("several") / "run"
    options = make_run.Options(launches=36_000, classes=12, processes=3, shard_rows=5_000, sample_ns=MS, mean_us=30.0)
    make_run.make(run_dir, options)
    return run_dir


@pytest.mark.parametrize("number", range(3))
def test_a_device_among_others_has_the_estimates_that_it_has_alone(
    several: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(normal, "WINDOW_SAMPLES", 80)
    alone = tmp_path / "alone"
    for partition in several.glob(f"*/process=node0-{number}-*"):
        shutil.copytree(partition, alone / partition.relative_to(several))
    shutil.copy(several / "run.json", alone)
    device = f"GPU-00000000-0000-0000-0000-{number:012d}"
    for view in ("attribution", "attribution_windows", "attribution_quality"):
        statement = f"SELECT * FROM {view} WHERE device = '{device}' ORDER BY ALL"
        with na.open(several) as run, na.open(alone) as own:
            expected = own.sql(statement)
            assert len(expected) > 3
            assert run.sql(statement).equals(expected)


def test_counters_of_several_devices_are_their_means_by_time(several: Path) -> None:
    with na.open(several) as run:
        found = run.sql("SELECT * FROM counters WHERE counter = 'inst' AND method = 'sampled'")
        # inst of a launch is the rate (a ms) times the mean duration, of each device, by sampled time.
        each = run.sql("SELECT device, kernel_class_id, rate_per_s, time_ns FROM attribution WHERE counter = 'inst'")
        means = run.sql("SELECT kernel_class_id, device_id, process, avg(duration_ns) AS ns FROM kernels GROUP BY ALL")
    assert len(found) == 12
    means["device"] = [f"GPU-00000000-0000-0000-0000-{int(name.split('-')[1]):012d}" for name in means["process"]]
    each = each.dropna().astype({"kernel_class_id": "int64"}).merge(means, on=["device", "kernel_class_id"])
    each["weighted"] = each["rate_per_s"] * each["ns"] / 1e9 * each["time_ns"]
    sums = each.groupby("kernel_class_id")[["weighted", "time_ns"]].sum()
    expected = sums["weighted"] / sums["time_ns"]
    grids = dict(zip(found["kernel_class_id"], found["value"], strict=True))
    # Tracing added 8 instructions a warp, which are taken off: `inst` counts those of the kernel.
    with na.open(several) as run:
        warps = run.sql("SELECT kernel_class_id, grid_x * 8 AS warps FROM kernel_classes").set_index("kernel_class_id")
    for class_id, value in grids.items():
        wanted = max(expected[class_id] - 8 * warps.loc[class_id, "warps"], 0)
        assert value == pytest.approx(wanted, rel=1e-6, abs=1.0)


def test_the_files_of_other_processes_are_not_read(several: Path) -> None:
    with na.open(several) as run:
        run.sql("SELECT count(*) FROM kernels")
        condition = samples.owned([("node0-1-4001", 0)], "k")
        statement = f"EXPLAIN SELECT count(DISTINCT k.stream_id) FROM raw.kernels AS k WHERE {condition}"
        plan = str(run._connection_or_error().cursor().execute(statement).fetchall())
    files = len(list((several / "kernels").glob("*/*.parquet")))
    # DuckDB 1.4 counts those alone that are left.
    assert any(f"Scanning Files: {files // 3}/{seen}" in plan for seen in (files, files // 3))


# --- which samples are usable ----------------------------------------------------------------------


def group(start: Sequence[int], end: Sequence[int], **values: Sequence[float]) -> samples.Group:
    arrays = {name: np.array(column, np.float64) for name, column in values.items()}
    return samples.Group(0, len(start), np.array(start, np.int64), np.array(end, np.int64), arrays)


def even(count: int, **values: Sequence[float]) -> samples.Group:
    return group([MS * n for n in range(count)], [MS * (n + 1) for n in range(count)], **values)


def usable(given: samples.Group, pauses: Sequence[tuple[int, int]] = (), replays: Sequence[int] = ()) -> list[int]:
    times = np.array(pauses, np.int64).reshape(-1, 2)
    found = samples._usable(given, MS, (times[:, 0], times[:, 1]), np.array(replays, np.int64))
    return [start // MS for start in found.start_ns.tolist()]


def test_samples_that_make_no_sense_are_dropped() -> None:
    nan = float("nan")
    assert usable(even(6, inst=[1, nan, -1, 1e31, 0, 1e30])) == [0, 4, 5]
    assert usable(even(2, inst=[1, 1], dram_read_bytes=[nan, 1])) == [1]
    assert usable(even(3)) == []  # without a counter
    longest = samples.LONGEST_SAMPLE
    times = [(0, longest * MS), (30 * MS, (31 + longest) * MS), (60 * MS, 60 * MS), (-MS, 0), (70 * MS, 71 * MS)]
    assert usable(group(*zip(*times, strict=True), inst=[1.0] * 5)) == [0, 70]


def test_samples_that_touch_a_pause_or_a_replay_are_dropped() -> None:
    counted = even(6, inst=[1.0] * 6)
    assert usable(counted, [(2 * MS, 3 * MS)]) == [0, 1, 3, 4, 5]
    assert usable(counted, [(2 * MS - 1, 3 * MS + 1)]) == [0, 4, 5]
    # A long pause that began before a short one.
    found = samples.Disturbances({"a": [(3 * MS, 3 * MS + 1)], "b": [(MS + 1, 5 * MS)]}, frozenset())
    starts, until = found.of_pauses([("a", 0), ("b", 1), ("b", 2)])
    assert (starts.tolist(), until.tolist()) == ([MS + 1, 3 * MS], [5 * MS, 5 * MS])
    assert usable(counted, list(zip(starts.tolist(), until.tolist(), strict=True))) == [0, 5]
    assert usable(counted, replays=[3]) == [0, 1, 4, 5]  # the one before it ends in the bucket


def test_samples_whose_cycles_stop_early_are_dropped() -> None:
    assert usable(even(5, sm_cycles_elapsed=[100, 100, 60, 100, 100])) == [0, 1, 3, 4]
    assert usable(even(5, sm_cycles_elapsed=[100, 100, 80, 100, 100])) == [0, 1, 2, 3, 4]
    assert usable(even(4, sm_cycles_elapsed=[60, 100, 100, 60])) == [1, 2]  # with one neighbour
    assert usable(even(1, sm_cycles_elapsed=[60])) == [0]
    far = group([0, 30 * MS, 60 * MS], [MS, 31 * MS, 61 * MS], sm_cycles_elapsed=[100, 60, 100])
    assert usable(far) == [0, 30, 60]  # a clock of long ago says nothing


def test_counters_on_the_sm_clock_are_those_at_the_mean_clock() -> None:
    given = even(2, sm_cycles_elapsed=[80.0, 100.0], sm_busy_ns=[8.0, 10.0], dram_read_bytes=[5.0, 5.0])
    on_clock = [name for name, column in samples.BY_COLUMN.items() if column.is_on_sm_clock and name != samples.CYCLES]
    given.values[on_clock[0]] = given.values.pop("sm_busy_ns")
    samples._at_mean_clock(given)
    assert given.values[on_clock[0]].tolist() == pytest.approx([8 * 80 / 90, 10 * 100 / 90])
    assert given.values["dram_read_bytes"].tolist() == [5.0, 5.0]


# --- reading ---------------------------------------------------------------------------------------


def write(run_dir: Path, process: str, number: int, columns: Mapping[str, Any]) -> shards.Shard:
    extra = tuple(name for name in columns if name not in SAMPLES.column_names)
    rows = pa.table(dict(columns), schema=SAMPLES.arrow_schema(extra))
    return shards.write_shard(run_dir, "samples", process, number, rows)


def rows(start: Sequence[int], group: Sequence[int], **counters: Sequence[float | None]) -> dict[str, Any]:
    return {
        "device_id": [0] * len(start), "start_ns": start, "end_ns": [at + MS for at in start], "counter_group": group,
        **counters,
    }  # fmt: skip


def test_groups_are_read_apart_from_shards_in_any_order(tmp_path: Path) -> None:
    written = [
        write(tmp_path, "p-1", 1, rows([4 * MS, 2 * MS], [1, 0], inst=[None, 7.0], l2_bytes=[5.0, None])),
        write(tmp_path, "p-1", 2, rows([0], [0], inst=[9.0])),
        write(tmp_path, "p-2", 1, rows([3 * MS], [0], inst=[1.0])),  # another process's device
        write(tmp_path, "p-1", 3, {**rows([3 * MS], [0], inst=[1.0]), "device_id": [1]}),
    ]
    counters = ["inst", "l2_bytes", "dram_read_bytes"]
    width, found = samples.load(None, [("p-1", 0)], counters, written, NOWHERE)  # type: ignore[arg-type]
    assert width == MS
    assert [(one.number, one.seen, one.start_ns.tolist()) for one in found] == [(0, 2, [0, 2 * MS]), (1, 1, [4 * MS])]
    assert {name: values.tolist() for name, values in found[0].values.items()} == {"inst": [9.0, 7.0]}
    assert {name: values.tolist() for name, values in found[1].values.items()} == {"l2_bytes": [5.0]}


def test_a_column_that_half_of_a_group_lacks_is_none_of_its_counters(tmp_path: Path) -> None:
    two = write(tmp_path, "p-1", 1, rows([0, MS], [0, 0], inst=[1.0, 1.0], l2_bytes=[1.0, None]))
    three = write(tmp_path, "p-1", 2, rows([2 * MS], [0], inst=[1.0], l2_bytes=[2.0]))
    counters = ["inst", "l2_bytes"]
    (half,) = samples.load(None, [("p-1", 0)], counters, [two], NOWHERE)[1]  # type: ignore[arg-type]
    assert list(half.values) == ["inst"]
    (most,) = samples.load(None, [("p-1", 0)], counters, [two, three], NOWHERE)[1]  # type: ignore[arg-type]
    assert most.values["l2_bytes"].tolist() == [1.0, 2.0]
    assert most.start_ns.tolist() == [0, 2 * MS]  # the one without it is unusable


def test_no_samples_make_no_group() -> None:
    assert samples.load(None, [("p-1", 0)], ["inst"], [], NOWHERE) == (samples.SHORTEST_NS, [])  # type: ignore[arg-type]
