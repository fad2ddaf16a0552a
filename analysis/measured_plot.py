"""Pictures of a measurement: lines over a parameter, or bars, each with its 95 % interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from nanalyze.rundir.errors import RunError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Units as they are shown: nanoseconds by the size of the largest value.
_SCALES = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))


def plot(table: pd.DataFrame, parameters: Sequence[str], metric: str, x: str | None, axes: Axes | None) -> Axes:
    """Draw `metric` of a table of `Measured.to_pandas`. Raises RunError for what it does not hold."""
    rows = table[table["metric"] == metric]
    if rows.empty:
        known = ", ".join(table["metric"].dropna().unique())
        raise RunError(f"{metric}: was not measured. There are {known or 'no metrics'}.")
    if x is not None and x not in parameters:
        raise RunError(f"x={x!r}: no such parameter. There are {', '.join(parameters) or 'none'}.")
    if axes is None:
        from matplotlib.figure import Figure

        axes = Figure(figsize=(7, 4), layout="constrained").add_subplot()
    x = x if x is not None else _only_numeric(rows, parameters)
    scale, unit = _scale(rows)
    if x is not None:
        _lines(axes, rows, [name for name in parameters if name != x], x, scale)
        axes.set_xlabel(x)
    else:
        _bars(axes, rows, scale)
    axes.set_ylabel(f"{metric.removesuffix('_ns')} ({unit})" if unit else metric)
    axes.set_ylim(bottom=0)
    axes.legend()
    return axes


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


def _lines(axes: Axes, rows: pd.DataFrame, others: Sequence[str], x: str, scale: float) -> None:
    several = [name for name in others if rows[name].nunique() > 1]
    for key, group in rows.groupby(["variant", *several], sort=False):
        values = key if isinstance(key, tuple) else (key,)
        label = ", ".join([str(values[0]), *(f"{n}={v}" for n, v in zip(several, values[1:], strict=True))])
        ordered = group.sort_values(x)
        (line,) = axes.plot(ordered[x], ordered["value"] / scale, marker="o", label=label)
        low, high = (pd.to_numeric(ordered[end]) / scale for end in ("low", "high"))
        axes.fill_between(ordered[x], low, high, alpha=0.25, color=line.get_color())


def _bars(axes: Axes, rows: pd.DataFrame, scale: float) -> None:
    labels = list(dict.fromkeys(rows["configuration"]))
    names = list(dict.fromkeys(rows["variant"]))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        group = rows[rows["variant"] == name]
        at = (
            np.array([labels.index(label) for label in group["configuration"]])
            + (number - (len(names) - 1) / 2) * width
        )
        axes.bar(at, group["value"] / scale, width, yerr=_whiskers(group, scale), capsize=3, label=str(name))
    axes.set_xticks(range(len(labels)), labels)


def _whiskers(group: pd.DataFrame, scale: float) -> Any:
    value = group["value"].to_numpy(dtype=float)
    low, high = (pd.to_numeric(group[end]).to_numpy(dtype=float) for end in ("low", "high"))
    return np.nan_to_num(np.stack([value - low, high - value]) / scale)
