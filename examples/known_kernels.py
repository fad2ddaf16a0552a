"""Kernels whose nature is known, to try a recorder and a classifier on.

`KNOWN` lists them: each has a name, the bound it should be given, and a sentence that says why.
Sizes are chosen so that most take between 50 us and 5 ms on an H200. Some kernels are PyTorch's,
some are written here in CUDA C++ and compiled by NVRTC (cuda-python), one is Triton's.

    python examples/known_kernels.py --list
    python examples/known_kernels.py --only stream_copy,gemm_bf16 --reps 3
    python examples/known_kernels.py --device cpu --dry-run      # tiny sizes, CUDA C++ only compiled
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # the Triton kernel is then left out, with a message
    triton = None

FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16
GIB = 1 << 30
MARKER = "nanalyze_marker"  # an empty kernel whose grid width says which entry of KNOWN follows

CUDA_SOURCE = r"""
extern "C" {

__global__ void nanalyze_marker() {}

// One block moves 4 * blockDim.x elements of 16 bytes; n is a multiple of that.
__global__ void stream_copy(const float4* __restrict__ src, float4* __restrict__ dst) {
    long long base = (long long)blockIdx.x * blockDim.x * 4 + threadIdx.x;
    float4 v[4];
#pragma unroll
    for (int k = 0; k < 4; k++) v[k] = src[base + k * blockDim.x];
#pragma unroll
    for (int k = 0; k < 4; k++) dst[base + k * blockDim.x] = v[k];
}

// Copies a buffer of mask + 1 elements over and over; .cg keeps it out of L1.
__global__ void l2_copy(const float4* __restrict__ src, float4* __restrict__ dst, unsigned mask, int passes) {
    unsigned thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
    for (int pass = 0; pass < passes; pass += 4) {
        float4 v[4];
#pragma unroll
        for (int k = 0; k < 4; k++) v[k] = __ldcg(src + ((thread + (pass + k) * threads) & mask));
#pragma unroll
        for (int k = 0; k < 4; k++) __stcg(dst + ((thread + (pass + k) * threads) & mask), v[k]);
    }
}

// Each multiply-add waits for the one before.
__global__ void one_block(float* data, int steps) {
    float x = data[threadIdx.x];
    for (int i = 0; i < steps; i++) x = fmaf(x, 0.999f, 0.001f);
    data[threadIdx.x] = x;
}

__global__ void __launch_bounds__(256, 8) fma_loop(float* data, float a, float b, int steps) {
    long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    float x[8];
#pragma unroll
    for (int k = 0; k < 8; k++) x[k] = data[thread] + k;
#pragma unroll 4
    for (int i = 0; i < steps; i++) {
#pragma unroll
        for (int k = 0; k < 8; k++) x[k] = fmaf(x[k], a, b);
    }
    float sum = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) sum += x[k];
    data[thread] = sum;
}

// Rotations and exclusive-ors: both run on the ALU pipe and do not merge into one instruction.
__global__ void __launch_bounds__(256, 8) alu_loop(unsigned* data, unsigned key, int steps) {
    long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned x[8];
#pragma unroll
    for (int k = 0; k < 8; k++) x[k] = data[thread] + k;
#pragma unroll 4
    for (int i = 0; i < steps; i++) {
#pragma unroll
        for (int k = 0; k < 8; k++) x[k] = __funnelshift_l(x[k], x[k], 5) ^ key;
    }
    unsigned sum = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) sum ^= x[k];
    data[thread] = sum;
}

__global__ void __launch_bounds__(256, 8) xu_loop(float* data, int steps) {
    long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    float x[4];
#pragma unroll
    for (int k = 0; k < 4; k++) x[k] = data[thread] + k;
#pragma unroll 4
    for (int i = 0; i < steps; i++) {
#pragma unroll
        for (int k = 0; k < 4; k++) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[k]));
    }
    data[thread] = x[0] + x[1] + x[2] + x[3];
}

// 16-byte loads from shared memory without bank conflicts: four cycles of its pipe each.
__global__ void __launch_bounds__(256, 8) shared_loop(float* data, int steps) {
    __shared__ float4 tile[1024];
    long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (int k = threadIdx.x; k < 1024; k += 256) tile[k] = make_float4(data[thread], k, k + 1, k + 2);
    __syncthreads();
    float4 sum = make_float4(0, 0, 0, 0);
    unsigned at = threadIdx.x;
    for (int i = 0; i < steps; i++) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float4 v = tile[at + k * 256];
            sum.x += v.x; sum.y += v.y; sum.z += v.z; sum.w += v.w;
        }
        at = (at + 32) & 255;
    }
    data[thread] = sum.x + sum.y + sum.z + sum.w;
}

