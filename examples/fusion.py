"""What fusion buys: time, bytes and launches, where it pays and where it does not.

    python examples/fusion.py out                    # all four; about three minutes on an H200
    python examples/fusion.py out --only softmax

Each experiment is a run directory in `out`, with the waterfall of where the difference comes from beside it.
Needs PyTorch with CUDA; `chain`, `attention` and `no_gain` compile with Inductor, `softmax` is Triton's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from nanalyze import recorder

try:
    import triton
    import triton.language as tl
except ImportError:  # the softmax is then left out
    triton = None

BF16 = torch.bfloat16
OPTIONS: dict[str, Any] = {"repetitions": 30, "warmup": 5}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


# --- normalisation, GELU, bias: three memory-bound passes become one ----------------------------


def norm_gelu_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.layer_norm(x, x.shape[-1:], weight)) + bias


def chain(out: Path) -> None:
    """Eager writes and reads two intermediates that the fused kernel keeps in registers."""
    result = recorder.measure(
        {"eager": norm_gelu_bias, "compiled": torch.compile(norm_gelu_bias, dynamic=False)},
        {"rows": [4096, 16384], "columns": [4096]},
        setup=lambda rows, columns: (random(rows, columns), random(columns), random(columns)),
        run_dir=out / "chain",
        **OPTIONS,
    )
    show(result, out / "chain.png", "eager", "compiled", rows=16384)


# --- attention: the matrix of scores is never written --------------------------------------------


def attention(out: Path) -> None:
    """Eager writes and reads a matrix of scores that grows with the square of the length."""

    def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        return torch.softmax(scores, dim=-1) @ v

    result = recorder.measure(
        {
            "eager": eager,
            "compiled": torch.compile(eager, dynamic=False),
            "fused": F.scaled_dot_product_attention,
        },
        {"length": [1024, 2048, 4096]},
        setup=lambda length: tuple(random(4, 16, length, 64) for _ in range(3)),
        derive={"tflops": (lambda m, length: 4 * 4 * 16 * length**2 * 64 / m["total_ns"] / 1e3, "TFLOP/s")},
        run_dir=out / "attention",
        **OPTIONS,
    )
    show(result, out / "attention.png", "eager", "fused", length=4096)


# --- softmax by hand -----------------------------------------------------------------------------

if triton is not None:

    @triton.jit
    def softmax_kernel(source, target, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row, at = tl.program_id(0).to(tl.int64) * columns, tl.arange(0, BLOCK)
        x = tl.load(source + row + at, mask=at < columns, other=-float("inf")).to(tl.float32)
        e = tl.exp(x - tl.max(x, axis=0))
        tl.store(target + row + at, (e / tl.sum(e, axis=0)).to(target.dtype.element_ty), mask=at < columns)


def softmax(out: Path) -> None:
    """Five eager kernels against one: every intermediate that eager writes is a pass over memory."""
    if triton is None:
        print("softmax: left out, Triton is not installed (pip install triton)")
        return

    def eager(x: torch.Tensor) -> torch.Tensor:
        e = torch.exp(x - x.max(dim=1, keepdim=True).values)
        return e / e.sum(dim=1, keepdim=True)

    def fused(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        softmax_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]), num_warps=8)
        return y

    result = recorder.measure(
        {"eager": eager, "torch": lambda x: torch.softmax(x, dim=1), "triton": fused},
        {"columns": [1024, 4096, 8192]},
        setup=lambda columns: random(16384, columns),
        derive={"rate": (lambda m, columns: 2 * 2 * 16384 * columns / m["total_ns"], "GB/s")},
        run_dir=out / "softmax",
        **OPTIONS,
    )
    show(result, out / "softmax.png", "eager", "triton", columns=8192)


# --- where it does not pay -----------------------------------------------------------------------


def no_gain(out: Path) -> None:
    """A large product is bound by the tensor pipe: what is saved on the addition behind it is a few percent."""

    def eager(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.relu(a @ b)

    result = recorder.measure(
        {"eager": eager, "compiled": torch.compile(eager, dynamic=False)},
        [8192],
        setup=lambda n: (random(n, n), random(n, n)),
        run_dir=out / "no_gain",
        **OPTIONS,
    )
    show(result, out / "no_gain.png", "eager", "compiled")


def show(result: Any, picture: Path, a: str, b: str, **parameters: Any) -> None:
    """Times of all configurations, the comparison of one, and its waterfall; failures were printed as they came."""
    times = result.to_pandas().query("metric == 'total_ns'")
    print(times[["configuration", "variant", "value", "low", "high"]].to_string(index=False))
    if any(variant in (a, b) for _, variant in result.failures):
        return
    comparison = result.compare(a, b, **parameters)
    print(comparison.to_markdown())
    comparison.plot().figure.savefig(picture, dpi=120)
    print(f"nanalyze report {result.run_dir}\n")


EXPERIMENTS: dict[str, Callable[[Path], None]] = {
    "chain": chain,
    "attention": attention,
    "softmax": softmax,
    "no_gain": no_gain,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="where run directories and pictures go")
    parser.add_argument("--only", default=",".join(EXPERIMENTS), help="experiments, with commas")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only.split(","):
        print(f"## {name}: {EXPERIMENTS[name].__doc__}")
        EXPERIMENTS[name](options.out)


if __name__ == "__main__":
    main()
