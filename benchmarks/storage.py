"""Bytes a launch on disk, and time to write, for several ways to encode the `kernels` table.

    python benchmarks/storage.py                     # a synthetic training trace, 1 M launches
    python benchmarks/storage.py --run RUN_DIR       # the kernels that a recording holds
    python benchmarks/storage.py --shards            # also split into shards as a job writes them

The line `shards.encode` is what the recorder does; the others are what it was chosen against.
The synthetic trace is jittered in everything that is jittered on a GPU: durations are
log-normal around each class's own mean, gaps and queue times have noise down to the nanosecond,
correlation ids skip the API calls between launches.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from nanalyze.rundir import shards
from nanalyze.rundir.schema import DELTA, DICTIONARY, KERNELS, PLAIN

# What BYTE_STREAM_SPLIT saves, DuckDB before 2.0 cannot read: a way to compare with, not to use.
SPLIT = "BYTE_STREAM_SPLIT"

LAUNCHES_A_STEP = 790
CLASSES = 85
ROUNDS = 3


@dataclass(frozen=True)
class Way:
    """One way to turn rows into a Parquet file."""

    name: str
    encode: Callable[[pa.Table], pa.Buffer]


def synthetic(launches: int, seed: int = 7) -> pa.Table:
    """A training trace in the shape of a GPT-2-small step: 790 launches of 85 classes, two streams."""
    random = np.random.default_rng(seed)
    step = random.integers(0, CLASSES, LAUNCHES_A_STEP)
    side_stream = random.random(LAUNCHES_A_STEP) < 0.05
    calls_between = random.integers(1, 9, LAUNCHES_A_STEP)
    class_mean_ns = np.exp(random.normal(np.log(20_000), 1.0, CLASSES))
    class_ids = random.integers(0, 2**63 - 1, CLASSES, dtype=np.int64)

    position = np.arange(launches) % LAUNCHES_A_STEP
    classes = step[position]
    duration = np.maximum(class_mean_ns[classes] * np.exp(random.normal(0, 0.03, launches)), 800).astype(np.int64)
    gap = random.gamma(2.0, 500, launches).astype(np.int64)
    start = 1_790_000_000_000_000_000 + np.cumsum(duration + gap)
    ahead = np.cumsum(random.normal(0, 300, launches)).astype(np.int64)
    queued = start - 2_000_000 - np.abs(ahead) - random.integers(0, 4_000, launches)
    correlation = 1_000 + np.cumsum(calls_between[position] + (random.random(launches) < 0.02))
    columns: dict[str, Any] = {
        "start_ns": start,
        "duration_ns": duration,
        "kernel_class_id": class_ids[classes],
        "device_id": np.zeros(launches, np.int32),
        "context_id": np.ones(launches, np.int64),
        "stream_id": np.where(side_stream[position], 21, 7),
        "graph_id": pa.nulls(launches, pa.int64()),
        "graph_node_id": pa.nulls(launches, pa.int64()),
        "correlation_id": correlation,
        "queued_ns": queued,
    }
    return pa.table(columns, schema=KERNELS.arrow_schema())


def recorded(run_dir: Path) -> pa.Table:
    """The kernels of a run directory, in the order they were written."""
    files = sorted(str(path) for path in (run_dir / "kernels").glob("process=*/*.parquet"))
    if not files:
        sys.exit(f"{run_dir}: holds no kernels. Give a directory that nanalyze recorded.")
    return ds.dataset(files, format="parquet").to_table().cast(KERNELS.arrow_schema()).combine_chunks()


def _write(rows: pa.Table, **options: Any) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, row_group_size=shards.ROW_GROUP_ROWS, **options)
    return sink.getvalue()


def _encoded(changes: dict[str, str | None], **options: Any) -> Callable[[pa.Table], pa.Buffer]:
    """As `shards.encode`, with other encodings for some columns (None: through a dictionary)."""
    encodings: dict[str, str | None] = {c.name: c.encoding for c in KERNELS.columns if c.encoding != DICTIONARY}
    encodings.update(changes)
    columns = {name: encoding for name, encoding in encodings.items() if encoding}
    dictionary = [name for name in KERNELS.column_names if name not in columns]
    settings: dict[str, Any] = {"compression": "zstd", "compression_level": 1, "write_page_checksum": True, **options}
    return lambda rows: _write(rows, use_dictionary=dictionary, column_encoding=columns, **settings)


def _narrow_duration(rows: pa.Table) -> pa.Buffer:
    """Four bytes end at 2.1 seconds: longer kernels are cut here, which is why it is only compared with."""
    index = rows.schema.get_field_index("duration_ns")
    durations = pc.min_element_wise(rows["duration_ns"], pa.scalar(2**31 - 1, pa.int64()), skip_nulls=False)
    narrow = rows.set_column(index, "duration_ns", durations.cast(pa.int32()))
    return _encoded({})(narrow)


def ways() -> Iterator[Way]:
    yield Way("shards.encode", lambda rows: shards.encode(rows, KERNELS))
    yield Way("pyarrow's defaults (dictionary, snappy)", _write)
    yield Way("dictionary, zstd 1", lambda rows: _write(rows, compression="zstd", compression_level=1))
    yield Way("plain, zstd 1", lambda rows: _write(rows, compression="zstd", compression_level=1, use_dictionary=False))
    yield Way("duration_ns as int32", _narrow_duration)
    yield Way("duration_ns split", _encoded({"duration_ns": SPLIT}))
    yield Way("duration_ns delta", _encoded({"duration_ns": DELTA}))
    yield Way("duration_ns dictionary", _encoded({"duration_ns": None}))
    yield Way("correlation_id dictionary", _encoded({"correlation_id": None}))
    yield Way("start_ns, queued_ns plain", _encoded({"start_ns": PLAIN, "queued_ns": PLAIN}))
    yield Way("start_ns, queued_ns split", _encoded({"start_ns": SPLIT, "queued_ns": SPLIT}))
    yield Way("zstd 3", _encoded({}, compression_level=3))
    yield Way("zstd 9", _encoded({}, compression_level=9))
    yield Way("no compression", _encoded({}, compression="none", compression_level=None))
    yield Way("data pages version 2", _encoded({}, data_page_version="2.0"))


def measure(way: Way, pieces: list[pa.Table]) -> tuple[int, float]:
    """Bytes of all pieces, and the best of some rounds in seconds."""
    best = float("inf")
    size = 0
    for _ in range(ROUNDS):
        began = time.perf_counter()
        size = sum(way.encode(piece).size for piece in pieces)
        best = min(best, time.perf_counter() - began)
    return size, best


def split(rows: pa.Table, shard_rows: int) -> list[pa.Table]:
    return [rows.slice(offset, shard_rows) for offset in range(0, rows.num_rows, shard_rows)]


def column_bytes(rows: pa.Table) -> dict[str, float]:
    """Compressed bytes a launch of each column, as `shards.encode` writes it."""
    metadata = pq.read_metadata(pa.BufferReader(shards.encode(rows, KERNELS)))
    totals = dict.fromkeys(KERNELS.column_names, 0)
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(index)
            totals[chunk.path_in_schema] += chunk.total_compressed_size
    return {name: total / rows.num_rows for name, total in totals.items()}


def report(title: str, rows: pa.Table, shard_rows: int) -> None:
    pieces = split(rows, shard_rows)
    print(f"{title}: {rows.num_rows:,} launches in {len(pieces)} file(s)")
    print(f"  {'way':42}{'bytes/launch':>14}{'M launches/s':>14}")
    for way in ways():
        size, seconds = measure(way, pieces)
        print(f"  {way.name:42}{size / rows.num_rows:14.2f}{rows.num_rows / seconds / 1e6:14.1f}")
    print("  by column: " + ", ".join(f"{name} {size:.2f}" for name, size in column_bytes(rows).items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--launches", type=int, default=1_000_000, help="size of the synthetic trace")
    parser.add_argument("--run", type=Path, help="also measure the kernels of this run directory")
    parser.add_argument("--shards", action="store_true", help="also measure in shards of 50,000 and 5,000 launches")
    arguments = parser.parse_args()
    traces = {"synthetic": synthetic(arguments.launches)}
    if arguments.run:
        traces[str(arguments.run)] = recorded(arguments.run)
    for title, rows in traces.items():
        for shard_rows in (rows.num_rows, 50_000, 5_000) if arguments.shards else (rows.num_rows,):
            report(title, rows, shard_rows)


if __name__ == "__main__":
    main()
