"""A progress bar on standard error, for terminals and notebooks; silent elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

WIDTH = 24
REDRAWN_S = 0.1


def is_watched() -> bool:
    """Whether somebody can see a bar move: standard error is a terminal, or a notebook's."""
    try:
        return sys.stderr.isatty() or "ipykernel" in sys.modules
    except Exception:  # closed, or a stand-in
        return False


class Bar:
    """`title [####----] 12/30 label`, redrawn in place; cleared at the end."""

    def __init__(self, title: str, total: int, shown: bool | None = None) -> None:
        self.title, self.total, self.done = title, max(total, 1), 0
        self._shown = is_watched() if shown is None else shown
        self._drawn_at = float("-inf")
        self._width = 0

    def step(self, label: str = "", by: int = 1) -> None:
        """One step further, or `by`; what is going on now stands behind the bar."""
        self.done = min(self.done + by, self.total)
        if not self._shown or time.monotonic() < self._drawn_at + REDRAWN_S:
            return
        self._drawn_at = time.monotonic()
        full = WIDTH * self.done // self.total
        line = f"{self.title} [{'#' * full}{'-' * (WIDTH - full)}] {self.done}/{self.total} {label}"[:120]
        self._write("\r" + line.ljust(self._width))
        self._width = len(line)

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except Exception:  # closed in mid-run: measuring goes on
            self._shown = False

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._width:
            self._write("\r" + " " * self._width + "\r")
