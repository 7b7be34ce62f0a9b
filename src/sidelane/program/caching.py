"""Caches of programs: values derived from one, and the host memory that it takes, estimated from its commands.

A test compares the estimates with what Python allocates (tests/collectives/test_call_cache.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from sidelane.program.batch import Batch
from sidelane.program.ir import Program
from sidelane.program.kernel import KernelCall, KernelProgram

K = TypeVar("K")
V = TypeVar("V")

COMMAND_BYTES = 256
"""Bytes of a command of a program."""

LOADED_BYTES = 1024
"""Bytes of a command of this rank that an executor has loaded; of a kernel, the row of a tensor in its table."""

BASE_BYTES = 4096
"""Bytes of everything else that is kept of a call: key, request, agreement, texts."""


def program_bytes(plan: Program | KernelProgram | KernelCall) -> int:
    """Return the bytes of a program, which all calls that run it share. They are the same on all ranks."""
    return COMMAND_BYTES * _commands(plan)


def loaded_bytes(plan: Program | KernelProgram | KernelCall) -> int:
    """Return the bytes of a call: the program as one rank has loaded it, and everything else that is kept."""
    world_size = 1 if isinstance(plan, KernelCall) else plan.world_size
    return BASE_BYTES + LOADED_BYTES * _commands(plan) // world_size


def _commands(plan: Program | KernelProgram | KernelCall) -> int:
    if isinstance(plan, Program):
        return sum(len(queue.commands) for queue in plan.queues)
    if isinstance(plan, KernelCall):
        return len(plan.arguments)
    collective = plan.collective
    return plan.world_size * (len(collective.parts) if isinstance(collective, Batch) else 1)


class Once(Generic[K, V]):
    """Cached function of objects that their owners keep, such as programs, by identity: hashing a program is slower.

    Args:
        make: function to cache; its exceptions are not remembered, and its results hold no reference to their object.
    """

    def __init__(self, make: Callable[[K], V]) -> None:
        self._make = make
        self._known: dict[int, tuple[weakref.ref[K], V]] = {}

    def __call__(self, of: K) -> V:
        known = self._known.get(id(of))
        if known is not None:
            return known[1]
        made, key, results = self._make(of), id(of), self._known
        results[key] = weakref.ref(of, lambda _: results.pop(key, None)), made
        return made
