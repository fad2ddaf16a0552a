"""The ranges, launches, counters and clocks of a measurement, put together by configuration and variant."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from nanalyze.analysis import run as runs
from nanalyze.analysis import statistics
from nanalyze.rundir.counters import COUNTERS
from nanalyze.rundir.errors import RunError
from nanalyze.rundir.measurement import ATTRIBUTE

TIMES = {
    "total_ns": "ns",
    "step_ns": "ns",
    "gap_ns": "ns",
    "launches": "launches",
    "host_ns": "ns",
}
Combine = Mapping[str, str | Callable[[float, float], float]]
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
    failed_ns: Mapping[str, int]

    def is_partial(self, variant: str, start_ns: int) -> bool:
        """Whether an entry into a variant's range is of a call that failed, so that launches may be missing."""
        starts = self.failed_ns.values() if self.inside else [self.failed_ns.get(variant, start_ns + 1)]
        return any(start_ns >= failed for failed in starts)


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


def read(run: runs.Run, measurement: str | None, combine: Combine | None = None) -> tuple[dict[str, Any], list[Point]]:
    """What a measurement was asked to do, and what it found; `combine` as in `recorder.measure`. Raises RunError."""
    table = run.arrow(
        "SELECT process, range_id, parent_id, name, start_ns, end_ns, attributes FROM ranges "
        "WHERE source = 'annotate' AND process IN "
        f"(SELECT process FROM ranges WHERE source = 'annotate' AND attributes LIKE '%\"{ATTRIBUTE}\"%') "
        "ORDER BY start_ns, process, range_id"
    ).to_pylist()
    settings = _settings(table, measurement)
    if settings is None:
        raise RunError(f"{run.path}: holds no such measurement. It is for runs that recorder.measure wrote.")
    blocks = _blocks(table, str(settings["id"]))
    entries = _entries(table, blocks)
    points = _points(blocks)
    # An appended measurement may lie in the run of a long job: its launches are not read.
    processes = {"processes": sorted({block.process for block in blocks})}
    launches = run.sql(  # nullable integers, as nanoseconds do not fit into float64
        "SELECT k.process, k.range_id, k.kernel_class_id, k.start_ns, k.end_ns, k.duration_ns, k.duration_method, "
        "k.correlation_id, c.name AS kernel FROM kernels AS k "
        "LEFT JOIN (SELECT kernel_class_id, min(name) AS name FROM kernel_classes GROUP BY kernel_class_id) AS c "
        "ON c.kernel_class_id = k.kernel_class_id "
        "WHERE k.range_id IS NOT NULL AND k.process IN (SELECT unnest(CAST($processes AS VARCHAR[])))",
        processes,
    )
    found = entries.merge(launches, on=["process", "range_id"], how="inner")
    if settings.get("ignore"):
        found = found[~found["kernel"].fillna("").str.contains(settings["ignore"], regex=True)]
    _add_times(points, entries, found, _mapping(settings.get("collect_units")))
    _add_counters(points, found, run, combine or {})
    _add_clocks(points, blocks, entries, run)
    return settings, list(points.values())


def measurements(run: runs.Run, label: str) -> int:
    """How many measurements of a run have a configuration of that label."""
    rows = run.arrow("SELECT attributes FROM ranges WHERE name = $name ORDER BY start_ns", {"name": label}).to_pylist()
    return len({str(about.get("id")) for row in rows if "phase" in (about := _about_range(row))})


def _settings(table: Sequence[Mapping[str, Any]], measurement: str | None) -> dict[str, Any] | None:
    """What a measurement was asked to do: of the one with this id, else of the latest."""
    wanted = [about for about in asked(table) if measurement in (None, about.get("id"))]
    return wanted[-1] if wanted else None


