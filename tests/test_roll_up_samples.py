"""Rolling samples up: what windows say together, beside the same run not rolled up and the truth."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from trace import PROCESS, T0
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from simulator import Job, Simulated, simulate

import nanalyze.analysis as na
from nanalyze.analysis import catalog, rolled_samples
from nanalyze.commands import main
from nanalyze.rundir import compaction, runfile
from nanalyze.rundir.errors import RunError
from nanalyze.rundir.schema import SAMPLED_WINDOWS
from nanalyze.rundir.shards import write_shard

ALL = T0 + 10**15
SECOND = 10**9
SHARDS = 4
SECONDS = 8
KEYS = ["kernel_class_id", "counter"]


@pytest.fixture(scope="module")
def job() -> Simulated:
    return simulate(Job(classes=5, seconds=SECONDS, mean_us=(60.0, 400.0), variation=0.1), seed=3)


@pytest.fixture(scope="module")
def source(job: Simulated, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job's run with launches and samples in four shards of two seconds each."""
    run_dir = tmp_path_factory.mktemp("simulated") / "run"
    job.write(run_dir)
    for table in ("kernels", "samples"):
        (path,) = (run_dir / table).glob("*/*.parquet")
        rows = pq.ParquetFile(path).read()
        path.unlink()
        second = (rows.column("start_ns").to_numpy() - T0) // (SECONDS // SHARDS * SECOND)
        for number in range(SHARDS):
            write_shard(run_dir, table, PROCESS, number + 1, rows.filter(pa.array(second == number)))
    return run_dir


