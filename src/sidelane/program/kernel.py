"""Collectives that one kernel runs, as data: the counterpart of ``ir.Program`` for compute units.
This module needs no device.

The source of a kernel holds its steps, so a :class:`KernelProgram` only names the kernel and the number of thread
blocks. Both are the same on every rank, like everything that a rank derives from an agreed call.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum

from sidelane.fields import an, at_least, one_of, settle, text
from sidelane.program.collective import REDUCING, Buffer, Collective, Kind
from sidelane.program.reduce_chunks import chunks_of
from sidelane.program.variant import Variant

MOST_RANKS = 8
"""Largest number of ranks that kernels can address."""

MOST_CELL_BYTES = 256 << 10
"""Bytes from rank to rank up to which data travels with its own flags; the slots limit it (``device/layout.py``)."""

MOST_PARCEL_BYTES = 512 << 10
"""Bytes from rank to rank up to which data travels as parcels; the room for them limits it. Against pushes into
symmetric outputs they gain 0.9 us of 11 there, and against pulls into ordinary outputs 4 us of 15."""

BLOCKS, MOST_BLOCKS = 64, 128
"""Thread blocks that a kernel may have: half of an H200, and for parts from ``LARGE_PART_BYTES`` on nearly all of it.
64 of them push 64 MiB in 155 us and 1 GiB in 2,354 there, 128 in 152 and 2,309; 16 are enough up to 1 MiB. Direct
reductions in two shots among two ranks may have all of them at any size (``kernels/reduce_direct.py``)."""

NARROW_BLOCKS = 10
"""Thread blocks of narrow variants: 8% of an H200. They reduce 64 MiB of four ranks for a reduce_scatter in 167 us, 8
in 171, 6 in 181, and 128 wide ones in 164 (probes: docs/lab/probes.md)."""

LARGE_PART_BYTES = 8 << 20

ALIGNMENT = 16
"""Alignment in bytes of parts in staging and of inputs that peers read; otherwise kernels go element by element."""


COPIES_OWN = "copies own parts, too (value=copy_own_part=False)"
"""Reason why no kernel runs an all_to_all that leaves own parts in place: their stores cost next to nothing."""


class Protocol(StrEnum):
    """Way in which the bytes travel (docs/internals/protocols.md).

    ``cells``: into slots, every 4 bytes with a flag of their own. ``parcels``: unchanged, into places of their own.
    ``relay``: a parcel for each peer, from which all other peers get it, for broadcasts. ``push``: into the peers'
    outputs. ``stage``: into the peers' staging, for broadcasts. ``pull``: out of the peers' staging. ``reduce``: as
    ``pull``, for collectives that reduce. ``direct``: as ``reduce``, but out of the peers' inputs, and in two shots
    into their outputs. ``send``: as ``direct`` in two shots, but into the peers' staging.
    """

    CELLS = "cells"
    PARCELS = "parcels"
    RELAY = "relay"
    PUSH = "push"
    STAGE = "stage"
    PULL = "pull"
    REDUCE = "reduce"
    DIRECT = "direct"
    SEND = "send"


_COLLECTIVE = an(Collective)
PROTOCOL, LAUNCHED = one_of(Protocol), at_least(1)
"""Rules of the fields ``protocol`` and ``blocks``."""


STAGING = (Protocol.STAGE, Protocol.PULL, Protocol.REDUCE, Protocol.SEND)
"""Protocols that need staging."""


@dataclasses.dataclass(frozen=True, slots=True)
class KernelProgram:
    """A collective for one kernel. Make it with :func:`kernel_program`.

    Attributes:
        collective: collective to run.
        variant: ``one_shot`` or ``two_shot``, one of these on few blocks, or ``two_shot_push``.
        protocol: way in which the bytes travel.
        blocks: largest number of thread blocks of a launch.
    """

    collective: Collective
    variant: str
    protocol: Protocol
    blocks: int

    prelaunched = False

    def __post_init__(self) -> None:
        settle(self, collective=_COLLECTIVE, variant=text, protocol=PROTOCOL, blocks=LAUNCHED)

    @property
    def world_size(self) -> int:
        return self.collective.world_size

    @property
    def two_shot(self) -> bool:
        """True for an all_reduce in two steps: every rank reduces a shard, and gives it to all."""
        return is_two_shot(self.variant)

    @property
    def distinct(self) -> bool:
        """True if each peer gets a part of its own."""
        return is_distinct(self.collective.kind) or self.two_shot

    @property
    def part_bytes(self) -> int:
        """Bytes from one rank to another; for an all_reduce in two shots, those of the first shard."""
        return part_bytes_of(self.collective, self.variant)

    @property
    def total_bytes(self) -> int:
        """Size of an input in bytes; of the root's, if there is a root."""
        return self.collective.input_bytes(self.collective.root or 0)

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging that every rank needs, on top of the slots."""
        if self.protocol not in STAGING or not self.part_bytes:
            return 0
        if self.protocol is Protocol.SEND:
            return max(1, self.world_size - 1) * chunks_of(self.part_bytes, self.blocks).peer_bytes
        part = -(-self.part_bytes // ALIGNMENT) * ALIGNMENT
        return part * (self.world_size if self.distinct else 1)

    def remote_buffers(self) -> frozenset[str]:
        """Return the callers' buffers that peers touch."""
        if self.protocol is Protocol.PUSH:
            return frozenset({Buffer.OUTPUT})
        read, stored = (span(0, 0, 0).buffer for span in (self.collective.input_span, self.collective.output_span))
        if self.protocol is Protocol.SEND:
            return frozenset({stored})
        if self.protocol is not Protocol.DIRECT:
            return frozenset()
        return frozenset({read, stored} if self.two_shot else {read})


