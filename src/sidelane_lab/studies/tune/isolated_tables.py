"""Rows of isolated times as tables: curves by units, classes, and what the partition heuristic makes of them."""

from __future__ import annotations

from collections.abc import Sequence

from sidelane.c3.isolated import Isolated
from sidelane.c3.measured import BESIDE, COLLECTIVE, GEMM, PAIR, SERIAL, isolated_of
from sidelane.c3.workload import Workload
from sidelane.cli.table import Line, Table, grouped, notes_of, number, without_empty_columns
from sidelane.sizes import format_bytes
from sidelane_lab.studies.tune.isolated_rows import IsolatedRow


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
    """What the heuristic says of every GEMM next to every collective that was measured, with the reason."""
    lines, reasons = [], []
    for gemm in dict.fromkeys(curve.gemm for curve in known.gemms):
        spared = known.spare(gemm)
        lines.append(Line((gemm.name, "(copy engines)", "", str(spared.units), "")))
        reasons.append((f"{gemm.name} (copy engines)", spared.reason))
        for collective, nbytes in dict.fromkeys((c.collective, c.nbytes) for c in known.collectives):
            workload = Workload(gemm, collective, nbytes)
            try:
                found = known.allocate(workload)
                units, reason = str(found.units), found.reason
            except ValueError as problem:
                units, reason = "", str(problem).partition(" (value=")[0]
            kind = str(known.kind(workload))
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


def _beside(rows: Sequence[IsolatedRow]) -> Table:
    lines = [
        Line((row.gemm, row.implementation, format_bytes(row.bytes), row.means, number(row.alone_us),
              number(row.time_us), "" if not row.time_us or not row.alone_us else f"{row.time_us / row.alone_us:.2f}"))
        for row in rows
    ]  # fmt: skip
    notes = notes_of([(f"{row.gemm} {row.implementation}", row.note) for row in rows])
    columns = ("<GEMM", "<traffic", "bytes", "<time of", "alone us", "beside us", "ratio")
    return Table("a GEMM beside DMA traffic", columns, tuple(lines), notes, keys=4)


def _pairs(rows: Sequence[IsolatedRow]) -> Table:
    """Every strategy against one after the other by the same implementation."""
    serial = {(row.gemm, row.collective, row.implementation): row.time_us for row in rows if row.means == SERIAL}
    lines, notes = [], []
    for row in rows:
        base_us = serial.get((row.gemm, row.collective, row.implementation))
        if row.time_us is None:
            notes.append((row.means, row.note))
        elif base_us is not None:
            what = (row.gemm, row.collective, format_bytes(row.bytes), row.implementation, row.means)
            units = str(row.units) if row.units else ""
            lines.append(Line((*what, units, number(row.time_us), f"{base_us / row.time_us:.2f}")))
    columns = ("<GEMM", "<collective", "bytes", "<implementation", "<strategy", "units", "together\nus", "speedup")
    return without_empty_columns(Table("pairs under strategies", columns, tuple(lines), notes_of(notes), keys=5))


def _classes(known: Isolated) -> Table:
    lines = []
    for gemm in dict.fromkeys(curve.gemm for curve in known.gemms):
        (bound, why), time_us = known.bound(gemm), known.gemm_us(gemm)
        needs = gemm.nbytes / time_us / 1e3
        tflops = gemm.flops / time_us / 1e6
        lines.append(
            Line((gemm.name, f"{gemm.flops / gemm.nbytes:.0f}", number(needs), number(tflops), f"{bound}-bound, {why}"))
        )
    for collective, nbytes in dict.fromkeys((c.collective, c.nbytes) for c in known.collectives):
        limit = f"{known.limit(collective, nbytes)}-bound"
        lines.append(Line((f"{collective} {format_bytes(nbytes)}", "", "", "", limit)))
    columns = ("<what", "operations\na byte", "needs\nGB/s", "TFLOP/s", "<class")
    title = (
        f"classes: {known.tflops:.3g} TFLOP/s and {known.memory_gbps:.0f} GB/s were reached, "
        f"{known.flops_per_byte:.0f} operations a byte"
    )
    return Table(title, columns, tuple(lines), keys=1)
