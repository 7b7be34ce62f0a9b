"""SDMA engines of gfx942 that execute the raw bytes of their queues in host memory.

Written from the public headers (docs/guide/amd.md names them) and sharing no code with ``sidelane_lab.sdma``: a
mistake in the layout of a packet must be made twice to go unnoticed. What is not published is taken at its worst:

- Moves of one queue that follow each other overlap, in pieces of any size and order; a fence, an atomic and a
  timestamp wait for all of them, and a poll for none.
- A move reads and writes at different times, so that whoever does not wait for it sees old bytes or halves.

Whatever a driver would not let pass, or the hardware would do something unknown with, is refused by name.
"""

from __future__ import annotations

import bisect
import random
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sidelane.memory.record import full_fence

Bytes = npt.NDArray[np.uint8]

COPY_LIMIT = 0x3FFFFFFF  # of ROCr for gfx940 and later
SWAP_LIMIT = 0x3FFFFFE0
BROADCAST_LIMIT = 1 << 20
IN_FLIGHT = 6


class PacketError(ValueError):
    """Bytes that are no packet, or one that must not be submitted."""


class MemoryFaultError(PacketError):
    """A packet touches memory that is not mapped."""


class PollTimeoutError(TimeoutError):
    """A poll was not satisfied in time."""


