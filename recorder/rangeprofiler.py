"""CUPTI's range profiler: exact counters of chosen launches, in process.

A session belongs to one context and one set of metrics. In *kernel* mode every launch between
`start` and `stop` is one range, replayed by CUPTI as often as the set needs passes, with memory
saved and restored around each pass. In *user* mode a range is whatever runs between `push` and
`pop`; CUPTI replays nothing, so a set of several passes needs the caller to run the same work
again. The structures follow `cupti_range_profiler.h` and `cupti_profiler_host.h` (12.6 to 13.5).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_int, c_size_t, c_uint8, c_uint16, c_uint32, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt

from nanalyze.recorder.cupti import Cupti, CuptiError

Image = ctypes.Array[c_uint8]

AUTO_RANGE, USER_RANGE = 1, 2
KERNEL_REPLAY, USER_REPLAY = 2, 3
_RANGE_PROFILER = 0  # CUPTI_PROFILER_TYPE_RANGE_PROFILER


def params_struct(name: str, *fields: tuple[str, Any]) -> Any:
    """A CUPTI parameter struct; its `structSize` ends at the last field, without tail padding."""
    all_fields = [("structSize", c_size_t), ("pPriv", c_void_p), *fields]
    struct: Any = type(name, (ctypes.Structure,), {"_fields_": all_fields})
    last = getattr(struct, all_fields[-1][0])
    struct.size = last.offset + last.size
    return struct


_Plain = params_struct("Plain")
_ChipName = params_struct("ChipName", ("deviceIndex", c_size_t), ("pChipName", c_char_p))
_Availability = params_struct("Availability", ("ctx", c_void_p), ("imageSize", c_size_t), ("pImage", c_void_p))
_HostInitialize = params_struct(
    "HostInitialize",
    ("profilerType", c_int),
    ("pChipName", c_char_p),
    ("pCounterAvailabilityImage", c_void_p),
    ("pHostObject", c_void_p),
)
_HostObject = params_struct("HostObject", ("pHostObject", c_void_p))
_AddMetrics = params_struct(
    "AddMetrics", ("pHostObject", c_void_p), ("ppMetricNames", c_void_p), ("numMetrics", c_size_t)
)
_ConfigSize = params_struct("ConfigSize", ("pHostObject", c_void_p), ("configImageSize", c_size_t))
_ConfigImage = params_struct(
    "ConfigImage", ("pHostObject", c_void_p), ("configImageSize", c_size_t), ("pConfigImage", c_void_p)
)
_Passes = params_struct("Passes", ("configImageSize", c_size_t), ("pConfigImage", c_void_p), ("numOfPasses", c_size_t))
_Evaluate = params_struct(
    "Evaluate",
    ("pHostObject", c_void_p),
    ("pCounterDataImage", c_void_p),
    ("counterDataImageSize", c_size_t),
    ("rangeIndex", c_size_t),
    ("ppMetricNames", c_void_p),
    ("numMetrics", c_size_t),
    ("pMetricValues", c_void_p),
)
_Enable = params_struct("Enable", ("ctx", c_void_p), ("pRangeProfilerObject", c_void_p))
_Session = params_struct("Session", ("pRangeProfilerObject", c_void_p))
_CounterDataSize = params_struct(
    "CounterDataSize",
    ("pRangeProfilerObject", c_void_p),
    ("pMetricNames", c_void_p),
    ("numMetrics", c_size_t),
    ("maxNumOfRanges", c_size_t),
    ("maxNumRangeTreeNodes", c_uint32),
    ("counterDataSize", c_size_t),
)
_CounterData = params_struct(
    "CounterData", ("pRangeProfilerObject", c_void_p), ("counterDataSize", c_size_t), ("pCounterData", c_void_p)
)
_CounterDataInfo = params_struct(
    "CounterDataInfo",
    ("pCounterDataImage", c_void_p),
    ("counterDataImageSize", c_size_t),
    ("numTotalRanges", c_size_t),
)
_SetConfig = params_struct(
    "SetConfig",
    ("pRangeProfilerObject", c_void_p),
    ("configSize", c_size_t),
    ("pConfig", c_void_p),
    ("counterDataImageSize", c_size_t),
    ("pCounterDataImage", c_void_p),
    ("range", c_int),
    ("replayMode", c_int),
    ("maxRangesPerPass", c_size_t),
    ("numNestingLevels", c_uint16),
    ("minNestingLevel", c_uint16),
    ("passIndex", c_size_t),
    ("targetNestingLevel", c_uint16),
)
_Stop = params_struct(
    "Stop",
    ("pRangeProfilerObject", c_void_p),
    ("passIndex", c_size_t),
    ("targetNestingLevel", c_size_t),
    ("isAllPassSubmitted", c_uint8),
)
_PushRange = params_struct("PushRange", ("pRangeProfilerObject", c_void_p), ("pRangeName", c_char_p))
_Decode = params_struct("Decode", ("pRangeProfilerObject", c_void_p), ("numOfRangeDropped", c_size_t))


def call(cupti: Cupti, function: str, struct: Any, **values: Any) -> Any:
    """Call a CUPTI function that takes one parameter struct; the struct, with its outputs."""
    params = struct(structSize=struct.size, pPriv=None, **values)
    getattr(cupti, function)(ctypes.byref(params))
    return params


def names_array(metrics: Sequence[str]) -> ctypes.Array[c_char_p]:
    """Metric names as an array of C strings; keep it alive during the call."""
    return (c_char_p * len(metrics))(*(metric.encode() for metric in metrics))


def initialize(cupti: Cupti) -> None:
    """Before anything below; harmless when repeated."""
    call(cupti, "cuptiProfilerInitialize", _Plain)


def chip_name(cupti: Cupti, device: int) -> str:
    """The chip of CUDA device `device`, such as GH100."""
    return str(call(cupti, "cuptiDeviceGetChipName", _ChipName, deviceIndex=device).pChipName.decode())


def is_unknown_metric(error: CuptiError) -> bool:
    """Whether `error` only says that the chip has no such metric (CUPTI 13.0 answers INVALID_PARAMETER)."""
    return error.function == "cuptiProfilerHostConfigAddMetrics" and error.code in (1, 17)


class MetricHost:
    """The host side for one chip: which metrics exist, how many passes a set takes, values from images."""

    def __init__(
        self, cupti: Cupti, chip: str, context: int | None = None, profiler_type: int = _RANGE_PROFILER
    ) -> None:
        self.cupti = cupti
        self._chip = chip.encode()
        self._type = profiler_type
        self._availability = self._counter_availability(context)
        self._evaluator = self._open()

    def _counter_availability(self, context: int | None) -> Image | None:
        """Which counters this context may use; needed for chips newer than the library."""
        if context is None:
            return None
        size = call(self.cupti, "cuptiProfilerGetCounterAvailability", _Availability, ctx=context).imageSize
        image: Image = (c_uint8 * size)()
        call(
            self.cupti,
            "cuptiProfilerGetCounterAvailability",
            _Availability,
            ctx=context,
            imageSize=size,
            pImage=ctypes.addressof(image),
        )
        return image

    def _open(self) -> int:
        image = ctypes.addressof(self._availability) if self._availability is not None else None
        params = call(
            self.cupti,
            "cuptiProfilerHostInitialize",
            _HostInitialize,
            profilerType=self._type,
            pChipName=self._chip,
            pCounterAvailabilityImage=image,
        )
        return int(params.pHostObject)

    def _close(self, host: int) -> None:
        call(self.cupti, "cuptiProfilerHostDeinitialize", _HostObject, pHostObject=host)

    def close(self) -> None:
        self._close(self._evaluator)

    def config(self, metrics: Sequence[str]) -> Image:
        """The configuration image that schedules `metrics`; raises CuptiError for an unknown one."""
        host = self._open()  # a host object collects metrics for good, so each set has its own
        try:
            names = names_array(metrics)
            call(
                self.cupti,
                "cuptiProfilerHostConfigAddMetrics",
                _AddMetrics,
                pHostObject=host,
                ppMetricNames=ctypes.addressof(names),
                numMetrics=len(metrics),
            )
            size = call(
                self.cupti, "cuptiProfilerHostGetConfigImageSize", _ConfigSize, pHostObject=host
            ).configImageSize
            image: Image = (c_uint8 * size)()
            call(
                self.cupti,
                "cuptiProfilerHostGetConfigImage",
                _ConfigImage,
                pHostObject=host,
                configImageSize=size,
                pConfigImage=ctypes.addressof(image),
            )
            return image
        finally:
            self._close(host)

    def passes(self, config: Image) -> int:
        params = call(
            self.cupti,
            "cuptiProfilerHostGetNumOfPasses",
            _Passes,
            configImageSize=len(config),
            pConfigImage=ctypes.addressof(config),
        )
        return int(params.numOfPasses)

    def supported(self, metrics: Sequence[str]) -> list[str]:
        """Those of `metrics` this chip can measure, in order."""
        return [metric for metric in metrics if self._is_supported(metric)]

    def _is_supported(self, metric: str) -> bool:
        try:
            self.config([metric])
        except CuptiError as error:
            if is_unknown_metric(error):
                return False
            raise
        return True

    def evaluate(self, image: Image, index: int, metrics: Sequence[str]) -> list[float | None]:
        """Values of `metrics` in range `index` of a counter-data image; None where not finite."""
        values = np.full(len(metrics), np.nan)
        self.evaluator(image, metrics)(index, values)
        return [value if math.isfinite(value) else None for value in values.tolist()]

    def evaluator(self, image: Image, metrics: Sequence[str]) -> Callable[[int, npt.NDArray[np.float64]], None]:
        """A function that writes the values of `metrics` in one range (or sample) of `image` into an array.

        For many ranges in a row; `image` must stay where it is meanwhile.
        """
        names = names_array(metrics)
        params = _Evaluate(
            structSize=_Evaluate.size,
            pHostObject=self._evaluator,
            pCounterDataImage=ctypes.addressof(image),
            counterDataImageSize=len(image),
            ppMetricNames=ctypes.addressof(names),
            numMetrics=len(metrics),
        )
        function, by_reference = self.cupti.cuptiProfilerHostEvaluateToGpuValues, ctypes.byref(params)

        def evaluate(index: int, values: npt.NDArray[np.float64], keep: object = names) -> None:
            params.rangeIndex = index
            params.pMetricValues = values.ctypes.data
            function(by_reference)

        return evaluate


class RangeProfiler:
    """One session on one context for one set of metrics; see the module's text for the two modes.

    `max_ranges` bounds the launches between two `read` calls. Call `close` in every case: a
    session left enabled blocks the next one in the process.
    """

    def __init__(
        self,
        cupti: Cupti,
        host: MetricHost,
        context: int,
        metrics: Sequence[str],
        *,
        user: bool = False,
        max_ranges: int = 1,
    ) -> None:
        self.cupti = cupti
        self.host = host
        self.metrics = list(metrics)
        self.user = user
        self.max_ranges = max_ranges
        self._config = host.config(self.metrics)
        self.passes = host.passes(self._config)
        self._session = int(call(cupti, "cuptiRangeProfilerEnable", _Enable, ctx=context).pRangeProfilerObject)
        try:
            self._image = self._counter_data()
            self._set_config()
        except CuptiError:
            with contextlib.suppress(CuptiError):  # the first error is the reason
                self.close()
            raise

    def _counter_data(self) -> Image:
        names = names_array(self.metrics)
        params = call(
            self.cupti,
            "cuptiRangeProfilerGetCounterDataSize",
            _CounterDataSize,
            pRangeProfilerObject=self._session,
            pMetricNames=ctypes.addressof(names),
            numMetrics=len(self.metrics),
            maxNumOfRanges=self.max_ranges,
            maxNumRangeTreeNodes=self.max_ranges,
        )
        return (c_uint8 * int(params.counterDataSize))()

    def _set_config(self) -> None:
        """(Re)initialise the counter data and hand both images over: an empty session, pass 0."""
        image = ctypes.addressof(self._image)
        call(
            self.cupti,
            "cuptiRangeProfilerCounterDataImageInitialize",
            _CounterData,
            pRangeProfilerObject=self._session,
            counterDataSize=len(self._image),
            pCounterData=image,
        )
        call(
            self.cupti,
            "cuptiRangeProfilerSetConfig",
            _SetConfig,
            pRangeProfilerObject=self._session,
            configSize=len(self._config),
            pConfig=ctypes.addressof(self._config),
            counterDataImageSize=len(self._image),
            pCounterDataImage=image,
            range=USER_RANGE if self.user else AUTO_RANGE,
            replayMode=USER_REPLAY if self.user else KERNEL_REPLAY,
            maxRangesPerPass=self.max_ranges,
            numNestingLevels=1,
            minNestingLevel=1,
            passIndex=0,
            targetNestingLevel=1,
        )

    def start(self) -> None:
        call(self.cupti, "cuptiRangeProfilerStart", _Session, pRangeProfilerObject=self._session)

    def stop(self) -> bool:
        """End the collection; in user mode, whether every pass has now been collected."""
        params = call(self.cupti, "cuptiRangeProfilerStop", _Stop, pRangeProfilerObject=self._session)
        return bool(params.isAllPassSubmitted)

    def push(self, name: str) -> None:
        call(
            self.cupti,
            "cuptiRangeProfilerPushRange",
            _PushRange,
            pRangeProfilerObject=self._session,
            pRangeName=name.encode(),
        )

    def pop(self) -> None:
        call(self.cupti, "cuptiRangeProfilerPopRange", _Session, pRangeProfilerObject=self._session)

    def read(self) -> list[list[float | None]]:
        """The values of every range since the last `read`, each in the order of `metrics`."""
        call(self.cupti, "cuptiRangeProfilerDecodeData", _Decode, pRangeProfilerObject=self._session)
        params = call(
            self.cupti,
            "cuptiRangeProfilerGetCounterDataInfo",
            _CounterDataInfo,
            pCounterDataImage=ctypes.addressof(self._image),
            counterDataImageSize=len(self._image),
        )
        values = [self.host.evaluate(self._image, index, self.metrics) for index in range(params.numTotalRanges)]
        self._set_config()
        return values

    def close(self) -> None:
        call(self.cupti, "cuptiRangeProfilerDisable", _Session, pRangeProfilerObject=self._session)
