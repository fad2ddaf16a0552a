"""`nanalyze compact`: fewer, larger files in a run directory, and old launches as sums a minute."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from pathlib import Path

import click

from nanalyze.commands._open import LocalRun
from nanalyze.commands.info import size_text

TARGET_MB = 64  # as compaction.TARGET_BYTES; what merges needs numpy, which --help does not
UNIT_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


def _age(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """`7d` as nanoseconds."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d{1,6})([smhdw])", value)
    if found is None:
        raise click.BadParameter(
            f"{value} is no age. Write a whole number with a unit of {', '.join(UNIT_S)}, as in 7d."
        )
    return int(found[1]) * UNIT_S[found[2]] * 1_000_000_000


@click.command("compact")
@click.argument("run_dir", type=LocalRun())
@click.option(
    "--target-mb",
    type=click.IntRange(1, 4096),
    default=TARGET_MB,
    show_default=True,
    help="Merge shards up to this size each, in MiB.",
)
@click.option(
    "--roll-up-older-than",
    callback=_age,
    metavar="AGE",
    help="Replace launches older than this (7d, 12h) by sums a minute. They are gone then.",
)
@click.option(
    "--lose-samples",
    is_flag=True,
    help="Roll launches up without attributing the samples of their time first: nothing can do it afterwards.",
)
def compact(run_dir: Path, target_mb: int, roll_up_older_than: int | None, lose_samples: bool) -> None:
    """Merge the small shards of the run in RUN_DIR into larger ones, without loss.

    It may run while the job is being recorded, as often as one likes; interrupted at any point, the run stays
    whole, and the next call finishes what was begun. A query that has the run open meanwhile can fail, because
    its files are gone; open the run again.

    With --roll-up-older-than, single launches of that time are given up: for each process, device, kernel class
    and minute their number, total, shortest and longest time and percentiles stay, and a histogram for each hour.
    Totals, percentiles and verdicts of kernels stay what they were; gaps, steps, ranges and timelines of that time
    are lost. Samples are attributed to kernels first, an hour at a time, and the counters stay with their intervals.
    A nanalyze from before this refuses the run then. Copies, ranges, exact counters and clocks stay.

    \b
    Examples:
      nanalyze compact run_dir
      nanalyze compact run_dir --roll-up-older-than 7d
    """
    from nanalyze.rundir import compaction

    if roll_up_older_than is not None:
        _roll_up(run_dir, roll_up_older_than, lose_samples)
    elif lose_samples:
        raise click.UsageError("--lose-samples goes with --roll-up-older-than.")
    done = compaction.compact(run_dir, target_bytes=target_mb << 20)
    _warn(done.left)
    if not done.merged:
        click.echo("Nothing to merge.")
        return
    noun = "shard" if done.made == 1 else "shards"
    click.echo(
        f"Merged {done.merged:,} shards into {done.made:,} {noun}: "
        f"{size_text(done.bytes_before)} before, {size_text(done.bytes_after)} after."
    )


def _roll_up(run_dir: Path, age_ns: int, lose_samples: bool) -> None:
    from nanalyze.analysis import rolled_samples
    from nanalyze.rundir import compaction

    done = compaction.roll_up(
        run_dir, time.time_ns() - age_ns, lose_samples=lose_samples, attribute=rolled_samples.windows
    )
    _warn(done.left)
    if done.end_ns is None:
        click.echo("Nothing to roll up.")
        return
    what = f"{done.launches:,} launches" + (f" and {done.samples:,} samples" if done.samples else "")
    until = datetime.fromtimestamp(done.end_ns / 1e9, UTC)
    click.echo(
        f"Rolled {what} until {until:%Y-%m-%d %H:%M} UTC up into {done.rows:,} rows: "
        f"{size_text(done.bytes_before)} before, {size_text(done.bytes_after)} after."
    )


def _warn(left: list[str]) -> None:
    for line in left:
        click.echo(f"nanalyze: warning: left as it is: {line}", err=True)
