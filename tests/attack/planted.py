"""Right programs with one mistake each, of every kind of race: what schedules have to find."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from alternating import alternation

from attack.edits import at, changed, deleted, edited, places, reflagged, replaced, rewritten, without_flag
from sidelane.program.builders import Transport, build
from sidelane.program.collective import (
    Buffer,
    Collective,
    ReduceOp,
    Reduction,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)
from sidelane.program.ir import Comparison, Copy, EngineKind, Flag, Program, Reduce, Signal, SignalOp, Swap, Value, Wait
from sidelane.program.transform import freeze
from sidelane_lab.sim.prelaunch import prelaunch

SUM = Reduction(ReduceOp.SUM, "bfloat16")
GATHER = all_gather([8] * 3, in_place=True)


def _without(program: Program, number: int) -> tuple[Program, ...]:
    """Without the wait of this number and its signals."""
    return (without_flag(program, list(places(program, Wait))[number]),)


def _early(program: Program) -> tuple[Program, ...]:
    """Rank 0's exits come before its last copy."""
    q = next(q for q, queue in enumerate(program.queues) if queue.engine.kind is EngineKind.DMA)
    commands = list(program.queues[q].commands)
    last = commands.pop(max(c for c, command in enumerate(commands) if isinstance(command, Copy)))
    exits = max(c for c, command in enumerate(commands) if isinstance(command, Signal))
    commands.insert(exits + 1, last)
    return (edited(program, q, commands),)


def _late_resets() -> tuple[Program, ...]:
    """The flags of an opening are reset at its end."""
    opening = alternation(all_gather([8] * 3), frozen=True, slot_bytes=64).opening
    assert opening is not None
    for q, queue in enumerate(opening.queues):
        if queue.engine.kind is EngineKind.DMA:
            waited = {c.flag for c in queue.commands[:6] if isinstance(c, Wait)}
            late = [c for c in queue.commands if isinstance(c, Signal) and c.flag in waited]
            opening = edited(opening, q, [*(c for c in queue.commands if c not in late), *late])
    return (opening,)


def _one_turn_twice() -> tuple[Program, ...]:
    return (alternation(all_gather([8] * 3), frozen=False, slot_bytes=64).turns[0],)


def _epochs_of_barrier() -> tuple[Program, ...]:
    """A wait for exactly this epoch, which a fast peer overwrites with the next one."""
    program = alternation(all_gather([8] * 2), frozen=False, slot_bytes=64).turns
    equal = [_equal(p) for p in program]
    return equal[0], reflagged(equal[1], lambda f: Flag(f.rank, f.index % 2), 8)


def _equal(program: Program) -> Program:
    return rewritten(
        program, lambda c: (dataclasses.replace(c, comparison=Comparison.EQ),) if isinstance(c, Wait) else (c,)
    )


def _two_meanings() -> tuple[Program, ...]:
    """A frozen program that has the flags of an eager one."""
    eager = build(GATHER, "b2b")
    return eager, freeze(eager)


def _one_trigger() -> tuple[Program, ...]:
    """Two captured programs handed over ahead whose triggers are the same flags."""
    first, second = (freeze(prelaunch(build(all_gather((n, n)), "b2b"))) for n in (4, 8))
    return first, second


def _untriggered() -> tuple[Program, ...]:
    """A queue that was handed over ahead says that its rank has called."""
    program = prelaunch(build(all_gather((8, 8)), "b2b"))
    return (deleted(program, (0, 0)),)


def _slots_that_meet() -> tuple[Program, ...]:
    """Two peers push into one slot of a reduction."""
    program = build(reduce_scatter([8] * 3, SUM), "b2b")
    slot = next(c.dst for q in program.queues for c in q.commands if isinstance(c, Copy) and c.dst.rank == 2)
    other = dataclasses.replace(slot, offset=256 - slot.offset)

    def shared(command: object) -> object:
        if isinstance(command, Copy) and command.dst == other:
            return dataclasses.replace(command, dst=slot)
        if isinstance(command, Reduce):
            srcs = tuple(slot if src == other else src for src in command.srcs)
            return dataclasses.replace(command, srcs=srcs)
        return command

    return (rewritten(program, lambda c: (shared(c),)),)  # type: ignore[arg-type,return-value]


