"""The same questions to nanalyze, pandas, polars, Holistic Trace Analysis and nsys-ai: time, memory, and the answers.

    python -m venv peers && peers/bin/pip install pandas polars pyarrow HolisticTraceAnalysis nsys-ai
    python benchmarks/peers.py OUT --peers peers/bin/python                 # 10 M launches, traces of 1 M events
    python benchmarks/peers.py OUT --peers peers/bin/python --launches 100_000_000 --only parquet

`parquet`: a synthetic run of `make_run.py`; pandas and polars read its Parquet files as an expert would with them, only
the columns that a question needs. `kineto` and `nsys`: a trace of torch.profiler and a SQLite export of Nsight Systems,
as `import.py` writes them, which HTA and nsys-ai read; nanalyze imports the trace first, and that counts.

Each way answers each question in a process of its own, from opening the files to the answer, imports of modules left
out; the best of `--rounds` rounds counts, taken in turns. Peak is the resident memory of the process. Answers are
compared: counts and times exactly, as far as the peer does not round; percentiles within 1 %, as ours are within 0.6 %.
Hashes are not compared, as no peer does that. What HTA's and nsys-ai's own figures need besides is part of their time.
A way that fails is left out with a message. Needs no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
SAMPLE_NS = 1_000_000
LIMIT_S = 900
Answer = dict[str, Any]

# --- nanalyze --------------------------------------------------------------------------------------


def _nanalyze(question: str, source: Path) -> Answer:
    import nanalyze.analysis as na

    with na.open(source, verify=False) as run:  # as no peer compares hashes
        return OURS[question](run)


def _classes(run: Any) -> Answer:
    rows = run.query("kernel_durations").to_dict("records")
    return {
        str(row["kernel_class_id"]): [row["launches"], row["total_ns"], row["p50_ns"], row["p99_ns"]] for row in rows
    }


def _gaps(run: Any) -> Answer:
    return {str(row["stream_id"]): row["gap_ns"] for row in run.query("launch_gaps").to_dict("records")}


def _busy(run: Any) -> Answer:
    return {"busy_ns": int(run.query("timeline_utilisation", buckets=1)["busy_ns"].sum())}


def _overlap(run: Any) -> Answer:
    rows = run.arrow(OVERLAP).to_pylist()
    return {str(row["kernel_class_id"]): row["weighted_bytes"] for row in rows}


# What was read until the end of a launch less what was until its start, each within the sample that it lies in: the
# samples are added up once, and no launch is cut into pieces. There is one device.
OVERLAP = f"""
WITH numbered AS (
    SELECT
        start_ns // {SAMPLE_NS} AS sample,
        dram_read_bytes AS bytes,
        dram_read_bytes / (end_ns - start_ns) AS bytes_per_ns,
        sum(dram_read_bytes) OVER (ORDER BY start_ns ROWS UNBOUNDED PRECEDING) AS bytes_until
    FROM samples
)
SELECT
    k.kernel_class_id,
    sum(
        CASE
            WHEN f.sample = l.sample THEN (k.end_ns - k.start_ns) * f.bytes_per_ns
            ELSE ((f.sample + 1) * {SAMPLE_NS} - k.start_ns) * f.bytes_per_ns
                + (l.bytes_until - l.bytes - f.bytes_until)
                + (k.end_ns - l.sample * {SAMPLE_NS}) * l.bytes_per_ns
        END
    ) AS weighted_bytes
