"""Ranges, copies, CUDA graphs and the use of each device over the run's time."""

from __future__ import annotations

from collections.abc import Sequence

from nanalyze.analysis.report import clocks, values
from nanalyze.analysis.report.cells import Cell, Grid, Head, Row, foremost, measured, numbers, words
from nanalyze.analysis.report.figures import MOST_PANELS, Timeline

SHOWN_DEVICES = 200
SHOWN_RANGES = 40


def timelines(pieces: Sequence[Row], use: Sequence[Row], throttled: Sequence[Row]) -> list[Timeline]:
    """One timeline a device, its seconds counted from the first kernel of the run; `throttled` are of throttling.

    Of many devices the least busy.
    """
    found = []
    for device in foremost(use, MOST_PANELS, _busy):
        rows = [row for row in pieces if row["device"] == device["device"]]
        first = rows[0]["start_ns"]
        edges = [(row["start_ns"] - first) / 1e9 for row in rows] + [(rows[-1]["end_ns"] - first) / 1e9]
        lengths = [row["end_ns"] - row["start_ns"] - row["paused_ns"] for row in rows]
        clocked = [i for i, row in enumerate(rows) if row["sm_clock_hz"] is not None]
        found.append(
            Timeline(
                device["label"],
                edges,
                [values.number(row["busy_share"]) for row in rows],
                [
                    min((row["copy_ns"] or 0) / length, 1.0) if length > 0 else None
                    for row, length in zip(rows, lengths, strict=True)
                ],
                [(edges[i] + edges[i + 1]) / 2 for i in clocked],
                [rows[i]["sm_clock_hz"] for i in clocked],
                _spans(throttled, device["device"], True, first),
                _spans(throttled, device["device"], False, first),
            )
        )
    return found


def _spans(throttled: Sequence[Row], device: str, is_throttled: bool, first_ns: int) -> list[tuple[float, float]]:
    """When the device was held back, or else when its clock was low: (start, end) in seconds after `first_ns`."""
    return [
        ((row["start_ns"] - first_ns) / 1e9, (row["end_ns"] - first_ns) / 1e9)
        for row in throttled
        if row["device"] == device and (row["is_throttled"] if is_throttled else row["reason"] == clocks.LOW_CLOCK)
    ]


def use_grid(use: Sequence[Row], shown: int | None = None) -> Grid:
    """A row a device, of more than `shown` (SHOWN_DEVICES if None) the least busy."""
    shown = SHOWN_DEVICES if shown is None else shown
    heads = (Head("Device", style=""), Head("Busy", "a kernel runs"), Head("Busy time"), Head("Kernel time", "sum"),
             Head("Copying", "a copy runs"), Head("SM clock", "lowest to highest"))  # fmt: skip
    body = [
        (
            words(row["label"], "wide"),
            numbers(values.share, row["busy_share"]),
            numbers(values.duration, row["busy_ns"]),
            numbers(values.duration, row["kernel_ns"], "more than the busy time where kernels ran side by side"),
            numbers(values.share, row["copy_share"]),
            _clock_cell(row),
        )
        for row in foremost(use, shown, _busy)
    ]
    if not body:
        return Grid(notes=("No kernel launch has a start and an end, so there is no timeline.",))
    foot = f"Plotted are the {MOST_PANELS} least busy devices." if len(use) > MOST_PANELS else ""
    if len(use) > shown:
        least = f"Of {len(use):,} devices these are the {shown} least busy"
        foot += f" {least}; the query timeline_utilisation has all."
    return Grid(heads, body, foot=foot)


def _busy(row: Row) -> float:
    return 1.0 if row["busy_share"] is None else float(row["busy_share"])


def range_grid(ranges: Sequence[Row], total: int) -> Grid:
    if not ranges:
        return Grid(
            notes=(
                'No range was recorded. Mark parts of the job with recorder.annotate("name") to see the kernels and '
                "the time of each.",
            )
        )
    rated = any(row["flops_per_s"] is not None or row["bytes_per_s"] is not None for row in ranges)
    heads = [Head("Range", style=""), Head("Entered"), Head("Host time"), Head("Launches", "inside"),
             Head("Kernel time", "inside"), Head("Kernel time", "outside of inner ranges")]  # fmt: skip
    if rated:
        heads += [Head("Declared work", "over kernel time"), Head("Declared bytes", "over kernel time")]
    body = [_range_cells(row, rated) for row in ranges[:SHOWN_RANGES]]
    note = "A launch belongs to the innermost range that was open when it was queued, and to those around it."
    foot = "" if total <= SHOWN_RANGES else f"{total - SHOWN_RANGES:,} further ranges are in tables/ranges.csv."
    return Grid(heads, body, (note,), foot)


