"""Conditions under which a trend fails, in the grammar of `compare.gates`: `total_ns>+3%`, `each:gemm.total_ns>+5%`.

    metric = step_ns | total_ns | "each:" regular-expression "." field
    field  = total_ns where times are a step's, mean_ns where they are a launch's

The threshold is a change in percent, from the first run to the last by what was found. A gate fails where the
whole interval lies beyond it and passes where no change was found; a series that was not tested is unmeasured.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanalyze.analysis.compare import gates
from nanalyze.analysis.compare.gates import PASSED, SEARCHED, UNMEASURED, Gate, Outcome
from nanalyze.analysis.trend import TESTED, WITH_ALL, Row, Trend
from nanalyze.analysis.trend.read import TrendError
from nanalyze.analysis.trend.series import JOB, KERNEL, LAUNCH

JOB_METRICS = {"step_ns": 0, "total_ns": 1}


def parse(text: str) -> Gate:
    """The gate that `text` says. Raises CompareError, and TrendError for what a trend cannot judge."""
    gate = gates.parse(text)
    if gate.kind != "relative":
        raise TrendError(f"{text}: a trend judges changes in percent. Write a threshold such as +3%.")
    if gate.pattern is not None and not gate.per_kernel:
        raise TrendError(f"{text}: a trend judges kernels one by one. Write each: instead of kernel:.")
    if gate.pattern is None and gate.metric not in JOB_METRICS:
        raise TrendError(f"{text}: a trend has step_ns, total_ns and each:REGEX.FIELD.")
    return gate


def judge(found: Sequence[Gate], trend: Trend) -> list[Outcome]:
    """The outcome of each gate; `each:` gives one a kernel. Raises TrendError for a field of the other unit."""
    return [outcome for gate in found for outcome in _outcomes(gate, trend)]


def _outcomes(gate: Gate, trend: Trend) -> list[Outcome]:
    if gate.pattern is None:
        own = [row for row in trend.rows if row.series.kind == JOB]
        if not own:
            return [_unmeasured(gate, gate.metric, "no range repeats in all runs, so there are no steps")]
        return [_outcome(gate, gate.metric, own[JOB_METRICS[gate.metric]])]
    field = "mean_ns" if trend.unit == LAUNCH else "total_ns"
    if gate.metric != field:
        raise TrendError(f"{gate.text}: times here are a {trend.unit}'s. Write each:REGEX.{field}.")
    kernels = [row for row in trend.rows if row.series.kind == KERNEL]
    matched = [row for row in kernels if gate.pattern.search(row.series.name[:SEARCHED])]
    if not matched:
        return [_unmeasured(gate, f"no kernel matches {gate.pattern.pattern}", "nothing to judge")]
    return [_outcome(gate, row.series.name, row) for row in matched]


def _unmeasured(gate: Gate, subject: str, reason: str) -> Outcome:
    return Outcome(gate, UNMEASURED, subject, None, None, None, reason)


def _outcome(gate: Gate, subject: str, row: Row) -> Outcome:
    if row.tested != TESTED:
        return _unmeasured(gate, subject, row.tested if row.tested == WITH_ALL else f"not tested: {row.tested}")
    if row.change is None:
        return Outcome(gate, PASSED, subject, 0.0, None, None, "no change found")
    return gates.by_interval(gate, subject, row.change, "runs")
