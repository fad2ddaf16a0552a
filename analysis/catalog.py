"""Finds the shards of a run directory and says which can be trusted.

Every shard is checked before DuckDB sees it, because DuckDB does not: it verifies no checksums
(a flipped bit gave silently wrong sums) and one bad file fails a whole query. What is left out
or missing is listed as `Damage`; everything else stays readable.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from nanalyze.rundir import objectstore
from nanalyze.rundir import shards as shardfiles
from nanalyze.rundir.schema import ROLLED_UP, TABLE_KEY, TABLES, VERSION_KEY, Table
from nanalyze.rundir.shards import PARTITION_NAME, Shard

if TYPE_CHECKING:
    import pyarrow as pa

    from nanalyze.analysis.remote import Copies

Progress = Callable[[int, int], None]

LISTINGS = 5  # at most, where shards are merged while the run is opened
FEW_BYTES = 1 << 25  # hashed in the time that threads take for the rest, which needs the GIL
REQUESTS = 16  # at once, of an object store: it answers each after some 20 ms, whatever the core does meanwhile

RESTORE = "Copy it again from where it was recorded; the rest of the run was read without it."
RECORD_AGAIN = "Its rows cannot be recovered; the rest of the run was read without them."
UPGRADE = "Upgrade nanalyze (pip install -U nanalyze) to read it."


@dataclass(frozen=True)
class Damage:
    """One shard, partition or file that was left out or is missing; `path` is within the run directory."""

    path: str
    table_name: str
    process: str | None
    problem: str
    remedy: str


@dataclass
class Catalog:
    """What a run directory holds: good shards a table, and the damage."""

    shards: dict[str, list[Shard]] = field(default_factory=lambda: {name: [] for name in TABLES})
    extra_columns: dict[str, list[str]] = field(default_factory=dict)
    damage: list[Damage] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not any(self.shards.values())

    def paths(self, table: str) -> list[str]:
        """The table's good files, by process and sequence."""
        return [str(shard.path) for shard in self.shards[table]]


