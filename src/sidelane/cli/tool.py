"""The command ``sidelane``: all of its sub-commands.

A command imports its modules when it runs, so that help appears at once.
"""

from __future__ import annotations

import click

from sidelane.cli.help import Commands
from sidelane.cli.info import info
from sidelane.cli.nodes import verify
from sidelane.version import VERSION


@click.group(
    cls=Commands,
    epilog="`sidelane COMMAND --help` has the options of a command, and examples. The guide is docs/guide.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
@click.version_option(VERSION, package_name="sidelane", message="sidelane %(version)s")
@click.option("--traceback", is_flag=True, help="Show where an error came from.")
@click.pass_context
def main(context: click.Context, traceback: bool) -> None:
    """Multi-GPU communication that disappears behind computation.

    Begin with: sidelane demo
    """
    context.obj = traceback


for _command in (info, verify):
    main.add_command(_command)
