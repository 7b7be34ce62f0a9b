"""Run several collectives as one program: many tensors in one call, with one entry and one exit handshake.

The program sees one ``input`` and one ``output`` a rank, as always. They are *virtual*: a row of pieces, one for each
part, that lie anywhere in memory. With three parts of an output of 100, 0 and 300 bytes::

    output    | piece 0 | . . | piece 2           |
              0       100    256                556

No command crosses the end of a piece; ``verify`` sees to it. Executors find a piece through ``Addresses.pieces``.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate

from sidelane.fields import an, plain_text, several, validate, whole
from sidelane.program.collective import MAX_WORLD_SIZE, Buffer, Collective, Span
from sidelane.program.contract import Contract

_PARTS = several(an(Collective), Collective)

PIECE_ALIGNMENT = 256
"""Alignment of pieces in bytes: a multiple of every element size, so that reductions see whole elements."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Collectives of one group that begin and end together.

    Attributes:
        name: name of the batch in texts, as ``kind`` names one collective.
        world_size: ranks in the group.
        parts: collectives of the batch. No part may write bytes that another part reads or writes.

    Raises:
        TypeError: a field is not of its kind.
        ValueError: the world size is out of range, or a part has another one.
    """

    name: str
    world_size: int
    parts: tuple[Collective, ...]

    def __post_init__(self) -> None:
        validate(self, name=plain_text, world_size=whole, parts=_PARTS)
        if not 1 <= self.world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"Batch: world_size (value={self.world_size}, allowed=1..{MAX_WORLD_SIZE})")
        for number, part in enumerate(self.parts):
            if part.world_size != self.world_size:
                raise ValueError(f"Batch: ranks of part {number} (value={part.world_size}, allowed={self.world_size})")

    names = (Buffer.INPUT, Buffer.OUTPUT)
    """Names of the callers' buffers."""

    def starts(self, rank: int, buffer: str) -> tuple[int, ...]:
        """Return the offset of each part's piece in ``input`` or ``output``."""
        return self._layout[rank, buffer][0]

    def buffer_bytes(self, rank: int, buffer: str) -> int:
        """Return the size of a virtual buffer in bytes; 0 if the batch has no such buffer."""
        return max(self._layout[rank, buffer][1], default=0) if buffer in self.names else 0

    def placed(self, part: int, span: Span) -> Span:
        """Translate a span of one part's ``input`` or ``output`` into a span of the batch's virtual buffer."""
        return Span(span.rank, span.buffer, span.offset + self.starts(span.rank, span.buffer)[part], span.nbytes)

    def holds(self, span: Span) -> bool:
        """Return True if a span of ``input`` or ``output`` lies within one piece."""
        starts, ends = self._layout[span.rank, span.buffer]
        part = bisect_right(starts, span.offset) - 1
        return part >= 0 and span.offset + span.nbytes <= ends[part]

    @cached_property
    def _layout(self) -> dict[tuple[int, str], tuple[tuple[int, ...], tuple[int, ...]]]:
        return {
            (rank, buffer): lay_out([part.buffer_bytes(rank, buffer) for part in self.parts])
            for rank in range(self.world_size)
            for buffer in self.names
        }

    @cached_property
    def _words(self) -> str:
        nbytes = sum(part.largest_buffer for part in self.parts)
        tensors = "1 tensor" if len(self.parts) == 1 else f"{len(self.parts)} tensors"
        return f"{self.name}({self.world_size} ranks, {tensors}, {nbytes} bytes)"

    def __str__(self) -> str:
        return self._words  # cached, as every call sends it to the peers


Definition = Collective | Batch | Contract
"""Type of a program's specification: the program must have its effect."""


def parts_of(definition: Collective | Batch) -> Iterator[tuple[Collective, Callable[[Span], Span]]]:
    """Yield each collective of a definition with the function that maps its spans to spans of the program."""
    if isinstance(definition, Collective):
        yield definition, lambda span: span
        return
    for number, part in enumerate(definition.parts):
        yield part, partial(definition.placed, number)


def lay_out(sizes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Put pieces of these sizes behind each other, and return their starts and their ends.

    >>> lay_out([100, 0, 300])
    ((0, 256, 256), (100, 256, 556))
    """
    starts = tuple(accumulate((-(-nbytes // PIECE_ALIGNMENT) * PIECE_ALIGNMENT for nbytes in sizes), initial=0))[
        : len(sizes)
    ]
    return starts, tuple(start + nbytes for start, nbytes in zip(starts, sizes, strict=True))
