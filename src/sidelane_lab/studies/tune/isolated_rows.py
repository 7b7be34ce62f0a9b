"""Rows of ``sidelane tune --study c3``, of which ``pairs.isolated`` makes curves, as tables.

``sidelane figure 000/5`` draws them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sidelane.sizes import format_bytes
from sidelane_lab.harness.report import Cell, table_of
from sidelane_lab.harness.study import FlatRow
from sidelane_lab.harness.table import Line, Table, grouped, notes_of, number, without_empty_columns
from sidelane_lab.pairs.heuristics import class_of, expected_time_us, is_latency_bound, units_for, units_to_spare
from sidelane_lab.pairs.isolated import BESIDE, COLLECTIVE, GEMM, PAIR, SERIAL, Isolated, isolated_of
from sidelane_lab.pairs.workload import Workload
from sidelane_lab.studies.c3.rows import name_of_code

ISOLATED = ("gemm", "collective", "memory", "beside", "pair", "counters")
Key = tuple[object, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class IsolatedRow(FlatRow):
    """A GEMM, a collective or the memory alone, with all compute units or some; and a GEMM beside DMA traffic.

    Attributes:
        what: ``gemm``; ``collective``; ``memory``; ``beside``: a GEMM and traffic at once; ``pair``: a GEMM and a
            collective under a strategy; ``counters``: a GEMM under Nsight Compute, with the time that it took there.
        gemm: tag of the ConCCL paper's Table I, or ``m,n,k``; empty without a GEMM, as m, n and k are 0 then.
        collective: name of the collective; empty without one.
        bytes: bytes of the collective as in :class:`CollectiveRow`, of the traffic, or of the memory that is read.
        implementation: implementation of the collective or of the traffic; ``host``: copies between device and host.
        variant: variant of the implementation.
        means: way in which units are taken from a GEMM or given to a collective: ``split``, ``threads``, and in older
            files ``target``, ``carve_out`` and ``grid``. For ``beside`` it says whose time it is, ``gemm`` or
            ``traffic``, and for ``pair`` the strategy.
        units: compute units taken from the GEMM, or given to the collective; 0: it has all.
        device_units: compute units of the device.
        time_us: median over rounds of the slowest rank.
        alone_us: for ``beside`` the same time without the other one, for ``pair`` the time of the collective.
        gbps: bytes of memory read and written, or bytes that each rank of a collective sends, over the time.
        note: reason why there is no time.
        moved_bytes: bytes between the GPU and its memory, by counters.
        hit_percent: share of the sectors that were found in the last-level cache.
        correct: True if the outputs of a collective agreed with a reference; null where none was compared.
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
    moved_bytes: float | None = None
    hit_percent: float | None = None
    correct: bool | None = None


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
    "<strategy": lambda row, rows: name_of_code(row.means),
    "units": "units",
    "together\nus": "time_us",
    # A strategy compared with one after the other of the same implementation.
    "speedup": lambda row, rows: f"{(_serial_us(row, rows) or 0.0) / (row.time_us or 1.0):.2f}",
}


def _beside(rows: Sequence[IsolatedRow]) -> Table:
    return table_of("a GEMM beside DMA traffic", rows, BESIDE_COLUMNS, keys=4, value=None)


def _pairs(rows: Sequence[IsolatedRow]) -> Table:
    notes = notes_of([(name_of_code(row.means), row.note) for row in rows if row.time_us is None])
    shown = [row for row in rows if row.time_us is not None and _serial_us(row, rows) is not None]
    none: dict[str, Any] = {"value": None, "noted": lambda row: False}
    return table_of("pairs under strategies", shown, PAIR_COLUMNS, keys=5, notes=notes, **none)


def _classes(known: Isolated) -> Table:
    lines = []
    for gemm in dict.fromkeys(curve.gemm for curve in known.gemms):
        (bound, why), time_us = known.bound(gemm), expected_time_us(known, gemm)
        nbytes = known.bytes_of(gemm)
        needs = nbytes / time_us / 1e3
        tflops = gemm.flops / time_us / 1e6
        lines.append(
            Line((gemm.name, f"{gemm.flops / nbytes:.0f}", number(needs), number(tflops), f"{bound}-bound, {why}"))
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
