"""The command ``sidelane soak``: random calls for hours, every byte checked, faults among them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from sidelane.cli.errors import plain_errors
from sidelane.cli.options import DEVICES


@click.command()
@click.option("--ranks", type=click.IntRange(min=1), help="Of every episode. Default: 1 to 8 on CPUs, or every GPU.")
@click.option("--device", type=click.Choice(DEVICES), default="auto", help="auto: GPUs if there are two or more.")
@click.option("--calls", type=click.IntRange(min=1), help="End when so many have been made.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="End after so long. Default: 1.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of everything that is random.")
@click.option("--episode", type=click.IntRange(min=0), help="Run this episode of the campaign alone.")
@click.option(
    "--episode-calls", type=click.IntRange(min=1), help="Of an episode of two ranks. Part of what a seed means."
)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the summary here.")
@click.option("--resume", is_flag=True, help="Go on behind what --output holds.")
def soak(calls: int | None, minutes: float | None, episode: int | None, **others: Any) -> None:
    """Make random calls of every kind for as long as you like, check every byte, and let ranks fail.

    A campaign is made of episodes: processes with some thousand calls among 1 to 8 ranks, with delays, wrong calls,
    several communicators, threads, graphs on GPUs. An episode ends well, or a rank is killed, stopped, interrupted ...,
    of which the others must hear. What was not as it must be is told with its episode: --seed and --episode run that
    one again, with the same --ranks and --episode-calls. Exit status: 1 if there was anything.
    """
    with plain_errors():
        from sidelane.bench.soak import study as soak_study

        if calls is None and minutes is None and episode is None:
            minutes = 1.0
        options = soak_study.SoakOptions(calls=calls, minutes=minutes, episode=episode, **others)
        sys.exit(soak_study.main(options))
