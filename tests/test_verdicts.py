"""The classification: every rule, every boundary, and what the reason says."""

from __future__ import annotations

from pathlib import Path
from trace import Trace
from typing import Any

import pandas as pd
import pytest

import nanalyze.analysis as na

LONG = 100_000
Counters = dict[str, float | None]


def verdict(
    tmp_path: Path,
    *launches: Counters,
    name: str = "k",
    duration_ns: int | None = LONG,
    settings: dict[str, float] | None = None,
    in_graph: bool = False,
    device: dict[str, Any] | None = None,
    **shape: Any,
) -> Any:
    """The verdict on one kernel class with one timed launch and `launches` measured ones."""
    trace = Trace(tmp_path)
    if device is not None:
        trace.device(**device)
    kernel = trace.kernel_class(name, **shape)
    if duration_ns is not None:
        graph = {"graph_id": 1, "graph_node_id": 1} if in_graph else {}
        for i in range(len(launches) + 1):
            trace.kernel(kernel, 10**6 * i, duration_ns, **graph)
    trace.measure(kernel, launches)
    trace.write()
    with na.open(tmp_path, settings=settings) as run:
        rows = run.verdicts()
    assert len(rows) == 1
    return rows.iloc[0]


def sol(compute: float | None, memory: float | None, **more: float | None) -> Counters:
    return {"compute_pct": compute, "memory_pct": memory, **more}


# --- the speed-of-light rule -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compute", "memory", "bound"),
    [
        # a. Either at 80 or above: the larger, compute if equal.
        (80.0, 0.0, "compute"),
        (79.9, 80.0, "memory"),
        (80.0, 80.0, "compute"),
        (85.0, 90.0, "memory"),
        (90.0, 89.9, "compute"),
        (100.0, 0.0, "compute"),
        # b. Both below 60.
        (59.9, 59.9, "latency"),
        (0.0, 0.0, "latency"),
        (59.9, 10.0, "latency"),
        # c. A lead of 10 points decides.
        (60.0, 50.0, "compute"),
        (50.0, 60.0, "memory"),
        (79.0, 69.0, "compute"),
        (60.0, 70.0, "memory"),
        # d. Closer is balanced.
        (60.0, 50.1, "balanced"),
        (60.0, 59.0, "balanced"),
        (79.9, 70.0, "balanced"),
    ],
)
def test_the_rule_and_its_boundaries(tmp_path: Path, compute: float, memory: float, bound: str) -> None:
    row = verdict(tmp_path, sol(compute, memory))
    assert (row["bound"], row["method"]) == (bound, "exact")
    assert (row["compute_pct"], row["memory_pct"]) == (compute, memory)


@pytest.mark.parametrize(
    ("settings", "bound"),
    [({"high_pct": 70}, "memory"), ({"low_pct": 75}, "latency"), ({"lead_pct": 5}, "memory"), (None, "balanced")],
)
def test_thresholds_are_settings(tmp_path: Path, settings: dict[str, float] | None, bound: str) -> None:
    assert verdict(tmp_path, sol(65.0, 72.0), settings=settings)["bound"] == bound


# --- level and pipe ----------------------------------------------------------------------------

LEVELS = {"dram_pct": 91.0, "l2_pct": 40.0, "l1_pct": 20.0}
PIPES = {
    "pipe_tensor_pct": 88.0, "pipe_fma_pct": 5.0, "pipe_alu_pct": 6.0, "pipe_fp64_pct": 0.0,
    "pipe_xu_pct": 1.0, "pipe_lsu_pct": 10.0, "pipe_issue_pct": 20.0,
}  # fmt: skip


@pytest.mark.parametrize(("counter", "level"), [("dram_pct", "DRAM"), ("l2_pct", "L2"), ("l1_pct", "L1")])
def test_a_memory_verdict_names_the_busiest_level(tmp_path: Path, counter: str, level: str) -> None:
    row = verdict(tmp_path, sol(14.0, 95.0, **{**LEVELS, counter: 95.0}))
    assert (row["bound"], row["level_or_pipe"]) == ("memory", level)


