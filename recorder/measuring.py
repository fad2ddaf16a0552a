"""Controlled measurements: variants over configurations, first their undisturbed times, then their counters.

    @recorder.measure(configurations={"n": [1024, 4096]})
    def norm(n):
        x = torch.randn(n, n, device="cuda")
        with recorder.annotate("eager"):
            eager(x)
        with recorder.annotate("fused"):
            fused(x)

    result = norm()
    result.to_pandas()
    result.compare("eager", "fused", n=4096)

Everything lands in a run directory like any other. A block (all repetitions of a configuration) is a range
named after the configuration, with its parameters as attributes; in it, each call of a variant is a range
named after the variant. Times come from recordings without counters, counters from later recordings
appended to the same run, so that no time is ever taken under the counter session.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import math
import random
import re
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanalyze.recorder import caches, clocks, device, passes, ranges, sweep
from nanalyze.recorder.progress import Bar
from nanalyze.recorder.session import Recorder, UnderWay, warn
from nanalyze.recorder.sweep import Configuration, Plan
from nanalyze.rundir.errors import NanalyzeError, RecorderError
from nanalyze.rundir.measurement import ATTRIBUTE, COLLECTED, WARM_UP

if TYPE_CHECKING:
    from nanalyze.analysis.measured import Measured

TIMES, COUNTERS = "times", "counters"
READ_EVERY_S = 0.1  # at most so often clocks are read between two calls: 0.4 to 3 ms each on an H200
ANY_NUMBER = 1 << 40
# Repetitions until the interval is narrow enough: the blocks double, and this is when that ends.
MOST_REPETITIONS = 2_000
MOST_WARNINGS = 6  # printed; the result has them all


def measure(functions: Any = None, configurations: Any = None, **options: Any) -> Any:
    """Measure variants over configurations; as a decorator or a function.

    As a decorator, `@measure` or `@measure(configurations=..., ...)`, the annotations inside the function are
    its variants; without any, the whole function is one. Calling the decorated function measures and returns
    the result; arguments given are a single configuration, `configurations=` replaces the decorator's.
    As a function, `measure([eager, fused], configurations, ...)` or `measure({"eager": f, ...}, ...)` measures
    at once, as does a single function with configurations.

    `configurations`: a list of values, tuples or dicts, or a dict of lists (their product).
    `setup(**parameters)`: makes the arguments of a configuration, outside of what is measured: a tuple is
    positional, a dict by name, anything else one argument; without it functions get the parameters.
    `repetitions`: of each variant; with `until_pct` further ones follow until the 95 % interval of the mean
    kernel time is within that percentage on either side; `limit_s` ends a configuration after so many seconds.
    `warmup`: calls before, not measured. `seed`: of the random order of variants in each repetition.
    `cache`: "cold" (L2 emptied before each range), "warm" (the call made once before) or "none".
    `clocks`: "base", "boost" or MHz to hold the SM clock (needs root), "none" to leave it.
    `headroom_c`: wait before each configuration until the GPU is so far below its slowdown temperature, at
    most `headroom_limit_s`.
    `counters`: "verdict", "full", a list of counters or metrics, or None; of `counter_repetitions` calls.
    `ignore`: a regular expression; kernels whose name matches count for nothing.
    `derive`: by name, functions of (metrics, **parameters) or pairs of one and its unit.
    `combine`: by counter, how those of several launches in a call become one: "sum", "mean" (by time), "max", "min"
    or a function of two numbers. Default: sums of what adds up, else the mean.
    `collect`: by name, functions of (**parameters), called once a configuration, kept as its attributes.
    `collect_each`: by name, functions of (**parameters) that give a number or None, or pairs of one and its unit:
    called after each timed call, outside of its range; further metrics.
    `keep`: whether the last value each variant returned is kept, in `result.values`.
    `synchronize`: whether the device is waited for after each range.
    `run_dir` (a name with the time by default), `append`, `progress` (whether a bar is shown).

    Raises RecorderError for wrong options, and while another recording is in progress.
    """
    plan = _plan(options)
    if functions is None or (callable(functions) and configurations is None):
        decorate = functools.partial(Measuring, configurations=configurations, plan=plan)
        return decorate if functions is None else decorate(functions)
    return _run(sweep.variants(functions), configurations, plan, inside=callable(functions))


def _plan(options: Mapping[str, Any]) -> Plan:
    unknown = [name for name in options if name not in Plan.__dataclass_fields__]
    if unknown:
        raise RecorderError(f"unknown option {unknown[0]!r}: measure takes {', '.join(Plan.__dataclass_fields__)}")
    return Plan(**options)


class Measuring:
    """A function under `@measure`: calling it measures and returns a `Measured`; `function` is the original."""

    def __init__(self, function: Callable[..., Any], configurations: Any, plan: Plan) -> None:
        self.function = function
        self.configurations = sweep.kept(configurations)
        self.plan = plan
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, configurations: Any = None, **parameters: Any) -> Measured:
        given = self.configurations if configurations is None else configurations
        if args or parameters:
            if configurations is not None:
                raise RecorderError("give either arguments, which are one configuration, or configurations=")
            given = [_bound(self.plan.setup or self.function, args, parameters)]
        return _run(sweep.variants(self.function), given, self.plan, inside=True)


def _bound(function: Callable[..., Any], args: tuple[Any, ...], parameters: dict[str, Any]) -> dict[str, Any]:
    return dict(inspect.signature(function).bind(*args, **parameters).arguments)


def _run(functions: dict[str, Callable[..., Any]], configurations: Any, plan: Plan, *, inside: bool) -> Measured:
    first = plan.setup or next(iter(functions.values()))
    found = sweep.configurations(configurations, sweep.parameter_names(first))
    if plan.run_dir is None:
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", next(iter(functions)))[:40]
        plan = replace(plan, run_dir=f"measure-{name}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}")
    runner = _Sweep(functions, found, plan, inside=inside)
    runner.run()
    from nanalyze.analysis.measured import Measured

    result = Measured(
        Path(str(plan.run_dir)), runner.id, derive=plan.derive, combine=plan.combine, values=runner.values
    )
    _tell(result.warnings)
    return result


def _tell(lines: Sequence[str]) -> None:
    for line in lines[:MOST_WARNINGS]:
        warn(line)
    if len(lines) > MOST_WARNINGS:
        warn(f"{len(lines) - MOST_WARNINGS} more warnings are in the result's `warnings`")


@dataclass
class _State:
    """A configuration while it is measured: its arguments, its variants, and what went wrong, by variant."""

    configuration: Configuration
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    variants: list[str] = field(default_factory=list)  # functions to call
    annotations: list[str] = field(default_factory=list)  # inside of the one function; none if it is one variant
    errors: dict[str, str] = field(default_factory=dict)
    failed_ns: dict[str, int] = field(default_factory=dict)  # when the call began that did not end well
    collected: dict[str, Any] = field(default_factory=dict)

    @property
    def alive(self) -> list[str]:
        return [name for name in self.variants if name not in self.errors]


class _Sweep:
    """One measurement. `values` holds the last value returned, by (configuration label, variant)."""

    def __init__(
        self, functions: dict[str, Callable[..., Any]], found: list[Configuration], plan: Plan, *, inside: bool
    ) -> None:
        self.id = uuid.uuid4().hex[:12]
        self.functions = functions
        self.configurations = found
        self.plan = plan
        self.inside = inside
        self.values: dict[tuple[str, str], Any] = {}
        self._random = random.Random(plan.seed)
        self._recording: Recorder | None = None
        self._recordings = 0
        self._flush: caches.L2Flush | None = None
        self._read_at: dict[str, float] = {}
        self._failed: dict[int, dict[str, str]] = {}
        self._annotations: dict[int, list[str]] = {}
        self._collected: dict[int, dict[str, Any]] = {}

    def run(self) -> None:
        """Both phases. Only what is not an error of the measured code leaves it: RecorderError, Ctrl-C."""
        needs_uuid = self.plan.clocks != "none" or self.plan.headroom_c is not None
        self._uuid = _uuid_in_use() if needs_uuid else None
        with contextlib.ExitStack() as stack:
            stack.enter_context(_settled_objects())
            held = stack.enter_context(clocks.HeldClocks(self.plan.clocks, self._uuid, warn))
            self._clocks = held.refusal or ("held" if held.is_held else "not touched")
            if self.plan.cache == "cold":
                self._flush = stack.enter_context(caches.L2Flush())
            self._measure_times()
            metrics = self.plan.metrics()
            if metrics is not None:
                self._measure_counters(metrics)

    # -- recordings -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _record(self, exact: Any = None) -> Iterator[Recorder]:
        """A recording into the run directory; all but the first are appended."""
        from nanalyze import recorder

        append = self.plan.append or self._recordings > 0
        started = recorder.record(str(self.plan.run_dir), append=append, exact=exact, pause_pct=0, nvtx=False)
        if isinstance(started, UnderWay):
            raise RecorderError("measure records by itself: run the script without `nanalyze record`")
        self._recordings += 1
        with started:
            self._recording = started
            started._ranges.before_each = self._before_range
            try:
                yield started
            finally:
                self._recording = None

    def _measure_times(self) -> None:
        adaptive = self.plan.until_pct is not None
        total = len(self.configurations) * self.plan.repetitions
        with Bar("times", total, self.plan.progress) as bar:
            if adaptive:
                for configuration in self.configurations:
                    self._measure_until(configuration, bar)
                return
            with self._record() as recording:
                self._describe()
                for configuration in self.configurations:
                    state = self._prepare(configuration, TIMES)
                    self._block(state, TIMES, self.plan.repetitions, recording, bar)
                    self._finish(state)

    def _measure_until(self, configuration: Configuration, bar: Bar) -> None:
        """Blocks that double, each a recording, until the interval is narrow or time or patience is up."""
        from nanalyze.analysis import measured

        started, count, done = time.monotonic(), self.plan.repetitions, 0
        state: _State | None = None
        while True:
            with self._record() as recording:
                if self._recordings == 1:
                    self._describe()
                state = state or self._prepare(configuration, TIMES)
                self._block(state, TIMES, count, recording, bar, started)
            done += count
            spread = measured.spread_pct(Path(str(self.plan.run_dir)), self.id, configuration.index)
            is_over = self.plan.limit_s is not None and time.monotonic() - started >= self.plan.limit_s
            if not state.alive or is_over or done >= MOST_REPETITIONS:
                break
            if spread is not None and spread <= (self.plan.until_pct or 0):
                break
            count = min(done, MOST_REPETITIONS - done)
            bar.total += count
        self._finish(state)

    def _measure_counters(self, metrics: str | Sequence[str]) -> None:
        from nanalyze.recorder.exact import Exact

        pattern = self._names_pattern()
        if pattern is None:
            return
        groups = self._metric_groups(metrics)
        total = len(groups) * len(self.configurations) * self.plan.counter_repetitions
        with Bar("counters", total, self.plan.progress) as bar:
            for group in groups:
                exact = Exact(first=ANY_NUMBER, budget_pct=100, metrics=group, ranges=pattern)
                with self._record(exact) as recording:
                    for configuration in self.configurations:
                        state = self._prepare(configuration, COUNTERS)
                        self._block(state, COUNTERS, self.plan.counter_repetitions, recording, bar)
                        self._finish(state)
                    layer = recording._exact
                    if layer is None or layer.failure is not None:
                        return  # it has said why; the other groups would fail alike

    def _metric_groups(self, metrics: str | Sequence[str]) -> list[Any]:
        """All at once, or in groups of one pass where a second pass would find other caches than the first."""
        if self.plan.cache == "none":
            return [metrics]
        try:
            return list(passes.single_pass_groups(metrics)) or [metrics]
        except NanalyzeError as error:
            warn(f"counters are measured in several passes, of which later ones find warm caches: {error}")
            return [metrics]

    def _names_pattern(self) -> str | None:
        names = set() if self.inside else set(self.functions)
        for found in self._annotations.values():
            names.update(found or self.functions)
        return f"^(?:{'|'.join(re.escape(name) for name in sorted(names))})$" if names else None

    def _describe(self) -> None:
        """An empty range that holds what was asked for."""
        about = {
            "id": self.id,
            **self.plan.settings(),
            "clocks_in_effect": self._clocks,
            "functions": list(self.functions),
            "configurations": [configuration.label for configuration in self.configurations],
        }
        with _range(f"{ATTRIBUTE} {', '.join(self.functions)}", {ATTRIBUTE: about}):
            pass

    # -- one configuration ----------------------------------------------------------------------

    def _prepare(self, configuration: Configuration, phase: str) -> _State:
        """Arguments, collected facts and warm-up of a configuration; a failure is noted in its state."""
        state = _State(configuration, variants=list(self.functions))
        state.errors.update(self._failed.get(configuration.index, {}))
        if not state.alive:
            return state
        if self._uuid is not None and self.plan.headroom_c is not None:
            trouble = clocks.await_headroom(self._uuid, self.plan.headroom_c, self.plan.headroom_limit_s)
            if trouble is not None:
                warn(f"{configuration.label}: measured all the same: {trouble}")
        with self._aside():
            with _noted(state, state.alive), _unseen():
                state.args, state.kwargs = self._arguments(configuration)
                if phase == TIMES:
                    self._collect(configuration)
            if phase == TIMES:
                self._warm_up(state)
        state.collected = self._collected.get(configuration.index, {})
        state.annotations = self._annotations.get(configuration.index, [])
        return state

    def _aside(self) -> ranges.annotate:
        """The range of what is launched for no measurement, so that reports can show it apart."""
        return _range(WARM_UP, {ATTRIBUTE: {"id": self.id}})

    def _collect(self, configuration: Configuration) -> None:
        found = {name: collect(**configuration.parameters) for name, collect in self.plan.collect.items()}
        self._collected[configuration.index] = {name: sweep.plain(value) for name, value in found.items()}

    def _arguments(self, configuration: Configuration) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.plan.setup is None:
            return (), dict(configuration.parameters)
        made = self.plan.setup(**configuration.parameters)
        if isinstance(made, Mapping):
            return (), dict(made)
        return (made if isinstance(made, tuple) else (made,)), {}

    def _warm_up(self, state: _State) -> None:
        """Calls without a record; the first one of a single function also tells which annotations it has."""
        calls = max(self.plan.warmup, 1) if self.inside else self.plan.warmup
        for number in range(calls):
            for name in state.alive:
                log = ranges.RangeLog()
                with _noted(state, [name]), _unseen(log):
                    self._call(state, name)
                    caches.synchronize()
                if self.inside and number == 0:
                    found = [row["name"] for row in log.take(also_open=True) if row["depth"] == 0]
                    self._annotations[state.configuration.index] = list(dict.fromkeys(found))

    def _call(self, state: _State, name: str) -> Any:
        return self.functions[name](*state.args, **state.kwargs)

    def _block(
        self,
        state: _State,
        phase: str,
        repetitions: int,
        recording: Recorder,
        bar: Bar,
        started: float | None = None,
    ) -> None:
        """All repetitions of a configuration, in a range of their own.

        Clocks are read at its start, and at its end if it is long.
        """
        configuration = state.configuration
        about: dict[str, Any] = {
            "id": self.id,
            "phase": phase,
            "configuration": configuration.index,
            "inside": bool(state.annotations),
            "variants": state.annotations or list(self.functions),
            "parameters": list(configuration.parameters),
            "collected": state.collected,
            "failed_ns": state.failed_ns,
        }
        started = time.monotonic() if started is None else started
        with _range(configuration.label, {**configuration.attributes, ATTRIBUTE: about}):
            recording.observe()
            read_at = time.monotonic()
            for number in range(repetitions):
                if number >= 2 and self.plan.limit_s is not None and time.monotonic() - started >= self.plan.limit_s:
                    bar.step(configuration.label, repetitions - number)
                    break
                self._repetition(state, recording, phase)
                bar.step(configuration.label)
            if time.monotonic() - read_at >= READ_EVERY_S:
                recording.observe()
            if state.errors:
                about["errors"] = state.errors

    def _repetition(self, state: _State, recording: Recorder, phase: str) -> None:
        order = state.alive
        self._random.shuffle(order)
        for name in order:
            with _noted(state, [name]), _timed_if_failed(state, name):
                self._once(state, name)
                if phase == TIMES and self.plan.collect_each:
                    self._collect_each(state)
            if time.monotonic() - self._read_at.get(name, float("-inf")) >= READ_EVERY_S:
                recording.observe()
                self._read_at[name] = time.monotonic()

    def _once(self, state: _State, name: str) -> None:
        """One measured call."""
        if self.plan.cache == "warm":
            with self._aside(), _unseen():
                self._call(state, name)
        if state.annotations:
            value = self._call(state, name)
        else:
            with ranges.annotate(name):
                value = self._call(state, name)
        if self.plan.synchronize:
            caches.synchronize()
        if self.plan.keep:
            self.values[state.configuration.label, name] = value

    def _collect_each(self, state: _State) -> None:
        """An empty range behind the call holds what was collected after it."""
        found = {}
        for name, given in self.plan.collect_each.items():
            collect = given[0] if isinstance(given, tuple) else given
            with _unseen():
                value = collect(**state.configuration.parameters)
            number = None if value is None else float(value)
            found[name] = number if number is not None and math.isfinite(number) else None
        with _range(COLLECTED, {ATTRIBUTE: {"id": self.id, "collected": found}}):
            pass

    def _before_range(self, annotation: ranges.annotate, parent: ranges.OpenRange | None) -> None:
        """Empties L2 before a variant's range opens: before those directly in a block's."""
        is_variant = parent is not None and "phase" in _about(parent.annotation) and not _about(annotation)
        if self._flush is not None and is_variant:
            self._flush.flush()

    def _finish(self, state: _State) -> None:
        """Remember what failed, and let go of the configuration's memory.

        What a framework keeps for its next allocations, and garbage that may hold memory, stay unless memory is
        scarce: giving it back took 95 ms a configuration on an H200, as long as everything else in a short one.
        """
        self._failed[state.configuration.index] = dict(state.errors)
        state.args, state.kwargs = (), {}
        if caches.memory_is_scarce():
            release_memory()


def _range(name: str, attributes: dict[str, Any]) -> ranges.annotate:
    """A range whose attributes may have any names, `flops` and `bytes` too."""
    found = ranges.annotate(name)
    found.attributes = attributes
    return found


def _about(annotation: ranges.annotate) -> dict[str, Any]:
    """What a range of the measurement's own says of itself; empty for ranges of the job."""
    found = annotation.attributes.get(ATTRIBUTE)
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def _noted(state: _State, names: Sequence[str]) -> Iterator[None]:
    """An exception of the measured code ends those variants of the configuration, and nothing else."""
    try:
        yield
    except Exception as error:
        message = f"{type(error).__name__}: {error}".splitlines()[0][:500]
        for name in names:
            state.errors[name] = message
        warn(f"{state.configuration.label}, {', '.join(names)}: failed: {message}")
        _let_go(error)
        release_memory()


