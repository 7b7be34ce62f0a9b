"""Run a Program in virtual time on a described machine.

The host prepares commands and rings doorbells one after another (DMA collectives paper, 3.2: control, schedule);
engines then work through their queues at the same time, held by flags, links and memory; a last sync tells the host.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType

from sidelane.errors import SidelaneError
from sidelane.execute.timeline import Interval
from sidelane.program import ir
from sidelane.program.caching import Once
from sidelane_lab.machines.spec import HostThreads, Machine
from sidelane_lab.sim.flows import VirtualTime
from sidelane_lab.sim.fold import Fold
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
    raised: Mapping[ir.Flag, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class KernelPart:
    """The commands of a queue that one kernel executes: up to the next one, or to the end.

    Its flags, what it adds up and the begins of its copies take no time of their own. What it sends to another node
    leaves a latency behind it: the flag behind it is seen that much later, while the queue goes on.

    Attributes:
        start_us: time until its first command.
        slowdown: bytes that pass for each of its commands' bytes (more than 1 for a protocol with flags among them).
        link_share: share of a link's bandwidth that it reaches within a node.
    """

    start_us: float
    slowdown: float = 1.0
    link_share: float = 1.0


def simulate(
    program: ir.Program,
    machine: Machine,
    *,
    edges: Set[ir.Flag] = frozenset(),
    fires: Mapping[ir.Flag, float] = MappingProxyType({}),
    kernels: Mapping[ir.Flag, KernelPart] = MappingProxyType({}),
    calls: Mapping[tuple[int, ir.Engine], Sequence[int]] = MappingProxyType({}),
    fold: Fold | None = None,
    record: bool = False,
) -> SimulatedRun:
    """Run a program once.

    Args:
        program: of any builder and transform; ranks are the GPUs of the machine in order.
        machine: with at least as many GPUs.
        edges: flags that a graph has as dependencies, not as commands: they take no time, and a queue that begins
            behind one branches off there, without a doorbell of its own.
        fires: when callers signal these flags, where they do so while the program is under way; others at once.
        kernels: kernels that begin behind a wait for these flags.
        calls: indices of the commands in a queue at which the host hands over the next part of it, call after call;
            queues that are not named are handed over as a whole, in the first call.
        fold: ranks that stand for all others, whose queues need not be there; None: all ranks.
        record: keep the timeline.

    Raises:
        TypeError: no program, or no machine.
        ValueError: the machine has too few GPUs.
        DeadlockError: the program can not end.
    """
    if not isinstance(program, ir.Program):
        raise TypeError(f"simulate: program (value={program!r}, allowed=a sidelane.program.ir.Program)")
    if not isinstance(machine, Machine):
        raise TypeError(f"simulate: machine (value={machine!r}, allowed=a Machine, as machine.load.named returns)")
    if program.world_size > machine.world_size:
        raise ValueError(f"simulate: ranks (value={program.world_size}, allowed=1..{machine.world_size})")
    return _Simulation(program, machine, edges, fires, kernels, calls, fold, record).run()


class _Lane:
    """One queue on its way."""

    __slots__ = ("behind", "held_since", "index", "kernel", "queue", "ready", "sent")

    def __init__(self, queue: ir.Queue) -> None:
        self.queue = queue
        self.index = 0
        self.kernel: KernelPart | None = None
        self.ready: dict[int, float] = {}  # when the host has handed over what begins there
        self.sent = (-1, 0.0)  # rank, and latency of what a kernel has sent there last
        self.behind: ir.Move | ir.Reduce | None = None  # what it has just moved
        self.held_since = 0.0


_Passing = tuple[_Lane, Demand, float, float]
"""A move on its way: its queue and its demand; when the engine took it, and when its first byte passed."""


class _Simulation:
    def __init__(
        self,
        program: ir.Program,
        machine: Machine,
        edges: Set[ir.Flag],
        fires: Mapping[ir.Flag, float],
        kernels: Mapping[ir.Flag, KernelPart],
        calls: Mapping[tuple[int, ir.Engine], Sequence[int]],
        fold: Fold | None,
        record: bool,
    ) -> None:
        self.program = program
        self.edges, self.fires, self.kernels, self.calls, self.fold = edges, fires, kernels, calls, fold
        self.machine, self.record = machine, record
        self.dma = machine.dma
        self.resources = Resources(machine, program, fold)
        if record or kernels or self.dma.next_copy_us:
            self.moves = {(queue.rank, queue.engine): self._demands(queue) for queue in program.queues}
        else:
            every = zip(program.queues, _joined_once(program), strict=True)
            self.moves = {(queue.rank, queue.engine): self._joined_demands(queue, parts) for queue, parts in every}
        self.time: VirtualTime[_Passing] = VirtualTime(self.resources.capacities, self._passed_bytes)
        self.timeline: list[Interval] = []
        self.stamps: dict[tuple[int, int], float] = {}
        self.raised: dict[ir.Flag, float] = {}
        self.flags: dict[ir.Flag, int] = {}
        self.waiting: dict[ir.Flag, list[tuple[_Lane, ir.Wait]]] = {}
        self.ended = 0
        self.finish_us = 0.0
        self.host_us = 0.0

    def _joined_demands(self, queue: ir.Queue, parts: Sequence[_Joined]) -> dict[int, Demand]:
        found: dict[int, Demand] = {}
        for index, command, count, further in parts:
            one = self.resources.demand(command, queue.rank, queue.engine)
            found[index] = Demand(one.nbytes + further, one.weights, one.latency_us, count)
        return found

    def _demands(self, queue: ir.Queue) -> dict[int, Demand]:
        found: dict[int, Demand] = {}
        kernel: KernelPart | None = None
        for index, command in enumerate(queue.commands):
            if isinstance(command, (*ir.MOVES, ir.Reduce)):
                share = 1.0 if kernel is None else kernel.link_share
                found[index] = self.resources.demand(command, queue.rank, queue.engine, share)
            elif self.kernels and isinstance(command, ir.Wait):
                kernel = self.kernels.get(command.flag, kernel)
        return found

    def run(self) -> SimulatedRun:
        lanes = [_Lane(queue) for queue in self.program.queues]
        self._hand_over(lanes)
        while self.time.step():
            pass
        if self.ended < len(lanes):
            stuck = [lane for lane in lanes if lane.index < len(lane.queue.commands)]
            text = "; ".join(
                f"rank {lane.queue.rank} {lane.queue.engine} at {ir.describe(lane.queue.commands[lane.index])}"
                for lane in stuck[:5]
            )
            raise DeadlockError(f"simulate: {len(stuck)} queues never end: {text}")
        count = sum(len(queue.commands) for queue in self.program.queues)
        return SimulatedRun(self.finish_us, self.host_us, count, tuple(self.timeline), self.stamps, self.raised)

    def _hand_over(self, lanes: list[_Lane]) -> None:
        """Let the host threads prepare the queues, call after call, in the program's order."""
        free: dict[int, float] = {}
        parts: list[tuple[int, int, _Lane, int, int]] = []
        for number, lane in enumerate(lanes):
            queue = lane.queue
            if queue.engine.kind is ir.EngineKind.CALLER:
                self._leave_to_caller(lane, self._thread(queue), free)
                continue
            begins = self.calls.get((queue.rank, queue.engine), (0,))
            for call, begin in enumerate(begins):
                end = begins[call + 1] if call + 1 < len(begins) else len(queue.commands)
                parts.append((call, number, lane, begin, end))
            self.time.at(0.0, self._advance, lane)
        for _, _, lane, begin, end in sorted(parts, key=lambda part: part[:2]):
            queue = lane.queue
            if self._branches(queue, begin) or self.program.prelaunched:
                continue  # prepared before the call, it already looks at its trigger
            thread = self._thread(queue)
            start = free.get(thread, 0.0)
            # Stamps are free: what is predicted is the program without them. One more for the sync command.
            count = sum(not isinstance(command, ir.Stamp) for command in queue.commands[begin:end]) + 1
            control = self.dma.control_us * count
            free[thread] = start + control + self.dma.doorbell_us
            ready = lane.ready[begin] = free[thread] + self.dma.fetch_us
            self._note("host", f"thread {thread}", f"prepare {queue.rank} {queue.engine}", start, start + control)
            self._note("host", f"thread {thread}", "doorbell", start + control, free[thread])
            self._note(f"rank {queue.rank}", str(queue.engine), "fetch", free[thread], ready)
        self.host_us = max(free.values(), default=0.0)

    def _thread(self, queue: ir.Queue) -> int:
        return self.machine.node_of(queue.rank) if self.dma.host is HostThreads.NODE else queue.rank

    def _branches(self, queue: ir.Queue, begin: int) -> bool:
        first = queue.commands[begin] if begin < len(queue.commands) else None
        return isinstance(first, ir.Wait) and (first.flag in self.edges or first.flag in self.kernels)

    def _leave_to_caller(self, lane: _Lane, thread: int, free: dict[int, float]) -> None:
        arrivals = [command.flag for command in lane.queue.commands if isinstance(command, ir.Wait)]
        if arrivals:  # what callers read then takes no engine
            self.raised.update(dict.fromkeys(arrivals, math.inf))
            lane.index = len(lane.queue.commands)
            self.ended += 1
            return
        for command in lane.queue.commands:
            if isinstance(command, ir.Signal) and command.flag in self.fires:
                self.time.at(self.fires[command.flag], self._raise, command)
                continue
            if self.fires:
                continue  # the computation that stands before the signal
            start = free.get(thread, 0.0)
            free[thread] = start + self.dma.trigger_us
            self._note("host", f"thread {thread}", f"trigger {lane.queue.rank}", start, free[thread])
            if isinstance(command, ir.Signal):
                self.time.at(free[thread], self._raise, command)
        lane.index = len(lane.queue.commands)
        self.ended += 1

    def _advance(self, lane: _Lane) -> None:
        """Execute commands of a queue until one of them takes time."""
        commands, dma = lane.queue.commands, self.dma
        while lane.index < len(commands):
            if lane.ready and (ready := lane.ready.pop(lane.index, 0.0)) > self.time.now:
                self.time.at(ready, self._advance, lane)
                return
            command = commands[lane.index]
            if isinstance(command, ir.Wait):
                lane.held_since = self.time.now
                if self._satisfied(command):  # looking costs the same when the flag is set already
                    self.time.at(self.time.now + self._wait_us(lane, command), self._passed, lane)
                else:
                    self.waiting.setdefault(self._stands(command.flag), []).append((lane, command))
                return
            elif isinstance(command, ir.Signal):
                lane.index += 1
                if lane.kernel is not None:
                    rank, latency_us = lane.sent
                    later = self.time.now + (latency_us if command.flag.rank == rank else 0.0)
                    self.time.at(later, self._raise, command)
                    continue
                signal_us = 0.0 if command.flag in self.edges else float(dma.signal_us)
                self._note_on(lane, f"signal {command.flag.rank}", self.time.now, self.time.now + signal_us)
                self.time.at(self.time.now + signal_us, self._signalled, lane, command)
                return
            elif isinstance(command, (*ir.MOVES, ir.Reduce)):
                move = self.moves[lane.queue.rank, lane.queue.engine][lane.index]
                if lane.kernel is not None:
                    if isinstance(command, ir.Reduce):  # on the way
                        lane.index += 1
                        continue
                    self._begin(lane, move, self.time.now)
                    return
                if isinstance(command, ir.Reduce) and lane.queue.engine.kind is ir.EngineKind.COMPUTE:
                    issue = float(dma.reduce_us)
                else:
                    issue = self._issue_us(lane.behind, command)
                self.time.at(self.time.now + issue + move.latency_us, self._begin, lane, move, self.time.now)
                return
            else:
                self.stamps[lane.queue.rank, command.slot] = self.time.now
                lane.index += 1
        self.ended += 1
        known = self.time.now + (self.dma.sync_us if lane.kernel is None else 0.0)
        self._note_on(lane, "sync", self.time.now, known)
        self.finish_us = max(self.finish_us, known)

    def _issue_us(self, before: ir.Move | ir.Reduce | None, command: ir.Move | ir.Reduce) -> float:
        """Return the latency of a move. One that reads what the one before it read finds these bytes on their way."""
        if before is None:
            return float(self.dma.copy_us)
        adds = isinstance(before, ir.Reduce) or isinstance(command, ir.Reduce)
        is_other = not adds and [*ir.reads(command)] != [*ir.reads(before)] and not _goes_on(before, command)
        return float(self.dma.next_copy_us + (self.dma.other_source_us if is_other else 0.0))

    def _begin(self, lane: _Lane, move: Demand, start: float) -> None:
        nbytes = move.nbytes if lane.kernel is None else move.nbytes * lane.kernel.slowdown
        self.time.start(nbytes, move.weights, (lane, move, start, self.time.now))

    def _passed_bytes(self, moves: Sequence[_Passing]) -> None:
        for each in moves:
            self._moved(*each)

    def _moved(self, lane: _Lane, move: Demand, start: float, began: float) -> None:
        command = lane.queue.commands[lane.index]
        if self.record:
            label = ir.describe(command)
            self._note_on(lane, label, start, self.time.now)
            for resource in move.weights:
                name = self.resources.names[resource]
                if name.startswith(("link", "port", "network")):
                    self._note("links", name, label, began, self.time.now)
        if isinstance(command, ir.Copy):
            lane.sent = command.dst.rank, move.latency_us
        assert isinstance(command, (*ir.MOVES, ir.Reduce))
        lane.behind = command
        lane.index += move.commands
        self._advance(lane)

    def _signalled(self, lane: _Lane, command: ir.Signal) -> None:
        self._raise(command)
        lane.behind = None
        self._advance(lane)

    def _raise(self, command: ir.Signal) -> None:
        flag, value = self._stands(command.flag), command.value.at(1)
        if flag in self.raised:
            self.raised[flag] = self.time.now
        self.flags[flag] = value + (self.flags.get(flag, 0) if command.op is ir.SignalOp.ADD else 0)
        still: list[tuple[_Lane, ir.Wait]] = []
        for lane, wait in self.waiting.pop(flag, ()):
            if self._satisfied(wait):
                self.time.at(self.time.now + self._wait_us(lane, wait), self._passed, lane)
            else:
                still.append((lane, wait))
        if still:
            self.waiting[flag] = still

    def _passed(self, lane: _Lane) -> None:
        self._note_on(lane, "wait", lane.held_since, self.time.now)
        command = lane.queue.commands[lane.index]
        if self.kernels and isinstance(command, ir.Wait) and command.flag in self.kernels:
            lane.kernel, lane.sent = self.kernels[command.flag], (-1, 0.0)
        lane.index += 1
        lane.behind = None
        self._advance(lane)

    def _wait_us(self, lane: _Lane, command: ir.Wait) -> float:
        if command.flag in self.kernels:
            return self.kernels[command.flag].start_us
        return 0.0 if lane.kernel is not None or command.flag in self.edges else float(self.dma.wait_us)

    def _satisfied(self, command: ir.Wait) -> bool:
        return command.comparison.holds(self.flags.get(self._stands(command.flag), 0), command.value.at(1))

    def _stands(self, flag: ir.Flag) -> ir.Flag:
        """Return the flag that stands for another."""
        if self.fold is None or (rank := self.fold.rank(flag.rank)) == flag.rank:
            return flag
        return ir.Flag(rank, flag.index)

    def _note_on(self, lane: _Lane, label: str, start: float, end: float) -> None:
        self._note(f"rank {lane.queue.rank}", str(lane.queue.engine), label, start, end)

    def _note(self, group: str, lane: str, label: str, start: float, end: float) -> None:
        if self.record and end > start:
            self.timeline.append(Interval(group, lane, label, start, end))


