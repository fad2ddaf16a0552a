"""Writes synthetic torch.profiler (Kineto) traces of any size: for benchmarks and tests.

The mix follows a public training trace: of ten events about three are operators with their input
shapes, two are Python frames, one and a half runtime calls, two flow arrows and one a kernel.

    python benchmarks/make_kineto.py trace.json --events 1000000
"""

from __future__ import annotations

import argparse
import gzip
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

BASE_NS = 1_700_000_000_000_000_000
START_NS = 1_365_627_862_757_064  # after BASE_NS, as Kineto counts: since the machine started
STREAMS = (7, 7, 7, 20)
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"

HEADER = """{{
  "schemaVersion": 1,
  "deviceProperties": [
    {{
      "id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150754820096,
      "computeMajor": 9, "computeMinor": 0,
      "maxThreadsPerBlock": 1024, "maxThreadsPerMultiprocessor": 2048,
      "regsPerBlock": 65536, "warpSize": 32,
      "sharedMemPerBlock": 49152, "numSms": 132
    , "regsPerMultiprocessor": 65536, "sharedMemPerBlockOptin": 232448, "sharedMemPerMultiprocessor": 233472
    }}
  ],
  "cupti_version": 26,
  "cuda_runtime_version": 12080,
  "distributedInfo": {{"backend": "nccl", "rank": {rank}, "world_size": {world_size}}},
  "traceEvents": [
"""
FOOTER = """
  ],
  "traceName": "synthetic.json",
  "displayTimeUnit": "ms",
  "baseTimeNanoseconds": {base_ns}
}}
"""


@dataclass
class Written:
    """What a trace holds, to compare an import with."""

    events: int = 0
    kernels: int = 0
    kernel_ns: int = 0
    copies: int = 0
    ranges: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Mix:
    """What a trace is made of. `clock_ns` shifts this rank's clock against the other ranks'."""

    events: int = 1000
    rank: int = 0
    world_size: int = 1
    seed: int = 1
    kernel_names: int = 200
    clock_ns: int = 0
    base_ns: int = BASE_NS


def write_trace(path: Path, mix: Mix | None = None) -> Written:
    """Write a trace of at least `mix.events` events; gzipped when `path` ends in .gz."""
    mix = mix or Mix()
    written = Written()
    with _open(path) as file:
        _emit(file, HEADER.format(rank=mix.rank, world_size=mix.world_size), written)
        separator = ""
        for step in _steps(mix, written):
            written.events += len(step)
            _emit(file, separator + ",\n".join(step), written)
            separator = ",\n"
        _emit(file, FOOTER.format(base_ns=mix.base_ns), written)
    return written


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "wb", compresslevel=3) if path.suffix == ".gz" else open(path, "wb")  # type: ignore[return-value]


def _emit(file: IO[bytes], text: str, written: Written) -> None:
    data = text.encode()
    written.bytes += len(data)
    file.write(data)


def _steps(mix: Mix, written: Written) -> Iterator[list[str]]:
    """The events, one training step after the other."""
    # The same kernels in the same order on every rank: collectives then pair up.
    random_ = random.Random(mix.seed)
    kernels = [_kernel_name(random_, index) for index in range(mix.kernel_names)]
    now = START_NS + mix.clock_ns
    free = dict.fromkeys(STREAMS, 0)  # when each stream has done its work
    correlation = 1
    step = 0
    while written.events < mix.events:
        step += 1
        wanted = min(20_000, mix.events - written.events)
        events: list[str] = []
        start = now
        while len(events) < wanted:
            name, collective = (NCCL, True) if random_.random() < 0.01 else (random_.choice(kernels), False)
            now += random_.randrange(3_000, 30_000)
            correlation += 1
            events += _launch(random_, name, collective, now, correlation, written, free)
        events.append(_annotation(f"ProfilerStep#{step}", start, now - start))
        written.ranges += 1
        yield events


def _launch(
    random_: random.Random,
    name: str,
    collective: bool,
    now: int,
    correlation: int,
    written: Written,
    free: dict[int, int],
) -> list[str]:
    """One operator with its Python frames, its runtime call, its kernel or copy and the arrow between them."""
    duration = random_.randrange(1_000, 40_000)
    stream = random_.choice(STREAMS)
    gpu_start = free[stream] = max(now + random_.randrange(4_000, 90_000), free[stream] + 1_000)
    free[stream] += duration
    events = [_frame(random_, now - 900, 9_000), _frame(random_, now - 800, 8_000)]
    events += [_operator(random_, now - 700 + 10 * depth, 6_000 - 100 * depth) for depth in range(3)]
    if random_.random() < 0.06:
        copied = 1 << random_.randrange(4, 24)
        events.append(_runtime("cudaMemcpyAsync", now, correlation))
        events.append(_copy(gpu_start, duration, stream, correlation, copied))
        written.copies += 1
    else:
        events.append(_runtime("cudaLaunchKernel", now, correlation))
        events.append(_kernel(random_, name, collective, gpu_start, duration, stream, correlation))
        written.kernels += 1
        written.kernel_ns += duration
    events.append(_flow("s", correlation, 4242, 4242, now))
    events.append(_flow("f", correlation, 0, stream, gpu_start))
    if random_.random() < 0.5:
        events.append(_runtime("cudaEventRecord", now + 2_500, 1_000_000_000 + correlation))
    return events


