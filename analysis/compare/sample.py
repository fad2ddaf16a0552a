"""What a comparison needs of one run: sums a repetition and kernel class, and under what it was measured.

Everything is aggregated in DuckDB (`queries/compare_*.sql`): what comes over has a row a batch of
repetitions and kernel class, at most 400 batches, whatever the length of the run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from nanalyze.analysis.statistics import Array
from nanalyze.rundir.errors import NanalyzeError
from nanalyze.rundir.measurement import WARM_UP

if TYPE_CHECKING:
    from nanalyze.analysis.run import Run

# Batches of repetitions, and pieces of a run without named repetitions.
MOST_BATCHES = 400
PIECES = 64
# What a range must be to serve as the step of a run that names none.
LEAST_STEPS = 5
LEAST_STEP_SHARE = 0.5

TOTALS = ("kernel_ns", "span_ns", "gap_ns", "gaps", "launches", "host_ns")
SHAPE = (
    "grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "cluster_x", "cluster_y", "cluster_z",
    "registers_per_thread", "static_shared_bytes", "dynamic_shared_bytes", "local_bytes_per_thread",
)  # fmt: skip
COUNTERS = ("dram_bytes", "l2_bytes", "flops")


class CompareError(NanalyzeError):
    """Runs or ranges that cannot be compared, or a gate that cannot be read."""


@dataclass(frozen=True)
class KernelClass:
    """A kernel with its shape, where it is launched, what bounds it, and what one launch moves.

    `symbol` is a digest of the mangled name, `shape` follows SHAPE. `dram_bytes`, `l2_bytes` (with
    their standard errors) and `flops` are a launch's, None where they were not measured.
    """

    kernel_class_id: int
    name: str
    symbol: str
    shape: tuple[int | None, ...] = ()
    range_name: str | None = None
    bound: str | None = None
    level_or_pipe: str | None = None
    dram_bytes: float | None = None
    dram_bytes_error: float | None = None
    l2_bytes: float | None = None
    l2_bytes_error: float | None = None
    flops: float | None = None

    @property
    def verdict(self) -> str | None:
        """`memory (DRAM)`; None where no verdict was reached."""
        return f"{self.bound} ({self.level_or_pipe})" if self.bound and self.level_or_pipe else self.bound


@dataclass(frozen=True)
class Clock:
    """So many readings of a device at these clocks (Hz), with NVML's mask of throttle reasons."""

    device: str
    sm_hz: int | None
    memory_hz: int | None
    throttle_reasons: int | None
    readings: int


@dataclass(frozen=True)
class Perturbed:
    """A kernel class with and without the profiler: the view `perturbation`; times in ns."""

    kernel_class_id: int
    kernel: str
    launches: int
    mean_ns: float
    launches_replayed: int
    replayed_ns: float
    difference_share: float | None
    differs: bool | None


@dataclass(frozen=True)
class Facts:
    """Under what a sample was taken; each tuple holds the distinct values, sorted."""

    hosts: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    drivers: tuple[str, ...] = ()
    cupti: tuple[str, ...] = ()
    timestamps: tuple[str, ...] = ()
    processes: int = 1
    clocks: tuple[Clock, ...] = ()
    damage: int = 0
    losses: int = 0


@dataclass(frozen=True)
class Sample:
    """One run, or one range of it. Arrays are (batches,) or (classes, batches), a repetition's mean each.

    `range_name` is None where the run was cut into pieces; each value is then a piece's share scaled
    up to the whole run. `totals` lacks what is not known. `offsets` orders the classes in a repetition.
    """

    label: str
    range_name: str | None
    repetitions: int
    totals: Mapping[str, Array]
    class_ids: Sequence[int]
    launches: Array
    kernel_ns: Array
    offsets: Array
    classes: Mapping[int, KernelClass]
    facts: Facts = field(default_factory=Facts)
    perturbed: Sequence[Perturbed] = ()

    @property
    def batches(self) -> int:
        return len(self.totals["kernel_ns"])


def steps(run: Run) -> dict[str, tuple[int, float]]:
    """Names of ranges that could be the run's steps: (depth, share of kernel time), see LEAST_STEPS."""
    rows = run.query("compare_steps").to_dict("records")
    return {
        str(row["name"]): (int(row["depth"]), float(row["share"]))
        for row in rows
        if row["ranges"] >= LEAST_STEPS and (row["share"] or 0) >= LEAST_STEP_SHARE and row["name"] != WARM_UP
    }


