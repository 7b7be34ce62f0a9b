"""Kernels as data: collectives that one kernel runs, the counterpart of ``ir.Program`` for compute units, and launches
of the caller's own kernels. This module needs no device.

The source of a kernel holds its steps, so a :class:`KernelProgram` only names the kernel and the number of thread
blocks. Both are the same on every rank, like everything that a rank derives from an agreed call. A call with one tensor
is a list of one, whose addresses the kernel has as arguments; those of longer lists lie in a table.

In the bytes that a rank sends to another one, the tensors of a list lie behind each other, at multiples of 16 bytes;
with three parts of 100, 0 and 300 bytes from rank to rank::

    offset   | part 0 | . | part 2                  |
             0       100 112                       412
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import Any

from sidelane.fields import an, at_least, one_of, plain_text, validate
from sidelane.program.batch import Batch
from sidelane.program.collective import REDUCING, Buffer, Collective, Kind, Reduction, Span
from sidelane.program.kernel_chunks import chunks_of
from sidelane.program.shape import Variant

MOST_RANKS = 8
"""Largest number of ranks that kernels can address."""

MOST_LL_BYTES = 256 << 10
"""Bytes from rank to rank up to which data travels with its own flags; the slots limit it (``device/layout.py``)."""

MOST_BLOCK_FLAG_BYTES = 512 << 10
"""Bytes from rank to rank up to which data travels with block flags; the slots limit it. Against pushes into
symmetric outputs they gain 0.9 us of 11 there, and against pulls into ordinary outputs 4 us of 15."""

BLOCKS, MOST_BLOCKS = 64, 128
"""Thread blocks that a kernel may have: half of an H200, and for parts from ``LARGE_PART_BYTES`` on nearly all of it.
64 of them push 64 MiB in 155 us and 1 GiB in 2,354 there, 128 in 152 and 2,309; 16 are enough up to 1 MiB. Direct
reductions in two shots among two ranks may have all of them at any size (``kernels/direct.py``)."""

NARROW_BLOCKS = 10
"""Thread blocks of narrow variants: 8% of an H200. They reduce 64 MiB of four ranks for a reduce_scatter in 167 us, 8
in 171, 6 in 181, and 128 wide ones in 164 (probes: results/notes/probes.md)."""

HOST_BLOCKS = 40
"""Thread blocks that a kernel through host memory may have (``kernels/through_host.py``)."""

HOST_LL_BYTES = MOST_LL_BYTES
"""Bytes from a rank to all its peers up to which data travels with its own flags through host memory. An all-reduce of
256 KB between two H200s takes 21.6 us so, and 37 by the host kernel (results/notes/kernels.md)."""

HOST_LL_AT_ONCE_BYTES = 64 << 10
"""Bytes from a rank to its only peer up to which each block has one tile. From there on it waits for some words while
it stores others (``Protocol.LL_ONCE``)."""

LARGE_PART_BYTES = 8 << 20

LARGE_LIST_BYTES = 2 << 20
"""Bytes from rank to rank from which the kernel of a list may have ``MOST_BLOCKS``: a block waits for rows of the
table, too."""

MOST_LISTED = 4096
"""Largest number of tensors in a list that a kernel can search."""

ALIGNMENT = 16
"""Alignment in bytes of parts in staging and of inputs that peers read; otherwise kernels go element by element."""


COPIES_OWN = "copies own parts, too (value=copy_own_part=False)"
"""Reason why no kernel runs an all_to_all that leaves own parts in place: their stores cost next to nothing."""


class Protocol(StrEnum):
    """Way in which the bytes travel (docs/internals/protocols.md).

    ``ll``: into slots, every 4 bytes with a flag of their own. ``ll_once``: likewise, into one slot in host memory that
    all peers read. ``block_flags``: unchanged, into slots of their own, a flag for each block. ``relay``: as
    ``block_flags``, another part to each peer, from which all other peers get it, for broadcasts. ``push``: into the
    peers' outputs. ``stage``: into the peers' staging, for broadcasts. ``pull``: out of the peers' staging. ``reduce``:
    as ``pull``, for collectives that reduce. ``direct``: as ``reduce``, but out of the peers' inputs, and in two shots
    into their outputs. ``send``: as ``direct`` in two shots, but into the peers' staging. ``host``: as ``pull`` and
    ``reduce``, by other blocks each way, for staging in host memory.
    """

    LL = "ll"
    LL_ONCE = "ll_once"
    BLOCK_FLAGS = "block_flags"
    RELAY = "relay"
    PUSH = "push"
    STAGE = "stage"
    PULL = "pull"
    REDUCE = "reduce"
    DIRECT = "direct"
    SEND = "send"
    HOST = "host"


_DEFINITION = an(Collective, Batch)
_PROTOCOL, _BLOCKS = one_of(Protocol), at_least(1)


STAGING = (Protocol.STAGE, Protocol.PULL, Protocol.REDUCE, Protocol.SEND, Protocol.HOST)
"""Protocols that need staging."""


@dataclasses.dataclass(frozen=True)
class KernelProgram:
    """A collective, or a list of them, for one kernel. Make it with :func:`kernel_program`.

    Attributes:
        collective: collective to run, or a batch of collectives of one kind.
        variant: ``one_shot`` or ``two_shot``, one of these on few blocks, or ``two_shot_push``; a batch has the first
            two only.
        protocol: way in which the bytes travel; a batch has no ``ll``, ``relay`` or ``send``.
        blocks: largest number of thread blocks of a launch.
    """

    collective: Collective | Batch
    variant: str
    protocol: Protocol
    blocks: int

    prelaunched = False

    def __post_init__(self) -> None:
        validate(self, collective=_DEFINITION, variant=plain_text, protocol=_PROTOCOL, blocks=_BLOCKS)

    @property
    def world_size(self) -> int:
        return self.collective.world_size

    @property
    def listed(self) -> bool:
        """True for a batch, whose tensors the kernel finds in a table."""
        return isinstance(self.collective, Batch)

    @cached_property
    def parts(self) -> tuple[Collective, ...]:
        """Collectives of the program, one without a batch."""
        return self.collective.parts if isinstance(self.collective, Batch) else (self.collective,)

    def placed(self, part: int, span: Span) -> Span:
        """Translate a span of one part's ``input`` or ``output`` into a span of the program's buffer."""
        return self.collective.placed(part, span) if isinstance(self.collective, Batch) else span

    @property
    def two_shot(self) -> bool:
        """True for an all_reduce in two steps: every rank reduces a shard, and gives it to all."""
        return is_two_shot(self.variant)

    @cached_property
    def distinct(self) -> bool:
        """True if each peer gets a part of its own. Two shots of a batch share out tiles, not parts."""
        distinct = any(part.kind in (Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER) for part in self.parts)
        return distinct or (self.two_shot and not self.listed)

    @cached_property
    def reduction(self) -> Reduction | None:
        """Reduction of all parts; None for collectives that only move bytes."""
        return next((part.reduction for part in self.parts), None)

    @cached_property
    def root(self) -> int | None:
        """Root of all parts; None for collectives without one."""
        return next((part.root for part in self.parts), None)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each part that travel from one rank to another."""
        if self.two_shot and not self.listed:
            return (self.parts[0].counts[0][0],)  # of the first shard
        return tuple(
            sum(part.counts[0]) if part.kind is Kind.ALL_REDUCE else part.counts[part.root or 0][-1]
            for part in self.parts
        )

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each part in the bytes from one rank to another, and the end of the last one with its padding."""
        return tuple(accumulate((-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in self.sizes), initial=0))

    @cached_property
    def part_bytes(self) -> int:
        """Bytes from one rank to another, of all parts together; in two shots of one part, those of the first shard."""
        return max(map(operator.add, self.offsets, self.sizes), default=0) if any(self.sizes) else 0

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging that every rank needs, on top of the slots."""
        if self.protocol not in STAGING or not self.part_bytes:
            return 0
        if self.protocol is Protocol.SEND:
            return max(1, self.world_size - 1) * chunks_of(self.part_bytes, self.blocks).peer_bytes
        return self.offsets[-1] * (self.world_size if self.distinct else 1)

    def remote_buffers(self) -> frozenset[str]:
        """Return the callers' buffers that peers touch."""
        if self.protocol is Protocol.PUSH:
            return frozenset({Buffer.OUTPUT})
        read, stored = (span(0, 0, 0).buffer for span in (self.parts[0].input_span, self.parts[0].output_span))
        if self.protocol is Protocol.SEND:
            return frozenset({stored})
        if self.protocol is not Protocol.DIRECT:
            return frozenset()
        return frozenset({read, stored} if self.two_shot else {read})


