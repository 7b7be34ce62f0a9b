"""The command ``sidelane fsdp``: training steps with FSDP2, by who communicates."""

from __future__ import annotations

from typing import Any

import click

from sidelane.cli.errors import plain_errors
from sidelane.cli.help import MEASURE, Command, how, what
from sidelane.cli.options import count_option, measuring_options, names, names_option


@click.command(
    cls=Command,
    heading=MEASURE,
    examples=(
        ("sidelane fsdp --json fsdp.json", "five cases, every implementation; with --report a page and a picture"),
        ("sidelane fsdp --cases 8b:1x4096 --profile", "one case, and where its time goes"),
        ("sidelane fsdp --cases 70b:1x2048 --layers 8 --optimizer", "more layers, and steps that end with AdamW's"),
        ("sidelane fsdp --device cpu --ranks 2", "the same between CPU processes, with small layers"),
    ),
)
@what(
    "--cases",
    metavar="CASE,...",
    callback=names,
    default="8b:2x4096,8b:1x4096,8b:1x8192,70b:1x2048,70b:1x4096",
    help="Model, and sequences x tokens of a rank.",
)
@what("--layers", type=click.IntRange(min=1), default=None, show_default="10 of 8b, 4 of 70b", help="Of each model.")
@names_option(
    "--implementations",
    "",
    "Measure only these, next to nccl (gloo): nccl_ce, sidelane_ag, sidelane, sidelane_copies, compute_only, "
    "compute_only_straight.",
    "all that this machine has",
)
@how(
    "--reduce-dtype",
    type=click.Choice(("bfloat16", "float32")),
    default="bfloat16",
    help="In which gradients are added.",
)
@how("--optimizer", is_flag=True, help="Steps end with the optimizer's.")
@how("--profile", is_flag=True, help="Look into one step of each; what is timed later is slower: best with one case.")
@count_option("--warmup", 1, "Rounds before the measured, behind two compared steps.", 0)
@count_option("--repeats", 7, "Rounds that are measured.")
@measuring_options
def fsdp(**options: Any) -> None:
    """Measure a training step with FSDP2, by who makes its collectives.

    Loss and gradients are compared with those of NCCL (on CPUs Gloo) before any time is shown.
    """
    with plain_errors():
        from sidelane_lab.studies.fsdp import study as fsdp_study

        fsdp_study.main(fsdp_study.FsdpOptions(**options))
