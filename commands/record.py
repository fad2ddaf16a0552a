"""`nanalyze record`: turns into the job, with the recorder armed in every Python process of it."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from nanalyze.recorder import launch
from nanalyze.rundir.errors import RecorderError

CONFIGURATION = "pyproject.toml"
SECTION = "nanalyze"


class JobCommand(click.Command):
    """A command whose own options end where the job begins, and whose defaults may stand in pyproject.toml."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, job, is_exact = self._split(ctx, args)
        ctx.meta["is_exact"] = is_exact
        if not ctx.resilient_parsing and "--help" not in own and "-h" not in own:
            ctx.default_map = configured(self, Path.cwd())
        return super().parse_args(ctx, [*own, "--", *job])

    def _split(self, ctx: click.Context, args: list[str]) -> tuple[list[str], list[str], bool]:
        """The options of `nanalyze record`, the job, and whether `--` stood between them."""
        options = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)]
        takes_value = {spelling for option in options if not option.is_flag for spelling in option.opts}
        switches = {spelling for option in options if option.is_flag for spelling in option.opts}
        place = 0
        while place < len(args) and args[place].startswith("-") and args[place] not in ("-", "--", "-m"):
            place += 2 if _last_of(args[place], switches) in takes_value else 1
        is_exact = args[place : place + 1] == ["--"]
        return args[:place], args[place + is_exact :], is_exact


def _last_of(word: str, switches: set[str]) -> str:
    """The option that `word` ends with: -o of -qo, where -q is a switch."""
    if word.startswith("--") or not all(f"-{letter}" in switches for letter in word[1:-1]):
        return word
    return f"-{word[-1]}"


def configured(command: click.Command, folder: Path) -> dict[str, Any]:
    """What [tool.nanalyze] says, of the nearest pyproject.toml that has that section, in or above `folder`.

    Raises RecorderError for a file that is not TOML, a name that is no option, and a value that it cannot have.
    """
    for path in (parent / CONFIGURATION for parent in (folder, *folder.parents)):
        section = _section(path)
        if section is None:
            continue
        known = {option.name: option for option in command.params if isinstance(option, click.Option) and option.name}
        values = {name.replace("-", "_"): value for name, value in section.items()}
        for name in values:
            if name not in known:
                names = ", ".join(name.replace("_", "-") for name in sorted(known))
                raise RecorderError(f"{path}: [tool.{SECTION}] has no setting {name!r}. It has {names}.")
        return {name: _checked(path, known[name], value) for name, value in values.items()}
    return {}


def _section(path: Path) -> dict[str, Any] | None:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if SECTION not in text:  # a broken file that does not concern us is not ours to report
        return None
    try:
        section = tomllib.loads(text).get("tool", {}).get(SECTION)
    except tomllib.TOMLDecodeError as error:
        raise RecorderError(f"{path}: is not valid TOML ({error}). Correct it, or run elsewhere.") from None
    if section is not None and not isinstance(section, dict):
        raise RecorderError(f"{path}: tool.{SECTION} is not a table. Write [tool.{SECTION}].")
    return section


def _checked(path: Path, option: click.Option, value: Any) -> Any:
    """The value of a setting in the file at `path`; a list as the command line has it, so that both are read alike."""
    if isinstance(option.type, click.types.BoolParamType):
        fits, wanted = isinstance(value, bool), "true or false"
    elif isinstance(option.type, click.types.IntParamType):
        fits, wanted = type(value) is int, "a whole number"
    elif isinstance(option.type, click.types.FloatParamType):
        fits, wanted = type(value) in (int, float), "a number"
    else:
        items = value if isinstance(value, list) else [value]
        fits, wanted = all(isinstance(item, str) for item in items), "text in quotes"
    if not fits:
        name = str(option.name).replace("_", "-")
        raise RecorderError(f"{path}: {name} = {value!r} in [tool.{SECTION}] is not {wanted}. Correct it.")
    return ",".join(value) if isinstance(value, list) else value


class _Option(click.Option):
    """Click's, whose 8.2.0 and 8.2.1 take any value of a switch's variable for on, NANALYZE_SAMPLES=0 too."""

    def value_from_envvar(self, ctx: click.Context) -> Any:
        if not self.is_bool_flag:
            return super().value_from_envvar(ctx)
        value = click.Parameter.resolve_envvar_value(self, ctx)
        return None if value is None else click.BOOL.convert(value, self, ctx)


