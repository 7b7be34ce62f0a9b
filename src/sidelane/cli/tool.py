"""The command ``sidelane``: all of its sub-commands.

A command imports its modules when it runs, so that help appears at once.
"""

from __future__ import annotations

from pathlib import Path

import click

from sidelane.cli.help import LOOK, Commands, HelpEntry
from sidelane.cli.output import json_option, plain_errors
from sidelane.cli.recorder import recorder
from sidelane.version import VERSION

HELP = """Multi-GPU communication that disappears behind computation.

Begin with: sidelane demo

\b
What does my step gain?   sidelane plan --model 70b --machine h100x8
And on two nodes?         sidelane plan --model 8b --machine 2xh100x8
Which way does a call go? sidelane explain all_reduce 256K --machine h200x4
How fast is this machine? sidelane nccl-tests all_reduce -b 8 -e 128M -f 2
Does it overlap?          the page "profiling" of docs/guide
"""
"""Text of ``sidelane --help`` above the commands: questions of newcomers, and what answers them."""


@click.group(
    cls=Commands,
    help=HELP,
    epilog="`sidelane COMMAND --help` has the options of a command, and examples. The guide: docs/guide of the source.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
@click.version_option(VERSION, package_name="sidelane", message="sidelane %(version)s")
@click.option("--traceback", is_flag=True, help="Show where an error came from.")
@click.pass_context
def main(context: click.Context, traceback: bool) -> None:
    """Keep what applies to every command."""
    context.obj = traceback


@click.command(
    cls=HelpEntry,
    heading=LOOK,
    examples=(
        ("sidelane info", "everything, in some seconds"),
        ("sidelane info --no-probe --json -", "without trying the GPUs, as JSON"),
        ("sidelane info --versions", "what a bug report needs"),
    ),
)
@click.option("--probe/--no-probe", default=True, help="Ask the driver on every GPU what it can do; takes seconds.")
@click.option("--versions", is_flag=True, help="Show only the versions that a bug report needs.")
@json_option
def info(json: Path | None, probe: bool, versions: bool) -> None:
    """Show what this machine offers, and what Sidelane will use of it."""
    with plain_errors():
        from sidelane.cli import info as findings

        if versions:
            findings.show_versions(json)
        else:
            findings.show_machine(json, probe=probe)


for _command in (info, recorder):
    main.add_command(_command)
