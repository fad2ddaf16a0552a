"""Clocks that were held back: for how long, why, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nanalyze.analysis.report import values
from nanalyze.analysis.report.cells import Cell, Grid, Head, Row, numbers, words

LOW_CLOCK = "low clock"
# What NVML's reasons mean, in the words of nvml.h.
MEANINGS = {
    "GPU idle": "nothing was running, so the clocks dropped",
    "applications clocks setting": "an administrator limited the clocks",
    "SW power cap": "the power limit was reached",
    "HW slowdown": "the board cut the clocks by half or more: heat, power or an external brake",
    "sync boost": "another GPU of its group runs slower",
    "SW thermal slowdown": "the GPU or its memory was too hot",
    "HW thermal slowdown": "the GPU was so hot that the board cut the clocks by half or more",
    "HW power brake slowdown": "the server's power supply asked for less",
    "display clock setting": "the display limits the clocks",
    "unknown to nanalyze": "a reason that this version does not know",
}


def throttle_grid(rows: Sequence[Row], labels: Mapping[str, str], low_clock_pct: float, was_observed: bool) -> Grid:
    """For how long each reason held; `rows` are of the query report_throttling."""
    if not was_observed:
        return Grid(notes=("Clocks and throttling were not read: the layer device_state was off or NVML is missing.",))
    if not rows:
        return Grid(
            notes=(
                f"No reading showed a reason to lower the clocks, nor one below {low_clock_pct:g} % of the highest.",
            )
        )
    heads = (Head("Device", style=""), Head("Why the clocks were low", style=""), Head("Time"),
             Head("Share", "of the time read"), Head("Began"), Head("SM clock", "lowest to highest"))  # fmt: skip
    body = [
        (
            words(labels.get(row["device"], row["device"]), "text"),
            Cell(words(row["reason"]).text, "wide", below=_meaning(row["reason"], low_clock_pct)),
            numbers(values.duration, row["duration_ns"]),
            numbers(values.share, row["share"]),
            Cell("once" if row["times"] == 1 else f"{row['times']:,} times"),
            Cell(span(row["sm_clock_lowest_hz"], row["sm_clock_highest_hz"])),
        )
        for row in rows
    ]
    note = (
        "From NVML's readings, about one a second, so shorter moments are missed. Several reasons can hold at once: "
        "their times do not add up."
    )
    return Grid(heads, body, (note,))


def _meaning(reason: str, low_clock_pct: float) -> str:
    if reason == LOW_CLOCK:
        return f"SM clock below {low_clock_pct:g} % of the highest, whatever the reason"
    return MEANINGS.get(reason, "")


def span(low: object, high: object) -> str:
    """`1.20 GHz to 1.50 GHz`, or one of them if they look alike."""
    if values.number(low) is None:
        return values.DASH
    first, last = values.scaled(low, "Hz"), values.scaled(high, "Hz")
    return first if first == last else f"{first} to {last}"


def sentence(rows: Sequence[Row], labels: Mapping[str, str]) -> str:
    """For the top of the page: the device that was held back the most; '' where none was."""
    held = [row for row in rows if row["is_throttled"] and row["share"] is not None]
    if not held:
        return ""
    worst = max(held, key=lambda row: float(row["share"]))
    device = words(labels.get(worst["device"], worst["device"])).text
    others = len({row["device"] for row in held}) - 1
    also = f", and {others:,} other GPU{'s' if others > 1 else ''} at times" if others else ""
    return (
        f"{device} was held back by {words(worst['reason']).text} ({MEANINGS.get(worst['reason'], 'see below')}) for "
        f"{values.share(worst['share'])} of the time{also}: its kernels ran at lower clocks than they could."
    )
