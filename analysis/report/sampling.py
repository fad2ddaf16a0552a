"""How well counters estimated from samples hold: what they explain, exact counters beside them, drift."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from nanalyze.analysis.report import values
from nanalyze.analysis.report.cells import Cell, Grid, Head, Row, numbers, words
from nanalyze.analysis.report.names import shorten
from nanalyze.analysis.report.sections import SHOWN_ROWS
from nanalyze.rundir.sampled import BY_COLUMN

SHOWN_DRIFTS = 12
NO_SAMPLES = (
    "No counter was sampled. recorder.record(..., samples=recorder.Samples()) or nanalyze record --samples estimates "
    "the counters of every kernel while the job runs as always."
)
CLOCKS = {
    "sampled": "the SM cycles that were sampled",
    "device_state": "NVML's readings, about one a second",
    "maximum": "the highest clock, since none was read: percentages are too low where it ran slower",
}


def quality_grid(quality: Sequence[Row], labels: Mapping[str, str]) -> Grid:
    """How much of each counter's variation the estimates predict in samples that they were not made from."""
    if not quality:
        return Grid(notes=(NO_SAMPLES,))
    heads = (Head("Sampled counter", style=""), Head("Explained", "of its variation"), Head("Mean", "whole device"),
             Head("Samples", "used"), Head("left out"), Head("Kernels", "and copies, idle time"),
             Head("not told apart"))  # fmt: skip
    devices = len({row["device"] for row in quality})
    is_summed = devices > 1 and len(quality) > SHOWN_ROWS
    if is_summed:
        quality = _over_devices(quality, labels)
    body = [
        (
            Cell(
                words(row["counter"]).text,
                "wide",
                below=_meaning(row, words(labels.get(row["device"], row["device"])).text if devices > 1 else ""),
            ),
            _explained(row),
            Cell(_rate(row["mean_per_s"], row["unit"])),
            numbers(values.count, row["samples"]),
            numbers(values.count, row["samples_dropped"]),
            numbers(values.count, row["terms"]),
            numbers(values.count, row["terms_merged"]),
        )
        for row in quality[:SHOWN_ROWS]
    ]
    note = (
        "Rates are fitted on half of the samples and predict the other half. Near 100 %: what ran explains the "
        "counter. Low with narrow intervals: something else went on, or kernels of one class do different things. Low "
        "with wide intervals: the counter is noisy or hardly varies."
    )
    more = len(quality) - SHOWN_ROWS
    foot = f"{more:,} further counters are in tables/attribution_quality.csv." if more > 0 else ""
    if is_summed:
        foot += f" Each of the {devices:,} devices is in tables/attribution_quality.csv."
    return Grid(heads, body, (note, _clock_note(quality)), foot)


def _over_devices(quality: Sequence[Row], labels: Mapping[str, str]) -> list[Row]:
    """A row a counter: how much of it is explained on the device where that is least, and means and sums."""
    found: dict[tuple[object, object], list[Row]] = {}
    for row in quality:
        found.setdefault((row["counter_group"], row["counter"]), []).append(row)
    return [_over_device(rows, labels) for rows in found.values()]


def _over_device(rows: Sequence[Row], labels: Mapping[str, str]) -> Row:
    least = min(rows, key=lambda row: math.inf if row["explained"] is None else row["explained"])
    means = [row["mean_per_s"] for row in rows if row["mean_per_s"] is not None]
    name = words(labels.get(least["device"], least["device"])).text
    return {
        **least,
        "device": f"{len(rows):,} devices, the least explained {name}" if len(rows) > 1 else name,
        "mean_per_s": sum(means) / len(means) if means else None,
        **{name: sum(row[name] for row in rows) for name in ("samples", "samples_dropped")},
        **{name: max(row[name] for row in rows) for name in ("terms", "terms_merged")},
    }


def _meaning(row: Row, device: str) -> str:
    meaning = BY_COLUMN[row["counter"]].meaning if row["counter"] in BY_COLUMN else ""
    return ". ".join(filter(None, (device, meaning)))


def _explained(row: Row) -> Cell:
    if values.number(row["explained"]) is None:
        return Cell(values.DASH, title="too few samples, or it does not vary")
    share = float(row["explained"])
    return Cell(
        values.share(share) if share >= 0 else "none", title=f"{100 * share:.3g} % (below 0: worse than a mean)"
    )


def _rate(value: object, unit: object) -> str:
    """A sampled quantity over time; nanoseconds a second are a share."""
    if unit == "ns":
        number = values.number(value)
        return values.DASH if number is None else f"{values.share(number / 1e9)} busy"
    return values.scaled(value, "B/s" if unit == "bytes" else f" {unit or ''}/s").replace(
        f"{values.THIN} ", values.THIN
    )


