"""CUDA source of the calibration: one small kernel for each ceiling, with the work that it does.

All kernels have one signature, `run(in, out, count, iterations, clocks)`, so that the host code needs no case
for any of them. Each keeps one pipe or one level of the memory busy and nothing else; its results are stored
only under a condition that does not come true but that the compiler cannot know. Block 0 leaves its cycles and
nanoseconds in `clocks`, whose ratio is the SM clock that ran.

No headers are included, so NVRTC needs no CUDA toolkit; what C++ has no words for is inline PTX.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

WARP = 32
QUAD_BYTES = 16  # one vector load
UNROLL = 8
# Threads of a block that are one warpgroup, and the fp32 accumulators of one with the widest tile.
WARPGROUP = 128
TILE_N = 256
TILE_ROW_BYTES = 128  # the widest swizzle, which has no bank conflicts

COMPUTE, MEMORY = "compute", "memory"


@dataclass(frozen=True)
class Probe:
    """One kernel and what it measures.

    `work` is operations, or bytes, of one thread in one iteration; None where the kernel goes over `count`
    quads in each iteration instead. `is_partial` says that the method is known not to reach the pipe's peak on
    this architecture. `pattern` masks random bits to finite operands. `architecture_suffix` is 'a' for
    instructions of one architecture only.
    """

    ceiling: str
    kind: str
    method: str
    unit: str
    source: str
    work: int | None
    block: int = 256
    blocks_per_sm: int = 8
    shared_bytes: int = 0
    is_partial: bool = False
    pattern: int = 0xFFFFFFFF
    region: str = ""  # memory: dram, l2 or block (a region for each block)
    architecture_suffix: str = ""


HEAD = """\
typedef unsigned int u32;
typedef unsigned long long u64;
struct __align__(16) quad { u32 x, y, z, w; };
static __device__ __forceinline__ u64 nanoseconds() {
    u64 t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t) :: "memory"); return t;
}
static __device__ __forceinline__ u64 cycles() {
    u64 t; asm volatile("mov.u64 %0, %%clock64;" : "=l"(t) :: "memory"); return t;
}
static __device__ __forceinline__ u32 scramble(u32 x) {
    x ^= x >> 16; x *= 0x7feb352dU; x ^= x >> 15; x *= 0x846ca68bU; x ^= x >> 16; return x;
}
"""

KERNEL = """\
extern "C" __global__ void __launch_bounds__(%(block)d)
run(const quad* __restrict__ in, quad* __restrict__ out, u64 count, int iterations, u64* clocks) {
    const u32 thread = threadIdx.x, lane = blockIdx.x * blockDim.x + threadIdx.x;
%(setup)s
    const u64 ns0 = nanoseconds(), cycles0 = cycles();
    for (int i = 0; i < iterations; ++i) {
%(body)s
    }
%(after)s
    const u64 cycles1 = cycles(), ns1 = nanoseconds();
    if (lane == 0) { clocks[0] = cycles1 - cycles0; clocks[1] = ns1 - ns0; }
%(end)s
}
"""


def _program(block: int, setup: str, body: str, end: str, after: str = "") -> str:
    return HEAD + KERNEL % {"block": block, "setup": setup, "body": body, "after": after, "end": end}


def probes(cc_major: int, cc_minor: int) -> list[Probe]:
    """What can be measured on compute capability `cc_major.cc_minor`, in the order in which it is measured."""
    cc = 10 * cc_major + cc_minor
    return [*_plain(cc), *_tensor(cc), *_memory()]


# --- plain pipes -------------------------------------------------------------------------------

_CHAINS = 8  # independent, so that the latency of one is hidden behind the others
_STEPS = 16


def _plain(cc: int) -> Iterator[Probe]:
    yield _chain("fp32", "FFMA", "FLOP/s", 2, "float", "f", "fma.rn.f32", "__int_as_float(0x3f7fff00 + (u32)count)")
    yield _chain("fp64", "DFMA", "FLOP/s", 2, "double", "d", "fma.rn.f64", "0.999 + 1e-12 * (double)count")
    # Two halves of 0.999 in a register, twice as many operations.
    yield _chain("fp16", "HFMA2", "FLOP/s", 4, "u32", "r", "fma.rn.f16x2", "0x3bfd3bfdU + (u32)count")
    yield _chain("int32", "IMAD", "OP/s", 2, "int", "r", "mad.lo.s32", "(int)(1664525 + count)")


def _chain(
    ceiling: str, method: str, unit: str, operations: int, c_type: str, letter: str, instruction: str, factor: str
) -> Probe:
    """`a = a * x + y` in several independent chains; `count` is 0, which only the host knows."""
    step = "\n".join(
        f'            asm volatile("{instruction} %0, %0, %1, %2;" : "+{letter}"(a{c}) : "{letter}"(x), "{letter}"(y));'
        for c in range(_CHAINS)
    )
    setup = f"    const {c_type} x = {factor}, y = x;\n    {c_type} " + ", ".join(
        f"a{c} = ({c_type})(lane + {c})" for c in range(_CHAINS)
    )
    body = f"        #pragma unroll\n        for (int k = 0; k < {_STEPS}; ++k) {{\n{step}\n        }}"
    total = " + ".join(f"a{c}" for c in range(_CHAINS))
    end = f"    if ({total} == ({c_type})123456789) out[lane].x = (u32)a0;"
    work = operations * _CHAINS * _STEPS
    return Probe(ceiling, COMPUTE, method, unit, _program(256, f"{setup};", body, end), work)


# --- tensor pipe, mma.sync ---------------------------------------------------------------------

# Bits that make random operands finite and below 2: the highest bit of the exponent is cleared.
_HALVES, _FLOATS, _BYTES, _ANY = 0xBFFFBFFF, 0xBFFFFFFF, 0xBFBFBFBF, 0xFFFFFFFF


@dataclass(frozen=True)
class Mma:
    """One shape of a warp's matrix multiplication: registers of A, B and the accumulator, and their types."""

    ceiling: str
    types: str
    m: int
    n: int
    k: int
    a: int
    b: int
    c: int
    pattern: int
    accumulator: str = "f"

    @property
    def operand(self) -> str:
        return "d" if self.accumulator == "d" else "r"

    @property
    def operations(self) -> int:
        return 2 * self.m * self.n * self.k


