"""Clocks of a GPU held during a measurement, and given back in every way out.

A lock is written to a file before the clocks are touched and removed after they are given back, so a
process that was killed leaves a file behind, which `nanalyze doctor` finds. Everything goes through
NVML, by the GPU's UUID. Nothing here runs unless it is asked for.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from nanalyze.rundir.errors import RecorderError

MODES = ("none", "base", "boost")
LOCK_DIR = "NANALYZE_LOCK_DIR"
_PREFIX, _SUFFIX = "nanalyze-clocks-", ".json"
# Lock files lie where anyone may write, and what they say is shown: nothing else is taken for a lock.
_UUID, _MODE = re.compile(r"[A-Za-z0-9-]{1,80}"), re.compile(r"[a-z0-9]{1,10}")
_SIGNALS = (signal.SIGTERM, signal.SIGHUP) if hasattr(signal, "SIGHUP") else (signal.SIGTERM,)


def check(mode: Any) -> None:
    """Raise RecorderError unless `mode` is one of MODES or a whole number of MHz."""
    is_mhz = isinstance(mode, int) and not isinstance(mode, bool) and 0 < mode < 100_000
    if mode not in MODES and not is_mhz:
        raise RecorderError(f"clocks={mode!r}: must be {', '.join(map(repr, MODES))} or a number of MHz, such as 1200")


# --- lock files --------------------------------------------------------------------------------


def lock_folder() -> Path:
    """Where lock files lie: one place for all users of a machine, as clocks are the machine's."""
    return Path(os.environ.get(LOCK_DIR) or tempfile.gettempdir())


@dataclass(frozen=True)
class Lock:
    """What a lock file says: whose clocks (`uuid`), held how (`mode`), by which process, since when."""

    path: Path
    uuid: str
    mode: str
    pid: int
    started: str | None
    locked_ns: int

    @property
    def is_stale(self) -> bool:
        """Whether the process that holds the clocks has ended (a later one with its number is another)."""
        if not _is_alive(self.pid):
            return True
        return self.started is not None and _start_of(self.pid) != self.started


def locks() -> list[Lock]:
    """Every lock on this machine, by UUID; files that are no locks are passed over."""
    return [lock for path in sorted(lock_folder().glob(f"{_PREFIX}*{_SUFFIX}")) if (lock := _read(path)) is not None]


def _read(path: Path) -> Lock | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        lock = Lock(
            path, str(found["uuid"]), str(found["mode"]), int(found["pid"]), found["started"], int(found["locked_ns"])
        )
        is_one = _UUID.fullmatch(lock.uuid) and _MODE.fullmatch(lock.mode) and path == _path(lock.uuid)
        return lock if is_one else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's
        return True
    return True


