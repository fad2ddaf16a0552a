"""Builds small run directories out of Python events with round numbers, for every test.

    trace = Trace(tmp_path / "run")
    gemm = trace.kernel_class("gemm", grid=(132, 1, 1), block=(256, 1, 1))
    trace.kernel(gemm, start_ns=1_000, duration_ns=500)
    trace.measure(gemm, [{"compute_pct": 90.0, "memory_pct": 20.0}])
    trace.write()

Everything goes through `nanalyze.rundir`, so what the tests read is what the recorder writes.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from nanalyze.rundir import counters, runfile
from nanalyze.rundir.schema import TABLES, Table
from nanalyze.rundir.shards import Shard, write_shard

PROCESS = "node0-0-100"
T0 = 1_700_000_000_000_000_000  # all instants given to a Trace count from here

Row = dict[str, Any]

# An H200: 132 SMs, 2048 threads, 64 K registers and 228 KiB of shared memory an SM.
DEVICE: Row = {
    "device_id": 0,
    "uuid": "GPU-00000000-0000-0000-0000-000000000000",
    "name": "NVIDIA H200",
    "chip": "GH100",
    "cc_major": 9,
    "cc_minor": 0,
    "sm_count": 132,
    "warp_size": 32,
    "threads_per_sm_max": 2048,
    "blocks_per_sm_max": 32,
    "registers_per_sm": 65536,
    "shared_bytes_per_sm": 233472,
    "shared_reserved_bytes_per_block": 1024,
    "l2_bytes": 60 * 2**20,
    "memory_bytes": 141 * 10**9,
    "memory_bus_bits": 6144,
    "sm_clock_max_hz": 2_000_000_000,
    "memory_clock_max_hz": 3_000_000_000,
    "dram_peak_bytes_per_s": 4.8e12,
    "fp64_flops_per_sm_cycle": 128.0,
    "fp32_flops_per_sm_cycle": 256.0,
    "fp16_flops_per_sm_cycle": 512.0,
    "tensor_fp64_flops_per_sm_cycle": 256.0,
    "tensor_tf32_flops_per_sm_cycle": 2048.0,
    "tensor_fp16_flops_per_sm_cycle": 4096.0,
    "tensor_fp8_flops_per_sm_cycle": 8192.0,
    "tensor_int8_ops_per_sm_cycle": 8192.0,
    "peaks_source": "test",
    "is_mig": False,
}


def class_id(*parts: object) -> int:
    """A 63-bit hash of `parts`, the same in every process, as the recorder makes it."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


