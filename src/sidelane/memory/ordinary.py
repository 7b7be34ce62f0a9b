"""Ordinary memory that peers can map: names and handles of allocations, and the interface of a device's memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch

Standing = tuple[int, tuple[tuple[int, int, int], ...]]
"""Check of allocations by compiled code: (address of a function, ((address, question, number), ...)). None of them was
freed as long as ``function(uint64_t *number, int question, void *address)`` returns 0 and sets these numbers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """Memory of this process that others can map.

    Attributes:
        name: unique name as long as any process has the allocation mapped: memory that was freed and allocated again
            at the same address has another name.
        handle: printable handle by which another process maps it.
        start: address of its first byte in this process.
        nbytes: size in bytes.
        kept: object that must live as long as peers may have it mapped, so that its name is not reused.
    """

    name: str
    handle: str
    start: int
    nbytes: int
    kept: object = dataclasses.field(default=None, repr=False, compare=False)


class Mapping(Protocol):
    """An allocation of another process, mapped until the last reference to this object is dropped."""

    @property
    def start(self) -> int:
        """Address of its first byte in this process."""
        ...


class OrdinaryMemory(Protocol):
    """The ordinary memory of a device.

    Attributes:
        most_held: largest number of a rank's allocations that its peers keep mapped for a lane; None: no limit.
    """

    @property
    def most_held(self) -> int | None: ...

    def allocation_of(self, tensor: torch.Tensor) -> Allocation | str:
        """Return the allocation that holds a tensor with bytes, or the reason why peers cannot map it."""
        ...

    def is_gone(self, allocation: Allocation) -> bool:
        """Return True once the allocation was freed, so that its name is invalid."""
        ...

    def attach_thread(self) -> None:
        """Prepare the calling thread for :meth:`map`."""
        ...

    def standing(self, allocations: Sequence[Allocation]) -> Standing | None:
        """Return a check for compiled code that none of them was freed; None if there is none, or one was freed."""
        ...

    def map(self, handle: str, name: str) -> Mapping:
        """Map an allocation of another process on this machine.

        Raises:
            UnavailableError: it cannot be mapped, or the handle belongs to another allocation by now.
        """
        ...
