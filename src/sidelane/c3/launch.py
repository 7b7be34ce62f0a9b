"""Launch of a caller's computation and collectives under a strategy: on streams of a GPU, or engines of a CPU.

A strategy that takes units has streams of its own (``c3.partitions``). Under green contexts the computation runs on one
of these, and so does its backward, since autograd runs that on the forward's stream. Tensors saved for backward are
recorded there, so that torch's allocator does not reuse them while the backward still reads them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from sidelane.c3.partitions import DevicePartitions, PairStreams, units_to_try, why_none
from sidelane.c3.strategies import LaunchMode, Mover, Order, Strategy
from sidelane.config import COMPUTE, NOTHING
from sidelane.errors import UnavailableError
from sidelane.execute.cuda.partition import spared
from sidelane.program.collective import Kind
from sidelane.session import Communicator, Work

T = TypeVar("T")
S = TypeVar("S")


def unsupported_reason(strategy: Strategy, device: torch.device) -> str:
    """Return the reason why a strategy cannot run callers' calls on a device; empty if it can.

    Here Sidelane is the library: under a strategy of the library's kernels a collective runs in its fastest way alone.
    """
    if not strategy.mover.makes_whole_call:
        return "its collective is another call: use copy_engines, with copy_own_part=False or in place"
    if strategy.mover not in (Mover.LIBRARY, Mover.DMA):
        return "a communicator's calls are not told to run so"
    if strategy.partition is None:
        return ""
    reason = why_none(strategy.partition, *partitions_of(device))
    return f"it takes compute units from the computation: {reason}" if reason else ""


def can_run(mode: LaunchMode, device: torch.device) -> bool:
    """Return True if callers' calls run so on a device; while a graph is captured, if its streams exist."""
    if mode.strategy.partition is None:
        return not mode.units and not unsupported_reason(mode.strategy, device)
    partitions, _ = partitions_of(device)
    if partitions is None or mode.units not in units_to_try(mode.strategy.partition, partitions.units):
        return False
    if not mode.strategy.partition.requested and torch.cuda.is_current_stream_capturing():
        return partitions.is_ready(mode.units)
    return not unsupported_reason(mode.strategy, device)


@functools.cache
def partitions_of(device: torch.device) -> tuple[DevicePartitions | None, str]:
    """Return the partitions of a device, made once; None with the reason if it has none."""
    return DevicePartitions.on(device)


def run(way: LaunchMode, compute: Callable[[], T], collective: Callable[[Any], S], comm: Communicator) -> tuple[T, S]:
    """Run both; the next work on the current stream follows them.

    Args:
        way: strategy and units.
        compute: computation, see ``overlap``.
        collective: function that makes the collectives, see ``overlap``.
        comm: communicator that it gets.

    Raises:
        UnavailableError: no such units here, or no streams of theirs yet and a graph is captured.
        Exceptions of the computation and the collective.
    """
    strategy, on_cpu = way.strategy, comm.device.type == "cpu"
    if strategy.partition is not None and strategy.partition.requested:
        compute = spared(way.units)(compute)
    collective_first = strategy.order is Order.COLLECTIVE_FIRST or (strategy.concurrent and on_cpu)
    asked = StrategyCommunicator(comm, strategy)
    if strategy.concurrent and not on_cpu:
        return _on_streams(way, compute, functools.partial(collective, asked), comm.device, collective_first)
    try:
        if collective_first:
            result = collective(asked)
            return compute(), result
        return compute(), collective(asked)
    finally:
        for work in asked.works:
            work.wait()


