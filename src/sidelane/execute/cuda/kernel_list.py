"""Lists of tensors by one kernel: from where the tensors of a call lie to the table that the kernel reads."""

from __future__ import annotations

from sidelane.device import (
    list_broadcast_parcels,
    list_broadcast_push,
    list_direct,
    list_parcels,
    list_pull,
    list_push,
    parcels,
    relay,
)
from sidelane.device.launch import Launch, Site
from sidelane.device.list_table import Piece, Table
from sidelane.execute.base import Addresses
from sidelane.execute.cuda.site import CudaSite
from sidelane.execute.cuda.tables import DeviceTable
from sidelane.program.collective import Buffer, Collective, Span
from sidelane.program.kernel import Protocol
from sidelane.program.kernel_list import KernelListProgram


def arrange_list(
    program: KernelListProgram, executor: CudaSite, addresses: Addresses, *, frozen: bool
) -> tuple[Launch, DeviceTable] | None:
    """The launch of this rank, and what it needs for as long as it may run; None if there is nothing to move.

    Args:
        program: what to run.
        executor: of this rank; its lock is held and its device current.
        addresses: where.
        frozen: it is for a graph under capture.

    Raises:
        ValueError: an address is missing.
        DriverError: there is no memory for its table.
    """
    if not program.part_bytes:
        return None
    site = Site(executor.rank, addresses.arenas, executor.board, program.blocks)
    table = Table.of(find_pieces(program, site, addresses), tile_bytes(program))
    held = executor.place_table(table.values, frozen=frozen)
    given, reduction, distinct = (site, table, held.address), program.reduction, program.distinct
    match program.protocol:
        case Protocol.PARCELS if program.root is not None:
            return list_broadcast_parcels.arrange(site, table, held.address, program.root), held
        case Protocol.PUSH if program.root is not None:
            return list_broadcast_push.arrange(site, table, held.address, program.root, None), held
        case Protocol.PARCELS:
            return list_parcels.arrange(*given, reduction, distinct=distinct), held
        case Protocol.PUSH:
            return list_push.arrange(*given, distinct=distinct), held
        case Protocol.DIRECT:
            assert reduction is not None
            return list_direct.arrange(*given, reduction, gather=program.two_shot), held
    stagings = tuple(addresses.buffers[rank, Buffer.STAGING] for rank in range(program.world_size))
    if program.root is not None:
        return list_broadcast_push.arrange(site, table, held.address, program.root, stagings), held
    staged = (stagings, program.part_bytes)
    return list_pull.arrange(*given, *staged, reduction, distinct=distinct, gather=program.two_shot), held


def tile_bytes(program: KernelListProgram) -> int:
    """Size of the tiles of a table."""
    match program.protocol:
        case Protocol.PARCELS:
            return parcels.TILE_BYTES
        case Protocol.PUSH | Protocol.STAGE if program.root is not None:
            return relay.TILE_BYTES
        case Protocol.PUSH:
            return list_push.TILE_BYTES
        case Protocol.DIRECT:
            return list_direct.TILE_BYTES
    return list_pull.tile_bytes(program.reduction)


def find_pieces(program: KernelListProgram, site: Site, addresses: Addresses) -> list[Piece]:
    """The parts that have bytes, as the rank of ``site`` sees them. Raises ValueError where an address is missing."""
    batch, rank, everyone = program.collective, site.rank, range(program.world_size)

    def address(part: int, span: Span) -> int:
        there = batch.placed(part, span)
        found = addresses.find(there.rank, there.buffer, there.offset)
        if found is None:
            raise ValueError(f"load: no address of buffer {span.buffer} of part {part} on rank {span.rank} ({batch})")
        return found

    def groups(number: int, part: Collective, nbytes: int) -> tuple[tuple[int, ...], ...]:
        """What peers touch of their tensors, or this rank of theirs."""
        own = rank * nbytes
        if program.protocol is Protocol.PUSH and program.root is not None:
            outputs = tuple(address(number, part.output_span(peer, 0, nbytes)) for peer in everyone)
            return (relay.from_root(outputs, program.root),)
        if program.protocol is Protocol.PUSH:
            return (site.rotated(tuple(address(number, part.output_span(peer, own, nbytes)) for peer in everyone)),)
        if program.protocol is not Protocol.DIRECT:
            return ()
        read = own if program.distinct else 0
        inputs = tuple(address(number, part.input_span(peer, read, nbytes)) for peer in everyone)
        if not program.two_shot:
            return (inputs,)
        return inputs, site.rotated(tuple(address(number, part.output_span(peer, 0, nbytes)) for peer in everyone))

    return [
        Piece(
            input=address(number, part.input_span(rank, 0, nbytes)),
            output=address(number, part.output_span(rank, 0, nbytes)),
            nbytes=nbytes,
            input_stride=nbytes if program.distinct else 0,
            output_stride=nbytes if program.gathers else 0,
            place=program.places[number],
            groups=groups(number, part, nbytes),
        )
        for number, (part, nbytes) in enumerate(zip(batch.parts, program.sizes, strict=True))
        if nbytes
    ]
