"""The kernels of the report: shares by verdict, the table of the largest, and what bounds each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from nanalyze.analysis.report import palette, values
from nanalyze.analysis.report.cells import Cell, Grid, Head, Row, interval, measured, numbers, tooltip, words
from nanalyze.analysis.report.decode import decoded
from nanalyze.analysis.report.figures import Bar
from nanalyze.analysis.report.names import distinct, shorten

TOP_KERNELS = 50
PLOTTED_KERNELS = 15
PLOTTED_SHARES = 12
TABLE_CHARACTERS = 110
PLOT_CHARACTERS = 76
NARROW_PLOT_CHARACTERS = 40

KERNEL_HEADS = (
    Head("Share", "of kernel time"),
    Head("Time", "launches × mean"),
    Head("Compute", "% of peak"),
    Head("Memory", "% of peak"),
    Head("Occupancy", "achieved"),
    Head("DRAM", "while it ran"),
)


@dataclass(frozen=True)
class Verdict:
    """A verdict as the page shows it: what bounds, where, its colour, how it was counted."""

    bound: str
    part: str
    colour: str
    counted: str


@dataclass(frozen=True)
class KernelRow:
    """One row of the table of kernels; `name` is short, `title` as whole as a tooltip can be."""

    rank: int
    name: str
    title: str
    shape: str
    reason: str
    verdict: Verdict
    cells: Sequence[Cell]


def shares(verdicts: pa.Table) -> list[Row]:
    """Kernel time by (bound, level_or_pipe), largest first: classes, launches, total_ns, share."""
    grouped = verdicts.group_by(["bound", "level_or_pipe"]).aggregate(
        [("kernel_class_id", "count"), ("launches", "sum"), ("total_ns", "sum"), ("share", "sum")]
    )
    rows = [
        {
            "bound": row["bound"],
            "level_or_pipe": row["level_or_pipe"],
            "kernel_classes": row["kernel_class_id_count"],
            "launches": row["launches_sum"],
            "total_ns": row["total_ns_sum"],
            "share": row["share_sum"],
        }
        for row in grouped.to_pylist()
    ]
    return sorted(rows, key=lambda r: (-(r["total_ns"] or 0), r["bound"], r["level_or_pipe"] or ""))


def by_bound(rows: Sequence[Row]) -> list[Row]:
    """`shares` summed over levels and pipes, largest first."""
    sums: dict[str, Row] = {}
    for row in rows:
        total = sums.setdefault(
            row["bound"], {"bound": row["bound"], "kernel_classes": 0, "launches": 0, "total_ns": None, "share": None}
        )
        for key in ("kernel_classes", "launches", "total_ns", "share"):
            if row[key] is not None:
                total[key] = (total[key] or 0) + row[key]
    return sorted(sums.values(), key=lambda r: (-(r["total_ns"] or 0), r["bound"]))


def bound_name(bound: str, part: str | None) -> str:
    """`memory (DRAM)`, `compute (tensor pipe)`, `latency`."""
    return f"{bound} ({part_name(bound, part)})" if part else bound


def part_name(bound: str, part: str | None) -> str:
    if not part:
        return ""
    if bound == "compute":
        return "issue slots" if part == "issue" else f"{part} pipe"
    return part


def share_bars(rows: Sequence[Row]) -> list[Bar]:
    """Bars for the plot of shares; what is too small for its own bar is summed in a last one."""
    timed = [row for row in rows if row["share"]]
    bars = [_share_bar(row) for row in timed[:PLOTTED_SHARES]]
    rest = timed[PLOTTED_SHARES:]
    if rest:
        count = sum(row["kernel_classes"] for row in rest)
        total = sum(row["share"] for row in rest)
        bars.append(Bar("others", total, "undetermined", f"{count:,} kernels"))
    return bars


def share_grid(rows: Sequence[Row]) -> Grid:
    heads = (Head("Bound by", style=""), Head("Where", style=""), Head("Share", "of kernel time"), Head("Time"),
             Head("Kernels"), Head("Launches"))  # fmt: skip
    body = [
        (
            words(row["bound"]),
            words(part_name(row["bound"], row["level_or_pipe"]) or values.DASH),
            numbers(values.share, row["share"]),
            numbers(values.duration, row["total_ns"]),
            numbers(values.count, row["kernel_classes"]),
            numbers(values.count, row["launches"]),
        )
        for row in rows
    ]
    return Grid(heads, body, () if body else ("No kernel launch was recorded.",))


def kernel_bars(rows: Sequence[Row], shapes: dict[int, str]) -> list[Bar]:
    timed = [row for row in rows[:PLOTTED_KERNELS] if row["share"]]
    names = [shorten(row["kernel"], PLOT_CHARACTERS) for row in timed]
    # Where two look alike their shapes tell them apart; a narrow plot has no room for that.
    wide = distinct(names, [f"[{shapes.get(row['kernel_class_id'], '')}]" for row in timed])
    narrow = [shorten(row["kernel"], NARROW_PLOT_CHARACTERS) for row in timed]
    return [
        Bar(f"{i + 1}. {wide[i]}", row["share"], row["bound"], _time_and_launches(row), f"{i + 1}. {narrow[i]}", i + 1)
        for i, row in enumerate(timed)
    ]


def kernel_rows(rows: Sequence[Row], shapes: dict[int, str]) -> list[KernelRow]:
    return [
        KernelRow(
            rank,
            shorten(row["kernel"], TABLE_CHARACTERS),
            tooltip(row["kernel"]),
            " · ".join(filter(None, (decoded(row["kernel"] or ""), shapes.get(row["kernel_class_id"], "")))),
            words(row["reason"]).text,
            verdict(row),
            _kernel_cells(row),
        )
        for rank, row in enumerate(rows, 1)
    ]


def verdict(row: Row) -> Verdict:
    counted = f"{row['method']}, {_plural(row['launches_measured'])}" if row["method"] else "not counted"
    part = part_name(row["bound"], row["level_or_pipe"])
    return Verdict(row["bound"], part, palette.bound_colour(row["bound"]), counted)


def rest(verdicts: pa.Table, shown: int) -> Row:
    """What the kernels beyond the first `shown` amount to."""
    others = verdicts.slice(shown)
    return {
        "kernel_classes": others.num_rows,
        "launches": sum(others.column("launches").to_pylist()),
        "total_ns": sum(value or 0 for value in others.column("total_ns").to_pylist()),
        "share": sum(value or 0.0 for value in others.column("share").to_pylist()),
    }


def rest_text(row: Row) -> str:
    if not row["kernel_classes"]:
        return ""
    return (
        f"{row['kernel_classes']:,} further kernels: {values.share(row['share'])} of kernel time, "
        f"{values.duration(row['total_ns'])} in {row['launches']:,} launches. All are in tables/verdicts.csv."
    )


def shape_text(row: Row) -> str:
    """`grid 132×1×1, block 256×1×1`, and the cluster where there is one."""
    text = f"grid {_dims(row, 'grid')}, block {_dims(row, 'block')}"
    return f"{text}, cluster {_dims(row, 'cluster')}" if row["cluster_x"] else text


def methods(verdicts: pa.Table) -> list[Row]:
    """How the kernels were counted: method, kernel classes, launches measured, share of kernel time."""
    grouped = verdicts.group_by(["method"]).aggregate(
        [("kernel_class_id", "count"), ("launches_measured", "sum"), ("launches", "sum"), ("share", "sum")]
    )
    rows = [
        {
            "method": row["method"],
            "kernel_classes": row["kernel_class_id_count"],
            "launches_measured": row["launches_measured_sum"],
            "launches": row["launches_sum"],
            "share": row["share_sum"],
        }
        for row in grouped.to_pylist()
    ]
    return sorted(rows, key=lambda r: (r["method"] is None, r["method"] or ""))


METHODS = {
    "exact": "exact: the launch was replayed alone under the range profiler, every counter counted",
    "sampled": "sampled: estimated from samples of the whole device while the job ran",
    "imported": "imported: counted by another tool",
    None: "not counted",
}


def method_grid(rows: Sequence[Row]) -> Grid:
    heads = (Head("How counters were obtained", style=""), Head("Kernels"), Head("Launches counted"),
             Head("of launches"), Head("Share", "of kernel time"))  # fmt: skip
    body = [
        (
            words(METHODS.get(row["method"], row["method"]), "wide"),
            numbers(values.count, row["kernel_classes"]),
            numbers(values.count, row["launches_measured"]),
            numbers(values.count, row["launches"]),
            numbers(values.share, row["share"]),
        )
        for row in rows
    ]
    notes = (
        "Counters of a kernel are means over the launches counted and stand for all launches of the same kernel with "
        "the same shape. A verdict whose 95 % interval straddles a threshold is undetermined.",
    )
    return Grid(heads, body, notes if body else ("No kernel launch was recorded.",))


def _share_bar(row: Row) -> Bar:
    label = bound_name(row["bound"], row["level_or_pipe"])
    kernels = "1 kernel" if row["kernel_classes"] == 1 else f"{row['kernel_classes']:,} kernels"
    return Bar(label, row["share"], row["bound"], f"{kernels}, {values.duration(row['total_ns'])}")


def _time_and_launches(row: Row) -> str:
    return f"{values.duration(row['total_ns'])} in {_plural(row['launches'])}"


def _plural(launches: int) -> str:
    return "1 launch" if launches == 1 else f"{launches:,} launches"


def _kernel_cells(row: Row) -> tuple[Cell, ...]:
    why = _why_not(row)
    return (
        numbers(values.share, row["share"], "" if row["share"] is not None else "no launch has a known duration"),
        Cell(
            values.duration(row["total_ns"]),
            title=_untimed(row),
            below=f"{row['launches']:,} × {values.duration(row['mean_ns'])}",
        ),
        _with_interval(row, "compute", measured(row["compute_pct"], why, _compute_detail(row))),
        _with_interval(row, "memory", measured(row["memory_pct"], why, _memory_detail(row))),
        measured(row["occupancy_pct"], why, _occupancy_detail(row)),
        _dram_rate(row, why),
    )


def _with_interval(row: Row, what: str, cell: Cell) -> Cell:
    """An estimate is shown with its interval; of counted launches the tooltip has it."""
    low, high = values.number(row[f"{what}_low_pct"]), values.number(row[f"{what}_high_pct"])
    if row["method"] != "sampled" or low is None or high is None or low == high:
        return cell
    return replace(cell, below=f"{low:.0f} to {high:.0f}{values.THIN}%" if high - low >= 1 else "±" + _half(low, high))


def _half(low: float, high: float) -> str:
    return f"{(high - low) / 2:.1f}{values.THIN}%"


def _compute_detail(row: Row) -> str:
    return interval(row["compute_low_pct"], row["compute_high_pct"])


def _why_not(row: Row) -> str:
    if row["launches_measured"]:
        return f"not among the counters that were measured ({row['method']})"
    if row["bound"] == "communication":
        return "collectives are never replayed, so nothing was counted"
    return "no launch of this kernel was counted: record with exact counters for it"


def _untimed(row: Row) -> str:
    return f"{row['launches_untimed']:,} of them have no known duration" if row["launches_untimed"] else ""


def _memory_detail(row: Row) -> str:
    levels = [
        f"{name} {values.percent(row[column])}"
        for name, column in (("DRAM", "dram_pct"), ("L2", "l2_pct"), ("L2 slices", "l2_slices_pct"), ("L1", "l1_pct"))
        if values.number(row[column]) is not None
    ]
    return "; ".join(filter(None, (", ".join(levels), interval(row["memory_low_pct"], row["memory_high_pct"]))))


def _occupancy_detail(row: Row) -> str:
    if values.number(row["theoretical_occupancy_pct"]) is None:
        return ""
    return f"{values.percent(row['theoretical_occupancy_pct'])} possible, limited by {row['occupancy_limiter']}"


def _dram_rate(row: Row, why: str) -> Cell:
    per_ns = values.ratio(row["dram_bytes"], row["measured_ns"])
    if per_ns is None:
        return Cell(values.DASH, title=why)
    return Cell(values.scaled(per_ns * 1e9, "B/s"), title=f"{values.size(row['dram_bytes'])} a launch")


def _dims(row: Row, what: str) -> str:
    return "×".join(str(row[f"{what}_{axis}"]) for axis in "xyz")
