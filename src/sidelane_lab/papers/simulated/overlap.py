"""Pipelined iterations of GEMM and collective (overlap paper) on a machine one does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sidelane.c3.workload import parse_gemm
from sidelane.cli.table import Line, Table
from sidelane.cli.terminal import say_written, tables_console
from sidelane_lab.machines.load import find
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.claims_overlap import BLOCKS, NBYTES, PAIRS, measure
from sidelane_lab.model.pipeline import OPT1, OPT2, Pipeline, Tile, blocks_per_unit, run_pipeline
from sidelane_lab.papers.simulated import figures as sim_figures
from sidelane_lab.papers.simulated import overlap_figures
from sidelane_lab.papers.simulated.study import write_numbers
from sidelane_lab.sim import write_chrome_trace

TILES = {"opt1": OPT1, "opt2": OPT2}
DTYPE = "bfloat16"


def main(machine_name: str, report: Path | None = None, json: Path | None = None) -> int:
    """Predict overlap by tile, number of blocks and priority.

    Args:
        machine_name: in the catalogue, or a file.
        report: folder for figures (of the paper's four platforms) and a timeline of this machine.
        json: file for the numbers of this machine, or ``written.STDOUT``.

    Returns:
        0.

    Raises:
        ValueError: no such machine.
    """
    machine = find(machine_name)
    console = tables_console(json)
    for name, tile in TILES.items():
        console.print(blocks_table(machine, name, tile).to_rich())
    if json is not None:
        write_numbers(json, "pipeline_predicted", machine, [row for name in TILES for row in rows(machine, name)])
    if report is not None:
        overlap_figures.draw_overlap(report)
        tag, kind = PAIRS["cb-ar"]
        pipeline = Pipeline(parse_gemm(tag), kind, NBYTES, OPT1, BLOCKS[2], iterations=4)
        for priority in (False, True):
            name = "timeline-pipeline" + ("-priority" if priority else "")
            timeline = run_pipeline(machine, pipeline, priority=priority, record=True).timeline
            write_chrome_trace(report / f"{name}.trace.json", timeline)
            sim_figures.draw_timeline(timeline, f"cb-ar on {machine.title}, {pipeline.blocks} blocks", report, name)
    say_written([path for path in (json, report) if path is not None])
    return 0


def rows(machine: Machine, name: str) -> list[dict[str, Any]]:
    """What is predicted with a tile of ``TILES``: an object for each pair and number of blocks."""
    return [
        {"tile": name, "pair": pair, "blocks": blocks, **measure(machine, pair, blocks, TILES[name])}
        for pair in PAIRS
        for blocks in BLOCKS
    ]


def blocks_table(machine: Machine, name: str, tile: Tile) -> Table:
    """Times over sequential execution, without and with priority, and overlap rates, by pair and blocks."""
    lines = []
    for row in rows(machine, name):
        figures = (
            f"{row['base']:.2f}",
            f"{row['priority']:.2f}",
            f"{row['reduction']:.1f}",
            f"{row['overlap']:.0f}",
        )
        lines.append(Line((row["pair"], str(row["blocks"]), *figures), rule=row["blocks"] == BLOCKS[-1]))
    resident = blocks_per_unit(machine, tile, DTYPE)
    title = f"{machine.title}, tile {name}: predicted"
    note = f"{tile.m}x{tile.n}x{tile.k}: {tile.shared_kb(DTYPE):g} KB, {resident} blocks a unit"
    columns = ("<pair", "blocks", "overlapped /\nsequential", "with\npriority", "saved\n%", "overlap\nrate %")
    return Table(title, columns, tuple(lines), (note,), keys=2)
