"""Triton Proton: `.hatchet` profiles, JSON or MessagePack, a tree of scopes with kernels at its leaves.

Proton keeps sums: a node says how often its kernel ran and for how long in total. Each of those
launches becomes a row with the mean duration, so counts and totals are those of the file to the
nanosecond; single launches cannot be told apart. Nor is there a clock: `start_ns` is NULL, and
`queued_ns` and the ranges lie on a line on which the launches stand in the order of the tree, each
as long as it ran. A range is therefore as long as the kernels in it.

Every node with children is a range. Flops and bytes that the user gave, wherever they stand, go
to the range of that node; a kernel that has some gets a range of its own. Both spellings of the
metrics are known: `Count`, `Time (ns)`, `DeviceId` (2023) and `count`, `time (ns)`, `device_id`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from nanalyze.importers.demangling import Demangler
from nanalyze.importers.options import ImportFailed, Options
from nanalyze.importers.sink import Sink
from nanalyze.rundir.classes import KernelClass

KIND = "proton"

CHUNK_ROWS = 250_000
NS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
TIME = re.compile(r"time \((ns|us|ms|s)\)")
FLOPS = re.compile(r"flops\d*")
COUNT, DEVICE, DEVICE_TYPE, BYTES = "count", "device_id", "device_type", "bytes"
SPELLINGS = {"deviceid": DEVICE, "devicetype": DEVICE_TYPE}  # of the schema of 2023
WARP_SIZE = 32  # of every NVIDIA GPU so far; Proton does not say
TRANSFERS_PER_CLOCK, BITS_PER_BYTE = 2, 8
RECORD_AGAIN = "Write the profile again with data='tree': proton -d tree SCRIPT"
COPY_AGAIN = "It was cut off: copy it again."
MESSAGEPACK_SUFFIX = ".hatchet_msgpack"
MESSAGEPACK_START = re.compile(rb"[\x91\x92][\x81-\x83]\xa5frame")  # a list of one or two: the root, the devices
LONGEST_LIST = 1000  # numbers of one metric that are kept


def detect(path: Path, head: bytes) -> bool:
    """A list of nodes that have a `frame`, in JSON or MessagePack."""
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    return _is_messagepack(path, head) or (start.startswith(b"[") and _is_tree(start))


def _is_messagepack(path: Path, head: bytes) -> bool:
    return bool(MESSAGEPACK_START.match(head)) or (path.suffix == MESSAGEPACK_SUFFIX and head[:1] not in (b"[", b" "))


def _is_tree(start: bytes) -> bool:
    """Trace events (`ph`) may have members of these names too."""
    return b'"frame"' in start and (b'"metrics"' in start or b'"children"' in start) and b'"ph"' not in start


def read(paths: Sequence[Path], sink: Sink, options: Options, progress: Callable[[int, int], None]) -> None:
    """Feed `sink` from each profile; ImportFailed for one that is damaged or has no kernels."""
    for number, path in enumerate(paths):
        progress(number, len(paths))
        roots, devices = _parsed(path, options)
        partition = sink.process(f"unknown-{path.stem}")
        with Demangler() as demangler:
            profile = _Profile(path, partition, sink, options, demangler)
            for root in roots:
                profile.read(root)
            if not profile.launches:
                raise ImportFailed(path, *profile.why_empty())
            profile.finish(devices)
    progress(len(paths), len(paths))
    sink.note("Proton keeps sums: every launch of a node has the node's mean duration, and no start.")
    sink.note("Instants are not times: launches stand in the order of the tree, each as long as it ran.")
    sink.note("Proton keeps no launch shapes: grid and block are 0.")


# --- the file --------------------------------------------------------------------------------------


def _parsed(path: Path, options: Options) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The roots of the tree and the description of the devices."""
    if path.stat().st_size > options.limits.text_bytes:
        raise ImportFailed(
            path,
            f"is larger than {options.limits.text_bytes:,} bytes",
            "Write it in phases: proton.start(mode='periodic_flushing'), then import all of its files.",
        )
    raw = path.read_bytes()
    try:
        content = _messagepack(path, raw) if _is_messagepack(path, raw[:64]) else _json(path, raw)
    except RecursionError:
        raise ImportFailed(path, "nests too deep for a profile", RECORD_AGAIN) from None
    if not isinstance(content, list):
        raise ImportFailed(path, "is no list of nodes", RECORD_AGAIN)
    roots = [node for node in content if isinstance(node, dict) and "frame" in node]
    others = [node for node in content if isinstance(node, dict) and "frame" not in node]
    if not roots:
        raise ImportFailed(path, "has no node with a frame", RECORD_AGAIN)
    return roots, others[0] if others else {}