_TF32 = Mma("tensor_tf32", "f32.tf32.tf32.f32", 16, 8, 8, 4, 2, 4, _FLOATS)
_BF16 = Mma("tensor_bf16", "f32.bf16.bf16.f32", 16, 8, 16, 4, 2, 4, _HALVES)
_FP16 = Mma("tensor_fp16", "f32.f16.f16.f32", 16, 8, 16, 4, 2, 4, _HALVES)
_FP8 = Mma("tensor_fp8", "f32.e4m3.e4m3.f32", 16, 8, 32, 4, 2, 4, _BYTES)
_INT8 = Mma("tensor_int8", "s32.s8.s8.s32", 16, 8, 32, 4, 2, 4, _ANY, "r")
_FP64 = Mma("tensor_fp64", "f64.f64.f64.f64", 8, 8, 4, 1, 1, 2, _ANY, "d")
_FP64_HOPPER = Mma("tensor_fp64", "f64.f64.f64.f64", 16, 8, 16, 8, 4, 4, _ANY, "d")
_FP16_TURING = Mma("tensor_fp16", "f32.f16.f16.f32", 16, 8, 8, 2, 1, 4, _HALVES)
_INT8_TURING = Mma("tensor_int8", "s32.s8.s8.s32", 8, 8, 16, 1, 1, 2, _ANY, "r")


def _tensor(cc: int) -> Iterator[Probe]:
    if cc == 90:
        yield from map(_wgmma_probe, _WGMMA)
    # Since Hopper the full rate needs instructions of a warpgroup (wgmma) or of tensor memory (tcgen05);
    # consumer Blackwell (12.x) has neither, and mma.sync reaches its full rate.
    is_partial = cc == 90 or 100 <= cc < 120
    for shape in _shapes(cc):
        yield _mma_probe(shape, is_partial and shape.accumulator != "d")


