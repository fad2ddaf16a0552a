"""Real file systems that fill up, become read-only or limit a file's size, and kills at every step of the writing."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import final_process, read_table

import nanalyze.analysis as na
from nanalyze.rundir.errors import RunError

TESTS = Path(__file__).parent

PRELUDE = f"""
import glob, json, os, resource, shutil, signal, subprocess, sys, time
sys.path.append({str(TESTS)!r})
import pytest
from fake_gpu import FakeGpu
from nanalyze import recorder
gpu = FakeGpu()
gpu.install(pytest.MonkeyPatch())
run_dir = sys.argv[1]
def launch(count):
    for _ in range(count):
        gpu.launch("k" * 200)
        gpu.cupti.log.clear()
    gpu.cupti.settle()
def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
"""


def run(program: str, run_dir: Path, *before: str) -> tuple[int, str, str]:
    words = [*before, sys.executable, "-W", "ignore", "-c", PRELUDE + textwrap.dedent(program), str(run_dir)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout, done.stderr


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    trial = ["unshare", "-Urm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(trial, capture_output=True, check=False).returncode == 0


needs_mount = pytest.mark.skipif(not can_mount(), reason="needs user namespaces, to mount a small disk")


def kept(out: Path) -> Path:
    """The run as the job has copied it from its disk, which is gone with the job."""
    return out / "kept"


@needs_mount
def test_a_disk_that_is_really_full_and_then_is_not(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    code, out, error = run(
        """
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", run_dir], check=True)
        recorder.start(run_dir + "/run", flush_s=0.1)
        launch(20)
        until(lambda: glob.glob(run_dir + "/run/kernels/*/[0-9]*.parquet"))
        with open(run_dir + "/filler", "wb", buffering=0) as file:
            try:
                while file.write(b"x" * 4096):
                    pass
            except OSError as refusal:
                print(refusal.strerror)
        launch(30)
        time.sleep(0.5)
        print(sorted(os.path.basename(name) for name in glob.glob(run_dir + "/run/kernels/*/.*")))
        os.remove(run_dir + "/filler")
        launch(1)
        recorder.stop()
        shutil.copytree(run_dir + "/run", run_dir + "/../kept")
        print("done", len(gpu.launches))
        sys.exit(5)
        """,
        tmp_path / "disk",
        "unshare",
        "-Urm",
    )
    assert (code, out) == (5, "No space left on device\n[]\ndone 51\n")
    said = f"nanalyze: {tmp_path}/disk/run: cannot write (No space left on device); recording goes on in memory\n"
    assert error == said
    assert len(read_table(kept(tmp_path), "kernels")) == 51
    assert final_process(kept(tmp_path))["records_lost"] == 0
    with na.open(kept(tmp_path)) as opened:
        assert opened.damage_count == 0


@needs_mount
def test_a_disk_that_becomes_read_only(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    code, out, error = run(
        """
        subprocess.run(["mount", "-t", "tmpfs", "none", run_dir], check=True)
        recorder.start(run_dir + "/run", flush_s=0.1)
        launch(20)
        until(lambda: glob.glob(run_dir + "/run/kernels/*/[0-9]*.parquet"))
        subprocess.run(["mount", "-o", "remount,ro", run_dir], check=True)
        launch(30)
        time.sleep(0.3)
        recorder.stop()
        shutil.copytree(run_dir + "/run", run_dir + "/../kept")
        print("done")
        """,
        tmp_path / "disk",
        "unshare",
        "-Urm",
    )
    assert (code, out) == (0, "done\n")
    said = f"nanalyze: {tmp_path}/disk/run: cannot write (Read-only file system); recording goes on in memory\n"
    assert error == said
    assert len(read_table(kept(tmp_path), "kernels")) == 20
    with na.open(kept(tmp_path)) as opened:
        assert int(opened.sql("SELECT count(*) AS n FROM kernels")["n"][0]) == 20


def test_a_limit_of_the_size_of_files_is_no_signal_to_the_job(tmp_path: Path) -> None:
    """SIGXFSZ would end a process; Python ignores it, and the write fails, as it does beyond a quota."""
    code, out, error = run(
        """
        recorder.start(run_dir, flush_s=0.1)
        launch(20)
        until(lambda: glob.glob(run_dir + "/kernels/*/[0-9]*.parquet"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        launch(30)
        time.sleep(0.3)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        recorder.stop()
        print("done")
        """,
        tmp_path / "run",
    )
    assert (code, out) == (0, "done\n")
    assert error == f"nanalyze: {tmp_path}/run: cannot write (File too large); recording goes on in memory\n"
    assert len(read_table(tmp_path / "run", "kernels")) == 50
    assert not list((tmp_path / "run").rglob(".*.tmp"))


# --- kill -9 -----------------------------------------------------------------------------------------

# One process forks a job for each step at which it is killed; the jobs import what writes, their parent does not.
KILLED = f"""
import json, os, signal, sys, time, warnings
warnings.simplefilter("ignore")
sys.path.append({str(TESTS)!r})
out, every = sys.argv[1], int(sys.argv[2])

def job(run_dir, number):
    import pytest
    from fake_gpu import FakeGpu
    from nanalyze import recorder
    gpu = FakeGpu()
    gpu.install(pytest.MonkeyPatch())
    steps = [0]
    def count(event, details):
        changes = event in ("os.mkdir", "os.rename", "os.remove", "os.link") or (
            event == "open" and isinstance(details[1], str) and "w" in details[1])
        if changes and run_dir in str(details[0]):
            steps[0] += 1
            if steps[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)
    recording = recorder.start(run_dir, flush_s=1e6)
    flushed = 0
    for _ in range(3):
        with recorder.annotate("step"):
            for _ in range(5):
                gpu.launch("k")
        gpu.cupti.settle()
        with recording._tick_lock:
            recording._work(tick=True, flush=True)
        flushed += 5
        with open(out + f"/{{number}}.json", "x" if flushed == 5 else "a") as file:
            file.write(json.dumps(flushed) + "\\n")
    recording.stop()
    os._exit(0)

for number in range(1, 1000, every):
    pid = os.fork()
    if pid == 0:
        try:
            job(f"{{out}}/run-{{number}}", number)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code != -signal.SIGKILL:
        sys.exit(code)
"""


def test_kill_9_at_any_step_of_the_writing_costs_at_most_what_was_not_flushed(tmp_path: Path) -> None:
    """Of about 50 steps every fourth; the last job ends by itself. What was flushed before the kill is all there."""
    words = [sys.executable, "-c", KILLED, str(tmp_path), "4"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    runs = sorted(tmp_path.glob("run-*"), key=lambda path: int(path.name[4:]))
    assert len(runs) > 10
    counts = []
    for run_dir in runs:
        note = tmp_path / f"{run_dir.name[4:]}.json"
        flushed = int(json.loads(note.read_text().splitlines()[-1])) if note.exists() else 0
        if not list(run_dir.rglob("[0-9]*.parquet")):
            assert flushed == 0
            with pytest.raises(RunError):
                na.open(run_dir)
            continue
        with na.open(run_dir) as opened:
            counts.append(int(opened.sql("SELECT count(*) AS n FROM kernels")["n"][0]))
            assert opened.damage_count == 0
            assert flushed <= counts[-1] <= flushed + 5
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 15)


def ended(run_dir: Path) -> Any:
    return final_process(run_dir)["ended_ns"]


def test_the_exit_code_of_a_killed_job_is_that_of_the_signal(tmp_path: Path) -> None:
    code, _, error = run(
        """
        recorder.start(run_dir, flush_s=0.05)
        launch(3)
        until(lambda: glob.glob(run_dir + "/kernels/*/[0-9]*.parquet"))
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path / "run",
    )
    assert (code, error, ended(tmp_path / "run")) == (-signal.SIGKILL, "", None)
    assert len(read_table(tmp_path / "run", "kernels")) == 3
