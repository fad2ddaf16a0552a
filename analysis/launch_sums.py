"""Sums over launches that are handed over in order of time: of a device, of pieces of time, between instants.

The views `_device_time`, `_kernel_pairs` and `_launch_segments` and the query `timeline_utilisation` say in SQL what
each is; tests compare them. All is exact in integer nanoseconds. Sums of one call are made in float64, which is exact
below 2^53 ns (104 days); beyond, `Unscannable` is raised.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nanalyze.analysis.launch_reader import NONE, Columns, Integers, Unscannable

Flags = NDArray[np.bool_]

UNKNOWN, COMPUTE, COMMUNICATION, COPY = range(4)  # layers of _device_instants
CAUSES = (None, "start", "dependency", "launch", "synchronisation", "host", "before copy", "unknown")
START, DEPENDENCY, LAUNCH, SYNCHRONISATION, HOST, BEFORE_COPY, UNKNOWN_CAUSE = range(1, 8)
SUMS = ("activities", "kernel_ns", "gap_ns", "new_unknown_ns", "new_compute_ns", "new_kernel_ns", "new_any_ns")
MOST_DENSE = 1024  # classes: pairs of more are counted by sorting
EXACT = 2.0**53


def _added(keys: Integers, values: Integers | None, size: int) -> Integers:
    """Sum of `values` (or count) by key, 0 to size - 1."""
    if values is None:
        return np.bincount(keys, minlength=size).astype(np.int64)
    total = np.bincount(keys, weights=values, minlength=size)
    if len(total) and total.max() >= EXACT:
        raise Unscannable("sums of times are too large to be exact")
    return total.astype(np.int64)


@dataclass
class Ends:
    """The latest of the ends so far, NONE before the first."""

    value: int = int(NONE)

    def before(self, ends: Integers) -> Integers:
        """The latest end before each of `ends`, which follow those of earlier calls."""
        running = np.maximum.accumulate(np.concatenate((np.array([self.value], np.int64), ends)))
        self.value = int(running[-1])
        return running[:-1]


@dataclass
class DeviceSums:
    """_device_time of one device by class and cause: arrays (classes + 1, causes), the last class for none."""

    classes: int
    launch_ns: float
    host_call_ns: float
    sums: dict[str, Integers] = field(init=False)
    longest: Integers = field(init=False)
    any: Ends = field(default_factory=Ends)
    kernels: Ends = field(default_factory=Ends)
    compute: Ends = field(default_factory=Ends)
    unknown: Ends = field(default_factory=Ends)
    called: Ends = field(default_factory=Ends)

    def __post_init__(self) -> None:
        size = (self.classes + 1) * len(CAUSES)
        self.sums = {name: np.zeros(size, np.int64) for name in SUMS}
        self.longest = np.zeros(size, np.int64)

    def add(self, rows: Columns) -> None:
        """`rows` by start_ns, end_ns, layer and class: start_ns, end_ns, queued_ns, class, layer."""
        start, end, layer = rows["start_ns"], rows["end_ns"], rows["layer"]
        highest = int(layer.max())
        any_until = self.any.before(end)
        kernel_until = self.kernels.before(end if highest <= COMMUNICATION else np.where(layer <= 2, end, NONE))
        compute_until = self.compute.before(end if highest <= COMPUTE else np.where(layer <= 1, end, NONE))
        has_unknown = int(layer.min()) == UNKNOWN
        unknown_until = self.unknown.before(np.where(layer == UNKNOWN, end, NONE) if has_unknown else start[:0])
        called = self.called.before(rows["queued_ns"])
        key = rows["class"] * len(CAUSES)
        waited = np.flatnonzero((start > any_until) & (any_until > NONE))
        if len(waited):
            known = unknown_until[waited] if has_unknown else np.full(len(waited), self.unknown.value)
            key[waited] += self._causes(rows, waited, any_until[waited], known, called[waited])
            gap = start[waited] - any_until[waited]
            np.maximum.at(self.longest, key[waited], gap)
            self._add("gap_ns", key[waited], gap)
        self._add("activities", key, None)
        self._add("kernel_ns", key, end - start)  # also of what is no kernel: that has no class
        self._add("new_any_ns", key, _fresh(start, end, any_until))
        self._add_layers(key, rows, "new_kernel_ns", COMMUNICATION, kernel_until)
        self._add_layers(key, rows, "new_compute_ns", COMPUTE, compute_until)
        if has_unknown:
            self._add_layers(key, rows, "new_unknown_ns", UNKNOWN, unknown_until)

    def _add(self, name: str, key: Integers, values: Integers | None) -> None:
        self.sums[name] += _added(key, values, len(self.longest))

    def _add_layers(self, key: Integers, rows: Columns, name: str, highest: int, until: Integers) -> None:
        own = rows["layer"] <= highest
        fresh = _fresh(rows["start_ns"], rows["end_ns"], until)
        self._add(name, key, fresh if own.all() else np.where(own, fresh, 0))

    def _causes(
        self, rows: Columns, at: Integers, any_until: Integers, unknown: Integers, called: Integers
    ) -> Integers:
        start, queued, layer = (rows[name][at] for name in ("start_ns", "queued_ns", "layer"))
        causes: Integers = np.select(
            [
                layer == COPY,
                (layer == UNKNOWN) | (queued == NONE) | (unknown == any_until),
                (queued <= any_until) & (start - any_until < self.launch_ns),
                queued <= any_until,
                called == NONE,
                queued - called <= self.host_call_ns,
                queued - any_until <= any_until - called,
            ],
            [BEFORE_COPY, UNKNOWN_CAUSE, START, DEPENDENCY, UNKNOWN_CAUSE, LAUNCH, SYNCHRONISATION],
            HOST,
        )
        return causes


def _fresh(start: Integers, end: Integers, until: Integers) -> Integers:
    """How much of each interval lies after `until`."""
    return np.maximum(end - np.maximum(start, until), 0)


@dataclass
class Pairs:
    """_kernel_pairs of all devices: launches by class of the kernel before and own class."""

    classes: int
    dense: Integers = field(init=False)
    keys: Integers = field(default_factory=lambda: np.zeros(0, np.int64))
    counts: Integers = field(default_factory=lambda: np.zeros(0, np.int64))
    previous: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dense = np.zeros(self.classes * self.classes if self.classes <= MOST_DENSE else 0, np.int64)

    def add(self, device: int, classes: Integers) -> None:
        """The classes of what started on the device, in order; `self.classes` for what is no kernel."""
        none = self.classes
        before = np.concatenate((np.array([self.previous.get(device, none)], np.int64), classes[:-1]))
        self.previous[device] = int(classes[-1])
        differ = (before != classes) & (before != none) & (classes != none)
        keys = before[differ] * self.classes + classes[differ]
        if len(self.dense):
            self.dense += np.bincount(keys, minlength=len(self.dense))
            return
        found, counts = np.unique(keys, return_counts=True)
        self.keys, place = np.unique(np.concatenate((self.keys, found)), return_inverse=True)
        self.counts = _added(place, np.concatenate((self.counts, counts)), len(self.keys))

    def result(self) -> tuple[Integers, Integers, Integers]:
        """Class before, own class and launches of each pair that occurs."""
        keys = np.flatnonzero(self.dense) if len(self.dense) else self.keys
        counts = self.dense[keys] if len(self.dense) else self.counts
        return keys // max(self.classes, 1), keys % max(self.classes, 1), counts


@dataclass
class Pieces:
    """Time of a device by piece of equal length: `first_ns` is the start of the first, (count,) ns each.

    covered: with a kernel or a pause, each instant once; kernels: the sum over kernels.
    """

    first_ns: int
    width_ns: int
    count: int
    pauses: Sequence[tuple[int, ...]] = ()
    covered: Integers = field(init=False)
    kernels: Integers = field(init=False)
    ends: Ends = field(default_factory=Ends)
    seen: int = 0

    def __post_init__(self) -> None:
        self.covered = np.zeros(self.count, np.int64)
        self.kernels = np.zeros(self.count, np.int64)
        self.pauses = sorted(self.pauses)

    def add(self, start: Integers, end: Integers, until: int | None = None) -> None:
        """Kernels that took any time, by start; all later ones start at `until` or after it (None: there are none)."""
        self.kernels += self.spread(start, end)
        stop = len(self.pauses) if until is None else bisect_left(self.pauses, (until,))
        due = self.pauses[self.seen : stop]
        if due:
            self.seen = stop
            start = np.concatenate((start, np.array([a for a, _ in due], np.int64)))
            end = np.concatenate((end, np.array([b for _, b in due], np.int64)))
            order = np.argsort(start, kind="stable")
            start, end = start[order], end[order]
        self.covered += self.spread(np.maximum(start, self.ends.before(end)), end)

    def spread(self, start: Integers, end: Integers) -> Integers:
        """Time of the intervals, by start, in each piece; what is empty or reversed has none."""
        edges = self.first_ns + self.width_ns * np.arange(self.count + 1)
        length = np.maximum(end - start, 0)
        # The largest first: it is quicker, and nearly always enough.
        if len(length) and float(length.max()) * len(length) >= EXACT and length.sum(dtype=np.float64) >= EXACT:
            raise Unscannable("sums of times are too large to be exact")
        cut = np.searchsorted(start, edges)
        total = np.zeros(self.count, np.int64)
        filled = np.flatnonzero(np.diff(cut))
        if len(filled):
            total[filled] = np.add.reduceat(length[: cut[-1]], cut[filled])
        across = cut[0] + np.flatnonzero(end[cut[0] : cut[-1]] > np.repeat(edges[1:], np.diff(cut)))
        if len(across):  # most lie in one piece
            start, end = start[across], end[across]
            first, last = (start - self.first_ns) // self.width_ns, (end - 1 - self.first_ns) // self.width_ns
            total -= _added(first, end - edges[first + 1], self.count)
            total += _added(last, end - edges[last], self.count)
            whole = _added(first + 1, None, self.count + 1) - _added(last, None, self.count + 1)
            total += np.cumsum(whole)[:-1] * self.width_ns
        return total


@dataclass(frozen=True)
class Cuts:
    """Instants of _launch_cuts of one process, ascending, and durations of replayed launches by correlation id."""

    at_ns: Integers
    replayed: tuple[Integers, Integers] | None = None


def segments(cuts: Cuts, rows: Columns) -> Columns:
    """_launch_segments of some launches: a row an instant that has any, by `start_ns`, NONE before the first.

    rows: queued_ns, start_ns, end_ns (NONE where not believed), duration_ns (NONE where not known), is_replayed,
    is_communication. The same instant may come again in another call.
    """
    called = rows["queued_ns"] != NONE
    if not called.all():
        rows = {name: values[called] for name, values in rows.items()}
    at = np.searchsorted(cuts.at_ns, rows["queued_ns"], side="right")
    order = np.argsort(at, kind="stable")
    at = at[order]
    starts = np.flatnonzero(np.diff(at, prepend=-1))
    if not len(starts):
        return {}
    start, end, duration = (rows[name][order] for name in ("start_ns", "end_ns", "duration_ns"))
    timed, ended = duration != NONE, end != NONE
    length = np.where(ended, end - start, 0)
    is_communication = rows["is_communication"][order]
    return {
        "start_ns": np.concatenate((np.array([NONE]), cuts.at_ns))[at[starts]],
        "launches": np.diff(starts, append=len(at)),
        "launches_timed": np.add.reduceat(timed.astype(np.int64), starts),
        "total_ns": np.add.reduceat(np.where(timed, duration, 0), starts),
        "replayed": np.add.reduceat(rows["is_replayed"][order].astype(np.int64), starts),
        "first_ns": np.minimum.reduceat(np.where(ended, start, np.iinfo(np.int64).max), starts),
        "last_ns": np.maximum.reduceat(np.where(ended, end, NONE), starts),
        "kernel_ns": np.add.reduceat(np.where(is_communication, 0, length), starts),
        "communication_ns": np.add.reduceat(np.where(is_communication, length, 0), starts),
    }


def paused(pieces: Pieces) -> Integers:
    """Time of its pauses in each piece, each instant once."""
    start, end = (np.array([pause[side] for pause in pieces.pauses], np.int64) for side in (0, 1))
    return pieces.spread(np.maximum(start, Ends().before(end)), end)
