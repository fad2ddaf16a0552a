"""The exact layer: hardware counters of chosen launches, through the range profiler.

A callback on the driver's launch calls decides, launch by launch, whether to measure. A measured
kernel is replayed by CUPTI (memory saved and restored) once a pass, which takes a quarter of a
second for the full set; every other launch runs as always. A CUDA graph is never run again: each of its
natural launches collects one pass, so a set of n passes needs n launches of the same graph.

What is never measured: collectives (a replay would wait for ranks that do not replay), launches
during stream capture (they do not run), and whatever the budget does not pay for.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nanalyze.recorder import cupti as cu
from nanalyze.recorder.demangle import demangle
from nanalyze.recorder.exact import Choice, Exact, Measurement, Tally
from nanalyze.recorder.exact_ranges import CALLS, CB_DOMAIN_NVTX, OpenRanges
from nanalyze.recorder.rangeprofiler import MetricHost, RangeProfiler, chip_name, initialize, is_unknown_metric
from nanalyze.rundir.communication import COMMUNICATION_PATTERNS
from nanalyze.rundir.counters import Counter as HardwareCounter
from nanalyze.rundir.errors import RecorderError

# Kernels of these names talk to other ranks or to the host while they run: replaying one hangs.
# Wider than what the analysis calls communication: a kernel taken for one by mistake is only not measured.
COMMUNICATION = (
    re.compile(r"nccl|rccl|nvshmem|mscclpp?|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", re.IGNORECASE),
    *(re.compile(pattern) for pattern, _ in COMMUNICATION_PATTERNS),
)

# A range around a graph launch also spans the profiler's own set-up (milliseconds), so what is
# relative to elapsed time means nothing there; totals and what is relative to active cycles does.
_ELAPSED = re.compile(r"elapsed|per_second|^gpu__time")

BORING_LAUNCHES = 2000  # after so many launches of no interest the callbacks rest, they cost 5 us a launch
REST_S = 1.0
GRAPH_PATIENCE_S = 10.0  # a half-measured graph that is not launched again makes way for the rest
STOP_PATIENCE_S = 5.0


@dataclass
class _Device:
    """The profiler of one CUDA context."""

    context: int
    ordinal: int
    host: MetricHost
    metrics: list[str]
    profiler: RangeProfiler | None = None

    def open(self, cupti: cu.Cupti, *, user: bool) -> RangeProfiler:
        if self.profiler is None or self.profiler.user != user:
            self.close()
            metrics = [m for m in self.metrics if not _ELAPSED.search(m)] if user else self.metrics
            self.profiler = RangeProfiler(cupti, self.host, self.context, metrics, user=user, max_ranges=2)
        return self.profiler

    def close(self) -> None:
        profiler, self.profiler = self.profiler, None
        if profiler is not None:
            profiler.close()


@dataclass
class _Running:
    """The measurement between a launch call's entry and exit."""

    device: _Device
    profiler: RangeProfiler
    choice: Choice
    started_ns: int
    thread: int


@dataclass
class _GraphRun:
    """A graph whose passes are being collected over several of its launches."""

    executable: int
    device: _Device
    cost_ns: int = 0
    last_pass: float = field(default_factory=time.monotonic)


# CUPTI may call a callback that it failed to let go of, so none is ever freed.
_callbacks: list[Any] = []


