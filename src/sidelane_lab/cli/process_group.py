"""The command ``sidelane pg``: calls of ``torch.distributed``, by the process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sidelane.cli.errors import plain_errors
from sidelane.cli.help import MEASURE, Command, how, what
from sidelane.cli.options import measuring_options, names, size


@click.command(
    cls=Command,
    heading=MEASURE,
    examples=(
        ("sidelane pg --json process-group.json", "four operations, four sizes, and what the first use costs"),
        ("sidelane pg --device cpu --ranks 2", "the same between CPU processes, next to Gloo"),
    ),
)
@what(
    "--operations",
    metavar="NAME,...",
    callback=names,
    default="all_reduce,all_gather_into_tensor,reduce_scatter_tensor,all_to_all_single",
    show_default="all four",
    help="Measure only these.",
)
@what(
    "--bytes",
    "sizes",
    metavar="SIZE",
    multiple=True,
    callback=size,
    show_default="64K, 1M, 16M and 256M on GPUs, 16K and 1M on CPUs",
    help="Gathered bytes of an all-gather, the buffer of the others. May be repeated.",
)
@what(
    "--implementations",
    metavar="NAME,...",
    callback=names,
    default="",
    show_default="both",
    help="Measure only these: nccl (gloo), sidelane.",
)
@what("--first/--no-first", default=True, help="What the first use costs, of FSDP2 too.")
@how("--warmup", type=click.IntRange(min=0), default=2, help="Rounds before the measured.")
@how("--repeats", type=click.IntRange(min=1), default=9, help="Measured rounds.")
@measuring_options
def pg(operations: tuple[str, ...], sizes: tuple[int, ...], json: Path | None, **others: Any) -> None:
    """Measure calls of torch.distributed with NCCL's group (Gloo's) and Sidelane's.

    all_reduce, all_gather_into_tensor, reduce_scatter_tensor and all_to_all_single: eager, asynchronous and in a graph,
    on ordinary tensors, on such that Sidelane learns, and on pooled ones.
    """
    with plain_errors():
        from sidelane_lab.studies.process_group import study as group_study

        group_study.main(group_study.GroupOptions(operations=operations, sizes=sizes, json=json, **others))
