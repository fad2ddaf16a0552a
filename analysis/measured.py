"""What `recorder.measure` wrote, read back: one row a configuration, variant and metric, with intervals.

from nanalyze.analysis import measured

result = measured.load("run_dir")
result.to_pandas()
result.plot("total_ns", x="n")
result.compare("eager", "fused", n=4096)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from nanalyze.analysis import run as runs
from nanalyze.analysis import statistics
from nanalyze.analysis.measured_read import (
    CLOCK_SHARE,
    Block,
    Combine,
    Point,
    Series,
    counter_name,
    flag_clocks,
    measurements,
    read,
)
from nanalyze.rundir.errors import RunError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from nanalyze.analysis.compare import Comparison

_BOTH = (
    "undisturbed_ns", "undisturbed_low", "undisturbed_high", "profiled_ns", "profiled_low", "profiled_high",
    "difference_pct", "difference_low_pct", "difference_high_pct", "differs",
)  # fmt: skip

Derived = Mapping[str, Callable[..., float] | tuple[Callable[..., float], str]]


def load(run_dir: str | Path, *, derive: Derived | None = None, combine: Combine | None = None) -> Measured:
    """The latest measurement of a run directory; `derive` and `combine` as in `recorder.measure`.

    Raises RunError where it holds none.
    """
    return Measured(Path(run_dir), None, derive=derive, combine=combine)


class Measured:
    """A measurement: `run_dir` is a run directory like any other, `values` what the variants returned last.

    `values` is keyed by (label of the configuration, variant) and empty where the measurement was loaded. `run`
    is the directory opened, where it is.
    """

    def __init__(
        self,
        run_dir: Path,
        measurement: str | None,
        *,
        derive: Derived | None = None,
        combine: Combine | None = None,
        values: Mapping[tuple[str, str], Any] | None = None,
        run: runs.Run | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.values = dict(values or {})
        self.derive = dict(derive or {})
        with runs.open(run_dir) if run is None else nullcontext(run) as opened:
            self.settings, self._points = read(opened, measurement, combine)
        self._not_derived = self._derive()
        flag_clocks(self._points)

    def __repr__(self) -> str:
        labels = {point.block.name for point in self._points}
        return (
            f"<Measured {str(self.run_dir)!r}: {len(labels)} configurations, {len(self.variants)} variants, "
            f"{len(self.failures)} failures, {len(self.warnings)} warnings>"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: the means. pandas escapes names."""
        return str(self.to_wide().to_html(index=False))

    # -- tables ---------------------------------------------------------------------------------

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters, in order."""
        return list(dict.fromkeys(name for point in self._points for name in point.block.parameters))

    @property
    def metrics(self) -> list[str]:
        """Names of everything that was measured or derived."""
        return list(dict.fromkeys(name for point in self._points for name in point.metrics))

    @property
    def variants(self) -> list[str]:
        """Names of the variants."""
        return list(dict.fromkeys(point.variant for point in self._points if point.variant is not None))

    @property
    def failures(self) -> dict[tuple[str, str | None], str]:
        """What went wrong, by label of the configuration and variant; empty where nothing did."""
        return {(point.block.name, point.variant): point.error for point in self._points if point.error is not None}

    @property
    def warnings(self) -> list[str]:
        """One line for each thing that stands against taking figures as they are: clocks, the profiler, derivation."""
        clocks = [f"{p.block.name}, {p.variant}: {p.clock_note}" for p in self._points if p.clock_note is not None]
        return [*clocks, *self._clocks_missed(), *self._not_counted(), *self._perturbed(), *self._not_derived]

    def _not_counted(self) -> list[str]:
        """Counters asked for by name that nothing has, where others were measured."""
        wanted = self.settings.get("counters")
        found = {name for point in self._points for name, series in point.metrics.items() if series.method == "exact"}
        if not isinstance(wanted, list) or not found:
            return []
        missing = sorted({counter_name(str(raw)) for raw in wanted} - found)
        if not missing:
            return []
        return [f"not measured: {', '.join(missing)}: this GPU counts nothing of that name, or not for every launch"]

    def _clocks_missed(self) -> list[str]:
        """Whether clocks that were asked for in MHz are those that it ran at."""
        wanted, point = self.settings.get("clocks"), next((p for p in self._points if p.sm_clock_hz), None)
        if not isinstance(wanted, int) or point is None or self.settings.get("clocks_in_effect") != "held":
            return []
        ran = float(point.sm_clock_hz or 0) / 1e6
        if abs(ran / wanted - 1) <= CLOCK_SHARE:
            return []
        return [f"clocks={wanted}: the SM ran at {ran:.0f} MHz all the same"]

    def _perturbed(self) -> list[str]:
        """One line where times under the profiler were others by more than the interval."""
        rows = self._both_times()
        found = [row for row in rows if row["differs"]]
        if not found:
            return []
        most = max(found, key=lambda row: abs(row["difference_pct"]))
        return [
            f"kernels of {len(found)} of {len(rows)} variants and configurations took another time under the profiler, "
            f"most those of {most['configuration']}, {most['variant']} ({most['difference_pct']:+.1f} %): what was "
            "counted there may not be what was timed (perturbation() has them all)"
        ]

    def to_pandas(self, *, normalize: str | None = None) -> pd.DataFrame:
        """One row a configuration, variant and metric; docs/measure.md lists the columns.

        `normalize` names a variant: `ratio` is then the row's value over that variant's at the same
        configuration and metric, with its interval. A variant that failed has one row without a metric.
        """
        rows = [row for point in self._points for row in self._rows(point)]
        if normalize is not None:
            if normalize not in self.variants:
                raise RunError(f"normalize={normalize!r}: no such variant. There are {', '.join(self.variants)}.")
            self._normalize(rows, normalize)
        return pd.DataFrame(rows)

    def perturbation(self) -> pd.DataFrame:
        """Kernel time of each variant without the profiler beside its time with it.

        One row a configuration and variant that has both: `undisturbed_ns` and `profiled_ns`, each with `_low` and
        `_high`, and `difference_pct` of the former with its interval. `differs`: whether that leaves out zero.
        """
        columns = ["configuration", *self.parameters, "variant", *_BOTH]
        return pd.DataFrame(self._both_times(), columns=columns)

    def _both_times(self) -> list[dict[str, Any]]:
        rows = []
        for point in self._points:
            alone, counted = point.metrics.get("total_ns"), point.metrics.get("duration_ns")
            if alone is None or counted is None:
                continue
            change = statistics.change(statistics.means(alone.values[None]), statistics.means(counted.values[None]))
            share, low, high = (
                None if np.isnan(end[0]) else 100 * (float(end[0]) - 1)
                for end in (change.ratio, change.low, change.high)
            )
            differs = None if low is None or high is None else low > 0 or high < 0
            values = (alone.value, alone.low, alone.high, counted.value, counted.low, counted.high, share, low, high)
            parameters = {name: point.block.parameters.get(name) for name in self.parameters}
            about = {"configuration": point.block.name, **parameters, "variant": point.variant}
            rows.append({**about, **dict(zip(_BOTH, [*values, differs], strict=True))})
        return rows

    def to_wide(self) -> pd.DataFrame:
        """One row a configuration and variant, with the mean of each metric in a column of its name."""
        return pd.DataFrame(
            [
                {**self._about(point), **{name: series.value for name, series in point.metrics.items()}}
                for point in self._points
            ]
        )

    def repetitions(self) -> pd.DataFrame:
        """One row a configuration, variant, metric and repetition, in order of time, spikes included."""
        rows = [
            {**self._about(point), "metric": name, "repetition": number, "value": value, "unit": series.unit}
            for point in self._points
            for name, series in point.metrics.items()
            for number, value in enumerate(series.values.tolist())
        ]
        return pd.DataFrame(rows)

    def _about(self, point: Point) -> dict[str, Any]:
        block = point.block
        parameters = {name: block.parameters.get(name) for name in self.parameters}
        return {"configuration": block.name, **parameters, **block.collected, "variant": point.variant}

    def _rows(self, point: Point) -> list[dict[str, Any]]:
        about = self._about(point)
        clock = {"sm_clock_hz": point.sm_clock_hz, "clock_note": point.clock_note, "error": point.error}
        if not point.metrics:
            nothing: dict[str, Any] = dict.fromkeys(("metric", "value", "low", "high", "unit"))
            return [{**about, **nothing, "repetitions": 0, "spikes": 0, "method": None, **clock}]
        return [
            {
                **about,
                "metric": name,
                "value": series.value,
                "low": series.low,
                "high": series.high,
                "unit": series.unit,
                "repetitions": len(series.values),
                "spikes": series.spikes,
                "method": series.method,
                **clock,
            }
            for name, series in point.metrics.items()
        ]

    def _normalize(self, rows: list[dict[str, Any]], baseline: str) -> None:
        base = {point.block.name: point for point in self._points if point.variant == baseline}
        mine = {(point.block.name, point.variant): point for point in self._points}
        for row in rows:
            row.update(ratio=None, ratio_low=None, ratio_high=None)
            other = base.get(row["configuration"])
            if other is None or row["metric"] is None or row["metric"] not in other.metrics:
                continue
            if row["variant"] == baseline:  # over itself
                row.update(dict.fromkeys(("ratio", "ratio_low", "ratio_high"), 1.0))
                continue
            a = statistics.means(other.metrics[row["metric"]].values[None])
            b = statistics.means(mine[row["configuration"], row["variant"]].metrics[row["metric"]].values[None])
            change = statistics.change(a, b)
            for name, found in (("ratio", change.ratio), ("ratio_low", change.low), ("ratio_high", change.high)):
                row[name] = None if np.isnan(found[0]) else float(found[0])

    def plot(
        self,
        metric: str = "total_ns",
        *,
        x: str | None = None,
        where: Mapping[str, Any] | None = None,
        kind: str | None = None,
        normalize: str | None = None,
        annotate: bool = False,
        axes: Axes | None = None,
    ) -> Axes:
        """A metric with its intervals: a line a variant over the parameter `x`, else bars; into `axes` if given.

        Without `x` it is the only numeric parameter that has several values, if there is just one. `where`
        picks configurations by their parameters, as for a panel. `kind`: "line" or "bar" where the other would be
        drawn. `normalize`: over that variant's value at the same configuration. `annotate` writes each value
        beside its point. Raises RunError.
        """
        from nanalyze.analysis import measured_plot

        table = self._chosen(where or {}, normalize)
        return measured_plot.plot(table, self.parameters, metric, x, axes, kind=kind, is_ratio=bool(normalize),
                                  annotate=annotate)  # fmt: skip

    def panels(
        self, metric: str = "total_ns", *, rows: str | None = None, columns: str | None = None, **options: Any
    ) -> np.ndarray[Any, Any]:
        """A picture of panels, one a value of the parameters `rows` and `columns`; the array of its axes.

        `options` are those of `plot`. Panels side by side share their scale. `array[0, 0].figure.savefig(...)`
        writes it. Raises RunError.
        """
        from nanalyze.analysis import measured_plot

        table = self._chosen(options.pop("where", None) or {}, options.get("normalize"))
        options["is_ratio"] = bool(options.pop("normalize", None))
        return measured_plot.panels(table, self.parameters, metric, rows, columns, **options)

    def _chosen(self, where: Mapping[str, Any], normalize: str | None) -> pd.DataFrame:
        chosen = {point.block.name for point in self._points if _matches(point.block, where)}
        table = self.to_pandas(normalize=normalize)
        return table[table["configuration"].isin(chosen)]

    # -- comparing ------------------------------------------------------------------------------

    def compare(self, a: str, b: str, **parameters: Any) -> Comparison:
        """How variant `b` differs from `a` at the configuration with these parameters; see `Run.compare`.

        Variants take turns, so `Run.compare` finds the same clocks for both: a check is added where the readings
        after their own calls differ. Raises RunError where the parameters do not name one configuration.
        """
        labels = list(dict.fromkeys(point.block.name for point in self._points if _matches(point.block, parameters)))
        if len(labels) != 1:
            given = ", ".join(f"{name}={value}" for name, value in parameters.items()) or "no parameters"
            known = ", ".join(dict.fromkeys(point.block.name for point in self._points))
            raise RunError(f"{given}: name one configuration ({len(labels)} match). There are: {known}.")
        with runs.open(self.run_dir) as run:
            if measurements(run, labels[0]) > 1:
                raise RunError(
                    f"{self.run_dir}: holds several measurements of {labels[0]}, which cannot be compared apart. "
                    "Measure into a run directory of its own."
                )
            found = run.compare(a, b, within=labels[0])
        sides = [self._point(labels[0], name) for name in (a, b)]
        found = _with_clock_check(found, *(None if point is None else point.sm_clock_hz for point in sides))
        return _with_failure_check(found, *(None if point is None else point.error for point in sides))

    def _point(self, label: str, variant: str) -> Point | None:
        return next((p for p in self._points if p.block.name == label and p.variant == variant), None)

    # -- derived --------------------------------------------------------------------------------

    def _derive(self) -> list[str]:
        """Add the derived metrics; a line for each that could not be."""
        trouble: dict[str, str] = {}
        for point in self._points:
            for name, given in self.derive.items():
                function, unit = given if isinstance(given, tuple) else (given, None)
                if not point.metrics:
                    continue
                try:
                    point.metrics[name] = _derived(point, function, unit)
                except Exception as error:  # a user's function: what was measured stays
                    trouble.setdefault(name, f"derived metric {name!r}, {point.block.name}: {_reason(error)}")
        return list(trouble.values())


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"needs {error}, which was not measured"
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def spread_pct(run_dir: Path, measurement: str, configuration: int) -> float | None:
    """The widest half interval of the variants' mean kernel time, in percent of it; None while one is unknown."""
    with runs.open(run_dir, verify=False) as run:
        _, points = read(run, measurement)
    widest = 0.0
    for point in points:
        if point.block.configuration != configuration or point.error is not None:
            continue
        total = point.metrics.get("total_ns")
        if total is None or total.low is None or total.high is None or not total.value:
            return None
        widest = max(widest, 50 * (total.high - total.low) / total.value)
    return widest


