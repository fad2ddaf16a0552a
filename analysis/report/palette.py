"""Colours of verdicts and pipes: Okabe and Ito's palette, told apart by colour-blind readers too.

Okabe, M., Ito, K. (2008): Color Universal Design. Every coloured thing carries its name in text
as well, so nothing is said by colour alone. The grey is darker than theirs: a middle one and the purple are the same
to deuteranopes (tests/test_palette.py).
"""

from __future__ import annotations

from dataclasses import dataclass

BLUE, SKY, GREEN, YELLOW = "#0072B2", "#56B4E9", "#009E73", "#F0E442"
ORANGE, VERMILLION, PURPLE, GREY = "#E69F00", "#D55E00", "#CC79A7", "#57606A"

# In the order in which legends and the summary list them.
BOUNDS = ("memory", "compute", "latency", "balanced", "communication", "launch", "undetermined")
BOUND_COLOURS = {
    "memory": BLUE,
    "compute": VERMILLION,
    "latency": PURPLE,
    "balanced": GREEN,
    "communication": YELLOW,
    "launch": SKY,
    "undetermined": GREY,
}
BUSY, COPYING, CLOCK = BLUE, ORANGE, GREEN

# From the outermost level in.
LEVEL_COLOURS = {"DRAM": BLUE, "L2": GREEN, "L1": ORANGE}
LEVEL_MARKERS = {"DRAM": "o", "L2": "s", "L1": "^"}

# One marker a group of pipes, so that a point says which roof is its own.
PIPE_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def bound_colour(bound: str) -> str:
    return BOUND_COLOURS.get(bound, GREY)


@dataclass(frozen=True)
class Theme:
    """Colours of everything that carries no data."""

    name: str
    ground: str
    ink: str
    muted: str
    line: str


LIGHT = Theme("light", "#ffffff", "#1b1f24", "#57606a", "#d0d7de")
DARK = Theme("dark", "#161b22", "#e6edf3", "#9da7b3", "#3a424c")

# For SVG in the page: colours that occur nowhere else, which `svg` replaces by the page's own variables, so that one
# drawing serves the light and the dark theme.
PAGE = Theme("page", "#010203", "#020301", "#030102", "#030201")