def _json(path: Path, raw: bytes) -> Any:
    try:
        text = raw.decode("utf-8", "backslashreplace").lstrip("\ufeff")
        return json.loads(text, parse_constant=lambda _: None)
    except json.JSONDecodeError as error:
        at = len(text[: error.pos].encode("utf-8", "backslashreplace"))
        raise ImportFailed(path, f"is not valid JSON at byte {at:,}: {error.msg}", COPY_AGAIN) from None
    except ValueError as error:
        raise ImportFailed(path, f"is not valid JSON: {error}", RECORD_AGAIN) from None


def _messagepack(path: Path, raw: bytes) -> Any:
    """The same tree as in JSON; Proton writes one document a file."""
    try:
        return msgspec.msgpack.decode(raw)
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise ImportFailed(path, f"is not valid MessagePack: {error}", COPY_AGAIN) from None


@dataclass(frozen=True)
class _Node:
    """One node: its name, and its metrics under today's spelling."""

    name: str
    metrics: Mapping[str, Any]
    children: list[Any]
    device_type: str | None

    @property
    def launches(self) -> int:
        """How often its kernel ran; 0 for a scope. A kernel with a time and no count ran once."""
        count = _whole(self.metrics.get(COUNT))
        if count is None:
            return 1 if self.total_ns else 0
        return max(count, 0)

    @property
    def total_ns(self) -> int | None:
        """GPU time of all launches, to the nanosecond."""
        for name, value in self.metrics.items():
            unit = TIME.fullmatch(name)
            if unit and isinstance(value, int) and not isinstance(value, bool):
                return value * NS[unit[1]]
            if unit and isinstance(value, float) and math.isfinite(value):
                return round(min(value * NS[unit[1]], 2.0**63))
        return None

    @property
    def work(self) -> dict[str, float]:
        """Flops and bytes that the user gave, by the name they have there."""
        given = {name: _number(value) for name, value in self.metrics.items() if _is_work(name)}
        return {name: value for name, value in given.items() if value is not None}


def _node(raw: Any) -> _Node | None:
    """A node of the file, None for something else in its place."""
    if not isinstance(raw, dict):
        return None
    frame, metrics, children = raw.get("frame"), raw.get("metrics"), raw.get("children")
    name = frame.get("name") if isinstance(frame, dict) else None
    told = metrics.items() if isinstance(metrics, dict) else ()
    known = {_spelled(key): value for key, value in told if isinstance(key, str)}
    kind = known.get(DEVICE_TYPE, raw.get("DeviceId"))
    return _Node(
        name if isinstance(name, str) and name else "(no name)",
        known,
        children if isinstance(children, list) else [],
        kind if isinstance(kind, str) else None,
    )


def _is_work(name: str) -> bool:
    return name == BYTES or bool(FLOPS.fullmatch(name))


def _spelled(key: str) -> str:
    lower = key.lower()
    return SPELLINGS.get(lower, lower)


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"\d{1,18}", value):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


_NO_MORE = object()  # None may stand among the children


# --- the tree --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Share:
    """Launches `start` to `stop` of a node's `count`, which took `total` ns together (None: not told)."""

    start: int
    stop: int
    count: int
    total: int | None
    kernel_class_id: int
    device: int

    @property
    def length_ns(self) -> int:
        """What they take on the line of launches, where each has a nanosecond at least."""
        mean, more = divmod(self.total or 0, self.count)
        rows = self.stop - self.start
        return rows if mean == 0 else rows * mean + max(0, min(self.stop, more) - self.start)


