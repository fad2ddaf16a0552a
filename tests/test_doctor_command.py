"""`nanalyze doctor`: each check on a machine that is well and on one that is not, none of them with a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_gpu import CUPTI_PATH, FakeGpu

from nanalyze import commands
from nanalyze.recorder import buffers, diagnose
from nanalyze.recorder import cupti as cu
from nanalyze.recorder.diagnose import NOTE, OK, PROBLEM, Check
from nanalyze.rundir.errors import RecorderError

NANALYZE = str(Path(sys.executable).with_name("nanalyze"))


def run_doctor(*words: str | Path) -> Result:
    return CliRunner().invoke(commands.main, ["doctor", *map(str, words)])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of a machine that is well."""
    files = {
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release\n",
        "proc/driver/nvidia/params": "EnableMSI: 1\nRmProfilingAdminOnly: 0\n",
        "proc/self/status": "CapInh:\t0\nCapEff:\t0000000000000000\n",
        "proc/mounts": f"/dev/sda1 / ext4 rw 0 0\nserver:/x {tmp_path / 'net work'} nfs4 rw 0 0\n".replace(
            "net work", "net\\040work"
        ),
        "proc/12/comm": "python\n",
        "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
    }
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    return tmp_path / "root"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """A machine with one device, a driver for CUDA 13.0 and a CUPTI of the same."""

    def answer(value: int) -> Any:
        def function(place: Any, *_: Any) -> int:
            place._obj.value = value
            return 0

        return function

    def name(buffer: Any, *_: Any) -> int:
        buffer.value = b"NVIDIA H200"
        return 0

    fake = FakeGpu()
    fake.install(monkeypatch)
    monkeypatch.setattr(buffers, "native", object())
    functions = {
        "cuDriverGetVersion": answer(13000),
        "cuInit": lambda flags: 0,
        "cuDeviceGetCount": answer(1),
        "cuDeviceGet": answer(0),
        "cuDeviceGetName": name,
    }
    for function, code in functions.items():
        setattr(fake.driver, function, code)
    for feature in diagnose.CUPTI_FEATURES.values():
        monkeypatch.setattr(fake.cupti.library, feature, object(), raising=False)
    for variable in ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH"):
        monkeypatch.delenv(variable, raising=False)
    yield fake
    fake.close()


def checks(folder: Path, root: Path) -> dict[str, Check]:
    return {check.name: check for check in diagnose.diagnose(folder, root)}


# --- a machine that is well ------------------------------------------------------------------------


def test_a_machine_that_can_record(gpu: FakeGpu, root: Path, tmp_path: Path) -> None:
    found = checks(tmp_path, root)
    assert {check.status for check in found.values()} == {OK}
    assert all(check.remedy is None for check in found.values())
    assert found["driver"].found == "CUDA 13.0, kernel module 580.159.03"
    assert found["devices"].found == "0: NVIDIA H200"
    assert found["cupti"].found.startswith(f"API 130001, {CUPTI_PATH}")
    assert found["counter permission"].found == "the driver grants it to everyone (RmProfilingAdminOnly: 0)"
    assert found["nvml"].found == "GPU driver 580.159.03"
    assert found["other profilers"].found == "none seen"
    assert found["disk"].found.endswith("GB free, ext4")
    assert found["clock"].found.startswith("tsc, ")
    assert [*found] == [
        *("python", "driver", "devices", "cupti", "exact counters", "sampled counters", "callbacks in C"),
        *("counter permission", "other profilers", "nvml", "packages", "disk", "clock"),
    ]


