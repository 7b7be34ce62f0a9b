"""A computation and collectives of one's own at once, under a strategy that is given or learned."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from sidelane.c3.strategies import strategies
from sidelane.c3.strategy import Mover, Order, Strategy
from sidelane.collectives import Communicator, Work
from sidelane.config import COMPUTE, NOTHING
from sidelane.program.collective import Kind

T = TypeVar("T")
S = TypeVar("S")


def objection(strategy: Strategy) -> str:
    """Why a strategy is not for calls of one's own; empty if it is.

    Here Sidelane is the library: under a strategy of the library's kernels a collective runs as it is fastest alone.
    """
    if strategy.partition is not None:
        return "it takes compute units from the computation, which only studies do so far (sidelane c3)"
    if strategy.mover not in (Mover.LIBRARY, Mover.DMA):
        return "a communicator's calls are not told to run so"
    return ""


NAMES = tuple(
    strategy.name for strategy in sorted(strategies(), key=lambda one: one.preference) if not objection(strategy)
)
"""Strategies for calls of one's own, the best guess first (docs/lab/hardware.md, "GEMM next to a collective")."""


def overlap(
    compute: Callable[[], T],
    collective: Callable[..., S],
    on: Communicator | Sequence[Communicator],
    *,
    strategy: str = NAMES[0],
) -> tuple[T, S]:
    """Run a computation and collectives at once; the caller's next work follows both. Collective.

    Args:
        compute: launches on the current stream what reads nothing that the collectives write. Gradients flow through
            what it returns.
        collective: gets a communicator for each of ``on`` and makes collectives on it, without ``async_op``. Those on
            one follow each other, those on two lanes of a session do not. What else it launches follows the first.
        on: one, or several.
        strategy: ``conccl``, ``c3_sp``, ``priority``, ``c3_base`` or ``serial``; the same on all ranks.

    Returns:
        What both have returned.

    Raises:
        ValueError: there is no such strategy, or no communicator.
        Whatever the two raise. What has begun has ended by then, or follows in the order of the current stream.
    """
    done: tuple[T, S] = _run(possible(strategy), compute, collective, _several(on))
    return done


class Overlap:
    """Runs a computation and collectives at once, tries every strategy first, and keeps the fastest.

    It is for one pair that comes again and again, such as a step of a training loop. Each strategy runs once to warm
    up and ``rounds`` times to be timed, in turn; then the ranks agree once, by the slowest of them. All calls give
    right results. Inside a graph's capture nothing is timed: it holds what is chosen, or the first strategy.

    Args:
        on: see :func:`overlap`.
        strategies: names; all by default.
        rounds: how often each one is timed; the median counts.

    Attributes:
        strategy: what the next call runs.
        times_us: by strategy, of the slowest rank; empty until the ranks have agreed.

    Raises:
        ValueError: no strategies, one that there is not, or no rounds.
    """

    def __init__(
        self,
        on: Communicator | Sequence[Communicator],
        *,
        strategies: Sequence[str] = NAMES,
        rounds: int = 5,
    ) -> None:
        self._on, self._ways, self._rounds = _several(on), tuple(map(possible, strategies)), rounds
        if not self._ways or rounds < 1:
            raise ValueError(
                f"Overlap: strategies, rounds (value={tuple(strategies)}, {rounds}, allowed=one of each and more)"
            )
        self._trials = 0
        self._clocks: list[list[_Clock]] = [[] for _ in self._ways]
        self._best: Strategy | None = None if len(self._ways) > 1 else self._ways[0]
        self.times_us: dict[str, float] = {}

    @property
    def strategy(self) -> str:
        return (self._best or self._ways[self._trials % len(self._ways)]).name

    def __call__(self, compute: Callable[[], T], collective: Callable[..., S]) -> tuple[T, S]:
        """See :func:`overlap`."""
        if self._best is None and self._trials == len(self._ways) * (self._rounds + 1):
            self._agree()
        if self._best is not None or _is_capturing(self._on[0].device):
            done: tuple[T, S] = _run(self._best or self._ways[0], compute, collective, self._on)
            return done
        round, number = divmod(self._trials, len(self._ways))
        self._trials += 1  # also if this fails: the ranks count alike
        with _Clock(self._on[0].device) as clock:
            done = _run(self._ways[number], compute, collective, self._on)
        if round:
            self._clocks[number].append(clock)
        return done

    def __str__(self) -> str:
        """What is chosen, and why."""
        if not self.times_us:
            return f"{self.strategy}: not decided yet" if self._best is None else f"{self.strategy}: nothing to choose"
        return f"{self.strategy}: " + ", ".join(f"{name} {us:.0f} us" for name, us in self.times_us.items())

    def _agree(self) -> None:
        comm = self._on[0]
        medians = [statistics.median(clock.us() for clock in clocks) if clocks else math.inf for clocks in self._clocks]
        times = torch.tensor(medians, dtype=torch.float32, device=comm.device)
        comm.all_reduce(times, op="max")
        ways = sorted(zip(times.tolist(), range(len(self._ways)), strict=True))  # ties: the better guess
        by_way = [(us, self._ways[number]) for us, number in ways]
        self.times_us = {way.name: us for us, way in by_way}
        self._best = by_way[0][1]
        self._clocks.clear()


