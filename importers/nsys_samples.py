"""GPU metrics samples of an Nsight Systems export: periodic counters of a whole device.

One row of `samples` a device and instant; a sample's value covers the time since the sample before
it. The tool stores percentages of peaks and frequencies, the table sums over the device (see
`rundir.sampled`), so that the attribution to kernels works on them: a percentage times the
sample's length over 100 is the time the unit would have needed at its peak, a column ending in
`_busy_ns`; with the device's properties it becomes cycles, instructions, warps or bytes. Metrics
without a counterpart keep their name in snake case; run.json lists the tool's spelling of each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from nanalyze.importers.nsys_devices import rows_of
from nanalyze.importers.nsys_source import Wanted

if TYPE_CHECKING:
    from nanalyze.importers.nsys import _Export

TABLE = "GPU_METRICS"
GENERIC_TABLE = "GENERIC_EVENTS"
NAMES_TABLE = "TARGET_INFO_GPU_METRICS"
DEVICE_MASK = 0xFF  # of typeId: the id of the GPU in TARGET_INFO_GPU
MOST_METRICS = 1000
PERCENT, MEGAHERTZ = ("throughput %", "%"), ("mhz",)
SCHEDULERS = 4  # of an SM; the tool counts cycles in which one of them issued

# Columns of `samples` <- metrics of the tool, in lower case and without their unit.
CLOCK = "gpc clock frequency"
OF_SM_CYCLES = {
    "sms active": ("sm_cycles_active", 1),
    "sm active": ("sm_cycles_active", 1),
    "sm issue": ("inst", SCHEDULERS),
}
WARPS = "compute warps in flight"
BUSY = {"tensor active": "pipe_tensor_busy_ns"}
DRAM = {"dram read bandwidth": "dram_read_bytes", "dram write bandwidth": "dram_write_bytes"}


@dataclass
class _Device:
    """Samples of one device that are not written yet: its last instant may go on in the next chunk."""

    names: dict[int, str]  # metric id -> name, as the tool spells it
    previous_ns: int | None = None
    times: list[Any] = field(default_factory=list)
    metrics: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)


def read(export: _Export) -> None:
    """Feed the table `samples`; samples belong to the process that used the device first."""
    if TABLE not in export.source.tables:
        _count_generic_events(export)
        return
    names = _names(export)
    devices: dict[int, _Device] = {}
    for chunk in export.source.scan(Wanted(TABLE, ("timestamp", "typeId", "metricId"), reals=("value",))):
        if {"timestamp", "typeId", "metricId", "value"} <= chunk.keys():
            _collect(export, chunk, names, devices)
    for type_id, device in devices.items():
        _write(export, type_id, device, is_last=True)


def _count_generic_events(export: _Export) -> None:
    """Tell of the table in which the first versions with GPU metrics kept them, as JSON without units."""
    for chunk in export.source.scan(Wanted(GENERIC_TABLE, ("timestamp",))):
        export.sink.refuse("generic events (the first versions kept GPU metrics there)", len(chunk["timestamp"]))


def _names(export: _Export) -> dict[int, dict[int, str]]:
    """Metrics by type id and metric id."""
    names: dict[int, dict[int, str]] = {}
    for row in rows_of(export.source, NAMES_TABLE, ("typeId", "metricId"), ("metricName",)):
        if row["typeId"] is None or row["metricId"] is None or not row["metricName"]:
            continue
        mine = names.setdefault(row["typeId"], {})
        if len(mine) < MOST_METRICS:
            mine[row["metricId"]] = row["metricName"]
    spelled = sorted({name for mine in names.values() for name in mine.values()})
    if spelled:
        export.sink.setting("gpu_metrics", {column_name(name): name for name in spelled})
    return names


def parts(metric: str) -> tuple[str, str]:
    """A metric's name and its unit, both in lower case: `SMs Active [Throughput %]`."""
    name, _, unit = metric.partition("[")
    return " ".join(name.lower().split()), unit.rstrip("] ").lower()


def column_name(metric: str) -> str:
    """The column for a metric without a counterpart: snake case, what it adds up to behind."""
    name, unit = parts(metric)
    snake = re.sub(r"[^a-z0-9]+", "_", name).strip("_") or "metric"
    ending = "busy_ns" if unit in PERCENT else "cycles" if unit in MEGAHERTZ else "integral_ns"
    return f"{snake[:100]}_{ending}"


