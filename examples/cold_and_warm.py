"""A copy with L2 cold and warm: times, hit rates and bytes from DRAM.

    python examples/cold_and_warm.py out             # half a minute on an H200

What fits into L2 is read from DRAM when it is cold and from L2 when it is warm; what does not fit is read
from DRAM either way. Writes always find their line, so the hit rate of a cold copy is about a half.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import torch

from nanalyze import recorder

COUNTERS = ["l2_hit_pct", "dram_read_bytes", "dram_write_bytes"]


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    torch.neg(source, out=target)  # a plain copy would be the copy engine's or a memcpy, which has no counters


def buffers(mib: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.randn(mib << 18, device="cuda")
    return source, torch.empty_like(source)


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("cold-and-warm")
    tables = []
    for cache in ("cold", "warm"):
        result = recorder.measure(
            {"copy": copy}, {"mib": [4, 16, 256]}, setup=buffers, cache=cache, counters=COUNTERS, run_dir=out / cache
        )
        tables.append(result.to_wide().assign(cache=cache))
    table = pd.concat(tables)
    columns = ["mib", "cache", "total_ns", *(name for name in COUNTERS if name in table)]
    print(table[columns].sort_values(["mib", "cache"]).to_string(index=False))


if __name__ == "__main__":
    main()