def _shapes(cc: int) -> list[Mma]:
    if cc < 75:
        return []
    if cc < 80:
        return [_FP16_TURING, _INT8_TURING]
    # Elsewhere FP64 on the tensor pipe is emulated, by code of half a megabyte.
    fp64 = {80: [_FP64], 90: [_FP64_HOPPER], 100: [_FP64_HOPPER]}.get(cc, [])
    return [_FP16, _BF16, _TF32, *([_FP8] if cc >= 89 else []), _INT8, *fp64]


_ACCUMULATORS = 4
_MMA_STEPS = 4


def _mma_probe(shape: Mma, is_partial: bool) -> Probe:
    c_type = {"f": "float", "r": "int", "d": "double"}[shape.accumulator]
    lines = [_mma_operand(shape, "a", index) for index in range(shape.a)]
    lines += [_mma_operand(shape, "b", index) for index in range(shape.b * _ACCUMULATORS)]
    lines += [f"    {c_type} c{index} = 0;" for index in range(shape.c * _ACCUMULATORS)]
    step = "\n".join(_mma_call(shape, place) for place in range(_ACCUMULATORS))
    body = f"        #pragma unroll\n        for (int k = 0; k < {_MMA_STEPS}; ++k) {{\n{step}\n        }}"
    total = " + ".join(f"c{index}" for index in range(shape.c * _ACCUMULATORS))
    end = f"    if ({total} == ({c_type})1234567) out[lane].x = (u32)c0;"
    method = f"mma.sync m{shape.m}n{shape.n}k{shape.k}"
    work = shape.operations * _ACCUMULATORS * _MMA_STEPS // WARP
    unit = "OP/s" if shape.accumulator == "r" else "FLOP/s"
    source = _program(256, "\n".join(lines), body, end)
    return Probe(shape.ceiling, COMPUTE, method, unit, source, work, is_partial=is_partial)


def _mma_operand(shape: Mma, name: str, index: int) -> str:
    seed = f"scramble(lane * 64 + {index + (32 if name == 'b' else 0)} + (u32)count)"
    if shape.operand == "d":
        return f"    const double {name}{index} = (double)(int){seed} * 4.6e-10;"
    return f"    const u32 {name}{index} = {seed} & {shape.pattern:#x}U;"


def _mma_call(shape: Mma, place: int) -> str:
    def list_of(first: int, count: int) -> str:
        return "{" + ", ".join(f"%{first + index}" for index in range(count)) + "}"

    c, a, b = list_of(0, shape.c), list_of(shape.c, shape.a), list_of(shape.c + shape.a, shape.b)
    results = ", ".join(f'"+{shape.accumulator}"(c{place * shape.c + index})' for index in range(shape.c))
    operands = [f"a{index}" for index in range(shape.a)]
    operands += [f"b{place * shape.b + index}" for index in range(shape.b)]
    inputs = ", ".join(f'"{shape.operand}"({name})' for name in operands)
    name = f"mma.sync.aligned.m{shape.m}n{shape.n}k{shape.k}.row.col.{shape.types}"
    return f'            asm volatile("{name} {c}, {a}, {b}, {c};" : {results} : {inputs});'


# --- tensor pipe, wgmma (Hopper) ---------------------------------------------------------------


@dataclass(frozen=True)
class Wgmma:
    """One type of a warpgroup's matrix multiplication m64n256k`k`, operands in shared memory."""

    ceiling: str
    types: str
    k: int
    pattern: int
    modifiers: str  # what follows the scale of D: signs of A and B, and their transposition
    accumulator: str = "f"


_WGMMA = (
    Wgmma("tensor_fp16", "f32.f16.f16", 16, _HALVES, ", 1, 1, 0, 0"),
    Wgmma("tensor_bf16", "f32.bf16.bf16", 16, _HALVES, ", 1, 1, 0, 0"),
    Wgmma("tensor_tf32", "f32.tf32.tf32", 8, _FLOATS, ", 1, 1"),
    Wgmma("tensor_fp8", "f32.e4m3.e4m3", 32, _BYTES, ", 1, 1"),
    Wgmma("tensor_int8", "s32.s8.s8", 32, _ANY, "", "r"),
)
_WARPGROUPS = 2
_ROWS = 64  # of A, for each warpgroup
_TILE_BYTES = (TILE_N + _WARPGROUPS * _ROWS) * TILE_ROW_BYTES
_K_STEPS = 4  # a row of 128 bytes holds four times 32 bytes of K, whatever the type


