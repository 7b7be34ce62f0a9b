"""The commands that measure collectives: ``sidelane collective``, ``phases``, ``power``, ``chain`` and ``host``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from sidelane.cli.errors import plain_errors
from sidelane.cli.options import (
    ALL,
    KINDS,
    machine_option,
    measuring_options,
    moved_collectives,
    names,
    refuse_beside_machine,
    size,
    sizes_between,
    study_options,
)
from sidelane.program.collective import ELEMENT_BYTES, Kind

# What ``sidelane phases`` knows; bench.phases_programs has the same names.
PHASED = ("copy", "copies", "all_gather", "all_gather_in_place", "all_to_all")


@click.command()
@click.option(
    "--collective",
    "collectives",
    multiple=True,
    type=click.Choice([*KINDS, ALL]),
    default=("all_gather", "all_to_all"),
    help="May be repeated. Default: all_gather and all_to_all.",
)
@click.option("--min-bytes", metavar="SIZE", callback=size, default="1K", show_default=True, help="Smallest size.")
@click.option("--max-bytes", metavar="SIZE", callback=size, help="Largest size. Default: 4G on GPUs, 16M on CPUs.")
@click.option("--factor", type=click.IntRange(min=2), default=4, show_default=True, help="A size over the one before.")
@click.option(
    "--tensors",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Spread each size over a list of that many tensors: in one call, and in a call each.",
)
@click.option("--dtype", type=click.Choice(list(ELEMENT_BYTES)), default="bfloat16", show_default=True)
@click.option(
    "--variants",
    metavar="NAME,...",
    callback=names,
    default="",
    help="Of Sidelane's: pcpy, bcst, swap, b2b, b2b+prelaunch, ... Default: all; prelaunched only b2b up to 1M.",
)
@click.option("--launch", type=click.Choice(["eager", "graph", "both"]), default="both", show_default=True)
@click.option(
    "--place",
    type=click.Choice(["in", "out", "both"]),
    default="both",
    show_default=True,
    help="Keep calls in place, out of place, or both.",
)
@click.option(
    "--iterations",
    type=click.IntRange(min=1),
    default=15,
    show_default=True,
    help="Measured rounds; of short eager calls on GPUs four times as many.",
)
@click.option("--warmup", type=click.IntRange(min=0), default=3, show_default=True, help="Rounds before them.")
@click.option("--profile/--no-profile", default=True, help="On GPUs: look which implementations launched kernels.")
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
    json_file: Path | None,
    **others: Any,
) -> None:
    """Measure collectives over sizes: every implementation and variant, checked before it is timed.

    With --tensors: calls with lists, next to separate calls one behind the other (variants that end with "separate").
    A size is then that of all tensors together.

    With --machine: predict the DMA collectives paper's study (all_gather and all_to_all, 1K to 4G) for a machine that
    need not be here.
    """
    with plain_errors():
        if machine is not None:
            refuse_beside_machine("report")
            from sidelane.bench.simulated import study as sim_study

            sys.exit(sim_study.collective_main(sim_study.Options(machine, others["report"])))

        from sidelane.bench.collectives import study as collective_study
        from sidelane.bench.running.launch import choose_place

        on_cpu = choose_place(others["ranks"], others["device"]).on_cpu
        sizes = tuple(sizes_between(min_bytes, _or(max_bytes, 16 << 20 if on_cpu else 4 << 30), factor))
        kinds = KINDS if ALL in collectives else collectives
        collective_study.main(
            collective_study.CollectiveOptions(
                collectives=tuple(map(Kind, kinds)),
                sizes=sizes,
                launches=() if launch == "both" else (launch,),
                places=() if place == "both" else (place,),
                repeats=iterations,
                json=json_file,
                **others,
            )
        )


# The study says why something else is none, so this is no click.Choice.
@click.command()
@click.option(
    "--operation", "operations", multiple=True, metavar=f"[{'|'.join(PHASED)}]", help="Repeatable. Default: all."
)
@click.option("--min-bytes", metavar="SIZE", callback=size, default="1K", show_default=True, help="Smallest size.")
@click.option("--max-bytes", metavar="SIZE", callback=size, help="Largest size. Default: 1G on GPUs, 4M on CPUs.")
@click.option("--factor", type=click.IntRange(min=2), default=4, show_default=True, help="A size over the one before.")
@click.option(
    "--variants",
    metavar="NAME,...",
    callback=names,
    default="b2b",
    show_default=True,
    help="pcpy, bcst, swap, b2b, striped, b2b+graph, b2b+prelaunch, ..., alternating, alternating+graph, and in graphs "
    "alternating+opening, the first call of one.",
)
@click.option("--launch", type=click.Choice(["eager", "graph", "both"]), default="both", show_default=True)
@click.option("--calls", type=click.IntRange(min=1), default=31, show_default=True, help="Measured calls of each.")
@click.option("--warmup", type=click.IntRange(min=1), default=4, show_default=True, help="Calls before them.")
@click.option("--predict", metavar="NAME_OR_FILE", default="", help="Machine to predict beside what is measured.")
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
    json_file: Path | None,
    **others: Any,
) -> None:
    """Show where one transfer and one collective spend their time: control, schedule, copy, sync.

    Measured by time stamps around the copies and by the host's clock, one call at a time, next to what the simulator
    predicts for the same programs. With --machine: predicted only, for a machine that need not be here.
    """
    with plain_errors():
        chosen = operations or PHASED
        if machine is not None:
            allowed = ("operations", "min_bytes", "max_bytes", "factor", "variants", "json_file", "report")
            refuse_beside_machine(*allowed)
            from sidelane.bench.phases import predict as phases_predict

            sizes = tuple(sizes_between(min_bytes, _or(max_bytes, 1 << 30), factor))
            sys.exit(
                phases_predict.main(
                    phases_predict.PredictOptions(
                        machine=machine,
                        operations=chosen,
                        variants=variants,
                        sizes=sizes,
                        json=json_file,
                        report=others["report"],
                    )
                )
            )

        from sidelane.bench.phases import study as phases_study
        from sidelane.bench.running.launch import choose_place

        place = choose_place(others["ranks"], others["device"])
        phases_study.main(
            phases_study.PhasesOptions(
                operations=chosen,
                sizes=tuple(sizes_between(min_bytes, _or(max_bytes, 4 << 20 if place.on_cpu else 1 << 30), factor)),
                variants=variants,
                launches=() if launch == "both" else (launch,),
                json=json_file,
                **others,
            )
        )


@click.command()
@moved_collectives
@click.option("--min-bytes", metavar="SIZE", callback=size, default="64M", show_default=True, help="Smallest size.")
@click.option("--max-bytes", metavar="SIZE", callback=size, default="1G", show_default=True, help="Largest size.")
@click.option("--factor", type=click.IntRange(min=2), default=4, show_default=True, help="A size over the one before.")
@click.option(
    "--variants",
    metavar="NAME,...",
    callback=names,
    default="b2b",
    show_default=True,
    help="Of Sidelane's copy engines: pcpy, striped, ...; reductions have b2b and pcpy. Kernels all take part.",
)
@click.option("--launch", type=click.Choice(["eager", "graph"]), default="graph", show_default=True)
@click.option("--place", "places", type=click.Choice(["in", "out", "both"]), default="both", show_default=True)
@click.option("--seconds", type=float, default=0.7, show_default=True, help="That each runs in a round.")
@click.option("--rounds", type=click.IntRange(min=1), default=2, show_default=True)
@click.option(
    "--fill",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
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
    json_file: Path | None,
    **others: Any,
) -> None:
    """Measure power and energy of collectives: every implementation back to back, with the GPUs' counters read.

    With --machine: predict them for a machine that need not be here: as the DMA collectives paper ran its variants, and
    reductions as Sidelane runs them on copy engines.
    """
    with plain_errors():
        kinds = tuple(map(Kind, collectives))
        sizes = tuple(sizes_between(min_bytes, max_bytes, factor))
        if machine is not None:
            refuse_beside_machine("collectives", "min_bytes", "max_bytes", "factor", "json_file", "report")
            from sidelane.bench.power import predict as power_predict

            asked = power_predict.PredictOptions(
                machine=machine, collectives=kinds, sizes=sizes, json=json_file, report=others["report"]
            )
            sys.exit(power_predict.main(asked))

        from sidelane.bench.power import study as power_study

        power_study.main(
            power_study.PowerOptions(
                collectives=kinds,
                sizes=sizes,
                places=() if places == "both" else (places,),
                json=json_file,
                **others,
            )
        )


@click.command()
@click.option("--min-bytes", metavar="SIZE", callback=size, default="1M", show_default=True, help="Smallest size.")
@click.option("--max-bytes", metavar="SIZE", callback=size, help="Largest size. Default: 256M on GPUs, 4M on CPUs.")
@click.option("--factor", type=click.IntRange(min=2), default=4, show_default=True, help="A size over the one before.")
@click.option("--variants", metavar="NAME,...", callback=names, default="", help="Of Sidelane's. Default: all.")
@click.option(
    "--launch",
    type=click.Choice(["eager", "graph", "prelaunched", ALL]),
    default=ALL,
    show_default=True,
    help="prelaunched: Sidelane's copy engines, armed ahead of the first GEMM.",
)
@study_options
def chain(
    min_bytes: int, max_bytes: int | None, factor: int, launch: str, json_file: Path | None, **others: Any
) -> None:
    """Measure a GEMM, an all-gather of what it made, and a GEMM that reads it, with no host in between."""
    with plain_errors():
        from sidelane.bench.chain import study as chain_study
        from sidelane.bench.running.asked import check_asked
        from sidelane.bench.running.launch import choose_place

        place = choose_place(others["ranks"], others["device"])
        asked = {name: others[name] for name in ("implementations", "variants")}
        launches = () if launch == ALL else (launch,)
        check_asked(place.device_type, (Kind.ALL_GATHER,), launches=launches, **asked)
        largest = _or(max_bytes, 4 << 20 if place.on_cpu else 256 << 20)
        chain_study.main(
            chain_study.ChainOptions(
                sizes=tuple(sizes_between(min_bytes, largest, factor)),
                launches=launches,
                json=json_file,
                **others,
            )
        )


@click.command()
@click.option("--bytes", "sizes", metavar="SIZE", multiple=True, callback=size, help="Repeatable. Default: 1K and 64K.")
@click.option(
    "--variants",
    metavar="NAME,...",
    callback=names,
    default="one_shot,b2b,b2b+graph,alternating,striped",
    show_default=True,
    help="Of Sidelane's.",
)
@click.option("--calls", type=click.IntRange(min=1), default=40, show_default=True, help="Calls in a batch.")
@click.option("--batches", "repeats", type=click.IntRange(min=1), default=50, show_default=True)
@study_options
def host(sizes: tuple[int, ...], json_file: Path | None, **others: Any) -> None:
    """Measure what a call takes the host: repeated all-gathers, and triggers of prelaunched ones."""
    with plain_errors():
        from sidelane.bench.host import study as host_study

        if sizes:
            others["sizes"] = sizes
        host_study.main(host_study.HostOptions(json=json_file, **others))


def _or(given: int | None, default: int) -> int:
    """0 is a size that somebody gave, and is refused as such."""
    return default if given is None else given