@contextlib.contextmanager
def _timed_if_failed(state: _State, name: str) -> Iterator[None]:
    """When a call began that ends with an exception, Ctrl-C too: of its launches some are missing."""
    started = time.time_ns()
    try:
        yield
    except BaseException:
        state.failed_ns[name] = started
        raise


def _let_go(error: BaseException | None) -> None:
    """Clear the frames that an exception, and those before it, came from: their locals hold the memory that lacked."""
    for _ in range(100):  # a chain may be a ring
        if error is None:
            return
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def _unseen(log: ranges.RangeLog | None = None) -> Iterator[None]:
    """Ranges opened meanwhile are none of the run's: they go to `log`, or nowhere."""
    before = ranges._log
    ranges.set_log(log)
    place = ranges._current.set(None)
    try:
        yield
    finally:
        ranges._current.reset(place)
        ranges.set_log(before)


@contextlib.contextmanager
def _settled_objects() -> Iterator[None]:
    """Garbage is looked for among new objects only: pandas and its like leave 60,000, which take 50 ms each time."""
    if gc.get_freeze_count():  # the job does so itself
        yield
        return
    gc.collect()  # what is garbage now may hold memory of the device, and would stay
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def release_memory() -> None:
    """Give back what a failed or finished configuration held; PyTorch's cached memory too, where it is loaded."""
    gc.collect()
    torch = sys.modules.get("torch")
    with contextlib.suppress(Exception):
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _uuid_in_use() -> str | None:
    """UUID of the GPU of the current context, as NVML knows it; None where there is none."""
    try:
        driver = device._driver()
        ordinal = caches.current_device(driver)
        rows = device.Devices().describe()
    except NanalyzeError:
        return None
    return next((row["uuid"] for row in rows if row["device_id"] == ordinal), None)
