"""Ranks whose copy engines are emulated (``sdma_emulator``): all in one process, or each in its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from sdma_emulator import Actor, Engine, Memory
from worlds import check, fill, reduced

from sidelane.execute.base import Addresses
from sidelane.program.batch import Batch
from sidelane.program.collective import Buffer, Collective, Span
from sidelane.program.ir import EngineKind, Flag, Program, Queue, Reduce, Signal, Wait, describe
from sidelane_lab.sdma import PacketQueue, QueueWords, encode, fit

FLAGS, WORDS = "flags", "words"
WORD_BYTES = 1024
"""Bytes of a rank's own words: barriers of 64 queues, then the counter of ended queues, then stamps."""

ENDED_AT, STAMPS_AT = 256, 512


def address_of(rank: int, name: str) -> int:
    """Where the engines of all ranks see a buffer. The gaps between buffers are not mapped."""
    return (rank + 1 << 40) + ([*Buffer, FLAGS, WORDS].index(name) << 34)


def addresses_of(programs: Sequence[Program]) -> Addresses:
    ranks = range(programs[0].world_size)
    return Addresses(
        {(rank, buffer): address_of(rank, buffer) for rank in ranks for buffer in Buffer},
        tuple(address_of(rank, FLAGS) for rank in ranks),
    )


def words_of(rank: int) -> QueueWords:
    place = address_of(rank, WORDS)
    return QueueWords(place, ended=place + ENDED_AT, stamps=place + STAMPS_AT)


def sizes_of(programs: Sequence[Program], rank: int) -> dict[str, int]:
    """Bytes of everything that a rank has mapped for programs that take turns."""
    sizes = {str(buffer): max(program.buffer_bytes(rank, buffer) for program in programs) for buffer in Buffer}
    return sizes | {FLAGS: 4 * max(program.flag_count for program in programs), WORDS: WORD_BYTES}


