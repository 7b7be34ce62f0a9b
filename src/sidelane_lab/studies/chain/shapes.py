"""Shapes of the chain's GEMMs, for those who measure them and those who predict them."""

from __future__ import annotations

from sidelane.c3.workload import Gemm
from sidelane.program.collective import ELEMENT_BYTES

WIDTH = 4096
"""Columns of what the producer makes, and its inner dimension: a layer of an 8B model."""

CONSUMED = 512
"""Columns of what the consumer makes: it reads all that was gathered, for an eighth of the producer's work a rank."""


def chain_gemms(nbytes: int, ranks: int, dtype: str) -> tuple[Gemm, Gemm]:
    """Producer and consumer of a chain whose gathered size is ``nbytes``.

    >>> [gemm.name for gemm in chain_gemms(1 << 20, 4, "bfloat16")]
    ['32x4096x4096', '128x512x4096']
    """
    rows = nbytes // (WIDTH * ELEMENT_BYTES[dtype])
    return Gemm(rows // ranks, WIDTH, WIDTH, dtype), Gemm(rows, CONSUMED, WIDTH, dtype)
