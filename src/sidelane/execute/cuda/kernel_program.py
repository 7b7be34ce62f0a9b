"""Collectives on compute units: one kernel launch per call.

Kernels count generations in device memory (``device/layout.py``), so that every launch is the same, eager or in a
graph. A kernel reports to the host only if it waits for long (``watch``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from sidelane.device.launch import Launch, LaunchSite, unit_bytes
from sidelane.execute.base import Addresses, CallerStream, Repetition
from sidelane.execute.cuda.native import Bound, Located, locate
from sidelane.execute.cuda.site import CudaSite, ExecutableGraph
from sidelane.execute.cuda.tables import DeviceTable
from sidelane.execute.submitted import Counts, Entry, Submitted
from sidelane.kernels import block_flags, broadcast, direct, ll, staged, through_host
from sidelane.kernels.tile_table import KernelPiece, Tiles, TileTable
from sidelane.program.collective import Buffer, Collective, Reduction, Span
from sidelane.program.kernel import KernelProgram, Protocol

StoreTable = Callable[[npt.NDArray[np.int64]], int]
"""Function that copies a table to device memory, and returns its address there."""

Groups = Callable[[int, Collective, int], tuple[tuple[int, ...], ...]]
"""Function of a part's number, the part and its bytes, which returns the groups of addresses that a kernel uses."""

_MOST_CALLERS = 64  # streams for which launches are remembered


class CudaKernel:
    """A collective of one kernel, bound to addresses (see :class:`sidelane.execute.base.Runnable`).

    Args:
        executor: executor of this rank; its lock is held and its device current.
        program: the program.
        addresses: addresses of its buffers.
        frozen: it is for a graph under capture.
    """

    def __init__(self, executor: CudaSite, program: KernelProgram, addresses: Addresses, *, frozen: bool) -> None:
        self.program = program
        self.addresses = addresses
        self.executor = executor
        self._frozen = frozen
        self._table: DeviceTable | None = None
        shared_bytes = executor.features.shared_bytes
        words = executor.status_words, executor.counters
        site = LaunchSite(executor.rank, addresses.arenas, *words, program.blocks, shared_bytes)
        made = arrange(program, site, locate(addresses, addresses.buffers), self._store_table)
        self._made = None if made is None else (made, addresses)
        self._launch = None if made is None else _moved(made, addresses, addresses)
        self._by_stream: dict[int, tuple[Bound, ...]] = {}
        self._graph: ExecutableGraph | None = None
        if self._launch is not None:
            self._bind(executor.internal)  # compiles and loads it; inside a capture it would be too late
        self._entry = self._enter(Counts() if self._launch is None else Counts(kernels=1, calls=1))

    @property
    def moves(self) -> bool:
        """True if :meth:`at` works: only arguments of the kernel depend on the addresses."""
        return not self.program.listed and self._launch is not None and not self._frozen

    def at(self, addresses: Addresses) -> CudaKernel:
        """Return the same kernel at other addresses of its buffers, moved by multiples of ``UNIT``.

        It makes no calls to the driver.
        """
        assert self._made is not None, "something moves"
        moved = CudaKernel.__new__(CudaKernel)
        moved.__dict__.update(self.__dict__)
        moved.addresses, moved._launch = addresses, _moved(*self._made, addresses)
        moved._by_stream, moved._graph = {}, None
        return moved

    def run(self, epoch: int, caller: CallerStream) -> None:
        """Launch the kernel (see :class:`sidelane.execute.base.Runnable`).

        Raises:
            PeerError, PeerTimeoutError: an earlier invocation failed; nothing was submitted.
            DriverError: the driver refused the launch. The executor is unusable from now on.
        """
        executor = self.executor
        if executor.watch.failure is not None or executor.closed:
            executor.check_usable("start")
        with executor.lock:
            if executor.driver.is_current():
                self._submit(epoch, caller[0])
            else:
                with executor.driver.current():
                    self._submit(epoch, caller[0])

    def repetition(self, caller: CallerStream, moving: Sequence[tuple[int, str]] | None = None) -> Repetition | None:
        """See :class:`sidelane.execute.base.Runnable`. What moves is a plain launch: a graph has fixed arguments."""
        if self._frozen or self._launch is None or (moving is not None and not self.moves):
            return None
        handle, executor = caller[0], self.executor
        if moving is not None:
            calls = self.at(locate(self.addresses, moving))._bind(handle)
            notes = executor.kernel_notes(handle, self.program, self._entry)
            return executor.repetition(calls, self.program, notes, moving=self.addresses)
        calls, entry = self._bind(handle), self._entry
        with executor.lock, executor.driver.current():
            # Nodes of a graph have the priority of the captured stream, not of the stream on which it is launched.
            normal = executor.driver.has_normal_priority(handle)
            if normal and self._graph is None:
                self._graph = executor.launch_graph(self._bind(executor.internal))
        if normal and self._graph is not None:
            calls, entry = (self._graph.bind(handle),), self._enter(Counts(kernels=1, graph_launches=1, calls=1))
        return executor.repetition(calls, self.program, executor.kernel_notes(handle, self.program, entry))

    def _submit(self, epoch: int, handle: int) -> None:
        executor = self.executor
        if self._launch is not None:
            calls = self._by_stream.get(handle)
            if calls is None:
                calls = self._bind(handle)
            try:
                executor.driver.submit(calls)
            except BaseException as error:
                title = f"{self.program.collective} {self.program.variant}"
                executor.fail_submission(title, error, captured=self._frozen)
                raise
        if not self._frozen:
            executor.kernel_stream = handle
        executor.watch.launched(epoch, self.program, captured=self._frozen)
        executor.ledger.count(self._entry)

    def _enter(self, counts: Counts) -> Entry:
        program = self.program
        submitted = Submitted(str(program.collective), "sm", program.variant, self._frozen, counts)
        return self.executor.ledger.entry(submitted)

    def _store_table(self, values: npt.NDArray[np.int64]) -> int:
        self._table = self.executor.store_table(values, frozen=self._frozen)
        return self._table.address

    def _bind(self, handle: int) -> tuple[Bound, ...]:
        assert self._launch is not None
        if len(self._by_stream) >= _MOST_CALLERS:
            self._by_stream.clear()
        launch, driver = self._launch, self.executor.driver
        bound = driver.bind_kernel(
            launch.kernel, launch.constants, launch.arguments, blocks=launch.blocks, warps=launch.warps, stream=handle
        )
        calls = self._by_stream[handle] = (bound,)
        return calls


