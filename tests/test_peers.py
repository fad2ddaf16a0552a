"""The benchmark against peers: answers agree on a small run, and what differs is seen."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from scripts import benchmark

QUESTIONS = ("classes", "gaps", "busy", "overlap")


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    module: ModuleType = benchmark("peers")
    return module


@pytest.fixture(scope="module")
def run_dir(peers: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("peers")
    return Path(peers.source_of("classes", out, 60_000, 0)[0])


@pytest.mark.parametrize("question", QUESTIONS)
def test_pandas_gives_the_same_answers(peers: ModuleType, run_dir: Path, question: str) -> None:
    ours = peers.WAYS["nanalyze"](question, run_dir)
    assert len(ours) == {"classes": 800, "gaps": 4, "busy": 1, "overlap": 800}[question]
    theirs = peers.WAYS["pandas"](question, run_dir)
    if question == "classes":  # where a class has 75 launches, its p99 lies between the two longest
        ours, theirs = ({key: row[:2] for key, row in answer.items()} for answer in (ours, theirs))
    assert peers.differences(question, ours, theirs) == []


@pytest.mark.parametrize("question", QUESTIONS)
def test_polars_gives_the_answers_of_pandas(peers: ModuleType, run_dir: Path, question: str) -> None:
    pytest.importorskip("polars", reason="polars is not installed")
    ours, theirs = (peers.WAYS[way](question, run_dir) for way in ("pandas", "polars"))
    assert peers.differences(question, ours, theirs) == []


def test_answers_that_differ_are_told(peers: ModuleType) -> None:
    assert peers.differences("gaps", {"7": 5}, {"7": 6}) == ["7: 5 and 6"]
    assert peers.differences("gaps", {"7": 5}, {"8": 5, "7": 5}) == ["1 and 2 rows"]
    assert peers.differences("overlap", {"1": 1.0}, {"1": 1.0 + 1e-12}) == []
    assert peers.differences("overlap", {"1": 1.0}, {"1": 1.0 + 1e-6}) == ["1: 1.0 and 1.000001"]
    assert peers.differences("classes", {"1": [2, 9, 4.0, 5.0]}, {"1": [2, 9, 4.02, 5.2]}) == ["1: 5.0 and 5.2"]
    ours = {"kernels": {"k": 1_000_000, "tiny": 4_000}, "launches": {"k": 50, "tiny": 1}, "idle_share": 0.5}
    rounded = {"kernels": {"k": 1_009_000, "tiny": 0}, "idle_share": 0.50001}
    assert peers.differences("nsys", ours, rounded) == []
    wrong = {"kernels": {"k": 1_049_000, "tiny": 4_000}, "idle_share": 0.51}
    assert peers.differences("kineto", ours, wrong) == ["idle 0.5 and 0.51"]
    assert peers.differences("nsys", ours, wrong) == ["k: 1000000 and 1049000 ns", "idle 0.5 and 0.51"]


def test_a_row_of_the_table_has_ratios_over_ours(peers: ModuleType) -> None:
    best = {"nanalyze": peers.Taken(2.0, 1.0, 100.0, {"7": 5}), "pandas": peers.Taken(5.0, 4.0, 250.0, {"7": 5})}
    lines = peers.rows("gaps", "1 M launches", best)
    assert lines[1] == "|  |  | pandas | 5.00 | 4.00 | 250 | 2.5x | 2.5x | yes |"
    assert lines[0].startswith(
        "| idle time of each stream | 1 M launches | nanalyze | 2.00 | 1.00 | 100 | 1.0x | 1.0x |"
    )
