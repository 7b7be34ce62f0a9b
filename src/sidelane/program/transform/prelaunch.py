"""Put queues behind triggers, so that commands are handed to the engines before the collective is called.

The DMA collectives paper, section 4.2.5: only copies and signals stay on the critical path. It has a trigger for each
queue (:func:`prelaunch`). One for all queues of a rank takes one store to fire (:func:`hold`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from sidelane.program.ir import EPOCH, Engine, EngineKind, Flag, Program, Queue, Signal, Wait


def prelaunch(program: Program) -> Program:
    """Add a trigger ``Wait`` in front of every queue and a ``caller`` queue on every rank that fires the triggers.

    Raises:
        ValueError: the program is prelaunched already.
    """
    first = program.flag_count
    # A flag for each queue: a frozen program resets a flag after its one wait.
    return _behind(program, "prelaunch", lambda rank, count: [Flag(rank, first + index) for index in range(count)])


def hold(program: Program) -> Program:
    """Put all queues of a rank behind one trigger, which its ``caller`` queue fires. :func:`release` removes it.

    It is the last flag of every rank, and only this rank touches it: it may lie apart (``Addresses.triggers``). A rank
    that does nothing waits for it all the same: it can be fired everywhere.

    Raises:
        ValueError: the program is prelaunched already.
    """
    idle = set(range(program.world_size)) - {queue.rank for queue in program.queues}
    waiting = tuple(Queue(rank, Engine(EngineKind.LOCAL), ()) for rank in sorted(idle))
    program = dataclasses.replace(program, queues=(*program.queues, *waiting))
    return _behind(program, "hold", lambda rank, count: [Flag(rank, program.flag_count)] * count)


def held_by(program: Program, rank: int) -> Flag | None:
    """Return the trigger of a rank's first queue, which fires all of its queues on GPUs; None if there is none."""
    first = [queue.commands[0] for queue in program.queues_of(rank) if queue.commands and program.prelaunched]
    return next((wait.flag for wait in first if isinstance(wait, Wait)), None)


def release(program: Program) -> Program:
    """Remove the triggers from a program.

    Raises:
        ValueError: the program is not prelaunched.
    """
    if not program.prelaunched:
        raise ValueError(f"release: the program has no triggers (value={program.variant!r})")
    queues = tuple(
        dataclasses.replace(queue, commands=queue.commands[1:])
        for queue in program.queues
        if queue.engine.kind is not EngineKind.CALLER
    )
    return dataclasses.replace(program, queues=queues, prelaunched=False)


def _behind(program: Program, name: str, triggers_of: Callable[[int, int], Sequence[Flag]]) -> Program:
    """Put queues behind triggers; ``triggers_of`` maps a rank and the number of its queues to the trigger of each."""
    if program.prelaunched:
        raise ValueError(f"{name}: the program is prelaunched already")
    queues: list[Queue] = []
    flag_count = program.flag_count
    for rank in range(program.world_size):
        held = program.queues_of(rank)
        triggers = triggers_of(rank, len(held))
        queues += [
            dataclasses.replace(queue, commands=(Wait(trigger, EPOCH), *queue.commands))
            for queue, trigger in zip(held, triggers, strict=True)
        ]
        if held:
            fire = tuple(Signal(trigger, EPOCH) for trigger in dict.fromkeys(triggers))
            queues.append(Queue(rank, Engine(EngineKind.CALLER), fire))
        flag_count = max([flag_count, *(trigger.index + 1 for trigger in triggers)])
    return dataclasses.replace(
        program,
        variant=f"{program.variant}+{name}",
        queues=tuple(queues),
        flag_count=flag_count,
        prelaunched=True,
    )
