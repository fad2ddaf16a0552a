"""Builds small Nsight Systems exports, as SQLite or as a directory of Parquet, out of rows.

    export = Export()
    export.kernel(start=100, end=350, name="gemm", correlation=1)
    export.call(start=50, correlation=1)
    path = export.sqlite(tmp_path / "report.sqlite")

Columns that a row does not give are NULL; columns of no row do not exist, as in exports of other
versions of the tool.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

Row = dict[str, Any]

EPOCH = 1_700_000_000_000_000_000
PID = 4242
GLOBAL_PID = (1 << 48) | (PID << 24)
KERNELS, RUNTIME = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
PUSH_POP, START_END, MARK, DOMAIN = 59, 60, 34, 75
TYPES = {int: "INTEGER", float: "REAL", str: "TEXT", bytes: "BLOB"}

GPU: Row = {
    "vmId": 1 << 48, "id": 3, "name": "NVIDIA A100-SXM4-40GB", "chipName": "GA100", "cuDevice": 0,
    "uuid": "098fa939-1320-6289-1577-50905f0d37fc", "l2CacheSize": 41_943_040, "totalMemory": 42_409_000_960,
    "memoryBandwidth": 1_555_200_000_000, "clockRate": 1_410_000_000, "smCount": 108, "maxShmemPerSm": 167_936,
    "maxRegistersPerSm": 65_536, "threadsPerWarp": 32, "maxWarpsPerSm": 64, "maxBlocksPerSm": 32,
    "computeMajor": 8, "computeMinor": 0, "smMajor": 8, "smMinor": 2,
}  # fmt: skip


class Export:
    """Rows by table; `epoch_ns` None leaves out when the session began."""

    def __init__(self, epoch_ns: int | None = EPOCH) -> None:
        self.tables: dict[str, list[Row]] = {}
        self._strings: dict[str, int] = {}
        if epoch_ns is not None:
            self.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=epoch_ns, utcTime="2023-11-14T22:13:20")

    def add(self, table: str, **row: Any) -> None:
        """A row as it stands."""
        self.tables.setdefault(table, []).append(row)

    def string(self, text: str) -> int:
        """The id of a string in StringIds."""
        if text not in self._strings:
            self._strings[text] = 100 + len(self._strings)
            self.add("StringIds", id=self._strings[text], value=text)
        return self._strings[text]

    def kernel(
        self,
        start: int,
        end: int,
        name: str = "gemm",
        correlation: int | None = 1,
        mangled: str | None = None,
        **columns: Any,
    ) -> None:
        """A launch on device 0, stream 7 of the process `PID`; `columns` overrides anything."""
        row = {
            "start": start, "end": end, "deviceId": 0, "contextId": 1, "streamId": 7, "correlationId": correlation,
            "globalPid": GLOBAL_PID, "demangledName": self.string(name), "shortName": self.string(name.split("(")[0]),
            "mangledName": None if mangled is None else self.string(mangled), "registersPerThread": 32,
            "gridX": 4, "gridY": 2, "gridZ": 1, "blockX": 128, "blockY": 1, "blockZ": 1,
            "staticSharedMemory": 0, "dynamicSharedMemory": 1024, "localMemoryPerThread": 0, "graphNodeId": None,
        }  # fmt: skip
        self.add(KERNELS, **{**row, **columns})

    def call(
        self, start: int, correlation: int | None = 1, name: str = "cudaLaunchKernel_v7000", **columns: Any
    ) -> None:
        """A CUDA call on the host, 10 ns long."""
        row = {
            "start": start, "end": start + 10, "eventClass": 0, "globalTid": GLOBAL_PID | 77,
            "correlationId": correlation, "nameId": self.string(name), "returnValue": 0,
        }  # fmt: skip
        self.add(RUNTIME, **{**row, **columns})

    def range(self, start: int | None, end: int | None, text: str | None = None, **columns: Any) -> None:
        """An NVTX push/pop range of thread 77."""
        row = {"start": start, "end": end, "eventType": PUSH_POP, "text": text, "globalTid": GLOBAL_PID | 77}
        self.add("NVTX_EVENTS", **{**row, **columns})

    def gpu(self, **columns: Any) -> None:
        """A GPU with every property: an A100, id 3, which the process calls 0."""
        self.add("TARGET_INFO_GPU", **{**GPU, **columns})

    def metric(self, timestamp: int, metric: int, value: float, type_id: int = (1 << 32) | 3) -> None:
        """One value of a GPU metric."""
        self.add("GPU_METRICS", timestamp=timestamp, typeId=type_id, metricId=metric, value=value)

    def metric_name(self, metric: int, name: str, type_id: int = (1 << 32) | 3) -> None:
        """The name of a GPU metric."""
        row = {"typeId": type_id, "sourceId": 1, "typeName": "GPU", "metricId": metric, "metricName": name}
        self.add("TARGET_INFO_GPU_METRICS", **row)

    # --- files -------------------------------------------------------------------------------------

    def sqlite(self, path: Path) -> Path:
        """Write a SQLite export."""
        connection = sqlite3.connect(path)
        for table, rows in self.tables.items():
            columns = _columns(rows)
            declared = ", ".join(f'"{name}" {_type(rows, name)}' for name in columns)
            connection.execute(f'CREATE TABLE "{table}" ({declared})')
            marks = ", ".join("?" * len(columns))
            values = [[row.get(name) for name in columns] for row in rows]
            connection.executemany(f'INSERT INTO "{table}" VALUES ({marks})', values)
        connection.commit()
        connection.close()
        return path

    def parquet(self, path: Path) -> Path:
        """Write a directory of Parquet files."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path.mkdir()
        for table, rows in self.tables.items():
            columns = {name: pa.array([row.get(name) for row in rows]) for name in _columns(rows)}
            kept = {name: values for name, values in columns.items() if not pa.types.is_null(values.type)}
            pq.write_table(pa.table(kept), path / f"{table}.parquet")
        return path


def _columns(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _type(rows: list[Row], name: str) -> str:
    kinds = {type(row[name]) for row in rows if row.get(name) is not None}
    return TYPES[kinds.pop()] if len(kinds) == 1 else "INTEGER" if not kinds else ""
