"""The memory of a communicator's calls on one rank: what it holds before a call, and must hold after it.

Inputs are slices of pools that all ranks have alike. Which slice follows from the call's key, the part's number and the
rank. So every rank knows the inputs of its peers, and neither input nor reference takes more than copies.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

import torch
from expected import in_rank_order

from sidelane.program.collective import Kind, ReduceOp
from sidelane.session import Communicator
from sidelane_lab.baselines.reference import POISON
from soak.calls import FRESH, Call, Part, Spot

GUARD_BYTES = 16
"""Bytes in front of and behind everything that a call writes: nobody may touch them."""

POOL_BYTES = 1 << 20
"""Bytes of a pool for small tensors. Pools for larger ones have four times what these take."""

MOST_BOUND, PIECES = 256, 4
_SEED, _WORD = 20_003, (1 << 64) - 1


class Values:
    """The pools of one rank, on its device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pools: dict[tuple[str, int], torch.Tensor] = {}

    def input(self, key: int, number: int, part: Part, rank: int, world_size: int) -> torch.Tensor:
        """The input of ``rank`` for part ``number`` of a call: bytes (uint8, 1-d) not to be written to."""
        return self._slice(key, number, part, rank, 0, part.input_numel(rank, world_size), world_size).view(torch.uint8)

    def output(self, key: int, number: int, part: Part, rank: int, world_size: int) -> list[torch.Tensor]:
        """The output that ``rank`` must get: bytes (uint8, 1-d), one piece behind the other."""
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
        name, item = (part.dtype, 1) if part.op else ("uint8", part.item_bytes)
        pool = self._pool(name, longest * item)
        begin = _mixed(key, number, source) % (pool.numel() - longest * item + 1)
        return pool[begin + first * item : begin + (first + numel) * item]

    def _pool(self, dtype: str, numel: int) -> torch.Tensor:
        size = POOL_BYTES // getattr(torch, dtype).itemsize
        while 4 * numel > size:
            size *= 4
        if (dtype, size) not in self._pools:
            self._pools[dtype, size] = _random(dtype, size).to(self._device)
        return self._pools[dtype, size]


def _random(dtype: str, numel: int) -> torch.Tensor:
    """Make random bytes, or numbers that show in which order, how wide and how often rounded they were added up."""
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
    """Mix the names of an input with SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014)."""
    word = (key + number * 0x9E3779B97F4A7C15 + rank * 0xC2B2AE3D27D4EB4F) & _WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
    return word ^ (word >> 31)


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """One part's tensors on this rank.

    Attributes:
        output, input: the tensors that a caller passes; None where this rank has none.
        guarded: bytes that the call writes, with the guards around them; None if it writes none here.
        filled: bytes of the input; None where this rank puts nothing in.
        is_read: ``filled`` lies apart from what is written, and must not have changed after the call.
    """

    output: torch.Tensor | None
    input: torch.Tensor | None
    guarded: torch.Tensor | None
    filled: torch.Tensor | None
    is_read: bool


