"""Host memory that programs take in caches, estimated from their number of commands.

A test compares the estimates with what Python allocates (tests/collectives/test_call_cache.py).
"""

from __future__ import annotations

from sidelane.program.batch import Batch
from sidelane.program.builders import Alternation
from sidelane.program.ir import Program
from sidelane.program.kernel import KernelProgram
from sidelane.program.kernel_call import KernelCall

COMMAND_BYTES = 256
"""Bytes of a command of a program."""

LOADED_BYTES = 1024
"""Bytes of a command of this rank that an executor has loaded; of a kernel, the row of a tensor in its table."""

BASE_BYTES = 4096
"""Bytes of everything else that is kept of a call: key, request, agreement, texts."""


def program_bytes(plan: Program | KernelProgram | Alternation | KernelCall) -> int:
    """Return the bytes of a program, which all calls that run it share. They are the same on all ranks."""
    return COMMAND_BYTES * _commands(plan)


def loaded_bytes(plan: Program | KernelProgram | KernelCall) -> int:
    """Return the bytes of a call: the program as one rank has loaded it, and everything else that is kept."""
    world_size = 1 if isinstance(plan, KernelCall) else plan.world_size
    return BASE_BYTES + LOADED_BYTES * _commands(plan) // world_size


def _commands(plan: Program | KernelProgram | Alternation | KernelCall) -> int:
    if isinstance(plan, Alternation):
        return sum(map(_commands, plan.turns))
    if isinstance(plan, Program):
        return sum(len(queue.commands) for queue in plan.queues)
    if isinstance(plan, KernelCall):
        return len(plan.arguments)
    collective = plan.collective
    return plan.world_size * (len(collective.parts) if isinstance(collective, Batch) else 1)
