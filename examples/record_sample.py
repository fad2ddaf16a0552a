"""Record the sample run: GPT-2 training steps and the known kernels, by timeline, samples and exact counters.

    python examples/record_sample.py sample --known --steps 20

Three recordings write into one run directory. The timeline phase has no counters; the sampled phase runs
steps on and on while counters of the whole device are sampled, and the recorder measures its own effect by
pauses; the exact phase is last and by itself, so that its replayed, serialised launches are told apart from
the others. Models are built and warmed up before the first recording starts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from gpt2_step import TINY, Sizes, make_step, step_flops
from known_kernels import KNOWN, Known, Target, Work, make_target, prepare, run_range, synchronize

WARM_STEPS = 5
EXACT_FIRST = 2  # launches measured of each kernel class
KNOWN_REPEATS = 10
SAMPLED_PAUSE_PCT = 20.0  # much, so that a few seconds hold pauses enough to measure by


def annotate(name: str, **attributes: Any) -> AbstractContextManager[Any]:
    """nanalyze's range; imported late, so that a dry run needs no recorder."""
    from nanalyze import recorder

    context: AbstractContextManager[Any] = recorder.annotate(name, **attributes)
    return context


def no_range(name: str, **attributes: Any) -> AbstractContextManager[Any]:
    return nullcontext()


class Workloads:
    """The step and the known kernels, built and warm."""

    def __init__(self, target: Target, known: bool, sizes: Sizes, in_range: Callable[..., Any]) -> None:
        self.target, self.sizes, self.in_range = target, sizes, in_range
        self.step = make_step(target.device, in_range, **vars(sizes))
        self.known: list[tuple[Known, Work]] = list(prepare(KNOWN, target)) if known else []
        for _ in range(WARM_STEPS):
            self.step()
        synchronize(target)

    def run_steps(self, steps: int, stop_at: float | None = None) -> int:
        """Run up to `steps` training steps, none after time `stop_at` (perf_counter); returns how many ran."""
        for index in range(steps):
            if stop_at is not None and time.perf_counter() > stop_at:
                return index
            with self.in_range("step", flops=step_flops(self.sizes), index=index):
                self.step()
        synchronize(self.target)
        return steps

    def run_known(self, repeats: int, exact: bool = False, stop_at: float | None = None) -> int:
        """Run each known kernel in `repeats` ranges, for exact counters as often as they need; returns how many ran."""
        for done, (known, work) in enumerate(self.known):
            if stop_at is not None and time.perf_counter() > stop_at:
                return done
            for _ in range(repeats):
                run_range(known, work, self.in_range, work.exact_calls if exact else work.calls)
            synchronize(self.target)
        return len(self.known)

    def run_transfers(self) -> None:
        """Copies between host and device, and on the device: they are no kernels."""
        host = torch.empty(1 << 24, pin_memory=self.target.device != "cpu")
        with self.in_range("transfers", bytes=4.0 * host.nbytes):
            there = host.to(self.target.device, non_blocking=True)
            copy = there.clone()
            host.copy_(copy, non_blocking=True)
        synchronize(self.target)


def timeline_phase(out_dir: Path, workloads: Workloads, steps: int, record: Callable[..., Any]) -> None:
    with record(str(out_dir)):
        workloads.run_steps(steps)
        workloads.run_transfers()
        workloads.run_known(KNOWN_REPEATS)


def sampled_phase(out_dir: Path, workloads: Workloads, seconds: float, record: Callable[..., Any]) -> None:
    """Training steps for some seconds, with sampled counters."""
    stop_at = time.perf_counter() + seconds
    with record(str(out_dir), append=True, samples=_samples(), pause_pct=SAMPLED_PAUSE_PCT):
        workloads.run_steps(1_000_000, stop_at)
        synchronize(workloads.target)


def _samples() -> Any:
    """As much of a core as sampling needs, so that some seconds show what the default shows after minutes."""
    from nanalyze import recorder

    return recorder.Samples(overhead_pct=100)


def exact_phase(out_dir: Path, workloads: Workloads, budget_s: float, record: Callable[..., Any]) -> None:
    """Exact counters of the first launches of each kernel class; known kernels first, as they are few."""
    stop_at = time.perf_counter() + budget_s
    with record(str(out_dir), append=True, exact=_exact()):
        known = workloads.run_known(EXACT_FIRST, exact=True, stop_at=stop_at)
        steps = workloads.run_steps(1, stop_at)
    if known < len(workloads.known) or not steps:
        print(f"the budget of {budget_s:g} s was spent: {known} known kernels and {steps} steps have exact counters")


def _exact() -> Any:
    from nanalyze import recorder

    return recorder.Exact(first=EXACT_FIRST, budget_pct=100)  # 100: the budget here is the phase's own


def _record(*arguments: Any, **keywords: Any) -> Any:
    from nanalyze import recorder

    return recorder.record(*arguments, **keywords)


def dry_run(known: bool) -> None:
    """The phases at tiny sizes on the CPU, without a recorder."""
    workloads = Workloads(make_target("cpu", dry_run=True), known, TINY, no_range)
    with_nothing = lambda *_, **__: nullcontext()  # noqa: E731
    timeline_phase(Path("unused"), workloads, 2, with_nothing)
    workloads.run_steps(2, stop_at=time.perf_counter() + 1)
    done = workloads.run_known(EXACT_FIRST, exact=True), workloads.run_steps(1)
    print(f"dry run: {done[0]} known kernels, {done[1]} step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path, help="run directory to write")
    parser.add_argument("--steps", type=int, default=20, help="training steps in the timeline (default 20)")
    parser.add_argument("--known", action="store_true", help="record the known kernels too")
    parser.add_argument("--sampled-s", type=float, default=10.0, metavar="N", help="0 leaves the sampled phase out")
    parser.add_argument("--exact-budget-s", type=float, default=90.0, metavar="N", help="0 leaves the exact phase out")
    parser.add_argument("--phase", choices=("all", "timeline", "sampled", "exact"), default="all")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, nothing recorded")
    arguments = parser.parse_args()
    if arguments.dry_run:
        dry_run(arguments.known)
        return
    workloads = Workloads(make_target("cuda"), arguments.known, Sizes(), annotate)
    if arguments.phase in ("all", "timeline"):
        timeline_phase(arguments.out_dir, workloads, arguments.steps, _record)
    if arguments.phase in ("all", "sampled") and arguments.sampled_s > 0:
        sampled_phase(arguments.out_dir, workloads, arguments.sampled_s, _record)
    if arguments.phase in ("all", "exact") and arguments.exact_budget_s > 0:
        exact_phase(arguments.out_dir, workloads, arguments.exact_budget_s, _record)
    size = sum(path.stat().st_size for path in arguments.out_dir.rglob("*") if path.is_file())
    print(f"recorded {size / 1e6:.2f} MB in {arguments.out_dir}")
    print(f"next: nanalyze report {arguments.out_dir}")


if __name__ == "__main__":
    main()
