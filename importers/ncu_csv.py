"""Nsight Compute's `--csv` output: the details page and the raw page.

The details page has a row a metric, the raw page a row a launch with its units in the first row;
`ncu_table` finds them among the program's own output. How numbers are written is decided from all
of them before any is used (`numbers.Evidence`), so the file is read twice.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path

from nanalyze.importers import ncu_metrics as metrics
from nanalyze.importers import numbers
from nanalyze.importers.ncu_launch import Launch, Launches, Shape
from nanalyze.importers.ncu_table import (
    ID,
    KERNEL,
    METRIC,
    RULE,
    RULE_TEXT,
    TOOL_LINE,
    UNIT,
    VALUE,
    Table,
    Tally,
    decode,
    encoding_of,
    header,
    is_units_row,
    lines,
    readable,
    rows,
    whole,
)
from nanalyze.importers.options import ImportFailed, Options
from nanalyze.importers.sink import Sink
from nanalyze.rundir.counters import PCT_ACTIVE, PCT_ELAPSED

KIND = "ncu-csv"

OPEN_LAUNCHES = 10_000  # whose rows are still being collected; rows of a launch stand together
TOOL_MESSAGES = 3  # of the tool that an error repeats
LOGS = (".csv", ".txt", ".log", ".out")  # whose table may come after any amount of other output

_SHAPE = re.compile(r"\(?\s*(\d+)\s*[,;x]\s*(\d+)\s*[,;x]\s*(\d+)\s*\)?")
_CC = re.compile(r"(\d{1,4})\.(\d{1,4})")


def detect(path: Path, head: bytes) -> bool:
    """Whether the file holds Nsight Compute's table or at least its messages."""
    text = decode(head, encoding_of(head))
    if any(TOOL_LINE.match(line) or header(line) for line in text.splitlines()):
        return True
    if path.suffix.lower() not in LOGS or not path.is_file() or b"\0" in head[:1024]:
        return False
    # A program may print a lot before the table comes.
    return any(header(line) for line, _ in lines(path))


# --- reading -----------------------------------------------------------------------------------------


def read(paths: Sequence[Path], sink: Sink, options: Options, progress: Callable[[int, int], None]) -> None:
    """Feed the sink with every launch of `paths`.

    Raises ImportFailed for a file without a table, for a summary page (which holds no single
    launches), and where the number format stays in doubt.
    """
    total = 2 * sum(path.stat().st_size for path in paths)
    done = 0
    for number, path in enumerate(paths):
        size = path.stat().st_size
        survey = _survey(path, options, _ticker(progress, done, total))
        reader = _Reader(sink, options, survey, f"{path.stem}-" if len(paths) > 1 else "", number)
        reader.read(path, _ticker(progress, done + size, total))
        done += 2 * size


def _ticker(progress: Callable[[int, int], None], before: int, total: int) -> Callable[[int], None]:
    return lambda done: progress(min(before + done, total), total)


def _survey(path: Path, options: Options, tick: Callable[[int], None]) -> numbers.Format:
    """The number format of the file, from all of its numbers; ImportFailed where there is none."""
    tally, evidence = Tally(), numbers.Evidence()
    for table, _, cells in rows(path, tally, tick):
        if table.is_details:
            value = table.cell(cells, VALUE)
            evidence.see(value)
            _cross_check(evidence, table, cells, table.cell(cells, METRIC), value)
        elif not is_units_row(table, cells):
            for place, metric, _ in table.metrics:
                if place < len(cells):
                    evidence.see(cells[place])
                    _cross_check(evidence, table, cells, metric, cells[place])
    if not tally.rows:
        raise ImportFailed(path, *_why_empty(tally))
    return evidence.decide(path, options.locale)


