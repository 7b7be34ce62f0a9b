"""Flags that stay on their rank: executors turn them into events, and graphs into dependencies."""

from __future__ import annotations

from sidelane.program.ir import Flag, Program, Queue, Signal, Wait


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
