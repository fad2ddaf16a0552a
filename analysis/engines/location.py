"""Where a run lies, on this machine or not, and the catalog of its shards by their names.

A run directory may be a path or a URI of a file system that the engine has a connector for. What
cannot be listed by this machine is listed by the engine; no file is opened, because reading every byte once
to compare hashes, as `analysis.catalog.scan` does, is what an engine on many machines is there to avoid.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nanalyze.analysis import catalog
from nanalyze.rundir import shards as shardfiles
from nanalyze.rundir.errors import RunError
from nanalyze.rundir.schema import TABLES
from nanalyze.rundir.shards import PARTITION_NAME, Shard

# What Spark calls the scheme; s3:// is what everyone else writes for its s3a.
SCHEMES = {"s3": "s3a", "s3a": "s3a", "gs": "gs", "hdfs": "hdfs", "file": "file"}
URI = re.compile(r"^([a-z][a-z0-9+.-]*)://(.*)$", re.DOTALL)


class UriPath(type(Path())):  # type: ignore[misc]
    """A URI where a `Path` names a run: `str` gives it back with both slashes."""

    def __str__(self) -> str:
        return re.sub(r"^([a-z0-9]+):/+", r"\1://", super().__str__())


@dataclass(frozen=True)
class Location:
    """A run directory: `path` for messages and as a default for outputs, `uri` for Hadoop's file systems."""

    path: Path
    uri: str
    is_local: bool

    def child(self, relative: str) -> str:
        """URI of a file in it."""
        return f"{self.uri}/{relative}"


def is_uri(text: str) -> bool:
    """Whether `text` names a run by a URI."""
    return URI.match(text) is not None


def of(run_dir: str | Path) -> Location:
    """The location of a path or URI. RunError for a scheme that no run is read from."""
    text = str(run_dir)
    match = URI.match(text)
    if match is None:
        # The path as it is, not percent-encoded: Hadoop's Path takes it so.
        return Location(Path(run_dir), f"file://{Path(run_dir).resolve()}", True)
    scheme, rest = match.groups()
    if scheme not in SCHEMES:
        raise RunError(f"{text}: {scheme}:// is no place that runs are read from. Give a path or {_known()}.")
    if not rest.strip("/"):
        raise RunError(f"{text}: names no directory. Give the one that holds run.json.")
    rest = rest.rstrip("/")
    if scheme == "file":
        return Location(Path(f"/{rest.lstrip('/')}"), f"file:///{rest.lstrip('/')}", True)
    return Location(UriPath(text.rstrip("/")), f"{SCHEMES[scheme]}://{rest}", False)


def on_this_machine(run_dir: Path) -> Path:
    """The path of a run that DuckDB is to read. RunError for a place that it does not reach."""
    place = of(run_dir)
    if place.is_local:
        return place.path
    raise RunError(
        f"{run_dir}: DuckDB reads runs on this machine only. Give --engine spark --master URL, or copy it here."
    )


def _known() -> str:
    *most, last = (f"{scheme}://" for scheme in SCHEMES)
    return f"{', '.join(most)} or {last}"


def cataloged(files: Iterable[tuple[str, int]]) -> catalog.Catalog:
    """The catalog of a run that holds `files`, (path within the run, bytes); shards have such paths too."""
    damage: list[catalog.Damage] = []
    return catalog.by_name(Path(), list(_shards(sorted(files), damage)), damage)


def _shards(files: Iterable[tuple[str, int]], damage: list[catalog.Damage]) -> Iterator[Shard]:
    for relative, size in files:
        table, *rest = PurePosixPath(relative).parts
        if table not in TABLES or any(part.startswith((".", "_")) for part in rest):
            continue
        partition = PARTITION_NAME.match(rest[0]) if len(rest) == 2 else None
        process = partition.group(1) if partition else None
        shard = shardfiles.parse(Path(relative), table, process) if process is not None else None
        if shard is None:
            problem = "is not named process=<name>/<number>-<hash>.parquet, so nanalyze did not write it"
            remedy = "It was ignored: move it out of the run directory."
            damage.append(catalog.Damage(relative, table, process, problem, remedy))
        elif size == 0:
            damage.append(catalog.Damage(relative, table, process, "is empty", catalog.RESTORE))
        else:
            yield shard
