"""Whether a long recording leaks, and whether it loses a launch without counting it.

    python benchmarks/soak.py OUT_DIR [--minutes 20] [--rate 20000] [--children-s 15] [--no-samples]
    python benchmarks/soak.py OUT_DIR --within-s 240             # all of it in four minutes, whatever happens
    python benchmarks/soak.py OUT_DIR --fake --minutes 0.1       # without a GPU, against the tests' fake

`nanalyze record` runs a job that launches a counted kernel `--rate` times a second, in annotated steps, with
samples on; every `--children-s` seconds a child comes, launches for half that time, and goes. Meanwhile the
resident memory and the open files of the job's first process, recorder included, are read from /proc, and
printed with the launches made and written so far. The job runs for `--bare-s` without the recorder first: what
its resident memory is above that is the recorder's. In the end the launches that the processes counted must be
those in the run, those that the recorder says it lost, and those made in its pauses. Exit code 1 if they are
not, if memory grows by more than `--most-mib-per-h` (where it was watched for long enough to tell), or if files
stay open.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

REPOSITORY = Path(__file__).resolve().parent.parent
KERNEL = "%add%"  # as SQL's LIKE; what PyTorch launches besides is not counted
STEP = 100  # launches; of each step the beginning and the end are noted
FAKE_CALLS_KEPT = 100_000  # of launch times, since the fake's launches are slow
NOISE_MIB = 8.0  # resident memory goes up and down by some: no growth by less is told from none
END_S = 45.0  # of --within-s: for importing PyTorch, for the last children, and for the account; without --bare-s
ACCOUNT_S = 15.0  # of that
# By the module, since an installation into a folder of its own has no script beside the interpreter.
NANALYZE = (sys.executable, "-c", "from nanalyze.commands import main; main()")
STARTS = "soak_starts_the_recorder"  # the module by whose import a fake job says that it turns to CUDA

Batches = NDArray[np.int64]  # (steps, 2): beginning and end in ns


@dataclass(frozen=True)
class Reading:
    """Of the job's first process, `s` seconds after its start."""

    s: float
    rss_mib: float
    files: int
    made: int = 0  # launches so far, of all processes: those of whole steps that were noted
    written: int = 0  # launches in the run so far, whatever their kernel


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
    next_child, next_note = started + children_s, started
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
            if started + now >= next_note:
                next_note += 1.0
                notes.flush()  # for `Progress`
            if children_s and started + now >= next_child and now + children_s < seconds:
                next_child += children_s
                children = [child for child in children if child.poll() is None]
                children.append(_start_child(out, children_s / 2, rate, fake))
        finish()
    if any(child.wait() for child in children):
        sys.exit("soak: a child failed")


def _start_child(out: Path, seconds: float, rate: float, fake: bool) -> subprocess.Popen[bytes]:
    """The job for so long, without children of its own."""
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

    from nanalyze.recorder import launch_times

    launch_times.CALLS_KEPT = FAKE_CALLS_KEPT

    def launch() -> None:
        gpu.launch("add")
        gpu.launches.clear()  # what the fake remembers for tests, which would grow
        if len(gpu.cupti.log) > STEP:
            gpu.cupti.log.clear()
            for image in list(gpu.cupti._pm_images.values())[:-8]:
                image.samples.clear()

    return launch, lambda: None


# --- watching it -----------------------------------------------------------------------------------


def watch(process: subprocess.Popen[bytes], every_s: float, out: Path, within_s: float | None = None) -> list[Reading]:
    """Readings until the process ends, each of them printed; ends it, if it takes longer than `within_s`."""
    readings: list[Reading] = []
    started = time.monotonic()
    progress = Progress(out)
    print("     s   RSS MiB  open files  launches made       written", flush=True)
    while process.poll() is None:
        reading = read(process.pid, time.monotonic() - started)
        if reading is not None:
            reading = replace(reading, made=progress.made(), written=progress.written())
            readings.append(reading)
            counts = f"{reading.made:13,}  {reading.written:12,}"
            print(f"{reading.s:6.0f}  {reading.rss_mib:8.1f}  {reading.files:10}  {counts}", flush=True)
        if within_s is not None and time.monotonic() - started > within_s:
            print(f"soak: the job did not end within {within_s:g} s, so it gets SIGTERM", file=sys.stderr, flush=True)
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(every_s)
        except subprocess.TimeoutExpired:
            continue
    return readings


class Progress:
    """What the processes have noted and what the recorder has written; each shard is looked at once."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._rows: dict[Path, int] = {}

    def made(self) -> int:
        sizes = (path.stat().st_size for path in (self._out / "launches").glob("*.bin"))
        return sum(size // 16 for size in sizes) * STEP

    def written(self) -> int:
        import pyarrow.parquet as pq

        for path in (self._out / "run" / "kernels").glob("process=*/*.parquet"):
            if path not in self._rows and not path.name.startswith("."):
                self._rows[path] = pq.read_metadata(path).num_rows
        return sum(self._rows.values())


def read(pid: int, s: float) -> Reading | None:
    """None if the process has just ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        files = len(os.listdir(f"/proc/{pid}/fd"))
        rss_kib = int(next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1])
    except (OSError, StopIteration):
        return None
    return Reading(s, rss_kib / 1024, files)


