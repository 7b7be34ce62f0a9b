"""Run a caller's computation and collectives at once: the strategy is given, or expected to be best."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch

from sidelane.c3.launch import can_run, run, unsupported_reason
from sidelane.c3.partitions import SMALLEST_SHARE
from sidelane.c3.strategies import LaunchMode, Mover, choose_strategy, strategies
from sidelane.choice import choose
from sidelane.choice.selection import Selection
from sidelane.config import COMPUTE, NOTHING
from sidelane.errors import Page, explained, see
from sidelane.modes import keep_compilers_out
from sidelane.program.collective import Kind
from sidelane.program.shape import CallShape, Computation
from sidelane.session import Communicator
from sidelane.session.answers import lookup, remember

T = TypeVar("T")
S = TypeVar("S")

AUTO = "auto"

SizedCalls = tuple[str, int] | Sequence[tuple[str, int]]
"""Type of a collective and its bytes, or several: ``("all_gather", 1 << 28)``. Bytes are the gathered size of an
all_gather, the local buffer of the others."""

_OURS = sorted(
    (one for one in strategies() if one.mover in (Mover.LIBRARY, Mover.DMA)), key=lambda strategy: strategy.preference
)
KERNELS = tuple(one.name for one in strategies() if one.mover is Mover.SM)
"""Names of strategies whose bytes kernels move, if a device has them."""

NAMES = tuple(strategy.name for strategy in _OURS if strategy.partition is None)
"""Names of strategies for callers' calls, the best guess first (docs/lab/hardware.md, "GEMM next to a collective")."""

PARTITIONED = tuple(strategy.name for strategy in _OURS if strategy.partition is not None)
"""Names of strategies that take compute units from the computation, if a device can."""


@keep_compilers_out
@explained(Page.OVERLAP)
def overlap(
    compute: Callable[[], T],
    collective: Callable[[Any], S],
    on: Communicator,
    *,
    strategy: str = NAMES[0],
    units: int | None = None,
    beside: Computation | None = None,
    moves: SizedCalls = (),
) -> tuple[T, S]:
    """Run a computation and collectives at once; the caller's next work follows both. Collective.

    Args:
        compute: function that launches a computation on the current stream and reads nothing that the collectives
            write. Gradients flow through its result; if units are taken from it, its backward runs without them, too.
        collective: function that gets a communicator and makes collectives on it, without ``async_op``; they follow
            each other. Its other launches follow the first.
        on: the communicator.
        strategy: ``conccl``, ``c3_sp``, ``priority``, ``c3_base`` or ``serial``; on GPUs also ``c3_rp``, ``c3_sp_rp``,
            ``conccl_rp`` and ``sm_rp``, which take compute units from the computation (a graph can be captured once
            they have been used); or ``auto``, see :func:`choose_overlap`. ``sm_rp`` and ``sm_priority`` let Sidelane's
            kernels move the bytes, whatever is fastest. The same on all ranks.
        units: number of units that such a strategy takes; None: the fewest, 8.
        beside: description of ``compute`` (``Communicator.beside``); for ``auto``.
        moves: description of ``collective``: name and bytes of a collective, or several such pairs; for ``auto``.

    Returns:
        Results of both.

    Raises:
        ValueError: the strategy is unknown or not available here, no communicator is given, or options conflict.
        UnavailableError: the device does not give these units.
        Exceptions of the two. Work that has begun has ended by then, or follows in the order of the current stream.
    """
    if not isinstance(on, Communicator):
        raise _refused(f"overlap: on (value={on!r}, allowed=a Communicator)")
    if not callable(compute):
        raise _refused(f"overlap: compute (value={compute!r}, allowed=a callable)")
    _check_collective(collective)
    if strategy == AUTO:
        if beside is None or not moves or units is not None:
            raise _refused(
                f"overlap: beside, moves, units (value={beside}, {moves}, {units}, allowed=the first two with auto)"
            )
        way = choose_overlap(on, beside, moves).candidate
    else:
        if beside is not None or moves:
            raise _refused(f"overlap: beside, moves (value={beside}, {moves}, allowed=with strategy='auto')")
        way = possible(strategy, on.device, units)
    return run(way, compute, collective, on)


