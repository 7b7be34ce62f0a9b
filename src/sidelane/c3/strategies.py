"""Strategies as values, under which a computation and a collective run together, the table of all of them, and the rule
by which ``overlap(..., strategy="auto")`` chooses one.

A new strategy is a new line of the table here. ``c3.launch`` turns the value into launches; studies, the
simulator and the commands use it, too. The code that runs a strategy objects if a machine cannot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from enum import StrEnum

from sidelane.choice.selection import Selection
from sidelane.program.collective import ELEMENT_BYTES, REDUCING, Kind


class Order(StrEnum):
    """Order of the releases. ``serial``: the collective follows the GEMM on one stream."""

    SERIAL = "serial"
    GEMM_FIRST = "gemm first"
    COLLECTIVE_FIRST = "collective first"


class Mover(StrEnum):
    """Mover of the collective's bytes.

    LIBRARY: kernels of the vendor's library; on CPUs its threads.
    DMA: copy engines, by Sidelane. LIBRARY_DMA: copy engines, by the library.
    DMA_LEFT: DMA for an all-to-all that leaves own parts in the input.
    """

    LIBRARY = "library"
    DMA = "dma"
    DMA_LEFT = "dma_left"
    LIBRARY_DMA = "nccl_ce"

    @property
    def takes_units(self) -> bool:
        """True if it runs on compute units, as the GEMM does."""
        return self is Mover.LIBRARY

    @property
    def makes_whole_call(self) -> bool:
        """True if it makes exactly the requested call. Others do less: they are never chosen for a caller, and their
        times count for no ideal.
        """
        return self is not Mover.DMA_LEFT


@dataclasses.dataclass(frozen=True, slots=True)
class Partition:
    """Compute units that the GEMM does without for its whole run: of powers of two the best (ConCCL paper, V-B).

    They are shut off from it (green contexts), and a collective made of kernels runs on them alone.

    Attributes:
        memory_bound_only: a GEMM that is limited by its operations keeps all.
        requested: nothing is shut off; cuBLAS is asked to launch its GEMMs for as many units less.
    """

    memory_bound_only: bool = False
    requested: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run a pair.

    Attributes:
        name: name for callers and commands.
        code: name in result files, after the paper that has the strategy; commands take it, too.
        order: order of the releases.
        mover: mover of the collective's bytes.
        recipe: description in one line.
        priority: priority of the collective's stream: 1 puts it before the GEMM's wherever the device schedules, else
            0. A serial strategy has neither a priority nor a partition.
        partition: units taken from the GEMM; None: it competes for all.
        preference: rank in the order of trials without measurements; the lowest is first.
    """

    name: str
    code: str
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
    return tuple(dict.fromkeys(_BY_NAME.values()))


def named(name: str) -> Strategy:
    """Return the strategy of that name or code.

    Raises:
        ValueError: there is none.
    """
    if name not in _BY_NAME:
        raise ValueError(f"strategy: name (value={name!r}, allowed={', '.join(one.name for one in strategies())})")
    return _BY_NAME[name]


_BASE, _FIRST, _TURNS = Order.GEMM_FIRST, Order.COLLECTIVE_FIRST, Order.SERIAL
_TWO_STREAMS, _URGENT = "two streams, the collective first", "the GEMM first, the collective on an urgent stream"
_OWN_UNITS, _FIRST_ON_OWN_UNITS = (
    "the GEMM first, the collective on units of its own",
    "the collective first, on units of its own",
)

