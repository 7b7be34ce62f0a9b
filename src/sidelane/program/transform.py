"""Transforms: pure functions from Program to Program.

*Lowering* rewrites commands that an executor lacks. *Prelaunching* puts queues behind triggers, so that commands are
handed to the engines before the collective is called (DMA collectives paper, section 4.2.5): only copies and signals
stay on the critical path. *Freezing* makes a program whose commands hold no epoch, so that a captured graph can replay
it as it is.

Programs in which callers take part have ``caller`` queues, which describe the rank's own actions while the program is
under way:

trigger   it computes (a copy from a buffer that is ``computed``, docs/internals/programs.md) and then signals
arrival   it waits, and then reads (a copy to a buffer that is ``used``)

An executor gets the other queues. Trigger k of a rank stands for the signals of its queue ``caller:k``; the caller
fires it when its bytes are ready. Arrivals are numbered from 0 on, too, in the order of their engines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from sidelane.program import ir
from sidelane.program.collective import SLOT_ALIGNMENT, Buffer, Span

RAISED = ir.Value(1)
LOWERED = ir.Value(0)


def lower(
    program: ir.Program, native: AbstractSet[type[ir.Move]], fits: Callable[[ir.Move], bool] | None = None
) -> ir.Program:
    """Rewrite every broadcast and swap that is not ``native``, or that does not fit the native command (``fits``).

    A broadcast becomes two copies. A swap becomes three copies through a staging span of the rank whose engine executes
    it: the remote bytes are saved first, then overwritten, then the saved bytes are stored. The order of a queue stays,
    so the proofs of ``verify`` about the flags around the command still hold.

    Raises:
        ValueError: ``Copy`` is not native; there is nothing to rewrite to.
    """
    if ir.Copy not in native:
        raise ValueError("lower: native commands must include Copy")

    def rewrites(move: ir.Move) -> bool:
        return type(move) not in native or (fits is not None and not fits(move))

    staging = list(program.staging_bytes)
    queues = []
    for queue in program.queues:
        commands: list[ir.Command] = []
        for command in queue.commands:
            match command:
                case ir.Broadcast(dsts, src) if rewrites(command):
                    commands += [ir.Copy(dst, src) for dst in dsts]
                case ir.Swap(a, b) if rewrites(command):
                    near, far = (b, a) if b.rank == queue.rank else (a, b)
                    offset = -(-staging[queue.rank] // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
                    saved = Span(queue.rank, Buffer.STAGING, offset, far.nbytes)
                    staging[queue.rank] = saved.end
                    commands += [ir.Copy(saved, far), ir.Copy(far, near), ir.Copy(near, saved)]
                case _:
                    commands.append(command)
        queues.append(dataclasses.replace(queue, commands=tuple(commands)))
    return dataclasses.replace(program, queues=tuple(queues), staging_bytes=tuple(staging))


def hold(program: ir.Program) -> ir.Program:
    """Let all queues of a rank wait for one trigger, which its ``caller`` queue fires. ``release`` removes it.

    It is the last flag but one of every rank, and only this rank touches it. A rank that does nothing waits for it all
    the same: it can be fired everywhere. The last flag is for executors (``ended_by``).

    Raises:
        ValueError: the program is prelaunched already.
    """
    if program.prelaunched:
        raise ValueError("hold: the program is prelaunched already")
    queues: list[ir.Queue] = []
    for rank in range(program.world_size):
        trigger = ir.Flag(rank, program.flag_count)
        queues += [
            dataclasses.replace(queue, commands=(ir.Wait(trigger, ir.EPOCH), *queue.commands))
            for queue in program.queues_of(rank) or (ir.Queue(rank, ir.Engine(ir.EngineKind.LOCAL), ()),)
        ]
        queues.append(ir.Queue(rank, ir.Engine(ir.EngineKind.CALLER), (ir.Signal(trigger, ir.EPOCH),)))
    return dataclasses.replace(
        program,
        variant=f"{program.variant}+hold",
        queues=tuple(queues),
        flag_count=program.flag_count + 2,
        prelaunched=True,
    )


def held_by(program: ir.Program, rank: int) -> ir.Flag | None:
    """Return the trigger of a rank's first queue, which fires all of its queues on GPUs; None if there is none."""
    first = [queue.commands[0] for queue in program.queues_of(rank) if queue.commands and program.prelaunched]
    return next((wait.flag for wait in first if isinstance(wait, ir.Wait)), None)


