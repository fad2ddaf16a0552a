"""Merges the small shards of a run into larger ones and rolls old launches up, also while it is recorded.

A recorder writes a shard a table every few seconds; opening a run costs a little for each. Shards with
consecutive numbers become one whose name has the first and the last of them:

    000001-<hash>.parquet ... 000040-<hash>.parquet  ->  000001-000040-<hash>.parquet

Nothing is sorted, rounded or dropped: the rows stand in the merged shard in the order they had. It gets its
name by one rename, when it is whole and on disk, and from then on takes the place of the shards it was merged
from; those are removed afterwards. Whatever is interrupted where, each row is read once. The recorder only ever
adds shards with new numbers, so it is not disturbed. Damaged shards are not touched.

`roll_up` puts one shard of `kernel_minutes` in the place of shards of `kernels`, in the same way: it has their
numbers, and from the moment it has its name readers take it instead of them.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanalyze.rundir import rollup, runfile, shards
from nanalyze.rundir.errors import RunError
from nanalyze.rundir.schema import (
    EXACT,
    KERNEL_MINUTES,
    KERNELS,
    ROLLED_UP,
    SAMPLED_WINDOWS,
    SAMPLES,
    TABLE_KEY,
    TABLES,
    VERSION_KEY,
    Table,
)
from nanalyze.rundir.shards import PARTITION_NAME, ROW_GROUP_ROWS, Shard

if TYPE_CHECKING:
    import pyarrow as pa

LOCK_FILE = ".compact.lock"
# Some 9 million launches. `nanalyze top` reads the latest shard whole, and a merge holds at most this much twice.
TARGET_BYTES = 64 << 20
# Launches that one rolled-up shard stands for; summing up 8 million takes some 1.5 GB.
ROLL_UP_ROWS = 8_000_000
# Samples that one window stands for, and its length unless one shard is longer: an hour of samples of 1 ms.
WINDOW_ROWS = 4_000_000
WINDOW_NS = 3_600_000_000_000
UNFINISHED = re.compile(r"^\.merging-[0-9]+-[0-9]+\.tmp$")

Step = Callable[[str], None]
# Attributes the samples in these whole shards to kernels: the rows of `sampled_windows` (analysis.rolled_samples).
Attribute = Callable[[Path, Sequence[Shard]], "pa.Table"]


@dataclass
class Result:
    """What `compact` did: shards merged and shards made of them, their bytes, and what was left as it was, with why."""

    merged: int = 0
    made: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    left: list[str] = field(default_factory=list)


@dataclass
class RolledUp:
    """What `roll_up` did: shards, launches and samples replaced, rows made of them, bytes, and what was left, with why.

    `end_ns` is the end of the last minute that was rolled up; None where nothing was.
    """

    shards: int = 0
    launches: int = 0
    samples: int = 0
    rows: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    end_ns: int | None = None
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
    with _locked(run_dir):
        for table, process, folder in _partitions(run_dir):
            step(f"{table}/{process}")
            _compact_partition(folder, table, process, target_bytes, result)
    return result


def roll_up(
    run_dir: Path,
    before_ns: int,
    *,
    lose_samples: bool = False,
    attribute: Attribute | None = None,
    step: Step = lambda name: None,
) -> RolledUp:
    """Replace the launches of the run in `run_dir` that ended before `before_ns` by sums a minute.

    Only whole shards, each process's earliest ones: what is younger than any launch that stays, stays too. Shards
    are complete when they have their names, so a process that is still recording is not in the way. Samples
    cannot be attributed to launches that are gone, so with `attribute` whole shards of them are replaced by counters
    of kernels first, and launches stay where samples do. Without it the call is refused where the run has samples of
    that time, unless `lose_samples`. `step` is called with the name of each process. Raises RunError as `compact`.
    """
    runfile.read(run_dir)
    result = RolledUp()
    with _locked(run_dir):
        if not lose_samples and attribute is not None:
            for _, process, folder in list(_partitions(run_dir, (SAMPLES.name,))):
                step(process)
                _roll_up_samples(run_dir, folder, process, before_ns, attribute, result)
            left = _earliest(run_dir, SAMPLES.name)
            before_ns = before_ns if left is None else min(before_ns, left)
        elif not lose_samples:
            _refuse_samples(run_dir, before_ns)
        for _, process, folder in list(_partitions(run_dir, (KERNELS.name,))):
            step(process)
            _roll_up_partition(run_dir, folder, process, before_ns, result)
    return result


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Hold the lock of the run; RunError for what the system refuses meanwhile."""
    try:
        with _only_one(run_dir):
            yield
    except OSError as error:
        where = error.filename or run_dir
        raise RunError(
            f"{where}: cannot compact: {error.strerror or error}. Nothing is lost: make room or give yourself write "
            "permission, and run it again."
        ) from error


