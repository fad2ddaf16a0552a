"""A CUPTI without a GPU: C function pointers with Python behind them, state and errors included.

`FakeCupti.library` has the functions of libcupti as attributes, each a real function pointer with
the recorder's signature, so that every call is marshalled by ctypes as it would be for the real
library. Activity buffers are requested, filled and completed on a thread of the fake's own, as
CUPTI does. `fail` makes any function return any code, from its n-th call on.

The profiler's structures are transcribed from `cupti_range_profiler.h`, `cupti_profiler_host.h`,
`cupti_profiler_target.h` and `cupti_target.h` (CUDA 13.0) and their sizes checked as CUPTI does.
PM sampling is in `fake_pm`.
"""

from __future__ import annotations

import ctypes
import math
import queue
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from ctypes import (
    POINTER,
    c_char_p,
    c_double,
    c_int,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass, field
from typing import Any

import fake_records
from fake_pm import PM_SAMPLING, PM_STRUCTS, RANGE_PROFILER, PmSampling
from fake_structs import (
    INVALID_CHIP_NAME,
    INVALID_KIND,
    INVALID_OPERATION,
    INVALID_PARAMETER,
    MAX_LIMIT_REACHED,
    MULTIPLE_SUBSCRIBERS,
    OBJECT,
    PARAMETER_SIZE_NOT_SUFFICIENT,
    SUCCESS,
    CuptiCode,
    fill,
    pack,
    params,
    size_of,
    unpack,
)

from nanalyze.recorder.cupti import SIGNATURES

INVALID_METRIC_NAME = 17

# CUptiResult of cupti_result.h (CUDA 13.0): every code that can be returned as an error.
ERROR_CODES: dict[int, str] = {
    1: "INVALID_PARAMETER",
    2: "INVALID_DEVICE",
    3: "INVALID_CONTEXT",
    4: "INVALID_EVENT_DOMAIN_ID",
    5: "INVALID_EVENT_ID",
    6: "INVALID_EVENT_NAME",
    7: "INVALID_OPERATION",
    8: "OUT_OF_MEMORY",
    9: "HARDWARE",
    10: "PARAMETER_SIZE_NOT_SUFFICIENT",
    11: "API_NOT_IMPLEMENTED",
    12: "MAX_LIMIT_REACHED",
    13: "NOT_READY",
    14: "NOT_COMPATIBLE",
    15: "NOT_INITIALIZED",
    16: "INVALID_METRIC_ID",
    17: "INVALID_METRIC_NAME",
    18: "QUEUE_EMPTY",
    19: "INVALID_HANDLE",
    20: "INVALID_STREAM",
    21: "INVALID_KIND",
    22: "INVALID_EVENT_VALUE",
    23: "DISABLED",
    24: "INVALID_MODULE",
    25: "INVALID_METRIC_VALUE",
    26: "HARDWARE_BUSY",
    27: "NOT_SUPPORTED",
    28: "UM_PROFILING_NOT_SUPPORTED",
    29: "UM_PROFILING_NOT_SUPPORTED_ON_DEVICE",
    30: "UM_PROFILING_NOT_SUPPORTED_ON_NON_P2P_DEVICES",
    31: "UM_PROFILING_NOT_SUPPORTED_WITH_MPS",
    32: "CDP_TRACING_NOT_SUPPORTED",
    33: "VIRTUALIZED_DEVICE_NOT_SUPPORTED",
    34: "CUDA_COMPILER_NOT_COMPATIBLE",
    35: "INSUFFICIENT_PRIVILEGES",
    36: "OLD_PROFILER_API_INITIALIZED",
    37: "OPENACC_UNDEFINED_ROUTINE",
    38: "LEGACY_PROFILER_NOT_SUPPORTED",
    39: "MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED",
    40: "VIRTUALIZED_DEVICE_INSUFFICIENT_PRIVILEGES",
    41: "CONFIDENTIAL_COMPUTING_NOT_SUPPORTED",
    42: "CMP_DEVICE_NOT_SUPPORTED",
    43: "MIG_DEVICE_NOT_SUPPORTED",
    44: "SLI_DEVICE_NOT_SUPPORTED",
    45: "WSL_DEVICE_NOT_SUPPORTED",
    46: "INVALID_CHIP_NAME",
    999: "UNKNOWN",
}

AUTO_RANGE, USER_RANGE = 1, 2
KERNEL_REPLAY, USER_REPLAY = 2, 3
METRICS_PER_PASS = 5
HOST_PINNED = 8  # CUPTI_ACTIVITY_ATTR_MEM_ALLOCATION_TYPE_HOST_PINNED, a uint8_t
ATTRIBUTE_SIZES = {HOST_PINNED: 1}
CHIP = b"GH100"

_Request = ctypes.CFUNCTYPE(None, POINTER(c_void_p), POINTER(c_size_t), POINTER(c_size_t))
_Complete = ctypes.CFUNCTYPE(None, c_void_p, c_uint32, c_void_p, c_size_t, c_size_t)
_OnCall = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_uint32, c_void_p)