@pytest.mark.parametrize(
    ("counter", "pipe"),
    [
        ("pipe_tensor_pct", "tensor"),
        ("pipe_fma_pct", "FMA"),
        ("pipe_alu_pct", "ALU"),
        ("pipe_fp64_pct", "FP64"),
        ("pipe_xu_pct", "XU"),
        ("pipe_lsu_pct", "LSU"),
        ("pipe_issue_pct", "issue"),
    ],
)
def test_a_compute_verdict_names_the_busiest_pipe(tmp_path: Path, counter: str, pipe: str) -> None:
    row = verdict(tmp_path, sol(95.0, 14.0, **{**PIPES, counter: 95.0}))
    assert (row["bound"], row["level_or_pipe"]) == ("compute", pipe)


def test_a_level_is_not_guessed_where_none_comes_near_the_total(tmp_path: Path) -> None:
    assert verdict(tmp_path / "a", sol(14.0, 91.0, dram_pct=91.0))["level_or_pipe"] == "DRAM"
    assert pd.isna(verdict(tmp_path / "b", sol(14.0, 91.0, dram_pct=50.0))["level_or_pipe"])
    assert pd.isna(verdict(tmp_path / "c", sol(14.0, 91.0, dram_pct=50.0, l2_pct=1.0, l1_pct=2.0))["level_or_pipe"])
    assert pd.isna(verdict(tmp_path / "d", sol(91.0, 14.0))["level_or_pipe"])


def test_the_level_is_the_one_that_makes_the_total_not_the_largest(tmp_path: Path) -> None:
    """As measured on an H200: a stream copy, whose L2 is busier than the memory total counts."""
    row = verdict(tmp_path, sol(6.1, 84.3, dram_pct=84.3, l2_pct=88.8, l1_pct=27.6))
    assert (row["bound"], row["level_or_pipe"]) == ("memory", "DRAM")
    assert row["reason"] == "memory 84.3 % of peak (>= 80 %), DRAM 84.3 %; compute 6.1 %"


def test_other_verdicts_have_no_level(tmp_path: Path) -> None:
    assert pd.isna(verdict(tmp_path, sol(70.0, 70.0, **LEVELS, **PIPES))["level_or_pipe"])


# --- reasons -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counters", "reason"),
    [
        (
            sol(14.04, 91.2, **LEVELS),
            "memory 91.2 % of peak (>= 80 %), DRAM 91.0 %; compute 14.0 %",
        ),
        (
            sol(50.0, 65.0),
            "memory 65.0 % of peak (>= 10 points above compute); compute 50.0 %",
        ),
        (
            sol(91.2, 14.0, **PIPES),
            "compute 91.2 % of peak (>= 80 %), busiest pipe tensor 88.0 %; memory 14.0 %",
        ),
        (
            sol(65.0, 50.0),
            "compute 65.0 % of peak (>= 10 points above memory); memory 50.0 %",
        ),
        (
            sol(70.0, 75.0),
            "compute 70.0 % and memory 75.0 % of peak: less than 10 points apart, neither >= 80 %",
        ),
        (
            sol(10.0, 20.0),
            "compute 10.0 %, memory 20.0 % of peak (both < 60 %): dependencies between instructions or memory latency",
        ),
        (
            sol(10.0, 20.0, issue_active_pct=12.0, occupancy_pct=90.0),
            "compute 10.0 %, memory 20.0 % of peak (both < 60 %): enough warps, but they wait: "
            "schedulers issue in 12.0 % of their cycles (< 60 %)",
        ),
        (
            sol(10.0, 20.0, issue_active_pct=12.0, occupancy_pct=30.0),
            "compute 10.0 %, memory 20.0 % of peak (both < 60 %): few warps, occupancy 30.0 % (< 50 %)",
        ),
    ],
)
def test_the_reason_gives_numbers_and_thresholds(tmp_path: Path, counters: Counters, reason: str) -> None:
    assert verdict(tmp_path, counters)["reason"] == reason


