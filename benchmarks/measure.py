"""The same sweeps with nanalyze and with nsight-python: seconds from start to table, and the times they find.

    python benchmarks/measure.py out                 # about two minutes on an H200 with Nsight Compute
    python benchmarks/measure.py out --only nanalyze

The sweeps are those of nsight-python's own examples: `subplots` (05_subplots.py: matrix products of three sizes,
two types, the second factor transposed or not) and `parameter` (02_parameter_sweep.py: three sizes in fp32), ten
runs of each product (nsight-python 0.9.5; its thermal guard is off, as nanalyze's is). Each tool runs in processes
of its own, in turn, `--rounds` times, as long as the next one is expected to end within `--seconds`. Two spans are
compared: the whole process, interpreter and imports included, and from the call of the decorated function to the
table. Both tools empty the caches before each product and leave the clocks alone. Last, nanalyze reads Nsight
Compute's metric of duration and the cycles of the same products: `same metric` says how far the tools are apart
where both read the same counter, and cycles over time are the SM clock that each time was taken at.

Nsight Compute is looked for on the path and where its packages install it, and so is its module `ncu_report`. A
tool that is missing is left out with a message. Results are printed, and written to OUT/measure-SWEEP.json, as they
come.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from ncu_check import find_ncu

SIZES, TYPES = (2048, 4096, 8192), ("float32", "float16")
SWEEPS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "subplots": tuple(itertools.product(SIZES, TYPES, (False, True))),
    "parameter": tuple((n, "float32", False) for n in SIZES),
}
TOOLS = ("nanalyze", "nsight")
DURATION, CYCLES = "duration_ns", "sm__cycles_elapsed.max"  # gpu__time_duration.sum is the former
LEAST_RATIO, MOST_APART_PCT = 5.0, 2.0
LONG_NS = 100_000  # Nsight Compute's duration holds about 1 µs of start-up, the timeline's does not
MARK = "FOUND "


@dataclass
class Found:
    """One process: `seconds` of all of it, `call_s` from the call to the table, mean ns by configuration."""

    seconds: float
    call_s: float
    ns: dict[str, float]
    extra: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass
class Row:
    """A configuration: medians over rounds; clocks are cycles over time."""

    label: str
    nanalyze_ns: float | None = None
    nsight_ns: float | None = None
    apart_pct: float | None = None
    same_metric_pct: float | None = None
    nanalyze_hz: float | None = None
    nsight_hz: float | None = None


def label(n: int, dtype: str, transpose: bool) -> str:
    return f"{n} {str(dtype).removeprefix('torch.')}{' transposed' if transpose else ''}"


# --- in a child process ----------------------------------------------------------------------------


def product_of(annotate: Callable[[str], Any]) -> Callable[[int, str, bool], None]:
    """What is measured: the examples' product in a range `matmul`."""
    import torch

    def product(n: int, dtype: str, transpose: bool) -> None:
        a, b = (torch.randn(n, n, device="cuda", dtype=getattr(torch, dtype)) for _ in range(2))
        if transpose:
            b = b.T
        with annotate("matmul"):
            _ = a @ b

    return product


def with_nanalyze(sweep: str, runs: int, out: Path, counters: Sequence[str] | None = None) -> dict[str, Any]:
    from nanalyze import recorder

    product = product_of(recorder.annotate)
    started = time.perf_counter()
    result = recorder.measure(
        product, SWEEPS[sweep], repetitions=runs, cache="cold", counters=counters, run_dir=out, progress=False
    )
    table = result.to_pandas()
    seconds = time.perf_counter() - started
    if result.failures:
        raise RuntimeError(str(result.failures))
    found: dict[str, dict[str, float]] = {}
    for row in table.to_dict("records"):
        found.setdefault(row["metric"], {})[label(row["n"], row["dtype"], row["transpose"])] = float(row["value"])
    extra = {name: found[name] for name in counters or () if name in found}
    return {"call_s": seconds, "ns": found["total_ns"], "extra": extra}


