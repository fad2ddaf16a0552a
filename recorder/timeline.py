"""The timeline layer: every kernel and copy, and memory sets if asked, from CUPTI activity records.

CUPTI fills buffers and hands them back; decoding happens later, on the recorder's thread. The
buffers are bounded: when the recorder cannot keep up, CUPTI gets none, drops records and counts
them, and the job never waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanalyze.recorder import activity, nvtx
from nanalyze.recorder import cupti as cu
from nanalyze.recorder.buffers import exchange_for
from nanalyze.recorder.launch_times import LaunchClock
from nanalyze.recorder.launches import ClassTable, class_columns, copy_columns, kernel_columns
from nanalyze.recorder.writer import Writer
from nanalyze.rundir.errors import RecorderError

FLUSH_PERIOD_MS = 1000
# Buffers whose records become rows together: 2 MB, which caches hold. Fewer mean more steps that let go of
# the GIL and wait for it (184,000 records a second against 284,000 beside four threads that never rest), more
# run out of the caches (1.6 against 3.2 million a second with nothing beside; 2 shared cores).
BATCH = 4

BUSY_BUFFERS = 8  # between two writes, of a job whose buffers need not be asked for

COPY_KINDS = (cu.KIND_MEMCPY, cu.KIND_MEMCPY2)
# Not asked for by default: a record of a memory set cost an H200 1.8 us of GPU time, one of a kernel 0.2 us
# (docs/measurements.md), and most sets are shorter than that.
MEMSET_KINDS = (cu.KIND_MEMSET,)


@dataclass(frozen=True)
class Watched:
    """What the timeline saw of one launch (of one of its nodes, for a graph)."""

    kernel_class_id: int
    graph_id: int | None


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
        copies: bool = True,
        memsets: bool = False,
    ) -> None:
        self.cupti = cupti
        self.classes = ClassTable()
        self.watching: set[int] = set()  # correlation ids the exact layer wants to know about
        self.watched: dict[int, Watched] = {}  # what was found about them
        self.devices_seen: set[int] = set()
        self.trouble: list[str] = []  # what could not be done, for the session to say
        self.clock = LaunchClock(cupti, self.trouble)
        self.listener: Callable[[dict[str, Any]], None] | None = None  # sees the columns of new launches
        self.buffers = 0  # that came back with something in them
        self.dropped = 0
        self.odd = 0
        self._pinned = pinned
        self._kinds = (cu.KIND_CONCURRENT_KERNEL, *COPY_KINDS * copies, *MEMSET_KINDS * memsets)
        self._buffers_at_flush = 0
        self._is_new_period = False
        self._wants_launch_times = launch_times
        self.is_aside = False  # whether CUPTI is left to another client
        self._switching = threading.RLock()
        self._on_markers: Callable[[activity.Records], None] | None = None
        self._writer = writer
        self._decoder = activity.Decoder(activity.record_sizes(cupti.version), cupti)
        self._exchange = exchange_for(cupti)
        self._exchange.on_full = wake.set
        self._refused_before = self._exchange.refused

    def start(self) -> None:
        """Ask CUPTI for records from now on; raises CuptiError, with nothing left on, when it refuses."""
        self._exchange.give_back(self._exchange.take())  # what an earlier recording left is not this one's
        self._start()

    def register(self) -> None:
        """Take CUPTI's callbacks for buffers and time, which another client may have replaced; raises CuptiError."""
        self._exchange.register(self.cupti)

    def _start(self) -> None:
        self.register()
        if self._pinned:
            self._use_pinned_memory()
        try:
            for kind in (*self._kinds, *self._marker_kinds()):
                self.cupti.cuptiActivityEnable(kind)
            # CUPTI's own worker hands full buffers over, also when the job launches nothing more.
            self.cupti.cuptiActivityFlushPeriod(FLUSH_PERIOD_MS)
        except RecorderError:
            self._disable()
            raise
        self.clock.start()

    def need_launch_times(self) -> None:
        """There are ranges: say when launches are called, from now on. Never raises; on any thread."""
        if self._wants_launch_times and not self.clock.is_needed:
            with self._switching:
                if self.is_aside:
                    self.clock.is_needed = True  # `come_back` starts it
                else:
                    self.clock.need()

    def follow_markers(self, take: Callable[[activity.Records], None]) -> None:
        """Hand NVTX markers to `take`, on the recorder's thread; raises CuptiError."""
        self.cupti.cuptiActivityEnable(cu.KIND_MARKER)
        self._on_markers = take
        if self._wants_launch_times:
            self.clock.await_nvtx()

    def switch_markers(self, on: bool) -> None:
        """Turn the markers alone off or on again; never raises."""
        with self._switching, contextlib.suppress(RecorderError):
            if self._on_markers is not None and not self.is_aside:
                (self.cupti.cuptiActivityEnable if on else self.cupti.cuptiActivityDisable)(cu.KIND_MARKER)

    def step_aside(self) -> None:
        """Leave CUPTI to another client of the process until `come_back`: nothing stays on. Never raises."""
        with self._switching:
            if not self.is_aside:
                self._disable()
                self.flush(forced=True)
            self.is_aside = True

    def come_back(self) -> None:
        """Ask for records again, with callbacks that another client may have replaced; raises CuptiError."""
        with self._switching:
            self._start()
            self.is_aside = False

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

    def pause(self) -> None:
        """Ask for no more records until `resume`; those of launches made before still come. Raises CuptiError."""
        with self._switching:
            if self.is_aside:
                return
            for kind in self._kinds:
                self.cupti.cuptiActivityDisable(kind)
            self.clock.stop()

    def resume(self) -> None:
        """Ask for records again; raises CuptiError, and then some kinds may stay off."""
        with self._switching:
            if self.is_aside:
                return
            self.clock.start()  # first, so that no launch is recorded without its time
            for kind in self._kinds:
                self.cupti.cuptiActivityEnable(kind)

    def stop(self) -> None:
        """Stop the records and take in what is complete."""
        with self._switching:
            if not self.is_aside:  # else everything of ours is off, and what is on is another client's
                self._disable()
                self.flush(forced=True)
        self.drain()

    def detach(self) -> None:
        """After `stop`: shut CUPTI down in this process, so that launches cost what they did before.

        Not where another client holds the subscription, which it would lose, nor where the job's
        NVTX calls go through CUPTI. Never raises.
        """
        with self._switching, contextlib.suppress(RecorderError):
            if self.is_aside or (self._on_markers is not None and nvtx.may_be_in_use()):
                return
            if cu.is_subscription_free(self.cupti):
                self.cupti.cuptiFinalize()
                self._exchange.reclaim()

    def _disable(self) -> None:
        """Turn everything off."""
        self.clock.stop()
        calls: list[tuple[str, tuple[int, ...]]] = [("cuptiActivityFlushPeriod", (0,))]
        calls += [("cuptiActivityDisable", (kind,)) for kind in (*self._kinds, *self._marker_kinds())]
        for function, arguments in calls:
            with contextlib.suppress(RecorderError):
                getattr(self.cupti, function)(*arguments)

    def _marker_kinds(self) -> tuple[int, ...]:
        return () if self._on_markers is None else (cu.KIND_MARKER,)

    def knows(self, kind: int) -> bool:
        """Whether a record of `kind` can be told by its size: it is one of ours, or one has come."""
        return kind in self._decoder.sizes

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
        if self.is_aside:  # they are another client's
            return
        try:
            self.cupti.cuptiActivityFlushAll(int(forced))
        except cu.CuptiError as error:
            self.trouble.append(f"the last launches may be missing: {error}")

    def flush_if_quiet(self) -> None:
        """Make CUPTI hand over a buffer that is not full, where few have come by themselves since the last call.

        CUPTI's worker hands over full ones only (2,300 launches), and a job with few launches would lose
        minutes of them to a kill -9. A busy job's threads are not disturbed: it fills its buffers in a fraction
        of the time between two calls.
        """
        if self.buffers - self._buffers_at_flush < BUSY_BUFFERS and self.started_any:
            self.flush()
        self._is_new_period = True

    # -- on the recorder's thread -------------------------------------------------------------

    def drain(self) -> None:
        """Decode every completed buffer into the writer."""
        full = self._exchange.take()
        self.clock.drain()  # after the buffers: every launch in them has been called
        self.buffers += len(full)
        if self._is_new_period:  # what `flush_if_quiet` has brought did not come by itself
            self._is_new_period, self._buffers_at_flush = False, self.buffers
        decoded = [self._decoder.decode(memory[:valid]) for memory, valid in full]
        for buffer in decoded:  # first, as a graph's launch time may come in a later buffer than its nodes
            for kind in (cu.KIND_DRIVER, cu.KIND_RUNTIME):
                self._note_calls(buffer.records.pop(kind, None))
        for some in range(0, len(decoded), BATCH):
            self._take(decoded[some : some + BATCH])
        self._exchange.give_back(full)
        self._count_dropped()

    def _note_calls(self, calls: activity.Records | None) -> None:
        if calls is not None:
            for correlation, time_ns in zip(calls["correlation"].tolist(), calls["start"].tolist(), strict=True):
                self.clock.times.note(correlation, time_ns)

    def _take(self, decoded: list[activity.Decoded]) -> None:
        for kind, records in activity.joined(decoded):
            if kind == cu.KIND_CONCURRENT_KERNEL:
                self._take_kernels(records)
            elif kind == cu.KIND_MARKER:
                self.need_launch_times()
                if self._on_markers is not None:
                    self._on_markers(records)
            else:
                columns, odd = copy_columns(records, kind)
                self._writer.add("copies", columns)
                self.odd += odd

    def _take_kernels(self, records: activity.Records) -> None:
        columns, odd = kernel_columns(records, self.classes, self.clock.times)
        self.odd += odd
        new = self.classes.take_new()
        if new:
            self._writer.add("kernel_classes", class_columns(new))
        self._writer.add("kernels", columns)
        if not np.ma.getmaskarray(columns["graph_id"]).all():
            self._meet_graphs()
        self.devices_seen.update(np.unique(columns["device_id"]).tolist())
        if self.listener is not None:
            self.listener(columns)
        if self.watching:
            self._note_watched(columns)

    def _meet_graphs(self) -> None:
        with self._switching:
            if not self.is_aside:
                self.clock.meet_graphs()

    def _note_watched(self, columns: dict[str, Any]) -> None:
        correlations = columns["correlation_id"]
        for place in np.flatnonzero(np.isin(correlations, np.fromiter(self.watching, dtype=np.int64))):
            graph = columns["graph_id"][place]
            self.watched[int(correlations[place])] = Watched(
                kernel_class_id=int(columns["kernel_class_id"][place]),
                graph_id=None if graph is np.ma.masked else int(graph),
            )

    def _count_dropped(self) -> None:
        if self.is_aside:  # asking sets the count to zero, and it is another client's
            return
        count = ctypes.c_size_t()
        try:
            self.cupti.cuptiActivityGetNumDroppedRecords(None, 0, ctypes.byref(count))
        except cu.CuptiError:
            return
        if count.value and not self.dropped:
            self._writer.event("timeline", "loss", "CUPTI has begun to drop records: the recorder cannot keep up")
        self.dropped += count.value
