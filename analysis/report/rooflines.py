"""The roofline: which kernels can be placed on it, under which roofs, and how near they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nanalyze.analysis.report import values
from nanalyze.analysis.report.cells import Cell, Grid, Head, Row, numbers, tooltip, words
from nanalyze.analysis.report.names import shorten
from nanalyze.analysis.report.roofline_plot import Hierarchy, Kernel, Level, Point, Roof, Roofline

# More points than this hide each other; the largest are drawn.
MOST_POINTS = 1_000
SHOWN_POINTS = 20
# More lines than this cross each other's points.
MOST_KERNELS = 8
SAME_HEIGHT = 0.1
# Of the bytes between L2 and its clients: what requests fewer from L1 moves its data past it.
LEAST_OF_L2 = 0.1
LEVELS = {"DRAM": "intensity", "L2": "l2_intensity", "L1": "l1_intensity"}
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


def rooflines(
    points: Sequence[Row], devices: Sequence[Row], ranks: Mapping[int, int], ceilings: Sequence[Row]
) -> list[Roofline]:
    """One roofline a DRAM peak (so a kind of device), with the roofs of the pipes that were used."""
    found = []
    for dram, rows in _groups(points, placed):
        names = _names(dram, devices)
        reached = _reached(ceilings, names)
        drawn = tuple(_point(row, ranks) for row in rows[:MOST_POINTS])
        found.append(Roofline(_title(dram, names), dram, tuple(_roofs(rows, reached)), drawn, reached.get("DRAM")))
    return found


def hierarchies(
    points: Sequence[Row], devices: Sequence[Row], ranks: Mapping[int, int], ceilings: Sequence[Row]
) -> list[Hierarchy]:
    """The largest kernels with bytes of L1 or L2 counted, one entry a kind of device."""
    found = []
    for dram, rows in _groups(points, lambda row: placed(row) and len(_intensities(row)) > 1):
        names = _names(dram, devices)
        reached = _reached(ceilings, names)
        largest = _apart(sorted(rows, key=lambda row: ranks[row["kernel_class_id"]]))[:MOST_KERNELS]
        levels = tuple(Level(name, dram if name == "DRAM" else None, reached.get(name)) for name in LEVELS)
        drawn = tuple(
            Kernel(ranks[row["kernel_class_id"]], float(row["operations_per_s"]), _intensities(row)) for row in largest
        )
        found.append(Hierarchy(_title(dram, names), levels, tuple(_roofs(largest, reached)), drawn))
    return found


def _groups(points: Sequence[Row], is_wanted: Callable[[Row], bool]) -> list[tuple[float | None, list[Row]]]:
    """Wanted points by DRAM peak, the peak with most points first."""
    groups: dict[float | None, list[Row]] = {}
    for row in points:
        if is_wanted(row):
            groups.setdefault(values.number(row["dram_peak_bytes_per_s"]), []).append(row)
    return sorted(groups.items(), key=lambda item: -len(item[1]))


def _apart(rows: Sequence[Row]) -> list[Row]:
    """The rows without those whose line would lie on that of an earlier one."""
    kept: list[Row] = []
    for row in rows:
        height = float(row["operations_per_s"])
        if all(abs(height / float(other["operations_per_s"]) - 1) > SAME_HEIGHT for other in kept):
            kept.append(row)
    return kept


def _intensities(row: Row) -> dict[str, float]:
    """By level; without L1 where next to nothing was requested from it, as copies by TMA go past it."""
    found = {name: values.number(row[column]) for name, column in LEVELS.items()}
    return {name: x for name, x in found.items() if x is not None and x > 0 and not (name == "L1" and _passes_l1(row))}


def _passes_l1(row: Row) -> bool:
    l1, l2 = values.number(row["l1_bytes"]), values.number(row["l2_bytes"])
    return l1 is not None and l2 is not None and l1 < LEAST_OF_L2 * l2


def _reached(ceilings: Sequence[Row], names: Sequence[str]) -> dict[str, float]:
    """The best measured ceiling of these devices by pipe and by level; what reaches only part of a pipe is none."""
    best: dict[str, float] = {}
    for row in ceilings:
        rate = values.number(row["measured_per_s"])
        if row["device"] not in names or rate is None or row["is_partial"]:
            continue
        name: str = _ROOF_OF.get(str(row["ceiling"]), str(row["ceiling"]))
        best[name] = max(rate, best.get(name, 0.0))
    return best


# What a ceiling is the roof of, where that has another name.
_ROOF_OF = {"tensor_bf16": "tensor_fp16", "l2_read": "L2", "l1_read": "L1", "dram_read": "DRAM", "dram_write": "DRAM",
            "dram_copy": "DRAM"}  # fmt: skip


def placed(row: Row) -> bool:
    """Whether a row of `roofline_points` has a place on logarithmic axes."""
    numbers = (values.number(row["intensity"]), values.number(row["operations_per_s"]))
    return row["pipe"] is not None and all(number is not None and number > 0 for number in numbers)


def roof_grid(points: Sequence[Row], ranks: Mapping[int, int]) -> Grid:
    heads = (Head("#"), Head("Kernel", style=""), Head("Pipe", "with most work", style=""),
             Head("Intensity", "FLOP per DRAM byte"), Head("Achieved"), Head("Its roof", style=""),
             Head("Roof", "at its clock"), Head("Of its roof"),
             Head("Nearest ceiling", "of all levels", style=""))  # fmt: skip
    rows = [row for row in points if placed(row)]
    body = [
        (
            Cell(str(ranks[row["kernel_class_id"]]), "rank"),
            Cell(shorten(row["kernel"], 64), "text", tooltip(row["kernel"])),
            words(PIPES.get(row["pipe"], row["pipe"])),
            Cell(values.digits(row["intensity"]), title=_past_l1(row), below=_inner(row)),
            Cell(values.scaled(row["operations_per_s"], _unit(row))),
            words(PIPES.get(row["roof"], row["roof"])),
            Cell(
                values.scaled(row["roof_per_s"], _unit(row)),
                title="" if row["roof_per_s"] else "no clock or no peak is known",
            ),
            _share_cell(row),
            _nearest(row),
        )
        for row in rows[:SHOWN_POINTS]
    ]
    return Grid(heads, body, _notes(points, rows), _foot(len(rows)))


def _inner(row: Row) -> str:
    """Intensities by byte of L2 and of L1, where these were counted."""
    return ", ".join(f"{name} {values.digits(x)}" for name, x in _intensities(row).items() if name != "DRAM")


def _past_l1(row: Row) -> str:
    return "next to nothing was requested from L1: its data move past it, as by TMA" if _passes_l1(row) else ""


def _nearest(row: Row) -> Cell:
    """Which ceiling the kernel comes nearest to, of those that are known, and how near."""
    if row["nearest"] is None:
        return Cell(values.DASH, "", title="no ceiling is known")
    levels = (("DRAM", "dram", "dram_peak_bytes_per_s"), ("L2", "l2", ""), ("L1", "l1", ""))
    known = [
        f"{name} {values.share(rate / ceiling)}"
        for name, column, peak in levels
        if (rate := values.number(row[f"{column}_bytes_per_s"])) is not None
        and (ceiling := values.number(row[f"{column}_ceiling_per_s"]) or values.number(row[peak] if peak else None))
    ]
    return Cell(
        f"{PIPES.get(row['nearest'], row['nearest'])} {values.share(row['nearest_share'])}", "", "; ".join(known)
    )


CEILINGS = {**PIPES, "tensor_fp16": "tensor FP16", "tensor_bf16": "tensor BF16", "int32": "INT32",
            "dram_read": "DRAM, reading", "dram_write": "DRAM, writing", "dram_copy": "DRAM, copying",
            "l2_read": "L2, reading", "l1_read": "L1, reading", "shared_read": "shared memory, reading"}  # fmt: skip
NOT_CALIBRATED = (
    "No ceiling was measured on this device: nanalyze doctor --calibrate does that in seconds, and with -o RUN adds "
    "what it finds to a run."
)


def ceiling_grid(rows: Sequence[Row]) -> Grid:
    """What the devices were measured to reach, beside the datasheet's peaks; from the query roofline_ceilings."""
    if not any(row["measured_per_s"] for row in rows):
        return Grid(notes=(NOT_CALIBRATED,) if rows else ())
    heads = (Head("Device", style=""), Head("Ceiling", style=""), Head("Datasheet", "highest clock"),
             Head("Measured", "median"), Head("Lowest to highest"), Head("SM clock", "that ran"),
             Head("Of the datasheet", "at that clock"), Head("How", style=""))  # fmt: skip
    body = [
        (
            words(row["device"], "text"),
            words(CEILINGS.get(row["ceiling"], row["ceiling"])),
            Cell(values.scaled(row["datasheet_per_s"], _short(row["unit"]))),
            Cell(values.scaled(row["measured_per_s"], _short(row["unit"]))),
            Cell(_span(row)),
            Cell(values.scaled(row["sm_clock_hz"], "Hz")),
            numbers(values.share, row["share"]),
            words(f"{row['method']} (part of the pipe)" if row["is_partial"] else row["method"], "text"),
        )
        for row in rows
    ]
    partial = any(row["is_partial"] for row in rows)
    note = "mma.sync reaches only part of the tensor pipe of this architecture: no peak, whatever it shows."
    return Grid(heads, body, (note,) if partial else ())