_STRUCTS: dict[str, type[ctypes.Structure]] = {
    "cuptiProfilerInitialize": params(),
    "cuptiDeviceGetChipName": params(("deviceIndex", c_size_t), ("pChipName", c_char_p)),
    "cuptiProfilerGetCounterAvailability": params(("ctx", c_void_p), ("size", c_size_t), ("image", c_void_p)),
    "cuptiProfilerHostInitialize": params(
        ("profilerType", c_int), ("pChipName", c_char_p), ("availability", c_void_p), OBJECT
    ),
    "cuptiProfilerHostDeinitialize": params(OBJECT),
    "cuptiProfilerHostConfigAddMetrics": params(OBJECT, ("names", POINTER(c_char_p)), ("count", c_size_t)),
    "cuptiProfilerHostGetConfigImageSize": params(OBJECT, ("size", c_size_t)),
    "cuptiProfilerHostGetConfigImage": params(OBJECT, ("size", c_size_t), ("image", c_void_p)),
    "cuptiProfilerHostGetNumOfPasses": params(("size", c_size_t), ("image", c_void_p), ("passes", c_size_t)),
    "cuptiProfilerHostEvaluateToGpuValues": params(
        OBJECT,
        ("image", c_void_p),
        ("size", c_size_t),
        ("index", c_size_t),
        ("names", POINTER(c_char_p)),
        ("count", c_size_t),
        ("values", POINTER(c_double)),
    ),
    "cuptiRangeProfilerEnable": params(("ctx", c_void_p), OBJECT),
    "cuptiRangeProfilerDisable": params(OBJECT),
    "cuptiRangeProfilerGetCounterDataSize": params(
        OBJECT,
        ("names", POINTER(c_char_p)),
        ("count", c_size_t),
        ("maxRanges", c_size_t),
        ("maxNodes", c_uint32),
        ("size", c_size_t),
    ),
    "cuptiRangeProfilerCounterDataImageInitialize": params(OBJECT, ("size", c_size_t), ("image", c_void_p)),
    "cuptiRangeProfilerSetConfig": params(
        OBJECT,
        ("configSize", c_size_t),
        ("config", c_void_p),
        ("imageSize", c_size_t),
        ("image", c_void_p),
        ("range", c_int),
        ("replayMode", c_int),
        ("maxRangesPerPass", c_size_t),
        ("numNestingLevels", c_uint16),
        ("minNestingLevel", c_uint16),
        ("passIndex", c_size_t),
        ("targetNestingLevel", c_uint16),
    ),
    "cuptiRangeProfilerStart": params(OBJECT),
    "cuptiRangeProfilerStop": params(
        OBJECT, ("passIndex", c_size_t), ("targetNestingLevel", c_size_t), ("isAllPassSubmitted", c_uint8)
    ),
    "cuptiRangeProfilerPushRange": params(OBJECT, ("pRangeName", c_char_p)),
    "cuptiRangeProfilerPopRange": params(OBJECT),
    "cuptiRangeProfilerDecodeData": params(OBJECT, ("dropped", c_size_t)),
    "cuptiRangeProfilerGetCounterDataInfo": params(("image", c_void_p), ("size", c_size_t), ("ranges", c_size_t)),
    **PM_STRUCTS,
}
PM_FUNCTIONS = tuple(PM_STRUCTS)
FUNCTIONS = (*SIGNATURES, *_STRUCTS)


class _Library:
    """Holds the functions as attributes, as a ctypes library does."""


def struct_size(function: str) -> int:
    return size_of(_STRUCTS[function])


