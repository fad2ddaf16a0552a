"""Sums launches up by minute: what `compaction.roll_up` puts in the place of kernels.

A row of the result stands for the launches of one class on one device that started in one minute. Percentiles of
a longer time follow from the histograms, which add up: one an hour, because one a minute takes nearly twice
as many bytes as everything else together (docs/run-directory.md). Bins are those of `queries/kernel_durations.sql`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nanalyze.rundir.schema import KERNEL_MINUTES

if TYPE_CHECKING:
    import pyarrow as pa

MINUTE_NS = 60_000_000_000
HOUR_NS = 60 * MINUTE_NS
# Bins a unit of the natural logarithm: each is 1.1 % wide, so its middle is within 0.6 % of all in it.
BINS = 92.0
# What is believed of a launch; `queries/views/_launches.sql` says the same.
LONGEST_NS = 1_000_000_000_000_000
LATEST_NS = 4_000_000_000_000_000_000
# Columns of `kernels` that are needed.
COLUMNS = ("start_ns", "duration_ns", "kernel_class_id", "device_id", "graph_id", "correlation_id", "queued_ns")
DURATION_METRIC = "gpu__time_duration.sum"
# Above the bin of LONGEST_NS, and its own for durations that are not known.
_MOST_BINS = 4_096
_UNKNOWN = _MOST_BINS - 1

Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]


def minutes(rows: pa.Table, exact_ns: tuple[Integers, Integers] | None = None) -> pa.Table:
    """The rows of `kernel_minutes` for these rows of `kernels` (COLUMNS at least) of one process.

    `exact_ns` are correlation ids, ascending, and durations of launches that the profiler timed. A launch without
    a believable start counts in the minute in which it was queued, or in the first one of all.
    """
    start, timed = _believed(rows, "start_ns", LATEST_NS)
    duration, known = _believed(rows, "duration_ns", LONGEST_NS)
    if exact_ns is not None:
        duration, known = _with_exact(rows, duration, known, *exact_ns)
    keys, order, first = _groups(rows, _minute(rows, start, timed), _bins(duration, known))
    if not len(order):
        return KERNEL_MINUTES.arrow_schema().empty_table()
    overlapped = _overlapped(rows, start, duration, timed & known)
    graphs = ~_nulls(rows, "graph_id")
    launches = np.diff(np.append(first, len(order)))
    untimed = np.add.reduceat((~known)[order].astype(np.int64), first)
    counted = launches - untimed
    lowest = np.minimum.reduceat(np.where(known, duration, LONGEST_NS)[order], first)
    bins = _bins(duration, known)[order]
    columns: dict[str, Any] = {
        "minute_ns": keys["minute"] * MINUTE_NS,
        "device_id": keys["device"].astype(np.int32),
        "kernel_class_id": keys["class"],
        "launches": launches,
        "launches_untimed": untimed,
        "launches_in_graphs": np.add.reduceat(graphs[order].astype(np.int64), first),
        "total_ns": _or_null(np.add.reduceat(np.where(known, duration, 0)[order], first), counted),
        "overlapped_ns": _or_null(np.add.reduceat(overlapped[order], first), counted),
        "shortest_ns": _or_null(lowest, counted),
        "longest_ns": _or_null(np.maximum.reduceat(np.where(known, duration, 0)[order], first), counted),
        **{
            f"p{percent}_bin": _or_null(_percentile(bins, first, counted, percent), counted, np.int32)
            for percent in (50, 90, 99)
        },
        "histogram": _histograms(keys, bins, launches),
    }
    return _table(columns)


def latest(rows: pa.Table) -> int:
    """When the last of these launches ended or was queued, as far as that is known (ns); 0 where it is not."""
    start, timed = _believed(rows, "start_ns", LATEST_NS)
    duration, known = _believed(rows, "duration_ns", LONGEST_NS)
    queued, was_queued = _believed(rows, "queued_ns", LATEST_NS)
    instants = (start[timed] + np.where(known, duration, 0)[timed], queued[was_queued])
    return max((int(found.max()) for found in instants if len(found)), default=0)


def _table(columns: dict[str, Any]) -> pa.Table:
    import pyarrow as pa

    schema = KERNEL_MINUTES.arrow_schema()
    return pa.table([pa.array(columns[field.name], field.type) for field in schema], schema=schema)


# --- launches ------------------------------------------------------------------------------------


def _nulls(rows: pa.Table, name: str) -> Mask:
    return np.asarray(rows.column(name).combine_chunks().is_null(), dtype=bool)


def _values(rows: pa.Table, name: str) -> Integers:
    """A column as int64, -1 where it is NULL."""
    return np.asarray(rows.column(name).combine_chunks().fill_null(-1), dtype=np.int64)


def _believed(rows: pa.Table, name: str, most: int) -> tuple[Integers, Mask]:
    """A column, and where it lies between 0 and `most`."""
    values = _values(rows, name)
    good = (values >= 0) & (values <= most) & ~_nulls(rows, name)
    return np.where(good, values, 0), good


def _with_exact(
    rows: pa.Table, duration: Integers, known: Mask, ids: Integers, exact_ns: Integers
) -> tuple[Integers, Mask]:
    """Durations by the profiler where the timeline has none."""
    wanted = _values(rows, "correlation_id")
    at = np.minimum(np.searchsorted(ids, wanted), max(len(ids) - 1, 0))
    found = ~known & _nulls(rows, "graph_id") & ~_nulls(rows, "correlation_id")
    found &= (ids[at] == wanted) if len(ids) else False
    return np.where(found, exact_ns[at] if len(ids) else 0, duration), known | found


def _minute(rows: pa.Table, start: Integers, timed: Mask) -> Integers:
    queued, was_queued = _believed(rows, "queued_ns", LATEST_NS)
    at = np.where(timed, start, queued) // MINUTE_NS
    placed = timed | was_queued
    return np.where(placed, at, at[placed].min() if placed.any() else 0)


def _bins(duration: Integers, known: Mask) -> Integers:
    """Bins from 1 on, 0 for no time at all, _UNKNOWN for a duration that is not known."""
    found = np.zeros(len(duration), np.int64)
    positive = known & (duration > 0)
    found[positive] = np.floor(np.log(duration[positive]) * BINS).astype(np.int64) + 1
    found[~known] = _UNKNOWN
    return found


def _overlapped(rows: pa.Table, start: Integers, duration: Integers, placed: Mask) -> Integers:
    """Of each launch, the time in which one that had started earlier still ran on its device."""
    found = np.zeros(len(start), np.int64)
    device = _values(rows, "device_id")
    for one in np.unique(device[placed]):
        members = np.flatnonzero(placed & (device == one))
        members = members[np.lexsort((start[members] + duration[members], start[members]))]
        end = start[members] + duration[members]
        before = np.append(start[members[:1]], np.maximum.accumulate(end)[:-1])
        found[members] = np.clip(np.minimum(before, end) - start[members], 0, None)
    return found


# --- groups --------------------------------------------------------------------------------------


def _groups(rows: pa.Table, minute: Integers, bins: Integers) -> tuple[dict[str, Integers], Integers, Integers]:
    """Class, device and minute of each group; the launches by group and bin; where each group begins."""
    classes, of_class = np.unique(_values(rows, "kernel_class_id"), return_inverse=True)
    devices, of_device = np.unique(_values(rows, "device_id"), return_inverse=True)
    minutes_, of_minute = np.unique(minute, return_inverse=True)
    key = (of_class.ravel() * len(devices) + of_device.ravel()) * len(minutes_) + of_minute.ravel()
    order = np.argsort(key * _MOST_BINS + bins, kind="stable")
    sorted_key = key[order]
    first = np.flatnonzero(np.append([True], sorted_key[1:] != sorted_key[:-1])) if len(order) else order
    found = sorted_key[first]
    keys = {
        "class": classes[found // (len(devices) * len(minutes_))] if len(found) else found,
        "device": devices[found // len(minutes_) % len(devices)] if len(found) else found,
        "minute": minutes_[found % len(minutes_)] if len(found) else found,
    }
    return keys, order, first


def _percentile(bins: Integers, first: Integers, counted: Integers, percent: int) -> Integers:
    """Bin below or in which so many percent of a group's known durations lie; those not known come last."""
    place = np.ceil(percent / 100 * counted).astype(np.int64) - 1
    found: Integers = bins[first + np.maximum(place, 0)] - 1
    return found


