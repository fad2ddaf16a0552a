"""Writes small files as Nsight Compute prints them, for the tests of its importers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

COMPUTE = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
MEMORY = "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"
DURATION = "gpu__time_duration.sum"

CONTEXT = (
    *("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"),
    *("Block Size", "Grid Size", "Device", "CC"),
)
DETAILS = (*CONTEXT, "Section Name", "Metric Name", "Metric Unit", "Metric Value")
RULES = ("Rule Name", "Rule Type", "Rule Description")

_REPOSITORY = Path(__file__).resolve().parents[1]
REAL_TRACES = Path(os.environ.get("NANALYZE_REAL_TRACES") or _REPOSITORY.parent / "shared" / "real-traces")
needs_real_traces = pytest.mark.skipif(
    not REAL_TRACES.is_dir(), reason="NANALYZE_REAL_TRACES names no folder of traces"
)

Row = tuple[str, str, str, str]  # section, name or label, unit, value


def en(value: float, digits: int = 2) -> str:
    """As Nsight Compute prints in an English locale: 1,234.50 and 1,234."""
    return f"{value:,.{digits}f}" if value != int(value) else f"{int(value):,}"


def de(value: float, digits: int = 2) -> str:
    """As in a German one: 1.234,50."""
    return en(value, digits).translate(str.maketrans(",.", ".,"))


@dataclass
class Kernel:
    """One launch and what is printed of it."""

    id: int
    name: str = "saxpy(float *)"
    rows: Sequence[Row] = ()
    rules: Sequence[tuple[str, str]] = ()
    block: str = "(256, 1, 1)"
    grid: str = "(16, 1, 1)"
    pid: str = "100"
    host: str = "node0"
    device: str = "0"
    cc: str = "9.0"
    context: str = "1"
    stream: str = "7"
    extra: dict[str, str] = field(default_factory=dict)

    def cells(self) -> dict[str, str]:
        return {
            "ID": str(self.id),
            "Process ID": self.pid,
            "Process Name": "app",
            "Host Name": self.host,
            "Kernel Name": self.name,
            "Context": self.context,
            "Stream": self.stream,
            "Block Size": self.block,
            "Grid Size": self.grid,
            "Device": self.device,
            "CC": self.cc,
            **self.extra,
        }


def quote(cells: Sequence[str], delimiter: str = ",") -> str:
    return delimiter.join('"' + cell.replace('"', '""') + '"' for cell in cells)


def details(
    kernels: Sequence[Kernel],
    columns: Sequence[str] = DETAILS,
    delimiter: str = ",",
    line: Callable[[Sequence[str], str], str] = quote,
) -> list[str]:
    """The lines of a details page; rule columns are added where a kernel has rules."""
    if any(kernel.rules for kernel in kernels):
        columns = (*columns, *RULES)
    lines = [line(columns, delimiter)]
    for kernel in kernels:
        for section, name, unit, value in kernel.rows:
            told = {"Section Name": section, "Metric Name": name, "Metric Unit": unit, "Metric Value": value}
            cells = [{**kernel.cells(), **told}.get(column, "") for column in columns]
            lines.append(line(cells, delimiter))
        for name, text in kernel.rules:
            told = {"Section Name": "SpeedOfLight", "Rule Name": name, "Rule Type": "OPT", "Rule Description": text}
            lines.append(line([{**kernel.cells(), **told}.get(column, "") for column in columns], delimiter))
    return lines


def raw(kernels: Sequence[Kernel], columns: Sequence[str] = CONTEXT, units: bool = True) -> list[str]:
    """The lines of a raw page: a column a metric, the first row their units."""
    names = dict.fromkeys(name for kernel in kernels for _, name, _, _ in kernel.rows)
    told = {name: unit for kernel in kernels for _, name, unit, _ in kernel.rows}
    header = (*columns, *names)
    lines = [quote(header)]
    if units:
        lines.append(quote([told.get(column, "") for column in header]))
    for kernel in kernels:
        values = {name: value for _, name, _, value in kernel.rows}
        lines.append(quote([{**kernel.cells(), **values}.get(column, "") for column in header]))
    return lines


def sol(compute: float, memory: float, duration_ns: float = 10_000, number: Callable[[float], str] = en) -> list[Row]:
    """The rows from which a verdict follows, by metric name."""
    section = "Command line profiler metrics"
    return [
        (section, COMPUTE, "%", number(compute)),
        (section, MEMORY, "%", number(memory)),
        (section, DURATION, "us", number(duration_ns / 1000)),
    ]