@dataclasses.dataclass(frozen=True, slots=True)
class KernelCall:
    """One launch of a kernel.

    Attributes:
        kernel: kernel made by ``triton.jit``.
        name: name of the kernel in texts.
        grid: number of programs, in one to three dimensions.
        arguments: tensors and numbers, in the order of the source.
        options: constants, and options of Triton's launcher (``num_warps``, ...).
        status_words: address of this rank's host memory that the kernel's waits poll (``device/layout.py``).
    """

    kernel: Any
    name: str
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    status_words: int

    @property
    def collective(self) -> str:
        """Name of the operation in errors and in the ledger, as of programs."""
        return "kernel"

    @property
    def variant(self) -> str:
        return self.name


def kernel_program(
    collective: Collective | Batch,
    variant: str,
    *,
    symmetric_input: bool,
    symmetric_output: bool,
    through_host: bool = False,
) -> KernelProgram:
    """Choose the kernel of a collective, or of a list of collectives.

    Args:
        collective: all_gather, all_to_all, reduce_scatter or all_reduce, equal parts for all ranks; a broadcast in
            place. A batch has collectives of one kind; reductions of one operation and dtype, broadcasts of one root.
        variant: ``one_shot``, or ``two_shot`` for all_reduce; without a batch also with ``_narrow`` for reductions, and
            ``two_shot_push`` for all_reduce.
        symmetric_input: peers can read every input.
        symmetric_output: peers can write into every output.
        through_host: GPUs reach each other through host memory alone, in which arenas and staging are then.

    Raises:
        ValueError: too many ranks or tensors, parts of different sizes, or collectives of a batch that differ in more
            than their size; two shots through host memory.
    """
    program = KernelProgram(collective, variant, Protocol.BLOCK_FLAGS, BLOCKS)
    listed, parts, n = program.listed, program.parts, program.world_size
    name = collective.name if isinstance(collective, Batch) else collective.kind
    if n > MOST_RANKS:
        raise ValueError(f"{name}: ranks with variant {variant!r} (value={n}, allowed=1..{MOST_RANKS})")
    if len(parts) > MOST_LISTED:
        counts = f"value={len(parts)}, allowed=..{MOST_LISTED}"
        raise ValueError(f"{name}: tensors with variant {variant!r} ({counts})")
    different = {(part.kind, part.reduction, part.root) for part in parts}
    if len(different) > 1:
        found = "; ".join(sorted(_words(*each) for each in different))
        raise ValueError(f"{name}: variant {variant!r} runs one collective, reduction and root (value={found})")
    for number, part in enumerate(parts):
        if problem := kernel_objection(part):
            raise ValueError(f"{name}: variant {variant!r} {problem}" + (f", in number {number}" if listed else ""))
    if through_host:
        if program.two_shot:
            raise ValueError(
                f"{name}: variant through host memory (value={variant}, allowed=one_shot, one_shot_narrow)"
            )
        narrow = Variant.of(variant).narrow
        blocks = NARROW_BLOCKS if narrow else HOST_BLOCKS
        return dataclasses.replace(program, protocol=_protocol_through_host(program), blocks=blocks)
    protocol = _protocol_of(program, symmetric_input=symmetric_input, symmetric_output=symmetric_output)
    large = program.part_bytes >= (LARGE_LIST_BYTES if listed else LARGE_PART_BYTES)
    pair = protocol is Protocol.DIRECT and n == 2 and program.two_shot and not listed
    blocks = MOST_BLOCKS if large or pair or protocol is Protocol.SEND else BLOCKS
    blocks = NARROW_BLOCKS if Variant.of(variant).narrow else blocks
    return dataclasses.replace(program, protocol=protocol, blocks=blocks)