def asked(ranges: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What each measurement was asked to do, of those that `ranges` tell about."""
    return [about for row in ranges if "configurations" in (about := _about_range(row))]


def _attributes(row: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = json.loads(row["attributes"] or "{}")
    except (json.JSONDecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _about_range(row: Mapping[str, Any]) -> dict[str, Any]:
    found = _attributes(row).get(ATTRIBUTE)
    return found if isinstance(found, dict) else {}


def _blocks(table: Sequence[Mapping[str, Any]], measurement: str) -> list[Block]:
    found = (_block(row) for row in table if _about_range(row).get("id") == measurement)
    return [block for block in found if block is not None]


def _block(row: Mapping[str, Any]) -> Block | None:
    """The block that a range is; None of other ranges, and where what it says is not what the recorder writes."""
    attributes, about = _attributes(row), _about_range(row)
    kinds = {"phase": str, "configuration": int, "inside": bool, "variants": list, "parameters": list}
    if row["end_ns"] is None or not all(isinstance(about.get(name), kind) for name, kind in kinds.items()):
        return None
    collected, errors, failed = (_mapping(about.get(name)) for name in ("collected", "errors", "failed_ns"))
    return Block(
        row["process"], row["range_id"], row["name"], row["start_ns"], row["end_ns"],
        about["configuration"], about["phase"], about["inside"], [str(name) for name in about["variants"]],
        {str(name): attributes.get(str(name)) for name in about["parameters"]},
        collected, {name: str(error) for name, error in errors.items()},
        {name: at for name, at in failed.items() if isinstance(at, int)},
    )  # fmt: skip


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _entries(table: Sequence[Mapping[str, Any]], blocks: Sequence[Block]) -> pd.DataFrame:
    """Every range in a variant's (itself included), with configuration, phase and number of that entry.

    Columns: process, range_id, configuration, phase, variant, entry (a number for the whole table),
    host_ns, entry_start_ns, entry_end_ns, block, collected (what was collected after its call, by name).
    """
    by_id = {(block.process, block.range_id): number for number, block in enumerate(blocks)}
    roots: dict[tuple[str, int], dict[str, Any]] = {}
    calls: dict[int, list[dict[str, Any]]] = {}  # by block: entries of the call whose end has not come
    rows = []
    for row in table:  # a range comes after the one that encloses it
        here, parent = (row["process"], row["range_id"]), (row["process"], row["parent_id"])
        if parent in by_id and row["end_ns"] is not None:
            number = by_id[parent]
            if about := _about_range(row):
                collected = _mapping(about.get("collected"))
                for entry in calls.pop(number, []) if collected else []:
                    entry["collected"] = collected
                continue
            if blocks[number].is_partial(row["name"], row["start_ns"]):
                continue
            roots[here] = _entry(row, blocks[number], number, len(roots))
            calls.setdefault(number, []).append(roots[here])
        elif parent in roots:
            roots[here] = roots[parent]
        else:
            continue
        rows.append((here, roots[here]))
    columns = [
        "process", "range_id", "configuration", "phase", "variant", "entry", "host_ns",
        "entry_start_ns", "entry_end_ns", "block", "collected",
    ]  # fmt: skip
    return pd.DataFrame(
        [{"process": process, "range_id": range_id, **entry} for (process, range_id), entry in rows], columns=columns
    )


def _entry(row: Mapping[str, Any], block: Block, number: int, entry: int) -> dict[str, Any]:
    return {
        "configuration": block.configuration, "phase": block.phase, "variant": row["name"],
        "entry": entry, "host_ns": row["end_ns"] - row["start_ns"],
        "entry_start_ns": row["start_ns"], "entry_end_ns": row["end_ns"], "block": number, "collected": {},
    }  # fmt: skip


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


def _add_times(points: Points, entries: pd.DataFrame, found: pd.DataFrame, units: Mapping[str, Any]) -> None:
    """Undisturbed figures of each repetition, and what was collected after it.

    One with a launch of unknown time is left out.
    """
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
        _add_collected(point, known["collected"].tolist(), units)


def _add_collected(point: Point, collected: Sequence[Mapping[str, Any]], units: Mapping[str, Any]) -> None:
    for name in dict.fromkeys(name for each in collected for name in each):
        numbers = [each.get(name) for each in collected]
        values = np.array([value for value in numbers if isinstance(value, int | float)], dtype=float)
        if len(values) and name not in point.metrics:
            unit = units.get(name)
            point.metrics[name] = Series(values, None if unit is None else str(unit), "collected").summarise()


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


def counter_name(metric: str) -> str:
    """What this project calls CUPTI's metric; its own name where it has none."""
    counter = _BY_RAW.get(metric)
    return counter.name if counter is not None else metric


def _add_counters(points: Points, found: pd.DataFrame, run: runs.Run, combine: Combine) -> None:
    """Exact counters of each repetition: sums over its launches, or means weighted by their time, or as asked for.

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
        counter = _BY_RAW.get(str(metric))
        name = counter_name(str(metric))
        how = combine.get(name, combine.get(str(metric), "sum" if str(metric).endswith(".sum") else "mean"))
        values = _combined(group, how)[is_whole].to_numpy(dtype=float)
        if len(values) and name not in point.metrics:
            point.metrics[name] = Series(values, counter.unit if counter else None, "exact").summarise()


def _combined(group: pd.DataFrame, how: str | Callable[[float, float], float]) -> pd.Series[float]:
    """One value an entry from those of its launches: "mean" is by time (plain where no time is known)."""
    values = group.groupby("entry")["value"]
    if callable(how):
        return values.agg(lambda found: functools.reduce(how, found)).astype(float)
    if how != "mean":
        found: pd.Series[float] = values.agg(how)
        return found
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
