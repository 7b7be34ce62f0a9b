"""Lists of tensors by one kernel: from where the tensors of a call lie to the table that the kernel reads."""

from __future__ import annotations

from sidelane.device import list_parcels, list_pull
from sidelane.device.launch import Launch, Site
from sidelane.device.list_table import Piece, Table
from sidelane.device.parcels import TILE_BYTES as PARCEL_TILE
from sidelane.execute.base import Addresses
from sidelane.execute.cuda.driver import DeviceTable
from sidelane.execute.cuda.executor import CudaExecutor
from sidelane.program.collective import Buffer, Span
from sidelane.program.kernel import Protocol
from sidelane.program.kernel_list import KernelListProgram


def arrange_list(
    program: KernelListProgram, executor: CudaExecutor, addresses: Addresses
) -> tuple[Launch, DeviceTable] | None:
    """The launch of this rank, and what it needs for as long as it may run; None if there is nothing to move.

    Args:
        program: what to run.
        executor: of this rank; its lock is held and its device current.
        addresses: where.

    Raises:
        ValueError: an address is missing.
    """
    if not program.part_bytes:
        return None
    pieces = find_pieces(program, executor.rank, addresses)
    parcels = program.protocol is Protocol.PARCELS
    table = Table.of(pieces, PARCEL_TILE if parcels else list_pull.tile_bytes(program.reduction))
    held = executor.driver.device_table(table.rows, executor.internal)
    site = Site(executor.rank, addresses.arenas, executor.board, program.blocks)
    given, reduction, distinct = (site, table, held.address), program.reduction, program.distinct
    if parcels:
        return list_parcels.arrange(*given, reduction, distinct=distinct), held
    staged = (tuple(addresses.buffers[rank, Buffer.STAGING] for rank in range(program.world_size)), program.part_bytes)
    return list_pull.arrange(*given, *staged, reduction, distinct=distinct, gather=program.two_shot), held


def find_pieces(program: KernelListProgram, rank: int, addresses: Addresses) -> list[Piece]:
    """The parts that have bytes, as ``rank`` sees them. Raises as :func:`arrange_list`."""
    batch = program.collective

    def address(part: int, span: Span) -> int:
        there = batch.placed(part, span)
        found = addresses.find(rank, there.buffer, there.offset)
        if found is None:
            raise ValueError(f"load: no address of buffer {span.buffer} of part {part} on rank {rank} ({batch})")
        return found

    pieces = []
    for number, (part, nbytes) in enumerate(zip(batch.parts, program.sizes, strict=True)):
        if not nbytes:
            continue
        output_stride = nbytes if program.reduction is None else 0
        pieces.append(
            Piece(
                input=address(number, part.input_span(rank, 0, nbytes)),
                output=address(number, part.output_span(rank, 0, nbytes)),
                nbytes=nbytes,
                input_stride=nbytes if program.distinct else 0,
                output_stride=output_stride,
                place=program.places[number],
            )
        )
    return pieces
