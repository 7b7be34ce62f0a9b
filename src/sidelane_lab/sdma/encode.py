"""Programs to packets: one queue of packets for each engine of a rank.

| command          | packets                                                              |
| ---------------- | -------------------------------------------------------------------- |
| copy             | a copy                                                               |
| broadcast, swap  | one of its kind                                                      |
| signal           | a fence: it writes 32 bits when everything before it has ended       |
| wait             | a poll; at the head of a prelaunched queue it is the trigger         |
| stamp            | a timestamp                                                          |
| end of the queue | an atomic add to a counter that the host watches, where there is one |

:func:`fit` comes first: it splits the moves that one packet cannot hold, and makes copies of those that do not fit.

*Order.* An engine may work on moves that follow each other at the same time (ROCr says so of copies and writes; the DMA
collectives paper, section 4.1.2, of independent copies). So a move that touches what an earlier one writes gets a
*barrier* in front: a fence to a word of the queue, and a poll for it. Linux orders its own SDMA jobs in the same way.

*Values.* A poll compares words as they are, without the wrap-around of a program's wait, and no header says whether
they are signed. So values end at 2**31.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sidelane.program import ir
from sidelane.program.collective import Span
from sidelane.program.transform import lower
from sidelane.program.wraparound import WORD_BYTES
from sidelane_lab.sdma import packets as layout
from sidelane_lab.sdma.packets import Format, Packet

if TYPE_CHECKING:
    from sidelane.execute.base import Addresses  # which imports torch; predictions do without

ENGINES = (ir.EngineKind.DMA, ir.EngineKind.LOCAL)
"""Kinds of engines whose queues become packets."""

STAMP_BYTES = 32
"""Distance between two stamps in bytes: a timestamp's address must be a multiple of it."""

POLL_INTERVAL = 4
"""Interval between two looks of a poll, in the hardware's unit; the number that ROCr and Linux use."""

_END_OF_VALUES = 1 << 31
_WHOLE_WORD = 0xFFFFFFFF
_COMPARISONS = {ir.Comparison.EQ: layout.EQUAL, ir.Comparison.GE: layout.AT_LEAST}


@dataclasses.dataclass(frozen=True, slots=True)
class QueueWords:
    """Addresses of a rank's own words, which no program names.

    Attributes:
        barriers: address of a row of 32-bit words, one for each of the rank's queues in their order, all 0.
        ended: address of a 64-bit counter to which every queue adds 1 at its end; None for none.
        stamps: address of stamp 0; None for a program without stamps.
    """

    barriers: int
    ended: int | None = None
    stamps: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PacketQueue:
    """The packets of one engine for one invocation.

    Attributes:
        rank: rank to which the engine belongs.
        engine: engine that executes them.
        packets: the packets in order.
        commands: for each packet, the index of the command of the program that it serves; None behind the last.
    """

    rank: int
    engine: ir.Engine
    packets: tuple[Packet, ...]
    commands: tuple[int | None, ...]

    def to_bytes(self) -> bytes:
        """Return the packets as the engine reads them."""
        return b"".join(packet.to_bytes() for packet in self.packets)


def fit(program: ir.Program) -> ir.Program:
    """Rewrite a program so that each of its moves is one packet.

    A move of more bytes than a packet takes is split. A swap must begin and end at multiples of 64 bytes, and the
    destinations of a broadcast must lie alike in 32; others become copies. The buffers themselves are taken to begin at
    such multiples, as symmetric memory does; :func:`encode` checks the addresses.
    """
    fitted = lower(program, {ir.Copy, ir.Broadcast, ir.Swap}, _is_aligned)
    queues = tuple(
        dataclasses.replace(queue, commands=tuple(part for command in queue.commands for part in _parts(command)))
        for queue in fitted.queues
    )
    return dataclasses.replace(fitted, queues=queues)


def _is_aligned(move: ir.Move) -> bool:
    match move:
        case ir.Swap(a, b):
            return not (a.offset | b.offset | a.nbytes) % layout.SWAP_ALIGNMENT
        case ir.Broadcast((first, second), _):
            return not (first.offset - second.offset) % layout.DESTINATIONS_ALIGNMENT
        case _:
            return True


def _parts(command: ir.Command) -> Iterator[ir.Command]:
    match command:
        case ir.Copy(dst, src):
            yield from map(ir.Copy, _split(dst, layout.MAX_COPY_BYTES), _split(src, layout.MAX_COPY_BYTES))
        case ir.Broadcast((first, second), src):
            parts = (_split(span, layout.MAX_BROADCAST_BYTES) for span in (first, second, src))
            yield from (ir.Broadcast((one, other), source) for one, other, source in zip(*parts, strict=True))
        case ir.Swap(a, b):
            yield from map(ir.Swap, _split(a, layout.MAX_COPY_BYTES), _split(b, layout.MAX_COPY_BYTES))
        case _:
            yield command


def _split(span: Span, most: int) -> list[Span]:
    """Cut a span into parts of ``most`` bytes and a rest; an empty one has no parts."""
    return [
        Span(span.rank, span.buffer, span.offset + start, min(most, span.nbytes - start))
        for start in range(0, span.nbytes, most)
    ]


