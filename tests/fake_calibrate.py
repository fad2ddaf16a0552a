"""Makes the fake driver of `fake_gpu` run calibration kernels: each takes the time that a model says.

A fake compiler gives a probe's source as its image, so a launch knows what it measures. Launches are numbered, so
that a test can make one of them slow.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import MethodType
from typing import Any

from fake_gpu import FakeBindings, FakeGpu, _Code

from nanalyze.recorder import calibrate_kernels
from nanalyze.recorder.calibrate_kernels import Probe

MEGAHERTZ = 1755
RATE = 1e12  # operations or bytes a second, of every probe
OVERHEAD_S = 2e-6


class FakeCompiler:
    """`calibrate.Compiler`; `broken` ceilings do not compile."""

    broken: frozenset[str] = frozenset()
    version = "13.0"

    def compile(self, source: str, cc_major: int, cc_minor: int, suffix: str = "") -> bytes:
        from nanalyze.rundir.errors import RecorderError

        if next(probe for probe in PROBES if probe.source == source).ceiling in self.broken:
            raise RecorderError("NVRTC 13.0 cannot compile for sm_90: error: no such instruction")
        return source.encode()


PROBES = calibrate_kernels.probes(9, 0)


class CalibrationDriver:
    """What `install` adds to the fake driver."""

    def __init__(self, bindings: FakeBindings) -> None:
        self.bindings = bindings
        self.launches: list[tuple[Probe, int, int]] = []  # probe, iterations, count
        self.held: set[int] = set()  # buffers
        self.opened = 0  # modules and events
        self.seconds = 0.0
        self.slow: Callable[[int], float] = lambda launch: 1.0
        self.free_bytes = 100 << 30
        self.clock = (0, 0)

    def install(self) -> None:
        for name in dir(type(self)):
            if name.startswith("cu"):
                setattr(self.bindings, name, MethodType(getattr(type(self), name), self))

    def _result(self, function: str, *values: Any) -> tuple[Any, ...]:
        return (_Code(self.bindings.codes.get(function, 0)), *values)

    def _open(self, function: str, handle: Any) -> tuple[Any, ...]:
        self.opened += function not in self.bindings.codes
        return self._result(function, handle)

    def cuMemGetInfo(self) -> Any:
        return self._result("cuMemGetInfo", self.free_bytes, 140 << 30)

    def cuMemAlloc(self, size: int) -> Any:
        pointer = (len(self.held) + 1) << 40
        self.held.add(pointer)
        return self._result("cuMemAlloc", pointer)

    def cuMemFree(self, pointer: int) -> Any:
        self.held.remove(pointer)
        return self._result("cuMemFree")

    def cuMemsetD8(self, pointer: int, value: int, size: int) -> Any:
        assert pointer in self.held
        return self._result("cuMemsetD8")

    def cuEventCreate(self, flags: int) -> Any:
        return self._open("cuEventCreate", object())

    def cuEventDestroy(self, event: Any) -> Any:
        self.opened -= 1
        return self._result("cuEventDestroy")

    def cuEventRecord(self, event: Any, stream: int) -> Any:
        return self._result("cuEventRecord")

    def cuEventSynchronize(self, event: Any) -> Any:
        return self._result("cuEventSynchronize")

    def cuEventElapsedTime(self, before: Any, after: Any) -> Any:
        return self._result("cuEventElapsedTime", 1000 * self.seconds)

    def cuModuleLoadData(self, image: bytes) -> Any:
        return self._open("cuModuleLoadData", image)

    def cuModuleUnload(self, module: bytes) -> Any:
        self.opened -= 1
        return self._result("cuModuleUnload")

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> Any:
        assert name == b"run"
        probe = next(probe for probe in PROBES if probe.source.encode() == module)
        return self._result("cuModuleGetFunction", probe)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function: Probe, block: int, shared: int) -> Any:
        return self._result("cuOccupancyMaxActiveBlocksPerMultiprocessor", 2048 // block)

    def cuLaunchKernel(self, function: Probe, *arguments: Any) -> Any:
        grid, block, shared, (values, types), extra = arguments[0], arguments[3], *arguments[6:7], *arguments[8:]
        assert (len(values), len(types), extra) == (5, 5, 0)
        assert shared == function.shared_bytes
        for value, kind in zip(values, types, strict=True):
            kind(value)
        count, iterations = values[2], values[3]
        self.launches.append((function, iterations, count))
        work = function.work * grid * block if function.work else count * 16 * (1 + (function.ceiling == "dram_copy"))
        self.seconds = (OVERHEAD_S + work * iterations / RATE) * self.slow(len(self.launches))
        self.clock = (int(self.seconds * MEGAHERTZ * 1e6), int(self.seconds * 1e9))
        return self._result("cuLaunchKernel")

    def cuMemcpyDtoH(self, target: int, pointer: int, size: int) -> Any:
        ctypes.memmove(target, (ctypes.c_ulonglong * 2)(*self.clock), size)
        return self._result("cuMemcpyDtoH")


def install(gpu: FakeGpu) -> CalibrationDriver:
    driver = CalibrationDriver(gpu.bindings)
    driver.install()
    return driver
