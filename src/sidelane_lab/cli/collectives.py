"""The commands that measure collectives: ``collective``, ``phases``, ``power``, ``chain``, ``host``, ``fused``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sidelane.c3.workload import TABLE_I
from sidelane.cli.errors import plain_errors
from sidelane.cli.help import MEASURE, Command, how, output, what
from sidelane.cli.options import (
    ALL,
    KINDS,
    choice_option,
    count_option,
    given,
    machine_option,
    measuring_options,
    moved_collectives,
    names_option,
    refuse_beside_machine,
    shapes,
    size,
    size_options,
    sizes_between,
    study_options,
)
from sidelane.cli.output import Written
from sidelane.program.collective import ELEMENT_BYTES, Kind

# What ``sidelane phases`` knows; studies/phases/programs.py has the same names.
PHASED = ("copy", "copies", "all_gather", "all_gather_in_place", "all_to_all")


@click.command(
    cls=Command,
    heading=MEASURE,
    examples=(
        ("sidelane collective", "both collectives that move bytes, at every size"),
        (
            "sidelane collective --collective all_reduce --max-bytes 64M --report out",
            "another one up to 64 MiB, and a page with pictures",
        ),
        ("sidelane collective --tensors 8 --json -", "lists of eight tensors, as JSON"),
        ("sidelane collective --machine mi300x8", "predict the papers' study for eight MI300X"),
    ),
)
@what(
    "--collective",
    "collectives",
    multiple=True,
    type=click.Choice([*KINDS, ALL]),
    default=("all_gather", "all_to_all"),
    help="May be repeated.",
)
@size_options("1K", "4G on GPUs, 16M on CPUs")
@what(
    "--tensors",
    type=click.IntRange(min=1),
    default=1,
    help="Spread each size over a list of that many tensors: in one call, and in a call each.",
)
@what("--dtype", type=click.Choice(list(ELEMENT_BYTES)), default="bfloat16", help="Of the elements.")
@names_option(
    "--variants", "", "Of Sidelane's: pcpy, bcst, swap, b2b, b2b+prelaunch, ...", "all; prelaunched only b2b up to 1M"
)
@choice_option("--launch", ["eager", "graph", "both"], "both", "Call by call, or in a CUDA graph.")
@choice_option("--place", ["in", "out", "both"], "both", "Calls in place, out of place, or both.")
@count_option("--iterations", 15, "Measured rounds; of short eager calls on GPUs four times as many.")
@count_option("--warmup", 3, "Rounds before them.", 0)
@how("--profile/--no-profile", default=True, help="On GPUs: look which implementations launched kernels.")
@machine_option
@study_options
def collective(machine: str | None, collectives: tuple[str, ...], iterations: int, **options: Any) -> None:
    """Time every implementation of a collective at every size, and check what it makes.

    With --tensors: calls with lists, next to separate calls one behind the other (variants that end with "separate").
    A size is then that of all tensors together.

    With --machine: predict the DMA collectives paper's study (all_gather and all_to_all, 1K to 4G) for a machine that
    need not be here.
    """
    with plain_errors():
        if machine is not None:
            refuse_beside_machine("json", "report")
            from sidelane_lab.papers import predictions

            asked = predictions.PredictionOptions(machine, options["report"], json=options["json"])
            predictions.collective_main(asked)
            return

        from sidelane.cli.launch import choose_target
        from sidelane_lab.studies import collectives as collective_study

        on_cpu = choose_target(options["ranks"], options["device"]).on_cpu
        options |= _asked(options, 16 << 20 if on_cpu else 4 << 30)
        kinds = tuple(map(Kind, KINDS if ALL in collectives else collectives))
        collective_study.main(collective_study.CollectiveOptions(collectives=kinds, repeats=iterations, **options))


# The study says why something else is none, so this is no click.Choice.
@click.command(
    cls=Command,
    heading=MEASURE,
    examples=(
        ("sidelane phases --operation copy", "where a single transfer spends its time"),
        ("sidelane phases --operation all_gather --variants b2b,pcpy", "two variants of a collective"),
        ("sidelane phases --machine h200x4 --max-bytes 1M", "predicted, for four H200s"),
    ),
)
@what(
    "--operation",
    "operations",
    multiple=True,
    metavar="NAME",
    show_default="all",
    help=f"May be repeated. One of: {', '.join(PHASED)}.",
)
@size_options("1K", "1G on GPUs, 4M on CPUs")
@names_option(
    "--variants",
    "b2b",
    "pcpy, bcst, swap, b2b, striped, b2b+prelaunch, ...",
)
@choice_option("--launch", ["eager", "graph", "both"], "both", "Call by call, or in a CUDA graph.")
@count_option("--calls", 31, "Measured calls of each.")
@count_option("--warmup", 4, "Calls before them.")
@what(
    "--predict",
    metavar="NAME_OR_FILE",
    default="",
    show_default=False,
    help="Machine to predict beside what is measured.",
)
@machine_option
@measuring_options
def phases(operations: tuple[str, ...], machine: str | None, **options: Any) -> None:
    """Show where a transfer and a collective spend their time: control, schedule, copy, sync.

    Measured by time stamps around the copies and by the host's clock, one call at a time, next to what the simulator
    predicts for the same programs. With --machine: predicted only, for a machine that need not be here.
    """
    with plain_errors():
        options["operations"] = operations or PHASED
        if machine is not None:
            allowed = ("operations", "min_bytes", "max_bytes", "factor", "variants", "json", "report")
            refuse_beside_machine(*allowed)
            from sidelane_lab.studies.phases import predict as phases_predict

            options |= _asked(options, 1 << 30)
            asked = {name: options[name] for name in ("operations", "variants", "sizes", "json", "report")}
            phases_predict.main(phases_predict.PhasePredictionOptions(machine=machine, **asked))
            return

        from sidelane.cli.launch import choose_target
        from sidelane_lab.studies.phases import study as phases_study

        on_cpu = choose_target(options["ranks"], options["device"]).on_cpu
        options |= _asked(options, 4 << 20 if on_cpu else 1 << 30)
        phases_study.main(phases_study.PhasesOptions(**options))


@click.command(
    cls=Command,
    heading=MEASURE,
    examples=(
        ("sidelane power --min-bytes 1G", "watts and energy at one size"),
        ("sidelane power --collective all_reduce --machine mi300x8", "predicted, for eight MI300X"),
        ("sidelane power --gemm cb1 --machine h200x4", "predicted, next to a GEMM under each strategy"),
    ),
)
@moved_collectives
@what(
    "--gemm",
    "gemms",
    multiple=True,
    help=f"Next to it, predicted, with --machine: {', '.join(TABLE_I)} (ConCCL paper's Table I), or m,n,k. May be "
    "repeated.",
)
@size_options("64M", "1G", fixed=True)
@names_option(
    "--variants",
    "b2b",
    "Of Sidelane's copy engines: pcpy, striped, ...; reductions have b2b and pcpy. Kernels all take part.",
)
@choice_option("--launch", ["eager", "graph"], "graph", "Call by call, or in a CUDA graph.")
@choice_option("--place", ["in", "out", "both"], "both", "Calls in place, out of place, or both.")
@how("--seconds", type=float, default=0.7, help="Seconds that each implementation runs in a round.")
@count_option("--rounds", 2, "Rounds over all implementations.")
@machine_option
@study_options
def power(
    collectives: tuple[str, ...], machine: str | None, gemms: tuple[str, ...], launch: str, **options: Any
) -> None:
    """Measure power and energy of collectives, by the GPUs' counters.

    With --machine: predict them for a machine that need not be here: as the DMA collectives paper ran its variants, and
    reductions as Sidelane runs them on copy engines; with --gemm next to a GEMM, as `sidelane c3` has it.
    """
    with plain_errors():
        options |= _asked(options) | {"collectives": tuple(map(Kind, collectives))}
        if machine is not None:
            refuse_beside_machine("gemms", "collectives", "min_bytes", "max_bytes", "factor", "json", "report")
            from sidelane_lab.studies.power import predict as power_predict

            asked = {name: options[name] for name in ("collectives", "sizes", "json", "report")}
            power_predict.main(power_predict.PowerPredictionOptions(machine=machine, gemms=gemms, **asked))
            return
        if gemms:
            raise ValueError("power: --gemm is predicted, not measured; it needs --machine")

        from sidelane_lab.studies.power import study as power_study

        power_study.main(power_study.PowerOptions(launch=launch, **options))


@click.command(
    cls=Command,
    heading=MEASURE,
    examples=(
        ("sidelane chain", "every implementation, launched in every way"),
        ("sidelane chain --launch prelaunched --variants b2b", "copies that are armed ahead of the first GEMM"),
    ),
)
@size_options("1M", "256M on GPUs, 4M on CPUs")
@names_option("--variants", "", "Of Sidelane's: b2b, pcpy, one_shot, ...", "all")
@choice_option(
    "--launch",
    ["eager", "graph", "prelaunched", ALL],
    ALL,
    "prelaunched: Sidelane's copy engines, armed ahead of the first GEMM.",
)
@study_options
def chain(**options: Any) -> None:
    """Measure a GEMM, an all-gather of its result and a GEMM that reads that, with no host between."""
    with plain_errors():
        from sidelane.cli.launch import choose_target
        from sidelane_lab.baselines.roster import check_asked
        from sidelane_lab.studies.chain import study as chain_study

        place = choose_target(options["ranks"], options["device"])
        options |= _asked(options, 4 << 20 if place.on_cpu else 256 << 20)
        asked = {name: options[name] for name in ("implementations", "variants", "launches")}
        check_asked(place.device_type, (Kind.ALL_GATHER,), **asked)
        chain_study.main(chain_study.ChainOptions(**options))


@click.command(
    cls=Command,
    heading=MEASURE,
    examples=(
        ("sidelane host", "what repeated calls take the host"),
        ("sidelane host --bytes 1K --variants b2b,alternating", "two variants at one size"),
    ),
)
@what(
    "--bytes",
    "sizes",
    metavar="SIZE",
    multiple=True,
    callback=size,
    show_default="1K and 64K",
    help="Gathered size, such as 64K. May be repeated.",
)
@names_option("--variants", "one_shot,b2b,alternating,striped", "Of Sidelane's, that are measured.")
@count_option("--calls", 40, "Calls in a batch.")
@count_option("--batches", 50, "Batches that are measured.", name="repeats")
@study_options
def host(sizes: tuple[int, ...], **options: Any) -> None:
    """Measure the microseconds that a call, and a trigger of a prelaunched one, take the host."""
    with plain_errors():
        from sidelane_lab.studies import host as host_study

        if sizes:
            options["sizes"] = sizes
        host_study.main(host_study.HostOptions(**options))


@click.command(
    cls=Command,
    heading=MEASURE,
    examples=(
        ("sidelane fused", "every operator, at the shapes of the study"),
        ("sidelane fused --device cpu --ops gemv_all_reduce", "check one on CPU ranks"),
        ("sidelane fused --timeline traces", "and write what each workgroup did, and when"),
        ("sidelane fused --machine mi210x4", "predict them for four MI210"),
        ("sidelane fused --machine h200x4 --ops embedding_all_to_all --shape 2048,128,20", "a shape of your own"),
        ("sidelane fused --machine h100x4 --results results/h100x1/fused.json", "how far predictions are off"),
    ),
)
@names_option("--ops", "", "Operators.", "all")
@what(
    "--shape",
    "shapes",
    multiple=True,
    metavar="N,N,...",
    callback=shapes,
    help="With --machine and one operator: GEMV rows, columns of all ranks, tokens; embedding batch, tables of a rank, "
    "pooling; GEMM rows of a rank, depth, columns. May be repeated.",
)
@count_option("--repeats", 21, "Rounds that are measured.")
@output(
    "--timeline",
    type=Written(is_folder=True),
    metavar="FOLDER",
    help="Write a Perfetto trace, a picture of the workgroups and one of ranks' skew of each operator's first shape.",
)
@output("--keep", is_flag=True, help='Keep the times for this user: method="auto" of the operators goes by them.')
@how("--occupancy", type=float, default=None, show_default="all", help="With --machine: of fused kernels, up to 1.")
@output(
    "--results",
    "measured",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    metavar="FILE",
    help="A file of sidelane fused. With --machine: hold predictions against it. With --keep: keep its times.",
)
@how("--late", "late_us", type=float, default=0, help="With --machine: the last rank begins so many us later.")
@machine_option
@study_options
def fused(
    json: Path | None,
    machine: str | None,
    shapes: tuple[tuple[int, ...], ...],
    occupancy: float | None,
    late_us: float,
    measured: Path | None,
    **others: Any,
) -> None:
    """Measure fused operators next to the same computation and a collective, one after the other.

    With --machine: predict them for a machine that need not be here. Nodes of one GPU each, joined by a network, are a
    file: base, gpus = 1, nodes = 2, [links] network_gbps.
    """
    with plain_errors():
        if machine is not None:
            refuse_beside_machine("ops", "shapes", "occupancy", "late_us", "measured", "json", "report")
            from sidelane_lab.papers import operator_results, operators

            report = others["report"]
            asked = operators.FusedPredictionOptions(
                machine, others["ops"], shapes, occupancy, late_us, report, json, measured
            )
            (operators if measured is None else operator_results).main(asked)
            return
        predicted = (("shapes", "--shape"), ("occupancy", "--occupancy"), ("late_us", "--late"))
        for name, option in predicted:
            if given(name):
                raise ValueError(f"{option} is for predictions; it needs --machine")

        from sidelane_lab.studies.fused import study as fused_study

        fused_study.main(fused_study.FusedOptions(json=json, results=measured, **others))


def _asked(options: dict[str, Any], usual: int = 0) -> dict[str, Any]:
    """Take sizes, launches and places out of the parameters of a command, and return them as studies have them.

    Args:
        options: the parameters.
        usual: the largest size where nobody says one; 0 is said, and is refused as such.
    """
    smallest, largest, factor = (options.pop(name) for name in ("min_bytes", "max_bytes", "factor"))
    asked = {"sizes": tuple(sizes_between(smallest, usual if largest is None else largest, factor))}
    for name, several in (("launch", "launches"), ("place", "places")):
        if name in options:
            word = options.pop(name)
            asked[several] = () if word in ("both", ALL) else (word,)
    return asked
