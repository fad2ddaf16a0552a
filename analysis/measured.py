"""What `recorder.measure` wrote, read back: one row a configuration, variant and metric, with intervals.

from nanalyze.analysis import measured

result = measured.load("run_dir")
result.to_pandas()
result.plot("total_ns", x="n")
result.compare("eager", "fused", n=4096)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from nanalyze.analysis import run as runs
from nanalyze.analysis import statistics
from nanalyze.analysis.measured_read import CLOCK_SHARE, Block, Point, Series, flag_clocks, read
from nanalyze.rundir.errors import RunError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from nanalyze.analysis.compare import Comparison

Derived = Mapping[str, Callable[..., float] | tuple[Callable[..., float], str]]


def load(run_dir: str | Path, *, derive: Derived | None = None) -> Measured:
    """The latest measurement of a run directory. Raises RunError where it holds none."""
    return Measured(Path(run_dir), None, derive=derive or {})


class Measured:
    """A measurement: `run_dir` is a run directory like any other, `values` what the variants returned last.

    `values` is keyed by (label of the configuration, variant) and empty where the measurement was loaded.
    """

    def __init__(
        self,
        run_dir: Path,
        measurement: str | None,
        *,
        derive: Derived | None = None,
        values: Mapping[tuple[str, str], Any] | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.values = dict(values or {})
        self.derive = dict(derive or {})
        with runs.open(run_dir) as run:
            self.settings, self._points = read(run, measurement)
        self._derive()
        flag_clocks(self._points)

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
        """One line for each configuration and variant whose clocks stand against comparing it."""
        return [f"{p.block.name}, {p.variant}: {p.clock_note}" for p in self._points if p.clock_note is not None]

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

    def to_wide(self) -> pd.DataFrame:
        """One row a configuration and variant, with the mean of each metric in a column of its name."""
        return pd.DataFrame(
            [
                {**self._about(point), **{name: series.value for name, series in point.metrics.items()}}
                for point in self._points
            ]
        )

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
        axes: Axes | None = None,
    ) -> Axes:
        """A metric with its intervals: a line a variant over the parameter `x`, else bars; into `axes` if given.

        Without `x` it is the only numeric parameter that has several values, if there is just one. `where`
        picks configurations by their parameters, as for a panel. Raises RunError.
        """
        from nanalyze.analysis import measured_plot

        chosen = {point.block.name for point in self._points if _matches(point.block, where or {})}
        table = self.to_pandas()
        return measured_plot.plot(table[table["configuration"].isin(chosen)], self.parameters, metric, x, axes)

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
            found = run.compare(a, b, within=labels[0])
        clocks = {point.variant: point.sm_clock_hz for point in self._points if point.block.name == labels[0]}
        return _with_clock_check(found, clocks.get(a), clocks.get(b))

    # -- derived --------------------------------------------------------------------------------

    def _derive(self) -> None:
        for point in self._points:
            for name, given in self.derive.items():
                function, unit = given if isinstance(given, tuple) else (given, None)
                series = _derived(point, function, unit)
                if series is not None:
                    point.metrics[name] = series


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


def _matches(block: Block, parameters: Mapping[str, Any]) -> bool:
    return all(
        name in block.parameters and (block.parameters[name] == value or str(block.parameters[name]) == str(value))
        for name, value in parameters.items()
    )


def _derived(point: Point, function: Callable[..., float], unit: str | None) -> Series | None:
    """A user's function of the metrics, once a repetition; None where what it needs was not measured."""
    timed = {name: series for name, series in point.metrics.items() if series.method == "timeline"}
    count = min((len(series.values) for series in timed.values()), default=0)
    fixed = {name: series.value for name, series in point.metrics.items() if name not in timed}
    try:
        values = [
            float(function({**fixed, **{n: float(s.values[i]) for n, s in timed.items()}}, **point.block.parameters))
            for i in range(count)
        ]
    except (KeyError, ZeroDivisionError):
        return None
    found = np.array(values, dtype=float)
    return Series(found, unit, "derived").summarise() if count and np.isfinite(found).all() else None
