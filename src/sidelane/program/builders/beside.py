"""Copy the bytes that stay on their rank at the same time as those that travel: a pure step behind the builders.

A builder puts a rank's own part on a ``local`` engine, with no wait in front. This step adds a flag to wait for: the
first DMA queue sets it when it begins to move. The local copy then overlaps the others::

    dma:0    entries | wait for entries | mark | copies to peers | exits | wait for exits
    local:0                               wait | own part

Executors need no fork of their own for such a queue, and on GPUs the copy keeps out of the way of the signals.

Frozen programs whose flags may be reset late (``alternating``) do that there too.
"""

from __future__ import annotations

import dataclasses

from sidelane.program.ir import (
    EPOCH,
    MOVES,
    Command,
    Comparison,
    Copy,
    Engine,
    EngineKind,
    Flag,
    Program,
    Queue,
    Signal,
    Wait,
)
from sidelane.program.transform.freeze import LOWERED, RAISED


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


def resets_beside(program: Program) -> Program:
    """Move resets behind the last signal to a peer from each rank's first DMA queue to a queue beside its last moves.

    Only for a frozen program whose peers signal those flags again behind a later signal of this rank; ``verify``
    checks that.
    """
    mark = program.flag_count
    queues: list[Queue] = []
    marked = False
    for rank in range(program.world_size):
        given = program.queues_of(rank)
        first = next((queue for queue in given if queue.engine.kind is EngineKind.DMA), None)
        resets = _late_resets(first) if first is not None else []
        if first is None or not resets:
            queues += given
            continue
        commands = [command for command in first.commands if command not in resets]
        own = next((queue for queue in given if queue.engine.kind is EngineKind.LOCAL), None)
        if own is None:
            flag, marked = Flag(rank, mark), True
            waits = [index for index, command in enumerate(commands) if isinstance(command, Wait)]
            commands.insert(waits[-1] + 1, Signal(flag, RAISED))
            own = Queue(rank, Engine(EngineKind.LOCAL), (Wait(flag, RAISED, Comparison.EQ), Signal(flag, LOWERED)))
            given = (*given, own)
        changed = {
            first.engine: dataclasses.replace(first, commands=tuple(commands)),
            own.engine: dataclasses.replace(own, commands=(*own.commands, *resets)),
        }
        queues += [changed.get(queue.engine, queue) for queue in given]
    return dataclasses.replace(program, queues=tuple(queues), flag_count=mark + marked)


def first_move(queue: Queue) -> int:
    """Return the position of the first command that moves bytes; the number of commands if none does."""
    moves = (index for index, command in enumerate(queue.commands) if isinstance(command, MOVES))
    return next(moves, len(queue.commands))


def _late_resets(queue: Queue) -> list[Command]:
    """Return the resets between the last signal to a peer and a move."""
    sent = max(
        (i for i, c in enumerate(queue.commands) if isinstance(c, Signal) and c.flag.rank != queue.rank), default=0
    )
    behind = queue.commands[sent:]
    moves = [index for index, command in enumerate(behind) if isinstance(command, MOVES)]
    before = behind[: moves[0]] if moves else ()
    waited = {command.flag for command in before if isinstance(command, Wait)}
    return [command for command in before if isinstance(command, Signal) and command.flag in waited]


def _stays(queue: Queue) -> bool:
    return queue.engine.kind is EngineKind.LOCAL and all(isinstance(command, Copy) for command in queue.commands)


def _behind_waits(queue: Queue) -> int:
    """Return the position behind the last wait that a move follows; 0 if there is none."""
    moves = [index for index, command in enumerate(queue.commands) if isinstance(command, MOVES)]
    before = queue.commands[: moves[-1]] if moves else ()
    return max((index for index, command in enumerate(before, 1) if isinstance(command, Wait)), default=0)


def _inserted(queue: Queue, place: int, command: Signal | Wait) -> Queue:
    return dataclasses.replace(queue, commands=(*queue.commands[:place], command, *queue.commands[place:]))