def additive(values: dict[str, Any], length_ns: Any, gpu: dict[str, Any] | None) -> dict[str, Any]:
    """Columns of `samples` from the tool's `values` by metric, of samples that long on that GPU.

    What needs a property that the export does not tell stays time at the peak.
    """
    known = {parts(name)[0]: cells for name, cells in values.items() if parts(name)[1] in (*PERCENT, *MEGAHERTZ)}
    gpu = gpu or {}
    columns: dict[str, Any] = {}
    cycles = known[CLOCK] / 1e3 * length_ns * gpu["smCount"] if CLOCK in known and gpu.get("smCount") else None
    if cycles is not None:
        columns["sm_cycles_elapsed"] = cycles
    for name, cells in values.items():
        spelled, unit = parts(name)
        share = cells / 100
        if unit in MEGAHERTZ:
            columns[column_name(name)] = cells / 1e3 * length_ns
        elif unit not in PERCENT:
            columns[column_name(name)] = cells * length_ns
        elif spelled in OF_SM_CYCLES and cycles is not None:
            column, scale = OF_SM_CYCLES[spelled]
            columns[column] = share * cycles * scale
        elif spelled == WARPS and cycles is not None and gpu.get("maxWarpsPerSm"):
            columns["warps_active"] = share * cycles * gpu["maxWarpsPerSm"]
        elif spelled in DRAM and gpu.get("memoryBandwidth"):
            columns[DRAM[spelled]] = share * length_ns * gpu["memoryBandwidth"] / 1e9
        else:
            columns[BUSY.get(spelled) or column_name(name)] = share * length_ns
    if all(name in known for name in DRAM):  # reads and writes share one bus
        columns["dram_busy_ns"] = sum(known[name] for name in DRAM) / 100 * length_ns
    return columns


def _collect(export: _Export, chunk: Any, names: dict[int, dict[int, str]], devices: dict[int, _Device]) -> None:
    missing = sum(np.ma.getmaskarray(chunk[name]) for name in ("timestamp", "typeId", "metricId")) > 0
    missing |= ~np.isfinite(chunk["value"])
    export.sink.refuse("GPU metrics without a time, a metric or a value", int(np.count_nonzero(missing)))
    time, kind, metric = (np.ma.getdata(chunk[name])[~missing] for name in ("timestamp", "typeId", "metricId"))
    value = chunk["value"][~missing]
    export.sink.count("GPU metrics values", len(value))
    for type_id in np.unique(kind).tolist():
        if type_id not in names:
            export.sink.refuse("GPU metrics of a kind that has no names", int(np.count_nonzero(kind == type_id)))
            continue
        device = devices.setdefault(type_id, _Device(names[type_id]))
        mine = kind == type_id
        device.times.append(time[mine])
        device.metrics.append(metric[mine])
        device.values.append(value[mine])
        _write(export, type_id, device, is_last=False)


def _write(export: _Export, type_id: int, device: _Device, is_last: bool) -> None:
    """Write the device's whole instants; the last one waits unless nothing follows."""
    if not device.times:
        return
    time, metric, value = (np.concatenate(parts) for parts in (device.times, device.metrics, device.values))
    device.times, device.metrics, device.values = [], [], []
    if not len(time):
        return
    whole = np.ones(len(time), dtype=bool) if is_last else time != time.max()
    if not is_last:
        device.times, device.metrics, device.values = [time[~whole]], [metric[~whole]], [value[~whole]]
    following = None if is_last else int(time[~whole].min())
    time, metric, value = time[whole], metric[whole], value[whole]
    instants, row = np.unique(time, return_inverse=True)
    if not len(instants):
        return
    columns: dict[str, Any] = {}
    for id_ in np.unique(metric).tolist():
        name = device.names.get(id_)
        here = metric == id_
        if name is None:
            export.sink.refuse("GPU metrics without a name", int(np.count_nonzero(here)))
            continue
        cells = columns.setdefault(name, np.full(len(instants), np.nan))
        cells[row[here]] = value[here]
    if columns:
        _add(export, type_id, device, instants, columns, following)


def _add(
    export: _Export, type_id: int, device: _Device, instants: Any, columns: dict[str, Any], following: int | None
) -> None:
    end = export.instants(instants, "GPU metrics")
    known = ~np.ma.getmaskarray(end)
    end = np.ma.getdata(end)[known]
    if not len(end):
        return
    before = device.previous_ns
    if before is None:  # the first covers as much as the second
        second = int(end[1]) if len(end) > 1 else int(end[0]) if following is None else following + export.origin_ns
        before = 2 * int(end[0]) - second
    start = np.concatenate(([min(before, int(end[0]))], end[:-1]))
    device.previous_ns = int(end[-1])
    ordinal, partition = _place(export, type_id & DEVICE_MASK)
    gpu = next((gpu for gpu in export.machine.gpus if gpu["id"] == type_id & DEVICE_MASK), None)
    batch: dict[str, Any] = {
        "device_id": np.full(len(end), ordinal),
        "start_ns": start,
        "end_ns": end,
        "counter_group": np.zeros(len(end), dtype=np.int64),
    }
    measured = additive({name: cells[known] for name, cells in columns.items()}, end - start, gpu)
    batch.update({name: np.ma.masked_invalid(cells) for name, cells in measured.items()})
    export.sink.count("GPU metrics samples", len(end))
    export.sink.add("samples", partition, batch)


def _place(export: _Export, gpu_id: int) -> tuple[int, str]:
    """CUDA ordinal and process of a GPU: the first process that has it, else the first of all."""
    processes = export.known_processes()
    for (pid, ordinal), id_ in sorted(export.machine.gpu_of.items()):
        for global_id, partition in processes.items():
            if id_ == gpu_id and (global_id & 0xFFFFFF) == pid:
                return ordinal, partition
    gpu = next((gpu for gpu in export.machine.gpus if gpu["id"] == gpu_id), None)
    ordinal = gpu_id if gpu is None or gpu.get("cuDevice") is None else gpu["cuDevice"]
    return ordinal, next(iter(processes.values()), None) or export.process(0)
