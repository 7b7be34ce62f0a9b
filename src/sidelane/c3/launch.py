"""Launch of a caller's computation and collectives under a strategy: on streams of a GPU, or engines of a CPU.

A strategy that takes units has streams of its own (``c3.partitions``). Under green contexts the computation runs on one
of these, and so does its backward, since autograd runs that on the forward's stream. Tensors saved for backward are
recorded there, so that torch's allocator does not reuse them while the backward still reads them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from sidelane.c3.partitions import SMALLEST_SHARE, DevicePartitions, PairStreams, shares
from sidelane.c3.strategies import LaunchMode, Mover, Order, Strategy
from sidelane.choice import choose
from sidelane.choice.candidate import SM, everything
from sidelane.config import COMPUTE, NOTHING
from sidelane.errors import UnavailableError
from sidelane.program.collective import Kind
from sidelane.program.shape import CallShape
from sidelane.program.variant import Variant
from sidelane.session import Communicator, Work

T = TypeVar("T")
S = TypeVar("S")


def unsupported_reason(strategy: Strategy, device: torch.device) -> str:
    """Return the reason why a strategy cannot run callers' calls on a device; empty if it can.

    Here Sidelane is the library: under a strategy of the library's kernels a collective runs in its fastest way alone.
    """
    if not strategy.mover.as_asked:
        return "its collective is another call: make that under conccl or conccl_rp (copy_own_part=False, or in place)"
    if strategy.mover is Mover.SM:
        if device.type == "cpu":
            return "CPU ranks have no kernels for collectives"
        if torch.version.hip is not None:
            return "communicators do not move bytes by kernels on AMD GPUs"
    elif strategy.mover not in (Mover.LIBRARY, Mover.DMA):
        return "a communicator's calls are not told to run so"
    if strategy.partition is None:
        return ""
    partitions, absent = partitions_of(device)
    reason = absent if partitions is None else partitions.objection()
    return f"it takes compute units from the computation: {reason}" if reason else ""


def ways_of(strategy: Strategy, device: torch.device) -> tuple[LaunchMode, ...]:
    """Return a strategy with each number of units that is worth a try."""
    if strategy.partition is None:
        return (LaunchMode(strategy),)
    partitions, _ = partitions_of(device)
    units = SMALLEST_SHARE * 2 if partitions is None else partitions.units
    return tuple(LaunchMode(strategy, one) for one in shares(units))


def can_run(mode: LaunchMode, device: torch.device) -> bool:
    """Return True if callers' calls run so on a device; while a graph is captured, if its streams exist."""
    partition = mode.strategy.partition
    if partition is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        partitions, _ = partitions_of(device)
        return partitions is not None and partitions.is_ready(mode.units)
    return not unsupported_reason(mode.strategy, device) and mode in ways_of(mode.strategy, device)


@functools.cache
def partitions_of(device: torch.device) -> tuple[DevicePartitions | None, str]:
    """Return the partitions of a device, made once; None with the reason if it has none."""
    return DevicePartitions.on(device)


def run(
    way: LaunchMode,
    computes: Sequence[Callable[[], T]],
    collective: Callable[..., S],
    on: Sequence[Communicator],
) -> tuple[list[T], S]:
    """Run all; the next work on the current stream follows all of them.

    Args:
        way: strategy and units.
        computes: one computation or several, see ``overlap``.
        collective: function that makes the collectives, see ``overlap``.
        on: communicators on one device.

    Raises:
        UnavailableError: no such units here, or no streams of theirs yet and a graph is captured.
        Exceptions of the computations and the collective.
    """
    device, strategy = on[0].device, way.strategy
    numbers = range(len(computes))
    first = strategy.order is Order.COLLECTIVE_FIRST or (strategy.concurrent and device.type == "cpu")
    order = (len(computes), *numbers) if first else (*numbers, len(computes))
    if strategy.concurrent and device.type == "cuda":
        return _on_streams(way, computes, collective, on, device, order)
    comms = [StrategyCommunicator(comm, strategy, None) for comm in on]
    try:
        done = {number: computes[number]() if number < len(computes) else collective(*comms) for number in order}
    finally:
        for comm in comms:
            for work in comm.works:
                work.wait()
    return _sorted(done)


def _sorted(done: Mapping[int, Any]) -> tuple[list[Any], Any]:
    """Return the results of the computations, in their order, and of the collective."""
    *computed, result = (done[number] for number in range(len(done)))
    return computed, result


class StrategyCommunicator:
    """Communicator for a strategy: it adds ``beside`` to its collectives, which do not block on a CPU.

    Args:
        comm: communicator that makes them.
        strategy: strategy of the calls.
        aside: stream of the calls, if it is not the current one.
    """

    def __init__(self, comm: Communicator, strategy: Strategy, aside: torch.cuda.Stream | None) -> None:
        self._comm, self._aside, self._strategy = comm, aside, strategy
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
        if self._strategy.mover is Mover.SM and "variant" not in options:
            options["variant"] = variant_of(self._comm, self._strategy, Kind(name), *described(tensors))
        if self._aside is not None:
            self._aside.wait_stream(torch.cuda.current_stream(self._comm.device))
        with torch.cuda.stream(self._aside):
            work = function(*tensors, **options, async_op=self._async)
        if work is not None:
            self.works.append(work)


