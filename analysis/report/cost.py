"""What recording cost the job: the measured slowdown of its steps, the recorder's CPU time, the pauses."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nanalyze.analysis.report import values
from nanalyze.analysis.report.cells import Cell, Grid, Head, Row, foremost, numbers, words
from nanalyze.analysis.report.sections import SHOWN_ROWS, lasted

NOTE = (
    "At random moments the recorder switches itself off for a few steps. Slowdown is how much longer steps typically "
    "took with the recorder on, in equally much time right beside each pause; the interval is Wilcoxon's, with each "
    "pause as one observation. CPU time is that of the recorder's own threads, in percent of one core."
)


def costs(overhead: Sequence[Row], processes: Sequence[Row], pauses: Sequence[Row]) -> list[Row]:
    """One row a recorded process: the row of `overhead`, with cpu_share (of a core), paused_ns and paused_share."""
    lasting = {row["process"]: row for row in processes}
    paused: dict[str, int] = {}
    for row in pauses:
        paused[row["process"]] = paused.get(row["process"], 0) + max(row["end_ns"] - row["start_ns"], 0)
    return [
        {
            **row,
            "cpu_ns": lasting[row["process"]]["recorder_cpu_ns"],
            "cpu_share": values.ratio(lasting[row["process"]]["recorder_cpu_ns"], lasted(lasting[row["process"]])),
            "paused_ns": paused.get(row["process"], 0),
            "paused_share": values.ratio(paused.get(row["process"], 0), lasted(lasting[row["process"]])),
        }
        for row in overhead
    ]


def cost_grid(rows: Sequence[Row]) -> Grid:
    if not rows:
        return Grid(notes=("Not measured: the run was imported, so no recorder of nanalyze was at work.",))
    if not any(row["slowdown_pct"] is not None for row in rows) and len({row["reason"] for row in rows}) == 1:
        note = f"The slowdown was not measured: {words(rows[0]['reason']).text}."
    else:
        note = NOTE
    heads = (Head("Process", "and its step", style=""), Head("Slowdown", "of a step"), Head("95 % interval"),
             Head("Step", "on"), Head("Step", "off"), Head("Steps compared", "on and off"),
             Head("Pauses", "share of the time"), Head("Recorder's CPU", "% of one core"))  # fmt: skip
    body = [_cells(row) for row in foremost(rows, SHOWN_ROWS, _cheapness)]
    foot = f"Of {len(rows):,} processes these are the {SHOWN_ROWS} dearest; all are in tables/overhead.csv."
    return Grid(heads, body, (note,), foot if len(rows) > SHOWN_ROWS else "")


def _cheapness(row: Row) -> tuple[float, float]:
    slowdown = values.number(row["slowdown_pct"])
    return math.inf if slowdown is None else -slowdown, -(row["cpu_share"] or 0.0)


def _cells(row: Row) -> tuple[Cell, ...]:
    known = row["slowdown_pct"] is not None
    step = f"range “{words(row['range_name']).text}”" if row["range_name"] else words(row["reason"]).text
    below = step if known or not row["range_name"] else f"{step}: {words(row['reason']).text}"
    return (
        Cell(words(row["process"]).text, "wide", below=below),
        Cell(signed(row["slowdown_pct"]), title="" if known else words(row["reason"]).text),
        Cell(f"{signed(row['low_pct'])} to {signed(row['high_pct'])}" if known else values.DASH),
        numbers(values.duration, row["mean_on_ns"], "mean of the steps compared"),
        numbers(values.duration, row["mean_off_ns"], "mean of the steps compared"),
        Cell(f"{row['steps_on']:,} and {row['steps_off']:,}" if row["steps_off"] else values.DASH),
        Cell(f"{row['pauses']:,}", below=values.share(row["paused_share"]) if row["pauses"] else ""),
        Cell(
            f"{100 * row['cpu_share']:.2g}{values.THIN}%" if row["cpu_share"] is not None else values.DASH,
            title=values.duration(row["cpu_ns"]),
        ),
    )


def signed(pct: object) -> str:
    """A slowdown with its sign, to a hundredth of a percent."""
    value = values.number(pct)
    return values.DASH if value is None else f"{value:+.2f}{values.THIN}%".replace("-", "−")


def sentences(rows: Sequence[Row]) -> list[str]:
    """For the top of the page: what recording cost, and what the pauses mean for sums."""
    known = [row for row in rows if row["slowdown_pct"] is not None]
    lines = []
    if len(known) == 1:
        (row,) = known
        lines.append(
            f"Recording changed the length of a step by {signed(row['slowdown_pct'])} (95 % interval: "
            f"{signed(row['low_pct'])} to {signed(row['high_pct'])})."
        )
    elif known:
        middle = sorted(known, key=lambda row: float(row["slowdown_pct"]))[len(known) // 2]
        low, high = min(row["low_pct"] for row in known), max(row["high_pct"] for row in known)
        lines.append(
            f"Recording changed the length of a step by {signed(middle['slowdown_pct'])}, median of {len(known):,} "
            f"processes (their 95 % intervals reach from {signed(low)} to {signed(high)})."
        )
    pauses = sum(row["pauses"] for row in rows)
    if pauses:
        shares = [row["paused_share"] for row in rows if row["paused_share"] is not None]
        of_time = f", {values.share(sum(shares) / len(shares))} of the time," if shares else ""
        times = "once" if pauses == 1 else f"{pauses:,} times"
        lines.append(
            f"To measure {'that' if known else 'its own effect'}, the recorder switched itself off {times}{of_time} "
            "and missed what was launched meanwhile: counts and sums are too low by about as much, shares and "
            "utilisation are not affected."
        )
    return lines