def _clock_note(quality: Sequence[Row]) -> str:
    methods = sorted({row["clock_method"] for row in quality if row["clock_method"]})
    told = "; ".join(CLOCKS[method] for method in methods if method in CLOCKS)
    return f"The SM clock behind percentages of a peak: {told}." if told else "No SM clock is known."


def against_exact(rows: Sequence[Row]) -> list[Row]:
    """`sampled_against_exact` by counter: classes, their share of time, difference weighted by it, overlap."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["counter"], []).append(row)
    return [_by_counter(counter, own) for counter, own in sorted(found.items())]


def _by_counter(counter: str, rows: Sequence[Row]) -> Row:
    known = [row for row in rows if values.number(row["difference_pct"]) is not None]
    differences = [(abs(row["difference_pct"]), row["time_share"] or 0.0) for row in known]
    apart = sum(abs(row["sampled"] - row["exact"]) * (row["time_share"] or 0.0) for row in known)
    counted = sum(abs(row["exact"]) * (row["time_share"] or 0.0) for row in known)
    return {
        "counter": counter,
        "unit": rows[0]["unit"],
        "kernel_classes": len(rows),
        "time_share": sum(row["time_share"] or 0.0 for row in rows),
        "median_difference_pct": _weighted_median(differences),
        # Of sums, since a kernel that hardly uses a unit may be off by many times what it uses.
        "weighted_difference_pct": 100 * apart / counted if counted else None,
        "overlapping": sum(1 for row in rows if row["is_inside"]),
    }


def _weighted_median(weighted: Sequence[tuple[float, float]]) -> float | None:
    """The value below which half of the weight lies, of pairs (value, weight)."""
    half, reached = sum(weight for _, weight in weighted) / 2, 0.0
    for value, weight in sorted(weighted):
        reached += weight
        if reached >= half:
            return value
    return None


def exact_grid(rows: Sequence[Row]) -> Grid:
    """`against_exact` as a table; nothing where no counter has both."""
    heads = (
        Head("Counter", style=""),
        Head("Kernels", "with both"),
        Head("Share", "of kernel time"),
        Head("Difference", "median, by time"),
        Head("Difference", "of all, by time"),
        Head("Intervals overlap"),
    )
    body = [
        (
            words(row["counter"], "text"),
            numbers(values.count, row["kernel_classes"]),
            numbers(values.share, row["time_share"]),
            Cell(_difference(row["median_difference_pct"])),
            Cell(_difference(row["weighted_difference_pct"])),
            Cell(f"{row['overlapping']:,} of {row['kernel_classes']:,}"),
        )
        for row in rows
    ]
    note = (
        "Exact counters win wherever there are both. They come from kernels that ran alone, with colder caches, so not "
        "all of a difference is the estimate's error. Every kernel is in tables/sampled_against_exact.csv."
    )
    return Grid(heads, body, (note,)) if body else Grid()


def _difference(value: object) -> str:
    number = values.number(value)
    return values.DASH if number is None else f"{number:,.1f}{values.THIN}%"


def drift_grid(drifts: Sequence[Row], windows: int) -> Grid:
    """Kernels whose counters changed over the run; `windows` is into how many the samples were divided at most."""
    if windows < 2:
        return Grid(notes=("Too few samples to see a drift: it takes 20,000 of a group of counters.",))
    if not drifts:
        return Grid(notes=("No drift: between the halves of the run no rate changed by 5 % or more beyond its error.",))
    heads = (Head("Kernel", style=""), Head("Counter", "that changed most", style=""), Head("First half"),
             Head("Second half"), Head("Change"), Head("Further counters", "changed too"),
             Head("Share", "of kernel time"))  # fmt: skip
    kernels: dict[tuple[str, int], list[Row]] = {}
    for row in drifts:
        kernels.setdefault((row["device"], row["kernel_class_id"]), []).append(row)
    largest = [(own[0], len(own) - 1) for own in kernels.values()]
    body = [
        (
            Cell(shorten(row["kernel"], 80), "wide"),
            words(row["counter"]),
            Cell(_rate(row["first_per_s"], row["unit"])),
            Cell(_rate(row["second_per_s"], row["unit"])),
            Cell(f"{row['change_pct']:+,.0f}{values.THIN}%".replace("-", "−")),
            Cell(f"{others:,}"),
            numbers(values.share, row["time_share"]),
        )
        for row, others in largest[:SHOWN_DRIFTS]
    ]
    note = (
        "Rates while the kernel ran, of the whole device. Counters of these kernels are means over a job that changed."
    )
    more = len(largest) - SHOWN_DRIFTS
    return Grid(heads, body, (note,), f"{more:,} further kernels are in tables/drift.csv." if more > 0 else "")
