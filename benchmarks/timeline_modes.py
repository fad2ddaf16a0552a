"""Which way of taking timestamps is safe, and what each costs: one process a mode, watched for hangs.

    python benchmarks/timeline_modes.py OUT_DIR [--modes 'host;device;...'] [--pairs 4] [--block-s 2]

Each mode runs a launch-bound loop and the GPT-2-small step in alternating blocks with and without
a recording; `before` is without one, before the first. A process that says nothing for --patience-s seconds
is taken to hang: its Python stacks (and with --debugger cuda-gdb its native ones) go into OUT_DIR, then it
is killed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

# Settings of recorder.record, and: `ranges` puts each call of the workload into a range, so that launch times
# are recorded, with `latency` by CUPTI's latency timestamps instead of the callback; `early` starts a first
# recording before CUDA is initialised; `python_callbacks` lets CUPTI call Python for each buffer; without
# `decode` all that is recorded is thrown away.
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "kernels only": {"copies": False},
    "ranges": {"ranges": True},
    "ranges, latency timestamps": {"ranges": True, "latency": True},
    "device memory": {"timestamps": "device"},
    "device memory, ranges, latency timestamps": {"timestamps": "device", "ranges": True, "latency": True},
    "the same, early": {"timestamps": "device", "ranges": True, "latency": True, "early": True},
    "Python callbacks": {"python_callbacks": True},
    "nothing decoded": {"decode": False},
}
LAUNCHES = 20_000
START_PATIENCE_S = 90.0
SETTLE_S = 1.2  # a recording's first second describes devices and names, which a long job does not notice


def blocks(
    work: Callable[[], None], settings: dict[str, Any], pairs: int, seconds: float
) -> Iterator[dict[str, float]]:
    """Seconds a call without and with a recording, pair by pair, in the order off-on, on-off, ..."""
    for index in range(pairs):
        pair = {}
        for name in ("off", "on") if index % 2 == 0 else ("on", "off"):
            pair[name] = block(work, settings if name == "on" else None, seconds)
        yield pair


def block(work: Callable[[], None], settings: dict[str, Any] | None, seconds: float) -> float:
    import torch

    from nanalyze import recorder

    with tempfile.TemporaryDirectory() as folder:
        settled = time.perf_counter()
        if settings is not None:
            recorder.start(Path(folder) / "run", **settings)
            settled += SETTLE_S
        work()
        while time.perf_counter() < settled:
            work()
        calls, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            work()
            calls += 1
        torch.cuda.synchronize()
        took = (time.perf_counter() - started) / calls
        recorder.stop()
    return took


def child(mode: str, workloads: list[str], pairs: int, seconds: float) -> None:
    """Print one JSON line a pair."""
    from nanalyze import recorder
    from nanalyze.recorder import buffers, launch_times, timeline

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    settings = dict(MODES[mode])
    if settings.pop("python_callbacks", False):
        buffers.native = None  # type: ignore[assignment]
    elif buffers.native is None:
        raise SystemExit("the callbacks in C were not compiled here")
    if not settings.pop("decode", True):
        timeline.Timeline.drain = lambda self: self._exchange.give_back(self._exchange.take())  # type: ignore[method-assign]
    if settings.pop("latency", False):
        launch_times.LaunchClock._subscribe = lambda self: False  # type: ignore[method-assign]
    has_ranges = settings.pop("ranges", False)
    settings["pause_pct"] = 0
    if settings.pop("early", False):
        with tempfile.TemporaryDirectory() as folder:
            recorder.start(Path(folder) / "run", **settings)
            recorder.stop()
    import torch
    from gpt2_step import make_step

    x = torch.zeros(1, device="cuda")

    def launches() -> None:
        for _ in range(LAUNCHES):
            x.add_(1)
        torch.cuda.synchronize()

    step = make_step("cuda")
    for _ in range(5):
        step()
    print(json.dumps({"workload": "start"}), flush=True)
    for workload, work in (("launch loop", launches), ("GPT-2 step", step)):
        if workload not in workloads:
            continue
        work = recorder.annotate(workload)(work) if has_ranges else work
        before = block(work, None, seconds)
        for pair in blocks(work, settings, pairs, seconds):
            print(json.dumps({"workload": workload, "before": before, **pair}), flush=True)


def watch(
    command: list[str], patience_s: float, stacks: Path, debugger: str | None
) -> tuple[list[dict[str, Any]], str]:
    """The JSON lines of a child, and how it ended: ok, hung, or its exit code with its last line."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines: queue.Queue[str | None] = queue.Queue()
    stdout, stderr = process.stdout, process.stderr
    assert stdout is not None
    assert stderr is not None
    threading.Thread(target=lambda: [*map(lines.put, stdout), lines.put(None)], daemon=True).start()
    results = []
    while True:
        try:
            line = lines.get(timeout=patience_s if results else START_PATIENCE_S)
        except queue.Empty:
            write_stacks(process, stacks, debugger)
            return results, f"hung: nothing for {patience_s:g} s"
        if line is None:
            break
        results.append(json.loads(line))
    errors = stderr.read().strip().splitlines()
    return results, "ok" if process.wait() == 0 else f"exit code {process.returncode}: {errors[-1] if errors else ''}"


