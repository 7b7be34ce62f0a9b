"""Rows of ``sidelane tune --study c3``; ``c3.measured`` makes curves of them."""

from __future__ import annotations

import dataclasses

from sidelane_lab.harness.rows import FlatRow

ISOLATED = ("gemm", "collective", "memory", "beside", "pair")
Key = tuple[object, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class IsolatedRow(FlatRow):
    """A GEMM, a collective or the memory alone, with all compute units or some; and a GEMM beside DMA traffic.

    Attributes:
        what: ``gemm``; ``collective``; ``memory``; ``beside``: a GEMM and traffic at once; ``pair``: a GEMM and a
            collective under a strategy.
        gemm: tag of the ConCCL paper's Table I, or ``m,n,k``; empty without a GEMM, as m, n and k are 0 then.
        collective: which, or empty.
        bytes: of the collective as in :class:`CollectiveRow`; of the traffic; of the memory that is read.
        implementation: who runs the collective or the traffic; ``host``: copies between device and host.
        variant: of it.
        means: how units are taken from a GEMM or given to a collective: ``split``, ``target``, ``carve_out``, ``grid``,
            ``threads``. Beside: whose time it is, ``gemm`` or ``traffic``. Pair: the strategy.
        units: taken from the GEMM, or given to the collective; 0: it has all.
        device_units: that there are.
        time_us: median over rounds of the slowest rank.
        alone_us: beside: the same without the other. Pair: the collective.
        gbps: of memory, read and written; of a collective, sent by each rank.
        note: why there is no time.
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
    """What was measured; a file has one row of each."""
    sizes = (row.m, row.n, row.k, row.dtype, row.collective, row.bytes)
    return row.what, *sizes, row.implementation, row.variant, row.means, row.units