class Memory:
    """One rank's memory for the calls of one communicator.

    Args:
        communicator: the owner of the symmetric memory.
        nbytes: size of the first block of symmetric memory, and of the ordinary memory.
        values: inputs and outputs.
        fresh: makes bytes (uint8, 1-d) for tensors in memory of their own; None takes torch's allocator.
    """

    def __init__(
        self,
        communicator: Communicator,
        nbytes: int,
        values: Values,
        fresh: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self._communicator, self._values = communicator, values
        self._fresh = self._empty if fresh is None else fresh
        self.rank, self.world_size = communicator.rank, communicator.world_size
        self._device = communicator.device
        self.blocks = [communicator.empty(nbytes, dtype=torch.uint8)]
        self._ordinary = self._empty(nbytes)
        self._guard = torch.full((GUARD_BYTES,), POISON, dtype=torch.uint8, device=self._device)
        self._pieces: collections.deque[torch.Tensor] = collections.deque()
        self._bound: dict[int, tuple[Bound, ...]] = {}

    def allocate(self, nbytes: int) -> None:
        """Allocate another block of symmetric memory, and pieces that come and go. Collective.

        No call touches the pieces. They are full of poison, which shows in a call that lies in the same place; each
        rank keeps them for a time of its own.
        """
        self.blocks.append(self._communicator.empty(nbytes, dtype=torch.uint8))
        for part in range(PIECES):
            self._pieces.append(self._communicator.empty(1 + nbytes // (7 + part), dtype=torch.uint8).fill_(POISON))
        while len(self._pieces) > PIECES + self.rank:
            self._pieces.popleft()

    def bind(self, call: Call) -> tuple[Bound, ...]:
        """Return the tensors of a call: the same ones every time, but for those in memory of their own."""
        bound = self._bound.get(call.number)
        if bound is None:
            bound = self.bind_anew(call)
            if not any(spot.offset == FRESH for spot in call.spots):
                if len(self._bound) >= MOST_BOUND:
                    del self._bound[next(iter(self._bound))]
                self._bound[call.number] = bound
        return bound

    def bind_anew(self, call: Call) -> tuple[Bound, ...]:
        """Return other tensors for a call, where they lie in memory of their own."""
        return tuple(map(self._bind, call.parts))

    def fill(self, call: Call, key: int, bound: Sequence[Bound]) -> None:
        """Poison what the call writes, then write the inputs, which may lie in it."""
        for number, (part, each) in enumerate(zip(call.parts, bound, strict=True)):
            if each.guarded is not None:
                each.guarded.fill_(POISON)
            if each.filled is not None:
                each.filled.copy_(self._values.input(key, number, part, self.rank, self.world_size))

    def expected(self, call: Call, key: int, number: int) -> torch.Tensor:
        """Return what the bytes that part ``number`` writes must hold after the call, guards included."""
        part, rank, n = call.parts[number], self.rank, self.world_size
        pieces = self._values.output(key, number, part, rank, n)
        if part.in_place and part.kind is Kind.REDUCE_SCATTER:  # the input stays around the own part
            begin = part.output_at(rank) * part.item_bytes
            input = self.input(call, key, number)
            pieces = [input[:begin], *pieces, input[begin + part.count * part.item_bytes :]]
        return torch.cat([self._guard, *pieces, self._guard])

    def untouched(self, call: Call, key: int, number: int) -> torch.Tensor:
        """Return what the same bytes hold if nothing has moved."""
        part, rank, n = call.parts[number], self.rank, self.world_size
        if not part.in_place:
            return self._guard[:1].expand(part.output_numel(rank, n) * part.item_bytes + 2 * GUARD_BYTES)
        poison = self._guard[:1].expand(part.whole_numel(rank, n) * part.item_bytes)
        input = self.input(call, key, number)
        begin = part.input_at(rank) * part.item_bytes
        return torch.cat([self._guard, poison[:begin], input, poison[begin + len(input) :], self._guard])

    def input(self, call: Call, key: int, number: int) -> torch.Tensor:
        """Return this rank's input for part ``number``."""
        return self._values.input(key, number, call.parts[number], self.rank, self.world_size)

    def _bind(self, part: Part) -> Bound:
        rank, n, item = self.rank, self.world_size, part.item_bytes
        written, read = part.output_numel(rank, n) * item, part.input_numel(rank, n) * item
        if part.input is None:
            guarded = self._place(part.output, part.whole_numel(rank, n) * item)
            output_at, input_at = (GUARD_BYTES + at(rank) * item for at in (part.output_at, part.input_at))
            output, filled = guarded[output_at : output_at + written], guarded[input_at : input_at + read]
            return Bound(_typed(output, part), _typed(filled, part), guarded, filled if read else None, False)
        # A rank that neither sends nor receives for the root has no tensor at all.
        has_output = not (part.kind is Kind.GATHER and rank != part.root)
        has_input = not (part.kind is Kind.SCATTER and rank != part.root)
        around = self._place(part.output, written) if has_output else None
        received = None if around is None else around[GUARD_BYTES : GUARD_BYTES + written]
        sent = self._place(part.input, read)[GUARD_BYTES : GUARD_BYTES + read] if has_input else None
        return Bound(_typed(received, part), _typed(sent, part), around, sent, has_input)

    def _place(self, spot: Spot, nbytes: int) -> torch.Tensor:
        """Return bytes with guards in front and behind."""
        if spot.offset == FRESH:
            return self._fresh(nbytes + 2 * GUARD_BYTES)
        if spot.symmetric >> self.rank & 1:
            memory, begin = self.blocks[spot.block], spot.offset
        else:
            memory, begin = self._ordinary, spot.offset + spot.skew * self.rank
        return memory[begin - GUARD_BYTES : begin + nbytes + GUARD_BYTES]

    def _empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


def _typed(data: torch.Tensor | None, part: Part) -> torch.Tensor | None:
    """View bytes as the tensor that a caller passes."""
    if data is None:
        return None
    tensor = data.view(getattr(torch, part.dtype))
    if part.splits:
        return tensor.view(-1, part.count) if tensor.numel() else tensor.view(0, part.count)
    if part.fold > 1 and tensor.numel() and tensor.numel() % part.fold == 0:
        return tensor.view(part.fold, -1)
    return tensor
