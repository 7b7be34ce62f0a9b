"""The library's collective on copy engines.

Its best chance: released first, and in place where the collective has that.
"""

from __future__ import annotations

from sidelane.c3.strategies.registry import register
from sidelane.c3.strategy import Mover, Order, Strategy

register(
    Strategy(
        name="nccl_ce",
        order=Order.COLLECTIVE_FIRST,
        mover=Mover.LIBRARY_DMA,
        recipe="the library's collective first, on copy engines",
    )
)