FROM _launches AS k
JOIN numbered AS f ON f.sample = k.start_ns // {SAMPLE_NS}
JOIN numbered AS l ON l.sample = (k.end_ns - 1) // {SAMPLE_NS}
WHERE k.end_ns > k.start_ns
GROUP BY k.kernel_class_id
"""

OURS: dict[str, Callable[[Any], Answer]] = {"classes": _classes, "gaps": _gaps, "busy": _busy, "overlap": _overlap}

# --- pandas ----------------------------------------------------------------------------------------


def _pandas(question: str, source: Path) -> Answer:
    import pandas as pd

    def read(table: str, *columns: str) -> Any:
        return pd.read_parquet(source / table, columns=list(columns))

    if question == "classes":
        found = read("kernels", "kernel_class_id", "duration_ns").groupby("kernel_class_id")["duration_ns"]
        sums, spread = found.agg(["count", "sum"]), found.quantile([0.5, 0.99]).unstack()
        rows = zip(sums.index, sums["count"], sums["sum"], spread[0.5], spread[0.99], strict=True)
        return {str(key): [int(count), int(total), p50, p99] for key, count, total, p50, p99 in rows}
    keys = {"gaps": ["stream_id"], "busy": [], "overlap": ["kernel_class_id"]}[question]
    frame = read("kernels", "start_ns", "duration_ns", *keys)
    frame["end_ns"] = frame["start_ns"] + frame.pop("duration_ns")
    if question == "gaps":
        frame = frame.sort_values("start_ns", kind="stable")
        ends = frame.groupby("stream_id")["end_ns"].cummax()
        before = ends.groupby(frame["stream_id"]).shift(fill_value=2**62)  # the first has no gap before it
        gaps = (frame["start_ns"] - before).clip(lower=0).groupby(frame["stream_id"]).sum()
        return {str(stream): int(gap) for stream, gap in gaps.items()}
    if question == "busy":
        frame = frame.sort_values("start_ns", kind="stable")
        before = frame["end_ns"].cummax().shift(fill_value=0)
        fresh = frame["end_ns"] - frame["start_ns"].where(frame["start_ns"] > before, before)
        return {"busy_ns": int(fresh.clip(lower=0).sum())}
    return _pandas_overlap(frame, read("samples", "start_ns", "end_ns", "dram_read_bytes"))


def _pandas_overlap(frame: Any, samples: Any) -> Answer:
    import numpy as np

    first = frame["start_ns"].to_numpy() // SAMPLE_NS
    pieces = (frame["end_ns"].to_numpy() - 1) // SAMPLE_NS - first + 1
    rows = np.repeat(np.arange(len(frame)), pieces)
    number = first[rows] + np.arange(len(rows)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    frame = frame.take(rows)
    end = np.minimum(frame["end_ns"].to_numpy(), (number + 1) * SAMPLE_NS)
    length = end - np.maximum(frame["start_ns"].to_numpy(), number * SAMPLE_NS)
    frame = frame[["kernel_class_id"]].assign(sample=number, length_ns=length)
    samples["sample"] = samples["start_ns"] // SAMPLE_NS
    samples["rate"] = samples["dram_read_bytes"] / (samples["end_ns"] - samples["start_ns"])
    frame = frame.merge(samples[["sample", "rate"]], on="sample")
    found = (frame["length_ns"] * frame["rate"]).groupby(frame["kernel_class_id"]).sum()
    return {str(key): float(value) for key, value in found.items()}


# --- polars ----------------------------------------------------------------------------------------


def _polars(question: str, source: Path) -> Answer:
    import polars as pl

    kernels = pl.scan_parquet(source / "kernels" / "**" / "*.parquet", hive_partitioning=False)
    start, end = pl.col("start_ns"), pl.col("end_ns")
    if question == "classes":
        own = pl.col("duration_ns")
        found = kernels.group_by("kernel_class_id").agg(
            own.count().alias("count"), own.sum().alias("sum"),
            own.quantile(0.5, "linear").alias("p50"), own.quantile(0.99, "linear").alias("p99"),
        )  # fmt: skip
        rows = found.collect(engine="streaming").iter_rows(named=True)
        return {str(row["kernel_class_id"]): [row["count"], row["sum"], row["p50"], row["p99"]] for row in rows}
    launches = kernels.with_columns(end_ns=start + pl.col("duration_ns"))
    if question == "gaps":
        ordered = launches.select("stream_id", "start_ns", "end_ns").sort("start_ns")
        gap = (start - end.cum_max().shift()).over("stream_id").clip(lower_bound=0)
        rows = ordered.select("stream_id", gap.alias("gap")).group_by("stream_id").agg(pl.col("gap").sum())
        return {str(stream): gap for stream, gap in rows.collect(engine="streaming").iter_rows()}
    if question == "busy":
        before = end.cum_max().shift(fill_value=0)
        fresh = (end - pl.max_horizontal(start, before)).clip(lower_bound=0).sum()
        found = launches.select("start_ns", "end_ns").sort("start_ns").select(fresh.alias("busy_ns"))
        return {"busy_ns": found.collect(engine="streaming").item()}
    return _polars_overlap(launches, pl.scan_parquet(source / "samples" / "**" / "*.parquet", hive_partitioning=False))


def _polars_overlap(launches: Any, samples: Any) -> Answer:
    import polars as pl

    start, end, number = pl.col("start_ns"), pl.col("end_ns"), pl.col("sample")
    rate = pl.col("dram_read_bytes") / (end - start)
    pieces = (
        launches.select("kernel_class_id", "start_ns", "end_ns")
        .with_columns(sample=pl.int_ranges(start // SAMPLE_NS, (end - 1) // SAMPLE_NS + 1))
        .explode("sample")
        .join(samples.select((start // SAMPLE_NS).alias("sample"), rate.alias("rate")), on="sample")
    )
    length = pl.min_horizontal(end, (number + 1) * SAMPLE_NS) - pl.max_horizontal(start, number * SAMPLE_NS)
    found = pieces.group_by("kernel_class_id").agg((length * pl.col("rate")).sum().alias("bytes"))
    return {str(key): value for key, value in found.collect(engine="streaming").iter_rows()}


# --- traces ----------------------------------------------------------------------------------------


def _imported(question: str, source: Path) -> Answer:
    """Import the trace, then ask the run: kernels by name, busy time of the device."""
    import nanalyze.analysis as na
    from nanalyze.importers import registry

    with tempfile.TemporaryDirectory() as folder:
        registry.import_files([source], Path(folder, "run"))
        with na.open(Path(folder, "run")) as run:
            by_name = run.sql(
                "SELECT c.name, sum(k.total_ns) AS total_ns, sum(k.launches) AS launches FROM _class_devices AS k"
                " JOIN (SELECT DISTINCT kernel_class_id, name FROM kernel_classes) AS c USING (kernel_class_id)"
                " GROUP BY c.name ORDER BY c.name"
            )
            kernels = {row["name"]: int(row["total_ns"]) for row in by_name.to_dict("records")}
            launches = {row["name"]: int(row["launches"]) for row in by_name.to_dict("records")}
            span, busy = _span(run)
    return {"kernels": kernels, "launches": launches, "idle_share": 1 - busy / span}


def _span(run: Any) -> tuple[int, int]:
    use = run.query("timeline_utilisation", buckets=1)
    row = run.sql("SELECT min(first_long_ns) AS first, max(last_long_ns) AS last FROM _class_devices").iloc[0]
    return int(row["last"] - row["first"]), int(use["busy_ns"].sum())


def _hta(question: str, source: Path) -> Answer:
    from hta.trace_analysis import TraceAnalysis

    # By itself it leaves the last step out.
    analysis = TraceAnalysis({0: source.name}, str(source.parent), include_last_profiler_step=True)
    _, kernels = analysis.get_gpu_kernel_breakdown(visualize=False, duration_ratio=1.0, num_kernels=100_000)
    analysis.get_temporal_breakdown(visualize=False)
    return {
        "kernels": {
            name: round(total * 1e3)
            for name, total in zip(kernels["name"], kernels["sum (us)"], strict=True)
            if not name.startswith("Memcpy")  # it takes the copy that comes first for a kernel
        },
        "idle_share": None,  # its busy time has copies in it
    }


def _nsys_ai(question: str, source: Path) -> Answer:
    from nsys_ai import overlap, profile
    from nsys_ai.skills.registry import get_skill

    with profile.open(str(source)) as opened:
        rows = get_skill("top_kernels").execute(opened.query_conn(), limit=100_000)
        found = overlap.overlap_analysis(opened, 0)
    return {
        "kernels": {row["kernel_name"]: round(row["total_ms"] * 1e6) for row in rows},
        "idle_share": found["idle_ms"] / found["total_ms"],
    }


WAYS: dict[str, Callable[[str, Path], Answer]] = {
    "nanalyze": _nanalyze,
    "pandas": _pandas,
    "polars": _polars,
    "nanalyze import": _imported,
    "Holistic Trace Analysis": _hta,
    "nsys-ai": _nsys_ai,
}
IMPORTS = {
    "nanalyze": ("nanalyze.analysis.run", "nanalyze.analysis.launch_streams", "pandas", "pyarrow.parquet"),
    "pandas": ("pandas", "pyarrow.parquet", "numpy"),
    "polars": ("polars",),
    "nanalyze import": ("nanalyze.analysis.run", "nanalyze.importers.registry", "pandas", "pyarrow.parquet"),
    "Holistic Trace Analysis": ("hta.trace_analysis",),
    "nsys-ai": ("nsys_ai.profile", "nsys_ai.overlap", "nsys_ai.skills.registry", "duckdb"),
}
# Who answers each question, ours first.
KINDS: dict[str, tuple[str, ...]] = {
    "classes": ("nanalyze", "pandas", "polars"),
    "gaps": ("nanalyze", "pandas", "polars"),
    "busy": ("nanalyze", "pandas", "polars"),
    "overlap": ("nanalyze", "pandas", "polars"),
    "kineto": ("nanalyze import", "Holistic Trace Analysis"),
    "nsys": ("nanalyze import", "nsys-ai"),
}
# HTA rounds each start up and each end down to microseconds, nsys-ai gives sums in hundredths of a millisecond.
ROUNDED_NS = {"kineto": 2_000, "nsys": 0}
NAMES = {
    "classes": "count, total, p50 and p99 of each class",
    "gaps": "idle time of each stream",
    "busy": "busy time of the device",
    "overlap": "bytes of each class from samples",
    "kineto": "torch.profiler trace: time of each kernel, busy time",
    "nsys": "Nsight Systems export: time of each kernel, busy time",
}


@dataclass(frozen=True)
class Taken:
    """What a way took for a question: seconds, CPU seconds, MiB; and its answer."""

    seconds: float
    cpu_s: float
    peak_mib: float
    answer: Answer


def ask(way: str, question: str, source: Path) -> None:
    """In the child: answer, and print what it took with the answer as JSON."""
    for name in IMPORTS[way]:
        importlib.import_module(name)
    began, cpu = time.perf_counter(), time.process_time()
    answer = WAYS[way](question, source)
    took = [time.perf_counter() - began, time.process_time() - cpu]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print("\n" + json.dumps({"took": [*took, peak], "answer": answer}))


def measured(python: str, way: str, question: str, source: Path) -> Taken | None:
    command = [python, __file__, str(source), "--ask", f"{way}/{question}"]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        print(f"  {way}, {question}: more than {LIMIT_S} s", file=sys.stderr)
        return None
    if done.returncode:
        print(f"  {way}, {question}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    found = json.loads(done.stdout.splitlines()[-1])
    return Taken(*found["took"], found["answer"])


def compared(question: str, source: Path, peers: str, rounds: int) -> dict[str, Taken]:
    """The best round of each way."""
    best: dict[str, Taken] = {}
    for _ in range(rounds):
        for way in KINDS[question]:
            taken = measured(sys.executable if way.startswith("nanalyze") else peers, way, question, source)
            if taken is not None and (way not in best or taken.seconds < best[way].seconds):
                best[way] = taken
    return best


# --- answers ---------------------------------------------------------------------------------------


def differences(question: str, ours: Answer, theirs: Answer) -> list[str]:
    """In what two answers disagree; empty where they agree."""
    if question in ROUNDED_NS:
        return _trace_differences(ours, theirs, ROUNDED_NS[question])
    if ours.keys() != theirs.keys():
        return [f"{len(ours)} and {len(theirs)} rows"]
    found = []
    for key, own in ours.items():
        for at, (a, b) in enumerate(zip(_list(own), _list(theirs[key]), strict=True)):
            tolerance = 0.01 if at > 1 else 1e-9 if isinstance(a, float) else 0.0
            if abs(a - b) > tolerance * abs(b):
                found.append(f"{key}: {a} and {b}")
    return found


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _trace_differences(ours: Answer, theirs: Answer, rounded_ns: int) -> list[str]:
    """Times of kernels may differ by `rounded_ns` a launch and 10 us, as peers round them."""
    own, other = ours["kernels"], theirs["kernels"]
    if own.keys() != other.keys():
        return [f"{len(own)} and {len(other)} kernels"]
    found = []
    for name, total in own.items():
        if abs(total - other[name]) > max(10_000, rounded_ns * ours["launches"][name]):
            found.append(f"{name}: {total} and {other[name]} ns")
    if theirs["idle_share"] is not None and abs(ours["idle_share"] - theirs["idle_share"]) > 1e-4:
        found.append(f"idle {ours['idle_share']} and {theirs['idle_share']}")
    return found


def rows(question: str, size: str, best: Mapping[str, Taken]) -> list[str]:
    """Lines of a Markdown table; ratios are over the first, which is ours."""
    ours = next(iter(best.values()))
    lines = []
    for way, taken in best.items():
        wrong = [] if taken is ours else differences(question, ours.answer, taken.answer)
        if wrong:
            print(f"  {question}: {way} differs in {len(wrong)}: {wrong[:3]}", file=sys.stderr)
        agrees = "" if taken is ours else "no" if wrong else "yes"
        ratio = f"{taken.seconds / ours.seconds:.1f}x | {taken.peak_mib / ours.peak_mib:.1f}x"
        lines.append(
            f"| {NAMES[question] if taken is ours else ''} | {size if taken is ours else ''} | {way} | "
            f"{taken.seconds:.2f} | {taken.cpu_s:.2f} | {taken.peak_mib:,.0f} | {ratio} | {agrees} |"
        )
    return lines


# --- sources ---------------------------------------------------------------------------------------


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source_of(question: str, out: Path, launches: int, events: int) -> tuple[Path, str]:
    """The file or run that the question is asked of, written unless it is there, and its size in words."""
    if question == "kineto":
        path = out / f"trace-{events}.json"
        if not path.exists():
            maker = _module("make_kineto")
            maker.write_trace(path, maker.Mix(events=events))
        return path, f"{events / 1e6:g} M events"
    if question == "nsys":
        path = out / f"report-{events}.sqlite"
        if not path.exists():
            _module("import").nsys_file(path, events)
        return path, f"{events / 1e6:g} M kernels"
    scale = _module("scale")
    return scale.made(scale.Asked(out), launches, True), f"{launches / 1e6:g} M launches"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--peers", metavar="PYTHON", default=sys.executable, help="interpreter that has the peers")
    parser.add_argument("--launches", type=int, default=10_000_000)
    parser.add_argument("--events", type=int, default=1_000_000, help="of the traces")
    parser.add_argument(
        "--only", default=",".join(KINDS), help="questions, comma-separated; parquet for the first four"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.ask:
        way, _, question = given.ask.partition("/")
        ask(way, question, given.out)
        return
    questions = given.only.replace("parquet", "classes,gaps,busy,overlap").split(",")
    if unknown := set(questions) - set(KINDS):
        sys.exit(f"peers: no such question: {', '.join(sorted(unknown))}. There are {', '.join(KINDS)}.")
    given.out.mkdir(parents=True, exist_ok=True)
    print("| question | of | with | s | CPU s | peak MiB | time | memory | agrees |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for question in questions:
        source, size = source_of(question, given.out, given.launches, given.events)
        best = compared(question, source, given.peers, given.rounds)
        print("\n".join(rows(question, size, best)), flush=True)


if __name__ == "__main__":
    main()
