"""The command ``sidelane regress``: a gate on speed."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from sidelane.cli.help import CHOOSE
from sidelane.cli.output import plain_errors
from sidelane_lab.harness.help import GroupedCommand, how, json_option
from sidelane_lab.harness.options import loaded

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(
    cls=GroupedCommand,
    heading=CHOOSE,
    examples=(
        ("sidelane regress before.json after.json", "two runs of one study on one machine"),
        ("sidelane regress before.json after.json --least 5", "changes of 5% and more"),
    ),
)
@click.argument("old", type=FILE)
@click.argument("new", type=FILE)
@how("--least", type=click.FloatRange(0), default=2.0, metavar="PERCENT", help="Smallest change that counts.")
@json_option
def regress(old: Path, new: Path, least: float, json: Path | None) -> None:
    """Compare two result files of one study, point by point, and say what is slower beyond noise.

    A point is slower if its spread (10% to 90% of its samples, or all rounds of whole steps) lies above the old one's,
    and if it changed by more than points of other libraries did, which Sidelane cannot change. The exit code is 1 if
    one is, or has no time any more.
    """
    with plain_errors():
        sys.exit(loaded("harness.regress").main(old, new, least / 100, json))
