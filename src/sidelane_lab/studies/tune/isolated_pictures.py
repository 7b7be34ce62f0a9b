"""Isolated times as pictures, as figures 5 to 7 of the ConCCL paper: by units taken and given, and by size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sidelane.c3.isolated import GemmTimes, Isolated
from sidelane.c3.measured import isolated_of
from sidelane.sizes import format_bytes
from sidelane_lab.harness.drawing import (
    BLACK,
    BLUE,
    COLOURS,
    GREEN,
    ORANGE,
    PURPLE,
    STYLES,
    VERMILLION,
    save,
    size_axis,
)
from sidelane_lab.harness.study import Picture, Results
from sidelane_lab.studies.tune.isolated_rows import IsolatedRow

LINES = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, BLACK)
SLOWDOWN = "time / time with all units"


def draw_isolated(rows: Sequence[IsolatedRow], results: Results, directory: Path) -> list[Picture]:
    """GEMMs by units taken, collectives by units given, and collectives by size; none of too little."""
    try:
        known = isolated_of(rows)
    except ValueError:
        return []
    where = results.where
    found = (_gemms(known, where, directory), _given(known, where, directory), _sizes(known, where, directory))
    return [picture for picture in found if picture is not None]


def _gemms(known: Isolated, where: str, directory: Path) -> Picture | None:
    """Figure 5: a panel for each means of taking units, a line for each GEMM."""
    by_means: dict[str, list[GemmTimes]] = {}
    for curve in known.gemms:
        if curve.slowdown():
            by_means.setdefault(curve.means, []).append(curve)
    if not by_means:
        return None
    names = list(dict.fromkeys(curve.gemm.name for curves in by_means.values() for curve in curves))
    figure, (panels,) = _figure(1, len(by_means))
    for axes, (means, curves) in zip(panels, by_means.items(), strict=True):
        for curve in curves:
            _line(axes, curve.slowdown(), curve.gemm.name, names.index(curve.gemm.name))
        _slowdowns(axes, means, "units taken from the GEMM")
    panels[0].set_ylabel(SLOWDOWN)
    text = "Slowdown of GEMMs by the compute units that they do without, a panel for each way of taking them."
    return _saved(figure, "isolated-gemms", f"GEMMs on fewer units: {where}", text, directory)


def _given(known: Isolated, where: str, directory: Path) -> Picture | None:
    """Figure 6: a column for each collective, a row for each implementation on units, a line for each size."""
    curves = [curve for curve in known.collectives if curve.slowdown()]
    if not curves:
        return None
    kinds = list(dict.fromkeys(curve.collective for curve in curves))
    movers = list(dict.fromkeys(curve.implementation for curve in curves))
    sizes = sorted({curve.nbytes for curve in curves})
    figure, panels = _figure(len(movers), len(kinds))
    for row, mover in zip(panels, movers, strict=True):
        for axes, kind in zip(row, kinds, strict=True):
            mine = [c for c in curves if (c.implementation, c.collective) == (mover, kind)]
            for curve in sorted(mine, key=lambda one: one.nbytes):
                _line(axes, curve.slowdown(), format_bytes(curve.nbytes), sizes.index(curve.nbytes))
            _slowdowns(axes, f"{mover} {kind}", "units given to the collective")
        row[0].set_ylabel(SLOWDOWN)
    text = "Slowdown of collectives by the compute units that they have, a column for each collective."
    return _saved(figure, "isolated-units", f"Collectives on few units: {where}", text, directory)


def _sizes(known: Isolated, where: str, directory: Path) -> Picture | None:
    """Figure 7: a panel for each collective, a line for each implementation."""
    kinds = list(dict.fromkeys(curve.collective for curve in known.collectives))
    if not kinds:
        return None
    figure, (panels,) = _figure(1, len(kinds))
    for axes, kind in zip(panels, kinds, strict=True):
        mine = sorted((c for c in known.collectives if c.collective == kind), key=lambda one: one.nbytes)
        for number, name in enumerate(dict.fromkeys(curve.implementation for curve in mine)):
            points = {c.nbytes: c.times_us[0] for c in mine if c.implementation == name}
            _line(axes, points, name, number, COLOURS.get(name))
        size_axis(axes, sorted({curve.nbytes for curve in mine}))
        axes.set_yscale("log")
        axes.set_title(str(kind))
        axes.legend(fontsize=7, frameon=False)
    panels[0].set_ylabel("time, us")
    text = "Times of collectives alone by size, a line for each implementation."
    return _saved(figure, "isolated-sizes", f"Collectives by size: {where}", text, directory)


def _figure(rows: int, columns: int) -> tuple[Figure, Sequence[Sequence[Axes]]]:
    figure = Figure(figsize=(1.2 + 3.0 * columns, 0.6 + 2.6 * rows), layout="constrained")
    panels: Sequence[Sequence[Axes]] = figure.subplots(rows, columns, squeeze=False, sharey="row").tolist()
    return figure, panels


def _line(axes: Axes, points: Mapping[int, float], label: str, number: int, colour: str | None = None) -> None:
    dash, mark = STYLES[number % len(STYLES)]
    style: Any = {"color": colour or LINES[number % len(LINES)], "linestyle": dash, "marker": mark, "markersize": 4}
    axes.plot(list(points), list(points.values()), label=label, **style)


def _slowdowns(axes: Axes, title: str, units: str) -> None:
    axes.axhline(1.0, color=BLACK, linewidth=0.7)
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.set_xlabel(units)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, frameon=False)


def _saved(figure: Figure, name: str, title: str, text: str, directory: Path) -> Picture:
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return save(figure, name, title, text, directory)
