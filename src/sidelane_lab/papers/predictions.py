"""``sidelane c3`` and ``sidelane collective`` with ``--machine``: the papers' studies on any described machine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

from sidelane.c3.strategies import named
from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes
from sidelane_lab.cli.c3 import C3Options
from sidelane_lab.explain.nodes import predict_collectives
from sidelane_lab.harness.study import FlatRow, study_of
from sidelane_lab.harness.table import Line, Table, grouped, notes_of
from sidelane_lab.machines.load import find
from sidelane_lab.machines.numbers import draw_rows, predict_study
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.collectives import PUBLISHED_VARIANTS, dma_run
from sidelane_lab.model.engine_add import engine_add_tables
from sidelane_lab.model.panels import draw_timeline
from sidelane_lab.model.strategies import library_strategies, predict
from sidelane_lab.model.study import COLLECTIVES, SIZES, TABLE_II, table_ii_workload
from sidelane_lab.pairs.workload import C3Class, ideal_speedup
from sidelane_lab.papers.measurements import PairReadings, pair_name
from sidelane_lab.papers.rows import in_file
from sidelane_lab.sim import Interval, write_chrome_trace
from sidelane_lab.studies.c3.prediction import SERIAL
from sidelane_lab.studies.c3.rows import C3Row, name_of
from sidelane_lab.studies.collectives import CollectiveOptions, CollectiveRow

UNDEFINED = "-"
"""Mark in place of a percentage that is not defined."""
TRACED_BYTES = 1 << 20
"""Bytes of the collective whose timelines are written."""


def c3_main(machine_name: str, options: C3Options) -> None:
    """Predict C3 strategies: of the pairs that are given, or the whole study of the ConCCL paper.

    Raises:
        ValueError: no such machine, or version; or the whole study on several nodes.
    """
    predict_study(machine_name, options, tables=pair_tables, draw=functools.partial(_draw_pairs, options))


def _draw_pairs(options: C3Options, machine: Machine, rows: Sequence[C3Row], folder: Path) -> None:
    draw_rows(options.study, machine, rows, folder)
    if options.workloads != tuple(TABLE_II):
        return
    workload = table_ii_workload(options.workloads[-1], COLLECTIVES[-1])
    for strategy in ("c3_base", "c3_sp", "conccl"):
        timeline = predict(machine, workload, strategy, record=True).timeline
        write_timeline(timeline, f"{workload.name} under {named(strategy).name}", folder, f"timeline-{strategy}")


def collective_main(machine_name: str, options: CollectiveOptions) -> None:
    """Predict the variants of the DMA collectives paper and the vendor library's collectives by size.

    Of several nodes: what a process group runs there, and the library's rings.

    Raises:
        ValueError: no such machine.
    """
    machine = find(machine_name)
    if machine.nodes > 1:
        predict_collectives(machine, options.report, options.json)
    else:
        asked = dataclasses.replace(options, sizes=SIZES)
        predict_study(machine_name, asked, tables=_collective_tables, draw=_draw_collectives)


def _collective_tables(machine: Machine, rows: Sequence[CollectiveRow]) -> list[Table]:
    return [*study_of("collectives").tables(rows), *engine_add_tables(machine)]


def _draw_collectives(machine: Machine, rows: Sequence[FlatRow], folder: Path) -> None:
    draw_rows("collectives", machine, rows, folder)
    for variant in PUBLISHED_VARIANTS[Kind.ALL_GATHER]:
        timeline = dma_run(machine, Kind.ALL_GATHER, TRACED_BYTES, variant, record=True).timeline
        ends = ("host", "rank 0", f"rank {machine.gpus - 1}")
        shown = [i for i in timeline if i.group in ends or i.lane.startswith("link 0 ")]
        words = f"all_gather of {format_bytes(TRACED_BYTES)}, {variant}"
        title = f"{words}: host, first and last rank, links of the first"
        write_timeline(timeline, title, folder, f"timeline-all_gather-{variant}", shown)


def write_timeline(
    timeline: Sequence[Interval], title: str, folder: Path, name: str, shown: Sequence[Interval] | None = None
) -> None:
    """Write a timeline as a trace, and draw it. ``shown``: what is drawn of it; None: all."""
    write_chrome_trace(folder / f"{name}.trace.json", timeline)
    draw_timeline(timeline if shown is None else shown, title, folder, name)


def pair_tables(machine: Machine, rows: Sequence[C3Row]) -> list[Table]:
    """Make a table of percent of ideal for each collective; of the ConCCL paper's pairs, one of averages as well."""
    tables = [_pairs_table(machine, alike) for _, alike in grouped(rows, lambda row: row.collective, ordered=False)]
    pairs = PairReadings.of(in_file(machine, "c3", rows))
    return [*tables, averages_table(pairs)] if len(pairs.rows) == len(TABLE_II) * len(COLLECTIVES) else tables


