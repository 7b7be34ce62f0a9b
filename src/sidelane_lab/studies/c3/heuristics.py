"""``sidelane c3 --study heuristics``: what each heuristic chooses for pairs, against the best of their sweeps.

The pairs are those of a result file of ``sidelane c3``, or they are measured first, or a described machine's; what the
heuristics go by is a file of ``sidelane tune --study c3``, or what that would find on the described machine.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import statistics
from collections.abc import Mapping, Sequence

from sidelane_lab.cli.c3 import C3Options, HeuristicsOptions, PairOptions
from sidelane_lab.harness import provenance
from sidelane_lab.harness.report import Cell, table_of
from sidelane_lab.harness.running import check_targets, publish, require_right
from sidelane_lab.harness.study import FlatRow, Results, Study, read
from sidelane_lab.harness.table import Line, Table, grouped, notes_of
from sidelane_lab.harness.terminal import tables_console
from sidelane_lab.machines.load import find
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.heuristic import KINDS, isolated_of_machine, sweep_of
from sidelane_lab.model.study import TABLE_II, table_ii_workload
from sidelane_lab.pairs.heuristics import KernelDemand
from sidelane_lab.pairs.isolated import isolated_times
from sidelane_lab.pairs.pair import GEMM, SMALL, small_of
from sidelane_lab.pairs.sweep import HeuristicRow, Sweep, Way, judge
from sidelane_lab.pairs.workload import Gemm, parse_workload
from sidelane_lab.studies.c3 import study as c3_study
from sidelane_lab.studies.c3.prediction import workload_of
from sidelane_lab.studies.c3.rows import CONCCL, C3Row, strategy_of

MOST_SHOWN = 20
"""Choices with their reasons in a table."""


def heuristic_tables(rows: Sequence[HeuristicRow]) -> list[Table]:
    """A table of shares, and one of what was lost."""
    tables = [_shares(rows), _choices(rows)]
    return [table for table in tables if table.lines or table.notes]


def share_of(rows: Sequence[HeuristicRow]) -> tuple[int, int, float, float] | None:
    """How many were right, of how many, and percent lost on average and at the worst; None where none was judged."""
    lost = [row.lost_percent for row in rows if row.lost_percent is not None]
    if not lost:
        return None
    return sum(bool(row.right) for row in rows), len(lost), statistics.fmean(lost), max(lost)


CHOICE_COLUMNS: Mapping[str, Cell] = {
    "<heuristic": "heuristic",
    "<GEMM": "gemm",
    "<collective": "collective",
    "bytes": "bytes",
    "<chosen": "chosen",
    "<best": "best",
    "us": "time_us",
    "lost\n%": "lost_percent:.1f",
}


def _shares(rows: Sequence[HeuristicRow]) -> Table:
    lines, notes = [], []
    for name, alike in grouped(rows, lambda row: row.heuristic, ordered=False):
        parts = {"all": alike, "seen": [r for r in alike if r.seen], "unseen": [r for r in alike if not r.seen]}
        for part, mine in parts.items():
            found = share_of(mine)
            if found is not None:
                right, count, mean, worst = found
                figures = (f"{right} of {count}", f"{100 * right / count:.0f}", f"{mean:.1f}", f"{worst:.1f}")
                lines.append(Line((str(name), part, *figures)))
        if share_of(alike) is None:
            notes.append((str(name), alike[0].note))
    columns = ("<heuristic", "<pairs", "right", "right\n%", "lost\n%", "at worst\n%")
    title = "heuristics against the best of the sweep (seen: the GEMM was profiled)"
    return Table(title, columns, tuple(lines), notes_of(notes), keys=2)


def _choices(rows: Sequence[HeuristicRow]) -> Table:
    """Make a table of every choice with its reason; of many those that were not right."""
    judged = [row for row in rows if row.time_us is not None]
    shown = judged if len(judged) <= MOST_SHOWN else [row for row in judged if not row.right]
    title = "choices" if shown is judged else "choices that were not right; the file has the others, with their reasons"
    return table_of(title, shown, CHOICE_COLUMNS, keys=4, value=lambda row: 0.0 if row.right else None)


TILE = 128
"""Rows and columns of a block of a library's GEMM, about; the heuristic compares it with tens of workgroups."""

LIBRARY_WORKGROUPS = {"cpu": 1, "gpu": 32}
"""Workgroups of the library's collective: a thread of Gloo, and NCCL's CTAs at the sizes that hide behind GEMMs."""

NO_THIRD = "the file has no third kernel (sidelane c3 --third measures one, --machine simulates one)"


def main(options: HeuristicsOptions) -> Results | None:
    """Judge the heuristics, and show how they did.

    Returns:
        A row for each heuristic and pair; None on the other ranks under torchrun.

    Raises:
        ValueError: no isolated times of this machine, a file that is another one, or no such machine.
        SidelaneError: outputs of pairs were wrong; heuristics were judged without them.
    """
    check_targets(options)
    machine = None if options.machine is None else find(options.machine)
    results, pairs = _measured(options) if machine is None else (_predicted(options, machine), ())
    if results is not None:
        publish(results, options, None if options.quiet else tables_console(options.json))
    require_right("c3", pairs)
    return results


