"""The sample run in examples/, recorded on an H200: a real run through the whole analysis."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import nanalyze.analysis as na
from nanalyze import queries
from nanalyze.analysis import report
from nanalyze.commands import main

SAMPLE = Path(__file__).resolve().parents[1] / "examples" / "h200-sample"

LAUNCHES = {1: 35480, 2: 248994, 3: 1313}  # of each phase: timeline, sampled, exact

# What Nsight Compute's rule says of the same kernels on the same kind of card (docs/measurements.md).
VERDICTS = {
    "stream_copy": ("memory", "DRAM"),
    "triad": ("memory", "DRAM"),
    "sum": ("memory", "DRAM"),
    "layer_norm": ("memory", "DRAM"),
    "triton_softmax": ("memory", "DRAM"),
    "l2_copy": ("memory", "L2"),
    "shared_loop": ("memory", "L1"),
    "gemm_bf16": ("memory", "L1"),
    "gemm_fp32": ("compute", "issue"),
    "gemm_fp64": ("compute", "tensor"),
    "softmax": ("compute", "issue"),
    "fma_loop": ("compute", "issue"),
    "alu_loop": ("compute", "ALU"),
    "xu_loop": ("compute", "XU"),
    "gather": ("latency", None),
    "one_block": ("latency", None),
    "pointer_chase": ("latency", None),
    "tiny": ("launch", None),
}


@pytest.fixture(scope="module")
def sample() -> Iterator[na.Run]:
    with na.open(SAMPLE) as run:
        yield run


def test_it_is_whole(sample: na.Run) -> None:
    assert len(sample.damage()) == 0
    rows = sample.sql("SELECT process, ending, records_lost, kernels_written FROM processes ORDER BY kernels_written")
    assert rows["ending"].tolist() == ["stop"] * 3
    assert rows["records_lost"].tolist() == [0] * 3
    counted = sample.sql("SELECT count(*) AS launches FROM kernels GROUP BY process ORDER BY launches")
    assert rows["kernels_written"].tolist() == counted["launches"].tolist() == [LAUNCHES[3], LAUNCHES[1], LAUNCHES[2]]


def test_a_launch_takes_at_most_eight_bytes(sample: na.Run) -> None:
    """But in the phase of the exact counters, which holds few launches, so that the footer dominates."""
    files = [path for path in SAMPLE.glob("kernels/*/*.parquet") if not path.parent.name.endswith(".3")]
    assert sum(path.stat().st_size for path in files) / (LAUNCHES[1] + LAUNCHES[2]) <= 8


def test_the_known_kernels_have_the_verdicts_of_nsight_compute(sample: na.Run) -> None:
    found = sample.sql(
        """
        SELECT r.name, v.bound, v.level_or_pipe
        FROM kernels AS k
        JOIN ranges AS r ON r.process = k.process AND r.range_id = k.range_id
        JOIN verdicts AS v ON v.kernel_class_id = k.kernel_class_id
        GROUP BY r.name, v.bound, v.level_or_pipe
        QUALIFY row_number() OVER (PARTITION BY r.name ORDER BY sum(k.duration_ns) DESC) = 1
        """
    )
    verdicts = {row.name: (row.bound, row.level_or_pipe) for row in found.itertuples(index=False)}
    assert {name: tuple(None if x != x else x for x in verdicts[name]) for name in VERDICTS} == VERDICTS


def test_kernels_of_the_backward_pass_belong_to_its_range(sample: na.Run) -> None:
    """They are launched by autograd's own thread."""
    rows = sample.sql(
        """
        SELECT r.name, count(*) AS launches FROM kernels AS k
        JOIN ranges AS r ON r.process = k.process AND r.range_id = k.range_id
        WHERE r.name IN ('forward', 'backward', 'optimizer') AND k.graph_id IS NULL AND k.process NOT LIKE '%.2'
        GROUP BY r.name ORDER BY r.name
        """
    )
    launches = dict(zip(rows["name"], rows["launches"] / 21, strict=True))  # 20 steps and the measured one
    assert launches["backward"] > launches["forward"] > launches["optimizer"] > 10
    assert all(value == int(value) for value in launches.values())  # every step launches the same


def test_nodes_of_a_graph_belong_to_the_range_of_its_launch(sample: na.Run) -> None:
    rows = sample.sql(
        """
        SELECT r.name, count(*) AS nodes, count(DISTINCT k.process || '/' || k.correlation_id) AS launches
        FROM kernels AS k LEFT JOIN ranges AS r ON r.process = k.process AND r.range_id = k.range_id
        WHERE k.graph_id IS NOT NULL GROUP BY r.name
        """
    )
    assert rows["name"].tolist() == ["graph"]
    assert (rows["nodes"] == 4 * rows["launches"]).all()


def test_what_the_counters_say_is_what_the_ranges_declare(sample: na.Run) -> None:
    """The copy moves 2 GiB, give or take what L2 keeps; the 8192^3 product runs in tiles of 320, 26 for 8192."""
    rows = sample.sql("SELECT kernel, dram_bytes, tensor_ops FROM verdicts").set_index("kernel")
    assert rows.loc["stream_copy", "dram_bytes"] == pytest.approx(2 << 30, rel=0.02)
    large = rows[rows.index.str.startswith("nvjet_sm90_tst_320x128")]
    assert large["tensor_ops"].max() == 2 * (26 * 320) * 8192**2


def test_the_report_is_written(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["report", str(SAMPLE), "-o", str(tmp_path / "report")])
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert summary["summary_version"] == 1
    with open(tmp_path / "report" / "tables" / "verdicts.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 107
    assert sum(float(row["share"]) for row in rows) == pytest.approx(1.0)
    assert sum(int(row["launches"]) for row in rows) == sum(LAUNCHES.values())
    page = (tmp_path / "report" / "report.html").read_text()
    assert "NVIDIA H200" in page
    assert len(page) < 3_000_000


def test_the_report_on_two_ranks_names_the_slow_one() -> None:
    """`examples/two_ranks.py --slow-rank 1` on two H200s."""
    with na.open(SAMPLE.parent / "h200-two-ranks") as run:
        assert run.damage_count == 0
        found = run.arrow(queries.query("ranks").sql).to_pylist()
        text = report.to_markdown(run)
    assert [(row["rank"], row["is_slowest"]) for row in found] == [(0, False), (1, True)]
    assert found[0]["waiting_ns"] > 10**9
    assert found[1]["waiting_ns"] == 0
    assert 0.2 < found[1]["communication_share"] < found[0]["communication_share"] < 0.5
    assert "Rank 1 is the slowest: Rank 0 waited " in text
