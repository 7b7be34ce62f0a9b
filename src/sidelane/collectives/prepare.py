"""Preparation of calls: staging is allocated, and the program is loaded at the addresses of the call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import torch

from sidelane import log
from sidelane.choice import Choice
from sidelane.choice.candidate import SM
from sidelane.collectives.agreement import Agreement
from sidelane.collectives.alternate import FLAGS as TURN_FLAGS
from sidelane.collectives.alternate import SLOTS_BYTES, AlternatingProgram, CallTurns
from sidelane.collectives.arguments import Request
from sidelane.collectives.backend import Backend
from sidelane.collectives.call_cache import (
    CallCache,
    Key,
    PreparedCall,
    Requests,
    Shape,
    ShapeProgram,
    places_of,
)
from sidelane.collectives.heap import Region, SymmetricHeap
from sidelane.collectives.pieces import NO_PIECES, pieces_of
from sidelane.collectives.plan import AUTO, MOST_PROGRAMS, Plan, Planner
from sidelane.collectives.staging import Staging
from sidelane.device.layout import arena_bytes
from sidelane.execute.base import Addresses, Pieces, Runnable
from sidelane.memory.base import SymmetricBlock
from sidelane.program.batch import Batch
from sidelane.program.builders import Alternation
from sidelane.program.caching import Once
from sidelane.program.collective import Buffer
from sidelane.program.ir import Program
from sidelane.program.kernel import KernelProgram
from sidelane.program.wraparound import as_int32

FLAGS = 4096
"""Number of flags in each of two regions: one for programs with epochs, one for captured programs, which reset their
flags. Two further regions of ``TURN_FLAGS`` each follow, for alternating programs."""

REGIONS = 2


class OwnProgram(Protocol):
    """A program that the caller has loaded and that has its own flags."""

    def renew(self, call: int) -> None:
        """Set its flags as if ``call`` had set them."""
        ...

    def close(self) -> None:
        """Release its memory, while no call is under way."""
        ...


class Preparer:
    """Loads programs for calls, and owns the memory that they share: flags, staging, and the arena of kernels.

    Attributes:
        cache: the calls that were prepared; it is cleared when staging moves.
        own_programs: programs that callers have loaded; their flags are renewed with the others.
    """

    def __init__(self, rank: int, heap: SymmetricHeap, backend: Backend, planner: Planner) -> None:
        self._rank = rank
        self._heap = heap
        self._backend = backend
        self._planner = planner
        self._flags = backend.memory.allocate(REGIONS * (FLAGS + TURN_FLAGS) * 4)
        self._staging = Staging(backend)
        # Kernels have their own staging: a kernel writes to it as soon as it runs, and ends when all peers have read
        # it. Programs protect their staging by other handshakes.
        self._kernel_staging = Staging(backend)
        self._arena: SymmetricBlock | None = None
        if SM in backend.abilities.implementations:
            self._arena = backend.memory.allocate(arena_bytes(len(self._flags.addresses)))
        # Alternating programs have their own, twice: replays of a graph do not follow the turns of eager calls.
        self._slots = Staging(backend, spread=True)
        self._turns = CallTurns(backend.capture_of)
        if backend.abilities.captures and len(self._flags.addresses) > 1:
            self._slots.reserve(2 * SLOTS_BYTES, False)  # now, since a capture cannot allocate
        self._remote: Once[Program, frozenset[str]] = Once(Program.remote_buffers)
        self._captures_have_room: set[Agreement] = set()
        self._kept: list[object] = []
        self.cache = CallCache()
        self.own_programs: set[OwnProgram] = set()

    def known(self, agreement: Agreement) -> bool:
        """Return True if no rank needs another agreement or allocation for this call."""
        return self._planner.known(agreement)

    def program_of(self, shape: Shape) -> ShapeProgram | None:
        """Return the program of a shape, if a call of it was prepared and is still agreed on; else None."""
        entry = self.cache.get(shape.key)
        found = None if entry is None else entry.shape
        return found if found is not None and self._planner.known(found.agreement) else None

    @property
    def turn(self) -> int:
        """Turn number of the next eager call of an alternating program."""
        return self._turns.next_eager

    def prepare_at(
        self, known: ShapeProgram, shape: Shape, key: Key, *, comes_again: bool
    ) -> tuple[PreparedCall, bool]:
        """Load the program of a shape at the addresses of a call. Not collective.

        Args:
            known: the program of the shape.
            shape: shape and addresses of the call.
            key: cache key of the call, with its addresses.
            comes_again: the call was made before, by compiled code.

        Returns:
            The call, and whether it comes again; in this case it is cached under ``key``.
        """
        loaded = self._load_at(known.program, known.at(shape.addresses), False, again=True)
        prepared = PreparedCall(loaded, known.signature, False, known.choice)
        again = comes_again or self.cache.comes_again(key)
        if again:
            self.cache.entry(key).prepared = prepared
        return prepared, again

    def prepare(
        self,
        agreement: Agreement,
        requests: Requests,
        key: Key | None = None,
        shape: Shape | None = None,
    ) -> PreparedCall:
        """Plan a call, allocate staging, load its program, and cache it under ``key``. Collective for new agreements.

        Args:
            agreement: the agreement of all ranks.
            requests: the requests of this rank.
            key: cache key of the call, with its addresses; None: do not cache it.
            shape: shape of the call, if other calls of the shape may run the same program.
        """
        was_known = self._planner.known(agreement)
        try:
            program, choice = self._plan(agreement)
            self._reserve(program, agreement.frozen)
            addresses = self._addresses(program, requests, agreement.frozen)
            loaded = self._load_at(program, addresses, agreement.frozen)
        except BaseException:
            if not was_known:
                self._planner.forget(agreement)
            raise
        if agreement.frozen:
            # A captured graph refers to the loaded program as long as it lives, and its end cannot be observed.
            self._kept.append(loaded)
        prepared = PreparedCall(loaded, agreement.text(), agreement.frozen, choice)
        if not was_known:
            log.calls.info("rank %d: %s: %s: %s", self._rank, agreement.collective, choice.candidate, choice.reason)
        if key is not None:
            self.cache.entry(key).prepared = prepared
        if shape is not None and not agreement.is_listed:
            places = places_of(requests[0], self._rank, shape.addresses)
            if places is not None:
                made = ShapeProgram(program, addresses, places, agreement, prepared.signature, choice)
                self.cache.entry(shape.key).shape = made
        return prepared

    def make_room(self, program: Program) -> None:
        """Allocate the staging of a program. Collective if there is too little."""
        self._reserve(program, False)

    def bind(
        self,
        program: Program,
        buffers: Mapping[tuple[int, str], int],
        signature: str,
        choice: Choice,
        key: Key,
        *,
        pieces: Mapping[tuple[int, str], Pieces] = NO_PIECES,
    ) -> PreparedCall:
        """Load a program with epochs at given addresses, after :meth:`make_room`. Not collective."""
        addresses = Addresses({**buffers, **_on_all_ranks(self._staging)}, self._flags.addresses, pieces=pieces)
        prepared = PreparedCall(self._backend.executor.load(program, addresses), signature, False, choice)
        self.cache.entry(key).prepared = prepared
        return prepared

    def _plan(self, agreement: Agreement) -> tuple[Plan, Choice]:
        """Return the program of a call, and its choice."""
        if agreement.frozen:
            return self._planner.program_that_fits(agreement, self._has_staging)
        program, choice = self._planner.program(agreement), self._planner.choice(agreement)
        repeats = agreement.variant == AUTO and agreement.call.even  # uneven calls seldom do: no use in planning twice
        if repeats and self._backend.abilities.captures:
            self._reserve_for_captures(agreement)
        return program, choice

    def _load_at(self, program: Plan, addresses: Addresses, frozen: bool, *, again: bool = False) -> Runnable:
        """Load a program at addresses. ``again``: calls may use these addresses only once."""
        executor = self._backend.executor
        if isinstance(program, KernelProgram):
            return self._backend.load_kernel(program, addresses, frozen)
        if isinstance(program, Alternation):

            def load(turn: Program) -> Runnable:
                return executor.load(turn, addresses, captured=frozen)

            return AlternatingProgram(program, load, self._turns, captured=frozen, late=again)
        return executor.load(program, addresses, captured=frozen)

    def _needs(self, program: Plan, frozen: bool) -> tuple[Staging, int]:
        """Return the staging that a program uses, and how many bytes of it."""
        if isinstance(program, KernelProgram):
            return self._kernel_staging, program.staging_bytes
        if isinstance(program, Alternation):
            has_peers = program.turns[0].world_size > 1
            return self._slots, has_peers * SLOTS_BYTES * (2 if frozen else 1)
        return self._staging, max(program.staging_bytes)

    def _has_staging(self, program: Plan) -> bool:
        """Return True if a program can be captured without an allocation."""
        staging, nbytes = self._needs(program, True)
        return nbytes <= staging.nbytes

    def _reserve(self, program: Plan, frozen: bool) -> None:
        """Allocate the staging of a program. Collective if there is too little."""
        self._grow(*self._needs(program, frozen), frozen)

    def _grow(self, staging: Staging, nbytes: int, frozen: bool) -> None:
        if staging.reserve(nbytes, frozen):
            # Captured graphs keep the block that they were loaded with. All other programs must move to the new block
            # now, on all ranks at once: a rank that still wrote to the old block would miss a peer that reads the new.
            self.cache.clear()

    def _reserve_for_captures(self, agreement: Agreement) -> None:
        """Allocate the staging that the same call needs in a capture, where ``auto`` may choose another candidate.

        A capture cannot allocate. Once per agreement is enough, on all ranks alike: staging never shrinks.
        """
        if agreement in self._captures_have_room:
            return
        program = self._planner.unproved(dataclasses.replace(agreement, frozen=True))
        self._grow(*self._needs(program, True), False)
        if len(self._captures_have_room) >= MOST_PROGRAMS:
            self._captures_have_room.clear()
        self._captures_have_room.add(agreement)

    def held(self, agreement: Agreement) -> tuple[Program, Choice]:
        """Return the program of a call behind one trigger on each rank, which the caller loads, and its choice.

        Raises:
            ValueError: the variant cannot run with these buffers.
        """
        return self._planner.held(agreement), self._planner.choice(agreement)

    def addresses(self, program: Program, request: Request) -> Addresses:
        """Return the current addresses of such a program: its staging may move between calls. Collective at first."""
        self._reserve(program, False)
        return self._addresses(program, (request,), False)

    def renew(self, call: int) -> None:
        """Set all flags of this rank that hold call numbers as if ``call`` had set them, while no rank runs a call."""
        words = self._flags.tensor.view(torch.int32)
        value = as_int32(call)
        words[:FLAGS] = value
        words[REGIONS * FLAGS : REGIONS * FLAGS + TURN_FLAGS] = value
        for program in self.own_programs:
            program.renew(call)
        self._backend.renew(call)

    @property
    def own_bytes(self) -> int:
        """Symmetric memory that flags, arena and staging take, in bytes."""
        blocks = sum(block.tensor.nbytes for block in (self._flags, self._arena) if block is not None)
        return blocks + sum(staging.nbytes for staging in (self._staging, self._kernel_staging, self._slots))

    def close(self) -> None:
        """Forget every loaded program, and release the memory."""
        self.cache.clear()
        self.cache.keepers.clear()
        self._kept.clear()
        for program in list(self.own_programs):
            program.close()
        for staging in (self._staging, self._kernel_staging, self._slots):
            staging.close()
        self._arena = None
        self._backend.forget_flags((self._flags.addresses[self._rank],), self._flags)
        del self._flags

    def _addresses(self, plan: Plan, requests: Requests, frozen: bool) -> Addresses:
        """Return the addresses of all buffers and flags of a program."""
        staging, _ = self._needs(plan, frozen)
        program: Program | KernelProgram
        flags, shift = self._flags.addresses, 0
        arenas: tuple[int, ...] = ()
        if isinstance(plan, KernelProgram):
            assert self._arena is not None, "backends that have kernels have an arena for them"
            program, flags, arenas = plan, (), self._arena.addresses
        elif isinstance(plan, Alternation):
            program, shift = plan.turns[0], SLOTS_BYTES * frozen
            flags = tuple(base + 4 * (REGIONS * FLAGS + frozen * TURN_FLAGS) for base in flags)
        else:
            assert plan.flag_count <= FLAGS
            program, flags = plan, tuple(base + 4 * FLAGS * frozen for base in flags)
        buffers, pieces = _on_all_ranks(staging, shift), NO_PIECES
        if isinstance(program.collective, Batch):
            pieces = self._pieces(program.collective, requests)
        else:
            (request,) = requests
            remote = self._remote(program) if isinstance(program, Program) else program.remote_buffers()
            for buffer in (Buffer.INPUT, Buffer.OUTPUT):
                reached = self.reach(request.region(buffer), buffer in remote)
                buffers.update({(rank, buffer): address for rank, address in reached.items()})
        return Addresses(buffers, flags, arenas, pieces=pieces, spread=staging.is_spread)

    def _pieces(self, batch: Batch, requests: Requests) -> dict[tuple[int, str], Pieces]:
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


def _on_all_ranks(staging: Staging, offset: int = 0) -> dict[tuple[int, str], int]:
    return {(rank, Buffer.STAGING): base + offset for rank, base in enumerate(staging.addresses)}
