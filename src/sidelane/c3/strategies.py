"""Strategies as values, under which a computation and a collective run together, and the registry of all of them.

A new strategy is a new line in one of the tables here. ``c3.launch`` turns the value into launches; studies, the
simulator and the commands use it, too. The code that runs a strategy objects if a machine cannot.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum

from sidelane.fields import an, one_of, optional, settle, switch, text, whole


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


_MEANS = one_of(Means)


@dataclasses.dataclass(frozen=True, slots=True)
class Partition:
    """Compute units that the GEMM does without for its whole run: of powers of two the best (ConCCL paper, V-B).

    Attributes:
        memory_bound_only: a GEMM that is limited by its operations keeps all.
        means: way in which they are taken.
    """

    memory_bound_only: bool = False
    means: Means = Means.SPLIT

    def __post_init__(self) -> None:
        settle(self, memory_bound_only=switch, means=_MEANS)

    def applies(self, memory_bound: bool) -> bool:
        """Return True if units are taken from a GEMM, which is limited by its bytes or is not.

        >>> Partition(memory_bound_only=True).applies(memory_bound=False)
        False
        """
        return memory_bound or not self.memory_bound_only


_ORDER, _MOVER, _PARTITION = one_of(Order), one_of(Mover), optional(an(Partition))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to run a pair.

    Attributes:
        name: name in commands and result files.
        order: order of the releases.
        mover: mover of the collective's bytes.
        recipe: description in one line.
        priority: priority of the collective's stream: 1 puts it before the GEMM's wherever the device schedules.
        partition: units taken from the GEMM; None: it competes for all.
        preference: rank in the order of trials without measurements; the lowest is first.

    Raises:
        ValueError: a priority or a partition for a serial strategy, or a priority that is neither 0 nor 1.
    """

    name: str
    order: Order
    mover: Mover
    recipe: str
    priority: int = 0
    partition: Partition | None = None
    preference: int = 100

    def __post_init__(self) -> None:
        settle(self, name=text, order=_ORDER, mover=_MOVER, recipe=text)
        settle(self, priority=whole, partition=_PARTITION, preference=whole)
        if self.priority not in (0, 1):
            raise ValueError(f"Strategy: priority (value={self.priority}, allowed=0, 1)")
        if not self.concurrent and (self.priority or self.partition):
            raise ValueError(f"Strategy: {self.name}: priority, partition (allowed=none of both where it is serial)")

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


_registered: dict[str, Strategy] = {}


def register(strategy: Strategy) -> Strategy:
    """Register a strategy.

    Raises:
        ValueError: another one has that name.
    """
    if _registered.setdefault(strategy.name, strategy) != strategy:
        raise ValueError(f"register: name (value={strategy.name!r}, allowed=what no strategy has)")
    return strategy


def strategies() -> tuple[Strategy, ...]:
    """Return all strategies, serial first, then by mover, and those with the fewest means first."""
    return tuple(sorted(_registered.values(), key=_place))


