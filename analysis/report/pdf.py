"""The report as PDF: A4 pages by matplotlib, so that no browser and no further package is needed.

Text is set in matplotlib's own font, tables are ruled by hand, plots are placed as images. The same data give the
same bytes. What needs interaction (sorting, hover, queries) stays in the page; what fits paper is here.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib import image as images
from matplotlib import style
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.textpath import TextPath

from nanalyze.analysis.report import (
    activity,
    kernels,
    lost,
    measurements,
    opportunities,
    palette,
    plots,
    rooflines,
    several,
    values,
)
from nanalyze.analysis.report import ranks as rank_table
from nanalyze.analysis.report.cells import Cell, Grid, Head
from nanalyze.analysis.report.collect import Data, labels, ranks
from nanalyze.analysis.report.content import caveats, headline_of, losses_title, subtitle, title
from nanalyze.analysis.report.names import ascii_only, cut, shorten, visible
from nanalyze.analysis.report.sections import device_grid, losses

POINTS = 72.0
WIDTH, HEIGHT = 595.0, 842.0  # A4
MARGIN = 48.0
INNER = WIDTH - 2 * MARGIN
SHOWN_KERNELS = 30
SHOWN_ROWS = 25
BODY, SMALL, TABLE = 9.5, 8.0, 7.0
LINE = 1.35  # line height over font size
CELL_CHARACTERS = 160
SECOND_ROW = 70.0  # a table's head and one row or two
CAPTION = 60.0  # points that one may take
LONGEST_WORD = 90.0  # points; longer ones are broken


def document(
    datas: Sequence[Data],
    pictures: Sequence[Mapping[str, bytes]],
    paths: Sequence[str],
    comparisons: Sequence[several.Against | None],
    version: str,
) -> bytes:
    """The PDF; `pictures` are the plots of each run as PNG by name, `paths` the runs' directories as shell words."""
    sink = io.BytesIO()
    about = {"Title": "nanalyze report", "Creator": f"nanalyze {version}", "Producer": None, "CreationDate": None}
    settings: Any = {"text.parse_math": False, "font.family": ["DejaVu Sans"], "pdf.fonttype": 42, "pdf.compression": 6}
    with style.context("default"), matplotlib.rc_context(settings), PdfPages(sink, metadata=about) as target:
        paper = _Paper(target, f"nanalyze {version}")
        if len(datas) > 1:
            paper.heading(f"{len(datas)} runs", 15)
            paper.table("Side by side", several.run_grid(datas, comparisons))
            paper.table("Kernels across the runs", several.kernel_grid(datas))
        for place, (data, drawn, path) in enumerate(zip(datas, pictures, paths, strict=True)):
            if place or len(datas) > 1:
                paper.new_page()
            _run(paper, data, drawn, path)
        paper.finish()
    return sink.getvalue()


def _run(paper: _Paper, data: Data, drawn: Mapping[str, bytes], path: str) -> None:
    paper.heading(title(data), 15)
    paper.text(subtitle(data, data.rows("processes")), SMALL, muted=True)
    for line in headline_of(data):
        paper.text(line, BODY + 0.5)
    for line in caveats(data):
        paper.text(line, SMALL, muted=True)
    if data.losses:
        paper.text(losses_title(len(data.losses)), BODY)
        for line in losses(data.losses):
            paper.text(f"- {line}", SMALL)
    shown = {plot.name: plot for plot in plots.plots(data) if not plot.is_empty}
    for name, plot, grid in (
        *((measurements.title(found), "", measurements.grid(found)) for found in data.measurements),
        ("Where the kernel time goes", "verdicts", Grid()),
        ("What would gain most", "", opportunities.grid(data.rows("opportunities"), path)),
        ("Time lost, by cause", "time_by_cause", lost.cause_grid(data.rows("time_by_cause"), labels(data))),
        ("The kernels that take the most time", "", _kernel_grid(data)),
        ("Roofline", "roofline", rooflines.roof_grid(data.rows("roofline"), ranks(data))),
        ("Roofline by level of the memory", "roofline_levels", Grid()),
        ("Measured ceilings", "", rooflines.ceiling_grid(data.rows("ceilings"))),
        ("Utilisation over the run", "utilisation", activity.use_grid(data.use)),
        ("Ranks", "", rank_table.rank_grid(data.rows("ranks"))),
        ("Devices", "", device_grid(data.devices)),
    ):
        if plot in shown:
            paper.heading(name, above=_picture_height(drawn[plot]) + CAPTION)
            paper.picture(drawn[plot], shown[plot].caption)
        paper.table("" if plot in shown else name, grid)


