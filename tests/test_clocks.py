"""Clock control against a fake NVML: held, given back in every way out, and found when it was not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import read_table
from fake_measuring import GPU_UUID, TDP, MeasuringGpu, MeasuringNvml

from nanalyze import recorder
from nanalyze.recorder import clocks, diagnose, measuring
from nanalyze.rundir.errors import RecorderError


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("RANK", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    locks = tmp_path / "locks"
    locks.mkdir()
    monkeypatch.setenv("NANALYZE_LOCK_DIR", str(locks))
    monkeypatch.chdir(tmp_path)
    return locks


@pytest.fixture
def nvml() -> MeasuringNvml:
    return MeasuringNvml([])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[MeasuringGpu]:
    gpu = MeasuringGpu()
    gpu.install(monkeypatch)
    yield gpu
    recorder.stop()
    gpu.close()


def held(mode: Any, nvml: MeasuringNvml, said: list[str] | None = None) -> clocks.HeldClocks:
    return clocks.HeldClocks(mode, GPU_UUID, ([] if said is None else said).append, nvml)


# --- holding -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "bounds"), [("base", (TDP, TDP)), ("boost", (1980, 1980)), (1200, (1200, 1200))])
def test_clocks_are_held_and_given_back(nvml: MeasuringNvml, folder: Path, mode: Any, bounds: tuple[int, int]) -> None:
    with held(mode, nvml) as clock:
        assert clock.is_held
        assert nvml.locked == {0xAA0: bounds}
        (lock,) = clocks.locks()
        assert (lock.uuid, lock.mode, lock.pid, lock.is_stale) == (GPU_UUID, str(mode), os.getpid(), False)
    assert nvml.log == [("lock", *bounds), ("reset",)]
    assert list(folder.iterdir()) == []


def test_none_touches_nothing(folder: Path) -> None:
    class Untouchable:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"NVML was asked for {name}")

    with clocks.HeldClocks("none", GPU_UUID, pytest.fail, Untouchable()) as clock:
        assert not clock.is_held
        assert list(folder.iterdir()) == []


def test_by_default_a_measurement_sets_no_clocks(gpu: MeasuringGpu) -> None:
    recorder.measure({"f": lambda: gpu.run("k")}, repetitions=2, counters=None)
    assert [entry for entry in gpu.log if entry != "k"] == []


def test_an_exception_gives_them_back(nvml: MeasuringNvml, folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt), held("base", nvml):
        raise KeyboardInterrupt
    assert nvml.locked == {}
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("when", ["device_set_gpu_locked_clocks", "device_get_max_clock_info"])
def test_what_nvml_cannot_do_is_said(nvml: MeasuringNvml, folder: Path, when: str) -> None:
    nvml.broken = {when}
    said: list[str] = []
    with held("boost", nvml, said) as clock:
        assert not clock.is_held
    (line,) = said
    assert line.startswith("clocks='boost' is not in effect: NVML refuses (")
    assert line.endswith("The measurement goes on, with the clocks recorded")
    assert list(folder.iterdir()) == []


def test_without_permission_the_measurement_goes_on(gpu: MeasuringGpu, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.nvml.refuses = True
    result = recorder.measure({"f": lambda: gpu.run("k", 70)}, repetitions=2, counters=None, clocks="base")
    assert result.to_wide()["total_ns"].tolist() == [70]
    assert result.to_pandas()["sm_clock_hz"].tolist()[0] == 1_755_000_000
    err = capsys.readouterr().err
    assert err.count("only root may set clocks") == 1
    assert "could not be given back" not in err
    assert "only root" in result.settings["clocks_in_effect"]


def test_a_measurement_holds_them_throughout(gpu: MeasuringGpu) -> None:
    result = recorder.measure(
        {"f": lambda: gpu.run("k")}, repetitions=2, warmup=1, counters=["unit__a.sum"], clocks=1410
    )
    assert gpu.log[0] == ("lock", 1410, 1410)
    assert gpu.log[-1] == ("reset",)
    assert gpu.log[1:-1] == ["k"] * 5
    assert (result.settings["clocks"], result.settings["clocks_in_effect"]) == (1410, "held")


@pytest.mark.parametrize(("ran", "lines"), [(1410, []), (1755, ["clocks=1410: the SM ran at 1755 MHz all the same"])])
def test_another_clock_than_was_asked_for_is_said(gpu: MeasuringGpu, ran: int, lines: list[str]) -> None:
    gpu.nvml.clocks_mhz = [ran]
    result = recorder.measure({"f": lambda: gpu.run("k")}, repetitions=2, counters=None, clocks=1410)
    assert result.warnings == lines


def test_clocks_that_cannot_be_given_back_leave_the_lock(nvml: MeasuringNvml) -> None:
    said: list[str] = []
    with held("base", nvml, said):
        nvml.broken = {"device_reset_gpu_locked_clocks"}
    assert said[0].endswith(f"nvidia-smi -i {GPU_UUID} -rgc")
    assert len(clocks.locks()) == 1


# --- ways out of a process ---------------------------------------------------------------------

CHILD = """
import atexit, os, signal, sys
sys.path.insert(0, {tests!r})
from fake_measuring import GPU_UUID, MeasuringNvml
from nanalyze.recorder import clocks

