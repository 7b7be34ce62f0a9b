"""The pictures of any study, each a PNG and an SVG."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

from sidelane.cli.table import grouped
from sidelane_lab.harness.report.drawing import RC, Picture, where_from
from sidelane_lab.harness.results.files import Results
from sidelane_lab.harness.results.rows.calls import PhaseRow, PowerRow
from sidelane_lab.harness.results.rows.collectives import CollectiveRow
from sidelane_lab.harness.results.rows.operators import FusedRow
from sidelane_lab.harness.results.rows.ordinary import OrdinaryRow
from sidelane_lab.harness.results.rows.pairs import C3Row, HeuristicRow, IsolatedRow, OccupancyRow
from sidelane_lab.harness.results.rows.training import FsdpRow
from sidelane_lab.machines.load import machine_names, named
from sidelane_lab.studies.c3.foretold import compare, speedups
from sidelane_lab.studies.c3.grouped_pictures import draw_groups
from sidelane_lab.studies.c3.heuristic_pictures import draw_heuristics
from sidelane_lab.studies.c3.occupancy_pictures import draw_occupancy
from sidelane_lab.studies.c3.pictures import draw_strategies
from sidelane_lab.studies.collectives.pictures import draw_sizes
from sidelane_lab.studies.collectives.tables import way_to_call
from sidelane_lab.studies.fsdp.pictures import draw_steps
from sidelane_lab.studies.fused.row_pictures import draw_fused
from sidelane_lab.studies.ordinary import tables as ordinary
from sidelane_lab.studies.phases.pictures import draw_phases
from sidelane_lab.studies.power.pictures import draw_power
from sidelane_lab.studies.tune.isolated_pictures import draw_isolated


def draw(results: Results, directory: Path) -> list[Picture]:
    """Draw every picture of a study into ``directory``, as ``name.png`` and ``name.svg``."""
    with mpl.rc_context(RC):
        if results.study == "collectives":
            rows = [row for row in results.rows if isinstance(row, CollectiveRow) and row.time_us]
            ways = grouped(rows, way_to_call)
            return [draw_sizes(way, alike, results, directory) for way, alike in ways]
        if results.study == "occupancy":
            return draw_occupancy([r for r in results.rows if isinstance(r, OccupancyRow)], results, directory)
        if results.study == "heuristics":
            return draw_heuristics([r for r in results.rows if isinstance(r, HeuristicRow)], results, directory)
        if results.study == "isolated":
            return draw_isolated([r for r in results.rows if isinstance(r, IsolatedRow)], results, directory)
        if results.study == "phases":
            return draw_phases([r for r in results.rows if isinstance(r, PhaseRow)], where_from(results), directory)
        if results.study == "power":
            return draw_power([r for r in results.rows if isinstance(r, PowerRow)], where_from(results), directory)
        if results.study == "ordinary":
            timed = [row for row in results.rows if isinstance(row, OrdinaryRow) and row.time_us]
            alone = [row for row in timed if not row.gemm and not ordinary.is_changing(row)]
            return [
                draw_sizes(way, alike, results, directory, line_of=lambda row: row.reach)
                for way, alike in grouped(alone, ordinary.way_to_call)
            ]
        if results.study == "fused":
            return draw_fused([r for r in results.rows if isinstance(r, FusedRow)], where_from(results), directory)
        if results.study == "fsdp":
            return draw_steps([r for r in results.rows if isinstance(r, FsdpRow)], where_from(results), directory)
        pairs = [row for row in results.rows if isinstance(row, C3Row) and row.speedup is not None]
        machine = named(results.machine) if results.machine in machine_names() else None
        predicted = {} if machine is None else speedups(compare(machine, pairs))
        return draw_groups(pairs, predicted, results, directory) + [
            picture
            for collective, alike in grouped(pairs, lambda row: row.collective)
            for picture in draw_strategies(collective, alike, results, directory)
        ]
