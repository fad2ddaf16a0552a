"""Whether a long recording leaks, and whether it loses a launch without counting it.

    python benchmarks/soak.py OUT_DIR [--minutes 20] [--rate 20000] [--children-s 15] [--no-samples]
    python benchmarks/soak.py OUT_DIR --fake --minutes 0.1       # without a GPU, against the tests' fake

`nanalyze record` runs a job that launches a counted kernel `--rate` times a second, in annotated steps, with
samples on; every `--children-s` seconds a child comes, launches for half that time, and goes. Meanwhile the
resident memory and the open files of the job's first process, recorder included, are read from /proc. In the
end the launches that the processes counted must be those in the run, those that the recorder says it lost, and
those made in its pauses. Exit code 1 if they are not, or if files stay open.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

REPOSITORY = Path(__file__).resolve().parent.parent
KERNEL = "%add%"  # as SQL's LIKE; what PyTorch launches besides is not counted
STEP = 100  # launches; of each step the beginning and the end are noted
STARTS = "soak_starts_the_recorder"  # the module by whose import a fake job says that it turns to CUDA

Batches = NDArray[np.int64]  # (steps, 2): beginning and end in ns


@dataclass(frozen=True)
class Reading:
    """Of the job's first process, `s` seconds after its start."""

    s: float
    rss_mib: float
    files: int


@dataclass(frozen=True)
class Account:
    """Launches, over all processes. In a pause were at least those of whole steps, at most those of any part."""

    made: int
    recorded: int
    lost: int
    paused_least: int
    paused_most: int

    @property
    def balances(self) -> bool:
        """Lost records may be of something else than these kernels, so that many are lost at most."""
        missing = self.made - self.recorded
        return self.paused_least <= missing <= self.paused_most + self.lost


# --- the job ---------------------------------------------------------------------------------------


def job(out: Path, seconds: float, children_s: float, rate: float, fake: bool) -> None:
    """Launch for so long, note each step, and start children, if `children_s` is not 0."""
    launch, finish = _fake_work(out) if fake else _real_work()
    from nanalyze import recorder

    children: list[subprocess.Popen[bytes]] = []
    started = time.monotonic()
    next_child = started + children_s
    with open(out / "launches" / f"{os.getpid()}-{time.time_ns()}.bin", "wb", buffering=1 << 16) as notes:
        for step in range(1 << 62):
            now = time.monotonic() - started
            if now >= seconds:
                break
            time.sleep(max(step * STEP / rate - now, 0))
            with recorder.annotate("step"):
                begun = time.time_ns()
                for _ in range(STEP):
                    launch()
                notes.write(np.array([begun, time.time_ns()], dtype=np.int64).tobytes())
            if children_s and started + now >= next_child and now + children_s < seconds:
                next_child += children_s
                children = [child for child in children if child.poll() is None]
                children.append(_start_child(out, children_s / 2, rate, fake))
        finish()
    if any(child.wait() for child in children):
        sys.exit("soak: a child failed")


def _start_child(out: Path, seconds: float, rate: float, fake: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, str(out), "--job", str(seconds), "--children-s", "0", "--rate", str(rate)]
    return subprocess.Popen([*command, *(["--fake"] if fake else [])])


def _real_work() -> tuple[Callable[[], object], Callable[[], object]]:
    import torch

    x = torch.zeros(1, device="cuda")
    return lambda: x.add_(1), torch.cuda.synchronize


def _fake_work(out: Path) -> tuple[Callable[[], object], Callable[[], object]]:
    sys.path[:0] = [str(REPOSITORY / "tests"), str(out)]
    import pytest
    from fake_gpu import FakeGpu

    gpu = FakeGpu()
    gpu.install(pytest.MonkeyPatch())
    gpu.use(0)
    __import__(STARTS)

    def launch() -> None:
        gpu.launch("add")
        gpu.launches.clear()  # a list of the fake's own, which would grow

    return launch, lambda: None


# --- watching it -----------------------------------------------------------------------------------


def watch(process: subprocess.Popen[bytes], every_s: float) -> list[Reading]:
    """Readings until the process ends, each of them printed."""
    readings: list[Reading] = []
    started = time.monotonic()
    print("     s   RSS MiB  open files")
    while process.poll() is None:
        reading = read(process.pid, time.monotonic() - started)
        if reading is not None:
            readings.append(reading)
            print(f"{reading.s:6.0f}  {reading.rss_mib:8.1f}  {reading.files:10}", flush=True)
        try:
            process.wait(every_s)
        except subprocess.TimeoutExpired:
            continue
    return readings


