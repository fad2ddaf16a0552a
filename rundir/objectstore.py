"""Runs in object stores: `s3://bucket/run` and `gs://bucket/run`, by S3's protocol, read by pyarrow.

Credentials and the server come from the environment and from nowhere else, under the names that every S3 client
knows: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION (or AWS_DEFAULT_REGION) and
AWS_ENDPOINT_URL_S3 (or AWS_ENDPOINT_URL). Without a key, requests are anonymous. They appear in no message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from nanalyze.rundir import shards
from nanalyze.rundir.errors import RunError

URI = re.compile(r"^([a-z][a-z0-9+.-]*)://(.*)$", re.DOTALL)
# Schemes that are read here, with the server of those that have one of their own.
SERVERS = {"s3": None, "s3a": None, "gs": "storage.googleapis.com"}
# Patterns to DuckDB, or the beginning of a URL's query.
UNREADABLE = re.compile(r"[?*\[\]{}#\x00-\x1f\x7f]")
CONNECT_S, REQUEST_S = 10.0, 60.0
# Read by one request; what is longer is read in pieces of this. Recorders write shards of a few MB.
PIECE_BYTES = 8 << 20
KEYS = "Set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, for temporary ones, AWS_SESSION_TOKEN"


class UriPath(type(Path())):  # type: ignore[misc]
    """A URI where a `Path` names a run: `str` gives it back with both slashes."""

    def __str__(self) -> str:
        return re.sub(r"^([a-z0-9]+):/+", r"\1://", super().__str__())


@dataclass(frozen=True)
class Access:
    """How a bucket is reached; `endpoint` is host[:port], None for AWS's own."""

    key_id: str | None = field(repr=False)
    secret: str | None = field(repr=False)
    token: str | None = field(repr=False)
    region: str
    endpoint: str | None
    is_tls: bool

    def hidden(self, text: str) -> str:
        """`text` without anything secret."""
        for secret in (self.secret, self.token, self.key_id):
            if secret:
                text = text.replace(secret, "***")
        return text


def is_remote(path: Path) -> bool:
    """Whether `path` lies in an object store."""
    return isinstance(path, UriPath)


def checked(root: Path) -> UriPath:
    """`root` as the place of a run. RunError for a name that cannot be one."""
    found = UriPath(str(root))
    match = URI.match(str(found))
    if match is None or match.group(1) not in SERVERS:
        raise RunError(
            f"{root}: is in no object store that runs are read from. Give s3://bucket/run or gs://bucket/run."
        )
    if len(found.parts) < 3:
        raise RunError(f"{root}: names a bucket, not a run in it. Give s3://bucket/run.")
    if UNREADABLE.search(str(found)) or ".." in found.parts:
        raise RunError(f"{root}: a run cannot be read under this name: ?, *, #, .. and brackets mean something else.")
    return found


def access(root: Path) -> Access:
    """How to reach the bucket of `root`, by the environment. RunError for settings that contradict each other."""
    key_id, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    if bool(key_id) != bool(secret):
        missing = "AWS_SECRET_ACCESS_KEY" if key_id else "AWS_ACCESS_KEY_ID"
        raise RunError(f"{root}: {missing} is not set, the other half of the key is. Set both, or neither.")
    token = os.environ.get("AWS_SESSION_TOKEN") or None
    endpoint, is_tls = _endpoint(root)
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if not region:
        region = "us-east-1" if endpoint else _region(root)
    return Access(key_id or None, secret or None, token if key_id else None, region, endpoint, is_tls)


def _endpoint(root: Path) -> tuple[str | None, bool]:
    """host[:port] of the server and whether it speaks TLS."""
    url = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if not url:
        return SERVERS[str(root).partition(":")[0]], True
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    # What else a URL can hold, a password among it, is no part of an endpoint; so it is not shown either.
    if not usable or "@" in parts.netloc or parts.path.strip("/") or parts.query or parts.fragment:
        raise RunError(
            f"{root}: AWS_ENDPOINT_URL is no server's address. Write it as https://host or http://host:port."
        )
    return parts.netloc, parts.scheme == "https"


@lru_cache
def _region_of(bucket: str) -> str:
    from pyarrow import fs

    region: str = fs.resolve_s3_region(bucket)
    return region


def _region(root: Path) -> str:
    try:
        return _region_of(root.parts[1])
    except OSError as error:
        raise RunError(
            f"{root}: the region of its bucket cannot be found out: {_first_line(str(error))}. Check the bucket's name "
            "and the network, or set AWS_REGION."
        ) from None


@lru_cache(maxsize=8)
def _file_system(reached: Access) -> Any:
    from pyarrow import fs

    keys = (
        {"access_key": reached.key_id, "secret_key": reached.secret, "session_token": reached.token}
        if reached.key_id
        else {"anonymous": True}
    )
    return fs.S3FileSystem(
        **keys,
        region=reached.region,
        endpoint_override=reached.endpoint,
        scheme="https" if reached.is_tls else "http",
        connect_timeout=CONNECT_S,
        request_timeout=REQUEST_S,
    )