def _wgmma_probe(shape: Wgmma) -> Probe:
    """Two warpgroups an SM, each with a 64 x 256 tile of accumulators; B is shared, as in a real GEMM."""
    count = TILE_N // 2
    block = _WARPGROUPS * WARPGROUP
    c_type = "float" if shape.accumulator == "f" else "int"
    setup = f"""\
    extern __shared__ __align__(1024) unsigned char tile[];
    for (u32 place = thread; place < {_TILE_BYTES // 4}; place += {block})
        ((u32*)tile)[place] = scramble(place + blockIdx.x * 7919 + (u32)count) & {shape.pattern:#x}U;
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
    const u32 base = (u32)__cvta_generic_to_shared(tile);
    // 128-byte swizzle, groups of 8 rows 1024 bytes apart.
    const u64 layout = (1ULL << 62) | (64ULL << 32) | (1ULL << 16);
    const u64 b = layout | ((base & 0x3FFFF) >> 4);
    const u64 a = layout | (((base + {TILE_N * TILE_ROW_BYTES} + thread / {WARPGROUP} * {_ROWS * TILE_ROW_BYTES})
        & 0x3FFFF) >> 4);
    {c_type} c[{count}];
    #pragma unroll
    for (int k = 0; k < {count}; ++k) c[k] = 0;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");"""
    calls = "\n".join(_wgmma_call(shape, count, step) for step in range(_K_STEPS))
    body = f"""\
{calls}
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");"""
    results = ", ".join(f'"+{shape.accumulator}"(c[{index}])' for index in range(count))
    after = f'    asm volatile("wgmma.wait_group.sync.aligned 0;" : {results} :: "memory");'
    end = f"""\
    {c_type} total = 0;
    #pragma unroll
    for (int k = 0; k < {count}; ++k) total += c[k];
    if (total == ({c_type})1234567) out[lane].x = (u32)total;"""
    work = 2 * _ROWS * TILE_N * shape.k * _K_STEPS // WARPGROUP
    return Probe(
        shape.ceiling,
        COMPUTE,
        f"wgmma m64n256k{shape.k}",
        "OP/s" if shape.accumulator == "r" else "FLOP/s",
        _program(block, setup, body, end, after),
        work,
        block=block,
        blocks_per_sm=1,
        shared_bytes=_TILE_BYTES,
        architecture_suffix="a",
    )


def _wgmma_call(shape: Wgmma, count: int, step: int) -> str:
    """One multiplication; 32 bytes further along K is 2 in a descriptor, which counts 16 bytes."""
    registers = ", ".join(f"%{index}" for index in range(count))
    results = ", ".join(f'"+{shape.accumulator}"(c[{index}])' for index in range(count))
    name = f"wgmma.mma_async.sync.aligned.m64n{TILE_N}k{shape.k}.{shape.types}"
    text = f"{{{{{registers}}}}}, %{count}, %{count + 1}, p{shape.modifiers};".replace("{{", "{").replace("}}", "}")
    return (
        f'        asm volatile("{{ .reg .pred p; setp.eq.b32 p, 0, 0; {name} {text} }}"'
        f' : {results} : "l"(a + {2 * step}), "l"(b + {2 * step}));'
    )


# --- memory ------------------------------------------------------------------------------------


def _memory() -> Iterator[Probe]:
    yield _dram("read", "ld.cs", read=True, write=False)
    yield _dram("write", "st.cs", read=False, write=True)
    yield _dram("copy", "ld.cs, st.cs", read=True, write=True)
    at = "(start + {k} * blockDim.x) & (count - 1)"
    # Blocks begin at different places of one region, or each in a region of its own.
    yield _resident("l2_read", "ld.global.cg", "l2", 256, 8, f"in + ({at})", "blockIdx.x * 8191 * 8 + thread")
    yield _resident("l1_read", "ld.global.ca", "block", 1024, 1, f"in + blockIdx.x * count + ({at})", "thread")
    yield _shared()


