"""Starts the recorder in a process of a recorded job, at the moment the process turns to CUDA.

Imported by `sitecustomize` beside it, as a top-level module, in every Python process of the job; most
never use CUDA. Hence it imports nothing that Python has not loaded by then (not even `__future__`: the
annotations are quoted instead), and the recorder (with
numpy and pyarrow) only when it starts. Nothing in here may raise into the job.
"""

import _thread
import atexit
import os
import sys

TYPE_CHECKING = False  # as in typing, whose import would take 2 ms in every process
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType
    from typing import Any

# Modules that lead to CUDA. With function names: the recorder starts when one of them is called, for
# modules that are often imported without a GPU being used. Without: when the module is imported.
TRIGGERS: dict[str, tuple[str, ...]] = {
    "torch.cuda": ("_lazy_init",),  # called before the first CUDA tensor, by PyTorch's C++ code too
    "cuda.bindings.driver": ("cuInit",),
    "cuda.bindings.runtime": (),
    "cuda.core": (),
    "cupy": (),
    "jax_plugins.xla_cuda12": (),  # imported when JAX looks for its backends, not with jax itself
    "jax_plugins.xla_cuda13": (),
    "nvidia.dali": (),
    "paddle": (),
    "pycuda.driver": (),
    "rmm": (),
    "tensorflow": (),
    "tensorrt": (),
    "warp": (),
}
# Modules whose NVTX ranges are to be recorded. NVTX asks once, at its first call, where calls are to go, and
# that may be long before CUDA is used. With the attribute through which each call goes; without one, the
# answer must stand when the module is imported.
NVTX = {"torch.cuda.nvtx": "_nvtx", "nvtx": None}
# Everything else in Python reaches CUDA through ctypes (numba, tinygrad, hand-written bindings).
LIBRARIES = ("libcuda.so", "libcudart.so", "nvcuda.dll")

START_PATIENCE_S = 10.0  # for another thread that is starting the recorder; a deadlock would be worse than a loss

_IDLE, _ARMED, _STARTING, _DONE = range(4)
_phase = _IDLE
_armed_pid: int | None = None
_is_without_nanalyze = False
_start_on: frozenset[str] = frozenset()
_lock = _thread.RLock()
_wrapped: "list[tuple[ModuleType, str, Any, Any]]" = []  # module, name, the original, what stands in for it


def arm() -> None:
    """Prepare this process to be recorded as soon as it turns to CUDA; once, whoever asks."""
    global _phase, _armed_pid, _start_on
    is_main = getattr(_thread, "_is_main_interpreter", None)
    if _phase != _IDLE or (is_main is not None and not is_main()):
        return
    try:
        _phase = _ARMED
        _armed_pid = os.getpid()
        _start_on = frozenset(filter(None, os.environ.get("NANALYZE_RECORD_ON", "").split(",")))
        atexit.register(_at_exit)  # the first registered runs last: after the recorder's own
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_in_child)
        sys.meta_path.insert(0, _Finder())
        _forget_parents_nvtx()
        for name in ("ctypes", *TRIGGERS, *NVTX, *_start_on):
            if name in sys.modules:
                _reached(name, sys.modules[name])
    except Exception as error:
        _phase = _DONE
        _say(f"this process is not recorded: {type(error).__name__}: {error}")


def disarm() -> None:
    """Leave this process alone from here on."""
    global _phase
    _phase = _DONE
    _unwrap()


def begin() -> None:
    """Start the recorder here unless that was done; returns when it runs."""
    if _phase in (_IDLE, _DONE) or not _lock.acquire(timeout=START_PATIENCE_S):
        return
    try:
        if _phase == _ARMED:  # else another thread was first, or the recorder itself is loading CUDA
            _start()
    except Exception as error:
        _say(f"this process is not recorded: {type(error).__name__}: {error}")
    finally:
        _lock.release()


def _start() -> None:
    global _phase, _is_without_nanalyze
    _phase = _STARTING
    try:
        if "NANALYZE_RECORD" not in os.environ:  # taken out by the job, so that this process is left alone
            return
        from nanalyze.recorder import launch

        launch.start_here()
    except ModuleNotFoundError as error:
        _is_without_nanalyze = (error.name or "").split(".")[0] == "nanalyze"
        if not _is_without_nanalyze:
            raise
    finally:
        disarm()


# --- noticing CUDA -----------------------------------------------------------------------------