@pytest.fixture
def run_dir(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(compaction, "WINDOW_ROWS", 1)  # a window a shard
    return Path(shutil.copytree(source, tmp_path / "run"))


@pytest.fixture(scope="module")
def whole(source: Path) -> Any:
    """Counters of the run as it was recorded."""
    return counters(source)


def counters(run_dir: Path) -> Any:
    with na.open(run_dir) as run:
        assert run.damage_count == 0
        assert set(run.counters()["method"]) == {"sampled"}
        return run.sql("SELECT * FROM raw.sampled_counters ORDER BY kernel_class_id, counter").set_index(KEYS)


def names(run_dir: Path, table: str) -> list[str]:
    return sorted(path.name.rpartition("-")[0] for path in (run_dir / table).glob("*/*.parquet"))


def roll_up(run_dir: Path, before_ns: int = ALL) -> compaction.RolledUp:
    return compaction.roll_up(run_dir, before_ns, attribute=rolled_samples.windows)


# --- what windows say ----------------------------------------------------------------------------------


def test_one_window_says_what_the_samples_did(run_dir: Path, whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "WINDOW_ROWS", 10**6)
    done = roll_up(run_dir)
    assert (done.shards, done.samples) == (2 * SHARDS, 7999)
    assert names(run_dir, "samples") == names(run_dir, "kernels") == []
    assert names(run_dir, "sampled_windows") == ["000001-000004"]
    found = counters(run_dir)
    assert list(found.index) == list(whole.index)
    for column, share in (("value", 1e-5), ("low", 2e-4), ("high", 2e-4), ("standard_error", 2e-4)):
        np.testing.assert_allclose(found[column].astype(float), whole[column].astype(float), rtol=share, atol=1e-9)
    assert (found["launches"] == whole["launches"]).all()
    assert (found["missing"].fillna("") == whole["missing"].fillna("")).all()


def test_four_windows_say_the_same_within_their_errors(run_dir: Path, whole: Any, job: Simulated) -> None:
    roll_up(run_dir)
    assert names(run_dir, "sampled_windows") == [f"00000{n}-00000{n}" for n in (1, 2, 3, 4)]
    found = counters(run_dir)
    both = whole.join(found.add_suffix("_windows"), how="inner")
    assert len(both) >= len(whole)
    off = ((both["value_windows"] - both["value"]) / both["standard_error"]).abs().dropna()
    assert off.median() < 0.5
    assert off.quantile(0.95) < 1.5
    width = ((both["high_windows"] - both["low_windows"]) / (both["high"] - both["low"])).replace([np.inf], np.nan)
    assert 0.9 < width.median() < 1.1
    holds = []
    for counter in ("inst", "dram_read_bytes"):
        for class_id in job.class_ids():
            own = job.kernel_class == class_id - 1000
            truth = job.truth(counter, class_id - 1000) * job.duration[own].mean()
            row = found.loc[(class_id, counter)]
            holds.append(row["low"] <= truth <= row["high"])
    assert np.mean(holds) >= 0.9


def test_verdicts_stay(run_dir: Path) -> None:
    def verdicts() -> list[tuple[object, ...]]:
        with na.open(run_dir) as run:
            frame = run.sql("SELECT kernel_class_id, bound, method, launches FROM verdicts ORDER BY 1")
        return list(frame.itertuples(index=False, name=None))

    before = verdicts()
    assert {method for _, _, method, _ in before} == {"sampled"}
    roll_up(run_dir)
    assert verdicts() == before


def test_windows_and_samples_that_are_still_there(run_dir: Path, whole: Any) -> None:
    paths = sorted((run_dir / "kernels").glob("*/*.parquet"))
    launches = pa.concat_tables([pq.ParquetFile(path).read() for path in paths])
    for path in paths:
        path.unlink()
    write_shard(run_dir, "kernels", PROCESS, 1, launches)  # holds younger ones, so all of it stays
    done = roll_up(run_dir, T0 + 5 * SECOND)
    assert names(run_dir, "samples") == ["000003", "000004"]
    assert names(run_dir, "kernels") == ["000001"]
    assert done.end_ns == T0 + 4 * SECOND
    found = counters(run_dir)
    both = whole.join(found.add_suffix("_both"), how="inner")
    off = ((both["value_both"] - both["value"]) / both["standard_error"]).abs().dropna()
    assert off.median() < 0.5
    assert (both["launches_both"] - both["launches"]).abs().max() <= 4  # that met two windows
    with na.open(run_dir) as run:
        assert run.sql("SELECT count(DISTINCT start_ns) AS n FROM sampled_windows")["n"][0] == 2
        assert run.attribution_quality()["samples"].unique().tolist() == [3999]


def test_launches_of_the_first_samples_that_stay_do_so_too(run_dir: Path) -> None:
    roll_up(run_dir, T0 + 5 * SECOND)
    # The third file of samples holds younger ones. A launch that meets the first of them is in the second file.
    assert names(run_dir, "samples") == ["000003", "000004"]
    assert names(run_dir, "kernels") == ["000002", "000003", "000004"]
    # Of the minute whose launches are in part sums nothing is attributed.
    with na.open(run_dir) as run:
        assert run.attribution_quality()["samples_dropped"].unique().tolist() == [3999]


# --- safety ----------------------------------------------------------------------------------------------


def test_launches_never_go_before_the_samples_of_their_time(run_dir: Path) -> None:
    def fails(run: Path, shards: object) -> pa.Table:
        raise RunError("no")

    with pytest.raises(RunError):
        compaction.roll_up(run_dir, ALL, attribute=fails)
    assert len(names(run_dir, "samples")) == len(names(run_dir, "kernels")) == SHARDS
    assert runfile.read(run_dir)["format_version"] == 1


def test_interrupted_anywhere_each_sample_counts_once(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Each call that gives a file its name or removes one is the last one once."""
    row = {"start_ns": 1, "end_ns": 2, "kernel_class_id": 1000, "counter": "inst", "launches": 1, "time_ns": 1}
    row |= {"value": 1.0, "standard_error": 1.0, "lasting_error": 0.01, "low": 0.0, "high": 3.0, "missing": None}

    def quick(run_dir: Path, shards: Any) -> pa.Table:
        schema = SAMPLED_WINDOWS.arrow_schema()
        return pa.table([[row[field.name]] for field in schema], schema=schema)

    monkeypatch.setattr(compaction, "WINDOW_ROWS", 4_000)
    finished = Path(shutil.copytree(source, tmp_path / "finished"))
    compaction.roll_up(finished, ALL, attribute=quick)
    expected = {table: names(finished, table) for table in ("samples", "sampled_windows", "kernels", "kernel_minutes")}
    assert len(expected["sampled_windows"]) == 2
    replace, unlink = os.replace, Path.unlink
    for number in range(1, 40):
        run_dir = Path(shutil.copytree(source, tmp_path / str(number)))
        left = number

        def step() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

        monkeypatch.setattr(os, "replace", lambda *words: (step(), replace(*words)))
        monkeypatch.setattr(Path, "unlink", lambda path, *words, **named: (step(), unlink(path, *words, **named)))
        try:
            compaction.roll_up(run_dir, ALL, attribute=quick)
            was_interrupted = False
        except KeyboardInterrupt:
            was_interrupted = True
        monkeypatch.setattr(os, "replace", replace)
        monkeypatch.setattr(Path, "unlink", unlink)
        found = catalog.scan(run_dir, verify=False)
        assert not found.damage
        used = [shard.span for table in ("samples", "sampled_windows") for shard in found.shards[table]]
        assert sorted(n for first, last in used for n in range(first, last + 1)) == [1, 2, 3, 4]
        compaction.roll_up(run_dir, ALL, attribute=quick)
        assert {table: names(run_dir, table) for table in expected} == expected, number
        if not was_interrupted:
            break
    assert number > 10


def test_a_damaged_file_of_samples_stays_and_holds_nothing_up(run_dir: Path) -> None:
    damaged = sorted((run_dir / "samples").glob("*/*.parquet"))[1]
    data = bytearray(damaged.read_bytes())
    data[100] ^= 1
    damaged.write_bytes(data)
    done = roll_up(run_dir)
    assert done.left == [f"samples/process={PROCESS}/{damaged.name}: does not match the hash in its name"]
    assert names(run_dir, "samples") == ["000002"]
    assert names(run_dir, "kernels") == []
    assert names(run_dir, "sampled_windows") == ["000001-000001", "000003-000003", "000004-000004"]


def test_windows_merge_without_loss(run_dir: Path) -> None:
    roll_up(run_dir)
    before = counters(run_dir)
    compaction.compact(run_dir)
    assert names(run_dir, "sampled_windows") == ["000001-000004"]
    assert counters(run_dir).equals(before)


def test_an_older_reader_refuses(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roll_up(run_dir, T0 + 3 * SECOND)
    monkeypatch.setattr(runfile, "FORMAT_VERSION", 2)
    with pytest.raises(RunError, match="has format version 3, this nanalyze reads versions 1 to 2"):
        na.open(run_dir)


def test_the_command(run_dir: Path) -> None:
    done = CliRunner().invoke(main, ["compact", str(run_dir), "--roll-up-older-than", "1d"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("Rolled ")
    assert " launches and 7,999 samples until 20" in done.stdout
    assert names(run_dir, "samples") == []


# --- arithmetic ------------------------------------------------------------------------------------------


Part = tuple[float, float | None, float, float, float]  # value, standard error, low, high, weight
LASTING = 0.01  # of the value


def together(parts: list[Part], counter: str = "dram_pct", **same: object) -> dict[str, Any]:
    """What windows of one counter say; percentages weigh by time."""
    columns = ("value", "standard_error", "low", "high", "time_ns")
    rows = [{"kernel_class_id": 1, "counter": counter, "launches": 1, "missing": None, **same} for _ in parts]
    for row, part in zip(rows, parts, strict=True):
        row.update(zip(columns, part, strict=True))
        row["lasting_error"] = None if part[1] is None else LASTING * part[0]
    table = pa.table({name: [row[name] for row in rows] for name in rows[0]})
    types = {"missing": pa.string(), **dict.fromkeys((*columns, "lasting_error"), pa.float64()), "time_ns": pa.int64()}
    table = table.cast(
        pa.schema([(name, types.get(name, table.schema.field(name).type)) for name in table.schema.names])
    )
    with duckdb.connect() as connection:
        connection.register("parts", table)
        (found,) = rolled_samples.combined(connection, "SELECT * FROM parts")
    return found


def test_independent_errors_add_in_squares_and_the_lasting_one_does_not() -> None:
    """Four windows of 50 with noise of 10 and a lasting 0.5: noise 5, error hypot(5, 0.5)."""
    own = math.hypot(10, 0.5)
    parts: list[Part] = [(50.0, own, 50 - 2 * own, 50 + 2 * own, 7)] * 4
    found = together(parts)
    error = math.hypot(5, 0.5)
    assert (found["value"], found["standard_error"]) == (pytest.approx(50), pytest.approx(error))
    assert (found["low"], found["high"]) == (pytest.approx(50 - 2 * error), pytest.approx(50 + 2 * error))
    assert (found["launches"], found["unit"], found["missing"]) == (4, "%", None)
    # What is bounded by what was not sampled stays bounded by it.
    assert together(parts, "memory_pct")["high"] == pytest.approx(50 + 2 * own)
    missing = together(parts, missing="l1_pct, a_pct")
    assert (missing["high"], missing["missing"]) == (pytest.approx(50 + 2 * own), "a_pct, l1_pct")


def test_ends_at_a_bound_do_not_shrink() -> None:
    zero = together([(0.4, 1.0, 0.0, 2.4, 1)] * 100)
    assert (zero["value"], zero["low"]) == (pytest.approx(0.4), 0.0)
    assert 0.4 < zero["high"] < 0.8
    assert together([(99.0, 1.5, 96.0, 100.0, 1)] * 100)["high"] == pytest.approx(100.0)


def test_what_is_certain_stays_so_and_weighs_by_time_or_launches() -> None:
    parts: list[Part] = [(10.0, None, 10.0, 10.0, 1), (20.0, None, 20.0, 20.0, 3)]
    clock = together(parts, "sm_clock_hz")
    assert (clock["value"], clock["standard_error"]) == (pytest.approx(17.5), None)
    assert (clock["low"], clock["high"]) == (pytest.approx(17.5), pytest.approx(17.5))
    assert together(parts, "duration_ns")["value"] == pytest.approx(15.0)


def test_rows_that_cannot_be_are_left_out() -> None:
    good: Part = (10.0, 1.0, 8.0, 12.0, 1)
    bad: list[Part] = [(math.nan, 1.0, 0.0, 1.0, 1), (5.0, math.inf, 1.0, 9.0, 1), (5.0, 1.0, 6.0, 7.0, 1)]
    assert together([good, *bad, (1e200, 1.0, 0.0, 1e300, 1)])["value"] == pytest.approx(10.0)
    assert together([good, (20.0, 1.0, 18.0, 22.0, -5)])["value"] == pytest.approx(10.0)


@pytest.mark.parametrize("value", [0.0, 1.0, 123456.789, 1e-9, 3.3e14, -2.5])
def test_rounding_to_bits(value: float) -> None:
    assert rolled_samples._cut(value, 17) == pytest.approx(value, rel=2**-17)