def common_step(runs: Sequence[Run]) -> str | None:
    """The range that is the step of every run: the outermost such name, then the one with most time."""
    found = [steps(run) for run in runs]
    names = set(found[0]).intersection(*found[1:]) if found else set()
    ordered = sorted(names, key=lambda name: (found[0][name][0], -found[0][name][1], name))
    return ordered[0] if ordered else None


def read(
    run: Run, range_name: str | None, *, skip: int = 0, label: str | None = None, within: str | None = None
) -> Sample:
    """The sample of one run. Raises CompareError where nothing undisturbed was timed.

    With `within`, of those ranges only that lie in a range of that name.
    """
    most = PIECES if range_name is None else MOST_BATCHES
    table = run.arrow(
        _shipped("compare_repetitions"),
        {"range_name": range_name, "skip": skip if range_name is not None else 0, "most": most, "within": within},
    )
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    whole = [i for i, class_id in enumerate(columns["kernel_class_id"]) if class_id is None]
    if not whole:
        raise CompareError(_nothing(run, range_name, skip))
    repetitions = np.array([columns["repetitions"][i] for i in whole], dtype=float)
    place = {columns["batch"][i]: position for position, i in enumerate(whole)}
    # A piece stands for its part of the run, a batch for the mean of its repetitions.
    scale = 1 / repetitions if range_name is not None else np.full(len(whole), float(len(whole)))
    totals = {}
    for name in TOTALS:
        values = [columns[name][i] for i in whole]
        if None not in values and not (range_name is None and name == "host_ns"):
            totals[name] = np.array(values, dtype=float) * scale
    ids, launches, kernel_ns, offsets = _by_class(columns, place, scale)
    return Sample(
        label if label is not None else str(run.path),
        range_name,
        int(repetitions.sum()) if range_name is not None else len(whole),
        totals,
        ids,
        launches,
        kernel_ns,
        offsets,
        _classes(run, ids),
        _facts(run, range_name),
        _perturbed(run, set(ids)),
    )


def _by_class(
    columns: Mapping[str, list[Any]], place: Mapping[int, int], scale: Array
) -> tuple[list[int], Any, Any, Any]:
    """Class ids, (classes, batches) of launches and kernel time a repetition, and mean offsets by class."""
    ids = sorted({class_id for class_id in columns["kernel_class_id"] if class_id is not None})
    row = {class_id: number for number, class_id in enumerate(ids)}
    launches, kernel_ns = np.zeros((len(ids), len(scale))), np.zeros((len(ids), len(scale)))
    offsets: list[list[float]] = [[] for _ in ids]
    for i, class_id in enumerate(columns["kernel_class_id"]):
        if class_id is None:
            continue
        at = row[class_id], place[columns["batch"][i]]
        launches[at], kernel_ns[at] = columns["launches"][i], columns["kernel_ns"][i]
        if columns["offset_ns"][i] is not None:
            offsets[row[class_id]].append(columns["offset_ns"][i])
    means = np.array([np.mean(found) if found else np.nan for found in offsets])
    return ids, launches * scale, kernel_ns * scale, means


def _nothing(run: Run, range_name: str | None, skip: int) -> str:
    if run.sql("SELECT count(*) AS n FROM _rolled_up")["n"][0]:
        return f"{run.path}: its launches were rolled up, and comparing needs single ones. Use nanalyze trend."
    if range_name is None:
        return f"{run.path}: has no launch with a time of its own. Record it with the layer timeline."
    rows = run.sql(
        "SELECT count(*) AS opened, max(process) AS process FROM ranges WHERE name = $name", {"name": range_name}
    )
    if not rows["opened"][0]:
        names = run.sql("SELECT name FROM ranges GROUP BY name ORDER BY count(*) DESC, name LIMIT 5")["name"].tolist()
        known = f"It has {', '.join(names)}." if names else "It has no ranges: mark them with recorder.annotate."
        return f"{run.path}: no range is called {range_name}. {known}"
    return (
        f"{run.path}: no repetition of {range_name} holds undisturbed kernels only (after leaving out {skip}). "
        "Repetitions with launches replayed for counters do not count: record more, or count in a run of its own."
    )


def _shipped(name: str) -> str:
    from nanalyze import queries

    return queries.query(name).sql


