"""All-to-alls with a layout: tensors that are split along one dimension become split along another one.

The exchange of sequence parallelism (Ulysses) is the example, with ``scatter_dim=2`` and ``gather_dim=1``::

    input of rank i    [B, S_i, H, D]     part j: the heads of rank j, [B, S_i, H_j, D]
    output of rank j   [B, S, H_j, D]     part i: the positions of rank i, the same elements in the same order

A part is a slice along one dimension, so that its elements, in their order, are rows of bytes at equal distances. A
program sees the parts of a tensor one behind the other, as in any all-to-all, and ``verify`` proves that exchange to
the byte. Only whoever binds a program to addresses knows where the bytes of a part lie (:meth:`Resharding.parts_at`).
"""

from __future__ import annotations

import dataclasses
import math
from itertools import accumulate
from typing import NamedTuple

from sidelane.program.collective import Buffer, Collective, all_to_all


class PitchedPart(NamedTuple):
    """A part of a tensor: ``nbytes`` bytes in rows of ``width``, the next one ``pitch`` bytes behind the last.

    Attributes:
        start: offset of the part in the buffer that the program sees.
        nbytes: size of the part in bytes, > 0.
        origin: offset of its first row in the tensor in bytes.
        width: size of a row in bytes.
        pitch: distance from row to row in bytes.
    """

    start: int
    nbytes: int
    origin: int
    width: int
    pitch: int


@dataclasses.dataclass(frozen=True, slots=True)
class Resharding:
    """The layout of an all-to-all on tensors of several dimensions; the same on all ranks.

    Attributes:
        shape: shape of all ranks' tensors together.
        element_bytes: size of an element in bytes.
        scatter_dim: dimension of which an input has everything, and an output its rank's part.
        gather_dim: dimension of which an input has its rank's part, and an output everything.
        scattered: sizes of the parts of ``scatter_dim``, one for each rank.
        gathered: sizes of the parts of ``gather_dim``, one for each rank.

    >>> ulysses = Resharding((1, 4, 6, 8), 2, 2, 1, scattered=(3, 3), gathered=(2, 2))
    >>> ulysses.shape_of(0, Buffer.INPUT), ulysses.shape_of(0, Buffer.OUTPUT)
    ((1, 2, 6, 8), (1, 4, 3, 8))
    >>> ulysses.parts_at(1, Buffer.INPUT)[1]
    PitchedPart(start=96, nbytes=96, origin=48, width=48, pitch=96)
    """

    shape: tuple[int, ...]
    element_bytes: int
    scatter_dim: int
    gather_dim: int
    scattered: tuple[int, ...]
    gathered: tuple[int, ...]

    def collective(self, *, copies_own: bool) -> Collective:
        """Return the exchange, as the program sees it."""
        split = (self.scatter_dim, self.gather_dim)
        others = math.prod(size for dim, size in enumerate(self.shape) if dim not in split) * self.element_bytes
        return all_to_all(
            [[mine * each * others for each in self.scattered] for mine in self.gathered], copies_own=copies_own
        )

    def shape_of(self, rank: int, buffer: Buffer) -> tuple[int, ...]:
        """Return the shape of a rank's input or output."""
        shape = list(self.shape)
        if buffer == Buffer.INPUT:
            shape[self.gather_dim] = self.gathered[rank]
        else:
            shape[self.scatter_dim] = self.scattered[rank]
        return tuple(shape)

    def parts_at(self, rank: int, buffer: Buffer) -> tuple[PitchedPart, ...]:
        """Return where the parts of a rank's input or output lie; parts without bytes are left out.

        A part is a slice of a contiguous tensor along one dimension: one row for each index of the dimensions before.
        """
        shape = self.shape_of(rank, buffer)
        dim, sizes = (self.scatter_dim, self.scattered) if buffer == Buffer.INPUT else (self.gather_dim, self.gathered)
        rows, unit = math.prod(shape[:dim]), math.prod(shape[dim + 1 :]) * self.element_bytes
        pitch = shape[dim] * unit
        return tuple(
            PitchedPart(rows * first * unit, rows * size * unit, first * unit, size * unit, pitch)
            for first, size in zip(accumulate(sizes, initial=0), sizes, strict=False)
            if rows * size * unit
        )

    def __str__(self) -> str:
        parts = [*self.scattered] if len({*self.scattered}) > 1 else self.scattered[0]
        others = [*self.gathered] if len({*self.gathered}) > 1 else self.gathered[0]
        return f"{[*self.shape]} from dimension {self.gather_dim} by {others} to {self.scatter_dim} by {parts}"


def even_parts(total: int, world_size: int) -> tuple[int, ...]:
    """Return the sizes of parts as ``torch.tensor_split`` makes them: the first ones are larger by one, if any are.

    >>> even_parts(10, 4)
    (3, 3, 2, 2)
    """
    least, larger = divmod(total, world_size)
    return tuple(least + (rank < larger) for rank in range(world_size))
