"""From rates of sampled columns to the counters of each kernel class, with intervals.

A `Quantity` carries, beside its values, how much each block of samples moves them. Sums and ratios of
quantities carry that along (the delta method), so counters that noise moves together, such as
warps and active cycles of the same samples, have the interval of their ratio and not a wider one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from nanalyze.analysis import settings
from nanalyze.analysis.attribution_modes import by_class
from nanalyze.analysis.attribution_normal import Equations
from nanalyze.analysis.attribution_samples import CYCLES
from nanalyze.analysis.attribution_solve import Array, Fit, towards_mean
from nanalyze.rundir import counters, sampled

# A part that stays below it changes no verdict, so it need not be named as missing.
_MATTERS = next(setting.value for setting in settings.SETTINGS if setting.name == "low_pct")


# Samples and exact counters of the same steps differ in total by up to 2 %, whatever the number of samples: the
# standard error of a counter has this share of its value in addition. Chosen on one recording (docs/attribution.md).
SYSTEMATIC = 0.01
# What a launch reads from DRAM and writes there depends on what L2 holds when it begins and keeps when it ends. From
# one exact measurement of it to the next this varies by so much of L2's size, standard deviation (docs/attribution.md).
KEPT = 0.08
CACHED = ("dram_read_bytes", "dram_write_bytes")
# Influence of what is believed beforehand, beside those of blocks of samples.
_PRIOR = -1
# Counters begin and end at other instants than launches, each differently, by this: what is counted in between goes to
# neighbours, or comes from them. Chosen on one recording, where intervals hold on others too (docs/attribution.md).
EDGE_MS = 1e-3


@dataclass
class Properties:
    """What a device can do; NaN where it is not known. Clock readings are (ns, Hz).

    By kernel class: `tracing_instructions` is what recording added to a launch, `sm_shares` the share of the SMs that
    its blocks can use, where that is not all.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    sm_clock: tuple[Array, Array] = (np.zeros(0), np.zeros(0))
    memory_clock: tuple[Array, Array] = (np.zeros(0), np.zeros(0))
    tracing_instructions: Mapping[int | None, float] = field(default_factory=dict)
    sm_shares: Mapping[int | None, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        return self.values.get(name, math.nan)


@dataclass
class Quantity:
    """Values (K,), influence by fit {fit: (B, K)} and Student's degrees of freedom (K,); NaN where unknown."""

    value: Array
    influence: dict[int, Array]
    degrees: Array

    @property
    def standard_error(self) -> Array:
        total = np.zeros_like(self.value)
        for part in self.influence.values():
            total = total + np.square(part).sum(axis=0)
        return np.sqrt(total)

    def scaled(self, factor: Array | float) -> Quantity:
        """Times a known factor, one or one a class."""
        return Quantity(self.value * factor, {f: part * factor for f, part in self.influence.items()}, self.degrees)

    def plus(self, other: Quantity) -> Quantity:
        return Quantity(
            self.value + other.value, _added(self.influence, other.influence), np.fmin(self.degrees, other.degrees)
        )

    def over(self, other: Quantity) -> Quantity:
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(other.value > 0, self.value / other.value, np.nan)
            above = {f: part / other.value for f, part in self.influence.items()}
            below = {f: -part * ratio / other.value for f, part in other.influence.items()}
        return Quantity(ratio, _added(above, below), np.fmin(self.degrees, other.degrees))


def _added(first: Mapping[int, Array], second: Mapping[int, Array]) -> dict[int, Array]:
    total = dict(first)
    for number, part in second.items():
        total[number] = total[number] + part if number in total else part
    return total


@dataclass(frozen=True)
class Value:
    """One counter of one kernel class, with its 95 % interval; `missing` names parts that were not sampled.

    `lasting` is the part of the standard error that more samples would not remove.
    """

    value: float
    standard_error: float | None
    low: float
    high: float
    missing: str | None = None
    lasting: float = 0.0


def quantile(degrees: Array) -> Array:
    """Two-sided 95 % quantile of Student's t: the table, and beyond it 1.96 + 2.4 / degrees (within 0.1 %)."""
    table = np.array(settings.STUDENT_T)
    whole = np.floor(np.nan_to_num(degrees, nan=1.0)).clip(1, len(table)).astype(int)
    return np.where(degrees > len(table), 1.96 + 2.4 / np.maximum(degrees, 1), table[whole - 1])


@dataclass
class DeviceRates:
    """All fits of one device, and the kernel classes that at least one of them can tell apart."""

    equations: Sequence[Equations]
    fits: Sequence[Fit]
    properties: Properties

    def __post_init__(self) -> None:
        first = self.equations[0]
        self.classes = [terms for terms in first.classes() if first.terms[terms[0]].kind == "kernel"]
        self.identifiers = [first.terms[terms[0]].kernel_class_id for terms in self.classes]
        self.launches = [sum(first.terms[number].launches for number in terms) for terms in self.classes]
        time = [first.term_time()[terms].sum() for terms in self.classes]
        self.mean_ms: Array = np.array(time) / np.array(self.launches).clip(min=1)
        self._time = [self._of_classes(equation).sum(axis=0) for equation in self.equations]
        self._found = [
            by_class(fit, self.classes, equation.term_time())
            for fit, equation in zip(self.fits, self.equations, strict=True)
        ]
        # Neither merged nor without an error.
        self._known = [(e.merged == 1) & np.isfinite(e.standard_error).all(axis=1) for e in self._found]

    def _of_classes(self, equation: Equations) -> Array:
        """Sampled time by block and class (B, K)."""
        return np.stack([equation.time_ms[:, terms].sum(axis=1) for terms in self.classes], axis=1)

    @property
    def time_ms(self) -> Array:
        """Sampled time of each class, over all groups."""
        total: Array = np.sum(self._time, axis=0)
        return total

    @property
    def is_told_apart(self) -> NDArray[np.bool_]:
        """Whether a rate of the class alone is known from any group."""
        return np.asarray(np.any(self._known, axis=0), dtype=np.bool_)

    def rate(self, column: str, beside: str | None = None) -> Quantity | None:
        """Rate per ms of a sampled column, over all groups that have it (and `beside`, if any has both)."""
        having = [f for f, e in enumerate(self.equations) if column in e.counters]
        both = [f for f in having if beside in self.equations[f].counters]
        having = both if beside is not None and both else having
        weights = {f: np.where(self._known[f], self._time[f], 0.0) for f in having}
        total = np.sum(list(weights.values()), axis=0) if having else np.zeros(len(self.classes))
        if not np.any(total > 0):
            return None
        result: Quantity | None = None
        for f in having:
            part = self._rate_in(f, column)
            with np.errstate(divide="ignore", invalid="ignore"):
                part = part.scaled(np.where(total > 0, weights[f] / total, np.nan))
            result = part if result is None else result.plus(part)
        assert result is not None  # a total above 0 has groups
        result.influence[_edge(column)] = self._edges(result.value)
        return self._untraced(result) if column in sampled.TRACED_COLUMNS else result

    def _edges(self, value: Array) -> Array:
        """By how much rates (K,) may be off since launches and samples line up within EDGE_MS only (1, K).

        What is gained or lost at an edge is EDGE_MS times the difference to the neighbour's rate, whose usual size is
        the spread of all rates by launch.
        """
        launches, known = np.array(self.launches, dtype=np.float64), np.nan_to_num(value)
        mean = np.average(known, weights=launches.clip(min=1e-9))
        variance = np.average(np.square(known - mean), weights=launches.clip(min=1e-9))
        with np.errstate(divide="ignore"):
            off: Array = EDGE_MS * np.sqrt(variance + np.square(known - mean)) / self.mean_ms
        return off[None, :]

    def _untraced(self, rate: Quantity) -> Quantity:
        """Instructions per ms without those that time the kernels."""
        added = np.array([self.properties.tracing_instructions.get(own, 0.0) for own in self.identifiers])
        with np.errstate(divide="ignore", invalid="ignore"):
            added_per_ms = np.where(added > 0, added / self.mean_ms, 0.0)
        return Quantity(np.maximum(rate.value - added_per_ms, 0.0), rate.influence, rate.degrees)

    def _rate_in(self, f: int, column: str) -> Quantity:
        found, known, counter = self._found[f], self._known[f], self.equations[f].counters.index(column)
        influence = np.where(known, found.influence[:, :, counter], 0.0)
        value, degrees = np.where(known, found.rate[:, counter], 0.0), np.where(known, found.degrees, np.nan)
        rate = Quantity(value, {f: influence}, degrees)
        cycles = _sampled_cycles(self.equations[f])
        if cycles is not None and _is_on_sm_clock(column):
            return rate.scaled(float(cycles.sum() / self.equations[f].elapsed_ns.sum()))
        return rate

    def sm_cycles(self, beside: str) -> Quantity | None:
        """SM cycles per ms, over all SMs, while each class ran; from groups that have `beside`, if any has both.

        The clock differs between classes where power limits it, by little: what the samples say about one class
        is drawn towards the mean, the more the less certain it is, as between a measurement and a prior.
        None where no cycles were sampled.
        """
        mean = self.clock_ghz() * self.properties["sm_count"] * 1e6
        both = {beside, CYCLES}
        own = self.rate(CYCLES, beside)
        if own is None or (_is_on_sm_clock(beside) and not any(both <= set(e.counters) for e in self.equations)):
            return None
        mean = np.where(np.isnan(mean), own.value, mean)
        unknown = np.isnan(own.value + mean)
        off, noise = np.nan_to_num(own.value / mean - 1), np.nan_to_num(own.standard_error / mean)
        trust, left = towards_mean(off, noise, np.where(unknown, 0.0, self.time_ms), self._explained(CYCLES))
        trust = np.where(np.isnan(own.value), 0.0, trust)
        influence = {f: np.nan_to_num(part) * trust for f, part in own.influence.items()}
        influence[_PRIOR] = (mean * left)[None, :]
        return Quantity(mean * (1 + trust * off), influence, own.degrees)

    def _explained(self, column: str) -> float:
        """How much of a column's variation is explained, in the group where that is the least; NaN if nobody knows."""
        found = [f.explained[e.counters.index(column)] for e, f in self._both() if column in e.counters]
        return min((float(value) for value in found if math.isfinite(value)), default=math.nan)

    def _both(self) -> Iterator[tuple[Equations, Fit]]:
        return zip(self.equations, self.fits, strict=True)

    def clock_ghz(self) -> Array:
        """SM clock while each class ran, by `clock_method`."""
        return self._over_time(lambda equation: _block_clock(equation, self.properties))

    def memory_clock_hz(self) -> Array:
        """Memory clock while each class ran, from NVML's readings, else the highest."""
        own = self.properties
        return self._over_time(lambda equation: _read(own.memory_clock, equation, own["memory_clock_max_hz"]))

    def _over_time(self, by_block: Callable[[Equations], Array]) -> Array:
        weighted, time = np.zeros(len(self.classes)), np.zeros(len(self.classes))
        for equation in self.equations:
            value, spent = by_block(equation), self._of_classes(equation)
            known = ~np.isnan(value)
            weighted += value[known] @ spent[known]
            time += spent[known].sum(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(time > 0, weighted / time, np.nan)


def clock_method(equation: Equations, properties: Properties) -> str | None:
    """Where the SM clock comes from: sampled (cycles), device_state (NVML) or maximum; None where nothing is known."""
    if math.isfinite(properties["sm_count"]) and _sampled_cycles(equation) is not None:
        return "sampled"
    if len(properties.sm_clock[0]):
        return "device_state"
    return "maximum" if math.isfinite(properties["sm_clock_max_hz"]) else None


def _is_on_sm_clock(column: str) -> bool:
    return column in sampled.BY_COLUMN and sampled.BY_COLUMN[column].is_on_sm_clock


def _edge(column: str) -> int:
    """Where the influence of edges on `column` stands: those of two columns are taken to be independent."""
    return _PRIOR - 1 - list(sampled.BY_COLUMN).index(column)


def _sampled_cycles(equation: Equations) -> Array | None:
    if CYCLES not in equation.counters:
        return None
    cycles: Array = equation.total[:, equation.counters.index(CYCLES)]
    return cycles if np.any(cycles > 0) else None


def _block_clock(equation: Equations, properties: Properties) -> Array:
    """SM clock of each block, in GHz."""
    if clock_method(equation, properties) == "sampled":
        cycles = _sampled_cycles(equation)
        assert cycles is not None
        return np.asarray(cycles / equation.elapsed_ns / properties["sm_count"])
    return _read(properties.sm_clock, equation, properties["sm_clock_max_hz"]) / 1e9


def _read(readings: tuple[Array, Array], equation: Equations, without: float) -> Array:
    """Readings at the middle of each block; `without` any, that value."""
    at, value = readings
    middle = (equation.start_ns + equation.end_ns) / 2
    return np.interp(middle, at, value) if len(at) else np.full(len(middle), without)


# --- formulas --------------------------------------------------------------------------------------


def derived(rates: DeviceRates) -> dict[str, list[Value | None]]:
    """Counters by name, one value a class of `rates.classes`."""
    found: dict[str, list[Value | None]] = {}
    for formula in sampled.FORMULAS:
        if formula.counter not in found:
            quantity = _evaluated(formula, rates)
            if quantity is not None:
                found[formula.counter] = _values(quantity, formula.counter.endswith("_pct"))
    for speed in sampled.SPEEDS_OF_LIGHT:
        if all(part in found for part in speed.needed):
            found[speed.counter] = _speed_of_light(found, speed, rates)
    _pipe_rates(found, rates)
    apart = rates.is_told_apart.tolist()
    found["duration_ns"] = [_certain(1e6 * ms) if a else None for ms, a in zip(rates.mean_ms, apart, strict=True)]
    if any(clock_method(equation, rates.properties) in ("sampled", "device_state") for equation in rates.equations):
        found["sm_clock_hz"] = _clocks(rates)
    return found


def _clocks(rates: DeviceRates) -> list[Value | None]:
    cycles, apart = rates.sm_cycles(CYCLES), rates.is_told_apart
    hertz = 1e9 * rates.clock_ghz() if cycles is None else 1e3 * cycles.value / rates.properties["sm_count"]
    return [_certain(value) if a and not math.isnan(value) else None for value, a in zip(hertz, apart, strict=True)]


def unit_of(counter: str) -> str | None:
    """Unit of a derived counter."""
    for rate in sampled.PIPE_RATES:
        if rate.counter == counter:
            return rate.unit
    return counters.BY_NAME[counter].unit if counter in counters.BY_NAME else None


def _evaluated(formula: sampled.Formula, rates: DeviceRates) -> Quantity | None:
    first = formula.numerator[0]
    is_of_cycles = formula.denominator == "sm_cycles" or _is_on_sm_clock(first)
    column = formula.denominator if formula.denominator in sampled.BY_COLUMN else None
    parts = [rates.rate(name, CYCLES if is_of_cycles else column) for name in formula.numerator]
    if any(part is None for part in parts):
        return None
    result = parts[0]
    assert result is not None  # there is at least one numerator
    for part in parts[1:]:
        result = result.plus(part)  # type: ignore[arg-type]
    scale = formula.scale
    if formula.per_warp_slot:
        scale *= rates.properties["warp_size"] / rates.properties["threads_per_sm_max"]
    if column is not None:
        below = rates.rate(column, formula.numerator[0])
        return None if below is None else result.over(below).scaled(scale)
    if is_of_cycles:
        below = rates.sm_cycles(first)
        if below is not None:
            return result.over(below).scaled(scale)
    result = result.scaled(scale * _known_denominator(formula.denominator, rates))
    if first in CACHED and formula.denominator == "launch":
        result.influence[_PRIOR] = _kept(rates)[None, :]
    return result


def _kept(rates: DeviceRates) -> Array:
    """Bytes a launch of each class that L2 may have kept from an earlier one, or keep for a later one (K,)."""
    most = np.full(len(rates.classes), KEPT * np.nan_to_num(rates.properties["l2_bytes"]))
    moved = rates.rate("l2_bytes")
    return most if moved is None else np.fmin(most, np.nan_to_num(moved.value * rates.mean_ms, nan=np.inf))


def _known_denominator(name: str, rates: DeviceRates) -> Array | float:
    """What to multiply a rate per ms with."""
    own = rates.properties
    if name == "launch":
        return rates.mean_ms
    if name == "time":
        return 1e-6
    with np.errstate(divide="ignore", invalid="ignore"):
        if name == "sm_cycles":
            return np.asarray(1e-6 / (own["sm_count"] * rates.clock_ghz()))
        peak = own["dram_peak_bytes_per_s"] * rates.memory_clock_hz() / own["memory_clock_max_hz"]
        return 1e3 / peak


def _values(quantity: Quantity, is_pct: bool) -> list[Value | None]:
    error = np.hypot(quantity.standard_error, SYSTEMATIC * quantity.value)
    beliefs = {key: part for key, part in quantity.influence.items() if key < 0}
    lasting = np.hypot(replace(quantity, influence=beliefs).standard_error, SYSTEMATIC * quantity.value)
    reach = quantile(quantity.degrees) * error
    rows = zip(quantity.value.tolist(), error.tolist(), reach.tolist(), lasting.tolist(), strict=True)
    return [_value(value, own, wide, is_pct, kept) for value, own, wide, kept in rows]


def _value(value: float, error: float, reach: float, is_pct: bool, lasting: float) -> Value | None:
    """None where the value is unknown or its error unbounded."""
    if not (math.isfinite(value) and math.isfinite(reach)):
        return None
    low, high = max(value - reach, 0.0), value + reach
    if is_pct and low <= 100:  # more than all is noise unless the whole interval says so
        value, high = min(value, 100.0), min(high, 100.0)
    return Value(value, error, low, high, None, lasting)


def _certain(value: float) -> Value:
    return Value(value, None, value, value)


def _speed_of_light(
    found: Mapping[str, list[Value | None]], speed: sampled.SpeedOfLight, rates: DeviceRates
) -> list[Value | None]:
    """The busiest part; one that was not sampled can lie anywhere up to what instructions are left for it."""
    result: list[Value | None] = []
    for at in range(len(rates.classes)):
        values = {part.counter: found[part.counter][at] for part in speed.parts if part.counter in found}
        known = {part: value for part, value in values.items() if value is not None}
        is_known = all(part in known for part in speed.needed)
        result.append(_busiest(known, speed, rates.properties) if is_known else None)
    return result


def _busiest(known: Mapping[str, Value], speed: sampled.SpeedOfLight, properties: Properties) -> Value:
    top = max(known.values(), key=lambda value: value.value)
    high = max(value.high for value in known.values())
    missing = [value.missing for value in known.values() if value.missing]
    for part in speed.parts:
        if part.counter not in known:
            limit = _limit(part, known, speed.parts, properties)
            high = max(high, limit)
            if limit >= _MATTERS:
                missing.append(part.counter)
    low = max(value.low for value in known.values())
    high = max(min(high * (1 + speed.shortfall), 100.0), top.value)
    return Value(top.value, top.standard_error, low, high, ", ".join(missing) or None, top.lasting)


def _limit(
    part: sampled.Part, known: Mapping[str, Value], parts: Sequence[sampled.Part], properties: Properties
) -> float:
    """The most that a part can be busy, in percent: with the instructions that no sampled pipe took."""
    issue, slots = known.get("pipe_issue_pct"), _slots(part, properties)
    if issue is None or not slots > 0:
        return 100.0
    taken = [known[p.counter].low * _slots(p, properties) for p in parts if p.counter in known]
    left = 4 * issue.high - sum(share for share in taken if not math.isnan(share))
    return min(max(left, 0.0) / slots, 100.0)


def _slots(part: sampled.Part, properties: Properties) -> float:
    """Warp instructions a cycle and SM that a part takes; NaN where that is not known."""
    if isinstance(part.slots, str):
        return properties[part.slots] / 64
    return math.nan if part.slots is None else part.slots


def _pipe_rates(found: dict[str, list[Value | None]], rates: DeviceRates) -> None:
    clock = rates.clock_ghz()
    for rate in sampled.PIPE_RATES:
        if rate.pipe not in found:
            continue
        factors = rates.properties["sm_count"] * clock * 1e6 * rates.mean_ms * rates.properties[rate.rate] / 100
        found[rate.counter] = [
            None if value is None or value.standard_error is None or not math.isfinite(factor)
            else Value(
                value.value * factor, value.standard_error * factor, value.low * factor, value.high * factor, None,
                value.lasting * factor,
            )
            for value, factor in zip(found[rate.pipe], factors.tolist(), strict=True)
        ]  # fmt: skip


def combined(values: Sequence[tuple[float, Value]]) -> Value:
    """Of several devices, by time: (time, value). Their intervals are added, which is never too narrow."""
    total = sum(time for time, _ in values)
    shares = [(time / total, value) for time, value in values]
    errors = [value.standard_error for _, value in values]
    error = None
    if all(e is not None for e in errors):
        error = math.sqrt(sum((s * (v.standard_error or 0.0)) ** 2 for s, v in shares))
    missing = sorted({name for _, v in shares if v.missing for name in v.missing.split(", ")})
    return Value(
        sum(s * v.value for s, v in shares),
        error,
        sum(s * v.low for s, v in shares),
        sum(s * v.high for s, v in shares),
        ", ".join(missing) or None,
        sum(s * v.lasting for s, v in shares),
    )
