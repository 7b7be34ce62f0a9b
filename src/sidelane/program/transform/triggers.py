"""Programs that their callers release in slices: what runs on engines, and what is left to the callers.

A ``caller`` queue of such a program says what its rank does itself while the program is under way: it computes (a copy
from a buffer that is ``computed``, docs/internals/programs.md) and then signals. An executor gets the other queues;
trigger k of a rank is what its queue ``caller:k`` signals, fired when its bytes are there.
"""

from __future__ import annotations

import dataclasses

from sidelane.program.ir import EngineKind, Program, Signal, SignalOp, Wait


def without_callers(program: Program) -> Program:
    """The program as engines run it; the same object if callers have no part in it."""
    queues = tuple(queue for queue in program.queues if queue.engine.kind is not EngineKind.CALLER)
    return program if len(queues) == len(program.queues) else dataclasses.replace(program, queues=queues)


def firing_only(program: Program) -> Program:
    """The program with what callers signal, but without what they compute: what a graph holds, in which signals that
    stay on a rank are dependencies. The same object if callers have no part in it.
    """
    if without_callers(program) is program:
        return program
    queues = tuple(
        dataclasses.replace(queue, commands=tuple(c for c in queue.commands if isinstance(c, Signal)))
        if queue.engine.kind is EngineKind.CALLER
        else queue
        for queue in program.queues
    )
    return dataclasses.replace(program, queues=queues)


def triggers_of(program: Program, rank: int) -> tuple[tuple[Signal, ...], ...]:
    """What each trigger of a rank signals, by its number.

    Raises:
        ValueError: a ``caller`` queue of any rank waits, adds to a flag, signals another rank, or signals nothing; or
            the numbers of a rank's ``caller`` engines are not 0, 1, 2 ...
    """
    found: dict[int, dict[int, tuple[Signal, ...]]] = {}
    for queue in program.queues:
        if queue.engine.kind is not EngineKind.CALLER:
            continue
        name = f"rank {queue.rank} {queue.engine}"
        if any(isinstance(command, Wait) for command in queue.commands):
            raise ValueError(f"{name} waits (allowed=a trigger computes and signals)")
        signals = tuple(command for command in queue.commands if isinstance(command, Signal))
        if not signals or any(signal.op is not SignalOp.SET or signal.flag.rank != queue.rank for signal in signals):
            raise ValueError(f"{name} (allowed=a trigger sets flags of its own rank, one or more)")
        found.setdefault(queue.rank, {})[queue.engine.index] = signals
    for other, triggers in found.items():
        if sorted(triggers) != list(range(len(triggers))):
            raise ValueError(f"triggers of rank {other} (value={sorted(triggers)}, allowed=0, 1, 2 ...)")
    return tuple(signals for _, signals in sorted(found.get(rank, {}).items()))
