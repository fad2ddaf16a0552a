"""What each pipe of a GPU architecture can do per SM and clock, from `peaks.csv`.

The rates are data, each row with its source, because no driver call gives them. A rate times SMs
times clock is a peak; tests/test_peaks.py checks that against NVIDIA's datasheets. All rates are
dense: structured sparsity is not counted. An FMA is two operations.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources

PEAKS_FILE = "peaks.csv"


@dataclass(frozen=True)
class Rates:
    """Operations per SM and cycle; None where the pipe does not exist or no source gives a rate.

    The fields up to `tensor_int8_ops_per_sm_cycle` have the names of columns of the `devices` table.
    """

    fp64_flops_per_sm_cycle: float | None = None
    fp32_flops_per_sm_cycle: float | None = None
    fp16_flops_per_sm_cycle: float | None = None
    tensor_fp64_flops_per_sm_cycle: float | None = None
    tensor_tf32_flops_per_sm_cycle: float | None = None
    tensor_fp16_flops_per_sm_cycle: float | None = None
    tensor_fp8_flops_per_sm_cycle: float | None = None
    tensor_int8_ops_per_sm_cycle: float | None = None
    architecture: str | None = None
    source: str | None = None


TEXT_FIELDS = ("architecture", "source")
NUMBER_FIELDS = tuple(field.name for field in fields(Rates) if field.name not in TEXT_FIELDS)


def rates(cc_major: int, cc_minor: int) -> Rates:
    """The rates of compute capability `cc_major.cc_minor`; all None for one that is not in the table."""
    return table().get((cc_major, cc_minor), Rates())


@cache
def table() -> dict[tuple[int, int], Rates]:
    """Every known architecture by compute capability."""
    text = resources.files(__package__).joinpath(PEAKS_FILE).read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return {(int(row["cc_major"]), int(row["cc_minor"])): _rates(row) for row in rows}


def _rates(row: dict[str, str]) -> Rates:
    numbers = {name: float(row[name]) if row[name] else None for name in NUMBER_FIELDS}
    return Rates(**numbers, architecture=row["architecture"], source=row["source"])
