"""Measures what this GPU reaches: each pipe and each level of the memory, in a few seconds.

Each kernel of `calibrate_kernels` is run until its launch takes about `TARGET_S`, then a few times at that
length, timed by CUDA events. Nothing is set: clocks are read (the SM clock by the kernel itself, the memory
clock and the reasons for low clocks through NVML while it runs), never changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from nanalyze.recorder import calibrate_kernels, device
from nanalyze.recorder.calibrate_compile import Compiler
from nanalyze.recorder.calibrate_kernels import QUAD_BYTES, UNROLL, Probe
from nanalyze.recorder.ceilings import Ceiling
from nanalyze.recorder.device import _value
from nanalyze.rundir.errors import RecorderError

TARGET_S = 0.01  # a launch: event resolution (0.5 us) and ramp-up are below 0.1 % of it
REPETITIONS = 9
WARM_UP_S = 0.05  # clocks of an idle GPU rise within a few ms
MOST_ITERATIONS = 1 << 30
BUFFER_BYTES = 2 << 30  # read and written: tens of times the largest L2
LEAST_BUFFER_BYTES = 64 << 20
L1_REGION_BYTES = 32768  # of each SM's L1, which has 64 KiB or more besides shared memory

Say = Callable[[str], None]


@dataclass
class Calibration:
    """What was measured on one device; `missing` says why for each ceiling that was not."""

    device: dict[str, Any]  # a row of `devices`
    ceilings: list[Ceiling] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def datasheet_per_s(self, ceiling: Ceiling) -> float | None:
        """The datasheet's rate at the clock that ran; None where no source gives one."""
        if ceiling.ceiling.startswith("dram_"):
            return device_number(self.device, "dram_peak_bytes_per_s")
        name = "tensor_fp16" if ceiling.ceiling == "tensor_bf16" else ceiling.ceiling
        kind = "ops" if "int" in name else "flops"
        rate = device_number(self.device, f"{name}_{kind}_per_sm_cycle")
        clock = ceiling.sm_clock_hz or self.device.get("sm_clock_max_hz")
        return rate * self.device["sm_count"] * clock if rate and clock else None


def device_number(row: dict[str, Any], column: str) -> float | None:
    value = row.get(column)
    return float(value) if value else None


def calibrate(ordinals: list[int] | None = None, say: Say = lambda _: None) -> list[Calibration]:
    """Measure the devices with these CUDA ordinals, or all; `say` hears what is being measured.

    Raises RecorderError where NVRTC, the driver or a GPU is missing.
    """
    compiler = Compiler()
    devices = device.Devices()
    rows = devices.describe()
    if not rows:
        raise RecorderError("no GPU is visible to this process: check CUDA_VISIBLE_DEVICES and nvidia-smi")
    unknown = sorted(set(ordinals or ()) - {row["device_id"] for row in rows})
    if unknown:
        raise RecorderError(f"device {unknown[0]} does not exist: this process sees devices 0 to {len(rows) - 1}")
    return [_calibrate(row, devices, compiler, say) for row in rows if ordinals is None or row["device_id"] in ordinals]


def _calibrate(row: dict[str, Any], devices: device.Devices, compiler: Compiler, say: Say) -> Calibration:
    result = Calibration(row)
    with _context(row["device_id"]) as driver, _Bench(driver, row, devices) as bench:
        for probe in calibrate_kernels.probes(row["cc_major"], row["cc_minor"]):
            say(f"{row['name']}: {probe.ceiling} ({probe.method})")
            try:
                image = compiler.compile(probe.source, row["cc_major"], row["cc_minor"], probe.architecture_suffix)
                result.ceilings.append(bench.measure(probe, image))
            except RecorderError as error:
                result.missing[f"{probe.ceiling} ({probe.method})"] = str(error)
    return result


@contextlib.contextmanager
def _context(ordinal: int) -> Iterator[Any]:
    """The device's primary context, current in this thread; yields the driver."""
    driver = device._driver()
    handle = _value(driver.cuDeviceGet(ordinal))
    context = _value(driver.cuDevicePrimaryCtxRetain(handle))
    try:
        _value(driver.cuCtxPushCurrent(context))
        try:
            yield driver
        finally:
            driver.cuCtxPopCurrent()
    finally:
        driver.cuDevicePrimaryCtxRelease(handle)


