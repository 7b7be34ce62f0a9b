"""Where the tensors of a communicator's calls lie on one rank, and what they hold before and after a call."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

import torch

from sidelane.program.collective import Kind
from sidelane.session import Communicator
from sidelane_lab.baselines.reference import POISON
from sidelane_lab.soak.described import FRESH, Call, Part, Spot
from sidelane_lab.soak.drawing import GUARD_BYTES
from sidelane_lab.soak.values import Values

MOST_BOUND = 256
_PIECES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """One part's tensors on this rank.

    Attributes:
        output, input: as a caller passes them; None where this rank has none.
        guarded: bytes that the call writes, with the guards around them; None if it writes none here.
        filled: bytes of the input; None where this rank puts nothing in.
        is_read: ``filled`` lies apart from what is written, and must be as it was behind the call.
    """

    output: torch.Tensor | None
    input: torch.Tensor | None
    guarded: torch.Tensor | None
    filled: torch.Tensor | None
    is_read: bool


class Memory:
    """One rank's memory for the calls of one communicator.

    Args:
        communicator: whose.
        nbytes: of the first block of symmetric memory, and of the ordinary memory.
        values: what goes in and must come out.
        fresh: makes bytes (uint8, 1-d) for tensors in memory of their own; None: of torch's allocator.
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
        """Have another block of symmetric memory, and pieces that come and go. Collective.

        No call touches the pieces. They are full of poison, which shows in a call that lies in the same place; each
        rank keeps them for a time of its own.
        """
        self.blocks.append(self._communicator.empty(nbytes, dtype=torch.uint8))
        for part in range(_PIECES):
            self._pieces.append(self._communicator.empty(1 + nbytes // (7 + part), dtype=torch.uint8).fill_(POISON))
        while len(self._pieces) > _PIECES + self.rank:
            self._pieces.popleft()

    def bind(self, call: Call) -> tuple[Bound, ...]:
        """The tensors of a call: the same ones every time, but for those in memory of their own."""
        bound = self._bound.get(call.number)
        if bound is None:
            bound = self.bind_anew(call)
            if not any(spot.offset == FRESH for spot in call.spots):
                if len(self._bound) >= MOST_BOUND:
                    del self._bound[next(iter(self._bound))]
                self._bound[call.number] = bound
        return bound

    def bind_anew(self, call: Call) -> tuple[Bound, ...]:
        """Other tensors of a call, where they lie in memory of their own."""
        return tuple(map(self._bind, call.parts))

    def fill(self, call: Call, key: int, bound: Sequence[Bound]) -> None:
        """Poison what the call writes, then write the inputs, which may lie in it."""
        for number, (part, each) in enumerate(zip(call.parts, bound, strict=True)):
            if each.guarded is not None:
                each.guarded.fill_(POISON)
            if each.filled is not None:
                each.filled.copy_(self._values.input(key, number, part, self.rank, self.world_size))

    def expected(self, call: Call, key: int, number: int) -> torch.Tensor:
        """What the bytes that part ``number`` writes must hold behind the call, guards included."""
        part, rank, n = call.parts[number], self.rank, self.world_size
        pieces = self._values.output(key, number, part, rank, n)
        if part.in_place and part.kind is Kind.REDUCE_SCATTER:  # what was put in stays around the own part
            begin, end = (at * _item_bytes(part) for at in (part.output_at(rank), part.output_at(rank) + part.count))
            input = self._values.input(key, number, part, rank, n)
            pieces = [input[:begin], *pieces, input[end:]]
        return torch.cat([self._guard, *pieces, self._guard])

    def untouched(self, call: Call, key: int, number: int) -> torch.Tensor:
        """What the same bytes hold if nothing has moved."""
        part, rank, n = call.parts[number], self.rank, self.world_size
        item = _item_bytes(part)
        if not part.in_place:
            whole = part.output_numel(rank, n) * item
            return self._guard[:1].expand(whole + 2 * GUARD_BYTES)
        poison = self._guard[:1].expand(part.whole_numel(rank, n) * item)
        input = self._values.input(key, number, part, rank, n)
        begin = part.input_at(rank) * item
        return torch.cat([self._guard, poison[:begin], input, poison[begin + len(input) :], self._guard])

    def input(self, call: Call, key: int, number: int) -> torch.Tensor:
        """What this rank put into part ``number``."""
        return self._values.input(key, number, call.parts[number], self.rank, self.world_size)

    def _bind(self, part: Part) -> Bound:
        rank, n, item = self.rank, self.world_size, _item_bytes(part)
        if part.in_place:
            guarded = self._place(part.output, part.whole_numel(rank, n) * item)
            inner = guarded[GUARD_BYTES : len(guarded) - GUARD_BYTES]
            output_at, input_at = part.output_at(rank) * item, part.input_at(rank) * item
            output = inner[output_at : output_at + part.output_numel(rank, n) * item]
            filled = inner[input_at : input_at + part.input_numel(rank, n) * item]
            has_input = part.input_numel(rank, n) > 0
            return Bound(_typed(output, part), _typed(filled, part), guarded, filled if has_input else None, False)
        assert part.input is not None
        written = part.output_numel(rank, n) * item
        read = part.input_numel(rank, n) * item
        # A rank that neither sends nor receives for the root has no tensor at all.
        has_output = not (part.kind is Kind.GATHER and rank != part.root)
        has_input = not (part.kind is Kind.SCATTER and rank != part.root)
        around = self._place(part.output, written) if has_output else None
        received = None if around is None else around[GUARD_BYTES : GUARD_BYTES + written]
        sent = self._place(part.input, read)[GUARD_BYTES : GUARD_BYTES + read] if has_input else None
        return Bound(_typed(received, part), _typed(sent, part), around, sent, has_input)

    def _place(self, spot: Spot, nbytes: int) -> torch.Tensor:
        """Bytes with guards in front and behind."""
        if spot.offset == FRESH:
            return self._fresh(nbytes + 2 * GUARD_BYTES)
        if spot.symmetric >> self.rank & 1:
            memory, begin = self.blocks[spot.block], spot.offset
        else:
            memory, begin = self._ordinary, spot.offset + spot.skew * self.rank
        return memory[begin - GUARD_BYTES : begin + nbytes + GUARD_BYTES]

    def _empty(self, nbytes: int) -> torch.Tensor:
        made = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        # Between CPU ranks, memory that peers can reach where the setting lets them.
        return made.share_memory_() if self._communicator.config.map_memory and not made.is_cuda else made


def _item_bytes(part: Part) -> int:
    dtype: torch.dtype = getattr(torch, part.dtype)
    return dtype.itemsize


def _typed(data: torch.Tensor | None, part: Part) -> torch.Tensor | None:
    """Bytes as the tensor that a caller passes."""
    if data is None:
        return None
    tensor = data.view(getattr(torch, part.dtype))
    if part.splits:
        return tensor.view(-1, part.count) if tensor.numel() else tensor.view(0, part.count)
    if part.fold > 1 and tensor.numel() and tensor.numel() % part.fold == 0:
        return tensor.view(part.fold, -1)
    return tensor
