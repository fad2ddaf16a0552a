"""Kernel names made fit for a page: hostile characters made visible, templates folded.

A kernel name is whatever a compiler or a user wrote: C++ templates of several kilobytes, control
characters, right-to-left overrides. What is shown is always derived here; the name itself stands
untouched in the CSV files, but for the guard against spreadsheet formulas.
"""

from __future__ import annotations

import re
import unicodedata

ELLIPSIS = "…"
NAMELESS = "[no name]"
# Longest name that is looked at: beyond it nothing would be shown anyway.
EXAMINED = 4_000
# Control, format (bidi overrides, zero-width), surrogate, private use, unassigned; line and
# paragraph separators.
INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})

_NAMESPACE = re.compile(r"\b(?!const::)(?:[A-Za-z_]\w*::)+(?=[\w{~])")
_ANONYMOUS = re.compile(r"\(anonymous namespace\)::|\{anonymous\}::|<unnamed>::")
# What follows a function's name where a lambda inside it is meant, parameters folded already:
# "(…)::{lambda(…)#2}::operator(…)(…) const".
_INSIDE_FUNCTION = re.compile(r"(?:\(…\)(?: const)?)?(?:::\{lambda\(…\)#\d+\}|::operator ?\(…\)(?:\(…\))?(?: const)?)+")
_CAST = re.compile(r"\(…\)(?=\d)")
_SPACES = re.compile(r" +")
_OPEN = {"<": ">", "(": ")", "{": "}", "[": "]"}


def visible(text: str) -> str:
    """`text` on one line, with every character that would not show itself written as an escape.

    >>> visible("a\\nb\\u202e")
    'a\\\\nb\\\\u202e'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(c) if unicodedata.category(c) in INVISIBLE else c for c in text)


def ascii_only(text: str) -> str:
    """`text` for a plot: what is not ASCII is escaped, as the plot's font has few other glyphs."""
    return visible(text).replace(ELLIPSIS, "...").replace("×", "x").encode("ascii", "backslashreplace").decode("ascii")


def shorten(name: str, limit: int) -> str:
    """`name` in at most `limit` characters: parameters dropped, template arguments folded.

    Deep template arguments go first, then shallower ones, so that what tells two kernels apart
    stays as long as there is room. A name that is no C++ declaration is cut in its middle.
    """
    text = visible(name[:EXAMINED]) if name.strip() else NAMELESS
    if len(text) <= limit and "(" not in text and "::" not in text:
        return text
    head = _without_parameters(_ANONYMOUS.sub("", text))
    folded = [_tidy(_fold(head, depth)) for depth in (3, 2, 1, 0)]
    trimmed = [_fewer_arguments(candidate, limit) for candidate in folded[1:3]]
    fitting = [candidate for candidate in (*folded[:3], *trimmed, folded[3]) if 0 < len(candidate) <= limit]
    return fitting[0] if fitting else cut(folded[3] or text, limit)


def cut(text: str, limit: int) -> str:
    """`text` with its middle left out where it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    keep = limit - 1
    return text[: keep - keep // 3] + ELLIPSIS + text[len(text) - keep // 3 :]


def distinct(labels: list[str], details: list[str]) -> list[str]:
    """`labels`, each that occurs more than once followed by its detail (a launch shape, say)."""
    return [
        f"{label} {detail}".strip() if labels.count(label) > 1 else label
        for label, detail in zip(labels, details, strict=True)
    ]


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def _without_parameters(text: str) -> str:
    """`text` up to its parameter list, without the return type `void`."""
    text = text.removeprefix("void ")
    depth = 0
    for position, character in enumerate(text):
        if character == "(" and depth == 0 and position:
            return text[:position]
        if character in "<{[(":
            depth += 1
        elif character in ">}])":
            depth = max(0, depth - 1)
    return text


def _fold(text: str, depth: int) -> str:
    """`text` with what stands inside more than `depth` template brackets, or in any parentheses, as '…'."""
    out: list[str] = []
    stack: list[str] = []
    shown_until = None  # depth of the stack at which the text shows again
    for character in text:
        if stack and character == stack[-1]:
            stack.pop()
            if shown_until is not None and len(stack) > shown_until:
                continue
            shown_until = None
            out.append(character)
            continue
        if shown_until is None:
            out.append(character)
        if character not in _OPEN:
            continue
        if shown_until is None and (character == "(" or (character == "<" and stack.count(">") >= depth)):
            shown_until = len(stack)
            out.append(ELLIPSIS)
        stack.append(_OPEN[character])
    return "".join(out)


def _fewer_arguments(text: str, limit: int) -> str:
    """`text` with trailing template arguments left out until it fits; '' where fewer than two would stay."""
    depth = 0
    best = ""
    commas = 0
    for position, character in enumerate(text[:limit]):
        if character in "<({":
            depth += 1
        elif character in ">)}":
            depth -= 1
        elif character == "," and depth == 1:
            commas += 1
            if commas >= 2 and position + 4 <= limit:
                best = f"{text[:position]}, {ELLIPSIS}>"
    return best


def _tidy(text: str) -> str:
    """`text` without the namespaces, lambdas and blanks that cost room and say little."""
    text = _CAST.sub("", _INSIDE_FUNCTION.sub("", _NAMESPACE.sub("", text)))
    return _SPACES.sub(" ", text.replace(f"({ELLIPSIS})", "()")).replace(" >", ">").strip()
