"""Measured ceilings of GPUs: their shape, and the file that keeps them by UUID for later recordings.

`nanalyze doctor --calibrate` writes them, a recording copies those of its devices into its table `ceilings`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from nanalyze.rundir import schema, shards
from nanalyze.rundir.errors import RecorderError

ENVIRONMENT = "NANALYZE_CEILINGS"
FORMAT, VERSION = "nanalyze ceilings", 1
MOST_BYTES = 4 << 20  # a file that is larger is none of ours
_TEXTS, _NUMBERS = ("ceiling", "method", "unit"), ("per_s", "low_per_s", "high_per_s")


@dataclass(frozen=True)
class Ceiling:
    """What one pipe or one level of the memory reached on one GPU; columns as in the table `ceilings`."""

    ceiling: str
    method: str
    unit: str
    per_s: float
    low_per_s: float
    high_per_s: float
    repetitions: int
    is_partial: bool
    measured_ns: int
    sm_clock_hz: int | None = None
    memory_clock_hz: int | None = None
    throttle_reasons: int | None = None

    @property
    def spread(self) -> float:
        """From the lowest to the highest repetition, over the median."""
        return (self.high_per_s - self.low_per_s) / self.per_s


ByDevice = dict[str, list[Ceiling]]  # by UUID


def cache_file() -> Path:
    """Where ceilings are kept: NANALYZE_CEILINGS, else nanalyze/ceilings.json in the user's cache folder."""
    named = os.environ.get(ENVIRONMENT)
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(cache) if os.path.isabs(cache) else Path("~/.cache").expanduser()
    return folder / "nanalyze" / "ceilings.json"


def read(path: Path) -> ByDevice:
    """The ceilings in `path` by UUID; none where there is no file. Raises RecorderError for one that is not ours."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RecorderError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        content = json.loads(data.decode("utf-8")) if len(data) <= MOST_BYTES else None
        if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("version") != VERSION:
            raise ValueError
        return {str(uuid): [_ceiling(row) for row in rows] for uuid, rows in content["devices"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise RecorderError(
            f"{path}: holds no ceilings of version {VERSION}: remove it and run nanalyze doctor --calibrate again"
        ) from None


def _ceiling(row: Mapping[str, Any]) -> Ceiling:
    """Raises ValueError, KeyError or TypeError for what is none."""
    found = Ceiling(**{field.name: row[field.name] for field in fields(Ceiling)})
    values = asdict(found)
    numbers = [values.pop(name) for name in _NUMBERS]
    if not all(isinstance(n, float | int) and math.isfinite(n) and n > 0 for n in numbers):
        raise ValueError
    if not all(isinstance(values.pop(name), str) for name in _TEXTS) or not isinstance(values.pop("is_partial"), bool):
        raise ValueError
    if not all(n is None or (isinstance(n, int) and abs(n) < 1 << 63) for n in values.values()):
        raise ValueError
    if found.repetitions is None or found.measured_ns is None:
        raise ValueError
    return found


def write(path: Path, measured: ByDevice) -> None:
    """Put `measured` into `path`; other devices in it stay. Raises RecorderError."""
    devices = {**read(path), **measured}
    content = {
        "format": FORMAT,
        "version": VERSION,
        "devices": {uuid: [asdict(row) for row in rows] for uuid, rows in devices.items()},
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise RecorderError(f"{path}: cannot be written: {error.strerror}. Choose another place with -o.") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def rows_of(devices: Iterable[Mapping[str, Any]], measured: ByDevice) -> list[dict[str, Any]]:
    """Rows of the table `ceilings` for those of `devices` (rows of that table) that were calibrated."""
    return [
        {"device_id": device["device_id"], **asdict(ceiling)}
        for device in devices
        for ceiling in measured.get(device["uuid"] or "", ())
    ]


def add_to_run(run_dir: Path, measured: ByDevice) -> int:
    """Add the ceilings to every process of a run that saw one of the devices; to how many.

    They become a further file of such a process, as if it had recorded them. Raises RecorderError where none did.
    """
    added = 0
    for folder in sorted((run_dir / "devices").glob("process=*")):
        match = shards.PARTITION_NAME.match(folder.name)
        if match is not None and (rows := rows_of(_devices(folder, match[1]), measured)):
            _add(run_dir, match[1], rows)
            added += 1
    if not added:
        raise RecorderError(f"{run_dir}: none of its processes used the GPUs that were measured, so nothing was added")
    return added


def _devices(folder: Path, process: str) -> list[dict[str, Any]]:
    """`device_id` and `uuid` of the devices that a process describes, from its good files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    known: dict[int, dict[str, Any]] = {}
    for shard in _shards(folder, "devices", process):
        try:
            data = shard.path.read_bytes()
            if shards.digest(data) != shard.digest:
                continue
            rows = pq.ParquetFile(pa.BufferReader(data)).read(columns=["device_id", "uuid"]).to_pylist()
        except (pa.ArrowException, OSError):  # `nanalyze info` says what is damaged
            continue
        known.update({row["device_id"]: row for row in rows})
    return list(known.values())


def _shards(folder: Path, table: str, process: str) -> list[shards.Shard]:
    found = (shards.parse(path, table, process) for path in sorted(folder.glob("[0-9]*")) if not path.is_symlink())
    return [shard for shard in found if shard is not None]


def _add(run_dir: Path, process: str, rows: list[dict[str, Any]]) -> None:
    from nanalyze.recorder.writer import to_arrow

    table = schema.TABLES["ceilings"]
    folder = shards.partition_dir(run_dir, table.name, process)
    number = 1 + max((shard.span[1] for shard in _shards(folder, table.name, process)), default=0)
    batch = {name: [row.get(name) for row in rows] for name in table.column_names}
    try:
        shards.write_shard(run_dir, table.name, process, number, to_arrow(table, [batch]))
    except OSError as error:
        raise RecorderError(f"{run_dir}: cannot be written: {error.strerror}") from error
