"""The command ``sidelane c3``: a GEMM next to a collective, measured or predicted."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import click

from sidelane.c3.strategies import strategies as all_strategies
from sidelane.c3.workload import GEMM_DTYPES, TABLE_I, parse_gemm, parse_workload
from sidelane.cli.errors import plain_errors
from sidelane.cli.help import MEASURE, Command, how, what
from sidelane.cli.options import (
    VERSIONS,
    choice_option,
    count_option,
    given,
    machine_option,
    moved_collectives,
    names_option,
    reasons,
    refuse_beside_machine,
    say_rounding,
    size,
    study_options,
)
from sidelane.cli.output import Written
from sidelane.kernels.gemm_shape import SHAPES
from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes

NAMES = "nccl, nccl_ctas, nccl_ce, symm_mem, gloo, dma, dma_left, dma_in_place, sm"
"""Implementations that run next to a GEMM."""

PAIRS, OCCUPANCY, HEURISTICS = "pairs", "occupancy", "heuristics"
OF_OCCUPANCY = ("shapes", "blocks", "iterations", "in_order")
OF_PAIRS = ("strategies", "variants", "isolated", "timeline", "not_run", "resume", "budget_s", "third")
"""Parameters that only one of the studies has."""


@click.command(
    cls=Command,
    heading=MEASURE,
    examples=(
        ("sidelane c3 cb1_896M", "measure one pair on the GPUs that are here"),
        ("sidelane c3 --gemm 8192,8192,8192 --bytes 1.2G", "a GEMM and a size of your own"),
        ("sidelane c3 cb1_896M --study occupancy", "iterations in a pipeline, by the shape of the GEMM"),
        ("sidelane c3 --study heuristics --machine mi300x8", "how often each heuristic is right there"),
        ("sidelane c3 --machine mi300x8", "predict the whole study for eight MI300X"),
        ("sidelane c3 --machine h200x4 --results c3.json --report out", "predicted and measured together"),
        ("sidelane c3 cb1_896M --machine h200x4 --json -", "predict one pair, as JSON"),
    ),
)
@click.argument("pairs", nargs=-1)
@what("--gemm", "gemms", multiple=True, help=f"{', '.join(TABLE_I)} (paper's Table I), or m,n,k. May be repeated.")
@what(
    "--bytes",
    "sizes",
    multiple=True,
    metavar="SIZE",
    callback=size,
    help="Of the collective, with --gemm, such as 1.2G. May be repeated. On CPUs divided as the GEMM is, see "
    "--full-size.",
)
@moved_collectives
@what(
    "--study",
    type=click.Choice((PAIRS, OCCUPANCY, HEURISTICS)),
    default=PAIRS,
    help="occupancy: pipelined iterations, by the shape of a Triton GEMM and with priority (overlap paper); "
    "collectives are all_reduce and all_to_all then. heuristics: what each would choose for the pairs, against the "
    "best of all strategies.",
)
@what("--tile", "shapes", multiple=True, type=click.Choice(tuple(SHAPES)), help="Of the GEMM, with --study occupancy.")
@what(
    "--blocks",
    multiple=True,
    type=click.IntRange(min=0),
    help="Of the GEMM's grid, with --study occupancy; 0: one for each tile. May be repeated.",
)
@what("--iterations", type=click.IntRange(min=2), default=6, help="Of a pipeline, with --study occupancy.")
@what("--in-order", is_flag=True, help="GEMMs of a pipeline follow each other, with --study occupancy.")
@choice_option("--dtype", GEMM_DTYPES, "bfloat16", "On GPUs; CPUs take float32.")
@what(
    "--strategy",
    "strategies",
    multiple=True,
    type=click.Choice([strategy.name for strategy in all_strategies()]),
    metavar="NAME",
    show_default="all",
    help="May be repeated. With --machine, of pairs.",
)
@names_option("--variants", "auto", "Of Sidelane's collectives; the best is reported.")
@what(
    "--full-size",
    is_flag=True,
    help="On CPUs: take GEMM and bytes as given. Otherwise every dimension of a GEMM that takes a core longer than "
    "some tens of ms is divided by 2, 4, 8, ..., and the bytes by the same number; the table has the sizes that ran.",
)
@how(
    "--isolated",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    show_default="the user's of this machine, if there is one",
    help="Of `sidelane tune --study c3`: what the partition heuristic goes by.",
)
@what(
    "--results",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    metavar="FILE",
    help="Of `sidelane c3 --json`: what --study heuristics judges instead of measuring, or what is held against "
    "the predictions of --machine.",
)
@what(
    "--timeline",
    type=Written(is_folder=True),
    metavar="DIR",
    help="Write when GEMM and collective ran, for every pair and strategy: a Chrome trace (chrome://tracing, Perfetto) "
    "and a picture; with --report, the page has those of the fastest and the slowest strategy. Measured pairs.",
)
@what(
    "--not-run",
    multiple=True,
    metavar="PAIR=REASON",
    callback=reasons,
    help="Leave a pair out, and write rows that say why. May be repeated. Measured pairs.",
)
@what("--third", is_flag=True, help="Next to a third kernel, too, in each order of launches. Measured pairs.")
@how("--resume", is_flag=True, help="Keep what --json has; measure pairs that lack a strategy there.")
@how("--budget", "budget_s", type=float, metavar="SECONDS", help="Begin no further pair after so much time.")
@count_option("--warmup", 6, "Rounds before the measured.", 0)
@count_option("--repeats", 9, "Measured rounds.")
@machine_option
@choice_option("--version", VERSIONS, "000", "Version of the ConCCL paper (docs/internals/model.md), with --machine.")
@functools.partial(study_options, names_of=NAMES)
def c3(
    pairs: tuple[str, ...],
    gemms: tuple[str, ...],
    sizes: tuple[int, ...],
    machine: str | None,
    version: str,
    study: str,
    results: Path | None,
    **options: Any,
) -> None:
    """Run a GEMM next to a collective, under every strategy.

    PAIRS are written as the paper does: cb1_896M, mb2_3.25G, 4096x4096x4096_64M. --gemm and --bytes give the same, each
    GEMM with each size. Without any: cb1_896M.

    With --machine: predict them for a machine that need not be here; without any, the paper's whole study (with
    --report about a minute, for the plausible ranges). Pairs go with --collective, --strategy, --json and --report, the
    whole study with --version, --json and --report.
    """
    with plain_errors():
        options["strategies"] = tuple(dict.fromkeys(options["strategies"]))
        options["collectives"] = tuple(map(Kind, options["collectives"]))
        workloads = [*pairs, *pairs_of(gemms, sizes)]
        for pair in workloads:
            parse_workload(pair)
        say_rounding(*(pair.rpartition("_")[2] for pair in pairs))
        if workloads:
            options["workloads"] = tuple(workloads)
        predicts = study == PAIRS and machine is not None
        if results is not None and study != HEURISTICS and not predicts:
            raise ValueError("--results goes with --study heuristics, or with --machine")
        if study != OCCUPANCY:
            _refuse(OCCUPANCY, *OF_OCCUPANCY)
            for name in OF_OCCUPANCY:
                options.pop(name)
        if study == HEURISTICS:
            _refuse(PAIRS, "resume")
            from sidelane_lab.studies.c3 import heuristics

            heuristics.main(heuristics.HeuristicsOptions(machine=machine, results=results, **options))
        elif study == OCCUPANCY:
            if machine is not None:
                raise ValueError("--study occupancy measures; sidelane pipeline --machine predicts")
            _refuse(PAIRS, *OF_PAIRS)
            usual = [name for name in (*OF_OCCUPANCY, "collectives", "warmup", "repeats") if not given(name)]
            for name in (*OF_PAIRS, *usual):
                options.pop(name)
            from sidelane_lab.studies.c3 import occupancy

            occupancy.main(occupancy.OccupancyOptions(**options))
        elif machine is not None:
            predict_c3(machine, workloads, version, results, **options)
        elif given("version"):
            raise ValueError("--version chooses between versions of the paper; it needs --machine")
        else:
            from sidelane_lab.studies.c3 import study as c3_study

            c3_study.main(c3_study.C3Options(**options))


def _refuse(study: str, *names: str) -> None:
    """Refuse what belongs to another study.

    Raises:
        ValueError: the caller gave one of these parameters.
    """
    options = {option.name: option.opts[0] for option in click.get_current_context().command.params}
    for name in filter(given, names):
        raise ValueError(f"{options[name]} goes with --study {study}")


def predict_c3(
    machine: str, pairs: list[str], version: str, results: Path | None, *,
    collectives: tuple[Kind, ...], strategies: tuple[str, ...], report: Path | None, json: Path | None, **others: Any,
) -> None:  # fmt: skip
    """Predict, as ``sidelane c3 --machine`` does. Without pairs: the whole study, which has its own collectives.

    Raises:
        ValueError: options that do not go together, or no such machine.
    """
    if results is not None:
        refuse_beside_machine("results", "json", "report")
        from sidelane_lab.studies.c3 import prediction

        prediction.main(machine, results, report, json)
        return
    if pairs:
        refuse_beside_machine("pairs", "gemms", "sizes", "collectives", "strategies", "json", "report")
    else:
        refuse_beside_machine("version", "json", "report")
    from sidelane_lab.papers import predictions

    workloads = [parse_workload(pair, kind) for kind in collectives for pair in pairs]
    predictions.c3_main(predictions.PredictionOptions(machine, report, version, json, strategies), workloads)


def pairs_of(gemms: tuple[str, ...], sizes: tuple[int, ...]) -> list[str]:
    """Return every GEMM with every size, as the paper writes them.

    >>> pairs_of(("cb1", "512,512,2048"), (1024,))
    ['cb1_1K', '512x512x2048_1K']

    Raises:
        ValueError: one of the two is missing, or a GEMM is not one.
    """
    if bool(gemms) != bool(sizes):
        raise ValueError("--gemm and --bytes belong together (one of them is missing)")
    names = [parse_gemm(text.replace(",", "x")).name for text in gemms]
    return [f"{name}_{format_bytes(size)}" for name in names for size in sizes]
