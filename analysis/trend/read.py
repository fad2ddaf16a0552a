"""What a trend needs of one run: each kernel's time a launch with its interval, its steps, and under what it ran.

Everything is aggregated in DuckDB (`queries/trend_*.sql`), launches that were rolled up included.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nanalyze.analysis import statistics
from nanalyze.analysis.compare.sample import SHAPE, KernelClass
from nanalyze.rundir.errors import NanalyzeError
from nanalyze.rundir.rollup import MINUTE_NS

if TYPE_CHECKING:
    from nanalyze.analysis.run import Run

# A range serves as the step if it fills this share of the time from the first kernel to the last one.
LEAST_STEP_SHARE = 0.5
ARGV_CHARACTERS = 400


class TrendError(NanalyzeError):
    """Runs that make no trend."""


@dataclass(frozen=True)
class Measured:
    """A figure of one run with its 95 % interval; None where too few pieces tell it."""

    value: float
    low: float | None = None
    high: float | None = None

    def times(self, factor: float) -> Measured:
        """The same in another unit."""
        ends = (None if end is None else end * factor for end in (self.low, self.high))
        return Measured(self.value * factor, *ends)


@dataclass(frozen=True)
class Kernel:
    """One class in one run: a launch's time (mean without spikes, ns), all its launches, and its verdict."""

    known: KernelClass
    launch_ns: Measured
    p50_ns: float | None
    launches: int
    total_ns: int


@dataclass(frozen=True)
class Steps:
    """Ranges of one name: how many, at which least depth, and their host time (ns)."""

    count: int
    depth: int
    host_ns: Measured
    total_ns: float


@dataclass(frozen=True)
class Point:
    """One run. `facts` has, by what it is, the distinct values, sorted; `clock_hz` is the mean SM clock.

    `kernels` stand in the order of their first launches; `rolled_up` launches are known by their sums only.
    """

    label: str
    run_id: str
    started_ns: int
    span_ns: int
    processes: int
    kernels: Mapping[int, Kernel]
    steps: Mapping[str, Steps]
    facts: Mapping[str, tuple[str, ...]]
    clock_hz: float | None
    throttled_share: float | None
    rolled_up: int

    @property
    def total_ns(self) -> int:
        return sum(kernel.total_ns for kernel in self.kernels.values())

    def repeating(self) -> set[str]:
        """Names of ranges that fill enough of the run to be its step."""
        long = LEAST_STEP_SHARE * self.span_ns * self.processes
        return {name for name, steps in self.steps.items() if steps.total_ns >= long}


def read(run: Run, label: str, *, verdicts: bool = True) -> Point:
    """The point of one run. Raises TrendError where nothing was timed, QueryError where it cannot be read."""
    pieces = run.query("trend_kernels").to_dict("list")
    if not pieces["kernel_class_id"]:
        raise TrendError(f"{label}: has no launch with a time of its own. Record it with the layer timeline.")
    processes = run.arrow("SELECT * FROM processes ORDER BY process").to_pylist()
    (about,) = run.arrow(ABOUT).to_pylist()
    clocks = run.query("trend_clocks").to_dict("records")
    started = [row["started_ns"] for row in processes if row["started_ns"] is not None]
    return Point(
        label,
        str(run.info.get("run_id")),
        min(started, default=about["first_ns"]),
        # Rolled-up time is known to the minute.
        max(int(about["last_ns"] - about["first_ns"]) - (MINUTE_NS if about["rolled_up"] else 0), 1),
        int(about["processes"]),
        _kernels(run, pieces, verdicts),
        _steps(run),
        _facts(run, processes),
        _mean(clocks, "sm_clock_hz"),
        _mean(clocks, "throttled_share"),
        int(about["rolled_up"]),
    )


ABOUT = """
SELECT
    min(first_ns) AS first_ns, max(last_ns) AS last_ns, count(DISTINCT process) AS processes,
    CAST(sum(rolled_up) AS BIGINT) AS rolled_up
FROM (
    SELECT process, first_ns, last_ns, 0 AS rolled_up FROM _class_devices
    UNION ALL
    SELECT process, first_ns, last_ns, launches FROM _rolled_up
)
"""


# --- kernels ---------------------------------------------------------------------------------------


