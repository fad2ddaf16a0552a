"""A bar a device, cut into what its time went to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from nanalyze.analysis.report import palette, values
from nanalyze.analysis.report.cells import Row
from nanalyze.analysis.report.figures import Look
from nanalyze.analysis.report.lost import label, shown_rows
from nanalyze.analysis.report.names import ascii_only, cut

# Colour and hatching of each cause, in the order in which the pieces of a bar follow each other.
LOOKS = {
    "compute": (palette.BLUE, ""),
    "communication": (palette.YELLOW, ""),
    "copy": (palette.ORANGE, ""),
    "before copy": (palette.ORANGE, "////"),
    "start": (palette.SKY, "////"),
    "launch": (palette.SKY, ""),
    "synchronisation": (palette.PURPLE, ""),
    "host": (palette.VERMILLION, ""),
    "dependency": (palette.GREEN, ""),
    "unknown": (palette.GREY, ""),
}

Split = tuple[str, Mapping[str, float]]


def splits(rows: Sequence[Row], labels: Mapping[str, str]) -> list[Split]:
    """Name of each device and its shares by cause, of the devices that the table of `lost.cause_grid` shows."""
    devices = list(dict.fromkeys(row["device"] for row in rows))
    found: dict[str | None, dict[str, float]] = {}
    for row in shown_rows(rows):
        if row["share"]:
            found.setdefault(row["device"], {})[row["cause"]] = float(row["share"])
    return [(label(device, labels, devices), shares) for device, shares in found.items()]


def draw(found: Sequence[Split], look: Look) -> Figure:
    """Stacked bars in percent of each device's time; the legend has the shares where there is one device."""
    columns = 2 if look.narrow else 5
    present = [cause for cause in LOOKS if any(cause in shares for _, shares in found)]
    lines = -(-len(present) // columns)
    figure = Figure(figsize=(look.width, 0.62 * max(len(found), 1) + 0.2 * lines + 0.55), layout="constrained")
    axes = figure.add_subplot()
    for position, (name, shares) in enumerate(found):
        left = 0.0
        for cause in present:
            width = 100 * shares.get(cause, 0.0)
            colour, hatch = LOOKS[cause]
            axes.barh(position, width, left=left, height=0.5, color=colour, hatch=hatch, edgecolor=look.theme.ink,
                      linewidth=0.4)  # fmt: skip
            left += width
        axes.text(0, position - 0.33, ascii_only(cut(name, 46 if look.narrow else 100)), va="bottom")
    axes.set_xlim(0, 100)
    axes.set_ylim(max(len(found), 1) - 0.6, -0.75)
    axes.set_yticks([])
    axes.set_xlabel("share of the device's time (%)")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    handles = [
        Patch(facecolor=LOOKS[cause][0], hatch=LOOKS[cause][1], edgecolor=look.theme.ink, linewidth=0.4,
              label=_label(cause, found))
        for cause in present
    ]  # fmt: skip
    if handles:
        figure.legend(handles=handles, loc="outside upper left", ncols=columns, handlelength=1.4, columnspacing=1.0)
    return figure


def _label(cause: str, found: Sequence[Split]) -> str:
    if len(found) != 1:
        return cause
    return f"{cause} {values.share(found[0][1][cause])}".replace(values.THIN, " ")
