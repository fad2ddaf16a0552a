"""Which queries and views stand behind each part of the page, and their text for its appendix."""

from __future__ import annotations

from dataclasses import dataclass

from nanalyze import queries

# By part of the page: names of shipped queries, or of views with "views/" before them, and of the CSV files.
PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "measurements": ((), ("measurements",)),
    "opportunities": (("opportunities",), ("opportunities",)),
    "verdicts": (("views/verdicts",), ("verdicts",)),
    "causes": (("time_by_cause",), ("time_by_cause",)),
    "kernel_losses": (("kernel_losses",), ("kernel_losses",)),
    "kernels": (("views/verdicts", "views/counters"), ("verdicts", "counters")),
    "graphs": (("views/graph_counters",), ("graph_counters",)),
    "roofline": (("roofline_points",), ("roofline",)),
    "ceilings": (("roofline_ceilings",), ("ceilings",)),
    "utilisation": (("timeline_utilisation", "report_timeline"), ()),
    "throttling": (("report_throttling", "views/throttling"), ("throttling_summary", "throttling")),
    "quality": (("views/attribution_quality",), ("attribution_quality",)),
    "against_exact": (("views/sampled_against_exact",), ("sampled_against_exact",)),
    "drift": (("report_drift",), ("drift",)),
    "steps": (("steps",), ("steps",)),
    "ranges": (("ranges_summary",), ("ranges",)),
    "copies": (("copies_summary",), ("copies",)),
    "devices": (("views/devices",), ("devices",)),
    "processes": (("views/processes",), ("processes",)),
    "ranks": (("ranks",), ("ranks",)),
    "cost": (("views/overhead",), ("overhead", "pauses")),
    "perturbation": (("views/perturbation",), ("perturbation",)),
    "recording": (("report_exact_cost", "losses"), ("losses",)),
    "events": (("views/events",), ("events",)),
    "damage": (("views/damage",), ("damage",)),
    "thresholds": (("views/settings",), ("settings",)),
}


@dataclass(frozen=True)
class Source:
    """One .sql file: its anchor in the page, its file's name, what it answers, its text."""

    anchor: str
    file: str
    summary: str
    text: str


@dataclass(frozen=True)
class Behind:
    """What stands behind one part: its queries, and the paths of its CSV files."""

    queries: tuple[Source, ...]
    files: tuple[str, ...]


def behind(part: str, folder: str = "") -> Behind:
    """The queries and CSV files behind a part; `folder` is where the run's files are, with a slash at its end."""
    names, tables = PARTS[part]
    return Behind(tuple(map(source, names)), tuple(f"{folder}tables/{name}.csv" for name in tables))


def appendix() -> list[Source]:
    """Every query and view behind the page, once, by file name."""
    names = sorted({name for part, _ in PARTS.values() for name in part})
    return [source(name) for name in names]


def source(name: str) -> Source:
    """The query called `name`, or the view `views/...`."""
    view = name.removeprefix("views/")
    found = queries.view(view) if view != name else queries.query(name)
    summary = found.summary.partition(": ")[2]
    end = min((at for mark in (". ", "? ", "; ") if (at := summary.find(mark)) >= 0), default=len(summary))
    return Source(f"sql-{name.replace('/', '-')}", f"{name}.sql", summary[: end + 1].rstrip(";"), found.sql)
