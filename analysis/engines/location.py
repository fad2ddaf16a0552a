"""Where a run lies, on this machine or not, and the catalog of its shards by their names.

A run directory may be a path or a URI of a file system that the engine has a connector for. What
cannot be listed by this machine is listed by the engine; no file is opened, because reading every byte once
to compare hashes, as `analysis.catalog.scan` does, is what an engine on many machines is there to avoid.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nanalyze.analysis import catalog
from nanalyze.rundir import objectstore
from nanalyze.rundir.errors import RunError
from nanalyze.rundir.objectstore import URI
from nanalyze.rundir.objectstore import UriPath as UriPath  # for those who name runs by this module

# What Spark calls the scheme; s3:// is what everyone else writes for its s3a.
SCHEMES = {"s3": "s3a", "s3a": "s3a", "gs": "gs", "hdfs": "hdfs", "file": "file"}


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


def for_duckdb(run_dir: str | Path) -> Path:
    """The path of a run that DuckDB is to read, or its URI in an object store. RunError for any other place."""
    place = of(run_dir)
    if place.is_local:
        return place.path
    if str(run_dir).startswith("hdfs:"):
        raise RunError(f"{run_dir}: DuckDB reads no HDFS. Give --engine spark --master URL, or copy it here.")
    return objectstore.checked(place.path)


def _known() -> str:
    *most, last = (f"{scheme}://" for scheme in SCHEMES)
    return f"{', '.join(most)} or {last}"


def cataloged(files: Iterable[tuple[str, int]]) -> catalog.Catalog:
    """The catalog of a run that holds `files`, (path within the run, bytes); shards have such paths too."""
    damage: list[catalog.Damage] = []
    sizes = dict(files)
    shards = []
    for shard in catalog.named(Path(), sorted(sizes.items()), damage):
        if sizes[shard.path.as_posix()]:
            shards.append(shard)
        else:
            path = shard.path.as_posix()
            damage.append(catalog.Damage(path, shard.table, shard.process, "is empty", catalog.RESTORE))
    return catalog.by_name(Path(), shards, damage)
