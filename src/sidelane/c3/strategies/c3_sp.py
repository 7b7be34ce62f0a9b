"""Schedule prioritisation: the collective is launched first (ConCCL paper, V-A)."""

from __future__ import annotations

from sidelane.c3.strategies.registry import register
from sidelane.c3.strategy import Mover, Order, Strategy

C3_SP = register(
    Strategy(
        name="c3_sp",
        order=Order.COLLECTIVE_FIRST,
        mover=Mover.LIBRARY,
        recipe="two streams, the collective first",
        preference=20,
    )
)
register(C3_SP.by_kernels("sm_sp"))
