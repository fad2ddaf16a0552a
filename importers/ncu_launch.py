"""One profiled launch, whatever file it came from, as rows of the run.

A launch gives one row of `kernels` (without a start: Nsight Compute runs launches one at a time and
more than once) and one row of `exact` for each metric, known or not, plus the counters that follow
from them (`ncu_metrics.derive`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nanalyze.importers import ncu_metrics as metrics
from nanalyze.importers.sink import Sink
from nanalyze.rundir.classes import KernelClass

BATCH_ROWS = 65_536  # of `exact`, before they are handed to the sink

# Of `exact`, the same for every metric of a launch.
LAUNCH_COLUMNS = ("scope", "device_id", "correlation_id", "kernel_class_id", "graph_id", "passes")
KERNEL_COLUMNS = ("duration_ns", "kernel_class_id", "device_id", "context_id", "stream_id", "correlation_id")

Shape = tuple[int, int, int]
NO_SHAPE: Shape = (0, 0, 0)


@dataclass
class Launch:
    """What a report says of one launch; metrics are in base units, None where it had no number.

    `rounded` names metrics that were printed with a prefix (`1.02 Kbyte`) and so lost digits.
    """

    id: int
    name: bytes
    display: str
    device_id: int | None = None
    context_id: int | None = None
    stream_id: int | None = None
    grid: Shape | None = None
    block: Shape | None = None
    compute_capability: tuple[int, int] | None = None
    device_name: str | None = None
    is_graph: bool = False
    metrics: dict[str, float | None] = field(default_factory=dict)
    rounded: set[str] = field(default_factory=set)
    rules: list[str] = field(default_factory=list)

    def put(self, metric: str, value: float | None, rounded: bool = False) -> bool:
        """Take a value; False where an earlier one of the same metric counts instead."""
        known = self.metrics.get(metric)
        if known is not None and (value is None or rounded or metric not in self.rounded):
            return False
        self.metrics[metric] = value
        if rounded:
            self.rounded.add(metric)
        else:
            self.rounded.discard(metric)
        return True

    def whole(self, metric: str) -> int | None:
        """The value where it is a whole number of 63 bits and was not rounded."""
        value = self.metrics.get(metric)
        if value is None or metric in self.rounded or not value.is_integer() or not 0 <= value < 2**63:
            return None
        return int(value)

    def shape(self, names: tuple[str, ...]) -> Shape | None:
        x, y, z = (self.whole(name) for name in names)
        return None if x is None or y is None or z is None else (x, y, z)

    @property
    def device(self) -> int:
        """The ordinal, 0 where the file does not tell."""
        if self.device_id is not None:
            return self.device_id
        told = self.whole("launch__device_id")
        return 0 if told is None else told


class _Batch:
    """Rows of one process that wait for the sink."""

    def __init__(self) -> None:
        self.kernels: dict[str, list[Any]] = {name: [] for name in KERNEL_COLUMNS}
        self.launches: dict[str, list[Any]] = {name: [] for name in LAUNCH_COLUMNS}
        self.sizes: list[int] = []  # metrics of each launch
        self.metrics: list[str] = []
        self.values: list[float | None] = []

    def exact(self) -> dict[str, Any]:
        """The columns of `exact`: those of the launches repeated for each of their metrics."""
        columns: dict[str, Any] = {name: np.repeat(_column(v), self.sizes) for name, v in self.launches.items()}
        columns["scope"] = columns["scope"].tolist()
        for name in ("kernel_class_id", "graph_id"):
            columns[name] = np.ma.MaskedArray(columns[name], mask=columns[name] < 0)
        values = np.array([math.nan if value is None else value for value in self.values], dtype=np.float64)
        return {**columns, "metric": self.metrics, "value": np.ma.MaskedArray(values, mask=np.isnan(values))}


def _column(values: list[Any]) -> np.ndarray[Any, Any]:
    """As numbers, -1 for None (class and graph ids are never negative); text stays text."""
    return np.array([-1 if value is None else value for value in values])


class Launches:
    """Hands launches to a sink; `close` hands over what is left."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._pending: dict[str, _Batch] = {}

    def write(self, process: str, launch: Launch) -> None:
        """Add one launch of `process` (a partition's name) to the run."""
        batch = self._pending.setdefault(process, _Batch())
        known = {name: value for name, value in launch.metrics.items() if value is not None}
        derived = metrics.derive(known)
        class_id = None
        if launch.is_graph:
            self._sink.count("graph launches")
        else:
            class_id = self._sink.kernel_class(process, kernel_class(launch, self._sink), launch.display or "(no name)")
            _append(batch.kernels, _kernel_row(launch, class_id, derived.get("duration_ns")))
            self._sink.count("launches")
            self._sink.refuse("kernels without a name", not launch.name)
        self._tell_device(process, launch)
        self._check_rule(launch)
        self._add_metrics(batch, launch, derived, class_id)
        self._sink.count("metrics", len(launch.metrics))
        self._sink.count("metrics without a number", len(launch.metrics) - len(known))
        self._sink.count("counters worked out from other metrics", len(derived))
        if len(batch.metrics) >= BATCH_ROWS:
            self._flush(process)

    def close(self) -> None:
        for process in list(self._pending):
            self._flush(process)

    @staticmethod
    def _add_metrics(batch: _Batch, launch: Launch, derived: Mapping[str, float], class_id: int | None) -> None:
        row = {
            "scope": "graph" if launch.is_graph else "kernel",
            "device_id": launch.device,
            "correlation_id": launch.id,
            "kernel_class_id": class_id,
            "graph_id": launch.id if launch.is_graph else None,
            "passes": launch.whole(metrics.PASSES) or 0,
        }
        told = {**launch.metrics, **derived}
        _append(batch.launches, row)
        batch.sizes.append(len(told))
        batch.metrics.extend(told)
        batch.values.extend(told.values())

    def _check_rule(self, launch: Launch) -> None:
        compute, memory = launch.metrics.get(metrics.COMPUTE), launch.metrics.get(metrics.MEMORY)
        said = [bound for bound in map(metrics.rule_says, launch.rules) if bound]
        if compute is None or memory is None or not said:
            return
        self._sink.count("speed-of-light verdicts in the file")
        if not all(metrics.rule_agrees(bound, compute, memory) for bound in said):
            self._sink.refuse("speed-of-light verdicts that the percentages in the file, as rounded, do not give")

    def _tell_device(self, process: str, launch: Launch) -> None:
        row = device_row(launch)
        if row:
            self._sink.device(process, device_id=launch.device, **row)

    def _flush(self, process: str) -> None:
        batch = self._pending.pop(process)
        if batch.kernels["correlation_id"]:
            self._sink.add("kernels", process, batch.kernels)
        if batch.metrics:
            self._sink.add("exact", process, batch.exact())