class _Finder:
    """First on sys.meta_path: sees every import by name, finds nothing itself.

    Starts nothing either: `importlib.util.find_spec` is how libraries ask whether another is installed.
    """

    def find_spec(self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None) -> "Any":
        if name not in TRIGGERS and name not in NVTX and name not in _start_on and name != "ctypes":
            return None
        try:
            return self._find(name, path, target)
        except Exception:  # the import goes on with the other finders
            return None

    def _find(self, name: str, path: "Sequence[str] | None", target: "ModuleType | None") -> "Any":
        if _phase not in (_ARMED, _STARTING):
            return None
        spec: Any = None
        for finder in sys.meta_path:
            if finder is not self:
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    break
        else:
            return None
        if hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader:
    """Loads a module as its own loader does; starts the recorder before that, or looks into the module after."""

    def __init__(self, loader: "Any") -> None:
        self._loader = loader

    def create_module(self, spec: "Any") -> "Any":
        if spec.name in NVTX and NVTX[spec.name] is None:
            _prepare_nvtx()
        if not _is_looked_into(spec.name):
            begin()
        return self._loader.create_module(spec)

    def exec_module(self, module: "ModuleType") -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _reached(module.__name__, module)

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._loader, name)


def _is_looked_into(name: str) -> bool:
    """Whether `name` is loaded first and then watched; else its import alone starts the recorder."""
    return name == "ctypes" or ((name in NVTX or bool(TRIGGERS.get(name))) and name not in _start_on)


def _reached(name: str, module: "ModuleType") -> None:
    """`module` is loaded: wait for what it does next, or start."""
    try:
        if name == "ctypes":
            _listen(module)
        elif name in NVTX and name not in _start_on:
            _await_nvtx(module, NVTX[name])
        elif not (_is_looked_into(name) and _watch(name, module)):
            begin()  # also for a version of the library without that function: early is better than never
    except Exception as error:
        _say(f"this process may not be recorded: {type(error).__name__}: {error}")


def _listen(module: "ModuleType") -> None:
    """Hear of libraries that ctypes, `module`, loads.

    By its own function, until the recorder starts. (An audit hook would hear of more, but stays for good, and
    takes 0.4 us at each `id()` and `sys._getframe()`, of which compilers make millions.)
    """
    original: Callable[..., Any] | None = getattr(module, "_dlopen", None)
    if original is None or any(stand_in is original for _, _, _, stand_in in _wrapped):
        return

    def opening(name: "Any", *arguments: "Any") -> "Any":
        if any(library in str(name) for library in LIBRARIES) and not _is_loaded_ahead():
            begin()
        return original(name, *arguments)

    module.__dict__["_dlopen"] = opening
    _wrapped.append((module, "_dlopen", original, opening))


def _is_loaded_ahead() -> bool:
    """Whether PyTorch's import loads the library, as it does since 2.5 in every process, whether it is used or not."""
    frame: Any = sys._getframe(2)  # who called the function that is listened to
    while frame is not None and frame.f_globals.get("__name__") == "ctypes":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "torch"


def _watch(name: str, module: "ModuleType") -> bool:
    """Start the recorder before the next call of a function that leads to CUDA; whether `module` has them."""
    functions = TRIGGERS[name]
    if not all(hasattr(module, function) for function in functions):
        return False
    for function in functions:
        _wrap(module, function)
    return True


def _wrap(module: "ModuleType", name: str) -> None:
    """Start the recorder before the next call of `module.name`; the original is back from then on."""
    from functools import wraps

    original: Callable[..., Any] = getattr(module, name)

    @wraps(original)
    def starting(*args: "Any", **kwargs: "Any") -> "Any":
        if not _is_lost_to_cuda(module):
            begin()
        return original(*args, **kwargs)

    setattr(module, name, starting)
    _wrapped.append((module, name, original, starting))


def _is_lost_to_cuda(module: "ModuleType") -> bool:
    """Whether PyTorch will refuse, since CUDA was in use before this process was forked."""
    try:
        return bool(module._is_in_bad_fork())
    except Exception:  # another library, or a version without that function
        return False


# --- NVTX ----------------------------------------------------------------------------------------


class _Gate:
    """Stands for the module through which all NVTX calls of a library go, until the first of them."""

    def __init__(self, module: "ModuleType", name: str) -> None:
        self._nanalyze = (module, name, getattr(module, name))

    def __getattr__(self, attribute: str) -> "Any":
        module, name, original = self._nanalyze
        if getattr(module, name, None) is self:
            setattr(module, name, original)
            _prepare_nvtx()
        return getattr(original, attribute)


def _await_nvtx(module: "ModuleType", name: "str | None") -> None:
    if name is None:
        _prepare_nvtx()  # it was imported before there was a recorder: in time, if no range was opened yet
    elif hasattr(module, name) and not isinstance(getattr(module, name), _Gate):
        setattr(module, name, _Gate(module, name))


