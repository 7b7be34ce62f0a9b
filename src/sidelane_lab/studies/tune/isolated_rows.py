"""Rows of ``sidelane tune --study c3``, of which ``pairs.isolated`` makes curves, as tables and as pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from sidelane.sizes import format_bytes
from sidelane_lab.harness.drawing import (
    BLACK,
    BLUE,
    COLOURS,
    GREEN,
    ORANGE,
    PURPLE,
    VERMILLION,
    plain_name,
    plot_line,
    save_titled,
    size_axis,
)
from sidelane_lab.harness.report import Cell, table_of
from sidelane_lab.harness.study import FlatRow, Picture, Results
from sidelane_lab.harness.table import Line, Table, grouped, notes_of, number, without_empty_columns
from sidelane_lab.pairs.heuristics import class_of, expected_time_us, is_latency_bound, units_for, units_to_spare
from sidelane_lab.pairs.isolated import BESIDE, COLLECTIVE, GEMM, PAIR, SERIAL, Isolated, isolated_of
from sidelane_lab.pairs.workload import Workload

ISOLATED = ("gemm", "collective", "memory", "beside", "pair")
Key = tuple[object, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class IsolatedRow(FlatRow):
    """A GEMM, a collective or the memory alone, with all compute units or some; and a GEMM beside DMA traffic.

    Attributes:
        what: ``gemm``; ``collective``; ``memory``; ``beside``: a GEMM and traffic at once; ``pair``: a GEMM and a
            collective under a strategy.
        gemm: tag of the ConCCL paper's Table I, or ``m,n,k``; empty without a GEMM, as m, n and k are 0 then.
        collective: name of the collective; empty without one.
        bytes: bytes of the collective as in :class:`CollectiveRow`, of the traffic, or of the memory that is read.
        implementation: implementation of the collective or of the traffic; ``host``: copies between device and host.
        variant: variant of the implementation.
        means: way in which units are taken from a GEMM or given to a collective: ``split``, ``carve_out``, ``grid``,
            ``threads``, and in older files ``target``. For ``beside`` it says whose time it is, ``gemm`` or
            ``traffic``, and for ``pair`` the strategy.
        units: compute units taken from the GEMM, or given to the collective; 0: it has all.
        device_units: compute units of the device.
        time_us: median over rounds of the slowest rank.
        alone_us: for ``beside`` the same time without the other one, for ``pair`` the time of the collective.
        gbps: bytes of memory read and written, or bytes that each rank of a collective sends, over the time.
        note: reason why there is no time.
    """

    allowed = (("what", ISOLATED),)
    figures = ("time_us",)

    what: str
    gemm: str
    m: int
    n: int
    k: int
    dtype: str
    collective: str
    bytes: int
    implementation: str
    variant: str
    means: str
    units: int
    device_units: int
    time_us: float | None
    alone_us: float | None
    gbps: float | None
    note: str = ""


def key_of(row: IsolatedRow) -> Key:
    """Return what was measured; a file has one row of each."""
    sizes = (row.m, row.n, row.k, row.dtype, row.collective, row.bytes)
    return row.what, *sizes, row.implementation, row.variant, row.means, row.units


def isolated_tables(rows: Sequence[IsolatedRow]) -> list[Table]:
    """GEMMs by units, collectives by size and by units, what disturbs what, and choices."""
    by_what = {what: [row for row in rows if row.what == what] for what in (GEMM, COLLECTIVE, BESIDE, PAIR)}
    tables = [_curves("GEMMs by units taken, times over the first", by_what[GEMM])]
    tables.append(_curves("collectives by units given, times over the first", by_what[COLLECTIVE]))
    tables += [_beside(by_what[BESIDE]), _pairs(by_what[PAIR])]
    try:
        known = isolated_of(rows)
    except ValueError:  # too little was measured yet
        return [table for table in tables if table.lines or table.notes]
    tables += [_classes(known), choices_table(known)]
    return [table for table in tables if table.lines or table.notes]


def choices_table(known: Isolated) -> Table:
    """Show what the heuristic says of every GEMM next to every collective that was measured, with the reason."""
    lines, reasons = [], []
    for gemm in dict.fromkeys(curve.gemm for curve in known.gemms):
        spared = units_to_spare(known, gemm)
        lines.append(Line((gemm.name, "(copy engines)", "", str(spared.candidate), "")))
        reasons.append((f"{gemm.name} (copy engines)", spared.reason))
        for collective, nbytes in dict.fromkeys((c.collective, c.nbytes) for c in known.collectives):
            workload = Workload(gemm, collective, nbytes)
            try:
                found = units_for(known, workload)
                units, reason = str(sum(found.candidate)), found.reason
            except ValueError as problem:
                units, reason = "", str(problem).partition(" (value=")[0]
            kind = str(class_of(known, workload))
            lines.append(Line((gemm.name, str(collective), format_bytes(nbytes), units, kind)))
            reasons.append((f"{workload.name}", reason))
    columns = ("<GEMM", "<collective", "bytes", "units for\nthe collective", "<class")
    return without_empty_columns(Table("partition heuristic", columns, tuple(lines), notes_of(reasons), keys=3))


def _curves(title: str, rows: Sequence[IsolatedRow]) -> Table:
    """A line for each curve, a column for each number of units."""
    units = sorted({row.units for row in rows if row.time_us is not None and row.units})
    lines, notes = [], []
    for names, same in grouped(rows, _curve_of, ordered=False):
        times = {row.units: row.time_us for row in same if row.time_us is not None}
        notes += [(" ".join(filter(None, names)), row.note) for row in same if row.note]
        if 0 in times:
            ratios = (f"{times[one] / times[0]:.2f}" if one in times else "" for one in units)
            lines.append(Line((*names, number(times[0]), *ratios)))
    columns = ("<what", "bytes", "<implementation", "<variant", "<means", "all units\nus", *map(str, units))
    return without_empty_columns(Table(title, columns, tuple(lines), notes_of(notes), keys=5))


def _curve_of(row: IsolatedRow) -> tuple[str, ...]:
    means = row.means if row.what == GEMM else ""  # a collective's first point has no means yet
    nbytes = format_bytes(row.bytes) if row.bytes else ""
    return row.gemm or row.collective, nbytes, row.implementation, row.variant, means


def _ratio(row: IsolatedRow, rows: Sequence[IsolatedRow]) -> str:
    return f"{row.time_us / row.alone_us:.2f}" if row.time_us and row.alone_us else ""


def _speedup(row: IsolatedRow, rows: Sequence[IsolatedRow]) -> str:
    """Hold a strategy against one after the other by the same implementation."""
    return f"{(_serial_us(row, rows) or 0.0) / (row.time_us or 1.0):.2f}"


def _serial_us(row: IsolatedRow, rows: Sequence[IsolatedRow]) -> float | None:
    pair = (row.gemm, row.collective, row.implementation)
    found = [one for one in rows if one.means == SERIAL and (one.gemm, one.collective, one.implementation) == pair]
    return found[-1].time_us if found else None


BESIDE_COLUMNS: Mapping[str, Cell] = {
    "<GEMM": "gemm",
    "<traffic": "implementation",
    "bytes": "bytes",
    "<time of": "means",
    "alone us": "alone_us",
    "beside us": "time_us",
    "ratio": _ratio,
}
PAIR_COLUMNS: Mapping[str, Cell] = {
    "<GEMM": "gemm",
    "<collective": "collective",
    "bytes": "bytes",
    "<implementation": "implementation",
    "<strategy": "means",
    "units": "units",
    "together\nus": "time_us",
    "speedup": _speedup,
}


def _beside(rows: Sequence[IsolatedRow]) -> Table:
    return table_of("a GEMM beside DMA traffic", rows, BESIDE_COLUMNS, keys=4, value=None)


def _pairs(rows: Sequence[IsolatedRow]) -> Table:
    notes = notes_of([(row.means, row.note) for row in rows if row.time_us is None])
    shown = [row for row in rows if row.time_us is not None and _serial_us(row, rows) is not None]
    none: dict[str, Any] = {"value": None, "noted": lambda row: False}
    return table_of("pairs under strategies", shown, PAIR_COLUMNS, keys=5, notes=notes, **none)


def _classes(known: Isolated) -> Table:
    lines = []
    for gemm in dict.fromkeys(curve.gemm for curve in known.gemms):
        (bound, why), time_us = known.bound(gemm), expected_time_us(known, gemm)
        needs = gemm.nbytes / time_us / 1e3
        tflops = gemm.flops / time_us / 1e6
        lines.append(
            Line((gemm.name, f"{gemm.flops / gemm.nbytes:.0f}", number(needs), number(tflops), f"{bound}-bound, {why}"))
        )
    for collective, nbytes in dict.fromkeys((c.collective, c.nbytes) for c in known.collectives):
        limit = f"{'latency' if is_latency_bound(known, collective, nbytes) else 'bandwidth'}-bound"
        lines.append(Line((f"{collective} {format_bytes(nbytes)}", "", "", "", limit)))
    columns = ("<what", "operations\na byte", "needs\nGB/s", "TFLOP/s", "<class")
    title = (
        f"classes: {known.tflops:.3g} TFLOP/s and {known.memory_gbps:.0f} GB/s were reached, "
        f"{known.flops_per_byte:.0f} operations a byte"
    )
    return Table(title, columns, tuple(lines), keys=1)


LINES = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, BLACK)


def draw_isolated(rows: Sequence[IsolatedRow], results: Results, directory: Path) -> list[Picture]:
    """Draw GEMMs by units taken, collectives by units given, and collectives by size; none of too little.

    These are figures 5 to 7 of the ConCCL paper.
    """
    try:
        known = isolated_of(rows)
    except ValueError:
        return []
    by_means: Grid = {}
    for gemm in known.gemms:
        if gemm.slowdown():
            by_means.setdefault(("", gemm.means), []).append((gemm.gemm.name, gemm.slowdown()))
    given: Grid = {}
    by_size: Grid = {}
    for curve in sorted(known.collectives, key=lambda one: one.nbytes):
        if curve.slowdown():
            name = format_bytes(curve.nbytes)
            given.setdefault((curve.implementation, str(curve.collective)), []).append((name, curve.slowdown()))
    for collective in known.collectives:
        sizes = by_size.setdefault(("", str(collective.collective)), [])
        if collective.implementation not in [name for name, _ in sizes]:
            mine = [c for c in known.collectives if c.collective == collective.collective]
            mine = [c for c in mine if c.implementation == collective.implementation]
            points = {c.nbytes: c.times_us[0] for c in sorted(mine, key=lambda one: one.nbytes)}
            sizes.append((collective.implementation, points))
    return [
        picture
        for grid, name, title, axis, text in (
            (by_means, "gemms", "GEMMs on fewer units", "units taken from the GEMM",
             "Slowdown of GEMMs by the compute units that they do without, a panel for each way of taking them."),
            (given, "units", "Collectives on few units", "units given to the collective",
             "Slowdown of collectives by the compute units that they have, a column for each collective."),
            (by_size, "sizes", "Collectives by size", "",
             "Times of collectives alone by size, a line for each implementation."),
        )
        for picture in _panels(grid, f"isolated-{name}", f"{title}: {results.where}", axis, text, directory)
    ]  # fmt: skip


Grid = dict[tuple[str, str], list[tuple[str, Mapping[int, float]]]]
"""Panels by row and column, each with the names and the points of its lines."""


def _panels(grid: Grid, name: str, title: str, axis: str, text: str, directory: Path) -> Iterator[Picture]:
    """Draw slowdowns over units, which ``axis`` names; without it times over sizes. Nothing where there is no panel."""
    if not grid:
        return
    rows, columns = (list(dict.fromkeys(place[at] for place in grid)) for at in (0, 1))
    labels = list(dict.fromkeys(label for lines in grid.values() for label, _ in lines))
    figure = Figure(figsize=(1.2 + 3.0 * len(columns), 0.6 + 2.6 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), len(columns), squeeze=False, sharey="row")
    for (row, column), lines in grid.items():
        axes = panels[rows.index(row)][columns.index(column)]
        for label, points in lines:
            number = labels.index(label)
            colour = COLOURS.get(label, LINES[number % len(LINES)])
            plot_line(axes, points, plain_name(label), colour, number)
        axes.set_title(" ".join(filter(None, [plain_name(row), column])))
        if axis:
            axes.axhline(1.0, color=BLACK, linewidth=0.7)
            axes.set_xlabel(axis)
        else:
            size_axis(axes, sorted({size for _, points in lines for size in points}))
            axes.set_yscale("log")
    for first in panels:
        first[0].set_ylabel("time / time with all units" if axis else "time, us")
        if axis:
            first[0].set_ylim(bottom=0)  # of all in the row, behind all lines
    lines_by_name = {str(line.get_label()): line for axes in figure.axes for line in axes.lines}
    shown = [plain_name(label) for label in labels]
    figure.legend(
        [lines_by_name[one] for one in shown],
        shown,
        ncols=min(6, len(shown)),
        fontsize=8,
        frameon=False,
        loc="outside lower center",
    )
    yield save_titled(figure, name, title, text, directory)
