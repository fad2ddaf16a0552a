"""The samples layer: counters of whole devices, always on, at a bounded cost.

Groups of counters that fit one pass take turns, a window each; every other window is the first group's, once
each had one. After a window the sampler rests as
long as the CPU budget demands, so dear groups run less often and cheap ones almost all the time.
Everything happens on a thread of its own; decoding a window does not delay the timeline.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanalyze.recorder import cupti as cu
from nanalyze.recorder.pmsampling import BUFFER_BYTES, PM_SAMPLING, Drained, PmSampler
from nanalyze.recorder.rangeprofiler import MetricHost, chip_name, initialize, is_unknown_metric
from nanalyze.rundir.errors import RecorderError
from nanalyze.rundir.sampled import BY_COLUMN, GROUPS

DRAIN_S = 0.1  # at 1 ms a hundred samples, under 1 MiB of raw records
DRAIN_IMAGES = 32  # at most at once: about 8,000 samples, which take about as long as DRAIN_S to evaluate
LEAST_SAMPLES = 4  # a window; the first is never complete
WAIT_S = 0.2  # between looks whether the job has begun to use a device
HELD_WAIT_S = 0.01  # between looks whether a pause is over
BUSY_WAIT_S, MOST_BUSY_WAIT_S = 5.0, 60.0  # before asking again for counters that another process has: doubles
_CLOCK = "sm_cycles_elapsed"  # stands in every group

Group = dict[str, str]  # column of `samples` -> the metric that gives it
Rows = dict[str, Any]


@dataclass(frozen=True)
class Samples:
    """How devices are sampled.

    `interval_us`: length of a sample. `window_s`: how long a group counts before the next has its turn.
    `overhead_pct`: the share of one CPU core that sampling may take on average, in percent, by default what
    the budget of the whole recording leaves; the sampler rests between windows to keep it. `groups`:
    columns of `samples` in order of preference, by default `rundir.sampled.GROUPS`; a group that does not
    fit one pass on the device is split. `by_default`: nobody asked for samples, so a device is sampled once
    kernels of it were recorded, when the job's own start is over, and another holder of the counters, often a
    process of the same job, is named in the run and not on stderr.
    """

    interval_us: float = 1000.0
    window_s: float = 1.0
    overhead_pct: float | None = None
    groups: Sequence[Sequence[str]] = GROUPS
    by_default: bool = False

    def __post_init__(self) -> None:
        if not 5 <= self.interval_us <= 1e6:
            raise RecorderError(f"Samples(interval_us={self.interval_us!r}): must be from 5 to 1,000,000 microseconds")
        if not LEAST_SAMPLES * self.interval_us * 1e-6 <= self.window_s < math.inf:
            raise RecorderError(
                f"Samples(window_s={self.window_s!r}): must be at least {LEAST_SAMPLES} intervals, "
                f"{LEAST_SAMPLES * self.interval_us * 1e-6:g} seconds"
            )
        if self.overhead_pct is not None and not 0 < self.overhead_pct <= 100:
            raise RecorderError(f"Samples(overhead_pct={self.overhead_pct!r}): must be above 0 and at most 100")
        unknown = [column for group in self.groups for column in group if column not in BY_COLUMN]
        if unknown:
            raise RecorderError(f"Samples(groups=...): there is no sampled counter {unknown[0]!r}")


def fit_groups(host: MetricHost, wanted: Sequence[Sequence[str]]) -> list[Group]:
    """The groups this chip can count in one pass each; one that does not fit is split from its end.

    The clock comes first in each. Counters that the chip does not have, or not in one pass with the
    clock, are left out.
    """
    fitted = []
    for columns in wanted:
        pending = [_CLOCK, *(column for column in columns if column != _CLOCK)]
        while pending:
            group = _fit(host, pending)
            if not set(group) - {_CLOCK}:
                break
            fitted.append(group)
            pending = [_CLOCK, *(column for column in pending if column not in {_CLOCK, *group})]
    return fitted


def _fit(host: MetricHost, columns: Sequence[str]) -> Group:
    group: Group = {}
    for column in columns:
        for metric in BY_COLUMN[column].raw:
            if metric not in group.values() and _fits(host, [*group.values(), metric]):
                group[column] = metric
                break
    return group


def _fits(host: MetricHost, metrics: Sequence[str]) -> bool:
    try:
        return host.passes(host.config(metrics)) == 1
    except cu.CuptiError as error:
        if is_unknown_metric(error):
            return False
        raise


def group_of(turn: int, groups: int) -> int:
    """Whose turn it is: each once, then every other one is the first group's, which has what verdicts need."""
    if turn < groups or groups == 1:
        return turn % groups
    later = turn - groups
    return 1 + later // 2 % (groups - 1) if later % 2 else 0