def kernel_program(
    collective: Collective, variant: str, *, symmetric_input: bool, symmetric_output: bool, blocks: int | None = None
) -> KernelProgram:
    """Choose the kernel of a collective.

    Args:
        collective: all_gather, all_to_all, reduce_scatter or all_reduce, equal parts for all ranks; a broadcast in
            place.
        variant: ``one_shot``, or ``two_shot`` for all_reduce; for reductions also with ``_narrow``, for all_reduce
        ``two_shot_push``.
        symmetric_input: peers can read the input.
        symmetric_output: peers can write into the output.
        blocks: largest number of thread blocks of a launch; None for a number that suits the size.

    Raises:
        ValueError: too many ranks, or parts of different sizes.
    """
    kind, n = collective.kind, collective.world_size
    if n > MOST_RANKS:
        raise ValueError(f"{kind}: ranks with variant {variant!r} (value={n}, allowed=1..{MOST_RANKS})")
    if problem := unfit(collective):
        raise ValueError(f"{kind}: variant {variant!r} {problem}")
    part = part_bytes_of(collective, variant)
    protocol = _protocol_of(collective, variant, symmetric_input=symmetric_input, symmetric_output=symmetric_output)
    pair = protocol is Protocol.DIRECT and n == 2 and is_two_shot(variant)
    worthwhile = MOST_BLOCKS if part >= LARGE_PART_BYTES or pair or protocol is Protocol.SEND else BLOCKS
    worthwhile = NARROW_BLOCKS if Variant.of(variant).narrow else worthwhile
    return KernelProgram(collective, variant, protocol, worthwhile if blocks is None else blocks)


