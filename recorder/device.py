"""What the GPUs are and how they are doing: driver attributes, NVML, per-architecture peaks.

Everything is read-only. Nothing here creates a CUDA context; without cuda-python or a driver
the tables stay empty and `missing` says why.
"""

from __future__ import annotations

import time
from typing import Any

from nanalyze.recorder import peaks
from nanalyze.rundir.errors import RecorderError

_ATTRIBUTES = {
    "sm_count": "MULTIPROCESSOR_COUNT",
    "cc_major": "COMPUTE_CAPABILITY_MAJOR",
    "cc_minor": "COMPUTE_CAPABILITY_MINOR",
    "warp_size": "WARP_SIZE",
    "threads_per_sm_max": "MAX_THREADS_PER_MULTIPROCESSOR",
    "blocks_per_sm_max": "MAX_BLOCKS_PER_MULTIPROCESSOR",
    "registers_per_sm": "MAX_REGISTERS_PER_MULTIPROCESSOR",
    "shared_bytes_per_sm": "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    "shared_reserved_bytes_per_block": "RESERVED_SHARED_MEMORY_PER_BLOCK",
    "l2_bytes": "L2_CACHE_SIZE",
    "memory_bus_bits": "GLOBAL_MEMORY_BUS_WIDTH",
    "sm_clock_khz": "CLOCK_RATE",
    "memory_clock_khz": "MEMORY_CLOCK_RATE",
}
_BITS_PER_BYTE = 8
_TRANSFERS_PER_CLOCK = 2  # DDR: NVML and the driver report the command clock of HBM and GDDR alike


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise RecorderError(f"device properties need cuda-bindings (pip install cuda-bindings): {error}") from error
    try:
        driver.cuDriverGetVersion()
    except Exception as error:  # cuda-python's own error where libcuda does not load
        raise RecorderError(f"the CUDA driver does not load: {error}") from error
    return driver


def _value(result: tuple[Any, ...]) -> Any:
    code, *values = result
    if int(code) != 0:
        raise RecorderError(f"the CUDA driver answered {code.name}")
    return values[0] if values else None


def driver_version() -> int | None:
    """The CUDA version the driver supports, 13000 = 13.0."""
    try:
        return int(_value(_driver().cuDriverGetVersion()))
    except RecorderError:
        return None


def in_use() -> set[int]:
    """Ordinals of the devices on which this process has a primary context; none before CUDA is initialised."""
    try:
        driver = _driver()
        ordinals = range(int(_value(driver.cuDeviceGetCount())))
        return {ordinal for ordinal in ordinals if _is_active(driver, ordinal)}
    except RecorderError:
        return set()


def _is_active(driver: Any, ordinal: int) -> bool:
    _, is_active = _value_pair(driver.cuDevicePrimaryCtxGetState(_value(driver.cuDeviceGet(ordinal))))
    return bool(is_active)


def synchronize() -> None:
    """Wait until every primary context of this process has finished its work."""
    driver = _driver()
    for ordinal in sorted(in_use()):
        device = _value(driver.cuDeviceGet(ordinal))
        context = _value(driver.cuDevicePrimaryCtxRetain(device))
        try:
            _value(driver.cuCtxPushCurrent(context))
            _value(driver.cuCtxSynchronize())
            _value(driver.cuCtxPopCurrent())
        finally:
            driver.cuDevicePrimaryCtxRelease(device)


def _value_pair(result: tuple[Any, ...]) -> tuple[Any, Any]:
    code, first, second = result
    if int(code) != 0:
        raise RecorderError(f"the CUDA driver answered {code.name}")
    return first, second


