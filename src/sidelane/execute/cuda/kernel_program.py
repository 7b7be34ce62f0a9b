"""Collectives on compute units: one kernel launch per call.

Kernels count generations in device memory (``device/layout.py``), so that every launch is the same, eager or in a
graph. A kernel reports to the host only if it waits for long (``watch``).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import torch

from sidelane.device.launch import Launch, LaunchSite
from sidelane.execute.base import Addresses, Place, Repetition
from sidelane.execute.cuda.bind import FAR, followers
from sidelane.execute.cuda.loaded import find_place
from sidelane.execute.cuda.native import Bound, steps_of
from sidelane.execute.cuda.site import CudaSite, ExecutableGraph
from sidelane.execute.cuda.tables import DeviceTable
from sidelane.execute.submitted import Counts, Entry, Submitted
from sidelane.kernels import (
    broadcast_cells,
    broadcast_parcels,
    broadcast_push,
    broadcast_relay,
    exchange_cells,
    exchange_parcels,
    list_broadcast_parcels,
    list_broadcast_push,
    list_direct,
    list_parcels,
    list_pull,
    list_push,
    parcels,
    pull,
    push,
    reduce_cells,
    reduce_direct,
    reduce_parcels,
    reduce_pull,
    reduce_push,
    relay,
)
from sidelane.kernels.list_table import ListPiece, ListTable
from sidelane.native import Effect
from sidelane.program.collective import Buffer, Collective, Span
from sidelane.program.kernel import KernelProgram, Protocol
from sidelane.program.kernel_list import AnyKernelProgram, KernelListProgram


def arrange_list(
    program: KernelListProgram, executor: CudaSite, addresses: Addresses, *, frozen: bool
) -> tuple[Launch, DeviceTable] | None:
    """Make the launch of this rank and the table that it reads; None if there are no bytes to move.

    Args:
        program: the program.
        executor: executor of this rank; its lock is held and its device current.
        addresses: addresses of the buffers.
        frozen: it is for a graph under capture.

    Raises:
        ValueError: an address is missing.
        DriverError: the device has no memory for the table.
    """
    if not program.part_bytes:
        return None
    site = LaunchSite(executor.rank, addresses.arenas, executor.board, program.blocks)
    table = ListTable.of(find_pieces(program, site, addresses), tile_bytes(program))
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
    """Return the size of the tiles of a table in bytes."""
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


def find_pieces(program: KernelListProgram, site: LaunchSite, addresses: Addresses) -> list[ListPiece]:
    """Return the parts that have bytes, with their addresses on the rank of ``site``. Raises ValueError without one."""
    batch, rank, everyone = program.collective, site.rank, range(program.world_size)

    def address(part: int, span: Span) -> int:
        there = batch.placed(part, span)
        found = addresses.find(there.rank, there.buffer, there.offset)
        if found is None:
            raise ValueError(f"load: no address of buffer {span.buffer} of part {part} on rank {span.rank} ({batch})")
        return found

    def groups(number: int, part: Collective, nbytes: int) -> tuple[tuple[int, ...], ...]:
        """Return the addresses of the peers' tensors that the kernel uses, in groups."""
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
        ListPiece(
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


_MOST_CALLERS = 64  # streams for which launches are remembered


class CudaKernel:
    """A collective of one kernel, bound to addresses (see :class:`sidelane.execute.base.LoadedProgram`).

    Args:
        executor: executor of this rank; its lock is held and its device current.
        program: the program.
        addresses: addresses of its buffers.
        frozen: it is for a graph under capture.
    """

    def __init__(self, executor: CudaSite, program: AnyKernelProgram, addresses: Addresses, *, frozen: bool) -> None:
        self.program = program
        self.addresses = addresses
        self._executor = executor
        self._frozen = frozen
        self._launch: Launch | None = None
        self._table: DeviceTable | None = None
        if isinstance(program, KernelListProgram):
            arranged = arrange_list(program, executor, addresses, frozen=frozen)
            if arranged is not None:
                self._launch, self._table = arranged
        else:
            self._launch = arranger(program, executor)(addresses)
        self._by_stream: dict[int, tuple[Bound, ...]] = {}
        self._graph: ExecutableGraph | None = None
        self._places: Places | None = None
        if self._launch is not None:
            self._bind(executor.internal)  # compiles and loads it; inside a capture it would be too late
        self._entry = self._enter(Counts() if self._launch is None else Counts(kernels=1, calls=1))

    @property
    def moves(self) -> bool:
        """True if :meth:`at` may work: only arguments of the kernel depend on the addresses."""
        return isinstance(self.program, KernelProgram) and self._launch is not None and not self._frozen

    def at(self, addresses: Addresses) -> CudaKernel | None:
        """Return the same kernel at other addresses of its buffers, without calls to the driver.

        None if more of the launch than arguments changes with the addresses.
        """
        if self._places is None:
            self._places = Places(arranger(self.program, self._executor), self.addresses)
        launch = self._places.move(addresses)
        if launch is None:
            return None
        moved = CudaKernel.__new__(CudaKernel)
        moved.program, moved.addresses, moved._executor, moved._frozen = self.program, addresses, self._executor, False
        moved._launch, moved._table, moved._by_stream, moved._graph, moved._places = launch, None, {}, None, None
        moved._entry = self._entry
        return moved

    def start(self, epoch: int, stream: torch.Stream | None) -> KernelPending:
        """Launch the kernel (see :class:`sidelane.execute.base.LoadedProgram`). Returns at once.

        Raises:
            ValueError: no stream.
            PeerError, PeerTimeoutError: an earlier invocation failed; nothing was submitted.
            DriverError: the driver refused the launch. The executor is unusable from now on.
        """
        place = find_place(self._executor, epoch, stream)
        self.run(epoch, place)
        return KernelPending(self._executor, None if self._frozen else place[0])

    def run(self, epoch: int, place: Place) -> None:
        """Launch the kernel (see :class:`sidelane.execute.base.Runnable`). Raises as :meth:`start`."""
        executor = self._executor
        if executor.watch.failure is not None or executor.closed:
            executor.check_usable("start")
        with executor.lock:
            if executor.driver.is_current():
                self._submit(epoch, place[0])
            else:
                with executor.driver.current():
                    self._submit(epoch, place[0])

    def repetition(self, place: Place) -> Repetition | None:
        """See :class:`sidelane.execute.base.Runnable`."""
        if self._frozen or self._launch is None:
            return None
        handle, executor = place[0], self._executor
        calls, entry = self._bind(handle), self._entry
        with executor.lock, executor.driver.current():
            # Nodes of a graph have the priority of the captured stream, not of the stream on which it is launched.
            normal = executor.driver.has_normal_priority(handle)
            if normal and self._graph is None:
                self._graph = executor.launch_graph(self._bind(executor.internal))
        if normal and self._graph is not None:
            calls, entry = (self._graph.bind(handle),), self._enter(Counts(kernels=1, graph_launches=1, calls=1))
        notes = (
            (Effect.SET, executor, "kernel_stream", handle),
            *executor.watch.launch_notes(self.program),
            *executor.ledger.notes(entry),
        )
        return Repetition(steps_of(calls), (), notes, executor.failing(calls, self.program))

    def movable(self, place: Place, buffers: Sequence[tuple[int, str]]) -> Repetition | None:
        """See :class:`sidelane.execute.base.Runnable`. It uses a plain launch: a graph has fixed arguments."""
        if not self.moves:
            return None

        def bind(addresses: Addresses) -> tuple[Bound, ...] | None:
            moved = self.at(addresses)
            return None if moved is None else moved._bind(place[0])

        executor, found = self._executor, followers(bind, self.addresses, buffers)
        if found is None:
            return None
        calls, following = found
        notes = (
            (Effect.SET, executor, "kernel_stream", place[0]),
            *executor.watch.launch_notes(self.program),
            *executor.ledger.notes(self._entry),
        )
        return Repetition(steps_of(calls), (), notes, executor.failing(calls, self.program), followers=following)

    def _submit(self, epoch: int, handle: int) -> None:
        executor = self._executor
        if self._launch is not None:
            calls = self._by_stream.get(handle)
            if calls is None:
                calls = self._bind(handle)
            try:
                executor.driver.submit(calls)
            except BaseException as error:
                executor.watch.fail_submission(f"{self.program.collective} {self.program.variant}", error)
                raise
        if not self._frozen:
            executor.kernel_stream = handle
        executor.watch.launched(epoch, self.program, captured=self._frozen)
        executor.ledger.count(self._entry)

    def _enter(self, counts: Counts) -> Entry:
        program = self.program
        submitted = Submitted(str(program.collective), "sm", program.variant, self._frozen, counts)
        return self._executor.ledger.entry(submitted)

    def _bind(self, handle: int) -> tuple[Bound, ...]:
        assert self._launch is not None
        if len(self._by_stream) >= _MOST_CALLERS:
            self._by_stream.clear()
        launch, driver = self._launch, self._executor.driver
        bound = driver.bind_kernel(
            launch.kernel, launch.constants, launch.arguments, blocks=launch.blocks, warps=launch.warps, stream=handle
        )
        calls = self._by_stream[handle] = (bound,)
        return calls


def arranger(program: AnyKernelProgram, site: CudaSite) -> Callable[[Addresses], Launch | None]:
    """Return the function that makes the launch of a program for any addresses."""
    assert isinstance(program, KernelProgram)

    def at(addresses: Addresses) -> Launch | None:
        return arrange(program, site.rank, addresses, site.board, site.features.shared_bytes)

    return at


class Places:
    """The arguments of a launch that follow the address of each buffer, found once by moving one buffer at a time.

    Args:
        arrange: makes the launch for addresses.
        addresses: addresses of the first launch.
    """

    def __init__(self, arrange: Callable[[Addresses], Launch | None], addresses: Addresses) -> None:
        self._arrange, self._addresses = arrange, addresses
        self._launch = arrange(addresses)
        self._followers: dict[tuple[int, str], tuple[int, ...] | None] = {}

    def move(self, addresses: Addresses) -> Launch | None:
        """Return the launch at other addresses, moved by multiples of ``UNIT``; None if it must be made anew."""
        launch, before = self._launch, self._addresses.buffers
        if launch is None:
            return None
        arguments = list(launch.arguments)
        for key, address in addresses.buffers.items():
            by = address - before[key]
            if not by:
                continue
            if key not in self._followers:
                self._followers[key] = self._find(key)
            followers = self._followers[key]
            if followers is None:
                return None
            for index in followers:
                arguments[index] += by
        return Launch(launch.kernel, launch.blocks, launch.warps, tuple(arguments), launch.constants)

    def _find(self, key: tuple[int, str]) -> tuple[int, ...] | None:
        """Return the indices of the arguments that follow a buffer; None if more depends on its address."""
        launch, addresses = self._launch, self._addresses
        assert launch is not None
        buffers = {**addresses.buffers, key: addresses.buffers[key] + FAR}
        there = self._arrange(dataclasses.replace(addresses, buffers=buffers))
        if there is None or (there.kernel, there.blocks, there.warps, there.constants) != (
            *(launch.kernel, launch.blocks, launch.warps),
            launch.constants,
        ):
            return None
        distances = [after - before for before, after in zip(launch.arguments, there.arguments, strict=True)]
        return tuple(i for i, by in enumerate(distances) if by) if {*distances} <= {0, FAR} else None


class KernelPending:
    """One launch (see :class:`sidelane.execute.base.Pending`); done when its stream is idle, or if it was captured."""

    __slots__ = ("_executor", "_handle")

    def __init__(self, executor: CudaSite, handle: int | None) -> None:
        self._executor, self._handle = executor, handle

    def done(self) -> bool:
        return self._handle is None or self._executor.driver.is_idle(self._handle)

    def wait(self) -> None:
        while not self.done():
            self._executor.check()
            time.sleep(1e-4)
        self._executor.check()


def arrange(program: KernelProgram, rank: int, addresses: Addresses, board: int, shared_bytes: int) -> Launch | None:
    """Make the launch of one rank; None if there are no bytes to move. ``shared_bytes``: see ``LaunchSite``.

    Raises:
        ValueError: an address is missing.
    """
    collective, part, distinct = program.collective, program.part_bytes, program.distinct
    if not program.total_bytes:
        return None
    site = LaunchSite(rank, addresses.arenas, board, program.blocks, shared_bytes)
    buffers = addresses.buffers

    def address(buffer: str, of_rank: int) -> int:
        found = buffers.get((of_rank, buffer))
        if found is None:
            raise ValueError(f"load: no address of buffer {buffer} of rank {of_rank} ({collective}, {program.variant})")
        return found

    def everyone(buffer: str) -> tuple[int, ...]:
        return tuple(address(buffer, peer) for peer in range(program.world_size))

    source = collective.input_span(rank, 0, 0)
    target = collective.output_span(rank, 0, 0)
    input, output = (address(span.buffer, rank) + span.offset for span in (source, target))
    if collective.root is not None:
        return _arrange_broadcast(site, program, output, everyone)
    match program.protocol:
        case Protocol.CELLS if collective.reduction:
            return reduce_cells.arrange(site, output, input, part, collective.reduction, distinct=distinct)
        case Protocol.CELLS:
            return exchange_cells.arrange(site, output, input, part, distinct=distinct)
        case Protocol.PARCELS if collective.reduction:
            return reduce_parcels.arrange(site, output, input, part, collective.reduction, distinct=distinct)
        case Protocol.PARCELS:
            return exchange_parcels.arrange(site, output, input, part, distinct=distinct)
        case Protocol.PUSH:
            return push.arrange(site, everyone(target.buffer), input, part, distinct=distinct)
        case Protocol.PULL:
            return pull.arrange(site, output, input, everyone(Buffer.STAGING), part, distinct=distinct)
        case Protocol.REDUCE:
            assert collective.reduction is not None
            total, gather = program.total_bytes, program.two_shot
            stagings = everyone(Buffer.STAGING)
            return reduce_pull.arrange(site, output, input, stagings, part, total, collective.reduction, gather=gather)
        case Protocol.SEND:
            assert collective.reduction is not None
            outputs, stagings = everyone(target.buffer), everyone(Buffer.STAGING)
            return reduce_push.arrange(site, outputs, input, stagings, part, program.total_bytes, collective.reduction)
    assert program.protocol is Protocol.DIRECT
    assert collective.reduction is not None
    total, gather = program.total_bytes, program.two_shot
    outputs, inputs = everyone(target.buffer) if gather else (output,), everyone(source.buffer)
    return reduce_direct.arrange(site, outputs, inputs, part, total, collective.reduction, gather=gather)


def _arrange_broadcast(
    site: LaunchSite, program: KernelProgram, data: int, everyone: Callable[[Buffer], tuple[int, ...]]
) -> Launch:
    part, root = program.part_bytes, program.collective.root
    assert root is not None
    if program.protocol is Protocol.CELLS:
        return broadcast_cells.arrange(site, data, part, root)
    if program.protocol is Protocol.PARCELS:
        return broadcast_parcels.arrange(site, data, part, root)
    if program.protocol is Protocol.RELAY:
        return broadcast_relay.arrange(site, data, part, root)
    staged = program.protocol is Protocol.STAGE
    targets = everyone(Buffer.STAGING if staged else Buffer.OUTPUT)
    return broadcast_push.arrange(site, data, targets, part, root, staged=staged)
