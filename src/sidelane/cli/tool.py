"""The command ``sidelane``: all of its sub-commands.

A command imports its modules when it runs, so that help appears at once.
"""

from __future__ import annotations

from pathlib import Path

import click

from sidelane.cli.errors import plain_errors
from sidelane.cli.help import LOOK, Command, Commands, how
from sidelane.cli.nodes import verify
from sidelane.cli.options import json_option
from sidelane.version import VERSION


@click.group(
    cls=Commands,
    epilog="`sidelane COMMAND --help` has the options of a command, and examples. The guide: docs/guide of the source.",
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


@click.command(
    cls=Command,
    heading=LOOK,
    examples=(
        ("sidelane info", "everything, in some seconds"),
        ("sidelane info --no-probe --json -", "without trying the GPUs, as JSON"),
        ("sidelane info --versions", "what a bug report needs"),
    ),
)
@how("--probe/--no-probe", default=True, help="Ask the driver on every GPU what it can do; takes seconds.")
@how("--versions", is_flag=True, help="Show only the versions that a bug report needs.")
@json_option
def info(json: Path | None, probe: bool, versions: bool) -> None:
    """Show what this machine offers, and what Sidelane will use of it."""
    with plain_errors():
        from sidelane.cli import info as findings

        if versions:
            findings.show_versions(json)
        else:
            findings.main(json, probe=probe)


for _command in (info, verify):
    main.add_command(_command)