class ShardProblem(Exception):
    """Why a shard was left out: a sentence for `problem` and one for `remedy`."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy


EMPTY = shardfiles.digest(b"")  # the hash of no bytes
Outcome = list[str] | ShardProblem  # of checking a shard: its columns beyond the declared ones


def scan(root: Path, *, verify: bool = True, progress: Progress | None = None, copies: Copies | None = None) -> Catalog:
    """The catalog of the run directory at `root`, an absolute path without symlinks or a URI in an object store.

    Without `verify` the hashes are not compared (the footers still are): quicker by reading less.
    `progress` is called with the shards checked so far and their number. Of a run in an object store, what `copies`
    has room for is kept as it is read, and stands in the catalog under its place there.
    """
    outcomes: dict[Path, Outcome] = {}
    for _ in range(LISTINGS):
        catalog = Catalog()
        found = _list(root, catalog.damage)
        _check_new(found, outcomes, root, verify, progress, copies)
        if not _was_compacted(found, root):
            break
    _take(catalog, root, found, outcomes)
    if copies is not None:
        catalog.shards = {table: [copies.of(shard) for shard in kept] for table, kept in catalog.shards.items()}
    # By name: a merged shard that is damaged is present all the same, and so are those it replaces.
    present = shardfiles.outermost(found)
    _report_gaps(root, present, catalog.damage)
    _report_lost_tail(root, present, catalog)
    _report_unannounced(root, present, catalog.damage)
    catalog.damage.sort(key=lambda d: (d.table_name, d.process or "", d.path, d.problem))
    return catalog


def _list(root: Path, damage: list[Damage]) -> list[Shard]:
    if objectstore.is_remote(root):
        return list(named(root, objectstore.listing(root), damage))
    return [shard for table in TABLES.values() for shard in _find(root, table, damage)]


def _check_new(
    found: list[Shard],
    outcomes: dict[Path, Outcome],
    root: Path,
    verify: bool,
    progress: Progress | None,
    copies: Copies | None,
) -> None:
    new = [shard for shard in found if shard.path not in outcomes]
    if copies is not None:
        copies.choose(new, objectstore.listing(root))
    for done, (shard, outcome) in enumerate(_checked(new, root, verify, copies), 1):
        outcomes[shard.path] = outcome
        if progress is not None:
            progress(done, len(new))


def _was_compacted(found: list[Shard], root: Path) -> bool:
    """Whether shards were merged or rolled up since `found` was listed, which may lack both them and the new one."""
    now = {shard.path: shard for shard in _list(root, [])}
    before = {shard.path for shard in found}
    return not before <= now.keys() or any(_replaces(now[path]) for path in now.keys() - before)


def _replaces(shard: Shard) -> bool:
    """Whether it may take the place of others: it was merged or rolled up."""
    return shard.last > shard.sequence or shard.table in ROLLED_UP


def _take(catalog: Catalog, root: Path, found: list[Shard], outcomes: Mapping[Path, Outcome]) -> None:
    """Put each shard that nothing good takes the place of into the catalog, or among its damage."""
    good = [shard for shard in found if not isinstance(outcomes[shard.path], ShardProblem)]
    used = {shard.path for shard in shardfiles.outermost(good)}
    replacing = [shard for shard in good if _replaces(shard)]
    for shard in found:
        outcome = outcomes[shard.path]
        if not isinstance(outcome, ShardProblem):
            if shard.path in used:
                catalog.shards[shard.table].append(shard)
                _note_extra(catalog, shard.table, outcome)
        elif shard in shardfiles.outermost([*replacing, shard]):
            catalog.damage.append(
                _damage(root, shard.path, shard.table, shard.process, outcome.problem, outcome.remedy)
            )


def by_name(root: Path, found: Iterable[Shard], damage: Iterable[Damage]) -> Catalog:
    """A catalog of shards by their names alone, for places where opening each is dear: no file is read."""
    catalog = Catalog(damage=list(damage))
    used = shardfiles.outermost(found)
    for shard in used:
        catalog.shards[shard.table].append(shard)
    _report_gaps(root, used, catalog.damage)
    _report_unannounced(root, used, catalog.damage)
    catalog.damage.sort(key=lambda d: (d.table_name, d.process or "", d.path, d.problem))
    return catalog


def of_shards(root: Path, shards: Iterable[Shard], verify: bool = False) -> Catalog:
    """A catalog of these shards alone, their footers checked, their hashes with `verify`; what fails is left out."""
    catalog = Catalog()
    for shard in shards:
        try:
            extra = _check(shard, root, verify)
        except ShardProblem:
            continue
        catalog.shards[shard.table].append(shard)
        _note_extra(catalog, shard.table, extra)
    return catalog


def _checked(shards: list[Shard], root: Path, verify: bool, copies: Copies | None) -> Iterator[tuple[Shard, Outcome]]:
    def check(shard: Shard) -> Outcome:
        try:
            return _check(shard, root, verify, copies)
        except ShardProblem as problem:
            return problem

    is_remote = objectstore.is_remote(root)
    if not is_remote and (not verify or sum(map(_bytes, shards)) < FEW_BYTES):
        yield from ((shard, check(shard)) for shard in shards)
        return
    with ThreadPoolExecutor(REQUESTS if is_remote else min(8, os.cpu_count() or 1)) as pool:
        yield from zip(shards, pool.map(check, shards), strict=True)


def _bytes(shard: Shard) -> int:
    try:
        return shard.path.stat().st_size
    except OSError:
        return 0


def _note_extra(catalog: Catalog, table: str, extra: list[str]) -> None:
    known = catalog.extra_columns.setdefault(table, [])
    known.extend(name for name in extra if name not in known)


# --- finding -----------------------------------------------------------------------------------


def _find(root: Path, table: Table, damage: list[Damage]) -> Iterator[Shard]:
    """Shards of one table by their names; what has no place there goes to `damage`."""
    for entry in _entries(root / table.name, root, table.name, None, damage):
        match = PARTITION_NAME.match(entry.name)
        if match is None:
            damage.append(_foreign(root, entry.path, table.name, None, "process=<name>"))
            continue
        process = match.group(1)
        for file in _entries(Path(entry.path), root, table.name, process, damage):
            shard = shardfiles.parse(Path(file.path), table.name, process)
            if shard is None:
                damage.append(_foreign(root, file.path, table.name, process, "<number>-<hash>.parquet"))
            else:
                yield shard


def named(root: Path, files: Iterable[tuple[str, int]], damage: list[Damage]) -> Iterator[Shard]:
    """Shards among `files`, (path within the run, bytes), where folders cannot be listed one by one."""
    for relative, _ in files:
        table, *rest = PurePosixPath(relative).parts
        if table not in TABLES or any(part.startswith((".", "_")) for part in rest):
            continue
        partition = PARTITION_NAME.match(rest[0]) if len(rest) == 2 else None
        process = partition.group(1) if partition else None
        shard = shardfiles.parse(root / relative, table, process) if process is not None else None
        if shard is None:
            problem = "is not named process=<name>/<number>-<hash>.parquet, so nanalyze did not write it"
            remedy = "It was ignored: move it out of the run directory."
            damage.append(Damage(relative, table, process, problem, remedy))
        else:
            yield shard


def _entries(folder: Path, root: Path, table: str, process: str | None, damage: list[Damage]) -> list[os.DirEntry[str]]:
    """Entries by name; none, and a note in `damage`, if the folder cannot be read or lies elsewhere."""
    if not folder.exists() and not folder.is_symlink():
        return []
    try:
        if _leaves(folder, root):
            problem = "is a symbolic link out of the run directory"
            damage.append(_damage(root, folder, table, process, problem, "Put the files themselves there."))
            return []
        with os.scandir(folder) as entries:
            # A leading dot or underscore marks unfinished and bookkeeping files for every engine.
            return sorted((e for e in entries if not e.name.startswith((".", "_"))), key=lambda e: e.name)
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        damage.append(_damage(root, folder, table, process, problem, "Give yourself read permission for it."))
        return []


def _leaves(path: Path, root: Path) -> bool:
    return not objectstore.is_remote(root) and not path.resolve().is_relative_to(root)


def _foreign(root: Path, path: str, table: str, process: str | None, expected: str) -> Damage:
    problem = f"is not named {expected}, so nanalyze did not write it"
    return _damage(root, Path(path), table, process, problem, "It was ignored: move it out of the run directory.")


def _damage(root: Path, path: Path, table: str, process: str | None, problem: str, remedy: str) -> Damage:
    return Damage(path.relative_to(root).as_posix(), table, process, problem, remedy)


# --- checking one shard ------------------------------------------------------------------------


def _check(shard: Shard, root: Path, verify: bool, copies: Copies | None = None) -> list[str]:
    """The shard's columns beyond the declared ones; ShardProblem if it cannot be used."""
    try:
        # The folders on the way to it were looked at when it was found.
        if not objectstore.is_remote(root) and shard.path.is_symlink() and _leaves(shard.path, root):
            raise ShardProblem("is a symbolic link out of the run directory", "Put the file itself there.")
        if not objectstore.is_remote(root) and shard.path.stat().st_size == 0:
            raise ShardProblem("is empty", RESTORE)
        found = _digest(shard, copies) if verify else shard.digest
        if found == EMPTY:
            raise ShardProblem("is empty", RESTORE)
        if found != shard.digest:
            raise ShardProblem("does not match the hash in its name: it was changed or cut short", RESTORE)
    except OSError as error:
        remedy = "Give yourself read permission for it."
        raise ShardProblem(f"cannot be read: {objectstore.reason(error)}", remedy) from error
    path = copies.of(shard).path if copies is not None else shard.path
    return _check_schema(_schema(path), TABLES[shard.table])


