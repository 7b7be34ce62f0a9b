"""Programs with a trigger for each queue, as the DMA collectives paper has them (section 4.2.5).

Sidelane's own calls have one trigger for all queues of a rank (``sidelane.program.transform.hold``).
"""

from __future__ import annotations

import dataclasses

from sidelane.program.ir import EPOCH, Engine, EngineKind, Flag, Program, Queue, Signal, Wait

PRELAUNCH = "+prelaunch"
"""End of the name of a variant whose program is prelaunched."""


def prelaunch(program: Program) -> Program:
    """Add a trigger ``Wait`` in front of every queue and a ``caller`` queue on every rank that fires the triggers.

    Raises:
        ValueError: the program is prelaunched already.
    """
    if program.prelaunched:
        raise ValueError("prelaunch: the program is prelaunched already")
    queues: list[Queue] = []
    flag_count = first = program.flag_count
    for rank in range(program.world_size):
        held = program.queues_of(rank)
        triggers = [Flag(rank, first + index) for index in range(len(held))]
        queues += [
            dataclasses.replace(queue, commands=(Wait(trigger, EPOCH), *queue.commands))
            for queue, trigger in zip(held, triggers, strict=True)
        ]
        if held:
            fire = tuple(Signal(trigger, EPOCH) for trigger in triggers)
            queues.append(Queue(rank, Engine(EngineKind.CALLER), fire))
        flag_count = max(flag_count, first + len(held))
    return dataclasses.replace(
        program,
        variant=program.variant + PRELAUNCH,
        queues=tuple(queues),
        flag_count=flag_count,
        prelaunched=True,
    )