@contextmanager
def _only_one(run_dir: Path) -> Iterator[None]:
    """Hold the lock; the kernel releases it with the process, however that ends."""
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


def _partitions(run_dir: Path, tables: Sequence[str] = tuple(TABLES)) -> Iterator[tuple[str, str, Path]]:
    for table in tables:
        folder = run_dir / table
        for name in sorted(os.listdir(folder)) if folder.is_dir() else []:
            match = PARTITION_NAME.match(name)
            if match is not None and (folder / name).is_dir() and not (folder / name).is_symlink():
                yield table, match.group(1), folder / name


def _compact_partition(folder: Path, table: str, process: str, target_bytes: int, result: Result) -> None:
    current = [shard for shard in _current(folder, table, process, result.left) if shard.table == table]
    for group in _groups(current, target_bytes, result):
        try:
            _merge(folder, group, result)
        except Unmergeable as reason:  # it was good a moment ago
            result.left.append(f"{table}/process={process}: changed meanwhile: {reason}")


def _current(folder: Path, table: str, process: str, left: list[str]) -> list[Shard]:
    """The shards that count, by number, those of the same numbers in another table too; the others are removed.

    None, and a line in `left`, where that cannot be told.
    """
    place = ROLLED_UP.get(table, table)
    sharing = [name for name in TABLES if ROLLED_UP.get(name, name) == place]
    found = [shard for name in sharing for shard in _listed(folder.parents[1] / name / folder.name, name, process)]
    current = sorted(shards.outermost(found), key=lambda shard: shard.span)
    if any(after.sequence <= before.span[1] for before, after in itertools.pairwise(current)):
        left.append(f"{table}/process={process}: has shard numbers more than once")
        return []
    if not _remove_replaced(found, current):
        left.append(f"{table}/process={process}: a merged shard is damaged, those it was made of are still there")
        return []
    return current


def _listed(folder: Path, table: str, process: str) -> list[Shard]:
    """The shards in `folder`, none where it is missing; what an interrupted merge left unfinished is removed."""
    if not folder.is_dir() or folder.is_symlink():
        return []
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


def _rows(shard: Shard, names_only: bool = False, columns: Sequence[str] | None = None) -> pa.Table:
    """All rows of a shard, or some columns of them; with `names_only` none, but checked. Raises Unmergeable."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = shard.path.read_bytes()
    if shards.digest(data) != shard.digest:
        raise Unmergeable("does not match the hash in its name")
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        schema = file.schema_arrow
        metadata = schema.metadata or {}
        expected = (str(TABLES[shard.table].version).encode(), shard.table.encode())
        if (metadata.get(VERSION_KEY), metadata.get(TABLE_KEY)) != expected:
            raise Unmergeable("is of another format version or table")
        wanted = TABLES[shard.table].arrow_schema(_extra(TABLES[shard.table], schema.names))
        rows = schema.empty_table() if names_only else file.read(columns=columns)
        if columns is not None:
            wanted = pa.schema([wanted.field(name) for name in columns])
        return rows.select(wanted.names).cast(wanted)
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise Unmergeable(f"does not have the table's columns ({error})") from error


def _extra(table: Table, names: Sequence[str]) -> tuple[str, ...]:
    """Columns beyond the declared ones. Raises ValueError where the table has none."""
    return tuple(name for name in names if name not in table.column_names)


# --- merging ---------------------------------------------------------------------------------------


def _merge(folder: Path, group: Sequence[Shard], result: Result) -> None:
    """Publish one shard with the rows of all in `group`, then remove those."""
    table = TABLES[group[0].table]
    schema = _schema(table, group)
    sizes = _replace(folder, group, table, schema, (_aligned(_rows(shard), schema) for shard in group))
    result.merged += len(group)
    result.made += 1
    result.bytes_before += sizes[0]
    result.bytes_after += sizes[1]


def _replace(
    folder: Path, group: Sequence[Shard], table: Table, schema: pa.Schema, pieces: Iterable[pa.Table]
) -> tuple[int, int]:
    """Publish `pieces` as one shard of `table` with the numbers of `group`, then remove that; bytes before, after."""
    first, last = group[0].sequence, group[-1].span[1]
    before = [shard.path.stat() for shard in group]
    unfinished = folder / f".merging-{first}-{last}.tmp"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        checksum = _write(unfinished, table, schema, pieces)
        # As old as its latest rows: who looks for the latest shards by age must not take it for one.
        os.utime(unfinished, ns=(before[-1].st_atime_ns, before[-1].st_mtime_ns))
        made = folder / f"{first:06d}-{last:06d}-{checksum}.parquet"
        os.replace(unfinished, made)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync(folder)
    for shard in group:
        shard.path.unlink()
    return sum(status.st_size for status in before), made.stat().st_size


def _write(path: Path, table: Table, schema: pa.Schema, pieces: Iterable[pa.Table]) -> str:
    """Write `pieces` in order to `path`, through to the disk; the hash of the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    options = shards.parquet_options(table, schema.names)
    written = expected = 0
    with open(path, "w+b") as file:
        with pq.ParquetWriter(file, schema, **options) as writer:
            pending: list[pa.Table] = []
            for rows in pieces:
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


