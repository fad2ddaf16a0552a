"""The command `nanalyze`: a group with one module of this package for each subcommand.

A subcommand is loaded when it is asked for, so a broken or missing one harms no other, and
`nanalyze sql` pays for nothing that `nanalyze report` needs. Errors that a user can solve
(`NanalyzeError`) end here as one line on stderr with exit code 1; usage errors are click's, with
code 2; everything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import importlib
import importlib.util
import keyword
import os
import sys
from collections.abc import MutableMapping
from typing import Any

import click

from nanalyze.rundir.errors import NanalyzeError

# Module and command have the verb's name; a module named like a keyword has an underscore behind it.
VERBS = ("record", "report", "sql", "compare", "trend", "import", "export", "info", "compact", "top", "doctor")


DUCKDB_INTERRUPTED = "Query interrupted"  # all that is left of a KeyboardInterrupt during a query


class Commands(click.Group):
    """The verbs whose modules are installed, each imported only when it is needed."""

    @property
    def commands(self) -> MutableMapping[str, click.Command]:
        """Every command by its verb; imports them all."""
        context = click.Context(self)
        found = {verb: self.get_command(context, verb) for verb in self.list_commands(context)}
        return {verb: command for verb, command in found.items() if command is not None}

    @commands.setter
    def commands(self, value: object) -> None:
        """click.Group sets its own, which stay unused."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(verb for verb in VERBS if importlib.util.find_spec(_module_name(verb)))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        if cmd_name != "record":  # whose job must find its environment as it was
            # Read when numpy is loaded. On cores that others use too, OpenBLAS's threads spin for each other: 200
            # kernel classes took 149 s to attribute with them and 19 s without, at 8 s of CPU time.
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        try:
            module = importlib.import_module(_module_name(cmd_name))
        except ImportError as error:
            return _unavailable(cmd_name, error)
        command = getattr(module, module.__name__.rpartition(".")[2], None)
        if not isinstance(command, click.Command):
            raise TypeError(f"{module.__name__} defines no click command of its own name")
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except NanalyzeError as error:
            click.echo(f"nanalyze: error: {one_line(error)}", err=True)
            ctx.exit(error.exit_code)
        except RuntimeError as error:
            if str(error) == DUCKDB_INTERRUPTED:
                raise click.Abort from None
            raise


def one_line(error: BaseException) -> str:
    """The message without line breaks or other control characters, which a path may hold."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(error))


def _module_name(verb: str) -> str:
    return f"{__name__}.{verb}_" if keyword.iskeyword(verb) else f"{__name__}.{verb}"


def _unavailable(verb: str, error: ImportError) -> click.Command:
    """Stands in for a command whose module cannot be imported, and says why when it is run."""

    @click.command(verb, context_settings={"ignore_unknown_options": True}, add_help_option=False)
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def unavailable(arguments: tuple[str, ...]) -> None:
        missing = f"install {error.name}" if error.name else "reinstall nanalyze"
        raise NanalyzeError(f"{verb}: cannot be loaded: {error}. To use it, {missing}.")

    unavailable.help = f"(cannot be loaded: {error})"
    return unavailable


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="nanalyze")
def main() -> None:
    """Per-kernel GPU counters recorded from Python, analysed with SQL.

    \b
    Example:
      nanalyze report run_dir
      nanalyze sql run_dir "SELECT kernel, share, bound, reason FROM verdicts LIMIT 10"
    """
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets its escape, not a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
