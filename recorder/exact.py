"""Which launches get exact counters, and what a measurement yields. `exact_layer` does the measuring."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nanalyze.rundir.counters import COUNTERS
from nanalyze.rundir.counters import Counter as HardwareCounter
from nanalyze.rundir.errors import RecorderError

FULL = "full"
VERDICT = "verdict"
_NOT_FOR_VERDICT = ("inst_", "thread_inst_", "tensor_")  # counters that cost passes and only refine the roofline


@dataclass(frozen=True)
class Exact:
    """Which launches get exact counters, and what that may cost.

    `kernels`: a regular expression searched in the demangled name; `exclude`: one of those to
    leave out. `ranges`: only launches made while a range whose name matches is open (`annotate` or
    NVTX, in any thread). `seconds`: only those in the first so many seconds of the recording. Of
    what that lets through, of each kernel and launch shape, `skip` launches are let pass, `first` are
    measured, then every `every`-th.
    `budget_pct`: the share of the recording's time that measuring may take, in percent; 100 means
    no limit. `graphs`: whether CUDA graph launches are measured as ranges of their own.
    `metrics`: "full" (verdict and roofline), "verdict" (about half the passes) or CUPTI names.
    """

    kernels: str = ""
    first: int = 2
    skip: int = 0
    every: int | None = None
    budget_pct: float = 10.0
    graphs: bool = True
    metrics: str | Sequence[str] = FULL
    exclude: str = ""
    ranges: str = ""
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("kernels", "exclude", "ranges"):
            pattern = getattr(self, name)
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise RecorderError(f"Exact({name}={pattern!r}): not a regular expression: {error}") from None
        if self.seconds is not None and not self.seconds > 0:
            raise RecorderError(f"Exact(seconds={self.seconds!r}): must be above 0")
        if self.first < 0 or self.skip < 0 or (self.every is not None and self.every < 1):
            raise RecorderError("Exact: first and skip must be 0 or more, every 1 or more")
        if not 0 < self.budget_pct <= 100:
            raise RecorderError(f"Exact(budget_pct={self.budget_pct}): must be above 0 and at most 100")
        if not self.metrics or (isinstance(self.metrics, str) and self.metrics not in (FULL, VERDICT)):
            raise RecorderError(
                f"Exact(metrics={self.metrics!r}): give {FULL!r}, {VERDICT!r} or a list of CUPTI metrics"
            )

    def candidates(self) -> list[HardwareCounter]:
        """The counters to measure, each with its possible raw metrics."""
        if not isinstance(self.metrics, str):
            return [HardwareCounter(name, "", "", (name,)) for name in self.metrics]
        if self.metrics == VERDICT:
            return [counter for counter in COUNTERS if not counter.name.startswith(_NOT_FOR_VERDICT)]
        return list(COUNTERS)


@dataclass
class Choice:
    """The launches of one kernel and shape (or of one graph) so far."""

    wanted: bool
    seen: int = 0
    measured: int = 0

    def is_due(self, options: Exact) -> bool:
        if not self.wanted or self.seen <= options.skip:
            return False
        if self.measured < options.first:
            return True
        return options.every is not None and (self.seen - options.skip) % options.every == 0


@dataclass
class Measurement:
    """Values of one measured launch, waiting for its class from the timeline."""

    scope: str
    correlation_id: int
    device_id: int
    measured_ns: int
    metrics: list[str]
    values: list[float | None]
    passes: int
    cost_ns: int

    def rows(self, kernel_class_id: int | None, graph_id: int | None) -> list[dict[str, Any]]:
        shared = {
            "scope": self.scope,
            "measured_ns": self.measured_ns,
            "device_id": self.device_id,
            "correlation_id": self.correlation_id,
            "kernel_class_id": kernel_class_id if self.scope == "kernel" else None,
            "graph_id": graph_id if self.scope == "graph" else None,
            "passes": self.passes,
            "cost_ns": self.cost_ns,
        }
        return [{**shared, "metric": m, "value": v} for m, v in zip(self.metrics, self.values, strict=True)]


@dataclass
class Tally:
    """What the layer did, for `events`."""

    measured: int = 0
    spent_ns: int = 0
    over_budget: int = 0
    discarded: int = 0
    unfinished_graphs: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
