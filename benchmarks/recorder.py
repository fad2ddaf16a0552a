"""What recording costs: nanalyze's timeline beside torch.profiler, Proton and cupti-python, in one run.

    python benchmarks/recorder.py OUT_DIR                 # needs a GPU
    python benchmarks/recorder.py OUT_DIR --decode tests/fixtures/activity/cupti-130001.bin   # needs none
    python benchmarks/recorder.py OUT_DIR --dry-run       # the whole course on the CPU, tools left out

Two workloads: a launch-bound loop (1 is added to one number, over and over) and the GPT-2-small step of
examples/gpt2_step.py. Each tool gets a process of its own, and the tools take turns for several rounds.
In each process a workload is measured bare, then under the tool, so that a ratio never compares two
processes. Because 1 % is less than such a comparison resolves, nanalyze is also measured in pairs:
one process alternates long blocks with and without it, in the order off-on, on-off, ...; the median
of the pairs' ratios is reported with its 95 % bootstrap interval. Blocks are longer than the
recorder's flush interval, so that what its threads do counts too.

Where the CPU is noisy or slow, the step's wall time says little: it is as long as the longer of what the
CPU and what the GPU need. So the GPU's time of a step is also measured alone, under each tool and without
it: by events, with the whole step queued while a kernel that only waits keeps the GPU busy.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

BLOCKS = 5  # blocks a measurement is divided into; their median is its value
LAUNCHES_A_RANGE = 100
CHILD_TIMEOUT_S = 240

Result = dict[str, Any]


# --- the tools ------------------------------------------------------------------------------------


class Tool:
    """Nothing at all; the other tools override what they do. `folder` is where a session may write."""

    name = "bare"

    def load(self) -> None:
        """Import what the tool needs; its memory counts, its time does not."""

    def start(self, folder: Path) -> None:
        """Begin recording; everything until this returns is the start cost."""

    def stop(self) -> None:
        """End it; when this returns the data are on disk."""

    def annotate(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext()


class Nanalyze(Tool):
    name = "nanalyze"

    def load(self) -> None:
        from nanalyze import recorder

        self.recorder = recorder

    def start(self, folder: Path) -> None:
        self.recorder.start(str(folder / "run"), pause_pct=0)  # all of it is to be measured

    def stop(self) -> None:
        self.recorder.stop()


class NanalyzeAnnotated(Nanalyze):
    name = "nanalyze+ranges"

    def annotate(self, name: str) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.recorder.annotate(name)
        return context


class TorchProfiler(Tool):
    def __init__(self, name: str, activities: tuple[str, ...]) -> None:
        self.name, self.activities = name, activities

    def load(self) -> None:
        import torch.profiler

        self.module = torch.profiler

    def start(self, folder: Path) -> None:
        self.trace = folder / "trace.json"
        activities = [getattr(self.module.ProfilerActivity, name) for name in self.activities]
        self.profiler = self.module.profile(activities=activities)
        self.profiler.start()

    def stop(self) -> None:
        self.profiler.stop()
        self.profiler.export_chrome_trace(str(self.trace))


class Proton(Tool):
    name = "Proton"

    def load(self) -> None:
        import triton.profiler

        self.module = triton.profiler

    def start(self, folder: Path) -> None:
        self.session = self.module.start(str(folder / "proton"), backend="cupti")

    def stop(self) -> None:
        self.module.finalize(self.session)


class CuptiPython(Tool):
    """cupti-python's activity callbacks: one Python object a record, here summed and counted."""

    name = "cupti-python"

    def __init__(self) -> None:
        self.records = 0
        self.total_ns = 0
        self.registered = False

    def load(self) -> None:
        from cupti import cupti

        self.cupti = cupti

    def start(self, folder: Path) -> None:
        if not self.registered:
            self.cupti.activity_register_callbacks(lambda: (8 << 20, 0), self._completed)
            self.registered = True
        self.cupti.activity_enable(self.cupti.ActivityKind.CONCURRENT_KERNEL)

    def _completed(self, activities: list[Any]) -> None:
        self.records += len(activities)
        for activity in activities:
            self.total_ns += activity.end - activity.start

    def stop(self) -> None:
        self.cupti.activity_flush_all(1)
        self.cupti.activity_disable(self.cupti.ActivityKind.CONCURRENT_KERNEL)


