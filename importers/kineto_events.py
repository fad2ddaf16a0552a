"""Turns the events of one trace into columns: kernels, copies, launch calls, ranges, counters."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw

from nanalyze.importers import kineto_numbers as numbers
from nanalyze.importers.kineto_args import ARRAYS, COLLECTIVE, Args, CallArgs, CopyArgs, KernelArgs, OnGpu
from nanalyze.importers.kineto_clock import COLLECTIVE_KERNEL, Collectives
from nanalyze.importers.kineto_json import Event
from nanalyze.importers.kineto_spool import Column, Spool, replaced
from nanalyze.importers.options import Options
from nanalyze.importers.sink import Sink
from nanalyze.rundir.classes import KernelClass

MOST_CATEGORIES = 100  # counted by name; a damaged file may hold any number
UNNAMED = ("", "__missing__")
NOT_METRICS = ("External id", "Ev Idx", "correlation", "device", "context", "stream")
# Arguments of an annotation that say nothing about it: ids within the trace, and what the profiler adds to any event.
NOISE = frozenset(
    (
        "External id",
        "Record function id",
        "Ev Idx",
        "Profiler Event Index",
        "Trace name",
        "Trace iteration",
        "Fwd thread id",
        "Sequence number",
        "Concrete Inputs",
        "Input Dims",
        "Input type",
        "Input Strides",
        "Call stack",
        "Module Hierarchy",
    )
)
COLLECTIVE_OPERATOR = b'"record_param_comms"'
# What a kernel of a collective tells beyond what any kernel tells.
KERNEL_FACTS = frozenset(
    (
        "External id",
        "queued",
        "device",
        "context",
        "stream",
        "correlation",
        "registers per thread",
        "shared memory",
        "blocks per SM",
        "warps per SM",
        "grid",
        "block",
        "est. achieved occupancy %",
        "graph id",
        "graph node id",
        "kind",
    )
)

_COPY_NAME = re.compile(r"Mem(?:cpy|set)\s+(\w+)?\s*\((?:(\w+)\s*->\s*)?(\w+)\)")
_ANY = msgspec.json.Decoder(dict[str, Any])
_TEXTS = msgspec.json.Decoder(list[str])


class Texts:
    """Texts that repeat, each kept once under a number."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._texts: list[str] = []

    def ids(self, texts: Sequence[str | None]) -> Column:
        """The numbers of `texts`, masked for None."""
        return _column([None if text is None else self.id(text) for text in texts])

    def id(self, text: str) -> int:
        """The number of `text`."""
        known = self._ids.get(text)
        if known is None:
            known = self._ids[text] = len(self._texts)
            self._texts.append(text)
        return known

    def get(self, ids: Column) -> list[str | None]:
        """The texts behind `ids`."""
        return [None if id_ is None else self._texts[id_] for id_ in ids.tolist()]


