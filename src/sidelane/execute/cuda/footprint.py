"""Which bytes a set of copies reads and writes, for as many copies as a list of tensors has."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from sidelane.execute.cuda.calls import Memcpy, Operand


class Footprint:
    """Bytes of buffers that copies touch; to add one, or ask about one, takes the logarithm of their number."""

    def __init__(self) -> None:
        self._read: dict[tuple[int, str], Ranges] = {}
        self._written: dict[tuple[int, str], Ranges] = {}

    def add(self, copy: Memcpy) -> None:
        """Count in what a copy touches."""
        for side, found in ((copy.src, self._read), (copy.dst, self._written)):
            if isinstance(side, Operand):
                found.setdefault((side.rank, side.buffer), Ranges()).add(side.offset, side.offset + copy.nbytes)

    def is_apart(self, copy: Memcpy) -> bool:
        """True if ``copy`` writes nothing that is touched, and reads nothing that is written."""
        return not (
            _meet(self._written, copy.dst, copy.nbytes)
            or _meet(self._read, copy.dst, copy.nbytes)
            or _meet(self._written, copy.src, copy.nbytes)
        )


class Ranges:
    """A union of byte ranges.

    >>> ranges = Ranges()
    >>> ranges.add(8, 12); ranges.add(0, 4); ranges.add(4, 6)
    >>> ranges.meet(6, 8), ranges.meet(5, 6)
    (False, True)
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """Unite with ``[start, end)``."""
        first, behind = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < behind:
            start, end = min(start, self._starts[first]), max(end, self._ends[behind - 1])
        self._starts[first:behind], self._ends[first:behind] = [start], [end]

    def meet(self, start: int, end: int) -> bool:
        """True if any byte of ``[start, end)`` is in it."""
        index = bisect_left(self._starts, end) - 1
        return index >= 0 and self._ends[index] > start


def _meet(touched: dict[tuple[int, str], Ranges], place: object, nbytes: int) -> bool:
    if not isinstance(place, Operand) or (place.rank, place.buffer) not in touched:
        return False
    return touched[place.rank, place.buffer].meet(place.offset, place.offset + nbytes)
