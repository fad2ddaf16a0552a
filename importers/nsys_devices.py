"""GPUs and processes as an Nsight Systems export describes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nanalyze.importers.nsys_source import Columns, Source, Wanted

# columns of `devices` <- candidates in TARGET_INFO_GPU, best first. smMajor and smMinor count
# differently from the compute capability on some chips (8.2 for an A100), so they come last.
NUMBERS = {
    "cc_major": ("computeMajor", "smMajor"),
    "cc_minor": ("computeMinor", "smMinor"),
    "sm_count": ("smCount",),
    "warp_size": ("threadsPerWarp",),
    "blocks_per_sm_max": ("maxBlocksPerSm",),
    "registers_per_sm": ("maxRegistersPerSm",),
    "shared_bytes_per_sm": ("maxShmemPerSm",),
    "l2_bytes": ("l2CacheSize",),
    "memory_bytes": ("totalMemory",),
    "sm_clock_max_hz": ("clockRate",),
    "dram_peak_bytes_per_s": ("memoryBandwidth",),
}
OTHERS = ("vmId", "id", "cuDevice", "maxWarpsPerSm")
NAMES = ("name", "uuid", "chipName")
# Exports before mid-2021 describe GPUs here, under CUPTI's names; the units of its clocks are not documented.
EARLY_GPUS = "TARGET_INFO_CUDA_GPU"
EARLY = {
    "deviceId": "cuDevice",
    "computeCapabilityMajor": "computeMajor",
    "computeCapabilityMinor": "computeMinor",
    "numMultiprocessors": "smCount",
    "numThreadsPerWarp": "threadsPerWarp",
    "maxWarpsPerMultiprocessor": "maxWarpsPerSm",
    "maxBlocksPerMultiprocessor": "maxBlocksPerSm",
    "globalMemorySize": "totalMemory",
    "l2CacheSize": "l2CacheSize",
}
PID_BITS = 24


def pid_of(global_id: int) -> int:
    """The operating system's process id in a serialised globalPid or globalTid."""
    return (global_id >> PID_BITS) & ((1 << PID_BITS) - 1)


def vm_of(global_id: int) -> int:
    """The part of a global id above the process: the machine it ran on."""
    return (global_id & (2**64 - 1)) >> (2 * PID_BITS)


def rows_of(source: Source, table: str, integers: tuple[str, ...], texts: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """A small table as dictionaries, None where a column or value is missing."""
    rows: list[dict[str, Any]] = []
    for chunk in source.scan(Wanted(table, integers, texts)):
        rows += _rows(chunk, (*integers, *texts))
        if len(rows) > 100_000:  # descriptions are few; anything else is no description
            break
    return rows


def _rows(chunk: Columns, names: tuple[str, ...]) -> list[dict[str, Any]]:
    lists = {name: _listed(values) for name, values in chunk.items()}
    count = len(next(iter(lists.values())))
    return [{name: lists[name][i] if name in lists else None for name in names} for i in range(count)]


def _listed(values: Any) -> list[Any]:
    return values if isinstance(values, list) else np.ma.asarray(values).tolist()


@dataclass
class Machine:
    """What the export says of the hardware and the session, all of it possibly missing."""

    gpus: list[dict[str, Any]] = field(default_factory=list)
    gpu_of: dict[tuple[int, int], int] = field(default_factory=dict)  # (pid, CUDA ordinal) -> GPU id
    process_names: dict[int, str] = field(default_factory=dict)  # by globalPid
    host: str | None = None
    driver: str | None = None
    epoch_ns: int | None = None
    version: str | None = None

    def gpu(self, pid: int, ordinal: int) -> dict[str, Any] | None:
        """The GPU that the process calls `ordinal`."""
        id_ = self.gpu_of.get((pid, ordinal))
        if id_ is not None:
            return next((gpu for gpu in self.gpus if gpu["id"] == id_), None)
        for key in ("cuDevice", "id"):
            found = next((gpu for gpu in self.gpus if gpu.get(key) == ordinal), None)
            if found is not None:
                return found
        return None

    def device_row(self, pid: int, ordinal: int) -> dict[str, Any] | None:
        """A row of `devices`, None where the export does not describe that GPU."""
        gpu = self.gpu(pid, ordinal)
        if gpu is None:
            return None
        row: dict[str, Any] = {"device_id": ordinal, "name": gpu["name"], "chip": gpu["chipName"]}
        row["uuid"] = _uuid(gpu["uuid"])
        for column, candidates in NUMBERS.items():
            row[column] = next((gpu[name] for name in candidates if gpu.get(name) is not None), None)
        row.update({name: value or None for name, value in row.items() if name not in ("device_id", "cc_minor")})
        if row["warp_size"] and gpu.get("maxWarpsPerSm"):
            row["threads_per_sm_max"] = row["warp_size"] * gpu["maxWarpsPerSm"]
        return row


def describe(source: Source) -> Machine:
    """Read every table of descriptions that is there."""
    machine = Machine()
    columns = tuple(name for names in NUMBERS.values() for name in names)
    machine.gpus = rows_of(source, "TARGET_INFO_GPU", (*columns, *OTHERS), NAMES) or _early_gpus(source)
    for row in rows_of(source, "TARGET_INFO_CUDA_DEVICE", ("gpuId", "cudaId", "pid")):
        if row["gpuId"] is not None and row["cudaId"] is not None:
            machine.gpu_of[(row["pid"] or 0, row["cudaId"])] = row["gpuId"]
    for row in rows_of(source, "PROCESSES", ("globalPid",), ("name",)):
        if row["globalPid"] is not None and row["name"]:
            machine.process_names[row["globalPid"]] = row["name"]
    environment = rows_of(source, "TARGET_INFO_SYSTEM_ENV", (), ("name", "value"))
    machine.host = _value(environment, "Hostname", "HostName", "Host name")
    machine.driver = _value(environment, "DriverVersion", "NVIDIA Driver Version", "Nvidia Driver Version")
    for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
        exported = rows_of(source, table, (), ("name", "value"))
        machine.version = machine.version or _value(exported, "EXPORT_PRODUCT_VERSION")
    for row in rows_of(source, "TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",)):
        if row["utcEpochNs"] is not None and 0 < row["utcEpochNs"] < 4_000_000_000_000_000_000:
            machine.epoch_ns = row["utcEpochNs"]
    return machine


def _early_gpus(source: Source) -> list[dict[str, Any]]:
    """The GPUs of an export before mid-2021, with today's names for what is told of them."""
    nothing = dict.fromkeys((*(name for names in NUMBERS.values() for name in names), *OTHERS, *NAMES))
    rows = rows_of(source, EARLY_GPUS, tuple(EARLY), ("name", "uuid"))
    return [{**nothing, **{EARLY.get(name, name): value for name, value in row.items()}} for row in rows]


def _value(rows: list[dict[str, Any]], *names: str) -> str | None:
    return next((row["value"] for row in rows if row["name"] in names and row["value"]), None)


def _uuid(text: str | None) -> str | None:
    return f"GPU-{text}" if text and not text.startswith(("GPU-", "MIG-")) else text
