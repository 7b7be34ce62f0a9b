"""Preparation of calls: staging is allocated, and the program is loaded at the addresses of the call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Protocol

import torch

from sidelane import log
from sidelane.choice.candidate import SM
from sidelane.collectives import call_cache
from sidelane.collectives.agreement import Agreement
from sidelane.collectives.backend import Backend
from sidelane.collectives.plan import CallProgram, Planner, staging_bytes
from sidelane.device.layout import arena_bytes
from sidelane.errors import UnavailableError
from sidelane.execute.base import Addresses, Pieces, Runnable
from sidelane.memory.heap import Region, SymmetricBlock, SymmetricHeap
from sidelane.program.batch import Batch
from sidelane.program.caching import Once
from sidelane.program.collective import Buffer
from sidelane.program.ir import Program
from sidelane.program.kernel import KernelProgram
from sidelane.program.resharding import Resharding
from sidelane.program.wraparound import as_int32
from sidelane.sizes import format_bytes

FLAGS = 4096
"""Number of flags in each of two regions: one for programs with epochs, one for captured programs, which reset their
flags."""

_STEP_BYTES = 1 << 20
"""Bytes of which the size of staging is a multiple. Small staging doubles, so that it seldom has to grow."""

_MOST_SPARE_BYTES = 64 << 20
"""Largest number of bytes that are allocated beyond the need of a call."""

_NO_PIECES: Mapping[tuple[int, str], Pieces] = MappingProxyType({})


class OwnProgram(Protocol):
    """A program that the caller has loaded and that has its own flags."""

    @property
    def is_under_way(self) -> bool:
        """True while triggers of its last call are left, or its caller has not seen the end of that call."""
        ...

    def renew(self, call: int) -> None:
        """Set its flags as if ``call`` had set them."""
        ...

    def close(self) -> None:
        """Fire the triggers that are left, wait for its calls, and release its memory."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class StagingError(UnavailableError):
    """A captured call needs more staging than there is. All ranks raise it, before any buffer is touched."""


