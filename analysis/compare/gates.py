"""Conditions under which a comparison fails: `total_ns>+3%`, `kernel:gemm.mean_ns>120us`.

    gate      = metric ( ">" | "<" ) threshold
    metric    = total | ( "kernel:" | "each:" ) regular-expression "." field
    total     = step_ns | total_ns | gap_ns | host_ns | launches | gaps | dram_bytes | l2_bytes
    field     = mean_ns | total_ns | launches | dram_bytes | l2_bytes
    threshold = [ "+" | "-" ] number [ unit ]       with a sign or %: a change from A to B; else B's value
    unit      = % | ns | us | ms | s | B | kB | MB | GB

A gate fails only where the whole interval lies beyond the threshold, passes where the whole interval
lies on its near side, and is undecided in between. Where a figure or its interval is missing on either
side, or no kernel matches, it is unmeasured: such a gate would otherwise pass for ever. All gates of one
comparison share the 5 %: each has the interval that Bonferroni's correction asks for, and `each:` counts
once for every kernel it matches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanalyze.analysis import statistics
from nanalyze.analysis.compare.effects import Effect, KernelEffect, Side, effect, finite
from nanalyze.analysis.compare.sample import CompareError
from nanalyze.analysis.statistics import Means

TOTAL_METRICS = ("step_ns", "total_ns", "gap_ns", "host_ns", "launches", "gaps", "dram_bytes", "l2_bytes")
FIELDS = ("mean_ns", "total_ns", "launches", "dram_bytes", "l2_bytes")
TIME_UNITS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}
BYTE_UNITS = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
ERROR_RATE = 0.05
# Kernel names run to 10 kB; a pattern is searched in so much of them.
SEARCHED = 4_000

PASSED, FAILED, UNDECIDED, UNMEASURED = "passed", "failed", "undecided", "unmeasured"

_GATE = re.compile(r"^\s*(?P<metric>.+?)\s*(?P<operator>[<>])\s*(?P<threshold>[^<>]+?)\s*$", re.DOTALL)
_THRESHOLD = re.compile(
    r"^(?P<sign>[+-]?)\s*(?P<number>\d+(?:\.\d*)?|\.\d+)(?:[eE](?P<power>[+-]?\d{1,2})(?!\d))?\s*(?P<unit>\S*)$"
)


@dataclass(frozen=True)
class Gate:
    """One condition. `kind` is relative (threshold is a share), difference or value (in the metric's unit).

    `pattern` and `per_kernel` are set for `kernel:` and `each:`.
    """

    text: str
    metric: str
    operator: str
    threshold: float
    kind: str
    pattern: re.Pattern[str] | None = None
    per_kernel: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a gate came out, for all it covers or, with `each:`, for one kernel.

    `value`, `low` and `high` are in the gate's terms: a share, a difference or B's value.
    """

    gate: Gate
    status: str
    subject: str
    value: float | None
    low: float | None
    high: float | None
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """As it stands in JSON, of comparisons and of trends."""
        return {
            "gate": self.gate.text,
            "subject": self.subject,
            "status": self.status,
            "kind": self.gate.kind,
            "threshold": self.gate.threshold,
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "reason": self.reason,
        }


def parse(text: str) -> Gate:
    """The gate that `text` says. Raises CompareError, with what would be right."""
    found = _GATE.match(text)
    if found is None:
        raise CompareError(f"{text}: is no gate. Write a metric, > or <, and a threshold, as in total_ns>+3%.")
    metric, pattern, per_kernel = _metric(text, found["metric"])
    threshold, kind = _threshold(text, metric, found["threshold"])
    return Gate(text.strip(), metric, found["operator"], threshold, kind, pattern, per_kernel)


def _metric(text: str, metric: str) -> tuple[str, re.Pattern[str] | None, bool]:
    prefix, colon, rest = metric.partition(":")
    if colon and prefix in ("kernel", "each"):
        expression, _, name = rest.rpartition(".")
        if not expression or name not in FIELDS:
            raise CompareError(
                f"{text}: ends in no field of a kernel. Write {prefix}:REGEX.FIELD, of {', '.join(FIELDS)}."
            )
        try:
            return name, re.compile(expression), prefix == "each"
        except re.error as error:
            raise CompareError(
                f"{text}: {expression} is no regular expression: {error}. Escape what is meant as it is."
            ) from None
    if metric not in TOTAL_METRICS:
        raise CompareError(f"{text}: no metric {metric}. There are {', '.join(TOTAL_METRICS)} and kernel:REGEX.FIELD.")
    return metric, None, False


def _threshold(text: str, metric: str, threshold: str) -> tuple[float, str]:
    found = _THRESHOLD.match(threshold)
    if found is None:
        raise CompareError(f"{text}: {threshold} is no threshold. Write +3%, +10us or 120us.")
    number = float(found["number"]) * 10.0 ** int(found["power"] or 0) * (-1 if found["sign"] == "-" else 1)
    unit = found["unit"]
    if unit == "%":
        return number / 100, "relative"
    scale = _scale(metric).get(unit)
    if scale is None:
        known = [u for u in _scale(metric) if u]
        raise CompareError(
            f"{text}: {metric} has no unit {unit or 'left out'}. Write % or {', '.join(known) or 'a bare number'}."
        )
    return number * scale, "difference" if found["sign"] else "value"


def _scale(metric: str) -> Mapping[str, float]:
    if metric.endswith("_ns"):
        return TIME_UNITS
    return BYTE_UNITS if metric.endswith("_bytes") else {"": 1.0}


# --- judging -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Test:
    gate: Gate
    subject: str
    effect: Effect | None


def judge(
    gates: Sequence[Gate], totals: Mapping[str, Effect], kernels: Sequence[KernelEffect], a: Side, b: Side
) -> list[Outcome]:
    """The outcome of each gate; `each:` gives one a kernel that both sides have."""
    tests = [test for gate in gates for test in _tests(gate, totals, kernels, a, b)]
    confidence = 1 - ERROR_RATE / max(len(tests), 1)
    return [_outcome(test, confidence) for test in tests]


def _tests(gate: Gate, totals: Mapping[str, Effect], kernels: Sequence[KernelEffect], a: Side, b: Side) -> list[_Test]:
    if gate.pattern is None:
        return [_Test(gate, gate.metric, totals.get(gate.metric))]
    pattern = gate.pattern
    matched = [k for k in kernels if any(one and pattern.search(one.name[:SEARCHED]) for one in (k.a, k.b))]
    if not matched:
        return [_Test(gate, f"no kernel matches {pattern.pattern}", None)]
    if not gate.per_kernel:
        return [_Test(gate, f"{len(matched)} kernels", _together(gate.metric, matched, a, b))]
    both = [k for k in matched if k.a is not None and k.b is not None]
    if not both:
        return [_Test(gate, "no kernel that both sides have", None)]
    return [_Test(gate, k.name, _together(gate.metric, [k], a, b)) for k in both]


def _together(metric: str, kernels: Sequence[KernelEffect], a: Side, b: Side) -> Effect | None:
    if metric == "mean_ns" and len(kernels) == 1:
        return kernels[0].mean
    unit = "ns" if metric.endswith("_ns") else "bytes" if metric.endswith("_bytes") else "launches"
    ids = ([k.pair.a for k in kernels if k.pair.a is not None], [k.pair.b for k in kernels if k.pair.b is not None])
    means = [_of_classes(side, found, metric) for side, found in zip((a, b), ids, strict=True)]
    return effect(metric, unit, *means)


def _of_classes(side: Side, ids: Sequence[int], metric: str) -> Means | None:
    """A repetition's figure over several classes; for mean_ns the time of all over the launches of all."""
    values, square = [], 0.0
    for sample in side.samples:
        rows = [row for row, class_id in enumerate(sample.class_ids) if class_id in set(ids)]
        time, launches = sample.kernel_ns[rows].sum(axis=0), sample.launches[rows].sum(axis=0)
        if metric == "total_ns":
            values.append(time)
        elif metric == "launches":
            values.append(launches)
        elif metric == "mean_ns":
            if not (launches > 0).all():
                return None
            values.append(time / launches)
        else:
            each = [getattr(side.classes[sample.class_ids[row]], metric) for row in rows]
            errors = [getattr(side.classes[sample.class_ids[row]], f"{metric}_error") for row in rows]
            if any(one is None for one in each):
                return None
            values.append(sum((n * sample.launches[row] for n, row in zip(each, rows, strict=True)), 0 * time))
            spread = [
                float("nan") if e is None else e * sample.launches[row].mean()
                for e, row in zip(errors, rows, strict=True)
            ]
            square += sum(s**2 for s in spread) / len(side.samples) ** 2
    found = side.pooled(values)
    return Means(found.value, found.variance + square, found.degrees, found.kept, found.spikes)


def _outcome(test: _Test, confidence: float) -> Outcome:
    gate = test.gate
    value, low, high = _interval(gate, test.effect, confidence)
    if value is None:
        return Outcome(gate, UNMEASURED, test.subject, None, None, None, "not measured on both sides")
    if low is None or high is None:
        reason = "no interval: too few repetitions or launches counted"
        return Outcome(gate, UNMEASURED, test.subject, value, None, None, reason)
    return by_interval(gate, test.subject, (value, low, high), "repetitions")


def by_interval(gate: Gate, subject: str, found: tuple[float, float, float], units: str) -> Outcome:
    """The outcome for `found`, a value and the ends of its interval; more `units` would narrow that."""
    value, low, high = found
    beyond = low > gate.threshold if gate.operator == ">" else high < gate.threshold
    near = high <= gate.threshold if gate.operator == ">" else low >= gate.threshold
    status = FAILED if beyond else PASSED if near else UNDECIDED
    reason = {
        FAILED: "the whole interval lies beyond the threshold",
        PASSED: "the whole interval keeps to the threshold",
        UNDECIDED: f"the interval holds the threshold: more {units} would tell",
    }[status]
    return Outcome(gate, status, subject, value, low, high, reason)


def _interval(gate: Gate, found: Effect | None, confidence: float) -> tuple[float | None, float | None, float | None]:
    """The figure in the gate's terms, with its interval at that confidence."""
    if found is None or found.means is None:
        return None, None, None
    a, b = found.means
    if gate.kind == "value":
        low, high = b.interval(confidence)
        return finite(b.value), finite(low), finite(high)
    changed = statistics.change(a, b, confidence)
    if gate.kind == "difference":
        return finite(changed.difference), finite(changed.difference_low), finite(changed.difference_high)
    if finite(a.value) == 0.0 and finite(b.value) == 0.0:  # nothing on both sides is no change
        return 0.0, 0.0, 0.0
    ratio, least, most = (finite(array - 1) for array in (changed.ratio, changed.low, changed.high))
    return ratio, least, most
