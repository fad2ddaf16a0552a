"""Ranks and devices side by side: who is slowest, and what the others wait."""

from __future__ import annotations

from collections.abc import Sequence

from nanalyze.analysis.report import values
from nanalyze.analysis.report.cells import Cell, Grid, Head, Row, foremost, numbers, words

SHOWN_RANKS = 64
NEGLIGIBLE = 0.01  # of kernel time: a rank that makes the others wait less than that is not worth a sentence


def rank_grid(rows: Sequence[Row], shown: int = SHOWN_RANKS) -> Grid:
    """A row a rank and device, from the shipped query `ranks`; nothing where none can be compared.

    Of more than `shown` the slowest, and those whose kernels took longest.
    """
    if not any(row["is_slowest"] for row in rows):
        return Grid()
    heads = (Head("Rank", "process and device", style=""), Head("Launches"), Head("Computing"),
             Head("Skew", "from the mean"), Head("Communicating"), Head("Share", "of kernel time"),
             Head("Waiting", "for others, at least"), Head("SM clock", "mean"))  # fmt: skip
    body = [
        (
            Cell(
                name(row) + (" (slowest)" if row["is_slowest"] else ""),
                "text",
                below=words(f"{row['process']}, {row['device'] or 'device'} {row['device_id']}").text,
            ),
            numbers(values.count, row["launches"]),
            numbers(values.duration, row["compute_ns"]),
            Cell(_signed(row["compute_skew"])),
            numbers(values.duration, row["communication_ns"]),
            numbers(values.share, row["communication_share"]),
            numbers(values.duration, row["waiting_ns"]) if row["waiting_ns"] != 0 else Cell("none"),
            Cell(values.scaled(row["sm_clock_hz"], "Hz")),
        )
        for row in foremost(rows, shown, _slowness)
    ]
    note = (
        "A collective's kernel runs until the last rank has joined, so time in it is transfer and waiting together. "
        "The rank with the least of it came last: the others wait for it. That holds where all ranks do the same. A "
        "collective that waits keeps SMs busy, so a rank that waits may compute for longer than the one it waits for."
    )
    more = f"Of {len(rows):,} these computed longest; all are in tables/ranks.csv." if len(rows) > shown else ""
    return Grid(heads, body, (note,), more)


def _slowness(row: Row) -> tuple[bool, float]:
    return not row["is_slowest"], -(row["compute_ns"] or 0)


def sentence(rows: Sequence[Row]) -> str:
    """Which rank is the slowest and what that costs the others; '' where there is nothing to tell."""
    slowest = next((row for row in rows if row["is_slowest"]), None)
    if slowest is None:
        return ""
    longest = max((row for row in rows if row["waiting_ns"]), key=lambda row: int(row["waiting_ns"]), default=None)
    if longest is not None:
        share = longest["waiting_ns"] / max(longest["compute_ns"] + longest["communication_ns"], 1)
        if share < NEGLIGIBLE:
            return ""
        return (
            f"{name(slowest)} is the slowest: {name(longest)} waited {values.duration(longest['waiting_ns'])} "
            f"({values.share(share)} of its kernel time) in collectives for it."
        )
    skew = slowest["compute_skew"]
    if skew is None or skew < NEGLIGIBLE:
        return ""
    return f"{name(slowest)} is the slowest: its kernels took {values.share(skew)} more time than the mean of all."


def name(row: Row) -> str:
    """`Rank 3`, or what tells it apart where no launcher numbered it."""
    if row["rank"] is not None:
        return f"Rank {row['rank']}"
    return f"{words(row['process']).text} device {row['device_id']}"


def _signed(value: object) -> str:
    number = values.number(value)
    return values.DASH if number is None else f"{100 * number:+.1f}{values.THIN}%"
