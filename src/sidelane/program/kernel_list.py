"""Lists of tensors that one kernel runs, as data: the counterpart of ``kernel`` for a :class:`Batch`.

In the bytes that a rank sends to another one, the tensors of a call lie behind each other, at multiples of 16 bytes;
with three parts of 100, 0 and 300 bytes from rank to rank::

    place    | part 0 | . | part 2                  |
             0       100 112                       412
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from itertools import accumulate

from sidelane.fields import an, settle, text
from sidelane.program.batch import Batch
from sidelane.program.collective import Kind, Reduction
from sidelane.program.kernel import (
    ALIGNMENT,
    BLOCKS,
    LAUNCHED,
    MOST_BLOCKS,
    MOST_PARCEL_BYTES,
    MOST_RANKS,
    PROTOCOL,
    STAGING,
    KernelProgram,
    Protocol,
    is_distinct,
    is_two_shot,
    part_bytes_of,
    unfit,
)

_BATCH = an(Batch)

LARGE_LIST_BYTES = 2 << 20
"""Bytes from rank to rank from which a kernel may have ``MOST_BLOCKS``: a block waits for rows of the table, too."""


@dataclasses.dataclass(frozen=True)
class KernelListProgram:
    """Collectives of one kind for one kernel. Make it with :func:`kernel_list_program`.

    Attributes:
        collective: batch to run.
        variant: ``one_shot`` or ``two_shot``.
        protocol: way in which the bytes travel: any but ``cells``.
        blocks: largest number of thread blocks of a launch.
    """

    collective: Batch
    variant: str
    protocol: Protocol
    blocks: int

    prelaunched = False

    def __post_init__(self) -> None:
        settle(self, collective=_BATCH, variant=text, protocol=PROTOCOL, blocks=LAUNCHED)

    @property
    def world_size(self) -> int:
        return self.collective.world_size

    @property
    def two_shot(self) -> bool:
        """True for an all_reduce in two steps; see :class:`KernelProgram`."""
        return is_two_shot(self.variant)

    @cached_property
    def distinct(self) -> bool:
        """True if each peer gets a part of its own."""
        return any(is_distinct(part.kind) for part in self.collective.parts)

    @cached_property
    def reduction(self) -> Reduction | None:
        """Reduction of all parts; None for collectives that only move bytes."""
        return next((part.reduction for part in self.collective.parts), None)

    @cached_property
    def root(self) -> int | None:
        """Root of all parts; None for collectives without one."""
        return next((part.root for part in self.collective.parts), None)

    @property
    def gathers(self) -> bool:
        """True if an output has a part of every rank."""
        return self.reduction is None and self.root is None

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each part that travel from one rank to another."""
        return tuple(part_bytes_of(part, "one_shot") for part in self.collective.parts)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Offset of each part in the bytes from one rank to another, and the end of the last one."""
        return tuple(accumulate((-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in self.sizes), initial=0))

    @property
    def part_bytes(self) -> int:
        """Bytes from one rank to another, of all parts together."""
        return self.places[-1]

    @property
    def total_bytes(self) -> int:
        """Bytes of all inputs."""
        return self.part_bytes * (self.world_size if self.distinct else 1)

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging that every rank needs."""
        return self.total_bytes if self.protocol in STAGING else 0


MOST_LISTED = 4096
"""Largest number of tensors in a list that a kernel can search."""

AnyKernelProgram = KernelProgram | KernelListProgram


def kernel_list_program(
    batch: Batch, variant: str, *, symmetric_input: bool, symmetric_output: bool
) -> KernelListProgram:
    """Choose the kernel for a list.

    Args:
        batch: all_gathers, all_to_alls, reduce_scatters, all_reduces, or broadcasts in place; reductions of one
            operation and dtype, broadcasts of one root.
        variant: ``one_shot``, or ``two_shot`` for all_reduces.
        symmetric_input: peers can read every input.
        symmetric_output: peers can write into every output.

    Raises:
        ValueError: too many ranks or tensors, or collectives that differ in more than their size.
    """
    n, name = batch.world_size, batch.name
    if n > MOST_RANKS:
        raise ValueError(f"{name}: ranks with variant {variant!r} (value={n}, allowed=1..{MOST_RANKS})")
    if len(batch.parts) > MOST_LISTED:
        counts = f"value={len(batch.parts)}, allowed=..{MOST_LISTED}"
        raise ValueError(f"{name}: tensors with variant {variant!r} ({counts})")
    alike = {(part.kind, part.reduction, part.root) for part in batch.parts}
    if len(alike) > 1:
        found = "; ".join(sorted(map(_words, *zip(*alike, strict=True))))
        raise ValueError(f"{name}: variant {variant!r} runs one collective, reduction and root (value={found})")
    for number, part in enumerate(batch.parts):
        if problem := unfit(part):
            raise ValueError(f"{name}: variant {variant!r} {problem}, in number {number}")
    program = KernelListProgram(batch, variant, Protocol.PARCELS, BLOCKS)
    if program.part_bytes <= MOST_PARCEL_BYTES and not program.two_shot:
        return program
    in_place = any(part.in_place for part in batch.parts)
    if program.reduction is None:
        pushes = symmetric_output and not (program.distinct and in_place)
        protocol = Protocol.PUSH if pushes else Protocol.PULL if program.root is None else Protocol.STAGE
    else:
        whole = not (program.distinct or program.two_shot)  # every rank reads all of every input
        direct = symmetric_input and (symmetric_output or not program.two_shot) and not (whole and in_place)
        protocol = Protocol.DIRECT if direct else Protocol.REDUCE
    blocks = MOST_BLOCKS if program.part_bytes >= LARGE_LIST_BYTES else BLOCKS
    return dataclasses.replace(program, protocol=protocol, blocks=blocks)


def _words(kind: Kind, reduction: Reduction | None, root: int | None) -> str:
    return f"{kind} {reduction or ''}".strip() + ("" if root is None else f" root {root}")