def _prepare_nvtx() -> None:
    """Have NVTX call CUPTI in this process, so that ranges are there when the recorder starts."""
    if _phase != _ARMED:  # the recorder, if it runs, has done so itself
        return
    try:
        import json

        request = json.loads(os.environ["NANALYZE_RECORD"])
        if request.get("nvtx") and "ranges" in request["layers"]:
            from nanalyze.recorder import nvtx

            nvtx.prepare()
    except ModuleNotFoundError:  # a Python without nanalyze
        return
    except Exception as error:
        _say(f"NVTX ranges of this process may not be recorded: {type(error).__name__}: {error}")


def _forget_parents_nvtx() -> None:
    """A child has its own CUPTI, maybe another one than its parent named for NVTX."""
    os.environ.pop("NANALYZE_NVTX_CUPTI", None)
    ours = os.environ.pop("NANALYZE_RECORD_NVTX", None)
    if ours is not None and os.environ.get("NVTX_INJECTION64_PATH") == ours:
        del os.environ["NVTX_INJECTION64_PATH"]


def _unwrap() -> None:
    while _wrapped:
        module, name, original, stand_in = _wrapped.pop()
        if getattr(module, name, None) is stand_in:
            setattr(module, name, original)


# --- forks and the end -------------------------------------------------------------------------


def _in_child() -> None:
    """A forked child has no recorder of its own yet; it gets one when it turns to CUDA itself."""
    global _phase, _lock
    _lock = _thread.RLock()  # a thread that is not in the child may have held it
    if _phase in (_IDLE, _ARMED) or _is_without_nanalyze:
        return
    try:
        _unwrap()
        _phase = _ARMED
        if "ctypes" in sys.modules:
            _listen(sys.modules["ctypes"])
        for name in TRIGGERS:
            if name in sys.modules and _is_looked_into(name):
                _watch(name, sys.modules[name])
    except Exception as error:
        _say(f"this process may not be recorded: {type(error).__name__}: {error}")


def _at_exit() -> None:
    try:
        # Not in forked children: asking a driver that was in use before the fork is not safe.
        if _phase == _ARMED and _armed_pid == os.getpid():
            disarm()  # first: the question itself opens the driver's library
            if _has_context():
                _say(
                    f"process {os.getpid()} used CUDA, but began in a way that was not noticed: it is not recorded. "
                    "Name the module that brings CUDA with --start-on."
                )
        if os.environ.get("NANALYZE_RECORD_PID") == str(os.getpid()):
            _conclude()
    except Exception:  # the last line is a courtesy
        return


def _conclude() -> None:
    import json

    request = json.loads(os.environ["NANALYZE_RECORD"])
    if not request["quiet"]:
        _say(conclusion(request))


def conclusion(request: "dict[str, Any]") -> str:
    """The last line of a job: where the run is and what to do with it."""
    recorded = _partitions(request, "processes") - request["processes"]
    shown, noun = request["shown"], "process" if recorded == 1 else "processes"
    if recorded > 0 and _partitions(request, "kernels") > request["kernels"]:
        return f"recorded {recorded} {noun} into {shown}. Next: nanalyze report {shown}"
    if recorded > 0:
        return f"recorded {recorded} {noun} into {shown}, but no kernels. Next: nanalyze info {shown}"
    if _is_without_nanalyze:
        return f"nothing was recorded, because {sys.executable} has no nanalyze. Install it there."
    if request["delay_s"]:
        return "no process went on for --delay after it turned to CUDA: nothing was recorded"
    return "no process used CUDA, so nothing was recorded"


def _partitions(request: "dict[str, Any]", table: str) -> int:
    """How many processes have written to `table`."""
    try:
        return sum(name.startswith("process=") for name in os.listdir(os.path.join(request["run_dir"], table)))
    except OSError:
        return 0


def _has_context() -> bool:
    """Whether this process holds a primary CUDA context; opens neither library nor context."""
    try:
        with open("/proc/self/maps") as maps:
            path = next((line.split(None, 5)[5].strip() for line in maps if "/libcuda.so" in line), None)
    except OSError:
        return False
    if path is None:
        return False
    import ctypes

    driver = ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
    count, flags, is_active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) != 0:  # not initialised: loaded, but never used
        return False
    for ordinal in range(count.value):
        code = driver.cuDevicePrimaryCtxGetState(ordinal, ctypes.byref(flags), ctypes.byref(is_active))
        if code == 0 and is_active.value:
            return True
    return False


def _say(message: str) -> None:
    """One line on stderr, past its buffer: what cannot be written would stay there and make Python exit with 120."""
    text = f"nanalyze: {message}\n"
    try:
        sys.stderr.flush()
        try:
            place = sys.stderr.fileno()
        except Exception:  # not a file: a notebook's, say
            sys.stderr.write(text)
            return
        os.write(place, text.encode(errors="backslashreplace"))
    except Exception:  # a closed stderr is nobody's problem
        return
