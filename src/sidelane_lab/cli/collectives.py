"""The commands that measure collectives: ``collective``, ``phases``, ``power``, ``chain``, ``host``, ``fused``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sidelane.c3.workload import TABLE_I
from sidelane.cli.errors import plain_errors
from sidelane.cli.guided import MEASURE, Command, how, output, what
from sidelane.cli.options import (
    ALL,
    KINDS,
    given,
    machine_option,
    measuring_options,
    moved_collectives,
    names,
    refuse_beside_machine,
    shapes,
    size,
    size_options,
    sizes_between,
    study_options,
)
from sidelane.cli.written import Written
from sidelane.program.collective import ELEMENT_BYTES, Kind

# What ``sidelane phases`` knows; bench.phases_programs has the same names.
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
@what(
    "--variants",
    metavar="NAME,...",
    callback=names,
    default="",
    show_default="all; prelaunched only b2b up to 1M",
    help="Of Sidelane's: pcpy, bcst, swap, b2b, b2b+prelaunch, ...",
)
@what(
    "--launch",
    type=click.Choice(["eager", "graph", "both"]),
    default="both",
    help="Call by call, or in a CUDA graph.",
)
@what(
    "--place",
    type=click.Choice(["in", "out", "both"]),
    default="both",
    help="Calls in place, out of place, or both.",
)
@how(
    "--iterations",
    type=click.IntRange(min=1),
    default=15,
    help="Measured rounds; of short eager calls on GPUs four times as many.",
)
@how("--warmup", type=click.IntRange(min=0), default=3, help="Rounds before them.")
@how("--profile/--no-profile", default=True, help="On GPUs: look which implementations launched kernels.")
@machine_option
@study_options
def collective(
    collectives: tuple[str, ...],
    min_bytes: int,
    max_bytes: int | None,
    factor: int,
    launch: str,
    place: str,
    iterations: int,
    machine: str | None,
    json: Path | None,
    **others: Any,
) -> None:
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

            asked = predictions.PredictionOptions(machine, others["report"], json=json)
            predictions.collective_main(asked)
            return

        from sidelane.cli.launch import choose_target
        from sidelane_lab.studies.collectives import study as collective_study

        on_cpu = choose_target(others["ranks"], others["device"]).on_cpu
        sizes = tuple(sizes_between(min_bytes, _or(max_bytes, 16 << 20 if on_cpu else 4 << 30), factor))
        kinds = KINDS if ALL in collectives else collectives
        collective_study.main(
            collective_study.CollectiveOptions(
                collectives=tuple(map(Kind, kinds)),
                sizes=sizes,
                launches=() if launch == "both" else (launch,),
                places=() if place == "both" else (place,),
                repeats=iterations,
                json=json,
                **others,
            )
        )


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
@what(
    "--variants",
    metavar="NAME,...",
    callback=names,
    default="b2b",
    help="pcpy, bcst, swap, b2b, striped, b2b+prelaunch, ..., alternating, and in graphs "
    "alternating+opening, the first call of one.",
)
@what(
    "--launch",
    type=click.Choice(["eager", "graph", "both"]),
    default="both",
    help="Call by call, or in a CUDA graph.",
)
@how("--calls", type=click.IntRange(min=1), default=31, help="Measured calls of each.")
@how("--warmup", type=click.IntRange(min=1), default=4, help="Calls before them.")
@what(
    "--predict",
    metavar="NAME_OR_FILE",
    default="",
    show_default=False,
    help="Machine to predict beside what is measured.",
)
@machine_option
@measuring_options
def phases(
    operations: tuple[str, ...],
    min_bytes: int,
    max_bytes: int | None,
    factor: int,
    variants: tuple[str, ...],
    launch: str,
    machine: str | None,
    json: Path | None,
    **others: Any,
) -> None:
    """Show where a transfer and a collective spend their time: control, schedule, copy, sync.

    Measured by time stamps around the copies and by the host's clock, one call at a time, next to what the simulator
    predicts for the same programs. With --machine: predicted only, for a machine that need not be here.
    """
    with plain_errors():
        chosen = operations or PHASED
        if machine is not None:
            allowed = ("operations", "min_bytes", "max_bytes", "factor", "variants", "json", "report")
            refuse_beside_machine(*allowed)
            from sidelane_lab.studies.phases import predict as phases_predict

            sizes = tuple(sizes_between(min_bytes, _or(max_bytes, 1 << 30), factor))
            asked = phases_predict.PhasePredictionOptions(
                machine=machine, operations=chosen, variants=variants, sizes=sizes, json=json, report=others["report"]
            )
            phases_predict.main(asked)
            return

        from sidelane.cli.launch import choose_target
        from sidelane_lab.studies.phases import study as phases_study

        place = choose_target(others["ranks"], others["device"])
        phases_study.main(
            phases_study.PhasesOptions(
                operations=chosen,
                sizes=tuple(sizes_between(min_bytes, _or(max_bytes, 4 << 20 if place.on_cpu else 1 << 30), factor)),
                variants=variants,
                launches=() if launch == "both" else (launch,),
                json=json,
                **others,
            )
        )


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
@what(
    "--variants",
    metavar="NAME,...",
    callback=names,
    default="b2b",
    help="Of Sidelane's copy engines: pcpy, striped, ...; reductions have b2b and pcpy. Kernels all take part.",
)
@what("--launch", type=click.Choice(["eager", "graph"]), default="graph", help="Call by call, or in a CUDA graph.")
@what(
    "--place",
    "places",
    type=click.Choice(["in", "out", "both"]),
    default="both",
    help="Calls in place, out of place, or both.",
)
@how("--seconds", type=float, default=0.7, help="Seconds that each implementation runs in a round.")
@how("--rounds", type=click.IntRange(min=1), default=2, help="Rounds over all implementations.")
@output(
    "--fill",
    type=Written(exists=True),
    metavar="FILE",
    help="A collectives.json of this machine whose energies to fill in from this study.",
)
@machine_option
@study_options
def power(
    collectives: tuple[str, ...],
    min_bytes: int,
    max_bytes: int,
    factor: int,
    places: str,
    machine: str | None,
    gemms: tuple[str, ...],
    json: Path | None,
    **others: Any,
) -> None:
    """Measure power and energy of collectives, by the GPUs' counters.

    With --machine: predict them for a machine that need not be here: as the DMA collectives paper ran its variants, and
    reductions as Sidelane runs them on copy engines; with --gemm next to a GEMM, as `sidelane c3` has it.
    """
    with plain_errors():
        kinds = tuple(map(Kind, collectives))
        sizes = tuple(sizes_between(min_bytes, max_bytes, factor))
        if machine is not None:
            refuse_beside_machine("gemms", "collectives", "min_bytes", "max_bytes", "factor", "json", "report")
            from sidelane_lab.studies.power import predict as power_predict

            asked = power_predict.PowerPredictionOptions(
                machine=machine, gemms=gemms, collectives=kinds, sizes=sizes, json=json, report=others["report"]
            )
            power_predict.main(asked)
            return
        if gemms:
            raise ValueError("power: --gemm is predicted, not measured; it needs --machine")

        from sidelane_lab.studies.power import study as power_study

        power_study.main(
            power_study.PowerOptions(
                collectives=kinds,
                sizes=sizes,
                places=() if places == "both" else (places,),
                json=json,
                **others,
            )
        )


@click.command(
    cls=Command,
    heading=MEASURE,
    examples=(
        ("sidelane chain", "every implementation, launched in every way"),
        ("sidelane chain --launch prelaunched --variants b2b", "copies that are armed ahead of the first GEMM"),
    ),
)
@size_options("1M", "256M on GPUs, 4M on CPUs")
@what(
    "--variants",
    metavar="NAME,...",
    callback=names,
    default="",
    show_default="all",
    help="Of Sidelane's: b2b, pcpy, one_shot, ...",
)
@what(
    "--launch",
    type=click.Choice(["eager", "graph", "prelaunched", ALL]),
    default=ALL,
    help="prelaunched: Sidelane's copy engines, armed ahead of the first GEMM.",
)
@study_options
def chain(min_bytes: int, max_bytes: int | None, factor: int, launch: str, json: Path | None, **others: Any) -> None:
    """Measure a GEMM, an all-gather of its result and a GEMM that reads that, with no host between."""
    with plain_errors():
        from sidelane.cli.launch import choose_target
        from sidelane_lab.harness.asked import check_asked
        from sidelane_lab.studies.chain import study as chain_study

        place = choose_target(others["ranks"], others["device"])
        asked = {name: others[name] for name in ("implementations", "variants")}
        launches = () if launch == ALL else (launch,)
        check_asked(place.device_type, (Kind.ALL_GATHER,), launches=launches, **asked)
        largest = _or(max_bytes, 4 << 20 if place.on_cpu else 256 << 20)
        chain_study.main(
            chain_study.ChainOptions(
                sizes=tuple(sizes_between(min_bytes, largest, factor)),
                launches=launches,
                json=json,
                **others,
            )
        )


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
@what(
    "--variants",
    metavar="NAME,...",
    callback=names,
    default="one_shot,b2b,alternating,striped",
    help="Of Sidelane's, that are measured.",
)
@how("--calls", type=click.IntRange(min=1), default=40, help="Calls in a batch.")
@how("--batches", "repeats", type=click.IntRange(min=1), default=50, help="Batches that are measured.")
@study_options
def host(sizes: tuple[int, ...], json: Path | None, **others: Any) -> None:
    """Measure the microseconds that a call, and a trigger of a prelaunched one, take the host."""
    with plain_errors():
        from sidelane_lab.studies import host as host_study

        if sizes:
            others["sizes"] = sizes
        host_study.main(host_study.HostOptions(json=json, **others))


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
@what("--ops", metavar="NAME,...", callback=names, default="", show_default="all", help="Operators.")
@what(
    "--shape",
    "shapes",
    multiple=True,
    metavar="N,N,...",
    callback=shapes,
    help="With --machine and one operator: GEMV rows, columns of all ranks, tokens; embedding batch, tables of a rank, "
    "pooling; GEMM rows of a rank, depth, columns. May be repeated.",
)
@how("--repeats", type=click.IntRange(min=1), default=21, help="Rounds that are measured.")
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


def _or(given: int | None, default: int) -> int:
    """0 is a size that somebody gave, and is refused as such."""
    return default if given is None else given
