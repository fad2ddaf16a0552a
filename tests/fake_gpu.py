"""A job on a machine with a fake GPU: its launches, the driver and NVML.

`FakeGpu.install` puts the fakes where the process would find the real ones: `ctypes.CDLL` gives
the fake libcuda and libcupti, `cuda.bindings` the fake driver and NVML. Nothing in the recorder
is patched, so what it does to find and call them is tested too.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import threading
import time
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_uint32, c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_records
import pyarrow.parquet as pq
from fake_cupti import FakeCupti

CUPTI_PATH = "/fake/libcupti.so.13"
CONTEXT = 0xC0DE0000
UUID = bytes(range(16))
UUID_TEXT = "00010203-0405-0607-0809-0a0b0c0d0e0f"
ENTER, EXIT = 0, 1

# cupti_driver_cbid.h
CALLS = {
    "cuLaunchKernel": 307,
    "cuLaunchKernel_ptsz": 442,
    "cuLaunchCooperativeKernel": 477,
    "cuLaunchCooperativeKernel_ptsz": 478,
    "cuLaunchKernelEx": 652,
    "cuLaunchKernelEx_ptsz": 653,
    "cuGraphLaunch": 514,
    "cuGraphLaunch_ptsz": 515,
    "cuStreamBeginCapture": 495,
    "cuStreamBeginCapture_v2": 539,
    "cuStreamBeginCaptureToGraph": 720,
    "cuStreamEndCapture": 497,
}
RUNTIME_LAUNCH, RUNTIME_GRAPH_LAUNCH = 211, 311  # cudaLaunchKernel, cudaGraphLaunch (cupti_runtime_cbid.h)


def _struct(name: str, *fields: tuple[str, Any]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


# cupti_callbacks.h, generated_cuda_meta.h and cuda.h
_CallbackData = _struct(
    "CallbackData",
    ("callbackSite", c_int),
    ("functionName", c_char_p),
    ("functionParams", c_void_p),
    ("functionReturnValue", c_void_p),
    ("symbolName", c_char_p),
    ("context", c_void_p),
    ("contextUid", c_uint32),
    ("correlationData", c_void_p),
    ("correlationId", c_uint32),
)
_SHAPE = (("grid", c_uint32 * 3), ("block", c_uint32 * 3), ("shared", c_uint32), ("stream", c_void_p))
_LaunchParams = _struct("LaunchParams", ("f", c_void_p), *_SHAPE, ("kernelParams", c_void_p), ("extra", c_void_p))
_LaunchConfig = _struct("LaunchConfig", *_SHAPE, ("attributes", c_void_p), ("count", c_uint32))
_LaunchExParams = _struct(
    "LaunchExParams",
    ("config", POINTER(_LaunchConfig)),
    ("f", c_void_p),
    ("kernelParams", c_void_p),
    ("extra", c_void_p),
)
_GraphParams = _struct("GraphParams", ("executable", c_void_p), ("stream", c_void_p))
_StreamParams = _struct("StreamParams", ("stream", c_void_p), ("mode", c_int))


class FakeGpu:
    """Launches kernels as a job does: driver callbacks, work on the GPU, activity records.

    A launch under a started range-profiler session is replayed, its record has no times and an
    old `queued`, as on an H200.
    """

    def __init__(self, version: int = 130001) -> None:
        self.cupti = FakeCupti(version)
        self.names = fake_records.Names()
        self.during_launch: Callable[[], None] | None = None  # what other threads do meanwhile
        self.capturing: set[int] = set()
        self.launches: list[tuple[int, bytes]] = []  # correlation id and name, in order
        self.device = 0
        self.driver = self._libcuda()
        self.nvml = FakeNvml()
        self.bindings = FakeBindings()
        self._correlations = itertools.count(101)
        self._clock_ns = 0
        self._lock = threading.Lock()

    # -- installing -----------------------------------------------------------------------------

    def install(self, patch: Any) -> None:
        """Make this the machine's GPU; `patch` is pytest's monkeypatch."""
        import cuda.bindings

        real = ctypes.CDLL

        def open_library(name: Any, *args: Any, **kwargs: Any) -> Any:
            fakes = {"libcuda.so.1": self.driver, CUPTI_PATH: self.cupti.library}
            return fakes[name] if name in fakes else real(name, *args, **kwargs)

        patch.setattr(ctypes, "CDLL", open_library)
        patch.setenv("NANALYZE_CUPTI", CUPTI_PATH)
        patch.setattr(cuda.bindings, "driver", self.bindings, raising=False)
        patch.setattr(cuda.bindings, "nvml", self.nvml, raising=False)

    def close(self) -> None:
        self.cupti.close()

    def _libcuda(self) -> Any:
        def is_capturing(stream: int | None, status: Any) -> int:
            status[0] = int((stream or 0) in self.capturing)
            return 0

        def device_of_context(ordinal: Any) -> int:
            ordinal[0] = self.device
            return 0

        return SimpleNamespace(
            cuStreamIsCapturing=ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(c_int))(is_capturing),
            cuCtxGetDevice=ctypes.CFUNCTYPE(c_int, POINTER(c_int))(device_of_context),
        )

    def use(self, *devices: int) -> None:
        """The job begins to use these devices: each has a primary context then, and CUDA is initialised."""
        self.bindings.device_count = max(self.bindings.device_count, *(device + 1 for device in devices))
        self.bindings.active_contexts |= set(devices)
        self.cupti.is_cuda_initialized = True

    def before_cuda(self) -> None:
        """Undo that CUDA is initialised; `use` makes up for it."""
        self.bindings.active_contexts = set()
        self.cupti.is_cuda_initialized = False

    # -- what a job does ------------------------------------------------------------------------

    def launch(
        self,
        name: str | bytes = "plain",
        grid: tuple[int, int, int] = (4, 1, 1),
        block: tuple[int, int, int] = (128, 1, 1),
        *,
        shared: int = 0,
        stream: int = 0,
        call: str = "cuLaunchKernel",
        duration_ns: int = 1000,
        **fields: Any,
    ) -> int:
        """Launch a kernel; its correlation id. `fields` replace those of its activity record."""
        symbol = name.encode() if isinstance(name, str) else name
        correlation = self._next_correlation(symbol)
        params = _launch_params(call, grid, block, shared, stream)
        queued = time.time_ns()
        was_replayed: list[bool] = []

        def run() -> None:
            session = self.cupti.session_of(CONTEXT + self.device)
            if stream in self.capturing:
                return
            was_replayed.append(session is not None and session.is_started)
            if session is not None and session.is_started:
                session.collects(symbol)

        self._call(call, params, correlation, symbol, run)
        self.emit(fake_records.DRIVER, cbid=CALLS[call], start=queued, end=queued + 1, correlationId=correlation)
        self.emit(fake_records.RUNTIME, cbid=RUNTIME_LAUNCH, start=queued, end=queued + 1, correlationId=correlation)
        if was_replayed:
            start, end = (0, 0) if was_replayed[0] else self._times(duration_ns)
            queued = self._queued(12345 if was_replayed[0] else queued)
            about = {"gridId": correlation, "registersPerThread": 32, "queued": queued}
            shape = {"grid": list(grid), "block": list(block), "dynamicSharedMemory": shared, "streamId": stream + 7}
            times = {"start": start, "end": end, "correlationId": correlation, "deviceId": self.device, "contextId": 1}
            self._emit_kernel(symbol, {**about, **shape, **times, **fields})
        return correlation

    def launch_graph(
        self, executable: int, kernels: list[str], *, stream: int = 0, call: str = "cuGraphLaunch", graph_id: int = 9
    ) -> int:
        """Launch an instantiated graph of `kernels`; the correlation id that its nodes share."""
        correlation = self._next_correlation(b"graph")
        params = _GraphParams(executable, stream or None)
        is_measured: list[bool] = []

        def run() -> None:
            session = self.cupti.session_of(CONTEXT + self.device)
            is_measured.append(session is not None and session.is_started)
            for kernel in kernels:
                if session is not None and session.is_started:
                    session.collects(kernel.encode())

        times = {"start": time.time_ns(), "end": time.time_ns() + 1, "correlationId": correlation}
        self._call(call, params, correlation, None, run)
        self.emit(fake_records.DRIVER, cbid=CALLS[call], **times)
        self.emit(fake_records.RUNTIME, cbid=RUNTIME_GRAPH_LAUNCH, **times)
        for node, kernel in enumerate(kernels):
            start, end = (0, 0) if is_measured[0] else self._times(500)
            fields = {"start": start, "end": end, "correlationId": correlation, "contextId": 1}
            graph = {
                "queued": self._queued(777),
                "graphId": graph_id,
                "graphNodeId": (graph_id << 32) + node,
                "deviceId": self.device,
            }
            self._emit_kernel(kernel.encode(), {**fields, **graph, "grid": [2, 1, 1], "block": [64, 1, 1]})
        return correlation

    def _queued(self, time_ns: int) -> int:
        """What a record says of it: nothing without latency timestamps."""
        return time_ns if self.cupti.latency_timestamps else 0

    def begin_capture(self, stream: int, call: str = "cuStreamBeginCapture_v2") -> None:
        self._call(call, _StreamParams(stream), next(self._correlations), None, lambda: self.capturing.add(stream))

    def end_capture(self, stream: int) -> None:
        params = _StreamParams(stream)
        self._call("cuStreamEndCapture", params, next(self._correlations), None, lambda: self.capturing.remove(stream))

    def copy(self, size: int, copy_kind: int = 1) -> int:
        correlation = self._next_correlation(b"copy")
        start, end = self._times(300)
        about = {"copyKind": copy_kind, "srcKind": 1, "dstKind": 3, "flags": 1, "bytes": size, "streamId": 7}
        self.emit(fake_records.MEMCPY, **about, start=start, end=end, correlationId=correlation, contextId=1)
        return correlation

    def memset(self, size: int) -> int:
        correlation = self._next_correlation(b"memset")
        start, end = self._times(200)
        about = {"bytes": size, "memoryKind": 3, "streamId": 7, "contextId": 1}
        self.emit(fake_records.MEMSET, **about, start=start, end=end, correlationId=correlation)
        return correlation

    def open_range(self, name: bytes | None, *, thread: int | None = None, domain: bytes = b"", **fields: Any) -> int:
        """nvtxRangePush (nvtxRangeStart with objectKind=1), as CUPTI records it; the marker's id."""
        marker = self._next_correlation(b"range")
        about = {"id": marker, "flags": 2, "timestamp": time.time_ns(), "objectKind": 2, "threadId": _thread(thread)}
        pointers = {"name": self.names.pointer(name) if name is not None else 0}
        pointers["domain"] = self.names.pointer(domain) if domain else 0
        self.emit(fake_records.MARKER, **{**about, **pointers, **fields})
        return marker

    def close_range(self, marker: int, *, thread: int | None = None, **fields: Any) -> None:
        """nvtxRangePop: an end has no name."""
        about = {"id": marker, "flags": 4, "timestamp": time.time_ns(), "objectKind": 2, "threadId": _thread(thread)}
        self.emit(fake_records.MARKER, **{**about, **fields})

    def emit(self, kind: int, **fields: Any) -> None:
        self.cupti.emit(fake_records.record(kind, self.cupti.version, **fields))

    def _emit_kernel(self, symbol: bytes, fields: dict[str, Any]) -> None:
        self.emit(fake_records.KERNEL, **{"name": self.names.pointer(symbol), **fields})

    def _next_correlation(self, what: bytes) -> int:
        with self._lock:
            correlation = next(self._correlations)
            self.launches.append((correlation, what))
        return correlation

    def _times(self, duration_ns: int) -> tuple[int, int]:
        with self._lock:
            start = max(self.cupti.clock(), self._clock_ns)
            self._clock_ns = start + duration_ns
        return start, start + duration_ns

    def _call(self, call: str, params: Any, correlation: int, symbol: bytes | None, run: Callable[[], None]) -> None:
        """A driver call: the subscriber's callback at its entry, the call, the callback at its exit."""
        result, scratch = c_int(0), ctypes.c_uint64(0)
        data = _CallbackData(
            callbackSite=ENTER,
            functionName=call.encode(),
            functionParams=ctypes.addressof(params),
            functionReturnValue=ctypes.addressof(result),
            symbolName=symbol,
            context=CONTEXT + self.device,
            contextUid=1,
            correlationData=ctypes.addressof(scratch),
            correlationId=correlation,
        )
        cbid = CALLS[call]
        self.cupti.deliver(cbid, ctypes.addressof(data))
        run()
        if self.during_launch is not None:
            during, self.during_launch = self.during_launch, None
            during()
        data.callbackSite = EXIT
        self.cupti.deliver(cbid, ctypes.addressof(data))