def variant_of(comm: Communicator, strategy: Strategy, kind: Kind, nbytes: int, dtype: str) -> str:
    """Return the variant of a call that kernels make, alike on all ranks.

    Args:
        comm: communicator that makes it.
        strategy: strategy of the call, for errors.
        kind: kind of the collective.
        nbytes: bytes of its largest tensor; of all, for lists.
        dtype: dtype of its elements.

    Raises:
        ValueError: no kernel of that kind runs the collective here.
    """
    found = [one.variant for one in everything(kind, comm.abilities) if one.implementation == SM]
    found = [name for name in found if not Variant.of(name).narrow and not Variant.of(name).pushes]
    if not found:
        allowed = "what kernels run on this machine, see sidelane info"
        absent = f"there is no kernel for {kind} here"
        raise ValueError(f"overlap: {strategy.name}: {absent} (value={kind}, allowed={allowed})")
    # As if in ordinary memory: the kind of memory must not make ranks choose differently.
    call = CallShape(kind, comm.world_size, nbytes, dtype, symmetric=False)
    if comm.world_size > 1:
        table = choose(comm.profile.profile, call, comm.abilities).table
        ranked = [candidate.variant for candidate, _ in table if candidate.variant in found]
        return (ranked or found)[0]
    return found[-1]  # of an all_reduce the one in two shots


def described(tensors: tuple[object, ...]) -> tuple[int, str]:
    """Return the bytes of the largest argument of a call, a tensor or a list of them, and the dtype of the elements."""
    sizes, dtypes = [0], ["bfloat16"]
    for given in tensors:
        listed = [
            one for one in (given if isinstance(given, list | tuple) else (given,)) if isinstance(one, torch.Tensor)
        ]
        sizes.append(sum(one.nbytes for one in listed))
        dtypes += [str(one.dtype).removeprefix("torch.") for one in listed]
    return max(sizes), dtypes[-1]


def _on_streams(
    way: LaunchMode,
    computes: Sequence[Callable[[], T]],
    collective: Callable[..., S],
    on: Sequence[Communicator],
    device: torch.device,
    order: Sequence[int],
) -> tuple[list[T], S]:
    caller = torch.cuda.current_stream(device)
    own = _own_streams(way, device, caller)
    collectives = _collective_streams(way, device, own, len(on))
    computing = _computing_streams(device, caller, own, len(computes))
    first, *others = collectives
    comms = [StrategyCommunicator(comm, way.strategy, one) for comm, one in zip(on, (None, *others), strict=True)]
    released = begun = torch.cuda.Event()
    released.record(caller)
    joined = [*collectives, *(stream for stream in computing if stream is not caller)]
    for stream in joined:
        stream.wait_event(released)
    done: dict[int, Any] = {}
    try:
        for number in order:
            stream = computing[number] if number < len(computing) else first
            if begun is not released:
                stream.wait_event(begun)  # the one before has been released, not ended
            if len(done) < len(order) - 1 and (done or stream is not caller):  # the caller's stream has been released
                begun = torch.cuda.Event()
                begun.record(stream)
            if number == len(computing):
                with torch.cuda.stream(first):
                    done[number] = collective(*comms)
            else:
                done[number] = _computed(computes[number], stream, caller)
    finally:
        for stream in joined:
            caller.wait_stream(stream)
    computed, result = _sorted(done)
    elsewhere = [one for one, stream in zip(computed, computing, strict=True) if stream is not caller]
    for part in tree_leaves((result, elsewhere)):
        if isinstance(part, torch.Tensor):
            part.record_stream(caller)
    return computed, result


def _computed(compute: Callable[[], T], stream: torch.cuda.Stream, caller: torch.cuda.Stream) -> T:
    if stream is caller:
        return compute()
    with torch.cuda.stream(stream), kept_for_backward(stream):
        return compute()


def _own_streams(way: LaunchMode, device: torch.device, caller: torch.cuda.Stream) -> PairStreams | None:
    """Return the streams of a way that takes units; None for one that does not.

    Raises:
        UnavailableError: no such units here, or no streams yet while a graph is captured, in which none are made.
    """
    partition = way.strategy.partition
    if partition is None or not way.units:
        return None
    partitions, absent = partitions_of(device)
    if partitions is None:
        raise UnavailableError(f"overlap: {way}: {absent}")
    if torch.cuda.is_current_stream_capturing() and not partitions.is_ready(way.units):
        raise UnavailableError(f"overlap: {way} has no streams yet, and a graph is captured: call it once before")
    usual = PairStreams(caller, _side_stream(device, False, 0), _side_stream(device, True, 0))
    return partitions.streams(way.units, usual, confine=way.strategy.mover.takes_units)


def _computing_streams(
    device: torch.device, caller: torch.cuda.Stream, own: PairStreams | None, count: int
) -> list[torch.cuda.Stream]:
    """Return a stream for each computation: the caller's for the first. Those under green contexts share one."""
    if own is not None:
        return [own.gemm] * count
    return [caller, *(_side_stream(device, False, -number) for number in range(1, count))]


def _collective_streams(
    way: LaunchMode, device: torch.device, own: PairStreams | None, count: int
) -> list[torch.cuda.Stream]:
    """Return a stream for each communicator. Those that own units have one, on which collectives follow each other."""
    urgent = bool(way.strategy.priority)
    if own is not None and way.strategy.mover.takes_units:
        return [own.urgent if urgent else own.collective] * count
    return [_side_stream(device, urgent, number) for number in range(count)]


@functools.cache
def _side_stream(device: torch.device, urgent: bool, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1 if urgent else 0)


@contextlib.contextmanager
def kept_for_backward(stream: torch.cuda.Stream) -> Iterator[None]:
    """Record tensors saved for backward meanwhile on a stream; existing hooks go on working."""
    if not torch.is_grad_enabled():
        yield
        return
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.is_cuda:
            tensor.record_stream(stream)
        return tensor if hooks is None else hooks[0](tensor)

    def unpack(packed: Any) -> torch.Tensor:
        found: torch.Tensor = packed if hooks is None else hooks[1](packed)
        return found

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
