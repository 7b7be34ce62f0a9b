"""Layout of programs for the proof: chains of steps, and callers between the invocations.

The model. Between two invocations stands, for each rank, one *user event*: the invocation that ends has joined all
queues of the rank; its caller then reads and overwrites its whole input and output; then the next one starts::

    user(r, 0) -> first command of each queue of r ... last command of each queue -> user(r, 1) -> ...

Ranks are not tied to each other: a fast rank may be invocations ahead of a slow one unless flags hold it. The queues of
a prelaunched program were handed to the engines ahead of the call, so they do not wait for the caller: only for the
commands that the same program had given the same queue before. Its ``caller`` queue does, and the end still joins all
queues.

A *chain* is a sequence of events with one order in every run: the commands of an engine of a rank, invocation after
invocation, and on one of its chains the user events of the rank. A *step* of a queue is a signal, a wait, or a *run*:
commands that follow each other without a signal or wait between them. Nothing outside of a run can come between two of
its commands, so that one step stands for all of them: the cost of a program's order is that of its signals and waits,
however many bytes and tensors it moves.

Violations name ranks, queues, command indices and byte ranges in the same words everywhere (``name_command`` and the
functions after it).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sidelane.program import ir
from sidelane.program.collective import Span

SIGNAL, ADD, WAIT, RUN = range(4)

MAX_FLAGS = 1 << 40
"""Largest number of flags of a rank in a program: one number names a flag, with this many values for each rank."""

ProofStep = tuple[int, int, int, int, int, int]
"""Kind; index of the (first) command in its queue; number of the flag, or of a run's *site* (a run of a program, in all
invocations); base and change an epoch of the value; 1 for a wait for equality. A run has the index behind its last
command in place of a base. ``SIGNAL`` sets its flag, ``ADD`` adds to it."""


@dataclasses.dataclass(eq=False, slots=True)
class QueuePlan:
    """A queue of a program, with commands.

    Attributes:
        queue: queue of the program.
        chain: number of the queue's chain.
        held: it begins behind the user event of its rank; otherwise (prelaunched) it was handed over ahead.
        first: number of steps of all queues before it, so that ``first + number`` names a step.
        steps: steps of the queue.
    """

    queue: ir.Queue
    chain: int
    held: bool
    first: int
    steps: tuple[ProofStep, ...]


Occurrence = tuple[int, QueuePlan | None, int]
"""A step in one invocation: the invocation, its queue, its number there; a user event: invocation, None, its rank."""


class FlagUse:
    """Uses of one flag by all programs.

    Attributes:
        flag: the flag.
        counts: signals add to it.
        waits: queues and numbers of the steps that wait for it.
        writes: queues and numbers of the steps that set it or add to it.
    """

    __slots__ = ("counts", "flag", "waits", "writes")

    def __init__(self, flag: ir.Flag) -> None:
        self.flag, self.counts = flag, False
        self.waits: list[tuple[QueuePlan, int]] = []
        self.writes: list[tuple[QueuePlan, int]] = []


@dataclasses.dataclass(slots=True)
class Layout:
    """All invocations; each runs one program.

    Attributes:
        programs: ``programs[i - 1]`` runs in invocation i.
        plans: queues of each program, by its ``id``.
        users: number of the chain with the user events, for each rank.
        chains: number of chains.
        steps: number of steps of all queues.
        flags: every flag in use, by number.
        sites: queue and number of the step of each site.
    """

    programs: tuple[ir.Program, ...]
    plans: dict[int, tuple[QueuePlan, ...]]
    users: tuple[int, ...]
    chains: int
    steps: int
    flags: list[FlagUse]
    sites: list[tuple[QueuePlan, int]]

    @property
    def world_size(self) -> int:
        return self.programs[0].world_size

    def plans_of(self, invocation: int) -> tuple[QueuePlan, ...]:
        return self.plans[id(self.programs[invocation - 1])]


class Event(NamedTuple):
    """A command in one invocation, or (without one) the user event of a rank after that invocation, for texts."""

    invocation: int
    rank: int
    engine: ir.Engine | None = None
    step: int = 0
    command: ir.Command | None = None


def event_at(place: Occurrence, index: int | None = None) -> Event:
    """Return the event at a place: the first command there, or number ``index`` of its queue."""
    invocation, plan, number = place
    if plan is None:
        return Event(invocation, number)
    at = plan.steps[number][1] if index is None else index
    return Event(invocation, plan.queue.rank, plan.queue.engine, at, plan.queue.commands[at])


def lay_out_programs(programs: Sequence[ir.Program]) -> Layout:
    """Lay out ``programs``, one for each invocation."""
    numbers: dict[int, int] = {}
    flags: list[FlagUse] = []
    sites: list[tuple[QueuePlan, int]] = []
    chains: dict[object, int] = {}
    users: dict[int, int] = {}
    plans: dict[int, tuple[QueuePlan, ...]] = {}
    count = 0
    for program in {id(program): program for program in programs}.values():
        made = []
        for queue in program.queues:
            if not queue.commands:
                continue
            held = not program.prelaunched or queue.engine.kind is ir.EngineKind.CALLER
            key = (queue.rank, queue.engine) if held else (id(program), queue.rank, queue.engine)
            chain = chains.setdefault(key, len(chains))
            if held:
                users.setdefault(queue.rank, chain)
            plan = QueuePlan(queue, chain, held, count, ())
            plan.steps = _steps(plan, numbers, flags, sites)
            count += len(plan.steps)
            made.append(plan)
        plans[id(program)] = tuple(made)
    for rank in range(programs[0].world_size):
        users.setdefault(rank, chains.setdefault(rank, len(chains)))
    by_rank = tuple(users[rank] for rank in range(programs[0].world_size))
    return Layout(tuple(programs), plans, by_rank, len(chains), count, flags, sites)


def _steps(
    plan: QueuePlan, numbers: dict[int, int], flags: list[FlagUse], sites: list[tuple[QueuePlan, int]]
) -> tuple[ProofStep, ...]:
    """Cut a queue into steps; note the uses of its flags, and its runs."""
    steps: list[ProofStep] = []
    run = -1  # where the run begins that is under way

    def end_run(behind: int) -> None:
        steps.append((RUN, run, len(sites), behind, 0, 0))
        sites.append((plan, len(steps) - 1))

    for index, command in enumerate(plan.queue.commands):
        if not isinstance(command, _ON_FLAGS):
            if run < 0:
                run = index
            continue
        if run >= 0:
            end_run(index)
            run = -1
        flag, value = command.flag, command.value
        number = numbers.setdefault(flag.rank * MAX_FLAGS + flag.index, len(flags))
        if number == len(flags):
            flags.append(FlagUse(flag))
        use, where = flags[number], (plan, len(steps))
        if isinstance(command, ir.Wait):
            use.waits.append(where)
            steps.append((WAIT, index, number, value.base, value.per_epoch, command.comparison is ir.Comparison.EQ))
        else:
            use.writes.append(where)
            kind = SIGNAL if command.op is ir.SignalOp.SET else ADD
            use.counts |= kind == ADD
            steps.append((kind, index, number, value.base, value.per_epoch, 0))
    if run >= 0:
        end_run(len(plan.queue.commands))
    return tuple(steps)


def name_command(rank: int, engine: ir.Engine, index: int, command: ir.Command) -> str:
    """Name a command: ``rank 0 dma:1 command 2 (copy ...)``."""
    return f"rank {rank} {engine} command {index} ({ir.describe(command)})"


def name_event(event: Event) -> str:
    """Name a command in one invocation, or a user event."""
    if event.command is None or event.engine is None:
        return name_user(event)
    return f"{name_command(event.rank, event.engine, event.step, event.command)} in invocation {event.invocation}"


def name_user(event: Event) -> str:
    """Name a user event by the invocations around it."""
    if event.invocation == 0:
        return f"rank {event.rank}'s caller before invocation 1"
    return f"rank {event.rank}'s caller between invocations {event.invocation} and {event.invocation + 1}"


def name_bytes(rank: int, buffer: str, ranges: Iterable[tuple[int, int]]) -> str:
    """Name byte ranges of one buffer; ranges that touch become one."""
    return ", ".join(str(Span(rank, buffer, start, end - start)) for start, end in in_sequence(ranges))


def in_sequence(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sort ranges and join those that touch.

    >>> in_sequence([(4, 8), (0, 4), (12, 16)])
    [(0, 8), (12, 16)]
    """
    result: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def name_chain(events: Sequence[Event], flag_edges: Sequence[bool]) -> str:
    """Explain why the last event of a happens-before chain comes after the first, backwards from the last.

    Args:
        events: events of the chain, each before the next.
        flag_edges: ``flag_edges[k]`` says that event k signals what event k+1 waits for (else a queue or a rank orders
            them).

    Only the ends of flag edges are named: the events between them follow from the order inside a rank.
    """
    text = name_event(events[-1])
    for k in range(len(events) - 2, -1, -1):
        if flag_edges[k]:
            text += f"{' ' if k == len(events) - 2 else ', which '}waits for {name_event(events[k])}"
        elif k == 0 or flag_edges[k - 1]:
            text += f", which comes after {name_event(events[k])}"
    return text


_ON_FLAGS = (ir.Signal, ir.Wait)
