"""Writes `docs/commands.md` from the commands themselves.

python -m nanalyze.commands.document            # write it
python -m nanalyze.commands.document --check    # exit 1 if it is out of date
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from nanalyze.rundir.document import write_or_check

# From the repository's root, where the Makefile and CI call this.
DOCUMENT = Path("docs/commands.md")

HEAD = """\
<!-- Generated from the commands' own help by `make docs`. Do not edit. -->
# Commands

Every command prints this with `--help`. Exit codes: 0 done; 1 a problem that the message on
standard error names, with what to do about it; 2 wrong options or arguments. Any other exit code
a command has stands in its section.
"""


def document(main: click.Group) -> str:
    """The whole page for the command group `main`."""
    return "\n".join([HEAD, *(_section(name, main.commands[name]) for name in sorted(main.commands))])


def _section(name: str, command: click.Command) -> str:
    lines = [f"## nanalyze {name}", "", f"    nanalyze {' '.join([name, *_usage(command)])}", ""]
    lines += [*_help(command.help or ""), ""]
    options = [
        parameter for parameter in command.params if isinstance(parameter, click.Option) and not parameter.hidden
    ]
    if options:
        lines += ["| option | meaning |", "|---|---|", *(_row(option) for option in options), ""]
    return "\n".join(lines)


def _usage(command: click.Command) -> Iterator[str]:
    if any(isinstance(parameter, click.Option) for parameter in command.params):
        yield "[OPTIONS]"
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            name = (parameter.metavar or parameter.name or "").upper()
            name += "..." if parameter.nargs == -1 and not name.endswith("...") else ""
            yield name if parameter.required or name.startswith("[") else f"[{name}]"


def _help(text: str) -> Iterator[str]:
    """click's help as Markdown: a paragraph marked `\\b` keeps its lines, as code."""
    for index, paragraph in enumerate(inspect.cleandoc(text.split("\f", 1)[0]).split("\n\n")):
        if index:
            yield ""
        if paragraph.startswith("\b"):
            yield from ("```", *paragraph.split("\n")[1:], "```")
        else:
            yield paragraph


def _row(option: click.Option) -> str:
    spellings = ", ".join(f"`{spelling}`" for spelling in (*option.opts, *option.secondary_opts))
    value = "" if option.is_flag or option.count else f" {_value(option)}"
    meaning = " ".join((option.help or "").split()) + _default(option)
    return f"| {spellings}{_cell(value)} | {_cell(meaning)} |"


def _value(option: click.Option) -> str:
    if option.metavar:
        return option.metavar
    if isinstance(option.type, click.Choice):
        return "|".join(str(choice) for choice in option.type.choices)
    return option.type.name.upper().removesuffix(" RANGE")


def _default(option: click.Option) -> str:
    """The default where the help shows it; click's marker for none is no plain value."""
    if not option.show_default or option.is_flag or not isinstance(option.default, str | int | float):
        return ""
    return f" [default: {option.default}]"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")  # a bare bar would end the cell


def main(arguments: Sequence[str]) -> int:
    """Write the page, or with `--check` compare it; the exit code."""
    from nanalyze import commands

    return write_or_check(arguments, DOCUMENT, document(commands.main), "the commands' help")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
