"""From an agreed program to one that is loaded at the addresses of a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from sidelane.collectives.arguments import Request
from sidelane.collectives.backend import Backend
from sidelane.collectives.heap import Region, SymmetricHeap
from sidelane.collectives.plan import Agreement, Planner
from sidelane.errors import UnavailableError
from sidelane.execute.base import Addresses, LoadedProgram
from sidelane.memory.base import SymmetricBlock
from sidelane.program.collective import Buffer
from sidelane.program.ir import Program

FLAGS = 4096
"""Flags in each of the two regions: programs with epochs, and frozen programs that reset their flags."""

MOST_RECENT = 4096
"""Calls remembered by the addresses of their tensors; the oldest goes first. Programs are kept for good."""

STAGING_STEP_BYTES = 1 << 20
"""Staging grows to multiples of this, doubling while it is small, so that growing is rare."""

MOST_SPARE_BYTES = 64 << 20
"""More than this is never added beyond what a call needs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A call ready to run.

    Attributes:
        loaded: its program.
        signature: what it shows to the other ranks.
        frozen: it is for a graph under capture.
    """

    loaded: LoadedProgram
    signature: str
    frozen: bool


class Preparer:
    """Owns what all programs of a communicator share: flag memory and staging."""

    def __init__(self, rank: int, heap: SymmetricHeap, backend: Backend, planner: Planner) -> None:
        self._rank = rank
        self._heap = heap
        self._backend = backend
        self._planner = planner
        self._flags = backend.memory.allocate(2 * FLAGS * 4)
        self._staging: SymmetricBlock | None = None
        self._kept: list[object] = []
        self._recent: dict[Hashable, Prepared] = {}

    def recall(self, key: Hashable) -> Prepared | None:
        """What an earlier call with the same key prepared, if it still holds."""
        return self._recent.get(key)

    def known(self, agreement: Agreement) -> bool:
        """True if no rank has anything left to agree on or to allocate for this call."""
        return self._planner.known(agreement)

    def prepare(self, agreement: Agreement, request: Request, key: Hashable = None) -> Prepared:
        """Plan, allocate staging and load; remembered under ``key``. Collective where the agreement is new."""
        program = self._planner.program(agreement)
        self._reserve_staging(max(program.staging_bytes), agreement.frozen)
        loaded = self._backend.executor.load(program, self._addresses(program, request, agreement.frozen))
        if agreement.frozen:
            # A captured graph refers to what was loaded for as long as it lives, which nobody tells us.
            self._kept.append(loaded)
        prepared = Prepared(loaded, agreement.text(), agreement.frozen)
        if key is not None:
            if len(self._recent) >= MOST_RECENT:
                del self._recent[next(iter(self._recent))]
            self._recent[key] = prepared
        return prepared

    def close(self) -> None:
        """Forget every loaded program."""
        self._recent.clear()
        self._kept.clear()

    def _reserve_staging(self, nbytes: int, frozen: bool) -> None:
        have = 0 if self._staging is None else self._staging.tensor.nbytes
        if nbytes <= have:
            return
        if frozen:
            raise UnavailableError(
                f"this call needs {nbytes} bytes of staging and memory cannot be allocated while a graph is captured "
                f"(have={have}): make the call once before the capture, or use tensors from Communicator.empty"
            )
        # Captured graphs keep the block that they were loaded with. Everything else must move to the new one now, on
        # all ranks at once: a rank that still wrote to the old block would miss a peer that reads the new one.
        if self._staging is not None:
            self._kept.append(self._staging)
        self._recent.clear()
        steps = -(-max(nbytes, have + min(have, MOST_SPARE_BYTES)) // STAGING_STEP_BYTES)
        self._staging = self._backend.memory.allocate(steps * STAGING_STEP_BYTES)

    def _addresses(self, program: Program, request: Request, frozen: bool) -> Addresses:
        buffers: dict[tuple[int, Buffer], int] = {}
        remote = program.remote_buffers()
        for buffer, part in ((Buffer.INPUT, request.input), (Buffer.OUTPUT, request.output)):
            region = request.whole if program.collective.in_place else part
            buffers.update(self._reach(buffer, region, buffer in remote))
        if self._staging is not None:
            buffers.update({(rank, Buffer.STAGING): base for rank, base in enumerate(self._staging.addresses)})
        offset = 4 * FLAGS if frozen else 0
        assert program.flag_count <= FLAGS
        return Addresses(buffers, tuple(base + offset for base in self._flags.addresses))

    def _reach(self, buffer: Buffer, region: Region, remote: bool) -> dict[tuple[int, Buffer], int]:
        if not remote:
            return {(self._rank, buffer): region.address}
        return {(rank, buffer): base for rank, base in enumerate(self._heap.addresses(region))}
