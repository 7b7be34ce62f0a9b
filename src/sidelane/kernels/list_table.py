# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""Table of a list's tensors in device memory, from which kernels find the addresses of their tiles.

Every tensor (or pair) is cut into tiles, the last of which may be smaller, and the tiles of all tensors are numbered.
A thread block takes a tile like one of a single tensor: it finds the piece that holds the tile, and the addresses in
the row of the piece. Ranks agree on sizes and places, so that a tile number means the same tile on all of them;
addresses are each rank's own::

    ends of the pieces, as numbers of tiles | row 0 | row 1 | ...
    row   input | output | bytes | input stride | output stride | place | aligned | first tile | 8 addresses | 8 more

``aligned``: addresses and strides are multiples of 16, so that whole tiles move in accesses of 16 bytes. Rows end where
a kernel needs no more: the groups of addresses, one for each rank, are for tensors that peers read or write.

Legend: PIECES the power of two that ends are padded to; WORDS a row has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sidelane.device.language import tl, triton
from sidelane.device.launch import unit_bytes
from sidelane.program.kernel_list import MOST_LISTED

INPUT, OUTPUT, NBYTES, INPUT_STRIDE, OUTPUT_STRIDE, PLACE, ALIGNED, FIRST_TILE, FIRST_GROUP, SECOND_GROUP = map(
    tl.constexpr, (0, 1, 2, 3, 4, 5, 6, 7, 8, 16)
)

ROOMS = (16, 128, 1024, MOST_LISTED)
"""Values of PIECES; for each one a kernel is compiled."""

_BEYOND = 1 << 62


@dataclasses.dataclass(frozen=True, slots=True)
class ListPiece:
    """One tensor or pair, with the addresses of this rank.

    Attributes:
        input: address of the part for the first rank, or for all.
        output: address of the part from the first rank, or of the result.
        nbytes: bytes from rank to rank, at least 1.
        input_stride: distance of the parts for successive ranks; 0 if all get the same.
        output_stride: distance of the parts from successive ranks; 0 for a result.
        place: offset among the bytes that a rank sends to another one, a multiple of 16.
        groups: addresses on all ranks, two groups at most; the kernel defines their meaning and order.
    """

    input: int
    output: int
    nbytes: int
    input_stride: int
    output_stride: int
    place: int
    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def unit_bytes(self) -> int:
        """Return the largest access size in bytes for its addresses and strides, apart from the ends of tiles."""
        strides = (self.input_stride, self.output_stride)
        peers = (address for group in self.groups for address in group)
        return unit_bytes(self.input, self.output, *strides, *peers)


@dataclasses.dataclass(frozen=True)
class ListTable:
    """The table of a list, as values for device memory.

    Attributes:
        values: int64, the ends and the rows.
        tiles: number of tiles of all pieces.
        constants: constants of kernels for this table.
    """

    values: npt.NDArray[np.int64]
    tiles: int
    constants: dict[str, int]

    @staticmethod
    def of(pieces: Sequence[ListPiece], tile_bytes: int) -> ListTable:
        """Number the tiles of 1 to ``MOST_LISTED`` pieces, in their order."""
        counts = np.array([-(-piece.nbytes // tile_bytes) for piece in pieces], np.int64)
        ends = np.cumsum(counts)
        room = next(room for room in ROOMS if room >= len(pieces))
        padding = np.full(room - len(pieces), _BEYOND, np.int64)
        rows = np.stack([_row(piece, int(end - count)) for piece, end, count in zip(pieces, ends, counts, strict=True)])
        # The last tiles of pieces count, too: their sizes need not be multiples of 16.
        narrow = min(unit_bytes(piece.unit_bytes, piece.nbytes) for piece in pieces)
        constants = {"PIECES": room, "WORDS": rows.shape[1], "NARROW": narrow, "TILE": tile_bytes}
        return ListTable(np.concatenate([ends, padding, rows.ravel()]), int(ends[-1]), constants)


def _row(piece: ListPiece, first_tile: int) -> npt.NDArray[np.int64]:
    row = np.zeros(FIRST_GROUP.value * (1 + len(piece.groups)), np.int64)
    where = (piece.input, piece.output, piece.nbytes, piece.input_stride, piece.output_stride, piece.place)
    row[: FIRST_GROUP.value] = (*where, piece.unit_bytes == 16, first_tile)
    for group, first in zip(piece.groups, (FIRST_GROUP.value, SECOND_GROUP.value), strict=False):
        row[first : first + len(group)] = group
    return row


@triton.jit
def ends_of(table, PIECES: tl.constexpr):
    """Return the number of the tile after the last one of each piece, int64[PIECES]."""
    return tl.load(table.to(tl.pointer_type(tl.int64)) + tl.arange(0, PIECES))


@triton.jit
def find_tile(table, ends, tile, PIECES: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr):
    """Find the place of a tile.

    Returns:
        Address of the row of its piece, its offset in there, its bytes, and whether it moves in accesses of 16 bytes.
    """
    piece = tl.sum((ends <= tile).to(tl.int64))
    row = table + 8 * (PIECES + WORDS * piece)
    offset = (tile - value(row, FIRST_TILE)) * TILE
    nbytes = tl.minimum(value(row, NBYTES) - offset, TILE)
    return row, offset, nbytes, (value(row, ALIGNED) != 0) & (nbytes % 16 == 0)


@triton.jit
def value(row, COLUMN: tl.constexpr):
    """Return one value of a row, int64."""
    return tl.load(row.to(tl.pointer_type(tl.int64)) + COLUMN)


@triton.jit
def address_in(row, GROUP: tl.constexpr, index):
    """Return one address of a group, int64."""
    return tl.load(row.to(tl.pointer_type(tl.int64)) + GROUP + index)
