"""The child that reads one `.ncu-rep` file with NVIDIA's library and prints a line of JSON a launch.

    python -m nanalyze.importers.ncu_rep_worker FILE

Only this module loads the library: a damaged file may take its process down, or all memory.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanalyze.importers import numbers
from nanalyze.importers.ncu_metrics import DEVICE_NAME
from nanalyze.importers.ncu_rep import FAILED_EXIT, MISSING_EXIT, PACKAGE
from nanalyze.importers.ncu_table import readable

MEMORY_BYTES = 8 * 2**30  # of address space, and more for larger files
MEMORY_RATIO = 64
# Names that stand for lists of other metrics, not for values.
LISTS = ("group:", "breakdown:")
RULES = ("SOLBottleneck",)
WORKLOADS = {0: "kernel", 1: "range", 2: "command list", 3: "graph", 4: "subgrid"}


def main(arguments: list[str]) -> int:
    path = Path(arguments[0])
    _limit_memory(path)
    try:
        ncu_report = importlib.import_module(PACKAGE)
    except ImportError as error:
        print(error, file=sys.stderr)
        return MISSING_EXIT
    try:
        for sent in _launches(ncu_report.load_report(str(path))):
            sys.stdout.write(json.dumps(sent, allow_nan=False) + "\n")
            sys.stdout.flush()
    except BrokenPipeError:
        return 0
    except Exception as error:
        print(ascii(f"{type(error).__name__}: {error}".splitlines()[0])[1:-1], file=sys.stderr)
        return FAILED_EXIT
    return 0


def _limit_memory(path: Path) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    size = MEMORY_BYTES + MEMORY_RATIO * path.stat().st_size
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        size = min(size, hard)
    resource.setrlimit(resource.RLIMIT_AS, (size, hard))


def _launches(report: Any) -> Iterator[dict[str, Any]]:
    ranges = [report.range_by_idx(i) for i in range(report.num_ranges())]
    total = sum(one.num_actions() for one in ranges)
    id_ = 0
    for one in ranges:
        for place in range(one.num_actions()):
            yield {"id": id_, "launches": total, **_launch(one.action_by_idx(place))}
            id_ += 1


def _launch(action: Any) -> dict[str, Any]:
    names = sorted(action.metric_names())
    listed = [name for name in names if name.startswith(LISTS)]
    found = {name: _metric(action, name) for name in names if not name.startswith(LISTS)}
    name = found.get(DEVICE_NAME)
    return {
        "function": _text(action.name(action.NameBase_FUNCTION)),
        "demangled": _text(action.name(action.NameBase_DEMANGLED)),
        "mangled": _text(action.name(action.NameBase_MANGLED)),
        "workload": WORKLOADS.get(action.workload_type() if hasattr(action, "workload_type") else 0, "workload"),
        "device_name": readable(_text(name.value()) or "") or None if name is not None else None,
        "metrics": {readable(name): _value(metric) for name, metric in found.items()},
        "lists": len(listed),
        "rules": list(_rules(action)),
    }


def _metric(action: Any, name: str) -> Any:
    """The metric; None for a name that is no text, which the library does not take back."""
    try:
        return action.metric_by_name(name)
    except TypeError:
        return None


def _text(value: Any) -> str | None:
    """Text as the library gives it; its bytes that are none stay surrogates of single bytes."""
    if value is None:
        return None
    raw = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogateescape")
    return raw.decode("utf-8", "surrogateescape")


def _value(metric: Any) -> float | int | None:
    """In base units; None for text, for no value, and for what is not finite."""
    if metric is None or (hasattr(metric, "has_value") and not metric.has_value()):
        return None
    value = metric.value()
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    factor = numbers.unit(metric.unit() or "").factor
    return value if factor == 1 else value * float(factor)


def _rules(action: Any) -> Iterator[str]:
    """The messages of the speed-of-light rule."""
    if not hasattr(action, "rule_results_as_dicts"):
        return
    for result in action.rule_results_as_dicts():
        if result.get("rule_identifier") not in RULES:
            continue
        message = result.get("rule_message") or {}
        yield readable(str(message.get("message", "")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
