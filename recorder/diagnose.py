"""Looks at everything a recording needs on this machine, and says what is missing and who can change it.

Only reads: no CUDA context is created, nothing is enabled, and every check works without a GPU.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from nanalyze.recorder import buffers, clocks, device
from nanalyze.recorder import cupti as cu
from nanalyze.recorder.patience import result_within
from nanalyze.rundir.errors import RecorderError

OK, PROBLEM, NOTE = "ok", "problem", "note"

LEAST_FREE_BYTES = 1 << 30
LEAST_FREE_FILES = 1000
DISK_PATIENCE_S = 10.0
SLOWEST_CLOCK_NS = 1000.0  # a reading; two are taken for each range
CAP_SYS_ADMIN = 21  # linux/capability.h

PACKAGES = ("nanalyze", "numpy", "pyarrow", "duckdb", "pandas", "cuda-bindings")
CUPTI_PACKAGES = ("nvidia-cuda-cupti", "nvidia-cuda-cupti-cu13", "nvidia-cuda-cupti-cu12")
CUPTI_FEATURES = {"exact counters": "cuptiRangeProfilerEnable", "sampled counters": "cuptiPmSamplingEnable"}
NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "ceph", "fuse.sshfs", "9p", "beegfs")
PROFILERS = {
    "nsys": "Nsight Systems",
    "ncu": "Nsight Compute",
    "nv-hostengine": "DCGM",
    "dcgm-exporter": "DCGM",
    "dcgmi": "DCGM",
}


MPS = "nvidia-cuda-mps"  # the beginning of the names of its control and its server


@dataclass(frozen=True)
class Check:
    """One line of the diagnosis: `status` is ok, problem or note; `remedy` says how to fix a problem."""

    name: str
    status: str
    found: str
    remedy: str | None = None


def diagnose(folder: Path, root: Path = Path("/")) -> list[Check]:
    """Every check, in the order in which they depend on each other; never raises.

    `folder` is where a run would be written. `root` stands for / where /proc and /sys are read.
    """
    checks: dict[str, Callable[[], Iterable[Check]]] = {
        "python": _python,
        "driver": lambda: _driver(root),
        "cupti": _cupti,
        "callbacks in C": _callbacks,
        "counter permission": lambda: _permission(root),
        "other profilers": lambda: _holders(root),
        "nvml": _nvml,
        "clock lock": _clock_locks,
        "packages": _packages,
        "disk": lambda: _disk(folder, root),
        "clock": lambda: _clock(root),
    }
    return [check for name, look in checks.items() for check in _safely(name, look)]


def _safely(name: str, look: Callable[[], Iterable[Check]]) -> list[Check]:
    try:
        return list(look())
    except Exception as error:
        return [Check(name, PROBLEM, f"the check failed: {type(error).__name__}: {error}", "report this as a bug")]


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def cuda_version(number: int) -> str:
    """13000 is 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"


# --- Python ------------------------------------------------------------------------------------


def _python() -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.platform != "linux":
        yield Check("python", PROBLEM, f"{version} on {sys.platform}", "record on Linux; the analysis works here")
        return
    yield Check("python", OK, f"{version}, {sys.executable}")


def _packages() -> Iterator[Check]:
    found = {name: _version(name) for name in PACKAGES}
    missing = [name for name, version in found.items() if version is None]
    text = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    if missing:
        remedy = f"pip install {' '.join(missing)}"
        yield Check("packages", PROBLEM, f"{text}; not installed: {', '.join(missing)}", remedy)
    else:
        yield Check("packages", OK, text)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# --- driver and CUPTI --------------------------------------------------------------------------


def _driver(root: Path) -> Iterator[Check]:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        remedy = "install the NVIDIA driver; in a container, start it with the GPU (docker run --gpus all)"
        yield Check("driver", PROBLEM, f"libcuda.so.1 does not load: {error}", remedy)
        return
    number = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(number))
    kernel = re.search(r"Module[^\n]*?  (\d+\.[\d.]+)", _text(root / "proc/driver/nvidia/version") or "")
    module = f", kernel module {kernel.group(1)}" if kernel else ""
    yield Check("driver", OK, f"CUDA {cuda_version(number.value)}{module}")
    yield from _devices(driver)


def _devices(driver: Any) -> Iterator[Check]:
    code, count = driver.cuInit(0), ctypes.c_int()
    if code == 0:
        code = driver.cuDeviceGetCount(ctypes.byref(count))
    if code:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        remedy = "check nvidia-smi" if hidden is None else f"check nvidia-smi and CUDA_VISIBLE_DEVICES={hidden!r}"
        yield Check("devices", PROBLEM, f"the driver answers with error {code}", remedy)
        return
    names = [_device_name(driver, ordinal) for ordinal in range(count.value)]
    if names:
        yield Check("devices", OK, ", ".join(f"{ordinal}: {name}" for ordinal, name in enumerate(names)))
    else:
        yield Check("devices", PROBLEM, "none is visible", "check nvidia-smi and CUDA_VISIBLE_DEVICES")


