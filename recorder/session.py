"""One recording: starts the layers, runs the recorder's thread, writes the run directory.

The job's threads only launch kernels, append to queues and read the clock; decoding, NVML and
the disk belong to the recorder's thread. No failure in here may reach the job: a layer that
fails stops, says so once on stderr and in `events`, and the rest goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from nanalyze.recorder import account, ceilings, device, identity, nvtx, ranges
from nanalyze.recorder import cupti as cu
from nanalyze.recorder.coexistence import Coexistence, cuda_debugger
from nanalyze.recorder.exact import Measurement
from nanalyze.recorder.exact_layer import ExactLayer
from nanalyze.recorder.patience import result_within, within
from nanalyze.recorder.pauses import Pauses
from nanalyze.recorder.samples import SamplesLayer
from nanalyze.recorder.settings import Settings
from nanalyze.recorder.timeline import Timeline
from nanalyze.recorder.writer import Writer
from nanalyze.rundir import runfile, shards
from nanalyze.rundir.errors import NanalyzeError, RecorderError

TICK_S = 1.0  # how often NVML is asked for the clocks
DRAIN_S = 0.25  # how often full buffers are fetched: at 500,000 launches a second they hold 27 MB then
OPEN_PATIENCE_S = 10.0  # for the run directory, at the job's first use of CUDA
SYNCHRONIZE_PATIENCE_S = 10.0
END_PATIENCE_S = 30.0  # for kernels and disk together; a disk that stands still must not keep the job from ending
LEAST_FOR_SAMPLES = 0.25  # of the budget, where the timeline takes it all
KEPT_BACK = 0.1  # of the budget, for the first window of each group, which is taken in advance


def warn(message: str) -> None:
    """One line on stderr; a closed stderr is nobody's problem.

    Written past Python's buffer where stderr is a file: text that cannot be written would stay in
    the buffer and turn the job's exit code into 120.
    """
    line = f"nanalyze: {message}\n"
    try:
        descriptor = sys.stderr.fileno()
    except Exception:  # a notebook's or a test's stand-in, or none at all
        with contextlib.suppress(Exception):
            sys.stderr.write(line)
        return
    with contextlib.suppress(OSError):
        os.write(descriptor, line.encode("utf-8", errors="backslashreplace"))


class Recorder:
    """A recording in progress; made by `record` and `start`, ended by `stop`."""

    def __init__(self, run_dir: str | os.PathLike[str], settings: Settings) -> None:
        self.run_dir = Path(run_dir).absolute()  # the job may change its directory
        self.settings = settings
        self.rank = identity.rank()
        self._pid = os.getpid()
        _import_writer_libraries()
        self._started_ns = time.time_ns()
        self._writer = Writer(self.run_dir, self._open_in_time(), self._complain)
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._tick_lock = threading.Lock()
        self._stop_lock = threading.RLock()
        self._ranges = ranges.RangeLog()
        self._cupti: cu.Cupti | None = None
        self._timeline: Timeline | None = None
        self._exact: ExactLayer | None = None
        self._samples: SamplesLayer | None = None
        self._sampled: deque[dict[str, Any]] = deque()  # rows from the samples layer's thread
        self._trouble: deque[str] = deque()  # what that thread has to complain of
        self._counted: deque[str] = deque()  # which metrics it counts
        self._pauses: Pauses | None = None
        self._coexistence: Coexistence | None = None
        self._nvtx: nvtx.NvtxRanges | None = None
        self._unresolved: list[Measurement] = []
        self._devices: device.Devices | None = None
        self._running_layers: list[str] = []
        self._cpu_ns = 0
        self._stopped = False
        self._said: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="nanalyze-recorder", daemon=True)
        try:
            self._start_layers()
            self._start_thread()
        except BaseException:  # nobody would take what the layers record
            self._abandon()
            raise

    # -- the run directory ------------------------------------------------------------------------

    def _open_in_time(self) -> str:
        """The name of this process's part of the run. Raises RecorderError also where the disk stands still."""
        try:
            return result_within(OPEN_PATIENCE_S, self._open_part)
        except TimeoutError:
            raise RecorderError(
                f"{self.run_dir}: does not answer for {OPEN_PATIENCE_S:g} s. Choose another file system with -o."
            ) from None

    def _open_part(self) -> str:
        self._open_run()
        return self._claim_partition()

    def _open_run(self) -> None:
        """Create the run directory; refuse one that holds another job's data."""
        job = identity.job()
        if self.run_dir.is_dir() and not all(map(runfile.is_unfinished, self.run_dir.iterdir())):
            existing = runfile.read(self.run_dir)
            same_job = bool(job) and existing.get("settings", {}).get("job") == job
            if not (self.settings.append or same_job):
                raise RecorderError(
                    f"{self.run_dir}: already holds a run. Choose another directory, or pass append=True to add to it."
                )
        runfile.create(self.run_dir, "recorder", {"job": job})

    def _restore_run_file(self) -> None:
        """Shards bring their folders with them, so a run that was deleted lacks this alone."""
        with contextlib.suppress(NanalyzeError, OSError):
            if not (self.run_dir / runfile.RUN_FILE).exists():
                runfile.create(self.run_dir, "recorder", {"job": identity.job()})

    def _claim_partition(self) -> str:
        """`<host>-<rank>-<pid>`, unique in the run directory.

        Containers may share all three, so the folder is made here, which one of them alone can do.
        """
        name = identity.partition()
        for number in range(1, 1_000_000):
            process = name + _suffix(number)
            try:
                shards.partition_dir(self.run_dir, "processes", process).mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise RecorderError(f"{self.run_dir}: cannot be written: {error.strerror}. Choose another.") from error
            return process
        raise RecorderError(f"{self.run_dir}: holds a million parts named {name}. Choose another.")

    def _process_row(self, *, ended_ns: int | None = None, ending: str | None = None) -> dict[str, Any]:
        timeline, cupti = self._timeline, self._cupti
        lost = None
        if timeline is not None:
            lost = timeline.dropped + sum(self._writer.lost.values())
        return {
            "recorded_ns": time.time_ns(),
            "host": socket.gethostname(),
            "pid": self._pid,
            "rank": self.rank,
            "local_rank": identity.local_rank(),
            "world_size": identity.world_size(),
            "started_ns": self._started_ns,
            "ended_ns": ended_ns,
            "ending": ending,
            "command": json.dumps(sys.orig_argv),
            "settings": json.dumps(asdict(self.settings)),
            "nanalyze_version": metadata.version("nanalyze"),
            "python_version": platform.python_version(),
            "cuda_driver_version": device.driver_version(),
            "gpu_driver_version": self._devices.gpu_driver_version() if self._devices else None,
            "cupti_version": cupti.version if cupti else None,
            "cupti_path": cupti.path if cupti else None,
            "layers": ",".join(self._running_layers),
            "kernels_written": self._writer.rows["kernels"],
            "records_lost": lost,
            "shards": json.dumps(dict(self._writer.shards)) if ended_ns else None,
            "recorder_cpu_ns": self._cpu_ns,
        }

    # -- layers -----------------------------------------------------------------------------------

    def _start_layers(self) -> None:
        try:
            self._driver = _libcuda()
            if (debugger := cuda_debugger()) is not None:
                raise RecorderError(f"kernels are not recorded: {debugger} has this process, and it excludes CUPTI")
        except RecorderError as error:
            self._complain(str(error))
        else:
            if "timeline" in self.settings.layers:
                self._try("timeline", self._start_timeline)
            if self.settings.exact is not None:
                self._try("exact", self._start_exact)
            samples = self.settings.samples
            if samples is not None and not (samples.by_default and self._timeline is None):  # which was told already
                self._try("samples", self._start_samples)
            if "device_state" in self.settings.layers:
                self._try("device_state", self._start_device_state)
        if "ranges" in self.settings.layers:
            ranges.set_log(self._ranges)
            self._running_layers.append("ranges")
            self._start_nvtx()
        if self._timeline is not None:
            self._coexistence = Coexistence(self._timeline, self._exact, warn)
            self._coexistence.tend()
        self._plan_pauses()
        self._writer.add_rows("processes", [self._process_row()])

    def _try(self, layer: str, start: Any) -> None:
        try:
            start()
            self._running_layers.append(layer)
        except Exception as error:
            self._complain(f"{layer} is off: {error}", layer)

    def _complain(self, message: str, layer: str = "recorder") -> None:
        """Say it on stderr and write it to `events`, once."""
        if message not in self._said:
            self._said.add(message)
            warn(message)
            self._writer.event(layer, "failure", message)

    def _start_timeline(self) -> None:
        self._cupti = cu.load()
        timeline = Timeline(
            self._cupti,
            self._writer,
            self._wake,
            pinned=self.settings.timestamps == "host",
            launch_times=self.settings.launch_times,
            copies=self.settings.copies,
            memsets=self.settings.memsets,
        )
        timeline.start()
        self._timeline = timeline
        self._ranges.on_first = timeline.need_launch_times
        self._report_trouble(timeline)

    def _start_exact(self) -> None:
        assert self.settings.exact is not None
        if self._cupti is None or self._timeline is None:
            raise RecorderError("it needs the timeline, which tells the launches' kernel classes")
        layer = ExactLayer(self._cupti, self._driver, self.settings.exact)
        layer.start()
        self._exact = layer

    def _start_samples(self) -> None:
        assert self.settings.samples is not None
        timeline = self._timeline
        if self._cupti is None or timeline is None:
            raise RecorderError("it needs the timeline, by which samples are attributed to kernels")
        layer = SamplesLayer(
            self._cupti,
            self.settings.samples,
            (lambda: device.in_use() & timeline.devices_seen) if self.settings.samples.by_default else device.in_use,
            self._sampled.append,
            self._trouble.append,
            self._left_for_samples_pct,
            self._counted.append,
        )
        layer.start()
        self._samples = layer

    def _left_for_samples_pct(self) -> float:
        """What the timeline leaves of the CPU budget, in percent of a core; never nothing."""
        elapsed_ns = max(time.time_ns() - self._started_ns, 1)
        budget = (1 - KEPT_BACK) * self.settings.cpu_budget_pct
        return max(budget - 100 * self._cpu_ns / elapsed_ns, LEAST_FOR_SAMPLES * budget)

    def _start_nvtx(self) -> None:
        """Ranges that the job marks with NVTX; they come with the timeline's records."""
        if not self.settings.nvtx or self._timeline is None or self._cupti is None:
            return
        try:
            refusal = nvtx.inject(self._cupti.path)
            if refusal is not None:
                self._complain(refusal, "ranges")
                return
            self._nvtx = nvtx.NvtxRanges(self._ranges.ids)
            nvtx.follow(self._timeline, self._nvtx)
            self._ranges.nvtx = self._nvtx
        except RecorderError as error:
            self._complain(f"NVTX ranges are not recorded: {error}", "ranges")

    def _start_device_state(self) -> None:
        self._devices = device.Devices()
        if self._devices.missing:
            raise RecorderError(self._devices.missing)

    def _plan_pauses(self) -> None:
        """Not with exact counters: what they cost depends on what was measured already, so no two moments compare."""
        has_steps = "ranges" in self._running_layers
        if self.settings.pause_pct and has_steps and self._timeline is not None and self.settings.exact is None:
            self._pauses = Pauses(self.settings.pause_pct, self._timeline, self._samples)

    def _start_thread(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:
            raise RecorderError(f"the recorder's thread cannot start: {error}. See ulimit -u.") from error

    # -- the recorder's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        next_tick = time.monotonic() + TICK_S
        next_flush = time.monotonic() + min(1.0, self.settings.flush_s)  # early, so that a short run is visible
        while not self._stopping.is_set():
            next_pause = self._pauses.next_at if self._pauses is not None else float("inf")
            self._wake.wait(min(DRAIN_S, max(0.0, min(next_tick, next_flush, next_pause) - time.monotonic())))
            self._wake.clear()
            now = time.monotonic()
            try:
                with self._tick_lock:
                    self._work(tick=now >= next_tick, flush=now >= next_flush)
            except Exception as error:
                self._complain(f"internal error, please report it: {type(error).__name__}: {error}")
            if now >= next_tick:
                next_tick = now + TICK_S
            if now >= next_flush:
                next_flush = now + self.settings.flush_s
            if now >= next_pause:
                self._pause()

    def _pause(self) -> None:
        """Switch everything off for a moment; without the lock, so that `stop` need not wait for CUPTI."""
        assert self._pauses is not None
        try:
            self._pauses.take(self._stopping)
        except Exception as error:  # whatever it is, no further pause is tried
            self._complain(f"a pause failed, so launches may be missing from here on: {error}", "timeline")
            self._pauses.give_up()

    def _work(self, *, tick: bool, flush: bool) -> None:
        if self._timeline is not None:
            if flush:
                self._timeline.flush_if_quiet()
            self._take_exact()  # before the records of what was measured, which are told by their ids
            self._timeline.drain()
            self._resolve_exact()
        self._take_samples()
        self._take_notices()
        if tick:
            self._observe_devices()
            if self._coexistence is not None:
                self._coexistence.tend()
            if self._exact is not None:
                self._exact.tend()
        if flush or self._writer.is_full:
            if self._timeline is not None:
                self._report_trouble(self._timeline)
            self._add_ranges(self._ranges.take())
            self._restore_run_file()
            self._writer.flush()
        self._cpu_ns = time.thread_time_ns()

    def _add_ranges(self, rows: list[dict[str, Any]], *, last: bool = False) -> None:
        self._writer.add_rows("ranges", rows)
        if self._pauses is not None:
            self._pauses.learn(rows)
            self._writer.add_rows("pauses", self._pauses.rows(last=last))

    def _observe_devices(self) -> None:
        """Describe the devices once the job uses one (CUDA is then initialised), then follow their state."""
        if self._timeline is None:
            return
        seen = self._timeline.devices_seen | device.in_use()
        if not seen:
            return
        if "devices" not in self._said:
            self._said.add("devices")
            devices = self._devices or device.Devices()
            try:
                described = devices.describe()
                self._writer.add_rows("devices", described)
                self._writer.add_rows("ceilings", ceilings.rows_of(described, ceilings.read(ceilings.cache_file())))
            except NanalyzeError as error:
                self._complain(f"devices are not described: {error}", "device_state")
        if self._devices is not None:
            self._writer.add_rows("device_state", self._devices.state(seen))

    def observe(self) -> None:
        """Read clocks, power and temperature of the devices in use now, beside the reading a second; never raises."""
        try:
            with self._tick_lock:
                if not self.is_stopped:
                    self._observe_devices()
        except Exception as error:
            self._complain(f"the devices' state was not read: {error}", "device_state")

    def _take_notices(self) -> None:
        while self._coexistence is not None and self._coexistence.notices:
            self._writer.event(*self._coexistence.notices.popleft())

    def _take_samples(self) -> None:
        while self._sampled:
            self._writer.add("samples", self._sampled.popleft())
        while self._trouble:
            self._complain(self._trouble.popleft(), "samples")
        while self._counted:
            self._writer.event("samples", "note", self._counted.popleft())

    def _take_exact(self) -> None:
        if self._exact is None or self._timeline is None:
            return
        measured, times = self._exact.take()
        for correlation, time_ns in times:
            self._timeline.clock.times.note(correlation, time_ns)
        self._timeline.watching.update(m.correlation_id for m in measured)
        self._unresolved += measured
        if self._exact.failure:
            self._complain(self._exact.failure, "exact")

    def _resolve_exact(self, *, last: bool = False) -> None:
        """Write the measurements whose launch the timeline has meanwhile delivered (all of them if `last`)."""
        if not self._unresolved or self._timeline is None:
            return
        waiting = []
        for measurement in self._unresolved:
            seen = self._timeline.watched.pop(measurement.correlation_id, None)
            if seen is None and not last:
                waiting.append(measurement)
                continue
            self._timeline.watching.discard(measurement.correlation_id)
            known = (seen.kernel_class_id, seen.graph_id) if seen else (None, None)
            self._writer.add_rows("exact", measurement.rows(*known))
        self._unresolved = waiting

    # -- the end --------------------------------------------------------------------------------------

    def stop(self, ending: str = "stop") -> None:
        """End the recording and write everything; may be called again, and never raises.

        Waits (at most 10 s) for the kernels already launched, since an unfinished kernel has no
        end time.
        """
        with self._stop_lock:  # a second caller returns when everything is written
            if self._stopping.is_set() or self.is_stopped:
                return
            try:
                self._stop(ending)
            finally:
                self._stopped = True

    def _stop(self, ending: str) -> None:
        if ranges._log is self._ranges:
            ranges.set_log(None)
        if self._coexistence is not None:
            self._coexistence.stop()
        if self._nvtx is not None:
            nvtx.withdraw()
        self._stopping.set()
        self._wake.set()
        if self._samples is not None:
            self._samples.stop()
        if self._exact is not None:
            self._exact.stop()
        if not within(END_PATIENCE_S, lambda: self._end(ending)):
            warn(f"{self.run_dir}: did not take everything within {END_PATIENCE_S:g} s: what was not written is lost")

    def _end(self, ending: str) -> None:
        try:
            self._synchronize()
            self._thread.join()
            with self._tick_lock:
                self._finish(ending)
        except Exception as error:
            warn(f"internal error while stopping, please report it: {type(error).__name__}: {error}")

    def _abandon(self) -> None:
        """Leave nothing on: the recording did not come about. Never raises."""
        self._stopped = True
        self._stopping.set()
        if ranges._log is self._ranges:
            ranges.set_log(None)
        nvtx.withdraw()
        for part in (self._coexistence, self._samples, self._exact, self._timeline):
            if part is not None:
                with contextlib.suppress(Exception):
                    part.stop()

    @property
    def is_stopped(self) -> bool:
        return self._stopped or os.getpid() != self._pid  # a forked child has no recording

    def _synchronize(self) -> None:
        if self._timeline is None or not self._timeline.started_any:
            return
        if not within(SYNCHRONIZE_PATIENCE_S, _quiet_synchronize):
            text = "kernels were still running 10 s after stop; their records are missing"
            self._writer.event("timeline", "loss", text)

    def _finish(self, ending: str) -> None:
        started_cpu = time.thread_time_ns()
        try:
            self._finish_timeline(goes_on=ending in ("stop", "failed"))
        except Exception as error:  # whatever it is, the ranges and the end row are still written
            self._complain(f"internal error, please report it: {type(error).__name__}: {error}", "timeline")
        self._take_notices()
        self._take_samples()
        if self._samples is not None:
            account.of_samples(self._writer, self._samples)
            self._cpu_ns += self._samples.cpu_ns
        if self._exact is not None:
            account.of_exact(self._writer, self._exact.tally)
        self._add_ranges(self._ranges.take(also_open=True), last=True)
        self._restore_run_file()
        self._writer.flush()
        self._cpu_ns += time.thread_time_ns() - started_cpu
        account.of_cost(self._writer, self.settings, self._cpu_ns, time.time_ns() - self._started_ns)
        self._writer.shards["processes"] += 1  # the row counts the shard that it is itself in
        row = self._process_row(ended_ns=time.time_ns(), ending=ending)
        self._writer.shards["processes"] -= 1
        self._writer.add_rows("processes", [row])
        self._writer.flush()

    def _finish_timeline(self, *, goes_on: bool) -> None:
        timeline = self._timeline
        if timeline is not None:
            timeline.flush()  # before the kinds are disabled: complete records only
            self._take_exact()
            timeline.stop()
            self._resolve_exact(last=True)
            self._observe_devices()
            self._report_trouble(timeline)
            account.of_timeline(self._writer, timeline)
            if self.settings.detach and goes_on:
                timeline.detach()

    def _report_trouble(self, timeline: Timeline) -> None:
        """Say what the timeline could not do, once each."""
        while timeline.trouble:
            self._complain(timeline.trouble.pop(0), "timeline")

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop("stop" if kind is None else "failed")


class UnderWay:
    """Stands for the recording that `nanalyze record` made of the whole process: stopping it does nothing."""

    def __init__(self, recording: Recorder) -> None:
        self.run_dir = recording.run_dir
        self.is_stopped = False
        warn(f"this process is already being recorded into {self.run_dir}; that recording goes on")

    def stop(self) -> None:
        """Nothing: the recording ends with the process."""

    def __enter__(self) -> UnderWay:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _import_writer_libraries() -> None:
    """Import pyarrow now: on the recorder's thread it would take the GIL from the job in mid-run."""
    import pyarrow.parquet  # noqa: F401


def _suffix(number: int) -> str:
    return "" if number == 1 else f".{number}"


def _libcuda() -> Any:
    import ctypes

    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RecorderError(
            f"no kernels can be recorded here, there is no NVIDIA driver ({error}). Analysis needs none."
        ) from error


def _quiet_synchronize() -> None:
    with contextlib.suppress(Exception):
        device.synchronize()
