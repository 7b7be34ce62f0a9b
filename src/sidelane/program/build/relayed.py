"""Relays: a broadcast in which the root gives each peer a part in turn, and every peer gives its parts to all others.

The bytes leave the root once, where the other variants send them once to each peer. Rank 0 is the root; ``0>1`` copies
a part of rank 1 to rank 1::

    rank 0   dma    entries | 0>1 mark 0>2 mark 0>3 mark | 0>1 mark 0>2 mark 0>3 | exit of the last part
             local            wait for each mark: exit of its part
    rank 1   dma    entries | wait: part | 1>3 1>2 | wait: part | 1>3 1>2 | exits | wait for exits of 2 and 3
    rank 2   dma    entries |      wait: part | 2>1 2>3 | wait: part ...

Exits have a queue of their own, so that nothing but marks stands between the root's copies.

*Order.* A link takes what two ranks send to the same one at half the speed each, and the root must not wait. So a peer
relays backwards: the ``d``-th after it got a part it sends to the peer ``d`` places before it, while the root has come
to the peer ``d`` places behind it. With an even number of ranks nobody then sends to where another one does (simulated,
1 GiB among four H200s: 3.1 ms, and 4.2 where peers go forwards and wait for whole rounds of the root).

The floor is ``S / B`` for S bytes over a link of B, and relaying the last parts; without relays ``(n - 1) S / B``.
Ours; kernels do the same with smaller parts (``device/relay.py``).
"""

from __future__ import annotations

import dataclasses
import math

from sidelane.program.build.flags import FlagPlan
from sidelane.program.build.moving import Transport, rotation
from sidelane.program.collective import Collective, Kind
from sidelane.program.ir import EPOCH, Command, Copy, Engine, EngineKind, Program, Queue, Signal, Wait

RELAY = "relay"
"""Name of the variant."""

PART_ALIGNMENT = 256
"""Bytes at multiples of which parts begin."""

ONE_ROUND_BYTES = 4 << 20
"""Rounds of the root, which cost signals, against the last parts, which are relayed when it has ended: as the square
root of the bytes, one for ``ONE_ROUND_BYTES``, is the best of the powers of two from 4 MiB to 1 GiB (simulated, four
H200s)."""

MOST_PARTS = 96
"""Of a broadcast: each is a copy, a mark and a signal for the host to hand over, and they have flags."""


def relay(collective: Collective, transport: Transport = Transport.PUSH, *, rounds: int | None = None) -> Program:
    """Build a broadcast.

    Args:
        collective: made by ``broadcast``.
        transport: ``push``: peers write into each other's outputs.
        rounds: parts of each peer; None for what the bytes are worth.

    Raises:
        ValueError: another collective or transport, or no rounds.
    """
    if collective.kind is not Kind.BROADCAST:
        raise ValueError(f"{RELAY}: collective (value={collective.kind}, allowed=broadcast)")
    if transport is not Transport.PUSH:
        raise ValueError(f"{RELAY}: transport (value={transport}, allowed=push: peers write into each other's outputs)")
    if rounds is None:
        rounds = worthwhile_rounds(collective)
    if rounds < 1:
        raise ValueError(f"{RELAY}: rounds (value={rounds}, allowed=1 and more)")
    return _Relay(collective, rounds).program()


def worthwhile_rounds(collective: Collective) -> int:
    """As many as are worth it, ``MOST_PARTS`` in all; 1 where there is nobody to relay to.

    >>> from sidelane.program.collective import broadcast
    >>> [worthwhile_rounds(broadcast(nbytes << 20, 4, 0)) for nbytes in (1, 16, 64, 1024)]
    [1, 2, 4, 16]
    """
    if collective.world_size <= 2:
        return 1
    most = MOST_PARTS // (collective.world_size - 1)
    return max(1, min(most, round(math.sqrt(collective.largest_buffer / ONE_ROUND_BYTES))))


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """Bytes that the root gives to ``owner`` in ``turn``, one of its rounds."""

    turn: int
    owner: int
    offset: int
    nbytes: int


