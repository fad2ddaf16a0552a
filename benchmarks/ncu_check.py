"""Compare nanalyze's exact counters and verdicts with Nsight Compute's, kernel by kernel.

    python benchmarks/ncu_check.py OUT_DIR

One process under `ncu` and one under nanalyze's recorder run the same list of known kernels
(examples/known_kernels.py), each kernel behind an empty marker kernel whose grid width is its place in
the list; so launches are matched without trusting names. ncu runs with `--clock-control none
--cache-control none`, and CUDA graphs as one workload. The tables are written as `ncu_check.md` and
`ncu_check.json`; a kernel that fails on one side is reported and the others go on.
"""

from __future__ import annotations

import argparse
import csv
import glob
import io
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KNOWN_SCRIPT = ROOT / "examples" / "known_kernels.py"
KNOWN_LIST = "known.json"
MARKER = "nanalyze_marker"
ELAPSED = "avg.pct_of_peak_sustained_elapsed"

# What is compared: our counter's name and the metric that both tools read it from.
COMPARED = {
    "compute_pct": f"sm__throughput.{ELAPSED}",
    "memory_pct": f"gpu__compute_memory_throughput.{ELAPSED}",
    "dram_pct": f"gpu__dram_throughput.{ELAPSED}",
    "l2_pct": f"lts__throughput.{ELAPSED}",
    "l1_pct": f"l1tex__throughput.{ELAPSED}",
    "duration_ns": "gpu__time_duration.sum",
    "occupancy_pct": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
WAVES = "launch__waves_per_multiprocessor"
NANOSECONDS = {"us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9}
EXTRA = (WAVES, "dram__bytes_read.sum", "dram__bytes_write.sum", "sm__cycles_elapsed.avg.per_second")

# Nsight Compute's speed-of-light rule (sections/SpeedOfLight.py).
HIGH_PCT, LATENCY_PCT, LEAD_POINTS = 80.0, 60.0, 10.0
TOLERANCE_POINTS, MIN_DURATION_NS = 3.0, 50_000.0


@dataclass
class Launch:
    """One measured launch (or graph launch): metrics by their raw name."""

    kernel: str
    grid: str
    block: str
    metrics: dict[str, float]
    rules: list[str] = field(default_factory=list)
    class_id: int | None = None

    @property
    def shape(self) -> tuple[str, str, str]:
        return base_name(self.kernel), self.grid, self.block


@dataclass
class Row:
    """A known kernel as both tools see it. A value is None where that tool gave none."""

    name: str
    expected: str
    kernel: str | None
    ncu: dict[str, float | None]
    ours: dict[str, float | None]
    ncu_bound: str | None
    ncu_rule: str | None
    our_bound: str | None
    our_bound_source: str | None
    agree: bool | None
    within_tolerance: bool | None
    problem: str | None


def base_name(kernel: str) -> str:
    """A kernel's name without return type, template arguments and parameters, so that demanglers agree."""
    plain = kernel.replace("(anonymous namespace)", "unnamed").replace("<unnamed>", "unnamed")
    words = re.split(r"[<(]", plain, maxsplit=1)[0].split()
    return words[-1] if words else kernel


def sol_bound(compute: float | None, memory: float | None) -> str | None:
    """The bound by Nsight Compute's rule; None when a figure is missing."""
    if compute is None or memory is None:
        return None
    larger = "compute" if compute > memory else "memory"
    if max(compute, memory) >= HIGH_PCT:
        return larger
    if max(compute, memory) < LATENCY_PCT:
        return "latency"
    return larger if abs(compute - memory) >= LEAD_POINTS else "balanced"


# --- Nsight Compute -------------------------------------------------------------------------------


def find_ncu(given: str | None) -> str:
    """The path of ncu. Raises SystemExit when there is none."""
    places = [given, shutil.which("ncu")]
    for pattern in (
        "/usr/local/cuda*/bin/ncu",
        "/opt/nvidia/nsight-compute/*/ncu",
        "/usr/local/cuda*/nsight-compute*/ncu",
    ):
        places += sorted(glob.glob(pattern), reverse=True)
    for place in places:
        if place and os.access(place, os.X_OK):
            return place
    raise SystemExit("ncu was not found: install Nsight Compute or pass --ncu PATH")


def ncu_command(ncu: str, report: Path, arguments: list[str]) -> list[str]:
    """ncu on the known kernels' script, which starts and stops the profiler and so leaves its own set-up out."""
    metrics = [*COMPARED.values(), *EXTRA]
    command = [ncu, "--force-overwrite", "--export", str(report), "--profile-from-start", "off"]
    command += ["--clock-control", "none", "--cache-control", "none", "--nvtx"]
    command += ["--section", "SpeedOfLight", "--metrics", ",".join(metrics)]
    return [*command, sys.executable, str(KNOWN_SCRIPT), "--profile", *arguments]


def profile_with_ncu(ncu: str, out_dir: Path, arguments: list[str]) -> list[Launch]:
    """Profile the known kernels in one process; when that leaves no report, once more without the graph."""
    report = out_dir / "known.ncu-rep"
    for skipped in ([], ["--skip", "graph"]):
        report.unlink(missing_ok=True)
        command = ncu_command(ncu, report, [*arguments, "--write-list", str(out_dir / KNOWN_LIST), *skipped])
        run_logged(command, out_dir / "ncu.log", timeout_s=420)
        if report.exists():
            return read_report(ncu, report, out_dir)
        print(f"ncu wrote no report: see {out_dir / 'ncu.log'}", file=sys.stderr)
    return []


def run_logged(command: list[str], log: Path, timeout_s: float) -> int | None:
    """Run a command with its output in `log`; its exit code, or None when it ran out of time."""
    print(f"running: {' '.join(command[:3])} ... > {log}", file=sys.stderr)
    started = time.perf_counter()
    with log.open("a") as stream:
        stream.write(f"$ {' '.join(command)}\n")
        stream.flush()
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # ncu's child too: it would keep the GPU
            process.wait()
            code = None
    print(f"  exit code {code} after {time.perf_counter() - started:.1f} s", file=sys.stderr)
    return code


def read_report(ncu: str, report: Path, out_dir: Path) -> list[Launch]:
    """The launches of a report in profiling order, with what the speed-of-light rule said of each."""
    raw = export_page(ncu, report, "raw", out_dir / "ncu_raw.csv")
    details = export_page(ncu, report, "details", out_dir / "ncu_details.csv")
    return join_pages(raw, details)


def join_pages(raw: str, details: str) -> list[Launch]:
    launches = read_raw_page(raw)
    for identifier, text in rule_results(details):
        if identifier in launches:
            launches[identifier].rules.append(text)
    return [launches[identifier] for identifier in sorted(launches)]


def export_page(ncu: str, report: Path, page: str, path: Path) -> str:
    command = [ncu, "--import", str(report), "--csv", "--page", page, "--print-units", "base"]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if result.returncode != 0:
        print(f"ncu --page {page} failed: {result.stdout[-300:]}{result.stderr[-300:]}", file=sys.stderr)
    path.write_text(result.stdout)
    return result.stdout


def table_of(text: str) -> list[dict[str, str]]:
    """The CSV table in ncu's output, whatever log lines stand before it."""
    start = text.find('"ID",')
    if start < 0:
        return []
    return list(csv.DictReader(io.StringIO(text[start:])))


def number(text: str | None) -> float | None:
    """A value of ncu's CSV; None for an empty cell or n/a."""
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def read_raw_page(text: str) -> dict[int, Launch]:
    """Launches by ncu's ID; the row of units has no ID and is left out."""
    launches = {}
    to_ns = 1.0
    for row in table_of(text):
        if not (row["ID"] or "").isdigit():
            to_ns = NANOSECONDS.get(row.get(COMPARED["duration_ns"]) or "", 1.0)
            continue
        values = {name: number(row.get(name)) for name in (*COMPARED.values(), *EXTRA)}
        measured = {name: value for name, value in values.items() if value is not None}
        if COMPARED["duration_ns"] in measured:
            measured[COMPARED["duration_ns"]] *= to_ns
        launches[int(row["ID"])] = Launch(
            row.get("Kernel Name", ""),
            plain_shape(row.get("Grid Size", "")),
            plain_shape(row.get("Block Size", "")),
            measured,
        )
    return launches


def plain_shape(text: str | None) -> str:
    """`(16, 1, 1)` or `16, 1, 1` as `16x1x1`."""
    return "x".join(re.findall(r"\d+", text or ""))


def rule_results(text: str) -> Iterator[tuple[int, str]]:
    """(ID, description) of each result of the rule SOLBottleneck on the details page."""
    for row in table_of(text):
        description = row.get("Rule Description") or ""
        if (row.get("Rule Name") or "") == "SOLBottleneck" and description and (row["ID"] or "").isdigit():
            yield int(row["ID"]), description


# --- nanalyze -------------------------------------------------------------------------------------


def record_child(run_dir: Path, names: str | None, reps: int) -> None:
    """In a process of its own: the known kernels under the exact profiler, each behind its marker."""
    sys.path.insert(0, str(KNOWN_SCRIPT.parent))
    import known_kernels as examples  # the script beside this one's folder

    from nanalyze import recorder

    target = examples.make_target("cuda")
    works = list(examples.prepare(examples.select(names), target))
    target.kernels.launch(MARKER, 1, 32)  # compiled before the recording
    examples.synchronize(target)
    with recorder.record(str(run_dir), exact=recorder.Exact(first=reps, budget_pct=100)):
        for known, work in works:
            try:
                examples.mark(known, target)
                for _ in range(reps):
                    examples.run_range(known, work, recorder.annotate, work.exact_calls)
                examples.synchronize(target)
            except Exception as error:
                print(f"{known.name}: failed: {type(error).__name__}: {error}", file=sys.stderr)


def record_ours(out_dir: Path, arguments: list[str]) -> list[Launch]:
    run_dir = out_dir / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [sys.executable, __file__, str(out_dir), "--record-into", str(run_dir)]
    run_logged([*command, *arguments], out_dir / "record.log", timeout_s=420)
    return read_run(run_dir) if run_dir.exists() else []


def read_table(run_dir: Path, table: str) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    for path in sorted((run_dir / table).glob("process=*/[0-9]*.parquet")):
        rows += pq.ParquetFile(path).read().to_pylist()
    return rows


def read_run(run_dir: Path) -> list[Launch]:
    """Every launch of a run in launch order, with its exact metrics where it has some."""
    classes = {row["kernel_class_id"]: row for row in read_table(run_dir, "kernel_classes")}
    metrics: dict[int, dict[str, float]] = defaultdict(dict)
    class_of: dict[int, int | None] = {
        row["correlation_id"]: row["kernel_class_id"] for row in read_table(run_dir, "kernels")
    }
    graphs = set()
    for row in read_table(run_dir, "exact"):
        correlation = row["correlation_id"]
        if correlation is None:
            continue
        if row["value"] is not None:
            metrics[correlation][row["metric"]] = row["value"]
        if row["scope"] == "graph":
            graphs.add(correlation)
        else:
            class_of[correlation] = row["kernel_class_id"]
    launches = []
    for correlation in sorted(set(class_of) | graphs):
        is_graph = correlation in graphs
        shape = {} if is_graph else classes.get(class_of.get(correlation), {})
        launches.append(
            Launch(
                "graph" if is_graph else shape.get("name") or shape.get("name_mangled") or "",
                "x".join(str(shape.get(f"grid_{axis}", "")) for axis in "xyz"),
                "x".join(str(shape.get(f"block_{axis}", "")) for axis in "xyz"),
                metrics.get(correlation, {}),
                class_id=None if is_graph else class_of.get(correlation),
            )
        )
    return launches


def our_verdicts(run_dir: Path) -> dict[int, str]:
    """Bound by kernel class from nanalyze's own analysis; empty where DuckDB is not installed."""
    try:
        import nanalyze.analysis as analysis

        with analysis.open(str(run_dir)) as run:
            table = run.verdicts()
        return {int(i): str(bound) for i, bound in zip(table["kernel_class_id"], table["bound"], strict=True)}
    except Exception as error:
        print(f"no verdicts from the analysis ({type(error).__name__}: {error}); using the rule", file=sys.stderr)
        return {}


# --- the comparison -------------------------------------------------------------------------------


def segments(launches: Iterable[Launch], names: list[str]) -> dict[str, list[Launch]]:
    """Launches by known kernel: those between its marker and the next one."""
    found: dict[str, list[Launch]] = {}
    current: list[Launch] | None = None
    for launch in launches:
        if MARKER in launch.kernel:
            place = int(launch.grid.split("x")[0] or 0)
            current = found.setdefault(names[place - 1], []) if 0 < place <= len(names) else None
        elif current is not None:
            current.append(launch)
    return found


def duration(launch: Launch) -> float:
    return launch.metrics.get("gpu__time_duration.sum", 0.0)


def by_shape(launches: Iterable[Launch]) -> dict[tuple[str, str, str], list[Launch]]:
    groups: dict[tuple[str, str, str], list[Launch]] = defaultdict(list)
    for launch in launches:
        if launch.metrics:
            groups[launch.shape].append(launch)
    return dict(groups)


def longest(groups: dict[tuple[str, str, str], list[Launch]]) -> list[Launch]:
    return max(groups.values(), key=lambda group: sum(map(duration, group)), default=[])


def counterpart(theirs: list[Launch], groups: dict[tuple[str, str, str], list[Launch]]) -> list[Launch]:
    """Our launches of the kernel that `theirs` holds: by name and shape, then by shape, then the longest."""
    if not theirs:
        return longest(groups)
    shape = theirs[0].shape
    if shape in groups:
        return groups[shape]
    same_shape = {key: group for key, group in groups.items() if key[1:] == shape[1:]}
    return longest(same_shape or groups)


def medians(launches: list[Launch]) -> dict[str, float | None]:
    """Each compared metric's median over the launches, under our counter's name, and the waves."""
    result: dict[str, float | None] = {}
    for name, metric in {**COMPARED, "waves": WAVES}.items():
        values = [launch.metrics[metric] for launch in launches if metric in launch.metrics]
        result[name] = statistics.median(values) if values else None
    return result


def compare(name: str, expected: str, theirs: list[Launch], ours: list[Launch], verdicts: dict[int, str]) -> Row:
    their_group = longest(by_shape(theirs))
    our_group = counterpart(their_group, by_shape(ours))
    ncu, mine = medians(their_group), medians(our_group)
    ncu_bound = sol_bound(ncu["compute_pct"], ncu["memory_pct"])
    our_bound, source = our_verdict(our_group, mine, verdicts)
    missing = [tool for tool, side in (("ncu", ncu), ("nanalyze", mine)) if side["compute_pct"] is None]
    rules = [rule for launch in their_group for rule in launch.rules]
    return Row(
        name,
        expected,
        (their_group or our_group)[0].kernel if their_group or our_group else None,
        ncu,
        mine,
        ncu_bound,
        rules[0] if rules else None,
        our_bound,
        source,
        None if missing or ncu_bound is None or our_bound is None else same_bound(ncu_bound, our_bound),
        None if missing else within_tolerance(ncu, mine),
        f"no speed of light from {' and '.join(missing)}" if missing else None,
    )


def our_verdict(
    group: list[Launch], mine: dict[str, float | None], verdicts: dict[int, str]
) -> tuple[str | None, str | None]:
    for launch in group:
        if launch.class_id in verdicts:
            return verdicts[launch.class_id], "analysis"
    return sol_bound(mine["compute_pct"], mine["memory_pct"]), "rule" if group else None


def same_bound(ncu_bound: str, our_bound: str) -> bool:
    """Nsight Compute has no verdict `launch`: a launch shorter than its own overhead is `latency` there."""
    return our_bound == ncu_bound or (our_bound == "launch" and ncu_bound == "latency")


def within_tolerance(ncu: dict[str, float | None], ours: dict[str, float | None]) -> bool | None:
    """Whether compute, memory and DRAM % differ by at most 3 points; None for kernels under 50 us."""
    if (ncu["duration_ns"] or 0.0) < MIN_DURATION_NS:
        return None
    pairs = [(ncu[key], ours[key]) for key in ("compute_pct", "memory_pct", "dram_pct")]
    known = [abs(a - b) for a, b in pairs if a is not None and b is not None]
    return max(known) <= TOLERANCE_POINTS if len(known) == len(pairs) else None


# --- the report -----------------------------------------------------------------------------------


def pair(row: Row, key: str) -> str:
    return f"{shown(row.ncu[key])} / {shown(row.ours[key])}"


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def yes_no(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "NO"


def rule_title(rule: str | None) -> str:
    """The first sentence of ncu's rule, short enough for a table."""
    return "-" if rule is None else rule.replace("|", "/").split(". ")[0][:80]


def markdown(rows: list[Row]) -> str:
    head = (
        "kernel",
        "us ncu / ours",
        "compute %",
        "memory %",
        "DRAM %",
        "L2 %",
        "ncu bound",
        "our bound",
        "agree",
        "<= 3 points",
        "expected",
        "ncu's rule says",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        micro = [None if t["duration_ns"] is None else t["duration_ns"] / 1e3 for t in (row.ncu, row.ours)]
        cells = [row.name, f"{shown(micro[0])} / {shown(micro[1])}"]
        cells += [pair(row, key) for key in ("compute_pct", "memory_pct", "dram_pct", "l2_pct")]
        cells += [row.ncu_bound or "-", f"{row.our_bound or '-'} ({row.our_bound_source or '-'})"]
        cells += [yes_no(row.agree), yes_no(row.within_tolerance), row.expected]
        cells += [row.problem or rule_title(row.ncu_rule)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *summary(rows)]) + "\n"


def summary(rows: list[Row]) -> list[str]:
    agreed = [row.agree for row in rows if row.agree is not None]
    close = [row.within_tolerance for row in rows if row.within_tolerance is not None]
    failed = [row.name for row in rows if row.problem]
    lines = [f"Verdicts agree for {sum(agreed)} of {len(agreed)} kernels."]
    lines.append(f"Compute, memory and DRAM % within 3 points for {sum(close)} of {len(close)} kernels over 50 us.")
    if failed:
        lines.append(f"Not compared: {', '.join(failed)}.")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--reps", type=int, default=3, help="launches measured of each kernel (default 3)")
    parser.add_argument("--only", metavar="NAMES", help="comma-separated names of known kernels")
    parser.add_argument("--ncu", metavar="PATH")
    parser.add_argument("--reuse", action="store_true", help="compare again what OUT_DIR already holds; needs no GPU")
    parser.add_argument("--record-into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.record_into:
        record_child(arguments.record_into, arguments.only, arguments.reps)
        return
    out_dir: Path = arguments.out_dir
    out_dir.mkdir(parents=True, exist_ok=True)
    if arguments.reuse:
        theirs, ours = earlier_measurements(out_dir)
    else:
        passed_on = ["--reps", str(arguments.reps), *(["--only", arguments.only] if arguments.only else [])]
        theirs = profile_with_ncu(find_ncu(arguments.ncu), out_dir, passed_on)
        ours = record_ours(out_dir, passed_on)
    write_comparison(out_dir, arguments.only, theirs, ours)


def earlier_measurements(out_dir: Path) -> tuple[list[Launch], list[Launch]]:
    pages = [(out_dir / name).read_text() for name in ("ncu_raw.csv", "ncu_details.csv")]
    return join_pages(pages[0], pages[1]), read_run(out_dir / "run")


def write_comparison(out_dir: Path, only: str | None, theirs: list[Launch], ours: list[Launch]) -> None:
    known = json.loads((out_dir / KNOWN_LIST).read_text())
    names = [entry["name"] for entry in known]
    verdicts = our_verdicts(out_dir / "run")
    their_parts, our_parts = segments(theirs, names), segments(ours, names)
    chosen = only.split(",") if only else names
    rows = [
        compare(
            entry["name"],
            "/".join(entry["bounds"]),
            their_parts.get(entry["name"], []),
            our_parts.get(entry["name"], []),
            verdicts,
        )
        for entry in known
        if entry["name"] in chosen
    ]
    (out_dir / "ncu_check.json").write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    (out_dir / "ncu_check.md").write_text(markdown(rows))
    print(markdown(rows))


if __name__ == "__main__":
    main()
