"""`nanalyze doctor --calibrate`: measures, shows a table, and keeps the ceilings where they are to go."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from nanalyze.analysis.report import values
from nanalyze.commands._output import escape
from nanalyze.recorder import calibrate as calibration
from nanalyze.recorder import ceilings
from nanalyze.recorder.calibrate import Calibration
from nanalyze.recorder.ceilings import Ceiling
from nanalyze.rundir import runfile
from nanalyze.rundir.errors import RecorderError

HEADS = ("ceiling", "method", "median", "spread", "SM clock", "of datasheet")
PARTIAL = "*"
LOW_CLOCK = 0.97  # of the highest


def calibrate(ordinals: list[int] | None, output: Path | None, *, as_json: bool) -> None:
    """Measure the devices with these ordinals, or all; write to `output` or the cache. Raises NanalyzeError."""
    is_run = output is not None and output.is_dir()
    if is_run and output is not None:
        runfile.read(output)  # what is no run shall be refused before anything is measured
    else:
        ceilings.read(output or ceilings.cache_file())
    found = calibration.calibrate(ordinals, lambda text: click.echo(f"measuring {escape(text)}", err=True))
    if as_json:
        rows = [{"uuid": one.device["uuid"], **asdict(row)} for one in found for row in one.ceilings]
        click.echo(json.dumps(rows, indent=2))
    else:
        for one in found:
            click.echo(_table(one))
    measured = {str(one.device["uuid"]): one.ceilings for one in found if one.ceilings}
    if not measured:
        raise RecorderError("nothing was measured, so nothing is kept")
    click.echo(_keep(measured, output, is_run=is_run), err=as_json)


def _keep(measured: ceilings.ByDevice, output: Path | None, *, is_run: bool) -> str:
    if is_run and output is not None:
        added = ceilings.add_to_run(output, measured)
        return f"added to {added} process{'es' if added != 1 else ''} of {output}"
    path = output or ceilings.cache_file()
    ceilings.write(path, measured)
    kept = f"kept in {path}"
    return kept if output is not None else f"{kept}: later recordings on this GPU hold them"


def _table(one: Calibration) -> str:
    """One line a ceiling, for people."""
    row = one.device
    lines = [f"{row['name']} ({row['uuid']}), {row['sm_count']} SMs, SM clock at most {_mhz(row['sm_clock_max_hz'])}"]
    cells = [HEADS, *(_cells(one, ceiling) for ceiling in one.ceilings)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        text = [f"{cell:<{width}}" if place < 2 else f"{cell:>{width}}" for place, (cell, width) in
                enumerate(zip(line, widths, strict=True))]  # fmt: skip
        lines.append("  ".join(text).rstrip())
    if any(ceiling.is_partial for ceiling in one.ceilings):
        lines.append(f"{PARTIAL} mma.sync reaches only part of the tensor pipe here: no peak, whatever it shows")
    if any(_is_limited(one, ceiling) for ceiling in one.ceilings):
        lines.append("! the SM clock stood below its highest while it ran: held down by power or heat, or set so")
    lines += [f"not measured: {name}: {why}" for name, why in one.missing.items()]
    return "\n".join(map(escape, lines)) + "\n"


def _is_limited(one: Calibration, ceiling: Ceiling) -> bool:
    """By the clock itself: NVML's reasons are those of one moment, and often past before they are read."""
    highest = one.device["sm_clock_max_hz"]
    return bool(highest and ceiling.sm_clock_hz and ceiling.sm_clock_hz < LOW_CLOCK * highest)


def _cells(one: Calibration, ceiling: Ceiling) -> tuple[str, ...]:
    datasheet = one.datasheet_per_s(ceiling)
    return (
        ceiling.ceiling,
        ceiling.method,
        values.scaled(ceiling.per_s, ceiling.unit.replace("bytes", "B")) + (PARTIAL if ceiling.is_partial else ""),
        f"{100 * ceiling.spread:.1f} %",
        _mhz(ceiling.sm_clock_hz) + ("!" if _is_limited(one, ceiling) else ""),
        f"{100 * ceiling.per_s / datasheet:.1f} %" if datasheet else values.DASH,
    )


def _mhz(hertz: int | None) -> str:
    return f"{hertz / 1e6:.0f} MHz" if hertz else values.DASH