def ended_by(program: ir.Program, rank: int) -> ir.Flag | None:
    """Return the flag that an executor sets behind all queues of ``rank`` in a program that :func:`hold` made."""
    last = program.flag_count - 1
    used = {c.flag.index for queue in program.queues for c in queue.commands if isinstance(c, (ir.Wait, ir.Signal))}
    return ir.Flag(rank, last) if program.prelaunched and last not in used else None


def release(program: ir.Program) -> ir.Program:
    """Remove the triggers from a program.

    Raises:
        ValueError: the program is not prelaunched.
    """
    if not program.prelaunched:
        raise ValueError(f"release: the program has no triggers (value={program.variant!r})")
    queues = tuple(
        dataclasses.replace(queue, commands=queue.commands[1:])
        for queue in program.queues
        if queue.engine.kind is not ir.EngineKind.CALLER
    )
    return dataclasses.replace(program, queues=queues, prelaunched=False)


def freeze(program: ir.Program) -> ir.Program:
    """Replace epochs by flags that the waiter resets.

    A flag then goes 0 -> 1 by its signal and 1 -> 0 by the waiter, right after the wait. This is safe only where a rank
    cannot signal again before its last signal was consumed; the entry handshake of the builders gives that, and
    ``verify`` proves it (see the lost signal in docs/internals/programs.md).

    Raises:
        ValueError: the program has flags that are not plain epochs, or more than one wait for a flag.
    """
    waited = [c.flag for queue in program.queues for c in queue.commands if isinstance(c, ir.Wait)]
    if len(waited) != len(set(waited)):
        raise ValueError("freeze: a flag is waited for twice; the first wait would reset it under the second")
    return dataclasses.replace(
        program,
        variant=f"{program.variant}+frozen",
        queues=tuple(_freeze_queue(queue) for queue in program.queues),
    )


def _freeze_queue(queue: ir.Queue) -> ir.Queue:
    commands: list[ir.Command] = []
    for command in queue.commands:
        match command:
            case ir.Signal(flag, value, op):
                if value != ir.EPOCH or op is not ir.SignalOp.SET:
                    raise ValueError(f"freeze: cannot freeze 'signal {op} {value}' (allowed=set epoch)")
                commands.append(ir.Signal(flag, RAISED))
            case ir.Wait(flag, value, comparison):
                if value != ir.EPOCH or comparison is not ir.Comparison.GE:
                    raise ValueError(f"freeze: cannot freeze 'wait {comparison} {value}' (allowed=>= epoch)")
                commands += [ir.Wait(flag, RAISED, ir.Comparison.EQ), ir.Signal(flag, LOWERED)]
            case _:
                commands.append(command)
    return dataclasses.replace(queue, commands=tuple(commands))


def without_callers(program: ir.Program) -> ir.Program:
    """Return the program as engines run it; the same object if callers take no part in it."""
    queues = tuple(queue for queue in program.queues if queue.engine.kind is not ir.EngineKind.CALLER)
    return program if len(queues) == len(program.queues) else dataclasses.replace(program, queues=queues)


def flags_of_callers(program: ir.Program) -> ir.Program:
    """Return the program without the callers' computing and reading, for a graph, in which flags that stay on a rank
    are dependencies. It is the same object if callers take no part in it.
    """
    if without_callers(program) is program:
        return program
    queues = tuple(
        dataclasses.replace(queue, commands=tuple(c for c in queue.commands if isinstance(c, ir.Signal | ir.Wait)))
        if queue.engine.kind is ir.EngineKind.CALLER
        else queue
        for queue in program.queues
    )
    return dataclasses.replace(program, queues=queues)


