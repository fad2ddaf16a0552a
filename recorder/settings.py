"""What a recording is asked to do, checked before anything starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from nanalyze.recorder.exact import Exact
from nanalyze.recorder.samples import Samples
from nanalyze.rundir.errors import RecorderError

MOST_OF_A_CORE_PCT = 5.0  # that the recorder may take without being told so, however many cores there are

LAYERS = ("timeline", "ranges", "device_state")
TIMESTAMP_PLACES = ("host", "device")


@dataclass(frozen=True)
class Settings:
    """What a recording was asked to do; kept in the run directory."""

    layers: tuple[str, ...] = LAYERS
    flush_s: float = 5.0
    exact: Exact | None = None
    samples: Samples | None = None
    append: bool = False
    timestamps: str = "host"
    launch_times: bool = True
    nvtx: bool = True
    copies: bool = True
    memsets: bool = False
    detach: bool = False
    overhead_pct: float = 1.0
    pause_pct: float = 1.0

    def __post_init__(self) -> None:
        layers: Any = self.layers
        if isinstance(layers, str):
            raise RecorderError(f"layers={layers!r}: give a sequence of layers, of {', '.join(LAYERS)}")
        object.__setattr__(self, "layers", tuple(layers))
        unknown = [layer for layer in self.layers if layer not in LAYERS]
        if unknown:
            raise RecorderError(f"unknown layer {unknown[0]!r}: the layers are {', '.join(LAYERS)}")
        if not isinstance(self.flush_s, int | float) or not self.flush_s > 0:
            raise RecorderError(f"flush_s={self.flush_s!r}: must be above 0 seconds")
        if not _is_number(self.overhead_pct) or not 0 < self.overhead_pct <= 100:
            raise RecorderError(f"overhead_pct={self.overhead_pct!r}: must be above 0 and at most 100")
        if not _is_number(self.pause_pct) or not 0 <= self.pause_pct <= 50:
            raise RecorderError(f"pause_pct={self.pause_pct!r}: must be from 0 (never) to 50")
        if self.timestamps not in TIMESTAMP_PLACES:
            raise RecorderError(f"timestamps={self.timestamps!r}: must be one of {', '.join(TIMESTAMP_PLACES)}")
        if self.samples is not None and not isinstance(self.samples, Samples):
            raise RecorderError(f"samples={self.samples!r}: must be a recorder.Samples, such as recorder.Samples()")
        if self.samples is not None and self.exact is not None:
            raise RecorderError(
                "samples and exact both need the GPU's counters: record once with each, the second with append=True"
            )
        if self.exact is not None and not isinstance(self.exact, Exact):
            raise RecorderError(
                f"exact={self.exact!r}: must be a recorder.Exact, such as recorder.Exact(kernels='gemm')"
            )

    @property
    def cpu_budget_pct(self) -> float:
        """CPU time the recorder may take, in percent of one core.

        `overhead_pct` is of all the cores this process may use, since the job's threads leave most of them
        idle; above 5 % of one core only when `overhead_pct` itself is.
        """
        return max(self.overhead_pct, min(self.overhead_pct * usable_cores(), MOST_OF_A_CORE_PCT))


def usable_cores() -> int:
    """CPUs that this process may be scheduled on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
