"""Whether two sides can be compared at all: same machine, GPU, driver, clocks, and recorded alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from nanalyze.analysis import statistics
from nanalyze.analysis.compare.effects import Side
from nanalyze.analysis.compare.sample import Clock, Facts

BLOCKING, WARNING, NOTE = "blocking", "warning", "note"

# Mean SM clocks further apart than this, as a share, are flagged: time follows the clock one to one.
CLOCK_SHARE = 0.01
# NVML's reasons that slow a device down against its will: power cap, slowdown by hardware, heat, power brake.
THROTTLING = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
# Share of readings with such a reason from which it is mentioned.
THROTTLED_SHARE = 0.05
FEW_REPETITIONS = 10
# Degrees of freedom from which on an interval is more than a guess: below, the repetitions drift or switch
# between states so slowly that the record holds few of them. So few repetitions never give more.
FEW_DEGREES, JUDGED_REPETITIONS = 3, 20


@dataclass(frozen=True)
class Check:
    """One finding. `blocking` findings make the comparison one of different things."""

    level: str
    subject: str
    a: str
    b: str
    message: str


def checks(a: Side, b: Side, *, same_run: bool) -> list[Check]:
    """What stands against comparing the two sides, worst first; empty where nothing does."""
    found = [] if same_run else _environment(a, b)
    found += [*_clocks(a, b), *_throttling(a, b), *_repetitions(a, b)]
    if not same_run:
        found += _coverage(a, b)
    levels = (BLOCKING, WARNING, NOTE)
    return sorted(found, key=lambda check: levels.index(check.level))


Facet = Callable[[Facts], Sequence[str]]


def _environment(a: Side, b: Side) -> list[Check]:
    facets: tuple[tuple[str, str, Facet, str], ...] = (
        (BLOCKING, "GPU model", lambda f: f.models, "different GPU models run at different speeds"),
        (WARNING, "GPU", lambda f: f.devices, "GPUs of one model differ by some percent"),
        (WARNING, "host", lambda f: f.hosts, "hosts differ in cooling, power and launch cost"),
        (WARNING, "driver", lambda f: f.drivers, "drivers compile and schedule differently"),
        (NOTE, "CUPTI", lambda f: f.cupti, "timestamps come from different CUPTI versions"),
        (WARNING, "timestamps", lambda f: f.timestamps, "the recorder's setting costs time on the GPU"),
        (WARNING, "processes", lambda f: (str(f.processes),), "a different number of processes shares the work"),
    )
    return [
        Check(level, subject, _listed(one), _listed(other), f"{subject} differs: {why}")
        for level, subject, facet, why in facets
        if (one := _all(a, facet)) != (other := _all(b, facet))
    ]


def _all(side: Side, facet: Facet) -> tuple[str, ...]:
    return tuple(sorted({value for sample in side.samples for value in facet(sample.facts)}))


def _listed(values: Sequence[str]) -> str:
    return (
        ", ".join(values[:4]) + (f" and {len(values) - 4} more" if len(values) > 4 else "") if values else "not known"
    )


def _clocks(a: Side, b: Side) -> list[Check]:
    one, other = _sm_clocks(a), _sm_clocks(b)
    if not len(one) or not len(other):
        where = " and ".join(name for name, found in (("A", one), ("B", other)) if not len(found))
        message = f"no clock was read while {where} ran, so whether the clocks were alike is not known"
        return [Check(NOTE, "SM clock", _clock_text(one), _clock_text(other), message)]
    apart = other.mean() / one.mean() - 1
    if abs(apart) <= CLOCK_SHARE:
        return []
    message = (
        f"the SM clock of B is {100 * apart:+.1f} % from A's on average: times differ by as much for that reason alone"
    )
    return [Check(WARNING, "SM clock", _clock_text(one), _clock_text(other), message)]


def _sm_clocks(side: Side) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    readings = [clock for sample in side.samples for clock in sample.facts.clocks if clock.sm_hz is not None]
    return np.repeat([float(c.sm_hz or 0) for c in readings], [c.readings for c in readings])


def _clock_text(hertz: np.ndarray[tuple[int], np.dtype[np.float64]]) -> str:
    if not len(hertz):
        return "not known"
    low, middle, high = np.quantile(hertz, [0.1, 0.5, 0.9]) / 1e6
    return f"median {middle:.0f} MHz ({low:.0f} to {high:.0f})"


def _throttling(a: Side, b: Side) -> list[Check]:
    shares = [_throttled(clock for sample in side.samples for clock in sample.facts.clocks) for side in (a, b)]
    if max(shares) < THROTTLED_SHARE:
        return []
    one, other = (f"{100 * share:.0f} % of readings" for share in shares)
    return [Check(WARNING, "throttling", one, other, "power or heat held the clocks down during part of the time")]


def _throttled(clocks: Iterable[Clock]) -> float:
    found = list(clocks)
    total = sum(clock.readings for clock in found)
    return sum(c.readings for c in found if (c.throttle_reasons or 0) & THROTTLING) / total if total else 0.0


def _repetitions(a: Side, b: Side) -> list[Check]:
    found = []
    counts = [sum(sample.repetitions for sample in side.samples) for side in (a, b)]
    if min(counts) < FEW_REPETITIONS:
        message = f"fewer than {FEW_REPETITIONS} repetitions give wide intervals, or none"
        found.append(Check(WARNING, "repetitions", str(counts[0]), str(counts[1]), message))
    if {s.range_name is None for s in a.samples} != {s.range_name is None for s in b.samples}:
        message = "one side has steps, the other is cut into pieces: their times a repetition mean different things"
        found.append(
            Check(
                BLOCKING,
                "repetitions",
                a.samples[0].range_name or "pieces",
                b.samples[0].range_name or "pieces",
                message,
            )
        )
    degrees = [_degrees(side) for side in (a, b)]
    if min(counts) >= JUDGED_REPETITIONS and min(degrees) <= FEW_DEGREES:
        message = "repetitions drift or switch between states so slowly that intervals are guesses: record longer"
        found.append(
            Check(WARNING, "independence", f"{degrees[0]:.0f} degrees of freedom", f"{degrees[1]:.0f}", message)
        )
    dropped = [sum(int(out.sum()) for out in side.left_out) for side in (a, b)]
    if any(dropped):
        message = "spikes were left out of the means (more than 20 % and 3 interquartile ranges off)"
        found.append(Check(NOTE, "spikes", str(dropped[0]), str(dropped[1]), message))
    return found


def _degrees(side: Side) -> float:
    """Degrees of freedom that the runs' own repetitions give the mean time."""
    times = [
        statistics.means(side.time(s)[None], out[None]) for s, out in zip(side.samples, side.left_out, strict=True)
    ]
    return float(sum(found.degrees[0] for found in times))


def _coverage(a: Side, b: Side) -> list[Check]:
    found = []
    lost = [sum(sample.facts.damage + sample.facts.losses for sample in side.samples) for side in (a, b)]
    if any(lost):
        message = "records or shards are missing, so sums may be too low"
        found.append(Check(WARNING, "losses", str(lost[0]), str(lost[1]), message))
    if min(len(a.samples), len(b.samples)) == 1:
        message = "with one run a side the intervals do not hold what differs from run to run (placement, clocks)"
        found.append(Check(NOTE, "runs", str(len(a.samples)), str(len(b.samples)), message))
    return found
