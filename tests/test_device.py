"""Device properties and state: values, their units, and what happens where NVML or the driver lack them."""

from __future__ import annotations

import sys
import time
from typing import Any

import cuda.bindings
import pytest
from cuda.bindings import driver as real_driver
from fake_gpu import UUID_TEXT, FakeGpu

from nanalyze.recorder import device
from nanalyze.rundir.errors import RecorderError
from nanalyze.rundir.schema import TABLES


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()
    gpu.install(monkeypatch)
    return gpu


def describe() -> dict[str, Any]:
    (row,) = device.Devices().describe()
    return row


def test_every_attribute_asked_for_exists_in_cuda_python() -> None:
    """A name that does not exist would silently be a missing value."""
    names = {f"CU_DEVICE_ATTRIBUTE_{attribute}" for attribute in device._ATTRIBUTES.values()}
    assert {name for name in names if not hasattr(real_driver.CUdevice_attribute, name)} == set()


def test_an_h200(gpu: FakeGpu) -> None:
    row = describe()
    assert set(row) <= set(TABLES["devices"].column_names)
    rates = {name: value for name, value in row.items() if "per_sm_cycle" in name or name == "peaks_source"}
    assert {name: value for name, value in row.items() if name not in rates} == {
        "device_id": 0,
        "name": "NVIDIA H200",
        "uuid": f"GPU-{UUID_TEXT}",
        "is_mig": False,
        "cc_major": 9,
        "cc_minor": 0,
        "sm_count": 132,
        "warp_size": 32,
        "threads_per_sm_max": 2048,
        "blocks_per_sm_max": 32,
        "registers_per_sm": 65536,
        "shared_bytes_per_sm": 233472,
        "shared_reserved_bytes_per_block": 1024,
        "l2_bytes": 62914560,
        "memory_bytes": 150_121_545_728,
        "memory_bus_bits": 6144,
        "sm_clock_max_hz": 1_980_000_000,
        "memory_clock_max_hz": 3_201_000_000,
        "dram_peak_bytes_per_s": 4_916_736_000_000.0,  # NVIDIA's datasheet says 4.8 TB/s
    }
    assert rates["fp32_flops_per_sm_cycle"] == 256
    assert rates["tensor_fp16_flops_per_sm_cycle"] == 4096
    assert rates["peaks_source"]


def test_each_device_has_its_own_handle(gpu: FakeGpu) -> None:
    gpu.bindings.device_count = 2
    gpu.nvml.uuids = {UUID_TEXT[:-2] + "10": 5, UUID_TEXT: 9}  # NVML's order is not CUDA's
    devices = device.Devices()
    assert [row["uuid"] for row in devices.describe()] == [f"GPU-{UUID_TEXT}", f"GPU-{UUID_TEXT[:-2]}10"]
    assert devices._handles == {0: 9, 1: 5}


def test_a_mig_instance_has_no_share_of_the_bus_that_is_known(gpu: FakeGpu) -> None:
    gpu.nvml.kind = "MIG"
    row = describe()
    assert (row["uuid"], row["is_mig"]) == (f"MIG-{UUID_TEXT}", True)
    assert row.get("dram_peak_bytes_per_s") is None
    assert row["sm_count"] == 132


def test_without_nvml_the_driver_tells_the_clocks(gpu: FakeGpu) -> None:
    gpu.nvml.broken = {"init_v2"}
    devices = device.Devices()
    (row,) = devices.describe()
    assert devices.missing is not None
    assert devices.missing.startswith("NVML does not work here (init_v2: NVML_ERROR_NOT_SUPPORTED)")
    assert (row["sm_clock_max_hz"], row["memory_clock_max_hz"]) == (1_980_000_000, 3_201_000_000)
    assert row["dram_peak_bytes_per_s"] == 4_916_736_000_000.0
    assert (row["uuid"], row["is_mig"]) == (f"GPU-{UUID_TEXT}", None)
    assert devices.state({0}) == []
    assert devices.gpu_driver_version() is None


def test_an_attribute_that_cuda_python_lacks_is_missing(gpu: FakeGpu) -> None:
    del gpu.bindings.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK
    assert describe()["shared_reserved_bytes_per_block"] is None


def test_an_unknown_architecture_has_no_rates(gpu: FakeGpu) -> None:
    gpu.bindings.attributes |= {"COMPUTE_CAPABILITY_MAJOR": 99}
    row = describe()
    assert (row["cc_major"], row["fp32_flops_per_sm_cycle"], row["peaks_source"]) == (99, None, None)