def _protocol_of(collective: Collective, variant: str, *, symmetric_input: bool, symmetric_output: bool) -> Protocol:
    kind, part, two_shot = collective.kind, part_bytes_of(collective, variant), is_two_shot(variant)
    if not two_shot and part <= most_cell_bytes(collective.world_size):
        return Protocol.CELLS
    if kind is Kind.BROADCAST and _is_worth_relaying(part, collective.world_size):
        return Protocol.RELAY
    if not two_shot and part <= MOST_PARCEL_BYTES:
        return Protocol.PARCELS
    if kind in REDUCING:
        if Variant.of(variant).pushes and symmetric_output:
            return Protocol.SEND
        symmetric = symmetric_input and (symmetric_output or not two_shot)
        direct = symmetric and part % ALIGNMENT == 0
        direct = direct and may_be_direct(kind, variant, part, in_place=collective.in_place)
        return Protocol.DIRECT if direct else Protocol.REDUCE
    if kind is Kind.BROADCAST:
        return Protocol.PUSH if symmetric_output else Protocol.STAGE
    pushes = symmetric_output and not (kind is Kind.ALL_TO_ALL and collective.in_place)
    return Protocol.PUSH if pushes else Protocol.PULL


def unfit(collective: Collective) -> str:
    """Return the reason why no kernel runs a collective; empty if one does."""
    if collective.kind is Kind.BROADCAST:
        return "" if collective.in_place else "is for broadcasts in place (value=out of place)"
    if not collective.copies_own:
        return COPIES_OWN
    if collective.kind is not Kind.ALL_REDUCE and len({nbytes for row in collective.counts for nbytes in row}) > 1:
        return "needs equal parts for all ranks (value=parts that differ)"
    return ""


def may_be_direct(kind: Kind, variant: str, part_bytes: int, *, in_place: bool) -> bool:
    """Return True for reductions that read symmetric inputs in place, and stage other ones.

    Args:
        kind: kind of the collective.
        variant: name of the kernels' variant.
        part_bytes: bytes from rank to rank in one shot.
        in_place: input and output share memory.
    """
    if is_two_shot(variant):
        return True
    # An all_reduce in one shot reads all of every input: in place, a peer might have overwritten it.
    return kind in REDUCING and part_bytes > MOST_PARCEL_BYTES and not (kind is Kind.ALL_REDUCE and in_place)


def is_distinct(kind: Kind) -> bool:
    """Return True if each peer gets a part of its own in one shot."""
    return kind in (Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER)


def part_bytes_of(collective: Collective, variant: str) -> int:
    """Return the bytes from one rank to another; for a variant with two shots, those of the first shard."""
    if is_two_shot(variant):
        return collective.counts[0][0]
    if collective.kind is Kind.ALL_REDUCE:
        return sum(collective.counts[0])
    return collective.counts[collective.root or 0][-1]


def is_two_shot(variant: str) -> bool:
    """Return True for an all_reduce in two steps: every rank reduces a shard, and gives it to all."""
    return variant.startswith("two_shot")


def most_cell_bytes(world_size: int) -> int:
    """Return the largest part in bytes that is sent as cells: one fence less than parcels, but twice the bytes."""
    return min(MOST_CELL_BYTES, _CELL_BYTES_OF_A_RANK // max(1, world_size - 1))


def _is_worth_relaying(nbytes: int, world_size: int) -> bool:
    """Return True for broadcasts as parcels that peers pass on: the root sends less, and the bytes take one hop more.

    >>> [_is_worth_relaying(512 << 10, world_size) for world_size in (2, 3, 4, 5, 8)]
    [False, False, False, True, True]
    """
    saved = nbytes * (world_size - 2)
    return saved > _RELAY_SAVES_BYTES and nbytes <= (world_size - 1) * MOST_PARCEL_BYTES


_RELAY_SAVES_BYTES = 1 << 20
"""Bytes that a relay must save the root: among four, parcels take 8.6 us for 256 KB and 10.9 for 512 KB, relayed ones
10.5 and 11.3; 1 MB takes 15.5 as pushes into outputs, relayed 14.5 (docs/lab/probes.md)."""

_CELL_BYTES_OF_A_RANK = 384 << 10
"""Bytes from a rank to all its peers at which cells and parcels are equally fast; four H200s (docs/lab/kernels.md)."""
