"""One rank's executor and memory for the study of phases, and its programs ready to be called one by one.

They are those of a lane. Its executor is used directly: what calls of a lane do on top of it is Python that has nothing
to do with a program.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from sidelane import config as settings
from sidelane.config import BUILTIN
from sidelane.errors import PeerTimeoutError, SidelaneError, UnavailableError
from sidelane.execute.base import Addresses
from sidelane.memory.heap import SymmetricBlock
from sidelane.program.collective import Buffer, Collective
from sidelane.program.ir import EPOCH, Program
from sidelane.program.transform import held_by
from sidelane.session import Communicator
from sidelane_lab.baselines.candidate import captured
from sidelane_lab.baselines.reference import poison
from sidelane_lab.harness.launch import Rank
from sidelane_lab.studies.phases.split import Sample
from sidelane_lab.studies.phases.stamp import slots_of

FLAGS = 4096
"""Flags in each of two regions: programs with epochs, and frozen ones that reset their flags."""

_SETTLE_S = 50e-6  # until the stream surely waits
_LONGEST_S = 1.0


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
        config = dataclasses.replace(settings.current(), timeout_s=timeout_s, profile=BUILTIN)
        self._communicator = Communicator(device=rank.device, config=config)
        # Stamps are no part of what all executors have in common.
        self.backend = cast(Any, self._communicator.backend)
        self.executor = self.backend.executor
        self._flags = self.backend.memory.allocate(2 * FLAGS * 4)
        self._blocks: dict[str, SymmetricBlock] = {}
        self._epochs = itertools.count(1)
        self.notify_us, self.notice = 0.0, ""
        if rank.device.type != "cpu":
            self._measure_notify()

    def _measure_notify(self) -> None:
        try:
            self.notify_us = round_trip_us(self.executor.driver) / 2
            self.notice = f"a stream needs {self.notify_us:.1f} us to tell the host (half of there and back)"
        except SidelaneError as problem:
            self.notice = f"what a stream needs to tell the host counts as schedule: {problem}"

    def next_epoch(self) -> int:
        """Return the number of the next call, the same on every rank."""
        return next(self._epochs)

    def reserve(self, programs: Sequence[Program]) -> None:
        """Allocate buffers that are large enough for all of them."""
        for buffer in Buffer:
            sizes = [program.buffer_bytes(rank, buffer) for program in programs for rank in range(program.world_size)]
            if any(sizes):
                self._blocks[buffer] = self.backend.memory.allocate(max(sizes))

    def tensor(self, buffer: str, nbytes: int) -> torch.Tensor:
        """The first bytes of this rank's buffer."""
        return self._blocks[buffer].tensor[:nbytes]

    def prepare(self, program: Program, launch: str) -> CpuCall | EagerCall | None:
        """Load a program, and capture it for ``graph``; None if this rank has no part."""
        if not program.queues_of(self.rank.rank):
            return None
        frozen = launch == "graph"
        buffers = {
            (rank, buffer): address
            for buffer, block in self._blocks.items()
            for rank, address in enumerate(block.addresses)
        }
        assert program.flag_count <= FLAGS
        flags = tuple(base + 4 * FLAGS * frozen for base in self._flags.addresses)
        loaded = self.executor.load(program, Addresses(buffers, flags), captured=frozen)
        if self.rank.device.type == "cpu":
            return CpuCall(loaded)
        return GraphCall(self, loaded) if frozen else EagerCall(self, loaded)

    def close(self) -> None:
        """Release everything. Not after a failure."""
        self._communicator.close()
        self._blocks.clear()


def round_trip_us(driver: Any, trips: int = 50) -> float:
    """Return the median time in which the host writes a word for which a stream waits, and sees the stream idle.

    The stream writes a word to the host in between, like the executor's last batch. Neither half can be measured alone,
    since the clocks of host and device do not agree to a microsecond.

    Args:
        driver: driver of the device.
        trips: number of measurements.

    Raises:
        UnavailableError: the stream did not proceed.
    """
    words = driver.host_words(2)
    stream = driver.create_stream()
    taken = []
    with driver.current():
        for number in range(1, trips + 1):
            ops = driver.memory_ops()
            ops.wait(words.address, number, equal=False)
            ops.write(words.address + 4, number)
            driver.submit([driver.bind_memory_ops(ops, stream)])
            time.sleep(_SETTLE_S)
            begin = time.perf_counter_ns()
            words.array[0] = number
            while not driver.is_idle(stream):
                if time.perf_counter_ns() - begin > _LONGEST_S * 1e9:
                    raise UnavailableError("round_trip_us: a stream does not see what the host writes within a second")
            taken.append((time.perf_counter_ns() - begin) / 1e3)
        driver.destroy_stream(stream)
    return float(np.median(taken))


