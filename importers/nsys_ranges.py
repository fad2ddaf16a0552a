"""NVTX ranges of an Nsight Systems export.

Push/pop ranges nest by thread: parent and depth come from that. Start/end ranges may overlap
anything and stand alone. A range whose payload is a JSON object with `flops` or `bytes` brings
those numbers into the columns of that name.
"""

from __future__ import annotations

import json
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from nanalyze.importers.nsys_source import Columns, Wanted

if TYPE_CHECKING:
    from nanalyze.importers.nsys import _Export

TABLE = "NVTX_EVENTS"
PUSH_POP, START_END, DOMAIN = 59, 60, 75
INTEGERS = ("start", "end", "eventType", "globalTid", "textId", "domainId", "category", "jsonTextId")
PAYLOADS = ("uint64Value", "int64Value", "uint32Value", "int32Value")
REALS = ("doubleValue", "floatValue")
TEXTS = ("text", "jsonText")
THREAD_MASK = (1 << 24) - 1
WORK = ("flops", "bytes")


def read(export: _Export) -> None:
    """Feed the table `ranges` of each process."""
    chunks = list(export.source.scan(Wanted(TABLE, (*INTEGERS, *PAYLOADS), TEXTS, REALS)))
    chunks = [chunk for chunk in chunks if {"start", "eventType"} <= chunk.keys()]
    if not chunks:
        return
    table = _Table(export, _joined(chunks))
    kinds = np.ma.filled(table.column("eventType"), -1)
    is_range = (kinds == PUSH_POP) | (kinds == START_END)
    export.sink.count("NVTX ranges", int(np.count_nonzero(is_range)))
    export.sink.refuse("NVTX events that are no ranges (marks, names)", int(np.count_nonzero(~is_range)))
    threads = np.ma.filled(table.column("globalTid"), 0)
    process = threads >> 24
    for key in np.unique(process[is_range]).tolist():
        _add_process(export, table, key, np.flatnonzero(is_range & (process == key)), kinds)


def _add_process(export: _Export, table: _Table, key: int, rows: Any, kinds: Any) -> None:
    threads = np.ma.filled(table.column("globalTid"), 0)[rows]
    start = export.instants(table.column("start")[rows], "NVTX ranges")
    end = export.instants(table.column("end")[rows], "NVTX ranges")
    rows, threads, start, end = _believable(export, rows, threads, start, end)
    if not len(rows):
        return
    depth, parent = _nesting(threads, start, end, kinds[rows] == PUSH_POP)
    ids = np.arange(1, len(rows) + 1)
    texts = [table.describe(row) for row in rows.tolist()]
    export.sink.add(
        "ranges",
        export.process(key << 24),
        {
            "range_id": ids,
            "parent_id": np.ma.masked_equal(parent, 0),
            "depth": depth,
            "name": [name for name, _, _, _ in texts],
            "source": ["nvtx"] * len(rows),
            "thread_id": threads & THREAD_MASK,
            "start_ns": start,
            "end_ns": end,
            "flops": [flops for _, flops, _, _ in texts],
            "bytes": [moved for _, _, moved, _ in texts],
            "attributes": [attributes for _, _, _, attributes in texts],
        },
    )


def _believable(export: _Export, rows: Any, threads: Any, start: Any, end: Any) -> tuple[Any, Any, Any, Any]:
    """Without ranges that have no start; an end before its start is none."""
    known = ~np.ma.getmaskarray(start)
    export.sink.refuse("NVTX ranges without a start", int(np.count_nonzero(~known)))
    rows, threads, start, end = rows[known], threads[known], np.ma.getdata(start)[known], end[known]
    backward = np.ma.filled(end < start, False)
    export.sink.refuse("NVTX ranges: ends that lie before the start", int(np.count_nonzero(backward)))
    never = int(np.count_nonzero(np.ma.getmaskarray(end)))
    if never:
        export.sink.note(f"{never:,} NVTX ranges were never closed")
    return rows, threads, start, np.ma.MaskedArray(np.ma.getdata(end), mask=np.ma.getmaskarray(end) | backward)


