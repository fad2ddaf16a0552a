"""Ranges that the job marks with NVTX become rows of `ranges`.

NVTX does nothing until a process names a library to receive its calls, in NVTX_INJECTION64_PATH,
before its first one; CUPTI is such a library and writes a marker record where a range opens and
where it closes. So the job's threads run no Python of ours: a call costs them what CUPTI takes
for a record. (Receiving the calls by ctypes instead would need the GIL in each, on threads of
autograd and NCCL too; patching the `nvtx` package would miss what C++ marks.)

This module is imported by the start hook before CUDA is used: only what that needs is imported here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanalyze.recorder.activity import Records
    from nanalyze.recorder.timeline import Timeline

INJECTION = "NVTX_INJECTION64_PATH"
OURS = "NANALYZE_RECORD_NVTX"  # what the recorder wrote there, so that children can tell and take it back
CUPTI = "NANALYZE_NVTX_CUPTI"  # to where `_callbacks.c`, when it is named there, hands the calls on

# Subset of CUpti_ActivityFlag, of markers, and of CUpti_ActivityObjectKind (cupti_activity.h).
MARKER_START = 1 << 1
MARKER_END = 1 << 2
OBJECT_THREAD = 2

MOST_OPEN = 65_536  # ranges that are never closed: beyond that the oldest are written as such
MOST_THREADS = 65_536  # whose native ids are kept: of those that have ended, records may still come
MOST_EARLY_ENDS = 4_096  # ends whose start is in a buffer still to come
NAME_BYTES = 65_536


# --- before the first NVTX call ------------------------------------------------------------------


def inject(path: str) -> str | None:
    """Have NVTX call CUPTI at `path`; returns what to say if the job has chosen another library.

    The variable stays as the job set it. Libraries of the process that made an NVTX call before
    this are lost to it: each reads the variable once.
    """
    given = os.environ.get(INJECTION)
    if given and given != os.environ.get(OURS) and not _is_same(given, path):
        return f"NVTX ranges are not recorded: {INJECTION} is already set, to {given}. Unset it, or use --no-nvtx."
    if not given or given == os.environ.get(OURS):
        os.environ[CUPTI] = path
        os.environ[INJECTION] = os.environ[OURS] = _our_library() or path
    return None


def _our_library() -> str | None:
    """The compiled `_callbacks.c`: between NVTX and CUPTI, it sees the first call in time for its kernels."""
    spec = importlib.util.find_spec("nanalyze.recorder._callbacks")
    return spec.origin if spec is not None else None


def prepare() -> None:
    """The same before a recording: with the CUPTI that it would choose, if there is one."""
    from nanalyze.recorder import cupti

    path = cupti.find()
    if path is not None:
        inject(path)


def may_be_in_use() -> bool:
    """Whether NVTX calls of this process may go to CUPTI, which must then stay as it is."""
    from nanalyze.recorder import buffers

    return buffers.native is None or bool(buffers.native.nvtx_state()[0]) or bool(os.environ.get(INJECTION))


def withdraw() -> None:
    """Take back what `inject` set, for the sake of processes started from now on; markers are off by then."""
    global _followed
    _followed = None
    os.environ.pop(CUPTI, None)
    ours = os.environ.pop(OURS, None)
    if ours is not None and os.environ.get(INJECTION) == ours:
        del os.environ[INJECTION]


# A forked child inherits CUPTI's locks as they stood, and a marker record would take them: so the markers
# are off at the moment of a fork, and a child's NVTX calls end at that.
_followed: Timeline | None = None
_is_installed = False


def follow(timeline: Timeline, ranges: NvtxRanges) -> None:
    """Have `timeline` hand its markers to `ranges`; raises CuptiError."""
    global _followed, _is_installed
    timeline.follow_markers(ranges.take_records)
    _followed = timeline
    if not _is_installed and hasattr(os, "register_at_fork"):
        _is_installed = True
        os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


def _before_fork() -> None:
    if _followed is not None:
        _followed.switch_markers(False)


def _in_parent() -> None:
    if _followed is not None:
        _followed.switch_markers(True)


def _in_child() -> None:
    global _followed
    _followed = None


def _is_same(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return one == other


# --- records -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Open:
    """A range between its two records."""

    range_id: int
    parent: _Open | None
    depth: int
    name: str
    attributes: str | None
    thread: int
    thread_id: int
    start_ns: int
    is_open: bool = True

    def row(self, end_ns: int | None) -> dict[str, Any]:
        return {
            "range_id": self.range_id,
            "parent_id": self.parent.range_id if self.parent else None,
            "depth": self.depth,
            "name": self.name,
            "source": "nvtx",
            "thread_id": self.thread_id,
            "start_ns": self.start_ns,
            "end_ns": end_ns,
            "flops": None,
            "bytes": None,
            "attributes": self.attributes,
        }


class NvtxRanges:
    """Pairs marker records into ranges; everything here runs on the recorder's thread.

    `ids` numbers the ranges, together with those of `annotate`. Push and pop nest by thread,
    whatever their domains; ranges that one thread may start and another end have no parent.
    """

    def __init__(self, ids: Iterator[int]) -> None:
        self.odd = 0  # records that are no range: no time, or an end without a start
        self._ids = ids
        self._open: OrderedDict[int, _Open] = OrderedDict()  # by marker id, oldest first
        self._innermost: dict[int, _Open] = {}  # by thread as CUPTI names it
        self._early_ends: OrderedDict[int, int] = OrderedDict()
        self._rows: list[dict[str, Any]] = []
        self._threads: dict[int, int] = {}

    def take_records(self, records: Records) -> None:
        """Take in marker records, in buffer order. Those of one thread are in order of time."""
        self._learn_threads()
        columns = [records[name].tolist() for name in ("flags", "id", "time", "object", "thread", "name", "domain")]
        for flags, marker, time_ns, kind, thread, name, domain in zip(*columns, strict=True):
            if flags & MARKER_START:
                self._start(marker, time_ns, kind, thread, name, domain)
            elif flags & MARKER_END:
                self._end(marker, time_ns)

    def take(self, *, also_open: bool = False) -> list[dict[str, Any]]:
        """Rows of the ranges closed since the last call; with `also_open` the open ones, without an end."""
        rows, self._rows = self._rows, []
        if also_open:
            rows += [opened.row(None) for opened in self._open.values()]
            self._open.clear()
            self._innermost.clear()
            self.odd += len(self._early_ends)
            self._early_ends.clear()
        return rows

    def _start(self, marker: int, time_ns: int, kind: int, thread: int, name: int, domain: int) -> None:
        if not time_ns:
            self.odd += 1
            return
        nests = kind == OBJECT_THREAD
        parent = self._parent(thread) if nests else None
        opened = _Open(
            range_id=next(self._ids),
            parent=parent,
            depth=parent.depth + 1 if parent else 0,
            name=_text(name),
            attributes=_attributes(domain) if domain else None,
            thread=thread if nests else 0,
            thread_id=self._threads.get(thread, thread),
            start_ns=time_ns,
        )
        end_ns = self._early_ends.pop(marker, None)
        if end_ns is not None:
            self._close(opened, end_ns)
            return
        self._open[marker] = opened
        if nests:
            self._innermost[thread] = opened
        if len(self._open) > MOST_OPEN:
            _, oldest = self._open.popitem(last=False)
            self._close(oldest, None)

    def _parent(self, thread: int) -> _Open | None:
        opened = self._innermost.get(thread)
        while opened is not None and not opened.is_open:
            opened = opened.parent
        return opened

    def _end(self, marker: int, time_ns: int) -> None:
        opened = self._open.pop(marker, None)
        if opened is not None:
            self._close(opened, time_ns or None)
            return
        self._early_ends[marker] = time_ns  # or its start was before the recording
        if len(self._early_ends) > MOST_EARLY_ENDS:
            self._early_ends.popitem(last=False)
            self.odd += 1

    def _close(self, opened: _Open, end_ns: int | None) -> None:
        opened.is_open = False
        self._rows.append(opened.row(end_ns))
        if self._innermost.get(opened.thread) is opened:
            parent = self._parent(opened.thread)
            if parent is None:
                del self._innermost[opened.thread]
            else:
                self._innermost[opened.thread] = parent
        if opened.parent is not None and not opened.parent.is_open:
            opened.parent = None  # else a job that only pushes would grow a chain without end

    def _learn_threads(self) -> None:
        """CUPTI names a thread by the low half of pthread_self, which is Python's `ident`.

        (It could name the native id, but that is a setting of the whole process, and PyTorch's profiler
        relies on the other.) A thread that Python does not know keeps CUPTI's name for it.
        """
        if len(self._threads) > MOST_THREADS:
            self._threads.clear()
        for thread in threading.enumerate():
            if thread.ident is not None and thread.native_id is not None:
                self._threads[thread.ident & 0xFFFFFFFF] = thread.native_id


def _text(pointer: int) -> str:
    """The C string at `pointer`; read each time, as CUPTI might use the place for another name."""
    return ctypes.string_at(pointer)[:NAME_BYTES].decode("utf-8", errors="backslashreplace") if pointer else ""


def _attributes(domain: int) -> str:
    return json.dumps({"domain": _text(domain)})
