"""Rows of the study of heuristics as tables and as pictures."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from sidelane.cli.table import Line, Table, grouped, notes_of, number, without_empty_columns
from sidelane.sizes import format_bytes
from sidelane_lab.harness.drawing import BLACK, BLUE, ORANGE, save
from sidelane_lab.harness.rows import FlatRow
from sidelane_lab.harness.study import Picture, Results


@dataclasses.dataclass(frozen=True, slots=True)
class HeuristicRow(FlatRow):
    """What a heuristic chose for a pair, against the best of a sweep.

    Attributes:
        heuristic: ``launch_order``: who is first, by workgroups; ``launch_order_3``: of three kernels; ``partition``:
            units for the collective, by look-up tables; ``spared``: units that a GEMM beside copy engines does
            without; ``auto``: the strategy.
        gemm, bytes: as in :class:`C3Row`.
        seen: the GEMM is one that was profiled.
        chosen: by the heuristic, in words.
        best: of the sweep.
        time_us: under what was chosen.
        best_us: under what was best.
        lost_percent: by the choice.
        right: nothing is lost, but for half a percent.
        note: the reason that the heuristic gave, or why nothing could be judged.
    """

    figures = ("time_us",)

    heuristic: str
    gemm: str
    m: int
    n: int
    k: int
    dtype: str
    collective: str
    bytes: int
    seen: bool
    chosen: str
    best: str
    time_us: float | None
    best_us: float | None
    lost_percent: float | None
    right: bool | None
    note: str


MOST_SHOWN = 20
"""Of choices with their reasons in a table."""


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
    """Every choice with its reason; of many those that were not right."""
    lines, notes = [], []
    judged = [row for row in rows if row.time_us is not None]
    shown = judged if len(judged) <= MOST_SHOWN else [row for row in judged if not row.right]
    for row in shown:
        pair = (row.gemm, row.collective, format_bytes(row.bytes))
        lost = "" if row.lost_percent is None else f"{row.lost_percent:.1f}"
        cells = (row.heuristic, *pair, row.chosen, row.best, number(row.time_us), lost)
        lines.append(Line(cells, best=bool(row.right)))
        notes.append((f"{row.heuristic} {' '.join(pair)}", row.note))
    columns = ("<heuristic", "<GEMM", "<collective", "bytes", "<chosen", "<best", "us", "lost\n%")
    title = "choices" if shown is judged else "choices that were not right; the file has the others, with their reasons"
    return without_empty_columns(Table(title, columns, tuple(lines), notes_of(notes), keys=4))


def draw_heuristics(rows: Sequence[HeuristicRow], results: Results, directory: Path) -> list[Picture]:
    """One picture, a panel for each heuristic: percent lost, greatest first; none where nothing was judged."""
    judged = [row for row in rows if row.lost_percent is not None]
    by_name = grouped(judged, lambda row: row.heuristic, ordered=False)
    if not by_name:
        return []
    figure = Figure(figsize=(2.6 * len(by_name) + 0.6, 3.2), layout="constrained")
    panels = figure.subplots(1, len(by_name), squeeze=False, sharey=True)[0]
    for panel, (name, alike) in zip(panels, by_name, strict=True):
        found = share_of(alike)
        assert found is not None
        right, count, mean, _ = found
        ranked = sorted(alike, key=lambda row: -(row.lost_percent or 0.0))
        colours = [BLUE if row.seen else ORANGE for row in ranked]
        panel.bar(range(len(ranked)), [row.lost_percent or 0.0 for row in ranked], color=colours, width=0.8)
        panel.set_title(f"{name}\n{right} of {count} right, {mean:.1f}% lost", fontsize=9)
        panel.set_xlabel("pairs")
        panel.set_xticks([])
        panel.axhline(0.0, color=BLACK, linewidth=0.7)
    panels[0].set_ylabel("lost to the best of the sweep, %")
    for colour, label in ((BLUE, "GEMM was profiled"), (ORANGE, "was not")):
        panels[-1].bar([0], [0], color=colour, label=label)
    panels[-1].legend(fontsize=7, frameon=False)
    title = f"Heuristics: {results.where}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    text = "Percent that each heuristic's choice takes longer than the best of the sweep, by pair."
    return [save(figure, "heuristics", title, text, directory)]
