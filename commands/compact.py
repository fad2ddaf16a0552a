"""`nanalyze compact`: fewer, larger files in a run directory."""

from __future__ import annotations

from pathlib import Path

import click

from nanalyze.commands.info import size_text
from nanalyze.rundir import compaction


@click.command("compact")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--target-mb",
    type=click.IntRange(1, 4096),
    default=compaction.TARGET_BYTES >> 20,
    show_default=True,
    help="Merge shards up to this size each, in MiB.",
)
def compact(run_dir: Path, target_mb: int) -> None:
    """Merge the small shards of the run in RUN_DIR into larger ones, without loss.

    It may run while the job is being recorded, as often as one likes; interrupted at any point, the run stays
    whole, and the next call finishes what was begun. A query that has the run open meanwhile can fail, because
    its files are gone; open the run again.

    \b
    Examples:
      nanalyze compact run_dir
    """
    done = compaction.compact(run_dir, target_bytes=target_mb << 20)
    for line in done.left:
        click.echo(f"nanalyze: warning: left as it is: {line}", err=True)
    if not done.merged:
        click.echo("Nothing to merge.")
        return
    noun = "shard" if done.made == 1 else "shards"
    click.echo(
        f"Merged {done.merged:,} shards into {done.made:,} {noun}: "
        f"{size_text(done.bytes_before)} before, {size_text(done.bytes_after)} after."
    )