class StrategyCommunicator:
    """Communicator for a strategy: it adds ``beside`` to its collectives, which do not block on a CPU.

    Args:
        comm: communicator that makes them.
        strategy: strategy of the calls.
    """

    def __init__(self, comm: Communicator, strategy: Strategy) -> None:
        self._comm, self._strategy = comm, strategy
        self._beside = COMPUTE if strategy.mover is Mover.DMA else NOTHING
        self._async = comm.device.type == "cpu" and strategy.concurrent
        self.works: list[Work] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        return functools.partial(self._call, name, found) if name in Kind._value2member_map_ else found

    def _call(self, name: str, function: Callable[..., Work | None], *tensors: Any, **options: Any) -> None:
        if options.pop("async_op", False):
            raise ValueError(f"overlap: {name}: async_op (value=True, allowed=False): overlap waits for it")
        options.setdefault("beside", self._beside)
        work = function(*tensors, **options, async_op=self._async)
        if work is not None:
            self.works.append(work)


def _on_streams(
    way: LaunchMode,
    compute: Callable[[], T],
    collective: Callable[[], S],
    device: torch.device,
    collective_first: bool,
) -> tuple[T, S]:
    caller = torch.cuda.current_stream(device)
    streams = _streams_of(way, device, caller)
    moving = streams.urgent if way.strategy.priority else streams.collective
    released = torch.cuda.Event()
    released.record(caller)
    joined = [moving] if streams.gemm is caller else [moving, streams.gemm]
    for stream in joined:
        stream.wait_event(released)
    first, second = (moving, streams.gemm) if collective_first else (streams.gemm, moving)
    begun = released
    if first is not caller:
        begun = torch.cuda.Event()
        begun.record(first)

    def follow() -> None:
        if begun is not released:
            second.wait_event(begun)  # the first has been released, not ended

    try:
        if collective_first:
            result = _moved(collective, moving)
            follow()
            computed = _computed(compute, streams.gemm, caller)
        else:
            computed = _computed(compute, streams.gemm, caller)
            follow()
            result = _moved(collective, moving)
    finally:
        for stream in joined:
            caller.wait_stream(stream)
    for part in tree_leaves((result, computed if streams.gemm is not caller else None)):
        if isinstance(part, torch.Tensor):
            part.record_stream(caller)
    return computed, result


def _moved(collective: Callable[[], S], stream: torch.cuda.Stream) -> S:
    with torch.cuda.stream(stream):
        return collective()


def _computed(compute: Callable[[], T], stream: torch.cuda.Stream, caller: torch.cuda.Stream) -> T:
    if stream is caller:
        return compute()
    with torch.cuda.stream(stream), saved_for_backward(stream):
        return compute()


def _streams_of(way: LaunchMode, device: torch.device, caller: torch.cuda.Stream) -> PairStreams:
    """Return the streams of a way: the computation is on the caller's stream unless units are shut off from it.

    Raises:
        UnavailableError: no such units here, or no streams yet while a graph is captured, in which none are made.
    """
    usual = PairStreams(caller, side_stream(device, False), side_stream(device, True))
    if way.strategy.partition is None or way.strategy.partition.requested or not way.units:
        return usual
    partitions, absent = partitions_of(device)
    if partitions is None:
        raise UnavailableError(f"overlap: {way}: {absent}")
    if torch.cuda.is_current_stream_capturing() and not partitions.is_ready(way.units):
        raise UnavailableError(f"overlap: {way} has no streams yet, and a graph is captured: call it once before")
    return partitions.streams(way.units, usual, confine=way.strategy.mover.takes_units)


@functools.cache
def side_stream(device: torch.device, urgent: bool) -> torch.cuda.Stream:
    """Return the stream of a device for work next to the caller's, the same for every call."""
    return torch.cuda.Stream(device, priority=-1 if urgent else 0)


@contextlib.contextmanager
def saved_for_backward(stream: torch.cuda.Stream) -> Iterator[None]:
    """Record tensors saved for backward meanwhile on a stream; existing hooks go on working."""
    if not torch.is_grad_enabled():
        yield
        return
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.is_cuda:
            tensor.record_stream(stream)
        return tensor if hooks is None else hooks[0](tensor)

    def unpack(packed: Any) -> Any:
        return packed if hooks is None else hooks[1](packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