@dataclass
class Plan:
    """Return `code` from call number `at` on, `times` times (for good if None)."""

    code: int
    at: int = 1
    times: int | None = None

    def applies(self, call: int) -> bool:
        return call >= self.at and (self.times is None or call < self.at + self.times)


@dataclass
class Session:
    """An enabled range profiler. `ranges` holds, for each range collected, the kernels in it."""

    context: int
    config: list[str] | None = None
    user: bool = False
    max_ranges: int = 0
    is_started: bool = False
    passes_done: int = 0
    is_range_open: bool = False
    ranges: list[list[bytes]] = field(default_factory=list)
    image: tuple[int | None, int] = (None, 0)

    def collects(self, name: bytes) -> None:
        """A kernel runs while the session is started."""
        if not self.user:
            self.ranges.append([name])
        elif self.is_range_open:
            self.ranges[-1].append(name)

    @property
    def passes(self) -> int:
        return passes_of(self.config or [])


def passes_of(metrics: list[str]) -> int:
    return math.ceil(len(metrics) / METRICS_PER_PASS)


def value_of(metric: str, kernels: list[bytes]) -> float:
    """What the fake hardware counts: a number that tells metric and kernels apart, the sum over kernels."""
    return float(sum(zlib.crc32(metric.encode() + b"|" + name) % 100_000 for name in kernels))


