"""The collective on copy engines, and memory-bound GEMMs on fewer units (ConCCL paper, VI-F)."""

from __future__ import annotations

from sidelane.c3.strategies.registry import register
from sidelane.c3.strategy import Mover, Order, Partition, Strategy

UNITS = 8
"""What the paper takes from a memory-bound GEMM on an MI300X (VI-G): a unit of each of its dies."""

CONCCL_RP = register(
    Strategy(
        name="conccl_rp",
        order=Order.COLLECTIVE_FIRST,
        mover=Mover.DMA,
        recipe="the collective first, on copy engines; memory-bound GEMMs on fewer units",
        partition=Partition(UNITS, memory_bound_only=True),
    )
)