def test_a_latency_verdict_blames_a_small_grid_first(tmp_path: Path) -> None:
    row = verdict(tmp_path, sol(1.0, 2.0, occupancy_pct=6.0), device={}, grid=(66, 1, 1), block=(1024, 1, 1))
    assert row["waves"] == 0.25
    assert row["reason"].endswith("(both < 60 %): the grid fills 0.25 of one wave on 132 SMs")


def test_a_latency_verdict_names_what_limits_the_occupancy(tmp_path: Path) -> None:
    counters = sol(1.0, 2.0, occupancy_pct=11.0)
    row = verdict(tmp_path, counters, device={}, grid=(10_000, 1, 1), block=(256, 1, 1), registers=255)
    assert row["reason"].endswith("few warps, occupancy 11.0 % (< 50 %) of 12.5 % possible by registers")


# --- launch, communication, undetermined -------------------------------------------------------


@pytest.mark.parametrize(
    ("duration_ns", "in_graph", "counters", "bound"),
    [
        (4_999, False, sol(5.0, 5.0), "launch"),
        (5_000, False, sol(5.0, 5.0), "latency"),
        (4_999, True, sol(5.0, 5.0), "latency"),
        (4_999, False, sol(59.9, 59.9), "launch"),
        (4_999, False, sol(60.0, 5.0), "compute"),
        (4_999, False, {}, "launch"),
        (4_999, True, {}, "undetermined"),
        (5_000, False, {}, "undetermined"),
        (4_999, False, sol(99.0, None), "launch"),
    ],
)
def test_launch_bound(tmp_path: Path, duration_ns: int, in_graph: bool, counters: Counters, bound: str) -> None:
    assert verdict(tmp_path, counters, duration_ns=duration_ns, in_graph=in_graph)["bound"] == bound


def test_launch_reasons(tmp_path: Path) -> None:
    assert verdict(tmp_path / "a", sol(5.0, 6.0), duration_ns=2_100)["reason"] == (
        "mean duration 2.1 us (< 5.0 us), about the cost of a launch; compute 5.0 %, memory 6.0 % of peak (both < 60 %)"
    )
    row = verdict(tmp_path / "b", duration_ns=2_100)
    assert row["reason"] == (
        "mean duration 2.1 us (< 5.0 us), about the cost of a launch; not measured: compute_pct, memory_pct"
    )
    assert row["missing"] == "compute_pct, memory_pct"
    assert pd.isna(row["method"])


@pytest.mark.parametrize(
    ("counters", "missing"),
    [({}, "compute_pct, memory_pct"), (sol(90.0, None), "memory_pct"), (sol(None, 90.0), "compute_pct")],
)
def test_missing_counters_are_named(tmp_path: Path, counters: Counters, missing: str) -> None:
    row = verdict(tmp_path, counters)
    assert (row["bound"], row["missing"], row["reason"]) == ("undetermined", missing, f"not measured: {missing}")


@pytest.mark.parametrize(
    "name",
    [
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
        "ncclSymkDevKernel_AllReduce_AGxLL_R_sum_f32(ncclSymkDevWorkArgs)",
        "void vllm::cross_device_reduce_1stage<float, 2>(vllm::RankData*)",
        "(anonymous namespace)::one_shot_all_reduce_kernel<float>(float**)",
        "void two_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(x)",
        "multimem_all_reduce_kernel",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<1>(x)",
        "void tensorrt_llm::kernels::oneShotAllReduceKernel<half, 8>(x)",
        "nvshmemi_transfer_kernel",
        "void deep_ep::intranode::dispatch<8, 768>(int4*)",
        "mscclKernel_Sum_float_Simple(msccl)",
        "void mscclpp::allgather(x)",
    ],
)
def test_collectives_are_communication_whatever_was_counted(tmp_path: Path, name: str) -> None:
    row = verdict(tmp_path, sol(90.0, 10.0), name=name, duration_ns=3_000)
    assert row["bound"] == "communication"
    assert pd.isna(row["missing"])


