"""Rows of all-to-alls with a layout, as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from sidelane_lab.harness.options import LAUNCHES
from sidelane_lab.harness.report import Cell, spread, table_of
from sidelane_lab.harness.study import OF_LIBRARY, Allowed, FlatRow
from sidelane_lab.harness.table import Table, grouped

THERE, BACK, CONTIGUOUS = LAYOUTS = "there", "back", "contiguous"
SYMMETRIC, ORDINARY = MEMORIES = "symmetric", "ordinary"


@dataclasses.dataclass(frozen=True, slots=True)
class LayoutRow(FlatRow):
    """An exchange of several tensors of one shape, alone or next to a GEMM.

    Attributes:
        shape: batch, positions and heads of all ranks, and the size of a head.
        tensors: number of tensors of that shape in an exchange.
        layout: ``there``: from positions to heads; ``back``: the other way; ``contiguous``: as many bytes in parts that
            lie side by side.
        row_bytes: bytes of one position for one rank.
        bytes: bytes that leave a GPU in an exchange.
        launch: ``eager`` or ``graph``.
        implementation: ``auto`` is Sidelane's; ``nccl`` and ``gloo`` permute before and behind their exchange.
        memory: ``symmetric``, or ``ordinary``.
        variant: Sidelane's, or how the library is called: ``each`` tensor, ``grouped`` calls, or all ``together`` in
            one buffer.
        time_us: time of an exchange with its permutes, or of both together next to a GEMM, median over the rounds of
            the slowest rank.
        gbps: ``bytes`` over the time; null next to a GEMM.
        correct: True if outputs agreed in this run; None when it could not run.
        note: reason why there is no time.
        gemm: GEMM that ran beside it; empty if it ran alone.
        gemm_us: isolated time of the GEMM, in the same rounds.
        comm_us: isolated time of the same exchange, in the same rounds.
        best_comm_us: fastest isolated time of the exchange, of all ways.
        speedup, ideal, percent_of_ideal: as in :class:`C3Row`.
    """

    allowed: ClassVar[Allowed] = (("layout", LAYOUTS), ("launch", LAUNCHES), ("memory", MEMORIES))
    figures: ClassVar[tuple[str, ...]] = ("time_us",)

    shape: str
    tensors: int
    layout: str
    row_bytes: int
    bytes: int
    dtype: str
    launch: str
    implementation: str
    memory: str
    variant: str
    time_us: float | None
    p10_us: float | None
    p90_us: float | None
    gbps: float | None
    correct: bool | None
    note: str = ""
    gemm: str = ""
    gemm_us: float | None = None
    comm_us: float | None = None
    best_comm_us: float | None = None
    speedup: float | None = None
    ideal: float | None = None
    percent_of_ideal: float | None = None


def _over_library(row: LayoutRow, same: Sequence[LayoutRow]) -> str:
    """Return the library's best time for the same over that of a row; more than 1: the row is faster."""
    theirs = [one for one in same if one.layout == row.layout and one.implementation in OF_LIBRARY]
    alike = [one.time_us for one in theirs if one.time_us]
    return f"{min(alike) / row.time_us:.3f}" if alike and row.time_us and row.implementation not in OF_LIBRARY else ""


def _over_contiguous(row: LayoutRow, same: Sequence[LayoutRow]) -> str:
    """Return the time of a row over that of the contiguous exchange of the same implementation and memory."""
    alike = [
        one.time_us
        for one in same
        if one.layout == CONTIGUOUS
        and (one.implementation, one.memory) == (row.implementation, row.memory)
        and one.time_us
    ]
    return f"{row.time_us / min(alike):.3f}" if alike and row.time_us and row.layout != CONTIGUOUS else ""


WHO: Mapping[str, Cell] = {
    "<layout": "layout",
    "<implementation": "implementation",
    "<memory": "memory",
    "<variant": "variant",
}
TIMES: Mapping[str, Cell] = {"time\nus": "time_us", "p10-p90\nus": spread}
ALONE_COLUMNS: Mapping[str, Cell] = {
    **WHO,
    **TIMES,
    "GB/s": "gbps",
    "library\nover it": _over_library,
    "over con-\ntiguous": _over_contiguous,
    "<correct": "correct",
}
BESIDE_COLUMNS: Mapping[str, Cell] = {
    **WHO,
    "alone\nus": "comm_us",
    **TIMES,
    "speed-up": "speedup:.3f",
    "ideal": "ideal:.3f",
    "% of\nideal": "percent_of_ideal:.0f",
    "<correct": "correct",
}


def layout_tables(rows: Sequence[LayoutRow]) -> list[Table]:
    """Make a table for each shape and launch, and one for each shape next to a GEMM."""
    tables = []
    by = grouped(rows, lambda row: (row.shape, row.tensors, row.launch, row.gemm), ordered=False)
    for (_, _, launch, gemm), alike in by:
        first = alike[0]
        title = f"{first.tensors} tensors of {first.shape}, rows of {first.row_bytes} bytes, {first.dtype}, {launch}"
        if gemm:
            gemm_us = next((row.gemm_us for row in alike if row.gemm_us is not None), None)
            title += f", next to {gemm}" + ("" if gemm_us is None else f" of {gemm_us:.0f} us")
        columns = BESIDE_COLUMNS if gemm else ALONE_COLUMNS
        tables.append(table_of(title, alike, columns, keys=4, value=None))
    return tables
