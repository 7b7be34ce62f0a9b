"""The command ``sidelane soak``: random calls for hours, every byte checked, faults among them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from sidelane.cli.errors import plain_errors
from sidelane.cli.help import CHOOSE, Command, how, output, what, where
from sidelane.cli.options import device_option, json_option
from sidelane.cli.output import Written


@click.command(
    cls=Command,
    heading=CHOOSE,
    examples=(
        ("sidelane soak --minutes 5", "five minutes of random calls"),
        ("sidelane soak --seed 1 --episode 7", "one episode again, as a campaign told it"),
        ("sidelane soak --minutes 60 --json soak.json --resume", "go on with an earlier campaign"),
        ("sidelane soak --storm 100000 --text storm.txt", "ordinary tensors that come and go while peers reach them"),
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
@what("--storm", type=click.IntRange(min=100), help="So many steps of a storm instead: tensors that come and go.")
@how(
    "--map-memory",
    type=click.Choice(("off", "learn", "always")),
    show_default="what communicators do; of a storm: learn, then always",
    help="Whether peers reach ordinary tensors.",
)
@output("--text", type=Written(), help="Write what a storm has shown to a file, as text.")
@json_option
# As commands in result files have it.
@output("--output", "json", hidden=True, type=Written())
@output("--resume", is_flag=True, help="Go on behind what the file of --json holds.")
def soak(
    calls: int | None, minutes: float | None, episode: int | None, storm: int | None, text: Path | None, **others: Any
) -> None:
    """Make random calls, check every byte, and let ranks fail, for as long as you like.

    A campaign is made of episodes: processes with some thousand calls among 1 to 8 ranks, with delays, wrong calls,
    several communicators, threads, graphs on GPUs. An episode ends well, or a rank is killed, stopped, interrupted ...,
    of which the others must hear. What was not as it must be is told with its episode: --seed and --episode run that
    one again, with the same --ranks and --episode-calls. A storm is one world whose ordinary tensors come and go, with
    caches emptied, pools, expandable segments and graphs (on GPUs: CPU ranks capture nothing), in every way that peers
    reach them; nothing else may use the GPUs meanwhile, as memory is counted. Exit status: 1 if there was anything.
    """
    with plain_errors():
        if storm is not None:
            sys.exit(_storm(storm, text, calls=calls, minutes=minutes, episode=episode, **others))
        if text is not None:
            raise ValueError("soak: --text is of a storm (allowed=with --storm)")
        from sidelane_lab.soak import study as soak_study

        if calls is None and minutes is None and episode is None:
            minutes = 1.0
        options = soak_study.SoakOptions(calls=calls, minutes=minutes, episode=episode, **others)
        sys.exit(soak_study.main(options))


def _storm(steps: int, text: Path | None, **others: Any) -> int:
    from sidelane_lab.soak.storm import study as storm_study

    taken = {name: others.pop(name) for name in ("ranks", "device", "map_memory", "seed")}
    given = [f"--{name.replace('_', '-')}" for name, value in others.items() if value]
    if given:
        raise ValueError(f"soak: --storm runs no episodes (value={', '.join(given)}, allowed=without)")
    return storm_study.main(storm_study.StormOptions(steps=steps, text=text, **taken))
