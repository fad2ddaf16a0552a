"""The bytes of a trace, plain or gzipped, block by block, read ahead by a second thread.

Decompression releases the interpreter's lock, so it runs beside the decoding. Offsets count
decompressed bytes; of a plain file they are the file's own.
"""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from nanalyze.importers.options import ImportFailed, Limits

BLOCK_BYTES = 4 * 2**20  # decoded at once: about 13,000 events; larger blocks were not faster
READ_BYTES = 2**18  # compressed bytes at a time
BLOCKS_AHEAD = 2
GZIP_MAGIC = b"\x1f\x8b"

_DONE = None
_Item = bytes | BaseException | None


class Stream:
    """`blocks()` gives the bytes; `damage` then says why they end too early, where they do."""

    def __init__(self, path: Path, limits: Limits, progress: Callable[[int], None]) -> None:
        self.path = path
        self.damage: str | None = None
        self.unpacked = 0
        self._limits = limits
        self._progress = progress
        self._read = 0
        self._stop = threading.Event()

    def blocks(self) -> Iterator[bytes]:
        """Blocks of up to BLOCK_BYTES.

        Raises ImportFailed for a file that cannot be read or unpacks to more than the limits allow.
        """
        waiting: queue.Queue[_Item] = queue.Queue(BLOCKS_AHEAD)
        thread = threading.Thread(target=self._produce, args=(waiting,), name="nanalyze-read", daemon=True)
        thread.start()
        try:
            while (item := waiting.get()) is not _DONE:
                if isinstance(item, BaseException):
                    raise item
                self._progress(self._read)
                yield item
        finally:
            self._stop.set()
            while thread.is_alive():  # it may wait for room
                _empty(waiting)
                thread.join(0.01)

    def _produce(self, waiting: queue.Queue[_Item]) -> None:
        try:
            for block in self._gathered():
                waiting.put(block)
                if self._stop.is_set():
                    return
            waiting.put(_DONE)
        except OSError as error:
            waiting.put(
                ImportFailed(self.path, f"cannot be read: {error.strerror or error}", "Copy it to where it can be.")
            )
        except BaseException as error:  # shown by the thread that waits for the blocks
            waiting.put(error)

    def _gathered(self) -> Iterator[bytes]:
        """The pieces of the file put together to blocks."""
        with open(self.path, "rb") as file:
            packed = file.read(2) == GZIP_MAGIC
            file.seek(0)
            if not packed:
                yield from self._plain(file)
                return
            pieces: list[bytes] = []
            size = 0
            for piece in self._inflated(file):
                pieces.append(piece)
                size += len(piece)
                if size >= BLOCK_BYTES:
                    yield b"".join(pieces)
                    pieces, size = [], 0
            if pieces:
                yield b"".join(pieces)

    def _plain(self, file: IO[bytes]) -> Iterator[bytes]:
        while block := file.read(BLOCK_BYTES):
            self._read += len(block)
            self.unpacked += len(block)
            yield block

    def _inflated(self, file: IO[bytes]) -> Iterator[bytes]:
        """What gzip members one after the other hold; ends quietly, with `damage` set, where one is broken."""
        inflate = zlib.decompressobj(wbits=31)
        rest = b""
        while rest or (rest := file.read(READ_BYTES)):
            before = inflate.copy()
            try:
                piece = inflate.decompress(rest, BLOCK_BYTES)
            except zlib.error as error:
                yield from _up_to_damage(before, rest)
                self._set_damage(f"its gzip data are damaged at about byte {file.tell():,} of the file ({error})")
                return
            self._read = file.tell()
            self._check(len(piece))
            rest = inflate.unconsumed_tail
            if piece:
                yield piece
            if inflate.eof:
                rest = inflate.unused_data or file.read(READ_BYTES)
                if not rest.startswith(GZIP_MAGIC[: len(rest)]) or not rest:
                    return  # padding behind the last member, as gzip itself ignores it
                inflate = zlib.decompressobj(wbits=31)
        self._set_damage(f"its gzip data end too early, after {file.tell():,} bytes of the file")

    def _set_damage(self, what: str) -> None:
        self.damage = what

    def _check(self, count: int) -> None:
        """Refuse a decompression bomb as soon as it shows."""
        self.unpacked += count
        limits = self._limits
        allowed = max(limits.unpacked_free_bytes, limits.unpacked_ratio * max(self._read, 1))
        if self.unpacked > limits.unpacked_bytes or self.unpacked > allowed:
            raise ImportFailed(
                self.path,
                f"unpacks to more than {self.unpacked:,} bytes from {self._read:,}: no trace compresses like that",
                "Unpack it yourself and import the .json, if you trust it.",
            )


def unpacked_head(packed: bytes, most: int) -> bytes:
    """What the beginning of a gzip file unpacks to, up to where it is damaged and about `most` bytes."""
    pieces: list[bytes] = []
    inflate = zlib.decompressobj(wbits=31)
    for piece in _up_to_damage(inflate, packed):
        pieces.append(piece)
        if sum(map(len, pieces)) >= most:
            break
    return b"".join(pieces)


def _up_to_damage(inflate: Any, packed: bytes) -> Iterator[bytes]:
    """What can be unpacked before the data turn invalid: zlib gives nothing of a piece that fails."""
    for start in range(0, len(packed), 64):
        try:
            yield inflate.decompress(packed[start : start + 64])
        except zlib.error:
            return


def _empty(waiting: queue.Queue[_Item]) -> None:
    try:
        while True:
            waiting.get_nowait()
    except queue.Empty:
        return
