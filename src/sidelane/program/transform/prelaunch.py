"""Put every queue behind a trigger, so that commands are handed to the engines before the collective is called.

The DMA collectives paper, section 4.2.5: only copies and signals stay on the critical path.
"""

from __future__ import annotations

import dataclasses

from sidelane.program.ir import EPOCH, Engine, EngineKind, Flag, Program, Queue, Signal, Wait


def prelaunch(program: Program) -> Program:
    """Add a trigger ``Wait`` in front of every queue and a ``caller`` queue on every rank that fires the triggers.

    Raises:
        ValueError: the program is prelaunched already.
    """
    if program.prelaunched:
        raise ValueError("prelaunch: the program is prelaunched already")
    queues: list[Queue] = []
    most = 0
    for rank in range(program.world_size):
        held = program.queues_of(rank)
        # A flag for each queue: a frozen program resets a flag after its one wait.
        triggers = [Flag(rank, program.flag_count + index) for index in range(len(held))]
        queues += [
            dataclasses.replace(queue, commands=(Wait(trigger, EPOCH), *queue.commands))
            for queue, trigger in zip(held, triggers, strict=True)
        ]
        if held:
            fire = tuple(Signal(trigger, EPOCH) for trigger in triggers)
            queues.append(Queue(rank, Engine(EngineKind.CALLER), fire))
        most = max(most, len(held))
    return dataclasses.replace(
        program,
        variant=f"{program.variant}+prelaunch",
        queues=tuple(queues),
        flag_count=program.flag_count + most,
        prelaunched=True,
    )