def option(name: str, *short: str, **settings: Any) -> Callable[[Any], Any]:
    """A click option that is also an environment variable: NANALYZE_ and the long name."""
    variable = "NANALYZE_" + name.removeprefix("--").split("/")[0].replace("-", "_").upper()
    return click.option(*short, name, cls=_Option, envvar=variable, **settings)


@click.command("record", cls=JobCommand)
@option("--output", "-o", metavar="RUN_DIR", help="Directory to record into, by default run-<date>-<job>.")
@option("--force", is_flag=True, help="Replace the run in RUN_DIR.")
@option("--append", is_flag=True, help="Add to the run in RUN_DIR.")
@option("--layers", metavar="LAYER,...", help="Of timeline, ranges and device_state; all by default.")
@option(
    "--flush", metavar="SECONDS", type=float, help="Seconds between writes: the most that kill -9 can cost (default 5)."
)
@option(
    "--timestamps", type=click.Choice(["host", "device"]), help="Memory into which the GPU writes them (default host)."
)
@option("--launch-times/--no-launch-times", default=True, help="Note when each kernel was launched, and so its range.")
@option(
    "--overhead",
    metavar="PERCENT",
    type=float,
    help="CPU time the recorder may take, of the job's cores, at most 5 % of one (default 1).",
)
@option(
    "--pause",
    metavar="PERCENT",
    type=float,
    help="Share of the time to switch off for, to measure what recording costs the steps (default 1; 0: never).",
)
@option("--copies/--no-copies", default=True, help="Record copies.")
@option("--memsets/--no-memsets", default=False, help="Record memory sets: each costs the GPU about 2 us.")
@option("--nvtx/--no-nvtx", default=True, help="Record the ranges that the job marks with NVTX.")
@option("--exact", metavar="REGEX", help="Hardware counters of kernels whose name matches; `.` for all.")
@option("--exact-exclude", metavar="REGEX", help="Leave out kernels whose name matches.")
@option(
    "--exact-ranges",
    metavar="REGEX",
    help="Only launches made while a range (annotate or NVTX) of a matching name is open.",
)
@option("--exact-seconds", metavar="SECONDS", type=float, help="Only in the first so many seconds of each process.")
@option("--exact-first", metavar="N", type=int, help="Measure so many launches of each kernel and shape (default 2).")
@option("--exact-skip", metavar="N", type=int, help="Let so many pass first (default 0).")
@option("--exact-every", metavar="N", type=int, help="After that measure every N-th; none by default.")
@option("--exact-budget", metavar="PERCENT", type=float, help="Share of the time that measuring may take (default 10).")
@option(
    "--exact-metrics",
    metavar="SET",
    help="full, verdict (half the passes) or CUPTI metrics with commas (default full).",
)
@option("--exact-graphs/--no-exact-graphs", default=True, help="Measure CUDA graph launches as a whole.")
@option(
    "--samples/--no-samples",
    default=None,
    help="Counters of the whole device at an interval: on by default, but not with --exact.",
)
@option("--samples-interval", metavar="MICROSECONDS", type=float, help="Length of a sample (default 1000).")
@option(
    "--samples-window", metavar="SECONDS", type=float, help="How long a group of counters has its turn (default 1)."
)
@option(
    "--samples-overhead",
    metavar="PERCENT",
    type=float,
    help="Share of a CPU core that sampling alone may take (default: what --overhead leaves).",
)
@option("--start-on", metavar="MODULE,...", help="Start recording when one of these modules is imported, too.")
@option("--delay", metavar="SECONDS", type=float, help="Start so long after each process turns to CUDA (default 0).")
@option("--duration", metavar="SECONDS", type=float, help="Stop recording each process after so long.")
@option("--quiet", "-q", is_flag=True, help="Leave out the last line, which says where the run is.")
@click.argument("job", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND [ARGUMENT]...")
@click.pass_context
def record(ctx: click.Context, /, job: tuple[str, ...], **options: Any) -> None:
    """Run a job and record what its kernels do.

    The job is a Python script, `-m` and a module, or any command; after `--` it is run as it stands.
    This process becomes the job, so its streams, signals and exit code are the job's own (127 or 126
    if it cannot be started). Each Python process of it that uses CUDA writes its part, children
    included; the others leave nothing. Every option is also an environment variable, such as
    NANALYZE_EXACT_FIRST, and a setting of [tool.nanalyze] in pyproject.toml, such as exact-first.

    \b
    Examples:
      nanalyze record train.py --epochs 3
      nanalyze record -o run_dir --exact "gemm|softmax" -m package.train
      nanalyze record -o run_dir -- torchrun --nproc-per-node 8 train.py
    """
    if not job:
        raise click.UsageError("Give the job: a script, -m MODULE or -- COMMAND.")
    if options["append"] and options["force"]:
        raise click.UsageError("--force replaces the run, --append adds to it: give one of them.")
    _leave_out_idle(ctx, options)
    command = launch.resolve(job, is_exact=ctx.meta["is_exact"])
    shown = options["output"] or launch.default_run_dir(command)
    unchecked = request(shown, **options)
    unchecked.check()  # before anything is touched
    ignored = launch.ignores_environment(command)
    if ignored:
        click.echo(
            f"nanalyze: warning: Python's option {ignored} keeps the recorder out: nothing is recorded.", err=True
        )
    processes, kernels = launch.claim(Path(unchecked.run_dir), append=options["append"], force=options["force"])
    checked = request(shown, processes=processes, kernels=kernels, **options)
    launch.become(command, launch.environment(checked))


def _leave_out_idle(ctx: click.Context, options: dict[str, Any]) -> None:
    """Forget how to measure or sample, as the environment or the file has it, where neither was asked for.

    On the command line it is a mistake, which `request` refuses.
    """
    for chooser, is_on in (("exact", bool(options["exact"])), ("samples", _is_sampled(options))):
        if is_on:
            continue
        for name in options:
            if name.startswith(f"{chooser}_") and ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
                options[name] = None


def request(shown: str, *, processes: int = 0, kernels: int = 0, **options: Any) -> launch.Request:
    """What the options ask for; what was not given keeps the library's default.

    Raises UsageError for options that need another one.
    """
    given: dict[str, Any] = {}
    for name, key in (
        ("flush", "flush_s"),
        ("timestamps", "timestamps"),
        ("overhead", "overhead_pct"),
        ("pause", "pause_pct"),
    ):
        if options[name] is not None:
            given[key] = options[name]
    if options["layers"] is not None:
        given["layers"] = _list(options["layers"])
    return launch.Request(
        run_dir=str(Path(shown).absolute()),
        shown=shlex.quote(shown),
        launch_times=options["launch_times"],
        nvtx=options["nvtx"],
        copies=options["copies"],
        memsets=options["memsets"],
        exact=_exact(options),
        samples=_samples(options),
        start_on=_list(options["start_on"] or ""),
        delay_s=options["delay"],
        duration_s=options["duration"],
        quiet=options["quiet"],
        processes=processes,
        kernels=kernels,
        **given,
    )


def _exact(options: dict[str, Any]) -> dict[str, Any] | None:
    names = {
        "exclude": "exclude",
        "ranges": "ranges",
        "seconds": "seconds",
        "first": "first",
        "skip": "skip",
        "every": "every",
        "budget": "budget_pct",
        "metrics": "metrics",
    }
    given = {names[name]: options[f"exact_{name}"] for name in names if options[f"exact_{name}"] is not None}
    if not options["exact"]:  # an empty one takes back what the environment or the file has
        if given:
            raise click.UsageError("Options --exact-* need --exact, which chooses the kernels.")
        return None
    if given.get("metrics") not in (None, "full", "verdict"):
        given["metrics"] = list(_list(given["metrics"]))
    return {"kernels": options["exact"], "graphs": options["exact_graphs"], **given}


def _samples(options: dict[str, Any]) -> dict[str, Any] | None:
    names = {"interval": "interval_us", "window": "window_s", "overhead": "overhead_pct"}
    given = {names[name]: options[f"samples_{name}"] for name in names if options[f"samples_{name}"] is not None}
    if not _is_sampled(options):
        if given:
            raise click.UsageError("Options --samples-* need --samples.")
        return None
    return given if options["samples"] else {**given, "by_default": True}


def _is_sampled(options: dict[str, Any]) -> bool:
    """As asked; else wherever it can be: beside a timeline, and without exact counters."""
    if options["samples"] is not None:
        return bool(options["samples"])
    return not options["exact"] and "timeline" in _list(options["layers"] or "timeline")


def _list(text: str) -> tuple[str, ...]:
    return tuple(item for item in (item.strip() for item in text.split(",")) if item)
