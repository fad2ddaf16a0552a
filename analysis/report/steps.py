"""The steps of a job: how long they take, how much that varies, and why some take longer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nanalyze.analysis.report import values
from nanalyze.analysis.report.cells import Cell, Grid, Head, Row, foremost, numbers, words

SHOWN_PROCESSES = 16
SHOWN_OUTLIERS = 15
# Steps that are read for the report, those farthest from their process' median first.
MOST_STEPS = 10_000

# What each cause of the query steps means.
CAUSES = {
    "recorder": "the recorder paused, or replayed launches for counters",
    "communication": "time in collectives: as a rule another rank came late",
    "launches": "more or fewer launches than usual",
    "clock": "the same kernels at another SM clock",
    "kernels": "the same number of launches, longer or shorter",
    "idle": "none of its kernels ran: the host, or what it waited for",
    "unknown": "no launch is known to lie in any step",
}


def step_grid(rows: Sequence[Row]) -> Grid:
    """A row a process, from the shipped query steps."""
    if not rows:
        return Grid(
            notes=(
                'No range repeats, so there are no steps to compare. Mark them with recorder.annotate("step").',
            )
        )  # fmt: skip
    processes = foremost(summaries(rows), SHOWN_PROCESSES, _steadiness)
    heads = (Head("Steps of", "their range", style=""), Head("Steps"), Head("Median"), Head("Usual spread"),
             Head("Outliers"), Head("Why", style=""))  # fmt: skip
    body = [_process_cells(row) for row in processes]
    note = (
        "A step takes the longer of its time on the host and on the GPU. Outliers differ from the median by more than "
        "5 % and three times the usual spread (1.4826 × the median deviation)."
    )
    count = len({row["process"] for row in rows})
    least = f"Of {count:,} processes these are the {SHOWN_PROCESSES} least steady; all are in tables/steps.csv."
    return Grid(heads, body, (note,), least if count > SHOWN_PROCESSES else "")


def outlier_grid(rows: Sequence[Row]) -> Grid:
    """The steps that differ most, with what made the difference."""
    found = sorted((row for row in rows if row["is_outlier"]), key=lambda row: -abs(row["difference"] or 0))
    heads = (Head("Step"), Head("Process", style=""), Head("Took"), Head("Against the median"),
             Head("Cause", "and its numbers", style=""))  # fmt: skip
    body = [
        (
            numbers(values.count, row["step"]),
            words(row["process"]),
            numbers(values.duration, row["length_ns"]),
            Cell(_signed(row["difference"])),
            Cell(f"{row['cause']}: {CAUSES[row['cause']]}", "wide", below=words(row["explanation"]).text),
        )
        for row in found[:SHOWN_OUTLIERS]
    ]
    more = len(found) - SHOWN_OUTLIERS
    return Grid(heads, body, (), f"{more:,} further outliers are in tables/steps.csv." if more > 0 else "")


def summaries(rows: Sequence[Row]) -> list[Row]:
    """Per process: range_name, steps, median_ns, spread_ns, outliers and how many by cause."""
    return [_summary(found) for found in _by_process(rows).values()]


def _by_process(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["rank"] is None, row["rank"] or 0, row["process"])):
        found.setdefault(row["process"], []).append(row)
    return found


def _summary(rows: Sequence[Row]) -> Row:
    causes = Counter(row["cause"] for row in rows if row["is_outlier"])
    kept = {key: rows[0][key] for key in ("process", "rank", "range_name", "steps", "median_ns", "spread_ns")}
    return {**kept, "outliers": causes.total(), "causes": dict(sorted(causes.items()))}


def _steadiness(row: Row) -> tuple[float, float]:
    return -row["outliers"], -(values.ratio(row["spread_ns"], row["median_ns"]) or 0.0)


def _process_cells(row: Row) -> tuple[Cell, ...]:
    spread = values.ratio(row["spread_ns"], row["median_ns"])
    why = ", ".join(f"{count:,} {cause}" for cause, count in row["causes"].items())
    return (
        Cell(words(row["process"]).text, "text", below=words(row["range_name"], limit=80).text),
        numbers(values.count, row["steps"]),
        numbers(values.duration, row["median_ns"]),
        Cell(values.share(spread), title=values.duration(row["spread_ns"])),
        numbers(values.count, row["outliers"]),
        Cell(why or values.DASH, "text"),
    )


def _signed(value: object) -> str:
    number = values.number(value)
    return values.DASH if number is None else f"{100 * number:+.1f}{values.THIN}%"