class Caller:
    """One rank: invocation after invocation it fills its input, lets its engines run, and looks at its output.

    Args:
        programs: what it runs, in turn; all of one collective.
        rank: which it is.
        memory: what its engines address.
        mine: its own regions.
        invocations: how many.
        draw: decides in which order its engines take their steps.
        change: what becomes of its queues of packets, for tests of wrong ones.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        rank: int,
        memory: Memory,
        mine: Mapping[str, torch.Tensor],
        invocations: int,
        draw: random.Random,
        change: Callable[[PacketQueue], bytes] = PacketQueue.to_bytes,
    ) -> None:
        self.programs, self.rank, self.memory, self.mine = programs, rank, memory, mine
        self.invocations, self.draw, self.change = invocations, draw, change
        self.addresses = addresses_of(programs)
        self.epoch = self.submitted = 0
        self.actors: list[Actor] = []
        self.fires: list[Signal] = []

    @property
    def ended(self) -> bool:
        return self.epoch == self.invocations and not self.actors and not self.fires

    @property
    def program(self) -> Program:
        return self.programs[self.epoch % len(self.programs)]

    def step(self) -> bool:
        if not self.actors and not self.fires:
            self._begin()
            return True
        if self.fires and self.draw.random() < 0.1:
            self._fill()
            for signal in self.fires:
                self.memory.store(self.addresses.flag(signal.flag), signal.value.at(self.epoch))
            self.fires = []
            return True
        moved = any(actor.step() for actor in self.draw.sample(self.actors, len(self.actors)))
        self.actors = [actor for actor in self.actors if not actor.ended]
        if not self.actors and not self.fires:
            self._end()
        return moved or bool(self.fires)

    def blocked_at(self) -> str:
        return "; ".join(actor.blocked_at() for actor in self.actors[:3])

    def _begin(self) -> None:
        self.epoch += 1
        program = self.program
        self.fires = []
        for queue in program.queues_of(self.rank):
            if queue.engine.kind is EngineKind.CALLER:
                self.fires += [command for command in queue.commands if isinstance(command, Signal)]
            elif queue.engine.kind is EngineKind.COMPUTE:
                self.actors.append(Compute(queue, self.epoch, self.addresses, self.memory))
        if not self.fires:
            self._fill()
        for queue in encode(program, self.rank, self.addresses, words_of(self.rank), self.epoch):
            name = f"rank {self.rank} {queue.engine}"
            self.actors.append(Engine(name, self.change(queue), self.memory, self.draw))
            self.submitted += 1
        if not self.actors and not self.fires:
            self._end()

    def _fill(self) -> None:
        for part, number, tensors in self._parts():
            fill(part, self.rank, number, *tensors)

    def _end(self) -> None:
        assert self.memory.word(words_of(self.rank).ended) == self.submitted, "queues that have ended"
        for part, number, tensors in self._parts():
            check(part, self.rank, number, *tensors)

    def _parts(self) -> Iterator[tuple[Collective, int, list[torch.Tensor]]]:
        """Each collective of the definition, a number for its data, and its own input and output."""
        definition = self.program.collective
        if isinstance(definition, Collective):
            yield definition, self.epoch, [self.mine[Buffer.INPUT], self.mine[Buffer.OUTPUT]]
            return
        assert isinstance(definition, Batch)
        for index, part in enumerate(definition.parts):
            pieces = []
            for buffer in (Buffer.INPUT, Buffer.OUTPUT):
                start = definition.starts(self.rank, buffer)[index]
                pieces.append(self.mine[buffer][start : start + part.buffer_bytes(self.rank, buffer)])
            yield part, 100 * self.epoch + index, pieces


class Compute:
    """The compute units of a rank, which add what engines have brought."""

    def __init__(self, queue: Queue, epoch: int, addresses: Addresses, memory: Memory) -> None:
        self.queue, self.epoch, self.addresses, self.memory = queue, epoch, addresses, memory
        self.index = 0

    @property
    def ended(self) -> bool:
        return self.index == len(self.queue.commands)

    def step(self) -> bool:
        if self.ended:
            return False
        match self.queue.commands[self.index]:
            case Wait(flag, value, comparison):
                if not comparison.holds(self._word(flag), value.at(self.epoch)):
                    return False
            case Signal(flag, value):
                self.memory.store(self.addresses.flag(flag), value.at(self.epoch))
            case Reduce(dst, srcs, reduction):
                self._bytes(dst)[:] = reduced([torch.from_numpy(self._bytes(src)) for src in srcs], reduction).numpy()
            case command:
                raise AssertionError(f"compute units do not {describe(command)}")
        self.index += 1
        return True

    def blocked_at(self) -> str:
        return f"rank {self.queue.rank} {self.queue.engine}: {describe(self.queue.commands[self.index])}"

    def _word(self, flag: Flag) -> int:
        return self.memory.word(self.addresses.flag(flag))

    def _bytes(self, span: Span) -> np.ndarray:
        address = self.addresses.find(span.rank, span.buffer, span.offset)
        assert address is not None
        return self.memory.at(address, span.nbytes)


class World:
    """All ranks of one process."""

    def __init__(self, programs: Sequence[Program], seed: int, invocations: int = 3) -> None:
        self.programs, self.invocations = tuple(map(fit, programs)), invocations
        self.draw, self.memory = random.Random(seed), Memory()
        self.tensors: list[dict[str, torch.Tensor]] = []
        for rank in range(programs[0].world_size):
            mine = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes_of(self.programs, rank).items()}
            for name, tensor in mine.items():
                self.memory.map(address_of(rank, name), tensor.numpy())
            self.tensors.append(mine)

    def callers(self, change: Callable[[PacketQueue], bytes] = PacketQueue.to_bytes) -> list[Caller]:
        return [
            Caller(self.programs, rank, self.memory, mine, self.invocations, self.draw, change)
            for rank, mine in enumerate(self.tensors)
        ]
