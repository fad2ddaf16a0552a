"""How time and memory of the analysis grow with a run: from a million launches up.

    python benchmarks/scale.py OUT                              # 1 M, 10 M and 100 M launches: about ten minutes
    python benchmarks/scale.py OUT --sizes 1_000_000 --only gaps,aggregate
    python benchmarks/scale.py OUT --sizes 1_000_000_000 --only report    # 7 GB, ten minutes, and 15 to write it
    python benchmarks/scale.py OUT --sizes "" --plot scale.svg            # what was measured so far

Writes the runs that are not in OUT yet by `make_run.py` (1 ms samples; some 7 bytes a launch), asks each question
in a process of its own, and prints seconds, CPU seconds, the peak of resident memory of that process, and CPU
seconds a launch relative to the size before (1.0: linear). On a machine that does other work meanwhile, CPU
seconds over cores say more than seconds. `report` is asked of a run without
samples, `report with samples` of the other. OUT/scale.json keeps the latest reading of each question and size, and
`--plot` draws them. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import nanalyze.analysis as na

MAKE_RUN = Path(__file__).with_name("make_run.py")
SIZES = (1_000_000, 10_000_000, 100_000_000)
SAMPLE_US = 1_000
LIMIT_S = 1800  # a question that takes longer is given up
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
    """One question to one run: times without the opening, peak of resident memory; None if it was given up."""

    question: str
    launches: int
    seconds: float | None
    cpu_s: float | None
    peak_mib: float | None


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


def ask(run_dir: Path, question: str, scratch: Path) -> None:
    """In the child: ask, and print seconds, CPU seconds and peak memory (KiB) as JSON."""
    import nanalyze.analysis as na

    began, cpu = time.perf_counter(), time.process_time()
    with na.open(run_dir) as run:
        if question != "open":
            began, cpu = time.perf_counter(), time.process_time()
            QUESTIONS[question](run, scratch)
        times = [time.perf_counter() - began, time.process_time() - cpu]
    print(json.dumps([*times, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))


# --- running ---------------------------------------------------------------------------------------


def measure(run_dir: Path, question: str, launches: int, scratch: Path) -> Reading:
    command = [sys.executable, __file__, str(scratch), "--ask", question, "--run", str(run_dir)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return Reading(question, launches, None, None, None)
    if done.returncode:
        print(f"  {question}: failed: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return Reading(question, launches, None, None, None)
    seconds, cpu, peak = json.loads(done.stdout.splitlines()[-1])
    return Reading(question, launches, round(seconds, 2), round(cpu, 2), round(peak / 1024, 1))


def made(out: Path, launches: int, sampled: bool) -> Path:
    """The run of that size, written unless it is there."""
    run_dir = out / f"run-{launches}{'' if sampled else '-timeline'}"
    if not (run_dir / "run.json").exists():
        command = [sys.executable, str(MAKE_RUN), str(run_dir), "--launches", str(launches)]
        subprocess.run([*command, "--sample-us", str(SAMPLE_US if sampled else 0)], check=True)
    return run_dir


def lines(readings: Sequence[Reading]) -> list[str]:
    """A Markdown table; growth is CPU seconds a launch over that of the next smaller size."""
    found = ["| question | launches | s | CPU s | peak MiB | growth |", "| --- | --- | --- | --- | --- | --- |"]
    before: dict[str, Reading] = {}
    for reading in readings:
        previous = before.get(reading.question)
        growth = "-"
        if previous and previous.cpu_s and reading.cpu_s:
            growth = f"{reading.cpu_s / reading.launches / (previous.cpu_s / previous.launches):.2f}"
        values = (reading.seconds, reading.cpu_s, reading.peak_mib)
        cells = " | ".join("-" if value is None else f"{value:,}" for value in values)
        found.append(f"| {reading.question} | {reading.launches:,} | {cells} | {growth} |")
        before[reading.question] = reading
    return found


def kept(path: Path, new: Sequence[Reading]) -> list[Reading]:
    """The readings in the file and `new` ones in their place, by question and size."""
    try:
        before = [Reading(**row) for row in json.loads(path.read_text(encoding="utf-8"))["readings"]]
    except FileNotFoundError:
        before = []
    latest = {(reading.question, reading.launches): reading for reading in [*before, *new]}
    order = list(QUESTIONS)
    found = sorted(latest.values(), key=lambda reading: (order.index(reading.question), reading.launches))
    content = {"cores": os.cpu_count(), "readings": [asdict(reading) for reading in found]}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return found


def draw(path: Path, readings: Sequence[Reading]) -> None:
    """CPU seconds and peak memory over launches, both on logarithmic axes, with a line of slope one."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot, ticker

    figure, (cost, memory) = pyplot.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="launches, comma-separated, ascending")
    parser.add_argument("--only", default=",".join(QUESTIONS), help="questions, comma-separated")
    parser.add_argument("--plot", type=Path, help="where to draw all readings of OUT, as .svg or .png")
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ask:
        ask(arguments.run, arguments.ask, arguments.out)
        return
    questions = arguments.only.split(",")
    if unknown := set(questions) - set(QUESTIONS):
        sys.exit(f"scale: no such question: {', '.join(sorted(unknown))}. There are {', '.join(QUESTIONS)}.")
    arguments.out.mkdir(parents=True, exist_ok=True)
    readings = []
    for launches in map(int, filter(None, arguments.sizes.split(","))):
        for question in questions:
            run_dir = made(arguments.out, launches, question not in WITHOUT_SAMPLES)
            readings.append(measure(run_dir, question, launches, arguments.out / "report"))
            print(f"  {readings[-1]}", file=sys.stderr, flush=True)
    found = kept(arguments.out / "scale.json", readings)
    print("\n".join(lines(found)))
    if arguments.plot:
        draw(arguments.plot, found)


if __name__ == "__main__":
    main()