class Collected:
    """What one trace holds, times still as the trace counts them."""

    def __init__(self, sink: Sink, options: Options) -> None:
        self.kernels, self.copies, self.calls = Spool(), Spool(), Spool()
        self.ranges, self.exact = Spool(), Spool()
        self.texts = Texts()  # names, sources and attributes of ranges, names of metrics
        self.collectives = Collectives()
        self.classes: dict[int, tuple[KernelClass, str]] = {}
        self.renamed: dict[int, int] = {}  # classes that the sink keeps under another id
        self.labels: list[tuple[str, str | None, str | None]] = []  # of copies: kind, source, destination
        self.copied: dict[int, int] = {}  # bytes by correlation id, where only the call tells them
        self.pid: int | None = None
        self.devices: Counter[int] = Counter()
        self._sink = sink
        self._device = options.device
        self._collective_classes: set[int] = set()
        self._class_ids: dict[tuple[Any, ...], int] = {}
        self._label_ids: dict[tuple[str, str | None, str | None], int] = {}
        self._categories: set[str] = set()
        self._streams: dict[str, int] = {}
        self._measured = 0
        self._handlers: dict[str, Callable[[list[Event]], None]] = {
            "kernel": self._add_kernels,
            "gpu_memcpy": self._add_copies,
            "memcpy": self._add_copies,
            "gpu_memset": self._add_copies,
            "memset": self._add_copies,
            "cuda_runtime": self._add_calls,
            "cuda_driver": self._add_calls,
            "runtime": self._add_calls,
            "hip_runtime": self._add_calls,
            "xpu_runtime": self._add_calls,
            "privateuse1_runtime": self._add_calls,
            "user_annotation": self._add_annotations,
            "cpu_op": self._add_operators,
            "operator": self._add_operators,
            "cuda_profiler_range": self._add_counters,
        }

    def add(self, events: list[Event]) -> None:
        """Take the events of one chunk."""
        groups: dict[str | None, list[Event]] = defaultdict(list)
        for event in events:
            groups[event.cat].append(event)
        for category, group in groups.items():
            self._count(category, len(group))
            # Traces before PyTorch 1.12 write Kernel, Memcpy, Runtime.
            handler = self._handlers.get(category.lower()) if category else None
            if handler is not None:
                handler(group)

    def stored_ids(self, class_ids: Column) -> Column:
        """Class ids as the sink has them: it takes out what a class cannot be."""
        for given, stored in self.renamed.items():
            class_ids = replaced(class_ids, class_ids.data == given, stored)
        return class_ids

    def close(self) -> None:
        for spool in (self.kernels, self.copies, self.calls, self.ranges, self.exact):
            spool.close()

    def _count(self, category: str | None, count: int) -> None:
        name = category or "no category"
        if name not in self._categories and len(self._categories) >= MOST_CATEGORIES:
            name = "further categories"
        self._categories.add(name)
        self._sink.count(f"{name} events", count)

    # --- the GPU -----------------------------------------------------------------------------------

    def _add_kernels(self, group: list[Event]) -> None:
        group = self._complete(group, "kernel")
        args = self._args(KernelArgs, group)
        group, args = self._chosen(group, args)
        if not group:
            return
        names = self._names(group)
        times = self._times(group)
        devices = self._device_ids(args, group)
        classes = [self._class_id(name, a) for name, a in zip(names, args, strict=True)]
        self.kernels.add(
            {
                **times,
                "kernel_class_id": np.array(classes, np.int64),
                "device_id": _column(devices),
                "context_id": _column([a.context for a in args]),
                "stream_id": self._streams_of(args),
                "graph_id": _column([a.graph or None for a in args]),
                "graph_node_id": _column([a.node or None for a in args]),
                "correlation_id": _column([a.correlation for a in args]),
            }
        )
        self.devices.update(device for device in devices if device is not None)
        self._add_collectives(group, args, classes, times)

    def _class_id(self, name: str, args: KernelArgs) -> int:
        key = (name, args.grid, args.block, args.registers, args.shared)
        known = self._class_ids.get(key)
        if known is None:
            kernel = KernelClass(
                name.encode("utf-8", "backslashreplace"),
                args.grid or (0, 0, 0),
                args.block or (0, 0, 0),
                registers_per_thread=args.registers,
                # Only the sum is told; where it stands makes no difference to the occupancy.
                static_shared_bytes=None if args.shared is None else 0,
                dynamic_shared_bytes=args.shared,
            )
            known = self._class_ids[key] = self._register(kernel, name)
        return known

    def _register(self, kernel: KernelClass, name: str) -> int:
        id_ = kernel.id
        self.classes[id_] = kernel, name
        if COLLECTIVE_KERNEL.match(name):
            self._collective_classes.add(id_)
        return id_

    def _add_collectives(
        self, group: list[Event], args: list[KernelArgs], classes: list[int], times: dict[str, Any]
    ) -> None:
        """Keep when collectives ended, and what they tell of themselves."""
        known = self._collective_classes
        rows = [row for row, id_ in enumerate(classes) if id_ in known or args[row].collective is not None]
        found: list[dict[str, Any]] = []
        for row in rows:
            start, duration = times["start_ns"][row], times["duration_ns"][row]
            facts = self._facts(group[row], KERNEL_FACTS) if args[row].collective is not None else {}
            if start is np.ma.masked or duration is np.ma.masked:
                continue
            told = [facts.get(key) for key in (COLLECTIVE, "Process Group Name", "In msg nelems", "dtype")]
            self.collectives.add(
                json.dumps(told) if facts else self.classes[classes[row]][1], int(start) + int(duration)
            )
            if facts:
                found.append(
                    {
                        "name": str(facts[COLLECTIVE]),
                        "source": "collective",
                        "correlation_id": args[row].correlation,
                        "start_ns": int(start),
                        "end_ns": int(start) + int(duration),
                        "attributes": facts,
                    }
                )
        self._keep_ranges(found)

    def _add_copies(self, group: list[Event]) -> None:
        group = self._complete(group, "copy")
        args = self._args(CopyArgs, group)
        group, args = self._chosen(group, args)
        if not group:
            return
        names = self._names(group)
        self.copies.add(
            {
                **self._times(group),
                "label": np.array([self._label(n, a) for n, a in zip(names, args, strict=True)], np.int64),
                "bytes": _column([a.bytes for a in args]),
                "device_id": _column(self._device_ids(args, group)),
                "source_device_id": _column([a.source for a in args]),
                "destination_device_id": _column([a.destination for a in args]),
                "context_id": _column([a.context for a in args]),
                "stream_id": self._streams_of(args),
                "correlation_id": _column([a.correlation for a in args]),
            }
        )

    def _label(self, name: str, args: CopyArgs) -> int:
        match = _COPY_NAME.search(name)
        kind, source, destination = match.groups() if match else (None, None, None)
        if name.startswith("Memset"):
            kind = "memset"
        label = (
            kind or (args.kind if isinstance(args.kind, str) else None) or name or "unknown",
            source and source.lower(),
            destination and destination.lower(),
        )
        if label not in self._label_ids:
            self._label_ids[label] = len(self.labels)
            self.labels.append(label)
        return self._label_ids[label]

    # --- the host ----------------------------------------------------------------------------------

    def _add_calls(self, group: list[Event]) -> None:
        """Launch calls, which say when a kernel was queued; of HIP's copies, how much they copy."""
        names = [bytes(event.name) for event in group]
        launches = [event for event, name in zip(group, names, strict=True) if b"aunch" in name]
        if self.pid is None and group:
            self.pid = numbers.integer(_value(group[0].pid))
        if launches:
            starts, missing = numbers.exact_ns([event.ts for event in launches])
            correlations = _column([args.correlation for args in self._args(CallArgs, launches)])
            known = ~(missing | np.ma.getmaskarray(correlations))
            self.calls.add({"correlation_id": correlations.data[known], "start_ns": starts[known]})
        copies = [event for event, name in zip(group, names, strict=True) if name.startswith(b'"hipMem')]
        for args in self._args(CallArgs, copies):
            size = numbers.integer(args.size)
            if args.correlation is not None and size is not None:
                self.copied[args.correlation] = size

    def _add_annotations(self, group: list[Event]) -> None:
        group = self._complete(group, "annotation")
        names = self._names(group)
        self._keep_ranges(
            [
                self._range(event, name, "record_function", self._facts(event, NOISE))
                for event, name in zip(group, names, strict=True)
            ]
        )

    def _add_operators(self, group: list[Event]) -> None:
        """Of operators, only those that say what a collective does."""
        size = len(COLLECTIVE_OPERATOR)  # compared first: operators are the most of many traces
        named = [event for event in group if len(event.name) == size and bytes(event.name) == COLLECTIVE_OPERATOR]
        told = [(event, self._facts(event, NOISE)) for event in named]
        self._keep_ranges(
            [
                self._range(event, str(facts[COLLECTIVE]), "collective", facts)
                for event, facts in told
                if COLLECTIVE in facts
            ]
        )

    def _range(self, event: Event, name: str, source: str, facts: dict[str, Any]) -> dict[str, Any]:
        start, duration = numbers.span_ns(bytes(event.ts), bytes(event.dur))
        is_open = start is None or duration is None or duration < 0
        return {
            "name": name,
            "source": source,
            "thread_id": numbers.identifier(_value(event.tid)),
            "start_ns": start,
            "end_ns": None if is_open else start + duration,  # type: ignore[operator]
            "attributes": facts,
        }

    def _keep_ranges(self, rows: list[dict[str, Any]]) -> None:
        kept = [row for row in rows if row["start_ns"] is not None]
        self._sink.refuse("ranges without a start", len(rows) - len(kept))
        if not kept:
            return
        attributes = [json.dumps(row["attributes"], ensure_ascii=False) if row["attributes"] else None for row in kept]
        numbers_ = ("thread_id", "start_ns", "end_ns", "correlation_id")
        self.ranges.add(
            {
                **{name: _column([row.get(name) for row in kept]) for name in numbers_},
                **{name: self.texts.ids([row[name] for row in kept]) for name in ("name", "source")},
                "attributes": self.texts.ids(attributes),
            }
        )

    # --- counters ----------------------------------------------------------------------------------

    def _add_counters(self, group: list[Event]) -> None:
        """Events of the range profiler: one a kernel, its arguments are metrics."""
        rows: list[tuple[int, int, int, int, str, float]] = []
        for event, name in zip(group, self._names(group), strict=True):
            device = self._device_id(None, event) or 0
            if self._device is not None and str(device) != self._device:
                continue
            self._measured += 1
            if name in UNNAMED:
                self._sink.refuse("names of kernels in cuda_profiler_range events that the profiler did not know")
            class_id = self._class_id(name or "__missing__", KernelArgs())
            start, duration = numbers.span_ns(bytes(event.ts), bytes(event.dur))
            end = (start or 0) + max(duration or 0, 0)
            rows += [(self._measured, end, device, class_id, *metric) for metric in self._metrics(event)]
        if rows:
            launches, ends, devices, classes, metrics, values = zip(*rows, strict=True)
            self.exact.add(
                {
                    "launch": np.array(launches, np.int64),
                    "measured_ns": np.array(ends, np.int64),
                    "device_id": np.array(devices, np.int64),
                    "kernel_class_id": np.array(classes, np.int64),
                    "metric": self.texts.ids(list(metrics)),
                    "value": np.array(values, np.float64),
                }
            )

    def _metrics(self, event: Event) -> list[tuple[str, float]]:
        values = {name: _number(value) for name, value in self._facts(event, frozenset(NOT_METRICS)).items()}
        known = [(name, value) for name, value in values.items() if value is not None]
        self._sink.refuse("metrics without a finite number", len(values) - len(known))
        return known

    # --- parts of events ---------------------------------------------------------------------------

    def _complete(self, group: list[Event], what: str) -> list[Event]:
        complete = [event for event in group if bytes(event.ph) == b'"X"']
        self._sink.refuse(f"{what} events that are not complete events (ph is not X)", len(group) - len(complete))
        return complete

    def _chosen(self, group: list[Event], args: list[OnGpu]) -> tuple[list[Event], list[OnGpu]]:
        """Only what ran on the device that was asked for."""
        if self._device is None:
            return group, args
        kept = [
            (event, a)
            for event, a in zip(group, args, strict=True)
            if str(self._device_id(a.device, event)) == self._device
        ]
        self._sink.refuse("GPU events of other devices", len(group) - len(kept))
        return [event for event, _ in kept], [a for _, a in kept]

    def _times(self, group: list[Event]) -> dict[str, Any]:
        starts, no_start, durations, no_duration = numbers.spans_ns(
            [event.ts for event in group], [event.dur for event in group]
        )
        backwards = durations < 0
        self._sink.refuse("GPU work without a start", int(no_start.sum()))
        self._sink.refuse("GPU work without a duration", int(no_duration.sum()))
        self._sink.refuse("durations of GPU work that ends before it starts", int(backwards.sum()))
        return {
            "start_ns": np.ma.MaskedArray(starts, mask=no_start),
            "duration_ns": np.ma.MaskedArray(durations, mask=no_duration | backwards),
        }

    def _names(self, group: Sequence[Event]) -> list[str]:
        try:
            names = _TEXTS.decode(b"[" + b",".join([event.name for event in group]) + b"]")
        except numbers.UNDECODABLE:
            names = []
        if len(names) == len(group):
            return names
        told = [numbers.text_of(bytes(event.name)) for event in group]
        self._sink.refuse("names of GPU work or ranges that are missing", sum(name is None for name in told))
        return [name or "(no name)" for name in told]

    def _args(self, kind: type[Args], group: list[Event]) -> list[Args]:
        """All at once where all have the declared types; else one by one."""
        try:
            decoded: list[Args] = ARRAYS[kind].decode(b"[" + b",".join([event.args for event in group]) + b"]")
        except numbers.UNDECODABLE:
            decoded = []
        if len(decoded) == len(group):
            return decoded
        return [kind.tolerant(self._facts(event)) for event in group]

    def _facts(self, event: Event, without: frozenset[str] = frozenset()) -> dict[str, Any]:
        """An event's arguments as they are; none where they are no object."""
        try:
            args = _ANY.decode(event.args)
        except numbers.UNDECODABLE:
            if len(event.args):
                self._sink.refuse("arguments of events that cannot be read")
            return {}
        return {name: value for name, value in args.items() if name not in without}

    def _device_ids(self, args: Sequence[KernelArgs | CopyArgs], group: list[Event]) -> list[int | None]:
        devices = [a.device for a in args]
        if None not in devices:
            return devices
        return [self._device_id(device, event) for device, event in zip(devices, group, strict=True)]

    @staticmethod
    def _device_id(device: int | None, event: Event) -> int | None:
        """GPU events stand under the device as their process."""
        return device if device is not None else numbers.integer(_value(event.pid))

    def _streams_of(self, args: Sequence[KernelArgs | CopyArgs]) -> Column:
        streams = [a.stream for a in args]
        try:
            return np.ma.MaskedArray(np.array(streams, dtype=np.int64), mask=False)
        except (TypeError, ValueError, OverflowError):  # missing, or text
            return _column([self._stream(stream) for stream in streams])

    def _stream(self, stream: int | str | None) -> int | None:
        if not isinstance(stream, str):
            return stream
        known = self._streams.get(stream)
        if known is None:
            number = numbers.identifier(stream)
            if number is None:
                return None
            known = self._streams[stream] = number
        return known


def _column(values: Sequence[int | None]) -> Column:
    """As int64, masked where there is none (or none that fits)."""
    missing = values.count(None)
    if missing == len(values):
        return np.ma.MaskedArray(np.zeros(len(values), np.int64), mask=True)
    try:
        if not missing:
            return np.ma.MaskedArray(np.array(values, dtype=np.int64), mask=False)
    except OverflowError:
        pass
    gone = [value is None or abs(value) >= 2**63 for value in values]
    filled = [0 if is_gone or value is None else value for value, is_gone in zip(values, gone, strict=True)]
    return np.ma.MaskedArray(np.array(filled, dtype=np.int64), mask=gone)


def _value(raw: Raw) -> Any:
    """A number or text; None for anything else."""
    try:
        return msgspec.json.decode(raw, type=int | str | float)
    except numbers.UNDECODABLE:
        return None


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if np.isfinite(number) else None
