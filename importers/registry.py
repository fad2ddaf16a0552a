"""Which importer reads a file: decided by its content, never by its name alone."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nanalyze.importers.options import ImportFailed, Options

if TYPE_CHECKING:
    from nanalyze.importers.sink import ImportSummary, Sink

Progress = Callable[[int, int], None]

# Modules by the order in which they are asked: formats with a signature of their own first.
MODULES = ("nsys", "ncu_rep", "proton", "kineto", "ncu_csv")
HEAD_BYTES = 64 * 1024  # what `detect` is given of a file
LFS_HEAD = b"version https://git-lfs"


class Importer(Protocol):
    """What each module of `MODULES` has."""

    KIND: str

    def detect(self, path: Path, head: bytes) -> bool:
        """Whether the file (or directory, then with an empty head) is of this kind."""
        ...

    def read(self, paths: Sequence[Path], sink: Sink, options: Options, progress: Progress) -> None:
        """Feed the sink with what the files hold; ImportFailed for what cannot be read."""
        ...


def importers() -> list[Importer]:
    """Every importer that is installed."""
    names = [f"{__package__}.{name}" for name in MODULES]
    return [importlib.import_module(name) for name in names if importlib.util.find_spec(name)]


def kinds() -> list[str]:
    """The kinds that can be asked for by name."""
    return sorted({importer.KIND for importer in importers()})


def import_files(
    paths: Sequence[Path],
    run_dir: Path,
    options: Options | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> ImportSummary:
    """Turn `paths`, all of one kind, into a run at `run_dir`.

    `progress` is called with the bytes (or rows) read so far and in all. Raises ImportFailed for
    files that cannot be read or hold no GPU work, RunError for a directory that cannot be written.
    """
    from nanalyze.importers.sink import Sink

    options = options or Options()
    importer = find(paths, options.kind)
    with Sink(run_dir, importer.KIND.partition("-")[0], paths, force) as sink:
        importer.read(paths, sink, options, progress or _silent)
        return sink.commit()


def find(paths: Sequence[Path], kind: str | None = None) -> Importer:
    """The one importer for all of `paths`; ImportFailed where there is none or several."""
    if not paths:
        raise ImportFailed("import", "no file was given", "Give at least one file.")
    found = [_importer_of(path, kind) for path in paths]
    for path, importer in zip(paths, found, strict=True):
        if importer.KIND != found[0].KIND:
            raise ImportFailed(
                path,
                f"is of kind {importer.KIND}, {paths[0]} of kind {found[0].KIND}",
                "Import each kind into a run of its own.",
            )
    return found[0]


def _importer_of(path: Path, kind: str | None) -> Importer:
    head = _head(path)
    candidates = [
        importer
        for importer in importers()
        if kind is None or kind == importer.KIND.partition("-")[0] or kind == importer.KIND
    ]
    if not candidates:
        raise ImportFailed(path, f"kind {kind} is not known", f"Choose one of {', '.join(kinds())}.")
    for importer in candidates:
        if importer.detect(path, head):
            return importer
    if kind is not None and len(candidates) == 1:
        return candidates[0]
    raise ImportFailed(path, _unknown(head), "Choose what it is with --kind, or export it again.")


def _head(path: Path) -> bytes:
    """The first bytes of a file, b'' for a directory; ImportFailed for what holds no trace at all."""
    try:
        if path.is_dir():
            return b""
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
    except FileNotFoundError:
        raise ImportFailed(path, "does not exist", "Give a file that another tool wrote.") from None
    except OSError as error:
        raise ImportFailed(path, f"cannot be read: {error.strerror}", "Check its permissions.") from error
    if not head:
        raise ImportFailed(path, "is empty", "Export it again.")
    if head.startswith(LFS_HEAD):
        raise ImportFailed(path, "is a git-LFS pointer, not the file itself", "Fetch the file: git lfs pull.")
    return head


def _unknown(head: bytes) -> str:
    if not head:
        return "is a directory without a file that any importer knows"
    what = "text" if b"\0" not in head else "binary data"
    return f"is not recognised: it starts with {head[:24]!r} ({what})"


def _silent(done: int, total: int) -> None:
    """No progress is shown."""
