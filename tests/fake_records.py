"""Activity records as CUPTI lays them out, for the fake CUPTI and the decoder's tests.

Transcribed from `cupti_activity.h` as C structs and so independent of the decoder's table of
offsets. Newer versions only append fields: a record is padded with `PADDING` to its version's size.
"""

from __future__ import annotations

import ctypes
import itertools
import json
from ctypes import c_int32, c_uint8, c_uint16, c_uint32, c_uint64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEMCPY, MEMSET, DRIVER, RUNTIME, KERNEL, PEER_COPY, MARKER = 1, 2, 4, 5, 10, 22, 12
CONTEXT = 9  # a record is written only when the recorder looks for other clients
PADDING = b"\x5a"

# sizeof of the newest struct of each kind, by CUPTI API version, as gcc printed it for the headers
# of CUPTI 12.1, 12.4, 12.8, 12.9, 13.0.1, 13.1.1, 13.2.2, 13.3.1, 13.4.1 and 13.5.0.
SIZES: dict[int, dict[int, int]] = {
    18: {MEMCPY: 88, MEMSET: 88, DRIVER: 40, RUNTIME: 40, KERNEL: 208, PEER_COPY: 96, MARKER: 56},
    22: {MEMCPY: 88, MEMSET: 88, DRIVER: 40, RUNTIME: 40, KERNEL: 208, PEER_COPY: 96, MARKER: 56},
    26: {MEMCPY: 96, MEMSET: 88, DRIVER: 40, RUNTIME: 40, KERNEL: 208, PEER_COPY: 96, MARKER: 56},
    28: {MEMCPY: 96, MEMSET: 88, DRIVER: 40, RUNTIME: 40, KERNEL: 208, PEER_COPY: 96, MARKER: 56},
    130001: {MEMCPY: 96, MEMSET: 88, DRIVER: 40, RUNTIME: 40, KERNEL: 216, PEER_COPY: 96, MARKER: 56},
    130101: {MEMCPY: 96, MEMSET: 88, DRIVER: 40, RUNTIME: 40, KERNEL: 224, PEER_COPY: 96, MARKER: 56},
    130202: {MEMCPY: 96, MEMSET: 88, DRIVER: 40, RUNTIME: 40, KERNEL: 224, PEER_COPY: 96, MARKER: 56},
    130301: {MEMCPY: 96, MEMSET: 88, DRIVER: 40, RUNTIME: 40, KERNEL: 232, PEER_COPY: 96, MARKER: 56},
    130401: {MEMCPY: 112, MEMSET: 104, DRIVER: 40, RUNTIME: 40, KERNEL: 248, PEER_COPY: 96, MARKER: 56},
    130500: {MEMCPY: 112, MEMSET: 104, DRIVER: 40, RUNTIME: 40, KERNEL: 248, PEER_COPY: 96, MARKER: 56},
}


