"""The report's tables beyond the kernels: devices, processes, the recording, losses, thresholds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from nanalyze.analysis.report import values
from nanalyze.analysis.report.cells import Cell, Grid, Head, Row, numbers, words

SHOWN_ROWS = 40
SHOWN_LOSSES = 8
MOST_KINDS = 6
# What tells devices apart that are the same kind of device.
IDENTITY = frozenset({"uuid", "device_id", "process", "processes"})

# Column of `devices` and the roof that its rate makes, as the roofline calls it.
PIPE_RATES = (
    ("tensor FP16/BF16", "tensor_fp16_flops_per_sm_cycle"),
    ("tensor FP8", "tensor_fp8_flops_per_sm_cycle"),
    ("tensor TF32", "tensor_tf32_flops_per_sm_cycle"),
    ("tensor FP64", "tensor_fp64_flops_per_sm_cycle"),
    ("FP16", "fp16_flops_per_sm_cycle"),
    ("FP32", "fp32_flops_per_sm_cycle"),
    ("FP64", "fp64_flops_per_sm_cycle"),
)


def peak(device: Row, rate: str) -> float | None:
    """FLOP/s of a device at its highest SM clock, from a per-SM rate; None where unknown."""
    factors = [values.number(device[name]) for name in (rate, "sm_count", "sm_clock_max_hz")]
    if any(factor is None or factor <= 0 for factor in factors):
        return None
    return float(factors[0] or 0) * float(factors[1] or 0) * float(factors[2] or 0)


def distinct_devices(devices: Iterable[Row]) -> list[Row]:
    """One row a physical device: several processes may see the same one; `processes` lists them."""
    found: dict[object, Row] = {}
    for device in devices:
        key = device["uuid"] or (device["process"], device["device_id"])
        entry = found.setdefault(key, {**device, "processes": []})
        entry["processes"].append(device["process"])
    return list(found.values())


def device_kinds(devices: Sequence[Row]) -> list[tuple[Row, int]]:
    """Devices of equal properties once, with how many there are."""
    kinds: dict[tuple[object, ...], list[Row]] = {}
    for device in devices:
        key = tuple(value for name, value in device.items() if name not in IDENTITY)
        kinds.setdefault(key, []).append(device)
    return [(found[0], len(found)) for found in kinds.values()]


def device_grid(devices: Sequence[Row]) -> Grid:
    if not devices:
        return Grid(notes=("No device was recorded, so no peaks are known and no roofline can be drawn.",))
    heads = (Head("Device", style=""), Head("SMs"), Head("SM clock", "highest"), Head("Memory"), Head("L2"),
             Head("DRAM peak"), Head("Source of the peaks", style=""))  # fmt: skip
    kinds = device_kinds(devices)
    body = [
        (
            Cell(
                _kind_name(device, count),
                "text",
                words(device["uuid"]).text if count == 1 else "see tables/devices.csv",
            ),
            numbers(values.count, device["sm_count"]),
            numbers(_hertz, device["sm_clock_max_hz"]),
            numbers(values.size, device["memory_bytes"]),
            numbers(values.size, device["l2_bytes"]),
            numbers(_rate, device["dram_peak_bytes_per_s"]),
            words(device["peaks_source"], "wide"),
        )
        for device, count in kinds[:SHOWN_ROWS]
    ]
    return Grid(heads, body, foot=_more(len(kinds), "kinds of device", "tables/devices.csv"))


def peak_grid(devices: Sequence[Row]) -> Grid:
    """Peaks by pipe, a column a kind of device."""
    kinds = device_kinds(devices)[:MOST_KINDS]
    rates = [(label, rate) for label, rate in PIPE_RATES if any(peak(device, rate) for device, _ in kinds)]
    if not rates:
        return Grid()
    heads = [Head("Pipe", style=""), *(Head(words(device["name"]).text, "peak") for device, _ in kinds)]
    body = [(words(label), *(_flops_cell(device, rate) for device, _ in kinds)) for label, rate in rates]
    note = (
        "Compute peaks are FLOP per SM and cycle × SMs × the highest SM clock; the tensor pipe's are dense. The DRAM "
        "peak is 2 × memory clock × bus width."
    )
    return Grid(heads, body, (note,))


def process_grid(processes: Sequence[Row]) -> Grid:
    heads = (Head("Process", "and its command", style=""), Head("Rank"), Head("Recorded for"),
             Head("How it ended", style=""), Head("Launches", "written"), Head("Records", "lost"),
             Head("Recorder's CPU"), Head("Layers", "and versions", style=""))  # fmt: skip
    body = [
        (
            Cell(words(row["process"]).text, "wide", below=words(command(row["command"]), limit=160).text),
            numbers(values.count, row["rank"]),
            numbers(values.duration, lasted(row), "" if row["ended_ns"] else "no closing row was written"),
            ending(row),
            numbers(values.count, row["kernels_written"]),
            numbers(values.count, row["records_lost"]),
            numbers(values.duration, row["recorder_cpu_ns"]),
            Cell(words(row["layers"]).text.replace(",", ", "), "text", below=words(_versions(row)).text),
        )
        for row in processes[:SHOWN_ROWS]
    ]
    return Grid(
        heads, body, () if body else ("No process left a record of itself.",), _more(len(processes), "processes")
    )


def cut_off(process: Row) -> bool:
    """Whether a process never wrote its closing row: still running, killed or crashed."""
    return process["ended_ns"] is None


def lasted(process: Row) -> int | None:
    if process["ended_ns"] is None or process["started_ns"] is None:
        return None
    duration = int(process["ended_ns"]) - int(process["started_ns"])
    return duration if duration >= 0 else None


def ending(process: Row) -> Cell:
    if cut_off(process):
        return Cell("cut off, or still running", "text", "what it recorded after its last flush is not here", over=True)
    return words({"stop": "stopped", "exit": "at exit", "failed": "failed"}.get(process["ending"], process["ending"]))


def command(text: str | None) -> str | None:
    """argv as one line; `text` is a JSON array, or whatever stands there."""
    try:
        argv = json.loads(text or "null")
    except ValueError:
        return text
    return " ".join(map(str, argv)) if isinstance(argv, list) else text


def recording_grid(recording: Row) -> Grid:
    """What recording itself took."""
    lines = [
        ("CPU time of the recorder's own threads", values.duration(recording["cpu_ns"])),
        ("Launches replayed for exact counters", values.count(recording["exact_launches"])),
        ("Host time spent on that", values.duration(recording["exact_ns"])),
        ("Most passes a launch was replayed for", values.count(recording["exact_passes"])),
        ("Activity records known to be lost", values.count(recording["records_lost"])),
        ("Shards and files left out or missing", values.count(recording["damage"])),
        ("Losses of every kind, as listed above", values.count(recording["losses"])),
    ]
    return Grid((Head("What", style=""), Head("How much")), [(words(what), Cell(much)) for what, much in lines])


def event_grid(events: Sequence[Row], total: int) -> Grid:
    if not events:
        return Grid(notes=("The recorder noted no event: no loss, failure or pause.",))
    heads = (Head("When", style=""), Head("Layer", style=""), Head("Kind", style=""), Head("What", style=""),
             Head("Count"), Head("Process", style=""))  # fmt: skip
    body = [
        (
            words(values.instant(row["time_ns"])),
            words(row["layer"]),
            words(row["kind"]),
            words(row["message"], "wide"),
            numbers(values.count, row["count"]),
            words(row["process"], "text"),
        )
        for row in events[:SHOWN_ROWS]
    ]
    return Grid(heads, body, ("What the recorder noted of itself:",), _more(total, "events", "tables/events.csv"))


def damage_grid(damage: Sequence[Row]) -> Grid:
    if not damage:
        return Grid(notes=("Every shard found was whole, and none is missing.",))
    heads = (Head("File or folder", style=""), Head("Problem", style=""), Head("Remedy", style=""))
    body = [
        (words(row["path"], "wide"), words(row["problem"], "wide"), words(row["remedy"], "wide"))
        for row in damage[:SHOWN_ROWS]
    ]
    what = "One file or folder was left out or is missing:"
    notes = (what if len(damage) == 1 else f"{len(damage):,} files or folders were left out or are missing:",)
    return Grid(heads, body, notes, _more(len(damage), "problems", "tables/damage.csv"))


def losses(rows: Sequence[Row]) -> list[str]:
    """Sentences for the banner, from the shipped query `losses`: what this report does not cover."""
    lines = [_loss(row) for row in rows[:SHOWN_LOSSES]]
    if len(rows) > SHOWN_LOSSES:
        lines.append(f"{len(rows) - SHOWN_LOSSES:,} more are in tables/losses.csv.")
    return lines


def _loss(row: Row) -> str:
    whose = row["process"] if row["source"] == "process" else row["subject"]
    message = f"{words(whose).text}: {words(row['message']).text}"
    counted = row["count"] is not None and row["source"] != "damage"
    return f"{message} (count: {row['count']:,})" if counted else message


def threshold_grid(settings: Sequence[Row]) -> Grid:
    heads = (Head("Setting", style=""), Head("Value"), Head("Meaning", style=""))
    body = [
        (
            words(row["name"]),
            Cell(f"{_plain(row['value'])}{values.THIN}{row['unit']}".strip()),
            words(row["meaning"], "wide"),
        )
        for row in settings
    ]
    return Grid(heads, body)


def _kind_name(device: Row, count: int) -> str:
    mig = " (MIG instance)" if device["is_mig"] else ""
    return f"{f'{count:,} × ' if count > 1 else ''}{words(device['name']).text}{mig}"


def _flops_cell(device: Row, rate: str) -> Cell:
    value = peak(device, rate)
    return Cell(
        values.scaled(value, "FLOP/s"), title="not in the table of peaks for this architecture" if value is None else ""
    )


def _versions(row: Row) -> str:
    parts = (
        ("nanalyze", row["nanalyze_version"]),
        ("Python", row["python_version"]),
        ("driver", row["gpu_driver_version"]),
        ("CUPTI", row["cupti_version"]),
    )
    return ", ".join(f"{name} {value}" for name, value in parts if value)


def _more(total: int, what: str, where: str = "") -> str:
    if total <= SHOWN_ROWS:
        return ""
    return f"{total - SHOWN_ROWS:,} further {what}{f' are in {where}' if where else ''}."


def _rate(value: object) -> str:
    return values.scaled(value, "B/s")


def _hertz(value: object) -> str:
    return values.scaled(value, "Hz")


def _plain(value: object) -> str:
    finite = values.number(value)
    return values.DASH if finite is None else f"{finite:,g}"
