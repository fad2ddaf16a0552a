"""Pictures of a measurement: lines over a parameter, or bars, each with its 95 % interval."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from nanalyze.rundir.errors import RunError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Units as they are shown: nanoseconds by the size of the largest value.
MOST_ABOVE = 1.5  # of the largest value: how far intervals may stretch the axis
LABEL_ROOM = 70  # characters of labels that fit under bars side by side
_SCALES = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))
KINDS = ("line", "bar")


def plot(
    table: pd.DataFrame,
    parameters: Sequence[str],
    metric: str,
    x: str | None = None,
    axes: Axes | None = None,
    *,
    kind: str | None = None,
    is_ratio: bool = False,
    annotate: bool = False,
    beside: pd.DataFrame | None = None,
) -> Axes:
    """Draw `metric` of a table of `Measured.to_pandas`. Raises RunError for what it does not hold.

    `beside`: rows of the metric that share the axis, and so decide on its unit and end.
    """
    rows = _rows(table, parameters, metric, is_ratio, x)
    if kind not in (None, *KINDS):
        raise RunError(f"kind={kind!r}: must be {' or '.join(KINDS)}")
    if axes is None:
        from matplotlib.figure import Figure

        axes = Figure(figsize=(7, 4), layout="constrained").add_subplot()
    x = None if kind == "bar" else x if x is not None else _only_numeric(rows, parameters)
    if kind == "line" and x is None:
        raise RunError("kind='line': name the parameter to draw over: x=")
    beside = rows if beside is None else beside
    scale, unit = (1.0, None) if is_ratio else _scale(beside)
    if x is not None:
        _lines(axes, rows, [name for name in parameters if name != x], x, scale, annotate)
        axes.set_xlabel(x)
    else:
        _bars(axes, rows, scale, annotate)
    axes.set_ylabel(_label(metric, unit, is_ratio))
    axes.set_ylim(0, _top(beside, scale))
    axes.legend()
    return axes


def _top(rows: pd.DataFrame, scale: float) -> float:
    """Where the vertical axis ends: intervals far wider than the values run out of the picture."""
    value, high = (pd.to_numeric(rows[name]).max() / scale for name in ("value", "high"))
    most = value if np.isnan(high) else min(max(value, high), MOST_ABOVE * value)
    return float(1.1 * most) if most > 0 else 1.0


def panels(
    table: pd.DataFrame,
    parameters: Sequence[str],
    metric: str,
    down: str | None,
    across: str | None,
    *,
    x: str | None = None,
    is_ratio: bool = False,
    **options: Any,
) -> np.ndarray[Any, Any]:
    """A grid of `plot`s: a row a value of the parameter `down`, a column one of `across`. Raises RunError."""
    from matplotlib.figure import Figure

    for name in (down, across):
        _known(name, parameters)
    found = _rows(table, parameters, metric, is_ratio, x)
    heads = [list(dict.fromkeys(found[name])) if name is not None else [None] for name in (down, across)]
    size = (1 + 4.5 * len(heads[1]), 0.5 + 3 * len(heads[0]))
    figure = Figure(figsize=size, layout="constrained")
    grid: np.ndarray[Any, Any] = figure.subplots(
        len(heads[0]), len(heads[1]), squeeze=False, sharex="col", sharey="row"
    )
    for (i, row), (j, column) in itertools.product(enumerate(heads[0]), enumerate(heads[1])):
        wanted = {name: value for name, value in ((down, row), (across, column)) if name is not None}
        part, beside = _where(found, wanted), _where(found, {down: row} if down is not None else {})
        if not part.empty:
            left = [name for name in parameters if name not in wanted]
            plot(part, left, metric, x, grid[i, j], is_ratio=is_ratio, beside=beside, **options)
        grid[i, j].set_title(", ".join(f"{name}={value}" for name, value in wanted.items()))
    return grid


def _where(rows: pd.DataFrame, wanted: Mapping[str, Any]) -> pd.DataFrame:
    for name, value in wanted.items():
        rows = rows[rows[name] == value]
    return rows


def _rows(table: pd.DataFrame, parameters: Sequence[str], metric: str, is_ratio: bool, x: str | None) -> pd.DataFrame:
    """The rows of a metric, checked; of a ratio, with it in the place of the value."""
    rows = table[table["metric"] == metric]
    if rows.empty:
        known = ", ".join(table["metric"].dropna().unique())
        raise RunError(f"{metric}: was not measured. There are {known or 'no metrics'}.")
    _known(x, parameters, "x=")
    if not is_ratio:
        return rows
    ratios = {"value": "ratio", "low": "ratio_low", "high": "ratio_high"}
    return rows.assign(**{name: pd.to_numeric(rows[ratio]) for name, ratio in ratios.items()})


def _known(name: str | None, parameters: Sequence[str], what: str = "") -> None:
    if name is not None and name not in parameters:
        raise RunError(f"{what}{name!r}: no such parameter. There are {', '.join(parameters) or 'none'}.")


def _label(metric: str, unit: str | None, is_ratio: bool) -> str:
    name = metric.removesuffix("_ns")
    if is_ratio:
        return f"{name}, ratio"
    return f"{name} ({unit})" if unit else metric


def _only_numeric(rows: pd.DataFrame, parameters: Sequence[str]) -> str | None:
    """The one parameter with several values, all of them numbers; None where it is not one."""
    found = [
        name
        for name in parameters
        if rows[name].nunique() > 1
        and all(isinstance(value, int | float | np.number) and not isinstance(value, bool) for value in rows[name])
    ]
    return found[0] if len(found) == 1 else None


def _scale(rows: pd.DataFrame) -> tuple[float, str | None]:
    unit = rows["unit"].iloc[0]
    if unit != "ns":
        return 1.0, unit
    largest = float(rows["value"].max())
    return next(((size, name) for size, name in _SCALES if largest >= size), _SCALES[-1])


def _lines(axes: Axes, rows: pd.DataFrame, others: Sequence[str], x: str, scale: float, annotate: bool) -> None:
    several = [name for name in others if rows[name].nunique() > 1]
    for key, group in rows.groupby(["variant", *several], sort=False):
        values = key if isinstance(key, tuple) else (key,)
        label = ", ".join([str(values[0]), *(f"{n}={v}" for n, v in zip(several, values[1:], strict=True))])
        ordered = group.sort_values(x)
        (line,) = axes.plot(ordered[x], ordered["value"] / scale, marker="o", label=label)
        low, high = (pd.to_numeric(ordered[end]) / scale for end in ("low", "high"))
        axes.fill_between(ordered[x], low, high, alpha=0.25, color=line.get_color())
        if annotate:
            for at, value in zip(ordered[x], ordered["value"] / scale, strict=True):
                axes.annotate(f"{value:.3g}", (at, value), xytext=(0, 6), textcoords="offset points", ha="center")


def _bars(axes: Axes, rows: pd.DataFrame, scale: float, annotate: bool) -> None:
    labels = list(dict.fromkeys(rows["configuration"]))
    names = list(dict.fromkeys(rows["variant"]))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        group = rows[rows["variant"] == name]
        at = (
            np.array([labels.index(label) for label in group["configuration"]])
            + (number - (len(names) - 1) / 2) * width
        )
        bars = axes.bar(at, group["value"] / scale, width, yerr=_whiskers(group, scale), capsize=3, label=str(name))
        if annotate:
            axes.bar_label(bars, fmt="%.3g", padding=2)
    short = _short(labels)
    is_long = sum(map(len, short)) > LABEL_ROOM
    axes.set_xticks(range(len(labels)), short, rotation=30 if is_long else 0, ha="right" if is_long else "center")


def _short(labels: Sequence[str]) -> list[str]:
    """Labels of configurations without what they have in common."""
    parts = [label.split(", ") for label in labels]
    common = set(parts[0]).intersection(*parts[1:]) if len(parts) > 1 else set()
    return [", ".join(part for part in each if part not in common) or ", ".join(each) for each in parts]


def _whiskers(group: pd.DataFrame, scale: float) -> Any:
    value = group["value"].to_numpy(dtype=float)
    low, high = (pd.to_numeric(group[end]).to_numpy(dtype=float) for end in ("low", "high"))
    return np.nan_to_num(np.stack([value - low, high - value]) / scale)
