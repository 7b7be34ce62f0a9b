"""Rows of the study of fused operators as pictures: Figures 13 and 14 of the fused operators paper for this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from sidelane.cli.table import grouped
from sidelane_lab.harness.drawing import BLUE, ORANGE, save
from sidelane_lab.harness.study import Picture
from sidelane_lab.studies.fused.kept import BY_PROGRAMS
from sidelane_lab.studies.fused.rows import FusedRow

ORDERS = {"remote_first": BLUE, "oblivious": ORANGE}


def draw_fused(rows: Sequence[FusedRow], where: str, folder: Path) -> list[Picture]:
    """Time by programs on a unit, and both orders next to each other: time, and how far ranks end apart.

    Graphs where there are some, whose host has no part in the times; else eager calls.
    """
    launch = "graph" if any(row.launch == "graph" for row in rows) else "eager"
    good = [row for row in rows if row.implementation == "fused" and row.launch == launch and row.time_us]
    return [*_by_programs(good, f"{where}, {launch}", folder), *_by_order(good, f"{where}, {launch}", folder)]


def _by_programs(rows: Sequence[FusedRow], where: str, folder: Path) -> list[Picture]:
    lines = []
    for (op, shape), alike in grouped(rows, lambda row: (row.op, row.shape), ordered=False):
        found = [(int(match[1]), row.time_us or 0.0) for row in alike if (match := BY_PROGRAMS.fullmatch(row.schedule))]
        if found:
            lines.append((f"{op}, {shape}", sorted(found)))
    if not lines:
        return []
    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.subplots()
    for name, points in lines:
        counts, times = zip(*points, strict=True)
        axes.plot(counts, [time / min(times) for time in times], "o-", markersize=4, label=name)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("programs on each compute unit")
    axes.set_ylabel("time over the fastest")
    title = f"Fused operators by occupancy, {where}"
    axes.set_title(title)
    axes.legend(fontsize=7)
    text = f"{title}: " + "; ".join(
        f"{name}: {', '.join(f'{time:.4g} us with {count}' for count, time in points)}" for name, points in lines
    )
    return [save(figure, "fused-occupancy", title, text, folder)]


def _by_order(rows: Sequence[FusedRow], where: str, folder: Path) -> list[Picture]:
    pairs = []
    for (op, shape), alike in grouped(rows, lambda row: (row.op, row.shape), ordered=False):
        by_order = {row.schedule: row for row in alike if row.schedule in ORDERS}
        if len(by_order) == len(ORDERS) and all(row.skew_us is not None for row in by_order.values()):
            pairs.append((f"{op}\n{shape}", by_order))
    if not pairs:
        return []
    figure = Figure(figsize=(10, 1.8 + 0.42 * len(pairs)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for place, (_, by_order) in enumerate(pairs):
        base = by_order["remote_first"].time_us or 1.0
        for number, (order, colour) in enumerate(ORDERS.items()):
            row, label = by_order[order], order if place == 0 else None
            at = place + 0.4 * number - 0.2
            left.barh(at, (row.time_us or 0.0) / base, 0.36, color=colour, label=label)
            right.barh(at, 100 * (row.skew_us or 0.0) / (row.time_us or 1.0), 0.36, color=colour)
    left.set_yticks(range(len(pairs)), [name for name, _ in pairs], fontsize=6)
    left.set_ylabel("operator and shape")
    left.invert_yaxis()
    left.set_xlabel("time over remote_first")
    right.set_xlabel("ends of ranks apart, % of the time")
    title = f"Fused operators by order, {where}"
    figure.suptitle(title, fontsize=10)
    left.legend(fontsize=7, loc="lower right")
    text = f"{title}: " + "; ".join(
        f"{name.replace(chr(10), ', ')}: "
        + ", ".join(f"{order} {row.time_us:.4g} us, ends {row.skew_us:.3g} us apart" for order, row in by_order.items())
        for name, by_order in pairs
    )
    return [save(figure, "fused-order", title, text, folder)]
