"""Rewrite commands that an executor lacks into commands that it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from sidelane.program.collective import SLOT_ALIGNMENT, Buffer, Span
from sidelane.program.ir import Broadcast, Command, Copy, Move, Program, Swap


def lower(program: Program, native: AbstractSet[type[Move]], fits: Callable[[Move], bool] | None = None) -> Program:
    """Rewrite every broadcast and swap that is not ``native``, or that does not fit the native command (``fits``).

    A broadcast becomes two copies. A swap becomes three copies through a staging span of the rank whose engine executes
    it: the remote bytes are saved first, then overwritten, then the saved bytes are stored. The order of a queue stays,
    so the proofs of ``verify`` about the flags around the command still hold.

    Raises:
        ValueError: ``Copy`` is not native; there is nothing to rewrite to.
    """
    if Copy not in native:
        raise ValueError("lower: native commands must include Copy")

    def rewrites(move: Move) -> bool:
        return type(move) not in native or (fits is not None and not fits(move))

    staging = list(program.staging_bytes)
    queues = []
    for queue in program.queues:
        commands: list[Command] = []
        for command in queue.commands:
            match command:
                case Broadcast(dsts, src) if rewrites(command):
                    commands += [Copy(dst, src) for dst in dsts]
                case Swap(a, b) if rewrites(command):
                    near, far = (b, a) if b.rank == queue.rank else (a, b)
                    offset = -(-staging[queue.rank] // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
                    saved = Span(queue.rank, Buffer.STAGING, offset, far.nbytes)
                    staging[queue.rank] = saved.end
                    commands += [Copy(saved, far), Copy(far, near), Copy(near, saved)]
                case _:
                    commands.append(command)
        queues.append(dataclasses.replace(queue, commands=tuple(commands)))
    return dataclasses.replace(program, queues=tuple(queues), staging_bytes=tuple(staging))