def _measured(options: HeuristicsOptions) -> tuple[Results | None, Sequence[FlatRow]]:
    """Return how the heuristics did, and the rows of pairs that were judged."""
    if options.results is not None:
        found = read(options.results)
        if found.study != "c3":
            raise ValueError(f"heuristics: results (value={found.study!r}, allowed=a file of sidelane c3)")
        device_type = "cpu" if found.on_cpu else "cuda"
        known = isolated_times(options.isolated, device_type, found.ranks)
    else:
        known = c3_study.isolated_here(options)
    if known is None:
        raise ValueError("heuristics: there are no isolated times to go by (value=none, allowed=--isolated FILE of "
                         "sidelane tune --study c3, or that command first)")  # fmt: skip
    if options.results is None:
        plain = {f.name: getattr(options, f.name) for f in dataclasses.fields(C3Options)}
        if (measured := c3_study.main(C3Options(**{**plain, "json": None, "report": None}))) is None:
            return None, ()
        found = measured
    rows = [row for row in found.rows if isinstance(row, C3Row)]
    workgroups = LIBRARY_WORKGROUPS["cpu" if found.on_cpu else "gpu"]
    judged = [row for sweep in sweeps_of(rows, workgroups) for row in judge(sweep, known)]
    return dataclasses.replace(found, study="heuristics", rows=tuple(judged), command=_command(options)), found.rows


def predict(machine: Machine, options: PairOptions) -> list[HeuristicRow]:
    """Return the rows of a machine that is described; without pairs those of Table II of the ConCCL paper.

    Raises:
        ValueError: a machine of several nodes.
    """
    machine.refuse_nodes("c3 --study heuristics")
    if options.workloads == PairOptions.workloads:
        workloads = [table_ii_workload(name, kind) for name in TABLE_II for kind in KINDS]
    else:
        workloads = [parse_workload(text, kind, options.dtype) for text in options.workloads for kind in KINDS]
    known = isolated_of_machine(machine)
    return [row for workload in workloads for row in judge(sweep_of(machine, workload), known)]


def _predicted(options: HeuristicsOptions, machine: Machine) -> Results:
    rows = predict(machine, options)
    return Results(
        study="heuristics",
        machine=machine.name,
        gpus=machine.gpus,
        device=f"{machine.title.removeprefix(f'{machine.gpus} x ')}, simulated",
        ranks=machine.gpus,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        commit=provenance.commit(),
        command=_command(options),
        software=provenance.software_versions(),
        rows=tuple(rows),
    )


def _command(options: HeuristicsOptions) -> str:
    return options.command or provenance.command_line()


def sweeps_of(rows: Sequence[C3Row], workgroups: int) -> list[Sweep]:
    """The pairs of a study of strategies.

    Args:
        rows: of it; what has no time, or no strategy (``strategy_of``), is left out.
        workgroups: of the library's collective.
    """
    sweeps = []
    for _, alike in grouped(rows, lambda row: row.pair, ordered=False):
        timed = [row for row in alike if row.time_us is not None and strategy_of(row) is not None]
        if not timed or timed[0].gemm_us is None:
            continue
        first = timed[0]
        workload = workload_of(first)
        times: dict[Way, float] = {}
        for row in timed:
            times |= _ways_of(row)
        kernels = KernelDemand(GEMM, _tiles(workload.gemm)), KernelDemand(first.collective, workgroups)
        orders = next((_orders_of(row) for row in alike if row.orders), {})
        others = (kernels[0], KernelDemand(SMALL, _tiles(small_of(workload.gemm))), kernels[1]) if orders else ()
        engines = next((row for row in timed if row.strategy == CONCCL), None)
        sweeps.append(
            Sweep(
                workload,
                timed[0].gemm_us,
                times,
                kernels,
                others,
                orders,
                "" if orders else NO_THIRD,
                alone_us=first.best_comm_us,
                engines_us=None if engines is None else engines.comm_us,
            )
        )
    return sweeps


def _tiles(gemm: Gemm) -> int:
    return math.ceil(gemm.m / TILE) * math.ceil(gemm.n / TILE)


def _orders_of(row: C3Row) -> dict[tuple[str, ...], float]:
    """Times of three kernels by the names in the order of their launches."""
    points = (point.rpartition(" ") for point in row.orders.split(", "))
    return {tuple(names.split(" > ")): float(time_us) for names, _, time_us in points}


def _ways_of(row: C3Row) -> dict[Way, float]:
    """Times of a row by units, of its sweep if it has one."""
    assert row.time_us is not None
    times = {(row.strategy, row.units): row.time_us}
    for point in filter(None, row.sweep.split(", ")):
        units, _, time_us = point.partition(" ")
        times[row.strategy, int(units)] = float(time_us)
    return times


STUDY = Study(
    name="heuristics",
    title="Heuristics against the best of a sweep",
    legend=(
        "launch_order: who of a GEMM and a collective is first, by workgroups; launch_order_3: of three kernels; "
        "partition: units for the collective, by look-up tables; partition_3: units for two collectives; spared: "
        "units that a GEMM beside copy engines does without; auto: the strategy by the rule of overlap. Right: within "
        "half a percent of the best of the sweep. Reasons are in the file."
    ),
    row=HeuristicRow,
    tables=heuristic_tables,
    predict=predict,
    main=main,
)