class FakeCupti(PmSampling):
    """See the module's text. `close` ends its thread."""

    def __init__(self, version: int = 130001) -> None:
        self.version = version
        self.sizes = fake_records.SIZES[version] | {
            fake_records.CONTEXT: 32
        }  # what GetNextRecord knows; add kinds at will
        self.buffer_limit: int | None = None  # complete buffers when they hold so many bytes
        self.unsupported: set[str] = set()  # metrics this chip lacks
        self.passes = passes_of
        self.values: dict[str, float] = {}  # in place of value_of
        self.calls: Counter[str] = Counter()
        self.log: list[str] = []
        self.enabled: set[int] = set()
        self.driver_api: set[int] = set()  # single driver calls that are recorded
        self.runtime_api_off: set[int] = set()  # runtime calls that are not recorded with their kind
        self.runtime_calls = 520  # ids beyond are unknown
        self.latency_timestamps = False
        self.clock: Callable[[], int] = time.time_ns
        self.buffers_given: list[int] = []  # addresses, in order
        self.kept: list[tuple[int, int]] = []  # address and size of buffers in flight
        self.attributes: dict[int, int] = {}
        self.flush_period_ms = 0
        self.sessions: dict[int, Session] = {}  # by handle; one a context
        self.hosts: dict[int, list[str]] = {}
        self._host_kinds: dict[int, tuple[int, set[str]]] = {}  # profiler type, metrics not available
        self._init_pm()
        self.subscriptions: set[int] = set()  # driver callback ids enabled
        self.nvtx_subscriptions: set[int] = set()
        self.subscriber_name = b"CUPTI for Other"  # of the client that holds the subscription
        self.unregistered_emits = 0
        self.bytes_written = 0
        self._plans: dict[str, list[Plan]] = {}
        self._subscriber: Any = None
        self._request: Any = None
        self._complete: Any = None
        self._buffer: tuple[int, int, int] | None = None  # address, capacity, used
        self._dropped = 0
        self._next_handle = 0x1000
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self.library = _Library()
        for name in FUNCTIONS:
            self._export(name)

    # -- the library ----------------------------------------------------------------------------

    def _export(self, name: str) -> None:
        types = SIGNATURES.get(name, (c_void_p,))
        body = getattr(self, f"_{name}")

        def entry(*args: Any) -> int:
            self.calls[name] += 1
            self.log.append(name)
            for plan in self._plans.get(name, ()):
                if plan.applies(self.calls[name]):
                    return plan.code
            try:
                if name in _STRUCTS:
                    body(self._checked_params(name, args[0]))
                else:
                    body(*args)
            except CuptiCode as error:
                return error.code
            return SUCCESS

        setattr(self.library, name, ctypes.CFUNCTYPE(c_int, *types)(entry))

    def _checked_params(self, name: str, address: int) -> Any:
        params = _STRUCTS[name].from_address(address)
        if params.structSize != struct_size(name) or params.pPriv:
            raise CuptiCode(INVALID_PARAMETER)
        return params

    def fail(self, function: str, code: int, *, at: int = 1, times: int | None = None) -> None:
        """Make `function` return `code` from its call number `at` (counted from now) on."""
        assert function in FUNCTIONS, function
        self._plans.setdefault(function, []).append(Plan(code, self.calls[function] + at, times))

    def heal(self) -> None:
        self._plans.clear()

    def remove(self, function: str) -> None:
        """Make this an older CUPTI without `function`."""
        delattr(self.library, function)

    def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            self._jobs.put(None)
            worker.join()

    # -- CUPTI's own thread ---------------------------------------------------------------------

    def _on_worker(self, job: Callable[[], object], *, wait: bool = False) -> None:
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="fake-cupti", daemon=True)
            self._worker.start()
        if not wait:
            self._jobs.put(job)
            return
        done = threading.Event()

        def signalled() -> None:
            try:
                job()
            finally:
                done.set()

        self._jobs.put(signalled)
        if not done.wait(10):
            raise AssertionError("the fake CUPTI's thread does not answer")

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    # -- activity -------------------------------------------------------------------------------

    def emit(self, *records: bytes, wait: bool = False) -> None:
        """The GPU did something: put the records of enabled kinds into buffers, on CUPTI's thread."""
        wanted = [record for record in records if self._is_wanted(*struct.unpack_from("<II", record))]
        self._on_worker(lambda: [self._put(record) for record in wanted], wait=wait)

    def settle(self) -> None:
        """Wait until everything emitted so far is in buffers."""
        self._on_worker(lambda: None, wait=True)

    def complete_buffer(self, content: bytes) -> bool:
        """Request one buffer, fill it with `content` as it is and complete it; False if none was given."""
        answer: list[bool] = []

        def job() -> None:
            self._hand_over(forced=False)
            if self._request_buffer():
                address, capacity, _ = self._buffer or (0, 0, 0)
                assert len(content) <= capacity
                ctypes.memmove(address, content, len(content))
                self._buffer = (address, capacity, len(content))
                self._hand_over(forced=True)
                answer.append(True)

        self._on_worker(job, wait=True)
        return bool(answer)

    def request_and_keep(self) -> int | None:
        """Request a buffer and keep it, as CUPTI does with buffers in flight; its address, or None."""
        address = c_void_p()
        self._on_worker(lambda: self._request(ctypes.byref(address), ctypes.byref(c_size_t()), c_size_t()), wait=True)
        return address.value

    def _is_wanted(self, kind: int, cbid: int) -> bool:
        if kind == fake_records.DRIVER:
            return kind in self.enabled or cbid in self.driver_api
        return kind in self.enabled and not (kind == fake_records.RUNTIME and cbid in self.runtime_api_off)

    def _put(self, record: bytes) -> None:
        if self._request is None:
            self.unregistered_emits += 1
            return
        if self._buffer is not None:
            _, capacity, used = self._buffer
            if used + len(record) > min(capacity, self.buffer_limit or capacity):
                self._hand_over(forced=True)
        if self._buffer is None and not self._request_buffer():
            self._dropped += 1
            return
        assert self._buffer is not None
        address, capacity, used = self._buffer
        ctypes.memmove(address + used, record, len(record))
        self.bytes_written += len(record)
        self._buffer = (address, capacity, used + len(record))

    def _request_buffer(self) -> bool:
        address, size, most = c_void_p(), c_size_t(), c_size_t(77)
        self._request(ctypes.byref(address), ctypes.byref(size), ctypes.byref(most))
        if not address.value or not size.value:
            return False
        assert address.value % 8 == 0, "CUPTI wants 8-byte aligned buffers"
        self.buffers_given.append(address.value)
        assert most.value == 0, "the number of records must be set: it is uninitialised memory in CUPTI"
        self._buffer = (address.value, size.value, 0)
        return True

    def _hand_over(self, *, forced: bool) -> None:
        if self._buffer is None or (not self._buffer[2] and not forced):
            return
        (address, capacity, used), self._buffer = self._buffer, None
        self._complete(None, 0, address, capacity, used)

    def _cuptiGetVersion(self, version: Any) -> None:
        version[0] = self.version

    def _cuptiActivityRegisterCallbacks(self, request: Any, complete: Any) -> None:
        self._request = _Request(ctypes.cast(request, c_void_p).value or 0)
        self._complete = _Complete(ctypes.cast(complete, c_void_p).value or 0)

    def _cuptiActivityRegisterTimestampCallback(self, clock: Any) -> None:
        self.clock = ctypes.CFUNCTYPE(c_uint64)(ctypes.cast(clock, c_void_p).value or 0)

    def _cuptiActivityEnable(self, kind: int) -> None:
        self.enabled.add(kind)

    def _cuptiActivityDisable(self, kind: int) -> None:
        self.enabled.discard(kind)

    def _cuptiActivityEnableAndDump(self, kind: int) -> None:
        self.enabled.add(kind)
        if kind == fake_records.CONTEXT and self.is_cuda_initialized:
            self.emit(fake_records.foreign(kind, self.sizes[kind]))

    def _cuptiActivityEnableLatencyTimestamps(self, on: int) -> None:
        self.latency_timestamps = bool(on)

    def _cuptiActivityEnableDriverApi(self, cbid: int, on: int) -> None:
        (self.driver_api.add if on else self.driver_api.discard)(cbid)

    def _cuptiActivitySetAttribute(self, attribute: int, size: Any, value: int | None) -> None:
        if not value or size[0] != ATTRIBUTE_SIZES[attribute]:
            raise CuptiCode(PARAMETER_SIZE_NOT_SUFFICIENT)
        self.attributes[attribute] = int.from_bytes(ctypes.string_at(value, size[0]), "little")

    def _cuptiActivityEnableRuntimeApi(self, cbid: int, on: int) -> None:
        if not 0 < cbid <= self.runtime_calls:
            raise CuptiCode(INVALID_PARAMETER)
        (self.runtime_api_off.discard if on else self.runtime_api_off.add)(cbid)

    def _cuptiActivityFlushPeriod(self, milliseconds: int) -> None:
        """Changes nothing here: full buffers alone are handed over by it, and they were when they filled."""
        self.flush_period_ms = milliseconds

    def _cuptiActivityFlushAll(self, flag: int) -> None:
        if self._request is None:
            raise CuptiCode(INVALID_OPERATION)
        self._on_worker(lambda: self._hand_over(forced=bool(flag)), wait=True)

    def _cuptiActivityGetNumDroppedRecords(self, context: Any, stream: int, count: Any) -> None:
        count[0], self._dropped = self._dropped, 0

    def _cuptiActivityGetNextRecord(self, buffer: int | None, valid: int, record: Any) -> None:
        if not buffer:
            raise CuptiCode(INVALID_PARAMETER)
        at = buffer
        if record[0]:
            at = record[0] + self._record_size(record[0])
        if at >= buffer + valid:
            raise CuptiCode(MAX_LIMIT_REACHED)
        if at + 4 > buffer + valid or at + self._record_size(at) > buffer + valid:
            raise CuptiCode(INVALID_KIND)
        record[0] = at

    def _record_size(self, address: int) -> int:
        size = self.sizes.get(c_uint32.from_address(address).value)
        if size is None:
            raise CuptiCode(INVALID_KIND)
        return size

    def _cuptiFinalize(self) -> None:
        """Everything is off, and buffers in flight are not given back."""
        self.enabled.clear()
        self.driver_api.clear()
        self._request = self._buffer = None
        self.latency_timestamps = False
        self.clock = time.time_ns

    # -- callbacks ------------------------------------------------------------------------------

    def _cuptiSubscribe(self, handle: Any, callback: Any, user: int | None) -> None:
        if self._subscriber is not None:
            raise CuptiCode(MULTIPLE_SUBSCRIBERS)
        self._subscriber = _OnCall(ctypes.cast(callback, c_void_p).value or 0)
        handle[0] = self._new_handle()

    def _cuptiSubscribe_v2(self, handle: Any, callback: Any, user: int | None, params: Any) -> None:
        given = params[0]
        if given.structSize != 40:
            raise CuptiCode(INVALID_PARAMETER)
        if self._subscriber is not None and given.oldSubscriberName:
            name = self.subscriber_name[: given.oldSubscriberSize - 1] + b"\0"
            ctypes.memmove(given.oldSubscriberName, name, len(name))
        self._cuptiSubscribe(handle, callback, user)

    def _cuptiUnsubscribe(self, handle: int | None) -> None:
        if self._subscriber is None or not handle:
            raise CuptiCode(INVALID_PARAMETER)
        self._subscriber = None
        self.subscriptions.clear()
        self.nvtx_subscriptions.clear()

    def _cuptiEnableCallback(self, on: int, handle: int | None, domain: int, cbid: int) -> None:
        if self._subscriber is None or not handle or domain not in (1, 5):
            raise CuptiCode(INVALID_PARAMETER)
        enabled = self.subscriptions if domain == 1 else self.nvtx_subscriptions
        (enabled.add if on else enabled.discard)(cbid)

    def deliver(self, cbid: int, data_address: int) -> bool:
        """Call the subscriber if it asked for `cbid`; says whether it did."""
        if self._subscriber is None or cbid not in self.subscriptions:
            return False
        self._subscriber(None, 1, cbid, data_address)
        return True

    def deliver_nvtx(self, cbid: int, data_address: int) -> bool:
        """The same for a call of NVTX."""
        if self._subscriber is None or cbid not in self.nvtx_subscriptions:
            return False
        self._subscriber(None, 5, cbid, data_address)
        return True

    def _new_handle(self) -> int:
        self._next_handle += 0x10
        return self._next_handle

    # -- profiler host --------------------------------------------------------------------------

    def _cuptiProfilerInitialize(self, params: Any) -> None:
        self._initialize_profiler()

    def _cuptiDeviceGetChipName(self, params: Any) -> None:
        params.pChipName = CHIP

    def _cuptiProfilerGetCounterAvailability(self, params: Any) -> None:
        content = {"available": params.ctx}
        if params.image:
            fill(params.image, params.size, content)
        params.size = len(pack(content))

    def _cuptiProfilerHostInitialize(self, params: Any) -> None:
        if params.profilerType not in (RANGE_PROFILER, PM_SAMPLING):
            raise CuptiCode(INVALID_PARAMETER)
        if params.pChipName != CHIP:
            raise CuptiCode(INVALID_CHIP_NAME)
        available = unpack(params.availability, 1 << 16) if params.availability else {}
        params.object = self._new_handle()
        self.hosts[params.object] = []
        self._host_kinds[params.object] = (params.profilerType, set(available.get("unavailable", ())))

    def _host(self, params: Any) -> list[str]:
        if params.object not in self.hosts:
            raise CuptiCode(INVALID_PARAMETER)
        return self.hosts[params.object]

    def _cuptiProfilerHostDeinitialize(self, params: Any) -> None:
        self._host(params)
        del self.hosts[params.object]

    def _metric_names(self, params: Any) -> list[str]:
        names = [params.names[index].decode() for index in range(params.count)]
        if not names or any(name in self.unsupported or "__" not in name for name in names):
            raise CuptiCode(INVALID_PARAMETER)  # as CUPTI 13.0 does on an H200
        return names

    def _cuptiProfilerHostConfigAddMetrics(self, params: Any) -> None:
        host, names = self._host(params), self._metric_names(params)
        if self._host_kinds[params.object][1].intersection(names):
            raise CuptiCode(INVALID_PARAMETER)
        host.extend(names)

    def _config_of(self, params: Any) -> Any:
        """The content of a configuration image: the two profilers do not take each other's."""
        metrics = self._host(params)
        return {"sampled": metrics} if self._host_kinds[params.object][0] == PM_SAMPLING else metrics

    def _cuptiProfilerHostGetConfigImageSize(self, params: Any) -> None:
        params.size = len(pack(self._config_of(params)))

    def _cuptiProfilerHostGetConfigImage(self, params: Any) -> None:
        fill(params.image, params.size, self._config_of(params))

    def _cuptiProfilerHostGetNumOfPasses(self, params: Any) -> None:
        config = unpack(params.image, params.size)
        params.passes = self.passes(config["sampled"] if isinstance(config, dict) else config)

    def _cuptiProfilerHostEvaluateToGpuValues(self, params: Any) -> None:
        self._host(params)
        content, metrics = unpack(params.image, params.size), self._metric_names(params)
        is_sample = "samples" in content
        if is_sample != (self._host_kinds[params.object][0] == PM_SAMPLING):
            raise CuptiCode(INVALID_PARAMETER)
        values = self._evaluate_sample if is_sample else self._evaluate_range
        for place, value in enumerate(values(content, params.index, metrics)):
            params.values[place] = value

    def _evaluate_range(self, content: Any, index: int, metrics: list[str]) -> list[float]:
        if index >= len(content["ranges"]):
            raise CuptiCode(INVALID_PARAMETER)
        kernels = [name.encode("latin-1") for name in content["ranges"][index]]
        return [self.values.get(metric, value_of(metric, kernels)) for metric in metrics]

    # -- range profiler -------------------------------------------------------------------------

    def session_of(self, context: int) -> Session | None:
        return next((session for session in self.sessions.values() if session.context == context), None)

    def _cuptiRangeProfilerEnable(self, params: Any) -> None:
        if not params.ctx:
            raise CuptiCode(INVALID_PARAMETER)
        if self.session_of(params.ctx) is not None:
            raise CuptiCode(INVALID_OPERATION)
        params.object = self._new_handle()
        self.sessions[params.object] = Session(params.ctx)

    def _session(self, params: Any) -> Session:
        if params.object not in self.sessions:
            raise CuptiCode(INVALID_OPERATION)
        return self.sessions[params.object]

    def _cuptiRangeProfilerDisable(self, params: Any) -> None:
        self._session(params)
        del self.sessions[params.object]

    def _cuptiRangeProfilerGetCounterDataSize(self, params: Any) -> None:
        self._session(params)
        self._metric_names(params)
        if not params.maxRanges or params.maxNodes < params.maxRanges:
            raise CuptiCode(INVALID_PARAMETER)
        params.size = 32_768 * params.maxRanges

    def _cuptiRangeProfilerCounterDataImageInitialize(self, params: Any) -> None:
        self._session(params)
        fill(params.image, params.size, {"ranges": []})

    def _cuptiRangeProfilerSetConfig(self, params: Any) -> None:
        session = self._session(params)
        if (params.range, params.replayMode) not in ((AUTO_RANGE, KERNEL_REPLAY), (USER_RANGE, USER_REPLAY)):
            raise CuptiCode(INVALID_PARAMETER)
        if session.is_started:
            raise CuptiCode(INVALID_OPERATION)
        if (params.numNestingLevels, params.minNestingLevel, params.passIndex) != (1, 1, 0):
            raise CuptiCode(INVALID_PARAMETER)
        unpack(params.image, params.imageSize)
        session.config = unpack(params.config, params.configSize)
        session.user = params.range == USER_RANGE
        session.max_ranges = params.maxRangesPerPass
        session.passes_done = 0
        session.ranges = []
        session.image = (params.image, params.imageSize)

    def _cuptiRangeProfilerStart(self, params: Any) -> None:
        session = self._session(params)
        if session.config is None or session.is_started:
            raise CuptiCode(INVALID_OPERATION)
        session.is_started = True
        if session.user:
            session.ranges = []  # a later pass over the same ranges

    def _cuptiRangeProfilerStop(self, params: Any) -> None:
        session = self._session(params)
        if not session.is_started or session.is_range_open:
            raise CuptiCode(INVALID_OPERATION)
        session.is_started = False
        session.passes_done += 1
        params.passIndex = session.passes_done
        params.targetNestingLevel = 1
        params.isAllPassSubmitted = int(not session.user or session.passes_done >= session.passes)

    def _cuptiRangeProfilerPushRange(self, params: Any) -> None:
        session = self._session(params)
        if not session.user or not session.is_started or session.is_range_open or not params.pRangeName:
            raise CuptiCode(INVALID_OPERATION)
        session.is_range_open = True
        session.ranges.append([])

    def _cuptiRangeProfilerPopRange(self, params: Any) -> None:
        session = self._session(params)
        if not session.is_range_open:
            raise CuptiCode(INVALID_OPERATION)
        session.is_range_open = False

    def _cuptiRangeProfilerDecodeData(self, params: Any) -> None:
        session = self._session(params)
        if session.is_started or session.config is None:
            raise CuptiCode(INVALID_OPERATION)
        is_complete = not session.user or session.passes_done >= session.passes
        kept = session.ranges[: session.max_ranges] if is_complete else []
        params.dropped = len(session.ranges) - len(kept) if is_complete else 0
        fill(*session.image, {"ranges": [[name.decode("latin-1") for name in names] for names in kept]})

    def _cuptiRangeProfilerGetCounterDataInfo(self, params: Any) -> None:
        params.ranges = len(unpack(params.image, params.size)["ranges"])