def _with_clock_check(found: Comparison, a_hz: float | None, b_hz: float | None) -> Comparison:
    from nanalyze.analysis.compare.checks import WARNING, Check

    subject = "SM clock"
    if not a_hz or not b_hz or any(check.subject == subject and check.level == WARNING for check in found.checks):
        return found
    apart = b_hz / a_hz - 1
    if abs(apart) <= CLOCK_SHARE:
        return found
    message = f"the SM clock after calls of B is {100 * apart:+.1f} % from A's: times differ by as much for that alone"
    check = Check(WARNING, subject, f"{a_hz / 1e6:.0f} MHz", f"{b_hz / 1e6:.0f} MHz", message)
    return replace(found, checks=[*found.checks, check])


def _with_failure_check(found: Comparison, a: str | None, b: str | None) -> Comparison:
    """Of a call that failed some launches may be missing: `Run.compare` knows nothing of that."""
    from nanalyze.analysis.compare.checks import WARNING, Check

    if not a and not b:
        return found
    message = "a call failed: its side ends early, and the last repetition may lack launches"
    check = Check(WARNING, "failures", a or "none", b or "none", message)
    return replace(found, checks=[check, *found.checks])


def _matches(block: Block, parameters: Mapping[str, Any]) -> bool:
    return all(
        name in block.parameters and (block.parameters[name] == value or str(block.parameters[name]) == str(value))
        for name, value in parameters.items()
    )


def _derived(point: Point, function: Callable[..., float], unit: str | None) -> Series:
    """A user's function of the metrics, once a repetition. Raises what it raises, ValueError for no finite number."""
    timed = {name: series for name, series in point.metrics.items() if series.method == "timeline"}
    count = min((len(series.values) for series in timed.values()), default=0)
    fixed = {name: series.value for name, series in point.metrics.items() if name not in timed}
    values = [
        float(function({**fixed, **{n: float(s.values[i]) for n, s in timed.items()}}, **point.block.parameters))
        for i in range(count)
    ]
    found = np.array(values, dtype=float)
    if not np.isfinite(found).all():
        raise ValueError("gives no finite number")
    return Series(found, unit, "derived").summarise()
