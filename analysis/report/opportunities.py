"""The changes that could gain the most, each with its upper bound, its evidence and the query that shows it."""

from __future__ import annotations

from collections.abc import Sequence

from nanalyze.analysis.report import values
from nanalyze.analysis.report.cells import Cell, Grid, Head, Row, numbers, tooltip, words
from nanalyze.analysis.report.names import shorten

NAME_CHARACTERS = 60

# What each change of the query opportunities is called, and how one might go about it.
CHANGES = {
    "launches": ("Launch faster", "CUDA graphs, fewer and larger kernels, less work on the host between launches"),
    "start": ("Fewer starts", "fuse short kernels; CUDA graphs and programmatic dependent launch shorten starts"),
    "waiting": ("Do not wait for the device", "no synchronisation, .item() or blocking copy before the next launches"),
    "host": ("Have work queued", "find what the host does meanwhile: data loading, Python, compilation, I/O"),
    "dependencies": ("Fewer dependencies", "events and streams that make a queued kernel wait"),
    "issue": ("Issue copies earlier", "the device stood still until a copy or memory set came"),
    "overlap": ("Overlap communication", "compute something that does not need the result meanwhile"),
    "copies": ("Overlap copies", "asynchronous copies from pinned memory on a stream of their own"),
    "access": ("Better memory access", "coalescing, vector loads, locality: closer to the peak of memory"),
    "arithmetic": ("Better use of the pipes", "tile shapes, fewer other instructions: closer to the peak of compute"),
    "latency": ("Hide latency", "more work in flight: more parallelism, fewer dependent instructions"),
    "rate": ("Closer to the peaks", "neither memory nor compute is used up"),
    "fusion": ("Fuse with the kernel before", "what one writes to DRAM and the other reads would stay on the chip"),
    "tail": ("No tail", "another tile or grid size, so that the last wave fills the device"),
    "occupancy": ("Higher occupancy", "more resident warps, by what limits them now"),
}


def grid(rows: Sequence[Row], path: str) -> Grid:
    """A row a change, from the shipped query opportunities; `path` is the run directory as a shell word."""
    if not rows:
        return Grid(notes=("Nothing that was recorded bounds the gain of any change.",))
    heads = (Head("#"), Head("Change", "and how one might go about it", style=""), Head("Saves", "at most"),
             Head("Share", "of the devices' time"), Head("As fast", "at most"),
             Head("Evidence", "and the query that shows it", style=""))  # fmt: skip
    body = [(Cell(str(place), "rank"), *_cells(row, path)) for place, row in enumerate(rows, 1)]
    note = (
        "Upper bounds (Amdahl's law): what would be saved if that loss went to nothing and all else stayed as it is. "
        "The true gain is smaller. They overlap, so they do not add up."
    )
    return Grid(heads, body, (note,))


def _cells(row: Row, path: str) -> tuple[Cell, ...]:
    title, how = CHANGES[row["change"]]
    name = row["subject"]
    speedup = values.number(row["speedup_bound"])
    where = shorten(name, NAME_CHARACTERS) if name else ""
    at = ("mostly before " if row["shown_by"] == "time_by_cause" else "") + where if where else ""
    return (
        Cell(f"{title}: {at}" if at else title, "wide", tooltip(name) if name else "", below=how),
        numbers(values.duration, row["bound_ns"]),
        numbers(values.share, row["share"]),
        Cell(values.DASH if speedup is None else f"{speedup:.2f}{values.THIN}×"),
        Cell(f"{words(row['evidence']).text} ({row['method']})", "wide", below=command(row["shown_by"], path)),
    )


def command(shown_by: str, path: str) -> str:
    """What to type for the query: a shipped one by name, or the statement itself."""
    if " " in shown_by:
        return f'nanalyze sql {path} "{shown_by}"'
    return f"nanalyze sql {path} --query {shown_by}"
