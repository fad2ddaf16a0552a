"""Comparisons: ranges of one run, or runs with runs; effects with intervals, checks and gates.

    import nanalyze.analysis as na
    from nanalyze.analysis import compare

    with na.open("run_dir") as run:
        result = run.compare("eager", "fused")
        print(result.totals["step_ns"].change)
        result.plot()

    with na.open("before") as a, na.open("after") as b:
        result = compare.runs([a], [b], gates=["total_ns>+3%"])

`sample` reads a run, `match` finds which kernel is which, `effects` says what differs, `checks` what stands
against comparing, `gates` what fails, `baseline` keeps one side in a file, `outputs` and `picture` show it.
`docs/compare.md` derives the method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanalyze.analysis.compare import baseline, checks, effects, gates, sample
from nanalyze.analysis.compare.checks import Check
from nanalyze.analysis.compare.effects import Effect, KernelEffect, Part, Side
from nanalyze.analysis.compare.gates import Outcome
from nanalyze.analysis.compare.sample import CompareError, Perturbed, Sample

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from nanalyze.analysis.run import Run

__all__ = ["CompareError", "Comparison", "Sample", "load", "ranges", "runs", "samples"]


@dataclass(frozen=True)
class Comparison:
    """How side B differs from side A.

    `totals` holds a repetition's figures by metric, `kernels` every kernel of both sides, `parts` where
    the difference of a repetition's time comes from, `verdicts` the shares of kernel time by verdict of A
    and of B, `checks` what stands against comparing, `outcomes` how each gate came out.
    """

    name_a: str
    name_b: str
    range_a: str | None
    range_b: str | None
    runs: tuple[int, int]
    repetitions: tuple[int, int]
    totals: Mapping[str, Effect]
    kernels: Sequence[KernelEffect]
    parts: Sequence[Part]
    verdicts: tuple[Mapping[str, float], Mapping[str, float]]
    checks: Sequence[Check]
    outcomes: Sequence[Outcome]
    perturbed: Sequence[Perturbed]

    @property
    def speedup(self) -> tuple[float, float, float] | None:
        """A's time over B's with its 95 % interval: of a repetition, or of its kernels where that is unknown."""
        found = self.time
        if found.change is None or found.change_low is None or found.change_high is None:
            return None
        return 1 / (1 + found.change), 1 / (1 + found.change_high), 1 / (1 + found.change_low)

    @property
    def time(self) -> Effect:
        """The effect on a repetition's time, or on its kernel time where its span is not known."""
        step = self.totals["step_ns"]
        return step if step.change is not None else self.totals["total_ns"]

    @property
    def failed(self) -> bool:
        """Whether a gate failed."""
        return any(outcome.status == gates.FAILED for outcome in self.outcomes)

    @property
    def undecided(self) -> bool:
        """Whether a gate could not be decided."""
        return any(outcome.status == gates.UNDECIDED for outcome in self.outcomes)

    @property
    def unmeasured(self) -> bool:
        """Whether a gate asks for what was not measured."""
        return any(outcome.status == gates.UNMEASURED for outcome in self.outcomes)

    @property
    def blocked(self) -> bool:
        """Whether the sides are not comparable: a check says so."""
        return any(check.level == checks.BLOCKING for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Everything as a JSON-able dict; docs/compare.md documents its shape."""
        from nanalyze.analysis.compare import outputs

        return outputs.to_dict(self)

    def to_markdown(self) -> str:
        """A summary for a pull request; kernel names cannot break out of it."""
        from nanalyze.analysis.compare import markdown

        return markdown.summary(self)

    def to_junit(self) -> str:
        """One test case a gate as JUnit XML, and one for the checks."""
        from nanalyze.analysis.compare import outputs

        return outputs.to_junit(self)

    def to_pandas(self) -> pd.DataFrame:
        """One row a kernel, the largest difference of time first."""
        from nanalyze.analysis.compare import outputs

        return outputs.to_pandas(self)

    def plot(self, axes: Axes | None = None) -> Axes:
        """Where the difference of a repetition's time comes from, as a waterfall; into `axes` if given."""
        from nanalyze.analysis.compare import picture

        return picture.plot(self, axes)


def ranges(
    run: Run,
    a: str,
    b: str,
    *,
    skip: int = 0,
    gates: Sequence[str] = (),
    keep_spikes: bool = False,
    within: str | None = None,
) -> Comparison:
    """Compare the ranges called `a` and `b` of one run; ranges of one name are repetitions.

    The first `skip` of each name and process are left out, and with `within` all that do not lie in a range of
    that name. Raises CompareError.
    """
    found = [sample.read(run, name, skip=skip, label=name, within=within) for name in (a, b)]
    return samples(found[:1], found[1:], gates=gates, keep_spikes=keep_spikes, same_run=True)


def runs(
    a: Sequence[Run],
    b: Sequence[Run],
    *,
    step: str | None = None,
    skip: int = 0,
    gates: Sequence[str] = (),
    keep_spikes: bool = False,
) -> Comparison:
    """Compare the runs `a` with the runs `b`; a repetition is a range called `step`.

    Without `step` the outermost range that all have and that repeats is taken, else the runs are cut
    into pieces of equally many launches. Raises CompareError.
    """
    step = step if step is not None else sample.common_step([*a, *b])
    found = [[sample.read(run, step, skip=skip) for run in side] for side in (a, b)]
    return samples(found[0], found[1], gates=gates, keep_spikes=keep_spikes)


def samples(
    a: Sequence[Sample],
    b: Sequence[Sample],
    *,
    gates: Sequence[str] = (),
    keep_spikes: bool = False,
    same_run: bool = False,
) -> Comparison:
    """Compare samples that were read or loaded. `same_run`: they are ranges of one run. Raises CompareError."""
    from nanalyze.analysis.compare.gates import judge, parse

    parsed = [parse(text) for text in gates]
    if not a or not b:
        raise CompareError("nothing to compare: each side needs at least one run.")
    one, other = Side(a, keep_spikes=keep_spikes), Side(b, keep_spikes=keep_spikes)
    totals = effects.totals(one, other)
    kernels = effects.kernels(one, other, renamed=not same_run)
    perturbed = {p.kernel_class_id: p for found in (*a, *b) for p in found.perturbed}
    return Comparison(
        ", ".join(found.label for found in a),
        ", ".join(found.label for found in b),
        a[0].range_name,
        b[0].range_name,
        (len(a), len(b)),
        (sum(found.repetitions for found in a), sum(found.repetitions for found in b)),
        totals,
        kernels,
        effects.parts(totals),
        (effects.verdict_shares(one), effects.verdict_shares(other)),
        checks.checks(one, other, same_run=same_run),
        judge(parsed, totals, kernels, one, other),
        list(perturbed.values()),
    )


def load(path: Path, step: str | None = None) -> list[Sample]:
    """The samples of a baseline file. Raises CompareError, also where it was saved for another step than `step`."""
    found = baseline.load(path)
    if step is not None and found[0].range_name != step:
        raise CompareError(f"{path}: was saved with the step {found[0].range_name}, not {step}. Give --step likewise.")
    return found
