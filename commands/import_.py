"""`nanalyze import`: other tools' traces become a run directory."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nanalyze.importers import registry
from nanalyze.importers.options import LOCALES, Options

if TYPE_CHECKING:
    from nanalyze.importers.sink import ImportSummary

KINDS = ("kineto", "ncu", "nsys", "proton")


@click.command("import")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", required=True, metavar="RUN_DIR", type=click.Path(path_type=Path), help="Run directory to make."
)
@click.option("--kind", type=click.Choice(KINDS), help="What wrote the files, where their content does not tell.")
@click.option("--locale", type=click.Choice(LOCALES), help="How numbers are written: 1,234.5 (en) or 1.234,5 (de).")
@click.option("--device", metavar="ID", help="Only what ran on the device of this number or UUID.")
@click.option("--no-align", is_flag=True, help="Leave the clocks of several ranks as they are.")
@click.option("--force", is_flag=True, help="Replace the run directory if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Say what was read as one JSON object.")
def import_(
    files: tuple[Path, ...],
    output: Path,
    kind: str | None,
    locale: str | None,
    device: str | None,
    no_align: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Import traces of other tools into a run directory.

    Reads Nsight Compute (.ncu-rep, --csv output), Nsight Systems (SQLite, Parquet directory),
    torch.profiler (Kineto JSON, also .gz) and Triton Proton (.hatchet). Several files of one kind
    become one run, such as the ranks of a job. What was read and what was left out is shown, and
    stored in the table events.

    \b
    Examples:
      nanalyze import report.sqlite -o run_dir
      nanalyze import rank0.json.gz rank1.json.gz -o run_dir
      nanalyze import metrics.csv -o run_dir --locale de
    """
    options = Options(kind=kind, locale=locale, device=device, align=not no_align)
    with _progress() as progress:
        summary = registry.import_files(files, output, options, force=force, progress=progress)
    if as_json:
        click.echo(json.dumps(_plain(summary), indent=2))
        return
    for line in lines(summary):
        click.echo(line)


def lines(summary: ImportSummary) -> Iterator[str]:
    """What was read, what was left out, and what to do next."""
    yield f"Imported {_listed(summary.files)} ({summary.source}) into {summary.run_dir}."
    yield "Read:"
    yield from _counts(summary.read)
    yield f"GPU time of all kernels: {summary.kernel_ns:,} ns."
    if summary.refused:
        yield "Left out:"
        yield from _counts(summary.refused)
    for note in summary.notes:
        yield f"Note: {note}"
    yield f"Next: nanalyze report {shlex.quote(str(summary.run_dir))}"


def _counts(counts: Mapping[str, int]) -> Iterator[str]:
    width = max((len(f"{n:,}") for n in counts.values()), default=0)
    for what, n in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        yield f"  {n:>{width},}  {what}"


def _listed(files: tuple[Path, ...]) -> str:
    return str(files[0]) if len(files) == 1 else f"{len(files)} files"


def _plain(summary: ImportSummary) -> dict[str, object]:
    plain = asdict(summary)
    plain["run_dir"] = str(summary.run_dir)
    plain["files"] = [str(path) for path in summary.files]
    return plain


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """Something to call with what is done and the whole: draws a bar on a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=1000, label="Importing", file=sys.stderr) as bar:

        def step(done: int, total: int) -> None:
            bar.update(max(0, int(1000 * done / max(total, 1)) - bar.pos))

        yield step