TOOLS: dict[str, Callable[[], Tool]] = {
    "bare": Tool,
    "nanalyze": Nanalyze,
    "nanalyze+ranges": NanalyzeAnnotated,
    "torch.profiler CUDA": lambda: TorchProfiler("torch.profiler CUDA", ("CUDA",)),
    "torch.profiler CPU+CUDA": lambda: TorchProfiler("torch.profiler CPU+CUDA", ("CPU", "CUDA")),
    "Proton": Proton,
    "cupti-python": CuptiPython,
}


# --- the workloads --------------------------------------------------------------------------------


@dataclass
class Workload:
    """`run(units)` runs that many launches or steps and waits for the GPU."""

    name: str
    unit: str
    run: Callable[[int], None]
    units: int  # of one measurement
    warm: int  # units after a start that are not measured
    scale: float  # from seconds to the table's unit: us a launch, ms a step
    launches: int  # GPU launches a unit, for bytes a launch
    chunk: int  # units between two looks at the clock in a timed block
    queue: Callable[[], None]  # one unit, not waited for


@dataclass(frozen=True)
class Plan:
    """How much of everything; `device` cpu is the dry run."""

    device: str = "cuda"
    launches: int = 50_000
    steps: int = 50
    block_s: float = 6.0
    pairs: int = 5


def workloads(plan: Plan, annotate: Callable[[str], AbstractContextManager[Any]]) -> list[Workload]:
    """Both workloads, built and warm; `annotate` makes the ranges around their parts."""
    return [_launch_loop(plan, annotate), _gpt2_steps(plan, annotate)]


