"""CUPTI through ctypes: finding the library, calling it, naming its errors.

Only plain C entry points are used. cupti-python would turn each record into a Python object,
twice the cost a launch (benchmarks/recorder.py), and has no range profiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import re
import sys
from collections.abc import Iterator
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from typing import Any

from nanalyze.rundir.errors import RecorderError

# Subset of CUpti_ActivityKind (cupti_activity.h).
KIND_MEMCPY = 1
KIND_MEMSET = 2
KIND_DRIVER = 4
KIND_RUNTIME = 5
KIND_CONTEXT = 9
KIND_CONCURRENT_KERNEL = 10
KIND_MARKER = 12
KIND_MEMCPY2 = 22

ATTR_HOST_PINNED = 8  # CUPTI_ACTIVITY_ATTR_MEM_ALLOCATION_TYPE_HOST_PINNED

CB_DOMAIN_DRIVER_API = 1
CALLBACK_ENTER = 0

# CUpti_driver_api_trace_cbid (cupti_driver_cbid.h); `_ptsz` are the per-thread-stream variants.
CBID_KERNEL_LAUNCHES = {
    307: "cuLaunchKernel",
    442: "cuLaunchKernel",  # _ptsz
    477: "cuLaunchCooperativeKernel",
    478: "cuLaunchCooperativeKernel",  # _ptsz
    652: "cuLaunchKernelEx",
    653: "cuLaunchKernelEx",  # _ptsz
}
CBID_GRAPH_LAUNCHES = (514, 515)  # cuGraphLaunch, cuGraphLaunch_ptsz
# CUpti_runtime_api_trace_cbid (cupti_runtime_cbid.h): cudaGraphLaunch, cudaGraphLaunch_ptsz, and a
# bound above every id there is (about 520 in 13.0).
CBID_RUNTIME_GRAPH_LAUNCHES = (311, 312)
CBID_RUNTIME_BOUND = 1000
CBID_RUNTIME_LAUNCH_KERNEL = 211
# cuStreamBeginCapture (all variants) and cuStreamEndCapture.
CBID_CAPTURE_BEGINS = (495, 496, 539, 540, 720, 721)
CBID_CAPTURE_ENDS = (497, 498)

MAX_LIMIT_REACHED = 12
INVALID_KIND = 21
HARDWARE_BUSY = 26
INSUFFICIENT_PRIVILEGES = 35
MULTIPLE_SUBSCRIBERS = 39

# CUptiResult (cupti_result.h): name, and what a user can do about it where that is known.
ERRORS: dict[int, tuple[str, str]] = {
    1: ("INVALID_PARAMETER", ""),
    2: ("INVALID_DEVICE", ""),
    3: ("INVALID_CONTEXT", ""),
    4: ("INVALID_EVENT_DOMAIN_ID", ""),
    5: ("INVALID_EVENT_ID", ""),
    6: ("INVALID_EVENT_NAME", ""),
    7: ("INVALID_OPERATION", "another profiler may hold the session: stop it first"),
    8: ("OUT_OF_MEMORY", "free host or device memory"),
    9: ("HARDWARE", "check the GPU with nvidia-smi"),
    10: ("PARAMETER_SIZE_NOT_SUFFICIENT", ""),
    11: ("API_NOT_IMPLEMENTED", "use a newer CUPTI"),
    12: ("MAX_LIMIT_REACHED", ""),
    13: ("NOT_READY", ""),
    14: ("NOT_COMPATIBLE", "use a CUPTI that matches the driver"),
    15: ("NOT_INITIALIZED", "initialise CUDA first; in containers check that the driver is mounted"),
    16: ("INVALID_METRIC_ID", ""),
    17: ("INVALID_METRIC_NAME", "this GPU has no such metric"),
    18: ("QUEUE_EMPTY", ""),
    19: ("INVALID_HANDLE", ""),
    20: ("INVALID_STREAM", ""),
    21: ("INVALID_KIND", ""),
    22: ("INVALID_EVENT_VALUE", ""),
    23: ("DISABLED", "CUPTI is disabled in this process"),
    24: ("INVALID_MODULE", ""),
    25: ("INVALID_METRIC_VALUE", ""),
    26: ("HARDWARE_BUSY", "another process (Nsight, DCGM) holds the counters: stop it"),
    27: ("NOT_SUPPORTED", "this GPU or driver does not support it"),
    28: ("UM_PROFILING_NOT_SUPPORTED", ""),
    29: ("UM_PROFILING_NOT_SUPPORTED_ON_DEVICE", ""),
    30: ("UM_PROFILING_NOT_SUPPORTED_ON_NON_P2P_DEVICES", ""),
    31: ("UM_PROFILING_NOT_SUPPORTED_WITH_MPS", ""),
    32: ("CDP_TRACING_NOT_SUPPORTED", ""),
    33: ("VIRTUALIZED_DEVICE_NOT_SUPPORTED", "the hypervisor does not offer counters"),
    34: ("CUDA_COMPILER_NOT_COMPATIBLE", "rebuild the job with a CUDA compiler that matches CUPTI"),
    35: (
        "INSUFFICIENT_PRIVILEGES",
        "reading counters needs root, CAP_SYS_ADMIN, or the driver option NVreg_RestrictProfilingToAdminUsers=0",
    ),
    36: ("OLD_PROFILER_API_INITIALIZED", "another profiler uses the old event API in this process"),
    37: ("OPENACC_UNDEFINED_ROUTINE", ""),
    38: ("LEGACY_PROFILER_NOT_SUPPORTED", "use CUPTI's range profiler on this GPU"),
    39: ("MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED", "another profiler (torch.profiler, Nsight) is active in this process"),
    40: ("VIRTUALIZED_DEVICE_INSUFFICIENT_PRIVILEGES", "enable profiling for this virtual GPU on the host"),
    41: ("CONFIDENTIAL_COMPUTING_NOT_SUPPORTED", "counters are off under confidential computing"),
    42: ("CMP_DEVICE_NOT_SUPPORTED", ""),
    43: ("MIG_DEVICE_NOT_SUPPORTED", "counters are not available on this MIG instance"),
    44: ("SLI_DEVICE_NOT_SUPPORTED", ""),
    45: ("WSL_DEVICE_NOT_SUPPORTED", "counters are not available under WSL"),
    46: ("INVALID_CHIP_NAME", "use a newer CUPTI that knows this GPU"),
    999: ("UNKNOWN", "without a working GPU driver every CUPTI call fails so"),
}

BufferRequested = ctypes.CFUNCTYPE(None, POINTER(c_void_p), POINTER(c_size_t), POINTER(c_size_t))
BufferCompleted = ctypes.CFUNCTYPE(None, c_void_p, c_uint32, c_void_p, c_size_t, c_size_t)
TimestampCallback = ctypes.CFUNCTYPE(c_uint64)
ApiCallback = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_uint32, c_void_p)

no_callback = ApiCallback(lambda *_: None)  # for a subscription that asks for no calls


class SubscriberParams(ctypes.Structure):
    """CUpti_SubscriberParams (CUPTI 13.2)."""

    _fields_ = [
        ("structSize", c_size_t),
        ("subscriberName", c_char_p),
        ("oldSubscriberName", c_void_p),
        ("oldSubscriberSize", c_size_t),
        ("allowMultipleSubscribers", c_uint8),
        ("padding", c_uint8 * 7),
    ]


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuptiGetVersion": (POINTER(c_uint32),),
    "cuptiActivityEnable": (c_int,),
    "cuptiActivityDisable": (c_int,),
    "cuptiActivityEnableAndDump": (c_int,),
    "cuptiActivityRegisterCallbacks": (BufferRequested, BufferCompleted),
    "cuptiActivityRegisterTimestampCallback": (TimestampCallback,),
    "cuptiActivityFlushAll": (c_uint32,),
    "cuptiActivityFlushPeriod": (c_uint32,),
    "cuptiActivitySetAttribute": (c_int, POINTER(c_size_t), c_void_p),
    "cuptiActivityGetNextRecord": (c_void_p, c_size_t, POINTER(c_void_p)),
    "cuptiActivityGetNumDroppedRecords": (c_void_p, c_uint32, POINTER(c_size_t)),
    "cuptiActivityEnableLatencyTimestamps": (c_uint8,),
    "cuptiActivityEnableDriverApi": (c_uint32, c_uint8),
    "cuptiActivityEnableRuntimeApi": (c_uint32, c_uint8),
    "cuptiSubscribe": (POINTER(c_void_p), ApiCallback, c_void_p),
    "cuptiSubscribe_v2": (POINTER(c_void_p), ApiCallback, c_void_p, POINTER(SubscriberParams)),
    "cuptiUnsubscribe": (c_void_p,),
    "cuptiEnableCallback": (c_uint32, c_void_p, c_int, c_uint32),
    "cuptiFinalize": (),
}


_SUBSCRIBER_NAME_BYTES = 64


class CuptiError(RecorderError):
    """A CUPTI call that failed: function, code and, where known, what to do."""

    def __init__(self, function: str, code: int) -> None:
        self.function = function
        self.code = code
        name, remedy = ERRORS.get(code, (f"code {code}", ""))
        super().__init__(f"{function} failed: CUPTI_ERROR_{name} ({code})" + (f": {remedy}" if remedy else ""))


class MissingFunction(CuptiError):
    """A function that this version of CUPTI does not have; treated like any other refusal."""

    def __init__(self, function: str) -> None:
        super().__init__(function, 11)


class CallbackData(ctypes.Structure):
    """CUpti_CallbackData of a driver API call."""

    _fields_ = [
        ("site", c_int),
        ("function_name", c_char_p),
        ("function_params", c_void_p),
        ("function_return_value", c_void_p),
        ("symbol_name", c_char_p),
        ("context", c_void_p),
        ("context_uid", c_uint32),
        ("correlation_data", c_void_p),
        ("correlation_id", c_uint32),
    ]


class Cupti:
    """One loaded CUPTI library. `library` is a ctypes library, or a stand-in with the same functions."""

    def __init__(self, library: Any, path: str) -> None:
        self.library = library
        self.path = path
        self.version = self._version()

    def __getattr__(self, name: str) -> Any:
        """The checked function `name`: raises CuptiError unless it returns CUPTI_SUCCESS."""
        if not name.startswith("cupti"):
            raise AttributeError(name)
        function = _typed(self.library, name)

        def checked(*args: Any) -> None:
            code = function(*args)
            if code:
                raise CuptiError(name, code)

        setattr(self, name, checked)
        return checked

    def _version(self) -> int:
        version = c_uint32()
        self.cuptiGetVersion(ctypes.byref(version))
        return version.value


def _typed(library: Any, name: str) -> Any:
    try:
        function = getattr(library, name)
    except AttributeError:
        raise MissingFunction(name) from None
    if name in SIGNATURES:
        function.argtypes = SIGNATURES[name]
    function.restype = c_int
    return function


def address_of(cupti: Cupti, name: str) -> int:
    """Where the function `name` is, for C code that calls it; raises MissingFunction."""
    return ctypes.cast(_typed(cupti.library, name), c_void_p).value or 0


def is_subscription_free(cupti: Cupti) -> bool:
    """Whether nobody in the process holds CUPTI's subscription: it is taken for a moment to find out."""
    subscriber = c_void_p()
    try:
        cupti.cuptiSubscribe(ctypes.byref(subscriber), no_callback, None)
    except CuptiError:
        return False
    with contextlib.suppress(CuptiError):
        cupti.cuptiUnsubscribe(subscriber)
    return True


