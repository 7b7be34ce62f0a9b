"""Programs in which callers take part: separate the engines' commands from those of the callers.

A ``caller`` queue of such a program describes the rank's own actions while the program is under way:

trigger   it computes (a copy from a buffer that is ``computed``, docs/internals/programs.md) and then signals
arrival   it waits, and then reads (a copy to a buffer that is ``used``)

An executor gets the other queues. Trigger k of a rank stands for the signals of its queue ``caller:k``; the caller
fires it when its bytes are ready. Arrivals are numbered from 0 on, too, in the order of their engines.
"""

from __future__ import annotations

import dataclasses

from sidelane.program.ir import EngineKind, Flag, Program, Queue, Signal, SignalOp, Wait


def without_callers(program: Program) -> Program:
    """Return the program as engines run it; the same object if callers take no part in it."""
    queues = tuple(queue for queue in program.queues if queue.engine.kind is not EngineKind.CALLER)
    return program if len(queues) == len(program.queues) else dataclasses.replace(program, queues=queues)


def flags_of_callers(program: Program) -> Program:
    """Return the program without the callers' computing and reading, for a graph, in which flags that stay on a rank
    are dependencies. It is the same object if callers take no part in it.
    """
    if without_callers(program) is program:
        return program
    queues = tuple(
        dataclasses.replace(queue, commands=tuple(c for c in queue.commands if isinstance(c, Signal | Wait)))
        if queue.engine.kind is EngineKind.CALLER
        else queue
        for queue in program.queues
    )
    return dataclasses.replace(program, queues=queues)


def triggers_of(program: Program, rank: int) -> tuple[tuple[Signal, ...], ...]:
    """Return the signals of each trigger of a rank, by the number of the trigger.

    Raises:
        ValueError: a ``caller`` queue of any rank is neither a trigger nor an arrival; or the numbers of the engines of
            a
        rank's triggers are not 0, 1, 2 ...
    """
    arrivals_of(program, rank)
    found: dict[int, dict[int, tuple[Signal, ...]]] = {}
    for queue in program.queues:
        if queue.engine.kind is not EngineKind.CALLER or _waited(queue):
            continue
        signals = tuple(command for command in queue.commands if isinstance(command, Signal))
        if not signals or any(signal.op is not SignalOp.SET or signal.flag.rank != queue.rank for signal in signals):
            name = f"rank {queue.rank} {queue.engine}"
            raise ValueError(f"{name} (allowed=a trigger sets flags of its own rank, one or more)")
        found.setdefault(queue.rank, {})[queue.engine.index] = signals
    for other, triggers in found.items():
        if sorted(triggers) != list(range(len(triggers))):
            raise ValueError(f"triggers of rank {other} (value={sorted(triggers)}, allowed=0, 1, 2 ...)")
    return tuple(signals for _, signals in sorted(found.get(rank, {}).items()))


def arrivals_of(program: Program, rank: int) -> tuple[tuple[Wait, ...], ...]:
    """Return the waits of each arrival of a rank, by the number of the arrival.

    Raises:
        ValueError: a ``caller`` queue of any rank waits and signals.
    """
    found: dict[int, tuple[Wait, ...]] = {}
    for queue in program.queues:
        if queue.engine.kind is not EngineKind.CALLER:
            continue
        waits = _waited(queue)
        resets = {wait.flag for wait in waits}  # in a frozen program
        if waits and any(isinstance(command, Signal) and command.flag not in resets for command in queue.commands):
            raise ValueError(
                f"rank {queue.rank} {queue.engine} waits and signals (allowed=a trigger computes and signals, an "
                "arrival waits and reads)"
            )
        if waits and queue.rank == rank:
            found[queue.engine.index] = waits
    return tuple(waits for _, waits in sorted(found.items()))


def flags_by_callers(program: Program, rank: int) -> tuple[tuple[tuple[Flag, ...], ...], tuple[tuple[Flag, ...], ...]]:
    """Return the flags of each trigger and of each arrival of a rank."""
    fired, waited = triggers_of(program, rank), arrivals_of(program, rank)
    return (
        tuple(tuple(signal.flag for signal in signals) for signals in fired),
        tuple(tuple(wait.flag for wait in waits) for waits in waited),
    )


def _waited(queue: Queue) -> tuple[Wait, ...]:
    return tuple(command for command in queue.commands if isinstance(command, Wait))


def flags_between_own_queues(program: Program, rank: int) -> list[Flag]:
    """Return the flags by which a queue of ``rank`` waits for another one of the same rank, in a fixed order.

    On GPUs they become events: dependencies that the scheduler can see, which matters most inside a graph, where it may
    put two branches on one channel.
    """
    signals: dict[Flag, list[Queue]] = {}
    for queue in program.queues:
        for command in queue.commands:
            if isinstance(command, Signal) and command.flag.rank == rank:
                signals.setdefault(command.flag, []).append(queue)
    queues = program.queues_of(rank)
    found = []
    for flag, senders in signals.items():
        waiters = [queue for queue in queues for c in queue.commands if isinstance(c, Wait) and c.flag == flag]
        setters = [queue for queue in senders if not waits_for(queue, flag)]
        local = all(queue.rank == rank for queue in senders)
        if local and len(setters) == len(waiters) == 1:
            found.append(flag)
    return found


def waits_for(queue: Queue, flag: Flag) -> bool:
    """Return True if a queue waits for a flag."""
    return any(isinstance(command, Wait) and command.flag == flag for command in queue.commands)
