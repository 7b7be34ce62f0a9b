"""Rows of the study of GEMMs as tables."""

from __future__ import annotations

from collections.abc import Sequence

from sidelane.cli.table import Line, Table, grouped, notes_of, number, verdict
from sidelane_lab.harness.results.rows.operators import GemmRow

GEMM_COLUMNS = ("<layer", "tokens", "outputs", "inputs", "us", "TFLOP/s", "GB/s", "<correct")


def gemm_tables(rows: Sequence[GemmRow]) -> list[Table]:
    """One table a model."""
    tables = []
    for model, alike in grouped(rows, lambda row: row.model, ordered=False):
        lines = []
        for _, same in grouped(alike, lambda row: row.layer, ordered=False):
            lines += [Line(_cells(row), rule=row is same[-1]) for row in same]
        notes = notes_of([(f"{row.layer} {row.m}", row.note) for row in alike])
        tables.append(Table(f"{model}, {alike[0].dtype}", GEMM_COLUMNS, tuple(lines), notes, keys=2))
    return tables


def _cells(row: GemmRow) -> tuple[str, ...]:
    sizes = (str(row.m), str(row.n), str(row.k))
    return (row.layer, *sizes, number(row.time_us), number(row.tflops), number(row.gbps), verdict(row.correct))