def _launch_loop(plan: Plan, annotate: Callable[[str], AbstractContextManager[Any]]) -> Workload:
    import torch

    x = torch.zeros(1, device=plan.device)
    synchronize = torch.cuda.synchronize if plan.device == "cuda" else (lambda: None)

    def run(units: int) -> None:
        for _ in range(units // LAUNCHES_A_RANGE):
            with annotate("hundred launches"):
                for _ in range(LAUNCHES_A_RANGE):
                    x.add_(1)
        synchronize()

    run(2000)
    return Workload("launch loop", "us a launch", run, plan.launches, 2000, 1e6, 1, 5000, lambda: x.add_(1))


def _gpt2_steps(plan: Plan, annotate: Callable[[str], AbstractContextManager[Any]]) -> Workload:
    import torch
    from gpt2_step import TINY, Sizes, make_step

    sizes = Sizes() if plan.device == "cuda" else TINY
    step = make_step(plan.device, annotate, **vars(sizes))
    synchronize = torch.cuda.synchronize if plan.device == "cuda" else (lambda: None)

    def run(units: int) -> None:
        for _ in range(units):
            with annotate("step"):
                step()
        synchronize()

    run(5)
    return Workload("GPT-2 step", "ms a step", run, plan.steps, 3, 1e3, 790, 10, step)


# --- one tool in one process ----------------------------------------------------------------------


def measure_tool(name: str, plan: Plan) -> list[Result]:
    """Both workloads bare and under the tool: one result a workload."""
    tool = TOOLS[name]()
    before_kib = _status_kib("VmRSS")
    tool.load()
    loaded_mib = (_status_kib("VmRSS") - before_kib) / 1024
    return [_measure(tool, workload, loaded_mib) for workload in workloads(plan, tool.annotate)]


def _measure(tool: Tool, workload: Workload, loaded_mib: float) -> Result:
    bare = _blocks(workload)
    with tempfile.TemporaryDirectory(prefix="nanalyze-bench-") as folder:
        before_kib = _status_kib("VmRSS")
        started = time.perf_counter()
        tool.start(Path(folder))
        start_s = time.perf_counter() - started
        workload.run(workload.warm)
        under = _blocks(workload)
        stopping = time.perf_counter()
        tool.stop()
        stop_s = time.perf_counter() - stopping
        written = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    units = workload.units // BLOCKS * BLOCKS + workload.warm
    return {
        "tool": tool.name,
        "workload": workload.name,
        "unit": workload.unit,
        "bare": bare,
        "under": under,
        "ratio": under / bare,
        "extra": under - bare,
        "start_s": start_s,
        "stop_s": stop_s,
        "bytes_per_launch": written / (units * workload.launches),
        "peak_rss_growth_mib": loaded_mib + (_status_kib("VmHWM") - before_kib) / 1024,
    }


def _blocks(workload: Workload) -> float:
    """The median over equal blocks of the time a unit takes, in the workload's unit."""
    units = workload.units // BLOCKS
    times = []
    for _ in range(BLOCKS):
        started = time.perf_counter()
        workload.run(units)
        times.append((time.perf_counter() - started) / units * workload.scale)
    return statistics.median(times)


def _status_kib(field: str) -> float:
    """VmRSS or VmHWM (its peak) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return float(line.split()[1])
    raise ValueError(f"/proc/self/status has no {field}")


# --- pairs ----------------------------------------------------------------------------------------


def measure_pairs(name: str, plan: Plan) -> list[Result]:
    """Alternating blocks with and without the tool in one process: one result a workload."""
    tool = TOOLS[name]()
    tool.load()
    results = [_measure_pairs(tool, workload, plan) for workload in workloads(plan, tool.annotate)]
    if isinstance(tool, NanalyzeAnnotated):
        results[0]["ns_per_range_recording"] = _range_cost(tool)
    return results


def _measure_pairs(tool: Tool, workload: Workload, plan: Plan) -> Result:
    pairs = []
    for index in range(plan.pairs):
        off_first = index % 2 == 0
        first = _timed_block(Tool() if off_first else tool, workload, plan.block_s)
        second = _timed_block(tool if off_first else Tool(), workload, plan.block_s)
        pairs.append((first, second) if off_first else (second, first))
    ratios = [on / off for off, on in pairs]
    extras = [on - off for off, on in pairs]
    return {
        "tool": tool.name,
        "workload": workload.name,
        "unit": workload.unit,
        "off": statistics.median(off for off, _ in pairs),
        "on": statistics.median(on for _, on in pairs),
        "ratio": statistics.median(ratios),
        "ratio_interval": bootstrap_interval(ratios),
        "extra": statistics.median(extras),
        "extra_interval": bootstrap_interval(extras),
        "pairs": pairs,
    }


GPU_PAIRS = 4
GPU_STEPS = 10  # of a block; their median is its value
WAIT_CYCLES = 100_000_000  # 50 ms at 2 GHz: longer than the CPU takes to queue a step


def measure_gpu(name: str, plan: Plan) -> list[Result]:
    """The GPU's time of a step in alternating blocks without and with the tool, in ms."""
    tool = TOOLS[name]()
    tool.load()
    step = _gpt2_steps(plan, tool.annotate)
    off, on = [], []
    for _ in range(GPU_PAIRS):
        off.append(_gpu_block(Tool(), step))
        on.append(_gpu_block(tool, step))
    ratios = [with_it / without for without, with_it in zip(off, on, strict=True)]
    return [
        {
            "tool": name,
            "off": statistics.median(off),
            "on": statistics.median(on),
            "ratio": statistics.median(ratios),
            "range": (min(ratios), max(ratios)),
        }
    ]


def _gpu_block(tool: Tool, step: Workload) -> float:
    import torch

    with tempfile.TemporaryDirectory(prefix="nanalyze-bench-") as folder:
        tool.start(Path(folder))
        try:
            step.run(step.warm)
            times = []
            for _ in range(GPU_STEPS):
                before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(WAIT_CYCLES)
                before.record()
                step.queue()
                after.record()
                torch.cuda.synchronize()
                times.append(before.elapsed_time(after))
        finally:
            tool.stop()
    return statistics.median(times)


def _timed_block(tool: Tool, workload: Workload, seconds: float) -> float:
    """The mean time of a unit over a block of about `seconds`, start and stop left out."""
    with tempfile.TemporaryDirectory(prefix="nanalyze-bench-") as folder:
        tool.start(Path(folder))
        try:
            workload.run(workload.warm)
            units, started = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - started) < seconds:
                workload.run(workload.chunk)
                units += workload.chunk
        finally:
            tool.stop()
    return elapsed / units * workload.scale


