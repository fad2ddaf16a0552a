"""Caches of the GPU before a measured range: L2 emptied, and how an SM divides L1 from shared memory.

Everything goes through the driver API (cuda-bindings), so no framework is needed; work is put on the
stream that the job uses, where one of the known frameworks says which that is.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from nanalyze.recorder.device import _driver, _value
from nanalyze.rundir.errors import RecorderError

# L2 of recent GPUs has two halves, and lines may live in both: twice its size reaches every line.
FLUSH_FACTOR = 2
CARVEOUTS = {"default": -1, "l1": 0, "shared": 100}


def current_stream() -> int:
    """The stream that the job launches on: PyTorch's or CuPy's current one, else the default stream (0)."""
    torch = sys.modules.get("torch")
    with contextlib.suppress(Exception):  # a build without CUDA, or a half-imported module
        if torch is not None and torch.cuda.is_initialized():
            return int(torch.cuda.current_stream().cuda_stream)
    cupy = sys.modules.get("cupy")
    with contextlib.suppress(Exception):
        if cupy is not None:
            return int(cupy.cuda.get_current_stream().ptr)
    return 0


class L2Flush:
    """Empties L2 by writing twice its size into a buffer of its own, and waits until that is done.

    A buffer for each device, made at its first flush; `close` frees them. Used as a context manager.
    """

    def __init__(self) -> None:
        self._driver = _driver()
        self._buffers: dict[int, tuple[Any, int]] = {}  # by device: pointer, bytes
        self.flushes = 0

    def flush(self) -> None:
        """Empty L2 of the current device. Raises RecorderError, as where no memory is left for the buffer."""
        pointer, size = self._buffer()
        stream = current_stream()
        _value(self._driver.cuMemsetD8Async(pointer, 0, size, stream))
        _value(self._driver.cuStreamSynchronize(stream))
        self.flushes += 1

    def _buffer(self) -> tuple[Any, int]:
        device = current_device(self._driver)
        if device not in self._buffers:
            attribute = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
            size = FLUSH_FACTOR * int(_value(self._driver.cuDeviceGetAttribute(attribute, device)))
            if size == 0:
                raise RecorderError("cache='cold': the driver names no L2 cache on this device; use cache='none'")
            try:
                self._buffers[device] = _value(self._driver.cuMemAlloc(size)), size
            except RecorderError as error:
                raise RecorderError(f"cache='cold': no {size >> 20} MiB left to write over L2: {error}") from error
        return self._buffers[device]

    def close(self) -> None:
        """Free the buffers; never raises."""
        buffers, self._buffers = self._buffers, {}
        for pointer, _ in buffers.values():
            with contextlib.suppress(Exception):
                self._driver.cuMemFree(pointer)

    def __enter__(self) -> L2Flush:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def current_device(driver: Any) -> int:
    """The ordinal of the thread's current context; device 0's primary context is made current where there is none."""
    code, ordinal = driver.cuCtxGetDevice()
    if int(code) == 0:
        return int(ordinal)
    _value(driver.cuInit(0))
    device = _value(driver.cuDeviceGet(0))
    _value(driver.cuCtxSetCurrent(_value(driver.cuDevicePrimaryCtxRetain(device))))
    return int(_value(driver.cuCtxGetDevice()))


def memory_is_scarce() -> bool:
    """Whether less than half of the current device's memory is free; also where the driver does not tell."""
    try:
        code, free, total = _driver().cuMemGetInfo()
    except RecorderError:
        return True
    return int(code) != 0 or 2 * free < total


def synchronize() -> None:
    """Wait for the current context's work; an error of a kernel that ran shows here, as a RecorderError.

    Does nothing before CUDA is used, and where there is none.
    """
    try:
        driver = _driver()
    except RecorderError:
        return
    code, _ = driver.cuCtxGetDevice()
    if int(code) == 0:
        _value(driver.cuCtxSynchronize())


def carveout(function: Any, shared: str | int) -> None:
    """Prefer this share of an SM's L1 for shared memory whenever `function` is launched.

    `function` is a CUfunction or its handle: of `cuda.bindings`, `cupy.RawKernel(...).kernel.ptr`, or
    Triton's `compiled.function`. `shared` is "default", "l1" (as little shared memory as the driver can),
    "shared" (as much), or a percentage from 0 to 100. It is a hint: the driver gives each launch at least the
    shared memory it needs, and knows a few sizes only. Raises RecorderError.
    """
    percent = CARVEOUTS.get(shared) if isinstance(shared, str) else shared
    if percent is None or isinstance(percent, bool) or not -1 <= percent <= 100:
        raise RecorderError(f"carveout {shared!r}: give {', '.join(CARVEOUTS)} or a percentage from 0 to 100")
    driver = _driver()
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    _value(driver.cuFuncSetAttribute(function, attribute, int(percent)))
