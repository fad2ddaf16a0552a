"""The report as Markdown for a pull request: what a reviewer asks first, the rest folded away.

Names are whatever somebody wrote: each stands in a code span that nothing in it can leave (as in
`nanalyze.analysis.compare.markdown`), and prose that holds such text is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from nanalyze.analysis.compare.markdown import code
from nanalyze.analysis.report import activity, kernels, lost, measurements, opportunities, rooflines, several, values
from nanalyze.analysis.report import ranks as rank_table
from nanalyze.analysis.report.cells import Cell, Grid
from nanalyze.analysis.report.collect import Data, labels, ranks
from nanalyze.analysis.report.content import caveats, headline_of, losses_title
from nanalyze.analysis.report.names import visible

# GitHub refuses comments of more than 65,536 characters.
MOST_CHARACTERS = 60_000
SHOWN_KERNELS = 10
SHOWN_LOSSES = 5
SHOWN_DEVICES = 20
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|~!&])")
# Hosts make links and mentions of these after Markdown is done with escapes: a word joiner keeps them apart.
_LINKING = re.compile(r"(:)(?=//)|(@|#)")


def document(datas: Sequence[Data], paths: Sequence[str], comparisons: Sequence[several.Against | None]) -> str:
    """The report on one run or several; `paths` are their directories as shell words."""
    if len(datas) == 1:
        lines = _run(datas[0], paths[0], "### nanalyze report")
    else:
        lines = ["### nanalyze report", "", *_grid(several.run_grid(datas, comparisons)), "",
                 *_folded("Kernels across the runs", _grid(several.kernel_grid(datas), kernel_column=0))]  # fmt: skip
        for data, path in zip(datas, paths, strict=True):
            lines += _run(data, path, f"#### {code(data.run['name'], 80)}")
    return _cut(lines)


def _run(data: Data, path: str, title: str) -> list[str]:
    about = data.rows("time_by_cause")
    sections = (
        ("What would gain most", _grid(opportunities.grid(data.rows("opportunities"), path))),
        ("Time lost, by cause", _grid(lost.cause_grid(about, labels(data)))),
        ("Roofline", _grid(rooflines.roof_grid(data.rows("roofline"), ranks(data)), kernel_column=1)),
        ("Ranges", _grid(activity.range_grid(data.rows("ranges")[: activity.SHOWN_RANGES], len(data.rows("ranges"))))),
        ("Utilisation", _grid(activity.use_grid(data.use, SHOWN_DEVICES))),
        ("Ranks", _grid(rank_table.rank_grid(data.rows("ranks"), SHOWN_DEVICES))),
    )
    lines = [title, "", *(f"{escape(line)}\n" for line in headline_of(data))]
    lines += _warnings(data)
    for found in data.measurements:
        measured = measurements.grid(found)
        told = "".join(f"\n{escape(note)}\n" for note in measured.notes)
        lines += [f"**{escape(measurements.title(found))}**", told, *(_grid(measured) if measured.rows else []), ""]
    lines += _grid(kernels.share_grid(data.shares))
    lines += ["", *_kernels(data), ""]
    for name, table in sections:
        lines += _folded(name, table)
    return [*lines, f"<sub>More: <code>nanalyze sql {_html(path)}</code></sub>", ""]


def _warnings(data: Data) -> list[str]:
    told = [f"- {escape(line)}" for line in caveats(data)]
    if data.losses:
        told.append(f"- ⚠️ {escape(losses_title(len(data.losses)))}")
    return [*told, ""] if told else []


def _kernels(data: Data) -> list[str]:
    if not data.kernels:
        return []
    rows = [
        f"| {rank} | {code(row['kernel'], 80)} | {values.share(row['share'])} | {values.duration(row['total_ns'])} "
        f"| {values.count(row['launches'])} | {escape(kernels.bound_name(row['bound'], row['level_or_pipe']))} "
        f"| {values.percent(row['compute_pct'])} | {values.percent(row['memory_pct'])} |"
        for rank, row in enumerate(data.kernels[:SHOWN_KERNELS], 1)
    ]
    rest = kernels.rest(data.tables["verdicts"], min(SHOWN_KERNELS, len(data.kernels)))
    more = f"\n{rest['kernel_classes']:,} further kernels: {values.share(rest['share'])} of kernel time."
    head = ["| # | kernel | share | time | launches | bound by | compute | memory |",
            "|--:|---|--:|--:|--:|---|--:|--:|"]  # fmt: skip
    return [*head, *rows, *([more] if rest["kernel_classes"] else [])]


def _grid(grid: Grid, kernel_column: int | None = None) -> list[str]:
    """A table of the page as Markdown, or the notes that say why there is none."""
    if not grid.rows:
        return [escape(note) for note in grid.notes]
    heads = [escape(f"{head.text}, {head.unit}" if head.unit else head.text) for head in grid.heads]
    aligned = ["--:" if head.style == "n" else "---" for head in grid.heads]
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join(aligned)}|"]
    for row in grid.rows:
        cells = [code(c.text, 80) if place == kernel_column else _cell(c) for place, c in enumerate(row)]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", escape(grid.foot)] if grid.foot else lines


def _cell(cell: Cell) -> str:
    below = f"<br><sub>{escape(cell.below)}</sub>" if cell.below else ""
    return f"{escape(cell.text)}{below}"


def _folded(name: str, lines: Sequence[str]) -> list[str]:
    return [f"<details><summary>{name}</summary>", "", *lines, "", "</details>", ""] if lines else []


def escape(text: str) -> str:
    """`text` on one line, with nothing in it that Markdown or HTML would act on."""
    return _LINKING.sub("\\g<0>\u2060", _SPECIAL.sub(r"\\\1", visible(text)))


def _html(text: str) -> str:
    return visible(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _cut(lines: Sequence[str]) -> str:
    """The lines as text that fits a comment; what does not fit is left out whole from the end, and said."""
    text = "\n".join(lines).rstrip() + "\n"
    if len(text) <= MOST_CHARACTERS:
        return text
    kept = text[:MOST_CHARACTERS].rpartition("\n</details>\n")
    start = kept[0] + kept[1] if kept[1] else text[:MOST_CHARACTERS].rpartition("\n")[0] + "\n"
    return f"{start}\nCut to {MOST_CHARACTERS:,} characters: the rest is in report.html.\n"
