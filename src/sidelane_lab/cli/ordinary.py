"""The command ``sidelane ordinary``: collectives on ordinary memory."""

from __future__ import annotations

from typing import Any

import click

from sidelane.cli.errors import plain_errors
from sidelane.cli.help import MEASURE, Command, what
from sidelane.cli.options import count_option, measuring_options, say_rounding, size, size_options, sizes_between
from sidelane.program.collective import Kind

# What the study knows, by the same names.
COLLECTIVES = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
PARTS = ("alone", "beside", "changing")


@click.command(
    cls=Command,
    heading=MEASURE,
    examples=(
        ("sidelane ordinary --json ordinary.json", "all of it, as JSON too"),
        ("sidelane ordinary --part alone --collective all_gather --max-bytes 64M", "one collective by itself"),
        ("sidelane ordinary --part beside --pair 8192x8192x8192_330M", "next to one GEMM"),
        ("sidelane ordinary --part changing --changing-bytes 4M", "tensors that change from call to call"),
    ),
)
@what(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(PARTS),
    default=PARTS,
    show_default="all",
    help="Collectives alone, next to a GEMM (beside), or on tensors that change. May be repeated.",
)
@what(
    "--collective",
    "collectives",
    multiple=True,
    type=click.Choice(COLLECTIVES),
    default=COLLECTIVES,
    show_default="all",
    help="May be repeated. Next to a GEMM run all_gather and all_to_all, on tensors that change the first of these.",
)
@size_options("16M on GPUs, 64K on CPUs", "1G on GPUs, 4M on CPUs")
@what(
    "--pair",
    "pairs",
    multiple=True,
    metavar="PAIR",
    show_default="8192x8192x8192 with 97M, 330M and 1.2G; on CPUs with 97M",
    help="A GEMM and a size, such as cb1_896M. May be repeated. On CPUs all of it is divided, as in sidelane c3.",
)
@what(
    "--changing-bytes",
    "changing",
    metavar="SIZE",
    multiple=True,
    callback=size,
    show_default="1M and 64M on GPUs, 64K on CPUs",
    help="Of collectives on tensors that change. May be repeated.",
)
@count_option("--warmup", 2, "Rounds before the measured.", 0)
@count_option("--repeats", 9, "Measured rounds.")
@measuring_options
def ordinary(
    parts: tuple[str, ...],
    collectives: tuple[str, ...],
    min_bytes: int | None,
    max_bytes: int | None,
    factor: int,
    pairs: tuple[str, ...],
    **others: Any,
) -> None:
    """Measure what collectives cost where the caller's tensors are ordinary memory.

    Sidelane's auto on tensors in symmetric memory, on ordinary ones that peers map (Config.map_memory) and on such that
    are staged, and NCCL (on CPUs Gloo): alone, next to a GEMM, and on tensors that change from call to call.
    """
    with plain_errors():
        say_rounding(*(pair.rpartition("_")[2] for pair in pairs))
        from sidelane.cli.launch import choose_target
        from sidelane_lab.studies.ordinary import study as ordinary_study

        usual = ordinary_study.SIZES[choose_target(others["ranks"], others["device"]).device_type]
        smallest = usual[0] if min_bytes is None else min_bytes
        largest = max(usual[-1], smallest) if max_bytes is None else max_bytes
        ordinary_study.main(
            ordinary_study.OrdinaryOptions(
                parts=tuple(dict.fromkeys(parts)),
                collectives=tuple(map(Kind, dict.fromkeys(collectives))),
                sizes=tuple(sizes_between(smallest, largest, factor)),
                pairs=tuple(dict.fromkeys(pairs)),
                **others,
            )
        )