def _nesting(threads: Any, start: Any, end: Any, nests: Any) -> tuple[Any, Any]:
    """Depth and parent's id (row + 1, 0 for none) of each range; those that do not nest stand alone."""
    last = np.ma.filled(end, np.iinfo(np.int64).max)
    depth, parent = np.zeros(len(start), dtype=np.int64), np.zeros(len(start), dtype=np.int64)
    order = np.lexsort((-last, start, threads))
    open_: list[tuple[int, int]] = []  # (end, row) of the thread's open ranges
    thread = None
    starts, ends, ids = start.tolist(), last.tolist(), threads.tolist()
    for row in order[nests[order]].tolist():
        if ids[row] != thread:
            thread, open_ = ids[row], []
        while open_ and (open_[-1][0] <= starts[row] or open_[-1][0] < ends[row]):
            open_.pop()
        depth[row] = len(open_)
        parent[row] = open_[-1][1] + 1 if open_ else 0
        open_.append((ends[row], row))
    return depth, parent


def _joined(chunks: list[Columns]) -> Columns:
    joined: Columns = {}
    for name in chunks[0]:
        parts = [chunk[name] for chunk in chunks]
        joined[name] = list(chain(*parts)) if isinstance(parts[0], list) else _concatenated(parts)
    return joined


def _concatenated(parts: list[Any]) -> Any:
    data, mask = (np.concatenate([of(part) for part in parts]) for of in (np.ma.getdata, np.ma.getmaskarray))
    return np.ma.MaskedArray(data, mask=mask)


class _Table:
    """The events with what their ids stand for."""

    def __init__(self, export: _Export, columns: Columns) -> None:
        self._export = export
        self._columns = columns
        self._rows = len(columns["start"])
        wanted = {
            int(id_) for name in ("textId", "jsonTextId") for id_ in np.unique(np.ma.compressed(self.column(name)))
        }
        self._strings = export.source.texts(wanted)
        self._lists = {
            name: _listed(columns[name]) for name in (*INTEGERS, *PAYLOADS, *TEXTS, *REALS) if name in columns
        }
        self._domains = self._find_domains()

    def column(self, name: str) -> Any:
        values = self._columns.get(name)
        return (
            np.ma.MaskedArray(np.zeros(self._rows, dtype=np.int64), mask=True)
            if values is None
            else np.ma.asarray(values)
        )

    def _at(self, name: str, row: int) -> Any:
        return self._lists[name][row] if name in self._lists else None

    def _find_domains(self) -> dict[tuple[int, int], str]:
        rows = np.flatnonzero(np.ma.filled(self.column("eventType"), -1) == DOMAIN).tolist()
        return {
            ((self._at("globalTid", row) or 0) >> 24, self._at("domainId", row)): self._name(row) or "" for row in rows
        }

    def _name(self, row: int) -> str | None:
        return self._at("text", row) or self._strings.get(self._at("textId", row))

    def describe(self, row: int) -> tuple[str, float | None, float | None, str | None]:
        """Name, flops, bytes and further attributes of a range."""
        name = self._name(row)
        if name is None:
            self._export.sink.refuse("NVTX ranges without a name")
        attributes = self._attributes(row)
        flops, moved = (_number(attributes.pop(key)) if key in attributes else None for key in WORK)
        return name or "(no name)", flops, moved, json.dumps(attributes) if attributes else None

    def _attributes(self, row: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        domain = self._domains.get(((self._at("globalTid", row) or 0) >> 24, self._at("domainId", row)))
        if domain:
            found["domain"] = domain
        if self._at("category", row):
            found["category"] = self._at("category", row)
        for name in (*PAYLOADS, *REALS):
            value = self._at(name, row)
            if value is not None and value == value:
                found["payload"] = value
                break
        text = self._at("jsonText", row) or self._strings.get(self._at("jsonTextId", row))
        return {**found, **_payload(text)} if text else found


def _payload(text: str) -> dict[str, Any]:
    """A JSON payload's members; anything else as one attribute."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"payload": text[:10_000]}


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    except OverflowError:
        return None


def _listed(values: Any) -> list[Any]:
    return values if isinstance(values, list) else np.ma.asarray(values).tolist()
