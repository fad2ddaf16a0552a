"""What kernel names of libraries and compilers say, in words: operation, types, tile.

Only what a name states. The schemes of cuBLAS (nvjet, xmma) are not documented by NVIDIA. Of the letters of nvjet, t is
BF16 by the tensor counters of the sample run; h and s, for FP16 and FP32, follow the letters of the BLAS. A name of
another form, or with other letters, gives no types.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_TYPES = {
    "bf16": "BF16", "f16": "FP16", "fp16": "FP16", "f32": "FP32", "fp32": "FP32", "f64": "FP64", "tf32": "TF32",
    "e4m3": "FP8", "e5m2": "FP8", "s8": "INT8", "i8": "INT8", "u8": "UINT8", "i32": "INT32", "i64": "INT64",
    "u32": "UINT32", "u64": "UINT64",
}  # fmt: skip
_NVJET_TYPES = {"t": "BF16", "h": "FP16", "s": "FP32"}
_BLAS_TYPES = {"s": "FP32", "d": "FP64", "h": "FP16", "c": "complex FP32", "z": "complex FP64"}
_INDUCTOR = {
    "poi": "pointwise", "red": "reduction", "per": "persistent reduction", "tem": "template", "for": "foreach",
}  # fmt: skip
_COLLECTIVES = {
    "AllReduce": "all-reduce", "AllGather": "all-gather", "ReduceScatter": "reduce-scatter", "Broadcast": "broadcast",
    "Reduce": "reduce", "SendRecv": "send and receive",
}  # fmt: skip

_NVJET = re.compile(r"nvjet_sm\d+_([a-z]+)_(\d+)x(\d+)_(\d+)x(\d+)_\d+x\d+_")
_XMMA = re.compile(r"sm\d+_xmma_(gemm|fprop|dgrad|wgrad)_([a-z]+\d+)\2?_\w*?tilesize(\d+)x(\d+)x(\d+)_stage(\d+)")
_BLAS = re.compile(r"(?:maxwell|volta|turing|ampere|hopper)_([sdhcz])gemm_(\d+)x(\d+)_")
_TENSOR_BLAS = re.compile(r"(?:volta|turing|ampere|hopper)_(?:(fp16|bf16|tf32)_)?([hs])\d{3,5}gemm_\w*?(\d+)x(\d+)_")
_CUTLASS = re.compile(
    r"cutlass\w*?_\d+_(?:wmma_)?(tensorop|simt)_(?:(bf16|f16|tf32|s8|f64)_)?([a-z]?)\d*(gemm|fprop|dgrad|wgrad)"
    r"\w*?_(\d+)x(\d+)_(\d+)x(\d+)_"
)
_CUDNN_ATTENTION = re.compile(
    r"cudnn_generated_\w*?sdpa_\w*?flash_([fb])prop_\w*?_(b?f16|e4m3)_\w*?_(\d+)x(\d+)x(\d+)_"
)
_FLASH = re.compile(r"\bflash_(fwd|bwd)_\w*kernel\b")
_TRITON = re.compile(r"triton_(poi|red|per|tem|for)_fused_(\w*?)_?(\d*)$")
_NCCL = re.compile(
    r"nccl(?:Dev)?Kernel_([A-Za-z]+)(?:_([A-Z][A-Za-z]+)_([a-z]+\d+\w*?))?(?:_(RING|TREE|NVLS|COLLNET\w*?))?(?:_(LL128|LL|SIMPLE))?\b"
)

_WORK = {"gemm": "matrix product", "fprop": "convolution", "dgrad": "convolution, gradient of its input",
         "wgrad": "convolution, gradient of its weights"}  # fmt: skip


def decoded(name: str) -> str:
    """`name` in words, such as `cuBLAS matrix product, BF16, tile 192×128×64, 5 stages`; '' where it tells nothing."""
    for pattern, words in _FORMS:
        found = pattern.search(name[:2_000])
        if found:
            return words(found)
    return ""


def _nvjet(found: re.Match[str]) -> str:
    letters, m, n, k, stages = found.groups()
    kinds = [_NVJET_TYPES.get(letter, "") for letter in letters]
    types = kinds[0] if len(kinds) == 3 and all(kinds) and kinds[0] == kinds[2] else ""
    return _joined("cuBLAS matrix product", types, _tile(m, n, k), _stages(stages))


def _xmma(found: re.Match[str]) -> str:
    work, kind, m, n, k, stages = found.groups()
    return _joined(f"cuBLAS or cuDNN {_WORK[work]}", _TYPES.get(kind, ""), _tile(m, n, k), _stages(stages))


def _blas(found: re.Match[str]) -> str:
    letter, m, n = found.groups()
    return _joined("cuBLAS matrix product", _BLAS_TYPES[letter], _tile(m, n))


def _tensor_blas(found: re.Match[str]) -> str:
    kind, letter, m, n = found.groups()
    types = _TYPES[kind] if kind else "FP16" if letter == "h" else ""
    return _joined("cuBLAS matrix product on the tensor pipe", types, _tile(m, n))


def _cutlass(found: re.Match[str]) -> str:
    pipe, kind, letter, work, m, n, k, stages = found.groups()
    types = _TYPES.get(kind or "", "") or (_BLAS_TYPES.get(letter, "") if pipe == "simt" else "")
    where = " on the tensor pipe" if pipe == "tensorop" else ""
    return _joined(f"CUTLASS {_WORK[work]}{where}", types, _tile(m, n, k), _stages(stages))


def _cudnn_attention(found: re.Match[str]) -> str:
    way, kind, m, n, k = found.groups()
    # cuDNN writes f16 for BF16 as well.
    types = _TYPES[kind] if kind != "f16" else "FP16 or BF16"
    return _joined(f"cuDNN attention {'forward' if way == 'f' else 'backward'}", types, _tile(m, n, k))


def _flash(found: re.Match[str]) -> str:
    return f"FlashAttention {'forward' if found[1] == 'fwd' else 'backward'}"


def _triton(found: re.Match[str]) -> str:
    kind, operations, _ = found.groups()
    return _joined(f"Inductor {_INDUCTOR[kind]}", f"of {operations}" if operations else "")


def _nccl(found: re.Match[str]) -> str:
    work, operation, kind, algorithm, protocol = found.groups()
    types = _TYPES.get(kind or "", kind or "")
    return _joined(
        f"NCCL {_COLLECTIVES.get(work, work)}", f"{operation.lower()} of {types}" if operation else "",
        (algorithm or "").lower(), f"protocol {protocol}" if protocol else "",
    )  # fmt: skip


def _tile(*sizes: str) -> str:
    return f"tile {'×'.join(sizes)}"


def _stages(count: str) -> str:
    return "1 stage" if count == "1" else f"{count} stages"


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


_FORMS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    (_NVJET, _nvjet),
    (_XMMA, _xmma),
    (_BLAS, _blas),
    (_TENSOR_BLAS, _tensor_blas),
    (_CUTLASS, _cutlass),
    (_CUDNN_ATTENTION, _cudnn_attention),
    (_FLASH, _flash),
    (_TRITON, _triton),
    (_NCCL, _nccl),
)
