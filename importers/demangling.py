"""Readable names of kernels, also from files that nobody vouches for.

A mangled name refers back to its own parts, so one of 300 characters can stand for a text that no memory holds.
Names with many such references are therefore demangled in a child that has little memory and little time; what
it does not manage stays mangled. All others cannot grow far and are demangled here.

    python -m nanalyze.importers.demangling     # the child: a name a line in, its readable form as JSON out
"""

from __future__ import annotations

import json
import re
import select
import subprocess
import sys
from types import TracebackType

from nanalyze.recorder.demangle import demangle

FEW_REFERENCES = 16  # two of them double a name: at most 256 times its length
LONGEST_NAME = 2**20  # characters of a result; kernel names run to 100 kB
START_S = 30.0  # for the child to answer at all, on a busy machine
WAIT_S = 1.0  # for one name; the longest real ones take a millisecond
MOST_STRIKES = 3  # names that did not come back, before no other is tried
MEMORY_BYTES = 512 * 2**20
_REFERENCE = re.compile(r"[ST][0-9A-Z]*_")


class Demangler:
    """Demangles names; use as a context manager, which ends the child."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._strikes = 0

    def name(self, mangled: str) -> str:
        """The readable form of `mangled`; itself where it has none, or one that is too long."""
        if not mangled.startswith("_Z") or len(_REFERENCE.findall(mangled)) <= FEW_REFERENCES:
            return demangle(mangled)
        return self._ask(mangled)

    def close(self) -> None:
        """End the child, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()

    def __enter__(self) -> Demangler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, mangled: str) -> str:
        if self._strikes >= MOST_STRIKES or not mangled.isascii() or "\n" in mangled:
            return mangled
        answer = _answer(self._child, mangled, WAIT_S) if self._is_running() and self._child else None
        if answer is None:
            self._strikes += 1
            self.close()
        return mangled if answer is None else answer

    def _is_running(self) -> bool:
        """Start the child where there is none; whether it answers."""
        if self._child is not None:
            return True
        command = [sys.executable, "-m", __name__]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        return _answer(self._child, "_Z1fv", START_S) == "f()"


def _answer(child: subprocess.Popen[bytes], mangled: str, wait_s: float) -> str | None:
    """What the child makes of the name; None where it breaks off or takes too long."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(mangled.encode("ascii") + b"\n")
        child.stdin.flush()
        ready, _, _ = select.select([child.stdout], [], [], wait_s)
        line = child.stdout.readline() if ready else b""
    except OSError:
        return None
    return str(json.loads(line)) if line.endswith(b"\n") else None


def main() -> None:
    """The child."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    except (ImportError, ValueError, OSError):  # Windows, or less is allowed already
        pass
    for line in sys.stdin:
        mangled = line.rstrip("\n")
        readable = demangle(mangled)
        print(json.dumps(readable if len(readable) <= LONGEST_NAME else mangled), flush=True)


if __name__ == "__main__":
    main()
