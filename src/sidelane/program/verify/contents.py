"""What a buffer holds, byte range by byte range, by origin and never by value: cost does not depend on byte counts."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sidelane.program.collective import Buffer, ReduceOp, Reduction


class Origin(NamedTuple):
    """Bytes that the caller of ``rank`` left in ``buffer`` for ``invocation`` (staging: that nobody ever wrote)."""

    rank: int
    buffer: Buffer
    invocation: int


class Mixture(NamedTuple):
    """Elements that a ``Reduce`` combined: each term with how often it went in."""

    reduction: Reduction
    terms: frozenset[tuple[Content, int]]


class Content(NamedTuple):
    """The byte at position p holds byte ``p + shift`` of ``value`` (of each of its terms, by their own shifts, too)."""

    value: Origin | Mixture
    shift: int

    def moved(self, distance: int) -> Content:
        """The same bytes, ``distance`` further up."""
        return Content(self.value, self.shift - distance)


class Piece(NamedTuple):
    """``content`` in bytes ``[start, end)``."""

    start: int
    end: int
    content: Content


def combine(reduction: Reduction, contents: Sequence[Content]) -> Content:
    """Content of elements that are the reduction of ``contents``.

    A reduction of reductions is the reduction of everything, but not for averages. One term alone stays what it is.
    """
    if len(contents) == 1:
        return contents[0]
    terms: Counter[Content] = Counter()
    for content in contents:
        value = content.value
        if isinstance(value, Mixture) and value.reduction == reduction and reduction.op is not ReduceOp.AVG:
            for term, count in value.terms:
                terms[Content(term.value, term.shift + content.shift)] += count
        else:
            terms[content] += 1
    base = min(term.shift for term in terms)
    return Content(
        Mixture(reduction, frozenset((Content(term.value, term.shift - base), n) for term, n in terms.items())), base
    )


class Contents:
    """Contents of one buffer: pieces side by side, from byte 0 to the end."""

    def __init__(self, nbytes: int, content: Content) -> None:
        self.nbytes = nbytes
        self._starts = [0] if nbytes else []
        self._contents = [content] if nbytes else []

    def read(self, start: int, end: int) -> list[Piece]:
        """Pieces of bytes ``[start, end)``, cut to that range."""
        first = bisect_right(self._starts, start) - 1
        behind = bisect_left(self._starts, end)
        edges = [start, *self._starts[first + 1 : behind], end]
        return [
            Piece(low, high, content)
            for low, high, content in zip(edges, edges[1:], self._contents[first:behind], strict=False)
        ]

    def whole(self, start: int, end: int) -> Content | None:
        """What is in bytes ``[start, end)`` if that is one piece, which it mostly is; else None."""
        first = bisect_right(self._starts, start) - 1
        behind = first + 1
        if behind < len(self._starts) and self._starts[behind] < end:
            return None
        return self._contents[first]

    def write(self, pieces: Iterable[Piece]) -> None:
        """Replace the bytes that ``pieces`` (side by side, in order) cover."""
        pieces = list(pieces)
        self._replace(
            pieces[0].start, pieces[-1].end, [piece.start for piece in pieces], [piece.content for piece in pieces]
        )

    def fill(self, start: int, end: int, content: Content) -> None:
        """Replace bytes ``[start, end)`` by one piece."""
        self._replace(start, end, [start], [content])

    def _replace(self, start: int, end: int, starts: list[int], contents: list[Content]) -> None:
        first, behind = bisect_left(self._starts, start), bisect_left(self._starts, end)
        if end < self.nbytes and (behind == len(self._starts) or self._starts[behind] != end):
            starts.append(end)
            contents.append(self._contents[behind - 1])
        self._starts[first:behind] = starts
        self._contents[first:behind] = contents
