"""What the devices of a run can do, and what tracing added to the launches of each class: read once for all devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import duckdb
import numpy as np

from nanalyze.analysis.attribution_counters import Properties
from nanalyze.analysis.attribution_samples import Owners, owned
from nanalyze.rundir.sampled import TRACING_INSTRUCTIONS


@dataclass
class Facts:
    """`devices` by process and ordinal; `timed` are the processes whose kernels CUPTI timed.

    `shapes` are rows of class, blocks and threads a block.
    """

    devices: Mapping[tuple[str, int], Mapping[str, float]]
    timed: frozenset[str]
    shapes: Sequence[tuple[int | None, float | None, float | None]]
    _added: dict[tuple[float, float], dict[int | None, float]] = field(default_factory=dict)
    _shares: dict[float, dict[int | None, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, cursor: duckdb.DuckDBPyConnection) -> Facts:
        """Of a run. Raises duckdb.Error."""
        found = cursor.execute("SELECT * FROM devices")
        names = [column[0] for column in found.description or []]
        rows = [dict(zip(names, row, strict=True)) for row in found.fetchall()]
        devices = {(row["process"], row["device_id"]): _numbers(row) for row in rows}
        timed = cursor.execute("SELECT DISTINCT process FROM processes WHERE cupti_version IS NOT NULL").fetchall()
        shapes = cursor.execute(
            "SELECT kernel_class_id, grid_x::DOUBLE * grid_y * grid_z, block_x::DOUBLE * block_y * block_z "
            "FROM kernel_classes"
        ).fetchall()
        return cls(devices, frozenset(process for (process,) in timed), shapes)

    def properties(self, cursor: duckdb.DuckDBPyConnection, owners: Owners) -> Properties:
        """Of the device that these processes see. Raises duckdb.Error."""
        values = next((self.devices[owner] for owner in sorted(owners) if owner in self.devices), {})
        readings = cursor.execute(
            "SELECT time_ns, sm_clock_hz, memory_clock_hz FROM device_state AS s "
            f"WHERE {owned(owners, 's')} ORDER BY ALL"
        ).fetchall()
        added = self._tracing_instructions(owners, values)
        return Properties(values, _readings(readings, 1), _readings(readings, 2), added, self._sm_shares(values))

    def _sm_shares(self, values: Mapping[str, float]) -> dict[int | None, float]:
        """Share of the SMs that the blocks of each class can use, of those with fewer blocks than there are SMs."""
        sms = values.get("sm_count", 0.0)
        if sms not in self._shares:
            self._shares[sms] = {
                class_id: blocks / sms for class_id, blocks, _ in self.shapes if blocks is not None and 0 < blocks < sms
            }
        return self._shares[sms]

    def _tracing_instructions(self, owners: Owners, values: Mapping[str, float]) -> dict[int | None, float]:
        """Warp instructions that CUPTI added to a launch of each class; none where no CUPTI timed the kernels."""
        each = TRACING_INSTRUCTIONS.get((int(values.get("cc_major", 0)), int(values.get("cc_minor", 0))))
        if each is None or self.timed.isdisjoint(process for process, _ in owners):
            return {}
        width = values.get("warp_size", 32.0)
        if (each, width) not in self._added:
            self._added[each, width] = {
                class_id: each * blocks * float(np.ceil(threads / width))
                for class_id, blocks, threads in self.shapes
                if blocks is not None and threads is not None
            }
        return self._added[each, width]


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _readings(rows: Sequence[tuple[Any, ...]], column: int) -> tuple[Any, Any]:
    known = [(row[0], row[column]) for row in rows if row[column] is not None and row[column] > 0]
    return np.array([at for at, _ in known], dtype=float), np.array([value for _, value in known], dtype=float)