def _digest(shard: Shard, copies: Copies | None) -> str:
    if objectstore.is_remote(shard.path):
        return copies.fetch(shard) if copies is not None else objectstore.digest(shard.path)
    with open(shard.path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()


def _schema(path: Path) -> pa.Schema:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_schema(objectstore.source(path))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ShardProblem("is not a Parquet file, or its footer is damaged", RESTORE) from error


def _check_schema(schema: pa.Schema, table: Table) -> list[str]:
    metadata = schema.metadata or {}
    version = metadata.get(VERSION_KEY, b"").decode("utf-8", "replace")
    if not version:
        raise ShardProblem("is a Parquet file that nanalyze did not write", "Move it out of the run directory.")
    if version != str(table.version):
        raise ShardProblem(f"has format version {version!r}, this nanalyze reads version {table.version}", UPGRADE)
    written_for = metadata.get(TABLE_KEY, b"").decode("utf-8", "replace")
    if written_for != table.name:
        problem = f"belongs to table {written_for!r}, not {table.name!r}"
        raise ShardProblem(problem, f"Move it to the folder {written_for}/.")
    return _check_columns(schema, table)


def _check_columns(schema: pa.Schema, table: Table) -> list[str]:
    names = schema.names
    extra = [name for name in names if name not in table.column_names]
    problems = _column_problems(schema, table)
    if len(set(names)) != len(names):
        problems.append("has columns of the same name")
    if not table.open_ended:
        problems += [f"has an unknown column {name!r}" for name in extra]
    else:
        problems += [f"column {n!r} is {schema.field(n).type}, not double" for n in extra if not _is_double(schema, n)]
    if problems:
        raise ShardProblem("; ".join(problems), RECORD_AGAIN)
    return extra


def _column_problems(schema: pa.Schema, table: Table) -> list[str]:
    problems = []
    for column in table.columns:
        index = schema.get_field_index(column.name)
        if index < 0:
            if column.name not in schema.names:
                problems.append(f"column {column.name!r} is missing")
        elif (found := _type_name(schema.field(index).type)) != column.type:
            problems.append(f"column {column.name!r} is {found}, not {column.type}")
    return problems


def _type_name(arrow_type: pa.DataType) -> str:
    """The name `schema.py` uses; the string types differ in memory only, not in the file."""
    import pyarrow as pa

    if pa.types.is_list(arrow_type):
        item = arrow_type.value_type
        inner = [(f.name, str(f.type)) for f in item] if pa.types.is_struct(item) else []
        return "histogram" if inner == [("bin", "int32"), ("launches", "int64")] else str(arrow_type)
    if pa.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    if pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type):
        return "string"
    return {"double": "float64"}.get(str(arrow_type), str(arrow_type))


