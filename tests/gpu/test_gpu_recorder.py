"""The recorder on a real GPU: `pytest -m gpu tests/gpu`. Needs PyTorch with CUDA; skipped elsewhere.

Everything that the CPU tests take from a fake is checked here against the hardware: what was
launched, what it cost, what the counters say of kernels whose traffic and work are known.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import final_process, read_table, shards_claimed, shards_on_disk

from nanalyze import recorder

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _warm() -> Any:
    """CUDA, cuBLAS and the caching allocator are set up before anything is counted."""
    x = torch.randn(256, 256, device="cuda")
    (x @ x).add_(1)
    torch.cuda.synchronize()
    yield
    recorder.stop()
    torch.cuda.synchronize()


def names_of(run_dir: Path) -> dict[int, str]:
    return {row["kernel_class_id"]: row["name"] for row in read_table(run_dir, "kernel_classes")}


def failures(run_dir: Path) -> list[str]:
    return [row["message"] for row in read_table(run_dir, "events") if row["kind"] in ("failure", "loss", "odd_record")]


# --- timeline ---------------------------------------------------------------------------------


def test_every_launch_is_recorded_once(tmp_path: Path) -> None:
    x = torch.zeros(1, device="cuda")
    count = 20_000
    with recorder.record(tmp_path / "run"), recorder.annotate("loop"):
        for _ in range(count):
            x.add_(1)
    assert int(x) == count
    kernels = read_table(tmp_path / "run", "kernels")
    assert len(kernels) == count
    assert len({row["correlation_id"] for row in kernels}) == count
    assert all(row["duration_ns"] > 0 for row in kernels)
    assert all(row["queued_ns"] <= row["start_ns"] for row in kernels)
    end = final_process(tmp_path / "run")
    assert (end["kernels_written"], end["records_lost"]) == (count, 0)
    assert failures(tmp_path / "run") == []
    assert shards_claimed(tmp_path / "run") == shards_on_disk(tmp_path / "run")


def test_a_million_launches_lose_nothing(tmp_path: Path) -> None:
    x = torch.zeros(1, device="cuda")
    count = 1_000_000
    with recorder.record(tmp_path / "run"):
        for _ in range(count):
            x.add_(1)
    assert final_process(tmp_path / "run")["kernels_written"] == count
    assert failures(tmp_path / "run") == []


def test_copies_have_their_bytes_and_kinds(tmp_path: Path) -> None:
    pageable = torch.zeros(MIB, dtype=torch.uint8)
    pinned = torch.zeros(2 * MIB, dtype=torch.uint8).pin_memory()
    torch.cuda.synchronize()
    with recorder.record(tmp_path / "run"):
        device = pageable.to("cuda")
        other = pinned.to("cuda", non_blocking=True)
        device.cpu()
        other[:MIB].copy_(device)
        other.zero_()
        torch.cuda.synchronize()
    rows = [(row["kind"], row["bytes"], row["source"]) for row in read_table(tmp_path / "run", "copies")]
    assert ("HtoD", MIB, "pageable") in rows
    assert ("HtoD", 2 * MIB, "pinned") in rows
    assert ("DtoH", MIB, "device") in rows
    assert ("DtoD", MIB, "device") in rows


def test_ranges_hold_the_kernels_launched_within_them_backward_included(tmp_path: Path) -> None:
    w = torch.randn(512, 512, device="cuda", requires_grad=True)
    (w @ w).sum().backward()
    torch.cuda.synchronize()
    with recorder.record(tmp_path / "run"):
        with recorder.annotate("forward"):
            loss = (w @ w).sum()
        with recorder.annotate("backward"):
            loss.backward()
            torch.cuda.synchronize()
        w.detach().mul_(2)
    ranges = {row["name"]: row for row in read_table(tmp_path / "run", "ranges")}
    counts = {
        name: sum(row["start_ns"] <= k["queued_ns"] <= row["end_ns"] for k in read_table(tmp_path / "run", "kernels"))
        for name, row in ranges.items()
    }
    assert counts["forward"] >= 2
    assert counts["backward"] >= 3  # launched by autograd's own thread
    assert sum(counts.values()) < len(read_table(tmp_path / "run", "kernels"))


def test_kernels_lie_between_the_host_times_around_them(tmp_path: Path) -> None:
    """CUPTI's clock is the host's realtime clock."""
    x = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with recorder.record(tmp_path / "run"):
        before = time.time_ns()
        x @ x
        torch.cuda.synchronize()
        after = time.time_ns()
    (kernel,) = [row for row in read_table(tmp_path / "run", "kernels") if row["duration_ns"] > 500_000]
    slack = 200_000
    assert before - slack <= kernel["start_ns"]
    assert kernel["start_ns"] + kernel["duration_ns"] <= after + slack


def test_nodes_of_a_graph_carry_the_time_of_its_launch(tmp_path: Path) -> None:
    x = torch.zeros(1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1).mul_(2).sub_(3)
    torch.cuda.synchronize()
    with recorder.record(tmp_path / "run"):
        for _ in range(5):
            time.sleep(0.01)
            with recorder.annotate("replay"):  # launch times are recorded from the first range on
                graph.replay()
        torch.cuda.synchronize()
    kernels = read_table(tmp_path / "run", "kernels")
    assert len(kernels) == 15
    assert len({row["graph_id"] for row in kernels}) == 1
    assert len({row["correlation_id"] for row in kernels}) == 5
    assert len({row["graph_node_id"] for row in kernels}) == 3
    assert all(0 <= row["start_ns"] - row["queued_ns"] < 5_000_000 for row in kernels)


def test_threads_launching_while_recording_starts_and_stops(tmp_path: Path) -> None:
    stop = threading.Event()
    counts: list[int] = []

    def work() -> None:
        x = torch.zeros(1, device="cuda")
        count = 0
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                x.add_(1)
                count += 1
        counts.append(count)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(5):
        with recorder.record(tmp_path / f"{number}", flush_s=0.2):
            time.sleep(0.3)
        assert final_process(tmp_path / f"{number}")["kernels_written"] > 100
        assert failures(tmp_path / f"{number}") == []
    stop.set()
    for thread in threads:
        thread.join(30)
    assert len(counts) == 4  # nobody was held up for good


def test_recordings_can_follow_each_other(tmp_path: Path) -> None:
    x = torch.zeros(1, device="cuda")
    for number in range(4):
        with recorder.record(tmp_path / f"{number}"):
            for _ in range(10 * (number + 1)):
                x.add_(1)
        for _ in range(7):
            x.add_(1)
        torch.cuda.synchronize()
    assert [len(read_table(tmp_path / f"{number}", "kernels")) for number in range(4)] == [10, 20, 30, 40]


# --- device -----------------------------------------------------------------------------------


def test_the_device_is_described_and_followed(tmp_path: Path) -> None:
    x = torch.randn(4096, 4096, device="cuda")
    with recorder.record(tmp_path / "run", flush_s=0.5):
        until = time.monotonic() + 3
        while time.monotonic() < until:
            x @ x
            torch.cuda.synchronize()
    row = next(row for row in read_table(tmp_path / "run", "devices") if row["device_id"] == 0)
    properties = torch.cuda.get_device_properties(0)
    assert row["name"] == properties.name
    assert (row["cc_major"], row["cc_minor"]) == (properties.major, properties.minor)
    assert row["sm_count"] == properties.multi_processor_count
    assert abs(row["memory_bytes"] / properties.total_memory - 1) < 0.02
    assert row["dram_peak_bytes_per_s"] is None or 1e11 < row["dram_peak_bytes_per_s"] < 2e13
    states = read_table(tmp_path / "run", "device_state")
    assert len(states) >= 2
    assert all(10**8 < state["sm_clock_hz"] <= row["sm_clock_max_hz"] for state in states)
    assert all(state["power_mw"] is None or 10_000 < state["power_mw"] < 2_000_000 for state in states)


# --- exact ------------------------------------------------------------------------------------


def exact_values(run_dir: Path) -> dict[tuple[str, int], dict[str, float]]:
    """Values by kernel name and correlation id."""
    names = names_of(run_dir)
    found: dict[tuple[str, int], dict[str, float]] = {}
    for row in read_table(run_dir, "exact"):
        name = names.get(row["kernel_class_id"], row["scope"])
        found.setdefault((name, row["correlation_id"]), {})[row["metric"]] = row["value"]
    return found


def need_counters(run_dir: Path) -> None:
    text = " ".join(failures(run_dir))
    if "INSUFFICIENT_PRIVILEGES" in text:
        pytest.skip("reading counters is not permitted here")
    assert text == ""


def test_counters_of_a_copy_are_its_bytes(tmp_path: Path) -> None:
    size = 512 * MIB
    source = torch.zeros(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    source.add_(1)
    torch.cuda.synchronize()
    with recorder.record(tmp_path / "run", exact=recorder.Exact(first=1, budget_pct=100)):
        torch.add(source, 1, out=target)
        torch.cuda.synchronize()
    need_counters(tmp_path / "run")
    ((_, values),) = exact_values(tmp_path / "run").items()
    assert abs(values["dram__bytes_read.sum"] / size - 1) < 0.05
    assert abs(values["dram__bytes_write.sum"] / size - 1) < 0.10
    assert values["gpu__time_duration.sum"] > 2 * size / 20e12 * 1e9
    for metric, value in values.items():
        if "pct_of_peak" in metric and value is not None:
            assert 0 <= value <= 101, metric


def test_measuring_changes_no_result(tmp_path: Path) -> None:
    """Kernels that read what they write are replayed with their memory restored."""
    x = torch.zeros(4 * MIB, device="cuda")
    with recorder.record(tmp_path / "run", exact=recorder.Exact(first=5, budget_pct=100)):
        for _ in range(8):
            x.add_(1)
        torch.cuda.synchronize()
    need_counters(tmp_path / "run")
    assert float(x.min()) == float(x.max()) == 8.0
    assert len({row["correlation_id"] for row in read_table(tmp_path / "run", "exact")}) == 5
    kernels = read_table(tmp_path / "run", "kernels")
    assert sum(row["duration_ns"] is None for row in kernels) == 5
    assert sum(row["duration_ns"] is not None for row in kernels) == 3


def test_a_large_matrix_product_keeps_the_sms_busy(tmp_path: Path) -> None:
    n = 4096
    a = torch.randn(n, n, device="cuda", dtype=torch.float64)
    a @ a
    torch.cuda.synchronize()
    with recorder.record(tmp_path / "run", exact=recorder.Exact(first=1, budget_pct=100)):
        a @ a
        torch.cuda.synchronize()
    need_counters(tmp_path / "run")
    values = max(exact_values(tmp_path / "run").values(), key=lambda found: found["gpu__time_duration.sum"])
    assert values["sm__throughput.avg.pct_of_peak_sustained_elapsed"] > 60


def test_a_graph_is_measured_over_its_launches(tmp_path: Path) -> None:
    size = 256 * MIB
    x = torch.zeros(size, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1).add_(1)
    graph.replay()
    torch.cuda.synchronize()
    with recorder.record(tmp_path / "run", exact=recorder.Exact(first=1, budget_pct=100)):
        for _ in range(40):
            graph.replay()
            torch.cuda.synchronize()
    need_counters(tmp_path / "run")
    rows = [row for row in read_table(tmp_path / "run", "exact") if row["scope"] == "graph"]
    assert rows
    assert len({row["graph_id"] for row in rows}) == 1
    assert {row["kernel_class_id"] for row in rows} == {None}
    read = next(row["value"] for row in rows if row["metric"] == "dram__bytes_read.sum")
    assert abs(read / (2 * size) - 1) < 0.1
    assert len(read_table(tmp_path / "run", "kernels")) == 80


def test_a_capture_while_measuring_is_not_broken(tmp_path: Path) -> None:
    x = torch.zeros(1024, device="cuda")
    with recorder.record(tmp_path / "run", exact=recorder.Exact(first=100, budget_pct=100, graphs=False)):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.add_(1).mul_(2)
        graph.replay()
        torch.cuda.synchronize()
    need_counters(tmp_path / "run")
    assert float(x[0]) == 2.0


def test_the_budget_is_kept(tmp_path: Path) -> None:
    x = torch.randn(1024, 1024, device="cuda")
    started = time.monotonic_ns()
    with recorder.record(tmp_path / "run", exact=recorder.Exact(first=10**6, budget_pct=10)):
        while time.monotonic_ns() - started < 15e9:
            x.add_(1)
            torch.cuda.synchronize()
    need_counters(tmp_path / "run")
    costs = {row["correlation_id"]: row["cost_ns"] for row in read_table(tmp_path / "run", "exact")}
    end = final_process(tmp_path / "run")
    assert len(costs) >= 2
    assert sum(costs.values()) <= 0.10 * (end["ended_ns"] - end["started_ns"]) + max(costs.values())


# --- ends -------------------------------------------------------------------------------------


def test_an_exit_without_stop_keeps_all_launches(tmp_path: Path) -> None:
    program = """
        import sys, torch
        from nanalyze import recorder
        recorder.start(sys.argv[1])
        x = torch.zeros(1, device="cuda")
        for _ in range(1000):
            x.add_(1)
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=300,
        env=dict(os.environ),
    )
    assert (done.returncode, done.stderr) == (0, "")
    names = names_of(tmp_path / "run")
    added = [row for row in read_table(tmp_path / "run", "kernels") if "add" in names[row["kernel_class_id"]].lower()]
    assert len(added) == 1000
    assert final_process(tmp_path / "run")["ending"] == "exit"


def test_torch_profiler_before_and_after_does_not_break(tmp_path: Path) -> None:
    x = torch.zeros(1, device="cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        x.add_(1)
        torch.cuda.synchronize()
    with recorder.record(tmp_path / "run"):
        for _ in range(10):
            x.add_(1)
        torch.cuda.synchronize()
    assert len(read_table(tmp_path / "run", "kernels")) == 10
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as after:
        for _ in range(10):
            x.add_(1)
        torch.cuda.synchronize()
    kernels = [event for event in after.events() if "elementwise" in event.name]
    assert len(kernels) == 10
