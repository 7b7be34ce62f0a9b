"""Help in the style of the guide: commands under headings, examples at the end, and a page to read."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import click

from sidelane.cli.output import MisusedError
from sidelane.errors import nearest

Example = tuple[str, str]
"""Type of an example: a command line, and its effect."""


LOOK, PREDICT, MEASURE, CHOOSE, LABORATORY = HEADINGS = (
    "Look",
    "Predict (and collective, c3 with --machine)",
    "Measure",
    "Choose",
    "Laboratory (studies behind the published results, and checks of the model)",
)
"""Headings of commands: those for users come first."""
ENTRY_POINTS = "sidelane.commands"

WITHOUT_LABORATORY = (
    "The commands that measure and predict, such as demo, explain and plan, are not installed: "
    "pip install ./lab in a checkout"
)
"""Text where no package adds commands."""

PATIENCE_S = 1.5
"""Seconds of loading after which the notice appears."""


class HelpEntry(click.Command):
    """A command with examples at the end of its help.

    Args:
        heading: heading of ``HEADINGS``, under which the tool's help lists it.
        examples: examples at the end of its help.
    """

    def __init__(self, *arguments: Any, heading: str, examples: Sequence[Example] = (), **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.heading = heading
        self.examples = tuple(examples)

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
        found = {name: self.find(name) for name in (*self.commands, *added())}
        return sorted(found, key=lambda name: (HEADINGS.index(found[name].heading), name))

    def get_command(self, ctx: click.Context | None, cmd_name: str) -> click.Command | None:
        """Return a command; one that another package adds is imported now."""
        if cmd_name not in self.commands and (entry := added().get(cmd_name)) is not None:
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

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help; where no package adds commands, its first sentence, and how to install them."""
        if not added():
            self.help = (self.help or "").partition("\n")[0] + f"\n\n{WITHOUT_LABORATORY}."
        super().format_help_text(ctx, formatter)

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
            more = "" if added() else f". {WITHOUT_LABORATORY}"
            ctx.fail(f"No such command {name!r} (allowed={', '.join(allowed)}){nearest(name, allowed)}{more}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command of the remaining arguments."""
        with _where_to_read(), saying_that_pytorch_loads():
            return super().invoke(ctx)


@functools.cache
def added() -> dict[str, importlib.metadata.EntryPoint]:
    """Return the entry points of commands that other packages add, by the command's name."""
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}


@contextlib.contextmanager
def _where_to_read() -> Iterator[None]:
    try:
        yield
    except (MisusedError, click.exceptions.NoArgsIsHelpError):  # the latter is no error, and shows the help
        raise
    except click.UsageError as problem:
        raise MisusedError(problem.format_message(), problem.ctx) from problem


@contextlib.contextmanager
def saying_that_pytorch_loads() -> Iterator[None]:
    """Print a notice on stderr if that is a terminal and PyTorch is still being loaded after a while."""
    timer = threading.Timer(PATIENCE_S, _report_wait)
    timer.daemon = True  # the command does not wait for it
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _report_wait() -> None:
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    if getattr(spec, "_initializing", False):  # importlib marks modules under way so
        click.echo(click.style("loading PyTorch", dim=True), err=True)
