"""Has DuckDB read a run in an object store: from copies where it is small, else by httpfs, else through fsspec.

Hashes are checked by reading every byte once, and a report asks for each of many small shards a hundred times: so what
was read is kept on this machine for as long as the run is open, up to COPIED_BYTES, smaller tables first. DuckDB reads
the rest where it lies. Its extension httpfs asks for whole column chunks at once and is several times as fast
(docs/object-stores.md), but is no part of DuckDB's package, and is not downloaded here: it is used where it was
installed, by DuckDB's INSTALL or as the package `duckdb-extension-httpfs`. fsspec is pure Python, and reads through
pyarrow for any DuckDB.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb

from nanalyze.analysis import sqltext
from nanalyze.rundir import objectstore
from nanalyze.rundir.errors import RunError
from nanalyze.rundir.shards import Shard

PACKAGE = "duckdb_extension_httpfs"
COPIED_BYTES = 1 << 30  # some 150 million launches
FREE_SHARE = 0.5  # of the room on the disk, which may be memory, that copies take at most


class Copies:
    """Copies of a run's shards in a folder of their own, which is removed with `close` or with this process.

    The folder is readable by this user only.
    """

    def __init__(self, root: Path, most_bytes: int | None = None) -> None:
        self.root = root
        self._folder = tempfile.TemporaryDirectory(prefix="nanalyze-run-", ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name).resolve()
        free = int(shutil.disk_usage(self.folder).free * FREE_SHARE)
        self._room = min(COPIED_BYTES if most_bytes is None else most_bytes, free)
        self._chosen: set[Path] = set()
        self._made: set[Path] = set()

    def choose(self, found: Iterable[Shard], listing: Iterable[tuple[str, int]]) -> None:
        """Decide which of these shards to copy; `listing` has their sizes. Whole tables, the smallest first."""
        sizes = {self.root / name: size for name, size in listing}
        tables: dict[str, list[Shard]] = {}
        for shard in found:
            tables.setdefault(shard.table, []).append(shard)
        totals = {table: sum(sizes.get(shard.path, 0) for shard in shards) for table, shards in tables.items()}
        for table in sorted(tables, key=lambda table: (totals[table], table)):
            if totals[table] > self._room:
                return
            self._room -= totals[table]
            self._chosen.update(shard.path for shard in tables[table])

    def fetch(self, shard: Shard) -> str:
        """The hash of a shard's bytes, which are kept if that was decided. OSError as `objectstore.digest`."""
        if shard.path not in self._chosen:
            return objectstore.digest(shard.path)
        try:
            found = objectstore.digest(shard.path, self.folder / shard.path.relative_to(self.root))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._chosen.clear()  # somebody else filled the disk: read the rest where it lies
            return objectstore.digest(shard.path)
        self._made.add(shard.path)
        return found

    def of(self, shard: Shard) -> Shard:
        """The shard in its place here, or as it is where it was not copied."""
        if shard.path not in self._made:
            return shard
        return replace(shard, path=self.folder / shard.path.relative_to(self.root))

    def origin(self, path: str) -> str:
        """The URI of what was copied to `path`; anything else as it is."""
        here = Path(path)
        return str(self.root / here.relative_to(self.folder)) if here.is_relative_to(self.folder) else path

    def close(self) -> None:
        """Remove them."""
        self._folder.cleanup()


def attach(connection: duckdb.DuckDBPyConnection, root: Path) -> None:
    """Let `connection` read the objects of the run at `root`. Raises RunError where nothing here can.

    Call it before external access is closed, which holds for objects as for files.
    """
    connection.execute("SET allow_persistent_secrets = false")  # none of the user's own, and none is left
    if _load_httpfs(connection):
        _make_secret(connection, root)
    else:
        connection.register_filesystem(_file_system(root))


def _load_httpfs(connection: duckdb.DuckDBPyConnection) -> bool:
    """Whether the extension is here and loads."""
    for extension in filter(None, ("httpfs", _packaged())):
        try:
            connection.execute(f"LOAD {sqltext.literal(extension)}")
        except duckdb.Error:
            continue
        # As it loads it takes these from the environment into settings, which every query can read.
        for setting in ("s3_access_key_id", "s3_secret_access_key", "s3_session_token"):
            connection.execute(f"SET GLOBAL {setting} = ''")
        return True
    return False


def _packaged() -> str | None:
    """The extension's file in its package, where that is installed for this version of DuckDB."""
    found = importlib.util.find_spec(PACKAGE)
    for folder in (found.submodule_search_locations or []) if found else []:
        file = Path(folder, "extensions", f"v{duckdb.__version__}", "httpfs.duckdb_extension")
        if file.is_file():
            return str(file)
    return None


def _make_secret(connection: duckdb.DuckDBPyConnection, root: Path) -> None:
    """A secret for this bucket alone. DuckDB shows it redacted, and nobody can have it shown otherwise."""
    reached = objectstore.access(root)
    scheme, bucket = str(root).split("://")[0], root.parts[1]
    options: dict[str, Any] = {"SCOPE": f"{scheme}://{bucket}/", "REGION": reached.region, "USE_SSL": reached.is_tls}
    if reached.endpoint:
        options |= {"ENDPOINT": reached.endpoint, "URL_STYLE": "path"}
    if reached.key_id:
        options |= {"KEY_ID": reached.key_id, "SECRET": reached.secret}
    if reached.token:
        options["SESSION_TOKEN"] = reached.token
    kind = "gcs" if scheme == "gs" else "s3"
    listed = "".join(f", {name} {sqltext.literal(value)}" for name, value in options.items())
    try:
        connection.execute(f"CREATE SECRET nanalyze (TYPE {kind}, PROVIDER config{listed})")
    except duckdb.Error as error:
        told = reached.hidden(str(error).split("\n", 1)[0])
        raise RunError(f"{root}: DuckDB does not take the credentials of the environment: {told}") from None


def _file_system(root: Path) -> Any:
    """The objects of the run as a file system of fsspec's, for DuckDB's `register_filesystem`."""
    try:
        fsspec = importlib.import_module("fsspec")
    except ImportError:
        raise RunError(
            f"{root}: DuckDB {duckdb.__version__} has no extension httpfs here to read object stores. Install it "
            "(python -c \"import duckdb; duckdb.sql('INSTALL httpfs')\"), or what does without it: "
            "pip install 'nanalyze[s3]'."
        ) from None
    scheme = str(root).split("://")[0]
    sizes = {f"{root}/{name}": size for name, size in objectstore.listing(root)}

    class Objects(fsspec.AbstractFileSystem):  # type: ignore[misc, name-defined, unused-ignore]
        """What was listed, by its URI; nothing else is there."""

        protocol = scheme
        cachable = False  # by fsspec, which would keep one for all runs

        def info(self, path: str, **_: object) -> dict[str, object]:
            size = sizes.get(path)
            if size is None:
                raise FileNotFoundError(path)
            return {"name": path, "size": size, "type": "file"}

        def glob(self, path: str, **_: object) -> list[str]:
            return [path] if path in sizes else []

        def modified(self, path: str) -> datetime:
            return datetime.fromtimestamp(0, UTC)  # a shard never changes

        def open(self, path: str, mode: str = "rb", **_: object) -> Any:
            if mode != "rb":
                raise PermissionError(path)
            return objectstore.reader(objectstore.UriPath(path), int(str(self.info(path)["size"])))

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return path

    return Objects()
