"""The hierarchical roofline: intensities by level of the memory, measured ceilings beside the datasheet's."""

from __future__ import annotations

from pathlib import Path
from trace import PROCESS, Trace
from typing import Any

import pytest

import nanalyze.analysis as na

HERTZ = 1_000_000_000
# One launch of 1000 ns: 2e6 FLOP on the FP32 pipe, and bytes by level.
COUNTED = {
    "duration_ns": 1000.0, "sm_clock_hz": 1e9, "compute_pct": 50.0, "memory_pct": 50.0,
    "thread_inst_fadd": 0.0, "thread_inst_fmul": 0.0, "thread_inst_ffma": 1e6,
    "dram_read_bytes": 3e5, "dram_write_bytes": 1e5, "l2_bytes": 1e6, "l1_bytes": 4e6,
}  # fmt: skip


def ceiling(trace: Trace, name: str, per_s: float, unit: str = "bytes/s", **columns: Any) -> None:
    row = {
        "device_id": 0, "ceiling": name, "method": "test", "unit": unit, "per_s": per_s, "low_per_s": 0.9 * per_s,
        "high_per_s": 1.1 * per_s, "repetitions": 9, "is_partial": False, "sm_clock_hz": HERTZ, "measured_ns": 1,
    }  # fmt: skip
    trace.add("ceilings", columns.pop("process", None), **{**row, **columns})


def one_kernel(run_dir: Path, counters: dict[str, float] | None = None) -> Trace:
    trace = Trace(run_dir)
    trace.device()
    kernel = trace.kernel_class("k", (1320, 1, 1), (256, 1, 1))
    trace.kernel(kernel, 0, 1000)
    trace.measure(kernel, [counters or COUNTED])
    return trace


def points(trace: Trace) -> dict[str, Any]:
    trace.write()
    with na.open(trace.run_dir) as run:
        (row,) = run.query("roofline_points").astype(object).to_dict("records")
    return {name: None if value != value else value for name, value in row.items()}


def test_each_level_has_an_intensity_and_a_rate_of_its_own(tmp_path: Path) -> None:
    row = points(one_kernel(tmp_path))
    assert (row["pipe"], row["operations"]) == ("fp32", 2e6)
    assert (row["intensity"], row["l2_intensity"], row["l1_intensity"]) == (5.0, 2.0, 0.5)
    assert (row["dram_bytes_per_s"], row["l2_bytes_per_s"], row["l1_bytes_per_s"]) == pytest.approx((4e11, 1e12, 4e12))
    assert [row[f"{name}_ceiling_per_s"] for name in ("pipe", "dram", "l2", "l1")] == [None] * 4
    # Without ceilings only what the datasheet gives is compared: 2e15 of 33.8 T FLOP/s and 0.4 of 4.8 T bytes/s.
    assert (row["nearest"], row["nearest_share"]) == ("DRAM", pytest.approx(0.4 / 4.8))


def test_a_level_whose_bytes_were_not_counted_is_left_out(tmp_path: Path) -> None:
    counters = {name: value for name, value in COUNTED.items() if name not in ("l1_bytes", "l2_bytes")}
    trace = one_kernel(tmp_path, counters)
    ceiling(trace, "l1_read", 1e12)
    row = points(trace)
    assert (row["l1_intensity"], row["l2_intensity"], row["l1_bytes_per_s"]) == (None, None, None)
    assert row["nearest"] == "DRAM"


@pytest.mark.parametrize(
    ("ceilings", "nearest", "share"),
    [
        ({"dram_read": 8e11, "l2_read": 4e12, "l1_read": 8e12}, "DRAM", 0.5),
        ({"dram_read": 4e12, "l2_read": 2e12, "l1_read": 4e13}, "L2", 0.5),
        ({"dram_read": 4e12, "l2_read": 4e12, "l1_read": 5e12}, "L1", 0.8),
        ({"dram_read": 4e12, "l2_read": 4e12, "l1_read": 4e13, "fp32": 2.5e15}, "fp32", 0.8),
    ],
)
def test_the_nearest_ceiling_is_the_one_with_the_largest_share(
    tmp_path: Path, ceilings: dict[str, float], nearest: str, share: float
) -> None:
    trace = one_kernel(tmp_path, {**COUNTED, "thread_inst_ffma": 1e12} if nearest == "fp32" else None)
    for name, per_s in ceilings.items():
        ceiling(trace, name, per_s, "FLOP/s" if name == "fp32" else "bytes/s")
    row = points(trace)
    expected = 2e12 * 1e6 / 2.5e15 if nearest == "fp32" else share
    assert (row["nearest"], row["nearest_share"]) == (nearest, pytest.approx(expected))


