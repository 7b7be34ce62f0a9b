"""The program of a rotation: every rank sends the beginning of a buffer to the rank that is so many places behind it.

Ring attention is rotations by 1, 2, ... N - 1 (``ops.ring``). On a node whose links join all pairs, a block that comes
from its owner each time takes no longer than one that is handed on, and waits for no rank between.
"""

from __future__ import annotations

from collections.abc import Sequence

from sidelane.program.collective import Span
from sidelane.program.contract import Contract, Result
from sidelane.program.ir import EPOCH, Command, Copy, Engine, EngineKind, Flag, Program, Queue, Signal, Wait


def rotation_program(turn: int, coming_bytes: Sequence[int], buffer_bytes: int) -> Program:
    """Build the program in which rank r gets the first bytes of ``sent`` of rank (r - turn) % N into its ``came``.

    Args:
        turn: number of places, not a multiple of N; negative ones go the other way.
        coming_bytes: number of bytes that each rank gets; 0 for none.
        buffer_bytes: size of both buffers, on all ranks.
    """
    n = len(coming_bytes)
    queues, results = [], []
    for rank in range(n):
        source, to = (rank - turn) % n, (rank + turn) % n
        commands: list[Command] = []
        if coming_bytes[rank]:
            commands.append(Signal(_free(source), EPOCH))
            here, there = (Span(*place, 0, coming_bytes[rank]) for place in ((rank, "came"), (source, "sent")))
            results.append(Result(here, (there,)))
        if nbytes := coming_bytes[to]:
            copy = Copy(Span(to, "came", 0, nbytes), Span(rank, "sent", 0, nbytes))
            commands += [Wait(_free(rank), EPOCH), copy, Signal(_full(to), EPOCH)]
        if coming_bytes[rank]:
            commands.append(Wait(_full(rank), EPOCH))
        if commands:
            queues.append(Queue(rank, Engine(EngineKind.DMA), tuple(commands)))
    contract = Contract.of(f"rotation by {turn}", dict.fromkeys(("sent", "came"), [buffer_bytes] * n), results)
    return Program(contract, "push", tuple(queues), (0,) * n, 2)


def _free(sender: int) -> Flag:
    """Return the flag that tells a sender that its receiver no longer uses ``came``."""
    return Flag(sender, 0)


def _full(receiver: int) -> Flag:
    return Flag(receiver, 1)