def write_stacks(process: subprocess.Popen[str], path: Path, debugger: str | None) -> None:
    """Kill `process` after its stacks were written to `path`."""
    native = ""
    if debugger:
        command = [
            debugger,
            "-p",
            str(process.pid),
            "-batch",
            "-ex",
            "set pagination off",
            "-ex",
            "thread apply all bt 24",
        ]
        native = subprocess.run(command, capture_output=True, text=True, timeout=90).stdout
    process.send_signal(signal.SIGUSR1)
    time.sleep(1.0)
    process.kill()
    assert process.stderr is not None
    path.write_text(process.stderr.read() + "\n" + native)


def table(found: dict[str, tuple[list[dict[str, Any]], str]]) -> str:
    rows = [
        "| mode | workload | before | off | on | ratio | extra | pairs | ended |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for mode, (results, ending) in found.items():
        for workload, scale, unit in (("launch loop", 1e6 / LAUNCHES, "us"), ("GPT-2 step", 1e3, "ms")):
            pairs = [result for result in results if result["workload"] == workload]
            if not pairs:
                rows.append(f"| {mode} | {workload} | | | | | | 0 | {ending} |")
                continue
            names = ("before", "off", "on")
            before, off, on = (statistics.median(pair[name] for pair in pairs) * scale for name in names)
            ratio = statistics.median(pair["on"] / pair["off"] for pair in pairs)
            extra = statistics.median(pair["on"] - pair["off"] for pair in pairs) * scale
            times = " | ".join(f"{time:.2f} {unit}" for time in (before, off, on))
            cells = f"{times} | {ratio:.3f} | {extra:+.2f} {unit} | {len(pairs)} | {ending}"
            rows.append(f"| {mode} | {workload} | {cells} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--modes", default=";".join(MODES), help="separated by ';'")
    parser.add_argument("--workloads", default="launch loop;GPT-2 step", help="separated by ';'")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--block-s", type=float, default=2.0)
    parser.add_argument("--patience-s", type=float, default=25.0)
    parser.add_argument("--debugger", help="a gdb, to write native stacks of a hanging process")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.workloads.split(";"), arguments.pairs, arguments.block_s)
        return
    arguments.out_dir.mkdir(parents=True, exist_ok=True)
    found = {}
    for mode in arguments.modes.split(";"):
        command = [sys.executable, __file__, str(arguments.out_dir), "--child", mode]
        command += [
            "--workloads",
            arguments.workloads,
            "--pairs",
            str(arguments.pairs),
            "--block-s",
            str(arguments.block_s),
        ]
        stacks = arguments.out_dir / f"{mode.replace(', ', '-').replace(' ', '_')}.stacks.txt"
        found[mode] = watch(command, arguments.patience_s, stacks, arguments.debugger)
        print(f"{mode}: {found[mode][1]}", file=sys.stderr, flush=True)
        text = table(found)
        (arguments.out_dir / "timeline_modes.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
