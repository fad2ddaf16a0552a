"""The ranges, launches, counters and clocks of a measurement, put together by configuration and variant."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from nanalyze.analysis import run as runs
from nanalyze.analysis import statistics
from nanalyze.rundir.counters import COUNTERS
from nanalyze.rundir.errors import RunError

KEY = "measure"  # the attribute that marks ranges of a measurement
TIMES = {
    "total_ns": "ns",
    "step_ns": "ns",
    "gap_ns": "ns",
    "launches": "launches",
    "host_ns": "ns",
}
# SM clocks further apart than this, as a share, are flagged: time follows the clock one to one.
CLOCK_SHARE = 0.01
# NVML's reasons that slow a device down against its will.
THROTTLING = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}


@dataclass(frozen=True)
class Block:
    """All repetitions of one configuration in one recording, as its range says."""

    process: str
    range_id: int
    name: str
    start_ns: int
    end_ns: int
    configuration: int
    phase: str
    inside: bool
    variants: Sequence[str]
    parameters: Mapping[str, Any]
    collected: Mapping[str, Any]
    errors: Mapping[str, str]


@dataclass
class Series:
    """One metric of a configuration and variant: a value a repetition, in order of time."""

    values: np.ndarray[Any, np.dtype[np.float64]]
    unit: str | None
    method: str
    low: float | None = None
    high: float | None = None
    value: float | None = None
    spikes: int = 0

    def summarise(self) -> Series:
        """Fill in mean and 95 % interval; for fewer than two values there is no interval."""
        found = statistics.means(self.values[None])
        low, high = found.interval()
        self.value, self.spikes = float(found.value[0]), int(found.spikes[0])
        self.low, self.high = (None if np.isnan(end[0]) else float(end[0]) for end in (low, high))
        return self


@dataclass
class Point:
    """A configuration and variant, with its metrics."""

    block: Block
    variant: str | None
    metrics: dict[str, Series] = field(default_factory=dict)
    error: str | None = None
    sm_clock_hz: float | None = None
    clock_note: str | None = None


# --- reading -----------------------------------------------------------------------------------


def read(run: runs.Run, measurement: str | None) -> tuple[dict[str, Any], list[Point]]:
    table = run.arrow(
        "SELECT process, range_id, parent_id, name, start_ns, end_ns, attributes FROM ranges "
        "WHERE source = 'annotate' ORDER BY start_ns, process, range_id"
    ).to_pylist()
    settings = _settings(table, measurement)
    if settings is None:
        raise RunError(f"{run.path}: holds no such measurement. It is for runs that recorder.measure wrote.")
    blocks = _blocks(table, str(settings["id"]))
    entries = _entries(table, blocks)
    points = _points(blocks)
    launches = run.sql(  # nullable integers, as nanoseconds do not fit into float64
        "SELECT k.process, k.range_id, k.kernel_class_id, k.start_ns, k.end_ns, k.duration_ns, k.duration_method, "
        "k.correlation_id, c.name AS kernel FROM kernels AS k "
        "LEFT JOIN (SELECT kernel_class_id, min(name) AS name FROM kernel_classes GROUP BY kernel_class_id) AS c "
        "ON c.kernel_class_id = k.kernel_class_id WHERE k.range_id IS NOT NULL"
    )
    found = entries.merge(launches, on=["process", "range_id"], how="inner")
    if settings.get("ignore"):
        found = found[~found["kernel"].fillna("").str.contains(settings["ignore"], regex=True)]
    _add_times(points, entries, found)
    _add_counters(points, found, run)
    _add_clocks(points, blocks, entries, run)
    return settings, list(points.values())


def _settings(table: Sequence[Mapping[str, Any]], measurement: str | None) -> dict[str, Any] | None:
    """What a measurement was asked to do: of the one with this id, else of the latest."""
    found = [about for row in table if "configurations" in (about := _about_range(row))]
    wanted = [about for about in found if measurement in (None, about.get("id"))]
    return wanted[-1] if wanted else None


def _attributes(row: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = json.loads(row["attributes"] or "{}")
    except (json.JSONDecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _about_range(row: Mapping[str, Any]) -> dict[str, Any]:
    found = _attributes(row).get(KEY)
    return found if isinstance(found, dict) else {}


def _blocks(table: Sequence[Mapping[str, Any]], measurement: str) -> list[Block]:
    found = []
    for row in table:
        attributes = _attributes(row)
        about = _about_range(row)
        if about.get("id") != measurement or "phase" not in about or row["end_ns"] is None:
            continue
        found.append(
            Block(
                row["process"], row["range_id"], row["name"], row["start_ns"], row["end_ns"],
                about["configuration"], about["phase"], about["inside"], about["variants"],
                {name: attributes.get(name) for name in about["parameters"]},
                about.get("collected", {}), about.get("errors", {}),
            )
        )  # fmt: skip
    return found


def _entries(table: Sequence[Mapping[str, Any]], blocks: Sequence[Block]) -> pd.DataFrame:
    """Every range in a variant's (itself included), with configuration, phase and number of that entry.

    Columns: process, range_id, configuration, phase, variant, entry (a number for the whole table),
    host_ns, start_ns, end_ns (of the entry), block.
    """
    by_id = {(block.process, block.range_id): number for number, block in enumerate(blocks)}
    roots: dict[tuple[str, int], dict[str, Any]] = {}
    rows = []
    for row in table:  # a range comes after the one that encloses it
        here, parent = (row["process"], row["range_id"]), (row["process"], row["parent_id"])
        if parent in by_id and row["end_ns"] is not None:
            block = blocks[by_id[parent]]
            roots[here] = {
                "configuration": block.configuration, "phase": block.phase, "variant": row["name"],
                "entry": len(roots), "host_ns": row["end_ns"] - row["start_ns"],
                "entry_start_ns": row["start_ns"], "entry_end_ns": row["end_ns"], "block": by_id[parent],
            }  # fmt: skip
        elif parent in roots:
            roots[here] = roots[parent]
        else:
            continue
        rows.append({"process": here[0], "range_id": here[1], **roots[here]})
    columns = [
        "process", "range_id", "configuration", "phase", "variant", "entry", "host_ns",
        "entry_start_ns", "entry_end_ns", "block",
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=columns)


Points = dict[tuple[int, str | None], Point]


def _points(blocks: Sequence[Block]) -> Points:
    """A point for each configuration and variant that was to be measured, with what went wrong."""
    found: Points = {}
    for block in blocks:
        names: list[str | None] = list(block.variants)
        if not names and block.errors:  # a function that failed before it showed its annotations
            names = list(block.errors)
        for name in names:
            point = found.setdefault((block.configuration, name), Point(block, name))
            # Errors of a function with annotations inside are the function's, so every variant's.
            error = next(iter(block.errors.values()), None) if block.inside else block.errors.get(name or "")
            point.error = point.error or (f"{error}" if error else None)
    return found


def _add_times(points: Points, entries: pd.DataFrame, found: pd.DataFrame) -> None:
    """Undisturbed figures of each repetition. One with a launch of unknown time is left out."""
    whole = entries[entries["phase"] == "times"].drop_duplicates("entry")
    timed = found[found["phase"] == "times"].sort_values(["entry", "start_ns", "end_ns"])
    numbers = _per_entry(timed)
    for (configuration, variant), group in whole.groupby(["configuration", "variant"], sort=False):
        point = points.get((int(configuration), str(variant)))
        if point is None:
            continue
        joined = group.sort_values("entry").join(numbers, on="entry")
        known = joined[joined["total_ns"].notna()]
        if known.empty:
            point.error = point.error or "none of its calls has a kernel with a known time"
            continue
        for name, unit in TIMES.items():
            values = known[name].to_numpy(dtype=float)
            if len(values) and not np.isnan(values).any():
                point.metrics[name] = Series(values, unit, "timeline").summarise()


def _per_entry(timed: pd.DataFrame) -> pd.DataFrame:
    """total_ns, step_ns, gap_ns and launches by entry; NaN where a launch's time is not known."""
    columns = ["total_ns", "step_ns", "gap_ns", "launches"]
    if timed.empty:
        return pd.DataFrame(columns=columns, dtype=float)
    # Offsets from the entry's first start are small enough for float64 to hold exactly.
    first = timed.groupby("entry")["start_ns"].transform("min")
    numbers = timed.assign(
        start=(timed["start_ns"] - first).to_numpy(dtype=float, na_value=np.nan),
        end=(timed["end_ns"] - first).to_numpy(dtype=float, na_value=np.nan),
    )
    numbers["reach"] = numbers.groupby("entry")["end"].cummax()
    numbers["gap"] = (numbers["start"] - numbers.groupby("entry")["reach"].shift()).clip(lower=0).fillna(0.0)
    by = numbers.groupby("entry")
    is_whole = by["end"].count() == by.size()
    table = pd.DataFrame(
        {
            "total_ns": by["duration_ns"].sum().astype(float),
            "step_ns": by["end"].max(),
            "gap_ns": by["gap"].sum(),
            "launches": by.size().astype(float),
        }
    )
    return table.where(is_whole)


