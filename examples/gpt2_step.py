"""A training step like GPT-2 small's, in plain PyTorch, on random tokens.

At the default sizes (12 layers, 12 heads, width 768, vocabulary 50304, 8 sequences of 1024 tokens,
bf16 autocast, AdamW) a step is about 790 launches and 28 ms on an H200.

    from gpt2_step import make_step
    step = make_step()
    step()
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Annotate = Callable[..., AbstractContextManager[Any]]


@dataclass(frozen=True)
class Sizes:
    """The model's and the batch's dimensions; `batch` counts sequences of `context` tokens."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    vocabulary: int = 50304
    context: int = 1024
    batch: int = 8


TINY = Sizes(layers=2, heads=2, width=32, vocabulary=128, context=16, batch=2)


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a layer norm and a residual connection."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.norm_1 = nn.LayerNorm(sizes.width)
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.projection = nn.Linear(sizes.width, sizes.width)
        self.norm_2 = nn.LayerNorm(sizes.width)
        self.up = nn.Linear(sizes.width, 4 * sizes.width)
        self.down = nn.Linear(4 * sizes.width, sizes.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._attend(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        heads = (batch, tokens, self.heads, width // self.heads)
        query, key, value = (part.view(heads).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(attended.transpose(1, 2).reshape(batch, tokens, width))


class GPT2(nn.Module):
    """The language model; the output layer shares the token embedding's weights."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.output = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.output.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss of predicting `targets` from `tokens`, both [batch, context] of int64."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def step_flops(sizes: Sizes) -> float:
    """Floating-point operations of the matrix products of one step: forward once, backward twice that."""
    tokens = sizes.batch * sizes.context
    weights = sizes.layers * 12 * sizes.width**2 + sizes.vocabulary * sizes.width
    attention = sizes.layers * 2 * sizes.context * sizes.width  # causal: half of 4 * context * width
    return 3.0 * tokens * (2 * weights + attention)


def make_step(
    device: str = "cuda",
    annotate: Annotate | None = None,
    **sizes: int,
) -> Callable[[], None]:
    """A function that runs one training step on random tokens; it returns before the GPU is done.

    `annotate(name)` gives a context manager and is called for `forward`, `backward` and `optimizer`.
    `sizes` override fields of `Sizes`.
    """
    shape = Sizes(**sizes)
    torch.manual_seed(0)
    model = GPT2(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randint(shape.vocabulary, (shape.batch, shape.context + 1), device=device)
    tokens, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    in_range: Annotate = annotate or (lambda name: nullcontext())

    def step() -> None:
        with in_range("forward"), torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            loss = model(tokens, targets)
        with in_range("backward"):
            loss.backward()
        with in_range("optimizer"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return step


def main() -> None:
    """Time a few steps, or check a tiny model on the CPU where there is no GPU."""
    import dataclasses
    import time

    on_gpu = torch.cuda.is_available()
    step = make_step() if on_gpu else make_step("cpu", **dataclasses.asdict(TINY))
    for _ in range(3):
        step()
    if on_gpu:
        torch.cuda.synchronize()
    started, steps = time.perf_counter(), 20
    for _ in range(steps):
        step()
    if on_gpu:
        torch.cuda.synchronize()
    milliseconds = (time.perf_counter() - started) / steps * 1e3
    sizes = Sizes() if on_gpu else TINY
    rate = step_flops(sizes) / milliseconds * 1e-9
    print(f"{milliseconds:.2f} ms a step, {rate:.1f} TFLOP/s")


if __name__ == "__main__":
    main()
