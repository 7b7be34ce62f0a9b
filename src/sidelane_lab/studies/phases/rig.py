"""One rank's executor and memory for the study of phases, and its programs ready to be called one by one.

They are those of a lane. Its executor is used directly: what calls of a lane do on top of it is Python that has nothing
to do with a program.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from sidelane import config as settings
from sidelane.cli.launch import Rank
from sidelane.collectives.alternate import FLAGS as TURN_FLAGS
from sidelane.collectives.alternate import SLOTS_BYTES
from sidelane.collectives.staging import Staging
from sidelane.config import BUILTIN
from sidelane.errors import PeerTimeoutError, SidelaneError
from sidelane.execute.base import Addresses
from sidelane.memory.base import SymmetricBlock
from sidelane.program.builders import Alternation
from sidelane.program.collective import Buffer
from sidelane.program.ir import Program
from sidelane.program.transform.stamp import slots_of
from sidelane.session.session import Session
from sidelane_lab.baselines.candidate import captured
from sidelane_lab.studies.phases.split import Sample
from sidelane_lab.studies.phases.turns import Call, InTurn, TurnCounter

FLAGS = 4096
"""Flags in each of two regions: programs with epochs, and frozen ones that reset their flags. Those that take turns
have ``TURN_FLAGS`` more in each."""


class Rig:
    """Executor, memory and flags of one rank. Collective, as are ``reserve`` and ``close``.

    Args:
        rank: of this process.
        timeout_s: longest that a call may take.

    Attributes:
        notify_us: from a stream's end until the host knows, where stamps are not on the host's clock.
        notice: how that was found, for the user.
    """

    def __init__(self, rank: Rank, timeout_s: float) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        config = dataclasses.replace(settings.current(), timeout_s=timeout_s, profile=BUILTIN, map_memory=False)
        self._session = Session(device=rank.device, config=config)
        self._backend = self._session.lane().backend
        # Stamps are no part of what all executors have in common.
        self.executor = cast(Any, self._backend.executor)
        self._flags = self._backend.memory.allocate(2 * (FLAGS + TURN_FLAGS) * 4)
        self._blocks: dict[str, SymmetricBlock] = {}
        # One pair of slots and one count for all that take turns: a call ends here before the next one begins, in
        # graphs as well.
        self._slots = Staging(self._backend, spread=True)
        self._turns = TurnCounter()
        self.notify_us, self.notice = 0.0, ""
        if rank.device.type != "cpu":
            self._measure_notify()

    def _measure_notify(self) -> None:
        from sidelane.execute.cuda.probe import round_trip_us

        try:
            self.notify_us = round_trip_us(self.executor.driver) / 2
            self.notice = f"a stream needs {self.notify_us:.1f} us to tell the host (half of there and back)"
        except SidelaneError as problem:
            self.notice = f"what a stream needs to tell the host counts as schedule: {problem}"

    def reserve(self, plans: Sequence[Program | Alternation]) -> None:
        """Allocate buffers that are large enough for all of them."""
        programs = [plan if isinstance(plan, Program) else plan.turns[0] for plan in plans]
        turning = [isinstance(plan, Alternation) for plan in plans]
        for buffer in Buffer:
            sizes = [
                program.buffer_bytes(rank, buffer)
                for program, takes_turns in zip(programs, turning, strict=True)
                for rank in range(program.world_size)
                if not (takes_turns and buffer == Buffer.STAGING)
            ]
            if any(sizes):
                self._blocks[buffer] = self._backend.memory.allocate(max(sizes))
        if any(turning):
            self._slots.reserve(SLOTS_BYTES, False)

    def tensor(self, buffer: str, nbytes: int) -> torch.Tensor:
        """The first bytes of this rank's buffer."""
        return self._blocks[buffer].tensor[:nbytes]

    def prepare(self, plan: Program | Alternation, launch: str) -> Call | None:
        """Load a program, or those that take turns, and capture each for ``graph``; None if this rank has no part."""
        if isinstance(plan, Alternation):
            programs = plan.turns if plan.opening is None else (plan.opening,)
            calls = [self._call(self.load(program, launch, slots=True), launch) for program in programs]
            return InTurn(self._turns, calls)
        return self._call(self.load(plan, launch), launch) if plan.queues_of(self.rank.rank) else None

    def _call(self, loaded: Any, launch: str) -> Call:
        if self.rank.device.type == "cpu":
            return CpuCall(loaded)
        return GraphCall(self, loaded) if launch == "graph" else EagerCall(self, loaded)

    def load(self, program: Program, launch: str, *, slots: bool = False) -> Any:
        """The program bound to this rig's memory. ``slots``: it is one of those that take turns."""
        frozen = launch == "graph"
        buffers = {
            (rank, buffer): address
            for buffer, block in self._blocks.items()
            for rank, address in enumerate(block.addresses)
        }
        offset = FLAGS * frozen
        if slots:
            buffers.update({(rank, Buffer.STAGING): at for rank, at in enumerate(self._slots.addresses)})
            offset = 2 * FLAGS + TURN_FLAGS * frozen
        assert program.flag_count <= (TURN_FLAGS if slots else FLAGS)
        flags = tuple(base + 4 * offset for base in self._flags.addresses)
        addresses = Addresses(buffers, flags, spread=slots and self._slots.is_spread)
        return self.executor.load(program, addresses, captured=frozen)

    def close(self) -> None:
        """Release everything. Not after a failure."""
        self._session.close()
        self._blocks.clear()


