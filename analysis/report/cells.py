"""What the page's tables are made of: headings and cells that are already text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nanalyze.analysis.report import values
from nanalyze.analysis.report.names import cut, visible

Row = dict[str, Any]

# Text of a cell and of its tooltip; the whole of it stands in the CSV file.
CELL_CHARACTERS = 400
TITLE_CHARACTERS = 1_500


@dataclass(frozen=True)
class Head:
    """A column's heading; `style` is 'n' for numbers, '' or 'text' otherwise."""

    text: str
    unit: str = ""
    style: str = "n"


@dataclass(frozen=True)
class Cell:
    """One cell: text, CSS class, tooltip, whether it exceeds a peak, and a smaller second line."""

    text: str
    style: str = "n"
    title: str = ""
    over: bool = False
    below: str = ""


@dataclass(frozen=True)
class Grid:
    """A table, or, where it has no rows, the notes that say why."""

    heads: Sequence[Head] = ()
    rows: Sequence[Sequence[Cell]] = ()
    notes: Sequence[str] = ()
    foot: str = ""


def foremost(rows: Sequence[Row], shown: int, key: Callable[[Row], Any]) -> Sequence[Row]:
    """All of a few rows as they come; of more than `shown`, those with the smallest `key`, that first."""
    return rows if len(rows) <= shown else sorted(rows, key=key)[:shown]


def words(value: Any, style: str = "", limit: int = CELL_CHARACTERS) -> Cell:
    """Text as a cell: one line, nothing invisible, cut to fit, with what was cut in the tooltip."""
    text = values.text(value)
    if text is None:
        return Cell(values.DASH, style)
    shown = visible(text[: 20 * limit])
    return Cell(cut(shown, limit), style, title=tooltip(text) if len(shown) > limit else "")


def tooltip(text: str) -> str:
    """`text` for a title attribute, with its length where it had to be cut."""
    shown = visible(text[: 4 * TITLE_CHARACTERS])
    if len(shown) <= TITLE_CHARACTERS and len(text) <= 4 * TITLE_CHARACTERS:
        return shown
    return f"{shown[:TITLE_CHARACTERS]}… ({len(text):,} characters in all, see tables/verdicts.csv)"


def measured(value: Any, why_not: str = "", detail: str = "") -> Cell:
    """A percentage of a peak, marked where it is above it; `why_not` explains a dash."""
    if values.number(value) is None:
        return Cell(values.DASH, title=why_not)
    return Cell(values.percent(value), title=detail, over=values.over_peak(value))


def numbers(render: Callable[[Any], str], value: Any, title: str = "") -> Cell:
    return Cell(render(value), title=title)


def interval(low: Any, high: Any) -> str:
    """`95 % interval: 40.1 % to 44.0 %`; '' where it is not known."""
    if values.number(low) is None or values.number(high) is None or low == high:
        return ""
    return f"95 % interval: {values.percent(low)} to {values.percent(high)}"
