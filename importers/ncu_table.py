"""The tables in what `ncu --csv` prints: where they start, their columns, their rows.

`ncu` prints to the same stream as the program it profiles, so a table may have anything before it,
between its rows and after it, even in the same line. A table starts at a line that names its
columns, which may stand in any order; a file may hold several.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nanalyze.importers import ncu_metrics as metrics

LINE_BYTES = 16 * 2**20  # a row of the raw page with the values of every instance stays below
JOINED_LINES = 64  # that one quoted cell may span

ID, KERNEL = "ID", "Kernel Name"
METRIC, UNIT, VALUE = "Metric Name", "Metric Unit", "Metric Value"
RULE, RULE_TEXT = "Rule Name", "Rule Description"
ALIASES = {"Function Name": KERNEL, "Demangled Name": KERNEL}  # of the GUI's export
# Columns that are no metrics.
CONTEXT = frozenset((ID, KERNEL, METRIC, UNIT, VALUE, RULE, RULE_TEXT, "Rule Type", "Section Name", *ALIASES)) | {
    *("Process ID", "Process Name", "Host Name", "Kernel Time", "Context", "Stream", "Block Size", "Grid Size"),
    *("Device", "CC", "Estimated Speedup Type", "Estimated Speedup", "Invocations", "Mangled Name"),
}
SUMMARY = frozenset(("Minimum", "Maximum", "Average"))
TOOL_LINE = re.compile(r"==(PROF|ERROR|WARNING)== ?(.*)")
_NVTX = re.compile(r"Push/Pop|Start/Stop|NVTX", re.IGNORECASE)
_HEADED_UNIT = re.compile(r"(.+?) \[([^\]]+)\]")
_HEADER_HINTS = (KERNEL, METRIC, *ALIASES)
_BOMS = ((b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"), (b"\xef\xbb\xbf", "utf-8"))


# --- lines -------------------------------------------------------------------------------------------


def encoding_of(head: bytes) -> str:
    return next((name for mark, name in _BOMS if head.startswith(mark)), "utf-8")


def decode(raw: bytes, encoding: str) -> str:
    """Bytes that are not text survive as surrogates, so that kernel names keep theirs."""
    errors = "surrogateescape" if encoding == "utf-8" else "replace"
    return raw.decode(encoding, errors).lstrip("\ufeff")


def readable(text: str) -> str:
    """Text without surrogates: bytes that were none appear as \\xNN."""
    return text if text.isascii() else text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def lines(path: Path) -> Iterator[tuple[str, int]]:
    """Each line and the byte offset behind it; longer lines than any table has are passed over."""
    with open(path, "rb") as file:
        encoding = encoding_of(file.read(4))
        file.seek(0)
        if encoding.startswith("utf-16"):
            yield from _wide_lines(path, encoding)
            return
        while raw := file.readline(LINE_BYTES):
            complete = len(raw) < LINE_BYTES or raw.endswith(b"\n")
            yield (decode(raw, encoding).rstrip("\r\n") if complete else ""), file.tell()
            while not complete and (raw := file.readline(LINE_BYTES)):
                complete = raw.endswith(b"\n")


def _wide_lines(path: Path, encoding: str) -> Iterator[tuple[str, int]]:
    """As `lines`, for what PowerShell's `>` writes."""
    done = 0
    with open(path, encoding=encoding, errors="replace", newline="\n") as file:
        while line := file.readline(LINE_BYTES):
            done += 2 * len(line)
            yield line.lstrip("\ufeff").rstrip("\r\n"), done


