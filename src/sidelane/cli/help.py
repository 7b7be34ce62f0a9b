"""Help in the style of the guide: commands and options in groups, defaults, examples at the end, and a page to read.

This module does for several lists of options and commands what click does for one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from collections.abc import Iterator, Sequence
from typing import Any

import click

from sidelane.cli.errors import MisusedError
from sidelane.cli.loading import saying_that_pytorch_loads
from sidelane.errors import nearest

LONGEST_METAVAR = 26
"""Largest number of characters of a metavar in the column of options. Longer lists of choices stand in the text."""

Example = tuple[str, str]
"""Type of an example: a command line, and its effect."""


class Option(click.Option):
    """Option under a heading. ``group``: the heading; headings stand in the order of ``GROUPS``."""

    def __init__(self, *arguments: Any, group: str, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.group = group

    def make_metavar(self, ctx: click.Context) -> str:
        """Return the placeholder for the value: a short word for numbers and for long lists of choices."""
        if self.metavar is None and isinstance(self.type, click.types.IntParamType | click.types.FloatParamType):
            return "N"
        metavar = super().make_metavar(ctx)
        return "NAME" if isinstance(self.type, click.Choice) and len(metavar) > LONGEST_METAVAR else metavar

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the line of the help, with a long list of choices in its text."""
        record = super().get_help_record(ctx)
        if record is None or not isinstance(self.type, click.Choice) or self.make_metavar(ctx) != "NAME":
            return record
        text, bracket, extra = record[1].partition("  [")
        return record[0], f"{text} One of: {', '.join(self.type.choices)}.{bracket}{extra}".lstrip()

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Return the text in brackets: a default in words without the parentheses that click puts around it."""
        extra = super().get_help_extra(ctx)
        if isinstance(self.show_default, str) and "default" in extra:
            extra["default"] = self.show_default
        return extra


LOOK, PREDICT, MEASURE, CHOOSE, LABORATORY = HEADINGS = (
    "Look",
    "Predict (and collective, c3 with --machine)",
    "Measure",
    "Choose",
    "Laboratory (studies behind the published results, and checks of the model)",
)
"""Headings of commands: those for users come first."""
ENTRY_POINTS = "sidelane.commands"

WHAT, HOW, WHERE, OUTPUT, OTHER = GROUPS = ("What", "How", "Where", "Output", "Other")

what = functools.partial(click.option, cls=Option, group=WHAT)
how = functools.partial(click.option, cls=Option, group=HOW)
where = functools.partial(click.option, cls=Option, group=WHERE)
output = functools.partial(click.option, cls=Option, group=OUTPUT)


class HelpEntry(click.Command):
    """A command with options in groups.

    Args:
        heading: heading of ``HEADINGS``, under which the tool's help lists it.
        examples: examples at the end of its help.
    """

    def __init__(self, *arguments: Any, heading: str, examples: Sequence[Example] = (), **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.heading = heading
        self.examples = tuple(examples)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a list of options for each group."""
        shown: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                shown[getattr(parameter, "group", OTHER)].append(record)
        for group, records in shown.items():
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        if self.examples:
            with formatter.section("Examples"):
                for line, does in self.examples:
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")
                    with formatter.indentation(), formatter.indentation():
                        formatter.write_text(does)


class Commands(click.Group):
    """Group of commands under headings, which come first in the help.

    A package adds a command by an entry point of the group ``sidelane.commands`` with the command's name.
    """

    command_class = HelpEntry

    def list_commands(self, ctx: click.Context | None = None) -> list[str]:
        """Return the names of all commands in the order of the help: by heading, then by name."""
        found = {name: self.find(name) for name in (*self.commands, *_added())}
        return sorted(found, key=lambda name: (HEADINGS.index(found[name].heading), name))

    def get_command(self, ctx: click.Context | None, cmd_name: str) -> click.Command | None:
        """Return a command; one that another package adds is imported now."""
        if cmd_name not in self.commands and (entry := _added().get(cmd_name)) is not None:
            self.add_command(entry.load())
        return self.commands.get(cmd_name)

    def find(self, name: str) -> HelpEntry:
        """Return the command of a name that ``list_commands`` has."""
        command = self.get_command(None, name)
        assert isinstance(command, HelpEntry), name
        return command

    def headed(self) -> dict[str, list[str]]:
        """Return the names of commands by heading."""
        names = self.list_commands()
        return {heading: [name for name in names if self.find(name).heading == heading] for heading in HEADINGS}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands with the first sentence of each, whole, and then the options."""
        for heading, names in self.headed().items():
            if names:
                with formatter.section(heading):
                    formatter.write_dl([(name, self.sentence(name)) for name in names])
        records = [record for option in self.get_params(ctx) if (record := option.get_help_record(ctx)) is not None]
        with formatter.section("Options"):
            formatter.write_dl(records)

    def sentence(self, name: str) -> str:
        """Return the sentence that says what a command does."""
        return " ".join((self.find(name).help or "").split("\n\n")[0].split())

    def make_context(self, *arguments: Any, **attributes: Any) -> click.Context:
        """Read the group's own options."""
        with _where_to_read():
            return super().make_context(*arguments, **attributes)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; for an unknown one, list the known ones."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            allowed = self.list_commands(ctx)
            ctx.fail(f"No such command {name!r} (allowed={', '.join(allowed)}){nearest(name, allowed)}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command of the remaining arguments."""
        with _where_to_read(), saying_that_pytorch_loads():
            return super().invoke(ctx)


@functools.cache
def _added() -> dict[str, importlib.metadata.EntryPoint]:
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}


@contextlib.contextmanager
def _where_to_read() -> Iterator[None]:
    try:
        yield
    except (MisusedError, click.exceptions.NoArgsIsHelpError):  # the latter is no error, and shows the help
        raise
    except click.UsageError as problem:
        raise MisusedError(problem.format_message(), problem.ctx) from problem
