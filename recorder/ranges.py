"""Ranges of host code: two clock readings each, nothing else on the job's thread.

A kernel belongs to the innermost range open at the moment it was launched, so nothing needs to be
told to CUPTI, and kernels launched by other threads (autograd's backward) are found too.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from nanalyze.recorder.nvtx import NvtxRanges

P = ParamSpec("P")
R = TypeVar("R")

_current: ContextVar[OpenRange | None] = ContextVar("nanalyze_range", default=None)


class OpenRange:
    """A range between its opening and its closing."""

    __slots__ = ("annotation", "depth", "log", "parent", "range_id", "start_ns", "thread_id")

    def __init__(self, log: RangeLog, annotation: annotate, range_id: int, parent: OpenRange | None) -> None:
        self.log = log
        self.annotation = annotation
        self.range_id = range_id
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent else 0
        self.thread_id = threading.get_native_id()
        self.start_ns = time.time_ns()


class RangeLog:
    """Ranges of the recording in progress; `take` hands the closed ones over as table rows."""

    def __init__(self) -> None:
        self.ids = itertools.count(1)
        self.nvtx: NvtxRanges | None = None
        self.on_first: Callable[[], object] | None = None  # called once, before the first range opens
        self.before_each: Callable[[annotate, OpenRange | None], object] | None = None  # with the enclosing range
        self._beginning = threading.Lock()
        self._open: dict[int, OpenRange] = {}
        self._closed: deque[tuple[OpenRange, int | None]] = deque()

    def open(self, annotation: annotate) -> OpenRange:
        if self.on_first is not None:
            self._begin()
        parent = _current.get()
        while parent is not None and self._open.get(parent.range_id) is not parent:
            parent = parent.parent  # of an earlier recording, or closed elsewhere
        if self.before_each is not None:
            self.before_each(annotation, parent)
        opened = OpenRange(self, annotation, next(self.ids), parent)
        self._open[opened.range_id] = opened
        return opened

    def _begin(self) -> None:
        """Call `on_first`; threads that come meanwhile wait, or their first launches would have no time."""
        with self._beginning:
            first = self.on_first
            if first is not None:
                first()
                self.on_first = None

    def close(self, opened: OpenRange) -> None:
        end_ns = time.time_ns()
        if self._open.pop(opened.range_id, None) is not None:
            self._closed.append((opened, end_ns))

    def take(self, *, also_open: bool = False) -> list[dict[str, Any]]:
        """Rows of the ranges closed since the last call; with `also_open` the open ones, without an end."""
        rows = []
        while self._closed:
            rows.append(_row(*self._closed.popleft()))
        if also_open:
            still_open, self._open = self._open, {}
            rows += [_row(opened, None) for opened in still_open.values()]
        if self.nvtx is not None:
            rows += self.nvtx.take(also_open=also_open)
        return rows


def _row(opened: OpenRange, end_ns: int | None) -> dict[str, Any]:
    annotation = opened.annotation
    return {
        "range_id": opened.range_id,
        "parent_id": opened.parent.range_id if opened.parent else None,
        "depth": opened.depth,
        "name": annotation.name,
        "source": "annotate",
        "thread_id": opened.thread_id,
        "start_ns": opened.start_ns,
        "end_ns": end_ns,
        "flops": annotation.flops,
        "bytes": annotation.bytes,
        "attributes": _json(annotation.attributes),
    }


def _json(attributes: dict[str, Any]) -> str | None:
    """`attributes` as a JSON object; what JSON cannot hold appears as its text."""
    if not attributes:
        return None
    try:
        return json.dumps(attributes, default=_text, allow_nan=False)
    except Exception:  # a circular list, keys that are no text, a dict that the job is changing
        return json.dumps({name: _text(value) for name, value in attributes.items()})


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__}>"


_log: RangeLog | None = None


def set_log(log: RangeLog | None) -> None:
    """The log that `annotate` writes to; None makes it a no-op."""
    global _log
    _log = log


def open_names() -> list[str]:
    """Names of the `annotate` ranges open now, in any thread."""
    log = _log
    return [] if log is None else [opened.annotation.name for opened in list(log._open.values())]


class annotate:
    """Name a range of host code, as a context manager or decorator (of functions and coroutines).

    `flops` (FLOP) and `bytes` (bytes) say what one pass through the range must do; keyword
    arguments are kept as attributes. Ranges nest, in each thread and asyncio task by itself.
    Without a recording in progress it does nothing.
    """

    def __init__(self, name: str, *, flops: float | None = None, bytes: float | None = None, **attributes: Any) -> None:
        self.name = str(name)
        self.flops = None if flops is None else float(flops)
        self.bytes = None if bytes is None else float(bytes)
        self.attributes = attributes
        self._entered: list[OpenRange] = []  # of all threads and tasks that share this object

    def __enter__(self) -> annotate:
        log = _log
        if log is None:
            return self
        opened = log.open(self)
        self._entered.append(opened)
        _current.set(opened)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._entered:
            return
        opened = self._innermost()
        if opened is not None:
            _current.set(opened.parent)
        else:  # left in another context than entered, as generators that the event loop closes
            opened = self._entered[-1]
        self._entered.remove(opened)
        opened.log.close(opened)

    def _innermost(self) -> OpenRange | None:
        """The innermost range of this thread or task that was opened through this object."""
        opened = _current.get()
        while opened is not None and opened not in self._entered:
            opened = opened.parent
        return opened

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wrapped_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                with self._again():
                    return await function(*args, **kwargs)

            return wrapped_async  # type: ignore[return-value]

        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._again():
                return function(*args, **kwargs)

        return wrapped

    def _again(self) -> annotate:
        """A fresh instance for each call, so that threads do not share the entry stack."""
        return annotate(self.name, flops=self.flops, bytes=self.bytes, **self.attributes)
