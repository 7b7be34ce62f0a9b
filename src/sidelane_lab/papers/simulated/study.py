"""``sidelane c3 --machine`` and ``sidelane collective --machine``: the papers' studies on a machine one does not
have.
"""

from __future__ import annotations

import dataclasses
import datetime
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sidelane.c3.strategies import named, strategies
from sidelane.c3.workload import C3Class, Workload
from sidelane.cli import provenance
from sidelane.cli.output import write_json
from sidelane.cli.table import Line, Table, grouped, notes_of
from sidelane.cli.terminal import progress_console, say_written, tables_console
from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes
from sidelane_lab.machines.load import find
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.published import PUBLISHED_VARIANTS, dma_run
from sidelane_lab.model.strategies import Prediction, library_strategies, objection, predict
from sidelane_lab.model.study import COLLECTIVES, SIZES, TABLE_II, C3Study, DmaStudy, c3_study, dma_study, pair_name
from sidelane_lab.papers.simulated import dma_figures
from sidelane_lab.papers.simulated import figures as sim_figures
from sidelane_lab.sim import write_chrome_trace

BASELINE = named("serial")
UNDEFINED = "-"
"""In place of a percentage that is not defined."""
TRACED_BYTES = 1 << 20
"""Size of the collective whose timelines are written."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What both commands take.

    Attributes:
        machine: name in the catalogue, or a TOML or JSON file.
        report: folder for figures, timelines and the numbers; None: none.
        json: file for the numbers, or ``written.STDOUT``; None: none.
        version: of the ConCCL paper where its two versions disagree (``000`` or ``002``); c3 only.
        strategies: names, for pairs; empty takes all.
    """

    machine: str
    report: Path | None = None
    version: str = "000"
    json: Path | None = None
    strategies: tuple[str, ...] = ()

    @property
    def files(self) -> list[Path]:
        """What is written as JSON, and where the report is."""
        return [path for path in (self.json, self.report) if path is not None]


def c3_main(options: Options, workloads: Sequence[Workload] = ()) -> int:
    """Predict C3 strategies: of the given pairs, or the whole study of the ConCCL paper.

    Returns:
        0.

    Raises:
        ValueError: no such machine, or version.
    """
    machine = find(options.machine)
    console, progress = tables_console(options.json), progress_console()
    if workloads:
        asked = [named(name) for name in options.strategies] or strategies()
        shown = [strategy for strategy in asked if not objection(strategy, machine)]
        # Serial is in every table: it has the times of both alone.
        under = [BASELINE, *(strategy for strategy in shown if strategy.concurrent)]
        rows = [predict(machine, workload, strategy) for workload in workloads for strategy in under]
        reasons = [(strategy.name, objection(strategy, machine)) for strategy in asked]
        unknown = [(name, reason) for name, reason in reasons if reason]
        for _, alike in grouped(rows, lambda row: row.workload.collective, ordered=False):
            table = pairs_table(machine, alike, lambda row: row.workload.name.split()[0], notes_of(unknown))
            console.print(table.to_rich())
        numbers = [_flat(row) for row in rows if row.strategy in {strategy.name for strategy in shown}]
        numbers += [_without(row, *why) for row in rows if row.strategy == BASELINE.name for why in unknown]
        for path in (options.json, options.report and options.report / "c3_predicted.json"):
            if path is not None:
                write_numbers(path, "c3_predicted", machine, numbers)
        say_written(options.files)
        return 0
    with progress.status("simulating") as status:
        study = c3_study(machine, version=options.version, progress=status.update)
    for kind in COLLECTIVES:
        alike = [row for row in study.rows if row.workload.collective is kind]
        console.print(pairs_table(machine, alike, pair_name).to_rich())
    console.print(averages_table(study).to_rich())
    if options.json is not None:
        write_numbers(options.json, "c3_predicted", machine, [_flat(row) for row in study.rows])
    if options.report is not None:
        with progress.status("drawing, over the plausible values of the machine's numbers"):
            _report_c3(study, machine, options.report)
    say_written(options.files)
    return 0


def collective_main(options: Options) -> int:
    """Predict the variants of the DMA collectives paper and the vendor library's collectives by size.

    Returns:
        0.

    Raises:
        ValueError: no such machine.
    """
    machine = find(options.machine)
    console = tables_console(options.json)
    study = dma_study(machine)
    for kind in COLLECTIVES:
        console.print(sizes_table(study, machine, kind).to_rich())
    if options.json is not None:
        write_numbers(options.json, "collectives_predicted", machine, dma_rows(study))
    if options.report is not None:
        with progress_console().status("drawing, over the plausible values of the machine's numbers"):
            _report_dma(study, machine, options.report)
    say_written(options.files)
    return 0


def _report_c3(study: C3Study, machine: Machine, folder: Path) -> None:
    write_numbers(folder / "c3_predicted.json", "c3_predicted", machine, [_flat(row) for row in study.rows])
    sim_figures.draw_c3(study, machine, folder, ranges=True)
    workload = study.rows[-1].workload
    for strategy in ("c3_base", "c3_sp", "conccl"):
        timeline = predict(machine, workload, strategy, record=True).timeline
        name = f"timeline-{strategy}"
        write_chrome_trace(folder / f"{name}.trace.json", timeline)
        sim_figures.draw_timeline(timeline, f"{workload.name} under {strategy}", folder, name)


