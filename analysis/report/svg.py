"""Makes matplotlib's SVG fit for standing inside the page.

Its colours become the page's variables, so that one drawing serves light and dark; its ids are made unique, its
style sheet and metadata are dropped, its numbers cut to what a screen can show, and its kernels get their full names
as tooltips. What comes out holds drawing elements and their plain attributes only: whatever else a later matplotlib
might write, or a hostile name might smuggle in, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from xml.etree import ElementTree

from nanalyze.analysis.report import palette

ELEMENTS = frozenset(
    ("svg", "g", "path", "use", "text", "tspan", "defs", "clipPath", "rect", "pattern", "title", "circle", "line")
)
ATTRIBUTES = frozenset(
    (
        *("id", "d", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "width", "height", "viewBox", "transform"),
        *("style", "clip-path", "href", "role", "aria-label", "class", "fill", "stroke", "stroke-width", "opacity"),
        *("patternUnits", "version", "text-anchor"),
    )
)
NUMERIC = ("d", "x", "y", "transform", "width", "height", "viewBox")
_VARIABLES = {
    palette.PAGE.ground: "var(--ground)",
    palette.PAGE.ink: "var(--ink)",
    palette.PAGE.muted: "var(--muted)",
    palette.PAGE.line: "var(--line)",
}
_LONG = re.compile(r"(-?\d+\.\d\d)\d+")
_FONT = re.compile(r"font-family:[^;]*;?\s*")
_SHORT_FONT = re.compile(r"font:\s*([^;]*?)(\d+(?:\.\d+)?px)[^;]*")


def inline(data: bytes, key: str, alt: str, titles: Mapping[str, str]) -> str:
    """`data` as an element for the page: ids begin with `key`, `titles` are tooltips by matplotlib's gid.

    Raises ValueError for what is no drawing.
    """
    root = ElementTree.fromstring(data)
    for parent in list(root.iter()):
        for child in list(parent):
            if _local(child.tag) in ("metadata", "style") or not isinstance(child.tag, str):
                parent.remove(child)
    for element in root.iter():
        title = titles.get(element.get("id", ""))
        _clean(element, key)
        if title:
            node = ElementTree.Element("title")
            node.text = title
            element.insert(0, node)
    for name in ("width", "height"):
        root.attrib.pop(name, None)
    root.set("role", "img")
    root.set("aria-label", alt)
    return ElementTree.tostring(root, encoding="unicode")


def _local(tag: object) -> str:
    return tag.rpartition("}")[2] if isinstance(tag, str) else ""


def _clean(element: ElementTree.Element, key: str) -> None:
    name = _local(element.tag)
    if name not in ELEMENTS:
        raise ValueError(f"a drawing with the element {name!r} does not go into the page")
    element.tag = name
    element.tail = None if name not in ("tspan",) else element.tail
    if name not in ("text", "tspan", "title"):
        element.text = None
    attributes = {_local(attribute): value for attribute, value in element.attrib.items()}
    element.attrib.clear()
    for attribute, value in attributes.items():
        if attribute in ATTRIBUTES:
            element.set(attribute, _value(attribute, value, key))


def _value(attribute: str, value: str, key: str) -> str:
    if attribute == "id":
        return f"{key}-{value}"
    if attribute == "href":
        if not value.startswith("#"):
            raise ValueError("a drawing with a link does not go into the page")
        return f"#{key}-{value[1:]}"
    if attribute in NUMERIC:
        return _LONG.sub(r"\1", value)
    if attribute in ("style", "clip-path", "fill", "stroke"):
        return _style(value, key)
    return value


def _style(value: str, key: str) -> str:
    for colour, variable in _VARIABLES.items():
        value = value.replace(colour, variable)
    value = _SHORT_FONT.sub(r"font-size: \2", _FONT.sub("", value))
    return value.replace("url(#", f"url(#{key}-")
