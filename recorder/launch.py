"""Recording an unmodified job: what its processes are told, how the command becomes the job, how each starts.

The request travels in environment variables, so it reaches children however they are started:

    NANALYZE_RECORD      the request, as JSON
    NANALYZE_RECORD_ON   modules whose import starts the recorder
    NANALYZE_RECORD_PID  the job's first process, which says the last line
    PYTHONPATH           the folder of the start hook, before what was there

The start hook calls `start_here` in each process that turns to CUDA.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import select
import shlex
import shutil
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nanalyze.recorder import identity
from nanalyze.recorder.patience import result_within
from nanalyze.rundir import runfile
from nanalyze.rundir.errors import RecorderError, RunError

if TYPE_CHECKING:
    from nanalyze.recorder.settings import Settings

REQUEST = "NANALYZE_RECORD"
START_ON = "NANALYZE_RECORD_ON"
FIRST_PID = "NANALYZE_RECORD_PID"
HOOK_DIR = Path(__file__).parent / "start_hook"

NOT_FOUND = 127  # as shells answer for a command that does not exist
NOT_EXECUTABLE = 126

PYTHON = re.compile(r"(python|pypy)[0-9.]*t?")

CLAIM_PATIENCE_S = 30.0  # longer than a recorder's: no job waits yet
SETTLE_PATIENCE_S = 30.0  # a recording that a timer is just ending takes at most a flush and a synchronisation
_LAST = -1_000_000  # among the finalizers that multiprocessing runs at a child's end


class CommandError(RecorderError):
    """The job's command cannot be started; `exit_code` is the shell's for that case."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Request:
    """How a job is to be recorded. `exact` and `samples` are the arguments of the classes of that name.

    `shown` is the run directory as the user would type it; `processes` and `kernels` count the partitions
    that it held before. The start hook reads these itself for the last line.
    """

    run_dir: str
    shown: str
    layers: tuple[str, ...] = ("timeline", "ranges", "device_state")
    flush_s: float = 5.0
    timestamps: str = "host"
    launch_times: bool = True
    nvtx: bool = True
    copies: bool = True
    memsets: bool = False
    overhead_pct: float = 1.0
    pause_pct: float = 1.0
    exact: Mapping[str, Any] | None = None
    samples: Mapping[str, Any] | None = None
    start_on: tuple[str, ...] = ()
    delay_s: float | None = None
    duration_s: float | None = None
    quiet: bool = False
    processes: int = 0
    kernels: int = 0

    def check(self) -> None:
        """Raises RecorderError for wrong settings."""
        if self.delay_s is not None and not 0 <= self.delay_s < threading.TIMEOUT_MAX:
            raise RecorderError(f"delay_s={self.delay_s!r}: must be 0 seconds or more")
        if self.duration_s is not None and not 0 < self.duration_s < threading.TIMEOUT_MAX:
            raise RecorderError(f"duration_s={self.duration_s!r}: must be above 0 seconds")
        if self.flush_s > threading.TIMEOUT_MAX:
            raise RecorderError(f"flush_s={self.flush_s!r}: is longer than any job. Give some seconds.")
        plain = Request(self.run_dir, self.shown)
        names = ("layers", "flush_s", "timestamps", "overhead_pct", "pause_pct", "exact", "samples")
        if any(getattr(self, name) != getattr(plain, name) for name in names):  # else numpy's import is spared
            self.settings()

    def settings(self) -> Settings:
        """The recorder's settings; raises RecorderError for wrong ones."""
        from nanalyze.recorder.exact import Exact
        from nanalyze.recorder.samples import Samples
        from nanalyze.recorder.settings import Settings

        return Settings(
            layers=self.layers,
            flush_s=self.flush_s,
            exact=None if self.exact is None else Exact(**self.exact),
            samples=None if self.samples is None else Samples(**self.samples),
            append=True,  # `claim` has looked; every process of the job adds to what the first one made
            timestamps=self.timestamps,
            launch_times=self.launch_times,
            nvtx=self.nvtx,
            copies=self.copies,
            memsets=self.memsets,
            overhead_pct=self.overhead_pct,
            pause_pct=self.pause_pct,
        )

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str) -> Request:
        fields = json.loads(text)
        return Request(**{**fields, "layers": tuple(fields["layers"]), "start_on": tuple(fields["start_on"])})