class _Relay:
    def __init__(self, collective: Collective, rounds: int) -> None:
        assert collective.root is not None
        self.collective, self.root = collective, collective.root
        self.peers = list(rotation(self.root, collective.world_size))
        self.flags = FlagPlan(collective.world_size, phases=rounds)
        self.parts = _cut(collective.largest_buffer, self.peers, rounds)
        self.owners = {part.owner for part in self.parts}  # few bytes are not enough for all

    def program(self) -> Program:
        queues = [*self._of_root(), *(queue for peer in self.peers for queue in self._of_peer(peer))]
        marks = max(0, len(self.parts) - 1)
        staging = (0,) * self.collective.world_size
        return Program(self.collective, RELAY, tuple(queues), staging, self.flags.handshakes + marks)

    def _of_root(self) -> list[Queue]:
        flags, root = self.flags, self.root
        commands: list[Command] = [flags.wait_entry(peer, root) for peer in self.peers if peer in self.owners]
        announced: list[Command] = []
        for number, part in enumerate(self.parts, 1):
            commands.append(self._copy(root, part.owner, part))
            leave = flags.signal_exit(part.owner, root, part.turn)
            if number == len(self.parts):
                commands.append(leave)
            else:
                mark = flags.local(root, number - 1)
                commands.append(Signal(mark, EPOCH))
                announced += [Wait(mark, EPOCH), leave]
        dma = [Queue(root, Engine(EngineKind.DMA), tuple(commands))] if commands else []
        local = [tuple(queue) for queue in (announced, self._own()) if queue]
        return [*dma, *(Queue(root, Engine(EngineKind.LOCAL, index), queue) for index, queue in enumerate(local))]

    def _of_peer(self, rank: int) -> list[Queue]:
        flags = self.flags
        place, count = self.peers.index(rank), len(self.peers)
        others = [self.peers[(place - step) % count] for step in range(1, count)]
        movers = [peer for peer in others if peer in self.owners]
        own = [part for part in self.parts if part.owner == rank]
        commands: list[Command] = [flags.signal_entry(rank, mover) for mover in movers]
        if own:
            commands.insert(0, flags.signal_entry(rank, self.root))
            commands += [flags.wait_entry(other, rank) for other in others]
        for part in own:
            commands.append(flags.wait_exit(rank, self.root, part.turn))
            commands += [self._copy(rank, other, part) for other in others]
        if own:
            commands += [flags.signal_exit(other, rank) for other in others]
        commands += [flags.wait_exit(rank, mover) for mover in movers]
        return [Queue(rank, Engine(EngineKind.DMA), tuple(commands))] if commands else []

    def _copy(self, mover: int, partner: int, part: _Part) -> Copy:
        """From the root's input, or from where it has stored the part."""
        source = self.collective.input_span if mover == self.root else self.collective.output_span
        target = self.collective.output_span(partner, part.offset, part.nbytes)
        return Copy(target, source(mover, part.offset, part.nbytes))

    def _own(self) -> list[Command]:
        nbytes = self.collective.largest_buffer
        source, target = (
            span(self.root, 0, nbytes) for span in (self.collective.input_span, self.collective.output_span)
        )
        return [Copy(target, source)] if nbytes and source != target else []


def _cut(nbytes: int, peers: list[int], rounds: int) -> list[_Part]:
    """Parts of about the same size, in the order in which the root sends them; none is empty.

    >>> [(part.turn, part.owner, part.offset) for part in _cut(1000, [1, 2, 3], 2)]
    [(0, 1, 0), (0, 2, 256), (1, 1, 512), (1, 2, 768)]
    """
    places = [(turn, peer) for turn in range(rounds) for peer in peers]
    step = len(places) * PART_ALIGNMENT
    ends = [min(nbytes, -(-nbytes * upto // max(1, step)) * PART_ALIGNMENT) for upto in range(len(places) + 1)]
    parts = [_Part(*place, ends[i], ends[i + 1] - ends[i]) for i, place in enumerate(places)]
    return [part for part in parts if part.nbytes]
