# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""The tiles of a list of tensors, as a table in device memory: what a kernel does where one tensor is not all there is.

Every tensor (or pair) is cut into tiles, the last one of each as small as it comes; a thread block takes a tile as it
takes one of a single tensor, and finds in its row where it lies. Ranks agree on sizes and places, so the tile of a
number is the same one on all of them; addresses are each rank's own::

    row   input | output | bytes | input stride | output stride | place | wide | - | 8 addresses | 8 addresses

``wide``: addresses, bytes and strides are multiples of 16, so that the tile moves in accesses of 16 bytes. Rows end
where a kernel needs no more: the groups of addresses, one for each rank, are for tensors that peers read or write.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import triton
import triton.language as tl

from sidelane.device.launch import unit_bytes

INPUT, OUTPUT, NBYTES, INPUT_STRIDE, OUTPUT_STRIDE, PLACE, WIDE, FIRST_GROUP, SECOND_GROUP = map(
    tl.constexpr, (0, 1, 2, 3, 4, 5, 6, 8, 16)
)


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
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
        """The largest access that suits every tile."""
        strides = (self.input_stride, self.output_stride)
        return unit_bytes(
            self.input, self.output, self.nbytes, *strides, *(each for group in self.groups for each in group)
        )


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows for the device.

    Attributes:
        rows: int64[tiles, words of a row].
        narrow: bytes of an access in the tiles that are not wide (1, 2 or 4); 16 if all are.
    """

    rows: npt.NDArray[np.int64]
    narrow: int

    @property
    def constants(self) -> dict[str, int]:
        """Constants that kernels have for a table."""
        return {"WORDS": self.rows.shape[1], "NARROW": self.narrow}

    @staticmethod
    def of(pieces: Sequence[Piece], tile_bytes: int) -> Table:
        """Cut pieces into tiles, in their order."""
        rows = np.concatenate([_rows(piece, tile_bytes) for piece in pieces])
        return Table(rows, min(piece.unit_bytes for piece in pieces))


def _rows(piece: Piece, tile_bytes: int) -> npt.NDArray[np.int64]:
    offsets = np.arange(0, piece.nbytes, tile_bytes, dtype=np.int64)
    rows = np.zeros((len(offsets), FIRST_GROUP.value * (1 + len(piece.groups))), np.int64)
    rows[:, INPUT.value] = piece.input + offsets
    rows[:, OUTPUT.value] = piece.output + offsets
    rows[:, NBYTES.value] = np.minimum(piece.nbytes - offsets, tile_bytes)
    rows[:, INPUT_STRIDE.value], rows[:, OUTPUT_STRIDE.value] = piece.input_stride, piece.output_stride
    rows[:, PLACE.value] = piece.place + offsets
    for group, first in zip(piece.groups, (FIRST_GROUP.value, SECOND_GROUP.value), strict=False):
        rows[:, first : first + len(group)] = np.array(group) + offsets[:, None]
    rows[:, WIDE.value] = (np.bitwise_or.reduce(rows, axis=1) & 15) == 0
    return rows


@triton.jit
def row_of(table, tile, WORDS: tl.constexpr):
    """Address of the row of a tile."""
    return table + 8 * WORDS * tile


@triton.jit
def value(row, COLUMN: tl.constexpr):
    """int64: one value of a row."""
    return tl.load(row.to(tl.pointer_type(tl.int64)) + COLUMN)