def _thread(ident: int | None) -> int:
    """A thread as CUPTI names it by default: the low half of pthread_self."""
    return (threading.get_ident() if ident is None else ident) & 0xFFFFFFFF


def _launch_params(call: str, grid: Any, block: Any, shared: int, stream: int) -> Any:
    shape = {"grid": tuple(grid), "block": tuple(block), "shared": shared, "stream": stream or None}
    if call.startswith("cuLaunchKernelEx"):
        return _LaunchExParams(config=ctypes.pointer(_LaunchConfig(**shape)), f=0xF)
    return _LaunchParams(f=0xF, **shape)


class _Code(int):
    """A CUresult of cuda-python."""

    @property
    def name(self) -> str:
        return f"CUDA_ERROR_{int(self)}"


class FakeBindings:
    """`cuda.bindings.driver` of one H200; `codes` gives the result code of a function, 0 if absent."""

    def __init__(self) -> None:
        self.codes: dict[str, int] = {}
        self.device_count = 1
        self.attributes = {
            "MULTIPROCESSOR_COUNT": 132,
            "COMPUTE_CAPABILITY_MAJOR": 9,
            "COMPUTE_CAPABILITY_MINOR": 0,
            "WARP_SIZE": 32,
            "MAX_THREADS_PER_MULTIPROCESSOR": 2048,
            "MAX_BLOCKS_PER_MULTIPROCESSOR": 32,
            "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
            "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 233472,
            "RESERVED_SHARED_MEMORY_PER_BLOCK": 1024,
            "L2_CACHE_SIZE": 62914560,
            "GLOBAL_MEMORY_BUS_WIDTH": 6144,
            "CLOCK_RATE": 1980000,
            "MEMORY_CLOCK_RATE": 3201000,
        }
        self.CUdevice_attribute = SimpleNamespace(**{f"CU_DEVICE_ATTRIBUTE_{name}": name for name in self.attributes})
        self.active_contexts: set[int] = {0}
        self.synchronize_s = 0.0
        self.synchronized = 0
        self.retained = 0
        self.current: list[int] = []

    def _result(self, function: str, *values: Any) -> tuple[Any, ...]:
        return (_Code(self.codes.get(function, 0)), *values)

    def cuDriverGetVersion(self) -> Any:
        return self._result("cuDriverGetVersion", 13000)

    def cuInit(self, flags: int) -> Any:
        return self._result("cuInit")

    def cuDeviceGetCount(self) -> Any:
        return self._result("cuDeviceGetCount", self.device_count)

    def cuDeviceGet(self, ordinal: int) -> Any:
        return self._result("cuDeviceGet", ordinal)

    def cuDeviceGetName(self, length: int, device: int) -> Any:
        return self._result("cuDeviceGetName", b"NVIDIA H200".ljust(length, b"\0"))

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> Any:
        return self._result("cuDeviceGetAttribute", self.attributes[attribute])

    def cuDeviceGetUuid(self, device: int) -> Any:
        return self._result("cuDeviceGetUuid", SimpleNamespace(bytes=UUID[:15] + bytes([UUID[15] + device])))

    def cuDeviceTotalMem(self, device: int) -> Any:
        return self._result("cuDeviceTotalMem", 150_121_545_728)

    def cuDevicePrimaryCtxGetState(self, device: int) -> Any:
        return self._result("cuDevicePrimaryCtxGetState", 0, int(device in self.active_contexts))

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        self.retained += 1
        return self._result("cuDevicePrimaryCtxRetain", device)

    def cuDevicePrimaryCtxRelease(self, device: int) -> Any:
        self.retained -= 1
        return self._result("cuDevicePrimaryCtxRelease")

    def cuCtxPushCurrent(self, context: int) -> Any:
        self.current.append(context)
        return self._result("cuCtxPushCurrent")

    def cuCtxPopCurrent(self) -> Any:
        return self._result("cuCtxPopCurrent", self.current.pop())

    def cuCtxSynchronize(self) -> Any:
        time.sleep(self.synchronize_s)
        self.synchronized += 1
        return self._result("cuCtxSynchronize")


