"""Isolated times as pictures: slowdowns by compute units, times by size (as figures 5 to 7 of the ConCCL paper)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sidelane.bench.report.drawing import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    STYLES,
    VERMILLION,
    Picture,
    save,
    size_axis,
    where_from,
)
from sidelane.bench.results.files import Results
from sidelane.bench.results.rows.pairs import IsolatedRow
from sidelane.c3.isolated import Isolated
from sidelane.c3.measured import isolated_of
from sidelane.sizes import format_bytes

COLOURS = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, BLACK)


def draw_isolated(rows: Sequence[IsolatedRow], results: Results, directory: Path) -> list[Picture]:
    """One picture: GEMMs by units taken, collectives by units given, collectives by size; none of too little."""
    try:
        known = isolated_of(rows)
    except ValueError:
        return []
    figure = Figure(figsize=(12, 4), layout="constrained")
    gemms, given, sizes = figure.subplots(1, 3)
    _slowdowns(gemms, [(f"{c.gemm.name}, {c.means}", c.slowdown()) for c in known.gemms], "GEMMs, units taken")
    _slowdowns(
        given,
        [(f"{c.implementation} {c.collective} {format_bytes(c.nbytes)}", c.slowdown()) for c in known.collectives],
        "collectives, units given",
    )
    _by_size(sizes, known)
    title = f"GEMMs and collectives alone: {where_from(results)}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    text = "Slowdown of GEMMs by units taken and of collectives by units given, and times of collectives by size."
    return [save(figure, "isolated", title, text, directory)]


def _slowdowns(axes: Axes, curves: Sequence[tuple[str, dict[int, float]]], title: str) -> None:
    for number, (name, table) in enumerate((name, table) for name, table in curves if table):
        dash, mark = STYLES[number % len(STYLES)]
        style: Any = {"color": COLOURS[number % len(COLOURS)], "linestyle": dash, "marker": mark, "markersize": 4}
        axes.plot(list(table), list(table.values()), label=name, **style)
    axes.axhline(1.0, color=BLACK, linewidth=0.7)
    axes.set_title(title)
    axes.set_xlabel("compute units")
    axes.set_ylabel("time / time with all units")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=6, frameon=False)


def _by_size(axes: Axes, known: Isolated) -> None:
    names = dict.fromkeys((curve.implementation, curve.collective) for curve in known.collectives)
    for number, (implementation, collective) in enumerate(names):
        mine = [c for c in known.collectives if (c.implementation, c.collective) == (implementation, collective)]
        mine = sorted(mine, key=lambda one: one.nbytes)
        dash, mark = STYLES[number % len(STYLES)]
        style: Any = {"color": COLOURS[number % len(COLOURS)], "linestyle": dash, "marker": mark, "markersize": 4}
        label = f"{implementation} {collective}"
        axes.plot([one.nbytes for one in mine], [one.times_us[0] for one in mine], label=label, **style)
    axes.set_title("collectives by size")
    axes.set_ylabel("time, us")
    if names:
        size_axis(axes, sorted({curve.nbytes for curve in known.collectives}))
        axes.set_yscale("log")
        axes.legend(fontsize=6, frameon=False)