def copy_grid(copies: Sequence[Row]) -> Grid:
    if not copies:
        return Grid(notes=("No copy was recorded; memory sets are recorded only where that was asked for.",))
    heads = (Head("Kind", style=""), Head("From", style=""), Head("To", style=""), Head("Copies"), Head("Bytes"),
             Head("Mean size"), Head("Time"), Head("Rate"))  # fmt: skip
    body = [
        (
            words(row["kind"]),
            words(row["source"]),
            words(row["destination"]),
            numbers(values.count, row["copies"]),
            numbers(values.size, row["bytes"]),
            numbers(values.size, row["mean_bytes"]),
            numbers(values.duration, row["total_ns"]),
            numbers(_rate, row["bytes_per_s"]),
        )
        for row in copies[:SHOWN_RANGES]
    ]
    return Grid(heads, body)


def graph_grid(counters: Sequence[Row]) -> Grid:
    """CUDA graphs that were measured whole: one row a graph, from rows of `graph_counters`."""
    graphs: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in counters:
        graphs.setdefault((row["process"], row["device_id"], row["graph_id"]), {})[row["counter"]] = row
    heads = (Head("Graph", style=""), Head("Launches", "counted"), Head("Time", "a launch"),
             Head("Compute", "% of peak"), Head("Memory", "% of peak"), Head("DRAM bytes", "a launch"))  # fmt: skip
    body = [
        (
            words(f"graph {graph} in {process}", "wide"),
            numbers(values.count, max(row["launches"] for row in found.values())),
            numbers(values.duration, _value(found, "duration_ns")),
            measured(_value(found, "compute_pct"), "not counted"),
            measured(_value(found, "memory_pct"), "not counted"),
            numbers(values.size, _sum(found, "dram_read_bytes", "dram_write_bytes")),
        )
        for (process, _, graph), found in list(graphs.items())[:SHOWN_RANGES]
    ]
    note = (
        "Launches of CUDA graphs are counted whole: these are sums and means over all kernels of one graph launch, and "
        "say nothing of a single kernel."
    )
    return Grid(heads, body, (note,)) if body else Grid()


def _range_cells(row: Row, rated: bool) -> tuple[Cell, ...]:
    still_open = f"{row['ranges_open']:,} were never closed" if row["ranges_open"] else ""
    notes = []
    if row["kernels_untimed"]:
        notes.append(f"{row['kernels_untimed']:,} launches without known duration")
    if row["ranges_paused"]:
        notes.append(f"launches missing from {row['ranges_paused']:,} of the ranges: the recorder was paused")
    untimed = "; ".join(notes)
    cells: tuple[Cell, ...] = (
        words(row["name"], "wide", 120),
        numbers(values.count, row["ranges"], still_open),
        numbers(values.duration, row["host_ns"], still_open),
        numbers(values.count, row["kernels"], untimed),
        numbers(values.duration, row["kernel_ns"], untimed),
        numbers(values.duration, row["own_kernel_ns"]),
    )
    if rated:
        cells += (
            Cell(values.scaled(row["flops_per_s"], "FLOP/s"), title="" if row["flops"] else "no flops were declared"),
            Cell(values.scaled(row["bytes_per_s"], "B/s"), title="" if row["bytes"] else "no bytes were declared"),
        )
    return cells


def _clock_cell(row: Row) -> Cell:
    low, high = row["sm_clock_low_hz"], row["sm_clock_high_hz"]
    if low is None:
        return Cell(values.DASH, title="no clock was read: the layer device_state was off or the run too short")
    if low == high:
        return Cell(values.scaled(low, "Hz"))
    return Cell(f"{values.scaled(low, 'Hz')} to {values.scaled(high, 'Hz')}")


def _value(counters: dict[str, Row], name: str) -> float | None:
    return counters[name]["value"] if name in counters else None


def _sum(counters: dict[str, Row], *names: str) -> float | None:
    found = [_value(counters, name) for name in names]
    return None if any(value is None for value in found) else sum(value or 0.0 for value in found)


def _rate(value: object) -> str:
    return values.scaled(value, "B/s")
