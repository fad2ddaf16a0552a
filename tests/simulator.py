"""A GPU that is all arithmetic: kernel streams with known rates, and the samples a device would give.

    job = simulate(Job(classes=20, seconds=10), seed=1)
    job.write(tmp_path)
    job.truth("inst", 3)   # of class 3, per ns while it ran

Counters accumulate linearly while a launch runs, so what lies between two instants is exact: noise,
losses and drift are added on purpose, never by the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from trace import DEVICE, PROCESS, T0, Trace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nanalyze.rundir.schema import TABLES
from nanalyze.rundir.shards import write_shard

Array = NDArray[np.float64]

SM_CLOCK_GHZ = 1.5
SM_COUNT = DEVICE["sm_count"]
DRAM_PEAK = DEVICE["dram_peak_bytes_per_s"] / 1e9  # bytes per ns
# What each counter gains per ns at its peak.
PEAKS = {
    "sm_cycles_elapsed": SM_COUNT * SM_CLOCK_GHZ,
    "sm_cycles_active": SM_COUNT * SM_CLOCK_GHZ,
    "inst": 4 * SM_COUNT * SM_CLOCK_GHZ,
    "dram_read_bytes": DRAM_PEAK,
    "pipe_tensor_busy_ns": 1.0,
    "dram_write_bytes": DRAM_PEAK,
    "dram_busy_ns": 1.0,
    "l2_slices_busy_ns": 1.0,
    "l1_data_busy_ns": 1.0,
    "l1_request_busy_ns": 1.0,
    "l1_texture_busy_ns": 1.0,
    "inst_adu": 0.5 * SM_COUNT * SM_CLOCK_GHZ,
    "pipe_alu_busy_ns": 1.0,
    "pipe_fma_busy_ns": 1.0,
    "warps_active": 64 * SM_COUNT * SM_CLOCK_GHZ,
    "issue_active_cycles": 4 * SM_COUNT * SM_CLOCK_GHZ,
}
ON_SM_CLOCK = tuple(name for name in PEAKS if name.startswith(("sm_", "pipe_", "l1_", "inst", "warps", "issue")))
FEW = ("sm_cycles_active", "inst", "dram_read_bytes", "pipe_tensor_busy_ns")


@dataclass(frozen=True)
class Job:
    """What to simulate. Rates are shares of PEAKS, drawn unless given: {counter: one a class}.

    steady: launches repeat one sequence of `launches_a_step`, as training does; else random order.
    variation: spread of the rate among launches of a class; noise: of a sample, as a share of the mean
    sample; heavy: share of samples whose noise is 30 times that. lost: share of samples dropped.
    drift: by how much rates grow over the run (0.5: by half). together: pairs of classes of which the
    second always runs while the first does, on another stream. mixed: classes of which every third launch runs
    5 times as long, at 0.3 times the rate. clocks: of each class, as shares of the SM clock; then counters of SMs
    gain in proportion and percentages (busy times) stay what they are. early: share of its time in which a launch of
    every other class has nothing left to do. after_us: time before its recorded end at which a launch counts no more.
    lengths: relative spread of a class's durations; same_work: its launches do the same work each, so that shorter ones
    have higher rates. cut: share of samples in which the SMs'
    counters stand still after 4 % of the time. blocks: of a launch, by class.
    """

    classes: int = 10
    seconds: float = 2.0
    streams: int = 1
    mean_us: tuple[float, float] = (20.0, 200.0)
    gap_share: float = 0.1
    interval_us: float = 1000.0
    jitter: float = 0.0
    variation: float = 0.0
    noise: float = 0.005
    heavy: float = 0.0
    lost: float = 0.0
    drift: float = 0.0
    idle: float = 0.01
    steady: bool = True
    launches_a_step: int = 200
    together: tuple[tuple[int, int], ...] = ()
    mixed: tuple[int, ...] = ()
    clocks: tuple[float, ...] = ()
    blocks: tuple[int, ...] = ()
    cut: float = 0.0
    early: float = 0.0
    after_us: float = 1.0
    lengths: float = 0.02
    same_work: bool = False
    zero_share: float = 0.3
    groups: tuple[tuple[str, ...], ...] = (FEW,)
    group_ms: float = 100.0
    rates: dict[str, Sequence[float]] = field(default_factory=dict)


@dataclass
class Simulated:
    """Launches in order of start and samples; `rate` is by counter and launch, per ns."""

    job: Job
    kernel_class: NDArray[np.int64]
    start: NDArray[np.int64]
    duration: NDArray[np.int64]
    stream: NDArray[np.int64]
    rate: dict[str, Array]
    sample_start: NDArray[np.int64]
    sample_end: NDArray[np.int64]
    group: NDArray[np.int64]
    values: dict[str, Array]

    def truth(self, counter: str, kernel_class: int) -> float:
        """Mean rate of a class while it ran, per ns."""
        own = self.kernel_class == kernel_class
        return float((self.rate[counter][own] * self.duration[own]).sum() / self.duration[own].sum())

    def shares(self) -> Array:
        """Share of kernel time by class."""
        time = np.bincount(self.kernel_class, self.duration, self.job.classes)
        return np.asarray(time / time.sum(), dtype=np.float64)

    def class_ids(self) -> list[int]:
        """Identifiers under which `write` stores the classes."""
        return [1000 + number for number in range(self.job.classes)]

    def write(self, run_dir: Path, *, clock: bool = True, extra: Trace | None = None) -> Trace:
        """Write it as a run directory; `extra` holds rows to go with it. Returns the trace."""
        trace = extra or Trace(run_dir)
        trace.device()
        for number, name in zip(self.class_ids(), map("kernel_{}".format, range(self.job.classes)), strict=True):
            blocks = self.job.blocks[number - 1000] if self.job.blocks else 1320
            trace.kernel_class(name, (blocks, 1, 1), (256, 1, 1), kernel_class_id=number)
        if clock:
            for second in range(int(self.job.seconds) + 2):
                trace.state(second * 10**9, sm_clock_hz=int(SM_CLOCK_GHZ * 1e9))
        before = ("kernels", PROCESS) in trace.rows
        trace.write()
        _write(run_dir, "kernels", self._kernels(), 2 if before else 1)
        _write(run_dir, "samples", self._samples(), 1)
        return trace

    def _kernels(self) -> dict[str, Any]:
        count = len(self.start)
        return {
            "start_ns": T0 + self.start,
            "duration_ns": self.duration,
            "kernel_class_id": 1000 + self.kernel_class,
            "stream_id": 7 + self.stream,
            "correlation_id": np.arange(1, count + 1),
            "queued_ns": T0 + self.start - 5000,
            "device_id": np.zeros(count),
            "context_id": np.ones(count),
            "graph_id": pa.nulls(count),
            "graph_node_id": pa.nulls(count),
        }

    def _samples(self) -> dict[str, Any]:
        columns = {}
        for counter, values in self.values.items():
            present = np.isin(self.group, [g for g, names in enumerate(self.job.groups) if counter in names])
            columns[counter] = pa.array(values, mask=~present)
        return {
            "device_id": np.zeros(len(self.group)),
            "start_ns": T0 + self.sample_start,
            "end_ns": T0 + self.sample_end,
            "counter_group": self.group,
            **columns,
        }


def _write(run_dir: Path, table: str, columns: dict[str, Any], sequence: int) -> None:
    declared = TABLES[table]
    extra = tuple(name for name in columns if name not in declared.column_names)
    schema = declared.arrow_schema(extra)
    rows = pa.table([_array(columns[f.name]).cast(f.type) for f in schema], schema=schema)
    write_shard(run_dir, table, PROCESS, sequence, rows)


def _array(values: Any) -> Any:
    return values if isinstance(values, pa.Array) else pa.array(values)


def simulate(job: Job, seed: int = 0) -> Simulated:
    """The same job and seed give the same launches and samples."""
    random = np.random.default_rng(seed)
    parts = [_stream(job, random) for _ in range(job.streams)]
    kernel_class, start, duration, is_long = (np.concatenate([part[i] for part in parts]) for i in range(4))
    stream = np.concatenate([np.full(len(part[0]), number) for number, part in enumerate(parts)])
    order = np.argsort(start, kind="stable")
    kernel_class, start, duration, stream = kernel_class[order], start[order], duration[order], stream[order]
    is_long = is_long[order]
    sample_start, sample_end, group = _samples(job, random)
    wanted = [counter for counter in PEAKS if any(counter in names for names in job.groups)]
    rate = {counter: _rates(job, counter, kernel_class, start, random) for counter in wanted}
    for counter, rates in rate.items():
        if counter != "sm_cycles_elapsed":
            rates *= np.where(is_long, 0.3, 1.0)
        if job.same_work and counter != "sm_cycles_elapsed":
            mean = np.bincount(kernel_class, duration) / np.bincount(kernel_class).clip(min=1)
            rates *= mean[kernel_class] / duration
        if job.clocks and counter in ON_SM_CLOCK:
            rates *= np.asarray(job.clocks)[kernel_class]
    busy_until = _busy(start, start + duration)
    values = {}
    for counter, rates in rate.items():
        worked = (1 - job.early * (kernel_class % 2)) * (1 - np.minimum(1000 * job.after_us / duration, 0.3))
        gained = _gained(start, duration * worked, rates / worked, sample_start, sample_end)
        idle = (sample_end - sample_start) - (np.interp(sample_end, *busy_until) - np.interp(sample_start, *busy_until))
        gained = gained + idle * (1.0 if counter == "sm_cycles_elapsed" else job.idle) * PEAKS[counter]
        spread = job.noise * gained.mean() * np.where(random.random(len(gained)) < job.heavy, 30.0, 1.0)
        values[counter] = (gained + spread * random.standard_normal(len(gained))).clip(min=0)
    _cut(job, values, random)
    if job.clocks:
        elapsed = values["sm_cycles_elapsed"] / PEAKS["sm_cycles_elapsed"] / (sample_end - sample_start)
        for counter in values:
            if counter.startswith(("pipe_", "l1_")):
                values[counter] = values[counter] / elapsed
    return Simulated(job, kernel_class, start, duration, stream, rate, sample_start, sample_end, group, values)


def _cut(job: Job, values: dict[str, Array], random: np.random.Generator) -> None:
    if job.cut:
        hit = random.random(len(next(iter(values.values())))) < job.cut
        for counter in values:
            if counter in ON_SM_CLOCK:
                values[counter] = values[counter] * np.where(hit, 0.04, 1.0)


def _stream(job: Job, random: np.random.Generator) -> tuple[NDArray[np.int64], ...]:
    means = np.exp(random.uniform(*np.log(job.mean_us), job.classes)) * 1000
    count = int(job.seconds * 1e9 * 1.3 / (means.mean() * (1 + job.gap_share))) + job.launches_a_step
    sequence = random.integers(0, job.classes, job.launches_a_step if job.steady else count)
    sequence[: job.classes] = np.arange(min(job.classes, len(sequence)))
    sequence = sequence[~np.isin(sequence, [second for _, second in job.together])]
    kernel_class = np.resize(sequence, count)
    duration = means[kernel_class] * np.exp(job.lengths * random.standard_normal(len(kernel_class)))
    is_long = np.isin(kernel_class, job.mixed) & (np.arange(count) % 3 == 0)
    duration = duration * np.where(is_long, 5.0, 1.0)
    gap = random.exponential(job.gap_share * means.mean(), len(kernel_class))
    end = np.cumsum(duration + gap)
    kept = end < job.seconds * 1e9
    start = (end - duration)[kept].astype(np.int64)
    is_long = is_long[kept]
    kernel_class, duration = kernel_class[kept].astype(np.int64), np.maximum(duration[kept].astype(np.int64), 1)
    for first, second in job.together:
        leads = kernel_class == first
        start, duration = np.concatenate([start, start[leads]]), np.concatenate([duration, duration[leads]])
        kernel_class = np.concatenate([kernel_class, np.full(leads.sum(), second)])
        is_long = np.concatenate([is_long, is_long[leads]])
    return kernel_class, start, duration, is_long


def _rates(job: Job, counter: str, kernel_class: NDArray[np.int64], start: Any, random: np.random.Generator) -> Array:
    if counter == "sm_cycles_elapsed":
        return np.full(len(kernel_class), PEAKS[counter])
    if counter in job.rates:
        share = np.asarray(job.rates[counter], dtype=np.float64)
    else:
        share = random.uniform(0.05, 0.95, job.classes) * (random.random(job.classes) > job.zero_share)
    rate = share[kernel_class] * PEAKS[counter]
    rate = rate * (1 + job.variation * random.standard_normal(len(rate))).clip(min=0)
    return np.asarray(rate * (1 + job.drift * start / (job.seconds * 1e9)), dtype=np.float64)


def _samples(job: Job, random: np.random.Generator) -> tuple[NDArray[np.int64], ...]:
    interval = job.interval_us * 1000
    edges = np.arange(0, job.seconds * 1e9, interval)
    edges = (edges + random.uniform(-0.5, 0.5, len(edges)) * job.jitter * interval).clip(min=0).astype(np.int64)
    group = (edges[:-1] // int(job.group_ms * 1e6)) % len(job.groups)
    kept = random.random(len(edges) - 1) >= job.lost
    return edges[:-1][kept], edges[1:][kept], group[kept]


def _gained(start: Any, duration: Any, rate: Array, first: Any, last: Any) -> Array:
    """What accumulates between `first` and `last`: each launch adds its rate while it runs."""
    at = np.concatenate([start, start + duration])
    change = np.concatenate([rate, -rate])
    order = np.argsort(at, kind="stable")
    at, level = at[order].astype(np.float64), np.cumsum(change[order])
    total = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(at))])
    return np.asarray(np.interp(last, at, total) - np.interp(first, at, total), dtype=np.float64)


def _busy(start: Any, end: Any) -> tuple[Array, Array]:
    """Instants, and the time until each in which anything ran."""
    at = np.concatenate([start, end])
    change = np.concatenate([np.ones(len(start)), -np.ones(len(end))])
    order = np.argsort(at, kind="stable")
    at, running = at[order].astype(np.float64), np.cumsum(change[order]) > 0
    return at, np.concatenate([[0.0], np.cumsum(running[:-1] * np.diff(at))])
