"""Copy the bytes that stay on their rank at the same time as those that travel: a pure step behind the builders.

A builder puts a rank's own part on a ``local`` engine, with no wait in front. This step adds a flag to wait for: the
first DMA queue sets it when it begins to move. The local copy then overlaps the others::

    dma:0    entries | wait for entries | mark | copies to peers | exits | wait for exits
    local:0                               wait | own part

Executors need no fork of their own for such a queue, and on GPUs the copy keeps out of the way of the signals.
"""

from __future__ import annotations

import dataclasses

from sidelane.program.ir import EPOCH, MOVES, Copy, EngineKind, Flag, Program, Queue, Signal, Wait


def beside(program: Program) -> Program:
    """Start queues that only copy inside their rank behind the last wait before a move of its first DMA queue.
    If that queue moves without a wait, they stay as they are.
    """
    mark = program.flag_count
    queues: list[Queue] = []
    marked = False
    for rank in range(program.world_size):
        given = program.queues_of(rank)
        first = next((queue for queue in given if queue.engine.kind is EngineKind.DMA), None)
        own = [queue for queue in given if _stays(queue)]
        place = _behind_waits(first) if first is not None else 0
        if first is None or not own or not place:
            queues += given
            continue
        flag, marked = Flag(rank, mark), True
        assert len(own) == 1, "builders put all of a rank's own part on one engine"
        changed = {
            first.engine: _inserted(first, place, Signal(flag, EPOCH)),
            own[0].engine: _inserted(own[0], 0, Wait(flag, EPOCH)),
        }
        queues += [changed.get(queue.engine, queue) for queue in given]
    return dataclasses.replace(program, queues=tuple(queues), flag_count=mark + marked)


def _stays(queue: Queue) -> bool:
    return queue.engine.kind is EngineKind.LOCAL and all(isinstance(command, Copy) for command in queue.commands)


def _behind_waits(queue: Queue) -> int:
    """Return the position behind the last wait that a move follows; 0 if there is none."""
    moves = [index for index, command in enumerate(queue.commands) if isinstance(command, MOVES)]
    before = queue.commands[: moves[-1]] if moves else ()
    return max((index for index, command in enumerate(before, 1) if isinstance(command, Wait)), default=0)


def _inserted(queue: Queue, place: int, command: Signal | Wait) -> Queue:
    return dataclasses.replace(queue, commands=(*queue.commands[:place], command, *queue.commands[place:]))
