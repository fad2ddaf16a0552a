"""summary.json: the report's numbers for programs. docs/report.md documents its shape.

Rules that hold for every version: identifiers of 63 bits and instants are strings (JavaScript
and jq hold integers exactly up to 2**53 only), durations are integer nanoseconds, shares go from
0 to 1, percentages from 0 upwards, and what is not known is null.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nanalyze.analysis.jsonable import finite
from nanalyze.analysis.report import values
from nanalyze.analysis.report.cells import Row
from nanalyze.analysis.report.collect import Data
from nanalyze.analysis.report.content import headline_of
from nanalyze.analysis.report.kernels import TOP_KERNELS, rest
from nanalyze.analysis.report.names import cut
from nanalyze.analysis.report.sampling import against_exact
from nanalyze.analysis.report.steps import summaries

SUMMARY_VERSION = 1
MOST_DRIFTS = 200
MOST_LOSSES = 50
MOST_POINTS = 50
MOST_ROWS = 400  # of a list with rows by device, process, kind of copy or reason
MOST_CHARACTERS = 300  # of a text in such a list; names of kernels stand whole under `kernels`
MOST_KERNELS = TOP_KERNELS
MOST_BYTES = 3_000_000

# Evidence of a kernel that is copied from `verdicts` as it stands.
KERNEL_KEYS = (
    "kernel", "bound", "level_or_pipe", "reason", "launches", "total_ns", "mean_ns", "share", "compute_pct",
    "memory_pct", "occupancy_pct", "method", "launches_measured", "over_peak",
)  # fmt: skip
ROOFLINE_KEYS = (
    "pipe", "operations", "intensity", "l2_intensity", "l1_intensity", "operations_per_s", "roof", "roof_per_s",
    "roof_share", "nearest", "nearest_share", "clock_method",
)  # fmt: skip
DEVICE_KEYS = ("uuid", "name", "chip", "sm_count", "sm_clock_max_hz", "dram_peak_bytes_per_s", "peaks_source")
COST_KEYS = ("process", "range_name", "pauses", "pairs", "steps_on", "steps_off", "mean_on_ns", "mean_off_ns",
             "slowdown_pct", "low_pct", "high_pct", "reason", "cpu_ns", "cpu_share", "paused_ns",
             "paused_share")  # fmt: skip
RECORDING_KEYS = ("cpu_ns", "exact_launches", "exact_ns", "exact_passes", "records_lost", "losses", "damage")
TOTAL_KEYS = ("launches", "launches_untimed", "launches_in_graphs", "launches_measured", "kernel_classes",
              "classes_with_counters", "kernel_ns", "active_ns", "recorded_ns")  # fmt: skip


def identity(runs: Sequence[Row]) -> str:
    """What marks a report as that of these runs (their run.json): the run's id, or those of several in their order."""
    return "+".join(str(run.get("run_id")) for run in runs)


@dataclass(frozen=True)
class Lengths:
    """How many rows a list has, how many characters a text in it, and how many kernels stand by themselves.

    `name` is how many characters the name of one of these has, None for all.
    """

    rows: int
    characters: int
    kernels: int
    name: int | None = None