def _us(ns: int) -> str:
    """Nanoseconds as the microseconds with three decimals that Kineto prints."""
    return f"{ns // 1000}.{ns % 1000:03d}"


def _event(category: str, name: str, pid: int, tid: int, start: int, duration: int, args: str) -> str:
    return (
        f'  {{\n    "ph": "X", "cat": "{category}", "name": "{name}", "pid": {pid}, "tid": {tid},\n'
        f'    "ts": {_us(start)}, "dur": {_us(duration)},\n    "args": {{\n      {args}\n    }}\n  }}'
    )


def _frame(random_: random.Random, start: int, duration: int) -> str:
    line = random_.randrange(10, 2000)
    return _event(
        "python_function",
        f"torch/nn/modules/module.py({line}): _call_impl",
        4242,
        4242,
        start,
        duration,
        f'"Python parent id": {line}, "Python id": {line + 1}, "Ev Idx": {line}',
    )


def _operator(random_: random.Random, start: int, duration: int) -> str:
    rows = 1 << random_.randrange(5, 13)
    return _event(
        "cpu_op",
        random_.choice(("aten::linear", "aten::addmm", "aten::layer_norm", "aten::gelu", "aten::_softmax")),
        4242,
        4242,
        start,
        duration,
        f'"External id": {rows},"Record function id": 0, "Concrete Inputs": ["", "", ""], "Input type": '
        f'["c10::BFloat16", "c10::BFloat16", "Scalar"], "Input Strides": [[{rows}, 1], [1, {rows}], []], '
        f'"Input Dims": [[{rows}, {rows}], [{rows}, {rows}], []], "Ev Idx": {rows}',
    )


def _runtime(name: str, start: int, correlation: int) -> str:
    args = f'"External id": {correlation}, "cbid": 211, "correlation": {correlation}'
    return _event("cuda_runtime", name, 4242, 4242, start, 2_200, args)


def _kernel(
    random_: random.Random, name: str, collective: bool, start: int, duration: int, stream: int, correlation: int
) -> str:
    metadata = (
        ', "Collective name": "allreduce", "In msg nelems": 1048576, "Out msg nelems": 1048576, "Group size": 2, '
        '"dtype": "BFloat16", "In split size": "[]", "Out split size": "[]", "Process Group Name": "0", '
        '"Process Group Description": "default_pg", "Process Group Ranks": "[0, 1]"'
    )
    grid = 1 << random_.randrange(0, 5)
    return _event(
        "kernel",
        name,
        0,
        stream,
        start,
        duration,
        f'"External id": {correlation}, "queued": 0, "device": 0, "context": 1, "stream": {stream}, '
        f'"correlation": {correlation}, "registers per thread": 32, "shared memory": 4096, "blocks per SM": 1.212121, '
        f'"warps per SM": 9.69697, "grid": [{grid * 132}, 1, 1], "block": [256, 1, 1], '
        f'"est. achieved occupancy %": 50{metadata if collective else ""}',
    )


def _copy(start: int, duration: int, stream: int, correlation: int, copied: int) -> str:
    return _event(
        "gpu_memcpy",
        "Memcpy HtoD (Pinned -> Device)",
        0,
        stream,
        start,
        duration,
        f'"External id": {correlation}, "device": 0, "context": 1, "stream": {stream}, "correlation": {correlation}, '
        f'"bytes": {copied}, "memory bandwidth (GB/s)": {copied / duration:.6f}',
    )


def _annotation(name: str, start: int, duration: int) -> str:
    return _event("user_annotation", name, 4242, 4242, start, duration, '"External id": 1, "Ev Idx": 0')


def _flow(phase: str, correlation: int, pid: int, tid: int, start: int) -> str:
    ending = ', "bp": "e"' if phase == "f" else ""
    return (
        f'  {{\n    "ph": "{phase}", "id": {correlation}, "pid": {pid}, "tid": {tid}, "ts": {_us(start)},\n'
        f'    "cat": "ac2g", "name": "ac2g"{ending}\n  }}'
    )


def _kernel_name(random_: random.Random, index: int) -> str:
    functor = random_.choice(("CUDAFunctor_add<c10::BFloat16>", "GeluCUDAKernelImpl", "direct_copy_kernel_cuda"))
    return (
        f"void at::native::vectorized_elementwise_kernel<{index}, at::native::{functor}, std::array<char*, 3ul> >"
        f"(int, at::native::{functor}, std::array<char*, 3ul>)"
    )


def main(write: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--rank", type=int, default=0)
    arguments = parser.parse_args()
    write(str(write_trace(arguments.path, Mix(events=arguments.events, rank=arguments.rank))))


if __name__ == "__main__":
    main()
