"""What differs between two sides: totals a repetition, kernel by kernel, and where the time went.

Every figure is a mean over repetitions without spikes (`analysis/statistics.py`). Which repetitions
are spikes is decided by their whole time, once, so that the parts add up to the total; for the
duration of a single kernel it is decided by that kernel's own times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nanalyze.analysis import statistics
from nanalyze.analysis.compare import match
from nanalyze.analysis.compare.match import Pair
from nanalyze.analysis.compare.sample import KernelClass, Sample
from nanalyze.analysis.statistics import Array, Mask, Means

FALSE_DISCOVERY_RATE = 0.05
# Counters stand for a repetition where they cover this share of its kernel time.
COVERED = 0.995


@dataclass(frozen=True)
class Effect:
    """One figure of both sides. None: not known. `change` is b / a - 1, `difference` b - a, 95 % intervals.

    The arguments of `statistics.change`, by which a gate asks for another confidence, are kept in `means`.
    """

    metric: str
    unit: str
    a: float | None
    b: float | None
    change: float | None = None
    change_low: float | None = None
    change_high: float | None = None
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    p_value: float | None = None
    means: tuple[Means, Means] | None = None

    @property
    def is_certain(self) -> bool:
        """Whether the interval leaves out no change."""
        low, high = self.difference_low, self.difference_high
        return low is not None and high is not None and (low > 0 or high < 0)


@dataclass(frozen=True)
class KernelEffect:
    """A kernel on both sides. `time` is a repetition's, `mean` a launch's duration; counters are a launch's.

    `q_value` is `mean`'s p-value adjusted for all kernels that were tested; None where none was.
    """

    pair: Pair
    a: KernelClass | None
    b: KernelClass | None
    launches_a: float
    launches_b: float
    time: Effect
    mean: Effect
    q_value: float | None = None

    @property
    def has_changed(self) -> bool:
        return self.q_value is not None and self.q_value <= FALSE_DISCOVERY_RATE

    @property
    def name(self) -> str:
        known = self.b or self.a
        return known.name if known else ""


class Side:
    """The runs of one side, with the repetitions of each that are spikes by their whole time."""

    def __init__(self, samples: Sequence[Sample], *, keep_spikes: bool = False) -> None:
        self.samples = list(samples)
        self.keep_spikes = keep_spikes
        self.left_out = [self._spikes(self.time(sample)) for sample in self.samples]
        # Later runs may know a class better (its counters), so the first with counters wins.
        self.classes: dict[int, KernelClass] = {}
        for sample in self.samples:
            for class_id, known in sample.classes.items():
                if class_id not in self.classes or self.classes[class_id].dram_bytes is None:
                    self.classes[class_id] = known

    @staticmethod
    def time(sample: Sample) -> Array:
        return sample.totals.get("span_ns", sample.totals["kernel_ns"])

    def _spikes(self, values: Array) -> Mask:
        found = statistics.spikes(values)
        return np.zeros_like(found) if self.keep_spikes else found

    def order(self) -> list[int]:
        """Class ids as a repetition launches them."""
        at: dict[int, float] = {}
        for sample in self.samples:
            for class_id, offset in zip(sample.class_ids, sample.offsets, strict=True):
                at.setdefault(class_id, float(offset) if np.isfinite(offset) else np.inf)
        return sorted(at, key=lambda class_id: (at[class_id], class_id))

    def total(self, name: str) -> Means | None:
        """A repetition's total; None where a run lacks it."""
        if any(name not in sample.totals for sample in self.samples):
            return None
        return self.pooled([sample.totals[name] for sample in self.samples])

    def pooled(self, values: Sequence[Array]) -> Means:
        """Mean of one figure, its values given by run and batch, over the repetitions that are no spikes."""
        return statistics.pool(
            [statistics.means(v[None], out[None]) for v, out in zip(values, self.left_out, strict=True)]
        )

    def kernel(self, class_id: int | None) -> tuple[Means, Means, float]:
        """Of a class: time a repetition, duration of a launch, launches a repetition."""
        times, durations, launches = [], [], []
        for sample, out in zip(self.samples, self.left_out, strict=True):
            if class_id not in sample.classes or class_id is None:
                times.append(np.zeros(sample.batches))
                launches.append(0.0)
                continue
            row = list(sample.class_ids).index(class_id)
            times.append(sample.kernel_ns[row])
            launched = sample.launches[row] > 0
            each = sample.kernel_ns[row][launched] / sample.launches[row][launched]
            durations.append(statistics.means(each[None], self._spikes(each)[None]))
            launches.append(float(sample.launches[row][~out].mean()))
        mean = statistics.pool(durations) if durations else _nothing()
        return self.pooled(times), mean, float(np.mean(launches))

    def weighted(self, name: str) -> Means | None:
        """A counter of one launch (`dram_bytes`, ...) summed over a repetition's launches, with the counter's error.

        None where classes without the counter take more than 1 - COVERED of the kernel time.
        """
        values, square = [], 0.0
        for sample in self.samples:
            classes = [self.classes[class_id] for class_id in sample.class_ids]
            known = np.array([getattr(one, name) is not None for one in classes], dtype=bool)
            time = sample.kernel_ns.sum(axis=1)
            if time[known].sum() < COVERED * time.sum() or not known.any():
                return None
            each = np.array([getattr(one, name) or 0.0 for one in classes])
            errors = np.array([getattr(one, f"{name}_error", None) or 0.0 for one in classes])
            values.append(each @ sample.launches)
            square += float(((sample.launches.mean(axis=1) * errors) ** 2).sum()) / len(self.samples) ** 2
        found = self.pooled(values)
        measured = [one for one in self.classes.values() if getattr(one, name) is not None]
        if any(getattr(one, f"{name}_error", None) is None for one in measured):
            square = np.nan  # one launch was counted: how far it is off nobody knows
        return Means(found.value, found.variance + square, found.degrees, found.kept, found.spikes)


