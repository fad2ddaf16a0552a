"""One side of a comparison as a small file, to compare later runs with.

A Parquet file with a row for each total and kernel class of each run: its mean a repetition, batch by
batch, as 32-bit floats. Consecutive batches are averaged until there are at most VALUES in all, and no
fewer than FEWEST_BATCHES: the variance of a mean rests on slow changes, which averages keep. No launch
and no instant is stored. The header, JSON in the file's metadata, says under what it was measured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from nanalyze.analysis.compare.sample import Clock, CompareError, Facts, KernelClass, Sample
from nanalyze.analysis.statistics import Array

VERSION = 1
# 1: as described above.
VERSION_KEY, HEADER_KEY = b"nanalyze.baseline_version", b"nanalyze.baseline"
MOST_BATCHES, FEWEST_BATCHES, VALUES = 64, 16, 12_800
NAME_CHARACTERS = 2_000


def save(path: Path, samples: Sequence[Sample], *, force: bool = False) -> None:
    """Write `samples` to `path`, all at once. Raises CompareError where it exists or cannot be written."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.exists() and not force:
        raise CompareError(f"{path}: exists. Use --force to overwrite it.")
    rows = [row for run, sample in enumerate(samples) for row in _rows(run, sample)]
    schema = _schema(
        {VERSION_KEY: str(VERSION).encode(), HEADER_KEY: json.dumps([_header(s) for s in samples]).encode()}
    )
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), unfinished, compression="zstd", compression_level=9)
        os.replace(unfinished, path)
    except OSError as error:
        raise CompareError(f"{path}: cannot be written: {error.strerror or error}.") from error
    finally:
        unfinished.unlink(missing_ok=True)


def load(path: Path) -> list[Sample]:
    """The samples in `path`. Raises CompareError for any other file and for a newer version."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError, ValueError):
        raise CompareError(
            f"{path}: is no baseline. Write one with nanalyze compare RUN --save-baseline FILE."
        ) from None
    metadata = table.schema.metadata or {}
    version = metadata.get(VERSION_KEY, b"").decode("utf-8", "replace")
    if version != str(VERSION):
        raise CompareError(
            f"{path}: is a baseline of version {version or 'none'}, this nanalyze reads {VERSION}. Save it anew."
        )
    try:
        headers = json.loads(metadata[HEADER_KEY])
        rows = table.to_pylist()
        return [_sample(path, header, [r for r in rows if r["run"] == run]) for run, header in enumerate(headers)]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CompareError(f"{path}: is a damaged baseline ({type(error).__name__}). Save it anew.") from error


def _schema(metadata: Mapping[bytes, bytes]) -> Any:
    import pyarrow as pa

    values = pa.list_(pa.float32())
    return pa.schema(
        [
            ("run", pa.int32()),
            ("kernel_class_id", pa.int64()),
            ("name", pa.string()),
            ("details", pa.string()),
            ("launches", values),
            ("values", values),
        ],
        metadata=dict(metadata),
    )


def _header(sample: Sample) -> dict[str, Any]:
    return {
        "label": sample.label,
        "range_name": sample.range_name,
        "repetitions": sample.repetitions,
        "facts": asdict(sample.facts),
    }


def _rows(run: int, sample: Sample) -> list[dict[str, Any]]:
    batches = min(MOST_BATCHES, max(FEWEST_BATCHES, VALUES // max(len(sample.class_ids), 1)), sample.batches)
    rows = [
        {"run": run, "name": name, "values": _averaged(values[None], batches)[0]}
        for name, values in sample.totals.items()
    ]
    launches, times = _averaged(sample.launches, batches), _averaged(sample.kernel_ns, batches)
    for row, class_id in enumerate(sample.class_ids):
        details = asdict(sample.classes[class_id])
        name = details.pop("name")[:NAME_CHARACTERS]
        details["offset"] = float(sample.offsets[row]) if np.isfinite(sample.offsets[row]) else None
        rows.append(
            {
                "run": run,
                "kernel_class_id": class_id,
                "name": name,
                "details": json.dumps(details),
                "launches": launches[row],
                "values": times[row],
            }
        )
    return rows


def _averaged(values: Array, batches: int) -> Array:
    """(rows, n) to (rows, batches): means of consecutive columns, as many in each as the division allows."""
    edges = np.linspace(0, values.shape[1], batches + 1).astype(int)
    sums = np.add.reduceat(values, edges[:-1], axis=1)
    return np.asarray(sums / np.diff(edges), dtype=np.float64)


def _sample(path: Path, header: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Sample:
    totals = {row["name"]: np.array(row["values"], float) for row in rows if row["kernel_class_id"] is None}
    kept = [row for row in rows if row["kernel_class_id"] is not None]
    batches = len(totals["kernel_ns"])
    details = [json.loads(row["details"]) for row in kept]
    offsets = [found.pop("offset") for found in details]
    classes = {
        row["kernel_class_id"]: KernelClass(**{**found, "name": row["name"], "shape": tuple(found["shape"])})
        for row, found in zip(kept, details, strict=True)
    }
    return Sample(
        f"{path} ({header['label']})",
        header["range_name"],
        int(header["repetitions"]),
        totals,
        [row["kernel_class_id"] for row in kept],
        np.array([row["launches"] for row in kept], float).reshape(len(kept), batches),
        np.array([row["values"] for row in kept], float).reshape(len(kept), batches),
        np.array([np.nan if offset is None else offset for offset in offsets], float),
        classes,
        _facts(header["facts"]),
    )


def _facts(content: Mapping[str, Any]) -> Facts:
    plain: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in content.items()
    }
    plain["clocks"] = tuple(Clock(**clock) for clock in content["clocks"])
    return Facts(**plain)