@pytest.mark.parametrize(
    "function", ["cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceTotalMem"]
)
def test_a_driver_that_answers_with_an_error_is_one_error(gpu: FakeGpu, function: str) -> None:
    gpu.bindings.codes = {function: 999}
    with pytest.raises(RecorderError) as caught:
        device.Devices().describe()
    assert "CUDA_ERROR_999" in str(caught.value)


def test_the_state_now(gpu: FakeGpu) -> None:
    devices = device.Devices()
    devices.describe()
    before = time.time_ns()
    (row,) = devices.state({0})
    assert set(row) == set(TABLES["device_state"].column_names)
    assert before <= row.pop("time_ns") <= time.time_ns()
    assert row == {
        "device_id": 0,
        "sm_clock_hz": 1_755_000_000,
        "memory_clock_hz": 3_201_000_000,
        "power_mw": 412_345,
        "temperature_c": 41,
        "throttle_reasons": 4,
    }


@pytest.mark.parametrize(
    ("broken", "missing"),
    [
        ("device_get_clock_info", {"sm_clock_hz", "memory_clock_hz"}),
        ("device_get_power_usage", {"power_mw"}),
        ("device_get_temperature_v", {"temperature_c"}),
        ("device_get_current_clocks_event_reasons", {"throttle_reasons"}),
    ],
)
def test_what_nvml_does_not_support_is_missing(gpu: FakeGpu, broken: str, missing: set[str]) -> None:
    devices = device.Devices()
    devices.describe()
    gpu.nvml.broken = {broken}
    (row,) = devices.state({0})
    assert {name for name, value in row.items() if value is None} == missing


def test_only_devices_in_use_are_followed(gpu: FakeGpu) -> None:
    gpu.bindings.device_count = 3
    gpu.nvml.uuids = {f"{UUID_TEXT[:-2]}{digits}": place for place, digits in enumerate(("0f", "10", "11"))}
    devices = device.Devices()
    devices.describe()
    assert [row["device_id"] for row in devices.state({2, 0, 7})] == [0, 2]


def test_nothing_but_reading_is_ever_asked_of_nvml(gpu: FakeGpu) -> None:
    """Clocks, power and modes of a lent card must stay as they are: the fake has no function that sets any."""
    asked: list[str] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(gpu.nvml, name)

    devices = device.Devices()
    devices._nvml = Watched()
    devices.describe()
    devices.state({0})
    devices.gpu_driver_version()
    functions = {name for name in asked if name.islower()}
    assert functions
    assert all("_get_" in name for name in functions)


def test_versions(gpu: FakeGpu) -> None:
    assert device.driver_version() == 13000
    assert device.Devices().gpu_driver_version() == "580.159.03"
    gpu.bindings.codes = {"cuDriverGetVersion": 3}
    assert device.driver_version() is None


def test_without_cuda_python_everything_is_missing_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("driver", "nvml"):
        monkeypatch.setitem(sys.modules, f"cuda.bindings.{name}", None)
        monkeypatch.delattr(cuda.bindings, name, raising=False)
    devices = device.Devices()
    assert devices.missing is not None
    assert "pip install" in devices.missing
    assert device.driver_version() is None
    with pytest.raises(RecorderError) as caught:
        devices.describe()
    assert "pip install cuda-python" in str(caught.value) or "pip install cuda-bindings" in str(caught.value)


# --- waiting for the GPU ----------------------------------------------------------------------


def test_synchronize_waits_for_each_active_context_and_gives_it_back(gpu: FakeGpu) -> None:
    gpu.bindings.device_count = 3
    gpu.bindings.active_contexts = {0, 2}
    device.synchronize()
    assert gpu.bindings.synchronized == 2
    assert (gpu.bindings.retained, gpu.bindings.current) == (0, [])


def test_synchronize_creates_no_context(gpu: FakeGpu) -> None:
    gpu.bindings.active_contexts = set()
    device.synchronize()
    assert gpu.bindings.synchronized == 0


@pytest.mark.parametrize("function", ["cuCtxSynchronize", "cuCtxPushCurrent"])
def test_a_broken_context_is_given_back_too(gpu: FakeGpu, function: str) -> None:
    gpu.bindings.codes = {function: 700}  # CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(RecorderError):
        device.synchronize()
    assert gpu.bindings.retained == 0