def _pairs_table(machine: Machine, rows: Sequence[C3Row]) -> Table:
    """Make a table of percent of ideal of every strategy, a line for each pair of a collective."""
    lines, heads = [], []
    timed = [row for row in rows if row.time_us is not None]
    for _, (serial, *concurrent) in grouped(timed, lambda row: row.pair, ordered=False):
        gemm_us, comm_us = serial.gemm_us or 0.0, serial.comm_us or 0.0
        times = (f"{gemm_us / 1e3:.3g}", f"{comm_us / 1e3:.3g}", f"{ideal_speedup(gemm_us, comm_us):.2f}")
        heads = [name_of(row) for row in concurrent]
        percents = [UNDEFINED if row.percent_of_ideal is None else f"{row.percent_of_ideal:.0f}" for row in concurrent]
        given = [f"@{row.units}" if row.units else "" for row in concurrent]
        cells = [percent + units for percent, units in zip(percents, given, strict=True)]
        name = pair_name((serial.gemm, serial.bytes, serial.collective))
        lines.append(Line((name, serial.c3_class, *times, *cells)))
    columns = ("<pair", "<class", "GEMM\nms", "lib.\nms", "ideal", *map(_heading, heads))
    title = f"{rows[0].collective} on {machine.title}: percent of ideal, predicted"
    example = next((row for row in timed if row.units and row.percent_of_ideal is not None), None)
    notes = (
        "100: both at once take as long as the longer alone; 0: as long as one after the other, by the faster of the "
        "library's collective and that of copy engines",
        f"{UNDEFINED}: not meaningful (less than 5% to gain, or a net loss)",
        *([] if example is None else [_units_note(example)]),
        "class: the longer of the two alone, the GEMM (G) or the collective (C); lib.: the vendor library's collective",
        "strategies: " + "; ".join(f"{head}: {named(head).recipe.replace(';', ',')}" for head in heads),
        *notes_of(list(dict.fromkeys((name_of(row), row.note) for row in rows if row.time_us is None))),
    )
    return Table(title, columns, tuple(lines), notes)


def _units_note(row: C3Row) -> str:
    percent = f"{row.percent_of_ideal:.0f}"
    return f"{percent}@{row.units}: {percent}, with {row.units} compute units for the collective alone"


def _heading(name: str) -> str:
    """Write a strategy in columns narrow enough for a terminal of 80."""
    return name.replace("_", "_\n")


def averages_table(pairs: PairReadings) -> Table:
    """Make a table of percent of ideal by group, from mean speedups."""
    lines = []
    for strategy in [name for name in next(iter(pairs.rows.values())) if name != SERIAL]:
        cells = [named(strategy).name, f"{pairs.mean_speedup(strategy):.2f}", f"{pairs.percent(strategy):.0f}"]
        cells += [f"{pairs.percent(strategy, kind):.0f}" for kind in COLLECTIVES]
        cells += [f"{pairs.percent(strategy, None, c3_class):.0f}" for c3_class in C3Class]
        lines.append(Line(tuple(cells)))
    best = [Line(("best of the library's", "", f"{pairs.best_percent(library_strategies()):.0f}", "", "", "", "", ""))]
    columns = ("<strategy", "mean\nspeedup", "all", *(str(kind) for kind in COLLECTIVES), *(str(c) for c in C3Class))
    note = f"{len(TABLE_II)} pairs with {len(COLLECTIVES)} collectives; predicted"
    return Table("Percent of ideal by group", columns, (*lines, *best), (note,))
