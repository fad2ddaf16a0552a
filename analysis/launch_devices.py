"""The devices of a run as a pass over its launches knows them: their numbers, who shares them, how busy they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import duckdb
import numpy as np

from nanalyze.analysis import launch_sums as sums
from nanalyze.analysis.launch_reader import Integers

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Device:
    """A device: its number and name in _device_numbers, the (process, ordinal) that see it."""

    number: int
    name: str
    owners: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Span:
    """A device as a process sees it: first start and last end of its kernels that took any time, None without any."""

    process: str
    ordinal: int
    name: str
    first_ns: int | None
    last_ns: int | None


def devices(cursor: duckdb.DuckDBPyConnection) -> dict[int, Device]:
    """The devices of the run, by number."""
    owners: dict[tuple[int, str], list[tuple[str, int]]] = {}
    rows = cursor.execute("SELECT number, device, process, device_id FROM _device_numbers ORDER BY ALL").fetchall()
    for number, name, process, ordinal in rows:
        owners.setdefault((number, name), []).append((process, ordinal))
    return {number: Device(number, name, tuple(seen)) for (number, name), seen in owners.items()}


def numbers_by_process(known: Mapping[int, Device]) -> dict[str, dict[int, int]]:
    """The number of each device of a process, by ordinal."""
    found: dict[str, dict[int, int]] = {}
    for device in known.values():
        for process, ordinal in device.owners:
            found.setdefault(process, {})[ordinal] = device.number
    return found


def device_numbers(numbers: Mapping[int, int], ordinals: Integers) -> Integers:
    """The number of each ordinal; 0 for one of which no time is known."""
    if not len(ordinals):
        return np.zeros(0, np.int32)
    low, high = int(ordinals.min()), int(ordinals.max())
    if low == high:
        return np.full(len(ordinals), numbers.get(low, 0), np.int32)
    known = np.array(sorted(numbers) or [0])
    place = np.searchsorted(known, ordinals).clip(max=len(known) - 1)
    found = np.array([numbers.get(ordinal, 0) for ordinal in known.tolist()], np.int32)[place]
    return np.where(known[place] == ordinals, found, 0)


# First start and last end of the kernels on each device that took any time: of what the report has worked out anyway.
SPANS = """
SELECT process, device_id, min(first_long_ns) AS first_ns, max(last_long_ns) AS last_ns
FROM _class_devices
GROUP BY process, device_id
"""


def named_spans(cursor: duckdb.DuckDBPyConnection, spans: str = SPANS) -> list[Span]:
    """The devices that each process launched kernels on; `spans` is a statement like SPANS."""
    named = f"""
        SELECT DISTINCT
            k.process, k.device_id, COALESCE(d.uuid, concat(k.process, '/', CAST(k.device_id AS VARCHAR))),
            k.first_ns, k.last_ns
        FROM ({spans}) AS k
        LEFT JOIN devices AS d ON d.process = k.process AND d.device_id = k.device_id
        ORDER BY ALL
    """
    return [Span(*row) for row in cursor.execute(named).fetchall()]


def of_spans(spans: Sequence[Span]) -> dict[int, Device]:
    """The devices whose kernels took any time, numbered by name."""
    owners: dict[str, list[tuple[str, int]]] = {}
    for span in spans:
        if span.first_ns is not None:
            owners.setdefault(span.name, []).append((span.process, span.ordinal))
    return {number: Device(number, name, tuple(owners[name])) for number, name in enumerate(sorted(owners), 1)}


def empty_pieces(
    cursor: duckdb.DuckDBPyConnection, known: Mapping[int, Device], spans: Sequence[Span], buckets: int
) -> dict[int, sums.Pieces]:
    """Of the devices whose kernels took any time, cut as timeline_utilisation does."""
    times = [(span.first_ns, span.last_ns) for span in spans if span.first_ns is not None and span.last_ns is not None]
    if not times:
        return {}
    first, last = min(start for start, _ in times), max(end for _, end in times)
    width = max((last - first + buckets - 1) // buckets, 1)
    pauses: dict[str, set[tuple[int, int]]] = {}
    for process, start, end in cursor.execute(_PAUSES, {"first_ns": first, "last_ns": last}).fetchall():
        for name in {span.name for span in spans if span.process == process}:
            pauses.setdefault(name, set()).add((max(start, first), min(end, last)))
    seen = {span.name for span in spans if span.first_ns is not None}
    return {
        number: sums.Pieces(first, width, buckets, sorted(pauses.get(device.name, ())))
        for number, device in known.items()
        if device.name in seen
    }


_PAUSES = "SELECT process, start_ns, end_ns FROM _pause_spans WHERE start_ns < $last_ns AND end_ns > $first_ns"


def components(known: Mapping[int, Device], processes: set[str]) -> Iterator[tuple[set[str], list[int]]]:
    """Processes that share devices, and those devices: what has to be gone through together."""
    group = {process: ({process}, list[int]()) for process in sorted(processes)}
    for device in known.values():
        owners = [process for process, _ in device.owners]
        members, numbers = group.setdefault(owners[0], ({owners[0]}, []))
        for process in owners[1:]:
            others = group.get(process, ({process}, []))
            if others[0] is not members:
                members |= others[0]
                numbers += others[1]
        numbers.append(device.number)
        group.update(dict.fromkeys(members, (members, numbers)))
    yield from {id(members): (members, numbers) for members, numbers in group.values()}.values()


def use_table(known: Mapping[int, Device], found: Mapping[int, sums.Pieces]) -> pa.Table | None:
    """The rows of timeline_utilisation; None where no kernel took any time."""
    import pyarrow as pa

    tables = []
    for number in sorted(found, key=lambda number: known[number].name.encode()):
        pieces = found[number]
        paused = sums.paused(pieces)
        busy, left = pieces.covered - paused, pieces.width_ns - paused
        start = pieces.first_ns + pieces.width_ns * np.arange(pieces.count)
        tables.append(
            pa.table(
                {
                    "device": pa.array([known[number].name] * pieces.count, pa.string()),
                    "bucket": np.arange(pieces.count),
                    "start_ns": start,
                    "end_ns": start + pieces.width_ns,
                    "busy_ns": busy,
                    "paused_ns": paused,
                    "busy_share": pa.array(busy / np.where(left, left, 1), mask=left == 0),
                    "kernel_ns": pieces.kernels,
                }
            )
        )
    return pa.concat_tables(tables) if tables else None
