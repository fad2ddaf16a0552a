"""The SQL of nanalyze: views in `views/`, shipped queries beside this file, one a file.

Every file opens with a comment that says what it answers, its parameters and its output
columns with type and unit. That header is read here, shown by `nanalyze sql RUN .schema`, and
compared with what DuckDB says of the file by a test.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

# Each view may use those before it. Names with an underscore are private: they may change.
VIEWS = (
    "run",
    "damage",
    "settings",
    "communication_patterns",
    "counter_metrics",
    "processes",
    "devices",
    "kernel_classes",
    "copies",
    "ranges",
    "samples",
    "exact",
    "device_state",
    "pauses",
    "events",
    "_pause_spans",
    "overhead",
    "_device_readings",
    "throttling",
    "_range_segments",
    "_exact_durations",
    "_launches",
    "kernels",
    "perturbation",
    "attribution",
    "attribution_windows",
    "attribution_quality",
    "_counter_values",
    "_exact_counters",
    "_counters",
    "counters",
    "graph_counters",
    "_class_totals",
    "sampled_against_exact",
    "_class_counters",
    "_occupancy",
    "_evidence",
    "_launch_rule",
    "verdicts",
)


@dataclass(frozen=True)
class OutputColumn:
    """One column of a view or query, as its header declares it; `unit` is '' where it has none."""

    name: str
    type: str
    unit: str
    meaning: str


@dataclass(frozen=True)
class Parameter:
    """A `$name` of a query with the value it has unless the caller gives another."""

    name: str
    type: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Query:
    """One SQL file: its statement and what its header says."""

    name: str
    sql: str
    summary: str
    columns: tuple[OutputColumn, ...]
    parameters: tuple[Parameter, ...]


def query_names() -> tuple[str, ...]:
    """Names of the shipped queries, sorted."""
    return tuple(sorted(_stems("")))


def view_names() -> tuple[str, ...]:
    """Names of the view files found, sorted; `VIEWS` holds the same names in creation order."""
    return tuple(sorted(_stems("views")))


@cache
def view(name: str) -> Query:
    """The view called `name`."""
    return parse(name, files(__name__).joinpath("views", f"{name}.sql").read_text(encoding="utf-8"))


@cache
def query(name: str) -> Query:
    """The shipped query called `name`; KeyError if there is none."""
    if name not in query_names():
        raise KeyError(name)
    return parse(name, files(__name__).joinpath(f"{name}.sql").read_text(encoding="utf-8"))


@cache
def users_of(relations: tuple[str, ...]) -> frozenset[str]:
    """Views that read any of `relations` of schema `raw`, directly or through others."""
    found: set[str] = set()
    for name in VIEWS:
        words = _words(view(name).sql)
        if any(f"raw.{relation}" in words for relation in relations) or words & found:
            found.add(name)
    return frozenset(found)


def named_in(statement: str) -> frozenset[str]:
    """Views that an SQL statement may read: their names stand in it."""
    return frozenset(_words(statement) & set(VIEWS))


def _words(sql: str) -> set[str]:
    code = re.sub(r"--[^\n]*", "", sql)
    return set(re.findall(r"\w+", code)) | set(re.findall(r"\braw\.\w+", code))


def parse(name: str, text: str) -> Query:
    """Split an SQL file into its header and its statement.

    Header lines look like `--   start_ns  BIGINT  ns  When it started.`, fields two or more
    spaces apart, `-` for no unit; a line indented deeper goes on with the meaning above.
    """
    header, sections = _header(text)
    columns = tuple(OutputColumn(n, t, "" if u == "-" else u, m) for n, t, u, m in _entries(sections["Columns"]))
    parameters = tuple(Parameter(*entry) for entry in _entries(sections["Parameters"]))
    return Query(name, text.strip().rstrip(";"), header, columns, parameters)


def _header(text: str) -> tuple[str, dict[str, list[str]]]:
    sections: dict[str, list[str]] = {"": [], "Parameters": [], "Columns": []}
    current = ""
    for line in text.splitlines():
        if not line.startswith("--"):
            break
        content = line[2:].rstrip()
        if content.strip() in ("Parameters:", "Columns:"):
            current = content.strip()[:-1]
        else:
            sections[current].append(content)
    summary = " ".join(" ".join(sections[""]).split())
    return summary, sections


def _entries(lines: list[str]) -> list[tuple[str, str, str, str]]:
    entries: list[list[str]] = []
    for line in filter(str.strip, lines):
        if line.startswith("      "):
            entries[-1][3] += " " + line.strip()
        else:
            fields = [field.strip() for field in line.strip().split("  ") if field.strip()]
            name, kind, unit, *meaning = fields
            entries.append([name, kind, unit, " ".join(meaning)])
    return [(name, kind, unit, meaning) for name, kind, unit, meaning in entries]


def _stems(folder: str) -> list[str]:
    entries = files(__name__).joinpath(folder).iterdir() if folder else files(__name__).iterdir()
    return [entry.name[:-4] for entry in entries if entry.name.endswith(".sql")]
