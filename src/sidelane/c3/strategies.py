"""Registry of strategies, under which a computation and a collective run together.

A new strategy is a new entry here. The studies, ``overlap``, the simulator and the commands use the value; the code
that runs a strategy objects if a machine cannot.
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


# The baseline: one after the other on one stream.
register(
    Strategy(
        name="serial",
        order=Order.SERIAL,
        mover=Mover.LIBRARY,
        recipe="the GEMM, then the collective, on one stream",
        preference=50,
    )
)

# Two streams, the GEMM first (ConCCL paper, IV-C).
C3_BASE = register(
    Strategy(
        name="c3_base",
        order=Order.GEMM_FIRST,
        mover=Mover.LIBRARY,
        recipe="two streams, the GEMM first",
        preference=40,
    )
)
register(C3_BASE.by_kernels("sm_base"))

# Schedule prioritisation: the collective is launched first (ConCCL paper, V-A).
C3_SP = register(
    Strategy(
        name="c3_sp",
        order=Order.COLLECTIVE_FIRST,
        mover=Mover.LIBRARY,
        recipe="two streams, the collective first",
        preference=20,
    )
)
register(C3_SP.by_kernels("sm_sp"))

# The GEMM first, the collective on a stream of higher priority.
PRIORITY = register(
    Strategy(
        name="priority",
        order=Order.GEMM_FIRST,
        mover=Mover.LIBRARY,
        recipe="the GEMM first, the collective on an urgent stream",
        priority=1,
        preference=30,
    )
)
register(PRIORITY.by_kernels("sm_priority"))

# Resource partitioning: units of its own for the collective (ConCCL paper, V-B).
C3_RP = register(
    Strategy(
        name="c3_rp",
        order=Order.GEMM_FIRST,
        mover=Mover.LIBRARY,
        recipe="the GEMM first, the collective on units of its own",
        partition=Partition(),
    )
)
register(C3_RP.by_kernels("sm_rp"))

# Launched first, and on units of its own (ConCCL paper, V-B).
C3_SP_RP = register(
    Strategy(
        name="c3_sp_rp",
        order=Order.COLLECTIVE_FIRST,
        mover=Mover.LIBRARY,
        recipe="the collective first, on units of its own",
        partition=Partition(),
    )
)
register(C3_SP_RP.by_kernels("sm_sp_rp"))

# The collective first, next to a GEMM whose library counts on fewer units: no unit is closed to it.
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

# The library's collective with a varied number of CTAs (NCCL's ``max_ctas``): the best of them is reported.
#
# Fewer CTAs leave more of the GPU to the GEMM, and take longer. The GEMM may still use their units; under
# ``cta_target`` it leaves as many units as there are CTAs of its own accord.
register(C3_BASE.by_ctas("cta_base"))
register(C3_SP.by_ctas("cta_sp"))
register(PRIORITY.by_ctas("cta_priority"))
register(C3_TARGET.by_ctas("cta_target"))

# The library's collective on copy engines.
#
# In its best case: released first, and in place if the collective has that.
register(
    Strategy(
        name="nccl_ce",
        order=Order.COLLECTIVE_FIRST,
        mover=Mover.LIBRARY_DMA,
        recipe="the library's collective first, on copy engines",
    )
)

# The collective on copy engines (ConCCL paper, VI).
#
# It is released first: a copy inside one GPU (the caller's own chunk) would wait for the end of
# a GEMM that was released before it (docs/lab/hardware.md, "Copy engines").
CONCCL = register(
    Strategy(
        name="conccl",
        order=Order.COLLECTIVE_FIRST,
        mover=Mover.DMA,
        recipe="the collective first, on copy engines",
        preference=10,
    )
)

# The collective on copy engines, and memory-bound GEMMs on fewer units (ConCCL paper, VI-F).
MEMORY_BOUND_UNITS = 8
"""Units that the paper takes from a memory-bound GEMM on an MI300X (VI-G): one of each of its dies."""

CONCCL_RP = register(
    Strategy(
        name="conccl_rp",
        order=Order.COLLECTIVE_FIRST,
        mover=Mover.DMA,
        recipe="the collective first, on copy engines; memory-bound GEMMs on fewer units",
        partition=Partition(MEMORY_BOUND_UNITS, memory_bound_only=True),
    )
)

# All-to-alls on copy engines without the copy of the own part inside a GPU, which serialises with the GEMM.
#
# ``conccl_left``: the own part stays in place (``copy_own_part=False``). ``conccl_in_place``: input and output are
# the same bytes, and sent bytes are staged first, which among two ranks is a copy of as many bytes.
LEAVING = "an all-to-all leaves own parts where they are"

for _strategy, _name in ((CONCCL, "conccl_left"), (CONCCL_RP, "conccl_rp_left")):
    _recipe = f"{_strategy.recipe}; {LEAVING}"
    register(dataclasses.replace(_strategy, name=_name, mover=Mover.DMA_LEFT, recipe=_recipe, preference=100))
register(
    dataclasses.replace(
        CONCCL,
        name="conccl_in_place",
        mover=Mover.DMA_IN_PLACE,
        recipe=f"{CONCCL.recipe}; an all-to-all in place",
        preference=100,
    )
)