class FakeNvml:
    """`cuda.bindings.nvml` of the same H200; `broken` functions raise, as NOT_SUPPORTED does."""

    ClockType = SimpleNamespace(CLOCK_SM="sm", CLOCK_MEM="memory")
    TemperatureSensors = SimpleNamespace(TEMPERATURE_GPU=0)

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.kind = "GPU"
        self.uuids = {f"{UUID_TEXT[:-1]}{digit}": 0xAA0 + place for place, digit in enumerate("fedcba")}

    def _check(self, function: str) -> None:
        if function in self.broken:
            raise RuntimeError(f"{function}: NVML_ERROR_NOT_SUPPORTED")

    def init_v2(self) -> None:
        self._check("init_v2")

    def system_get_driver_version(self) -> str:
        self._check("system_get_driver_version")
        return "580.159.03"

    def device_get_handle_by_uuid(self, uuid: str) -> int:
        kind, _, rest = uuid.partition("-")
        if kind != self.kind or rest not in self.uuids:
            raise RuntimeError("NVML_ERROR_NOT_FOUND")
        return self.uuids[rest]

    def device_get_max_clock_info(self, handle: int, clock: str) -> int:
        self._check("device_get_max_clock_info")
        return {"sm": 1980, "memory": 3201}[clock]

    def device_get_clock_info(self, handle: int, clock: str) -> int:
        self._check("device_get_clock_info")
        return {"sm": 1755, "memory": 3201}[clock]

    def device_get_power_usage(self, handle: int) -> int:
        self._check("device_get_power_usage")
        return 412_345

    def device_get_current_clocks_event_reasons(self, handle: int) -> int:
        self._check("device_get_current_clocks_event_reasons")
        return 4

    def device_get_temperature_v(self, handle: int, sensor: int) -> int:
        self._check("device_get_temperature_v")
        return 41


def read_table(run_dir: Path, table: str) -> list[dict[str, Any]]:
    """All rows of a table of a run directory, in the order of its shards."""
    return [row for path in shard_paths(run_dir, table) for row in pq.ParquetFile(path).read().to_pylist()]


def shard_paths(run_dir: Path, table: str) -> list[Path]:
    return sorted((run_dir / table).glob("process=*/[0-9]*.parquet"))


def final_process(run_dir: Path) -> dict[str, Any]:
    return max(read_table(run_dir, "processes"), key=lambda row: row["recorded_ns"])


def shards_on_disk(run_dir: Path) -> dict[str, int]:
    tables = sorted(path.name for path in run_dir.iterdir() if path.is_dir())
    return {table: len(shard_paths(run_dir, table)) for table in tables}


def shards_claimed(run_dir: Path) -> dict[str, int]:
    claimed: dict[str, int] = json.loads(final_process(run_dir)["shards"])
    return claimed