def _is_double(schema: pa.Schema, name: str) -> bool:
    return schema.get_field_index(name) >= 0 and str(schema.field(name).type) == "double"


# --- missing shards ----------------------------------------------------------------------------


def _by_partition(shards: Iterable[Shard]) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """First and last number of each shard, by the table and process whose numbers they are."""
    spans: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for shard in shards:
        spans.setdefault(shard.place, []).append(shard.span)
    return spans


def _report_gaps(root: Path, found: list[Shard], damage: list[Damage]) -> None:
    """Numbers run from 1 without a gap, so a gap is a lost shard and a number used twice a clash."""
    for (table, process), spans in _by_partition(found).items():
        previous = 0
        for number, last in sorted(spans):
            if number > previous + 1:
                damage.append(_lost(root, table, process, previous + 1, number - 1))
            elif number <= previous:
                folder = root / table / f"process={process}"
                problem = f"has shard number {number} more than once"
                remedy = "All were read, so rows may be counted twice: keep the right one."
                damage.append(_damage(root, folder, table, process, problem, remedy))
            previous = max(previous, last)


def _report_lost_tail(root: Path, found: list[Shard], catalog: Catalog) -> None:
    """Shards that a process says it wrote but that are not there."""
    _report_missing(root, found, catalog, _declared(_process_rows(catalog)))


def note_lost_tail(root: Path, catalog: Catalog, rows: Iterable[Mapping[str, Any]]) -> None:
    """The same for a catalog made `by_name`, with the rows of the table `processes`."""
    _report_missing(root, [shard for shards in catalog.shards.values() for shard in shards], catalog, _declared(rows))
    catalog.damage.sort(key=lambda d: (d.table_name, d.process or "", d.path, d.problem))


def _report_missing(
    root: Path, found: list[Shard], catalog: Catalog, declared: Mapping[str, Mapping[str, int]]
) -> None:
    present = _by_partition(found)
    for process, counts in declared.items():
        for table, count in counts.items():
            last = max((last for _, last in present.get((table, process), [])), default=0)
            if table in TABLES and count > last:
                catalog.damage.append(_lost(root, table, process, last + 1, count))


def _report_unannounced(root: Path, found: list[Shard], damage: list[Damage]) -> None:
    """A process writes its row in `processes` before anything else, so one without has lost it."""
    announced = {shard.process for shard in found if shard.table == "processes"}
    for process in sorted({shard.process for shard in found} - announced):
        damage.append(_lost(root, "processes", process, 1, 1))


def _process_rows(catalog: Catalog) -> Iterator[dict[str, Any]]:
    """What `_declared` needs of the rows of `processes`; unreadable shards have none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for shard in catalog.shards["processes"]:
        try:
            rows = pq.ParquetFile(objectstore.source(shard.path)).read(columns=["recorded_ns", "shards"]).to_pylist()
        except (pa.ArrowException, OSError):
            continue
        yield from ({**row, "process": shard.process} for row in rows)


def _declared(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Shards a table by process, as each process's closing row in `processes` counts them."""
    latest: dict[str, tuple[int, str]] = {}
    for row in rows:
        if row["shards"] and row["recorded_ns"] >= latest.get(row["process"], (0, ""))[0]:
            latest[row["process"]] = (row["recorded_ns"], row["shards"])
    return {process: _counts(text) for process, (_, text) in latest.items()}


def _counts(text: str) -> dict[str, int]:
    try:
        counts = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return {}
    if not isinstance(counts, dict):
        return {}
    return {table: count for table, count in counts.items() if isinstance(count, int)}


def _lost(root: Path, table: str, process: str, first: int, last: int) -> Damage:
    which = f"shard {first} is" if first == last else f"shards {first} to {last} are"
    folder = root / table / f"process={process}"
    return _damage(root, folder, table, process, f"{which} missing", RESTORE.replace("it", "the folder", 1))
