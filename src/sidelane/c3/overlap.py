"""Run a caller's computation and collectives at once: the strategy is given, expected to be best, or learned."""

from __future__ import annotations

import contextlib
import inspect
import math
import statistics
import time
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch

from sidelane.c3.launch import can_run, partitions_of, run, unsupported_reason
from sidelane.c3.partitions import SMALLEST_SHARE, units_to_try
from sidelane.c3.strategies import LaunchMode, Mover, Strategy, choose_strategy, strategies
from sidelane.choice import choose
from sidelane.choice.selection import Selection
from sidelane.config import COMPUTE, NOTHING
from sidelane.errors import Page, explained, see
from sidelane.modes import exclude_compilers
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
NAMES = tuple(strategy.name for strategy in _OURS if strategy.partition is None)
"""Names of strategies for calls, the best guess first ("GEMM next to a collective" in results/notes/hardware.md)."""

ON_GPUS = tuple(one.name for one in strategies() if one in _OURS and one.partition)
"""Names of strategies that take compute units from the computation, if a device can."""


@exclude_compilers
@explained(Page.OVERLAP)
def overlap(
    compute: Callable[[], T],
    collective: Callable[[Any], S],
    on: Communicator,
    *,
    strategy: str = NAMES[0],
    units: int | None = None,
    computation: Computation | None = None,
    moves: SizedCalls = (),
) -> tuple[T, S]:
    """Run a computation and collectives at once; the caller's next work follows both. Collective.

    Args:
        compute: function that launches a computation on the current stream and reads nothing that the collectives
            write. Gradients flow through its result; if units are taken from it, its backward runs without them, too.
        collective: function that gets a communicator and makes collectives on it, without ``async_op``; they follow
            each other. Its other launches follow the first.
        on: the communicator.
        strategy: ``copy_engines``, ``collective_first``, ``priority``, ``compute_first`` or ``serial``; on GPUs also
            those that end in ``partition`` and take compute units from the computation (a graph can be captured once
            they have been used): ``partition``, ``collective_first_partition`` and ``copy_engines_partition``;
            ``copy_engines_sums``, which asks cuBLAS to leave them to the sums of reductions; or ``auto``, see
            :func:`choose_overlap`. The same on all ranks.
        units: number of units that such a strategy takes; None: the fewest, 8, or 4 that cuBLAS leaves.
        computation: description of ``compute``, from ``Communicator.computation``; for ``auto``.
        moves: description of ``collective``: name and bytes of a collective, or several such pairs; for ``auto``.

    Returns:
        Results of both.

    Raises:
        ValueError: the strategy is unknown or not available here, no communicator is given, or options conflict.
        UnavailableError: the device does not give these units.
        Exceptions of the two. Work that has begun has ended by then, or follows in the order of the current stream.
    """
    _check_communicator(on)
    if strategy == AUTO:
        if computation is None or not moves or units is not None:
            raise _refused(
                "overlap: strategy auto takes computation and moves, no units (missing: "
                f"{', '.join(['computation'] * (computation is None) + ['moves'] * (not moves)) or '-'}; {units=})"
            )
        way = choose_overlap(on, computation, moves).candidate
    else:
        if computation is not None or moves:
            raise _refused(f"overlap: computation and moves need strategy='auto' (value={computation}, {moves})")
        way = possible(strategy, on.device, units, (AUTO,))
    return _run(way, compute, collective, on)


def _run(way: LaunchMode, compute: Callable[[], T], collective: Callable[[Any], S], comm: Communicator) -> tuple[T, S]:
    if not callable(compute):
        raise _refused(f"overlap: compute (value={compute!r}, allowed=a callable)")
    _check_collective(collective)
    return run(way, compute, collective, comm)


def _check_collective(collective: object) -> None:
    """Refuse a collective that would fail, or has run already, before the computation begins.

    Raises:
        ValueError: it is not callable, or takes another number of arguments than one.
    """
    allowed = "allowed=a callable of one communicator), for example lambda comm: comm.all_gather(output, input)"
    if not callable(collective):
        raise _refused(f"overlap: collective (value={collective!r}, {allowed}")
    if not isinstance(collective, FunctionType) or collective.__code__.co_flags & inspect.CO_VARARGS:
        return  # the signature of other callables is expensive to find out
    code = collective.__code__
    if not code.co_argcount - len(collective.__defaults__ or ()) <= 1 <= code.co_argcount:
        raise _refused(f"overlap: collective (value={collective.__qualname__} of {code.co_argcount}, {allowed}")


