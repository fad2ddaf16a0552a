"""Nsight Compute's report files (`.ncu-rep`), read with NVIDIA's own library.

The PyPI package `ncu-report` (the optional extra `ncu`) is the only description of the format that
stays right. It is a C++ library that takes a process down with it when a file is damaged, so it runs
in a child (`ncu_rep_worker`) that sends one line of JSON a launch and may neither hang nor take all
memory. It also fills in what a file that was cut no longer holds, without a word; so the lengths of
the file's blocks are followed here, and launches that reach beyond its end are left out.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from nanalyze.importers.ncu_launch import Launch, Launches
from nanalyze.importers.ncu_table import readable
from nanalyze.importers.options import ImportFailed, Options
from nanalyze.importers.sink import Sink

KIND = "ncu-rep"

MAGIC = b"NVR\0"
PACKAGE = "ncu_report"
SILENCE_S = 120.0  # without a launch before the child counts as hung; a large report takes seconds to open
LINE_BYTES = 256 * 2**20  # of one launch; 3,000 metrics take 200 KB
MISSING_EXIT = 3  # of the child: the package is not there
FAILED_EXIT = 4  # of the child: the library refused the file, the reason is its last line


def detect(path: Path, head: bytes) -> bool:
    """Whether the file starts as Nsight Compute's reports do."""
    return head.startswith(MAGIC)


def read(paths: Sequence[Path], sink: Sink, options: Options, progress: Callable[[int, int], None]) -> None:
    """Feed the sink with every launch of `paths`.

    Raises ImportFailed where the package `ncu-report` is missing, and for a file that its library
    cannot read, or that takes it down.
    """
    if not _is_installed():
        raise _not_installed(paths[0])
    wanted = _device_wanted(options.device)
    launches = Launches(sink)
    total = sum(path.stat().st_size for path in paths)
    done = 0
    for path in paths:
        size = path.stat().st_size
        _read_one(path, launches, sink, wanted, _share_of(progress, done, size, total))
        done += size
        progress(done, total)
    launches.close()