def _start_of(pid: int) -> str | None:
    """When a process started, in the kernel's ticks: tells it from a later one with the same number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _path(uuid: str) -> Path:
    return lock_folder() / f"{_PREFIX}{uuid}{_SUFFIX}"


def _take(uuid: str, mode: str) -> Path:
    """Write the lock file; raises RecorderError where another process that lives has one."""
    path = _path(uuid)
    text = json.dumps(
        {"uuid": uuid, "mode": mode, "pid": os.getpid(), "started": _start_of(os.getpid()), "locked_ns": time.time_ns()}
    )
    held = _read(path)
    if held is not None and not held.is_stale:
        raise RecorderError(f"process {held.pid} holds the clocks of {uuid} ({held.mode}): wait for it, or stop it")
    try:
        path.unlink(missing_ok=True)  # a stale one may be another user's, who alone may remove it
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o644)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise RecorderError(f"{path}: the lock cannot be written: {error.strerror}") from error
    return path


def _nvml() -> Any:
    from cuda.bindings import nvml

    nvml.init_v2()
    return nvml


# --- holding clocks ----------------------------------------------------------------------------


class HeldClocks:
    """Holds the SM clock of one GPU as a context manager; `refusal` says why it is not held, in one line.

    `mode` is "base" (the clock that the power limit always allows), "boost" (the highest), a number of
    MHz, or "none". What cannot be done is told through `say` and the block runs all the same.
    """

    def __init__(self, mode: str | int, uuid: str | None, say: Callable[[str], None], nvml: Any = None) -> None:
        check(mode)
        self.mode = mode
        self.uuid = uuid
        self.refusal: str | None = None
        self.is_held = False
        self._say = say
        self._nvml = nvml
        self._handle: Any = None
        self._path: Path | None = None
        self._pid = os.getpid()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> HeldClocks:
        if self.mode == "none":
            return self
        try:
            self._hold()
        except Exception as error:  # NVML's own errors too: nothing of this may end a measurement
            self.refusal = f"clocks={self.mode!r} is not in effect: {_remedy(error)}"
            self._say(self.refusal)
            self.release()
        return self

    def _hold(self) -> None:
        if self.uuid is None:
            raise RecorderError("it is not known which GPU is meant")
        self._nvml = self._nvml if self._nvml is not None else _nvml()
        self._handle = self._nvml.device_get_handle_by_uuid(self.uuid)
        low, high = self._bounds()
        self._path = _take(self.uuid, str(self.mode))
        atexit.register(self.release)
        self._catch_signals()
        # From here on they count as held: a call that fails half-way, or a signal in it, is undone too.
        self.is_held = True
        self._nvml.device_set_gpu_locked_clocks(self._handle, low, high)

    def _bounds(self) -> tuple[int, int]:
        if self.mode == "base":
            tdp = int(self._nvml.ClockLimitId.TDP)
            return tdp, tdp
        if self.mode == "boost":
            highest = int(self._nvml.device_get_max_clock_info(self._handle, self._nvml.ClockType.CLOCK_SM))
            return highest, highest
        return int(self.mode), int(self.mode)

    def release(self) -> None:
        """Give the clocks back; may be called again, never raises, and does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        atexit.unregister(self.release)
        if self.is_held:
            try:
                self._nvml.device_reset_gpu_locked_clocks(self._handle)
            except Exception as error:
                if self.refusal is None:  # else they were never set
                    self._say(f"the clocks of {self.uuid} could not be given back ({error}): {give_back(self.uuid)}")
                    self._path = None  # the lock stays, for the doctor to find
            self.is_held = False
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._path = None
        self._restore_signals()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _catch_signals(self) -> None:
        """Of those that end a process without Python's say; SIGINT comes as KeyboardInterrupt."""
        for number in _SIGNALS:
            with contextlib.suppress(ValueError):  # not the main thread: the lock file has to do
                self._previous[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number, signal.SIG_DFL)
        self.release()
        if callable(previous):
            previous(number, frame)
        elif previous != signal.SIG_IGN:
            os.kill(os.getpid(), number)  # the default again, so it ends as it would have

    def _restore_signals(self) -> None:
        for number, previous in self._previous.items():
            with contextlib.suppress(ValueError, TypeError):
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        self._previous = {}


def _remedy(error: Exception) -> str:
    if isinstance(error, RecorderError):
        return f"{error}. The measurement goes on, with the clocks recorded"
    if "PERMISSION" in f"{type(error).__name__} {error}".upper().replace(" ", "_"):
        cause = "only root may set clocks (run as root, or have an administrator run nvidia-smi -lgc)"
    else:
        cause = f"NVML refuses ({error})"
    return f"{cause}. The measurement goes on, with the clocks recorded"


def give_back(uuid: str | None) -> str:
    """The command that gives a GPU's clocks back, for messages."""
    return f"nvidia-smi -i {uuid} -rgc"


# --- heat --------------------------------------------------------------------------------------


def await_headroom(
    uuid: str,
    headroom_c: float,
    limit_s: float,
    nvml: Any = None,
    sleep: Callable[[float], None] = time.sleep,
) -> str | None:
    """Wait until the GPU is at least `headroom_c` degrees below its slowdown temperature, at most `limit_s`.

    None when it is; else one line that says what it was at the end, or that it cannot be read.
    """
    try:
        nvml = nvml if nvml is not None else _nvml()
        handle = nvml.device_get_handle_by_uuid(uuid)
        deadline = time.monotonic() + limit_s
        for headroom in _headrooms(nvml, handle):
            if headroom >= headroom_c:
                return None
            if time.monotonic() >= deadline:
                return f"{uuid} has {headroom:g} degrees of headroom after {limit_s:g} s, not {headroom_c:g}"
            sleep(0.5)
    except Exception as error:
        return f"headroom of {uuid} cannot be read: {error}"
    return None


def _headrooms(nvml: Any, handle: Any) -> Iterator[float]:
    while True:
        yield float(nvml.device_get_margin_temperature(handle))
