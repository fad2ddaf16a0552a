"""Merging shards: every row once, in order, whatever is interrupted where."""

from __future__ import annotations

import shutil
from pathlib import Path
from trace import PROCESS, T0, Trace, arrow_table
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from killed import killed_at_every_step

import nanalyze.analysis as na
from nanalyze.analysis import catalog
from nanalyze.analysis.live import Live
from nanalyze.commands import main
from nanalyze.rundir import compaction, shards
from nanalyze.rundir.errors import RunError
from nanalyze.rundir.schema import DELTA, KERNELS, TABLE_KEY, TABLES
from nanalyze.rundir.shards import Shard, write_shard

LAUNCHES = 12
OTHER = "node0-1-101"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two processes, each with 12 launches in 4 shards, samples with other counters in each shard."""
    trace = Trace(tmp_path / "run")
    for process in (PROCESS, OTHER):
        trace.device(process)
        kernel = trace.kernel_class("gemm", process=process)
        for number in range(LAUNCHES):
            duration = None if number == 5 else 100 + number
            trace.kernel(kernel, start_ns=1_000 * number, duration_ns=duration, process=process)
    trace.write(shards=4)
    for number, counter in enumerate(("inst", "dram_read_bytes", "inst"), 1):
        row = {"device_id": 0, "start_ns": T0 + number, "end_ns": T0 + number + 1, "counter_group": 0}
        write_shard(trace.run_dir, "samples", PROCESS, number, arrow_table(TABLES["samples"], [{**row, counter: 1.5}]))
    return trace.run_dir


def names(run_dir: Path, table: str = "kernels", process: str = PROCESS) -> list[str]:
    """The numbers in the names of the shards."""
    folder = run_dir / table / f"process={process}"
    return sorted(path.name.rpartition("-")[0] for path in folder.iterdir())


def content(run_dir: Path) -> dict[str, list[tuple[Any, ...]]]:
    """All rows of every table as the views' sources give them, and damage."""
    with na.open(run_dir) as run:
        return {
            table: sorted(map(repr, run.arrow(f'SELECT COLUMNS(*) FROM raw."{table}"').to_pylist()))
            for table in [*TABLES, "damage"]
        }


def in_order(run_dir: Path) -> list[int]:
    """Correlation ids of a process's kernels in the order of the files."""
    shards_found = catalog.scan(run_dir.resolve()).shards["kernels"]
    paths = [shard.path for shard in shards_found if shard.process == PROCESS]
    return [i for path in paths for i in pq.ParquetFile(path).read(["correlation_id"])["correlation_id"].to_pylist()]


# --- without interruption --------------------------------------------------------------------------


def test_every_row_stays_in_its_place(run_dir: Path) -> None:
    before, order = content(run_dir), in_order(run_dir)
    done = compaction.compact(run_dir)
    assert names(run_dir) == names(run_dir, process=OTHER) == ["000001-000004"]
    assert names(run_dir, "samples") == ["000001-000003"]
    assert names(run_dir, "devices") == ["000001"]
    # Kernels and processes of both, samples of one.
    assert (done.made, done.merged, done.left) == (5, 4 + 4 + 2 + 2 + 3, [])
    assert content(run_dir) == before
    assert len(before["kernels"]) == 2 * LAUNCHES
    assert before["damage"] == []
    assert in_order(run_dir) == order
    assert compaction.compact(run_dir).merged == 0


def test_a_merged_shard_is_what_the_recorder_writes(run_dir: Path) -> None:
    compaction.compact(run_dir)
    (path,) = (run_dir / "kernels" / f"process={PROCESS}").iterdir()
    assert shards.digest(path.read_bytes()) == path.stem.rpartition("-")[2]
    file = pq.ParquetFile(path)
    assert file.schema_arrow.equals(KERNELS.arrow_schema(), check_metadata=False)
    assert file.schema_arrow.metadata[TABLE_KEY] == b"kernels"
    assert file.metadata.num_row_groups == 1
    start = file.metadata.row_group(0).column(0)
    assert (start.path_in_schema, start.compression, DELTA in start.encodings) == ("start_ns", "ZSTD", True)


def test_row_groups_are_full(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "ROW_GROUP_ROWS", 5)
    order = in_order(run_dir)
    compaction.compact(run_dir)
    (path,) = (run_dir / "kernels" / f"process={PROCESS}").iterdir()
    metadata = pq.ParquetFile(path).metadata
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [5, 5, 2]
    assert in_order(run_dir) == order


def test_a_merged_shard_is_as_old_as_its_latest_rows(run_dir: Path) -> None:
    folder = run_dir / "kernels" / f"process={PROCESS}"
    last = sorted(folder.iterdir())[-1].stat().st_mtime_ns
    compaction.compact(run_dir)
    assert next(folder.iterdir()).stat().st_mtime_ns == last