def with_nsight(sweep: str, runs: int, out: Path) -> dict[str, Any]:
    import nsight

    analyze = nsight.analyze.kernel(
        configs=SWEEPS[sweep], runs=runs, output="quiet", output_prefix=f"{out}/", thermal_control=False
    )
    product = analyze(product_of(nsight.annotate))
    started = time.perf_counter()
    table = product().to_dataframe()
    seconds = time.perf_counter() - started
    rows = table.to_dict("records")
    times = {label(int(row["n"]), row["dtype"], is_true(row["transpose"])): float(row["AvgValue"]) for row in rows}
    return {"call_s": seconds, "ns": times, "extra": {}}


def is_true(value: Any) -> bool:
    """A boolean that a table may hold as text."""
    return str(value) == "True"


# --- child processes -------------------------------------------------------------------------------


def run_tool(tool: str, sweep: str, runs: int, out: Path, environment: Mapping[str, str], timeout_s: float) -> Found:
    """One tool in a process of its own. Raises RuntimeError, and leaves no process behind."""
    command = [sys.executable, str(Path(__file__).resolve()), str(out.resolve()), "--child", tool, "--sweep", sweep]
    command += ["--runs", str(runs)]
    started = time.perf_counter()
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(environment),
        start_new_session=True,
    )
    try:
        output, errors = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # with what it started: ncu, and the script again
        child.communicate()
        raise RuntimeError(f"{tool}, {sweep}: not done after {timeout_s:.0f} s, stopped") from None
    seconds = time.perf_counter() - started
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    if child.returncode or not lines:
        log = out.with_name(f"{out.name}.log")
        log.write_text(output + errors)
        tail = "\n".join(f"    {line}" for line in errors.strip().splitlines()[-30:])
        raise RuntimeError(f"{tool}, {sweep}: exit code {child.returncode}; all output in {log}\n{tail}")
    found = Found(seconds, **json.loads(lines[-1].removeprefix(MARK)))
    missing = [name for name in (label(*each) for each in SWEEPS[sweep]) if name not in found.ns]
    if missing:
        raise RuntimeError(f"{tool}, {sweep}: its table has no time of {', '.join(missing)}")
    return found


def environment_of_nsight(ncu: str) -> dict[str, str]:
    """The environment in which nsight-python finds `ncu` and the module `ncu_report`. Raises FileNotFoundError."""
    found = dict(os.environ)
    found["PATH"] = os.pathsep.join([str(Path(ncu).parent), found.get("PATH", "")])
    if importlib.util.find_spec("ncu_report") is None:
        found["PYTHONPATH"] = os.pathsep.join([str(report_folder(ncu)), *filter(None, [found.get("PYTHONPATH")])])
    return found


def report_folder(ncu: str) -> Path:
    """The folder of Nsight Compute's `ncu_report`: near `ncu` itself, else of the newest installed."""
    real = Path(ncu).resolve()
    for root, pattern in [
        (real.parent, "extras/python"),
        (real.parent.parent, "nsight-compute*/extras/python"),
        (real.parent.parent, "extras/python"),
        (real.parent.parent.parent, "extras/python"),
        (Path("/opt/nvidia/nsight-compute"), "*/extras/python"),
        (Path("/usr/local"), "cuda*/nsight-compute*/extras/python"),
    ]:
        places = [folder for folder in sorted(root.glob(pattern), reverse=True) if (folder / "ncu_report.py").is_file()]
        if places:
            return places[0]
    raise FileNotFoundError(f"no extras/python/ncu_report.py of Nsight Compute near {ncu}: put it on PYTHONPATH")


def environments(only: Sequence[str], ncu: str | None) -> dict[str, dict[str, str]]:
    """The environment of each tool that can run; the others are named with what they lack."""
    found: dict[str, dict[str, str]] = {}
    for tool in only:
        try:
            if importlib.util.find_spec(tool) is None:
                raise FileNotFoundError("not installed")
            found[tool] = environment_of_nsight(find_ncu(ncu)) if tool == "nsight" else dict(os.environ)
        except (FileNotFoundError, SystemExit) as error:
            say(f"{tool}: left out: {error}")
    return found