def read(pid: int, s: float) -> Reading | None:
    """None if the process has just ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        files = len(os.listdir(f"/proc/{pid}/fd"))
        rss_kib = int(next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1])
    except (OSError, StopIteration):
        return None
    return Reading(s, rss_kib / 1024, files)


def settled(readings: Sequence[Reading]) -> list[Reading]:
    """Those after the first quarter: until then buffers, libraries and caches are filled for the first time."""
    return [reading for reading in readings if reading.s >= readings[-1].s / 4]


def slope_mib_per_h(readings: Sequence[Reading]) -> float | None:
    """Of resident memory, by least squares; None with fewer than three readings."""
    if len(readings) < 3:
        return None
    slope, _ = np.polyfit([reading.s for reading in readings], [reading.rss_mib for reading in readings], 1)
    return float(slope) * 3600


def leaves_files_open(readings: Sequence[Reading]) -> bool:
    """Whether even the fewest of the last half are more than the most of the first: a few come and go."""
    half = len(readings) // 2
    first, last = ([reading.files for reading in part] for part in (readings[:half], readings[half:]))
    return bool(first) and min(last) > max(first)


# --- the account -----------------------------------------------------------------------------------


def in_pauses(steps: Batches, pauses: Iterable[tuple[int, int, int, int | None]]) -> tuple[int, int]:
    """The least and the most launches made in pauses (start, off, end, complete) of the steps' process."""
    begun, ended = steps[:, 0], steps[:, 1]
    wholly, partly = np.zeros(len(steps), dtype=bool), np.zeros(len(steps), dtype=bool)
    for start_ns, off_ns, end_ns, complete_ns in pauses:
        wholly |= (begun >= off_ns) & (ended <= end_ns)
        partly |= (begun <= max(end_ns, complete_ns or end_ns)) & (ended >= start_ns)
    return int(wholly.sum()) * STEP, int(partly.sum()) * STEP


def account(out: Path) -> Account:
    """The launches that each process noted, beside what is in the run."""
    import nanalyze.analysis as na

    with na.open(out / "run") as run:
        recorded = run.sql(
            "SELECT count(*) AS n FROM kernels JOIN kernel_classes USING (kernel_class_id) WHERE name LIKE $name",
            {"name": KERNEL},
        )["n"][0]
        lost = run.sql("SELECT COALESCE(sum(records_lost), 0) AS n FROM processes")["n"][0]
        rows = run.arrow("SELECT pid, start_ns, off_ns, end_ns, complete_ns FROM pauses JOIN processes USING (process)")
    pauses: dict[int, list[tuple[int, int, int, int | None]]] = {}
    for row in rows.to_pylist():
        pauses.setdefault(row["pid"], []).append((row["start_ns"], row["off_ns"], row["end_ns"], row["complete_ns"]))
    made = least = most = 0
    for path in (out / "launches").glob("*.bin"):
        steps = np.fromfile(path, dtype=np.int64).reshape(-1, 2)
        made += len(steps) * STEP
        few, many = in_pauses(steps, pauses.get(int(path.name.partition("-")[0]), []))
        least, most = least + few, most + many
    return Account(made, int(recorded), int(lost), least, most)


def soak(out: Path, options: argparse.Namespace) -> int:
    """Run, watch, and account; the exit code."""
    (out / "launches").mkdir(parents=True)
    (out / f"{STARTS}.py").touch()
    nanalyze = str(Path(sys.executable).with_name("nanalyze"))
    command = [nanalyze, "record", "-o", str(out / "run"), "--pause", str(options.pause), "--start-on", STARTS]
    command += [] if options.no_samples else ["--samples"]
    command += ["--", sys.executable, __file__, str(out), "--job", str(60 * options.minutes)]
    command += ["--children-s", str(options.children_s), "--rate", str(options.rate)]
    process = subprocess.Popen([*command, *(["--fake"] if options.fake else [])])
    readings = watch(process, options.read_s)
    if process.returncode:
        print(f"soak: the job ended with {process.returncode}", file=sys.stderr)
        return 1
    return _conclude(out, readings)


def _conclude(out: Path, readings: list[Reading]) -> int:
    counted, slope = account(out), slope_mib_per_h(settled(readings))
    leaves_open = leaves_files_open(settled(readings))
    print(f"\nprocesses: {len(list((out / 'launches').iterdir()))}")
    print(f"memory: {'too few readings' if slope is None else f'{slope:+.1f} MiB an hour'} after the first quarter")
    files = [reading.files for reading in readings]
    print(f"open files: {files[0]} at first, {files[-1]} at last, {max(files)} at most")
    print(f"launches made {counted.made:,}, in the run {counted.recorded:,}, lost {counted.lost:,}")
    print(f"  in pauses {counted.paused_least:,} to {counted.paused_most:,}, so missing without a reason: ", end="")
    print("none" if counted.balances else f"about {counted.made - counted.recorded - counted.paused_most:,}")
    result = {"slope_mib_per_h": slope, **asdict(counted), "readings": [asdict(reading) for reading in readings]}
    (out / "soak.json").write_text(json.dumps(result, indent=1))
    return int(leaves_open or not counted.balances)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--rate", type=float, default=20_000, help="Launches a second, of each process.")
    parser.add_argument("--children-s", type=float, default=15, help="A child so often; 0: none.")
    parser.add_argument("--read-s", type=float, default=10)
    parser.add_argument("--pause", type=float, default=1, help="As for nanalyze record, percent.")
    parser.add_argument("--no-samples", action="store_true")
    parser.add_argument("--fake", action="store_true", help="Against the tests' fake of a GPU.")
    parser.add_argument("--job", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    out = options.out.resolve()
    if options.job is not None:
        job(out, options.job, options.children_s, options.rate, options.fake)
    else:
        sys.exit(soak(out, options))


if __name__ == "__main__":
    main()