@pytest.mark.parametrize(
    "name",
    [
        "void at::native::reduce_kernel<512, 1, ReduceOp<float>>(x)",
        "gemm<ncclFloat>(ncclDevKernel_x)",
        "elementwise(all_reduce_args)",
        "block_reduce_all",
        "scatter_gather_kernel",
    ],
)
def test_other_kernels_are_not(tmp_path: Path, name: str) -> None:
    assert verdict(tmp_path, sol(90.0, 10.0), name=name)["bound"] == "compute"


# --- confidence --------------------------------------------------------------------------------


def test_two_launches_span_their_own_values(tmp_path: Path) -> None:
    row = verdict(tmp_path, sol(78.0, 10.0), sol(84.0, 10.0))
    assert (row["compute_low_pct"], row["compute_high_pct"]) == (78.0, 84.0)
    assert row["bound"] == "compute"


def test_an_interval_across_a_threshold_leaves_it_open(tmp_path: Path) -> None:
    row = verdict(tmp_path, sol(58.0, 10.0), sol(64.0, 10.0))
    assert (row["bound"], row["method"]) == ("undetermined", "exact")
    assert row["reason"] == (
        "compute or latency, likely compute: compute 61.0 % (58.0 to 64.0), memory 10.0 % (10.0 to 10.0) "
        "over 2 launches"
    )
    assert pd.isna(row["level_or_pipe"])


def test_three_launches_use_student_s_t(tmp_path: Path) -> None:
    row = verdict(tmp_path, *(sol(70.0, memory) for memory in (74.0, 75.0, 76.0)))
    half = 4.303 * 1 / 3**0.5
    assert row["memory_low_pct"] == pytest.approx(75 - half)
    assert row["memory_high_pct"] == pytest.approx(75 + half)
    assert row["bound"] == "balanced"


def test_a_wide_interval_names_every_candidate(tmp_path: Path) -> None:
    row = verdict(tmp_path, *(sol(65.0, memory) for memory in (55.0, 70.0, 85.0)))
    assert row["bound"] == "undetermined"
    assert row["reason"].startswith(("memory or compute or balanced", "memory or compute, likely "))
    assert "over 3 launches" in row["reason"]


def test_an_interval_does_not_go_below_zero(tmp_path: Path) -> None:
    row = verdict(tmp_path, *(sol(compute, 90.0) for compute in (0.0, 0.0, 10.0)))
    assert row["compute_low_pct"] == 0


def test_many_launches_narrow_the_interval(tmp_path: Path) -> None:
    row = verdict(tmp_path, *(sol(61.0 + (i % 2), 10.0) for i in range(40)))
    assert row["bound"] == "compute"
    assert row["launches_measured"] == 40


# --- impossible values -------------------------------------------------------------------------


def test_more_than_the_peak_is_flagged_not_hidden(tmp_path: Path) -> None:
    row = verdict(tmp_path, sol(10.0, 90.0, dram_pct=112.0))
    assert row["over_peak"] is True or row["over_peak"] == True  # noqa: E712 - numpy's bool
    assert row["dram_pct"] == 112.0
    assert row["reason"].endswith("; a counter reads 112.0 % of its peak, so the count or the peak is wrong")


def test_a_whisker_over_the_peak_is_not_flagged(tmp_path: Path) -> None:
    assert not verdict(tmp_path, sol(10.0, 100.9))["over_peak"]


