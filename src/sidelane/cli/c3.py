"""The command ``sidelane c3``: a GEMM next to a collective, measured or predicted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from sidelane.c3.strategy import STRATEGIES
from sidelane.c3.workload import GEMM_DTYPES, TABLE_I, format_bytes, parse_gemm, parse_workload
from sidelane.cli.errors import plain_errors
from sidelane.cli.options import (
    VERSIONS,
    given,
    machine_option,
    moved_collectives,
    names,
    refuse_beside_machine,
    size,
    study_options,
)
from sidelane.program.collective import Kind


@click.command()
@click.argument("pairs", nargs=-1)
@click.option("--gemm", "gemms", multiple=True, help=f"{', '.join(TABLE_I)} (paper's Table I), or m,n,k. Repeatable.")
@click.option(
    "--bytes",
    "sizes",
    multiple=True,
    metavar="SIZE",
    callback=size,
    help="With --gemm: of the collective. Repeatable. On CPUs divided as the GEMM is, see --full-size.",
)
@moved_collectives
@click.option("--dtype", type=click.Choice(GEMM_DTYPES), default="bfloat16", help="On GPUs; CPUs take float32.")
@click.option(
    "--strategy",
    "strategies",
    multiple=True,
    type=click.Choice([strategy.name for strategy in STRATEGIES]),
    help="Repeatable. Default: all.",
)
@click.option(
    "--variants",
    metavar="NAME,...",
    callback=names,
    default="auto",
    help="Of Sidelane's collectives; the best is reported.",
)
@click.option(
    "--full-size",
    is_flag=True,
    help="On CPUs: take GEMM and bytes as given. Otherwise every dimension of a GEMM that takes a core longer than "
    "some tens of ms is divided by 2, 4, 8, ..., and the bytes by the same number; the table has the sizes that ran.",
)
@click.option("--warmup", type=click.IntRange(min=0), default=6, show_default=True, help="Rounds before the measured.")
@click.option("--repeats", type=click.IntRange(min=1), default=9, show_default=True, help="Measured rounds.")
@machine_option
@click.option(
    "--version",
    type=click.Choice(VERSIONS),
    default="000",
    show_default=True,
    help="Of the ConCCL paper (docs/internals/model.md), with --machine.",
)
@study_options
def c3(
    pairs: tuple[str, ...],
    gemms: tuple[str, ...],
    sizes: tuple[int, ...],
    collectives: tuple[str, ...],
    machine: str | None,
    version: str,
    json_file: Path | None,
    **others: Any,
) -> None:
    """Measure a GEMM next to a collective under every strategy.

    PAIRS are written as the paper does: cb1_896M, mb2_3.25G, 4096x4096x4096_64M. --gemm and --bytes give the same, each
    GEMM with each size. Without any: cb1_896M.

    With --machine: predict them for a machine that need not be here; without any, the paper's whole study (with
    --report about a minute, for the plausible ranges). --collective, --version and --report go with it.
    """
    with plain_errors():
        workloads = [*pairs, *pairs_of(gemms, sizes)]
        kinds = tuple(map(Kind, collectives))
        for pair in workloads:
            parse_workload(pair)

        if machine is not None:
            predict_c3(machine, workloads, kinds, version, others["report"])
        if given("version"):
            raise ValueError("--version chooses between versions of the paper; it needs --machine")

        from sidelane.bench.c3 import study as c3_study

        workloads = workloads or ["cb1_896M"]
        c3_study.main(c3_study.C3Options(workloads=tuple(workloads), collectives=kinds, json=json_file, **others))


def predict_c3(machine: str, pairs: list[str], kinds: tuple[Kind, ...], version: str, report: Path | None) -> NoReturn:
    """What ``sidelane c3 --machine`` does. Without pairs: the whole study, which has its own collectives.

    Raises:
        ValueError: options that do not go together, or no such machine.
    """
    if pairs:
        refuse_beside_machine("pairs", "gemms", "sizes", "collectives", "report")
    else:
        refuse_beside_machine("version", "report")
    from sidelane.bench.simulated import study as sim_study

    workloads = [parse_workload(pair, kind) for kind in kinds for pair in pairs]
    sys.exit(sim_study.c3_main(sim_study.Options(machine, report, version), workloads))


def pairs_of(gemms: tuple[str, ...], sizes: tuple[int, ...]) -> list[str]:
    """Every GEMM with every size, as the paper writes them.

    >>> pairs_of(("cb1", "512,512,2048"), (1024,))
    ['cb1_1K', '512x512x2048_1K']

    Raises:
        ValueError: one of the two is missing, or a GEMM is not one.
    """
    if bool(gemms) != bool(sizes):
        raise ValueError("--gemm and --bytes belong together (one of them is missing)")
    names = [parse_gemm(text.replace(",", "x")).name for text in gemms]
    return [f"{name}_{format_bytes(size)}" for name in names for size in sizes]