def _moved(launch: Launch, before: Addresses, after: Addresses) -> Launch:
    """Return a launch whose arguments know their buffers (``native.Located``) at other addresses of these."""
    arguments = tuple(
        after.buffers[value.buffer] + (int(value) - before.buffers[value.buffer]) if type(value) is Located else value
        for value in launch.arguments
    )
    return Launch(launch.kernel, launch.blocks, launch.warps, arguments, launch.constants)


def arrange(
    program: KernelProgram, site: LaunchSite, addresses: Addresses, store_table: StoreTable | None
) -> Launch | None:
    """Make the launch of one rank; None if there are no bytes to move.

    Args:
        program: the program.
        site: rank, arenas and blocks of the launch.
        addresses: addresses of the program's buffers.
        store_table: stores the table of a list, which stays as long as the launch; None for calls without lists.

    Raises:
        ValueError: an address is missing.
        DriverError: the device has no memory for the table.
    """
    if not program.part_bytes:
        return None
    return ARRANGE[program.protocol, program.root is not None](_Kernel(program, site, addresses, store_table))


@dataclasses.dataclass(frozen=True, slots=True)
class _Kernel:
    """A program at addresses. Attributes: see :func:`arrange`."""

    program: KernelProgram
    site: LaunchSite
    addresses: Addresses
    store_table: StoreTable | None

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
                sent_offset=program.offsets[number],
                groups=() if groups is None else groups(number, part, nbytes),
            )
            for number, (part, nbytes) in enumerate(zip(program.parts, program.sizes, strict=True))
            if nbytes
        ]

    def tiles(self, tile_bytes: int, groups: Groups | None = None) -> Tiles:
        """Return the tiles of the one piece, or of a list's pieces, whose table is placed in device memory."""
        program, pieces = self.program, self.pieces(groups)
        if program.listed:
            assert self.store_table is not None
            table = TileTable.of(pieces, tile_bytes)
            return table.at(self.store_table(table.values))
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
    return ll.arrange(kernel.site, *given, distinct=program.distinct, once=program.protocol is Protocol.LL_ONCE)


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
    sizes = (program.offsets[-1], part.input_bytes(kernel.site.rank))
    options = {"distinct": program.distinct, "gather": program.two_shot}
    return staged.arrange(kernel.site, tiles, kernel.stagings, *sizes, program.reduction, **options)


def _direct(kernel: _Kernel) -> Launch:
    program, site = kernel.program, kernel.site
    tile_bytes = direct.tile_bytes_at(site, listed=program.listed)
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


def _through_host(kernel: _Kernel) -> Launch:
    program, tiles = kernel.program, kernel.tiles(through_host.TILE_BYTES)
    given = (tiles, kernel.stagings, program.offsets[-1], program.reduction)
    return through_host.arrange(kernel.site, *given, distinct=program.distinct, root=program.root)


ARRANGE: Mapping[tuple[Protocol, bool], Callable[[_Kernel], Launch]] = MappingProxyType(
    {
        (Protocol.LL, False): _ll,
        (Protocol.LL, True): _ll_broadcast,
        (Protocol.LL_ONCE, False): _ll,
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
        (Protocol.HOST, False): _through_host,
        (Protocol.HOST, True): _through_host,
    }
)
"""Functions that make the launches of a protocol; True for those of broadcasts."""
