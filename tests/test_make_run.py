"""The synthetic runs that scale is measured with: what they hold, and that a seed decides them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from scripts import benchmark

import nanalyze.analysis as na
from nanalyze.analysis import attribution, made

make_run = benchmark("make_run")
scale = benchmark("scale")
OPTIONS = make_run.Options(launches=25_001, classes=800, processes=2, shard_rows=5_000, sample_ns=1_000_000)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("made") / "run"
    make_run.make(run_dir, OPTIONS)
    return run_dir


def test_a_run_holds_what_was_asked_for(run_dir: Path) -> None:
    with na.open(run_dir) as run:
        assert run.damage_count == 0
        kernels = run.sql(
            "SELECT process, count(*) AS n, count(range_id) AS ranged, count(DISTINCT kernel_class_id) AS classes, "
            "count(DISTINCT stream_id) AS streams FROM kernels GROUP BY process ORDER BY process"
        )
        assert kernels["n"].tolist() == [12_501, 12_500]
        assert kernels["ranged"].tolist() == kernels["n"].tolist()
        assert kernels["classes"].tolist() == [800, 800]
        assert kernels["streams"].tolist() == [4, 4]
        steps = run.sql("SELECT count(*) AS n, count(DISTINCT range_id) AS ids FROM ranges GROUP BY process")
        assert steps["n"].tolist() == steps["ids"].tolist() == [7, 7]
        processes = run.sql("SELECT kernels_written, ending FROM processes ORDER BY process")
        assert processes["kernels_written"].tolist() == [12_501, 12_500]
    assert len(list((run_dir / "kernels").glob("process=*/*.parquet"))) == 2 * 4


def test_kernels_of_a_stream_follow_each_other(run_dir: Path) -> None:
    with na.open(run_dir) as run:
        gaps = run.query("launch_gaps")
    assert len(gaps) == 8
    # Gaps have at least 400 ns, so that one is found before every launch but the first of each stream.
    assert gaps["gaps"].tolist() == (gaps["activities"] - 1).tolist()


def test_samples_add_up_to_what_the_kernels_did(run_dir: Path) -> None:
    rates = make_run.job(OPTIONS)
    with na.open(run_dir) as run:
        times = run.sql("SELECT kernel_class_id, sum(duration_ns) AS ns FROM kernels GROUP BY 1")
        sums = run.sql("SELECT sum(inst) AS inst, sum(dram_read_bytes) AS dram_read_bytes FROM samples").iloc[0]
        uneven = run.sql("SELECT count(*) AS n FROM samples WHERE end_ns - start_ns <> 1000000")["n"][0]
    by_class = dict(zip(times["kernel_class_id"].tolist(), times["ns"].tolist(), strict=True))
    for counter in ("inst", "dram_read_bytes"):
        did = sum(by_class[key] * rate for key, rate in zip(rates.ids.tolist(), rates.rates[counter], strict=True))
        assert sums[counter] == pytest.approx(did, rel=1e-8)  # some 200 samples, each rounded
    assert uneven == 0


def test_a_seed_decides_every_byte(run_dir: Path, tmp_path: Path) -> None:
    make_run.make(tmp_path / "again", OPTIONS)
    make_run.make(tmp_path / "other", make_run.Options(**{**vars(OPTIONS), "seed": 2}))
    names = [sorted(p.relative_to(d).as_posix() for p in d.rglob("*")) for d in (run_dir, tmp_path / "again")]
    assert names[0] == names[1]
    kernels = [{p.name for p in (tmp_path / d / "kernels").rglob("*.parquet")} for d in ("again", "other")]
    assert not kernels[0] & kernels[1]


def test_how_many_processes_write_a_run_decides_nothing(run_dir: Path, tmp_path: Path) -> None:
    options = ["--launches", "25001", "--processes", "2", "--shard-rows", "5000", "--sample-us", "1000"]
    script = make_run.__file__
    subprocess.run([sys.executable, script, str(tmp_path / "run"), *options, "--jobs", "2"], check=True)
    # The names hold the hashes of what the files hold.
    names = [sorted(p.relative_to(d).as_posix() for p in d.rglob("*")) for d in (run_dir, tmp_path / "run")]
    assert names[0] == names[1]


def test_pieces_follow_each_other_without_a_sample_between_two(run_dir: Path) -> None:
    placed = list(make_run._placed(OPTIONS, make_run.pieces(OPTIONS), [7_000_000] * 8))
    assert [(piece.process, piece.number, piece.launches) for piece in placed] == [
        *((0, n, k) for n, k in enumerate((4_000, 4_000, 4_000, 501))),
        *((1, n, k) for n, k in enumerate((4_000, 4_000, 4_000, 500))),
    ]
    assert [piece.start_ns - make_run.T0 for piece in placed] == 2 * [(50 + 7 * n) * 1_000_000 for n in range(4)]
    with na.open(run_dir) as run:
        gaps = run.sql(
            "SELECT count(*) AS n FROM (SELECT start_ns - lag(end_ns) OVER (PARTITION BY process ORDER BY start_ns) AS "
            "gap FROM samples) AS gaps WHERE gap <> 0"
        )
        states = run.sql("SELECT process, count(*) AS n, count(DISTINCT time_ns) AS times FROM device_state GROUP BY 1")
        length = run.sql("SELECT (max(end_ns) - min(start_ns)) / 1e9 AS s FROM samples GROUP BY process")["s"]
    assert gaps["n"].tolist() == [0]
    assert states["n"].tolist() == states["times"].tolist() == [int(np.ceil(s)) for s in length]


def test_a_run_is_not_overwritten(run_dir: Path) -> None:
    with pytest.raises(FileExistsError, match="holds a run already"):
        make_run.make(run_dir, OPTIONS)


def test_the_overlap_finds_the_samples_of_each_kernel(run_dir: Path) -> None:
    """A counter's sum over samples, each shared out by time, is the sum over the time that kernels ran in them."""
    with na.open(run_dir) as run:
        pieces = run.sql(scale.OVERLAP)
        least = run.sql("SELECT count(*) AS n FROM kernels WHERE end_ns <= (SELECT max(end_ns) FROM samples)")["n"][0]
    assert len(pieces) == 800
    assert pieces["pieces"].sum() > least


