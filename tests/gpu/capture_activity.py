"""Capture raw activity buffers on a GPU, for the decoder's tests: one pair of files a CUPTI version.

    NANALYZE_CUPTI=/path/libcupti.so.13 python tests/gpu/capture_activity.py OUT_DIR

Writes `cupti-<version>.bin` (the buffers' valid bytes, one after the other) and
`cupti-<version>.json` (their sizes, the strings that name pointers in them refer to, and what was
launched, in order). Needs cuda-python and an NVIDIA GPU of compute capability 9.0 or newer.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver, nvrtc

from nanalyze.recorder import cupti as cu

SOURCE = rb"""
extern "C" __global__ void plain(float *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = x[i] * 1.5f + 1.0f;
}
template <int N, typename T> __global__ void scaled(T *x, int n) {
    extern __shared__ char raw[];
    __shared__ T fixed[64];
    fixed[threadIdx.x % 64] = x[threadIdx.x];
    __syncthreads();
    for (int k = 0; k < N; ++k) x[threadIdx.x] += fixed[(threadIdx.x + k) % 64];
    if (n < 0) raw[0] = 1;
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) clustered(float *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += 1.0f;
}
"""
SCALED = b"scaled<3, double>"


def check(result: tuple[Any, ...]) -> Any:
    """The value of a cuda-python call; raises on any error."""
    code, *values = result
    if int(code) != 0:
        raise RuntimeError(f"CUDA call failed: {code}")
    return values[0] if len(values) == 1 else values


def compile_kernels() -> dict[str, Any]:
    program = check(nvrtc.nvrtcCreateProgram(SOURCE, b"capture.cu", 0, [], []))
    check(nvrtc.nvrtcAddNameExpression(program, SCALED))
    check(nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=sm_90"]))
    size = check(nvrtc.nvrtcGetCUBINSize(program))
    cubin = b" " * size
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    image = np.frombuffer(cubin, dtype=np.uint8)
    module = check(driver.cuModuleLoadData(image.ctypes.data))
    scaled = check(nvrtc.nvrtcGetLoweredName(program, SCALED))
    return {
        "plain": check(driver.cuModuleGetFunction(module, b"plain")),
        "scaled": check(driver.cuModuleGetFunction(module, scaled)),
        "clustered": check(driver.cuModuleGetFunction(module, b"clustered")),
    }


class Capture:
    """Keeps every buffer CUPTI completes."""

    def __init__(self, cupti: cu.Cupti) -> None:
        self.cupti = cupti
        self.buffers: list[bytes] = []
        self._live: dict[int, Any] = {}
        self._requested = cu.BufferRequested(self._request)
        self._completed = cu.BufferCompleted(self._complete)
        cupti.cuptiActivityRegisterCallbacks(self._requested, self._completed)
        cupti.cuptiActivityEnableLatencyTimestamps(1)
        for kind in (cu.KIND_CONCURRENT_KERNEL, cu.KIND_MEMCPY, cu.KIND_MEMSET, cu.KIND_MEMCPY2):
            cupti.cuptiActivityEnable(kind)

    def _request(self, buffer: Any, size: Any, records: Any) -> None:
        memory = (ctypes.c_uint64 * (64 * 1024))()
        address = ctypes.addressof(memory)
        self._live[address] = memory
        buffer[0], size[0], records[0] = address, ctypes.sizeof(memory), 0

    def _complete(self, context: Any, stream: int, buffer: int, size: int, valid: int) -> None:
        memory = self._live.pop(buffer)
        self.buffers.append(bytes(memoryview(memory).cast("B")[:valid]))


def launch(
    function: Any, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int, stream: Any, x: Any
) -> None:
    pointer = np.array([int(x)], dtype=np.uint64)
    count = np.array([4096], dtype=np.int32)
    arguments = np.array([pointer.ctypes.data, count.ctypes.data], dtype=np.uint64)
    check(driver.cuLaunchKernel(function, *grid, *block, shared, stream, arguments.ctypes.data, 0))


def work(kernels: dict[str, Any], x: Any) -> list[dict[str, Any]]:
    """Launch a known mixture; returns what was launched, in order."""
    done: list[dict[str, Any]] = []
    streams = [check(driver.cuStreamCreate(0)) for _ in range(2)]

    def kernel(name: str, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int, stream: int) -> None:
        launch(kernels[name], grid, block, shared, streams[stream], x)
        done.append({"op": "kernel", "name": name, "grid": grid, "block": block, "shared": shared, "stream": stream})

    host = np.zeros(4096, dtype=np.float32)
    for index in range(6):
        kernel("plain", (32, 1, 1), (128, 1, 1), 0, 0)
        kernel("scaled", (3, 2, 1), (64, 2, 1), 256 * index, 1)
        kernel("clustered", (16, 1, 1), (256, 1, 1), 0, 0)
        check(driver.cuMemsetD32Async(x, 7, 1024, streams[0]))
        done.append({"op": "memset", "bytes": 4096})
        check(driver.cuMemcpyHtoDAsync(x, host.ctypes.data, 8192, streams[0]))
        done.append({"op": "HtoD", "bytes": 8192})
        check(driver.cuMemcpyDtoDAsync(int(x) + 8192, x, 2048, streams[0]))
        done.append({"op": "DtoD", "bytes": 2048})
        check(driver.cuMemcpyDtoH(host.ctypes.data, x, 1024))
        done.append({"op": "DtoH", "bytes": 1024})
    for _ in range(40):
        kernel("plain", (8, 1, 1), (32, 4, 2), 0, 0)
    check(driver.cuCtxSynchronize())
    check(driver.cuStreamBeginCapture(streams[0], driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    for grid in (2, 4, 8):
        launch(kernels["plain"], (grid, 1, 1), (64, 1, 1), 0, streams[0], x)
    graph = check(driver.cuStreamEndCapture(streams[0]))
    executable = check(driver.cuGraphInstantiate(graph, 0))
    for _ in range(3):
        check(driver.cuGraphLaunch(executable, streams[0]))
        done.append({"op": "graph", "nodes": 3})
    check(driver.cuCtxSynchronize())
    return done


def main(out: Path) -> None:
    check(driver.cuInit(0))
    library = cu.load()
    capture = Capture(library)
    device = check(driver.cuDeviceGet(0))
    context = check(driver.cuDevicePrimaryCtxRetain(device))
    check(driver.cuCtxSetCurrent(context))
    x = check(driver.cuMemAlloc(1 << 20))
    done = work(compile_kernels(), x)
    library.cuptiActivityFlushAll(1)
    names = {}
    for buffer in capture.buffers:
        for pointer in pointers(library, buffer):
            names[pointer] = ctypes.string_at(pointer).decode("latin-1")
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"cupti-{library.version}"
    stem.with_suffix(".bin").write_bytes(b"".join(capture.buffers))
    about = {
        "cupti_version": library.version,
        "buffer_sizes": [len(buffer) for buffer in capture.buffers],
        "names": {str(pointer): name for pointer, name in names.items()},
        "launched": done,
    }
    stem.with_suffix(".json").write_text(json.dumps(about))
    print(library.path, library.version, about["buffer_sizes"], sorted(set(names.values())))


def pointers(library: cu.Cupti, buffer: bytes) -> set[int]:
    """The name pointers of the kernel records, found by CUPTI's own walk."""
    memory = (ctypes.c_uint8 * len(buffer)).from_buffer_copy(buffer)
    record = ctypes.c_void_p()
    found = set()
    while True:
        try:
            library.cuptiActivityGetNextRecord(ctypes.addressof(memory), len(buffer), ctypes.byref(record))
        except cu.CuptiError:
            return found
        assert record.value is not None
        if ctypes.c_uint32.from_address(record.value).value == cu.KIND_CONCURRENT_KERNEL:
            found.add(ctypes.c_uint64.from_address(record.value + 104).value)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