def encode(
    program: ir.Program, rank: int, addresses: Addresses, words: QueueWords, epoch: int
) -> tuple[PacketQueue, ...]:
    """Encode the queues of a rank's copy engines for one invocation.

    Its other queues are left to whoever runs the program: compute units reduce, and callers signal.

    Args:
        program: program of which each move is one packet (:func:`fit`).
        rank: rank whose engines execute the packets.
        addresses: addresses of the program's buffers and flags, as the engines of this rank see them.
        words: addresses of the rank's own words.
        epoch: number of the invocation, which signals and waits hold; any for a frozen program.

    Raises:
        ValueError: a command that no packet expresses, an address that is missing or not aligned, or an epoch beyond
            what polls compare.
    """
    if addresses.has_rows:
        raise ValueError("encode: tensors that lie in rows (allowed=contiguous ones)")
    queues = [queue for queue in program.queues_of(rank) if queue.engine.kind in ENGINES]
    return tuple(
        _Encoder(queue, addresses, words, epoch, words.barriers + WORD_BYTES * index).encode()
        for index, queue in enumerate(queues)
    )


class _Encoder:
    """Encoder of one queue."""

    def __init__(self, queue: ir.Queue, addresses: Addresses, words: QueueWords, epoch: int, barrier: int) -> None:
        self.queue, self.addresses, self.words, self.epoch = queue, addresses, words, epoch
        self.barrier, self.barriers = barrier, 0
        self.read: list[range] = []  # addresses since the last barrier
        self.written: list[range] = []

    def encode(self) -> PacketQueue:
        packets: list[Packet] = []
        commands: list[int | None] = []
        for index, command in enumerate(self.queue.commands):
            try:
                found = tuple(self._packets(command))
            except ValueError as error:
                where = f"rank {self.queue.rank} {self.queue.engine} command {index} ({ir.describe(command)})"
                raise ValueError(f"encode: {where}: {error}") from None
            packets += found
            commands += [index] * len(found)
        if self.barriers:  # the next invocation's must not find this one's
            packets.append(_fence(self.barrier, 0))
        if self.words.ended is not None:
            packets.append(Packet.of(layout.ATOMIC, operation=layout.ADD_64, address=self.words.ended, value=1))
        commands += [None] * (len(packets) - len(commands))
        return PacketQueue(self.queue.rank, self.queue.engine, tuple(packets), tuple(commands))

    def _packets(self, command: ir.Command) -> Iterator[Packet]:
        match command:
            case ir.Copy() | ir.Broadcast() | ir.Swap():
                packet = self._move(command)
                yield from self._barrier(command)
                yield packet
            case ir.Signal(flag, value, ir.SignalOp.SET):
                yield _fence(self.addresses.flag(flag), self._number(value))
            case ir.Wait(flag, value, comparison):
                if flag.rank != self.queue.rank:
                    raise ValueError(f"waits on a flag of another rank (value={flag.rank}, allowed={self.queue.rank})")
                yield _poll(self.addresses.flag(flag), self._number(value), _COMPARISONS[comparison])
            case ir.Stamp(slot):
                if self.words.stamps is None:
                    raise ValueError("words.stamps (value=None, allowed=an address)")
                yield Packet.of(layout.TIMESTAMP, address=self.words.stamps + STAMP_BYTES * slot)
            case _:
                raise ValueError("no packet does that (allowed=copy, broadcast, swap, wait, stamp, signal that sets)")

    def _move(self, move: ir.Move) -> Packet:
        format, operands = _operands(move)
        sizes = {span.nbytes for span in operands.values()}
        if len(sizes) != 1:
            raise ValueError(f"operands differ in size (value={sorted(sizes)} bytes)")
        return Packet.of(format, nbytes=sizes.pop(), **{name: self._address(span) for name, span in operands.items()})

    def _barrier(self, move: ir.Move) -> Iterator[Packet]:
        """Yield a barrier if the move touches what earlier ones may still write, or writes what they may still read."""
        read = [self._range(span) for span in ir.reads(move)]
        written = [self._range(span) for span in ir.writes(move)]
        if _meet(read, self.written) or _meet(written, self.written) or _meet(written, self.read):
            self.barriers += 1
            yield _fence(self.barrier, self.barriers)
            yield _poll(self.barrier, self.barriers, layout.EQUAL)
            self.read, self.written = [], []
        self.read += read
        self.written += written

    def _range(self, span: Span) -> range:
        address = self._address(span)
        return range(address, address + span.nbytes)

    def _address(self, span: Span) -> int:
        address = self.addresses.find(span.rank, span.buffer, span.offset)
        if address is None:
            raise ValueError(f"no address for the {span.buffer} of rank {span.rank}")
        return address

    def _number(self, value: ir.Value) -> int:
        number = value.at(self.epoch)
        if not 0 <= number < _END_OF_VALUES:
            raise ValueError(f"value of the flag (value={number}, allowed=0..{_END_OF_VALUES - 1}: polls do not wrap)")
        return number


def _operands(move: ir.Move) -> tuple[Format, dict[str, Span]]:
    """Return the kind of packet of a move, and the span of each of its addresses."""
    match move:
        case ir.Copy(dst, src):
            return layout.COPY, {"dst": dst, "src": src}
        case ir.Broadcast((first, second), src):
            return layout.BROADCAST, {"dst": first, "dst2": second, "src": src}
        case ir.Swap(a, b):
            return layout.SWAP, {"a": a, "b": b}


def _fence(address: int, value: int) -> Packet:
    return Packet.of(layout.FENCE, address=address, value=value)


def _poll(address: int, value: int, comparison: int) -> Packet:
    return Packet.of(
        layout.POLL,
        address=address,
        comparison=comparison,
        value=value,
        mask=_WHOLE_WORD,
        interval=POLL_INTERVAL,
        retries=layout.FOREVER,
    )


def _meet(some: list[range], others: list[range]) -> bool:
    return any(a.start < b.stop and b.start < a.stop for a in some for b in others)
