"""The part of a call that must be the same on all ranks: from it every rank makes the same program.

A call is a tuple of parts, one for each tensor or pair of tensors: one part, unless it has lists or is a batch.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from functools import cached_property

import torch

from sidelane.config import COMPUTE, NOTHING
from sidelane.memory.heap import Location, Region
from sidelane.program.batch import Batch
from sidelane.program.collective import REDUCING, Buffer, Collective, Kind
from sidelane.program.resharding import Resharding
from sidelane.program.shape import Beside, CallShape, Computation

LISTED = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.BROADCAST, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
"""The collectives that take lists, and that a batch takes."""

BATCH = "batch"
"""Name of calls that may hold several kinds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One rank's view of a call: the collective, and the regions of its own input and output (in place: they overlap).

    Attributes:
        collective: the collective.
        input, output: bytes of the rank's own tensors.
        dtype: element type of both.
        resharding: layout of both, if their parts are no contiguous ones.
    """

    collective: Collective
    input: Region
    output: Region
    dtype: torch.dtype
    resharding: Resharding | None = None

    @property
    def whole(self) -> Region:
        """The region that holds both input and output of an in-place call: the only buffer that its program knows."""
        return self.output if self.output.nbytes >= self.input.nbytes else self.input

    def region(self, buffer: Buffer) -> Region:
        """Return the region that a program knows as ``input`` or ``output``."""
        return self.whole if self.collective.in_place else self.input if buffer == Buffer.INPUT else self.output

    @property
    def locations(self) -> tuple[Location, Location]:
        """Locations of input and output on which all ranks must agree; None: ordinary memory, or any location."""
        kind = self.collective.kind
        if self.collective.in_place:
            # Each rank's part has its own offset in the whole; it is the whole that must be at one place on all ranks.
            return self.whole.location, self.whole.location
        if kind in REDUCING:
            return self.input.location, None if kind is Kind.REDUCE_SCATTER else self.output.location
        output = None if kind is Kind.GATHER else self.output.location
        # If peers write into the output, nobody but its own rank uses the location of an input.
        return None if kind is Kind.SCATTER or output is not None else self.input.location, output


@dataclasses.dataclass(frozen=True, slots=True)
class CallPart:
    """One tensor or pair of tensors of a call.

    Attributes:
        collective: the collective.
        dtype: element type.
        input_location, output_location: number of the symmetric block and offset in it; None for ordinary memory, and
            for the arguments that only the root has.
        resharding: layout of both, if their parts are no contiguous ones.
    """

    collective: Collective
    dtype: str
    input_location: Location
    output_location: Location
    resharding: Resharding | None = None

    @staticmethod
    def of(request: Request) -> CallPart:
        return CallPart(
            request.collective, str(request.dtype).removeprefix("torch."), *request.locations, request.resharding
        )

    def for_engines(self) -> CallPart:
        """Return the part for a program of copy engines, whose reductions always go through staging."""
        if self.collective.kind not in REDUCING:
            return self
        return dataclasses.replace(self, input_location=None, output_location=None)

    @property
    def has_bytes(self) -> bool:
        """True if any rank sends bytes, to itself or to others."""
        return any(map(any, self.collective.counts))

    @property
    def symmetric(self) -> bool:
        """True if peers reach the output, and for reductions the input. A reduce_scatter needs its input only."""
        kind = self.collective.kind
        read = kind not in REDUCING or self.input_location is not None
        return read and (kind is Kind.REDUCE_SCATTER or self.output_location is not None)


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The part of a call that must be the same on every rank.

    Attributes:
        parts: one for each tensor or pair.
        variant: the caller's argument, ``auto`` included.
        frozen: the call is being captured into a graph.
        beside: what the caller says runs next to it.
        batch: for a call with lists, the collectives as one; None for a call on single tensors.
    """

    parts: tuple[CallPart, ...]
    variant: str
    frozen: bool
    beside: Beside = NOTHING
    batch: Batch | None = None

    @staticmethod
    def of(requests: Sequence[Request], variant: str, frozen: bool, beside: Beside = NOTHING) -> Agreement:
        """Return the agreement of a call on single tensors."""
        return Agreement(tuple(map(CallPart.of, requests)), variant, frozen, beside)

    @staticmethod
    def of_list(
        name: str, world_size: int, parts: Sequence[CallPart], variant: str, frozen: bool, beside: Beside = NOTHING
    ) -> Agreement:
        """Return the agreement of a call with lists. ``name``: their kind, or ``BATCH``."""
        batch = Batch(name, world_size, tuple(part.collective for part in parts))
        return Agreement(tuple(parts), variant, frozen, beside, batch)

    @property
    def is_listed(self) -> bool:
        """True for a call with lists, a batch, or tensors with a layout."""
        return self.batch is not None

    @property
    def collective(self) -> Collective | Batch:
        """The collective that the program must carry out."""
        return self.parts[0].collective if self.batch is None else self.batch

    @property
    def name(self) -> str:
        """The kind of the call, or ``BATCH``."""
        return self.kinds[0] if self.batch is None else self.batch.name

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of collectives in the call; the kind with the most bytes comes first."""
        if self.batch is not None and self.batch.name != BATCH:
            return (Kind(self.batch.name),)
        nbytes: dict[Kind, int] = {}
        for part in self.parts:
            collective = part.collective
            nbytes[collective.kind] = nbytes.get(collective.kind, 0) + collective.largest_buffer
        # A batch without tensors counts as an all_gather without tensors.
        return tuple(sorted(nbytes, key=lambda kind: (-nbytes[kind], kind))) or (Kind.ALL_GATHER,)

    @property
    def is_resharded(self) -> bool:
        """True if tensors have a layout: their parts lie in rows."""
        return any(part.resharding is not None for part in self.parts)

    @cached_property
    def call(self) -> CallShape:
        """The input of the choice: the bytes of all tensors together, under the kind that has most of them."""
        calls = [
            CallShape.of(
                part.collective, part.dtype, symmetric=part.symmetric, captured=self.frozen, beside=self.beside
            )
            for part in self.parts
        ]
        if self.batch is None:
            return calls[0]
        return CallShape(
            kind=self.kinds[0],
            world_size=self.batch.world_size,
            nbytes=sum(call.nbytes for call in calls),
            dtype=calls[0].dtype if calls else "uint8",
            in_place=any(call.in_place for call in calls),
            symmetric=all(call.symmetric or not part.has_bytes for call, part in zip(calls, self.parts, strict=True)),
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

    @cached_property
    def text(self) -> str:
        """The one-line signature that ranks compare and errors show; its digest covers all attributes."""
        digest = hashlib.blake2b(repr(self).encode(), digest_size=6).hexdigest()
        others = ", captured" if self.frozen else ""
        others += f", beside {self.beside}" if self.beside != NOTHING else ""
        if self.batch is not None:
            sizes = "; ".join(map(_words, self.parts))
            return f"{self.batch}, variant {self.variant}{others} #{digest}: {sizes or 'nothing'}"
        (part,) = self.parts
        locations = f"input {_location_text(part.input_location)}, output {_location_text(part.output_location)}"
        return f"{part.collective} of {_elements(part)}, {locations}, variant {self.variant}{others} #{digest}"


def _words(part: CallPart) -> str:
    collective = part.collective
    locations = [
        f"{name} {_location_text(location)}"
        for name, location in (("input", part.input_location), ("output", part.output_location))
        if location is not None
    ]
    return ", ".join(
        [
            f"{collective.kind} of {_elements(part)}",
            *["in place"] * collective.in_place,
            *["own parts stay"] * (not collective.copies_own),
            *[str(part.resharding)] * (part.resharding is not None),
            *locations,
        ]
    )


def _elements(part: CallPart) -> str:
    return f"{part.collective.largest_buffer // getattr(torch, part.dtype).itemsize} {part.dtype}"


def _location_text(location: Location) -> str:
    return "ordinary" if location is None else f"symmetric {location[0]}+{location[1]}"
