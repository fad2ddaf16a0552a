"""Do counters attributed from samples agree with the truth, and how long does the attribution take?

    python benchmarks/attribution.py OUT_DIR                    # simulated jobs: no GPU needed, three minutes
    python benchmarks/attribution.py OUT_DIR --seconds 600      # a longer simulated job for the timing
    python benchmarks/attribution.py OUT_DIR --gpu              # recorded jobs against exact counters
    python benchmarks/attribution.py OUT_DIR --again            # the recordings of an earlier --gpu in OUT_DIR

Without a GPU, kernel streams with known rates are simulated, sampled, attributed and compared: errors,
and how many of the 95 % intervals hold the truth. With one, each of three jobs (a GPT-2-small training
step, a ResNet-50 training step and an inference loop in a CUDA graph) is recorded three times: sampled;
with the compared counters of every launch of one step, since launches of one class can differ (a GEMM's
inner dimension is no part of its shape); and with the full set for one launch of each class, for the
verdicts. Kernels in a graph have no exact counters of their own, so that job's kernels are measured while
it runs outside of its graph. The exact profiler serialises kernels; what their caches held then differs,
and not all of a difference is an error of the estimate. The totals of a whole step, counted as one range
with nothing serialised, tell the two apart.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the commands set it: threads that wait for each other spin

import numpy as np

from nanalyze.rundir.sampled import TRACED_COLUMNS, TRACING_INSTRUCTIONS

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples")]

HOLDS = 0.9  # classes that hold this share of kernel time are judged
COUNTERS = ("inst", "sm_active_pct", "l2_bytes", "dram_read_bytes", "dram_write_bytes", "pipe_tensor_pct")
# What the profiler counts of every launch; the names in `samples` and the units agree.
RAW = {
    "inst": "sm__inst_executed.sum",
    "l2_bytes": "lts__t_bytes.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "sm_cycles_active": "sm__cycles_active.sum",
}
PERCENTAGES = (
    "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
)
# A kernel whose exact percentage of the peak is not above does not use the unit: layer norms show 2 % of the tensor
# pipe.
# Every kernel executes instructions; what one block does in 2 us is 0.001 % of what the device can.
USES_PCT = {"pipe_tensor_pct": 5.0, "dram_read_bytes": 5.0, "dram_write_bytes": 5.0, "inst": 0.5, "l2_bytes": 0.5}
ISSUES, PORT_BYTES = 4, 64  # a cycle of an SM: warp instructions; bytes to and from L2
# A class's first launch is measured exactly twice: in one pass, and with the full set in many. A counter on which these
# differ by more says how it was measured (what the caches held, which clock ran) as much as what the kernel does.
UNDISTURBED = 0.05
# A percentage of elapsed cycles is diluted where the profiler's span of a launch is longer than the launch: it holds up
# to SPAN_US before and after. So exact ones are taken of the cycles that the launch took while the job ran as always.
OF_ELAPSED = ("sm_active_pct", "pipe_tensor_pct")
SPAN_US = 2.0
DIFFER = 1.3  # launches of a class whose durations differ by more (tenth to ninetieth percentile) do different work

Row = dict[str, Any]


# --- simulated ------------------------------------------------------------------------------------


def simulated(out: Path) -> list[Row]:
    """One row a job: errors of the classes that hold 90 % of time, share of intervals that hold the truth."""
    from simulator import Job

    jobs = {
        "GPT-2-like, 1 ms": Job(classes=85, seconds=10, mean_us=(8, 90), launches_a_step=790, gap_share=0.03),
        "the same, launches vary by 10 %": Job(
            classes=85, seconds=10, mean_us=(8, 90), launches_a_step=790, gap_share=0.03, variation=0.1
        ),
        "the same, each launch does its class's work in a time that varies by 5 %": Job(
            classes=85, seconds=10, mean_us=(8, 90), launches_a_step=790, gap_share=0.03, lengths=0.05, same_work=True
        ),
        "the same, 100 us samples": Job(
            classes=85, seconds=10, mean_us=(8, 90), launches_a_step=790, variation=0.1, interval_us=100
        ),
        "three streams, 20 % lost, uneven": Job(classes=40, seconds=10, streams=3, lost=0.2, jitter=0.3, variation=0.1),
        "1 % heavy samples": Job(classes=40, seconds=10, heavy=0.01, noise=0.01, variation=0.1),
        "drift to twice": Job(classes=40, seconds=10, drift=1.0, variation=0.1),
        "two problem sizes in 10 of 85, clocks differ, samples cut short": Job(
            classes=85,
            seconds=10,
            mean_us=(8, 90),
            launches_a_step=790,
            gap_share=0.03,
            variation=0.1,
            mixed=tuple(range(0, 80, 8)),
            clocks=tuple(0.8 + 0.2 * (k % 7) / 6 for k in range(85)),
            cut=0.007,
            groups=(("sm_cycles_elapsed", "sm_cycles_active", "inst", "dram_read_bytes"),),
        ),
    }
    return [_simulated(out, name, job) for name, job in jobs.items()]


def _simulated(out: Path, name: str, job: Any, seeds: int = 3) -> Row:
    from simulator import simulate

    import nanalyze.analysis as na

    errors, weights, inside, seconds = [], [], [], []
    for seed in range(seeds):
        made = simulate(job, seed)
        made.write(out / "simulated")
        with na.open(out / "simulated") as run:
            began = time.perf_counter()
            frame = run.attribution()
            seconds.append(time.perf_counter() - began)
        shutil.rmtree(out / "simulated")
        shares = made.shares()
        large = _largest(shares)
        for row in frame[(frame["term"] == "kernel") & frame["is_told_apart"]].itertuples():
            number = row.kernel_class_id - 1000
            truth = 1e9 * made.truth(row.counter, number)
            inside.append(row.low_per_s <= truth <= row.high_per_s)
            if number in large and truth > 0:
                errors.append(abs(row.rate_per_s / truth - 1))
                weights.append(shares[number])
    return {
        "job": name,
        "launches": len(made.start),
        "median error %": 100 * float(np.median(errors)),
        "share-weighted error %": 100 * float(np.average(errors, weights=weights)),
        "intervals that hold %": 100 * float(np.mean(inside)),
        "seconds": float(np.median(seconds)),
    }


def _largest(shares: np.ndarray) -> set[int]:  # type: ignore[type-arg]
    """The classes that together hold `HOLDS` of the time."""
    order = np.argsort(-shares)
    before = np.cumsum(shares[order]) - shares[order]
    return set(order[before < HOLDS].tolist())


def timing(out: Path, seconds: float) -> Row:
    """How long the attribution of one job of 100 classes at 1 ms takes, and the most memory it used."""
    import multiprocessing

    from simulator import Job, simulate

    made = simulate(Job(classes=100, seconds=seconds, mean_us=(30, 300), launches_a_step=790, gap_share=0.03), 1)
    made.write(out / "long")
    row: Row = {"launches": len(made.start), "samples": len(made.group)}
    del made
    # A fresh process, so that its peak of memory is its own.
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        row |= pool.apply(_timed, (out / "long",))
    shutil.rmtree(out / "long")
    return row


def _timed(run_dir: Path) -> Row:
    import nanalyze.analysis as na

    with na.open(run_dir) as run:
        began, spent = time.perf_counter(), time.process_time()
        run.attribution_quality()
        took = time.perf_counter() - began
    # Linux keeps ru_maxrss of the parent across fork and exec, but not this one.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return {"seconds": took, "CPU seconds": time.process_time() - spent, "peak MB": peak / 1000}


# --- recorded -------------------------------------------------------------------------------------


def _gpt2() -> tuple[Callable[[], Any], Callable[[], Any]]:
    from gpt2_step import make_step

    step = make_step()
    return step, step


def _resnet() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A ResNet-50-like training step in plain PyTorch, batch 64, bf16: bottleneck blocks, no torchvision."""
    import torch
    from torch import nn

    class Bottleneck(nn.Module):
        def __init__(self, width: int, inner: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
                nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
                nn.Conv2d(inner, 4 * inner, 1, bias=False), nn.BatchNorm2d(4 * inner),
            )  # fmt: skip
            same = width == 4 * inner and stride == 1
            self.skip = nn.Identity() if same else nn.Conv2d(width, 4 * inner, 1, stride, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.body(x) + self.skip(x))

    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    width = 64
    for inner, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(count):
            layers.append(Bottleneck(width, inner, stride if block == 0 else 1))
            width = 4 * inner
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(64, 3, 224, 224, device="cuda")
    labels = torch.randint(0, 1000, (64,), device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return step, step


def _graph() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Inference of a feed-forward stack, captured in a CUDA graph; and the same outside of it."""
    import torch
    from torch import nn

    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.LayerNorm(2048), nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)]
    model = nn.Sequential(*layers).cuda().bfloat16().eval()
    tokens = torch.randn(1024, 2048, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                model(tokens)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(tokens)

    def outside() -> None:
        with torch.no_grad():
            model(tokens)

    return graph.replay, outside


JOBS = {"GPT-2-small training": _gpt2, "ResNet-50 training": _resnet, "inference in a CUDA graph": _graph}


TOTALS = "totals.json"  # what the range profiler counted in a whole step, and how many steps were sampled


def recorded(out: Path, seconds: float | None, names: list[str]) -> list[Row]:
    """One row a job and counter; without `seconds` from recordings that are there already."""
    rows: list[Row] = []
    for name in names:
        folder = out / name.replace(" ", "-")
        try:
            if seconds is not None:
                _record(folder, name, seconds)
            found = compare(folder / "sampled", folder / "every-launch", folder / "full-set", name)
            if (folder / TOTALS).exists():
                found += compare_totals(folder / "sampled", **json.loads((folder / TOTALS).read_text()), name=name)
            print(table(found), file=sys.stderr, flush=True)
            rows += found
        except Exception as error:
            print(f"{name}: left out: {type(error).__name__}: {error}", file=sys.stderr)
    return rows


def _record(folder: Path, name: str, seconds: float) -> None:
    """The samples may take all the CPU time they need: it is the estimate from so many seconds that is judged."""
    import torch

    from nanalyze import recorder

    step, plain = JOBS[name]()
    for _ in range(5):
        step()
        plain()
    torch.cuda.synchronize()
    shutil.rmtree(folder, ignore_errors=True)
    totals = step_totals(step)
    with recorder.record(folder / "sampled", samples=recorder.Samples(overhead_pct=100), pause_pct=0):
        steps, began = 0, time.monotonic()
        while time.monotonic() - began < seconds:
            step()
            steps += 1
        torch.cuda.synchronize()
    (folder / TOTALS).write_text(json.dumps({"totals": totals, "steps": steps}), encoding="utf-8")
    metrics = (*RAW.values(), *PERCENTAGES, "gpu__time_duration.sum")
    every = recorder.Exact(first=1_000_000, budget_pct=100, metrics=metrics)
    for part, exact in (("every launch", every), ("full set", recorder.Exact(first=1, budget_pct=100))):
        with recorder.record(folder / part.replace(" ", "-"), exact=exact):
            plain()
            torch.cuda.synchronize()


def step_totals(step: Callable[[], Any]) -> dict[str, float]:
    """Counters of one whole step as one range, by name in `samples`: a pass a step, nothing serialised."""
    import torch
    from cuda.bindings import driver

    from nanalyze.recorder import cupti as cu
    from nanalyze.recorder import rangeprofiler as rp

    cupti = cu.load()
    rp.initialize(cupti)
    context = int(driver.cuCtxGetCurrent()[1])
    host = rp.MetricHost(cupti, rp.chip_name(cupti, 0), context)
    profiler = rp.RangeProfiler(cupti, host, context, list(RAW.values()), user=True)
    try:
        is_complete = False
        while not is_complete:
            torch.cuda.synchronize()
            profiler.start()
            profiler.push("step")
            step()
            torch.cuda.synchronize()
            profiler.pop()
            is_complete = profiler.stop()
        (values,) = profiler.read()
    finally:
        profiler.close()
        host.close()
    return {name: value for name, value in zip(RAW, values, strict=True) if value is not None}


def compare_totals(sampled_dir: Path, totals: dict[str, float], steps: int, name: str) -> list[Row]:
    """Totals a step from the samples against those of the range; `steps` were recorded."""
    import nanalyze.analysis as na

    rows: list[Row] = []
    with na.open(sampled_dir) as run:
        marks = _step_marks(run, steps)
        samples = run.sql("SELECT * FROM samples ORDER BY counter_group, start_ns")
        traced = _traced_a_step(run, steps)
        for counter, exact in totals.items():
            total = _total_a_step(samples, counter, marks) if counter in samples else None
            if total is not None and counter in TRACED_COLUMNS:
                total -= traced
            error = None if total is None else 100 * (total / exact - 1)
            rows.append({"job": name, "counter": f"{counter}, whole step", "total, % off": error})
    return rows


def _traced_a_step(run: Any, steps: int) -> float:
    """Warp instructions that timing the kernels added to a step."""
    found = run.sql(
        "SELECT any_value(d.cc_major) AS major, any_value(d.cc_minor) AS minor, "
        "sum(ceil(c.block_x::DOUBLE * c.block_y * c.block_z / d.warp_size) * c.grid_x * c.grid_y * c.grid_z) AS warps "
        "FROM kernels AS k JOIN kernel_classes AS c USING (kernel_class_id) "
        "JOIN devices AS d ON d.process = k.process AND d.device_id = k.device_id"
    ).iloc[0]
    return TRACING_INSTRUCTIONS.get((int(found["major"]), int(found["minor"])), 0.0) * float(found["warps"]) / steps


def _step_marks(run: Any, steps: int) -> Any:
    """Starts of one kernel that runs at the same place of each step, in ns."""
    classes = run.sql("SELECT kernel_class_id AS id, count(*) AS launches FROM kernels GROUP BY ALL ORDER BY ALL")
    even = classes[classes["launches"] % steps == 0].sort_values(["launches", "id"])
    if not len(even):
        return np.zeros(0)
    found = run.sql(f"SELECT start_ns FROM kernels WHERE kernel_class_id = {even['id'].iloc[0]} ORDER BY start_ns")
    return found["start_ns"].to_numpy()[:: int(even["launches"].iloc[0]) // steps]


def _total_a_step(samples: Any, counter: str, marks: Any) -> float | None:
    """Mean over the whole steps that lie within windows of samples."""
    total, steps = 0.0, 0
    for _, own in samples[samples[counter].notna()].groupby("counter_group"):
        start, end = own["start_ns"].to_numpy(), own["end_ns"].to_numpy()
        clock = own["sm_cycles_elapsed"].to_numpy() / (end - start)
        whole = clock > 0.75 * np.median(clock)  # others were cut short
        value = np.interp(start, start[whole], own[counter].to_numpy()[whole])
        for part in np.split(np.arange(len(start)), np.flatnonzero(start[1:] - end[:-1] > 100_000) + 1):
            inside = marks[(marks >= start[part[0]]) & (marks <= end[part[-1]])]
            if len(inside) > 1:
                at, sums = np.append(start[part[0]], end[part]), np.append(0.0, np.cumsum(value[part]))
                total += float(np.diff(np.interp(inside[[0, -1]], at, sums))[0])
                steps += len(inside) - 1
    return total / steps if steps else None


def compare(sampled_dir: Path, exact_dir: Path, full_dir: Path, name: str) -> list[Row]:
    """Sampled counters against those of every launch, by counter; and the agreement of verdicts with `full_dir`'s."""
    import nanalyze.analysis as na

    sql = "SELECT kernel_class_id, counter, value, low, high FROM counters WHERE method = '{}'"
    with na.open(sampled_dir) as run, na.open(exact_dir) as other, na.open(full_dir) as full:
        began = time.perf_counter()
        verdicts = run.verdicts().set_index("kernel_class_id")
        took = time.perf_counter() - began
        exact_verdicts = full.verdicts().set_index("kernel_class_id")
        both = run.sql(sql.format("sampled")).merge(
            other.sql(sql.format("exact")), on=["kernel_class_id", "counter"], suffixes=("", "_exact")
        )
        explained = dict(run.attribution_quality().groupby("counter")["explained"].min())
        launches = _launches(other)
        again = _differ(launches, _launches(full))
        clock = run.sql("SELECT kernel_class_id, value FROM counters WHERE counter = 'sm_clock_hz'")
        device = run.devices().iloc[0]
        durations = run.sql(
            "SELECT kernel_class_id, quantile_cont(duration_ns, 0.9) / quantile_cont(duration_ns, 0.1) AS spread, "
            "avg(duration_ns) AS mean FROM kernels WHERE duration_ns > 0 GROUP BY 1"
        ).set_index("kernel_class_id")
    both["share"] = both["kernel_class_id"].map(verdicts["share"].fillna(0)).astype(float)
    pairs = list(zip(both["counter"], both["kernel_class_id"], strict=True))
    both["differ"] = np.array([again.get(pair, np.nan) for pair in pairs])
    natural = _natural(
        launches, durations["mean"], clock.set_index("kernel_class_id")["value"], int(device["sm_count"])
    )
    is_diluted = both["counter"].isin(OF_ELAPSED)
    both.loc[is_diluted, "value_exact"] = np.array([natural.get(pair, np.nan) for pair in pairs])[is_diluted]
    cycles = float(device["sm_count"]) * float(device["sm_clock_max_hz"])
    dram = float(device["dram_peak_bytes_per_s"])
    peaks = {
        "inst": ISSUES * cycles,
        "l2_bytes": PORT_BYTES * cycles,
        "dram_read_bytes": dram,
        "dram_write_bytes": dram,
    }
    peak = both["counter"].map(peaks) * both["kernel_class_id"].map(durations["mean"]) / 1e9
    both["of_peak"] = (100 * both["value_exact"] / peak).fillna(both["value_exact"])
    large = verdicts[verdicts["share"].cumsum() - verdicts["share"] < HOLDS].index
    both = both[both["kernel_class_id"].isin(large)]
    rows = [row for counter in COUNTERS if (row := _compared(both[both["counter"] == counter], name, counter))]
    known = [k for k in verdicts.index if k in exact_verdicts.index and exact_verdicts.loc[k, "method"] == "exact"]
    if known:
        rows.append({"job": name, "counter": "verdict", "classes": len(known)})
        rows[-1] |= _agreement(verdicts.loc[known], exact_verdicts.loc[known, "bound"], durations["spread"])
        rows[-1] |= {
            "attribution s": took,
            "explained": {k: round(float(v), 3) for k, v in explained.items() if v == v},
        }
    return rows


def _launches(exact: Any) -> Any:
    """Metrics of each launch, by kernel class and correlation id."""
    rows = exact.sql("SELECT kernel_class_id, correlation_id, metric, value FROM raw.exact")
    return rows.pivot_table(index=["kernel_class_id", "correlation_id"], columns="metric", values="value").sort_index()


def _differ(launches: Any, again: Any) -> dict[tuple[str, int], float]:
    """By how much, relative, two exact measurements of the first launch of a class differ, by counter and class."""
    metrics = {**RAW, **dict(zip(OF_ELAPSED, PERCENTAGES, strict=True))}
    found = {}
    for counter, metric in metrics.items():
        if counter in COUNTERS and metric in again:
            one, other = (rows[metric].groupby("kernel_class_id").first() for rows in (launches, again))
            off = (other / one - 1).abs().where(one > 0).dropna()
            found |= {(counter, int(kernel)): float(value) for kernel, value in off.items()}
    return found


def _natural(launches: Any, mean_ns: Any, clock_hz: Any, sms: int) -> dict[tuple[str, int], float]:
    """Percentages of the cycles that a launch took in the job, by counter and class, from those of the profiler's span.

    The tensor pipe has the same work to do. SMs are active but for a time before and after: that, less what the span
    is longer than the launch, is the same whether the launch took longer or not.
    """
    by_class = "kernel_class_id"
    elapsed = 100 * launches[RAW["sm_cycles_active"]] / launches[PERCENTAGES[0]] / sms
    tensor = (launches[PERCENTAGES[1]] / 100 * elapsed).groupby(by_class).mean()
    active = (launches[RAW["sm_cycles_active"]] / sms).groupby(by_class).mean()
    span = elapsed.groupby(by_class).mean()
    clock = clock_hz.reindex(span.index)
    cycles = mean_ns.reindex(span.index) * clock / 1e9
    longer = (span - cycles).clip(lower=0).clip(upper=SPAN_US * clock / 1e6)
    inactive = (span - longer - active).clip(lower=0)
    shares = dict(zip(OF_ELAPSED, (1 - inactive / cycles, tensor / cycles), strict=True))
    return {
        (counter, int(kernel)): 100 * min(float(value), 1.0)
        for counter, share in shares.items()
        for kernel, value in share.items()
    }


def _agreement(verdicts: Any, exact: Any, spread: Any) -> Row:
    """Shares of time, in percent, in which verdicts agree, and why the others do not.

    The exact verdict rests on the first launch of a class, which is no judge of a class whose launches differ.
    """
    share, same = verdicts["share"] / verdicts["share"].sum(), verdicts["bound"] == exact
    differ = verdicts.index.map(spread).to_numpy() > DIFFER
    undetermined = (verdicts["bound"] == "undetermined").to_numpy()
    parts = {
        "likely verdicts that agree, % of time": verdicts["likely_bound"] == exact,
        "verdicts that agree": same,
        "agree, of classes whose launches are alike": same & ~differ,
        "other bound, launches differ": ~same & ~undetermined & differ,
        "other bound, launches alike": ~same & ~undetermined & ~differ,
        "undetermined": ~same & undetermined,
    }
    row: Row = {name: 100 * float(share[part].sum()) for name, part in parts.items()}
    row["agree, of classes whose launches are alike"] /= max(float(share[~differ].sum()), 1e-9)
    return row


def _compared(rows: Any, name: str, counter: str) -> Row | None:
    rows = rows[(rows["value_exact"] > 0) & (rows["of_peak"] > USES_PCT.get(counter, 0.0))]
    if not len(rows):
        return None
    row = {
        "job": name,
        "counter": counter,
        **_errors(rows),
        "two exact differ by %": 100 * float(rows["differ"].median()),
    }
    alone = rows[rows["differ"] <= UNDISTURBED]
    if len(alone):
        row |= {f"undisturbed: {title}": value for title, value in _errors(alone).items()}
    return row


def _errors(rows: Any) -> Row:
    error = rows["value"] / rows["value_exact"] - 1
    inside = (rows["low"] <= rows["value_exact"]) & (rows["value_exact"] <= rows["high"])
    return {
        "classes": len(rows),
        "median error %": 100 * float(error.abs().median()),
        "share-weighted error %": 100 * float(np.average(error.abs(), weights=rows["share"])),
        "intervals that hold %": 100 * float(inside.mean()),
        # Of all classes together: what one of them lacks another has.
        "share-weighted bias %": 100 * float(np.average(error, weights=rows["share"])),
        "half width %": 100
        * float(np.average((rows["high"] - rows["low"]) / 2 / rows["value_exact"], weights=rows["share"])),
    }


# --- printing -------------------------------------------------------------------------------------


def table(rows: list[Row]) -> str:
    """`rows` as a Markdown table; columns in order of appearance."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_text(row.get(column)) for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _text(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpu", action="store_true", help="record jobs instead of simulating them")
    parser.add_argument("--again", action="store_true", help="compare the recordings that are in OUT_DIR already")
    parser.add_argument("--seconds", type=float, help="of the timed simulated job (30), or of each recording (60)")
    parser.add_argument("--only", help="recorded jobs whose names hold this text")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.gpu or options.again:
        names = [name for name in JOBS if (options.only or "").lower() in name.lower()]
        results = {"recorded": recorded(options.out, None if options.again else options.seconds or 60, names)}
    else:
        results = {"simulated": simulated(options.out), "timing": [timing(options.out, options.seconds or 30)]}
    (options.out / "attribution.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    text = "\n\n".join(f"## {title}\n\n{table(rows)}" for title, rows in results.items())
    (options.out / "attribution.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
