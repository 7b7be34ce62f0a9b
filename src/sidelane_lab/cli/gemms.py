"""The command ``sidelane gemms``: GEMMs of language models, alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sidelane.cli.errors import plain_errors
from sidelane.cli.help import MEASURE, Command, how, what
from sidelane.cli.options import measuring_options, names


@click.command(
    cls=Command,
    heading=MEASURE,
    examples=(
        ("sidelane gemms --json gemms.json", "the layers of eight models, on one GPU"),
        ("sidelane gemms --device cpu --models llama-8b", "those of one model, divided to suit a CPU core"),
    ),
)
@what("--models", metavar="NAME,...", callback=names, default="", show_default="all", help="Whose layers.")
@how("--warmup", type=click.IntRange(min=0), default=2, help="Samples before the measured.")
@how("--repeats", type=click.IntRange(min=1), default=9, help="Measured samples.")
@measuring_options
def gemms(json: Path | None, **others: Any) -> None:
    """Time the GEMMs of language models alone, which predictions are held against.

    `sidelane claims --machine` compares them with what the machine's description predicts.
    """
    with plain_errors():
        from sidelane_lab.studies import gemms as gemm_study

        gemm_study.main(gemm_study.GemmOptions(json=json, **others))
