"""`nanalyze doctor`: whether this machine can record, what to do where it cannot, and what its GPUs reach."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from nanalyze.commands._output import escape


@click.command("doctor")
@click.argument("directory", default=".", type=click.Path(path_type=Path), metavar="[DIRECTORY]")
@click.option("--json", "as_json", is_flag=True, help="Write the checks, or what was measured, as a JSON array.")
@click.option("--calibrate", is_flag=True, help="Measure what each pipe and each level of memory of the GPU reaches.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE|RUN",
    help="With --calibrate: a JSON file for the ceilings, or a run to add them to, instead of the cache.",
)
@click.option("--device", type=click.IntRange(min=0), multiple=True, help="With --calibrate: only this CUDA ordinal.")
def doctor(directory: Path, as_json: bool, calibrate: bool, output: Path | None, device: tuple[int, ...]) -> None:
    """Check what recording needs on this machine; runs would be written to DIRECTORY.

    Each line is ok, a note, or a problem with how to fix it. The exit code is 1 if there is a problem
    and 0 if not. The analysis needs none of this.

    With --calibrate it measures the GPU's own ceilings instead, in seconds, without changing its clocks.
    They are kept for this GPU, and later recordings hold them beside the datasheet's numbers; measure
    while nothing else runs on it.

    \b
    Examples:
      nanalyze doctor
      nanalyze doctor /scratch/runs --json
      nanalyze doctor --calibrate
      nanalyze doctor --calibrate -o run_dir
    """
    from nanalyze.commands import _calibrate
    from nanalyze.recorder import diagnose

    _leave_alone()
    if calibrate:
        _calibrate.calibrate(list(device) or None, output, as_json=as_json)
        return
    if output is not None or device:
        raise click.UsageError("-o and --device go with --calibrate")
    checks = diagnose.diagnose(directory)
    if as_json:
        click.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            click.echo(f"{check.status:<7}  {check.name:<{width}}  {escape(check.found)}")
            if check.remedy:
                click.echo(f"{'':<7}  {'':<{width}}  fix: {escape(check.remedy)}")
    if any(check.status == diagnose.PROBLEM for check in checks):
        click.get_current_context().exit(1)


def _leave_alone() -> None:
    """Inside a recorded job, loading the driver to look at it would start a recording."""
    hook = sys.modules.get("nanalyze_start_hook")
    if hook is not None:
        hook.disarm()
