"""Colours: told apart by readers who do not see red and green as others do, and text that stands out."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from nanalyze.analysis import report
from nanalyze.analysis.report import lost_plot, palette

# Machado, Oliveira, Fernandes (2009), A Physiologically-based Model for Simulation of Color Vision Deficiency,
# table 1, severity 1.0: on linear RGB.
DEFICIENCIES = {
    "none": np.eye(3),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
}
# CIE 1976 colour differences. 2.3 is just noticeable; areas side by side are told apart well from about 10 on.
LEAST_DIFFERENCE = 10.0
LEAST_CONTRAST = 4.5  # WCAG 2.2, AA: text
LEAST_GRAPHICAL = 3.0  # WCAG 2.2, 1.4.11: what marks a shape, here the outline of every bar and point
D65 = np.array([0.95047, 1.0, 1.08883])
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)


def linear(colour: str) -> np.ndarray:
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(colour: str, deficiency: str) -> np.ndarray:
    seen = np.clip(DEFICIENCIES[deficiency] @ linear(colour), 0, 1)
    ratio = TO_XYZ @ seen / D65
    f = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def difference(one: str, other: str, deficiency: str) -> float:
    return float(np.linalg.norm(lab(one, deficiency) - lab(other, deficiency)))


def contrast(one: str, other: str) -> float:
    lightness = sorted(float(np.array([0.2126, 0.7152, 0.0722]) @ linear(colour)) for colour in (one, other))
    return (lightness[1] + 0.05) / (lightness[0] + 0.05)


def test_the_measure_is_what_it_says() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert difference("#000000", "#ffffff", "none") == pytest.approx(100.0, abs=0.01)
    # A red and a green of one lightness: far apart for most readers, near for deuteranopes.
    assert difference("#c05000", "#5a7d00", "none") > 60
    assert difference("#c05000", "#5a7d00", "deuteranopia") < 25


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_verdicts_levels_and_causes_are_told_apart(deficiency: str) -> None:
    groups = {
        "verdicts": list(palette.BOUND_COLOURS.values()),
        "levels": list(palette.LEVEL_COLOURS.values()),
        "timeline": [palette.BUSY, palette.COPYING, palette.CLOCK],
        # Causes that share a colour differ in their hatching.
        "causes": list(dict.fromkeys(colour for colour, _ in lost_plot.LOOKS.values())),
    }
    near = {
        (group, one, other): round(found, 1)
        for group, colours in groups.items()
        for one, other in itertools.combinations(colours, 2)
        if (found := difference(one, other, deficiency)) < LEAST_DIFFERENCE
    }
    assert near == {}


def test_causes_of_one_colour_differ_in_their_hatching() -> None:
    assert len(set(lost_plot.LOOKS.values())) == len(lost_plot.LOOKS)


def test_what_is_told_by_colour_is_told_by_a_mark_or_a_name_too() -> None:
    assert len(set(palette.LEVEL_MARKERS.values())) == len(palette.LEVEL_COLOURS)
    assert set(palette.BOUNDS) == set(palette.BOUND_COLOURS)


@pytest.mark.parametrize("theme", [palette.LIGHT, palette.DARK], ids=lambda theme: theme.name)
def test_text_and_outlines_stand_out(theme: palette.Theme) -> None:
    assert contrast(theme.ink, theme.ground) > 7
    assert contrast(theme.muted, theme.ground) > LEAST_CONTRAST
    assert contrast(theme.ink, theme.ground) > LEAST_GRAPHICAL


def test_the_page_has_the_themes_of_the_plots() -> None:
    """The style sheet's colours are those of the palette, for both themes, and its links can be read."""
    css = (Path(report.__file__).parent / "templates" / "report.css").read_text(encoding="utf-8")
    for theme, block in zip((palette.LIGHT, palette.DARK), re.findall(r":root \{(.*?)\}", css, re.DOTALL), strict=True):
        found = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block))
        assert (found["ground"], found["ink"], found["muted"], found["line"]) == (
            theme.ground, theme.ink, theme.muted, theme.line,
        )  # fmt: skip
        for ink, ground in itertools.product(("ink", "muted", "link"), ("ground", "panel")):
            assert contrast(found[ink], found[ground]) > LEAST_CONTRAST, (theme.name, ink, ground)
        assert contrast(found["ink"], found["warn-ground"]) > LEAST_CONTRAST


def test_stand_ins_for_the_page_s_variables_occur_nowhere_else() -> None:
    used = {*palette.BOUND_COLOURS.values(), *(colour for colour, _ in lost_plot.LOOKS.values())}
    stand_ins = {palette.PAGE.ground, palette.PAGE.ink, palette.PAGE.muted, palette.PAGE.line}
    assert len(stand_ins) == 4
    assert not used & stand_ins
