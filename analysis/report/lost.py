"""Where each device's time went while it did not compute, and what kernels leave unused of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nanalyze.analysis.report import values
from nanalyze.analysis.report.cells import Cell, Grid, Head, Row, numbers, tooltip, words
from nanalyze.analysis.report.names import shorten

SHOWN_DEVICES = 8
SHOWN_KERNELS = 15
NAME_CHARACTERS = 70
COMPUTE = "compute"

# What each cause of the query time_by_cause means, in a line.
MEANINGS = {
    "compute": "a kernel that computes ran",
    "communication": "only kernels that communicate ran, waiting included",
    "copy": "only copies or memory sets ran",
    "start": "the next kernel was queued: the device's own time to start it",
    "dependency": "the next kernel was queued, but waited for another stream, a device or the host",
    "launch": "the host launched as fast as it could, and the device was faster",
    "synchronisation": "the host called nothing until the device had run dry, and then soon: as if it waited for it",
    "host": "the host called nothing until long after the device had run dry",
    "before copy": "ended by a copy or set: when it was called is not recorded",
    "unknown": "when the next launch was called is not known, or a pause or replay lies at either end",
    "not recorded": "the recorder was paused, or replayed launches for counters: not the job's time",
}


def cause_grid(rows: Sequence[Row], labels: Mapping[str, str]) -> Grid:
    """A row a device and cause, from the shipped query time_by_cause."""
    if not rows:
        return Grid(notes=("Nothing has a start and an end, so there is no time to divide.",))
    devices = list(dict.fromkeys(row["device"] for row in rows))
    shown = shown_rows(rows)
    device_head = (Head("Device", style=""),) if len(devices) > 1 else ()
    heads = (*device_head, Head("Cause", style=""), Head("Share", "of the device's time"), Head("Time"), Head("Gaps"),
             Head("Mean gap"), Head("Longest"), Head("Mostly before", style=""))  # fmt: skip
    body = []
    for row in shown:
        device = (words(label(row["device"], labels, devices), "text"),) if len(devices) > 1 else ()
        body.append((*device, *_cause_cells(row)))
    note = (
        "From a device's first kernel or copy to the end of its last one. Each instant counts once: where a kernel "
        "computes, as compute, whatever else runs; else as communication, as copy, or by why nothing ran."
    )
    foot = f"These are the {SHOWN_DEVICES} devices that computed least; all are in tables/time_by_cause.csv."
    return Grid(heads, body, (note,), foot if len(devices) > SHOWN_DEVICES else "")


def shown_rows(rows: Sequence[Row]) -> list[Row]:
    """All rows of a few devices; of many, the sums over all (`device` is None) and those that computed least."""
    own: dict[str, list[Row]] = {}
    for row in rows:
        own.setdefault(row["device"], []).append(row)
    if len(own) <= SHOWN_DEVICES:
        return list(rows)
    least = sorted(own.values(), key=lambda found: sum(row["share"] or 0.0 for row in found if row["cause"] == COMPUTE))
    return [*_together(rows), *(row for found in least[:SHOWN_DEVICES] for row in found)]


def label(device: str | None, labels: Mapping[str, str], devices: Sequence[str]) -> str:
    """What the page calls a device of `shown_rows`."""
    return f"All {len(devices):,} devices" if device is None else labels.get(device, device)


def _together(rows: Sequence[Row]) -> list[Row]:
    """Sums over all devices by cause, largest first after compute."""
    causes: dict[str, list[Row]] = {}
    for row in rows:
        causes.setdefault(row["cause"], []).append(row)
    observed = sum(row["total_ns"] for row in rows if row["share"] is not None)
    found = [_sum(cause, own, observed) for cause, own in causes.items()]
    return sorted(found, key=lambda row: (row["cause"] != COMPUTE, row["share"] is None, -row["total_ns"]))


def _sum(cause: str, rows: Sequence[Row], observed_ns: int) -> Row:
    total, gaps = sum(row["total_ns"] for row in rows), sum(row["gaps"] or 0 for row in rows)
    before: dict[str, int] = {}
    for row in rows:
        if row["kernel"] is not None:
            before[row["kernel"]] = before.get(row["kernel"], 0) + row["total_ns"]
    return {
        "device": None,
        "cause": cause,
        "share": None if rows[0]["share"] is None or not observed_ns else total / observed_ns,
        "total_ns": total,
        "gaps": gaps or None,
        "mean_gap_ns": total / gaps if gaps else None,
        "longest_gap_ns": max(
            (row["longest_gap_ns"] for row in rows if row["longest_gap_ns"] is not None), default=None
        ),
        "kernel": max(before, key=lambda name: before[name], default=None),
    }


def _cause_cells(row: Row) -> tuple[Cell, ...]:
    name = row["kernel"]
    return (
        Cell(row["cause"], "wide", below=MEANINGS[row["cause"]]),
        numbers(values.share, row["share"], "belongs to no share" if row["share"] is None else ""),
        numbers(values.duration, row["total_ns"]),
        numbers(values.count, row["gaps"]),
        numbers(values.duration, row["mean_gap_ns"]),
        numbers(values.duration, row["longest_gap_ns"]),
        Cell(shorten(name, NAME_CHARACTERS), "text", tooltip(name)) if name else Cell(values.DASH, ""),
    )


def kernel_grid(rows: Sequence[Row]) -> Grid:
    """Kernels that leave SMs empty, from the shipped query kernel_losses."""
    if not rows:
        return Grid()
    heads = (Head("Kernel", style=""), Head("Time"), Head("Waves"), Head("Tail", "could save at most"),
             Head("Occupancy", "achieved"), Head("Possible"), Head("Limited by", style=""),
             Head("Occupancy", "could save at most"))  # fmt: skip
    body = [_kernel_cells(row) for row in rows[:SHOWN_KERNELS]]
    note = (
        "A grid runs in waves of as many blocks as the device holds at once; the last one may leave most of it empty. "
        "The bounds are upper bounds, for blocks that take equally long, and overlap. Occupancy has one only where "
        "counters say that the kernel waits for latency."
    )
    more = len(rows) - SHOWN_KERNELS
    return Grid(heads, body, (note,), f"{more:,} further kernels are in tables/kernel_losses.csv." if more > 0 else "")


def _kernel_cells(row: Row) -> tuple[Cell, ...]:
    name = row["kernel"] or ""
    last = f"the last fills {values.share(row['last_wave'])} of the device" if row["last_wave"] is not None else ""
    waves = values.number(row["waves"])
    return (
        Cell(shorten(name, NAME_CHARACTERS), "wide", tooltip(name)),
        numbers(values.duration, row["total_ns"]),
        Cell(values.DASH if waves is None else values.digits(waves), title=last),
        numbers(values.duration, row["tail_bound_ns"], "one wave, so no tail" if row["tail_bound_ns"] is None else ""),
        numbers(values.percent, row["occupancy_pct"], "not counted" if row["occupancy_pct"] is None else ""),
        numbers(values.percent, row["theoretical_occupancy_pct"]),
        words(row["limiter"]),
        numbers(values.duration, row["occupancy_bound_ns"]),
    )
