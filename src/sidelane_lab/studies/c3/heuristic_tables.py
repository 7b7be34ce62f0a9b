"""Rows of heuristics as tables: how often each was right and what it lost, and every choice that was not."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from sidelane.cli.table import Line, Table, grouped, notes_of, number, without_empty_columns
from sidelane.sizes import format_bytes
from sidelane_lab.studies.c3.rows import HeuristicRow

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
