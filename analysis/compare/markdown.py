"""A comparison as Markdown for a pull request.

Kernel names, range names and paths are whatever somebody wrote. Each stands in a code span, on one line,
shortened, without back-ticks and bars, so that it can neither end the span nor the table cell, mention
anyone, link or embed anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nanalyze.analysis.compare import outputs
from nanalyze.analysis.compare.checks import BLOCKING, WARNING
from nanalyze.analysis.compare.effects import Effect
from nanalyze.analysis.compare.gates import FAILED, PASSED, UNMEASURED
from nanalyze.analysis.report import values
from nanalyze.analysis.report.names import shorten, visible

if TYPE_CHECKING:
    from nanalyze.analysis.compare import Comparison

NAME_CHARACTERS = 80
SHOWN_KERNELS = 15
MOST_CHANGE = 10.0  # an upper end beyond says no more than that nothing is known
TITLES = {
    "step_ns": "time a repetition",
    "total_ns": "time in kernels",
    "gap_ns": "gaps between kernels",
    "overlap_ns": "kernels side by side",
    "host_ns": "host time",
    "launches": "launches",
    "gaps": "number of gaps",
    "dram_bytes": "DRAM bytes",
    "l2_bytes": "L2 bytes",
    "flops": "operations",
    "flop_per_byte": "arithmetic intensity",
}


def code(text: str, limit: int = NAME_CHARACTERS) -> str:
    """`text` as a code span that nothing in it can leave."""
    plain = visible(shorten(text, limit)).replace("`", "'").replace("|", "¦").strip()
    return f"`{plain or '?'}`"


def amount(value: float | None, unit: str) -> str:
    """A figure with its unit: `1.20 ms`, `3.4 MB`, `12`."""
    if value is None:
        return values.DASH
    if unit == "ns":
        return ("-" if value < 0 else "") + values.duration(abs(value))
    if unit == "bytes":
        return values.scaled(value, "B")
    if unit == "FLOP":
        return values.scaled(value, "FLOP")
    text = f"{value:,.0f}" if value == round(value) else values.digits(value)
    return f"{text}{values.THIN}FLOP/B" if unit == "FLOP/byte" else text


def percent_change(one: Effect) -> str:
    """`-12.3 % (-13.0 to -11.5)`; a dash where it is not known."""
    if one.change is None:
        return values.DASH
    text = f"{100 * one.change:+.1f}{values.THIN}%"
    if one.change_low is None or one.change_high is None or one.change_low == one.change_high:
        return text
    high = f"{100 * one.change_high:+.1f}" if one.change_high < MOST_CHANGE else f"over +{100 * MOST_CHANGE:.0f}"
    return f"{text} ({100 * one.change_low:+.1f} to {high})"


def difference(one: Effect) -> str:
    """B - A with its sign and unit."""
    if one.difference is None:
        return values.DASH
    sign = "-" if one.difference < 0 else "+" if one.difference > 0 else ""
    return f"{sign}{amount(abs(one.difference), one.unit)}"


def figures(comparison: Comparison) -> list[tuple[str, str, str, str, str]]:
    """Title, A, B, B - A and change of each total that is known; those that are nothing on both sides are left out."""
    return [
        (TITLES[name], amount(one.a, one.unit), amount(one.b, one.unit), difference(one), percent_change(one))
        for name, one in comparison.totals.items()
        if one.a or one.b
    ]


def sides(comparison: Comparison) -> tuple[str, str]:
    """What to call the sides: their ranges where these differ, else A and B."""
    a, b = comparison.range_a, comparison.range_b
    return (a, b) if a is not None and b is not None and a != b else ("A", "B")


def headline(comparison: Comparison, quote: Callable[[str], str] = visible) -> str:
    """One sentence: how much faster or slower, and how sure that is. `quote` makes names fit for where it stands."""
    speedup = comparison.speedup
    if speedup is None:
        return "The times of both sides are not known, or one of them has too few repetitions."
    a, b = (quote(name) if name not in ("A", "B") else name for name in sides(comparison))
    what = "" if comparison.totals["step_ns"].change is not None else " in kernels"
    ratio, low, high = speedup
    if low <= 1 <= high:
        return f"No difference is shown: {a} takes {ratio:.3f} times as long{what} as {b} ({low:.3f} to {high:.3f})."
    if ratio > 1:
        return f"{b} is faster: {a} takes {ratio:.3f} times as long{what} ({low:.3f} to {high:.3f})."
    return f"{b} is slower: it takes {1 / ratio:.3f} times as long{what} as {a} ({1 / high:.3f} to {1 / low:.3f})."


def summary(comparison: Comparison) -> str:
    """The whole summary."""
    lines = ["### nanalyze compare", "", f"A: {code(comparison.name_a, 200)}{_side(comparison, 0)}<br>",
             f"B: {code(comparison.name_b, 200)}{_side(comparison, 1)}", "", headline(comparison), ""]  # fmt: skip
    lines += _gates(comparison)
    lines += _checks(comparison)
    lines += ["| a repetition | A | B | B - A | change (95 %) |", "|---|--:|--:|--:|--:|"]
    lines += [f"| {' | '.join(row)} |" for row in figures(comparison)]
    lines += ["", *_parts(comparison), *_verdicts(comparison), *_kernels(comparison)]
    lines += _perturbation(comparison)
    return "\n".join(lines).rstrip() + "\n"


def _side(comparison: Comparison, side: int) -> str:
    name = (comparison.range_a, comparison.range_b)[side]
    what = f"repetitions of {code(name)}" if name is not None else "pieces"
    return f", {comparison.repetitions[side]:,} {what}"


def _gates(comparison: Comparison) -> list[str]:
    if not comparison.outcomes:
        return []
    marks = {FAILED: "❌ failed", PASSED: "✅ passed", UNMEASURED: "⛔ unmeasured"}
    rows = [
        f"| {code(o.gate.text)} | {code(o.subject)} | {outputs.shown(o)} | {marks.get(o.status, '❔ undecided')} |"
        for o in comparison.outcomes
    ]
    return ["| gate | of | found (interval) | outcome |", "|---|---|--:|---|", *rows, ""]


def _checks(comparison: Comparison) -> list[str]:
    marks = {BLOCKING: "⛔", WARNING: "⚠️"}
    lines = [f"- {marks.get(c.level, 'ℹ️')} {c.message} (A: {code(c.a)}, B: {code(c.b)})" for c in comparison.checks]
    return [*lines, ""] if lines else []


def _parts(comparison: Comparison) -> list[str]:
    if not comparison.parts:
        return []
    rows = [f"| {part.name} | {signed(part.ns)} |" for part in comparison.parts]
    return ["| where the difference comes from | B - A |", "|---|--:|", *rows, ""]


def signed(ns: float) -> str:
    """A difference of time with its sign."""
    return f"{'-' if ns < 0 else '+'}{values.duration(abs(ns))}"


def _verdicts(comparison: Comparison) -> list[str]:
    texts = [verdict_text(shares) for shares in comparison.verdicts]
    return [f"Kernel time by verdict: A {texts[0]}; B {texts[1]}.", ""]


def verdict_text(shares: object) -> str:
    """`memory (DRAM) 80.0 %, latency 20.0 %`: the three largest."""
    items = list(shares.items())[:3] if isinstance(shares, dict) else []
    return ", ".join(f"{name} {values.share(share)}" for name, share in items) or values.DASH


def _kernels(comparison: Comparison) -> list[str]:
    shown = comparison.kernels[:SHOWN_KERNELS]
    if not shown:
        return []
    rows = [
        f"| {code(k.name)} | {k.pair.how} | {amount(k.time.a, 'ns')} | {amount(k.time.b, 'ns')} "
        f"| {percent_change(k.mean)}{'*' if k.has_changed else ''} |"
        for k in shown
    ]
    head = [
        "| kernel | match | A, a repetition | B, a repetition | change of a launch (95 %) |",
        "|---|---|--:|--:|--:|",
    ]
    rest = _rest(len(comparison.kernels) - len(shown))
    return [*head, *rows, "", f"\\* certain at a false discovery rate of 5 %. {rest}".strip(), ""]


def _perturbation(comparison: Comparison) -> list[str]:
    said = outputs.perturbation_sentence(comparison.perturbed)
    rows = [
        f"| {code(name)} | {plain} | {profiled} | {change} |"
        for name, plain, profiled, change in outputs.perturbation_rows(comparison.perturbed)
    ]
    head = ["| kernel | without the profiler | with it | difference |", "|---|--:|--:|--:|"]
    return [said, "", *(head if rows else []), *rows] if said else []


def _rest(count: int) -> str:
    return f"{count:,} kernels with smaller differences are not shown." if count > 0 else ""


def plain_names(names: Sequence[str]) -> list[str]:
    """Names for a terminal or a plot: one line each, shortened."""
    return [visible(shorten(name, NAME_CHARACTERS)) for name in names]
