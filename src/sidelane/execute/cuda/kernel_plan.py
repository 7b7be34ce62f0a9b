"""The plan of a collective in one kernel: which kernel it is, and the launch of one rank at given addresses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from sidelane.device.launch import Launch, LaunchSite, unit_bytes
from sidelane.execute.base import Addresses
from sidelane.kernels import block_flags, broadcast, direct, ll, staged
from sidelane.kernels.tile_table import KernelPiece, Tiles, TileTable
from sidelane.program.collective import Buffer, Collective, Reduction, Span
from sidelane.program.kernel import KernelProgram, Protocol

PlaceTable = Callable[[npt.NDArray[np.int64]], int]
"""Function that copies a table to device memory, and returns its address there."""

Groups = Callable[[int, Collective, int], tuple[tuple[int, ...], ...]]
"""Function of a part's number, the part and its bytes, which returns the groups of addresses that a kernel uses."""


def arrange(
    program: KernelProgram, site: LaunchSite, addresses: Addresses, place_table: PlaceTable | None
) -> Launch | None:
    """Make the launch of one rank; None if there are no bytes to move.

    Args:
        program: the program.
        site: rank, arenas and blocks of the launch.
        addresses: addresses of the program's buffers.
        place_table: places the table of a list, which stays as long as the launch; None for calls without lists.

    Raises:
        ValueError: an address is missing.
        DriverError: the device has no memory for the table.
    """
    if not program.part_bytes:
        return None
    return ARRANGE[program.protocol, program.root is not None](_Kernel(program, site, addresses, place_table))


@dataclasses.dataclass(frozen=True, slots=True)
class _Kernel:
    """A program at addresses. Attributes: see :func:`arrange`."""

    program: KernelProgram
    site: LaunchSite
    addresses: Addresses
    place_table: PlaceTable | None

    @property
    def reduction(self) -> Reduction:
        assert self.program.reduction is not None
        return self.program.reduction

    @property
    def root(self) -> int:
        assert self.program.root is not None
        return self.program.root

    @property
    def stagings(self) -> tuple[int, ...]:
        """Address of each rank's staging."""
        return tuple(self._found(rank, Buffer.STAGING, 0) for rank in range(self.site.world_size))

    @property
    def own(self) -> int:
        """Number of the part of an input, in parts, that peers read or write here: of this rank, or 0 for all."""
        return self.site.rank if self.program.distinct else 0

    def address(self, number: int, span: Span) -> int:
        """Return the address of a part's bytes. Raises ValueError without one."""
        there = self.program.placed(number, span)
        return self._found(there.rank, there.buffer, there.offset)

    def everyone(self, number: int, span_of: Callable[[int, int, int], Span], offset: int) -> tuple[int, ...]:
        """Return the addresses of a part's bytes from an offset on, on all ranks."""
        return tuple(self.address(number, span_of(rank, offset, 0)) for rank in range(self.site.world_size))

    def pieces(self, groups: Groups | None = None) -> list[KernelPiece]:
        """Return the parts that have bytes, with their addresses on this rank. Raises ValueError without one."""
        program, rank = self.program, self.site.rank
        gathers = program.reduction is None and program.root is None  # an output has a part of every rank
        strided = gathers or (program.distinct and program.two_shot)
        return [
            KernelPiece(
                input=self.address(number, part.input_span(rank, 0, 0)),
                output=self.address(number, part.output_span(rank, 0, 0)),
                nbytes=nbytes,
                input_stride=nbytes if program.distinct else 0,
                output_stride=nbytes if strided else 0,
                place=program.places[number],
                groups=() if groups is None else groups(number, part, nbytes),
            )
            for number, (part, nbytes) in enumerate(zip(program.parts, program.sizes, strict=True))
            if nbytes
        ]

    def tiles(self, tile_bytes: int, groups: Groups | None = None) -> Tiles:
        """Return the tiles of the one piece, or of a list's pieces, whose table is placed in device memory."""
        program, pieces = self.program, self.pieces(groups)
        if program.listed:
            assert self.place_table is not None
            table = TileTable.of(pieces, tile_bytes)
            return table.at(self.place_table(table.values))
        if program.reduction is None:
            return Tiles.of(pieces[0], tile_bytes)
        total = program.parts[0].input_bytes(self.site.rank)
        return Tiles.of_reduction(pieces[0], tile_bytes, total, gather=program.two_shot)

    def _found(self, rank: int, buffer: str, offset: int) -> int:
        found = self.addresses.find(rank, buffer, offset)
        if found is None:
            program = self.program
            raise ValueError(
                f"load: no address of buffer {buffer} of rank {rank} ({program.collective}, {program.variant})"
            )
        return found


def _ll(kernel: _Kernel) -> Launch:
    (piece,), program = kernel.pieces(), kernel.program
    given = (piece.output, piece.input, piece.nbytes, program.reduction)
    return ll.arrange(kernel.site, *given, distinct=program.distinct)