def _check_collective(collective: object) -> None:
    """Refuse a collective that would fail, or has run already, before the computation begins.

    Raises:
        ValueError: it is not callable, or takes another number of arguments than one.
    """
    allowed = "allowed=a callable that takes a communicator, such as lambda comm: comm.all_gather(output, input))"
    if not callable(collective):
        raise _refused(f"overlap: collective (value={collective!r}, {allowed}")
    if not isinstance(collective, FunctionType) or collective.__code__.co_flags & inspect.CO_VARARGS:
        return  # the signature of other callables is expensive to find out
    code = collective.__code__
    if not code.co_argcount - len(collective.__defaults__ or ()) <= 1 <= code.co_argcount:
        raise _refused(f"overlap: collective (value={collective.__qualname__} of {code.co_argcount}, {allowed}")


def choose_overlap(comm: Communicator, beside: Computation, moves: SizedCalls) -> Selection[LaunchMode]:
    """Return the strategy of ``overlap(..., strategy="auto")``; its ``reason`` explains it.

    Collectives that only move bytes take ``conccl``. So do reductions, but for large ones beside a compute-bound GEMM,
    for which Sidelane's kernels get compute units of their own (``sm_rp``), the more the longer they take. ``serial``
    is taken where copy engines take as long as both in turn. Times of collectives are those of ``sidelane tune``, or
    built in. While a graph is captured, units are taken only if that has been done before.

    Args:
        comm: communicator that makes the collectives.
        beside: computation next to them, from ``Communicator.beside``. Units are taken only from GEMMs of known shape.
        moves: collectives with their bytes.

    Raises:
        ValueError: there are no collectives, or a name or size is unknown.
    """
    pairs = _checked(beside, moves)
    capturing, question = _is_capturing(comm.device), (beside, pairs)
    found: Selection[LaunchMode] | None = None if capturing else lookup(comm, question)
    if found is None:
        found = choose_strategy(
            beside.us,
            beside.gemm,
            pairs,
            alone_us=_expected_us(comm, beside, pairs, NOTHING),
            engines_us=_expected_us(comm, beside, pairs, COMPUTE),
            is_possible=lambda mode: can_run(mode, comm.device),
        )
        if not capturing:
            remember(comm, question, found)
    return found


def _checked(beside: Computation, moves: SizedCalls) -> tuple[tuple[Kind, int], ...]:
    if not isinstance(beside, Computation):
        raise ValueError(f"overlap: beside (value={beside!r}, allowed=what Communicator.beside returns)")
    found = []
    for pair in [moves] if len(moves) == 2 and isinstance(moves[0], str) else list(moves):
        match pair:
            case (str(name), int(nbytes)) if name in Kind._value2member_map_ and nbytes > 0:
                found.append((Kind(name), nbytes))
            case _:
                raise ValueError(f"overlap: moves (value={pair!r}, allowed=(one of {', '.join(Kind)}, bytes above 0))")
    if not found:
        raise ValueError("overlap: moves (value=(), allowed=a collective and its bytes, or several)")
    return tuple(found)


def _expected_us(comm: Communicator, beside: Computation, moves: Sequence[tuple[Kind, int]], hint: str) -> float | None:
    """Return the expected time of all collectives alone, with ``hint`` as ``beside``; None if it is unknown."""
    dtype = "bfloat16" if beside.gemm is None else beside.gemm[3]
    calls = [CallShape(kind, comm.world_size, nbytes, dtype, in_place=True, beside=hint) for kind, nbytes in moves]
    times = [choose(comm.profile.profile, call, comm.abilities).table[0][1] for call in calls]
    return None if None in times else sum(us for us in times if us is not None)


def possible(name: str, device: torch.device, units: int | None = None) -> LaunchMode:
    """Return the strategy of that name with a number of units; None: the fewest.

    Raises:
        ValueError: there is none, it cannot run callers' calls on that device, or it takes no units.
    """
    found = next((strategy for strategy in strategies() if strategy.name == name), None)
    reason = "there is none of that name" if found is None else unsupported_reason(found, device)
    if found is None or reason:
        taking = "" if device.type == "cpu" else "".join(f", {other}" for other in (*PARTITIONED, *KERNELS))
        raise _refused(f"overlap: strategy (value={name!r}, allowed={', '.join(NAMES)}{taking}): {reason}")
    if units is None:
        return LaunchMode(found, 0 if found.partition is None else SMALLEST_SHARE)
    if found.partition is None or units < 1:
        raise _refused(f"overlap: units (value={units}, allowed=1 and more, of a strategy that takes some): {name}")
    return LaunchMode(found, units)


def _refused(text: str) -> ValueError:
    return see(ValueError(text), Page.OVERLAP)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
