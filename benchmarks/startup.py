"""What a recording adds to a job's start and end, and to processes that never use CUDA.

    python benchmarks/startup.py [--rounds 7]          # without a GPU, against the tests' fake
    python benchmarks/startup.py --torch               # on a GPU, with PyTorch

Bare and recorded processes take turns; each line has the best of each, since the machine may be busy, their
difference, and the most that it may be. The exit code is 1 if one is above that.

- `no CUDA`: a Python process of a recorded job that never turns to CUDA.
- `start`: from the start of the command, `nanalyze record` included, until CUDA is in use.
- `exit`: from the job's last statement to the end of its process, when so many launches were not yet written,
  and after so many writes. (The fake's are in full buffers, 2,000 launches each; of a GPU's, CUPTI keeps some.)
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
# By the module, since an installation into a folder of its own has no script beside the interpreter.
NANALYZE = (sys.executable, "-c", "from nanalyze.commands import main; main()")
TRIGGER = "startup_turns_to_cuda"  # the module by whose import the fake job says so
MOST_NO_CUDA_S, MOST_START_S, MOST_EXIT_S = 0.05, 0.5, 1.0

FAKE = f"""
    import sys, time
    sys.path[:0] = [{str(REPOSITORY / "tests")!r}]
    import pytest
    import fake_records
    from fake_gpu import FakeGpu
    gpu = FakeGpu()
    gpu.install(pytest.MonkeyPatch())
    import {TRIGGER}
    print(time.monotonic(), flush=True)
    one = fake_records.record(
        fake_records.KERNEL, gpu.cupti.version, name=gpu.names.pointer(b"k"), start=1000, end=2000, queued=900)
    def launch(count):
        for _ in range(count // 2000):
            gpu.cupti.complete_buffer(one * 2000)
"""
TORCH = """
    import time
    import torch
    x = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    print(time.monotonic(), flush=True)
    def launch(count):
        for _ in range(count):
            x.add_(1)
        torch.cuda.synchronize()
"""
WORK = """
    import sys
    writes, launches = map(int, sys.argv[1:])
    is_recorded = "nanalyze.recorder.session" in sys.modules
    for _ in range(writes):
        if is_recorded:
            launch(2000)
            time.sleep(0.02)
    if is_recorded:
        launch(launches)
    print(time.monotonic(), flush=True)
"""


@dataclass(frozen=True)
class Times:
    """Of one process, in s: until CUDA was in use, from its last statement to its end, and all."""

    start: float
    exit: float
    whole: float


def run(words: list[str], folder: Path, **variables: str) -> Times:
    """Run a job; one that prints nothing has neither a start nor an end of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("NANALYZE", "PYTHONPATH"))}
    paths = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    env = {**clean, "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore", **variables}
    started = time.monotonic()
    done = subprocess.run(words, env=env, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    ended = time.monotonic()
    begun, last = [float(line) for line in done.stdout.split()] or [started, ended]
    return Times(begun - started, ended - last, ended - started)


def pairs(bare: list[str], recorded: list[str], folder: Path, rounds: int) -> tuple[list[Times], list[Times]]:
    """Both commands in turn, after one of each that fills the caches of files."""
    found: tuple[list[Times], list[Times]] = ([], [])
    for number in range(rounds + 1):
        for times, words in zip(found, (bare, recorded), strict=True):
            took = run(words, folder)
            if number:
                times.append(took)
    return found


def show(name: str, times: tuple[list[Times], list[Times]], part: str, most_s: float) -> bool:
    """Print a line; whether the difference is small enough."""
    bare, recorded = (min(getattr(one, part) for one in some) for some in times)
    fits = recorded - bare <= most_s
    numbers = (1000 * seconds for seconds in (bare, recorded, recorded - bare, most_s))
    line = "{:44} {:8.0f} {:9.0f} {:11.0f} {:7.0f}".format(name, *numbers)
    print(line + ("" if fits else "  TOO MUCH"), flush=True)
    return fits


def no_cuda(folder: Path, rounds: int) -> bool:
    """The start hook in a child that only computes: the job is a shell, which is told by it how it was started."""
    code = "import ctypes, json"
    script = folder / "no_cuda.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "def took():\n"
        "    started = time.monotonic()\n"
        f"    subprocess.run([sys.executable, '-c', {code!r}], check=True)\n"
        "    return time.monotonic() - started\n"
        "print(0, flush=True)\n"
        "print(sorted(took() for _ in range(9))[4])\n"
    )
    found: tuple[list[Times], list[Times]] = ([], [])
    for _ in range(rounds):
        for times, before in zip(found, ([], [*NANALYZE, "record", "-q", "-o", "none", "--"]), strict=True):
            done = subprocess.run(
                [*before, sys.executable, str(script)], cwd=folder, stdout=subprocess.PIPE, text=True, check=True
            )
            times.append(Times(0, 0, float(done.stdout.split()[1])))
    return show("no CUDA: a child process", found, "whole", MOST_NO_CUDA_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--torch", action="store_true", help="On a GPU, with PyTorch, in place of the fake.")
    options = parser.parse_args()
    print(f"{'ms, best of each':44} {'bare':>8} {'recorded':>9} {'difference':>11} {'most':>7}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / f"{TRIGGER}.py").touch()
        (folder / "job.py").write_text(textwrap.dedent(TORCH if options.torch else FAKE) + textwrap.dedent(WORK))
        fits = [no_cuda(folder, options.rounds)]
        record = [*NANALYZE, "record", "-q", "--force", "-o", "run", "--flush", "0.05", "--start-on", TRIGGER, "--"]
        for writes, launches in ((0, 0), (0, 100_000), (0, 500_000), (200, 0)):
            bare = [sys.executable, "job.py", str(writes), str(launches)]
            times = pairs(bare, [*record, *bare], folder, options.rounds)
            if not writes and not launches:
                fits.append(show("start", times, "start", MOST_START_S))
            fits.append(show(f"exit: {launches:,} launches, {writes} writes", times, "exit", MOST_EXIT_S))
    sys.exit(int(not all(fits)))


if __name__ == "__main__":
    main()