def test_the_recorder_goes_on_with_its_numbers(run_dir: Path) -> None:
    compaction.compact(run_dir)
    rows = pq.ParquetFile(next((run_dir / "kernels" / f"process={PROCESS}").iterdir())).read().slice(0, 2)
    for number in (5, 6):
        write_shard(run_dir, "kernels", PROCESS, number, rows.cast(KERNELS.arrow_schema()))
    assert content(run_dir)["damage"] == []
    compaction.compact(run_dir)
    assert names(run_dir) == ["000001-000006"]
    assert len(content(run_dir)["kernels"]) == 2 * LAUNCHES + 4


def test_large_shards_stay_alone(run_dir: Path) -> None:
    sizes = [path.stat().st_size for path in (run_dir / "kernels" / f"process={PROCESS}").iterdir()]
    compaction.compact(run_dir, target_bytes=2 * min(sizes))
    assert names(run_dir) == ["000001", "000002", "000003", "000004"]
    compaction.compact(run_dir, target_bytes=2 * max(sizes) + 2)
    assert names(run_dir) == ["000001-000002", "000003-000004"]


# --- what is missing or damaged --------------------------------------------------------------------


def test_a_lost_shard_is_still_missing_afterwards(run_dir: Path) -> None:
    next((run_dir / "kernels" / f"process={PROCESS}").glob("000002-*")).unlink()
    before = content(run_dir)
    assert "shard 2 is missing" in before["damage"][0]
    compaction.compact(run_dir)
    assert names(run_dir) == ["000001", "000003-000004"]
    assert content(run_dir) == before


def test_a_lost_merged_shard_is_missing_with_all_its_numbers(run_dir: Path) -> None:
    compaction.compact(run_dir)
    next((run_dir / "kernels" / f"process={PROCESS}").iterdir()).unlink()
    (damage,) = content(run_dir)["damage"]
    assert "shards 1 to 4 are missing" in damage


def test_a_damaged_shard_stays_as_it_is(run_dir: Path) -> None:
    path = next((run_dir / "kernels" / f"process={PROCESS}").glob("000003-*"))
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    before = content(run_dir)
    done = compaction.compact(run_dir)
    assert done.left == [f"kernels/process={PROCESS}/{path.name}: does not match the hash in its name"]
    assert names(run_dir) == ["000001-000002", "000003", "000004"]
    assert path.read_bytes() == data
    assert content(run_dir) == before


def test_numbers_used_twice_are_not_merged(run_dir: Path) -> None:
    folder = run_dir / "kernels" / f"process={PROCESS}"
    rows = pq.ParquetFile(next(folder.glob("000002-*"))).read().slice(1)
    write_shard(run_dir, "kernels", PROCESS, 2, rows.cast(KERNELS.arrow_schema()))
    before = content(run_dir)
    assert "more than once" in before["damage"][0]
    done = compaction.compact(run_dir)
    assert done.left == [f"kernels/process={PROCESS}: has shard numbers more than once"]
    assert len(list(folder.iterdir())) == 5
    assert content(run_dir) == before


def test_a_damaged_merged_shard_does_not_hide_what_it_was_made_of(run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir, tmp_path / "copy")
    before = content(run_dir)
    compaction.compact(run_dir)
    merged = next((run_dir / "kernels" / f"process={PROCESS}").iterdir())
    torn = tmp_path / "copy" / "kernels" / f"process={PROCESS}" / merged.name
    torn.write_bytes(merged.read_bytes()[:-1])
    after = content(tmp_path / "copy")
    assert after["kernels"] == before["kernels"]
    assert len(after["damage"]) == 1
    assert merged.name in after["damage"][0]
    done = compaction.compact(tmp_path / "copy")
    assert any("a merged shard is damaged" in reason for reason in done.left)
    assert content(tmp_path / "copy")["kernels"] == before["kernels"]


# --- interrupted -----------------------------------------------------------------------------------


def test_killed_at_any_step_each_row_is_read_once(run_dir: Path, tmp_path: Path) -> None:
    for table in ("samples", "processes"):  # fewer steps: the others are alike
        for folder in (run_dir / table).iterdir():
            if table == "samples" or folder.name.endswith(OTHER):
                shutil.rmtree(folder)
    shutil.rmtree(run_dir / "kernels" / f"process={OTHER}")
    before = content(run_dir)
    killed = killed_at_every_step(run_dir, tmp_path / "killed", "compact")
    # Two groups, of 4 and 2 shards: each is opened, aged, renamed, and its parts removed.
    assert len(killed) == 3 + 4 + 3 + 2 + 1
    left = set()
    for path in killed:
        assert content(path) == before, path.name
        left.add(tuple(names(path)))
        compaction.compact(path)
        assert names(path) == ["000001-000004"]
        assert not list(path.rglob("*.tmp"))
        assert content(path) == before, path.name
    assert ("000001", "000001-000004", "000002", "000003", "000004") in left
    assert ("000001-000004", "000003", "000004") in left