def test_ceilings_of_the_pipe_and_l1_follow_the_clock_and_those_of_l2_and_dram_do_not(tmp_path: Path) -> None:
    trace = one_kernel(tmp_path)
    for name, unit in (("fp32", "FLOP/s"), ("l1_read", "bytes/s"), ("l2_read", "bytes/s"), ("dram_read", "bytes/s")):
        ceiling(trace, name, 1e13, unit, sm_clock_hz=2 * HERTZ)
    ceiling(trace, "dram_copy", 1.2e13, sm_clock_hz=2 * HERTZ)
    row = points(trace)
    assert (row["pipe_ceiling_per_s"], row["l1_ceiling_per_s"]) == (5e12, 5e12)
    assert (row["l2_ceiling_per_s"], row["dram_ceiling_per_s"]) == (1e13, 1.2e13)


def test_what_reaches_only_part_of_a_pipe_is_no_ceiling_of_it(tmp_path: Path) -> None:
    tensor = {**COUNTED, "tensor_bf16_ops": 1e8}
    trace = one_kernel(tmp_path, tensor)
    ceiling(trace, "tensor_bf16", 6e14, "FLOP/s", is_partial=True)
    row = points(trace)
    assert (row["pipe"], row["pipe_ceiling_per_s"]) == ("tensor_fp16", None)


def test_fp16_and_bf16_are_one_pipe_whose_ceiling_is_the_higher(tmp_path: Path) -> None:
    trace = one_kernel(tmp_path, {**COUNTED, "tensor_bf16_ops": 1e8})
    ceiling(trace, "tensor_bf16", 6e14, "FLOP/s")
    ceiling(trace, "tensor_fp16", 7e14, "FLOP/s")
    assert points(trace)["pipe_ceiling_per_s"] == 7e14


def test_measured_ceilings_stand_beside_the_datasheet(tmp_path: Path) -> None:
    trace = one_kernel(tmp_path)
    ceiling(trace, "fp32", 3e13, "FLOP/s")
    ceiling(trace, "dram_read", 4.2e12)
    ceiling(trace, "l2_read", 8e12)
    trace.write()
    with na.open(tmp_path) as run:
        frame = run.query("roofline_ceilings").set_index("ceiling")
    fp32 = frame.loc["fp32"]
    assert fp32["datasheet_per_s"] == 256 * 132 * 2e9
    assert fp32["datasheet_at_clock_per_s"] == 256 * 132 * 1e9
    assert fp32["share"] == pytest.approx(3e13 / (256 * 132 * 1e9))
    assert frame.loc["dram_read", "share"] == pytest.approx(4.2 / 4.8)
    assert (frame.loc["l2_read", "kind"], frame.loc["l2_read", "measured_per_s"]) == ("memory", 8e12)
    assert frame.loc["l2_read", ["datasheet_per_s", "share"]].isna().all()
    assert frame.loc["fp64", "devices"] == 0


def test_several_devices_of_one_kind_are_one_row_with_the_median(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    for device, per_s in ((0, 3.0e12), (1, 4.0e12), (2, 3.2e12)):
        trace.device(device_id=device, uuid=f"GPU-{device}")
        ceiling(trace, "dram_read", per_s, device_id=device)
    # The same GPU, seen by another process too, counts once.
    trace.device("other-1-2", device_id=0, uuid="GPU-0")
    ceiling(trace, "dram_read", 9e12, device_id=0, process="other-1-2")
    trace.kernel(trace.kernel_class("k"), 0, 10)
    trace.write()
    with na.open(tmp_path) as run:
        row = run.query("roofline_ceilings").set_index("ceiling").loc["dram_read"]
    assert (row["measured_per_s"], row["devices"]) == (3.2e12, 3)
    assert (row["low_per_s"], row["high_per_s"]) == (0.9 * 3e12, 1.1 * 4e12)
    assert PROCESS == "node0-0-100"  # sorts before the other one, so its measurement is the one that counts