def _cross_check(evidence: numbers.Evidence, table: Table, cells: list[str], metric: str, value: str) -> None:
    """Sizes that the file also tells as a shape show how their thousands are written."""
    columns = {
        "Grid Size": ("Grid Size",),
        "Block Size": ("Block Size",),
        "launch__grid_size": ("Grid Size",),
        "launch__block_size": ("Block Size",),
        "Threads": ("Grid Size", "Block Size"),
        "launch__thread_count": ("Grid Size", "Block Size"),
    }.get(metric)
    if columns is None:
        return
    product = 1
    for column in columns:
        shape = _shape(table.cell(cells, column))
        if shape is None:
            return
        product *= shape[0] * shape[1] * shape[2]
    evidence.see_value(value, Decimal(product))


def _why_empty(tally: Tally) -> tuple[str, str]:
    if tally.summaries:
        return (
            "is a summary over launches and holds no single one",
            "Export it again without --print-summary.",
        )
    again = "Run ncu --csv again, with the kernels that are wanted in its filters."
    if tally.messages:
        said = "; ".join(message for message, _ in tally.messages.most_common(TOOL_MESSAGES))
        return f"holds no table, only messages: {said}", again
    if tally.tables:
        return "has a table without rows", again
    return "holds no table of Nsight Compute (a line with the columns ID and Kernel Name)", again


class _Reader:
    """Reads one file whose number format is known."""

    def __init__(self, sink: Sink, options: Options, format_: numbers.Format, prefix: str, number: int) -> None:
        self._sink = sink
        self._format = format_
        self._prefix = prefix
        self._device = _device_wanted(options.device)
        self._launches = Launches(sink)
        self._open: OrderedDict[tuple[str, int], Launch] = OrderedDict()
        self._closed: set[tuple[str, int]] = set()
        self._units: dict[int, dict[int, str]] = {}
        self._processes: dict[tuple[int, str, str], str] = {}
        self._taken: Counter[str] = Counter()
        self._sequence = 0

    def read(self, path: Path, tick: Callable[[int], None]) -> None:
        tally = Tally()
        for table, number, cells in rows(path, tally, tick):
            if table.is_details:
                self._details(table, number, cells)
            else:
                self._raw(table, number, cells)
        while self._open:
            self._close_first()
        self._launches.close()
        self._sink.count("tables", tally.tables)
        self._sink.count("rows", tally.rows)
        self._sink.count("lines of other output", tally.other_lines)
        self._sink.refuse("rows that are cut short or damaged", tally.damaged)
        self._sink.refuse("cells beyond the last column", tally.surplus)
        for message, n in tally.messages.most_common(TOOL_MESSAGES):
            self._sink.note(f"ncu said{f' {n} times' if n > 1 else ''}: {message}")

    def _details(self, table: Table, number: int, cells: list[str]) -> None:
        launch = self._launch(table, number, cells, int(table.cell(cells, ID)))
        if launch is None:
            return
        label, value = table.cell(cells, METRIC), table.cell(cells, VALUE)
        if table.cell(cells, RULE):
            self._sink.count("rule results")
            launch.rules.append(table.cell(cells, RULE_TEXT))
        if not label:
            if not table.cell(cells, RULE):
                self._sink.refuse("rows without a metric")
            return
        unit = table.cell(cells, UNIT) if UNIT in table.at else None
        metric = metrics.metric_of(table.cell(cells, "Section Name"), label, unit or "")
        self._put(launch, metric, value, unit)

    def _raw(self, table: Table, number: int, cells: list[str]) -> None:
        if is_units_row(table, cells):
            self._units[number] = {place: cells[place].strip() for place, _, _ in table.metrics}
            return
        text = table.cell(cells, ID)
        self._sequence += 1
        launch = self._launch(table, number, cells, int(text) if text else self._sequence - 1)
        if launch is None:
            return
        units = self._units.get(number)
        for place, metric, unit in table.metrics:
            if place < len(cells):
                told = unit or (units.get(place, "") if units is not None else None)
                self._put(launch, metric, readable(cells[place].strip()), told)

    def _put(self, launch: Launch, metric: str, text: str, unit: str | None) -> None:
        """Take one cell; without a unit, only of metrics that no tool prints scaled."""
        if metric == metrics.DEVICE_NAME:
            launch.device_name = text or None
        if unit is None and _is_scalable(metric):
            self._sink.refuse("values without their unit (no column or row of units)")
            launch.put(metric, None)
            return
        value, known = self._value(text, unit or "", metric)
        if not known.known and value is not None:
            if _is_scalable(metric):
                self._sink.refuse("bytes, times and frequencies in units that are not known")
                value = None
            else:
                self._sink.count("values in units that are not known, taken as they are")
        if not launch.put(metric, value, known.scaled and value is not None):
            self._sink.count("values that repeat another")

    def _value(self, text: str, unit: str, metric: str) -> tuple[float | None, numbers.Unit]:
        known = numbers.unit(unit)
        try:
            parsed = numbers.parse(text, self._format)
        except ValueError:
            if text[:1].isdigit() and "__attribute_" not in metric:
                self._sink.refuse(f"values that are no numbers as the file writes them ({self._format.name})")
            return None, known
        return (None if parsed is None else float(parsed * known.factor)), known

    def _launch(self, table: Table, number: int, cells: list[str], id_: int) -> Launch | None:
        """The launch of a row, made on its first one; None for a device that is not wanted."""
        device = whole(table.cell(cells, "Device"))
        if self._device is not None and device is not None and device != self._device:
            self._sink.count("rows of other devices")
            return None
        process = self._process(table, number, cells)
        key = (process, id_)
        launch = self._open.get(key)
        if launch is None:
            if key in self._closed:
                self._sink.refuse("rows far from the others of their launch")
                return None
            launch = self._open[key] = _new_launch(table, cells, id_, device)
            if len(self._open) > OPEN_LAUNCHES:
                self._close_first()
        return launch

    def _close_first(self) -> None:
        key, launch = self._open.popitem(last=False)
        self._closed.add(key)
        self._launches.write(key[0], launch)

    def _process(self, table: Table, number: int, cells: list[str]) -> str:
        """The partition of a row's process: a table of its own, since ids start anew in each."""
        host, pid = table.cell(cells, "Host Name") or "unknown", table.cell(cells, "Process ID")
        known = self._processes.get((number, host, pid))
        if known is None:
            key = f"{self._prefix}{host}-{pid or 'unknown'}"
            self._taken[key] += 1
            if self._taken[key] > 1:
                key += f"-table{self._taken[key]}"
            facts = {"host": host, "pid": whole(pid)}
            known = self._sink.process(key, **facts)
            self._processes[number, host, pid] = known
        return known


