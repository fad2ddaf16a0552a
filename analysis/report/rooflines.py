"""The roofline: which kernels can be placed on it, under which roofs, and how near they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nanalyze.analysis.report import values
from nanalyze.analysis.report.cells import Cell, Grid, Head, Row, tooltip, words
from nanalyze.analysis.report.figures import Point, Roof, Roofline
from nanalyze.analysis.report.names import shorten

# More points than this hide each other; the largest are drawn.
MOST_POINTS = 1_000
SHOWN_POINTS = 20
PIPES = {
    "tensor_fp16": "tensor FP16/BF16",
    "tensor_fp8": "tensor FP8",
    "tensor_int8": "tensor INT8",
    "tensor_tf32": "tensor TF32",
    "tensor_fp64": "tensor FP64",
    "fp16": "FP16",
    "fp32": "FP32",
    "fp64": "FP64",
}


def rooflines(points: Sequence[Row], devices: Sequence[Row], ranks: Mapping[int, int]) -> list[Roofline]:
    """One roofline a DRAM peak (so a kind of device), with the roofs of the pipes that were used."""
    groups: dict[float | None, list[Row]] = {}
    for row in points:
        if placed(row):
            groups.setdefault(values.number(row["dram_peak_bytes_per_s"]), []).append(row)
    return [
        Roofline(
            _title(dram, devices), dram, tuple(_roofs(rows)), tuple(_point(row, ranks) for row in rows[:MOST_POINTS])
        )
        for dram, rows in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]


def placed(row: Row) -> bool:
    """Whether a row of `roofline_points` has a place on logarithmic axes."""
    numbers = (values.number(row["intensity"]), values.number(row["operations_per_s"]))
    return row["pipe"] is not None and all(number is not None and number > 0 for number in numbers)


def roof_grid(points: Sequence[Row], ranks: Mapping[int, int]) -> Grid:
    heads = (Head("#"), Head("Kernel", style=""), Head("Pipe", "with most work", style=""),
             Head("Intensity", "FLOP per DRAM byte"), Head("Achieved"), Head("Its roof", style=""),
             Head("Roof", "at its clock"), Head("Of its roof"))  # fmt: skip
    rows = [row for row in points if placed(row)]
    body = [
        (
            Cell(str(ranks[row["kernel_class_id"]]), "rank"),
            Cell(shorten(row["kernel"], 64), "text", tooltip(row["kernel"])),
            words(PIPES.get(row["pipe"], row["pipe"])),
            Cell(values.digits(row["intensity"])),
            Cell(values.scaled(row["operations_per_s"], _unit(row))),
            words(PIPES.get(row["roof"], row["roof"])),
            Cell(
                values.scaled(row["roof_per_s"], _unit(row)),
                title="" if row["roof_per_s"] else "no clock or no peak is known",
            ),
            _share_cell(row),
        )
        for row in rows[:SHOWN_POINTS]
    ]
    return Grid(heads, body, _notes(points, rows), _foot(len(rows)))


CLOCKS = {"device_state": "the mean of NVML's readings of the SM clock", "maximum": "the highest SM clock"}


def _title(dram: float | None, devices: Sequence[Row]) -> str:
    names = sorted({str(d["name"]) for d in devices if values.number(d["dram_peak_bytes_per_s"]) == dram})
    return ", ".join(names) if dram is not None and names else "device with unknown peaks"


def _roofs(rows: Sequence[Row]) -> list[Roof]:
    """The roofs of the pipes that these kernels used, at the highest clock."""
    heights: dict[str, float] = {}
    for row in rows:
        height = values.number(row["pipe_peak_max_per_s"])
        if height:
            heights[row["pipe"]] = max(height, heights.get(row["pipe"], 0.0))
    return [
        Roof(PIPES.get(pipe, pipe), height) for pipe, height in sorted(heights.items(), key=lambda i: (-i[1], i[0]))
    ]


def _point(row: Row, ranks: Mapping[int, int]) -> Point:
    return Point(
        ranks[row["kernel_class_id"]],
        float(row["intensity"]),
        float(row["operations_per_s"]),
        float(row["share"] or 0.0),
        row["bound"],
        str(PIPES.get(row["pipe"], row["pipe"])),
        bool(row["over_peak"]),
    )


def _share_cell(row: Row) -> Cell:
    share = values.number(row["roof_share"])
    if share is None:
        return Cell(values.DASH, title="no clock or no peak is known")
    over = bool(row["over_peak"]) or values.over_peak(100 * share)
    text = values.share(share)
    return Cell(text if text.endswith(values.OVER_MARK) or not over else text + values.OVER_MARK, over=over)


def _notes(points: Sequence[Row], rows: Sequence[Row]) -> tuple[str, ...]:
    if not points:
        return ("No kernel has operations or DRAM bytes counted: record with exact counters for a roofline.",)
    missing = len(points) - len(rows)
    clocks = _clock_note(rows)
    if not missing:
        return clocks
    which = "kernel is" if missing == 1 else "kernels are"
    return (
        *clocks,
        f"{missing:,} counted {which} not shown: no floating-point work, no DRAM traffic, or one of them not counted. "
        "A logarithmic axis has no place for zero.",
    )


def _clock_note(rows: Sequence[Row]) -> tuple[str, ...]:
    """Says so where a roof does not stand at the clock measured with the counters."""
    other = [CLOCKS[method] for method in CLOCKS if any(row["clock_method"] == method for row in rows)]
    return (f"Roofs of kernels without a clock of their own stand at {' or '.join(other)}.",) if other else ()


def _unit(row: Row) -> str:
    return "OP/s" if "int" in row["pipe"] else "FLOP/s"


def _foot(count: int) -> str:
    return f"{count - SHOWN_POINTS:,} further kernels are in tables/roofline.csv." if count > SHOWN_POINTS else ""