// One warp a multiprocessor, each thread following its own chain of dependent loads.
__global__ void pointer_chase(const int* __restrict__ next, int* out, int hops) {
    int thread = blockIdx.x * blockDim.x + threadIdx.x, at = out[thread];
    for (int i = 0; i < hops; i++) at = __ldcg(next + at);
    out[thread] = at;
}

}
"""

if triton is not None:

    @triton.jit
    def triton_softmax_kernel(source, target, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, BLOCK)
        inside = at < columns
        values = tl.load(source + row * columns + at, mask=inside, other=-float("inf"))
        powers = tl.exp(values - tl.max(values, axis=0))
        tl.store(target + row * columns + at, powers / tl.sum(powers, axis=0), mask=inside)


class CudaKernels:
    """The kernels of CUDA_SOURCE, compiled for the current device at their first use.

    `compile_only` is for machines without a GPU: launches are then left out.
    """

    def __init__(self, compile_only: bool = False) -> None:
        self.compile_only = compile_only
        self._module: Any = None
        self._functions: dict[str, Any] = {}

    def launch(self, name: str, grid: int, block: int, *arguments: Any) -> None:
        """Launch kernel `name` on PyTorch's current stream with tensors and ctypes values as arguments."""
        if self._module is None:
            self._module = self._load()
        if self.compile_only:
            return
        from cuda.bindings import driver

        values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
        pointers = (ctypes.c_void_p * max(len(values), 1))(*[ctypes.addressof(value) for value in values])
        stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        function = self._function(name)
        _checked(
            driver.cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, stream, ctypes.addressof(pointers), 0),
            f"launching {name}",
        )

    def _function(self, name: str) -> Any:
        from cuda.bindings import driver

        if name not in self._functions:
            self._functions[name] = _checked(driver.cuModuleGetFunction(self._module, name.encode()), f"finding {name}")
        return self._functions[name]

    def _load(self) -> Any:
        if self.compile_only:
            return compile_cubin("sm_90")
        from cuda.bindings import driver

        torch.cuda.synchronize()  # makes PyTorch's context the current one
        major, minor = torch.cuda.get_device_capability()
        image = ctypes.create_string_buffer(compile_cubin(f"sm_{major}{minor}"))
        return _checked(driver.cuModuleLoadData(ctypes.addressof(image)), "loading the compiled kernels")


def compile_cubin(architecture: str) -> bytes:
    """CUDA_SOURCE as machine code for `architecture`, such as sm_90. Raises RuntimeError with the compiler's log."""
    from cuda.bindings import nvrtc

    program = _checked(nvrtc.nvrtcCreateProgram(CUDA_SOURCE.encode(), b"known_kernels.cu", 0, [], []), "NVRTC")
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(result) != 0:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program), "NVRTC")
        _checked(nvrtc.nvrtcGetProgramLog(program, log), "NVRTC")
        raise RuntimeError(f"NVRTC: {log.decode(errors='replace')}")
    cubin = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program), "NVRTC")
    _checked(nvrtc.nvrtcGetCUBIN(program, cubin), "NVRTC")
    return cubin


def _checked(result: tuple[Any, ...], doing: str) -> Any:
    if int(result[0]) != 0:
        raise RuntimeError(f"{doing}: {result[0]}")
    return result[1] if len(result) > 1 else None


