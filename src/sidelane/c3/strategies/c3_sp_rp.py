"""Launched first, and on units of its own (ConCCL paper, V-B)."""

from __future__ import annotations

from sidelane.c3.strategies.registry import register
from sidelane.c3.strategy import Mover, Order, Partition, Strategy

C3_SP_RP = register(
    Strategy(
        name="c3_sp_rp",
        order=Order.COLLECTIVE_FIRST,
        mover=Mover.LIBRARY,
        recipe="the collective first, on units of its own",
        partition=Partition(),
    )
)
register(C3_SP_RP.by_kernels("sm_sp_rp"))
