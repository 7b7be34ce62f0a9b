"""Resource partitioning: units of its own for the collective (ConCCL paper, V-B)."""

from __future__ import annotations

from sidelane.c3.strategies.registry import register
from sidelane.c3.strategy import Mover, Order, Partition, Strategy

C3_RP = register(
    Strategy(
        name="c3_rp",
        order=Order.GEMM_FIRST,
        mover=Mover.LIBRARY,
        recipe="the GEMM first, the collective on units of its own",
        partition=Partition(),
    )
)
register(C3_RP.by_kernels("sm_rp"))
