"""Calls that are submitted ahead of their data: handles of prelaunched calls, and graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sidelane.program.collective import Kind
from sidelane.session.pools import SymmetricPool
from sidelane.session.prelaunch import Prelaunched
from sidelane_lab.soak.calls import Caller
from sidelane_lab.soak.described import Call
from sidelane_lab.soak.memory import Bound
from sidelane_lab.soak.steps import Capture, Finish, Fire, Prepare
from sidelane_lab.soak.steps import Replay as Replayed


class Handles:
    """One rank's handles of one communicator."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._handles: dict[int, Prelaunched] = {}
        self._on_cpu = caller.communicator.device.type == "cpu"

    def prepare(self, step: Prepare) -> None:
        """Make a handle. What an armed call of a GPU may not wait for, as the loading of kernels, happens here."""
        (bound,) = self._caller.memory.bind(step.call)
        assert bound.output is not None
        assert bound.input is not None
        communicator = self._caller.communicator
        gathers = step.call.parts[0].kind is Kind.ALL_GATHER
        prepare = communicator.prepare_all_gather if gathers else communicator.prepare_all_to_all
        self._handles[step.handle] = prepare(
            bound.output, bound.input, variant=step.call.variant, host_trigger=step.host_trigger
        )

    def fire(self, step: Fire, between: Callable[[], None]) -> None:
        """Arm, produce, trigger, check. ``between``: what else is done while it is armed."""
        caller, handle = self._caller, self._handles[step.handle]
        bound = caller.memory.bind(step.call)
        # If the input is not to be there yet, another one is: what fills it has run before, since a GPU can load no
        # kernel while a call is armed.
        caller.memory.fill(step.call, step.key if step.early else step.key + 1, bound)
        handle.arm()
        between()
        if step.misused:
            for method in (handle.arm, caller.communicator.barrier):
                caller.must_raise((RuntimeError,), method, f"{method.__name__} while {handle} is armed")
        if not step.early:
            caller.memory.fill(step.call, step.key, bound)
        if step.from_host:
            if not self._on_cpu:
                torch.cuda.current_stream().synchronize()  # the store waits for nobody
            handle.trigger_from_host()
            handle.wait()
        else:
            handle.trigger()
        caller.check(step.call, step.key, bound)
        caller.count("prelaunched")

    def finish(self, step: Finish) -> None:
        """Close a handle. One that is armed is cancelled on CPUs, and fired on GPUs, on all ranks alike."""
        caller, handle = self._caller, self._handles.pop(step.handle)
        bound = caller.memory.bind(step.call)
        if not step.armed:
            handle.close()
            caller.must_raise((RuntimeError,), handle.arm, f"arm of {handle}, which was closed")
            return
        caller.memory.fill(step.call, step.key, bound)
        if not self._on_cpu:
            torch.cuda.current_stream().synchronize()  # closing fires it, behind nothing
        handle.arm()
        handle.close()
        if self._on_cpu:
            caller.check_untouched(step.call, step.key, bound)
        else:
            caller.check(step.call, step.key, bound)


Replay = Callable[[], None]
Recorder = Callable[[Callable[[], None], SymmetricPool | None], Replay]
"""Captures what a function does, with memory of a pool or of the graph's own for what is allocated meanwhile."""


def record(act: Callable[[], None], pool: SymmetricPool | None = None) -> Replay:
    """See ``Recorder``, for GPUs. Waits for the device, and empties torch's cache."""
    graph = torch.cuda.CUDAGraph()
    handle: Any = None if pool is None else pool.id
    with torch.cuda.graph(graph, pool=handle):
        act()
    return graph.replay


class Graph:
    """Calls in a graph, with their tensors.

    Args:
        caller: whose.
        calls: in their order.
        bound: their tensors.
        replay: makes them again.
    """

    def __init__(self, caller: Caller, calls: Sequence[Call], bound: Sequence[Sequence[Bound]], replay: Replay) -> None:
        self.bound, self.calls = bound, calls
        self._caller, self._replay = caller, replay

    def replay(self, key: int) -> None:
        """Once, on new inputs, and check it."""
        caller, calls = self._caller, list(zip(self.calls, self.bound, strict=True))
        for number, (call, each) in enumerate(calls):
            caller.memory.fill(call, key + number, each)
        self._replay()
        for number, (call, each) in enumerate(calls):
            caller.check(call, key + number, each)


class Graphs:
    """One rank's graphs of calls of one communicator. GPUs only."""

    def __init__(self, caller: Caller, most: int) -> None:
        self._caller, self._most = caller, most
        self._graphs: dict[int, Graph] = {}

    def capture(self, step: Capture) -> None:
        """Make the calls once, since a capture can allocate nothing, then capture them."""
        caller = self._caller
        for number, call in enumerate(step.calls):
            caller.once(call, step.key + number)
        if len(self._graphs) >= self._most:
            torch.cuda.synchronize()
            del self._graphs[next(iter(self._graphs))]
        bound = [caller.memory.bind(call) for call in step.calls]

        def act() -> None:
            for call, each in zip(step.calls, bound, strict=True):
                caller.start(call, each)

        self._graphs[step.graph] = Graph(caller, step.calls, bound, record(act))

    def replay(self, step: Replayed) -> None:
        """Replay one with new inputs each time, without a look from the host."""
        for key in step.keys:
            self._graphs[step.graph].replay(key)
        self._caller.count("replayed", len(step.calls) * len(step.keys))

    def clear(self) -> None:
        """Let go of all of them, once they have ended."""
        if self._graphs:
            torch.cuda.synchronize()
        self._graphs.clear()
