"""Allocator of symmetric memory: the bytes of a lane's segments that are in use.

Every rank runs the same allocator on the same input, so that all of them give out the same bytes.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

ALIGNMENT = 512
"""Bytes to which sizes and offsets of allocations are rounded."""

SEGMENT_BYTES = 2 << 20
"""Bytes of which the size of a segment is a multiple: the granularity of GPU memory."""

MOST_TEXT = 900
"""Largest number of characters in which a rank lists dropped ranges; those that do not fit follow in its next list."""


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryUse:
    """Symmetric memory of one rank, in bytes; the same on all ranks.

    Attributes:
        reserved: bytes in segments, which stay until the end of the lane.
        used: bytes that are given out and that not all ranks have dropped yet.
        most: largest number of bytes that may be reserved; None: as many as the device has.
        own: further bytes that calls need: flags, and staging for ordinary tensors.
    """

    reserved: int
    used: int
    most: int | None
    own: int = 0

    @classmethod
    def of_all(cls, uses: Iterable[MemoryUse]) -> MemoryUse:
        """Add up several of them."""
        found = tuple(uses)
        used = sum(use.used for use in found)
        return cls(sum(use.reserved for use in found), used, None, sum(use.own for use in found))


class Range(NamedTuple):
    """Bytes of a segment.

    Attributes:
        segment: number of the segment.
        offset: first byte in the segment.
        nbytes: size in bytes, a multiple of ``ALIGNMENT``.
    """

    segment: int
    offset: int
    nbytes: int


class BlockAllocator:
    """Gives out ranges of segments, smallest hole first, and takes them back.

    Args:
        world_size: number of ranks that must have dropped a range before it is free.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._holes: list[Range] = []  # by segment and offset; no two touch
        self._given: dict[int, Range] = {}
        self._dropped: collections.Counter[int] = collections.Counter()  # by how many ranks
        self._next = 0
        self.reserved = 0

    @property
    def used(self) -> int:
        """Bytes that are given out."""
        return sum(found.nbytes for found in self._given.values())

    def take(self, nbytes: int) -> tuple[int, Range] | None:
        """Give out ``nbytes`` (> 0). Return the allocation's unique number and range; None if there is no room."""
        wanted = rounded(nbytes, ALIGNMENT)
        fitting = [hole for hole in self._holes if hole.nbytes >= wanted]
        if not fitting:
            return None
        hole = min(fitting, key=lambda hole: (hole.nbytes, hole.segment, hole.offset))
        rest = Range(hole.segment, hole.offset + wanted, hole.nbytes - wanted)
        at = self._holes.index(hole)
        self._holes[at : at + 1] = [rest] if rest.nbytes else []
        number, self._next = self._next, self._next + 1
        found = self._given[number] = Range(hole.segment, hole.offset, wanted)
        return number, found

    def grow(self, segment: int, nbytes: int) -> None:
        """Add a segment."""
        self.reserved += nbytes
        self._add_hole(Range(segment, 0, nbytes))

    def drop(self, numbers: Iterable[int]) -> None:
        """Note that one rank has dropped ranges. Those that all ranks have dropped are free from now on."""
        for number in numbers:
            self._dropped[number] += 1
            if self._dropped[number] == self._world_size:
                del self._dropped[number]
                self._add_hole(self._given.pop(number))

    def _add_hole(self, new: Range) -> None:
        holes: list[Range] = []
        for hole in sorted([*self._holes, new]):
            if holes and (hole.segment, hole.offset) == (holes[-1].segment, holes[-1].offset + holes[-1].nbytes):
                hole = Range(hole.segment, holes[-1].offset, holes.pop().nbytes + hole.nbytes)
            holes.append(hole)
        self._holes = holes


def rounded(nbytes: int, multiple: int) -> int:
    """Round up to the next multiple.

    >>> rounded(1, 512), rounded(512, 512), rounded(513, 512)
    (512, 512, 1024)
    """
    return -(-nbytes // multiple) * multiple


def as_text(numbers: Sequence[int]) -> tuple[str, int]:
    """Write ascending numbers as text. Return the text, and how many of the numbers fit into ``MOST_TEXT``.

    >>> as_text([3, 4, 5, 9])
    ('3-5,9', 4)
    """
    text, fits, position = "", 0, 0
    while position < len(numbers):
        end = position + 1
        while end < len(numbers) and numbers[end] == numbers[end - 1] + 1:
            end += 1
        first, last = numbers[position], numbers[end - 1]
        longer = f"{text},{first}" if text else str(first)
        longer += f"-{last}" if last > first else ""
        if len(longer) > MOST_TEXT:
            break
        text, fits, position = longer, end, end
    return text, fits


def from_text(text: str) -> list[int]:
    """Read the numbers that :func:`as_text` has written.

    >>> from_text("3-5,9"), from_text("")
    ([3, 4, 5, 9], [])
    """
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found