_Joined = tuple[int, ir.Move | ir.Reduce, int, int]
"""Moves of neighbouring bytes, one right after another: index of the first, itself, their number, bytes of the others.
"""


def _joined(program: ir.Program) -> tuple[tuple[_Joined, ...], ...]:
    """Return the moves of each queue, those joined that go on. They are the same on every machine."""
    every = []
    for queue in program.queues:
        found: list[_Joined] = []
        for index, command in enumerate(queue.commands):
            if found and isinstance(command, ir.MOVES) and _goes_on(queue.commands[index - 1], command):
                first, move, count, nbytes = found[-1]
                found[-1] = first, move, count + 1, nbytes + next(ir.spans(command)).nbytes
            elif isinstance(command, (*ir.MOVES, ir.Reduce)):
                found.append((index, command, 1, 0))
        every.append(tuple(found))
    return tuple(every)


_joined_once = Once(_joined)


def _goes_on(before: ir.Command, command: ir.Command) -> bool:
    """True if a move continues the one before: the same ranks and buffers, and the bytes behind that one's."""
    if type(before) is not type(command):
        return False
    pairs = zip(ir.spans(before), ir.spans(command), strict=True)
    return all((b.rank, b.buffer, b.offset) == (a.rank, a.buffer, a.offset + a.nbytes) for a, b in pairs)