def rows_of(drained: Drained, group: Group, number: int, ordinal: int) -> Rows:
    """Rows of `samples`: busy times are percentages times the length of their sample."""
    count = len(drained.start_ns)
    length = (drained.end_ns - drained.start_ns).astype(float)
    rows: Rows = {
        "device_id": np.full(count, ordinal, dtype=np.int32),
        "start_ns": drained.start_ns,
        "end_ns": drained.end_ns,
        "counter_group": np.full(count, number, dtype=np.int32),
    }
    for place, column in enumerate(group):
        values = drained.values[:, place]
        if BY_COLUMN[column].is_busy_time:
            values = values * length / 100
        rows[column] = np.ma.masked_invalid(values)
    return rows


def buffer_bytes(interval_us: float) -> int:
    """Size of the hardware buffer: 64 MiB hold some 8,000 samples, eight seconds at 1 ms.

    Smaller is cheaper: on an H200 a window took 0.26 s of CPU to configure with 256 MiB, 0.22 with 128,
    0.16 with 64 and 0.13 with 32, the driver preparing all of it.
    """
    return min(BUFFER_BYTES, max(64 << 20, round((64 << 20) * 1000 / interval_us)))


class _Device:
    """One device's sampler with its groups and the window that is open."""

    def __init__(self, cupti: cu.Cupti, ordinal: int, options: Samples) -> None:
        self.ordinal = ordinal
        self.options = options
        self.host = MetricHost(cupti, chip_name(cupti, ordinal), profiler_type=PM_SAMPLING)
        try:
            self.groups = fit_groups(self.host, options.groups)
            if not self.groups:
                raise RecorderError("it offers none of the sampled counters in one pass")
            self.sampler = PmSampler(cupti, self.host, ordinal, is_opened=False)
        except RecorderError:
            with contextlib.suppress(RecorderError):  # the first error is the reason
                self.host.close()
            raise
        self.number = 0  # of the group whose turn it is
        self.turns = 0
        self.again: float | None = None  # when the counters, which another process has, are asked for again
        self._wait_s = BUSY_WAIT_S
        self.opened = 0.0
        self.expected = 0.0
        self.received = 0

    def open_window(self) -> None:
        self.number = group_of(self.turns, len(self.groups))
        self.turns += 1
        metrics = list(self.groups[self.number].values())
        self.sampler.configure(metrics, round(self.options.interval_us * 1000), buffer_bytes(self.options.interval_us))
        self.sampler.start()
        self.opened = time.monotonic()
        self._wait_s = BUSY_WAIT_S

    def wait(self) -> None:
        """Leave the counters to another process for a while, each time for longer until they are had again."""
        with contextlib.suppress(RecorderError):
            self.sampler.close()
        self.turns = max(self.turns - 1, 0)  # whose turn did not come
        self.again = time.monotonic() + self._wait_s
        self._wait_s = min(2 * self._wait_s, MOST_BUSY_WAIT_S)

    def close_window(self) -> None:
        self.sampler.stop()
        self.expected += (time.monotonic() - self.opened) / (self.options.interval_us * 1e-6)

    def take(self, most_images: int | None = None) -> tuple[Rows, bool]:
        drained = self.sampler.drain(most_images)
        self.received += len(drained.start_ns)
        return rows_of(drained, self.groups[self.number], self.number, self.ordinal), drained.overflowed

    def close(self) -> None:
        with contextlib.suppress(RecorderError):
            self.sampler.close()
        with contextlib.suppress(RecorderError):
            self.host.close()


