"""Ends, children and faults of jobs on a real GPU, each with and without `nanalyze record`: about two minutes.

Each job is a process of its own that launches a counted kernel; what it prints and how it ends must be the same,
and the launches must be in the run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_gpu import final_process, read_table
from gpu_jobs import RECORD, added, both, run, write

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(7)", 7),
        ("raise RuntimeError('the job itself')", 1),
        ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT),
    ],
)
def test_an_end_of_the_interpreter_writes_everything(tmp_path: Path, end: str, code: int) -> None:
    answer = both(tmp_path, f"print(launch(3000), flush=True)\n{end}")
    assert answer[:2] == (code, "3000\n")
    assert "nanalyze" not in answer[2]
    assert added(tmp_path / "run") == 3000
    assert final_process(tmp_path / "run")["ending"] == "exit"


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("os._exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGKILL); time.sleep(9)", -signal.SIGKILL),
        ("os.abort()", -signal.SIGABRT),
        ("ctypes.string_at(0)", -signal.SIGSEGV),
    ],
)
def test_an_end_at_once_costs_at_most_a_flush_interval(tmp_path: Path, end: str, code: int) -> None:
    answer = both(tmp_path, f"print(launch(3000), flush=True)\ntime.sleep(2.5)\n{end}", "--flush", "0.5")
    assert answer[:2] == (code, "3000\n")
    assert added(tmp_path / "run") == 3000  # two seconds were enough for all of them
    assert final_process(tmp_path / "run")["ended_ns"] is None


def test_children_of_every_kind(tmp_path: Path) -> None:
    answer = both(
        tmp_path,
        """
        import multiprocessing
        def compute(number):
            return number * number
        if __name__ == "__main__":
            with multiprocessing.get_context("fork").Pool(2) as pool:   # before CUDA, and never on it
                print(pool.map(compute, range(4)))
            spawned = [multiprocessing.get_context("spawn").Process(target=launch, args=(1000,)) for _ in range(2)]
            for child in spawned: child.start()
            print(launch(1000), flush=True)
            for child in spawned: child.join()
            with multiprocessing.get_context("fork").Pool(2) as pool:   # as a DataLoader's workers, after CUDA
                print(pool.map(compute, range(4)))
            print(launch(500), [child.exitcode for child in spawned], flush=True)
        """,
    )
    assert answer[:2] == (0, "[0, 1, 4, 9]\n1000\n[0, 1, 4, 9]\n500 [0, 0]\n")
    assert "nanalyze" not in answer[2]
    assert added(tmp_path / "run") == 3500
    pids = {row["pid"] for row in read_table(tmp_path / "run", "processes")}
    assert len(pids) == 3


def test_a_loader_with_workers_beside_training(tmp_path: Path) -> None:
    answer = both(
        tmp_path,
        """
        from torch.utils.data import DataLoader, TensorDataset
        if __name__ == "__main__":
            data = TensorDataset(torch.arange(64.0))
            total = torch.zeros(1, device="cuda")
            for _ in range(3):
                for (batch,) in DataLoader(data, batch_size=8, num_workers=2, pin_memory=True):
                    total.add_(batch.to("cuda", non_blocking=True).sum())
            print(total.item(), flush=True)
        """,
    )
    assert answer[:2] == (0, "6048.0\n")
    assert "nanalyze" not in answer[2]
    assert added(tmp_path / "run") >= 24
    assert len({row["pid"] for row in read_table(tmp_path / "run", "processes")}) == 1


def test_a_run_directory_that_vanishes_and_a_path_that_cannot_be_made(tmp_path: Path) -> None:
    answer = both(
        tmp_path,
        """
        print(launch(1000), flush=True)
        time.sleep(1.5)
        if os.path.isdir("RUN"):
            os.rename("RUN", "RUN-gone")
        print(launch(1000), flush=True)
        """.replace("RUN", str(tmp_path / "run")),
        "--flush",
        "0.5",
    )
    assert answer[:2] == (0, "1000\n1000\n")
    (tmp_path / "file").write_text("mine")
    script = write(tmp_path, f"os.replace({str(tmp_path / 'file')!r}, 'late'); print(launch(10))")
    env = {**os.environ, "NANALYZE_OUTPUT": str(tmp_path / "late" / "run")}
    done = subprocess.run([*RECORD, str(script)], capture_output=True, text=True, env=env, cwd=tmp_path, timeout=180)
    assert (done.returncode, done.stdout) == (0, "10\n")
    assert done.stderr.count("nanalyze: this process is not recorded: RunError") == 1


def test_a_device_reset_is_survived(tmp_path: Path) -> None:
    answer = both(
        tmp_path,
        """
        print(launch(1000), flush=True)
        runtime = ctypes.CDLL(next(
            line.split()[-1] for line in open("/proc/self/maps") if "libcudart" in line), mode=os.RTLD_NOLOAD)
        time.sleep(1)
        print(runtime.cudaDeviceReset(), flush=True)
        time.sleep(1)
        os._exit(4)  # PyTorch itself cannot go on after it
        """,
        "--flush",
        "0.3",
    )
    assert answer[:2] == (4, "1000\n0\n")
    assert added(tmp_path / "run") == 1000


def test_start_and_end_take_less_than_they_may(tmp_path: Path) -> None:
    """Best of three: until CUDA is in use less than 0.5 s more, from the last statement to the end less than 1 s."""
    script = write(tmp_path, "launch(1)\nprint(time.monotonic())\nlaunch(200_000)\nprint(time.monotonic())")
    took: dict[str, list[tuple[float, float]]] = {"bare": [], "recorded": []}
    for number in range(3):
        for name, before in (("bare", ()), ("recorded", (*RECORD, "-o", str(tmp_path / str(number))))):
            started = time.monotonic()
            code, out, error = run(*(before or (sys.executable,)), script)
            ended = time.monotonic()
            assert code == 0, error
            begun, last = map(float, out.split())
            took[name].append((begun - started, ended - last))
    for part, most_s in ((0, 0.5), (1, 1.0)):
        bare, recorded = (min(times[part] for times in took[name]) for name in ("bare", "recorded"))
        assert recorded - bare < most_s, (part, took)