def _device_name(driver: Any, ordinal: int) -> str:
    handle, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    driver.cuDeviceGet(ctypes.byref(handle), ordinal)
    driver.cuDeviceGetName(name, len(name), handle)
    return name.value.decode("utf-8", "backslashreplace")


def _cupti() -> Iterator[Check]:
    found = {os.path.realpath(path): path for path in reversed(list(cu.candidates())) if "/" in path}
    libraries = [path for path in reversed(found.values()) if os.path.exists(path)]
    packages = [f"{name} {version}" for name in CUPTI_PACKAGES if (version := _version(name))]
    try:
        chosen = cu.load()
    except RecorderError as error:
        if libraries:
            found_text = f"{', '.join(map(_with_target, libraries))}: {error}"
            yield Check("cupti", PROBLEM, found_text, "it needs the driver: see there")
        else:
            yield Check("cupti", PROBLEM, "libcupti was not found", str(error).partition(". ")[2])
        return
    path = next(cu._loaded(), chosen.path) if "/" not in chosen.path else chosen.path
    others = [_with_target(other) for other in libraries if os.path.realpath(other) != os.path.realpath(path)]
    also = [f"also found: {', '.join(others)}"] if others else []
    text = "; ".join([f"API {chosen.version}, {_with_target(path)}", *also, *packages])
    driver, wanted = device.driver_version(), chosen.version // 10_000 if chosen.version >= 100_000 else 12
    if driver is not None and driver // 1000 < wanted:
        remedy = f"install that of CUDA {driver // 1000} (pip install nvidia-cuda-cupti-cu12), or a newer driver"
        yield Check("cupti", PROBLEM, f"{text}: is of CUDA {wanted}, the driver of {cuda_version(driver)}", remedy)
    else:
        yield Check("cupti", OK, text)
    for name, function in CUPTI_FEATURES.items():
        if hasattr(chosen.library, function):
            yield Check(name, OK, f"CUPTI {chosen.version} has them")
        else:
            remedy = "install a newer CUPTI (pip install -U nvidia-cuda-cupti), or record without them"
            yield Check(name, PROBLEM, f"CUPTI {chosen.version} has none", remedy)


def _callbacks() -> Iterator[Check]:
    """Whether CUPTI's callbacks are in C; in Python each full buffer costs the job a wait for the GIL."""
    if buffers.native is not None:
        yield Check("callbacks in C", OK, "yes")
        return
    remedy = "install a C compiler and Python's headers (apt-get install gcc python3-dev), then nanalyze anew"
    yield Check("callbacks in C", NOTE, "no: the job waits up to 5 ms for the GIL at each full buffer", remedy)


def _with_target(path: str) -> str:
    """The path, and the file behind it, whose name has the version."""
    target = os.path.basename(os.path.realpath(path))
    return path if target == os.path.basename(path) else f"{path} ({target})"


def _nvml() -> Iterator[Check]:
    devices = device.Devices()
    if devices.missing:
        yield Check("nvml", PROBLEM, devices.missing, "see driver; clocks and power are missing from runs until then")
    else:
        yield Check("nvml", OK, f"GPU driver {devices.gpu_driver_version()}")


def _clock_locks() -> Iterator[Check]:
    """Clocks that a measurement holds, or that one which was killed may have left held; nothing where none is."""
    for lock in clocks.locks():
        if lock.is_stale:
            found = (
                f"clocks of {lock.uuid} may still be held ({lock.mode}): "
                f"process {lock.pid} ended without giving them back"
            )
            yield Check("clock lock", PROBLEM, found, f"{clocks.give_back(lock.uuid)} && rm {lock.path}")
        else:
            yield Check("clock lock", NOTE, f"process {lock.pid} holds the clocks of {lock.uuid} ({lock.mode})")


# --- permission --------------------------------------------------------------------------------


def _permission(root: Path) -> Iterator[Check]:
    """Whether this process may read hardware counters; the timeline needs no permission."""
    name = "counter permission"
    parameters = _text(root / "proc/driver/nvidia/params")
    if parameters is None:
        yield Check(name, NOTE, "unknown: there is no NVIDIA kernel module to ask")
        return
    restricted = re.search(r"^RmProfilingAdminOnly:\s*(\d+)", parameters, re.MULTILINE)
    if restricted is None:
        yield Check(name, NOTE, "unknown: the kernel module does not say (RmProfilingAdminOnly)")
    elif restricted.group(1) == "0":
        yield Check(name, OK, "the driver grants it to everyone (RmProfilingAdminOnly: 0)")
    elif _has_capability(root, CAP_SYS_ADMIN):
        yield Check(name, OK, "the driver asks for CAP_SYS_ADMIN (RmProfilingAdminOnly: 1), and this process has it")
    else:
        yield Check(
            name,
            PROBLEM,
            "the driver asks for CAP_SYS_ADMIN (RmProfilingAdminOnly: 1), and this process lacks it: timeline only",
            _how_to_permit(root),
        )