def test_growth_is_relative_to_the_size_before() -> None:
    readings = [scale.Reading("gaps", 10, 1.0, 2.0, 100.0), scale.Reading("gaps", 100, 15.0, 30.0, 200.0)]
    assert scale.lines(readings)[2:] == [
        "| gaps | 10 | 1.0 | 2.0 | 100.0 | - |",
        "| gaps | 100 | 15.0 | 30.0 | 200.0 | 1.50 |",
    ]


def test_only_what_is_not_known_is_asked(tmp_path: Path) -> None:
    options = ["--sizes", "4000", "--processes", "2", "--only", "open,aggregate", "--cores", "1", "--memory-gb", "1"]
    command = [sys.executable, scale.__file__, str(tmp_path), *options, "--resume"]
    told = []
    for limit in ("1e-3", "60", "60"):
        done = subprocess.run([*command, "--limit-s", limit], capture_output=True, text=True, check=True)
        told.append(done.stderr.count("Reading("))
        readings = json.loads((tmp_path / "scale.json").read_text())["readings"]
        assert [(r["question"], r["launches"], r["processes"], r["cores"]) for r in readings] == [
            ("open", 4000, 2, 1), ("aggregate", 4000, 2, 1)
        ]  # fmt: skip
        problems = {r["problem"] for r in readings}
        assert problems == ({"took over 0.001 s"} if limit == "1e-3" else {None})
    assert told == [2, 2, 0]
    assert (tmp_path / "run-4000-of-2").exists()
    assert not list(tmp_path.glob("*.unfinished"))


def test_a_question_is_kept_to_its_cores_and_memory() -> None:
    script = (
        f"import os, sys; sys.path.insert(0, {str(Path(scale.__file__).parent)!r}); import scale; "
        "scale.keep_to(scale.Limits(cores=1, memory_gb=0.5)); import duckdb; "
        "print(len(os.sched_getaffinity(0)), *duckdb.connect(':memory:').execute("
        "\"SELECT current_setting('threads'), current_setting('memory_limit')\").fetchone())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1", "476.8", "MiB"]


def test_what_failed_says_why(tmp_path: Path) -> None:
    reading = scale.measure(scale.Asked(tmp_path), tmp_path / "none", "open", 1)
    assert reading.seconds is None
    assert reading.problem.startswith("exit status 1: nanalyze.rundir.errors.RunError: ")


def test_samples_of_a_large_run_are_attributed_beside_the_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    make_run.make(run_dir, make_run.Options(launches=12_000, classes=12, shard_rows=3_000, sample_ns=1_000_000))
    statements = [
        "SELECT * FROM attribution ORDER BY ALL",
        "SELECT * FROM attribution_quality ORDER BY ALL",
        "SELECT * FROM verdicts ORDER BY kernel_class_id",
        "SELECT * FROM overhead ORDER BY process",
    ]
    with na.open(run_dir) as plain:
        assert plain.prepare(9) is None
        expected = [plain.sql(statement) for statement in statements]
    assert len(expected[0]) > 40
    threads = []
    attribute = attribution.attribute
    monkeypatch.setattr(
        attribution, "attribute", lambda *given: threads.append(threading.current_thread().name) or attribute(*given)
    )
    monkeypatch.setattr(made, "FEWEST_LAUNCHES", 0)
    with na.open(run_dir) as scanned:
        assert scanned.prepare(9) is not None
        assert [
            scanned.sql(statement).equals(frame) for statement, frame in zip(statements, expected, strict=True)
        ] == [True] * 4
    assert len(threads) == 1
    assert threads[0] != threading.main_thread().name