class SamplesLayer:
    """Samples every device the process uses, on its own thread, until `stop`.

    `in_use` tells the ordinals, `put` takes rows of `samples` (both called on the layer's thread),
    `complain` takes the one line of a failure. `allowed_pct` tells, after each window, the share of a core
    that sampling may take where the options leave that open. `note` takes a line a group: the metrics behind its
    columns. `losses` and `cpu_ns` say what it lost and cost.
    """

    def __init__(
        self,
        cupti: cu.Cupti,
        options: Samples,
        in_use: Callable[[], set[int]],
        put: Callable[[Rows], None],
        complain: Callable[[str], None],
        allowed_pct: Callable[[], float] = lambda: 1.0,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.cupti = cupti
        self.options = options
        self.overflows = 0
        self.cpu_ns = 0
        self._in_use = in_use
        self._put = put
        self._complain = complain
        self._allowed_pct = allowed_pct
        self._note = note
        self._windows = 0
        self._held = threading.Event()
        self._idle = threading.Event()  # no window is open
        self._idle.set()
        self._devices: dict[int, _Device] = {}  # also those that failed later
        self._refused: set[int] = set()
        self._told_busy: set[int] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nanalyze-samples", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, patience_s: float = 5.0) -> None:
        """End the open window, take what it counted, give the devices back; never raises."""
        self._stopping.set()
        self._thread.join(patience_s)
        if self._thread.is_alive():
            self._complain(f"sampling did not end within {patience_s:g} s; the last samples are missing")

    def hold(self, patience_s: float) -> None:
        """Close the open window early and open none until `release`; waits so long for that."""
        self._held.set()
        self._idle.wait(patience_s)

    def release(self) -> None:
        """Go on where `hold` interrupted."""
        self._held.clear()

    @property
    def losses(self) -> dict[int, tuple[int, int]]:
        """By device: samples expected from the time sampled, and received."""
        return {ordinal: (round(d.expected), d.received) for ordinal, d in self._devices.items()}

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._look_for_devices()
                if not self._active():
                    self._stopping.wait(WAIT_S)
                elif self._held.is_set():
                    self._stopping.wait(HELD_WAIT_S)
                else:
                    self._rest(self._window())
        except Exception as error:  # whatever it is, the job and the other layers go on
            self._complain(f"sampling stopped, please report it: {type(error).__name__}: {error}")
        finally:
            for ordinal in set(self._devices) - self._refused:
                self._devices[ordinal].close()
            self.cpu_ns = time.thread_time_ns()

    def _active(self) -> list[_Device]:
        return [d for ordinal, d in self._devices.items() if ordinal not in self._refused and d.again is None]

    def _each(self, work: Callable[[_Device], None]) -> None:
        """Do `work` with every device; one that fails is given back, and the others go on.

        One whose counters another process has is asked for again: such a process may be a short one of the same job,
        which came between two windows.
        """
        for device in self._active():
            try:
                work(device)
            except RecorderError as error:
                if isinstance(error, cu.CuptiError) and error.code == cu.HARDWARE_BUSY:
                    device.wait()
                    self._tell_busy(device.ordinal, error)
                    continue
                self._refused.add(device.ordinal)
                device.close()
                self._complain(f"device {device.ordinal} is no longer sampled: {error}")

    def _tell_busy(self, ordinal: int, error: RecorderError) -> None:
        """Once a device: in the run alone, if nobody asked for samples."""
        if ordinal not in self._told_busy:
            self._told_busy.add(ordinal)
            tell = self._note if self.options.by_default else self._complain
            tell(f"device {ordinal} is not sampled for now: {error}, or wait")

    def _look_for_devices(self) -> None:
        for device in self._devices.values():
            if device.again is not None and time.monotonic() >= device.again:
                device.again = None
        for ordinal in sorted(self._in_use() - set(self._devices) - self._refused):
            try:
                initialize(self.cupti)  # fails before CUDA is initialised, so not earlier
                self._devices[ordinal] = found = _Device(self.cupti, ordinal, self.options)
                for number, group in enumerate(found.groups):
                    metrics = ", ".join(f"{column} = {metric}" for column, metric in group.items())
                    self._note(f"device {ordinal}, counter_group {number}: {metrics}")
            except RecorderError as error:
                self._refused.add(ordinal)
                self._complain(f"device {ordinal} is not sampled: {error}")

    def _window(self) -> float:
        """One window on every device; the rest (seconds) that the budget asks for after it.

        The first window of each group is on credit: else a short recording would have but one group.
        """
        started, cpu = time.monotonic(), time.thread_time_ns()
        self._idle.clear()
        try:
            self._sample()
        finally:
            self._idle.set()
        self.cpu_ns = time.thread_time_ns()
        allowed_pct = self.options.overhead_pct or self._allowed_pct()
        self._windows += 1
        if self._windows < max((len(device.groups) for device in self._active()), default=0):
            return 0.0
        earned_s = (self.cpu_ns - cpu) / 1e9 / (allowed_pct / 100)
        return earned_s - (time.monotonic() - started)

    def _sample(self) -> None:
        self._each(_Device.open_window)
        started = time.monotonic()  # configuring takes a tenth of a second and more
        while self._goes_on() and (left := started + self.options.window_s - time.monotonic()) > 0:
            self._stopping.wait(min(DRAIN_S, left))
            self._each(lambda device: self._take(device, DRAIN_IMAGES))
        self._each(_Device.close_window)
        self._each(self._take)

    def _goes_on(self) -> bool:
        return not (self._stopping.is_set() or self._held.is_set())

    def _rest(self, seconds: float) -> None:
        if seconds > 0:
            self._stopping.wait(seconds)

    def _take(self, device: _Device, most_images: int | None = None) -> None:
        rows, overflowed = device.take(most_images)
        self.overflows += overflowed
        if len(rows["start_ns"]):
            self._put(rows)
