"""A comparison for programs: JSON, JUnit XML, pandas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from nanalyze.analysis.compare.effects import Effect, KernelEffect
from nanalyze.analysis.compare.gates import FAILED, UNDECIDED, UNMEASURED, Outcome
from nanalyze.analysis.compare.sample import Perturbed
from nanalyze.analysis.jsonable import finite
from nanalyze.analysis.report import values
from nanalyze.analysis.report.names import cut, visible
from nanalyze.analysis.report.perturbation import sentence

if TYPE_CHECKING:
    import pandas as pd

    from nanalyze.analysis.compare import Comparison

COMPARE_VERSION = 1
EFFECT_KEYS = (
    "a", "b", "change", "change_low", "change_high", "difference", "difference_low", "difference_high", "p_value",
)  # fmt: skip
TEXT_CHARACTERS = 500
SHOWN_PERTURBED = 8


def to_dict(comparison: Comparison) -> dict[str, Any]:
    """See docs/compare.md. Identifiers are strings, NULL is None, there is no NaN."""
    speedup = comparison.speedup
    content = {
        "compare_version": COMPARE_VERSION,
        "a": _side(comparison, 0),
        "b": _side(comparison, 1),
        "speedup": None if speedup is None else dict(zip(("value", "low", "high"), speedup, strict=True)),
        "totals": {name: {"unit": one.unit, **_effect(one)} for name, one in comparison.totals.items()},
        "parts": [{"name": p.name, "ns": p.ns, "low_ns": p.low, "high_ns": p.high} for p in comparison.parts],
        "kernels": [_kernel(kernel) for kernel in comparison.kernels],
        "checks": [vars(check) for check in comparison.checks],
        "gates": [outcome.to_dict() for outcome in comparison.outcomes],
        "perturbation": [{**vars(p), "kernel_class_id": str(p.kernel_class_id)} for p in comparison.perturbed],
    }
    return finite(content)  # type: ignore[no-any-return]


def to_json(comparison: Comparison) -> str:
    """The dict as JSON text."""
    return json.dumps(to_dict(comparison), indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def _side(comparison: Comparison, side: int) -> dict[str, Any]:
    return {
        "name": (comparison.name_a, comparison.name_b)[side],
        "range": (comparison.range_a, comparison.range_b)[side],
        "runs": comparison.runs[side],
        "repetitions": comparison.repetitions[side],
        "verdict_shares": dict(comparison.verdicts[side]),
    }


def _effect(one: Effect) -> dict[str, Any]:
    return {key: getattr(one, key) for key in EFFECT_KEYS}


def _kernel(kernel: KernelEffect) -> dict[str, Any]:
    known = (kernel.a, kernel.b)
    return {
        "kernel": kernel.name,
        "match": kernel.pair.how,
        "kernel_class_id_a": None if kernel.pair.a is None else str(kernel.pair.a),
        "kernel_class_id_b": None if kernel.pair.b is None else str(kernel.pair.b),
        "kernel_a": kernel.a.name if kernel.a else None,
        "launches_a": kernel.launches_a if kernel.a else None,
        "launches_b": kernel.launches_b if kernel.b else None,
        "kernel_ns": _effect(kernel.time),
        "mean_ns": _effect(kernel.mean),
        "q_value": kernel.q_value,
        "has_changed": kernel.has_changed,
        **{f"{key}_{side}": getattr(one, key) if one else None
           for key in ("bound", "level_or_pipe", "dram_bytes", "l2_bytes", "flops")
           for side, one in zip("ab", known, strict=True)},
    }  # fmt: skip


def to_pandas(comparison: Comparison) -> pd.DataFrame:
    """One row a kernel; nested effects become columns such as `mean_ns_change_low`."""
    import pandas as pd

    return pd.DataFrame([_flat(_kernel(kernel)) for kernel in comparison.kernels])


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        flat.update(
            {f"{key}_{name}": item for name, item in value.items()} if isinstance(value, dict) else {key: value}
        )
    return flat


# --- JUnit -------------------------------------------------------------------------------------


def to_junit(comparison: Comparison) -> str:
    """A failed gate is a failure, an undecided one is skipped; an unmeasured one and a blocking check are errors."""
    cases = [_case(outcome) for outcome in comparison.outcomes]
    checks = ElementTree.Element("testcase", classname="nanalyze.compare", name="comparable")
    unmeasured = sum(outcome.status == UNMEASURED for outcome in comparison.outcomes)
    blocking = [check for check in comparison.checks if check.level == "blocking"]
    if blocking:
        texts = [f"{c.message} (A: {c.a}, B: {c.b})" for c in blocking]
        ElementTree.SubElement(checks, "error", message=_text("; ".join(texts)))
    notes = "\n".join(_text(f"{c.level}: {c.message} (A: {c.a}, B: {c.b})") for c in comparison.checks)
    if notes:
        ElementTree.SubElement(checks, "system-out").text = notes
    suite = ElementTree.Element(
        "testsuite",
        name="nanalyze compare",
        tests=str(len(cases) + 1),
        failures=str(_count(comparison.outcomes, FAILED)),
        errors=str(int(bool(blocking)) + unmeasured),
        skipped=str(_count(comparison.outcomes, UNDECIDED)),
    )
    suite.extend([checks, *cases])
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _case(outcome: Outcome) -> ElementTree.Element:
    name = outcome.gate.text if outcome.subject == outcome.gate.metric else f"{outcome.gate.text} [{outcome.subject}]"
    case = ElementTree.Element("testcase", classname="nanalyze.compare", name=_text(name))
    message = _text(f"{shown(outcome)}: {outcome.reason}")
    if outcome.status == FAILED:
        ElementTree.SubElement(case, "failure", message=message)
    elif outcome.status == UNMEASURED:
        ElementTree.SubElement(case, "error", message=message)
    elif outcome.status == UNDECIDED:
        ElementTree.SubElement(case, "skipped", message=message)
    else:
        ElementTree.SubElement(case, "system-out").text = message
    return case


def shown(outcome: Outcome) -> str:
    """`+2.9 % (+2.1 to +3.7)`, or the figure in the metric's unit."""
    if outcome.value is None:
        return "not known"
    numbers = (
        [outcome.value] if outcome.low is None or outcome.high is None else [outcome.value, outcome.low, outcome.high]
    )
    if outcome.gate.kind == "relative":
        texts, unit = [f"{100 * number:+.2f}" for number in numbers], " %"
    else:
        sign = "+" if outcome.gate.kind == "difference" else ""
        unit = {"_ns": " ns", "tes": " bytes"}.get(outcome.gate.metric[-3:], "")
        texts = [f"{number:{sign},.6g}" for number in numbers]
    return f"{texts[0]}{unit}" + (f" ({texts[1]} to {texts[2]})" if len(texts) == 3 else "")


def _text(text: str) -> str:
    """One line without anything that XML 1.0 does not allow; ElementTree escapes the rest."""
    return cut(visible(text[: 20 * TEXT_CHARACTERS]), TEXT_CHARACTERS)


def _count(outcomes: Sequence[Outcome], status: str) -> int:
    return sum(outcome.status == status for outcome in outcomes)


def perturbation_rows(perturbed: Sequence[Perturbed]) -> list[tuple[str, str, str, str]]:
    """Kernel, time without and with the profiler, difference: of the kernels where it exceeds the interval."""
    return [
        (
            p.kernel,
            values.duration(p.mean_ns),
            values.duration(p.replayed_ns),
            values.DASH if p.difference_share is None else f"{100 * p.difference_share:+.1f}{values.THIN}%",
        )
        for p in perturbed
        if p.differs
    ][:SHOWN_PERTURBED]


def perturbation_sentence(perturbed: Sequence[Perturbed]) -> str:
    """What counting did to the times; '' where nothing was counted."""
    return sentence([vars(p) for p in perturbed]) + " Times above are without it." if perturbed else ""