_KEEP = "    if (sum == 0x9e3779b9U) out[0].x = sum;"


def _load(instruction: str, k: int, at: str, letter: str = "l") -> str:
    quad = ", ".join(f'"=r"(q{k}.{part})' for part in "xyzw")
    return f'    quad q{k}; asm volatile("{instruction}.v4.u32 {{%0, %1, %2, %3}}, [%4];" : {quad} : "{letter}"({at}));'


def _store(k: int, value: str, at: str) -> str:
    quad = ", ".join(f'"r"({value}.{part})' for part in "xyzw")
    return f'    asm volatile("st.global.cs.v4.u32 [%0], {{%1, %2, %3, %4}};" :: "l"({at}), {quad} : "memory");'


def _sum(k: int) -> str:
    return f"    sum ^= q{k}.x ^ q{k}.y ^ q{k}.z ^ q{k}.w;"


def _dram(name: str, method: str, *, read: bool, write: bool) -> Probe:
    """Whole buffers, far larger than L2, once an iteration; a copy counts what it reads and what it writes."""
    lines = [_load("ld.global.cs", k, f"in + place + {k} * stride") for k in range(UNROLL)] if read else []
    if write:
        lines += [_store(k, f"q{k}" if read else "q", f"out + place + {k} * stride") for k in range(UNROLL)]
    else:
        lines += [_sum(k) for k in range(UNROLL)]
    sweep = f"for (u64 place = lane; place < count; place += {UNROLL} * stride)"
    body = "\n".join([f"    {sweep} {{", *lines, "    }"])
    setup = """\
    const u64 stride = (u64)gridDim.x * blockDim.x;
    u32 sum = 0;
    const quad q = {lane, lane ^ 1, lane ^ 2, lane ^ 3};"""
    source = _program(256, setup, body, "" if write else _KEEP)
    return Probe(f"dram_{name}", MEMORY, method, "bytes/s", source, None, region="dram")


def _resident(ceiling: str, instruction: str, region: str, block: int, blocks: int, at: str, start: str) -> Probe:
    """Reads of a region that stays in a cache; its size in quads, `count`, is a power of two."""
    lines = [_load(instruction, k, at.format(k=k)) for k in range(UNROLL)] + [_sum(k) for k in range(UNROLL)]
    body = "\n".join([*lines, f"    start += {UNROLL} * blockDim.x;"])
    source = _program(block, f"    u32 sum = 0, start = {start};", body, _KEEP)
    method = instruction.replace("ld.global", "ld")
    return Probe(
        ceiling, MEMORY, method, "bytes/s", source, UNROLL * QUAD_BYTES, block, blocks_per_sm=blocks, region=region
    )


SHARED_BYTES = 32768


def _shared() -> Probe:
    setup = f"""\
    extern __shared__ __align__(16) quad store[];
    for (u32 place = thread; place < {SHARED_BYTES // QUAD_BYTES}; place += blockDim.x) store[place] = in[place];
    __syncthreads();
    const u32 base = (u32)__cvta_generic_to_shared(store);
    u32 start = thread, sum = 0;"""
    at = f"base + (((start + {{k}} * blockDim.x) * {QUAD_BYTES}) & {SHARED_BYTES - 1})"
    lines = [_load("ld.shared", k, at.format(k=k), letter="r") for k in range(UNROLL)]
    body = "\n".join([*lines, *(_sum(k) for k in range(UNROLL)), f"    start += {UNROLL} * blockDim.x;"])
    source = _program(1024, setup, body, _KEEP)
    work = UNROLL * QUAD_BYTES
    return Probe(
        "shared_read", MEMORY, "ld.shared", "bytes/s", source, work, 1024, blocks_per_sm=1, shared_bytes=SHARED_BYTES
    )
