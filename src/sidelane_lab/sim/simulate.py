"""Run a Program in virtual time on a described machine.

The host prepares commands and rings doorbells one after another (DMA collectives paper, 3.2: control, schedule);
engines then work through their queues at the same time, held by flags, links and memory; a last sync tells the host.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Mapping, Set
from types import MappingProxyType

from sidelane.errors import SidelaneError
from sidelane.execute.timeline import Interval
from sidelane.program.ir import (
    MOVES,
    EngineKind,
    Flag,
    Program,
    Queue,
    Reduce,
    Signal,
    SignalOp,
    Stamp,
    Wait,
    describe,
)
from sidelane_lab.machines.spec import HostThreads, Machine
from sidelane_lab.sim.flows import FlowNetwork
from sidelane_lab.sim.resources import Demand, Resources


class DeadlockError(SidelaneError):
    """Queues wait for flags that nobody will signal; the text names them."""


@dataclasses.dataclass(frozen=True, slots=True)
class SimulatedRun:
    """A simulated run.

    Attributes:
        time_us: from the call until the host knows that everything has finished.
        host_us: during which the busiest host thread worked.
        commands: that were executed.
        timeline: every interval, if it was asked for.
        stamps: virtual time of each (rank, slot), in microseconds.
        raised: when flags were signalled that callers wait for, likewise.
    """

    time_us: float
    host_us: float
    commands: int
    timeline: tuple[Interval, ...] = ()
    stamps: Mapping[tuple[int, int], float] = dataclasses.field(default_factory=dict)
    raised: Mapping[Flag, float] = dataclasses.field(default_factory=dict)


def simulate(
    program: Program,
    machine: Machine,
    *,
    edges: Set[Flag] = frozenset(),
    fires: Mapping[Flag, float] = MappingProxyType({}),
    record: bool = False,
) -> SimulatedRun:
    """Run a program once.

    Args:
        program: of any builder and transform; ranks are the GPUs of the machine in order.
        machine: with at least as many GPUs.
        edges: flags that a graph has as dependencies, not as commands: they take no time, and a queue that begins
            behind one branches off there, without a doorbell of its own.
        fires: when callers signal these flags, where they do so while the program is under way; others at once.
        record: keep the timeline.

    Raises:
        TypeError: no program, or no machine.
        ValueError: the machine has too few GPUs.
        DeadlockError: the program can not end.
    """
    if not isinstance(program, Program):
        raise TypeError(f"simulate: program (value={program!r}, allowed=a sidelane.program.ir.Program)")
    if not isinstance(machine, Machine):
        raise TypeError(f"simulate: machine (value={machine!r}, allowed=a Machine, as machine.load.named returns)")
    if program.world_size > machine.world_size:
        raise ValueError(f"simulate: ranks (value={program.world_size}, allowed=1..{machine.world_size})")
    return _Simulation(program, machine, edges, fires, record).run()


class _Lane:
    """One queue on its way."""

    __slots__ = ("behind_move", "held_since", "index", "queue")

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.index = 0
        self.behind_move = False
        self.held_since = 0.0


class _Simulation:
    def __init__(
        self, program: Program, machine: Machine, edges: Set[Flag], fires: Mapping[Flag, float], record: bool
    ) -> None:
        self.program = program
        self.edges, self.fires = edges, fires
        self.machine = machine
        self.dma = machine.dma
        self.resources = Resources(machine, program)
        self.moves = {
            (queue.rank, queue.engine): {
                index: self.resources.demand(command, queue.rank, queue.engine)
                for index, command in enumerate(queue.commands)
                if isinstance(command, (*MOVES, Reduce))
            }
            for queue in program.queues
        }
        self.network: FlowNetwork[tuple[_Lane, Demand, float, float]] = FlowNetwork(self.resources.capacities)
        self.record = record
        self.timeline: list[Interval] = []
        self.stamps: dict[tuple[int, int], float] = {}
        self.raised: dict[Flag, float] = {}
        self.flags: dict[Flag, int] = {}
        self.waiting: dict[Flag, list[tuple[_Lane, Wait]]] = {}
        self.events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self.sequence = 0
        self.now = 0.0
        self.ended = 0
        self.finish_us = 0.0
        self.host_us = 0.0

    def run(self) -> SimulatedRun:
        lanes = [_Lane(queue) for queue in self.program.queues]
        self._hand_over(lanes)
        self._loop()
        if self.ended < len(lanes):
            stuck = [lane for lane in lanes if lane.index < len(lane.queue.commands)]
            text = "; ".join(
                f"rank {lane.queue.rank} {lane.queue.engine} at {describe(lane.queue.commands[lane.index])}"
                for lane in stuck[:5]
            )
            raise DeadlockError(f"simulate: {len(stuck)} queues never end: {text}")
        count = sum(len(queue.commands) for queue in self.program.queues)
        return SimulatedRun(self.finish_us, self.host_us, count, tuple(self.timeline), self.stamps, self.raised)

    def _hand_over(self, lanes: list[_Lane]) -> None:
        """Let the host threads prepare the queues, in the program's order."""
        free: dict[int, float] = {}
        for lane in lanes:
            queue = lane.queue
            thread = self.machine.node_of(queue.rank) if self.dma.host is HostThreads.NODE else queue.rank
            if queue.engine.kind is EngineKind.CALLER:
                self._leave_to_caller(lane, thread, free)
            elif self._branches(queue):
                self._at(0.0, self._advance, lane)
            elif self.program.prelaunched:
                # Prepared before the call: the engine already looks at its trigger.
                self._at(0.0, self._advance, lane)
            else:
                start = free.get(thread, 0.0)
                # Stamps are free: what is predicted is the program without them. One more for the sync command.
                count = sum(not isinstance(command, Stamp) for command in queue.commands) + 1
                control = self.dma.control_us * count
                free[thread] = start + control + self.dma.doorbell_us
                ready = free[thread] + self.dma.fetch_us
                self._note("host", f"thread {thread}", f"prepare {queue.rank} {queue.engine}", start, start + control)
                self._note("host", f"thread {thread}", "doorbell", start + control, free[thread])
                self._note(f"rank {queue.rank}", str(queue.engine), "fetch", free[thread], ready)
                self._at(ready, self._advance, lane)
        self.host_us = max(free.values(), default=0.0)

    def _branches(self, queue: Queue) -> bool:
        first = queue.commands[0] if queue.commands else None
        return isinstance(first, Wait) and first.flag in self.edges

    def _leave_to_caller(self, lane: _Lane, thread: int, free: dict[int, float]) -> None:
        arrivals = [command.flag for command in lane.queue.commands if isinstance(command, Wait)]
        if arrivals:  # what callers read then takes no engine
            self.raised.update(dict.fromkeys(arrivals, math.inf))
            lane.index = len(lane.queue.commands)
            self.ended += 1
            return
        for command in lane.queue.commands:
            if isinstance(command, Signal) and command.flag in self.fires:
                self._at(self.fires[command.flag], self._raise, command)
                continue
            if self.fires:
                continue  # the computation that stands before the signal
            start = free.get(thread, 0.0)
            free[thread] = start + self.dma.trigger_us
            self._note("host", f"thread {thread}", f"trigger {lane.queue.rank}", start, free[thread])
            if isinstance(command, Signal):
                self._at(free[thread], self._raise, command)
        lane.index = len(lane.queue.commands)
        self.ended += 1

    def _loop(self) -> None:
        events, network = self.events, self.network
        while True:
            end = network.next_end(self.now)
            if events and events[0][0] <= end:
                self.now, _, action, arguments = heapq.heappop(events)
                action(*arguments)
            elif end < float("inf"):
                self.now = end
                for lane, move, start, began in network.pop_ended(end):
                    self._moved(lane, move, start, began)
            else:
                return

    def _advance(self, lane: _Lane) -> None:
        """Execute commands of a queue until one of them takes time."""
        commands, dma = lane.queue.commands, self.dma
        while lane.index < len(commands):
            command = commands[lane.index]
            if isinstance(command, Wait):
                lane.held_since = self.now
                if self._satisfied(command):  # looking costs the same when the flag is set already
                    self._at(self.now + self._wait_us(command), self._passed, lane)
                else:
                    self.waiting.setdefault(command.flag, []).append((lane, command))
                return
            elif isinstance(command, Signal):
                lane.index += 1
                signal_us = 0.0 if command.flag in self.edges else float(dma.signal_us)
                self._note_on(lane, f"signal {command.flag.rank}", self.now, self.now + signal_us)
                self._at(self.now + signal_us, self._signalled, lane, command)
                return
            elif isinstance(command, (*MOVES, Reduce)):
                move = self.moves[lane.queue.rank, lane.queue.engine][lane.index]
                if isinstance(command, Reduce):
                    issue = dma.reduce_us
                else:
                    issue = dma.next_copy_us if lane.behind_move else dma.copy_us
                self._at(self.now + issue + move.latency_us, self._begin, lane, move, self.now)
                return
            else:
                self.stamps[lane.queue.rank, command.slot] = self.now
                lane.index += 1
        self.ended += 1
        known = self.now + self.dma.sync_us
        self._note_on(lane, "sync", self.now, known)
        self.finish_us = max(self.finish_us, known)

    def _begin(self, lane: _Lane, move: Demand, start: float) -> None:
        self.network.start(move.nbytes, move.weights, (lane, move, start, self.now), self.now)

    def _moved(self, lane: _Lane, move: Demand, start: float, began: float) -> None:
        if self.record:
            label = describe(lane.queue.commands[lane.index])
            self._note_on(lane, label, start, self.now)
            for resource in move.weights:
                name = self.resources.names[resource]
                if name.startswith(("link", "port", "network")):
                    self._note("links", name, label, began, self.now)
        lane.behind_move = True
        lane.index += 1
        self._advance(lane)

    def _signalled(self, lane: _Lane, command: Signal) -> None:
        self._raise(command)
        lane.behind_move = False
        self._advance(lane)

    def _raise(self, command: Signal) -> None:
        flag, value = command.flag, command.value.at(1)
        if flag in self.raised:
            self.raised[flag] = self.now
        self.flags[flag] = value + (self.flags.get(flag, 0) if command.op is SignalOp.ADD else 0)
        still: list[tuple[_Lane, Wait]] = []
        for lane, wait in self.waiting.pop(flag, ()):
            if self._satisfied(wait):
                self._at(self.now + self._wait_us(wait), self._passed, lane)
            else:
                still.append((lane, wait))
        if still:
            self.waiting[flag] = still

    def _passed(self, lane: _Lane) -> None:
        self._note_on(lane, "wait", lane.held_since, self.now)
        lane.index += 1
        lane.behind_move = False
        self._advance(lane)

    def _wait_us(self, command: Wait) -> float:
        return 0.0 if command.flag in self.edges else float(self.dma.wait_us)

    def _satisfied(self, command: Wait) -> bool:
        return command.comparison.holds(self.flags.get(command.flag, 0), command.value.at(1))

    def _at(self, time: float, action: Callable[..., None], *arguments: object) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (time, self.sequence, action, arguments))

    def _note_on(self, lane: _Lane, label: str, start: float, end: float) -> None:
        self._note(f"rank {lane.queue.rank}", str(lane.queue.engine), label, start, end)

    def _note(self, group: str, lane: str, label: str, start: float, end: float) -> None:
        if self.record and end > start:
            self.timeline.append(Interval(group, lane, label, start, end))