def _or_null(values: Integers, counted: Integers, kind: type = np.int64) -> Any:
    """NULL where nothing was counted."""
    import pyarrow as pa

    return pa.array(values.astype(kind), mask=counted == 0)


def _histograms(keys: dict[str, Integers], bins: Integers, launches: Integers) -> pa.Array:
    """On the first minute of each class, device and hour: how many launches of the hour lie in which bin."""
    import pyarrow as pa

    hour = keys["minute"] * MINUTE_NS // HOUR_NS
    starts = np.append([True], np.diff(keys["class"]) != 0)
    for other in (keys["device"], hour):
        starts[1:] |= np.diff(other) != 0
    of_launch = np.repeat(np.cumsum(starts) - 1, launches)
    known = bins != _UNKNOWN
    found, counts = np.unique(of_launch[known] * _MOST_BINS + bins[known], return_counts=True)
    length = np.bincount(found // _MOST_BINS, minlength=int(starts.sum()))
    ends = np.zeros(len(starts), np.int64)
    ends[starts] = length
    offsets = np.append([0], np.cumsum(ends))
    # A NULL offset makes its list NULL.
    is_null = np.append(ends == 0, False)
    pairs = pa.StructArray.from_arrays(
        [pa.array((found % _MOST_BINS - 1).astype(np.int32)), pa.array(counts.astype(np.int64))],
        names=["bin", "launches"],
    )
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32), mask=is_null), pairs)
