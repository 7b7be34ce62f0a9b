"""What a rank does in a collective among several nodes, as frozen data."""

from __future__ import annotations

import dataclasses

from sidelane.program.collective import Kind

INPUT, OUTPUT, PACKED, MIDDLE, ARRIVED = "input", "output", "packed", "middle", "arrived"
"""Tensors of a call: the caller's, and three of scratch, each of them twice (``packed0``, ``packed1``).

Near steps read ``packed``, far ones ``middle``; ``arrived`` is what far ones bring."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """``count`` elements of a tensor.

    Attributes:
        tensor: of the caller's list, which.
    """

    buffer: str
    offset: int
    count: int
    tensor: int = 0

    def part(self, offset: int, count: int) -> Span:
        """Some of it."""
        assert 0 <= offset <= offset + count <= self.count
        return Span(self.buffer, self.offset + offset, count, self.tensor)


@dataclasses.dataclass(frozen=True, slots=True)
class Copies:
    """Elements move within this rank: (to, from). None overlaps another."""

    pairs: tuple[tuple[Span, Span], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """Broadcasts in one node, as one call: the root's number there, and what is replaced by the root's."""

    parts: tuple[tuple[int, Span], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Near:
    """A reduce-scatter or an all-to-all in one node."""

    kind: Kind
    output: Span
    input: Span


@dataclasses.dataclass(frozen=True, slots=True)
class Far:
    """A collective of this rank's rail is begun.

    Attributes:
        kind: which; for an all-reduce and a broadcast ``input`` is ``output``.
        root: node of a broadcast.
        sent, received: elements to and from each node, for an all-to-all whose parts differ; () for equal ones.
    """

    kind: Kind
    output: Span
    input: Span
    root: int = 0
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Join:
    """The ``number``-th far step of this rank, from 0, has ended before the next step begins."""

    number: int


Step = Copies | Spread | Near | Far | Join


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What one rank does.

    Attributes:
        steps: in their order.
        scratch: elements of each tensor of scratch.
    """

    steps: tuple[Step, ...]
    scratch: dict[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """What is under way at once: before the far steps, these themselves, beside them, and after them."""

    before: tuple[Step, ...]
    far: tuple[Far, ...]
    beside: tuple[Step, ...]
    after: tuple[Step, ...]