class Log(list):
    def append(self, entry):
        super().append(entry)
        os.write(1, (str(entry) + "\\n").encode())

nvml = MeasuringNvml(Log())
{before}
held = clocks.HeldClocks("base", GPU_UUID, print, nvml)
held.__enter__()
{end}
"""


def child(end: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = CHILD.format(tests=str(Path(__file__).parent), end=textwrap.dedent(end), before=textwrap.dedent(before))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(5)", 5),
        ("raise SystemExit", 0),
        ("1 / 0", 1),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGHUP)", -signal.SIGHUP),
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
    ],
)
def test_every_way_out_gives_them_back(folder: Path, end: str, code: int) -> None:
    done = child(end)
    assert done.returncode == code
    assert done.stdout.splitlines() == [f"('lock', {TDP}, {TDP})", "('reset',)"]
    assert list(folder.iterdir()) == []


def test_the_jobs_own_handler_still_runs(folder: Path) -> None:
    done = child(
        "os.kill(os.getpid(), signal.SIGTERM); sys.exit(3)",
        before="signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'own handler\\n'))",
    )
    assert done.returncode == 3
    assert done.stdout.splitlines()[1:] == ["('reset',)", "own handler"]


def test_a_forked_child_leaves_them_alone(folder: Path) -> None:
    done = child("""
        if os.fork() == 0:
            held.release()
            os._exit(0)
        os.wait()
        os.write(1, b"child ended\\n")
    """)
    assert done.stdout.splitlines()[1:] == ["child ended", "('reset',)"]


def test_kill_9_leaves_a_lock_that_the_doctor_finds(folder: Path) -> None:
    done = child("os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -signal.SIGKILL
    (lock,) = clocks.locks()
    assert lock.is_stale
    (check,) = [check for check in diagnose.diagnose(folder) if check.name == "clock lock"]
    assert check.status == diagnose.PROBLEM
    assert f"clocks of {GPU_UUID} may still be held (base): process {lock.pid} ended without" in check.found
    assert check.remedy == f"nvidia-smi -i {GPU_UUID} -rgc && rm {lock.path}"


def test_the_doctor_says_nothing_without_locks(folder: Path) -> None:
    assert [check for check in diagnose.diagnose(folder) if check.name == "clock lock"] == []


def test_the_doctor_notes_clocks_that_are_held_now(nvml: MeasuringNvml, folder: Path) -> None:
    with held(900, nvml):
        (check,) = [check for check in diagnose.diagnose(folder) if check.name == "clock lock"]
    assert (check.status, check.remedy) == (diagnose.NOTE, None)
    assert check.found == f"process {os.getpid()} holds the clocks of {GPU_UUID} (900)"


# --- locks -------------------------------------------------------------------------------------


def lock_file(folder: Path, **fields: Any) -> Path:
    path = folder / f"nanalyze-clocks-{GPU_UUID}.json"
    about = {"uuid": GPU_UUID, "mode": "base", "pid": os.getpid(), "started": None, "locked_ns": 1}
    path.write_text(json.dumps({**about, **fields}))
    return path


def test_a_lock_of_a_living_process_is_respected(nvml: MeasuringNvml, folder: Path) -> None:
    path = lock_file(folder, pid=os.getppid())
    said: list[str] = []
    with held("base", nvml, said) as clock:
        assert not clock.is_held
    assert f"process {os.getppid()} holds the clocks of {GPU_UUID} (base): wait for it, or stop it" in said[0]
    assert nvml.log == []
    assert path.exists()


def test_a_stale_lock_is_taken_over(nvml: MeasuringNvml, folder: Path) -> None:
    lock_file(folder, pid=2**22 + 1)
    with held("base", nvml) as clock:
        assert clock.is_held
    assert list(folder.iterdir()) == []


def test_a_later_process_with_the_same_number_is_another(folder: Path) -> None:
    lock_file(folder, started="1")
    assert clocks.locks()[0].is_stale
    lock_file(folder, started=None)
    assert not clocks.locks()[0].is_stale


def test_files_that_are_no_locks_are_passed_over(folder: Path) -> None:
    for number, text in enumerate(("", "[]", "{}", '{"uuid": 1}', "\0")):
        (folder / f"nanalyze-clocks-{number}.json").write_text(text)
    lock_file(folder, mode="base; rm -rf")
    lock_file(folder).rename(folder / "nanalyze-clocks-;date;.json")  # another's name than its own
    lock_file(folder, uuid="\x1b[2J")
    assert clocks.locks() == []


# --- clocks beside times -----------------------------------------------------------------------


@pytest.mark.parametrize("is_long", [False, True])
def test_each_block_has_a_reading_at_its_start_and_a_long_one_at_its_end(
    gpu: MeasuringGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    monkeypatch.setattr(measuring, "READ_EVERY_S", 0.0 if is_long else 1e9)
    recorder.measure({"f": lambda: gpu.run("k")}, [()], repetitions=2, counters=None, run_dir=tmp_path / "run")
    (block,) = [row for row in read_table(tmp_path / "run", "ranges") if row["name"] == "measure"]
    calls = [row for row in read_table(tmp_path / "run", "ranges") if row["name"] == "f"]
    times = [row["time_ns"] for row in read_table(tmp_path / "run", "device_state")]
    inside = [time for time in times if block["start_ns"] <= time <= block["end_ns"]]
    assert any(time < min(call["start_ns"] for call in calls) for time in inside)
    assert any(time > max(call["end_ns"] for call in calls) for time in inside) == is_long


def test_variants_at_other_clocks_are_flagged(gpu: MeasuringGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def at(mhz: int, name: str) -> Any:
        def f() -> None:
            gpu.nvml.clocks_mhz = [mhz]
            gpu.run(name, 100)

        return f

    monkeypatch.setattr("nanalyze.recorder.measuring.READ_EVERY_S", 0.0)
    functions = {"fast": at(1755, "a"), "slow": at(1500, "b")}
    result = recorder.measure(functions, repetitions=40, warmup=0, counters=None)
    clock = result.to_wide().set_index("variant")
    assert list(clock.index) == ["fast", "slow"]
    (line,) = result.warnings
    assert line.startswith("measure, slow: SM clock -14.")
    assert "from that of the first variant: times differ by as much for that alone" in line
    (check,) = [check for check in result.compare("fast", "slow").checks if check.level == "warning"]
    assert check.subject == "SM clock"
    assert check.message.startswith("the SM clock after calls of B is -14.")
    assert [check.level for check in result.compare("slow", "slow").checks if check.subject == "SM clock"] == []


def test_configurations_at_other_clocks_are_flagged(gpu: MeasuringGpu) -> None:
    def f(mhz: int) -> None:
        gpu.nvml.clocks_mhz = [mhz]
        gpu.run("k", 100)

    result = recorder.measure(f, [1980, 1980, 1900], repetitions=2, warmup=1, counters=None)
    (line,) = result.warnings
    assert line == (
        "mhz=1900, f: SM clock -4.0 % from that of the first configuration: times differ by as much for that alone"
    )


def test_throttling_is_named(gpu: MeasuringGpu) -> None:
    gpu.nvml.reasons = 0x4 | 0x20
    result = recorder.measure({"f": lambda: gpu.run("k")}, repetitions=1, counters=None)
    assert result.warnings == ["measure, f: held down by power cap, heat"]


# --- heat --------------------------------------------------------------------------------------


def test_it_waits_for_headroom(nvml: MeasuringNvml) -> None:
    nvml.margins = [5, 9, 20, 50]
    slept: list[float] = []
    assert clocks.await_headroom(GPU_UUID, 15, 60, nvml, slept.append) is None
    assert len(slept) == 2


def test_it_waits_no_longer_than_the_limit(nvml: MeasuringNvml) -> None:
    nvml.margins = [5]
    found = clocks.await_headroom(GPU_UUID, 15, 0.05, nvml, lambda seconds: None)
    assert found == f"{GPU_UUID} has 5 degrees of headroom after 0.05 s, not 15"


def test_headroom_that_cannot_be_read_is_said(nvml: MeasuringNvml) -> None:
    nvml.broken = {"device_get_margin_temperature"}
    found = clocks.await_headroom(GPU_UUID, 15, 60, nvml, pytest.fail)
    assert found is not None
    assert found.startswith(f"headroom of {GPU_UUID} cannot be read: ")


def test_headroom_is_awaited_only_when_asked_for(gpu: MeasuringGpu, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.nvml.margins = [3]
    options: dict[str, Any] = {"repetitions": 1, "counters": None}
    recorder.measure({"f": lambda: gpu.run("k")}, **options)
    assert capsys.readouterr().err == ""
    recorder.measure({"f": lambda: gpu.run("k")}, headroom_c=10, headroom_limit_s=0.01, **options)
    assert "has 3 degrees of headroom after 0.01 s, not 10" in capsys.readouterr().err


def test_check_names_what_is_allowed() -> None:
    for good in ("none", "base", "boost", 1200):
        clocks.check(good)
    for bad in ("1200", 0, -5, 1.5, None, True):
        with pytest.raises(RecorderError, match="must be 'none', 'base', 'boost' or a number of MHz, such as 1200"):
            clocks.check(bad)
