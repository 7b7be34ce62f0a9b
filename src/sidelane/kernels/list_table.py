# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""The tensors of a list, as a table in device memory: what a kernel needs where one tensor is not all there is.

Every tensor (or pair) is cut into tiles, the last one of each as small as it comes, and the tiles of all are numbered.
A thread block takes a tile as it takes one of a single tensor: it finds the piece that the tile is of, and in its row
where that lies. Ranks agree on sizes and places, so the tile of a number is the same one on all of them; addresses are
each rank's own::

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
import triton
import triton.language as tl

from sidelane.device.launch import unit_bytes
from sidelane.program.kernel_list import MOST_LISTED

INPUT, OUTPUT, NBYTES, INPUT_STRIDE, OUTPUT_STRIDE, PLACE, ALIGNED, FIRST_TILE, FIRST_GROUP, SECOND_GROUP = map(
    tl.constexpr, (0, 1, 2, 3, 4, 5, 6, 7, 8, 16)
)

ROOMS = (16, 128, 1024, MOST_LISTED)
"""Values of PIECES, each of which is a kernel to compile."""

_BEYOND = 1 << 62


@dataclasses.dataclass(frozen=True, slots=True)
class ListPiece:
    """One tensor, or pair, as this rank sees it.

    Attributes:
        input: address of what goes to the first rank, or to all.
        output: address of what comes from the first rank, or of the result.
        nbytes: from rank to rank, 1 and more.
        input_stride: from what goes to one rank to what goes to the next; 0 where all get the same.
        output_stride: from what comes from one rank to what comes from the next; 0 for a result.
        place: offset among what a rank sends to another one, a multiple of 16.
        groups: addresses on all ranks, two groups at most; what they are, and their order, a kernel says.
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
        """The largest access that suits it where the end of a tile does not matter."""
        strides = (self.input_stride, self.output_stride)
        peers = (address for group in self.groups for address in group)
        return unit_bytes(self.input, self.output, *strides, *peers)


@dataclasses.dataclass(frozen=True)
class ListTable:
    """What the device needs to know.

    Attributes:
        values: int64, the ends and the rows.
        tiles: of all pieces.
        constants: that kernels have for it.
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
        # Of the last tiles of pieces, too, whose bytes need not be a multiple of 16.
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
    """int64[PIECES]: numbers of the tiles behind the last ones of the pieces."""
    return tl.load(table.to(tl.pointer_type(tl.int64)) + tl.arange(0, PIECES))


@triton.jit
def find_tile(table, ends, tile, PIECES: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr):
    """Where a tile lies.

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
    """int64: one value of a row."""
    return tl.load(row.to(tl.pointer_type(tl.int64)) + COLUMN)


@triton.jit
def address_in(row, GROUP: tl.constexpr, index):
    """int64: one of a group's addresses."""
    return tl.load(row.to(tl.pointer_type(tl.int64)) + GROUP + index)
