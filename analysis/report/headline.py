"""The answer at the top of the page, in plain words, and what to bear in mind when reading it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanalyze.analysis.report import values
from nanalyze.analysis.report.cells import Row, tooltip, words
from nanalyze.analysis.report.kernels import bound_name, part_name
from nanalyze.analysis.report.names import shorten

LEADERS = 3
# Verdicts below this share are summed up in the table, not in the sentence.
NAMED_SHARE = 0.01
NAMED_VERDICTS = 5

# How a sentence speaks of kernel time with each verdict.
PHRASES = {
    "memory": "memory-bound",
    "compute": "compute-bound",
    "latency": "latency-bound",
    "balanced": "balanced between compute and memory",
    "communication": "communication",
    "launch": "in launches too short for their own overhead",
    "undetermined": "undetermined",
}


@dataclass(frozen=True)
class Leader:
    """One of the largest kernels in a sentence."""

    name: str
    title: str
    text: str


def headline(totals: Row, devices: Sequence[Row], use: Sequence[Row], shares: Sequence[Row]) -> list[str]:
    """Sentences: how long and how much, how busy, what bounds it."""
    if not totals["launches"]:
        span = _span(totals).replace(": ", ". ")
        return [f"{span}No kernel launch was recorded.", "Was the GPU used while the recorder was on?"]
    kinds = "1 kind" if totals["kernel_classes"] == 1 else f"{totals['kernel_classes']:,} kinds"
    launches = "1 kernel launch" if totals["launches"] == 1 else f"{totals['launches']:,} kernel launches"
    return [
        f"{_span(totals)}{launches} of {kinds}{_on_devices(devices)}.",
        *filter(None, (_busy(use, totals), _bound(shares))),
    ]


def leaders(kernels: Sequence[Row]) -> list[Leader]:
    return [
        Leader(
            shorten(row["kernel"], 90),
            tooltip(row["kernel"]),
            f"{values.share(row['share'])} of kernel time, {values.duration(row['total_ns'])} in "
            f"{_plural(row['launches'], 'launch', 'launches')}; "
            f"{bound_name(row['bound'], row['level_or_pipe'])}: {words(row['reason']).text}",
        )
        for row in kernels[:LEADERS]
        if row["share"]
    ]


def caveats(totals: Row, recording: Row) -> list[str]:
    """What would mislead a reader who does not know it."""
    lines = []
    if recording["exact_launches"]:
        lines.append(
            f"{_plural(recording['exact_launches'], 'launch was', 'launches were')} replayed for exact counters, "
            f"which took {values.duration(recording['exact_ns'])} of the job's time: while that ran, the length of the "
            "run and its utilisation are not the job's own."
        )
    if totals["launches"] and not recording["exact_launches"] and not totals["classes_with_counters"]:
        lines.append(
            "No counters were recorded, so what bounds most kernels is not known: record with exact counters to "
            "learn it."
        )
    if recording["damage"]:
        lines.append(
            f"{_plural(recording['damage'], 'file or folder is', 'files or folders are')} missing or damaged: what "
            "looks like idle time may be lost data, and sums may be too low."
        )
    if recording["rolled_up_launches"]:
        lines.append(
            f"{_plural(int(recording['rolled_up_launches']), 'launch', 'launches')} from "
            f"{values.instant(recording['rolled_up_first_ns'])} to {values.instant(recording['rolled_up_last_ns'])} "
            "were rolled up: they count in the sums, shares and verdicts of kernels, but no gap, step, range or "
            "timeline knows of them."
        )
    if totals["launches_untimed"]:
        lines.append(
            f"{_plural(totals['launches_untimed'], 'launch has', 'launches have')} no known duration and count in "
            "no share."
        )
    return lines


def _span(totals: Row) -> str:
    recorded, active = values.number(totals["recorded_ns"]), values.number(totals["active_ns"])
    if recorded is not None and active is not None:
        return f"The recording lasted {values.duration(recorded)}, GPU work spans {values.duration(active)} of it: "
    if active is not None:
        return f"GPU work spans {values.duration(active)}: "
    return f"The recording lasted {values.duration(recorded)}: " if recorded else ""  # an import has no length


def _on_devices(devices: Sequence[Row]) -> str:
    if not devices:
        return ""
    names = sorted({words(name).text for name in {device["name"] for device in devices}})
    return f" on {_plural(len(devices), 'GPU', 'GPUs')} ({', '.join(names[:3])})"


def _busy(use: Sequence[Row], totals: Row) -> str:
    known = [row["busy_share"] for row in use if row["busy_share"] is not None]
    if not known:
        return ""
    of_what = "of the time from the first to the last kernel"
    if len(known) == 1:
        return f"A kernel was running {values.share(known[0])} {of_what}."
    mean = sum(known) / len(known)
    return (
        f"A kernel was running {values.share(mean)} {of_what}, mean of {len(known):,} GPUs "
        f"({values.share(min(known))} to {values.share(max(known))})."
    )


def _bound(shares: Sequence[Row]) -> str:
    named = [row for row in shares if (row["share"] or 0) >= NAMED_SHARE][:NAMED_VERDICTS]
    if not named:
        return ""
    return f"Of kernel time, {_listed([_phrase(row) for row in named])}."


def _phrase(row: Row) -> str:
    part = part_name(row["bound"], row["level_or_pipe"])
    at = f" ({part})" if part else ""
    return f"{values.share(row['share'])} is {PHRASES.get(row['bound'], row['bound'])}{at}"


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def _plural(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"
