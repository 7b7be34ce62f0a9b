"""Registry of strategies, under which a computation and a collective run together.

A new strategy is a new line in one of the tables here. The studies, ``overlap``, the simulator and the commands use the
value; the code that runs a strategy objects if a machine cannot.
"""

from __future__ import annotations

import dataclasses

from sidelane.c3.strategy import Means, Mover, Order, Partition, Strategy

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
_PARTITION = Partition(memory_bound_only=True)  # VI-F; the paper takes 8 on an MI300X, one of each of its dies (VI-G)
# An all-to-all without the copy of the own part inside a GPU, which serialises with the GEMM: it stays in place
# (``copy_own_part=False``), or input and output are the same bytes, and sent bytes are staged first, which among two
# ranks is a copy of as many bytes.
_LEFT, _IN_PLACE = "; an all-to-all leaves own parts where they are", "; an all-to-all in place"

for _name, _mover, _recipe, _partition, _preference in (
    ("nccl_ce", Mover.LIBRARY_DMA, "the library's collective first, on copy engines", None, 100),
    ("conccl", Mover.DMA, _ENGINES, None, 10),
    ("conccl_rp", Mover.DMA, _ENGINES + _FEWER, _PARTITION, 100),
    ("conccl_left", Mover.DMA_LEFT, _ENGINES + _LEFT, None, 100),
    ("conccl_rp_left", Mover.DMA_LEFT, _ENGINES + _FEWER + _LEFT, _PARTITION, 100),
    ("conccl_in_place", Mover.DMA_IN_PLACE, _ENGINES + _IN_PLACE, None, 100),
):
    _strategy = Strategy(
        name=_name, order=_FIRST, mover=_mover, recipe=_recipe, partition=_partition, preference=_preference
    )
    register(_strategy)
