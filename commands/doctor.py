"""`nanalyze doctor`: whether this machine can record, and what to do where it cannot."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from nanalyze.commands._output import escape
from nanalyze.recorder import diagnose


@click.command("doctor")
@click.argument("directory", default=".", type=click.Path(path_type=Path), metavar="[DIRECTORY]")
@click.option("--json", "as_json", is_flag=True, help="Write the checks as a JSON array.")
def doctor(directory: Path, as_json: bool) -> None:
    """Check what recording needs on this machine; runs would be written to DIRECTORY.

    Each line is ok, a note, or a problem with how to fix it. The exit code is 1 if there is a problem
    and 0 if not. The analysis needs none of this.

    \b
    Examples:
      nanalyze doctor
      nanalyze doctor /scratch/runs --json
    """
    _leave_alone()
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
