"""Where ranks run kernels in tests: the memory of all of them, and what each does with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from sidelane.device import layout
from sidelane.device.launch import Launch, LaunchSite

HEAP_BYTES = 27 << 20
SHARED_BYTES = 227 << 10  # of an H200, so that loops over tiles are those that prefetch
"""Of a rank: eight reduce shards of 1.3 MB in chunks, out of place."""


class World(Protocol):
    """The memory of all ranks, and one rank's view of it.

    Attributes:
        world_size, rank: as always.
        device: of tensors.
        site: of this rank.
        arenas: address of each rank's.
        whole: all memory, as bytes.
        base: its address.
    """

    world_size: int
    rank: int
    device: torch.device
    site: LaunchSite
    arenas: tuple[int, ...]
    whole: torch.Tensor
    base: int

    def carve(self, nbytes: int, misalign: int = 0) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Bytes of this rank's heap at one place on all ranks, and their addresses."""

    def release(self) -> None:
        """Give back all that was carved."""

    def launch(self, work: Launch) -> None:
        """Run a kernel, and wait for it."""

    def store_table(self, values: npt.NDArray[np.int64]) -> int:
        """Where a kernel finds the values of a table, until the next call."""

    def stumble(self, probability: float, longest_s: float) -> Callable[[], None]:
        """Let this rank's kernels pause, if they can; what ends it."""


class Heap:
    """Memory of all ranks in one piece, and where each has what. A base for worlds."""

    def __init__(self, world_size: int, most_blocks: int) -> None:
        self.world_size, self.most_blocks = world_size, most_blocks
        self.span = layout.arena_bytes(world_size) + HEAP_BYTES + 4096
        self.rank = -1
        self.used = 0

    whole: torch.Tensor
    base: int

    def become(self, rank: int) -> None:
        """Be this rank."""
        self.rank = rank
        self.arenas = tuple(self.base + peer * self.span for peer in range(self.world_size))
        self.heaps = tuple(arena + layout.arena_bytes(self.world_size) for arena in self.arenas)
        self.status_words = self.heaps[rank] + HEAP_BYTES
        counters = self.status_words + 4 * layout.STATUS_WORDS
        self.site = LaunchSite(rank, self.arenas, self.status_words, counters, self.most_blocks, SHARED_BYTES)

    def carve(self, nbytes: int, misalign: int = 0) -> tuple[torch.Tensor, tuple[int, ...]]:
        start = self.used + misalign
        self.used = -(-(start + nbytes) // 64) * 64
        assert self.used <= HEAP_BYTES, "the heap is too small"
        offset = self.heaps[self.rank] - self.base + start
        return self.whole[offset : offset + nbytes], tuple(heap + start for heap in self.heaps)

    def release(self) -> None:
        self.used = 0

    def words(self) -> torch.Tensor:
        """The status words of this rank."""
        offset = self.status_words - self.base
        return self.whole[offset : offset + 4 * layout.STATUS_WORDS].view(torch.int32)