def _other_staging() -> tuple[Program, ...]:
    """A program without exits next to one that uses the same staging."""
    first = build(GATHER, "b2b", Transport.STAGED)
    first = rewritten(first, lambda c: () if isinstance(c, Signal | Wait) and c.flag.index >= 3 else (c,))
    return first, build(all_to_all([[4] * 3] * 3), "b2b", Transport.STAGED)


def _swapped_by_copies() -> tuple[Program, ...]:
    program = build(all_to_all([[8] * 2] * 2, in_place=True), "swap")
    place = next(places(program, Swap))
    swap = at(program, place)
    assert isinstance(swap, Swap)
    return (replaced(program, place, Copy(swap.a, swap.b), Copy(swap.b, swap.a)),)


def _reduced_early() -> tuple[Program, ...]:
    """A reduction does not wait for the last of its sources."""
    program = build(reduce_scatter([8] * 3, SUM), "b2b")
    q = next(q for q, queue in enumerate(program.queues) if queue.engine.kind is EngineKind.COMPUTE)
    return (without_flag(program, (q, 1)),)


def _counted(total: int, reset: bool) -> tuple[Program, ...]:
    """Exits add to one counter, and the wait is for fewer than there are, or nobody resets it."""
    program = build(GATHER, "b2b")
    first = Flag(0, 4)
    exits = {first, Flag(0, 5)}

    def counts(command: object) -> tuple[object, ...]:
        if isinstance(command, Signal) and command.flag in exits:
            return (Signal(first, Value(1), SignalOp.ADD),)
        if isinstance(command, Wait) and command.flag in exits:
            lowered = (Signal(first, Value(0)),) if reset else ()
            return (Wait(first, Value(total)), *lowered) if command.flag == first else ()
        return (command,)

    return (rewritten(program, counts),)  # type: ignore[arg-type]


def _source_elsewhere(collective: Collective, variant: str) -> tuple[Program, ...]:
    """A copy to a peer takes its bytes from where they come later."""
    program = build(collective, variant)
    place = next(p for p in places(program, Copy) if at(program, p).dst.rank != at(program, p).src.rank)  # type: ignore[union-attr]
    copy = at(program, place)
    assert isinstance(copy, Copy)
    src = dataclasses.replace(copy.dst, rank=copy.src.rank, buffer=Buffer.OUTPUT)
    return (changed(program, place, src=src),)


PLANTED: dict[str, Callable[[], tuple[Program, ...]]] = {
    "no entry": lambda: _without(build(GATHER, "b2b"), 0),
    "no exit": lambda: _without(build(GATHER, "b2b"), 2),
    "no exit of a pull": lambda: _without(build(all_gather([8] * 3), "b2b", Transport.PULL), 2),
    "no entry behind staging": lambda: _without(build(GATHER, "b2b", Transport.STAGED), 0),
    "exit before the last copy": lambda: _early(build(GATHER, "b2b")),
    "reset at the end": _late_resets,
    "one turn twice": _one_turn_twice,
    "equal epochs": _epochs_of_barrier,
    "two meanings of a flag": _two_meanings,
    "one trigger for two": _one_trigger,
    "no trigger": _untriggered,
    "slots that meet": _slots_that_meet,
    "staging of others": _other_staging,
    "a swap by two copies": _swapped_by_copies,
    "reduced early": _reduced_early,
    "counted too few": lambda: _counted(1, reset=True),
    "a counter without reset": lambda: _counted(2, reset=False),
    "own part from the output": lambda: _source_elsewhere(all_gather([8] * 3), "b2b"),
    "relayed too early": lambda: _without(build(broadcast(1100, 3, 0, in_place=True), "relay"), -1),
    "results sent too early": lambda: _without(build(all_reduce([8] * 3, SUM), "b2b"), 4),
}
"""What is wrong, and the programs, one an invocation, over and over."""