# Collectives on copy engines (ConCCL paper, VI). All but that for sums are released first: a copy inside one GPU (the
# caller's own part) would wait for the end of a GEMM that was released before it (results/notes/hardware.md, "Copy
# engines"). The library's are in their best case in place, if the collective has that.
_ENGINES, _FEWER = "the collective first, on copy engines", "; memory-bound GEMMs on fewer units"
_FEWER_UNITS = Partition(memory_bound_only=True)  # VI-F; the paper takes 8 on an MI300X, one of each of its dies (VI-G)
# An all-to-all without the copy of the own part inside a GPU, which serialises with the GEMM: it stays where it is
# (``copy_own_part=False``).
# A GEMM of cuBLAS has a block on each SM from its begin to its end: sums would wait for that end. The GEMM is released
# first, since the launches of a reduction take longer than its own (results/notes/overlap.md, "From an idle GPU").
_LIBRARY_ENGINES, _LEFT, _SUMS = (
    "the library's collective first, on copy engines",
    "; an all-to-all leaves own parts where they are",
    "the GEMM first, which leaves units to sums; the collective on copy engines",
)

_BY_NAME = {
    name: strategy
    for strategy in (
        Strategy(
            "serial", "serial", _TURNS, Mover.LIBRARY, "the GEMM, then the collective, on one stream", preference=50
        ),
        # Two streams (ConCCL paper, IV-C); resource partitioning, with units of its own for the collective (V-B);
        # schedule prioritisation (V-A).
        Strategy("compute_first", "c3_base", _BASE, Mover.LIBRARY, "two streams, the GEMM first", preference=40),
        Strategy("collective_first", "c3_sp", _FIRST, Mover.LIBRARY, _TWO_STREAMS, preference=20),
        Strategy("partition", "c3_rp", _BASE, Mover.LIBRARY, _OWN_UNITS, partition=Partition()),
        Strategy(
            "collective_first_partition", "c3_sp_rp", _FIRST, Mover.LIBRARY, _FIRST_ON_OWN_UNITS, partition=Partition()
        ),
        Strategy("priority", "priority", _BASE, Mover.LIBRARY, _URGENT, 1, preference=30),
        Strategy("copy_engines", "conccl", _FIRST, Mover.DMA, _ENGINES, preference=10),
        Strategy("copy_engines_partition", "conccl_rp", _FIRST, Mover.DMA, _ENGINES + _FEWER, partition=_FEWER_UNITS),
        Strategy("copy_engines_sums", "conccl_sums", _BASE, Mover.DMA, _SUMS, partition=Partition(requested=True)),
        Strategy("copy_engines_left", "conccl_left", _FIRST, Mover.DMA_LEFT, _ENGINES + _LEFT),
        Strategy("nccl_copy_engines", "nccl_ce", _FIRST, Mover.LIBRARY_DMA, _LIBRARY_ENGINES),
    )
    for name in (strategy.name, strategy.code)
}

# The rule of ``auto``. Copy engines move bytes beside a computation and take no units from it. They cannot add, so the
# sum of a large reduction waits for a GEMM that holds all units, unless cuBLAS leaves some of them to it.
# The rule was made after a look at the pairs of ``results`` (docs/guide/overlap.md, "Let Sidelane choose") that
# tests/c3/test_c3_rule.py decides again.

LARGE_BYTES = 256 << 20
"""Bytes from which on a reduction counts as large. Smaller ones were not measured beside a single GEMM."""

OPERATIONS_A_BYTE = 300
"""Operations for each byte of its operands from which on a GEMM counts as compute-bound: an H100 does 295 in bfloat16
in the time of a byte, an H200 206."""

SPARED = (4, 8, 16)
"""Numbers of units that cuBLAS is asked to leave to sums. GEMMs take as long without 4 of an H200's 132 units, and 3 to
7% longer without 16 (results/notes/overlap.md, "Reductions")."""

SUM_BYTES_A_US = 47e3
"""Bytes of a reduction that a unit adds up in a microsecond beside a GEMM: of two ranks it loads as many, and stores
half of them."""

ENGINES, SUMS, SERIAL = "copy_engines", "copy_engines_sums", "serial"
"""Names of the strategies that the rule prefers."""

GemmSizes = tuple[int, int, int, str]
"""Type of the shape of a GEMM: (m, n, k, dtype)."""