def test_nothing_is_infinite_or_nan(tmp_path: Path) -> None:
    zero = sol(0.0, 0.0, dram_read_bytes=0.0, dram_write_bytes=0.0, duration_ns=0.0, tensor_fp16_ops=0.0)
    row = verdict(tmp_path, zero, duration_ns=0, device={"sm_count": 0, "warp_size": 0, "registers_per_sm": 0})
    numbers = [value for value in row if isinstance(value, float)]
    assert not [value for value in numbers if value in (float("inf"), float("-inf"))]
    assert pd.isna(row["share"])
    assert pd.isna(row["tensor_share"])
    with na.open(tmp_path) as run:
        # In DuckDB, unlike pandas, NaN and NULL differ.
        assert run.sql("SELECT count(*) AS n FROM verdicts WHERE isnan(share) OR isnan(waves)")["n"][0] == 0
        points = run.query("roofline_points")
    assert points[["operations_per_s", "intensity", "roof_share"]].isna().to_numpy().all()


# --- evidence ----------------------------------------------------------------------------------


def test_bytes_and_operations(tmp_path: Path) -> None:
    row = verdict(
        tmp_path,
        sol(
            90.0, 10.0, duration_ns=2000.0,
            dram_read_bytes=100.0, dram_write_bytes=50.0, l2_bytes=300.0, l1_bytes=400.0,
            thread_inst_fadd=1.0, thread_inst_fmul=2.0, thread_inst_ffma=10.0,
            thread_inst_hadd=1.0, thread_inst_hmul=2.0, thread_inst_hfma=10.0,
            thread_inst_dadd=1.0, thread_inst_dmul=2.0, thread_inst_dfma=10.0,
            tensor_fp16_ops=100.0, tensor_bf16_ops=38.0,
        ),
    )  # fmt: skip
    assert (row["dram_bytes"], row["l2_bytes"], row["l1_bytes"]) == (150.0, 300.0, 400.0)
    assert (row["fp32_flops"], row["fp16_flops"], row["fp64_flops"]) == (23.0, 46.0, 23.0)
    assert row["tensor_ops"] == 138.0
    assert row["tensor_share"] == 138 / 230
    assert row["measured_ns"] == 2000.0


def test_a_sum_with_a_missing_part_is_missing(tmp_path: Path) -> None:
    row = verdict(tmp_path, sol(90.0, 10.0, dram_read_bytes=100.0, thread_inst_fadd=1.0))
    assert pd.isna(row["dram_bytes"])
    assert pd.isna(row["fp32_flops"])
    assert pd.isna(row["tensor_ops"])