def _device_wanted(device: str | None) -> int | None:
    if device is None:
        return None
    if not device.isdigit():
        raise ImportFailed(
            "--device", f"{device}: Nsight Compute's files name devices by number only", "Give a number."
        )
    return int(device)


def _new_launch(table: Table, cells: list[str], id_: int, device: int | None) -> Launch:
    name = table.raw_cell(cells, KERNEL)
    capability = _CC.fullmatch(table.cell(cells, "CC"))
    return Launch(
        id_,
        name.encode("utf-8", "surrogateescape"),
        readable(name),
        device,
        whole(table.cell(cells, "Context")),
        whole(table.cell(cells, "Stream")),
        _shape(table.cell(cells, "Grid Size")),
        _shape(table.cell(cells, "Block Size")),
        (int(capability[1]), int(capability[2])) if capability else None,
    )


def _shape(text: str) -> Shape | None:
    found = _SHAPE.fullmatch(text) if len(text) < 64 else None
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def _is_scalable(metric: str) -> bool:
    """Whether tools print the metric in kilo, mega or micro: bytes, times and frequencies."""
    if metric.endswith((".pct", "_pct", PCT_ELAPSED, PCT_ACTIVE)) or ".pct_of" in metric:
        return False
    return any(word in metric for word in ("byte", "time", "per_second", "shared_mem_", "_size_bytes", "cache_size"))