# --- rolling up ------------------------------------------------------------------------------------


def _refuse_samples(run_dir: Path, before_ns: int) -> None:
    """RunError if samples were taken before `before_ns` while launches of that time are still there."""
    kernels = _earliest(run_dir, KERNELS.name)
    samples = _earliest(run_dir, SAMPLES.name)
    if kernels is None or samples is None or kernels >= before_ns or samples >= before_ns:
        return
    raise RunError(
        f"{run_dir}: holds samples of that time, whose counters cannot be told apart by kernel without its launches. "
        "Keep what they say (`nanalyze export`, or the report), then pass --lose-samples."
    )


def _earliest(run_dir: Path, table: str) -> int | None:
    """The first start in a table by the footers of its shards, damaged ones left out; None where there is none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = []
    for _, process, folder in _partitions(run_dir, (table,)):
        for shard in _listed(folder, table, process):
            try:
                found.append((statistics(pq.read_metadata(shard.path))[0], shard))
            except (pa.ArrowException, OSError, ValueError):
                continue  # damaged: it is not rolled up
    stated = sorted(((start, shard) for start, shard in found if start is not None), key=lambda one: one[0])
    return next((start for start, shard in stated if _is_whole(shard)), None)


def statistics(metadata: Any) -> tuple[int | None, int | None]:
    """Least and greatest `start_ns` of a file; None where its footer does not say."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(at) for group in groups for at in range(group.num_columns)]
    stated = [c.statistics for c in columns if c.path_in_schema == "start_ns" and c.statistics is not None]
    known = [one for one in stated if one.has_min_max]
    return min((one.min for one in known), default=None), max((one.max for one in known), default=None)


def _roll_up_samples(
    run_dir: Path, folder: Path, process: str, before_ns: int, attribute: Attribute, result: RolledUp
) -> None:
    """Replace whole shards of samples, each process's first ones, by what they say of kernels in windows of time."""
    current = [s for s in _current(folder, SAMPLES.name, process, result.left) if s.table == SAMPLES.name]
    for group, rows in _windows(current, before_ns, result):
        made = attribute(run_dir, group)
        runfile.raise_version(run_dir, SAMPLED_WINDOWS.version)
        target = run_dir / SAMPLED_WINDOWS.name / folder.name
        sizes = _replace(target, group, SAMPLED_WINDOWS, made.schema, [made])
        result.shards += len(group)
        result.samples += rows
        result.rows += made.num_rows
        result.bytes_before += sizes[0]
        result.bytes_after += sizes[1]
        if made.num_rows:
            result.end_ns = max(made.column("end_ns")[0].as_py(), result.end_ns or 0)