def test_an_unfinished_merge_is_removed_and_the_recorders_files_are_not(run_dir: Path) -> None:
    folder = run_dir / "kernels" / f"process={PROCESS}"
    (folder / ".merging-1-4.tmp").write_bytes(b"PAR1")
    (folder / ".000005-0123456789abcdef.parquet.tmp").write_bytes(b"PAR1")
    compaction.compact(run_dir)
    assert [path.name for path in folder.glob(".*")] == [".000005-0123456789abcdef.parquet.tmp"]


def test_a_full_disk_leaves_the_run_as_it_was(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    before = content(run_dir)
    monkeypatch.setattr(compaction.os, "fsync", full)
    with pytest.raises(RunError, match=r"cannot compact: No space left on device\. Nothing is lost"):
        compaction.compact(run_dir)
    assert content(run_dir) == before
    assert not list(run_dir.rglob("*.tmp"))


def test_two_at_once_do_not_meet(run_dir: Path) -> None:
    with compaction._locked(run_dir), pytest.raises(RunError, match="is being compacted by another process"):
        compaction.compact(run_dir)
    assert names(run_dir) == ["000001", "000002", "000003", "000004"]


# --- readers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "between"])
def test_opening_while_shards_are_merged_sees_each_row_once(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Merged after the listing; or in the middle of one, so that neither the parts nor the whole were listed."""
    before = content(run_dir)
    listed = catalog._list
    calls = 0

    def list_and_merge(root: Path, damage: list[catalog.Damage]) -> list[Shard]:
        nonlocal calls
        calls += 1
        found = listed(root, damage)
        if calls == 1:
            compaction.compact(root)
            if when == "between":
                return [shard for shard in found if shard.table != "kernels"]
        return found

    monkeypatch.setattr(catalog, "_list", list_and_merge)
    assert content(run_dir) == before
    assert calls > 2


def test_top_counts_merged_launches_once(run_dir: Path, tmp_path: Path) -> None:
    folder = run_dir / "kernels" / f"process={PROCESS}"
    later = sorted(folder.iterdir())[2:]
    (tmp_path / "later").mkdir()
    for path in later:
        path.rename(tmp_path / "later" / path.name)
    live = Live(run_dir)
    live.update()
    assert sum(totals.launches for totals in live.classes.values()) == LAUNCHES + 6
    for path in later:
        (tmp_path / "later" / path.name).rename(path)
    compaction.compact(run_dir)
    live.update()
    (totals,) = live.classes.values()
    assert (totals.launches, totals.timed) == (2 * LAUNCHES, 2 * LAUNCHES - 2)
    assert totals.total_ns == 2 * (sum(100 + number for number in range(LAUNCHES)) - 105)
    rows = pa.Table.from_pylist([{"kernel_class_id": 1, "device_id": 0}], schema=KERNELS.arrow_schema())
    write_shard(run_dir, "kernels", PROCESS, 5, rows)
    compaction.compact(run_dir)
    live.update()
    assert (live.classes[1].launches, totals.launches, live.unreadable) == (1, 2 * LAUNCHES, 0)


def test_outermost_shards() -> None:
    def shard(first: int, last: int = 0, digest: str = "a") -> Shard:
        return Shard(Path(f"{first}-{last}-{digest}"), "kernels", PROCESS, first, digest, last)

    parts = [shard(1), shard(2, 4), shard(3), shard(1, 4), shard(4, 6), shard(7), shard(7, digest="b")]
    assert shards.outermost(parts) == [shard(1, 4), shard(4, 6), shard(7), shard(7, digest="b")]
    assert shards.outermost([shard(1), shard(2)]) == [shard(1), shard(2)]


@pytest.mark.parametrize("name", ["000004-000002-0123456789abcdef.parquet", "000001-2-0123456789abcdef.parquet"])
def test_names_that_no_merge_gives(name: str) -> None:
    assert shards.parse(Path(name), "kernels", PROCESS) is None


# --- the command -----------------------------------------------------------------------------------


def test_the_command_says_what_it_did(run_dir: Path) -> None:
    first = CliRunner().invoke(main, ["compact", str(run_dir)])
    assert first.exit_code == 0, first.output
    assert first.stdout.startswith("Merged 15 shards into 5 shards: ")
    second = CliRunner().invoke(main, ["compact", str(run_dir)])
    assert (second.exit_code, second.stdout) == (0, "Nothing to merge.\n")


def test_the_command_refuses_what_is_no_run(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["compact", str(tmp_path)])
    assert done.exit_code == 1
    assert done.stderr.startswith(f"nanalyze: error: {tmp_path}: is empty")


def test_the_command_merges_up_to_the_size_of_the_library() -> None:
    from nanalyze.commands import compact as command

    assert command.TARGET_MB << 20 == compaction.TARGET_BYTES
