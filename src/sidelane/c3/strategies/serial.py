"""The baseline: one after the other on one stream."""

from __future__ import annotations

from sidelane.c3.strategies.registry import register
from sidelane.c3.strategy import Mover, Order, Strategy

register(
    Strategy(
        name="serial",
        order=Order.SERIAL,
        mover=Mover.LIBRARY,
        recipe="the GEMM, then the collective, on one stream",
        preference=50,
    )
)
