"""How time and memory of the analysis grow with a run: from a million launches up.

    python benchmarks/scale.py OUT                              # 1 M, 10 M and 100 M launches: about ten minutes
    python benchmarks/scale.py OUT --sizes 1_000_000 --only gaps,aggregate
    python benchmarks/scale.py OUT --sizes 1_000_000_000 --only "report with samples" --jobs 32 --cores 2 --memory-gb 4
    python benchmarks/scale.py OUT --sizes 20_000_000 --processes 200 --only "report with samples"
    python benchmarks/scale.py OUT --sizes "" --plot scale.svg            # what was measured so far

Writes the runs that are not in OUT yet by `make_run.py` (1 ms samples; some 8 bytes a launch) with `--jobs` processes,
asks each question in a process of its own, and prints seconds, CPU seconds, the peak of resident memory of that
process, and CPU seconds a launch relative to the size before (1.0: linear). On a machine that does other work
meanwhile, CPU seconds over cores say more than seconds. On a larger machine `--cores` keeps each question to so many
cores and threads of DuckDB, and `--memory-gb` DuckDB to so much memory. `report` is asked of a run without samples,
`report with samples` of the other. OUT/scale.json keeps the latest reading of each question and size, written as they
come; `--resume` asks only what is not in it, and `--plot` draws it. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import nanalyze.analysis as na

MAKE_RUN = Path(__file__).with_name("make_run.py")
SIZES = (1_000_000, 10_000_000, 100_000_000)
SAMPLE_US = 1_000
LIMIT_S = 1800.0
# Questions that the plot shows, with what it calls them.
PLOTTED = {
    "aggregate": "percentiles of each class",
    "gaps": "gaps of each stream",
    "utilisation": "busy time of each device",
    "overlap": "launches laid onto samples",
    "report": "whole report",
    "report with samples": "whole report, with samples",
}

# Each launch is laid onto the samples that it ran in by arithmetic, then joined by their number.
OVERLAP = f"""
WITH pieces AS (
    SELECT
        kernel_class_id, process, device_id, start_ns, end_ns,
        unnest(range(start_ns // {SAMPLE_US * 1000}, (end_ns - 1) // {SAMPLE_US * 1000} + 1)) AS sample
    FROM _launches
    WHERE end_ns > start_ns
),
numbered AS (
    SELECT process, device_id, start_ns // {SAMPLE_US * 1000} AS sample, dram_read_bytes, end_ns - start_ns AS length_ns
    FROM samples
)
SELECT
    p.kernel_class_id,
    count(*) AS pieces,
    sum(
        (least(p.end_ns, (p.sample + 1) * {SAMPLE_US * 1000}) - greatest(p.start_ns, p.sample * {SAMPLE_US * 1000}))
        * n.dram_read_bytes / n.length_ns
    ) AS weighted_bytes
FROM pieces AS p
JOIN numbered AS n ON n.process = p.process AND n.device_id = p.device_id AND n.sample = p.sample
GROUP BY p.kernel_class_id
ORDER BY p.kernel_class_id
"""


@dataclass(frozen=True)
class Reading:
    """One question to one run: times without the opening, peak of resident memory; None if it was given up.

    `cores` it was kept to, None for all; `problem` says why there are no figures.
    """

    question: str
    launches: int
    seconds: float | None
    cpu_s: float | None
    peak_mib: float | None
    processes: int = 1
    cores: int | None = None
    problem: str | None = None

    @property
    def key(self) -> tuple[str, int, int]:
        return self.question, self.launches, self.processes


@dataclass(frozen=True)
class Limits:
    """What a question may use: None is all there is. A question that takes longer than `seconds` is given up."""

    cores: int | None = None
    memory_gb: float | None = None
    seconds: float = LIMIT_S


# --- questions -------------------------------------------------------------------------------------


def _report(run: na.Run, scratch: Path) -> None:
    from nanalyze.analysis import report

    report.write(run, scratch, force=True)


QUESTIONS: dict[str, Callable[[na.Run, Path], object]] = {
    "open": lambda run, scratch: None,
    "aggregate": lambda run, scratch: run.query("kernel_durations"),
    "gaps": lambda run, scratch: run.query("launch_gaps"),
    "utilisation": lambda run, scratch: run.query("timeline_utilisation"),
    "overlap": lambda run, scratch: run.arrow(OVERLAP),
    "report": _report,
    "report with samples": _report,
}
WITHOUT_SAMPLES = ("report",)


def keep_to(limits: Limits) -> None:
    """Keep this process to the cores, and DuckDB to the threads and memory; before anything starts threads."""
    if limits.cores is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: limits.cores])
    # DuckDB 2.0 counts the cores of the machine, not those that it may use.
    given = {"threads": limits.cores, "memory_limit": limits.memory_gb and f"{limits.memory_gb:g}GB"}
    config = {name: value for name, value in given.items() if value is not None}
    import duckdb
    import pyarrow as pa

    if limits.cores is not None:
        pa.set_cpu_count(limits.cores)
    connect: Any = duckdb.connect
    # nanalyze locks what it opens, so that this is the only moment to set it.
    duckdb.connect = lambda database: connect(database, config=config)  # type: ignore[assignment,misc]


def ask(run_dir: Path, question: str, scratch: Path, limits: Limits) -> None:
    """In the child: ask, and print seconds, CPU seconds and peak memory (KiB) as JSON."""
    keep_to(limits)
    import nanalyze.analysis as na

    began, cpu = time.perf_counter(), time.process_time()
    with na.open(run_dir) as run:
        if question != "open":
            began, cpu = time.perf_counter(), time.process_time()
            QUESTIONS[question](run, scratch)
        times = [time.perf_counter() - began, time.process_time() - cpu]
    print(json.dumps([*times, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))


# --- running ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What is asked of runs in `out`, which `jobs` processes write."""

    out: Path
    limits: Limits = field(default_factory=Limits)
    processes: int = 1
    jobs: int = 1


def measure(asked: Asked, run_dir: Path, question: str, launches: int) -> Reading:
    """Ask in a child. Raises nothing: what failed is in the reading."""
    limits, key = asked.limits, (question, launches)
    command = [sys.executable, __file__, str(asked.out / "report"), "--ask", question, "--run", str(run_dir)]
    for option, value in (("--cores", limits.cores), ("--memory-gb", limits.memory_gb)):
        command += [option, str(value)] if value is not None else []
    environment = {"OPENBLAS_NUM_THREADS": "1", **os.environ}  # as the commands set it
    figures, problem = (None, None, None), None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limits.seconds, check=True, env=environment
        )
        seconds, cpu, peak = json.loads(done.stdout.splitlines()[-1])
        figures = (round(seconds, 2), round(cpu, 2), round(peak / 1024, 1))
    except subprocess.TimeoutExpired:
        problem = f"took over {limits.seconds:g} s"
    except subprocess.CalledProcessError as error:
        problem = f"exit status {error.returncode}: {(error.stderr.strip().splitlines() or ['no message'])[-1]}"
    return Reading(*key, *figures, asked.processes, limits.cores, problem)


def made(asked: Asked, launches: int, sampled: bool) -> Path:
    """The run of that size, written unless it is there; a run that was not written to its end is written again."""
    ranks = f"-of-{asked.processes}" if asked.processes > 1 else ""
    run_dir = asked.out / f"run-{launches}{ranks}{'' if sampled else '-timeline'}"
    if not run_dir.exists():
        unfinished = run_dir.with_name(f"{run_dir.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        command = [sys.executable, str(MAKE_RUN), str(unfinished), "--launches", str(launches)]
        command += ["--processes", str(asked.processes), "--jobs", str(asked.jobs)]
        began = time.perf_counter()
        subprocess.run([*command, "--sample-us", str(SAMPLE_US if sampled else 0)], check=True)
        unfinished.rename(run_dir)
        print(f"  {run_dir.name}: written in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    return run_dir


def lines(readings: Sequence[Reading]) -> list[str]:
    """A Markdown table; growth is CPU seconds a launch over that of the next smaller size."""
    found = ["| question | launches | s | CPU s | peak MiB | growth |", "| --- | --- | --- | --- | --- | --- |"]
    before: dict[tuple[str, int], Reading] = {}
    for reading in readings:
        previous = before.get((reading.question, reading.processes))
        growth = "-"
        if previous and previous.cpu_s and reading.cpu_s:
            growth = f"{reading.cpu_s / reading.launches / (previous.cpu_s / previous.launches):.2f}"
        values = (reading.seconds, reading.cpu_s, reading.peak_mib)
        cells = " | ".join("-" if value is None else f"{value:,}" for value in values)
        ranks = f" of {reading.processes} processes" if reading.processes > 1 else ""
        found.append(f"| {reading.question} | {reading.launches:,}{ranks} | {cells} | {growth} |")
        before[reading.question, reading.processes] = reading
    return found


def read(path: Path) -> list[Reading]:
    """The readings in the file, none where there is no file."""
    try:
        return [Reading(**row) for row in json.loads(path.read_text(encoding="utf-8"))["readings"]]
    except FileNotFoundError:
        return []


def kept(path: Path, new: Sequence[Reading]) -> list[Reading]:
    """The readings in the file and `new` ones in their place, by question and size."""
    latest = {reading.key: reading for reading in [*read(path), *new]}
    order = list(QUESTIONS)
    found = sorted(latest.values(), key=lambda r: (order.index(r.question), r.processes, r.launches))
    content = {"cores": os.cpu_count(), "readings": [asdict(reading) for reading in found]}
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)
    return found


def draw(path: Path, readings: Sequence[Reading]) -> None:
    """CPU seconds and peak memory over launches, both on logarithmic axes, with a line of slope one."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot, ticker

    figure, (cost, memory) = pyplot.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    readings = [reading for reading in readings if reading.processes == 1]
    sizes = sorted({reading.launches for reading in readings})
    for mark, (question, label) in zip("osv^DP", PLOTTED.items(), strict=True):
        own = [r for r in readings if r.question == question and r.cpu_s and r.peak_mib]
        cost.plot([r.launches for r in own], [r.cpu_s or 0 for r in own], f"{mark}-", label=label, markersize=5)
        memory.plot([r.launches for r in own], [r.peak_mib or 0 for r in own], f"{mark}-", markersize=5)
    cost.plot(sizes, [size * 4e-7 for size in sizes], "k:", linewidth=1, label="0.4 µs a launch")
    for axes, title in ((cost, "CPU time (s)"), (memory, "peak memory (MiB)")):
        axes.set(xscale="log", yscale="log", xlabel="launches", title=title)
        axes.grid(alpha=0.3)
    for axis in (cost.yaxis, memory.yaxis):
        axis.set_minor_formatter(ticker.NullFormatter())
        axis.set_major_formatter(ticker.StrMethodFormatter("{x:,g}"))
    memory.yaxis.set_major_locator(ticker.LogLocator(10, (1, 2, 5)))
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    pyplot.rcParams["svg.hashsalt"] = "scale"
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)


def questions_of(text: str) -> list[str]:
    """Raises ValueError for one that there is not."""
    questions = text.split(",")
    if unknown := set(questions) - set(QUESTIONS):
        raise ValueError(f"no such question: {', '.join(sorted(unknown))}. There are {', '.join(QUESTIONS)}.")
    return questions


def ask_all(asked: Asked, sizes: Sequence[int], questions: Sequence[str], resume: bool) -> list[Reading]:
    """Ask each question of a run of each size; all readings of OUT, kept after each question."""
    path = asked.out / "scale.json"
    found = kept(path, [])
    for launches in sizes:
        for question in questions:
            known = {reading.key for reading in found if reading.seconds is not None} if resume else set()
            if (question, launches, asked.processes) not in known:
                reading = measure(asked, made(asked, launches, question not in WITHOUT_SAMPLES), question, launches)
                print(f"  {reading}", file=sys.stderr, flush=True)
                found = kept(path, [reading])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="launches, comma-separated, ascending")
    parser.add_argument("--only", default=",".join(QUESTIONS), help="questions, comma-separated")
    parser.add_argument("--processes", type=int, default=1, help="ranks of each run, with a device of its own each")
    parser.add_argument("--jobs", type=int, default=1, help="processes that write a run")
    parser.add_argument("--cores", type=int, help="cores that a question may use, and threads of DuckDB")
    parser.add_argument("--memory-gb", type=float, help="memory that DuckDB may use")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="a question that takes longer is given up")
    parser.add_argument("--resume", action="store_true", help="ask only what OUT/scale.json does not say")
    parser.add_argument("--plot", type=Path, help="where to draw all readings of OUT, as .svg or .png")
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    limits = Limits(arguments.cores, arguments.memory_gb, arguments.limit_s)
    if arguments.ask:
        ask(arguments.run, arguments.ask, arguments.out, limits)
        return
    try:
        questions = questions_of(arguments.only)
        sizes = [int(size) for size in filter(None, arguments.sizes.split(","))]
    except ValueError as error:
        sys.exit(f"scale: {error}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    asked = Asked(arguments.out, limits, arguments.processes, arguments.jobs)
    found = ask_all(asked, sizes, questions, arguments.resume)
    print("\n".join(lines(found)))
    if arguments.plot:
        draw(arguments.plot, found)


if __name__ == "__main__":
    main()