class _Profile:
    """One profile on its way into the sink. `now` is the end of the line of launches so far."""

    def __init__(self, path: Path, partition: str, sink: Sink, options: Options, demangler: Demangler) -> None:
        self.path = path
        self.partition = partition
        self.sink = sink
        self.options = options
        self.launches = 0
        self.now = 0
        self._demangler = demangler
        self._other_devices: set[int] = set()
        self._metrics: set[str] = set()
        self._ranges: list[dict[str, Any]] = []
        self._used: dict[int, str | None] = {}
        self._waiting: list[_Share] = []
        self._waiting_rows = 0
        self._written = 0  # launches
        self._written_to = 0  # where on the line of launches the next one stands

    def read(self, root: dict[str, Any]) -> None:
        """Walk the tree depth first, without recursion: its depth is the file's to choose."""
        open_: list[tuple[dict[str, Any] | None, Iterator[Any]]] = [(None, iter([root]))]
        while open_:
            row, children = open_[-1]
            raw = next(children, _NO_MORE)
            if raw is _NO_MORE:
                open_.pop()
                if row is not None:
                    row["end_ns"] = self.now
                continue
            if len(open_) > self.options.limits.nesting:
                raise ImportFailed(self.path, f"nests deeper than {self.options.limits.nesting} levels", RECORD_AGAIN)
            node = _node(raw)
            if node is None:
                self.sink.refuse("children that are no nodes")
                continue
            parent = next((row for row, _ in reversed(open_) if row is not None), None)
            inner = self._enter(node, parent, is_root=raw is root)
            open_.append((inner, iter(node.children)))

    def _enter(self, node: _Node, parent: dict[str, Any] | None, is_root: bool) -> dict[str, Any] | None:
        """The node's range, if it is one; its launches are written on the way."""
        self._metrics.update(node.metrics)
        work = node.work
        self.sink.refuse("flops or bytes that are no finite number", sum(map(_is_work, node.metrics)) - len(work))
        is_range = bool(node.children) and not is_root
        row = self._range(node, parent) if is_range or any(work.values()) else None
        if node.launches:
            self._add_launches(node)
        return row

    def _range(self, node: _Node, parent: dict[str, Any] | None) -> dict[str, Any]:
        work = node.work
        flops = [value for name, value in work.items() if name != BYTES]
        row: dict[str, Any] = {
            "range_id": len(self._ranges) + 1,
            "parent_id": parent["range_id"] if parent else None,
            "depth": parent["depth"] + 1 if parent else 0,
            "name": self._demangler.name(node.name),
            "source": "annotate",
            "thread_id": 0,
            "start_ns": self.now,
            "end_ns": None,
            "flops": sum(flops) if flops else None,
            "bytes": work.get(BYTES),
            "attributes": json.dumps(attributes) if (attributes := _attributes(node)) else None,
        }
        self.sink.count("scopes with flops or bytes" if work else "scopes")
        self._ranges.append(row)
        return row

    def _add_launches(self, node: _Node) -> None:
        device = _whole(node.metrics.get(DEVICE)) or 0
        if self.options.device is not None and str(device) != self.options.device:
            self._other_devices.add(device)
            self.sink.refuse("launches on another device than the one asked for", node.launches)
            return
        count, total = node.launches, node.total_ns
        if total is not None and not 0 <= total < 2**62:
            self.sink.refuse("kernels: total times that are negative or beyond 146 years")
            total = None
        self.launches += count
        if self.launches > self.options.limits.launches:
            raise ImportFailed(
                self.path,
                f"stands for more than {self.options.limits.launches:,} launches",
                "A count in it is damaged.",
            )
        self._used.setdefault(device, node.device_type)
        kernel = KernelClass(node.name.encode("utf-8", "backslashreplace"), (0, 0, 0), (0, 0, 0))
        class_id = self.sink.kernel_class(self.partition, kernel, self._demangler.name(node.name))
        if node.name == "(no name)":
            self.sink.refuse("kernels without a name", count)
        if total is None:
            self.sink.refuse("kernels without a time", count)
        for start in range(0, count, CHUNK_ROWS):
            self._queue(_Share(start, min(start + CHUNK_ROWS, count), count, total, class_id, device))
        self.sink.count("kernels", count)

    def _queue(self, share: _Share) -> None:
        """Keep launches until they fill a batch: a node alone is a few."""
        rows = share.stop - share.start
        self._waiting.append(share)
        self._waiting_rows += rows
        self.now += share.length_ns
        if self._waiting_rows >= CHUNK_ROWS:
            self._flush()

    def _flush(self) -> None:
        """Write the launches that wait: the mean of each node, and a nanosecond more for its first few."""
        if not self._waiting:
            return
        shares, self._waiting, self._waiting_rows = self._waiting, [], 0
        rows = np.array([share.stop - share.start for share in shares])
        within = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)
        number = within + np.repeat([share.start for share in shares], rows)
        mean, more = (np.repeat([divmod(share.total or 0, share.count)[at] for share in shares], rows) for at in (0, 1))
        duration = mean.astype(np.int64) + (number < more)
        steps = np.maximum(duration, 1)
        queued = self._written_to + np.cumsum(steps) - steps
        self._written_to += int(steps.sum())
        first = self._written + 1
        self._written += len(number)
        self.sink.add(
            "kernels",
            self.partition,
            {
                "duration_ns": np.ma.MaskedArray(
                    duration, mask=np.repeat([share.total is None for share in shares], rows)
                ),
                "kernel_class_id": np.repeat([share.kernel_class_id for share in shares], rows),
                "device_id": np.repeat([share.device for share in shares], rows),
                "context_id": np.zeros(len(number), dtype=np.int64),
                "stream_id": np.zeros(len(number), dtype=np.int64),
                "correlation_id": np.arange(first, first + len(number)),
                "queued_ns": queued,
            },
        )

    def finish(self, devices: Mapping[str, Any]) -> None:
        """The launches that still wait, ranges and devices."""
        self._flush()
        for start in range(0, len(self._ranges), CHUNK_ROWS):
            rows = self._ranges[start : start + CHUNK_ROWS]
            self.sink.add("ranges", self.partition, {name: [row[name] for row in rows] for name in rows[0]})
        for id_, kind in sorted(self._used.items()):
            row = _device_row(id_, _described(devices, kind, id_))
            if row:
                self.sink.device(self.partition, **row)
            else:
                self.sink.note(f"device {id_}: the profile does not describe it as a GPU with a compute capability")

    def why_empty(self) -> tuple[str, str]:
        """Why there is no kernel, and what to do."""
        if self._other_devices:
            ids = ", ".join(map(str, sorted(self._other_devices)))
            return f"has no kernels on device {self.options.device}: it has some on {ids}", "Choose one with --device."
        if any(name.endswith("cycles") for name in self._metrics):
            return (
                "holds cycles measured inside kernels, not launches",
                "Profile with the default backend, not instrumentation.",
            )
        return (
            "has no kernel with a count and a time: nothing ran on a GPU between proton.start and proton.finalize",
            "Profile the part that uses the GPU.",
        )


