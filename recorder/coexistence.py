"""Other CUPTI clients in the process: the timeline steps aside for them and comes back afterwards.

CUPTI's activity callbacks and kinds belong to the whole process: a second client that registers
its own takes every record from the first, and disabling a kind takes it from both. (CUPTI 13.2
can keep several subscribers apart, but only if each asks for it through the new functions, which
PyTorch's profiler does not.) So the timeline makes room in two ways:

- PyTorch's profiler is known: its functions that reach CUPTI are wrapped, and the timeline is off
  from before the first of them until the last has returned.
- Any other client is noticed by what is missing: when no record has come for a while, CUPTI is
  asked to write one (of a context, which is there as soon as CUDA is). If that does not arrive,
  though it did when CUPTI was asked at the beginning, somebody else has the callbacks. The timeline
  then touches nothing until CUPTI's subscription, which every client holds by CUPTI's rules, is free.

Either way the time away is written to `events` as a loss, with its bounds and the holder's name.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanalyze.recorder import cupti as cu
from nanalyze.recorder import device
from nanalyze.recorder.exact_layer import ExactLayer
from nanalyze.recorder.patience import within
from nanalyze.recorder.timeline import Timeline
from nanalyze.rundir.errors import RecorderError

PYTORCH = "torch.autograd.profiler"  # the module; its functions below are what reaches CUPTI
STARTS = ("_prepare_profiler", "_enable_profiler")
END = "_disable_profiler"

SILENCE_S = 5.0  # without a record, before CUPTI is asked for one
PROBE_PERIOD_S = 30.0
PROBE_PATIENCE_S = 2.5  # CUPTI hands its buffers over once a second
RETRY_S = 5.0  # between looks whether the other client is gone
SYNCHRONIZE_PATIENCE_S = 2.0

# Clients that can be told by their module or variable, for the message only.
_KNOWN = (("triton.profiler", "Triton Proton"), ("cupti.cupti", "cupti-python"), ("nsight", "nsight-python"))


def cuda_debugger(proc: Path = Path("/proc/self")) -> str | None:
    """The name of NVIDIA's debugger if it has this process: cuInit then fails once CUPTI is loaded (CUDA 13.0)."""
    with contextlib.suppress(OSError, ValueError):
        status = (proc / "status").read_text().splitlines()
        tracer = next((line.split()[1] for line in status if line.startswith("TracerPid:")), "0")
        if int(tracer):
            name = (proc.parent / tracer / "comm").read_text().strip()
            return "cuda-gdb" if name.startswith("cuda-gdb") else None
    return None