def subscriber_name(cupti: Cupti) -> str | None:
    """What the client that holds CUPTI's subscription calls itself; None where it cannot be told (before 13.2)."""
    name = ctypes.create_string_buffer(_SUBSCRIBER_NAME_BYTES)
    params = SubscriberParams(
        structSize=ctypes.sizeof(SubscriberParams),
        oldSubscriberName=ctypes.addressof(name),
        oldSubscriberSize=len(name),
    )
    subscriber = c_void_p()
    try:
        cupti.cuptiSubscribe_v2(ctypes.byref(subscriber), no_callback, None, ctypes.byref(params))
    except CuptiError as error:
        return name.value.decode("utf-8", "backslashreplace") or None if error.code == MULTIPLE_SUBSCRIBERS else None
    with contextlib.suppress(CuptiError):
        cupti.cuptiUnsubscribe(subscriber)
    return None


def load() -> Cupti:
    """The CUPTI this process should use: the one already loaded if there is one.

    Raises RecorderError, in one line, where there is no library or no working driver.
    """
    if sys.platform != "linux":
        raise RecorderError("recording needs Linux; analysis works everywhere")
    tried = []
    for path in candidates():
        try:
            _load_neighbours(path)
            return Cupti(ctypes.CDLL(path), path)
        except OSError:
            tried.append(path)
        except CuptiError as error:
            raise RecorderError(
                f"{path} was found but does not work ({error}). Is there an NVIDIA driver and a GPU?"
            ) from error
    raise RecorderError(
        "libcupti was not found. Install it with `pip install nvidia-cuda-cupti` (CUDA 13) or "
        "`pip install nvidia-cuda-cupti-cu12` (CUDA 12)"
        + (f"; these did not load: {', '.join(tried)}" if tried else "")
    )