def _windows(current: Sequence[Shard], before_ns: int, result: RolledUp) -> Iterator[tuple[list[Shard], int]]:
    """Consecutive shards of samples that all began before `before_ns`, as one window, and their rows."""
    group: list[Shard] = []
    total, began = 0, 0
    for shard in current:
        if not _may_be_old(shard, before_ns):
            break
        try:
            rows = _rows(shard, columns=("start_ns",))
        except Unmergeable as reason:
            result.left.append(f"{shard.table}/process={shard.process}/{shard.path.name}: {reason}")
            continue
        starts = rows.column("start_ns").to_numpy()
        last = int(starts.max()) if len(starts) else began
        full = total + len(starts) > WINDOW_ROWS or last - began > WINDOW_NS
        if group and (full or shard.sequence != group[-1].span[1] + 1):
            yield group, total
            group, total = [], 0
        if not group and len(starts):
            began = int(starts.min())
        group.append(shard)
        total += len(starts)
    if group:
        yield group, total


def _roll_up_partition(run_dir: Path, folder: Path, process: str, before_ns: int, result: RolledUp) -> None:
    current = [s for s in _current(folder, KERNELS.name, process, result.left) if s.table == KERNELS.name]
    exact_ns: list[Any] = []  # read when it is first needed
    for group, rows in _old_groups(current, before_ns, result):
        if not exact_ns:
            exact_ns.append(_exact_durations(run_dir, process))
            runfile.raise_version(run_dir, KERNEL_MINUTES.version)
        made = rollup.minutes(rows, exact_ns[0])
        if sum(made.column("launches").to_pylist()) != rows.num_rows:
            raise RunError(
                f"{folder}: {rows.num_rows} launches were not all summed up. Nothing was changed; report it."
            )
        target = run_dir / KERNEL_MINUTES.name / folder.name
        sizes = _replace(target, group, KERNEL_MINUTES, made.schema, [made])
        result.shards += len(group)
        result.launches += rows.num_rows
        result.rows += made.num_rows
        result.bytes_before += sizes[0]
        result.bytes_after += sizes[1]
        if made.num_rows:
            last = max(made.column("minute_ns").to_pylist()) + rollup.MINUTE_NS
            result.end_ns = max(last, result.end_ns or 0)


def _old_groups(current: Sequence[Shard], before_ns: int, result: RolledUp) -> Iterator[tuple[list[Shard], pa.Table]]:
    """Consecutive shards from the first on whose launches all ended before `before_ns`, with their rows."""
    import pyarrow as pa

    group: list[Shard] = []
    pieces: list[pa.Table] = []
    for shard in current:
        try:
            rows = _rows(shard, columns=rollup.COLUMNS) if _may_be_old(shard, before_ns) else None
        except Unmergeable as reason:
            result.left.append(f"{shard.table}/process={shard.process}/{shard.path.name}: {reason}")
            continue
        if rows is None or rollup.latest(rows) >= before_ns:
            break
        full = sum(piece.num_rows for piece in pieces) + rows.num_rows > ROLL_UP_ROWS
        if group and (full or shard.sequence != group[-1].span[1] + 1):
            yield group, pa.concat_tables(pieces)
            group, pieces = [], []
        group.append(shard)
        pieces.append(rows)
    if group:
        yield group, pa.concat_tables(pieces)


def _may_be_old(shard: Shard, before_ns: int) -> bool:
    """By the footer alone, which spares reading what is too young."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        latest = statistics(pq.read_metadata(shard.path))[1]
    except (pa.ArrowException, OSError, ValueError):
        return True  # reading it says why it cannot be used
    return latest is None or latest < before_ns


def _exact_durations(run_dir: Path, process: str) -> tuple[Any, Any]:
    """Correlation ids, ascending, and durations of the launches that the profiler timed."""
    import numpy as np

    found: dict[int, float] = {}
    folder = run_dir / EXACT.name / f"process={process}"
    for shard in shards.outermost(_listed(folder, EXACT.name, process)):
        try:
            rows = _rows(shard, columns=("scope", "metric", "correlation_id", "value"))
        except Unmergeable:
            continue  # no reader takes it either
        for scope, metric, number, value in zip(*(column.to_pylist() for column in rows.columns), strict=True):
            is_duration = scope == "kernel" and metric == rollup.DURATION_METRIC and number is not None
            if is_duration and value is not None and 0 <= value <= rollup.LONGEST_NS:
                found[number] = max(value, found.get(number, 0.0))
    ids = np.array(sorted(found), np.int64)
    return ids, np.array([int(found[number] + 0.5) for number in ids.tolist()], np.int64)


def _sync(folder: Path) -> None:
    """Have the new name on disk before the old ones are removed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some network file systems cannot, and order names themselves
    finally:
        os.close(descriptor)
