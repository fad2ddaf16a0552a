"""A small data-parallel training, to see ranks side by side: `torchrun`, or one process with two devices.

    nanalyze record -o ranks -- torchrun --nproc-per-node 2 examples/two_ranks.py
    nanalyze record -o devices examples/two_ranks.py --one-process
    nanalyze report ranks
    nanalyze sql ranks --query ranks

Each rank trains its own copy of a small network and averages the gradients with NCCL's all-reduce,
bucket by bucket while the backward pass goes on. `--slow-rank 1` gives one rank more work, for the
report to find. NCCL's NVLS is off: it needs multicast over NVLink, which not every machine permits.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # before NCCL is loaded

import torch
from torch import nn

WIDTH, LAYERS, BATCH = 2048, 6, 4096


def network(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
    return nn.Sequential(*layers).to(device, torch.bfloat16)


def extra_work(device: torch.device, times: int) -> None:
    """What makes a rank slow: products that nobody uses."""
    square = torch.ones(WIDTH, WIDTH, device=device, dtype=torch.bfloat16)
    for _ in range(times):
        torch.mm(square, square)


def train_as_rank(steps: int, slow_rank: int | None) -> str:
    """One rank of `torchrun`; what it did, in a line."""
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", device_id=device)
    model = DistributedDataParallel(network(device), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(BATCH, WIDTH, device=device, dtype=torch.bfloat16)
    started = time.perf_counter()
    for _ in range(steps):
        torch.cuda.nvtx.range_push("step")
        optimizer.zero_grad()
        loss = model(data).float().square().mean()
        if rank == slow_rank:
            extra_work(device, 8)
        loss.backward()
        optimizer.step()
        torch.cuda.nvtx.range_pop()
    torch.cuda.synchronize()
    took = time.perf_counter() - started
    distributed.destroy_process_group()
    return f"rank {rank}: {steps} steps in {took:.2f} s"


def train_in_one_process(steps: int) -> str:
    """Two devices of one process, each with half of the batch; gradients are summed by copies between them."""
    devices = [torch.device("cuda", ordinal) for ordinal in range(2)]
    models = [network(device) for device in devices]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
    data = [torch.randn(BATCH // 2, WIDTH, device=device, dtype=torch.bfloat16) for device in devices]
    started = time.perf_counter()
    for _ in range(steps):
        torch.cuda.nvtx.range_push("step")
        for model, batch in zip(models, data, strict=True):
            model.zero_grad()
            model(batch).float().square().mean().backward()
        for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert first.grad is not None
            assert second.grad is not None
            total = first.grad + second.grad.to(devices[0])
            first.grad.copy_(total)
            second.grad.copy_(total)
        for optimizer in optimizers:
            optimizer.step()
        torch.cuda.nvtx.range_pop()
    for device in devices:
        torch.cuda.synchronize(device)
    return f"two devices: {steps} steps in {time.perf_counter() - started:.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--slow-rank", type=int, help="give this rank more work than the others")
    parser.add_argument("--one-process", action="store_true", help="two devices of one process, without torchrun")
    options = parser.parse_args()
    if options.one_process:
        print(train_in_one_process(options.steps))
    elif "RANK" in os.environ:
        print(train_as_rank(options.steps, options.slow_rank))
    else:
        parser.error("start it with torchrun, or with --one-process")


if __name__ == "__main__":
    main()
