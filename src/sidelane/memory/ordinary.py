"""Ordinary memory that peers reach: what an allocation is called, and how another process maps it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch

Standing = tuple[int, tuple[tuple[int, int, int], ...]]
"""(address of a function, ((address, question, number), ...)): memory is what it was for as long as
``function(uint64_t *number, int question, void *address)`` returns 0 and finds these numbers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """Memory of this process that others can map.

    Attributes:
        name: of this allocation and no other one, as long as anybody has it mapped: an address that was freed and
            given out again has another name.
        handle: by which another process maps it, printable.
        start: address of its first byte here.
        nbytes: size.
        kept: what must live as long as peers may have it mapped, so that nothing else gets its name.
    """

    name: str
    handle: str
    start: int
    nbytes: int
    kept: object = dataclasses.field(default=None, repr=False, compare=False)


class Mapping(Protocol):
    """An allocation of another process, mapped until the last reference to this object goes."""

    @property
    def start(self) -> int:
        """Address of its first byte here."""
        ...


class OrdinaryMemory(Protocol):
    """What a device's ordinary memory allows.

    Attributes:
        most_held: allocations of a rank that its peers keep mapped for a lane; None for all that it has.
    """

    @property
    def most_held(self) -> int | None: ...

    def allocation_of(self, tensor: torch.Tensor) -> Allocation | str:
        """The allocation that holds a tensor with bytes; or why peers cannot map it."""
        ...

    def is_gone(self, allocation: Allocation) -> bool:
        """True once it was freed: its name means nothing any more."""
        ...

    def attach_thread(self) -> None:
        """Let the calling thread map, too."""
        ...

    def standing(self, allocations: Sequence[Allocation]) -> Standing | None:
        """What compiled code asks to know that none of them was freed; None where it cannot, or one has been."""
        ...

    def map(self, handle: str, name: str) -> Mapping:
        """Map an allocation of another process on this machine.

        Raises:
            UnavailableError: that is not possible, or the handle is of another allocation by now.
        """
        ...
