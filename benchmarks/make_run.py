"""Writes a synthetic run directory of any size, in bounded memory and the recorder's own layout.

    python benchmarks/make_run.py OUT --launches 1_000_000
    python benchmarks/make_run.py OUT --launches 100_000_000 --sample-us 1000
    python benchmarks/make_run.py OUT --launches 1_000_000_000 --sample-us 1000 --jobs 32

A training job: steps of some 2,000 launches in a fixed order over `--classes` kernel classes, spread over
`--streams` streams that wait for each other at the end of a step. Durations are log-normal around each class's
own mean, some 2 % of them take a tail; gaps and queue times have noise down to the nanosecond. With
`--sample-us` a sample's counters are the sum, over the kernels that ran in it, of time times the class's own
rate. The same arguments give the same files, whatever `--jobs`, which is how many processes write them. About two
million launches a second for each, and 250 MB of memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nanalyze.rundir import runfile, shards
from nanalyze.rundir.classes import KernelClass
from nanalyze.rundir.schema import FORMAT_NAME, RECORDED_VERSION, TABLES

T0 = 1_790_000_000_000_000_000
LEAST_A_STEP = 2_000  # launches
SECOND = 1_000_000_000
MILLISECOND = 1_000_000
BEFORE_FIRST_NS = 50 * MILLISECOND
GPU_CLOCK_HZ = 1_980_000_000
SM_COUNT = 132
STREAMS = (7, 13, 20, 21, 27, 28, 34, 35)
# Columns of `samples` and the spread of the classes' rates: a unit a nanosecond, least and most.
COUNTERS = {
    "dram_read_bytes": (50.0, 3_000.0),
    "dram_write_bytes": (20.0, 1_500.0),
    "inst": (10.0, 400.0),
    "sm_cycles_active": (100.0, 260.0),
}

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Columns = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """What to write: `launches` in all, spread evenly over `processes`; `sample_ns` 0 for no samples.

    `mean_us` is the median of the classes' mean durations.
    """

    launches: int
    classes: int = 800
    streams: int = 4
    processes: int = 1
    shard_rows: int = shards.ROW_GROUP_ROWS
    sample_ns: int = 0
    seed: int = 1
    mean_us: float = 9.0

    @property
    def grid_ns(self) -> int:
        """What the lengths of pieces are multiples of, so that no sample reaches from one into the next."""
        return self.sample_ns or MILLISECOND


@dataclass(frozen=True)
class Job:
    """What all processes and steps have in common: classes, and the launches of a step by position."""

    ids: Integers
    names: Sequence[str]
    grids: Integers
    means_ns: Floats
    rates: dict[str, Floats]
    order: Integers
    stream: Integers

    @property
    def launches_a_step(self) -> int:
        return len(self.order)


@dataclass(frozen=True)
class Piece:
    """Whole steps of one process, about `shard_rows` launches, written to shards of their own.

    `launches` of them are kept. start_ns is known when the lengths of all pieces before are; device_state is the
    number of its shard of that table, 0 where no second begins in it.
    """

    process: int
    number: int
    steps: int
    first_launch: int
    launches: int
    start_ns: int = 0
    device_state: int = 0


def samples(made: Job, width: int, classes: Integers, kernels: Columns, start_ns: int, end_ns: int) -> Columns:
    """The samples of [start_ns, end_ns), of which `width` is a divisor and in which the kernels given ran."""
    edges = np.arange(start_ns, end_ns + 1, width)
    start = kernels["start_ns"]
    end = start + kernels["duration_ns"]
    by_end = np.argsort(end, kind="stable")
    started, ended = np.searchsorted(start, edges), np.searchsorted(end[by_end], edges)
    columns: Columns = {
        "device_id": np.zeros(len(edges) - 1, np.int32),
        "start_ns": edges[:-1],
        "end_ns": edges[1:],
        "counter_group": np.zeros(len(edges) - 1, np.int32),
    }
    for counter, rates in made.rates.items():
        rate = rates[classes]
        total = _risen(rate, start, started, edges) - _risen(rate[by_end], end[by_end], ended, edges)
        columns[counter] = np.maximum(np.diff(total), 0.0).round()
    return columns


def _risen(rate: Floats, at: Integers, before: Integers, edges: Integers) -> Floats:
    """At each edge, the sum over the instants before it of rate x (edge - instant)."""
    base = edges[0]
    rates = np.concatenate(([0.0], np.cumsum(rate)))
    moments = np.concatenate(([0.0], np.cumsum(rate * (at - base))))
    risen: Floats = rates[before] * (edges - base) - moments[before]
    return risen


@cache
def job(options: Options) -> Job:
    """Classes by falling weight: a few make most launches, and each is launched in every step."""
    random = np.random.default_rng(options.seed)
    count = options.classes
    names = [f"kernel_{number:04d}" for number in range(count)]
    grids = random.integers(1, 4096, count)
    ids = [KernelClass(n.encode(), (int(g), 1, 1), (256, 1, 1)).id for n, g in zip(names, grids, strict=True)]
    length = max(LEAST_A_STEP, 2 * count)
    weights = 1.0 / np.arange(1, count + 1)
    order = np.concatenate((np.arange(count), random.choice(count, length - count, p=weights / weights.sum())))
    main = random.random(length) < 0.7
    other = random.integers(0, options.streams, length)
    return Job(
        ids=np.array(ids, np.int64),
        names=names,
        grids=grids,
        means_ns=np.exp(random.normal(np.log(1_000 * options.mean_us), 0.9, count)).clip(1_000, 500_000),
        rates={name: random.uniform(low, high, count) for name, (low, high) in COUNTERS.items()},
        order=random.permutation(order),
        stream=np.where(main, 0, other),
    )


# --- launches --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    """Whole steps: launches in order of start, and when each step began and ended on the GPU."""

    classes: Integers
    kernels: Columns
    step_start: Integers
    step_end: Integers


def pieces(options: Options) -> Iterator[Piece]:
    """All pieces of all processes, in order, without their times."""
    a_step = job(options).launches_a_step
    steps = max(1, options.shard_rows // a_step)
    for process in range(options.processes):
        left = options.launches // options.processes + (process < options.launches % options.processes)
        for number, first in enumerate(range(0, left, steps * a_step)):
            kept = min(steps * a_step, left - first)
            yield Piece(process, number, -(-kept // a_step), first, kept)


def chunk(options: Options, piece: Piece) -> Chunk:
    """The launches of a piece, those included that are not kept."""
    random = np.random.default_rng((options.seed, piece.process, piece.number))
    return _chunk(options, random, piece.steps, piece.start_ns, 1_000 + 3 * piece.first_launch)


def _chunk(options: Options, random: np.random.Generator, steps: int, now: int, correlation: int) -> Chunk:
    made = job(options)
    shape = (steps, made.launches_a_step)
    jitter = random.standard_normal(shape, np.float32) * 0.04
    tail = random.random(shape, np.float32)
    jitter += np.where(tail < 0.02, tail * 15, 0).astype(np.float32)
    duration = np.maximum(made.means_ns[made.order] * np.exp(jitter), 800).astype(np.int64)
    gap = (400 + 900 * random.standard_exponential(shape, np.float32)).astype(np.int64)
    offset = np.empty(shape, np.int64)
    for stream in range(options.streams):
        at = np.flatnonzero(made.stream == stream)
        offset[:, at] = np.cumsum(duration[:, at] + gap[:, at], axis=1) - duration[:, at]
    length = (offset + duration).max(axis=1) + random.integers(20_000, 200_000, steps)
    length[-1] += -int(length.sum()) % options.grid_ns
    step_end = now + np.cumsum(length)
    step_start = step_end - length
    sequence = np.argsort(offset, axis=1, kind="stable")
    offset, duration = np.take_along_axis(offset, sequence, 1), np.take_along_axis(duration, sequence, 1)
    start = (step_start[:, None] + offset).ravel()
    classes = made.order[sequence].ravel()
    rows = len(start)
    kernels: Columns = {
        "start_ns": start,
        "duration_ns": duration.ravel(),
        "kernel_class_id": made.ids[classes],
        "device_id": np.zeros(rows, np.int32),
        "context_id": np.ones(rows, np.int64),
        "stream_id": np.array(STREAMS)[made.stream[sequence]].ravel(),
        "graph_id": pa.nulls(rows, pa.int64()),
        "graph_node_id": pa.nulls(rows, pa.int64()),
        "correlation_id": correlation + 3 * np.arange(rows) + random.integers(0, 3, rows),
        # Never before the step's range was opened, which is 400 us ahead of its first launch.
        "queued_ns": np.maximum(
            start - 300_000 - random.integers(0, 90_000, rows), np.repeat(step_start, shape[1]) - 390_000
        ),
    }
    return Chunk(classes, kernels, step_start, step_end)


# --- writing ---------------------------------------------------------------------------------------


class Partition:
    """The shards of one process."""

    def __init__(self, run_dir: Path, process: str) -> None:
        self.run_dir = run_dir
        self.process = process
        self.shards: dict[str, int] = {}
        self.rows: dict[str, int] = {}

    def write(self, table: str, columns: Columns) -> None:
        extra = tuple(name for name in columns if name not in TABLES[table].column_names)
        rows = pa.table(columns, schema=TABLES[table].arrow_schema(extra))
        if rows.num_rows:
            self.shards[table] = self.shards.get(table, 0) + 1
            self.rows[table] = self.rows.get(table, 0) + rows.num_rows
            shards.write_shard(self.run_dir, table, self.process, self.shards[table], rows)

    def write_rows(self, table: str, rows: Sequence[Columns]) -> None:
        names = TABLES[table].column_names
        self.write(table, {name: [row.get(name) for row in rows] for name in names})


def make(run_dir: Path, options: Options, jobs: int = 1) -> None:
    """Write the run, with so many processes; more than one only where this is the main script.

    Raises RunError for a directory that cannot be made, FileExistsError for one that holds a run.
    """
    if (run_dir / runfile.RUN_FILE).exists():
        raise FileExistsError(f"{run_dir}: holds a run already. Choose another directory, or remove it.")
    run_dir.mkdir(parents=True, exist_ok=True)
    content = {
        "format": FORMAT_NAME, "format_version": RECORDED_VERSION, "run_id": f"{options.seed:032x}",
        "created_ns": T0, "source": "recorder", "settings": {},
    }  # fmt: skip
    (run_dir / runfile.RUN_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    unplaced = list(pieces(options))
    with _workers(jobs) as each:
        # Pieces are made twice: where one begins is known when all before it have been. It is a sixth of the work.
        lengths = list(each(partial(_length_ns, options), unplaced))
        placed = list(_placed(options, unplaced, lengths))
        shards_written = list(each(partial(_write_piece, run_dir, options), zip(placed, lengths, strict=True)))
    last = {piece.process: number for number, piece in enumerate(placed)}
    for process, number in last.items():
        counts = dict.fromkeys(shards_written[number], placed[number].number + 1)
        counts["device_state"] = max(piece.device_state for piece in placed if piece.process == process)
        launches = placed[number].first_launch + placed[number].launches
        _write_process(run_dir, options, process, launches, placed[number].start_ns + lengths[number], counts)


@contextmanager
def _workers(jobs: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """A `map` that spreads its work over so many processes."""
    if jobs == 1:
        yield map
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield pool.map


def _length_ns(options: Options, piece: Piece) -> int:
    return int(chunk(options, piece).step_end[-1])


def _placed(options: Options, unplaced: Iterable[Piece], lengths: Iterable[int]) -> Iterator[Piece]:
    """The pieces with their times, which follow each other in each process, and their shards of device_state."""
    now = states = 0
    for piece, length in zip(unplaced, lengths, strict=True):
        if piece.number == 0:
            now, states = T0 - (-BEFORE_FIRST_NS // options.grid_ns) * options.grid_ns, 0
        placed = replace(piece, start_ns=now)
        has_state = bool(len(_seconds(placed, length)))
        states += has_state
        yield replace(placed, device_state=states if has_state else 0)
        now += length


def _began_ns(piece: Piece) -> int:
    """When the piece begins: the first one with the process, before its first launch."""
    return piece.start_ns if piece.number else T0


def _seconds(piece: Piece, length: int) -> Integers:
    """The whole seconds since the process began that lie in the piece."""
    first = T0 - (T0 - _began_ns(piece)) // SECOND * SECOND
    return np.arange(first, piece.start_ns + length, SECOND)


def _write_piece(run_dir: Path, options: Options, placed: tuple[Piece, int]) -> list[str]:
    """Write the shards of a piece of so many ns; the tables of which every piece has one."""
    piece, length = placed
    made, end_ns = chunk(options, piece), piece.start_ns + length
    kept = slice(0, piece.launches)
    kernels = {name: values[kept] for name, values in made.kernels.items()}
    tables = {"kernels": kernels, "ranges": _ranges(made, piece.first_launch // job(options).launches_a_step)}
    if options.sample_ns:
        tables["samples"] = samples(
            job(options), options.sample_ns, made.classes[kept], kernels, _began_ns(piece), end_ns
        )
    for table, columns in tables.items():
        _write(run_dir, table, piece.process, piece.number + 1, columns)
    if piece.device_state:
        state = _device_state(options, piece.process, _seconds(piece, length))
        _write(run_dir, "device_state", piece.process, piece.device_state, state)
    return list(tables)


def _write(run_dir: Path, table: str, process: int, number: int, columns: Columns) -> None:
    extra = tuple(name for name in columns if name not in TABLES[table].column_names)
    rows = pa.table(columns, schema=TABLES[table].arrow_schema(extra))
    shards.write_shard(run_dir, table, f"node0-{process}-{4000 + process}", number, rows)


def _write_rows(run_dir: Path, table: str, process: int, number: int, rows: Sequence[Columns]) -> None:
    names = TABLES[table].column_names
    _write(run_dir, table, process, number, {name: [row.get(name) for row in rows] for name in names})


def _write_process(
    run_dir: Path, options: Options, number: int, launches: int, last_ns: int, counts: dict[str, int]
) -> None:
    """Write what a process has once; `counts` are its shards by table."""
    began = _process_row(options, number, T0)
    counts = {name: count for name, count in counts.items() if count} | {"devices": 1, "kernel_classes": 1}
    ended = {
        **began, "recorded_ns": last_ns + SECOND, "ended_ns": last_ns + SECOND, "ending": "stop",
        "kernels_written": launches, "records_lost": 0, "recorder_cpu_ns": (last_ns - T0) // 100,
        "shards": json.dumps({**counts, "processes": 2}),
    }  # fmt: skip
    _write_rows(run_dir, "processes", number, 1, [began])
    _write_rows(run_dir, "processes", number, 2, [ended])
    _write_rows(run_dir, "devices", number, 1, [_device_row(number)])
    _write_rows(run_dir, "kernel_classes", number, 1, _class_rows(job(options)))


def _ranges(chunk: Chunk, first_id: int) -> Columns:
    steps = len(chunk.step_start)
    return {
        "range_id": first_id + 1 + np.arange(steps),
        "parent_id": pa.nulls(steps, pa.int64()),
        "depth": np.zeros(steps, np.int32),
        "name": ["step"] * steps,
        "source": ["annotate"] * steps,
        "thread_id": np.full(steps, 4000),
        "start_ns": chunk.step_start - 400_000,
        "end_ns": chunk.step_end - 400_001,
        "flops": pa.nulls(steps, pa.float64()),
        "bytes": pa.nulls(steps, pa.float64()),
        "attributes": pa.nulls(steps, pa.string()),
    }


def _device_state(options: Options, process: int, at: Integers) -> Columns:
    random = np.random.default_rng((options.seed, process, int(at[0]) - T0))
    count = len(at)
    return {
        "time_ns": at,
        "device_id": np.zeros(count, np.int32),
        "sm_clock_hz": GPU_CLOCK_HZ - 15_000_000 * random.integers(0, 3, count),
        "memory_clock_hz": np.full(count, 3_201_000_000),
        "power_mw": random.integers(520_000, 690_000, count),
        "temperature_c": random.integers(48, 62, count).astype(np.int32),
        "throttle_reasons": np.zeros(count, np.int64),
    }


def _process_row(options: Options, number: int, at_ns: int) -> Columns:
    return {
        "recorded_ns": at_ns, "host": "node0", "pid": 4000 + number, "rank": number, "local_rank": number,
        "world_size": options.processes, "started_ns": at_ns, "command": '["train.py"]', "settings": "{}",
        "nanalyze_version": "0.1.0", "python_version": "3.12.3", "cuda_driver_version": 13000,
        "gpu_driver_version": "580.159.04", "cupti_version": 130001, "layers": "timeline,ranges,device_state",
        "kernels_written": 0,
    }  # fmt: skip


def _device_row(number: int) -> Columns:
    return {
        "device_id": 0, "uuid": f"GPU-00000000-0000-0000-0000-{number:012d}", "name": "NVIDIA H200", "chip": "GH100",
        "cc_major": 9, "cc_minor": 0, "sm_count": SM_COUNT, "warp_size": 32, "threads_per_sm_max": 2048,
        "blocks_per_sm_max": 32, "registers_per_sm": 65536, "shared_bytes_per_sm": 233472,
        "shared_reserved_bytes_per_block": 1024, "l2_bytes": 60 * 2**20, "memory_bytes": 141 * 10**9,
        "memory_bus_bits": 6144, "sm_clock_max_hz": GPU_CLOCK_HZ, "memory_clock_max_hz": 3_201_000_000,
        "dram_peak_bytes_per_s": 4.9e12, "fp64_flops_per_sm_cycle": 128.0, "fp32_flops_per_sm_cycle": 256.0,
        "fp16_flops_per_sm_cycle": 512.0, "tensor_fp64_flops_per_sm_cycle": 256.0,
        "tensor_tf32_flops_per_sm_cycle": 2048.0, "tensor_fp16_flops_per_sm_cycle": 4096.0,
        "tensor_fp8_flops_per_sm_cycle": 8192.0, "tensor_int8_ops_per_sm_cycle": 8192.0,
        "peaks_source": "synthetic", "is_mig": False,
    }  # fmt: skip


def _class_rows(made: Job) -> list[Columns]:
    shape = {"grid_y": 1, "grid_z": 1, "block_x": 256, "block_y": 1, "block_z": 1}
    cluster = {"cluster_x": 0, "cluster_y": 0, "cluster_z": 0}
    return [
        {"kernel_class_id": int(made.ids[at]), "name_mangled": name, "name": name, "grid_x": int(made.grids[at]),
         **shape, **cluster}
        for at, name in enumerate(made.names)
    ]  # fmt: skip


def options_of(arguments: argparse.Namespace) -> Options:
    """Raises ValueError, with the option's name, for a value that makes no run."""
    if arguments.launches < 1 or arguments.classes < 1 or arguments.processes < 1 or arguments.shard_rows < 1:
        raise ValueError("--launches, --classes, --processes and --shard-rows must be 1 or more")
    if not 1 <= arguments.mean_us <= 500:
        raise ValueError("--mean-us must be 1 to 500")
    if not 1 <= arguments.streams <= len(STREAMS):
        raise ValueError(f"--streams must be 1 to {len(STREAMS)}")
    return Options(
        launches=arguments.launches, classes=arguments.classes, streams=arguments.streams,
        processes=arguments.processes, shard_rows=arguments.shard_rows, sample_ns=arguments.sample_us * 1000,
        seed=arguments.seed, mean_us=arguments.mean_us,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--launches", type=int, default=1_000_000, help="kernel launches in all, 1 to a billion")
    parser.add_argument("--classes", type=int, default=800, help="kernel classes")
    parser.add_argument("--streams", type=int, default=4, help=f"streams a process, up to {len(STREAMS)}")
    parser.add_argument("--processes", type=int, default=1, help="ranks, each with a device of its own")
    parser.add_argument("--shard-rows", type=int, default=shards.ROW_GROUP_ROWS, help="launches a shard, about")
    parser.add_argument("--sample-us", type=int, default=0, help="length of a sample; 0 for none")
    parser.add_argument("--mean-us", type=float, default=9.0, help="median of the classes' mean durations")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes that write it")
    try:
        arguments = parser.parse_args()
        if arguments.jobs < 1:
            raise ValueError("--jobs must be 1 or more")
        make(arguments.run_dir, options_of(arguments), arguments.jobs)
    except (ValueError, FileExistsError) as error:
        sys.exit(f"make_run: {error}")


if __name__ == "__main__":
    main()