def test_shares_and_order(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    for name, duration in (("small", 100), ("large", 300), ("untimed", None)):
        trace.kernel(trace.kernel_class(name), 0, duration)
    trace.write()
    rows = na.open(tmp_path).verdicts()
    assert rows["kernel"].tolist() == ["large", "small", "untimed"]
    assert rows["share"].tolist()[:2] == [0.75, 0.25]
    assert rows["share"].isna().tolist() == [False, False, True]
    assert rows["total_ns"].isna().tolist() == [False, False, True]
    assert rows["launches_untimed"].tolist() == [0, 0, 1]


def test_a_class_whose_row_is_lost_has_its_id_for_a_name(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    trace.kernel(77, 0, LONG)
    trace.write()
    assert na.open(tmp_path).verdicts()["kernel"].tolist() == ["class 77"]


def test_counters_without_a_launch_row_still_give_a_verdict(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    trace.exact({"sm__throughput.avg.pct_of_peak_sustained_elapsed": 90.0}, kernel_class_id=kernel, correlation_id=1)
    trace.write()
    rows = na.open(tmp_path).verdicts()
    assert rows[["kernel", "launches", "launches_measured", "compute_pct"]].to_numpy().tolist() == [["k", 0, 1, 90.0]]


# --- occupancy ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "device", "occupancy", "limiter"),
    [
        ({"block": (256, 1, 1), "registers": 32}, {}, 100.0, "threads"),
        # 64 registers: 2048 a warp, 8 warps in each of the 4 partitions.
        ({"block": (256, 1, 1), "registers": 64}, {}, 50.0, "registers"),
        # 33 registers: 1056 a warp, taken as 1280: 12 warps a partition, 48 of 64, 6 blocks of 8 warps.
        ({"block": (256, 1, 1), "registers": 33}, {}, 75.0, "registers"),
        # 255 registers: 8192 a warp, 2 a partition.
        ({"block": (32, 1, 1), "registers": 255}, {}, 12.5, "registers"),
        ({"block": (32, 1, 1), "registers": 16}, {}, 50.0, "blocks"),
        # 100 KiB and the driver's 1 KiB: two blocks in 228 KiB.
        ({"block": (256, 1, 1), "dynamic_shared": 100 * 1024}, {}, 25.0, "shared"),
        ({"block": (256, 1, 1), "static_shared": 100 * 1024}, {}, 25.0, "shared"),
        # 76 KiB thrice is all of the 228 KiB; the driver's part makes it two.
        ({"block": (256, 1, 1), "dynamic_shared": 76 * 1024}, {}, 25.0, "shared"),
        ({"block": (256, 1, 1), "dynamic_shared": 76 * 1024}, {"cc_major": 7}, 37.5, "shared"),
        ({"block": (33, 1, 1), "registers": 16}, {}, 100.0, "threads"),
        ({"block": (768, 1, 1), "registers": 16}, {}, 75.0, "threads"),
        ({"block": (768, 1, 1), "registers": 16}, {"threads_per_sm_max": 1536}, 100.0, "threads"),
        ({"block": (256, 1, 1), "registers": 0}, {}, 100.0, "threads"),
    ],
)
def test_theoretical_occupancy(
    tmp_path: Path, shape: dict[str, Any], device: dict[str, Any], occupancy: float, limiter: str
) -> None:
    row = verdict(tmp_path, sol(1.0, 1.0), device=device, **shape)
    assert (row["theoretical_occupancy_pct"], row["occupancy_limiter"]) == (occupancy, limiter)


@pytest.mark.parametrize(
    ("shape", "device"),
    [
        ({"registers": None}, {}),
        ({"dynamic_shared": None}, {}),
        ({}, {"registers_per_sm": None}),
        ({}, {"shared_reserved_bytes_per_block": None}),
        ({}, {"blocks_per_sm_max": None}),
        ({}, {"warp_size": 0}),
        ({"block": (0, 1, 1)}, {}),
        ({"block": (2**31 - 1, 2**31 - 1, 2**31 - 1)}, {}),
        ({"dynamic_shared": 2**62, "static_shared": 2**62}, {}),
        ({"registers": 2**31 - 1}, {}),
    ],
)
def test_occupancy_is_missing_where_a_part_of_it_is(
    tmp_path: Path, shape: dict[str, Any], device: dict[str, Any]
) -> None:
    row = verdict(tmp_path, sol(1.0, 1.0), device=device, **shape)
    assert pd.isna(row["theoretical_occupancy_pct"])
    assert pd.isna(row["occupancy_limiter"])
    assert pd.isna(row["waves"])


def test_waves_count_the_blocks_that_fit(tmp_path: Path) -> None:
    row = verdict(tmp_path, sol(90.0, 1.0), device={}, grid=(132, 8, 2), block=(256, 1, 1), registers=32)
    assert row["waves"] == 2.0
    huge = verdict(tmp_path / "b", sol(90.0, 1.0), device={}, grid=(2**31 - 1, 65535, 65535), block=(256, 1, 1))
    assert huge["waves"] > 1e15


def test_the_device_with_the_most_launches_gives_the_properties(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    trace.device()
    trace.device(device_id=1, sm_count=66)
    kernel = trace.kernel_class("k", grid=(132, 1, 1), block=(1024, 1, 1), registers=16)
    for device in (0, 1, 1):
        trace.kernel(kernel, 0, LONG, device_id=device)
    trace.write()
    assert na.open(tmp_path).verdicts()["waves"].tolist() == [1.0]