class ExactLayer:
    """Measures launches as `options` says; callbacks run on the job's launching threads.

    `driver` is libcuda (or a stand-in). Every failure ends the layer, never the job: `failure`
    then holds the one line to show.
    """

    def __init__(self, cupti: cu.Cupti, driver: Any, options: Exact) -> None:
        self.cupti = cupti
        self.options = options
        self.failure: str | None = None
        self.tally = Tally()
        self.done: list[Measurement] = []  # appended by callbacks, taken by the recorder's thread
        self.launch_times: list[tuple[int, int]] = []  # (correlation id, ns) of measured launches
        self._driver = driver
        self._pattern = re.compile(options.kernels)
        self._excluded = re.compile(options.exclude) if options.exclude else None
        self._ranges = OpenRanges(options.ranges) if options.ranges else None
        self._choices: dict[Any, Choice] = {}
        self._devices: dict[int, _Device] = {}
        self._lock = threading.Lock()  # held from the entry of a measured launch to its exit
        self._running: _Running | None = None
        self._graph: _GraphRun | None = None
        self._captures = 0
        self._boring = 0
        self._resting_until = 0.0
        self._started_ns = time.monotonic_ns()
        self._subscriber = ctypes.c_void_p()
        self._callback = cu.ApiCallback(self._on_call)
        _callbacks.append(self._callback)

    # -- life, on the recorder's side -----------------------------------------------------------

    def start(self) -> None:
        """Subscribe to the launch calls; raises CuptiError when another subscriber holds CUPTI."""
        try:
            self.cupti.cuptiSubscribe(ctypes.byref(self._subscriber), self._callback, None)
        except cu.CuptiError as error:
            self._subscriber.value = None
            holder = cu.subscriber_name(self.cupti) if error.code == cu.MULTIPLE_SUBSCRIBERS else None
            if holder is None:
                raise
            raise RecorderError(f"{error} (it calls itself {holder!r})") from error
        try:
            for cbid in (*cu.CBID_CAPTURE_BEGINS, *cu.CBID_CAPTURE_ENDS):
                self._enable(cbid, True)
            if self._ranges is not None:
                for cbid in CALLS:
                    self.cupti.cuptiEnableCallback(1, self._subscriber, CB_DOMAIN_NVTX, cbid)
            self._listen(True)
        except RecorderError:
            self._unsubscribe()
            raise

    @property
    def _is_over(self) -> bool:
        """Whether the time in which launches are measured is up."""
        seconds = self.options.seconds
        return seconds is not None and time.monotonic_ns() - self._started_ns > seconds * 1e9

    def _enable(self, cbid: int, on: bool) -> None:
        self.cupti.cuptiEnableCallback(int(on), self._subscriber, cu.CB_DOMAIN_DRIVER_API, cbid)

    def _listen(self, on: bool) -> None:
        for cbid in (*cu.CBID_KERNEL_LAUNCHES, *cu.CBID_GRAPH_LAUNCHES):
            self._enable(cbid, on)
        self._boring = 0
        self._resting_until = 0.0 if on else time.monotonic() + REST_S

    def tend(self) -> None:
        """About once a second: let the callbacks rest while nothing of interest is launched."""
        if self._subscriber.value is None or self.failure:
            return
        self._abandon_idle_graph()
        if self._is_over:
            if not self._resting_until and self._graph is None:
                self._listen(False)
            return
        # Counting every launch needs to see every launch, and a range may be short.
        if self.options.every is not None or self._ranges is not None:
            return
        if self._resting_until:
            if time.monotonic() >= self._resting_until:
                self._listen(True)
        elif self._boring >= BORING_LAUNCHES and self._graph is None:
            self._listen(False)

    def _abandon_idle_graph(self) -> None:
        graph = self._graph
        if graph is None or time.monotonic() - graph.last_pass < GRAPH_PATIENCE_S:
            return
        if self._lock.acquire(blocking=False):
            try:
                self._give_up_graph()
            finally:
                self._lock.release()

    def _give_up_graph(self) -> None:
        if self._graph is not None:
            self.tally.unfinished_graphs += self.failure is None
            self._choices[self._graph.executable].wanted = False
            with contextlib.suppress(cu.CuptiError):
                self._graph.device.close()
            self._graph = None

    def _unsubscribe(self) -> None:
        if self._subscriber.value is not None:
            with contextlib.suppress(cu.CuptiError):
                self.cupti.cuptiUnsubscribe(self._subscriber)
            self._subscriber.value = None

    def stop(self) -> None:
        """Unsubscribe and give the profiler back; never raises."""
        self._unsubscribe()
        if not self._lock.acquire(timeout=STOP_PATIENCE_S):
            return  # a launch never came back: its thread owns the session
        try:
            self._give_up_graph()
            for device in self._devices.values():
                with contextlib.suppress(cu.CuptiError):
                    device.close()
                with contextlib.suppress(cu.CuptiError):
                    device.host.close()
            self._devices.clear()
        finally:
            self._lock.release()

    @property
    def is_subscribed(self) -> bool:
        """Whether CUPTI's one subscription is this layer's."""
        return self._subscriber.value is not None

    def step_aside(self) -> None:
        """Leave CUPTI's subscription and counters to another client; never raises."""
        self.stop()

    def come_back(self, holder: str) -> None:
        """Measure again, if `holder` has let go of the subscription (PyTorch's profiler keeps it for good)."""
        try:
            self.start()
        except RecorderError:
            self.failure = f"exact counters stopped: {holder} keeps CUPTI's subscription"

    def take(self) -> tuple[list[Measurement], list[tuple[int, int]]]:
        """Measurements and launch times since the last call."""
        done, self.done = self.done, []
        times, self.launch_times = self.launch_times, []
        return done, times

    # -- callbacks, on the job's threads ----------------------------------------------------------

    def _on_call(self, user: int | None, domain: int, cbid: int, data_address: int) -> None:
        if self.failure is not None:
            return
        try:
            if domain == CB_DOMAIN_NVTX:
                if self._ranges is not None:
                    self._ranges.on_call(cbid, data_address)
                return
            data = cu.CallbackData.from_address(data_address)
            entering = data.site == cu.CALLBACK_ENTER
            if cbid in cu.CBID_KERNEL_LAUNCHES:
                if entering:
                    self._enter_kernel(cbid, data)
                else:
                    self._exit_kernel(data)
            elif cbid in cu.CBID_GRAPH_LAUNCHES:
                if entering:
                    self._enter_graph(data)
                else:
                    self._exit_graph(data)
            elif entering and cbid in cu.CBID_CAPTURE_BEGINS:
                self._captures += 1
            elif not entering and cbid in cu.CBID_CAPTURE_ENDS:
                self._captures = max(0, self._captures - 1)
        except Exception as error:  # whatever it is, the job must not notice
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.failure = f"exact counters stopped: {error}"
        running, self._running = self._running, None
        if running is not None:
            with contextlib.suppress(Exception):
                running.profiler.stop()
            with contextlib.suppress(RuntimeError):
                self._lock.release()

    def _enter_kernel(self, cbid: int, data: cu.CallbackData) -> None:
        name = data.symbol_name or b""
        shape, stream = _launch_shape(cbid, data.function_params)
        choice = self._choices.get((name, shape))
        if choice is None:
            choice = self._choices[name, shape] = Choice(self._wants(name))
        if not choice.wanted or not self._is_let_through():
            self._boring += 1
            return
        choice.seen += 1
        if not choice.is_due(self.options) or self._graph is not None:
            self._boring += 1
            return
        self._boring = 0
        if self._may_start(stream):
            self._begin(data, choice, user=False)

    def _wants(self, name: bytes) -> bool:
        text = demangle(name.decode("utf-8", errors="backslashreplace"))
        if any(pattern.search(text) for pattern in COMMUNICATION):
            self.tally.skipped["communication"] += 1
            return False
        if self._excluded is not None and self._excluded.search(text):
            return False
        return bool(self._pattern.search(text))

    def _is_let_through(self) -> bool:
        """Whether the time and the ranges open now are those in which launches are measured."""
        return not self._is_over and (self._ranges is None or self._ranges.is_any())

    def _may_start(self, stream: int | None) -> bool:
        """Whether budget, capture state and other threads permit a measurement now; takes the lock if so."""
        elapsed = time.monotonic_ns() - self._started_ns
        expected = self.tally.spent_ns // self.tally.measured if self.tally.measured else 0
        if self.options.budget_pct < 100 and (self.tally.spent_ns + expected) * 100 > self.options.budget_pct * elapsed:
            self.tally.over_budget += 1
            return False
        if self._captures or self._is_capturing(stream):
            return False
        return self._lock.acquire(blocking=False)

    def _is_capturing(self, stream: int | None) -> bool:
        status = ctypes.c_int()
        return (
            bool(self._driver.cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status))) or status.value != 0
        )

    def _begin(self, data: cu.CallbackData, choice: Choice, *, user: bool) -> None:
        """Start the profiler for the launch being entered; the lock is held and stays so until its exit."""
        started = time.monotonic_ns()
        try:
            device = self._device(data.context)
            profiler = device.open(self.cupti, user=user)
            profiler.start()
        except BaseException:
            self._lock.release()
            raise
        self.launch_times.append((data.correlation_id, time.time_ns()))
        self._running = _Running(device, profiler, choice, started, threading.get_ident())

    def _exit_kernel(self, data: cu.CallbackData) -> None:
        running = self._running
        if running is None or running.thread != threading.get_ident() or running.profiler.user:
            return
        running.profiler.stop()
        ranges = running.profiler.read()
        self._running = None
        cost = time.monotonic_ns() - running.started_ns
        self.tally.spent_ns += cost
        self.tally.measured += 1
        if len(ranges) == 1:
            running.choice.measured += 1
            self._keep("kernel", data, running.device, running.profiler, ranges[0], cost)
        else:  # another thread launched into the session: the values cannot be told apart
            self.tally.discarded += 1
        self._lock.release()

    def _keep(
        self,
        scope: str,
        data: cu.CallbackData,
        device: _Device,
        profiler: RangeProfiler,
        values: list[float | None],
        cost_ns: int,
    ) -> None:
        self.done.append(
            Measurement(
                scope=scope,
                correlation_id=data.correlation_id,
                device_id=device.ordinal,
                measured_ns=time.time_ns(),
                metrics=profiler.metrics,
                values=values,
                passes=profiler.passes,
                cost_ns=cost_ns,
            )
        )

    def _enter_graph(self, data: cu.CallbackData) -> None:
        executable, stream = _graph_launch(data.function_params)
        choice = self._choices.get(executable)
        if choice is None:
            choice = self._choices[executable] = Choice(self.options.graphs)
        collecting = self._graph is not None and self._graph.executable == executable
        if not collecting and not (choice.wanted and self._is_let_through()):
            self._boring += 1
            return
        choice.seen += 1
        if not collecting and (self._graph is not None or not choice.is_due(self.options)):
            self._boring += 1
            return
        self._boring = 0
        if not self._may_start(stream):
            return
        self._begin(data, choice, user=True)
        running = self._running
        assert running is not None
        if self._graph is None:
            self._graph = _GraphRun(executable, running.device)
        running.profiler.push("graph")

    def _exit_graph(self, data: cu.CallbackData) -> None:
        running, graph = self._running, self._graph
        if running is None or graph is None or running.thread != threading.get_ident():
            return
        running.profiler.pop()
        is_complete = running.profiler.stop()
        graph.last_pass = time.monotonic()
        values = running.profiler.read() if is_complete else None
        self._running = None
        cost = time.monotonic_ns() - running.started_ns
        graph.cost_ns += cost
        self.tally.spent_ns += cost
        self.tally.measured += 1
        if values is not None:
            self._graph = None
            running.choice.measured += 1
            if len(values) == 1:
                self._keep("graph", data, graph.device, running.profiler, values[0], graph.cost_ns)
            else:
                self.tally.discarded += 1
        self._lock.release()

    def _device(self, context: int) -> _Device:
        device = self._devices.get(context)
        if device is None:
            device = self._devices[context] = self._open_device(context)
        return device

    def _open_device(self, context: int) -> _Device:
        ordinal = ctypes.c_int()
        if self._driver.cuCtxGetDevice(ctypes.byref(ordinal)):
            raise RecorderError("the launching thread has no current CUDA context")
        initialize(self.cupti)  # not earlier: it fails before CUDA is initialised
        host = MetricHost(self.cupti, chip_name(self.cupti, ordinal.value), context)
        try:
            metrics = supported_metrics(host, self.options.candidates())
            if not metrics:
                raise RecorderError("this GPU offers none of the requested metrics")
        except RecorderError:
            with contextlib.suppress(cu.CuptiError):
                host.close()
            raise
        return _Device(context, ordinal.value, host, metrics)


