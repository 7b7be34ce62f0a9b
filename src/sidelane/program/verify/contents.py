"""Contents of buffers, by byte range and by origin, never by value: the cost does not depend on byte counts."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sidelane.program.collective import INTEGERS, ReduceOp, Reduction


class Origin(NamedTuple):
    """Bytes that the caller of ``rank`` left in ``buffer`` for ``invocation`` (staging: bytes never written)."""

    rank: int
    buffer: str
    invocation: int


class Mixture(NamedTuple):
    """Elements that a ``Reduce`` combined, in its order (sorted, where the order makes no difference)."""

    reduction: Reduction
    terms: tuple[Content, ...]


class Content(NamedTuple):
    """The byte at position p holds byte ``p + shift`` of ``value`` (of each of its terms, by their own shifts, too)."""

    value: Origin | Mixture
    shift: int

    def moved(self, distance: int) -> Content:
        """Return the same bytes, ``distance`` further up."""
        return Content(self.value, self.shift - distance)


class ContentRange(NamedTuple):
    """``content`` in bytes ``[start, end)``."""

    start: int
    end: int
    content: Content


def reduced(reduction: Reduction, contents: Sequence[Content]) -> Content:
    """Return the content of elements that are the reduction of ``contents``, in this order; one alone stays as it is.

    Equal contents are equal bit by bit: floats accumulate in float32 in the order of the sources and are rounded once,
    so another order, or a reduction of a reduction, is another content. Three things make no difference: the order of
    integers; a reduction of reductions of integers, but for averages, or of minima or maxima; and a float32 sum that
    begins with a sum, as it would go on without the step.
    """
    if len(contents) == 1:
        return contents[0]
    terms: list[Content] = []
    for content in contents:
        value = content.value
        if isinstance(value, Mixture) and value.reduction == reduction and _goes_on(reduction, is_first=not terms):
            terms += [Content(term.value, term.shift + content.shift) for term in value.terms]
        else:
            terms.append(content)
    if _is_exact(reduction):
        terms.sort(key=_sorted_by)
    base = min(term.shift for term in terms)
    return Content(Mixture(reduction, tuple(Content(term.value, term.shift - base) for term in terms)), base)


def _is_exact(reduction: Reduction) -> bool:
    return reduction.dtype in INTEGERS


def _goes_on(reduction: Reduction, *, is_first: bool) -> bool:
    """Return True if a reduction of reductions has the bits of a reduction of everything."""
    if reduction.op is ReduceOp.AVG:
        return False
    exact = _is_exact(reduction) or reduction.op in (ReduceOp.MIN, ReduceOp.MAX)
    return exact or (is_first and reduction.dtype == "float32")


def _sorted_by(content: Content) -> tuple[bool, object]:
    value = content.value
    if isinstance(value, Mixture):
        return True, repr(content)
    return False, (value, content.shift)


class Contents:
    """Contents of one buffer: pieces side by side, from byte 0 to the end."""

    def __init__(self, nbytes: int, content: Content) -> None:
        self.nbytes = nbytes
        self._starts = [0] if nbytes else []
        self._contents = [content] if nbytes else []

    def read(self, start: int, end: int) -> list[ContentRange]:
        """Return the pieces of bytes ``[start, end)``, cut to that range."""
        first = bisect_right(self._starts, start) - 1
        behind = bisect_left(self._starts, end)
        edges = [start, *self._starts[first + 1 : behind], end]
        return [
            ContentRange(low, high, content)
            for low, high, content in zip(edges, edges[1:], self._contents[first:behind], strict=False)
        ]

    def whole(self, start: int, end: int) -> Content | None:
        """Return the content of bytes ``[start, end)`` if they are one piece, as they usually are; else None."""
        first = bisect_right(self._starts, start) - 1
        behind = first + 1
        if behind < len(self._starts) and self._starts[behind] < end:
            return None
        return self._contents[first]

    def write(self, pieces: Iterable[ContentRange]) -> None:
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