def _protocol_of(program: KernelProgram, *, symmetric_input: bool, symmetric_output: bool) -> Protocol:
    part, two_shot, listed = program.part_bytes, program.two_shot, program.listed
    if not (listed or two_shot) and part <= most_ll_bytes(program.world_size):
        return Protocol.LL
    if not listed and program.root is not None and _is_worth_relaying(part, program.world_size):
        return Protocol.RELAY
    if not two_shot and part <= MOST_BLOCK_FLAG_BYTES:
        return Protocol.BLOCK_FLAGS
    kind, in_place = program.parts[0].kind, any(each.in_place for each in program.parts)
    if kind in REDUCING:
        if Variant.of(program.variant).pushes and symmetric_output:
            return Protocol.SEND
        symmetric = symmetric_input and (symmetric_output or not two_shot)
        direct = symmetric and (listed or part % ALIGNMENT == 0)
        direct = direct and may_be_direct(kind, program.variant, part, in_place=in_place)
        return Protocol.DIRECT if direct else Protocol.REDUCE
    if kind is Kind.BROADCAST:
        return Protocol.PUSH if symmetric_output else Protocol.STAGE
    pushes = symmetric_output and not (kind is Kind.ALL_TO_ALL and in_place)
    return Protocol.PUSH if pushes else Protocol.PULL