class CpuCall:
    """On a CPU: stamps and host have one clock."""

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded
        self._pending: Any = None

    def arm(self, epoch: int) -> None:
        if self._loaded.program.prelaunched:
            self._loaded.arm(epoch)

    def begin(self, epoch: int) -> None:
        self._pending = self._loaded.start(epoch, None)

    def finish(self) -> None:
        self._pending.wait()

    def sample(self, begin_ns: int, returned_ns: int, known_ns: int) -> Sample:
        host, total = (returned_ns - begin_ns) / 1e3, (known_ns - begin_ns) / 1e3
        stamps = {slot: (at - begin_ns) / 1e3 for slot, at in self._pending.stamps.items()}
        return Sample.stamped(host, total, stamps, known_us=total) if stamps else Sample(host, total)


class EagerCall:
    """On a GPU: stamps are events, and the host asks whether the stream has run empty."""

    def __init__(self, rig: Rig, loaded: Any) -> None:
        self._rig = rig
        self._stream = torch.cuda.current_stream(rig.rank.device)
        self._loaded = loaded
        self._slots = slots_of(loaded.program, rig.rank.rank)

    def arm(self, epoch: int) -> None:
        if self._loaded.program.prelaunched:
            self._loaded.arm(epoch)

    def begin(self, epoch: int) -> None:
        self._loaded.start(epoch, self._stream)

    def finish(self) -> None:
        query, deadline = self._stream.query, time.monotonic() + self._rig.timeout_s
        while not query():
            if time.monotonic() > deadline:
                self._rig.executor.check()
                raise PeerTimeoutError(
                    f"phases: the device of rank {self._rig.rank.rank} did not finish within {self._rig.timeout_s:g} s "
                    f"(expected: idle; running: {self._loaded.program.collective} {self._loaded.program.variant})",
                    ranks=[self._rig.rank.rank],
                )

    def sample(self, begin_ns: int, returned_ns: int, known_ns: int) -> Sample:
        host, total = (returned_ns - begin_ns) / 1e3, (known_ns - begin_ns) / 1e3
        if not self._slots:
            return Sample(host, total)
        notify = min(self._rig.notify_us, total)
        return Sample.stamped(host, total, self._stamps(), known_us=None, notify_us=notify)

    def _stamps(self) -> Mapping[int, float]:
        return {slot: self._loaded.elapsed_us(self._slots[0], slot) for slot in self._slots}


class GraphCall(EagerCall):
    """The same for a program without epochs, captured once and replayed."""

    def __init__(self, rig: Rig, loaded: Any) -> None:
        super().__init__(rig, loaded)
        self._graph = captured(lambda: self._loaded.start(1, self._stream), calls=1)

    def arm(self, epoch: int) -> None:
        pass

    def begin(self, epoch: int) -> None:
        self._graph.replay()
