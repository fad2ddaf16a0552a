"""C++ symbol names as people read them, by the C++ runtime's own demangler."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_LONGEST = 16_384  # nothing a compiler emits is longer, and a hostile name costs no more than this


@cache
def _runtime() -> Any:
    """`__cxa_demangle` and `free`, or None where there is no C++ runtime."""
    for library in ("libstdc++.so.6", "libc++abi.so.1", "libc++abi.dylib"):
        try:
            demangler = ctypes.CDLL(library).__cxa_demangle
        except (OSError, AttributeError):
            continue
        demangler.restype = ctypes.c_void_p
        demangler.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
        free = ctypes.CDLL(None).free
        free.argtypes = [ctypes.c_void_p]
        return demangler, free
    return None


def demangle(name: str) -> str:
    """`name` demangled, or as it is when it is not a mangled C++ name."""
    if not name.startswith("_Z") or len(name) > _LONGEST:
        return name
    runtime = _runtime()
    if runtime is None:
        return name
    demangler, free = runtime
    status = ctypes.c_int()
    text = demangler(name.encode("utf-8", "surrogateescape"), None, None, ctypes.byref(status))
    if not text:
        return name
    try:
        return ctypes.string_at(text).decode("utf-8", errors="backslashreplace")
    finally:
        free(text)
