"""Numbers and names of trace events, read from their JSON text so that nothing is rounded on the way.

Kineto prints microseconds with three decimals. As float64, an instant since 1970 would be off by
up to 128 ns; here the digits themselves become integer nanoseconds.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation
from typing import Any

import numpy as np
from msgspec import MsgspecError, Raw

Integers = np.ndarray[Any, np.dtype[np.int64]]
Missing = np.ndarray[Any, np.dtype[np.bool_]]

# What msgspec raises: for JSON that is wrong or not as declared, bytes that are not UTF-8, and depth.
UNDECODABLE = (MsgspecError, UnicodeDecodeError, RecursionError)

NS_FROM = 10**17  # whole numbers from here on are nanoseconds: as microseconds they lie after the year 5000
LONGEST = 18  # digits that surely fit into 63 bits
_INT64_MAX = 2**63 - 1
_NS_MAX = 2**62  # so that an instant and a base time still add up


def exact_ns(texts: Sequence[Raw]) -> tuple[Integers, Missing]:
    """Instants or durations in ns from JSON numbers (or strings) in us, and where there is none.

    Digits below a nanosecond are rounded to the nearest, half to even.
    """
    if not texts:
        return np.zeros(0, np.int64), np.zeros(0, bool)
    regular = _regular(texts)
    if regular is not None:
        return regular, np.zeros(len(texts), bool)
    values = [ns_of(bytes(text)) for text in texts]
    missing = np.array([value is None for value in values], dtype=bool)
    return np.array([value or 0 for value in values], dtype=np.int64), missing


def spans_ns(starts: Sequence[Raw], durations: Sequence[Raw]) -> tuple[Integers, Missing, Integers, Missing]:
    """Starts and durations of the same events in ns, and where there is none.

    A duration without a fraction counts in the unit of its start: nanoseconds where that is in nanoseconds.
    """
    begin, no_start = exact_ns(starts)
    length, no_duration = exact_ns(durations)
    if starts and _regular(starts) is None:
        pairs = zip(starts, durations, strict=True)
        in_ns = np.array([_in_ns(bytes(start)) and _is_whole(bytes(duration)) for start, duration in pairs], dtype=bool)
        length = np.where(in_ns, length // 1000, length)
    return begin, no_start, length, no_duration


def span_ns(start: bytes, duration: bytes) -> tuple[int | None, int | None]:
    """As `spans_ns`, for one event."""
    begin, length = ns_of(start), ns_of(duration)
    return begin, length // 1000 if length and _in_ns(start) and _is_whole(duration) else length


def _in_ns(text: bytes) -> bool:
    """Whether an instant is written in whole nanoseconds."""
    return _is_whole(text) and len(text.strip(b' "').lstrip(b"-0")) > len(str(NS_FROM)) - 1


def _is_whole(text: bytes) -> bool:
    return text.strip(b' "').lstrip(b"-").isdigit()


def _regular(texts: Sequence[Raw]) -> Integers | None:
    """All at once, where all have three decimals or all have none; None where they differ."""
    joined = b",".join(texts)
    if joined.translate(None, b"0123456789.,-") or max(map(len, texts)) > LONGEST or not min(map(len, texts)):
        return None
    characters = np.frombuffer(joined, np.uint8)
    ends = np.append(np.flatnonzero(characters == ord(",")), len(characters))
    dots = np.flatnonzero(characters == ord("."))
    if not len(dots):
        whole = np.fromstring(joined, np.int64, sep=",")
        return whole * 1000 if len(whole) == len(texts) and np.abs(whole).max() < _NS_MAX // 1000 else None
    if len(dots) != len(texts) or np.any(ends - dots != 4):
        return None
    values = np.fromstring(joined.replace(b".", b""), np.int64, sep=",")
    return values if len(values) == len(texts) else None


def ns_of(text: bytes) -> int | None:
    """One number in us, as JSON or quoted, in ns; None for what is no finite number up to 2**62 ns."""
    text = text.strip().strip(b'"').strip()
    whole, _, fraction = text.partition(b".")
    if len(whole) <= LONGEST and len(fraction) <= 3 and whole.lstrip(b"-").isdigit() and (fraction or b"0").isdigit():
        value = int(whole + fraction.ljust(3, b"0"))
        return int(whole) if not fraction and abs(int(whole)) >= NS_FROM else _fitting(value)
    if len(text) > 100:
        return None
    try:
        exact = Decimal(text.decode("ascii"))
        if not exact.is_finite() or exact.adjusted() > 25:
            return None
        if abs(exact) >= NS_FROM and exact == exact.to_integral_value():
            return _fitting(int(exact))
        return _fitting(int((exact * 1000).to_integral_value(ROUND_HALF_EVEN)))
    except (InvalidOperation, UnicodeDecodeError, ValueError):
        return None


def _fitting(value: int) -> int | None:
    return value if abs(value) <= _NS_MAX else None


def integer(value: Any) -> int | None:
    """A whole number given as number or as text, decimal or hexadecimal; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        value = int(value) if math.isfinite(value) and value.is_integer() else None
    elif isinstance(value, str):
        try:
            value = int(value, 16 if value.lower().startswith("0x") else 10) if len(value) <= 20 else None
        except ValueError:
            return None
    return value if isinstance(value, int) and abs(value) <= _INT64_MAX else None


def identifier(value: Any) -> int | None:
    """As `integer`; other text becomes a number that is the same in every import."""
    number = integer(value)
    if number is None and isinstance(value, str) and value:
        hashed = hashlib.blake2b(value.encode("utf-8", "backslashreplace"), digest_size=8).digest()
        return int.from_bytes(hashed, "little") >> 1
    return number


def shape(value: Any) -> tuple[int, int, int]:
    """A grid or block as (x, y, z); (0, 0, 0) where it is not told."""
    if isinstance(value, list | tuple) and len(value) == 3:
        numbers = [integer(part) for part in value]
        if all(number is not None for number in numbers):
            return numbers[0], numbers[1], numbers[2]  # type: ignore[return-value]
    return 0, 0, 0


# Valid escapes, among them pairs of surrogates (group 1), and everything else behind a backslash.
_ESCAPE = re.compile(
    rb'\\(?:(["\\/bfnrt]'
    rb"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})|(.?))",
    re.DOTALL,
)


def text_of(raw: bytes) -> str | None:
    """A JSON string; invalid escapes and bytes that are not UTF-8 stay as they are, spelled out."""
    if len(raw) < 2 or not raw.startswith(b'"'):
        return None
    try:
        return str(json.loads(raw))
    except ValueError:
        return str(json.loads(b'"' + sound_escapes(raw[1:-1]) + b'"', strict=False))


def sound_escapes(text: bytes) -> bytes:
    """The inside of a JSON string with its invalid bytes and escapes spelled out."""
    text = text.decode("utf-8", "backslashreplace").encode()
    return _ESCAPE.sub(lambda match: match[0] if match[1] else b"\\\\" + match[2], text)
