"""The report on a run that `recorder.measure` wrote: its configurations and variants, in every format."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from fake_measuring import MeasuringGpu

import nanalyze.analysis as na
from nanalyze import recorder
from nanalyze.analysis import report
from nanalyze.analysis.report import collect, content, measurements
from nanalyze.analysis.report.cells import Cell

EVIL = "<b>|`x`"


@pytest.fixture
def gpu(measuring_gpu: MeasuringGpu) -> MeasuringGpu:
    return measuring_gpu


def measure(gpu: MeasuringGpu, run_dir: Path, **options: Any) -> None:
    def fused(n: int) -> None:
        if n == 3:
            raise MemoryError("no room for 3")
        gpu.run("k", 50 * n)

    functions = {"eager": lambda n: gpu.run("k", 100 * n), EVIL: fused}
    recorder.measure(functions, [1, 2, 3], repetitions=5, counters=None, run_dir=run_dir, **options)


def found(run_dir: Path) -> collect.Data:
    with na.open(run_dir) as run:
        return collect.collect(run, run_dir.name, lambda _: None)


def texts(cells: Any) -> list[str]:
    return [cell.text for cell in cells]


def test_a_row_a_configuration_and_variant(gpu: MeasuringGpu, tmp_path: Path) -> None:
    measure(gpu, tmp_path / "run")
    (one,) = found(tmp_path / "run").measurements
    grid = measurements.grid(one)
    heads = [head.text for head in grid.heads]
    assert heads == ["Configuration", "Variant", "Kernel time", "Time", "Launches", "SM clock"]
    rows = [texts(row) for row in grid.rows]
    assert [row[:2] for row in rows] == [[f"n={n}", name] for n in (1, 2, 3) for name in ("eager", EVIL)]
    assert [row[2] for row in rows] == [
        "100\u202fns",
        "50.0\u202fns",
        "200\u202fns",
        "100\u202fns",
        "300\u202fns",
        "failed",
    ]
    assert [row[3].rstrip("×").strip() for row in rows] == ["1.000", "0.500", "1.000", "0.500", "1.000", "–"]
    assert grid.rows[5][2].below == "MemoryError: no room for 3"
    assert grid.rows[0][2].below.startswith("± ")
    assert grid.notes[0].startswith("5 calls of each, caches none, clocks not touched.")
    assert measurements.title(one) == f"Measured: eager, {EVIL}"


def test_it_stands_first_in_the_page_and_in_a_file_of_its_own(gpu: MeasuringGpu, tmp_path: Path) -> None:
    measure(gpu, tmp_path / "run")
    with na.open(tmp_path / "run") as run:
        page = report.write(run, tmp_path / "report").page.read_text()
        told = report.to_markdown(run)
        assert report.to_pdf(run).startswith(b"%PDF")
        json.loads(report.to_json(run))
    assert page.index('id="measured"') < page.index('id="gain"')
    assert "Measured: eager, &lt;b&gt;|`x`" in page
    assert EVIL not in page
    assert "**Measured: eager, \\<b\\>\\|\\`x\\`**" in told
    rows = list(csv.DictReader((tmp_path / "report" / "tables" / "measurements.csv").read_text().splitlines()))
    total = [(row["configuration"], row["variant"], row["value"]) for row in rows if row["metric"] == "total_ns"]
    assert total[:2] == [("n=1", "eager", "100"), ("n=1", EVIL, "50")]
    assert [row["error"] for row in rows if row["metric"] == ""] == ["MemoryError: no room for 3"]


def test_counters_are_shown_where_anything_has_them() -> None:
    def row(variant: str, metric: str, value: float) -> dict[str, Any]:
        nothing = dict.fromkeys(("low", "high", "unit", "error", "sm_clock_hz", "clock_note", "ratio"))
        return {"configuration": "n=1", "variant": variant, "metric": metric, "value": value, **nothing}

    rows = [row("a", "total_ns", 5e3), row("a", "memory_pct", 91.5), row("a", "dram_read_bytes", 2e6)]
    grid = measurements.grid(measurements.Measurement("1", {}, rows, ()))
    assert [head.text for head in grid.heads] == ["Configuration", "Kernel time", "Launches", "Memory", "DRAM read"]
    assert texts(grid.rows[0]) == ["n=1", "5.00\u202fµs", "–", "91.5\u202f%", "2.00\u202fMB"]
    assert grid.rows[0][1] == Cell("5.00\u202fµs", title="one call: no interval")


def test_each_of_several_measurements_has_its_own_table(gpu: MeasuringGpu, tmp_path: Path) -> None:
    for n in (1, 2):
        recorder.measure(lambda n: gpu.run("k", 10 * n), [n], repetitions=2, counters=None, append=n > 1,
                         run_dir=tmp_path / "run")  # fmt: skip
    data = found(tmp_path / "run")
    assert [each.rows[0]["configuration"] for each in data.measurements] == ["n=1", "n=2"]
    assert len({each.id for each in data.measurements}) == 2
    assert content.content(data, {}, "run")["sections"][0] == ("measured", "Measured")


def test_other_runs_have_none(gpu: MeasuringGpu, tmp_path: Path) -> None:
    with recorder.record(tmp_path / "run"), recorder.annotate("mine", measure="configurations"):
        gpu.run("k")
    data = found(tmp_path / "run")
    assert data.measurements == []
    assert "measurements" not in data.tables
    assert content.content(data, {}, "run")["sections"][0][0] == "gain"


def test_a_run_of_too_many_launches_is_not_read_for_it(
    gpu: MeasuringGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure(gpu, tmp_path / "run")
    monkeypatch.setattr(measurements, "MOST_LAUNCHES", 10)
    (one,) = found(tmp_path / "run").measurements
    grid = measurements.grid(one)
    assert not grid.rows
    assert grid.notes[-1].endswith("kernels, more than are read here: analysis.measured.load has it.")
