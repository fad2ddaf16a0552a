"""kernels.range_id: launches find their innermost range without being sorted."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from trace import T0, Trace
from typing import NamedTuple

import pytest

import nanalyze.analysis as na

LAST = 2**63 - 1 - T0  # as offset from T0


class Opened(NamedTuple):
    """A range as the file has it; it counts while `start <= at < end`."""

    start: int
    depth: int
    id: int
    end: int | None


def innermost(ranges: list[Opened], at: int) -> int | None:
    """The latest-opened range open at `at`; one that was never closed is open until the next such one."""
    leaked = sorted(one for one in ranges if one.end is None)
    until = {one.id: later.start for one, later in itertools.pairwise(leaked)}
    found = [one for one in ranges if one.start <= at < (one.end if one.end is not None else until.get(one.id, LAST))]
    return max(found, key=lambda one: one[:3]).id if found else None


def nested(chance: random.Random, start: int, end: int, depth: int, found: list[Opened]) -> None:
    """Ranges within ranges, some of them of no length, some never closed."""
    at = start
    while at < end and len(found) < 400:
        last = min(at + chance.choice([0, 1, 3, 50, 1000, 40_000]), end)
        found.append(Opened(at, depth, len(found) + 1, None if chance.random() < 0.02 else last))
        if depth < 3 and chance.random() < 0.5:
            nested(chance, at, last, depth + 1, found)
        at = last + chance.choice([0, 1, 10, 5_000])


def odd(chance: random.Random, found: list[Opened]) -> None:
    """Ranges at instants far from all others, which would stretch pieces of equal length between first and last."""
    for start, end in ((-T0 + 3, -T0 + 9), (-T0, -T0 + 1), (10**18, 10**18 + 5), (LAST - 1, LAST)):
        if chance.random() < 0.7:
            found.append(Opened(start, 0, len(found) + 1, end))


def clustered(chance: random.Random, found: list[Opened]) -> None:
    """All but a few ranges within a thousandth of the time."""
    for place in range(200):
        found.append(Opened(5 * place, 0, len(found) + 1, 5 * place + chance.randrange(6)))
    found.append(Opened(1_000_000, 0, len(found) + 1, 1_000_001))


@pytest.mark.parametrize("seed", range(12))
def test_each_launch_has_the_range_that_looking_at_every_range_gives(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    expected = {}
    for process in ("node0-0-100", "node0-1-200", "node0-2-300")[: 1 + seed % 3]:
        found: list[Opened] = []
        if process != "node0-2-300":  # that one has launches and no ranges
            (clustered(chance, found) if seed % 4 == 3 else nested(chance, 0, 100_000, 0, found))
            odd(chance, found)
        for one in found:
            trace.range("r", one.start, one.end, range_id=one.id, depth=one.depth, process=process)
        edges = [edge for one in found for edge in (one.start, one.end) if edge is not None] or [0]
        for _ in range(400):
            at = chance.choice([chance.choice(edges) + chance.randrange(-2, 3), chance.randrange(-50, 120_000)])
            at = min(max(at, -T0), LAST)
            number = trace.kernel(kernel, 5, 5, queued_ns=at, process=process)
            expected[process, number] = innermost(found, at)
        number = trace.kernel(kernel, process=process)
        expected[process, number] = None
    trace.write(shards=2)
    with na.open(tmp_path) as run:
        rows = run.arrow("SELECT process, correlation_id, range_id FROM kernels").to_pylist()
    assert {(row["process"], row["correlation_id"]): row["range_id"] for row in rows} == expected
    assert len(rows) == len(expected)  # none twice
    assert len(set(expected.values())) > 5


def test_the_pieces_of_time_are_few_however_far_apart_ranges_lie(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    for place in range(1000):
        trace.range("r", 1000 * place, 1000 * place + 500)
    trace.range("odd", -T0 + 1, -T0 + 2)
    trace.range("later", 10**18, 10**18 + 1)
    trace.write()
    with na.open(tmp_path) as run:
        (grid,) = run.arrow("SELECT width_ns, last_bucket - first_bucket + 1 AS pieces FROM _range_grid").to_pylist()
        rows = run.arrow("SELECT count(*) AS n, max(n) AS most FROM (SELECT count(*) AS n FROM _range_buckets"
                         " GROUP BY bucket)").to_pylist()  # fmt: skip
    assert 200 <= grid["width_ns"] <= 300
    assert 3_000 <= grid["pieces"] <= 5_000
    assert rows[0]["n"] <= 5_000
    assert rows[0]["most"] <= 40  # at the two ends, which hold what was left out: twice the square root of all


def test_launches_are_not_sorted_for_their_ranges(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    trace.range("r", 0, 100)
    trace.kernel(kernel, 10, 5)
    trace.write()
    with na.open(tmp_path) as run:
        plan = run.arrow("EXPLAIN SELECT range_id, count(*) FROM kernels GROUP BY range_id")["explain_value"][0].as_py()
        assert "BLOCKWISE" not in plan.upper()  # each launch against each range
        assert "ASOF" not in plan.upper()
        assert run.sql("SELECT range_id FROM kernels")["range_id"].tolist() == [1]
