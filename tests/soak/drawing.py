"""New calls at random: kinds, sizes, dtypes, places and variants that are legal together. The same on every rank."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import torch
from expected import MOVING_DTYPES

from sidelane.choice import Abilities
from sidelane.choice.candidate import candidates
from sidelane.collectives.plan import AUTO
from sidelane.config import COMPUTE, NOTHING
from sidelane.program.collective import ELEMENT_BYTES, REDUCING, Kind, ReduceOp
from sidelane.program.shape import CallShape
from sidelane.session.prelaunch import prelaunchable
from soak.calls import FRESH, Call, Form, Part, Spot
from soak.memory import GUARD_BYTES

LISTED = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.BROADCAST, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
IN_PLACE = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
PREPARED = (Kind.ALL_GATHER, Kind.ALL_TO_ALL)
FORMS = ((Form.ONE, 0.72), (Form.LIST, 0.19), (Form.BATCH, 0.09))

UNHEARD = range(1001, 1400)
"""Counts that no ordinary call has: a call that is to be refused must be new to the communicator."""

MOVED = tuple(str(dtype).removeprefix("torch.") for dtype in MOVING_DTYPES)
REDUCED = tuple(ELEMENT_BYTES)
ITEM_BYTES = {name: getattr(torch, name).itemsize for name in MOVED}


class Drawing:
    """Draws calls for one communicator.

    Args:
        draw: the episode's chance.
        numbers: names for calls.
        world_size: ranks of the communicator.
        abilities: returns those of the machine, once the communicator has been made.
        block_bytes: size of its first block of symmetric memory, and of its ordinary memory.
        large_bytes: size of a rare tensor.
        reduced, operations: dtypes and operations of calls that reduce.
    """

    def __init__(
        self,
        draw: random.Random,
        numbers: Iterator[int],
        world_size: int,
        abilities: Callable[[], Abilities],
        block_bytes: int,
        large_bytes: int,
        reduced: Sequence[str] = REDUCED,
        operations: Sequence[str] = tuple(ReduceOp),
    ) -> None:
        self._reduced, self._operations = reduced, operations
        self._draw, self._numbers, self._n, self._abilities = draw, numbers, world_size, abilities
        self._sizes = [block_bytes]
        self._next = [0]
        self._everywhere = (1 << world_size) - 1
        self._large_bytes = large_bytes
        self._unheard = itertools.chain(UNHEARD)
        self._others = itertools.count(UNHEARD.stop)

    def add_block(self, nbytes: int) -> None:
        """Take note of another block of symmetric memory."""
        self._sizes.append(nbytes)
        self._next.append(0)

    def call(self, form: Form | None = None) -> Call:
        """Draw a call like those that users make."""
        draw = self._draw
        while True:
            chosen = form or draw.choices([name for name, _ in FORMS], [weight for _, weight in FORMS])[0]
            fresh = draw.random() < 0.08
            if chosen is Form.ONE:
                uneven = draw.random() < 0.07
                kind = Kind.ALL_TO_ALL if uneven else draw.choice(tuple(Kind))
                parts = [self._part(kind, uneven=uneven, fresh=fresh, large=draw.random() < 0.004)]
            else:
                parts = self._parts(chosen, fresh)
            if not any(a.overlaps(b) for a, b in itertools.combinations([s for p in parts for s in p.spots], 2)):
                break
        variant, beside = self._variant(chosen, parts)
        return Call(next(self._numbers), chosen, tuple(parts), variant, beside)

    def never_again(self) -> Call:
        """Draw one of sizes that no call of the communicator has had, or will have, in memory of its own."""
        draw = self._draw
        form = draw.choices([name for name, _ in FORMS], [weight for _, weight in FORMS])[0]
        kind = draw.choice(LISTED) if form is Form.LIST else draw.choice(tuple(Kind))
        kinds = [kind] if form is Form.ONE else [kind if form is Form.LIST else draw.choice(LISTED) for _ in range(2)]
        root = draw.randrange(self._n)
        parts = [self._part(each, count=next(self._others), root=root, fresh=True) for each in kinds]
        parts = [dataclasses.replace(part, op=parts[0].op) if form is Form.LIST else part for part in parts]
        variant, beside = self._variant(form, parts)
        return Call(next(self._numbers), form, tuple(parts), variant, beside)

    def captured(self) -> Call:
        """Draw one for a graph, whose tensors stay where they are."""
        draw = self._draw
        part = self._part(draw.choice(tuple(Kind)))
        names = [found.variant for found in candidates(self._asked([part], captured=True), self._abilities())]
        return Call(next(self._numbers), Form.ONE, (part,), draw.choice([AUTO, *names]))

    def prepared(self) -> Call:
        """Draw one for a handle that is armed ahead of the call."""
        draw = self._draw
        part = self._part(draw.choice(PREPARED))
        names = prelaunchable(candidates(self._asked([part]), self._abilities()))
        return Call(next(self._numbers), Form.ONE, (part,), draw.choice(names))

    def unheard(self, kind: Kind) -> Call | None:
        """Draw one that the communicator has not met, of a new size; None when these are used up."""
        count = next(self._unheard, None)
        if count is None:
            return None
        short = [name for name in (self._reduced if kind in REDUCING else MOVED) if ITEM_BYTES[name] <= 4]
        part = self._part(kind, count=count, dtype=self._draw.choice(short), in_place=False)
        return Call(next(self._numbers), Form.ONE, (part,), self._draw.choice((AUTO, "b2b", "pcpy")))

    def _parts(self, form: Form, fresh: bool) -> list[Part]:
        draw = self._draw
        many = draw.random() < 0.03
        length = draw.randrange(20, 60) if many else draw.choice((0, 1, 2, 2, 3, 3, 4, 5, 8))
        kind, root = draw.choice(LISTED), draw.randrange(self._n)
        parts = []
        for _ in range(length):
            each = kind if form is Form.LIST else draw.choice(LISTED)
            count = draw.randrange(12) if many else None
            # Roots of a batch may differ, and so may operations; those of a list are the call's.
            alike = root if form is Form.LIST else None
            part = self._part(each, count=count, root=alike, small=True, fresh=fresh)
            parts.append(part)
        if form is Form.LIST and parts and kind in REDUCING:
            op = parts[0].op
            parts = [dataclasses.replace(part, op=op) for part in parts]
        return parts

    def _part(
        self,
        kind: Kind,
        *,
        count: int | None = None,
        dtype: str = "",
        root: int | None = None,
        uneven: bool = False,
        fresh: bool = False,
        in_place: bool | None = None,
        small: bool = False,
        large: bool = False,
    ) -> Part:
        draw, n = self._draw, self._n
        dtype = dtype or draw.choice(self._reduced if kind in REDUCING else MOVED)
        root = draw.randrange(n) if root is None else root
        op = str(draw.choice(self._operations)) if kind in REDUCING else ""
        splits = tuple(tuple(draw.choice((0, 1, 1, 2, 5)) for _ in range(n)) for _ in range(n)) if uneven else ()
        if uneven:
            count = draw.choice((1, 2, 3, draw.randrange(1, 60)))
        elif large:
            count = draw.randrange(self._large_bytes // 8, self._large_bytes) // (ITEM_BYTES[dtype] * n)
        elif count is None:
            count = self._count(ITEM_BYTES[dtype], small)
        in_place = draw.random() < 0.35 if in_place is None else in_place
        in_place = (in_place and kind in IN_PLACE and not uneven) or kind is Kind.BROADCAST
        fold = draw.choice((1, 1, 2, 3))
        draft = Part(kind, dtype, count, Spot(), None if in_place else Spot(), op, root, splits, fold)
        fresh = fresh or large
        masks = (0, 0) if fresh else self._masks(kind, in_place)
        while True:  # blocks of symmetric memory share the ordinary memory, where two of their places may meet
            spots = [
                Spot() if fresh else self._spot(nbytes, draft.item_bytes, mask)
                for nbytes, mask in zip(self._room(draft), masks, strict=False)
            ]
            if len(spots) == 1 or not spots[0].overlaps(spots[1]):
                break
        return dataclasses.replace(draft, output=spots[0], input=None if in_place else spots[1])

    def _count(self, item: int, small: bool) -> int:
        draw = self._draw
        most = self._sizes[0] // ((96 if small else 10) * item * self._n)
        chance = draw.random()
        if chance < 0.03:
            return 0
        if chance < 0.12:
            return 1
        highest = 64 if chance < 0.5 else 1000 if chance < 0.85 else most
        count = draw.randrange(2, max(3, min(highest, most)))
        return count - len(UNHEARD) if count in UNHEARD else count

    def _room(self, part: Part) -> list[int]:
        """Return the bytes of output and input, or of both together, on the rank that needs most."""
        numels = [part.whole_numel] if part.in_place else [part.output_numel, part.input_numel]
        return [part.item_bytes * max(numel(rank, self._n) for rank in range(self._n)) for numel in numels]

    def _masks(self, kind: Kind, in_place: bool) -> tuple[int, int]:
        """Draw ranks on which output and input are symmetric (docs/internals/programs.md, "The same place")."""
        draw, everywhere = self._draw, self._everywhere
        anywhere = draw.choice((0, everywhere, draw.randrange(everywhere + 1)))
        agreed = draw.choice((0, everywhere)), draw.choice((0, everywhere))
        if in_place or kind is Kind.ALL_REDUCE:
            return agreed
        if kind in (Kind.GATHER, Kind.REDUCE_SCATTER):
            return anywhere, agreed[1]
        return agreed[0], anywhere if agreed[0] or kind is Kind.SCATTER else agreed[1]

    def _spot(self, nbytes: int, item: int, mask: int) -> Spot:
        draw = self._draw
        skew = item * draw.choice((0, 0, 1, 3))
        room = nbytes + skew * (self._n - 1)
        block = draw.randrange(len(self._sizes))
        if self._sizes[block] < 2 * (room + 512):
            block = 0
        step = draw.choice((item, item, 64, 256))
        begin = -(-(self._next[block] + GUARD_BYTES) // step) * step + (item * draw.randrange(9) if step == item else 0)
        if begin + room + GUARD_BYTES > self._sizes[block]:
            begin = -(-GUARD_BYTES // step) * step
        self._next[block] = begin + room + GUARD_BYTES
        assert self._next[block] <= self._sizes[block], "a tensor is larger than the block"
        return Spot(begin, mask, block, skew, room + GUARD_BYTES)

    def _variant(self, form: Form, parts: Sequence[Part]) -> tuple[str, str | None]:
        draw = self._draw
        if draw.random() < 0.3:
            return AUTO, draw.choice((None, None, NOTHING, COMPUTE))
        if form is Form.BATCH:  # those that every kind has; the others depend on what is in it
            return draw.choice(("b2b", "pcpy")), None
        beside = COMPUTE if draw.random() < 0.2 else NOTHING
        found = candidates(self._asked(parts, beside=beside, form=form), self._abilities()) if parts else ()
        names = [each.variant for each in found]
        return (draw.choice(names), beside) if names else (AUTO, None)

    def _asked(
        self, parts: Sequence[Part], *, beside: str = NOTHING, captured: bool = False, form: Form = Form.ONE
    ) -> CallShape:
        """Return the call as Sidelane's list of legal candidates takes it."""
        sizes = [max(self._room(part)) for part in parts]
        return CallShape(
            kind=parts[0].kind,
            world_size=self._n,
            nbytes=sum(sizes),
            dtype=parts[0].dtype,
            in_place=any(part.in_place for part in parts),
            symmetric=all(self._reachable(part) for part in parts),
            captured=captured,
            beside=beside,
            even=not any(part.splits for part in parts),
            listed=form is not Form.ONE,
            tensors=len(parts),
            uniform=len({(part.dtype if part.op else "", part.op, part.root) for part in parts}) <= 1,
        )

    def _reachable(self, part: Part) -> bool:
        """Return whether the tensors that a kind's peers write to or read from lie in symmetric memory."""
        everywhere = self._everywhere
        spots = [spot.symmetric == everywhere and spot.offset != FRESH for spot in part.spots]
        match part.kind:
            case Kind.GATHER:
                return False
            case Kind.REDUCE_SCATTER:
                return spots[-1]
            case Kind.ALL_REDUCE:
                return all(spots)
            case _:
                return spots[0]
