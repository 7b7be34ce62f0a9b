"""What every rank puts into a call, and what must come out: slices of pools that all ranks have alike.

Which slice follows from the call's key, the number of the part and the rank. So every rank knows what its peers put in,
and neither input nor reference takes more than copies, on the device where they are needed.
"""

from __future__ import annotations

import torch

from sidelane.program.collective import ReduceOp
from sidelane_lab.baselines.reference import in_rank_order
from sidelane_lab.soak.described import Part

POOL_BYTES = 1 << 20
"""Room for slices of small tensors. Pools for larger ones have four times what these take."""

_SEED = 20_003
_WORD = (1 << 64) - 1


class Values:
    """The pools of one rank.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pools: dict[tuple[str, int], torch.Tensor] = {}

    def input(self, key: int, number: int, part: Part, rank: int, world_size: int) -> torch.Tensor:
        """What ``rank`` puts into part ``number`` of a call: bytes (uint8, 1-d) not to be written to."""
        return self._slice(key, number, part, rank, 0, part.input_numel(rank, world_size), world_size).view(torch.uint8)

    def output(self, key: int, number: int, part: Part, rank: int, world_size: int) -> list[torch.Tensor]:
        """What ``rank`` must get: bytes (uint8, 1-d), one piece behind the other."""
        slices = [
            self._slice(key, number, part, source, first, numel, world_size)
            for source, first, numel in part.sources(rank, world_size)
        ]
        if part.op:
            slices = [in_rank_order(slices, ReduceOp(part.op))]
        return [each.view(torch.uint8) for each in slices]

    def _slice(
        self, key: int, number: int, part: Part, source: int, first: int, numel: int, world_size: int
    ) -> torch.Tensor:
        longest = part.input_numel(source, world_size)
        # Any bytes will do where they are only moved; where they are added up, they are numbers.
        name, item = (part.dtype, 1) if part.op else ("uint8", getattr(torch, part.dtype).itemsize)
        pool = self._pool(name, longest * item)
        begin = _mixed(key, number, source) % (pool.numel() - longest * item + 1)
        return pool[begin + first * item : begin + (first + numel) * item]

    def _pool(self, dtype: str, numel: int) -> torch.Tensor:
        item = getattr(torch, dtype).itemsize
        size = POOL_BYTES // item
        while 4 * numel > size:
            size *= 4
        pool = self._pools.get((dtype, size))
        if pool is None:
            pool = self._pools[dtype, size] = _pool(dtype, size).to(self._device)
        return pool


def _pool(dtype: str, numel: int) -> torch.Tensor:
    """Random bytes, or numbers that show in which order, how wide and how often rounded they were added up."""
    generator = torch.Generator().manual_seed(_SEED)
    kind: torch.dtype = getattr(torch, dtype)
    if dtype == "uint8":
        return torch.empty(numel // 8, dtype=torch.int64).random_(generator=generator).view(torch.uint8)
    if not kind.is_floating_point:
        limits = torch.iinfo(kind)
        return torch.empty(numel, dtype=kind).random_(limits.min, limits.max, generator=generator)
    scale = torch.randint(-9, 7, (numel,), generator=generator)
    numbers = torch.ldexp(torch.randn(numel, generator=generator), scale).mul_(100).to(kind)
    # Whether -0 or +0 is the lesser is nowhere defined.
    return numbers.masked_fill_(numbers == 0, 1)


def _mixed(key: int, number: int, rank: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014) over what names an input."""
    word = (key + number * 0x9E3779B97F4A7C15 + rank * 0xC2B2AE3D27D4EB4F) & _WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
    return word ^ (word >> 31)
