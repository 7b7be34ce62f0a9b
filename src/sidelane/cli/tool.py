"""The command ``sidelane``: all of its sub-commands.

What a command needs is imported when it runs, so that help is there at once.
"""

from __future__ import annotations

import click

from sidelane import __version__
from sidelane.cli.c3 import c3
from sidelane.cli.collectives import chain, collective, host, phases, power
from sidelane.cli.info import demo, info
from sidelane.cli.model import claims, machines, pipeline
from sidelane.cli.soak import soak
from sidelane.cli.tuning import explain, tune


class Commands(click.Group):
    """Lists every command with its whole first sentence, which click would cut to a line."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = ((name, self.commands[name].help or "") for name in self.list_commands(ctx))
        with formatter.section("Commands"):
            formatter.write_dl([(name, " ".join(text.split("\n\n")[0].split())) for name, text in commands])


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, package_name="sidelane", message="sidelane %(version)s")
@click.option("--traceback", is_flag=True, help="Show where an error came from.")
@click.pass_context
def main(context: click.Context, traceback: bool) -> None:
    """Collectives on the side lane, next to computation: look at this machine, and measure.

    Begin with: sidelane demo
    """
    context.obj = traceback


_ALL = (info, demo, collective, phases, power, chain, host, c3, tune, explain, machines, claims, pipeline, soak)
for _command in _ALL:
    main.add_command(_command)
