"""When launches were called, on the host: what puts a kernel into a range.

Wanted only where there are ranges, so nothing is asked of CUPTI before the first one opens. Then
there are two ways:

- A callback at the driver's launch functions, in C (`_callbacks.c`): a clock reading a call, on the
  CPU alone, graphs included. It takes CUPTI's one subscription.
- CUPTI's latency timestamps, where that is not to be had (another client or exact counters hold the
  subscription, or nothing was compiled). They cost the GPU: 25.8 to 26.9 ms a GPT-2 step on an H200,
  and can be turned off by nobody. For graphs, whose nodes repeat an earlier launch's time, the
  graph-launch calls are recorded as well, which costs a job 1 to 2 us a launch.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nanalyze.recorder import buffers
from nanalyze.recorder import cupti as cu
from nanalyze.rundir.errors import RecorderError

NOTED_KEPT = 65_536
CALLS_KEPT = 2_000_000  # 32 MB at most, reached at 500,000 launches a second after 4 s
# Calls that are looked through together. A slow job's come 25 at a time: after 6 hours there were 80,000 such
# batches, and to look at each of them took 19 ms, four times a second.
CALLS_TOGETHER = 8_192

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Calls:
    """Launch calls in the order of their correlation ids."""

    correlation: Ints
    time_ns: Ints


class LaunchTimes:
    """When calls were made (ns), by correlation id; forgets the oldest."""

    def __init__(self) -> None:
        self._noted: OrderedDict[int, int] = OrderedDict()
        self._calls: deque[_Calls] = deque()
        self._count = 0

    def note(self, correlation: int, time_ns: int) -> None:
        """One call."""
        self._noted[correlation] = time_ns
        if len(self._noted) > NOTED_KEPT:
            self._noted.popitem(last=False)

    def add(self, correlation: Ints, time_ns: Ints) -> None:
        """Many calls; threads may have entered theirs in a slightly different order than they were numbered."""
        if not len(correlation):
            return
        self._count += len(correlation)
        if self._calls and len(self._calls[-1].correlation) + len(correlation) <= CALLS_TOGETHER:
            last = self._calls.pop()
            correlation = np.concatenate((last.correlation, correlation))
            time_ns = np.concatenate((last.time_ns, time_ns))
        order = np.argsort(correlation, kind="stable")
        self._calls.append(_Calls(correlation[order], time_ns[order]))
        while self._count > CALLS_KEPT and len(self._calls) > 1:
            self._count -= len(self._calls.popleft().correlation)

    def of(self, correlation: Ints) -> Ints:
        """Times of calls, 0 where unknown. Shape (n,) in and out; ids may repeat (nodes of a graph)."""
        times = np.zeros(len(correlation), dtype=np.int64)
        if not len(correlation):
            return times
        low, high = correlation.min(), correlation.max()
        for calls in reversed(self._calls):  # the newest first: ids wrap after four thousand million calls
            if calls.correlation[0] <= high and calls.correlation[-1] >= low:
                # The last of equal ids is the newest.
                place = np.searchsorted(calls.correlation, correlation, side="right").clip(min=1) - 1
                found = (calls.correlation[place] == correlation) & (times == 0)
                times[found] = calls.time_ns[place[found]]
        if self._noted:
            missing = np.flatnonzero(times == 0)
            ids, members = np.unique(correlation[missing], return_inverse=True)
            times[missing] = np.array([self._noted.get(call, 0) for call in ids.tolist()], dtype=np.int64)[members]
        return times


class LaunchClock:
    """Makes CUPTI tell when launches are called, once `need` says that somebody wants to know.

    The timeline's: it serialises the calls. `trouble` takes a line about what could not be done.
    """

    def __init__(self, cupti: cu.Cupti, trouble: list[str]) -> None:
        self.times = LaunchTimes()
        self.is_needed = False
        self.lost = 0  # calls whose time came too late for the ring of the callback
        self._cupti = cupti
        self._trouble = trouble
        self._native: Any = buffers.native
        self._callback: Any = None  # as long as the subscription lives, so must this
        self._subscriber: ctypes.c_void_p | None = None
        self._has_latency = False
        self._has_graphs = False
        self._follows_graphs = False
        self._awaits_nvtx = False

    @property
    def is_subscribed(self) -> bool:
        """Whether CUPTI's one subscription is this clock's."""
        return self._subscriber is not None

    def need(self) -> None:
        """From now on."""
        self._adopt()
        if not self.is_needed:
            self.is_needed = True
            self.start()

    def await_nvtx(self) -> None:
        """From the job's first NVTX call on; before its range opens where the callback is to be had."""
        self._awaits_nvtx = True
        self._arm()

    def start(self) -> None:
        """Begin, or begin again after `stop`, if it is needed; never raises."""
        if not self.is_needed:
            self._arm()
            return
        if self._subscriber is not None or self._subscribe():
            return
        if not self._has_latency:
            self._has_latency = True
            try:
                self._cupti.cuptiActivityEnableLatencyTimestamps(1)
            except RecorderError as error:
                self._trouble.append(f"launch times are missing, so no range gets its kernels: {error}")
        if self._has_graphs:
            self._follow_graphs()

    def stop(self) -> None:
        """End all but the latency timestamps, which CUPTI asks not to change in mid-process; never raises."""
        self._adopt()
        subscriber, self._subscriber = self._subscriber, None
        with contextlib.suppress(RecorderError):
            if subscriber is not None:
                self._cupti.cuptiUnsubscribe(subscriber)
        if self._follows_graphs:
            self._follows_graphs = False
            with contextlib.suppress(RecorderError):
                self._cupti.cuptiActivityDisable(cu.KIND_RUNTIME)
            for cbid in cu.CBID_GRAPH_LAUNCHES:
                with contextlib.suppress(RecorderError):
                    self._cupti.cuptiActivityEnableDriverApi(cbid, 0)

    def meet_graphs(self) -> None:
        """The job launches graphs; may be told again and again."""
        if not self._has_graphs:
            self._has_graphs = True
            if self.is_needed and self._subscriber is None:
                self._follow_graphs()

    def drain(self) -> None:
        """Take in what the callback has noted since the last call."""
        if self._awaits_nvtx and not self.is_needed and self._native is not None and self._native.nvtx_state()[1]:
            self._adopt()
        if self._native is None or not self.is_needed:
            return
        pairs, lost = self._native.take_launches()
        self.lost += lost
        calls = np.frombuffer(pairs, dtype=np.int64).reshape(-1, 2)
        self.times.add(calls[:, 1], calls[:, 0])

    def _arm(self) -> None:
        if not self._awaits_nvtx or self._native is None or self.is_needed:
            return
        ids = np.array((*cu.CBID_KERNEL_LAUNCHES, *cu.CBID_GRAPH_LAUNCHES), dtype=np.uint32)
        self._native.take_launches()  # what an earlier recording left
        with contextlib.suppress(RecorderError):
            functions = (cu.address_of(self._cupti, name) for name in ("cuptiSubscribe", "cuptiEnableCallback"))
            self._native.arm(*functions, ids.tobytes())

    def _adopt(self) -> None:
        """Take over the subscription that the first NVTX call has made, if it has."""
        if not self._awaits_nvtx or self._native is None:
            return
        subscriber = self._native.disarm()
        if subscriber:
            self._subscriber = ctypes.c_void_p(subscriber)
            self._callback = cu.ApiCallback(self._native.launch_callback())
            self.is_needed = True

    def _subscribe(self) -> bool:
        if self._native is None:
            return False
        if self._callback is None:
            self._callback = cu.ApiCallback(self._native.launch_callback())
            self._native.take_launches()  # what an earlier recording left
        subscriber = ctypes.c_void_p()
        try:
            self._cupti.cuptiSubscribe(ctypes.byref(subscriber), self._callback, None)
        except RecorderError:  # somebody has it; the latency timestamps need none
            return False
        for cbid in (*cu.CBID_KERNEL_LAUNCHES, *cu.CBID_GRAPH_LAUNCHES):
            with contextlib.suppress(RecorderError):  # ids that this version does not know
                self._cupti.cuptiEnableCallback(1, subscriber, cu.CB_DOMAIN_DRIVER_API, cbid)
        self._subscriber = subscriber
        return True

    def _follow_graphs(self) -> None:
        """Record the graph-launch call alone, for its time.

        Attached after CUDA was initialised, CUPTI reports single driver calls not at all, and
        single runtime calls only if the whole kind was enabled and all others were taken away.
        """
        self._follows_graphs = True
        for cbid in cu.CBID_GRAPH_LAUNCHES:
            with contextlib.suppress(RecorderError):
                self._cupti.cuptiActivityEnableDriverApi(cbid, 1)
        try:
            self._cupti.cuptiActivityEnable(cu.KIND_RUNTIME)
            self._cupti.cuptiActivityEnableRuntimeApi(cu.CBID_RUNTIME_LAUNCH_KERNEL, 0)  # must work, or leave it
            for cbid in range(1, cu.CBID_RUNTIME_BOUND):
                if cbid not in cu.CBID_RUNTIME_GRAPH_LAUNCHES:
                    with contextlib.suppress(cu.CuptiError):  # ids that this version does not know
                        self._cupti.cuptiActivityEnableRuntimeApi(cbid, 0)
        except RecorderError:
            with contextlib.suppress(cu.CuptiError):
                self._cupti.cuptiActivityDisable(cu.KIND_RUNTIME)