def _kernel_grid(data: Data) -> Grid:
    heads = (Head("#"), Head("Kernel", style=""), Head("Bound by", style=""), Head("Share"), Head("Time"),
             Head("Launches"), Head("Compute", "%"), Head("Memory", "%"))  # fmt: skip
    body = [
        (
            Cell(str(rank)),
            Cell(shorten(row["kernel"], 90), "text", below=visible(data.shapes.get(row["kernel_class_id"], ""))),
            Cell(kernels.bound_name(row["bound"], row["level_or_pipe"]), ""),
            Cell(values.share(row["share"])),
            Cell(values.duration(row["total_ns"])),
            Cell(values.count(row["launches"])),
            Cell(values.percent(row["compute_pct"])),
            Cell(values.percent(row["memory_pct"])),
        )
        for rank, row in enumerate(data.kernels[:SHOWN_KERNELS], 1)
    ]
    rest = kernels.rest(data.tables["verdicts"], len(body))
    return Grid(heads, body, () if body else ("No kernel launch was recorded.",), kernels.rest_text(rest))


@dataclass(frozen=True)
class _Column:
    """One column of a table on paper: its left edge and width in points."""

    left: float
    width: float
    is_number: bool


class _Paper:
    """Pages that fill from the top; everything is placed in points from the upper left corner."""

    def __init__(self, target: PdfPages, footer: str) -> None:
        self._target = target
        self._footer = footer
        self._pages = 0
        self._figure: Figure | None = None
        self._y = 0.0
        self.new_page()

    def new_page(self) -> None:
        """Finish this page and begin the next; nothing on a page that is still empty."""
        if self._figure is not None and self._y <= MARGIN:
            return
        self.finish()
        self._figure = Figure(figsize=(WIDTH / POINTS, HEIGHT / POINTS))
        self._pages += 1
        self._y = MARGIN
        self._put(WIDTH - MARGIN, HEIGHT - 26, f"{self._footer}   {self._pages}", SMALL - 1, muted=True, right=True)

    def finish(self) -> None:
        if self._figure is not None:
            self._target.savefig(self._figure)  # type: ignore[no-untyped-call]
            self._figure = None

    def heading(self, text: str, size: float = 11.5, above: float = 0.0) -> None:
        """A heading; on the next page where what is `above` something of that height would not fit with it."""
        self._need(4 * size + above)
        self._y += 0.4 * size if self._y > MARGIN else 0.0
        for line in _wrapped(ascii_or_plain(text), size, INNER, bold=True):
            self._put(MARGIN, self._y, line, size, bold=True)
            self._y += LINE * size
        self._y += 0.3 * size

    def text(self, text: str, size: float = BODY, *, muted: bool = False) -> None:
        for line in _wrapped(ascii_or_plain(text), size, INNER):
            self._need(LINE * size)
            self._put(MARGIN, self._y, line, size, muted=muted)
            self._y += LINE * size
        self._y += 0.35 * size

    def picture(self, data: bytes, caption: str) -> None:
        """A PNG across the page's width, or as high as a page allows."""
        pixels = images.imread(io.BytesIO(data))
        height, width = pixels.shape[:2]
        high = _picture_height(data)
        wide = high * width / height
        lines = _wrapped(caption, SMALL, INNER)
        self._need(high + LINE * SMALL * len(lines) + 14)
        assert self._figure is not None
        axes = self._figure.add_axes((MARGIN / WIDTH, 1 - (self._y + high) / HEIGHT, wide / WIDTH, high / HEIGHT))
        axes.set_axis_off()
        axes.imshow(pixels, aspect="auto", interpolation="none")
        self._y += high + 8
        self.text(caption, SMALL, muted=True)

    def table(self, name: str, grid: Grid) -> None:
        """A heading and the table below it; its notes alone where it has no rows, nothing where it has neither."""
        if not grid.rows and not grid.notes:
            return
        if name:
            self.heading(name, above=SECOND_ROW)
        for note in grid.notes:
            self.text(note, SMALL, muted=True)
        if not grid.rows:
            return
        shown = grid.rows[:SHOWN_ROWS] if len(grid.rows) > SHOWN_ROWS + 5 else grid.rows
        columns = _columns(grid, shown)
        self._need(SECOND_ROW)
        self._head(grid.heads, columns)
        for row in shown:
            self._row(row, grid.heads, columns)
        left = len(grid.rows) - len(shown)
        foot = " ".join(filter(None, (f"{left:,} further rows are in the page." if left else "", grid.foot)))
        self._y += 2
        if foot:
            self.text(foot, TABLE, muted=True)
        self._y += 6

    def _head(self, heads: Sequence[Head], columns: Sequence[_Column]) -> None:
        cells = [[(line, False) for line in _wrapped(h.text, TABLE, c.width, bold=True)] for h, c in
                 zip(heads, columns, strict=True)]  # fmt: skip
        for lines, head, column in zip(cells, heads, columns, strict=True):
            lines += [(line, True) for line in _wrapped(head.unit, TABLE - 1, column.width)] if head.unit else []
        self._lines(cells, columns, bold=True)

    def _row(self, row: Sequence[Cell], heads: Sequence[Head], columns: Sequence[_Column]) -> None:
        cells = []
        for cell, column in zip(row, columns, strict=True):
            lines = [(line, False) for line in _wrapped(_plain(cell.text), TABLE, column.width)]
            if cell.below:
                lines += [(line, True) for line in _wrapped(_plain(cell.below), TABLE - 1, column.width)]
            cells.append(lines)
        if self._y + _height(cells) > HEIGHT - MARGIN:
            self.new_page()
            self._head(heads, columns)
        self._lines(cells, columns, bold=False)

    def _lines(self, cells: Sequence[Sequence[tuple[str, bool]]], columns: Sequence[_Column], *, bold: bool) -> None:
        self._need(_height(cells))
        for lines, column in zip(cells, columns, strict=True):
            y = self._y + 2
            for text, small in lines:
                at = column.left + (column.width if column.is_number else 0)
                size = TABLE - 1 if small else TABLE
                self._put(at, y, text, size, muted=small, bold=bold and not small, right=column.is_number)
                y += LINE * size
        self._y += _height(cells)
        self._rule(self._y, 0.9 if bold else 0.4)

    def _need(self, height: float) -> None:
        if self._y + height > HEIGHT - MARGIN:
            self.new_page()

    def _put(
        self,
        x: float,
        y: float,
        text: str,
        size: float,
        *,
        muted: bool = False,
        bold: bool = False,
        right: bool = False,
    ) -> None:
        assert self._figure is not None
        self._figure.text(
            x / WIDTH, 1 - y / HEIGHT, text, fontsize=size, va="top", ha="right" if right else "left",
            color=palette.LIGHT.muted if muted else palette.LIGHT.ink, fontweight="bold" if bold else "normal",
        )  # fmt: skip

    def _rule(self, y: float, width: float) -> None:
        assert self._figure is not None
        ends = ([MARGIN / WIDTH, 1 - MARGIN / WIDTH], [1 - y / HEIGHT] * 2)
        self._figure.add_artist(Line2D(*ends, color=palette.LIGHT.line, linewidth=width))


