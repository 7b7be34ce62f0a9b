"""The strategies under which a GEMM and a collective run, as data, and the arithmetic that judges them.

A strategy says which of the two is released first and who moves the bytes; ``c3.run`` turns it into launches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from enum import StrEnum

LIBRARY = ("nccl", "gloo")
"""The vendor library's own kernels: whichever of these exists on the device. On CPUs its threads play their part."""


LEAST_GAIN = 0.05
"""Ideal gain below which a percentage of it says nothing."""


class Order(StrEnum):
    """Who is released first. ``serial``: the collective follows the GEMM on one stream."""

    SERIAL = "serial"
    GEMM_FIRST = "gemm first"
    COLLECTIVE_FIRST = "collective first"


@dataclasses.dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run a pair.

    Attributes:
        name: as ``c3.json`` has it.
        order: who is released first.
        implementations: names of the collective implementations that fit, in order of preference.
        recipe: one line for people.
    """

    name: str
    order: Order
    implementations: tuple[str, ...]
    recipe: str

    def implementation(self, available: Collection[str]) -> str | None:
        """The implementation that this strategy uses here, or None when there is none."""
        return next((name for name in self.implementations if name in available), None)


# Collective first in conccl too: where it has a copy inside one GPU (the caller's own chunk), that copy would wait for
# the end of a GEMM that was released before it (docs/lab/hardware.md, "Copy engines").
STRATEGIES: tuple[Strategy, ...] = (
    Strategy("serial", Order.SERIAL, LIBRARY, "the GEMM, then the library's collective, on one stream"),
    Strategy("c3_base", Order.GEMM_FIRST, LIBRARY, "two streams, the GEMM first (ConCCL paper, IV-C)"),
    Strategy("c3_sp", Order.COLLECTIVE_FIRST, LIBRARY, "two streams, library's collective first (ConCCL paper, V-A)"),
    Strategy("conccl", Order.COLLECTIVE_FIRST, ("dma",), "the collective on DMA engines (ConCCL paper, VI)"),
    Strategy("nccl_ce", Order.COLLECTIVE_FIRST, ("nccl_ce",), "the library's collective on copy engines"),
)


def named(name: str) -> Strategy:
    """The strategy of that name.

    Raises:
        ValueError: there is none.
    """
    for strategy in STRATEGIES:
        if strategy.name == name:
            return strategy
    raise ValueError(f"strategy: name (value={name!r}, allowed={', '.join(s.name for s in STRATEGIES)})")


def ideal_speedup(gemm_us: float, comm_us: float) -> float:
    """Speedup over serial execution if the shorter of the two were hidden entirely (ConCCL paper, section IV-B3).

    >>> round(ideal_speedup(1410.0, 1840.0), 3)
    1.766
    """
    return (gemm_us + comm_us) / max(gemm_us, comm_us)


def speedup(gemm_us: float, comm_us: float, time_us: float) -> float:
    """Speedup of a concurrent run over the sum of the isolated times."""
    return (gemm_us + comm_us) / time_us


def percent_of_ideal(gemm_us: float, comm_us: float, time_us: float) -> float | None:
    """How much of the ideal gain was reached: 0 is serial, 100 is the longer of the two alone; it can be negative.

    Undefined (None) where the shorter of the two is less than 5% of the longer: what is to be gained then is no
    more than what times differ by from run to run, and the number would be about nothing else.

    Args:
        gemm_us: isolated time of the GEMM.
        comm_us: isolated time of the collective. The strict number takes the fastest implementation that was measured,
            the papers' number takes the vendor library's.
        time_us: time of both together.

    >>> round(percent_of_ideal(1410.0, 1840.0, 1860.0), 1)
    97.5
    >>> percent_of_ideal(1410.0, 10.0, 1430.0) is None
    True
    """
    possible = ideal_speedup(gemm_us, comm_us) - 1.0
    if possible < LEAST_GAIN:
        return None
    return 100.0 * (speedup(gemm_us, comm_us, time_us) - 1.0) / possible