def _append(columns: dict[str, list[Any]], row: Mapping[str, Any]) -> None:
    for name, values in columns.items():
        values.append(row[name])


def _kernel_row(launch: Launch, class_id: int, derived_ns: float | None) -> dict[str, Any]:
    context = launch.whole("launch__context_id") if launch.context_id is None else launch.context_id
    stream = launch.whole("launch__stream_id") if launch.stream_id is None else launch.stream_id
    return {
        "duration_ns": duration_ns(launch, derived_ns),
        "kernel_class_id": class_id,
        "device_id": launch.device,
        "context_id": context,
        "stream_id": stream,
        "correlation_id": launch.id,
    }


def duration_ns(launch: Launch, derived_ns: float | None = None) -> int | None:
    """Time on the GPU in whole nanoseconds; None where it is missing, negative or no sane number.

    `derived_ns` counts where the tool did not measure it.
    """
    value = launch.metrics.get(metrics.DURATION)
    value = derived_ns if value is None else value
    if value is None or not math.isfinite(value) or not 0 <= value < 2**63:
        return None
    return round(value)


def kernel_class(launch: Launch, sink: Sink) -> KernelClass:
    """The class of the launch. Sizes that the file gives only in rounded form are unknown."""
    static, dynamic = launch.whole(metrics.STATIC_SHARED), launch.whole(metrics.DYNAMIC_SHARED)
    sink.refuse(
        "shared memory sizes that the tool rounded (print them with --print-units base)",
        len({metrics.STATIC_SHARED, metrics.DYNAMIC_SHARED} & launch.rounded),
    )
    return KernelClass(
        launch.name,
        _shape(launch.grid, launch.shape(metrics.SHAPE_GRID), launch.whole("launch__grid_size"), sink, "grid"),
        _shape(launch.block, launch.shape(metrics.SHAPE_BLOCK), launch.whole("launch__block_size"), sink, "block"),
        launch.shape(metrics.SHAPE_CLUSTER) or (_total(launch.whole("launch__cluster_size"))),
        registers_per_thread=launch.whole(metrics.REGISTERS),
        static_shared_bytes=static,
        dynamic_shared_bytes=dynamic,
    )


def _shape(given: Shape | None, told: Shape | None, total: int | None, sink: Sink, what: str) -> Shape:
    shape = given or told
    if shape is not None:
        return shape
    if total:
        sink.note(f"{what}: the file tells only its size, which stands in {what}_x")
    return _total(total)


def _total(size: int | None) -> Shape:
    return (size, 1, 1) if size else NO_SHAPE


def device_row(launch: Launch) -> dict[str, Any]:
    """Columns of `devices` that the launch tells; empty where it says nothing of its device."""
    row: dict[str, Any] = {}
    for column, sources in metrics.DEVICE_COLUMNS.items():
        told = ((launch.whole(name), factor) for name, factor in sources)
        value = next((value * factor for value, factor in told if value is not None), None)
        if value is not None:
            row[column] = value
    if launch.compute_capability is not None:
        row.setdefault("cc_major", launch.compute_capability[0])
        row.setdefault("cc_minor", launch.compute_capability[1])
    if "cc_major" not in row:
        return {}
    row.setdefault("warp_size", 32)  # of every CUDA device so far
    row["name"] = launch.device_name or f"compute capability {row['cc_major']}.{row.get('cc_minor', 0)}"
    if "memory_clock_max_hz" in row and "memory_bus_bits" in row:
        row["dram_peak_bytes_per_s"] = 2.0 * row["memory_clock_max_hz"] * row["memory_bus_bits"] / 8
    return row