class Staging:
    """Symmetric scratch memory: one block, which is replaced by a larger one when a call needs more.

    Args:
        backend: allocates the memory.

    Attributes:
        addresses: addresses of the ranks' blocks in this process; empty before the first call that needs staging.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._is_captured = False
        self._held: list[SymmetricBlock] = []
        self._take(None)

    def _take(self, block: SymmetricBlock | None) -> None:
        self._block = block
        self.addresses: tuple[int, ...] = () if block is None else block.addresses

    @property
    def nbytes(self) -> int:
        """Size on every rank in bytes."""
        return 0 if self._block is None else self._block.tensor.nbytes

    def close(self) -> None:
        """Release the memory, including blocks that captured graphs refer to."""
        self._take(None)
        self._held.clear()

    def reserve(self, nbytes: int, frozen: bool) -> bool:
        """Make sure that a call has enough staging. Collective if it grows.

        Args:
            nbytes: bytes that the call needs on every rank.
            frozen: the call is being captured, and its graph will refer to the block for as long as it lives.

        Returns:
            True if the block was replaced, so that programs that refer to the old one must be loaded again.

        Raises:
            StagingError: staging would have to grow during a capture.
            UnavailableError: there is not enough memory.
        """
        grows = nbytes > (have := self.nbytes)
        if grows and frozen:
            raise StagingError(
                f"this call needs {nbytes} bytes of staging and memory cannot be allocated while a graph is captured "
                f"(have={have}): make the call once before the capture (most need less with tensors from "
                f"Communicator.empty)"
            )
        if grows:
            if self._block is not None and self._is_captured:
                self._held.append(self._block)
            elif self._block is not None:
                # The allocation is collective: when it ends, the calls on the old block have ended on every rank.
                self._backend.synchronize()
            taken = -(-max(nbytes, have + min(have, _MOST_SPARE_BYTES)) // _STEP_BYTES) * _STEP_BYTES
            log.calls.info("staging grows from %s to %s on each rank", format_bytes(have), format_bytes(taken))
            self._take(self._backend.memory.allocate(taken))
        self._is_captured = (self._is_captured and not grows) or (frozen and nbytes > 0)
        return grows


@dataclasses.dataclass(frozen=True, slots=True)
class _SharedMemory:
    """The memory that the programs of one type share.

    Attributes:
        staging: their staging.
        flags: flags of every rank, for eager programs and for captured ones.
        arenas: arena of every rank.
    """

    staging: Staging
    flags: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    arenas: tuple[int, ...] = ()


class Preparer:
    """Loads programs for calls, and owns the memory that they share: flags, staging, and the arena of kernels.

    Attributes:
        planner: makes the programs.
        cache: the calls that were prepared; it is cleared when staging moves.
        own_programs: programs that callers have loaded; their flags are renewed with the others.
    """

    def __init__(self, rank: int, heap: SymmetricHeap, backend: Backend, planner: Planner) -> None:
        self._rank = rank
        self._heap = heap
        self._backend = backend
        self.planner = planner
        self._flags = backend.memory.allocate(2 * FLAGS * 4)
        flags = self._flags.addresses
        self._arena: SymmetricBlock | None = None
        if SM in backend.abilities.implementations:
            self._arena = backend.memory.allocate(arena_bytes(len(flags)))
        at = [tuple(base + 4 * first for base in flags) for first in (0, FLAGS)]
        # Kernels have their own staging: a kernel writes to it as soon as it runs, and ends when all peers have read
        # it. Programs protect their staging by other handshakes.
        self._stagings = engines, kernels = Staging(backend), Staging(backend)
        self._memory: dict[type[CallProgram], _SharedMemory] = {
            Program: _SharedMemory(engines, (at[0], at[1])),
            KernelProgram: _SharedMemory(kernels, arenas=self._arena.addresses if self._arena else ()),
        }
        self._remote: Once[Program, frozenset[str]] = Once(Program.remote_buffers)
        self._held: list[object] = []
        self.cache = call_cache.CallCache()
        self.own_programs: set[OwnProgram] = set()

    def program_of(self, shape: call_cache.Shape) -> call_cache.ShapeProgram | None:
        """Return the program of a shape, if a call of it was prepared and is still agreed on; else None."""
        entry = self.cache.get(shape.key)
        found = None if entry is None else entry.shape
        return found if found is not None and self.planner.known(found.agreement) else None

    def prepare_at(
        self, known: call_cache.ShapeProgram, shape: call_cache.Shape, key: call_cache.Key
    ) -> tuple[call_cache.PreparedCall, bool]:
        """Load the program of a shape at the addresses of a call. Not collective.

        Args:
            known: the program of the shape.
            shape: shape and addresses of the call.
            key: cache key of the call, with its addresses.

        Returns:
            The call, and whether it is repeated; in this case it is cached under ``key``.
        """
        loaded = self._load(known.plan.program, known.at(shape.addresses), False)
        prepared = call_cache.PreparedCall(loaded, known.signature, False, known.plan.choice)
        repeated = self.cache.has_seen(key)
        if repeated:
            self.cache.entry(key).prepared = prepared
        return prepared, repeated

    def prepare(
        self,
        agreement: Agreement,
        requests: call_cache.Requests,
        key: call_cache.Key | None = None,
        shape: call_cache.Shape | None = None,
    ) -> call_cache.PreparedCall:
        """Plan a call, allocate staging, load its program, and cache it under ``key``. Collective for new agreements.

        Args:
            agreement: the agreement of all ranks.
            requests: the requests of this rank.
            key: cache key of the call, with its addresses; None: do not cache it.
            shape: shape of the call, if other calls of the shape may run the same program.
        """
        planner, frozen = self.planner, agreement.frozen
        was_known = planner.known(agreement)
        try:
            plan = planner.plan_that_fits(agreement, self._has_staging) if frozen else planner.plan(agreement)
            for kind, nbytes in plan.staging.items():
                self._grow(self._memory[kind].staging, nbytes, frozen)
            addresses = self._addresses(plan.program, requests, frozen)
            loaded = self._load(plan.program, addresses, frozen)
        except BaseException:
            if not was_known:
                planner.forget(agreement)
            raise
        if frozen:
            # A captured graph refers to the loaded program as long as it lives, and its end cannot be observed.
            self._held.append(loaded)
        prepared = call_cache.PreparedCall(loaded, agreement.text, frozen, plan.choice)
        if not was_known:
            choice = plan.choice
            log.calls.info("rank %d: %s: %s: %s", self._rank, agreement.collective, choice.candidate, choice.reason)
        if key is not None:
            self.cache.entry(key).prepared = prepared
        if shape is not None and not agreement.is_listed:
            indices = call_cache.tensor_indices(requests[0], self._rank, shape.addresses)
            if indices is not None:
                made = call_cache.ShapeProgram(plan, addresses, indices, agreement)
                self.cache.entry(shape.key).shape = made
        return prepared

    def _load(self, program: CallProgram, addresses: Addresses, frozen: bool) -> Runnable:
        """Load a program at addresses."""
        if isinstance(program, KernelProgram):
            return self._backend.load_kernel(program, addresses, frozen)
        return self._backend.executor.load(program, addresses, captured=frozen)

    def _has_staging(self, program: CallProgram) -> bool:
        """Return True if a program can be captured without an allocation."""
        return staging_bytes(program) <= self._memory[type(program)].staging.nbytes

    def _grow(self, staging: Staging, nbytes: int, frozen: bool) -> None:
        if staging.reserve(nbytes, frozen):
            # Captured graphs keep the block that they were loaded with. All other programs must move to the new block
            # now, on all ranks at once: a rank that still wrote to the old block would miss a peer that reads the new.
            self.cache.clear()

    def renew(self, call: int) -> None:
        """Set all flags of this rank that hold call numbers as if ``call`` had set them, while no rank runs a call."""
        words = self._flags.tensor.view(torch.int32)
        words[:FLAGS] = as_int32(call)
        for program in self.own_programs:
            program.renew(call)
        self._backend.renew(call)

    @property
    def own_bytes(self) -> int:
        """Symmetric memory that flags, arena and staging take, in bytes."""
        blocks = sum(block.tensor.nbytes for block in (self._flags, self._arena) if block is not None)
        return blocks + sum(staging.nbytes for staging in self._stagings)

    def close(self) -> None:
        """Forget every loaded program, and release the memory."""
        self.cache.clear()
        self.cache.keepers.clear()
        self._held.clear()
        for program in list(self.own_programs):
            program.close()
        for staging in self._stagings:
            staging.close()
        self._arena = None
        self._backend.forget_flags((self._flags.addresses[self._rank],), self._flags)
        del self._flags

    def _addresses(self, program: CallProgram, requests: call_cache.Requests, frozen: bool) -> Addresses:
        """Return the addresses of all buffers and flags of a program."""
        memory = self._memory[type(program)]
        buffers: dict[tuple[int, str], int] = {
            (rank, Buffer.STAGING): base for rank, base in enumerate(memory.staging.addresses)
        }
        pieces = _NO_PIECES
        if isinstance(program, Program):
            assert program.flag_count <= FLAGS
        if isinstance(program.collective, Batch):
            pieces = self._pieces(program.collective, requests)
        else:
            (request,) = requests
            remote = self._remote(program) if isinstance(program, Program) else program.remote_buffers()
            for buffer in (Buffer.INPUT, Buffer.OUTPUT):
                reached = self.reach(request.region(buffer), buffer in remote)
                buffers.update({(rank, buffer): address for rank, address in reached.items()})
        flags = memory.flags[frozen]
        return Addresses(buffers, flags, memory.arenas, pieces=pieces)

    def _pieces(self, batch: Batch, requests: call_cache.Requests) -> dict[tuple[int, str], Pieces]:
        rows: list[dict[tuple[int, str], int]] = []
        for part in requests:
            row: dict[tuple[int, str], int] = {}
            for buffer in (Buffer.INPUT, Buffer.OUTPUT):
                region = part.region(buffer)
                reached = self.reach(region, region.symmetric)
                row.update({(rank, buffer): address for rank, address in reached.items()})
            rows.append(row)
        return pieces_of(batch, rows, [part.resharding for part in requests])

    def reach(self, region: Region, remote: bool) -> dict[int, int]:
        """Return the addresses of a region by rank: of all ranks if ``remote``, else of this one only."""
        return dict(enumerate(self._heap.addresses(region))) if remote else {self._rank: region.address}


def pieces_of(
    batch: Batch,
    addresses: Sequence[Mapping[tuple[int, str], int]],
    reshardings: Sequence[Resharding | None],
) -> dict[tuple[int, str], Pieces]:
    """Return the virtual buffers of a batch, by rank and buffer.

    Args:
        batch: the batch.
        addresses: for each part, the addresses by rank and buffer, as far as this process reaches them.
        reshardings: for each part, its layout; None: its tensors are contiguous.
    """
    found: dict[tuple[int, str], Pieces] = {}
    has_rows = any(reshardings)
    for buffer in (Buffer.INPUT, Buffer.OUTPUT):
        for rank in range(batch.world_size):
            made: list[tuple[int, int, int, tuple[int, int]]] = []
            starts = batch.starts(rank, buffer)
            for number, (row, resharding) in enumerate(zip(addresses, reshardings, strict=True)):
                address = row.get((rank, buffer))
                if address is not None:
                    nbytes = batch.parts[number].buffer_bytes(rank, buffer)
                    made += _in_rows(starts[number], address, nbytes, resharding, rank, buffer)
            starts, sizes, places, rows = zip(*made, strict=True) if made else ((), (), (), ())
            found[rank, buffer] = Pieces(starts, sizes, places, rows if has_rows else ())
    return found


def _in_rows(
    start: int, address: int, nbytes: int, resharding: Resharding | None, rank: int, buffer: Buffer
) -> Iterator[tuple[int, int, int, tuple[int, int]]]:
    """Yield start, size, address and rows of each piece of one tensor."""
    if resharding is None:
        if nbytes:
            yield start, nbytes, address, (nbytes, nbytes)
        return
    for part in resharding.parts_at(rank, buffer):
        rows = (part.nbytes, part.nbytes) if part.width in (part.pitch, part.nbytes) else (part.width, part.pitch)
        yield start + part.start, part.nbytes, address + part.origin, rows
