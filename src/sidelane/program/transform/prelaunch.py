"""Put queues behind triggers, so that commands are handed to the engines before the collective is called.

The DMA collectives paper, section 4.2.5: only copies and signals stay on the critical path.
"""

from __future__ import annotations

import dataclasses

from sidelane.program.ir import EPOCH, Engine, EngineKind, Flag, Program, Queue, Signal, Wait


def hold(program: Program) -> Program:
    """Put all queues of a rank behind one trigger, which its ``caller`` queue fires. :func:`release` removes it.

    It is the last flag of every rank, and only this rank touches it. A rank that does nothing waits for it all the
    same: it can be fired everywhere.

    Raises:
        ValueError: the program is prelaunched already.
    """
    if program.prelaunched:
        raise ValueError("hold: the program is prelaunched already")
    queues: list[Queue] = []
    for rank in range(program.world_size):
        trigger = Flag(rank, program.flag_count)
        queues += [
            dataclasses.replace(queue, commands=(Wait(trigger, EPOCH), *queue.commands))
            for queue in program.queues_of(rank) or (Queue(rank, Engine(EngineKind.LOCAL), ()),)
        ]
        queues.append(Queue(rank, Engine(EngineKind.CALLER), (Signal(trigger, EPOCH),)))
    return dataclasses.replace(
        program,
        variant=f"{program.variant}+hold",
        queues=tuple(queues),
        flag_count=program.flag_count + 1,
        prelaunched=True,
    )


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