def _attributes(node: _Node) -> dict[str, Any]:
    """What the user attached beyond flops and bytes, and the widths of the flops."""
    own = {COUNT, DEVICE, DEVICE_TYPE, BYTES, "flops"}
    told = {name: _plain(value) for name, value in node.metrics.items() if name not in own and not TIME.fullmatch(name)}
    return {name: value for name, value in told.items() if value is not None}


def _plain(value: Any) -> Any:
    """A metric as JSON can hold it: text, a finite number, or a list of them (a tensor's); None for anything else."""
    if isinstance(value, str | bool):
        return value
    if isinstance(value, list):
        return [_number(item) for item in value] if 0 < len(value) <= LONGEST_LIST else None
    return value if _number(value) is not None else None


# --- devices ---------------------------------------------------------------------------------------


def _described(devices: Mapping[str, Any], kind: str | None, id_: int) -> dict[str, Any] | None:
    """What the profile says of a device: of its kind, or of the only kind there is."""
    kinds = [kind] if kind is not None and kind in devices else list(devices)
    for name in kinds:
        found = devices[name].get(str(id_)) if isinstance(devices[name], dict) else None
        if isinstance(found, dict):
            return {**found, "kind": name}
    return None


def _device_row(id_: int, told: dict[str, Any] | None) -> dict[str, Any] | None:
    """A row of `devices`; None for a GPU without a compute capability, such as AMD's."""
    capability = _whole(told.get("arch")) if told else None
    if told is None or capability is None or not 10 <= capability < 1000:
        return None
    clock, memory, bits = (_whole(told.get(name)) for name in ("clock_rate", "memory_clock_rate", "bus_width"))
    row: dict[str, Any] = {
        "device_id": id_,
        "name": f"{told['kind']} device of compute capability {capability // 10}.{capability % 10}",
        "cc_major": capability // 10,
        "cc_minor": capability % 10,
        "sm_count": _whole(told.get("num_sms")),
        "warp_size": WARP_SIZE,
        "memory_bus_bits": bits,
        "sm_clock_max_hz": clock * 1000 if clock else None,
        "memory_clock_max_hz": memory * 1000 if memory else None,
    }
    if memory and bits:
        row["dram_peak_bytes_per_s"] = float(TRANSFERS_PER_CLOCK * memory * 1000 * bits / BITS_PER_BYTE)
    return row
