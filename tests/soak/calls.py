"""Calls as data: the arguments of every rank, where the tensors lie, and which bytes of which input must come out.

Sizes are in elements of the part's dtype. These definitions of the collectives share nothing with those of
``program.collective``, which they judge.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum

import torch

from sidelane.program.collective import Kind

FRESH = -1
"""Offset of a tensor that lies in no arena: new ordinary memory at every call."""


class Form(StrEnum):
    """The way in which the parts of a call are passed."""

    ONE = "one"
    LIST = "list"
    BATCH = "batch"


@dataclasses.dataclass(frozen=True, slots=True)
class Spot:
    """A tensor's place, the same description on every rank.

    Attributes:
        offset: the first byte in a block of symmetric memory, and in ordinary memory; or ``FRESH``.
        symmetric: the ranks on which it lies in symmetric memory, a bit each.
        block: the number of the block.
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
        count: elements of a shard, a part, or (all_reduce, broadcast) the whole tensor; with ``splits``, of a row.
        output: the place of the output; in place, of the tensor that holds input and output.
        input: the place of the input; None in place.
        splits: ``splits[i][j]`` rows go from rank i to rank j; empty for equal parts.
        fold: rows of the tensors whose elements can be shared evenly by that many.
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

    @property
    def item_bytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize

    def output_numel(self, rank: int, world_size: int) -> int:
        """Elements that ``rank`` receives: those that its sources send, unless they are reduced."""
        sources = self.sources(rank, world_size)
        return self.count if self.op else sum(numel for _, _, numel in sources)

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
        """Elements of the tensor that holds input and output of a call in place."""
        return max(self.output_numel(rank, world_size), self.input_numel(rank, world_size))

    def input_at(self, rank: int) -> int:
        """The first element of the input in it."""
        return rank * self.count if self.kind is Kind.ALL_GATHER else 0

    def output_at(self, rank: int) -> int:
        """The first element of the output in it."""
        return rank * self.count if self.kind is Kind.REDUCE_SCATTER else 0

    def sources(self, rank: int, world_size: int) -> list[tuple[int, int, int]]:
        """The pieces of the output of ``rank``: (source rank, first element of its input, elements).

        They lie in this order, one behind the other; those of the kinds that reduce are combined in it.

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
        number: a name that no other call of the episode has.
        parts: one; in a list or batch any number.
        variant, beside: arguments, as callers write them.
    """

    number: int
    form: Form
    parts: tuple[Part, ...]
    variant: str
    beside: str | None = None

    @property
    def label(self) -> str:
        """The name under which it is counted."""
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
        """Every fact about the call, without those that have their default."""
        parts = [
            ", ".join(
                f"{field.name} {value}"
                for field in dataclasses.fields(part)
                if (value := getattr(part, field.name)) != field.default
            )
            for part in self.parts[:3]
        ]
        more = f" and {len(self.parts) - 3} more" if len(self.parts) > 3 else ""
        return f"call {self.number}, {self.form} {self.variant} beside {self.beside}: {'; '.join(parts)}{more}"