@dataclass(frozen=True)
class Target:
    """Where the kernels run, and how much smaller than full size."""

    device: str = "cuda"
    shrink: int = 1
    kernels: CudaKernels = field(default_factory=CudaKernels)

    def count(self, full: int) -> int:
        """`full` elements, made smaller; a power of two stays one."""
        return max(full // self.shrink, 4096)

    def side(self, full: int) -> int:
        """A matrix side."""
        return max(full // self.shrink, 64)

    def steps(self, full: int) -> int:
        return max(full // self.shrink, 4)

    def uniform(self, *shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
        return torch.rand(shape, device=self.device, dtype=FP32).to(dtype)

    def processors(self) -> int:
        if self.device == "cpu":
            return 2
        return int(torch.cuda.get_device_properties(0).multi_processor_count)


@dataclass(frozen=True)
class Work:
    """A call ready to run: `flops` and `bytes` are what one call must do, None where neither says anything."""

    call: Callable[[], object]
    flops: float | None = None
    bytes: float | None = None
    calls: int = 1  # how often one range of a recording calls it
    exact_calls: int = 1  # calls that one exact measurement takes: each launch of a graph gives one pass


@dataclass(frozen=True)
class Known:
    """A kernel and the verdicts that are right for it, best first; `where` is the level or pipe."""

    name: str
    bounds: tuple[str, ...]
    where: str | None
    reason: str
    build: Callable[[Target], Work]


def _stream_copy(target: Target) -> Work:
    source = target.uniform(target.count(GIB // 4))
    copy = torch.empty_like(source)
    blocks = source.numel() // 4 // 1024
    return Work(lambda: target.kernels.launch("stream_copy", blocks, 256, source, copy), 0.0, 8.0 * source.numel())


def _triad(target: Target) -> Work:
    n = target.count(GIB // 4)
    a, b, c = torch.empty(n, device=target.device), target.uniform(n), target.uniform(n)
    return Work(lambda: torch.add(b, c, alpha=3.0, out=a), 2.0 * n, 12.0 * n)


def _sum(target: Target) -> Work:
    n = target.count(GIB // 4)
    a = target.uniform(n)
    return Work(lambda: torch.sum(a), float(n), 4.0 * n)


def _gemm(target: Target, full: int, dtype: torch.dtype) -> Work:
    n = target.side(full)
    a, b = (target.uniform(n, n, dtype=dtype) - 0.5 for _ in range(2))
    c = torch.empty_like(a)
    return Work(lambda: torch.mm(a, b, out=c), 2.0 * n**3, 3.0 * n * n * a.element_size())


def _softmax(target: Target) -> Work:
    x = target.uniform(target.side(16384), target.side(4096))
    return Work(lambda: F.softmax(x, dim=1), 5.0 * x.numel(), 8.0 * x.numel())


def _layer_norm(target: Target) -> Work:
    x = target.uniform(target.side(16384), target.side(4096))
    weight, bias = target.uniform(x.shape[1]), target.uniform(x.shape[1])
    return Work(lambda: F.layer_norm(x, x.shape[1:], weight, bias), 8.0 * x.numel(), 8.0 * x.numel())


def _gather(target: Target) -> Work:
    table = target.uniform(target.count(GIB // 2))
    index = torch.randint(table.numel(), (target.count(1 << 25),), device=target.device)
    out = torch.empty(index.shape, device=target.device)
    return Work(lambda: torch.take(table, index, out=out), 0.0, 16.0 * index.numel())


def _l2_copy(target: Target) -> Work:
    elements, passes = 1 << 18, target.steps(64)  # of 16 bytes: two buffers of 4 MiB
    source = target.uniform(elements * 4)
    copy = torch.empty_like(source)
    blocks = target.processors() * 8
    mask, count = ctypes.c_uint(elements - 1), ctypes.c_int(passes)
    moved = 32.0 * passes * blocks * 256
    return Work(lambda: target.kernels.launch("l2_copy", blocks, 256, source, copy, mask, count), 0.0, moved)


def _one_block(target: Target) -> Work:
    data, steps = target.uniform(128), target.steps(100_000)
    return Work(
        lambda: target.kernels.launch("one_block", 1, 128, data, ctypes.c_int(steps)), 2.0 * 128 * steps, 8.0 * 128
    )


def _full_device_loop(target: Target, name: str, steps: int, flops: float, *constants: Any) -> Work:
    blocks = target.processors() * 8  # 2048 threads a multiprocessor: all it can hold
    data = target.uniform(blocks * 256)
    count = ctypes.c_int(target.steps(steps))
    return Work(
        lambda: target.kernels.launch(name, blocks, 256, data, *constants, count),
        flops * count.value * data.numel(),
        8.0 * data.numel(),
    )


def _pointer_chase(target: Target) -> Work:
    n = target.count(GIB // 4)
    table = torch.randint(n, (n,), device=target.device, dtype=torch.int32)
    threads = target.processors() * 32
    at = torch.randint(n, (threads,), device=target.device, dtype=torch.int32)
    hops = ctypes.c_int(target.steps(300))
    return Work(
        lambda: target.kernels.launch("pointer_chase", threads // 32, 32, table, at, hops),
        0.0,
        4.0 * threads * hops.value,
    )


def _triton_softmax(target: Target) -> Work:
    if triton is None:
        raise RuntimeError("Triton is not installed")
    x = target.uniform(target.side(16384), target.side(4096))
    y = torch.empty_like(x)
    rows, columns = x.shape
    block = triton.next_power_of_2(columns)
    return Work(
        lambda: triton_softmax_kernel[(rows,)](x, y, columns, BLOCK=block, num_warps=8),
        5.0 * x.numel(),
        8.0 * x.numel(),
    )


def _tiny(target: Target) -> Work:
    x = target.uniform(1)
    return Work(lambda: x.add_(1), 1.0, 8.0, calls=target.steps(2000))


def _graph(target: Target) -> Work:
    n = target.side(4096)
    x, w = (target.uniform(n, n, dtype=BF16) - 0.5 for _ in range(2))

    def body() -> torch.Tensor:
        return torch.tanh(torch.mm(torch.relu(x + 1), w))

    flops, moved = 2.0 * n**3 + 3.0 * n * n, 2.0 * n * n * (2 + 2 + 3 + 2)
    if target.device == "cpu":
        return Work(body, flops, moved)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = body()

    def replay() -> torch.Tensor:
        graph.replay()
        return result  # holds the graph's output alive

    return Work(replay, flops, moved, exact_calls=64)


# The graph comes last: should a tool fail on it, everything else has been measured.
KNOWN: tuple[Known, ...] = (
    Known(
        "stream_copy",
        ("memory",),
        "DRAM",
        "Reads 1 GiB and writes 1 GiB once, far more than L2 holds, with no arithmetic.",
        _stream_copy,
    ),
    Known("triad", ("memory",), "DRAM", "a = b + 3c over 1 GiB each: one multiply-add for 12 bytes.", _triad),
    Known("sum", ("memory",), "DRAM", "Adds up 1 GiB: one addition for 4 bytes.", _sum),
    Known(
        "gemm_bf16",
        ("compute",),
        "tensor",
        "8192^3 in bf16 on the tensor cores: 2700 FLOP a byte.",
        lambda target: _gemm(target, 8192, BF16),
    ),
    Known(
        "gemm_fp32",
        ("compute",),
        "FMA",
        "4096^3 in FP32 with TF32 off: 680 FLOP a byte on the FMA pipe.",
        lambda target: _gemm(target, 4096, FP32),
    ),
    Known(
        "gemm_fp64",
        ("compute",),
        "tensor",
        "4096^3 in FP64, which this generation runs on the tensor cores.",
        lambda target: _gemm(target, 4096, FP64),
    ),
    Known(
        "gemm_bf16_small",
        ("latency", "launch"),
        None,
        "512^3 gives fewer blocks than the device has multiprocessors, each with little to do.",
        lambda target: _gemm(target, 512, BF16),
    ),
    Known("softmax", ("memory",), "DRAM", "Each row of 16 KiB is read once and written once.", _softmax),
    Known("layer_norm", ("memory",), "DRAM", "Each row of 16 KiB is read once and written once.", _layer_norm),
    Known(
        "gather",
        ("memory", "latency"),
        "DRAM",
        "Random 4-byte reads of a 2 GiB table: each drags in a 32-byte sector and waits for DRAM.",
        _gather,
    ),
    Known("l2_copy", ("memory",), "L2", "Copies 4 MiB again and again past L1: L2 serves it all.", _l2_copy),
    Known(
        "one_block", ("latency",), None, "One block of a dependent chain; the other multiprocessors idle.", _one_block
    ),
    Known(
        "fma_loop",
        ("compute",),
        "FMA",
        "Eight independent FMA chains a thread at full occupancy, all in registers.",
        lambda target: _full_device_loop(target, "fma_loop", 12_000, 16.0, ctypes.c_float(0.999), ctypes.c_float(1e-3)),
    ),
    Known(
        "alu_loop",
        ("compute",),
        "ALU",
        "Rotations and exclusive-ors in registers at full occupancy.",
        lambda target: _full_device_loop(target, "alu_loop", 3_000, 0.0, ctypes.c_uint(0x9E3779B9)),
    ),
    Known(
        "xu_loop",
        ("compute",),
        "XU",
        "ex2 in registers at full occupancy: the transcendental pipe does 16 a cycle.",
        lambda target: _full_device_loop(target, "xu_loop", 3_000, 0.0),
    ),
    Known(
        "shared_loop",
        ("memory",),
        "L1",
        "Conflict-free 16-byte loads from shared memory, which is L1's data array.",
        lambda target: _full_device_loop(target, "shared_loop", 1_500, 16.0),
    ),
    Known(
        "pointer_chase",
        ("latency",),
        None,
        "One warp a multiprocessor, each load's address is the value of the load before.",
        _pointer_chase,
    ),
    Known("triton_softmax", ("memory",), "DRAM", "Fused softmax: one read and one write of 256 MiB.", _triton_softmax),
    Known("tiny", ("launch", "latency"), None, "Adds 1 to one number: shorter than its own launch.", _tiny),
    Known(
        "graph",
        ("compute", "memory", "balanced", "latency"),
        None,
        "A CUDA graph of elementwise kernels around a 4096^3 GEMM: its kernels differ in nature.",
        _graph,
    ),
)

Annotate = Callable[..., AbstractContextManager[Any]]


def select(only: str | None, skip: str | None = None) -> list[Known]:
    """The entries of one comma-separated list (None: all) but those of another. Raises SystemExit for unknown names."""
    every = [known.name for known in KNOWN]
    wanted = every if only is None else only.split(",")
    unwanted = skip.split(",") if skip else []
    unknown = [name for name in (*wanted, *unwanted) if name not in every]
    if unknown:
        raise SystemExit(f"no known kernel named {', '.join(unknown)}: --list shows the names")
    return [known for known in KNOWN if known.name in wanted and known.name not in unwanted]


def write_list(path: Path) -> None:
    """Names, bounds and reasons as JSON, in KNOWN's order, for programs that do not import PyTorch."""
    entries = [{"name": k.name, "bounds": list(k.bounds), "where": k.where, "reason": k.reason} for k in KNOWN]
    path.write_text(json.dumps(entries, indent=2) + "\n")


def prepare(entries: Iterable[Known], target: Target) -> Iterator[tuple[Known, Work]]:
    """Build each entry and run it twice to warm up; one that fails is reported and left out."""
    for known in entries:
        started = time.perf_counter()
        try:
            work = known.build(target)
            for _ in range(2):
                work.call()
            synchronize(target)
        except Exception as error:
            print(f"{known.name}: left out: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        print(f"{known.name}: ready after {time.perf_counter() - started:.2f} s", file=sys.stderr)
        yield known, work


def synchronize(target: Target) -> None:
    if target.device != "cpu":
        torch.cuda.synchronize()


def run_range(known: Known, work: Work, annotate: Annotate, calls: int | None = None) -> None:
    """One range named after the kernel around `calls` calls, with what they must do declared."""
    calls = work.calls if calls is None else calls
    declared = {"flops": work.flops, "bytes": work.bytes}
    scaled = {key: value * calls for key, value in declared.items() if value is not None}
    with annotate(known.name, **scaled):
        for _ in range(calls):
            work.call()


def mark(known: Known, target: Target) -> None:
    """Launch the empty marker kernel with a grid as wide as the entry's place in KNOWN, from 1."""
    target.kernels.launch(MARKER, KNOWN.index(known) + 1, 32)


def make_target(device: str, dry_run: bool = False) -> Target:
    """Full size on a GPU; a dry run divides every size by 64 and launches no CUDA C++ kernel."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")  # TF32 off: the FP32 GEMM must run on the FMA pipe
    return Target(device, 64 if dry_run else 1, CudaKernels(compile_only=device == "cpu"))


def _nvtx_range(name: str, **_declared: Any) -> AbstractContextManager[Any]:
    context: AbstractContextManager[Any] = torch.cuda.nvtx.range(name)
    return context


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print names and expected verdicts, run nothing")
    parser.add_argument("--only", metavar="NAMES", help="comma-separated names")
    parser.add_argument("--skip", metavar="NAMES", help="comma-separated names to leave out")
    parser.add_argument("--write-list", metavar="PATH", type=Path, help="write --list as JSON and go on")
    parser.add_argument("--reps", type=int, default=3, help="calls of each kernel (default 3)")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="wrap the calls in cudaProfilerStart/Stop and NVTX ranges, each kernel after its marker (for ncu)",
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes")
    arguments = parser.parse_args()
    if arguments.list:
        for known in KNOWN:
            print(f"{known.name:16} {'/'.join(known.bounds):28} {known.where or '':7} {known.reason}")
        return
    if arguments.write_list:
        write_list(arguments.write_list)
    target = make_target(arguments.device, arguments.dry_run)
    works = list(prepare(select(arguments.only, arguments.skip), target))
    profiled = arguments.profile and target.device != "cpu"
    if profiled:
        torch.cuda.profiler.start()
    for known, work in works:
        try:
            if profiled:
                mark(known, target)
            for _ in range(arguments.reps):
                run_range(known, work, _nvtx_range if profiled else lambda *_, **__: nullcontext(), calls=1)
            synchronize(target)
        except Exception as error:
            print(f"{known.name}: failed: {type(error).__name__}: {error}", file=sys.stderr)
    if profiled:
        torch.cuda.profiler.stop()
    print(f"ran {len(works)} of {len(KNOWN)} kernels, {arguments.reps} times each", file=sys.stderr)


if __name__ == "__main__":
    main()