# --- before the job ----------------------------------------------------------------------------


def default_run_dir(command: Sequence[str]) -> str:
    """`run-<date>-<job>`; the processes that a launcher started together get the same name, without the date."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", job_name(command))
    job = identity.job()
    if job and identity.rank() is not None:
        return "-".join(["run", *(re.sub(r"[^A-Za-z0-9_.-]", "_", part) for part in job.values() if part), name])
    base = f"run-{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    names = (base if number == 1 else f"{base}-{number}" for number in range(1, 1_000_000))
    return next(name for name in names if not os.path.lexists(name))


def job_name(command: Sequence[str]) -> str:
    """The script or module that `command` runs, else its program: short, for a file name."""
    for before, word in zip(["", *command], command, strict=False):
        if before == "-m":
            return word
        if word.endswith((".py", ".pyz")):
            return Path(word).stem
    return Path(command[0]).stem or "job"


def claim(run_dir: Path, *, append: bool, force: bool) -> tuple[int, int]:
    """Check that the job may record into `run_dir`, and clear it if `force`; partitions it holds already.

    (Of `processes` and of `kernels`.) Raises RunError for a directory that holds a run, unless it is
    one of the same parallel launch, or anything else, or that cannot be written, or does not answer.
    """
    try:
        replaced = result_within(CLAIM_PATIENCE_S, lambda: _make_room(run_dir, append=append, force=force))
    except TimeoutError:
        raise RunError(
            f"{run_dir}: does not answer for {CLAIM_PATIENCE_S:g} s. Choose another file system with -o."
        ) from None
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)
    return partitions(run_dir, "processes"), partitions(run_dir, "kernels")


def _make_room(run_dir: Path, *, append: bool, force: bool) -> Path | None:
    """The checks of `claim`; a run that is to be replaced has the name returned from then on."""
    try:
        holds_something = run_dir.is_dir() and any(run_dir.iterdir())
        if run_dir.exists() and not run_dir.is_dir():
            raise RunError(f"{run_dir}: is a file. Choose another directory with -o.")
    except OSError as error:
        raise RunError(f"{run_dir}: cannot be read: {error.strerror}. Choose another directory with -o.") from error
    replaced = None
    if holds_something:
        if not (run_dir / runfile.RUN_FILE).exists():
            raise RunError(f"{run_dir}: exists and is not a run. Choose another directory with -o.")
        if not (append or _is_of_this_launch(run_dir)):
            if not force:
                raise RunError(
                    f"{run_dir}: already holds a run. Use --append to add to it, --force to replace it, "
                    "or choose another directory with -o."
                )
            replaced = _set_aside(run_dir)
    _check_writable(run_dir)
    return replaced


def _is_of_this_launch(run_dir: Path) -> bool:
    job = identity.job()
    if not job or identity.rank() is None:
        return False
    return bool(runfile.read(run_dir).get("settings", {}).get("job") == job)


def _set_aside(run_dir: Path) -> Path:
    """Give a run that is to be removed another name: it is out of the way at once, however long the deleting takes."""
    aside = run_dir.with_name(f".{run_dir.name}.{uuid.uuid4().hex[:12]}.replaced")
    try:
        os.rename(run_dir, aside)
    except OSError as error:
        raise RunError(f"{run_dir}: cannot be replaced: {error.strerror}. Choose another with -o.") from error
    return aside


def _check_writable(run_dir: Path) -> None:
    folder = next((path for path in (run_dir, *run_dir.parents) if path.exists()), Path("/"))
    if not folder.is_dir():
        raise RunError(f"{folder}: is a file. Choose another directory with -o.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RunError(f"{folder}: cannot be written. Choose another directory with -o.")


def partitions(run_dir: Path, table: str) -> int:
    """How many processes have written to `table`."""
    try:
        return sum(name.startswith("process=") for name in os.listdir(run_dir / table))
    except OSError:
        return 0


def resolve(words: Sequence[str], *, is_exact: bool) -> list[str]:
    """The command that runs the job: a script or `-m module` gets this Python before it, unless `is_exact`.

    Raises CommandError for a program that does not exist or cannot be run.
    """
    first = words[0]
    if not is_exact and (first == "-m" or first.endswith((".py", ".pyz"))):
        if first == "-m" and len(words) < 2:
            raise CommandError("-m: names no module. Give one, such as: nanalyze record -m package.train", NOT_FOUND)
        if first != "-m" and not os.path.exists(first):
            raise CommandError(f"{first}: does not exist. Give a script, -m MODULE or -- COMMAND.", NOT_FOUND)
        return [sys.executable, *words]
    if shutil.which(first) is None:
        if os.path.isfile(first):
            raise CommandError(
                f"{first}: is not executable. For a Python script: nanalyze record python {shlex.quote(first)}",
                NOT_EXECUTABLE,
            )
        raise CommandError(f"{first}: no such command. Give a script, -m MODULE or -- COMMAND.", NOT_FOUND)
    return list(words)


def is_python(command: Sequence[str]) -> bool:
    """Whether the program of `command` is Python or a script for it, so that the start hook runs in it."""
    if PYTHON.fullmatch(os.path.basename(command[0])):
        return True
    try:
        with open(shutil.which(command[0]) or command[0], "rb") as file:
            start = file.read(512)
    except OSError:
        return False
    first, _, rest = start.partition(b"\n")
    # pip's scripts start with a shell where the interpreter's path is too long or has a space.
    return first.startswith(b"#!") and (b"python" in first or rest.startswith(b"'''exec'"))


def ignores_environment(command: Sequence[str]) -> str | None:
    """The option by which Python would not load the start hook, if `command` has one: -E, -I or -S."""
    if not PYTHON.fullmatch(os.path.basename(command[0])):
        return None
    words = iter(command[1:])
    for word in words:
        if not word.startswith("-") or word.startswith("--") or word == "-":
            return None
        flags = re.match(r"[^cmWX]*", word[1:])
        found = set("EIS") & set(flags.group() if flags else "")
        if found:
            return f"-{min(found)}"
        if re.search("[cm]", word[1:]):
            return None
        if word in ("-W", "-X"):
            next(words, None)
    return None


def environment(request: Request) -> dict[str, str]:
    """The environment of the job: what this process was given, and the request."""
    variables = dict(os.environ)
    if "LC_CTYPE" in variables and not _was_given("LC_CTYPE"):
        del variables["LC_CTYPE"]  # Python sets it in a C locale (PEP 538): not for programs that are not Python
    others = [entry for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry != str(HOOK_DIR)]
    # An empty entry would mean the current directory.
    variables["PYTHONPATH"] = os.pathsep.join([str(HOOK_DIR), *(others if any(others) else [])])
    variables[REQUEST] = request.dumps()
    variables[START_ON] = ",".join(request.start_on)
    variables[FIRST_PID] = str(os.getpid())
    return variables


def _was_given(name: str) -> bool:
    try:
        given = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return True
    return any(variable.startswith(f"{name}=".encode()) for variable in given)


def become(command: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Turn this process into the job. Raises CommandError where the system cannot run it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    failed = None if is_python(command) else _watch_from_beside(Request.loads(variables[REQUEST]))
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and the job would inherit that
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), dict(variables))
    except OSError as error:
        if failed is not None:
            os.write(failed, b"x")
        raise CommandError(f"{command[0]}: cannot be run: {error.strerror}.", NOT_EXECUTABLE) from error


def _watch_from_beside(request: Request) -> int | None:
    """Say the last line of a job whose first process runs no start hook, when that process has ended.

    From a process that is neither the job's child nor of its session, and has none of its files but stderr.
    Returns a descriptor to write to if the job does not come about; exec closes it.
    """
    job = os.getpid()
    if request.quiet or job == 1 or not hasattr(os, "pidfd_open"):  # process 1 would adopt it
        return None
    try:
        ended = os.pidfd_open(job)
        fate, failed = os.pipe()
        between = os.fork()
    except OSError:
        return None
    if between:
        os.close(ended)
        os.close(fate)
        os.waitpid(between, 0)
        return failed
    try:
        os.close(failed)
        os.setsid()
        if os.fork() == 0:
            _wait_and_say(ended, fate, request)
    finally:
        os._exit(0)


def _wait_and_say(ended: int, fate: int, request: Request) -> None:
    from nanalyze.recorder.start_hook import nanalyze_start_hook

    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    others = sorted({ended, fate, 2})
    for low, high in zip([2, *others], [*others, os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, high)
    os.chdir("/")  # so that no filesystem is kept busy
    if os.read(fate, 1):
        return
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.poll()
    os.write(2, f"nanalyze: {nanalyze_start_hook.conclusion(asdict(request))}\n".encode(errors="backslashreplace"))


# --- in the job's processes --------------------------------------------------------------------


def start_here() -> None:
    """Start recording in this process as NANALYZE_RECORD asks; the start hook calls it. Never harms the job."""
    own = sys.modules.get("nanalyze.recorder.session")
    from nanalyze import recorder
    from nanalyze.recorder.session import warn

    if own is not None and (recorder._active is None or not recorder._active.is_stopped):
        warn(f"process {os.getpid()} records itself, so `nanalyze record` leaves it to that")
        return
    request = Request.loads(os.environ[REQUEST])
    settings = request.settings()
    if not request.delay_s:
        _record(request, settings)
    else:
        _later(request.delay_s, _record_or_say_why, request, settings)


def _record(request: Request, settings: Settings) -> None:
    from nanalyze import recorder

    chosen = {name: getattr(settings, name) for name in settings.__dataclass_fields__}
    recording = recorder.start(request.run_dir, **chosen)
    recorder._is_whole_process = True
    _at_the_end_of_a_worker(recording.stop, "exit")
    if request.duration_s is not None:
        _later(request.duration_s, recording.stop, "stop")


def _record_or_say_why(request: Request, settings: Settings) -> None:
    """For a thread of its own, where nobody else would catch an error."""
    from nanalyze.recorder.session import warn

    try:
        _record(request, settings)
    except Exception as error:
        warn(f"this process is not recorded: {type(error).__name__}: {error}")


def _later(seconds: float, work: Callable[..., object], *arguments: object) -> None:
    """Do `work` on a thread of its own after so long, unless the process ends before."""
    timer = threading.Timer(seconds, work, arguments)
    timer.daemon = True
    timer.name = "nanalyze-timer"
    try:
        timer.start()
    except RuntimeError as error:  # the limit of processes; the job goes on all the same
        raise RecorderError(f"--delay and --duration need a thread, which cannot start: {error}") from error
    atexit.register(_settle, timer, os.getpid())
    _at_the_end_of_a_worker(_settle, timer, os.getpid())


def _settle(timer: threading.Timer, pid: int) -> None:
    """At the end of the process: call `timer` off, or wait until what it began is written."""
    from nanalyze import recorder

    if os.getpid() != pid:  # a forked child has neither the thread nor the recording
        return
    timer.cancel()
    timer.join(SETTLE_PATIENCE_S)
    if recorder._active is not None:  # started too late for the exit handler of its own
        recorder._active.stop("exit")


def _at_the_end_of_a_worker(work: Callable[..., object], *arguments: object) -> None:
    """A child that multiprocessing forked ends in os._exit, past atexit, but runs finalizers of its own."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None and getattr(sys.modules.get("multiprocessing.process"), "parent_process", lambda: None)():
        util.Finalize(None, work, args=arguments, exitpriority=_LAST)
