"""The buffers that CUPTI fills: handed out on request, taken back when complete.

CUPTI keeps the callbacks and the buffers it was given beyond the end of a recording, so neither
may ever be freed while the process lives: there is one exchange for each loaded library, made at
the first recording and used by all later ones. The callbacks run on CUPTI's and the job's threads,
under locks that launches wait for, so they must not wait for the GIL: they are in C (`_callbacks.c`)
wherever that could be compiled. Their stand-in in Python does the same and costs the job what it
waits for the GIL, up to 5 ms a buffer.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections import deque
from collections.abc import Callable
from types import ModuleType
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

native: ModuleType | None
try:
    native = importlib.import_module("nanalyze.recorder._callbacks")
except ImportError:
    native = None

Full = list[tuple[Bytes, int]]  # memory, and how many bytes of it hold records

_exchanges: dict[Any, NativeExchange | BufferExchange] = {}


def exchange_for(cupti: cu.Cupti) -> NativeExchange | BufferExchange:
    """The one exchange of this process for this CUPTI library."""
    key = getattr(cupti.library, "_handle", cupti.library)  # loading a library twice gives the same handle
    if key not in _exchanges:
        _exchanges[key] = NativeExchange(native) if native is not None else BufferExchange()
    return _exchanges[key]


class _Registered:
    """What the two kinds of exchange have in common: the callbacks that CUPTI is given."""

    _on_request: Any
    _on_complete: Any
    _on_clock: Any

    def register(self, cupti: cu.Cupti) -> None:
        """Make CUPTI use these buffers, and the realtime clock, from now on.

        PyTorch's profiler has CUPTI report processor ticks, for the whole process and for good.
        """
        self.disown()
        cupti.cuptiActivityRegisterCallbacks(self._on_request, self._on_complete)
        with contextlib.suppress(cu.CuptiError):  # an older CUPTI, or WSL: nobody else can set it either
            cupti.cuptiActivityRegisterTimestampCallback(self._on_clock)

    def disown(self) -> None:
        """Buffers in flight may have gone to another client: they no longer count, but are taken if they come."""
        raise NotImplementedError


class NativeExchange(_Registered):
    """The pool of `_callbacks.c`, one for the process, whatever the library.

    It never calls back into Python: whoever wants the full buffers asks for them with `take`, and
    `on_full` is never called.
    """

    def __init__(self, module: ModuleType) -> None:
        self.on_full: Callable[[], object] = _nothing
        self._pool = module
        self._pool.configure(BUFFER_BYTES, FULL_BYTES, LENT_BUFFERS)
        self._requests_before = self._pool.counts()[0]
        request, complete, clock = self._pool.addresses()
        self._on_request = cu.BufferRequested(request)
        self._on_complete = cu.BufferCompleted(complete)
        self._on_clock = cu.TimestampCallback(clock)

    @property
    def refused(self) -> int:
        """How often CUPTI asked in vain."""
        return int(self._pool.counts()[1])

    @property
    def lent_any(self) -> bool:
        """Whether CUPTI ever asked for a buffer."""
        return bool(self._pool.counts()[0] > self._requests_before)

    def take(self) -> Full:
        """The full buffers with their valid bytes; give them back with `give_back`."""
        arrays = [np.frombuffer(view, dtype=np.uint8) for view in self._pool.take()]
        return [(array, len(array)) for array in arrays]

    def disown(self) -> None:
        self._pool.disown()

    def reclaim(self) -> None:
        """CUPTI was shut down: the buffers it still had are free again."""
        self._pool.reclaim()

    def give_back(self, full: Full) -> None:
        """Let CUPTI fill these again. Nothing may refer to their memory any more."""
        for memory, _ in full:
            self._pool.give_back(memory.ctypes.data)


class BufferExchange(_Registered):
    """Free, lent and full buffers; `on_full` is called (on any thread) when one has come back."""

    def __init__(self) -> None:
        self.refused = 0
        self.lent_any = False  # whether CUPTI ever asked, that is, CUDA did something
        self.on_full: Callable[[], object] = _nothing
        self._free: deque[Bytes] = deque()
        self._lent: dict[int, Bytes] = {}
        self._astray: dict[int, Bytes] = {}
        self._full: deque[tuple[Bytes, int]] = deque()
        self._full_bytes = 0
        self._lock = threading.Lock()  # for _full_bytes, which two threads change
        self._on_request = cu.BufferRequested(self._request)
        self._on_complete = cu.BufferCompleted(self._complete)
        self._on_clock = cu.TimestampCallback(time.time_ns)

    def take(self) -> Full:
        """The full buffers with their valid bytes; give them back with `give_back`."""
        return [self._full.popleft() for _ in range(len(self._full))]

    def disown(self) -> None:
        for address in list(self._lent):
            self._astray[address] = self._lent.pop(address)

    def reclaim(self) -> None:
        """CUPTI was shut down: the buffers it still had are free again."""
        self.disown()
        self._free.extend(self._astray.values())
        self._astray.clear()

    def give_back(self, full: Full) -> None:
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
            memory = self._astray.pop(buffer, None)
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
