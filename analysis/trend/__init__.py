"""The same job over days: kernels that changed or drift, what changed with them, and how sure that is.

    import nanalyze.analysis as na
    from nanalyze.analysis import trend

    result = trend.trend([na.open(path) for path in paths])
    print(result.to_markdown())

`read` takes what is needed from a run, `series` finds which kernel is which, `changes` says what changed, `marks`
what else did, `gates` what fails, `outputs`, `picture` and `page` show it. `docs/trend.md` derives the method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nanalyze.analysis.trend import changes, marks, read, series
from nanalyze.analysis.trend.changes import Drift, Finding, Step
from nanalyze.analysis.trend.marks import Mark
from nanalyze.analysis.trend.read import Point, TrendError
from nanalyze.analysis.trend.series import Series

if TYPE_CHECKING:
    from nanalyze.analysis.run import Run

__all__ = ["Point", "Row", "Trend", "TrendError", "of_points", "trend"]

DAY_NS = 86_400 * 10**9
# Kernels with less of the kernel time matter to nobody, and each test costs the others some power.
LEAST_SHARE = 0.001
# Kernels that are missing in some runs are tested by which runs they are in, so many such sets at most.
MOST_SETS = 5
LEAST_CHANGE = 0.005

TESTED, FEW_RUNS, SMALL, RARE = "tested", "too few runs", "too little time", "in too few runs"
# Undetermined rather than changed: a clock does that, and where none was read nothing else can be told from it.
WITH_ALL = "moved as all kernels do, and clocks were not read"


@dataclass(frozen=True)
class Row:
    """A series with what was found. `tested` says whether it was looked at, else why not; `marks` are those at its
    steps. `first` and `last` are the levels before and after everything that was found (ns).
    """

    series: Series
    finding: Finding
    tested: str
    marks: Sequence[Mark] = ()

    @property
    def change(self) -> tuple[float, float, float] | None:
        """From the first run to the last: steps together, or the drift; as a share, with its 95 % interval."""
        return self._change

    _change: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class Trend:
    """`points` in order of time, `step` the range that is a step (None: times are a launch's), one row a series."""

    points: Sequence[Point]
    days: Sequence[float]
    step: str | None
    rows: Sequence[Row]
    marks: Sequence[Mark]
    clock_known: bool

    @property
    def unit(self) -> str:
        return series.LAUNCH if self.step is None else series.STEP

    @property
    def found(self) -> list[Row]:
        """Rows with a change or a drift, those of the job first, then by what they cost."""
        chosen = [row for row in self.rows if row.change is not None]
        return sorted(chosen, key=lambda row: (row.series.kind != series.JOB, -weight(row), row.series.name))

    def to_dict(self) -> dict[str, Any]:
        """Everything as a JSON-able dict; docs/trend.md documents its shape."""
        from nanalyze.analysis.trend import outputs

        return outputs.to_dict(self)

    def to_markdown(self) -> str:
        """The summary as Markdown; kernel names cannot break out of it."""
        from nanalyze.analysis.trend import outputs

        return outputs.to_markdown(self)


def weight(row: Row) -> float:
    """How much of all kernel time the change is."""
    return abs(row.change[0]) * (row.series.share or 0.0) if row.change is not None else 0.0


def trend(
    runs: Sequence[Run],
    *,
    labels: Sequence[str] = (),
    step: str | None = None,
    least: float = LEAST_CHANGE,
    verdicts: bool = True,
    progress: Callable[[str], None] = lambda name: None,
) -> Trend:
    """The trend over `runs` of one job, whatever their order; a step is a range called `step`.

    Without `step` the outermost range that repeats in all runs and fills them is taken; where there is none, times
    are those of a launch. Changes smaller than `least`, a share, are not reported. `progress` is called with each
    run's label. Raises TrendError.
    """
    names = list(labels) or [str(run.path) for run in runs]
    points = []
    for run, name in zip(runs, names, strict=True):
        progress(name)
        points.append(read.read(run, name, verdicts=verdicts))
    order = sorted(range(len(points)), key=lambda number: (points[number].started_ns, names[number]))
    sites: dict[int, Mapping[int, str | None]] = {}

    def call_sites(number: int) -> Mapping[int, str | None]:
        if number not in sites:
            sites[number] = read.call_sites(runs[order[number]])
        return sites[number]

    return of_points([points[number] for number in order], call_sites, step=step, least=least)


def of_points(
    points: Sequence[Point],
    call_sites: series.CallSites = lambda number: {},
    *,
    step: str | None = None,
    least: float = LEAST_CHANGE,
) -> Trend:
    """The trend over points that were read, in order of time. Raises TrendError."""
    _check(points, step)
    step = step if step is not None else series.common_step(points)
    days = [(point.started_ns - points[0].started_ns) / DAY_NS for point in points]
    clocks = [point.clock_hz for point in points]
    known = None not in clocks
    logarithms = np.log(np.array(clocks, float)) if known else None
    found = [*series.job(points, step), *series.kernels(points, series.tracks(points, call_sites), step)]
    marked = marks.marks(points)
    rows = _rows(found, np.array(days), logarithms, least)
    rows = [replace(row, marks=_near(row.finding, marked)) for row in rows]
    return Trend(points, days, step, rows, marked, known)


def _check(points: Sequence[Point], step: str | None) -> None:
    if len(points) < 2:
        raise TrendError("one run makes no trend. Give two runs or more, or a directory that holds them.")
    ids = [point.run_id for point in points]
    for point in points:
        if ids.count(point.run_id) > 1:
            raise TrendError(f"{point.label}: is the same run as another one. Give each run once.")
        if step is not None and step not in point.steps:
            names = ", ".join(sorted(point.steps)[:5]) or "none"
            raise TrendError(f"{point.label}: no range called {step} repeats in it. Ranges that do: {names}.")


def _near(finding: Finding, found: Sequence[Mark]) -> list[Mark]:
    """Marks at a step."""
    at = {step.at for step in finding.steps}
    return [mark for mark in found if mark.at in at]


# --- testing ---------------------------------------------------------------------------------------


def _rows(found: Sequence[Series], days: Any, clocks: Any, least: float) -> list[Row]:
    """Each series with its finding. Those of the same runs are tested together; the sets share the error rate."""
    sets: dict[tuple[int, ...], list[int]] = {}
    tested = [_why_not(one) for one in found]
    for number, one in enumerate(found):
        if tested[number] == TESTED:
            sets.setdefault(_present(one), []).append(number)
    order = sorted(sets, key=lambda runs: (-sum(found[n].share or 0.0 for n in sets[runs]), runs))
    for runs in order[MOST_SETS:]:
        for number in sets[runs]:
            tested[number] = RARE
    findings = [Finding() for _ in found]
    for runs in order[:MOST_SETS]:
        values = np.array([[found[n].values[run].value for run in runs] for n in sets[runs]])  # type: ignore[union-attr]
        chosen = list(runs)
        own = None if clocks is None else clocks[chosen]
        families = min(len(order), MOST_SETS)
        if own is None:
            changed, with_all = changes.find_apart(np.log(values), days[chosen], families=families)
        else:
            changed = changes.find(np.log(values), days[chosen], own, families=families)
            with_all = [False] * len(changed)
        for number, finding, is_shared in zip(sets[runs], changed, with_all, strict=True):
            tested[number] = WITH_ALL if is_shared else tested[number]
            findings[number] = _large(_renumbered(finding, chosen), least, float(np.ptp(days[chosen])))
    return [
        Row(one, finding, why, _change=_together(finding, _days(one, days)))
        for one, finding, why in zip(found, findings, tested, strict=True)
    ]


def _why_not(one: Series) -> str:
    present = _present(one)
    if len(one.values) < changes.LEAST_RUNS:
        return FEW_RUNS
    if len(present) < changes.LEAST_RUNS:
        return RARE
    if (one.share is not None and one.share < LEAST_SHARE) or any(
        one.values[run].value <= 0  # type: ignore[union-attr]
        for run in present
    ):
        return SMALL
    return TESTED


def _present(one: Series) -> tuple[int, ...]:
    return tuple(run for run, value in enumerate(one.values) if value is not None)


def _days(one: Series, days: Any) -> float:
    present = list(_present(one))
    return float(np.ptp(days[present])) if present else 0.0


def _renumbered(finding: Finding, runs: Sequence[int]) -> Finding:
    return replace(finding, steps=tuple(replace(step, at=runs[step.at]) for step in finding.steps))


def _large(finding: Finding, least: float, days: float) -> Finding:
    """What is smaller than `least` is left out; of a drift all of it counts."""
    steps = tuple(step for step in finding.steps if abs(step.change) >= least)
    drift = finding.drift
    if drift is not None and abs(np.expm1(np.log1p(drift.per_day) * days)) < least:
        drift = None
    return replace(finding, steps=steps, drift=drift)


def _together(finding: Finding, days: float) -> tuple[float, float, float] | None:
    """From the first run to the last. The logarithms of steps add up, and so do their variances."""
    if finding.drift is not None:
        drift = finding.drift
        ends = [float(np.expm1(np.log1p(rate) * days)) for rate in (drift.per_day, drift.low, drift.high)]
        return ends[0], ends[1], ends[2]
    if not finding.steps:
        return None
    sizes = [np.log1p(step.change) for step in finding.steps]
    reach = np.sqrt(sum((np.log1p(step.high) - size) ** 2 for step, size in zip(finding.steps, sizes, strict=True)))
    total = float(np.sum(sizes))
    return float(np.expm1(total)), float(np.expm1(total - reach)), float(np.expm1(total + reach))


def describe(finding: Finding) -> Step | Drift | None:
    """The largest step, or the drift."""
    return max(finding.steps, key=lambda step: abs(step.change), default=None) or finding.drift