def supported_metrics(host: MetricHost, counters: Sequence[HardwareCounter]) -> list[str]:
    """For each counter the first raw metric this chip has; counters it lacks are left out."""
    first_choices = list(dict.fromkeys(counter.raw[0] for counter in counters))
    try:
        host.config(first_choices)  # one question instead of fifty (0.35 s) where all exist
        return first_choices
    except cu.CuptiError as error:
        if not is_unknown_metric(error):
            raise
    found: list[str] = []
    for counter in counters:
        found += host.supported(counter.raw)[:1]
    return list(dict.fromkeys(found))


_SHAPE_BYTES = 28  # grid x, y, z, block x, y, z, dynamic shared memory: seven uint32


def _launch_shape(cbid: int, params: int) -> tuple[bytes, int | None]:
    """The launch shape as raw bytes, and the stream, from a launch call's parameter struct.

    cuLaunchKernel_params begins with the function, then the shape and the stream;
    cuLaunchKernelEx_params begins with a pointer to a CUlaunchConfig, which begins with the shape.
    """
    if cu.CBID_KERNEL_LAUNCHES[cbid] == "cuLaunchKernelEx":
        config = ctypes.c_void_p.from_address(params).value
        assert config is not None
        shape, stream = config, config + 32
    else:
        shape, stream = params + 8, params + 40
    return ctypes.string_at(shape, _SHAPE_BYTES), ctypes.c_void_p.from_address(stream).value


def _graph_launch(params: int) -> tuple[int, int | None]:
    """The executable graph and the stream, from cuGraphLaunch_params."""
    executable, stream = (ctypes.c_void_p * 2).from_address(params)
    return executable or 0, stream