# --- rounds ----------------------------------------------------------------------------------------


class Rounds:
    """The tools in turn on one sweep, until `rounds` are done or the next would not end within `seconds`."""

    def __init__(self, sweep: str, runs: int, out: Path, tools: Mapping[str, Mapping[str, str]], ends: float) -> None:
        self.sweep = sweep
        self.runs = runs
        self.out = out
        self.tools = tools
        self.ends = ends
        self.found: dict[str, list[Found]] = {tool: [] for tool in tools}
        self.same: Found | None = None
        self.failed: dict[str, str] = {}

    def run(self, rounds: int) -> None:
        for number in range(rounds):
            for tool in self.tools:
                if tool not in self.failed:
                    self._once(tool, number)
        if "nanalyze" in self.tools and "nanalyze" not in self.failed:
            self.same = self._try("counters", self.out / f"{self.sweep}-counters", dict(self.tools["nanalyze"]))
            self.write()

    def _once(self, tool: str, number: int) -> None:
        expected = max((each.seconds for each in self.found[tool]), default=0.0)
        if number and time.monotonic() + expected > self.ends:
            say(f"{self.sweep}: no time is left for round {number + 1} of {tool}")
            return
        found = self._try(tool, self.out / f"{self.sweep}-{tool}-{number}", dict(self.tools[tool]))
        if found is None:
            return
        self.found[tool].append(found)
        say(f"{self.sweep}, round {number + 1}, {tool}: {found.seconds:.1f} s, {found.call_s:.1f} s of it the call")
        self.write()

    def _try(self, tool: str, out: Path, environment: Mapping[str, str]) -> Found | None:
        try:
            return run_tool(tool, self.sweep, self.runs, out, environment, max(60.0, self.ends - time.monotonic()))
        except RuntimeError as error:
            self.failed[tool] = str(error)
            say(str(error))
            return None

    # -- results ------------------------------------------------------------------------------------

    def rows(self) -> list[Row]:
        rows = []
        for name in (label(*each) for each in SWEEPS[self.sweep]):
            row = Row(name, *(self._ns(tool, name) for tool in TOOLS))
            row.apart_pct = apart(row.nanalyze_ns, row.nsight_ns)
            if self.same is not None:
                row.same_metric_pct = apart(self.same.extra.get(DURATION, {}).get(name), row.nsight_ns)
                cycles = self.same.extra.get(CYCLES, {}).get(name)
                row.nanalyze_hz, row.nsight_hz = (
                    cycles * 1e9 / ns if cycles and ns else None for ns in (row.nanalyze_ns, row.nsight_ns)
                )
            rows.append(row)
        return rows

    def _ns(self, tool: str, name: str) -> float | None:
        values = [each.ns[name] for each in self.found.get(tool, []) if name in each.ns]
        return median(values) if values else None

    def ratio(self, span: str) -> float | None:
        """nsight-python's seconds over nanalyze's, medians over rounds; `span` is a field of Found."""
        spans = [median(getattr(each, span) for each in self.found[tool]) for tool in TOOLS if self.found.get(tool)]
        return spans[1] / spans[0] if len(spans) == 2 else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "sweep": self.sweep,
            "launches": len(SWEEPS[self.sweep]) * self.runs,
            "ratio": self.ratio("seconds"),
            "call_ratio": self.ratio("call_s"),
            "rows": [asdict(row) for row in self.rows()],
            "rounds": {tool: [asdict(each) for each in found] for tool, found in self.found.items()},
            "failed": self.failed,
        }

    def write(self) -> None:
        (self.out / f"measure-{self.sweep}.json").write_text(json.dumps(self.as_dict(), indent=1))


def apart(mine: float | None, other: float | None) -> float | None:
    """How much longer `other` is, in percent."""
    return None if not mine or other is None else 100 * (other / mine - 1)


