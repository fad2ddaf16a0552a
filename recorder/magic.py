"""The cell magic of IPython and Jupyter: `%load_ext nanalyze.recorder`, then `%%nanalyze` above a cell.

Records the cell and shows the verdicts of what it launched.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nanalyze import recorder
from nanalyze.recorder import launch
from nanalyze.rundir.errors import NanalyzeError, RecorderError

if TYPE_CHECKING:
    import pandas as pd

    from nanalyze.recorder.session import UnderWay

COLUMNS = ["kernel", "launches", "total_ns", "share", "bound", "reason"]
NAME = "nanalyze"


class _Parser(argparse.ArgumentParser):
    """Raises for a wrong option: leaving the interpreter would end the notebook."""

    def error(self, message: str) -> NoReturn:
        raise RecorderError(f"%%{NAME}: {message}. `%%{NAME} --help` lists the options.")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise _Helped


class _Helped(Exception):
    """--help has been printed."""


def _parser() -> _Parser:
    parser = _Parser(prog=f"%%{NAME}", description="Record what the kernels of this cell do.", allow_abbrev=False)
    add = parser.add_argument
    add("-o", "--output", metavar="RUN_DIR", help="directory to record into, by default run-<date>-notebook")
    add("--force", action="store_true", help="replace the run that is there, as when the cell is run again")
    add("--append", action="store_true", help="add to the run that is there")
    add("--layers", metavar="LAYER,...", help="of timeline, ranges and device_state; all by default")
    add("--no-nvtx", action="store_true", help="leave out the ranges that are marked with NVTX")
    add("--exact", metavar="REGEX", help="hardware counters of kernels whose name matches; . for all")
    add("--exact-exclude", metavar="REGEX", help="leave out kernels whose name matches")
    add("--exact-ranges", metavar="REGEX", help="only launches made while a range of a matching name is open")
    add("--exact-seconds", metavar="SECONDS", type=float, help="only in the first so many seconds of the cell")
    add("--exact-first", metavar="N", type=int, help="measure so many launches of each kernel and shape (2)")
    add("--exact-skip", metavar="N", type=int, help="let so many pass first (0)")
    add("--exact-every", metavar="N", type=int, help="after that measure every N-th; none by default")
    add("--exact-budget", metavar="PERCENT", type=float, help="share of the time that measuring may take (10)")
    add("--exact-metrics", metavar="SET", help="full, verdict, or CUPTI metrics with commas (full)")
    add("--samples", action="store_true", help="counters of the whole device at an interval; not with --exact")
    add("--samples-interval", metavar="MICROSECONDS", type=float, help="length of a sample (1000)")
    add(
        "--pause", metavar="PERCENT", type=float, help="share of the time to switch off for; 0 records every launch (1)"
    )
    add("--rows", metavar="N", type=int, default=10, help="kernels to show (10)")
    return parser


def register(shell: Any) -> None:
    """Give `shell`, an IPython InteractiveShell, the cell magic."""

    def nanalyze(line: str, cell: str) -> pd.DataFrame | None:
        return record_cell(shell, line, cell)

    # Braces and dollar signs of the options are the options' own, not names of the notebook to be filled in.
    nanalyze._ipython_magic_no_var_expand = True  # type: ignore[attr-defined]
    nanalyze.__doc__ = _parser().format_help()
    shell.register_magic_function(nanalyze, magic_kind="cell", magic_name=NAME)


def record_cell(shell: Any, line: str, cell: str) -> pd.DataFrame | None:
    """Run `cell` under a recording; the verdicts of its kernels, or None where there are none.

    An error of the cell is shown by the shell as always. One of the options, or a directory that
    cannot be used, is said in one line, and the cell is not run.
    """
    try:
        options = _parser().parse_args(_words(line))
        recording = _begin(options)
    except _Helped:
        return None
    except NanalyzeError as error:
        print(f"{NAME}: error: {error}")
        return None
    with recording:
        shell.run_cell(cell)
    try:
        return _conclude(Path(recording.run_dir), options.rows)
    except NanalyzeError as error:
        print(f"{NAME}: {error}")
        return None


def _begin(options: argparse.Namespace) -> recorder.Recorder | UnderWay:
    from nanalyze.recorder.settings import Settings

    run_dir = Path(options.output or launch.default_run_dir(["notebook"]))
    chosen = _settings(options)
    Settings(**chosen)  # refuses what is wrong before a run is replaced
    if recorder._active is None or recorder._active.is_stopped:
        launch.claim(run_dir, append=options.append, force=options.force)
        chosen["append"] = True
    return recorder.record(run_dir, **chosen)


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise RecorderError(f"%%{NAME}: {error}. Quote the option.") from None


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    names = {"exclude": "exclude", "ranges": "ranges", "seconds": "seconds", "first": "first", "skip": "skip"}
    names |= {"every": "every", "budget": "budget_pct", "metrics": "metrics"}
    exact = {key: getattr(options, f"exact_{name}") for name, key in names.items()}
    exact = {key: value for key, value in exact.items() if value is not None}
    if exact and options.exact is None:
        raise RecorderError(f"%%{NAME}: options --exact-* need --exact, which chooses the kernels")
    if exact.get("metrics") not in (None, "full", "verdict"):
        exact["metrics"] = exact["metrics"].split(",")
    settings: dict[str, Any] = {"append": options.append, "nvtx": not options.no_nvtx}
    if options.exact is not None:
        settings["exact"] = recorder.Exact(kernels=options.exact, **exact)
    if options.samples_interval is not None and not options.samples:
        raise RecorderError(f"%%{NAME}: --samples-interval needs --samples")
    if options.samples:
        given = {} if options.samples_interval is None else {"interval_us": options.samples_interval}
        settings["samples"] = recorder.Samples(**given)
    if options.pause is not None:
        settings["pause_pct"] = options.pause
    if options.force and options.append:
        raise RecorderError(f"%%{NAME}: --force replaces the run, --append adds to it: give one of them")
    if options.layers is not None:
        settings["layers"] = tuple(options.layers.split(","))
    return settings


def _conclude(run_dir: Path, rows: int) -> pd.DataFrame | None:
    """Say where the run is; the first `rows` verdicts."""
    import nanalyze.analysis as na

    shown = shlex.quote(str(run_dir.relative_to(Path.cwd()) if run_dir.is_relative_to(Path.cwd()) else run_dir))
    with na.open(run_dir) as run:
        verdicts = run.verdicts()
    if verdicts.empty:
        print(f"{NAME}: recorded into {shown}, but no kernels. Next: nanalyze info {shown}")
        return None
    launches = int(verdicts["launches"].sum())
    print(f"{NAME}: recorded {launches:,} launches into {shown}. Next: nanalyze report {shown}")
    return verdicts[COLUMNS].head(rows)