def _struct(name: str, *fields: tuple[str, Any]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


_Kernel = _struct(
    "Kernel",
    ("kind", c_uint32),
    ("cacheConfig", c_uint8),
    ("sharedMemoryConfig", c_uint8),
    ("registersPerThread", c_uint16),
    ("partitionedGlobalCacheRequested", c_uint32),
    ("partitionedGlobalCacheExecuted", c_uint32),
    ("start", c_uint64),
    ("end", c_uint64),
    ("completed", c_uint64),
    ("deviceId", c_uint32),
    ("contextId", c_uint32),
    ("streamId", c_uint32),
    ("grid", c_int32 * 3),
    ("block", c_int32 * 3),
    ("staticSharedMemory", c_int32),
    ("dynamicSharedMemory", c_int32),
    ("localMemoryPerThread", c_uint32),
    ("localMemoryTotal", c_uint32),
    ("correlationId", c_uint32),
    ("gridId", c_uint64),
    ("name", c_uint64),
    ("reserved0", c_uint64),
    ("queued", c_uint64),
    ("submitted", c_uint64),
    ("launchType", c_uint8),
    ("carveout", c_uint8 * 2),
    ("padding", c_uint8),
    ("sharedMemoryExecuted", c_uint32),
    ("graphNodeId", c_uint64),
    ("shmemLimitConfig", c_uint32),
    ("graphId", c_uint32),
    ("pAccessPolicyWindow", c_uint64),
    ("channelID", c_uint32),
    ("channelType", c_uint32),
    ("cluster", c_uint32 * 3),
    ("clusterSchedulingPolicy", c_uint32),
    ("localMemoryTotal_v2", c_uint64),
    ("maxPotentialClusterSize", c_uint32),
    ("maxActiveClusters", c_uint32),
)
_Memcpy = _struct(
    "Memcpy",
    ("kind", c_uint32),
    ("copyKind", c_uint8),
    ("srcKind", c_uint8),
    ("dstKind", c_uint8),
    ("flags", c_uint8),
    ("bytes", c_uint64),
    ("start", c_uint64),
    ("end", c_uint64),
    ("deviceId", c_uint32),
    ("contextId", c_uint32),
    ("streamId", c_uint32),
    ("correlationId", c_uint32),
    ("runtimeCorrelationId", c_uint32),
    ("pad", c_uint32),
    ("reserved0", c_uint64),
    ("graphNodeId", c_uint64),
    ("graphId", c_uint32),
    ("channelID", c_uint32),
    ("channelType", c_uint32),
    ("isDeviceLaunched", c_uint8),
)
_PeerCopy = _struct(
    "PeerCopy",
    ("kind", c_uint32),
    ("copyKind", c_uint8),
    ("srcKind", c_uint8),
    ("dstKind", c_uint8),
    ("flags", c_uint8),
    ("bytes", c_uint64),
    ("start", c_uint64),
    ("end", c_uint64),
    ("deviceId", c_uint32),
    ("contextId", c_uint32),
    ("streamId", c_uint32),
    ("srcDeviceId", c_uint32),
    ("srcContextId", c_uint32),
    ("dstDeviceId", c_uint32),
    ("dstContextId", c_uint32),
    ("correlationId", c_uint32),
    ("reserved0", c_uint64),
    ("graphNodeId", c_uint64),
    ("graphId", c_uint32),
    ("channelID", c_uint32),
    ("channelType", c_uint32),
)
_Memset = _struct(
    "Memset",
    ("kind", c_uint32),
    ("value", c_uint32),
    ("bytes", c_uint64),
    ("start", c_uint64),
    ("end", c_uint64),
    ("deviceId", c_uint32),
    ("contextId", c_uint32),
    ("streamId", c_uint32),
    ("correlationId", c_uint32),
    ("flags", c_uint16),
    ("memoryKind", c_uint16),
    ("pad", c_uint32),
    ("reserved0", c_uint64),
    ("graphNodeId", c_uint64),
    ("graphId", c_uint32),
    ("channelID", c_uint32),
    ("channelType", c_uint32),
    ("isDeviceLaunched", c_uint8),
)
_Api = _struct(
    "Api",
    ("kind", c_uint32),
    ("cbid", c_uint32),
    ("start", c_uint64),
    ("end", c_uint64),
    ("processId", c_uint32),
    ("threadId", c_uint32),
    ("correlationId", c_uint32),
    ("returnValue", c_uint32),
)
_Marker = _struct(
    "Marker",
    ("kind", c_uint32),
    ("flags", c_uint32),
    ("timestamp", c_uint64),
    ("id", c_uint32),
    ("objectKind", c_uint32),
    ("processId", c_uint32),  # these three are the union objectId
    ("threadId", c_uint32),
    ("rest", c_uint32),
    ("pad", c_uint32),
    ("name", c_uint64),
    ("domain", c_uint64),
)
_STRUCTS = {
    MARKER: _Marker,
    KERNEL: _Kernel,
    MEMCPY: _Memcpy,
    PEER_COPY: _PeerCopy,
    MEMSET: _Memset,
    DRIVER: _Api,
    RUNTIME: _Api,
}


def record(kind: int, version: int, **fields: Any) -> bytes:
    """One record of `kind` as CUPTI `version` writes it; fields not given are 0."""
    size = sizes(version)[kind]
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    body = bytes(_STRUCTS[kind](kind=kind, **values))[:size]
    return body + PADDING * (size - len(body))


def foreign(kind: int, size: int) -> bytes:
    """A record of a kind that the decoder does not know."""
    return kind.to_bytes(4, "little") + PADDING * (size - 4)


class Names:
    """C strings at addresses that stay valid, as CUPTI's kernel names do."""

    def __init__(self) -> None:
        self._kept: dict[bytes, ctypes.Array[ctypes.c_char]] = {}

    def pointer(self, name: bytes) -> int:
        if name not in self._kept:
            self._kept[name] = ctypes.create_string_buffer(name)
        return ctypes.addressof(self._kept[name])


@dataclass(frozen=True)
class Fixture:
    """Buffers captured on a real GPU by tests/gpu/capture_activity.py, and what was launched."""

    version: int
    buffers: tuple[bytes, ...]
    names: dict[int, bytes]
    launched: list[dict[str, Any]]

    def relocated(self, names: Names) -> list[bytes]:
        """The buffers with their kernels' name pointers aimed at strings of this process."""
        return [self._relocate(buffer, names) for buffer in self.buffers]

    def _relocate(self, buffer: bytes, names: Names) -> bytes:
        data = bytearray(buffer)
        for at in range(104, len(data) - 7, 8):  # the name stands at byte 104 of a kernel record
            name = self.names.get(int.from_bytes(data[at : at + 8], "little"))
            if name is not None and data[at - 104] == KERNEL:
                data[at : at + 8] = names.pointer(name).to_bytes(8, "little")
        return bytes(data)


def sizes(version: int) -> dict[int, int]:
    """SIZES of the newest known version that is not newer than `version`."""
    return SIZES[max(known for known in SIZES if known <= version)]


def load_fixture(binary: Path) -> Fixture:
    about = json.loads(binary.with_suffix(".json").read_text())
    data = binary.read_bytes()
    ends = list(itertools.accumulate(about["buffer_sizes"]))
    buffers = tuple(data[end - size : end] for end, size in zip(ends, about["buffer_sizes"], strict=True))
    names = {int(pointer): name.encode("latin-1") for pointer, name in about["names"].items()}
    return Fixture(about["cupti_version"], buffers, names, about["launched"])


FIXTURE_FILES = sorted((Path(__file__).parent / "fixtures" / "activity").glob("*.bin"))
FIXTURES = [load_fixture(binary) for binary in FIXTURE_FILES]