def _ll_broadcast(kernel: _Kernel) -> Launch:
    (piece,) = kernel.pieces()
    return ll.arrange_broadcast(kernel.site, piece.output, piece.nbytes, kernel.root)


def _block_flags(kernel: _Kernel) -> Launch:
    program, tiles = kernel.program, kernel.tiles(block_flags.TILE_BYTES)
    return block_flags.arrange(kernel.site, tiles, program.reduction, distinct=program.distinct)


def _block_flags_broadcast(kernel: _Kernel) -> Launch:
    return block_flags.arrange_broadcast(kernel.site, kernel.tiles(block_flags.TILE_BYTES), kernel.root)


def _relay(kernel: _Kernel) -> Launch:
    (piece,) = kernel.pieces()
    return broadcast.arrange_relay(kernel.site, piece.output, piece.nbytes, kernel.root)


def _broadcast_push(kernel: _Kernel) -> Launch:
    def groups(number: int, part: Collective, nbytes: int) -> tuple[tuple[int, ...], ...]:
        return (broadcast.from_root(kernel.everyone(number, part.output_span, 0), kernel.root),)

    return broadcast.arrange_push(kernel.site, kernel.tiles(broadcast.TILE_BYTES, groups), kernel.root, None)


def _broadcast_stage(kernel: _Kernel) -> Launch:
    return broadcast.arrange_push(kernel.site, kernel.tiles(broadcast.TILE_BYTES), kernel.root, kernel.stagings)


def _push(kernel: _Kernel) -> Launch:
    site = kernel.site

    def groups(number: int, part: Collective, nbytes: int) -> tuple[tuple[int, ...], ...]:
        return (site.rotated(kernel.everyone(number, part.output_span, site.rank * nbytes)),)

    tiles = kernel.tiles(direct.MOVED_TILE_BYTES, groups)
    return direct.arrange_push(site, tiles, distinct=kernel.program.distinct)


def _staged(kernel: _Kernel) -> Launch:
    program, part = kernel.program, kernel.program.parts[0]
    tiles = kernel.tiles(staged.tile_bytes(program.reduction))
    sizes = (program.places[-1], part.input_bytes(kernel.site.rank))
    options = {"distinct": program.distinct, "gather": program.two_shot}
    return staged.arrange(kernel.site, tiles, kernel.stagings, *sizes, program.reduction, **options)


def _direct(kernel: _Kernel) -> Launch:
    program, site = kernel.program, kernel.site
    tile_bytes = direct.tile_bytes(site, listed=program.listed)
    n, gather = site.world_size, program.two_shot

    def groups(number: int, part: Collective, nbytes: int) -> tuple[tuple[int, ...], ...]:
        own = nbytes * kernel.own
        inputs = kernel.everyone(number, part.input_span, own)
        if not gather:
            return (inputs,)
        return inputs, site.rotated(kernel.everyone(number, part.output_span, own))

    if program.listed:
        tiles = kernel.tiles(tile_bytes, groups)
        largest = -(-tiles.count // n) if gather else tiles.count
    else:
        (piece,) = kernel.pieces(groups)
        largest = -(-piece.nbytes // tile_bytes)
        mine = program.parts[0].input_bytes(site.rank) - piece.nbytes * kernel.own
        inputs, *outputs = piece.groups
        piece = dataclasses.replace(piece, nbytes=max(0, min(mine, piece.nbytes)))
        tiles = Tiles.of(
            piece, tile_bytes, unit_bytes(*inputs), unit_bytes(*(outputs[0] if gather else (piece.output,)))
        )
    return direct.arrange(site, tiles, largest, kernel.reduction, gather=gather)


def _send(kernel: _Kernel) -> Launch:
    program, (part,) = kernel.program, kernel.program.parts
    (piece,), total = kernel.pieces(), part.input_bytes(kernel.site.rank)
    outputs = kernel.everyone(0, part.output_span, 0)
    given = (outputs, piece.input, kernel.stagings, program.part_bytes, total, kernel.reduction)
    return direct.arrange_send(kernel.site, *given)


ARRANGE: Mapping[tuple[Protocol, bool], Callable[[_Kernel], Launch]] = MappingProxyType(
    {
        (Protocol.LL, False): _ll,
        (Protocol.LL, True): _ll_broadcast,
        (Protocol.BLOCK_FLAGS, False): _block_flags,
        (Protocol.BLOCK_FLAGS, True): _block_flags_broadcast,
        (Protocol.RELAY, True): _relay,
        (Protocol.PUSH, False): _push,
        (Protocol.PUSH, True): _broadcast_push,
        (Protocol.STAGE, True): _broadcast_stage,
        (Protocol.PULL, False): _staged,
        (Protocol.REDUCE, False): _staged,
        (Protocol.DIRECT, False): _direct,
        (Protocol.SEND, False): _send,
    }
)
"""Functions that make the launches of a protocol; True for those of broadcasts."""