def settled(readings: Sequence[Reading], filled_s: float = 0.0) -> list[Reading]:
    """Those after the first quarter and after `filled_s`: until then buffers and caches are filled."""
    return [reading for reading in readings if reading.s >= max(readings[-1].s / 4, filled_s)]


def filled_s(rate: float, fake: bool = False) -> float:
    """When the recorder keeps as many launch times as it ever does (32 MB of them), and drops the oldest."""
    from nanalyze.recorder.launch_times import CALLS_KEPT

    return (FAKE_CALLS_KEPT if fake else CALLS_KEPT) / rate


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


def _prepare(out: Path) -> None:
    """What the job needs in its folder."""
    (out / "launches").mkdir(parents=True)
    (out / f"{STARTS}.py").touch()


def bare_mib(out: Path, options: argparse.Namespace) -> float | None:
    """Resident memory of the job without recorder and children: the most of it, seen ten times a second."""
    _prepare(out / "bare")
    process, found = _start_child(out / "bare", options.bare_s, options.rate, options.fake), []
    while process.poll() is None:
        reading = read(process.pid, 0.0)
        found += [] if reading is None else [reading.rss_mib]
        time.sleep(0.1)
    return max(found, default=None) if process.returncode == 0 else None


def cpu_pct(rows: Iterable[dict[str, Any]]) -> float | None:
    """CPU time of the recorder's threads over the time that they recorded, the largest of processes of 5 s and more."""
    shares = [
        100 * row["recorder_cpu_ns"] / (row["ended_ns"] - row["started_ns"])
        for row in rows
        if None not in (row["recorder_cpu_ns"], row["ended_ns"]) and row["ended_ns"] - row["started_ns"] > 5e9
    ]
    return max(shares, default=None)


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
    import nanalyze.analysis as na

    _prepare(out)
    begun = time.monotonic()
    bare = bare_mib(out, options) if options.bare_s else None
    within_s = None if options.within_s is None else options.within_s - (time.monotonic() - begun)
    command = [*NANALYZE, "record", "-o", str(out / "run"), "--pause", str(options.pause), "--start-on", STARTS]
    command += ["--no-samples"] if options.no_samples else []
    seconds = 60 * options.minutes if within_s is None else within_s - END_S
    command += ["--", sys.executable, __file__, str(out), "--job", str(seconds)]
    command += ["--children-s", str(options.children_s), "--rate", str(options.rate)]
    process = subprocess.Popen([*command, *(["--fake"] if options.fake else [])])
    readings = watch(process, options.read_s, out, None if within_s is None else within_s - ACCOUNT_S)
    if process.returncode:
        print(f"soak: the job ended with {process.returncode}", file=sys.stderr)
    with na.open(out / "run") as run:
        cpu = cpu_pct(run.arrow("SELECT recorder_cpu_ns, started_ns, ended_ns FROM processes").to_pylist())
    return max(_conclude(out, readings, (bare, cpu), options), int(process.returncode != 0))


def _conclude(
    out: Path, readings: list[Reading], cost: tuple[float | None, float | None], options: argparse.Namespace
) -> int:
    """Print and write what was found; `cost` is the job's resident MiB alone, and the recorder's CPU percent."""
    bare, cpu = cost
    filled = filled_s(options.rate, options.fake)
    counted, steady = account(out), settled(readings, filled)
    slope, leaves_open = slope_mib_per_h(steady), leaves_files_open(settled(readings))
    print(f"\nprocesses: {len(list((out / 'launches').iterdir()))}")
    if slope is None:
        print(f"memory: too short to tell, as caches are filled for {filled:.0f} s")
    else:
        print(f"memory: {slope:+.1f} MiB an hour, from {steady[0].s:.0f} s to {steady[-1].s:.0f} s")
    if bare is not None:
        most = max(reading.rss_mib for reading in readings)
        print(f"memory of the recorder: {most - bare:.0f} MiB at most, above {bare:.0f} MiB of the job alone")
    print(f"CPU time of the recorder: {'unknown' if cpu is None else f'{cpu:.2f} % of a core'}, in the worst process")
    files = [reading.files for reading in readings]
    print(f"open files: {files[0]} at first, {files[-1]} at last, {max(files)} at most")
    print(f"launches made {counted.made:,}, in the run {counted.recorded:,}, lost {counted.lost:,}")
    print(f"  in pauses {counted.paused_least:,} to {counted.paused_most:,}, so missing without a reason: ", end="")
    print("none" if counted.balances else f"about {counted.made - counted.recorded - counted.paused_most:,}")
    result = {
        "slope_mib_per_h": slope,
        "bare_mib": bare,
        "cpu_pct": cpu,
        **asdict(counted),
        "readings": [asdict(reading) for reading in readings],
    }
    (out / "soak.json").write_text(json.dumps(result, indent=1))
    grown_mib = 0.0 if slope is None else slope / 3600 * (steady[-1].s - steady[0].s)
    grows = slope is not None and slope > options.most_mib_per_h and grown_mib > NOISE_MIB
    return int(grows or leaves_open or not counted.balances)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--within-s", type=float, help="In place of --minutes: all of it in so many seconds.")
    parser.add_argument("--bare-s", type=float, default=20, help="The job alone, for so long; 0: not.")
    parser.add_argument("--most-mib-per-h", type=float, default=60, help="Growth of memory that counts as none.")
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
