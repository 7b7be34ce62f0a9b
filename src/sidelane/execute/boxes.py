"""Copies between buffers whose bytes lie in rows, cut into boxes: as much as one pitched copy can take.

A box has planes of rows of bytes. On one side rows lie at a distance; on the other side they follow each other, or lie
at a distance too if they are of the same size; planes lie at distances on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sidelane.execute.base import Addresses, Stretch
from sidelane.program.collective import Span

Pair = tuple[int, int]
"""A value at the destination, and one at the source."""


class Box(NamedTuple):
    """One pitched copy.

    Attributes:
        dst, src: addresses of the first row.
        width: size of a row in bytes.
        rows: number of rows in a plane.
        pitches: distances from row to row in bytes.
        planes: number of planes.
        distances: distances from plane to plane in bytes.
    """

    dst: int
    src: int
    width: int
    rows: int = 1
    pitches: Pair = (0, 0)
    planes: int = 1
    distances: Pair = (0, 0)

    @property
    def nbytes(self) -> int:
        return self.width * self.rows * self.planes


def boxes(dst: Span, src: Span, addresses: Addresses) -> Iterator[Box]:
    """Cut a copy into boxes: whole planes where it can, whole rows where planes begin or end, and parts of rows.

    Raises:
        ValueError: this process does not reach a byte.
    """
    done = 0
    while done < src.nbytes:
        box = _first_box(_stretch(dst, done, addresses), _stretch(src, done, addresses), src.nbytes - done)
        yield box
        done += box.nbytes


def _stretch(span: Span, done: int, addresses: Addresses) -> Stretch:
    found = addresses.stretch(span.rank, span.buffer, span.offset + done)
    if found is None:
        raise ValueError(f"no address for the {span.buffer} of rank {span.rank}")
    return found


def _first_box(dst: Stretch, src: Stretch, nbytes: int) -> Box:
    """Return the largest box at the beginning of two stretches."""
    nbytes = min(nbytes, dst.nbytes, src.nbytes)
    narrow, wide = (src, dst) if src.width <= dst.width else (dst, src)
    width = narrow.width
    if dst.width == src.width == dst.in_row == src.in_row and nbytes >= width:
        return Box(dst.address, src.address, width, nbytes // width, (dst.pitch, src.pitch))
    rows = min(nbytes, wide.in_row) // width if narrow.in_row == width else 0
    if not rows:
        return Box(dst.address, src.address, min(nbytes, dst.in_row, src.in_row))
    pitches = _pair(narrow is src, narrow.pitch, width)
    planes = nbytes // wide.width if wide.in_row == wide.width and not wide.width % width else 0
    if planes < 2:
        return Box(dst.address, src.address, width, rows, pitches)
    distances = _pair(narrow is src, rows * narrow.pitch, wide.pitch)
    return Box(dst.address, src.address, width, rows, pitches, planes, distances)


def _pair(is_source: bool, narrow: int, wide: int) -> Pair:
    """Return values of the narrow and of the wide stretch as those of destination and source."""
    return (wide, narrow) if is_source else (narrow, wide)
