"""The command ``sidelane demo``."""

from __future__ import annotations

from pathlib import Path

import click

from sidelane.cli.help import LOOK
from sidelane.cli.output import plain_errors
from sidelane_lab.cli.c3 import C3Options
from sidelane_lab.harness.files import Written
from sidelane_lab.harness.help import GroupedCommand, json_option, output
from sidelane_lab.harness.options import loaded, run
from sidelane_lab.harness.parameters import device_option, ranks_option

DEMO_WORKLOADS = ("cb1_512M", "cb1_896M")


@click.command(
    cls=GroupedCommand,
    heading=LOOK,
    examples=(
        ("sidelane demo", "everything, and a page in the folder report"),
        ("sidelane demo --device cpu --ranks 8", "with eight CPU processes, whatever GPUs there are"),
    ),
)
@ranks_option
@device_option
@json_option
@output(
    "--report",
    type=Written(is_folder=True),
    metavar="FOLDER",
    default=Path("report"),
    help="Write the page with pictures here.",
)
def demo(ranks: int | None, device: str, json: Path | None, report: Path) -> None:
    """See in a minute what Sidelane is, and get a page with pictures.

    With GPUs: a GEMM next to a collective, measured under every strategy. Without: a program and its proof, every
    collective between CPU processes, and what GPUs give, as predicted and as measured on H200s.
    """
    with plain_errors():
        from sidelane_lab.harness.launch import choose_target

        if choose_target(ranks, device).on_cpu:
            loaded("studies.demo").main(report, ranks, json)
            return
        from sidelane.cli import info
        from sidelane_lab.harness.terminal import tables_console

        info.print_findings(info.look(probe=False), tables_console(json))
        run(C3Options(workloads=DEMO_WORKLOADS, ranks=ranks, device=device, json=json, report=report))
