"""The identity of a kernel class: the same kernel with the same shape has the same id everywhere."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

ID_BITS = 63


@dataclass(frozen=True)
class KernelClass:
    """A kernel symbol with its launch shape and resources; None where a source does not tell.

    `name` holds the symbol's raw bytes. `grid`, `block` and `cluster` are (x, y, z); cluster is
    (0, 0, 0) for launches without one. Shared and local memory are in bytes.
    """

    name: bytes
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (0, 0, 0)
    registers_per_thread: int | None = None
    static_shared_bytes: int | None = None
    dynamic_shared_bytes: int | None = None
    local_bytes_per_thread: int | None = None

    @property
    def id(self) -> int:
        """A 63-bit hash of every field, equal in every process and run that sees the same class."""
        numbers = (
            *self.grid,
            *self.block,
            *self.cluster,
            *(
                -1 if value is None else value
                for value in (
                    self.registers_per_thread,
                    self.static_shared_bytes,
                    self.dynamic_shared_bytes,
                    self.local_bytes_per_thread,
                )
            ),
        )
        hashed = hashlib.blake2b(struct.pack("<13q", *numbers) + self.name, digest_size=8).digest()
        return int.from_bytes(hashed, "little") >> (64 - ID_BITS)

    @property
    def name_text(self) -> str:
        """The symbol as text; bytes that are not UTF-8 appear as `\\xNN`."""
        return self.name.decode("utf-8", errors="backslashreplace")
