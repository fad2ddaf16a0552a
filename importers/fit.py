"""Whatever an importer hands over, as numpy arrays that fit a column, with a mask of what does not."""

from __future__ import annotations

from typing import Any

import numpy as np

INT32 = np.iinfo(np.int32)
INT64 = np.iinfo(np.int64)


def numbers(values: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Values and where they are missing; objects stay objects."""
    if isinstance(values, np.ma.MaskedArray):
        return values.data, np.ma.getmaskarray(values)
    if isinstance(values, np.ndarray) and values.dtype != object:
        return values, np.zeros(len(values), dtype=bool)
    missing = np.array([value is None for value in values], dtype=bool)
    return np.array([0 if value is None else value for value in values] or [0], dtype=object)[: len(values)], missing


def floats(array: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], Any]:
    """As float64, with a mask of what is no finite number."""
    if array.dtype == object:
        array = np.array([_float(value) for value in array], dtype=np.float64)
    finite = np.isfinite(array)
    if finite.all():
        return array, ~finite
    return np.where(finite, array, 0.0), ~finite


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def integers(array: np.ndarray[Any, Any], limits: Any) -> tuple[Any, Any]:
    """As int64, with a mask of what is no whole number or lies beyond the `limits`."""
    if array.dtype == object:
        whole = [value if _is_whole(value, limits) else None for value in array]
        unfit = np.array([value is None for value in whole], dtype=bool)
        return np.array([0 if value is None else int(value) for value in whole], dtype=np.int64), unfit
    if array.dtype.kind == "f":
        unfit = ~(np.isfinite(array) & (array >= limits.min) & (array < float(limits.max)) & (array == np.floor(array)))
        return np.where(unfit, 0, array).astype(np.int64), unfit
    if array.dtype in (np.int64, np.int32) and limits is INT64:
        return array, np.zeros(len(array), dtype=bool)
    unfit = (array > limits.max) | (array < limits.min) if array.dtype.kind == "i" else array > limits.max
    if unfit.any():
        array = np.where(unfit, 0, array)
    return array.astype(np.int64, copy=False), unfit


def _is_whole(value: Any, limits: Any) -> bool:
    if isinstance(value, float):
        return value.is_integer() and limits.min <= value <= limits.max
    return isinstance(value, int | np.integer) and bool(limits.min <= value <= limits.max)