def named(name: str) -> Strategy:
    """Return the strategy of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in _registered:
        allowed = ", ".join(strategy.name for strategy in strategies())
        raise ValueError(f"strategy: name (value={name!r}, allowed={allowed})")
    return _registered[name]


def _place(strategy: Strategy) -> tuple[object, ...]:
    movers, orders = list(Mover), list(Order)
    means = (strategy.priority, strategy.partition is not None, orders.index(strategy.order))
    return strategy.concurrent, movers.index(strategy.mover), means, strategy.name


register(
    Strategy(
        name="serial",
        order=Order.SERIAL,
        mover=Mover.LIBRARY,
        recipe="the GEMM, then the collective, on one stream",
        preference=50,
    )
)

_BASE, _FIRST = Order.GEMM_FIRST, Order.COLLECTIVE_FIRST
_OF_KERNELS: tuple[tuple[str, Order, str, int, Partition | None, int], ...] = (
    # Two streams (ConCCL paper, IV-C); schedule prioritisation (V-A); and both with an urgent stream.
    ("base", _BASE, "two streams, the GEMM first", 0, None, 40),
    ("sp", _FIRST, "two streams, the collective first", 0, None, 20),
    ("priority", _BASE, "the GEMM first, the collective on an urgent stream", 1, None, 30),
    # Resource partitioning: units of its own for the collective (V-B).
    ("rp", _BASE, "the GEMM first, the collective on units of its own", 0, Partition(), 100),
    ("sp_rp", _FIRST, "the collective first, on units of its own", 0, Partition(), 100),
    # The GEMM's library counts on fewer units: no unit is closed to it.
    (
        *("target", _FIRST, "the collective first, a GEMM that leaves it units of its own accord"),
        *(0, Partition(means=Means.TARGET), 100),
    ),
)
"""Strategies of collectives by kernels: name, order, recipe, priority, partition and preference.

Each is one of the library's kernels, of Sidelane's, and, without units of its own, of the library's kernels with a
varied number of CTAs (NCCL's ``max_ctas``), the best of which is reported. Fewer CTAs leave more of the GPU to the
GEMM, and take longer. The GEMM may still use their units; under ``cta_target`` it leaves as many units as there are
CTAs of its own accord.
"""

for _name, _order, _recipe, _priority, _partition, _preference in _OF_KERNELS:
    _library = Strategy(
        name=_name if _name == "priority" else f"c3_{_name}",
        order=_order,
        mover=Mover.LIBRARY,
        recipe=_recipe,
        priority=_priority,
        partition=_partition,
        preference=_preference,
    )
    _ctas = f"{_recipe}; of the best number of CTAs"
    register(_library)
    register(dataclasses.replace(_library, name=f"sm_{_name}", mover=Mover.SM, preference=100))
    if _partition is None or _partition.means is Means.TARGET:
        _mover = Mover.LIBRARY_CTAS
        register(dataclasses.replace(_library, name=f"cta_{_name}", mover=_mover, recipe=_ctas, preference=100))

# Collectives on copy engines (ConCCL paper, VI). They are released first: a copy inside one GPU (the caller's own part)
# would wait for the end of a GEMM that was released before it (docs/lab/hardware.md, "Copy engines"). The library's
# are in their best case in place, if the collective has that.
_ENGINES, _FEWER = "the collective first, on copy engines", "; memory-bound GEMMs on fewer units"
_FEWER_UNITS = Partition(memory_bound_only=True)  # VI-F; the paper takes 8 on an MI300X, one of each of its dies (VI-G)
# An all-to-all without the copy of the own part inside a GPU, which serialises with the GEMM: it stays in place
# (``copy_own_part=False``), or input and output are the same bytes, and sent bytes are staged first, which among two
# ranks is a copy of as many bytes.
_LEFT, _IN_PLACE = "; an all-to-all leaves own parts where they are", "; an all-to-all in place"

for _name, _mover, _recipe, _partition, _preference in (
    ("nccl_ce", Mover.LIBRARY_DMA, "the library's collective first, on copy engines", None, 100),
    ("conccl", Mover.DMA, _ENGINES, None, 10),
    ("conccl_rp", Mover.DMA, _ENGINES + _FEWER, _FEWER_UNITS, 100),
    ("conccl_left", Mover.DMA_LEFT, _ENGINES + _LEFT, None, 100),
    ("conccl_rp_left", Mover.DMA_LEFT, _ENGINES + _FEWER + _LEFT, _FEWER_UNITS, 100),
    ("conccl_in_place", Mover.DMA_IN_PLACE, _ENGINES + _IN_PLACE, None, 100),
):
    _strategy = Strategy(
        name=_name, order=_FIRST, mover=_mover, recipe=_recipe, partition=_partition, preference=_preference
    )
    register(_strategy)