class CpuCall:
    """On a CPU: stamps and host have one clock. The methods are called in their order, once a call."""

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded
        self._pending: Any = None

    def arm(self, epoch: int) -> None:
        """Do nothing: threads begin with the call, in which the triggers are fired, too."""

    def begin(self, epoch: int) -> None:
        """Call it, and return when the host is done with that."""
        self._pending = self._loaded.start(epoch)

    def finish(self) -> None:
        """Return as soon as the host can know that everything has finished."""
        self._pending.wait()

    def sample(self, begin_ns: int, returned_ns: int, known_ns: int) -> Sample:
        """Return what was seen, with stamps if the program has any."""
        host, total = (returned_ns - begin_ns) / 1e3, (known_ns - begin_ns) / 1e3
        stamps = {slot: (at - begin_ns) / 1e3 for slot, at in self._pending.stamps.items()}
        return Sample.stamped(host, total, stamps, known_us=total) if stamps else Sample(host, total)


class EagerCall:
    """On a GPU: stamps are events, and the host asks whether the stream has run empty."""

    def __init__(self, rig: Rig, loaded: Any) -> None:
        self._rig = rig
        self._stream, self._place = torch.cuda.current_stream(rig.rank.device), rig.executor.driver.caller_stream()
        self._loaded = loaded
        self._slots = slots_of(loaded.program, rig.rank.rank)
        self._trigger: Any = None
        if (flag := held_by(loaded.program, rig.rank.rank)) is not None:
            self._trigger = rig.backend.bind_trigger([(loaded.addresses.flag(flag), EPOCH)], loaded)

    def arm(self, epoch: int) -> None:
        if self._trigger is not None:
            self._rig.backend.run(self._loaded, epoch, False, (), self._rig.backend.ahead)

    def begin(self, epoch: int) -> None:
        if self._trigger is None:
            self._loaded.run(epoch, self._place)
            return
        self._trigger.fire(epoch, self._place)
        self._rig.executor.order(self._rig.executor.held_stream(), self._place[0])

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
        self._graph = captured(lambda: self._loaded.run(1, rig.executor.driver.caller_stream()), calls=1)

    def arm(self, epoch: int) -> None:
        pass

    def begin(self, epoch: int) -> None:
        self._graph.replay()


Views = Callable[[str, int], torch.Tensor]
"""The first bytes of a buffer of this rank."""


def fill(collective: Collective, rank: int, views: Views, seed: int) -> None:
    """Poison this rank's output, then write its input, which may lie in it."""
    for buffer in (Buffer.OUTPUT, Buffer.INPUT):
        nbytes = collective.buffer_bytes(rank, buffer)
        if nbytes:
            poison(views(buffer, nbytes))
    span = collective.input_span(rank, 0, collective.input_bytes(rank))
    if span.nbytes:
        part = views(span.buffer, span.end)[span.offset :]
        part.copy_(_input(collective, rank, seed, part.device))


def error(collective: Collective, rank: int, views: Views, seed: int, *, own_chunk: bool) -> str | None:
    """Return what is wrong with this rank's output, by ``Collective.chunks``; None if nothing is. Waits for the device.

    Args:
        collective: the one that was run.
        rank: this process's.
        views: its buffers.
        seed: the seed of all inputs.
        own_chunk: the rank's own part must be there too; bare transfers do not copy it.
    """
    source_of = functools.cache(
        lambda source: _input(collective, source, seed, views(Buffer.OUTPUT, collective.output_bytes(rank)).device)
    )
    for chunk in collective.chunks():
        if chunk.dst_rank != rank or (chunk.src_rank == rank and not own_chunk):
            continue
        span = collective.output_span(rank, chunk.dst_offset, chunk.nbytes)
        found = views(span.buffer, span.end)[span.offset :]
        expected = source_of(chunk.src_rank)[chunk.src_offset : chunk.src_offset + chunk.nbytes]
        if not torch.equal(found, expected):
            wrong = int((found != expected).sum())
            return f"{wrong} of {chunk.nbytes} bytes from rank {chunk.src_rank} are wrong"
    return None


def _input(collective: Collective, rank: int, seed: int, device: torch.device) -> torch.Tensor:
    nbytes = collective.input_bytes(rank)
    data = torch.empty(nbytes, dtype=torch.uint8, device=device)
    generator = torch.Generator(device=device).manual_seed(64 * seed + rank)
    (data.view(torch.int64) if nbytes % 8 == 0 else data).random_(generator=generator)
    return data
