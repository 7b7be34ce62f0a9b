"""The command ``sidelane``: all of its sub-commands.

What a command needs is imported when it runs, so that help is there at once.
"""

from __future__ import annotations

import click

from sidelane.cli.c3 import c3
from sidelane.cli.collectives import chain, collective, fused, host, phases, power
from sidelane.cli.fsdp import fsdp
from sidelane.cli.gemms import gemms
from sidelane.cli.guided import Commands
from sidelane.cli.info import demo, info
from sidelane.cli.model import claims, machines, pipeline, plan
from sidelane.cli.nodes import verify
from sidelane.cli.ordinary import ordinary
from sidelane.cli.process_group import pg
from sidelane.cli.soak import soak
from sidelane.cli.tuning import explain, tune
from sidelane.version import VERSION

GROUPED = {
    "Look": (demo, info, machines),
    "Measure": (collective, ordinary, pg, c3, chain, phases, host, fused, fsdp, gemms, power),
    "Predict (and collective, c3, phases, power with --machine)": (claims, pipeline, plan),
    "Choose and prove": (explain, tune, verify, soak),
}


@click.group(
    cls=Commands,
    groups={heading: [command.name or "" for command in commands] for heading, commands in GROUPED.items()},
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


for _commands in GROUPED.values():
    for _command in _commands:
        main.add_command(_command)
