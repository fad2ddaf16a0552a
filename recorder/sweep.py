"""What a measurement is asked to do: configurations, variants and options, checked before anything runs."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanalyze.recorder.exact import FULL, VERDICT
from nanalyze.rundir.counters import COUNTERS
from nanalyze.rundir.errors import RecorderError
from nanalyze.rundir.measurement import ATTRIBUTE, COMBINATIONS

CACHES = ("none", "cold", "warm")
LONGEST_VALUE = 60
UNNAMED = "measure"  # the label of a configuration without parameters

Functions = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class Configuration:
    """One point of a sweep: `parameters` by name, and the label that names its range."""

    index: int
    parameters: Mapping[str, Any]
    label: str

    @property
    def attributes(self) -> dict[str, Any]:
        """The parameters as JSON can hold them: numbers, booleans and text stay, anything else is its text."""
        return {name: plain(value) for name, value in self.parameters.items()}


def plain(value: Any) -> Any:
    """`value` itself where JSON has its type, else its text."""
    return value if value is None or isinstance(value, bool | int | float | str) else text(value)


def text(value: Any) -> str:
    """A value as it stands in labels: the name of a function or class, else its text, cut to 60 characters."""
    name = getattr(value, "__name__", None)
    found = name if isinstance(name, str) else str(value)
    return found if len(found) <= LONGEST_VALUE else found[: LONGEST_VALUE - 1] + "…"


def configurations(given: Any, names: Sequence[str]) -> list[Configuration]:
    """The configurations that `given` stands for; `names` are those of the function's parameters.

    None is a single one without parameters. A mapping of lists is their product. Otherwise each item is
    one configuration: a mapping by name, a tuple or list in the order of `names`, anything else the value of
    the first parameter. Raises RecorderError.
    """
    if given is None:
        return [Configuration(0, {}, UNNAMED)]
    found = [_parameters(item, names) for item in _items(given)]
    if not found:
        raise RecorderError("configurations: there is none. Leave it out to measure once, without parameters.")
    labels = [", ".join(f"{name}={text(value)}" for name, value in each.items()) or UNNAMED for each in found]
    return [
        Configuration(index, each, label if labels.count(label) == 1 else f"{label} #{index}")
        for index, (each, label) in enumerate(zip(found, labels, strict=True))
    ]


def _items(given: Any) -> Iterable[Any]:
    if isinstance(given, Mapping):
        lists = [[value] if isinstance(value, str) or not _is_iterable(value) else value for value in given.values()]
        return [dict(zip(given, values, strict=True)) for values in itertools.product(*lists)]
    if isinstance(given, str) or not _is_iterable(given):
        raise RecorderError(f"configurations={given!r}: give a list of them, or a mapping of names to lists")
    return given  # type: ignore[no-any-return]


def kept(given: Any) -> Any:
    """`given` in a form that can be gone through again and again: iterators become lists."""
    if isinstance(given, Mapping):
        return {name: list(values) if isinstance(values, Iterator) else values for name, values in given.items()}
    return list(given) if isinstance(given, Iterator) else given


def _is_iterable(value: Any) -> bool:
    return isinstance(value, Iterable)


def _parameters(item: Any, names: Sequence[str]) -> dict[str, Any]:
    if isinstance(item, Mapping):
        found = {str(name): value for name, value in item.items()}
    else:
        values = tuple(item) if isinstance(item, tuple | list) else (item,)
        if len(values) > len(names):
            raise RecorderError(
                f"configuration {item!r}: {len(values)} values for {len(names)} named parameters "
                f"({', '.join(names) or 'none'}). Give a mapping of names to values."
            )
        found = dict(zip(names, values, strict=False))
    if ATTRIBUTE in found:
        raise RecorderError(f"configuration {item!r}: a parameter cannot be called {ATTRIBUTE!r}. Rename it.")
    return found


def parameter_names(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters in order, those by keyword only too; empty where they cannot be known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def variants(given: Any) -> dict[str, Callable[..., Any]]:
    """The functions to measure, by name. Raises RecorderError."""
    if callable(given):
        return {_name(given): given}
    if isinstance(given, Mapping):
        found = {str(name): function for name, function in given.items()}
    else:
        functions = list(given)
        found = {_name(function): function for function in functions}
        if len(found) < len(functions):
            raise RecorderError("variants: two functions have the same name. Give a mapping of names to functions.")
    if not found:
        raise RecorderError("variants: there is none. Give a function, or several.")
    for name, function in found.items():
        if not callable(function):
            raise RecorderError(f"variant {name!r}: is not a function but {type(function).__name__}")
    return found


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", None) or type(function).__name__)


Derived = Mapping[str, Callable[..., float] | tuple[Callable[..., float], str]]
Collected = Mapping[str, Callable[..., float | None] | tuple[Callable[..., float | None], str]]
Combine = Mapping[str, str | Callable[[float, float], float]]


@dataclass(frozen=True)
class Plan:
    """Everything `recorder.measure` was asked for but functions and configurations; see there."""

    run_dir: str | Path | None = None
    append: bool = False
    setup: Callable[..., Any] | None = None
    repetitions: int = 30
    until_pct: float | None = None
    limit_s: float | None = None
    warmup: int = 3
    seed: int = 0
    cache: str = "none"
    clocks: str | int = "none"
    headroom_c: float | None = None
    headroom_limit_s: float = 60.0
    counters: Any = VERDICT
    counter_repetitions: int = 2
    ignore: str | None = None
    derive: Derived = field(default_factory=dict)
    combine: Combine = field(default_factory=dict)
    collect: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    collect_each: Collected = field(default_factory=dict)
    keep: bool = True
    synchronize: bool = True
    progress: bool | None = None

    def __post_init__(self) -> None:
        for name, least in (("repetitions", 1), ("warmup", 0), ("counter_repetitions", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise RecorderError(f"{name}={value!r}: must be a whole number of at least {least}")
        for name in ("until_pct", "limit_s", "headroom_c", "headroom_limit_s"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
                raise RecorderError(f"{name}={value!r}: must be a number above 0, or None")
        if self.cache not in CACHES:
            raise RecorderError(f"cache={self.cache!r}: must be one of {', '.join(CACHES)}")
        if self.ignore is not None:
            try:
                re.compile(self.ignore)
            except (re.error, TypeError) as error:
                raise RecorderError(f"ignore={self.ignore!r}: not a regular expression: {error}") from None
        for name, how in self.combine.items():
            if how not in COMBINATIONS and not callable(how):
                raise RecorderError(
                    f"combine: {name!r} by {how!r}: give {', '.join(COMBINATIONS)} or a function of two"
                )
        self.metrics()  # so that a wrong one is found before anything ran
        from nanalyze.recorder import clocks

        clocks.check(self.clocks)

    def metrics(self) -> str | list[str] | None:
        """What `Exact(metrics=)` takes: a set's name, or raw metrics; None for no counters.

        Counters of `nanalyze.rundir.counters` may be given by their names. The duration is always among them:
        beside the undisturbed time it says what counting did to the measurement.
        """
        if self.counters is None or self.counters is False:
            return None
        if isinstance(self.counters, str):
            if self.counters not in (FULL, VERDICT):
                raise RecorderError(
                    f"counters={self.counters!r}: give {FULL!r}, {VERDICT!r}, a list of counters or None"
                )
            return self.counters
        known = {counter.name: list(counter.raw) for counter in COUNTERS}
        raw = [name for given in self.counters for name in known.get(str(given), [str(given)])]
        return list(dict.fromkeys([*raw, *known["duration_ns"]])) if raw else None

    def settings(self) -> dict[str, Any]:
        """What the run directory keeps of it."""
        kept = ("repetitions", "until_pct", "limit_s", "warmup", "seed", "cache", "clocks", "headroom_c", "ignore")
        units = {name: given[1] for name, given in self.collect_each.items() if isinstance(given, tuple)}
        return {name: getattr(self, name) for name in kept} | {"counters": self.metrics(), "collect_units": units}
