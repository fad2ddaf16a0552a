"""`nanalyze trend`: the same job over days."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nanalyze.analysis.engines import location
from nanalyze.commands import _output
from nanalyze.commands._open import RunDirectory, open_run
from nanalyze.rundir.errors import NanalyzeError
from nanalyze.rundir.runfile import RUN_FILE

if TYPE_CHECKING:
    from nanalyze.analysis.compare.gates import Outcome
    from nanalyze.analysis.trend import Trend

GATE_FAILED, UNMEASURED = 3, 4
FORMATS = ("table", "json", "csv", "markdown")


@click.command("trend")
@click.argument("runs", nargs=-1, required=True, type=RunDirectory(), metavar="RUN...")
@click.option("--step", metavar="NAME", help="Range that is a step; by default the outermost that repeats in all runs.")
@click.option(
    "--format", "format", type=click.Choice(FORMATS), default="table", show_default=True, help="What to print."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Also write trend.html, plots as PNG and SVG, tables as CSV and trend.json into this directory.",
)
@click.option(
    "--least",
    type=click.FloatRange(0, 100),
    default=0.5,
    show_default=True,
    metavar="PERCENT",
    help="Do not report smaller changes.",
)
@click.option(
    "--fail-if",
    "gates",
    multiple=True,
    metavar="GATE",
    help="Exit with 3 if it holds, as in total_ns>+3% or each:gemm.total_ns>+5%; may be repeated.",
)
@click.option("--no-verdicts", is_flag=True, help="Do not work out what bounds each kernel, which takes longest.")
@click.option("--force", is_flag=True, help="Write into a directory that holds something else.")
def trend(
    runs: tuple[Path, ...],
    step: str | None,
    format: str,
    output: Path | None,
    least: float,
    gates: tuple[str, ...],
    no_verdicts: bool,
    force: bool,
) -> None:
    """Say which kernels of a job changed or drift over its RUNs, since when, and what changed with them.

    RUNs are run directories of the same job, or directories that hold some, in any order; time that was rolled up
    counts. Eight runs or more are needed to find a change; fewer are listed. Where nothing changed, one of twenty
    trends shows anything at all. A gate judges the change that was found, from the first run to the last, by its
    95 % interval. Exit codes: 0 no gate failed; 3 a gate failed; 4 a gate asks for what was not tested.

    \b
    Examples:
      nanalyze trend runs/ -o trend
      nanalyze trend monday tuesday wednesday --step train_step --format markdown
      nanalyze trend runs/ --fail-if "total_ns>+3%" --fail-if "each:gemm.total_ns>+5%"
    """
    from nanalyze.analysis import trend as trends
    from nanalyze.analysis.trend import gates as gate_module
    from nanalyze.analysis.trend import page

    if output is not None:
        page.check_target(output, force)
    parsed = [gate_module.parse(text) for text in gates]  # before minutes of reading
    found = _found(runs)
    with ExitStack() as stack, _progress(len(found)) as step_done:
        opened = [stack.enter_context(open_run(path)) for path in found]
        result = trends.trend(
            opened, labels=_labels(found), step=step, least=least / 100, verdicts=not no_verdicts, progress=step_done
        )
    outcomes = gate_module.judge(parsed, result)
    if output is not None:
        written = page.write(result, output, _version(), force=force, gates=outcomes)
        click.echo(f"Trend: {written}", err=True)
    _print(result, outcomes, format)
    sys.exit(_exit_code(outcomes))


def _found(paths: Sequence[Path]) -> list[Path]:
    """The run directories, those inside a directory of runs by name."""
    found: list[Path] = []
    for path in paths:
        if location.is_uri(str(path)) or (path / RUN_FILE).exists() or not path.is_dir():
            found.append(path)  # opening it says what is wrong with it
            continue
        try:
            inside = sorted(child for child in path.iterdir() if (child / RUN_FILE).is_file())
        except OSError as error:
            raise NanalyzeError(f"{path}: cannot be read: {error.strerror or error}. Check its permissions.") from error
        if not inside:
            raise NanalyzeError(f"{path}: is no run and holds none. Give run directories, or a directory of them.")
        found += inside
    return found


def _labels(paths: Sequence[Path]) -> list[str]:
    """The directories' names where these differ, else the paths."""
    names = [(path if location.is_uri(str(path)) else path.absolute()).name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


class _progress:
    """A bar over the runs on a terminal; nothing elsewhere."""

    def __init__(self, length: int) -> None:
        shown = sys.stderr.isatty()
        self._bar = click.progressbar(length=length, label="Reading", file=sys.stderr) if shown else None

    def __enter__(self) -> _progress:
        if self._bar is not None:
            self._bar.__enter__()
        return self

    def __call__(self, name: str) -> None:
        if self._bar is not None:
            self._bar.update(1)

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)


def _version() -> str:
    try:
        return version("nanalyze")
    except PackageNotFoundError:
        return "unknown"


def _print(result: Trend, outcomes: Sequence[Outcome], format: str) -> None:
    from nanalyze.analysis.trend import outputs

    if format == "json":
        click.echo(outputs.to_json(result, outcomes), nl=False)
    elif format == "csv":
        click.echo(csv_text(result), nl=False)
    elif format == "markdown":
        click.echo(outputs.to_markdown(result), nl=False)
    else:
        click.echo(text_of(result, outcomes))


def csv_text(result: Trend) -> str:
    """One row a series as CSV."""
    import pyarrow as pa

    from nanalyze.analysis.report import tables
    from nanalyze.analysis.trend import outputs

    sink = io.BytesIO()
    tables.write_csv(sink, pa.Table.from_pylist([outputs.summary(row, result) for row in result.rows]))
    return sink.getvalue().decode("utf-8")


def _exit_code(outcomes: Sequence[Outcome]) -> int:
    from nanalyze.analysis.compare import gates

    states = {outcome.status for outcome in outcomes}
    if gates.FAILED in states:
        return GATE_FAILED
    return UNMEASURED if gates.UNMEASURED in states else 0


def text_of(result: Trend, outcomes: Sequence[Outcome]) -> str:
    """The trend as text for a terminal."""
    from nanalyze.analysis.compare.outputs import shown as gate_text
    from nanalyze.analysis.report import values
    from nanalyze.analysis.trend import outputs

    blocks = ["\n".join(outputs.headline(result))]
    rows: list[tuple[object, ...]] = [outputs.cells(row, result) for row in outputs.shown(result)]
    left = len(result.rows) - len(rows)
    more = f"\n{left:,} further kernels without a change are not shown." if left else ""
    blocks.append(_output.table(list(outputs.HEADS), rows) + more)
    marks: list[tuple[object, ...]] = [outputs.mark_cells(mark, result) for mark in result.marks]
    if marks:
        blocks.append(_output.table(["run", "date", "what else changed", "before", "after"], marks))
    judged: list[tuple[object, ...]] = [
        (outcome.gate.text, outcome.subject, gate_text(outcome), outcome.status, outcome.reason) for outcome in outcomes
    ]
    if judged:
        blocks.append(_output.table(["gate", "of", "found (interval)", "outcome", "why"], judged))
    return "\n\n".join(blocks).replace(values.THIN, " ")
