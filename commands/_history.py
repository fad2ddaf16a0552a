"""Line editing at the prompt, with a history that outlives it, where Python has readline."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nanalyze.commands._complete import DELIMITERS, Completer

LINES_KEPT = 2_000


def path() -> Path:
    """The history file: in the user's state directory, so that no run directory is written to."""
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if os.path.isabs(state) else Path("~/.local/state").expanduser()
    return folder / "nanalyze" / "sql_history"


@contextmanager
def line_editing(completer: Completer) -> Iterator[None]:
    """History and completion while the prompt is open; a history that cannot be kept is none."""
    try:
        import readline
    except ImportError:  # Windows has none
        yield
        return
    readline.set_completer(completer)
    readline.set_completer_delims(DELIMITERS)
    # macOS' Python is linked with libedit, which has a language of its own.
    is_libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
    with suppress(OSError, RuntimeError):
        readline.read_history_file(path())
    before = readline.get_current_history_length()
    try:
        yield
    finally:
        with suppress(OSError, RuntimeError):
            _keep(path(), readline.get_current_history_length() - before)


def _keep(file: Path, new: int) -> None:
    """Append the `new` last lines: another prompt may have written meanwhile. Only the user can read them."""
    import readline

    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
    readline.set_history_length(LINES_KEPT)
    if sys.platform != "darwin" and hasattr(readline, "append_history_file"):
        readline.append_history_file(new, file)
    else:
        readline.write_history_file(file)