def _picture_height(data: bytes) -> float:
    """Of a PNG on paper, in points: across the page, or as high as a page allows."""
    height, width = images.imread(io.BytesIO(data)).shape[:2]
    return float(min(INNER * height / width, HEIGHT - 2 * MARGIN - 90))


def _height(cells: Sequence[Sequence[tuple[str, bool]]]) -> float:
    sizes = [sum(LINE * (TABLE - 1 if small else TABLE) for _, small in lines) for lines in cells]
    return max(sizes, default=0.0) + 4


def ascii_or_plain(text: str) -> str:
    """`text` as the font can show it: one line, thin spaces as spaces, other scripts as escapes."""
    return _plain(visible(text))


def _plain(text: str) -> str:
    shown = cut(text.replace(values.THIN, "\u00a0"), 2_000)
    return "".join(c if c in _KNOWN or c.isascii() else ascii_only(c) for c in shown)


# Beyond ASCII, what the report itself writes; matplotlib's font has all of it.
_KNOWN = frozenset("\u00a0–†×µ·…±−°≥≤")


def _columns(grid: Grid, rows: Sequence[Sequence[Cell]]) -> list[_Column]:
    """Widths by what the cells hold: numbers as wide as they are, text shares what is left."""
    wanted, least = [], []
    for place, head in enumerate(grid.heads):
        # Headings may wrap, but not within a word.
        sizes = [_width(word, TABLE, bold=True) for word in head.text.split()]
        sizes += [_width(word, TABLE - 1) for word in head.unit.split()]
        for row in rows:
            sizes.append(_width(_plain(cut(row[place].text, CELL_CHARACTERS)), TABLE))
            sizes.append(_width(_plain(cut(row[place].below, CELL_CHARACTERS)), TABLE - 1))
        wanted.append(max(sizes, default=0.0) + 2)
        least.append(wanted[-1] if head.style == "n" else min(wanted[-1], _longest_word(head, rows, place)))
    gap = 8.0
    room = INNER - gap * (len(wanted) - 1)
    widths = _shared(wanted, least, room)
    columns, left = [], MARGIN
    for width, head in zip(widths, grid.heads, strict=True):
        columns.append(_Column(left, width, head.style == "n"))
        left += width + gap
    return columns


