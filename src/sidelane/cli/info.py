"""The commands to begin with: ``sidelane info`` and ``demo``."""

from __future__ import annotations

from pathlib import Path

import click

from sidelane.cli.errors import plain_errors
from sidelane.cli.options import DEVICES

DEMO_WORKLOADS = ("cb1_512M", "cb1_896M")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--probe/--no-probe", default=True, help="Ask the driver on every GPU what it can do; takes seconds.")
def info(as_json: bool, probe: bool) -> None:
    """Show what this machine offers and what Sidelane will use."""
    with plain_errors():
        from sidelane.bench import info

        info.main(as_json=as_json, probe=probe)


@click.command()
@click.option("--ranks", type=click.IntRange(min=1), help="Processes. Default: every GPU, or a few on the CPU.")
@click.option("--device", type=click.Choice(DEVICES), default="auto", help="auto: GPUs if there are two or more.")
@click.option("--report", type=click.Path(file_okay=False, path_type=Path), default=Path("report"), show_default=True)
def demo(ranks: int | None, device: str, report: Path) -> None:
    """See in a minute what Sidelane is, and get a report.

    With GPUs: a GEMM next to a collective, measured under every strategy. Without: a program and its proof, every
    collective between CPU processes, and what GPUs give, as predicted and as measured on H200s.
    """
    with plain_errors():
        from sidelane.bench.running.launch import choose_place

        if choose_place(ranks, device).on_cpu:
            from sidelane.bench.demo import show

            show.main(report, ranks)
            return
        from sidelane.bench import info
        from sidelane.bench.c3 import study as c3_study

        info.main(probe=False)
        c3_study.main(c3_study.C3Options(workloads=DEMO_WORKLOADS, ranks=ranks, device=device, report=report))
