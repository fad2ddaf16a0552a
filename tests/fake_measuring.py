"""A fake GPU on which measurements can be tried: memory, caches and clocks beside launches.

`MeasuringGpu.install` replaces driver and NVML as `FakeGpu.install` does. `log` holds, in order, the
launches and what was done to the caches and clocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pandas as pd
from fake_gpu import CONTEXT, UUID_TEXT, FakeBindings, FakeGpu, FakeNvml

GPU_UUID = f"GPU-{UUID_TEXT}"
TOTAL_BYTES = 1 << 40
TDP, UNLIMITED = 0xFFFFFF01, 0xFFFFFF02


class MeasuringBindings(FakeBindings):
    """The driver with contexts, memory and function attributes; `free_bytes` is what is left to allocate."""

    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT="carveout")

    def __init__(self, log: list[Any]) -> None:
        super().__init__()
        self.log = log
        self.has_context = True
        self.free_bytes = TOTAL_BYTES
        self.allocated: dict[int, int] = {}

    def cuCtxGetDevice(self) -> Any:
        return self._result("cuCtxGetDevice", 0) if self.has_context else (type(self._result("x")[0])(201), None)

    def cuCtxGetCurrent(self) -> Any:
        return self._result("cuCtxGetCurrent", CONTEXT)

    def cuCtxSetCurrent(self, context: int) -> Any:
        self.has_context = True
        return self._result("cuCtxSetCurrent")

    def cuMemGetInfo(self) -> Any:
        return self._result("cuMemGetInfo", self.free_bytes, TOTAL_BYTES)

    def cuMemAlloc(self, size: int) -> Any:
        if size > self.free_bytes:
            return (type(self._result("x")[0])(2), None)
        pointer = 0x7000 + len(self.allocated)
        self.allocated[pointer] = size
        return self._result("cuMemAlloc", pointer)

    def cuMemFree(self, pointer: int) -> Any:
        del self.allocated[pointer]
        return self._result("cuMemFree")

    def cuMemsetD8Async(self, pointer: int, value: int, size: int, stream: int) -> Any:
        assert size <= self.allocated[pointer]
        self.log.append(("memset", size, stream))
        return self._result("cuMemsetD8Async")

    def cuStreamSynchronize(self, stream: int) -> Any:
        self.log.append(("wait", stream))
        return self._result("cuStreamSynchronize")

    def cuFuncSetAttribute(self, function: Any, attribute: str, value: int) -> Any:
        self.log.append(("attribute", function, attribute, value))
        return self._result("cuFuncSetAttribute")


class MeasuringNvml(FakeNvml):
    """NVML that lets clocks be set; `clocks_mhz` and `margins` are read one after another, the last for good."""

    ClockLimitId = SimpleNamespace(TDP=TDP, UNLIMITED=UNLIMITED)

    def __init__(self, log: list[Any]) -> None:
        super().__init__()
        self.log = log
        self.locked: dict[int, tuple[int, int]] = {}
        self.clocks_mhz = [1755]
        self.reasons = 0
        self.margins = [30]
        self.refuses = False

    def device_set_gpu_locked_clocks(self, handle: int, low: int, high: int) -> None:
        if self.refuses:
            raise NoPermissionError("Insufficient Permissions")
        self._check("device_set_gpu_locked_clocks")
        self.locked[handle] = (low, high)
        self.log.append(("lock", low, high))

    def device_reset_gpu_locked_clocks(self, handle: int) -> None:
        if self.refuses:
            raise NoPermissionError("Insufficient Permissions")
        self._check("device_reset_gpu_locked_clocks")
        self.locked.pop(handle, None)
        self.log.append(("reset",))

    def device_get_clock_info(self, handle: int, clock: str) -> int:
        if clock != "sm":
            return super().device_get_clock_info(handle, clock)
        self._check("device_get_clock_info")
        return self.clocks_mhz.pop(0) if len(self.clocks_mhz) > 1 else self.clocks_mhz[0]

    def device_get_current_clocks_event_reasons(self, handle: int) -> int:
        return self.reasons

    def device_get_margin_temperature(self, handle: int) -> int:
        self._check("device_get_margin_temperature")
        return self.margins.pop(0) if len(self.margins) > 1 else self.margins[0]


class NoPermissionError(Exception):
    """As cuda.bindings.nvml has it."""


class MeasuringGpu(FakeGpu):
    """The machine; `log` gets the names of kernels too."""

    bindings: MeasuringBindings
    nvml: MeasuringNvml

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []
        self.bindings = MeasuringBindings(self.log)
        self.nvml = MeasuringNvml(self.log)

    def run(self, name: str, duration_ns: int = 1000, grid: int = 4) -> None:
        """Launch a kernel."""
        self.log.append(name)
        self.launch(name, (grid, 1, 1), duration_ns=duration_ns)


def value(table: pd.DataFrame, metric: str, variant: str, **parameters: Any) -> Any:
    """The one value of a metric of a variant in the table of a measurement, for these parameters."""
    rows = table[(table["metric"] == metric) & (table["variant"] == variant)]
    for name, wanted in parameters.items():
        rows = rows[rows[name] == wanted]
    assert len(rows) == 1, rows
    return rows.iloc[0]["value"]


def fails_half_way(gpu: MeasuringGpu, call: int, message: str) -> Callable[[], None]:
    """A function of two kernels, 100 and 50 ns, whose call of this number runs out of memory between them."""
    calls = itertools.count(1)

    def work() -> None:
        number = next(calls)
        gpu.run("a", 100)
        if number == call:
            raise MemoryError(message)
        gpu.run("b", 50)

    return work
