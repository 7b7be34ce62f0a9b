"""One rank's executor and memory for the study of phases, and its programs ready to be called one by one.

The executor is used directly: what a communicator does on top of it is Python that has nothing to do with a program.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from sidelane.bench.candidates import captured
from sidelane.bench.launch import Rank
from sidelane.bench.phases_split import Sample
from sidelane.collectives.devices import make_backend
from sidelane.errors import PeerTimeoutError, SidelaneError
from sidelane.execute.base import Addresses
from sidelane.memory.base import SymmetricBlock
from sidelane.memory.control import ControlBlock
from sidelane.program.collective import Buffer
from sidelane.program.ir import Program, has_epochs
from sidelane.program.transform import freeze
from sidelane.program.transform.stamp import slots_of

FLAGS = 4096
"""Flags in each of two regions: programs with epochs, and frozen ones that reset their flags."""


class Call(Protocol):
    """A program that this rank calls again and again. Its methods are called in this order, once a call."""

    def arm(self, epoch: int) -> None:
        """Prepare what may be prepared before the call."""
        ...

    def begin(self, epoch: int) -> None:
        """The call. Returns when the host is done with it."""
        ...

    def finish(self) -> None:
        """Return as soon as the host can know that everything has finished."""
        ...

    def sample(self, begin_ns: int, returned_ns: int, known_ns: int) -> Sample:
        """What was seen, with stamps if the program has any."""
        ...


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
        group = dist.group.WORLD
        assert group is not None
        self.rank, self.timeout_s = rank, timeout_s
        self._control = ControlBlock(group)
        self._backend = make_backend(group, rank.rank, rank.device, self._control, timeout_s)
        # Stamps are no part of what all executors have in common.
        self.executor = cast(Any, self._backend.executor)
        self._flags = self._backend.memory.allocate(2 * FLAGS * 4)
        self._blocks: dict[Buffer, SymmetricBlock] = {}
        self.notify_us, self.notice = 0.0, ""
        if rank.device.type != "cpu":
            self._measure_notify()

    def _measure_notify(self) -> None:
        from sidelane.execute.cuda.round_trip import round_trip_us

        try:
            self.notify_us = round_trip_us(self.executor.driver) / 2
            self.notice = f"a stream needs {self.notify_us:.1f} us to tell the host (half of there and back)"
        except SidelaneError as problem:
            self.notice = f"what a stream needs to tell the host counts as schedule: {problem}"

    def reserve(self, programs: Sequence[Program]) -> None:
        """Allocate buffers that are large enough for all of them."""
        for buffer in Buffer:
            nbytes = max(p.buffer_bytes(rank, buffer) for p in programs for rank in range(p.world_size))
            if nbytes:
                self._blocks[buffer] = self._backend.memory.allocate(nbytes)

    def tensor(self, buffer: Buffer, nbytes: int) -> torch.Tensor:
        """The first bytes of this rank's buffer."""
        return self._blocks[buffer].tensor[:nbytes]

    def prepare(self, program: Program, launch: str) -> Call | None:
        """Load a program, and capture it for ``graph``; None if this rank has no part in it."""
        if not program.queues_of(self.rank.rank):
            return None
        if self.rank.device.type == "cpu":
            return CpuCall(self, program)
        return GraphCall(self, program) if launch == "graph" else EagerCall(self, program)

    def load(self, program: Program) -> Any:
        """The program bound to this rig's memory."""
        buffers = {
            (rank, buffer): address
            for buffer, block in self._blocks.items()
            for rank, address in enumerate(block.addresses)
        }
        offset = 0 if has_epochs(program) else 4 * FLAGS
        assert program.flag_count <= FLAGS
        return self.executor.load(program, Addresses(buffers, tuple(base + offset for base in self._flags.addresses)))

    def close(self) -> None:
        """Release everything. Not after a failure."""
        self._backend.close()
        self._blocks.clear()
        self._backend.memory.close()
        self._control.close()


class CpuCall:
    """On a CPU: stamps and host have one clock."""

    def __init__(self, rig: Rig, program: Program) -> None:
        self._loaded = rig.load(program)
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

    def __init__(self, rig: Rig, program: Program) -> None:
        self._rig = rig
        self._stream = torch.cuda.current_stream(rig.rank.device)
        self._loaded = rig.load(program)
        self._slots = slots_of(program, rig.rank.rank)

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
    """The same, captured once and replayed."""

    def __init__(self, rig: Rig, program: Program) -> None:
        super().__init__(rig, freeze(program) if has_epochs(program) else program)
        self._graph = captured(lambda: self._loaded.start(1, self._stream), calls=1)

    def arm(self, epoch: int) -> None:
        pass

    def begin(self, epoch: int) -> None:
        self._graph.replay()
