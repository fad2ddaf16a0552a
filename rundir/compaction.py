"""Merges the small shards of a run into larger ones, also while it is recorded.

A recorder writes a shard a table every few seconds; opening a run costs a little for each. Shards with
consecutive numbers become one whose name has the first and the last of them:

    000001-<hash>.parquet ... 000040-<hash>.parquet  ->  000001-000040-<hash>.parquet

Nothing is sorted, rounded or dropped: the rows stand in the merged shard in the order they had. It gets its
name by one rename, when it is whole and on disk, and from then on takes the place of the shards it was merged
from; those are removed afterwards. Whatever is interrupted where, each row is read once. The recorder only ever
adds shards with new numbers, so it is not disturbed. Damaged shards are not touched.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanalyze.rundir import runfile, shards
from nanalyze.rundir.errors import RunError
from nanalyze.rundir.schema import FORMAT_VERSION, TABLE_KEY, TABLES, VERSION_KEY, Table
from nanalyze.rundir.shards import PARTITION_NAME, ROW_GROUP_ROWS, Shard

if TYPE_CHECKING:
    import pyarrow as pa

LOCK_FILE = ".compact.lock"
# Some 9 million launches. `nanalyze top` reads the latest shard whole, and a merge holds at most this much twice.
TARGET_BYTES = 64 << 20
UNFINISHED = re.compile(r"^\.merging-[0-9]+-[0-9]+\.tmp$")

Step = Callable[[str], None]


@dataclass
class Result:
    """What `compact` did: shards merged and shards made of them, their bytes, and what was left as it was, with why."""

    merged: int = 0
    made: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    left: list[str] = field(default_factory=list)


class Unmergeable(Exception):
    """Why a shard stays as it is."""


def compact(run_dir: Path, *, target_bytes: int = TARGET_BYTES, step: Step = lambda name: None) -> Result:
    """Merge the shards of the run in `run_dir` up to about `target_bytes` each.

    `step` is called with the name of each partition before it is looked at. Raises RunError for what is no run,
    for one that is being compacted already and where files cannot be written or removed; the run is whole then too.
    """
    runfile.read(run_dir)
    result = Result()
    try:
        with _locked(run_dir):
            for table, process, folder in _partitions(run_dir):
                step(f"{table}/{process}")
                _compact_partition(folder, table, process, target_bytes, result)
    except OSError as error:
        where = error.filename or run_dir
        raise RunError(
            f"{where}: cannot compact: {error.strerror or error}. Nothing is lost: make room or give yourself write "
            "permission, and run it again."
        ) from error
    return result


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Hold the lock of the run; the kernel releases it with the process, however that ends."""
    try:
        import fcntl
    except ImportError:
        raise RunError(f"{run_dir}: cannot be compacted on this system, which has no file locks. Use Linux.") from None
    with open(run_dir / LOCK_FILE, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{run_dir}: is being compacted by another process. Wait until that has ended.") from None
        yield


def _partitions(run_dir: Path) -> Iterator[tuple[str, str, Path]]:
    for table in TABLES:
        folder = run_dir / table
        for name in sorted(os.listdir(folder)) if folder.is_dir() else []:
            match = PARTITION_NAME.match(name)
            if match is not None and (folder / name).is_dir() and not (folder / name).is_symlink():
                yield table, match.group(1), folder / name


def _compact_partition(folder: Path, table: str, process: str, target_bytes: int, result: Result) -> None:
    found = _listed(folder, table, process)
    current = sorted(shards.outermost(found), key=lambda shard: shard.span)
    if any(after.sequence <= before.span[1] for before, after in itertools.pairwise(current)):
        result.left.append(f"{table}/process={process}: has shard numbers more than once")
        return
    if not _remove_replaced(found, current):
        result.left.append(
            f"{table}/process={process}: a merged shard is damaged, those it was made of are still there"
        )
        return
    for group in _groups(current, target_bytes, result):
        try:
            _merge(folder, group, result)
        except Unmergeable as reason:  # it was good a moment ago
            result.left.append(f"{table}/process={process}: changed meanwhile: {reason}")


def _listed(folder: Path, table: str, process: str) -> list[Shard]:
    """The shards in `folder`; what an interrupted merge left unfinished is removed."""
    found = []
    for name in sorted(os.listdir(folder)):
        if UNFINISHED.match(name):
            (folder / name).unlink()
        elif (shard := shards.parse(folder / name, table, process)) is not None and not shard.path.is_symlink():
            found.append(shard)
    return found


def _remove_replaced(found: Sequence[Shard], current: Sequence[Shard]) -> bool:
    """Remove what an interrupted run left of shards that it had merged; False if the merged one is not good."""
    used = {shard.path for shard in current}
    for shard in (shard for shard in found if shard.path not in used):
        merged = next(c for c in current if c.sequence <= shard.sequence and shard.span[1] <= c.span[1])
        if not _is_whole(merged):
            return False
        shard.path.unlink()
    return True


def _is_whole(shard: Shard) -> bool:
    with open(shard.path, "rb") as file:
        return _hash(file) == shard.digest


def _hash(file: Any) -> str:
    return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()


# --- choosing --------------------------------------------------------------------------------------


def _groups(current: Sequence[Shard], target_bytes: int, result: Result) -> Iterator[list[Shard]]:
    """Runs of two or more good shards with consecutive numbers that make one of at most `target_bytes`.

    A shard of half that size or more stays alone, so that compacting again and again does not write the
    same rows again and again.
    """
    group: list[Shard] = []
    size = 0
    for shard in current:
        own = shard.path.stat().st_size
        fits = own < target_bytes // 2 and _is_good(shard, result)
        if group and not (fits and shard.sequence == group[-1].span[1] + 1 and size + own <= target_bytes):
            if len(group) > 1:
                yield group
            group, size = [], 0
        if fits:
            group.append(shard)
            size += own
    if len(group) > 1:
        yield group


def _is_good(shard: Shard, result: Result) -> bool:
    try:
        _rows(shard, names_only=True)
    except Unmergeable as reason:
        result.left.append(f"{shard.table}/process={shard.process}/{shard.path.name}: {reason}")
        return False
    return True


def _rows(shard: Shard, names_only: bool = False) -> pa.Table:
    """All rows of a shard; with `names_only` none, but checked. Raises Unmergeable."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = shard.path.read_bytes()
    if shards.digest(data) != shard.digest:
        raise Unmergeable("does not match the hash in its name")
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        schema = file.schema_arrow
        metadata = schema.metadata or {}
        expected = (str(FORMAT_VERSION).encode(), shard.table.encode())
        if (metadata.get(VERSION_KEY), metadata.get(TABLE_KEY)) != expected:
            raise Unmergeable("is of another format version or table")
        wanted = TABLES[shard.table].arrow_schema(_extra(TABLES[shard.table], schema.names))
        rows = schema.empty_table() if names_only else file.read()
        return rows.select(wanted.names).cast(wanted)
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise Unmergeable(f"does not have the table's columns ({error})") from error


def _extra(table: Table, names: Sequence[str]) -> tuple[str, ...]:
    """Columns beyond the declared ones. Raises ValueError where the table has none."""
    return tuple(name for name in names if name not in table.column_names)


# --- merging ---------------------------------------------------------------------------------------


def _merge(folder: Path, group: Sequence[Shard], result: Result) -> None:
    """Publish one shard with the rows of all in `group`, then remove those."""
    first, last = group[0].sequence, group[-1].span[1]
    before = [shard.path.stat() for shard in group]
    unfinished = folder / f".merging-{first}-{last}.tmp"
    try:
        checksum = _write(unfinished, group)
        # As old as its latest rows: who looks for the latest shards by age must not take it for one.
        os.utime(unfinished, ns=(before[-1].st_atime_ns, before[-1].st_mtime_ns))
        merged = folder / f"{first:06d}-{last:06d}-{checksum}.parquet"
        os.replace(unfinished, merged)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync(folder)
    for shard in group:
        shard.path.unlink()
    result.merged += len(group)
    result.made += 1
    result.bytes_before += sum(status.st_size for status in before)
    result.bytes_after += merged.stat().st_size


def _write(path: Path, group: Sequence[Shard]) -> str:
    """Write the rows of `group` in order to `path`, through to the disk; the hash of the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = TABLES[group[0].table]
    schema = _schema(table, group)
    options = shards.parquet_options(table, schema.names)
    written = expected = 0
    with open(path, "w+b") as file:
        with pq.ParquetWriter(file, schema, **options) as writer:
            pending: list[pa.Table] = []
            for shard in group:
                rows = _aligned(_rows(shard), schema)
                expected += rows.num_rows
                pending.append(rows)
                if sum(piece.num_rows for piece in pending) >= ROW_GROUP_ROWS:
                    pending = [_write_full_groups(writer, pa.concat_tables(pending))]
            rest = pa.concat_tables(pending)
            if rest.num_rows or not expected:
                writer.write_table(rest, row_group_size=ROW_GROUP_ROWS)
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        checksum = _hash(file)
        file.seek(0)
        written = pq.ParquetFile(file).metadata.num_rows
    if written != expected:
        raise RunError(f"{path}: has {written} rows, not {expected}. Nothing was changed; please report it.")
    return checksum


def _write_full_groups(writer: Any, rows: pa.Table) -> pa.Table:
    """Write as many whole row groups as `rows` fill; what remains."""
    full = rows.num_rows - rows.num_rows % ROW_GROUP_ROWS
    writer.write_table(rows.slice(0, full), row_group_size=ROW_GROUP_ROWS)
    return rows.slice(full)


def _schema(table: Table, group: Sequence[Shard]) -> pa.Schema:
    """The table's columns and every counter that any of the shards has."""
    extra: dict[str, None] = {}
    for shard in group if table.open_ended else ():
        extra.update(dict.fromkeys(_extra(table, _rows(shard, names_only=True).schema.names)))
    return table.arrow_schema(tuple(extra))


def _aligned(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """`rows` with NULL for counters that other shards have."""
    import pyarrow as pa

    columns = [rows.column(f.name) if f.name in rows.schema.names else pa.nulls(rows.num_rows, f.type) for f in schema]
    return pa.table(columns, schema=schema)


def _sync(folder: Path) -> None:
    """Have the new name on disk before the old ones are removed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some network file systems cannot, and order names themselves
    finally:
        os.close(descriptor)