def _classes(run: Run, ids: Sequence[int]) -> dict[int, KernelClass]:
    wanted = set(ids)
    verdicts = {row["kernel_class_id"]: row for row in run.arrow(VERDICTS).to_pylist()}
    errors = {row["kernel_class_id"]: row for row in run.arrow(ERRORS).to_pylist()}
    sites: dict[int, str | None] = {}
    for row in run.arrow(_shipped("compare_call_sites")).to_pylist():
        sites.setdefault(row["kernel_class_id"], row["range_name"])
    found = {}
    for row in run.arrow("SELECT * FROM kernel_classes").to_pylist():
        class_id = row["kernel_class_id"]
        if class_id not in wanted:
            continue
        verdict, error = verdicts.get(class_id, {}), errors.get(class_id, {})
        found[class_id] = KernelClass(
            class_id,
            row["name"] or "",
            hashlib.blake2b((row["name_mangled"] or "").encode(), digest_size=8).hexdigest(),
            tuple(row[name] for name in SHAPE),
            sites.get(class_id),
            verdict.get("bound"),
            verdict.get("level_or_pipe"),
            verdict.get("dram_bytes"),
            error.get("dram_bytes_error"),
            verdict.get("l2_bytes"),
            error.get("l2_bytes_error"),
            verdict.get("flops"),
        )
    for class_id in wanted - set(found):  # its shard is lost
        found[class_id] = KernelClass(class_id, f"[class {class_id}]", "")
    return found


# Operations count where every pipe that the kernel could use was counted, or at least one was.
VERDICTS = """
SELECT
    kernel_class_id, bound, level_or_pipe, dram_bytes, l2_bytes,
    CASE
        WHEN COALESCE(fp16_flops, fp32_flops, fp64_flops, tensor_ops) IS NOT NULL
            THEN COALESCE(fp16_flops, 0) + COALESCE(fp32_flops, 0) + COALESCE(fp64_flops, 0) + COALESCE(tensor_ops, 0)
    END AS flops
FROM verdicts
ORDER BY kernel_class_id
"""
ERRORS = """
SELECT
    kernel_class_id,
    sqrt(sum(CASE WHEN counter <> 'l2_bytes' THEN standard_error * standard_error END)) AS dram_bytes_error,
    max(CASE WHEN counter = 'l2_bytes' THEN standard_error END) AS l2_bytes_error
FROM counters
WHERE counter IN ('dram_read_bytes', 'dram_write_bytes', 'l2_bytes')
GROUP BY kernel_class_id
ORDER BY kernel_class_id
"""


def _facts(run: Run, range_name: str | None) -> Facts:
    processes = run.arrow(
        "SELECT process, host, gpu_driver_version, cupti_version, settings FROM processes ORDER BY process"
    ).to_pylist()
    devices = run.arrow(DEVICES).to_pylist()
    clocks = run.arrow(_shipped("compare_clocks"), {"range_name": range_name}).to_pylist()
    losses = run.sql("SELECT count(*) AS losses FROM events WHERE kind = 'loss'")["losses"][0]
    return Facts(
        _distinct(row["host"] for row in processes),
        _distinct(row["device"] for row in devices),
        _distinct(row["model"] for row in devices),
        _distinct(row["gpu_driver_version"] for row in processes),
        _distinct(row["cupti_version"] for row in processes),
        _distinct(_setting(row["settings"], "timestamps") for row in processes),
        len({row["process"] for row in devices}) or 1,
        tuple(
            Clock(row["device"], row["sm_clock_hz"], row["memory_clock_hz"], row["throttle_reasons"], row["readings"])
            for row in clocks
        ),
        run.damage_count,
        int(losses),
    )


# Devices that ran timed kernels.
DEVICES = """
SELECT DISTINCT
    k.process,
    COALESCE(d.uuid, concat(k.process, '/', CAST(k.device_id AS VARCHAR))) AS device,
    concat(d.name, CASE WHEN d.is_mig THEN ' MIG' ELSE '' END, ', ', CAST(d.sm_count AS VARCHAR), ' SMs') AS model
FROM (SELECT DISTINCT process, device_id FROM _launches WHERE duration_method = 'timeline') AS k
JOIN devices AS d ON d.process = k.process AND d.device_id = k.device_id
ORDER BY k.process, device
"""


def _perturbed(run: Run, ids: set[int]) -> list[Perturbed]:
    rows = run.arrow(
        "SELECT kernel_class_id, kernel, launches, mean_ns, launches_replayed, replayed_ns, difference_share, differs "
        "FROM perturbation ORDER BY launches * mean_ns DESC, kernel_class_id"
    ).to_pylist()
    return [Perturbed(**row) for row in rows if row["kernel_class_id"] in ids]


def _setting(text: str | None, name: str) -> object:
    try:
        settings = json.loads(text or "{}")
    except (json.JSONDecodeError, RecursionError):
        return None
    return settings.get(name) if isinstance(settings, dict) else None


def _distinct(values: Any) -> tuple[str, ...]:
    return tuple(sorted({str(value) for value in values if value is not None}))
