"""Symmetric memory: blocks that every rank of a group allocates together and can address on every rank."""

from __future__ import annotations

from typing import Protocol

import torch


class SymmetricBlock(Protocol):
    """One collective allocation.

    Attributes:
        tensor: this rank's bytes, 1-d uint8 of ``nbytes``, zero when allocated.
        addresses: address of each rank's block in *this process*; that of its own rank is ``tensor.data_ptr()``.
    """

    @property
    def tensor(self) -> torch.Tensor: ...

    @property
    def addresses(self) -> tuple[int, ...]: ...


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
