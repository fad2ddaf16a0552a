"""The SQL of nanalyze: views in `views/`, shipped queries beside this file, one a file.

Every file opens with a comment that says what it answers, its parameters and its output
columns with type and unit. That header is read here, shown by `nanalyze sql RUN .schema`, and
compared with what DuckDB says of the file by a test.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from nanalyze.rundir.errors import QueryError

# Each view may use those before it. Names with an underscore are private: they may change.
VIEWS = (
    "run",
    "damage",
    "settings",
    "communication_patterns",
    "counter_metrics",
    "processes",
    "devices",
    "ceilings",
    "kernel_classes",
    "copies",
    "ranges",
    "samples",
    "sampled_windows",
    "exact",
    "device_state",
    "pauses",
    "events",
    "kernel_minutes",
    "_kernel_histograms",
    "_rolled_up",
    "_pause_spans",
    "overhead",
    "_device_readings",
    "throttling",
    "_range_segments",
    "_range_grid",
    "_range_buckets",
    "_exact_durations",
    "_launches",
    "_communicating",
    "_class_devices",
    "_launch_cuts",
    "_launch_segments",
    "_activities",
    "_stream_time",
    "_device_kernels",
    "kernels",
    "_device_numbers",
    "_device_unknown",
    "_device_instants",
    "_device_time",
    "_kernel_pairs",
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
    "_kernel_losses",
)


@dataclass(frozen=True)
class OutputColumn:
    """One column of a view or query, as its header declares it; `unit` is '' where it has none."""

    name: str
    type: str
    unit: str
    meaning: str


# A parameter's unit is the ending of its name, as that of a column.
UNITS = {"ns": "ns", "s": "s", "bytes": "bytes", "pct": "%", "hz": "Hz", "share": "1"}

# Short names of parameters, for those who type them.
SHORT_NAMES = {"n": "rows"}


@dataclass(frozen=True)
class Parameter:
    """A `$name` of a query with the value it has unless the caller gives another."""

    name: str
    type: str
    default: str
    meaning: str

    @property
    def unit(self) -> str:
        """Unit of its value, '' where it has none."""
        return UNITS.get(self.name.rpartition("_")[2], "") if "_" in self.name else ""

    def value(self, text: str) -> object:
        """`text` as a value of the parameter's type; None for NULL. Raises ValueError."""
        if text == "NULL":
            return None
        if self.type in ("INTEGER", "BIGINT"):
            return _integer(text, 32 if self.type == "INTEGER" else 64)
        if self.type == "DOUBLE":
            return _finite(text)
        if self.type == "BOOLEAN":
            return {"true": True, "false": False}[text.lower()] if text.lower() in ("true", "false") else _refuse(text)
        return text


def _integer(text: str, bits: int) -> int:
    number = int(text)
    return number if -(2 ** (bits - 1)) <= number < 2 ** (bits - 1) else _refuse(text)


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _refuse(text: str) -> Any:
    raise ValueError(text)


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


def find(name: str) -> Query:
    """The shipped query called `name`; QueryError with the nearest names if there is none."""
    if name in query_names():
        return query(name)
    near = nearest(name, query_names())
    remedy = f"Nearest: {', '.join(near)}." if near else f"Shipped are {', '.join(query_names())}."
    raise QueryError(f"{name or 'query'}: no such query. {remedy}")


def bind(shipped: Query, given: Mapping[str, object]) -> dict[str, object]:
    """A value for each parameter of the query: the one given, else its default.

    QueryError, naming what the query takes, for a parameter that it has not.
    """
    values = {parameter.name: parameter.value(parameter.default) for parameter in shipped.parameters}
    values.update({_parameter(shipped, key).name: value for key, value in given.items()})
    return values


def bind_text(shipped: Query, given: Mapping[str, str]) -> dict[str, object]:
    """The same from text, converted to each parameter's type; NULL is no value.

    QueryError also for text that is no value of its parameter.
    """
    return bind(shipped, {key: _converted(shipped.name, _parameter(shipped, key), given[key]) for key in given})


def _parameter(shipped: Query, key: str) -> Parameter:
    known = {parameter.name: parameter for parameter in shipped.parameters}
    name = SHORT_NAMES[key] if key not in known and SHORT_NAMES.get(key) in known else key
    if name not in known:
        raise QueryError(f"{shipped.name}: no parameter {key!r}. {_takes(key, tuple(known))}")
    return known[name]


def _takes(key: str, known: Sequence[str]) -> str:
    near = nearest(key, known)
    takes = f"It takes {', '.join(known) or 'none'}."
    return f"Nearest: {', '.join(near)}. {takes}" if near and len(known) > 1 else takes


def _converted(query_name: str, parameter: Parameter, text: str) -> object:
    try:
        return parameter.value(text)
    except ValueError:
        unit = f" in {parameter.unit}" if parameter.unit else ""
        kinds = {"INTEGER": "a whole number", "BIGINT": "a whole number", "DOUBLE": "a number"}
        kind = kinds.get(parameter.type, "true or false")
        raise QueryError(f"{query_name}: {parameter.name}={text} is not {kind}{unit}. Give one.") from None


def nearest(name: str, names: Sequence[str]) -> list[str]:
    """At most three of `names` that `name` may be meant for: alike ones, then those that contain it."""
    lowered = name.lower()
    alike = difflib.get_close_matches(lowered, names, n=3, cutoff=0.65)
    inside = [candidate for candidate in names if len(lowered) > 2 and lowered in candidate]
    return list(dict.fromkeys([*alike, *inside]))[:3]


@cache
def users_of(relations: tuple[str, ...]) -> frozenset[str]:
    """Views that are any of `relations` or read them, from schema `raw` or through others."""
    wanted = {*relations, *(f"raw.{relation}" for relation in relations)}
    return frozenset(name for name in VIEWS if needed_for(frozenset([name])) & wanted)


_TOKEN = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|--[^\n]*|/\*.*?\*/|\w+""", re.DOTALL)


def words(statement: str) -> frozenset[str]:
    """The words of an SQL statement in lower case, those in texts and quoted names too, but not those in comments."""
    code = (token for token in _TOKEN.findall(statement.lower()) if not token.startswith(("--", "/*")))
    return frozenset(re.findall(r"\w+", " ".join(code)))


def named_in(statement: str) -> frozenset[str]:
    """Views that an SQL statement may read: their names stand in it, in any case."""
    return words(statement) & frozenset(VIEWS)


@cache
def reads(view_name: str) -> frozenset[str]:
    """What a view reads itself: other views, and relations of schema `raw` as raw.<name>."""
    code = re.sub(r"--[^\n]*", "", view(view_name).sql)
    read = re.findall(r"\b(?:FROM|JOIN)\s+((?:raw\.)?\w+)", code)
    return frozenset(name for name in read if name in VIEWS or name.startswith("raw."))


def needed_for(names: frozenset[str], there: frozenset[str] = frozenset()) -> frozenset[str]:
    """These relations and what they read in turn, not beyond those that are `there`."""
    found: set[str] = set()
    pending = list(names - there)
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += () if name.startswith("raw.") else reads(name) - there
    return frozenset(found)


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
