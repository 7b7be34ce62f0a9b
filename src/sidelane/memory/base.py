"""Symmetric memory: blocks that every rank of a group allocates together and can address on every rank."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SymmetricBlock:
    """One collective allocation.

    Attributes:
        tensor: this rank's bytes, 1-d uint8 of ``nbytes``, zero when allocated.
        addresses: address of each rank's block in *this process*; that of its own rank is ``tensor.data_ptr()``.
        kept: object that keeps the peers' memory mapped; None without peers. CPU ranks: a tensor for each rank.
    """

    tensor: torch.Tensor
    addresses: tuple[int, ...]
    kept: object


class SymmetricMemory(Protocol):
    """Allocator of symmetric blocks for one group on one device."""

    def allocate(self, nbytes: int) -> SymmetricBlock:
        """Allocate ``nbytes`` (> 0) on every rank. Collective: every rank calls it with the same size.

        Raises:
            MismatchError: ranks asked for different sizes.
            PeerTimeoutError: a rank did not come.
            UnavailableError: the machine does not have the memory.
        """
        ...

    def close(self) -> None:
        """Release this object's resources. Tensors that callers still hold remain valid."""
        ...
