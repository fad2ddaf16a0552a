"""Cache control on the fake GPU: what is written when, on which stream, and what it leaves alone."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_gpu import read_table
from fake_measuring import MeasuringGpu

import nanalyze.analysis as na
from nanalyze import recorder
from nanalyze.recorder import caches, passes
from nanalyze.rundir.errors import RecorderError

L2 = 62914560
FLUSH = [("memset", 2 * L2, 0), ("wait", 0)]
METRICS = [f"unit__{letter}.sum" for letter in "abcdefghijkl"]  # the fake counts 5 in a pass


@pytest.fixture
def gpu(measuring_gpu: MeasuringGpu) -> MeasuringGpu:
    return measuring_gpu


def test_cold_empties_l2_before_each_range(gpu: MeasuringGpu) -> None:
    functions = {"a": lambda: gpu.run("a"), "b": lambda: gpu.run("b")}
    recorder.measure(functions, repetitions=2, warmup=0, counters=None, cache="cold")
    assert len(gpu.log) == 12
    for place in range(0, 12, 3):
        assert gpu.log[place : place + 2] == FLUSH
        assert gpu.log[place + 2] in "ab"
    assert gpu.bindings.allocated == {}  # freed


def test_cold_empties_l2_before_annotations_inside(gpu: MeasuringGpu) -> None:
    @recorder.measure(repetitions=1, warmup=1, counters=None, cache="cold")
    def f() -> None:
        gpu.run("input")
        with recorder.annotate("a"):
            gpu.run("a1")
            with recorder.annotate("within"):
                gpu.run("a2")
        with recorder.annotate("b"):
            gpu.run("b")

    f()
    warm_up, measured = gpu.log[:4], gpu.log[4:]
    assert warm_up == ["input", "a1", "a2", "b"]
    assert measured == ["input", *FLUSH, "a1", "a2", *FLUSH, "b"]


def test_the_flush_is_in_no_range(gpu: MeasuringGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanalyze.recorder import ranges

    open_at_flush: list[list[str]] = []
    flush = caches.L2Flush.flush

    def watched(self: caches.L2Flush) -> None:
        open_at_flush.append(ranges.open_names())
        flush(self)

    monkeypatch.setattr(caches.L2Flush, "flush", watched)
    recorder.measure({"f": lambda: gpu.run("k")}, repetitions=3, counters=None, cache="cold", run_dir=tmp_path / "run")
    assert open_at_flush == [["measure"]] * 3  # the block's only
    assert len(read_table(tmp_path / "run", "ranges")) == 6


def test_warm_calls_each_variant_before_it_is_measured(gpu: MeasuringGpu, tmp_path: Path) -> None:
    functions = {"a": lambda: gpu.run("a"), "b": lambda: gpu.run("b")}
    recorder.measure(functions, repetitions=2, warmup=0, counters=None, cache="warm", run_dir=tmp_path / "run")
    assert len(gpu.log) == 8
    assert all(gpu.log[place] == gpu.log[place + 1] for place in range(0, 8, 2))
    with na.open(tmp_path / "run") as run:
        found = run.sql("SELECT count(*) AS all_launches FROM kernels")
        inside = run.query("compare_repetitions", range_name="a")
    assert found["all_launches"][0] == 8
    assert inside["launches"][0] == 1


def test_none_writes_nothing(gpu: MeasuringGpu) -> None:
    recorder.measure({"a": lambda: gpu.run("a")}, repetitions=2, warmup=0, counters=None)
    assert gpu.log == ["a", "a"]


def test_counters_of_cold_caches_take_one_pass_each(gpu: MeasuringGpu, tmp_path: Path) -> None:
    recorder.measure(
        {"f": lambda: gpu.run("k")},
        repetitions=1, warmup=0, counter_repetitions=2, counters=METRICS, cache="cold", run_dir=tmp_path / "run",
    )  # fmt: skip
    rows = read_table(tmp_path / "run", "exact")
    assert {row["passes"] for row in rows} == {1}
    assert sorted({row["metric"] for row in rows}) == ["gpu__time_duration.sum", *METRICS]
    assert len(rows) == 2 * (len(METRICS) + 1)
    assert gpu.log == [*FLUSH, "k"] * 7  # once timed, twice for each of three groups


def test_counters_of_untouched_caches_are_measured_together(gpu: MeasuringGpu, tmp_path: Path) -> None:
    recorder.measure(
        {"f": lambda: gpu.run("k")},
        repetitions=1, warmup=0, counter_repetitions=1, counters=METRICS, run_dir=tmp_path / "run",
    )  # fmt: skip
    assert {row["passes"] for row in read_table(tmp_path / "run", "exact")} == {3}
    assert gpu.log == ["k", "k"]


def test_without_counters_no_further_group_is_tried(gpu: MeasuringGpu, tmp_path: Path) -> None:
    gpu.cupti.fail("cuptiRangeProfilerEnable", 35)
    recorder.measure(
        {"f": lambda: gpu.run("k")},
        repetitions=1, warmup=0, counter_repetitions=1, counters=METRICS, cache="cold", run_dir=tmp_path / "run",
    )  # fmt: skip
    assert gpu.log.count("k") == 2
    with na.open(tmp_path / "run") as run:
        assert len(run.processes()) == 2


def test_groups_hold_every_metric_once(gpu: MeasuringGpu) -> None:
    gpu.cupti.unsupported = {"unit__c.sum"}
    groups = passes.single_pass_groups(METRICS)
    assert [len(group) for group in groups] == [5, 5, 1]
    assert [metric for group in groups for metric in group] == [m for m in METRICS if m != "unit__c.sum"]


def test_a_metric_of_several_passes_stands_alone(gpu: MeasuringGpu) -> None:
    gpu.cupti.passes = lambda metrics: 2 if "unit__a.sum" in metrics else 1
    assert passes.single_pass_groups(METRICS[:3]) == [["unit__a.sum"], ["unit__b.sum", "unit__c.sum"]]


def test_the_stream_is_the_jobs(gpu: MeasuringGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    assert caches.current_stream() == 0
    cupy = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=0x51)))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert caches.current_stream() == 0x51
    torch = SimpleNamespace(
        cuda=SimpleNamespace(
            is_initialized=lambda: True, current_stream=lambda: SimpleNamespace(cuda_stream=0x70), empty_cache=int
        )
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    with caches.L2Flush() as flush:
        flush.flush()
    assert gpu.log == [("memset", 2 * L2, 0x70), ("wait", 0x70)]
    torch.cuda.is_initialized = lambda: False
    assert caches.current_stream() == 0x51


def test_without_memory_for_the_buffer_the_variant_fails(gpu: MeasuringGpu) -> None:
    gpu.bindings.free_bytes = 1000
    result = recorder.measure({"f": lambda: gpu.run("k")}, repetitions=1, counters=None, cache="cold")
    (message,) = result.failures.values()
    assert message.startswith("RecorderError: cache='cold': no 120 MiB left to write over L2: ")


def test_a_thread_without_context_gets_the_first_device(gpu: MeasuringGpu) -> None:
    gpu.bindings.has_context = False
    caches.synchronize()  # nothing to wait for
    assert gpu.bindings.synchronized == 0
    with caches.L2Flush() as flush:
        flush.flush()
    assert gpu.bindings.has_context
    assert gpu.log == FLUSH


@pytest.mark.parametrize(("shared", "percent"), [("default", -1), ("l1", 0), ("shared", 100), (35, 35)])
def test_carveout(gpu: MeasuringGpu, shared: Any, percent: int) -> None:
    caches.carveout(0xF, shared)
    assert gpu.log == [("attribute", 0xF, "carveout", percent)]


@pytest.mark.parametrize("shared", ["most", 101, -2, True])
def test_a_wrong_carveout_is_refused(gpu: MeasuringGpu, shared: Any) -> None:
    with pytest.raises(RecorderError, match="give default, l1, shared or a percentage from 0 to 100"):
        caches.carveout(0xF, shared)
    assert gpu.log == []


def test_the_carve_out_is_a_parameter_like_others(gpu: MeasuringGpu) -> None:
    def setup(carveout: str | int) -> tuple[()]:
        caches.carveout(77, carveout)
        return ()

    recorder.measure(
        {"f": lambda: gpu.run("k")}, {"carveout": ["l1", 50]}, setup=setup, repetitions=2, warmup=0, counters=None
    )
    attribute = "carveout"
    assert gpu.log == [("attribute", 77, attribute, 0), "k", "k", ("attribute", 77, attribute, 50), "k", "k"]
