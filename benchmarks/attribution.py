"""Do counters attributed from samples agree with the truth, and how long does the attribution take?

    python benchmarks/attribution.py OUT_DIR                    # simulated jobs: no GPU needed, three minutes
    python benchmarks/attribution.py OUT_DIR --seconds 600      # a longer simulated job for the timing
    python benchmarks/attribution.py OUT_DIR --gpu              # recorded jobs against exact counters

Without a GPU, kernel streams with known rates are simulated, sampled, attributed and compared: errors,
and how many of the 95 % intervals hold the truth. With one, each of three jobs (a GPT-2-small training
step, a ResNet-50 training step and an inference loop in a CUDA graph) is recorded twice: sampled, and with
exact counters of some launches of each kernel. Kernels in a graph have no exact counters of their own, so
that job's kernels are measured while it runs outside of its graph. The exact profiler serialises kernels;
what their caches held then differs, and not all of a difference is an error of the estimate.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples")]

HOLDS = 0.9  # classes that hold this share of kernel time are judged
COUNTERS = ("inst", "sm_active_pct", "l2_bytes", "dram_read_bytes", "dram_write_bytes", "pipe_tensor_pct")
USES_PCT = 1.0  # a kernel whose exact percentage is below does not use the pipe

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
        "the same, 100 us samples": Job(
            classes=85, seconds=10, mean_us=(8, 90), launches_a_step=790, variation=0.1, interval_us=100
        ),
        "three streams, 20 % lost, uneven": Job(classes=40, seconds=10, streams=3, lost=0.2, jitter=0.3, variation=0.1),
        "1 % heavy samples": Job(classes=40, seconds=10, heavy=0.01, noise=0.01, variation=0.1),
        "drift to twice": Job(classes=40, seconds=10, drift=1.0, variation=0.1),
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


def recorded(out: Path, seconds: float, names: list[str]) -> list[Row]:
    """One row a job and counter."""
    rows: list[Row] = []
    for name in names:
        try:
            rows += _recorded(out / name.replace(" ", "-"), name, seconds)
        except Exception as error:
            print(f"{name}: left out: {type(error).__name__}: {error}", file=sys.stderr)
    return rows


def _recorded(folder: Path, name: str, seconds: float) -> list[Row]:
    import torch

    from nanalyze import recorder

    step, plain = JOBS[name]()
    for _ in range(5):
        step()
        plain()
    torch.cuda.synchronize()
    shutil.rmtree(folder, ignore_errors=True)
    with recorder.record(folder / "sampled", samples=recorder.Samples()):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            step()
        torch.cuda.synchronize()
    with recorder.record(folder / "exact", exact=recorder.Exact(first=2)):
        for _ in range(2):
            plain()
        torch.cuda.synchronize()
    return compare(folder / "sampled", folder / "exact", name)


def compare(sampled_dir: Path, exact_dir: Path, name: str) -> list[Row]:
    """Sampled counters of one run against exact ones of another, by counter; and the verdicts' agreement."""
    import nanalyze.analysis as na

    sql = "SELECT kernel_class_id, counter, value, low, high FROM counters WHERE method = '{}'"
    with na.open(sampled_dir) as run, na.open(exact_dir) as other:
        began = time.perf_counter()
        verdicts = run.verdicts().set_index("kernel_class_id")
        took = time.perf_counter() - began
        exact_verdicts = other.verdicts().set_index("kernel_class_id")
        both = run.sql(sql.format("sampled")).merge(
            other.sql(sql.format("exact")), on=["kernel_class_id", "counter"], suffixes=("", "_exact")
        )
        explained = dict(run.attribution_quality().groupby("counter")["explained"].min())
    both["share"] = both["kernel_class_id"].map(verdicts["share"].fillna(0)).astype(float)
    large = verdicts[verdicts["share"].cumsum() - verdicts["share"] < HOLDS].index
    both = both[both["kernel_class_id"].isin(large)]
    rows = [row for counter in COUNTERS if (row := _compared(both[both["counter"] == counter], name, counter))]
    known = [k for k in verdicts.index if k in exact_verdicts.index and exact_verdicts.loc[k, "method"] == "exact"]
    share = verdicts.loc[known, "share"]
    same = verdicts.loc[known, "bound"] == exact_verdicts.loc[known, "bound"]
    rows.append({
        "job": name, "counter": "verdict", "classes": len(known),
        "verdicts that agree, % of time": 100 * float(share[same].sum() / share.sum()) if len(known) else None,
        "attribution s": took, "explained": {k: round(float(v), 3) for k, v in explained.items() if v == v},
    })  # fmt: skip
    return rows


def _compared(rows: Any, name: str, counter: str) -> Row | None:
    floor = USES_PCT if counter.endswith("_pct") else 0
    rows = rows[rows["value_exact"] > floor]
    if not len(rows):
        return None
    error = (rows["value"] / rows["value_exact"] - 1).abs()
    inside = (rows["low"] <= rows["value_exact"]) & (rows["value_exact"] <= rows["high"])
    return {
        "job": name,
        "counter": counter,
        "classes": len(rows),
        "median error %": 100 * float(error.median()),
        "share-weighted error %": 100 * float(np.average(error, weights=rows["share"])),
        "intervals that hold %": 100 * float(inside.mean()),
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
    parser.add_argument("--seconds", type=float, help="of the timed simulated job (30), or of each recording (10)")
    parser.add_argument("--only", help="recorded jobs whose names hold this text")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.gpu:
        names = [name for name in JOBS if (options.only or "").lower() in name.lower()]
        results = {"recorded": recorded(options.out, options.seconds or 10, names)}
    else:
        results = {"simulated": simulated(options.out), "timing": [timing(options.out, options.seconds or 30)]}
    (options.out / "attribution.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    text = "\n\n".join(f"## {title}\n\n{table(rows)}" for title, rows in results.items())
    (options.out / "attribution.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