def _longest_word(head: Head, rows: Sequence[Sequence[Cell]], place: int) -> float:
    """What a column of text needs so that words stay whole, names of kernels aside."""
    words = [*head.text.split(), *(word for row in rows for word in _plain(row[place].text).split())]
    return min(max((_width(word, TABLE, bold=True) for word in words), default=0.0) + 2, LONGEST_WORD)


def _shared(wanted: Sequence[float], least: Sequence[float], room: float) -> list[float]:
    """Each its wanted width if there is room; else the least, and what is left in proportion to what is missing."""
    if sum(wanted) <= room:
        return list(wanted)
    if sum(least) >= room:
        return [width * room / sum(least) for width in least]
    missing = sum(wanted) - sum(least)
    return [low + (room - sum(least)) * (high - low) / missing for low, high in zip(least, wanted, strict=True)]


_WIDTHS: dict[tuple[str, bool], float] = {}


def _width(text: str, size: float, *, bold: bool = False) -> float:
    """Width of `text` in points; characters are measured once."""
    return size / 100 * sum(_character(c, bold) for c in text)


def _character(character: str, bold: bool) -> float:
    """Advance of a character at 100 points, from two side by side, as a blank has no outline of its own."""
    key = (character, bold)
    if key not in _WIDTHS:
        font = FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal")
        one, two = (TextPath((0, 0), f"|{character * n}|", size=100, prop=font).get_extents().width for n in (1, 2))
        _WIDTHS[key] = two - one
    return _WIDTHS[key]


def _wrapped(text: str, size: float, width: float, *, bold: bool = False) -> list[str]:
    """`text` in lines that fit `width` points; long words are broken."""
    if not text:
        return []
    lines, line = [], ""
    for word in _words(text, size, width, bold):
        candidate = f"{line} {word}" if line else word
        if line and _width(candidate, size, bold=bold) > width:
            lines.append(line)
            line = word
        else:
            line = candidate
    return [*lines, line] if line else lines


def _words(text: str, size: float, width: float, bold: bool) -> list[str]:
    words: list[str] = []
    for word in text.split(" "):
        if _width(word, size, bold=bold) <= width:
            words.append(word)
            continue
        part = ""
        for character in word:
            if part and _width(part + character, size, bold=bold) > width:
                words.append(part)
                part = ""
            part += character
        words.append(part)
    return words
