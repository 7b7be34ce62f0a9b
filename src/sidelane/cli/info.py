"""The command ``sidelane info``."""

from __future__ import annotations

from pathlib import Path

import click

from sidelane.cli.errors import plain_errors
from sidelane.cli.guided import LOOK, Command, how
from sidelane.cli.options import json_option


@click.command(
    cls=Command,
    heading=LOOK,
    examples=(
        ("sidelane info", "everything, in some seconds"),
        ("sidelane info --no-probe --json -", "without trying the GPUs, as JSON"),
    ),
)
@how("--probe/--no-probe", default=True, help="Ask the driver on every GPU what it can do; takes seconds.")
@json_option
def info(json: Path | None, probe: bool) -> None:
    """Show what this machine offers, and what Sidelane will use of it."""
    with plain_errors():
        from sidelane.cli import findings as info

        info.main(json, probe=probe)
