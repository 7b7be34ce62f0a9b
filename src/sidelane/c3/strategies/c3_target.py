"""The collective first, next to a GEMM whose library counts on fewer units: nobody is kept off any."""

from __future__ import annotations

from sidelane.c3.strategies.registry import register
from sidelane.c3.strategy import Means, Mover, Order, Partition, Strategy

C3_TARGET = register(
    Strategy(
        name="c3_target",
        order=Order.COLLECTIVE_FIRST,
        mover=Mover.LIBRARY,
        recipe="the collective first, a GEMM that leaves it units of its own accord",
        partition=Partition(means=Means.TARGET),
    )
)
register(C3_TARGET.by_kernels("sm_target"))
