"""Rolling old launches up: what the sums say, what stays, and that no interruption counts a launch twice or never."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from trace import PROCESS, T0, Trace, arrow_table
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner
from killed import killed_at_every_step

import nanalyze.analysis as na
from nanalyze.analysis.compare import sample
from nanalyze.analysis.compare.sample import CompareError
from nanalyze.analysis.live import newest
from nanalyze.analysis.report import collect, headline
from nanalyze.commands import info, main
from nanalyze.rundir import compaction, rollup, runfile, shards
from nanalyze.rundir.errors import RunError
from nanalyze.rundir.schema import DELTA, KERNEL_MINUTES, KERNELS, TABLES
from nanalyze.rundir.shards import Shard, write_shard

OTHER = "node0-1-101"
MINUTE = 60 * 10**9
# T0 is 20 s into a minute, 13 min 20 s into an hour.
ALL = T0 + 10**15
SUMS = ("top_kernels", "kernel_durations", "verdict_shares", "losses")


def build(run_dir: Path, shards: int = 4) -> Path:
    """Two processes with 2 x 40 launches over 80 minutes in 4 shards each: streams that overlap, a graph, a replay."""
    trace = Trace(run_dir)
    for process in (PROCESS, OTHER):
        trace.device(process)
        gemm = trace.kernel_class("gemm", (1320, 1, 1), (256, 1, 1), process=process)
        copy = trace.kernel_class("copy", (8, 1, 1), process=process)
        for number in range(40):
            at = number * 2 * MINUTE
            duration = {5: None, 6: 0}.get(number, 100_000 + 1_000 * number)
            trace.kernel(gemm, at, duration, process=process, graph_id=3 if number == 7 else None)
            trace.kernel(copy, at + 40_000, 20_000 + number, process=process, stream_id=8)
        trace.measure(gemm, [{"compute_pct": 90.0, "memory_pct": 30.0, "duration_ns": 123_456.0}], process)
        trace.range("step", 0, 90 * MINUTE, process=process)
        trace.process_row(process, kernels_written=81)
    trace.write(shards=shards)
    return run_dir


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return build(tmp_path / "run")


def sums(run_dir: Path) -> dict[str, Any]:
    """What the queries say that need sums only, and the damage."""
    with na.open(run_dir) as run:
        found: dict[str, Any] = {name: run.query(name).to_dict("records") for name in SUMS}
        return {**found, "damage": run.damage().to_dict("records")}


def totals(run_dir: Path) -> list[tuple[Any, ...]]:
    """Launches and time by process and class, and the number of damages: what takes no time to ask."""
    with na.open(run_dir) as run:
        return [*(tuple(row.values()) for row in run.arrow(TOTALS).to_pylist()), ("damage", run.damage_count)]


TOTALS = """
SELECT process, kernel_class_id, sum(launches), sum(launches_timed), sum(total_ns)
FROM (
    SELECT process, kernel_class_id, launches, launches_timed, total_ns FROM _class_devices
    UNION ALL
    SELECT process, kernel_class_id, launches, launches_timed, total_ns FROM _rolled_up
)
GROUP BY process, kernel_class_id
ORDER BY process, kernel_class_id
"""


def names(run_dir: Path, table: str = "kernels", process: str = PROCESS) -> list[str]:
    folder = run_dir / table / f"process={process}"
    return sorted(path.name.rpartition("-")[0] for path in folder.glob("0*")) if folder.is_dir() else []


def files(run_dir: Path) -> list[str]:
    return sorted(path.relative_to(run_dir).as_posix() for path in run_dir.rglob("*") if path.is_file())


def rows(run_dir: Path, query: str) -> list[tuple[Any, ...]]:
    with na.open(run_dir) as run:
        return [tuple(row.values()) for row in run.arrow(query).to_pylist()]


# --- sums ------------------------------------------------------------------------------------------


def test_queries_of_sums_say_the_same_afterwards(run_dir: Path) -> None:
    before = sums(run_dir)
    assert [row["launches"] for row in before["top_kernels"]] == [82, 80]
    done = compaction.roll_up(run_dir, ALL)
    assert (done.shards, done.launches, done.left) == (8, 162, [])
    assert names(run_dir) == names(run_dir, process=OTHER) == []
    assert names(run_dir, "kernel_minutes") == names(run_dir, "kernel_minutes", OTHER) == ["000001-000004"]
    assert sums(run_dir) == before
    assert rows(run_dir, "SELECT count(*) FROM kernels") == [(0,)]


def test_a_part_rolled_up_and_the_rest_add_up(run_dir: Path) -> None:
    before = sums(run_dir)
    # The second shard of each process ends with launch 41, 40 minutes and 100 us after the first.
    assert compaction.roll_up(run_dir, T0 + 41 * MINUTE).shards == 4
    assert names(run_dir) == ["000003", "000004"]
    assert names(run_dir, "kernel_minutes") == ["000001-000002"]
    assert sums(run_dir) == before
    assert compaction.roll_up(run_dir, ALL).shards == 4
    assert names(run_dir, "kernel_minutes") == ["000001-000002", "000003-000004"]
    assert compaction.compact(run_dir).made > 0
    assert names(run_dir, "kernel_minutes") == ["000001-000004"]
    assert sums(run_dir) == before


def test_it_is_idempotent(run_dir: Path) -> None:
    compaction.roll_up(run_dir, ALL)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    done = compaction.roll_up(run_dir, ALL)
    assert (done.shards, done.launches, done.end_ns) == (0, 0, None)
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_a_minute_has_the_sums_of_its_launches(run_dir: Path) -> None:
    compaction.roll_up(run_dir, ALL)
    # Launch 3 of each class: both start 6 minutes after T0, the copy 40 us after the gemm, which takes 103 us.
    assert rows(
        run_dir,
        "SELECT c.name, m.minute_ns, launches, total_ns, overlapped_ns, shortest_ns, longest_ns, p50_ns, p99_ns "
        f"FROM kernel_minutes AS m JOIN kernel_classes AS c USING (kernel_class_id) "
        f"WHERE m.process = '{PROCESS}' AND minute_ns BETWEEN {T0 + 5 * MINUTE} AND {T0 + 6 * MINUTE} ORDER BY name",
    ) == [
        ("copy", T0 + 6 * MINUTE - 20 * 10**9, 1, 20_003, 20_003, 20_003, 20_003, 20_003.0, 20_003.0),
        ("gemm", T0 + 6 * MINUTE - 20 * 10**9, 1, 103_000, 0, 103_000, 103_000, 103_000.0, 103_000.0),
    ]
    assert rows(
        run_dir,
        "SELECT sum(launches), sum(launches_untimed), sum(launches_in_graphs), sum(total_ns - overlapped_ns) "
        f"FROM kernel_minutes WHERE process = '{PROCESS}'",
    ) == [(81, 1, 1, sum(100_000 + 1_000 * n for n in range(40) if n not in (5, 6)) + 20_005 + 20_006 + 123_456)]


def test_percentiles_of_any_hours_follow_from_histograms() -> None:
    random = np.random.default_rng(1)
    duration = np.exp(random.normal(9, 0.5, 20_000)).astype(np.int64)
    start = T0 + np.sort(random.integers(0, 120 * MINUTE, len(duration)))
    made = rollup.minutes(launches(start, duration))
    assert sum(made["launches"].to_pylist()) == len(duration)
    hours: dict[int, int] = {}
    for pairs in filter(None, made["histogram"].to_pylist()):
        for pair in pairs:
            hours[pair["bin"]] = hours.get(pair["bin"], 0) + pair["launches"]
    # T0 is in the middle of an hour: three hours are begun.
    assert made["histogram"].null_count == made.num_rows - 3
    assert sum(hours.values()) == len(duration)
    bins = np.repeat(sorted(hours), [hours[one] for one in sorted(hours)])
    for percent in (1, 50, 90, 99, 99.9):
        exact = np.quantile(duration, percent / 100, method="inverted_cdf")
        assert np.exp((bins[int(np.ceil(percent / 100 * len(bins))) - 1] + 0.5) / 92) == pytest.approx(exact, rel=0.006)
    for row in made.to_pylist()[:5]:
        inside = duration[(start >= row["minute_ns"]) & (start < row["minute_ns"] + MINUTE)]
        assert (row["total_ns"], row["shortest_ns"], row["longest_ns"]) == (inside.sum(), inside.min(), inside.max())
        median = np.quantile(inside, 0.5, method="inverted_cdf")
        assert np.exp((row["p50_bin"] + 0.5) / 92) == pytest.approx(median, rel=0.006)


def launches(start: Any, duration: Any, **columns: Any) -> pa.Table:
    number = len(start)
    found = {"start_ns": start, "duration_ns": duration, "kernel_class_id": np.ones(number, np.int64), **columns}
    found.setdefault("device_id", np.zeros(number, np.int32))
    arrays = [pa.array(found[f.name], f.type) if f.name in found else pa.nulls(number, f.type) for f in
              KERNELS.arrow_schema()]  # fmt: skip
    return pa.table(arrays, names=KERNELS.column_names)


def test_what_is_not_believed_is_counted_all_the_same() -> None:
    rows = launches(
        [T0, T0, -5, None, None], [-1, 2 * 10**15, 7, 8, None], queued_ns=[None, None, T0 + MINUTE, T0, None]
    )
    found = [
        (row["minute_ns"] - T0 + 20 * 10**9, row["launches"], row["launches_untimed"], row["total_ns"], row["p50_bin"])
        for row in rollup.minutes(rows).to_pylist()
    ]
    # Without a start the time of the call counts, without either the first minute.
    assert found == [(0, 4, 3, 8, 191), (MINUTE, 1, 0, 7, 179)]
    assert rollup.latest(rows) == T0 + MINUTE
    assert rollup.minutes(rows.slice(0, 0)).num_rows == 0
    assert rollup.latest(rows.slice(4)) == 0


def test_overlap_is_told_by_device() -> None:
    made = rollup.minutes(launches([T0, T0 + 5, T0 + 6, T0 + 30], [10, 10, 2, 5], device_id=[0, 0, 1, 0]))
    assert [(row["device_id"], row["total_ns"], row["overlapped_ns"]) for row in made.to_pylist()] == [
        (0, 25, 5),
        (1, 2, 0),
    ]


def test_a_rolled_up_shard_is_encoded_as_declared(run_dir: Path) -> None:
    compaction.roll_up(run_dir, ALL)
    (path,) = (run_dir / "kernel_minutes" / f"process={PROCESS}").iterdir()
    assert shards.digest(path.read_bytes()) == path.stem.rpartition("-")[2]
    file = pa.parquet.ParquetFile(path)
    assert file.schema_arrow.equals(KERNEL_MINUTES.arrow_schema(), check_metadata=True)
    group = file.metadata.row_group(0)
    encodings = {group.column(at).path_in_schema: group.column(at).encodings for at in range(group.num_columns)}
    assert DELTA in encodings["total_ns"]
    assert DELTA in encodings["histogram.list.element.bin"]


# --- what stays, and what is refused ---------------------------------------------------------------


def test_only_the_earliest_whole_shards_are_rolled_up(run_dir: Path) -> None:
    # The first shard's last launch ends 20 minutes and 40 to 60 us after T0.
    assert compaction.roll_up(run_dir, T0 + 20 * MINUTE + 50_000).shards == 0
    assert runfile.read(run_dir)["format_version"] == 1
    assert compaction.roll_up(run_dir, T0 + 21 * MINUTE).shards == 2
    assert names(run_dir) == ["000002", "000003", "000004"]
    assert runfile.read(run_dir)["format_version"] == 2


def test_a_damaged_shard_stays_and_the_others_are_rolled_up(run_dir: Path) -> None:
    path = next((run_dir / "kernels" / f"process={PROCESS}").glob("000002-*"))
    path.write_bytes(path.read_bytes()[:-1])
    before = sums(run_dir)
    done = compaction.roll_up(run_dir, ALL)
    assert done.left == [f"kernels/process={PROCESS}/{path.name}: does not match the hash in its name"]
    assert names(run_dir) == ["000002"]
    assert names(run_dir, "kernel_minutes") == ["000001", "000003-000004"] or names(run_dir, "kernel_minutes") == [
        "000001-000001", "000003-000004",
    ]  # fmt: skip
    after = sums(run_dir)
    assert after["top_kernels"] == before["top_kernels"]
    assert len(after["damage"]) == 1


def test_a_lost_rolled_up_shard_is_missed(run_dir: Path) -> None:
    compaction.roll_up(run_dir, T0 + 41 * MINUTE)
    next((run_dir / "kernel_minutes" / f"process={PROCESS}").iterdir()).unlink()
    (damage,) = sums(run_dir)["damage"]
    assert (damage["table_name"], damage["problem"]) == ("kernels", "shards 1 to 2 are missing")


def test_a_damaged_rolled_up_shard_does_not_hide_its_launches(run_dir: Path, tmp_path: Path) -> None:
    before = sums(run_dir)
    shutil.copytree(run_dir, tmp_path / "copy")
    compaction.roll_up(run_dir, ALL)
    made = next((run_dir / "kernel_minutes" / f"process={PROCESS}").iterdir())
    torn = tmp_path / "copy" / "kernel_minutes" / f"process={PROCESS}" / made.name
    torn.parent.mkdir(parents=True)
    torn.write_bytes(made.read_bytes()[:-1])
    after = sums(tmp_path / "copy")
    assert after["top_kernels"] == before["top_kernels"]
    assert [damage["path"] for damage in after["damage"]] == [f"kernel_minutes/process={PROCESS}/{made.name}"]
    done = compaction.roll_up(tmp_path / "copy", ALL)
    assert any("a merged shard is damaged" in reason for reason in done.left)
    assert names(tmp_path / "copy") == ["000001", "000002", "000003", "000004"]


def test_the_recorder_goes_on_with_its_numbers(run_dir: Path) -> None:
    compaction.roll_up(run_dir, ALL)
    schema = KERNELS.arrow_schema()
    new = pa.Table.from_pylist([{"start_ns": ALL, "duration_ns": 5, "kernel_class_id": 1, "device_id": 0}], schema)
    write_shard(run_dir, "kernels", PROCESS, 5, new)
    assert sums(run_dir)["damage"] == []
    assert rows(run_dir, "SELECT count(*) FROM kernels") == [(1,)]
    assert newest(run_dir).sql("SELECT count(*) AS n FROM kernel_minutes")["n"][0] == 0
    assert compaction.roll_up(run_dir, ALL + MINUTE).shards == 1
    assert rows(run_dir, "SELECT sum(launches) FROM kernel_minutes") == [(163,)]


def test_an_older_reader_refuses(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compaction.roll_up(run_dir, ALL)
    monkeypatch.setattr(runfile, "FORMAT_VERSION", 1)
    with pytest.raises(RunError, match=r"has format version 2, this nanalyze reads versions 1 to 1\. Upgrade"):
        na.open(run_dir)


def test_time_that_was_sampled_is_refused_unless_it_may_be_lost(run_dir: Path) -> None:
    sample = {"device_id": 0, "start_ns": T0 + 30 * MINUTE, "end_ns": T0 + 31 * MINUTE, "counter_group": 0, "inst": 5.0}
    write_shard(run_dir, "samples", PROCESS, 1, arrow_table(TABLES["samples"], [sample]))
    with pytest.raises(RunError, match="holds samples of that time"):
        compaction.roll_up(run_dir, ALL)
    assert names(run_dir) == ["000001", "000002", "000003", "000004"]
    assert compaction.roll_up(run_dir, T0 + 21 * MINUTE).shards == 2  # earlier than the samples
    assert compaction.roll_up(run_dir, ALL, lose_samples=True).shards == 6
    # Nobody takes the sample for one of an idle device.
    assert rows(run_dir, "SELECT samples, samples_dropped FROM attribution_quality") == [(0, 1)]


def test_time_that_was_rolled_up_counts_as_not_recorded(run_dir: Path) -> None:
    compaction.roll_up(run_dir, T0 + 41 * MINUTE)
    first, last = T0 - 20 * 10**9, T0 + 40 * MINUTE - 20 * 10**9 + MINUTE
    assert rows(run_dir, "SELECT * FROM _pause_spans ORDER BY process") == [
        (PROCESS, first, last),
        (OTHER, first, last),
    ]


def test_two_at_once_do_not_meet(run_dir: Path) -> None:
    with compaction._locked(run_dir), pytest.raises(RunError, match="is being compacted by another process"):
        compaction.roll_up(run_dir, ALL)


def test_large_groups_are_rolled_up_piece_by_piece(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sums(run_dir)
    monkeypatch.setattr(compaction, "ROLL_UP_ROWS", 45)
    compaction.roll_up(run_dir, ALL)
    assert names(run_dir, "kernel_minutes") == ["000001-000002", "000003-000004"]
    assert sums(run_dir) == before


# --- killed ----------------------------------------------------------------------------------------


def test_killed_at_any_step_each_launch_counts_once(run_dir: Path, tmp_path: Path) -> None:
    for table in ("kernels", "kernel_classes", "devices", "ranges", "exact"):  # the other process is alike
        shutil.rmtree(run_dir / table / f"process={OTHER}")
    before = totals(run_dir)
    events = ("os.rename", "os.remove", "os.utime", "os.mkdir")
    killed = killed_at_every_step(run_dir, tmp_path / "killed", "roll_up", ALL, events=events)
    # run.json is opened, renamed, its draft removed; two folders are made in three attempts; the shard is opened,
    # aged and renamed; its four parts are removed; the last run is not killed.
    assert len(killed) == 3 + 3 + 3 + 4 + 1
    compaction.roll_up(run_dir, ALL)
    whole = files(run_dir)
    both = 0
    for path in killed:
        assert totals(path) == before, path.name
        both += bool(names(path)) and bool(names(path, "kernel_minutes"))
        compaction.roll_up(path, ALL)
        assert files(path) == whole, path.name  # the hash of its content is in a shard's name
    assert both == 4  # the moments in which launches and their sums were both there


def test_killed_while_it_works_each_launch_counts_once(tmp_path: Path) -> None:
    """The same at moments of the clock instead of calls, in processes of their own."""
    source = build(tmp_path / "source", shards=20)
    before = totals(source)
    code = "import sys; from nanalyze.rundir import compaction as c\nfrom pathlib import Path\nc.ROLL_UP_ROWS = 5\n"
    code += "import pyarrow.parquet; print('ready', flush=True)\n"
    code += "c.roll_up(Path(sys.argv[1]), int(sys.argv[2])); print('done', flush=True)"
    states = set()
    for attempt in range(3):
        run_dir = tmp_path / str(attempt)
        shutil.copytree(source, run_dir)
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(run_dir), str(ALL)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        while process.poll() is None and len(names(run_dir, "kernel_minutes")) < 1 + 5 * attempt:
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        states.add(len(names(run_dir)))
        assert totals(run_dir) == before
        compaction.roll_up(run_dir, ALL)
        assert names(run_dir) == []
        assert totals(run_dir) == before
    assert len(states) == 3


# --- commands --------------------------------------------------------------------------------------


def test_the_command_rolls_up_then_merges(run_dir: Path) -> None:
    done = CliRunner().invoke(main, ["compact", str(run_dir), "--roll-up-older-than", "7d"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("Rolled 162 launches until 2023-11-14 23:32 UTC up into ")
    assert "\nMerged " in done.stdout
    again = CliRunner().invoke(main, ["compact", str(run_dir), "--roll-up-older-than", "7d"])
    assert again.stdout == "Nothing to roll up.\nNothing to merge.\n"


@pytest.mark.parametrize("age", ["7", "d", "-1d", "1.5d", "7 d", "7y", ""])
def test_the_command_says_what_an_age_is(run_dir: Path, age: str) -> None:
    done = CliRunner().invoke(main, ["compact", str(run_dir), f"--roll-up-older-than={age}"])
    assert done.exit_code == 2
    assert "is no age. Write a whole number with a unit of s, m, h, d, w, as in 7d." in done.stderr
    assert names(run_dir) == ["000001", "000002", "000003", "000004"]


def test_the_command_wants_both_options(run_dir: Path) -> None:
    done = CliRunner().invoke(main, ["compact", str(run_dir), "--lose-samples"])
    assert done.exit_code == 2
    assert "goes with --roll-up-older-than" in done.stderr


def test_info_says_what_was_rolled_up(run_dir: Path) -> None:
    compaction.roll_up(run_dir, T0 + 41 * MINUTE)
    done = CliRunner().invoke(main, ["info", str(run_dir)])
    assert (
        "  84 launches from 2023-11-14 22:13 to 2023-11-14 22:54 UTC are kept as sums a minute (view `kernel_minutes`)"
    ) in done.stdout
    content = json.loads(CliRunner().invoke(main, ["info", str(run_dir), "--json"]).stdout)
    assert content["rolled_up"]["launches"] == 84
    assert [row["kernels"] for row in content["processes"]] == [81, 81]
    with na.open(build(run_dir.parent / "other")) as run:
        assert info.summary(run)["rolled_up"] is None


def test_the_report_says_what_was_rolled_up(run_dir: Path) -> None:
    compaction.roll_up(run_dir, T0 + 41 * MINUTE)
    with na.open(run_dir) as run:
        (recording,) = run.arrow(collect.ROLLED_UP).to_pylist()
    known = {"exact_launches": 0, "damage": 0, **recording}
    (line,) = headline.caveats({"launches": 162, "launches_untimed": 0, "classes_with_counters": 1}, known)
    assert line.startswith(
        "84 launches from 2023-11-14 22:13:00 UTC to 2023-11-14 22:54:00 UTC were rolled up: they count in the sums"
    )


def test_comparing_says_why_it_cannot(run_dir: Path) -> None:
    compaction.roll_up(run_dir, ALL)
    with na.open(run_dir) as run, pytest.raises(CompareError, match=r"were rolled up.*Use nanalyze trend\."):
        sample.read(run, None)


def test_a_shard_replaces_what_it_was_rolled_up_from() -> None:
    def shard(table: str, first: int, last: int) -> Shard:
        return Shard(Path(f"{table}-{first}-{last}"), table, PROCESS, first, "a", last)

    minutes, same = shard("kernel_minutes", 1, 4), shard("kernels", 1, 4)
    parts, rest = [shard("kernels", 1, 2), shard("kernels", 4, 4)], shard("kernels", 5, 6)
    assert shards.outermost([*parts, same, minutes, rest]) == [minutes, rest]
    wider = shard("kernels", 1, 6)
    assert shards.outermost([minutes, wider]) == [wider]
    assert shards.outermost([shard("exact", 1, 4), minutes]) == [shard("exact", 1, 4), minutes]
