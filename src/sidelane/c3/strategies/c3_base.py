"""Two streams, the GEMM first (ConCCL paper, IV-C)."""

from __future__ import annotations

from sidelane.c3.strategies.registry import register
from sidelane.c3.strategy import Mover, Order, Strategy

C3_BASE = register(
    Strategy(
        name="c3_base",
        order=Order.GEMM_FIRST,
        mover=Mover.LIBRARY,
        recipe="two streams, the GEMM first",
        preference=40,
    )
)
register(C3_BASE.by_kernels("sm_base"))
