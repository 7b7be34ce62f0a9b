"""Virtual buffers of a call with a list: tensors at any address that its program sees as one buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from sidelane.execute.base import Pieces
from sidelane.program.batch import Batch
from sidelane.program.collective import Buffer

NO_PIECES: Mapping[tuple[int, str], Pieces] = MappingProxyType({})
"""Pieces of a call that is no list: there are none."""


def pieces_of(batch: Batch, addresses: Sequence[Mapping[tuple[int, str], int]]) -> dict[tuple[int, str], Pieces]:
    """Return the virtual buffers of a batch, by rank and buffer.

    Args:
        batch: the batch.
        addresses: for each part, the addresses by rank and buffer, as far as this process reaches them.
    """
    found: dict[tuple[int, str], Pieces] = {}
    for buffer in (Buffer.INPUT, Buffer.OUTPUT):
        for rank in range(batch.world_size):
            sizes = [part.buffer_bytes(rank, buffer) for part in batch.parts]
            rows = [
                (start, nbytes, row[rank, buffer])
                for start, nbytes, row in zip(batch.starts(rank, buffer), sizes, addresses, strict=True)
                if nbytes and (rank, buffer) in row
            ]
            starts, lengths, places = zip(*rows, strict=True) if rows else ((), (), ())
            found[rank, buffer] = Pieces(starts, lengths, places)
    return found