def show(rounds: Rounds) -> None:
    """The table of one sweep, and what becomes of the two targets."""
    say(f"\n{rounds.sweep}\n\n| product | nanalyze, µs | nsight, µs | apart | same metric | SM clock, MHz |")
    say("|---|--:|--:|--:|--:|--:|")
    rows = rounds.rows()
    for row in rows:
        times = (text(ns, 1e3, ".1f") for ns in (row.nanalyze_ns, row.nsight_ns))
        parts = (text(pct, 1, "+.1f", " %") for pct in (row.apart_pct, row.same_metric_pct))
        clocks = " / ".join(text(hz, 1e6, ".0f") for hz in (row.nanalyze_hz, row.nsight_hz))
        say(f"| {row.label} | {' | '.join([*times, *parts, clocks])} |")
    say("")
    for tool, found in rounds.found.items():
        if found:
            whole, call = (median(getattr(each, span) for each in found) for span in ("seconds", "call_s"))
            say(f"{tool}: {whole:.1f} s from start to table, {call:.1f} s from call to table ({len(found)} rounds)")
    ratio, call_ratio = rounds.ratio("seconds"), rounds.ratio("call_s")
    if ratio is not None and call_ratio is not None:
        say(f"end to end: {ratio:.1f} times as fast ({verdict(ratio >= LEAST_RATIO)}: at least {LEAST_RATIO:g})")
        say(f"from call to table: {call_ratio:.1f} times as fast ({verdict(call_ratio >= LEAST_RATIO)})")
    show_gaps("times", [row.apart_pct for row in rows])
    show_gaps(f"times of {LONG_NS / 1e3:g} µs or more", [r.apart_pct for r in rows if (r.nsight_ns or 0) >= LONG_NS])
    show_gaps("same metric", [row.same_metric_pct for row in rows])


def show_gaps(what: str, found: Sequence[float | None]) -> None:
    gaps = [abs(pct) for pct in found if pct is not None]
    if gaps:
        near = sum(gap <= MOST_APART_PCT for gap in gaps)
        say(
            f"{what}: {near} of {len(gaps)} within {MOST_APART_PCT:g} % ({verdict(near == len(gaps))}), "
            f"mean {mean(gaps):.2f} %, most {max(gaps):.2f} %"
        )


def text(value: float | None, scale: float, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value / scale:{form}}{unit}"


def verdict(is_reached: bool) -> str:
    return "reached" if is_reached else "MISSED"


def say(line: str) -> None:
    print(line, flush=True)


# --- command line ----------------------------------------------------------------------------------


def child(tool: str, sweep: str, runs: int, out: Path) -> None:
    """What a child process does: its tool's sweep, then one line of JSON."""
    if tool == "nsight":
        out.mkdir(parents=True, exist_ok=True)
        found = with_nsight(sweep, runs, out)
    else:
        found = with_nanalyze(sweep, runs, out, (DURATION, CYCLES) if tool == "counters" else None)
    say(MARK + json.dumps(found))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--only", default=",".join(TOOLS), help="tools, with commas")
    parser.add_argument("--sweep", choices=SWEEPS, help="default: subplots, and parameter where a tool fails on it")
    parser.add_argument("--runs", type=int, default=10, help="of each product (10, as in the examples)")
    parser.add_argument("--rounds", type=int, default=3, help="of each tool (3)")
    parser.add_argument("--seconds", type=float, default=110, help="after which no further round begins (110)")
    parser.add_argument("--ncu", help="path of Nsight Compute's ncu")
    parser.add_argument("--child", choices=[*TOOLS, "counters"], help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.child:
        child(options.child, options.sweep, options.runs, options.out)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + options.seconds
    tools = environments(options.only.split(","), options.ncu)
    for environment in tools.values():  # the disk's cache is filled for all alike
        subprocess.run([sys.executable, "-c", "import torch, pandas"], env=environment, check=False)
    for sweep in [options.sweep] if options.sweep else list(SWEEPS):
        rounds = Rounds(sweep, options.runs, options.out, tools, ends)
        rounds.run(options.rounds)
        show(rounds)
        if not rounds.failed.keys() & tools.keys():
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
