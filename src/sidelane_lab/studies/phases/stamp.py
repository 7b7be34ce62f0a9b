"""Mark the beginning and end of a program's phases, by time stamps around the copies of every engine.

No stamp stands between two copies of an engine, nor directly beside another stamp::

    dma     stamp begin | entry handshake | stamp first | copy copy copy | stamp last | exit handshake | stamp end
    local   copy of the own chunk | stamp last
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import IntEnum

from sidelane.program.ir import MOVES, Command, EngineKind, Program, Queue, Reduce, Stamp


class StampMark(IntEnum):
    """Mark of a stamp; its slot is ``len(StampMark) * position of the queue on its rank + mark``."""

    BEGIN = 0
    FIRST = 1
    LAST = 2
    END = 3


def stamp(program: Program) -> Program:
    """Add stamps to a program. ``prelaunch`` may follow, so that a trigger comes before the first stamp.

    Raises:
        ValueError: the program has stamps already, or is prelaunched already: ``BEGIN`` would be the time of arming.
    """
    if any(isinstance(command, Stamp) for queue in program.queues for command in queue.commands):
        raise ValueError(f"stamp: the program has stamps already (value={program.variant!r})")
    if program.prelaunched:
        raise ValueError(f"stamp: comes before prelaunch (value={program.variant!r})")
    positions = dict.fromkeys(range(program.world_size), 0)
    queues = []
    for queue in program.queues:
        queues.append(dataclasses.replace(queue, commands=_marked(queue, positions[queue.rank])))
        positions[queue.rank] += 1
    return dataclasses.replace(program, variant=f"{program.variant}+stamped", queues=tuple(queues))


def slots_of(program: Program, rank: int) -> tuple[int, ...]:
    """Return the slots that ``rank`` stamps, in the order of its queues."""
    return tuple(c.slot for queue in program.queues_of(rank) for c in queue.commands if isinstance(c, Stamp))


def times_of(stamps: Mapping[int, float]) -> dict[StampMark, float]:
    """Map times of slots to marks of a rank: its earliest ``BEGIN`` and ``FIRST``, its latest others.

    A mark that no queue has takes the time of its neighbour: without an entry handshake ``BEGIN`` is ``FIRST``, without
    an exit handshake ``END`` is ``LAST``.

    >>> {str(mark.name): time for mark, time in times_of({1: 5.0, 2: 9.0, 6: 8.0}).items()}
    {'BEGIN': 5.0, 'FIRST': 5.0, 'LAST': 9.0, 'END': 9.0}

    Raises:
        ValueError: no queue of the rank copies anything.
    """
    of = {mark: [time for slot, time in stamps.items() if slot % len(StampMark) == mark] for mark in StampMark}
    if not of[StampMark.FIRST] or not of[StampMark.LAST]:
        raise ValueError(f"times_of: no stamps around copies (value={sorted(stamps)})")
    first, last = min(of[StampMark.FIRST]), max(of[StampMark.LAST])
    return {
        StampMark.BEGIN: min([first, *of[StampMark.BEGIN]]),
        StampMark.FIRST: first,
        StampMark.LAST: last,
        StampMark.END: max([last, *of[StampMark.END]]),
    }


def _marked(queue: Queue, position: int) -> tuple[Command, ...]:
    if queue.engine.kind is EngineKind.CALLER or not queue.commands:
        return queue.commands
    commands = list(queue.commands)
    slots = {mark: Stamp(len(StampMark) * position + mark) for mark in StampMark}
    moves = [index for index, command in enumerate(commands) if isinstance(command, (*MOVES, Reduce))]
    peers = queue.engine.kind is EngineKind.DMA
    if not moves:
        return (*((slots[StampMark.BEGIN],) if peers else ()), *commands, slots[StampMark.END])
    before, copies, after = commands[: moves[0]], commands[moves[0] : moves[-1] + 1], commands[moves[-1] + 1 :]
    end = (*after, slots[StampMark.END]) if after else ()
    if not peers:
        return (*before, *copies, slots[StampMark.LAST], *end)
    begin = (slots[StampMark.BEGIN], *before) if before else ()
    return (*begin, slots[StampMark.FIRST], *copies, slots[StampMark.LAST], *end)
