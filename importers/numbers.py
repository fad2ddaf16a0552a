"""Numbers and units as other programs print them, turned into values in base units.

`1,234` is a thousand in one locale and about one in another. A file's numbers are read one way
only, and that way must follow from the file: `Evidence` collects what its numbers prove, and where
they prove nothing, or both, it refuses and asks. Units lose their prefix: bytes, nanoseconds (but
`/s` below a fraction bar), hertz.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from pathlib import Path

from nanalyze.importers.options import ImportFailed

LONGEST_NUMBER = 64  # characters; longer text is not a number that anyone printed
LARGEST_EXPONENT = 400  # beyond float64 in any case, and Decimal would take it seriously

# How programs say that they have no value; `(!)` is Nsight Compute's mark of a failed metric.
MISSING = frozenset(
    ("", "-", "--", "n/a", "na", "#n/a", "none", "null", "no data", "unknown", "unavailable")
) | frozenset(
    ("nan", "-nan", "+nan", "-nan(ind)", "nan(ind)", "inf", "+inf", "-inf", "infinity", "-infinity", "<unavailable>")
)
_MARK = "(!)"
# Separators of thousands that are no one's decimal sign.
_SPACES = "'’ \u00a0\u2009\u202f"
_INSTANCES = re.compile(r"\s*[({\[].*[)}\]]\s*", re.DOTALL)


@dataclass(frozen=True)
class Format:
    """How numbers are written; `name` is what `--locale` calls it."""

    name: str
    decimal: str
    thousands: str

    @property
    def pattern(self) -> re.Pattern[str]:
        """A whole number or fraction, its thousands grouped by three or not at all."""
        return _pattern(self.decimal, self.thousands)


EN = Format("en", ".", ",")
DE = Format("de", ",", ".")
FORMATS = {format_.name: format_ for format_ in (EN, DE)}


@cache
def _pattern(decimal: str, thousands: str) -> re.Pattern[str]:
    point = re.escape(decimal)
    groups = "|".join(rf"[1-9]\d{{0,2}}(?:{re.escape(mark)}\d{{3}})+" for mark in thousands + _SPACES)
    plain = rf"\d+(?:{point}\d+)?(?:[eE][+-]?\d{{1,4}})?|{point}\d+(?:[eE][+-]?\d{{1,4}})?"
    return re.compile(rf"[+-]?(?:{plain}|(?:{groups})(?:{point}\d+)?)", re.ASCII)


def clean(text: str) -> str:
    """The number alone: without Nsight Compute's mark of failure, and without the values of single
    instances that follow it in brackets (`12 (5; 7)`)."""
    text = text.strip()
    if text.startswith(_MARK):
        text = text[len(_MARK) :].strip()
    number, _, rest = text.partition(" ")
    return number if rest and _INSTANCES.fullmatch(rest) else text


def is_missing(text: str) -> bool:
    """Whether `text` (cleaned) says that there is no value."""
    return text.lower() in MISSING


def parse(text: str, format_: Format) -> Decimal | None:
    """The value of `text`, None where it says that there is none; ValueError for anything else."""
    text = clean(text)
    if text.isascii() and text.isdigit() and len(text) <= LONGEST_NUMBER:
        return Decimal(text)
    if is_missing(text):
        return None
    if len(text) > LONGEST_NUMBER or not format_.pattern.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is no number in the format {format_.name}")
    for mark in format_.thousands + _SPACES:
        text = text.replace(mark, "")
    value = Decimal(text.replace(format_.decimal, "."))
    if value and abs(value.adjusted()) > LARGEST_EXPONENT:
        raise ValueError(f"{text!r} does not fit any counter")
    return value


def _value_or_none(text: str, format_: Format) -> Decimal | None:
    try:
        return parse(text, format_)
    except ValueError:
        return None


@dataclass
class Evidence:
    """What the numbers of one file say about how they are written."""

    proofs: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    doubtful: str | None = None

    def see(self, text: str) -> None:
        """Take one number (or any other text, which proves nothing) into account."""
        text = clean(text)
        if text.isdigit() or len(text) > LONGEST_NUMBER:
            return
        readings = [format_.name for format_ in (EN, DE) if format_.pattern.fullmatch(text)]
        if len(readings) == 1:
            self._prove(readings[0], text)
        elif readings and _value_or_none(text, EN) != _value_or_none(text, DE):
            self.doubtful = self.doubtful or text

    def see_value(self, text: str, value: Decimal) -> None:
        """Take into account a number whose value is known from another place of the file."""
        readings = [format_ for format_ in (EN, DE) if format_.pattern.fullmatch(clean(text))]
        fitting = [format_.name for format_ in readings if _value_or_none(text, format_) == value]
        if len(readings) == 2 and len(fitting) == 1:
            self._prove(fitting[0], text)

    def _prove(self, name: str, text: str) -> None:
        self.proofs.setdefault(name, text)
        self.counts[name] += 1

    def decide(self, path: Path, locale: str | None) -> Format:
        """The format of the file; ImportFailed where its numbers leave that open."""
        if locale is not None:
            return FORMATS[locale]
        if len(self.proofs) == 1:
            return FORMATS[next(iter(self.proofs))]
        remedy = "Say how they are written: --locale en (1,234.5) or --locale de (1.234,5)."
        if self.proofs:
            ways = " and ".join(f"{self.proofs[name]!r} ({self.counts[name]:,} such)" for name in sorted(self.proofs))
            raise ImportFailed(path, f"numbers are written in two ways: {ways}", remedy)
        if self.doubtful is not None:
            en, de = parse(self.doubtful, EN), parse(self.doubtful, DE)
            reason = f"{self.doubtful!r} may be {en} or {de}, and no number in the file tells which"
            raise ImportFailed(path, reason, remedy)
        return EN  # every number reads the same in both


# --- units -----------------------------------------------------------------------------------------

_POWERS = {"": 0, "n": -9, "u": -6, "µ": -6, "μ": -6, "m": -3, "k": 3, "K": 3, "M": 6, "G": 9, "T": 12, "P": 15}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50}
_SECONDS = ("second", "seconds", "sec", "s")
_BYTE_SIGN = re.compile(r"(|Ki|Mi|Gi|Ti|Pi|[kKMGTP])B")  # not b, which would be bits
# Words that take a prefix. Others are taken as they stand: Nsight Compute scales only these.
_COUNTED = frozenset(
    ("byte", "bytes", "hz", "cycle", "cycles", "inst", "instruction", "op", "ops", "flop", "flops")
) | {
    *("sector", "sectors", "request", "requests", "packet", "packets", "transaction", "transactions"),
    *("thread", "threads", "warp", "warps", "block", "register", "sample", "samples"),
}


@dataclass(frozen=True)
class Unit:
    """A printed unit: a value times `factor` is in base units. `scaled`: the tool may have rounded.

    `known` is False for words that are not in the list; their factor is 1.
    """

    factor: Decimal
    scaled: bool = False
    known: bool = True


ONE = Unit(Decimal(1))


@cache
def unit(text: str) -> Unit:
    """The unit that `text` names, such as `Gbyte/s`, `usecond`, `cycle/nsecond`, `%` or nothing."""
    text = text.strip().strip("[]")
    if not text:
        return ONE
    above, *below = text.split("/")
    factor, known = _above(above.strip())
    for word in below:
        divisor, divisor_known = _below(word.strip())
        factor, known = factor / divisor, known and divisor_known
    return Unit(factor, factor != 1, known)


def _above(word: str) -> tuple[Decimal, bool]:
    """A factor to bytes, hertz or nanoseconds."""
    seconds = _seconds(word)
    if seconds is not None:
        return seconds * 10**9, True
    return _counted(word)


def _below(word: str) -> tuple[Decimal, bool]:
    """A factor to seconds, where the word is a time."""
    seconds = _seconds(word)
    return (seconds, True) if seconds is not None else _counted(word)


def _seconds(word: str) -> Decimal | None:
    for name in _SECONDS:
        prefix = word.removesuffix(name)
        if prefix != word and prefix in _POWERS and _POWERS[prefix] <= 0:
            return Decimal(10) ** _POWERS[prefix]
    return None


def _counted(word: str) -> tuple[Decimal, bool]:
    sign = _BYTE_SIGN.fullmatch(word)
    if sign:
        return Decimal(2) ** _BINARY[sign[1]] if sign[1] in _BINARY else Decimal(10) ** _POWERS[sign[1]], True
    if word == "%" or word.lower() in _COUNTED:
        return Decimal(1), True
    for prefix in sorted((*_BINARY, *_POWERS), key=len, reverse=True):
        if prefix and word.startswith(prefix) and word[len(prefix) :].lower() in _COUNTED:
            if prefix in _BINARY:
                return Decimal(2) ** _BINARY[prefix], True
            # No counter is in thousandths: mhz and mbyte are a way to write mega.
            return Decimal(10) ** (6 if prefix == "m" else _POWERS[prefix]), True
    return Decimal(1), word in ("SM", "TPC", "pass", "passes", "cluster", "clusters", "branches", "")
