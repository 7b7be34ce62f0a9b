"""The commands about ``auto``: ``sidelane tune`` and ``explain``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from sidelane.cli.help import CHOOSE, PREDICT
from sidelane.config import BESIDE, NOTHING
from sidelane.program.collective import ELEMENT_BYTES, Kind
from sidelane_lab.cli.collectives import CollectiveOptions
from sidelane_lab.harness.files import Written
from sidelane_lab.harness.help import HOW, OUTPUT, WHERE, json_option, output, what
from sidelane_lab.harness.options import (
    MACHINE_NAME,
    CommandOptions,
    StudyOptions,
    argument,
    command,
    kinds,
    loaded,
    option,
    run,
    shared,
    size_list,
    values_of,
    word,
)
from sidelane_lab.harness.parameters import ALL, KINDS, NameChoice, given, size
from sidelane_lab.pairs.workload import GEMM_DTYPES, parse_gemm

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
    dtype: str = word("--dtype", tuple(ELEMENT_BYTES), "bfloat16", "Type of the elements.")
    quick: bool = option(
        *("--quick", False, "Wide steps between the sizes, few rounds: half a minute on GPUs."), group=HOW, is_flag=True
    )
    budget_s: float | None = option("--seconds", None, "Time for measuring; what is left out is named.", **SECONDS)
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
    budget_s: float | None = option("--seconds", None, "Time for measuring; what is left out is named.", **SECONDS)
    output: Path | None = option("--output", None, "Keep the profile here.", **OUTPUT_FILE)
    dtype: str = word("--dtype", GEMM_DTYPES, "bfloat16", "Type of the elements.")
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainOptions(CommandOptions):
    """Show what `auto` takes for a call, why, and what would be submitted.

    The first line is the answer: the implementation (dma: copy engines, sm: kernels), the time that it is expected to
    take, the next one, and whether Sidelane has run on such a machine. A second line says so where the vendor's library
    is predicted to be faster. What led to the answer follows.

    COLLECTIVE is all_gather, all_to_all, broadcast, scatter, gather, reduce_scatter or all_reduce. SIZE is the gathered
    size of an all_gather and the local buffer of the others: 64K, 1.2G.

    Without --machine: for the GPUs that are here, or for CPU processes where there are fewer than two. Needs no GPU.
    """

    examples = (
        ("sidelane explain all_gather 16M --machine h200x4", "what four H200s would do"),
        ("sidelane explain all_reduce 256K --machine mi300x8", "predicted, next to the vendor's library"),
        ("sidelane explain all_reduce 1.2G --beside compute", "next to a GEMM, on this machine"),
        ("sidelane explain all_gather 64K --machine h200x4 --json -", "as JSON"),
        (
            "sidelane explain all_gather 64M --machine h200x2 --ordinary",
            "on ordinary tensors, which are staged",
        ),
        ("sidelane explain all_gather 64K --machine mi300x8 --packets", "as packets of AMD's copy engines"),
        (
            "sidelane explain all_reduce 64M --machine h100x8x2",
            "on two nodes of eight, with the predicted time of each step",
        ),
    )

    kind: Kind = argument(
        "collective", metavar="COLLECTIVE", type=NameChoice([kind.value for kind in Kind]), convert=Kind
    )
    # Rounded up to whole elements, and to as many for each rank where the collective gives all of them the same.
    nbytes: int = argument("nbytes", metavar="SIZE", callback=size)
    in_place: bool = option("--in-place", False, "Input and output share memory.", is_flag=True)
    captured: bool = option("--graph", False, "The call is captured into a graph.", is_flag=True)
    ordinary: bool = option("--ordinary", False, "The tensors are not in symmetric memory.", is_flag=True)
    beside: str = word("--beside", BESIDE, NOTHING, "What runs next to it.")
    beside_us: float | None = option(
        *("--beside-us", None, "Microseconds of a computation next to it, instead of --beside."),
        type=click.FloatRange(min=0, min_open=True),
    )
    dtype: str = word("--dtype", tuple(ELEMENT_BYTES), "bfloat16", "Type of the elements.")
    packets: bool = option(
        *("--packets", False, "With --machine mi300x8: the packets of its copy engines. Never run on AMD hardware."),
        is_flag=True,
    )
    tensors: int | None = option(
        "--tensors", None, "A list of this many in one call, each of SIZE.", type=click.IntRange(min=1)
    )
    commands: bool = option(
        *("--commands", False, "Also list the commands that a rank would submit."), group=OUTPUT, is_flag=True
    )
    world_size: int | None = option(
        *("--world-size", None, "Number of ranks."),
        group=WHERE,
        type=click.IntRange(min=1),
        show_default="as measured, or those of this machine",
    )
    machine: str | None = option(
        *("--machine", None, "A machine that need not be here: h200x4, mi300x8, ..."),
        group=WHERE,
        type=MACHINE_NAME,
        show_default="this one",
    )
    profile: Path | None = option(
        *("--profile", None, "Choose by this file of `sidelane tune`."),
        group=WHERE,
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
    )
    json: Path | None = shared(json_option, None)

    def __post_init__(self) -> None:
        CommandOptions.__post_init__(self)
        if self.nbytes < 1:
            raise ValueError(f"explain: SIZE (value={self.nbytes}, allowed=1 byte and more)")
        if self.beside_us is not None and self.beside != NOTHING:
            raise ValueError("explain: --beside and --beside-us exclude each other")
        if self.machine is not None and self.profile is not None:
            raise ValueError("explain: --machine and --profile exclude each other")
        if self.tensors is not None and (self.tensors < 1 or self.kind not in KINDS):
            allowed = f"{', '.join(KINDS)}: 1.."
            raise ValueError(f"explain: tensors of {self.kind} (value={self.tensors}, allowed={allowed})")
        if self.in_place and self.kind in (Kind.SCATTER, Kind.GATHER):
            raise ValueError(f"explain: {self.kind} has no in-place form")


def _explain(**parameters: Any) -> None:
    loaded("explain.call").main(ExplainOptions(**values_of(ExplainOptions, parameters)))


explain = command("explain", _explain, (ExplainOptions,), heading=PREDICT)
