"""Gaps, busy time and percentiles of random launches against what a few lines of Python make of them."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from pathlib import Path
from trace import T0, Trace

import pytest

import nanalyze.analysis as na

BIN = 2**24  # ns: the queries sort in bins of this width
Interval = tuple[int, int]


def build(run_dir: Path, seed: int, pauses: bool) -> tuple[dict[int, list[Interval]], list[Interval]]:
    """Launches by stream, many of them overlapping, some longer than several bins; and pauses."""
    chance = random.Random(seed)
    trace = Trace(run_dir)
    trace.device()
    kernel = trace.kernel_class("k")
    streams: dict[int, list[Interval]] = defaultdict(list)
    for _ in range(300):
        start = chance.choice([chance.randrange(12 * BIN), chance.randrange(40) * BIN // 4])
        length = chance.choice([0, 1, chance.randrange(BIN // 20), chance.randrange(BIN), chance.randrange(3 * BIN)])
        length = length if chance.random() < 0.3 else length // 40
        stream = chance.choice([7, 8, 9])
        trace.kernel(kernel, start, length, stream_id=stream)
        streams[stream].append((start, start + length))
    stops = []
    for _ in range(8 if pauses else 0):
        start = chance.randrange(13 * BIN)
        stops.append((start, start + chance.randrange(BIN)))
        trace.pause(*stops[-1])
    trace.write()
    return streams, stops


def followed(activities: list[Interval], pauses: list[Interval]) -> tuple[int, list[int], int]:
    """Span, gaps and paused time by going through everything in order."""
    first, last = min(a for a, _ in activities), max(b for _, b in activities)
    inside = [(a, min(b, last)) for a, b in pauses if first < a < last]
    events = sorted([(a, b, False) for a, b in activities] + [(a, b, True) for a, b in inside])
    covered, gaps, paused = events[0][0], [], 0
    for start, end, is_pause in events:
        if start > covered:
            gaps.append(start - covered)
        if is_pause:
            paused += max(end - max(start, covered), 0)
        covered = max(covered, end)
    return last - first, gaps, paused


@pytest.mark.parametrize("seed", range(8))
def test_gaps_of_a_stream(tmp_path: Path, seed: int) -> None:
    streams, pauses = build(tmp_path, seed, pauses=seed % 2 == 1)
    rows = {row["stream_id"]: row for row in na.open(tmp_path).query("launch_gaps").to_dict("records")}
    assert rows.keys() == streams.keys()
    for stream, activities in streams.items():
        span, gaps, paused = followed(activities, pauses)
        row = rows[stream]
        assert (row["activities"], row["span_ns"]) == (len(activities), span)
        assert (row["gaps"], row["gap_ns"], row["longest_gap_ns"]) == (len(gaps), sum(gaps), max(gaps))
        assert row["paused_ns"] == paused


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("buckets", [1, 7, 90])
def test_busy_time_of_a_device(tmp_path: Path, seed: int, buckets: int) -> None:
    streams, pauses = build(tmp_path, seed, pauses=seed % 2 == 1)
    kernels = [(a, b) for intervals in streams.values() for a, b in intervals if b > a]
    first, last = min(a for a, _ in kernels), max(b for _, b in kernels)
    pauses = [(max(a, first), min(b, last)) for a, b in pauses if a < last and b > first]
    frame = na.open(tmp_path).query("timeline_utilisation", buckets=buckets)
    for row in frame.to_dict("records"):
        piece = (row["start_ns"] - T0, row["end_ns"] - T0)
        covered, paused = union([*kernels, *pauses], piece), union(pauses, piece)
        assert (row["busy_ns"], row["paused_ns"]) == (covered - paused, paused)
        assert row["kernel_ns"] == sum(max(min(b, piece[1]) - max(a, piece[0]), 0) for a, b in kernels)


def union(intervals: list[Interval], piece: Interval) -> int:
    """Length of the part of `piece` that the intervals cover."""
    reached, length = piece[0], 0
    for start, end in sorted(intervals):
        start, end = max(start, reached), min(end, piece[1])
        length += max(end - start, 0)
        reached = max(reached, end)
    return length


def test_percentiles_are_within_their_bins(tmp_path: Path) -> None:
    chance = random.Random(3)
    trace = Trace(tmp_path)
    kernel, other, still = trace.kernel_class("k"), trace.kernel_class("other"), trace.kernel_class("still")
    durations = [int(math.exp(chance.gauss(10, 2))) + 1 for _ in range(1000)]
    for at, duration in enumerate(durations):
        trace.kernel(kernel, 100 * at, duration)
    trace.kernel(kernel, 7)  # of unknown duration
    trace.kernel(other, 0, 1234)
    trace.kernel(still, 0, 0)
    trace.write()
    rows = {row["kernel"]: row for row in na.open(tmp_path).query("kernel_durations").to_dict("records")}
    row, durations = rows["k"], sorted(durations)
    assert (row["launches"], row["total_ns"], row["mean_ns"]) == (1000, sum(durations), sum(durations) / 1000)
    assert (row["shortest_ns"], row["longest_ns"]) == (durations[0], durations[-1])
    for name, share in (("p50_ns", 0.5), ("p90_ns", 0.9), ("p99_ns", 0.99)):
        assert row[name] == pytest.approx(durations[math.ceil(share * 1000) - 1], rel=0.006)
    assert [rows["other"][name] for name in ("p50_ns", "p90_ns", "p99_ns")] == [1234.0] * 3
    assert [rows["still"][name] for name in ("p50_ns", "p90_ns", "p99_ns")] == [0.0] * 3
