"""The calls of one rank on one communicator: made, and checked, with every byte that they write or must not write.

Public methods of ``Caller`` are the steps that a plan draws, with the step's arguments.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sidelane.collectives.work import Work
from sidelane.errors import MismatchError, PeerError, PeerTimeoutError
from sidelane.program.collective import Kind
from sidelane.session import Communicator
from sidelane.session.pools import SymmetricPool
from sidelane.session.prelaunch import Prelaunched
from soak.calls import Call, Form, Part
from soak.judge import Judge, Tally
from soak.memory import Bound, Memory
from soak.mistakes import MISTAKES, Wrong

Keyed = tuple[Call, int]
"""A call, and the key of its inputs."""


class Caller:
    """One rank's calls on one communicator.

    Args:
        communicator: makes the calls.
        memory: holds their tensors.
        judge: compares.
        tally: counts.
    """

    def __init__(self, communicator: Communicator, memory: Memory, judge: Judge, tally: Tally) -> None:
        self.communicator, self.memory, self.judge, self.tally = communicator, memory, judge, tally
        self.rank, self.world_size = communicator.rank, communicator.world_size
        self._on_cpu = communicator.device.type == "cpu"
        self._handles: dict[int, Prelaunched] = {}
        self._graphs: dict[int, Graph] = {}

    def once(self, call: Call, key: int, bound: Sequence[Bound] | None = None, *, asynchronous: bool = False) -> None:
        """Make a call and check it. ``bound``: on these tensors; None: on those that are its own."""
        bound = self.memory.bind(call) if bound is None else bound
        self.memory.fill(call, key, bound)
        work = self.start(call, bound, asynchronous=asynchronous)
        if work is not None:
            work.wait()
        self.check(call, key, bound)
        self.count(call.label)

    def overlap(self, calls: Sequence[Keyed], ends_blocking: bool) -> None:
        """Start several calls, wait for them in an order of this rank's own, and check each."""
        bound = [self.memory.bind(call) for call, _ in calls]
        for (call, key), each in zip(calls, bound, strict=True):
            self.memory.fill(call, key, each)
        last = len(calls) - 1
        works = [
            self.start(call, each, asynchronous=not (ends_blocking and number == last))
            for number, ((call, _), each) in enumerate(zip(calls, bound, strict=True))
        ]
        order = list(range(len(works)))
        random.Random(calls[0][1] + self.rank).shuffle(order)
        for number in order:
            work, (call, key) = works[number], calls[number]
            if work is not None:
                work.wait()
            self.check(call, key, bound[number])
            self.count(call.label)

    def barrier(self, synchronize: bool) -> None:
        """Meet; or, with ``synchronize``, wait on each host for its own calls."""
        if synchronize:
            self.communicator.synchronize()
        else:
            self.communicator.barrier()
            self.count("barrier")

    def allocate(self, nbytes: int) -> None:
        """Allocate another block of symmetric memory."""
        self.memory.allocate(nbytes)
        self.tally.allocations += self.rank == 0

    def refuse(self, mistake: str, culprit: int | None, call: Call, key: int, foreign: torch.Tensor | None) -> None:
        """Make a call that ``culprit`` gets wrong, or all do: errors are as promised, and nothing moves."""
        bound = self.memory.bind(call)
        self.memory.fill(call, key, bound)
        if culprit in (None, self.rank):
            (part,), (tensors,) = call.parts, bound
            options = {**details_of(part, self.rank), "variant": call.variant}
            wrong = Wrong(str(part.kind), list(tensors_of(part, tensors)), options, self.world_size, foreign)
            MISTAKES[mistake].change(wrong)
            self.must_raise(MISTAKES[mistake].errors, functools.partial(wrong.make, self.communicator), mistake)
        else:
            error = self.must_raise((PeerError,), lambda: self.start(call, bound), mistake)
            if isinstance(error, PeerError) and (isinstance(error, PeerTimeoutError) or error.ranks != (culprit,)):
                self.tally.fail(f"{mistake} on rank {culprit}: {_described(error)}")
                raise error
        self.check_untouched(call, key, bound)
        self.tally.refusals += self.rank == 0

    def differ(self, culprit: int, call: Call, another: Call, key: int) -> None:
        """Make a call while ``culprit`` makes another one: every rank gets a MismatchError, and nothing moves."""
        mine = another if self.rank == culprit else call
        bound = self.memory.bind(mine)
        self.memory.fill(mine, key, bound)
        what = f"{call} against {another} on rank {culprit}"
        self.must_raise((MismatchError,), lambda: self.start(mine, bound), what)
        self.check_untouched(mine, key, bound)
        self.tally.refusals += self.rank == 0

    def prepare(self, handle: int, call: Call, host_trigger: bool) -> None:
        """Make a handle. What an armed call of a GPU may not wait for, as the loading of kernels, happens here."""
        (bound,) = self.memory.bind(call)
        prepare = getattr(self.communicator, f"prepare_{call.parts[0].kind}")
        self._handles[handle] = prepare(bound.output, bound.input, variant=call.variant, host_trigger=host_trigger)

    def fire(
        self,
        handle: int,
        call: Call,
        key: int,
        from_host: bool,
        early: bool,
        misused: bool,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """Arm a handle, produce, trigger, check.

        Args:
            handle: a number given to ``prepare``, with the same ``call``.
            call: the handle's.
            key: of its inputs.
            from_host: trigger by a store of the host.
            early: the input is there before the handle is armed.
            misused: in between, try what an armed handle forbids.
            between: done while it is armed.
        """
        armed = self._handles[handle]
        bound = self.memory.bind(call)
        # If the input is not to be there yet, another one is: what fills it has run before, since a GPU can load no
        # kernel while a call is armed.
        self.memory.fill(call, key if early else key + 1, bound)
        armed.arm()
        between()
        if misused:
            for method in (armed.arm, self.communicator.barrier):
                self.must_raise((RuntimeError,), method, f"{method.__name__} while {armed} is armed")
        if not early:
            self.memory.fill(call, key, bound)
        if from_host:
            if not self._on_cpu:
                torch.cuda.current_stream().synchronize()  # the store waits for nobody
            armed.trigger_from_host()
            armed.wait()
        else:
            armed.trigger()
        self.check(call, key, bound)
        self.count("prelaunched")

    def finish(self, handle: int, call: Call, key: int, armed: bool) -> None:
        """Close a handle. One that is armed is cancelled on CPUs, and fired on GPUs, on all ranks alike."""
        closing = self._handles.pop(handle)
        if not armed:
            closing.close()
            self.must_raise((RuntimeError,), closing.arm, f"arm of {closing}, which was closed")
            return
        bound = self.memory.bind(call)
        self.memory.fill(call, key, bound)
        if not self._on_cpu:
            torch.cuda.current_stream().synchronize()  # closing fires it, behind nothing
        closing.arm()
        closing.close()
        (self.check_untouched if self._on_cpu else self.check)(call, key, bound)

    def capture(self, graph: int, calls: Sequence[Call], key: int, gone: int | None) -> None:
        """Make calls once, since a capture can allocate nothing, then capture them. ``gone``: the graph let go of."""
        for number, call in enumerate(calls):
            self.once(call, key + number)
        if gone is not None:
            torch.cuda.synchronize()
            del self._graphs[gone]
        bound = [self.memory.bind(call) for call in calls]
        self._graphs[graph] = Graph(self, calls, bound, record(lambda: self.start_all(calls, bound)))

    def replay(self, graph: int, keys: Sequence[int]) -> None:
        """Replay a graph with new inputs each time, without a look from the host."""
        for key in keys:
            self._graphs[graph].replay(key)
        self.count("replayed", len(self._graphs[graph].calls) * len(keys))

    def clear(self) -> None:
        """Let go of all graphs, once they have ended."""
        if self._graphs:
            torch.cuda.synchronize()
        self._graphs.clear()

    def start_all(self, calls: Sequence[Call], bound: Sequence[Sequence[Bound]]) -> None:
        """Make calls one after the other, unchecked."""
        for call, each in zip(calls, bound, strict=True):
            self.start(call, each)

    def start(self, call: Call, bound: Sequence[Bound], *, asynchronous: bool = False) -> Work | None:
        """Make a call, whatever its form."""
        options: dict[str, Any] = {"variant": call.variant, "beside": call.beside}
        pairs = list(zip(call.parts, bound, strict=True))
        if call.form is Form.BATCH:
            with self.communicator.batch(**options, async_op=asynchronous) as batch:
                for part, each in pairs:
                    getattr(batch, part.kind)(*tensors_of(part, each), **details_of(part), **output_of(part, each))
            return batch.work
        if asynchronous:
            options["async_op"] = True
        if not call.parts:
            return self.communicator.all_gather([], [], **options)
        method: Callable[..., Work | None] = getattr(self.communicator, call.parts[0].kind)
        if call.form is Form.ONE:
            ((part, each),) = pairs
            return method(*tensors_of(part, each), **details_of(part, self.rank), **output_of(part, each), **options)
        details = details_of(call.parts[0])
        if call.parts[0].kind is Kind.ALL_REDUCE:
            # Each of them in place or not: the call takes what is read and what is written.
            details["output"] = [each.output for each in bound]
        columns = zip(*(tensors_of(part, each) for part, each in pairs), strict=True)
        return method(*map(list, columns), **details, **options)

    def check(self, call: Call, key: int, bound: Sequence[Bound]) -> None:
        """Compare everything that a call wrote, what lies around it, and what it only read."""
        self.compare(call, key, bound, self.memory.expected, "")

    def check_untouched(self, call: Call, key: int, bound: Sequence[Bound]) -> None:
        """See that nothing of a call has moved."""
        self.compare(call, key, bound, self.memory.untouched, "untouched ")

    def compare(
        self, call: Call, key: int, bound: Sequence[Bound], expected: Callable[[Call, int, int], torch.Tensor], how: str
    ) -> None:
        """Compare the bytes of a call, which has ended, with what is expected of them."""
        same = self.judge.same
        for number, each in enumerate(bound):
            if each.guarded is not None:
                same(each.guarded, expected(call, key, number), call, f"{how}output", number, key)
            if each.is_read and each.filled is not None:
                same(each.filled, self.memory.input(call, key, number), call, f"{how}input", number, key)

    def must_raise(
        self, allowed: tuple[type[Exception], ...], call: Callable[[], object], what: str
    ) -> Exception | None:
        """Call what must be refused; return what it raised, if that is one of ``allowed``."""
        try:
            call()
        except allowed as error:
            return error
        except PeerError:
            raise  # a fault, not a refusal: the communicator is done for
        except Exception as error:
            raised = _described(error)
        else:
            raised = "no error was raised"
        self.tally.fail(f"{what}: {raised} (allowed={', '.join(each.__name__ for each in allowed)})")
        return None

    def count(self, label: str, calls: int = 1) -> None:
        """Count calls that were made and checked. Every rank makes them, one of them counts."""
        if self.rank == 0:
            self.tally.calls[label] += calls


class Graph:
    """Calls in a graph, with their tensors, and what makes them again."""

    def __init__(
        self, caller: Caller, calls: Sequence[Call], bound: Sequence[Sequence[Bound]], replay: Callable[[], None]
    ) -> None:
        self.bound, self.calls = bound, calls
        self._caller, self._replay = caller, replay

    def replay(self, key: int) -> None:
        """Replay once, on new inputs, and check it."""
        caller, calls = self._caller, list(zip(self.calls, self.bound, strict=True))
        for number, (call, each) in enumerate(calls):
            caller.memory.fill(call, key + number, each)
        self._replay()
        for number, (call, each) in enumerate(calls):
            caller.check(call, key + number, each)


Recorder = Callable[[Callable[[], None], SymmetricPool | None], Callable[[], None]]
"""Captures what a function does, with memory of a pool or of the graph's own for what is allocated meanwhile."""


def record(act: Callable[[], None], pool: SymmetricPool | None = None) -> Callable[[], None]:
    """Capture on a GPU, as a ``Recorder``. Waits for the device, and empties torch's cache."""
    graph = torch.cuda.CUDAGraph()
    handle: Any = None if pool is None else pool.id
    with torch.cuda.graph(graph, pool=handle):
        act()
    return graph.replay


def tensors_of(part: Part, bound: Bound) -> tuple[torch.Tensor | None, ...]:
    """Return the tensors of a part as the methods take them by position."""
    match part.kind:
        case Kind.BROADCAST:
            return (bound.output,)
        case Kind.ALL_REDUCE:
            return (bound.output if part.in_place else bound.input,)
        case _:
            return (bound.output, bound.input)


def output_of(part: Part, bound: Bound) -> dict[str, Any]:
    """Return the output of a part where it has a name of its own."""
    return {"output": bound.output} if part.kind is Kind.ALL_REDUCE and not part.in_place else {}


def details_of(part: Part, rank: int = 0) -> dict[str, Any]:
    """Return the arguments of a part that are no tensors."""
    details: dict[str, Any] = {}
    if part.op:
        details["op"] = part.op
    if part.kind in (Kind.BROADCAST, Kind.SCATTER, Kind.GATHER):
        details["root"] = part.root
    if part.splits:
        details["output_split_sizes"] = [row[rank] for row in part.splits]
        details["input_split_sizes"] = list(part.splits[rank])
    return details


def _described(error: Exception) -> str:
    return f"{type(error).__name__}{getattr(error, 'ranks', '')}: {error}"