def _span(row: Row) -> str:
    low, high = values.number(row["low_per_s"]), values.number(row["high_per_s"])
    if low is None or high is None:
        return values.DASH
    return f"{values.scaled(low, _short(row['unit']))} to {values.scaled(high, _short(row['unit']))}"


def _short(unit: str) -> str:
    return "B/s" if unit == "bytes/s" else unit


CLOCKS = {"device_state": "the mean of NVML's readings of the SM clock", "maximum": "the highest SM clock"}


def _names(dram: float | None, devices: Sequence[Row]) -> list[str]:
    """Product names of the devices with this DRAM peak."""
    return sorted({str(d["name"]) for d in devices if values.number(d["dram_peak_bytes_per_s"]) == dram})


def _title(dram: float | None, names: Sequence[str]) -> str:
    return ", ".join(names) if dram is not None and names else "device with unknown peaks"


def _roofs(rows: Sequence[Row], reached: Mapping[str, float]) -> list[Roof]:
    """The roofs of the pipes that these kernels used, at the highest clock, and as they were measured."""
    heights: dict[str, float] = {}
    for row in rows:
        height = values.number(row["pipe_peak_max_per_s"])
        if height:
            heights[row["pipe"]] = max(height, heights.get(row["pipe"], 0.0))
    highest_first = sorted(heights.items(), key=lambda item: (-item[1], item[0]))
    return [Roof(PIPES.get(pipe, pipe), height, reached.get(pipe)) for pipe, height in highest_first]


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