class Trace:
    """Rows of one or more processes, written as shards by `write`.

    Every method that adds a row takes `process` (default: the first one's name) and further
    columns by keyword. Instants are nanoseconds after T0.
    """

    def __init__(self, run_dir: Path, process: str = PROCESS, source: str = "recorder") -> None:
        self.run_dir = run_dir
        self.process = process
        self.source = source
        self.rows: dict[tuple[str, str], list[Row]] = {}
        self._correlation = 0
        self._ranges = 0

    def add(self, table: str, process: str | None = None, **row: Any) -> None:
        """Append a row as it stands; columns not given are NULL."""
        self.rows.setdefault((table, process or self.process), []).append(row)

    def device(self, process: str | None = None, **columns: Any) -> None:
        """A device; an H200 but for `columns`."""
        self.add("devices", process, **{**DEVICE, **columns})

    def kernel_class(
        self,
        name: str,
        grid: tuple[int, int, int] = (1, 1, 1),
        block: tuple[int, int, int] = (128, 1, 1),
        *,
        process: str | None = None,
        registers: int | None = 32,
        static_shared: int | None = 0,
        dynamic_shared: int | None = 0,
        kernel_class_id: int | None = None,
        cluster: tuple[int, int, int] = (0, 0, 0),
    ) -> int:
        """A kernel class; returns its id, equal for equal arguments in every process."""
        if kernel_class_id is None:
            kernel_class_id = class_id(name, grid, block, registers, static_shared, dynamic_shared, cluster)
        self.add(
            "kernel_classes",
            process,
            kernel_class_id=kernel_class_id,
            name_mangled=f"_Z{name}",
            name=name,
            **dict(zip(("grid_x", "grid_y", "grid_z"), grid, strict=True)),
            **dict(zip(("block_x", "block_y", "block_z"), block, strict=True)),
            **dict(zip(("cluster_x", "cluster_y", "cluster_z"), cluster, strict=True)),
            registers_per_thread=registers,
            static_shared_bytes=static_shared,
            dynamic_shared_bytes=dynamic_shared,
            local_bytes_per_thread=0,
        )
        return kernel_class_id

    def kernel(
        self,
        kernel_class_id: int,
        start_ns: int | None = None,
        duration_ns: int | None = None,
        *,
        process: str | None = None,
        queued_ns: int | None = None,
        correlation_id: int | None = None,
        **columns: Any,
    ) -> int:
        """A launch; returns its correlation id. Without `queued_ns` it was queued as it started."""
        if correlation_id is None:
            self._correlation += 1
            correlation_id = self._correlation
        queued_ns = start_ns if queued_ns is None else queued_ns
        row: Row = {
            "kernel_class_id": kernel_class_id,
            "start_ns": _instant(start_ns),
            "duration_ns": duration_ns,
            "queued_ns": _instant(queued_ns),
            "correlation_id": correlation_id,
            "device_id": 0,
            "context_id": 1,
            "stream_id": 7,
        }
        self.add("kernels", process, **{**row, **columns})
        return correlation_id

    def exact(
        self,
        values: Mapping[str, float | None],
        *,
        process: str | None = None,
        kernel_class_id: int | None = None,
        correlation_id: int | None = None,
        measured_ns: int = 0,
        **columns: Any,
    ) -> None:
        """Raw metrics of one measured launch, one row each."""
        row: Row = {
            "scope": "kernel",
            "measured_ns": _instant(measured_ns),
            "device_id": 0,
            "correlation_id": correlation_id,
            "kernel_class_id": kernel_class_id,
            "passes": 1,
            "cost_ns": 1_000_000,
        }
        for metric, value in values.items():
            self.add("exact", process, **{**row, **columns}, metric=metric, value=value)

    def measure(
        self, kernel_class_id: int, launches: Iterable[Mapping[str, float | None]], process: str | None = None
    ) -> None:
        """Launches of a class under the exact profiler: counters by their nanalyze names.

        Each becomes a `kernels` row without times and its `exact` rows.
        """
        for values in launches:
            correlation_id = self.kernel(kernel_class_id, process=process)
            raw = {counters.BY_NAME[name].raw[0]: value for name, value in values.items()}
            self.exact(raw, process=process, kernel_class_id=kernel_class_id, correlation_id=correlation_id)

    def range(
        self,
        name: str,
        start_ns: int,
        end_ns: int | None,
        *,
        process: str | None = None,
        range_id: int | None = None,
        **columns: Any,
    ) -> int:
        """A range; returns its id."""
        if range_id is None:
            self._ranges += 1
            range_id = self._ranges
        row: Row = {
            "range_id": range_id,
            "depth": 0,
            "name": name,
            "source": "annotate",
            "thread_id": 1,
            "start_ns": _instant(start_ns),
            "end_ns": _instant(end_ns),
        }
        self.add("ranges", process, **{**row, **columns})
        return range_id

    def copy(self, kind: str, start_ns: int, duration_ns: int, size: int, **columns: Any) -> None:
        """A copy or memset of `size` bytes."""
        self._correlation += 1
        row: Row = {
            "start_ns": _instant(start_ns),
            "duration_ns": duration_ns,
            "kind": kind,
            "bytes": size,
            "device_id": 0,
            "context_id": 1,
            "stream_id": 7,
            "correlation_id": self._correlation,
        }
        self.add("copies", columns.pop("process", None), **{**row, **columns})

    def event(self, kind: str, message: str, layer: str = "timeline", count: int | None = None, at_ns: int = 0) -> None:
        """Something that happened to the recorder."""
        self.add("events", time_ns=_instant(at_ns), layer=layer, kind=kind, message=message, count=count)

    def state(self, time_ns: int, **columns: Any) -> None:
        """One reading of a device's clocks, power and temperature."""
        row: Row = {
            "time_ns": _instant(time_ns),
            "device_id": 0,
            "sm_clock_hz": 1_500_000_000,
            "memory_clock_hz": 3_000_000_000,
            "power_mw": 500_000,
            "temperature_c": 50,
            "throttle_reasons": 0,
        }
        self.add("device_state", columns.pop("process", None), **{**row, **columns})

    def pause(self, start_ns: int, end_ns: int, *, complete_ns: int | None = None, process: str | None = None) -> None:
        """A pause of the recorder, off at once."""
        row = {"start_ns": _instant(start_ns), "off_ns": _instant(start_ns), "end_ns": _instant(end_ns)}
        self.add("pauses", process, **row, complete_ns=_instant(complete_ns))

    def process_row(self, process: str | None = None, **columns: Any) -> None:
        """A row of `processes`; `write` adds one itself for a process that has none."""
        process = process or self.process
        host, rank, pid = process.rsplit("-", 2)
        row: Row = {
            "recorded_ns": T0,
            "host": host,
            "pid": int(pid),
            "rank": int(rank),
            "local_rank": int(rank),
            "world_size": 1,
            "started_ns": T0,
            "command": '["python", "train.py"]',
            "settings": "{}",
            "nanalyze_version": "0.1.0",
            "python_version": "3.11.0",
            "cuda_driver_version": 13000,
            "gpu_driver_version": "580.1",
            "cupti_version": 130001,
            "layers": "timeline,ranges,exact",
            "kernels_written": 0,
        }
        self.add("processes", process, **{**row, **columns})

    def write(self, shards: int = 1, *, end: bool = True) -> list[Shard]:
        """Write run.json and every table, its rows spread over `shards` files.

        With `end`, each process also gets its closing row, which counts the shards written.
        """
        runfile.create(self.run_dir, self.source, {})
        processes = sorted({process for _, process in self.rows}) or [self.process]
        for process in processes:
            if ("processes", process) not in self.rows:
                self.process_row(process)
        written: list[Shard] = []
        for (table, process), rows in self.rows.items():
            written += self._write_table(table, process, rows, 1 if table == "processes" else shards)
        if end:
            for process in processes:
                written.append(self._write_end(process, written))
        return written

    def _write_table(self, table: str, process: str, rows: list[Row], shards: int) -> list[Shard]:
        size = max(1, -(-len(rows) // shards))
        pieces = [rows[i : i + size] for i in range(0, len(rows), size)]
        return [
            write_shard(self.run_dir, table, process, number, arrow_table(TABLES[table], piece))
            for number, piece in enumerate(pieces, 1)
        ]

    def _write_end(self, process: str, written: list[Shard]) -> Shard:
        counts = Counter(shard.table for shard in written if shard.process == process)
        counts["processes"] += 1
        row = {
            **self.rows["processes", process][-1],
            "recorded_ns": T0 + 10**12,
            "ended_ns": T0 + 10**12,
            "ending": "stop",
            "kernels_written": len(self.rows.get(("kernels", process), [])),
            "records_lost": 0,
            "shards": json.dumps(counts),
            "recorder_cpu_ns": 1_000_000,
        }
        return write_shard(
            self.run_dir, "processes", process, counts["processes"], arrow_table(TABLES["processes"], [row])
        )


def arrow_table(table: Table, rows: list[Row]) -> pa.Table:
    """`rows` under the table's schema; unknown keys of an open-ended table become counters."""
    known = set(table.column_names)
    extra = tuple(sorted({key for row in rows for key in row} - known))
    return pa.Table.from_pylist(rows, schema=table.arrow_schema(extra))


def _instant(offset_ns: int | None) -> int | None:
    return None if offset_ns is None else T0 + offset_ns
