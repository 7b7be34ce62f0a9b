"""Help of the laboratory's commands: options in groups, short placeholders, defaults in words."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import click

from sidelane.cli.help import HelpEntry
from sidelane.cli.output import JSON_HELP
from sidelane_lab.harness.files import Written

LONGEST_METAVAR = 26
"""Largest number of characters of a metavar in the column of options. Longer lists of choices stand in the text."""

WHAT, HOW, WHERE, OUTPUT, OTHER = GROUPS = ("What", "How", "Where", "Output", "Other")


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


what = functools.partial(click.option, cls=Option, group=WHAT)
how = functools.partial(click.option, cls=Option, group=HOW)
where = functools.partial(click.option, cls=Option, group=WHERE)
output = functools.partial(click.option, cls=Option, group=OUTPUT)

json_option = output(
    "--json", type=Written(allow_dash=True), metavar="FILE", is_flag=False, flag_value="-", help=JSON_HELP
)
"""Option of a command that writes its figures as one JSON object."""


class GroupedCommand(HelpEntry):
    """A command with options in groups.

    Args:
        hints: answers to options that it does not have; empty: to words without one.
    """

    def __init__(self, *arguments: Any, hints: Mapping[str, str] = MappingProxyType({}), **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.hints = hints

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; what is no option is answered with a hint, if there is one."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as problem:
            is_extra = problem.message.startswith("Got unexpected extra argument")
            hint = self.hints.get("" if is_extra else getattr(problem, "option_name", None) or "none")
            if hint is None:
                raise
            raise click.UsageError(f"{problem.message.rstrip('.')}; {hint}", ctx) from problem

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
