"""`recorder.measure` on a real GPU: times, caches and failures. Nothing about the clocks is touched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nanalyze.analysis as na
from nanalyze import recorder
from nanalyze.rundir.measurement import WARM_UP

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _warm() -> Iterator[None]:
    x = torch.randn(1024, 1024, device="cuda")
    (x @ x).add_(1)
    torch.cuda.synchronize()
    yield
    recorder.stop()
    torch.cuda.synchronize()


def buffers(mib: int) -> tuple[Any, Any]:
    source = torch.randn(mib * MIB // 4, device="cuda")
    return source, torch.empty_like(source)


def copy(source: Any, target: Any) -> None:
    torch.neg(source, out=target)


def event_ns(call: Any, repetitions: int = 30) -> float:
    """Mean time of a call between CUDA events around all of them, launches queued up behind a long kernel."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10_000_000)
    start.record()
    for _ in range(repetitions):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e6 / repetitions


def test_times_are_those_of_events(tmp_path: Path) -> None:
    source, target = buffers(512)
    result = recorder.measure({"copy": lambda: copy(source, target)}, counters=None, run_dir=tmp_path / "run")
    (row,) = result.to_pandas().query("metric == 'total_ns'").to_dict("records")
    assert row["repetitions"] == 30
    assert row["value"] == pytest.approx(event_ns(lambda: copy(source, target)), rel=0.04)  # events hold launch gaps
    assert row["low"] < row["value"] < row["high"]
    assert row["sm_clock_hz"] > 100e6


def test_cold_and_warm_show_in_times_and_counters(tmp_path: Path) -> None:
    found = {}
    for cache in ("cold", "warm"):
        result = recorder.measure(
            {"copy": copy}, [8], setup=buffers, cache=cache, repetitions=20,
            counters=["dram_read_bytes"], run_dir=tmp_path / cache,
        )  # fmt: skip
        assert result.failures == {}
        (found[cache],) = result.to_wide().to_dict("records")
    cold, warm = found["cold"], found["warm"]
    assert cold["dram_read_bytes"] > 0.9 * 8 * MIB
    assert warm["dram_read_bytes"] < 0.2 * 8 * MIB
    assert cold["total_ns"] > 1.1 * warm["total_ns"]


def test_out_of_memory_is_recorded_and_its_memory_given_back(tmp_path: Path) -> None:
    free, total = torch.cuda.mem_get_info()

    def allocate(gib: float) -> None:
        parts = [torch.ones(int(gib * 1024) * MIB // 8, device="cuda") for _ in range(2)]
        parts[0].add_(parts[1])

    result = recorder.measure(
        allocate, [0.5, 2 * total / 2**30, 0.25], repetitions=3, counters=None, run_dir=tmp_path / "run"
    )
    ((key, message),) = result.failures.items()
    assert "OutOfMemoryError" in message
    assert key[1] == "allocate"
    table = result.to_pandas().query("metric == 'total_ns'")
    assert sorted(table["gib"]) == [0.25, 0.5]
    assert torch.cuda.mem_get_info()[0] > free - 512 * MIB


def test_annotations_inside_compare(tmp_path: Path) -> None:
    @recorder.measure(configurations={"mib": [64, 256]}, repetitions=20, run_dir=tmp_path / "run")
    def fusion(mib: int) -> Any:
        x = torch.randn(mib * MIB // 4, device="cuda")
        with recorder.annotate("eager"):
            y = x.mul(2).add(1).relu()
        with recorder.annotate("in_place"):
            x.mul_(2).add_(1).relu_()
        return y

    result = fusion()
    assert result.values["mib=64", "fusion"].shape == (64 * MIB // 4,)
    comparison = result.compare("eager", "in_place", mib=256)
    assert comparison.repetitions == (20, 20)
    assert comparison.totals["launches"].a == comparison.totals["launches"].b == 3
    bytes_moved = comparison.totals["dram_bytes"].a
    assert bytes_moved is not None
    assert bytes_moved == pytest.approx(3 * 2 * 256 * MIB, rel=0.25)
    wide = result.to_wide().set_index(["mib", "variant"])
    assert wide["dram_read_bytes"][256, "eager"] == pytest.approx(3 * 256 * MIB, rel=0.25)


def test_identical_variants_do_not_differ(tmp_path: Path) -> None:
    source, target = buffers(64)
    same = {name: (lambda: copy(source, target)) for name in ("a", "b")}
    result = recorder.measure(same, counters=None, run_dir=tmp_path / "run")
    effect = result.compare("a", "b").totals["total_ns"]
    assert abs(effect.change or 0) < 0.02


def test_what_inductor_compiles_to_triton_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    x = torch.randn(4096, 1024, device="cuda")
    compiled = torch.compile(lambda x: torch.softmax(x * 2, dim=1))
    result = recorder.measure(
        {"eager": lambda: torch.softmax(x * 2, dim=1), "compiled": lambda: compiled(x)},
        counters=None, repetitions=20, run_dir=tmp_path / "run",
    )  # fmt: skip
    wide = result.to_wide().set_index("variant")
    assert (wide["launches"]["eager"], wide["launches"]["compiled"]) == (2, 1)


def test_warm_up_lies_in_a_range_of_its_own(tmp_path: Path) -> None:
    source, target = buffers(64)
    recorder.measure(
        {"copy": lambda: copy(source, target)}, repetitions=5, warmup=3, counters=None, run_dir=tmp_path / "run"
    )
    with na.open(tmp_path / "run") as run:
        found = run.sql(
            "SELECT r.name, count(*) AS n FROM kernels JOIN ranges AS r USING (process, range_id) GROUP BY 1"
        )
    assert dict(found.to_numpy()) == {WARM_UP: 3, "copy": 5}


def test_times_without_and_with_the_profiler_agree_for_a_long_kernel(tmp_path: Path) -> None:
    source, target = buffers(512)
    result = recorder.measure(
        {"copy": lambda: copy(source, target)},
        counters=["dram_read_bytes"],
        counter_repetitions=5,
        run_dir=tmp_path / "run",
    )
    (row,) = result.perturbation().to_dict("records")
    assert row["profiled_ns"] == pytest.approx(row["undisturbed_ns"], rel=0.05)
