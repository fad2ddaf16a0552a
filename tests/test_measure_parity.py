"""What nsight-python's own examples do, done by `recorder.measure`, on the fake GPU.

Each test is named after the example in nsight-python's repository that it stands for; docs/measure.md has the table.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fake_measuring import MeasuringGpu

from nanalyze import recorder

RUNS = 3


@pytest.fixture
def gpu(measuring_gpu: MeasuringGpu) -> MeasuringGpu:
    return measuring_gpu


def matmul(gpu: MeasuringGpu, n: int, factor: float = 1.0) -> int:
    """A product of n x n matrices: n² ns."""
    gpu.run("gemm", int(factor * n * n))
    return n * n


def tflops(m: Any, n: int, *_: Any, **__: Any) -> float:
    return 2 * n**3 / m["total_ns"] / 1e3


def test_00_minimal(gpu: MeasuringGpu) -> None:
    @recorder.measure
    def benchmark_matmul(n: int) -> int:
        with recorder.annotate("matmul"):
            return matmul(gpu, n)

    result = benchmark_matmul(100)
    (row,) = result.to_pandas().query("metric == 'total_ns'").to_dict("records")
    assert (row["n"], row["variant"], row["value"], row["repetitions"]) == (100, "matmul", 10_000, 30)
    assert result.values == {("n=100", "benchmark_matmul"): 10_000}


def test_01_compare_throughput(gpu: MeasuringGpu) -> None:
    gpu.cupti.values = {"dram__throughput.avg.pct_of_peak_sustained_elapsed": 12.5}

    @recorder.annotate("torch.einsum")
    def einsum(n: int) -> None:
        matmul(gpu, n)

    @recorder.measure(repetitions=RUNS, counters=["dram__throughput.avg.pct_of_peak_sustained_elapsed"])
    def throughput(n: int) -> None:
        with recorder.annotate("@-operator"):
            matmul(gpu, n)
        with recorder.annotate("torch.matmul"):
            matmul(gpu, n)
        einsum(n)

    result = throughput(64)
    assert result.variants == ["@-operator", "torch.matmul", "torch.einsum"]
    axes = result.plot("dram_pct", kind="bar")
    assert [bar.get_height() for bar in axes.patches] == [12.5] * 3


def test_02_parameter_sweep_03_custom_metrics_06_plot_customization(gpu: MeasuringGpu, tmp_path: Path) -> None:
    sizes = [(2**i,) for i in range(7, 10)]

    @recorder.measure(configurations=sizes, repetitions=RUNS, counters=None, derive={"tflops": (tflops, "TFLOP/s")})
    def sweep(n: int) -> None:
        with recorder.annotate("matmul"):
            matmul(gpu, n)

    result = sweep()
    line = result.plot("tflops", annotate=True)
    assert line.get_lines()[0].get_xydata().tolist() == [[n, pytest.approx(2 * n / 1e3)] for (n,) in sizes]
    assert (line.get_xlabel(), line.get_ylabel()) == ("n", "tflops (TFLOP/s)")
    assert [text.get_text() for text in line.texts] == ["0.256", "0.512", "1.02"]
    bars = result.plot("tflops", kind="bar")
    assert len(bars.patches) == 3
    bars.figure.suptitle("styled")  # what a callback does, without one
    bars.figure.savefig(tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes()[:4] == b"\x89PNG"


def test_04_multi_parameter_05_subplots(gpu: MeasuringGpu) -> None:
    configs = list(itertools.product([64, 128], ["float32", "float16"], [False, True]))

    @recorder.measure(configurations=configs, repetitions=RUNS, counters=None, derive={"tflops": (tflops, "TFLOP/s")})
    def subplots(n: int, dtype: str, transpose: bool) -> None:
        with recorder.annotate("matmul"):
            matmul(gpu, n, (2 if dtype == "float32" else 1) * (4 if transpose else 1))

    grid = subplots().panels("tflops", rows="dtype", columns="transpose", annotate=True)
    assert grid.shape == (2, 2)
    assert grid[0, 1].get_title() == "dtype=float32, transpose=True"
    assert list(grid[0, 1].get_lines()[0].get_ydata()) == pytest.approx([2 * n / 1e3 / 8 for n in (64, 128)])


def test_07_triton_minimal(gpu: MeasuringGpu) -> None:
    @recorder.measure(configurations={"n": [64, 128], "block_size": [256, 512]}, repetitions=RUNS, counters=None)
    def variants(n: int, block_size: int) -> None:
        with recorder.annotate("torch"):
            gpu.run("add", n * 100)
        with recorder.annotate("triton"):
            gpu.run("add_kernel", n * 100 * 256 // block_size)

    result = variants()
    table = result.to_pandas(normalize="torch").query("metric == 'total_ns' and variant == 'triton'")
    assert (1 / table["ratio"]).tolist() == [1, 2, 1, 2]  # the speed-up
    lines = result.plot(x="n", normalize="torch").get_lines()
    assert {line.get_label(): list(line.get_ydata()) for line in lines}["triton, block_size=512"] == [0.5, 0.5]


def test_08_multiple_metrics_09_advanced_metric_custom(gpu: MeasuringGpu) -> None:
    load, store = "smsp__sass_inst_executed_op_shared_ld.sum", "smsp__sass_inst_executed_op_shared_st.sum"
    gpu.cupti.values = {load: 640.0, store: 320.0}

    @recorder.measure(
        configurations=[64, 128], repetitions=RUNS, counters=[load, store],
        derive={
            "total": (lambda m, n: m[load] + m[store], "inst"),
            "per_sm": (lambda m, n: (m[load] + m[store]) / 8, "inst/SM"),
        },
    )  # fmt: skip
    def shared(n: int) -> None:
        with recorder.annotate("@-operator"):
            matmul(gpu, n)

    table = shared().to_pandas().query("n == 128").set_index("metric")
    found = table.loc[[load, store, "total", "per_sm"], "value"].tolist()
    assert found == [640, 320, 960, 120]
    assert table.loc[["total", "per_sm"], "unit"].tolist() == ["inst", "inst/SM"]


def test_10_combine_kernel_metrics(gpu: MeasuringGpu) -> None:
    gpu.cupti.values = {"sm__cycles_elapsed.avg": 1000.0}

    @recorder.measure(
        configurations=[(64,)], repetitions=RUNS, counters=["sm__cycles_elapsed.avg"],
        combine={"sm_cycles_elapsed": lambda x, y: x + y},
    )  # fmt: skip
    def three(n: int) -> None:
        with recorder.annotate("test"):
            for _ in range(3):
                matmul(gpu, n)

    table = three().to_pandas().set_index("metric")
    assert table["value"]["sm_cycles_elapsed"] == 3000
    assert table["value"]["total_ns"] == 3 * 64 * 64


def test_11_output_csv(gpu: MeasuringGpu, tmp_path: Path) -> None:
    @recorder.measure(configurations=[64, 128], repetitions=RUNS, counters=None)
    def csv(n: int) -> None:
        with recorder.annotate("a"):
            matmul(gpu, n)

    result = csv()
    result.to_pandas().to_csv(tmp_path / "processed.csv", index=False)
    result.repetitions().to_csv(tmp_path / "raw.csv", index=False)
    raw = pd.read_csv(tmp_path / "raw.csv").query("metric == 'total_ns'")
    assert raw["value"].tolist() == [64 * 64] * RUNS + [128 * 128] * RUNS
    spread = raw.groupby(["n", "variant"])["value"].agg(["mean", "std", "min", "max"])
    assert spread.loc[(128, "a")].tolist() == [128 * 128, 0, 128 * 128, 128 * 128]
    processed = pd.read_csv(tmp_path / "processed.csv").query("metric == 'total_ns'")
    geometric = np.exp(np.log(processed["value"]).groupby(processed["variant"]).mean())
    assert geometric.tolist() == [pytest.approx(64 * 128)]


def test_13_custom_info_collectors(gpu: MeasuringGpu) -> None:
    count = itertools.count(1)

    @recorder.measure(
        configurations=[(64, "float32"), (128, "float16")], repetitions=RUNS, counters=None,
        collect={"driver": lambda n, dtype: "580", "matrix_elements": lambda n, dtype: n * n},
        collect_each={"order": lambda n, dtype: next(count), "power_w": (lambda n, dtype: 300.0, "W")},
    )  # fmt: skip
    def informed(n: int, dtype: str) -> None:
        with recorder.annotate("multiply"):
            matmul(gpu, n)
        with recorder.annotate("add"):
            matmul(gpu, n)

    result = informed()
    table = result.to_pandas()
    assert table["matrix_elements"].unique().tolist() == [64 * 64, 128 * 128]
    assert set(table["driver"]) == {"580"}
    order = result.repetitions().query("metric == 'order' and variant == 'add'")
    assert order["value"].tolist() == [1, 2, 3, 4, 5, 6]
    assert table.query("metric == 'power_w'")["unit"].unique().tolist() == ["W"]


def test_failures_are_kept_and_the_rest_goes_on(gpu: MeasuringGpu) -> None:
    """`annotate(ignore_failures=True)` and `analyze.ignore_failures`."""

    @recorder.measure(configurations=[1, 2, 3], repetitions=RUNS, counters=None)
    def failing(n: int) -> None:
        if n == 2:
            raise RuntimeError("unsupported size")
        with recorder.annotate("a"):
            matmul(gpu, 8 * n)

    result = failing()
    assert result.failures == {("n=2", "failing"): "RuntimeError: unsupported size"}
    assert result.to_pandas().query("metric == 'total_ns'")["value"].tolist() == [64, 576]