# --- counters ----------------------------------------------------------------------------------

_BY_RAW = {raw: counter for counter in reversed(COUNTERS) for raw in counter.raw}


def _add_counters(points: Points, found: pd.DataFrame, run: runs.Run) -> None:
    """Exact counters of each repetition: sums over its launches, or means weighted by their time.

    Only of repetitions of which every launch was measured: a sum over some of them would be too small.
    """
    counted = found[found["phase"] == "counters"]
    if counted.empty:
        return
    exact = run.arrow(
        "SELECT process, correlation_id, metric, value FROM exact WHERE scope = 'kernel' AND value IS NOT NULL"
    ).to_pandas()
    launches = counted.groupby("entry").size()
    timed = found[(found["phase"] == "times") & found["duration_ns"].notna()]
    keys = ["configuration", "variant", "kernel_class_id"]
    weight = timed.groupby(keys)["duration_ns"].mean().astype(float).rename("weight")
    joined = counted.merge(exact, on=["process", "correlation_id"], how="inner").join(weight, on=keys)
    for (configuration, variant, metric), group in joined.groupby(["configuration", "variant", "metric"], sort=False):
        point = points.get((int(configuration), str(variant)))
        if point is None:
            continue
        by = group.groupby("entry")
        is_whole = by.size() == launches.reindex(by.size().index)
        values = _combined(group, str(metric))[is_whole].to_numpy(dtype=float)
        counter = _BY_RAW.get(str(metric))
        name = counter.name if counter is not None else str(metric)
        if len(values) and name not in point.metrics:
            point.metrics[name] = Series(values, counter.unit if counter else None, "exact").summarise()


