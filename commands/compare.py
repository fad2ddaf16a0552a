"""`nanalyze compare`: ranges of a run, or runs with runs, with intervals and gates."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nanalyze.commands import _output
from nanalyze.commands._open import RunDirectory, check_engine, engine_options, open_run
from nanalyze.rundir.errors import NanalyzeError

if TYPE_CHECKING:
    import nanalyze.analysis as na
    from nanalyze.analysis.compare import Comparison, Sample

GATE_FAILED, NOT_COMPARABLE = 3, 4
SHOWN_KERNELS = 20


@click.command("compare")
@click.argument("runs", nargs=-1, type=RunDirectory(), metavar="[RUN]...")
@click.option(
    "--a",
    "side_a",
    multiple=True,
    type=RunDirectory(),
    metavar="RUN",
    help="A run of side A; may be repeated.",
)
@click.option(
    "--b",
    "side_b",
    multiple=True,
    type=RunDirectory(),
    metavar="RUN",
    help="A run of side B; may be repeated.",
)
@click.option(
    "--ranges", metavar="A,B", help="Compare these two ranges of one run; ranges of one name are repetitions."
)
@click.option(
    "--step", metavar="NAME", help="Range that is a repetition; by default the outermost that repeats in all runs."
)
@click.option(
    "--within", metavar="NAME", help="Compare only repetitions inside a range of this name, as one size of a sweep."
)
@click.option(
    "--skip",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Leave out the first N repetitions of each process.",
)
@click.option("--keep-spikes", is_flag=True, help="Let repetitions that took severalfold as long count in the means.")
@click.option(
    "--fail-if",
    "gates",
    multiple=True,
    metavar="GATE",
    help="Exit with 3 if it holds, as in total_ns>+3%; may be repeated.",
)
@click.option("--strict", is_flag=True, help="Exit with 4 also for an undecided gate and for any warning.")
@click.option("--allow-different", is_flag=True, help="Do not exit with 4 for different GPU models or units.")
@click.option(
    "--save-baseline",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Keep side A in this small file, to stand for RUN_A later.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the comparison as JSON; - is standard output.",
)
@click.option(
    "--markdown",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a summary for a pull request; - is standard output.",
)
@click.option("--junit", type=click.Path(path_type=Path), metavar="FILE", help="Write the gates as JUnit XML.")
@click.option(
    "--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw where the difference comes from, as PNG."
)
@click.option("--force", is_flag=True, help="Overwrite files that exist.")
@engine_options
def compare(
    runs: tuple[Path, ...],
    side_a: tuple[Path, ...],
    side_b: tuple[Path, ...],
    ranges: str | None,
    step: str | None,
    within: str | None,
    skip: int,
    keep_spikes: bool,
    gates: tuple[str, ...],
    strict: bool,
    allow_different: bool,
    save_baseline: Path | None,
    json_file: Path | None,
    markdown: Path | None,
    junit: Path | None,
    plot: Path | None,
    force: bool,
    engine: str,
    master: str | None,
) -> None:
    """Say what differs between two runs, or two ranges of a run, and how sure that is.

    Each side is RUN_A and RUN_B, or several runs given by --a and --b; for A, also a file written by
    --save-baseline. Times are means over repetitions without spikes, with 95 % intervals that allow
    for repetitions that depend on each other. A gate fails where its whole interval lies beyond the
    threshold. Exit codes: 0 no gate failed; 3 a gate failed; 4 the sides are not comparable or a gate
    asks for what was not measured, or with --strict a gate is undecided or a warning was given.

    \b
    Examples:
      nanalyze compare run_dir --ranges eager,fused --plot saving.png
      nanalyze compare before after --fail-if "total_ns>+3%" --fail-if "each:gemm.mean_ns>+5%"
      nanalyze compare --a main1 --a main2 --b branch1 --b branch2 --markdown summary.md
      nanalyze compare main --save-baseline main.parquet
      nanalyze compare main.parquet branch --fail-if "step_ns>+2%" --junit gates.xml
    """
    check_engine(engine, master)
    a, b = _sides(runs, side_a, side_b, ranges, save_baseline)
    from nanalyze.analysis import compare as comparisons
    from nanalyze.analysis.compare import baseline
    from nanalyze.analysis.compare import gates as gate_module

    for text in gates:
        gate_module.parse(text)  # before minutes of reading
    _refuse_existing([f for f in (save_baseline, json_file, markdown, junit, plot) if f is not None], force)
    names = _names(ranges)
    found_a, found_b = _samples(a, b, names, step, skip, within, partial(open_run, engine=engine, master=master))
    if save_baseline is not None:
        baseline.save(save_baseline, found_a, force=force)
        click.echo(f"Baseline: {save_baseline} ({save_baseline.stat().st_size:,} bytes)", err=not b)
    if not found_b:
        return
    result = comparisons.samples(found_a, found_b, gates=gates, keep_spikes=keep_spikes, same_run=bool(names))
    _write(result, json_file, markdown, junit, plot)
    if Path("-") not in (json_file, markdown):
        click.echo(text_of(result))
    sys.exit(_exit_code(result, strict, allow_different))


def _sides(
    runs: Sequence[Path], a: Sequence[Path], b: Sequence[Path], ranges: str | None, save_baseline: Path | None
) -> tuple[list[Path], list[Path]]:
    """The paths of each side; UsageError where they are not two, or one with --ranges or --save-baseline."""
    if runs and (a or b):
        raise click.UsageError("Give RUN_A RUN_B, or --a and --b, not both.")
    if runs:
        if len(runs) > 2:
            raise click.UsageError("More than two runs: say which side each is of, by --a RUN and --b RUN.")
        a, b = runs[:1], runs[1:]
    if ranges is not None:
        if len(a) != 1 or b:
            raise click.UsageError("--ranges compares within one run: give just that run.")
        return list(a), []
    if not a:
        raise click.UsageError("Give the runs to compare: RUN_A RUN_B.")
    if not b and save_baseline is None:
        raise click.UsageError(
            "One run compares with nothing: give a second one, --ranges A,B or --save-baseline FILE."
        )
    return list(a), list(b)


def _names(ranges: str | None) -> tuple[str, str] | None:
    if ranges is None:
        return None
    names = [name.strip() for name in ranges.split(",")]
    if len(names) != 2 or not all(names) or names[0] == names[1]:
        raise click.UsageError("--ranges takes two names with a comma between them: --ranges eager,fused.")
    return names[0], names[1]


def _refuse_existing(files: Sequence[Path], force: bool) -> None:
    for file in files:
        if str(file) != "-" and file.exists() and not force:
            raise NanalyzeError(f"{file}: exists. Use --force to overwrite it.")


def _samples(
    a: Sequence[Path],
    b: Sequence[Path],
    names: tuple[str, str] | None,
    step: str | None,
    skip: int,
    within: str | None,
    opener: Callable[[Path], na.Run],
) -> tuple[list[Sample], list[Sample]]:
    from nanalyze.analysis import compare as comparisons
    from nanalyze.analysis.compare import sample

    with ExitStack() as stack:
        if names is not None:
            run = stack.enter_context(opener(a[0]))
            one, other = (sample.read(run, name, skip=skip, label=name, within=within) for name in names)
            return [one], [other]
        opened = {path: stack.enter_context(opener(path)) for path in (*a, *b) if not path.is_file()}
        saved = {path: comparisons.load(path, step) for path in (*a, *b) if path.is_file()}
        if step is None:
            step = _step(saved, list(opened.values()))
        sides = []
        for paths in (a, b):
            found: list[Sample] = []
            for path in paths:
                found += saved[path] if path in saved else [sample.read(opened[path], step, skip=skip, within=within)]
            sides.append(found)
        return sides[0], sides[1]


def _step(saved: Mapping[Path, list[Sample]], opened: Sequence[na.Run]) -> str | None:
    """The step of the baselines, else the one that all runs have in common."""
    from nanalyze.analysis.compare import sample

    for samples in saved.values():
        return samples[0].range_name
    return sample.common_step(opened)


def _write(
    result: Comparison, json_file: Path | None, markdown: Path | None, junit: Path | None, plot: Path | None
) -> None:
    from nanalyze.analysis.compare import outputs

    if json_file is not None:
        _put(json_file, outputs.to_json(result).encode("utf-8"))
    if markdown is not None:
        _put(markdown, result.to_markdown().encode("utf-8", "backslashreplace"))
    if junit is not None:
        _put(junit, result.to_junit().encode("utf-8", "backslashreplace"))
    if plot is not None:
        from nanalyze.analysis.compare import picture

        _put(plot, picture.png(result))


def _put(path: Path, content: bytes) -> None:
    """Write a file so that it appears only when complete; - is standard output."""
    if str(path) == "-":
        sys.stdout.buffer.write(content)
        return
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    except OSError as error:
        raise NanalyzeError(f"{path}: cannot be written: {error.strerror or error}.") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _exit_code(result: Comparison, strict: bool, allow_different: bool) -> int:
    if result.blocked and not allow_different:
        return NOT_COMPARABLE
    if result.failed:
        return GATE_FAILED
    if result.unmeasured:
        return NOT_COMPARABLE
    warned = any(check.level != "note" for check in result.checks)
    return NOT_COMPARABLE if strict and (result.undecided or warned) else 0


# --- for people --------------------------------------------------------------------------------


def text_of(result: Comparison) -> str:
    """The comparison as text for a terminal."""
    from nanalyze.analysis.compare import markdown, outputs
    from nanalyze.analysis.report import values

    blocks = [
        f"A: {_output.escape(result.name_a)} ({_counted(result, 0)})\n"
        f"B: {_output.escape(result.name_b)} ({_counted(result, 1)})",
        markdown.headline(result),
    ]
    blocks += [
        "\n".join(f"{c.level}: {c.message} (A: {_output.escape(c.a)}; B: {_output.escape(c.b)})" for c in result.checks)
    ]
    rows: list[tuple[object, ...]] = list(markdown.figures(result))
    blocks.append(_output.table(["a repetition", "A", "B", "B - A", "change (95 %)"], rows))
    if result.parts:
        parts: list[tuple[object, ...]] = [(part.name, markdown.signed(part.ns)) for part in result.parts]
        blocks.append(_output.table(["where it comes from", "B - A"], parts))
    blocks.append(
        "\n".join(
            f"{side}: {markdown.verdict_text(v)}"
            for side, v in zip(("verdicts A", "verdicts B"), result.verdicts, strict=True)
        )
    )
    blocks.append(_kernel_table(result))
    blocks.append(_perturbation(result))
    if result.outcomes:
        outcomes: list[tuple[object, ...]] = [
            (o.gate.text, o.subject, outputs.shown(o), o.status) for o in result.outcomes
        ]
        blocks.append(_output.table(["gate", "of", "found (interval)", "outcome"], outcomes))
    return "\n\n".join(block for block in blocks if block).replace(values.THIN, " ")


def _kernel_table(result: Comparison) -> str:
    from nanalyze.analysis.compare import markdown

    shown = result.kernels[:SHOWN_KERNELS]
    rows: list[tuple[object, ...]] = [
        (
            markdown.plain_names([k.name])[0],
            k.pair.how,
            markdown.amount(k.time.a, "ns"),
            markdown.amount(k.time.b, "ns"),
            markdown.percent_change(k.mean) + (" *" if k.has_changed else ""),
        )
        for k in shown
    ]
    table = _output.table(["kernel", "match", "A, a repetition", "B, a repetition", "change of a launch (95 %)"], rows)
    left = len(result.kernels) - len(shown)
    more = f" {left:,} kernels with smaller differences are not shown." if left else ""
    return f"{table}\n* certain at a false discovery rate of 5 %.{more}"


def _perturbation(result: Comparison) -> str:
    from nanalyze.analysis.compare import markdown, outputs

    said = outputs.perturbation_sentence(result.perturbed)
    rows: list[tuple[object, ...]] = [
        (markdown.plain_names([name])[0], *rest) for name, *rest in outputs.perturbation_rows(result.perturbed)
    ]
    if not rows:
        return said
    return f"{said}\n{_output.table(['kernel', 'without the profiler', 'with it', 'difference'], rows)}"


def _counted(result: Comparison, side: int) -> str:
    name = (result.range_a, result.range_b)[side]
    runs = f"{result.runs[side]} runs, " if result.runs[side] > 1 else ""
    return f"{runs}{result.repetitions[side]:,} " + (
        f"repetitions of {_output.escape(name)}" if name is not None else "pieces"
    )
