"""Strategies as values, under which a computation and a collective run together, and the table of all of them.

A new strategy is a new line of the table here. ``c3.launch`` turns the value into launches; studies, the
simulator and the commands use it, too. The code that runs a strategy objects if a machine cannot.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum


class Order(StrEnum):
    """Order of the releases. ``serial``: the collective follows the GEMM on one stream."""

    SERIAL = "serial"
    GEMM_FIRST = "gemm first"
    COLLECTIVE_FIRST = "collective first"


class Mover(StrEnum):
    """Mover of the collective's bytes.

    LIBRARY: kernels of the vendor's library; on CPUs its threads.
    LIBRARY_CTAS: the same kernels with several numbers of workgroups, one after another.
    DMA: copy engines, by Sidelane. LIBRARY_DMA: copy engines, by the library. SM: Sidelane's kernels.
    DMA_LEFT: DMA for an all-to-all that leaves own parts in the input. DMA_IN_PLACE: DMA for one in place.
    """

    LIBRARY = "library"
    LIBRARY_CTAS = "nccl_ctas"
    DMA = "dma"
    DMA_LEFT = "dma_left"
    DMA_IN_PLACE = "dma_in_place"
    LIBRARY_DMA = "nccl_ce"
    SM = "sm"

    @property
    def takes_units(self) -> bool:
        """True if it runs on compute units, as the GEMM does."""
        return self in (Mover.LIBRARY, Mover.LIBRARY_CTAS, Mover.SM)

    @property
    def as_asked(self) -> bool:
        """True if it makes exactly the requested call. Others do less, or need the tensors elsewhere: they are never
        chosen for a caller, and their times count for no ideal.
        """
        return self not in (Mover.DMA_LEFT, Mover.DMA_IN_PLACE)


class Means(StrEnum):
    """Way to make a GEMM do without units.

    SPLIT: they are shut off from it (green contexts), and a collective made of kernels runs on them alone. TARGET: its
    library is asked to count on fewer (cuBLAS); no kernel owns the units.
    """

    SPLIT = "split"
    TARGET = "target"


@dataclasses.dataclass(frozen=True, slots=True)
class Partition:
    """Compute units that the GEMM does without for its whole run: of powers of two the best (ConCCL paper, V-B).

    Attributes:
        memory_bound_only: a GEMM that is limited by its operations keeps all.
        means: way in which they are taken.
    """

    memory_bound_only: bool = False
    means: Means = Means.SPLIT

    def applies(self, memory_bound: bool) -> bool:
        """Return True if units are taken from a GEMM, which is limited by its bytes or is not.

        >>> Partition(memory_bound_only=True).applies(memory_bound=False)
        False
        """
        return memory_bound or not self.memory_bound_only


@dataclasses.dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run a pair.

    Attributes:
        name: name in commands and result files.
        order: order of the releases.
        mover: mover of the collective's bytes.
        recipe: description in one line.
        priority: priority of the collective's stream: 1 puts it before the GEMM's wherever the device schedules, else
            0. A serial strategy has neither a priority nor a partition.
        partition: units taken from the GEMM; None: it competes for all.
        preference: rank in the order of trials without measurements; the lowest is first.
    """

    name: str
    order: Order
    mover: Mover
    recipe: str
    priority: int = 0
    partition: Partition | None = None
    preference: int = 100

    @property
    def concurrent(self) -> bool:
        """True if both run at once."""
        return self.order is not Order.SERIAL


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchMode:
    """A strategy, and the number of units that it takes from the computation."""

    strategy: Strategy
    units: int = 0

    def __str__(self) -> str:
        return self.strategy.name + (f" with {self.units} units" if self.units else "")


def strategies() -> tuple[Strategy, ...]:
    """Return all strategies, serial first, then by mover, and those with the fewest means first."""
    return tuple(_BY_NAME.values())


