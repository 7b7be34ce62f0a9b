"""Calls with many tensors as data: the request of one rank, and the agreement of all ranks."""

from __future__ import annotations

import dataclasses
import hashlib
from functools import cached_property

import torch

from sidelane.collectives.arguments import Request
from sidelane.collectives.heap import Location
from sidelane.config import COMPUTE, NOTHING
from sidelane.program.batch import Batch
from sidelane.program.collective import REDUCING, Collective, Kind
from sidelane.program.resharding import Resharding
from sidelane.program.shape import Beside, CallShape, Computation

LISTED = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.BROADCAST, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
"""The collectives that take lists, and that a batch takes."""

BATCH = "batch"
"""Name of calls that may hold several kinds."""


@dataclasses.dataclass(frozen=True, slots=True)
class ListRequest:
    """One rank's view of a call with many tensors: a request for each tensor, or for each pair."""

    parts: tuple[Request, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ListEntry:
    """The part of a list agreement for one tensor or pair; its attributes are those of ``plan.Agreement``."""

    collective: Collective
    dtype: str
    input_place: Location
    output_place: Location
    resharding: Resharding | None = None

    @staticmethod
    def of(request: Request) -> ListEntry:
        return ListEntry(
            request.collective, str(request.dtype).removeprefix("torch."), *request.places, request.resharding
        )

    def for_engines(self) -> ListEntry:
        """Return the entry for a program of copy engines, whose reductions always go through staging."""
        if self.collective.kind not in REDUCING:
            return self
        return dataclasses.replace(self, input_place=None, output_place=None)

    @property
    def symmetric(self) -> bool:
        """True if peers reach the output, and for reductions the input. A reduce_scatter needs its input only."""
        if not any(map(any, self.collective.counts)):
            return True
        kind = self.collective.kind
        read = kind not in REDUCING or self.input_place is not None
        return read and (kind is Kind.REDUCE_SCATTER or self.output_place is not None)


@dataclasses.dataclass(frozen=True)
class ListAgreement:
    """The part of a call with many tensors that must be the same on all ranks (see ``plan.Agreement``).

    Attributes:
        name: the kind of a call with lists, or ``BATCH``.
        world_size: number of ranks in the group.
        parts: one entry for each tensor or pair.
        variant: the caller's argument, ``auto`` included.
        frozen: the call is being captured into a graph.
        beside: what the caller says runs next to it.
    """

    name: str
    world_size: int
    parts: tuple[ListEntry, ...]
    variant: str
    frozen: bool
    beside: Beside = NOTHING

    @cached_property
    def collective(self) -> Batch:
        """The collective that the program must carry out."""
        return Batch(self.name, self.world_size, tuple(part.collective for part in self.parts))

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of collectives in the call; the kind with the most bytes comes first."""
        if self.name != BATCH:
            return (Kind(self.name),)
        nbytes: dict[Kind, int] = {}
        for part in self.parts:
            collective = part.collective
            nbytes[collective.kind] = nbytes.get(collective.kind, 0) + collective.largest_buffer
        # A batch without tensors counts as an all_gather without tensors.
        return tuple(sorted(nbytes, key=lambda kind: (-nbytes[kind], kind))) or (Kind.ALL_GATHER,)

    @property
    def call(self) -> CallShape:
        """The input of the choice: the bytes of all tensors together, under the kind that has most of them."""
        calls = [
            CallShape.of(
                part.collective, part.dtype, symmetric=part.symmetric, captured=self.frozen, beside=self.beside
            )
            for part in self.parts
        ]
        return CallShape(
            kind=self.kinds[0],
            world_size=self.world_size,
            nbytes=sum(call.nbytes for call in calls),
            dtype=calls[0].dtype if calls else "uint8",
            in_place=any(call.in_place for call in calls),
            symmetric=all(call.symmetric for call in calls),
            captured=self.frozen,
            beside=COMPUTE if isinstance(self.beside, Computation) else self.beside,
            computation=self.beside if isinstance(self.beside, Computation) else None,
            even=all(call.even for call in calls),
            copies_own=all(call.copies_own for call in calls),
            listed=True,
            tensors=len(self.parts),
            mixed=len(self.kinds) > 1,
            resharded=self.is_resharded,
            uniform=len({(part.collective.reduction, part.collective.root) for part in self.parts}) <= 1,
        )

    @property
    def is_resharded(self) -> bool:
        """True if tensors have a layout: their parts lie in rows."""
        return any(part.resharding is not None for part in self.parts)

    def text(self) -> str:
        """Return the one-line signature that ranks compare and errors show; its digest covers all attributes."""
        digest = hashlib.blake2b(repr(self).encode(), digest_size=6).hexdigest()
        others = ", captured" if self.frozen else ""
        others += f", beside {self.beside}" if self.beside != NOTHING else ""
        sizes = "; ".join(map(_words, self.parts))
        return f"{self.collective}, variant {self.variant}{others} #{digest}: {sizes or 'nothing'}"


def _words(part: ListEntry) -> str:
    collective = part.collective
    places = [
        f"{name} symmetric {place[0]}+{place[1]}"
        for name, place in (("input", part.input_place), ("output", part.output_place))
        if place is not None
    ]
    return ", ".join(
        [
            f"{collective.kind} of {collective.largest_buffer // getattr(torch, part.dtype).itemsize} {part.dtype}",
            *["in place"] * collective.in_place,
            *["own parts stay"] * (not collective.copies_own),
            *[str(part.resharding)] * (part.resharding is not None),
            *places,
        ]
    )