def _protocol_through_host(program: KernelProgram) -> Protocol:
    is_small = program.root is None and program.part_bytes <= HOST_LL_BYTES // max(1, program.world_size - 1)
    if program.listed or not is_small:
        return Protocol.HOST
    to_one = program.world_size <= 2 and program.part_bytes <= HOST_LL_AT_ONCE_BYTES
    return Protocol.LL if program.distinct or to_one else Protocol.LL_ONCE


def _words(kind: Kind, reduction: Reduction | None, root: int | None) -> str:
    return f"{kind} {reduction or ''}".strip() + ("" if root is None else f" root {root}")


def kernel_objection(collective: Collective) -> str:
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
    return kind in REDUCING and part_bytes > MOST_BLOCK_FLAG_BYTES and not (kind is Kind.ALL_REDUCE and in_place)


def is_two_shot(variant: str) -> bool:
    """Return True for an all_reduce in two steps: every rank reduces a shard, and gives it to all."""
    return variant.startswith("two_shot")


def most_ll_bytes(world_size: int) -> int:
    """Return the largest part in bytes for the LL protocol: a fence less than block flags, but twice the bytes."""
    return min(MOST_LL_BYTES, _LL_BYTES_OF_A_RANK // max(1, world_size - 1))


def _is_worth_relaying(nbytes: int, world_size: int) -> bool:
    """Return True for broadcasts by block flags that peers pass on: the root sends less, the bytes take one hop more.

    >>> [_is_worth_relaying(512 << 10, world_size) for world_size in (2, 3, 4, 5, 8)]
    [False, False, False, True, True]
    """
    saved = nbytes * (world_size - 2)
    return saved > _RELAY_SAVES_BYTES and nbytes <= (world_size - 1) * MOST_BLOCK_FLAG_BYTES


_RELAY_SAVES_BYTES = 1 << 20
"""Bytes that a relay must save the root: among four, block flags take 8.6 us for 256 KB and 10.9 for 512 KB, relayed
ones 10.5 and 11.3; 1 MB takes 15.5 as pushes into outputs, relayed 14.5 (results/notes/probes.md)."""

_LL_BYTES_OF_A_RANK = 384 << 10
"""Bytes from a rank to all its peers at which the LL protocol and block flags are equally fast; four H200s
(results/notes/kernels.md)."""
