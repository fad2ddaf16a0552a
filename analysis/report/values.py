"""Numbers as a reader wants them: with a unit, three digits, and a dash where nothing was measured.

Storage is integer nanoseconds and bytes; this is where they become milliseconds and gigabytes.
Nothing here ever yields "nan", "inf" or an unmarked share above 100 %.
"""

from __future__ import annotations

import datetime
import math
from typing import Any

DASH = "–"
OVER_MARK = "†"
THIN = "\u202f"  # narrow no-break space between a number and its unit

_TIME = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))
_DECIMAL = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def number(value: Any) -> float | None:
    """`value` as a finite float; None for NULL, NaN, infinities and what is no number."""
    if value is None or isinstance(value, str):
        return None
    try:
        result = float(value)
    except (TypeError, ValueError):  # pandas.NA refuses float()
        return None
    return result if math.isfinite(result) else None


def integer(value: Any) -> int | None:
    """`value` as an int, exact for every int64; None where there is none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if hasattr(value, "dtype") and getattr(value.dtype, "kind", "") in "iu":
        return int(value)
    finite = number(value)
    return None if finite is None else int(finite)


def text(value: Any) -> str | None:
    """`value` as a string; None for NULL in whichever way pandas spells it."""
    if isinstance(value, str):
        return value
    if value is None or number(value) is None:
        return None
    return str(value)


def ratio(part: Any, whole: Any) -> float | None:
    """part / whole; None where either is missing or the whole is not positive."""
    numerator, denominator = number(part), number(whole)
    if numerator is None or denominator is None or denominator <= 0:
        return None
    return numerator / denominator


def digits(value: float) -> str:
    """Three significant digits without an exponent, thousands separated."""
    magnitude = abs(value)
    if magnitude >= 99.95:
        return f"{value:,.0f}"
    if magnitude >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if magnitude >= 0.01 or value == 0 else f"{value:.2g}"


def count(value: Any) -> str:
    whole = integer(value)
    return DASH if whole is None else f"{whole:,}"


def duration(ns: Any) -> str:
    """Nanoseconds as the unit that fits: `12.3 µs`, `4.56 s`, `3 min 20 s`, `2 h 5 min`."""
    value = number(ns)
    if value is None:
        return DASH
    seconds = value / 1e9
    if seconds >= 7200:
        return f"{int(seconds // 3600):,}{THIN}h {int(seconds % 3600 // 60)}{THIN}min"
    if seconds >= 120:
        return f"{int(seconds // 60)}{THIN}min {int(seconds % 60)}{THIN}s"
    for scale, unit in _TIME:
        if abs(value) >= scale * 0.9995:
            return f"{digits(value / scale)}{THIN}{unit}"
    return f"{digits(value)}{THIN}ns"


def scaled(value: Any, unit: str) -> str:
    """`value` with a decimal prefix before `unit`: `3.35 TB/s`."""
    finite = number(value)
    if finite is None:
        return DASH
    for scale, prefix in _DECIMAL:
        if abs(finite) >= scale * 0.9995:
            return f"{digits(finite / scale)}{THIN}{prefix}{unit}"
    return f"{digits(finite)}{THIN}{unit}"


def size(value: Any) -> str:
    """Bytes with a decimal prefix: `3.35 GB`."""
    return scaled(value, "B")


def share(value: Any) -> str:
    """A share (0 to 1) in percent; a small one is never rounded to nothing."""
    finite = number(value)
    return DASH if finite is None else percent(100 * finite)


def percent(value: Any) -> str:
    """A percentage; above 100 it carries a mark, as no part can be busier than its peak."""
    finite = number(value)
    if finite is None:
        return DASH
    if 0 < finite < 0.05:
        return f"<{THIN}0.1{THIN}%"
    if over_peak(finite):
        return f"{max(finite, 100.1):,.1f}{THIN}%{OVER_MARK}"
    return f"{finite:.1f}{THIN}%"


def over_peak(value: Any) -> bool:
    """Whether a percentage of a peak is above 100 (beyond what floating point may add)."""
    finite = number(value)
    return finite is not None and finite > 100 + 1e-6


def instant(ns: Any) -> str:
    """Nanoseconds since the epoch as a reader's UTC time, to the second."""
    value = integer(ns)
    moment = _moment(value)
    return DASH if moment is None else moment.strftime("%Y-%m-%d %H:%M:%S UTC")


def iso(ns: Any) -> str | None:
    """Nanoseconds since the epoch as ISO 8601 in UTC with all nine digits; None where missing."""
    value = integer(ns)
    moment = _moment(value)
    if moment is None or value is None:
        return None
    return f"{moment.strftime('%Y-%m-%dT%H:%M:%S')}.{value % 1_000_000_000:09d}Z"


def _moment(ns: int | None) -> datetime.datetime | None:
    if ns is None:
        return None
    try:
        return datetime.datetime.fromtimestamp(ns // 1_000_000_000, tz=datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return None
