"""Virtual buffers of a call with a list: tensors at any address, or in rows, that its program sees as one buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from sidelane.execute.base import Pieces
from sidelane.program.batch import Batch
from sidelane.program.collective import Buffer
from sidelane.program.resharding import Resharding

NO_PIECES: Mapping[tuple[int, str], Pieces] = MappingProxyType({})
"""Pieces of a call that is no list: there are none."""


def pieces_of(
    batch: Batch,
    addresses: Sequence[Mapping[tuple[int, str], int]],
    reshardings: Sequence[Resharding | None] | None = None,
) -> dict[tuple[int, str], Pieces]:
    """Return the virtual buffers of a batch, by rank and buffer.

    Args:
        batch: the batch.
        addresses: for each part, the addresses by rank and buffer, as far as this process reaches them.
        reshardings: for each part, its layout; None, also for one of them: its tensors are contiguous parts.
    """
    if reshardings is not None and any(reshardings):
        return _pieces_in_rows(batch, addresses, reshardings)
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


def _pieces_in_rows(
    batch: Batch, addresses: Sequence[Mapping[tuple[int, str], int]], reshardings: Sequence[Resharding | None]
) -> dict[tuple[int, str], Pieces]:
    """Return the virtual buffers of a batch with layouts: the parts of a tensor are pieces of their own."""
    found: dict[tuple[int, str], Pieces] = {}
    for buffer in (Buffer.INPUT, Buffer.OUTPUT):
        for rank in range(batch.world_size):
            made: list[tuple[int, int, int, tuple[int, int]]] = []
            starts = batch.starts(rank, buffer)
            for number, (row, resharding) in enumerate(zip(addresses, reshardings, strict=True)):
                address = row.get((rank, buffer))
                if address is not None:
                    nbytes = batch.parts[number].buffer_bytes(rank, buffer)
                    made += _in_rows(starts[number], address, nbytes, resharding, rank, buffer)
            columns = zip(*made, strict=True) if made else ((), (), (), ())
            found[rank, buffer] = Pieces(*map(tuple, columns))
    return found


def _in_rows(
    start: int, address: int, nbytes: int, resharding: Resharding | None, rank: int, buffer: Buffer
) -> Iterator[tuple[int, int, int, tuple[int, int]]]:
    """Yield start, size, address and rows of each piece of one tensor."""
    if resharding is None:
        if nbytes:
            yield start, nbytes, address, (nbytes, nbytes)
        return
    for part in resharding.places(rank, buffer):
        rows = (part.nbytes, part.nbytes) if part.width in (part.pitch, part.nbytes) else (part.width, part.pitch)
        yield start + part.start, part.nbytes, address + part.origin, rows