def triggers_of(program: ir.Program, rank: int) -> tuple[tuple[ir.Signal, ...], ...]:
    """Return the signals of each trigger of a rank, by the number of the trigger.

    Raises:
        ValueError: a ``caller`` queue of any rank is neither a trigger nor an arrival; or the numbers of the engines of
            a rank's triggers are not 0, 1, 2 ...
    """
    arrivals_of(program, rank)
    found: dict[int, dict[int, tuple[ir.Signal, ...]]] = {}
    for queue in program.queues:
        if queue.engine.kind is not ir.EngineKind.CALLER or _waited(queue):
            continue
        signals = tuple(command for command in queue.commands if isinstance(command, ir.Signal))
        if not signals or any(signal.op is not ir.SignalOp.SET or signal.flag.rank != queue.rank for signal in signals):
            name = f"rank {queue.rank} {queue.engine}"
            raise ValueError(f"{name}: a trigger sets flags of its own rank, one or more")
        found.setdefault(queue.rank, {})[queue.engine.index] = signals
    for other, triggers in found.items():
        if sorted(triggers) != list(range(len(triggers))):
            raise ValueError(f"triggers of rank {other} (value={sorted(triggers)}, allowed=0, 1, 2 ...)")
    return tuple(signals for _, signals in sorted(found.get(rank, {}).items()))


def arrivals_of(program: ir.Program, rank: int) -> tuple[tuple[ir.Wait, ...], ...]:
    """Return the waits of each arrival of a rank, by the number of the arrival.

    Raises:
        ValueError: a ``caller`` queue of any rank waits and signals.
    """
    found: dict[int, tuple[ir.Wait, ...]] = {}
    for queue in program.queues:
        if queue.engine.kind is not ir.EngineKind.CALLER:
            continue
        waits = _waited(queue)
        resets = {wait.flag for wait in waits}  # in a frozen program
        if waits and any(isinstance(command, ir.Signal) and command.flag not in resets for command in queue.commands):
            raise ValueError(
                f"rank {queue.rank} {queue.engine} waits and signals (allowed=a trigger computes and signals, an "
                "arrival waits and reads)"
            )
        if waits and queue.rank == rank:
            found[queue.engine.index] = waits
    return tuple(waits for _, waits in sorted(found.items()))


def flags_by_callers(
    program: ir.Program, rank: int
) -> tuple[tuple[tuple[ir.Flag, ...], ...], tuple[tuple[ir.Flag, ...], ...]]:
    """Return the flags of each trigger and of each arrival of a rank."""
    fired, waited = triggers_of(program, rank), arrivals_of(program, rank)
    return (
        tuple(tuple(signal.flag for signal in signals) for signals in fired),
        tuple(tuple(wait.flag for wait in waits) for waits in waited),
    )


def flags_between_own_queues(program: ir.Program, rank: int) -> list[ir.Flag]:
    """Return the flags by which a queue of ``rank`` waits for another one of the same rank, in a fixed order.

    On GPUs they become events: dependencies that the scheduler can see, which matters most inside a graph, where it may
    put two branches on one channel.
    """
    signals: dict[ir.Flag, list[ir.Queue]] = {}
    for queue in program.queues:
        for command in queue.commands:
            if isinstance(command, ir.Signal) and command.flag.rank == rank:
                signals.setdefault(command.flag, []).append(queue)
    queues = program.queues_of(rank)
    found = []
    for flag, senders in signals.items():
        waiters = [queue for queue in queues for c in queue.commands if isinstance(c, ir.Wait) and c.flag == flag]
        setters = [queue for queue in senders if not waits_for(queue, flag)]
        local = all(queue.rank == rank for queue in senders)
        if local and len(setters) == len(waiters) == 1:
            found.append(flag)
    return found


def waits_for(queue: ir.Queue, flag: ir.Flag) -> bool:
    """Return True if a queue waits for a flag."""
    return any(isinstance(command, ir.Wait) and command.flag == flag for command in queue.commands)


def _waited(queue: ir.Queue) -> tuple[ir.Wait, ...]:
    return tuple(command for command in queue.commands if isinstance(command, ir.Wait))