def choose_strategy(
    compute_us: float,
    product: GemmSizes | None,
    moves: Sequence[tuple[Kind, int]],
    *,
    alone_us: float | None,
    engines_us: float | None,
    is_possible: Callable[[LaunchMode], bool],
) -> Selection[LaunchMode]:
    """Return a strategy for a computation and collectives, none of which depends on another.

    1. ``serial``, if copy engines take as long as both in turn: hiding then gains nothing.
    2. ``copy_engines_sums``, if all collectives are large reductions whose time on copy engines is known, and the
       computation is a compute-bound GEMM; with the fewest units that add up all bytes in the time of the longer part.
    3. ``copy_engines``, else the first possible strategy in the order of preference.

    Args:
        compute_us: time of the computation alone in microseconds.
        product: shape of the computation; None: it is no GEMM, or nobody says.
        moves: collectives that follow each other, with their bytes: the gathered size of an all_gather, the local
            buffer of the others.
        alone_us: time of all collectives alone in microseconds, in the fastest way; None: unknown.
        engines_us: time of all collectives alone on copy engines; None: unknown.
        is_possible: function that returns True for a strategy, with its units, that can run.

    Raises:
        ValueError: no strategy is possible.

    >>> find = lambda kind, us: choose_strategy(
    ...     5569.0, (16384, 16384, 8192, "bfloat16"), [(kind, 512 << 20)], alone_us=us, engines_us=us,
    ...     is_possible=lambda mode: True,
    ... ).reason
    >>> find(Kind.ALL_GATHER, 765.0)
    'copy_engines: copy engines leave all units to the computation'
    >>> find(Kind.ALL_REDUCE, 1409.0)
    'copy_engines_sums with 4 units: they add up 512 MiB in 5569 us, beside a compute-bound GEMM'
    """
    serial = LaunchMode(named(SERIAL))
    if alone_us is not None and engines_us is not None:
        in_turn_us = compute_us + alone_us
        if engines_us >= in_turn_us and is_possible(serial):
            return Selection(
                serial, f"{serial}: copy engines take {engines_us:.4g} us, both in turn {in_turn_us:.4g} us"
            )
    large = all(kind in REDUCING and nbytes >= LARGE_BYTES for kind, nbytes in moves)
    if engines_us is not None and large and is_compute_bound(product):
        time_us, total_bytes = max(compute_us, engines_us), sum(nbytes for _, nbytes in moves)
        enough = (units for units in SPARED if units * SUM_BYTES_A_US * time_us >= total_bytes)
        sums = LaunchMode(named(SUMS), next(enough, SPARED[-1]))
        if is_possible(sums):
            return Selection(
                sums,
                f"{sums}: they add up {total_bytes >> 20} MiB in {time_us:.4g} us, beside a compute-bound GEMM",
            )
    for strategy in sorted(strategies(), key=lambda one: one.preference):
        if is_possible(mode := LaunchMode(strategy)):
            preferred, others = (
                "copy engines leave all units to the computation",
                f"the first in order of preference, as {ENGINES} does not run here",
            )
            return Selection(mode, f"{mode}: {preferred if strategy.name == ENGINES else others}")
    raise ValueError("choose_strategy: is_possible (value=no strategy, allowed=one or more)")


def is_compute_bound(product: GemmSizes | None) -> bool:
    """Return True for a GEMM that is limited by its operations: with more than ``OPERATIONS_A_BYTE``.

    >>> is_compute_bound((8192, 8192, 8192, "bfloat16")), is_compute_bound((64, 57344, 8192, "bfloat16"))
    (True, False)
    """
    if product is None or product[3] not in ELEMENT_BYTES:
        return False
    m, n, k, dtype = product
    return 2 * m * n * k > OPERATIONS_A_BYTE * (m * k + k * n + m * n) * ELEMENT_BYTES[dtype]
