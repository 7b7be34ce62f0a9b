"""Figures 13 and 14 of the fused operators paper for any machine: time by occupancy, and by how much ranks differ.

A rank's time is from the launch until it has everything. With the same work everywhere, what its peers wait for first
makes all ranks end together; in the order of ranks, the first one's results come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from sidelane.cli.table import Line, Table, number
from sidelane_lab.harness.drawing import RC, file_name, save
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.operators import Embedding, FusedOperator, FusedTimes, Gemv, predict_fused
from sidelane_lab.papers.simulated.bands import Curves, bands
from sidelane_lab.papers.simulated.curves import BANDS, COLOURS, curve
from sidelane_lab.studies.fused.pictures import draw_skew, skew_percent

OCCUPANCIES = (0.25, 0.5, 0.75, 0.875, 1.0)
NUMBERS = ("fused", "links", "gpu")
"""Of a description, that kernels reading memory depend on most."""

Orders = dict[str, FusedTimes]
"""Times of an operator by order of its work."""


def skew_table(machine: Machine, found: Sequence[tuple[FusedOperator, Orders]]) -> Table:
    """The fastest and the slowest rank of each operator in both orders."""
    lines = []
    for operator, orders in found:
        cells = [operator.name, str(operator)]
        for times in orders.values():
            ended = times.fused.ended_us
            cells += [f"{number(min(ended))} .. {number(max(ended))}", f"{skew_percent([ended]):.1f}"]
        lines.append(Line(tuple(cells)))
    names = list(found[0][1]) if found else []
    columns = ["<operator", "<shape", *(word for name in names for word in (f"{name}\nranks, us", "skew\n%"))]
    notes = ("skew: the slowest rank over the fastest, percent (the fused operators paper, Figure 14)",)
    return Table(f"Ranks of fused operators on {machine.title}: predicted", tuple(columns), tuple(lines), notes, keys=2)


def occupancy_table(machine: Machine, found: Sequence[FusedOperator], starts_us: Sequence[float] = ()) -> Table | None:
    """Times of kernels that read memory, by occupancy; None without one."""
    lines = []
    for operator in found:
        times = times_by_occupancy(machine, operator, starts_us)
        lines.append(Line((operator.name, str(operator), *(number(time) for time in times))))
    if not lines:
        return None
    columns = ("<operator", "<shape", *(f"{share:.1%}\nus" for share in OCCUPANCIES))
    notes = ("occupancy: of the threads that the GPU holds (the fused operators paper, Figure 13)",)
    title = f"Fused operators on {machine.title} by occupancy: predicted"
    return Table(title, columns, tuple(lines), notes, keys=2)


def times_by_occupancy(machine: Machine, operator: FusedOperator, starts_us: Sequence[float] = ()) -> list[float]:
    """Of the fused kernel."""
    return [
        predict_fused(machine, operator, occupancy=share, starts_us=starts_us).fused.time_us for share in OCCUPANCIES
    ]


def reads_memory(operator: FusedOperator) -> bool:
    """True if how many workgroups are resident decides how fast it reads."""
    return isinstance(operator, Embedding | Gemv)


def draw_ranks(found: Sequence[tuple[FusedOperator, Orders]], machine: Machine, folder: Path) -> None:
    """A picture of the ranks' times for each operator."""
    for operator, orders in found:
        calls = {order: [times.fused.ended_us] for order, times in orders.items()}
        title = f"{operator.name}, {operator}, {machine.title}: predicted"
        draw_skew(calls, title, folder, file_name(f"{operator.name} skew"))


def draw_occupancy(machine: Machine, found: Sequence[FusedOperator], folder: Path) -> None:
    """Times over the one at 75%, by occupancy, with bands over the plausible values of the machine's numbers."""

    def over_most(changed: Machine) -> Curves[int]:
        times = [times_by_occupancy(changed, operator) for operator in found]
        return {place: [t / mine[OCCUPANCIES.index(0.75)] for t in mine] for place, mine in enumerate(times)}

    around = bands(machine, over_most, NUMBERS)
    with mpl.rc_context(RC):
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        axes = figure.subplots()
        for place, operator in enumerate(found):
            curve(axes, OCCUPANCIES, around[place], operator.name, COLOURS[place % len(COLOURS)], place)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(f"occupancy ({BANDS})")
        axes.set_ylabel("time over that at 75%")
        axes.set_title(f"Fused operators on {machine.title}: predicted")
        axes.legend(fontsize=7)
        save(figure, "fused-occupancy", "", "", folder)