def choose_overlap(comm: Communicator, computation: Computation, moves: SizedCalls) -> Selection[LaunchMode]:
    """Return the strategy of ``overlap(..., strategy="auto")``; its ``reason`` explains it.

    Collectives that only move bytes take ``copy_engines``. So do reductions, but for large ones beside a compute-bound
    GEMM, from which cuBLAS is asked to leave compute units to the sums (``copy_engines_sums``), as many as add up the
    bytes in time. cuBLAS may then take another kernel, whose last bits differ: ``Config.deterministic`` and
    ``torch.use_deterministic_algorithms`` rule that out. ``serial`` is taken where copy engines take as long as both in
    turn. Times of collectives are those of ``sidelane tune``, or built in.

    Args:
        comm: communicator that makes the collectives.
        computation: computation next to them, from ``Communicator.computation``. Units are taken only from GEMMs of
            known shape.
        moves: collectives with their bytes.

    Raises:
        ValueError: there are no collectives, or a name or size is unknown.
    """
    pairs = _checked(computation, moves)
    fixed = comm.config.deterministic or torch.are_deterministic_algorithms_enabled()
    capturing, question = _is_capturing(comm.device), (computation, pairs, fixed)
    found: Selection[LaunchMode] | None = None if capturing else lookup(comm, question)
    if found is None:
        found = choose_strategy(
            computation.us,
            computation.gemm,
            pairs,
            alone_us=_expected_us(comm, computation, pairs, NOTHING),
            engines_us=_expected_us(comm, computation, pairs, COMPUTE),
            is_possible=lambda mode: can_run(mode, comm.device) and not (fixed and mode.units),
        )
        if not capturing:
            remember(comm, question, found)
    return found


def _checked(computation: Computation, moves: SizedCalls) -> tuple[tuple[Kind, int], ...]:
    if not isinstance(computation, Computation):
        raise ValueError(f"overlap: computation must be a result of Communicator.computation (value={computation!r})")
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


def _expected_us(
    comm: Communicator, computation: Computation, moves: Sequence[tuple[Kind, int]], hint: str
) -> float | None:
    """Return the expected time of all collectives alone, with ``hint`` as ``beside``; None if it is unknown."""
    dtype = "bfloat16" if computation.gemm is None else computation.gemm[3]
    calls = [CallShape(kind, comm.world_size, nbytes, dtype, in_place=True, beside=hint) for kind, nbytes in moves]
    times = [choose(comm.profile.profile, call, comm.abilities).table[0][1] for call in calls]
    return None if None in times else sum(us for us in times if us is not None)