def _nothing() -> Means:
    unknown = np.full(1, np.nan)
    none = np.zeros(1, dtype=np.int64)
    return Means(unknown, unknown, np.zeros(1), none, none)


def effect(metric: str, unit: str, a: Means | None, b: Means | None) -> Effect:
    """The effect between two means of one entry."""
    if a is None or b is None:
        return Effect(metric, unit, _value(a), _value(b))
    found = statistics.change(a, b)
    return Effect(
        metric, unit, _value(a), _value(b),
        _less_one(found.ratio), _less_one(found.low), _less_one(found.high),
        finite(found.difference), finite(found.difference_low), finite(found.difference_high),
        finite(found.p_value), (a, b),
    )  # fmt: skip


def _value(means: Means | None) -> float | None:
    return None if means is None else finite(means.value)


def finite(values: Array) -> float | None:
    """The only entry; None for NaN and infinities."""
    return float(values[0]) if np.isfinite(values[0]) else None


def _less_one(values: Array) -> float | None:
    return None if finite(values) is None else float(values[0]) - 1


# --- totals ------------------------------------------------------------------------------------


def totals(a: Side, b: Side) -> dict[str, Effect]:
    """A repetition's figures by metric, in the order in which reports show them."""
    found = [
        effect("step_ns", "ns", a.total("span_ns"), b.total("span_ns")),
        effect("total_ns", "ns", a.total("kernel_ns"), b.total("kernel_ns")),
        effect("gap_ns", "ns", a.total("gap_ns"), b.total("gap_ns")),
        effect("overlap_ns", "ns", _overlap(a), _overlap(b)),
        effect("host_ns", "ns", a.total("host_ns"), b.total("host_ns")),
        effect("launches", "launches", a.total("launches"), b.total("launches")),
        effect("gaps", "gaps", a.total("gaps"), b.total("gaps")),
        effect("dram_bytes", "bytes", a.weighted("dram_bytes"), b.weighted("dram_bytes")),
        effect("l2_bytes", "bytes", a.weighted("l2_bytes"), b.weighted("l2_bytes")),
        effect("flops", "FLOP", a.weighted("flops"), b.weighted("flops")),
    ]
    by_name = {one.metric: one for one in found}
    by_name["flop_per_byte"] = _intensity(by_name["flops"], by_name["dram_bytes"])
    if a.samples[0].range_name is None:  # the whole run is one repetition: it has no span of its own
        for name in ("step_ns", "overlap_ns"):
            by_name[name] = Effect(name, "ns", None, None)
    return by_name


def _overlap(side: Side) -> Means | None:
    """Kernel time in which another kernel ran too: what the sum of durations counts twice."""
    if any(name not in sample.totals for sample in side.samples for name in ("span_ns", "gap_ns")):
        return None
    return side.pooled([s.totals["kernel_ns"] + s.totals["gap_ns"] - s.totals["span_ns"] for s in side.samples])


def _intensity(flops: Effect, dram: Effect) -> Effect:
    a, b = (f / d if f is not None and d else None for f, d in ((flops.a, dram.a), (flops.b, dram.b)))
    change = b / a - 1 if a and b is not None else None
    return Effect("flop_per_byte", "FLOP/byte", a, b, change, difference=b - a if None not in (a, b) else None)  # type: ignore[operator]


# --- kernels -----------------------------------------------------------------------------------


