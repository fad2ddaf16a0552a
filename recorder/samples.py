"""The samples layer: counters of whole devices, always on, at a bounded cost.

Groups of counters that fit one pass take turns, a window each. After a window the sampler rests as
long as the CPU budget demands, so dear groups run less often and cheap ones almost all the time.
Everything happens on a thread of its own; decoding a window does not delay the timeline.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanalyze.recorder import cupti as cu
from nanalyze.recorder.pmsampling import PM_SAMPLING, Drained, PmSampler
from nanalyze.recorder.rangeprofiler import MetricHost, chip_name, initialize, is_unknown_metric
from nanalyze.rundir.errors import RecorderError
from nanalyze.rundir.sampled import BY_COLUMN, GROUPS

DRAIN_S = 0.1  # at 1 ms a hundred samples, under 1 MiB of raw records
WAIT_S = 0.2  # between looks whether the job has begun to use a device
_CLOCK = "sm_cycles_elapsed"  # stands in every group

Group = dict[str, str]  # column of `samples` -> the metric that gives it
Rows = dict[str, Any]


@dataclass(frozen=True)
class Samples:
    """How devices are sampled.

    `interval_us`: length of a sample. `window_s`: how long a group counts before the next has its turn.
    `overhead_pct`: the share of one CPU core that sampling may take on average, in percent; the sampler
    rests between windows to keep it. `groups`: columns of `samples` in order of preference, by default
    `rundir.sampled.GROUPS`; a group that does not fit one pass on the device is split.
    """

    interval_us: float = 1000.0
    window_s: float = 1.0
    overhead_pct: float = 1.0
    groups: Sequence[Sequence[str]] = GROUPS

    def __post_init__(self) -> None:
        if not 5 <= self.interval_us <= 1e6:
            raise RecorderError(f"Samples(interval_us={self.interval_us!r}): must be from 5 to 1,000,000 microseconds")
        if not self.window_s > 0:
            raise RecorderError(f"Samples(window_s={self.window_s!r}): must be above 0 seconds")
        if not 0 < self.overhead_pct <= 100:
            raise RecorderError(f"Samples(overhead_pct={self.overhead_pct!r}): must be above 0 and at most 100")
        unknown = [column for group in self.groups for column in group if column not in BY_COLUMN]
        if unknown:
            raise RecorderError(f"Samples(groups=...): there is no sampled counter {unknown[0]!r}")


def fit_groups(host: MetricHost, wanted: Sequence[Sequence[str]]) -> list[Group]:
    """The groups this chip can count in one pass each; one that does not fit is split from its end.

    Counters that the chip does not have are left out.
    """
    fitted = []
    for columns in wanted:
        pending = list(columns)
        while pending:
            group = _fit(host, pending)
            if not set(group) - {_CLOCK}:
                break
            fitted.append(group)
            pending = [column for column in pending if column not in group]
            if pending and _CLOCK in group:
                pending = [_CLOCK, *pending]
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


class _Device:
    """One device's sampler with its groups and the window that is open."""

    def __init__(self, cupti: cu.Cupti, ordinal: int, options: Samples) -> None:
        self.ordinal = ordinal
        self.options = options
        self.host = MetricHost(cupti, chip_name(cupti, ordinal), profiler_type=PM_SAMPLING)
        self.groups = fit_groups(self.host, options.groups)
        if not self.groups:
            self.host.close()
            raise RecorderError(f"device {ordinal} offers none of the sampled counters in one pass")
        self.sampler = PmSampler(cupti, self.host, ordinal)
        self.number = -1  # of the group whose turn it is
        self.opened = 0.0
        self.expected = 0.0
        self.received = 0

    def open_window(self) -> None:
        self.number = (self.number + 1) % len(self.groups)
        metrics = list(self.groups[self.number].values())
        self.sampler.configure(metrics, round(self.options.interval_us * 1000))
        self.sampler.start()
        self.opened = time.monotonic()

    def close_window(self) -> None:
        self.sampler.stop()
        self.expected += (time.monotonic() - self.opened) / (self.options.interval_us * 1e-6)

    def take(self) -> tuple[Rows, bool]:
        drained = self.sampler.drain()
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
    `complain` takes the one line of a failure. `losses` and `cpu_ns` say what it lost and cost.
    """

    def __init__(
        self,
        cupti: cu.Cupti,
        options: Samples,
        in_use: Callable[[], set[int]],
        put: Callable[[Rows], None],
        complain: Callable[[str], None],
    ) -> None:
        self.cupti = cupti
        self.options = options
        self.overflows = 0
        self.cpu_ns = 0
        self._in_use = in_use
        self._put = put
        self._complain = complain
        self._devices: dict[int, _Device] = {}
        self._refused: set[int] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nanalyze-samples", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, patience_s: float = 5.0) -> None:
        """End the open window, take what it counted, give the devices back; never raises."""
        self._stopping.set()
        self._thread.join(patience_s)

    @property
    def losses(self) -> dict[int, tuple[int, int]]:
        """By device: samples expected from the time sampled, and received."""
        return {ordinal: (round(d.expected), d.received) for ordinal, d in self._devices.items()}

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._look_for_devices()
                if not self._devices:
                    self._stopping.wait(WAIT_S)
                    continue
                self._window()
        except Exception as error:  # whatever it is, the job and the other layers go on
            self._complain(f"sampling stopped: {error}")
        finally:
            for device in self._devices.values():
                device.close()

    def _look_for_devices(self) -> None:
        for ordinal in sorted(self._in_use() - set(self._devices) - self._refused):
            try:
                initialize(self.cupti)  # fails before CUDA is initialised, so not earlier
                self._devices[ordinal] = _Device(self.cupti, ordinal, self.options)
            except RecorderError as error:
                self._refused.add(ordinal)
                self._complain(f"device {ordinal} is not sampled: {error}")

    def _window(self) -> None:
        """One window on every device, then the rest that the budget asks for."""
        started, cpu = time.monotonic(), time.thread_time_ns()
        for device in self._devices.values():
            device.open_window()
        try:
            while not self._stopping.is_set() and time.monotonic() - started < self.options.window_s:
                self._stopping.wait(DRAIN_S)
                self._take()
        finally:
            for device in self._devices.values():
                device.close_window()
        self._take()
        used_ns = time.thread_time_ns() - cpu
        self.cpu_ns += used_ns
        earned_s = used_ns / 1e9 / (self.options.overhead_pct / 100)
        self._stopping.wait(max(0.0, earned_s - (time.monotonic() - started)))

    def _take(self) -> None:
        for device in self._devices.values():
            rows, overflowed = device.take()
            self.overflows += overflowed
            if len(rows["start_ns"]):
                self._put(rows)