class Coexistence:
    """Watches for other clients; `tend` and `stop` are called by the recorder's thread.

    `exact` holds CUPTI's one subscription while it runs, so it makes room too. `warn` says a line
    on stderr; `notices` collects (layer, kind, message) for the recorder's thread to write.
    """

    def __init__(self, timeline: Timeline, exact: ExactLayer | None, warn: Callable[[str], None]) -> None:
        self.holder: str | None = None
        self.notices: deque[tuple[str, str, str]] = deque()
        self._timeline = timeline
        self._exact = exact
        self._warn = warn
        self._lock = threading.RLock()
        self._said: set[str] = set()
        self._away_since_ns = 0
        self._originals: dict[str, Any] = {}
        self._wrappers: dict[str, Any] = {}
        self._buffers = 0
        self._last_buffer = self._last_probe = time.monotonic()
        self._retry_at = 0.0
        self._was_asked = False
        self._is_suspected = False  # the holder was noticed by silence, and may be a mistake
        self._register_again_at: float | None = None

    def tend(self) -> None:
        """About once a second: see whether PyTorch is there, and whether the records still come."""
        self._wrap_pytorch()
        now = time.monotonic()
        with self._lock:
            if self._timeline.buffers != self._buffers:
                self._buffers, self._last_buffer = self._timeline.buffers, now
                self._clear_suspicion()
                self._ask_once()
            if self.holder is None:
                self._look_for_others(now)
                self._register_again(now)
            elif self._retry_at and now >= self._retry_at:
                self._retry_at = now + RETRY_S
                if self._is_subscription_free():
                    self.come_back()

    def stop(self) -> None:
        """Let go of PyTorch, and note a time away that has not ended."""
        module = sys.modules.get(PYTORCH)
        for name, original in self._originals.items():
            if module is not None and getattr(module, name, None) is self._wrappers[name]:
                setattr(module, name, original)
        self._originals = {}
        with self._lock:
            if self.holder is not None:
                self._note_time_away("and the recording ended meanwhile")

    # -- stepping aside, on any thread --------------------------------------------------------------

    def step_aside(self, holder: str) -> None:
        """Leave CUPTI to `holder`; never raises."""
        with self._lock:
            if self.holder is not None:
                return
            self.holder = holder
            self._away_since_ns = time.time_ns()
            if self._exact is not None:
                self._exact.step_aside()
            _settle()  # else running kernels would lose their times in the flush
            self._timeline.step_aside()
            self._retry_at = 0.0
            self._say(f"{holder} takes over CUPTI: kernels are not recorded until it is done")

    def come_back(self) -> None:
        """Take CUPTI back; never raises."""
        with self._lock:
            if self.holder is None:
                return
            try:
                self._timeline.come_back()
            except RecorderError as error:
                self._retry_at = time.monotonic() + RETRY_S
                self.notices.append(("timeline", "failure", f"could not take CUPTI back from {self.holder}: {error}"))
                return
            self._is_suspected = False
            self._note_time_away("then it was recorded again")
            if self._exact is not None:
                self._exact.come_back(self.holder)
            self.holder = None
            self._last_buffer = self._last_probe = time.monotonic()
            if os.environ.get("TEARDOWN_CUPTI") == "1":  # PyTorch then shuts CUPTI down, at the next CUDA call
                self._register_again_at = time.monotonic() + 1.0

    def _say(self, message: str) -> None:
        if message not in self._said:  # a profiler with a schedule comes again and again
            self._said.add(message)
            self._warn(message)
            self.notices.append(("timeline", "note", message))

    def _note_time_away(self, end: str) -> None:
        now = time.time_ns()
        text = (
            f"the timeline stood aside for {self.holder} for {(now - self._away_since_ns) / 1e9:.3f} s "
            f"({self._away_since_ns} to {now} ns), {end}: what was launched in that time is missing"
        )
        self.notices.append(("timeline", "loss", text))

    def _register_again(self, now: float) -> None:
        if self._register_again_at is not None and now >= self._register_again_at:
            self._register_again_at = None
            with contextlib.suppress(RecorderError):
                self._timeline.come_back()

    # -- PyTorch's profiler -------------------------------------------------------------------------

    def _wrap_pytorch(self) -> None:
        module = sys.modules.get(PYTORCH)
        if module is None or self._originals or not all(hasattr(module, name) for name in (*STARTS, END)):
            return
        for name in (*STARTS, END):
            original = getattr(module, name)
            wrapper = self._ending(original) if name == END else self._starting(original)
            self._originals[name], self._wrappers[name] = original, wrapper
            setattr(module, name, wrapper)

    def _starting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if _uses_cuda((*args, *kwargs.values())):
                self.step_aside("torch.profiler")
            try:
                result = original(*args, **kwargs)
            except BaseException:
                self.come_back()
                raise
            if self.holder is None:  # of the CPU alone: it takes the callbacks nevertheless, but wants no record
                self._take_callbacks_back()
            return result

        return wrapper

    def _take_callbacks_back(self) -> None:
        with contextlib.suppress(RecorderError):
            self._timeline.register()

    def _ending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                self.come_back()

        return wrapper

    # -- any other client ---------------------------------------------------------------------------

    def _look_for_others(self, now: float) -> None:
        if now - self._last_buffer < SILENCE_S or now - self._last_probe < PROBE_PERIOD_S:
            return
        if not self._timeline.knows(cu.KIND_CONTEXT):  # it did not answer when it was ours for certain
            return
        self._last_probe = now
        if device.in_use() and self._is_taken():
            self.holder = self._name_holder()
            self._away_since_ns = time.time_ns() - int((now - self._last_buffer) * 1e9)
            self._timeline.clock.stop()  # its subscription is ours
            self._is_suspected = True
            self._timeline.is_aside = True  # without switching anything off: the kinds are the other client's
            self._retry_at = now + RETRY_S
            message = f"{self.holder} has taken over CUPTI: kernels are not recorded until it is done"
            self._say(message)

    def _clear_suspicion(self) -> None:
        """A record came after all: nobody has taken anything."""
        if self._is_suspected:
            self._is_suspected = self._timeline.is_aside = False
            self.holder = None
            self.notices.append(("timeline", "note", "records have come again: nobody had taken over CUPTI"))

    def _ask_once(self) -> None:
        """Learn whether this CUPTI answers, at a moment when the callbacks are ours."""
        if not self._was_asked and self.holder is None and device.in_use():
            self._was_asked = True
            self._ask()

    def _ask(self) -> bool:
        """Have CUPTI write a record of each context; False if it refuses."""
        cupti = self._timeline.cupti
        try:
            cupti.cuptiActivityEnableAndDump(cu.KIND_CONTEXT)
            cupti.cuptiActivityDisable(cu.KIND_CONTEXT)
            cupti.cuptiActivityFlushAll(0)
        except cu.CuptiError:
            return False
        return True

    def _is_taken(self) -> bool:
        """Whether a record that CUPTI writes now goes to somebody else."""
        if not self._ask():
            return False
        until = time.monotonic() + PROBE_PATIENCE_S
        while True:
            self._timeline.drain()
            if self._timeline.buffers != self._buffers:
                return False
            if time.monotonic() >= until:
                return True
            time.sleep(0.02)

    def _name_holder(self) -> str:
        named = next((name for module, name in _KNOWN if module in sys.modules), None)
        if named is None and os.environ.get("KINETO_USE_DAEMON"):
            named = "PyTorch's profiling daemon"
        if named is None and not self._is_subscribed() and not self._is_subscription_free():
            named = cu.subscriber_name(self._timeline.cupti)
        return named or "another CUPTI client"

    def _is_subscribed(self) -> bool:
        """Whether CUPTI's one subscription is the recorder's."""
        return self._timeline.clock.is_subscribed or (self._exact is not None and self._exact.is_subscribed)

    def _is_subscription_free(self) -> bool:
        if self._is_subscribed():
            return False  # it is ours, so the other client holds none and nothing tells when it is done
        return cu.is_subscription_free(self._timeline.cupti)


def _uses_cuda(arguments: tuple[Any, ...]) -> bool:
    """Whether the activities among a profiler's arguments include the GPU's."""
    sets = [argument for argument in arguments if isinstance(argument, set | frozenset | list | tuple)]
    return any("CUDA" in str(activity) for activities in sets for activity in activities)


def _settle() -> None:
    """Wait for the kernels launched so far, within reason."""

    def wait() -> None:
        with contextlib.suppress(Exception):
            device.synchronize()

    within(SYNCHRONIZE_PATIENCE_S, wait)