def _combined(group: pd.DataFrame, metric: str) -> pd.Series[float]:
    """One value an entry: the sum of what adds up, else the mean by time (plain where no time is known)."""
    if metric.endswith(".sum"):
        return group.groupby("entry")["value"].sum()
    weights = group["weight"].fillna(group["weight"].mean()).fillna(1.0)
    weighted = (group["value"] * weights).groupby(group["entry"]).sum()
    return weighted / weights.groupby(group["entry"]).sum()


# --- clocks ------------------------------------------------------------------------------------


def _add_clocks(points: Points, blocks: Sequence[Block], entries: pd.DataFrame, run: runs.Run) -> None:
    """Mean SM clock of each point, and what held it down, from readings while it was timed.

    A reading belongs to the variant whose range closed last; those before the first one to all of the block.
    """
    readings = run.arrow(
        "SELECT process, time_ns, sm_clock_hz, throttle_reasons FROM device_state ORDER BY process, time_ns"
    ).to_pandas()
    whole = entries[entries["phase"] == "times"].drop_duplicates("entry")
    taken: dict[tuple[int, str | None], list[tuple[float, int]]] = {}
    for number, block in enumerate(blocks):
        if block.phase != "times":
            continue
        inside = readings[
            (readings["process"] == block.process) & readings["time_ns"].between(block.start_ns, block.end_ns)
        ]
        mine = whole[whole["block"] == number].sort_values("entry_end_ns")
        ends, names = mine["entry_end_ns"].to_numpy(), mine["variant"].tolist()
        for row in inside.itertuples():
            if pd.isna(row.sm_clock_hz):
                continue
            place = int(np.searchsorted(ends, row.time_ns, side="right")) - 1
            reasons = 0 if pd.isna(row.throttle_reasons) else int(row.throttle_reasons)
            for name in list(block.variants) if block.inside or place < 0 else [names[place]]:
                taken.setdefault((block.configuration, name), []).append((float(row.sm_clock_hz), reasons))
    for key, found in taken.items():
        if key in points:
            points[key].sm_clock_hz = float(np.mean([hertz for hertz, _ in found]))
            mask = 0
            for _, reasons in found:
                mask |= reasons
            held = [name for bit, name in THROTTLING.items() if mask & bit]
            points[key].clock_note = f"held down by {', '.join(held)}" if held else None


def flag_clocks(points: Sequence[Point]) -> None:
    """Say where a variant ran at another clock than the others of its configuration, or that than the first."""
    first: dict[int, float] = {}
    reference = next((point.sm_clock_hz for point in points if point.sm_clock_hz), None)
    for point in points:
        if point.sm_clock_hz is None or reference is None:
            continue
        base = first.setdefault(point.block.configuration, point.sm_clock_hz)
        for other, what in ((base, "the first variant"), (reference, "the first configuration")):
            apart = point.sm_clock_hz / other - 1
            if abs(apart) > CLOCK_SHARE:
                note = f"SM clock {100 * apart:+.1f} % from that of {what}: times differ by as much for that alone"
                point.clock_note = f"{point.clock_note}; {note}" if point.clock_note else note
                break
