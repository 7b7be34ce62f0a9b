"""Programs that are loaded already: what another call of theirs needs at other addresses is known but for these.

A program whose tensors change at every call is loaded for each. Nearly all of it follows from the program: the order
of its commands, memory operations and their array, events, the kernel and most of its arguments.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from sidelane.execute.base import Addresses

MOST = 256
"""Programs of which one that was loaded is kept; the oldest goes first."""

UNIT = 16
"""Kernels are compiled for what addresses are multiples of, up to this (bytes)."""


class Movable(Protocol):
    """Something loaded.

    Attributes:
        program: what it runs.
        addresses: where.
    """

    @property
    def program(self) -> object: ...

    @property
    def addresses(self) -> Addresses: ...


T = TypeVar("T", bound=Movable)


class Alike(Generic[T]):
    """Of each program, by identity, one that was loaded: whoever keeps programs gives the same object again."""

    def __init__(self) -> None:
        self._by_program: dict[int, T] = {}

    def find(self, program: object, addresses: Addresses) -> T | None:
        """One that differs in nothing but where its buffers lie, and these by multiples of ``UNIT``."""
        known = self._by_program.get(id(program))
        return known if known is not None and differ_by_places(known.addresses, addresses) else None

    def keep(self, loaded: T) -> None:
        """Remember one, in place of any other of its program."""
        if len(self._by_program) >= MOST:
            del self._by_program[next(iter(self._by_program))]
        self._by_program[id(loaded.program)] = loaded

    def clear(self) -> None:
        self._by_program.clear()


def differ_by_places(a: Addresses, b: Addresses) -> bool:
    """True if all that differs is where buffers lie, by multiples of ``UNIT``.

    >>> a = Addresses({(0, "input"): 4096, (1, "input"): 8192}, (100, 200))
    >>> [differ_by_places(a, Addresses({(0, "input"): 4096 + by, (1, "input"): 0}, (100, 200))) for by in (32, 8)]
    [True, False]
    """
    before, after = a.buffers, b.buffers
    if (a.flags, a.arenas, a.spread, len(before)) != (b.flags, b.arenas, b.spread, len(after)) or a.pieces or b.pieces:
        return False
    if a.triggers != b.triggers:
        return False
    for key, address in before.items():
        other = after.get(key)
        if other is None or (address - other) % UNIT:
            return False
    return True