def _share_of(
    progress: Callable[[int, int], None], done: int, size: int, total: int
) -> Callable[[dict[str, Any]], None]:
    return lambda sent: progress(done + size * (sent["id"] + 1) // max(sent["launches"], 1), total)


def _read_one(
    path: Path, launches: Launches, sink: Sink, wanted: int | None, tick: Callable[[dict[str, Any]], None]
) -> None:
    whole, cut_at = results(path)
    process = sink.process(path.stem)
    seen = 0
    for sent in _sent(path):
        seen += 1
        tick(sent)
        if cut_at is not None and sent["id"] >= whole:
            sink.refuse("launches that reach beyond the end of the file")
            continue
        _take(launches, sink, process, sent, wanted)
    if cut_at is not None:
        sink.note(f"{path.name}: is cut short at byte {cut_at:,}; what stands before was read")
    if not seen or (cut_at is not None and not whole):
        reason = "holds no whole launch: it is cut short or damaged, or nothing was profiled"
        raise ImportFailed(path, reason, "Copy it again, or profile again.")


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec(PACKAGE) is not None
    except (ImportError, ValueError):
        return False


def _not_installed(path: Path) -> ImportFailed:
    return ImportFailed(
        path,
        "reading Nsight Compute's reports needs NVIDIA's package ncu-report, which is not installed",
        f"pip install nanalyze[ncu], or export the report as text: ncu --import {path.name} --csv --page raw",
    )


def _device_wanted(device: str | None) -> int | None:
    if device is None or device.isdigit():
        return None if device is None else int(device)
    raise ImportFailed("--device", f"{device}: Nsight Compute's files name devices by number only", "Give a number.")


def _take(launches: Launches, sink: Sink, process: str, sent: dict[str, Any], wanted: int | None) -> None:
    if sent["workload"] not in ("kernel", "graph"):
        sink.refuse(f"results of a {sent['workload']}, which are no launch's", 1)
        return
    launch = _launch(sent)
    if wanted is not None and launch.device != wanted:
        sink.count("launches of other devices")
        return
    sink.count("lists of metric names", sent["lists"])
    launches.write(process, launch)


def _launch(sent: dict[str, Any]) -> Launch:
    name = sent["mangled"] or sent["demangled"] or sent["function"] or ""
    return Launch(
        sent["id"],
        name.encode("utf-8", "surrogateescape"),
        readable(sent["demangled"] or sent["function"] or name),
        device_name=sent["device_name"],
        is_graph=sent["workload"] == "graph",
        metrics={name: _number(value) for name, value in sent["metrics"].items()},
        rules=list(sent["rules"]),
    )


def _number(value: Any) -> float | None:
    """A metric's value; the child sends null for text and for what is not finite."""
    try:
        return None if value is None else float(value)
    except OverflowError:
        return None


# --- the file's blocks -------------------------------------------------------------------------------

_SOURCES, _RESULTS, _PAYLOAD = 1, 2, 5  # fields of a block's header


def results(path: Path) -> tuple[int, int | None]:
    """(results that the file holds to their end, its length where it ends too soon, else None).

    A report is the magic, a header and blocks: the length of the block's header, the header (a
    protobuf message that counts sources and results and gives the payload's length), the payload:
    sources, then results, each behind its length. A file that does not look like that counts as whole.
    """
    size = path.stat().st_size
    whole = 0
    with open(path, "rb") as file:
        place = 8 + _length(file, 4)
        while place < size:
            header = _block_header(file, place, size)
            if header is None:
                return whole, None
            start, sources, count, payload = header
            whole += _whole_entries(file, start, min(start + payload, size), sources, count)
            if start + payload > size:
                return whole, size
            place = start + payload
    return whole, size if place > size else None


def _length(file: IO[bytes], place: int) -> int:
    file.seek(place)
    return int.from_bytes(file.read(4), "little")


def _block_header(file: IO[bytes], place: int, size: int) -> tuple[int, int, int, int] | None:
    """(where the payload starts, sources, results, payload's length); None for something else."""
    length = _length(file, place)
    start = place + 4 + length
    if place + 4 > size or start > size:
        return size, 0, 0, 1  # the header itself is cut
    fields = _varints(file.read(length))
    if fields is None or fields.get(_PAYLOAD, 0) > 2**48:
        return None
    return start, fields.get(_SOURCES, 0), fields.get(_RESULTS, 0), fields.get(_PAYLOAD, 0)


def _whole_entries(file: IO[bytes], place: int, end: int, sources: int, count: int) -> int:
    """How many of a payload's results end before `end`."""
    found = 0
    for number in range(sources + count):
        if place + 4 > end:
            break
        place += 4 + _length(file, place)
        if place > end:
            break
        found += number >= sources
    return found


def _varints(message: bytes) -> dict[int, int] | None:
    """The numbers of a protobuf message by field, whatever else it holds; None if it is none."""
    fields: dict[int, int] = {}
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        value, after = _varint(message, place)
        if key & 7 == 0:
            fields[key >> 3], place = value, after
        elif key & 7 == 2:
            place = after + value
        elif key & 7 in (1, 5):
            place += 8 if key & 7 == 1 else 4
        else:
            return None
    return fields if place == len(message) else None


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(message) and shift < 64:
        value |= (message[place] & 127) << shift
        place, shift = place + 1, shift + 7
        if message[place - 1] < 128:
            break
    return value, place


# --- the child ---------------------------------------------------------------------------------------


def _sent(path: Path) -> Iterator[dict[str, Any]]:
    """What the child sends: one object a launch. Raises ImportFailed when it ends badly."""
    command = [sys.executable, "-m", f"{__package__}.ncu_rep_worker", str(path.resolve())]
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
        watch = _Watch(child)
        try:
            assert child.stdout is not None
            yield from _lines(path, child.stdout, watch)
            code = child.wait(SILENCE_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            watch.stop()
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()
        if watch.fired or code is None:
            raise ImportFailed(path, f"NVIDIA's library gave no launch in {SILENCE_S:.0f} s", _again())
        if code:
            raise _ended_badly(path, code, _last_line(errors))


def _lines(path: Path, stream: IO[bytes], watch: _Watch) -> Iterator[dict[str, Any]]:
    while line := stream.readline(LINE_BYTES):
        watch.restart()
        if not line.startswith(b"{"):
            continue  # something the library printed
        if not line.endswith(b"\n"):
            return  # the child ended within a line; its exit status tells why
        yield json.loads(line)


class _Watch:
    """Kills the child when it stays silent."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        self.fired = False
        self.restart()

    def restart(self) -> None:
        timer = getattr(self, "_timer", None)
        if timer is not None:
            timer.cancel()
        self._timer = threading.Timer(SILENCE_S, self._fire)
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        self._timer.cancel()

    def _fire(self) -> None:
        self.fired = True
        self._child.kill()


def _again() -> str:
    return "It may be damaged: open it in Nsight Compute, or copy it again."


def _ended_badly(path: Path, code: int, said: str) -> ImportFailed:
    if code == MISSING_EXIT:
        return _not_installed(path)
    if code == FAILED_EXIT:
        return ImportFailed(path, f"NVIDIA's library cannot read it: {said or 'it gave no reason'}", _again())
    how = f"signal {-code}" if code < 0 else f"exit status {code}"
    return ImportFailed(path, f"NVIDIA's library broke off on it ({how})", _again())


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    text = errors.read(1 << 20).decode("utf-8", "backslashreplace")
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "")