def possible(name: str) -> Strategy:
    """The strategy of that name.

    Raises:
        ValueError: there is none, or it is not for calls of one's own.
    """
    found = next((strategy for strategy in strategies() if strategy.name == name), None)
    reason = "there is none of that name" if found is None else objection(found)
    if found is None or reason:
        raise ValueError(f"overlap: strategy (value={name!r}, allowed={', '.join(NAMES)}): {reason}")
    return found


class _Beside:
    """A communicator whose collectives are told what runs next to them, and wait for nobody on a CPU."""

    def __init__(self, comm: Communicator, way: Strategy, aside: torch.cuda.Stream | None) -> None:
        self._comm, self._beside, self._aside = comm, COMPUTE if way.mover is Mover.DMA else NOTHING, aside
        self._async = comm.device.type == "cpu" and way.concurrent
        self.works: list[Work] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        return functools.partial(self._call, name, found) if name in Kind._value2member_map_ else found

    def _call(self, name: str, function: Callable[..., Work | None], *tensors: Any, **options: Any) -> None:
        if options.pop("async_op", False):
            raise ValueError(f"overlap: {name}: async_op (value=True, allowed=False): overlap waits for it")
        options.setdefault("beside", self._beside)
        if self._aside is not None:
            self._aside.wait_stream(torch.cuda.current_stream(self._comm.device))
        with torch.cuda.stream(self._aside):
            work = function(*tensors, **options, async_op=self._async)
        if work is not None:
            self.works.append(work)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run(
    way: Strategy, compute: Callable[[], T], collective: Callable[..., S], on: Sequence[Communicator]
) -> tuple[T, S]:
    device = on[0].device
    if way.concurrent and device.type == "cuda":
        return _on_streams(way, compute, collective, on, device)
    comms = [_Beside(comm, way, None) for comm in on]
    if not way.concurrent:
        return compute(), collective(*comms)
    try:
        told = collective(*comms)
        return compute(), told
    finally:
        for comm in comms:
            for work in comm.works:
                work.wait()


def _on_streams(
    way: Strategy,
    compute: Callable[[], T],
    collective: Callable[..., S],
    on: Sequence[Communicator],
    device: torch.device,
) -> tuple[T, S]:
    caller = torch.cuda.current_stream(device)
    aside, *others = streams = [_side_stream(device, bool(way.priority), number) for number in range(len(on))]
    comms = [_Beside(comm, way, stream) for comm, stream in zip(on, (None, *others), strict=True)]
    released = torch.cuda.Event()
    released.record(caller)
    for stream in streams:
        stream.wait_event(released)
    try:
        if way.order is Order.COLLECTIVE_FIRST:
            with torch.cuda.stream(aside):
                begun = torch.cuda.Event()
                begun.record(aside)
                told = collective(*comms)
            caller.wait_event(begun)  # the collective is released, not ended
            computed = compute()
        else:
            computed = compute()
            with torch.cuda.stream(aside):
                told = collective(*comms)
    finally:
        for stream in streams:
            caller.wait_stream(stream)
    for part in tree_leaves(told):
        if isinstance(part, torch.Tensor):
            part.record_stream(caller)
    return computed, told


@functools.cache
def _side_stream(device: torch.device, urgent: bool, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1 if urgent else 0)


class _Clock(contextlib.AbstractContextManager["_Clock"]):
    """How long the work of a block takes, on the current stream or on a CPU."""

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
        """Microseconds. Waits for the work."""
        if self._device.type == "cuda":
            self._events[1].synchronize()
            return 1e3 * float(self._events[0].elapsed_time(self._events[1]))
        return 1e6 * (self._ended - self._began)


def _several(on: Communicator | Sequence[Communicator]) -> tuple[Communicator, ...]:
    comms = (on,) if isinstance(on, Communicator) else tuple(on)
    if not comms or not all(isinstance(comm, Communicator) for comm in comms):
        raise ValueError(f"overlap: on (value={on!r}, allowed=a Communicator, or several)")
    return comms


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
