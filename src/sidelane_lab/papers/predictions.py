"""``sidelane c3`` and ``sidelane collective`` with ``--machine``: the papers' studies on any described machine."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sidelane.c3.strategies import named, strategies
from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes
from sidelane_lab.cli.c3 import C3Options
from sidelane_lab.cli.collectives import CollectiveOptions
from sidelane_lab.explain.nodes import predict_collectives
from sidelane_lab.harness.study import FlatRow
from sidelane_lab.harness.table import Line, Table, grouped, notes_of
from sidelane_lab.harness.terminal import progress_console, say_written, tables_console
from sidelane_lab.machines.load import find
from sidelane_lab.machines.numbers import predict_study, write_report
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.collectives import PUBLISHED_VARIANTS, dma_run
from sidelane_lab.model.engine_add import engine_add_tables
from sidelane_lab.model.panels import draw_all, draw_timeline
from sidelane_lab.model.strategies import Prediction, library_strategies, objection, predict
from sidelane_lab.model.study import COLLECTIVES, SIZES, TABLE_II, C3Study, c3_study, pair_name
from sidelane_lab.pairs.workload import C3Class, Workload
from sidelane_lab.papers import conccl, dma
from sidelane_lab.sim import Interval, write_chrome_trace

BASELINE = named("serial")
UNDEFINED = "-"
"""Mark in place of a percentage that is not defined."""
TRACED_BYTES = 1 << 20
"""Bytes of the collective whose timelines are written."""


def c3_main(machine_name: str, options: C3Options, version: str, workloads: Sequence[Workload] = ()) -> None:
    """Predict C3 strategies: of the given pairs, or the whole study of the ConCCL paper.

    Args:
        machine_name: name in the catalogue, or a TOML or JSON file.
        options: strategies of pairs, and where to write.
        version: version of the paper where its two versions disagree (``000`` or ``002``).
        workloads: pairs; without any, the whole study.

    Raises:
        ValueError: no such machine, or version; or the whole study on several nodes.
    """
    machine = find(machine_name)
    console, progress = tables_console(options.json), progress_console()
    if workloads:
        numbers, tables = _pairs(machine, workloads, options.strategies)
    else:
        machine.refuse_nodes("c3 without pairs, which is the ConCCL paper's study")
        with progress.status("simulating") as status:
            study = c3_study(machine, version=version, progress=status.update)
        by_kind = [[row for row in study.rows if row.workload.collective is kind] for kind in COLLECTIVES]
        tables = [*(pairs_table(machine, alike, pair_name) for alike in by_kind), averages_table(study)]
        numbers = [_flat(row) for row in study.rows]
    for table in tables:
        console.print(table.to_rich())
    files = write_report(options.json, options.report, "c3_predicted", machine, numbers)
    if options.report is not None and not workloads:
        with progress.status("drawing, over the plausible values of the machine's numbers"):
            draw_all(conccl.figures(version), machine, options.report)
            workload = study.rows[-1].workload
            for strategy in ("c3_base", "c3_sp", "conccl"):
                timeline = predict(machine, workload, strategy, record=True).timeline
                title = f"{workload.name} under {strategy}"
                write_timeline(timeline, title, options.report, f"timeline-{strategy}")
    say_written(files)


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
        predict_study(machine_name, asked, further=engine_add_tables, draw=_draw_collectives)


def _draw_collectives(machine: Machine, rows: Sequence[FlatRow], folder: Path) -> None:
    draw_all(dma.PAPER.figures, machine, folder)
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


def _pairs(
    machine: Machine, workloads: Sequence[Workload], names: Sequence[str]
) -> tuple[list[dict[str, Any]], list[Table]]:
    """Predict pairs under strategies; the rows of a file, and tables."""
    asked = [named(name) for name in names] or strategies()
    reasons = [(strategy.name, objection(strategy, machine)) for strategy in asked]
    unknown = [(name, reason) for name, reason in reasons if reason]
    shown = [strategy for strategy in asked if not objection(strategy, machine)]
    # Serial is in every table: it has the times of both alone.
    under = [BASELINE, *(strategy for strategy in shown if strategy.concurrent)]
    rows = [predict(machine, workload, strategy) for workload in workloads for strategy in under]
    tables = [
        pairs_table(machine, alike, lambda row: row.workload.name.split()[0], notes_of(unknown))
        for _, alike in grouped(rows, lambda row: row.workload.collective, ordered=False)
    ]
    numbers = [_flat(row) for row in rows if row.strategy in {strategy.name for strategy in shown}]
    nothing = dict.fromkeys(("time_us", "other_us", "speedup", "percent_of_ideal", "percent_of_ideal_nccl"))
    numbers += [
        {**_flat(row), **nothing, "strategy": name, "note": reason}
        for row in rows
        if row.strategy == BASELINE.name
        for name, reason in unknown
    ]
    return numbers, tables


def pairs_table(
    machine: Machine,
    rows: Sequence[Prediction],
    name: Callable[[Prediction], str],
    further: Sequence[str] = (),
) -> Table:
    """Make a table of percent of ideal of every strategy, a line for each pair. ``further``: notes."""
    lines, heads = [], []
    for pair, alike in grouped(rows, name, ordered=False):
        first = alike[0]
        times = (f"{first.gemm_us / 1e3:.3g}", f"{first.comm_us / 1e3:.3g}", f"{first.ideal:.2f}")
        concurrent = [row for row in alike if row.strategy != BASELINE.name]
        heads = [row.strategy for row in concurrent]
        percents = [UNDEFINED if row.percent is None else f"{row.percent:.0f}" for row in concurrent]
        given = [f"@{row.units}" if row.units else "" for row in concurrent]
        cells = [percent + units for percent, units in zip(percents, given, strict=True)]
        lines.append(Line((str(pair), str(first.c3_class), *times, *cells)))
    columns = ("<pair", "<class", "GEMM\nms", "lib.\nms", "ideal", *map(_heading, heads))
    title = f"{rows[0].workload.collective} on {machine.title}: percent of ideal, predicted"
    example = next((row for row in rows if row.units and row.percent is not None), None)
    notes = (
        "100: both at once take as long as the longer alone; 0: as long as one after the other, by the faster of the "
        "library's collective and that of copy engines",
        f"{UNDEFINED}: not defined, since there is less than 5% to gain, or more is lost than could be gained",
        *([] if example is None else [_units_note(example)]),
        "class: the longer of the two alone, the GEMM (G) or the collective (C); lib.: the vendor library's collective",
        "strategies: " + "; ".join(f"{head}: {named(head).recipe.replace(';', ',')}" for head in heads),
        *further,
    )
    return Table(title, columns, tuple(lines), notes)


def _units_note(row: Prediction) -> str:
    return f"{row.percent:.0f}@{row.units}: {row.percent:.0f}, with {row.units} compute units for the collective alone"


def _heading(name: str) -> str:
    """Write a strategy in columns narrow enough for a terminal of 80."""
    return name.replace("c3_", "c3\n").replace("l_rp", "l\n_rp").replace("prior", "prior-\n")


def averages_table(study: C3Study) -> Table:
    """Make a table of percent of ideal by group, from mean speedups."""
    lines = []
    for strategy in dict.fromkeys(row.strategy for row in study.rows if row.strategy != BASELINE.name):
        cells = [strategy, f"{statistics.fmean(row.speedup for row in study.select(strategy)):.2f}"]
        cells.append(f"{study.percent(strategy):.0f}")
        cells += [f"{study.percent(strategy, kind):.0f}" for kind in COLLECTIVES]
        cells += [f"{study.percent(strategy, None, c3_class):.0f}" for c3_class in C3Class]
        lines.append(Line(tuple(cells)))
    best = [Line(("c3_best", "", f"{study.best_percent(library_strategies()):.0f}", "", "", "", "", ""))]
    columns = ("<strategy", "mean\nspeedup", "all", *(str(kind) for kind in COLLECTIVES), *(str(c) for c in C3Class))
    note = f"{len(TABLE_II)} pairs with {len(COLLECTIVES)} collectives; predicted"
    return Table("Percent of ideal by group", columns, (*lines, *best), (note,))


def _flat(row: Prediction) -> dict[str, Any]:
    gemm = row.workload.gemm
    return {
        "gemm": gemm.tag or f"{gemm.m},{gemm.n},{gemm.k}",
        "m": gemm.m,
        "n": gemm.n,
        "k": gemm.k,
        "collective": str(row.workload.collective),
        "bytes": row.workload.nbytes,
        "class": str(row.c3_class),
        "strategy": row.strategy,
        "units": row.units,
        "gemm_us": row.gemm_us,
        "comm_us": row.comm_us,
        "time_us": row.time_us,
        "other_us": row.other_us,
        "speedup": row.speedup,
        "ideal": row.ideal,
        "best_comm_us": row.best_comm_us,
        "percent_of_ideal": row.percent,
        "percent_of_ideal_nccl": row.percent_of_library,
        "note": "",
    }
