"""The tensors of a call, one or a list, cut into tiles that blocks take in turn (``kernels/tile_table.py``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from shadows.blocks import Blocks
from sidelane.program.batch import parts_of
from sidelane.program.collective import Buffer, Collective, Span
from sidelane.program.kernel import ALIGNMENT, KernelProgram


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """Bytes of a tensor that a block moves at a time.

    Attributes:
        part: the collective of the tensor.
        placed: makes its spans those of the program.
        first: byte of what goes from rank to rank.
        nbytes: how many.
        stride: bytes of the tensor that go from rank to rank.
        place: where they lie among all that goes from rank to rank.
        owner: in two shots, the rank that reduces them for all; None as long as nobody has said so.
    """

    part: Collective
    placed: Callable[[Span], Span]
    first: int
    nbytes: int
    stride: int
    place: int
    owner: int | None = None

    def cut(self, nbytes: int) -> Iterator[Tile]:
        """Into tiles of so many bytes, the last one as it comes."""
        for at in range(0, self.nbytes, nbytes):
            rest = min(nbytes, self.nbytes - at)
            yield dataclasses.replace(self, first=self.first + at, nbytes=rest, place=self.place + at)

    def input(self, rank: int, shard: int = 0) -> Span:
        """In the input of a rank, of what is for one that gets a shard of its own."""
        return self.placed(self.part.input_span(rank, shard * self.stride + self.first, self.nbytes))

    def output(self, rank: int, sender: int = 0) -> Span:
        """In the output of a rank, of what comes from a sender."""
        return self.placed(self.part.output_span(rank, sender * self.stride + self.first, self.nbytes))


class Tensors:
    """What a kernel moves.

    Attributes:
        shards: of what a rank stages or sends: one for each rank, or one for all.
        reduction: of all; None for what only moves.
        two_shot: ranks reduce tiles for all others.
        root: of broadcasts.
    """

    def __init__(self, program: KernelProgram, grid: Blocks) -> None:
        self._program, self._grid = program, grid
        self.two_shot = program.two_shot
        self.shards = program.world_size if program.distinct and not self.two_shot else 1
        self.root, self.reduction = root_of(program), _first(program).reduction
        self._stride = -(-program.part_bytes // ALIGNMENT) * ALIGNMENT

    def tiles(self, block: int) -> Iterator[Tile]:
        """Those of a block, in its order: every so many of those that are numbered together."""
        count, n = self._grid.count, self._program.world_size
        for pieces in self._numbered_together():
            tiles = [tile for piece in pieces for tile in piece.cut(self._grid.tile_bytes)]
            for turn, tile in enumerate(tiles[block::count]):
                yield dataclasses.replace(tile, owner=turn % n) if tile.owner is None else tile

    def staged(self, rank: int, tile: Tile, shard: int = 0) -> Span:
        """Where a tile lies in the staging of a rank."""
        return Span(rank, Buffer.STAGING, shard * self._stride + tile.place, tile.nbytes)

    def _numbered_together(self) -> Iterator[list[Tile]]:
        """Tensors as tiles of all their bytes: those of a list, one, or each shard of one that is reduced in shards."""
        program = self._program
        if program.listed:
            parts = zip(parts_of(program.collective), program.sizes, program.offsets, strict=False)
            yield [Tile(part, placed, 0, size, size, place) for (part, placed), size, place in parts]
            return
        ((part, placed),), size = parts_of(program.collective), program.part_bytes
        if not self.two_shot:
            yield [Tile(part, placed, 0, size, size, 0)]
            return
        for shard in range(program.world_size):
            length = max(0, min(size, part.input_bytes(0) - shard * size))
            yield [Tile(part, placed, shard * size, length, size, shard * self._stride, shard)]


def root_of(program: KernelProgram) -> int | None:
    """Of broadcasts."""
    return _first(program).root


def _first(program: KernelProgram) -> Collective:
    """Of the collectives, which are alike but for their sizes."""
    return next(part for part, _ in parts_of(program.collective))
