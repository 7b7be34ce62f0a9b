"""Kernel launches as data: made by the files of the kernels, submitted by executors and tests."""

from __future__ import annotations

import dataclasses
from typing import Any

from sidelane.device.layout import MAX_BLOCKS, MAX_RANKS


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: function that ``triton.jit`` made.
        blocks: number of thread blocks.
        warps: number of warps of a block.
        arguments: 64-bit integers, in the order of the kernel's parameters.
        constants: values of the ``tl.constexpr`` arguments.
    """

    kernel: Any
    blocks: int
    warps: int
    arguments: tuple[int, ...]
    constants: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchSite:
    """The rank and device on which a kernel runs.

    Attributes:
        rank: rank of this process.
        arenas: address of each rank's arena (see ``layout``).
        status: address of the status words of this rank's host.
        counters: address of the generation of each thread block, int32, in memory of this rank's device.
        most_blocks: largest number of thread blocks of a launch; the same on every rank.
        shared_bytes: largest shared memory of a block in bytes.

    Raises:
        ValueError: too many ranks or blocks.
    """

    rank: int
    arenas: tuple[int, ...]
    status: int
    counters: int
    most_blocks: int
    shared_bytes: int = 0

    def __post_init__(self) -> None:
        if not 1 <= len(self.arenas) <= MAX_RANKS:
            raise ValueError(f"Site: ranks (value={len(self.arenas)}, allowed=1..{MAX_RANKS})")
        if not 1 <= self.most_blocks <= MAX_BLOCKS:
            raise ValueError(f"Site: most_blocks (value={self.most_blocks}, allowed=1..{MAX_BLOCKS})")

    @property
    def world_size(self) -> int:
        return len(self.arenas)

    def blocks(self, tiles: int) -> int:
        """Return the number of thread blocks for ``tiles`` pieces of work, the same on every rank."""
        return max(1, min(tiles, self.most_blocks))

    def rotated(self, addresses: tuple[int, ...]) -> tuple[int, ...]:
        """Rotate addresses of all ranks to begin with this rank's, so that ranks begin with different peers."""
        return addresses[self.rank :] + addresses[: self.rank]


def padded(addresses: tuple[int, ...]) -> tuple[int, ...]:
    """Pad addresses with zeros to ``MAX_RANKS``, the number of address arguments of kernels."""
    return addresses + (0,) * (MAX_RANKS - len(addresses))


def unit_bytes(*values: int, most: int = 16) -> int:
    """Return the largest access size, 1, 2, 4 or 16 bytes, of which addresses and sizes are multiples.

    >>> unit_bytes(256, 48), unit_bytes(256, 24), unit_bytes(258), unit_bytes(256, most=4)
    (16, 4, 2, 4)
    """
    return next(unit for unit in (16, 4, 2, 1) if unit <= most and all(value % unit == 0 for value in values))
