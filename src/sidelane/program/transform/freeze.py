"""Make a program whose commands hold no epoch, so that a captured graph can replay it as it is.

A flag then goes 0 -> 1 by its signal and 1 -> 0 by the waiter, right after the wait. This is safe only where a rank
cannot signal again before its last signal was consumed; the entry handshake of the builders gives that, and ``verify``
proves it (see the lost signal in docs/internals/programs.md).
"""

from __future__ import annotations

import dataclasses

from sidelane.program.ir import EPOCH, Command, Comparison, Program, Queue, Signal, SignalOp, Value, Wait

RAISED = Value(1)
LOWERED = Value(0)


def freeze(program: Program) -> Program:
    """Replace epochs by flags that the waiter resets.

    Raises:
        ValueError: the program has flags that are not plain epochs, or more than one wait for a flag.
    """
    waited = [c.flag for queue in program.queues for c in queue.commands if isinstance(c, Wait)]
    if len(waited) != len(set(waited)):
        raise ValueError("freeze: a flag is waited for twice; the first wait would reset it under the second")
    return dataclasses.replace(
        program,
        variant=f"{program.variant}+frozen",
        queues=tuple(_freeze_queue(queue) for queue in program.queues),
    )


def _freeze_queue(queue: Queue) -> Queue:
    commands: list[Command] = []
    for command in queue.commands:
        match command:
            case Signal(flag, value, op):
                if value != EPOCH or op is not SignalOp.SET:
                    raise ValueError(f"freeze: cannot freeze 'signal {op} {value}' (allowed=set epoch)")
                commands.append(Signal(flag, RAISED))
            case Wait(flag, value, comparison):
                if value != EPOCH or comparison is not Comparison.GE:
                    raise ValueError(f"freeze: cannot freeze 'wait {comparison} {value}' (allowed=>= epoch)")
                commands += [Wait(flag, RAISED, Comparison.EQ), Signal(flag, LOWERED)]
            case _:
                commands.append(command)
    return dataclasses.replace(queue, commands=tuple(commands))
