"""The same sweep with nanalyze and with nsight-python: seconds from start to table, and the times they find.

    python benchmarks/measure.py out                 # about two minutes on an H200 with Nsight Compute
    python benchmarks/measure.py out --only nanalyze

Each tool runs in processes of its own, in turn, `--rounds` times; what is compared is the wall time of such a
process, interpreter and imports included, and the mean time of each matrix product. Both empty the caches
before each product and leave the clocks alone. A tool that is missing is left out with a message.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

SIZES = (1024, 2048, 3072, 4096, 6144, 8192)
RUNS = 10
TOOLS = {"nanalyze": "nanalyze", "nsight": "nsight"}  # and the package each needs
MARK = "TIMES "


def with_nanalyze(out: Path) -> dict[int, float]:
    import torch

    from nanalyze import recorder

    @recorder.measure(configurations=SIZES, repetitions=RUNS, warmup=1, cache="cold", counters=None, run_dir=out)
    def product(n: int) -> None:
        a, b = (torch.randn(n, n, device="cuda", dtype=torch.float16) for _ in range(2))
        with recorder.annotate("product"):
            a @ b

    table = product().to_pandas().query("metric == 'total_ns'")
    return {int(n): float(value) for n, value in zip(table["n"], table["value"], strict=True)}


def with_nsight(out: Path) -> dict[int, float]:
    import nsight
    import torch

    @nsight.analyze.kernel(  # type: ignore[misc]
        configs=[(n,) for n in SIZES], runs=RUNS, clock_control="none", combine_kernel_metrics=lambda x, y: x + y
    )
    def product(n: int) -> None:
        a, b = (torch.randn(n, n, device="cuda", dtype=torch.float16) for _ in range(2))
        with nsight.annotate("product"):
            a @ b

    table = product().to_dataframe()
    return {int(n): float(value) for n, value in zip(table["n"], table["AvgValue"], strict=True)}


def run_tool(tool: str, out: Path) -> tuple[float, dict[int, float]]:
    """Seconds that a process of its own takes, and the mean ns of each size."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, __file__, str(out), "--child", tool], capture_output=True, text=True, check=False, timeout=900
    )
    seconds = time.perf_counter() - started
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise RuntimeError(f"{tool}: exit code {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}")
    return seconds, {int(n): ns for n, ns in json.loads(lines[-1].removeprefix(MARK)).items()}


def report(found: dict[str, list[tuple[float, dict[int, float]]]]) -> dict[str, Any]:
    """Medians over rounds, by tool."""
    return {
        tool: {
            "seconds": median(seconds for seconds, _ in rounds),
            "ns": {n: median(times[n] for _, times in rounds) for n in SIZES},
        }
        for tool, rounds in found.items()
        if rounds
    }


def show(result: dict[str, Any]) -> None:
    print("| size | " + " | ".join(f"{tool}, µs" for tool in result) + " | apart |")
    print("|---|" + "--:|" * (len(result) + 1))
    for n in SIZES:
        times = [about["ns"][n] for about in result.values()]
        apart = f"{100 * (times[-1] / times[0] - 1):+.1f} %" if len(times) > 1 else ""
        print(f"| {n} | " + " | ".join(f"{ns / 1e3:.1f}" for ns in times) + f" | {apart} |")
    seconds = {tool: about["seconds"] for tool, about in result.items()}
    print("\nfrom start to table: " + ", ".join(f"{tool} {value:.1f} s" for tool, value in seconds.items()))
    if len(seconds) == 2:
        print(f"nanalyze is {seconds['nsight'] / seconds['nanalyze']:.1f} times as fast")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default=",".join(TOOLS), help="tools, with commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", choices=TOOLS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        times = {"nanalyze": with_nanalyze, "nsight": with_nsight}[options.child](options.out)
        print(MARK + json.dumps(times))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[tuple[float, dict[int, float]]]] = {tool: [] for tool in options.only.split(",")}
    for number in range(options.rounds):
        for tool, rounds in found.items():
            if importlib.util.find_spec(TOOLS[tool]) is None:
                print(f"{tool}: not installed, left out")
                continue
            try:
                rounds.append(run_tool(tool, options.out / f"{tool}-{number}"))
            except Exception as error:
                print(error)
    result = report(found)
    (options.out / "measure.json").write_text(json.dumps(result, indent=1))
    if result:
        show(result)


if __name__ == "__main__":
    main()
