"""The thresholds and name patterns that the views use, and what each is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nanalyze.rundir.counters import COUNTERS, IMPORTED
from nanalyze.rundir.errors import QueryError


@dataclass(frozen=True)
class Setting:
    """A number that the views depend on."""

    name: str
    value: float
    unit: str
    meaning: str


SETTINGS = (
    Setting("high_pct", 80, "%", "A kernel at or above it is bound by that resource (Nsight Compute's constant)."),
    Setting("low_pct", 60, "%", "Below it in both compute and memory a kernel is latency-bound (Nsight Compute's)."),
    Setting("lead_pct", 10, "%", "Between the two, the lead that decides; closer is balanced (Nsight Compute's)."),
    Setting("min_waves", 1, "", "A grid with fewer waves is too small for the device (Nsight Compute's)."),
    Setting("launch_ns", 5000, "ns", "A shorter kernel costs about as much to launch as to run."),
    Setting(
        "host_call_ns", 50_000, "ns", "Within it of its last call, a host that launches is taken to be at its fastest."
    ),
    Setting("low_occupancy_pct", 50, "%", "A latency-bound kernel below it is said to have few warps."),
    Setting(
        "low_issue_pct", 60, "%", "Below it the schedulers are said to wait (Nsight Compute's IssueSlotUtilization)."
    ),
    Setting("over_peak_pct", 101, "%", "A percentage of a peak above it is flagged as impossible."),
    Setting("low_clock_pct", 90, "%", "A reading of the SM clock below it, of the device's highest, is a low clock."),
)


# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom; beyond, 30's is used,
# which is wider than the true one by at most 4 %.
STUDENT_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def settings_rows(overrides: Mapping[str, float]) -> list[tuple[str, float, str, str, str]]:
    """(name, value, its text, unit, meaning), the caller's values in place; QueryError for an unknown name."""
    known = [setting.name for setting in SETTINGS]
    for name in overrides:
        if name not in known:
            raise QueryError(f"{name}: no such setting. Settings are {', '.join(known)}.")
    values = [float(overrides.get(setting.name, setting.value)) for setting in SETTINGS]
    return [(s.name, value, f"{value:g}", s.unit, s.meaning) for s, value in zip(SETTINGS, values, strict=True)]


def counter_metrics_rows() -> list[tuple[str, str, int, str]]:
    """(raw metric, counter, preference, unit); a counter's own name comes last, for importers."""
    rows: dict[str, tuple[str, str, int, str]] = {}
    for counter in (*COUNTERS, *IMPORTED):
        for preference, metric in enumerate((*counter.raw, counter.name), 1):
            rows.setdefault(metric, (metric, counter.name, preference, counter.unit))
    return list(rows.values())
