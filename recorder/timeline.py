"""The timeline layer: every kernel, copy and memory set, from CUPTI activity records.

CUPTI fills buffers and hands them back; decoding happens later, on the recorder's thread. The
buffers are bounded: when the recorder cannot keep up, CUPTI gets none, drops records and counts
them, and the job never waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanalyze.recorder import activity
from nanalyze.recorder import cupti as cu
from nanalyze.recorder.buffers import exchange_for
from nanalyze.recorder.launches import ClassTable, class_columns, copy_columns, kernel_columns
from nanalyze.recorder.writer import Writer
from nanalyze.rundir.errors import RecorderError

FLUSH_PERIOD_MS = 1000
LAUNCH_TIMES_KEPT = 65_536

KINDS = (cu.KIND_CONCURRENT_KERNEL, cu.KIND_MEMCPY, cu.KIND_MEMSET, cu.KIND_MEMCPY2)


@dataclass(frozen=True)
class Watched:
    """What the timeline saw of one launch (of one of its nodes, for a graph)."""

    kernel_class_id: int
    graph_id: int | None


class LaunchTimes(OrderedDict[int, int]):
    """When calls were made (ns), by correlation id; forgets the oldest beyond LAUNCH_TIMES_KEPT."""

    def note(self, correlation: int, time_ns: int) -> None:
        self[correlation] = time_ns
        if len(self) > LAUNCH_TIMES_KEPT:
            self.popitem(last=False)


class Timeline:
    """Owns the buffers and CUPTI's activity state of this process. One at a time."""

    def __init__(
        self,
        cupti: cu.Cupti,
        writer: Writer,
        wake: threading.Event,
        *,
        pinned: bool = True,
        launch_times: bool = True,
    ) -> None:
        self.cupti = cupti
        self.classes = ClassTable()
        self.launch_times = LaunchTimes()
        self.watching: set[int] = set()  # correlation ids the exact layer wants to know about
        self.watched: dict[int, Watched] = {}  # what was found about them
        self.devices_seen: set[int] = set()
        self.trouble: list[str] = []  # what could not be done, for the session to say
        self.records = 0
        self.dropped = 0
        self.odd = 0
        self._pinned = pinned
        self._wants_launch_times = launch_times
        self._writer = writer
        self._decoder = activity.Decoder(activity.record_sizes(cupti.version), cupti)
        self._exchange = exchange_for(cupti)
        self._exchange.on_full = wake.set
        self._refused_before = self._exchange.refused

    def start(self) -> None:
        """Ask CUPTI for records from now on; raises CuptiError, with nothing left on, when it refuses."""
        self._exchange.give_back(self._exchange.take())  # what an earlier recording left is not this one's
        self._exchange.register(self.cupti)
        if self._pinned:
            self._use_pinned_memory()
        if self._wants_launch_times:
            self._start_launch_times()
        try:
            for kind in KINDS:
                self.cupti.cuptiActivityEnable(kind)
            # CUPTI's own worker flushes: a quiet job's records come out, and no thread of ours can
            # be held up inside CUPTI by a job that launches from many threads.
            self.cupti.cuptiActivityFlushPeriod(FLUSH_PERIOD_MS)
        except RecorderError:
            self._disable()
            raise
        if self._wants_launch_times:
            self._start_graph_times()

    def _start_launch_times(self) -> None:
        try:
            self.cupti.cuptiActivityEnableLatencyTimestamps(1)
        except cu.CuptiError as error:
            self.trouble.append(f"launch times are missing, so no range gets its kernels: {error}")

    def _use_pinned_memory(self) -> None:
        """Let the GPU write its timestamps to host memory, where CUPTI's worker reads them directly.

        By default they lie in device memory and the worker copies them out through the driver,
        under locks that launching threads take too: on an H200 (driver 580.159, CUPTI 13.0) a
        GPT-2 step deadlocked within seconds, the worker in a copy, the job in cuLaunchKernel.
        """
        pinned = ctypes.c_uint8(1)
        size = ctypes.c_size_t(1)
        with contextlib.suppress(RecorderError):  # not offered under confidential computing
            self.cupti.cuptiActivitySetAttribute(cu.ATTR_HOST_PINNED, ctypes.byref(size), ctypes.byref(pinned))

    def _start_graph_times(self) -> None:
        """Record the graph-launch call alone, for its time: graph nodes carry a stale one (CUPTI 12.8 on).

        Attached after CUDA was initialised, CUPTI reports single driver calls not at all, and
        single runtime calls only if the whole kind was enabled and all others were taken away.
        """
        with contextlib.suppress(RecorderError):
            for cbid in cu.CBID_GRAPH_LAUNCHES:
                self.cupti.cuptiActivityEnableDriverApi(cbid, 1)
        try:
            self.cupti.cuptiActivityEnable(cu.KIND_RUNTIME)
            self.cupti.cuptiActivityEnableRuntimeApi(cu.CBID_RUNTIME_LAUNCH_KERNEL, 0)  # must work, or leave it
            for cbid in range(1, cu.CBID_RUNTIME_BOUND):
                if cbid not in cu.CBID_RUNTIME_GRAPH_LAUNCHES:
                    with contextlib.suppress(cu.CuptiError):  # ids that this version does not know
                        self.cupti.cuptiActivityEnableRuntimeApi(cbid, 0)
        except RecorderError:
            with contextlib.suppress(cu.CuptiError):
                self.cupti.cuptiActivityDisable(cu.KIND_RUNTIME)

    def stop(self) -> None:
        """Stop the records and take in what is complete."""
        self._disable()
        self.flush(forced=True)
        self.drain()

    def _disable(self) -> None:
        """Turn everything off but the latency timestamps: CUPTI asks not to change those in mid-process."""
        calls: list[tuple[str, tuple[int, ...]]] = [("cuptiActivityFlushPeriod", (0,))]
        calls += [("cuptiActivityDisable", (kind,)) for kind in (*KINDS, cu.KIND_RUNTIME)]
        calls += [("cuptiActivityEnableDriverApi", (cbid, 0)) for cbid in cu.CBID_GRAPH_LAUNCHES]
        for function, arguments in calls:
            with contextlib.suppress(RecorderError):
                getattr(self.cupti, function)(*arguments)

    @property
    def started_any(self) -> bool:
        """Whether CUPTI ever asked for a buffer in this process, that is, CUDA did something."""
        return self._exchange.lent_any

    @property
    def refused_buffers(self) -> int:
        """How often CUPTI asked for a buffer and got none."""
        return self._exchange.refused - self._refused_before

    @property
    def lost_bytes(self) -> int:
        """Bytes of buffers that could not be decoded."""
        return self._decoder.lost_bytes

    def flush(self, forced: bool = False) -> None:
        """Make CUPTI hand over the buffers it has filled (all of them if `forced`)."""
        try:
            self.cupti.cuptiActivityFlushAll(int(forced))
        except cu.CuptiError as error:
            self.trouble.append(f"the last launches may be missing: {error}")

    # -- on the recorder's thread -------------------------------------------------------------

    def drain(self) -> None:
        """Decode every completed buffer into the writer."""
        full = self._exchange.take()
        decoded = [self._decoder.decode(memory[:valid]) for memory, valid in full]
        for buffer in decoded:  # first, as a graph's launch time may come in a later buffer than its nodes
            for kind in (cu.KIND_DRIVER, cu.KIND_RUNTIME):
                self._note_calls(buffer.records.pop(kind, None))
        for buffer in decoded:
            self._take(buffer)
        self._exchange.give_back(full)
        self._count_dropped()

    def _note_calls(self, calls: activity.Records | None) -> None:
        if calls is not None:
            for correlation, time_ns in zip(calls["correlation"].tolist(), calls["start"].tolist(), strict=True):
                self.launch_times.note(correlation, time_ns)

    def _take(self, decoded: activity.Decoded) -> None:
        for kind, records in decoded.records.items():
            if kind == cu.KIND_CONCURRENT_KERNEL:
                self._take_kernels(records)
            else:
                columns, odd = copy_columns(records, kind)
                self._writer.add("copies", columns)
                self.odd += odd
            self.records += len(records)

    def _take_kernels(self, records: activity.Records) -> None:
        columns, odd = kernel_columns(records, self.classes, self.launch_times)
        self.odd += odd
        new = self.classes.take_new()
        if new:
            self._writer.add("kernel_classes", class_columns(new))
        self._writer.add("kernels", columns)
        self.devices_seen.update(np.unique(columns["device_id"]).tolist())
        if self.watching:
            self._note_watched(columns)

    def _note_watched(self, columns: dict[str, Any]) -> None:
        correlations = columns["correlation_id"]
        for place in np.flatnonzero(np.isin(correlations, np.fromiter(self.watching, dtype=np.int64))):
            graph = columns["graph_id"][place]
            self.watched[int(correlations[place])] = Watched(
                kernel_class_id=int(columns["kernel_class_id"][place]),
                graph_id=None if graph is np.ma.masked else int(graph),
            )

    def _count_dropped(self) -> None:
        count = ctypes.c_size_t()
        try:
            self.cupti.cuptiActivityGetNumDroppedRecords(None, 0, ctypes.byref(count))
        except cu.CuptiError:
            return
        if count.value and not self.dropped:
            self._writer.event("timeline", "loss", "CUPTI has begun to drop records: the recorder cannot keep up")
        self.dropped += count.value
