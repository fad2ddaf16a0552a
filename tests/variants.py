"""Runs to compare: variants with known times, gaps and bytes, and noise like a GPU's.

Each repetition of a variant is a range; in it the variant's kernels run one after another. Noise, spikes
and clock states multiply the durations, so what a change is in truth is what was put in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from trace import Trace

import numpy as np

import nanalyze.analysis as na
from nanalyze.analysis.compare.sample import Facts, KernelClass, Sample
from nanalyze.analysis.statistics import Array

CLOCK = {"sm_clock_hz": 1.5e9, "duration_ns": 1.0}


@dataclass(frozen=True)
class Kernel:
    """One launch in a repetition: its duration and gap before it in ns, and bytes of DRAM and L2."""

    name: str
    duration_ns: int
    gap_ns: int = 1_000
    dram_bytes: float | None = None
    l2_bytes: float | None = None
    flops: float | None = None
    memory_pct: float = 90.0
    compute_pct: float = 10.0
    grid: tuple[int, int, int] = (132, 1, 1)
    registers: int = 32


@dataclass(frozen=True)
class Variant:
    """A named range with its kernels; `noise` is their relative spread, `drift` grows over all repetitions."""

    name: str
    kernels: tuple[Kernel, ...]
    noise: float = 0.005
    drift: float = 0.0
    spikes: float = 0.0

    def slower(self, share: float) -> Variant:
        return replace(
            self, kernels=tuple(replace(k, duration_ns=round(k.duration_ns * (1 + share))) for k in self.kernels)
        )


# 100 us + 60 us + 40 us in three launches, and the same work in one of 90 us that moves half the bytes.
EAGER = Variant(
    "eager",
    (
        Kernel("bias", 100_000, 2_000, 300e6, 400e6, 1e9),
        Kernel("gelu", 60_000, 2_000, 200e6, 250e6, 2e9),
        Kernel("norm<float>", 40_000, 2_000, 100e6, 150e6, 1e9),
    ),
)
FUSED = Variant("fused", (Kernel("triton_fused_3", 90_000, 2_000, 300e6, 350e6, 4e9),))


def write(
    run_dir: Path,
    variants: Sequence[Variant],
    repetitions: int = 30,
    seed: int = 0,
    *,
    counted: int = 3,
    clock_hz: int = 1_500_000_000,
    **device: object,
) -> Path:
    """A run with the variants in turn, and `counted` launches of every kernel under the profiler after them."""
    random = np.random.default_rng(seed)
    trace = Trace(run_dir)
    trace.device(**device)
    ids: dict[Kernel, int] = {}
    at = 0
    for number in range(repetitions):
        for variant in variants:
            opened = at
            for kernel in variant.kernels:
                key = replace(kernel, duration_ns=0, gap_ns=0)
                if key not in ids:
                    ids[key] = trace.kernel_class(kernel.name, kernel.grid, registers=kernel.registers)
                factor = (1 + variant.noise * random.standard_normal()) * (1 + variant.drift * number / repetitions)
                factor *= 4.0 if random.random() < variant.spikes else 1.0
                at += kernel.gap_ns
                duration = round(kernel.duration_ns * factor)
                trace.kernel(ids[key], at, duration, queued_ns=opened + 10)
                at += duration
            trace.range(variant.name, opened, at)
            at += 20_000
        trace.state(at, sm_clock_hz=clock_hz)
    _count(trace, ids, counted)
    trace.write()
    return run_dir


def _count(trace: Trace, ids: dict[Kernel, int], counted: int) -> None:
    for kernel, class_id in ids.items():
        if kernel.dram_bytes is None:
            continue
        values = {
            "compute_pct": kernel.compute_pct,
            "memory_pct": kernel.memory_pct,
            "dram_pct": kernel.memory_pct,
            "l2_pct": 40.0,
            "l1_pct": 20.0,
            "dram_read_bytes": kernel.dram_bytes / 2,
            "dram_write_bytes": kernel.dram_bytes / 2,
            "l2_bytes": kernel.l2_bytes,
            "thread_inst_fadd": kernel.flops,
            "thread_inst_fmul": 0.0,
            "thread_inst_ffma": 0.0,
        }
        trace.measure(class_id, [values] * counted)


def opened(
    run_dir: Path, variants: Sequence[Variant], repetitions: int = 30, seed: int = 0, **options: object
) -> na.Run:
    """The run of `write`, open."""
    return na.open(write(run_dir, variants, repetitions, seed, **options))  # type: ignore[arg-type]


def sample_of(times: Array, facts: Facts | None = None, **columns: object) -> Sample:
    """A run of one kernel whose launches take `times` ns, one a repetition, after a gap of 2 us each."""
    known = KernelClass(7, "gemm<float>", "gemm", (1,) * 13, "step", "memory", "DRAM", **columns)  # type: ignore[arg-type]
    totals = {
        "kernel_ns": times, "span_ns": times + 2_000, "gap_ns": np.full(len(times), 2_000.0),
        "launches": np.ones(len(times)), "gaps": np.ones(len(times)),
    }  # fmt: skip
    return Sample(
        "run",
        "step",
        len(times),
        totals,
        [7],
        np.ones((1, len(times))),
        times[None],
        np.zeros(1),
        {7: known},
        facts or Facts(),
    )
