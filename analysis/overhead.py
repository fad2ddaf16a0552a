"""What recording cost a job's steps, from the recorder's own pauses.

Each pause gives a pair: the steps that ran within it, and those of equally much time next to it with the
recorder on, before and after in turn. Neighbours do not drift apart, and steps within one depend on each
other, so the pair is the unit: the slowdown is the median of the pairwise means of the pairs' log ratios
(Hodges and Lehmann, 1963), its interval is the inversion of Wilcoxon's signed-rank test. Both need only that
on and off would be alike if recording cost nothing, which windows of equal length at random moments give,
however skewed the steps' lengths. docs/method.md says what this does not see.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
from numpy.typing import NDArray

from nanalyze.analysis.made import OVERHEAD

if TYPE_CHECKING:
    import pyarrow as pa

Instants = NDArray[np.int64]
Array = NDArray[np.float64]

SETTLING_STEPS = 1  # at the start of a window: the GPU works on what was queued before it
LEAST_PAIRS = 6  # fewer have no 95 % interval
MOST_PAIRS = 1000  # more are thinned out evenly: their pairwise means are as many as their square
LEAST_REPEATS = 3
CANDIDATES = 20

TABLES = OVERHEAD  # what `measure` fills


@dataclass(frozen=True)
class Windows:
    """Pauses of a process in order: all off from off to end, on again for certain from complete; (N,) each, ns."""

    start: Instants
    off: Instants
    end: Instants
    complete: Instants


@dataclass(frozen=True)
class Steps:
    """Ranges of one name, nesting level and thread, in order of start; (N,) each, ns."""

    name: str
    depth: int
    start: Instants
    end: Instants


Repeating = tuple[str, int, int]  # name, depth and thread of a range that repeats


@dataclass(frozen=True)
class Pairs:
    """Lengths of the steps with the recorder on and off, by pause that has both."""

    on: list[Array]
    off: list[Array]

    @property
    def log_ratios(self) -> Array:
        """On over off, of the mean step."""
        return np.log([on.mean() / off.mean() for on, off in zip(self.on, self.off, strict=True)])


def measure(cursor: duckdb.DuckDBPyConnection) -> dict[str, pa.Table]:
    """The content of `TABLES`: one row a recorded process. `cursor` sees the views of a run. Raises duckdb.Error."""
    import pyarrow as pa

    # Of all processes at once: a query has the files of all of them to look at.
    windows = _windows(cursor)
    names = _repeating(cursor) if windows else {}
    rows = [
        _row(cursor, process, settings, windows.get(process, NEVER), names.get(process, ()))
        for process, settings in _recorded(cursor)
    ]
    types = {"BIGINT": pa.int64(), "INTEGER": pa.int32(), "DOUBLE": pa.float64(), "VARCHAR": pa.string()}
    columns = TABLES["overhead"]
    arrays = [pa.array([row[name] for row in rows], types[kind]) for name, kind in columns]
    return {"overhead": pa.table(arrays, names=[name for name, _ in columns])}


def _recorded(cursor: duckdb.DuckDBPyConnection) -> list[tuple[str, dict[str, Any]]]:
    """Processes that a recorder recorded, with its settings."""
    rows = cursor.execute("SELECT process, settings FROM processes WHERE layers <> 'imported' ORDER BY process")
    return [(process, _object(text)) for process, text in rows.fetchall()]


def _object(text: str | None) -> dict[str, Any]:
    try:
        content = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _row(
    cursor: duckdb.DuckDBPyConnection,
    process: str,
    settings: dict[str, Any],
    windows: Windows,
    names: Sequence[Repeating],
) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys((name for name, _ in TABLES["overhead"]), None)
    row.update(process=process, pauses=len(windows.start), pairs=0, steps_on=0, steps_off=0)
    if not len(windows.start):
        return {**row, "reason": _why_no_pause(settings)}
    steps, pairs = _best(_candidates(cursor, process, names), windows)
    if steps is None or pairs is None:
        return {**row, "reason": "no range repeats, so there are no steps to compare"}
    on, off = (np.concatenate(part) if part else np.zeros(0) for part in (pairs.on, pairs.off))
    row.update(range_name=steps.name, depth=steps.depth, pairs=len(pairs.on), steps_on=len(on), steps_off=len(off))
    if len(pairs.on):
        row.update(mean_on_ns=float(on.mean()), mean_off_ns=float(off.mean()))
    if len(pairs.on) < LEAST_PAIRS:
        return {**row, "reason": _why_too_few(len(windows.start), len(pairs.on))}
    slowdown, low, high = (100 * math.expm1(value) for value in signed_rank(pairs.log_ratios))
    return {**row, "slowdown_pct": slowdown, "low_pct": low, "high_pct": high}


def _why_no_pause(settings: dict[str, Any]) -> str:
    if settings.get("exact") is not None:
        return "the recorder does not pause while exact counters are measured"
    if "pause_pct" not in settings:
        return "it was recorded without pauses"
    if not settings["pause_pct"]:
        return "pauses were switched off (pause_pct=0)"
    return "the recorder never paused: the job marks no steps (ranges that repeat within 2.5 s), or was too short"


def _why_too_few(pauses: int, pairs: int) -> str:
    return (
        f"too few of the pauses ({pairs} of {pauses}) hold whole steps; {LEAST_PAIRS} are needed: record for longer, "
        "or with a larger pause_pct"
    )


def _windows(cursor: duckdb.DuckDBPyConnection) -> dict[str, Windows]:
    """The pauses by process."""
    found = cursor.execute(
        """
        SELECT p.process, p.start_ns, p.off_ns, p.end_ns, s.end_ns
        FROM pauses AS p JOIN _pause_spans AS s ON s.process = p.process AND s.start_ns = p.start_ns
        WHERE p.off_ns BETWEEN p.start_ns AND p.end_ns ORDER BY ALL
        """
    ).fetchall()
    by_process: dict[str, list[tuple[int, ...]]] = {}
    for process, *instants in found:
        by_process.setdefault(process, []).append(tuple(instants))
    return {process: _window(rows) for process, rows in by_process.items()}


def _window(rows: Sequence[tuple[int, ...]]) -> Windows:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return Windows(*(columns[:, place] for place in range(4)))


NEVER = _window(())


def _best(candidates: Iterator[Steps], windows: Windows) -> tuple[Steps | None, Pairs | None]:
    """Of the ranges that repeat, the one with most time that gives enough pairs, else the one with most pairs."""
    best: tuple[Steps | None, Pairs | None] = (None, None)
    for steps in candidates:
        pairs = paired(steps, windows)
        if len(pairs.on) >= LEAST_PAIRS:
            return steps, pairs
        if best[1] is None or len(pairs.on) > len(best[1].on):
            best = (steps, pairs)
    return best


def _repeating(cursor: duckdb.DuckDBPyConnection) -> dict[str, list[Repeating]]:
    """Name, depth and thread of the ranges that repeat, by process, those with most time first."""
    rows = cursor.execute(
        """
        SELECT process, name, depth, thread_id FROM ranges
        WHERE end_ns >= start_ns AND start_ns >= 0
        GROUP BY process, name, depth, thread_id HAVING count(*) >= $repeats
        QUALIFY row_number() OVER (
            PARTITION BY process ORDER BY sum(end_ns - start_ns) DESC, name, depth, thread_id
        ) <= $most
        ORDER BY process, sum(end_ns - start_ns) DESC, name, depth, thread_id
        """,
        {"repeats": LEAST_REPEATS, "most": CANDIDATES},
    ).fetchall()
    found: dict[str, list[Repeating]] = {}
    for process, *which in rows:
        found.setdefault(process, []).append((which[0], which[1], which[2]))
    return found


def _candidates(cursor: duckdb.DuckDBPyConnection, process: str, names: Sequence[Repeating]) -> Iterator[Steps]:
    for name, depth, thread in names:
        columns = cursor.execute(
            """
            SELECT start_ns, end_ns FROM ranges
            WHERE process = $process AND name = $name AND depth = $depth AND thread_id = $thread
                AND end_ns >= start_ns AND start_ns >= 0
            ORDER BY start_ns, end_ns
            """,
            {"process": process, "name": name, "depth": depth, "thread": thread},
        ).fetchnumpy()
        yield Steps(name, depth, np.asarray(columns["start_ns"]), np.asarray(columns["end_ns"]))


def paired(steps: Steps, windows: Windows) -> Pairs:
    """For each pause its whole steps, and those of equally much time just before or, in turn, just after it.

    Both are cut out alike, whole steps only: a long step straddles an edge more often, and it must not be
    missing from one side alone. The first of each is left out: in the pause the GPU may still work on what was
    queued before it.
    """
    lengths = (steps.end - steps.start).astype(np.float64)
    pairs = Pairs([], [])
    for number in range(len(windows.start)):
        off = _within(steps, int(windows.off[number]), int(windows.end[number]))
        sides = _beside(windows, number)
        on = next((found for first, last in sides if len(found := _within(steps, first, last))), off[:0])
        if len(off) and len(on) and lengths[off].mean() > 0 and lengths[on].mean() > 0:
            pairs.on.append(lengths[on])
            pairs.off.append(lengths[off])
    return pairs


def _beside(windows: Windows, number: int) -> list[tuple[int, int]]:
    """As much time as a pause lasted, before and after it, the side whose turn it is first; no other pause in it."""
    length = int(windows.end[number] - windows.off[number])
    start, complete = int(windows.start[number]), int(windows.complete[number])
    sides = []
    if number == 0 or windows.complete[number - 1] <= start - length:
        sides.append((start - length, start))
    if number + 1 == len(windows.start) or complete + length <= windows.start[number + 1]:
        sides.append((complete, complete + length))
    return sides[::-1] if number % 2 else sides


def _within(steps: Steps, first: int, last: int) -> NDArray[np.intp]:
    """Positions of the steps that start at `first` or later and end by `last`, but for SETTLING_STEPS at the start."""
    low = int(np.searchsorted(steps.start, first))
    high = int(np.searchsorted(steps.start, last))
    found = np.arange(low, high)
    return found[steps.end[low:high] <= last][SETTLING_STEPS:]


# --- statistics ------------------------------------------------------------------------------------


def signed_rank(values: Array) -> tuple[float, float, float]:
    """Hodges and Lehmann's estimate of the centre of `values`, with Wilcoxon's 95 % interval; needs LEAST_PAIRS."""
    if len(values) > MOST_PAIRS:
        values = values[np.linspace(0, len(values) - 1, MOST_PAIRS).astype(int)]
    first, second = np.triu_indices(len(values))
    means = np.sort((values[first] + values[second]) / 2)
    cut = _critical(len(values))
    return float(np.median(means)), float(means[cut]), float(means[-1 - cut])


def _critical(count: int) -> int:
    """The most c with P(signed-rank sum <= c) <= 2.5 % for `count` symmetric values."""
    if count > 60:
        mean, spread = count * (count + 1) / 4, math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
        return int(mean - 1.959964 * spread - 0.5)
    ways = np.zeros(count * (count + 1) // 2 + 1)
    ways[0] = 1
    for rank in range(1, count + 1):  # each rank is in the sum or not
        ways[rank:] += ways[: len(ways) - rank].copy()
    below = np.cumsum(ways) / 2.0**count
    return int(np.searchsorted(below, 0.025, side="right")) - 1


def ranges_of(rows: Sequence[tuple[int, int]], name: str = "step") -> Steps:
    """Steps from (start, end) pairs in order."""
    columns = np.array(rows, dtype=np.int64).reshape(-1, 2)
    return Steps(name, 0, columns[:, 0], columns[:, 1])
