"""Parquet shards: written whole or not at all, each carrying its own hash in its name.

    run_dir/<table>/process=<process>/000001-<hash>.parquet
    run_dir/<table>/process=<process>/000002-000040-<hash>.parquet

The name holds what a reader needs to trust the file: a sequence number (a gap shows a lost
shard) and the 8-byte BLAKE2b hash of its bytes, as 16 hex digits. A shard that was merged from
several (`compaction`) has the first and the last of their numbers; it takes the place of every shard
whose numbers lie within its own, from the moment it has its name. So does one of `kernel_minutes`, whose
numbers are those of the shards of `kernels` that were rolled up into it. DuckDB verifies no page
checksums (117 of 120 flipped bits gave silently wrong sums), so readers check this hash
instead. Files whose name starts with a dot are unfinished and ignored by every engine.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanalyze.rundir.schema import DELTA, DICTIONARY, ROLLED_UP, TABLES, Table

if TYPE_CHECKING:
    import pyarrow as pa

SHARD_NAME = re.compile(r"^(\d{6,})(?:-(\d{6,}))?-([0-9a-f]{16})\.parquet$")
PARTITION_NAME = re.compile(r"^process=([A-Za-z0-9_.-]+)$")
ROW_GROUP_ROWS = 250_000


@dataclass(frozen=True)
class Shard:
    """One shard as its path describes it; nothing has been read yet. `last` is its last number if it was merged."""

    path: Path
    table: str
    process: str
    sequence: int
    digest: str
    last: int = 0

    @property
    def span(self) -> tuple[int, int]:
        """First and last number that it stands for."""
        return self.sequence, max(self.last, self.sequence)

    @property
    def place(self) -> tuple[str, str]:
        """Table and process whose numbers it has."""
        return ROLLED_UP.get(self.table, self.table), self.process


def parse(path: Path, table: str, process: str) -> Shard | None:
    """The shard at `path` by its name; None for a name that is no shard's."""
    match = SHARD_NAME.match(path.name)
    if match is None:
        return None
    first, last = int(match.group(1)), int(match.group(2) or match.group(1))
    return Shard(path, table, process, first, match.group(3), last) if last >= first else None


def outermost(found: Iterable[Shard]) -> list[Shard]:
    """The shards that no other one of the same place takes the place of, in the order given."""
    found = list(found)
    by_place: dict[tuple[str, str], list[Shard]] = {}
    for shard in found:
        by_place.setdefault(shard.place, []).append(shard)
    replaced: set[Path] = set()
    for group in by_place.values():
        widest: Shard | None = None
        # Wider ones first, so that what has been seen last reaches as far as anything before; of equal ones
        # those that were rolled up.
        for shard in sorted(group, key=lambda shard: (shard.span[0], -shard.span[1], shard.table not in ROLLED_UP)):
            if widest is None or shard.span[1] > widest.span[1]:
                widest = shard
            elif (shard.table, shard.span) != (widest.table, widest.span):
                replaced.add(shard.path)
    return [shard for shard in found if shard.path not in replaced]


def digest(data: bytes | memoryview) -> str:
    """The 16 hex digits that stand in a shard's name."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def digest_of(pieces: Iterable[bytes | memoryview]) -> str:
    """The same of a file that comes in pieces."""
    hashed = hashlib.blake2b(digest_size=8)
    for piece in pieces:
        hashed.update(piece)
    return hashed.hexdigest()


def partition_dir(run_dir: Path, table: str, process: str) -> Path:
    """The folder of a process's shards of one table.

    Raises ValueError for a process name that readers would not take for one.
    """
    folder = f"process={process}"
    if not PARTITION_NAME.fullmatch(folder):
        raise ValueError(f"process name {process!r}: only letters, digits, '_', '.' and '-' may stand in it")
    return run_dir / table / folder


def encode(rows: pa.Table, table: Table) -> pa.Buffer:
    """`rows` as the bytes of one Parquet file, each column encoded as its schema says.

    The encodings, row-group size and zstd level 1 were chosen by measurement; see
    `benchmarks/storage.py` and docs/measurements.md.
    Raises ValueError for rows that lack a column or hold NULL where the schema allows none.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    _check(rows, table)
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, row_group_size=ROW_GROUP_ROWS, **parquet_options(table, rows.schema.names))
    return sink.getvalue()


def parquet_options(table: Table, names: Sequence[str]) -> dict[str, Any]:
    """How `encode` writes the columns `names`, for pyarrow's writer."""
    declared = {leaf: c.encoding for c in table.columns for leaf in c.leaves}
    # In a histogram the bins ascend, the launches repeat.
    declared.update({leaf: DELTA for c in table.columns if c.type == "histogram" for leaf in c.leaves[:1]})
    encodings = {leaf: encoding for leaf, encoding in declared.items() if encoding != DICTIONARY}
    leaves = [leaf for name in names for leaf in (table.column(name).leaves if name in table.column_names else (name,))]
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": [leaf for leaf in leaves if leaf not in encodings],
        "column_encoding": encodings or None,
        "write_page_checksum": True,
        "store_schema": True,
    }


def _check(rows: pa.Table, table: Table) -> None:
    """Refuse what no reader could read back; old versions of pyarrow write it without a word."""
    for column in table.columns:
        if column.name not in rows.schema.names:
            raise ValueError(f"{table.name}: has no column {column.name}")
        if not column.nullable and rows[column.name].null_count:
            raise ValueError(f"{table.name}.{column.name}: holds NULL, which the schema does not allow")


def write_shard(run_dir: Path, table: str, process: str, sequence: int, rows: pa.Table) -> Shard:
    """Write `rows` as shard number `sequence`; a reader sees the whole file or none.

    Raises OSError when the directory is full, gone or not writable; no partial file is left
    under a name that readers accept.
    """
    data = memoryview(encode(rows, TABLES[table]))
    checksum = digest(data)
    folder = partition_dir(run_dir, table, process)
    path = folder / f"{sequence:06d}-{checksum}.parquet"
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{path.name}.tmp"
    try:
        with open(unfinished, "wb") as file:
            file.write(data)
        os.replace(unfinished, path)
    except BaseException:
        _remove_quietly(unfinished)
        raise
    return Shard(path, table, process, sequence, checksum)


def _remove_quietly(path: Path) -> None:
    """Remove what a failed write left; where even that fails, the reason of the write matters more."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return
