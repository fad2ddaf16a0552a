"""The buffers that CUPTI fills: handed out on request, taken back when complete.

CUPTI keeps the callbacks and the buffers it was given beyond the end of a recording, so neither
may ever be freed while the process lives: there is one exchange for each loaded library, made at
the first recording and used by all later ones. The callbacks run on CUPTI's and the job's threads
and only move pointers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from nanalyze.recorder import cupti as cu
from nanalyze.recorder.activity import Bytes

# About 2,400 kernels. CUPTI keeps a buffer until its last record is complete, which on a busy GPU
# is when the buffer is full: with 8 MiB (38,000 kernels) a job of 1,000 launches a second would be
# 38 s behind, and a kill would cost as much.
BUFFER_BYTES = 512 << 10
FULL_BYTES = 128 << 20  # waiting to be decoded; beyond that CUPTI gets no buffer, drops and counts
# At CUPTI, mostly untouched memory. Under the range profiler CUPTI takes a buffer a replay pass
# and gives them back at the next flush only: 16 were too few (1,546 refusals in 80 s on an H200).
LENT_BUFFERS = 256

_exchanges: dict[Any, BufferExchange] = {}


def exchange_for(cupti: cu.Cupti) -> BufferExchange:
    """The one exchange of this process for this CUPTI library."""
    key = getattr(cupti.library, "_handle", cupti.library)  # loading a library twice gives the same handle
    if key not in _exchanges:
        _exchanges[key] = BufferExchange()
    return _exchanges[key]


class BufferExchange:
    """Free, lent and full buffers; `on_full` is called (on any thread) when one has come back."""

    def __init__(self) -> None:
        self.refused = 0
        self.lent_any = False  # whether CUPTI ever asked, that is, CUDA did something
        self.on_full: Callable[[], object] = _nothing
        self._free: deque[Bytes] = deque()
        self._lent: dict[int, Bytes] = {}
        self._full: deque[tuple[Bytes, int]] = deque()
        self._full_bytes = 0
        self._lock = threading.Lock()  # for _full_bytes, which two threads change
        self._on_request = cu.BufferRequested(self._request)
        self._on_complete = cu.BufferCompleted(self._complete)

    def register(self, cupti: cu.Cupti) -> None:
        """Make CUPTI use these buffers from now on."""
        cupti.cuptiActivityRegisterCallbacks(self._on_request, self._on_complete)

    def take(self) -> list[tuple[Bytes, int]]:
        """The full buffers with their valid bytes; give them back with `give_back`."""
        return [self._full.popleft() for _ in range(len(self._full))]

    def give_back(self, full: list[tuple[Bytes, int]]) -> None:
        with self._lock:
            self._full_bytes -= sum(valid for _, valid in full)
        self._free.extend(memory for memory, _ in full)

    def _request(self, buffer: Any, size: Any, max_records: Any) -> None:
        self.lent_any = True
        max_records[0] = 0  # as many as fit
        memory = self._find()
        if memory is None:
            self.refused += 1
            buffer[0], size[0] = None, 0
            return
        address = memory.ctypes.data
        self._lent[address] = memory
        buffer[0], size[0] = address, BUFFER_BYTES

    def _find(self) -> Bytes | None:
        if self._full_bytes >= FULL_BYTES or len(self._lent) >= LENT_BUFFERS:
            return None
        try:
            return self._free.popleft()
        except IndexError:
            pass
        try:
            return np.empty(BUFFER_BYTES, dtype=np.uint8)
        except MemoryError:
            return None

    def _complete(self, context: int | None, stream: int, buffer: int, size: int, valid: int) -> None:
        memory = self._lent.pop(buffer, None)
        if memory is None:
            return
        if not valid:
            self._free.append(memory)
            return
        with self._lock:
            self._full_bytes += valid
        self._full.append((memory, valid))
        self.on_full()


def _nothing() -> None:
    pass
