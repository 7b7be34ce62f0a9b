"""The commands that only predict: ``sidelane machines``, ``claims`` and ``pipeline``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from sidelane.cli.errors import plain_errors
from sidelane.cli.options import VERSIONS, prediction_report

DEMO_MACHINE = "mi300x8"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects.")
def machines(as_json: bool) -> None:
    """List the machines that can be predicted."""
    with plain_errors():
        from sidelane.bench import machine_list

        machine_list.main(as_json=as_json)


@click.command()
@click.option("--machine", metavar="NAME_OR_FILE", default=DEMO_MACHINE, help="Default: mi300x8, the papers' machine.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects, and nothing else.")
@click.option(
    "--results",
    type=click.Path(path_type=Path),
    default=Path("results"),
    help="Folder with a folder of measurements for each machine.",
)
@click.option("--version", type=click.Choice(VERSIONS), default="000", show_default=True, help="Of the ConCCL paper.")
@click.option(
    "--report", type=click.Path(file_okay=False, path_type=Path), help="Write claims.json and a picture here."
)
@click.option(
    "--ranges/--no-ranges",
    default=None,
    help="Also predict over the plausible values of the machine's numbers: about a minute instead of two seconds. "
    "Default: with them, except with --json and no --report.",
)
def claims(machine: str, as_json: bool, results: Path, version: str, report: Path | None, ranges: bool | None) -> None:
    """Hold predictions against what papers claim, or, of other machines, against measurements (results/<machine>).

    The exit code is 1 if a claim has no role, or if a number was fitted to a held-out claim. Wrong predictions are
    shown, not punished.
    """
    with plain_errors():
        from sidelane.bench.claims import command as claims

        with_ranges = (not as_json or report is not None) if ranges is None else ranges
        sys.exit(claims.main(claims.Options(machine, as_json, results, version, report, with_ranges)))


@click.command()
@click.option(
    "--machine", required=True, metavar="NAME_OR_FILE", help="Of the catalogue (sidelane machines), or a file."
)
@prediction_report
def pipeline(machine: str, report: Path | None) -> None:
    """Predict pipelined iterations of a GEMM and a collective (overlap paper): tiles, thread blocks, priority."""
    with plain_errors():
        from sidelane.bench.simulated import overlap as sim_overlap

        sys.exit(sim_overlap.main(machine, report))
