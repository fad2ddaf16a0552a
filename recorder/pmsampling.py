"""CUPTI's PM sampling: counters of a whole device at a fixed interval, while everything runs as always.

A sampler belongs to one device; at any time one group of counters is being counted, which must fit
into a single pass. The structures follow `cupti_pmsampling.h` (CUPTI 12.6 to 13.5). Raw records pile up
in a hardware buffer of host memory until they are drained; a buffer that overflows loses samples.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nanalyze.recorder.cupti import Cupti, CuptiError
from nanalyze.recorder.rangeprofiler import Image, MetricHost, call, names_array, params_struct

PM_SAMPLING = 1  # CUPTI_PROFILER_TYPE_PM_SAMPLING
OUT_OF_MEMORY = 8  # what decoding answers when the hardware buffer has overflowed
_TIME_INTERVAL = 1  # CUPTI_PM_SAMPLING_TRIGGER_MODE_GPU_TIME_INTERVAL
_KEEP_OLDEST = 0
_IMAGE_FULL = 1  # CUPTI_PM_SAMPLING_DECODE_STOP_REASON_COUNTER_DATA_FULL

# Raw records take roughly 8 KiB a sample (measured on an H200 at 1 ms: 64 MiB overflowed, 128 did not).
BUFFER_BYTES = 256 << 20
IMAGE_SAMPLES = 256

_Enable = params_struct("PmEnable", ("deviceIndex", c_size_t), ("pPmSamplingObject", c_void_p))
_Session = params_struct("PmSession", ("pPmSamplingObject", c_void_p))
_SetConfig = params_struct(
    "PmSetConfig",
    ("pPmSamplingObject", c_void_p),
    ("configSize", c_size_t),
    ("pConfig", c_void_p),
    ("hardwareBufferSize", c_size_t),
    ("samplingInterval", c_uint64),
    ("triggerMode", c_int),
    ("hwBufferAppendMode", c_int),
)
_CounterDataSize = params_struct(
    "PmCounterDataSize",
    ("pPmSamplingObject", c_void_p),
    ("pMetricNames", c_void_p),
    ("numMetrics", c_size_t),
    ("maxSamples", c_uint32),
    ("counterDataSize", c_size_t),
)
_CounterData = params_struct(
    "PmCounterData", ("pPmSamplingObject", c_void_p), ("counterDataSize", c_size_t), ("pCounterData", c_void_p)
)
_Decode = params_struct(
    "PmDecode",
    ("pPmSamplingObject", c_void_p),
    ("pCounterDataImage", c_void_p),
    ("counterDataImageSize", c_size_t),
    ("decodeStopReason", c_int),
    ("overflow", c_uint8),
)
_Info = params_struct(
    "PmInfo",
    ("pCounterDataImage", c_void_p),
    ("counterDataImageSize", c_size_t),
    ("numTotalSamples", c_size_t),
    ("numPopulatedSamples", c_size_t),
    ("numCompletedSamples", c_size_t),
)
_SampleInfo = params_struct(
    "PmSampleInfo",
    ("pPmSamplingObject", c_void_p),
    ("pCounterDataImage", c_void_p),
    ("counterDataImageSize", c_size_t),
    ("sampleIndex", c_size_t),
    ("startTimestamp", c_uint64),
    ("endTimestamp", c_uint64),
)

_Slots = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.float64]]


@dataclass(frozen=True)
class Drained:
    """Samples in order: times (ns, realtime clock) of shape (n,), values of shape (n, metrics).

    A value is NaN where the profiler gave no finite number.
    """

    start_ns: npt.NDArray[np.int64]
    end_ns: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    overflowed: bool


class PmSampler:
    """PM sampling of one device: `configure`, `start`, `drain` as often as needed, `stop`, `drain`; again.

    Each round is a session of its own: a second configuration in the same session delivered no
    samples, and once its decoder read freed memory of the first (CUPTI 13.0 on an H200). Call `close`
    in every case: else the next session in the process is refused.
    """

    def __init__(self, cupti: Cupti, host: MetricHost, ordinal: int, *, is_opened: bool = True) -> None:
        self.cupti = cupti
        self.host = host
        self.ordinal = ordinal
        self.metrics: list[str] = []
        self._configs: dict[tuple[str, ...], Image] = {}  # also in use by CUPTI, until its session ends
        self._image: Image | None = None
        self._is_running = False
        self._is_first = True
        self._session: int | None = None
        if is_opened:  # now, so that a refusal is told at once; else by `configure`
            self._open()

    def _open(self) -> None:
        params = call(self.cupti, "cuptiPmSamplingEnable", _Enable, deviceIndex=self.ordinal)
        self._session = int(params.pPmSamplingObject)

    def configure(self, metrics: Sequence[str], interval_ns: int, buffer_bytes: int = BUFFER_BYTES) -> None:
        """Choose what is counted from the next `start` on; what was not drained before is lost."""
        self.metrics = list(metrics)
        if self._image is not None:
            self.close()
        if self._session is None:
            self._open()
        config = self._config()
        call(
            self.cupti,
            "cuptiPmSamplingSetConfig",
            _SetConfig,
            pPmSamplingObject=self._session,
            configSize=len(config),
            pConfig=ctypes.addressof(config),
            hardwareBufferSize=buffer_bytes,
            samplingInterval=interval_ns,
            triggerMode=_TIME_INTERVAL,
            hwBufferAppendMode=_KEEP_OLDEST,
        )
        self._image = self._new_image()
        self._empty_image()

    def _config(self) -> Image:
        key = tuple(self.metrics)
        if key not in self._configs:
            self._configs[key] = self.host.config(self.metrics)
        return self._configs[key]

    def _new_image(self) -> Image:
        names = names_array(self.metrics)
        size = call(
            self.cupti,
            "cuptiPmSamplingGetCounterDataSize",
            _CounterDataSize,
            pPmSamplingObject=self._session,
            pMetricNames=ctypes.addressof(names),
            numMetrics=len(self.metrics),
            maxSamples=IMAGE_SAMPLES,
        ).counterDataSize
        image: Image = (c_uint8 * size)()
        return image

    def _empty_image(self) -> None:
        assert self._image is not None
        call(
            self.cupti,
            "cuptiPmSamplingCounterDataImageInitialize",
            _CounterData,
            pPmSamplingObject=self._session,
            counterDataSize=len(self._image),
            pCounterData=ctypes.addressof(self._image),
        )

    def start(self) -> None:
        call(self.cupti, "cuptiPmSamplingStart", _Session, pPmSamplingObject=self._session)
        self._is_running = self._is_first = True

    def stop(self) -> None:
        """Stop counting; what was counted can still be drained."""
        self._is_running = False
        call(self.cupti, "cuptiPmSamplingStop", _Session, pPmSamplingObject=self._session)

    def drain(self, most_images: int | None = None) -> Drained:
        """Complete samples since the last call: all of them, or at most `most_images` times IMAGE_SAMPLES.

        Without the limit a running sampler that is faster than this method would keep it for ever.
        """
        parts: list[_Slots] = []
        overflowed, is_full = False, True
        while is_full and (most_images is None or len(parts) < most_images):
            is_full, has_overflowed = self._decode()
            overflowed |= has_overflowed
            parts.append(self._read())
            self._empty_image()
        start, end, values = (np.concatenate(column) for column in zip(*parts, strict=True))
        good = (end > start) & (start > 0) & ~self._has_strange_start(start != end)
        return Drained(start[good].astype(np.int64), end[good].astype(np.int64), values[good], overflowed)

    def _has_strange_start(self, has_length: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Marks the first slot after `start`, whose start time is any number; slots without length hold nothing."""
        strange = np.zeros(len(has_length), dtype=bool)
        if self._is_first and has_length.any():
            strange[np.argmax(has_length)] = True
            self._is_first = False
        return strange

    def _decode(self) -> tuple[bool, bool]:
        """Move raw records into the image; whether it is full, and whether records were lost."""
        assert self._image is not None
        try:
            params = call(
                self.cupti,
                "cuptiPmSamplingDecodeData",
                _Decode,
                pPmSamplingObject=self._session,
                pCounterDataImage=ctypes.addressof(self._image),
                counterDataImageSize=len(self._image),
            )
        except CuptiError as error:
            if error.code == OUT_OF_MEMORY:
                return False, True
            raise
        return params.decodeStopReason == _IMAGE_FULL, bool(params.overflow)

    def _read(self) -> _Slots:
        """Start times, end times and values of the image's samples, as they are.

        Two calls a sample, whose parameters are made once: with new ones each time Python took
        longer than CUPTI.
        """
        assert self._image is not None
        image, size = ctypes.addressof(self._image), len(self._image)
        info = call(
            self.cupti, "cuptiPmSamplingGetCounterDataInfo", _Info, pCounterDataImage=image, counterDataImageSize=size
        )
        count = int(info.numCompletedSamples)
        times = np.zeros((count, 2), dtype=np.uint64)  # a strange one need not fit int64
        values = np.full((count, len(self.metrics)), np.nan)
        sample = _SampleInfo(
            structSize=_SampleInfo.size,
            pPmSamplingObject=self._session,
            pCounterDataImage=image,
            counterDataImageSize=size,
        )
        get_times, by_reference = self.cupti.cuptiPmSamplingCounterDataGetSampleInfo, ctypes.byref(sample)
        evaluate = self.host.evaluator(self._image, self.metrics)
        for index in range(count):
            sample.sampleIndex = index
            get_times(by_reference)
            times[index] = sample.startTimestamp, sample.endTimestamp
            if sample.endTimestamp > sample.startTimestamp:
                evaluate(index, values[index])
        values[~np.isfinite(values)] = np.nan
        return times[:, 0], times[:, 1], values

    def close(self) -> None:
        """End the session; may be called again."""
        if self._is_running:
            with contextlib.suppress(CuptiError):
                self.stop()
        session, self._session = self._session, None
        if session is not None:
            call(self.cupti, "cuptiPmSamplingDisable", _Session, pPmSamplingObject=session)
        self._image = None