def _range_cost(tool: Tool, ranges: int = 100_000) -> float:
    """Nanoseconds an empty range takes while the tool records."""
    with tempfile.TemporaryDirectory(prefix="nanalyze-bench-") as folder:
        tool.start(Path(folder))
        try:
            started = time.perf_counter()
            for _ in range(ranges):
                with tool.annotate("empty"):
                    pass
            return (time.perf_counter() - started) / ranges * 1e9
        finally:
            tool.stop()


def bootstrap_interval(values: list[float], resamples: int = 4000) -> tuple[float, float]:
    """The 95 % percentile interval of the median. With few values it is about their range."""
    dice = random.Random(0)
    medians = sorted(statistics.median(dice.choices(values, k=len(values))) for _ in range(resamples))
    return medians[round(0.025 * (resamples - 1))], medians[round(0.975 * (resamples - 1))]


# --- decoding -------------------------------------------------------------------------------------


def measure_decode(path: Path) -> list[Result]:
    """From a captured buffer to table columns: the buffer as it is (kinds mixed), and its kernels alone.

    The file's name ends in the CUPTI API version that wrote it, as in `cupti-130001.bin`. A job's
    buffers are mostly kernels, so the second figure is the usual one.
    """
    import numpy as np

    from nanalyze.recorder import activity
    from nanalyze.recorder.cupti import KIND_CONCURRENT_KERNEL

    version = int(path.stem.rsplit("-", 1)[-1])
    decoder = activity.Decoder(activity.record_sizes(version))
    captured = np.fromfile(path, dtype=np.uint8)
    kernels = decoder.decode(captured).records[KIND_CONCURRENT_KERNEL].tobytes()
    buffers = {path.name: captured, f"{path.name}, kernels only": np.frombuffer(kernels, dtype=np.uint8)}
    return [_measure_decode(decoder, name, buffer) for name, buffer in buffers.items()]


