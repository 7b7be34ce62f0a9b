"""What tells one row of ``sidelane tune --study c3`` from another; ``c3.measured`` makes curves of them."""

from __future__ import annotations

from sidelane_lab.harness.results.rows.pairs import IsolatedRow

Key = tuple[object, ...]


def key_of(row: IsolatedRow) -> Key:
    """What was measured; a file has one row of each."""
    sizes = (row.m, row.n, row.k, row.dtype, row.collective, row.bytes)
    return row.what, *sizes, row.implementation, row.variant, row.means, row.units