def _kernels(run: Run, pieces: Mapping[str, list[Any]], verdicts: bool) -> dict[int, Kernel]:
    launches: dict[int, list[int]] = defaultdict(list)
    times: dict[int, list[int]] = defaultdict(list)
    first: dict[int, int] = {}
    for class_id, count, spent, start in zip(
        *(pieces[name] for name in ("kernel_class_id", "launches", "kernel_ns", "first_ns")), strict=True
    ):
        launches[class_id].append(count)
        times[class_id].append(spent)
        first.setdefault(class_id, start)
    classes = {row["kernel_class_id"]: row for row in run.arrow("SELECT * FROM kernel_classes").to_pylist()}
    statement = "SELECT kernel_class_id, bound, level_or_pipe FROM verdicts"
    bounds = {row["kernel_class_id"]: row for row in run.arrow(statement).to_pylist()} if verdicts else {}
    medians = dict(zip(*(run.query("kernel_durations")[name] for name in ("kernel_class_id", "p50_ns")), strict=True))
    means = _means({one: np.array(times[one], float) / np.array(launches[one]) for one in times})
    order = sorted(first, key=lambda class_id: (first[class_id], class_id))
    return {
        one: Kernel(
            _known(one, classes.get(one), bounds.get(one, {})),
            means[one],
            float(medians[one]) if one in medians else None,
            sum(launches[one]),
            sum(times[one]),
        )
        for one in order
    }


def _means(rows: Mapping[int, Any]) -> dict[int, Measured]:
    """Mean of each row without its spikes; rows of one length at a time."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for key, row in rows.items():
        by_length[len(row)].append(key)
    found = {}
    for keys in by_length.values():
        means = statistics.means(np.stack([rows[key] for key in keys]))
        low, high = means.interval()
        for key, value, least, most in zip(keys, means.value, low, high, strict=True):
            found[key] = Measured(float(value), _finite(least), _finite(most))
    return found


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _known(class_id: int, row: Mapping[str, Any] | None, verdict: Mapping[str, Any]) -> KernelClass:
    if row is None:  # its shard is lost
        return KernelClass(class_id, f"[class {class_id}]", "")
    symbol = hashlib.blake2b((row["name_mangled"] or "").encode(), digest_size=8).hexdigest()
    return KernelClass(
        class_id,
        row["name"] or "",
        symbol,
        tuple(row[name] for name in SHAPE),
        bound=verdict.get("bound"),
        level_or_pipe=verdict.get("level_or_pipe"),
    )


def call_sites(run: Run) -> dict[int, str | None]:
    """The range in which each class is launched most; None where that is none, or the launches were rolled up."""
    sites: dict[int, str | None] = {}
    for row in run.query("compare_call_sites").to_dict("records"):
        name = row["range_name"]
        sites.setdefault(row["kernel_class_id"], name if isinstance(name, str) else None)
    return sites


# --- steps and facts -------------------------------------------------------------------------------


def _steps(run: Run) -> dict[str, Steps]:
    counts: dict[str, list[int]] = defaultdict(list)
    times: dict[str, list[int]] = defaultdict(list)
    depths: dict[str, int] = {}
    for row in run.query("trend_steps").to_dict("records"):
        counts[row["name"]].append(row["ranges"])
        times[row["name"]].append(row["host_ns"])
        depths[row["name"]] = min(row["depth"], depths.get(row["name"], row["depth"]))
    found = {}
    for name, spent in times.items():
        means = statistics.means((np.array(spent, float) / np.array(counts[name]))[None])
        low, high = means.interval()
        host = Measured(float(means.value[0]), _finite(low[0]), _finite(high[0]))
        found[name] = Steps(sum(counts[name]), depths[name], host, float(sum(spent)))
    return found


def _facts(run: Run, processes: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    devices = run.arrow("SELECT uuid, name, is_mig, sm_count FROM devices").to_pylist()
    return {
        "GPU model": _distinct(_model(row) for row in devices),
        "GPU": _distinct(row["uuid"] for row in devices),
        "host": _distinct(row["host"] for row in processes),
        "driver": _distinct(row["gpu_driver_version"] for row in processes),
        "CUDA of the driver": _distinct(_cuda(row["cuda_driver_version"]) for row in processes),
        "CUPTI": _distinct(row["cupti_version"] for row in processes),
        "Python": _distinct(row["python_version"] for row in processes),
        "nanalyze": _distinct(row["nanalyze_version"] for row in processes),
        "processes": (str(len(processes)),),
        "command": _distinct(_command(row["command"]) for row in processes),
    }


def _model(row: Mapping[str, Any]) -> str:
    return f"{row['name']}{' MIG' if row['is_mig'] else ''}, {row['sm_count']} SMs"


def _cuda(version: int | None) -> str | None:
    return None if version is None else f"{version // 1000}.{version % 1000 // 10}"


def _command(text: str) -> str:
    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        words = text
    return (" ".join(map(str, words)) if isinstance(words, list) else text)[:ARGV_CHARACTERS]


def _distinct(values: Any) -> tuple[str, ...]:
    return tuple(sorted({str(value) for value in values if value is not None}))


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Over the readings of all devices."""
    known = [(row[name], row["readings"]) for row in rows if row[name] is not None and np.isfinite(row[name])]
    total = sum(count for _, count in known)
    return sum(value * count for value, count in known) / total if total else None