def test_the_command_shows_each_check_and_its_exit_code_is_0_where_all_is_well(
    gpu: FakeGpu, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [Check("driver", OK, "CUDA 13.0"), Check("long name", NOTE, "unknown")]
    monkeypatch.setattr(diagnose, "diagnose", lambda folder: answers)
    done = run_doctor(tmp_path)
    assert (done.exit_code, done.stdout) == (0, "ok       driver     CUDA 13.0\nnote     long name  unknown\n")
    answers.append(Check("disk", PROBLEM, "full\x1b", "free some"))
    done = run_doctor(tmp_path)
    assert done.exit_code == 1
    assert done.stdout.splitlines()[2:] == ["problem  disk       full\\x1b", "                    fix: free some"]
    done = run_doctor(tmp_path, "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)[2] == {
        "name": "disk", "status": "problem", "found": "full\x1b", "remedy": "free some",
    }  # fmt: skip


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="needs a machine without a driver")
def test_without_a_gpu_it_says_what_is_missing(tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NANALYZE")}
    done = subprocess.run(
        [NANALYZE, "doctor", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        check=False,
        env=clean,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (1, "")
    found = {check["name"]: check for check in json.loads(done.stdout)}
    assert found["driver"]["status"] == "problem"
    assert found["driver"]["remedy"].startswith("install the NVIDIA driver; in a container, start it with the GPU")
    assert (found["python"]["status"], found["packages"]["status"], found["disk"]["status"]) == ("ok",) * 3
    assert found["counter permission"]["status"] == "note"
    assert all(check["remedy"] for check in found.values() if check["status"] == "problem")
    assert list(tmp_path.iterdir()) == []


# --- what can be wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize(("function", "found"), [("cuInit", "error 100"), ("cuDeviceGetCount", "error 100")])
def test_a_driver_without_devices(
    gpu: FakeGpu, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, found: str
) -> None:
    monkeypatch.setattr(gpu.driver, function, lambda *_: 100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    check = checks(tmp_path, root)["devices"]
    assert (check.status, check.found) == (PROBLEM, f"the driver answers with {found}")
    assert check.remedy == "check nvidia-smi and CUDA_VISIBLE_DEVICES='7'"


def test_hidden_devices(gpu: FakeGpu, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.driver, "cuDeviceGetCount", lambda place: 0)
    check = checks(tmp_path, root)["devices"]
    assert (check.status, check.found) == (PROBLEM, "none is visible")


@pytest.mark.parametrize(
    ("capabilities", "container", "status", "remedy"),
    [
        ("0000000000000000", None, PROBLEM, "run as root, or the host's administrator writes"),
        ("0000000000000000", ".dockerenv", PROBLEM, "start the container with --cap-add=SYS_ADMIN, or the host's"),
        ("0000000000000000", "run/.containerenv", PROBLEM, "start the container with --cap-add=SYS_ADMIN, or the"),
        ("000001ffffffffff", None, OK, ""),
        ("0000000000200000", ".dockerenv", OK, ""),
        ("000001ffffdfffff", None, PROBLEM, "run as root"),
    ],
)
def test_permission_for_counters(
    root: Path, capabilities: str, container: str | None, status: str, remedy: str
) -> None:
    (root / "proc/driver/nvidia/params").write_text("A: 1\nRmProfilingAdminOnly: 1\n")
    (root / "proc/self/status").write_text(f"CapPrm:\t0\nCapEff:\t{capabilities}\nCapBnd:\t000001ffffffffff\n")
    if container:
        (root / container).parent.mkdir(exist_ok=True)
        (root / container).touch()
    (check,) = diagnose._permission(root)
    assert check.status == status
    assert (check.remedy or "").startswith(remedy)
    assert "RmProfilingAdminOnly: 1" in check.found
    if status == PROBLEM:
        assert "NVreg_RestrictProfilingToAdminUsers=0" in (check.remedy or "")


def test_permission_that_cannot_be_known(root: Path) -> None:
    (root / "proc/driver/nvidia/params").write_text("A: 1\n")
    assert [check.status for check in diagnose._permission(root)] == [NOTE]
    assert [check.status for check in diagnose._permission(root / "absent")] == [NOTE]


def test_other_profilers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for pid, name in ((7, "nv-hostengine"), (40, "nsys"), (41, "nsys-ish")):
        (root / f"proc/{pid}").mkdir()
        (root / f"proc/{pid}/comm").write_text(f"{name}\n")
    monkeypatch.setenv("CUDA_INJECTION64_PATH", "/x.so")
    (check,) = diagnose._holders(root)
    assert check.status == PROBLEM
    assert check.found == (
        "DCGM (nv-hostengine, process 7); Nsight Systems (nsys, process 40); CUDA_INJECTION64_PATH is set"
    )


def test_the_multi_process_service_is_noted(root: Path) -> None:
    for pid, name in ((70, "nvidia-cuda-mps"), (71, "nvidia-cuda-mps"), (72, "nvidia-persiste")):
        (root / f"proc/{pid}").mkdir()
        (root / f"proc/{pid}/comm").write_text(f"{name}\n")
    others, mps = diagnose._holders(root)
    assert (others.status, mps.name, mps.status, mps.remedy) == (OK, "mps", NOTE, None)
    assert mps.found.startswith("CUDA's multi-process service runs (process 70): where processes share a GPU")


def test_no_cupti(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cu, "candidates", lambda: iter(()))
    (check,) = diagnose._cupti()
    assert (check.status, check.found) == (PROBLEM, "libcupti was not found")
    assert (check.remedy or "").startswith("Install it with `pip install nvidia-cuda-cupti` (CUDA 13) or ")


def test_cupti_that_is_there_but_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libcupti.so.2026.1"
    library.touch()
    (tmp_path / "libcupti.so.13").symlink_to(library)
    monkeypatch.setattr(cu, "candidates", lambda: iter([str(tmp_path / "libcupti.so.13"), str(library), "/gone"]))

    def refuse() -> None:
        raise RecorderError("it fails")

    monkeypatch.setattr(cu, "load", refuse)
    (check,) = diagnose._cupti()
    assert check.found == f"{tmp_path / 'libcupti.so.13'} (libcupti.so.2026.1): it fails"
    assert (check.status, check.remedy) == (PROBLEM, "it needs the driver: see there")


def test_other_cuptis_are_named_and_missing_features_are_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("libcupti.so.12", "libcupti.so.13"):
        (tmp_path / name).touch()
    paths = [str(tmp_path / name) for name in ("libcupti.so.13", "libcupti.so.12")]
    monkeypatch.setattr(cu, "candidates", lambda: iter([*paths, "libcupti.so.13"]))
    library = SimpleNamespace(cuptiRangeProfilerEnable=None)
    monkeypatch.setattr(cu, "load", lambda: SimpleNamespace(version=24, path=paths[0], library=library))
    monkeypatch.setattr(diagnose, "_version", {"nvidia-cuda-cupti-cu12": "12.4"}.get)
    chosen, exact, sampled = diagnose._cupti()
    assert chosen.found == f"API 24, {paths[0]}; also found: {paths[1]}; nvidia-cuda-cupti-cu12 12.4"
    assert (chosen.status, exact.status, sampled.status) == (OK, OK, PROBLEM)
    assert "install a newer CUPTI" in (sampled.remedy or "")


def test_a_cupti_that_is_newer_than_the_driver(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.bindings.cuDriverGetVersion = lambda: (0, 12080)  # type: ignore[method-assign]
    cupti = next(diagnose._cupti())
    assert (cupti.status, cupti.name) == (PROBLEM, "cupti")
    assert cupti.found == f"API 130001, {CUPTI_PATH}: is of CUDA 13, the driver of 12.8"
    assert cupti.remedy == "install that of CUDA 12 (pip install nvidia-cuda-cupti-cu12), or a newer driver"
    gpu.bindings.cuDriverGetVersion = lambda: (0, 14000)  # type: ignore[method-assign]
    assert next(diagnose._cupti()).status == OK


def test_nvml_that_does_not_work(gpu: FakeGpu) -> None:
    gpu.nvml.broken.add("init_v2")
    (check,) = diagnose._nvml()
    assert check.status == PROBLEM
    assert check.found.startswith("NVML does not work here (init_v2: NVML_ERROR_NOT_SUPPORTED)")


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnose, "_version", {"nanalyze": "1", "numpy": "2", "pyarrow": "3", "duckdb": "4"}.get)
    (check,) = diagnose._packages()
    assert check.found == "nanalyze 1, numpy 2, pyarrow 3, duckdb 4; not installed: pandas, cuda-bindings"
    assert (check.status, check.remedy) == (PROBLEM, "pip install pandas cuda-bindings")


def test_a_disk_that_is_full_foreign_or_not_there(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net work").mkdir()
    (check,) = diagnose._disk(tmp_path / "net work" / "not yet" / "made", root)
    assert check.status == NOTE
    assert check.found.startswith(f"{tmp_path / 'net work'}: ")
    assert check.found.endswith("GB free, nfs4: a network filesystem; the job does not wait for it")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=200_000_000))
    (check,) = diagnose._disk(tmp_path, root)
    assert (check.status, check.found) == (PROBLEM, f"{tmp_path}: 0.2 GB free, ext4")

    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=200_000_000_000))
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_files=10_000, f_favail=3))
        (check,) = diagnose._disk(tmp_path, root)
        assert check.status == PROBLEM
        assert check.found == f"{tmp_path}: 200.0 GB free, ext4, but no more files can be made"
        patch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_files=0, f_favail=0))  # Btrfs makes them as needed
        (check,) = diagnose._disk(tmp_path, root)
        assert check.status == OK
    released = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(diagnose, "DISK_PATIENCE_S", 0.1)
        patch.setattr(shutil, "disk_usage", lambda _: released.wait(30))
        (check,) = diagnose._disk(tmp_path, root)
        assert (check.status, check.found) == (PROBLEM, f"{tmp_path}: does not answer for 0.1 s")
        released.set()

    def refuse(**_: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(diagnose.tempfile, "TemporaryFile", refuse)
    (check,) = diagnose._disk(tmp_path, root)
    assert (check.status, check.found) == (PROBLEM, f"{tmp_path}: cannot be written: Read-only file system")


def test_the_innermost_mount_counts() -> None:
    mounts = "a / ext4 rw\nb /data xfs rw\nc /data/x lustre rw\nd /database nfs rw\nbroken\n"
    folders = ("/", "/data", "/data/x/y", "/data/xy", "/elsewhere")
    assert [diagnose.filesystem(Path(folder), mounts) for folder in folders] == ["ext4", "xfs", "lustre", "xfs", "ext4"]
    assert diagnose.filesystem(Path("/x"), "") is None


def test_a_slow_clock(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnose, "reading_ns", lambda: 1500.0)
    (root / "sys/devices/system/clocksource/clocksource0/current_clocksource").write_text("hpet\n")
    (check,) = diagnose._clock(root)
    assert (check.status, check.found) == (PROBLEM, "hpet, 1500 ns a reading")


def test_a_reading_of_the_clock_takes_some_nanoseconds() -> None:
    assert 1 < diagnose.reading_ns(3, 100) < 100_000


def test_a_check_that_fails_is_a_line_like_the_others(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise KeyError("x")

    monkeypatch.setattr(diagnose, "_nvml", fail)
    check = checks(tmp_path, root)["nvml"]
    assert (check.status, check.found, check.remedy) == (
        PROBLEM,
        "the check failed: KeyError: 'x'",
        "report this as a bug",
    )
    assert "clock" in checks(tmp_path, root)


def test_looking_inside_a_recorded_job_starts_no_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Doctor loads libcuda through ctypes, which is what the start hook waits for."""
    from nanalyze.recorder import launch

    request = launch.Request(str(tmp_path / "run"), "run")
    done = subprocess.run(
        [NANALYZE, "doctor", str(tmp_path)],
        env=launch.environment(request),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode in (0, 1)
    assert not (tmp_path / "run").exists()


# --- callbacks in C ------------------------------------------------------------------------------


def test_without_callbacks_in_c_it_says_what_that_costs_and_how_to_get_them(
    gpu: FakeGpu, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checks(tmp_path, root)["callbacks in C"] == Check("callbacks in C", OK, "yes")
    monkeypatch.setattr(buffers, "native", None)
    missing = checks(tmp_path, root)["callbacks in C"]
    # A note: recording works without them.
    assert (missing.status, missing.found) == (NOTE, "no: the job waits up to 5 ms for the GIL at each full buffer")
    assert missing.remedy == (
        "install a C compiler and Python's headers (apt-get install gcc python3-dev), then nanalyze anew"
    )