def named(name: str) -> Strategy:
    """Return the strategy of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in _BY_NAME:
        raise ValueError(f"strategy: name (value={name!r}, allowed={', '.join(_BY_NAME)})")
    return _BY_NAME[name]


def _position(strategy: Strategy) -> tuple[object, ...]:
    movers, orders = list(Mover), list(Order)
    means = (strategy.priority, strategy.partition is not None, orders.index(strategy.order))
    return strategy.concurrent, movers.index(strategy.mover), means, strategy.name


_BASE, _FIRST = Order.GEMM_FIRST, Order.COLLECTIVE_FIRST

_OF_KERNELS = (
    # Two streams (ConCCL paper, IV-C); schedule prioritisation (V-A); and both with an urgent stream.
    Strategy("c3_base", _BASE, Mover.LIBRARY, "two streams, the GEMM first", preference=40),
    Strategy("c3_sp", _FIRST, Mover.LIBRARY, "two streams, the collective first", preference=20),
    Strategy("priority", _BASE, Mover.LIBRARY, "the GEMM first, the collective on an urgent stream", 1, preference=30),
    # Resource partitioning: units of its own for the collective (V-B).
    Strategy(
        *("c3_rp", _BASE, Mover.LIBRARY, "the GEMM first, the collective on units of its own"), partition=Partition()
    ),
    Strategy("c3_sp_rp", _FIRST, Mover.LIBRARY, "the collective first, on units of its own", partition=Partition()),
    # The GEMM's library counts on fewer units: no unit is closed to it.
    Strategy(
        *("c3_target", _FIRST, Mover.LIBRARY, "the collective first, a GEMM that leaves it units of its own accord"),
        partition=Partition(means=Means.TARGET),
    ),
)
"""Strategies of collectives by the library's kernels. Each is one of Sidelane's kernels (``sm_``), too.

Without units of its own each is also one of the library's kernels with a varied number of CTAs (``cta_``; NCCL's
``max_ctas``), the best of which is reported. Fewer CTAs leave more of the GPU to the GEMM, and take longer. The GEMM
may still use their units; under ``cta_target`` it leaves as many units as there are CTAs of its own accord.
"""


def _with_mover(prefix: str, mover: Mover, more: str = "") -> list[Strategy]:
    return [
        dataclasses.replace(
            one, name=prefix + one.name.removeprefix("c3_"), mover=mover, recipe=one.recipe + more, preference=100
        )
        for one in _OF_KERNELS
        if mover is Mover.SM or one.partition is None or one.partition.means is Means.TARGET
    ]


# Collectives on copy engines (ConCCL paper, VI). They are released first: a copy inside one GPU (the caller's own part)
# would wait for the end of a GEMM that was released before it (docs/lab/hardware.md, "Copy engines"). The library's
# are in their best case in place, if the collective has that.
_ENGINES, _FEWER = "the collective first, on copy engines", "; memory-bound GEMMs on fewer units"
_FEWER_UNITS = Partition(memory_bound_only=True)  # VI-F; the paper takes 8 on an MI300X, one of each of its dies (VI-G)
# An all-to-all without the copy of the own part inside a GPU, which serialises with the GEMM: it stays in place
# (``copy_own_part=False``), or input and output are the same bytes, and sent bytes are staged first, which among two
# ranks is a copy of as many bytes.
_LEFT, _IN_PLACE = "; an all-to-all leaves own parts where they are", "; an all-to-all in place"

_ALL = (
    Strategy("serial", Order.SERIAL, Mover.LIBRARY, "the GEMM, then the collective, on one stream", preference=50),
    *_OF_KERNELS,
    *_with_mover("sm_", Mover.SM),
    *_with_mover("cta_", Mover.LIBRARY_CTAS, "; of the best number of CTAs"),
    Strategy("nccl_ce", _FIRST, Mover.LIBRARY_DMA, "the library's collective first, on copy engines"),
    Strategy("conccl", _FIRST, Mover.DMA, _ENGINES, preference=10),
    Strategy("conccl_rp", _FIRST, Mover.DMA, _ENGINES + _FEWER, partition=_FEWER_UNITS),
    Strategy("conccl_left", _FIRST, Mover.DMA_LEFT, _ENGINES + _LEFT),
    Strategy("conccl_rp_left", _FIRST, Mover.DMA_LEFT, _ENGINES + _FEWER + _LEFT, partition=_FEWER_UNITS),
    Strategy("conccl_in_place", _FIRST, Mover.DMA_IN_PLACE, _ENGINES + _IN_PLACE),
)
_BY_NAME = {strategy.name: strategy for strategy in sorted(_ALL, key=_position)}
