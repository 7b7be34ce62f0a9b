"""Symmetric memory for CPU tensors: torch tensors over shared host memory (PyTorch has no CPU backend for it)."""

from __future__ import annotations

import dataclasses

import torch

from sidelane.errors import CommunicatorClosedError
from sidelane.memory.exchange import Exchange
from sidelane.memory.host_shared import SharedBytes


@dataclasses.dataclass(frozen=True, slots=True)
class ShmBlock:
    """One collective allocation (see :class:`sidelane.memory.base.SymmetricBlock`).

    Attributes:
        tensor: this rank's bytes, 1-d uint8.
        addresses: address of each rank's block in this process.
        tensors: the block of each rank as a tensor of this process; they keep the memory mapped, as ``tensor`` does.
    """

    tensor: torch.Tensor
    addresses: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]


class ShmMemory:
    """Allocator of symmetric CPU blocks for one group. All ranks on one machine.

    Args:
        exchange: connection of the ranks, through which memory handles are exchanged.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange: Exchange | None = exchange

    def allocate(self, nbytes: int) -> ShmBlock:
        """Allocate ``nbytes`` (> 0) on every rank, zeroed and page-aligned. Collective; the bytes are reserved at once.

        The memory is unmapped once the block and every tensor made from it are gone; the kernel frees it when that is
        so in every process.

        Raises:
            ValueError: ``nbytes`` is not positive.
            MismatchError: ranks asked for different sizes.
            PeerError: a rank failed or died in the exchange; PeerTimeoutError: one did not come.
            UnavailableError: not enough memory, or ranks on several machines.
            CommunicatorClosedError: ``close`` was called.
        """
        if self._exchange is None:
            raise CommunicatorClosedError("ShmMemory.allocate: the memory was closed")
        shared = SharedBytes(self._exchange, nbytes)
        # frombuffer holds on to the mapping, so a tensor outlives the block, this object and the group.
        tensors = tuple(
            torch.frombuffer(shared.mapping, dtype=torch.uint8, count=nbytes, offset=shared.offset(rank))
            for rank in range(shared.world_size)
        )
        return ShmBlock(tensors[shared.rank], tuple(tensor.data_ptr() for tensor in tensors), tensors)

    def close(self) -> None:
        """Drop the exchange. Tensors that callers still hold remain valid. Idempotent."""
        self._exchange = None
