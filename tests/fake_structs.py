"""What the parts of the fake CUPTI share: result codes, parameter structures, images."""

from __future__ import annotations

import ctypes
import json
import struct
from ctypes import c_size_t, c_void_p
from typing import Any

SUCCESS = 0
INVALID_PARAMETER = 1
INVALID_OPERATION = 7
OUT_OF_MEMORY = 8
PARAMETER_SIZE_NOT_SUFFICIENT = 10
MAX_LIMIT_REACHED = 12
NOT_INITIALIZED = 15
INVALID_KIND = 21
HARDWARE_BUSY = 26
NOT_SUPPORTED = 27
INSUFFICIENT_PRIVILEGES = 35
MULTIPLE_SUBSCRIBERS = 39
INVALID_CHIP_NAME = 46
UNKNOWN = 999

OBJECT = ("object", c_void_p)


class CuptiCode(Exception):
    """Raised inside the fake to return a code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def params(*fields: tuple[str, Any]) -> type[ctypes.Structure]:
    """A parameter structure with these fields after the two that each has."""
    return type("Params", (ctypes.Structure,), {"_fields_": [("structSize", c_size_t), ("pPriv", c_void_p), *fields]})


def size_of(structure: type[ctypes.Structure]) -> int:
    """CUPTI_PROFILER_STRUCT_SIZE: up to the end of the last field, without tail padding."""
    last = getattr(structure, structure._fields_[-1][0])
    return int(last.offset + last.size)


def pack(content: Any) -> bytes:
    text = json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text


def unpack(address: int | None, size: int) -> Any:
    """The content of an image that `fill` wrote."""
    if not address or size < 8:
        raise CuptiCode(INVALID_PARAMETER)
    (length,) = struct.unpack("<Q", ctypes.string_at(address, 8))
    if length + 8 > size:
        raise CuptiCode(INVALID_PARAMETER)
    return json.loads(ctypes.string_at(address + 8, length))


def fill(address: int | None, size: int, content: Any) -> None:
    data = pack(content)
    if not address or len(data) > size:
        raise CuptiCode(PARAMETER_SIZE_NOT_SUFFICIENT)
    ctypes.memmove(address, data, len(data))