def kernels(a: Side, b: Side, *, renamed: bool) -> list[KernelEffect]:
    """Every kernel of both sides, the largest difference of time first."""
    found = []
    for pair in match.pairs(a.classes, b.classes, a.order(), b.order(), renamed=renamed):
        time_a, mean_a, launches_a = a.kernel(pair.a)
        time_b, mean_b, launches_b = b.kernel(pair.b)
        found.append(
            KernelEffect(
                pair,
                None if pair.a is None else a.classes[pair.a],
                None if pair.b is None else b.classes[pair.b],
                launches_a,
                launches_b,
                effect("kernel_ns", "ns", time_a, time_b),
                effect("mean_ns", "ns", mean_a, mean_b),
            )
        )
    p_values = np.array([np.nan if k.mean.p_value is None else k.mean.p_value for k in found])
    adjusted = statistics.benjamini_hochberg(p_values)
    found = [
        KernelEffect(k.pair, k.a, k.b, k.launches_a, k.launches_b, k.time, k.mean, None if np.isnan(q) else float(q))
        for k, q in zip(found, adjusted, strict=True)
    ]
    return sorted(found, key=lambda k: (-abs(k.time.difference or 0), k.name, str(k.pair)))


def verdict_shares(side: Side) -> dict[str, float]:
    """Share of a repetition's kernel time by verdict, the largest first."""
    shares: dict[str, float] = {}
    for sample, out in zip(side.samples, side.left_out, strict=True):
        time = sample.kernel_ns[:, ~out].mean(axis=1)
        for class_id, spent in zip(sample.class_ids, time, strict=True):
            verdict = side.classes[class_id].verdict or "undetermined"
            shares[verdict] = shares.get(verdict, 0.0) + float(spent)
    total = sum(shares.values())
    return {name: value / total for name, value in sorted(shares.items(), key=lambda i: (-i[1], i[0]))} if total else {}


# --- where the time went -----------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What one cause adds to a repetition's time from a to b, in ns; negative is saved. Interval None: not known."""

    name: str
    ns: float
    low: float | None = None
    high: float | None = None


def parts(effects: Mapping[str, Effect]) -> list[Part]:
    """Where the difference of a repetition's time comes from; the parts add up to it exactly.

    step = kernel time + gaps - overlap. With DRAM bytes of both sides, kernel time is bytes times
    time a byte, and its difference is split evenly (Shapley's value for two factors): what the
    bytes account for at the mean of both rates, and what the rate does at the mean of both bytes.
    """
    kernel, gap, overlap = effects["total_ns"], effects["gap_ns"], effects["overlap_ns"]
    if kernel.a is None or kernel.b is None:
        return []
    found = _kernel_parts(kernel, effects["dram_bytes"])
    if gap.difference is not None and effects["step_ns"].difference is not None:
        if gap.a or gap.b:
            found.append(Part("gaps between kernels", gap.difference, gap.difference_low, gap.difference_high))
        if overlap.a or overlap.b:
            low, high = overlap.difference_low, overlap.difference_high
            found.append(
                Part(
                    "kernels side by side",
                    -(overlap.difference or 0.0),
                    None if high is None else -high,
                    None if low is None else -low,
                )
            )
    return found


def _kernel_parts(kernel: Effect, dram: Effect) -> list[Part]:
    a, b = kernel.a or 0.0, kernel.b or 0.0
    if not dram.a or not dram.b or kernel.means is None or dram.means is None:
        return [Part("time in kernels", b - a, kernel.difference_low, kernel.difference_high)]
    inputs = [*kernel.means, *dram.means]
    return [
        Part("DRAM bytes moved", *_with_interval(_moved, inputs)),
        Part("kernel time per byte", *_with_interval(_paced, inputs)),
    ]


def _moved(figures: Array) -> float:
    """What the bytes account for, of (time A, time B, bytes A, bytes B)."""
    time_a, time_b, bytes_a, bytes_b = figures
    return float((bytes_b - bytes_a) * (time_a / bytes_a + time_b / bytes_b) / 2)


def _paced(figures: Array) -> float:
    """What the time a byte accounts for."""
    return float(figures[1] - figures[0]) - _moved(figures)


def _with_interval(
    figure: Callable[[Array], float], inputs: Sequence[Means]
) -> tuple[float, float | None, float | None]:
    """A figure of independent means with its 95 % interval by the delta method; None where a variance is unknown."""
    at = np.array([float(one.value[0]) for one in inputs])
    steps = 1e-6 * at * np.eye(len(at))
    slopes = np.array([figure(at + step) - figure(at - step) for step in steps]) / (2e-6 * at)
    variances = (slopes**2 * np.array([float(one.variance[0]) for one in inputs]))[:, None]
    degrees = statistics.welch(variances, np.array([one.degrees for one in inputs]))
    half = finite(statistics.t_quantile(statistics.CONFIDENCE, degrees) * np.sqrt(variances.sum(axis=0)))
    value = figure(at)
    return (value, None, None) if half is None else (value, value - half, value + half)
