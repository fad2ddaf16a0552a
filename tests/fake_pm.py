"""PM sampling of the fake CUPTI: sessions, hardware buffer, counter-data images, values by a script.

The structures are transcribed from `cupti_pmsampling.h` (CUDA 13.0). Where the header does not say
what a call answers in a wrong state, the fake refuses with INVALID_OPERATION. A counter-data image
holds only a token; its samples stay with the fake.
"""

from __future__ import annotations

import math
import time
import zlib
from collections import deque
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field
from typing import Any

from fake_structs import (
    HARDWARE_BUSY,
    INSUFFICIENT_PRIVILEGES,
    INVALID_OPERATION,
    INVALID_PARAMETER,
    NOT_INITIALIZED,
    NOT_SUPPORTED,
    OBJECT,
    OUT_OF_MEMORY,
    PARAMETER_SIZE_NOT_SUFFICIENT,
    UNKNOWN,
    CuptiCode,
    fill,
    pack,
    params,
    unpack,
)

RANGE_PROFILER, PM_SAMPLING = 0, 1  # CUpti_ProfilerType
SYSCLK, TIME_INTERVAL = 0, 1
KEEP_OLDEST = 0
FULL, END_OF_RECORDS = 1, 2
RECORD_BYTES = 8192  # of the hardware buffer, a sample (measured on an H200)
SLOT_BYTES = 64

_IMAGE = (("image", c_void_p), ("size", c_size_t))
PM_STRUCTS = {
    "cuptiPmSamplingSetConfig": params(
        OBJECT,
        ("configSize", c_size_t),
        ("config", c_void_p),
        ("bufferBytes", c_size_t),
        ("interval", c_uint64),
        ("trigger", c_int),
        ("append", c_int),
    ),
    "cuptiPmSamplingEnable": params(("device", c_size_t), OBJECT),
    "cuptiPmSamplingDisable": params(OBJECT),
    "cuptiPmSamplingStart": params(OBJECT),
    "cuptiPmSamplingStop": params(OBJECT),
    "cuptiPmSamplingDecodeData": params(OBJECT, *_IMAGE, ("reason", c_int), ("overflow", c_uint8)),
    "cuptiPmSamplingGetCounterAvailability": params(("device", c_size_t), ("size", c_size_t), ("image", c_void_p)),
    "cuptiPmSamplingGetCounterDataSize": params(
        OBJECT, ("names", POINTER(c_char_p)), ("count", c_size_t), ("maxSamples", c_uint32), ("size", c_size_t)
    ),
    "cuptiPmSamplingCounterDataImageInitialize": params(OBJECT, ("size", c_size_t), ("image", c_void_p)),
    "cuptiPmSamplingGetCounterDataInfo": params(
        *_IMAGE, ("total", c_size_t), ("populated", c_size_t), ("completed", c_size_t)
    ),
    "cuptiPmSamplingCounterDataGetSampleInfo": params(
        OBJECT, *_IMAGE, ("index", c_size_t), ("start", c_uint64), ("end", c_uint64)
    ),
}

Sample = tuple[int, int]  # start and end in ns


def sampled_value(metric: str, start_ns: int, end_ns: int) -> float:
    """What the fake counts between two times unless a script says otherwise: it tells metric and time apart.

    Percentages lie in 0..100; everything else adds up over time.
    """
    if ".pct" in metric or "pct_of_peak" in metric:
        return float(zlib.crc32(b"%s|%d" % (metric.encode(), start_ns)) % 10_001) / 100
    return float(zlib.crc32(metric.encode()) % 1000 + 1) * (end_ns - start_ns)


@dataclass
class PmSession:
    """Sampling of one device. `records` are the raw samples in the hardware buffer."""

    device: int
    metrics: list[str] | None = None
    interval_ns: int = 0
    buffer_bytes: int = 0
    slots: int = 0  # of an image
    is_spent: bool = False  # configured a second time: no sample comes any more, as with CUPTI 13.0
    is_started: bool = False
    is_first: bool = True
    reached_ns: int = 0  # the end of the last sample
    records: deque[Sample] = field(default_factory=deque)
    has_overflowed: bool = False


@dataclass
class PmImage:
    slots: int
    metrics: list[str]
    samples: list[Sample] = field(default_factory=list)