class Devices:
    """The GPUs of this process, by CUDA ordinal; NVML handles are found by UUID, never by index.

    (`CUDA_VISIBLE_DEVICES` renumbers CUDA's devices but not NVML's.)
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: dict[int, int] = {}
        self.missing: str | None = None
        self._open_nvml()

    def _open_nvml(self) -> None:
        try:
            from cuda.bindings import nvml

            nvml.init_v2()
            self._nvml = nvml
        except ImportError as error:
            needed = "clocks and power need a cuda-bindings with NVML, 13.2 or newer (pip install -U cuda-bindings)"
            self.missing = f"{needed}: {error}"
        except Exception as error:  # NVML's own error types; none may reach the job
            self.missing = f"NVML does not work here ({error}); clocks and power are not recorded"

    def gpu_driver_version(self) -> str | None:
        version: str | None = self._ask("system_get_driver_version")
        return version

    def _ask(self, function: str, *args: Any) -> Any:
        """An NVML value, or None where this GPU, driver or binding does not have it."""
        if self._nvml is None:
            return None
        try:
            return getattr(self._nvml, function)(*args)
        except Exception:  # NOT_SUPPORTED and the like: the value is unknown
            return None

    def _identify(self, ordinal: int, uuid: str) -> tuple[str, int | None]:
        """The full UUID and NVML handle of a device: NVML knows whether it is a GPU or a MIG instance."""
        for kind in ("GPU", "MIG"):
            handle = self._ask("device_get_handle_by_uuid", f"{kind}-{uuid}")
            if handle is not None:
                self._handles[ordinal] = handle
                return f"{kind}-{uuid}", handle
        return f"GPU-{uuid}", None

    def describe(self) -> list[dict[str, Any]]:
        """Rows of the `devices` table; raises RecorderError where the driver cannot be asked."""
        driver = _driver()
        _value(driver.cuInit(0))
        return [self._describe(driver, ordinal) for ordinal in range(int(_value(driver.cuDeviceGetCount())))]

    def _describe(self, driver: Any, ordinal: int) -> dict[str, Any]:
        device = _value(driver.cuDeviceGet(ordinal))
        row: dict[str, Any] = {"device_id": ordinal, "name": _text(_value(driver.cuDeviceGetName(256, device)))}
        for column, attribute in _ATTRIBUTES.items():
            row[column] = _attribute(driver, device, attribute)
        row["uuid"], handle = self._identify(ordinal, _uuid(driver, device))
        row["is_mig"] = row["uuid"].startswith("MIG-") if handle is not None else None
        row["memory_bytes"] = int(_value(driver.cuDeviceTotalMem(device)))
        self._add_clocks(row, handle)
        rates = peaks.rates(row["cc_major"], row["cc_minor"])
        row.update({name: getattr(rates, name) for name in peaks.NUMBER_FIELDS}, peaks_source=rates.source)
        return row

    def _add_clocks(self, row: dict[str, Any], handle: int | None) -> None:
        """Highest clocks and the DRAM peak; a MIG instance owns only part of the bus, so its peak is unknown."""
        for clock, kind in (("sm", "CLOCK_SM"), ("memory", "CLOCK_MEM")):
            khz = row.pop(f"{clock}_clock_khz")
            mhz = self._clock("device_get_max_clock_info", handle, kind)
            row[f"{clock}_clock_max_hz"] = mhz * 1_000_000 if mhz else (khz * 1000 if khz else None)
        bits, hertz = row["memory_bus_bits"], row["memory_clock_max_hz"]
        if bits and hertz and not row["is_mig"]:
            row["dram_peak_bytes_per_s"] = float(_TRANSFERS_PER_CLOCK * hertz * bits / _BITS_PER_BYTE)

    def _clock(self, function: str, handle: int | None, kind: str) -> int | None:
        if handle is None:
            return None
        mhz: int | None = self._ask(function, handle, getattr(self._nvml.ClockType, kind))
        return mhz

    def state(self, ordinals: set[int]) -> list[dict[str, Any]]:
        """Rows of `device_state` for those devices, read now."""
        return [self._state(ordinal) for ordinal in sorted(ordinals) if self._handles.get(ordinal) is not None]

    def _state(self, ordinal: int) -> dict[str, Any]:
        handle = self._handles[ordinal]
        sm, memory = (self._clock("device_get_clock_info", handle, kind) for kind in ("CLOCK_SM", "CLOCK_MEM"))
        return {
            "time_ns": time.time_ns(),
            "device_id": ordinal,
            "sm_clock_hz": sm * 1_000_000 if sm else None,
            "memory_clock_hz": memory * 1_000_000 if memory else None,
            "power_mw": self._ask("device_get_power_usage", handle),
            "temperature_c": self._temperature(handle),
            "throttle_reasons": self._ask("device_get_current_clocks_event_reasons", handle),
        }

    def _temperature(self, handle: int) -> int | None:
        sensors = getattr(self._nvml, "TemperatureSensors", None)
        return None if sensors is None else self._ask("device_get_temperature_v", handle, sensors.TEMPERATURE_GPU)


def _attribute(driver: Any, device: Any, name: str) -> int | None:
    attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
    if attribute is None:
        return None
    try:
        return int(_value(driver.cuDeviceGetAttribute(attribute, device)))
    except RecorderError:
        return None


def _text(raw: bytes) -> str:
    return raw.split(b"\0")[0].decode("utf-8", errors="backslashreplace")


def _uuid(driver: Any, device: Any) -> str:
    text = bytes(_value(driver.cuDeviceGetUuid(device)).bytes).hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