class Overlap:
    """Runner of a computation and collectives at once: it tries every strategy first, and keeps the fastest.

    It is for one pair that is repeated, such as a step of a training loop. Each strategy runs once to warm
    up and ``rounds`` times to be timed, in turn; then the ranks agree once, by the slowest of them. All calls give
    correct results. Inside a graph's capture nothing is timed: it holds the chosen strategy, or the first one.

    Args:
        on: the communicator.
        strategies: names; by default all that take no units from the computation. A strategy that does is tried with
            each power of two of units from 8 to half of them.
        rounds: number of timed runs of each strategy; the median counts.

    Attributes:
        strategy: strategy of the next call.
        times_us: times of the slowest rank in microseconds, by strategy; empty until the ranks have agreed.

    Raises:
        ValueError: there are no strategies, an unknown one, or no rounds.
    """

    def __init__(
        self,
        on: Communicator,
        *,
        strategies: Sequence[str] = NAMES,
        rounds: int = 5,
    ) -> None:
        if isinstance(strategies, str):
            raise _refused(f"Overlap: strategies (value={strategies!r}, allowed=several names, {NAMES})")
        _check_communicator(on)
        self._on, self._rounds = on, rounds
        self._ways = [way for name in strategies for way in _ways_of(possible(name, on.device).strategy, on.device)]
        if not self._ways or rounds < 1 or rounds % 1:  # it would never decide
            raise _refused(
                f"Overlap: strategies, rounds (value={tuple(strategies)}, {rounds}, allowed=one of each and more)"
            )
        self._trials = 0
        self._clocks: list[list[_Clock]] = [[] for _ in self._ways]
        self._best: LaunchMode | None = None if len(self._ways) > 1 else self._ways[0]
        self.times_us: dict[str, float] = {}

    @property
    def strategy(self) -> str:
        return str(self._best or self._ways[self._trials % len(self._ways)])

    @exclude_compilers
    def __call__(self, compute: Callable[[], T], collective: Callable[[Any], S]) -> tuple[T, S]:
        """See :func:`overlap`."""
        capturing = _is_capturing(self._on.device)
        if self._best is None and not capturing and self._trials == len(self._ways) * (self._rounds + 1):
            self._agree()
        if self._best is not None or capturing:
            return _run(self._best or self._ways[0], compute, collective, self._on)
        round, number = divmod(self._trials, len(self._ways))
        self._trials += 1  # also if this fails: the ranks count alike
        with _Clock(self._on.device) as clock:
            done = _run(self._ways[number], compute, collective, self._on)
        if round:
            self._clocks[number].append(clock)
        return done

    def __str__(self) -> str:
        """Return the chosen strategy, with the reason."""
        if not self.times_us:
            return f"{self.strategy}: not decided yet" if self._best is None else f"{self.strategy}: nothing to choose"
        return f"{self.strategy}: " + ", ".join(f"{name} {us:.0f} us" for name, us in self.times_us.items())

    def _agree(self) -> None:
        medians = [statistics.median(clock.us() for clock in clocks) if clocks else math.inf for clocks in self._clocks]
        times = torch.tensor(medians, dtype=torch.float32, device=self._on.device)
        self._on.all_reduce(times, op="max")
        ways = sorted(zip(times.tolist(), range(len(self._ways)), strict=True))  # ties: the better guess
        by_way = [(us, self._ways[number]) for us, number in ways]
        self.times_us = {str(way): us for us, way in by_way}
        self._best = by_way[0][1]
        self._clocks.clear()


def possible(name: str, device: torch.device, units: int | None = None, others: tuple[str, ...] = ()) -> LaunchMode:
    """Return the strategy of that name with a number of units; None: the fewest. Errors also list ``others``.

    Raises:
        ValueError: there is none, it cannot run callers' calls on that device, or it takes no units.
    """
    found = next((one for one in strategies() if name in (one.name, one.code)), None)
    reason = "there is none of that name" if found is None else unsupported_reason(found, device)
    if found is None or reason:
        taking = "" if device.type == "cpu" else "".join(f", {other}" for other in ON_GPUS)
        raise _refused(f"overlap: strategy (value={name!r}, allowed={', '.join((*NAMES, *others))}{taking}): {reason}")
    if units is None:
        return LaunchMode(found, 0 if found.partition is None else units_to_try(found.partition, 2 * SMALLEST_SHARE)[0])
    if found.partition is None or units < 1:
        raise _refused(f"overlap: units (value={units}) of {name}, which takes no such number")
    return LaunchMode(found, units)


class _Clock(contextlib.AbstractContextManager["_Clock"]):
    """Timer of the work of a block, on the current stream or on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> _Clock:
        if self._device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record(torch.cuda.current_stream(self._device))
        self._began = time.perf_counter()
        return self

    def __exit__(self, *failure: object) -> None:
        self._ended = time.perf_counter()
        if self._device.type == "cuda":
            self._events[1].record(torch.cuda.current_stream(self._device))

    def us(self) -> float:
        """Return the time in microseconds. Waits for the work."""
        if self._device.type == "cuda":
            self._events[1].synchronize()
            return 1e3 * float(self._events[0].elapsed_time(self._events[1]))
        return 1e6 * (self._ended - self._began)


def _refused(text: str) -> ValueError:
    return see(ValueError(text), Page.OVERLAP)


def _check_communicator(on: object) -> None:
    if not isinstance(on, Communicator):
        raise _refused(f"overlap: on (value={on!r}, allowed=a Communicator)")


def _ways_of(strategy: Strategy, device: torch.device) -> list[LaunchMode]:
    """Return a strategy with each number of units that is worth a try."""
    partitions, _ = partitions_of(device)
    if strategy.partition is None or partitions is None:
        return [LaunchMode(strategy)]
    return [LaunchMode(strategy, units) for units in units_to_try(strategy.partition, partitions.units)]


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
