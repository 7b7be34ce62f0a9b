"""Rule of ``overlap(..., strategy="auto")``: a pure function of a computation and collectives, with the reason.

Copy engines move bytes beside a computation and take no units from it. They cannot add, so the sum of a large
all-reduce waits for a GEMM that holds all units; kernels on a few units of their own wait for nobody. The rule was made
after a look at 149 pairs of ``results`` (docs/guide/overlap.md, "Let Sidelane choose"), which tests/c3/test_c3_rule.py
decides again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sidelane.c3.strategies import LaunchMode, named, strategies
from sidelane.choice.selection import Selection
from sidelane.program.collective import ELEMENT_BYTES, Kind

LARGE_BYTES = 256 << 20
"""Bytes from which on an all-reduce counts as large. Smaller ones than of 512 MiB were not measured beside a GEMM."""

OPERATIONS_A_BYTE = 300
"""Operations for each byte of its operands from which on a GEMM counts as compute-bound: an H100 does 295 in bfloat16
in the time of a byte, an H200 206."""

REDUCTION_UNITS = ((0.4, 8), (0.6, 16))
"""Units for an all-reduce, after the largest ratio of its time to the GEMM's for which they are taken. Longer ones need
so many that the GEMM loses more: with ordinary tensors 21% of the time (results/h200x2/overlap-reductions.txt)."""

ENGINES, KERNELS, SERIAL = "conccl", "sm_rp", "serial"
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
    2. ``sm_rp``, if all collectives are large all-reduces and the computation is a GEMM that is compute-bound and long
       enough, with units after ``REDUCTION_UNITS``.
    3. ``conccl``, else the first possible strategy in the order of preference.

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
    'conccl: copy engines leave all units to the computation'
    >>> find(Kind.ALL_REDUCE, 1409.0)
    'sm_rp with 8 units: a large all-reduce beside a compute-bound GEMM, of 0.25 of its time'
    """
    serial = LaunchMode(named(SERIAL))
    if alone_us is not None and engines_us is not None:
        in_turn_us = compute_us + alone_us
        if engines_us >= in_turn_us and is_possible(serial):
            reason = f"{serial}: copy engines take {engines_us:.4g} us, both in turn {in_turn_us:.4g} us"
            return Selection(serial, reason)
    large = all(kind is Kind.ALL_REDUCE and nbytes >= LARGE_BYTES for kind, nbytes in moves)
    if alone_us is not None and large and is_compute_bound(product):
        ratio = alone_us / compute_us
        units = next((units for most, units in REDUCTION_UNITS if ratio <= most), 0)
        kernels = LaunchMode(named(KERNELS), units)
        if units and is_possible(kernels):
            reason = f"{kernels}: a large all-reduce beside a compute-bound GEMM, of {ratio:.2f} of its time"
            return Selection(kernels, reason)
    for strategy in sorted(strategies(), key=lambda one: one.preference):
        if is_possible(mode := LaunchMode(strategy)):
            preferred = "copy engines leave all units to the computation"
            others = f"the first in order of preference, as {ENGINES} does not run here"
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
