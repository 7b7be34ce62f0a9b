# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

"""Tiles of a call: of one piece, whose addresses are arguments of the kernel, or of many, which a table lists.

Every piece (a tensor, or a pair of input and output) is cut into tiles, the last of which may be smaller. Thread blocks
take tiles in turn. The tiles of a table are numbered across its pieces; a block finds the piece that holds its tile,
and the addresses in the row of that piece. Ranks agree on sizes and offsets, so that a tile number means the same tile
on all of them; addresses are each rank's own::

    ends of the pieces, as numbers of tiles | row 0 | row 1 | ...
    row   input | output | bytes | input stride | output stride | sent offset | wide | first tile | 8 addresses | 8 more

``wide``: addresses and strides are multiples of 16, so that whole tiles move in accesses of 16 bytes. Rows end where
a kernel needs no more: the groups of addresses, one for each rank, are for tensors that peers read or write.

Legend: TABLE: the number of pieces that the table has room for, a power of two; 0 for one piece without a table. WORDS
a row has. UNIT: bytes of an access; NARROW: the same in tiles that are not full (of a table: not aligned). ALIGNED:
results go to multiples of 16. TILE: bytes of a tile. WHOLE: a tile is full.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sidelane.device.language import tl, triton
from sidelane.device.launch import padded, unit_bytes
from sidelane.device.memory import get, put
from sidelane.program.kernel import MOST_LISTED

INPUT, OUTPUT, NBYTES, INPUT_STRIDE, OUTPUT_STRIDE, SENT_OFFSET, WIDE, FIRST_TILE, FIRST_GROUP, SECOND_GROUP = map(
    tl.constexpr, (0, 1, 2, 3, 4, 5, 6, 7, 8, 16)
)

ROOMS = (16, 128, 1024, MOST_LISTED)
"""Values of TABLE; for each one a kernel is compiled."""

_BEYOND = 1 << 62


@dataclasses.dataclass(frozen=True, slots=True)
class KernelPiece:
    """One tensor or pair, with the addresses of this rank.

    Attributes:
        input: address of the part for the first rank, or for all.
        output: address of the part from the first rank, or of the result.
        nbytes: bytes from rank to rank, at least 1 in a table.
        input_stride: distance of the parts for successive ranks; 0 if all get the same.
        output_stride: distance of the parts from successive ranks; 0 for a result.
        sent_offset: offset among the bytes that a rank sends to another one, a multiple of 16.
        groups: addresses on all ranks, two groups at most; the kernel defines their meaning and order.
    """

    input: int
    output: int
    nbytes: int
    input_stride: int = 0
    output_stride: int = 0
    sent_offset: int = 0
    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def unit_bytes(self) -> int:
        """Return the largest access size in bytes for its addresses and strides, apart from the ends of tiles."""
        strides = (self.input_stride, self.output_stride)
        peers = (address for group in self.groups for address in group)
        return unit_bytes(self.input, self.output, *strides, *peers)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiles of a call, in the form in which kernels take them.

    Attributes:
        count: number of tiles.
        nbytes: bytes that a rank sends to another one.
        arguments: first arguments of a kernel: address of the table, number of tiles, then the piece without a table:
            input, output, bytes, input stride, output stride.
        groups: groups of addresses of the piece without a table.
        constants: constants of kernels for these tiles.
    """

    count: int
    nbytes: int
    arguments: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    constants: dict[str, Any]

    @staticmethod
    def of(piece: KernelPiece, tile_bytes: int, reads: int = 0, stores: int = 0, total: int = 0) -> Tiles:
        """Return the tiles of one piece.

        Args:
            piece: the piece, without an offset.
            tile_bytes: bytes of a tile.
            reads: access size in bytes for what moves or is read; 0 for that of the whole piece.
            stores: access size in bytes for results; 0 for that of the whole piece.
            total: another number of bytes that a part may end at, if parts differ.
        """
        unit, stored = reads or piece.unit_bytes, stores or piece.unit_bytes
        narrow, count = unit_bytes(unit, piece.nbytes, total), -(-piece.nbytes // tile_bytes)
        row = (piece.input, piece.output, piece.nbytes, piece.input_stride, piece.output_stride)
        constants = {"TABLE": 0, "WORDS": 0, "UNIT": unit, "NARROW": narrow, "ALIGNED": stored == 16}
        return Tiles(count, piece.nbytes, (0, count, *row), piece.groups, {**constants, "TILE": tile_bytes})

    @staticmethod
    def of_reduction(piece: KernelPiece, tile_bytes: int, total: int, *, gather: bool) -> Tiles:
        """Return the tiles of one piece to be reduced, whose input and output may be aligned differently.

        Args:
            piece: the piece, without an offset.
            tile_bytes: bytes of a tile.
            total: bytes of an input.
            gather: results are also moved to the output.
        """
        reads = piece.unit_bytes if gather else unit_bytes(piece.input, piece.input_stride)
        return Tiles.of(piece, tile_bytes, reads, unit_bytes(piece.output, piece.output_stride), total)

    def addresses(self, group: int) -> tuple[int, ...]:
        """Return a group of addresses as arguments of a kernel; zeros for a table, which has them in its rows."""
        return padded(self.groups[group] if group < len(self.groups) else ())


@dataclasses.dataclass(frozen=True)
class TileTable:
    """The table of a call with many pieces, as values for device memory.

    Attributes:
        values: int64, the ends and the rows.
        tiles: the tiles, for a table at address 0.
    """

    values: npt.NDArray[np.int64]
    tiles: Tiles

    @staticmethod
    def of(pieces: Sequence[KernelPiece], tile_bytes: int) -> TileTable:
        """Number the tiles of 1 to ``MOST_LISTED`` pieces, in their order."""
        counts = np.array([-(-piece.nbytes // tile_bytes) for piece in pieces], np.int64)
        ends = np.cumsum(counts)
        room = next(room for room in ROOMS if room >= len(pieces))
        padding = np.full(room - len(pieces), _BEYOND, np.int64)
        rows = np.stack([_row(piece, int(end - count)) for piece, end, count in zip(pieces, ends, counts, strict=True)])
        # The last tiles of pieces count, too: their sizes need not be multiples of 16.
        narrow = min(unit_bytes(piece.unit_bytes, piece.nbytes) for piece in pieces)
        constants = {"TABLE": room, "WORDS": rows.shape[1], "UNIT": 16, "NARROW": narrow, "ALIGNED": True}
        count, nbytes = int(ends[-1]), max(piece.sent_offset + piece.nbytes for piece in pieces)
        tiles = Tiles(count, nbytes, (0, count, 0, 0, 0, 0, 0), (), {**constants, "TILE": tile_bytes})
        return TileTable(np.concatenate([ends, padding, rows.ravel()]), tiles)

    def at(self, address: int) -> Tiles:
        """Return the tiles for the table at its address in device memory."""
        return dataclasses.replace(self.tiles, arguments=(address, *self.tiles.arguments[1:]))


def _row(piece: KernelPiece, first_tile: int) -> npt.NDArray[np.int64]:
    row = np.zeros(FIRST_GROUP.value * (1 + len(piece.groups)), np.int64)
    where = (piece.input, piece.output, piece.nbytes, piece.input_stride, piece.output_stride, piece.sent_offset)
    row[: FIRST_GROUP.value] = (*where, piece.unit_bytes == 16, first_tile)
    for group, first in zip(piece.groups, (FIRST_GROUP.value, SECOND_GROUP.value), strict=False):
        row[first : first + len(group)] = group
    return row


@triton.jit
def ends_of(table, TABLE: tl.constexpr):
    """Return the number of the tile after the last one of each piece, int64[TABLE]; anything without a table."""
    return tl.load(table.to(tl.pointer_type(tl.int64)) + tl.arange(0, TABLE)) if TABLE else table


@triton.jit
def each_tile(
    act: tl.constexpr, given, call, owner, OWNERS: tl.constexpr, TABLE: tl.constexpr, WORDS: tl.constexpr,
    UNIT: tl.constexpr, NARROW: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr = 1,
    RAGGED: tl.constexpr = False,
):  # fmt: skip
    """Call a function for each tile of this block, or for each of these tiles that an owner has.

    ``act`` takes ``(part, tile, nbytes, UNIT, ALIGNED, TILE, WHOLE, *given)``: addresses and strides (see ``part_of``),
    and the number of the tile in a part of ``nbytes``. A tile of a table is number 0 of a part of its own. ``call`` is
    the result of ``call_of``. Tile k of this block belongs to owner ``k % OWNERS``. Without a table, the compiler
    prefetches ``STAGES`` tiles, and RAGGED means that more than the last tile may not be full.
    """
    _, _, tiles, whole, part, nbytes = call
    tile = tl.program_id(0).to(tl.int64) + owner * tl.num_programs(0)
    step = tl.num_programs(0) * OWNERS
    if TABLE:
        while tile < tiles:
            at_tile(act, given, call, tile, TABLE, WORDS, UNIT, NARROW, ALIGNED, TILE)
            tile += step
    else:
        if STAGES > 1:  # the compiler prefetches in a loop that counts
            for ahead in tl.range(tile, whole, step, num_stages=STAGES):
                act(part, ahead, nbytes, UNIT, ALIGNED, TILE, True, *given)
            tile += tl.cdiv(tl.maximum(whole - tile, 0), step) * step
        else:
            while tile < whole:
                act(part, tile, nbytes, UNIT, ALIGNED, TILE, True, *given)
                tile += step
        if RAGGED:
            while tile < tiles:
                act(part, tile, nbytes, NARROW, ALIGNED, TILE, False, *given)
                tile += step
        elif tile < tiles:
            act(part, tile, nbytes, NARROW, ALIGNED, TILE, False, *given)


@triton.jit
def at_tile(
    act: tl.constexpr, given, call, tile, TABLE: tl.constexpr, WORDS: tl.constexpr, UNIT: tl.constexpr,
    NARROW: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Call a function for one tile; see :func:`each_tile`."""
    table, ends, _, whole, part, nbytes = call
    if TABLE:
        row, offset, there, wide = _find_tile(table, ends, tile, TABLE, WORDS, TILE)
        if NARROW == UNIT:  # a branch for tiles that do not come would double the code, and its registers
            act(part_of(row, offset), 0, there, UNIT, ALIGNED, TILE, False, *given)
        else:
            if wide:
                act(part_of(row, offset), 0, there, UNIT, ALIGNED, TILE, False, *given)
            else:
                act(part_of(row, offset), 0, there, NARROW, False, TILE, False, *given)
    else:
        if tile < whole:
            act(part, tile, nbytes, UNIT, ALIGNED, TILE, True, *given)
        else:
            act(part, tile, nbytes, NARROW, ALIGNED, TILE, False, *given)


@triton.jit
def call_of(table, ends, tiles, input, output, nbytes, input_stride, output_stride, full, TILE: tl.constexpr):
    """Return what :func:`each_tile` needs to know of a call, from the arguments of its kernel (``Tiles.arguments``).

    ``full``: the bytes of the part whose tiles may be treated as full ones.
    """
    part = (input, output, 0, input_stride, output_stride, table, 0)
    return table, ends, tiles, full // TILE, part, nbytes


@triton.jit
def part_of(row, offset):
    """Return input, output, offset, input stride, output stride of a tile, and its row and offset for ``peer_address``.

    What a kernel does not use of it is not loaded.
    """
    return (
        value(row, INPUT) + offset,
        value(row, OUTPUT) + offset,
        value(row, SENT_OFFSET) + offset,
        value(row, INPUT_STRIDE),
        value(row, OUTPUT_STRIDE),
        row,
        offset,
    )


@triton.jit
def fetch_tile(
    part, tile, nbytes, UNIT: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr, source,
):  # fmt: skip
    """Copy a tile from its place behind ``source``, such as a slot or the staging of its owner, to the output."""
    _, output, sent_offset, _, _, _, _ = part
    put(output, get(source + sent_offset, tile, nbytes, UNIT, TILE, WHOLE), tile, nbytes, UNIT, TILE, WHOLE)


@triton.jit
def peer_address(part, index, GROUP: tl.constexpr):
    """Return an address of a group in the row of a tile, int64."""
    return value(part[5], GROUP + index) + part[6]


@triton.jit
def _find_tile(table, ends, tile, TABLE: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr):
    """Find the row of a tile.

    Returns:
        Address of the row of its piece, its offset in there, its bytes, and whether it moves in accesses of 16 bytes.
    """
    piece = tl.sum((ends <= tile).to(tl.int64))
    row = table + 8 * (TABLE + WORDS * piece)
    offset = (tile - value(row, FIRST_TILE)) * TILE
    nbytes = tl.minimum(value(row, NBYTES) - offset, TILE)
    return row, offset, nbytes, (value(row, WIDE) != 0) & (nbytes % 16 == 0)


@triton.jit
def value(row, COLUMN):
    """Return one value of a row, int64."""
    return tl.load(row.to(tl.pointer_type(tl.int64)) + COLUMN)