def _lengths() -> Iterator[Lengths]:
    """From what fits nearly every run to what fits some two hundred: 10 kB each are left in the end."""
    yield Lengths(MOST_ROWS, MOST_CHARACTERS, MOST_KERNELS)
    yield Lengths(MOST_ROWS // 2, MOST_CHARACTERS, MOST_KERNELS, 10 * MOST_CHARACTERS)
    for share in (4, 10, 20, 40, 100):
        short = max(MOST_CHARACTERS // share, 20)
        yield Lengths(MOST_ROWS // share, short, max(MOST_KERNELS // share, 1), short)


def of_runs(datas: Sequence[Data], version: str, files: Sequence[str]) -> dict[str, Any]:
    """The summary of one run, or of several: `runs` then holds theirs. It is cut such that it is below MOST_BYTES."""
    content: dict[str, Any] = {}
    for lengths in _lengths():
        content = _of_runs(datas, version, files, lengths)
        if len(encode(content)) < MOST_BYTES:
            break
    return content


def _of_runs(datas: Sequence[Data], version: str, files: Sequence[str], lengths: Lengths) -> dict[str, Any]:
    if len(datas) == 1:
        return summary(datas[0], headline_of(datas[0]), version, files, lengths)
    return {
        "summary_version": SUMMARY_VERSION,
        "nanalyze_version": version,
        "run": {"run_id": identity([data.run for data in datas]), "name": f"{len(datas)} runs", "source": None,
                "created": None},
        "runs": [summary(data, headline_of(data), version, [], lengths) for data in datas],
        "files": sorted(files),
    }  # fmt: skip


def summary(
    data: Data, headline: Sequence[str], version: str, files: Sequence[str], lengths: Lengths
) -> dict[str, Any]:
    """The summary as a JSON-able dict; `cut_short` says how long lists are that are not whole."""
    content = _content(data, headline, version, files, lengths)
    lists = {name: content[name] for name in LISTS} | {"sampling.quality": content["sampling"]["quality"]}
    content["cut_short"] = {name: len(rows) for name, rows in lists.items() if len(rows) > lengths.rows}
    for name in (*LISTS, *KERNEL_LISTS):
        content[name] = _shortened(content[name], lengths)
    for name in ("quality", "drift"):
        content["sampling"][name] = _shortened(content["sampling"][name], lengths)
    return content


# Lists that grow with the number of devices and processes.
LISTS = (
    "utilisation", "time_by_cause", "steps", "throttling", "costs", "copies", "ceilings", "devices", "processes",
    "losses",
)  # fmt: skip
# Lists whose rows repeat names of kernels.
KERNEL_LISTS = ("opportunities", "kernel_losses")


def _shortened(rows: Sequence[Row], lengths: Lengths) -> list[Row]:
    return [{key: _short(value, lengths) for key, value in row.items()} for row in rows[: lengths.rows]]


def _short(value: Any, lengths: Lengths) -> Any:
    if isinstance(value, str):
        return cut(value, lengths.characters)
    return [_short(one, lengths) for one in value[: lengths.rows]] if isinstance(value, list) else value


def _content(
    data: Data, headline: Sequence[str], version: str, files: Sequence[str], lengths: Lengths
) -> dict[str, Any]:
    kernels = data.kernels[: lengths.kernels]
    return {
        "summary_version": SUMMARY_VERSION,
        "nanalyze_version": version,
        "run": {
            "run_id": str(data.run.get("run_id")),
            "name": data.run["name"],
            "source": data.run.get("source"),
            "created": values.iso(data.run.get("created_ns")),
        },
        "headline": [sentence.replace(values.THIN, " ") for sentence in headline],
        "first_kernel_start": values.iso(data.totals["first_ns"]),
        "last_kernel_end": values.iso(data.totals["last_ns"]),
        "totals": _pick(data.totals, TOTAL_KEYS),
        "verdicts": [_pick(row, ("bound", "kernel_classes", "launches", "total_ns", "share")) for row in data.bounds],
        "verdict_parts": [dict(row) for row in data.shares],
        "kernels": [_kernel(row, data, lengths) for row in kernels],
        "other_kernels": rest(data.tables["verdicts"], len(kernels)),
        "methods": list(data.methods),
        "utilisation": [
            _pick(row, ("device", "label", "active_ns", "paused_ns", "busy_ns", "busy_share", "copy_ns", "copy_share"))
            for row in data.use
        ],
        "opportunities": [
            {**_with_id(row), "after_class_id": None if row["after_class_id"] is None else str(row["after_class_id"])}
            for row in data.rows("opportunities")
        ],
        "time_by_cause": [_with_id(row) for row in data.rows("time_by_cause")],
        "kernel_losses": [_with_id(row) for row in data.rows("kernel_losses")[: min(MOST_LOSSES, lengths.kernels)]],
        "steps": summaries(data.rows("steps")),
        "throttling": data.rows("throttling_summary"),
        "sampling": {
            "quality": data.rows("attribution_quality"),
            "against_exact": against_exact(data.rows("sampled_against_exact")),
            "drift": [_with_id(row) for row in data.rows("drift")[:MOST_DRIFTS]],
        },
        "costs": [_pick(row, COST_KEYS) for row in data.costs],
        "copies": data.rows("copies"),
        "roofline": [_roofline(row) for row in data.rows("roofline")[: min(MOST_POINTS, lengths.kernels)]],
        "ceilings": data.rows("ceilings"),
        "devices": [{**_pick(row, DEVICE_KEYS), "processes": row["processes"]} for row in data.devices],
        "processes": [_process(row) for row in data.rows("processes")],
        "recording": _pick(data.recording, RECORDING_KEYS),
        "losses": list(data.losses),
        "thresholds": {row["name"]: row["value"] for row in data.rows("settings")},
        "files": sorted(files),
    }


def encode(content: dict[str, Any]) -> str:
    """`content` as JSON text; NaN and infinities, which JSON has not, become null."""
    return json.dumps(finite(content), indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def _kernel(row: Row, data: Data, lengths: Lengths) -> dict[str, Any]:
    class_id = row["kernel_class_id"]
    found = {"kernel_class_id": str(class_id), **_pick(row, KERNEL_KEYS), "shape": data.shapes.get(class_id)}
    if lengths.name is not None and found["kernel"] is not None:
        found["kernel"] = cut(found["kernel"], lengths.name)
    return found


def _roofline(row: Row) -> dict[str, Any]:
    return {"kernel_class_id": str(row["kernel_class_id"]), **_pick(row, ROOFLINE_KEYS)}


def _with_id(row: Row) -> dict[str, Any]:
    """`row` with its identifier as a string, where it has one."""
    class_id = row["kernel_class_id"]
    return {**row, "kernel_class_id": None if class_id is None else str(class_id)}


def _process(row: Row) -> dict[str, Any]:
    return {
        **_pick(row, ("process", "host", "pid", "rank", "ending", "kernels_written", "records_lost")),
        "started": values.iso(row["started_ns"]),
        "ended": values.iso(row["ended_ns"]),
        "cut_off": row["ended_ns"] is None,
    }


def _pick(row: Row, keys: Sequence[str]) -> dict[str, Any]:
    return {key: row[key] for key in keys}