class Memory:
    """Memory that engines can address: regions of host memory at addresses of one's own choice."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._regions: list[Bytes] = []

    def map(self, address: int, region: Bytes) -> None:
        place = bisect.bisect(self._bases, address)
        self._bases.insert(place, address)
        self._regions.insert(place, region)

    def at(self, address: int, nbytes: int) -> Bytes:
        place = bisect.bisect(self._bases, address) - 1
        offset = address - self._bases[place] if place >= 0 else -1
        if offset < 0 or offset + nbytes > len(self._regions[place]):
            raise MemoryFaultError(f"bytes {address:#x} to {address + nbytes:#x} are not mapped")
        return self._regions[place][offset : offset + nbytes]

    def word(self, address: int) -> int:
        return int(self.at(address, 4).view(np.uint32)[0])

    def store(self, address: int, value: int, nbytes: int = 4) -> None:
        """Store a number at once, as a device does that writes an aligned word."""
        self.at(address, nbytes).view(np.uint32 if nbytes == 4 else np.uint64)[0] = value


class Actor(Protocol):
    """Somebody who takes small steps."""

    ended: bool

    def step(self) -> bool:
        """Take a step; False if nothing can be done for now."""
        ...

    def blocked_at(self) -> str:
        """Return the poll for which the queue waits, in words."""
        ...


class Engine:
    """One engine with one queue."""

    def __init__(self, name: str, data: bytes, memory: Memory, draw: random.Random) -> None:
        if len(data) % 4:
            raise PacketError(f"{name}: {len(data)} bytes are not whole words")
        self.name, self.memory, self.draw = name, memory, draw
        self.words = list(struct.unpack(f"<{len(data) // 4}I", data))
        self.place = 0
        self.flying: list[Iterator[None]] = []
        self.room = draw.randint(1, IN_FLIGHT)

    @property
    def ended(self) -> bool:
        return self.place == len(self.words) and not self.flying

    def append(self, data: bytes) -> None:
        """Append packets that are submitted later, behind everything so far."""
        self.words += struct.unpack(f"<{len(data) // 4}I", data)

    def step(self) -> bool:
        """One small act, drawn at random: the next packet, or a bit of a move that is under way."""
        choice = self.draw.randrange(len(self.flying) + 1)
        if choice == len(self.flying) and self._next():
            return True
        if not self.flying:
            return False
        move = self.flying[self.draw.randrange(len(self.flying))]
        if next(move, True) is True:
            self.flying.remove(move)
        return True

    def blocked_at(self) -> str:
        if self.place == len(self.words):
            return f"{self.name} has ended"
        if self._word(0) & 0xFF != 8:
            return f"{self.name} at word {self.place}"
        address, value = self._long(1), self._word(3)
        found = self.memory.word(address)
        return f"{self.name} at word {self.place} polls {address:#x} for {value}, which holds {found}"

    def _word(self, index: int) -> int:
        if self.place + index >= len(self.words):
            raise PacketError(f"{self.name} at word {self.place}: the queue ends inside a packet")
        return self.words[self.place + index]

    def _long(self, index: int) -> int:
        return self._word(index) | self._word(index + 1) << 32

    def _next(self) -> bool:
        """Begin the next packet; False if it has to wait."""
        if self.place == len(self.words):
            return False
        head = self._word(0)
        operation, suboperation = head & 0xFF, head >> 8 & 0xFF
        execute = HANDLERS.get((operation, suboperation))
        if execute is None:
            raise self._wrong(f"unknown operation {operation}/{suboperation}")
        length = execute(self, head)
        if length:
            self.place += length
        return bool(length)

    def _wrong(self, text: str) -> PacketError:
        return PacketError(f"{self.name} at word {self.place}: {text}")

    def _demand(self, holds: bool, text: str) -> None:
        if not holds:
            raise self._wrong(text)

    # Moves. Each returns the length of its packet in words, 0 if there is no room for it yet.

    def _begin(self, move: Iterator[None], length: int) -> int:
        if len(self.flying) >= self.room:
            return 0
        self.flying.append(move)
        return length

    def copy(self, head: int) -> int:
        broadcast = head >> 27 & 1
        length = 9 if broadcast else 7
        self._demand(head & 0xF7FF0000 == 0, "reserved bits of a copy's header")
        self._word(length - 1)
        nbytes = self._count(COPY_LIMIT if not broadcast else BROADCAST_LIMIT)
        self._demand(self._word(2) == 0, "parameters of a copy")
        source, targets = self._long(3), [self._long(5)] + ([self._long(7)] if broadcast else [])
        self._demand(len({target % 32 for target in targets}) == 1, "destinations that lie differently in 32 bytes")
        return self._begin(self._copies(source, targets, nbytes), length)

    def swap(self, head: int) -> int:
        self._demand(head >> 16 == 0 and self._word(2) == 0, "parameters of a swap")
        nbytes, a, b = self._count(SWAP_LIMIT), self._long(3), self._long(5)
        self._demand(a % 64 == b % 64 == nbytes % 64 == 0, "a swap that is not aligned to 64 bytes")
        self._demand(abs(a - b) >= nbytes, "a swap of ranges that overlap")
        return self._begin(self._swaps(a, b, nbytes), 7)

    def _count(self, limit: int) -> int:
        count = self._word(1)
        self._demand(count >> 30 == 0, "reserved bits of a count")
        self._demand(count + 1 <= limit, f"{count + 1} bytes in one command (at most {limit})")
        return count + 1

    def _copies(self, source: int, targets: Sequence[int], nbytes: int) -> Iterator[None]:
        memory, read = self.memory, self.memory.at(source, nbytes)
        for target in targets:
            memory.at(target, nbytes)
            if abs(source - target) < nbytes:
                raise self._wrong("a copy of ranges that overlap")

        def move() -> Iterator[None]:
            for start, end in self._pieces(nbytes):
                piece = read[start:end].copy()
                yield
                for target in targets:
                    memory.at(target + start, end - start)[:] = piece
                    yield

        return move()

    def _swaps(self, a: int, b: int, nbytes: int) -> Iterator[None]:
        first, second = self.memory.at(a, nbytes), self.memory.at(b, nbytes)

        def move() -> Iterator[None]:
            for start, end in self._pieces(nbytes, 64):
                one, other = first[start:end].copy(), second[start:end].copy()
                yield
                second[start:end] = one
                yield
                first[start:end] = other
                yield

        return move()

    def _pieces(self, nbytes: int, unit: int = 1) -> list[tuple[int, int]]:
        """Cut a move into pieces of random sizes, in random order."""
        units = -(-nbytes // unit)
        cuts = sorted({self.draw.randrange(1, units) * unit for _ in range(self.draw.randint(0, 3)) if units > 1})
        pieces = list(zip([0, *cuts], [*cuts, nbytes], strict=True))
        self.draw.shuffle(pieces)
        return pieces

    # What waits for every move before it.

    def fence(self, head: int) -> int:
        self._demand(head >> 16 == 0, "reserved bits of a fence")
        address, value = self._long(1), self._word(3)
        self._demand(address % 4 == 0, "a fence that is not aligned to 4 bytes")
        self.memory.at(address, 4)
        if self.flying:
            return 0
        full_fence()
        self.memory.store(address, value)
        return 4

    def atomic(self, head: int) -> int:
        self._demand(head >> 16 == 47 << 9, "an atomic that does not add to 64 bits")
        address, value = self._long(1), self._long(3)
        self._demand(self._long(5) == 0 and self._word(7) == 0, "operands of an atomic that adds")
        self._demand(address % 8 == 0, "an atomic that is not aligned to 8 bytes")
        counter = self.memory.at(address, 8).view(np.uint64)
        if self.flying:
            return 0
        full_fence()
        counter[0] = (int(counter[0]) + value) % (1 << 64)
        return 8

    def timestamp(self, head: int) -> int:
        self._demand(head >> 16 == 0, "reserved bits of a timestamp")
        address = self._long(1)
        self._demand(address % 32 == 0, "a timestamp that is not aligned to 32 bytes")
        self.memory.at(address, 8)
        if self.flying:
            return 0
        self.memory.store(address, time.monotonic_ns(), 8)
        return 3

    # What waits for no move.

    def poll(self, head: int) -> int:
        self._demand(head >> 31 == 1, "a poll of a register")
        self._demand(head >> 16 & 0xFFF == 0, "reserved bits of a poll")
        self._demand(self._word(5) >> 16 == 0xFFF, "a poll that gives up")
        address, value, mask = self._long(1), self._word(3), self._word(4)
        self._demand(address % 4 == 0, "a poll that is not aligned to 4 bytes")
        comparison = head >> 28 & 7
        self._demand(comparison in (3, 5), f"comparison {comparison}")
        # No header says whether words are signed.
        self._demand(value < 1 << 31, "a value whose sign matters")
        found = self.memory.word(address) & mask
        if not (found == value if comparison == 3 else found >= value):
            return 0
        full_fence()
        return 6

    def nothing(self, head: int) -> int:
        self._demand(head >> 30 == 0, "reserved bits of a nop")
        self._word(head >> 16)
        return 1 + (head >> 16)


HANDLERS: dict[tuple[int, int], Callable[[Engine, int], int]] = {
    (0, 0): Engine.nothing,
    (1, 0): Engine.copy,
    (1, 9): Engine.swap,
    (5, 0): Engine.fence,
    (8, 0): Engine.poll,
    (10, 0): Engine.atomic,
    (13, 2): Engine.timestamp,
}


def run_together(actors: Sequence[Actor], draw: random.Random, *, timeout_s: float = 0.0) -> None:
    """Let actors take steps in random order until all have ended.

    Raises:
        PollTimeoutError: nobody could do anything for ``timeout_s`` seconds; with 0, once nobody can.
    """
    waiting = [actor for actor in actors if not actor.ended]
    last = time.monotonic()
    while waiting:
        moved = False
        # Whoever is drawn takes several steps, so that some get far ahead of others.
        for actor in draw.sample(waiting, len(waiting)):
            for _ in range(draw.choice((1, 1, 2, 30))):
                if actor.ended or not actor.step():
                    break
                moved = True
        waiting = [actor for actor in waiting if not actor.ended]
        if moved:
            last = time.monotonic()
        elif time.monotonic() - last >= timeout_s:
            raise PollTimeoutError("; ".join(actor.blocked_at() for actor in waiting[:5]))
        else:
            time.sleep(0)
