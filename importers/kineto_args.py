"""The arguments of a trace's events, as types: decoded all at once, or one by one where a file has others."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field

from nanalyze.importers import kineto_numbers as numbers

COLLECTIVE = "Collective name"


class KernelArgs(Struct, gc=False):
    """What a kernel event tells. `shared` is static and dynamic shared memory together."""

    device: int | None = None
    context: int | None = None
    stream: int | str | None = None
    correlation: int | None = None
    registers: int | None = field(name="registers per thread", default=None)
    shared: int | None = field(name="shared memory", default=None)
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    collective: str | None = field(name=COLLECTIVE, default=None)
    graph: int | None = field(name="graph id", default=None)
    node: int | None = field(name="graph node id", default=None)

    @classmethod
    def tolerant(cls, args: dict[str, Any]) -> KernelArgs:
        """From arguments of any type."""
        known = {name: numbers.integer(args.get(name)) for name in ("device", "context", "correlation")}
        collective = args.get(COLLECTIVE)
        return cls(
            **known,
            stream=numbers.identifier(args.get("stream")),
            registers=numbers.integer(args.get("registers per thread")),
            shared=numbers.integer(args.get("shared memory")),
            grid=numbers.shape(args.get("grid")),
            block=numbers.shape(args.get("block")),
            collective=collective if isinstance(collective, str) else None,
            graph=numbers.integer(args.get("graph id")),
            node=numbers.integer(args.get("graph node id")),
        )


class CopyArgs(Struct, gc=False):
    """What a copy or set tells."""

    device: int | None = None
    context: int | None = None
    stream: int | str | None = None
    correlation: int | None = None
    bytes: int | None = None
    kind: str | int | None = None
    source: int | None = field(name="fromDevice", default=None)
    destination: int | None = field(name="toDevice", default=None)

    @classmethod
    def tolerant(cls, args: dict[str, Any]) -> CopyArgs:
        """From arguments of any type."""
        names = ("device", "context", "correlation", "bytes")
        kind = args.get("kind")
        return cls(
            **{name: numbers.integer(args.get(name)) for name in names},
            stream=numbers.identifier(args.get("stream")),
            kind=kind if isinstance(kind, str) else None,
            source=numbers.integer(args.get("fromDevice")),
            destination=numbers.integer(args.get("toDevice")),
        )


class CallArgs(Struct, gc=False):
    """What a runtime call tells; `size` only with HIP, whose copies do not tell their own."""

    correlation: int | None = None
    size: int | str | None = None

    @classmethod
    def tolerant(cls, args: dict[str, Any]) -> CallArgs:
        """From arguments of any type."""
        return cls(numbers.integer(args.get("correlation")), numbers.integer(args.get("size")))


Args = TypeVar("Args", KernelArgs, CopyArgs, CallArgs)
OnGpu = TypeVar("OnGpu", KernelArgs, CopyArgs)
ARRAYS: dict[type, Any] = {kind: msgspec.json.Decoder(list[kind]) for kind in (KernelArgs, CopyArgs, CallArgs)}  # type: ignore[valid-type]
