"""The commands about ``auto``: ``sidelane tune`` and ``explain``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sidelane.cli.errors import plain_errors
from sidelane.cli.guided import CHOOSE, Command, how, output, what, where
from sidelane.cli.nodes import explain_nodes, sizes_of_nodes
from sidelane.cli.options import ALL, KINDS, device_option, given, json_option, ranks_option, report_option, size
from sidelane.cli.written import Written
from sidelane.config import BESIDE, LEARN, NOTHING
from sidelane.program.collective import ELEMENT_BYTES, Kind

COLLECTIVES, C3 = "collectives", "c3"


@click.command(
    cls=Command,
    heading=CHOOSE,
    examples=(
        ("sidelane tune", "measure this machine, and keep the times for every communicator"),
        ("sidelane tune --quick --collective all_gather", "one collective, roughly"),
        ("sidelane tune --study c3", "GEMMs and collectives alone, by the compute units that they have"),
        ("sidelane tune --from-results collectives.json --output mine.json", "from what was measured already"),
    ),
)
@what(
    "--collective",
    "collectives",
    multiple=True,
    type=click.Choice([*KINDS, ALL]),
    default=(ALL,),
    help="May be repeated. A profile keeps what it had of the others.",
)
@what("--dtype", type=click.Choice(list(ELEMENT_BYTES)), default="bfloat16", help="Of the elements.")
@what(
    "--study",
    type=click.Choice((COLLECTIVES, C3)),
    default=COLLECTIVES,
    help="c3: GEMMs and collectives alone, by their compute units; goes on where an earlier run stopped. Has a file "
    "of its own (<machine>-c3.json).",
)
@what("--gemm", "gemms", multiple=True, help="With --study c3: as in sidelane c3. May be repeated.")
@what("--bytes", "sizes", multiple=True, metavar="SIZE", callback=size, help="With --study c3. May be repeated.")
@how("--fresh", is_flag=True, help="With --study c3: measure again what the file has.")
@how("--quick", is_flag=True, help="Wide steps between the sizes, few rounds: half a minute on GPUs.")
@how(
    "--seconds",
    "budget_s",
    type=click.FloatRange(min=1),
    show_default="75 on GPUs, 150 on CPUs; 240 and 60 with --study c3",
    help="For measuring; what is left out is said.",
)
@ranks_option
@device_option
@output(
    "--output",
    type=Written(),
    metavar="FILE",
    show_default="where every communicator of this user finds it",
    help="Keep the profile here.",
)
@output(
    "--from-results",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    metavar="FILE",
    help="Do not measure: take the times of this file of `sidelane collective --json`; needs --output.",
)
@report_option
@json_option
def tune(
    collectives: tuple[str, ...],
    from_results: Path | None,
    output: Path | None,
    json: Path | None,
    study: str,
    gemms: tuple[str, ...],
    sizes: tuple[int, ...],
    fresh: bool,
    **others: Any,
) -> None:
    """Measure how each collective runs best on this machine, and keep it for `auto`.

    Every candidate, eager and in graphs, in and out of place, 1K to 256M (16M on CPUs); outputs are checked before and
    after they are timed. Says which choices change.
    """
    with plain_errors():
        if study == C3:
            if from_results is not None or given("quick"):
                raise ValueError("--from-results, --quick: not with --study c3")
            others.pop("quick")
            isolated_times(
                () if ALL in collectives else collectives,
                gemms=gemms,
                sizes=sizes,
                fresh=fresh,
                output=output,
                json=json,
                **others,
            )
            return
        if gemms or sizes or fresh or others["report"] is not None:
            raise ValueError("--gemm, --bytes, --fresh, --report: only with --study c3")
        from sidelane_lab.studies.tune import command as tuning

        if from_results is not None:
            if output is None:
                raise ValueError("--from-results needs --output: it says nothing about this machine")
            tuning.from_results(from_results, output, json)
            return
        kinds = KINDS if ALL in collectives else collectives
        tuning.main(tuning.TuneOptions(collectives=tuple(map(Kind, kinds)), output=output, json=json, **others))


def isolated_times(collectives: tuple[str, ...], *, gemms: tuple[str, ...], **others: Any) -> None:
    """Measure, as ``sidelane tune --study c3`` does; no collectives: the four that pairs are made of."""
    from sidelane_lab.studies.tune import isolated

    if collectives:
        others["collectives"] = tuple(map(Kind, collectives))
    names = tuple(text.replace(",", "x") for text in gemms)
    isolated.main(isolated.IsolatedOptions(gemms=names, **others))


@click.command(
    cls=Command,
    heading=CHOOSE,
    examples=(
        ("sidelane explain all_gather 16M --machine h200x4", "what four H200s would do"),
        ("sidelane explain all_reduce 1.2G --beside compute", "next to a GEMM, on this machine"),
        ("sidelane explain all_gather 64K --machine h200x4 --json -", "as JSON"),
        (
            "sidelane explain all_gather 64M --machine h200x2 --ordinary",
            "how peers would reach ordinary tensors, and why",
        ),
        ("sidelane explain all_reduce 64M --nodes 8,8", "on two machines"),
    ),
)
@click.argument("collective", metavar="COLLECTIVE", type=click.Choice([kind.value for kind in Kind]))
@click.argument("nbytes", metavar="SIZE", callback=size)
@what("--in-place", is_flag=True, help="Input and output share memory.")
@what("--graph", "captured", is_flag=True, help="The call is captured into a graph.")
@what("--ordinary", is_flag=True, help="The tensors are not in symmetric memory.")
@what(
    "--map-memory",
    type=click.Choice(["0", "1", LEARN]),
    callback=lambda *given: {"0": False, "1": True}.get(given[-1], given[-1]),
    show_default="SIDELANE_MAP_MEMORY, else 0",
    help="With --ordinary: explain the call under this setting. All of them are compared.",
)
@what("--beside", type=click.Choice(BESIDE), default=NOTHING, help="What runs next to it.")
@what("--beside-us", type=click.FloatRange(min=0, min_open=True), help="Instead: what a computation next to it takes.")
@what("--dtype", type=click.Choice(list(ELEMENT_BYTES)), default="bfloat16", help="Of the elements.")
@what("--tensors", type=click.IntRange(min=1), help="A list of this many in one call, each of SIZE.")
@where("--world-size", type=click.IntRange(min=1), show_default="as measured, or those of this machine", help="Ranks.")
@where(
    "--machine",
    metavar="NAME_OR_FILE",
    show_default="this one",
    help="A machine that need not be here: h200x4, mi300x8, ...",
)
@where(
    "--profile",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Choose by this file of `sidelane tune`.",
)
@where(
    "--nodes",
    metavar="N,N,...",
    callback=sizes_of_nodes,
    help="Several machines instead, with so many ranks each: which part runs where, in which pieces, and why.",
)
@json_option
def explain(collective: str, nodes: tuple[int, ...] | None, **others: Any) -> None:
    """Show what `auto` takes for a call, why, and what would be submitted.

    COLLECTIVE is all_gather, all_to_all, broadcast, scatter, gather, reduce_scatter or all_reduce. SIZE is the gathered
    size of an all_gather and the local buffer of the others: 64K, 1.2G.

    Without --machine: for the GPUs that are here, or for CPU processes where there are fewer than two. Needs no GPU.
    """
    with plain_errors():
        if nodes is not None:
            explain_nodes(Kind(collective), nodes, **others)
            return
        from sidelane_lab.explain import call as explaining

        explaining.main(explaining.ExplainOptions(kind=Kind(collective), **others))
