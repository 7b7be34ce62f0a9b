"""The commands about ``auto``: ``sidelane tune`` and ``explain``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sidelane.cli.errors import plain_errors
from sidelane.cli.options import ALL, DEVICES, KINDS, size
from sidelane.config import BESIDE, NOTHING
from sidelane.program.collective import ELEMENT_BYTES, Kind


@click.command()
@click.option(
    "--collective",
    "collectives",
    multiple=True,
    type=click.Choice([*KINDS, ALL]),
    default=(ALL,),
    help="May be repeated. Default: all. A profile keeps what it had of the others.",
)
@click.option("--quick", is_flag=True, help="Wide steps between the sizes, few rounds: half a minute on GPUs.")
@click.option("--seconds", "budget_s", type=click.FloatRange(min=1), help="For measuring; what is left out is said.")
@click.option("--dtype", type=click.Choice(list(ELEMENT_BYTES)), default="bfloat16", show_default=True)
@click.option("--ranks", type=click.IntRange(min=1), help="Processes. Default: every GPU, or a few on the CPU.")
@click.option("--device", type=click.Choice(DEVICES), default="auto", help="auto: GPUs if there are two or more.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep the profile here. Default: where every communicator of this user finds it.",
)
@click.option(
    "--from-results",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="Do not measure: take the times of this file of `sidelane collective --json`; needs --output.",
)
def tune(collectives: tuple[str, ...], from_results: Path | None, output: Path | None, **others: Any) -> None:
    """Measure how each collective runs best on this machine, and keep it for `auto`.

    Every candidate, eager and in graphs, in and out of place, 1K to 256M (16M on CPUs); outputs are checked before and
    after they are timed. Says which choices change.
    """
    with plain_errors():
        from sidelane.bench.tune import command as tuning

        if from_results is not None:
            if output is None:
                raise ValueError("--from-results needs --output: it says nothing about this machine")
            profile = tuning.from_results(from_results, output)
            click.echo(f"{len(profile.curves)} curves of {profile.machine}: {output}")
            return
        kinds = KINDS if ALL in collectives else collectives
        tuning.main(tuning.TuneOptions(collectives=tuple(map(Kind, kinds)), output=output, **others))


@click.command()
@click.argument("collective", metavar="COLLECTIVE", type=click.Choice([kind.value for kind in Kind]))
@click.argument("nbytes", metavar="SIZE", callback=size)
@click.option("--in-place", is_flag=True, help="Input and output share memory.")
@click.option("--graph", "captured", is_flag=True, help="The call is captured into a graph.")
@click.option("--ordinary", is_flag=True, help="The tensors are not in symmetric memory.")
@click.option("--beside", type=click.Choice(BESIDE), default=NOTHING, show_default=True, help="What runs next to it.")
@click.option("--dtype", type=click.Choice(list(ELEMENT_BYTES)), default="bfloat16", show_default=True)
@click.option("--tensors", type=click.IntRange(min=1), help="A list of this many in one call, each of SIZE.")
@click.option("--world-size", type=click.IntRange(min=1), help="Ranks. Default: as measured, or those of this machine.")
@click.option("--machine", metavar="NAME_OR_FILE", help="For a machine that need not be here: h200x4, mi300x8, ...")
@click.option(
    "--profile", type=click.Path(dir_okay=False, path_type=Path), help="Choose by this file of `sidelane tune`."
)
def explain(collective: str, **others: Any) -> None:
    """Show what `auto` takes for a call, why, what else it could take, and what would be submitted.

    COLLECTIVE is all_gather, all_to_all, broadcast, scatter, gather, reduce_scatter or all_reduce. SIZE is the gathered
    size of an all_gather and the local buffer of the others: 64K, 1M.

    Without --machine: for the GPUs that are here, or for CPU processes where there are fewer than two. Needs no GPU.
    """
    with plain_errors():
        from sidelane.bench import explain as explaining

        explaining.main(explaining.ExplainOptions(kind=Kind(collective), **others))
