"""The command ``sidelane soak``: random calls for hours, every byte checked, faults among them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from sidelane.cli.errors import plain_errors
from sidelane.cli.guided import Command, how, output, what, where
from sidelane.cli.options import device_option, json_option


@click.command(
    cls=Command,
    examples=(
        ("sidelane soak --minutes 5", "five minutes of random calls"),
        ("sidelane soak --seed 1 --episode 7", "one episode again, as a campaign told it"),
        ("sidelane soak --minutes 60 --json soak.json --resume", "go on with an earlier campaign"),
    ),
)
@where(
    "--ranks",
    type=click.IntRange(min=1),
    show_default="1 to 8 on CPUs, or every GPU",
    help="Processes of every episode.",
)
@device_option
@how("--calls", type=click.IntRange(min=1), help="End when so many have been made.")
@how(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    show_default="1, without --calls and --episode",
    help="End after so long.",
)
@what("--seed", type=int, default=0, help="Of all that is random: the same seed makes the same calls.")
@what("--episode", type=click.IntRange(min=0), help="Run this episode of the campaign alone.")
@what("--episode-calls", type=click.IntRange(min=1), help="Of an episode of two ranks. Part of what a seed means.")
@json_option
# As commands in result files have it.
@output("--output", "json", hidden=True, type=click.Path(dir_okay=False, path_type=Path))
@output("--resume", is_flag=True, help="Go on behind what the file of --json holds.")
def soak(calls: int | None, minutes: float | None, episode: int | None, **others: Any) -> None:
    """Make random calls, check every byte, and let ranks fail, for as long as you like.

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