def _key(path: Path) -> str:
    """bucket/key, as pyarrow wants it."""
    return "/".join(path.parts[1:])


# --- reading -------------------------------------------------------------------------------------


def content(path: Path) -> bytes:
    """All of an object of a run. FileNotFoundError where it has none, RunError where it cannot be read."""
    from pyarrow import fs

    reached = access(path)
    try:
        with _file_system(reached).open_input_file(_key(path)) as file:
            return bytes(file.read())
    except FileNotFoundError:
        # To S3 an object of no bucket is missing just so.
        if _file_system(reached).get_file_info(path.parts[1]).type == fs.FileType.NotFound:
            raise RunError(_no_bucket(path, reached)) from None
        raise
    except OSError as error:
        raise refused(path, error, reached) from None


def source(path: Path) -> Any:
    """What pyarrow reads Parquet from: the path itself, or an open object. OSError where it cannot be opened."""
    return _file_system(access(path)).open_input_file(_key(path)) if is_remote(path) else path


def reader(path: Path, size: int) -> Any:
    """An object of `size` bytes as an open file; a small one is fetched whole, as that takes one request, not tens."""
    import pyarrow as pa

    file = source(path)
    return pa.BufferReader(file.read_buffer()) if size <= PIECE_BYTES else file


def digest(path: Path, copy: Path | None = None) -> str:
    """The hash of an object's bytes as it stands in a shard's name; with `copy` they are written there on the way.

    OSError, of whose text `reason` makes what may be shown; no part of a copy is left then.
    """
    if copy is None:
        return shards.digest_of(_pieces(path))
    copy.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(copy, "wb") as file:
            return shards.digest_of(_written(_pieces(path), file))
    except BaseException:
        copy.unlink(missing_ok=True)
        raise


def _pieces(path: Path) -> Iterator[memoryview]:
    with source(path) as file:
        while len(piece := file.read_buffer(PIECE_BYTES)):
            yield memoryview(piece)


def _written(pieces: Iterator[memoryview], file: IO[bytes]) -> Iterator[memoryview]:
    for piece in pieces:
        file.write(piece)
        yield piece


def listing(root: Path) -> list[tuple[str, int]]:
    """Name within the run and bytes of every object of it. Raises RunError."""
    from pyarrow import fs

    reached = access(root)
    base = _key(root)
    try:
        found = _file_system(reached).get_file_info(fs.FileSelector(base, recursive=True, allow_not_found=True))
    except OSError as error:
        raise refused(root, error, reached) from None
    return sorted((info.path[len(base) + 1 :], info.size) for info in found if info.type == fs.FileType.File)


# --- what went wrong -------------------------------------------------------------------------------


def refused(path: Path, error: OSError, reached: Access) -> RunError:
    """The error of a server as a line that says what to do about it."""
    told = str(error)
    server = reached.endpoint or "AWS"
    if "NO_SUCH_BUCKET" in told:
        return RunError(_no_bucket(path, reached))
    if re.search(r"ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE|INVALID_TOKEN|EXPIRED|TOKEN|HTTP status 40[013]", told):
        given = "the credentials in the environment" if reached.key_id else "access without credentials"
        return RunError(f"{path}: {server} refuses {given}. {KEYS} of who may read the bucket.")
    if re.search(r"NETWORK_CONNECTION|REQUEST_TIMEOUT|curlCode", told):
        return RunError(f"{path}: {server} does not answer. Check AWS_ENDPOINT_URL and the network.")
    if re.search(r"HTTP status 30[0-9]|REDIRECT", told):
        return RunError(f"{path}: the bucket is not in {reached.region}. Set AWS_REGION to its region.")
    return RunError(f"{path}: cannot be read: {reason(error, reached)}. Check its name and the credentials.")


def _no_bucket(path: Path, reached: Access) -> str:
    return f"{path}: {reached.endpoint or 'AWS'} has no bucket {path.parts[1]!r}. Check its name and AWS_ENDPOINT_URL."


def reason(error: OSError, reached: Access | None = None) -> str:
    """What a server or the system said, in one line without secrets."""
    if error.strerror:
        return error.strerror
    told = re.sub(r"^.*?AWS Error ", "the server says ", _first_line(str(error)))
    keys = [os.environ.get(f"AWS_{name}") for name in ("SECRET_ACCESS_KEY", "SESSION_TOKEN", "ACCESS_KEY_ID")]
    for secret in keys:
        told = told.replace(secret, "***") if secret else told
    return reached.hidden(told) if reached else told


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[0][:300].rstrip(". ")
