"""The collective on copy engines (ConCCL paper, VI).

It is released first: where it has a copy inside one GPU (the caller's own chunk), that copy would wait for the end of a
GEMM that was released before it (docs/lab/hardware.md, "Copy engines").
"""

from __future__ import annotations

from sidelane.c3.strategies.registry import register
from sidelane.c3.strategy import Mover, Order, Strategy

CONCCL = register(
    Strategy(
        name="conccl",
        order=Order.COLLECTIVE_FIRST,
        mover=Mover.DMA,
        recipe="the collective first, on copy engines",
        preference=10,
    )
)