def candidates() -> Iterator[str]:
    """Paths of libcupti, best first: named by the user, loaded, beside Python packages, toolkit, loader."""
    named = os.environ.get("NANALYZE_CUPTI")
    if named:
        yield named
        return
    yield from _loaded()
    yield from _from_pathfinder()
    yield from _installed()
    yield from ("libcupti.so.13", "libcupti.so.12")


def find() -> str | None:
    """A path of libcupti that `load` would take, without loading one; None where there is none."""
    named = os.environ.get("NANALYZE_CUPTI")
    return named or next(_loaded(), None) or next(_installed(), None)


def _installed() -> Iterator[str]:
    for root in sys.path:
        for folder in ("nvidia/cu13/lib", "nvidia/cuda_cupti/lib"):
            yield from sorted(glob.glob(os.path.join(glob.escape(root), folder, "libcupti.so.1[23]")), reverse=True)
    for pattern in (
        "/usr/local/cuda*/extras/CUPTI/lib64/libcupti.so.1[23]",
        "/usr/local/cuda*/lib64/libcupti.so.1[23]",
    ):
        yield from sorted(glob.glob(pattern), reverse=True)


def _loaded() -> Iterator[str]:
    """A CUPTI that the job already loaded (PyTorch links it): two in one process would fight."""
    try:
        with open("/proc/self/maps") as maps:
            found = re.search(r"(/\S*libcupti\.so\.1[23]\S*)", maps.read())
    except OSError:
        return
    if found:
        yield found.group(1)


def _from_pathfinder() -> Iterator[str]:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError:
        return
    try:
        path = load_nvidia_dynamic_lib("cupti").abs_path
    except Exception:  # its error types differ between versions; other places are tried next
        return
    if path:
        yield path


def _load_neighbours(path: str) -> None:
    """CUPTI loads the counter libraries by bare name: those beside it must be in the process first."""
    folder = os.path.dirname(path)
    for name in ("libnvperf_host.so", "libnvperf_target.so"):
        neighbour = os.path.join(folder, name)
        if folder and os.path.exists(neighbour):
            ctypes.CDLL(neighbour, mode=ctypes.RTLD_GLOBAL)
