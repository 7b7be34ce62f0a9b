"""The commands about ``auto``: ``sidelane tune`` and ``explain``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from sidelane.c3.workload import GEMM_DTYPES, parse_gemm
from sidelane.cli.errors import plain_errors
from sidelane.cli.help import CHOOSE, HOW, OUTPUT, Command, output, what, where
from sidelane.cli.nodes import explain_nodes, sizes_of_nodes
from sidelane.cli.options import ALL, KINDS, given, json_option, size
from sidelane.cli.output import Written
from sidelane.config import BESIDE, LEARN, NOTHING
from sidelane.program.collective import ELEMENT_BYTES, Kind
from sidelane_lab.cli.collectives import CollectiveOptions
from sidelane_lab.harness.options import StudyOptions, command, kinds, loaded, option, run, size_list, values_of, word

OUTPUT_FILE: dict[str, Any] = {
    "group": OUTPUT,
    "type": Written(),
    "metavar": "FILE",
    "show_default": "where every communicator of this user finds it",
}
SECONDS: dict[str, Any] = {
    "group": HOW,
    "type": click.FloatRange(min=1),
    "show_default": "75 on GPUs, 150 on CPUs; 240 and 60 with --study c3",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneOptions(CollectiveOptions):
    """Measure how each collective runs best on this machine, and keep it for `auto`.

    Every candidate, eager and in graphs, in and out of place, 1K to 256M (16M on CPUs); outputs are checked before and
    after they are timed. Says which choices change.
    """

    examples = (
        ("sidelane tune", "measure this machine, and keep the times for every communicator"),
        ("sidelane tune --quick --collective all_gather", "one collective, roughly"),
        ("sidelane tune --study c3", "GEMMs and collectives alone, by the compute units that they have"),
        ("sidelane tune --from-results collectives.json --output mine.json", "from what was measured already"),
    )

    collectives: tuple[Kind, ...] = kinds(
        tuple(map(Kind, KINDS)), KINDS, "May be repeated. A profile keeps what it had of the others.", every=ALL
    )
    dtype: str = word("--dtype", tuple(ELEMENT_BYTES), "bfloat16", "Of the elements.")
    quick: bool = option(
        *("--quick", False, "Wide steps between the sizes, few rounds: half a minute on GPUs."), group=HOW, is_flag=True
    )
    budget_s: float | None = option("--seconds", None, "For measuring; what is left out is said.", **SECONDS)
    output: Path | None = option("--output", None, "Keep the profile here.", **OUTPUT_FILE)
    # These are no options of the command: a profile needs them all.
    sizes: tuple[int, ...] = ()
    tensors: int = 1
    variants: tuple[str, ...] = ()
    launches: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    repeats: int = 7
    warmup: int = 2
    profile: bool = False
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        CollectiveOptions.__post_init__(self)
        if self.tensors != 1:
            raise ValueError(f"TuneOptions: tensors (value={self.tensors}, allowed=1: no choice is made by lists)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class IsolatedOptions(StudyOptions):
    """Measure GEMMs and collectives alone, by the compute units that they have."""

    study = "isolated"

    gemms: tuple[str, ...] = option(
        "--gemm",
        (),
        "With --study c3: as in sidelane c3. May be repeated.",
        convert=lambda texts: tuple(text.replace(",", "x") for text in texts),
        multiple=True,
    )
    sizes: tuple[int, ...] = size_list(
        "--bytes", "With --study c3. May be repeated.", gpus=("64K", "1M", "16M", "128M", "896M"), cpus=("4K", "1M")
    )
    fresh: bool = option(
        *("--fresh", False, "With --study c3: measure again what the file has."), group=HOW, is_flag=True
    )
    budget_s: float | None = option("--seconds", None, "For measuring; what is left out is said.", **SECONDS)
    output: Path | None = option("--output", None, "Keep the profile here.", **OUTPUT_FILE)
    dtype: str = word("--dtype", GEMM_DTYPES, "bfloat16", "Of the elements.")
    collectives: tuple[Kind, ...] = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
    full_size: bool = False
    warmup: int = 2
    repeats: int = 5
    timeout_s: float = 600.0
    done: frozenset[Any] = frozenset()  # keys of rows that the file has: the study fills them in

    def __post_init__(self) -> None:
        StudyOptions.__post_init__(self)
        for text in self.gemms:
            parse_gemm(text, self.dtype)


COLLECTIVES, C3 = "collectives", "c3"


def _tune(study: str, from_results: Path | None, **parameters: Any) -> None:
    tuning = loaded("studies.tune.command")
    if study == C3:
        if from_results is not None or given("quick"):
            raise ValueError("--from-results, --quick: not with --study c3")
        values, chosen = values_of(IsolatedOptions, parameters), parameters["collectives"]
        if ALL not in chosen:
            values["collectives"] = tuple(map(Kind, chosen))
        run(IsolatedOptions(**values))
        return
    if any(map(given, ("gemms", "sizes", "fresh", "report"))):
        raise ValueError("--gemm, --bytes, --fresh, --report: only with --study c3")
    options = TuneOptions(**values_of(TuneOptions, parameters))
    if from_results is None:
        tuning.main(options)
    elif options.output is None:
        raise ValueError("--from-results needs --output: it says nothing about this machine")
    else:
        tuning.from_results(from_results, options.output, options.json)


tune = command(
    "tune",
    _tune,
    (TuneOptions, IsolatedOptions),
    heading=CHOOSE,
    besides=(
        what(
            "--study",
            type=click.Choice((COLLECTIVES, C3)),
            default=COLLECTIVES,
            help="c3: GEMMs and collectives alone, by their compute units; goes on where an earlier run stopped. Has a "
            "file of its own (<machine>-c3.json).",
        ),
        output(
            "--from-results",
            type=click.Path(dir_okay=False, exists=True, path_type=Path),
            metavar="FILE",
            help="Do not measure: take the times of this file of `sidelane collective --json`; needs --output.",
        ),
    ),
)


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
        explaining = loaded("explain.call")
        explaining.main(explaining.ExplainOptions(kind=Kind(collective), **others))