class PmSampling:
    """The part of `FakeCupti` that samples. What tests set:

    `clock_ns` is the GPU's clock. `script` maps a metric to a number or a function of start and end.
    `silent` metrics never complete, so that a set with one gives no samples. `empty_slots` come after
    each start, `first_start` is the start time of the first sample then. `overflow_as` says how an
    overflow is told: "code" or "flag". `busy` devices are sampled by another process. `unavailable`
    metrics stand in the counter availability. `incomplete` slots are populated but not completed.
    """

    unsupported: set[str]
    passes: Callable[[list[str]], int]

    def _init_pm(self) -> None:
        self.clock_ns: Callable[[], int] = time.time_ns
        self.script: dict[str, float | Callable[[int, int], float]] = {}
        self.silent: set[str] = set()
        self.empty_slots = 1
        self.first_start: Callable[[int], int] = lambda now: 4242
        self.overflow_as = "code"
        self.busy: set[int] = set()
        self.unavailable: set[str] = set()
        self.incomplete = 0
        self.is_privileged = True
        self.is_cuda_initialized = True
        self.is_profiler_initialized = False
        self.pm_sessions: dict[int, PmSession] = {}
        self.pm_configs: list[tuple[int, list[str]]] = []  # device and metrics of each SetConfig
        self.pm_lost = 0  # samples that did not fit the hardware buffer
        self._pm_images: dict[int, PmImage] = {}

    # -- what the rest of the fake asks -----------------------------------------------------------

    def _initialize_profiler(self) -> None:
        if not self.is_cuda_initialized:
            raise CuptiCode(NOT_INITIALIZED)
        self.is_profiler_initialized = True

    def _evaluate_sample(self, content: Any, index: int, metrics: list[str]) -> list[float]:
        """Values of a sample of an image; NaN for what was not counted."""
        image = self._pm_image(content)
        if index >= len(image.samples):
            raise CuptiCode(INVALID_PARAMETER)
        sample = image.samples[index]
        return [self._pm_value(metric, *sample) if metric in image.metrics else math.nan for metric in metrics]

    def _pm_value(self, metric: str, start_ns: int, end_ns: int) -> float:
        told = self.script.get(metric)
        if told is None:
            return sampled_value(metric, start_ns, end_ns)
        return told(start_ns, end_ns) if callable(told) else told

    # -- the GPU ----------------------------------------------------------------------------------

    def _collect(self, session: PmSession) -> None:
        """Put every sample that has ended by now into the hardware buffer; what does not fit is lost."""
        assert session.metrics is not None
        now = self.clock_ns()
        if not session.is_started or session.is_spent or self.silent & set(session.metrics):
            return
        while session.reached_ns + session.interval_ns <= now:
            start, session.reached_ns = session.reached_ns, session.reached_ns + session.interval_ns
            if session.is_first:
                start, session.is_first = self.first_start(start), False
            self._record(session, (start, session.reached_ns))

    def _record(self, session: PmSession, sample: Sample) -> None:
        if (len(session.records) + 1) * RECORD_BYTES > session.buffer_bytes:
            session.has_overflowed = True
            self.pm_lost += 1
            return
        session.records.append(sample)

    # -- sessions ---------------------------------------------------------------------------------

    def pm_session_of(self, device: int) -> PmSession | None:
        return next((session for session in self.pm_sessions.values() if session.device == device), None)

    def _need_profiler(self) -> None:
        if not self.is_profiler_initialized:
            raise CuptiCode(UNKNOWN)

    def _pm_session(self, params: Any, *, is_configured: bool = False) -> PmSession:
        self._need_profiler()
        session = self.pm_sessions.get(params.object)
        if session is None or (is_configured and session.metrics is None):
            raise CuptiCode(INVALID_OPERATION)
        return session

    def _cuptiPmSamplingEnable(self, params: Any) -> None:
        self._need_profiler()
        if not self.is_privileged:
            raise CuptiCode(INSUFFICIENT_PRIVILEGES)
        if params.device in self.busy:
            raise CuptiCode(HARDWARE_BUSY)
        if self.pm_session_of(params.device) is not None:
            raise CuptiCode(INVALID_OPERATION)
        params.object = self._new_handle()  # type: ignore[attr-defined]
        self.pm_sessions[params.object] = PmSession(params.device)

    def _cuptiPmSamplingDisable(self, params: Any) -> None:
        self._pm_session(params)
        del self.pm_sessions[params.object]

    def _cuptiPmSamplingGetCounterAvailability(self, params: Any) -> None:
        self._need_profiler()
        if not self.is_privileged:
            raise CuptiCode(INSUFFICIENT_PRIVILEGES)
        if self.pm_session_of(params.device) is not None:
            raise CuptiCode(INVALID_OPERATION)
        content = {"unavailable": sorted(self.unavailable)}
        if params.image:
            fill(params.image, params.size, content)
        params.size = len(pack(content))

    def _cuptiPmSamplingSetConfig(self, params: Any) -> None:
        session = self._pm_session(params)
        if session.is_started:
            raise CuptiCode(INVALID_OPERATION)
        content = unpack(params.config, params.configSize)
        if not isinstance(content, dict) or not params.interval or not params.bufferBytes:
            raise CuptiCode(INVALID_PARAMETER)
        if params.trigger not in (SYSCLK, TIME_INTERVAL) or params.append not in (0, 1):
            raise CuptiCode(INVALID_PARAMETER)
        if params.trigger != TIME_INTERVAL or params.append != KEEP_OLDEST:
            raise CuptiCode(NOT_SUPPORTED)  # by this fake
        metrics = content["sampled"]
        if self.passes(metrics) != 1:
            raise CuptiCode(NOT_SUPPORTED)
        session.is_spent = session.metrics is not None
        session.metrics, session.interval_ns, session.buffer_bytes = metrics, params.interval, params.bufferBytes
        session.records.clear()
        session.has_overflowed = False
        self.pm_configs.append((session.device, metrics))

    def _cuptiPmSamplingStart(self, params: Any) -> None:
        session = self._pm_session(params, is_configured=True)
        if session.is_started:
            raise CuptiCode(INVALID_OPERATION)
        now = session.reached_ns = self.clock_ns()
        session.is_started = session.is_first = True
        if not session.is_spent and not self.silent.intersection(session.metrics or ()):
            for _ in range(self.empty_slots):
                self._record(session, (now, now))

    def _cuptiPmSamplingStop(self, params: Any) -> None:
        session = self._pm_session(params, is_configured=True)
        if not session.is_started:
            raise CuptiCode(INVALID_OPERATION)
        self._collect(session)
        session.is_started = False

    # -- images -----------------------------------------------------------------------------------

    def _pm_image(self, content: Any) -> PmImage:
        if not isinstance(content, dict) or content.get("samples") not in self._pm_images:
            raise CuptiCode(INVALID_PARAMETER)
        return self._pm_images[content["samples"]]

    def _cuptiPmSamplingGetCounterDataSize(self, params: Any) -> None:
        session = self._pm_session(params, is_configured=True)
        names = self._metric_names(params)  # type: ignore[attr-defined]
        if not params.maxSamples or names != session.metrics:
            raise CuptiCode(INVALID_PARAMETER)
        session.slots = params.maxSamples
        params.size = SLOT_BYTES * (params.maxSamples + 1)

    def _cuptiPmSamplingCounterDataImageInitialize(self, params: Any) -> None:
        session = self._pm_session(params, is_configured=True)
        if not session.slots or params.size < SLOT_BYTES * (session.slots + 1):
            raise CuptiCode(PARAMETER_SIZE_NOT_SUFFICIENT)
        token = len(self._pm_images)
        fill(params.image, params.size, {"samples": token})
        self._pm_images[token] = PmImage(session.slots, list(session.metrics or []))

    def _cuptiPmSamplingDecodeData(self, params: Any) -> None:
        session = self._pm_session(params, is_configured=True)
        image = self._pm_image(unpack(params.image, params.size))
        self._collect(session)
        params.overflow = 0
        if session.has_overflowed:
            session.has_overflowed = False
            if self.overflow_as == "code":
                raise CuptiCode(OUT_OF_MEMORY)
            params.overflow = 1
        while session.records and len(image.samples) < image.slots:
            image.samples.append(session.records.popleft())
        params.reason = FULL if len(image.samples) == image.slots else END_OF_RECORDS

    def _cuptiPmSamplingGetCounterDataInfo(self, params: Any) -> None:
        self._need_profiler()
        image = self._pm_image(unpack(params.image, params.size))
        params.total = image.slots
        params.completed = len(image.samples)
        params.populated = min(image.slots, len(image.samples) + self.incomplete)

    def _cuptiPmSamplingCounterDataGetSampleInfo(self, params: Any) -> None:
        self._pm_session(params)
        image = self._pm_image(unpack(params.image, params.size))
        if params.index >= len(image.samples):
            raise CuptiCode(INVALID_PARAMETER)
        params.start, params.end = image.samples[params.index]