def _measure_decode(decoder: Any, name: str, captured: Any) -> Result:
    """The buffer is repeated to 2 MiB, as the recorder takes them together, and decoded for a second."""
    import numpy as np

    from nanalyze.recorder.cupti import KIND_CONCURRENT_KERNEL
    from nanalyze.recorder.launch_times import LaunchTimes
    from nanalyze.recorder.launches import ClassTable, kernel_columns

    buffer = np.tile(captured, max((2 << 20) // captured.size, 1))
    classes = ClassTable(lambda pointer: b"kernel%d" % pointer)
    count = sum(len(rows) for rows in decoder.decode(buffer).records.values())

    def take() -> None:
        kernel_columns(decoder.decode(buffer).records[KIND_CONCURRENT_KERNEL], classes, LaunchTimes())

    return {
        "buffer": name,
        "records": count,
        "ns_per_record": _median_seconds(take) / count * 1e9,
        "lost_bytes": decoder.lost_bytes,
    }


def _median_seconds(call: Callable[[], None], seconds: float = 1.0) -> float:
    times: list[float] = []
    finish = time.perf_counter() + seconds
    while time.perf_counter() < finish or len(times) < 5:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


# --- processes ------------------------------------------------------------------------------------


def _child(connection: Any, function: Callable[[str, Plan], list[Result]], name: str, plan: Plan) -> None:
    faulthandler.dump_traceback_later(CHILD_TIMEOUT_S - 5)  # where it hangs, should it hang
    try:
        connection.send(function(name, plan))
    except Exception as error:
        traceback.print_exc()
        connection.send(f"{type(error).__name__}: {error}")


def in_process(method: str, function: Callable[[str, Plan], list[Result]], name: str, plan: Plan) -> list[Result]:
    """What `function` returns in a new process; [] with a message when it fails or hangs."""
    context = multiprocessing.get_context(method)
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(there, function, name, plan))  # type: ignore[attr-defined]
    started = time.perf_counter()
    process.start()
    there.close()
    try:
        answer = here.recv() if here.poll(CHILD_TIMEOUT_S) else f"no answer within {CHILD_TIMEOUT_S} s"
    except EOFError:
        answer = "the process died"
    process.join(10)
    if process.is_alive():
        process.kill()
        process.join()
    note = "" if isinstance(answer, list) else f": left out: {answer}"
    print(f"{name}: {time.perf_counter() - started:.1f} s{note}", file=sys.stderr, flush=True)
    return answer if isinstance(answer, list) else []


@contextmanager
def _torch_loaded(method: str) -> Iterator[None]:
    """With fork, PyTorch is imported once for all children; CUDA must stay untouched here."""
    if method == "fork":
        import torch

        if torch.cuda.is_initialized():
            raise RuntimeError("CUDA is initialised before the fork; use --processes spawn")
    yield


def run_rounds(method: str, names: list[str], rounds: int, plan: Plan) -> list[Result]:
    """Each tool in a process of its own, in a different order each round."""
    results: list[Result] = []
    for index in range(rounds):
        shift = index * max(len(names) // max(rounds, 1), 1) % len(names)
        for name in names[shift:] + names[:shift]:
            results += in_process(method, measure_tool, name, plan)
    return results


# --- the tables -----------------------------------------------------------------------------------


def tools_table(results: list[Result]) -> str:
    """One row a tool and workload, medians over the rounds."""
    head = "| workload | tool | bare | under it | ratio | extra | start s | stop s | bytes a launch | RSS + MiB | n |"
    lines = [head, "|" + " --- |" * head.count(" | ") + " --- |"]
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        groups[result["workload"], result["tool"]].append(result)
    for (workload, tool), group in sorted(groups.items(), key=lambda item: item[0][0], reverse=True):
        keys = ("bare", "under", "ratio", "extra", "start_s", "stop_s", "bytes_per_launch", "peak_rss_growth_mib")
        bare, under, ratio, extra, start, stop, size, growth = (
            statistics.median(result[key] for result in group) for key in keys
        )
        unit = group[0]["unit"].split()[0]
        lines.append(
            f"| {workload} | {tool} | {bare:.2f} {unit} | {under:.2f} {unit} | {ratio:.3f} | {extra:+.2f} {unit} "
            f"| {start:.2f} | {stop:.2f} | {size:.1f} | {growth:.0f} | {len(group)} |"
        )
    return "\n".join(lines)


def pairs_table(results: list[Result]) -> str:
    head = "| workload | tool | off | on | ratio (95 %) | extra (95 %) | pairs |"
    lines = [head, "|" + " --- |" * 7]
    for result in results:
        unit = result["unit"].split()[0]
        low, high = result["ratio_interval"]
        extra_low, extra_high = result["extra_interval"]
        lines.append(
            f"| {result['workload']} | {result['tool']} | {result['off']:.3f} {unit} | {result['on']:.3f} {unit} "
            f"| {result['ratio']:.4f} ({low:.4f} to {high:.4f}) "
            f"| {result['extra']:+.3f} {unit} ({extra_low:+.3f} to {extra_high:+.3f}) | {len(result['pairs'])} |"
        )
        if "ns_per_range_recording" in result:
            lines.append(f"\nAn empty range takes {result['ns_per_range_recording']:.0f} ns while recording.\n")
    return "\n".join(lines)


def gpu_table(results: list[Result]) -> str:
    head = "| tool | off | on | ratio (least to most) |"
    lines = [head, "|" + " --- |" * 4]
    for result in results:
        low, high = result["range"]
        lines.append(
            f"| {result['tool']} | {result['off']:.3f} ms | {result['on']:.3f} ms "
            f"| {result['ratio']:.4f} ({low:.4f} to {high:.4f}) |"
        )
    return "\n".join(lines)


def decode_table(results: list[Result]) -> str:
    lines = ["| buffer | records | ns a record | bytes not understood |", "|" + " --- |" * 4]
    for result in results:
        lines.append(
            f"| {result['buffer']} | {result['records']} | {result['ns_per_record']:.1f} | {result['lost_bytes']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path, help="recorder.json and recorder.md go here")
    parser.add_argument("--only", metavar="TOOLS", help=f"tools measured in rounds: some of {','.join(TOOLS)}")
    parser.add_argument("--rounds", type=int, default=2, help="processes a tool (default 2; 0: pairs only)")
    parser.add_argument("--launches", type=int, default=50_000, help="launches a measurement (default 50000)")
    parser.add_argument("--steps", type=int, default=50, help="training steps a measurement (default 50)")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of blocks a workload (default 5; 0: none)")
    parser.add_argument("--paired", default="nanalyze,nanalyze+ranges", metavar="TOOLS", help="tools measured in pairs")
    parser.add_argument("--block-s", type=float, default=6.0, help="seconds a block of a pair (default 6)")
    parser.add_argument("--processes", choices=("fork", "spawn"), default="fork")
    parser.add_argument("--decode", type=Path, nargs="+", metavar="FILE", help="measure decoding of these and stop")
    parser.add_argument("--dry-run", action="store_true", help="small, on the CPU, bare only")
    arguments = parser.parse_args()
    arguments.out_dir.mkdir(parents=True, exist_ok=True)
    if arguments.decode:
        decoded = [result for path in arguments.decode for result in measure_decode(path)]
        write(arguments.out_dir / "decode", {"decode": decoded}, decode_table(decoded))
        return
    with _torch_loaded(arguments.processes):
        measure_all(arguments)


def measure_all(arguments: argparse.Namespace) -> None:
    plan = Plan("cuda", arguments.launches, arguments.steps, arguments.block_s, arguments.pairs)
    names = arguments.only.split(",") if arguments.only else list(TOOLS)
    paired = arguments.paired.split(",")
    if arguments.dry_run:
        plan, names, paired = Plan("cpu", 1000, 10, 0.2, 3), ["bare"], ["bare"]
    unknown = [name for name in (*names, *paired) if name not in TOOLS]
    if unknown:
        raise SystemExit(f"no tool named {', '.join(unknown)}: choose from {','.join(TOOLS)}")
    tools = run_rounds(arguments.processes, names, arguments.rounds, plan)
    text = tools_table(tools)
    write(arguments.out_dir / "recorder", {"tools": tools}, text)  # kept should the pairs fail
    pairs: list[Result] = []
    for name in paired if plan.pairs else []:
        pairs += in_process(arguments.processes, measure_pairs, name, plan)
    text += "\n\nIn pairs:\n\n" + pairs_table(pairs)
    write(arguments.out_dir / "recorder", {"tools": tools, "pairs": pairs}, text)
    gpu: list[Result] = []
    for name in names if plan.device == "cuda" else []:
        gpu += in_process(arguments.processes, measure_gpu, name, plan)
    if gpu:
        text += "\n\nThe GPU's time of a GPT-2 step:\n\n" + gpu_table(gpu)
        write(arguments.out_dir / "recorder", {"tools": tools, "pairs": pairs, "gpu": gpu}, text)


def write(path: Path, content: dict[str, Any], text: str) -> None:
    path.with_suffix(".json").write_text(json.dumps(content, indent=2) + "\n")
    path.with_suffix(".md").write_text(text + "\n")
    print(text, flush=True)


if __name__ == "__main__":
    main()
