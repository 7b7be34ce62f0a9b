"""The GEMM first, the collective on a stream that goes before it wherever the machine has to choose."""

from __future__ import annotations

from sidelane.c3.strategies.registry import register
from sidelane.c3.strategy import Mover, Order, Strategy

PRIORITY = register(
    Strategy(
        name="priority",
        order=Order.GEMM_FIRST,
        mover=Mover.LIBRARY,
        recipe="the GEMM first, the collective on an urgent stream",
        priority=1,
        preference=30,
    )
)
register(PRIORITY.by_kernels("sm_priority"))