def _has_capability(root: Path, number: int) -> bool:
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", _text(root / "proc/self/status") or "", re.MULTILINE)
    return found is not None and bool(int(found.group(1), 16) >> number & 1)


def _how_to_permit(root: Path) -> str:
    everyone = (
        "the host's administrator writes `options nvidia NVreg_RestrictProfilingToAdminUsers=0` "
        "into /etc/modprobe.d/nvidia-profiling.conf and reboots"
    )
    if (root / ".dockerenv").exists() or (root / "run/.containerenv").exists():
        return f"start the container with --cap-add=SYS_ADMIN, or {everyone}"
    return f"run as root, or {everyone}"


def _holders(root: Path) -> Iterator[Check]:
    """Others who may hold the counters; only processes that this user can see."""
    running, services = {}, []
    for path in (root / "proc").glob("[0-9]*/comm"):
        name = (_text(path) or "").strip()
        if name in PROFILERS:
            running[int(path.parent.name)] = f"{PROFILERS[name]} ({name}, process {path.parent.name})"
        if name.startswith(MPS):
            services.append(int(path.parent.name))
    injected = [name for name in ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH") if os.environ.get(name)]
    found = [*(running[pid] for pid in sorted(running)), *(f"{name} is set" for name in injected)]
    if found:
        remedy = "stop it while recording counters: one profiler at a time may hold them"
        yield Check("other profilers", PROBLEM, "; ".join(found), remedy)
    else:
        yield Check("other profilers", OK, "none seen")
    if services:
        text = f"CUDA's multi-process service runs (process {min(services)}): where processes share a GPU, its counters"
        yield Check("mps", NOTE, f"{text} are of all of them together")


# --- disk and clock ----------------------------------------------------------------------------


def _disk(folder: Path, root: Path) -> Iterator[Check]:
    """Whether a run can be written to `folder`; a file system that stands still would hold up a job's start."""
    try:
        yield from result_within(DISK_PATIENCE_S, lambda: _safely("disk", lambda: _disk_in_time(folder, root)))
    except TimeoutError:
        found = f"{folder.absolute()}: does not answer for {DISK_PATIENCE_S:g} s"
        yield Check("disk", PROBLEM, found, "check the mount, or choose another file system with -o")


def _disk_in_time(folder: Path, root: Path) -> Iterator[Check]:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        remedy = "choose a directory that you can write to: nanalyze doctor DIR, nanalyze record -o DIR"
        yield Check("disk", PROBLEM, f"{existing}: cannot be written: {error.strerror}", remedy)
        return
    free = shutil.disk_usage(existing).free
    kind = filesystem(existing, _text(root / "proc/mounts") or "")
    found = f"{existing}: {free / 1e9:,.1f} GB free" + (f", {kind}" if kind else "")
    if free < LEAST_FREE_BYTES:
        yield Check("disk", PROBLEM, found, "free some space, or choose another directory with -o")
    elif not _has_inodes(existing):
        remedy = "remove some files there, or choose another directory with -o"
        yield Check("disk", PROBLEM, f"{found}, but no more files can be made", remedy)
    elif kind in NETWORK_FILESYSTEMS:
        yield Check("disk", NOTE, f"{found}: a network filesystem; the job does not wait for it")
    else:
        yield Check("disk", OK, found)


def _has_inodes(folder: Path) -> bool:
    """Whether a thousand files more fit; file systems that make them as needed tell of none at all."""
    about = os.statvfs(folder)
    return not about.f_files or about.f_favail >= LEAST_FREE_FILES


def filesystem(folder: Path, mounts: str) -> str | None:
    """The type of the filesystem that `folder` is on, by a table such as /proc/mounts."""
    best: tuple[int, str] | None = None
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        if folder.is_relative_to(point) and (best is None or len(point) >= best[0]):
            best = (len(point), fields[2])
    return None if best is None else best[1]


def _clock(root: Path) -> Iterator[Check]:
    """Ranges take two readings of the clock each; a slow source (hpet, acpi_pm) makes them dear."""
    source = (_text(root / "sys/devices/system/clocksource/clocksource0/current_clocksource") or "").strip()
    cost = reading_ns()
    found = f"{source or 'unknown source'}, {cost:.0f} ns a reading"
    if cost > SLOWEST_CLOCK_NS:
        remedy = "boot with clocksource=tsc, or expect ranges to cost that much twice each"
        yield Check("clock", PROBLEM, found, remedy)
    else:
        yield Check("clock", OK, found)


def reading_ns(rounds: int = 20, readings: int = 1000) -> float:
    """What `time.time_ns()` costs here: the best of `rounds` means."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter_ns()
        for _ in range(readings):
            time.time_ns()
        best = min(best, (time.perf_counter_ns() - start) / readings)
    return best
