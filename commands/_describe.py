"""What there is to ask: listings of the views, their columns and the shipped queries with their parameters."""

from __future__ import annotations

import textwrap

from nanalyze import queries
from nanalyze.rundir.errors import QueryError


def public_views() -> list[str]:
    """Names of the views that users may rely on, sorted."""
    return sorted(name for name in queries.VIEWS if not name.startswith("_"))


def tables() -> str:
    """The views, one a line, with what each holds."""
    entries = [(name, queries.view(name).summary) for name in public_views()]
    width = max(len(name) for name, _ in entries)
    return "\n".join(f"{name:<{width}}  {_sentence(name, summary)}" for name, summary in entries)


def schema(name: str = "") -> str:
    """Columns of a view, or of all public ones, with type, unit and meaning; QueryError for an unknown one."""
    return "\n\n".join(_schema(view) for view in ([name] if name else public_views()))


def shipped(name: str = "") -> str:
    """The shipped queries with their parameters, a sentence each, or all about one of them. QueryError."""
    if not name:
        return "\n".join(_summary(queries.query(each)) for each in queries.query_names())
    query = queries.find(name)
    parts = [query.summary]
    if query.parameters:
        parts += ["Parameters:", *_parameters(query)]
    return "\n".join([*parts, "Columns:", *_columns(query)])


def headers() -> str:
    """The shipped queries, each with the whole text of its header and its parameters."""
    return "\n\n".join(_text(queries.query(name)) for name in queries.query_names())


def _text(query: queries.Query) -> str:
    text = query.summary.removeprefix(f"{query.name}: ")
    lines = textwrap.wrap(text, 96, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join([query.name, *lines, *_parameters(query)])


def _summary(query: queries.Query) -> str:
    return "\n".join([f"{query.name}: {_sentence(query.name, query.summary)}", *_parameters(query)])


def _parameters(query: queries.Query) -> list[str]:
    rows = [(f"{p.name}={p.default}", p.type, p.unit or "-", p.meaning) for p in query.parameters]
    return _aligned(rows, "    ")


def _schema(name: str) -> str:
    if name not in queries.VIEWS:
        near = queries.nearest(name, public_views())
        raise QueryError(f"{name}: no such view. {_nearest(near)}`.tables` lists them.")
    view = queries.view(name)
    return "\n".join([view.summary, *_columns(view)])


def _nearest(near: list[str]) -> str:
    return f"Nearest: {', '.join(near)}. " if near else ""


def _columns(query: queries.Query) -> list[str]:
    return _aligned([(c.name, c.type, c.unit or "-", c.meaning) for c in query.columns], "  ")


def _aligned(rows: list[tuple[str, str, str, str]], indent: str) -> list[str]:
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    return [indent + "  ".join(f"{row[i]:<{widths[i]}}" for i in range(3)) + f"  {row[3]}" for row in rows]


def _sentence(name: str, summary: str) -> str:
    """The first sentence of a header, without the name it opens with."""
    text = summary.removeprefix(f"{name}: ")
    for end in (". ", "? "):
        text = text.split(end)[0] + end.strip() if end in text else text
    return text