def dma_rows(study: DmaStudy) -> list[dict[str, Any]]:
    """What was predicted, an object for each time."""
    rows: list[dict[str, Any]] = [
        {"collective": str(kind), "variant": variant, "prelaunch": prelaunched, "bytes": nbytes, "time_us": us}
        for (kind, variant, prelaunched, nbytes), us in study.dma_us.items()
    ]
    rows += [
        {"collective": str(kind), "variant": "library", "prelaunch": False, "bytes": nbytes, "time_us": us}
        for (kind, nbytes), us in study.library_us.items()
    ]
    return rows


def _report_dma(study: DmaStudy, machine: Machine, folder: Path) -> None:
    write_numbers(folder / "collectives_predicted.json", "collectives_predicted", machine, dma_rows(study))
    dma_figures.draw_dma(study, machine, folder)
    for variant in PUBLISHED_VARIANTS[Kind.ALL_GATHER]:
        timeline = dma_run(machine, Kind.ALL_GATHER, TRACED_BYTES, variant, record=True).timeline
        name = f"timeline-all_gather-{variant}"
        write_chrome_trace(folder / f"{name}.trace.json", timeline)
        ends = ("host", "rank 0", f"rank {machine.gpus - 1}")
        shown = [i for i in timeline if i.group in ends or i.lane.startswith("link 0 ")]
        title = f"all_gather of {format_bytes(TRACED_BYTES)}, {variant}: host, first and last rank, links of the first"
        sim_figures.draw_timeline(shown, title, folder, name)


def pairs_table(
    machine: Machine,
    rows: Sequence[Prediction],
    name: Callable[[Prediction], str],
    further: Sequence[str] = (),
) -> Table:
    """Percent of ideal of every strategy, a line for each pair. ``further``: notes."""
    lines = []
    pairs: dict[str, list[Prediction]] = {}
    for row in rows:
        pairs.setdefault(name(row), []).append(row)
    for pair, alike in pairs.items():
        first = alike[0]
        cells = [
            pair,
            str(first.c3_class),
            f"{first.gemm_us / 1e3:.3g}",
            f"{first.comm_us / 1e3:.3g}",
            f"{first.ideal:.2f}",
        ]
        concurrent = [row for row in alike if row.strategy != BASELINE.name]
        cells += [_percent(row) + (f"@{row.units}" if row.units else "") for row in concurrent]
        lines.append(Line(tuple(cells)))
    columns_of = [row.strategy for row in next(iter(pairs.values())) if row.strategy != BASELINE.name]
    columns = ("<pair", "<class", "GEMM\nms", "lib.\nms", "ideal", *map(_heading, columns_of))
    title = f"{rows[0].workload.collective} on {machine.title}: percent of ideal, predicted (@: compute units given)"
    notes = (
        "100: both at once in the time of the longer, with the faster of the library's collective and that of engines",
        f"{UNDEFINED}: not defined, since there is less than 5% to gain, or more is lost than could be gained",
        *further,
    )
    return Table(title, columns, tuple(lines), notes)


def _heading(name: str) -> str:
    """A strategy in columns narrow enough for a terminal of 80."""
    return name.replace("c3_", "c3\n").replace("l_rp", "l\n_rp").replace("prior", "prior-\n")


def _percent(row: Prediction) -> str:
    return UNDEFINED if row.percent is None else f"{row.percent:.0f}"


def averages_table(study: C3Study) -> Table:
    """Percent of ideal by group, from mean speedups."""
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


def sizes_table(study: DmaStudy, machine: Machine, kind: Kind) -> Table:
    """Time by size for the library and every variant; the fastest is starred."""
    variants = [(variant, prelaunched) for variant in PUBLISHED_VARIANTS[kind] for prelaunched in (False, True)]
    lines = []
    for nbytes in SIZES:
        times = [study.library_us[kind, nbytes], *(study.dma_us[kind, v, p, nbytes] for v, p in variants)]
        cells = [f"{us:.1f}" + ("*" if us == min(times) else " ") for us in times]
        variant, prelaunched = study.best(kind, nbytes)
        lines.append(Line((format_bytes(nbytes), *cells, variant + ("+prelaunch" if prelaunched else ""))))
    names = [variant + ("\n+pre-\nlaunch" if prelaunched else "") for variant, prelaunched in variants]
    title = f"{kind} on {machine.title}: time in us, predicted (* fastest)"
    return Table(title, ("bytes", "library", *names, "<DMA to take"), tuple(lines))


def write_numbers(
    path: Path, study: str, machine: Machine, rows: Sequence[dict[str, Any]], others: Sequence[Machine] = ()
) -> Path:
    """Write predictions with what they were made from, to a file or to stdout (``written.STDOUT``).

    ``others``: machines that some rows are about instead.
    """
    numbers = machine.quantities()
    numbers |= {f"{other.name} {name}": quantity for other in others for name, quantity in other.quantities().items()}
    content = {
        "study": study,
        "machine": machine.name,
        "predicted": True,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": provenance.commit(),
        "command": provenance.command_line(),
        "numbers": {name: [float(q), str(q.source), q.of] for name, q in numbers.items()},
        "rows": list(rows),
    }
    return write_json(path, content)


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


def _without(row: Prediction, strategy: str, reason: str) -> dict[str, Any]:
    """The pair of a row under a strategy that the model does not speak to."""
    nothing = dict.fromkeys(("time_us", "other_us", "speedup", "percent_of_ideal", "percent_of_ideal_nccl"))
    return {**_flat(row), **nothing, "strategy": strategy, "note": reason}
