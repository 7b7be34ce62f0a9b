"""Calls as data: what every rank passes, where its tensors lie, and which bytes of whose input must come out.

Sizes are in elements of the part's dtype. The definitions of the collectives here are the soak's own: it judges those
of ``program.collective`` by them.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum

from sidelane.program.collective import Kind

FRESH = -1
"""Offset of a tensor that lies in no arena: new ordinary memory at every call."""


class Form(StrEnum):
    """How the parts of a call are passed."""

    ONE = "one"
    LIST = "list"
    BATCH = "batch"


@dataclasses.dataclass(frozen=True, slots=True)
class Spot:
    """Where a tensor lies, the same description on every rank.

    Attributes:
        offset: of its first byte in a block of symmetric memory, and in ordinary memory; or ``FRESH``.
        symmetric: ranks on which it lies in symmetric memory, a bit each.
        block: of symmetric memory.
        skew: bytes by which it lies further in the ordinary memory of each rank than in that of the one before.
        room: bytes that it may take on any rank, skew included.
    """

    offset: int = FRESH
    symmetric: int = 0
    block: int = 0
    skew: int = 0
    room: int = 0

    def overlaps(self, other: Spot) -> bool:
        """True if the two share bytes on some rank: blocks and ordinary memory are taken for one, which is safe."""
        if FRESH in (self.offset, other.offset):
            return False
        return self.offset < other.offset + other.room and other.offset < self.offset + self.room


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One collective on tensors of its own.

    Attributes:
        count: elements of a shard, part or (all_reduce, broadcast) the whole tensor; with ``splits``, of a row.
        output: where the output lies; in place, what holds input and output.
        input: where the input lies; None in place.
        op: of the kinds that reduce.
        root: of the kinds that have one.
        splits: ``splits[i][j]`` rows go from rank i to rank j; empty for equal parts.
        fold: tensors have that many rows where their elements can be shared evenly by them.
    """

    kind: Kind
    dtype: str
    count: int
    output: Spot
    input: Spot | None = None
    op: str = ""
    root: int = 0
    splits: tuple[tuple[int, ...], ...] = ()
    fold: int = 1

    @property
    def in_place(self) -> bool:
        return self.input is None

    @property
    def spots(self) -> tuple[Spot, ...]:
        return (self.output,) if self.input is None else (self.output, self.input)

    def output_numel(self, rank: int, world_size: int) -> int:
        """Elements that ``rank`` receives."""
        match self.kind:
            case Kind.ALL_TO_ALL if self.splits:
                return self.count * sum(row[rank] for row in self.splits)
            case Kind.ALL_GATHER | Kind.ALL_TO_ALL:
                return self.count * world_size
            case Kind.GATHER:
                return self.count * world_size if rank == self.root else 0
            case _:
                return self.count

    def input_numel(self, rank: int, world_size: int) -> int:
        """Elements that ``rank`` puts in."""
        match self.kind:
            case Kind.ALL_TO_ALL if self.splits:
                return self.count * sum(self.splits[rank])
            case Kind.ALL_TO_ALL | Kind.REDUCE_SCATTER:
                return self.count * world_size
            case Kind.SCATTER:
                return self.count * world_size if rank == self.root else 0
            case Kind.BROADCAST:
                return self.count if rank == self.root else 0
            case _:
                return self.count

    def whole_numel(self, rank: int, world_size: int) -> int:
        """Elements of what holds input and output of a call in place."""
        return max(self.output_numel(rank, world_size), self.input_numel(rank, world_size))

    def input_at(self, rank: int) -> int:
        """First element of the input in it."""
        return rank * self.count if self.kind is Kind.ALL_GATHER else 0

    def output_at(self, rank: int) -> int:
        """First element of the output in it."""
        return rank * self.count if self.kind is Kind.REDUCE_SCATTER else 0

    def sources(self, rank: int, world_size: int) -> list[tuple[int, int, int]]:
        """What the output of ``rank`` is made of: (source rank, first element of its input, elements).

        In their order, one behind the other; of the kinds that reduce, to be combined in that order.

        >>> Part(Kind.ALL_TO_ALL, "int32", 2, Spot(), Spot()).sources(1, 3)
        [(0, 2, 2), (1, 2, 2), (2, 2, 2)]
        """
        everyone, count = range(world_size), self.count
        match self.kind:
            case Kind.ALL_TO_ALL if self.splits:
                rows = self.splits
                return [(source, count * sum(rows[source][:rank]), count * rows[source][rank]) for source in everyone]
            case Kind.ALL_TO_ALL | Kind.REDUCE_SCATTER:
                return [(source, rank * count, count) for source in everyone]
            case Kind.BROADCAST:
                return [(self.root, 0, count)]
            case Kind.SCATTER:
                return [(self.root, rank * count, count)]
            case Kind.GATHER if rank != self.root:
                return []
            case _:
                return [(source, 0, count) for source in everyone]


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call as every rank makes it.

    Attributes:
        number: no other call of the episode has it.
        parts: one; of a list or batch any number.
        variant: as callers write it.
        beside: likewise; None leaves it to the settings.
    """

    number: int
    form: Form
    parts: tuple[Part, ...]
    variant: str
    beside: str | None = None

    @property
    def label(self) -> str:
        """Under which it is counted."""
        if self.form is not Form.ONE:
            return "lists" if self.form is Form.LIST else "batches"
        (part,) = self.parts
        return "uneven" if part.splits else str(part.kind)

    @property
    def spots(self) -> tuple[Spot, ...]:
        return tuple(spot for part in self.parts for spot in part.spots)

    def overlaps(self, other: Call) -> bool:
        """True if tensors of the two share bytes on some rank."""
        return any(mine.overlaps(theirs) for mine in self.spots for theirs in other.spots)

    def __str__(self) -> str:
        parts = [_words(part) for part in self.parts[:3]]
        more = f" and {len(self.parts) - 3} more" if len(self.parts) > 3 else ""
        beside = f" beside {self.beside}" if self.beside else ""
        return f"call {self.number}, {self.form} {self.variant}{beside}: {'; '.join(parts)}{more}"


def _words(part: Part) -> str:
    details = [part.op] * bool(part.op) + [f"root {part.root}"] * (part.kind in (Kind.SCATTER, Kind.GATHER))
    details += [f"root {part.root}"] * (part.kind is Kind.BROADCAST) + [f"splits {part.splits}"] * bool(part.splits)
    places = ["in place"] if part.in_place else []
    places += [_place(spot) for spot in part.spots]
    return ", ".join([f"{part.kind} of {part.count} {part.dtype}", *details, *places])


def _place(spot: Spot) -> str:
    if spot.offset == FRESH:
        return "fresh"
    return f"symmetric on {spot.symmetric:#b} at {spot.block}+{spot.offset} (skew {spot.skew})"
