"""Which ranges are open at this moment, for exact counters that are wanted within some ranges only.

The timeline learns a range when it is over; whether to measure a launch must be known before. So
NVTX calls are followed by callbacks, on the job's threads: about 5 us a call, paid only by those
who filter by range.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Hashable
from functools import lru_cache

from nanalyze.recorder import ranges

CB_DOMAIN_NVTX = 5
# CUpti_nvtx_api_trace_cbid (cupti_nvtx_cbid.h).
START_A, START_EX, DOMAIN_START_EX = 4, 6, 31
END, DOMAIN_END = 7, 32
PUSH_A, PUSH_EX, DOMAIN_PUSH_EX = 8, 10, 33
POP, DOMAIN_POP = 11, 34
REGISTER_STRING = 39
_STARTS_AND_ENDS = (START_A, START_EX, DOMAIN_START_EX, END, DOMAIN_END)
CALLS = (*_STARTS_AND_ENDS, PUSH_A, PUSH_EX, DOMAIN_PUSH_EX, POP, DOMAIN_POP, REGISTER_STRING)

# nvtxEventAttributes_v2: where the message and its type stand.
_MESSAGE_TYPE, _MESSAGE = 32, 40
_ASCII, _REGISTERED = 1, 3

MOST_STRINGS = 65_536


class OpenRanges:
    """Answers whether a range whose name matches `pattern` is open, in any thread of the process.

    Any thread, as a kernel too belongs to the ranges open when it is launched, whoever launches it:
    backward passes run on autograd's thread.
    """

    def __init__(self, pattern: str, names_open: Callable[[], list[str]] = ranges.open_names) -> None:
        self._matches = lru_cache(4096)(lambda name: bool(re.search(pattern, name)))
        self._names_open = names_open
        self._stacks: dict[tuple[int, int], list[bool]] = {}  # by thread and domain
        self._open: set[Hashable] = set()  # of those that match
        self._strings: dict[int, str] = {}  # registered, by handle

    def is_any(self) -> bool:
        """Whether one is open now."""
        return bool(self._open) or any(self._matches(name) for name in self._names_open())

    def on_call(self, cbid: int, data_address: int) -> None:
        """An NVTX call; `data_address` is its CUpti_NvtxData: name, parameters, pointer to the result."""
        _, params, result = (ctypes.c_void_p * 3).from_address(data_address)
        if params is None:
            return
        if cbid in (PUSH_A, PUSH_EX, DOMAIN_PUSH_EX):
            self._push(_domain(cbid, params), self._name(cbid, params))
        elif cbid in (POP, DOMAIN_POP):
            self._pop(_domain(cbid, params))
        elif cbid in (START_A, START_EX, DOMAIN_START_EX):
            if result and self._matches(self._name(cbid, params)):
                self._open.add(ctypes.c_uint64.from_address(result).value)
        elif cbid in (END, DOMAIN_END):
            self._open.discard(_word(params, int(cbid == DOMAIN_END)))
        elif cbid == REGISTER_STRING and result and len(self._strings) < MOST_STRINGS:
            handle = ctypes.c_void_p.from_address(result).value
            if handle:
                self._strings[handle] = _text(_word(params, 1))

    def _push(self, domain: int, name: str) -> None:
        stack = self._stacks.setdefault((threading.get_ident(), domain), [])
        stack.append(self._matches(name))
        if stack[-1]:
            self._open.add((threading.get_ident(), domain, len(stack)))

    def _pop(self, domain: int) -> None:
        stack = self._stacks.get((threading.get_ident(), domain))
        if stack:  # else it was opened before
            self._open.discard((threading.get_ident(), domain, len(stack)))
            stack.pop()
            if not stack:
                del self._stacks[threading.get_ident(), domain]

    def _name(self, cbid: int, params: int) -> str:
        """The name given; empty for one registered before this began, and for wide characters."""
        given = _word(params, int(cbid in (DOMAIN_PUSH_EX, DOMAIN_START_EX)))
        if cbid in (PUSH_A, START_A):
            return _text(given)
        if not given:
            return ""
        kind = ctypes.c_int32.from_address(given + _MESSAGE_TYPE).value
        message = _word(given + _MESSAGE, 0)
        if kind == _REGISTERED:
            return self._strings.get(message, "")
        return _text(message) if kind == _ASCII else ""


def _word(address: int, index: int) -> int:
    return ctypes.c_uint64.from_address(address + 8 * index).value


def _domain(cbid: int, params: int) -> int:
    return _word(params, 0) if cbid in (DOMAIN_PUSH_EX, DOMAIN_POP) else 0


def _text(pointer: int) -> str:
    return ctypes.string_at(pointer)[:4096].decode("utf-8", "backslashreplace") if pointer else ""