def whole(text: str) -> int | None:
    """A whole number of at most 18 digits, as ids are; None for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def split(line: str, delimiter: str) -> list[str]:
    """The cells of one line; [] where they cannot be told apart."""
    try:
        rows = list(csv.reader([line], delimiter=delimiter, skipinitialspace=True))
    except csv.Error:
        return []
    return rows[0] if len(rows) == 1 else []


# --- tables ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """The columns of one table: `at` their places by name, `metrics` (place, name, unit) of the raw page."""

    delimiter: str
    width: int
    at: dict[str, int]
    metrics: tuple[tuple[int, str, str], ...] = ()
    summary: bool = False
    quoted: bool = False

    @property
    def is_details(self) -> bool:
        return METRIC in self.at

    @property
    def needed(self) -> int:
        """Cells without which a row says nothing."""
        names = (ID, KERNEL, METRIC, VALUE) if self.is_details else (ID, KERNEL)
        return 1 + max(self.at[name] for name in names if name in self.at)

    def cell(self, cells: Sequence[str], name: str) -> str:
        """The text of a row under a column, "" where it has none."""
        return readable(self.raw_cell(cells, name))

    def raw_cell(self, cells: Sequence[str], name: str) -> str:
        """As `cell`, with bytes that are not text as surrogates."""
        place = self.at.get(name)
        return cells[place].strip() if place is not None and place < len(cells) else ""


def header(line: str) -> Table | None:
    """The table whose columns `line` names, also behind output that had no end of line; else None."""
    if not any(hint in line for hint in _HEADER_HINTS) or len(line) > LINE_BYTES:
        return None
    start = line.find('"ID"')
    for text in (line, line[start:] if start > 0 else ""):
        for delimiter in (",", ";", "\t"):
            if text.count(delimiter) >= 2:
                table = _table(
                    [readable(name.strip()) for name in split(text, delimiter)], delimiter, text.startswith('"')
                )
                if table:
                    return table
    return None


def _table(names: list[str], delimiter: str, quoted: bool) -> Table | None:
    at: dict[str, int] = {}
    for place, name in enumerate(names):
        at.setdefault(name, place)
    for name, meaning in ALIASES.items():
        if name in at:
            at.setdefault(meaning, at[name])
    if KERNEL not in at:
        return None
    if METRIC in at:
        if VALUE in at and ID in at:
            return Table(delimiter, len(names), at, quoted=quoted)
        return Table(delimiter, len(names), at, summary=True) if set(at) & SUMMARY else None
    columns = tuple(_metric_column(place, name) for name, place in at.items() if _is_metric(name))
    if not any("__" in name for _, name, _ in columns):
        return None
    return Table(delimiter, len(names), at, columns, quoted=quoted)


def _is_metric(name: str) -> bool:
    return bool(name) and name not in CONTEXT and not _NVTX.search(name)


def _metric_column(place: int, name: str) -> tuple[int, str, str]:
    headed = _HEADED_UNIT.fullmatch(name) if len(name) <= metrics.LONGEST_METRIC else None
    title, unit = headed.groups() if headed else (name, "")
    return place, metrics.metric_of("", title, unit), unit


# --- rows --------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What a pass over a file met."""

    tables: int = 0
    rows: int = 0
    other_lines: int = 0
    damaged: int = 0
    surplus: int = 0
    summaries: int = 0
    messages: Counter[str] = field(default_factory=Counter)


def rows(path: Path, tally: Tally, tick: Callable[[int], None]) -> Iterator[tuple[Table, int, list[str]]]:
    """(table, its number, cells) of each row of each table of the file."""
    table: Table | None = None
    held: list[str] = []  # lines of a row whose quotes are still open
    for line, done in lines(path):
        tick(done)
        found = header(line)
        if found:
            tally.damaged += bool(held)
            held = []
            table = found
            tally.tables += 1
            tally.summaries += found.summary
            continue
        if table is None or table.summary:
            _other(line, tally)
            continue
        if held and (_starts_row(table, line) or len(held) >= JOINED_LINES):
            tally.damaged += 1
            held = []
        text = "\n".join((*held, line))
        if '"' in text and text.count('"') % 2 and (held or _starts_row(table, line)):
            held.append(line)
            continue
        if held and _cells(table, text) is None:
            tally.damaged += 1
            text = line
        held = []
        cells = _cells(table, text)
        if cells is None:
            _not_a_row(table, line, tally)
            continue
        tally.rows += 1
        tally.surplus += sum(1 for cell in cells[table.width :] if cell.strip())
        yield table, tally.tables, cells
    tally.damaged += bool(held)


def _starts_row(table: Table, line: str) -> bool:
    """Whether the line begins as a row does: with its first cell, and its id where that comes first."""
    if not table.quoted:
        return (
            line.count(table.delimiter) >= 2 and table.at.get(ID) == 0 and line.partition(table.delimiter)[0].isdigit()
        )
    if not line.startswith('"'):
        return False
    first = line[1:].partition('"')[0]
    return first.isdigit() or first == "" if table.at.get(ID) == 0 else True


def _cells(table: Table, line: str) -> list[str] | None:
    """The row that `line` holds, perhaps behind output that had no end of line; None if it is none."""
    cells = split(line, table.delimiter) if line.count(table.delimiter) >= 2 else []
    if _is_row(table, cells):
        return cells
    if table.quoted and table.at.get(ID) == 0:
        found = re.search(rf'"\d+"{re.escape(table.delimiter)}"', line)
        if found and found.start():
            cells = split(line[found.start() :], table.delimiter)
            if _is_row(table, cells):
                return cells
    return None


def _is_row(table: Table, cells: list[str]) -> bool:
    if len(cells) < table.needed:
        return False
    id_ = table.cell(cells, ID)
    if table.is_details:
        return whole(id_) is not None and bool(table.cell(cells, KERNEL))
    if ID in table.at and not id_:
        return is_units_row(table, cells)
    return (whole(id_) is not None or ID not in table.at) and bool(table.cell(cells, KERNEL))


def is_units_row(table: Table, cells: list[str]) -> bool:
    """The raw page's row of units: it belongs to no launch and holds no number."""
    if table.cell(cells, KERNEL) or len(cells) < table.width:
        return False
    told = [cells[place].strip() for place, _, _ in table.metrics]
    return not any(text[:1].isdigit() for text in told)


def _not_a_row(table: Table, line: str, tally: Tally) -> None:
    if table.quoted and _starts_row(table, line) and line.count(f'"{table.delimiter}"') >= 3:
        tally.damaged += 1
    else:
        _other(line, tally)


def _other(line: str, tally: Tally) -> None:
    if not line.strip():
        return
    tally.other_lines += 1
    said = TOOL_LINE.match(line)
    if said and said[1] != "PROF":
        tally.messages[readable(said[0].strip()[:300])] += 1
