"""Programs as Sidelane's communicator runs them on copy engines: entries, exits, flags, own chunks and reductions.

``published`` has those of the DMA collectives paper, which one host process started and watched, so that they need no
flags. Both the comparison with our measurements and the C3 strategies take theirs from here wherever a paper did not
run another one.
"""

from __future__ import annotations

import dataclasses
import functools

from sidelane.program.builders import Transport, build
from sidelane.program.collective import Collective, Kind
from sidelane.program.ir import Copy, EngineKind, Flag, Program, Signal, Wait
from sidelane.program.own_flags import flags_between_own_queues
from sidelane.program.transform import freeze, lower
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.published import collective_of
from sidelane_lab.sim import Run, simulate

REDUCE_UNITS = 32
"""Compute units that a reduction of a hybrid takes: the thread blocks that the CUDA executor gives it."""
IN_PLACE = (Kind.ALL_GATHER, Kind.ALL_REDUCE)
"""Collectives that C3 runs in place; the others have an output of their own."""


@functools.lru_cache(maxsize=512)
def executed_program(kind: Kind, nbytes: int, ranks: int, variant: str, in_place: bool) -> Program:
    """The program that runs on the GPUs: copies only, and flags that a graph can replay.

    Args:
        kind: all_gather, all_to_all, reduce_scatter or all_reduce.
        nbytes: gathered bytes of an all_gather, of the local buffer otherwise.
        ranks: of the node.
        variant: of the collective's builders.
        in_place: input and output are one buffer.

    Raises:
        ValueError: another kind, or no such variant of it.
    """
    return program_of(dataclasses.replace(collective_of(kind, nbytes, ranks), in_place=in_place), variant)


def program_of(collective: Collective, variant: str) -> Program:
    """The same of any collective. Raises ValueError: no such variant of it."""
    staged = collective.in_place and collective.kind is Kind.ALL_TO_ALL and variant != "swap"
    program = build(collective, variant, Transport.STAGED if staged else Transport.PUSH)
    return freeze(lower(program, {Copy}))


@functools.lru_cache(maxsize=512)
def dependencies(program: Program) -> frozenset[Flag]:
    """Flags between copy engines of one rank, which a graph has as dependencies of its nodes.

    Those of copies inside a GPU are dependencies as well; but such a branch begins and ends late, about as late as with
    a handover and flags of its own, and is left with them.
    """
    between: set[Flag] = set()
    for rank in range(program.world_size):
        own = set(flags_between_own_queues(program, rank, split=False))
        for queue in program.queues_of(rank):
            if queue.engine.kind is not EngineKind.DMA:
                own -= {command.flag for command in queue.commands if isinstance(command, Signal | Wait)}
        between |= own
    return frozenset(between)


def executed_run(
    machine: Machine, kind: Kind, nbytes: int, variant: str, in_place: bool | None = None, *, record: bool = False
) -> Run:
    """Simulate such a program on all GPUs of one node. ``in_place``: None takes what C3 has for that collective.

    Raises:
        ValueError: the machine has several nodes, or there is no such program.
    """
    machine.refuse_nodes("executed_run")
    place = kind in IN_PLACE if in_place is None else in_place
    program = executed_program(kind, nbytes, machine.gpus, variant, place)
    return simulate(program, machine, edges=dependencies(program), record=record)