class _Bench:
    """Buffers, events and launches on one device; a context manager."""

    def __init__(self, driver: Any, row: dict[str, Any], devices: device.Devices) -> None:
        self._driver = driver
        self._row = row
        self._devices = devices
        self._buffers: list[Any] = []
        self._events: list[Any] = []

    def __enter__(self) -> _Bench:
        try:
            free, _ = device._value_pair(self._driver.cuMemGetInfo())
            self._bytes = min(BUFFER_BYTES, int(free) // 4) // (1 << 20) * (1 << 20)
            if self._bytes < LEAST_BUFFER_BYTES:
                raise RecorderError(
                    f"{self._row['name']}: {int(free) >> 20} MiB of its memory are free, "
                    f"{4 * LEAST_BUFFER_BYTES >> 20} are needed: end what holds it"
                )
            for size in (self._bytes, self._bytes, 16):
                self._buffers.append(_value(self._driver.cuMemAlloc(size)))
                _value(self._driver.cuMemsetD8(self._buffers[-1], 0x3B, size))
            self._events = [_value(self._driver.cuEventCreate(0)) for _ in range(2)]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for event in self._events:
            self._driver.cuEventDestroy(event)
        for buffer in self._buffers:
            self._driver.cuMemFree(buffer)

    def measure(self, probe: Probe, image: bytes) -> Ceiling:
        """The ceiling of one probe from its compiled `image`; raises RecorderError."""
        module = _value(self._driver.cuModuleLoadData(image))
        try:
            launch = self._launcher(probe, _value(self._driver.cuModuleGetFunction(module, b"run")))
            return self._repeat(probe, launch)
        finally:
            self._driver.cuModuleUnload(module)

    def _launcher(self, probe: Probe, function: Any) -> _Launch:
        blocks = int(
            _value(self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, probe.block, probe.shared_bytes))
        )
        if blocks == 0:
            raise RecorderError(f"no block of {probe.block} threads fits an SM")
        grid = self._row["sm_count"] * min(blocks, probe.blocks_per_sm)
        count, quads = self._extent(probe, grid)
        work = quads * QUAD_BYTES if quads else probe.block * grid * (probe.work or 0)
        return _Launch(function, grid, probe.block, probe.shared_bytes, count, float(work))

    def _extent(self, probe: Probe, grid: int) -> tuple[int, int]:
        """`count` for the kernel, and the quads that an iteration moves where those do not follow from its work."""
        if probe.region == "dram":
            step = grid * probe.block * UNROLL
            count = self._bytes // QUAD_BYTES // step * step
            if not count:
                raise RecorderError("its memory holds no buffer that every thread has a part of")
            return count, count * (2 if probe.ceiling == "dram_copy" else 1)
        if probe.region == "l2":
            # A quarter: lines may live in both halves of L2, and other data need room.
            quads = min(self._row["l2_bytes"] or 0, 4 * self._bytes) // 4 // QUAD_BYTES
            if not quads:
                raise RecorderError("the driver names no L2 cache")
            return 1 << (quads.bit_length() - 1), 0
        return (L1_REGION_BYTES // QUAD_BYTES, 0) if probe.region == "block" else (0, 0)

    def _repeat(self, probe: Probe, launch: _Launch) -> Ceiling:
        iterations = self._warm_up(launch)
        seconds, clocks = [], []
        state: dict[str, Any] = {}
        for repetition in range(REPETITIONS):
            is_last = repetition == REPETITIONS - 1
            seconds.append(self._time(launch, iterations, state if is_last else None))
            clocks.append(self._sm_clock())
        rates = [launch.work * iterations / second for second in seconds]
        known = [clock for clock in clocks if clock is not None]
        return Ceiling(
            probe.ceiling,
            probe.method,
            probe.unit,
            statistics.median(rates),
            min(rates),
            max(rates),
            REPETITIONS,
            probe.is_partial,
            time.time_ns(),
            round(statistics.median(known)) if known else state.get("sm_clock_hz"),
            state.get("memory_clock_hz"),
            state.get("throttle_reasons"),
        )

    def _warm_up(self, launch: _Launch) -> int:
        """Iterations that take about TARGET_S, found by launching until the clocks have had time to rise."""
        iterations = 1
        deadline = time.monotonic() + WARM_UP_S
        while True:
            seconds = self._time(launch, iterations)
            is_long_enough = seconds > TARGET_S / 2 or iterations == MOST_ITERATIONS
            if is_long_enough and time.monotonic() >= deadline:
                return iterations
            factor = min(64.0, TARGET_S / max(seconds, 1e-9))
            iterations = max(1, min(MOST_ITERATIONS, round(iterations * factor)))

    def _time(self, launch: _Launch, iterations: int, state: dict[str, Any] | None = None) -> float:
        """Seconds of one launch; `state` is filled with what NVML says while it runs."""
        driver, (before, after) = self._driver, self._events
        values = (int(self._buffers[0]), int(self._buffers[1]), launch.count, iterations, int(self._buffers[2]))
        types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_int, ctypes.c_void_p)
        _value(driver.cuEventRecord(before, 0))
        _value(
            driver.cuLaunchKernel(
                launch.function, launch.grid, 1, 1, launch.block, 1, 1, launch.shared_bytes, 0, (values, types), 0
            )
        )
        _value(driver.cuEventRecord(after, 0))
        if state is not None:
            for reading in self._devices.state({self._row["device_id"]}):
                state.update(reading)
        _value(driver.cuEventSynchronize(after))
        return float(_value(driver.cuEventElapsedTime(before, after))) / 1000

    def _sm_clock(self) -> float | None:
        """Hz in the launch just timed, by the kernel's own cycles and nanoseconds."""
        found = (ctypes.c_ulonglong * 2)()
        _value(self._driver.cuMemcpyDtoH(ctypes.addressof(found), self._buffers[2], ctypes.sizeof(found)))
        cycles, nanoseconds = found
        return 1e9 * cycles / nanoseconds if cycles and nanoseconds else None


@dataclass(frozen=True)
class _Launch:
    """How a kernel is launched; `work` is operations or bytes of all its threads in one iteration."""

    function: Any
    grid: int
    block: int
    shared_bytes: int
    count: int
    work: float
